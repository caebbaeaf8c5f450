"""From a record to a message in the inbox: opened and verified, whatever it came in, and delivered once.

A message comes live, from the log, inside a hole, or as a durable copy. All become the same `LiveRecord`, so what is
delivered live and what is read back have the same sequence. `RecordOpener` counts what does not verify by reason. What
came over a link is `UNDECIDED` until the links of the space are known, and is opened again later.

`Intake` knows a message by its sequence and by (sender, id), and never delivers an agent's own. Every `offer` returns
False if the inbox has no room: then nothing was noted, and the caller offers the message again. Where copies come
from, and when to offer again, is not known here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from enum import Enum
from functools import partial
from typing import Final, Literal

import msgspec

from tidings.client.incoming import Events, Inbox, Incoming
from tidings.client.links import Judge, LinkTable
from tidings.client.presence import Presence
from tidings.client.read_state import ChannelState, ReadState
from tidings.contract.channels import RawRecord
from tidings.nats.core import Msg
from tidings.util.task_ends import end_tasks
from tidings.wire.envelope import Received, open_record
from tidings.wire.frames import FrameRecord
from tidings.wire.message import Message, Priority
from tidings.wire.names import covers, is_channel
from tidings.wire.records import Fields, fields_of, parse_time, read_copy, record_mark
from tidings.wire.roster import Attention, Level
from tidings.wire.subjects import Subjects

_QUIETNESS: dict[Level, int] = {"normal": 0, "quiet": 1, "muted": 2}


class LiveRecord(msgspec.Struct, frozen=True):
    """A verified channel message with its place in the log."""

    seq: int
    time_ns: int
    channel: str
    sender: str
    message: Message
    #: (sender, id): what identifies a message everywhere
    identity: tuple[str, str]
    #: tells it from another record at the same sequence of a log that was set back
    mark: str = ""
    #: of what was said in another space: the id of that space, and the name it has here, if it has one
    origin: str = ""
    space: str = ""


class Undecided(Enum):
    """It came over a link, and whether that may let it in is not known yet."""

    UNDECIDED = "undecided"


UNDECIDED: Final = Undecided.UNDECIDED
Opened = LiveRecord | Literal[Undecided.UNDECIDED] | None


class LiveCopy(msgspec.Struct, frozen=True):
    """A copy of the log that arrived: where it belongs, and the message in it if it may be surfaced."""

    subject: str
    seq: int
    #: the record before it on this subject; 0 if the log has none
    previous: int
    record: LiveRecord | None
    #: what arrived, if it is to be opened again once more links are known
    undecided: Msg | None = None


class RecordOpener:
    """Opens records for one endpoint and counts what it refuses."""

    def __init__(self, subjects: Subjects, space_id: str, links: LinkTable | None = None) -> None:
        self.subjects = subjects
        self.space_id = space_id
        self.links = links
        self._via_root = f"{subjects.root}.via."
        self.refused: Counter[str] = Counter()
        self._root = f"{subjects.root}."
        self._live_root = f"{subjects.root}.live."

    def live(self, message: Msg) -> LiveCopy | None:
        """A copy from `td.S.live.>`: the broker's word is the tail of its headers, the rest is the sender's."""
        try:
            own, subject, seq, time_ns, previous = read_copy(message.block)
        except (KeyError, ValueError):
            # an answer that somebody aimed at a live subject: no log sequence, so not a copy of the log
            self.refused["not_a_log_copy"] += 1
            return None
        if message.raw_subject != f"{self._live_root}{subject.removeprefix(self._root)}".encode():
            self.refused["not_a_log_copy"] += 1
            return None
        opened = self._open(seq, time_ns, subject, own, message.data)
        if opened is UNDECIDED:
            return LiveCopy(subject, seq, previous, None, message)
        return LiveCopy(subject, seq, previous, opened)

    async def learn_links(self, seq: int) -> None:
        """Have it known what links let in at `seq`: what was undecided there is not any more."""
        if self.links is not None:
            await self.links.learn(seq)

    def stored(self, record: RawRecord) -> Opened:
        """Opens a record of a history page."""
        fields = fields_of(record.headers)
        return self._open(record.seq, parse_time(record.time), record.subject, fields, record.payload)

    def kept(self, kept: FrameRecord) -> Opened:
        """A record in a frame."""
        return self._open(kept.seq, kept.time_ns, f"{self.subjects.root}.{kept.tail}", kept.headers, kept.payload)

    def _open(self, seq: int, time_ns: int, subject: str, fields: Fields | None, payload: bytes) -> Opened:
        if fields is None:
            self.refused["header"] += 1
            return None
        judge = None
        if self.links is not None and subject.startswith(self._via_root):
            judge = Judge(self.links, seq, time_ns)
        opened = open_record(self.subjects, self.space_id, subject, fields, payload, judge)
        if judge is not None and judge.is_open:
            return UNDECIDED
        if not isinstance(opened, Received) or opened.kind != "chat":
            self.refused["wrong_kind" if isinstance(opened, Received) else opened.reason] += 1
            return None
        sender, message = opened.sender, opened.message
        mark = record_mark(time_ns, subject, payload)
        record = LiveRecord(seq, time_ns, opened.destination, sender, message, (sender, message.id), mark)
        if opened.admission is None or self.links is None:
            return record
        space = self.links.space_name(opened.link, opened.origin, seq)
        return msgspec.structs.replace(record, origin=opened.origin, space=space)


class Intake:
    """Turns the records that arrive at one endpoint into messages in its inbox."""

    def __init__(
        self,
        own_id: str,
        opener: RecordOpener,
        read_state: ReadState,
        presence: Presence,
        introduce: Callable[[Incoming], Incoming],
        inbox: Inbox,
        events: Events,
    ) -> None:
        self.own_id = own_id
        self.opener = opener
        self.read_state = read_state
        self.inbox = inbox
        self.events = events
        self.introduce = introduce
        self._presence = presence
        #: takes back what the application returns (`redelivery.py`)
        self.nak: Callable[[Incoming, float | None, str], Awaitable[None]] | None = None
        #: delivering a direct message tells its sender `delivered`; whoever keeps mail durably tells it itself
        self.tells_delivered = True
        #: given the bytes of a direct message or frame that does not open, and why, before the broker may forget it
        self.keep_aside: Callable[[bytes, str], Awaitable[None]] | None = None
        self._announcing: set[asyncio.Task[None]] = set()

    def offer(self, record: LiveRecord, *, contiguous: bool, **flags: bool) -> bool:
        """A copy in the order of the log. `contiguous`: nothing lies between what was seen of its channel and it."""
        memory = self.read_state
        state = memory.channel(record.channel)
        if not state.is_new(record.seq) or record.seq in memory.known:
            return True
        if record.sender == self.own_id:
            memory.known.add(record.seq)  # never delivered, and nothing to fetch a block of durable copies for
        elif memory.knows(record.identity):
            self.opener.refused["repeated"] += 1
        else:
            return self._deliver(record, state, contiguous=contiguous, **flags)
        memory.marks.saw(record.seq, record.mark)
        state.see(record.seq, contiguous=contiguous)
        return True

    def offer_backfilled(self, record: LiveRecord, *, historical: bool) -> bool:
        """A record that others of its channel have passed."""
        if self.read_state.knows(record.identity):
            return True
        state = self.read_state.channel(record.channel)
        return self._deliver(record, state, contiguous=False, historical=historical)

    def offer_durable(self, record: LiveRecord, *, redelivered: bool, ahead: bool = False) -> bool:
        """A durable copy. A copy in the application's hands stays the only one: whoever offers this one waits until
        that was settled."""
        memory = self.read_state
        if record.sender == self.own_id or memory.is_known(record.seq):
            return True
        if memory.knows(record.identity):
            self.opener.refused["repeated"] += 1
            return True
        state = memory.channel(record.channel)
        return self._deliver(record, state, redelivered=redelivered, durable=True, ahead=ahead)

    def _deliver(
        self,
        record: LiveRecord,
        state: ChannelState,
        *,
        contiguous: bool | None = None,
        redelivered: bool = False,
        **flags: bool,
    ) -> bool:
        """Puts a message into the inbox. It is `late` if a newer one of its channel was delivered before, and
        `redelivered` if it was itself: by whichever process, as far as it is remembered. `contiguous` is None if it
        says nothing of what its channel had before it."""
        if not self.inbox.room:
            return False
        memory = self.read_state
        again = redelivered or record.seq in memory.handed
        incoming = self.incoming(record, late=record.seq < state.newest, redelivered=again, **flags)
        incoming._settle = partial(memory.settle, record.channel, record.seq, record.identity)
        incoming._nak = self.nak
        memory.deliver(state, record.seq, record.identity, record.mark, contiguous)
        if self.events.is_heard("message"):
            memory.hand_out(record.channel, record.seq)
        else:
            incoming._on_taken = partial(memory.hand_out, record.channel, record.seq)
        self.inbox.put(incoming)
        if incoming._naming is None:
            self.events.emit("message", incoming)
        else:
            announcing = asyncio.create_task(self._announce(incoming))
            self._announcing.add(announcing)
            announcing.add_done_callback(self._announcing.discard)
        return True

    async def _announce(self, incoming: Incoming) -> None:
        await incoming.named()
        self.events.emit("message", incoming)

    def incoming(
        self,
        record: LiveRecord,
        *,
        historical: bool = False,
        late: bool = False,
        ahead: bool = False,
        redelivered: bool = False,
        durable: bool = False,
    ) -> Incoming:
        """A channel message as an application sees it."""
        message = record.message
        mentions_me = bool(message.mentions) and any(each.id == self.own_id for each in message.mentions)
        attention = self._presence.attention
        incoming = Incoming(
            kind="channel",
            sender=message.sender,
            message=message,
            channel=record.channel,
            seq=record.seq,
            time_ns=record.time_ns,
            historical=historical,
            ahead=ahead,
            late=late,
            redelivered=redelivered,
            durable=durable,
            mentions_me=mentions_me,
            wakes=not historical and wakes(attention, "channel", record.channel, message.priority, mentions_me),
            origin=record.space,
            origin_id=record.origin,
        )
        return self.introduce(incoming)

    async def put(self, incoming: Incoming) -> None:
        """Puts a message into the inbox as soon as its names are known and there is room."""
        await incoming.named()
        await self.inbox.wait_for_room()
        self.inbox.put(incoming)
        self.events.emit("message", incoming)

    async def close(self) -> None:
        await end_tasks(self._announcing)


def wakes(attention: Attention, kind: str, channel: str | None, priority: Priority, mentions_me: bool) -> bool:
    """Should a message of this kind, on this channel, wake an agent that set `attention`?

    low priority   never wakes
    direct, task   wakes
    muted channel  never wakes
    a mention      wakes
    now            wakes, but not an agent in focus
    the rest       wakes an open agent on a channel that is not quiet

    This never decides what is kept: a message that wakes nobody is in the inbox all the same.
    """
    if priority == "low":
        return False
    if kind != "channel" or channel is None:
        return True
    level = level_of(attention, channel)
    if level == "muted":
        return False
    if mentions_me:
        return True
    if attention.mode == "focus":
        return False
    return priority == "now" or (level == "normal" and attention.mode == "open")


def level_of(attention: Attention, channel: str) -> Level:
    """The level of the most specific pattern that covers `channel`; between equals the quieter one."""
    if not attention.channels:
        return "normal"
    levels = [
        (_specificity(pattern), _QUIETNESS[level], level)
        for pattern, level in attention.channels.items()
        if covers(pattern, channel)
    ]
    return max(levels)[2] if levels else "normal"


def _specificity(pattern: str) -> tuple[bool, int, bool]:
    """The channel itself, then more literal tokens, then `*` before `>`."""
    tokens = pattern.split(".")
    return is_channel(pattern), sum(token not in ("*", ">") for token in tokens), tokens[-1] != ">"
