"""The database of a host: one writer, group commit, failures by name, and nothing answered that is not on disk."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import tidings
from hosted import held_writer, together
from tidings.errors import (
    ConfigError,
    StoreBroken,
    StoreBusy,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreTooNew,
)
from tidings.util import database as module
from tidings.util.database import Database, Schema

NOTE = "CREATE TABLE note (row INTEGER PRIMARY KEY AUTOINCREMENT, text TEXT UNIQUE)"
NOTES = Schema(4711, NOTE)
FOREVER = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "notes.db"


@pytest.fixture
def notes(path: Path) -> Iterator[Database]:
    database = Database(path, NOTES)
    yield database
    database.close()


def write(text: str | None) -> Callable[[sqlite3.Connection], int]:
    def job(connection: sqlite3.Connection) -> int:
        return connection.execute("INSERT INTO note (text) VALUES (?)", (text,)).lastrowid or 0

    return job


def texts(connection: sqlite3.Connection) -> list[str]:
    return [text for (text,) in connection.execute("SELECT text FROM note ORDER BY row")]


def on_disk(path: Path) -> list[str]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return texts(connection)


# ---------------------------------------------------------------------------------------------------- group commit


async def test_many_callers_share_one_commit(notes: Database) -> None:
    said: list[str] = []
    notes.write_blocking(lambda c: c.set_trace_callback(said.append))
    said.clear()
    rows = await together(notes, *(write(f"note {n}") for n in range(64)))
    assert sorted(rows) == list(range(1, 65))
    assert said.count("COMMIT") == 2, "one for the job that held the writer, one for all others"


async def test_callers_of_one_turn_share_one_commit_however_long_each_takes_to_ask(notes: Database) -> None:
    async def ask(text: str) -> None:
        threading.Event().wait(0.005)  # long enough for an idle writer to begin
        await notes.write(write(text))

    before = notes.commits
    await asyncio.gather(*(ask(str(number)) for number in range(8)))
    assert notes.commits == before + 1


async def test_each_loop_is_woken_once_for_all_its_callers(notes: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, woken = asyncio.get_running_loop(), 0
    plain = loop.call_soon_threadsafe

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal woken
        woken += given[0] is module._answer_each
        return plain(*given, **named)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    await together(notes, *(write(f"note {n}") for n in range(32)))
    assert woken == 1


async def test_nobody_is_answered_before_the_commit(
    notes: Database, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(module, "reach", lambda name: seen.append(on_disk(path)) if "before" in name else None)
    with held_writer(notes):
        asked = asyncio.ensure_future(notes.write(write("one")))
        asked.add_done_callback(lambda _: seen.append(on_disk(path)))
        await asyncio.sleep(0)
    await asked
    assert seen[-2:] == [[], ["one"]]


async def test_a_job_that_raises_is_undone_alone(notes: Database, path: Path) -> None:
    def half(connection: sqlite3.Connection) -> None:
        write("half")(connection)
        raise LookupError("changed my mind")

    answers = await together(notes, write("first"), half, write("first"), write("last"))
    assert answers[0] == 1
    assert isinstance(answers[1], LookupError)
    assert isinstance(answers[2], sqlite3.IntegrityError)
    assert isinstance(answers[3], int)
    assert on_disk(path) == ["first", "last"]


async def test_a_job_alone_in_its_group_that_raises_leaves_nothing(notes: Database, path: Path) -> None:
    def half(connection: sqlite3.Connection) -> None:
        write("half")(connection)
        raise LookupError("changed my mind")

    with pytest.raises(LookupError):
        await notes.write(half)
    await notes.write(write("whole"))
    assert on_disk(path) == ["whole"]


@pytest.mark.parametrize("word", ["ROLLBACK", "COMMIT"])
async def test_a_job_that_ends_the_transaction_is_found_out_and_those_behind_it_are_done(
    notes: Database, word: str
) -> None:
    answers = await together(notes, write("first"), lambda c: c.execute(word).close(), write("last"))
    assert isinstance(answers[0], StoreError)
    assert isinstance(answers[1], StoreError)
    assert isinstance(answers[2], int)
    assert "last" in notes.read_blocking(texts)


async def test_a_caller_that_went_away_takes_nobody_with_it(notes: Database, path: Path) -> None:
    with held_writer(notes):
        gone = asyncio.ensure_future(notes.write(write("gone")))
        stays = asyncio.ensure_future(notes.write(write("stays")))
        await asyncio.sleep(0)
        gone.cancel()
    assert await stays
    assert "stays" in on_disk(path)


async def test_a_reader_sees_what_was_answered_and_cannot_write(notes: Database) -> None:
    await notes.write(write("one"))
    assert await notes.read(texts) == ["one"]
    with pytest.raises(StoreReadOnly):
        await notes.read(write("two"))
    assert notes.read_blocking(texts) == ["one"]


async def test_every_commit_is_synced(notes: Database) -> None:
    def settings(connection: sqlite3.Connection) -> tuple[Any, ...]:
        names = ("journal_mode", "synchronous", "foreign_keys")
        return tuple(connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names)

    assert await notes.write(settings) == ("wal", 2, 1)


# -------------------------------------------------------------------------------------------------------- bad days


async def test_a_full_database_is_said_and_room_is_enough_to_go_on(notes: Database, path: Path) -> None:
    def limit(pages: int) -> Callable[[sqlite3.Connection], None]:
        return lambda c: c.execute(f"PRAGMA max_page_count = {pages}").close()

    await notes.write(limit(8))
    with pytest.raises(StoreFull, match=r"notes\.db.*make room"):
        await notes.write(write("x" * 100_000))
    answers = await together(notes, write("small"), write("x" * 100_000))
    assert isinstance(answers[0], int)
    assert isinstance(answers[1], StoreFull)
    await notes.write(limit(100_000))
    await notes.write(write("y" * 100_000))
    assert [text[0] for text in on_disk(path)] == ["s", "y"]


@contextmanager
def no_file_grows_beyond(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_commit_that_the_disk_refuses_fails_all_of_it_and_the_next_one_works(
    notes: Database, path: Path
) -> None:
    await notes.write(write("before"))
    wal = path.with_name("notes.db-wal")
    with no_file_grows_beyond(wal.stat().st_size + 100):
        answers = await together(notes, *(write(f"note {n}") for n in range(8)))
    assert {type(answer) for answer in answers} == {StoreFull}
    assert notes.read_blocking(texts) == ["before"]
    assert await notes.write(write("after")) > 0
    assert notes.read_blocking(texts) == ["before", "after"]


async def test_a_read_only_database_is_said_and_can_be_read_and_recovers(
    notes: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await notes.write(write("before"))
    assert notes._connection is not None
    notes._connection.close()
    with monkeypatch.context() as patched:
        patched.setattr(module, "WRITER_MODE", "ro")
        for _ in range(2):
            with pytest.raises(StoreReadOnly, match="writable"):
                await notes.write(write("refused"))
        assert await notes.read(texts) == ["before"]
    await notes.write(write("after"))
    assert await notes.read(texts) == ["before", "after"]


async def test_a_connection_that_broke_is_opened_again(notes: Database) -> None:
    await notes.write(write("before"))
    assert notes._connection is not None
    notes._connection.close()
    await notes.write(write("after"))
    assert await notes.read(texts) == ["before", "after"]


async def test_a_file_that_was_taken_away_is_not_made_anew(notes: Database, path: Path, tmp_path: Path) -> None:
    await notes.write(write("before"))
    assert notes._connection is not None
    notes._connection.close()
    away = path.rename(tmp_path / "away.db")
    with pytest.raises((StoreError, ConfigError), match=r"notes\.db"):
        await notes.write(write("lost"))
    assert not path.exists()
    away.rename(path)
    await notes.write(write("after"))


CHILD = """
    import sys
    from pathlib import Path
    from tidings.util.database import Database, Schema
    notes = Database(Path(sys.argv[1]), Schema(4711, sys.argv[2]))
    notes.write_blocking(lambda c: c.execute("INSERT INTO note (text) VALUES ('said')").close())
    print("answered", flush=True)
    sys.stdin.read()
"""


def child(path: Path, failpoint: str = "") -> subprocess.Popen[str]:
    sources = {"PYTHONPATH": str(Path(tidings.__file__).parents[1]), "TIDINGS_FAILPOINT": failpoint}
    program = [sys.executable, "-c", textwrap.dedent(CHILD), str(path), NOTE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(program, env=os.environ | sources, **pipes)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(("failpoint", "kept"), [("store.before_commit", []), ("store.after_commit", ["said"])])
def test_what_a_killed_process_had_committed_is_kept_and_nothing_else(
    path: Path, failpoint: str, kept: list[str]
) -> None:
    with child(path, f"{failpoint}:kill") as killed:
        said, _ = killed.communicate(timeout=30)
    assert (killed.returncode, said) == (-signal.SIGKILL, "")
    database = Database(path, NOTES)
    assert database.read_blocking(texts) == kept
    database.close()


def test_a_second_process_is_refused_by_name_until_the_first_is_gone(path: Path) -> None:
    with child(path) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "answered\n"
        with pytest.raises(StoreBusy, match=f"pid {first.pid}"):
            Database(path, NOTES)
        first.kill()
    database = Database(path, NOTES)
    assert database.read_blocking(texts) == ["said"]
    with pytest.raises(StoreBusy):
        Database(path, NOTES)
    database.close()
    Database(path, NOTES).close()


# --------------------------------------------------------------------------------------------------------- closing


async def test_closing_does_what_is_queued(path: Path) -> None:
    notes = Database(path, NOTES)
    with held_writer(notes):
        asked = [asyncio.ensure_future(notes.write(write(f"note {n}"))) for n in range(10)]
        await asyncio.sleep(0)
        closer = threading.Thread(target=notes.close)
        closer.start()
    assert sorted(await asyncio.gather(*asked)) == list(range(1, 11))
    closer.join(10)
    assert len(on_disk(path)) == 10


async def test_closing_does_what_was_asked_for_in_the_same_turn(path: Path) -> None:
    database = Database(path, NOTES)
    asked = asyncio.ensure_future(database.write(write("just now")))
    asyncio.get_running_loop().call_soon(database.close)  # before the turn's jobs are queued
    await asked
    assert on_disk(path) == ["just now"]


async def test_a_closed_database_says_so(path: Path) -> None:
    notes = Database(path, NOTES)
    notes.close()
    notes.close()
    with pytest.raises(StoreClosed, match=r"notes\.db is closed"):
        await notes.write(write("late"))
    with pytest.raises(StoreClosed):
        notes.write_blocking(write("late"))
    with pytest.raises(StoreClosed):
        await notes.read(texts)


@pytest.mark.parametrize("beside", [True, False])
async def test_closing_ends_in_bounded_time_and_fails_what_is_left(path: Path, beside: bool) -> None:
    notes = Database(path, NOTES)
    begun = threading.Event()

    def endless(connection: sqlite3.Connection) -> None:
        begun.set()
        connection.execute(FOREVER).fetchone()

    asked: list[asyncio.Future[Any]] = [asyncio.ensure_future(ask(endless)) for ask in (notes.write, notes.read)]
    if beside:  # in the same group as the one that does not end
        asked += [asyncio.ensure_future(notes.write(write(f"note {n}"))) for n in range(3)]
    await asyncio.sleep(0)
    assert await asyncio.to_thread(begun.wait, 10)
    if not beside:
        asked += [asyncio.ensure_future(notes.write(write(f"note {n}"))) for n in range(3)]
    asked += [asyncio.ensure_future(notes.read(endless)) for _ in range(3)]
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await asyncio.to_thread(notes.close, 0.1)
    async with asyncio.timeout(5):
        answers = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(answer) for answer in answers} == {StoreClosed}
    Database(path, NOTES).close()


# --------------------------------------------------------------------------------------------- the file and its version


def test_a_new_file_is_private(path: Path) -> None:
    notes = Database(path, NOTES)
    notes.write_blocking(write("one"))
    modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.glob("notes.db*")}
    notes.close()
    assert {modes[name] for name in ("notes.db", "notes.db-wal", "notes.db-shm")} == {0o600}


def test_a_file_that_others_can_read_is_refused(path: Path) -> None:
    Database(path, NOTES).close()
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Database(path, NOTES)


def test_a_newer_file_is_refused_by_name_and_left_alone(path: Path) -> None:
    Database(path, Schema(4711, NOTE, version=2)).close()
    before = path.read_bytes()
    with pytest.raises(StoreTooNew, match=r"notes\.db has version 2, this Tidings knows 1: use"):
        Database(path, NOTES)
    assert path.read_bytes() == before
    Database(path, Schema(4711, NOTE, version=2)).close()


def test_tables_that_cannot_be_created_leave_an_empty_file(path: Path) -> None:
    with pytest.raises((sqlite3.Error, StoreBroken)):
        Database(path, Schema(4711, f"{NOTE}; INSERT INTO note (text) VALUES ('half'); INSERT INTO nowhere VALUES (1)"))
    after = Database(path, NOTES)
    assert after.read_blocking(lambda c: c.execute("PRAGMA user_version").fetchone()) == (1,)
    assert after.read_blocking(texts) == []
    after.close()


def test_a_file_that_another_program_made_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    path.chmod(0o600)
    with pytest.raises(StoreBroken, match="another program"):
        Database(path, NOTES)
    Database(path.with_name("other.db"), Schema(1, NOTE)).close()
    with pytest.raises(StoreBroken, match="another program"):
        Database(path.with_name("other.db"), NOTES)


def _no_header(content: bytearray) -> None:
    content[:100] = bytes(100)


def _torn_page(content: bytearray) -> None:
    content[4096:] = b"\xa5" * (len(content) - 4096)


@pytest.mark.parametrize("damage", [_no_header, _torn_page])
def test_a_damaged_file_is_refused_by_name_and_never_replaced(path: Path, damage: Callable[[bytearray], None]) -> None:
    notes = Database(path, NOTES)
    for n in range(100):
        notes.write_blocking(write(f"{n}" * 100))
    notes.close()
    content = bytearray(path.read_bytes())
    damage(content)
    path.write_bytes(content)
    with pytest.raises(StoreBroken, match=r"notes\.db is damaged.*restore a copy"):
        Database(path, NOTES)
    assert path.read_bytes() == content


RULES = Schema(4712, "CREATE TABLE rule (x TEXT CHECK (coalesce(x, 'yes') <> 'no'))")


def _renamed_everywhere(content: bytearray) -> None:
    content[:] = content.replace(b"coalesce", b"coalerce")


def _no_text(content: bytearray) -> None:
    content[:] = content.replace(b"coalesce", b"c\xd7\xcclesce")


@pytest.mark.parametrize("damage", [_renamed_everywhere, _no_text])
def test_a_schema_that_a_flipped_bit_changed_is_refused_by_name_though_its_pages_are_whole(
    path: Path, damage: Callable[[bytearray], None]
) -> None:
    rules = Database(path, RULES)
    rules.write_blocking(lambda c: c.execute("INSERT INTO rule VALUES ('perhaps')").close())
    rules.close()
    content = bytearray(path.read_bytes())
    damage(content)
    path.write_bytes(content)
    with pytest.raises(StoreBroken, match=r"notes\.db is damaged.*restore a copy"):
        Database(path, RULES)
    assert path.read_bytes() == content


@pytest.mark.parametrize("mode", ["read_blocking", "write_blocking"])
@pytest.mark.parametrize(
    "query", ["SELECT text FROM note", "SELECT coalerce(text) FROM note", "SELECT colour FROM note"]
)
def test_what_cannot_be_read_as_it_was_written_is_damage_and_named(path: Path, mode: str, query: str) -> None:
    notes = Database(path, NOTES)
    notes.write_blocking(lambda c: c.execute("INSERT INTO note (text) VALUES (CAST(x'd7cc' AS TEXT))").close())
    with pytest.raises(StoreBroken, match=r"notes\.db is damaged"):
        getattr(notes, mode)(lambda c: c.execute(query).fetchall())
    notes.close()


def test_a_failure_of_one_statement_is_no_damage(notes: Database) -> None:
    notes.write_blocking(write("one"))
    with pytest.raises(sqlite3.IntegrityError):
        notes.write_blocking(write("one"))
    with pytest.raises(ValueError, match="of the job"):
        notes.read_blocking(lambda _c: int("of the job"))


def test_a_log_without_its_file_is_refused(path: Path) -> None:
    path.with_name("notes.db-wal").write_bytes(b"something")
    with pytest.raises(StoreBroken, match=r"notes\.db is gone"):
        Database(path, NOTES)
    assert not path.exists()


def test_a_file_that_was_made_and_never_filled_is_taken_as_new(path: Path) -> None:
    path.touch(0o600)
    notes = Database(path, NOTES)
    assert notes.write_blocking(write("one")) == 1
    notes.close()


def test_a_database_that_was_closed_is_one_file_that_can_be_copied(path: Path, tmp_path: Path) -> None:
    database = Database(path, NOTES)
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as onlooker:  # of another process, say
        database.write_blocking(write("one"))
        assert database.read_blocking(texts) == texts(onlooker) == ["one"]
        database.write_blocking(write("two"))
        database.close()
        copy = tmp_path / "copy.db"
        copy.write_bytes(path.read_bytes())
        assert on_disk(copy) == ["one", "two"]
