"""The tables of the host: what they refuse whatever the code does, and a file of a later version."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from hosted import NOW, TERMS, arrival, draft, fill
from tidings.errors import IdReused, StoreTooNew
from tidings.host import inbox
from tidings.host import outbox_transitions as moves
from tidings.host import outbox_views as views
from tidings.host.outbox_transitions import Lane
from tidings.host.schema import SCHEMA
from tidings.util.database import Database

ROW = {"pending": 1, "inflight": 2, "confirmed": 3, "done": 4, "dead": 5, "cancelled": 6}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path / "host.db", SCHEMA)
    fill(database)
    yield database
    database.close()


def refused(host: Database, statement: str) -> str:
    with pytest.raises(sqlite3.IntegrityError) as caught:
        host.write_blocking(lambda c: c.execute(statement).close())
    return str(caught.value)


@pytest.mark.parametrize("state", ["done", "dead", "cancelled"])
@pytest.mark.parametrize(
    "change",
    [
        *(f"state = '{state}'" for state in ("pending", "inflight", "confirmed", "dead", "cancelled")),
        "attempts = attempts + 1",
        "code = 'other'",
        "ended_at = ended_at + 1",
        "doubt = 1",
    ],
)
def test_a_terminal_state_never_changes(host: Database, state: str, change: str) -> None:
    assert refused(host, f"UPDATE outbox SET {change} WHERE row = {ROW[state]}")


@pytest.mark.parametrize(
    "column",
    ["space", "sender", "id", "fingerprint", "kind", "destination", "subject", "accepted_at", "max_age", "row"],
)
@pytest.mark.parametrize("state", ROW)
def test_who_sent_what_where_never_changes(host: Database, state: str, column: str) -> None:
    assert "never changes" in refused(host, f"UPDATE outbox SET {column} = 1 WHERE row = {ROW[state]}")


@pytest.mark.parametrize("state", ROW)
def test_no_id_is_ever_freed(host: Database, state: str) -> None:
    assert "freed" in refused(host, f"DELETE FROM outbox WHERE row = {ROW[state]}")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE outbox SET lease_owner = 'me', lease_until = 1 WHERE row = 1",
        "UPDATE outbox SET lease_owner = NULL, lease_until = NULL WHERE row = 2",
        "UPDATE outbox SET lease_until = NULL WHERE row = 2",
        "UPDATE outbox SET state = 'inflight' WHERE row = 1",
        "UPDATE outbox SET seq = 1 WHERE row = 1",
        "UPDATE outbox SET seq = NULL WHERE row = 3",
        "UPDATE outbox SET incarnation = NULL WHERE row = 3",
        "UPDATE outbox SET state = 'confirmed', lease_owner = NULL, lease_until = NULL WHERE row = 2",
        "UPDATE outbox SET state = 'dead', lease_owner = NULL, lease_until = NULL, ended_at = 1 WHERE row = 2",
        "UPDATE outbox SET state = 'done', ended_at = 1 WHERE row = 1",
        "UPDATE outbox SET payload = x'00' WHERE row = 1",
        "UPDATE outbox SET payload = NULL, signature = NULL WHERE row = 5",
        "UPDATE outbox SET late_seq = 1, late_incarnation = 'x' WHERE row = 1",
        "UPDATE outbox SET superseded_by = 2 WHERE row = 1",
        "UPDATE outbox SET superseded_by = 4 WHERE row = 5",
        "UPDATE outbox SET superseded_by = 99 WHERE row = 5",
        "UPDATE outbox SET attempts = 0 WHERE row = 2",
        "UPDATE outbox SET lease_owner = 'somebody else' WHERE row = 2",
        "UPDATE outbox SET attempts = attempts + 1 WHERE row = 2",
        "UPDATE outbox SET next_attempt_at = 1 WHERE row = 1",
        "UPDATE outbox SET cancel_asked = 2 WHERE row = 2",
        "UPDATE outbox SET doubt = 2 WHERE row = 2",
        "UPDATE outbox SET cancel_asked = 1, state = 'dead', ended_at = 1, code = 'x', words = 'x' WHERE row = 1",
        "UPDATE outbox SET state = 'elsewhere' WHERE row = 1",
        "UPDATE outbox SET late_seq = 1 WHERE row = 5",
        "UPDATE outbox SET ended_at = 1 WHERE row = 3",
        "UPDATE outbox SET payload = NULL WHERE row = 4",
        "INSERT INTO outbox_block VALUES ('main', '', 'dm', 'bob', 'x', 'x', 1, 1, 1)",
        "UPDATE inbox SET text = 'other' WHERE row = 1",
        "UPDATE inbox SET recipient = 'eve' WHERE row = 1",
        "UPDATE inbox SET told = 'read' WHERE row = 1",
        "UPDATE inbox SET told = 'delivered' WHERE row = 2",
        "DELETE FROM inbox WHERE row = 1",
        "INSERT INTO inbox (space, recipient, sender, id, sender_name, kind, seq, sent_at, logged_at, received_at, "
        "priority, historical, sealed, mentions_me, wakes, text, raw) "
        "VALUES ('main', 'bob', 'tidings', 'x', 'x', 'direct', 1, 1, 1, 1, 'next', 0, 0, 0, 1, 'x', x'00')",
    ],
)
def test_a_bad_state_cannot_be_written(host: Database, statement: str) -> None:
    assert refused(host, statement)


@pytest.mark.parametrize("column", ["space", "sender", "id", "fingerprint", "kind", "destination", "subject"])
@pytest.mark.parametrize("nothing", ["NULL", "''"])
def test_a_row_without_a_destination_a_sender_or_a_space_cannot_be_written(
    host: Database, column: str, nothing: str
) -> None:
    columns = [name for name in views.OutboxRow._fields if name not in ("row", "id", column)]
    named = ", ".join(columns) + ", payload, signature" + (", id" if column != "id" else "")
    values = named.removesuffix(", id") + (", 'fresh'" if column != "id" else "")
    good = f"INSERT INTO outbox ({named}, {column}) SELECT {values}, {nothing} FROM outbox WHERE row = 1"
    assert refused(host, good)


def test_two_rows_of_a_lane_are_never_in_flight_together(host: Database) -> None:
    lane = Lane("main", "ada", "dm", "inflight")
    second = host.write_blocking(lambda c: moves.accept(c, draft("second", lane), NOW)).row.row
    with pytest.raises(sqlite3.IntegrityError):
        host.write_blocking(lambda c: moves.lease(c, [second], NOW, TERMS))


def test_row_numbers_are_not_used_again(host: Database) -> None:
    (sequence,) = host.read_blocking(
        lambda c: c.execute("SELECT seq FROM sqlite_sequence WHERE name='outbox'").fetchone()
    )
    assert sequence == len(ROW)


def test_where_a_message_was_said_is_kept_and_never_changes(host: Database) -> None:
    linked = arrival("linked", channel="general", sender_name="ada@west", origin="west", origin_id="AWEST")
    host.write_blocking(lambda c: inbox.keep(c, linked, NOW, words=False))
    rows = host.read_blocking(lambda c: inbox.listed(c, "main", "bob"))
    assert [(row.id, row.origin, row.origin_id) for row in rows] == [
        ("direct", "", ""),
        ("posted", "", ""),
        ("linked", "west", "AWEST"),
    ]
    for column in ("origin", "origin_id"):
        assert "never changes" in refused(host, f"UPDATE inbox SET {column} = 'east' WHERE id = 'linked'")


def test_a_file_that_was_closed_opens_again_with_all_that_is_in_it(host: Database, tmp_path: Path) -> None:
    host.close()
    again = Database(tmp_path / "host.db", SCHEMA)
    assert {row.state: row.row for row in again.read_blocking(views.listed)} == ROW
    for state in ROW:
        repeated, other = draft(state, Lane("main", "ada", "dm", state)), draft(state, fingerprint=b"x" * 32)
        assert not again.write_blocking(partial(moves.accept, new=repeated, now=NOW)).new
        with pytest.raises(IdReused):
            again.write_blocking(partial(moves.accept, new=other, now=NOW))
    later = moves.Terms("run 2")
    again.write_blocking(lambda c: moves.recover(c, NOW, 0, later))
    assert {leased.row.id for leased in again.write_blocking(lambda c: moves.take(c, NOW, later))} == {
        "pending",
        "inflight",
    }
    assert [row.id for row in again.read_blocking(lambda c: inbox.listed(c, "main", "bob"))] == [
        "direct",
        "posted",
    ]
    again.close()


def test_a_host_database_of_a_later_version_is_refused(host: Database, tmp_path: Path) -> None:
    host.write_blocking(lambda c: c.execute(f"PRAGMA user_version = {SCHEMA.version + 1}").close())
    host.close()
    with pytest.raises(StoreTooNew, match=r"host\.db has version 2, this Tidings knows 1"):
        Database(tmp_path / "host.db", SCHEMA)
