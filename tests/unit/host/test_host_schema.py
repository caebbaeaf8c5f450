"""The tables of the host: what they refuse whatever the code does, and files of earlier versions.

A step that builds a table anew is proved with steps that only exist here: the first release has one schema and no step.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from hosted import NOW, TERMS, arrival, built_anew, draft, fill
from tidings.errors import IdReused, StoreError, StoreTooNew
from tidings.host import directory, inbox, registry
from tidings.host import outbox_ends as ends
from tidings.host import outbox_transitions as moves
from tidings.host import outbox_views as views
from tidings.host.outbox_transitions import Lane
from tidings.host.schema import APPLICATION_ID, MIGRATIONS
from tidings.util.database import Database
from tidings.util.database_snapshot import look
from tidings.wire.roster import Agent

FIXTURES = Path(__file__).parents[2] / "fixtures"
VERSIONS = {number: FIXTURES / f"host-v{number}.sql" for number in (7, 8, 9)}
LATER = replace(MIGRATIONS, steps=(*MIGRATIONS.steps, built_anew("outbox"), built_anew("inbox")))
ROW = {"pending": 1, "inflight": 2, "confirmed": 3, "done": 4, "dead": 5, "cancelled": 6}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path / "host.db", MIGRATIONS)
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


# ---------------------------------------------------------------------------------------------- files of old versions


def dump(database: Database) -> str:
    """A file as text: what `tests/fixtures` keeps of each version. Made once for each, and never again."""

    def lines(connection: sqlite3.Connection) -> str:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        settings = f"PRAGMA application_id = {APPLICATION_ID};\nPRAGMA user_version = {version};\n"
        return "\n".join(connection.iterdump()) + "\n" + settings

    return database.read_blocking(lines)


def restored(version: int, path: Path) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(VERSIONS[version].read_text())
    path.chmod(0o600)
    return path


def test_where_a_message_was_said_is_kept_and_never_changes_and_older_mail_was_said_here(tmp_path: Path) -> None:
    host = Database(restored(7, tmp_path / "host.db"), MIGRATIONS)
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
    host.close()


def test_every_version_has_its_fixture() -> None:
    assert sorted(VERSIONS) == list(range(MIGRATIONS.first, MIGRATIONS.newest + 1))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_of_every_released_version_opens_and_works(tmp_path: Path, version: int) -> None:
    host = Database(restored(version, tmp_path / "host.db"), MIGRATIONS)
    rows = host.read_blocking(views.listed)
    assert {row.state: row.row for row in rows} == ROW
    for state in ROW:
        again, other = draft(state, Lane("main", "ada", "dm", state)), draft(state, fingerprint=b"x" * 32)
        assert not host.write_blocking(partial(moves.accept, draft=again, now=NOW)).new
        with pytest.raises(IdReused):
            host.write_blocking(partial(moves.accept, draft=other, now=NOW))
    later = moves.Terms("run 2")
    host.write_blocking(lambda c: moves.recover(c, NOW, 0, later))
    assert {leased.row.id for leased in host.write_blocking(lambda c: moves.take(c, NOW, later))} == {
        "pending",
        "inflight",
    }
    assert [row.id for row in host.read_blocking(lambda c: inbox.listed(c, "main", "bob"))] == ["direct", "posted"]
    host.close()


@pytest.mark.parametrize("version", range(1, 7))
def test_a_file_from_before_the_first_release_is_refused_with_what_to_do_and_left_as_it_is(
    tmp_path: Path, version: int
) -> None:
    path = tmp_path / "host.db"
    Database(path, MIGRATIONS).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    for opened in (lambda: Database(path, MIGRATIONS), lambda: look(path, MIGRATIONS, views.listed)):
        with pytest.raises(StoreError, match=r"host\.db has version .* before the first release.* then move it away"):
            opened()
    assert path.read_bytes() == before


def test_what_became_of_every_message_survives_a_table_that_is_built_anew(tmp_path: Path) -> None:
    """A chain of what replaced what, a late acknowledgement, a payload that was dropped."""
    path = restored(7, tmp_path / "host.db")
    before = Database(path, MIGRATIONS)

    def live_on(connection: sqlite3.Connection) -> None:
        moves.confirmed(connection, ROW["cancelled"], 0, moves.LogPosition(9, "LOG", "server 1"), NOW, 0, TERMS)
        ends.drop_payloads(connection, NOW + 1)
        again = ends.requeue(connection, ROW["dead"], "again", b"p", "s", NOW)
        ends.cancel(connection, again.row, NOW)
        ends.requeue(connection, again.row, "once more", b"p", "s", NOW)

    before.write_blocking(live_on)
    rows = before.read_blocking(views.listed)
    before.close()
    after = Database(path, LATER)
    assert after.read_blocking(views.listed) == rows
    assert [row.id for row in after.read_blocking(lambda c: views.chain(c, ROW["dead"]))] == [
        "dead",
        "again",
        "once more",
    ]
    assert after.read_blocking(lambda c: views.payload(c, ROW["done"])) is None
    assert after.write_blocking(lambda c: moves.accept(c, draft("new"), NOW)).row.row == len(rows) + 1
    for column, second in (("supersedes", "row = 8"), ("superseded_by", "row = 6")):
        assert refused(after, f"UPDATE outbox SET {column} = 7 WHERE {second}")
    after.close()


def test_mail_survives_an_inbox_that_is_built_anew(tmp_path: Path) -> None:
    """What was read, told and expired; what is held of each sender; words are found; row numbers go on."""
    path = restored(7, tmp_path / "host.db")
    before = Database(path, MIGRATIONS)

    def live_on(connection: sqlite3.Connection) -> None:
        inbox.prepare_search(connection)
        inbox.mark_read(connection, "main", "bob", [1], NOW)
        inbox.told(connection, "main", "bob", inbox.receipts_to_tell(connection, "main", "bob"))
        inbox.expire(connection, NOW + 1, NOW + 2, words=True)

    before.write_blocking(live_on)
    rows = before.read_blocking(lambda c: c.execute("SELECT * FROM inbox").fetchall())
    before.close()
    after = Database(path, LATER)
    assert after.read_blocking(lambda c: c.execute("SELECT * FROM inbox").fetchall()) == rows
    held = after.read_blocking(
        lambda c: c.execute("SELECT sender, channel, rows, bytes FROM inbox_held WHERE rows > 0").fetchall()
    )
    assert held == [("ada", "*", 1, 22), ("ada", "general", 1, 22)]
    assert after.write_blocking(inbox.prepare_search)
    found = after.read_blocking(lambda c: inbox.search(c, "main", "bob", "posted", words=True))
    assert [row.id for row in found] == ["posted"]
    new = after.write_blocking(lambda c: inbox.keep(c, arrival("new"), NOW, words=True))
    assert new.row == len(rows) + 1
    after.close()


def test_agents_and_who_was_seen_are_read_from_a_file_of_the_first_release(tmp_path: Path) -> None:
    host = Database(restored(7, tmp_path / "host.db"), MIGRATIONS)
    (bob,) = host.read_blocking(registry.adopted)
    assert (bob.scope, bob.receive) == (registry.Scope("main", "main", "bob", "bob"), True)
    assert bob.source == ("bundle", "/somewhere/bob.json")
    assert host.read_blocking(directory.remembered) == {
        "main": directory.Seen(NOW, (Agent(id="ada", name="ada", roles=("reviewer",)),))
    }
    host.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_published_step_is_never_edited(tmp_path: Path, version: int) -> None:
    """The schema of a fixture is what the steps up to its version make."""

    def schema(path: Path) -> list[str]:
        with closing(sqlite3.connect(path)) as connection:
            found = connection.execute(
                "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite%'"
            )
            plain = (re.sub(r"([,()])", r" \1 ", re.sub("--.*", "", sql)) for (sql,) in found)
            return sorted(" ".join(sql.split()) for sql in plain)

    made = tmp_path / "made.db"
    Database(made, replace(MIGRATIONS, steps=MIGRATIONS.steps[: version - MIGRATIONS.first + 1])).close()
    assert schema(restored(version, tmp_path / "kept.db")) == schema(made)


def test_a_host_database_of_a_later_version_is_refused(tmp_path: Path) -> None:
    Database(tmp_path / "host.db", LATER).close()
    with pytest.raises(StoreTooNew, match=r"host\.db"):
        Database(tmp_path / "host.db", MIGRATIONS)
