"""Ids and receipts as models see them: what is shown can always be given back.

Of a message's id the last group is shown, of an agent's the beginning; whole ids are taken too. A whole id costs
a model some forty tokens each time it is repeated, and says nothing more. This server remembers what it showed, the
host knows what the agent was sent and sent, and the roster knows the agents. Two messages with one ending are told
apart by their whole ids; nothing is guessed.

A window, a bounded part of an inbox, has a receipt. Only when the receipt comes back are exactly the messages of that
window read; an answer that was lost on its way is simply given again. Receipts are remembered here and not on disk:
after a restart of this server an old one is unknown, and what it stood for is shown once more.
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from tidings.client.host_transport import HostAgent
from tidings.client.message_json import Json
from tidings.client.transport import Agents
from tidings.contract.host import MessageIdsRequest
from tidings.errors import UnknownMessage, UnknownPeer, UsageError
from tidings.mcp.presenting import each_string
from tidings.wire.message import is_message_id
from tidings.wire.names import is_agent_id

#: of a message, 12 hexadecimal digits: the last group of a UUID, random; of an agent, 55 bits of its public key
ENDING, BEGINNING = 12, 12
#: ids that were shown, and receipts
IDS_REMEMBERED, REMEMBERED = 4_096, 64
_ENDING = re.compile(r"[0-9a-f]{12}\Z")
_BEGINNING = re.compile(r"U[A-Z2-7]{11}\Z")


def short(whole: str) -> str:
    """An id as it is shown; what is no id stays as it is."""
    if is_message_id(whole):
        return whole[-ENDING:]
    return whole[:BEGINNING] if is_agent_id(whole) else whole


def short_in(value: Any) -> Any:
    """The same for every string in a JSON value that is an id, names of fields included."""
    return each_string(value, short)


class Ids:
    """From what a model says to the whole id, for one agent."""

    def __init__(self, agent: HostAgent) -> None:
        self._agent = agent
        self._shown: OrderedDict[str, set[str]] = OrderedDict()

    def shown(self, whole: Iterable[str | None]) -> None:
        """These messages were shown: their endings may come back."""
        for each in whole:
            if each is None or not is_message_id(each):
                continue
            self._shown.setdefault(short(each), set()).add(each)
            self._shown.move_to_end(short(each))
        while len(self._shown) > IDS_REMEMBERED:
            self._shown.popitem(last=False)

    def shown_rows(self, rows: Iterable[Json]) -> None:
        self.shown(row.get(name) for row in rows for name in ("id", "reply_to"))

    async def message(self, said: str) -> str:
        """The message meant. What is neither whole nor an ending is passed on: whoever is asked for it refuses it."""
        if not _ENDING.match(said):
            return said
        found = self._shown.get(said) or set((await self._agent.call(MessageIdsRequest(said))).ids)
        if not found:
            raise UnknownMessage(f"no message that you sent or were shown ends with {said}")
        if len(found) > 1:
            raise UsageError(f"{said} is the end of more than one id, give the whole one: {', '.join(sorted(found))}")
        return next(iter(found))

    async def message_if_any(self, said: str | None) -> str | None:
        return None if said is None else await self.message(said)

    async def agents(self, said: list[str]) -> list[str]:
        """The agents meant; names stay as they are."""
        if not any(map(_BEGINNING.match, said)):
            return said
        known = await self._agent.who()
        return [_meant(each, known) for each in said]

    async def agent(self, said: str) -> str:
        (found,) = await self.agents([said])
        return found


def _meant(said: str, known: Agents) -> str:
    """An id comes before a name: nobody is reached in another's place by being called as its id begins."""
    if not _BEGINNING.match(said):
        return said
    found = [each.id for each in known if each.id.startswith(said)]
    if len(found) > 1:
        raise UsageError(f"{said} is the beginning of more than one id, give the whole one: {', '.join(sorted(found))}")
    if found:
        return found[0]
    if any(each.name == said for each in known):  # from before such names were refused
        return said
    raise UnknownPeer(f"nobody's id begins with {said}: `who` lists the agents of this space")


#: what a message costs besides its text: sender, id, times
OVERHEAD = 200


def fitting(sizes: Sequence[int], most: int) -> int:
    """How many messages, from the first, fit into so many bytes; the first always does, cut if it must be."""
    total = 0
    for number, size in enumerate(sizes):
        total += size + OVERHEAD
        if number and total > most:
            return number
    return len(sizes)


class Receipts:
    """Which rows which receipt stands for."""

    def __init__(self) -> None:
        self._rows: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def write(self, rows: Sequence[int]) -> str:
        receipt = f"seen-{secrets.token_hex(4)}"
        self._rows[receipt] = tuple(rows)
        while len(self._rows) > REMEMBERED:
            self._rows.popitem(last=False)
        return receipt

    def rows(self, receipt: str) -> tuple[int, ...]:
        """The rows; a receipt may come back again."""
        try:
            return self._rows[receipt]
        except KeyError:
            raise UsageError(
                f"no window has the receipt {receipt[:40]!r}: this server gave none, or started anew since; "
                "what was not acknowledged is shown again"
            ) from None
