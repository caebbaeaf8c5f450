"""The keys of the state bucket `td_state_<space>`: small facts about a space that are not in its log.

Each has one writer, or is written by compare-and-set on its revision (`server/state.py`). What the pipeline may read
and write of them is in `server/grants.py`.
"""

from __future__ import annotations

from enum import StrEnum


class StateKey(StrEnum):
    """Keys with a fixed name."""

    STEWARD_BEAT = "beat.steward"
    DELIVER_BEAT = "beat.deliver"
    DELIVER_FLOOR = "floor.deliver"
    DELIVER_FIGURES = "figures.deliver"
    LOG_FLOOR = "floor.log"
    #: owner -> DLV sequence through which it had acknowledged everything when its mailbox was emptied: the pipeline
    #: delivers again what lay above, as far as it is still allowed, and takes the note away
    EMPTIED = "emptied"
    ROSTER_SEEN = "roster.seen"
    ROSTER_ATTENTION = "roster.attention"
    VOIDS = "voids"
