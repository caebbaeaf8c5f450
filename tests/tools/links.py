"""A simulator of links: two spaces, or a ring of three, that talk while everything between them fails.

`simulate(seed)` lets agents of each space talk in shared and unshared channels while `Direction`s of every link run,
die at any effect and run again; answers are lost, repeated or late; logs are purged, put back, made anew and full;
ledgers are put back, rebuilt and agreed on anew; a second worker carries the same link; a peer lies; some records are
poison. Then the faults stop, and the oracle (`World.check`) looks: both sides hold the same but for what is named,
nothing twice, nothing again that retention removed, what a sender said in order, each record of the peer's log with one
disposition. A seed is the same life on every run.

What may be out of order is known here: `disturbed` has the messages that a log lost and got again, that were refused
for a time, overtaken by others of a broken batch, or hidden by a peer that lied; and those that a repair found, of
which the ledger says itself that they came late.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache, partial

import msgspec

from tidings.contract.link_worker import GapDetected, LinkEvent
from tidings.errors import ConflictError, TooLarge
from tidings.links import link_store, local_index, obligations
from tidings.links.definition import LinkDefinition
from tidings.links.ports import OriginIdentity
from tidings.links.replicator import Direction
from tidings.wire import message as wire_message
from tidings.wire.links import LinkedRecord, LinkPage, Token
from tidings.wire.message import Sender, timestamp
from tidings.wire.signing import KeyPair, key_of_seed, sign, verifies
from tools.link_ports import (
    Books,
    Fate,
    Grant,
    Jobs,
    LogRecord,
    Network,
    Scheduler,
    SimulatedClock,
    SimulatedComparison,
    SimulatedDestination,
    SimulatedLog,
    SimulatedSource,
    Tamper,
    Task,
    Troubles,
)

#: keys of spaces are accounts' keys: what they are made of does not matter here
SPACES = ("AALPHA", "ABETA", "AGAMMA")
KEYS = tuple(key_of_seed(bytes([number]) * 32) for number in range(1, 7))
CHANNELS = ("general", "team.x", "team.y", "private")
PAGE = 8
verify_once = lru_cache(maxsize=100_000)(verifies)


class Violation(AssertionError):
    """A link broke a promise."""


async def verify(records: object) -> list[bool]:
    assert isinstance(records, tuple | list)
    return [verify_once(r.signature, r.origin, "chat", r.sender, r.channel, r.payload) for r in records]


def names_of(origin: str) -> dict[str, str]:
    """How others call the channels of a space that it shares."""
    name = origin.lower()
    return {"general": f"{name}.general", "team.>": f"{name}.team.>"}


class _Errors(logging.Handler):
    """What the engine did not expect is logged there, and tried again: here it is a violation."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(logging.Formatter("%(message)s").format(record))


@dataclass
class Carrier:
    """A worker of one direction: it runs, or is dead."""

    world: World
    definition: LinkDefinition
    books: Books
    row: int
    fate: Fate = field(default_factory=Fate)
    task: Task | None = None
    direction: Direction | None = None
    comparison: SimulatedComparison | None = None
    skew: float = 0.0

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done

    def start(self) -> None:
        if self.running:
            return
        world, wanted = self.world, self.definition
        self.fate.left = -1
        log = lambda: world.logs[wanted.peer]  # noqa: E731
        grant = Grant(wanted.link, wanted.space, world.shares(wanted.peer, wanted.space))
        tamper = lambda: world.lie(self)  # noqa: E731
        source = SimulatedSource(world.network, wanted.space, log, grant, tamper)
        here = lambda: world.logs[wanted.space]  # noqa: E731
        troubles = world.troubles[wanted.space]
        destination = SimulatedDestination(world.network, here, wanted.link, troubles, self.fate)
        self.comparison = SimulatedComparison(source, self.books, self.row)
        self.direction = Direction(
            wanted,
            Jobs(self.books, self.fate, world.network).ledger(self.row),
            source,
            destination,
            SimulatedClock(world.scheduler, self.skew),
            verify=verify,
            comparison=self.comparison,
            rng=random.Random(world.rng.getrandbits(32)),
            limit=PAGE,
            beside=world.scheduler.beside,
        )
        self.direction.listen(world.heard.append)
        self.task = world.scheduler.spawn(self.direction.run())
        world.starts += 1

    def kill(self) -> None:
        if self.task is not None:
            self.task.kill()

    def wake(self) -> None:
        if self.running and self.direction is not None:
            self.direction.wake()

    @property
    def link(self) -> link_store.LinkRow:
        return link_store.find(self.books.connection, self.row)

    def is_done(self) -> bool:
        log, handled = self.world.logs[self.definition.peer], self.link.handled
        owed, _ = obligations.counts(self.books.connection, self.row)
        return handled is not None and (handled.epoch, handled.seq) == (log.epoch, log.head) and not owed


class World:
    def __init__(self, seed: int, spaces: int | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.scheduler = Scheduler(random.Random(rng.getrandbits(32)))
        self.network = Network(self.scheduler, random.Random(rng.getrandbits(32)))
        count = spaces or rng.choice((2, 2, 3))
        self.logs = {space: SimulatedLog(space, random.Random(rng.getrandbits(32))) for space in SPACES[:count]}
        self.agents = {space: KEYS[number * 2 : number * 2 + 2] for number, space in enumerate(self.logs)}
        self.disturbed: set[OriginIdentity] = set()
        self.troubles = {space: Troubles(disturbed=self.disturbed) for space in self.logs}
        self.books = {space: Books() for space in self.logs}
        self.copies: dict[str, list[tuple[list[LogRecord], int]]] = {space: [] for space in self.logs}
        self.ledger_copies: dict[str, list[bytes]] = {space: [] for space in self.logs}
        #: every message that was said, by what it is known by
        self.said: dict[OriginIdentity, LogRecord] = {}
        #: records that no side may let in
        self.bad: set[OriginIdentity] = set()
        #: (space, peer, hash) of what a peer lied about
        self.tampered: set[tuple[str, str, str]] = set()
        self.lying: set[str] = set()
        self.heard: list[LinkEvent] = []
        self.starts = self.lies = self.unnoticed = self.rebuilt = self.agreements = 0
        self._ids = 0
        self.hops = rng.choice((1, 2, 2, 3))
        self.second: Carrier | None = None
        self.carriers = [self._carrier(here, peer) for here in self.logs for peer in self.logs if here != peer]
        for each in self.carriers:
            each.start()

    # --- how it is put together ---

    def shares(self, space: str, _peer: str) -> tuple[str, ...]:
        """What a space lets others read: its own shared channels, and what it has of others."""
        passed_on = [f"{other.lower()}.>" for other in self.logs if other != space]
        return ("general", "team.>", *passed_on)

    def _carrier(self, here: str, peer: str, books: Books | None = None) -> Carrier:
        definition = LinkDefinition(
            link="l" + "".join(sorted((here[1], peer[1]))),
            space=here,
            peer=peer,
            authority="a1",
            channels=names_of(peer),
            beyond={other: names_of(other) for other in self.logs if other not in (here, peer)},
            hops=self.hops,
        )
        return self._carrier_of(definition, books or self.books[here])

    def _carrier_of(self, definition: LinkDefinition, books: Books) -> Carrier:
        # every worker of a space makes it from the key of that space's worker, so two ledgers agree
        secret = hashlib.sha256(definition.space.encode()).digest()
        link = books.job(lambda c: link_store.open_link(c, definition, secret, 0))
        return Carrier(self, definition, books, link.row, skew=self.rng.choice((0.0, 0.0, -3_000.0, 90_000.0)))

    # --- what happens ---

    def say(self) -> None:
        """Somebody says something, or answers."""
        rng, now = self.rng, self.scheduler.now
        space = rng.choice(list(self.logs))
        key, channel = rng.choice(self.agents[space]), rng.choice(CHANNELS)
        reply_to = rng.choice(list(self.said)).id if self.said and rng.random() < 0.3 else None
        record = self._record(space, key, channel, reply_to)
        if rng.random() < 0.02:  # something the steward should not have let pass
            record = self._spoil(record)
            self.bad.add(record.identity)
        elif rng.random() < 0.02:
            self.disturbed.add(record.identity)
            for troubles in self.troubles.values():
                troubles.poison[record.identity] = rng.choice((ConflictError, TooLarge))
        stored = self.logs[space].append(record, now)
        self.said[stored.identity] = stored
        if rng.random() < 0.02:  # its sender tried again, after the window
            self.logs[space].append(record, now)
        for each in self._all():
            if each.definition.peer == space and rng.random() < 0.7:
                each.wake()

    def _record(self, space: str, key: KeyPair, channel: str, reply_to: str | None) -> LogRecord:
        self._ids += 1
        bits = f"{int(self.scheduler.now * 1000):012x}"
        name = f"{bits[:8]}-{bits[8:]}-7{self._ids:03x}-8000-{self.rng.getrandbits(48):012x}"
        when = timestamp_of(self.scheduler.now)
        message = wire_message.compose(
            Sender(key.id, "agent"), text=f"word {self._ids}", id=name, ts=when, reply_to=reply_to
        )
        signature = sign(key, space, "chat", channel, message.raw)
        hashed = hashlib.sha256(message.raw).hexdigest()
        return LogRecord(0, 0, "", space, channel, channel, key.id, name, signature, message.raw, hashed, 0, "")

    def _spoil(self, record: LogRecord) -> LogRecord:
        how = self.rng.randrange(3)
        if how == 0:  # signed for another channel
            key = next(each for each in KEYS if each.id == record.sender)
            return record._replace(signature=sign(key, record.origin, "chat", "elsewhere", record.payload))
        if how == 1:  # the words of somebody else
            other = next(each.id for each in KEYS if each.id != record.sender)
            return record._replace(sender=other)
        payload = record.payload[:-1] + b" "
        key = next(each for each in KEYS if each.id == record.sender)
        return record._replace(
            payload=payload,
            hash=hashlib.sha256(payload).hexdigest(),
            signature=sign(key, record.origin, "chat", record.channel, payload),
        )

    def happen(self) -> None:
        """One of the bad days."""
        rng, space = self.rng, self.rng.choice(list(self.logs))
        what: list[tuple[float, Callable[[], None]]] = [
            (3, lambda: self._cut()),
            (3, lambda: self.network.cut.clear()),
            (1, lambda: self._set_network()),
            (4, lambda: rng.choice(self.carriers).kill()),
            (4, lambda: self._doom(rng.choice(self._all()))),
            (1, lambda: self._purge(space)),
            (1, lambda: self._put_back(space)),
            (0.2, lambda: self._make_anew(space)),
            (1, lambda: self._fill(space)),
            (2, lambda: self._set_troubles(space)),
            (1, lambda: self._copy(space)),
            (0.7, lambda: self._put_ledger_back(space)),
            (1, lambda: self._lie(space)),
            (0.7, lambda: self._second_worker()),
            (0.5, lambda: self._pause(rng.choice(self.carriers))),
            (0.7, lambda: self._rebuild(rng.choice(self.carriers))),
            (0.5, lambda: self._agree_anew(rng.choice(self.carriers))),
        ]
        weights, deeds = zip(*what, strict=True)
        rng.choices(deeds, weights)[0]()

    def restart_the_dead(self, chance: float = 0.6) -> None:
        for each in self._all():
            if each.task is not None and each.task.ended:
                raise Violation(f"{each.definition.link} into {each.definition.space} gave up")
            if not each.running and self.rng.random() < chance:
                each.start()

    def _all(self) -> list[Carrier]:
        return self.carriers if self.second is None else [*self.carriers, self.second]

    def _cut(self) -> None:
        """Two spaces apart, or a worker from the broker beside it."""
        one, other = self.rng.choice(list(self.logs)), self.rng.choice(list(self.logs))
        self.network.cut.add((one, other))

    def _set_network(self) -> None:
        self.network.loss, self.network.slow = self.rng.choice((0.0, 0.0, 0.05, 0.2)), self.rng.choice((0.05, 0.3, 2.0))

    def _doom(self, carrier: Carrier) -> None:
        carrier.fate.left = self.rng.randint(0, 15)

    def _purge(self, space: str) -> None:
        log = self.logs[space]
        gone = log.purge(self.rng.randint(log.floor, log.head + 1))
        self.disturbed.update(each.identity for each in gone)
        linked = {each.identity: each.seq for each in gone if each.link}
        log.removed |= self._known(space, linked)

    def _known(self, space: str, records: dict[OriginIdentity, int]) -> dict[OriginIdentity, int]:
        """Those that the ledger of a space knows of. A worker with a ledger of its own may know less."""
        if self.second is not None and self.second.books not in self.books.values():
            return {}
        known = local_index.present(self.books[space].connection, space, records)
        return {name: seq for name, seq in records.items() if name in known}

    def _copy(self, space: str) -> None:
        log = self.logs[space]
        self.copies[space].append((list(log.records), log.floor))
        self.ledger_copies[space].append(self.books[space].copy())

    def _put_back(self, space: str) -> None:
        log, rng = self.logs[space], self.rng
        if self.copies[space] and rng.random() < 0.5:
            records, floor = rng.choice(self.copies[space])
        else:
            records, floor = log.records[: rng.randint(max(0, log.head - 30), log.head)], log.floor
        noticed = rng.random() < 0.7
        self.unnoticed += not noticed
        lost = log.put_back(records, floor, noticed=noticed)
        self.disturbed.update(each.identity for each in lost)

    def _make_anew(self, space: str) -> None:
        lost = self.logs[space].put_back([], 1, noticed=True)
        self.disturbed.update(each.identity for each in lost)
        self.copies[space].clear()

    def _fill(self, space: str) -> None:
        self.logs[space].full = not self.logs[space].full

    def _set_troubles(self, space: str) -> None:
        troubles = self.troubles[space]
        troubles.unknown, troubles.burn = self.rng.choice((0.0, 0.1, 0.4)), self.rng.choice((0.0, 0.0, 0.05))
        troubles.overtakes = self.second is None

    def _put_ledger_back(self, space: str) -> None:
        if self.ledger_copies[space]:
            for each in self.carriers:
                if each.definition.space == space:
                    each.kill()
            if self.second is not None and self.second.books is self.books[space]:
                self.second.kill()
            self.books[space].put_back(self.rng.choice(self.ledger_copies[space]))
            self.logs[space].removed = self._known(space, self.logs[space].removed)
            for each in self._all():
                if each.books is self.books[space]:
                    self._open(each)

    def _rebuild(self, carrier: Carrier) -> None:
        self._set_aside(carrier)
        carrier.books.job(lambda c: link_store.rebuild(c, carrier.row))
        self.rebuilt += 1

    def _agree_anew(self, carrier: Carrier) -> None:
        """On other terms: all is read again. What more is taken is never said."""
        self._set_aside(carrier)
        self.agreements += 1
        more = f"never{self.agreements}"
        channels = names_of(carrier.definition.peer) | {more: f"{carrier.definition.peer.lower()}.{more}"}
        terms = msgspec.structs.replace(carrier.definition, channels=channels, authority=f"a{self.agreements + 1}")
        for each in self._sharing(carrier):
            each.definition = terms
            self._open(each)

    def _set_aside(self, carrier: Carrier) -> None:
        for each in self._sharing(carrier):
            each.kill()

    def _sharing(self, carrier: Carrier) -> list[Carrier]:
        """Workers of the same link and ledger."""
        return [each for each in self._all() if each.definition == carrier.definition and each.books is carrier.books]

    @staticmethod
    def _open(carrier: Carrier) -> None:
        carrier.row = carrier.books.job(lambda c: link_store.opened(c, carrier.definition, 0)).row

    def _pause(self, carrier: Carrier) -> None:
        if carrier.link.paused is None:
            carrier.books.job(lambda c: link_store.pause(c, carrier.row, "for a while", 0))
        else:
            carrier.books.job(lambda c: link_store.resume(c, carrier.row))

    def _second_worker(self) -> None:
        """Another worker for a link, with the same ledger (as if it had no lock) or with one of its own."""
        if self.second is not None:
            self.second.kill()
            self.second = None
            return
        first = self.rng.choice(self.carriers)
        books = first.books if self.rng.random() < 0.5 else Books()
        if books is not first.books:  # it does not know what was removed
            self.logs[first.definition.space].removed.clear()
        for each in self.troubles.values():
            each.overtakes = False
        self.second = self._carrier_of(first.definition, books)
        self.second.start()

    def note_late(self) -> None:
        """What repair fetched, and what was let in of quarantine: the ledger says so."""
        for books in self.books.values():
            query = "SELECT origin, sender, id FROM disposition WHERE reason = 'late'"
            self.disturbed.update(OriginIdentity(*each) for each in books.connection.execute(query))

    # --- a peer that lies ---

    def _lie(self, space: str) -> None:
        self.lying ^= {space}

    def lie(self, carrier: Carrier) -> Tamper | None:
        if carrier.definition.peer not in self.lying or self.rng.random() < 0.6:
            return None
        self.lies += 1
        lies: list[Tamper] = [
            _stands_still,
            _goes_back,
            _names_another_log,
            _turns_around,
            _reaches_beyond,
            _comes_twice,
            _is_too_large,
            lambda page, _: self._alter(carrier, page),
            lambda page, _: self._hide(page),
            lambda page, _: self._move(carrier, page),
        ]
        return self.rng.choice(lies)

    def _spoiled(self, carrier: Carrier, record: LinkedRecord) -> None:
        hashed = hashlib.sha256(record.payload).hexdigest()
        self.tampered.add((carrier.definition.space, carrier.definition.peer, hashed))
        self.disturbed.add(OriginIdentity(record.origin, record.sender, _id_of(record.payload)))

    def _alter(self, carrier: Carrier, page: LinkPage) -> LinkPage:
        if not page.records:
            return page
        spoiled = self.rng.choice(page.records)
        self._spoiled(carrier, spoiled)
        new = msgspec.structs.replace(spoiled, payload=spoiled.payload.replace(b"word", b"lies"))
        return msgspec.structs.replace(page, records=tuple(new if r is spoiled else r for r in page.records))

    def _move(self, carrier: Carrier, page: LinkPage) -> LinkPage:
        """Words from one channel appear in another, or in another space's name."""
        if not page.records:
            return page
        spoiled = self.rng.choice(page.records)
        self._spoiled(carrier, spoiled)
        channel = "team.moved" if self.rng.random() < 0.5 else "not.shared"
        new = msgspec.structs.replace(spoiled, channel=channel)
        return msgspec.structs.replace(page, records=tuple(new if r is spoiled else r for r in page.records))

    def _hide(self, page: LinkPage) -> LinkPage:
        """Comparing finds out."""
        for each in page.records:
            self.disturbed.add(OriginIdentity(each.origin, each.sender, _id_of(each.payload)))
        return msgspec.structs.replace(page, records=())

    # --- the end ---

    def close(self) -> None:
        for each in self._all():
            each.kill()

    def stop_faults(self) -> None:
        self.network.cut.clear()
        self.network.loss = 0.0
        self.lying.clear()
        if self.second is not None:
            self.second.kill()
        for space, troubles in self.troubles.items():
            self.logs[space].full = False
            troubles.unknown = troubles.burn = 0.0
            if self.rng.random() < 0.5:
                troubles.poison.clear()
        for each in self.carriers:
            each.fate.left = -1
            each.books.job(partial(link_store.resume, row=each.row))
            each.start()
            assert each.direction is not None
            each.direction.ask(repair=True)

    def come_to_rest(self) -> None:
        for number in range(60):
            self.scheduler.run(60.0)
            self.note_late()
            for each in self.carriers:
                if not each.running:
                    raise Violation(f"{each.definition.link} into {each.definition.space} does not run any more")
            under_way = any(troubles.under_way for troubles in self.troubles.values())
            if number > 3 and not under_way and all(each.is_done() for each in self.carriers):
                return
        behind = [each.direction.status() for each in self.carriers if each.direction and not each.is_done()]
        raise Violation(f"never came to rest: {behind}")

    def check(self) -> None:
        for space, log in self.logs.items():
            self._check_log(space, log)
        for each in self.carriers:
            self._check_direction(each)

    def _check_log(self, space: str, log: SimulatedLog) -> None:
        if log.returned:
            raise Violation(f"{space}: {log.returned[0]} was removed by age, and came again as new")
        seen: dict[OriginIdentity, int] = {}
        spoken: dict[tuple[str, str, str], list[str]] = {}
        for record in log.there():
            if not record.link:
                continue
            if record.identity in seen:
                raise Violation(f"{space} has {record.identity} at {seen[record.identity]} and at {record.seq}")
            seen[record.identity] = record.seq
            said = self.said.get(record.identity)
            if said is None or (said.payload, said.signature) != (record.payload, record.signature):
                raise Violation(f"{space} has at {record.seq} what nobody said")
            if record.identity in self.bad:
                raise Violation(f"{space} let in {record.identity}, which is not what its sender said")
            if record.origin == space or record.hops > self.hops:
                raise Violation(f"{space} let in at {record.seq} what came from itself, or from too far away")
            if said.channel == "private" or record.ours != f"{record.origin.lower()}.{said.channel}":
                raise Violation(f"{space} has {said.channel} of {record.origin} as {record.ours}")
            if record.identity not in self.disturbed:
                spoken.setdefault((record.origin, record.sender, record.channel), []).append(record.id)
        # A log that was set back unnoticed, below a token without a mark: others were read before what lies between.
        by_comparing = self.unnoticed and any(isinstance(e, GapDetected) and e.by_comparing for e in self.heard)
        for speaker, ids in spoken.items():
            if ids != sorted(ids) and not by_comparing:
                raise Violation(f"{space}: the words of {speaker} are out of order: {ids}")

    def _check_direction(self, carrier: Carrier) -> None:
        wanted, connection, row = carrier.definition, carrier.books.connection, carrier.row
        source, here = self.logs[wanted.peer], self.logs[wanted.space]
        grant = Grant(wanted.link, wanted.space, self.shares(wanted.peer, wanted.space))
        where = f"{wanted.peer} to {wanted.space}"
        query = "SELECT seq, sender, id, hash, kind, reason, local_seq FROM disposition WHERE link = ? AND life = 0"
        found = {each[0]: each for each in connection.execute(query, (row,))}
        there = {each.identity: each for each in here.there() if each.link}
        ranges = connection.execute(
            "SELECT first, last FROM omitted_range WHERE link = ? AND life = 0", (row,)
        ).fetchall()
        for record in source.there():
            if not source.shared(grant, record):
                continue
            if record.seq not in found:
                raise Violation(f"{where}: record {record.seq} has no disposition (ranges: {ranges})")
            _, sender, name, hashed, kind, reason, local_seq = found[record.seq]
            lied = (wanted.space, wanted.peer, record.hash) in self.tampered
            if (
                (sender, name, hashed) != (record.sender, record.id, record.hash)
                and not lied
                and record.identity not in self.bad
            ):
                raise Violation(f"{where}: what is said of record {record.seq} is about another one")
            if kind in ("admitted", "duplicate"):
                if record.identity not in there and local_seq >= here.floor:
                    raise Violation(f"{where}: record {record.seq} is said to be at {local_seq}, and is not here")
            elif kind == "omitted":
                expected = {"hops"} if record.hops + 1 > self.hops else set[str]()
                if reason not in expected | ({"not_shared"} if lied else set()):
                    raise Violation(f"{where}: record {record.seq} was left out: {reason}")
            elif kind == "quarantined":
                poison = record.identity in self.disturbed
                if not (lied or poison or record.identity in self.bad):
                    raise Violation(f"{where}: record {record.seq} is in quarantine: {reason}")
            else:
                raise Violation(f"{where}: record {record.seq} waits: {reason}")
        self._check_status(carrier, where)

    def _check_status(self, carrier: Carrier, where: str) -> None:
        assert carrier.direction is not None
        status = carrier.direction.status()
        if (status.status, status.connectivity, status.lag_records) != ("live", "online", 0):
            raise Violation(f"{where}: at rest, and yet {status}")


def timestamp_of(when: float) -> str:
    return timestamp(datetime.fromtimestamp(when, UTC))


def _id_of(payload: bytes) -> str:
    try:
        return str(msgspec.json.decode(payload)["id"])
    except msgspec.DecodeError:
        return ""


# --- pages that no log answers with ---


def _replaced(page: LinkPage, seq: int) -> LinkPage:
    return msgspec.structs.replace(page, through=msgspec.structs.replace(page.through, seq=seq))


def _stands_still(page: LinkPage, token: Token) -> LinkPage:
    return msgspec.structs.replace(page, records=(), through=token, head=token.seq + 5)


def _goes_back(page: LinkPage, token: Token) -> LinkPage:
    return _replaced(msgspec.structs.replace(page, records=()), max(0, token.seq - 1)) if token.seq else page


def _names_another_log(page: LinkPage, _: Token) -> LinkPage:
    return msgspec.structs.replace(page, through=msgspec.structs.replace(page.through, epoch="another"))


def _turns_around(page: LinkPage, _: Token) -> LinkPage:
    return msgspec.structs.replace(page, records=tuple(reversed(page.records)))


def _reaches_beyond(page: LinkPage, _: Token) -> LinkPage:
    return _replaced(page, page.records[-1].seq - 1) if page.records else page


def _comes_twice(page: LinkPage, _: Token) -> LinkPage:
    return msgspec.structs.replace(page, records=page.records[:1] + page.records)


def _is_too_large(page: LinkPage, _: Token) -> LinkPage:
    if not page.records:
        return page
    huge = tuple(msgspec.structs.replace(each, payload=bytes(300_000)) for each in page.records)
    return msgspec.structs.replace(page, records=huge * (PAGE + 1))


def simulate(seed: int, steps: int = 50, spaces: int | None = None) -> World:
    """One life. Raises `Violation` if a link broke a promise."""
    engine, unexpected = logging.getLogger("tidings.links"), _Errors()
    engine.addHandler(unexpected)
    propagate, engine.propagate = engine.propagate, False
    try:
        return _simulate(seed, steps, spaces)
    finally:
        engine.removeHandler(unexpected)
        engine.propagate = propagate
        if unexpected.found:
            raise Violation(unexpected.found[0])


def _simulate(seed: int, steps: int, spaces: int | None) -> World:
    world = World(seed, spaces)
    try:
        _live(world, steps)
    finally:
        world.close()
    return world


def _live(world: World, steps: int) -> None:
    for _ in range(steps):
        for _ in range(world.rng.choice((0, 1, 1, 3, 8))):
            world.say()
        if world.rng.random() < 0.6:
            world.happen()
        world.scheduler.run(world.rng.choice((0.05, 0.5, 2.0, 10.0, 40.0)))
        world.restart_the_dead()
        world.note_late()
    world.stop_faults()
    world.come_to_rest()
    world.check()
