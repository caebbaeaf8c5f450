"""NATS header blocks: what the broker said, what the sender said, and how to tell them apart.

The broker *appends* its headers to the sender's (batched direct get, republish, requests through an import), starting
with `Nats-Stream`, and it stores whatever block a sender wrote, well formed or not. So broker metadata is the tail of
the block: `split_block` reads it from raw bytes even when the sender's part is garbage, which is what lets a reader
quarantine a hostile record by its sequence instead of stopping at it. A status is only ever the protocol's first
line, never a `Status:` field. A sender may set `Nats-Msg-Id` and nothing else of the broker's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tidings.errors import HeaderRefused, WireError
from tidings.wire.times import parse_time

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
