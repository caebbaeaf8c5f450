"""A second, deliberately naive answer to who is owed what, to hold the fold against.

`Model` replays the whole list from the start for every question and shares nothing with `space/` but the decoding
and the signatures of the wire: own subjects, own cover matching, no index and no history. It is slow and meant to
be obviously right. `model/projection.py` must agree with it at every sequence of every generated log
(`generated.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tidings.errors import MalformedRecord
from tidings.model.projection import LogRecord
from tidings.wire import rulings
from tidings.wire.rulings import Access, Channel, Lease, Link, Member, Space

_ID = r"U[A-Z2-7]{55}"
_TAG = r"[A-Z2-7]{26}"
_RULING = re.compile(
    rf"(?:(member)\.({_ID})\.({_TAG})|(acl)\.({_ID})|(channel)\.({_TAG})|(link)\.([\w-]{{1,64}})|(lease)\.steward|(space))",
    re.ASCII,
)


@dataclass
class Stay:
    """One membership of one subject, from its join to its leave."""

    owner: str
    subject: str
    pattern: str
    joined: int
    left: int | None = None


@dataclass
class State:
    """Everything in force after a replay."""

    key: str
    access: dict[str, Access] = field(default_factory=dict)
    channels: dict[str, Channel] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    space: Space | None = None
    lease: Lease | None = None
    stays: list[Stay] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    counted: set[int] = field(default_factory=set)


class Model:
    """Answers from a list of records, each time from the first one."""

    def __init__(
        self,
        records: Iterable[LogRecord],
        space: str,
        space_id: str,
        anchor_key: str,
        verify: Callable[[str | None, str, str, str, bytes], bool] = rulings.verify_ruling,
    ) -> None:
        self._space_id = space_id
        self._anchor = anchor_key
        self._verify = verify
        self._rulings = [
            (record, tail, decoded)
            for record in records
            for tail in [record.subject.removeprefix(f"td.{space}.")]
            if tail != record.subject and (decoded := _decoded(tail, record.payload)) is not None
        ]

    def state(self, upto: int) -> State:
        """Replay everything up to and including `upto`."""
        state = State(key=self._anchor)
        for record, tail, ruling in self._rulings:
            if record.seq > upto:
                break
            if self._verify(record.headers.get("Td-Sig"), self._space_id, state.key, tail, record.payload) and _step(
                state, record.seq, tail, ruling
            ):
                state.counted.add(record.seq)
        return state

    def members_at(self, channel: str, seq: int) -> set[str]:
        return members(self.state(seq), channel, seq)

    def owed(self, seq: int, sender: str, channel: str) -> set[str]:
        return owed(self.state(seq), seq, sender, channel)

    def deliverable(self, seq: int, sender: str, channel: str, head: int) -> set[str]:
        now = self.state(head)
        return {owner for owner in self.owed(seq, sender, channel) if may_read(now, owner, channel)}


class Running:
    """The same replay, one record after the other, for logs that grow while they are asked about."""

    def __init__(
        self,
        space: str,
        space_id: str,
        anchor_key: str,
        verify: Callable[[str | None, str, str, str, bytes], bool] = rulings.verify_ruling,
    ) -> None:
        self._root, self._space_id, self._verify = f"td.{space}.", space_id, verify
        self._state = State(key=anchor_key)

    def follow(self, record: LogRecord) -> None:
        tail = record.subject.removeprefix(self._root)
        ruling = _decoded(tail, record.payload)
        signature = record.headers.get("Td-Sig")
        if ruling is not None and self._verify(signature, self._space_id, self._state.key, tail, record.payload):
            _step(self._state, record.seq, tail, ruling)

    def owed(self, seq: int, sender: str, channel: str) -> set[str]:
        return owed(self._state, seq, sender, channel)

    def owed_via(self, seq: int, link: str, sender: str, origin: str, theirs: str, channel: str) -> set[str]:
        return owed_via(self._state, seq, link, sender, origin, theirs, channel)

    def may_admit(self, link: str, origin: str, theirs: str, channel: str) -> bool:
        return may_admit(self._state, link, origin, theirs, channel)

    def is_live(self, channel: str) -> bool:
        return class_of(self._state, channel) == "live"

    def may_post(self, sender: str, channel: str) -> bool:
        return may_post(self._state, sender, channel)

    def may_read(self, owner: str, channel: str) -> bool:
        return may_read(self._state, owner, channel)


def members(state: State, channel: str, seq: int) -> set[str]:
    """`state` must be the one at `seq`: a stay that ends later has no end yet."""
    return {
        stay.owner
        for stay in state.stays
        if stay.joined < seq and (stay.left is None or stay.left > seq) and includes(stay.pattern, channel)
    }


def class_of(state: State, channel: str) -> str:
    if channel in state.channels and state.channels[channel].cls is not None:
        return str(state.channels[channel].cls)
    if state.space is not None and state.space.defaults.cls is not None:
        return state.space.defaults.cls
    return "durable"


def is_listed(state: State, channel: str) -> bool:
    if state.space is None or state.space.channels != "listed":
        return True
    return channel in state.channels and state.channels[channel].listed


def may_post(state: State, sender: str, channel: str) -> bool:
    if sender not in state.access or state.access[sender].revoked or not is_listed(state, channel):
        return False
    return any(includes(pattern, channel) for pattern in state.access[sender].post)


def may_read(state: State, owner: str, channel: str) -> bool:
    if owner not in state.access or state.access[owner].revoked:
        return False
    return any(includes(pattern, channel) for pattern in state.access[owner].read)


def owed(state: State, seq: int, sender: str, channel: str) -> set[str]:
    if not may_post(state, sender, channel) or class_of(state, channel) != "durable":
        return set()
    return {owner for owner in members(state, channel, seq) if owner != sender}


def may_admit(state: State, link: str, origin: str, theirs: str, channel: str) -> bool:
    ruling = state.links.get(link)
    if ruling is None or ruling.state == "off" or not is_listed(state, channel):
        return False
    return (origin, theirs, channel) in {(ruling.origin, *pair) for pair in ruling.channels.items()}


def owed_via(state: State, seq: int, link: str, sender: str, origin: str, theirs: str, channel: str) -> set[str]:
    if not may_admit(state, link, origin, theirs, channel) or class_of(state, channel) != "durable":
        return set()
    return {owner for owner in members(state, channel, seq) if owner != sender}


def includes(wide: str, narrow: str) -> bool:
    return _includes(wide.split("."), narrow.split("."))


def _includes(wide: list[str], narrow: list[str]) -> bool:
    if not wide or not narrow:
        return not wide and not narrow
    if wide[0] == ">":
        return True
    if narrow[0] == ">":
        return False
    return wide[0] in ("*", narrow[0]) and _includes(wide[1:], narrow[1:])


def _decoded(tail: str, payload: bytes) -> rulings.RulingRecord | None:
    if _RULING.fullmatch(tail) is None:
        return None
    try:
        return rulings.decode(tail.split(".")[0], payload)
    except MalformedRecord:
        return None


def _step(state: State, seq: int, tail: str, ruling: rulings.RulingRecord) -> bool:
    """Let one authentic record change the state; False if it changes nothing."""
    place = tail.split(".")
    if isinstance(ruling, Space):
        state.space = ruling
        state.key = ruling.steward_key or state.key
        return True
    if isinstance(ruling, Lease):
        state.lease = ruling
        return True
    if isinstance(ruling, Link):
        if ruling.link == place[1]:
            state.links[ruling.link] = ruling
        return ruling.link == place[1]
    if isinstance(ruling, Channel):
        if state.texts.setdefault(tail, ruling.name) != ruling.name:
            return False
        state.channels[ruling.name] = ruling
        return True
    if isinstance(ruling, Access):
        return _step_access(state, place[1], ruling)
    return _step_member(state, seq, tail, place[1], ruling)


def _step_access(state: State, owner: str, ruling: Access) -> bool:
    for other, access in state.access.items():
        if other != owner and access.name == ruling.name and not access.revoked and not ruling.revoked:
            return False
    state.access[owner] = ruling
    return True


def _step_member(state: State, seq: int, tail: str, owner: str, ruling: Member) -> bool:
    if state.texts.setdefault(tail, ruling.pattern) != ruling.pattern:
        return False
    open_stays = [stay for stay in state.stays if stay.subject == tail and stay.left is None]
    if ruling.state == "out":
        ending = [stay for stay in open_stays if ruling.ends is None or stay.joined == ruling.ends]
        for stay in ending:
            stay.left = seq
        return bool(ending)
    access = state.access.get(owner)
    if access is None or access.revoked or not any(includes(p, ruling.pattern) for p in access.read) or open_stays:
        return False
    state.stays.append(Stay(owner, tail, ruling.pattern, seq))
    return True
