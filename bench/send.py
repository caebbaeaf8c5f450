"""How many confirmed, signed messages an endpoint sends, against bare `publish_async` in the same run.

ratio   messages per second, endpoint with WINDOW sends under way / js.publish_async with the same window
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

WINDOW = 256
TEXT = "x" * 200


async def endpoint_rate(sender: tidings.DirectAgent, seconds: float) -> float:
    sent = 0
    end = time.perf_counter() + seconds

    async def worker() -> None:
        nonlocal sent
        while time.perf_counter() < end:
            await sender.send("general", TEXT, timeout=30)
            sent += 1

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(WINDOW)))
    return sent / (time.perf_counter() - started)


async def bare_rate(client: Any, seconds: float) -> float:
    js = client.jetstream(publish_async_max_pending=WINDOW)
    body, sent = b"x" * 420, 0
    started = time.perf_counter()
    end = started + seconds
    while time.perf_counter() < end:
        for _ in range(64):
            await js.publish_async("bare.ada.general", body, headers={"Nats-Msg-Id": new_id(), "Td-Sig": "A" * 86})
            sent += 1
    await js.publish_async_completed()
    return sent / (time.perf_counter() - started)


async def main() -> None:
    chosen = options(__doc__ or "")
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url = await stack.enter_async_context(bare_server())
        await bare_stream(url)
        client = await nats.connect(url)
        stack.push_async_callback(client.close)
        space = await stack.enter_async_context(real_space(Path(folder) / "home", budget=4 * 1024**3))
        await space.add("ada")
        sender = await stack.enter_async_context(tidings.connect("main", name="ada", home=space.home.home))
        rates = await pairs(
            lambda: endpoint_rate(sender, chosen.seconds), lambda: bare_rate(client, chosen.seconds), chosen.pairs
        )
    figures = {
        "ratio": round(median_ratio(*rates), 3),
        "send_per_s": round(statistics.median(rates[0])),
        "bare_per_s": round(statistics.median(rates[1])),
        "window": WINDOW,
        "pairs": chosen.pairs,
    }
    rows = [
        ("signed and confirmed, endpoint", f"{figures['send_per_s']:,}/s"),
        ("bare publish_async", f"{figures['bare_per_s']:,}/s"),
        ("ratio (aim >= 0.35)", str(figures["ratio"])),
    ]
    report("send: what signing and the library cost", rows, figures, as_json=chosen.json)


if __name__ == "__main__":
    asyncio.run(main())
