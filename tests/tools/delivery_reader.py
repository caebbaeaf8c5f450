"""One owner of a simulated space: it takes frames from its mailbox, and checks that delivery keeps its promises.

At every frame: it is its own, its numbers have no gap, its channels are in order, and nothing in it is what the owner
was never owed or may no longer read. A block that a frame only names is fetched unless all of it is known; one that is
gone is read from the log, under the access of now. At the end (`check_complete`): everything owed and allowed all along
was in some frame, or was given up and its owner told. A broken promise is a `Violation`. What is owed is the word of
`delivery_space.py`; how frames come about is none of its business.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from tidings.wire.frames import Block, Lost, Ref, decode_frame, open_block, open_ref
from tools.delivery_ports import SPACE_ID, Books, Mailbox, Mailboxes
from tools.delivery_space import SimulatedSpace, addressed


class Violation(AssertionError):
    """Delivery broke a promise; the message says which and for whom."""


@dataclass
class Reader:
    """Takes frames, opens them, remembers what it saw. An orderly one settles each before the next."""

    owner: str
    space: SimulatedSpace
    books: Books
    boxes: Mailboxes
    orderly: bool = True
    #: retention may remove what lies unread
    careless: bool = False
    series: str = ""
    number: int = 0
    #: the pipeline has acted on every access record up to here
    enforced: int = 0
    #: series -> numbers it saw
    numbers: dict[str, set[int]] = field(default_factory=dict)
    #: the newest frame it saw, by its place in the mailbox
    last: tuple[int, str] = (0, "")
    seen: set[int] = field(default_factory=set)
    newest: dict[str, int] = field(default_factory=dict)
    #: channel -> up to here order is no promise any more
    late: dict[str, int] = field(default_factory=dict)
    told: list[Lost] = field(default_factory=list)
    #: what became of blocks that frames only named
    fetches: Counter[str] = field(default_factory=Counter)
    #: what was in such a block and neither stored nor in the log: it would tell its application so
    missed: set[int] = field(default_factory=set)

    def read(self, box: Mailbox, frames: int, rng: random.Random, kept_from: int) -> None:
        """Take up to so many frames, and acknowledge most of them. The log begins at `kept_from`."""
        taken = list(box.frames[:frames])
        if not self.orderly:
            rng.shuffle(taken)
        for dlv_seq, data in taken:
            self._open(dlv_seq, data, kept_from, is_emptied=box.noted is not None)
            if rng.random() < 0.9:
                box.frames = [held for held in box.frames if held[0] != dlv_seq]
                box.acknowledged = dlv_seq if not box.frames else box.frames[0][0] - 1
            else:
                break

    def mailbox_was_set_back(self) -> None:
        """Places in the mailbox count anew; what was seen stays seen, and what is made again comes late."""
        self.last = (0, "")
        self.late = dict(self.newest)

    def delivery_was_set_back(self, floor: int) -> None:
        """What lies in the mailbox is read before what comes again."""
        self.late = dict.fromkeys(self.space.channel_of.values(), floor)

    def _open(self, dlv_seq: int, data: bytes, kept_from: int, *, is_emptied: bool) -> None:
        """`is_emptied`: somebody took frames out and nobody made it good yet, so one may be the first that is left."""
        frame = decode_frame(data)
        if frame.owner != self.owner:
            raise Violation(f"a frame of {frame.owner} in the mailbox of {self.owner}")
        if frame.series != self.series:
            self.series, self.number = frame.series, 0
        if self.orderly and frame.number > self.number + 1 and not is_emptied:
            raise Violation(f"{self.owner} has frame {self.number} and gets {frame.number}: a gap without a loss")
        self.number = max(self.number, frame.number)
        self.numbers.setdefault(frame.series, set()).add(frame.number)
        self.last = max(self.last, (dlv_seq, frame.series))
        self.told += frame.lost
        for block in frame.blocks:
            if isinstance(block, Block):
                for kept in open_block(block):
                    self._surface(kept.seq, kept.tail)
            else:
                self._fetch(frame.epoch, block, kept_from)

    def _fetch(self, epoch: str, ref: Ref, kept_from: int) -> None:
        subjects, stored = self.space.log.subjects, self.space.stored
        tails = {seq: subjects.tail(stored[seq - 1].subject) for seq in ref.seqs}
        if all(seq in self.seen or addressed(tail)[0] == self.owner for seq, tail in tails.items()):
            self.fetches["known"] += 1
            return
        data = self.boxes.stored.get(ref.name.hex())
        if data is not None:
            self.fetches["fetched"] += 1
            tails = {kept.seq: kept.tail for kept in open_ref(SPACE_ID, epoch, ref, data)}
        elif not self.space.may_read(self.owner, ref.channel, self.space.table.head):
            self.fetches["denied"] += 1
            return
        else:
            self.fetches["from the log"] += 1
        for seq, tail in tails.items():
            if data is not None or seq >= kept_from:
                self._surface(seq, tail)
            elif seq not in self.seen and addressed(tail)[0] != self.owner:
                self.missed.add(seq)

    def _surface(self, seq: int, tail: str) -> None:
        sender, channel = addressed(tail)
        if sender == self.owner or seq in self.seen:
            return
        # what was given up may still come along in a block that is owed for its later part
        is_late = self.late.get(channel, 0) < seq <= self.newest.get(channel, 0)
        if self.orderly and is_late and not self._is_given_up(channel, seq):
            raise Violation(f"{self.owner} gets {seq} of {channel} after {self.newest[channel]}")
        if self.owner not in self.space.truth[seq]:
            raise Violation(f"{self.owner} was never owed {seq} of {channel}")
        if not self.space.allowed_once(self.owner, channel, max(seq, self.enforced)):
            raise Violation(f"{self.owner} gets {seq} of {channel}, which it may not read since {self.enforced}")
        self.seen.add(seq)
        self.newest[channel] = max(seq, self.newest.get(channel, 0))

    def check_complete(self, box: Mailbox, *, telling: bool) -> None:
        """Everything owed and allowed from its sequence to now was surfaced, or given up and its owner told."""
        for seq, channel in self.space.channel_of.items():
            owed = self.owner in self.space.truth[seq] and seq not in self.seen
            if owed and self.space.allowed_throughout(self.owner, channel, seq):
                self._check_given_up(channel, seq, telling=telling)
        newest, series = self.last
        numbers = self.numbers.get(series, set())
        if newest > box.emptied and numbers != set(range(1, max(numbers, default=0) + 1)):
            raise Violation(f"{self.owner} has the numbers {sorted(numbers)}: a gap without a loss")

    def _is_given_up(self, channel: str, seq: int) -> bool:
        """Did the ledger give it up: cancelled by an operator, unread for too long, or gone from the log?"""
        mine = [event for event in self.books.events if event.owner == self.owner and event.channel in (channel, "*")]
        return any(
            event.seq >= seq and (event.kind == "cancel" or (event.kind == "lost" and event.first <= seq))
            for event in mine
        )

    def _check_given_up(self, channel: str, seq: int, *, telling: bool) -> None:
        if seq in self.missed and self.careless:
            return
        if not self._is_given_up(channel, seq):
            raise Violation(f"{self.owner} was owed {seq} of {channel} and never got it")
        table = self.space.table
        if not telling and self.owner in table.rules.narrowings(0, table.head):
            return
        if not any(lost.channel in (channel, "*") and lost.first <= seq <= lost.last for lost in self.told):
            raise Violation(f"{self.owner} was owed {seq} of {channel}, it was given up, and nobody told")
