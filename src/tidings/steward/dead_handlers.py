"""`ctl.dead`: what agents may do with dead letters, of messages (`letter`) and of tasks (`seq`).

Only the owner of a mailbox sees the letters of its messages; a dead task is seen by whoever asked it, with its key of
now or one it had before a rotation, and by those who hold its role. Whoever it does not concern is told the same as if
it did not exist.
"""

from __future__ import annotations

import base64
import logging
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from tidings.errors import UsageError
from tidings.model.task_rules import EndedTask, TaskState
from tidings.nats.jetstream import StoredRecord
from tidings.steward.context import SpaceContext
from tidings.steward.dead_letters import KINDS, DeadLetters, Letter
from tidings.steward.history import encoded, replay_of
from tidings.steward.link_records import shown_role
from tidings.steward.requests import Answer, ControlRequest, handles
from tidings.steward.task_handlers import task_seq
from tidings.steward.tasks import TaskQueues
from tidings.wire.envelope import Received
from tidings.wire.names import covers_any, role_parts
from tidings.wire.records import moment
from tidings.wire.states import TaskCause, TaskStatus

LONGEST_ERROR = 500
#: letters, and bytes of their messages, in one answer to a program that fetches what is wanted
FETCHED, FETCHED_BYTES = 64, 256 * 1024
LISTED = 200
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeadHandlers:
    space: SpaceContext
    letters: DeadLetters
    tasks: TaskQueues

    @handles("dead", "put")
    async def put(self, request: ControlRequest) -> Answer:
        """Keep a message that was for the caller: `kind` (direct or channel), `seq`, `error`, `attempts`."""
        access = self.space.access_of(request.sender)
        kind, seq = request.text("kind"), request.optional("seq", int) or 0
        if kind not in KINDS or seq < 1:
            raise UsageError(f"dead put needs `kind`, one of {', '.join(KINDS)}, and `seq`")
        known = next((each for each in self.letters.of(request.sender) if each.ref == f"{kind}-{seq}"), None)
        stream = self.space.subjects.direct_stream if kind == "direct" else self.space.subjects.log_stream
        record = await self.space.js.at(stream, seq) or (await self.letters.message(known) if known else None)
        opened = self.space.received(record)
        if record is None or opened is None or not self._is_for(request.sender, kind, record, opened, known):
            raise UsageError(f"there is no {kind} message {seq} of yours: it is gone, or it was never for you")
        letter = Letter(
            owner=request.sender,
            kind="direct" if kind == "direct" else "channel",
            seq=seq,
            time_ns=record.time_ns,
            subject=record.subject,
            sender=opened.sender,
            id=opened.message.id,
            channel=opened.destination if kind == "channel" else None,
            error=(request.optional("error", str) or "")[:LONGEST_ERROR],
            attempts=max(1, request.optional("attempts", int) or 1),
            at=time.time(),
            headers=base64.b64encode(record.own_block).decode() if kind == "direct" else "",
        )
        kept = await self.letters.keep(letter, record.payload if kind == "direct" else b"")
        log.warning("%s of %s is a dead letter after %d tries", kept.ref, access.name, kept.attempts)
        return {"letter": kept.ref, "state": kept.state}

    def _is_for(self, owner: str, kind: str, record: StoredRecord, opened: Received, known: Letter | None) -> bool:
        """Was this message for the owner? Of a channel's past, what it may be shown in any other way, and no more."""
        if kind == "direct":
            return opened.kind == "dm" and opened.destination == owner
        channel = opened.destination
        if opened.kind != "chat" or not covers_any(self.space.access_of(owner).read, channel):
            return False
        is_known = known is not None and known.time_ns == record.time_ns
        return is_known or replay_of(self.space, owner, channel).shows(record.seq, record.time_ns)

    @handles("dead", "wanted")
    async def wanted(self, request: ControlRequest) -> Answer:
        """The caller's letters that are to be retried, oldest first, with their messages, as far as those are there."""
        self.space.access_of(request.sender)
        found: list[dict[str, Any]] = []
        size = 0
        letters = [each for each in self.letters.of(request.sender) if each.state == "wanted"]
        for letter in letters[:FETCHED]:
            record = await self.letters.message(letter)
            size += len(record.payload) * 4 // 3 if record else 0
            if found and size > FETCHED_BYTES:
                break
            found.append({**self._letter_line(letter), "record": encoded(record) if record else None})
        return {"letters": found, "more": len(found) < len(letters)}

    def _letter(self, request: ControlRequest) -> Letter:
        ref = request.text("letter")
        for letter in self.letters.of(request.sender):
            if letter.ref == ref:
                return letter
        raise UsageError(f"there is no dead letter {ref[:64]!r} of yours: `tidings dead list` shows them")

    def _letter_line(self, letter: Letter) -> dict[str, Any]:
        return {
            "letter": letter.ref,
            "kind": letter.kind,
            "seq": letter.seq,
            "id": letter.id,
            "sender": letter.sender,
            "sender_name": self.space.sender_name(letter.subject, letter.sender),
            "channel": letter.channel,
            "error": letter.error,
            "attempts": letter.attempts,
            "state": letter.state,
            "at": moment(letter.at),
        }

    async def _show_letter(self, request: ControlRequest) -> Answer:
        letter = self._letter(request)
        record = await self.letters.message(letter)
        return {**self._letter_line(letter), "record": encoded(record) if record else None}

    async def _retry_letter(self, request: ControlRequest) -> Answer:
        """Hand it out again, to the program that receives for the caller now or later."""
        letter = self._letter(request)
        record = await self.letters.message(letter)
        if record is None:
            raise UsageError(f"{letter.ref} was too large to keep, or has left the log: drop it")
        if letter.state != "wanted":
            payload = record.payload if letter.kind == "direct" else b""
            await self.letters.keep(msgspec.structs.replace(letter, state="wanted"), payload)
        return {"letter": letter.ref, "state": "wanted"}

    async def _drop_letter(self, request: ControlRequest) -> Answer:
        """For good. What is dropped already is dropped: whoever is done with a retried letter may ask twice."""
        ref = request.text("letter")
        for letter in self.letters.of(request.sender):
            if letter.ref == ref:
                await self.letters.drop(letter)
        return {"letter": ref, "state": "dropped"}

    # --- of tasks, or of both ---

    def _concerns(self, outcome: EndedTask, agent: str) -> bool:
        return self._asked(outcome, agent) or self.space.holds_role(agent, outcome.role)

    def _asked(self, task: EndedTask | TaskState, agent: str) -> bool:
        """Did the agent ask it, with its key of now or one it had before a rotation?"""
        return task.asker == agent or task.asker in self.space.predecessors(agent)

    def _dead(self, request: ControlRequest) -> EndedTask:
        found = self.tasks.holds.book.outcomes.get(task_seq(request))
        is_dead = found is not None and found.state == TaskStatus.DEAD and found.seq not in self.tasks.holds.book.open
        if found is None or not is_dead or not self._concerns(found, request.sender):
            raise UsageError(f"there is no dead letter {task_seq(request)} of yours: `tidings dead list` shows them")
        return found

    def _task_line(self, outcome: EndedTask) -> dict[str, Any]:
        return {
            "seq": outcome.seq,
            "id": outcome.id,
            "role": shown_role(self.space, outcome.role),
            "asker": outcome.asker,
            "asker_name": self.space.name_of(outcome.asker),
            "cause": outcome.cause,
            "attempts": outcome.attempt,
            "reasons": list(outcome.reasons),
            "workers": list(outcome.workers),
            "at": moment(outcome.at),
        }

    @handles("dead", "list")
    async def list_letters(self, request: ControlRequest) -> Answer:
        self.space.access_of(request.sender)
        book = self.tasks.holds.book
        found = [
            self._task_line(each)
            for each in reversed(book.outcomes.values())
            if each.state == TaskStatus.DEAD and each.seq not in book.open and self._concerns(each, request.sender)
        ]
        mail = [self._letter_line(each) for each in reversed(self.letters.of(request.sender)[-LISTED:])]
        return {"dead": found[:LISTED], "more": len(found) > LISTED, "mail": mail}

    @handles("dead", "show")
    async def show(self, request: ControlRequest) -> Answer:
        self.space.access_of(request.sender)
        if request.arguments.get("letter") is not None:
            return await self._show_letter(request)
        dead = self._dead(request)
        record = await self.tasks.holds.records.dead_record(dead.record)
        return {**self._task_line(dead), "record": encoded(record) if record else None}

    @handles("dead", "retry")
    async def retry(self, request: ControlRequest) -> Answer:
        self.space.access_of(request.sender)
        if request.arguments.get("letter") is not None:
            return await self._retry_letter(request)
        holds = self.tasks.holds
        async with holds.lock:
            waiting = holds.book.open.get(task_seq(request))
            if waiting is not None and waiting.revived_from and self._asked(waiting, request.sender):
                return {"state": TaskStatus.QUEUED, "seq": waiting.seq}
            dead = self._dead(request)
            if dead.cause == TaskCause.MALFORMED:
                raise UsageError(f"task {dead.seq} is malformed and always will be: drop it, and ask again")
            if role_parts(dead.role)[1] or self.space.access(dead.asker) is None:
                raise UsageError(f"task {dead.seq} went over a link, and its end was told: drop it, and ask again")
            await holds.revive(dead)
        return {"state": TaskStatus.QUEUED, "seq": dead.seq}

    @handles("dead", "drop")
    async def drop(self, request: ControlRequest) -> Answer:
        self.space.access_of(request.sender)
        if request.arguments.get("letter") is not None:
            return await self._drop_letter(request)
        holds = self.tasks.holds
        async with holds.lock:
            dead = self._dead(request)
            holds.book.end(await holds.records.write_dropped(dead, request.sender))
        return {"state": TaskStatus.DROPPED, "seq": dead.seq}
