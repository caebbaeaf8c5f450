"""Where a program's session at the host comes from: proven with the agent's key, or borrowed from a file.

A session is what the host knows a program by; `host/sessions.py` is its other side. What commands keep for each other
in a file of their home is `cli/connection.py`'s.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from tidings.admin.identity import Identity
from tidings.client.host_http import HostClient
from tidings.client.host_proof import prove
from tidings.client.host_session_file import SessionFile
from tidings.errors import ConfigError, NoSession


class SessionSource(Protocol):
    """Where a session comes from."""

    #: is it ended with the endpoint? One that others use too is left open
    ends: bool

    async def obtain(self, host: HostClient, stale: SessionFile | None) -> SessionFile:
        """A session; `stale` is one that the host does not know any more."""
        ...


class ProvenSession:
    """A session of one's own, opened with the agent's key."""

    ends = True

    def __init__(self, identity: Callable[[], Awaitable[Identity]], *, receive: bool, program: str = "") -> None:
        self.identity, self.receive, self.program = identity, receive, program

    async def obtain(self, host: HostClient, stale: SessionFile | None) -> SessionFile:  # noqa: ARG002
        return await open_session(host, await self.identity(), receive=self.receive, program=self.program)


class BorrowedSession:
    """The session in a file, which is somebody else's to end and to replace. `holder`: what borrows it."""

    ends = False

    def __init__(self, path: Path, *, holder: str = "program") -> None:
        self.path, self.holder = path, holder

    async def obtain(self, host: HostClient, stale: SessionFile | None) -> SessionFile:
        if stale is not None:
            raise NoSession(
                f"the session of this {self.holder} has ended on the host: start it again with a session that lasts"
            )
        return usable(SessionFile.read(self.path), host)


async def open_session(
    host: HostClient, identity: Identity, *, receive: bool = False, program: str = "", source: Sequence[str] = ()
) -> SessionFile:
    """Prove the agent's key. `receive`: the host takes its mail from now on."""
    nonce = str((await host.call("POST", "/v1/challenge", {}))["nonce"])
    body = {
        "source": list(source) or source_of(identity),
        "agent": identity.id,
        "nonce": nonce,
        "signature": prove(identity.key, identity.space_id, str(host.socket), nonce),
        "receive": receive,
        "program": program,
    }
    found = await host.call("POST", "/v1/sessions", body)
    names = ("session", "token", "space", "space_id", "agent", "name")
    return SessionFile(socket=str(host.socket), receive=receive, **{name: str(found[name]) for name in names})


def usable(file: SessionFile, host: HostClient) -> SessionFile:
    if file.socket != str(host.socket):
        raise ConfigError(f"session {file.session} is of the host at {file.socket}, not of {host.socket}")
    return file


def source_of(identity: Identity) -> list[str]:
    """Where the host finds this identity too."""
    if identity.is_bundle:
        return ["bundle", str(identity.path.absolute())]
    # <home>/spaces/<space>/creds/agents/<name>.creds
    return ["home", str(identity.path.absolute().parents[4]), identity.subjects.space, identity.name]
