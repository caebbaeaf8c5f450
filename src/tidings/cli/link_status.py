"""Links as `tidings status` tells of them: in one line, and what is wrong with them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tidings.admin.link_registry import AgreedLink
from tidings.cli import link_words
from tidings.cli.context import Context
from tidings.cli.link_asking import ANSWERS, links_of, name_of
from tidings.cli.link_words import unreached_words
from tidings.errors import TidingsError, WorkerUnreachable


def look(ctx: Context, supervised: bool) -> dict[str, Any]:
    """For `tidings status`: links in one line, and what is wrong with them. Whatever that is, the rest is shown too."""
    from tidings.links.local_socket import ask

    try:
        known = links_of(ctx)
    except TidingsError as error:
        return {
            "count": None,
            "taking": None,
            "supervised": {},
            "said": "unknown",
            "links": [],
            "problems": [str(error)],
        }
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
