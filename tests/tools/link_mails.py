"""A simulator of direct messages between two linked spaces, while everything that carries them fails.

`simulate_mail(seed)` lets agents of two spaces write to each other, and to a third space, while a `MailRound` of each
space runs over a real ledger, dies at any effect and runs again; answers are lost before or after their effects;
streams are set back with and without another epoch, brokers and stewards start anew, ledgers are put back; mailboxes
are full, people are not known for a while, links are switched off, readers are revoked. Then the faults stop, and the
oracle (`MailWorld.check`) looks: what a sender's space still had was read once or its end is known there, in the order
it was written in, and every receipt came back. A seed is the same life on every run.

`MailSpace` is what a broker and a steward answer, by the contract of `link mail`, `link told` and `admission mail`,
`took` and `receipts`. A reader shows a message once, whatever its mailbox brings, and tells of it each time.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import msgspec

from tidings.contract.core import Request
from tidings.errors import (
    ConflictError,
    DeniedError,
    LogFull,
    MailboxFull,
    OutcomeUnknown,
    StewardUnreachable,
    TidingsError,
)
from tidings.links.link_store import BookedLink
from tidings.links.mail_sync import MailRound
from tidings.wire import link_exchange, signing
from tidings.wire import message as wire_message
from tidings.wire.link_exchange import LinkedMail
from tidings.wire.rulings import Link
from tidings.wire.signing import ACCOUNT, KeyPair, key_of_seed
from tidings.wire.states import ReceiptStage
from tools.link_ports import WINDOW, Books, Killed
from tools.typed_answers import fields_of, typed_answer

A = TypeVar("A")

T = TypeVar("T")
SPACES = tuple(key_of_seed(bytes([number]) * 32, ACCOUNT).id for number in range(1, 4))
#: two agents of each space
KEYS: dict[str, tuple[KeyPair, ...]] = {
    space: tuple(key_of_seed(bytes([10 * number + each]) * 32) for each in (1, 2))
    for number, space in enumerate(SPACES, 1)
}
HOME = {key.id: space for space, keys in KEYS.items() for key in keys}
LINK = "abcdefghijkl"
#: small, so that little mail has pages and fills a mailbox
PAGE, RECEIPTS, ROOM, PAIR = 3, 4, 6, 5
STEPS = 90
#: what befalls, and how often
OFTEN = {
    "send": 30.0,
    "third": 2.0,
    "read": 14.0,
    "tidy": 8.0,
    "copy": 4.0,
    "set back": 3.0,
    "broker": 1.0,
    "steward": 2.0,
    "people": 6.0,
    "room": 4.0,
    "passes": 2.0,
    "revoke": 0.4,
    "receipts": 1.0,
    "ledger": 0.5,
}

#: sender, id, reader
Key = tuple[str, str, str]


class MailViolation(AssertionError):
    """Mail over a link broke a promise."""


@lru_cache(maxsize=10_000)
def letter(sender: str, to: str, number: int) -> LinkedMail:
    """Signed once, for all lives."""
    space = HOME[sender]
    key = next(each for each in KEYS[space] if each.id == sender)
    mid = f"01900000-0000-7000-8{KEYS[space].index(key)}00-{number:012x}"
    at = "2025-11-15T12:00:00.000Z"
    payload = wire_message.compose(wire_message.Sender(sender, "x"), text="x", id=mid, ts=at).raw
    sig = signing.sign(key, space, "dm", to, payload)
    return LinkedMail(seq=1, sender=sender, to=to, sig=sig, payload=payload)


verify_once = lru_cache(maxsize=100_000)(signing.verifies)


def key_of(mail: LinkedMail) -> Key:
    return mail.sender, mail_id(mail), mail.to


@lru_cache(maxsize=10_000)
def _id_of(payload: bytes) -> str:
    return wire_message.decode(payload).id


def mail_id(mail: LinkedMail) -> str:
    return _id_of(mail.payload)


class ToldHere(NamedTuple):
    """A receipt in AUD."""

    seq: int
    mark: str
    key: Key
    stage: ReceiptStage


@dataclass
class Streams:
    """What is on the disk of a broker, and is put back from a copy."""

    mail: dict[int, LinkedMail] = field(default_factory=dict)
    mail_head: int = 0
    #: ids for the broker, of records that are there, and when they came: it knows them for a while
    ids: dict[str, float] = field(default_factory=dict)
    told: dict[int, ToldHere] = field(default_factory=dict)
    told_head: int = 0

    def put_back(self, older: Streams, *, mail: bool, told: bool) -> None:
        if mail:
            self.mail, self.mail_head, self.ids = dict(older.mail), older.mail_head, dict(older.ids)
        if told:
            self.told, self.told_head = dict(older.told), older.told_head


class MailSpace:
    """A space: its streams, its steward in memory, and its readers."""

    def __init__(self, world: MailWorld, space: str, peer: str) -> None:
        self.world, self.id, self.peer = world, space, peer
        self.streams, self.copies = Streams(), [Streams()]
        self.epoch, self.broker = 1, 1
        self.revoked: set[str] = set()
        self.passes = self.has_room = True
        #: what readers have shown, in order, and how often their mailbox brought it
        self.shown: dict[str, list[Key]] = {each.id: [] for each in KEYS[space]}
        self.start_steward()

    # --- the steward ---

    def start_steward(self) -> None:
        """It reads back what AUD has, and knows nobody elsewhere."""
        self.people, self.looked_at = "", self.broker
        self.lives: dict[Key, set[ReceiptStage]] = {}
        self.lying: dict[tuple[str, str], set[str]] = {}
        for each in self.streams.told.values():
            self.lives.setdefault(each.key, set()).add(each.stage)

    def stage_of(self, key: Key) -> ReceiptStage:
        return max(self.lives.get(key, ()), key=lambda each: each.rank, default=ReceiptStage.CONFIRMED)

    def write(self, key: Key, stage: ReceiptStage) -> None:
        if stage not in self.lives.get(key, ()):
            self.lives.setdefault(key, set()).add(stage)
            streams, self.streams.told_head = self.streams, self.streams.told_head + 1
            streams.told[streams.told_head] = ToldHere(streams.told_head, self.world.mark(), key, stage)

    # --- its agents ---

    def store(self, mail: LinkedMail, mid: str = "") -> None:
        streams = self.streams
        if mid and self.knows(mid):
            return
        streams.mail_head += 1
        streams.mail[streams.mail_head] = msgspec.structs.replace(mail, seq=streams.mail_head, mark=self.world.mark())
        if mid:
            streams.ids[mid] = self.world.now

    def knows(self, mid: str) -> bool:
        return self.world.now - self.streams.ids.get(mid, -WINDOW) < WINDOW

    def remove(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            del self.streams.mail[seq]

    def read(self, reader: str, most: int) -> None:
        """The reader takes what is oldest, shows it unless it did, and tells of it. It is removed then."""
        mine = [each for each in self.streams.mail.values() if each.to == reader][:most]
        for each in mine:
            key = key_of(each)
            if key not in self.shown[reader]:
                self.shown[reader].append(key)
            self.write(key, ReceiptStage.DELIVERED)
            self.write(key, ReceiptStage.READ)
        self.remove([each.seq for each in mine])

    def revoke(self, reader: str) -> None:
        self.revoked.add(reader)
        mine = [each for each in self.streams.mail.values() if each.to == reader]
        for each in mine:
            self.write(key_of(each), ReceiptStage.UNDELIVERABLE)
        self.remove([each.seq for each in mine])

    def tidy(self) -> None:
        """What was told of by the space of its reader goes, from the oldest of each pair on."""
        stopped, done = set[tuple[str, str]](), list[int]()
        for each in self.streams.mail.values():
            if HOME[each.to] == self.id:
                continue
            if self.stage_of(key_of(each)).rank < ReceiptStage.DELIVERED.rank:
                stopped.add((each.sender, each.to))
            elif (each.sender, each.to) not in stopped:
                done.append(each.seq)
        self.remove(done)

    def forget_receipts(self, lying: set[Key]) -> None:
        """The oldest go. They are kept for longer than mail is, so of what still lies anywhere, or in a copy, none
        does."""
        for seq in sorted(self.streams.told)[:3]:
            if self.streams.told[seq].key in lying:
                return
            del self.streams.told[seq]

    # --- what the worker of the other space asks ---

    def _known(self) -> None:
        if not self.people:
            raise ConflictError("who is there is not known yet")

    def _theirs(self) -> set[str]:
        return {each.id for each in KEYS[self.peer]}

    def asked_by_peer(self, do: str, said: Mapping[str, Any]) -> dict[str, Any]:
        if not self.passes:
            raise DeniedError("the link passes no direct messages")
        self._known()
        return self._told(said["receipts"]) if do == "told" else self._mail(said)

    def _mail(self, said: Mapping[str, Any]) -> dict[str, Any]:
        streams, epoch = self.streams, f"epoch {self.epoch}"
        after, is_same, set_back = said["after"], said["epoch"] == epoch, False
        if is_same and said.get("marks"):
            after, set_back = self._confirmed(said["marks"])
        if not is_same or said["people"] != self.people or not 0 <= after <= streams.mail_head:
            set_back |= is_same and after > streams.mail_head
            after = 0
        due = [each for seq, each in streams.mail.items() if seq > after and self._handed_out(each)]
        through = due[PAGE - 1].seq if len(due) > PAGE else streams.mail_head
        mark = streams.mail[through].mark if through in streams.mail else ""
        page = {"epoch": epoch, "people": self.people, "after": after, "through": through, "mark": mark}
        more = {"more": through < streams.mail_head, "set_back": set_back, "broker": str(self.broker)}
        return {"mail": [msgspec.to_builtins(each) for each in due[:PAGE]], **page, **more}

    def _confirmed(self, marks: list[list[Any]]) -> tuple[int, bool]:
        set_back = False
        for seq, mark, *_ in sorted(marks, reverse=True):
            found = self.streams.mail.get(seq)
            if found is not None and found.mark == mark:
                return seq, set_back
            set_back |= found is not None or seq > self.streams.mail_head
        return 0, set_back

    def _handed_out(self, mail: LinkedMail) -> bool:
        ours = HOME[mail.sender] == self.id and mail.to in self._theirs()
        return ours and self.stage_of(key_of(mail)).rank <= ReceiptStage.CONFIRMED.rank

    def _told(self, receipts: list[dict[str, Any]]) -> dict[str, Any]:
        refused = []
        for number, each in enumerate(receipts):
            key, stored = (each["sender"], each["id"], each["to"]), self.streams.mail.get(each["seq"])
            if HOME[key[0]] != self.id or HOME[key[2]] != self.peer:
                raise MailViolation(f"{self.id} is told of a message of others: {key}")
            if key in self.lives or (stored is not None and key_of(stored) == key):
                self.write(key, ReceiptStage(each["stage"]))
            else:
                refused.append(number)
        return {"new": len(receipts) - len(refused), "refused": refused}

    # --- what its own worker asks ---

    def asked_by_worker(self, do: str, said: Mapping[str, Any]) -> dict[str, Any]:
        if do == "receipts":
            return self._receipts(said)
        if do == "took":
            for each in said["mail"]:
                self._ids(each["to"], each["sender"]).add(each["id"])
            return {}
        if said["anew"]:
            for each in said["mail"]:
                self.lying.pop((each["to"], each["sender"]), None)
        late = set[str]()
        return {"agreed": 1, "verdicts": [self._verdict(each, late) for each in said["mail"]]}

    def _ids(self, to: str, sender: str) -> set[str]:
        if self.looked_at != self.broker:
            self.lying, self.looked_at = {}, self.broker
        if (to, sender) not in self.lying:
            found = (each for each in self.streams.mail.values() if (each.to, each.sender) == (to, sender))
            self.lying[to, sender] = {mail_id(each) for each in found}
        return self.lying[to, sender]

    def _verdict(self, row: Mapping[str, str], late: set[str]) -> str:
        sender, to, mid = row["sender"], row["to"], row["id"]
        if to in self.revoked:
            return "no: its reader was revoked"
        if (sender, mid, to) in self.lives or mid in self._ids(to, sender):
            return "have"
        foreign = sum(HOME[each.sender] == self.peer for each in self.streams.mail.values())
        if not self.people or not self.has_room or foreign >= ROOM or sender in late:
            late.add(sender)
            return "wait: there is no room"
        return "take"

    def _receipts(self, said: Mapping[str, Any]) -> dict[str, Any]:
        streams, epoch = self.streams, f"epoch {self.epoch}"
        first, after = min(streams.told, default=streams.told_head + 1), said["after"]
        there = streams.told.get(after)
        is_gone = after <= streams.told_head and after < first
        if said["epoch"] != epoch or not (is_gone or (there and there.mark == said["mark"])):
            after = 0
        due = [each for seq, each in streams.told.items() if seq > after][:RECEIPTS]
        found = [
            {"sender": each.key[0], "id": each.key[1], "to": each.key[2], "stage": each.stage, "why": "why"}
            | {"n": each.seq, "mark": each.mark}
            for each in due
            if HOME[each.key[0]] != self.id
        ]
        through, mark = (due[-1].seq, due[-1].mark) if due else (after, said["mark"] if after else "")
        more = bool(due) and through < streams.told_head
        token = {"epoch": epoch, "after": after, "through": through, "mark": mark}
        return {"receipts": found, **token, "broker": str(self.broker), "more": more}

    def put_mail(self, to: str, sender: str, payload: bytes, mid: str) -> None:
        key = (sender, _id_of(payload), to)
        lies = any(key_of(each) == key for each in self.streams.mail.values())
        if not self.knows(mid) and (lies or key in self.lives):
            raise MailViolation(f"{key} comes into {self.id} a second time")
        pair = sum((each.to, each.sender) == (to, sender) for each in self.streams.mail.values())
        if pair >= PAIR:
            raise MailboxFull("full of what its sender sent")
        if not self.has_room and self.world.rng.random() < 0.3:
            raise LogFull("no room at all")
        self.store(LinkedMail(seq=1, sender=sender, to=to, sig="", payload=payload), mid)


@lru_cache
def _empty_ledger(space: str) -> bytes:
    books = Books()
    books.connection.execute("INSERT INTO space (space, secret) VALUES (?, ?)", (space, b"x" * 32))
    return books.copy()


class _QuickBooks(Books):
    """Its tables are put back, not made."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None)


class MailWorker:
    """The worker of one space, and its ledger: what it asks may fail, and it may die."""

    def __init__(self, world: MailWorld, here: MailSpace, peer: MailSpace) -> None:
        self.world, self.here, self.peer = world, here, peer
        self.books, self.deaths, self.is_running = _QuickBooks(), 0, False
        self.copy = _empty_ledger(here.id)
        self.books.put_back(self.copy)
        self.start()

    def start(self) -> None:
        record = Link(op="-", link=LINK, state="on", origin=self.peer.id, channels={}, shares=(), roster="on")
        ledger = BookedLink(self, 0)
        ports = _PeerPort(self), _LocalPort(self)
        self.round = MailRound(self.here.id, record, ledger, *ports, clock=lambda: self.world.now)

    def run(self) -> None:
        """One round."""
        self.is_running = True
        try:
            _driven(self.round.run())
        except Killed:
            self.deaths += 1
            self.start()
        except TidingsError as error:
            self.world.failures[type(error).__name__] += 1
        finally:
            self.is_running = False

    async def write(self, job: Callable[[Any], T]) -> T:
        self.world.maybe_die()
        found = self.books.job(job)
        self.world.maybe_die()
        return found

    async def read(self, job: Callable[[Any], T]) -> T:
        return job(self.books.connection)


class _PeerPort:
    def __init__(self, worker: MailWorker) -> None:
        self.worker = worker

    async def ask(self, request: Request[A]) -> A:
        verb, fields, world = request.operation.verb, fields_of(request), self.worker.world
        return typed_answer(request, world.ask(lambda: self.worker.peer.asked_by_peer(verb, fields)))


class _LocalPort:
    def __init__(self, worker: MailWorker) -> None:
        self.worker = worker

    async def ask(self, request: Request[A]) -> A:
        verb, fields, world = request.operation.verb, fields_of(request), self.worker.world
        return typed_answer(request, world.ask(lambda: self.worker.here.asked_by_worker(verb, fields)))

    async def put_mail(self, to: str, sender: str, payload: bytes, headers: Mapping[str, str]) -> None:
        mid = headers["Nats-Msg-Id"]
        self.worker.world.ask(lambda: self.worker.here.put_mail(to, sender, payload, mid))


def _driven(work: Coroutine[Any, Any, T]) -> T:
    """Nothing here ever waits."""
    try:
        work.send(None)
    except StopIteration as end:
        found: T = end.value
        return found
    raise AssertionError("a round waits for something that nobody does")


class MailWorld:
    def __init__(self, seed: int) -> None:
        self.rng, self.now = random.Random(seed), 0.0
        self._marks = itertools.count(1)
        self.faulty, self.failures = True, Counter[str]()
        #: how often each of these befalls, in this life
        self.loss, self.death, self.meanwhile = (self.rng.choice([0.0, 0.02, 0.1]) for _ in range(3))
        one, other = SPACES[:2]
        self.spaces = {one: MailSpace(self, one, other), other: MailSpace(self, other, one)}
        self.workers = [MailWorker(self, self.spaces[a], self.spaces[b]) for a, b in ((one, other), (other, one))]
        self._numbers = itertools.count(1)
        #: every message, in the order its sender wrote it
        self.written: list[LinkedMail] = []
        #: senders and readers whose messages were lost, written again or refused
        self.disturbed: set[tuple[str, str]] = set()
        self.happened = Counter[str]()

    def mark(self) -> str:
        return f"m{next(self._marks)}"

    def maybe_die(self) -> None:
        if self.faulty and self.rng.random() < self.death / 4:
            raise Killed

    def ask(self, effect: Callable[[], T]) -> T:
        if not self.faulty:
            return effect()
        if self.rng.random() < self.meanwhile:
            self.befall()
        if self.rng.random() < self.loss:
            raise StewardUnreachable("it does not answer")
        self.maybe_die()
        found = effect()
        self.maybe_die()
        if self.rng.random() < self.loss:
            raise OutcomeUnknown("its answer was lost")
        if self.rng.random() < self.meanwhile:
            self.befall()
        return found

    # --- what happens ---

    def send(self) -> None:
        space = self.rng.choice(list(self.spaces.values()))
        sender = self.rng.choice(KEYS[space.id]).id
        to = self.rng.choice(KEYS[space.peer if self.rng.random() < 0.9 else SPACES[2]]).id
        mail = letter(sender, to, next(self._numbers))
        pair = sum((each.to, each.sender) == (to, sender) for each in space.streams.mail.values())
        if pair < 2 * PAIR:
            self.written.append(mail)
            space.store(mail)

    def from_a_third(self) -> None:
        """Mail of another link, and what became of it: nothing of it concerns the two."""
        space = self.rng.choice(list(self.spaces.values()))
        mail = letter(KEYS[SPACES[2]][0].id, self.rng.choice(KEYS[space.id]).id, next(self._numbers))
        space.store(mail)

    def read(self) -> None:
        space = self.rng.choice(list(self.spaces.values()))
        reader = self.rng.choice(KEYS[space.id]).id
        if reader not in space.revoked:
            space.read(reader, self.rng.randint(1, 4))

    def set_back(self) -> None:
        space = self.rng.choice(list(self.spaces.values()))
        mail, told = self.rng.choice([(True, True), (True, False), (False, True)])
        before = {seq: each.mark for seq, each in space.streams.mail.items()}
        space.streams.put_back(self.rng.choice(space.copies), mail=mail, told=told)
        space.broker += 1
        if self.rng.random() < 0.3:
            space.epoch += 1
        if self.rng.random() < 0.7 or told:  # memory of a steward is as old as AUD when it ends with its broker
            space.start_steward()
        now = {seq: each.mark for seq, each in space.streams.mail.items()}
        if mail and before != now:
            self.disturbed |= {(each.sender, each.to) for each in self.written}
            self._write_again(space)

    def _write_again(self, space: MailSpace) -> None:
        """Hosts look for what they sent last, and send it again under the same id."""
        there = {key_of(each) for each in space.streams.mail.values()}
        for each in self.written[-3:]:
            lost = HOME[each.sender] == space.id and key_of(each) not in there
            if lost and key_of(each) not in space.lives and self.rng.random() < 0.5:
                space.store(each)

    def befall(self) -> None:
        """One thing of many."""
        space = self.rng.choice(list(self.spaces.values()))
        what = self.rng.choices(list(OFTEN), list(OFTEN.values()))[0]
        self.happened[what] += 1
        if what == "send":
            self.send()
        elif what == "third":
            self.from_a_third()
        elif what == "read":
            self.read()
        elif what == "tidy":
            space.tidy()
        elif what == "copy":
            streams = space.streams  # records never change
            space.copies = [*space.copies[-2:], replace(streams, mail={**streams.mail}, told={**streams.told})]
            space.copies[-1].ids = {**streams.ids}
        elif what == "set back":
            self.set_back()
        elif what == "broker":
            space.broker += 1
        elif what == "steward":
            space.start_steward()
        elif what == "people":
            space.people = self.rng.choice(["v1", "v1", "v2", ""])
        elif what == "room":
            space.has_room = not space.has_room
        elif what == "passes":
            space.passes = not space.passes
        elif what == "revoke":
            space.revoke(self.rng.choice(KEYS[space.id]).id)
        elif what == "receipts":
            kept = (streams for at in self.spaces.values() for streams in (at.streams, *at.copies))
            space.forget_receipts({key_of(each) for streams in kept for each in streams.mail.values()})
        else:
            self._ledger()

    def _ledger(self) -> None:
        """An older copy of a ledger is put back while its worker does not run; or one is made."""
        worker = self.rng.choice(self.workers)
        if worker.is_running:
            return
        if self.rng.random() < 0.5:
            worker.copy = worker.books.copy()
        else:
            worker.books.put_back(worker.copy)
            worker.start()
            # what a broker remembers, its space forgot and an older ledger never knew would be taken to be stored
            self.now += WINDOW

    # --- a life ---

    def live(self) -> None:
        for space in self.spaces.values():
            space.people = "v1"
        for _ in range(STEPS):
            self.now += self.rng.choices([0.1, 2.0, 15.0, WINDOW], [10, 10, 10, 1])[0]
            if self.rng.random() < 0.45:
                self.rng.choice(self.workers).run()
            else:
                self.befall()
        self.faulty = False
        for space in self.spaces.values():
            space.people, space.has_room, space.passes = "v3", True, True
        # what a sender's space has now is owed
        lying = ((space, each) for space in self.spaces.values() for each in space.streams.mail.values())
        owed = [each for space, each in lying if self._is_owed(each) and HOME[each.sender] == space.id]
        self.rest()
        self.check(owed)

    def _is_owed(self, mail: LinkedMail) -> bool:
        return mail.sender in HOME and HOME[mail.to] in self.spaces and HOME[mail.sender] in self.spaces

    def rest(self) -> None:
        for _ in range(40):
            before = self._state()
            self.now += 20.0
            for worker in self.workers:
                worker.run()
            for space in self.spaces.values():
                for reader in space.shown:
                    space.read(reader, 100)
            for worker in self.workers:
                worker.run()
            for space in self.spaces.values():
                space.tidy()
            if self._state() == before and self.now > 200:
                return
        raise MailViolation("it does not come to rest")

    def _state(self) -> list[Any]:
        streams = [space.streams for space in self.spaces.values()]
        return [(sorted(each.mail), each.mail_head, each.told_head) for each in streams]

    # --- the oracle ---

    def check(self, owed: list[LinkedMail]) -> None:
        for mail in owed:
            key, there = key_of(mail), self.spaces[HOME[mail.to]]
            stage = self.spaces[HOME[mail.sender]].stage_of(key)
            was_read = key in there.shown[mail.to]
            if stage.rank <= ReceiptStage.CONFIRMED.rank:
                raise MailViolation(f"the end of {key} is not known in {HOME[mail.sender]}; read there: {was_read}")
            ended = stage.rank >= ReceiptStage.EXPIRED.rank
            if not was_read and not ended:
                raise MailViolation(f"{key} is said to be {stage}, and nobody read it")
            if was_read and not ended and stage is not ReceiptStage.READ:
                raise MailViolation(f"{key} was read, and its sender knows {stage}")
        for space in self.spaces.values():
            left = [each for each in space.streams.mail.values() if self._is_owed(each)]
            if left:
                raise MailViolation(f"{len(left)} messages are left in {space.id}")
            for reader, shown in space.shown.items():
                self._check_order(reader, shown)

    def _check_order(self, reader: str, shown: list[Key]) -> None:
        if len(set(shown)) != len(shown):
            raise MailViolation(f"{reader} was shown something twice")
        place = {key_of(each): number for number, each in enumerate(self.written)}
        for sender in {key[0] for key in shown if key in place}:
            numbers = [place[key] for key in shown if key[0] == sender]
            if (sender, reader) not in self.disturbed and numbers != sorted(numbers):
                raise MailViolation(f"what {sender} wrote to {reader} was shown in another order")


def simulate_mail(seed: int) -> MailWorld:
    world = MailWorld(seed)
    with mock.patch.object(link_exchange, "verifies", verify_once):
        world.live()
    return world
