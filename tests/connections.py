"""How many connections were ever made to the broker of a space, told by itself: who goes around the host is counted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tidings.nats import jwt
from tidings.nats.client import connect
from tidings.server.keyring import Keyring
from tidings_testing.real_space import RealSpace

Count = Callable[[], Awaitable[int]]


@asynccontextmanager
async def connections_to(space: RealSpace) -> AsyncIterator[Count]:
    keyring = Keyring.load(space.home.keys)
    token, key = keyring.short_lived(keyring.system, "test")
    connection = await connect(space.info.url, jwt.credentials(token, key), key.id, name="test system", reconnect=False)

    async def count() -> int:
        reply = await connection.request("$SYS.REQ.SERVER.PING.VARZ", b"", timeout=5)
        return int(json.loads(reply.data)["data"]["total_connections"])

    try:
        yield count
    finally:
        await connection.close()
