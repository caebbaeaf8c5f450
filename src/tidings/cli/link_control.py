"""`tidings link pause`, `resume`, `remove` and `run`: whether a link goes on, and who carries it."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated

import typer

from tidings.admin.link_registry import AgreedLink
from tidings.cli import output
from tidings.cli.amounts import seconds
from tidings.cli.context import Context, PlainSpaceContext, SpaceContext, YesOption
from tidings.cli.link_asking import NOBODY, LinkArgument, ask_links, asked, meant, name_of
from tidings.errors import UsageError

#: between two looks with --poll
EVERY = "30s"


def pause(
    ctx: SpaceContext,
    name: LinkArgument,
    reason: Annotated[str, typer.Option(help="Why, for whoever looks.")] = "paused by the operator",
) -> None:
    """Take nothing more in over a link until `resume`. What it shares, the other space still reads.

    Examples:
      tidings link pause acme
      tidings link pause acme --reason "their agents flood general"
    """
    row = meant(ctx, name)
    answer, by_worker = asked(ctx, "pause", link=row.link, reason=reason)
    ctx.end_if_json({"link": row.link, "paused": reason, "was": answer["was"], "worker": by_worker})
    output.say(
        f"link with {name_of(row)} is paused: nothing comes in over it, and it goes on where it was when resumed"
    )
    output.hint(f"tidings link resume {name_of(row)}")


def resume(ctx: SpaceContext, name: LinkArgument) -> None:
    """Go on with a link that was paused, where it was.

    Examples:
      tidings link resume acme
    """
    row = meant(ctx, name)
    answer, by_worker = asked(ctx, "resume", link=row.link)
    ctx.end_if_json({"link": row.link, "was": answer["was"], "worker": by_worker})
    was = "goes on" if answer["was"] is not None else "was not paused"
    output.say(f"link with {name_of(row)} {was}")
    if not by_worker:
        output.say(NOBODY)
    output.hint(f"tidings link show {name_of(row)} --follow")


def remove(ctx: SpaceContext, name: LinkArgument, yes: YesOption = False) -> None:
    """End a link on this side: nothing comes in, the other space reads nothing more, and its ledger is deleted.

    Messages that came over it stay. The operator of the other space ends it there with the same command.

    Examples:
      tidings link remove acme
      tidings link remove acme --yes
    """
    row = meant(ctx, name)
    output.confirm(yes, f"End the link with {name_of(row)}?")
    ended = asyncio.run(_remove(ctx, row))
    ctx.end_if_json({"link": row.link, "space": name_of(row), "state": ended.state})
    output.say(
        f"the link with {name_of(row)} is ended here: its user is cut, and nothing comes in. What came over it stays. "
        "The operator of the other space should remove it there too"
    )
    if ended.state == "ending":
        output.say("the steward does not answer: the record that says so is written when it does (`tidings status`)")
    output.hint("tidings link list --all")


async def _remove(ctx: Context, row: AgreedLink) -> AgreedLink:
    """The user and the record first; then nothing is left that could start it again; then the ledger."""
    from tidings.admin.administration import administer
    from tidings.admin.link_peers import LinkPeers
    from tidings.admin.linking import Linker

    async with administer(ctx.home, "ending a link") as admin:
        ended = await Linker(admin).end(row.link)
    LinkPeers.below(ctx.home).forget(row.link)
    await ask_links(ctx, "forget", link=row.link)
    return ended


def run(
    ctx: PlainSpaceContext,
    poll: Annotated[
        bool, typer.Option("--poll", help="Look every so often, instead of hearing of what is new.")
    ] = False,
    every: Annotated[
        str | None,
        typer.Option(help=f"How often to look with --poll: 30s, 5m, 1h; {EVERY} if not said.", metavar="TIME"),
    ] = None,
) -> None:
    """Carry the links of a space in the foreground until Ctrl-C: the worker that `tidings up` starts, alone.

    One worker carries at a time: start the space with `tidings up --no-links` first.

    Examples:
      tidings link run
      tidings link run --poll --every 5m
    """
    ctx.home.read_info()
    if every is not None and not poll:
        raise UsageError(
            "--every says how often --poll looks: say --poll too, or neither to hear of what is new at once"
        )
    pause = float(seconds("--every", every or EVERY)) if poll else None
    if pause is not None and pause < 1:
        raise UsageError("--every is at least a second")
    asyncio.run(_run(ctx, pause))
    output.say("links are not carried now; what was taken over stays, and the rest waits in the other spaces")


async def _run(ctx: Context, every: float | None) -> None:
    from tidings.links.replicator import Mode
    from tidings.links.worker import LinkWorker

    ctx.home.make()
    worker = LinkWorker(ctx.home, mode=Mode(every), tell=output.say)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, worker.stop)
    how = "hears of what is new" if every is None else f"looks every {every:.0f} s"
    running = asyncio.create_task(worker.run())
    ready = asyncio.create_task(worker.ready.wait())
    await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        output.say(f"links of space {ctx.home.name} are carried; the worker {how}. Ctrl-C stops it.")
    ready.cancel()
    await running
