"""Reading from the log what frames should have brought: the channels this agent is a member of, within a range.

Memberships are asked of the steward, because a process may receive for memberships it never joined itself. Under a
pattern the channels are those that were seen here or that the steward lists. What is new, whoever asked decides.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tidings.endpoint.history import History
from tidings.endpoint.records import LiveRecord
from tidings.errors import ConflictError, DeniedError, OutcomeUnknown, UnreachableError
from tidings.space.control import collect
from tidings.wire.patterns import covers, is_concrete

if TYPE_CHECKING:
    from tidings.endpoint.endpoint import Endpoint

RETRY_PAUSE = 1.0


class Recovery:
    def __init__(self, endpoint: Endpoint, history: History) -> None:
        self.endpoint = endpoint
        self.history = history

    async def read(self, after: int, through: int) -> list[LiveRecord]:
        """Every message above `after`, up to `through`. Tries for as long as nobody answers."""
        while after < through:
            try:
                found: list[LiveRecord] = []
                for channel, joined in (await self._channels()).items():
                    found += await self._of_channel(channel, max(after, joined), through)
                return sorted(found, key=lambda record: record.seq)
            except (UnreachableError, OutcomeUnknown, ConflictError):  # the last: too many pages at a time
                await asyncio.sleep(RETRY_PAUSE)
        return []

    async def _channels(self) -> dict[str, int]:
        """Each channel of a membership, with the earliest sequence from which it is owed."""
        connection = self.endpoint.connection
        held = (await connection.call("member", "list"))["memberships"]
        names = {each["pattern"] for each in held if is_concrete(each["pattern"])}
        if len(names) < len(held):
            names |= set(self.endpoint.read_state.channels)
            names |= {each["channel"] for each in await collect(connection.call, "channel", "list", "channels")}
        covering = {name: [m["joined"] for m in held if covers(m["pattern"], name)] for name in names}
        return {name: min(joins) for name, joins in covering.items() if joins}

    async def _of_channel(self, channel: str, after: int, through: int) -> list[LiveRecord]:
        if after >= through:
            return []
        try:
            return [each async for each in self.history.between(channel, after, through)]
        except DeniedError:  # narrowed meanwhile: it is owed no more
            return []
