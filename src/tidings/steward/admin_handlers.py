"""What the steward does for the owner of a space: grant, revoke, succeed, settings, the table.

These requests come on `ctl.admin`, which is not exported: only a process that may open the space's keys can send
one. The steward writes the record and tends the broker's mailboxes; it never sees a seed and cannot mint.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from tidings.broker.acks import ACK_WAIT
from tidings.broker.answers import NO_CONSUMER, ApiError
from tidings.errors import ConflictError, LeaseLost, NameTaken, TidingsError, UsageError
from tidings.space import recall
from tidings.space.state import EMPTIED_KEY
from tidings.space.view import TableView
from tidings.steward.agent_handlers import Answer, Handler, now, open_intervals
from tidings.steward.operations import ADMIN
from tidings.steward.requests import Request
from tidings.steward.unread import tell_dropped, unread
from tidings.wire.names import check_agent_id
from tidings.wire.patterns import covers_any
from tidings.wire.rulings import Access, Member, Space

if TYPE_CHECKING:
    from tidings.steward.service import Steward

ACK_WAIT_NS = int(ACK_WAIT * 1_000_000_000)
PAGE = 500
PAGE_BYTES = 512 * 1024
log = logging.getLogger(__name__)


async def grant(steward: Steward, request: Request) -> Answer:
    """Write an access record: a new agent, a widening or a narrowing. Mailboxes are made, lost rights closed."""
    owner = check_agent_id(request.text("id"))
    async with steward.writer.lock:
        access = _access(request)
        before = steward.table.access_at(owner, steward.position)
        done = steward.writer.operations.outcome(ADMIN, request.op, steward.subjects.access(owner))
        if done is not None and done.seq != _access_seq(steward, owner):
            return {"seq": done.seq, "closed": []}  # done, and something newer is in force since
        seq = done.seq if done else await _rule_access(steward, owner, access)
        if access.succeeds:
            await _inherit(steward, owner, access.succeeds, request.op)
        closed = await close_uncovered(steward, owner)
        if before is not None and any(not covers_any(access.read, pattern) for pattern in before.read):
            await empty_delivery(steward, owner)  # also of channels it had left: what it may no longer read
        await make_mailboxes(steward, owner)
    return {"seq": seq, "closed": closed}


async def revoke(steward: Steward, request: Request) -> Answer:
    """Write the revocation, close every membership, remove the mailboxes. Repeating it is harmless.

    First of all whoever it concerns is told what was unread: afterwards nobody can say.
    """
    owner = check_agent_id(request.text("id"))
    if (held := steward.active_access(owner)) is not None:
        await _tell_dropped(steward, owner, held)
    async with steward.writer.lock:
        before = steward.table.access_at(owner, steward.position)
        if before is None:
            return {"seq": 0, "closed": []}
        seq = _access_seq(steward, owner)
        if not before.revoked:
            record = msgspec.structs.replace(before, op=request.op, at=now(), revoked=True, jwt=None)
            seq = await steward.writer.write(steward.subjects.access(owner), record)
        closed = await close_uncovered(steward, owner)
        await remove_mailboxes(steward, owner)
    await steward.mail.give_back(owner)
    return {"seq": seq, "closed": closed}


async def _tell_dropped(steward: Steward, owner: str, access: Access) -> None:
    """A mailbox that cannot be read must not keep its agent from being revoked; receipts still tell the senders."""
    try:
        await tell_dropped(steward, owner, access)
    except LeaseLost:
        raise
    except TidingsError as error:
        log.warning("what lay unread for %s could not be told: %s", access.name, error)


def _access(request: Request) -> Access:
    fields = {name: value for name, value in request.arguments.items() if name != "id"}
    try:
        return msgspec.convert({**fields, "op": request.op, "at": now()}, Access)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"this is not an access record: {error}") from error


async def _rule_access(steward: Steward, owner: str, access: Access) -> int:
    before = steward.table.access_at(owner, steward.position)
    if before is not None and before.name != access.name:
        # whoever reads an old message names its sender by the record in force now
        raise ConflictError(f"{owner} is {before.name}, and an id keeps its name: add an agent {access.name} instead")
    holder = steward.table.owner_named(access.name)
    if holder not in (None, owner, access.succeeds):
        raise NameTaken(f"the name {access.name} belongs to {holder}; revoke it or choose another name")
    return await steward.writer.write(steward.subjects.access(owner), access)


def _access_seq(steward: Steward, owner: str) -> int:
    return steward.writer.last_op.get(steward.subjects.access(owner), ("", 0))[1]


async def _inherit(steward: Steward, owner: str, predecessor: str, op: str) -> None:
    """A successor is in every channel its predecessor is in, from before the predecessor is cut: no gap."""
    held = {interval.pattern for interval in open_intervals(steward, owner)}
    for interval in open_intervals(steward, predecessor):
        if interval.pattern not in held:
            subject = steward.subjects.member(owner, steward.tag(interval.pattern))
            record = Member(op=op, at=now(), state="in", pattern=interval.pattern)
            await steward.writer.write(subject, record)


async def close_uncovered(steward: Steward, owner: str) -> list[str]:
    """Close memberships the access in force does not cover, and empty the mailbox of what it may no longer read."""
    closed = []
    uncovered = list(steward.table.uncovered(owner))
    access = steward.table.access_at(owner, steward.position)
    if access is not None and not access.revoked:
        await steward.store.note_closed(owner, uncovered)  # first: whoever finishes this finds nothing to tell
    for interval in uncovered:
        subject = steward.subjects.member(owner, steward.tag(interval.pattern))
        record = Member(op=f"narrowed-{steward.position}", at=now(), state="out", pattern=interval.pattern)
        record = msgspec.structs.replace(record, ends=interval.joined)
        await steward.writer.write(subject, record)
        closed.append(interval.pattern)
    if closed:
        await empty_delivery(steward, owner)
    return closed


async def empty_delivery(steward: Steward, owner: str) -> None:
    """Remove what lies unread in a mailbox. The pipeline finds the note and delivers again what is still allowed."""
    s = steward.subjects
    await note_emptied(steward, owner)
    await steward.js.purge(s.delivery_stream, subject_filter=s.delivery(owner))


async def note_emptied(steward: Steward, owner: str) -> None:
    """Write down how far the owner had read: emptying moves the broker's own floor to the end."""
    s = steward.subjects
    try:
        info = await steward.js.api(f"CONSUMER.INFO.{s.delivery_stream}.dlv_{owner}")
    except ApiError as error:
        if error.err_code != NO_CONSUMER:
            raise
        return  # it has no mailbox, or never had one
    above = int(info["ack_floor"]["stream_seq"])
    while True:
        entry = await steward.state.get(EMPTIED_KEY)
        notes = entry.value if entry else {}
        if notes.get(owner, above + 1) <= above:
            return
        try:
            await steward.state.put(EMPTIED_KEY, {**notes, owner: above}, entry.revision if entry else 0)
        except ConflictError:
            continue  # the pipeline just took a note away
        return


async def make_mailboxes(steward: Steward, owner: str) -> None:
    s = steward.subjects
    await _consumer(steward, s.delivery_stream, f"dlv_{owner}", s.delivery(owner), 4)
    await _consumer(steward, s.direct_stream, f"dm_{owner}", s.direct_inbox(owner), 64)


async def _consumer(steward: Steward, stream: str, name: str, subject_filter: str, pending: int) -> None:
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
    await steward.js.api(f"CONSUMER.CREATE.{stream}.{name}.{subject_filter}", {"stream_name": stream, "config": config})


async def remove_mailboxes(steward: Steward, owner: str) -> None:
    s = steward.subjects
    for stream, name in ((s.delivery_stream, f"dlv_{owner}"), (s.direct_stream, f"dm_{owner}")):
        try:
            await steward.js.api(f"CONSUMER.DELETE.{stream}.{name}")
        except ApiError as error:
            if error.err_code != NO_CONSUMER:
                raise
    # Direct messages are left to `mail.py`, which tells their senders before it removes them.
    await steward.js.purge(s.delivery_stream, subject_filter=s.delivery(owner))


async def space_set(steward: Steward, request: Request) -> Answer:
    """Change settings of the space; what is not named stays."""
    async with steward.writer.lock:
        subject = steward.subjects.space_record
        if (done := steward.writer.operations.outcome(ADMIN, request.op, subject)) is not None:
            return {"seq": done.seq, "space": steward.space_settings()}
        seq = await steward.writer.write(subject, changed_space(steward.table.space_at(steward.position), request))
    return {"seq": seq, "space": steward.space_settings()}


def changed_space(before: Space, request: Request) -> Space:
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


async def rotate_key(steward: Steward, request: Request) -> Answer:
    """The old key signs a record that names the new one; from the next record on the new one rules."""
    async with steward.writer.lock:
        seq = await steward.signing_key.rotate(request.op)
    return {"seq": seq, "steward_key": steward.table.steward_key}


async def table(steward: Steward, request: Request) -> Answer:
    """The table as of a sequence, a page of owners at a time."""
    seq = request.optional("seq", int)
    offset = request.optional("offset", int) or 0
    view = steward.table.as_of(steward.position if seq is None else min(seq, steward.position))
    fields = msgspec.to_builtins(view)
    owners = sorted(set(view.members) | set(view.access))
    page = _fitting(view, owners[offset : offset + PAGE])
    fields["members"] = {owner: view.members[owner] for owner in page if owner in view.members}
    fields["access"] = {owner: fields["access"][owner] for owner in page if owner in view.access}
    following = offset + len(page)
    return {"table": fields, "next": following if following < len(owners) else None, "owners": len(owners)}


def _fitting(view: TableView, owners: list[str]) -> list[str]:
    """As many of the owners as fit a page, at least one: their rows may be long."""
    used = 0
    for number, owner in enumerate(owners):
        used += len(msgspec.json.encode((view.members.get(owner), view.access.get(owner))))
        if number and used > PAGE_BYTES:
            return owners[:number]
    return owners


async def issued(steward: Steward, request: Request) -> Answer:
    """Which operation is in force for each of the ids asked for: how an interrupted add is found."""
    found: dict[str, Any] = {}
    for owner in request.texts("ids"):
        access = steward.table.access_at(check_agent_id(owner), steward.position)
        if access is not None:
            op, seq = steward.writer.last_op[steward.subjects.access(owner)]
            found[owner] = {"op": op, "seq": seq, "revoked": access.revoked, "name": access.name}
    return {"found": found}


async def acknowledge(steward: Steward, request: Request) -> Answer:
    """The owner has seen that the log went backwards, and what came of it; health stops saying so."""
    del request
    steward.doubts.clear()
    recalled = recall.acknowledge(steward.home, steward.info.id)
    return {"acknowledged": steward.marks.acknowledge() + steward.store.acknowledge() + recalled}


ADMIN_HANDLERS: dict[tuple[str, str], Handler] = {
    ("admin", "grant"): grant,
    ("admin", "revoke"): revoke,
    ("admin", "space_set"): space_set,
    ("admin", "rotate_key"): rotate_key,
    ("admin", "table"): table,
    ("admin", "issued"): issued,
    ("admin", "unread"): unread,
    ("admin", "acknowledge"): acknowledge,
}
