"""How durable delivery is, asked of the broker with the pipeline's own credential. Needs neither Spark nor the steward.

A pipeline runs if it beat within `SILENCE` seconds and said with it that its query runs. It is behind by the records
after its floor, and by the age of the oldest of them. Ages compare the broker's clock with this machine's. Whether the
space wants delivery is taken from its newest record as it stands: only the steward can write there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tidings.admin.home import SpaceHome
from tidings.delivery.stream_reader import StreamLocation, StreamReader
from tidings.errors import WireError
from tidings.nats import jetstream_api as api
from tidings.server.state import Entry, StateApi
from tidings.util.private_files import check_private
from tidings.wire import rulings
from tidings.wire.records import StoredRecord
from tidings.wire.subjects import StateKey, Subjects

#: a beat older than this is no life: the lease passes on after six seconds, and two cores may be busy
SILENCE = 15.0
#: behind by more than this is a problem, not a busy moment
LAGS_BADLY = 60.0
#: a first start that takes longer than this is a problem
SLOW_START = 180.0
#: figures the job reports that are of interest to a person
REPORTED = ("batches", "messages", "deliveries", "frames", "poison", "void", "missing", "last_batch_ms", "last_error")


@dataclass(frozen=True, slots=True)
class DeliveryStatus:
    """What is known of durable delivery in a space."""

    running: bool
    behind: int
    behind_s: float
    floor: int
    head: int
    holder: str | None = None
    holder_pid: int | None = None
    debts: int | None = None
    owners_in_debt: int | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    figures_at: float | None = None
    #: what the space record says: with "off" nobody waits for durable copies
    deliver: str = "on"
    at: float = field(default_factory=time.time)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def look(home: SpaceHome, *, url: str | None = None, creds: Path | None = None) -> DeliveryStatus:
    """Ask the broker of a space. Raises what asking it raises."""
    info = home.read_info()
    path = check_private(creds or home.pipeline_creds)
    reader = StreamReader(
        StreamLocation(url or info.url, str(path), info.subjects.log_stream, "tidings-pipeline-status")
    )
    try:
        head = reader.state().last
        state = StateApi(info.subjects, direct=True)
        keys = (StateKey.DELIVER_BEAT, StateKey.DELIVER_FLOOR, StateKey.DELIVER_FIGURES)
        beat, delivered, figures = (reader.run(state.get(key)) for key in keys)
        floor = min(int(delivered.value.get("seq", 0)) if delivered else 0, head)
        waiting = reader.following(">", floor + 1) if floor < head else None
        known = _delivery(head, floor, waiting, beat, figures, time.time())
        return replace(known, deliver=_switch(reader, info.subjects))
    finally:
        reader.close()


def _delivery(
    head: int, floor: int, waiting: StoredRecord | None, beaten: Entry | None, reported: Entry | None, now: float
) -> DeliveryStatus:
    beat, figures = beaten.value if beaten else {}, reported.value if reported else {}
    return DeliveryStatus(
        running=_delivers(beaten, now),
        behind=head - floor,
        behind_s=round(max(0.0, now - waiting.time_ns / 1e9), 3) if waiting else 0.0,
        floor=floor,
        head=head,
        holder=f"pid {beat.get('pid')} on {beat.get('host')}" if beat else None,
        holder_pid=beat.get("pid"),
        debts=figures.get("debts"),
        owners_in_debt=figures.get("owners_in_debt"),
        figures={name: figures[name] for name in REPORTED if name in figures},
        figures_at=reported.time_ns / 1e9 if reported else None,
        at=now,
    )


def _switch(reader: StreamReader, subjects: Subjects) -> str:
    record = reader.run(api.last(reader.stream, subjects.space_record))
    try:
        said = rulings.decode("space", record.payload) if record else None
    except WireError:
        return "on"
    return said.parts.deliver if isinstance(said, rulings.Space) else "on"


def _delivers(beat: Entry | None, now: float) -> bool:
    """Does somebody beat, and say that its query runs?"""
    if beat is None or now - beat.time_ns / 1e9 >= SILENCE:
        return False
    return "released" not in beat.value and beat.value.get("query") is not False


def mode_of(told: Mapping[str, Any], facts: Mapping[str, Any] | None) -> str | None:
    """How members get what they missed where nobody delivers, on purpose or for lack of Spark; None where one does."""
    switched_off = facts is not None and facts.get("deliver") == "off"
    if facts is None or (facts["running"] and not switched_off):
        return None
    unavailable = told.get("phase") == "unavailable"
    if told.get("wanted") and not unavailable and not switched_off:
        return None
    why = f"{str(told['why']).rstrip('.')}; " if unavailable and told.get("why") else ""
    return (
        "without durable delivery: members catch up from the log, as far back as it is kept. "
        f"{why}durable delivery adds a mailbox for each member: copies are made while it is away, and a loss is told"
    )


def problems_of(
    told: Mapping[str, Any], facts: Mapping[str, Any] | None, now: float, *, unseen: str | None = None
) -> list[str]:
    """What is wrong with durable delivery. `told`: the supervisor's word on it; `facts`: the broker's, if it answered.

    `unseen`: why nothing could be learnt from a broker that runs; nobody calls that well. Delivery should run if the
    supervisor was not told to leave it out. Starting is no problem for three minutes. A space that switched delivery
    off has no problem with it.
    """
    if facts is None:
        is_wanted = told.get("wanted") and told.get("phase") != "unavailable"
        return [f"how durable delivery is cannot be seen: {unseen}"] if unseen and is_wanted else []
    if facts.get("deliver") == "off":
        return []
    late = f"durable copies are delayed, {facts['behind']} records behind"
    if facts["running"]:
        if facts["behind_s"] > LAGS_BADLY:
            return [f"{late} for {facts['behind_s']:.0f} s: `tidings pipeline status`"]
        return []
    phase = told.get("phase")
    if not told.get("wanted"):
        return []
    if phase == "unavailable":
        return []  # a mode of its own, which `mode_of` names
    if phase == "starting" and now - float(told.get("since", now)) < SLOW_START:
        return []
    why = f" ({told['why']})" if told.get("why") else ""
    return [f"{late}: the pipeline is {phase or 'not running'}{why}; `tidings logs pipeline`"]
