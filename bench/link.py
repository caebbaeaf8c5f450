"""Catching up over a link between two local brokers, against a bare loop that does the same with nobody's help.

    python bench/link.py --json [--records 100000]

Two spaces, each with its broker and its steward as processes of their own, and a worker of the second one's links as
another. Signed messages are put into the log of the first while the link is paused; then the time is taken from
`resume` until the ledger has handled the last of them.

ratio            records per second / the bare loop in one process over the same log: pages of as many records by
                 direct gets, signatures verified in two threads, published into a plain stream of the other broker with
                 a message id, one acknowledgement each. Once before and once after
records_per_s, bare_per_s
cpu_us           microseconds of CPU for each record, which a busy machine changes less: of the worker, of the steward
                 that answers pages, of the one that is asked what the log holds, of the bare loop
sourcing_per_s   for scale: a stream of the first broker whose source is its log; nobody verifies anything
idle_cpu_pct     of one core, by the worker, without traffic
live_lag_p50_ms, live_lag_p95_ms   one message at a time, at odd moments: from before it is sent in the first space
                 until an agent of the second one has it
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import texts
import tidings
from measuring import note, report
from roster import cpu_seconds, share_of_core
from tidings.admin.link_peers import LinkPeers, PeerAccess
from tidings.client.connect import connect_directly
from tidings.contract.link_worker import PauseLinkRequest, ResumeLinkRequest
from tidings.links.validation import PAGE_RECORDS
from tidings.nats import jwt
from tidings.nats.client import Connection
from tidings.nats.jetstream import JetStream, StoredRecord
from tidings.nats.jetstream_blocking import WorkerConnection
from tidings.server.keyring import Keyring
from tidings.wire import signing
from tidings.wire.message import Sender, compose
from tidings.wire.records import encode_headers, read_plain_block
from tidings.wire.signing import KeyPair
from tidings_testing.processes import steward_child
from tidings_testing.real_space import RealSpace, real_space

from carried_links import WorkerProcess, call_worker, stored, worker_process  # isort: skip
from linked_spaces import LINK, linked  # isort: skip

BUDGET = 4 * 1024**3
CHANNELS = ("team.a", "team.b", "team.c", "team.d")
SPEAKERS = 8
WINDOW = 4_000
#: percent of a core
QUIET = 10.0
#: a record of the log, and its signature
Signed = tuple[StoredRecord, str]
#: seconds for everything that is waited for
PATIENCE = 900.0


@dataclass
class Bench:
    """What is shared from `west` to `east`, and the worker of `east`."""

    west: RealSpace
    east: RealSpace
    worker: WorkerProcess
    #: of the processes besides the brokers
    pids: dict[str, int]

    # --- the log ---

    async def fill(self, records: int) -> int:
        """Signed messages of several senders in several channels; the sequence of the last."""
        speakers = []
        for number in range(SPEAKERS):
            await self.west.add(f"speaker{number}", read=["team.>"], post=["team.>"])
            path = self.west.home.agent_creds(f"speaker{number}")
            speakers.append(jwt.split_credentials(path.read_text())[1])
        await asyncio.to_thread(self._publish, self._said(speakers, records))
        async with self.west.core() as js:
            return int((await js.info(self.west.subjects.log_stream))["state"]["last_seq"])

    def _said(self, speakers: Sequence[KeyPair], records: int) -> Iterator[tuple[str, bytes, bytes]]:
        subjects, space = self.west.subjects, self.west.info.id
        for number, words in enumerate(islice(texts.prose(), records)):
            key, channel = speakers[number % SPEAKERS], CHANNELS[number % len(CHANNELS)]
            message = compose(Sender(key.id, f"speaker{number % SPEAKERS}"), text=words)
            signature = signing.sign(key, space, "chat", channel, message.raw)
            headers = encode_headers((("Td-Sig", signature), ("Nats-Msg-Id", message.id)))
            yield subjects.chat(key.id, channel), headers, message.raw

    def _publish(self, records: Iterator[tuple[str, bytes, bytes]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            keyring, path = Keyring.load(self.west.home.keys), Path(folder) / "core.creds"
            path.touch(mode=0o600)
            path.write_text(jwt.credentials(*keyring.short_lived(keyring.core, "bench")))
            connection = WorkerConnection.open(self.west.info.url, path, timeout=30)
            answers = connection.replies(30)
            try:
                while sent := len(connection.publish_all(islice(records, WINDOW))):
                    for _ in range(sent):
                        if b'"error"' in (reply := next(answers)).payload or reply.status is not None:
                            raise RuntimeError(f"the broker refused a message: {reply}")
            finally:
                connection.close()

    async def quiet(self) -> None:
        """The steward has looked through what was put into its log."""
        deadline = time.perf_counter() + PATIENCE
        while await share_of_core(self.pids["west_steward"], 1.0) > QUIET and time.perf_counter() < deadline:
            pass

    # --- what is measured ---

    async def catch_up(self, last: int) -> float:
        """Seconds until the ledger has handled record `last`."""
        started = time.perf_counter()
        await call_worker(self.east, ResumeLinkRequest(link=LINK))
        while ((facts := await stored(self.east)).handled or 0) < last:
            if time.perf_counter() - started > PATIENCE:
                raise RuntimeError(f"it was not handled in {PATIENCE:.0f} s: {facts}")
            await asyncio.sleep(0.25)  # it is the worker who answers
        return time.perf_counter() - started

    def spent(self) -> dict[str, float]:
        """CPU seconds of each process so far."""
        return {name: cpu_seconds(pid) for name, pid in self.pids.items()}

    async def check(self, records: int) -> None:
        """All of them came, and nothing else became of any."""
        counts = (await stored(self.east)).counts
        if counts != {"admitted": records}:
            raise RuntimeError(f"{records:,} records should have been let in, and the ledger has {counts}")

    async def bare(self, records: int, last: int, name: str) -> tuple[float, float]:
        """Records per second of the bare loop, and its CPU seconds."""
        async with self.west.core() as source, self.east.core() as sink, _plain_stream(sink, name) as stream:
            started, spent = time.perf_counter(), time.process_time()
            with ThreadPoolExecutor(2) as pool:
                done = 0
                pages = source.read(
                    self.west.subjects.log_stream, f"{self.west.subjects.root}.chat.>", 1, last, page=PAGE_RECORDS
                )
                async for page in pages:
                    signed = [(record, _signature(record)) for record in page]
                    await self._verify(pool, signed)
                    await _store(sink.connection, stream, signed)
                    done += len(page)
            seconds, spent = time.perf_counter() - started, time.process_time() - spent
        if done != records:
            raise RuntimeError(f"the bare loop found {done:,} records of {records:,}")
        return records / seconds, spent

    async def _verify(self, pool: ThreadPoolExecutor, page: Sequence[Signed]) -> None:
        loop, half = asyncio.get_running_loop(), len(page) // 2
        good = await asyncio.gather(
            loop.run_in_executor(pool, self._verified, page[:half]),
            loop.run_in_executor(pool, self._verified, page[half:]),
        )
        if not all(good):
            raise RuntimeError("a signature does not verify")

    def _verified(self, page: Sequence[Signed]) -> bool:
        return all(self._is_signed(*each) for each in page)

    def _is_signed(self, record: StoredRecord, signature: str) -> bool:
        _, _, _, sender, channel = record.subject.split(".", 4)
        return signing.verifies(signature, self.west.info.id, "chat", sender, channel, record.payload)

    async def sourcing(self, records: int) -> float:
        """Records per second into a stream that has the log as its source."""
        async with self.west.core() as js:
            source = {"name": self.west.subjects.log_stream, "filter_subject": f"{self.west.subjects.root}.chat.>"}
            started = time.perf_counter()
            await js.api("STREAM.CREATE.SOURCED", {"name": "SOURCED", "storage": "file", "sources": [source]})
            while (await js.info("SOURCED"))["state"]["messages"] < records:
                if time.perf_counter() - started > PATIENCE:
                    raise RuntimeError("the stream did not fetch all of its source")
                await asyncio.sleep(0.01)
            seconds = time.perf_counter() - started
            await js.api("STREAM.DELETE.SOURCED")
        return records / seconds

    async def lags(self, samples: int) -> list[float]:
        """Milliseconds each."""
        await self.west.add("ada", read=["team.>"], post=["team.>"])
        await self.east.add("bob", read=["team.>"], post=["team.>"])
        arrived: asyncio.Queue[float] = asyncio.Queue()
        found = []
        async with (
            _endpoint(self.west, "ada") as ada,
            _endpoint(self.east, "bob", channels=["team.live"]) as bob,
        ):
            bob.on("message", lambda _message: arrived.put_nowait(time.perf_counter()))
            for _ in range(samples):
                await asyncio.sleep(random.uniform(0.15, 0.45))
                started = time.perf_counter()
                await ada.send("team.live", "x" * 200)
                found.append((await asyncio.wait_for(arrived.get(), 30) - started) * 1000)
                await (await bob.next_message(10)).ack()
        return found


def _endpoint(space: RealSpace, name: str, **options: Any) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)


def _signature(record: StoredRecord) -> str:
    fields = read_plain_block(record.own_block)
    assert fields is not None
    return fields[0][1]


@asynccontextmanager
async def _plain_stream(js: JetStream, name: str) -> AsyncIterator[str]:
    """A stream beside the log; subjects `name.>`."""
    config = {"name": name, "subjects": [f"{name}.>"], "storage": "file", "duplicate_window": 600 * 10**9}
    await js.api(f"STREAM.CREATE.{name}", config)
    try:
        yield name
    finally:
        await js.api(f"STREAM.DELETE.{name}")


async def _store(connection: Connection, stream: str, page: Sequence[Signed]) -> None:
    """All on their way, then their acknowledgements."""
    inbox = connection.new_inbox()
    answers = await connection.subscribe(f"{inbox}.*")
    try:
        for number, (record, signature) in enumerate(page):
            headers = {"Td-Sig": signature, "Nats-Msg-Id": f"{stream}{record.seq}"}
            await connection.publish(f"{stream}.x", record.payload, reply=f"{inbox}.{number}", headers=headers)
        for _ in page:
            if json.loads((await answers.next(30)).data).get("error"):
                raise RuntimeError("the plain stream refused a record")
    finally:
        await answers.unsubscribe()


async def _agree(west: RealSpace, east: RealSpace) -> None:
    """East takes what west shares, and nothing goes the other way."""
    made = await linked(west, origin=east.info.id, space="east", shares=["team.>"], steward=east.info.steward_key)
    told = PeerAccess(
        link=LINK, space=west.info.name, id=west.info.id, steward=west.info.steward_key, url=west.info.url
    )
    LinkPeers.below(east.home).put(told, made.creds)
    await linked(
        east,
        origin=west.info.id,
        space="west",
        shares=[],
        make_peer=False,
        channels={"team.>": "team.>"},
        steward=west.info.steward_key,
    )


@asynccontextmanager
async def bench_in(root: Path) -> AsyncIterator[Bench]:
    """Paused, so that nothing is carried before it is wanted."""
    async with AsyncExitStack() as stack:
        spaces, pids = list[RealSpace](), dict[str, int]()
        for name in ("west", "east"):
            space = await stack.enter_async_context(real_space(root / name, name=name, budget=BUDGET, steward=False))
            steward = await stack.enter_async_context(steward_child(space.home, ttl=5.0))
            spaces.append(space)
            pids[f"{name}_steward"] = steward.pid
        west, east = spaces
        await _agree(west, east)
        worker = await stack.enter_async_context(worker_process(east))
        if not (await worker.said()).get("ready"):
            raise RuntimeError("the worker of links did not start")
        bench = Bench(west, east, worker, {"worker": worker.child.pid, **pids})
        await call_worker(bench.east, PauseLinkRequest(link=LINK))
        yield bench


async def measure(chosen: argparse.Namespace, root: Path) -> dict[str, Any]:
    async with bench_in(root) as bench:
        note(f"putting {chosen.records:,} signed messages into the log")
        last = await bench.fill(chosen.records)
        await bench.quiet()
        load = os.getloadavg()[0]
        before, _ = await bench.bare(chosen.records, last, "BEFORE")
        note(f"the bare loop: {before:,.0f} records a second")
        spent = bench.spent()
        per_s = chosen.records / await bench.catch_up(last)
        spent = {name: after - spent[name] for name, after in bench.spent().items()}
        note(f"over the link: {per_s:,.0f} records a second")
        after, spent["bare"] = await bench.bare(chosen.records, last, "AFTER")
        note(f"the bare loop: {after:,.0f} records a second")
        await bench.check(chosen.records)
        sourcing = await bench.sourcing(chosen.records)
        lags = await bench.lags(chosen.samples)
        await asyncio.sleep(2)
        idle = await share_of_core(bench.worker.child.pid, chosen.idle)
    return {
        "ratio": round(per_s / statistics.mean((before, after)), 3),
        "records_per_s": round(per_s),
        "bare_per_s": round(statistics.mean((before, after))),
        "sourcing_per_s": round(sourcing),
        "idle_cpu_pct": round(idle, 2),
        "live_lag_p50_ms": round(statistics.median(lags), 1),
        "live_lag_p95_ms": round(statistics.quantiles(lags, n=20)[18], 1),
        "cpu_us": {name: round(seconds / chosen.records * 1e6) for name, seconds in spent.items()},
        "records": chosen.records,
        "load": round(load, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--records", type=int, default=100_000, help="that are behind; 10,000 is quick")
    parser.add_argument("--samples", type=int, default=100, help="messages whose lag is taken")
    parser.add_argument("--idle", type=float, default=20.0, help="seconds without traffic")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(chosen, Path(folder)))
    rows = [
        ("caught up over the link", f"{figures['records_per_s']:,}/s"),
        ("bare loop", f"{figures['bare_per_s']:,}/s"),
        ("ratio (aim >= 0.5)", str(figures["ratio"])),
        ("CPU for each record", ", ".join(f"{name} {value} us" for name, value in figures["cpu_us"].items())),
        ("a stream with a source, for scale", f"{figures['sourcing_per_s']:,}/s"),
        ("worker without traffic (aim <= 1)", f"{figures['idle_cpu_pct']} % of a core"),
        ("live lag, p50 and p95", f"{figures['live_lag_p50_ms']} and {figures['live_lag_p95_ms']} ms"),
    ]
    report("link: catching up with another space", rows, figures, as_json=chosen.json)


if __name__ == "__main__":
    main()
