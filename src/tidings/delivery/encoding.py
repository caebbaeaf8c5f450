"""From rows of the source to blocks, in the workers: judge each record, cut runs, encode. One pass, one Spark job.

Each partition is a range of sequences; what comes back is a row for every block, one for every poisoned record, one for
every hole, and one that says what the partition covered. The bytes of a block exist once, whatever its audience. The
rules and the places where audiences change are given by the driver, which has folded the log further than any record
here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from tidings.model.blocks import BlockInfo, Cuts, MadeBlock, cut_blocks
from tidings.model.classify import Classifier, Deliverable, Poison, Void
from tidings.model.rulebook import Rulebook
from tidings.wire.frames import ref_size
from tidings.wire.records import StoredRecord
from tidings.wire.subjects import Subjects

SCHEMA = "kind string, channel string, first bigint, last bigint, count bigint, said string, data binary, seqs binary"
ARROW = pa.schema(
    [
        ("kind", pa.string()),
        ("channel", pa.string()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("count", pa.int64()),
        ("said", pa.string()),
        ("data", pa.binary()),
        ("seqs", pa.binary()),
    ]
)
Row = tuple[str, str | None, int, int, int, str | None, bytes | None, bytes | None]
#: a task hands over what it made when it has so many bytes of it
HANDED_OVER = 4 * 1024 * 1024


class RulesHolder(Protocol):
    """A broadcast of the rules, or whatever else has them."""

    @property
    def value(self) -> Rulebook: ...


@dataclass(frozen=True)
class OwnRules:
    """The rules in the process that folded them."""

    value: Rulebook


@dataclass(frozen=True)
class EncodingRules:
    """What a worker has to know. `sent`: the rules as they were broadcast. `channels`: only these, or all of them."""

    space: str
    sent: RulesHolder
    cuts: Cuts
    channels: frozenset[str] | None = None


@dataclass
class Encoded:
    """What the driver gets back of a range."""

    blocks: list[MadeBlock]
    poison: list[Poison]
    missing: list[tuple[int, int]]
    void: int
    first: int
    last: int

    @classmethod
    def nothing(cls) -> Encoded:
        return cls([], [], [], 0, 0, 0)


def encode_partition(rules: EncodingRules, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The body of the Spark job."""
    rows: list[Row] = []
    size = 0
    for row in _rows(rules, batches):
        rows.append(row)
        size += len(row[6] or b"")
        if size >= HANDED_OVER:
            yield _by_columns(rows)
            rows, size = [], 0
    if rows:
        yield _by_columns(rows)


def _by_columns(rows: list[Row]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(list(map(pa.array, columns, ARROW.types)), schema=ARROW)


def _rows(rules: EncodingRules, batches: Iterable[pa.RecordBatch]) -> Iterator[Row]:
    classifier = Classifier(Subjects(rules.space), rules.sent.value)
    aside: list[Row] = []
    seen = [0, 0, 0]

    def messages() -> Iterator[Deliverable]:
        for record in _records(batches, aside, seen):
            judged = classifier.classify(record)
            if isinstance(judged, Deliverable):
                if rules.channels is None or judged.channel in rules.channels:
                    yield judged
            elif isinstance(judged, Poison):
                said = json.dumps([judged.subject, judged.reason, judged.detail])
                aside.append(("poison", None, judged.seq, judged.seq, 1, said, None, None))
            elif isinstance(judged, Void):
                seen[2] += 1

    for block in cut_blocks(messages(), rules.cuts):
        yield _block_row(block)
    yield from aside
    if seen[1]:
        yield ("part", None, seen[0], seen[1], seen[2], None, None, None)


def _records(batches: Iterable[pa.RecordBatch], aside: list[Row], seen: list[int]) -> Iterator[StoredRecord]:
    for batch in batches:
        columns = [
            batch.column(name).to_pylist() for name in ("seq", "time_ns", "subject", "headers", "data", "missing")
        ]
        for seq, time_ns, subject, headers, data, missing in zip(*columns, strict=True):
            seen[0] = seen[0] or seq
            seen[1] = missing or seq
            if missing is None:
                yield StoredRecord(seq, time_ns, subject, headers, data)
            else:
                aside.append(("missing", None, seq, missing, missing - seq + 1, None, None, None))


def _block_row(block: MadeBlock) -> Row:
    info = block.info
    said = json.dumps([info.senders, info.mentioned])
    return ("block", info.channel, info.first, info.last, info.count, said, block.data, block.seqs)


def decode_rows(table: pa.Table) -> Encoded:
    """What the job answered, blocks in order of their first sequence."""
    found = Encoded.nothing()
    for row in zip(*(table.column(name).to_pylist() for name in ARROW.names), strict=True):
        _take(found, *row)
    found.blocks.sort(key=lambda block: block.info.first)
    found.poison.sort(key=lambda poison: poison.seq)
    return found


def _take(
    found: Encoded, kind: str, channel: str, first: int, last: int, count: int, said: str, data: bytes, seqs: bytes
) -> None:
    match kind:
        case "block":
            senders, mentioned = json.loads(said)
            info = BlockInfo(
                channel,
                first,
                last,
                count,
                len(data),
                ref_size(channel, seqs),
                tuple((sender, count) for sender, count in senders),
                None if mentioned is None else tuple(mentioned),
            )
            found.blocks.append(MadeBlock(info, data, seqs))
        case "poison":
            found.poison.append(Poison(first, *json.loads(said)))
        case "missing":
            found.missing.append((first, last))
        case "part":
            found.void += count
            found.first = min(found.first or first, first)
            found.last = max(found.last, last)
