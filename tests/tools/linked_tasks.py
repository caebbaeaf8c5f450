"""A seeded life of tasks between two spaces: the real round and ledger of a worker, both stewards as models.

    TaskWorld(seed).live()      raises AssertionError if a promise did not hold

Agents of `there` ask a role of `here`. By seed, questions and answers are lost, the worker is killed before or after
anything it does, either steward starts anew, the ledger or the queue of either space is an older one. When that stops,
every task has its end where it was asked, and was begun once, unless a queue that forgot it began it again.
"""

from __future__ import annotations

import base64
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from tidings.contract.core import Request
from tidings.errors import StewardUnreachable
from tidings.links.link_store import BookedLink
from tidings.links.task_sync import TaskRound
from tidings.wire import message as wire
from tidings.wire import signing
from tidings.wire.link_exchange import LinkedTask, ToldTask
from tidings.wire.message import Sender, compose
from tidings.wire.names import role_elsewhere
from tidings.wire.rulings import Link
from tidings.wire.seal import seal_task
from tidings.wire.signing import ACCOUNT, KeyPair
from tidings.wire.states import TaskStatus
from tools.link_ports import Books
from tools.typed_answers import fields_of, typed_answer

A = TypeVar("A")

HERE, THERE = (KeyPair.generate(ACCOUNT).id for _ in range(2))
RITA = KeyPair.generate()
ASKERS = [KeyPair.generate() for _ in range(3)]
RECORD = Link(op="-", link="abcdefghijkl", state="on", origin=THERE, channels={}, roster="on", tasks="on")
#: seconds after which the asker's steward hands out again what it heard nothing of, and for which its broker knows ids
SILENCE, WINDOW = 60.0, 120.0
T = TypeVar("T")


class Killed(BaseException):
    """The worker is gone in the middle of something."""


@dataclass
class Asked:
    task: LinkedTask
    id: str


def asked(asker: KeyPair, seq: int) -> Asked:
    message = compose(Sender(asker.id, "ada"), text=f"task {seq}")
    payload = wire.encode(seal_task(asker, [RITA.id], message))
    signature = signing.sign(asker, THERE, "task", role_elsewhere("reviewer", HERE), payload)
    task = LinkedTask(seq=seq, sender=asker.id, role="reviewer", sig=signature, payload=payload)
    return Asked(task, message.id)


#: made once: signing is most of what a life costs
TASKS = [asked(ASKERS[n % len(ASKERS)], n + 1) for n in range(24)]


@dataclass
class AskersSpace:
    """The steward of the space where tasks are asked: its queue, ends on disk, and what it heard, in memory."""

    world: TaskWorld
    queue: list[Asked] = field(default_factory=list)
    ended: dict[str, str] = field(default_factory=dict)
    spoken: dict[str, float] = field(default_factory=dict)

    async def ask(self, request: Request[A]) -> A:
        return typed_answer(request, self.world.answered(lambda: self._answer(request)))

    def _answer(self, request: Request[Any]) -> dict[str, Any]:
        fields = fields_of(request)
        return self._tasks(**fields) if request.operation.verb == "tasks" else self._progress(**fields)

    def _tasks(self, room: int, without: list[str], busy: list[str]) -> dict[str, Any]:
        now = self.world.now
        wanted = [] if "reviewer" in busy else self.queue
        waiting = [each for each in wanted if each.id not in self.ended and each.task.sender not in without]
        due = [each for each in waiting if now - self.spoken.get(each.id, -SILENCE) >= SILENCE]
        rows = [{**_row(each.task), "age": 0} for each in due[:room]]
        return {"tasks": rows, "more": len(due) > room}

    def _progress(self, tasks: list[dict[str, Any]]) -> dict[str, Any]:
        refused, later = [], []
        known = {each.task.seq: each for each in self.queue}
        for number, told in enumerate(msgspec.convert(tasks, list[ToldTask])):
            found = known.get(told.seq)
            if found is None or (found.task.sender, found.id) != (told.sender, told.id):
                refused.append(number)
            elif told.state in (TaskStatus.DONE, TaskStatus.DEAD):
                if told.worker and self.world.rng.random() < 0.2 and self.world.faulty:
                    later.append(number)
                else:
                    self.ended.setdefault(told.id, told.state)
            else:
                self.spoken[told.id] = self.world.now
        return {"refused": refused, "later": later}


@dataclass
class WorkersSpace:
    """The steward and the broker of the space where they are done."""

    world: TaskWorld
    #: id -> state, in the order of the queue
    queue: dict[str, str] = field(default_factory=dict)
    #: ids the broker knows, and until when
    burnt: dict[str, float] = field(default_factory=dict)

    async def ask(self, request: Request[A]) -> A:
        return typed_answer(request, self.world.answered(lambda: self._answer(request)))

    def _answer(self, request: Request[Any]) -> dict[str, Any]:
        fields = fields_of(request)
        return self._tasks(**fields) if request.operation.verb == "tasks" else self._progress(**fields)

    def _tasks(self, link: str, tasks: list[dict[str, Any]]) -> dict[str, Any]:
        assert link == RECORD.link
        return {"agreed": 1, "verdicts": [self._verdict(each["id"]) for each in tasks]}

    def _verdict(self, task: str) -> str:
        if task in self.queue:
            return "have"
        if task in self.world.refused:
            return "no: nobody holds the role"
        return "wait: its asker is not known yet" if self.world.faulty and self.world.rng.random() < 0.1 else "take"

    def _progress(self, tasks: list[dict[str, Any]]) -> dict[str, Any]:
        rows = [self._state(each["id"]) for each in tasks]
        return {"tasks": rows[: self.world.rng.randint(1, len(rows))] if rows else []}

    def _state(self, task: str) -> dict[str, Any]:
        state = self.queue.get(task, "unknown")
        facts: dict[str, Any] = {"state": state, "worker": RITA.id if state != "queued" else "", "attempt": 1}
        if state == "done":
            facts |= {"result": base64.b64encode(b"x").decode(), "sig": "x"}
        return {"state": state} if state == "unknown" else facts

    async def put_task(self, role: str, sender: str, payload: bytes, headers: Mapping[str, str]) -> int:
        assert role == "reviewer"
        assert headers["Td-Origin"] == f"{THERE} {RECORD.link} 1"
        message = wire.decode(payload)
        assert message.sender.id == sender
        self.world.answered(lambda: self._store(message.id, headers["Nats-Msg-Id"]))
        return 1

    def _store(self, task: str, message_id: str) -> dict[str, Any]:
        if self.burnt.get(message_id, 0.0) <= self.world.now:
            self.queue.setdefault(task, "queued")  # (asker, id) is one task, whatever record holds it
        self.burnt[message_id] = self.world.now + WINDOW
        return {}

    def work(self) -> None:
        waiting = [task for task, state in self.queue.items() if state in ("queued", "claimed")]
        for task in waiting[: self.world.rng.randint(0, 3)]:
            if self.queue[task] == "queued":
                self.queue[task] = "claimed"
                self.world.begun[task] += 1
            else:
                self.queue[task] = "dead" if self.world.rng.random() < 0.1 else "done"


class _FaultyJobs:
    def __init__(self, world: TaskWorld) -> None:
        self._world = world

    async def write(self, job: Callable[[sqlite3.Connection], T]) -> T:
        self._world.may_be_killed()
        found = self._world.books.job(job)
        self._world.may_be_killed()
        return found

    async def read(self, job: Callable[[sqlite3.Connection], T]) -> T:
        return job(self._world.books.connection)


class TaskWorld:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now, self.faulty = 1_000_000.0, True
        self.books = Books()
        self.books.connection.execute("INSERT INTO space (space, secret) VALUES (?, ?)", (HERE, b"x" * 32))
        self.there, self.here = AskersSpace(self), WorkersSpace(self)
        self.begun: Counter[str] = Counter()
        #: tasks that a queue here forgot: they may be begun again
        self.forgotten: set[str] = set()
        self.refused = {each.id for each in self.rng.sample(TASKS, 2)}
        self.round = self._started()
        self._copies: dict[str, Any] = {}

    # --- faults ---

    def answered(self, effect: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """It is lost before, or its answer is."""
        self.may_be_killed()
        if self.faulty and self.rng.random() < 0.05:
            raise StewardUnreachable("nobody was asked")
        found = effect()
        if self.faulty and self.rng.random() < 0.05:
            raise StewardUnreachable("no answer came")
        self.may_be_killed()
        return found

    def may_be_killed(self) -> None:
        if self.faulty and self.rng.random() < 0.02:
            raise Killed

    def _started(self) -> TaskRound:
        return TaskRound(HERE, RECORD, BookedLink(_FaultyJobs(self), 0), self.there, self.here)

    def _strike(self) -> None:
        fault = self.rng.choice(["copy", "ledger", "queue here", "ends there", "steward there", "nothing", "nothing"])
        if fault == "copy" or not self._copies:
            self._copies = {"ledger": self.books.copy(), "here": dict(self.here.queue), "there": dict(self.there.ended)}
        elif fault == "ledger":
            self.books.put_back(self._copies["ledger"])
        elif fault == "queue here":
            self.forgotten |= {
                task for task, state in self.here.queue.items() if self._copies["here"].get(task) != state
            }
            self.here.queue = dict(self._copies["here"])
        elif fault == "ends there":
            self.there.ended, self.there.spoken = dict(self._copies["there"]), {}
        elif fault == "steward there":
            self.there.spoken = {}

    # --- its life ---

    def live(self) -> None:
        waiting = list(TASKS)
        for _ in range(60):
            self.now += self.rng.choice([0.1, 2.0, 2.0, 20.0, 90.0])
            if waiting and self.rng.random() < 0.6:
                self.there.queue.append(waiting.pop(0))
            if self.rng.random() < 0.15:
                self._strike()
            self.here.work()
            self._turn()
        self.there.queue += waiting
        self.faulty = False
        for _ in range(200):
            self.now += 20.0
            self.here.work()
            self._turn()
        self._check()

    def _turn(self) -> None:
        try:
            _drive(self.round.run())
        except StewardUnreachable:
            assert self.faulty
        except Killed:
            self.round = self._started()

    def _check(self) -> None:
        missing = [each.task.seq for each in TASKS if each.id not in self.there.ended]
        assert not missing, f"tasks {missing} have no end where they were asked"
        twice = {task for task, count in self.begun.items() if count > 1} - self.forgotten
        assert not twice, f"begun more than once: {twice}"
        assert not self.begun.keys() & self.refused, "what was refused was begun"
        still_open = self.books.connection.execute("SELECT count(*) FROM task WHERE state = 'open'").fetchone()[0]
        assert not still_open, f"{still_open} rows are open for ever"


def _row(task: LinkedTask) -> dict[str, Any]:
    payload = base64.b64encode(task.payload).decode()
    return {"seq": task.seq, "sender": task.sender, "role": task.role, "sig": task.sig, "payload": payload}


def _drive(running: Coroutine[Any, Any, None]) -> None:
    """Nothing in it waits for anything but itself."""
    try:
        running.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")
