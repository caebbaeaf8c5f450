"""`tidings doctor store`: every record of every stream read once, and what does not verify named.

Messages are opened as every reader opens them (signature, strict JSON, sender), rulings are folded, durable copies are
unpacked, and a sequence that is missing above the floor of the log is a hole; so is one of another stream that the
broker counts and cannot read. What only the memory of the steward knows, records that were there and are gone, is named
as it has it. A message that no reader shows is counted as void and is no damage: every agent may write one, and a bit
that flips on the disk does not make one, because the broker checks its own sum of a record and does not show it at all.
Nothing is changed. Needs the keys of the space, so it is for its owner.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tidings.admin.home import SpaceHome, SpaceInfo
from tidings.errors import MalformedFrame
from tidings.model.projection import Table
from tidings.nats import jwt
from tidings.nats.client import close_quietly, connect
from tidings.nats.jetstream import JetStream, StoredRecord
from tidings.server.keyring import Keyring
from tidings.server.log import log_record
from tidings.server.state import StateBucket
from tidings.steward.damage import ABOVE_FLOOR, UNREADABLE, Damage, Gaps, load, unreadable, words
from tidings.steward.retention import read_floor
from tidings.steward.voids import Void, void_of
from tidings.wire.frames import Block, decode_frame, open_block
from tidings.wire.subjects import RULING_KINDS, Chat, Delivery, Direct, Task, Via

#: named one by one; beyond that they are counted
MOST_NAMED = 1_000


@dataclass(frozen=True, slots=True)
class Defect:
    stream: str
    first: int
    last: int
    what: str
    #: it is not there, in contrast to: it does not verify
    is_missing: bool = False


@dataclass(slots=True)
class StoreReport:
    read: Counter[str] = field(default_factory=Counter)
    found: list[Defect] = field(default_factory=list)
    wrong: int = 0
    #: messages that no reader shows, by reason: whoever wrote them was told
    void: Counter[str] = field(default_factory=Counter)
    #: losses that `status` speaks of
    said: int = 0

    @property
    def advice(self) -> str:
        """What to do next; `status` is named only for what it says."""
        if self.said:
            return "`tidings status` says what was lost"
        if any(each.is_missing for each in self.found):
            return "`tidings status` says so once the steward has read everything, after a start and once a day"
        return "nobody is shown what does not verify; who has the original sends it again"

    def name(self, finding: Defect) -> None:
        self.wrong += 1
        if len(self.found) < MOST_NAMED:
            self.found.append(finding)

    def as_dict(self) -> dict[str, Any]:
        rows = [{"stream": f.stream, "first": f.first, "last": f.last, "what": f.what} for f in self.found]
        return {"read": dict(self.read), "wrong": self.wrong, "found": rows, "void": dict(self.void)}


async def read_store(home: SpaceHome) -> StoreReport:
    info, report = home.read_info(), StoreReport()
    s = info.subjects
    async with _core(home, info) as js:
        floor = await read_floor(StateBucket(js, s))
        judge = _Judge(info, floor)
        for stream in (s.log_stream, s.direct_stream, s.task_stream, s.delivery_stream, s.audit_stream, s.dead_stream):
            await _read_stream(js, stream, report, judge, floor if stream == s.log_stream else None)
    remembered = load(home, info.id)
    _name_what_is_remembered(report, remembered.damages)
    if remembered.damaged:
        report.said += 1
        what = f"what was found lost before cannot be read: it lies in {remembered.damaged}"
        report.name(Defect("memory", 0, 0, what))
    return report


def _name_what_is_remembered(report: StoreReport, damages: list[Damage]) -> None:
    """What the steward noticed and nobody has acknowledged, unless it was just found."""
    holes = [each for each in report.found if each.is_missing]
    for each in damages:
        if each.acknowledged:
            continue
        report.said += 1
        if not any(
            hole.stream == each.stream and hole.first <= each.last and each.first <= hole.last for hole in holes
        ):
            report.name(Defect(each.stream, each.first, each.last, f"{words(each)}, noticed {each.noticed}"))


@asynccontextmanager
async def _core(home: SpaceHome, info: SpaceInfo) -> AsyncIterator[JetStream]:
    keyring = Keyring.load(home.keys)
    token, key = keyring.short_lived(keyring.core, "reading the store")
    connection = await connect(info.url, jwt.credentials(token, key), key.id, name="doctor store", reconnect=False)
    try:
        yield JetStream(connection)
    finally:
        await close_quietly(connection)


async def _read_stream(js: JetStream, stream: str, report: StoreReport, judge: _Judge, floor: int | None) -> None:
    state = (await js.info(stream))["state"]
    last = int(state["last_seq"])
    gaps = Gaps(int(state["first_seq"]) if floor is None else floor + 1)
    report.read[stream] = 0
    async for page in js.read(stream, ">", 1, last):
        gaps.note(page)
        for record in page:
            report.read[stream] += 1
            if isinstance(wrong := judge.wrong(record), Void):
                report.void[wrong.reason] += 1
            elif wrong:
                report.name(Defect(stream, record.seq, record.seq, wrong))
    holes = gaps.close(last) if state["messages"] or floor is not None else []
    missing, what = (holes, ABOVE_FLOOR) if floor is not None else (await unreadable(js, stream, holes), UNREADABLE)
    for first, end in missing or []:
        report.name(Defect(stream, first, end, what, is_missing=True))
    if missing is None and (unread := await _unread(js, stream, state, report.read[stream])) > 0:
        report.name(Defect(stream, 0, last, f"{unread} records cannot be read", is_missing=True))
    if lost := state.get("lost"):
        gone = lost.get("msgs") or [0]
        what = f"the broker cannot read {lost.get('bytes', 0)} bytes"
        report.name(Defect(stream, min(gone), max(gone), what, is_missing=True))


async def _unread(js: JetStream, stream: str, before: dict[str, Any], read: int) -> int:
    """By counts, where deleted sequences are too many to tell them from others: what was removed may have been read."""
    after = (await js.info(stream))["state"]
    removed = before["messages"] - (after["messages"] - (after["last_seq"] - before["last_seq"]))
    return int(before["messages"] - read - removed)


class _Judge:
    """What is wrong with a record, in words, or why the message in it is void; None if it verifies."""

    def __init__(self, info: SpaceInfo, floor: int) -> None:
        self.subjects = info.subjects
        self.table = Table(info.subjects, info.id, info.steward_key, floor=floor)
        self.kinds = tuple(f"{info.subjects.root}.{kind}" for kind in RULING_KINDS)

    def wrong(self, record: StoredRecord) -> str | Void | None:
        if record.subject.startswith(self.kinds):
            verdict = self.table.apply(log_record(record))
            return f"ruling is void: {verdict}" if verdict.is_void else None
        match self.subjects.parse(record.subject):
            case Chat() | Via() | Direct() | Task():
                return void_of(self.table, record)
            case Delivery():
                return _frame(record)
        if record.subject.startswith(self.subjects.audit("receipt")):
            return _json(record)
        return None


def _frame(record: StoredRecord) -> str | None:
    try:
        for block in decode_frame(record.payload).blocks:
            if isinstance(block, Block):  # what a reference names may be gone: then it is read from the log
                open_block(block)
    except MalformedFrame as error:
        return str(error)
    return None


def _json(record: StoredRecord) -> str | None:
    try:
        json.loads(record.payload or b"null")
    except ValueError as error:
        return f"not JSON: {error}"
    return None
