"""`tidings link renew`: a link that there is gets new keys, by a line for its other space alone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from tidings.cli import output
from tidings.cli.agent import listed
from tidings.cli.amounts import seconds
from tidings.cli.invitation import moment_of
from tidings.cli.link import LinkArgument, app, meant, name_of
from tidings.cli.link_words import mapping
from tidings.cli.options import HomeOption, JsonOption, Place, SpaceOption, place

if TYPE_CHECKING:
    from tidings.space.invitations import Invitation
    from tidings.space.link_ledger import AgreedLink

__all__ = ["app"]


@app.command("renew")
def renew(
    name: LinkArgument,
    expires: Annotated[str, typer.Option(help="For how long it can be accepted: 10m, 1h, 7d.", metavar="TIME")] = "1h",
    url: Annotated[str | None, typer.Option(help="Address by which they reach this space.", metavar="URL")] = None,
    space: SpaceOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a link new keys on both sides: prints a line that `tidings link accept` takes in the other space.

    For a space that was put back from a copy older than the link, and for keys that may be in other hands. What was
    agreed stays, and so does how far the link is. Only that space can accept the line; until it does the link goes on
    as it was. A line that was made before for the same is void.

    Examples:

      tidings link renew acme

      tidings link renew acme --expires 7d
    """
    where = place(space, home)
    row = meant(where, name)
    made, line = asyncio.run(_renew(where, row, seconds("--expires", expires), url))
    if as_json:
        output.data({"id": made.id, "link": row.link, "expires": moment_of(made.expires), "line": line})
        return
    output.say(
        f"link {row.link} gets new keys when {name_of(row)} accepts this by {moment_of(made.expires)}; as before they "
        f"may read {listed(tuple(row.terms.get('shares') or ()))}, you take {mapping(row.terms.get('channels') or {})}"
    )
    output.line(line)
    output.hint("tidings invitation list")


async def _renew(where: Place, row: AgreedLink, holds: int, url: str | None) -> tuple[Invitation, str]:
    from tidings.space.administration import administer
    from tidings.space.inviting import reach_of
    from tidings.space.link_inviting import LinkInviter

    async with administer(where.home, "renewing a link") as admin:
        made, line = LinkInviter(admin).renew(row, holds, reach_of(admin, url))
    return made, str(line)
