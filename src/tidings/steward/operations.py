"""Which operation did what: an operation id takes effect once, however late or often it is repeated.

The evidence is the log: every ruling record carries the id of the operation that wrote it, so the index is folded from
the records that are kept, and a new steward knows what the one before did. An operation that wrote nothing (a join of
somebody who is in, a leave of somebody who is not) is remembered by the running steward only. Bounded per scope, which
is whoever chooses the ids: an agent, or the administrators of the space.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from tidings.errors import ConflictError

#: operations remembered of each scope, the newest
KEPT = 1_024
ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Completed:
    """What an operation came to: the record it wrote or found, and the word for it."""

    subject: str
    seq: int
    state: str


class Operations:
    def __init__(self, kept: int = KEPT) -> None:
        self.kept = kept
        self._done: dict[str, OrderedDict[str, dict[str, Completed]]] = {}

    def note(self, scope: str, op: str, outcome: Completed) -> None:
        """One operation of ours may write several records; one of an agent writes one."""
        done = self._done.setdefault(scope, OrderedDict())
        done.setdefault(op, {}).setdefault(outcome.subject, outcome)
        if len(done) > self.kept:
            done.popitem(last=False)

    def outcome(self, scope: str, op: str, subject: str, *states: str) -> Completed | None:
        """What this operation came to, if it was done; ConflictError if it was another one.

        `states`: what it can have come to, if it is the one that is asked for again. Administrators do one thing in
        several steps, so theirs may have done other things too.
        """
        known = self._done.get(scope)
        done = known.get(op) if known else None
        if done is None:
            return None
        found = done.get(subject)
        if scope == ADMIN:
            return found
        if found is None or (states and found.state not in states):
            other = found or next(iter(done.values()))
            raise ConflictError(
                f"the operation id {op} was used for something else ({other.state} at {other.seq}): "
                "every operation needs an id of its own"
            )
        return found
