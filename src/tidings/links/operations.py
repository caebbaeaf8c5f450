"""Operator commands on the links of a space, answered as JSON.

The link worker answers while it runs (`worker.py`); otherwise the command line does the same on the ledger itself. The
lock of the ledger prevents both at once. A link is named by its id; what was agreed about it is on disk.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from tidings.admin.home import SpaceHome
from tidings.admin.link_peers import LinkPeers
from tidings.admin.link_registry import AgreedLink, LinkLedger
from tidings.admin.linking import terms_of
from tidings.errors import ConflictError, TidingsError, UsageError
from tidings.links import directory as people
from tidings.links import link_store as books
from tidings.links import obligations
from tidings.links.compare import Comparison, Difference
from tidings.links.definition import carries, definition_of, secret_of
from tidings.links.destination import LocalDestination, LocalSpace
from tidings.links.directory import PeerPlace
from tidings.links.held import HeldRecords, lost_here
from tidings.links.link_store import BookedLink, LinkRow, find_row, last_row, milliseconds, opened
from tidings.links.obligations import Quarantined
from tidings.links.running_link import CarriedLink, SharedLog
from tidings.links.source import PeerSource
from tidings.links.store_file import open_store
from tidings.util.database import Database
from tidings.wire.link_exchange import Person
from tidings.wire.rulings import Link

#: seconds for which a link is waited for that has something to handle before it is compared
CATCH_UP = 3.0
#: records that are named in an answer about what differs
MOST_NAMED = 100
#: days of channels that are named in one, and records that differ that are looked for
MOST_DIFFERENCES, MOST_DIFFERING = 1_000, 100_000
PAUSED = "paused by the operator"
Answer = dict[str, Any]


class Carrying(NamedTuple):
    """What a worker that runs knows besides: the links it carries, why it does not carry others, and how to set one
    aside for a moment."""

    carried: Callable[[str], CarriedLink | None] = lambda _link: None
    words: Callable[[str], str] = lambda _link: ""
    aside: Callable[[str], AbstractAsyncContextManager[None]] = lambda _link: nullcontext()
    #: how far the other space is with what we share
    push: Callable[[str], Answer | None] = lambda _link: None


class LinkOperations:
    """`do` is one of `OPERATIONS`."""

    def __init__(self, home: SpaceHome, database: Database, carrying: Carrying = Carrying()) -> None:  # noqa: B008
        self.home, self.database, self._carrying = home, database, carrying
        self.space = home.read_info().id
        self.agreed = LinkLedger.below(home, self.space)
        self.peers = LinkPeers.below(home)

    async def do(self, do: str, **arguments: Any) -> Answer:
        if do not in OPERATIONS:
            raise UsageError(f"a worker of links does not know how to {do[:40]!r}")
        answer: Answer = await getattr(self, do)(**arguments)
        return answer

    # --- looking ---

    async def status(self, link: str | None = None, whole: bool = False) -> Answer:
        """Every link, or one. `whole`: with what became of its records, which takes longer the more there are."""
        rows = self.agreed.rows() if link is None else [self._agreed(link)]
        return {"links": [await self._described(row, whole) for row in rows]}

    async def _described(self, row: AgreedLink, whole: bool) -> Answer:
        record, carried = terms_of(row), self._carrying.carried(row.link)
        facts = describe(self.home, row)
        found = await self.database.read(lambda c: find_row(c, definition_of(self.space, record)))
        if found is not None:
            facts["ledger"] = await self.database.read(lambda c: _ledger_facts(c, found, whole))
        facts["words"] = self._carrying.words(row.link)
        facts["people"] = await self._people(record, carried)
        facts["live"] = msgspec.to_builtins(carried.direction.status()) if carried is not None else None
        facts["push"] = self._carrying.push(row.link)
        facts["offered"] = carried.offered() if carried is not None else None
        return facts

    async def _people(self, record: Link, carried: CarriedLink | None) -> Answer | None:
        """Who is known at the other end, and whose key changed without a word."""
        if record.roster != "on":
            return None
        if carried is not None and carried.rounds is not None:
            return await carried.rounds.facts()
        found = await self.database.read(lambda c: people.sorted_people(c, PeerPlace(self.space, record.origin)))
        changed = [[each.name, each.id] for each in found.refused]
        return {"known": len(found.known), "changed": changed, "taken": [], "words": "", "mail": None, "tasks": None}

    async def people(self, link: str) -> Answer:
        """Everybody that is known at the other end, by name."""
        place = PeerPlace(self.space, self._agreed(link).origin)
        found = await self.database.read(lambda c: people.sorted_people(c, place))
        return {"people": list(map(_person, found.known)), "changed": list(map(_person, found.refused))}

    async def trustable(self, link: str, name: str) -> Answer:
        """Which key a name stands for, and which one has it there; nothing is changed."""
        place = PeerPlace(self.space, self._agreed(link).origin)
        before, now = await self.database.read(lambda c: people.trustable(c, place, name))
        return {"before": before, "now": now}

    async def trust(self, link: str, name: str, key: str) -> Answer:
        """A name stands for this key from now on, if it is the one that has it there."""
        place = PeerPlace(self.space, self._agreed(link).origin)
        before, now = await self.database.write(lambda c: people.trust(c, place, name, key))
        self._look_now(link)
        return {"before": before, "now": now}

    async def quarantined(self, link: str, after: int = 0, limit: int = 100) -> Answer:
        row = await self._row(link)
        found = await self.database.read(lambda c: obligations.in_quarantine(c, row.row, after, limit))
        return {"records": [_put_aside(each) for each in found], "count": (await self._count(row))}

    async def quarantined_record(self, link: str, seq: int, life: int | None = None) -> Answer:
        row = await self._row(link)
        found = await self.database.read(lambda c: obligations.one_quarantined(c, row.row, seq, life))
        return {"record": _put_aside(found, payload=True)}

    async def _count(self, row: LinkRow) -> int:
        count, _ = await self.database.read(lambda c: books.quarantined(c, row.row))
        return count

    # --- changing ---

    async def pause(self, link: str, reason: str = PAUSED) -> Answer:
        row = await self._row(link)
        await self.database.write(lambda c: books.pause(c, row.row, reason, milliseconds()))
        self._look_now(link)
        return {"was": row.paused}

    async def resume(self, link: str) -> Answer:
        row = await self._row(link)
        await self.database.write(lambda c: books.resume(c, row.row))
        self._look_now(link)
        return {"was": row.paused}

    async def retry(self, link: str, seqs: list[int] | None = None) -> Answer:
        """Records in quarantine are tried now; None is all of them."""
        row = await self._row(link)
        count = await self.database.write(lambda c: obligations.retry_quarantined(c, row.row, seqs, milliseconds()))
        self._look_now(link)
        return {"count": count}

    async def drop(self, link: str, seq: int, reason: str, life: int | None = None) -> Answer:
        row = await self._row(link)
        await self.database.write(lambda c: obligations.drop(c, row.row, seq, reason, life))
        self._look_now(link)
        return {"left": await self._count(row)}

    async def rebuild(self, link: str) -> Answer:
        """Everything is read again; what is here already is found, and not let in twice. The quarantine stays."""
        row = await self._row(link)
        async with self._carrying.aside(link):
            await self.database.write(lambda c: books.rebuild(c, row.row))
        return {"handled": row.handled.seq if row.handled is not None else 0, "quarantined": await self._count(row)}

    async def forget(self, link: str) -> Answer:
        """Delete all the ledger has of a link, under whichever agreement. What it brought stays in the log."""

        def job(connection: sqlite3.Connection) -> int:
            rows = [row for row in books.links(connection, self.space) if row.definition.link == link]
            for row in rows:
                books.delete(connection, row.row)
            for peer in {row.definition.peer for row in rows}:
                people.forget(connection, PeerPlace(self.space, peer))
            return len(rows)

        async with self._carrying.aside(link):
            return {"count": await self.database.write(job)}

    def _look_now(self, link: str) -> None:
        if (carried := self._carrying.carried(link)) is not None:
            carried.ask()

    # --- comparing ---

    async def verify(self, link: str) -> Answer:
        """What the peer shares against what the ledger has, by digests, up to where it was handled; and whether the log
        here still has what the ledger says it let in."""
        row, carried = await self._row(link), self._carrying.carried(link)
        if carried is not None:
            row = await self._caught_up(link, carried)
        if row.handled is None:
            raise ConflictError(
                f"nothing came over link {link} yet, and there is nothing to compare: `tidings link show {link}` says "
                "how it is"
            )
        lost = await self._lost(row)
        if lost["lost"]:  # whoever carries it finds what is to be fetched again
            await self.database.write(lambda c: books.read_index_anew(c, self.space))
        if carried is not None:
            answer = await self._compared(row, carried.source) | lost
            if not answer["equal"] or lost["lost"]:
                carried.direction.ask(repair=True)
            return answer
        async with self._peer(link) as peer:
            return await self._compared(row, peer) | lost

    async def _caught_up(self, link: str, carried: CarriedLink) -> LinkRow:
        """Where the link is once it has handled what the other log had when we asked, if that is soon."""
        wanted, deadline = (await carried.source.hello()).head, time.monotonic() + CATCH_UP
        carried.direction.ask()
        while True:
            row = await self._row(link)
            if (row.handled is not None and row.handled.seq >= wanted) or time.monotonic() >= deadline:
                return row
            await asyncio.sleep(0.05)

    async def _lost(self, row: LinkRow) -> Answer:
        local = LocalSpace(self.home.read_info().url, self.home.link_creds, self.home.name)
        try:
            found = await lost_here(BookedLink(self.database, row.row), LocalDestination(local, row.definition.link))
        finally:
            await local.close()
        named = [[each.local_seq, each.channel, each.identity.sender, each.identity.id] for each in found.named]
        return {"lost": found.lost, "lost_named": named}

    @asynccontextmanager
    async def _peer(self, link: str) -> AsyncIterator[SharedLog]:
        access = self.peers.get(link)
        if access is None:
            raise ConflictError(no_access(link))
        source = PeerSource(access.url, self.peers.creds(link), access.space)
        try:
            yield source
        finally:
            await source.close()

    async def _compared(self, row: LinkRow, peer: SharedLog) -> Answer:
        assert row.handled is not None
        comparison = Comparison(HeldRecords(BookedLink(self.database, row.row), peer), peer)
        found, facts = await comparison.divergence(row.handled.seq), await peer.hello()
        differences, more, rows = list[Difference](), False, 0
        async for each in comparison.between(found):
            differences.append(each)
            rows += len(each.lacking) + len(each.extra)
            if more := rows >= MOST_DIFFERING:
                break
        differences, passed_on = await self._without_others(row, differences)
        counts = await self.database.read(lambda c: books.counts(c, row.row))
        known = await self.database.read(lambda c: books.held_channels(c, row.row, found.floor, found.through))
        outside = [each for each in known if not facts.shows(each.origin, each.channel)]
        left_out = [each for each in known if each.not_taken and each not in outside]
        return {
            "space": row.definition.peer,
            "equal": not differences and not more,
            "floor": found.floor,
            "through": found.through,
            #: where the other log ends: what lies between was not handled yet, and not compared
            "head": max(facts.head, found.through),
            "counts": counts,
            "differences": [_difference(each) for each in differences[:MOST_DIFFERENCES]],
            "lacking": sum(len(each.lacking) for each in differences),
            "extra": sum(len(each.extra) for each in differences),
            #: what was handled and is not compared: [space, channel, records], and how many of other spaces are not
            #: passed on any more
            "not_shared": [[each.origin, each.channel, each.records] for each in outside],
            "not_passed_on": passed_on,
            #: what is shared and not taken here, so that it is accounted for by being left out
            "not_taken": [[each.origin, each.channel, each.not_taken] for each in left_out],
            #: there may be more: nobody looked further
            "more": more,
        }

    async def _without_others(self, row: LinkRow, found: list[Difference]) -> tuple[list[Difference], int]:
        """What of other spaces a peer does not pass on any more is no difference, and is counted: under which name it
        has that in its own log, and whether it shares that, is not known here."""
        extra = [one.seq for each in found for one in each.extra]
        others = await self.database.read(lambda c: books.said_elsewhere(c, row.row, extra))
        left = [replace(each, extra=tuple(one for one in each.extra if one.seq not in others)) for each in found]
        return [each for each in left if each.lacking or each.extra], len(others)

    # --- finding ---

    def _agreed(self, link: str) -> AgreedLink:
        found = self.agreed.get(link)
        if found is None:
            raise UsageError(f"there is no link {link} in space {self.home.name}: `tidings link list`")
        return found

    async def _row(self, link: str) -> LinkRow:
        """Of the ledger; a link that takes something in has one from the first time it is asked about. Terms that are
        not carried yet take nothing from those that are: whoever carries the link opens it by what is in force."""
        agreed = self._agreed(link)
        record = terms_of(agreed)
        definition = definition_of(self.space, record)

        def look(connection: sqlite3.Connection) -> LinkRow | None:
            return find_row(connection, definition) or last_row(connection, self.space, link)

        if (found := await self.database.read(look)) is not None:
            return found
        if not carries(record):
            raise UsageError(f"nothing comes in over link {link}: it shares only, and there is nothing to do for it")
        if agreed.state != "on":
            raise ConflictError(f"link {link} is not in force, and nothing came over it: `tidings link list --all`")
        secret = secret_of(self.home.link_creds)
        return await self.database.write(lambda c: opened(c, definition, milliseconds(), secret))


#: every public coroutine method but `do` itself
OPERATIONS = frozenset(
    name for name, each in vars(LinkOperations).items() if inspect.iscoroutinefunction(each) and name[0] != "_"
) - {"do"}


def no_access(link: str) -> str:
    return (
        f"how the other space of link {link} is reached is not known here: its operator gives that with a line "
        f"(`tidings link renew {link}` there)"
    )


@asynccontextmanager
async def alone(home: SpaceHome) -> AsyncIterator[LinkOperations]:
    """The ledger in our own hands, while no worker runs."""
    database = open_store(home)
    try:
        yield LinkOperations(home, database)
    finally:
        database.close()


def describe(home: SpaceHome, row: AgreedLink) -> Answer:
    """A link as it was agreed, which needs nobody's answer."""
    record = terms_of(row)
    fields, shown = msgspec.to_builtins(record), "space channels beyond shares hops until direct roster tasks"
    return {
        "link": row.link,
        "origin": row.origin,
        "state": row.state,
        **{name: fields[name] for name in shown.split()},
        "user": row.peer or None,
        "why": row.why,
        "reached": _reached(home, row.link),
        #: is there one for the other space, wherever that is?
        "credential": LinkPeers.below(home).creds(row.link).exists(),
        #: what spaces behind it are called here, as far as there are links with them
        "behind": {origin: _called(home, origin) for origin in record.beyond},
        "takes": row.takes(milliseconds() / 1000),
        "ledger": None,
        "live": None,
        "offered": None,
        "push": None,
        "words": "",
    }


def _reached(home: SpaceHome, link: str) -> str | None:
    try:
        access = LinkPeers.below(home).get(link)
    except TidingsError:
        return None
    return access.address if access is not None else None


def _called(home: SpaceHome, origin: str) -> str:
    rows = LinkLedger.below(home, home.read_info().id).rows()
    named = (str(each.terms.get("space")) for each in rows if each.origin == origin and each.state in ("setting", "on"))
    return next(named, "")


def _ledger_facts(connection: sqlite3.Connection, row: LinkRow, whole: bool) -> Answer:
    owed, kept = obligations.counts(connection, row.row)
    facts: Answer = {
        "handled": row.handled.seq if row.handled is not None else None,
        "epoch": row.handled.epoch if row.handled is not None else None,
        "received": row.received.seq if row.received is not None else None,
        "handled_at": row.handled_at / 1000 if row.handled_at is not None else None,
        "said_at": row.handled_time / 1e9 if row.handled_time else None,
        "paused": row.paused,
        "owed": owed,
        "quarantined": kept,
        "unlisted": obligations.unlisted(connection, row.row) if kept else [],
    }
    if whole:
        facts["counts"] = books.counts(connection, row.row)
        facts["omitted"] = [each._asdict() for each in books.omissions(connection, row.row, limit=20)]
        facts["not_taken"] = [list(each) for each in books.not_taken(connection, row.row)]
    return facts


def _put_aside(each: Quarantined, *, payload: bool = False) -> Answer:
    record = each.record
    found: Answer = {
        "seq": record.seq,
        "life": each.life,
        "reason": each.reason,
        "words": each.words,
        "origin": record.origin,
        "channel": record.channel,
        "sender": record.sender,
        "bytes": len(record.payload),
        "attempts": each.attempts,
        "since": each.first_at / 1000,
    }
    if payload:
        found |= {"signature": record.signature, "hops": record.hops, "said_at": record.time_ns / 1e9}
        found["payload"] = base64.b64encode(record.payload).decode()
    return found


def _person(each: Person) -> Answer:
    return {"name": each.name, "id": each.id, "roles": list(each.roles)}


def _difference(each: Difference) -> Answer:
    lacking, extra = each.lacking, each.extra
    return {
        "channel": each.channel,
        "day": each.day,
        "lacking": [[one.seq, one.sender, one.id] for one in lacking[:MOST_NAMED]],
        "extra": [[one.seq, one.sender, one.id] for one in extra[:MOST_NAMED]],
        "lacking_count": len(lacking),
        "extra_count": len(extra),
    }
