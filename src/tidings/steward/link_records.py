"""Link records: what the owner of a space agreed with another, checked and written; and which of them are in force.

What may come in by a link and what the other space may read is in one record, `td.S.link.<link>`. There is one for each
other space. A link keeps its other space for ever: another one under the same name would inherit what was admitted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict, replace

from tidings.contract.admin import (
    EndLinkRequest,
    LinkChangedAnswer,
    LinkRecordRow,
    LinkRecordsAnswer,
    LinkRecordsRequest,
    SetLinkRequest,
)
from tidings.contract.core import Caller
from tidings.errors import ConflictError, InvalidName, UsageError
from tidings.rpc.dispatch import handler
from tidings.steward.context import SpaceContext, now
from tidings.steward.writer import ADMIN, RulingWriter
from tidings.wire.names import check_token, is_agent_id, role_parts, shown_space
from tidings.wire.rulings import Link

#: links of one space that are on
MOST_LINKS = 64
#: characters of what another space says that are kept
WORDS = 200


def links_in_force(space: SpaceContext) -> Iterator[tuple[str, int, Link]]:
    """(link, sequence of its record, record) of each link that has one, on or off."""
    position = space.position
    for link, history in list(space.table.rules.links.items()):  # who goes through them may wait between two
        record, since = history.at(position), history.since(position)
        if record is not None and since is not None:
            yield link, since, record


def links_on(space: SpaceContext) -> Iterator[tuple[str, int, Link]]:
    """Those that let something pass now."""
    moment = time.time_ns()
    return (each for each in links_in_force(space) if each[2].state == "on" and not each[2].has_ended(moment))


def link_on(space: SpaceContext, link: str) -> tuple[int, Link] | None:
    """Sequence and record of a link, if it lets something pass now."""
    return next(((seq, record) for each, seq, record in links_on(space) if each == link), None)


def in_a_line(text: Any) -> str:
    """What another space says, in a line for people."""
    return "".join(each if each.isprintable() else "?" for each in str(text))[:WORDS]


def shown_role(space: SpaceContext, address: str) -> str:
    """Which role a task is for, for people: `reviewer`, or `reviewer@acme`."""
    role, origin = role_parts(address)
    if not origin:
        return role
    name = next((record.space for _, _, record in links_in_force(space) if record.origin == origin), "")
    return f"{role}@{shown_space(name, origin)}"


@dataclass(frozen=True, slots=True)
class LinkRecords:
    space: SpaceContext
    writer: RulingWriter

    @handler(SetLinkRequest)
    async def link_set(self, caller: Caller, request: SetLinkRequest) -> LinkChangedAnswer:
        """Writes a link record. No field is taken from the record before it."""
        record = _record(caller, request)
        subject = self.space.subjects.link(record.link)
        async with self.writer.lock:
            if (done := self.writer.operations.outcome(ADMIN, caller.op, subject)) is not None:
                return LinkChangedAnswer(done.seq)
            self._check(record)
            return LinkChangedAnswer(await self.writer.write(subject, record))

    @handler(EndLinkRequest)
    async def link_end(self, caller: Caller, request: EndLinkRequest) -> LinkChangedAnswer:
        """Writes that nothing passes any more. Repeating it is harmless; for an unknown link it does nothing."""
        link = check_token(request.link, "link")
        subject = self.space.subjects.link(link)
        async with self.writer.lock:
            found = next((each for each in links_in_force(self.space) if each[0] == link), None)
            if found is None:
                return LinkChangedAnswer(0)
            _, seq, before = found
            if before.state == "off":
                return LinkChangedAnswer(seq)
            record = replace(before, op=caller.op, at=now(), state="off")
            return LinkChangedAnswer(await self.writer.write(subject, record))

    @handler(LinkRecordsRequest)
    async def links(self, _caller: Caller, _request: LinkRecordsRequest) -> LinkRecordsAnswer:
        """Returns the current operation of each link, so that a record that the log lost is found."""
        rows = links_in_force(self.space)
        return LinkRecordsAnswer({link: LinkRecordRow(record.op, seq, record.state) for link, seq, record in rows})

    def _check(self, record: Link) -> None:
        own = self.space.info.id
        if own in (record.origin, *record.beyond):
            raise UsageError(f"link {record.link}: a space is not linked with itself, and takes nothing of its own in")
        if record.space == self.space.info.name:
            raise UsageError(f"link {record.link}: {record.space} is this space; call the other one something else")
        if is_agent_id(record.link):
            raise InvalidName(f"link {record.link}: a link is not called like a user")
        if record.origin in record.beyond:
            raise UsageError(f"link {record.link}: what comes from its own space is said in `channels`, not `beyond`")
        if record.has_ended(time.time_ns()):
            raise UsageError(f"link {record.link} would have ended already: name a later time, or none")
        if record.shares and record.peer is None:
            raise UsageError(f"link {record.link} shares something with nobody: it needs the other worker's user")
        others = [each for link, _, each in links_in_force(self.space) if link != record.link and each.state == "on"]
        before = self.space.table.link_at(record.link, self.space.position)
        if before is not None and before.origin != record.origin:
            raise ConflictError(
                f"link {record.link} is with {before.origin}, on or off: a link with {record.origin} needs another name"
            )
        if len(others) >= MOST_LINKS:
            raise ConflictError(f"a space has at most {MOST_LINKS} links: end one first")
        for other in others:
            name = other.link
            if other.origin == record.origin:
                raise ConflictError(f"there is a link with {record.origin} already, {name}: change that one")
            if record.space and record.space == other.space:
                raise ConflictError(f"{record.space} is what the space of link {name} is called: choose another name")
            if record.peer is not None and record.peer == other.peer:
                raise ConflictError(f"user {record.peer} is the worker of link {name}: each link has one of its own")


def _record(caller: Caller, request: SetLinkRequest) -> Link:
    try:
        return Link(op=caller.op, at=now(), state="on", **asdict(request))
    except (ValueError, InvalidName) as error:
        raise UsageError(f"this is not a link record: {error}") from error
