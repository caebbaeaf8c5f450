"""The power goes at any moment, also inside a commit: what was answered is there, the rest is whole or not at all.

Random walks over the real transitions in the real `Database`, whose files are on a `PowerDisk`. After each cut the
directory that is left is judged by a plain `Database`, and the walk goes on from it. The last tests take the durability
away and see that this is found out.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hosted import NOW, REFUSED, arrival, draft, together
from tidings.errors import StoreError, TidingsError
from tidings.host import inbox, outbox
from tidings.host import outbox_transitions as moves
from tidings.host import outbox_views as views
from tidings.host.inbox import KeepResult
from tidings.host.outbox_transitions import Accepted, Lane, Leased, LogPosition, Terms
from tidings.host.outbox_views import OutboxRow
from tidings.host.outcomes import Outcome
from tidings.host.schema import SCHEMA
from tidings.util import database as module
from tidings.util.database import Database
from tools.power import LUCKS, PowerDisk

Job = Callable[[sqlite3.Connection], Any]
Contents = dict[str, list[tuple[Any, ...]]]
TABLES = ("outbox", "outbox_space", "outbox_block", "inbox", "quarantine", "sqlite_sequence")
LANES = (Lane("main", "ada", "chat", "general"), Lane("main", "ada", "dm", "bob"), Lane("side", "bob", "dm", "ada"))
LATER = Outcome("mailbox_full", "full", retryable=True, blocks="lane", maybe_stored=True)
CUTS = 6
#: several times what creating the file, a migration, or a step write
OPENING, STEP = 90, 60
FEW, MANY = range(8), range(1_000, 1_400 if os.environ.get("TIDINGS_DEEP") else 1_100)


def contents(connection: sqlite3.Connection) -> Contents:
    return {table: connection.execute(f"SELECT * FROM {table}").fetchall() for table in TABLES}


def contents_of_a_new_one(root: Path) -> Contents:
    database = Database(root / "new" / "host.db", SCHEMA)
    try:
        return database.read_blocking(contents)
    finally:
        database.close()


@dataclass
class Answered:
    """What callers were told, and may rely on whatever happens."""

    #: id -> row and payload
    sent: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    #: row -> the states it may be in
    ended: dict[int, tuple[str, ...]] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)

    def check(self, found: sqlite3.Connection) -> None:
        sent = {one: (row, payload) for one, row, payload in found.execute("SELECT id, row, payload FROM outbox")}
        states = dict(found.execute("SELECT row, state FROM outbox"))
        received = dict(found.execute("SELECT id, row FROM inbox"))
        read = {row for (row,) in found.execute("SELECT row FROM inbox WHERE read_at IS NOT NULL")}
        assert self.sent.items() <= sent.items(), "answered as stored, and gone"
        assert all(states[row] in allowed for row, allowed in self.ended.items()), "answered as ended, and is not"
        assert self.received.items() <= received.items(), "answered as received, and gone"
        assert self.read <= read, "answered as read, and is not"


class Walk:
    """One host through several power cuts."""

    def __init__(self, root: Path, seed: int, *, lies: bool = False) -> None:
        self.root, self.luck, self.lies = root, random.Random(seed), lies
        self.answered = Answered()
        #: after the last commit that was answered, and within the one that is under way
        self.certain: Contents = contents_of_a_new_one(root)
        self.possible = self.certain
        self.boots = self.used = self.interrupted = self.survived = 0
        self.leased: list[Leased] = []
        self.directory = root / "boot 0"
        self.directory.mkdir(mode=0o700)

    async def go(self) -> None:
        for _ in range(CUTS):
            await self.live_until_the_cut()
            self.boot()

    # ------------------------------------------------------------------------------------------------------ living

    async def live_until_the_cut(self) -> None:
        self.disk = PowerDisk(self.directory, lies=self.lies, checkpoint_pages=self.luck.choice((4, 30, 1_000)))
        if self.luck.random() < 0.3:
            self.disk.cut_after(self.luck.randint(1, OPENING))
        self.terms = Terms(f"run {self.boots}", luck=self.luck.random)
        self.leased, self.possible = [], self.certain
        try:
            database = Database(self.directory / "host.db", SCHEMA, connect=self.disk.connect)
        except StoreError:
            assert self.disk.off
            return
        try:
            await self.step(database, inbox.prepare_search, lambda c: moves.recover(c, self.now(), 0, self.terms))
            await self.steps(database)
        finally:
            self.disk.cut()
            database.close()

    async def steps(self, database: Database) -> None:
        last = self.luck.randrange(25)
        for number in range(last + 1):
            if self.disk.off:
                return
            if number == last and self.luck.random() < 0.7:
                self.disk.cut_after(self.luck.randint(1, STEP))
            await self.step(database, *(self.job() for _ in range(self.luck.randint(1, 4))))
            if not self.disk.off and self.luck.random() < 0.2:
                database.read_blocking(lambda c: c.execute("SELECT count(*) FROM outbox").fetchone())

    async def step(self, database: Database, *jobs: Job) -> None:
        """Jobs of one group, and what the whole of it would leave."""

        def look(connection: sqlite3.Connection) -> None:
            self.possible = contents(connection)

        answers = await together(database, *jobs, look)
        if isinstance(answers[-1], StoreError):
            assert self.disk.off, answers[-1]
            self.interrupted += 1
            assert all(isinstance(answer, Exception) for answer in answers), "answered from a commit that failed"
            return
        for answer in answers[:-1]:
            self.note(answer)
        self.certain = self.possible

    def note(self, answer: Any) -> None:
        match answer:
            case Accepted(row, new):
                assert row.id not in self.answered.sent or not new, "an id was freed"
                known, _ = self.answered.sent.setdefault(row.id, (row.row, payload_of(row.id)))
                assert known == row.row
            case OutboxRow(state="cancelled"):
                self.answered.ended[answer.row] = ("cancelled",)
            case ("dead", int(row)):
                self.answered.ended[row] = ("dead",)
            case ("confirmed", int(row)):
                self.answered.ended[row] = ("confirmed", "done")
            case (str(message_id), KeepResult(row, _)):
                self.answered.received[message_id] = row
            case list():
                self.leased += [one for one in answer if isinstance(one, Leased)]
            case set():
                self.answered.read |= answer
            case BaseException():
                assert isinstance(answer, TidingsError), answer

    # -------------------------------------------------------------------------------------------- what a host does

    def now(self) -> int:
        return NOW + self.used * 1_000

    def job(self) -> Job:
        """A transition with everything about it decided, because a job may be done twice."""
        self.used += 1
        often = (self.accept, self.end, self.receive)
        return self.luck.choice((*often, *often, self.take, self.cancel, self.read, self.release))()

    def accept(self) -> Job:
        number = self.luck.randrange(1, self.used) if self.used > 1 and self.luck.random() < 0.2 else self.used
        lane, now = LANES[number % len(LANES)], self.now()
        one = draft(f"m{number}", lane, payload=payload_of(f"m{number}"))
        return lambda c: moves.accept(c, one, now)

    def take(self) -> Job:
        now, limit = self.now(), self.luck.randint(1, 3)
        return lambda c: moves.take(c, now, self.terms, limit)

    def end(self) -> Job:
        if not self.leased:
            return self.take()
        held, now = self.leased.pop(self.luck.randrange(len(self.leased))).row, self.now()
        if self.luck.random() < 0.6:
            place = LogPosition(self.used, "LOG", "server 1")
            return lambda c: (moves.confirmed(c, held.row, held.attempts, place, now, 0, self.terms), held.row)
        outcome = self.luck.choice((REFUSED, LATER))
        return lambda c: (moves.settle(c, held.row, held.attempts, outcome, now, self.terms), held.row)

    def cancel(self) -> Job:
        if not self.answered.sent:
            return self.accept()
        (row, _), now = self.luck.choice(list(self.answered.sent.values())), self.now()
        return lambda c: outbox.cancel(c, row, now)

    def release(self) -> Job:
        now, limit = self.now(), self.luck.randint(1, 5)
        return lambda c: outbox.release(c, "main", "server 1", 10, 5, now, limit)

    def receive(self) -> Job:
        number = self.luck.randrange(1, self.used) if self.used > 1 and self.luck.random() < 0.2 else self.used
        one, now = arrival(f"m{number}", f"word{number} " * (number % 400)), self.now()
        return lambda c: (one.id, inbox.keep(c, one, now, words=True))

    def read(self) -> Job:
        received, now = sorted(self.answered.received.values()), self.now()
        rows = self.luck.sample(received, min(2, len(received)))

        def job(connection: sqlite3.Connection) -> set[int]:
            inbox.mark_read(connection, "main", "bob", rows, now)
            return set(rows)

        return job

    # --------------------------------------------------------------------------------------------- the morning after

    def boot(self) -> None:
        self.boots += 1
        self.directory = self.root / f"boot {self.boots}"
        self.disk.write_image(self.directory, self.luck.choice(LUCKS), self.luck)
        judged = self.root / f"judged {self.boots}"
        shutil.copytree(self.directory, judged)
        database = Database(judged / "host.db", SCHEMA)
        try:
            database.write_blocking(self.judge)
        finally:
            database.close()

    def judge(self, found: sqlite3.Connection) -> None:
        self.answered.check(found)
        assert found.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert found.execute("PRAGMA foreign_key_check").fetchall() == []
        now = contents(found)
        assert now in (self.certain, self.possible), "a commit is there in part"
        self.survived += now == self.possible != self.certain
        self.certain = now
        if inbox.prepare_search(found):
            found.execute("INSERT INTO inbox_words (inbox_words, rank) VALUES ('integrity-check', 1)")


def payload_of(message_id: str) -> bytes:
    number = int(message_id[1:])
    return random.Random(number).randbytes(1 + number * 37 % 6_000)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path, prefix="tidings-power-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MANY)])
async def test_a_power_cut_takes_nothing_that_was_answered_and_leaves_nothing_half_written(
    root: Path, seed: int
) -> None:
    await Walk(root, seed).go()


# ------------------------------------------------------------------------------------------ that this can be found out


async def walked(root: Path, *, lies: bool = False) -> tuple[list[Walk], list[Exception]]:
    """The few walks, and what ended those that failed."""
    walks: list[Walk] = []
    found: list[Exception] = []
    for seed in FEW:
        (folder := root / f"seed {seed}").mkdir()
        walks.append(Walk(folder, seed, lies=lies))
        try:
            await walks[-1].go()
        except (AssertionError, StoreError) as error:
            found.append(error)
    return walks, found


async def test_the_walks_are_cut_inside_commits_of_which_some_survive_and_some_do_not(root: Path) -> None:
    walks, found = await walked(root)
    assert not found
    interrupted, survived = sum(walk.interrupted for walk in walks), sum(walk.survived for walk in walks)
    assert interrupted > 8
    assert 0 < survived < interrupted
    assert sum(len(walk.answered.sent) + len(walk.answered.received) for walk in walks) > 200
    assert all(walk.boots == CUTS for walk in walks)


async def test_commits_that_are_not_synced_are_found_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DURABILITY", ("journal_mode = WAL", "synchronous = NORMAL"))
    _, found = await walked(root)
    assert len(found) > len(FEW) / 2
    assert any("answered as stored, and gone" in str(error) for error in found)


async def test_a_disk_that_lies_about_syncing_is_found_out(root: Path) -> None:
    _, found = await walked(root, lies=True)
    assert len(found) > len(FEW) / 2


def test_a_power_cut_while_the_tables_are_created_leaves_none_or_all_of_them(root: Path) -> None:
    luck, found_at = random.Random(5), Counter[int]()
    for operations in itertools.count(1):
        folder = root / f"cut {operations}"
        folder.mkdir(mode=0o700)
        disk = PowerDisk(folder, checkpoint_pages=luck.choice((4, 1_000)))
        disk.cut_after(operations)
        with suppress(StoreError):
            Database(folder / "host.db", SCHEMA, connect=disk.connect).close()
        if not disk.off:
            break  # it was through before its power went
        disk.write_image(folder / "image", luck.choice(LUCKS), luck)
        file = folder / "image" / "host.db"
        file.touch(mode=0o600)
        with closing(sqlite3.connect(file)) as found:
            (version,) = found.execute("PRAGMA user_version").fetchone()
        found_at[version] += 1
        again = Database(file, SCHEMA)
        try:
            assert again.read_blocking(views.listed) == []
        finally:
            again.close()
        shutil.rmtree(folder)
    assert set(found_at) == {0, SCHEMA.version}
