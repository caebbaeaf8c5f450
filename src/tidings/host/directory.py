"""Who is in each space as last seen, kept in `host.db`: names resolve while a space cannot be reached.

The roster of an open endpoint is compared now and then with what is kept, and written when a name or a role changed,
or whether mail and tasks go to an agent of a linked space;
who is online is not kept, because it would be wrong later. A name that is not in here is refused, never stored for
later (`composing`), and a space whose agents were never seen says so. Agents of a linked space of which a steward is
not told now, after a start or while the link is paused, stay as they were last seen: what is written to them waits.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from tidings.util.database import Database
from tidings.wire.roster import AgentEntry


@dataclass(frozen=True, slots=True)
class Seen:
    """The agents of one space as last seen."""

    #: milliseconds since 1970; None if they never were
    at: int | None = None
    known: tuple[AgentEntry, ...] = ()
    #: linked spaces whose agents are not told of now, and why; not kept on disk
    unheard: Mapping[str, str] = field(default_factory=dict)

    def agents(self) -> Iterable[AgentEntry]:
        return self.known


NEVER = Seen()


def remember(connection: sqlite3.Connection, space: str, known: Iterable[AgentEntry], now: int) -> None:
    """Replace what is kept of a space."""
    connection.execute("UPDATE spaces SET seen_at = ? WHERE id = ?", (now, space))
    connection.execute("DELETE FROM directory WHERE space = ?", (space,))
    connection.executemany(
        "INSERT INTO directory (space, agent, name, roles, direct, linked, tasks) VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(space, a.id, a.name, json.dumps(a.roles), int(a.direct), a.space, int(a.tasks)) for a in known],
    )


def remembered(connection: sqlite3.Connection) -> dict[str, Seen]:
    spaces = connection.execute("SELECT id, seen_at FROM spaces WHERE seen_at IS NOT NULL").fetchall()
    return {space: Seen(at, _agents(connection, space)) for space, at in spaces}


def names_in(connection: sqlite3.Connection, space: str) -> dict[str, str]:
    """Names of the agents of a space by their ids, as last seen."""
    return dict(connection.execute("SELECT agent, name FROM directory WHERE space = ?", (space,)).fetchall())


def _agents(connection: sqlite3.Connection, space: str) -> tuple[AgentEntry, ...]:
    query = "SELECT agent, name, roles, direct, linked, tasks FROM directory WHERE space = ? ORDER BY name, agent"
    return tuple(
        _row(agent, name, tuple(json.loads(roles)), bool(direct), linked, bool(tasks))
        for agent, name, roles, direct, linked, tasks in connection.execute(query, (space,))
    )


def _row(agent: str, name: str, roles: tuple[str, ...], direct: bool, linked: str, tasks: bool) -> AgentEntry:
    return AgentEntry(id=agent, name=name, roles=roles, direct=direct, space=linked, tasks=tasks)


class Directories:
    """The directories of all spaces of this host, in memory and on disk. Made by `open`."""

    def __init__(self, database: Database, seen: dict[str, Seen]) -> None:
        self.database = database
        self._seen = seen

    @classmethod
    async def open(cls, database: Database) -> Directories:
        return cls(database, await database.read(remembered))

    def of(self, space: str) -> Seen:
        return self._seen.get(space, NEVER)

    async def refresh(self, space: str, agents: Iterable[AgentEntry], unheard: Mapping[str, str] | None = None) -> bool:
        """Take what a roster says now; True if it was news."""
        before, late = self.of(space), dict(unheard or {})
        known = {each.id: each for each in before.known if each.elsewhere in late} | {each.id: each for each in agents}
        fresh = tuple(
            _row(each.id, each.name, tuple(each.roles), each.direct, each.space, each.tasks)
            for each in sorted(known.values(), key=lambda each: (each.name, each.id))
        )
        if before.at is not None and fresh == before.known:
            self._seen[space] = replace(before, unheard=late)
            return False
        now = self.database.now()
        await self.database.write(lambda c: remember(c, space, fresh, now))
        self._seen[space] = Seen(now, fresh, late)
        return True
