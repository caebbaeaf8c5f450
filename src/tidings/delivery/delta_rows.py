"""The rows of a Delta table: from a folder with Arrow's own files, from a store file by file.

deltalake's own files pass each read through Python, on threads of Arrow, and a process that used them often aborts at
its end (measured: every third). So from a store each file is fetched whole, by threads of ours that end, and decoded
from memory; files that cannot hold what is asked for are not fetched, as far as their minima and maxima say so.
While a store is waited for nothing may hold the interpreter: the beat of the lease would stop (deltalake's lists, its
queries and openings without a known size do, measured; so none of them is used here).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler

from tidings.delivery.delta_log import local_folder

Filters = list[tuple[str, str, Any]]
#: fetches at a time
FETCHES = 8


class TableFiles:
    """The files of one table, by paths below it."""

    def __init__(self, uri: str, options: Mapping[str, str]) -> None:
        self._options = dict(options)
        folder = local_folder(uri)
        self._native = None if folder is None else pa_fs.SubTreeFileSystem(folder, pa_fs.LocalFileSystem())

    def rows(self, table: DeltaTable, columns: Sequence[str] | None = None, filters: Filters | None = None) -> pa.Table:
        chosen = None if columns is None else list(columns)
        if self._native is not None:
            return table.to_pyarrow_table(columns=chosen, filters=filters, filesystem=self._native)
        where = None if filters is None else pq.filters_to_expression(filters)
        # nothing is opened through this one: it only knows which files there are, and their minima and maxima
        dataset = table.to_pyarrow_dataset(filesystem=pa_fs.LocalFileSystem())
        paths = [fragment.path for fragment in dataset.get_fragments(where)]
        with ThreadPoolExecutor(FETCHES) as pool:
            contents = list(pool.map(self.fetcher(table), paths))
        parts = [decoded(content, dataset.schema, chosen, where) for content in contents]
        empty = dataset.schema.empty_table()
        return pa.concat_tables([empty if chosen is None else empty.select(chosen), *parts])

    def parts(
        self, table: DeltaTable, columns: Sequence[str] | None = None, filters: Filters | None = None
    ) -> Iterator[pa.Table]:
        """The same rows, those of one file at a time."""
        chosen = None if columns is None else list(columns)
        where = None if filters is None else pq.filters_to_expression(filters)
        dataset = table.to_pyarrow_dataset(filesystem=self._native or pa_fs.LocalFileSystem())
        fetch = self.fetcher(table)
        for fragment in dataset.get_fragments(where):
            yield decoded(fetch(fragment.path), dataset.schema, chosen, where)

    def fetcher(self, table: DeltaTable) -> Callable[[str], Any]:
        """What answers the content of a file of that table."""
        native = self._native
        if native is not None:
            return lambda path: native.open_input_stream(path).read()
        # without the sizes each opening would ask the store, and hold the interpreter meanwhile
        sizes = table._table.get_add_file_sizes()
        files = DeltaStorageHandler.from_table(table._table, self._options, sizes)
        return lambda path: files.open_input_file(path).read()


def decoded(content: Any, schema: pa.Schema, columns: list[str] | None = None, where: Any = None) -> pa.Table:
    return pq.read_table(pa.BufferReader(content), schema=schema, columns=columns, filters=where, use_threads=False)
