"""What the store has lost: seen by marks and counts kept outside of it, said in `status`, told to whom it concerns.

    a stream that ends earlier than it did      DM, TASK, DLV, AUD, DEAD (of the log, `marks.py` says it)
    records the broker itself calls lost        every stream
    a sequence that is not there above the floor           the log: nothing but retention takes records, below its floor
    fewer records than when the steward stopped in order   every stream but DLV, which readers empty themselves
    records that cannot be read and are not deleted        every stream: a flipped bit is not found before it is read

The first four are looked at when the steward starts, when the broker came back, and now and then; everything is read
after a start and once a day, slowly. Whose records they were is known from how many each subject had; members of a
channel are told of what lay within their interval. What was told once, acknowledged or not, is not counted again. What
was rightly removed between the last look and a crash cannot be told from what was lost then: after a crash counts
decide nothing.
Nothing is mended here; `store_reading.py` also verifies what it reads. A memory of this that cannot be decoded is put
aside and said until it is acknowledged: what was lost before, and whom it was to be told, stands in there.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tidings.broker.private_files import write_private
from tidings.errors import ConfigError
from tidings.space.home import SpaceHome
from tidings.space.membership import Interval
from tidings.steward.agent_handlers import name_of, now
from tidings.steward.unreadable import MOST_DELETED, Gaps, unreadable
from tidings.wire.names import is_agent_id
from tidings.wire.subjects import Audit, Chat, Delivery, Direct, Task, Via

if TYPE_CHECKING:
    from tidings.steward.service import Steward

#: of a stream with more subjects it is not remembered how many records each has
MOST_SUBJECTS = 5_000
#: records that are read to find out whose were lost
MOST_READ = 100_000
KEPT, KEPT_REMOVED = 100, 1_000
#: sentences about dead letters that are kept for one agent
KEPT_OF_LETTERS = 32
#: for so long whoever comes back hears that a narrowing closed a membership
CLOSED_TOLD = timedelta(days=30)
#: between two pages of four megabytes at most
READ_PAUSE = 0.2
#: readings of a stream from which records are removed meanwhile
TRIES = 3
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


def _path(home: SpaceHome) -> Path:
    return home.marks.with_name(f"{home.name}.store.json")


def load(home: SpaceHome, space_id: str) -> StoreFile:
    """What is remembered of the store of a space; nothing if there is none or it is of another space of the name."""
    path = _path(home)
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


class StoreWatch:
    """Marks and counts of every stream of a space."""

    def __init__(self, steward: Steward) -> None:
        self.steward = steward
        self.path = _path(steward.home)
        self.file = load(steward.home, steward.info.id)
        if self.file.damaged == str(self.path):
            self._put_aside()
        s = steward.subjects
        self.log = s.log_stream
        #: agent -> how often there was something to tell it in this term: its row of the roster has this
        self.told: Counter[str] = Counter()
        self.streams = (s.log_stream, s.direct_stream, s.task_stream, s.delivery_stream, s.audit_stream, s.dead_stream)

    def _put_aside(self) -> None:
        aside = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
        self.path.rename(aside)
        self.file.damaged = str(aside)
        self._save()  # else whoever is killed now would forget that there was one
        log.error("what was remembered of the store was put aside as %s", aside)

    # --- looking ---

    async def start(self) -> None:
        await self._look(counted=self.file.clean)

    async def run(self) -> None:
        await self._look(counted=False)

    async def stop(self) -> None:
        """The last look of a steward that stops in order: from here on nobody removes anything."""
        await self.steward.lease.prove()
        await self._remember(clean=True)

    async def _look(self, *, counted: bool) -> None:
        found = [each for stream in self.streams for each in await self._damages(stream, counted=counted)]
        await self._note(found)
        await self._remember(clean=False)

    async def _note(self, found: list[Damage]) -> None:
        fresh = _told_once(found)
        for each in fresh:
            log.error("%s: %s", words(each), self._whom(each) or "nobody knows whose")
        await self.steward.lease.prove()  # a stale steward would write its old memory over the new one's
        if fresh:
            self.file.damages = [*self.file.damages, *fresh][-KEPT:]
            self._save()
            told = [self._concerned(subject, each)[0] for each in fresh for subject in each.subjects]
            self._tell(frozenset().union(*told))

    async def read_all(self) -> None:
        """Read every stream through, slowly: what cannot be read shows only then. What is soon removed comes first."""
        for stream in (*self.streams[1:], self.log):
            for left in reversed(range(TRIES)):
                found, is_quiet, unshown = await self._read_through(stream)
                if is_quiet or not left:
                    self.file.unshown[stream] = unshown
                    await self._note(found)
                    break

    async def _read_through(self, stream: str) -> tuple[list[Damage], bool, dict[str, int]]:
        """What cannot be read; whether nothing was removed meanwhile, so that it is known whose it was; `unshown`."""
        js = self.steward.js
        before = (await js.info(stream))["state"]
        counted = await self._counts(stream, before)
        end, there = int(before["last_seq"]), Counter[str]()
        gaps = Gaps(self.steward.table.floor + 1 if stream == self.log else int(before["first_seq"]))
        async for page in js.read(stream, ">", 1, end):
            there.update(record.subject for record in page)
            gaps.note(page)
            if await self.steward.stopped_within(READ_PAUSE):
                return [], True, self.file.unshown.get(stream, {})
        holes = gaps.close(end) if before["messages"] else []
        is_quiet = True
        if stream == self.log:
            floor = self.steward.table.floor  # what retention removed meanwhile lies below it
            holes = [(max(first, floor + 1), last) for first, last in holes if last > floor]
            found = [(first, last, last - first + 1, ABOVE_FLOOR) for first, last in holes]
        else:
            lost = await unreadable(js, stream, holes)
            after = (await js.info(stream))["state"]
            removed = before["messages"] - (after["messages"] - (after["last_seq"] - end))
            unread = before["messages"] - there.total()
            if lost is None:  # too many holes to tell one from the other: counts say it, if nothing was removed
                found = [(0, 0, unread, UNREADABLE)] if unread > 0 and not removed else []
                is_quiet = not removed
            else:
                found = [(first, last, last - first + 1, UNREADABLE) for first, last in lost]
                is_quiet = not (lost and removed)
        damages = [Damage(stream, *each, noticed=now()) for each in found]
        fresh = [left for each in damages for left in without_known(each, self.file.damages)]
        whose, unshown = await self._told_anew(stream, counted, counted, there, there)
        if not fresh:
            told = self.file.unshown.get(stream, {})
            unshown = {subject: min(n, told[subject]) for subject, n in unshown.items() if subject in told}
        return _whose_they_were(fresh, whose), is_quiet, unshown

    async def _remember(self, *, clean: bool) -> None:
        streams = {stream: await self._mark(stream) for stream in self.streams}
        if (streams, clean) != (self.file.streams, self.file.clean) or not self.path.exists():
            self.file.streams, self.file.clean = streams, clean
            self._save()

    def _save(self) -> None:
        write_private(self.path, msgspec.json.encode(self.file).decode())

    async def _mark(self, stream: str) -> StreamMark:
        js = self.steward.js
        state = (await js.info(stream))["state"]
        stored = await js.at(stream, state["last_seq"]) if state["messages"] else None
        subjects = await self._counts(stream, state)
        return StreamMark(state["last_seq"], stored.time_ns if stored else 0, state["messages"], subjects)

    async def _counts(self, stream: str, state: dict[str, Any]) -> dict[str, int]:
        """Subject -> how many records it has. The broker leaves `num_subjects` out of the state of an empty stream."""
        if not 0 < state.get("num_subjects", 0) <= MOST_SUBJECTS:
            return {}
        return await self.steward.js.counts_of(stream, ">")

    # --- judging ---

    async def _damages(self, stream: str, *, counted: bool) -> list[Damage]:
        js, then = self.steward.js, self.file.streams.get(stream)
        state = (await js.info(stream))["state"]
        found: list[tuple[int, int, int, str]] = []
        if lost := state.get("lost"):
            gone = lost.get("msgs") or []
            first, last = (min(gone), max(gone)) if gone else (0, 0)
            found.append((first, last, len(gone), f"the broker cannot read {lost.get('bytes', 0)} bytes of its file"))
        if stream == self.log:
            holes = await self._holes(state)
            found += [(first, last, last - first + 1, ABOVE_FLOOR) for first, last in holes]
        if then is not None:
            found += await self._since(stream, then, state, counted=counted and not found)
        damages = [Damage(stream, *each, noticed=now()) for each in found]
        fresh = [left for each in damages for left in without_known(each, self.file.damages)]
        whose = await self._whose(stream, then, state) if fresh and then is not None else {}
        return _whose_they_were(fresh, whose)

    async def _holes(self, state: dict[str, Any]) -> list[tuple[int, int]]:
        """Runs of sequences that are not there above the floor of the log."""
        if not 0 < state.get("num_deleted", 0) <= MOST_DELETED:
            return []
        answer = await self.steward.js.api(f"STREAM.INFO.{self.log}", {"deleted_details": True})
        floor = self.steward.table.floor
        return list(_runs(seq for seq in sorted(answer["state"].get("deleted") or []) if seq > floor))

    async def _since(
        self, stream: str, then: StreamMark, state: dict[str, Any], *, counted: bool
    ) -> list[tuple[int, int, int, str]]:
        last = int(state["last_seq"])
        if stream == self.log and last < then.last:
            return []  # it went backwards, which `marks.py` says
        if last < then.last:
            # Of these sequences some may have been read and removed before: only what was there can be lost.
            lost = min(then.last - last, then.messages - int(state["messages"]))
            return [(last + 1, then.last, lost, ENDS_EARLIER)] if lost > 0 else []
        stored = await self.steward.js.at(stream, then.last) if then.time_ns else None
        if stored is not None and stored.time_ns != then.time_ns and stream != self.log:
            return [(0, then.last, 0, SET_BACK)]
        # A broker that left the end of a stream out may number on behind it after its next start.
        written = _minus((then.last + 1, last), [each for each in self.file.damages if each.stream == stream])
        gone = then.messages + sum(end - start + 1 for start, end in written) - int(state["messages"])
        if counted and gone > 0 and stream != self.steward.subjects.delivery_stream:
            return [(0, then.last, gone, FEWER)]
        return []

    async def _whose(self, stream: str, then: StreamMark, state: dict[str, Any]) -> dict[str, int]:
        """Subject -> how many of its records are gone. The broker's own counts may still have them: they are read."""
        if not then.subjects:
            return {}
        counted = await self._counts(stream, state)
        there: Counter[str] = Counter()
        older: Counter[str] = Counter()
        async for page in self.steward.js.read(stream, ">", 1, int(state["last_seq"])):
            there.update(record.subject for record in page)
            older.update(record.subject for record in page if record.seq <= then.last)
            if there.total() > MOST_READ:
                return {}
        whose, self.file.unshown[stream] = await self._told_anew(stream, then.subjects, counted, older, there)
        return whose

    async def _told_anew(
        self, stream: str, were: dict[str, int], counted: dict[str, int], older: Counter[str], there: Counter[str]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Of records that `were` and are not among the `older` ones read now, those nobody was told of; and `unshown`.

        What the broker had `counted` before all that is `there` was read it counts without showing it from now on. Of
        a subject from which records were removed meanwhile that is not known: what was told is remembered.
        """
        told = self.file.unshown.get(stream, {})
        missing = {subject: n - older[subject] - told.get(subject, 0) for subject, n in were.items()}
        whose = {subject: n for subject, n in missing.items() if n > 0}
        after = await self.steward.js.counts_of(stream, ">") if counted else {}
        unshown = {
            subject: n - there[subject] if after.get(subject, 0) >= n else told.get(subject, 0) + whose.get(subject, 0)
            for subject, n in counted.items()
        }
        return whose, {subject: n for subject, n in unshown.items() if n > 0}

    # --- telling ---

    def acknowledge(self) -> int:
        pending = [each for each in self.file.damages if not each.acknowledged]
        damaged, self.file.damaged = self.file.damaged, None
        if pending or damaged:
            self.file.damages = [msgspec.structs.replace(each, acknowledged=True) for each in self.file.damages]
            self._save()
        return len(pending) + (damaged is not None)

    def problems(self) -> list[str]:
        damaged = [
            f"the memory of what the store lost could not be read and lies in {self.file.damaged}: damage that was not "
            "acknowledged, and what agents were still to be told, is in there; `tidings doctor store` reads "
            "everything, `tidings space acknowledge` once you have seen to it"
        ]
        return (damaged if self.file.damaged else []) + [
            f"{words(each)}; whom it concerns is told, `tidings logs steward` says who; `tidings doctor store` reads "
            "everything, `tidings space acknowledge` once you have seen to it"
            for each in self.file.damages
            if not each.acknowledged
        ]

    def _whom(self, damage: Damage) -> str:
        """For the log file: every agent may ask for the health of a space, which names no channel and nobody's mail."""
        return "; ".join(f"{self._subject_words(subject)}: {n}" for subject, n in list(damage.subjects.items())[:50])

    def _subject_words(self, subject: str) -> str:
        match self.steward.subjects.parse(subject):
            case Chat(sender, channel) | Via(_, sender, channel):
                return f"{self._name(sender)} in {channel}"
            case Direct(_, target, sender):
                return f"{self._name(sender)} to {self._name(target)}"
            case Task(role, sender):
                return f"tasks of {self._name(sender)} for {role}"
            case Delivery(_, owner):
                return f"durable copies of {self._name(owner)}"
            case Audit(rest):
                return f"receipts and results of {self._name(rest.rpartition('.')[2])}"
        return subject

    def _name(self, agent: str) -> str:
        return name_of(self.steward, agent) or agent

    async def note_closed(self, owner: str, closed: list[Interval]) -> None:
        """A narrowing closes these memberships, and their owner is to hear of it, also when it comes back later."""
        removed = [
            Removed(
                owner,
                f"your access was narrowed, and you are no longer in #{each.pattern}: what you were owed there does "
                "not come any more. Being given access again does not open it: join again",
                0,
                f"access was narrowed, joined at {each.joined}",
                kind="membership",
                channel=each.pattern,
                at=now(),
            )
            for each in closed
        ]
        known = {(each.target, each.cause, each.channel) for each in self.file.removed}
        await self.note_removed([each for each in removed if (owner, each.cause, each.channel) not in known])

    async def note_letters_gone(self, gone: Mapping[str, Counter[str]], why: str) -> None:
        """Dead letters are about to be removed: owner -> how many of which kind. Their owners are to hear of it."""
        cause = f"{LETTERS_GONE} ({why}), {datetime.now(UTC).isoformat()}"
        removed = [
            Removed(owner, letters_gone(kinds, why), kinds.total(), cause)
            for owner, kinds in gone.items()
            if kinds.total()
        ]
        for each in removed:
            self._sum_up_letters(each.target)
        await self.note_removed(removed)

    def _sum_up_letters(self, owner: str) -> None:
        """One owner's sentences must not push out what others are to hear: the older half of many becomes one."""
        mine = [each for each in self.file.removed if each.target == owner and each.cause.startswith(LETTERS_GONE)]
        if len(mine) < KEPT_OF_LETTERS:
            return
        old, count = mine[: KEPT_OF_LETTERS // 2], sum(each.count for each in mine[: KEPT_OF_LETTERS // 2])
        text = f"altogether {count} of your dead letters were removed, the last of them {old[-1].cause.split(', ')[-1]}"
        summed = Removed(owner, text, count, f"{LETTERS_GONE}, {count}, {old[-1].cause.split(', ')[-1]}")
        self.file.removed = [summed, *(each for each in self.file.removed if each not in old)]

    async def note_removed(self, removed: list[Removed]) -> None:
        """Something was taken, and whom it was taken from is to hear of it, under any steward."""
        if removed:
            await self.steward.lease.prove()
            self.file.removed = [*self.file.removed, *removed][-KEPT_REMOVED:]
            self._save()
            self._tell({each.target for each in removed})

    def _tell(self, agents: Iterable[str]) -> None:
        concerned = set(agents)
        self.told.update(concerned)
        self.steward.roster.table.admit(concerned)

    def told_to(self, agent: str) -> list[dict[str, Any]]:
        """What an agent is told: damage to what it sent, asked for, was to get, or is a member of; what was taken."""
        recent = (datetime.now(UTC) - CLOSED_TOLD).isoformat()
        nowhere = {"first": None, "last": None}
        rows: list[dict[str, Any]] = [
            {
                "kind": each.kind,
                "text": each.text,
                "cause": each.cause,
                "count": each.count or None,
                "channel": each.channel,
                **nowhere,
            }
            for each in self.file.removed
            if each.target == agent and (not each.at or each.at > recent)
        ]
        for each in self.file.damages:
            for subject, count in each.subjects.items():
                concerned, channel = self._concerned(subject, each)
                if agent in concerned:
                    text = (
                        f"the store of this space lost {count} record{'' if count == 1 else 's'} "
                        f"({self._subject_words(subject)}; noticed {each.noticed}): {self._advice(subject, agent)}"
                    )
                    last = max(each.last, each.reach)
                    is_there = each.first and count <= last - each.first + 1
                    where = (each.first, last) if is_there else (None, None)
                    facts = {"first": where[0], "last": where[1], "count": count}
                    # without a place two losses are told apart by when they were noticed
                    cause = f"{each.cause}, {subject}" if is_there else f"{each.cause}, {subject}, {each.noticed}"
                    rows.append({"text": text, "channel": channel, "cause": cause, **facts})
        return rows

    def _advice(self, subject: str, agent: str) -> str:
        """What to do next, for whoever wrote what is lost and for whoever was to get it."""
        match self.steward.subjects.parse(subject):
            case Chat(sender, _) | Via(_, sender, _) | Direct(_, _, sender) if sender != agent:
                return f"ask {self._name(sender)} to send again what matters"
            case Delivery():
                return "they are copies: what they held is in the log as long as that keeps it (`tidings history`)"
            case Audit():
                return "`tidings trace` of a message or task says what is still known of it"
        return "send again what matters"

    def _concerned(self, subject: str, damage: Damage) -> tuple[frozenset[str], str | None]:
        """Whose business lost records of a subject are, and the channel they are of."""
        steward = self.steward
        match steward.subjects.parse(subject):
            case Chat(sender, channel) | Via(_, sender, channel):
                first, last = damage.first or 1, max(damage.last, damage.reach)
                members = steward.table.members_within(channel, first, last)
                return frozenset(each for each in members if steward.table.allowed_now(each, channel)) | {
                    sender
                }, channel
            case Direct(_, target, sender):
                return frozenset((target, sender)), None
            case Task(_, sender):
                return frozenset((sender,)), None
            case Delivery(_, owner):
                return frozenset((owner,)), None
            case Audit(rest):
                owner = rest.rpartition(".")[2]
                return frozenset((owner,) if is_agent_id(owner) else ()), None
        return frozenset(), None


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


def _whose_they_were(found: list[Damage], whose: dict[str, int]) -> list[Damage]:
    """Some may have been read and rightly removed meanwhile: of nobody more is said than is lost, if that is known."""
    most = sum(each.count for each in found)
    subjects = {subject: min(n, most) for subject, n in whose.items()} if most else whose
    return [msgspec.structs.replace(each, subjects=subjects) for each in found]


def _told_once(found: list[Damage]) -> list[Damage]:
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
        left = _minus((found.first, found.last), same)
        return [msgspec.structs.replace(found, first=first, last=last, count=last - first + 1) for first, last in left]
    if found.cause == UNREADABLE:  # a number without a place
        found = msgspec.structs.replace(found, count=found.count - sum(each.count for each in same))
        return [found] if found.count > 0 else []
    return [] if found.is_about in {each.is_about for each in same} else [found]


def _minus(run: tuple[int, int], damages: Iterable[Damage]) -> list[tuple[int, int]]:
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


def _runs(seqs: Iterable[int]) -> Iterable[tuple[int, int]]:
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
