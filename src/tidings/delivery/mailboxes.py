"""The mailboxes as the deliverer writes them: blocks to BLK, then the frames that name or hold them to DLV, fenced."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

from tidings.delivery.broker_state import BrokerState
from tidings.delivery.publishing import Outgoing, batch_of, publish_in_order, store_blocks
from tidings.model.blocks import BlockInfo, MadeBlock
from tidings.model.planning import FramePlan, Plan
from tidings.nats.jetstream_blocking import BlockingJetStream
from tidings.server.lease import DeliverLease
from tidings.wire.block_refs import BlockSealer
from tidings.wire.frames import HEAD_HEADER, encode_frame, frame_id

log = logging.getLogger(__name__)


class Mailboxes(BrokerState):
    """The mailboxes as the deliverer wants them, over a connection of their own: frames go to DLV under the lease,
    blocks that frames only name to BLK before them."""

    def __init__(self, asking: BlockingJetStream, publishing: BlockingJetStream, lease: DeliverLease) -> None:
        super().__init__(asking, lease.subjects)
        self._publishing, self._lease = publishing, lease
        #: names and closes what is stored; set before anything is published
        self.sealer: BlockSealer
        self.blocks: Sequence[MadeBlock] = ()
        self.head = 0
        self._refs: dict[int, bytes] = {}

    def store(self, blocks: Sequence[int]) -> Collection[int]:
        outgoing = {index: self._sealed(index) for index in blocks}
        refused, serves = store_blocks(self._publishing.connection, outgoing)
        if not serves:
            self._publishing.close()
        if refused:
            why = next(iter(refused.values()))
            log.warning("%d blocks travel in frames, because they could not be stored: %s", len(refused), why)
        return refused

    def _sealed(self, index: int) -> Iterator[Outgoing]:
        """Sealed when its turn comes: only what is on its way is held twice."""
        block = self.blocks[index]
        sealed = self.sealer.seal(block.info.channel, block.data, block.seqs)
        self._refs[index] = sealed.ref
        yield Outgoing(self.subjects.block(sealed.name), None, sealed.data)

    def publish(self, planned: Plan, blocks: Sequence[BlockInfo]) -> Mapping[str, Sequence[int]]:
        assert len(blocks) == len(self.blocks)
        outgoing = partial(self._outgoing, planned.refs)
        frames = {owner: map(outgoing, frames) for owner, frames in planned.frames.items()}
        sent = publish_in_order(self._publishing.connection, frames, self._lease.fence, batch=self._batch())
        self._refs.clear()
        return {owner: each.sequences for owner, each in sent.items()}

    def _batch(self) -> int | None:
        """How many frames go at a time under the lease: with replicas a batch of them, or one; else many alone."""
        if not self._publishing.replicated:
            return None
        return batch_of(self._delivery_info()["config"])

    def _known_through(self) -> int:
        return self._lease.seq if self._lease.replicated else 0

    def end(self) -> int:
        return self._lease.seq - 1

    def _outgoing(self, refs: frozenset[int], frame: FramePlan) -> Outgoing:
        blocks = [self._refs[index] if index in refs else self.blocks[index].data for index in frame.blocks]
        epoch = self.sealer.epoch
        data = encode_frame(frame.owner, epoch, frame.series, frame.number, blocks, prev=frame.prev, lost=frame.lost)
        subject = self.subjects.delivery(frame.owner)
        return Outgoing(subject, frame_id(data), data, ((HEAD_HEADER, str(self.head)),))
