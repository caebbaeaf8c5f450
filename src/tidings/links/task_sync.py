"""One round about tasks that agents of a linked space ask roles here: how far they are is told, and new ones come in.

    our steward: how far are those that are open -> told to the peer's steward, with the result of what is done
    peer's steward: what waits for roles here -> signed by whom, for us, sealed? -> our steward: may it be queued?
      -> published as it was signed -> ledger

There is no place in the peer's queue to remember: it hands out what has no end, and leaves out what it was told of
lately. Killed anywhere, the same task is handed out again, and the ledger or our steward knows it. A task is queued
here once: what has ended is told again, and never begun again. As many lie here at once as one link may have, and of
one asker a part of that; others wait where they were asked.

A task has one row in the ledger from when it was queued or refused, for as long as its asker's space may hand it out
again. What was told last is kept, so that a change is seen, and what stays the same is told again now and then: the
other space hands out again what it hears nothing of. Rows are kept for each peer, not for each agreement.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

from msgspec.structs import replace

from tidings.contract.link_worker import LinkedTaskCounts
from tidings.contract.links import (
    ImportProgressRequest,
    ImportTasksRequest,
    LinkProgressRequest,
    LinkTasksRequest,
    TaskOffer,
    TaskProgress,
)
from tidings.errors import (
    LogFull,
    MailboxFull,
    MalformedMessage,
    MalformedRecord,
    OutcomeUnknown,
    TidingsError,
    UnreachableError,
    WireError,
)
from tidings.links.directory import PeerPlace
from tidings.links.directory_sync import AskedSteward
from tidings.links.link_store import BookedLink, milliseconds
from tidings.util.failpoints import reach
from tidings.wire.link_exchange import AGE_HEADER, PART_BYTES, TASKS_PER_PAGE, LinkedTask, ToldTask, read_tasks
from tidings.wire.links import MailOrigin, mail_origin_field
from tidings.wire.rulings import Link
from tidings.wire.seal import readers_of
from tidings.wire.signing import SIGNATURE_HEADER
from tidings.wire.states import TaskCause, TaskStatus

#: open tasks of one link here, of one asker of it, and for one role
MOST_OPEN, MOST_EACH, MOST_OF_ROLE = 64, 16, 32
#: milliseconds for which the queue here keeps what ended; tasks of one link, and bytes of them, that come in that time
KEPT_HERE, MOST_LATELY, MOST_BYTES = 15 * 60_000, 4_000, 16 * 1024 * 1024
#: milliseconds after which what did not change is told again
TELL_AGAIN = 15_000
#: pages of one round
MOST_PAGES = 4
#: milliseconds for which the row of a task that has ended is kept: longer than any deadline
KEPT_FOR = 60 * 86_400_000
#: and rows of a peer that have ended, the newest
MOST_ROWS = 20_000
RowState = Literal["open", "refused", "ended"]
_COLUMNS = "sender, id, seq, state, why, told, told_at, role, local_seq, size"


class BookedTask(NamedTuple):
    """`open`: its end is not told to its asker's space yet."""

    sender: str
    id: str
    #: where it is in the peer's queue
    seq: int
    state: RowState
    #: why it was refused
    why: str = ""
    #: how far it was when the peer was told last, and when; empty: it was not, or is to be told at once
    told: str = ""
    told_at: int = 0
    role: str = ""
    #: where it is in the queue here; 0 if that is not known
    local_seq: int = 0
    #: of its payload, if it was put into the queue here
    size: int = 0

    @property
    def key(self) -> tuple[str, str]:
        return self.sender, self.id


def find_tasks(
    connection: sqlite3.Connection, place: PeerPlace, keys: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], BookedTask]:
    """Those of these tasks that have a row."""
    query = f"SELECT {_COLUMNS} FROM task WHERE space = ? AND peer = ? AND sender = ? AND id = ?"
    rows = (connection.execute(query, (*place, *key)).fetchone() for key in keys)
    found = (BookedTask(*row) for row in rows if row is not None)
    return {each.key: each for each in found}


def add_tasks(connection: sqlite3.Connection, place: PeerPlace, tasks: Sequence[BookedTask], now: int) -> None:
    """New rows. One that is there already is to be told again: its asker's space does not know how far it is."""
    connection.executemany(
        """INSERT INTO task (space, peer, sender, id, seq, state, why, role, local_seq, size, at)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
        ON CONFLICT (space, peer, sender, id) DO UPDATE SET seq = excluded.seq, told = ''""",
        [(*place, t.sender, t.id, t.seq, t.state, t.why, t.role, t.local_seq, t.size, now) for t in tasks],
    )
    _prune(connection, place, now)


def due_tasks(connection: sqlite3.Connection, place: PeerPlace, limit: int) -> list[BookedTask]:
    """What has no end yet or is to be told, the longest untold first."""
    query = f"""SELECT {_COLUMNS} FROM task WHERE space = ? AND peer = ? AND (state = 'open' OR told = '')
      ORDER BY told_at, seq LIMIT ?"""
    return [BookedTask(*row) for row in connection.execute(query, (*place, limit))]


def note_told(connection: sqlite3.Connection, place: PeerPlace, tasks: Iterable[BookedTask], now: int) -> None:
    """These as they are now: their state, and what was told."""
    connection.executemany(
        "UPDATE task SET state = ?, told = ?, told_at = ? WHERE space = ? AND peer = ? AND sender = ? AND id = ?",
        [(each.state, each.told, now, *place, *each.key) for each in tasks],
    )


def drop_task(connection: sqlite3.Connection, place: PeerPlace, task: BookedTask) -> None:
    """The queue here does not have it any more: it may be handed out and queued again."""
    connection.execute("DELETE FROM task WHERE space = ? AND peer = ? AND sender = ? AND id = ?", (*place, *task.key))


class OpenTasks(NamedTuple):
    """How many are open here, of each asker and for each role; and how many came lately, and their bytes."""

    askers: dict[str, int]
    roles: dict[str, int]
    lately: int
    size: int


def open_tasks(connection: sqlite3.Connection, place: PeerPlace, since: int) -> OpenTasks:
    """`since`: milliseconds since 1970, from when on what came counts as lately."""
    query = "SELECT {0}, count(*) FROM task WHERE space = ? AND peer = ? AND state = 'open' GROUP BY {0}"
    askers, roles = (dict(connection.execute(query.format(each), place).fetchall()) for each in ("sender", "role"))
    lately = "SELECT count(*), coalesce(sum(size), 0) FROM task WHERE space = ? AND peer = ? AND at >= ?"
    return OpenTasks(askers, roles, *connection.execute(lately, (*place, since)).fetchone())


def count_tasks(connection: sqlite3.Connection, place: PeerPlace) -> dict[str, int]:
    query = "SELECT state, count(*) FROM task WHERE space = ? AND peer = ? GROUP BY state"
    return dict(connection.execute(query, place).fetchall())


def _prune(connection: sqlite3.Connection, place: PeerPlace, now: int) -> None:
    connection.execute(
        "DELETE FROM task WHERE space = ? AND peer = ? AND state <> 'open' AND at < ?", (*place, now - KEPT_FOR)
    )
    connection.execute(
        """DELETE FROM task WHERE space = ? AND peer = ? AND state <> 'open' AND at < (SELECT at FROM task
        WHERE space = ? AND peer = ? AND state <> 'open' ORDER BY at DESC LIMIT 1 OFFSET ?)""",
        (*place, *place, MOST_ROWS),
    )


class LocalQueue(AskedSteward, Protocol):
    """Our own space, as far as tasks are put into its queues."""

    async def put_task(self, role: str, sender: str, payload: bytes, headers: Mapping[str, str]) -> int:
        """Have the broker store it; answers where. MailboxFull, LogFull, WireError and UnreachableError say why it did
        not."""
        ...


class _Fetched(NamedTuple):
    task: LinkedTask
    id: str
    readers: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str]:
        return self.task.sender, self.id

    @property
    def seq(self) -> int:
        return self.task.seq


class _ToTell(NamedTuple):
    """What the other space is told of a task, and the row as it is once that was heard."""

    task: BookedTask
    row: ToldTask
    told: str


class TaskRound:
    """Of one link. `record` is the link record it is carried by."""

    def __init__(self, space: str, record: Link, ledger: BookedLink, peer: AskedSteward, local: LocalQueue) -> None:
        self.place = PeerPlace(space, record.origin)
        self._record, self._ledger, self._peer, self._local = record, ledger, peer, local
        self._waits = ""
        self._forged = 0

    async def run(self) -> None:
        """What is here first: what ended makes room. What failed for one task is said after all others were told."""
        self._waits = ""
        failure = await self._tell()
        await self._take()
        if failure is not None:
            raise failure

    async def facts(self) -> LinkedTaskCounts:
        counts = await self._ledger.read(lambda c: count_tasks(c, self.place))
        found = {name: counts.get(name, 0) for name in ("open", "ended", "refused")}
        return LinkedTaskCounts(**found, forged=self._forged, waits=self._waits)

    # --- what is told ---

    async def _tell(self) -> TidingsError | None:
        """Why something was not told; a space that cannot be reached is an error at once."""
        due = await self._ledger.read(lambda c: due_tasks(c, self.place, MOST_OPEN * 2))
        failure: TidingsError | None = None
        for start in range(0, len(due), TASKS_PER_PAGE):
            try:
                await self._tell_some(due[start : start + TASKS_PER_PAGE])
            except (UnreachableError, OutcomeUnknown):
                raise
            except TidingsError as error:
                failure = failure or error
        return failure

    async def _tell_some(self, tasks: Sequence[BookedTask]) -> None:
        told = [_refusal(each) for each in tasks if each.state == "refused"]
        asked = [each for each in tasks if each.state != "refused"]
        while asked:
            offers = tuple(TaskOffer(sender=each.sender, id=each.id, seq=each.local_seq) for each in asked)
            said = (await self._local.ask(ImportProgressRequest(offers))).tasks
            if not said:
                break
            for each, row in zip(asked, said, strict=False):
                if row.state is TaskStatus.UNKNOWN and each.state == "open":
                    # the queue was set back; whoever handed it out does so again
                    await self._ledger.write(partial(drop_task, place=self.place, task=each))
                elif (words := _progress(each, row)) is not None:
                    told.append(words)
            asked = asked[len(said) :]
        await self._say([each for each in told if not each.row.result])
        for large in told:
            if large.row.result:  # as large as one request may be
                await self._say([large])

    async def _say(self, told: Sequence[_ToTell]) -> None:
        """What is to be told later stays so, and takes nobody's place here. What the other space does not believe was
        told all the same: it has no such task any more."""
        if not told:
            return
        for rows in zip(*map(_in_parts, (each.row for each in told)), strict=True):
            answer = await self._peer.ask(LinkProgressRequest(rows))
        reach("link.task.told")
        later = set(answer.later)
        now = [each.task._replace(told="" if number in later else each.told) for number, each in enumerate(told)]
        await self._ledger.write(partial(note_told, place=self.place, tasks=now, now=milliseconds()))
        if late := [each for number, each in enumerate(told) if number in later]:
            self._waits = self._waits or f"the other space does not know yet who did {len(late)} of them"

    # --- what comes in ---

    async def _take(self) -> None:
        for _ in range(MOST_PAGES):
            here = await self._ledger.read(lambda c: open_tasks(c, self.place, milliseconds() - KEPT_HERE))
            room = MOST_OPEN - sum(here.askers.values())
            if room <= 0:
                self._waits = f"as many tasks of this link are open here as may be, {MOST_OPEN}"
                return
            if here.lately >= MOST_LATELY or here.size >= MOST_BYTES:
                self._waits = f"{here.lately:,} tasks of this link, {here.size:,} bytes, came in a quarter of an hour"
                return
            full = [sender for sender, count in here.askers.items() if count >= MOST_EACH]
            busy = [role for role, count in here.roles.items() if count >= MOST_OF_ROLE]
            request = LinkTasksRequest(min(room, TASKS_PER_PAGE), without=tuple(full), busy=tuple(busy))
            answer = await self._peer.ask(request)
            page = read_tasks(answer.tasks, more=answer.more)
            self._forged += page.unread
            if not await self._handle(page.tasks[:room], here) or not page.more:
                return

    async def _handle(self, tasks: Sequence[LinkedTask], here: OpenTasks) -> bool:
        """Whether any of them came in, or was told."""
        read = [found for each in tasks if (found := self._read(each)) is not None]
        known = await self._ledger.read(lambda c: find_tasks(c, self.place, [each.key for each in read]))
        again = [known[each.key]._replace(seq=each.seq) for each in read if each.key in known]
        done = [each for each in read if isinstance(each, BookedTask) and each.key not in known]
        fresh = [each for each in read if isinstance(each, _Fetched) and each.key not in known]
        try:
            await self._offer(_fitting(fresh, here), done)
        finally:  # what was queued before a failure is written down all the same
            reach("link.task.admitted")
            if done or again:
                await self._ledger.write(
                    partial(add_tasks, place=self.place, tasks=[*done, *again], now=milliseconds())
                )
            reach("link.task.committed")
        if again:
            await self._tell_some(again)
        return bool(done or again)

    def _read(self, task: LinkedTask) -> _Fetched | BookedTask | None:
        """What its asker did not sign for us is passed over: nobody can be told of it. What it signed and nobody can
        open is refused."""
        try:
            message = task.message(self._record.origin, self.place.space)
        except MalformedRecord:
            self._forged += 1
            return None
        try:
            return _Fetched(task, message.id, readers_of(message))
        except MalformedMessage as error:
            return BookedTask(task.sender, message.id, task.seq, "refused", str(error)[:200], role=task.role)

    async def _offer(self, fresh: Sequence[_Fetched], done: list[BookedTask]) -> None:
        if not fresh:
            return
        offers = tuple(TaskOffer(each.task.sender, each.id, each.task.role, each.readers) for each in fresh)
        answer = await self._local.ask(ImportTasksRequest(self._record.link, offers))
        for each, verdict in zip(fresh, answer.verdicts, strict=True):
            became = partial(BookedTask, each.task.sender, each.id, each.task.seq, role=each.task.role)
            if verdict.startswith("wait"):
                self._waits = self._waits or verdict.removeprefix("wait: ")
            elif verdict == "have":
                done.append(became("open"))
            elif verdict != "take":
                done.append(became("refused", verdict.removeprefix("no: ")[:200]))
            else:
                try:
                    place = await self._put(each, answer.agreed)
                except (MailboxFull, LogFull) as error:
                    self._waits = self._waits or str(error)
                except WireError as error:
                    done.append(became("refused", str(error)[:200]))
                else:
                    done.append(became("open", local_seq=place, size=len(each.task.payload)))

    async def _put(self, fetched: _Fetched, agreed: int) -> int:
        task = fetched.task
        origin = MailOrigin(self._record.origin, self._record.link, agreed)
        headers = dict([mail_origin_field(origin)]) | {SIGNATURE_HEADER: task.sig, AGE_HEADER: str(task.age)}
        # not the same for ever: a queue that was set back may remember what it lost
        minute = milliseconds() // 60_000
        name = "task", str(minute), self._record.origin, *fetched.key
        headers["Nats-Msg-Id"] = await self._ledger.message_id(self.place.space, *name)
        return await self._local.put_task(task.role, task.sender, task.payload, headers)


def _refusal(task: BookedTask) -> _ToTell:
    return _ToTell(task, _row(task, TaskStatus.DEAD, cause=TaskCause.FAILED, why=task.why), "refused")


def _progress(task: BookedTask, found: TaskProgress) -> _ToTell | None:
    """What there is to tell of a task; None if it was told as it is, not long ago."""
    state, over = found.state, task._replace(state="ended")
    worker, attempt = found.worker or "", found.attempt or 0
    if state in (TaskStatus.QUEUED, TaskStatus.CLAIMED):
        told = f"{state} {worker} {attempt}"
        if told == task.told and milliseconds() - task.told_at < TELL_AGAIN:
            return None
        return _ToTell(task, _row(task, state, worker=worker, attempt=attempt), told)
    if state is TaskStatus.DONE:
        row = _row(task, state, worker=worker, attempt=attempt, result=found.result or b"", sig=found.sig or "")
    elif state is TaskStatus.DEAD:
        row = _row(task, state, attempt=attempt, cause=found.cause or "", why=found.why or "")
    else:
        why = "what became of it there is not kept any more"
        row = _row(task, TaskStatus.DEAD, cause=TaskCause.FAILED, why=why)
    return _ToTell(over, row, state)


def _row(task: BookedTask, state: TaskStatus, **fields: Any) -> ToldTask:
    return ToldTask(sender=task.sender, id=task.id, seq=task.seq, state=state, **fields)


def _fitting(tasks: Sequence[_Fetched], here: OpenTasks) -> list[_Fetched]:
    """Of each asker, and for each role, as many as may be open here; each task once.

    The message id changes every minute, so the broker does not recognise a copy that is queued in the next minute.
    """
    askers, roles, found = Counter(here.askers), Counter(here.roles), dict[tuple[str, str], _Fetched]()
    for each in tasks:
        sender, role = each.task.sender, each.task.role
        if each.key not in found and askers[sender] < MOST_EACH and roles[role] < MOST_OF_ROLE:
            askers[sender], roles[role] = askers[sender] + 1, roles[role] + 1
            found[each.key] = each
    return list(found.values())


def _in_parts(row: ToldTask) -> list[ToldTask]:
    """What is told of a task, in as many requests as its result takes."""
    result = row.result
    parts = [result[start : start + PART_BYTES] for start in range(0, len(result), PART_BYTES)]
    if len(parts) < 2:
        return [row]
    return [replace(row, result=each, part=number, parts=len(parts)) for number, each in enumerate(parts)]
