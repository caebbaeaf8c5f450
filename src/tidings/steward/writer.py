"""The one writer of ruling records: checked in memory, fenced by the lease, resolved by reading.

One message can state one expectation, and that is the lease; "subject unchanged" is checked against the table,
which is right because nobody else writes. After an unknown outcome the lease is written again first, so that the
unanswered write can no longer arrive late, and only then the subject is read; nothing else is decided before. Of a log
with replicas it is read from one that has that lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from tidings.errors import (
    BrokerUnreachable,
    ConflictError,
    LeaseLost,
    LogFull,
    OutcomeUnknown,
    TidingsError,
    UnhealthyError,
)
from tidings.model.projection import LogRecord, Table, Verdict
from tidings.nats.errors import ApiError, Refusal
from tidings.nats.jetstream import JetStream
from tidings.nats.jetstream_api import last_as_of
from tidings.server.lease import StewardLease
from tidings.server.log import log_record
from tidings.server.streams import set_gate
from tidings.util import failpoints
from tidings.wire import rulings
from tidings.wire.rulings import RulingRecord
from tidings.wire.signing import SIGNATURE_HEADER, KeyPair
from tidings.wire.subjects import ChannelSubject, MemberSubject

ATTEMPTS = 5
ASK_AGAIN = 0.1
#: seconds for which a busy log is asked again, less than an agent waits for its answer
BUSY_WITHIN = 4.0
#: operations remembered of each scope, the newest
KEPT = 1_024
ADMIN = "admin"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Completed:
    """What an operation came to: the record it wrote or found, and the word for it."""

    subject: str
    seq: int
    state: str


class OperationDedup:
    """What operations came to, by the id that whoever asks chose: asked again they get the same answer.

    A record says which operation wrote it, so the index is folded from the records that are kept, and a new steward
    knows what the one before did. An operation that wrote nothing (a join of somebody who is in, a leave of somebody
    who is not) is remembered by the running steward only. Bounded per scope, which is whoever chooses the ids: an
    agent, or the administrators of the space.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self.kept = kept
        self._done: dict[str, OrderedDict[str, dict[str, Completed]]] = {}

    def note(self, scope: str, op: str, outcome: Completed) -> None:
        """One operation of ours may write several records; one of an agent writes one."""
        done = self._done.setdefault(scope, OrderedDict())
        done.setdefault(op, {}).setdefault(outcome.subject, outcome)
        if len(done) > self.kept:
            done.popitem(last=False)

    def outcome(self, scope: str, op: str, subject: str, *states: str) -> Completed | None:
        """What this operation came to, if it was done; ConflictError if it was another one.

        `states`: what it can have come to, if it is the one that is asked for again. Administrators do one thing in
        several steps, so theirs may have done other things too.
        """
        known = self._done.get(scope)
        done = known.get(op) if known else None
        if done is None:
            return None
        found = done.get(subject)
        if scope == ADMIN:
            return found
        if found is None or (states and found.state not in states):
            other = found or next(iter(done.values()))
            raise ConflictError(
                f"the operation id {op} was used for something else ({other.state} at {other.seq}): "
                "every operation needs an id of its own"
            )
        return found


class _Op(msgspec.Struct):
    op: str
    state: str = ""
    by: str | None = None


async def _nobody(_why: str) -> None:
    return None


class RulingWriter:
    """Writes ruling records and keeps the table and the last operation of each subject beside them."""

    def __init__(self, js: JetStream, lease: StewardLease, table: Table, key: KeyPair) -> None:
        self.js = js
        self.lease = lease
        self.table = table
        self.key = key
        #: hold it from the check to the write: a decision and its record are one step
        self.lock = asyncio.Lock()
        self.last_op: dict[str, tuple[str, int]] = {}
        #: what every operation came to, whatever was ruled since
        self.operations = OperationDedup()
        #: hears the subject of every record that changed something
        self.on_effective: Callable[[str], None] = lambda _subject: None
        #: hears that a write was not answered
        self.on_unwritten: Callable[[str], Awaitable[None]] = _nobody

    def access_seq(self, owner: str) -> int:
        """Where the access record of an agent was last written; 0 if it never was."""
        return self.last_op.get(self.table.subjects.access(owner), ("", 0))[1]

    def learn(self, record: LogRecord) -> Verdict:
        """Take a record of the log into the table, and remember which operation wrote it."""
        verdict = self.table.apply(record)
        if verdict is Verdict.EFFECTIVE:
            said = msgspec.json.decode(record.payload, type=_Op)
            self.last_op[record.subject] = (said.op, record.seq)
            scope, state = self._told_by(record.subject, said)
            self.operations.note(scope, said.op, Completed(record.subject, record.seq, state))
            self.on_effective(record.subject)
        return verdict

    def _told_by(self, subject: str, said: _Op) -> tuple[str, str]:
        """Whose operation wrote a record, and what it is called."""
        parsed = self.table.subjects.parse(subject)
        if isinstance(parsed, MemberSubject):
            return parsed.owner, "opened" if said.state == "in" else "left"
        if isinstance(parsed, ChannelSubject) and said.by:
            return said.by, "set"
        return ADMIN, "set"

    async def write(self, subject: str, record: RulingRecord) -> int:
        """Write one ruling; the answer is its sequence. The caller holds `lock`."""
        assert self.lock.locked(), "a ruling is written under the writer's lock"
        payload = rulings.encode(record)
        tail = self.table.subjects.tail(subject)
        signature = rulings.sign_ruling(self.key, self.table.space_id, tail, payload)
        seq = await self._publish(subject, payload, signature, record.op)
        verdict = self.learn(LogRecord(seq, 0, subject, {SIGNATURE_HEADER: signature}, payload))
        if verdict.is_void:
            raise UnhealthyError(f"ruling {seq} on {subject} is void ({verdict}): the steward's check was wrong")
        return seq

    async def _publish(self, subject: str, payload: bytes, signature: str, op: str) -> int:
        closed = False
        for _ in range(ATTEMPTS):
            failpoints.reach("steward.before_write")
            try:
                seq = await self._publish_once(subject, payload, signature)
            except OutcomeUnknown as error:
                log.warning("%s; renewing the lease to find out", error)
                await self.on_unwritten(str(error))
                found = await self._resolve(subject, op)
                if found:
                    return found
            except ApiError as error:
                if error.proves_nothing(self.lease.seq) and self.lease.replicated:
                    raise BrokerUnreachable(
                        f"{subject} was not written: the broker is busy ({error.description}); ask again"
                    ) from error
                if error.refusal is Refusal.STALE:
                    raise LeaseLost(
                        f"the broker refused a ruling: {await self.lease.current()} holds the lease"
                    ) from error
                if not error.is_full:
                    raise
                if closed:
                    raise LogFull(
                        "the log has used up even its reserve, so nothing can be ruled: raise its budget"
                    ) from error
                log.warning("the log is full; closing the gate")
                await set_gate(self.js, self.table.subjects, gate_open=False)
                closed = True
            else:
                failpoints.reach("steward.after_write")
                return seq
        raise OutcomeUnknown(f"{subject} could not be written in {ATTEMPTS} attempts; ask again with the same op")

    async def _publish_once(self, subject: str, payload: bytes, signature: str) -> int:
        """With replicas a write is refused for a while: another is under way, a former leader answers, or there is none
        yet. Nothing was stored then."""
        deadline = asyncio.get_running_loop().time() + BUSY_WITHIN
        while True:
            try:
                return await self.js.publish(subject, payload, {SIGNATURE_HEADER: signature, **self.lease.fence})
            except (ApiError, BrokerUnreachable) as error:
                waits = self.lease.replicated and asyncio.get_running_loop().time() < deadline
                if not waits or (isinstance(error, ApiError) and not error.proves_nothing(self.lease.seq)):
                    raise
            await asyncio.sleep(ASK_AGAIN)

    async def _resolve(self, subject: str, op: str) -> int | None:
        """Find out whether a write happened, however long the broker is away.

        The lock stays held: a decision made on a table that may lack this record could contradict it.
        """
        while True:
            try:
                await self.lease.renew()
                return await self._find(subject, op)
            except LeaseLost:
                raise
            except TidingsError as error:
                log.warning("%s; asking again", error)
                await self.on_unwritten(str(error))
                await asyncio.sleep(ASK_AGAIN)

    async def _find(self, subject: str, op: str) -> int | None:
        """The sequence at which our operation is the newest record of its subject, read from the leader."""
        stream = self.table.subjects.log_stream
        if self.lease.replicated:
            stored = await self.js.run(last_as_of(stream, subject, self.lease.subject, self.lease.seq))
        else:
            stored = await self.js.last(stream, subject)
        if stored is None:
            return None
        try:
            found = msgspec.json.decode(log_record(stored).payload, type=_Op).op
        except msgspec.MsgspecError:
            return None
        return stored.seq if found == op else None
