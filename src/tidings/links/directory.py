"""Who is in the spaces that a space is linked with, as functions of a connection to the ledger.

Kept for each peer, not for each agreement: a name stays pinned to its key when the terms change. What is kept was
verified; which names stand for whom follows from it and from the pins (`wire/link_exchange.py` `sort_people`). How far
the peer's access records were read is beside it, under the epoch and the key that held then. Keys are public, so any
peer can state any: a key is of the peer that stated it first, and what another one says of it counts for nothing.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

from tidings.errors import ConflictError, PageRefused, UnknownPeer
from tidings.wire.link_exchange import MOST_PEOPLE, Person, Sorted, sort_people

#: keys that were agents there and are told of, so that what is on its way to them can come to an end
MOST_GONE = 500
#: agents of a peer that were revoked, the newest; and names of a peer that stand for a key, of whoever is gone too
MOST_REVOKED, MOST_PINS = 5_000, 10_000
#: keys of somebody else that an operator is told of
MOST_TAKEN = 100
#: no other peer of the space stated that key before
_CLAIMED = """NOT EXISTS (SELECT 1 FROM person AS other WHERE other.space = person.space AND other.agent = person.agent
  AND (other.claim, other.peer) < (person.claim, person.peer))"""


class PeerPlace(NamedTuple):
    """Whose people: a space, and the peer it is linked with; ids of both."""

    space: str
    peer: str


class Passing(NamedTuple):
    """Whether a peer lets direct messages pass, and tasks."""

    direct: bool = True
    tasks: bool = False


class ReadThrough(NamedTuple):
    """How far the access records of a peer were read."""

    epoch: str = ""
    through: int = 0
    #: the key its steward ruled with, followed from the one in the link record
    key: str = ""


def read_through(connection: sqlite3.Connection, place: PeerPlace) -> ReadThrough:
    found = connection.execute(
        "SELECT epoch, through, key FROM peer_roster WHERE space = ? AND peer = ?", place
    ).fetchone()
    return ReadThrough(*found) if found else ReadThrough()


def passing(connection: sqlite3.Connection, place: PeerPlace) -> Passing:
    """What the peer lets pass beside channels, as it last said."""
    query = "SELECT direct, tasks FROM peer_roster WHERE space = ? AND peer = ?"
    found = connection.execute(query, place).fetchone()
    return Passing(*map(bool, found)) if found else Passing()


def note_passing(connection: sqlite3.Connection, place: PeerPlace, passes: Passing) -> None:
    connection.execute("UPDATE peer_roster SET direct = ?, tasks = ? WHERE space = ? AND peer = ?", (*passes, *place))


def begin_again(connection: sqlite3.Connection, place: PeerPlace, epoch: str, key: str) -> None:
    """Everybody is told anew. Who was known is so until that is done: mail waits for them. Pins stay: they are ours."""
    connection.execute("UPDATE person SET stale = 1 WHERE space = ? AND peer = ?", place)
    _set_through(connection, place, ReadThrough(epoch, 0, key))


def is_stale(connection: sqlite3.Connection, place: PeerPlace) -> bool:
    """Is anybody known who was not told anew?"""
    query = "SELECT 1 FROM person WHERE space = ? AND peer = ? AND stale = 1 LIMIT 1"
    return connection.execute(query, place).fetchone() is not None


def drop_stale(connection: sqlite3.Connection, place: PeerPlace) -> None:
    """Everybody was told anew: who was not is nobody there."""
    connection.execute("DELETE FROM person WHERE space = ? AND peer = ? AND stale = 1", place)
    sort(connection, place)


def take(connection: sqlite3.Connection, place: PeerPlace, people: Iterable[Person], read: ReadThrough) -> None:
    """A page: everybody in it, and how far it was read."""
    (claim,) = connection.execute(
        "SELECT coalesce(max(claim), 0) + 1 FROM person WHERE space = ?", (place.space,)
    ).fetchone()
    connection.executemany(
        """INSERT INTO person (space, peer, agent, name, roles, seq, revoked, succeeds, claim)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
        ON CONFLICT (space, peer, agent) DO UPDATE SET name = excluded.name, roles = excluded.roles,
        seq = excluded.seq, revoked = excluded.revoked, succeeds = excluded.succeeds, stale = 0
        WHERE stale = 1 OR excluded.seq >= seq""",
        [(*place, p.id, p.name, json.dumps(p.roles), p.seq, int(p.revoked), p.succeeds, claim) for p in people],
    )
    connection.execute(
        """DELETE FROM person WHERE (space, peer, agent) IN (SELECT space, peer, agent FROM person
        WHERE space = ? AND peer = ? AND revoked = 1 ORDER BY stale, seq DESC LIMIT -1 OFFSET ?)""",
        (*place, MOST_REVOKED),
    )
    query = "SELECT count(*) FROM person WHERE space = ? AND peer = ? AND stale = 0 AND revoked = 0"
    (count,) = connection.execute(query, place).fetchone()
    if count > MOST_PEOPLE:
        raise PageRefused(f"the other space tells of more than {MOST_PEOPLE:,} agents: no more than that are kept")
    _set_through(connection, place, read)
    sort(connection, place)


def sort(connection: sqlite3.Connection, place: PeerPlace) -> Sorted:
    """Who is known by which name; names that were free are pinned."""
    pins = _pins(connection, place)
    found = sort_people(_people(connection, place), pins)
    for name, agent in found.pins.items():
        if pins.get(name) != agent:
            _pin(connection, place, name, agent)
    for name in pins.keys() - found.pins.keys():
        connection.execute("DELETE FROM pin WHERE space = ? AND peer = ? AND name = ?", (*place, name))
    if len(found.pins) > MOST_PINS:  # of whom the peer says nothing any more
        connection.execute(
            """DELETE FROM pin WHERE space = ? AND peer = ? AND NOT EXISTS (SELECT 1 FROM person
            WHERE person.space = pin.space AND person.peer = pin.peer AND person.agent = pin.agent)""",
            place,
        )
    return found


def sorted_people(connection: sqlite3.Connection, place: PeerPlace) -> Sorted:
    """The same, and nothing is written."""
    return sort_people(_people(connection, place), _pins(connection, place))


def trustable(connection: sqlite3.Connection, place: PeerPlace, name: str) -> tuple[str, str]:
    """Which key a name stands for, and which has it there now without a word; UnknownPeer if there is no such one."""
    found = sorted_people(connection, place)
    refused = [each for each in found.refused if each.name == name]
    if not refused:
        raise UnknownPeer(
            f"the other space has no {name[:64]!r} whose key changed without a word: nothing to trust; `tidings link "
            "people` lists who is known there"
        )
    return found.pins[name], max(refused, key=lambda each: each.seq).id


def trust(connection: sqlite3.Connection, place: PeerPlace, name: str, key: str) -> tuple[str, str]:
    """The operator lets a name stand for the key that has it there now; answers which it stood for, and which now.
    `key`: the one that the operator was shown. Another that came meanwhile is not trusted with it."""
    before, newest = trustable(connection, place, name)
    if newest != key:
        raise ConflictError(f"{name[:64]} has yet another key there now, {newest}: ask its operator, and look again")
    connection.execute("DELETE FROM pin WHERE space = ? AND peer = ? AND agent = ?", (*place, newest))
    _pin(connection, place, name, newest)
    return before, newest


def forget(connection: sqlite3.Connection, place: PeerPlace) -> None:
    """Everything of a peer, pins, mail and tasks too: the link was removed."""
    for table in ("person", "pin", "peer_roster", "mail", "peer_mail", "task"):
        connection.execute(f"DELETE FROM {table} WHERE space = ? AND peer = ?", place)


def gone(connection: sqlite3.Connection, place: PeerPlace) -> list[str]:
    """Keys that were agents there, the newest of them."""
    query = f"""SELECT agent FROM person WHERE space = ? AND peer = ? AND revoked = 1 AND {_CLAIMED}
      ORDER BY seq DESC LIMIT ?"""
    return [agent for (agent,) in connection.execute(query, (*place, MOST_GONE))]


def taken(connection: sqlite3.Connection, place: PeerPlace) -> list[str]:
    """Keys that this peer states, and another one stated before."""
    query = f"SELECT agent FROM person WHERE space = ? AND peer = ? AND NOT {_CLAIMED} ORDER BY seq LIMIT ?"
    return [agent for (agent,) in connection.execute(query, (*place, MOST_TAKEN))]


def version_of(
    people: Iterable[Person], gone: Iterable[str] = (), *, hidden: bool = False, passes: Passing | None = None
) -> str:
    """One text for the same agents under the same names, who are shown and reached alike."""
    rows = [
        hidden,
        *(passes or Passing()),
        *sorted((each.id, each.name, *each.roles) for each in people),
        *sorted(gone),
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]


def _people(connection: sqlite3.Connection, place: PeerPlace) -> list[Person]:
    """Everybody whose key is this peer's."""
    rows = connection.execute(
        f"""SELECT agent, name, roles, seq, revoked, succeeds FROM person WHERE space = ? AND peer = ? AND {_CLAIMED}
        ORDER BY seq""",
        place,
    )
    return [
        Person(id=agent, name=name, roles=tuple(json.loads(roles)), seq=seq, revoked=bool(revoked), succeeds=succeeds)
        for agent, name, roles, seq, revoked, succeeds in rows
    ]


def _pins(connection: sqlite3.Connection, place: PeerPlace) -> dict[str, str]:
    return dict(connection.execute("SELECT name, agent FROM pin WHERE space = ? AND peer = ?", place).fetchall())


def _pin(connection: sqlite3.Connection, place: PeerPlace, name: str, agent: str) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO pin (space, peer, name, agent) VALUES (?, ?, ?, ?)", (*place, name, agent)
    )


def _set_through(connection: sqlite3.Connection, place: PeerPlace, read: ReadThrough) -> None:
    connection.execute(
        """INSERT INTO peer_roster (space, peer, epoch, through, key) VALUES (?, ?, ?, ?, ?) ON CONFLICT (space, peer)
        DO UPDATE SET epoch = excluded.epoch, through = excluded.through, key = excluded.key""",
        (*place, *read),
    )
