"""The gate of the log: closed before its budget or its disk is used up, opened when there is room again.

A closed gate refuses new messages; rulings still fit into the reserve, so that agents can be narrowed and leave. Two
thresholds keep it from flapping. Closing needs no lease: a log that is full must not depend on one that could not be
written. Making the room is `retention.py`'s part.
"""

from __future__ import annotations

import logging

from tidings.broker.disk import Room
from tidings.broker.jetstream import JetStream
from tidings.broker.streams import GateState, gate_state, set_gate
from tidings.wire.subjects import Subjects

#: shares of the budget
CLOSE_AT = 0.95
OPEN_BELOW = 0.90
WARN_AT = 0.70
log = logging.getLogger(__name__)


async def close_if_full(js: JetStream, subjects: Subjects, room: Room) -> GateState:
    state = await gate_state(js, subjects)
    if state.open and (state.share >= CLOSE_AT or room.is_short):
        state = await set_gate(js, subjects, gate_open=False)
        why = str(room) if room.is_short else f"the log is at {state.share:.0%} of its budget"
        log.error("%s: the gate is closed", why)
    return state


async def tend_gate(js: JetStream, subjects: Subjects, room: Room) -> GateState:
    """Close it if the log or the disk is full, open it if there is room again."""
    state = await close_if_full(js, subjects, room)
    if not state.open and state.share < OPEN_BELOW and room.is_ample:
        state = await set_gate(js, subjects, gate_open=True)
        log.warning("the log is at %.0f %% of its budget: the gate is open again", state.share * 100)
    return state


def problem_of(gate: GateState, held_by: str | None, room: Room) -> str | None:
    """What an operator is told of it. `held_by`: the part that keeps retention from making room."""
    if room.is_short or (not gate.open and gate.share < OPEN_BELOW):
        return (
            f"{room}; new messages are refused, leaving, narrowing and takeover go on. Make room there: everything "
            "goes on by itself then"
        )
    if not gate.open:
        return "the log is full: the gate is closed and new messages are refused until room is made"
    if gate.share >= WARN_AT:
        cause = f"; retention waits for {held_by}" if held_by else ""
        return f"the log is at {gate.share:.0%} of its budget{cause}"
    return None
