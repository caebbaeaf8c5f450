"""Seeded logs of a space: the same seed gives the same records, signatures included.

`generate_log` mixes messages with every kind of ruling, in the orders that hurt: overlapping patterns, joins that
access does not cover, narrowing, revocation, names asked for twice, class flips, listed channels, key rotation,
records signed by the wrong or an old key, moved to another subject, malformed, unsigned, and acknowledgements
of the broker stored where a membership should be.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import nkeys

from tidings.model.projection import LogRecord
from tidings.wire import rulings, subjects
from tidings.wire.rulings import Access, Channel, Defaults, Lease, Link, Member, Parts, Space
from tidings.wire.signing import ACCOUNT, SIGNATURE_HEADER, USER, KeyPair
from tidings.wire.subjects import Subjects

CHANNELS = ("general", "team.backend", "team.frontend", "team", "team.backend.db", "ops", "ops.backend", "random")
WILDCARDS = ("team.>", "team.*", ">", "*.backend", "*", "*.*", "ops.>")
PUBACK = b'{"stream":"LOG_main","seq":2}'
START_NS = 1_750_000_000_000_000_000

#: the fold and the model both verify every ruling; once is enough
verify_once = lru_cache(maxsize=4096)(rulings.verify_ruling)


def seeded_key(rng: random.Random, prefix: int = USER) -> KeyPair:
    """A key pair that depends on nothing but `rng`: for tests only."""
    return KeyPair(nkeys.encode_seed(rng.randbytes(32), prefix).decode())


@dataclass
class GeneratedLog:
    """A log under construction, and what a reader needs to know to fold it."""

    subjects: Subjects
    space_id: str
    steward: KeyPair
    agents: list[str]
    channels: tuple[str, ...]
    anchor_key: str = ""
    secret: bytes = bytes(32)
    seq: int = 0
    records: list[LogRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.anchor_key = self.steward.id

    def tag(self, text: str) -> str:
        return subjects.tag(self.secret, text)

    def append(self, subject: str, payload: bytes, signature: str | None = None) -> LogRecord:
        self.seq += 1
        headers = {SIGNATURE_HEADER: signature} if signature else {}
        record = LogRecord(self.seq, START_NS + self.seq * 1_000_000, subject, headers, payload)
        self.records.append(record)
        return record

    def rule(self, subject: str, ruling: rulings.RulingRecord | bytes, key: KeyPair | None = None) -> LogRecord:
        """Append a ruling record signed by `key` (the steward's unless told); bytes are signed as they are."""
        payload = ruling if isinstance(ruling, bytes) else rulings.encode(ruling)
        signature = rulings.sign_ruling(key or self.steward, self.space_id, self.subjects.tail(subject), payload)
        return self.append(subject, payload, signature)

    def member(self, owner: str, pattern: str, state: str, ends: int | None = None) -> LogRecord:
        ruling = Member(op=f"op{self.seq}", state="in" if state == "in" else "out", pattern=pattern, ends=ends)
        return self.rule(self.subjects.member(owner, self.tag(pattern)), ruling)

    def access(self, owner: str, access: Access) -> LogRecord:
        return self.rule(self.subjects.access(owner), access)

    def channel(self, channel: Channel) -> LogRecord:
        return self.rule(self.subjects.channel(self.tag(channel.name)), channel)

    def space(self, space: Space) -> LogRecord:
        return self.rule(self.subjects.space_record, space)

    def chat(self, sender: str, channel: str) -> LogRecord:
        return self.append(self.subjects.chat(sender, channel), b"{}")


def new_log(rng: random.Random, agents: int = 4, channels: int = 5) -> GeneratedLog:
    """An empty log of a space with that many agents and channels."""
    return GeneratedLog(
        subjects=Subjects("main"),
        space_id=seeded_key(rng, ACCOUNT).id,
        steward=seeded_key(rng),
        agents=[seeded_key(rng).id for _ in range(agents)],
        channels=CHANNELS[:channels],
    )


def generate_log(rng: random.Random, size: int, agents: int = 4, channels: int = 5) -> GeneratedLog:
    """`size` records of everything that can happen to a space."""
    log = new_log(rng, agents, channels)
    author = _Author(rng, log)
    for owner in log.agents:
        if rng.random() < 0.8:
            author.access(owner)
    steps: dict[Callable[[], object], int] = {
        author.chat: 30,
        author.join: 24,
        author.leave: 14,
        author.access: 12,
        author.channel: 8,
        author.space: 5,
        author.junk: 10,
        author.lease: 2,
        author.link: 2,
        author.rotate: 1,
    }
    while len(log.records) < size:
        if rng.random() < 0.05:
            log.seq += rng.randint(1, 3)  # messages that retention has already removed
        rng.choices(list(steps), list(steps.values()))[0]()
    return log


class _Author:
    """Writes the next record of a log; each method is one thing that happens."""

    def __init__(self, rng: random.Random, log: GeneratedLog) -> None:
        self._rng = rng
        self._log = log
        self._retired: list[KeyPair] = [seeded_key(rng)]
        self._held: list[tuple[str, str, int]] = []

    def _op(self) -> str:
        return f"op{self._log.seq}"

    def _agent(self) -> str:
        return self._rng.choice(self._log.agents)

    def _pattern(self) -> str:
        return self._rng.choice(self._log.channels if self._rng.random() < 0.6 else WILDCARDS)

    def _patterns(self) -> tuple[str, ...]:
        if self._rng.random() < 0.5:
            return (">",)
        return tuple(self._pattern() for _ in range(self._rng.randint(0, 3)))

    def chat(self) -> None:
        self._log.chat(self._agent(), self._rng.choice(self._log.channels))

    def join(self) -> None:
        owner, pattern = self._agent(), self._pattern()
        joined = self._log.member(owner, pattern, "in").seq
        self._held.append((owner, pattern, joined))

    def leave(self) -> None:
        if not self._held or self._rng.random() < 0.1:
            self._log.member(self._agent(), self._pattern(), "out")
        else:
            owner, pattern, joined = self._rng.choice(self._held)
            ends = joined if self._rng.random() < 0.5 else None  # often of a membership that is over, or was never one
            self._log.member(owner, pattern, "out", ends)

    def access(self, owner: str | None = None) -> None:
        owner = owner or self._agent()
        names = [f"agent{index}" for index in range(len(self._log.agents))]
        own = names[self._log.agents.index(owner)]
        access = Access(
            op=self._op(),
            name=self._rng.choice(names) if self._rng.random() < 0.25 else own,
            read=self._patterns(),
            post=self._patterns(),
            revoked=self._rng.random() < 0.12,
            jwt="not.a.secret" if self._rng.random() < 0.3 else None,
        )
        self._log.access(owner, access)

    def channel(self) -> None:
        channel = Channel(
            op=self._op(),
            name=self._rng.choice(self._log.channels),
            cls=self._rng.choice(("live", "durable", None)),
            listed=self._rng.random() < 0.8,
        )
        if self._rng.random() < 0.1:  # the space secret changed: the same channel under another tag
            self._log.rule(self._log.subjects.channel(self._log.tag("new " + channel.name)), channel)
        else:
            self._log.channel(channel)

    def space(self, steward_key: str | None = None) -> None:
        space = Space(
            op=self._op(),
            defaults=Defaults(cls=self._rng.choice(("live", "durable", None))),
            channels="listed" if self._rng.random() < 0.3 else "open",
            parts=Parts(deliver=self._rng.choice(("on", "off"))),
            steward_key=steward_key or (self._log.steward.id if self._rng.random() < 0.3 else None),
        )
        self._log.space(space)

    def rotate(self) -> None:
        fresh = seeded_key(self._rng)
        self.space(steward_key=fresh.id)
        self._retired.append(self._log.steward)
        self._log.steward = fresh

    def lease(self) -> None:
        lease = Lease(op=self._op(), holder=self._op(), host="host", pid=7, key=self._log.steward.id)
        self._log.rule(self._log.subjects.steward_lease, lease)

    def link(self) -> None:
        name = self._rng.choice(("east", "west"))
        link = Link(op=self._op(), link=name, state="on", origin=self._log.space_id, channels={"general": "general"})
        self._log.rule(self._log.subjects.link(self._rng.choice(("east", "west"))), link)

    def junk(self) -> None:
        kinds = (self._puback, self._wrong_key, self._moved, self._malformed, self._other_text, self._bad_subject)
        self._rng.choice(kinds)()

    def _membership_subject(self) -> str:
        return self._log.subjects.member(self._agent(), self._log.tag(self._pattern()))

    def _puback(self) -> None:
        self._log.append(self._membership_subject(), PUBACK)

    def _wrong_key(self) -> None:
        key = self._rng.choice(self._retired)
        pattern, owner = self._pattern(), self._agent()
        rulings_of_any_kind: list[tuple[str, rulings.RulingRecord]] = [
            (
                self._log.subjects.member(owner, self._log.tag(pattern)),
                Member(op=self._op(), state=self._rng.choice(("in", "out")), pattern=pattern),
            ),
            (self._log.subjects.access(owner), Access(op=self._op(), name="mallory", read=(">",), post=(">",))),
            (self._log.subjects.space_record, Space(op=self._op(), steward_key=key.id)),
        ]
        self._log.rule(*self._rng.choice(rulings_of_any_kind), key=key)

    def _moved(self) -> None:
        """A genuine record replayed on another subject of its kind."""
        genuine = [record for record in self._log.records if ".member." in record.subject and record.headers]
        if genuine:
            record = self._rng.choice(genuine)
            self._log.append(self._membership_subject(), record.payload, record.headers[SIGNATURE_HEADER])

    def _malformed(self) -> None:
        payload = self._rng.choice((PUBACK, b"", b'{"op":"x","state":"in","pattern":"a..b"}', b'{"op":"a","op":"b"}'))
        self._log.rule(
            self._rng.choice((self._membership_subject(), self._log.subjects.access(self._agent()))), payload
        )

    def _other_text(self) -> None:
        """Authentic, but the payload speaks of another pattern than the tag stood for so far."""
        pattern = self._pattern()
        self._log.rule(self._membership_subject(), Member(op=self._op(), state="in", pattern=pattern))

    def _bad_subject(self) -> None:
        root = self._log.subjects.root
        tail = self._rng.choice(("member.bob.general", "acl.bob", "lease.other", "space.extra", "channel.general"))
        self._log.rule(f"{root}.{tail}", Member(op=self._op(), state="in", pattern="general"))
