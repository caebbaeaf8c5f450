"""The words for how far something is: stages of a receipt, states of a task, why a task failed.

They are what the wire carries, so a word here is never changed. `rank` says which of two stages is further.
"""

from __future__ import annotations

from enum import StrEnum


class ReceiptStage(StrEnum):
    """What is known of a message its sender asks about; the last three end its life without its being read."""

    UNKNOWN = "unknown"
    CONFIRMED = "confirmed"
    DELIVERED = "delivered"
    READ = "read"
    EXPIRED = "expired"
    UNDELIVERABLE = "undeliverable"
    VOID = "void"

    @property
    def rank(self) -> int:
        return _RANK[self]


_RANK = {
    ReceiptStage.UNKNOWN: -1,
    ReceiptStage.CONFIRMED: 0,
    ReceiptStage.DELIVERED: 1,
    ReceiptStage.READ: 2,
    ReceiptStage.EXPIRED: 3,
    ReceiptStage.UNDELIVERABLE: 3,
    ReceiptStage.VOID: 4,
}
#: nothing more becomes of a message that is at one of these
FINAL_STAGES = (ReceiptStage.READ, ReceiptStage.EXPIRED, ReceiptStage.UNDELIVERABLE, ReceiptStage.VOID)
#: what a reader may say; the rest is the steward's to say
READER_STAGES = (ReceiptStage.DELIVERED, ReceiptStage.READ)


def has_reached(stage: str | None, wanted: str) -> bool:
    """Is a message at `stage` at `wanted` or beyond, or at a final stage? `stored`, in an outbox, precedes them all."""
    if stage in FINAL_STAGES or stage == wanted:
        return True
    known = tuple(ReceiptStage)
    return stage in known and wanted in known and ReceiptStage(stage).rank >= ReceiptStage(wanted).rank


class TaskStatus(StrEnum):
    """Where a task is. `held` is what its worker hears of it, `claimed` its asker."""

    QUEUED = "queued"
    CLAIMED = "claimed"
    HELD = "held"
    DONE = "done"
    DEAD = "dead"
    DROPPED = "dropped"
    GONE = "gone"
    UNKNOWN = "unknown"


class TaskCause(StrEnum):
    """Why a task is a dead letter."""

    FAILED = "failed"
    WORKER_LOST = "worker_lost"
    DEADLINE = "deadline"
    MALFORMED = "malformed"
