"""`tidings link verify` and `tidings link rebuild`: is all here that should be, and read again what is not."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated

import typer

from tidings.cli import completion, link_words, output
from tidings.cli.context import Context, SpaceContext, YesOption
from tidings.cli.link_asking import NOBODY, PATIENCE, LinkArgument, asked, meant, name_of
from tidings.errors import BrokerUnreachable, UsageError, WorkerUnreachable

#: seconds in which a worker that was told to leave has done so
LEAVING = 20.0
DIFFERS = 3


def verify(ctx: SpaceContext, name: LinkArgument) -> None:
    """Compare what the other space shares with what came, by digests: equal, or what differs. Exit code 3 if it does.

    Records that were left out or are in quarantine are accounted for. What is not here and should be is fetched by the
    worker.

    Examples:
      tidings link verify acme
      tidings link verify acme --json
    """
    row = meant(ctx, name)
    try:
        with output.working(f"comparing with {name_of(row)}"):
            answer, by_worker = asked(ctx, "verify", link=row.link)
    except BrokerUnreachable as error:
        raise BrokerUnreachable(
            f"{error}. The link with {name_of(row)} is compared while both spaces are up; what is new there comes by "
            "itself once they are"
        ) from error
    if ctx.as_json:
        output.data({"link": row.link, **answer})
    else:
        for words in link_words.verified(name_of(row), answer):
            output.line(words)
        if answer["lacking"] or answer["lost"]:
            output.say("the worker fetches what is not here" if by_worker else NOBODY)
    if not answer["equal"] or answer["lost"]:
        raise typer.Exit(DIFFERS)
    output.hint(f"tidings link show {name_of(row)}")


def rebuild(
    ctx: SpaceContext,
    name: Annotated[
        str | None,
        typer.Argument(
            help="The other space as it is called here, or the link.", metavar="NAME", autocompletion=completion.links
        ),
    ] = None,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Begin a new ledger for all links: when `links.db` is damaged.")
    ] = False,
    yes: YesOption = False,
) -> None:
    """Forget how far a link is, and read all again that the other space still has.

    Messages that are here already, or were until this space removed them by age, do not come twice. Records in
    quarantine stay there, since the other space may have them no more, and are tried again at once. `--ledger` does it
    for all links, and works when the ledger cannot be read any more: the file is set aside as `links.db.aside`, with
    the only copies of what was in quarantine and is gone there. Links that were paused go on then, records that were
    given up are in quarantine again, and which key a name like bob@acme stands for is learnt anew: look at `tidings
    link people`. Messages that this space had removed by age come again, if the others still have them: only the ledger
    knew of those.

    Examples:
      tidings link rebuild acme --yes
      tidings link rebuild --ledger
    """
    if bool(name) == ledger:
        raise UsageError("say which link to read again, or --ledger for all of them, and not both")
    if ledger:
        _rebuild_all(ctx, yes=yes, as_json=ctx.as_json)
        return
    row = meant(ctx, name or "")
    output.confirm(yes, f"Read everything of {name_of(row)} again?")
    answer, by_worker = asked(ctx, "rebuild", link=row.link)
    ctx.end_if_json({"link": row.link, **answer, "worker": by_worker})
    kept = f"; {answer['quarantined']:,} in quarantine are tried again" if answer.get("quarantined") else ""
    output.say(f"link with {name_of(row)} begins anew; it had handled {answer['handled']:,} of the other log{kept}")
    if not by_worker:
        output.say(NOBODY)
    output.hint(f"tidings link show {name_of(row)} --follow")


def _rebuild_all(ctx: Context, *, yes: bool, as_json: bool) -> None:
    from tidings.links.local_socket import ask
    from tidings.links.store_file import set_ledger_aside

    ctx.home.read_info()
    output.confirm(yes, "Begin a new ledger, and read everything of all links again?")
    with suppress(WorkerUnreachable):  # whoever keeps it running starts it again
        asyncio.run(ask(ctx.home.link_socket, "leave", within=PATIENCE))
    aside = set_ledger_aside(ctx.home, LEAVING)
    if as_json:
        output.data({"aside": str(aside) if aside is not None else None})
        return
    output.say(f"the ledger was set aside as {aside}" if aside is not None else "there was no ledger")
    output.say("links are read again from their beginning; `tidings up` or `tidings link run` carries them")
    output.hint("tidings link list")
