"""Several spaces in one Spark: a job and a query each, side by side, and none waits for another.

Each job runs in a thread and in a scheduling pool of its own, so that a space with a backlog does not keep the tasks of
the others waiting. What ends one job, such as a lease that somebody else took or a credential that was revoked, is
said, and that job alone is tried again. Only the end of Spark itself ends all of them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tidings.delivery.stream_job import RESTART, SparkEnded, StreamJob, first_words
from tidings.errors import TidingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)
POOL = "spark.scheduler.pool"


class SeveralJobs:
    """`jobs`: what makes the job of each space. `run` returns when `stop` was called, or raises what ended Spark."""

    def __init__(
        self,
        spark: SparkSession,
        jobs: Mapping[str, Callable[[], StreamJob]],
        on_halt: Callable[[str, str], None] = lambda _space, _why: None,
    ) -> None:
        self._spark, self._jobs, self._on_halt = spark, jobs, on_halt
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self.running: dict[str, StreamJob] = {}
        self._ended: SparkEnded | None = None

    def stop(self) -> None:
        with self._lock:
            self._stopping.set()
            for job in self.running.values():
                job.stop()

    @property
    def has_worked(self) -> bool:
        return any(job.tally.batches > 0 for job in self.running.values())

    def run(self) -> None:
        threads = [threading.Thread(target=self._keep, args=(space,), name=f"deliver-{space}") for space in self._jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._ended is not None:
            raise self._ended

    def _keep(self, space: str) -> None:
        """Run the job of a space, and again whatever ended it."""
        delays = RESTART.delays(fresh_after=60)
        while not self._stopping.is_set():
            try:
                self._spark.sparkContext.setLocalProperty(POOL, space)  # of this thread, and of the queries it starts
                job = self._jobs[space]()
                with self._lock:
                    if self._stopping.is_set():
                        return
                    self.running[space] = job
                job.run()
            except SparkEnded as error:
                self._ended = error
                self.stop()
            except Exception as error:  # boundary: whatever it is, the other spaces go on
                log.warning("space %s: starting again: %s", space, error, exc_info=not isinstance(error, TidingsError))
                self._on_halt(space, first_words(error))
                self._stopping.wait(next(delays))
