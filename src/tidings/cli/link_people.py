"""`tidings link people`: who is known in a linked space, and which key a name stands for."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tidings.admin.link_registry import AgreedLink
from tidings.cli import output
from tidings.cli.context import Context, SpaceContext, YesOption
from tidings.cli.link_asking import LinkArgument, asked, meant, name_of


def people(
    ctx: SpaceContext,
    name: LinkArgument,
    trust: Annotated[
        str | None, typer.Option(help="Let a name stand for the key it has there now.", metavar="AGENT")
    ] = None,
    yes: YesOption = False,
) -> None:
    """List the agents of a linked space that are known here, as it states them; agents write to them as name@space.

    A name stays with the key it first had. If it has another one there, and its space does not say that the one took
    over from the other, nobody here can write to it until you have asked and say `--trust`: that shows both keys, so
    that you can compare the new one with what their operator tells you, and asks.

    Examples:
      tidings link people acme
      tidings link people acme --trust bob
    """
    row = meant(ctx, name)
    if trust is not None:
        changed = _trusted(ctx, row, trust, yes=yes)
        if ctx.as_json:
            output.data(changed)
        else:
            output.say(f"{trust}@{name_of(row)} is {changed['now']} from now on; it was {changed['before']}")
        return
    found, _ = asked(ctx, "people", link=row.link)
    ctx.end_if_json(found)
    rows = [(each["name"], each["roles"], each["id"], "") for each in found["people"]]
    rows += [(each["name"], each["roles"], each["id"], "another key than before") for each in found["changed"]]
    output.table(("name", "roles", "id", "note"), rows, empty=f"{name_of(row)} has told of nobody")
    first = next(iter(found["changed"]), None)
    output.hint(f"tidings link people {name_of(row)} --trust {first['name']}" if first else "tidings who")


def _trusted(ctx: Context, row: AgreedLink, agent: str, *, yes: bool) -> dict[str, Any]:
    """Of two keys the operator sees both; a third one that comes meanwhile is not meant."""
    shown, _ = asked(ctx, "trustable", link=row.link, name=agent)
    if not yes:
        output.say(f"{agent}@{name_of(row)} was {shown['before']}")
        output.say(f"{agent}@{name_of(row)} is {shown['now']} there now, which does not say that it took over")
        output.confirm(yes, "Does their operator say so too, and is it to be that one?")
    changed, _ = asked(ctx, "trust", link=row.link, name=agent, key=shown["now"])
    return changed
