"""Is a Delta table damaged, or can its files only not be read now? The first is put aside, the second waits.

Arrow and deltalake raise `OSError` for both: for a flipped bit in a file as for a full table of descriptors or a store
that refuses. So they are told apart by reading: each file is fetched whole, and then decoded from memory. What fails in
fetching is the disk's, the network's or a permission's; what fails in decoding is damage, and so is a file that the
table names and that is gone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa
from deltalake import DeltaTable

from tidings.delivery.delta_rows import TableFiles, decoded

#: what reading a table raises if its bytes are not what they were
UNDECODABLE = (pa.ArrowException, OSError, UnicodeDecodeError)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
#: what follows the path of an address: with some stores it holds a signature
_QUERY = re.compile(r"(?<=://)([^\s?]*)\?\S+")
LONGEST = 450


def fault_of(rows: pa.Table, needed: Sequence[str]) -> str | None:
    """What is wrong with rows that could be decoded: texts that are none, or nothing where something must be."""
    try:
        rows.validate(full=True)
    except pa.ArrowException as error:
        return words_of(error)
    empty = [name for name in needed if name in rows.column_names and rows[name].null_count]
    return f"rows have nothing in {', '.join(empty)}" if empty else None


def damaged_file(table: DeltaTable, files: TableFiles, needed: Sequence[str]) -> str | None:
    """The first file of the table that is damaged, and how; None if all are sound. `OSError`: they cannot be read."""
    schema, fetch = pa.schema(table.schema().to_arrow()), files.fetcher(table)
    for path in pa.table(table.get_add_actions(flatten=True))["path"].to_pylist():
        try:
            content = fetch(path)
        except FileNotFoundError:
            return f"{path} is gone"
        if why := _fault_in(content, schema, needed):
            return f"{path} is damaged ({why})"
    return None


def _fault_in(content: bytes, schema: pa.Schema, needed: Sequence[str]) -> str | None:
    try:
        return fault_of(decoded(content, schema), needed)
    except UNDECODABLE as error:
        return words_of(error)


def words_of(error: BaseException | None) -> str:
    """An error as part of a sentence: a store's goes over many lines, in colours, and may hold a signed address."""
    lines = [line.strip(" \t↳") for line in _COLOUR.sub("", str(error)).splitlines()]
    said = ": ".join(line for line in lines if line and not line.startswith("<"))  # the page that a server answered
    return _QUERY.sub(r"\1?..", said or type(error).__name__)[:LONGEST]
