"""`links.db` on disk: a change by another program is noticed whenever it happens."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tidings.errors import StoreBroken
from tidings.links import store_file
from tidings.links.store_file import LedgerDatabase


@pytest.fixture
def database(tmp_path: Path) -> Iterator[LedgerDatabase]:
    found = LedgerDatabase(tmp_path / "ledger" / "links.db")
    found.write_blocking(lambda c: c.execute("CREATE TABLE word (text TEXT)").close())
    yield found
    found.close()


def add_word(connection: sqlite3.Connection) -> None:
    connection.execute("INSERT INTO word VALUES (zeroblob(2000))").close()


def count_words(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT count(*) FROM word").fetchone()[0])


def delete(path: Path) -> None:
    path.unlink()


def replace_by_renaming(path: Path) -> None:
    copy = path.with_name("copy.db")
    shutil.copy(path, copy)
    copy.rename(path)


def write_in_place(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def delete_log(path: Path) -> None:
    path.with_name(f"{path.name}-wal").unlink()


def overwrite_log(path: Path) -> None:
    path.with_name(f"{path.name}-wal").write_bytes(b"not a log" * 500)


CHANGES = [delete, replace_by_renaming, write_in_place, delete_log, overwrite_log]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_during_a_transaction_is_not_mistaken_for_the_change_of_the_transaction(
    database: LedgerDatabase, change: Callable[[Path], None]
) -> None:
    def add_word_while_the_file_changes(connection: sqlite3.Connection) -> None:
        add_word(connection)
        change(database.path)

    database.write_blocking(add_word_while_the_file_changes)
    for _ in range(2):
        with pytest.raises(StoreBroken, match="rebuild --ledger"):
            database.write_blocking(add_word)
    database.close()
    with pytest.raises(StoreBroken, match="rebuild --ledger"):
        LedgerDatabase(database.path)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_last_transaction_is_noticed_when_the_file_is_closed(
    database: LedgerDatabase, change: Callable[[Path], None]
) -> None:
    change(database.path)
    database.close()
    with pytest.raises(StoreBroken, match="rebuild --ledger"):
        LedgerDatabase(database.path)


def test_a_checkpoint_is_not_mistaken_for_a_foreign_change(
    database: LedgerDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_file, "CHECKPOINT_EVERY", 4)
    size = database.path.stat().st_size
    for _ in range(40):
        database.write_blocking(add_word)
    assert database.path.stat().st_size > size, "pages reached the file"
    assert database.read_blocking(count_words) == 40
    database.close()
    again = LedgerDatabase(database.path)
    assert again.read_blocking(count_words) == 40
    again.close()
