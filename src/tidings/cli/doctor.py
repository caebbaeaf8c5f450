"""`tidings doctor`: is this installation, and this space, what it should be?"""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from tidings.cli import output
from tidings.cli.context import AgentContext, Group, HomeContext, OutputContext, SpaceContext
from tidings.errors import PrerequisiteMissing, UnhealthyError

app = Group(no_args_is_help=False)


def require_testing() -> None:
    """The suites that attack a space are a distribution of their own: most installations never run them."""
    if find_spec("tidings_testing") is None:
        raise PrerequisiteMissing("the attacks are not installed: `pip install 'tidings[doctor]'`")


@app.callback(invoke_without_command=True)
def doctor(ctx: HomeContext, context: typer.Context) -> None:
    """Check this installation: versions, ports, clock, disk, Java, permissions. Says what to do.

    Examples:
      tidings doctor
      tidings doctor --json
      tidings doctor security            attack a space of yours
      tidings doctor link                lie to a worker of links in every way
      tidings doctor store               read everything it holds
      tidings doctor connection          why an agent does not reach its space
    """
    if context.invoked_subcommand is not None:
        return
    from dataclasses import asdict

    from tidings.cli.examination import examine

    findings = list(examine(ctx.home.home, ctx.settings["nats_server"] or None))
    if ctx.as_json:
        output.data([asdict(each) for each in findings])
    else:
        rows = [(each.what, each.verdict, each.said, each.do) for each in findings]
        output.table(("what", "verdict", "found", "do"), rows, empty="nothing was checked")
    problems = sum(each.verdict == "problem" for each in findings)
    if problems:
        raise UnhealthyError(f"{problems} thing{'s' if problems > 1 else ''} to mend")
    output.hint("tidings status" if any(each.what.startswith("space") for each in findings) else "tidings up")


@app.command("security")
def security(
    ctx: SpaceContext,
    deep: Annotated[bool, typer.Option("--deep", help="Flood it with 25,000 requests, not 1,500.")] = False,
) -> None:
    """Attack a running space with raw clients: everything an agent must not do is tried and must be refused.

    Three throw-away agents are added for it and revoked at the end; nothing of yours is touched.

    Examples:
      tidings doctor security
      tidings doctor security --space lab --deep --json
    """
    require_testing()
    from tidings_testing.security import run_security_suite

    ctx.home.read_info()
    with output.working(f"attacking space {ctx.home.name}"):
        report = asyncio.run(run_security_suite(ctx.home, deep=deep))
    if ctx.as_json:
        output.data(report.as_dict())
    else:
        output.table(
            ("finding", "tried", "outcome"),
            [(each.finding, each.title, each.outcome) for each in report.results],
            empty="no probe ran",
        )
    if report.broken:
        raise UnhealthyError(f"{len(report.broken)} of {len(report.results)} attacks were not refused")
    if report.cleanup:
        raise UnhealthyError(f"every attack was refused, but something was left behind: {'; '.join(report.cleanup)}")
    output.say(f"{len(report.results)} attacks tried, none succeeded")
    output.hint("tidings status")


@app.command("link")
def link(ctx: OutputContext) -> None:
    """Link a throw-away space with one that lies: whatever a hostile peer could say is said, and must not be believed.

    Two spaces are made in a temporary folder and taken away again, half a minute in all; nothing of yours is touched,
    and nothing needs to run. Forged and altered messages, pages and gaps that cannot be, replays, burnt ids, digests
    that lie, junk, silence, and agreements that end while records are under way.

    Examples:
      tidings doctor link
      tidings doctor link --json
    """
    require_testing()
    from tidings_testing.links import run_link_suite

    with output.working("linking a space with one that lies"):
        report = asyncio.run(run_link_suite())
    if ctx.as_json:
        output.data(report.as_dict())
    else:
        output.table(
            ("finding", "tried", "outcome"),
            [(each.finding, each.title, each.outcome) for each in report.results],
            empty="no probe ran",
        )
    if report.broken:
        named = ", ".join(each.name for each in report.broken[:5])
        raise UnhealthyError(
            f"{len(report.broken)} of {len(report.results)} lies were believed or did harm ({named}): `tidings doctor "
            "link --json` says what happened"
        )
    output.say(f"{len(report.results)} lies told, none was believed")
    output.hint("tidings link list")


@app.command("connection")
def connection(
    ctx: AgentContext,
    bundle: Annotated[Path | None, typer.Option(help="A bundle to try instead.", metavar="FILE")] = None,
) -> None:
    """Why an agent does not reach its space: name, port, TLS, credential, steward or clock, one step after the other.

    Run it where the agent is. Nothing is changed, and an agent that is connected meanwhile is not disturbed.

    Examples:
      tidings doctor connection
      tidings doctor connection --space main --as far
      tidings doctor connection --bundle far.tidings.json
    """
    from dataclasses import asdict

    from tidings.client.connect_direct import find_identity
    from tidings.client.connection_check import Step, check_connection

    async def steps() -> list[Step]:
        found = await find_identity(ctx.home.name, ctx.agent, ctx.home.home, bundle)
        return [step async for step in check_connection(found)]

    with output.working("trying one step after the other"):
        found = asyncio.run(steps())
    if ctx.as_json:
        output.data([asdict(each) for each in found])
    else:
        rows = [(each.what, each.verdict, each.said, each.do) for each in found]
        output.table(("step", "verdict", "found", "do"), rows, empty="nothing was tried")
    if any(each.verdict == "problem" for each in found):
        raise UnhealthyError(f"the step that fails is {next(e.what for e in found if e.verdict == 'problem')}")
    output.hint("tidings who")


@app.command("store")
def store(ctx: SpaceContext) -> None:
    """Read everything a running space holds once, and name what does not verify or is missing.

    Signatures, JSON, durable copies, sequences above the floor of the log, records the broker counts and cannot read.
    What the steward knows to be lost is named too. Void messages, which any agent may write and no reader shows, are
    counted and are no damage. Nothing is changed.

    Examples:
      tidings doctor store
      tidings doctor store --space lab --json
    """
    from tidings.steward.store_reading import read_store

    ctx.home.read_info()
    with output.working(f"reading the store of {ctx.home.name}"):
        report = asyncio.run(read_store(ctx.home))
    if ctx.as_json:
        output.data(report.as_dict())
    else:
        rows = [(each.stream, each.first, each.last, each.what) for each in report.found]
        output.table(("stream", "first", "last", "what"), rows, empty="nothing is damaged or missing")
    if void := report.void.total():
        output.say(f"{void} void message{'' if void == 1 else 's'}, shown to nobody: their senders were told")
    if report.wrong:
        raise UnhealthyError(
            f"{report.wrong} times something does not verify or is missing among {sum(report.read.values())} records: "
            f"{report.advice}"
        )
    output.say(f"{sum(report.read.values())} records read, none is damaged or missing")
    output.hint("tidings status")
