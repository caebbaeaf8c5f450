"""Handlers of the link worker's operations.

The link worker answers with them while it runs (`worker.py`); while it does not, a command calls them on the link store
itself (`alone`). The lock of the link store prevents both at once. A link is named by its id; its terms are on disk.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple, TypeVar

import msgspec

from tidings.admin.home import SpaceHome
from tidings.admin.link_peers import LinkPeers
from tidings.admin.link_registry import AgreedLink, LinkLedger
from tidings.admin.linking import terms_of
from tidings.contract import link_worker as contract
from tidings.contract.core import Request
from tidings.contract.links import DirectoryRow, LinkAgreement, PeerProgress
from tidings.errors import ConflictError, TidingsError, UsageError
from tidings.links import directory as people
from tidings.links import link_store as books
from tidings.links import obligations
from tidings.links.compare import Comparison, Difference
from tidings.links.definition import carries, definition_of, secret_of
from tidings.links.destination import LocalDestination, LocalSpace
from tidings.links.directory import PeerPlace
from tidings.links.held import HeldRecords, LostHere, lost_here
from tidings.links.link_store import BookedLink, LinkRow, find_row, last_row, milliseconds, opened
from tidings.links.obligations import Quarantined
from tidings.links.running_link import CarriedLink, SharedLog
from tidings.links.source import PeerSource
from tidings.links.store_file import open_store
from tidings.rpc.dispatch import handler, handlers_of
from tidings.util.database import Database
from tidings.wire.digests import RecordIdentity
from tidings.wire.link_exchange import Person
from tidings.wire.rulings import Link

#: seconds for which a link is waited for that has something to handle before it is compared
CATCH_UP = 3.0
#: records that are named in an answer about what differs
MOST_NAMED = 100
#: days of channels that are named in one, and records that differ that are looked for
MOST_DIFFERENCES, MOST_DIFFERING = 1_000, 100_000
A = TypeVar("A")


class WorkerState(NamedTuple):
    """What a link worker knows besides the link store: its running links, why it does not run others, how to stop one
    for a moment, how far the linked spaces are with what is shared, and why the steward did not answer."""

    running: Callable[[str], CarriedLink | None] = lambda _link: None
    words: Callable[[str], str] = lambda _link: ""
    stopped: Callable[[str], AbstractAsyncContextManager[None]] = lambda _link: nullcontext()
    push: Callable[[str], PeerProgress | None] = lambda _link: None
    steward: Callable[[], str] = lambda: ""


class LinkOperations:
    """The operations on links. `call` answers one without a link worker."""

    def __init__(self, home: SpaceHome, database: Database, state: WorkerState = WorkerState()) -> None:  # noqa: B008
        self.home, self.database, self._state = home, database, state
        self.space = home.read_info().id
        self.agreed = LinkLedger.below(home, self.space)
        self.peers = LinkPeers.below(home)

    async def call(self, request: Request[A]) -> A:
        """Returns the answer. Raises UsageError, naming the field, if a value does not fit the declaration."""
        operation = request.operation
        checked = operation.decode(msgspec.to_builtins(request))
        answer: A = await handlers_of("link worker", self, complete=False)[operation.name](checked)
        return answer

    # --- looking ---

    @handler(contract.ListLinksRequest)
    async def list_links(self, request: contract.ListLinksRequest) -> contract.ListLinksAnswer:
        rows = self.agreed.rows() if request.link is None else [self._agreed(request.link)]
        links = tuple([await self._report(row, request.complete) for row in rows])
        return contract.ListLinksAnswer(links, self._state.steward())

    async def _report(self, row: AgreedLink, complete: bool) -> contract.LinkReport:
        record, running = terms_of(row), self._state.running(row.link)
        report = describe(self.home, row)
        found = await self.database.read(lambda c: find_row(c, definition_of(self.space, record)))
        if found is not None:
            report.store = await self.database.read(lambda c: _stored_link(c, found, complete))
        report.words, report.push = self._state.words(row.link), self._state.push(row.link)
        report.directory = await self._directory_status(record, running)
        if running is not None:
            report.live, report.peer_shares = running.direction.status(), running.peer_shares()
        return report

    async def _directory_status(self, record: Link, running: CarriedLink | None) -> contract.DirectoryStatus | None:
        if record.roster != "on":
            return None
        if running is not None and running.rounds is not None:
            return await running.rounds.facts()
        found = await self.database.read(lambda c: people.sorted_people(c, PeerPlace(self.space, record.origin)))
        changed = tuple((each.name, each.id) for each in found.refused)
        return contract.DirectoryStatus(known=len(found.known), changed=changed)

    @handler(contract.ListDirectoryRequest)
    async def list_directory(self, request: contract.ListDirectoryRequest) -> contract.DirectoryAnswer:
        place = self._place(request.link)
        found = await self.database.read(lambda c: people.sorted_people(c, place))
        return contract.DirectoryAnswer(_directory_rows(found.known), _directory_rows(found.refused))

    @handler(contract.CompareKeysRequest)
    async def compare_keys(self, request: contract.CompareKeysRequest) -> contract.KeyChangeAnswer:
        place = self._place(request.link)
        return contract.KeyChangeAnswer(*await self.database.read(lambda c: people.trustable(c, place, request.name)))

    @handler(contract.TrustKeyRequest)
    async def trust_key(self, request: contract.TrustKeyRequest) -> contract.KeyChangeAnswer:
        place = self._place(request.link)
        changed = await self.database.write(lambda c: people.trust(c, place, request.name, request.key))
        self._look_now(request.link)
        return contract.KeyChangeAnswer(*changed)

    @handler(contract.ListQuarantineRequest)
    async def list_quarantine(self, request: contract.ListQuarantineRequest) -> contract.QuarantineAnswer:
        row = await self._row(request.link)
        found = await self.database.read(lambda c: obligations.in_quarantine(c, row.row, request.after, request.limit))
        return contract.QuarantineAnswer(tuple(map(_quarantined, found)), await self._count(row))

    @handler(contract.ShowQuarantinedRequest)
    async def show_quarantined(self, request: contract.ShowQuarantinedRequest) -> contract.QuarantinedRecord:
        row = await self._row(request.link)
        found = await self.database.read(lambda c: obligations.one_quarantined(c, row.row, request.seq, request.life))
        shown, record = _quarantined(found), found.record
        shown.signature, shown.hops, shown.payload = record.signature, record.hops, record.payload
        shown.sent_at = record.time_ns / 1e9
        return shown

    async def _count(self, row: LinkRow) -> int:
        count, _ = await self.database.read(lambda c: books.quarantined(c, row.row))
        return count

    # --- changing ---

    @handler(contract.PauseLinkRequest)
    async def pause(self, request: contract.PauseLinkRequest) -> contract.PauseAnswer:
        row = await self._row(request.link)
        await self.database.write(lambda c: books.pause(c, row.row, request.reason, milliseconds()))
        self._look_now(request.link)
        return contract.PauseAnswer(row.paused)

    @handler(contract.ResumeLinkRequest)
    async def resume(self, request: contract.ResumeLinkRequest) -> contract.PauseAnswer:
        row = await self._row(request.link)
        await self.database.write(lambda c: books.resume(c, row.row))
        self._look_now(request.link)
        return contract.PauseAnswer(row.paused)

    @handler(contract.RetryQuarantinedRequest)
    async def retry(self, request: contract.RetryQuarantinedRequest) -> contract.CountAnswer:
        row = await self._row(request.link)
        count = await self.database.write(
            lambda c: obligations.retry_quarantined(c, row.row, request.seqs, milliseconds())
        )
        self._look_now(request.link)
        return contract.CountAnswer(count)

    @handler(contract.DropQuarantinedRequest)
    async def drop(self, request: contract.DropQuarantinedRequest) -> contract.DropAnswer:
        row = await self._row(request.link)
        await self.database.write(lambda c: obligations.drop(c, row.row, request.seq, request.reason, request.life))
        self._look_now(request.link)
        return contract.DropAnswer(await self._count(row))

    @handler(contract.RebuildLinkRequest)
    async def rebuild(self, request: contract.RebuildLinkRequest) -> contract.RebuildAnswer:
        row = await self._row(request.link)
        async with self._state.stopped(request.link):
            await self.database.write(lambda c: books.rebuild(c, row.row))
        return contract.RebuildAnswer(row.handled.seq if row.handled is not None else 0, await self._count(row))

    @handler(contract.ForgetLinkRequest)
    async def forget(self, request: contract.ForgetLinkRequest) -> contract.CountAnswer:
        """Deletes the link under all its agreements."""

        def job(connection: sqlite3.Connection) -> int:
            rows = [row for row in books.links(connection, self.space) if row.definition.link == request.link]
            for row in rows:
                books.delete(connection, row.row)
            for peer in {row.definition.peer for row in rows}:
                people.forget(connection, PeerPlace(self.space, peer))
            return len(rows)

        async with self._state.stopped(request.link):
            return contract.CountAnswer(await self.database.write(job))

    def _look_now(self, link: str) -> None:
        if (running := self._state.running(link)) is not None:
            running.ask()

    # --- comparing ---

    @handler(contract.VerifyLinkRequest)
    async def verify(self, request: contract.VerifyLinkRequest) -> contract.VerifyAnswer:
        """Compares up to where the link was handled, and checks that the log here still has what was imported."""
        link = request.link
        row, running = await self._row(link), self._state.running(link)
        if running is not None:
            row = await self._caught_up(link, running)
        if row.handled is None:
            raise ConflictError(
                f"nothing came over link {link} yet, and there is nothing to compare: `tidings link show {link}` says "
                "how it is"
            )
        lost = await self._lost(row)
        if lost.lost:  # whoever carries it finds what is to be fetched again
            await self.database.write(lambda c: books.read_index_anew(c, self.space))
        if running is None:
            async with self._peer(link) as peer:
                return await self._compared(row, peer, lost)
        answer = await self._compared(row, running.source, lost)
        if not answer.equal or lost.lost:
            running.direction.ask(repair=True)
        return answer

    async def _caught_up(self, link: str, carried: CarriedLink) -> LinkRow:
        """Where the link is once it has handled what the other log had when we asked, if that is soon."""
        wanted, deadline = (await carried.source.hello()).head, time.monotonic() + CATCH_UP
        carried.direction.ask()
        while True:
            row = await self._row(link)
            if (row.handled is not None and row.handled.seq >= wanted) or time.monotonic() >= deadline:
                return row
            await asyncio.sleep(0.05)

    async def _lost(self, row: LinkRow) -> LostHere:
        local = LocalSpace(self.home.read_info().url, self.home.link_creds, self.home.name)
        try:
            return await lost_here(BookedLink(self.database, row.row), LocalDestination(local, row.definition.link))
        finally:
            await local.close()

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

    async def _compared(self, row: LinkRow, peer: SharedLog, lost: LostHere) -> contract.VerifyAnswer:
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
        return contract.VerifyAnswer(
            space=row.definition.peer,
            equal=not differences and not more,
            floor=found.floor,
            through=found.through,
            head=max(facts.head, found.through),
            counts=counts,
            differences=tuple(map(_channel_difference, differences[:MOST_DIFFERENCES])),
            lacking=sum(len(each.lacking) for each in differences),
            extra=sum(len(each.extra) for each in differences),
            more=more,
            not_shared=tuple(contract.ChannelCount(each.origin, each.channel, each.records) for each in outside),
            not_passed_on=passed_on,
            not_taken=tuple(contract.ChannelCount(each.origin, each.channel, each.not_taken) for each in left_out),
            lost=lost.lost,
            lost_records=tuple(
                contract.LostRecord(each.local_seq, each.channel, each.identity.sender, each.identity.id)
                for each in lost.named
            ),
        )

    async def _without_others(self, row: LinkRow, found: list[Difference]) -> tuple[list[Difference], int]:
        """What of other spaces a peer does not pass on any more is no difference, and is counted: under which name it
        has that in its own log, and whether it shares that, is not known here."""
        extra = [one.seq for each in found for one in each.extra]
        others = await self.database.read(lambda c: books.said_elsewhere(c, row.row, extra))
        left = [replace(each, extra=tuple(one for one in each.extra if one.seq not in others)) for each in found]
        return [each for each in left if each.lacking or each.extra], len(others)

    # --- finding ---

    def _place(self, link: str) -> PeerPlace:
        return PeerPlace(self.space, self._agreed(link).origin)

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


def describe(home: SpaceHome, row: AgreedLink) -> contract.LinkReport:
    """Returns a link as it was agreed, which no process has to be asked about."""
    record = terms_of(row)
    return contract.LinkReport(
        **{name: getattr(record, name) for name in LinkAgreement.__struct_fields__},
        state=row.state,
        peer=row.peer or None,
        why=row.why,
        address=_address_of(home, row.link),
        credential=LinkPeers.below(home).creds(row.link).exists(),
        beyond_names={origin: _called(home, origin) for origin in record.beyond},
        imports=row.takes(milliseconds() / 1000),
    )


def _address_of(home: SpaceHome, link: str) -> str | None:
    try:
        access = LinkPeers.below(home).get(link)
    except TidingsError:
        return None
    return access.address if access is not None else None


def _called(home: SpaceHome, origin: str) -> str:
    rows = LinkLedger.below(home, home.read_info().id).rows()
    named = (str(each.terms.get("space")) for each in rows if each.origin == origin and each.state in ("setting", "on"))
    return next(named, "")


def _stored_link(connection: sqlite3.Connection, row: LinkRow, complete: bool) -> contract.StoredLink:
    owed, kept = obligations.counts(connection, row.row)
    found = contract.StoredLink(
        handled=row.handled.seq if row.handled is not None else None,
        epoch=row.handled.epoch if row.handled is not None else None,
        received=row.received.seq if row.received is not None else None,
        handled_at=row.handled_at / 1000 if row.handled_at is not None else None,
        record_time=row.handled_time / 1e9 if row.handled_time else None,
        paused=row.paused,
        owed=owed,
        quarantined=kept,
        unlisted=tuple(obligations.unlisted(connection, row.row)) if kept else (),
    )
    if complete:
        found.counts = books.counts(connection, row.row)
        found.omitted = tuple(books.omissions(connection, row.row, limit=20))
        found.not_taken = tuple(books.not_taken(connection, row.row))
    return found


def _quarantined(each: Quarantined) -> contract.QuarantinedRecord:
    record = each.record
    return contract.QuarantinedRecord(
        seq=record.seq,
        life=each.life,
        reason=each.reason,
        words=each.words,
        origin=record.origin,
        channel=record.channel,
        sender=record.sender,
        size=len(record.payload),
        attempts=each.attempts,
        since=each.first_at / 1000,
    )


def _directory_rows(people: Iterable[Person]) -> tuple[DirectoryRow, ...]:
    return tuple(DirectoryRow(each.id, each.name, each.roles) for each in people)


def _channel_difference(each: Difference) -> contract.ChannelDifference:
    def named(records: tuple[RecordIdentity, ...]) -> tuple[contract.DifferentRecord, ...]:
        return tuple(contract.DifferentRecord(one.seq, one.sender, one.id) for one in records[:MOST_NAMED])

    lacking, extra = each.lacking, each.extra
    return contract.ChannelDifference(each.channel, each.day, named(lacking), named(extra), len(lacking), len(extra))
