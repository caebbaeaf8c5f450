"""What is published in bulk, and what becomes of it: for both ways of publishing, `publishing.py` and `batches.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidings.nats.jetstream_api import WRONG_LAST_SEQUENCE, ApiError


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message to publish. `id` is its `Nats-Msg-Id`, if it is known by one."""

    subject: str
    id: str | None
    payload: bytes
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Published:
    """What became of one destination: the sequences of what was stored, and why it ended early if it did."""

    sequences: list[int]
    refused: str | None = None


def acknowledged(results: Mapping[str, Published]) -> dict[str, Sequence[int]]:
    return {destination: sent.sequences for destination, sent in results.items()}


def fenced(message: Outgoing, fence: Mapping[str, str]) -> list[tuple[str, str]]:
    """The headers of a message that is written under a lease."""
    named = [("Nats-Msg-Id", message.id)] if message.id is not None else []
    return [*named, *fence.items(), *message.headers]


def lease_lost(refused: ApiError, seq: int) -> str | None:
    """Why a refusal says that the lease at `seq` has another holder, in words; None if it does not say so."""
    if refused.err_code != WRONG_LAST_SEQUENCE or refused.proves_nothing(seq):
        return None
    return f"somebody else delivers now: the broker refused a write ({refused.description})"
