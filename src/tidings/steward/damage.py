"""What a store can lose, what is remembered of it, and how losses are told apart. No steward is needed for any of it.

`StoreFile` lies beside the marks, outside of everything that a backup copies. `Gaps` and `unreadable` find sequences
that the broker counts and shows to nobody: a flipped bit is not found before somebody reads. `without_known` says what
of a loss is new. Nothing is mended: what was lost stays lost and told. Who looks is `store_watch.py`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from tidings.admin.home import SpaceHome
from tidings.errors import ConfigError
from tidings.nats.jetstream import JetStream, StoredRecord

#: deleted sequences that are asked for, and runs of them that are remembered
MOST_DELETED = 50_000
Run = tuple[int, int]
ABOVE_FLOOR = "missing above the floor"
UNREADABLE = "the broker counts it and cannot read it"
FEWER = "fewer records than when the steward stopped"
ENDS_EARLIER = "it ends earlier than it did"
SET_BACK = "it was set back and written to again"
#: found by comparing with the last look, which is remembered anew then: each time it is another loss
COMPARED = frozenset((FEWER, ENDS_EARLIER, SET_BACK))
LETTERS_GONE = "dead letters"
LETTER_KINDS = {"direct": "direct messages", "channel": "channel messages", "task": "tasks"}
log = logging.getLogger(__name__)


class StreamMark(msgspec.Struct, frozen=True):
    """A stream when it was looked at: its last sequence, when that record was stored, how many each subject has."""

    last: int
    time_ns: int
    messages: int
    subjects: dict[str, int] = {}


class Damage(msgspec.Struct, frozen=True):
    """Records of a stream that are gone. `subjects`: how many of whom, as far as that is known.

    What was found together has its subjects on the first one, and there `reach` is where the last of them ends.
    """

    stream: str
    first: int
    last: int
    count: int
    cause: str
    noticed: str
    subjects: dict[str, int] = {}
    acknowledged: bool = False
    reach: int = 0

    @property
    def is_about(self) -> tuple[str, int, int, int, str]:
        return self.stream, self.first, self.last, self.count, self.cause


class Removed(msgspec.Struct, frozen=True):
    """What was taken from an agent: mail because of who sent it (`shares.py`) or whose key went (`unread.py`), its dead
    letters, or a membership.

    `cause` names this removal.
    """

    target: str
    text: str
    #: messages; 0 if nobody knows
    count: int
    cause: str
    kind: str = "damage"
    channel: str | None = None
    at: str = ""


class StoreFile(msgspec.Struct):
    space: str = ""
    #: the steward stopped in order after this look
    clean: bool = False
    streams: dict[str, StreamMark] = {}
    damages: list[Damage] = []
    removed: list[Removed] = []
    #: stream -> subject -> records the broker counts and does not show, of which whom it concerns was told
    unshown: dict[str, dict[str, int]] = {}
    #: where a memory that could not be decoded lies, until its owner has seen that
    damaged: str | None = None


def store_path(home: SpaceHome) -> Path:
    return home.marks.with_name(f"{home.name}.store.json")


def load(home: SpaceHome, space_id: str) -> StoreFile:
    """What is remembered of the store of a space; nothing if there is none or it is of another space of the name."""
    path = store_path(home)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=StoreFile)
    except FileNotFoundError:
        return StoreFile(space=space_id)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}, which has what the store lost: {error.strerror}. Make it readable, or move it away"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.error("%s is damaged: %s", path, error)
        return StoreFile(space=space_id, damaged=str(path))
    return found if found.space == space_id else StoreFile(space=space_id)


def letters_gone(kinds: Counter[str], why: str) -> str:
    """What an owner is told of dead letters that are gone, by their kinds."""
    total = kinds.total()
    what = ", ".join(f"{n} of {LETTER_KINDS[kind]}" for kind, n in sorted(kinds.items()))
    return (
        f"{total} of your dead letters {'was' if total == 1 else 'were'} removed {why} ({what}). Direct messages "
        "and tasks among them were the last copies: ask their senders, or ask again, for what still matters; "
        "`tidings dead list` shows what is left"
    )


def words(damage: Damage) -> str:
    count = f"{damage.count} record{'' if damage.count == 1 else 's'}" if damage.count else "records"
    where = f" between {damage.first} and {damage.last}" if damage.first else ""
    return f"{damage.stream} lost {count}{where} ({damage.cause})"


def whose_they_were(found: list[Damage], whose: dict[str, int]) -> list[Damage]:
    """Some may have been read and rightly removed meanwhile: of nobody more is said than is lost, if that is known."""
    most = sum(each.count for each in found)
    subjects = {subject: min(n, most) for subject, n in whose.items()} if most else whose
    return [msgspec.structs.replace(each, subjects=subjects) for each in found]


def told_once(found: list[Damage]) -> list[Damage]:
    """Whose records are gone is known of a stream, not of each of its holes: the first one says it."""
    told: set[str] = set()
    once = []
    for each in found:
        reach = max(other.last for other in found if other.stream == each.stream)
        is_first = each.stream not in told
        once.append(msgspec.structs.replace(each, reach=reach, subjects=each.subjects if is_first else {}))
        told.add(each.stream)
    return once


def without_known(found: Damage, known: Iterable[Damage]) -> list[Damage]:
    """What of this was not found before. A record that could not be read once is found at every reading."""
    same = [each for each in known if (each.stream, each.cause) == (found.stream, found.cause)]
    if found.cause in COMPARED:
        return [found]
    if found.first and found.cause in (ABOVE_FLOOR, UNREADABLE):
        left = minus((found.first, found.last), same)
        return [msgspec.structs.replace(found, first=first, last=last, count=last - first + 1) for first, last in left]
    if found.cause == UNREADABLE:  # a number without a place
        found = msgspec.structs.replace(found, count=found.count - sum(each.count for each in same))
        return [found] if found.count > 0 else []
    return [] if found.is_about in {each.is_about for each in same} else [found]


def minus(run: tuple[int, int], damages: Iterable[Damage]) -> list[tuple[int, int]]:
    """The sequences of a run that none of these says are gone."""
    runs = [run]
    for each in damages:
        if each.first:
            parts = (
                part
                for first, last in runs
                for part in ((first, min(last, each.first - 1)), (max(first, each.last + 1), last))
            )
            runs = [(first, last) for first, last in parts if first <= last]
    return runs


def runs_of(seqs: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Consecutive numbers as (first, last)."""
    first = last = 0
    for seq in seqs:
        if first and seq == last + 1:
            last = seq
            continue
        if first:
            yield first, last
        first = last = seq
    if first:
        yield first, last


class Gaps:
    """Runs of sequences that a reading in order did not meet."""

    def __init__(self, first: int) -> None:
        self.expected = first
        self.runs: list[Run] = []

    def note(self, page: Iterable[StoredRecord]) -> None:
        for record in page:
            self._reach(record.seq)
            self.expected = max(self.expected, record.seq + 1)

    def close(self, end: int) -> list[Run]:
        self._reach(end + 1)
        return self.runs

    def _reach(self, seq: int) -> None:
        if seq > self.expected:
            self.runs.append((self.expected, seq - 1))


async def unreadable(js: JetStream, stream: str, gaps: Sequence[Run]) -> list[Run] | None:
    """Of the sequences nobody met, those the broker says it has; None if there are too many to ask about."""
    if not gaps:
        return []
    state = (await js.info(stream))["state"]
    if max(len(gaps), state.get("num_deleted", 0)) > MOST_DELETED:
        return None
    answer = await js.api(f"STREAM.INFO.{stream}", {"deleted_details": True})
    deleted, first = sorted(answer["state"].get("deleted") or []), int(answer["state"]["first_seq"])
    return list(_without(gaps, deleted, first))


def _without(gaps: Iterable[Run], deleted: Sequence[int], first: int) -> Iterable[Run]:
    """The gaps from `first` on without what was deleted; both in order."""
    position = 0
    for start, last in gaps:
        start = max(start, first)
        while position < len(deleted) and deleted[position] < start:
            position += 1
        while position < len(deleted) and deleted[position] <= last:
            if deleted[position] > start:
                yield start, deleted[position] - 1
            start = deleted[position] + 1
            position += 1
        if start <= last:
            yield start, last
