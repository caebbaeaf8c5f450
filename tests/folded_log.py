"""The table that a log stands for, read from the broker."""

from __future__ import annotations

from tidings.admin.home import SpaceInfo
from tidings.model.projection import Table
from tidings.nats.jetstream import JetStream
from tidings.server.log import read_rulings


async def fold_log(js: JetStream, space: SpaceInfo, floor: int, end: int | None = None) -> Table:
    """The table as of `end` (the head of the log by default)."""
    subjects = space.subjects
    if end is None:
        end = int((await js.info(subjects.log_stream))["state"]["last_seq"])
    table = Table(subjects, space.id, space.steward_key, floor=floor)
    return table.apply_all(await read_rulings(js, subjects, end))
