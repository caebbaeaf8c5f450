"""The deliver job decides: another query, or the end of the process because there is no Spark any more."""

import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from py4j.protocol import Py4JNetworkError

from tidings.delivery.job import DeliverJob, span
from tidings.delivery.source_options import SourceOptions
from tidings.delivery.stream_job import JobSettings, SparkEnded
from tidings.errors import TidingsError, UsageError, WireError

SETTINGS = JobSettings("main", "A", "U", "nats://127.0.0.1:1", "none", "checkpoint", "lake")


class Spark:
    """A session over a process that is or is not there."""

    def __init__(self, process: subprocess.Popen[bytes] | None, *, stopped: bool = False) -> None:
        def is_stopped() -> bool:
            return stopped

        java = SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=is_stopped))
        self.sparkContext = SimpleNamespace(_gateway=SimpleNamespace(proc=process), _jsc=java)
        self.dataSource = SimpleNamespace(register=lambda _source: None)


@pytest.fixture
def process() -> Any:
    with subprocess.Popen(["sleep", "60"]) as running:
        yield running
        running.kill()


def job(spark: Spark, lives: list[Exception], monkeypatch: pytest.MonkeyPatch) -> tuple[DeliverJob, list[str]]:
    """A job whose queries end as told, and what it says of each; after the last one it is told to stop."""
    halted: list[str] = []
    made = DeliverJob(spark, SETTINGS, on_halt=halted.append)  # type: ignore[arg-type]

    def live() -> None:
        error = lives.pop(0)
        if not lives:
            made.stop()
        raise error

    monkeypatch.setattr(made, "_run_once", live)
    return made, halted


GONE: dict[str, Callable[[], Exception]] = {
    "refused": lambda: ConnectionRefusedError(111, "Connection refused"),
    "py4j": lambda: Py4JNetworkError("Answer from Java side is empty"),
}


@pytest.mark.parametrize("how", GONE)
def test_a_jvm_that_was_killed_ends_the_job_and_its_signal_is_named(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    process.send_signal(signal.SIGKILL)
    made, halted = job(Spark(process), [GONE[how](), GONE[how]()], monkeypatch)
    with pytest.raises(SparkEnded, match=rf"pid {process.pid}\) ended by signal 9"):
        made.run()
    assert halted == []


def test_a_context_that_was_stopped_ends_the_job_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = job(Spark(None, stopped=True), [TidingsError("the query was ended")], monkeypatch)
    with pytest.raises(SparkEnded, match="was stopped"):
        made.run()


def test_a_query_that_failed_under_a_living_spark_is_tried_again_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    made, halted = job(Spark(None), [TidingsError("a worker could not read")], monkeypatch)
    made.run()
    assert halted == ["a worker could not read"]
    assert made.tally.last_error == "a worker could not read"


def test_losses_are_not_looked_at_while_a_batch_may_change_them() -> None:
    made = DeliverJob(Spark(None), SETTINGS)  # type: ignore[arg-type]
    debts = SimpleNamespace(untold={"U": []}, uncounted=lambda: pytest.fail("a batch is under way"))
    made.deliverer = SimpleNamespace(debts=debts)  # type: ignore[assignment]
    with made._lock:
        made._count_losses()


@pytest.mark.parametrize(
    ("cores", "records", "size"),
    [(2, 15_000, 32 << 20), (12, 2_500, -(-(64 << 20) // 12)), (500, 2_000, 1 << 20)],
)
def test_a_full_batch_has_a_task_for_every_core_unless_tasks_would_be_tiny(cores: int, records: int, size: int) -> None:
    spark = Spark(None)
    spark.sparkContext.defaultParallelism = cores
    parts = DeliverJob(spark, SETTINGS).source_options()  # type: ignore[arg-type]
    assert (parts["partitionRecords"], parts["partitionBytes"]) == (str(records), str(size))


def test_a_credential_is_sent_to_workers_only_if_told_and_then_not_its_path(tmp_path: Path) -> None:
    creds = tmp_path / "pipeline.creds"
    creds.write_text("the seed")
    creds.chmod(0o600)
    spark = Spark(None)
    spark.sparkContext.defaultParallelism = 1

    def login(**changes: Any) -> dict[str, str]:
        settings = replace(SETTINGS, creds=str(creds), **changes)
        options = DeliverJob(spark, settings).source_options()  # type: ignore[arg-type]
        return {name: value for name, value in options.items() if name.startswith("creds")}

    assert login() == {"creds": str(creds)}
    assert login(carry_creds=True) == {"credsSecret": "the seed"}
    creds.write_text("renewed")
    assert login(carry_creds=True) == {"credsSecret": "renewed"}


def test_a_credential_that_travels_is_in_no_representation_and_no_refusal() -> None:
    secret = "SUASECRETSECRETSECRET"
    options = {"url": "nats://127.0.0.1:1", "stream": "LOG", "credsSecret": secret}
    source = SourceOptions.of(options)
    assert secret not in repr(source)
    with pytest.raises(WireError) as caught:
        source.location.connect()
    assert secret not in str(caught.value)
    with pytest.raises(UsageError, match="creds and credsSecret are different ways") as twice:
        SourceOptions.of(options | {"creds": "file"})
    assert secret not in str(twice.value)


def test_a_time_is_said_in_the_unit_that_fits() -> None:
    assert [span(each) for each in (10, 90, 7_200, 14 * 86_400)] == ["10 seconds", "1.5 minutes", "2 hours", "14 days"]
