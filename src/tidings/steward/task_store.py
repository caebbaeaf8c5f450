"""Where the steward writes tasks down: holds in the state bucket, results in AUD, dead letters in DEAD.

The bucket evicts its oldest keys when it is full, floors included, so its keys must not grow with the number of
tasks: a hold takes a numbered slot, and the slot is used again. Every write is a compare-and-set that names the lease,
so of two stewards one hands a task out. Results and dead letters keep the payload byte for byte as their own payload;
what the steward adds is one JSON header.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec

from tidings.errors import ConflictError, LeaseLost, OutcomeUnknown, TidingsError
from tidings.model.task_rules import OUTCOMES_KEPT, EndedTask, TaskState
from tidings.nats.jetstream import JetStream, StoredRecord
from tidings.server.grants import MAX_MESSAGE
from tidings.server.state import StateBucket
from tidings.steward.retention import RECORD_OVERHEAD, stored_size
from tidings.wire.records import values_of
from tidings.wire.signing import SIGNATURE_HEADER
from tidings.wire.states import TaskCause, TaskStatus
from tidings.wire.subjects import Subjects

TASK_HEADER = "Td-Task"
MSG_ID = "Nats-Msg-Id"
ATTEMPTS = 4
#: room for names and lengths in a record's own accounting
MARGIN = 1_024
#: receipts lie between the results, several to each
OTHERS_IN_AUDIT = 10
log = logging.getLogger(__name__)


@dataclass
class _Slot:
    key: str
    revision: int


class HoldSlots:
    """Open tasks, written down. One writer: the caller holds the lock."""

    def __init__(self, state: StateBucket, lease_seq: int) -> None:
        self.state = state
        self.lease_seq = lease_seq
        self._free: list[_Slot] = []
        self._used: dict[int, _Slot] = {}
        #: free ones that still hold what ended
        self._stale: dict[str, _Slot] = {}
        self._count = 0

    async def load(self) -> list[TaskState]:
        tasks = []
        for key, entry in (await self.state.under("task")).items():
            slot = _Slot(key, entry.revision)
            self._count = max(self._count, int(key.rpartition(".")[2]) + 1)
            held = entry.value.get("task")
            if held is None:
                self._free.append(slot)
                continue
            task = msgspec.convert(held, TaskState)
            self._used[task.seq] = slot
            tasks.append(task)
        return tasks

    async def write(self, task: TaskState) -> None:
        slot = self._used.get(task.seq)
        if slot is None:
            if not self._free:
                self._free.append(_Slot(f"task.{self._count}", 0))
                self._count += 1
            slot = self._used[task.seq] = self._free.pop()
        await self._put(slot, msgspec.to_builtins(task))

    def free(self, seq: int) -> None:
        """Forget a task. Its result or dead letter is what counts, so its slot is cleared later, or used again."""
        slot = self._used.pop(seq, None)
        if slot is not None:
            self._free.append(slot)
            self._stale[slot.key] = slot

    async def flush(self) -> None:
        """Clear the slots that were freed and not used again."""
        for slot in list(self._stale.values()):
            try:
                await self._put(slot, None)
            except LeaseLost:
                raise
            except TidingsError as error:
                self._stale[slot.key] = slot
                log.warning("slot %s keeps a task that ended for now: %s", slot.key, error)
                return

    async def _put(self, slot: _Slot, task: dict[str, Any] | None) -> None:
        value = {"lease": self.lease_seq, "task": task}
        self._stale.pop(slot.key, None)
        for _ in range(ATTEMPTS):
            try:
                slot.revision = await self.state.put(slot.key, value, slot.revision)
            except (OutcomeUnknown, ConflictError):
                entry = await self.state.get(slot.key)
                slot.revision = entry.revision if entry else 0
                if entry is not None and entry.value == json.loads(json.dumps(value)):
                    return
                if entry is not None and entry.value["lease"] > self.lease_seq:
                    raise LeaseLost(f"the steward under lease {entry.value['lease']} keeps the tasks now") from None
            else:
                return
        raise OutcomeUnknown(f"{slot.key} could not be written in {ATTEMPTS} attempts")


@dataclass(frozen=True, slots=True)
class TaskRecords:
    """Results and dead letters of one space."""

    js: JetStream
    subjects: Subjects

    async def write_result(self, task: TaskState, payload: bytes, signature: str) -> EndedTask:
        assert task.worker is not None
        facts = EndedTask(**_known(task), state=TaskStatus.DONE, record=0, worker=task.worker, at=time.time())
        headers = {
            SIGNATURE_HEADER: signature,
            TASK_HEADER: _header(facts),
            MSG_ID: f"result-{task.seq}-{task.time_ns}",
        }
        return await self._write(self.subjects.audit("result", task.asker), payload, headers, facts)

    async def write_dead(
        self, task: TaskState, cause: TaskCause, record: StoredRecord | None, op: str, *, most: int = MAX_MESSAGE
    ) -> EndedTask:
        """The record as it was, and why nobody finished it. One above `most` bytes keeps its digest only."""
        facts = EndedTask(
            **_known(task),
            state=TaskStatus.DEAD,
            record=0,
            worker=task.worker,
            cause=cause,
            ended_by=op,
            at=time.time(),
        )
        payload, block = (record.payload, record.own_block) if record else (b"", b"")
        more: dict[str, Any] = {"subject": self.subjects.task(task.role, task.asker)}
        size = len(payload) + len(block) * 4 // 3 + len(_header(facts)) + MARGIN
        if size > most:
            more["cut"] = hashlib.sha256(payload).hexdigest()
            payload, block = b"", b""
        more["headers"] = base64.b64encode(block).decode()
        headers = {TASK_HEADER: _header(facts, **more), MSG_ID: f"dead-{task.seq}-{task.time_ns}-{task.attempt}"}
        return await self._write(self._dead_subject(task.seq), payload, headers, facts)

    async def write_dropped(self, dead: EndedTask, by: str) -> EndedTask:
        """What remains of a dead letter somebody dropped: that there was one."""
        facts = msgspec.structs.replace(dead, state=TaskStatus.DROPPED, at=time.time())
        headers = {TASK_HEADER: _header(facts, by=by), MSG_ID: f"drop-{dead.record}"}
        dropped = await self._write(self._dead_subject(dead.seq), b"", headers, facts)
        await self.js.purge(self.subjects.dead_stream, subject_filter=self._dead_subject(dead.seq), keep=1)
        return dropped

    async def forget_dead(self, seq: int, *, through: int | None = None, keep: int | None = None) -> None:
        """Remove the dead letters of a task up to a record, or all but the newest `keep`."""
        below = None if through is None else through + 1
        await self.js.purge(self.subjects.dead_stream, subject_filter=self._dead_subject(seq), below=below, keep=keep)

    def _dead_subject(self, seq: int) -> str:
        return self.subjects.dead("task", str(seq))

    async def _write(self, subject: str, payload: bytes, headers: dict[str, str], facts: EndedTask) -> EndedTask:
        size = RECORD_OVERHEAD + len(subject) + len(payload) + sum(len(k) + len(v) for k, v in headers.items())
        for attempt in range(ATTEMPTS):
            try:
                seq = await self.js.publish(subject, payload, headers)
            except OutcomeUnknown:
                if attempt == ATTEMPTS - 1:
                    raise
            else:
                return msgspec.structs.replace(facts, record=seq, size=size)
        raise AssertionError("unreachable")

    # --- reading ---

    async def outcomes(self) -> AsyncIterator[EndedTask]:
        """What became of the newest tasks, results first: a result outweighs a dead letter."""
        for stream, subject_filter, back in (
            (self.subjects.audit_stream, f"{self.subjects.root}.aud.result.*", OUTCOMES_KEPT * OTHERS_IN_AUDIT),
            (self.subjects.dead_stream, f"{self.subjects.root}.dead.task.*", OUTCOMES_KEPT),
        ):
            head = int((await self.js.info(stream))["state"]["last_seq"])
            async for page in self.js.read(stream, subject_filter, max(1, head - back), head):
                for record in page:
                    facts = _facts(record)
                    if facts is not None:
                        yield msgspec.structs.replace(facts[0], record=record.seq, size=stored_size(record))

    async def result_of(self, outcome: EndedTask) -> tuple[bytes, str] | None:
        """Payload and signature of a result."""
        record = await self.js.at(self.subjects.audit_stream, outcome.record)
        if record is None:
            return None
        signatures = values_of(record.own_fields() or (), SIGNATURE_HEADER)
        return record.payload, signatures[0] if signatures else ""

    async def dead_record(self, record_seq: int) -> StoredRecord | None:
        """The task's record as it was stored, from its dead letter; None if it was too large to keep, or is gone."""
        found = await self.js.at(self.subjects.dead_stream, record_seq)
        facts = _facts(found) if found else None
        if found is None or facts is None or "cut" in facts[1] or "headers" not in facts[1]:
            return None
        outcome, more = facts
        block = base64.b64decode(more["headers"])
        return StoredRecord(outcome.seq, outcome.time_ns, more["subject"], block, found.payload)

    async def task_record(self, task: TaskState) -> StoredRecord | None:
        """The record of an open task."""
        if task.revived_from:
            return await self.dead_record(task.revived_from)
        record = await self.js.at(self.subjects.task_stream, task.seq)
        return record if record is not None and record.time_ns == task.time_ns else None


def _known(task: TaskState) -> dict[str, Any]:
    names = ("seq", "time_ns", "role", "asker", "id", "attempt", "reasons", "workers", "claimed_at", "session")
    return {name: getattr(task, name) for name in names}


def _header(facts: EndedTask, **more: Any) -> str:
    return json.dumps({**msgspec.to_builtins(facts), **more}, separators=(",", ":"))


def _facts(record: StoredRecord) -> tuple[EndedTask, dict[str, Any]] | None:
    values = values_of(record.own_fields() or (), TASK_HEADER)
    try:
        document = json.loads(values[-1])
        return msgspec.convert(document, EndedTask), document
    except (IndexError, ValueError, msgspec.ValidationError):
        return None  # not written by this code: it ends nothing
