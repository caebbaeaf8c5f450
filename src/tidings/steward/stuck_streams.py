"""Streams that keep a write error: they met a full disk, and answer no write until the broker is started again.

The broker says nothing of it in the state of a stream, and the steward may not write where agents do. But it may purge,
and a stream that keeps such an error refuses even to remove what nobody could have written; one that is well removes
nothing and costs less than a millisecond. What is found is a problem in `status`, and the supervisor is asked to start
the broker again once the disk has room. The log and the state bucket are written to instead (`health.py`).
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from tidings.broker.jetstream_api import NO_STREAM, ApiError
from tidings.errors import OutcomeUnknown

if TYPE_CHECKING:
    from tidings.steward.service import Steward

LOOK_EVERY, PATIENCE = 1.0, 1.5
#: one token behind the kind: every subject of ours has more, so nobody can write it and no consumer reads it
NOTHING = "probe"


class StuckStreams:
    def __init__(self, steward: Steward) -> None:
        self.steward = steward
        s = steward.subjects
        self._kinds = {
            s.direct_stream: "dm",
            s.task_stream: "task",
            s.delivery_stream: "dlv",
            s.audit_stream: "aud",
            s.dead_stream: "dead",
        }
        self._looked = float("-inf")
        #: stream -> the error it keeps
        self._found: dict[str, str] = {}

    async def run(self) -> None:
        self._looked = time.monotonic()
        found = {stream: why for stream, kind in self._kinds.items() if (why := await self._error_of(stream, kind))}
        self._found = found
        if found and self.steward.disk.look().can_start:
            await self.steward.unwritten(", ".join(f"{stream}: {why}" for stream, why in found.items()))

    async def look(self) -> None:
        """For whoever asks how the space is; at most once a second."""
        if time.monotonic() - self._looked >= LOOK_EVERY:
            with suppress(OutcomeUnknown):  # a stream that is busy is not called stuck
                await self.run()

    async def _error_of(self, stream: str, kind: str) -> str | None:
        nothing = {"filter": f"{self.steward.subjects.root}.{kind}.{NOTHING}"}
        try:
            await self.steward.js.api(f"STREAM.PURGE.{stream}", nothing, timeout=PATIENCE)
        except ApiError as error:
            if error.err_code == NO_STREAM:
                raise
            return error.description.rpartition(": ")[2] or "it does not say which"  # without paths of this machine
        return None

    def problems(self) -> list[str]:
        return [
            f"{stream} keeps an error of its disk and stores nothing ({why}): `tidings up` starts the broker again "
            "once there is room"
            for stream, why in self._found.items()
        ]
