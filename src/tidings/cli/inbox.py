"""`tidings inbox`: what you were sent. With the host it is kept here for ever; without, it is read from the mailbox."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidings.cli import completion, output
from tidings.cli.options import AsOption, CountOption, HomeOption, JsonOption, Place, SpaceOption, place
from tidings.cli.talk import endpoint_at, printable, show_message, writer
from tidings.cli.through_host import DirectOption, required_session, session_if_any
from tidings.errors import HostUnreachable, UsageError
from tidings.wire.names import unmarked

if TYPE_CHECKING:
    from tidings.host.client import Session

app = typer.Typer()
Message = dict[str, Any]
#: messages that the host tells of at a time
PAGE = 500
WITH_HOST = ("from", "channel", "search", "follow", "unread")


@app.callback(invoke_without_command=True)
def inbox(
    context: typer.Context,
    unread: Annotated[bool, typer.Option("--unread", help="Only what was not read.")] = False,
    sender: Annotated[
        str | None, typer.Option("--from", help="Only of this agent.", autocompletion=completion.agents)
    ] = None,
    channel: Annotated[
        str | None,
        typer.Option("--channel", help="Only of this channel.", autocompletion=completion.channels, callback=unmarked),
    ] = None,
    search: Annotated[str | None, typer.Option("--search", help="Only what has these words.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as messages come.")] = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the first message.")] = 2.0,
    count: CountOption = 50,
    direct: DirectOption = False,
    space: SpaceOption = None,
    home: HomeOption = None,
    acting_as: AsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show your direct messages, and durable copies of your channels.

    With the host: the newest, with their row; they stay, and `tidings inbox read ROW` marks what you have read (`*` is
    new). Without it they are read from the mailbox: what is shown is settled, the rest stays. Either way this receives
    as you: a program of the same agent that is receiving is superseded, and told so.

    Examples:

      tidings inbox

      tidings inbox --unread --from bob

      tidings inbox --follow --json

      tidings inbox --as bob --wait 30 -n 1 --json
    """
    if context.invoked_subcommand is not None:
        return
    where = place(space, home, acting_as)
    if count < 1:
        raise UsageError("--count must be at least 1")
    session = session_if_any(where, direct=direct, receive=True)
    if session is None:
        given = {"from": sender, "channel": channel, "search": search, "follow": follow, "unread": unread}
        _check_without_host(where, given, direct=direct)
        _from_mailbox(where, wait, count, as_json=as_json)
        return
    _take_back(session, where)
    wanted = {"unread": unread, "sender": sender, "channel": channel, "search": search}
    if follow:
        try:
            wanted["sender"] = _agent_id(session, sender)
            begun = _newest(session)
            found = _list(session, wanted, count, 0.0, as_json=as_json)
            _follow(session, max([begun, *(message["row"] for message in found)]), wanted, as_json=as_json)
        except KeyboardInterrupt:
            output.say("stopped")
        return
    found = _list(session, wanted, count, wait, as_json=as_json)
    if not found:
        output.say(f"the inbox of {where.agent} has nothing" + (" like that" if any(wanted.values()) else ""))
    fresh = [message["row"] for message in found if message["read"] is None]
    output.hint(f"tidings inbox read {' '.join(map(str, fresh[:10]))}" if fresh else "tidings who")


def _list(session: Session, wanted: dict[str, Any], count: int, wait: float, *, as_json: bool) -> list[Message]:
    """Show the newest that is wanted, oldest first, in pages as the host gives them."""
    found = page = session.inbox(**wanted, newest=True, limit=min(PAGE, count), wait=wait)
    while page and len(found) < count:
        before = min(message["row"] for message in page)
        page = session.inbox(**wanted, newest=True, limit=min(PAGE, count - len(found)), before=before)
        found = found + page
    found.sort(key=lambda message: message["row"])
    for message in found:
        _show(message, as_json=as_json)
    return found


def _check_without_host(where: Place, given: dict[str, Any], *, direct: bool) -> None:
    """Reading from the mailbox settles what it passes, so nothing can be left out there."""
    named = [name for name in WITH_HOST if given[name]]
    if named:
        why = "goes without it (--direct)" if direct else f"no host runs in {where.home.home}: `tidings host up`"
        raise HostUnreachable(f"--{named[0]} needs the host, which keeps mail, and this {why}")


def _from_mailbox(where: Place, wait: float, count: int, *, as_json: bool) -> None:
    async def act() -> tuple[int, str]:
        shown = 0
        async with endpoint_at(where, receive=True) as endpoint:
            patience = wait
            while shown < count:
                try:
                    message = await endpoint.next_message(patience)
                except TimeoutError:
                    break
                show_message(message, as_json=as_json)
                await message.ack()
                shown, patience = shown + 1, 0.5
            return shown, endpoint.roster.backstop.delay if endpoint.roster.loaded else ""

    shown, delay = asyncio.run(act())
    if not shown:
        output.say(f"the mailbox of {where.agent} is empty")
    if shown < count and delay:
        output.say(f"note: {delay}")
    output.hint("tidings who")


def _take_back(session: Session, where: Place) -> None:
    if session.me()["health"]["superseded"]:
        session.receive()
        output.say(f"note: another program received as {where.agent}; from now on the host does")


def _newest(session: Session) -> int:
    """Asked before anything is shown: what comes meanwhile is behind it, and so followed."""
    found = session.inbox(newest=True, limit=1)
    return int(found[-1]["row"]) if found else 0


def _agent_id(session: Session, named: str | None) -> str | None:
    """Who is meant, found once: what comes is told apart by the id of its sender."""
    from tidings.endpoint.peers import resolve_among
    from tidings.wire.names import is_agent_id
    from tidings.wire.roster import Agent

    if named is None or is_agent_id(named):
        return named
    return resolve_among([Agent(id=each["id"], name=each["name"]) for each in session.who()["agents"]], named).id


def _follow(session: Session, after: int, wanted: dict[str, Any], *, as_json: bool) -> None:
    """Everything behind what was shown, as it comes."""
    words = (wanted["search"] or "").lower().split()
    for event in session.events(after):
        message = event.data
        if wanted["sender"] not in (None, message["from"]["id"]):
            continue
        if wanted["channel"] in (None, message["channel"]) and all(w in message["text"].lower() for w in words):
            _show(message, as_json=as_json)


def _show(message: Message, *, as_json: bool) -> None:
    if as_json:
        output.line(json.dumps(message))
        sys.stdout.flush()
        return
    when = datetime.fromisoformat(message["time"]).astimezone()
    mark = " " if message["read"] else "*"
    where = f"#{message['channel']}" if message["channel"] else "direct"
    if message["kind"] == "notice":
        about = f" {printable(where)}" if message["channel"] else ""
        output.line(f"{message['row']:>6}{mark} {when:%H:%M:%S} notice{about}: {printable(message['text'])}")
        sys.stdout.flush()
        return
    # further lines are set in, so that nobody's text can pass for a message of somebody else
    words = printable(message["text"]).replace("\n", "\n    ")
    output.line(f"{message['row']:>6}{mark} {when:%H:%M:%S} {where} {writer(message['from'])}: {words}")
    sys.stdout.flush()


@app.command("read")
def read(
    rows: Annotated[
        list[int] | None, typer.Argument(help="Rows, as `tidings inbox` shows them.", metavar="ROW")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything you have.")] = False,
    space: SpaceOption = None,
    home: HomeOption = None,
    acting_as: AsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Mark messages as read; senders of direct messages are told. Needs the host, which keeps them.

    Examples:

      tidings inbox read 12 13

      tidings inbox read --all --as bob
    """
    if bool(rows) == everything:
        raise UsageError("name the rows that were read, or --all; one of the two")
    session = required_session(place(space, home, acting_as), receive=True)
    marked = session.mark_read(rows) if rows else _mark_all(session)
    if as_json:
        output.data({"read": marked})
        return
    output.say(f"{marked} message{'' if marked == 1 else 's'} marked as read")
    output.hint("tidings inbox --unread")


@app.command("quarantine")
def quarantine(
    space: SpaceOption = None, home: HomeOption = None, acting_as: AsOption = None, as_json: JsonOption = False
) -> None:
    """What was sent to you and could not be opened, with the reason. It blocks nothing, and is never shown as mail.

    Example:

      tidings inbox quarantine --as bob
    """
    session = required_session(place(space, home, acting_as), receive=False)
    found: list[Message] = []
    while page := session.quarantine(found[-1]["row"] if found else 0):
        found += page
    if as_json:
        output.data(found)
        return
    rows = [(each["row"], each["received"], each["bytes"], printable(each["reason"])) for each in found]
    output.table(("row", "received", "bytes", "reason"), rows, empty="nothing was put aside")


def _mark_all(session: Session) -> int:
    marked = 0
    while found := session.inbox(unread=True, limit=500):
        marked += session.mark_read([message["row"] for message in found])
    return marked
