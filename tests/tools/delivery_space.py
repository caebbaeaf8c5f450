"""A space that lives at random, in memory: its log, its rules, and who is owed each message of it.

`SimulatedSpace.step` is one thing that happens: messages good and poisoned, joins, leaves, access that widens, narrows
or ends, classes that change, links. Whom a message is owed to is decided when it is written, by the naive model
(`model.py`), and nothing later changes it. It knows nothing of batches, mailboxes and readers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

from tidings.model.projection import LogRecord, Table
from tidings.wire.links import ORIGIN_HEADER
from tidings.wire.message import Mention, Message, Sender, compose
from tidings.wire.records import StoredRecord, encode_headers
from tidings.wire.rulings import Access, Channel, Defaults, Link, Space
from tidings.wire.signing import ACCOUNT
from tools import model
from tools.generated import GeneratedLog, seeded_key, verify_once

FAKE_SIGNATURE = "A" * 88
LINKS = ("east", "west")


class SimulatedSpace:
    """One space. `narrowed` is called with each owner that may read less from now on."""

    def __init__(self, rng: random.Random, log: GeneratedLog, narrowed: Callable[[str], object]) -> None:
        self.rng = rng
        self.log = log
        self._narrowed = narrowed
        self.elsewhere, self.stranger = seeded_key(rng, ACCOUNT).id, seeded_key(rng).id
        self.stored: list[StoredRecord] = []
        self.table = Table(log.subjects, log.space_id, log.anchor_key, verify=verify_once)
        self.state = model.Running("main", log.space_id, log.anchor_key, verify=verify_once)
        #: sequence of a message -> whom it is owed to
        self.truth: dict[int, set[str]] = {}
        self.channel_of: dict[int, str] = {}
        for owner in log.agents:
            self.grant(owner, (">",), (">",))

    # --- what happens ---

    def step(self) -> None:
        rng, log = self.rng, self.log
        owner, channel = rng.choice(log.agents), rng.choice(log.channels)
        pattern = rng.choice([*log.channels, "team.>", ">"])
        link = rng.choice(LINKS)
        match rng.choices(range(10), (60, 16, 8, 5, 3, 2, 1, 5, 8, 4))[0]:
            case 0:
                for _ in range(rng.choice((1, 1, 3, 20))):
                    self.chat(rng.choice(log.agents), channel, rng.sample(log.agents, rng.choice((0, 0, 1, 2))))
            case 1:
                self._append(log.member(owner, pattern, "in"))
            case 2:
                self._append(log.member(owner, pattern, "out"))
            case 3:
                self.grant(owner, rng.choice(((">",), (channel,), ("team.>",), ())), rng.choice(((">",), (channel,))))
            case 4:
                self._append(log.channel(Channel(op="x", name=channel, cls=rng.choice(("live", "durable", None)))))
            case 5:
                self._append(log.space(Space(op="x", defaults=Defaults(cls=rng.choice(("live", "durable"))))))
            case 6:
                self.grant(owner, (), (), revoked=True)
            case 7:
                self.poison(owner, channel)
            case 8:
                sender = rng.choice((self.stranger, self.stranger, owner))
                for _ in range(rng.choice((1, 1, 4))):
                    self.via(link, sender, rng.choice((channel, "theirs")), channel)
            case 9:
                self.rule_link(link)

    def grant(self, owner: str, read: tuple[str, ...], post: tuple[str, ...], *, revoked: bool = False) -> None:
        before = self.table.head
        name = f"agent{self.log.agents.index(owner)}"
        access = Access(op=f"op{self.log.seq}", name=name, read=read, post=post, revoked=revoked)
        self._append(self.log.access(owner, access))
        for interval in self.table.uncovered(owner):
            self._append(self.log.member(owner, interval.pattern, "out"))
        if self.table.rules.narrowings(before, self.table.head).get(owner):
            self._narrowed(owner)

    def chat(self, sender: str, channel: str, mentions: Sequence[str] = ()) -> None:
        message = self._message(sender, "hello", mentions)
        record = self.log.append(self.log.subjects.chat(sender, channel), message.raw, FAKE_SIGNATURE)
        self._append(record, encode_headers([("Td-Sig", FAKE_SIGNATURE), ("Nats-Msg-Id", message.id)]))

    def poison(self, sender: str, channel: str) -> None:
        """A record that is not what it claims to be; nobody is owed it."""
        other = self.rng.choice([agent for agent in self.log.agents if agent != sender])
        message = self._message(sender, "hello")
        good = encode_headers([("Td-Sig", FAKE_SIGNATURE)])
        headers, payload = self.rng.choice(
            (
                (good, b"not a message"),
                (good, message.raw[:-1]),
                (good, self._message(other, "I am another").raw),
                (b"", message.raw),
                (b"NATS/1.0\r\ngarbage", message.raw),
                (encode_headers([("Td-Sig", FAKE_SIGNATURE), ("Nats-Sequence", "1")]), message.raw),
            )
        )
        record = self.log.append(self.log.subjects.chat(sender, channel), payload)
        self.truth[record.seq] = set()
        self._append(record, headers)

    def via(self, link: str, sender: str, theirs: str, channel: str) -> None:
        origin = self.rng.choice((self.elsewhere, self.elsewhere, self.log.space_id))
        message = self._message(sender, "hello from elsewhere")
        record = self.log.append(self.log.subjects.via(link, sender, channel), message.raw, FAKE_SIGNATURE)
        fields = [("Td-Sig", FAKE_SIGNATURE), ("Nats-Msg-Id", message.id), (ORIGIN_HEADER, f"{origin} {theirs}")]
        self.truth[record.seq] = self.state.owed_via(record.seq, link, sender, origin, theirs, channel)
        self._append(record, encode_headers(fields))

    def rule_link(self, link: str) -> None:
        ruling = Link(
            op="x",
            link=link,
            state=self.rng.choice(("on", "on", "off")),
            origin=self.elsewhere,
            channels={self.rng.choice((channel, "theirs")): channel for channel in self.log.channels},
        )
        self._append(self.log.rule(self.log.subjects.link(link), ruling))

    def _message(self, sender: str, text: str, mentions: Sequence[str] = ()) -> Message:
        """The same on every run of a seed: sizes decide what fits."""
        number = f"{self.rng.getrandbits(48):012x}"
        return compose(
            Sender(sender, "name"),
            text=text,
            mentions=[Mention(owner, "somebody") for owner in mentions],
            id=f"01890000-0000-7000-8000-{number}",
            ts="2026-01-01T00:00:00.000Z",
        )

    def _append(self, record: LogRecord, headers: bytes | None = None) -> None:
        if headers is None:
            headers = encode_headers(record.headers.items())
        self.stored.append(StoredRecord(record.seq, record.time_ns, record.subject, headers, record.payload))
        self.table.apply(record)
        self._learn(record)

    # --- who is owed and allowed what ---

    def _learn(self, record: LogRecord) -> None:
        """Whom the record is owed to, mentions on live channels included; nothing later changes it."""
        tail = self.log.subjects.tail(record.subject)
        if not tail.startswith(("chat.", "via.")):
            self.state.follow(record)
            return
        sender, channel = addressed(tail)
        self.channel_of[record.seq] = channel
        if record.seq in self.truth:  # whoever wrote it knew better
            return
        owed = self.state.owed(record.seq, sender, channel)
        if self.state.is_live(channel) and self.state.may_post(sender, channel):
            owed = {mention["id"] for mention in json.loads(record.payload).get("mentions", ())} - {sender}
        self.truth[record.seq] = owed

    def may_read(self, owner: str, channel: str, seq: int) -> bool:
        return self.table.allowed_at(owner, channel, seq)

    def allowed_throughout(self, owner: str, channel: str, seq: int) -> bool:
        """Could the owner read the channel at `seq` and ever since?"""
        return all(self.may_read(owner, channel, head) for head in self._changes_since(owner, seq))

    def allowed_once(self, owner: str, channel: str, seq: int) -> bool:
        """Could the owner read the channel at `seq` or at any time since?"""
        return any(self.may_read(owner, channel, head) for head in self._changes_since(owner, seq))

    def _changes_since(self, owner: str, seq: int) -> list[int]:
        changes = self.table.rules.access[owner].changes(seq, self.table.head)
        return [seq, *(at for at, _, _ in changes)]


def addressed(tail: str) -> tuple[str, str]:
    """Sender and channel of a message, from its subject."""
    kind, *rest = tail.split(".")
    sender, *channel = rest if kind == "chat" else rest[1:]
    return sender, ".".join(channel)
