"""Where the log was, remembered outside the broker's store.

A power cut or a restored copy makes the broker reuse sequences, and nothing inside the store can tell. A mark is
the sequence, time and subject of a record that was the head once; the newest mark that the log no longer confirms
shows how far it went back. A log that did gets a new epoch, and the steward says so until its owner has seen it.
"""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

import msgspec

from tidings.broker.answers import EPOCH_KEY
from tidings.broker.jetstream import JetStream
from tidings.broker.private_files import write_private
from tidings.broker.streams import set_epoch
from tidings.errors import ConfigError
from tidings.steward.services import now
from tidings.wire.subjects import Subjects

KEPT = 1_000
log = logging.getLogger(__name__)


class Mark(msgspec.Struct, frozen=True, array_like=True):
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
    epoch: str = ""
    marks: list[Mark] = []
    regressions: list[Regression] = []


def thinned(marks: list[Mark]) -> list[Mark]:
    """At most KEPT marks: dense where they are new, ever sparser the further back, but always back to the first."""
    return marks if len(marks) <= KEPT else [*marks[: KEPT // 2 : 2], *marks[KEPT // 2 :]]


class Marks:
    """The marks of one space's log."""

    def __init__(self, path: Path, js: JetStream, subjects: Subjects) -> None:
        self.path = path
        self.js = js
        self.subjects = subjects
        self.file = self._load()

    def _load(self) -> MarkFile:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=MarkFile)
        except FileNotFoundError:
            return MarkFile()
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{self.path} is damaged ({error}): move it away to start with a new memory") from error

    def save(self) -> None:
        write_private(self.path, msgspec.json.encode(self.file).decode())

    async def note(self, head: int) -> None:
        """Remember the record at `head`."""
        if self.file.marks and self.file.marks[-1].seq >= head:
            return
        stored = await self.js.at(self.subjects.log_stream, head)
        if stored is None:
            return  # removed by retention since; the older marks still stand
        self.file.marks = thinned([*self.file.marks, Mark(stored.seq, stored.time_ns, stored.subject)])
        self.save()

    async def newest_agreed(self, head: int, floor: int) -> tuple[int, int] | None:
        """(was, agreed) if the log went backwards, None if it did not.

        A mark below the floor may have been removed by retention, so it proves nothing either way.
        """
        disagreed = 0
        for mark in reversed(self.file.marks):
            if mark.seq <= head and await self._confirms(mark):
                return (disagreed, mark.seq) if disagreed else None
            if mark.seq > floor or mark.seq > head:
                disagreed = disagreed or mark.seq
        return (disagreed, 0) if disagreed else None

    async def _confirms(self, mark: Mark) -> bool:
        stored = await self.js.at(self.subjects.log_stream, mark.seq)
        return stored is not None and (stored.time_ns, stored.subject) == (mark.time_ns, mark.subject)

    def agreed_since(self, epoch: str) -> int | None:
        """Up to where somebody who knew the log of `epoch` still knows it; None if that is the log of now."""
        if epoch == self.file.epoch:
            return None
        found = self.file.regressions
        after = max((number for number, each in enumerate(found, 1) if each.epoch_after == epoch), default=0)
        return min((each.agreed for each in found[after:]), default=0)

    # --- a log that went backwards ---

    async def settle_epoch(self, regression: tuple[int, int] | None) -> None:
        """Adopt the epoch of the log. If it went backwards, (was, agreed), give it a new one and remember that."""
        config = (await self.js.info(self.subjects.log_stream))["config"]
        epoch = config["metadata"][EPOCH_KEY]
        if regression is None:
            self.file.epoch = epoch
            return
        was, agreed = regression
        fresh = str(uuid.uuid4())
        await set_epoch(self.js, self.subjects, fresh)
        self.file.marks = [mark for mark in self.file.marks if mark.seq <= agreed]
        self.file.epoch = fresh
        self.file.regressions = [*self.file.regressions, Regression(was, agreed, epoch, fresh, noticed=now())]
        self.save()
        log.error("the log went backwards: it was at %d and agrees with the past only up to %d", was, agreed)

    def acknowledge(self) -> int:
        """The owner has seen every regression; answers how many were new to it."""
        pending = self._unacknowledged()
        self.file.regressions = [msgspec.structs.replace(each, acknowledged=True) for each in self.file.regressions]
        self.save()
        return len(pending)

    def problems(self) -> list[str]:
        return [
            f"the log went backwards: it was at {each.was} and agrees with the past only up to {each.agreed} "
            f"(noticed {each.noticed}); `tidings space acknowledge` once you have seen to it"
            for each in self._unacknowledged()
        ]

    def _unacknowledged(self) -> list[Regression]:
        return [each for each in self.file.regressions if not each.acknowledged]
