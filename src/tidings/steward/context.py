"""What every part of a steward stands on: the space as it is now, and the life of the process.

`SpaceContext` holds the open space (broker, state bucket, folded table) and answers what parts ask of it most often:
who an agent is, what holds on a channel, how far a stream is. It rules nothing and keeps nothing of its own.
`Lifecycle` is how a part ends the process, works beside it, or asks its supervisor for something. Neither knows a part.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tidings.admin.home import SpaceHome, SpaceInfo
from tidings.contract.agents import SpaceSettings
from tidings.errors import AuthRevoked, BrokerUnreachable, DeniedError
from tidings.model.membership import Interval
from tidings.model.projection import Table
from tidings.nats.errors import NO_CONSUMER, ApiError
from tidings.nats.jetstream import JetStream, StoredRecord
from tidings.nats.jetstream_api import info_from
from tidings.server.state import StateBucket
from tidings.wire.envelope import ClaimedOrigin, Received, Refused, open_record
from tidings.wire.links import read_origin
from tidings.wire.names import foreign_name, is_channel
from tidings.wire.records import moment
from tidings.wire.rulings import Access
from tidings.wire.subjects import Subjects, Via, tag

#: seconds between two requests to start a broker again that stores nothing
RESTART_EVERY = 20.0
#: settings of a channel that may be its own, and what its record calls them
OWN = (("class", "cls"), ("replay", "replay"), ("replay_window", "replay_window"))
log = logging.getLogger(__name__)


def now() -> str:
    return moment(time.time())


@dataclass(frozen=True, slots=True)
class Intervals:
    """How often the steward does what it does by itself, and how patient it is with others, in seconds.

    The values are those of a space in use; tests run with shorter ones.
    """

    lease_ttl: float = 3.0
    gate: float = 1.0
    #: a log that nobody wrote to for so long is written to when somebody asks how the space is
    log_write: float = 60.0
    retention: float = 10.0
    marks: float = 2.0
    #: looks at marks and counts of the store
    store: float = 30.0
    #: reads everything the store holds
    reading: float = 24 * 3600.0
    #: how often it looks at what links share now
    links: float = 0.5
    #: how often it looks for senders that flood
    quotas: float = 5.0
    #: how often it looks for messages that no reader shows
    voids: float = 5.0
    #: how often it looks for streams that store nothing any more
    stuck: float = 10.0
    #: how often it looks at what is new in the streams all share
    shares: float = 0.25
    #: deltas of the roster are at least this far apart
    roster: float = 0.25
    #: and at most this far, while anyone is online
    roster_heartbeat: float = 5.0
    #: an agent that did not beat for so long is offline
    presence: float = 25.0
    mail: float = 10.0
    #: unread direct messages are given back to their sender's knowledge after this long
    mail_ttl: float = 30 * 24 * 3600.0
    #: how long a direct message to nobody is kept, should its target just be on its way in
    mail_grace: float = 60.0
    #: a worker that does not beat for so long has died
    task_silence: float = 30.0
    task_ack_wait: float = 30.0
    #: before a failed task is tried again; doubles with each try
    task_backoff: float = 2.0
    #: tasks that ended are kept longer than the broker remembers message ids, so that a repeat is known as one
    task_keep: float = 900.0


@dataclass(frozen=True, slots=True)
class SpaceContext:
    """One space under one lease, as of now."""

    home: SpaceHome
    info: SpaceInfo
    js: JetStream
    state: StateBucket
    table: Table
    intervals: Intervals
    secret: bytes
    #: stream with replicas -> how far it was seen
    _heads: dict[str, int] = field(default_factory=dict)

    @property
    def subjects(self) -> Subjects:
        return self.table.subjects

    @property
    def streams(self) -> tuple[str, ...]:
        """Every stream of the space, the log first."""
        s = self.subjects
        return s.log_stream, s.direct_stream, s.task_stream, s.delivery_stream, s.audit_stream, s.dead_stream

    @property
    def position(self) -> int:
        """The sequence as of which the table speaks of "now"."""
        return max(self.table.head, self.table.floor)

    def tag(self, text: str) -> str:
        return tag(self.secret, text)

    # --- agents ---

    def access(self, owner: str | None) -> Access | None:
        """The access record in force of a key, revoked or not."""
        return self.table.access_at(owner, self.position) if owner else None

    def active_access(self, owner: str) -> Access | None:
        """The access record in force of an agent; None if it is not one, or was revoked."""
        access = self.access(owner)
        return None if access is None or access.revoked else access

    def access_of(self, owner: str) -> Access:
        """The access record in force, or the reason there is none."""
        access = self.access(owner)
        if access is None:
            raise DeniedError(
                f"{owner} is not an agent of space {self.subjects.space}: `tidings agent add` provisions one"
            )
        if access.revoked:
            raise AuthRevoked(f"{access.name} ({owner}) was revoked")
        return access

    def name_of(self, owner: str | None) -> str | None:
        access = self.access(owner)
        return access.name if access else None

    def sender_name(self, subject: str, sender: str) -> str | None:
        """Who published on a subject, by name. Who said it in another space is nobody of this one, whatever its key."""
        parsed = self.subjects.parse(subject)
        if not isinstance(parsed, Via):
            return self.name_of(sender)
        record = self.table.rules.link_at(parsed.link, self.position)
        return foreign_name("", sender, record.space if record else "", record.origin if record else parsed.link)

    def predecessors(self, owner: str, most: int = 8) -> list[str]:
        """The keys an agent had before its rotations, newest first."""
        found: list[str] = []
        access = self.access(owner)
        while access is not None and access.succeeds and access.succeeds not in (owner, *found) and len(found) < most:
            found.append(access.succeeds)
            access = self.access(access.succeeds)
        return found

    def has_successor(self, owner: str) -> bool:
        """Did an agent that is here have this key before a rotation?"""
        return any(owner in self.predecessors(each) for each in self.table.owners() if self.active_access(each))

    def holds_role(self, owner: str, role: str) -> bool:
        access = self.active_access(owner)
        return access is not None and role in access.roles

    def open_intervals(self, owner: str) -> list[Interval]:
        return [interval for interval in self.table.intervals(owner) if interval.left is None]

    # --- settings ---

    def settings(self) -> SpaceSettings:
        """Returns the settings of the current space record."""
        record = self.table.space_at(self.position)
        return SpaceSettings(**{name: getattr(record, name) for name in SpaceSettings.__struct_fields__})

    def channel_facts(self, pattern: str) -> dict[str, Any]:
        """What holds on a channel now. A pattern has no record of its own: defaults speak for it."""
        at = self.position
        defaults = self.table.space_at(at).defaults
        record = self.table.channel_at(pattern, at) if is_channel(pattern) else None
        facts: dict[str, Any] = {
            "channel": pattern,
            "cls": self.table.class_at(pattern, at) if is_channel(pattern) else defaults.cls or "durable",
            "replay": _first(record.replay if record else None, defaults.replay, True),
            #: which of these the channel itself says; the rest is the space's default
            "own": [name for name, key in OWN if record and getattr(record, key) is not None],
            "replay_window": _first(record.replay_window if record else None, defaults.replay_window),
        }
        if record:
            facts |= {
                "description": record.description,
                "instructions": record.instructions,
                "by": record.by,
                "by_name": self.name_of(record.by),
                "at": record.at,
            }
        return facts

    # --- streams ---

    async def head(self, stream: str, at_least: int = 0) -> int:
        """The end of a stream. Of one with replicas it is not before what was seen of it, or `at_least`, which somebody
        has a record of: whoever says so lags, and is asked again for a while."""
        if not self.js.replicated:
            return int((await self.js.info(stream))["state"]["last_seq"])
        known = max(at_least, self._heads.get(stream, 0))
        found = int((await self.js.run(info_from(stream, known, replicated=True)))["state"]["last_seq"])
        if found < known:
            raise BrokerUnreachable(f"{stream} ends at {found} by a replica that lags: it had {known}; ask again")
        self._heads[stream] = found
        return found

    async def log_head(self, at_least: int = 0) -> int:
        return await self.head(self.subjects.log_stream, at_least)

    async def consumer(self, stream: str, name: str) -> dict[str, Any] | None:
        """What the broker says of a consumer; None if there is none."""
        try:
            return dict(await self.js.api(f"CONSUMER.INFO.{stream}.{name}"))
        except ApiError as error:
            if error.err_code != NO_CONSUMER:
                raise
            return None

    async def ack_floor(self, stream: str, name: str) -> int:
        """The sequence up to which a consumer acknowledged everything; 0 if there is none."""
        info = await self.consumer(stream, name)
        return int(info["ack_floor"]["stream_seq"]) if info else 0

    def channel_filters(self, channel: str) -> tuple[str, str]:
        """The subjects of a channel: what was said here, and what came over a link."""
        return f"{self.subjects.root}.chat.*.{channel}", f"{self.subjects.root}.via.*.*.{channel}"

    def open(self, record: StoredRecord) -> Received | Refused:
        """A record as every reader opens it."""
        return open_stored(self.table, record)

    def admitted(self, record: StoredRecord) -> bool:
        """Did a link in force when it was stored let this record in? Whether it is signed, readers see."""
        parsed, said = self.subjects.parse(record.subject), read_origin(record.own_fields() or ())
        if not isinstance(parsed, Via) or said is None or said[0] == self.info.id:
            return False
        asked = ClaimedOrigin(parsed.link, said[0], said[1], parsed.channel, said[2])
        return self.table.rules.admits_at(record.seq, record.time_ns)(asked)

    def received(self, record: StoredRecord | None) -> Received | None:
        """The message in a record; None if there is none that readers take."""
        opened = self.open(record) if record is not None else None
        return opened if isinstance(opened, Received) else None


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def open_stored(table: Table, record: StoredRecord) -> Received | Refused:
    """A record as every reader of the space opens it."""
    fields = record.own_fields()
    if fields is None:
        return Refused("header", "its headers are not well formed")
    admits = table.rules.admits_at(record.seq, record.time_ns)
    return open_record(table.subjects, table.space_id, record.subject, fields, record.payload, admits)


class Lifecycle:
    """The life of a steward's process, as its parts see it."""

    def __init__(self, tell_supervisor: Callable[[dict[str, Any]], None] | None = None) -> None:
        """`tell_supervisor`: how to ask for what needs a key we do not hold; None if nobody could do it."""
        self.tell_supervisor = tell_supervisor
        self.failure: BaseException | None = None
        self._stop = asyncio.Event()
        self._work: set[asyncio.Task[None]] = set()
        self._asked_for_restart = float("-inf")

    @property
    def is_over(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        self._stop.set()

    def fail(self, error: BaseException) -> None:
        """End because of this; the first cause counts."""
        self.failure = self.failure or error
        self._stop.set()

    async def stopped_within(self, seconds: float) -> bool:
        """Wait so long, unless it stops meanwhile; whether it does."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        return self._stop.is_set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Work beside everything else; stopping waits for it a while, then ends it."""
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def finish(self, patience: float) -> None:
        if self._work:
            await asyncio.wait(self._work, timeout=patience)

    def cancel(self) -> None:
        for task in self._work:
            task.cancel()

    def ask_for_restart(self, why: str) -> None:
        """The broker answers reads and stores nothing: only a start mends that."""
        if self.tell_supervisor is not None and time.monotonic() - self._asked_for_restart > RESTART_EVERY:
            self._asked_for_restart = time.monotonic()
            log.error("the broker answers reads and stores nothing (%s): asking for its restart", why)
            self.tell_supervisor({"restart_broker": why})
