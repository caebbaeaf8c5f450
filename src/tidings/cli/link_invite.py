"""`tidings link invite` and `tidings link accept`: two operators agree on a link, by one line to paste."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidings.admin.agents import as_patterns
from tidings.cli import output
from tidings.cli.agent import listed
from tidings.cli.amounts import seconds
from tidings.cli.context import Context, SpaceContext, YesOption
from tidings.cli.invitation import moment_of, read_line
from tidings.errors import UsageError
from tidings.wire.names import unmarked

if TYPE_CHECKING:
    from tidings.admin.invitations import Invitation
    from tidings.admin.link_accepting import AcceptedLink, Proposal
    from tidings.admin.link_inviting import LinkTerms
    from tidings.wire.rulings import Link

UrlOption = Annotated[
    list[str] | None, typer.Option("--url", help="Address by which they reach this space.", metavar="URL")
]
UntilOption = Annotated[str | None, typer.Option(help="For how long the link is, such as 90d.", metavar="TIME")]


def invite(
    ctx: SpaceContext,
    name: Annotated[
        str | None, typer.Argument(help="What to call their space here; without, by its own name.", metavar="NAME")
    ] = None,
    share: Annotated[
        list[str] | None, typer.Option("--share", help="Channel or pattern of yours that they may read.")
    ] = None,
    take: Annotated[
        list[str] | None,
        typer.Option("--take", help="Channel or pattern of theirs, and its name here.", metavar="THEIRS[=OURS]"),
    ] = None,
    both: Annotated[
        list[str] | None, typer.Option("--both", help="Share it, and take theirs of the same name.", metavar="PATTERN")
    ] = None,
    expires: Annotated[str, typer.Option(help="For how long it can be accepted: 10m, 1h, 7d.", metavar="TIME")] = "1h",
    until: UntilOption = None,
    hops: Annotated[
        int, typer.Option(help="Links a message may come over, this one too; from 2 on others' words go on to them.")
    ] = 1,
    direct: Annotated[
        bool, typer.Option("--direct", help="Agents of both may write to each other; with --roster.")
    ] = False,
    tasks: Annotated[
        bool, typer.Option("--tasks", help="Agents of both may ask roles of the other (reviewer@space); with --roster.")
    ] = False,
    roster: Annotated[bool, typer.Option("--roster", help="Each space tells the other who its agents are.")] = False,
    url: Annotated[str | None, typer.Option(help="Address by which they reach this space.", metavar="URL")] = None,
) -> None:
    """Offer a link to the operator of another space: prints a line that `tidings link accept` takes there.

    Whoever has the line may link their space with yours, once, for what it offers and nothing else: give it to one
    person, by a way you trust. They may take less. The space must listen for other machines (`tidings up --listen
    ADDR`); one that does not can only be linked with a space on its own machine.

    Examples:
      tidings link invite --both general                       one channel in common
      tidings link invite acme --both general --direct         and agents write to each other as name@space
      tidings link invite acme --both general --tasks          and ask roles of each other, reviewer@space
      tidings link invite acme --share announcements --take 'team.>=acme.team.>' --until 90d
      tidings invitation list                                  and `invitation revoke acme` takes it back
    """
    terms = _terms(name, share, take, both, until, hops, direct=direct, roster=roster, tasks=tasks)
    made, line, info = asyncio.run(_invite(ctx, terms, seconds("--expires", expires), url))
    promise = made.link
    assert promise is not None
    ctx.end_if_json({"id": made.id, "link": promise.link, "expires": moment_of(made.expires), "line": line})
    whom = terms.called or "the space that accepts"
    output.say(
        f"link {promise.link}: {whom} may read {listed(terms.shares)}, you take {_taken(terms.takes or {})}; accepted "
        f"by {moment_of(made.expires)}"
    )
    if not (info.listen or info.ws or info.servers):
        output.say(
            "note: this space listens on this machine only, and so the line works here; `tidings up --listen ADDR`"
        )
    output.line(line)
    output.hint("tidings invitation list")


def _terms(
    name: str | None,
    share: list[str] | None,
    take: list[str] | None,
    both: list[str] | None,
    until: str | None,
    hops: int,
    *,
    direct: bool,
    roster: bool,
    tasks: bool,
) -> LinkTerms:
    from tidings.admin.link_inviting import LinkTerms
    from tidings.wire.links import MOST_HOPS

    if not 1 <= hops <= MOST_HOPS:
        raise UsageError(f"a message comes over 1 to {MOST_HOPS} links: `--hops 1`")
    common = as_patterns(both or ())
    takes = channel_names("--take", take)
    if twice := [each for each in common if each in takes]:
        raise UsageError(f"{twice[0]} is in --both and in --take: it can have one name here")
    return LinkTerms(
        shares=tuple(dict.fromkeys((*as_patterns(share or ()), *common))),
        takes={**takes, **{each: each for each in common}},
        called=name or "",
        until=_until(until),
        hops=hops,
        direct="on" if direct else "off",
        roster="on" if roster or direct or tasks else "off",  # who is there has to be known to be reached
        tasks="on" if tasks else "off",
    )


def channel_names(option: str, given: list[str] | None, *, both: bool = False) -> dict[str, str]:
    """`THEIRS=OURS`, or `THEIRS` for the same name, several in one with commas between."""
    found: dict[str, str] = {}
    for each in (part.strip() for text in given or () for part in text.split(",")):
        theirs, equals, ours = (unmarked(part.strip()) for part in each.partition("="))
        if not theirs or (equals and not ours) or (both and not equals):
            raise UsageError(
                f"{option} {each!r}: name their channel and what it is called here, `{option} THEIRS=OURS`"
            )
        if theirs in found:
            raise UsageError(f"{option}: {theirs} is named twice, and can have one name here")
        found[theirs] = ours or theirs
    return found


def _until(text: str | None) -> int | None:
    return None if text is None else int(time.time()) + seconds("--until", text)


async def _invite(ctx: Context, terms: LinkTerms, holds: int, url: str | None) -> tuple[Invitation, str, Any]:
    from tidings.admin.administration import administer
    from tidings.admin.inviting import reach_of
    from tidings.admin.link_inviting import LinkInviter

    async with administer(ctx.home, "inviting to a link") as admin:
        made, line = LinkInviter(admin).invite(terms, holds, reach_of(admin, url))
        return made, str(line), admin.info


def accept(
    ctx: SpaceContext,
    line: Annotated[
        str | None, typer.Argument(help="The line; without, it is read from standard input.", metavar="LINE")
    ] = None,
    called: Annotated[
        str | None, typer.Option("--as", help="What to call their space here; else by its own name.", metavar="NAME")
    ] = None,
    take: Annotated[
        list[str] | None,
        typer.Option("--take", help="What a channel of theirs is called here.", metavar="THEIRS=OURS"),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Take only this of what they share; '' for nothing.", metavar="PATTERN"),
    ] = None,
    share: Annotated[
        list[str] | None,
        typer.Option("--share", help="Share only this of what they ask for; '' for nothing.", metavar="PATTERN"),
    ] = None,
    until: UntilOption = None,
    no_direct: Annotated[bool, typer.Option("--no-direct", help="No direct messages, if they offer them.")] = False,
    no_tasks: Annotated[bool, typer.Option("--no-tasks", help="No tasks, if they offer them.")] = False,
    no_roster: Annotated[
        bool, typer.Option("--no-roster", help="No roster, if they offer it; then no direct messages or tasks either.")
    ] = False,
    url: UrlOption = None,
    yes: YesOption = False,
) -> None:
    """Link this space with the one that made the line. You are shown what would pass, and asked.

    You may give channels of theirs other names here, take less than they share and share less than they ask for; never
    more. What you take is fetched from there; what they take of yours they fetch from here, so this space must be
    reachable for them (`tidings up --listen ADDR`). If you are interrupted, accept the same line again.

    Examples:
      tidings link accept 'tidings:main@192.0.2.7:4222#AUEk...' --as acme
      tidings link accept --take general=acme.general          asks for the line, or reads it from a pipe
      tidings link accept LINE --only news --share ''          take one channel, share nothing
    """
    from tidings.admin.link_accepting import LinkWishes, accept_link
    from tidings.wire.invitations import check_kind, parse_invitation

    if ctx.as_json and not yes:
        raise UsageError("--json asks nobody: say --yes with it")
    if line in (None, "-") and not yes and not sys.stdin.isatty():
        raise UsageError("the line is read from where you would be asked: name it in the command, or say --yes")
    invited = parse_invitation(read_line(line))
    check_kind(invited, for_link=True)
    wishes = LinkWishes(
        called=called or "",
        names=channel_names("--take", take, both=True),
        only=None if only is None else as_patterns(only),
        share=None if share is None else as_patterns(share),
        until=_until(until),
        direct=not (no_direct or no_roster),
        roster=not no_roster,
        tasks=not (no_tasks or no_roster),
        urls=tuple(url or ()),
    )
    found = asyncio.run(
        accept_link(ctx.home, invited, wishes, lambda proposal: _agree(ctx, proposal, yes=yes), output.say)
    )
    _report(ctx, found, as_json=ctx.as_json)


def _agree(ctx: Context, proposal: Proposal, *, yes: bool) -> None:
    """Show what would pass, and ask."""
    offer, record = proposal.offer, proposal.record
    output.say(f"space {offer.space} offers a link with {ctx.home.name}; its id is {offer.space_id}")
    output.say(f"  its steward's key is {offer.steward}")
    for text in _words(record, offer.shares, offer.wants):
        output.say(f"  {text}")
    if not proposal.url and record.shares:
        output.say(f"note: {_nowhere(record.space)}")
    output.confirm(yes, "Link the two?")


def _words(record: Link, offered: tuple[str, ...], wanted: tuple[str, ...]) -> list[str]:
    """What a link lets pass, for people."""
    less = f", of {listed(offered)}" if set(record.channels) != set(offered) else ""
    fewer = f", and ask for {listed(wanted)}" if set(record.shares) != set(wanted) else ""
    return [
        f"you take {_taken(record.channels)}{less}",
        f"they may read {listed(record.shares)} of yours{fewer}",
        f"it is called {record.space} here, and ends {moment_of(record.until) if record.until else 'when you end it'}",
        f"direct messages: {'on' if record.passes_mail else 'off'}; tasks for roles of each other: "
        f"{'on' if record.passes_tasks else 'off'}; each tells the other who its agents are: {record.roster}",
        f"links a message may come over: {record.hops}",
    ]


def _taken(channels: dict[str, str]) -> str:
    return ", ".join(each if each == ours else f"{each} as {ours}" for each, ours in channels.items()) or "nothing"


def _nowhere(name: str) -> str:
    return (
        f"{name} has no address of this space, so what you share does not get there; what you take works. Let this "
        "space listen (`tidings up --listen ADDR`), or say where it is found (--url), and then accept"
    )


def _report(ctx: Context, found: AcceptedLink, *, as_json: bool) -> None:
    record = found.record
    if as_json:
        output.data(
            {
                "link": record.link,
                "space": record.space,
                "space_id": record.origin,
                "known_as": found.known_as,
                "channels": record.channels,
                "shares": list(record.shares),
                "until": moment_of(record.until) if record.until else None,
                "url": found.peer.address,
                "reached": not record.shares or (bool(found.url) and not found.unreached),
            }
        )
        return
    if found.already:
        output.say("this line was accepted before, and the link is there")
    output.say(
        f"space {ctx.home.name} is linked with {record.space} ({found.peer.address}), which calls it "
        f"{found.known_as}: you take {_taken(record.channels)}, they may read {listed(record.shares)}"
    )
    if not found.url and record.shares:
        output.say(f"note: {_nowhere(record.space)}; to change it, remove the link on both sides and invite again")
    elif found.unreached:
        output.say(
            f"note: {record.space} tried to reach this space and could not ({found.unreached}): what you share gets "
            "there once it can"
        )
    output.line(record.link)
    output.hint("tidings link list")
