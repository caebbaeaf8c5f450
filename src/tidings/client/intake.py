"""The last stage of receiving: each message reaches the inbox once, whichever copy of it comes first.

A message is known by its sequence and by (sender, id); an agent's own messages are never delivered. Every `offer`
returns False if the inbox has no room: then nothing was noted, and the caller offers the message again. Where
copies come from, and when to offer again, is not known here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from tidings.client.incoming import Events, Inbox, Incoming, wakes
from tidings.client.presence import Presence
from tidings.client.read_state import ChannelState, ReadState
from tidings.client.records import LiveRecord, RecordOpener
from tidings.util.task_ends import end_tasks


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
        elif not self._deliver(record, state, **flags):
            return False
        memory.marks.saw(record.seq, record.mark)
        state.see(record.seq, contiguous=contiguous)
        return True

    def offer_backfilled(self, record: LiveRecord, *, historical: bool) -> bool:
        """A record that others of its channel have passed."""
        memory = self.read_state
        if not memory.knows(record.identity):
            state = memory.channel(record.channel)
            if not self._deliver(record, state, historical=historical):
                return False
            memory.marks.saw(record.seq, record.mark)
            state.see(record.seq, contiguous=False)
        return True

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
        if not self._deliver(record, state, redelivered=redelivered, durable=True, ahead=ahead):
            return False
        memory.marks.saw(record.seq, record.mark)
        return True

    def _deliver(self, record: LiveRecord, state: ChannelState, *, redelivered: bool = False, **flags: bool) -> bool:
        """Puts a message into the inbox. It is `late` if a newer one of its channel was delivered before, and
        `redelivered` if it was itself: by whichever process, as far as it is remembered."""
        if not self.inbox.room:
            return False
        memory = self.read_state
        again = redelivered or record.seq in memory.handed
        incoming = self.incoming(record, late=record.seq < state.newest, redelivered=again, **flags)
        incoming._settle = partial(memory.settle, record.channel, record.seq, record.identity)
        incoming._nak = self.nak
        memory.hold(record.seq, record.identity)
        state.deliver(record.seq)
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
