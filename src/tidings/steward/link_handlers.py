"""What the worker of a linked space may ask: pages of what is shared with it, single records, and digests.

The broker pins who asks; the link is the one whose record names that user. What is shared is decided by the record in
force when the answer is made, page by page and record by record: a link that was ended or narrowed meanwhile shows
nothing more. A page goes on from a token of the asker's, and says why if it cannot: the log was set back, made anew, or
has removed what follows. `handled` of a page, or else `after`, is how far the other space has handled the log;
retention waits for that, for a while (`link_floors.py`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tidings.admin.link_registry import LinkLedger
from tidings.contract.core import Caller
from tidings.contract.links import (
    MAX_PAGE,
    LinkBucketsAnswer,
    LinkBucketsRequest,
    LinkDigestAnswer,
    LinkDigestRequest,
    LinkFetchAnswer,
    LinkFetchRequest,
    LinkHelloAnswer,
    LinkHelloRequest,
    LinkIdsAnswer,
    LinkIdsRequest,
    LinkPageAnswer,
    LinkPageRequest,
)
from tidings.errors import BrokerUnreachable, ConflictError, DeniedError, UsageError
from tidings.nats.jetstream import StoredRecord
from tidings.rpc.dispatch import handler
from tidings.steward.context import SpaceContext, now
from tidings.steward.fair_queue import ConcurrencyLimit
from tidings.steward.link_floors import LinkFloors
from tidings.steward.link_records import links_in_force
from tidings.steward.link_scope import LinkScope, identity_of
from tidings.steward.marks import Marks
from tidings.steward.writer import RulingWriter
from tidings.wire.digests import (
    ChannelDigests,
    DayDigests,
    RecordIdentity,
    bucket_of,
    day_of,
    is_day,
    payload_hash,
)
from tidings.wire.link_exchange import LinkedRow
from tidings.wire.links import GapKind, LinkedRecord, LinkGap, Token
from tidings.wire.names import check_channel
from tidings.wire.records import Stamp
from tidings.wire.rulings import Link

#: payloads of a page, and half of the answer that they are in; one record may be larger
PAGE_BYTES = 256 * 1024
#: bytes read at a time: with their headers what fits into a page, and little more
MOST_SCANNED = PAGE_BYTES * 5 // 4
#: rows of an answer to `ids`
MOST_IDS = 1_000
#: days of channels in one answer to `digest`: well below what an answer may have, however long their names are
MOST_DAYS = 2_000
#: pages under way: of one link, and of all
EACH, AT_ONCE = 1, 2
#: seconds for which a digest is worked on before whoever asked is told to ask again; it goes on from there
SCAN_SECONDS = 10.0
#: records read at a time for a digest: others are served in between
SCANNED_AT_ONCE = 250
#: digests that were begun, or are kept to be continued when the log has grown
MOST_SCANS = 16
#: seconds after which one that is kept is made anew: a log may lose something and nobody notices
RECOUNTED_AFTER = 3_600.0
#: how often a cluster may say that the log ends before a token until that is believed
LAGS_BELIEVED = 3


class GrantedLink(NamedTuple):
    link: str
    seq: int
    record: Link


@dataclass(frozen=True, slots=True)
class LogFacts:
    """The log as a token is held against it."""

    space: str
    epoch: str
    #: the first sequence that is there, or may be
    floor: int
    head: int


def gap_before_reading(token: Token, facts: LogFacts, agreed: int | None) -> LinkGap | None:
    """Why nothing can follow a token, as far as that is seen without its record. `agreed`: up to where the log of its
    epoch is that of now; None if it is the same."""

    def gap(kind: GapKind, known: int = 0) -> LinkGap:
        return LinkGap(kind=kind, oldest=max(0, facts.floor - 1), head=facts.head, epoch=facts.epoch, agreed=known)

    if token.space != facts.space:
        return gap(GapKind.STREAM)
    if agreed is not None and (token.epoch or token.seq):  # who knows nothing yet names no epoch
        return gap(GapKind.EPOCH, min(agreed, token.seq))
    if token.seq > facts.head:
        return gap(GapKind.TOO_NEW)
    if token.seq + 1 < facts.floor:
        return gap(GapKind.TOO_OLD, token.seq)
    return None


class _Scan:
    """A walk through what is shared, which may take several requests."""

    def __init__(self, floor: int) -> None:
        self.floor = floor
        self.begun = time.monotonic()
        #: it was answered, and may be continued
        self.kept = False
        #: everything before it was looked at
        self.position = floor
        self.days = ChannelDigests()
        self.day = DayDigests()
        self.ids: list[RecordIdentity] = []


#: takes a shared record into a scan; False: it needs no more
_Add = Callable[[_Scan, LinkedRecord], bool]


class LinkHandlers:
    def __init__(self, space: SpaceContext, writer: RulingWriter, marks: Marks, floors: LinkFloors) -> None:
        self.space = space
        self.writer = writer
        self.marks = marks
        self.floors = floors
        self.turns = ConcurrencyLimit(AT_ONCE, EACH, "a page of this link is under way already: wait for it")
        self.scanning = ConcurrencyLimit(1, EACH, "a digest of this link is being made already: wait for it")
        self._scans: dict[tuple[object, ...], _Scan] = {}
        #: link -> how often in a row the log of a cluster seemed to end before its token
        self._lags: Counter[str] = Counter()

    # --- who asks ---

    def granted(self, user: str) -> GrantedLink:
        """The link whose worker this is, if it lets anything pass now; DeniedError says why not."""
        named = [GrantedLink(*each) for each in links_in_force(self.space) if each[2].peer == user]
        found = next((each for each in named if each.record.state == "on"), named[0] if named else None)
        if found is None:
            raise DeniedError(f"no link of space {self.space.info.name} is with you: ask its owner for one")
        if found.record.state != "on":
            raise DeniedError(f"link {found.link} was ended by the owner of space {self.space.info.name}")
        if found.record.has_ended(time.time_ns()):
            raise DeniedError(f"link {found.link} ended when it was agreed to: ask for another, or a later end")
        return found

    def _scope(self, user: str) -> LinkScope:
        """What it may see now, not when it asked."""
        link, _, record = self.granted(user)
        return LinkScope(self.space.subjects, self.space.info.id, self.space.table.rules, link, record)

    @handler(LinkHelloRequest)
    async def hello(self, caller: Caller, _request: LinkHelloRequest) -> LinkHelloAnswer:
        """Describes this space and what it shares with the caller, with a newer token if there is one."""
        link, seq, _ = self.granted(caller.id)
        head, floor = await self._ends(link, 0)
        record = self.granted(caller.id).record
        row = LinkLedger.below(self.space.home, self.space.info.id).get(link)
        return LinkHelloAnswer(
            link=link,
            seq=seq,
            name=self.space.info.name,
            space=self.space.info.id,
            steward=self.space.table.steward_key,
            epoch=self.marks.file.epoch,
            head=head,
            floor=floor,
            shares=record.shares,
            hops=record.hops,
            until=record.until,
            direct=record.direct,
            roster=record.roster,
            tasks=record.tasks,
            time=now(),
            jwt=row.token if row is not None and row.peer == caller.id else "",
        )

    # --- pages ---

    @handler(LinkPageRequest)
    async def page(self, caller: Caller, request: LinkPageRequest) -> LinkPageAnswer:
        """What follows a token, oldest first."""
        token = Token(space=request.space, epoch=request.epoch, seq=request.after, mark=request.mark)
        handled = token.seq if request.handled is None else max(0, min(request.handled, token.seq))
        link = self.granted(caller.id).link
        async with self.turns.turn(link):
            return await self._page(caller.id, link, token, min(request.limit, MAX_PAGE), handled)

    async def _page(self, user: str, link: str, token: Token, limit: int, handled: int) -> LinkPageAnswer:
        head, floor = await self._ends(link, token.seq)
        facts = LogFacts(self.space.info.id, self.marks.file.epoch, floor, head)
        if (gap := await self._gap(token, facts)) is not None:
            return _without_records(token, facts, gap)
        self.floors.note(link, handled + 1)
        granted = self.granted(user).seq  # before anything is read: a record that changes meanwhile is told by the next
        found, reach = await self._read(self._scope(user).filters(), token.seq + 1, facts.head, limit)
        await self._settled()
        now_known = LogFacts(facts.space, self.marks.file.epoch, max(facts.floor, self.space.table.floor), facts.head)
        if (gap := gap_before_reading(token, now_known, self.marks.agreed_since(token.epoch))) is not None:
            return _without_records(token, now_known, gap)
        kept, end = _fitting(self._scope(user), found, reach, limit)
        through = Token(space=facts.space, epoch=facts.epoch, seq=end, mark=await self._mark(end, found, token))
        return LinkPageAnswer(
            records=tuple(map(LinkedRow.of, kept)),
            through=through,
            head=facts.head,
            floor=now_known.floor,
            gap=None,
            granted=granted,
        )

    async def _ends(self, link: str, after: int) -> tuple[int, int]:
        """(head, floor). Of a log with replicas the head is proven, unless `after` is beyond it time and again."""
        try:
            head = await self.space.log_head(after)
        except BrokerUnreachable:
            self._lags[link] += 1
            if self._lags[link] < LAGS_BELIEVED:
                raise
            head = await self.space.log_head()
        if head >= after:
            self._lags.pop(link, None)
        return head, await self._floor()

    async def _floor(self) -> int:
        """Retention's, unless the broker has less: somebody removed what ruling records tell of."""
        table, s = self.space.table, self.space.subjects
        first = int((await self.space.js.info(s.log_stream))["state"]["first_seq"])
        if first <= table.floor:
            return table.floor
        # leases go while they are above the floor, and nothing else does
        known = (seq for subject, seq in table.oldest.items() if subject != s.steward_lease and seq >= table.floor)
        return first if any(seq < first for seq in known) else table.floor

    async def _gap(self, token: Token, facts: LogFacts) -> LinkGap | None:
        found = gap_before_reading(token, facts, self.marks.agreed_since(token.epoch))
        if found is not None or not token.mark:
            return found
        contradicted, _ = await self.marks.compare([Stamp(token.seq, token.mark)], facts.head, facts.floor)
        if not contradicted:
            return None
        return LinkGap(kind=GapKind.RECORD, oldest=max(0, facts.floor - 1), head=facts.head, epoch=facts.epoch)

    async def _settled(self) -> None:
        """Rulings that were under way while we read are in the table when this returns."""
        async with self.writer.lock:
            return

    async def _read(self, filters: list[str], start: int, end: int, limit: int) -> tuple[list[StoredRecord], int]:
        """Records from `start` on, oldest first, and how far these are all."""
        found: dict[int, StoredRecord] = {}
        stream, start, reach = self.space.subjects.log_stream, max(1, start), end
        for each in filters:
            taken = size = 0
            async for records in self.space.js.read(stream, each, start, reach, page=limit + 1, max_bytes=MOST_SCANNED):
                found.update((record.seq, record) for record in records)
                taken += len(records)
                size += sum(map(_size_of, records))
                if records and (taken > limit or size > PAGE_BYTES):
                    reach = min(reach, records[-1].seq)
                    break
        return [found[seq] for seq in sorted(found) if seq <= reach], reach

    async def _mark(self, seq: int, found: list[StoredRecord], token: Token) -> str:
        """Of the record at a sequence, whatever it is; empty if there is none."""
        if seq == token.seq:
            return token.mark
        stored = next((record for record in reversed(found) if record.seq == seq), None)
        if stored is None and seq:
            stored = await self.space.js.at(self.space.subjects.log_stream, seq)
        return stored.mark if stored is not None else ""

    @handler(LinkFetchRequest)
    async def fetch(self, caller: Caller, request: LinkFetchRequest) -> LinkFetchAnswer:
        link = self.granted(caller.id).link
        async with self.turns.turn(link):
            return await self._fetch(caller.id, link, sorted(set(request.seqs)))

    async def _fetch(self, user: str, link: str, seqs: list[int]) -> LinkFetchAnswer:
        head, floor = await self._ends(link, 0)
        stored: list[tuple[int, StoredRecord | None]] = []
        size = 0
        for seq in seqs:
            there = max(1, floor) <= seq <= head
            record = await self.space.js.at(self.space.subjects.log_stream, seq) if there else None
            size += _size_of(record) if record is not None else 0
            if size > PAGE_BYTES and any(each is not None for _, each in stored):
                break
            stored.append((seq, record))
        await self._settled()
        scope, floor = self._scope(user), max(floor, self.space.table.floor)
        found = {seq: scope.shared(each) if each is not None and seq >= floor else None for seq, each in stored}
        return LinkFetchAnswer(
            epoch=self.marks.file.epoch,
            records=tuple(LinkedRow.of(each) for each in found.values() if each is not None),
            missing=tuple(seq for seq, each in found.items() if each is None),
        )

    # --- digests ---

    @handler(LinkDigestRequest)
    async def digest(self, caller: Caller, request: LinkDigestRequest) -> LinkDigestAnswer:
        """What is shared, by channel and day, from the floor up to `through`; behind the channel and day in `after`."""

        def add(scan: _Scan, record: LinkedRecord) -> bool:
            said = identity_of(record.payload)
            assert said is not None
            scan.days.add(record.channel, said.sender, said.id, said.ts, payload_hash(record.payload))
            return True

        scan = await self._scanned(caller.id, None, request.through, ("digest",), add, kept=True)
        pairs = sorted((channel, day) for channel, days in scan.days.totals().items() for day in days)
        rest = [each for each in pairs if each > request.after]
        totals, shown = scan.days.totals(), dict[str, dict[str, tuple[int, str]]]()
        for channel, day in rest[:MOST_DAYS]:
            shown.setdefault(channel, {})[day] = totals[channel][day].encode()
        return LinkDigestAnswer(floor=scan.floor, through=request.through, channels=shown, more=len(rest) > MOST_DAYS)

    @handler(LinkBucketsRequest)
    async def buckets(self, caller: Caller, request: LinkBucketsRequest) -> LinkBucketsAnswer:
        channel, day, through = check_channel(request.channel), _check_day(request.day), request.through

        def add(scan: _Scan, record: LinkedRecord) -> bool:
            if (named := _named_on(record, channel, day)) is not None:
                scan.day.add(named.item)
            return True

        scan = await self._scanned(caller.id, channel, through, ("buckets", channel, day, through), add)
        return LinkBucketsAnswer(scan.floor, through, tuple(each.encode() for each in scan.day.buckets))

    @handler(LinkIdsRequest)
    async def ids(self, caller: Caller, request: LinkIdsRequest) -> LinkIdsAnswer:
        channel, day, through = check_channel(request.channel), _check_day(request.day), request.through
        after, wanted = request.after, frozenset(request.buckets)

        def add(scan: _Scan, record: LinkedRecord) -> bool:
            named = _named_on(record, channel, day)
            if named is not None and bucket_of(named.item) in wanted:
                scan.ids.append(named)
            return len(scan.ids) <= MOST_IDS

        key = ("ids", channel, day, through, after, wanted)
        scan = await self._scanned(caller.id, channel, through, key, add, after=after)
        ids = tuple(each.encode() for each in scan.ids[:MOST_IDS])
        return LinkIdsAnswer(floor=scan.floor, through=through, ids=ids, more=len(scan.ids) > MOST_IDS)

    async def _scanned(
        self,
        user: str,
        channel: str | None,
        through: int,
        key: tuple[object, ...],
        add: _Add,
        *,
        after: int = 0,
        kept: bool = False,
    ) -> _Scan:
        """Walk through what is shared. ConflictError if it takes longer: asked again, it goes on from there. `kept`:
        what was counted stays so from the same floor on, and is continued when more is asked for."""
        granted = self.granted(user)
        key = (granted.link, granted.seq, self.marks.file.epoch, *key)
        async with self.scanning.turn(granted.link):
            head, floor = await self._ends(granted.link, 0)
            end = min(through, head)
            if kept and key in self._scans and self._scans[key].position > end + 1:
                key = (*key, through)  # less than was counted: that one goes on for whoever asks for more
            scan = self._scans.pop(key, None)
            if scan is None or not _can_go_on(scan, floor):
                scan = _Scan(floor)
                scan.position = max(floor, after + 1, 1)
            scan.kept = await self._walk(user, channel, scan, end, add)
            if kept or not scan.kept:
                self._scans[key] = scan
                while len(self._scans) > MOST_SCANS:
                    self._scans.pop(next(iter(self._scans)))
            if scan.kept:
                return scan
        raise ConflictError(f"it is being made, and is at record {scan.position} of {through}: ask again")

    async def _walk(self, user: str, channel: str | None, scan: _Scan, end: int, add: _Add) -> bool:
        """Whether it came to the end, or needs no more."""
        until = time.monotonic() + SCAN_SECONDS
        while scan.position <= end:
            filters = self._scope(user).filters(channel)
            found, reach = await self._read(filters, scan.position, end, SCANNED_AT_ONCE)
            await self._settled()
            if self.space.table.floor > scan.position:
                raise ConflictError("what is looked for was removed meanwhile: ask again")
            scope = self._scope(user)
            for record in found:
                linked = scope.shared(record)
                if linked is not None and not add(scan, linked):
                    return True
            scan.position = reach + 1
            if time.monotonic() >= until and scan.position <= end:
                return False
        return True


def _can_go_on(scan: _Scan, floor: int) -> bool:
    """What it had not come to yet is there; and of one that was answered, all that it counted."""
    if scan.kept:
        return scan.floor == floor and time.monotonic() - scan.begun < RECOUNTED_AFTER
    return scan.position >= floor


def _without_records(token: Token, facts: LogFacts, gap: LinkGap) -> LinkPageAnswer:
    return LinkPageAnswer(records=(), through=token, head=facts.head, floor=facts.floor, gap=gap, granted=0)


def _named_on(record: LinkedRecord, channel: str, day: str) -> RecordIdentity | None:
    """The record by what counts of it, if it is of that channel and day."""
    said = identity_of(record.payload) if record.channel == channel else None
    if said is None or day_of(said.ts) != day:
        return None
    return RecordIdentity(record.seq, said.sender, said.id, payload_hash(record.payload))


def _check_day(day: str) -> str:
    if not is_day(day):
        raise UsageError(f"`day`: {day[:40]!r} is not a day such as 2025-11-15")
    return day


def _fitting(scope: LinkScope, found: list[StoredRecord], reach: int, limit: int) -> tuple[list[LinkedRecord], int]:
    """What is shared of these, as much as fits and at least one; and how far that is all there is."""
    kept: list[LinkedRecord] = []
    size, seen = 0, 0
    for record in found:
        linked = scope.shared(record)
        if linked is not None:
            size += _size_of(record)
            if kept and (size > PAGE_BYTES or len(kept) == limit):
                return kept, seen
            kept.append(linked)
        seen = record.seq
    return kept, reach


def _size_of(record: StoredRecord) -> int:
    """What it counts in a page: its payload, or half of about what it takes in the answer, whichever is more."""
    in_answer = (len(record.payload) + 2) * 4 // 3 + len(record.own_block) + len(record.subject) + 256
    return max(len(record.payload), in_answer // 2)
