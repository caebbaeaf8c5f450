"""What this space's own worker of links may ask: which links there are, and what came in by them.

The worker admits by publishing, and nobody is asked for that; a record counts if the link record in force at its
sequence lets it in. To admit nothing twice, however long ago it came, the worker keeps an index of what is in the log,
and reads it here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tidings.contract.core import Caller
from tidings.contract.links import (
    MAX_INDEX,
    ImportChannelsAnswer,
    ImportChannelsRequest,
    ImportFactsAnswer,
    ImportFactsRequest,
    ImportIndexAnswer,
    ImportIndexRequest,
    ImportLinksAnswer,
    ImportLinksRequest,
    IndexedRecord,
    LinkStateRow,
)
from tidings.nats.jetstream import StoredRecord
from tidings.rpc.dispatch import handler
from tidings.steward.context import SpaceContext
from tidings.steward.gate import LogGate
from tidings.steward.link_floors import LinkPushes
from tidings.steward.link_records import link_on, links_in_force, links_on
from tidings.steward.link_scope import admitted, identity_of, own_fields
from tidings.steward.marks import Marks
from tidings.steward.writer import RulingWriter
from tidings.wire.digests import payload_hash
from tidings.wire.links import authorization_epoch
from tidings.wire.subjects import Via

#: of what the log keeps, what all links together may bring into it in a day
LINKS_SHARE = 0.25
#: bytes that are read for one answer
MOST_SCANNED = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class AdmissionHandlers:
    space: SpaceContext
    writer: RulingWriter
    marks: Marks
    gate: LogGate
    pushes: LinkPushes

    @handler(ImportLinksRequest)
    async def links(self, _caller: Caller, _request: ImportLinksRequest) -> ImportLinksAnswer:
        """The link records in force, on or off, with how far the other space is that they share with; and the log."""
        log = await self._log()
        rows = [
            LinkStateRow.of(record, seq, await self.pushes.of(link, seq, record, log["head"]))
            for link, seq, record in list(links_in_force(self.space))
        ]
        return ImportLinksAnswer(**log, name=self.space.info.name, links=tuple(rows))

    @handler(ImportFactsRequest)
    async def facts(self, _caller: Caller, request: ImportFactsRequest) -> ImportFactsAnswer:
        """The log as it is: what was acknowledged before this was asked is at or before `head`. `after`: a sequence
        that was acknowledged; a replica that does not have it yet is not believed. `link`: under which record it lets
        something in now, by sequence and name; 0 is none. `listing` changes whenever other channels are listed; 0 if
        none has to be."""
        found, link = await self._log(request.after), request.link
        if link is None:
            return ImportFactsAnswer(**found)
        async with self.writer.lock:  # a record that is under way counts
            found["listing"] = self._listing()
            on = link_on(self.space, link)
        if on is None:
            return ImportFactsAnswer(**found, agreed=0, authority="")
        return ImportFactsAnswer(**found, agreed=on[0], authority=authorization_epoch(on[1]))

    async def _log(self, known: int = 0) -> dict[str, Any]:
        state = self.gate.state
        return {
            "space": self.space.info.id,
            "epoch": self.marks.file.epoch,
            "head": await self.space.log_head(known),
            "floor": self.space.table.floor,
            "open": state is None or state.open,
            "listing": self._listing(),
            "share": self._share(),
        }

    def _share(self) -> int:
        """Bytes that one link may bring into the log in a day: all of them together a part of what the log keeps."""
        if self.gate.state is None:
            return 0
        budget, space = self.gate.state.budget, self.space.table.space_at(self.space.position)
        kept = budget if space.keep_bytes is None else min(budget, space.keep_bytes)
        taking = sum(bool(record.channels or record.beyond) for _, _, record in links_on(self.space))
        return max(1, int(kept * LINKS_SHARE) // max(1, taking))

    def _listing(self) -> int:
        return self.space.table.rules.listing_at(self.space.position)

    @handler(ImportChannelsRequest)
    async def listed(self, _caller: Caller, request: ImportChannelsRequest) -> ImportChannelsAnswer:
        """Which of these channels nothing counts in, because they are not listed and have to be."""
        async with self.writer.lock:  # a record that is under way counts
            rules, position = self.space.table.rules, self.space.position
        return ImportChannelsAnswer(tuple(each for each in request.channels if not rules.is_listed(each, position)))

    @handler(ImportIndexRequest)
    async def index(self, _caller: Caller, request: ImportIndexRequest) -> ImportIndexAnswer:
        after, limit = request.after, min(request.limit, MAX_INDEX)
        epoch, head = self.marks.file.epoch, await self.space.log_head(after)
        found, through = await self._read(max(after + 1, self.space.table.floor, 1), head, limit)
        async with self.writer.lock:  # rulings that were under way while we read are in the table
            pass
        rows = tuple(row for row in map(self._row, found) if row is not None)
        return ImportIndexAnswer(epoch=epoch, rows=rows, through=max(after, through), head=head)

    async def _read(self, start: int, end: int, limit: int) -> tuple[list[StoredRecord], int]:
        s, size = self.space.subjects, 0
        found: list[StoredRecord] = []
        pages = self.space.js.read(s.log_stream, f"{s.root}.via.>", start, end, page=limit, max_bytes=MOST_SCANNED)
        async for records in pages:
            found += records
            size += sum(len(record.payload) for record in records)
            if len(found) >= limit or size > MOST_SCANNED:
                return found[:limit], found[:limit][-1].seq
        return found, end

    def _row(self, record: StoredRecord) -> IndexedRecord | None:
        parsed, fields = self.space.subjects.parse(record.subject), own_fields(record)
        if not isinstance(parsed, Via) or fields is None or record.seq < self.space.table.floor:
            return None
        came = admitted(self.space.table.rules, self.space.info.id, record, parsed, fields)
        said = identity_of(record.payload) if came is not None else None
        if came is None or said is None or said.sender != parsed.sender:
            return None
        hashed = payload_hash(record.payload).hex()
        return IndexedRecord(record.seq, came.link, came.origin, came.channel, parsed.sender, said.id, hashed)
