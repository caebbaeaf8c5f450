"""Where the log was, remembered outside of everything that a backup copies and puts back.

A power cut or a restored copy makes the broker reuse sequences, and nothing inside the space can tell. A mark is
the sequence, time and subject of a record that was the head once; the newest mark that the log no longer confirms
shows how far it went back. A log that did gets a new epoch, and the steward says so until its owner has seen it.
Readers remember marks of their own: if these marks are lost or were put back too, a reader's stamp,
which only a steward of this space can have made, convinces us.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable

import msgspec

from tidings.admin.home import SpaceHome
from tidings.errors import ConfigError
from tidings.nats.jetstream import JetStream
from tidings.nats.jetstream_api import EPOCH_KEY
from tidings.server.streams import set_epoch
from tidings.steward.context import now
from tidings.util.private_files import write_private
from tidings.wire.records import Stamp
from tidings.wire.subjects import Subjects

KEPT = 1_000
log = logging.getLogger(__name__)


class LogMark(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    time_ns: int
    subject: str


class Regression(msgspec.Struct, frozen=True):
    """The log was at `was`, and is known to agree with the past only up to `agreed`."""

    was: int
    agreed: int
    epoch_before: str
    epoch_after: str
    noticed: str
    acknowledged: bool = False


class MarkFile(msgspec.Struct):
    #: id of the space whose log this is; another one of the same name has a log of its own
    space: str = ""
    epoch: str = ""
    marks: list[LogMark] = []
    regressions: list[Regression] = []
    #: epochs of this space that only readers remember: marks and log were put back together
    ended: list[str] = []
    #: where a memory that could not be read was put, until its owner has seen that
    damaged: str | None = None


def thinned(marks: list[LogMark]) -> list[LogMark]:
    """At most KEPT marks: dense where they are new, ever sparser the further back, but always back to the first."""
    return marks if len(marks) <= KEPT else [*marks[: KEPT // 2 : 2], *marks[KEPT // 2 :]]


class Marks:
    """The marks of one space's log."""

    def __init__(
        self, home: SpaceHome, space_id: str, js: JetStream, subjects: Subjects, prove: Callable[[str], str]
    ) -> None:
        """`prove`: what only a steward of this space can make of a text."""
        self.path = home.marks
        self.js = js
        self.subjects = subjects
        self._prove = prove
        self._stamp: Stamp | None = None
        self._lock = asyncio.Lock()
        #: agent -> a sequence at which it remembers another record than the log has
        self.doubts: dict[str, int] = {}
        self.file = self._load(space_id)

    def _load(self, space_id: str) -> MarkFile:
        try:
            found = msgspec.json.decode(self.path.read_bytes(), type=MarkFile)
        except FileNotFoundError:
            found = MarkFile()
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            found = MarkFile(damaged=self._put_aside(error))
        if found.space not in ("", space_id):
            found = MarkFile()
        found.space = space_id
        return found

    def _put_aside(self, error: Exception) -> str:
        """Whether the log went backwards is not known then; but whoever reads it compares for itself."""
        aside = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
        self.path.rename(aside)
        log.error("%s is damaged (%s) and was put aside as %s", self.path, error, aside)
        return str(aside)

    def save(self) -> None:
        write_private(self.path, msgspec.json.encode(self.file).decode())

    async def note(self, head: int) -> None:
        """Remember the record at `head`."""
        if self.file.marks and self.file.marks[-1].seq >= head:
            return
        stored = await self.js.at(self.subjects.log_stream, head)
        if stored is None:
            return  # removed by retention since; the older marks still stand
        self.file.marks = thinned([*self.file.marks, LogMark(stored.seq, stored.time_ns, stored.subject)])
        self.save()

    async def newest_agreed(self, head: int, floor: int) -> tuple[int, int] | None:
        """(was, agreed) if the log went backwards, None if it did not.

        A mark below the floor may have been removed by retention, so it proves nothing either way.
        """
        disagreed = 0
        for mark in reversed(self.file.marks):
            stored = await self.js.at(self.subjects.log_stream, mark.seq) if mark.seq <= head else None
            if stored is not None and (stored.time_ns, stored.subject) == (mark.time_ns, mark.subject):
                return (disagreed, mark.seq) if disagreed else None
            if mark.seq > floor or mark.seq > head:
                disagreed = disagreed or mark.seq
        return (disagreed, 0) if disagreed else None

    def agreed_since(self, epoch: str) -> int | None:
        """Up to where somebody who knew the log of `epoch` still knows it; None if that is the log of now."""
        if epoch == self.file.epoch:
            return None
        found = self.file.regressions
        after = max((number for number, each in enumerate(found, 1) if each.epoch_after == epoch), default=0)
        return min((each.agreed for each in found[after:]), default=0)

    # --- a log that went backwards ---

    async def adopt_epoch(self, regression: tuple[int, int] | None) -> None:
        """Adopt the epoch of the log. If it went backwards, (was, agreed), give it a new one and remember that."""
        config = (await self.js.info(self.subjects.log_stream))["config"]
        self.file.epoch = config["metadata"][EPOCH_KEY]
        if regression is not None:
            was, agreed = regression
            self.file.marks = [mark for mark in self.file.marks if mark.seq <= agreed]
            await self._begin_epoch(was, agreed)

    async def _begin_epoch(self, was: int, agreed: int) -> None:
        before, fresh = self.file.epoch, str(uuid.uuid4())
        await set_epoch(self.js, self.subjects, fresh)
        self.file.epoch = fresh
        self.file.regressions = [*self.file.regressions, Regression(was, agreed, before, fresh, noticed=now())]
        self.save()
        log.error("the log went backwards: it was at %d and agrees with the past only up to %d", was, agreed)

    async def believe(self, stamps: Iterable[Stamp], head: int, floor: int) -> None:
        """Give the log a new epoch if one of these stamps is ours and the log, by its epoch, should still have it."""
        async with self._lock:
            proven = [each for each in stamps if each.proof and self._prove(each.proved_text) == each.proof]
            over = {*self.file.ended, *(each.epoch_before for each in self.file.regressions)}
            was, agreed = await self.compare(proven, head, floor)
            by = next((each.epoch for each in proven if each.seq == was), None)
            if by is None or by in over:
                return
            if by != self.file.epoch:
                self.file.ended = [*self.file.ended, by]
            await self._begin_epoch(was, agreed)

    async def compare(self, claims: Iterable[Stamp], head: int, floor: int) -> tuple[int, int]:
        """(newest claim the log contradicts, newest one it confirms), 0 if there is none; claims come newest first.

        A record that is gone proves nothing: retention may have taken it, or it is damage and no other log.
        """
        contradicted = 0
        for claim in claims:
            stored = await self.js.at(self.subjects.log_stream, claim.seq) if floor <= claim.seq <= head else None
            if stored is not None and stored.mark == claim.mark:
                return contradicted, claim.seq
            if stored is not None or claim.seq > head:
                contradicted = contradicted or claim.seq
        return contradicted, 0

    async def stamp(self, head: int) -> Stamp | None:
        """What the log is at `head`, for readers to remember; None if that record is gone."""
        known = self._stamp
        if known is None or (known.seq, known.epoch) != (head, self.file.epoch):
            stored = await self.js.at(self.subjects.log_stream, head)
            if stored is None:
                return None
            known = Stamp(head, stored.mark, self.file.epoch)
            self._stamp = known = msgspec.structs.replace(known, proof=self._prove(known.proved_text))
        return known

    def acknowledge(self) -> int:
        """The owner has seen every regression; answers how many were new to it."""
        self.doubts.clear()
        pending = self._unacknowledged()
        self.file.regressions = [msgspec.structs.replace(each, acknowledged=True) for each in self.file.regressions]
        damaged, self.file.damaged = self.file.damaged, None
        self.save()
        return len(pending) + (damaged is not None)

    def problems(self) -> list[str]:
        damaged = [
            f"the memory of where the log was could not be read and lies in {self.file.damaged}: whether the log went "
            "backwards before that is seen by its readers only; `tidings space acknowledge` once you have seen to it"
        ]
        return (damaged if self.file.damaged else []) + [
            f"the log went backwards: it was at {each.was} and agrees with the past only up to {each.agreed} "
            f"(noticed {each.noticed}); `tidings space acknowledge` once you have seen to it"
            for each in self._unacknowledged()
        ]

    def _unacknowledged(self) -> list[Regression]:
        return [each for each in self.file.regressions if not each.acknowledged]
