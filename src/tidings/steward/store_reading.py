"""`tidings doctor store`: every record of every stream read once, and what does not verify named.

Messages are opened as every reader opens them (signature, strict JSON, sender), rulings are folded, durable copies are
unpacked, and a sequence that is missing above the floor of the log is a hole. Nothing is changed. What an agent wrote
badly on purpose is found too: it was stored as it is. Needs the keys of the space, so it is for its owner.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tidings.broker import jwt
from tidings.broker.client import close_quietly, connect
from tidings.broker.jetstream import JetStream, StoredRecord
from tidings.broker.keyring import Keyring
from tidings.errors import MalformedFrame
from tidings.space.fold import Table
from tidings.space.home import SpaceHome, SpaceInfo
from tidings.space.log import log_record
from tidings.space.state import StateBucket
from tidings.steward.retention import read_floor
from tidings.wire.envelope import Refused, open_record
from tidings.wire.frames import decode_frame, open_block
from tidings.wire.subjects import RULING_KINDS, Chat, Delivery, Direct, Task, Via

#: named one by one; beyond that they are counted
MOST_NAMED = 1_000


@dataclass(frozen=True, slots=True)
class Finding:
    stream: str
    first: int
    last: int
    what: str


@dataclass(slots=True)
class StoreReport:
    read: Counter[str] = field(default_factory=Counter)
    found: list[Finding] = field(default_factory=list)
    wrong: int = 0

    def name(self, finding: Finding) -> None:
        self.wrong += 1
        if len(self.found) < MOST_NAMED:
            self.found.append(finding)

    def as_dict(self) -> dict[str, Any]:
        rows = [{"stream": f.stream, "first": f.first, "last": f.last, "what": f.what} for f in self.found]
        return {"read": dict(self.read), "wrong": self.wrong, "found": rows}


async def read_store(home: SpaceHome) -> StoreReport:
    info, report = home.read_info(), StoreReport()
    s = info.subjects
    async with _core(home, info) as js:
        floor = await read_floor(StateBucket(js, s))
        judge = _Judge(info, floor)
        for stream in (s.log_stream, s.direct_stream, s.task_stream, s.delivery_stream, s.audit_stream, s.dead_stream):
            await _read_stream(js, stream, report, judge, floor if stream == s.log_stream else None)
    return report


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
    last, expected = int(state["last_seq"]), None if floor is None else floor + 1
    report.read[stream] = 0
    async for page in js.read(stream, ">", 1, last):
        for record in page:
            report.read[stream] += 1
            if expected is not None and record.seq >= expected:
                if record.seq > expected:
                    report.name(Finding(stream, expected, record.seq - 1, "missing above the floor"))
                expected = record.seq + 1
            if wrong := judge.wrong(record):
                report.name(Finding(stream, record.seq, record.seq, wrong))
    if expected is not None and expected <= last:
        report.name(Finding(stream, expected, last, "missing above the floor"))
    if lost := state.get("lost"):
        gone = lost.get("msgs") or [0]
        report.name(Finding(stream, min(gone), max(gone), f"the broker cannot read {lost.get('bytes', 0)} bytes"))


class _Judge:
    """What is wrong with a record, in words; None if it verifies."""

    def __init__(self, info: SpaceInfo, floor: int) -> None:
        self.subjects, self.space_id = info.subjects, info.id
        self.table = Table(info.subjects, info.id, info.steward_key, floor=floor)
        self.kinds = tuple(f"{info.subjects.root}.{kind}" for kind in RULING_KINDS)

    def wrong(self, record: StoredRecord) -> str | None:
        if record.subject.startswith(self.kinds):
            verdict = self.table.apply(log_record(record))
            return f"ruling is void: {verdict}" if verdict.is_void else None
        match self.subjects.parse(record.subject):
            case Chat() | Direct() | Task():
                return self._message(record)
            case Delivery():
                return _frame(record)
            case Via():
                return None  # its signature is of another space
        if record.subject.startswith(self.subjects.audit("receipt")):
            return _json(record)
        return None

    def _message(self, record: StoredRecord) -> str | None:
        fields = record.own_fields()
        if fields is None:
            return "its headers do not parse"
        opened = open_record(self.subjects, self.space_id, record.subject, fields, record.payload)
        return f"{opened.reason}: {opened.detail}" if isinstance(opened, Refused) else None


def _frame(record: StoredRecord) -> str | None:
    try:
        for block in decode_frame(record.payload).blocks:
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
