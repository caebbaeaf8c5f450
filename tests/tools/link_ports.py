"""What a link stands on, in a simulation: time, logs in memory, a network that fails, a ledger whose worker dies.

`Scheduler` drives coroutines by hand on a virtual clock: no thread, no event loop, and the same order for a seed.
`SimulatedLog` is a space's log with what its steward answers: it has a floor, an epoch and a window of message ids, and
can be purged, put back, made anew and full. `SimulatedSource` and `SimulatedDestination` are the engine's ports to it
through a `Network`; `Books` is the real ledger's SQL on a connection in memory. `Fate` decides at which effect a worker
dies. Nothing here knows what a link must do: that is judged in `links.py`.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

import msgspec

from tidings.errors import ConflictError, LogFull, OutcomeUnknown, StewardUnreachable, TidingsError
from tidings.links.compare import Difference
from tidings.links.link_store import BookedLink
from tidings.links.ports import (
    AdmittedAt,
    Fetched,
    IndexPage,
    IndexRow,
    LinkAdmission,
    LocalFacts,
    OriginIdentity,
    PeerFacts,
)
from tidings.links.schema import SCHEMA
from tidings.wire.digests import RecordIdentity
from tidings.wire.links import MOST_HOPS, GapKind, LinkedRecord, LinkGap, LinkPage, Token
from tidings.wire.names import covers_any

T = TypeVar("T")
START = 1_760_000_000.0
#: seconds a log knows message ids
WINDOW = 600.0
TIMEOUT = 5.0


class Killed(BaseException):
    """The worker died here: nobody may catch it."""


# ------------------------------------------------------------------------------------------------------------ time


class _Park:
    """What a coroutine waits for: so many seconds, or that somebody resumes it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __await__(self) -> Generator[_Park, None, None]:
        yield self


class Task:
    """A coroutine that is driven by hand."""

    def __init__(self, scheduler: Scheduler, work: Coroutine[Any, Any, None]) -> None:
        self._scheduler, self._work = scheduler, work
        self.turn = 0
        self.done = False
        #: by itself, and not because it was killed
        self.ended = False

    def step(self, turn: int) -> None:
        if self.done or turn != self.turn:
            return
        self.turn += 1
        before, self._scheduler.current = self._scheduler.current, self
        try:
            parked = self._work.send(None)
        except Killed:
            self.done = True
        except StopIteration:
            self.done = self.ended = True
        else:
            self._scheduler.at(self._scheduler.now + parked.seconds, self, self.turn)
        finally:
            self._scheduler.current = before

    def resume(self) -> None:
        self._scheduler.at(self._scheduler.now, self, self.turn)

    def kill(self) -> None:
        if not self.done:
            self.done = True
            self._work.close()


class Scheduler:
    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now = rng, START
        self.current: Task | None = None
        self._number = itertools.count()
        self._due: list[tuple[float, float, int, Callable[[], None]]] = []

    def spawn(self, work: Coroutine[Any, Any, None]) -> Task:
        task = Task(self, work)
        task.resume()
        return task

    def beside(self, work: Coroutine[Any, Any, None]) -> Callable[[], Coroutine[Any, Any, None]]:
        task = self.spawn(work)

        async def end() -> None:
            task.kill()

        return end

    def at(self, when: float, task: Task, turn: int) -> None:
        self.call_at(when, lambda: task.step(turn))

    def call_at(self, when: float, what: Callable[[], None]) -> None:
        """Of what is due at one moment, luck says which comes first."""
        heapq.heappush(self._due, (when, self.rng.random(), next(self._number), what))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            when, _, _, what = heapq.heappop(self._due)
            self.now = max(self.now, when)
            what()
        self.now = until


def sleep(seconds: float) -> _Park:
    return _Park(seconds)


class SimulatedClock:
    """`skew`: this machine's clock is wrong by so many seconds."""

    def __init__(self, scheduler: Scheduler, skew: float = 0.0) -> None:
        self._scheduler, self.skew = scheduler, skew
        self._woken = False
        self._parked: Task | None = None

    def now(self) -> float:
        return self._scheduler.now + self.skew

    def tick(self) -> float:
        return self._scheduler.now

    async def wait(self, seconds: float) -> None:
        if not self._woken:
            self._parked = self._scheduler.current
            await sleep(seconds)
            self._parked = None
        self._woken = False

    def wake(self) -> None:
        self._woken = True
        if self._parked is not None:
            self._parked.resume()


@dataclass
class Fate:
    """When a worker dies: after so many effects."""

    left: int = -1

    def effect(self) -> None:
        if self.left == 0:
            self.left = -1
            raise Killed
        self.left -= 1 if self.left > 0 else 0


# -------------------------------------------------------------------------------------------------------- the logs


class LogRecord(NamedTuple):
    """A record of a simulated log. `link` is empty if it was said here; `ours` is its channel here."""

    seq: int
    time_ns: int
    link: str
    origin: str
    channel: str
    ours: str
    sender: str
    id: str
    signature: str
    payload: bytes
    hash: str
    hops: int
    mark: str

    @property
    def identity(self) -> OriginIdentity:
        return OriginIdentity(self.origin, self.sender, self.id)


@dataclass
class Grant:
    """What a peer may read here, over which link."""

    link: str
    peer: str
    shares: tuple[str, ...]


@dataclass
class SimulatedLog:
    space: str
    rng: random.Random
    epoch: str = "e1"
    #: what the worker beside it is told; it changes whenever the log is another one, the epoch only if that was noticed
    incarnation: str = "i1"
    records: list[LogRecord] = field(default_factory=list)
    #: messages below this sequence were removed
    floor: int = 1
    full: bool = False
    #: what came over links, was known to the ledger here, and was removed by age: where it was; it must not come again
    removed: dict[OriginIdentity, int] = field(default_factory=dict)
    #: what of that came again
    returned: list[OriginIdentity] = field(default_factory=list)
    #: channels that are not listed, if they have to be; `listing` changes with them
    unlisted: frozenset[str] = frozenset()
    listing: int = 0
    #: bytes that a link may bring in a day
    share: int = 0
    message_ids: dict[str, tuple[int, float]] = field(default_factory=dict)
    #: up to where the log of an earlier epoch was this one
    agreed: dict[str, int] = field(default_factory=dict)
    #: up to where it was this one before it was set back unnoticed
    rewound: int | None = None
    lives: int = 1

    @property
    def head(self) -> int:
        return len(self.records)

    def there(self) -> list[LogRecord]:
        return self.records[self.floor - 1 :]

    def append(self, draft: LogRecord, now: float) -> LogRecord:
        mark = f"{self.rng.getrandbits(80):020x}"
        record = draft._replace(seq=self.head + 1, time_ns=int(now * 1e9), mark=mark)
        self.records.append(record)
        return record

    def store(self, draft: LogRecord, message_id: str, now: float) -> AdmittedAt:
        known = self.message_ids.get(message_id)
        if known is not None and now - known[1] < WINDOW:
            return AdmittedAt(known[0], duplicate=True)
        record = self.append(draft, now)
        if record.identity in self.removed:
            self.returned.append(record.identity)
        self.message_ids[message_id] = (record.seq, now)
        return AdmittedAt(record.seq)

    def purge(self, floor: int) -> list[LogRecord]:
        gone = self.records[self.floor - 1 : floor - 1]
        self.floor = max(self.floor, floor)
        return gone

    def put_back(self, records: Sequence[LogRecord], floor: int, *, noticed: bool) -> list[LogRecord]:
        """An older copy of it. What it lost is returned. `noticed`: the steward gave it another epoch."""
        last = 0
        for old, new in zip(self.records, records, strict=False):
            if old is not new:
                break
            last = old.seq
        lost = self.records[last:]
        self.records, self.floor = list(records), min(floor, len(records) + 1)
        self.removed = {name: seq for name, seq in self.removed.items() if seq < self.floor}
        self.message_ids = {}
        self.lives += 1
        self.incarnation = f"i{self.lives}"
        self.agreed = {epoch: min(seq, last) for epoch, seq in self.agreed.items()}
        if noticed:
            self.agreed[self.epoch] = last if self.rewound is None else min(last, self.rewound)
            self.epoch, self.rewound = f"e{self.lives}", None
        else:
            self.rewound = last if self.rewound is None else min(last, self.rewound)
        return lost

    # --- what the steward answers a peer ---

    def shared(self, grant: Grant, record: LogRecord) -> bool:
        if record.origin == grant.peer or not covers_any(grant.shares, record.ours):
            return False
        return not record.link or (record.link != grant.link and record.hops < MOST_HOPS)

    def linked(self, record: LogRecord) -> LinkedRecord:
        return LinkedRecord(
            seq=record.seq,
            time_ns=record.time_ns,
            origin=record.origin,
            channel=record.channel,
            sender=record.sender,
            signature=record.signature,
            payload=record.payload,
            hops=record.hops + 1,
            mark=record.mark,
        )

    def hello(self) -> PeerFacts:
        return PeerFacts(space=self.space, epoch=self.epoch, head=self.head, floor=self.floor, shares=(">",), hops=1)

    def page(self, grant: Grant, token: Token, limit: int, reach: int) -> LinkPage:
        gap = self.gap(token)
        if gap is not None:
            return LinkPage(records=(), through=token, head=self.head, floor=self.floor, gap=gap)
        looked = self.records[token.seq : token.seq + reach]
        found: list[LinkedRecord] = []
        last = token.seq
        for record in looked:
            last = record.seq
            if record.seq >= self.floor and self.shared(grant, record):
                found.append(self.linked(record))
                if len(found) == limit:
                    break
        mark = self.records[last - 1].mark if last else ""
        through = Token(space=self.space, epoch=self.epoch, seq=last, mark=mark)
        return LinkPage(records=tuple(found), through=through, head=self.head, floor=self.floor)

    def gap(self, token: Token) -> LinkGap | None:
        sure = self.rng.random() < 0.7
        if token.space != self.space:
            return self._gap(GapKind.STREAM)
        if token.epoch != self.epoch:
            return self._gap(GapKind.EPOCH, self.agreed.get(token.epoch, 0) if sure else 0)
        agreed = (self.rewound or 0) if sure else 0
        if token.seq > self.head:
            return self._gap(GapKind.TOO_NEW, agreed)
        if token.seq and token.mark and self.records[token.seq - 1].mark != token.mark:
            return self._gap(GapKind.RECORD, agreed)
        return self._gap(GapKind.TOO_OLD) if token.seq < self.floor - 1 else None

    def _gap(self, kind: GapKind, agreed: int = 0) -> LinkGap:
        return LinkGap(kind=kind, oldest=self.floor - 1, head=self.head, epoch=self.epoch, agreed=agreed)

    def fetch(self, grant: Grant, seqs: Sequence[int]) -> Fetched:
        there = {each.seq: each for each in self.there() if self.shared(grant, each)}
        records = tuple(self.linked(there[seq]) for seq in seqs if seq in there)
        return Fetched(epoch=self.epoch, records=records, missing=tuple(seq for seq in seqs if seq not in there))

    # --- what it answers the worker beside it ---

    def facts(self) -> LocalFacts:
        return LocalFacts(
            space=self.space,
            epoch=self.incarnation,
            head=self.head,
            floor=self.floor,
            listing=self.listing,
            share=self.share,
        )

    def list_all_but(self, *channels: str) -> None:
        self.unlisted, self.listing = frozenset(channels), self.listing + 1

    def index(self, after: int, reach: int) -> IndexPage:
        looked = self.records[after : after + reach]
        rows = tuple(
            IndexRow(r.seq, r.link, r.origin, r.channel, r.sender, r.id, r.hash)
            for r in looked
            if r.link and r.seq >= self.floor
        )
        return IndexPage(epoch=self.incarnation, rows=rows, through=looked[-1].seq if looked else after)


# ----------------------------------------------------------------------------------------------------- the network


@dataclass
class Network:
    scheduler: Scheduler
    rng: random.Random
    #: pairs of spaces that do not hear each other; a space with itself: its worker does not reach its broker
    cut: set[tuple[str, str]] = field(default_factory=set)
    loss: float = 0.0
    slow: float = 0.05

    async def travel(self) -> None:
        await sleep(self.rng.uniform(0.0, self.slow))

    def lost(self, here: str, there: str) -> bool:
        return (here, there) in self.cut or (there, here) in self.cut or self.rng.random() < self.loss

    async def ask(self, here: str, there: str, question: Callable[[], T]) -> T:
        """A question that may be asked again. It may arrive twice."""
        await self.travel()
        if self.lost(here, there):
            await sleep(TIMEOUT)
            raise StewardUnreachable(f"{there} does not answer")
        answer = question()
        if self.rng.random() < 0.02:
            answer = question()
        await self.travel()
        if self.lost(here, there):
            await sleep(TIMEOUT)
            raise StewardUnreachable(f"{there} did not answer")
        return answer


Tamper = Callable[[LinkPage, Token], LinkPage]


@dataclass
class SimulatedSource:
    """The peer's steward, as one link sees it."""

    network: Network
    here: str
    log: Callable[[], SimulatedLog]
    grant: Grant
    #: a hostile peer changes what it answers
    tamper: Callable[[], Tamper | None]

    async def hello(self) -> PeerFacts:
        now = datetime.fromtimestamp(self.network.scheduler.now, UTC).isoformat()
        return await self._ask(lambda: msgspec.structs.replace(self.log().hello(), time=now))

    async def page(self, token: Token, limit: int) -> LinkPage:
        reach = self.network.rng.choice((3, 20, 200))
        page = await self._ask(lambda: self.log().page(self.grant, token, limit, reach))
        change = self.tamper()
        return page if change is None or page.gap is not None else change(page, token)

    async def fetch(self, seqs: Sequence[int]) -> Fetched:
        few = seqs[: self.network.rng.choice((3, 50, 500))]
        return await self._ask(lambda: self.log().fetch(self.grant, few))

    async def inventory(self, through: int) -> dict[int, tuple[str, str, str]]:
        """What `links/compare.py` finds out with three questions."""

        def look() -> dict[int, tuple[str, str, str]]:
            log = self.log()
            shared = (each for each in log.there() if each.seq <= through and log.shared(self.grant, each))
            return {each.seq: (each.sender, each.id, each.hash) for each in shared}

        for _ in range(2):
            await self._ask(lambda: None)
        return await self._ask(look)

    async def _ask(self, question: Callable[[], T]) -> T:
        return await self.network.ask(self.here, self.log().space, question)


def _row(seq: int, found: tuple[str, str, str]) -> RecordIdentity:
    sender, name, hashed = found
    return RecordIdentity(seq, sender, name, bytes.fromhex(hashed))


@dataclass
class SimulatedComparison:
    """Stands for `links/compare.py`: the same answer by asking for everything."""

    source: SimulatedSource
    books: Books
    row: int
    reported: str = ""
    standing: bool = False

    async def differences(self, through: int) -> AsyncIterator[Difference]:
        theirs = await self.source.inventory(through)
        query = """SELECT seq, sender, id, hash FROM disposition
          WHERE link = ? AND life = 0 AND reason <> 'vanished' AND seq <= ?"""
        rows = self.books.connection.execute(query, (self.row, through)).fetchall()
        ours = {seq: (sender, name, hashed) for seq, sender, name, hashed in rows}
        floor = self.source.log().floor
        lacking = tuple(_row(seq, each) for seq, each in sorted(theirs.items()) if ours.get(seq) != each)
        extra = tuple(_row(seq, each) for seq, each in sorted(ours.items()) if seq >= floor and seq not in theirs)
        found = f"{lacking} {extra}" if lacking or extra else ""
        self.standing = bool(found) and found == self.reported
        if found and found != self.reported:
            yield Difference("", "", lacking, extra)
        self.reported = found


@dataclass
class Troubles:
    """What is wrong with a destination now, and what came of it."""

    #: records of these are refused: by an error without a class, or as too large
    poison: dict[OriginIdentity, type[TidingsError]] = field(default_factory=dict)
    #: how likely it is that nobody hears what became of a record
    unknown: float = 0.0
    burn: float = 0.0
    #: records behind one that was not taken are sometimes taken
    overtakes: bool = True
    #: what may be out of order because of that
    disturbed: set[OriginIdentity] = field(default_factory=set)
    #: stores that are still under way
    under_way: int = 0


@dataclass
class SimulatedDestination:
    """The log here, as one worker sees it."""

    network: Network
    log: Callable[[], SimulatedLog]
    link: str
    troubles: Troubles
    fate: Fate

    async def facts(self) -> LocalFacts:
        return await self._ask(lambda: self.log().facts())

    async def index(self, after: int) -> IndexPage:
        reach = self.network.rng.choice((4, 40, 400))
        return await self._ask(lambda: self.log().index(after, reach))

    async def unlisted(self, channels: Collection[str]) -> Collection[str]:
        return await self._ask(lambda: self.log().unlisted.intersection(channels))

    async def admit(self, batch: Sequence[LinkAdmission], epoch: str) -> Sequence[AdmittedAt | TidingsError]:
        answers = await self._admit(batch, epoch)
        last = max((n for n, each in enumerate(answers) if isinstance(each, AdmittedAt)), default=0)
        failed = (n for n, each in enumerate(answers[:last]) if not isinstance(each, AdmittedAt))
        self.troubles.disturbed.update(_name(batch[n]) for n in failed)  # a log that was full for one, not for the next
        return answers

    async def _admit(self, batch: Sequence[LinkAdmission], epoch: str) -> Sequence[AdmittedAt | TidingsError]:
        await self.network.travel()
        answers: list[AdmittedAt | TidingsError] = []
        here = self.log().space
        for number, each in enumerate(batch):
            self.fate.effect()
            answer = self._one(each, epoch)
            if isinstance(answer, AdmittedAt) and self.network.rng.random() < self.troubles.unknown:
                return answers + self._unheard(batch[number:], epoch)
            if isinstance(answer, OutcomeUnknown):  # the connection went: what is behind it was never sent
                return answers + [answer] * (len(batch) - number)
            answers.append(answer)
            self.fate.effect()
            if self.network.rng.random() < 0.2:
                await self.network.travel()
        if self.network.lost(here, here):
            await sleep(TIMEOUT)
            return [OutcomeUnknown("nobody heard what became of it")] * len(batch)
        return answers

    def _one(self, each: LinkAdmission, epoch: str) -> AdmittedAt | TidingsError:
        network, log, name = self.network, self.log(), _name(each)
        if network.lost(log.space, log.space) or log.incarnation != epoch:
            return OutcomeUnknown("it was sent")
        if log.full:
            return LogFull("the log is full")
        if name in self.troubles.poison:
            self.troubles.disturbed.add(name)
            return self.troubles.poison[name]("the log stumbles over it")
        if self.troubles.burn and log.head and network.rng.random() < self.troubles.burn:
            self.troubles.disturbed.add(name)
            log.message_ids.setdefault(each.message_id, (network.rng.randint(1, log.head), network.scheduler.now))
        return self._store(each)

    def _store(self, each: LinkAdmission) -> AdmittedAt:
        return self.log().store(drafted(each, self.link), each.message_id, self.network.scheduler.now)

    def _unheard(self, rest: Sequence[LinkAdmission], epoch: str) -> list[AdmittedAt | TidingsError]:
        """The first of them was stored. The others were never sent, or come later, or were stored around a lost one."""
        rng, unknown = self.network.rng, OutcomeUnknown("nobody heard what became of it")
        how = rng.random()
        if how < 0.3:
            self._later(rest[1:], rng.uniform(0.0, 60.0))
        elif how < 0.45 and self.troubles.overtakes and len(rest) > 2:
            self.troubles.disturbed.add(_name(rest[1]))
            taken = list[AdmittedAt | TidingsError]()
            for each in rest[2:]:
                taken.append(self._one(each, epoch))
                if not isinstance(taken[-1], AdmittedAt):
                    break
            return [unknown, ConflictError("not this one"), *taken, *[unknown] * (len(rest) - 2 - len(taken))]
        return [unknown] * len(rest)

    def _later(self, batch: Sequence[LinkAdmission], seconds: float) -> None:
        """They are under way, in order, and arrive unless the broker is another one by then."""
        incarnation = self.log().incarnation
        self.troubles.under_way += 1

        def arrive() -> None:
            self.troubles.under_way -= 1
            if self.log().incarnation == incarnation and not self.log().full:
                for each in batch:
                    if _name(each) not in self.troubles.poison:
                        self._store(each)

        self.network.scheduler.call_at(self.network.scheduler.now + seconds, arrive)

    async def _ask(self, question: Callable[[], T]) -> T:
        here = self.log().space
        return await self.network.ask(here, here, question)


def _name(each: LinkAdmission) -> OriginIdentity:
    return OriginIdentity(each.record.origin, each.record.sender, msgspec.json.decode(each.record.payload)["id"])


def drafted(each: LinkAdmission, link: str) -> LogRecord:
    """The record a log has of it."""
    record = each.record
    return LogRecord(
        seq=0,
        time_ns=0,
        link=link,
        origin=record.origin,
        channel=record.channel,
        ours=each.ours,
        sender=record.sender,
        id=_name(each).id,
        signature=record.signature,
        payload=record.payload,
        hash=hashlib.sha256(record.payload).hexdigest(),
        hops=record.hops,
        mark="",
    )


# ------------------------------------------------------------------------------------------------------ the ledger


class Books:
    """A ledger on disk: it survives its workers. An older copy of it can be put back."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        self.connection.executescript(SCHEMA.sql)
        self.connection.execute("PRAGMA foreign_keys = ON")

    def copy(self) -> bytes:
        return self.connection.serialize()

    def put_back(self, copy: bytes) -> None:
        # Not `deserialize` into the connection itself: SQLite 3.40 crashes in statements with `json_each` after that.
        with closing(sqlite3.connect(":memory:")) as older:
            older.deserialize(copy)
            older.backup(self.connection)

    def job(self, job: Callable[[sqlite3.Connection], T]) -> T:
        self.connection.execute("BEGIN")
        try:
            found = job(self.connection)
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")
        return found


class Jobs:
    """What one worker does in a ledger."""

    def __init__(self, books: Books, fate: Fate, network: Network) -> None:
        self._books, self._fate, self._network = books, fate, network

    async def write(self, job: Callable[[sqlite3.Connection], T]) -> T:
        await sleep(self._network.rng.uniform(0.0, 0.01))
        self._fate.effect()
        found = self._books.job(job)
        self._fate.effect()
        return found

    async def read(self, job: Callable[[sqlite3.Connection], T]) -> T:
        return job(self._books.connection)

    def ledger(self, row: int) -> BookedLink:
        return BookedLink(self, row)
