"""For the tests of the host's database: drafts, arrivals, rows in every state, and jobs that share a commit."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tidings.host import inbox, outbox
from tidings.host import outbox_transitions as moves
from tidings.host.inbox import Arrival
from tidings.host.outbox_transitions import Lane, LogPosition, NewRow, Terms
from tidings.host.outcomes import Outcome
from tidings.util.database import Database

NOW = 1_700_000_000_000
TERMS = Terms("run 1", luck=lambda: 0.5)
REFUSED = Outcome("denied", "may not post", retryable=False, blocks="row")
GENERAL = Lane("main", "ada", "chat", "general")


def draft(message_id: str, lane: Lane = GENERAL, **changed: Any) -> NewRow:
    plain: dict[str, Any] = lane._asdict() | {
        "id": message_id,
        "fingerprint": message_id.encode().ljust(32, b"."),
        "subject": "td." + ".".join(lane),
        "payload": f"says {message_id}".encode(),
        "signature": f"signed {message_id}",
    }
    return NewRow(**(plain | changed))


def arrival(message_id: str, text: str = "hello", recipient: str = "bob", **changed: Any) -> Arrival:
    plain: dict[str, Any] = {
        "space": "main",
        "recipient": recipient,
        "sender": "ada",
        "id": message_id,
        "sender_name": "ada",
        "kind": "direct",
        "channel": None,
        "seq": 1,
        "sent_at": NOW,
        "logged_at": NOW,
        "text": text,
        "raw": text.encode(),
    }
    if "channel" in changed:
        plain["kind"] = "channel"
    return Arrival(**(plain | changed))


def rename_in_trigger(connection: sqlite3.Connection, before: str, after: str) -> None:
    """What one flipped bit does to the trigger that counts mail: no check of SQLite's finds it, no mail is kept."""
    connection.execute("PRAGMA writable_schema = ON").close()
    connection.execute(
        "UPDATE sqlite_schema SET sql = replace(sql, ?, ?) WHERE name = 'inbox_counted'", (before, after)
    ).close()
    (version,) = connection.execute("PRAGMA schema_version").fetchone()
    connection.execute(f"PRAGMA schema_version = {version + 1}").close()
    connection.execute("PRAGMA writable_schema = OFF").close()


def break_trigger(connection: sqlite3.Connection) -> None:
    rename_in_trigger(connection, "coalesce", "coalerce")


def mend_trigger(connection: sqlite3.Connection) -> None:
    rename_in_trigger(connection, "coalerce", "coalesce")


def fill(database: Database) -> None:
    """One row of the outbox in each state, in lanes of their own, and a small inbox."""
    database.write_blocking(_fill)


def _fill(connection: sqlite3.Connection) -> None:
    states = ("pending", "inflight", "confirmed", "done", "dead", "cancelled")
    rows: dict[str, int] = {}
    for state in states:
        rows[state] = moves.accept(connection, draft(state, Lane("main", "ada", "dm", state)), NOW).row.row
        if state not in ("pending", "cancelled"):
            moves.lease(connection, [rows[state]], NOW, TERMS)
    place = LogPosition(7, "LOG", "server 1")
    moves.confirmed(connection, rows["done"], 1, place, NOW, 0, TERMS)
    outbox.release(connection, "main", "server 1", 10_000, 5_000, NOW)
    moves.confirmed(connection, rows["confirmed"], 1, place, NOW, 20_000, TERMS)
    moves.settle(connection, rows["dead"], 1, REFUSED, NOW, TERMS)
    outbox.cancel(connection, rows["cancelled"], NOW)
    inbox.keep(connection, arrival("direct", "direct text"), NOW, words=False)
    inbox.keep(connection, arrival("posted", "posted text", channel="general"), NOW, words=False)
    inbox.quarantine(connection, "main", "bob", b"garbage", "does not open", NOW)


@contextmanager
def held_writer(database: Database) -> Iterator[None]:
    """Whatever is asked for meanwhile is done in one group afterwards."""
    held, go_on = threading.Event(), threading.Event()

    def hold(_: sqlite3.Connection) -> None:
        held.set()
        assert go_on.wait(30)

    with ThreadPoolExecutor(1) as thread:
        holding = thread.submit(database.write_blocking, hold)
        assert held.wait(30)
        try:
            yield
        finally:
            go_on.set()
        holding.result(30)


async def together(database: Database, *jobs: Callable[[sqlite3.Connection], Any]) -> list[Any]:
    """The jobs in one group, and what each gave or raised."""
    with held_writer(database):
        asked = [asyncio.ensure_future(database.write(job)) for job in jobs]
        await asyncio.sleep(0)
        assert not any(one.done() for one in asked)
    return await asyncio.gather(*asked, return_exceptions=True)
