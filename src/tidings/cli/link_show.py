"""`tidings link list` and `tidings link show`: how links are, and what happens on one."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, Any

import typer

from tidings.admin.link_registry import AgreedLink
from tidings.cli import link_words, output
from tidings.cli.context import Context, SpaceContext
from tidings.cli.link_asking import ANSWERS, NOBODY, LinkArgument, asked, links_of, meant, name_of
from tidings.errors import TidingsError, WorkerUnreachable


def list_links(
    ctx: SpaceContext, every: Annotated[bool, typer.Option("--all", help="Those that ended too.")] = False
) -> None:
    """List the links of a space, and how each is.

    Examples:
      tidings link list
      tidings link list --all --json
    """
    links, by_worker = _status(ctx)
    links = [each for each in links if every or each["state"] in ("on", "setting")]
    ctx.end_if_json([{**each, "shown": link_words.state(each)} for each in links])
    rows = [
        (
            each["space"] or "-",
            each["link"],
            link_words.state(each),
            (each["live"] or {}).get("connectivity"),
            link_words.lag(each),
            link_words.push_lag(each),
            link_words.mapping(each["channels"]),
            each["shares"],
        )
        for each in links
    ]
    output.table(
        ("space", "link", "state", "connection", "behind", "they are behind", "takes in", "shares"),
        rows,
        empty=f"space {ctx.home.name} has no links",
    )
    if not by_worker and any(each["takes"] for each in links):
        output.say(NOBODY)
    for each in links:
        if link_words.state(each) == "ended there":
            output.say(link_words.ended_there_words(each["space"] or each["link"]))
    output.hint("tidings link show NAME" if rows else "tidings link --help")


def _status(ctx: Context) -> tuple[list[dict[str, Any]], bool]:
    """Of all links; a space that never had one is asked nothing."""
    if not links_of(ctx):
        return [], False
    answer, by_worker = asked(ctx, "status")
    if not by_worker:
        _add_pushes(ctx, answer["links"])
    if by_worker and answer["steward"]:
        output.say(f"note: which links are in force is not known to the worker: {answer['steward']}")
    return answer["links"], by_worker


def _add_pushes(ctx: Context, links: list[dict[str, Any]]) -> None:
    """How far the others are with what is shared, as the steward says; without a worker it is asked itself."""
    from tidings.links.destination import LocalSpace

    async def look() -> dict[str, dict[str, Any] | None]:
        local = LocalSpace(ctx.home.read_info().url, ctx.home.link_creds, ctx.home.name)
        try:
            async with asyncio.timeout(ANSWERS):
                found = (await local.links()).links
        finally:
            await local.close()
        return {each.record.link: each.push.facts(time.time()) if each.push is not None else None for each in found}

    if not any(each["shares"] and each["state"] == "on" for each in links):
        return
    with suppress(TidingsError, TimeoutError, OSError):
        told = asyncio.run(look())
        for each in links:
            each["push"] = told.get(each["link"])


def show(
    ctx: SpaceContext,
    name: LinkArgument,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on and print what happens, until Ctrl-C.")] = False,
) -> None:
    """Show everything about a link: what passes, how far it is, what was left out and why.

    `--follow` prints how it catches up and every change of its state; with `--json` one object a line.

    Examples:
      tidings link show acme
      tidings link show acme --follow
    """
    row = meant(ctx, name)
    if follow:
        asyncio.run(_follow(ctx, row, ctx.as_json))
        return
    answer, by_worker = asked(ctx, "status", link=row.link, whole=True)
    facts = answer["links"][0]
    if not by_worker:
        _add_pushes(ctx, [facts])
    ctx.end_if_json({**facts, "shown": link_words.state(facts), "worker": by_worker})
    output.table(("what", "value"), link_words.rows(facts, time.time()), empty="")
    if not by_worker and facts["takes"]:
        output.say(NOBODY)
    if by_worker and answer["steward"]:
        output.say(f"note: which links are in force is not known to the worker: {answer['steward']}")
    output.hint(f"tidings link verify {name_of(row)}" if facts["ledger"] else "tidings link list")


async def _follow(ctx: Context, row: AgreedLink, as_json: bool) -> None:
    from tidings.links.local_socket import follow

    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)

    async def tell() -> None:
        async for said in follow(ctx.home.link_socket, "follow", link=row.link):
            output.line(json.dumps(said) if as_json else link_words.event(said))
            output.flush()
            if said["event"] == "not_carried":
                return

    await _until(stopping, tell)


async def _until(stopping: asyncio.Event, work: Callable[[], Awaitable[None]]) -> None:
    """Work that ends by itself, or is broken off; what it raised is told."""
    working = asyncio.ensure_future(work())
    told = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({working, told}, return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if working.done():
        try:
            working.result()
        except WorkerUnreachable as error:
            raise WorkerUnreachable(f"{error}: `tidings up` starts one, or `tidings link run`") from error
        return
    working.cancel()
    await asyncio.wait({working})
