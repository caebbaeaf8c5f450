"""Looking into a database without being its process: what is read, what is refused, and that nothing is changed."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from hosted import NOW, draft, fill
from tidings.errors import ConfigError, StoreBroken, StoreError, StoreTooNew
from tidings.host import outbox_transitions as moves
from tidings.host import outbox_views
from tidings.host.schema import SCHEMA
from tidings.util.database import Database
from tidings.util.database_snapshot import look


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    database = Database(folder / "host.db", SCHEMA)
    fill(database)
    database.close()
    return folder / "host.db"


def states(connection: sqlite3.Connection) -> list[str]:
    return sorted(row.state for row in outbox_views.newest(connection, "main", "ada", (), 2**62, 100))


ALL = ["cancelled", "confirmed", "dead", "done", "inflight", "pending"]


def test_a_file_that_nobody_has_open_is_read_and_stays_as_it_is(path: Path) -> None:
    before = path.read_bytes()
    assert look(path, SCHEMA, states) == ALL
    assert path.read_bytes() == before


def test_it_cannot_be_written(path: Path) -> None:
    with pytest.raises(StoreError, match="readonly"):
        look(path, SCHEMA, lambda c: c.execute("DELETE FROM outbox"))
    assert look(path, SCHEMA, states) == ALL


def test_a_process_that_opens_and_writes_it_meanwhile_is_not_in_the_way(path: Path) -> None:
    def beside_a_writer(connection: sqlite3.Connection) -> list[str]:
        before = states(connection)
        database = Database(path, SCHEMA)
        database.write_blocking(lambda c: moves.accept(c, draft("later"), NOW))
        assert states(connection) == before, "one snapshot"
        database.close()
        return before

    assert look(path, SCHEMA, beside_a_writer) == ALL
    assert look(path, SCHEMA, states).count("pending") == 2


def written(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()


def garbled(path: Path) -> None:
    path.write_bytes(b"not a database at all " * 500)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda path: path.chmod(0o644), ConfigError, "can be read by others"),
        (lambda path: path.unlink(), ConfigError, "cannot read"),
        (garbled, StoreBroken, "is damaged"),
        (lambda path: written(path, "PRAGMA application_id = 7"), StoreBroken, "not a database of Tidings"),
        (lambda path: written(path, "PRAGMA user_version = 99"), StoreTooNew, "has version 99"),
    ],
)
def test_a_file_that_is_not_one_of_ours_and_of_now_is_refused_by_name(
    path: Path, change: Callable[[Path], object], error: type[Exception], words: str
) -> None:
    change(path)
    with pytest.raises(error, match=words) as refused:
        look(path, SCHEMA, states)
    assert str(path) in str(refused.value)


def test_after_a_look_the_file_may_be_moved_away_and_a_new_one_is_begun(path: Path) -> None:
    """Our own errors say so of a file that is damaged or not ours."""
    look(path, SCHEMA, states)
    path.rename(path.with_name("away.db"))
    database = Database(path, SCHEMA)
    assert database.read_blocking(states) == []
    database.close()


def test_a_new_file_and_a_look_into_the_one_that_was_moved_away_do_not_meet(path: Path) -> None:
    def while_it_is_moved(connection: sqlite3.Connection) -> list[str]:
        path.rename(path.with_name("away.db"))
        database = Database(path, SCHEMA)
        database.write_blocking(lambda c: moves.accept(c, draft("new"), NOW))
        assert states(connection) == ALL
        assert database.read_blocking(states) == ["pending"]
        database.close()
        return states(connection)

    assert look(path, SCHEMA, while_it_is_moved) == ALL
    assert look(path, SCHEMA, states) == ["pending"]


def test_a_log_that_holds_something_is_not_taken_for_one_that_a_look_left(path: Path) -> None:
    log = path.with_name("host.db-wal")
    log.write_bytes(b"frames")
    path.rename(path.with_name("away.db"))
    with pytest.raises(StoreBroken, match="its log is there"):
        Database(path, SCHEMA)
    assert log.read_bytes() == b"frames"


@pytest.mark.parametrize("name", [b"coalerce", b"c\xd7\xcclesce"])
def test_a_schema_that_a_flipped_bit_changed_is_damage_and_named(path: Path, name: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(b"coalesce", name).replace(b"lease_owner", b"leasg_owner"))
    with pytest.raises(StoreBroken, match=r"host\.db is damaged"):
        look(path, SCHEMA, states)
