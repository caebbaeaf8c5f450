"""What the steward does for the owner of a space: grant, revoke, succeed, settings, the table.

These requests come on `ctl.admin`, which is not exported: only a process that may open the space's keys can send
one. The steward writes the record and tends the broker's mailboxes; it never sees a seed and cannot mint.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import asdict, replace

from tidings.admin import pushing, recall
from tidings.contract.admin import (
    AccessChangedAnswer,
    AcknowledgeAnswer,
    AcknowledgeRequest,
    ChangeSpaceRequest,
    GrantRequest,
    IssuedAnswer,
    IssuedRequest,
    IssuedRow,
    RevokeRequest,
    RotateKeyAnswer,
    RotateKeyRequest,
    TableAnswer,
    TableRequest,
    TableView,
)
from tidings.contract.agents import SpaceSettingsAnswer
from tidings.contract.core import Caller
from tidings.errors import ConflictError, LeaseLost, NameTaken, TidingsError, UsageError
from tidings.nats.acks import ACK_WAIT
from tidings.nats.errors import NO_CONSUMER, ApiError
from tidings.rpc.dispatch import handler
from tidings.steward.context import SpaceContext, now
from tidings.steward.mail import Mail
from tidings.steward.marks import Marks
from tidings.steward.signing_key import SigningKey
from tidings.steward.store_watch import StoreWatch
from tidings.steward.unread import UnreadMail
from tidings.steward.writer import ADMIN, RulingWriter
from tidings.wire.names import check_agent_id, covers_any
from tidings.wire.rulings import Access, Member, Space
from tidings.wire.subjects import StateKey

ACK_WAIT_NS = int(ACK_WAIT * 1_000_000_000)
#: a space that waits for an archive that nobody runs removes nothing, until it is full
ARCHIVE_EXISTS = False
PAGE = 500
PAGE_BYTES = 512 * 1024
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdminHandlers:
    space: SpaceContext
    writer: RulingWriter
    signing_key: SigningKey
    marks: Marks
    store: StoreWatch
    mail: Mail
    unread: UnreadMail

    @handler(GrantRequest)
    async def grant(self, caller: Caller, request: GrantRequest) -> AccessChangedAnswer:
        """Write an access record: a new agent, a widening or a narrowing. Mailboxes are made, lost rights closed."""
        owner = check_agent_id(request.id)
        async with self.writer.lock:
            access = _access(caller, request)
            before = self.space.access(owner)
            done = self.writer.operations.outcome(ADMIN, caller.op, self.space.subjects.access(owner))
            if done is not None and done.seq != self.writer.access_seq(owner):
                return AccessChangedAnswer(done.seq, ())  # done, and something newer is in force since
            seq = done.seq if done else await self._rule_access(owner, access)
            if access.succeeds:
                await self._inherit(owner, access.succeeds, caller.op)
            closed = await self.close_uncovered(owner)
            if before is not None and any(not covers_any(access.read, pattern) for pattern in before.read):
                await self.empty_mailbox(owner)  # also of channels it had left: what it may no longer read
            await self.make_mailboxes(owner)
        return AccessChangedAnswer(seq, tuple(closed))

    @handler(RevokeRequest)
    async def revoke(self, caller: Caller, request: RevokeRequest) -> AccessChangedAnswer:
        """Write the revocation, close every membership, remove the mailboxes. Repeating it is harmless.

        First of all whoever it concerns is told what was unread: afterwards nobody can say.
        """
        owner = check_agent_id(request.id)
        if (held := self.space.active_access(owner)) is not None:
            await self._tell_dropped(owner, held)
        async with self.writer.lock:
            before = self.space.access(owner)
            if before is None:
                return AccessChangedAnswer(0, ())
            seq = self.writer.access_seq(owner)
            if not before.revoked:
                record = replace(before, op=caller.op, at=now(), revoked=True, jwt=None)
                seq = await self.writer.write(self.space.subjects.access(owner), record)
            closed = await self.close_uncovered(owner)
            await self.remove_mailboxes(owner)
        await self.mail.give_back(owner)
        return AccessChangedAnswer(seq, tuple(closed))

    async def _tell_dropped(self, owner: str, access: Access) -> None:
        """A mailbox that cannot be read must not keep its agent from being revoked; receipts still tell the senders."""
        try:
            await self.unread.tell_dropped(owner, access)
        except LeaseLost:
            raise
        except TidingsError as error:
            log.warning("what lay unread for %s could not be told: %s", access.name, error)

    async def _rule_access(self, owner: str, access: Access) -> int:
        before = self.space.access(owner)
        if before is not None and before.name != access.name:
            # whoever reads an old message names its sender by the record in force now
            raise ConflictError(
                f"{owner} is {before.name}, and an id keeps its name: add an agent {access.name} instead"
            )
        holder = self.space.table.owner_named(access.name)
        if holder not in (None, owner, access.succeeds):
            raise NameTaken(f"the name {access.name} belongs to {holder}; revoke it or choose another name")
        return await self.writer.write(self.space.subjects.access(owner), access)

    async def _inherit(self, owner: str, predecessor: str, op: str) -> None:
        """A successor is in every channel its predecessor is in, from before the predecessor is cut: no gap."""
        held = {interval.pattern for interval in self.space.open_intervals(owner)}
        for interval in self.space.open_intervals(predecessor):
            if interval.pattern not in held:
                subject = self.space.subjects.member(owner, self.space.tag(interval.pattern))
                record = Member(op=op, at=now(), state="in", pattern=interval.pattern)
                await self.writer.write(subject, record)

    async def close_uncovered(self, owner: str) -> list[str]:
        """Close memberships the access in force does not cover, and empty the mailbox of what it may no longer read."""
        closed = []
        uncovered = list(self.space.table.uncovered(owner))
        access = self.space.access(owner)
        if access is not None and not access.revoked:
            await self.store.note_closed(owner, uncovered)  # first: whoever finishes this finds nothing to tell
        for interval in uncovered:
            subject = self.space.subjects.member(owner, self.space.tag(interval.pattern))
            record = Member(op=f"narrowed-{self.space.position}", at=now(), state="out", pattern=interval.pattern)
            record = replace(record, ends=interval.joined)
            await self.writer.write(subject, record)
            closed.append(interval.pattern)
        if closed:
            await self.empty_mailbox(owner)
        return closed

    async def empty_mailbox(self, owner: str) -> None:
        """Remove what lies unread in a mailbox. The pipeline finds the note and delivers again what is allowed."""
        s = self.space.subjects
        end = await self.space.head(s.delivery_stream)  # before the note: what comes after it is not ours to remove
        await self.note_emptied(owner)
        await self.space.js.purge(s.delivery_stream, subject_filter=s.delivery(owner), below=end + 1)

    async def note_emptied(self, owner: str) -> None:
        """Write down how far the owner had read: emptying moves the broker's own floor to the end."""
        info = await self.space.consumer(self.space.subjects.delivery_stream, f"dlv_{owner}")
        if info is None:
            return  # it has no mailbox, or never had one
        above = int(info["ack_floor"]["stream_seq"])
        while True:
            entry = await self.space.state.get(StateKey.EMPTIED)
            notes = entry.value if entry else {}
            if notes.get(owner, above + 1) <= above:
                return
            try:
                await self.space.state.put(StateKey.EMPTIED, {**notes, owner: above}, entry.revision if entry else 0)
            except ConflictError:
                continue  # the pipeline just took a note away
            return

    async def make_mailboxes(self, owner: str) -> None:
        s = self.space.subjects
        await self._consumer(s.delivery_stream, f"dlv_{owner}", s.delivery(owner), 4)
        await self._consumer(s.direct_stream, f"dm_{owner}", s.direct_inbox(owner), 64)

    async def _consumer(self, stream: str, name: str, subject_filter: str, pending: int) -> None:
        config: dict[str, Any] = {
            "name": name,
            "durable_name": name,
            "filter_subject": subject_filter,
            "ack_policy": "explicit",
            "ack_wait": ACK_WAIT_NS,
            "max_ack_pending": pending,
            "deliver_policy": "all",
            "max_waiting": 32,
        }
        await self.space.js.api(
            f"CONSUMER.CREATE.{stream}.{name}.{subject_filter}", {"stream_name": stream, "config": config}
        )

    async def remove_mailboxes(self, owner: str) -> None:
        s = self.space.subjects
        for stream, name in ((s.delivery_stream, f"dlv_{owner}"), (s.direct_stream, f"dm_{owner}")):
            try:
                await self.space.js.api(f"CONSUMER.DELETE.{stream}.{name}")
            except ApiError as error:
                if error.err_code != NO_CONSUMER:
                    raise
        # Direct messages are left to `mail.py`, which tells their senders before it removes them.
        end = await self.space.head(s.delivery_stream)
        await self.space.js.purge(s.delivery_stream, subject_filter=s.delivery(owner), below=end + 1)

    @handler(ChangeSpaceRequest)
    async def space_set(self, caller: Caller, request: ChangeSpaceRequest) -> SpaceSettingsAnswer:
        async with self.writer.lock:
            subject = self.space.subjects.space_record
            if (done := self.writer.operations.outcome(ADMIN, caller.op, subject)) is not None:
                return SpaceSettingsAnswer(self.space.settings(), done.seq)
            changed = changed_space(self.space.table.space_at(self.space.position), caller, request)
            if changed.parts.archive == "on" and not ARCHIVE_EXISTS:
                raise UsageError("Cannot set archive=on: the archive does not exist yet. Leave archive=off.")
            seq = await self.writer.write(subject, changed)
        return SpaceSettingsAnswer(self.space.settings(), seq)

    @handler(RotateKeyRequest)
    async def rotate_key(self, caller: Caller, _request: RotateKeyRequest) -> RotateKeyAnswer:
        """The old key signs a record that names the new one; from the next record on the new one rules."""
        async with self.writer.lock:
            seq = await self.signing_key.rotate(self.writer, caller.op)
        return RotateKeyAnswer(seq, self.space.table.steward_key)

    @handler(TableRequest)
    async def table(self, _caller: Caller, request: TableRequest) -> TableAnswer:
        """Returns the table as of a sequence, a page of owners at a time."""
        position, offset = self.space.position, request.offset
        view = self.space.table.as_of(position if request.seq is None else min(request.seq, position))
        owners = sorted(set(view.members) | set(view.access))
        page = _fitting(view, owners[offset : offset + PAGE])
        members = {owner: view.members[owner] for owner in page if owner in view.members}
        access = {owner: view.access[owner] for owner in page if owner in view.access}
        following = offset + len(page)
        shown = replace(view, members=members, access=access)
        return TableAnswer(shown, following if following < len(owners) else None, len(owners))

    @handler(IssuedRequest)
    async def issued(self, _caller: Caller, request: IssuedRequest) -> IssuedAnswer:
        """Returns the current operation of each of these ids, so that an interrupted add is found."""
        found: dict[str, IssuedRow] = {}
        for owner in request.ids:
            access = self.space.access(check_agent_id(owner))
            if access is not None:
                op, seq = self.writer.last_op[self.space.subjects.access(owner)]
                found[owner] = IssuedRow(op=op, seq=seq, revoked=access.revoked, name=access.name)
        return IssuedAnswer(found)

    @handler(AcknowledgeRequest)
    async def acknowledge(self, _caller: Caller, _request: AcknowledgeRequest) -> AcknowledgeAnswer:
        """Forgets what health reports: a log that went backwards and what came of it, or servers that are gone."""
        home, info = self.space.home, self.space.info
        beside = recall.acknowledge(home, info.id) + pushing.forget_untold(home, info)
        return AcknowledgeAnswer(self.marks.acknowledge() + self.store.acknowledge() + beside)


def _access(caller: Caller, request: GrantRequest) -> Access:
    fields = asdict(request)
    del fields["id"]
    return Access(op=caller.op, at=now(), **fields)


def changed_space(before: Space, caller: Caller, request: ChangeSpaceRequest) -> Space:
    """Returns the space's record with the settings that the request mentions, and nothing else, changed."""
    changes = _mentioned(request)
    for nested in ("defaults", "parts"):
        if nested in changes:
            changes[nested] = replace(getattr(before, nested), **_mentioned(changes[nested]))
    return replace(before, **changes, op=caller.op, at=now(), steward_key=None)


def _mentioned(change: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in asdict(change).items() if value is not UNSET}


def _fitting(view: TableView, owners: list[str]) -> list[str]:
    """As many of the owners as fit a page, at least one: their rows may be long."""
    used = 0
    for number, owner in enumerate(owners):
        used += len(msgspec.json.encode((view.members.get(owner), view.access.get(owner))))
        if number and used > PAGE_BYTES:
            return owners[:number]
    return owners
