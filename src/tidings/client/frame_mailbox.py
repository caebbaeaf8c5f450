"""Durable copies: frames from one's own mailbox, each message surfaced once, acknowledged when all are settled.

    pulled -> opened -> each message surfaced, or known already -> all settled -> kept in the state file -> acknowledged

A block that a frame only names is not fetched (`BlockReader`) if every message in it is known; if it is gone, its
messages are read from the log, under the access of now.

One frame is pulled when the inbox has room for a usual one, or is empty if it never has. A frame waits for every
message in it that is in the application's hands, whichever copy of it surfaced: a live copy in memory is no reason to
acknowledge. What does not verify is counted and holds nothing up; what does not open is reported and kept aside.
A number that was skipped may be in the hands of a session that died, so it is given the broker's patience; then the gap
is told and what it held is read from the log (`backfill.py`). Who may receive is `session_lease.py`'s part.

`BlockReader` fetches the sealed blocks that frames name from where everybody fetches them, opens and checks them. One
request per block, a few at a time, each tried for a moment and not for long: a block may be gone, because the
broker removes the oldest, and then the log has its messages. So nothing here depends on why it did not come. In a
cluster the server that is asked may not have it yet, or stand still, and is asked again; elsewhere what is not there
does not appear. A block that is not what its reference names is counted, and not asked for twice.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from tidings.client.channels import Channels
from tidings.client.connection import AgentConnection
from tidings.client.intake import UNDECIDED, Intake, LiveRecord, RecordOpener
from tidings.client.mailbox import REFUSED_PAUSE, AgentMailbox, PendingAck
from tidings.client.notices import FrameGap
from tidings.client.read_state import Sequences
from tidings.client.session_lease import SessionLease
from tidings.errors import (
    DeliveryLost,
    DeniedError,
    MalformedFrame,
    OutcomeUnknown,
    UnhealthyError,
    UnreachableError,
)
from tidings.nats.acks import ACK_WAIT, DeliveryInfo
from tidings.nats.client import Connection
from tidings.nats.errors import NatsError, NoResponders, PublishDenied
from tidings.util.failpoints import reach
from tidings.util.private_files import write_private
from tidings.util.task_ends import end_tasks
from tidings.wire.frames import Block, Frame, FrameRecord, Lost, Ref, decode_frame, open_block, open_ref, without_keys

#: a pull lasts so long at first, and while somebody wants to know whether older copies are still to come; each that
#: brings nothing makes the next one longer
EXPIRES_SOON, EXPIRES = 0.5, 10.0
#: a frame that is missing may be with a session that died: the broker delivers it again after ACK_WAIT
GAP_PATIENCE = ACK_WAIT + 10.0
#: messages there is room for before a frame is pulled; one with more is filled in as the inbox is emptied
FRAME_ROOM = 256
#: frames that did not open, kept for whoever wants to look
ASIDE = 16
SERIES_KEPT = 4
#: before the steward is asked again what links let in
LINKS_PAUSE = 1.0
Identity = tuple[str, str]
#: a block that is fetched; None if its messages are to be had from the log
Fetch = asyncio.Task[tuple[FrameRecord, ...] | None]


@dataclass(slots=True)
class Series:
    """The frames of one series."""

    #: the number before the first one that counts here
    base: int
    heard: Sequences = field(default_factory=Sequences)
    settled: Sequences = field(default_factory=Sequences)

    @property
    def settled_through(self) -> int:
        return self.settled.run_from(self.base + 1)


class FrameNumbers:
    """Which frames came and which were settled, by their numbers; pure.

    A series counts from 1 without holes. A number that was heard is a repeat; one that is skipped may still come,
    because a frame in the hands of a session that died comes again after the broker's patience: whoever asks judges it
    later. What was settled without a hole is what a later process goes on from.
    """

    def __init__(self, known: Mapping[str, int]) -> None:
        self._series: OrderedDict[str, Series] = OrderedDict()
        for name, number in known.items():
            self._series[name] = Series(number)

    def hear(self, name: str, number: int) -> tuple[int, int] | None:
        """Note a frame. Answers the numbers just before it that did not come, if there are any."""
        series = self._series.get(name)
        if series is None:
            # Of the first series ever met nobody knows where this process came in; any later one is met from its start.
            series = self._series[name] = Series(0 if self._series else number - 1)
            while len(self._series) > SERIES_KEPT:
                self._series.popitem(last=False)
        self._series.move_to_end(name)
        if number <= series.base or number in series.heard:
            return None
        reached = max(series.base, series.heard.last_before(number))
        series.heard.add(number)
        return (reached + 1, number - 1) if reached + 1 < number else None

    def missing(self, name: str, first: int, last: int) -> tuple[int, int] | None:
        """What of a range did not come until now: its first and its last."""
        series = self._series.get(name)
        if series is None:
            return None
        while first <= last and first in series.heard:
            first = series.heard.run_from(first) + 1
        while last >= first and last in series.heard:
            last = series.heard.run_to(last) - 1
        return (first, last) if first <= last else None

    def settle(self, name: str, first: int, last: int | None = None) -> None:
        """These frames were settled, or given up and told."""
        series = self._series.get(name)
        if series is not None:
            series.heard.add(first, last)
            series.settled.add(first, last)

    def is_whole(self, name: str, number: int) -> bool:
        """Was every frame up to this one settled?"""
        series = self._series.get(name)
        return series is not None and number <= series.settled_through

    def settled_through(self) -> dict[str, int]:
        return {name: series.settled_through for name, series in self._series.items()}


@dataclass(eq=False)
class AckBatch:
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

    def note_known(self, ref: Ref, held: Iterable[Identity]) -> None:
        """Messages of a block that are known already, of which these are still in the application's hands."""
        self.reached[ref.channel] = max(ref.last, self.reached.get(ref.channel, 0))
        self.waiting.update(held)


#: requests under way
AT_ONCE = 8
#: for one answer; the broker forgets a request after BLOCK_ANSWER
PATIENCE = 2.0
#: pauses before a server of a cluster is asked again
CLUSTER_PAUSES = (0.05, 0.15, 0.5, 1.5)
#: before a connection that is gone is waited for again
RECONNECT_PAUSE = 0.05
CONNECTION_PATIENCE = 30.0
Missing = Literal["not there", "no answer", "refused"]


class BlockReader:
    """Gets blocks for one endpoint."""

    def __init__(self, connection: AgentConnection, opener: RecordOpener) -> None:
        self.connection = connection
        self.opener = opener
        #: requests that were made
        self.asked = 0
        self._under_way = asyncio.Semaphore(AT_ONCE)

    async def records(self, epoch: str, ref: Ref) -> tuple[FrameRecord, ...] | None:
        """The records of a block, verified to be those its reference names; None if they are to be had elsewhere."""
        data = await self._get(ref.name.hex())
        if data is None:
            return None
        try:
            return open_ref(self.opener.space_id, epoch, ref, data)
        except MalformedFrame:
            self.opener.refused["block"] += 1
            return None

    async def _get(self, name: str) -> bytes | None:
        tries = 0
        while True:
            found, pauses = await self._ask(name)
            if isinstance(found, bytes):
                return found
            if tries >= len(pauses):
                return None
            await asyncio.sleep(pauses[tries])
            tries += 1

    async def _ask(self, name: str) -> tuple[bytes | Missing, Sequence[float]]:
        """One request on a connection that stays: what came of it, and when to ask again if it is nothing."""
        while True:
            try:
                async with self._under_way:
                    connection = await self.connection.ready(CONNECTION_PATIENCE)
                    self.asked += 1
                    answer = await connection.request(self.opener.subjects.block_get(name), timeout=PATIENCE)
            except (NoResponders, PublishDenied):  # no such stream, or no right to ask
                return "refused", ()
            except TimeoutError:
                return "no answer", CLUSTER_PAUSES if connection.info.get("cluster") else (0.0,)
            except (NatsError, UnreachableError, OSError):
                await asyncio.sleep(RECONNECT_PAUSE)
                continue
            if answer.status is None:
                return answer.data, ()
            return "not there", CLUSTER_PAUSES if connection.info.get("cluster") else ()


class FrameMailbox(AgentMailbox[tuple[PendingAck, Frame, int]]):
    """The durable copies of one endpoint."""

    _declines = True

    def __init__(self, session: SessionLease, intake: Intake, channels: Channels) -> None:
        identity = session.connection.identity
        super().__init__(session, intake, identity.subjects.delivery_stream, f"dlv_{identity.id}")
        self.channels = channels
        self.blocks = BlockReader(self.connection, intake.opener)
        self.numbers = FrameNumbers(intake.read_state.numbers)
        #: bytes of frames that did not open, the newest
        self.aside: deque[bytes] = deque(maxlen=ASIDE)
        #: everything the deliver floor spoke of up to here has arrived
        self.caught_up = 0
        #: the deliver floor when the pull under way began
        self._floor = 0
        self._expires = EXPIRES_SOON
        #: where the last frame with messages lay
        self._last: tuple[int, int] | None = None
        #: (series, first, last) of frames that were skipped and may still come
        self.skipped: set[tuple[str, int, int]] = set()
        #: frames that a session before this one had in hand and did not settle, until they come or would have come
        self.unacked_before = 0
        self._unacked_until = 0.0
        self._told: set[Lost] = set()
        self._batches: set[AckBatch] = set()

    def begin(self) -> None:
        if not self.begun and not self._closed:
            self.intake.read_state.on_settled = self._on_settled
            self.channels.memberships.frames = self
        super().begin()

    # --- pulling ---

    async def _on_session(self, connection: Connection) -> None:
        self._expires = EXPIRES_SOON
        await super()._on_session(connection)

    async def _wait_for_room(self) -> tuple[int, float]:
        """Room for a usual frame; an inbox that can never hold one is filled from a frame as it is emptied."""
        await self._arrived.join()
        inbox = self.intake.inbox
        await inbox.wait_for_room(min(inbox.size, FRAME_ROOM))
        self._floor = self.session.roster.backstop.floor
        return 1, self._expires

    def _found_empty(self) -> None:
        self.caught_up = max(self.caught_up, self._floor)
        self._expires = EXPIRES_SOON if self._is_awaited() else min(EXPIRES, self._expires * 2)

    def expect(self, count: int) -> None:
        """A session before this one died with so many frames in hand: the broker brings them after its patience."""
        self.unacked_before = count
        self._unacked_until = asyncio.get_running_loop().time() + GAP_PATIENCE

    def are_older_awaited(self) -> bool:
        """May frames still come that are older than those that came?"""
        self.skipped = {each for each in self.skipped if self.numbers.missing(*each) is not None}
        return bool(self.skipped) or (
            self.unacked_before > 0 and asyncio.get_running_loop().time() < self._unacked_until
        )

    def _is_awaited(self) -> bool:
        """Does a membership that was not read from the log wait for what frames bring, and is it being made?"""
        wanted = max((each.left_to_frames for each in self.channels.memberships.values()), default=0)
        return self.caught_up < wanted and self.session.roster.backstop.running

    async def _open(self, message: Any, delivery: DeliveryInfo) -> None:
        held = self.pending[delivery.seq] = PendingAck(delivery)
        data, floor = message.data, 0 if delivery.pending else self._floor
        if delivery.count > 1:
            self.unacked_before = max(0, self.unacked_before - 1)
        try:
            frame = decode_frame(data)
            if frame.owner != self.identity.id:
                raise MalformedFrame(f"it is for {frame.owner}")
        except MalformedFrame as error:
            await self._put_aside(held, data, error)
            return
        reach("endpoint.frame_pulled")
        self._arrived.put_nowait((held, frame, floor))

    async def _put_aside(self, held: PendingAck, data: bytes, error: MalformedFrame) -> None:
        """Kept for whoever wants to look, without keys of blocks, then acknowledged, so that it blocks nobody."""
        data = without_keys(data)
        if self.intake.keep_aside is not None:
            await self.intake.keep_aside(data, f"frame {held.delivery.seq} does not open: {error}")
        self.aside.append(data)
        where, state = "in memory", self.intake.read_state.path
        if state is not None:
            beside = state.with_name(f"{state.name}.frame-{held.delivery.seq % ASIDE}")
            with suppress(OSError):
                write_private(beside, data.hex())
                where = f"in {beside}"
        self.intake.opener.refused["frame"] += 1
        self._report(
            MalformedFrame(
                f"frame {held.delivery.seq} in the mailbox of {self.identity.name} does not open ({error}); it is kept "
                f"{where}. If messages are missing, the next frame shows it and they are read from the log"
            )
        )
        self.pending.acknowledge(held)

    # --- offering ---

    async def _hand_over(self, arrived: tuple[PendingAck, Frame, int]) -> None:
        held, frame, floor = arrived
        await self._offer_frame(held, frame)
        self.caught_up = max(self.caught_up, floor)

    async def _offer_frame(self, held: PendingAck, frame: Frame) -> None:
        state = self.intake.read_state
        await state.marks.until_checked()  # in a log that was set back old sequences are new records
        state.copies_of = frame.epoch if state.epoch else ""
        self._check_number(frame)
        for lost in frame.lost:
            self._tell_lost(lost)
        if frame.lost:
            await self.intake.events.handled("notice")  # the broker forgets the frame once this one has told it
        batch = self._batch(lambda: self._frame_settled(held, frame, batch))
        again, fetches = held.delivery.count > 1, dict[int, Fetch]()
        try:
            for number, block in enumerate(frame.blocks):
                if isinstance(block, Block):
                    await self._offer_block(block, batch, again=again)
                elif self._is_known(block):
                    batch.note_known(block, self.intake.read_state.held_among(frozenset(block.seqs)))
                else:
                    records = await self._fetched(frame, number, block, fetches)
                    await self._offer_fetched(block, records, batch, again=again)
        finally:
            await end_tasks(fetches.values())
        self._all_offered(batch)

    async def _offer_block(self, block: Block, batch: AckBatch, *, again: bool) -> None:
        try:
            records = open_block(block)
        except MalformedFrame as error:
            self.intake.opener.refused["frame"] += 1
            self._report(MalformedFrame(f"a part of a frame does not open ({error}): it is read from the log"))
            await self._recover(block.first - 1, block.last, block.count, batch, own_count=True)
            return
        await self._offer_records(records, batch, again=again)

    async def _offer_records(self, records: Iterable[FrameRecord], batch: AckBatch, *, again: bool) -> None:
        for kept in records:
            record = await self._kept(kept)
            if record is not None:  # else it was counted by its reason, and nobody will ever settle it
                await self._offer(record, batch, again=again)

    async def _kept(self, kept: FrameRecord) -> LiveRecord | None:
        """A record of a frame, opened; one that came over a link that is not known waits until it is."""
        opener = self.intake.opener
        while (record := opener.kept(kept)) is UNDECIDED:
            try:
                await opener.learn_links(kept.seq)
            except (UnreachableError, OutcomeUnknown):
                await asyncio.sleep(LINKS_PAUSE)
        return record

    # --- blocks that lie elsewhere ---

    def _is_known(self, ref: Ref) -> bool:
        """Was everything in a block surfaced here already, from live copies or the log?"""
        return all(map(self.intake.read_state.is_known, ref.seqs))

    async def _fetched(
        self, frame: Frame, number: int, ref: Ref, fetches: dict[int, Fetch]
    ) -> tuple[FrameRecord, ...] | None:
        """Fetch this block once there is room for it, and begin with those after it for which there is room too."""
        inbox = self.intake.inbox
        await inbox.wait_for_room(min(inbox.size, ref.count))
        this = fetches.pop(number, None) or self._fetch(frame, ref)
        room = inbox.room - ref.count
        for later, block in enumerate(frame.blocks[number + 1 :], number + 1):
            room -= block.count
            if room < 0 or len(fetches) >= AT_ONCE - 1:
                break
            if later not in fetches and isinstance(block, Ref) and not self._is_known(block):
                fetches[later] = self._fetch(frame, block)
        return await this

    def _fetch(self, frame: Frame, ref: Ref) -> Fetch:
        return asyncio.create_task(self.blocks.records(frame.epoch, ref))

    async def _offer_fetched(
        self, ref: Ref, records: tuple[FrameRecord, ...] | None, batch: AckBatch, *, again: bool
    ) -> None:
        if records is not None:
            await self._offer_records(records, batch, again=again)
            return
        is_known = self.intake.read_state.is_known
        missing = dict.fromkeys(seq for seq in ref.seqs if not is_known(seq))
        batch.note_known(ref, self.intake.read_state.held_among(frozenset(ref.seqs)))
        if not missing:
            return
        try:
            async for seq, record in self.channels.backfill.exactly(ref.channel, tuple(missing)):
                del missing[seq]
                if record is not None:
                    await self._offer(record, batch, again=again)
        except DeniedError:  # narrowed meanwhile: it is owed no more
            return
        left = [seq for seq in missing if not is_known(seq)]
        if left:
            cause = "neither the store of blocks nor the log has them any more"
            self._tell_lost(Lost(ref.channel, left[0], left[-1], len(left), cause))
            await self.intake.events.handled("notice")

    async def _offer(self, record: LiveRecord, batch: AckBatch, *, again: bool = False) -> None:
        redelivered = again or self.channels.is_forgotten(record)
        inbox = self.intake.inbox
        ahead = self.are_older_awaited()
        while not self.intake.offer_durable(record, redelivered=redelivered, ahead=ahead):
            await inbox.wait_for_room()
            await asyncio.sleep(0 if inbox.room else REFUSED_PAUSE)  # closed and full: until we are closed too
        batch.note(record, is_held=self.intake.read_state.is_held(record.identity))

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

    # --- numbers ---

    def _check_number(self, frame: Frame) -> None:
        skipped = self.numbers.hear(frame.series, frame.number)
        if skipped is not None:
            self.skipped.add((frame.series, *skipped))
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
        self.skipped.discard((frame.series, *skipped))
        if missing is None:
            return
        first, last = missing
        newest = max((block.last for block in frame.blocks), default=0)
        start, through, count = frame.prev or (before, newest, None)
        if first != last or last != frame.number - 1:
            start, through, count = min(start or before, before), max(through, newest), None
        batch = self._batch(lambda: self._numbers_settled(frame.series, first, last))
        recovered = await self._recover(start - 1, through, count, batch)
        self.intake.events.emit("gap", FrameGap(frame.series, first, last, start - 1, through, count, recovered))
        self._all_offered(batch)

    async def _recover(
        self, after: int, through: int, count: int | None, batch: AckBatch, *, own_count: bool = False
    ) -> int:
        """Read a range of the log and surface what is new; what is not there any more is told."""
        there = surfaced = 0
        for record in await self.channels.backfill.owed_between(after, through):
            own = record.sender == self.identity.id
            there += own_count or not own
            surfaced += not own and record.seq not in self.intake.read_state.known
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
            await self.intake.events.handled("notice")
        return surfaced

    # --- settling ---

    def _batch(self, then: Callable[[], None]) -> AckBatch:
        batch = AckBatch(then)
        self._batches.add(batch)
        return batch

    def _all_offered(self, batch: AckBatch) -> None:
        batch.offered = True
        self._finish_if_settled(batch)

    def _on_settled(self, identity: Identity) -> None:
        for batch in list(self._batches):
            if identity in batch.waiting:
                batch.waiting.discard(identity)
                self._finish_if_settled(batch)

    def _finish_if_settled(self, batch: AckBatch) -> None:
        if batch.offered and not batch.waiting and batch in self._batches:
            self._batches.discard(batch)
            batch.then()

    def _frame_settled(self, held: PendingAck, frame: Frame, batch: AckBatch) -> None:
        self._numbers_settled(frame.series, frame.number)
        if self.numbers.is_whole(frame.series, frame.number):
            for channel, seq in batch.reached.items():
                self.intake.read_state.channel(channel).frames_reached(seq)
        self._save()  # before the broker forgets the frame: whoever is killed now gets it again, and knows it
        self.pending.acknowledge(held)

    def _save(self) -> None:
        """A state file that cannot be written costs repetitions after a restart, and no message."""
        try:
            self.intake.read_state.save()
        except OSError as error:
            self._report(UnhealthyError(f"{self.intake.read_state.path} cannot be written ({error}): make room for it"))

    def _numbers_settled(self, series: str, first: int, last: int | None = None) -> None:
        self.numbers.settle(series, first, last)
        self.intake.read_state.note_frames(self.numbers.settled_through())

    async def _close(self) -> None:
        self.channels.memberships.frames = None
