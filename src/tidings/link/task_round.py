"""One round about tasks that agents of a linked space ask roles here: how far they are is told, and new ones come in.

    our steward: how far are those that are open -> told to the peer's steward, with the result of what is done
    peer's steward: what waits for roles here -> signed by whom, for us, sealed? -> our steward: may it be queued?
      -> published as it was signed -> ledger

There is no place in the peer's queue to remember: it hands out what has no end, and leaves out what it was told of
lately. Killed anywhere, the same task is handed out again, and the ledger or our steward knows it. A task is queued
here once: what has ended is told again, and never begun again. As many lie here at once as one link may have, and of
one asker a part of that; others wait where they were asked.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from tidings.errors import LogFull, MailboxFull, MalformedRecord, WireError
from tidings.failpoints import reach
from tidings.link import ledger as books
from tidings.link import task_book
from tidings.link.ledger import BookedLink
from tidings.link.people import PeerPlace
from tidings.link.people_round import AskedSteward
from tidings.link.task_book import BookedTask
from tidings.wire.link_tasks import AGE_HEADER, PART_BYTES, TASKS_PER_PAGE, LinkedTask, read_tasks
from tidings.wire.links import MailOrigin, mail_origin_field
from tidings.wire.rulings import Link
from tidings.wire.signing import SIGNATURE_HEADER
from tidings.wire.states import TaskCause, TaskStatus

#: open tasks of one link here, and of one asker of it
MOST_OPEN, MOST_EACH = 64, 16
#: milliseconds after which what did not change is told again
TELL_AGAIN = 15_000
#: pages of one round
MOST_PAGES = 4


class LocalQueue(AskedSteward, Protocol):
    """Our own space, as far as tasks are put into its queues."""

    async def put_task(self, role: str, sender: str, payload: bytes, headers: Mapping[str, str]) -> None:
        """Have the broker store it. MailboxFull, LogFull, WireError and UnreachableError say why it did not."""
        ...


class _Fetched(NamedTuple):
    task: LinkedTask
    id: str

    @property
    def key(self) -> tuple[str, str]:
        return self.task.sender, self.id


class TaskRound:
    """Of one link. `record` is the link record it is carried by."""

    def __init__(self, space: str, record: Link, ledger: BookedLink, peer: AskedSteward, local: LocalQueue) -> None:
        self.place = PeerPlace(space, record.origin)
        self._record, self._ledger, self._peer, self._local = record, ledger, peer, local
        self._secret = b""
        self._waits = ""
        self._forged = 0

    async def run(self) -> None:
        """What is here first: what ended makes room. A peer that does not answer is not told either."""
        await self._tell()
        await self._take()

    async def facts(self) -> dict[str, Any]:
        counts = await self._ledger.read(lambda c: task_book.counts(c, self.place))
        found = {name: counts.get(name, 0) for name in ("open", "ended", "refused")}
        return {**found, "forged": self._forged, "waits": self._waits}

    # --- what is told ---

    async def _tell(self) -> None:
        due = await self._ledger.read(lambda c: task_book.due(c, self.place, MOST_OPEN * 2))
        for start in range(0, len(due), TASKS_PER_PAGE):
            await self._tell_some(due[start : start + TASKS_PER_PAGE])

    async def _tell_some(self, tasks: Sequence[BookedTask]) -> None:
        refused = [each for each in tasks if each.state == "refused"]
        for each in refused:
            why = {"cause": TaskCause.FAILED, "why": each.why}
            await self._say(each, {"state": TaskStatus.DEAD, **why}, "refused")
        asked = [each for each in tasks if each.state != "refused"]
        while asked:
            rows = [{"sender": each.sender, "id": each.id} for each in asked]
            said = (await self._local.ask("progress", tasks=rows))["tasks"]
            if not said:
                return
            for each, row in zip(asked, said, strict=False):
                await self._tell_one(each, row)
            asked = asked[len(said) :]

    async def _tell_one(self, task: BookedTask, row: Mapping[str, Any]) -> None:
        state = str(row["state"])
        if state == TaskStatus.UNKNOWN and task.state == "open":
            # the queue was set back; whoever handed it out does so again
            await self._ledger.write(partial(task_book.drop, place=self.place, task=task))
        elif state in (TaskStatus.QUEUED, TaskStatus.CLAIMED):
            worker, attempt = str(row.get("worker", "")), int(row.get("attempt", 0))
            told = f"{state} {worker} {attempt}"
            if told != task.told or _now() - task.told_at >= TELL_AGAIN:
                await self._say(task, {"state": state, "worker": worker, "attempt": attempt}, told)
        elif state in (TaskStatus.DONE, TaskStatus.DEAD):
            facts = {name: row[name] for name in ("worker", "attempt", "cause", "why", "result", "sig") if name in row}
            if state == TaskStatus.DEAD:
                facts.pop("worker", None)
            await self._say(task, {"state": state, **facts}, state)
        else:
            why = "what became of it there is not kept any more"
            await self._say(task, {"state": TaskStatus.DEAD, "cause": TaskCause.FAILED, "why": why}, state)

    async def _say(self, task: BookedTask, facts: Mapping[str, Any], told: str) -> None:
        """What is to be told later stays as it is. What the other space does not believe was told all the same: it has
        no such task any more."""
        named = {"sender": task.sender, "id": task.id, "seq": task.seq}
        for row in _in_parts({**named, **facts}):
            answer = await self._peer.ask("progress", tasks=[row])
        reach("link.task.told")
        if answer["later"]:
            return
        is_over = facts["state"] in (TaskStatus.DONE, TaskStatus.DEAD)
        now = task._replace(state="ended" if is_over and task.state == "open" else task.state, told=told)
        await self._ledger.write(partial(task_book.note_told, place=self.place, task=now, now=_now()))

    # --- what comes in ---

    async def _take(self) -> None:
        self._waits = ""
        for _ in range(MOST_PAGES):
            here = await self._ledger.read(lambda c: task_book.open_of(c, self.place))
            room = MOST_OPEN - sum(here.values())
            if room <= 0:
                self._waits = f"as many tasks of this link are open here as may be, {MOST_OPEN}"
                return
            full = [sender for sender, count in here.items() if count >= MOST_EACH]
            page = await self._peer.ask("tasks", room=min(room, TASKS_PER_PAGE), without=full)
            tasks = _fitting(read_tasks(page)[:room], here)
            if not tasks or not await self._handle(tasks) or not page.get("more"):
                return

    async def _handle(self, tasks: Sequence[LinkedTask]) -> bool:
        """Whether any of them came in, or was told."""
        fetched = [each for each in map(self._read, tasks) if each is not None]
        known = await self._ledger.read(lambda c: task_book.find(c, self.place, [each.key for each in fetched]))
        again = [known[each.id]._replace(seq=each.task.seq) for each in fetched if each.id in known]
        done: list[BookedTask] = []
        try:
            await self._offer([each for each in fetched if each.id not in known], done)
        finally:  # what was queued before a failure is written down all the same
            reach("link.task.admitted")
            if done or again:
                await self._ledger.write(partial(task_book.take, place=self.place, tasks=[*done, *again], now=_now()))
            reach("link.task.committed")
        if again:
            await self._tell_some(again)
        return bool(done or again)

    def _read(self, task: LinkedTask) -> _Fetched | None:
        """What its asker did not sign, for us and sealed, is passed over: nobody can be told of it."""
        try:
            return _Fetched(task, task.message(self._record.origin, self.place.space).id)
        except MalformedRecord:
            self._forged += 1
            return None

    async def _offer(self, fresh: Sequence[_Fetched], done: list[BookedTask]) -> None:
        if not fresh:
            return
        rows = [{"sender": each.task.sender, "id": each.id, "role": each.task.role} for each in fresh]
        said = await self._local.ask("tasks", link=self._record.link, tasks=rows)
        for each, verdict in zip(fresh, said["verdicts"], strict=True):
            became = partial(BookedTask, each.task.sender, each.id, each.task.seq)
            if verdict.startswith("wait"):
                self._waits = self._waits or verdict.removeprefix("wait: ")
            elif verdict == "have":
                done.append(became("open"))
            elif verdict != "take":
                done.append(became("refused", verdict.removeprefix("no: ")[:200]))
            else:
                try:
                    await self._put(each, int(said["agreed"]))
                except (MailboxFull, LogFull) as error:
                    self._waits = self._waits or str(error)
                except WireError as error:
                    done.append(became("refused", str(error)[:200]))
                else:
                    done.append(became("open"))

    async def _put(self, fetched: _Fetched, agreed: int) -> None:
        task = fetched.task
        origin = MailOrigin(self._record.origin, self._record.link, agreed)
        headers = dict([mail_origin_field(origin)]) | {SIGNATURE_HEADER: task.sig, AGE_HEADER: str(task.age)}
        headers["Nats-Msg-Id"] = await self._message_id(fetched)
        await self._local.put_task(task.role, task.sender, task.payload, headers)

    async def _message_id(self, fetched: _Fetched) -> str:
        """Nobody else knows it, so that nobody can have used it before. Not the same for ever: a queue that was set
        back may remember what it lost."""
        if not self._secret:
            self._secret = await self._ledger.read(lambda c: books.secret(c, self.place.space))
        minute = _now() // 60_000
        text = "\n".join(("task", str(minute), self._record.origin, *fetched.key)).encode()
        return hmac.digest(self._secret, text, hashlib.sha256).hex()[:32]


def _fitting(tasks: Sequence[LinkedTask], here: Mapping[str, int]) -> list[LinkedTask]:
    """Of each asker as many as it may have open here."""
    count, found = Counter(here), list[LinkedTask]()
    for each in tasks:
        count[each.sender] += 1
        if count[each.sender] <= MOST_EACH:
            found.append(each)
    return found


def _in_parts(row: dict[str, Any]) -> list[dict[str, Any]]:
    """What is told of a task, in as many requests as its result takes."""
    result = base64.b64decode(row.get("result", ""))
    parts = [result[start : start + PART_BYTES] for start in range(0, len(result), PART_BYTES)] or [b""]
    if len(parts) == 1:
        return [row]
    told = ({"result": base64.b64encode(each).decode(), "part": number} for number, each in enumerate(parts))
    return [{**row, **each, "parts": len(parts)} for each in told]


def _now() -> int:
    return int(time.time() * 1000)
