"""What a second executor is worth: deliveries per second on a real standalone cluster of Spark, with one and with two.

    python bench/executors.py --json [--messages 20000] [--channels 20] [--members 50] [--runs 3]

Two workers of one core each (`tests/standalone_spark.py`); `spark.cores.max` says how many the application gets. The
driver, the broker, the steward and both executors share the cores of this machine.

executors_gain        deliveries per second with two executors / with one
one_executor_per_s, two_executors_per_s
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import texts
from fanout import fanout
from measuring import report
from standalone_spark import packed, standalone_spark
from tidings.delivery.session import SessionSettings, start_session, stop_session

WARM = 2_000


async def rates(chosen: argparse.Namespace, root: Path) -> list[float]:
    """Deliveries per second of each run, in an application with so many executors."""
    more = {
        "spark.cores.max": str(chosen.executors),
        "spark.executor.cores": "1",
        "spark.submit.pyFiles": str(packed(root / "tidings.zip", {})),
    }
    spark = start_session(SessionSettings(work=root / "work", master=chosen.master, more=more))
    try:
        async with fanout(spark, root) as bench:
            people = await bench.people(chosen.channels, chosen.members)
            await bench.deliver(people, texts.prose(), WARM)
            runs = [await bench.deliver(people, texts.prose(), chosen.messages) for _ in range(chosen.runs)]
    finally:
        stop_session(spark)
    return [run.per_s for run in runs]


def in_a_process(executors: int, chosen: argparse.Namespace, environment: dict[str, str]) -> list[float]:
    """One application after the other, each with a driver of its own."""
    command = [sys.executable, __file__, "--executors", str(executors), "--master", chosen.master]
    for name in ("messages", "channels", "members", "runs"):
        command += [f"--{name}", str(getattr(chosen, name))]
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    return [float(each) for each in json.loads(done.stdout.splitlines()[-1])]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--channels", type=int, default=20)
    parser.add_argument("--members", type=int, default=50)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--executors", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--master", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    chosen = options()
    if chosen.executors:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(asyncio.run(rates(chosen, Path(folder)))))
        return
    with tempfile.TemporaryDirectory() as folder, standalone_spark(Path(folder) / "spark") as cluster:
        chosen.master = cluster.master
        one, two = (statistics.median(in_a_process(count, chosen, cluster.environment)) for count in (1, 2))
    figures = {
        "executors_gain": round(two / one, 2),
        "one_executor_per_s": round(one),
        "two_executors_per_s": round(two),
        "cores": os.cpu_count(),
    }
    rows = [
        ("one executor", f"{figures['one_executor_per_s']:,} deliveries/s"),
        ("two executors", f"{figures['two_executors_per_s']:,} deliveries/s"),
        (f"gain, with {figures['cores']} cores in all", str(figures["executors_gain"])),
    ]
    report("executors: what a second one is worth", rows, figures, as_json=chosen.json)


if __name__ == "__main__":
    main()
