"""Fetching a sealed block: what is asked again and what is not, on one server and in a cluster."""

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from scripted_server import Scripted, scripted_server, stay
from tidings.client import frame_mailbox
from tidings.client.frame_mailbox import CLUSTER_PAUSES, BlockReader
from tidings.client.intake import RecordOpener
from tidings.errors import ConnectionLost, TidingsError
from tidings.nats import aio
from tidings.nats.errors import ApiError, NatsError
from tidings.nats.jetstream import JetStream
from tidings.server.nats_server import die_with_parent, find_binary, free_port
from tidings.wire.frames import (
    BlockSealer,
    FrameRecord,
    Ref,
    SealedBlock,
    decode_frame,
    encode_block,
    encode_frame,
    encode_seqs,
)
from tidings.wire.subjects import Subjects
from tidings_testing.waiting import eventually

S, SPACE, EPOCH = Subjects("main"), "ASPACE", "epoch"
GONE = b"NATS/1.0 404 Message Not Found\r\n\r\n"


def sealed(*seqs: int) -> tuple[SealedBlock, Ref, tuple[FrameRecord, ...]]:
    records = tuple(FrameRecord(seq, 1, "chat.a.general", (), b"hello") for seq in seqs)
    block = BlockSealer(bytes(32), SPACE, EPOCH).seal("general", encode_block(records), encode_seqs(seqs))
    (ref,) = decode_frame(encode_frame("owner", EPOCH, "first", 1, [block.ref])).blocks
    assert isinstance(ref, Ref)
    return block, ref, records


BLOCK, REF, RECORDS = sealed(3, 5)


class Fixed:
    """A connection that is there, and the next one after it was lost."""

    def __init__(self, *connections: aio.Connection) -> None:
        self.connections = list(connections)

    async def ready(self, _within: float) -> aio.Connection:
        while self.connections[0].is_closed and len(self.connections) > 1:
            self.connections.pop(0)
        if self.connections[0].is_closed:
            raise ConnectionLost("closed")
        return self.connections[0]


def reader_on(*connections: aio.Connection) -> BlockReader:
    return BlockReader(Fixed(*connections), RecordOpener(S, SPACE))  # type: ignore[arg-type]


def answering(*answers: bytes | None, **info: Any) -> Any:
    """A server that gives these answers to requests for a block: a status, a block, or None."""

    async def serve(server: Scripted) -> None:
        await server.welcome(**info)
        for answer in answers:
            asked = (await server.until(b"PUB")).split()
            assert asked[1].decode() == S.block_get(BLOCK.name)
            sid = next(line.split()[-1] for line in server.heard if line.startswith(b"SUB"))
            if answer == GONE:
                server.say(b"HMSG %b %b %d %d\r\n%b\r\n" % (asked[2], sid, len(GONE), len(GONE), GONE))
            elif answer is not None:
                server.say(b"MSG %b %b %d\r\n%b\r\n" % (asked[2], sid, len(answer), answer))
        await stay(server)

    return serve


@asynccontextmanager
async def asking(*scripts: Any) -> AsyncIterator[BlockReader]:
    async with AsyncExitStack() as stack:
        connections = []
        for script in scripts:
            url = await stack.enter_async_context(scripted_server(script))
            connections.append(await aio.connect(url))
            stack.push_async_callback(connections[-1].close)
        yield reader_on(*connections)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_mailbox, "PATIENCE", 0.1)
    monkeypatch.setattr(frame_mailbox, "CLUSTER_PAUSES", (0.001,) * len(CLUSTER_PAUSES))


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("answers", "info", "asked", "found"),
    [
        pytest.param([BLOCK.data], {}, 1, True, id="it is there"),
        pytest.param([GONE], {}, 1, False, id="one server: it is gone, and not asked for again"),
        pytest.param([None, BLOCK.data], {}, 2, True, id="one server: no answer, asked once more"),
        pytest.param([None, None], {}, 2, False, id="one server: no answer twice"),
        pytest.param([GONE] * 4 + [BLOCK.data], {"cluster": "c"}, 5, True, id="a cluster: not there yet"),
        pytest.param([None, GONE, BLOCK.data], {"cluster": "c"}, 3, True, id="a cluster: no answer, not there yet"),
        pytest.param([GONE] * 5, {"cluster": "c"}, 5, False, id="a cluster: gone"),
        pytest.param([BLOCK.data[:-1]], {"cluster": "c"}, 1, False, id="a cluster: another one, not asked for again"),
    ],
)
async def test_what_is_asked_again_and_how_often(
    answers: list[bytes | None], info: dict[str, Any], asked: int, found: bool
) -> None:
    async with asking(answering(*answers, **info)) as reader:
        assert await reader.records(EPOCH, REF) == (RECORDS if found else None)
        assert reader.asked == asked
        assert reader.opener.refused["block"] == (answers == [BLOCK.data[:-1]])


async def test_a_connection_that_goes_meanwhile_costs_no_try() -> None:
    async def going(server: Scripted) -> None:
        await server.welcome()
        await server.until(b"PUB")
        server.hang_up()

    async with asking(going, answering(BLOCK.data)) as reader:
        assert await reader.records(EPOCH, REF) == RECORDS
        assert reader.asked == 2


# --- a real cluster ---


def server(folder: Path, n: int, port: int, routes: list[int]) -> subprocess.Popen[bytes]:
    conf = folder / f"{n}.conf"
    named = ", ".join(f'"nats://127.0.0.1:{route}"' for route in routes)
    conf.write_text(
        f'server_name: n{n}\nlisten: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder}/{n}" }}\n'
        f'cluster {{ name: c, listen: "127.0.0.1:{routes[n]}", routes: [{named}] }}\n'
    )
    command = [str(find_binary()), "-c", str(conf), "-l", str(folder / f"{n}.log")]
    return subprocess.Popen(command, preexec_fn=die_with_parent)


@asynccontextmanager
async def cluster(folder: Path, size: int) -> AsyncIterator[tuple[list[aio.Connection], list[subprocess.Popen[bytes]]]]:
    """Servers with streams: a connection to each, and their processes."""
    ports, routes = [free_port() for _ in range(size)], [free_port() for _ in range(size)]
    processes, connections = [server(folder, n, port, routes) for n, port in enumerate(ports)], []
    try:
        connections = [await connected(f"nats://127.0.0.1:{port}") for port in ports]
        yield connections, processes
    finally:
        for each in connections:
            await each.close()
        for process in processes:
            process.kill()  # also ends one that stands still
            process.wait()


async def connected(url: str) -> aio.Connection:
    async def there() -> aio.Connection | None:
        try:
            return await aio.connect(url, timeout=1)
        except (NatsError, TidingsError, OSError, TimeoutError):
            return None

    found = await eventually(there, within=30, what=f"{url} answers")
    assert isinstance(found, aio.Connection)
    return found


async def create(js: JetStream) -> bool:
    config = {"name": "BLK_main", "subjects": ["td.main.blk.*.*.b"], "num_replicas": 3, "allow_direct": True}
    try:
        await js.api("STREAM.CREATE.BLK_main", config)
    except (ApiError, TidingsError, NatsError, TimeoutError):
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_in_a_cluster_blocks_come_right_after_their_acknowledgement_and_while_a_follower_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four servers has no copy: what is asked there goes to any of the three that have one."""
    async with cluster(tmp_path, 4) as (connections, processes):
        js = JetStream(connections[0])
        await eventually(lambda: create(js), within=60, what="a leader")
        readers = [reader_on(each) for each in connections]
        for n in range(1, 100):
            block, ref, records = sealed(n, n + 1)
            await js.publish(S.block(block.name), block.data)
            found = await asyncio.gather(*(reader.records(EPOCH, ref) for reader in readers))
            assert found == [records] * 4

        monkeypatch.setattr(frame_mailbox, "PATIENCE", 0.3)
        holders = (await js.info("BLK_main"))["cluster"]
        following = [int(each["name"][1:]) for each in holders["replicas"]]
        (without,) = {0, 1, 2, 3} - {*following, int(holders["leader"][1:])}
        reader = readers[without]

        async def some_were_asked_again() -> bool:
            before = reader.asked
            processes[following[0]].send_signal(signal.SIGSTOP)
            found = await asyncio.gather(*(reader.records(EPOCH, sealed(n, n + 1)[1]) for n in range(1, 41)))
            processes[following[0]].send_signal(signal.SIGCONT)
            assert sum(each is not None for each in found) >= 30, "what did not come is read from the log"
            return reader.asked - before > 40

        # a follower is asked only some seconds after it has the stream
        await eventually(some_were_asked_again, within=60, every=1, what="one that stands still was asked")
