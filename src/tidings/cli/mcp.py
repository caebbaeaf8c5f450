"""`tidings mcp`: an agent of a space for a coding agent, over standard input and output."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from tidings.cli import completion, output
from tidings.cli.context import Context, PlainSpaceContext
from tidings.errors import HostUnreachable, PrerequisiteMissing, UsageError

if TYPE_CHECKING:
    from tidings.client.host_http import HostClient
    from tidings.client.host_session import SessionSource

START_WITHIN = 30.0
SOMEBODY_ELSES = 2.0
LOOK_EVERY = 0.05


def mcp(
    ctx: PlainSpaceContext,
    agent: Annotated[str | None, Option(help="Agent to be.", metavar="NAME", autocompletion=completion.agents)] = None,
    bundle: Annotated[Path | None, Option(help="Be the agent of this `agent export` file.", metavar="FILE")] = None,
    session_file: Annotated[Path | None, Option(help="Use this session, and leave it open.", metavar="FILE")] = None,
) -> None:
    """Serve the Model Context Protocol on standard input and output: for coding agents, not for people.

    Uses the host of this machine, and starts it if none runs. Standard output holds the protocol and nothing else. It
    ends when its client does; what it has claimed goes back. `docs/mcp.md` tells how to add it to your coding agent.

    Examples:
      tidings mcp --agent ada
      tidings mcp --agent ada --space lab
      tidings mcp --bundle ada.tidings.json
    """
    try:
        from tidings.client.agent import Agent
        from tidings.client.host_transport import HostTransport
        from tidings.mcp.server import serve
    except ImportError as error:
        raise PrerequisiteMissing(f"{error.name} is not installed: pip install 'tidings[host,mcp]'") from error
    logging.basicConfig(level=logging.WARNING, format="tidings mcp: %(message)s", stream=sys.stderr)
    ctx = ctx.at(acting_as=agent)
    if bundle is not None and (session_file is not None or agent is not None or ctx.space is not None):
        raise UsageError(
            "--bundle says which agent of which space it is: give it without --agent, --space, --session-file"
        )

    async def run() -> None:
        source = borrowed(session_file, agent) if session_file else await _own(ctx, bundle)
        endpoint = Agent(HostTransport(lambda: running_host(ctx.settings.home), source))
        await endpoint.open()
        output.say(f"tidings mcp: {endpoint.name} in {endpoint.space}")
        await serve(endpoint)

    asyncio.run(run())


async def _own(ctx: Context, bundle: Path | None) -> SessionSource:
    from tidings.admin.identity import Identity, bundle_identity, local_identity
    from tidings.client.host_session import ProvenSession

    async def identity() -> Identity:
        return bundle_identity(bundle.absolute()) if bundle else await local_identity(ctx.home, ctx.agent)

    await identity()  # an agent that is not there is found before a host is started for it
    return ProvenSession(identity, receive=True, program="mcp")


def borrowed(path: Path, agent: str | None) -> SessionSource:
    """The session of a file, if it is of this agent."""
    from tidings.client.host_session import BorrowedSession, SessionFile

    name = SessionFile.read(path).name
    if agent is not None and name != agent:
        raise UsageError(f"the session in {path} is of {name}, not of {agent}")
    return BorrowedSession(path, holder="server")


async def running_host(home: Path) -> HostClient:
    """The host of this home; started if there is none, and said so.

    Whether there is one its lock decides: a host that is busy, or just starting, is waited for.
    """
    from tidings.client.host_http import HostClient
    from tidings.host.daemon import running_pid

    found = await HostClient.find(home)
    if found is not None:
        return found
    if (pid := running_pid(home)) is not None:
        output.say(f"tidings mcp: the host (pid {pid}) does not answer yet, waiting for it")
    else:
        output.say("tidings mcp: no host runs, starting one")
        await _start_host(home)
    begun = time.monotonic()
    while True:
        found = await HostClient.find(home)
        if found is not None:
            return found
        waited = time.monotonic() - begun
        if waited > START_WITHIN:
            raise HostUnreachable(
                f"the host of {home} did not answer within {START_WITHIN:.0f} s: see `tidings host status`"
            )
        # somebody else may be starting it at this moment; otherwise there is nothing to wait for
        if waited > SOMEBODY_ELSES and running_pid(home) is None:
            raise HostUnreachable(f"the host of {home} could not be started: `tidings host up` says why")
        await asyncio.sleep(LOOK_EVERY)


async def _start_host(home: Path) -> None:
    # its words go to standard error: standard output is the protocol's
    command = [sys.executable, "-m", "tidings.cli", "host", "up", "--home", str(home)]
    # not a process of the loop, which kills those that are left when it ends: this one gives up by itself, and takes
    # along what it began
    starting = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)  # noqa: ASYNC220
    while starting.poll() is None:
        await asyncio.sleep(LOOK_EVERY)
