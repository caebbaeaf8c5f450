"""Accepting an invitation: a key is made here, what the line promises is asked for, and what comes back is kept.

    line -> certificate of the server, checked by the key in the line -> requests -> what was granted

An agent's place becomes a bundle below `imported/`; a link is more work (`link_accepting.py`) on the same handshake.

The seed of the new key is written before anything is asked and never travels; whoever is interrupted finds it again by
accepting the same line, and gets the same answer. What the server shows is first only looked at: nothing is said to it
until its certificate was signed by the authority whose key is in the line.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from tidings.admin.home import SpaceHome
from tidings.admin.identity import Identity, bundle_identity
from tidings.contract.admin import ACCEPT_WAIT, Grant, PlaceGrant, RedeemRequest, SealedAnswer
from tidings.contract.core import Answer, Request, explain
from tidings.errors import (
    AuthRevoked,
    BrokerUnreachable,
    ConfigError,
    ConflictError,
    InvalidName,
    NameTaken,
    OutcomeUnknown,
    UntrustedServer,
    WireError,
)
from tidings.nats import jwt
from tidings.nats.address import Address
from tidings.nats.client import close_quietly, connect
from tidings.nats.errors import ProtocolError
from tidings.nats.proxy import END, MAX_ANSWER, check_tunnel, proxy_for, tunnel_request
from tidings.rpc.control import ControlClient
from tidings.server.certificate_files import server_name
from tidings.server.grants import invitation_token
from tidings.util.backoff import Backoff
from tidings.util.private_files import locked, private_dir, read_private, write_private
from tidings.wire.invitations import InvitationLine, Trust, acceptance, check_kind
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import Subjects

PATIENCE = 5.0
#: how often it is asked again while the space is busy or does not answer
ATTEMPTS = 4
AGAIN = Backoff(1.0, 5.0)
Tell = Callable[[str], None]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the acceptance of one line is."""

    #: of the key that asks; empty once a credential has it
    seed: str


P = TypeVar("P", bound=Progress)
S = TypeVar("S", bound=Answer)


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Holds the lock of the folder in which acceptances of one kind are kept."""
    for each in (folder.parent, folder):
        private_dir(each)
    with locked(folder / "lock", "accepting an invitation", wait=ACCEPT_WAIT):
        yield


class Handshake(Generic[P]):
    """Accepts one invitation line. Key and progress are on disk before each request, so it can be resumed."""

    def __init__(self, folder: Path, line: InvitationLine, kind: type[P], tell: Tell) -> None:
        self.line, self.tell = line, tell
        self.path = folder / f"{line.key.id}.json"
        self.is_new = not self.path.exists()
        if self.is_new:
            self.put(kind(seed=KeyPair.generate().seed))
        self.progress = read_progress(self.path, kind)

    def put(self, progress: P) -> None:
        write_private(self.path, msgspec.json.encode(progress).decode() + "\n")
        self.progress = progress

    def change(self, **changes: Any) -> None:
        self.put(msgspec.structs.replace(self.progress, **changes))

    @property
    def key(self) -> KeyPair:
        return KeyPair(self.progress.seed)

    async def call(self, request: Request[SealedAnswer], sealed: type[S]) -> S:
        """Returns what the space that invited sealed for our key. Asks again while it is busy or does not answer."""
        url, delays = (await asyncio.to_thread(where_of, self.line)).full_url, AGAIN.delays()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = await _ask_once(self.line, url, request)
                return msgspec.json.decode(self.key.open_sealed(answer.sealed), type=sealed)
            except NameTaken:
                raise
            except (ConflictError, OutcomeUnknown, BrokerUnreachable) as error:
                again = _away(self.line, error) if isinstance(error, BrokerUnreachable) else error
                if attempt == ATTEMPTS:
                    raise again from error
                self.tell(f"{again}; asking again")
            except AuthRevoked as error:
                raise AuthRevoked(_not_taken(self.line)) from error
            except msgspec.MsgspecError as error:
                raise WireError(f"{request.operation.name}: invalid answer: {explain(error)}") from error
            await asyncio.sleep(next(delays))
        raise AssertionError("unreachable")

    def granted(self, grant: Grant) -> tuple[str, str]:
        """Returns our credential and the address of the space. Raises WireError if the token is not ours."""
        if jwt.decode(grant.jwt).get("sub") != self.key.id:
            raise WireError("the space gave what it promised to another key than ours")
        try:
            return jwt.credentials(grant.jwt, self.key), addresses_of(self.line, grant)
        except ValueError as error:
            raise WireError(f"the space named an authority that is no certificate ({error})") from error


def read_progress(path: Path, kind: type[P]) -> P:
    try:
        found = msgspec.json.decode(read_private(path), type=kind)
        if found.seed:
            KeyPair(found.seed)
    except (msgspec.MsgspecError, InvalidName) as error:
        raise ConfigError(
            f"{path} is damaged: remove it and accept again. If the invitation is used by then, its key was in there: "
            "ask for another"
        ) from error
    return found


# --- becoming an agent ---


async def accept(home: SpaceHome, line: InvitationLine, name: str, tell: Tell = lambda _text: None) -> Identity:
    """Become the agent that a line promises. `name`: what to be called, if the line leaves that open."""
    check_kind(line, for_link=False)
    folder = home.home / "accepting"
    with one_at_a_time(folder):
        if (already := _accepted(home, line)) is not None:
            return already
        return await _accept(home, Handshake(folder, line, Progress, tell), name)


def _accepted(home: SpaceHome, line: InvitationLine) -> Identity | None:
    """Who this home became by the same line before."""
    for path in (home.imported(name) for name in home.imports()):
        if json.loads(read_private(path)).get("invitation") == line.key.id:
            return bundle_identity(path)
    return None


async def _accept(home: SpaceHome, handshake: Handshake[Progress], name: str) -> Identity:
    line, key = handshake.line, handshake.key
    if why := _no_room(home, name, key):
        raise ConflictError(f"{why}: accept the line into another home (--home)")
    signature = base64.b64encode(key.sign(acceptance(line.space, line.key.id, key.id, name))).decode()
    place = await handshake.call(RedeemRequest(id=key.id, name=name, sig=signature), PlaceGrant)
    found = _bundle(handshake, place)
    kept = home.imported(found["agent"]["name"])
    before = _replaced(kept, place)
    why = None if before else _no_room(home, found["agent"]["name"], key, found["space_id"])
    if why:
        kept = handshake.path.with_suffix(".tidings.json")
    for folder in (home.home, kept.parent.parent, kept.parent):
        private_dir(folder)
    if before is not None:
        aside = handshake.path.with_name(f"{before}.replaced.json")
        write_private(aside, read_private(kept))
        handshake.tell(f"the key that {found['agent']['name']} had here is void; its bundle is kept as {aside}")
    write_private(kept, json.dumps(found, indent=1) + "\n")
    handshake.path.unlink()
    if why:
        raise ConflictError(f"{why}. The place is yours, and its bundle is {kept}: {_ways_in(home, found, kept)}")
    return bundle_identity(kept)


def _bundle(handshake: Handshake[Progress], place: PlaceGrant) -> dict[str, Any]:
    """The same as `tidings agent export` writes, with the address by which the space was reached."""
    creds, url = handshake.granted(place)
    if place.agent.id != handshake.key.id:
        raise WireError("the space gave a place to another key than ours")
    return {
        "tidings": 1,
        "space": handshake.line.space,
        "space_id": place.space_id,
        "steward_key": place.steward_key,
        "url": url,
        "agent": {"name": place.agent.name, "id": place.agent.id},
        "creds": creds,
        "invitation": handshake.line.key.id,
    }


def _replaced(kept: Path, place: PlaceGrant) -> str | None:
    """Whose place in this home the new key takes: that of the very agent it was invited to replace."""
    if not kept.exists():
        return None
    held = bundle_identity(kept)
    same = (held.space_id, held.steward_key) == (place.space_id, place.steward_key)
    return held.id if same and held.id in place.succeeds else None


def _ways_in(home: SpaceHome, found: dict[str, Any], kept: Path) -> str:
    """What can be done with a bundle that has no room here; `agent import` takes the place of one of the same space."""
    elsewhere = f"`tidings agent import {kept} --home DIR` takes it into another home"
    held = home.imported(found["agent"]["name"])
    if home.exists or bundle_identity(held).space_id != found["space_id"]:
        return elsewhere
    return f"`tidings agent import {kept}` puts it into the place of the one here, and {elsewhere}"


def _no_room(home: SpaceHome, name: str, key: KeyPair, space_id: str | None = None) -> str | None:
    """Why this home cannot have the agent. Asked before anybody is, and once more when it is known who it is."""
    if home.exists and space_id not in (None, home.read_info().id):
        return f"{home.home} has another space {home.name} of its own"
    if name and (home.agent_creds(name).exists() or _is_anothers(home.imported(name), key)):
        return f"there is an agent {name} of a space {home.name} in {home.home} already"
    return None


def _is_anothers(kept: Path, key: KeyPair) -> bool:
    return kept.exists() and bundle_identity(kept).id != key.id


# --- whom to trust ---


def where_of(line: InvitationLine) -> Address:
    """The address with whom to trust there."""
    plain = Address(line.host, line.port, websocket=line.websocket)
    match line.trust:
        case Trust.PLAIN:
            return plain
        case Trust.SYSTEM:
            return plain._replace(tls=True, tls_first=not line.greets_first, name=line.host)
    return _trusting(line, _certificate(line))


def _trusting(line: InvitationLine, authority: bytes) -> Address:
    return Address(line.host, line.port, True, authority, server_name(line.space), True, line.websocket)


def _certificate(line: InvitationLine) -> bytes:
    """What the server shows, if the authority of the line signed it. Whose it is, the next handshake proves."""
    from tidings.server.certificates import is_signed_by

    shown = _look(line)
    if not is_signed_by(shown, line.authority):
        raise UntrustedServer(
            f"{line.host}:{line.port} is not the space that invited you, and was told nothing: its certificate is by "
            "another authority. Something else listens there, or somebody is in between"
        )
    return shown


def _look(line: InvitationLine) -> bytes:
    """The certificate, unchecked; nothing is said."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        with (
            _reach(Address(line.host, line.port, tls=True, websocket=line.websocket)) as plain,
            context.wrap_socket(plain, server_hostname=server_name(line.space)) as wrapped,
        ):
            return wrapped.getpeercert(binary_form=True) or b""
    except ssl.SSLError as error:
        raise UntrustedServer(
            f"what listens at {line.host}:{line.port} does not speak TLS as the space that invited you does "
            f"({error.reason or error}), and was told nothing"
        ) from error
    except ProtocolError as error:
        raise BrokerUnreachable(f"{line.host}:{line.port} cannot be reached: {error}") from error
    except OSError as error:
        raise BrokerUnreachable(
            f"nobody answers at {line.host}:{line.port} ({error.strerror or error}): is the space up with `--listen`, "
            "and can this machine reach it?"
        ) from error


def _reach(address: Address) -> socket.socket:
    """A connection, through the proxy that a websocket of this machine goes through if there is one."""
    proxy = proxy_for(address)
    if proxy is None:
        return socket.create_connection((address.host, address.port), PATIENCE)
    plain = socket.create_connection((proxy.host, proxy.port), PATIENCE)
    try:
        plain.sendall(tunnel_request(proxy, address))
        answer = b""
        while END not in answer and len(answer) < MAX_ANSWER and (more := plain.recv(MAX_ANSWER)):
            answer += more
        check_tunnel(proxy, answer)
    except BaseException:
        plain.close()
        raise
    return plain


# --- asking ---


def _away(line: InvitationLine, error: BrokerUnreachable) -> BrokerUnreachable:
    """The broker that does not answer is that of whoever invited, and not one that could be started here."""
    if line.trust != Trust.PLAIN:
        return error
    return BrokerUnreachable(
        f"space {line.space}, which invited, does not answer ({error.__cause__}): whoever runs it starts it; accept "
        "the same line then"
    )


def _not_taken(line: InvitationLine) -> str:
    """Why a server does not let the holder of a line in, as far as it can be known from here."""
    if line.expires < time.time():
        return "the space takes this invitation no more: it has expired; ask for another"
    return (
        "the space does not take this invitation: it was revoked, has expired by the clock of its server, or that "
        "server lacks the account of whoever is invited. Ask who invited you: `tidings invitation list` shows there "
        "whether it is open, and `tidings up` names an account that lacks"
    )


async def _ask_once(line: InvitationLine, url: str, request: Request[SealedAnswer]) -> SealedAnswer:
    creds = jwt.credentials(invitation_token(line), line.key)
    connection = await connect(url, creds, line.key.id, name="whoever was invited", reconnect=False)
    try:
        control = ControlClient(connection, Subjects(line.space), line.key.id, timeout=ACCEPT_WAIT + PATIENCE)
        return await control.call(request)
    finally:
        await close_quietly(connection)


def addresses_of(line: InvitationLine, grant: Grant) -> str:
    """The one by which it was reached, and then the other way in at the same host; or all servers that others run."""
    if grant.servers:
        return grant.servers
    used = where_of(line) if line.trust is not Trust.AUTHORITY else _trusting(line, _authority(line, grant))
    other = grant.port if line.websocket else grant.ws_port
    if not other or not used.tls:
        return used.full_url
    return f"{used.full_url},{used._replace(port=other, websocket=not line.websocket).full_url}"


def _authority(line: InvitationLine, grant: Grant) -> bytes:
    from tidings.server.certificates import compressed_key

    if compressed_key(grant.authority[: grant.authority_bytes]) != line.authority:
        raise UntrustedServer("the authority that the space named is not the one that invited you")
    return grant.authority
