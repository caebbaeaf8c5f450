"""Durable copies: frames pulled from one's own mailbox, surfaced once, acknowledged when settled.

    pulled -> opened -> each message surfaced, or known already -> all settled -> kept in the state file -> acknowledged

One frame is pulled when the inbox has room for a whole one, or is empty if it never has. A frame waits for every
message in it that is in the application's hands, whichever copy of it surfaced: a live copy in memory is no reason to
acknowledge. What does not verify is counted and holds nothing up; what does not open is reported and kept aside.
A number that was skipped may be in the hands of a session that died, so it is given the broker's patience; then the gap
is told and what it held is read from the log (`recovery`). Who may receive is `session_lease`'s part.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidings.broker.acks import ACK_WAIT, Delivery
from tidings.broker.aio import end_tasks
from tidings.broker.client import Connection
from tidings.broker.private_files import write_private
from tidings.endpoint.channels import Channels
from tidings.endpoint.frame_numbers import FrameNumbers
from tidings.endpoint.gaps import FrameGap
from tidings.endpoint.history import History
from tidings.endpoint.pull import pull
from tidings.endpoint.records import LiveRecord
from tidings.endpoint.recovery import Recovery
from tidings.endpoint.unsettled import InHand, Unsettled
from tidings.errors import DeliveryLost, MalformedFrame, TidingsError, UnhealthyError
from tidings.failpoints import reach
from tidings.nats.errors import NatsError
from tidings.wire.frames import MAX_FRAME_MESSAGES, Block, Frame, Lost, decode_frame, open_block

if TYPE_CHECKING:
    from tidings.endpoint.endpoint import Endpoint

#: a pull lasts so long at first, and while somebody wants to know whether older copies are still to come; each that
#: brings nothing makes the next one longer
EXPIRES_SOON, EXPIRES = 0.5, 10.0
REFUSED_PAUSE = 0.5
#: a frame that is missing may be with a session that died: the broker delivers it again after ACK_WAIT
GAP_PATIENCE = ACK_WAIT + 10.0
#: frames that did not open, kept for whoever wants to look
ASIDE = 16
log = logging.getLogger(__name__)
Identity = tuple[str, str]


@dataclass(eq=False)
class Batch:
    """Messages that must all be settled before something is done."""

    then: Callable[[], None]
    #: those in the application's hands
    waiting: set[Identity] = field(default_factory=set)
    #: channel -> the newest sequence of it in here
    reached: dict[str, int] = field(default_factory=dict)
    #: every message of it was offered
    offered: bool = False

    def note(self, record: LiveRecord, *, is_held: bool) -> None:
        self.reached[record.channel] = max(record.seq, self.reached.get(record.channel, 0))
        if is_held:
            self.waiting.add(record.identity)


class DurableCopies:
    """The durable copies of one endpoint."""

    def __init__(self, endpoint: Endpoint, channels: Channels, history: History) -> None:
        self.endpoint = endpoint
        self.channels = channels
        self.link = endpoint.link
        self.identity = endpoint.identity
        self.numbers = FrameNumbers(endpoint.seen.numbers)
        self.recovery = Recovery(endpoint, history)
        #: frames the broker waits to hear about
        self.held: InHand[Unsettled] = InHand(self.link, self._start)
        #: bytes of frames that did not open, the newest
        self.aside: deque[bytes] = deque(maxlen=ASIDE)
        #: everything the deliver floor spoke of up to here has arrived
        self.caught_up = 0
        #: where the last frame with messages lay
        self._last: tuple[int, int] | None = None
        #: (series, first, last) of frames that were skipped and may still come
        self._skipped: set[tuple[str, int, int]] = set()
        #: frames that a session before this one had in hand and did not settle, until they come or would have come
        self._abroad = 0
        self._abroad_until = 0.0
        self._told: set[Lost] = set()
        self._batches: set[Batch] = set()
        self._arrived: asyncio.Queue[tuple[Unsettled, Frame, int]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pulling: asyncio.Task[None] | None = None
        self.begun = self._closed = False

    def begin(self) -> None:
        """Pull from now on, on this session and every later one."""
        if self.begun or self._closed:
            return
        self.begun = True
        self.endpoint.seen.on_settled = self._on_settled
        self.channels.memberships.frames_through = lambda: self.caught_up
        self.channels.memberships.older_frames = self.are_older_awaited
        self._start(self._offer_arrived())
        self._start(self.held.keep_in_progress())
        self.link.on_session(self._on_session)
        if self.link.state == "ready":
            self._pulling = self._start(self._pull_all(self.link.connection))

    # --- pulling ---

    async def _on_session(self, connection: Connection) -> None:
        """A pull does not survive its connection, so every session begins with a new one."""
        if self._closed:
            return
        if self._pulling is not None:
            self._pulling.cancel()
        self._pulling = self._start(self._pull_all(connection))

    async def _pull_all(self, connection: Connection) -> None:
        stream, consumer = self.identity.subjects.delivery_stream, f"dlv_{self.identity.id}"
        expires = EXPIRES_SOON
        while not connection.is_closed:
            await self._arrived.join()
            await self._wait_for_room()
            if self._closed or self.endpoint.session.superseded.is_set():
                return
            floor, came = self.endpoint.roster.backstop.floor, False

            async def take(message: Any, delivery: Delivery, floor: int = floor) -> None:
                nonlocal came
                came = True
                await self._take(message.data, delivery, floor if not delivery.pending else 0)

            try:
                ended = await pull(connection, stream, consumer, 1, expires, take)
            except (NatsError, OSError) as error:
                log.debug("a pull of %s ended with %s", self.identity.name, error)
                ended = "refused"
            if ended == "refused":
                await asyncio.sleep(REFUSED_PAUSE)
            elif ended == "over" and not came:
                self.caught_up = max(self.caught_up, floor)
                expires = EXPIRES_SOON if self._is_awaited() else min(EXPIRES, expires * 2)

    async def _wait_for_room(self) -> None:
        """Room for a whole frame; an inbox that can never hold one is filled from a frame as it is emptied."""
        inbox = self.endpoint.inbox
        await inbox.wait_for_room(min(inbox.size, MAX_FRAME_MESSAGES))

    def expect(self, count: int) -> None:
        """A session before this one died with so many frames in hand: the broker brings them after its patience."""
        self._abroad = count
        self._abroad_until = asyncio.get_running_loop().time() + GAP_PATIENCE

    def are_older_awaited(self) -> bool:
        """May frames still come that are older than those that came?"""
        self._skipped = {each for each in self._skipped if self.numbers.missing(*each) is not None}
        return bool(self._skipped) or (self._abroad > 0 and asyncio.get_running_loop().time() < self._abroad_until)

    def _is_awaited(self) -> bool:
        """Does a membership that was not read from the log wait for what frames bring, and is it being made?"""
        wanted = max((each.left_to_frames for each in self.channels.memberships.values()), default=0)
        return self.caught_up < wanted and self.endpoint.roster.backstop.running

    async def _take(self, data: bytes, delivery: Delivery, floor: int) -> None:
        held = self.held.get(delivery.seq)
        if held is not None:
            self.held.come_again(held, delivery)
            return
        held = self.held[delivery.seq] = Unsettled(delivery)
        if delivery.count > 1:
            self._abroad = max(0, self._abroad - 1)
        try:
            frame = decode_frame(data)
            if frame.owner != self.identity.id:
                raise MalformedFrame(f"it is for {frame.owner}")
        except MalformedFrame as error:
            await self._put_aside(held, data, error)
            return
        reach("endpoint.frame_pulled")
        self._arrived.put_nowait((held, frame, floor))

    async def _put_aside(self, held: Unsettled, data: bytes, error: MalformedFrame) -> None:
        """Kept for whoever wants to look, then acknowledged, so that it blocks nobody."""
        if self.endpoint.keep_aside is not None:
            await self.endpoint.keep_aside(data, f"frame {held.delivery.seq} does not open: {error}")
        self.aside.append(data)
        where, state = "in memory", self.endpoint.seen.path
        if state is not None:
            beside = state.with_name(f"{state.name}.frame-{held.delivery.seq % ASIDE}")
            with suppress(OSError):
                write_private(beside, data.hex())
                where = f"in {beside}"
        self.endpoint.opener.refused["frame"] += 1
        self._report(
            MalformedFrame(
                f"frame {held.delivery.seq} in the mailbox of {self.identity.name} does not open ({error}); it is kept "
                f"{where}. If messages are missing, the next frame shows it and they are read from the log"
            )
        )
        self.held.acknowledge(held)

    # --- offering ---

    async def _offer_arrived(self) -> None:
        while True:
            held, frame, floor = await self._arrived.get()
            try:
                await self._offer_frame(held, frame)
                self.caught_up = max(self.caught_up, floor)
            except TidingsError as error:  # not acknowledged, so it comes again with the next session
                self._report(error)
            finally:
                self._arrived.task_done()

    async def _offer_frame(self, held: Unsettled, frame: Frame) -> None:
        self._check_number(frame)
        for lost in frame.lost:
            self._tell_lost(lost)
        if frame.lost:
            await self.endpoint.events.handled("notice")  # the broker forgets the frame once this one has told it
        batch = self._batch(lambda: self._frame_settled(held, frame, batch))
        for block in frame.blocks:
            await self._offer_block(block, batch, again=held.delivery.count > 1)
        self._all_offered(batch)

    async def _offer_block(self, block: Block, batch: Batch, *, again: bool) -> None:
        opener = self.endpoint.opener
        try:
            records = open_block(block)
        except MalformedFrame as error:
            opener.refused["frame"] += 1
            self._report(MalformedFrame(f"a part of a frame does not open ({error}): it is read from the log"))
            await self._recover(block.first - 1, block.last, block.count, batch, own_count=True)
            return
        for kept in records:
            record = opener.kept(kept)
            if record is not None:  # else it was counted by its reason, and nobody will ever settle it
                await self._offer(record, batch, again=again)

    async def _offer(self, record: LiveRecord, batch: Batch, *, again: bool = False) -> None:
        redelivered = again or self.channels.is_forgotten(record)
        inbox = self.endpoint.inbox
        ahead = self.are_older_awaited()
        while not self.channels.surfacing.offer_durable(record, redelivered=redelivered, ahead=ahead):
            await inbox.wait_for_room()
            await asyncio.sleep(0 if inbox.room else REFUSED_PAUSE)  # closed and full: until we are closed too
        batch.note(record, is_held=self.endpoint.seen.is_held(record.identity))

    def _tell_lost(self, lost: Lost) -> None:
        if lost in self._told:
            return
        self._told.add(lost)
        self._report(
            DeliveryLost(
                f"{lost.count} messages of {lost.channel} between {lost.first} and {lost.last} will not be delivered: "
                f"{lost.cause}",
                lost.channel,
                lost.first,
                lost.last,
                lost.count,
                lost.cause,
            )
        )

    def _report(self, error: TidingsError) -> None:
        self.endpoint.events.emit("error", error)

    # --- numbers ---

    def _check_number(self, frame: Frame) -> None:
        skipped = self.numbers.hear(frame.series, frame.number)
        if skipped is not None:
            self._skipped.add((frame.series, *skipped))
            self._start(self._judge_gap(frame, skipped, self._last[0] if self._last else 1))
        sequences = [(block.first, block.last) for block in frame.blocks]
        if sequences:
            self._last = min(first for first, _ in sequences), max(last for _, last in sequences)

    async def _judge_gap(self, frame: Frame, skipped: tuple[int, int], before: int) -> None:
        """Wait as long as a frame may be elsewhere. What is missing then is read from the log, and told.

        A frame says where the one before it lay. Of several that are missing the others lie above `before`, where the
        last frame that did come began.
        """
        await asyncio.sleep(GAP_PATIENCE)
        missing = self.numbers.missing(frame.series, *skipped)
        self._skipped.discard((frame.series, *skipped))
        if missing is None:
            return
        first, last = missing
        newest = max((block.last for block in frame.blocks), default=0)
        start, through, count = frame.prev or (before, newest, None)
        if first != last or last != frame.number - 1:
            start, through, count = min(start or before, before), max(through, newest), None
        batch = self._batch(lambda: self._numbers_settled(frame.series, first, last))
        recovered = await self._recover(start - 1, through, count, batch)
        self.endpoint.events.emit("gap", FrameGap(frame.series, first, last, start - 1, through, count, recovered))
        self._all_offered(batch)

    async def _recover(
        self, after: int, through: int, count: int | None, batch: Batch, *, own_count: bool = False
    ) -> int:
        """Read a range of the log and surface what is new; what is not there any more is told."""
        there = surfaced = 0
        for record in await self.recovery.read(after, through):
            own = record.received.sender == self.identity.id
            there += own_count or not own
            surfaced += not own and record.seq not in self.endpoint.seen.known
            await self._offer(record, batch)
        if count is not None and there < count:
            self._report(
                DeliveryLost(
                    f"{count - there} of {count} messages between {after + 1} and {through} did not arrive, and the "
                    "log does not have them any more in the channels this agent is in",
                    None,
                    after + 1,
                    through,
                    count - there,
                    "not in the log",
                )
            )
            await self.endpoint.events.handled("notice")
        return surfaced

    # --- settling ---

    def _batch(self, then: Callable[[], None]) -> Batch:
        batch = Batch(then)
        self._batches.add(batch)
        return batch

    def _all_offered(self, batch: Batch) -> None:
        batch.offered = True
        self._finish_if_settled(batch)

    def _on_settled(self, identity: Identity) -> None:
        for batch in list(self._batches):
            if identity in batch.waiting:
                batch.waiting.discard(identity)
                self._finish_if_settled(batch)

    def _finish_if_settled(self, batch: Batch) -> None:
        if batch.offered and not batch.waiting and batch in self._batches:
            self._batches.discard(batch)
            batch.then()

    def _frame_settled(self, held: Unsettled, frame: Frame, batch: Batch) -> None:
        self._numbers_settled(frame.series, frame.number)
        if self.numbers.is_whole(frame.series, frame.number):
            for channel, seq in batch.reached.items():
                self.endpoint.seen.channel(channel).frames_reached(seq)
        self._save()  # before the broker forgets the frame: whoever is killed now gets it again, and knows it
        self.held.acknowledge(held)

    def _save(self) -> None:
        """A state file that cannot be written costs repetitions after a restart, and no message."""
        try:
            self.endpoint.seen.save()
        except OSError as error:
            self._report(UnhealthyError(f"{self.endpoint.seen.path} cannot be written ({error}): make room for it"))

    def _numbers_settled(self, series: str, first: int, last: int | None = None) -> None:
        self.numbers.settle(series, first, last)
        self.endpoint.seen.note_frames(self.numbers.settled_through())

    # --- life ---

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.endpoint.events.emit("error", error)

    async def _until_nobody_waits(self) -> None:
        """Once the broker has heard that the pull ended, it hands no frame to it that would be out of reach."""
        with suppress(TidingsError, NatsError, OSError, TimeoutError):
            await self.link.connection.flush(timeout=2)

    async def close(self) -> None:
        """Stop pulling, let acknowledgements under way finish, and give back what was not settled."""
        if self._closed:
            return
        if self._pulling is not None:
            await end_tasks([self._pulling])
            await self._until_nobody_waits()
        await self.held.finish()
        self._closed = True
        self.channels.memberships.frames_through = self.channels.memberships.older_frames = None
        await self.held.give_back()
        await end_tasks(self._tasks)
