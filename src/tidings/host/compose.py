"""From what a program asks to have sent to bytes that can leave at any time: resolved, sealed and signed, offline.

    check_request(request)                                      # what a declaration cannot say, in sentences
    composed = compose_request(request, identity, directory)    # names by the roster as last seen

A name that the directory does not know is refused, never kept for later: nobody could say who was meant. A direct
message is always sealed, and there is no default destination. Nothing here opens a connection or writes a row.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tidings.admin.identity import Identity
from tidings.client.directory import address_task, check_takes_mail, each_once, resolve_among, speaking_as
from tidings.client.publishing import Prepared, prepare_chat, prepare_direct, prepare_task, task_terms
from tidings.contract.host import SendRequest
from tidings.errors import UnknownPeer, UsageError
from tidings.host.directory import Seen
from tidings.host.fingerprint import Kind, fingerprint_of
from tidings.host.outbox_views import OutboxRow
from tidings.wire import message as wire
from tidings.wire.message import (
    MAX_PARTS,
    ArtifactPart,
    DataPart,
    Draft,
    Mention,
    Message,
    Part,
    Sender,
    TextPart,
    is_message_id,
)
from tidings.wire.names import MAX_TOKEN, check_channel, is_agent_id, role_parts, split_role
from tidings.wire.roster import AgentEntry
from tidings.wire.seal import is_sealed, is_sealed_task, open_sealed, open_task, readers_of

#: seconds a message waits to leave before it is given up
DEFAULT_MAX_AGE = 7 * 86_400.0
MAX_CONTEXT = 256
#: of who is written to: an id, a name, or `name@space`
LONGEST_PEER = 2 * MAX_TOKEN + 1
#: kinds of parts that mean something to Tidings itself
OWN_KINDS = "dev.tidings."
_FIELDS: dict[str, frozenset[str]] = {
    str(kind.kind): frozenset({"kind", *kind.__struct_fields__}) for kind in (TextPart, DataPart, ArtifactPart)
}


@dataclass(frozen=True, slots=True)
class Composed:
    """A message that can leave, and what a person would call it."""

    prepared: Prepared
    #: before it was sealed: what its fingerprint is made of
    message: Message
    #: channel, name of the agent (its id if nobody knows the name), or role
    shown: str
    max_age: float
    warnings: tuple[str, ...] = ()


def compose_request(request: SendRequest, identity: Identity, directory: Seen, *, role: str | None = None) -> Composed:
    """The request as a message of this agent, with what the directory knows. `role`: the one it wants to speak in."""
    check_request(request)
    agents = list(directory.agents())
    row = next((agent for agent in agents if agent.id == identity.id), None)
    unheard = directory.unheard
    message = _message(request, speaking_as(identity, row.roles if row else (), role), agents, unheard)
    max_age = age_limit(request)
    if request.channel is not None:
        return Composed(prepare_chat(identity, request.channel, message), message, request.channel, max_age)
    if request.agent is not None:
        target, shown = _target(agents, request.agent, unheard)
        _check_reader(agents, target)
        return Composed(prepare_direct(identity, target, message), message, shown, max_age)
    assert request.role is not None
    where = address_task(agents, request.role, unheard)
    warnings = () if where.readers else _nobody(agents, request.role)
    prepared = prepare_task(identity, where.role, message, where.readers)
    return Composed(prepared, message, request.role, max_age, warnings)


def age_limit(request: SendRequest) -> float:
    """Seconds. A task that leaves after its deadline would begin it anew."""
    longest = request.max_age or DEFAULT_MAX_AGE
    return min(longest, request.deadline or longest)


def fingerprint_again(
    request: SendRequest, sender: Sender, row: OutboxRow, directory: Seen, kept: Message | None
) -> bytes:
    """The fingerprint of a request that cannot be composed now; it is that of the row if the row was made by it.

    Who was mentioned and is gone is known from the message (`kept`, if it can be read). Of a destination only the id is
    kept: if that agent is gone, a name that nobody has now is taken to be its.
    """
    agents = list(directory.agents())
    gone = [AgentEntry(id=each.id, name=each.name) for each in (kept.mentions if kept else ())]
    if request.agent is not None and agents:
        gone.append(AgentEntry(id=row.destination, name=request.agent))
    here = {agent.id for agent in agents}
    agents += [agent for agent in gone if agent.id not in here]
    message = _message(request, sender, agents, directory.unheard)
    kind, destination = _destination(request, agents, row, directory.unheard)
    return fingerprint_of(row.space, kind, destination, message, in_ms(age_limit(request)))


def _destination(
    request: SendRequest, agents: list[AgentEntry], row: OutboxRow, unheard: Mapping[str, str]
) -> tuple[Kind, str]:
    if request.channel is not None:
        return "chat", request.channel
    if request.agent is not None:
        return "dm", _target(agents, request.agent, unheard)[0]
    assert request.role is not None
    role, space = split_role(request.role)
    # what its space is called here may be known no more: the row has its id
    return "task", row.destination if space and role_parts(row.destination)[0] == role else request.role


def in_ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _message(request: SendRequest, sender: Sender, agents: list[AgentEntry], unheard: Mapping[str, str]) -> Message:
    draft = Draft(
        request.text,
        request.data,
        _parts(request),
        request.mentions,
        request.priority,
        request.reply_to,
        request.context,
        request.id,
    )
    terms = task_terms(request.deadline, elsewhere="@" in (request.role or ""))
    return draft.check().compose(sender, _mentions(agents, request.mentions, unheard), terms)


def compose_again(identity: Identity, kind: str, destination: str, payload: bytes) -> Prepared:
    """The same message of this agent under a new id, sealed and signed anew."""
    message = wire.decode(payload)
    readers: tuple[str, ...] = ()
    if kind == "dm" and is_sealed(message):
        message = open_sealed(identity.key, identity.id, message, target_id=destination)
    elif kind == "task" and is_sealed_task(message):
        readers = readers_of(message)
        message = open_task(identity.key, identity.id, message)
    fresh = wire.compose(
        message.sender,
        parts=message.parts,
        mentions=message.mentions,
        priority=message.priority,
        reply_to=message.reply_to,
        context=message.context,
    )
    if kind == "dm":
        return prepare_direct(identity, destination, fresh)
    if kind == "task":
        return prepare_task(identity, destination, fresh, readers)
    return prepare_chat(identity, destination, fresh)


# --- who ---


def _target(agents: list[AgentEntry], text: str, unheard: Mapping[str, str]) -> tuple[str, str]:
    """Id and name of an agent. An id needs no directory: it is the key the message is sealed for."""
    if is_agent_id(text):
        return text, next((agent.name for agent in agents if agent.id == text), text)
    agent = _resolved(agents, text, unheard)
    return agent.id, agent.name


def _check_reader(agents: list[AgentEntry], target: str) -> None:
    """Whoever is known to take no mail is not written to; DeniedError says why. An id that nobody knows may take it."""
    for agent in agents:
        if agent.id == target:
            check_takes_mail(agent)


def _mentions(agents: list[AgentEntry], named: Iterable[str], unheard: Mapping[str, str]) -> list[Mention]:
    found = [_resolved(agents, text, unheard) for text in named]
    return each_once(Mention(agent.id, agent.own_name) for agent in found)


def _resolved(agents: list[AgentEntry], text: str, unheard: Mapping[str, str]) -> AgentEntry:
    if not agents:
        raise UnknownPeer(
            f"no agent {text[:64]!r} is known here: the agents of this space were never seen from this host; "
            "wait until it has reached the space once, or give the id"
        )
    return resolve_among(agents, text, unheard)


def _nobody(agents: list[AgentEntry], role: str) -> tuple[str, ...]:
    here = [agent for agent in agents if not agent.elsewhere]
    if any(role in agent.roles for agent in here):
        return ()
    held = {each for agent in here for each in agent.roles}
    near = difflib.get_close_matches(role, sorted(held), n=2)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return (f"nobody holds the role {role}: the task waits until somebody does{hint}",)


# --- what ---


def _parts(request: SendRequest) -> tuple[Part, ...]:
    for number, part in enumerate(request.parts, 1):
        kind = part.get("kind")
        if isinstance(kind, str) and kind.startswith(OWN_KINDS):
            raise UsageError(f"part {number} has the kind {kind!r}: kinds of {OWN_KINDS[:-1]} are made by Tidings only")
        unknown = part.keys() - _FIELDS[str(kind)] if kind in _FIELDS else ()
        if unknown:
            raise UsageError(f"part {number}, of kind {kind}, has no field {', '.join(sorted(unknown))}")
    return wire.read_parts(request.parts)


def check_request(request: SendRequest) -> None:
    """Raises UsageError for what is wrong whoever asks."""
    _check_destination(request)
    given = (request.text is not None) + (request.data is not None) + len(request.parts)
    if not given:
        raise UsageError("a message needs `text`, `data` or `parts`")
    if given + (request.deadline is not None) > MAX_PARTS:
        raise UsageError(f"a message has at most {MAX_PARTS} parts, this one has {given}: text and data are parts too")
    for name, value in (("id", request.id), ("reply_to", request.reply_to)):
        if value is not None and not is_message_id(value):
            raise UsageError(f"`{name}` {value[:64]!r} is not a message id: a UUIDv7 in lower case")
    context = request.context
    if context is not None and (not 0 < len(context) <= MAX_CONTEXT or any(c < " " or c == "\x7f" for c in context)):
        raise UsageError(f"`context` is 1 to {MAX_CONTEXT} characters without control characters")


def _check_destination(request: SendRequest) -> None:
    named = [name for name in ("channel", "agent", "role") if getattr(request, name) is not None]
    if len(named) != 1:
        said = f"this names {' and '.join(named)}" if named else "this names none"
        raise UsageError(f"a message goes to exactly one of `channel`, `agent` or `role`: {said}")
    if request.channel is not None:
        check_channel(request.channel)
    if request.role is not None:
        split_role(request.role)
    if request.agent is not None and not 0 < len(request.agent) <= LONGEST_PEER:
        raise UsageError("`agent` is the id or the name of an agent")
    if request.deadline is not None:
        if request.role is None:
            raise UsageError("`deadline` is for tasks: a message to a role")
        task_terms(request.deadline)
