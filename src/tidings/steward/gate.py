"""The gate of the log: closed before its budget or its disk is used up, opened when there is room again.

A closed gate refuses new messages; rulings still fit into the reserve, so that agents can be narrowed and leave. Two
thresholds keep it from flapping. Closing needs no lease: a log that is full must not depend on one that could not be
written. Making the room is `retention.py`'s part.
"""

from __future__ import annotations

import logging
from typing import Any

from tidings.contract.agents import GateFacts
from tidings.nats.jetstream import JetStream
from tidings.server.config import RESERVE
from tidings.server.disk import DiskReserve
from tidings.server.streams import GateState, gate_of, gate_state, set_gate
from tidings.wire.subjects import Subjects

#: shares of the budget
CLOSE_AT = 0.95
OPEN_BELOW = 0.90
WARN_AT = 0.70
log = logging.getLogger(__name__)


class LogGate:
    def __init__(self, js: JetStream, subjects: Subjects, disk: DiskReserve) -> None:
        self.disk = disk
        self._js = js
        self._subjects = subjects
        #: as it was when it was last looked at
        self.state: GateState | None = None

    async def close_if_full(self) -> GateState:
        state, room = await gate_state(self._js, self._subjects), self.disk.look()
        if state.open and (state.share >= CLOSE_AT or room.is_short):
            state = await set_gate(self._js, self._subjects, gate_open=False)
            why = str(room) if room.is_short else f"the log is at {state.share:.0%} of its budget"
            log.error("%s: the gate is closed", why)
        self.state = state
        return state

    async def tend(self) -> None:
        """Close it if the log or the disk is full, open it if there is room again."""
        state = await self.close_if_full()
        if not state.open and state.share < OPEN_BELOW and self.disk.look().is_ample:
            self.state = await set_gate(self._js, self._subjects, gate_open=True)
            log.warning("the log is at %.0f %% of its budget: the gate is open again", state.share * 100)

    def learn(self, info: dict[str, Any]) -> None:
        """What the broker just said of the log says how the gate is."""
        self.state = gate_of(self._subjects, info)

    @property
    def half_of_reserve_is_used(self) -> bool:
        state = self.state
        return state is not None and not state.open and state.used > state.budget + RESERVE // 2

    def facts(self) -> GateFacts | None:
        state, room = self.state, self.disk.look()
        if state is None:
            return None
        closed_by = None if state.open else "disk" if not room.is_ample else "budget"
        return GateFacts(open=state.open, used=state.used, budget=state.budget, closed_by=closed_by)

    def problem(self, held_by: str | None) -> str | None:
        """What an operator is told of it. `held_by`: the part that keeps retention from making room."""
        state, room = self.state, self.disk.look()
        if state is None:
            return None
        if room.is_short or (not state.open and state.share < OPEN_BELOW):
            return (
                f"{room}; new messages are refused, leaving, narrowing and takeover go on. Make room there: everything "
                "goes on by itself then"
            )
        if not state.open:
            return "the log is full: the gate is closed and new messages are refused until room is made"
        if state.share >= WARN_AT:
            cause = f"; retention waits for {held_by}" if held_by else ""
            return f"the log is at {state.share:.0%} of its budget{cause}"
        return None
