"""Which agents this host works for, remembered in `host.db`, so that a restarted host goes on for them.

An agent is (space id, agent id). Where its identity is read is its source: a home of this user or an exported bundle.
Only the place is remembered, never a key. A name that was revoked and added again has another key and is another agent.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tidings.admin.home import SpaceHome
from tidings.admin.identity import Identity, bundle_identity, local_identity
from tidings.errors import UsageError
from tidings.util.database import Database
from tidings.wire.names import check_agent_name, check_space

#: ("home", home, space, name) or ("bundle", path)
Source = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scope:
    """An agent of a space: whoever reads or writes here does so as one of these."""

    #: what people call the space
    space: str
    space_id: str
    #: its id
    agent: str
    name: str


class Adopted(NamedTuple):
    scope: Scope
    source: Source
    receive: bool

    @property
    def is_local(self) -> bool:
        """Is its broker one that this home configures?"""
        return self.source[0] == "home"


def check_source(source: Source) -> Source:
    """The same with absolute paths."""
    match tuple(source):
        case ("home", home, space, name):
            return ("home", str(Path(home).absolute()), check_space(space), check_agent_name(name))
        case ("bundle", path):
            return ("bundle", str(Path(path).absolute()))
    raise UsageError('an identity is ("home", home, space, name) or ("bundle", path)')


async def identity_of(source: Source) -> Identity:
    """Read it from disk. In an open space an agent that does not exist yet is made, which needs the broker."""
    if source[0] == "bundle":
        return bundle_identity(Path(source[1]))
    _, home, space, name = source
    return await local_identity(SpaceHome(Path(home), space), name)


def adopt(connection: sqlite3.Connection, identity: Identity, source: Source, receive: bool, now: int) -> Adopted:
    """Remember it. A later source replaces an earlier one; receiving, once wanted, stays."""
    space, name = identity.space_id, identity.subjects.space
    connection.execute(
        """INSERT INTO spaces (id, name, anchor) VALUES (?, ?, ?)
        ON CONFLICT (id) DO UPDATE SET name = excluded.name, anchor = coalesce(anchor, excluded.anchor)""",
        (space, name, identity.steward_key),
    )
    (receives,) = connection.execute(
        """INSERT INTO agents (space, agent, name, source, receive, adopted_at) VALUES (?, ?, ?, ?, ?, ?)
        ON CONFLICT (space, agent) DO UPDATE SET name = excluded.name, source = excluded.source,
          receive = max(receive, excluded.receive) RETURNING receive""",
        (space, identity.id, identity.name, json.dumps(source), int(receive), now),
    ).fetchone()
    return Adopted(Scope(name, space, identity.id, identity.name), source, bool(receives))


def adopted(connection: sqlite3.Connection) -> list[Adopted]:
    found = connection.execute(
        """SELECT s.name, a.space, a.agent, a.name, a.source, a.receive FROM agents a JOIN spaces s ON s.id = a.space
        ORDER BY a.adopted_at, a.agent"""
    )
    return [Adopted(Scope(*one[:4]), tuple(json.loads(one[4])), bool(one[5])) for one in found]


def anchors(connection: sqlite3.Connection) -> dict[str, str]:
    """The first steward of each space, by the id of the space: whoever came first is believed, for ever."""
    return dict(connection.execute("SELECT id, anchor FROM spaces WHERE anchor IS NOT NULL"))


class Registry:
    """The agents of this host, over its database."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def adopt(self, identity: Identity, source: Source, receive: bool) -> Adopted:
        now = self.database.now()
        return await self.database.write(lambda c: adopt(c, identity, source, receive, now))

    async def adopted(self) -> list[Adopted]:
        return await self.database.read(adopted)

    async def anchors(self) -> dict[str, str]:
        return await self.database.read(anchors)
