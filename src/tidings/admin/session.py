"""One agent's connection to its space, for short-lived programs such as the command line.

It finds the agent's credential, connects, and hands out a `ControlClient`. In an open space an agent that does not
exist yet is provisioned by whoever may read the space's keys; that is `identity.ensure_agent`, not this module.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tidings.admin.home import SpaceHome, SpaceInfo
from tidings.errors import UsageError
from tidings.nats import jwt
from tidings.nats.client import Connection, connect
from tidings.rpc.control import ControlClient
from tidings.util.private_files import read_private
from tidings.wire.keys import KeyPair


@dataclass(frozen=True, slots=True)
class Session:
    info: SpaceInfo
    name: str
    key: KeyPair
    connection: Connection
    control: ControlClient


@asynccontextmanager
async def open_session(home: SpaceHome, name: str, *, timeout: float = 5.0) -> AsyncIterator[Session]:
    info = home.read_info()
    path = home.agent_creds(name)
    if not path.exists():
        raise UsageError(
            f"there is no credential for agent {name} in space {info.name}: `tidings agent add {name}` makes one"
        )
    _, key = jwt.split_credentials(read_private(path))
    connection = await connect(info.url, path, key.id, name=name, reconnect=False, timeout=timeout)
    try:
        yield Session(info, name, key, connection, ControlClient(connection, info.subjects, key.id, timeout))
    finally:
        await connection.close()
