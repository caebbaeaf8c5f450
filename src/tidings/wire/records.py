"""Records of a stream as the broker hands them over: times, header blocks, pages by columns, and fingerprints.

What the broker appends to a record's headers is cut from the end of the raw block, where no sender can write; the
sender's own block stays the bytes it is and may be garbage. A status is what has no sequence of the broker's: a record
whose sender wrote one into its first line is still a record.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from operator import lt
from typing import Annotated, ClassVar

import msgspec

from tidings.errors import HeaderRefused, WireError

# --- times ---
# Moments as JSON carries them on the control plane: RFC 3339 text in UTC that ends with `Z`.
#
# The time of a stored record has nine decimals, because together with its sequence it names the record; every other
# moment has three, as `ts` of a message does. A number would not do: nanoseconds are above 2^53, where JavaScript and
# whoever else reads numbers as doubles loses digits. Lengths of time stay numbers of seconds. Reading takes up to nine
# decimals, as the broker writes them, and an offset, as people may.


def moment(seconds: float) -> str:
    """A moment, given in seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def record_time(nanoseconds: int) -> str:
    """The time of a record, given in nanoseconds since 1970."""
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return f"{text_of_second(seconds)}.{rest:09d}Z"


def parse_time(text: str) -> int:
    """Nanoseconds since 1970; ValueError for what is no such text."""
    if not text.endswith("Z"):
        return round(datetime.fromisoformat(text).timestamp() * 1_000_000) * 1_000
    base, _, fraction = text[:-1].partition(".")
    return start_of_second(base) + int((fraction + "000000000")[:9])


def seconds_of(text: str) -> float:
    """Seconds since 1970."""
    return parse_time(text) / 1e9


@lru_cache(maxsize=64)
def text_of_second(seconds: int) -> str:
    """What `start_of_second` reads."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"


@lru_cache(maxsize=64)
def start_of_second(base: str) -> int:
    """Nanoseconds since 1970 of a text without zone and decimals. Many records share their second."""
    return int(datetime.fromisoformat(base).replace(tzinfo=UTC).timestamp()) * 1_000_000_000


# --- headers ---
# NATS header blocks: what the broker said, what the sender said, and how to tell them apart.
#
# The broker *appends* its headers to the sender's (batched direct get, republish, requests through an import), starting
# with `Nats-Stream`, and it stores whatever block a sender wrote, well formed or not. So broker metadata is the tail of
# the block: `split_block` reads it from raw bytes even when the sender's part is garbage, which is what lets a reader
# quarantine a hostile record by its sequence instead of stopping at it. A status is only ever the protocol's first
# line, never a `Status:` field. A sender may set `Nats-Msg-Id` and nothing else of the broker's.


Field = tuple[str, str]
Fields = tuple[Field, ...]

REPUBLISH_HEADERS = frozenset({"Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Last-Sequence"})
DIRECT_GET_HEADERS = REPUBLISH_HEADERS | {"Nats-Num-Pending", "Nats-UpTo-Sequence"}
#: the broker overwrites a forged one on every request through an import, and does not store it in a stream
CONTROL_HEADERS = frozenset({"Nats-Request-Info"})
_FIRST_APPENDED = "Nats-Stream"

_VERSION = b"NATS/1.0"
_END = b"\r\n\r\n"
_FIRST_LINE = re.compile(r"NATS/1\.0(?:[ \t]+([0-9]{3})(?:[ \t]+(.*))?)?[ \t]*\Z")
_NAME = re.compile(r"[!-9;-~]+\Z")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Headers:
    """A parsed block: the status of its first line, and its fields in wire order."""

    fields: Fields = ()
    status: int | None = None
    description: str = ""

    @classmethod
    def parse(cls, raw: bytes) -> Headers:
        """WireError for anything but `NATS/1.0 [status]`, well-formed `Name: value` lines and an empty line."""
        if not raw.endswith(_END):
            raise WireError("header block does not end with an empty line")
        try:
            first, *lines = raw[: -len(_END)].decode().split("\r\n")
        except UnicodeDecodeError as error:
            raise WireError(f"header block is not UTF-8 (byte {error.start})") from error
        opening = _FIRST_LINE.match(first)
        if opening is None or _CONTROL.search(first):
            raise WireError("header block does not start with NATS/1.0")
        status, description = opening.groups()
        return cls(tuple(map(_field, lines)), int(status) if status else None, (description or "").strip())

    def all(self, name: str) -> tuple[str, ...]:
        """Every value of `name`, whatever its case, in wire order."""
        return values_of(self.fields, name)

    def last(self, name: str) -> str | None:
        """The last value of `name`: the broker's, where the sender set one too."""
        values = self.all(name)
        return values[-1] if values else None


def values_of(fields: Iterable[Field], name: str) -> tuple[str, ...]:
    wanted = name.lower()
    return tuple(value for key, value in fields if key.lower() == wanted)


def split_block(raw: bytes, broker: Collection[str]) -> tuple[bytes, dict[str, str]]:
    """The sender's own block, and what the broker appended to it. Never raises; the sender's part may be garbage."""
    lines = raw.removesuffix(_END).split(b"\r\n")
    names = [line.partition(b":")[0].decode("latin-1") for line in lines]
    cut = _broker_tail(names, broker)
    appended = {
        name: line.partition(b":")[2].strip().decode(errors="replace")
        for name, line in zip(names[cut:], lines[cut:], strict=True)
    }
    return b"\r\n".join(lines[:cut]) + _END, appended


#: what nearly every live copy looks like: a signature, an id, and what republishing appended, each once
_PLAIN_COPY = re.compile(
    rb"NATS/1\.0\r\nTd-Sig: ([!-~]+)\r\nNats-Msg-Id: ([!-~]+)\r\n"
    rb"Nats-Stream: [!-~]+\r\nNats-Subject: ([!-~]+)\r\nNats-Sequence: (\d+)\r\n"
    rb"Nats-Time-Stamp: ([!-~]+)\r\nNats-Last-Sequence: (\d+)\r\n\r\n\Z"
)


def read_copy(raw: bytes) -> tuple[Fields | None, str, int, int, int]:
    """Own fields, subject, sequence, time and previous sequence of a live copy of the log.

    The fields are None if they are no header block; KeyError or ValueError if the broker appended nothing.
    """
    own: Fields | None
    if (plain := read_plain_copy(raw)) is not None:
        own, subject, seq, when, previous = plain
    else:
        block, broker = split_block(raw, REPUBLISH_HEADERS)
        own, subject = fields_of(block), broker["Nats-Subject"]
        seq, when, previous = broker["Nats-Sequence"], broker["Nats-Time-Stamp"], broker["Nats-Last-Sequence"]
    return own, subject, int(seq), parse_time(when), int(previous)


def read_plain_copy(raw: bytes) -> tuple[Fields, str, str, str, str] | None:
    """The same of a copy that looks as most do, in one look, numbers and time as they are written."""
    found = _PLAIN_COPY.match(raw)
    if found is None:
        return None
    signature, msg_id, subject, seq, when, previous = found.groups()
    own = (("Td-Sig", signature.decode()), ("Nats-Msg-Id", msg_id.decode()))
    return own, subject.decode(), seq.decode(), when.decode(), previous.decode()


def fields_of(block: bytes) -> Fields | None:
    """A sender's fields, or None if they are no header block."""
    try:
        return Headers.parse(block).fields if block else ()
    except WireError:
        return None


#: what nearly every stored record looks like: a signature and an id, each once
_PLAIN_BLOCK = re.compile(rb"NATS/1\.0\r\nTd-Sig: ([!-~]+)\r\nNats-Msg-Id: ([!-~]+)\r\n\r\n\Z")


def read_plain_block(raw: bytes) -> Fields | None:
    """The fields of a sender's own block that looks as most do; None means only that `Headers.parse` must be asked."""
    found = _PLAIN_BLOCK.match(raw)
    return (("Td-Sig", found[1].decode()), ("Nats-Msg-Id", found[2].decode())) if found else None


def own_fields(headers: Headers, broker: Collection[str]) -> Fields:
    """The sender's fields: what is left once the broker's tail is cut off. A shadowing field stays, to be refused."""
    return headers.fields[: _broker_tail([name for name, _ in headers.fields], broker)]


def _broker_tail(names: Sequence[str], broker: Collection[str]) -> int:
    """Where the broker's fields start: back from the end, each name at most once, no further than its first."""
    cut, seen = len(names), set[str]()
    while cut and names[cut - 1] in broker and names[cut - 1] not in seen:
        cut -= 1
        seen.add(names[cut])
        if names[cut] == _FIRST_APPENDED:
            break
    return cut


def refused_headers(fields: Iterable[Field]) -> tuple[str, ...]:
    """Names among a sender's own fields that a sender may not set."""
    return tuple(name for name, _ in fields if _is_reserved(name))


def encode_headers(fields: Iterable[Field]) -> bytes:
    """A block for raw clients and tests. It spells even reserved names; it never lets a value start a new line."""
    lines = [_VERSION]
    for name, value in fields:
        if not _NAME.match(name) or _CONTROL.search(value):
            raise HeaderRefused(f"header {name[:64]!r} cannot be written: a name or value holds a forbidden character")
        lines.append(f"{name}: {value}".encode())
    return b"\r\n".join(lines) + _END


def _is_reserved(name: str) -> bool:
    lower = name.lower()
    return (lower.startswith("nats-") and name != "Nats-Msg-Id") or lower == "status" or lower.startswith("kv-")


def _field(line: str) -> Field:
    name, colon, value = line.partition(":")
    if not colon or not _NAME.match(name) or _CONTROL.search(value):
        raise WireError(f"header line {line[:64]!r} is not `Name: value`")
    return name, value.strip(" \t")


# --- records ---

_APPENDED = b"\r\nNats-Stream: "
#: what the broker appends to a record, exactly; anything else is left to `split_block`
_TAIL = re.compile(
    rb"\r\nNats-Stream: [!-~]+\r\nNats-Subject: ([!-~]+)\r\nNats-Sequence: ([0-9]+)"
    rb"\r\nNats-Time-Stamp: ([0-9T:-]+)(?:\.([0-9]{1,9}))?Z"
    rb"(?:\r\nNats-Num-Pending: [0-9]+)?(?:\r\nNats-Last-Sequence: [0-9]+)?\r\n\r\n\Z"
)


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """One record of a stream, with the header block its sender wrote (it may be garbage, or empty)."""

    seq: int
    time_ns: int
    subject: str
    own_block: bytes
    payload: bytes

    def own_fields(self) -> Fields | None:
        """The sender's header fields, or None if they do not parse."""
        if not self.own_block:
            return ()
        try:
            return Headers.parse(self.own_block).fields
        except WireError:
            return None

    @property
    def mark(self) -> str:
        return record_mark(self.time_ns, self.subject, self.payload)


@dataclass(frozen=True, slots=True)
class Missing:
    """Sequences the stream does not have, confirmed with its leader."""

    first: int
    last: int


class Page:
    """Records of a stream in order, by columns: most of them never become objects."""

    __slots__ = ("own_blocks", "payloads", "seqs", "status", "subjects", "times")
    COLUMNS: ClassVar[tuple[str, ...]] = ("own_blocks", "payloads", "seqs", "subjects", "times")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.seqs: list[int] = []
        self.times: list[int] = []
        self.subjects: list[str] = []
        self.own_blocks: list[bytes] = []
        self.payloads: list[bytes] = []
        #: the block that ended it
        self.status = b""

    def take(self, block: bytes, payload: bytes) -> bool:
        """Add an answer to a direct get, the broker's tail cut off; False if it is no record, but ends the page."""
        cut = block.rfind(_APPENDED)
        found = _TAIL.match(block, cut) if cut >= 0 else None
        if found is None:
            return self._take_strange(block, payload)
        subject, seq, second, fraction = found.groups()
        self.seqs.append(int(seq))
        self.times.append(start_of_second(second.decode()) + int((fraction or b"").ljust(9, b"0")))
        self.subjects.append(subject.decode())
        self.own_blocks.append(block[:cut] + _END)
        self.payloads.append(payload)
        return True

    def _take_strange(self, block: bytes, payload: bytes) -> bool:
        """A status, or a record whose sender's block or whose subject is not what one expects."""
        own, said = split_block(block, DIRECT_GET_HEADERS)
        if not {"Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp"} <= said.keys():
            self.status = block
            return False
        self.seqs.append(int(said["Nats-Sequence"]))
        self.times.append(parse_time(said["Nats-Time-Stamp"]))
        self.subjects.append(said["Nats-Subject"])
        self.own_blocks.append(own)
        self.payloads.append(payload)
        return True

    def is_rising(self, first: int) -> bool:
        seqs = self.seqs
        return not seqs or (seqs[0] >= first and all(map(lt, seqs, seqs[1:])))

    def leading(self, last: int, *, unbroken: bool) -> int:
        """How many records from the start are not beyond `last` (and, if asked, without a hole)."""
        seqs = self.seqs
        count = bisect_right(seqs, last)
        if not unbroken or not count or seqs[count - 1] - seqs[0] == count - 1:
            return count
        return next(index for index in range(1, count) if seqs[index] != seqs[index - 1] + 1)

    def cut(self, start: int, end: int) -> Page:
        if start == 0 and end == len(self.seqs):
            return self
        part = type(self)()
        for name in self.COLUMNS:
            setattr(part, name, getattr(self, name)[start:end])
        return part

    def records(self) -> Iterator[StoredRecord]:
        return map(StoredRecord, self.seqs, self.times, self.subjects, self.own_blocks, self.payloads)


# --- marks ---
# What tells a record of the log from another one at the same sequence; pure.
#
# A log that was set back, by a power cut or a restored copy, uses its sequences again. Whoever remembers a sequence
# remembers the mark of the record that was there, and sees by itself that another one is there now. A stamp is a mark
# with the epoch of the log and the steward's proof that it said so: only a stamp convinces the steward itself.


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """At `seq` was the record with this mark. `epoch` and `proof` are empty if nobody but the reader says so."""

    seq: Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
    mark: str
    epoch: str = ""
    proof: str = ""

    @property
    def proved_text(self) -> str:
        """What the proof is made of; no name or pattern can be equal to it."""
        return f"stamp\n{self.epoch}\n{self.seq}\n{self.mark}"


def record_mark(time_ns: int, subject: str, payload: bytes) -> str:
    digest = hashlib.blake2b(f"{time_ns}\n{subject}\n".encode(), digest_size=10)
    digest.update(payload)
    return digest.hexdigest()
