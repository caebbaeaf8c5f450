"""Which link is meant, and asking about it, for every command of `tidings link`.

What was agreed is on disk. How it is says the worker, on its socket; while none runs a command looks into the ledger
itself, and changes it itself. Nothing here writes a ledger that a worker has.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import typer

from tidings.admin.link_registry import AgreedLink, LinkLedger
from tidings.cli import completion
from tidings.cli.context import Context
from tidings.errors import StoreBusy, UsageError, WorkerUnreachable

#: seconds in which a worker that is starting takes up what is asked, and in which one answers how it is
STARTING, ANSWERS = 5.0, 3.0
#: seconds for an answer of a worker that runs, but for what takes as long as it takes
PATIENCE, LONG = 15.0, ("verify", "rebuild")
NOBODY = "no worker of links runs: `tidings up` starts one, or `tidings link run`"

LinkArgument = Annotated[
    str,
    typer.Argument(
        help="The other space as it is called here, or the link.", metavar="NAME", autocompletion=completion.links
    ),
]


def links_of(ctx: Context) -> list[AgreedLink]:
    return LinkLedger.below(ctx.home, ctx.home.read_info().id).rows()


def meant(ctx: Context, text: str) -> AgreedLink:
    """By what its space is called here, by its id, or by the beginning of either id."""
    known = links_of(ctx)
    current = [row for row in known if row.state != "off"]
    found = [row for row in current if text in (row.terms.get("space"), row.link)]
    found = found or [row for row in known if text == row.link]
    if not found and len(text) >= 4:
        found = [row for row in current if row.link.startswith(text) or row.origin.startswith(text)]
    if len(found) != 1:
        many = f"{len(found)} links are" if found else "no link is"
        raise UsageError(f"{many} meant by {text!r} in space {ctx.home.name}: `tidings link list --all` shows them")
    return found[0]


def name_of(row: AgreedLink) -> str:
    return str(row.terms.get("space") or row.link)


async def ask_links(ctx: Context, do: str, **arguments: Any) -> tuple[dict[str, Any], bool]:
    """The answer, and whether a worker gave it. One that is just starting has the ledger and does not listen yet."""
    from tidings.links.local_socket import ask
    from tidings.links.operations import alone

    deadline = time.monotonic() + STARTING
    socket, within = ctx.home.link_socket, None if do in LONG else PATIENCE
    while True:
        try:
            if within is None:  # does it answer at all?
                await ask(socket, "status", within=PATIENCE)
            return await ask(socket, do, within=within, **arguments), True
        except WorkerUnreachable as unanswered:
            try:
                async with alone(ctx.home) as operations:
                    return await operations.do(do, **arguments), False
            except StoreBusy:
                if time.monotonic() >= deadline:
                    raise unanswered from None
        await asyncio.sleep(0.1)


def asked(ctx: Context, do: str, **arguments: Any) -> tuple[dict[str, Any], bool]:
    return asyncio.run(ask_links(ctx, do, **arguments))
