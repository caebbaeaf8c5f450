"""The queues as the broker keeps them: one durable pull consumer per role, pulled only by the desk.

Taking in is where a record becomes a task: what does not verify is a dead letter at once and is never handed out. A
redelivery by the broker is nothing but a fresh address to acknowledge at: what was settled or is held is known in the
book. The record that came with a pull is kept for the claim it was pulled for, so a claim reads nothing twice.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from tidings.broker.answers import NO_CONSUMER, ApiError
from tidings.broker.jetstream import StoredRecord
from tidings.nats.errors import NatsError
from tidings.steward.task_rules import TaskState, asked_deadline
from tidings.wire.envelope import Refused, open_record
from tidings.wire.subjects import Task

if TYPE_CHECKING:
    from tidings.steward.tasks import TaskDesk

PULL_SECONDS = 3.0
MAX_PENDING = 1_000
#: records that came with a pull and were not handed out yet
FRESH = 64


@dataclass(frozen=True, slots=True)
class Place:
    """How far the queue of a role is: everything up to `settled` is over, nothing above `delivered` was ever pulled."""

    settled: int = 0
    delivered: int = 0
    pending: int | None = None


class TaskIntake:
    def __init__(self, desk: TaskDesk) -> None:
        self.desk = desk
        self.js = desk.js
        self.subjects = desk.subjects
        self.stream = desk.subjects.task_stream
        self._fresh: OrderedDict[int, StoredRecord] = OrderedDict()
        #: role -> the newest sequence that was ever pulled, as far as was asked: only we pull
        self._pulled: dict[str, int] = {}

    def subject_filter(self, role: str) -> str:
        return f"{self.subjects.root}.task.{role}.*"

    # --- the consumer ---

    async def make_consumer(self, role: str) -> None:
        name, subject_filter = f"task_{role}", self.subject_filter(role)
        config = {
            "name": name,
            "durable_name": name,
            "filter_subject": subject_filter,
            "ack_policy": "explicit",
            "ack_wait": int(self.desk.intervals.task_ack_wait * 1e9),
            "max_ack_pending": MAX_PENDING,
            "max_deliver": -1,
            "deliver_policy": "all",
            "max_waiting": 32,
        }
        await self.js.api(
            f"CONSUMER.CREATE.{self.stream}.{name}.{subject_filter}", {"stream_name": self.stream, "config": config}
        )

    async def place(self, role: str) -> Place:
        """Where the queue of a role stands; nothing was pulled if nobody ever claimed."""
        try:
            info = await self.js.api(f"CONSUMER.INFO.{self.stream}.task_{role}")
        except ApiError as error:
            if error.err_code == NO_CONSUMER:
                return Place()
            raise
        delivered = int(info["delivered"]["stream_seq"])
        self._pulled[role] = max(delivered, self._pulled.get(role, 0))
        return Place(int(info["ack_floor"]["stream_seq"]), delivered, int(info["num_pending"]))

    async def was_pulled(self, role: str, seq: int) -> bool:
        """Could this record have been handed out before? Costs a round trip once per role, not once per task."""
        if role not in self._pulled:
            self._pulled[role] = max((await self.place(role)).delivered, self._pulled.get(role, 0))
        return seq <= self._pulled[role]

    async def pull(self, role: str, batch: int, taken: Any) -> bool:
        """Ask for tasks and take in what comes, calling `taken` after each. False if the broker did not understand.

        A fresh inbox for each pull: what an older one still gets is nobody's.
        """
        connection = self.js.connection
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.task_{role}"
        body = json.dumps({"batch": batch, "expires": int(PULL_SECONDS * 1e9)}).encode()
        inbox = connection.new_inbox()
        try:
            subscription = await connection.subscribe(inbox)
            try:
                await connection.publish(subject, body, reply=inbox)
                for _ in range(batch):
                    message = await subscription.next(PULL_SECONDS + 1)
                    if not message.reply.startswith("$JS.ACK."):  # whatever its headers say, that is a message
                        return message.status == 408
                    await self._take_message(message)
                    taken()
            finally:
                await subscription.unsubscribe()
        except (TimeoutError, NatsError, OSError):
            return False
        return True

    async def _take_message(self, message: Any) -> None:
        seq, time_ns = place_of(message.reply)
        record = StoredRecord(seq, time_ns, message.subject, message.block, message.data)
        await self.take_in(record, str(message.reply))

    # --- from a record to a task ---

    async def take_in(self, record: StoredRecord, ack: str) -> None:
        """A task the broker handed us: new, or one we know that it delivered again."""
        desk, role = self.desk, record.subject.split(".")[-2]
        self._pulled[role] = max(record.seq, self._pulled.get(role, 0))
        async with desk.lock:
            known = desk.book.open.get(record.seq)
            if known is not None and known.time_ns == record.time_ns:
                desk.book.put(msgspec.structs.replace(known, ack=ack))
                return
            if desk.book.settled_as(record.seq, record.time_ns) is not None:
                await self.say(ack, b"+ACK")
                return
            task, refused = self.read(record, ack)
            if refused is not None:
                await desk.settling.bury(task, "malformed", refused.detail, record=record)
                return
            if desk.book.find(task.asker, task.id) is not None:
                desk.counts["repeated"] += 1  # (sender, id) is one task, whatever record holds it
                await self.say(ack, b"+ACK")
                return
            desk.book.put(task)
            self._keep(record)

    def _keep(self, record: StoredRecord) -> None:
        self._fresh[record.seq] = record
        if len(self._fresh) > FRESH:
            self._fresh.popitem(last=False)

    async def record_of(self, task: TaskState) -> StoredRecord | None:
        """The record of an unsettled task: from the pull that brought it, else read."""
        fresh = self._fresh.pop(task.seq, None)
        if fresh is not None and fresh.time_ns == task.time_ns and not task.revived_from:
            return fresh
        return await self.desk.records.task_record(task)

    def read(self, record: StoredRecord, ack: str | None) -> tuple[TaskState, Refused | None]:
        address = self.subjects.parse(record.subject)
        assert isinstance(address, Task)
        fields = record.own_fields()
        opened: Any = Refused("header", "its headers cannot be read")
        if fields is not None:
            opened = open_record(self.subjects, self.desk.steward.info.id, record.subject, fields, record.payload)
        place: dict[str, Any] = {
            "seq": record.seq,
            "time_ns": record.time_ns,
            "role": address.role,
            "asker": address.sender,
        }
        if isinstance(opened, Refused):
            return TaskState(**place, id="", ack=ack), opened
        due = asked_deadline(opened.message, record.time_ns)
        return TaskState(**place, id=opened.message.id, ack=ack, due=due), None

    # --- words to the broker ---

    async def say(self, ack: str, word: bytes) -> None:
        """Fire and forget: what the broker does not hear it delivers again, and we know what became of it."""
        with suppress(NatsError, OSError):
            await self.js.connection.publish(ack, word)

    async def acknowledge(self, task: TaskState) -> None:
        if task.ack is not None:
            await self.say(task.ack, b"+ACK")


def place_of(ack: str) -> tuple[int, int]:
    """Sequence and time of the record an acknowledgement address speaks of, in both of its forms."""
    tokens = ack.split(".")
    start = 5 if len(tokens) == 9 else 7
    return int(tokens[start]), int(tokens[start + 2])
