"""Which link is meant, and asking about it, for `tidings link` and `tidings status`.

What was agreed is on disk. How it is says the worker, on its socket; while none runs a command looks into the ledger
itself, and changes it itself. Nothing here writes a ledger that a worker has.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from typer import Argument

from tidings.admin.link_registry import AgreedLink, LinkLedger
from tidings.cli import completion, link_words
from tidings.cli.context import Context
from tidings.cli.link_words import unreached_words
from tidings.errors import StoreBusy, TidingsError, UsageError, WorkerUnreachable

#: seconds in which a worker that is starting takes up what is asked, and in which one answers how it is
STARTING, ANSWERS = 5.0, 3.0
#: seconds for an answer of a worker that runs, but for what takes as long as it takes
PATIENCE, LONG = 15.0, ("verify", "rebuild")
NOBODY = "no worker of links runs: `tidings up` starts one, or `tidings link run`"

LinkArgument = Annotated[
    str,
    Argument(help="The other space by its name here, or the link.", metavar="NAME", autocompletion=completion.links),
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


async def _ask(ctx: Context, do: str, **arguments: Any) -> tuple[dict[str, Any], bool]:
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
    return asyncio.run(_ask(ctx, do, **arguments))


def summarise_links(ctx: Context, supervised: bool) -> dict[str, Any]:
    """For `tidings status`: links in one line, and what is wrong with them. Whatever that is, the rest is shown too."""
    from tidings.links.local_socket import ask

    try:
        known = links_of(ctx)
    except TidingsError as error:
        unknown: dict[str, Any] = {"count": None, "taking": None, "supervised": {}, "said": "unknown", "links": []}
        return unknown | {"problems": [str(error)]}
    wanted = [row for row in known if row.state in ("on", "setting")]
    taking = [row for row in wanted if row.takes(time.time())]
    wrong = [*_ended_unasked(known), *_unreachable(ctx, taking)]
    told = ctx.home.read_state().get("links") or {}
    facts: dict[str, Any] = {"count": len(wanted), "taking": len(taking), "supervised": told, "said": "", "links": []}
    if not wanted:
        return facts | {"problems": wrong}
    try:
        found = asyncio.run(ask(ctx.home.link_socket, "status", within=ANSWERS))["links"]
        shown = [each for each in found if each["state"] in ("on", "setting")]
        facts["links"] = [{"space": each["space"], "state": link_words.state(each)} for each in shown]
        said = ", ".join(map(_in_words, shown))
        ended = [each["space"] for each in facts["links"] if each["state"] == "ended there"]
        wrong += [link_words.ended_there_words(name) for name in ended]
        return facts | {"runs": True, "said": said, "problems": wrong}
    except TidingsError as error:
        runs = not isinstance(error, WorkerUnreachable)
        facts |= {
            "runs": runs,
            "said": f"{len(wanted)} agreed, not carried: nothing comes in over {len(taking)} of them",
        }
        if not taking:
            return facts | {"said": f"{len(wanted)} agreed, nothing comes in over them", "problems": wrong}
        why = error if runs else told.get("why") or error
        shared = "1 linked space shares" if len(taking) == 1 else f"{len(taking)} linked spaces share"
        problem = f"what {shared} is not carried: {why}; `tidings logs links` says more"
        return facts | {"problems": [*wrong, problem] if runs or (supervised and told) else wrong}


def _in_words(link: dict[str, Any]) -> str:
    live, differs = link["live"] or {}, link_words.differing(link)
    if live.get("share") and live["spent"] >= live["share"]:
        return f"{link['space']} {link_words.state(link)} (let in within a day: {link_words.share(link)})"
    return f"{link['space']} {link_words.state(link)}" + (f" (differs: {differs})" if differs else "")


def _ended_unasked(known: list[AgreedLink]) -> list[str]:
    """Links that were ended for them, until their owner has seen it, or agreed on another one with that space."""
    on = {row.origin for row in known if row.state in ("on", "setting")}
    return [
        f"the link with {name_of(row)} was ended: {row.why}; invite again, or `tidings link remove {row.link}` once "
        "you have seen to it"
        for row in known
        if row.why and row.state in ("ending", "off") and row.origin not in on
    ]


def _unreachable(ctx: Context, taking: list[AgreedLink]) -> list[str]:
    """Links that take something in, and of which it is not known here where their space is."""
    from tidings.admin.link_peers import LinkPeers

    peers = LinkPeers.below(ctx.home)
    return [
        f"nothing comes from {name_of(row)}: {unreached_words(name_of(row))}"
        for row in taking
        if row.state == "on" and not peers.creds(row.link).exists()
    ]
