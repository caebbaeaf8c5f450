"""A stream from one broker to another by the server's own snapshot: sequences, times and consumers stay as they are.

    source -- SNAPSHOT: chunks, one acknowledged when the target took it --> RESTORE -- target

Nothing is written to disk in between. The window in which a broker knows ids again is not part of a snapshot: whoever
was not answered before the copy asks whether its message is stored, as after any unknown outcome. A copy that was
broken off leaves no stream at the target. `compare_streams` reads both, record by record, and consumers with how far
they are: only what is equal was moved.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from tidings.errors import BrokerFailed, UnhealthyError
from tidings.nats.core import Msg
from tidings.nats.errors import NatsError
from tidings.nats.jetstream import JetStream, StoredRecord
from tidings.nats.jetstream_api import ApiError

CHUNK = 128 * 1024
#: seconds between two chunks; the source reads its whole stream before the first
PATIENCE = 120.0
Tell = Callable[[int], None]


async def copy_stream(
    source: JetStream, target: JetStream, stream: str, *, replicas: int = 1, tell: Tell = lambda _bytes: None
) -> int:
    """Make the stream at the target what it is at the source. Answers how many bytes a snapshot took."""
    connection = source.connection
    inbox = connection.new_inbox()
    chunks = await connection.subscribe(inbox)
    try:
        asked = {"deliver_subject": inbox, "chunk_size": CHUNK, "no_consumers": False, "jsck": True}
        made = await source.api(f"STREAM.SNAPSHOT.{stream}", asked, timeout=PATIENCE)
        config = {**made["config"], "num_replicas": replicas}
        opened = await target.api(f"STREAM.RESTORE.{stream}", {"config": config, "state": made["state"]})
        return await _pump(source, chunks, target, str(opened["deliver_subject"]), stream, tell)
    except (NatsError, TimeoutError, OSError) as error:
        raise BrokerFailed(f"{stream} was not copied: {error or type(error).__name__}") from error
    finally:
        await chunks.unsubscribe()


async def _pump(source: JetStream, chunks: Any, target: JetStream, to: str, stream: str, tell: Tell) -> int:
    passed = 0
    while True:
        chunk: Msg = await chunks.next(PATIENCE)
        if not chunk.data:
            if chunk.status is not None and chunk.status >= 400:
                raise BrokerFailed(f"{stream} was not copied: the source gave up ({chunk.status})")
            break
        _check(await target.connection.request(to, chunk.data, timeout=PATIENCE), stream)
        if chunk.reply:
            await source.connection.publish(chunk.reply, b"")
        passed += len(chunk.data)
        tell(passed)
    _check(await target.connection.request(to, b"", timeout=PATIENCE), stream)
    return passed


def _check(answer: Msg, stream: str) -> None:
    said = json.loads(answer.data) if answer.data else {}
    if error := said.get("error"):
        raise ApiError(f"restore {stream}", error)


# --- is it the same? ---


async def compare_streams(source: JetStream, target: JetStream, stream: str) -> int:
    """Every record and every consumer of both. Answers how many records; UnhealthyError says what differs first."""
    here, there = (await source.info(stream))["state"], (await target.info(stream))["state"]
    # of an empty stream the first sequence is 0 or the next one, as the server likes
    for name in ("last_seq", "messages", *(["first_seq"] if here["messages"] else [])):
        if here[name] != there[name]:
            raise UnhealthyError(f"{stream} is another at the target: {name} is {there[name]}, and was {here[name]}")
    count = 0
    ours, theirs = (_records(js, stream, here["first_seq"], here["last_seq"]) for js in (source, target))
    async for record in ours:
        other = await anext(theirs, None)
        if other != record:
            raise UnhealthyError(f"{stream} is another at the target from sequence {record.seq} on")
        count += 1
    if (other := await anext(theirs, None)) is not None:
        raise UnhealthyError(f"{stream} has a record at the target that it had not: sequence {other.seq}")
    await _compare_consumers(source, target, stream, here["first_seq"] - 1 if here["messages"] else here["last_seq"])
    return count


async def _records(js: JetStream, stream: str, first: int, last: int) -> AsyncIterator[StoredRecord]:
    async for page in js.read(stream, ">", max(1, first), last):
        for record in page:
            yield record


async def _compare_consumers(source: JetStream, target: JetStream, stream: str, gone: int) -> None:
    """`gone`: the sequence up to which the stream has nothing; whether a consumer counts that as read says nothing."""
    here, there = await asyncio.gather(_consumers(source, stream, gone), _consumers(target, stream, gone))
    for name in sorted(here.keys() | there.keys()):
        if (now := there.get(name)) != (was := here.get(name)):
            raise UnhealthyError(
                f"consumer {name} of {stream} is another at the target: it is at {now} and was at {was}, so what it "
                "had read would come again"
            )


async def _consumers(js: JetStream, stream: str, gone: int) -> Mapping[str, tuple[int, int]]:
    """name -> how far it is acknowledged: of the stream, and of what it was given."""
    found: dict[str, tuple[int, int]] = {}
    while True:
        page = await js.api(f"CONSUMER.LIST.{stream}", {"offset": len(found)})
        rows = page.get("consumers") or []
        for each in rows:
            floor = each["ack_floor"]
            found[each["name"]] = (max(gone, int(floor["stream_seq"])), int(floor["consumer_seq"]))
        if not rows or len(found) >= int(page.get("total", 0)):
            return found
