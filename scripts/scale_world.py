"""A space of so many agents, made up from a seed: who is in which channel, the rulings that say so, and traffic.

Everything is made by the code that makes it in a space: tokens by the keyring, rulings encoded and signed, messages
composed. What is assumed is in `Assumed`, and nowhere else; `scale.py` measures what the pure core makes of it.
"""

from __future__ import annotations

import base64
import math
import random
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, count
from pathlib import Path

import nkeys

from tidings.contract.agents import BeatRequest
from tidings.model.projection import LogRecord
from tidings.server.keyring import Keyring
from tidings.steward.roster import RosterTable
from tidings.wire import rulings, subjects
from tidings.wire.message import Sender, compose
from tidings.wire.records import StoredRecord, encode_headers
from tidings.wire.rulings import Access, Member
from tidings.wire.signing import ACCOUNT, OPERATOR, SIGNATURE_HEADER, USER, KeyPair, encode_public
from tidings.wire.subjects import Subjects

SUBJECTS = Subjects("main")
#: seconds; tokens and records of a made-up space are as old in every run
BEGAN = 1_750_000_000
SECRET = bytes(subjects.SECRET_BYTES)


@dataclass(frozen=True)
class Assumed:
    """What nobody can measure beforehand."""

    seed: int = 13
    messages_each: int = 100
    """that an agent posts in a day"""
    agents_per_channel: int = 10
    """agents of the space for each of its channels, whatever their sizes"""
    memberships: int = 4
    """channels an agent is in, chosen by Zipf's law: the channel of rank r has the weight 1/r"""
    quiet: float = 0.5
    """a member posts in a channel of m members with the weight m ** -quiet: less is said where many listen"""
    text_median: int = 300
    text_sigma: float = 1.0
    """of the lognormal distribution of characters in a message; the mean is 1.65 times the median"""
    longest: int = 16_000
    direct: float = 0.2
    """share of the messages that go to one agent; each has two receipts, delivered and read"""
    changes: int = 2
    """changes of status that everybody is told for each message: working, and idle again"""


@dataclass
class World:
    """Agents, channels, and who is in which."""

    agents: int
    assumed: Assumed = field(default_factory=Assumed)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.assumed.seed * 1_000_003 + self.agents)
        seeded = [self._key(OPERATOR), *(self._key(ACCOUNT) for _ in range(6))]
        self.keyring = Keyring(*seeded)
        self.steward = self._key(USER)
        self.ids = [encode_public(USER, self.rng.randbytes(32)) for _ in range(self.agents)]
        self.channels = [
            f"team.room{number}" for number in range(max(5, self.agents // self.assumed.agents_per_channel))
        ]
        weights = list(accumulate(1 / rank for rank in range(1, len(self.channels) + 1)))
        #: agent -> indices of its channels
        self.rooms = [self._rooms(weights) for _ in self.ids]
        self.sizes = [0] * len(self.channels)
        for rooms in self.rooms:
            for room in rooms:
                self.sizes[room] += 1

    def _key(self, prefix: int) -> KeyPair:
        return KeyPair(nkeys.encode_seed(self.rng.randbytes(32), prefix).decode())

    def _rooms(self, weights: list[float]) -> list[int]:
        found: dict[int, None] = {}
        while len(found) < self.assumed.memberships:
            found[self.rng.choices(range(len(weights)), cum_weights=weights)[0]] = None
        return list(found)

    @property
    def messages_a_day(self) -> int:
        return self.agents * self.assumed.messages_each

    @property
    def space_id(self) -> str:
        return self.keyring.core.id

    def name(self, number: int) -> str:
        return f"agent{number}"

    # --- the log of rulings ---

    def token(self, number: int) -> str:
        patterns = ["general", "team.>"]
        return self.keyring.agent_token(
            SUBJECTS, self.ids[number], self.name(number), patterns, patterns, iat=BEGAN + number
        )

    def ruling_records(self) -> Iterator[LogRecord]:
        """Everybody's access, then everybody's joins, in sequences from 1 on."""
        seqs = count(1)
        for number, owner in enumerate(self.ids):
            patterns = ("general", "team.>")
            access = Access(
                op=self._id(number),
                name=self.name(number),
                roles=("worker",),
                read=patterns,
                post=patterns,
                jwt=self.token(number),
                iat=BEGAN + number,
            )
            yield self._ruling(next(seqs), SUBJECTS.access(owner), access)
        tag_of = [subjects.tag(SECRET, channel) for channel in self.channels]
        for owner, rooms in zip(self.ids, self.rooms, strict=True):
            for room in rooms:
                member = Member(op=self._id(room), state="in", pattern=self.channels[room])
                yield self._ruling(next(seqs), SUBJECTS.member(owner, tag_of[room]), member)

    def _ruling(self, seq: int, subject: str, ruling: rulings.RulingRecord) -> LogRecord:
        payload = rulings.encode(ruling)
        signature = rulings.sign_ruling(self.steward, self.space_id, SUBJECTS.tail(subject), payload)
        return LogRecord(seq, BEGAN * 10**9 + seq, subject, {SIGNATURE_HEADER: signature}, payload)

    def _id(self, number: int) -> str:
        """A message id that depends on the seed alone."""
        raw = bytearray((BEGAN * 1000 + number).to_bytes(6, "big") + self.rng.randbytes(10))
        raw[6], raw[8] = raw[6] & 0x0F | 0x70, raw[8] & 0x3F | 0x80
        return str(uuid.UUID(bytes=bytes(raw)))

    # --- traffic ---

    def posts(self) -> Iterator[tuple[int, int]]:
        """(sender, channel) of one message after the other."""
        while True:
            sender = self.rng.randrange(self.agents)
            rooms = self.rooms[sender]
            weights = [self.sizes[room] ** -self.assumed.quiet for room in rooms]
            yield sender, self.rng.choices(rooms, weights)[0]

    def messages(self, after: int) -> Iterator[StoredRecord]:
        """As the broker has them, from the sequence after `after` on. Signatures are random: their size counts."""
        words = _prose()
        for seq, (sender, room) in zip(count(after + 1), self.posts(), strict=False):
            length = int(self.rng.lognormvariate(math.log(self.assumed.text_median), self.assumed.text_sigma))
            text = ""
            while len(text) < length:
                text += next(words) + " "
            text = text[: min(max(1, length), self.assumed.longest)]
            said = Sender(self.ids[sender], self.name(sender))
            message = compose(said, text=text, id=self._id(seq), ts="2025-06-15T15:06:40.000Z")
            signature = base64.urlsafe_b64encode(self.rng.randbytes(64)).decode().rstrip("=")
            block = encode_headers([(SIGNATURE_HEADER, signature), ("Nats-Msg-Id", message.id)])
            subject = SUBJECTS.chat(self.ids[sender], self.channels[room])
            yield StoredRecord(seq, BEGAN * 10**9 + seq, subject, block, message.raw)

    # --- presence ---

    def beat(self, number: int, status: str = "idle") -> dict[str, object]:
        """The arguments of a beat as an endpoint sends it."""
        return {
            "session": f"session-{number:08}",
            "status": status,
            "activity": "reading what came in overnight" if status == "working" else None,
            "attention": {"mode": "open", "channels": {}},
            "model": "a-model-of-some-size",
        }

    def roster(self, access: dict[str, Access], ttl: float) -> RosterTable:
        """Everybody is online."""
        table = RosterTable(access.get, ttl, access_seq=lambda _owner: 1_000_000, moved=lambda _owner: 2_000_000)
        table.admit(self.ids)
        for number, owner in enumerate(self.ids):
            said = self.beat(number)
            beat = BeatRequest(session=str(said["session"]), status="idle", model=str(said["model"]))
            table.beat(owner, beat, 0.0, BEGAN + number)
            table.take(owner, str(said["session"]), None, BEGAN * 1000 + number)
        return table


def _prose() -> Iterator[str]:
    """The text of the benches: words as frequent as those of a language."""
    benches = str(Path(__file__).parents[1] / "bench")
    if benches not in sys.path:
        sys.path.append(benches)
    from texts import prose

    return prose()
