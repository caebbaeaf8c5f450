"""What the library costs on the live path, signing and verifying included, against bare NATS in the same run.

p50_ratio, p95_ratio   endpoint send to endpoint receive / `js.publish` to a core subscription, one at a time
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import nats

import tidings
from measuring import bare_server, bare_stream, median_ratio, options, pairs, report
from tidings.wire.message import new_id
from tidings_testing.real_space import real_space

SAMPLES = 2_000
TEXT = "x" * 200
#: when the last message was in the application's hands
ARRIVED: list[float] = []


async def endpoint_times(sender: tidings.DirectAgent, reader: tidings.DirectAgent) -> list[float]:
    times = []
    for _ in range(SAMPLES):
        started = time.perf_counter()
        await sender.send("general", TEXT)
        message = await reader.next_message(10)
        times.append((ARRIVED.pop() - started) * 1000)
        await message.ack()
    return times


async def bare_times(publisher: Any, reader: Any) -> list[float]:
    arrived: asyncio.Queue[float] = asyncio.Queue()

    async def take(_message: Any) -> None:
        arrived.put_nowait(time.perf_counter())

    subscription = await reader.subscribe("bare.*.general", cb=take)
    await reader.flush()
    await asyncio.sleep(0.1)  # nats-py's flush does not wait for a subscription that is still queued
    body, js, times = b"x" * 420, publisher.jetstream(), []
    for _ in range(SAMPLES):
        started = time.perf_counter()
        await js.publish("bare.ada.general", body, headers={"Nats-Msg-Id": new_id(), "Td-Sig": "A" * 86})
        times.append((await asyncio.wait_for(arrived.get(), 10) - started) * 1000)
    await subscription.unsubscribe()
    return times


async def main() -> None:
    chosen = options(__doc__ or "")
    percentiles: dict[str, list[float]] = {"ours": [], "bare": []}
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url = await stack.enter_async_context(bare_server())
        await bare_stream(url)
        clients = [await nats.connect(url) for _ in range(2)]
        for client in clients:
            stack.push_async_callback(client.close)
        space = await stack.enter_async_context(real_space(Path(folder) / "home", budget=1024**3))
        ends = []
        for name in ("ada", "bob"):
            await space.add(name)
            endpoint = tidings.connect("main", name=name, home=space.home.home)
            ends.append(await stack.enter_async_context(endpoint))
        await ends[1].join("general")
        ends[1].on("message", lambda _message: ARRIVED.append(time.perf_counter()))

        async def ours() -> float:
            times = await endpoint_times(*ends)
            percentiles["ours"].append(statistics.quantiles(times, n=20)[18])
            return statistics.median(times)

        async def bare() -> float:
            times = await bare_times(*clients)
            percentiles["bare"].append(statistics.quantiles(times, n=20)[18])
            return statistics.median(times)

        medians = await pairs(ours, bare, chosen.pairs)
    figures = {
        "p50_ratio": round(median_ratio(*medians), 3),
        "p95_ratio": round(median_ratio(percentiles["ours"], percentiles["bare"]), 3),
        "p50_ms": round(statistics.median(medians[0]), 3),
        "bare_p50_ms": round(statistics.median(medians[1]), 3),
        "p95_ms": round(statistics.median(percentiles["ours"]), 3),
        "pairs": chosen.pairs,
    }
    rows = [
        ("live p50, endpoint to endpoint", f"{figures['p50_ms']} ms"),
        ("live p50, bare", f"{figures['bare_p50_ms']} ms"),
        ("p50_ratio (aim <= 2)", str(figures["p50_ratio"])),
        ("p95_ratio (aim <= 3)", str(figures["p95_ratio"])),
    ]
    report("live: what the library adds", rows, figures, as_json=chosen.json)


if __name__ == "__main__":
    asyncio.run(main())
