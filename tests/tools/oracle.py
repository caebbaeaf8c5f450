"""The oracle: who is owed what, recomputed from the records of a log and from nothing else.

It replays the log with the naive model (`model.py`), so it shares no rule with the pipeline it judges.
Signatures of messages are not its business, as they are not the pipeline's; what does not parse is owed to nobody.
`read_log` gets the records of a real space.

    oracle = Oracle.of(read_log(place), space.info.name, space.info.id, anchor_key)
    assert oracle.owed(bob) == what_bob_got
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tidings.delivery.stream_reader import StreamLocation, StreamReader
from tidings.errors import WireError
from tidings.model.projection import LogRecord
from tidings.wire import message as wire_message
from tidings.wire import rulings
from tidings.wire.message import MAX_PAYLOAD, Message
from tidings.wire.records import Fields, Headers, Missing, StoredRecord, refused_headers, values_of
from tools import model

Verify = Callable[[str | None, str, str, str, bytes], bool]


@dataclass(frozen=True, slots=True)
class Due:
    """One message that counts, and everybody it was owed to at its sequence."""

    seq: int
    sender: str
    channel: str
    owners: frozenset[str]
    live: bool = False
    via: str | None = None


@dataclass
class Oracle:
    """Answers about one log."""

    records: list[LogRecord]
    replay: model.Model
    #: every message that was owed to somebody
    due: dict[int, Due] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        records: Iterable[StoredRecord],
        space: str,
        space_id: str,
        anchor_key: str,
        verify: Verify = rulings.verify_ruling,
    ) -> Oracle:
        """`anchor_key`: the first steward key of the space."""
        root = f"td.{space}."
        kept: list[LogRecord] = []
        due: dict[int, Due] = {}
        running = model.Running(space, space_id, anchor_key, verify)
        for stored in records:
            fields = _fields(stored.own_block)
            record = LogRecord(
                stored.seq,
                stored.time_ns,
                stored.subject,
                dict(fields or ()),
                stored.payload,
            )
            kept.append(record)
            tail = stored.subject.removeprefix(root)
            if not tail.startswith(("chat.", "via.")):
                running.follow(record)
            elif (found := _due(running, stored, tail, fields)) is not None:
                due[stored.seq] = found
        return cls(kept, model.Model(kept, space, space_id, anchor_key, verify), due)

    @property
    def head(self) -> int:
        return self.records[-1].seq if self.records else 0

    def owed(self, owner: str, head: int | None = None) -> set[int]:
        """Sequences `owner` is owed and, at `head`, allowed to read; without a head: allowed at the end of the log."""
        state = self.replay.state(self.head if head is None else head)
        return {
            due.seq
            for due in self.due.values()
            if owner in due.owners and model.may_read(state, owner, due.channel) and (head is None or due.seq <= head)
        }

    def owed_at_all(self, owner: str) -> dict[int, tuple[str, str]]:
        """seq -> (sender, channel) of everything ever owed to `owner`, whatever it may read later."""
        return {due.seq: (due.sender, due.channel) for due in self.due.values() if owner in due.owners}

    def allowed_throughout(self, owner: str) -> set[int]:
        """What `owner` was owed and allowed to read at every head since: this must have arrived."""
        heads = [r.seq for r in self.records if r.subject.endswith(f".acl.{owner}")]
        states = {head: self.replay.state(head) for head in heads}
        return {
            due.seq
            for due in self.due.values()
            if owner in due.owners
            and model.may_read(self.replay.state(due.seq), owner, due.channel)
            and all(model.may_read(states[head], owner, due.channel) for head in heads if head > due.seq)
        }

    def mentions(self) -> dict[int, Due]:
        """Messages on live channels that buy somebody a copy."""
        return {seq: due for seq, due in self.due.items() if due.live}

    def admitted(self) -> dict[int, Due]:
        """Messages that came through a link."""
        return {seq: due for seq, due in self.due.items() if due.via is not None}

    def owners(self) -> set[str]:
        return {owner for due in self.due.values() for owner in due.owners}


def _fields(block: bytes) -> Fields | None:
    try:
        return Headers.parse(block).fields if block else ()
    except WireError:
        return None


def _due(running: model.Running, stored: StoredRecord, tail: str, fields: Fields | None) -> Due | None:
    kind, *rest = tail.split(".")
    link = rest.pop(0) if kind == "via" else None
    sender, channel = rest[0], ".".join(rest[1:])
    message = _message(stored, fields)
    if message is None or message.sender.id != sender:
        return None
    if link is None:
        counts, owners = running.may_post(sender, channel), running.owed(stored.seq, sender, channel)
    else:
        origin, _, theirs = next(iter(values_of(fields or (), "Td-Origin")), "").partition(" ")
        counts = running.may_admit(link, origin, theirs, channel)
        owners = running.owed_via(stored.seq, link, sender, origin, theirs, channel)
    live = running.is_live(channel)
    if counts and live:
        owners = {mention.id for mention in message.mentions} - {sender}
    return Due(stored.seq, sender, channel, frozenset(owners), live, link) if owners else None


def _message(stored: StoredRecord, fields: Fields | None) -> Message | None:
    if fields is None or refused_headers(fields) or len(values_of(fields, "Td-Sig")) != 1:
        return None
    if len(stored.payload) > MAX_PAYLOAD:
        return None
    try:
        return wire_message.decode(stored.payload)
    except WireError:
        return None


def read_log(place: StreamLocation, last: int | None = None) -> list[StoredRecord]:
    """Every record of a log that is still there, in order."""
    reader = StreamReader(place)
    try:
        end = reader.state().last if last is None else last
        return [item for item in reader.read(1, end) if not isinstance(item, Missing)] if end else []
    finally:
        reader.close()
