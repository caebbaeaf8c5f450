"""A space goes to another broker with everything: from its own to a NATS that others run, and back.

    checks -> streams copied by the server's own snapshot -> compared, record by record -> keys -> `space.toml`, last

The space is down meanwhile. Account keys stay, so every signature and every credential does; sequences, times, epochs
and how far each mailbox was read stay too. Until `space.toml` is written the space lives where it lived: whatever
interrupts this, the same again begins anew. The store that was left is kept beside the new one, for whoever moved too
early. The window in which a broker knows an id again does not come along: hosts ask whether what they sent is stored.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tidings.admin.creation import broker_config, write_broker_files
from tidings.admin.external import Checks, describe, operator_key_in, replicas_of
from tidings.admin.home import SIGNING, SYNC_ASSUMED, SpaceHome, SpaceInfo
from tidings.admin.layout import lay_out
from tidings.errors import AuthRevoked, BrokerFailed, ConfigError, ConflictError, SpaceBusy, UnhealthyError, UsageError
from tidings.nats import jwt
from tidings.nats.client import close_quietly, connect
from tidings.nats.core import Msg
from tidings.nats.errors import NatsError
from tidings.nats.jetstream import JetStream, StoredRecord
from tidings.nats.jetstream_api import NO_STREAM, ApiError
from tidings.server.keyring import Keyring
from tidings.server.nats_server import Broker, find_binary
from tidings.server.streams import stream_specs
from tidings.util import failpoints
from tidings.util.private_files import locked, read_plain, write_private
from tidings.wire.keys import OPERATOR, KeyPair

Tell = Callable[[str], None]
OWN, SYSTEM = "operator.own.seed", "system.creds"


@dataclass(frozen=True, slots=True)
class Moved:
    """What came along: records by stream."""

    records: dict[str, int]
    kept: Path | None


async def move_out(
    home: SpaceHome, servers: str, operator_key: tuple[str, str], replicas: int | None, tell: Tell
) -> Moved:
    """From a broker of its own to these servers, with the administrator's operator signing key."""
    with _down(home):
        before = home.read_info()
        if before.servers:
            raise UsageError(f"space {before.name} lives on {before.address} already: `--back` brings it home")
        signing, creds = operator_key_in(*map(Path, operator_key))
        replicas = replicas or replicas_of(servers)
        after = replace(before, servers=servers, replicas=replicas, mode=SIGNING, listen="", ws="")
        keyring = replace(Keyring.load(home.keys), operator=signing)
        write_private(home.keys / SYSTEM, creds)
        again = f"tidings space move --server {servers} --operator-key FILE --system-creds FILE"
        written = describe(home, keyring, after, again)
        if missing := await Checks(home, keyring, after).missing():
            raise ConfigError(f"{after.address} lacks {missing}. What its administrator must add is in {written}")
        async with _broker(home, before, tell), _core(before, keyring) as source, _core(after, keyring) as target:
            records = await _copy(source, target, after, tell)
        write_private(home.unfinished_move, signing.seed + "\n")
        kept = _finish(home, after)
    return Moved(records, kept)


async def move_back(home: SpaceHome, tell: Tell) -> Moved:
    """From servers that others run to a broker of its own."""
    with _down(home):
        before = home.read_info()
        if not before.servers:
            raise UsageError(f"space {before.name} has a broker of its own already")
        own = home.keys / OWN
        operator = KeyPair(read_plain(own).strip()) if own.exists() else KeyPair.generate(OPERATOR)
        keyring = replace(Keyring.load(home.keys), operator=operator)
        after = replace(before, servers="", replicas=1, mode="", sync_seconds=SYNC_ASSUMED)
        _set_aside(home)  # what is left of an earlier attempt, or from before it moved out
        write_broker_files(home, keyring, after)
        lay_out(home, keyring)
        async with _broker(home, after, tell), _core(before, keyring) as source, _core(after, keyring) as target:
            records = await _copy(source, target, after, tell)
        write_private(home.unfinished_move, operator.seed + "\n")
        _finish(home, after)
    return Moved(records, None)


def finish_move(home: SpaceHome) -> None:
    """The operator's key of where the space lives now, if a move was interrupted after `space.toml` was written."""
    following, current = home.unfinished_move, home.keys / "operator.seed"
    if not following.exists() or following.read_text() == current.read_text():
        following.unlink(missing_ok=True)
        return
    info = home.read_info()
    if info.servers and not (home.keys / OWN).exists():
        write_private(home.keys / OWN, current.read_text())
    following.replace(current)


def _finish(home: SpaceHome, after: SpaceInfo) -> Path | None:
    failpoints.reach("move.before_info")
    home.write_info(after)
    failpoints.reach("move.after_info")
    finish_move(home)
    return _set_aside(home) if after.servers else None


def _set_aside(home: SpaceHome) -> Path | None:
    if not home.store.exists():
        return None
    kept = home.store.with_name(f"{home.store.name}.moved-{datetime.now(UTC):%Y%m%d-%H%M%S}")
    home.store.rename(kept)
    return kept


def _down(home: SpaceHome) -> ExitStack:
    """Nobody keeps it up, and nobody administers it."""
    held = ExitStack()
    try:
        for lock in (home.up_lock, home.admin_lock):
            held.enter_context(locked(lock, f"moving space {home.name}", wait=1))
    except SpaceBusy as error:
        held.close()
        raise SpaceBusy(f"space {home.name} is in use: {error}; `tidings down` first") from error
    return held


@asynccontextmanager
async def _broker(home: SpaceHome, info: SpaceInfo, tell: Tell) -> AsyncIterator[None]:
    tell("starting its own broker")
    broker = Broker(broker_config(home, info), home.run / "nats.conf", find_binary(None))
    broker.start()
    try:
        yield
    finally:
        broker.stop()


@asynccontextmanager
async def _core(info: SpaceInfo, keyring: Keyring) -> AsyncIterator[JetStream]:
    token, key = keyring.short_lived(keyring.core, "move")
    try:
        connection = await connect(info.url, jwt.credentials(token, key), key.id, name="move", reconnect=False)
    except AuthRevoked as error:
        raise AuthRevoked(
            f"{info.address} does not take the account keys of space {info.name}: its accounts there are gone, or "
            "only a part of the space's folder was put back. Put all of it back from one copy"
        ) from error
    try:
        yield JetStream(connection)
    finally:
        await close_quietly(connection)


async def _copy(source: JetStream, target: JetStream, after: SpaceInfo, tell: Tell) -> dict[str, int]:
    records = {}
    for spec in stream_specs(after.subjects, after.budget, after.epoch, after.replicas):
        await _clear(source, target, spec.name)
        size = await copy_stream(source, target, spec.name, replicas=after.replicas)
        records[spec.name] = await compare_streams(source, target, spec.name)
        tell(f"{spec.name}: {records[spec.name]:,} records, {size / 1e6:,.1f} MB, the same at both")
        failpoints.reach("move.after_stream")
    return records


async def _clear(source: JetStream, target: JetStream, stream: str) -> None:
    """What an interrupted move left there. A stream that went on since is not ours to remove."""
    try:
        there = (await target.info(stream))["state"]
    except ApiError as error:
        if error.err_code == NO_STREAM:
            return
        raise
    here = (await source.info(stream))["state"]
    if there["last_seq"] > here["last_seq"]:
        raise ConflictError(
            f"{stream} at the target has gone further than here ({there['last_seq']} and {here['last_seq']}): somebody "
            "works with it there. Remove it yourself if it can go"
        )
    await target.api(f"STREAM.DELETE.{stream}")


# --- one stream, by the server's own snapshot ---
#
#     source -- SNAPSHOT: chunks, one acknowledged when the target took it --> RESTORE -- target
#
# Sequences, times and consumers stay as they are, and nothing is written to disk in between. A copy that was broken off
# leaves no stream at the target. `compare_streams` reads both, record by record, and consumers with how far they are:
# only what is equal was moved.

CHUNK = 128 * 1024
#: seconds between two chunks; the source reads its whole stream before the first
PATIENCE = 120.0


async def copy_stream(
    source: JetStream,
    target: JetStream,
    stream: str,
    *,
    replicas: int = 1,
    tell: Callable[[int], None] = lambda _bytes: None,
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


async def _pump(
    source: JetStream, chunks: Any, target: JetStream, to: str, stream: str, tell: Callable[[int], None]
) -> int:
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
