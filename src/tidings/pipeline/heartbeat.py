"""Does the JVM answer? Asked in a thread of its own, because whoever asks a process that is stopped waits for ever.

Without an answer for `SILENT` seconds nobody may say that delivery runs; after `STUCK` seconds it is not waited for any
more. A long batch or collection of garbage is neither: other threads of the JVM answer meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

EVERY, SILENT, STUCK = 2.0, 15.0, 60.0


class Pulse:
    """Ask until `end`; what asking raises ends the asking, and is for others to see."""

    def __init__(self, ask: Callable[[], object]) -> None:
        self._ask = ask
        self._over = threading.Event()
        self._answered = time.monotonic()
        self._ended = False
        threading.Thread(target=self._run, name="jvm-pulse", daemon=True).start()

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
