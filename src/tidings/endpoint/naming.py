"""Who a verified id is: the name and roles of its access record, never what a message says of itself.

An id keeps its name for as long as it exists (a rotation makes another id), so the record in force at a message's
sequence and the one known here name the same agent. Names come from the roster, which keeps those who left it in mind,
and from the steward for ids that are not in it: agents that are revoked, or were added a moment ago. Whoever cannot be
named now is shown as the beginning of an id, with a character in it that no name has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from tidings.broker.aio import end_tasks
from tidings.endpoint.roster import Roster
from tidings.endpoint.supervision import Supervision
from tidings.errors import TidingsError
from tidings.wire.message import Mention, Message, Sender

#: how long a message waits for the name of its sender, and how long nobody is asked again for one that did not come
PATIENCE = 2.0
ASK_AGAIN = 5.0
#: ids in one question, and names kept of agents that are not in the roster
AT_ONCE = 64
KEPT = 4_096
SHOWN_OF_ID = 10

Named = tuple[str, tuple[str, ...]]


def short_id(agent_id: str) -> str:
    """An id for people; the last character is in no name, so nobody can be called so."""
    return f"{agent_id[:SHOWN_OF_ID]}…"


class Names:
    """Names of ids, as the access records have them."""

    def __init__(self, link: Supervision, roster: Roster) -> None:
        self.link = link
        self.roster = roster
        self._others: dict[str, Named] = {}
        self._unknown: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    def of(self, agent_id: str) -> Named | None:
        row = self.roster.get(agent_id)
        if row is not None:
            return row.name, row.roles
        if agent_id == self.link.identity.id:
            return self.link.identity.name, ()
        return self.roster.left.get(agent_id) or self._others.get(agent_id)

    def is_known(self, message: Message) -> bool:
        return all(self.of(each) is not None for each in _ids(message))

    def sender(self, claimed: Sender) -> Sender:
        """The sender under the name of its record; a role only if the record has it."""
        named = self.of(claimed.id)
        if named is None:
            return Sender(claimed.id, short_id(claimed.id))
        return Sender(claimed.id, named[0], claimed.role if claimed.role in named[1] else None)

    def mention(self, claimed: Mention) -> Mention:
        named = self.of(claimed.id)
        return Mention(claimed.id, named[0] if named else short_id(claimed.id))

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
        found: dict[str, Any] = {}
        try:
            async with asyncio.timeout(PATIENCE):
                found = (await self.link.call("roster", "names", ids=ids, timeout=PATIENCE))["names"]
        except (TidingsError, TimeoutError):
            pass
        finally:
            for each in ids:
                self._asking.pop(each, None)
                if each in found:
                    self._others[each] = str(found[each]["name"]), tuple(found[each]["roles"])
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
