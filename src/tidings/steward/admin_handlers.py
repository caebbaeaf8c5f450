"""What the steward does for the owner of a space: grant, revoke, succeed, settings, the table.

These requests come on `ctl.admin`, which is not exported: only a process that may open the space's keys can send
one. The steward writes the record and tends the broker's mailboxes; it never sees a seed and cannot mint.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import msgspec

from tidings.admin import pushing, recall
from tidings.errors import ConflictError, LeaseLost, NameTaken, TidingsError, UsageError
from tidings.model.view import TableView
from tidings.nats.acks import ACK_WAIT
from tidings.nats.jetstream_api import NO_CONSUMER, ApiError
from tidings.steward.context import SpaceContext, now
from tidings.steward.mail import Mail
from tidings.steward.marks import Marks
from tidings.steward.requests import Answer, ControlRequest, handles
from tidings.steward.signing_key import SigningKey
from tidings.steward.store_watch import StoreWatch
from tidings.steward.unread import UnreadMail
from tidings.steward.writer import ADMIN, RulingWriter
from tidings.wire.names import check_agent_id
from tidings.wire.patterns import covers_any
from tidings.wire.rulings import Access, Member, Space
from tidings.wire.state_keys import StateKey

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

    @handles("admin", "grant")
    async def grant(self, request: ControlRequest) -> Answer:
        """Write an access record: a new agent, a widening or a narrowing. Mailboxes are made, lost rights closed."""
        owner = check_agent_id(request.text("id"))
        async with self.writer.lock:
            access = _access(request)
            before = self.space.access(owner)
            done = self.writer.operations.outcome(ADMIN, request.op, self.space.subjects.access(owner))
            if done is not None and done.seq != self.writer.access_seq(owner):
                return {"seq": done.seq, "closed": []}  # done, and something newer is in force since
            seq = done.seq if done else await self._rule_access(owner, access)
            if access.succeeds:
                await self._inherit(owner, access.succeeds, request.op)
            closed = await self.close_uncovered(owner)
            if before is not None and any(not covers_any(access.read, pattern) for pattern in before.read):
                await self.empty_mailbox(owner)  # also of channels it had left: what it may no longer read
            await self.make_mailboxes(owner)
        return {"seq": seq, "closed": closed}

    @handles("admin", "revoke")
    async def revoke(self, request: ControlRequest) -> Answer:
        """Write the revocation, close every membership, remove the mailboxes. Repeating it is harmless.

        First of all whoever it concerns is told what was unread: afterwards nobody can say.
        """
        owner = check_agent_id(request.text("id"))
        if (held := self.space.active_access(owner)) is not None:
            await self._tell_dropped(owner, held)
        async with self.writer.lock:
            before = self.space.access(owner)
            if before is None:
                return {"seq": 0, "closed": []}
            seq = self.writer.access_seq(owner)
            if not before.revoked:
                record = msgspec.structs.replace(before, op=request.op, at=now(), revoked=True, jwt=None)
                seq = await self.writer.write(self.space.subjects.access(owner), record)
            closed = await self.close_uncovered(owner)
            await self.remove_mailboxes(owner)
        await self.mail.give_back(owner)
        return {"seq": seq, "closed": closed}

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
            record = msgspec.structs.replace(record, ends=interval.joined)
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

    @handles("admin", "space_set")
    async def space_set(self, request: ControlRequest) -> Answer:
        """Change settings of the space; what is not named stays."""
        async with self.writer.lock:
            subject = self.space.subjects.space_record
            if (done := self.writer.operations.outcome(ADMIN, request.op, subject)) is not None:
                return {"seq": done.seq, "space": self.space.settings()}
            changed = changed_space(self.space.table.space_at(self.space.position), request)
            if changed.parts.archive == "on" and not ARCHIVE_EXISTS:
                raise UsageError("Cannot set archive=on: the archive does not exist yet. Leave archive=off.")
            seq = await self.writer.write(subject, changed)
        return {"seq": seq, "space": self.space.settings()}

    @handles("admin", "rotate_key")
    async def rotate_key(self, request: ControlRequest) -> Answer:
        """The old key signs a record that names the new one; from the next record on the new one rules."""
        async with self.writer.lock:
            seq = await self.signing_key.rotate(self.writer, request.op)
        return {"seq": seq, "steward_key": self.space.table.steward_key}

    @handles("admin", "table")
    async def table(self, request: ControlRequest) -> Answer:
        """The table as of a sequence, a page of owners at a time."""
        seq = request.optional("seq", int)
        offset = request.optional("offset", int) or 0
        view = self.space.table.as_of(self.space.position if seq is None else min(seq, self.space.position))
        fields = msgspec.to_builtins(view)
        owners = sorted(set(view.members) | set(view.access))
        page = _fitting(view, owners[offset : offset + PAGE])
        fields["members"] = {owner: view.members[owner] for owner in page if owner in view.members}
        fields["access"] = {owner: fields["access"][owner] for owner in page if owner in view.access}
        following = offset + len(page)
        return {"table": fields, "next": following if following < len(owners) else None, "owners": len(owners)}

    @handles("admin", "issued")
    async def issued(self, request: ControlRequest) -> Answer:
        """Which operation is in force for each of the ids asked for: how an interrupted add is found."""
        found: dict[str, Any] = {}
        for owner in request.texts("ids"):
            access = self.space.access(check_agent_id(owner))
            if access is not None:
                op, seq = self.writer.last_op[self.space.subjects.access(owner)]
                found[owner] = {"op": op, "seq": seq, "revoked": access.revoked, "name": access.name}
        return {"found": found}

    @handles("admin", "acknowledge")
    async def acknowledge(self, request: ControlRequest) -> Answer:
        """The owner has seen that the log went backwards, and what came of it, or that servers are gone; health stops
        saying so."""
        del request
        home, info = self.space.home, self.space.info
        beside = recall.acknowledge(home, info.id) + pushing.forget_untold(home, info)
        return {"acknowledged": self.marks.acknowledge() + self.store.acknowledge() + beside}


def _access(request: ControlRequest) -> Access:
    fields = {name: value for name, value in request.arguments.items() if name != "id"}
    try:
        return msgspec.convert({**fields, "op": request.op, "at": now()}, Access)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"this is not an access record: {error}") from error


def changed_space(before: Space, request: ControlRequest) -> Space:
    base = msgspec.to_builtins(before)
    wanted = dict(request.arguments)
    for nested in ("defaults", "parts"):
        if isinstance(wanted.get(nested), dict):
            unknown = set(wanted[nested]) - set(base[nested])
            if unknown:
                raise UsageError(f"{nested} of a space are {', '.join(base[nested])}, not {', '.join(sorted(unknown))}")
            wanted[nested] = base[nested] | wanted[nested]
    unknown = set(wanted) - set(base) | (set(wanted) & {"op", "v", "at", "steward_key"})
    if unknown:
        raise UsageError(f"a space has no setting {', '.join(sorted(unknown))}")
    try:
        return msgspec.convert(base | wanted | {"op": request.op, "at": now(), "steward_key": None}, Space)
    except msgspec.ValidationError as error:
        raise UsageError(f"space settings: {error}") from error


def _fitting(view: TableView, owners: list[str]) -> list[str]:
    """As many of the owners as fit a page, at least one: their rows may be long."""
    used = 0
    for number, owner in enumerate(owners):
        used += len(msgspec.json.encode((view.members.get(owner), view.access.get(owner))))
        if number and used > PAGE_BYTES:
            return owners[:number]
    return owners
