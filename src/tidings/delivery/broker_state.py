"""What the pipeline keeps on the broker: the deliver floor, notes of emptied mailboxes, and the mailboxes' room.

Floors are written by compare-and-set on their own revision and carry the lease (`server/lease.py`): a holder that finds
a newer one stops. Emptying a mailbox moves its acknowledgement floor (measured), so how far the owner had read is noted
before; steward and pipeline both empty, and the lower note counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from tidings.delivery.deliverer import NEVER, Emptied
from tidings.errors import ConflictError, LeaseLost
from tidings.nats import jetstream_api as api
from tidings.nats.jetstream_blocking import BlockingJetStream
from tidings.server.lease import DeliverLease
from tidings.server.state import Entry, StateApi
from tidings.wire.records import StoredRecord
from tidings.wire.subjects import StateKey, Subjects

MAILBOX_FRAMES = 64
#: shares of DLV: above the first the fullest mailboxes are emptied until the second is reached
CROWDED, CALM = 0.8, 0.5


class BrokerState:
    """Small reads and writes of the driver, over one connection. Not for workers."""

    def __init__(self, js: BlockingJetStream, subjects: Subjects) -> None:
        self.js, self.subjects = js, subjects
        self._state = StateApi(subjects, direct=True)

    def get(self, key: str) -> Entry | None:
        return self.js.run(self._state.get(key))

    def put(self, key: str, value: Mapping[str, Any], revision: int) -> int:
        return self.js.run(self._state.put(key, value, revision))

    def _known_through(self) -> int:
        """A sequence that DLV is known to have: of several servers one that says less is asked again."""
        return 0

    def _delivery_info(self) -> dict[str, Any]:
        known = self._known_through()
        return self.js.run(api.info_from(self.subjects.delivery_stream, known, replicated=known > 0))

    # --- the log ---

    def log_floor(self) -> int:
        """The first sequence that retention has left in the log; 0 if it removed nothing yet."""
        entry = self.get(StateKey.LOG_FLOOR)
        return int(entry.value["seq"]) if entry else 0

    def log_share(self) -> float:
        """How full the log is."""
        info = self.js.run(api.info(self.subjects.log_stream))
        return float(info["state"]["bytes"] / max(1, int(info["config"]["max_bytes"])))

    # --- mailboxes ---

    def rooms(self, owners: Iterable[str]) -> dict[str, int]:
        """Frames each mailbox still takes. When DLV is crowded, only for owners who wait for more."""
        wanted = list(owners)
        if not wanted:
            return {}
        held, (used, most) = self.held(), self._used()
        rooms = {owner: MAILBOX_FRAMES - held.get(owner, 0) for owner in wanted}
        if used > CALM * most:
            rooms = {owner: room if room and self._waits(owner) else 0 for owner, room in rooms.items()}
        return rooms

    def delivery_budget(self) -> int:
        """Bytes that all mailboxes together may hold."""
        return self._used()[1]

    def crowding(self) -> list[str]:
        """The fullest mailboxes, as many as must be emptied for DLV to be calm again; mostly none."""
        used, most = self._used()
        if used <= CROWDED * most:
            return []
        held = self.held()
        each = used / max(1, sum(held.values()))
        found: list[str] = []
        for owner in sorted(held, key=lambda owner: -held[owner]):
            if used <= CALM * most:
                break
            found.append(owner)
            used -= int(held[owner] * each)
        return found

    def _used(self) -> tuple[int, int]:
        """Bytes of DLV that are used, and that may be."""
        info = self._delivery_info()
        return int(info["state"]["bytes"]), max(1, int(info["config"]["max_bytes"]))

    def held(self) -> dict[str, int]:
        """Owner -> frames in its mailbox."""
        mailboxes = f"{self.subjects.root}.dlv.*.*"
        counts = self.js.run(api.counts_of(self.subjects.delivery_stream, mailboxes, self._known_through()))
        return {subject.rpartition(".")[2]: count for subject, count in counts.items()}

    def _consumer(self, owner: str) -> dict[str, Any] | None:
        return self.js.run(api.consumer_info(self.subjects.delivery_stream, f"dlv_{owner}"))

    def _waits(self, owner: str) -> bool:
        info = self._consumer(owner)
        return info is not None and int(info.get("num_waiting", 0)) > 0

    def read_through(self, owner: str) -> int | None:
        info = self._consumer(owner)
        return None if info is None else int(info["ack_floor"]["stream_seq"])

    def oldest_frame(self) -> StoredRecord | None:
        """The frame that lies unread longest, in whosever mailbox."""
        mailboxes = f"{self.subjects.root}.dlv.*.*"
        return self.js.run(api.following(self.subjects.delivery_stream, mailboxes, 1))

    def empty(self, owner: str, *, trusted: bool = True) -> Emptied:
        above = self.note_unread(owner, (self.read_through(owner) or 0) if trusted else 0)
        at = self.delivered_through()
        mailbox = self.subjects.delivery(owner)
        self.js.run(api.purge(self.subjects.delivery_stream, subject_filter=mailbox, below=at + 1))
        return Emptied(above, at)

    def delivered_through(self) -> int:
        """The newest sequence of DLV."""
        return int(self._delivery_info()["state"]["last_seq"])

    def noted(self) -> frozenset[str]:
        """Owners whose mailbox somebody emptied."""
        entry = self.get(StateKey.EMPTIED)
        return frozenset(entry.value) if entry else frozenset()

    def note_unread(self, owner: str, floor: int) -> int:
        """Write down how far `owner` has read, unless a lower note is there already. Answers the note."""
        while True:
            entry = self.get(StateKey.EMPTIED)
            notes = entry.value if entry else {}
            if notes.get(owner, floor + 1) <= floor:
                return int(notes[owner])
            try:
                self.put(StateKey.EMPTIED, {**notes, owner: floor}, entry.revision if entry else 0)
            except ConflictError:
                self.pause()  # the steward just noted another
                continue
            return floor

    def forget_emptied(self, emptied: Mapping[str, Emptied]) -> None:
        """Take notes away that became debts; one that was written lower meanwhile stays for the next batch."""
        while emptied:
            entry = self.get(StateKey.EMPTIED)
            if entry is None:
                return
            left = {o: above for o, above in entry.value.items() if o not in emptied or above < emptied[o].above}
            try:
                if left != entry.value:
                    self.put(StateKey.EMPTIED, left, entry.revision)
            except ConflictError:
                self.pause()
                continue
            return

    def pause(self) -> None:
        """A state with replicas may be read from one that lags: what it says is refused until it has caught up."""
        if self.js.replicated:
            time.sleep(api.LAG_PAUSE)


class DeliverFloor:
    """How far delivery is, for retention, for agents, and for a pipeline that lost its checkpoint."""

    def __init__(self, state: BrokerState, lease: DeliverLease, epoch: str) -> None:
        self._state, self._lease, self._epoch = state, lease, epoch

    def _is_ours(self) -> bool:
        """Is nobody's lease newer? A stream of mailboxes that was set back has lower numbers than it had."""
        if self._lease.replicated:
            try:
                return self._state.js.run(self._lease.prove_steps()).id == self._lease.holder_id
            except LeaseLost:
                return False
        return self._state.js.run(self._lease.current_steps()).id == self._lease.holder_id

    def read(self) -> dict[str, Any] | None:
        entry = self._state.get(StateKey.DELIVER_FLOOR)
        return entry.value if entry else None

    def read_by_all(self) -> int:
        """Everything through this was read by everybody it was delivered to; nothing is owed of it."""
        return max(0, int((self.read() or {"needed": 0})["needed"]) - 1)

    def is_newer_than(self, mark: tuple[int, int]) -> bool:
        """Was the floor written beside a newer ledger? Versions before 0.3 left no mark."""
        known = self.read() or {}
        return any(then > now for then, now in zip(known.get("mark", ()), mark, strict=False))

    def rewind(self, seq: int, series: str, lost: tuple[int, int] | None = None) -> None:
        """The log went backwards, or the ledger did: delivery begins again after `seq`.

        Frames then have a new series. That is noted (`anew`) until the floor is advanced: whoever dies before all of it
        is done leaves it to the next one. So is from where on anything may have been unread, and what the log has lost.
        """
        entry = self._state.get(StateKey.DELIVER_FLOOR)
        known = entry.value if entry else {}
        unread = known["needed"] if known.get("epoch") == self._epoch else NEVER
        anew = [series, unread, *([list(lost)] if lost else [])]
        said = {"seq": seq, "needed": seq, "lease": self._lease.seq, "epoch": self._epoch, "anew": anew}
        self._state.put(StateKey.DELIVER_FLOOR, said, entry.revision if entry else 0)

    def advance(self, through: int, needed: int | None, mark: tuple[int, int]) -> None:
        """`needed`: the log must keep everything from here on, for what is owed or unread is delivered from it.

        `mark`: that of the ledger, which knows all of this and is kept elsewhere.
        """
        while True:
            entry = self._state.get(StateKey.DELIVER_FLOOR)
            known: dict[str, Any] = entry.value if entry else {"seq": 0, "lease": 0, "epoch": self._epoch}
            if known["lease"] > self._lease.seq and not self._is_ours():
                raise LeaseLost(
                    f"the deliver floor was written under lease {known['lease']}, ours is {self._lease.seq}"
                )
            if known.get("epoch") == self._epoch:
                through = max(through, int(known["seq"]))
            kept = through if needed is None else min(through, needed)
            said = {"seq": through, "needed": kept, "lease": self._lease.seq, "epoch": self._epoch, "mark": [*mark]}
            if said == known:
                return
            try:
                self._state.put(StateKey.DELIVER_FLOOR, said, entry.revision if entry else 0)
            except ConflictError:
                self._state.pause()  # then look again: a newer lease stops us, an older holder's word is overwritten
                continue
            return
