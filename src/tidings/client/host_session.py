"""A program's session at the host: the file it is kept in, the proof that opens it, and where it comes from.

A session is what the host knows a program by; `host/sessions.py` is its other side. It lies in a file, 0600 in a 0700
directory. Programs are told its path (`TIDINGS_SESSION_FILE`), never the token: paths may be seen in a list of
processes. What commands keep for each other in a file of their home is `cli/connection.py`'s.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Protocol

import msgspec

from tidings.admin.identity import Identity
from tidings.client.host_http import HostClient
from tidings.contract.host import ChallengeRequest, OpenSessionRequest
from tidings.errors import ConfigError, NoSession, UsageError
from tidings.util.private_files import private_dir, read_private, write_private
from tidings.wire.signing import KeyPair, verify

VARIABLE = "TIDINGS_SESSION_FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFile:
    """What the file says. `socket`: of the host that gave it."""

    socket: str
    session: str
    token: str
    space: str
    space_id: str
    agent: str
    name: str
    receive: bool

    def __repr__(self) -> str:
        return f"SessionFile({self.session} of {self.name} in {self.space})"

    def write(self, path: Path) -> None:
        private_dir(path.parent)
        write_private(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> SessionFile:
        """ConfigError if it is not there, is open to others, or says something else."""
        try:
            found = json.loads(read_private(path))
            return cls(**{field.name: found[field.name] for field in fields(cls)})
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a session of a host ({error}): remove it, one is made anew") from error


def own_file(home: Path, space: str, name: str) -> Path:
    """Where the commands of `tidings` keep their session of an agent."""
    return home / "run" / "sessions" / f"{space}.{name}.json"


def named_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file this program was told of."""
    path = environ.get(VARIABLE)
    return Path(path) if path else None


# --- the proof ---
# The proof that a program may act as an agent: a signature with the agent's key over what the host asked.
#
# It covers the nonce, the socket and the space, so that it is worth nothing at another host, in another space, or a
# second time; no message that is signed for the wire begins like it.


_DOMAIN = "tidings host session 1"


def proof_bytes(space_id: str, agent: str, socket: str, nonce: str) -> bytes:
    fields = (_DOMAIN, space_id, agent, socket, nonce)
    if any("\n" in each for each in fields):
        raise UsageError("a session is asked for without line breaks in the space, the agent, the socket or the nonce")
    return "\n".join(fields).encode("utf-8", "surrogateescape")


def prove(key: KeyPair, space_id: str, socket: str, nonce: str) -> str:
    """URL-safe base64 of 64 bytes, without padding."""
    return base64.urlsafe_b64encode(key.sign(proof_bytes(space_id, key.id, socket, nonce))).decode().rstrip("=")


def is_proven(signature: str, space_id: str, agent: str, socket: str, nonce: str) -> bool:
    """Was it made with the key of this agent over exactly these?"""
    try:
        raw = base64.b64decode(signature + "=" * (-len(signature) % 4), altchars=b"-_", validate=True)
        asked = proof_bytes(space_id, agent, socket, nonce)
    except (binascii.Error, ValueError, UsageError):
        return False
    return verify(agent, asked, raw)


# --- where a session comes from ---


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
    nonce = (await host.call(ChallengeRequest())).nonce
    request = OpenSessionRequest(
        source=tuple(source or source_of(identity)),
        agent=identity.id,
        nonce=nonce,
        signature=prove(identity.key, identity.space_id, str(host.socket), nonce),
        receive=receive,
        program=program,
    )
    found = await host.call(request)
    return SessionFile(socket=str(host.socket), receive=receive, **msgspec.structs.asdict(found))


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
