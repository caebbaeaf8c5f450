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
decide nothing. What is taken from an agent on purpose (mail, letters, a membership) is told the same way.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from tidings.contract.agents import DamageRow
from tidings.model.membership import Interval
from tidings.nats.jetstream_api import info_from
from tidings.server.lease import StewardLease
from tidings.steward.context import Lifecycle, SpaceContext, now
from tidings.steward.damage import (
    ABOVE_FLOOR,
    ENDS_EARLIER,
    FEWER,
    LETTERS_GONE,
    MOST_DELETED,
    SET_BACK,
    UNREADABLE,
    Damage,
    Gaps,
    Removed,
    StreamMark,
    letters_gone,
    load,
    minus,
    runs_of,
    store_path,
    told_once,
    unreadable,
    whose_they_were,
    without_known,
    words,
)
from tidings.util.private_files import write_private
from tidings.wire.names import is_agent_id
from tidings.wire.subjects import Audit, Chat, Delivery, Direct, Task, Via

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
log = logging.getLogger(__name__)


class StoreWatch:
    """Marks and counts of every stream of a space."""

    def __init__(
        self, space: SpaceContext, lease: StewardLease, life: Lifecycle, changed: Callable[[Iterable[str]], None]
    ) -> None:
        """`changed`: hears who is to be told something, so that its row of the roster says so."""
        self.space = space
        self.lease = lease
        self.life = life
        self._changed = changed
        self.path = store_path(space.home)
        self.file = load(space.home, space.info.id)
        if self.file.damaged == str(self.path):
            self._put_aside()
        self.log = space.subjects.log_stream
        #: agent -> how often there was something to tell it in this term: its row of the roster has this
        self.told: Counter[str] = Counter()
        self.streams = space.streams

    def _put_aside(self) -> None:
        aside = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
        self.path.rename(aside)
        self.file.damaged = str(aside)
        self._save()  # else whoever is killed now would forget that there was one
        log.error("what was remembered of the store was put aside as %s", aside)

    # --- looking ---

    async def start(self) -> None:
        await self.run(counted=self.file.clean)

    async def stop(self) -> None:
        """The last look of a steward that stops in order: from here on nobody removes anything."""
        await self.lease.prove()
        await self._remember(clean=True)

    async def run(self, *, counted: bool = False) -> None:
        found = [each for stream in self.streams for each in await self._damages(stream, counted=counted)]
        await self._note(found)
        await self._remember(clean=False)

    async def _note(self, found: list[Damage]) -> None:
        fresh = told_once(found)
        for each in fresh:
            log.error("%s: %s", words(each), self._whom(each) or "nobody knows whose")
        await self.lease.prove()  # a stale steward would write its old memory over the new one's
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
        js = self.space.js
        before = (await js.info(stream))["state"]
        counted = await self._counts(stream, before)
        end, there = int(before["last_seq"]), Counter[str]()
        gaps = Gaps(self.space.table.floor + 1 if stream == self.log else int(before["first_seq"]))
        async for page in js.read(stream, ">", 1, end):
            there.update(record.subject for record in page)
            gaps.note(page)
            if await self.life.stopped_within(READ_PAUSE):
                return [], True, self.file.unshown.get(stream, {})
        holes = gaps.close(end) if before["messages"] else []
        is_quiet = True
        if stream == self.log:
            floor = self.space.table.floor  # what retention removed meanwhile lies below it
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
        return whose_they_were(fresh, whose), is_quiet, unshown

    async def _remember(self, *, clean: bool) -> None:
        streams = {stream: await self._mark(stream) for stream in self.streams}
        if (streams, clean) != (self.file.streams, self.file.clean) or not self.path.exists():
            self.file.streams, self.file.clean = streams, clean
            self._save()

    def _save(self) -> None:
        write_private(self.path, msgspec.json.encode(self.file).decode())

    async def _mark(self, stream: str) -> StreamMark:
        js = self.space.js
        state = (await js.info(stream))["state"]
        stored = await js.at(stream, state["last_seq"]) if state["messages"] else None
        subjects = await self._counts(stream, state)
        return StreamMark(state["last_seq"], stored.time_ns if stored else 0, state["messages"], subjects)

    async def _counts(self, stream: str, state: dict[str, Any]) -> dict[str, int]:
        """Subject -> how many records it has. The broker leaves `num_subjects` out of the state of an empty stream."""
        if not 0 < state.get("num_subjects", 0) <= MOST_SUBJECTS:
            return {}
        return await self.space.js.counts_of(stream, ">")

    # --- judging ---

    async def _damages(self, stream: str, *, counted: bool) -> list[Damage]:
        js, then = self.space.js, self.file.streams.get(stream)
        known = then.last if then is not None else 0
        state = (await js.run(info_from(stream, known, replicated=js.replicated)))["state"]
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
        return whose_they_were(fresh, whose)

    async def _holes(self, state: dict[str, Any]) -> list[tuple[int, int]]:
        """Runs of sequences that are not there above the floor of the log."""
        if not 0 < state.get("num_deleted", 0) <= MOST_DELETED:
            return []
        answer = await self.space.js.api(f"STREAM.INFO.{self.log}", {"deleted_details": True})
        floor = self.space.table.floor
        return list(runs_of(seq for seq in sorted(answer["state"].get("deleted") or []) if seq > floor))

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
        stored = await self.space.js.at(stream, then.last) if then.time_ns else None
        if stored is not None and stored.time_ns != then.time_ns and stream != self.log:
            return [(0, then.last, 0, SET_BACK)]
        # A broker that left the end of a stream out may number on behind it after its next start.
        written = minus((then.last + 1, last), [each for each in self.file.damages if each.stream == stream])
        gone = then.messages + sum(end - start + 1 for start, end in written) - int(state["messages"])
        if counted and gone > 0 and stream != self.space.subjects.delivery_stream:
            return [(0, then.last, gone, FEWER)]
        return []

    async def _whose(self, stream: str, then: StreamMark, state: dict[str, Any]) -> dict[str, int]:
        """Subject -> how many of its records are gone. The broker's own counts may still have them: they are read."""
        if not then.subjects:
            return {}
        counted = await self._counts(stream, state)
        there: Counter[str] = Counter()
        older: Counter[str] = Counter()
        async for page in self.space.js.read(stream, ">", 1, int(state["last_seq"])):
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
        after = await self.space.js.counts_of(stream, ">") if counted else {}
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
        match self.space.subjects.parse(subject):
            case Chat(sender, channel):
                return f"{self._name_of(sender)} in {channel}"
            case Via(link, sender, channel):
                return f"{self.space.sender_name(subject, sender)} in {channel}, over the link {link}"
            case Direct(_, target, sender):
                return f"{self._name_of(sender)} to {self._name_of(target)}"
            case Task(role, sender):
                return f"tasks of {self._name_of(sender)} for {role}"
            case Delivery(_, owner):
                return f"durable copies of {self._name_of(owner)}"
            case Audit(rest):
                return f"receipts and results of {self._name_of(rest.rpartition('.')[2])}"
        return subject

    def _name_of(self, agent: str) -> str:
        return self.space.name_of(agent) or agent

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
            await self.lease.prove()
            self.file.removed = [*self.file.removed, *removed][-KEPT_REMOVED:]
            self._save()
            self._tell({each.target for each in removed})

    def _tell(self, agents: Iterable[str]) -> None:
        concerned = set(agents)
        self.told.update(concerned)
        self._changed(concerned)

    def told_to(self, agent: str) -> list[DamageRow]:
        """What an agent is told: damage to what it sent, asked for, was to get, or is a member of; what was taken."""
        recent = (datetime.now(UTC) - CLOSED_TOLD).isoformat()
        rows = [
            DamageRow(
                kind=each.kind,
                text=each.text,
                cause=each.cause,
                count=each.count or None,
                channel=each.channel,
                first=None,
                last=None,
            )
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
                    first, end = (each.first, last) if is_there else (None, None)
                    # without a place two losses are told apart by when they were noticed
                    cause = f"{each.cause}, {subject}" if is_there else f"{each.cause}, {subject}, {each.noticed}"
                    rows.append(DamageRow(text=text, channel=channel, first=first, last=end, count=count, cause=cause))
        return rows

    def _advice(self, subject: str, agent: str) -> str:
        """What to do next, for whoever wrote what is lost and for whoever was to get it."""
        match self.space.subjects.parse(subject):
            case Chat(sender, _) | Direct(_, _, sender) if sender != agent:
                return f"ask {self._name_of(sender)} to send again what matters"
            case Via(link, _, _):
                return f"the link {link} brings it again when it is checked (`tidings link verify`)"
            case Delivery():
                return "they are copies: what they held is in the log as long as that keeps it (`tidings history`)"
            case Audit():
                return "`tidings trace` of a message or task says what is still known of it"
        return "send again what matters"

    def _concerned(self, subject: str, damage: Damage) -> tuple[frozenset[str], str | None]:
        """Whose business lost records of a subject are, and the channel they are of."""
        match self.space.subjects.parse(subject):
            case Chat(_, channel) | Via(_, _, channel) as said:
                first, last = damage.first or 1, max(damage.last, damage.reach)
                members = self.space.table.members_within(channel, first, last)
                concerned = frozenset(each for each in members if self.space.table.allowed_now(each, channel))
                return concerned | ({said.sender} if isinstance(said, Chat) else set()), channel
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
