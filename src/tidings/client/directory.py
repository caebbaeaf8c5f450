"""Who a verified id is: the name and roles of its access record, never what a message says of itself.

An id keeps its name for as long as it exists (a rotation makes another id), so the record in force at a message's
sequence and the one known here name the same agent. Names come from the roster, which keeps those who left it in mind,
and from the steward for ids that are not in it: agents that are revoked, or were added a moment ago. Whoever cannot be
named now is shown as the beginning of an id, with a character in it that no name has.

Who said something in another space has no access record here, and is nobody of this space, whatever its key and its
name are: it is shown as `name@space`, by the name its space tells, or else the one it signed. Nobody is asked for it.

The other way, who is meant by a name: an exact id or name wins; a name in another case counts if only one agent has it;
a near miss is suggested, never taken.
"""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from tidings.admin.identity import Identity
from tidings.client.connection import AgentConnection
from tidings.client.incoming import Incoming
from tidings.contract.agents import MOST_NAMES, NameRow, NamesRequest
from tidings.errors import AmbiguousPeer, DeniedError, PeerUnheard, TidingsError, UnknownPeer
from tidings.util.task_ends import end_tasks
from tidings.wire.message import Mention, Message, Sender
from tidings.wire.names import foreign_name, role_elsewhere, short_id, shown_space, split_role
from tidings.wire.roster import AgentEntry

#: how long a message waits for the name of its sender, and how long nobody is asked again for one that did not come
PATIENCE = 2.0
ASK_AGAIN = 5.0
#: ids in one question, and names kept of agents that are not in the roster
AT_ONCE = MOST_NAMES
KEPT = 4_096

Named = tuple[str, tuple[str, ...]]


# --- who is meant by a name: rules over whatever list of agents is at hand ---


def resolve_among(
    agents: Iterable[AgentEntry], text: str, unheard: Mapping[str, str] = MappingProxyType({})
) -> AgentEntry:
    """Who is meant: an id, a name, or a name in another case if only one agent has it. `unheard`: linked spaces of
    whose agents nobody is told now; who is not known there is PeerUnheard, and not nobody."""
    known = list(agents)
    exact = [agent for agent in known if agent.id == text] or [agent for agent in known if agent.name == text]
    if exact:
        return exact[0]
    alike = [agent for agent in known if agent.name.casefold() == text.casefold()]
    if len(alike) > 1:
        raise AmbiguousPeer(f"{text!r} could be {', '.join(sorted(a.name for a in alike))}: say which")
    if alike:
        return alike[0]
    if "@" in text:
        if (late := unheard_peer(text, unheard)) is not None:
            raise late
        raise UnknownPeer(f"no agent {text[:132]!r} is known here{_linked_words(known, text)}")
    near = difflib.get_close_matches(text, [agent.name for agent in known], n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `who` lists the agents of this space"
    raise UnknownPeer(f"no agent {text[:64]!r} in this space{hint}")


def unheard_peer(text: str, unheard: Mapping[str, str]) -> PeerUnheard | None:
    """Why an agent of a linked space is not known now, though it may be there."""
    space = text.rpartition("@")[2] if "@" in text else ""
    if space not in unheard:
        return None
    if unheard[space] == "paused":
        return PeerUnheard(
            f"{text[:132]} is not known now: the link with {space} is paused, or {space} tells nobody who is there. "
            f"`tidings link resume {space}` ends a pause; ask again then"
        )
    return PeerUnheard(
        f"{text[:132]} is not known yet: it was not told yet who is in {space}, as for seconds after a start. Ask again"
    )


def _linked_words(known: list[AgentEntry], text: str) -> str:
    """Which agents of other spaces can be named, for whoever named one that cannot."""
    spaces = sorted({agent.elsewhere for agent in known if agent.elsewhere})
    wanted = text.rpartition("@")[2]
    if wanted in spaces:
        near = difflib.get_close_matches(text, [agent.name for agent in known if agent.elsewhere == wanted], n=3)
        return f"; did you mean {' or '.join(near)}?" if near else f": {wanted} has told of no such agent; see `who`"
    if spaces:
        verb = "is linked and tells" if len(spaces) == 1 else "are linked and tell"
        return f": {', '.join(spaces)} {verb} who is there, {wanted[:64] or 'that'} does not now"
    return ": no linked space tells who is there; `tidings link set NAME --roster` on both sides agrees on it"


def check_takes_mail(agent: AgentEntry) -> AgentEntry:
    """Of an agent of a linked space it is agreed whether direct messages go there."""
    if not agent.direct:
        raise DeniedError(
            f"{agent.name} cannot be written to: the link with {agent.elsewhere} passes no direct messages now; both "
            "operators switch them on with `tidings link set NAME --direct`"
        )
    return agent


class TaskAddress(NamedTuple):
    """Where a task goes: a role of this space, or of a linked one, where it is sealed for those who hold it."""

    role: str
    readers: tuple[str, ...] = ()


def address_task(
    agents: Iterable[AgentEntry], text: str, unheard: Mapping[str, str] = MappingProxyType({})
) -> TaskAddress:
    """Who is asked by `reviewer`, or by `reviewer@acme`; UnknownPeer if nobody there holds that role, DeniedError if
    the link passes no tasks. `unheard` as for `resolve_among`."""
    role, space = split_role(text)
    if not space:
        return TaskAddress(role)
    known = list(agents)
    there = [agent for agent in known if agent.elsewhere == space]
    if not there and (late := unheard_peer(text, unheard)) is not None:
        raise late
    if not there:
        raise UnknownPeer(f"no role of {space} can be asked{_linked_words(known, text)}")
    if not any(agent.tasks for agent in there):
        raise DeniedError(
            f"{text} cannot be asked: the link with {space} passes no tasks; both operators agree on it with "
            "`tidings link set NAME --tasks`"
        )
    holders = [agent for agent in there if role in agent.roles]
    if not holders:
        held = sorted({each for agent in there for each in agent.roles})
        near = difflib.get_close_matches(role, held, n=2) or held[:5]
        hint = f"; its agents hold {', '.join(near)}" if near else ""
        raise UnknownPeer(f"nobody that {space} tells of holds the role {role}{hint}")
    return TaskAddress(role_elsewhere(role, holders[0].space), tuple(agent.id for agent in holders))


def each_once(mentions: Iterable[Mention]) -> list[Mention]:
    """The same mentions, each agent once."""
    found: dict[str, Mention] = {}
    for each in mentions:
        found.setdefault(each.id, each)
    return list(found.values())


def speaking_as(identity: Identity, roles: Iterable[str | None], wanted: str | None = None) -> Sender:
    """The sender of a message: in the role it wants if it holds that one, otherwise in the first it holds."""
    held = list(roles)
    return Sender(identity.id, identity.name, wanted if wanted in held else next(iter(held), None))


# --- who a verified id is ---


class NameDirectory:
    """Names of ids, as the access records have them."""

    def __init__(
        self,
        connection: AgentConnection,
        rows: Mapping[str, AgentEntry],
        left: Mapping[str, tuple[str, tuple[str, ...]]],
    ) -> None:
        self.connection = connection
        #: the roster as it is kept up to date, and name and roles of those who are in it no more
        self._rows, self._left = rows, left
        self._others: dict[str, Named] = {}
        self._unknown: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    def of(self, agent_id: str) -> Named | None:
        row = self._rows.get(agent_id)
        if row is not None:
            return row.name, row.roles
        if agent_id == self.connection.identity.id:
            return self.connection.identity.name, ()
        return self._left.get(agent_id) or self._others.get(agent_id)

    def sender(self, claimed: Sender) -> Sender:
        """The sender under the name of its record; a role only if the record has it."""
        named = self.of(claimed.id)
        if named is None:
            return Sender(claimed.id, short_id(claimed.id))
        return Sender(claimed.id, named[0], claimed.role if claimed.role in named[1] else None)

    def mention(self, claimed: Mention) -> Mention:
        named = self.of(claimed.id)
        return Mention(claimed.id, named[0] if named else short_id(claimed.id))

    def introduce(self, incoming: Incoming) -> Incoming:
        """The message under the names of access records; who is not known yet is asked for once somebody waits."""
        message = incoming.message
        if incoming.origin_id:
            return self._introduce_foreign(incoming)
        incoming.sender = self.sender(message.sender)
        incoming.claims = claim_of(incoming.sender, message)
        is_known = self.of(message.sender.id) is not None
        if message.mentions:
            incoming.mentions = tuple(map(self.mention, message.mentions))
            is_known = is_known and all(self.of(each.id) is not None for each in message.mentions)

        async def learn() -> None:
            await self.learn([message])
            if incoming._naming is not None:
                self.introduce(incoming)
                incoming._naming = None

        incoming._naming = None if is_known else learn
        return incoming

    def _introduce_foreign(self, incoming: Incoming) -> Incoming:
        said, space, space_id = incoming.message.sender, incoming.origin, incoming.origin_id
        incoming.origin = shown_space(space, space_id)
        incoming.sender = Sender(
            said.id, self._foreign_name(said, space, space_id, is_direct=incoming.kind == "direct")
        )
        incoming.mentions = tuple(map(self.mention, incoming.message.mentions))
        incoming.claims, incoming._naming = None, None
        return incoming

    def foreign_sender(self, said: Sender, space: str, space_id: str) -> Sender:
        """Who of another space asks something of us."""
        return Sender(said.id, self._foreign_name(said, space, space_id, is_direct=True))

    def _foreign_name(self, said: Sender, space: str, space_id: str, *, is_direct: bool) -> str:
        """What its space says it is called, if that is told here; else the name it signed, unless that is another's. Of
        a direct message that name counts for nothing: only who was told of by its space writes to us."""
        named = self.of(said.id)
        if named is not None and named[0].partition("@")[2] == shown_space(space, space_id):
            return named[0]
        name = foreign_name(said.name, said.id, space, space_id)
        taken = is_direct or any(each.name == name for each in self._rows.values() if each.elsewhere)
        return foreign_name("", said.id, space, space_id) if taken else name

    async def is_of_this_space(self, agent_id: str) -> bool:
        """Has it an access record here, revoked or not? Raises what asking for it raises."""
        named = self.of(agent_id)
        if named is None:
            answer = await self.connection.call(NamesRequest((agent_id,)), timeout=PATIENCE)
            if (row := answer.names.get(agent_id)) is not None:
                named = self._others[agent_id] = row.name, row.roles
        return named is not None and "@" not in named[0]

    async def learn(self, messages: Iterable[Message]) -> None:
        """Ask for the names that these messages need and nobody told yet; what is not answered in time is not known."""
        now = time.monotonic()
        wanted = {each for message in messages for each in _ids(message) if self.of(each) is None}
        fresh = sorted(each for each in wanted if now >= self._unknown.get(each, 0.0) and each not in self._asking)
        for start in range(0, len(fresh), AT_ONCE):
            chunk = fresh[start : start + AT_ONCE]
            task = asyncio.create_task(self._ask(chunk))
            self._asking.update(dict.fromkeys(chunk, task))
        under_way = {self._asking[each] for each in wanted if each in self._asking}
        if under_way:
            await asyncio.wait(under_way)

    async def _ask(self, ids: list[str]) -> None:
        found: dict[str, NameRow] = {}
        try:
            async with asyncio.timeout(PATIENCE):
                found = (await self.connection.call(NamesRequest(tuple(ids)), timeout=PATIENCE)).names
        except (TidingsError, TimeoutError):
            pass
        finally:
            for each in ids:
                self._asking.pop(each, None)
                if each in found:
                    self._others[each] = found[each].name, found[each].roles
                else:
                    self._unknown[each] = time.monotonic() + ASK_AGAIN
            for kept in (self._others, self._unknown):
                while len(kept) > KEPT:
                    del kept[next(iter(kept))]

    async def close(self) -> None:
        await end_tasks(list(self._asking.values()))


def _ids(message: Message) -> set[str]:
    return {message.sender.id, *(mention.id for mention in message.mentions)}


def claim_of(sender: Sender, message: Message) -> str | None:
    """What a message calls its sender, if that is another name than the one of the access record."""
    return message.sender.name if message.sender.name != sender.name else None
