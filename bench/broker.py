"""What two accounts and republish cost, against a bare nats-server in the same run.

    send_ratio      confirmed publishes per second, 8 publishers through the service import / 8 in one bare account
    live_p50_ratio  publish to live copy, republish plus stream import / stream plus core subscription, at the median

Run it with `--json` for one line of figures. Both sides use the same client, payload, headers and storage settings.
The steward runs as its own process, as it does in a space that is up.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from measuring import bare_server, bare_stream, median_ratio, options, pairs, report
from tidings.nats import aio
from tidings.nats.aio import Connection
from tidings.wire.message import new_id
from tidings_testing.processes import steward_child
from tidings_testing.real_space import real_space

PUBLISHERS = 8
IN_FLIGHT = 16
SAMPLES = 2_000
BODY = b'{"text":"' + b"x" * 320 + b'"}'
SIGNATURE = "A" * 86

Send = Callable[[], Awaitable[None]]


async def confirmed(client: Any, subject: str) -> None:
    headers = {"Nats-Msg-Id": new_id(), "Td-Sig": SIGNATURE}
    reply = await client.request(subject, BODY, timeout=10, headers=headers)
    if b'"seq"' not in reply.data:
        raise RuntimeError(f"not confirmed: {reply.data!r}")


async def throughput(clients: list[tuple[Any, str]], seconds: float) -> float:
    """Confirmed publishes per second with IN_FLIGHT requests open on every connection."""
    sent = 0
    end = time.perf_counter() + seconds

    async def worker(client: Any, subject: str) -> None:
        nonlocal sent
        while time.perf_counter() < end:
            await confirmed(client, subject)
            sent += 1

    started = time.perf_counter()
    await asyncio.gather(*(worker(c, s) for c, s in clients for _ in range(IN_FLIGHT)))
    return sent / (time.perf_counter() - started)


async def live_p50(publisher: Any, subject: str, reader: Any, live: str) -> float:
    """Median milliseconds from publish to the copy in the reader's hands, one message at a time."""
    arrived: asyncio.Queue[float] = asyncio.Queue()

    async def take(_message: Any) -> None:
        arrived.put_nowait(time.perf_counter())

    subscription = await reader.subscribe(live, cb=take)
    await reader.flush()
    times = []
    for _ in range(SAMPLES):
        started = time.perf_counter()
        await confirmed(publisher, subject)
        times.append((await asyncio.wait_for(arrived.get(), 10) - started) * 1000)
    await subscription.unsubscribe()
    return statistics.median(times)


async def bare_client(url: str) -> Connection:
    """The same client class on both sides, so that only the broker's work differs."""
    return await aio.connect(url)


async def main() -> None:
    chosen = options(__doc__ or "")
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url = await stack.enter_async_context(bare_server())
        await bare_stream(url)
        space = await stack.enter_async_context(real_space(Path(folder) / "home", budget=4 * 1024**3, steward=False))
        await stack.enter_async_context(steward_child(space.home, ttl=3.0))
        ours, bare = [], []
        for number in range(PUBLISHERS):
            await space.add(f"agent{number}")
            agent = await stack.enter_async_context(space.agent(f"agent{number}"))
            ours.append((agent.connection, space.subjects.chat(agent.id, "general")))
            client = await bare_client(url)
            stack.push_async_callback(client.close)
            bare.append((client, f"bare.agent{number}.general"))
        sends = await pairs(
            lambda: throughput(ours, chosen.seconds), lambda: throughput(bare, chosen.seconds), chosen.pairs
        )
        lives = await pairs(
            lambda: live_p50(*ours[0], ours[1][0], space.subjects.live_chat("general")),
            lambda: live_p50(*bare[0], bare[1][0], "bare.*.general"),
            chosen.pairs,
        )
    figures = {
        "send_ratio": round(median_ratio(*sends), 3),
        "live_p50_ratio": round(median_ratio(*lives), 3),
        "send_per_s": round(statistics.median(sends[0])),
        "send_bare_per_s": round(statistics.median(sends[1])),
        "live_p50_ms": round(statistics.median(lives[0]), 3),
        "live_bare_p50_ms": round(statistics.median(lives[1]), 3),
        "pairs": chosen.pairs,
    }
    rows = [
        ("confirmed publishes/s, two accounts", f"{figures['send_per_s']:,}"),
        ("confirmed publishes/s, bare", f"{figures['send_bare_per_s']:,}"),
        ("send_ratio (aim >= 0.6)", str(figures["send_ratio"])),
        ("live p50, republish + import", f"{figures['live_p50_ms']} ms"),
        ("live p50, bare core subscription", f"{figures['live_bare_p50_ms']} ms"),
        ("live_p50_ratio (aim <= 1.6)", str(figures["live_p50_ratio"])),
    ]
    report("broker: two accounts and republish against a bare server", rows, figures, as_json=chosen.json)


if __name__ == "__main__":
    asyncio.run(main())
