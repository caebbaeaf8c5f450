"""Tasks through the desk, against a bare pull and acknowledgement on the same server in the same run.

    rate_1, rate_8   tasks asked, claimed and done per second with 1 and with 8 workers, askers keeping WINDOW open
    ratio_1, ratio_8 the same divided by bare clients that publish, pull one, and acknowledge it, confirmed

A bare consumer gives no hold that survives, no signature, no result and no deadline: the ratio is the price of those.
There is no bar. The steward runs as its own process, as it does in a space that is up.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any, cast

import tidings
from measuring import median_ratio, options, pairs, report
from tidings.client.tasks import Job
from tidings.nats.jetstream import JetStream
from tidings_testing.processes import steward_child
from tidings_testing.real_space import RealSpace, real_space

WORKERS = (1, 8)
WINDOW = 32
ASKERS = 4
FILLERS = 4
TEXT = "x" * 200
BODY = b"x" * 420


async def until(seconds: float, lanes: list[Callable[[], Awaitable[None]]]) -> float:
    """Run each lane again and again; answers rounds per second of all of them."""
    done, end = 0, time.perf_counter() + seconds

    async def run(lane: Callable[[], Awaitable[None]]) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await lane()
            done += 1

    started = time.perf_counter()
    await asyncio.gather(*map(run, lanes))
    return done / (time.perf_counter() - started)


async def desk_rate(
    askers: list[tidings.DirectAgent], workers: list[tidings.DirectAgent], role: str, seconds: float
) -> float:
    """Each lane asks and waits for its result; the workers take whatever is there. A role of its own for each run."""

    async def work(worker: tidings.DirectAgent) -> None:
        async with aclosing(cast("AsyncGenerator[Job]", worker.work(role))) as jobs:
            async for job in jobs:
                await job.done("done")

    def lane(asker: tidings.DirectAgent) -> Callable[[], Awaitable[None]]:
        async def ask() -> None:
            ticket = await asker.ask(role, TEXT, timeout=30)
            await ticket.result(60)

        return ask

    working = [asyncio.create_task(work(worker)) for worker in workers]
    try:
        return await until(seconds, [lane(asker) for asker in askers for _ in range(WINDOW // len(askers))])
    finally:
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)


async def bare_rate(clients: list[JetStream], publisher: JetStream, seconds: float) -> float:
    """Each worker pulls one and has its acknowledgement confirmed; the publisher keeps WINDOW in the queue."""
    room = asyncio.Semaphore(WINDOW)

    stop = False

    async def fill() -> None:
        while not stop:
            await room.acquire()
            await publisher.publish("bare.task.bench", BODY)

    async def worker(js: JetStream) -> Callable[[], Awaitable[None]]:
        inbox = js.connection.new_inbox()
        arrived = await js.connection.subscribe(inbox)
        body = json.dumps({"batch": 1, "expires": 3_000_000_000}).encode()

        async def take() -> None:
            await js.connection.publish("$JS.API.CONSUMER.MSG.NEXT.BARE.bench", body, reply=inbox)
            message = await arrived.next(10)
            if message.reply:
                await js.connection.request(message.reply, b"+ACK", timeout=10)
                room.release()

        return take

    lanes = [await worker(js) for js in clients]
    filling = [asyncio.create_task(fill()) for _ in range(FILLERS)]
    try:
        return await until(seconds, lanes)
    finally:
        stop = True  # not cancelled: `wait_for` of Python 3.11 may swallow it
        for _ in filling:
            room.release()
        await asyncio.gather(*filling)


async def bare_queue(js: JetStream) -> None:
    """A queue of its own on the same server: file storage, explicit acknowledgement."""
    stream = {"name": "BARE", "subjects": ["bare.>"], "storage": "file", "retention": "workqueue"}
    await js.api("STREAM.CREATE.BARE", stream | {"duplicate_window": 120_000_000_000})
    config = {"durable_name": "bench", "ack_policy": "explicit", "ack_wait": 30_000_000_000, "max_ack_pending": 1_000}
    await js.api("CONSUMER.CREATE.BARE.bench", {"stream_name": "BARE", "config": {"name": "bench", **config}})


async def endpoint(space: RealSpace, stack: AsyncExitStack, name: str, roles: list[str]) -> tidings.DirectAgent:
    await space.add(name, roles=roles)
    return await stack.enter_async_context(tidings.connect("main", name=name, home=space.home.home))


async def main() -> None:
    chosen = options(__doc__ or "")
    figures: dict[str, Any] = {"pairs": chosen.pairs}
    rows: list[tuple[str, str]] = []
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        space = await stack.enter_async_context(real_space(Path(folder) / "home", budget=4 * 1024**3, steward=False))
        await stack.enter_async_context(steward_child(space.home, ttl=3.0))
        # one asker has at most 1,000 tasks of a role in the queue, settled and not yet purged ones included
        roles = [f"bench{n}" for n in range(chosen.pairs * len(WORKERS))]
        fresh = iter(roles)
        askers = [await endpoint(space, stack, f"asker{n}", []) for n in range(ASKERS)]
        workers = [await endpoint(space, stack, f"worker{n}", roles) for n in range(max(WORKERS))]
        clients = [await stack.enter_async_context(space.core()) for _ in range(max(WORKERS) + 1)]
        await bare_queue(clients[0])
        for count in WORKERS:
            ours, bare = await pairs(
                lambda count=count: desk_rate(askers, workers[:count], next(fresh), chosen.seconds),  # type: ignore[misc]
                lambda count=count: bare_rate(clients[1 : count + 1], clients[0], chosen.seconds),  # type: ignore[misc]
                chosen.pairs,
            )
            figures |= {
                f"rate_{count}": round(statistics.median(ours)),
                f"bare_{count}": round(statistics.median(bare)),
                f"ratio_{count}": round(median_ratio(ours, bare), 3),
            }
            rows += [
                (f"tasks/s asked, claimed, done; {count} workers", f"{figures[f'rate_{count}']:,}"),
                (f"bare pull and acknowledge/s; {count} workers", f"{figures[f'bare_{count}']:,}"),
                (f"ratio_{count} (no bar)", str(figures[f"ratio_{count}"])),
            ]
    report("tasks: the desk against a bare consumer", rows, figures, as_json=chosen.json)


if __name__ == "__main__":
    asyncio.run(main())
