"""The beat of the holder of the deliver lease, and what it may say: does the JVM answer, does a query run?

The JVM is asked in a thread of its own, because whoever asks a process that is stopped waits for ever.
Without an answer for `SILENT` seconds nobody may say that delivery runs; after `STUCK` seconds it is not waited for any
more. A long batch or collection of garbage is neither: other threads of the JVM answer meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tidings.errors import TidingsError
from tidings.server.lease import DeliverLease

EVERY, SILENT, STUCK = 2.0, 15.0, 60.0


class JvmWatchdog:
    """Ask until `end`; what asking raises ends the asking, and is for others to see."""

    def __init__(self, ask: Callable[[], object]) -> None:
        self._ask = ask
        self._over = threading.Event()
        self._answered = time.monotonic()
        self._ended = False
        threading.Thread(target=self._run, name="jvm-watchdog", daemon=True).start()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._ask()
                self._answered = time.monotonic()
                self._over.wait(EVERY)
        except Exception:  # noqa: BLE001  # boundary: a JVM that is gone is found by who uses it, with its reason
            self._ended = True

    @property
    def silent_for(self) -> float:
        """Seconds since the last answer; 0 once nobody asks."""
        return 0.0 if self._ended or self._over.is_set() else time.monotonic() - self._answered

    def end(self) -> None:
        """Nobody asks any more. A question without an answer is left to its thread."""
        self._over.set()


class Heartbeat:
    """Says that the holder of the lease lives, in a thread of its own: a long batch or payment must not look dead."""

    def __init__(self, lease: DeliverLease, on_stuck: Callable[[str], None] = lambda _why: None) -> None:
        self._lease = lease
        self._over = False
        self._due = threading.Event()
        self._delivers = False
        #: set while a query runs
        self.watchdog: JvmWatchdog | None = None
        self._on_stuck = on_stuck
        self._failure: TidingsError | None = None
        self._thread = threading.Thread(target=self._run, name="deliver-beat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._due.wait(self._lease.ttl / 3)
            self._due.clear()
            if self._over:
                return
            self._look()
            try:
                self._lease.beat()
            except TidingsError as error:
                self._failure = error
                return

    def _look(self) -> None:
        silent = self.watchdog.silent_for if self.watchdog is not None else 0.0
        self._lease.delivers = self._delivers and silent < SILENT
        if silent >= STUCK:
            self._on_stuck(f"the JVM of Spark has not answered for {silent:.0f} s: it is stopped, or hangs")

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def say(self, *, delivers: bool) -> None:
        """From now on, and at once, every beat says whether a query runs."""
        self._delivers = delivers
        self._due.set()

    def end(self) -> None:
        self._over = True
        self._due.set()
        self._thread.join()
