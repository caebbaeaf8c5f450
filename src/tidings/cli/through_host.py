"""How a command speaks through the host of this machine, if one runs: the session it uses, and what it says of it.

A command keeps its session of an agent in a file of this home, so that the next one needs no proof; one it was told of
(`TIDINGS_SESSION_FILE`) is used if it is of the same agent. A command chooses the id of what it sends before the first
try: if it goes another way after a failure it sends the same message, not a second one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidings.cli import output
from tidings.cli.options import Place
from tidings.errors import (
    ERRORS_BY_CODE,
    ConfigError,
    HostUnreachable,
    NoSession,
    OutcomeUnknown,
    TidingsError,
    UsageError,
)
from tidings.wire.ids import is_message_id, new_id

if TYPE_CHECKING:
    from tidings.host.client import HostClient, Sent, Session
    from tidings.host.outbox_file import OutboxFile

DirectOption = Annotated[bool, typer.Option("--direct", help="Go to the space without the host.")]
IdOption = Annotated[
    str | None, typer.Option("--id", help="Id of the message: sent again under it, it is sent once.", metavar="ID")
]
#: how long a command waits that a space which can be reached confirms
CONFIRM_PATIENCE = 3.0


def chosen_id(given: str | None) -> str:
    """Known before the first try."""
    if given is not None and not is_message_id(given):
        raise UsageError(f"--id is the id of a message, a UUIDv7 in lower case, not {given!r}")
    return given or new_id()


def required_host(home: Path) -> HostClient:
    from tidings.host.client import HostClient

    client = HostClient.find(home)
    if client is None:
        if (holder := _lock_holder(home)) is not None:
            raise HostUnreachable(f"the host of {home} ({holder}) does not answer: `tidings host status`")
        raise HostUnreachable(f"no host runs in {home}: `tidings host up` starts one")
    _note_mismatch(client)
    return client


def required_session(where: Place, *, receive: bool = False) -> Session:
    client = required_host(where.home.home)
    where.check()
    return _session(client, where, receive=receive)


def session_if_any(where: Place, *, direct: bool = False, receive: bool = False) -> Session | None:
    """A session of the agent, or None if no host runs, or none is wanted."""
    return _unless_it_goes(where, lambda client: _session(client, where, receive=receive), direct=direct)


def own_session_if_any(where: Place, *, direct: bool = False) -> Session | None:
    """The same for a command that holds tasks: its session is no other command's, and it ends it."""
    return _unless_it_goes(
        where, lambda client: _proven(client, where, receive=False, program="tidings work"), direct=direct
    )


def _unless_it_goes(where: Place, opened: Callable[[HostClient], Session], *, direct: bool) -> Session | None:
    """A host may go away between two questions: nothing was handed to it yet, so nothing is lost without it."""
    client = None if direct else _host_if_any(where.home.home)
    if client is None:
        return None
    where.check()
    try:
        session = opened(client)
    except (HostUnreachable, OutcomeUnknown) as error:
        output.say(f"note: {error}; going without it")
        return None
    output.say("through the host")
    return session


def outbox_at(where: Place) -> Session | OutboxFile:
    """Where an outbox can be looked at: the host that runs, or the file it left behind."""
    home, space_id = where.home.home, where.space_id
    if _lock_holder(home) is not None or not (home / "host.db").exists():
        return required_session(where)
    from tidings.host.outbox_file import OutboxFile

    agent = where.agent_id
    if agent is None:
        raise UsageError(f"there is no credential for agent {where.agent} in {where.home.name}: `tidings agent add` it")
    output.say("no host runs: read from its file")
    return OutboxFile(home, where.home.name, space_id, agent, where.agent)


def _host_if_any(home: Path) -> HostClient | None:
    from tidings.host.client import HostClient

    client = HostClient.find(home)
    if client is not None:
        _note_mismatch(client)
    elif (holder := _lock_holder(home)) is not None:
        output.say(f"note: the host ({holder}) does not answer, so this goes without it: `tidings host status`")
    return client


def _lock_holder(home: Path) -> str | None:
    """The process that is the host of this home, whether or not it answers: `pid 1234`."""
    from tidings.broker.private_files import lock_holder

    found = lock_holder(home / "run" / "host.lock")
    return None if found is None else found.split(" (")[0]


def _note_mismatch(client: HostClient) -> None:
    if client.mismatch:
        output.say(f"note: {client.mismatch}")


def _session(client: HostClient, where: Place, *, receive: bool) -> Session:
    from tidings.host.session_file import own_file

    own = own_file(where.home.home, where.home.name, where.agent)
    for path in (_named(where), own):
        session = None if path is None else _kept(client, where, path, receive=receive)
        if session is not None:
            return session
    return _opened(client, where, own, receive=receive)


def _named(where: Place) -> Path | None:
    """The session this program was told of, if it is there and of the agent that acts."""
    from tidings.host.session_file import VARIABLE, SessionFile, named_file

    path = named_file()
    if path is None:
        return None
    if not path.exists():
        output.say(f"note: {VARIABLE} names {path}, which is not there: a session of {where.agent} is opened instead")
        return None
    file = SessionFile.read(path)
    if (file.space, file.name) != (where.home.name, where.agent):
        said = f"is of {file.name} in {file.space}: {where.agent} in {where.home.name} gets one of its own"
        output.say(f"note: the session in {VARIABLE} {said}")
        return None
    return path


def _kept(client: HostClient, where: Place, path: Path, *, receive: bool) -> Session | None:
    """The session in a file, if it is of this agent as it is now, and the host still knows it."""
    from tidings.host.session_file import SessionFile

    if not path.exists():
        return None
    try:
        file = SessionFile.read(path)
        session = client.resume(file)
    except ConfigError as error:
        output.say(f"note: {error}")
        return None
    if (file.space_id, file.agent) != (where.space_id, where.agent_id) or (receive and not file.receive):
        return None
    try:
        session.me()
    except NoSession:
        return None
    return session


def _opened(client: HostClient, where: Place, own: Path, *, receive: bool) -> Session:
    session = _proven(client, where, receive=receive)
    session.save(own)
    return session


def _proven(client: HostClient, where: Place, *, receive: bool, program: str = "tidings") -> Session:
    from tidings.endpoint.identity import local_identity

    identity = asyncio.run(local_identity(where.home, where.agent))
    return client.session(identity, receive=receive, program=program)


# --- sending ---


def patience(session: Session) -> float:
    """Seconds worth waiting for a confirmation: none if it is known that the space cannot be reached."""
    health = session.me()["health"]
    return 0.0 if health["reason"] and health["state"] not in ("open", "superseded") else CONFIRM_PATIENCE


def handed_over(session: Session, **fields: Any) -> Sent | None:
    """What the host has of it; None if the host went away before it took it. What the space refused is raised."""
    try:
        sent = session.send(wait=patience(session), **fields)
    except HostUnreachable as error:
        output.say(f"note: {error}; going without it, under the same id")
        return None
    if sent.state in ("dead", "cancelled"):
        row = session.outbox_show(sent.id)
        raise ERRORS_BY_CODE.get(row["code"], TidingsError)(f"message {sent.id} was not sent: {row['words']}")
    return sent


def show_sent(sent: Sent, *, as_json: bool, **more: Any) -> None:
    if as_json:
        facts = {"id": sent.id, "seq": sent.seq, "stage": sent.stage, "warnings": list(sent.warnings)}
        output.data(facts | {"row": sent.row, "state": sent.state} | more)
        return
    output.line(sent.id)
    output.say(f"confirmed at sequence {sent.seq}" if sent.stage == "confirmed" else stored_words(sent))
    for warning in sent.warnings:
        output.say(f"warning: {warning}")


def stored_words(sent: Sent) -> str:
    return f"stored: it leaves by itself; `tidings outbox show {sent.id}` says how far it is"


def wait_until(done: Callable[[float], bool], seconds: float) -> None:
    """Ask with as much patience as is left, until the answer is good."""
    until = time.monotonic() + seconds
    while not done(max(0.0, min(30.0, until - time.monotonic()))) and time.monotonic() < until:
        pass
