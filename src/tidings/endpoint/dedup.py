"""Handing a channel message to the application once, whichever copy of it comes first.

A message comes live, from history, inside a hole, or as a durable copy. It is known by its sequence and by (sender,
id); one's own messages are never surfaced. Every way in answers False when there is no room: then nothing was noted,
and whoever offered it offers it again. Where copies come from, and when to offer again, is not known here.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from tidings.endpoint.read_state import ReadState
from tidings.endpoint.records import LiveRecord
from tidings.wire.marks import Stamp


class Surface(Protocol):
    """Hand a record to the application; False when there is no room for it."""

    def __call__(
        self,
        record: LiveRecord,
        /,
        *,
        historical: bool = False,
        late: bool = False,
        ahead: bool = False,
        redelivered: bool = False,
        durable: bool = False,
    ) -> bool: ...


class Dedup:
    def __init__(self, own_id: str, read_state: ReadState, refused: Counter[str], surface: Surface) -> None:
        self.own_id = own_id
        self.read_state = read_state
        self._refused = refused
        self._surface = surface

    def is_own(self, record: LiveRecord) -> bool:
        return record.sender == self.own_id

    def offer(self, record: LiveRecord, *, contiguous: bool, **marks: bool) -> bool:
        """A copy in the order of the log. `contiguous`: nothing lies between what was seen of its channel and it."""
        seen = self.read_state.channel(record.channel)
        if not seen.is_new(record.seq) or record.seq in self.read_state.known:
            return True
        own = self.is_own(record)
        repeated = not own and not self.read_state.first_time(record.identity)
        if not own and not repeated and not self._hand_over(record, **marks):
            return False
        seen.surface(record.seq, contiguous=contiguous, shown=not own and not repeated)
        self._note(record)
        if repeated:
            self._refused["repeated"] += 1
        if own or repeated:
            seen.settle(record.seq)
        return True

    def offer_missed(self, record: LiveRecord, *, historical: bool) -> bool:
        """A record that others of its channel have passed."""
        if not self.read_state.first_time(record.identity):
            return True
        if not self._hand_over(record, historical=historical):
            return False
        self.read_state.channel(record.channel).surface_missed(record.seq)
        self._note(record)
        return True

    def offer_durable(self, record: LiveRecord, *, redelivered: bool, ahead: bool = False) -> bool:
        """A durable copy. A copy in the application's hands stays the only one: whoever offers this one waits until
        that was settled."""
        if self.is_own(record) or record.seq in self.read_state.known:
            return True
        if not self.read_state.first_time(record.identity):
            self._refused["repeated"] += 1
            return True
        if not self._hand_over(record, redelivered=redelivered, durable=True, ahead=ahead):
            return False
        self.read_state.channel(record.channel).surface_durable(record.seq)
        self._note(record)
        return True

    def _note(self, record: LiveRecord) -> None:
        if record.mark:
            self.read_state.marks.note(Stamp(record.seq, record.mark))

    def _hand_over(self, record: LiveRecord, *, redelivered: bool = False, **marks: bool) -> bool:
        """`late` if a newer one of its channel was surfaced before, `redelivered` if it was itself: by whichever
        process, as far as it is remembered."""
        late = record.seq < self.read_state.channel(record.channel).newest
        again = redelivered or self.read_state.was_handed(record.seq)
        if self._surface(record, late=late, redelivered=again, **marks):
            return True
        self.read_state.forget(record.identity)
        return False
