"""The sessions of a host on a disk that cannot be written for a while: real SQLite, no HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tidings.errors import NoSession, StoreReadOnly
from tidings.host.registry import Scope
from tidings.host.schema import SCHEMA
from tidings.host.sessions import HostSession, Sessions
from tidings.util.database import Database

ADA = Scope("main", "SPACE", "AGENT", "ada")


class Clock:
    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def database(tmp_path: Path, clock: Clock) -> Iterator[Database]:
    database = Database(tmp_path / "host.db", SCHEMA, clock=clock)
    yield database
    database.close()


@contextmanager
def read_only(database: Database) -> Iterator[None]:
    """Nothing can be written, by this connection or by one that is opened after it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tidings.util.database.WRITER_MODE", "ro")
        database.write_blocking(lambda c: c.execute("PRAGMA query_only = ON").close(), 10)
        with pytest.raises(StoreReadOnly):
            database.write_blocking(lambda c: c.execute("DELETE FROM session"), 10)
        yield


async def is_known(sessions: Sessions, token: str) -> bool:
    try:
        await sessions.find(token)
    except NoSession:
        return False
    return True


async def test_a_session_that_ends_while_nothing_can_be_written_is_over_at_once_and_on_disk_when_it_can(
    database: Database,
) -> None:
    sessions = await Sessions.open(database)
    told: list[HostSession] = []
    sessions.on_end(told.append)
    session, token = await sessions.begin(ADA, receive=False, program="test")
    ending = sessions.ending(session)
    with read_only(database):
        assert await sessions.end(session) is False, "whoever ended it knows that it is not written"
        assert told == [session], "what it held is given back all the same"
        assert ending.is_set()
        assert not await is_known(sessions, token)
        await sessions.forget_ended()
    assert await is_known(await Sessions.open(database), token), "not written yet"
    await sessions.forget_ended()
    assert not await is_known(await Sessions.open(database), token), "and so after a restart"
    other, its_token = await sessions.begin(ADA, receive=False, program="test")
    assert await sessions.end(other) is True
    assert not await is_known(await Sessions.open(database), its_token)


async def test_a_session_that_was_not_used_for_a_month_is_over_though_nothing_can_be_written(
    database: Database, clock: Clock
) -> None:
    sessions = await Sessions.open(database)
    _, token = await sessions.begin(ADA, receive=False, program="test")
    clock.now += 31 * 86_400
    with read_only(database), pytest.raises(NoSession, match="not used for 30 days"):
        await sessions.find(token)


async def test_that_a_use_cannot_be_noted_keeps_nobody_from_asking(
    database: Database, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = await Sessions.open(database)
    session, token = await sessions.begin(ADA, receive=False, program="test")
    clock.now += 3_700
    with read_only(database):
        assert (await sessions.find(token)).id == session.id
    assert f"the use of session {session.id} is not noted" in caplog.text
