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

import msgspec

from tidings.contract.core import Caller
from tidings.contract.mail import (
    DeadLetterAnswer,
    DeadLetterRequest,
    DeadLettersAnswer,
    DeadLettersRequest,
    DeadTaskRow,
    DropLetterRequest,
    KeepLetterRequest,
    LetterChangedAnswer,
    LetterRow,
    RetryLetterRequest,
    WantedLetterRow,
    WantedLettersAnswer,
    WantedLettersRequest,
)
from tidings.errors import UsageError
from tidings.model.task_rules import EndedTask, TaskState
from tidings.nats.jetstream import StoredRecord
from tidings.rpc.dispatch import handler
from tidings.steward.context import SpaceContext
from tidings.steward.dead_letters import DeadLetters, Letter
from tidings.steward.history import raw_record, replay_of
from tidings.steward.link_records import shown_role
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

    @handler(KeepLetterRequest)
    async def keep(self, caller: Caller, request: KeepLetterRequest) -> LetterChangedAnswer:
        """Refuses a message that was not for the caller."""
        access = self.space.access_of(caller.id)
        kind, seq = request.kind, request.seq
        known = next((each for each in self.letters.of(caller.id) if each.ref == f"{kind}-{seq}"), None)
        stream = self.space.subjects.direct_stream if kind == "direct" else self.space.subjects.log_stream
        record = await self.space.js.at(stream, seq) or (await self.letters.message(known) if known else None)
        opened = self.space.received(record)
        if record is None or opened is None or not self._is_for(caller.id, kind, record, opened, known):
            raise UsageError(f"there is no {kind} message {seq} of yours: it is gone, or it was never for you")
        letter = Letter(
            owner=caller.id,
            kind=kind,
            seq=seq,
            time_ns=record.time_ns,
            subject=record.subject,
            sender=opened.sender,
            id=opened.message.id,
            channel=opened.destination if kind == "channel" else None,
            error=request.error[:LONGEST_ERROR],
            attempts=max(1, request.attempts),
            at=time.time(),
            headers=base64.b64encode(record.own_block).decode() if kind == "direct" else "",
        )
        kept = await self.letters.keep(letter, record.payload if kind == "direct" else b"")
        log.warning("%s of %s is a dead letter after %d tries", kept.ref, access.name, kept.attempts)
        return LetterChangedAnswer(letter=kept.ref, state=kept.state)

    def _is_for(self, owner: str, kind: str, record: StoredRecord, opened: Received, known: Letter | None) -> bool:
        """Was this message for the owner? Of a channel's past, what it may be shown in any other way, and no more."""
        if kind == "direct":
            return opened.kind == "dm" and opened.destination == owner
        channel = opened.destination
        if opened.kind != "chat" or not covers_any(self.space.access_of(owner).read, channel):
            return False
        is_known = known is not None and known.time_ns == record.time_ns
        return is_known or replay_of(self.space, owner, channel).shows(record.seq, record.time_ns)

    @handler(WantedLettersRequest)
    async def wanted(self, caller: Caller, _request: WantedLettersRequest) -> WantedLettersAnswer:
        self.space.access_of(caller.id)
        found: list[WantedLetterRow] = []
        size = 0
        letters = [each for each in self.letters.of(caller.id) if each.state == "wanted"]
        for letter in letters[:FETCHED]:
            record = await self.letters.message(letter)
            size += len(record.payload) * 4 // 3 if record else 0
            if found and size > FETCHED_BYTES:
                break
            row = msgspec.structs.asdict(self._letter_row(letter))
            found.append(WantedLetterRow(**row, record=raw_record(record) if record else None))
        return WantedLettersAnswer(tuple(found), more=len(found) < len(letters))

    def _letter(self, owner: str, name: str) -> Letter:
        for letter in self.letters.of(owner):
            if letter.ref == name:
                return letter
        raise UsageError(f"there is no dead letter {name[:64]!r} of yours: `tidings dead list` shows them")

    def _letter_row(self, letter: Letter) -> LetterRow:
        return LetterRow(
            letter=letter.ref,
            kind=letter.kind,
            seq=letter.seq,
            id=letter.id,
            sender=letter.sender,
            sender_name=self.space.sender_name(letter.subject, letter.sender),
            channel=letter.channel,
            error=letter.error,
            attempts=letter.attempts,
            state=letter.state,
            at=moment(letter.at),
        )

    async def _retry_letter(self, letter: Letter) -> LetterChangedAnswer:
        """Hand it out again, to the program that receives for the caller now or later."""
        record = await self.letters.message(letter)
        if record is None:
            raise UsageError(f"{letter.ref} was too large to keep, or has left the log: drop it")
        if letter.state != "wanted":
            payload = record.payload if letter.kind == "direct" else b""
            await self.letters.keep(msgspec.structs.replace(letter, state="wanted"), payload)
        return LetterChangedAnswer(letter=letter.ref, state="wanted")

    async def _drop_letter(self, owner: str, name: str) -> LetterChangedAnswer:
        """For good. What is dropped already is dropped: whoever is done with a retried letter may ask twice."""
        for letter in self.letters.of(owner):
            if letter.ref == name:
                await self.letters.drop(letter)
        return LetterChangedAnswer(letter=name, state="dropped")

    # --- of tasks, or of both ---

    def _concerns(self, outcome: EndedTask, agent: str) -> bool:
        return self._asked(outcome, agent) or self.space.holds_role(agent, outcome.role)

    def _asked(self, task: EndedTask | TaskState, agent: str) -> bool:
        """Did the agent ask it, with its key of now or one it had before a rotation?"""
        return task.asker == agent or task.asker in self.space.predecessors(agent)

    def _dead(self, agent: str, seq: int) -> EndedTask:
        found = self.tasks.holds.book.outcomes.get(seq)
        is_dead = found is not None and found.state == TaskStatus.DEAD and found.seq not in self.tasks.holds.book.open
        if found is None or not is_dead or not self._concerns(found, agent):
            raise UsageError(f"there is no dead letter {seq} of yours: `tidings dead list` shows them")
        return found

    def _task_row(self, outcome: EndedTask) -> DeadTaskRow:
        return DeadTaskRow(
            seq=outcome.seq,
            id=outcome.id,
            role=shown_role(self.space, outcome.role),
            asker=outcome.asker,
            asker_name=self.space.name_of(outcome.asker),
            cause=outcome.cause,
            attempts=outcome.attempt,
            reasons=outcome.reasons,
            workers=outcome.workers,
            at=moment(outcome.at),
        )

    @handler(DeadLettersRequest)
    async def list_letters(self, caller: Caller, _request: DeadLettersRequest) -> DeadLettersAnswer:
        self.space.access_of(caller.id)
        book = self.tasks.holds.book
        found = [
            self._task_row(each)
            for each in reversed(book.outcomes.values())
            if each.state == TaskStatus.DEAD and each.seq not in book.open and self._concerns(each, caller.id)
        ]
        mail = tuple(self._letter_row(each) for each in reversed(self.letters.of(caller.id)[-LISTED:]))
        return DeadLettersAnswer(dead=tuple(found[:LISTED]), more=len(found) > LISTED, mail=mail)

    @handler(DeadLetterRequest)
    async def show(self, caller: Caller, request: DeadLetterRequest) -> DeadLetterAnswer:
        self.space.access_of(caller.id)
        row: LetterRow | DeadTaskRow
        if request.letter is not None:
            letter = self._letter(caller.id, request.letter)
            row, record = self._letter_row(letter), await self.letters.message(letter)
        else:
            dead = self._dead(caller.id, _task_seq(request))
            row, record = self._task_row(dead), await self.tasks.holds.records.dead_record(dead.record)
        return DeadLetterAnswer(**msgspec.structs.asdict(row), record=raw_record(record) if record else None)

    @handler(RetryLetterRequest)
    async def retry(self, caller: Caller, request: RetryLetterRequest) -> LetterChangedAnswer:
        self.space.access_of(caller.id)
        if request.letter is not None:
            return await self._retry_letter(self._letter(caller.id, request.letter))
        holds, seq = self.tasks.holds, _task_seq(request)
        async with holds.lock:
            waiting = holds.book.open.get(seq)
            if waiting is not None and waiting.revived_from and self._asked(waiting, caller.id):
                return LetterChangedAnswer(seq=waiting.seq, state="queued")
            dead = self._dead(caller.id, seq)
            if dead.cause == TaskCause.MALFORMED:
                raise UsageError(f"task {dead.seq} is malformed and always will be: drop it, and ask again")
            if role_parts(dead.role)[1] or self.space.access(dead.asker) is None:
                raise UsageError(f"task {dead.seq} went over a link, and its end was told: drop it, and ask again")
            await holds.revive(dead)
        return LetterChangedAnswer(seq=dead.seq, state="queued")

    @handler(DropLetterRequest)
    async def drop(self, caller: Caller, request: DropLetterRequest) -> LetterChangedAnswer:
        self.space.access_of(caller.id)
        if request.letter is not None:
            return await self._drop_letter(caller.id, request.letter)
        holds, seq = self.tasks.holds, _task_seq(request)
        async with holds.lock:
            dead = self._dead(caller.id, seq)
            holds.book.end(await holds.records.write_dropped(dead, caller.id))
        return LetterChangedAnswer(seq=dead.seq, state="dropped")


def _task_seq(request: DeadLetterRequest | RetryLetterRequest | DropLetterRequest) -> int:
    if request.seq is None:
        raise UsageError(f"{request.operation.name} needs `seq`, the number of a task, or `letter` of a message")
    return request.seq
