"""How a command becomes an agent: through the host of this machine if one runs, else to the space itself.

    receipt = act(ctx, lambda agent: agent.send("general", "hello", id=chosen))

What a command does is written once, against `Agent`. If the host goes away before it took it, the same is done
directly: so whatever is sent has its id before the first try. The commands of a home keep their session of an agent in
a file, so that the next one needs no proof; one they were told of (`TIDINGS_SESSION_FILE`) is used if it is of the same
agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from typer import Option

from tidings.cli import output
from tidings.cli.context import Context
from tidings.errors import ConfigError, HostUnreachable, OutcomeUnknown, UsageError

if TYPE_CHECKING:
    from tidings.admin.administration import Administrator
    from tidings.admin.identity import Identity
    from tidings.client.agent import Agent
    from tidings.client.direct_transport import DirectAgent
    from tidings.client.host_http import HostClient
    from tidings.client.host_session import SessionFile, SessionSource
    from tidings.client.host_transport import HostAgent
    from tidings.client.transport import Receipt, Transport
    from tidings.host.outbox_file import OutboxFile

T = TypeVar("T")
IdOption = Annotated[str | None, Option("--id", help="Id of the message. Repeating it sends once.", metavar="ID")]


def chosen_id(given: str | None) -> str:
    """Known before the first try."""
    from tidings.wire.message import is_message_id, new_id

    if given is not None and not is_message_id(given):
        raise UsageError(f"--id is the id of a message, a UUIDv7 in lower case, not {given!r}")
    return given or new_id()


def act(ctx: Context, doing: Callable[[Agent[Transport]], Awaitable[T]], *, receive: bool = False) -> T:
    """Do something as the agent. `receive`: through the host its mail comes into its inbox from then on."""

    async def run() -> T:
        async with host_session(ctx, receive=receive) as agent:
            if agent is not None:
                try:
                    return await doing(agent)
                except HostUnreachable as error:
                    output.say(f"note: {error}; going without it")
        async with direct_session(ctx) as endpoint:
            return await doing(endpoint)

    return asyncio.run(run())


def act_at_host(ctx: Context, doing: Callable[[HostAgent], Awaitable[T]], *, receive: bool = False) -> T:
    """The same for what only a host can do: HostUnreachable if none runs."""

    async def run() -> T:
        from tidings.client.connect import required_host

        host = await required_host(ctx.home.home)
        _note_mismatch(host)
        ctx.check()
        async with _session_at(host, ctx, KeptSession(ctx, receive=receive)) as agent:
            return await doing(agent)

    return asyncio.run(run())


def ask_host(home: Path, doing: Callable[[HostClient], Awaitable[T]]) -> T:
    """What a program of this user may ask of the host without being an agent."""

    async def run() -> T:
        from tidings.client.connect import required_host

        host = await required_host(home)
        _note_mismatch(host)
        try:
            return await doing(host)
        finally:
            host.close()

    return asyncio.run(run())


def administer(ctx: Context, purpose: str, doing: Callable[[Administrator], Awaitable[T]]) -> T:
    """Do something as the operator of the space."""
    from tidings.admin.administration import administer as administering

    async def run() -> T:
        async with administering(ctx.home, purpose) as admin:
            return await doing(admin)

    return asyncio.run(run())


@asynccontextmanager
async def direct_session(ctx: Context, **options: Any) -> AsyncIterator[DirectAgent]:
    """A command that only sends and looks does not take the receiving session from a program that has it, and is over
    before anybody who saw it could answer."""
    from tidings.client.connect import connect

    ctx.check()
    wanted = {"receive": False, "presence": False, **options}
    async with connect(ctx.home.name, name=ctx.agent, home=ctx.home.home, **wanted) as endpoint:
        yield endpoint


@asynccontextmanager
async def host_session(
    ctx: Context, *, receive: bool = False, own: str | None = None
) -> AsyncIterator[HostAgent | None]:
    """The agent at the host, or None if none runs or none is wanted. `own`: a session of this program alone, which it
    ends, for who holds tasks.

    A host may go away between two questions: nothing was handed to it yet, so nothing is lost without it.
    """
    from tidings.client.host_session import ProvenSession

    host = None if ctx.direct else await _host_if_any(ctx.home.home)
    if host is None:
        yield None
        return
    ctx.check()
    source: SessionSource = KeptSession(ctx, receive=receive)
    if own is not None:
        source = ProvenSession(lambda: _identity(ctx), receive=receive, program=own)
    endpoint = _session_at(host, ctx, source)
    try:
        await endpoint.open()
    except (HostUnreachable, OutcomeUnknown) as error:
        output.say(f"note: {error}; going without it")
        yield None
        return
    output.say("through the host")
    try:
        yield endpoint
    finally:
        await endpoint.close()


def _session_at(host: HostClient, ctx: Context, source: SessionSource) -> HostAgent:
    from tidings.client.agent import Agent
    from tidings.client.connect import required_host
    from tidings.client.host_transport import HostTransport

    first = [host]

    async def find() -> HostClient:
        return first.pop() if first else await required_host(ctx.home.home)

    return Agent(HostTransport(find, source))


async def _host_if_any(home: Path) -> HostClient | None:
    from tidings.client.connect import host_process
    from tidings.client.host_http import HostClient

    host = await HostClient.find(home)
    if host is not None:
        _note_mismatch(host)
    elif (holder := host_process(home)) is not None:
        output.say(f"note: the host ({holder}) does not answer, so this goes without it: `tidings host status`")
    return host


def _note_mismatch(host: HostClient) -> None:
    if host.mismatch:
        output.say(f"note: {host.mismatch}")


async def _identity(ctx: Context) -> Identity:
    from tidings.admin.identity import local_identity

    return await local_identity(ctx.home, ctx.agent)


class KeptSession:
    """The session that the commands of this home have of an agent: in a file, proven anew when the host forgot it."""

    ends = False

    def __init__(self, ctx: Context, *, receive: bool) -> None:
        self.ctx, self.receive = ctx, receive

    async def obtain(self, host: HostClient, stale: SessionFile | None) -> SessionFile:
        from tidings.client.host_session import open_session, own_file

        own = own_file(self.ctx.home.home, self.ctx.home.name, self.ctx.agent)
        for path in (_named(self.ctx), own):
            file = None if path is None else self._read(path, host)
            if file is not None and (stale is None or file.token != stale.token):
                return file
        file = await open_session(host, await _identity(self.ctx), receive=self.receive, program="tidings")
        file.write(own)
        return file

    def _read(self, path: Path, host: HostClient) -> SessionFile | None:
        """The session in a file, if it is of this agent as it is now; whether it lasts, its first request tells."""
        from tidings.client.host_session import SessionFile, usable

        if not path.exists():
            return None
        try:
            file = usable(SessionFile.read(path), host)
        except ConfigError as error:
            output.say(f"note: {error}")
            return None
        key = self.ctx.agent_key
        is_ours = key is not None and (file.space_id, file.agent) == (self.ctx.space_id, key.id)
        return file if is_ours and (file.receive or not self.receive) else None


def _named(ctx: Context) -> Path | None:
    """The session this program was told of, if it is there and of the agent that acts."""
    from tidings.client.host_session import VARIABLE, SessionFile, named_file

    path = named_file()
    if path is None:
        return None
    if not path.exists():
        output.say(f"note: {VARIABLE} names {path}, which is not there: a session of {ctx.agent} is opened instead")
        return None
    file = SessionFile.read(path)
    if (file.space, file.name) != (ctx.home.name, ctx.agent):
        said = f"is of {file.name} in {file.space}: {ctx.agent} in {ctx.home.name} gets one of its own"
        output.say(f"note: the session in {VARIABLE} {said}")
        return None
    return path


def outbox_in_file(ctx: Context) -> OutboxFile | None:
    """The outbox as a host left it behind, if none runs."""
    from tidings.client.connect import host_process

    home, space_id = ctx.home.home, ctx.space_id
    if host_process(home) is not None or not (home / "host.db").exists():
        return None
    from tidings.host.outbox_file import OutboxFile

    agent = ctx.require_key().id
    output.say("no host runs: read from its file")
    return OutboxFile(home, ctx.home.name, space_id, agent, ctx.agent)


def show_receipt(ctx: Context, receipt: Receipt) -> None:
    if ctx.as_json:
        facts: dict[str, Any] = {"id": receipt.id, "seq": receipt.seq or None, "stage": receipt.stage}
        there = {} if receipt.row is None else {"row": receipt.row, "state": receipt.state}
        output.data(facts | {"warnings": list(receipt.warnings)} | there)
        return
    output.line(receipt.id)
    if receipt.stage == "stored":
        output.say(f"stored: it leaves by itself; `tidings outbox show {receipt.id}` says how far it is")
    else:
        output.say(f"{receipt.stage} at sequence {receipt.seq}")
    for warning in receipt.warnings:
        output.say(f"warning: {warning}")
