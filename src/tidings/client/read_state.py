"""What was surfaced and what was settled, per channel, as a few numbers.

A record is known by its log sequence. `through` says that everything of the channel up to it was surfaced; `beyond`
holds single sequences after a hole that is still being filled. The settled mark trails behind: it is what may be
written to a state file, because what was surfaced but not settled, or is missing, must come again after a crash.
Sequences mean something in one `epoch` of the log only; identities (sender, id) mean the same in all of them. A bounded
number of channels is remembered, those used last: a channel that was forgotten counts as seen up to `forgotten`.

Whether a durable copy was surfaced before is asked of `known` alone, which is exact: `through` moves with live copies,
and one of those may have been lost without anybody noticing. That is what durable copies are for.

Whoever settles what it has in an inbox on disk says where (`note_kept`): a memory must not outlive the inbox it is of.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from tidings.client.state_file import Journal, KeptAs, SavedState
from tidings.wire.names import covers, is_channel
from tidings.wire.records import Stamp

RUNS_KEPT = 16_384
MARKS_KEPT = 32
#: seconds that frames wait for the word that the log is the one it was, and how often is looked
CHECK_PATIENCE, CHECK_EVERY = 5.0, 0.02
IDENTITIES_KEPT = 8_192
CHANNELS_KEPT = 16_384
#: of the channels used longest ago, so many are looked at for one that can be forgotten
LOOKED_AT = 64
#: in `missing`: what was not read from the log because frames bring it
FRAMES = "frames"
Identity = tuple[str, str]


class Sequences:
    """A set of sequences kept as runs, exact and small: `[[from, to], ...]`.

    Sequences of a busy log lie close together, so a long memory is a few runs. Beyond a number of runs the lowest are
    forgotten: whoever asks is then told "not known", which costs a repetition and never a message.
    """

    def __init__(self, runs: Iterable[Iterable[int]] = (), kept: int = RUNS_KEPT) -> None:
        self.kept = kept
        #: first and last of each run, in order; runs neither overlap nor touch
        self._first: list[int] = []
        self._last: list[int] = []
        for first, last in runs:
            self.add(first, last)

    def __contains__(self, seq: int) -> bool:
        at = bisect_right(self._first, seq) - 1
        return at >= 0 and seq <= self._last[at]

    def __len__(self) -> int:
        """How many runs."""
        return len(self._first)

    def add(self, first: int, last: int | None = None) -> None:
        """Everything from `first` to `last`, or `first` alone."""
        last = first if last is None else last
        if last < first:
            return
        low = bisect_right(self._last, first - 2)  # runs before `low` end too early even to touch
        high = bisect_right(self._first, last + 1)  # runs from `high` on begin too late
        if low < high:
            first, last = min(first, self._first[low]), max(last, self._last[high - 1])
        self._first[low:high], self._last[low:high] = [first], [last]
        if len(self._first) > self.kept:
            del self._first[0], self._last[0]

    def cut(self, last: int) -> None:
        """Forget everything above `last`."""
        keep = bisect_right(self._first, last)
        del self._first[keep:], self._last[keep:]
        if keep:
            self._last[-1] = min(self._last[-1], last)

    def run_from(self, seq: int) -> int:
        """The last sequence of the run that holds `seq`; one below `seq` if none does."""
        at = bisect_right(self._first, seq) - 1
        return self._last[at] if at >= 0 and seq <= self._last[at] else seq - 1

    def run_to(self, seq: int) -> int:
        """The first sequence of the run that holds `seq`; one above `seq` if none does."""
        at = bisect_right(self._first, seq) - 1
        return self._first[at] if at >= 0 and seq <= self._last[at] else seq + 1

    def last_before(self, seq: int) -> int:
        """The highest one below `seq`; 0 if there is none."""
        at = bisect_left(self._first, seq) - 1
        return min(self._last[at], seq - 1) if at >= 0 else 0

    def without(self, seqs: Iterable[int]) -> list[tuple[int, int]]:
        """The runs with single sequences cut out."""
        holes, found = sorted(set(seqs)), list[tuple[int, int]]()
        for start, end in self.runs():
            for hole in holes[bisect_left(holes, start) : bisect_right(holes, end)]:
                if hole > start:
                    found.append((start, hole - 1))
                start = hole + 1
            if start <= end:
                found.append((start, end))
        return found

    def runs(self) -> list[tuple[int, int]]:
        return list(zip(self._first, self._last, strict=True))


class LogMarks:
    """What a reader remembers of the log itself: marks of records it saw, and stamps the steward gave it.

    With each session the newest are held against the log before anything else is believed: a log that was set back
    shows by a record that is another one now, and the marks below say up to where both agree. Until that was answered,
    what comes is of a log not known to be the same, and waits here. Dense where they are new, sparser the older.
    """

    def __init__(self, remembered: Sequence[Stamp] = ()) -> None:
        #: what was seen here, and what the steward said and can be held to; both oldest first
        self.own = [each for each in remembered if not each.proof]
        self.stamps = [each for each in remembered if each.proof]
        self._session = 0
        self._doubted = time.monotonic()
        #: was there anything to hold against the log when this session began?
        self._is_in_doubt = bool(remembered)
        self._answered = -1
        self._waiting: deque[Stamp] = deque(maxlen=MARKS_KEPT)

    @property
    def session(self) -> int:
        """Counts what made us doubt; an answer to what was asked before that says nothing."""
        return self._session

    @property
    def is_checked(self) -> bool:
        return self._answered == self._session or not (self.own or self.stamps)

    def doubt(self) -> None:
        """Another connection: the log behind it may be another one."""
        self._session += 1
        self._doubted, self._is_in_doubt = time.monotonic(), bool(self.own or self.stamps)

    @property
    def is_awaited(self) -> bool:
        """Is there still to be an answer? Not for ever: the steward may be away, and nobody may have asked."""
        in_time = time.monotonic() < self._doubted + CHECK_PATIENCE
        return self._is_in_doubt and not self.is_checked and in_time

    async def until_checked(self) -> None:
        while self.is_awaited:
            await asyncio.sleep(CHECK_EVERY)

    def checked(self, session: int) -> None:
        """The log was held against what was remembered when `session` asked; what waited is of the same log."""
        self._answered = session
        if self.is_checked:
            waiting, self._waiting = self._waiting, deque(maxlen=MARKS_KEPT)
            for each in waiting:
                self.note(each)

    def saw(self, seq: int, mark: str) -> None:
        """This record was there."""
        if mark:
            self.note(Stamp(seq, mark))

    def note(self, stamp: Stamp) -> None:
        if not self.is_checked:
            self._waiting.append(stamp)
            return
        ladder = self.stamps if stamp.proof else self.own
        if ladder and ladder[-1].seq >= stamp.seq:
            return
        ladder.append(stamp)
        if len(ladder) > MARKS_KEPT:
            del ladder[1 : MARKS_KEPT // 2 : 2]

    def claims(self) -> list[Stamp]:
        """All of it, newest first."""
        return sorted([*self.own, *self.stamps], key=lambda each: -each.seq)

    def rewind(self, agreed: int) -> None:
        self.own = [each for each in self.own if each.seq <= agreed]
        self.stamps = [each for each in self.stamps if each.seq <= agreed]


@dataclass(frozen=True, slots=True)
class Position:
    """How far a channel had been seen at some moment."""

    through: int
    beyond: frozenset[int] = frozenset()

    def is_new(self, seq: int) -> bool:
        return seq > self.through and seq not in self.beyond


NOWHERE = Position(0)


@dataclass(slots=True)
class ChannelState:
    """One channel's memory."""

    through: int = 0
    beyond: set[int] = field(default_factory=set)
    #: surfaced and not settled yet, in order
    open: list[int] = field(default_factory=list)
    #: up to here the log itself was read; what came live after it may have holes that nobody knows of yet
    read: int = 0
    #: the newest that was surfaced, by this process or one before it: what comes below it comes late
    newest: int = 0
    #: subject -> the sequence above which some of it is known to be missing
    missing: dict[str, int] = field(default_factory=dict)
    #: whatever was not surfaced up to here comes as frames, and is not a lost live copy
    left_to_frames: int = 0

    def is_new(self, seq: int) -> bool:
        return seq > self.through and seq not in self.beyond

    @property
    def position(self) -> Position:
        return Position(self.through, frozenset(self.beyond))

    def see(self, seq: int, *, contiguous: bool) -> None:
        """This record was seen. `contiguous`: nothing of its channel lies between what was seen before and it."""
        if seq <= self.through:
            return
        if not contiguous:
            self.beyond.add(seq)
            return
        self.through = seq
        if self.beyond:
            self.beyond = {each for each in self.beyond if each > seq}

    def leave_to_frames(self, start: int, head: int) -> None:
        """What lies above `start`, up to `head`, is not read: it comes as frames."""
        self.missing.setdefault(FRAMES, max(self.through, start))
        self.left_to_frames = max(self.left_to_frames, head)

    def frames_reached(self, seq: int) -> None:
        """Frames brought everything up to `seq`, and it was settled."""
        if FRAMES in self.missing:
            self.missing[FRAMES] = max(self.missing[FRAMES], seq)
            if seq >= self.left_to_frames:
                del self.missing[FRAMES]

    def close_hole(self, through: int) -> None:
        """Everything up to `through` was seen now."""
        self.through = max(self.through, through)
        self.read = max(self.read, through)
        self.beyond = {seq for seq in self.beyond if seq > self.through}

    def settle(self, seq: int) -> None:
        if seq in self.open:
            self.open.remove(seq)

    def rewind(self, agreed: int) -> None:
        """The log is another one above `agreed`. What the application has in hand it still has to settle."""
        self.through, self.read = min(self.through, agreed), min(self.read, agreed)
        self.newest = min(self.newest, agreed)
        self.beyond = {seq for seq in self.beyond if seq <= agreed}

    @property
    def is_idle(self) -> bool:
        return not (self.open or self.beyond or self.missing)

    @property
    def settled_through(self) -> int:
        """Everything up to here was surfaced and settled."""
        return min((self.through, *(seq - 1 for seq in self.open), *self.missing.values()))


class ReadState:
    """The memory of one endpoint, kept in a state file if it is given one."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        #: which log the sequences are of; empty until somebody says
        self.epoch = ""
        #: which log the durable copies are of that come now; empty: they do not say, or we do not know ours
        self.copies_of = ""
        #: which records were there, so that a log that was set back is noticed
        self.marks = LogMarks()
        self.channels: OrderedDict[str, ChannelState] = OrderedDict()
        #: channels that are joined by name: never forgotten, and read from their join on whatever was forgotten
        self.pinned: set[str] = set()
        #: a channel that is not known may have been seen up to here
        self.forgotten = 0
        self._identities: OrderedDict[tuple[str, str], None] = OrderedDict()
        #: channel messages by identity: another epoch of the log has the same sequences for other messages
        self._unsettled: dict[Identity, int] = {}
        #: what happened since the state file was written
        self._journal = Journal(path)
        #: log sequence -> channel of what was handed out and not settled, by this process or one before it
        self.handed: dict[int, str] = {}
        #: channel -> the newest that a process before this one surfaced, for channels that are not known yet
        self._newest: dict[str, int] = {}
        #: direct messages have sequences of their own, so they are held by identity
        self._unsettled_direct: set[Identity] = set()
        #: log sequences of every message that was surfaced here, on any path, and of one's own that came back live
        self.known = Sequences()
        #: number of the last frame of each series up to which all were settled
        self.numbers: dict[str, int] = {}
        #: what a process before this one surfaced and settled is known
        self.remembers = path is not None and path.exists()
        #: where the newest that was settled is kept; None if nobody said
        self.kept_as: KeptAs | None = None
        #: it was forgotten once (`forget_all`): frames that were acknowledged before that do not come again, so what is
        #: missing is read from the log. For good, because it costs a look there at each start and nothing else
        self.reads_again = False
        #: hear (sender, id) of a channel message when it is settled
        self.on_settled: Callable[[Identity], None] = lambda _identity: None
        self._dirty = not self.remembers  # an empty memory is one too: whoever reads it knows that nothing was surfaced
        if path is not None and self.remembers:
            self._load(SavedState.read(path))
        self._load_journal()

    def _load(self, saved: SavedState) -> None:
        self._newest = saved.newest
        self.channels = OrderedDict((name, self._recalled(name, seq)) for name, seq in saved.channels.items())
        self.epoch, self.forgotten = saved.epoch, saved.forgotten
        self._identities = OrderedDict.fromkeys(saved.identities)
        self.known = Sequences(saved.sequences)
        self.numbers = saved.frames
        self.marks = LogMarks(saved.marks)
        self.reads_again, self.kept_as = saved.reads_again, saved.kept_as

    def _load_journal(self) -> None:
        """What happened after the state file was written, until the process ended."""
        handed, settled, kept = self._journal.read()
        self.kept_as = max(filter(None, (self.kept_as, kept)), default=None)
        for channel, seq in handed:
            self._newest[channel] = max(seq, self._newest.get(channel, 0))
            if channel in self.channels:
                self.channels[channel].newest = max(seq, self.channels[channel].newest)
        for _channel, seq in settled:
            self.known.add(seq)
        over = {each.seq for each in settled}
        self.handed = {each.seq: each.channel for each in handed if each.seq not in over}
        self._dirty = self._dirty or bool(settled)

    def _recalled(self, name: str, through: int) -> ChannelState:
        return ChannelState(through, read=through, newest=max(through, self._newest.get(name, 0)))

    def channel(self, name: str) -> ChannelState:
        known = self.channels.get(name)
        if known is None:
            through = 0 if name in self.pinned else self.forgotten
            known = self.channels[name] = self._recalled(name, through)
            if len(self.channels) > CHANNELS_KEPT:
                self._forget_a_channel()
        else:
            self.channels.move_to_end(name)
        return known

    def covered_by(self, pattern: str) -> list[str]:
        """The channels seen under a pattern; one that is named is among them, seen or not."""
        known = [name for name in self.channels if covers(pattern, name)]
        if is_channel(pattern) and pattern not in known:
            known.append(pattern)
        return known

    def _forget_a_channel(self) -> None:
        """The one used longest ago that nothing is open in. If there is none, it waits for the next time."""
        for name, seen in islice(self.channels.items(), min(LOOKED_AT, len(self.channels) - 1)):
            if seen.is_idle and name not in self.pinned:
                self.forgotten = max(self.forgotten, seen.through)
                del self.channels[name]
                return

    def is_known(self, seq: int) -> bool:
        """Was this record surfaced and settled here? Not known while the log may be another than the one it was of, nor
        if durable copies say that they are of another."""
        return seq in self.known and not self.marks.is_awaited and self.copies_of in ("", self.epoch)

    def adopt(self, epoch: str) -> None:
        self._dirty = self._dirty or epoch != self.epoch
        self.epoch = epoch

    def rewind(self, epoch: str, agreed: int) -> None:
        """The log went backwards: what is remembered by sequence holds up to `agreed` only."""
        self.adopt(epoch)
        self.forgotten = min(self.forgotten, agreed)
        self.known.cut(agreed)
        self.marks.rewind(agreed)
        self._dirty = True
        self.numbers.clear()
        self.handed = {seq: channel for seq, channel in self.handed.items() if seq <= agreed}
        self._newest = {name: min(seq, agreed) for name, seq in self._newest.items()}
        for seen in self.channels.values():
            seen.rewind(agreed)

    def note_kept(self, kept: KeptAs) -> None:
        """What is settled from now on is in an inbox up to this row."""
        if self.kept_as is None or kept.row > self.kept_as.row:
            self.kept_as, self._dirty = kept, True
            self._journal.note_kept(kept)

    def forget_all(self) -> None:
        """What was settled is kept nowhere any more: everything comes again, as far as the log has it.

        Which channels there are stays, so that all of them are read; so does which log it was.
        """
        self.channels = OrderedDict((name, ChannelState()) for name in self.channels)
        self.forgotten = 0
        self.known = Sequences()
        self.numbers = {}
        self.kept_as, self.reads_again, self._dirty = None, True, True
        for memory in (self._identities, self.handed, self._newest):
            memory.clear()

    def first_time(self, identity: tuple[str, str]) -> bool:
        """Was (sender, id) never surfaced here? A message is surfaced once, whatever record holds it."""
        if identity in self._identities:
            return False
        self._identities[identity] = None
        if len(self._identities) > IDENTITIES_KEPT:
            self._identities.popitem(last=False)
        return True

    def knows(self, identity: tuple[str, str]) -> bool:
        return identity in self._identities

    def forget(self, identity: tuple[str, str]) -> None:
        self._identities.pop(identity, None)

    def deliver(
        self, state: ChannelState, seq: int, identity: Identity, mark: str, contiguous: bool | None = None
    ) -> None:
        """The application gets this record and has to settle it: it comes again after a crash. `contiguous` is None if
        nothing is seen by it."""
        self.first_time(identity)
        self._unsettled[identity] = seq
        self.known.add(seq)
        state.open.append(seq)
        state.newest = max(state.newest, seq)
        self.marks.saw(seq, mark)
        if contiguous is not None:
            state.see(seq, contiguous=contiguous)

    def hand_out(self, channel: str, seq: int) -> None:
        """The application has it now: if it comes again, that is said."""
        self.handed[seq] = channel
        if self.path is not None:
            self._journal.note_handed(channel, seq)

    def is_held(self, identity: Identity) -> bool:
        """Was this channel message handed out, and not settled yet?"""
        return identity in self._unsettled

    def held_among(self, seqs: Collection[int]) -> list[Identity]:
        """Of messages at these sequences, those that were handed out and not settled yet."""
        return [identity for identity, seq in self._unsettled.items() if seq in seqs]

    def settle(self, channel: str, seq: int, identity: tuple[str, str]) -> None:
        self.channel(channel).settle(seq)
        self._dirty = True
        if self._unsettled.pop(identity, None) is not None:
            self.handed.pop(seq, None)
            if self.path is not None:
                self._journal.note_settled(channel, seq)
            self.on_settled(identity)

    def note_frames(self, numbers: Mapping[str, int]) -> None:
        self.numbers = dict(numbers)
        self._dirty = True

    def hold_direct(self, identity: Identity) -> None:
        self._unsettled_direct.add(identity)

    def forget_direct(self, identity: Identity) -> None:
        """It was not handed over: when it comes again it is the first time."""
        self._unsettled_direct.discard(identity)
        self.forget(identity)

    def settle_direct(self, identity: Identity) -> None:
        self._unsettled_direct.discard(identity)
        self._dirty = True

    def save(self) -> None:
        """Write what was settled. Cheap when nothing was."""
        if self.path is None or not self._dirty:
            return
        channels = {name: seen.settled_through for name, seen in self.channels.items()}
        if not self.reads_again:
            channels = {name: seq for name, seq in channels.items() if seq}
        unsettled = {*self._unsettled, *self._unsettled_direct}
        identities = [identity for identity in self._identities if identity not in unsettled]
        SavedState(
            epoch=self.epoch,
            forgotten=self.forgotten,
            channels=channels,
            identities=identities[-1_024:],
            newest=self._newest_unsettled(channels),
            sequences=self.known.without(self._unsettled.values()),
            frames=self.numbers,
            kept_as=self.kept_as,
            reads_again=self.reads_again,
            marks=[*self.marks.own, *self.marks.stamps],
        ).write(self.path)
        self._journal.restart(self.handed)
        self._dirty = False

    def _newest_unsettled(self, settled: Mapping[str, int]) -> dict[str, int]:
        """Where something newer than what is settled throughout was surfaced."""
        newest = self._newest | {name: seen.newest for name, seen in self.channels.items()}
        return {name: seq for name, seq in newest.items() if seq > settled.get(name, 0)}

    def close(self) -> None:
        self.save()
        self._journal.close()
