"""`tidings link invite`, `accept`, `set` and `renew`: what two operators agree on.

Two operators agree on a link by one line to paste. What a space takes and what it lets others read is its own record,
so each operator changes that alone and at once. More passes when both have said so: one shares it, the other takes it.
New keys need both, by a line for the other space.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from typer import Argument, Option

from tidings.admin.agents import as_patterns
from tidings.cli import output
from tidings.cli.agent import listed
from tidings.cli.connection import administer
from tidings.cli.context import Context, Names, SpaceContext, YesOption, seconds
from tidings.cli.invitation import make_line, read_line
from tidings.cli.link_words import LinkArgument, call_worker, links_of, mapping, meant, name_of
from tidings.contract.link_worker import ListLinksRequest, RefreshRequest
from tidings.errors import InvalidName, OutcomeUnknown, TidingsError, UnreachableError, UsageError
from tidings.wire.names import covers_any, unmarked
from tidings.wire.signing import public_bytes

if TYPE_CHECKING:
    from tidings.admin.link_accepting import AcceptedLink, Proposal
    from tidings.admin.link_registry import AgreedLink
    from tidings.wire.rulings import Link

UrlOption = Annotated[Names, Option("--url", help="Address at which they reach this space.", metavar="URL")]
UntilOption = Annotated[str | None, Option(help="Lifetime of the link, such as 90d (no end).", metavar="TIME")]


def invite(
    ctx: SpaceContext,
    name: Annotated[str | None, Argument(help="Local name of their space (its own).", metavar="NAME")] = None,
    share: Annotated[Names, Option(help="Channel or pattern of yours that they may read.")] = None,
    take: Annotated[Names, Option(help="Channel or pattern to import, local name.", metavar="THEIRS[=OURS]")] = None,
    both: Annotated[Names, Option(help="Channel or pattern to share and to import.", metavar="PATTERN")] = None,
    expires: Annotated[str, Option(help="Lifetime of the line: 10m, 1h, 7d.", metavar="TIME")] = "1h",
    until: UntilOption = None,
    hops: Annotated[int, Option(help="Links a message may cross; 2 or more: forward others'.")] = 1,
    direct: Annotated[bool, Option("--direct", help="Agents of both may write to each other (adds --roster).")] = False,
    tasks: Annotated[bool, Option("--tasks", help="Agents of both may ask the other's roles (adds --roster).")] = False,
    roster: Annotated[bool, Option("--roster", help="Both spaces share their directory of agents.")] = False,
    url: Annotated[str | None, Option(help="Address at which they reach this space.", metavar="URL")] = None,
) -> None:
    """Offer a link to the operator of another space. Prints a line to paste into `tidings link accept` there.

    The line lets its holder link one space with yours, once, on the offered terms or on narrower ones. Give it to one
    person, over a channel you trust. Your space must listen for other machines (`tidings up --listen ADDR`); else it
    can only be linked with a space on its own machine.

    Examples:
      tidings link invite --both general                       one channel in common
      tidings link invite acme --both general --direct         and agents write to each other as name@space
      tidings link invite acme --both general --tasks          and ask roles of each other, reviewer@space
      tidings link invite acme --share announcements --take 'team.>=acme.team.>' --until 90d
      tidings invitation list                                  and `invitation revoke acme` takes it back
    """
    from tidings.admin.link_inviting import LinkInviter, LinkTerms
    from tidings.wire.links import MOST_HOPS

    if not 1 <= hops <= MOST_HOPS:
        raise UsageError(f"a message comes over 1 to {MOST_HOPS} links: `--hops 1`")
    common = as_patterns(both or ())
    takes = channel_names("--take", take)
    if twice := [each for each in common if each in takes]:
        raise UsageError(f"{twice[0]} is in --both and in --take: it can have one name here")
    terms = LinkTerms(
        shares=tuple(dict.fromkeys((*as_patterns(share or ()), *common))),
        takes={**takes, **{each: each for each in common}},
        called=name or "",
        until=_until(until),
        hops=hops,
        direct="on" if direct else "off",
        roster="on" if roster or direct or tasks else "off",  # who is there has to be known to be reached
        tasks="on" if tasks else "off",
    )
    holds = seconds("--expires", expires)
    made, line = make_line(ctx, "inviting to a link", url, lambda a, reach: LinkInviter(a).invite(terms, holds, reach))
    promise = made.link
    assert promise is not None
    ctx.end_if_json({"id": made.id, "link": promise.link, "expires": output.moment(made.expires), "line": line})
    whom = terms.called or "the space that accepts"
    taken, by = mapping(terms.takes or {}, "nothing"), output.moment(made.expires)
    output.say(f"link {promise.link}: {whom} may read {listed(terms.shares)}, you take {taken}; accepted by {by}")
    output.line(line)
    output.hint("tidings invitation list")


def channel_names(option: str, given: Names, *, both: bool = False) -> dict[str, str]:
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


def accept(
    ctx: SpaceContext,
    line: Annotated[str | None, Argument(help="The line (default: from standard input).", metavar="LINE")] = None,
    called: Annotated[str | None, Option("--as", help="Local name of their space (its own).", metavar="NAME")] = None,
    take: Annotated[Names, Option(help="Local name of one of their channels.", metavar="THEIRS=OURS")] = None,
    only: Annotated[Names, Option(help="Import only this; '' for nothing (all they share).", metavar="PATTERN")] = None,
    share: Annotated[Names, Option(help="Share only this; '' for nothing (all they ask).", metavar="PATTERN")] = None,
    until: UntilOption = None,
    no_direct: Annotated[bool, Option("--no-direct", help="Refuse direct messages.")] = False,
    no_tasks: Annotated[bool, Option("--no-tasks", help="Refuse tasks.")] = False,
    no_roster: Annotated[bool, Option("--no-roster", help="Refuse the roster, direct messages and tasks.")] = False,
    url: UrlOption = None,
    yes: YesOption = False,
) -> None:
    """Link this space with the one that made the line. Shows what would pass, and asks for confirmation.

    You may rename their channels, import less than they share and share less than they ask for, never more. Each space
    fetches what it imports from the other, so they must be able to reach this space (`tidings up --listen ADDR`). If
    you are interrupted, accept the same line again.

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
    _report(ctx, found)


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
    ends = output.moment(record.until) if record.until else "when you end it"
    return [
        f"you take {mapping(record.channels, 'nothing')}{less}",
        f"they may read {listed(record.shares)} of yours{fewer}",
        f"it is called {record.space} here, and ends {ends}",
        f"direct messages: {'on' if record.passes_mail else 'off'}; tasks for roles of each other: "
        f"{'on' if record.passes_tasks else 'off'}; each tells the other who its agents are: {record.roster}",
        f"links a message may come over: {record.hops}",
    ]


def _nowhere(name: str) -> str:
    return (
        f"{name} has no address of this space, so what you share does not get there; what you take works. Let this "
        "space listen (`tidings up --listen ADDR`), or say where it is found (--url), and then accept"
    )


def _report(ctx: Context, found: AcceptedLink) -> None:
    record = found.record
    ctx.end_if_json(
        {
            "link": record.link,
            "space": record.space,
            "space_id": record.origin,
            "known_as": found.known_as,
            "channels": record.channels,
            "shares": list(record.shares),
            "until": output.moment(record.until) if record.until else None,
            "url": found.peer.address,
            "reached": not record.shares or (bool(found.url) and not found.unreached),
        }
    )
    if found.already:
        output.say("this line was accepted before, and the link is there")
    output.say(
        f"space {ctx.home.name} is linked with {record.space} ({found.peer.address}), which calls it "
        f"{found.known_as}: you take {mapping(record.channels, 'nothing')}, they may read {listed(record.shares)}"
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


#: characters of a space's id that name it, at least
SHORTEST_ID = 6
#: what passes beside channels, and what it is called
SWITCH_WORDS = (
    ("direct", "direct messages"),
    ("roster", "each tells the other who its agents are"),
    ("tasks", "tasks for roles of each other"),
)


def change(
    ctx: SpaceContext,
    name: LinkArgument,
    share: Annotated[Names, Option(help="All that they may read; '' for nothing.", metavar="PATTERN")] = None,
    take: Annotated[Names, Option(help="All that you import; '' for nothing.", metavar="THEIRS[=OURS]")] = None,
    beyond: Annotated[
        Names,
        Option(help="Channels to import of a space behind theirs; '' for nothing.", metavar="SPACE:THEIRS[=OURS]"),
    ] = None,
    hops: Annotated[int | None, Option(help="Links a message may cross; 2 or more: forward others'.")] = None,
    until: Annotated[str | None, Option(help="Lifetime from now, such as 90d; or never.", metavar="TIME")] = None,
    direct: Annotated[
        bool | None, Option("--direct/--no-direct", help="Agents of both may write to each other (adds --roster).")
    ] = None,
    tasks: Annotated[
        bool | None, Option("--tasks/--no-tasks", help="Agents of both may ask the other's roles (adds --roster).")
    ] = None,
    roster: Annotated[
        bool | None, Option("--roster/--no-roster", help="Share your directory of agents; mail and tasks need it.")
    ] = None,
    yes: YesOption = False,
) -> None:
    """Change what passes over a link, on this side and at once.

    Each given option replaces its earlier value; the others stay. More passes once the other operator has made the
    matching change: they must import what you share, and share what you import. Imported messages stay.

    In a chain of spaces A, B, C the operator of B forwards messages of A (`link set C --hops 2`) and the operator of C
    imports them (`link set B --beyond A:general=a.general`; `link show B` prints the id of A). `--beyond` includes
    `--hops 2`, and `--beyond ''` undoes both.

    Examples:
      tidings link set acme --share general --share news         now they may read both
      tidings link set acme --take 'team.>=acme.team.>'          another name, for what comes from now on
      tidings link set acme --until 90d
      tidings link set acme --beyond globex:general=globex.general
      tidings link set acme --beyond ''                          nothing from behind them any more
    """
    from tidings.admin.linking import Linker
    from tidings.rpc.local_socket import call

    row = meant(ctx, name)
    switches = _switched(direct=direct, roster=roster, tasks=tasks)
    before, after = _changed(ctx, row, share, take, beyond, hops, until, switches)
    words = list(_differences(before, after))
    if not words and row.state != "setting":  # what was said before and is not in force yet is said again
        raise UsageError(
            f"it is so already: say what is to be otherwise on the link with {name_of(row)} (`tidings link set --help`)"
        )
    if not ctx.as_json:
        for text in words:
            output.say(text)
    if more := _wider(before, after):
        output.confirm(yes, f"Let them {more}?")
    try:
        administer(ctx, "changing a link", lambda admin: Linker(admin).set(after))
        with suppress(TidingsError):  # a worker looks by itself soon
            asyncio.run(call(ctx.home.link_socket, RefreshRequest(), timeout=5.0))
    except (UnreachableError, OutcomeUnknown) as error:
        raise type(error)(
            f"{error}. What you said of the link with {name_of(row)} is written down: it holds when you repeat "
            "this while the steward answers, or when the space starts"
        ) from error
    shown, fields = ("link", "space", "channels", "beyond", "shares", "hops", "until"), msgspec.to_builtins(after)
    ctx.end_if_json({each: fields[each] for each in (*shown, *dict(SWITCH_WORDS))} | {"changed": words})
    output.say(f"the link with {name_of(row)} is so from now on")
    if before.has_ended(time.time_ns()):
        output.say(f"note: it had ended, and their credential with it: `tidings link renew {name_of(row)}`")
    output.hint(f"tidings link show {name_of(row)}")


def _changed(
    ctx: Context,
    row: AgreedLink,
    share: Names,
    take: Names,
    beyond: Names,
    hops: int | None,
    until: str | None,
    switches: dict[str, str],
) -> tuple[Link, Link]:
    """The record as it is, and as it is to be."""
    from tidings.admin.linking import terms_of
    from tidings.wire.link_terms import check_patterns, minimal
    from tidings.wire.links import MOST_HOPS

    if row.state not in ("setting", "on"):
        raise UsageError(f"link {row.link} was removed: `tidings link invite` makes another one")
    before, changes = terms_of(row), dict[str, Any]()
    if share is not None:
        changes["shares"] = minimal(as_patterns(each for each in share if each))
        check_patterns(changes["shares"])
    if take is not None:
        changes["channels"] = channel_names("--take", [each for each in take if each])
    if beyond is not None:
        changes["beyond"] = _behind(ctx, row, [each for each in beyond if each])
    if hops is None:
        hops = _hops_with(before, changes.get("beyond"))
    if hops is not None:
        if not 1 <= hops <= MOST_HOPS:
            raise UsageError(f"a message comes over 1 to {MOST_HOPS} links: `--hops 2`")
        changes["hops"] = hops
    if until is not None:
        changes["until"] = None if until == "never" else int(time.time()) + seconds("--until", until)
    changes |= switches
    after = msgspec.structs.replace(before, **changes)
    if after.beyond and after.hops == 1:
        raise UsageError("what comes from behind another space comes over 2 links at least: leave --hops 1 out")
    if not (after.channels or after.beyond or after.shares):
        raise UsageError(f"nothing would pass: `tidings link remove {name_of(row)}` ends the link")
    return before, after


def _hops_with(before: Link, beyond: dict[str, dict[str, str]] | None) -> int | None:
    """What names a space behind theirs needs two links, and what takes that back needs one; None: it stays."""
    if beyond and before.hops == 1:
        return 2
    return 1 if beyond == {} and before.beyond and before.hops > 1 else None


def _switched(*, direct: bool | None, roster: bool | None, tasks: bool | None) -> dict[str, str]:
    """Who is there has to be known to be reached: mail and tasks are on with the roster, and off without it."""
    if (direct or tasks) and roster is False:
        raise UsageError("direct messages and tasks need the roster of both: leave --no-roster out, or the other")
    if roster is False:
        direct = tasks = False
    elif direct or tasks:
        roster = True
    given = {"direct": direct, "roster": roster, "tasks": tasks}
    return {name: "on" if on else "off" for name, on in given.items() if on is not None}


def _behind(ctx: Context, row: AgreedLink, given: list[str]) -> dict[str, dict[str, str]]:
    """`SPACE:THEIRS[=OURS]`, by the space's id."""
    found: dict[str, list[str]] = {}
    for each in given:
        named, colon, names = each.partition(":")
        if not colon or not names:
            raise UsageError(
                f"--beyond {each!r}: name a space behind theirs and its channel, `--beyond SPACE:THEIRS=OURS`"
            )
        found.setdefault(_space_id(ctx, row, named.strip()), []).append(names)
    return {origin: channel_names("--beyond", names) for origin, names in found.items()}


def _space_id(ctx: Context, row: AgreedLink, text: str) -> str:
    """Of a space that is linked with this one too, by its name here; or of any, by its id or the beginning of that."""
    with suppress(InvalidName):
        public_bytes(text)
        return text
    others = [each for each in links_of(ctx) if each.link != row.link and each.state != "off"]
    found = {each.origin for each in others if each.terms.get("space") == text}
    if not found and len(text) >= SHORTEST_ID:
        (link,) = call_worker(ctx, ListLinksRequest(link=row.link, complete=True))[0].links
        passed_on = {each.origin for each in link.store.not_taken} if link.store is not None else set()
        known = {*passed_on, *link.beyond, *(other.origin for other in others)}
        found = {each for each in known if each.startswith(text)}
    if len(found) != 1:
        raise UsageError(
            f"--beyond {text}: {'several spaces are' if found else 'no space is'} meant by that. Name one that this "
            f"space is linked with, or an id: `tidings link show {name_of(row)}` tells whose words are passed on"
        )
    return found.pop()


def _differences(before: Link, after: Link) -> Iterator[str]:
    if before.shares != after.shares:
        yield f"they may read {listed(after.shares)}, and not {listed(before.shares)} as before"
    if before.channels != after.channels:
        yield f"you take {mapping(after.channels)}, and not {mapping(before.channels)} as before"
    if before.beyond != after.beyond:
        taken = [f"{mapping(channels)} of {origin[:12]}" for origin, channels in after.beyond.items()]
        yield f"through them you take {'; '.join(taken) or 'nothing of others'}"
    if before.hops != after.hops:
        on = "goes on to them" if after.hops > 1 else "does not go on to them"
        yield f"a message may come over {after.hops} links: what other spaces said {on}, where they may read it"
    if before.until != after.until:
        yield f"it ends {output.moment(after.until) if after.until else 'when you end it'}"
    for switch, words in SWITCH_WORDS:
        if getattr(before, switch) != getattr(after, switch):
            yield f"{words}: {getattr(after, switch)}"


def _wider(before: Link, after: Link) -> str:
    """What the other space could do that it could not, in words; empty: nothing."""
    reads = after.hops > before.hops or not all(covers_any(before.shares, each) for each in after.shares)
    found = {
        "read more": reads,
        "know all agents here by name": after.roster == "on" != before.roster,
        "write to agents here": after.passes_mail and not before.passes_mail,
        "give tasks to agents here": after.passes_tasks and not before.passes_tasks,
    }
    return " and ".join(words for words, is_new in found.items() if is_new)


def renew(
    ctx: SpaceContext,
    name: LinkArgument,
    expires: Annotated[str, Option(help="Lifetime of the line: 10m, 1h, 7d.", metavar="TIME")] = "1h",
    url: Annotated[str | None, Option(help="Address at which they reach this space.", metavar="URL")] = None,
) -> None:
    """Give a link new keys on both sides. Prints a line to paste into `tidings link accept` in the other space.

    Use it after a restore from a copy older than the link, or if keys may have leaked. The terms stay. Only that space
    can accept the line; until then the link keeps its old keys. Earlier lines become invalid.

    Examples:
      tidings link renew acme
      tidings link renew acme --expires 7d
    """
    from tidings.admin.link_inviting import LinkInviter

    row = meant(ctx, name)
    holds = seconds("--expires", expires)
    made, line = make_line(
        ctx, "renewing a link", url, lambda admin, reach: LinkInviter(admin).renew(row, holds, reach)
    )
    by = output.moment(made.expires)
    ctx.end_if_json({"id": made.id, "link": row.link, "expires": by, "line": line})
    output.say(
        f"link {row.link} gets new keys when {name_of(row)} accepts this by {by}; as before they "
        f"may read {listed(tuple(row.terms.get('shares') or ()))}, you take {mapping(row.terms.get('channels') or {})}"
    )
    output.line(line)
    output.hint("tidings invitation list")
