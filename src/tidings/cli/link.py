"""`tidings link`: what passes between this space and others, how it is, and what to mend. How that is agreed is in
`link_invite.py`.

What was agreed is on disk. How it is says the worker, on its socket; while none runs a command looks into the ledger
itself, and changes it itself. Nothing here writes a ledger that a worker has.
"""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tidings.cli import completion, link_words, output
from tidings.cli.amounts import seconds
from tidings.cli.link_invite import app as app
from tidings.cli.link_words import unreached_words
from tidings.cli.options import CountOption, HomeOption, JsonOption, Place, SpaceOption, YesOption, countable, place
from tidings.errors import StoreBusy, TidingsError, UsageError, WorkerUnreachable
from tidings.space.link_ledger import AgreedLink, LinkLedger

#: seconds in which a worker that is starting takes up what is asked, and in which one answers how it is
STARTING, ANSWERS = 5.0, 3.0
#: seconds for an answer of a worker that runs, but for what takes as long as it takes
PATIENCE, LONG = 15.0, ("verify", "rebuild")
#: seconds in which a worker that was told to leave has done so
LEAVING = 20.0
DIFFERS = 3
NOBODY = "no worker of links runs: `tidings up` starts one, or `tidings link run`"

LinkArgument = Annotated[
    str,
    typer.Argument(
        help="The other space as it is called here, or the link.", metavar="NAME", autocompletion=completion.links
    ),
]
SeqArgument = Annotated[
    int, typer.Argument(help="Record, by its sequence in the other log.", metavar="SEQ", callback=countable)
]


class NameFirst(TyperGroup):
    """`quarantine acme list` is the same as `quarantine list acme`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if len(args) > 1 and args[0] not in self.commands and args[1] in self.commands:
            args = [args[1], args[0], *args[2:]]
        return super().parse_args(ctx, args)


quarantine = typer.Typer(
    cls=NameFirst,
    no_args_is_help=True,
    help="Records of a link that were received and not let in: look, try them again, or give them up.",
)
app.add_typer(quarantine, name="quarantine")


# --- finding and asking ---


def links_of(where: Place) -> list[AgreedLink]:
    return LinkLedger.below(where.home, where.home.read_info().id).rows()


def meant(where: Place, text: str) -> AgreedLink:
    """By what its space is called here, by its id, or by the beginning of either id."""
    known = links_of(where)
    current = [row for row in known if row.state != "off"]
    found = [row for row in current if text in (row.terms.get("space"), row.link)]
    found = found or [row for row in known if text == row.link]
    if not found and len(text) >= 4:
        found = [row for row in current if row.link.startswith(text) or row.origin.startswith(text)]
    if len(found) != 1:
        many = f"{len(found)} links are" if found else "no link is"
        raise UsageError(f"{many} meant by {text!r} in space {where.home.name}: `tidings link list --all` shows them")
    return found[0]


def name_of(row: AgreedLink) -> str:
    return str(row.terms.get("space") or row.link)


async def _ask(where: Place, do: str, **arguments: Any) -> tuple[dict[str, Any], bool]:
    """The answer, and whether a worker gave it. One that is just starting has the ledger and does not listen yet."""
    from tidings.link.local_socket import ask
    from tidings.link.operations import alone

    deadline = time.monotonic() + STARTING
    socket, within = where.home.link_socket, None if do in LONG else PATIENCE
    while True:
        try:
            if within is None:  # does it answer at all?
                await ask(socket, "status", within=PATIENCE)
            return await ask(socket, do, within=within, **arguments), True
        except WorkerUnreachable as unanswered:
            try:
                async with alone(where.home) as operations:
                    return await operations.do(do, **arguments), False
            except StoreBusy:
                if time.monotonic() >= deadline:
                    raise unanswered from None
        await asyncio.sleep(0.1)


def asked(where: Place, do: str, **arguments: Any) -> tuple[dict[str, Any], bool]:
    return asyncio.run(_ask(where, do, **arguments))


# --- looking ---


@app.command("list")
def list_links(
    space: SpaceOption = None,
    home: HomeOption = None,
    every: Annotated[bool, typer.Option("--all", help="Those that ended too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the links of a space, and how each is.

    Examples:

      tidings link list

      tidings link list --all --json
    """
    where = place(space, home)
    links, by_worker = _status(where)
    links = [each for each in links if every or each["state"] in ("on", "setting")]
    if as_json:
        output.data([{**each, "shown": link_words.state(each)} for each in links])
        return
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
        empty=f"space {where.home.name} has no links",
    )
    if not by_worker and any(each["takes"] for each in links):
        output.say(NOBODY)
    output.hint("tidings link show NAME" if rows else "tidings link --help")


def _status(where: Place) -> tuple[list[dict[str, Any]], bool]:
    """Of all links; a space that never had one is asked nothing."""
    if not links_of(where):
        return [], False
    answer, by_worker = asked(where, "status")
    if not by_worker:
        _add_pushes(where, answer["links"])
    if by_worker and answer["steward"]:
        output.say(f"note: which links are in force is not known to the worker: {answer['steward']}")
    return answer["links"], by_worker


def _add_pushes(where: Place, links: list[dict[str, Any]]) -> None:
    """How far the others are with what is shared, as the steward says; without a worker it is asked itself."""
    from tidings.link.destination import LocalSpace

    async def look() -> dict[str, dict[str, Any] | None]:
        local = LocalSpace(where.home.read_info().url, where.home.link_creds, where.home.name)
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


@app.command("show")
def show(
    name: LinkArgument,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on and print what happens, until Ctrl-C.")] = False,
    space: SpaceOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show everything about a link: what passes, how far it is, what was left out and why.

    `--follow` prints how it catches up and every change of its state; with `--json` one object a line.

    Examples:

      tidings link show acme

      tidings link show acme --follow
    """
    where = place(space, home)
    row = meant(where, name)
    if follow:
        asyncio.run(_follow(where, row, as_json))
        return
    answer, by_worker = asked(where, "status", link=row.link, whole=True)
    facts = answer["links"][0]
    if not by_worker:
        _add_pushes(where, [facts])
    if as_json:
        output.data({**facts, "shown": link_words.state(facts), "worker": by_worker})
        return
    output.table(("what", "value"), link_words.rows(facts, time.time()), empty="")
    if not by_worker and facts["takes"]:
        output.say(NOBODY)
    if by_worker and answer["steward"]:
        output.say(f"note: which links are in force is not known to the worker: {answer['steward']}")
    output.hint(f"tidings link verify {name_of(row)}" if facts["ledger"] else "tidings link list")


@app.command("people")
def people(
    name: LinkArgument,
    trust: Annotated[
        str | None, typer.Option(help="Let a name stand for the key it has there now.", metavar="AGENT")
    ] = None,
    yes: YesOption = False,
    space: SpaceOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the agents of a linked space that are known here, as it states them; agents write to them as name@space.

    A name stays with the key it first had. If it has another one there, and its space does not say that the one took
    over from the other, nobody here can write to it until you have asked and say `--trust`: that shows both keys, so
    that you can compare the new one with what their operator tells you, and asks.

    Examples:

      tidings link people acme

      tidings link people acme --trust bob
    """
    where = place(space, home)
    row = meant(where, name)
    if trust is not None:
        changed = _trusted(where, row, trust, yes=yes)
        if as_json:
            output.data(changed)
        else:
            output.say(f"{trust}@{name_of(row)} is {changed['now']} from now on; it was {changed['before']}")
        return
    found, _ = asked(where, "people", link=row.link)
    if as_json:
        output.data(found)
        return
    rows = [(each["name"], each["roles"], each["id"], "") for each in found["people"]]
    rows += [(each["name"], each["roles"], each["id"], "another key than before") for each in found["changed"]]
    output.table(("name", "roles", "id", "note"), rows, empty=f"{name_of(row)} has told of nobody")
    first = next(iter(found["changed"]), None)
    output.hint(f"tidings link people {name_of(row)} --trust {first['name']}" if first else "tidings who")


def _trusted(where: Place, row: AgreedLink, agent: str, *, yes: bool) -> dict[str, Any]:
    """Of two keys the operator sees both; a third one that comes meanwhile is not meant."""
    shown, _ = asked(where, "trustable", link=row.link, name=agent)
    if not yes:
        output.say(f"{agent}@{name_of(row)} was {shown['before']}")
        output.say(f"{agent}@{name_of(row)} is {shown['now']} there now, which does not say that it took over")
        if not typer.confirm("Does their operator say so too, and is it to be that one?", err=True):
            raise typer.Exit(1)
    changed, _ = asked(where, "trust", link=row.link, name=agent, key=shown["now"])
    return changed


async def _follow(where: Place, row: AgreedLink, as_json: bool) -> None:
    from tidings.link.local_socket import follow

    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)

    async def tell() -> None:
        async for said in follow(where.home.link_socket, "follow", link=row.link):
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


def look(where: Place, supervised: bool) -> dict[str, Any]:
    """For `tidings status`: links in one line, and what is wrong with them."""
    from tidings.link.local_socket import ask

    known = links_of(where)
    wanted = [row for row in known if row.state in ("on", "setting")]
    taking = [row for row in wanted if row.takes(time.time())]
    wrong = [*_ended_unasked(known), *_unreachable(where, taking)]
    told = where.home.read_state().get("links") or {}
    facts: dict[str, Any] = {"count": len(wanted), "taking": len(taking), "supervised": told, "said": "", "links": []}
    if not wanted:
        return facts | {"problems": wrong}
    try:
        found = asyncio.run(ask(where.home.link_socket, "status", within=ANSWERS))["links"]
        shown = [each for each in found if each["state"] in ("on", "setting")]
        facts["links"] = [{"space": each["space"], "state": link_words.state(each)} for each in shown]
        said = ", ".join(f"{each['space']} {each['state']}" for each in facts["links"])
        return facts | {"runs": True, "said": said, "problems": wrong}
    except WorkerUnreachable as error:
        facts |= {"runs": False, "said": f"{len(wanted)} agreed, {len(taking)} of them take something in, not carried"}
        if not taking:
            return facts | {"said": f"{len(wanted)} agreed, nothing comes in over them", "problems": wrong}
        why = told.get("why") or error
        problem = f"what {len(taking)} linked spaces share is not carried: {why}; `tidings logs links` says more"
        return facts | {"problems": [*wrong, problem] if supervised and told else wrong}


def _ended_unasked(known: list[AgreedLink]) -> list[str]:
    """Links that were ended for them, until their owner has seen it, or agreed on another one with that space."""
    on = {row.origin for row in known if row.state in ("on", "setting")}
    return [
        f"the link with {name_of(row)} was ended: {row.why}; invite again, or `tidings link remove {row.link}` once "
        "you have seen to it"
        for row in known
        if row.why and row.state in ("ending", "off") and row.origin not in on
    ]


def _unreachable(where: Place, taking: list[AgreedLink]) -> list[str]:
    """Links that take something in, and of which it is not known here where their space is."""
    from tidings.space.link_peers import LinkPeers

    peers = LinkPeers.below(where.home)
    return [
        f"nothing comes from {name_of(row)}: {unreached_words(name_of(row))}"
        for row in taking
        if row.state == "on" and not peers.creds(row.link).exists()
    ]


# --- changing ---


@app.command("pause")
def pause(
    name: LinkArgument,
    reason: Annotated[str, typer.Option(help="Why, for whoever looks.")] = "paused by the operator",
    space: SpaceOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take nothing more in over a link until `resume`. What it shares, the other space still reads.

    Examples:

      tidings link pause acme

      tidings link pause acme --reason "their agents flood general"
    """
    where = place(space, home)
    row = meant(where, name)
    answer, by_worker = asked(where, "pause", link=row.link, reason=reason)
    if as_json:
        output.data({"link": row.link, "paused": reason, "was": answer["was"], "worker": by_worker})
        return
    output.say(
        f"link with {name_of(row)} is paused: nothing comes in over it, and it goes on where it was when resumed"
    )
    output.hint(f"tidings link resume {name_of(row)}")


@app.command("resume")
def resume(name: LinkArgument, space: SpaceOption = None, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Go on with a link that was paused, where it was.

    Examples:

      tidings link resume acme
    """
    where = place(space, home)
    row = meant(where, name)
    answer, by_worker = asked(where, "resume", link=row.link)
    if as_json:
        output.data({"link": row.link, "was": answer["was"], "worker": by_worker})
        return
    output.say(f"link with {name_of(row)} goes on" if answer["was"] is not None else "it was not paused")
    if not by_worker:
        output.say(NOBODY)
    output.hint(f"tidings link show {name_of(row)} --follow")


@app.command("verify")
def verify(name: LinkArgument, space: SpaceOption = None, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Compare what the other space shares with what came, by digests: equal, or what differs. Exit code 3 if it does.

    Records that were left out or are in quarantine are accounted for. What is not here and should be is fetched by the
    worker.

    Examples:

      tidings link verify acme

      tidings link verify acme --json
    """
    where = place(space, home)
    row = meant(where, name)
    with output.working(f"comparing with {name_of(row)}"):
        answer, by_worker = asked(where, "verify", link=row.link)
    if as_json:
        output.data({"link": row.link, **answer})
    else:
        for words in link_words.verified(name_of(row), answer):
            output.line(words)
        if answer["lacking"] or answer["lost"]:
            output.say("the worker fetches what is not here" if by_worker else NOBODY)
    if not answer["equal"] or answer["lost"]:
        raise typer.Exit(DIFFERS)
    output.hint(f"tidings link show {name_of(row)}")


@app.command("rebuild")
def rebuild(
    name: Annotated[
        str | None,
        typer.Argument(
            help="The other space as it is called here, or the link.", metavar="[NAME]", autocompletion=completion.links
        ),
    ] = None,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Begin a new ledger for all links: when `links.db` is damaged.")
    ] = False,
    yes: YesOption = False,
    space: SpaceOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget how far a link is and what is in its quarantine, and read all again that the other space still has.

    Messages that are here already are found and do not come twice. `--ledger` does it for all links, and works when the
    ledger cannot be read any more: the file is set aside as `links.db.aside`. Links that were paused go on then,
    records that were given up are in quarantine again, and which key a name like bob@acme stands for is learnt anew:
    look at `tidings link people`.

    Examples:

      tidings link rebuild acme --yes

      tidings link rebuild --ledger
    """
    where = place(space, home)
    if bool(name) == ledger:
        raise UsageError("say which link to read again, or --ledger for all of them")
    if ledger:
        _rebuild_all(where, yes=yes, as_json=as_json)
        return
    row = meant(where, name or "")
    if not yes and not typer.confirm(f"Read everything of {name_of(row)} again?", err=True):
        raise typer.Exit(1)
    answer, by_worker = asked(where, "rebuild", link=row.link)
    if as_json:
        output.data({"link": row.link, **answer, "worker": by_worker})
        return
    output.say(f"link with {name_of(row)} begins anew; it had handled {answer['handled']:,} of the other log")
    if not by_worker:
        output.say(NOBODY)
    output.hint(f"tidings link show {name_of(row)} --follow")


def _rebuild_all(where: Place, *, yes: bool, as_json: bool) -> None:
    from tidings.link.agreements import set_ledger_aside
    from tidings.link.local_socket import ask

    where.home.read_info()
    if not yes and not typer.confirm("Begin a new ledger, and read everything of all links again?", err=True):
        raise typer.Exit(1)
    with suppress(WorkerUnreachable):  # whoever keeps it running starts it again
        asyncio.run(ask(where.home.link_socket, "leave", within=PATIENCE))
    aside = set_ledger_aside(where.home, LEAVING)
    if as_json:
        output.data({"aside": str(aside) if aside is not None else None})
        return
    output.say(f"the ledger was set aside as {aside}" if aside is not None else "there was no ledger")
    output.say("links are read again from their beginning; `tidings up` or `tidings link run` carries them")
    output.hint("tidings link list")


@app.command("remove")
def remove(
    name: LinkArgument,
    yes: YesOption = False,
    space: SpaceOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a link on this side: nothing comes in, the other space reads nothing more, and its ledger is deleted.

    Messages that came over it stay. The operator of the other space ends it there with the same command.

    Examples:

      tidings link remove acme

      tidings link remove acme --yes
    """
    where = place(space, home)
    row = meant(where, name)
    if not yes and not typer.confirm(f"End the link with {name_of(row)}?", err=True):
        raise typer.Exit(1)
    ended = asyncio.run(_remove(where, row))
    if as_json:
        output.data({"link": row.link, "space": name_of(row), "state": ended.state})
        return
    output.say(
        f"the link with {name_of(row)} is ended here: its user is cut, and nothing comes in. What came over it stays. "
        "The operator of the other space should remove it there too"
    )
    if ended.state == "ending":
        output.say("the steward does not answer: the record that says so is written when it does (`tidings status`)")
    output.hint("tidings link list --all")


async def _remove(where: Place, row: AgreedLink) -> AgreedLink:
    """The user and the record first; then nothing is left that could start it again; then the ledger."""
    from tidings.space.administration import administer
    from tidings.space.link_peers import LinkPeers
    from tidings.space.linking import Linker

    async with administer(where.home, "ending a link") as admin:
        ended = await Linker(admin).end(row.link)
    LinkPeers.below(where.home).forget(row.link)
    await _ask(where, "forget", link=row.link)
    return ended


# --- quarantine ---


@quarantine.command("list")
def quarantine_list(
    name: LinkArgument,
    count: CountOption = 50,
    space: SpaceOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the records of a link that were received and not let in, oldest first, and why.

    Examples:

      tidings link quarantine list acme

      tidings link quarantine list acme -n 500 --json
    """
    where = place(space, home)
    row = meant(where, name)
    answer, _ = asked(where, "quarantined", link=row.link, limit=count)
    if as_json:
        output.data(answer["records"])
        return
    rows = [
        (
            each["seq"],
            each["reason"],
            each["channel"],
            each["sender"][:12],
            output.size(each["bytes"]),
            each["attempts"],
            output.age(each["since"]),
            each["words"],
        )
        for each in answer["records"]
    ]
    output.table(
        ("record", "reason", "channel", "sender", "size", "tried", "since", "words"),
        rows,
        empty=f"nothing of {name_of(row)} is in quarantine",
    )
    if answer["count"] > len(rows):
        output.say(f"{answer['count'] - len(rows):,} more: `tidings link quarantine list {name_of(row)} -n 10000`")
    output.hint(f"tidings link quarantine show {name_of(row)} SEQ" if rows else f"tidings link show {name_of(row)}")


@quarantine.command("show")
def quarantine_show(
    name: LinkArgument,
    seq: SeqArgument,
    space: SpaceOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one record that was not let in, with its bytes.

    Examples:

      tidings link quarantine show acme 1204
    """
    where = place(space, home)
    row = meant(where, name)
    record = asked(where, "quarantined_record", link=row.link, seq=seq)[0]["record"]
    if as_json:
        output.data(record)
        return
    payload = base64.b64decode(record.pop("payload"))
    record["since"] = link_words.moment(record["since"])
    record["said_at"] = link_words.moment(record["said_at"])
    output.table(("what", "value"), record.items(), empty="")
    output.line()
    output.line(_readable(payload))
    output.hint(f"tidings link quarantine retry {name_of(row)} {seq}")


def _readable(payload: bytes) -> str:
    """What others wrote must not reach a terminal as commands to it."""
    text = payload.decode("utf-8", "backslashreplace")
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


@quarantine.command("retry")
def quarantine_retry(
    name: LinkArgument,
    seqs: Annotated[
        list[int] | None, typer.Argument(help="Records; or --all.", metavar="[SEQ]...", callback=countable)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    space: SpaceOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try records in quarantine again, now: perhaps what made them unfit is over.

    Examples:

      tidings link quarantine retry acme 1204 1205

      tidings link quarantine retry acme --all
    """
    where = place(space, home)
    row = meant(where, name)
    if bool(seqs) == every:
        raise UsageError("say which records to try, or --all")
    answer, by_worker = asked(where, "retry", link=row.link, seqs=None if every else seqs)
    if as_json:
        output.data({"link": row.link, **answer, "worker": by_worker})
        return
    output.say(f"{answer['count']:,} records of {name_of(row)} are tried again" + ("" if by_worker else f"; {NOBODY}"))
    output.hint(f"tidings link quarantine list {name_of(row)}")


@quarantine.command("drop")
def quarantine_drop(
    name: LinkArgument,
    seq: SeqArgument,
    reason: Annotated[str, typer.Option(help="Why; it is kept with what was left out.")],
    space: SpaceOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give up a record in quarantine for good; it is named as left out, with the reason.

    Examples:

      tidings link quarantine drop acme 1204 --reason "forged, says their operator"
    """
    where = place(space, home)
    row = meant(where, name)
    answer, _ = asked(where, "drop", link=row.link, seq=seq, reason=reason)
    if as_json:
        output.data({"link": row.link, "seq": seq, **answer})
        return
    output.say(f"record {seq} of {name_of(row)} is given up; {answer['left']:,} are left in quarantine")
    output.hint(f"tidings link quarantine list {name_of(row)}")


# --- running ---


@app.command("run")
def run(
    poll: Annotated[
        bool, typer.Option("--poll", help="Look every so often, instead of hearing of what is new.")
    ] = False,
    every: Annotated[str, typer.Option(help="How often to look with --poll: 30s, 5m, 1h.", metavar="TIME")] = "30s",
    space: SpaceOption = None,
    home: HomeOption = None,
) -> None:
    """Carry the links of a space in the foreground until Ctrl-C: the worker that `tidings up` starts, alone.

    One worker carries at a time: start the space with `tidings up --no-links` first.

    Examples:

      tidings link run

      tidings link run --poll --every 5m
    """
    where = place(space, home)
    where.home.read_info()
    pause = float(seconds("--every", every)) if poll else None
    if pause is not None and pause < 1:
        raise UsageError("--every is at least a second")
    asyncio.run(_run(where, pause))
    output.say("links are not carried now; what was taken over stays, and the rest waits in the other spaces")


async def _run(where: Place, every: float | None) -> None:
    from tidings.link.engine import Mode
    from tidings.link.worker import LinkWorker

    where.home.make()
    worker = LinkWorker(where.home, mode=Mode(every), tell=output.say)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, worker.stop)
    how = "hears of what is new" if every is None else f"looks every {every:.0f} s"
    running = asyncio.create_task(worker.run())
    ready = asyncio.create_task(worker.ready.wait())
    await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        output.say(f"links of space {where.home.name} are carried; the worker {how}. Ctrl-C stops it.")
    ready.cancel()
    await running
