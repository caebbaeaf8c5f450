"""What a commit of the ledger costs as its table grows: the same rows, ten thousand times, with the upkeep it has.

commit_growth  CPU time of a batch around number 10,000 over that of one around number 100, each with its share of the
               upkeep: the last 200 batches of the old table by turns with the first 200 of a new one. CPU, because this
               is about growth, on a machine that may be busy; the wall clock is beside it.
bare_growth    the same without any upkeep, over `--bare` batches only: it grows without bound.
open, unread, newest   what a start of the ledger does on the table of 10,000 batches: open it; the rows of one owner
               above a sequence; the newest sequence of each owner.

10,000 batches of 50 rows take two to four minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from measuring import report
from tidings.delivery.delta_writer import DeltaWriter
from tidings.delivery.ledger import DELIVERIES
from tidings.wire.message import new_id

OWNERS = [new_id() for _ in range(50)]
SERIES, EPOCH, APP = new_id(), new_id(), new_id()
INDEXED = ("owner", "dlv_seq")
WINDOW = 200
#: wall and CPU seconds
Cost = tuple[float, float]


def rows_of(batch: int) -> pa.Table:
    after, count = batch * 100, len(OWNERS)
    fixed = {"series": SERIES, "number": batch, "first": after + 1, "last": after + 100, "count": 90, "batch": batch}
    fixed |= {"after": after, "through": after + 100, "head": after + 120, "epoch": EPOCH, "app": APP}
    columns: dict[str, Any] = {name: [value] * count for name, value in fixed.items()}
    columns |= {"owner": OWNERS, "channel": [f"team.room{each % 7}" for each in range(count)]}
    columns |= {"dlv_seq": [batch * count + each for each in range(count)], "at_ns": [time.time_ns()] * count}
    return pa.table({name: columns[name] for name in DELIVERIES.names}, schema=DELIVERIES)


def cost(step: Callable[[], object]) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


def mean_ms(costs: list[Cost]) -> tuple[float, float]:
    wall, cpu = zip(*costs, strict=True)
    return statistics.mean(wall) * 1000, statistics.mean(cpu) * 1000


class Run:
    """One table, batch after batch: what each cost, upkeep and all, and what of that was upkeep."""

    def __init__(self, uri: str) -> None:
        self._writer = DeltaWriter(uri, DELIVERIES, indexed=INDEXED)
        self.each: list[Cost] = []
        self.upkeep: list[Cost] = []

    def batch(self) -> None:
        number = len(self.each)
        rows, metadata = rows_of(number), {"after": str(number * 100), "through": str(number * 100 + 100)}
        done = cost(lambda: self._writer.append(rows, app=APP, version=number, metadata=metadata))
        tended = cost(self._writer.tend)
        self.each.append((done[0] + tended[0], done[1] + tended[1]))
        self.upkeep.append(tended)


def bare_commits(uri: str, count: int) -> list[Cost]:
    table = DeltaTable.create(uri, DELIVERIES)
    each = []
    for batch in range(count):
        rows, properties = rows_of(batch), CommitProperties(app_transactions=[Transaction(APP, batch)])
        each.append(cost(lambda: write_deltalake(table, rows, mode="append", commit_properties=properties)))  # noqa: B023
    return each


def reads(uri: str, count: int) -> dict[str, float]:
    """Milliseconds of what the ledger reads when it starts; the median of five."""
    writer = DeltaWriter(uri, DELIVERIES, indexed=INDEXED)
    recent = (count - 100) * len(OWNERS)
    steps: dict[str, Callable[[], pa.Table]] = {
        "open_ms": lambda: DeltaWriter(uri, DELIVERIES, indexed=INDEXED),
        "unread_ms": lambda: writer.read(["channel", "first"], [("owner", "=", OWNERS[7]), ("dlv_seq", ">", recent)]),
        "unread_all_ms": lambda: writer.read(["channel", "first"], [("owner", "=", OWNERS[7]), ("dlv_seq", ">", 0)]),
        "newest_ms": lambda: writer.read(["owner", "dlv_seq"]).group_by("owner").aggregate([("dlv_seq", "max")]),
    }
    assert steps["unread_ms"]().num_rows == 100
    assert steps["newest_ms"]().num_rows == len(OWNERS)
    return {name: round(statistics.median(cost(step)[0] for _ in range(5)) * 1000, 1) for name, step in steps.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--commits", type=int, default=10_000, help="batches written with upkeep")
    parser.add_argument("--bare", type=int, default=400, help="batches written without upkeep")
    chosen = parser.parse_args()
    if chosen.commits < 2 * WINDOW or chosen.bare < 2 * WINDOW:
        parser.error(f"at least {2 * WINDOW} of each")
    with tempfile.TemporaryDirectory() as folder:
        uri = f"{folder}/ledger"
        load = os.getloadavg()[0]
        old, young = Run(uri), Run(f"{folder}/young")
        for _ in range(chosen.commits - WINDOW):
            old.batch()
        for _ in range(WINDOW):
            old.batch()
            young.batch()
        each, upkeep = old.each, old.upkeep
        first, last = mean_ms(young.each), mean_ms(each[-WINDOW:])
        middle = {1_000: mean_ms(each[1_000 - WINDOW : 1_000])} if chosen.commits > 1_000 else {}
        marks = {100: first} | middle | {chosen.commits: last}
        bare = bare_commits(f"{folder}/bare", chosen.bare)
        files = [path for path in Path(uri).rglob("*") if path.is_file()]
        table = DeltaTable(uri)
        figures: dict[str, Any] = {
            "commit_growth": round(last[1] / first[1], 2),
            "wall_growth": round(last[0] / first[0], 2),
            "commit_ms": {str(at): round(wall, 1) for at, (wall, _) in marks.items()},
            "commit_cpu_ms": {str(at): round(cpu, 1) for at, (_, cpu) in marks.items()},
            "upkeep_share": round(sum(cpu for _, cpu in upkeep) / sum(cpu for _, cpu in each), 3),
            "upkeep_longest_ms": round(max(wall for wall, _ in upkeep) * 1000),
            "bare_growth": round(mean_ms(bare[-WINDOW:])[1] / mean_ms(bare[:WINDOW])[1], 2),
            "bare": chosen.bare,
            "commits": chosen.commits,
            "seconds": round(sum(wall for wall, _ in each)),
            "folder_mib": round(sum(path.stat().st_size for path in files) / 1024**2, 1),
            "files_on_disk": len(files),
            "log_entries": sum(path.parent.name == "_delta_log" for path in files),
            "files_of_the_table": len(table.file_uris()),
            **reads(uri, chosen.commits),
            "load": round(load, 1),
        }
    rows = [
        ("a batch, wall (ms)", "   ".join(f"{at}: {wall:.1f}" for at, (wall, _) in marks.items())),
        ("a batch, CPU (ms)", "   ".join(f"{at}: {cpu:.1f}" for at, (_, cpu) in marks.items())),
        ("commit_growth (aim <= 1.5)", f"{figures['commit_growth']}   wall clock: {figures['wall_growth']}"),
        (f"without upkeep, {chosen.bare} batches", f"{figures['bare_growth']}"),
        ("upkeep", f"{figures['upkeep_share']:.0%} of it; longest step {figures['upkeep_longest_ms']} ms"),
        (
            "folder",
            f"{figures['folder_mib']} MiB, {figures['files_on_disk']:,} files, {figures['log_entries']} of the log",
        ),
        ("the table", f"{figures['files_of_the_table']} files"),
        ("start: open, unread, newest (ms)", f"{figures['open_ms']}   {figures['unread_ms']}   {figures['newest_ms']}"),
    ]
    report("ledger: what a commit costs as the table grows", rows, figures, as_json=chosen.json)


if __name__ == "__main__":
    main()
