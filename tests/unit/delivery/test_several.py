"""Several jobs side by side: what ends one is said and tried again, and disturbs no other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tidings.delivery import several
from tidings.delivery.process import also_checked
from tidings.delivery.several import POOL, SeveralJobs
from tidings.delivery.stream_job import SparkEnded
from tidings.errors import LeaseLost, UsageError
from tidings.util.backoff import Backoff

WITHIN = 20.0


class Job:
    """Runs until it is stopped, or ends as it was told."""

    def __init__(self, ends: Exception | None = None) -> None:
        self.started, self._over = threading.Event(), threading.Event()
        self.tally = SimpleNamespace(batches=0)
        self._ends = ends

    def run(self) -> None:
        self.started.set()
        if self._ends is not None:
            raise self._ends
        assert self._over.wait(WITHIN)

    def stop(self) -> None:
        self._over.set()


class Context:
    def __init__(self) -> None:
        self.pools: dict[str, str] = {}

    def setLocalProperty(self, name: str, value: str) -> None:  # noqa: N802
        assert name == POOL
        self.pools[threading.current_thread().name] = value


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "RESTART", Backoff(0.001, 0.01))


def started(jobs: dict[str, Callable[[], Any]], halted: list[tuple[str, str]]) -> tuple[SeveralJobs, Context, Any]:
    context, failures = Context(), list[BaseException]()
    made = SeveralJobs(SimpleNamespace(sparkContext=context), jobs, lambda *said: halted.append(said))  # type: ignore[arg-type]

    def run() -> None:
        try:
            made.run()
        except SparkEnded as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def ended() -> list[BaseException]:
        thread.join(WITHIN)
        assert not thread.is_alive()
        return failures

    return made, context, ended


def test_one_that_fails_again_and_again_is_tried_again_and_the_other_is_not_disturbed() -> None:
    sound, halted = Job(), list[tuple[str, str]]()
    later = Job()
    lives: list[Job] = [Job(LeaseLost("taken")), Job(RuntimeError("a mistake of ours")), later]
    made, context, end = started({"main": lambda: sound, "lab": lambda: lives.pop(0)}, halted)
    assert later.started.wait(WITHIN)
    assert sound.started.is_set()
    made.stop()
    assert end() == []
    assert halted == [("lab", "taken"), ("lab", "a mistake of ours")]
    assert context.pools == {"deliver-main": "main", "deliver-lab": "lab"}


def test_the_end_of_spark_ends_all_of_them() -> None:
    sound = Job()
    _, _, end = started({"main": lambda: sound, "lab": lambda: Job(SparkEnded("the JVM ended"))}, [])
    assert [str(error) for error in end()] == ["the JVM ended"]


def test_a_job_that_cannot_even_be_made_is_tried_again() -> None:
    halted, good = list[tuple[str, str]](), Job()
    made_of: list[Callable[[], Job]] = [lambda: (_ for _ in ()).throw(OSError("no file")), lambda: good]
    made, _, end = started({"main": lambda: made_of.pop(0)()}, halted)
    assert good.started.wait(WITHIN)
    made.stop()
    assert end() == []
    assert halted == [("main", "no file")]


def test_each_space_is_named_once_and_has_an_address_and_a_credential_of_its_own() -> None:
    assert also_checked("main", ["lab", "staging"], url=None, creds=None) == ("lab", "staging")
    for names in (["main"], ["lab", "lab"]):
        with pytest.raises(UsageError, match="give each once"):
            also_checked("main", names, url=None, creds=None)
    with pytest.raises(UsageError, match="each space has its own"):
        also_checked("main", ["lab"], url="nats://127.0.0.1", creds=None)
