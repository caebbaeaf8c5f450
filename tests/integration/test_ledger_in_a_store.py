"""The tables of the pipeline in a real S3 store: who wins, what is said when it fails, and that nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("deltalake")

import pyarrow as pa

from object_store import KEY, SECRET, ObjectStore, object_store
from tidings.delivery.deliverer import DeliverBatch
from tidings.delivery.delta_writer import DeltaWriter
from tidings.delivery.ledger import DeltaLedger, LedgerPaths, append_events, open_debts, put_damaged_aside
from tidings.errors import ConflictError, OutcomeUnknown, StoreBroken, StoreError
from tidings.model.deferred import DebtEvent
from tidings.model.planning import Delivered
from tidings.wire.message import new_id

pytestmark = pytest.mark.timeout(180)
SCHEMA = pa.schema([("n", pa.int64())])
#: a test does not wait as long as a driver does
HASTY = {"timeout": "2s", "max_retries": "1", "retry_timeout": "3s"}
UNSEEN = (StoreError, OutcomeUnknown)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with object_store(tmp_path_factory.mktemp("store")) as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running


@pytest.fixture
def opened(store: ObjectStore) -> Callable[..., DeltaWriter]:
    uri = store.uri(f"table-{new_id()}")
    return lambda **more: DeltaWriter(uri, SCHEMA, storage_options=store.options | more)


def rows(*numbers: int) -> pa.Table:
    return pa.table({"n": list(numbers)}, schema=SCHEMA)


def numbers(writer: DeltaWriter) -> list[int]:
    return sorted(writer.read()["n"].to_pylist())


@pytest.fixture
def paths(store: ObjectStore, tmp_path: Path) -> LedgerPaths:
    return LedgerPaths.below(tmp_path, store.uri(new_id()), store.options)


# --- who wins ---


def test_of_two_drivers_that_commit_at_once_one_wins_and_the_other_is_refused(
    opened: Callable[..., DeltaWriter],
) -> None:
    opened()
    for batch in range(5):
        drivers = [opened() for _ in range(2)]
        for driver in drivers:
            driver.reached("deliver")
        together, outcomes = threading.Barrier(2), list[str]()

        def commit(
            number: int,
            drivers: list[DeltaWriter] = drivers,
            together: threading.Barrier = together,
            batch: int = batch,
            outcomes: list[str] = outcomes,
        ) -> None:
            together.wait()
            try:
                drivers[number].append(rows(batch), app="deliver", version=batch)
                outcomes.append("won")
            except ConflictError:
                outcomes.append("refused")

        threads = [threading.Thread(target=commit, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["refused", "won"]
    assert numbers(opened()) == [0, 1, 2, 3, 4]


def test_many_who_append_at_once_lose_nothing(opened: Callable[..., DeltaWriter]) -> None:
    opened()

    def write(number: int) -> None:
        writer = opened()
        for each in range(5):
            writer.append(rows(number * 10 + each), app=f"app-{number}", version=each)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers(opened()) == sorted(n * 10 + each for n in range(4) for each in range(5))


# --- a store that fails ---


@pytest.mark.parametrize(
    ("fault", "words"), [("403", "403"), ("503", "503"), pytest.param("slow", "HTTP error", marks=pytest.mark.slow)]
)
def test_a_store_that_refuses_or_is_too_slow_is_said_and_nothing_is_lost_or_doubled(
    store: ObjectStore, opened: Callable[..., DeltaWriter], fault: str, words: str
) -> None:
    opened().append(rows(1), app="deliver", version=1)
    writer = opened(**HASTY)
    with store.failing(fault):
        with pytest.raises(UNSEEN) as commit:
            writer.append(rows(2), app="deliver", version=2)
        with pytest.raises(StoreError) as opening:
            opened(**HASTY)
        with pytest.raises(StoreError) as reading:
            writer.read()
    for caught in (commit, opening, reading):
        said = str(caught.value)
        assert not isinstance(caught.value, StoreBroken)
        assert words in said
        assert "\n" not in said
        assert len(said) < 600
        assert SECRET not in said
        assert KEY not in said
    again = opened()
    again.append(rows(2), app="deliver", version=2)
    assert numbers(again) == [1, 2]


@pytest.mark.parametrize("app", ["deliver", None])
def test_a_commit_that_was_made_and_answered_with_an_error_counts_once(
    store: ObjectStore, opened: Callable[..., DeltaWriter], app: str | None
) -> None:
    writer = opened()
    version = None if app is None else 1
    with store.failing("done, and says 503", method="PUT", ending=".json"):
        try:
            writer.append(rows(1), app=app, version=version)
        except UNSEEN:
            assert app is not None, "whoever is told so asks what the application reached"
            again = opened()
            assert again.reached(app) == version
    assert numbers(opened()) == [1]


def test_a_list_that_lacks_the_newest_commit_costs_no_row_and_doubles_none(
    store: ObjectStore, opened: Callable[..., DeltaWriter]
) -> None:
    writer = opened()
    for number in range(3):
        writer.append(rows(number), app="deliver", version=number)
    with store.failing("lost list"):
        blind = opened()
        assert blind.reached("deliver") == 1, "it does not see the last one"
        with pytest.raises((ConflictError, *UNSEEN)):
            blind.append(rows(2), app="deliver", version=2)
    assert numbers(opened()) == [0, 1, 2]
    assert opened().reached("deliver") == 2


# --- the ledger ---


def written(paths: LedgerPaths) -> DeltaLedger:
    ledger = DeltaLedger(paths, app="deliver:one", epoch="e")
    ledger.load_debts()
    ledger.write_deliveries(DeliverBatch(1, 0, 10, 10), [Delivered("A", "first", 1, "general", 1, 5, 5, 1)])
    ledger.write_events([DebtEvent(ledger.next_order(), "owe", "A", "general", 5, "no room")])
    return ledger


def test_a_ledger_in_a_store_has_its_debts_there_so_that_another_machine_knows_them(
    paths: LedgerPaths, tmp_path: Path
) -> None:
    written(paths)
    assert not list(tmp_path.iterdir())
    elsewhere = DeltaLedger(paths, app="deliver:two", epoch="e")
    assert elsewhere.load_debts().open["A", "general"].after == 5
    assert set(elsewhere.last_frames()) == {"A"}
    assert elsewhere.handed("A", above=0, since=0)[0].last == 5
    assert not elsewhere.handed("A", above=1, since=0)
    append_events(paths.debts, [DebtEvent(1, "cancel", "A", "general", 7)], writer="operator", storage=paths.storage)
    assert [event.seq for event in elsewhere.foreign_events()] == [7]


def test_a_damaged_table_in_a_store_stays_and_is_named_with_what_to_do(paths: LedgerPaths, store: ObjectStore) -> None:
    ledger = written(paths)
    (path,) = pa.table(ledger._deliveries.table.get_add_actions(flatten=True))["path"].to_pylist()
    store.flip(f"{paths.deliveries}/{path}")
    with pytest.raises(StoreBroken, match=r"deliveries: part-\S+ is damaged .*move it away"):
        ledger.last_frames()
    assert put_damaged_aside(paths) == []


@pytest.mark.slow
def test_people_read_a_table_in_a_store_and_their_process_ends_in_order(paths: LedgerPaths, store: ObjectStore) -> None:
    """With Arrow's threads in deltalake's files every third aborted."""
    written(paths)
    program = (
        "import json, sys\n"
        "from tidings.delivery.ledger import open_debts\n"
        "print(len(open_debts(sys.argv[1], json.loads(sys.argv[2])).open))\n"
    )
    assert len(open_debts(paths.debts, paths.storage).open) == 1
    for _ in range(6):
        command = [sys.executable, "-c", program, paths.debts, json.dumps(dict(paths.storage))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


def test_what_holds_options_does_not_show_them(paths: LedgerPaths, store: ObjectStore) -> None:
    assert store.endpoint not in repr(paths)
