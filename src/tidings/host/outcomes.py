"""How an attempt to hand something on ended, as a value: a code, a sentence, and what has to wait because of it.

`outcome_of` reads the class of an error, never its text. Only what is listed as permanent is: an error nobody thought
of is tried again. What is permanent ends its row and nothing else; what is not makes at least its lane wait, because a
lane keeps its order. "The recipient is away" is no outcome: the broker keeps the message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tidings import errors

Blocks = Literal["row", "lane", "sender", "space"]
WORDS_KEPT = 1_000


@dataclass(frozen=True)
class Outcome:
    """An attempt that was not acknowledged. `blocks`: what cannot be tried before this has changed."""

    code: str
    words: str
    retryable: bool
    blocks: Blocks
    #: the broker may have taken it: nobody knows
    maybe_stored: bool = False

    def __post_init__(self) -> None:
        if self.retryable == (self.blocks == "row"):
            raise ValueError(
                f"outcome {self.code}: what is retried makes its lane wait, what is not blocks only its row"
            )


#: errors after which the same bytes can never be taken
PERMANENT: tuple[type[BaseException], ...] = (
    errors.DeniedError,
    errors.WireError,
    errors.UsageError,
    errors.IdBurned,
)
#: what has to wait after an error that passes; the first class that fits
WAITS: tuple[tuple[type[BaseException], Blocks], ...] = (
    (errors.AuthRevoked, "sender"),
    (errors.Superseded, "sender"),
    (errors.UnreachableError, "space"),
    (errors.LogFull, "space"),
    (errors.LogRegressed, "space"),
    (errors.DiskFull, "space"),
)
#: errors that say the broker did not take it; after any other that passes, it may have
NOT_TAKEN: tuple[type[BaseException], ...] = (
    errors.DeniedError,
    errors.BrokerUnreachable,
    errors.Reconnecting,
    errors.LogFull,
    errors.MailboxFull,
    errors.QueueFull,
    errors.Superseded,
    errors.NotLookedFor,
)


def outcome_of(error: BaseException) -> Outcome:
    """What the failure of one attempt means for its row, its lane, its sender and its space."""
    code = error.code if isinstance(error, errors.TidingsError) else "unexpected"
    words = (str(error) or type(error).__name__)[:WORDS_KEPT]
    waits = next((blocks for cls, blocks in WAITS if isinstance(error, cls)), None)
    if waits is None and isinstance(error, PERMANENT):
        return Outcome(code, words, retryable=False, blocks="row")
    return Outcome(code, words, True, waits or "lane", maybe_stored=not isinstance(error, NOT_TAKEN))
