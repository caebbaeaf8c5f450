"""Sending, in two steps: a message is prepared without a connection, and published with one.

    prepared = prepare_chat(identity, "general", message)      # resolved, sealed, signed: bytes that never change
    stored = await publisher.publish(prepared)                 # now, later, again, by any process of this agent

Preparing again gives other bytes of a sealed message; publishing again gives the same ones. Within the broker's
duplicate window (10 minutes) that stores a message once. Whoever publishes again later, after an attempt whose outcome
is not known, asks `find` first. An acknowledgement that says `duplicate` is believed only if the record is ours. If
somebody else used the id, the broker's deduplication gets another word, made of the signature: nobody else can know it
before it is used, and every later attempt uses the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TypeVar

from msgspec.structs import replace

from tidings.admin.identity import Identity
from tidings.client.connection import AgentConnection
from tidings.client.remote_changes import AccessWatch
from tidings.contract.agents import HealthRequest
from tidings.contract.channels import ConfirmRequest
from tidings.contract.core import Request
from tidings.contract.mail import FindMessageRequest, FindMessagesRequest, MailboxRoomRequest
from tidings.contract.tasks import TaskRoomRequest
from tidings.errors import (
    BrokerUnreachable,
    ConflictError,
    ConnectionLost,
    DeniedError,
    IdBurned,
    LogFull,
    MailboxFull,
    OutcomeUnknown,
    QueueFull,
    Reconnecting,
    StewardUnreachable,
    TidingsError,
    TooLarge,
    UnreachableError,
    UsageError,
    WireError,
)
from tidings.nats.client import Connection
from tidings.nats.errors import ApiError, NatsError, NoResponders, NotConnected, Refusal
from tidings.nats.jetstream import publish
from tidings.util.backoff import Backoff
from tidings.wire import message as wire
from tidings.wire import signing
from tidings.wire.message import ExtensionPart, Message
from tidings.wire.names import check_role_address, role_parts
from tidings.wire.seal import TASK_PART, is_sealed, is_sealed_task, open_sealed, open_task, seal_message, seal_task

A = TypeVar("A")
Kind = Literal["chat", "dm", "task"]
#: what the steward's services call the stream of each kind
STREAMS: dict[Kind, Literal["log", "dm", "task"]] = {"chat": "log", "dm": "dm", "task": "task"}
#: seconds; see `model/task_rules`. A task for another space that names none has the second
LONGEST_DEADLINE, DEADLINE_ELSEWHERE = 30 * 86_400, 7 * 86_400
#: before a connection that went is looked for again
RECONNECT_PAUSE = 0.05
#: between two tries of a message that nobody took: the broker starts, or the replicas of a stream choose a leader
NOBODY = Backoff(0.05, 0.5)
#: seconds for the steward to say why; it may wait for the same leader, and the message is not to wait for it
WHY_PATIENCE = 2.0
#: between two questions to a steward that is asked too much
BUSY_PAUSE = 0.2
BUSY_TRIES = 25
MSG_ID = "Nats-Msg-Id"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A message as it will be stored, wherever and whenever it is published."""

    kind: Kind
    subject: str
    #: the channel, the agent's id or the role it is addressed to
    destination: str
    payload: bytes
    signature: str
    id: str


@dataclass(frozen=True, slots=True)
class Stored:
    """Where the broker keeps a message."""

    seq: int
    #: it was there already: an earlier attempt had come through
    duplicate: bool
    #: the broker process that said so
    incarnation: str


# --- preparing ---


def prepare_chat(identity: Identity, channel: str, message: Message) -> Prepared:
    """A message to a channel."""
    return _prepared(identity, "chat", channel, message)


def prepare_direct(identity: Identity, target: str, message: Message, *, sealed: bool = True) -> Prepared:
    """A message to one agent, by its id; sealed unless told otherwise."""
    return _prepared(identity, "dm", target, seal_message(identity.key, target, message) if sealed else message)


def prepare_task(identity: Identity, role: str, message: Message, readers: Iterable[str] = ()) -> Prepared:
    """A task for a role. Its terms are a part of the message: see `task_terms`. One for a role of a linked space is
    sealed, for `readers`."""
    elsewhere = role_parts(check_role_address(role))[1]
    return _prepared(identity, "task", role, seal_task(identity.key, readers, message) if elsewhere else message)


def task_terms(deadline: float | None, *, elsewhere: bool = False) -> tuple[ExtensionPart, ...]:
    """What the steward has to know of a task, as a part of the signed message. It counts from when it is stored. One
    for another space (`elsewhere`) has an end in any case: it takes a place there until then."""
    if deadline is None and elsewhere:
        deadline = DEADLINE_ELSEWHERE
    if deadline is None:
        return ()
    if not 0 < deadline <= LONGEST_DEADLINE:
        raise UsageError("the deadline of a task is up to 30 days from now, in seconds")
    return (ExtensionPart(TASK_PART, {"kind": TASK_PART, "deadline_s": deadline}),)


def _prepared(identity: Identity, kind: Kind, destination: str, message: Message) -> Prepared:
    if message.sender.id != identity.id:
        raise UsageError(f"message {message.id} is from {message.sender.id}: {identity.name} cannot sign it")
    if kind == "chat":
        subject = identity.subjects.chat(identity.id, destination)
    elif kind == "dm":
        subject = identity.subjects.direct(destination, identity.id)
    else:
        subject = identity.subjects.task(destination, identity.id)
    payload = message.raw or wire.encode(message)
    signature = signing.sign(identity.key, identity.space_id, kind, destination, payload)
    return Prepared(kind, subject, destination, payload, signature, message.id)


def is_same_message(identity: Identity, prepared: Prepared, stored: bytes) -> bool:
    """Is what this agent stored under that subject this message? Sealed or composed again it has other bytes.

    IdBurned if it is another one under the same id: readers would surface only one of the two.
    """
    if stored == prepared.payload:
        return True
    try:
        was, now = (_inside(identity, prepared, payload) for payload in (stored, prepared.payload))
    except WireError:
        return False
    if was.id == now.id and wire.document(was) | {"ts": ""} != wire.document(now) | {"ts": ""}:
        raise IdBurned(f"you already sent another message under the id {now.id}: choose a new one")
    return was.id == now.id


def _inside(identity: Identity, prepared: Prepared, payload: bytes) -> Message:
    message = wire.decode(payload)
    if prepared.kind == "task" and is_sealed_task(message):
        return open_task(identity.key, identity.id, message)
    if prepared.kind != "dm" or not is_sealed(message):
        return message
    return open_sealed(identity.key, identity.id, message, target_id=prepared.destination)


# --- publishing ---


class Publisher:
    """What an endpoint publishes goes through here."""

    def __init__(self, connection: AgentConnection, access: AccessWatch) -> None:
        self.connection = connection
        self._access = access
        self._making_room: dict[Kind, asyncio.Lock] = {"dm": asyncio.Lock(), "task": asyncio.Lock()}

    async def publish(self, prepared: Prepared, timeout: float = 5.0, only: str | None = None) -> Stored:
        """Store it; the answer says where. Safe to repeat with the same `prepared` (see above for how long).

        `only`: the broker process that may have it. Then nothing is waited for: UnreachableError if it is gone.
        """
        used = self.connection.token_used
        try:
            return await self._stored(prepared, timeout, only)
        except (MailboxFull, QueueFull):
            return await self._stored_after_making_room(prepared, timeout, only)
        except DeniedError:  # unless access was widened since we connected
            if prepared.kind != "chat" or not await self._access.renewed_since(used):
                raise
        return await self._stored(prepared, timeout, only)

    async def is_stored(self, prepared: Prepared, seq: int) -> bool:
        """Is the record at that sequence this message?"""
        found = await self.connection.call(ConfirmRequest(seq, STREAMS[prepared.kind]))
        if found.payload is None or found.subject != prepared.subject:
            return False
        return is_same_message(self.connection.identity, prepared, found.payload)

    async def find(self, prepared: Prepared, since: float | None = None) -> int | None:
        """Where a message of this id is or was stored, by the records of its subject; None if it is not there.

        `since`: seconds since 1970 of the first attempt; unless said, the time in the id.
        """
        first = None if since is None else datetime.fromtimestamp(since, UTC)
        request = FindMessageRequest(prepared.id, prepared.kind, prepared.destination, since=first)
        while True:
            found = await self._ask_when_free(request)
            if found.state == "gone" or (found.seq is not None and await self.is_stored(prepared, found.seq)):
                return found.seq
            if found.next is None:
                return None
            request = replace(request, after=found.next)

    async def which(self, kind: Kind, destination: str, ids: Sequence[str], since: float) -> set[str]:
        """Those of these ids (at most 1,000) that may be stored there since then: `find` says it of each of them."""
        request = FindMessagesRequest(tuple(ids), kind, destination, since=datetime.fromtimestamp(since, UTC))
        found: set[str] = set()
        while True:
            answer = await self._ask_when_free(request)
            found.update(answer.found)
            if answer.next is None:
                return found
            request = replace(request, after=answer.next)

    async def _ask_when_free(self, request: Request[A]) -> A:
        for _ in range(BUSY_TRIES):
            try:
                return await self.connection.call(request, timeout=10.0)
            except ConflictError:
                await asyncio.sleep(BUSY_PAUSE)
        return await self.connection.call(request, timeout=10.0)

    async def _stored_after_making_room(self, prepared: Prepared, timeout: float, only: str | None) -> Stored:
        """A place may be full of what is settled and would have gone a little later: one of us asks, others look."""
        async with self._making_room[prepared.kind]:
            try:
                return await self._stored(prepared, timeout, only)
            except MailboxFull:
                await self.connection.call(MailboxRoomRequest(prepared.destination), timeout=timeout)
            except QueueFull:
                await self.connection.call(TaskRoomRequest(prepared.destination), timeout=timeout)
            return await self._stored(prepared, timeout, only)

    async def _stored(self, prepared: Prepared, timeout: float, only: str | None) -> Stored:
        """`duplicate` is success only if the record there is ours."""
        stored = await self._confirmed(prepared, prepared.id, timeout, only)
        if not stored.duplicate or await self._is_there(prepared, stored.seq, timeout, only):
            return stored
        # Somebody burnt this id. The message keeps it; only the broker's deduplication gets another word.
        word = hashlib.blake2b(prepared.signature.encode(), digest_size=16).hexdigest()
        stored = await self._confirmed(prepared, f"{prepared.id}.{word}", timeout, only)
        if stored.duplicate and not await self._is_there(prepared, stored.seq, timeout, only):
            raise IdBurned(f"message {prepared.id} could not be stored: its id was used by somebody else, twice")
        return stored

    async def _is_there(self, prepared: Prepared, seq: int, timeout: float, only: str | None) -> bool:
        """As `is_stored`. Waits for a connection or a steward that is away, as storing the message does."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout
        while True:
            try:
                return await self.is_stored(prepared, seq)
            except UnreachableError as error:
                if only is not None:
                    raise
                if clock() >= deadline:
                    raise _in_doubt(prepared.id, error) from error
                await asyncio.sleep(RECONNECT_PAUSE)

    async def _confirmed(self, prepared: Prepared, msg_id: str, timeout: float, only: str | None) -> Stored:
        subject = prepared.subject
        headers = {signing.SIGNATURE_HEADER: prepared.signature, MSG_ID: msg_id}
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout
        doubtful, attempts = False, 0
        while True:
            left = deadline - clock()
            try:
                connection = await self.connection.ready(left) if only is None else self._only(only)
            except UnreachableError as error:
                if doubtful:
                    raise _in_doubt(prepared.id, error) from error
                raise
            incarnation = self.connection.incarnation_of(connection)
            run = None if only is None or connection.is_clustered else connection.incarnation
            try:
                ack = await publish(connection, subject, prepared.payload, headers, timeout=left, only=run)
                return Stored(ack.seq, ack.duplicate, incarnation)
            except ApiError as error:
                refusal = _refusal(prepared, error)
                if doubtful and isinstance(refusal, UnreachableError):
                    raise _in_doubt(prepared.id, refusal) from error
                raise refusal from error
            except NoResponders as error:
                attempts += 1
                reason = await self._why_not_again(left, NOBODY.delay(attempts, random.random()), only)
                if reason is not None and doubtful:
                    raise _in_doubt(prepared.id, reason) from error
                if reason is not None:
                    raise reason from error
            except DeniedError as error:
                raise await self._access.explained(error, subject) from error
            except TimeoutError as error:
                raise _in_doubt(prepared.id, f"no answer within {timeout:.0f} s") from error
            except (ConnectionLost, NatsError) as error:
                if only is not None:
                    raise ConnectionLost(f"the connection went: {msg_id} may be stored or not") from error
                # It may have been stored. Under the same id the broker stores it once.
                doubtful = doubtful or not isinstance(error, NotConnected)
                await asyncio.sleep(0)

    def _only(self, incarnation: str) -> Connection:
        """The connection to this broker process: another one is not waited for."""
        connection = self.connection.current
        if self.connection.incarnation_of(connection) != incarnation:
            raise Reconnecting("another run of the broker answers now: ask again")
        return connection

    async def _why_not_again(self, left: float, pause: float, only: str | None) -> TidingsError | None:
        """Nobody took it. Nothing was stored, so trying again is safe, and the replicas of a stream soon have another
        leader: answers None after a pause, or why that is no use."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + left
        reason = await self._why_nobody_takes_it()
        if reason is not None and (only is not None or not isinstance(reason, UnreachableError)):
            return reason
        if clock() + pause > deadline:
            return reason or StewardUnreachable("nobody takes this message: the broker is starting")
        await asyncio.sleep(pause)
        return None

    async def _why_nobody_takes_it(self) -> TidingsError | None:
        """No responders: the gate is closed, or nothing is there; None if neither holds any more."""
        try:
            health = await self.connection.call(HealthRequest(), timeout=WHY_PATIENCE)
        except BrokerUnreachable as error:  # the steward answers, and meets the same
            return BrokerUnreachable(f"nobody takes this message: {error}")
        except TidingsError as error:
            return StewardUnreachable(f"nobody takes this message, and the steward cannot say why ({error})")
        gate = health.gate
        if gate is not None and not gate.open:
            full = "the disk of this space" if gate.closed_by == "disk" else "the log of this space"
            return LogFull(f"{full} is full: nothing new is taken until room is made")
        return None


def _in_doubt(message_id: str, reason: object) -> OutcomeUnknown:
    """An earlier attempt may have been stored: a caller that hears "unreachable" would send it under another id."""
    return OutcomeUnknown(f"no confirmation of message {message_id}: send it again under the same id ({reason})")


def _refusal(prepared: Prepared, error: ApiError) -> TidingsError:
    to, words = prepared.destination, error.description
    match error.refusal, prepared.kind:
        case ((Refusal.BUSY | Refusal.UNAVAILABLE), _):
            return BrokerUnreachable(f"the broker is too busy to store {prepared.id}: {words}")
        case Refusal.TOO_LARGE, _:
            return TooLarge(f"the broker refuses this message: {words}")
        case Refusal.SUBJECT_FULL, "dm":
            return MailboxFull(f"the mailbox of {to} is full from you: 1,000 messages of yours wait there to be read")
        case Refusal.SUBJECT_FULL, "task":
            return QueueFull(
                f"the queue of {to} is full from you: 1,000 tasks of yours wait there to be finished; "
                "wait for their results before you ask for more"
            )
        case ((Refusal.SUBJECT_FULL | Refusal.STREAM_FULL), _):
            return LogFull(f"the broker has no room for this message: {words}")
    return DeniedError(f"the broker refuses {prepared.subject}: {words} ({error.err_code})")
