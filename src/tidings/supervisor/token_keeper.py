"""Keeps the servers of a NATS that others run told of who is revoked.

A server that was down while somebody was revoked comes back with the token it had, and would let that agent in. So the
newest tokens of the accounts of agents and of the invited, which admin processes write and sign, are pushed every
moment by a user of the system account that may do nothing else. A token that a server has changes nothing there.
"""

from __future__ import annotations

import asyncio
import logging

from tidings.admin.home import SpaceHome
from tidings.admin.pushing import note_told, push_to_all, pushed_tokens, system_user
from tidings.errors import TidingsError
from tidings.nats.client import Connection
from tidings.nats.errors import NatsError

#: seconds between two pushes; for as long a server that is back may have the older token
EVERY = 1.0
#: after it could not be pushed
AGAIN = 2.0
log = logging.getLogger(__name__)


class TokenKeeper:
    def __init__(self, home: SpaceHome) -> None:
        self._home = home
        #: ids of the server processes that have the newest token
        self.told: set[str] = set()
        self._tokens: dict[str, str] = {}

    async def keep(self) -> None:
        """Until cancelled."""
        while True:
            try:
                async with system_user(self._home, self._home.read_info()) as system:
                    while True:
                        await self._push(system)
                        await asyncio.sleep(EVERY)
            except (TidingsError, NatsError, OSError, TimeoutError) as error:
                log.warning("tokens of accounts could not be pushed: %s", error or type(error).__name__)
            await asyncio.sleep(AGAIN)

    async def _push(self, system: Connection) -> None:
        tokens = pushed_tokens(self._home)
        pushes = (push_to_all(system, account, token) for account, token in tokens.items())
        took = set.intersection(*await asyncio.gather(*pushes)) if tokens else set()
        told = {each.id for each in took}
        if tokens == self._tokens and (fresh := told - self.told) and self.told:
            log.warning("%d servers appeared and were told who is revoked", len(fresh))
        if (tokens, told) != (self._tokens, self.told):
            note_told(self._home, tokens, took)
        self._tokens, self.told = tokens, told
