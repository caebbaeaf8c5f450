"""The rules as Spark's workers have them: broadcast once, sent again when a post may be judged otherwise.

A batch borrows what was sent last (`SentRules.lend`) if it still holds: nothing was revised since, and it reaches back
to where the batch begins. Otherwise the rules are sent anew and the old ones are destroyed as soon as nobody works with
them any more: a payment reads for long while batches go on. So there are never more broadcasts than borrowers and one,
whatever happens; each is a file at the driver, and blocks in its JVM and in every executor.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from py4j.protocol import Py4JNetworkError

from tidings.model.rulebook import Rulebook

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.core.broadcast import Broadcast


@dataclass
class _Sent:
    broadcast: Broadcast[Rulebook]
    revised: int
    floor: int
    borrowers: int = 0


class LentRules:
    """Rules that stay with the workers until this is given back. A context manager that gives it back."""

    def __init__(self, rules: SentRules, sent: _Sent) -> None:
        self._rules, self._sent = rules, sent
        self.book = sent.broadcast

    def __enter__(self) -> Broadcast[Rulebook]:
        return self.book

    def __exit__(self, *_: object) -> None:
        self._rules._give_back(self._sent)


class SentRules:
    """What one life of a query has sent. `close` when nothing of it runs any more."""

    def __init__(self, context: SparkContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._newest: _Sent | None = None
        #: how often rules were sent
        self.sendings = 0

    def lend(self, book: Rulebook, after: int) -> LentRules:
        """The rules for what comes after `after`. Nobody may change the book meanwhile."""
        with self._lock:
            sent = self._newest
            if sent is None or sent.revised != book.revised or after + 1 < sent.floor:
                self._newest = self._send(book, after + 1)
                if sent is not None and not sent.borrowers:
                    _destroy(sent)
                sent = self._newest
            sent.borrowers += 1
            return LentRules(self, sent)

    def close(self) -> None:
        with self._lock:
            sent, self._newest = self._newest, None
            if sent is not None and not sent.borrowers:
                _destroy(sent)

    def _send(self, book: Rulebook, floor: int) -> _Sent:
        self.sendings += 1
        return _Sent(self._context.broadcast(book.for_workers(floor)), book.revised, floor)

    def _give_back(self, sent: _Sent) -> None:
        with self._lock:
            sent.borrowers -= 1
            if sent is not self._newest and not sent.borrowers:
                _destroy(sent)


def _destroy(sent: _Sent) -> None:
    with suppress(Py4JNetworkError, OSError):  # a JVM that is gone took it along
        sent.broadcast.destroy()
