"""What replicas and TLS cost, each against bare NATS of the same kind in the same run.

r3_send_ratio        messages per second on three servers with three replicas: endpoint with WINDOW sends under way /
                     js.publish_async with the same window
r3_frames_per_s      frames under the deliver lease in atomic batches, through the pipeline's account
tls_live_p50_ratio   endpoint send to endpoint receive over TLS / `js.publish` to a core subscription over TLS
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import nats

import tidings
from live import ARRIVED, bare_times, endpoint_times
from measuring import median_ratio, options, pairs, report
from send import WINDOW, bare_rate, endpoint_rate
from tidings.delivery.publishing import BATCH, Outgoing, publish_in_order
from tidings.nats import jwt
from tidings.nats.address import parse_address
from tidings.nats.jetstream_blocking import BlockingJetStream, WorkerConnection
from tidings.server.keyring import Keyring
from tidings.server.lease import DeliverLease
from tidings.wire.signing import KeyPair
from tidings_testing.real_space import RealSpace, real_space

BUDGET = 1024**3
FRAMES, FRAME = 20_000, 400


async def bare_client(space: RealSpace, folder: Path, **tls: Any) -> Any:
    """nats-py in CORE, on the same servers."""
    token, key = Keyring.load(space.home.keys).short_lived(Keyring.load(space.home.keys).core, "bare")
    creds = folder / "bare.creds"
    creds.write_text(jwt.credentials(token, key))
    servers = [parse_address(url).url for url in space.info.url.split(",")]
    return await nats.connect(servers, user_credentials=str(creds), **tls)


async def make_stream(client: Any, replicas: int) -> None:
    await client.jetstream().add_stream(
        name="BARE", subjects=["bare.>"], num_replicas=replicas, max_bytes=64 * 1024**2, duplicate_window=600
    )


async def send_rates(chosen: Any) -> tuple[list[float], list[float], float]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        space = await stack.enter_async_context(real_space(folder / "home", budget=BUDGET, nodes=3))
        client = await bare_client(space, folder)
        stack.push_async_callback(client.close)
        await make_stream(client, 3)
        await space.add("ada")
        sender = await stack.enter_async_context(tidings.connect("main", name="ada", home=space.home.home))
        rates = await pairs(
            lambda: endpoint_rate(sender, chosen.seconds), lambda: bare_rate(client, chosen.seconds), chosen.pairs
        )
        return *rates, await asyncio.to_thread(frame_rate, space)


def frame_rate(space: RealSpace) -> float:
    creds = space.home.pipeline_creds
    with closing(BlockingJetStream(lambda: WorkerConnection.open(space.info.url, creds, name="bench"))) as js:
        lease = DeliverLease(js, space.subjects, ttl=1.0, replicated=js.replicated)
        lease.take()
        frames = {}
        for number in range(FRAMES):
            subject = space.subjects.delivery(KeyPair.generate().id)
            frames[subject] = [Outgoing(subject, str(number), b"x" * FRAME)]
        started = time.perf_counter()
        sent = publish_in_order(js.connection, frames, lease.fence, batch=BATCH)
        took = time.perf_counter() - started
    assert all(len(each.sequences) == 1 for each in sent.values())
    return FRAMES / took


async def live_times(chosen: Any) -> tuple[list[float], list[float]]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        space = await stack.enter_async_context(real_space(folder / "home", budget=BUDGET, listen="127.0.0.1"))
        address = parse_address(space.info.url)
        tls = {"tls": address.context(), "tls_hostname": address.server_name, "tls_handshake_first": True}
        clients = [await bare_client(space, folder, **tls) for _ in range(2)]
        for client in clients:
            stack.push_async_callback(client.close)
        await make_stream(clients[0], 1)
        ends = []
        for name in ("ada", "bob"):
            await space.add(name)
            endpoint = tidings.connect("main", name=name, home=space.home.home)
            ends.append(await stack.enter_async_context(endpoint))
        await ends[1].join("general")
        ends[1].on("message", lambda _message: ARRIVED.append(time.perf_counter()))

        async def ours() -> float:
            return statistics.median(await endpoint_times(*ends))

        async def bare() -> float:
            return statistics.median(await bare_times(*clients))

        return await pairs(ours, bare, chosen.pairs)


async def main() -> None:
    chosen = options(__doc__ or "")
    ours, bare, frames = await send_rates(chosen)
    live, bare_live = await live_times(chosen)
    figures = {
        "r3_send_ratio": round(median_ratio(ours, bare), 3),
        "r3_send_per_s": round(statistics.median(ours)),
        "r3_bare_per_s": round(statistics.median(bare)),
        "r3_frames_per_s": round(frames),
        "tls_live_p50_ratio": round(median_ratio(live, bare_live), 3),
        "tls_live_p50_ms": round(statistics.median(live), 3),
        "tls_bare_p50_ms": round(statistics.median(bare_live), 3),
        "window": WINDOW,
        "pairs": chosen.pairs,
    }
    rows = [
        ("three replicas: signed and confirmed, endpoint", f"{figures['r3_send_per_s']:,}/s"),
        ("three replicas: bare publish_async", f"{figures['r3_bare_per_s']:,}/s"),
        ("ratio (aim >= 0.35)", str(figures["r3_send_ratio"])),
        ("three replicas: frames in batches", f"{figures['r3_frames_per_s']:,}/s"),
        ("TLS: endpoint to endpoint, p50", f"{figures['tls_live_p50_ms']} ms"),
        ("TLS: bare, p50", f"{figures['tls_bare_p50_ms']} ms"),
        ("ratio (aim <= 2)", str(figures["tls_live_p50_ratio"])),
    ]
    report("cluster: what replicas and TLS cost", rows, figures, as_json=chosen.json)


if __name__ == "__main__":
    asyncio.run(main())
