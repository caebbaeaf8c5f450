"""`tidings inbox`: what you were sent, kept on this machine for ever. There is one inbox, with the host and without.

While no host runs this command opens the host's file in its place, receives into it, and marks what it shows as read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import to_builtins
from typer import Argument, Option

from tidings.cli import completion, output
from tidings.cli.connection import act_at_host, host_session
from tidings.cli.context import AgentContext, Context, CountOption, DirectContext, Group, countable, duration
from tidings.cli.talk import WholeOption, printable, writer
from tidings.errors import AuthRevoked, HostRuns, HostUnreachable, StoreError, UnreachableError, UsageError
from tidings.wire.names import unmarked

if TYPE_CHECKING:
    from sqlite3 import Connection

    from tidings.client.host_transport import HostAgent
    from tidings.host.mailbox import LocalInbox

app = Group(no_args_is_help=False)
Message = dict[str, Any]
#: messages that the host tells of at a time
PAGE = 500
WITH_HOST = ("from", "search", "follow")
#: seconds for the first message unless --wait says otherwise
WAIT = 2.0
#: without a host: what came is shown until nothing more comes for so long
QUIET = 0.5
LOOK_EVERY = 0.2


@app.callback(invoke_without_command=True)
def inbox(
    ctx: DirectContext,
    context: typer.Context,
    unread: Annotated[bool, Option("--unread", help="Only unread messages.")] = False,
    sender: Annotated[str | None, Option("--from", help="Only of this agent", autocompletion=completion.agents)] = None,
    channel: Annotated[
        str | None,
        Option("--channel", help="Only of this channel.", autocompletion=completion.channels, callback=unmarked),
    ] = None,
    search: Annotated[str | None, Option(help="Only messages with these words.")] = None,
    follow: Annotated[bool, Option("--follow", "-f", help="Print new messages until Ctrl-C.")] = False,
    wait: Annotated[
        float | None, Option(help="Seconds to wait for a message (2); exit 1 if none comes.", callback=duration)
    ] = None,
    count: CountOption = 50,
    whole: WholeOption = False,
) -> None:
    """Show your direct messages, and durable copies of your channels.

    With the host it shows the newest messages with their rows (`*`: unread), and `tidings inbox read ROW` marks them.
    Without the host it shows unread messages of the same inbox and marks them as read. Either way it takes the
    receiving session of the agent: another program that is receiving stops with an error.

    Examples:
      tidings inbox
      tidings inbox --unread --from bob
      tidings inbox --follow --json
      tidings inbox --as bob --wait 30 -n 1 --json
    """
    if context.invoked_subcommand is not None:
        return
    output.show_whole(whole)
    wanted = {"unread": unread, "sender": sender, "channel": channel, "search": search}
    patience = WAIT if wait is None else wait

    async def at_the_host() -> int | None:
        """How many were shown; None if no host runs."""
        async with host_session(ctx, receive=True) as agent:
            if agent is None:
                return None
            unkept = await _take_back(agent, ctx)
            if follow:
                if unkept is not None:
                    output.say(f"note: {unkept}")
                return await _follow(ctx, agent, wanted, count)
            found = await _list(ctx, agent, wanted, count, patience)
        if not found:
            output.say(f"the inbox of {ctx.agent} has nothing" + (" like that" if any(wanted.values()) else ""))
        fresh = [message["row"] for message in found if message["read"] is None]
        output.hint(f"tidings inbox read {' '.join(map(str, fresh[:10]))}" if fresh else "tidings who")
        if unkept is not None:
            raise unkept
        return len(found)

    try:
        shown = asyncio.run(at_the_host())
    except KeyboardInterrupt:
        if not follow:
            raise
        output.say("stopped")
        return
    if shown is None:
        _check_without_host(ctx, {"from": sender, "search": search, "follow": follow})
        shown = _without_host(ctx, channel, patience, count)
    if wait and not shown:  # whoever waited in vain is told so by the exit code, too; `--wait 0` waits for nothing
        raise typer.Exit(1)


async def _list(ctx: Context, agent: HostAgent, wanted: dict[str, Any], count: int, wait: float) -> list[Message]:
    """Show the newest that is wanted, oldest first, in pages as the host gives them."""
    found = page = await agent.transport.inbox(**wanted, newest=True, limit=min(PAGE, count), wait=wait)
    while page and len(found) < count:
        before = min(message["row"] for message in page)
        page = await agent.transport.inbox(**wanted, newest=True, limit=min(PAGE, count - len(found)), before=before)
        found = found + page
    found.sort(key=lambda message: message["row"])
    for message in found:
        _show(ctx, message)
    return found


def _check_without_host(ctx: Context, given: dict[str, Any]) -> None:
    named = [name for name in WITH_HOST if given[name]]
    if named:
        missing = f"No host runs in {ctx.home.home}: start it with `tidings host up`."
        why = "Leave out --direct." if ctx.direct else missing
        raise HostUnreachable(f"--{named[0]} searches the mail that the host keeps. {why}")


def _without_host(ctx: Context, channel: str | None, wait: float, count: int) -> int:
    """How many messages were shown."""
    from tidings.host.mailbox import ENDING_PATIENCE, OTHERS_PATIENCE, held_mail, is_wanted

    home = ctx.home.home
    try:
        with held_mail(home, ENDING_PATIENCE if is_wanted(home) else OTHERS_PATIENCE):
            shown, delay = asyncio.run(_show_unread(ctx, channel, wait, count))
    except HostRuns as error:
        output.say(f"note: {error}; nothing is received or marked as read here")
        shown, delay = _from_file(ctx, channel, count), ""
    if not shown:
        output.say(f"the mailbox of {ctx.agent} is empty")
    if shown < count and delay:
        output.say(f"note: {delay}")
    output.hint("tidings who")
    return shown


async def _show_unread(ctx: Context, channel: str | None, wait: float, count: int) -> tuple[int, str]:
    """Show what is unread, and what comes meanwhile; it is read once it was shown. How many, and what is late."""
    from tidings.host.mailbox import open_mailbox

    async with open_mailbox(ctx.home.home, _source(ctx)) as mailbox:
        shown = 0
        try:
            async with mailbox.receive() as endpoint:
                shown = await _as_it_comes(ctx, mailbox, channel, wait, count)
                return shown, endpoint.transport.roster.backstop.delay if endpoint.transport.roster.loaded else ""
        except (UnreachableError, AuthRevoked) as error:  # what was kept before needs no space
            shown += await _as_it_comes(ctx, mailbox, channel, None, count - shown)
            if not shown or isinstance(error, AuthRevoked):
                raise
            return shown, str(error)


async def _as_it_comes(ctx: Context, mailbox: LocalInbox, channel: str | None, wait: float | None, count: int) -> int:
    """`wait`: seconds for the first, None to show only what is there. What was shown is marked, one by one."""
    from tidings.host.inbox import Wanted, inbox_message
    from tidings.host.mailbox import is_wanted

    clock = asyncio.get_running_loop().time
    over, quiet, shown, after = clock() + (wait or 0.0), 0.0, 0, 0
    while shown < count:
        wanted = Wanted(unread=True, channel=channel, after=after, limit=min(PAGE, count - shown))
        rows = await mailbox.listed(wanted)
        names = await mailbox.names() if rows else {}
        for row in rows:
            _show(ctx, to_builtins(inbox_message(row, mailbox.identity.key, names)))
            await mailbox.mark_read([row.row])
            shown, after, quiet = shown + 1, row.row, clock() + QUIET
        # something was shown: the rest is soon here, once every channel was asked
        until = quiet if shown and mailbox.is_complete else max(over, quiet)
        if wait is None or clock() >= until or is_wanted(mailbox.home):
            break
        await mailbox.news(min(LOOK_EVERY, until - clock()))
    return shown


def _from_file(ctx: Context, channel: str | None, count: int) -> int:
    """What is unread in a file that somebody else has open, as it is."""
    from tidings.host import inbox as store
    from tidings.host.directory import names_in
    from tidings.host.schema import SCHEMA
    from tidings.util.database_snapshot import look

    key = ctx.require_key()
    wanted = store.Wanted(unread=True, channel=channel, limit=count)
    mine = (ctx.space_id, key.id)
    file = ctx.home.home / "host.db"
    rows, names = look(file, SCHEMA, lambda c: (store.listed(c, *mine, wanted), names_in(c, mine[0])))
    for row in rows:
        _show(ctx, to_builtins(store.inbox_message(row, key, names | {key.id: ctx.agent})))
    return len(rows)


def _source(ctx: Context) -> tuple[str, ...]:
    ctx.check()
    return ("home", str(ctx.home.home), ctx.home.name, ctx.agent)


async def _take_back(agent: HostAgent, ctx: Context) -> StoreError | None:
    """Receive through the host; the answer is why it cannot keep what comes, if it cannot."""
    from tidings.contract.host import ReceiveHereRequest, ShowSessionRequest

    health = (await agent.call(ShowSessionRequest())).health
    if health.superseded:
        await agent.call(ReceiveHereRequest())
        output.say(f"note: another program received as {ctx.agent}; from now on the host does")
    unkept = health.unkept
    return StoreError(f"mail of {ctx.agent} is not kept: {unkept.cause}") if unkept else None


async def _agent_id(agent: HostAgent, named: str | None) -> str | None:
    """Who is meant, found once: what comes is told apart by the id of its sender."""
    from tidings.client.directory import resolve_among
    from tidings.wire.names import is_agent_id

    if named is None or is_agent_id(named):
        return named
    return resolve_among(await agent.who(), named).id


async def _follow(ctx: Context, agent: HostAgent, wanted: dict[str, Any], count: int) -> int:
    """What is there, and everything behind it as it comes, for ever. A host that goes away is waited for."""
    wanted["sender"] = await _agent_id(agent, wanted["sender"])
    # asked before anything is shown: what comes meanwhile is behind it, and so followed
    begun = await agent.transport.newest_row()
    found = await _list(ctx, agent, wanted, count, 0.0)
    words = (wanted["search"] or "").lower().split()
    async for event in agent.transport.rows(max([begun, *(message["row"] for message in found)])):
        message = event.data
        if wanted["sender"] not in (None, message["from"]["id"]):
            continue
        if wanted["channel"] in (None, message["channel"]) and all(w in message["text"].lower() for w in words):
            _show(ctx, message)
    return len(found)


def _show(ctx: Context, message: Message) -> None:
    when = datetime.fromisoformat(message["time"]).astimezone()
    line = f"{message['row']:>6}{' ' if message['read'] else '*'} {when:%H:%M:%S}"
    channel = f"#{message['channel']}" if message["channel"] else ""
    if message["kind"] == "notice":
        ctx.stream(message, f"{line} notice{f' {printable(channel)}' if channel else ''}: {printable(message['text'])}")
        return
    # further lines are set in, so that nobody's text can pass for a message of somebody else
    words = printable(output.cut(message["text"], "tidings inbox --whole")).replace("\n", "\n    ")
    ctx.stream(message, f"{line} {channel or 'direct'} {writer(message['from'])}: {words}")


@app.command("read")
def read(
    ctx: AgentContext,
    rows: Annotated[
        list[int] | None, Argument(help="Rows that `tidings inbox` shows.", metavar="ROW", callback=countable)
    ] = None,
    everything: Annotated[bool, Option("--all", help="All messages in the inbox.")] = False,
) -> None:
    """Mark messages as read. Senders of direct messages get a receipt, without a host at the next receive.

    Examples:
      tidings inbox read 12 13
      tidings inbox read --all --as bob
    """
    if bool(rows) == everything:
        raise UsageError("name the rows that were read, or --all; one of the two")
    if _no_host_but_its_file(ctx):
        marked = _mark_in_file(ctx, rows)
    else:
        marked = act_at_host(
            ctx, lambda agent: agent.transport.mark_read(rows) if rows else _mark_all(agent), receive=True
        )
    ctx.end_if_json({"read": marked})
    output.say(f"{marked} message{'' if marked == 1 else 's'} marked as read")
    output.hint("tidings inbox --unread")


@app.command("delete")
def delete(
    ctx: AgentContext,
    rows: Annotated[list[int], Argument(help="Rows that `tidings inbox` shows.", metavar="ROW...", callback=countable)],
) -> None:
    """Delete the content of messages in your inbox, read or not. They do not arrive again.

    Other agents and the log keep their copies: `tidings history` still shows channel messages.

    Examples:
      tidings inbox delete 12 13
      tidings inbox delete 12 --as bob
    """
    from tidings.contract.host import DeleteMailRequest

    if _no_host_but_its_file(ctx):
        deleted = _in_file(ctx, lambda mailbox: mailbox.delete(rows))
    else:
        deleted = act_at_host(ctx, lambda agent: agent.call(DeleteMailRequest(tuple(rows))), receive=True).deleted
    ctx.end_if_json({"deleted": deleted})
    missed = len(set(rows)) - deleted
    other = f"; {missed} of these rows {'is' if missed == 1 else 'are'} not in the inbox of {ctx.agent}"
    output.say(f"{deleted} message{'' if deleted == 1 else 's'} deleted{other if missed else ''}")
    output.hint("tidings inbox")


@app.command("quarantine")
def quarantine(ctx: AgentContext) -> None:
    """List messages to you that could not be opened, with the reason. They block nothing and are not shown as mail.

    Example:
      tidings inbox quarantine --as bob
    """
    found = _aside_in_file(ctx) if _no_host_but_its_file(ctx) else act_at_host(ctx, _all_aside)
    ctx.end_if_json(found)
    rows = [(each["row"], each["received"], each["bytes"], printable(each["reason"])) for each in found]
    output.table(("row", "received", "bytes", "reason"), rows, empty="nothing was put aside")


def _no_host_but_its_file(ctx: Context) -> bool:
    from tidings.host.mailbox import is_wanted

    return not is_wanted(ctx.home.home) and (ctx.home.home / "host.db").exists()


async def _all_aside(agent: HostAgent) -> list[Message]:
    from tidings.client.message_json import to_json
    from tidings.contract.host import QuarantinedMailRequest

    found: list[Message] = []
    while page := (await agent.call(QuarantinedMailRequest(found[-1]["row"] if found else 0))).quarantine:
        found += map(to_json, page)
    return found


def _aside_in_file(ctx: Context) -> list[Message]:
    from tidings.host import inbox as store
    from tidings.host.schema import SCHEMA
    from tidings.util.database_snapshot import look

    mine = (ctx.space_id, ctx.require_key().id)
    found: list[store.Aside] = []

    def page(connection: Connection) -> list[store.Aside]:
        return store.aside(connection, *mine, found[-1].row if found else 0)

    while more := look(ctx.home.home / "host.db", SCHEMA, page):
        found += more
    return [to_builtins(store.quarantined_mail(each)) for each in found]


def _in_file(ctx: Context, change: Callable[[LocalInbox], Awaitable[int]]) -> int:
    """Change an inbox while no host runs."""
    from tidings.host.mailbox import held_mail, open_mailbox

    async def act() -> int:
        async with open_mailbox(ctx.home.home, _source(ctx)) as mailbox:
            return await change(mailbox)

    with held_mail(ctx.home.home):
        return asyncio.run(act())


def _mark_in_file(ctx: Context, rows: list[int] | None) -> int:
    from tidings.host.inbox import Wanted

    async def mark(mailbox: LocalInbox) -> int:
        if rows:
            return await mailbox.mark_read(rows)
        marked = 0
        while found := await mailbox.listed(Wanted(unread=True, limit=PAGE)):
            marked += await mailbox.mark_read([row.row for row in found])
        return marked

    return _in_file(ctx, mark)


async def _mark_all(agent: HostAgent) -> int:
    marked = 0
    while found := await agent.transport.inbox(unread=True, limit=PAGE):
        marked += await agent.transport.mark_read([message["row"] for message in found])
    return marked
