"""Durable fan-out on Spark against a publisher that stores one message per copy, and what it grows with.

    python bench/deliver.py --json [--messages 50000] [--channels 20] [--members 50]
    python bench/deliver.py --json --growth --commits 10000     what grows too: some minutes more

Signed messages are put into the log of a real space while the job waits; then it delivers them, warm, and the time
until everything owed was delivered is taken, payments included (`fanout.py`). The baseline writes messages of the same
text as single copies to subjects of the same broker through a plain socket, with one acknowledgement each and thousands
in flight, before and after.

repeated_ratio, prose_ratio, random_ratio   deliveries per second / copies per second of the baseline, same text
prose_deliveries_per_s
read_per_s        prose: deliveries per second until they are read, delivering and then reading every mailbox with its
                  owner's credential: pulled, blocks fetched where a frame only names them, opened, acknowledged
                  (`reading.py`). `readers_per_s` is the reading alone, by one process
growth_members    time at 1,000 members a channel / time at 50, same messages (`--growth`)
growth_messages   time per message of 200,000 / of 20,000 (`--growth`)
commit_growth     cost of batch 10,000 in the ledger over batch 100: `bench/ledger.py` (`--commits 10000`)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import texts
from fanout import Delivery, Fanout, People, fanout
from measuring import note, report
from tidings.delivery.session import SessionSettings, start_session, stop_session

WARM = 15_000
#: of the growth in members: few channels, so that a thousand members in each are quickly made
GROWTH_CHANNELS = 4
BARS = {
    "prose_ratio": ">= 8",
    "random_ratio": ">= 4",
    "prose_deliveries_per_s": "1,000,000",
    "growth_members": "<= 3",
    "growth_messages": "<= 1.2",
    "commit_growth": "<= 1.5",
}


async def ratios(bench: Fanout, people: People, messages: int) -> dict[str, Any]:
    """Each text, with the baseline before and after it."""
    figures: dict[str, Any] = {}
    for name, text in texts.TEXTS.items():
        before = await bench.one_per_copy(people, text())
        done = await bench.deliver(people, text(), messages)
        if name == "prose":
            read, seconds = await bench.read(people)
            note(f"  {read:,} read in {seconds:.1f} s")
            if read != done.deliveries:
                raise RuntimeError(f"{done.deliveries:,} were delivered and {read:,} read")
            figures["prose_deliveries_per_s"] = round(done.per_s)
            figures["read_per_s"] = round(read / (done.seconds + seconds))
            figures["readers_per_s"] = round(read / seconds)
        after = await bench.one_per_copy(people, text())
        note(f"{name}: {done.per_s:,.0f} a second, one message per copy {before:,.0f} and {after:,.0f}")
        figures[f"{name}_ratio"] = round(done.per_s / ((before + after) / 2), 2)
        figures[f"{name}_copies_per_s"] = round((before + after) / 2)
    return figures


async def around(bench: Fanout, small: tuple[People, int], large: tuple[People, int]) -> tuple[float, Delivery]:
    """(people, messages): mean seconds of the small one, which is taken before and after the large one, and that."""
    before = await bench.deliver(small[0], texts.prose(), small[1])
    done = await bench.deliver(large[0], texts.prose(), large[1])
    after = await bench.deliver(small[0], texts.prose(), small[1])
    return (before.seconds + after.seconds) / 2, done


async def growth(bench: Fanout, people: People, chosen: argparse.Namespace) -> dict[str, float]:
    few, many = await around(bench, (people, chosen.few), (people, chosen.many))
    groups = [await bench.people(GROWTH_CHANNELS, members) for members in (chosen.members, chosen.crowd)]
    for group in groups:
        await bench.deliver(group, texts.prose(), chosen.growth_messages // 10)
    small, large = groups
    usual, crowd = await around(bench, (small, chosen.growth_messages), (large, chosen.growth_messages))
    return {
        "growth_messages": round(many.seconds / chosen.many / (few / chosen.few), 2),
        "growth_members": round(crowd.seconds / usual, 2),
        "crowd_deliveries_per_s": round(crowd.per_s),
    }


async def measure(spark: Any, root: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    async with fanout(spark, root) as bench:
        people = await bench.people(chosen.channels, chosen.members, mailboxes=True)
        for _ in range(2):  # both workers of both kinds, warm
            await bench.deliver(people, texts.prose(), min(WARM, chosen.messages))
        figures = await ratios(bench, people, chosen.messages)
        return figures | (await growth(bench, people, chosen) if chosen.growth else {})


def commit_growth(commits: int) -> dict[str, float]:
    """What `bench/ledger.py` says, a process of its own."""
    ledger = Path(__file__).with_name("ledger.py")
    note(f"the ledger, {commits:,} batches")
    said = subprocess.run(
        [sys.executable, ledger, "--json", "--commits", str(commits)], stdout=subprocess.PIPE, check=True, timeout=1_800
    )
    return {"commit_growth": json.loads(said.stdout.splitlines()[-1])["commit_growth"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--channels", type=int, default=20)
    parser.add_argument("--members", type=int, default=50, help="of each channel")
    parser.add_argument("--growth", action="store_true", help="measure growth_members and growth_messages")
    parser.add_argument("--growth-messages", type=int, default=10_000, help="for growth_members")
    parser.add_argument("--crowd", type=int, default=1_000, help="members, for growth_members")
    parser.add_argument("--few", type=int, default=20_000, help="messages, for growth_messages")
    parser.add_argument("--many", type=int, default=200_000, help="messages, for growth_messages")
    parser.add_argument("--commits", type=int, default=0, help="measure commit_growth over so many batches")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        spark = start_session(SessionSettings(root / "spark", master="local[2]"))
        try:
            figures = asyncio.run(measure(spark, root, chosen))
        finally:
            stop_session(spark)
    if chosen.commits:
        figures |= commit_growth(chosen.commits)
    figures |= {name: getattr(chosen, name) for name in ("messages", "channels", "members")}
    rows = [(f"{name} (aim {BARS[name]})" if name in BARS else name, f"{value:,}") for name, value in figures.items()]
    report("Durable fan-out", rows, figures, as_json=chosen.json)


if __name__ == "__main__":
    main()
