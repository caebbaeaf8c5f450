"""What the pipeline keeps on the broker: the deliver lease, its beat, the deliver floor, notes of emptied mailboxes.

The lease is a record in DLV, the stream it guards, taken by compare-and-set on its own subject; older versions are
purged at once, because DLV bounds records per subject. Every frame states its sequence. The beat in the state bucket
tells others when to try, and whether a query runs; it decides nothing. Floors are written by compare-and-set on their
own revision and carry the lease: a holder that finds a newer one stops. Emptying a mailbox moves its acknowledgement
floor (measured), so how far the owner had read is noted before; steward and pipeline both empty, and the lower note
counts.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tidings.broker.answers import EXPECT_SEQUENCE, NO_CONSUMER, NO_MESSAGE, WRONG_LAST_SEQUENCE, ApiError
from tidings.broker.blocking import KeptConnection, WorkerConnection
from tidings.errors import ConflictError, LeaseHeld, LeaseLost, OutcomeUnknown
from tidings.pipeline.delivering import Emptied
from tidings.pipeline.publishing import Fence
from tidings.space.state import EMPTIED_KEY
from tidings.wire.headers import encode_headers
from tidings.wire.ids import new_id
from tidings.wire.subjects import Subjects

BEAT_KEY = "beat.deliver"
FLOOR_KEY = "floor.deliver"
FIGURES_KEY = "figures.deliver"
MAILBOX_FRAMES = 64
#: shares of DLV: above the first the fullest mailboxes are emptied until the second is reached
CROWDED, CALM = 0.8, 0.5


@dataclass(frozen=True, slots=True)
class Entry:
    revision: int
    value: dict[str, Any]


class Keeper:
    """Small reads and writes of the driver, over one plain connection. Not for workers."""

    def __init__(self, line: KeptConnection, subjects: Subjects) -> None:
        self.line = line
        self.subjects = subjects

    @property
    def connection(self) -> WorkerConnection:
        return self.line.live()

    # --- the state bucket ---

    def get(self, key: str) -> Entry | None:
        bucket = self.subjects.state_bucket
        reply = self.connection.request(f"$JS.API.DIRECT.GET.KV_{bucket}.$KV.{bucket}.{key}")
        if reply.status == 404:
            return None
        if reply.status is not None:
            raise OutcomeUnknown(f"{key} cannot be read: status {reply.status}")
        at = reply.block.rfind(b"Nats-Sequence: ")
        revision = int(reply.block[at + 15 : reply.block.find(b"\r\n", at)])
        return Entry(revision, dict(json.loads(reply.payload)))

    def put(self, key: str, value: Mapping[str, Any], revision: int) -> int:
        subject = f"$KV.{self.subjects.state_bucket}.{key}"
        return self.write(subject, json.dumps(value).encode(), {EXPECT_SEQUENCE: str(revision)})

    def write(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> int:
        """Publish one message and wait for its sequence."""
        connection = self.connection
        token = connection.publish_all([(subject, encode_headers(headers.items()), payload)])[0]
        reply = connection.answer(token)
        if reply.status is not None:
            raise OutcomeUnknown(f"nobody stores {subject} (status {reply.status})")
        answer = json.loads(reply.payload)
        if answer.get("error"):
            error = ApiError(f"publish to {subject}", answer["error"])
            if error.err_code == WRONG_LAST_SEQUENCE:
                raise ConflictError(f"{subject} changed meanwhile: {error.description}") from error
            raise error
        return int(answer["seq"])

    def api(self, operation: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        answer = self.connection.api(operation, body)
        if answer.get("error"):
            raise ApiError(operation, answer["error"])
        return answer

    # --- mailboxes ---

    def rooms(self, owners: Iterable[str]) -> dict[str, int]:
        """Frames each mailbox still takes. When DLV is crowded, only for owners who wait for more."""
        rooms = dict.fromkeys(owners, MAILBOX_FRAMES)
        if not rooms:
            return {}
        held, share = self._held()
        rooms = {owner: MAILBOX_FRAMES - held.get(owner, 0) for owner in rooms}
        if share > CALM:
            rooms = {owner: room if room and self._waits(owner) else 0 for owner, room in rooms.items()}
        return rooms

    def delivery_budget(self) -> int:
        """Bytes that all mailboxes together may hold."""
        return int(self.api(f"STREAM.INFO.{self.subjects.delivery_stream}")["config"]["max_bytes"])

    def crowding(self) -> list[str]:
        """The fullest mailboxes, as many as must be emptied for DLV to be calm again; mostly none."""
        state = self.api(f"STREAM.INFO.{self.subjects.delivery_stream}")
        used, most = int(state["state"]["bytes"]), int(state["config"]["max_bytes"])
        if used <= CROWDED * most:
            return []
        held, _ = self._held()
        each = used / max(1, sum(held.values()))
        found: list[str] = []
        for owner in sorted(held, key=lambda owner: -held[owner]):
            if used <= CALM * most:
                break
            found.append(owner)
            used -= int(held[owner] * each)
        return found

    def _held(self) -> tuple[dict[str, int], float]:
        """Owner -> frames in its mailbox, and the share of DLV that is used."""
        prefix, held, offset = f"{self.subjects.root}.dlv.", dict[str, int](), 0
        while True:
            body = {"subjects_filter": f"{prefix}*.*", "offset": offset}
            answer = self.api(f"STREAM.INFO.{self.subjects.delivery_stream}", body)
            page = answer["state"].get("subjects") or {}
            held |= {subject.rpartition(".")[2]: count for subject, count in page.items()}
            offset += len(page)
            if not page or offset >= int(answer.get("total", 0)):
                return held, int(answer["state"]["bytes"]) / max(1, int(answer["config"]["max_bytes"]))

    def _waits(self, owner: str) -> bool:
        try:
            info = self.api(f"CONSUMER.INFO.{self.subjects.delivery_stream}.dlv_{owner}")
        except ApiError as error:
            if error.err_code == NO_CONSUMER:
                return False
            raise
        return int(info.get("num_waiting", 0)) > 0

    def empty(self, owner: str) -> Emptied:
        above = self.note_unread(owner)
        at = self.delivered_through()
        self.api(f"STREAM.PURGE.{self.subjects.delivery_stream}", {"filter": self.subjects.delivery(owner)})
        return Emptied(above, at)

    def delivered_through(self) -> int:
        """The newest sequence of DLV."""
        return int(self.api(f"STREAM.INFO.{self.subjects.delivery_stream}")["state"]["last_seq"])

    def noted(self) -> frozenset[str]:
        """Owners whose mailbox somebody emptied."""
        entry = self.get(EMPTIED_KEY)
        return frozenset(entry.value) if entry else frozenset()

    def note_unread(self, owner: str) -> int:
        """Write down how far `owner` has read, unless a lower note is there already. Answers the note."""
        floor = self._acknowledged(owner)
        while True:
            entry = self.get(EMPTIED_KEY)
            notes = entry.value if entry else {}
            if notes.get(owner, floor + 1) <= floor:
                return int(notes[owner])
            try:
                self.put(EMPTIED_KEY, {**notes, owner: floor}, entry.revision if entry else 0)
            except ConflictError:
                continue  # the steward just noted another
            return floor

    def _acknowledged(self, owner: str) -> int:
        try:
            info = self.api(f"CONSUMER.INFO.{self.subjects.delivery_stream}.dlv_{owner}")
        except ApiError as error:
            if error.err_code == NO_CONSUMER:
                return 0
            raise
        return int(info["ack_floor"]["stream_seq"])

    def forget_emptied(self, emptied: Mapping[str, Emptied]) -> None:
        """Take notes away that became debts; one that was written lower meanwhile stays for the next batch."""
        while emptied:
            entry = self.get(EMPTIED_KEY)
            if entry is None:
                return
            left = {o: above for o, above in entry.value.items() if o not in emptied or above < emptied[o].above}
            try:
                if left != entry.value:
                    self.put(EMPTIED_KEY, left, entry.revision)
            except ConflictError:
                continue
            return


class DeliverLease:
    """Take, keep and prove the right to deliver."""

    def __init__(self, keeper: Keeper, *, ttl: float = 3.0) -> None:
        self._keeper = keeper
        self.ttl = ttl
        self.holder = new_id()
        self.seq = 0
        self._revision = 0
        self._beats = 0
        #: is there a query that delivers? Said with every beat, so that a holder without one does not count as running
        self.delivers = False

    @property
    def fence(self) -> Fence:
        return Fence(self._keeper.subjects.delivery_lease, self.seq)

    def take(self) -> int:
        """Take the lease once its holder is silent for twice its time to live; `LeaseHeld` if it beats."""
        held = self._current()
        if held:
            self._wait_for_silence(held)
        s = self._keeper.subjects
        said = {"holder": self.holder, "host": socket.gethostname(), "pid": os.getpid()}
        try:
            self.seq = self._keeper.write(s.delivery_lease, json.dumps(said).encode(), {EXPECT_SEQUENCE: str(held)})
        except ConflictError as error:
            raise LeaseHeld("another pipeline was quicker to take the deliver lease") from error
        self._keeper.api(f"STREAM.PURGE.{s.delivery_stream}", {"filter": s.delivery_lease, "keep": 1})
        entry = self._keeper.get(BEAT_KEY)
        self._revision = entry.revision if entry else 0
        self.beat()
        return self.seq

    def _current(self) -> int:
        s = self._keeper.subjects
        try:
            answer = self._keeper.api(f"STREAM.MSG.GET.{s.delivery_stream}", {"last_by_subj": s.delivery_lease})
        except ApiError as error:
            if error.err_code == NO_MESSAGE:
                return 0
            raise
        return int(answer["message"]["seq"])

    def _wait_for_silence(self, held: int) -> None:
        first = self._keeper.get(BEAT_KEY)
        if first is None or first.value.get("released") == held:
            return
        deadline = time.monotonic() + 2 * self.ttl
        while time.monotonic() < deadline:
            time.sleep(self.ttl / 5)
            seen = self._keeper.get(BEAT_KEY)
            if seen is not None and seen.value.get("released") == held:
                return
            if seen is None or seen.revision != first.revision:
                who = f"pid {first.value.get('pid')} on {first.value.get('host')}"
                raise LeaseHeld(f"another pipeline delivers for this space ({who}): stop it first")

    def beat(self) -> None:
        """Say that this holder lives. `LeaseLost` if another one said so since."""
        self._beats += 1
        self._put({"beat": self._beats, "query": self.delivers})

    def release(self) -> None:
        """Say that nobody need wait."""
        self._put({"released": self.seq})

    def _put(self, more: Mapping[str, Any]) -> None:
        said = {"lease": self.seq, "holder": self.holder, "host": socket.gethostname(), "pid": os.getpid()}
        try:
            self._revision = self._keeper.put(BEAT_KEY, said | dict(more), self._revision)
        except ConflictError as error:
            entry = self._keeper.get(BEAT_KEY)
            if entry is not None and entry.value.get("holder") == self.holder:
                self._revision = entry.revision  # a beat whose answer was lost
                return
            raise LeaseLost("another pipeline beats for this space") from error


class DeliverFloor:
    """How far delivery is, for retention, for agents, and for a pipeline that lost its checkpoint."""

    def __init__(self, keeper: Keeper, lease: DeliverLease, epoch: str) -> None:
        self._keeper, self._lease, self._epoch = keeper, lease, epoch

    def read(self) -> dict[str, Any] | None:
        entry = self._keeper.get(FLOOR_KEY)
        return entry.value if entry else None

    def rewind(self, seq: int) -> None:
        """The log went backwards: delivery begins again after `seq`."""
        entry = self._keeper.get(FLOOR_KEY)
        said = {"seq": seq, "needed": seq, "lease": self._lease.seq, "epoch": self._epoch}
        self._keeper.put(FLOOR_KEY, said, entry.revision if entry else 0)

    def advance(self, through: int, debts_after: int | None) -> None:
        """`needed`: the log must keep everything from here on, for debts are paid from it."""
        while True:
            entry = self._keeper.get(FLOOR_KEY)
            known: dict[str, Any] = entry.value if entry else {"seq": 0, "lease": 0, "epoch": self._epoch}
            if known["lease"] > self._lease.seq:
                raise LeaseLost(
                    f"the deliver floor was written under lease {known['lease']}, ours is {self._lease.seq}"
                )
            if known.get("epoch") == self._epoch:
                through = max(through, int(known["seq"]))
            needed = through if debts_after is None else min(through, debts_after + 1)
            said = {"seq": through, "needed": needed, "lease": self._lease.seq, "epoch": self._epoch}
            if said == known:
                return
            try:
                self._keeper.put(FLOOR_KEY, said, entry.revision if entry else 0)
            except ConflictError:
                continue  # look again: a newer lease stops us, an older holder's word is overwritten
            return
