"""`send`, `tail`, `join`, `leave`, `history`: talking from a terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from tidings.cli import completion, output
from tidings.cli.connection import IdOption, act, chosen_id, direct_session, show_receipt
from tidings.cli.context import (
    PRIORITIES,
    AgentContext,
    ChannelArgument,
    Context,
    DirectContext,
    PriorityOption,
    TextArgument,
    countable,
    moment,
)
from tidings.errors import DeniedError, StewardUnreachable, UsageError
from tidings.wire.message import is_message_id
from tidings.wire.names import unmarked

if TYPE_CHECKING:
    from tidings.client.agent import Agent
    from tidings.client.incoming import Incoming
    from tidings.client.notices import Notice
    from tidings.client.transport import Joined, Receipt, Transport

WholeOption = Annotated[bool, Option("--whole", help="Do not cut long texts on a terminal.")]
ReplyOption = Annotated[str | None, Option("--reply-to", help="Id of the message this answers.", metavar="ID")]
#: messages that `history --since` shows at most, unless told
SINCE_COUNT = 1_000


def spoken(text: str) -> str:
    """The words of a command line, or of standard input for `-`."""
    words = sys.stdin.read() if text == "-" else text
    # what is not UTF-8 comes in as lone surrogates, from the command line as from standard input
    if any("\ud800" <= char <= "\udfff" for char in words):
        raise UsageError("this is not text in UTF-8, so it cannot be sent: encode it first, with base64 for instance")
    if not words.strip():
        raise UsageError("there is nothing to say: the text is empty")
    return words


def checked_priority(text: str) -> Literal["now", "next", "low"]:
    if text not in PRIORITIES:
        raise UsageError(f"priority is one of {', '.join(PRIORITIES)}, not {text!r}")
    return text  # type: ignore[return-value]


def checked_reply(given: str | None) -> str | None:
    if given is not None and not is_message_id(given):
        raise UsageError(f"--reply-to is the id of a message, as --json shows it, not {given!r}")
    return given


def send(
    ctx: DirectContext,
    channel: ChannelArgument,
    text: TextArgument,
    mention: Annotated[list[str] | None, Option("--mention", "-m", help="Agent to wake.")] = None,
    priority: PriorityOption = "next",
    reply_to: ReplyOption = None,
    context: Annotated[str | None, Option(help="Conversation this belongs to.")] = None,
    message_id: IdOption = None,
) -> None:
    """Post to a channel. Prints the id once the space, or the host, has stored it.

    The host says `stored` at once and `confirmed` when the space has the message; --direct bypasses the host.

    Examples:
      tidings send general 'the build is green' --mention bob
      git log -1 | tidings send deploys -
    """
    words, wakes, chosen = spoken(text), checked_priority(priority), chosen_id(message_id)
    answers, mentions = checked_reply(reply_to), tuple(mention or ())

    def say(agent: Agent[Transport]) -> Awaitable[Receipt]:
        return agent.send(
            channel, words, mentions=mentions, priority=wakes, reply_to=answers, context=context, id=chosen
        )

    show_receipt(ctx, act(ctx, say))
    output.hint(f"tidings history {channel}")


def join(ctx: DirectContext, channel: ChannelArgument) -> None:
    """Become a member of a channel or pattern: from then on its messages are owed to you.

    Through the host they come into your inbox: it receives as you from then on, and a program of the same agent that is
    receiving is superseded, and told so.

    Examples:
      tidings join general
      tidings join 'team.>' --as bob
    """

    async def become(agent: Agent[Transport]) -> Joined:
        joined = await agent.join(channel)
        if joined.state == "live" and agent.via == "direct":
            # an endpoint that stays up, as the host's does, completes it later; this command ends here
            raise StewardUnreachable(f"{ctx.agent} did not join {channel}: {joined.reason}; see `tidings status`")
        return joined

    # what is owed from now on is to come into the inbox, also of an agent that never looked into it
    joined = act(ctx, become, receive=True)
    ctx.end_if_json({name: getattr(joined, name) for name in ("channel", "state", "seq", "durable", "reason", "cls")})
    output.say(f"{ctx.agent} is in {channel} ({joined.state} at {joined.seq}, {joined.cls})")
    if joined.reason:
        output.say(f"note: {joined.reason}")
    output.hint(f"tidings tail {channel}")


def leave(ctx: DirectContext, channel: ChannelArgument) -> None:
    """Leave a channel or pattern. What was owed before is still delivered.

    Example:
      tidings leave general
    """
    left = act(ctx, lambda agent: agent.leave(channel))
    ctx.end_if_json({"state": left.state, "seq": left.seq, "still_covered_by": list(left.still_covered_by)})
    output.say(f"{ctx.agent} {'left' if left.state == 'left' else 'was not in'} {channel}")
    if left.still_covered_by:
        output.say(f"note: {', '.join(left.still_covered_by)} still covers it")
    output.hint("tidings channels list")


def history(
    ctx: DirectContext,
    channel: ChannelArgument,
    count: Annotated[
        int | None, Option("-n", "--count", help="How many (20; 1000 with --since).", callback=countable)
    ] = None,
    before: Annotated[int | None, Option(help="Only below this sequence.", metavar="SEQ", callback=countable)] = None,
    since: Annotated[str | None, Option(help="Nothing older: 90m, 12h, 7d, 2026-11-16T09:00.", metavar="WHEN")] = None,
    whole: WholeOption = False,
) -> None:
    """Show what was said in a channel, the newest last.

    Examples:
      tidings history general
      tidings history general --since 2h
      tidings history general -n 200 --before 1000 --json
    """
    output.show_whole(whole)
    oldest = moment("--since", since) if since is not None else None
    count = (20 if oldest is None else SINCE_COUNT) if count is None else count

    found = act(ctx, lambda agent: agent.history(channel, count, before=before))
    if missing := found.missing(channel):
        output.say(f"note: {missing}")
    recent = [each for each in found if oldest is None or each.time_ns / 1e9 >= oldest.timestamp()]
    for message in reversed(recent):
        show_message(ctx, message)
    if oldest is not None and recent and len(recent) == count:
        output.say(
            f"note: these are the newest {count}; there may be more since then: -n, or --before {recent[-1].seq}"
        )
    output.hint(f"tidings tail {channel}")


def tail(
    ctx: AgentContext,
    channels: Annotated[
        list[str] | None,
        Argument(help="Channels or patterns.", metavar="CHANNEL...", autocompletion=completion.channels),
    ] = None,
    everything: Annotated[bool, Option("--all", help="Everything you may read.")] = False,
    count: Annotated[int | None, Option("--count", help="Stop after this many messages.", callback=countable)] = None,
    whole: WholeOption = False,
) -> None:
    """Watch messages as they come, without joining. Ctrl-C stops.

    What you post yourself is not shown; `tidings history` has it. This goes to the space itself, also if a host runs:
    what is watched is nobody's mail. It takes no message from an inbox, and no session from a program that receives.

    Examples:
      tidings tail general 'team.>'
      tidings tail --all --json
    """
    output.show_whole(whole)
    if bool(channels) == everything:
        raise UsageError("name the channels to watch, or --all for everything you may read; one of the two")

    async def watch() -> None:
        async with direct_session(ctx) as endpoint:
            wanted = [unmarked(each) for each in channels or ()] or (await endpoint.access())["read"]
            if not wanted:
                raise DeniedError(f"{ctx.agent} may read nothing: `tidings agent access {ctx.agent}` shows it")
            for pattern in wanted:
                await endpoint.transport.watch(pattern)
            endpoint.on("notice", lambda notice: show_notice(ctx, notice))
            output.say(f"watching {', '.join(wanted)}; Ctrl-C stops")
            seen = 0
            async for message in endpoint.messages():
                show_message(ctx, message)
                seen += 1
                if count is not None and seen >= count:
                    return

    try:
        asyncio.run(watch())
    except KeyboardInterrupt:
        output.say("stopped")


def show_notice(ctx: Context, notice: Notice) -> None:
    """What this agent is told that is no message, among those it is about."""
    where = f" #{printable(notice.channel)}" if notice.channel else ""
    text = f"{datetime.now(UTC).astimezone():%H:%M:%S} notice{where}: {printable(notice.text)}"
    ctx.stream({"kind": "notice", "text": notice.text, "notice": notice.facts()}, text)


def show_message(ctx: Context, message: Incoming) -> None:
    """One message: a line of JSON, or a line for people. What others wrote is shown as data, control characters out."""
    from tidings.client.message_json import SAID, message_json, sender_json

    facts = message_json(message)
    when = datetime.fromtimestamp(message.time_ns / 1e9, UTC).astimezone()
    place_name = f"#{message.channel}" if message.channel else "direct"
    # further lines are set in, so that nobody's text can pass for a message of somebody else
    way = f"tidings history {message.channel} --before {message.seq + 1} -n 1 --whole"
    words = printable(output.cut(message.text, way) if message.channel else message.text).replace("\n", "\n    ")
    by = writer(sender_json(message.sender.id, message.sender.name, message.claims))
    ctx.stream({name: facts[name] for name in SAID}, f"{when:%H:%M:%S} {place_name} {by}: {words}")


def writer(sender: dict[str, Any]) -> str:
    """Who wrote it, for a person: the name of the access record, and beside it what the message claims instead."""
    claimed = f" (claims to be {quoted(sender['claims'])})" if sender.get("claims") else ""
    return printable(sender["name"]) + claimed


def quoted(text: str) -> str:
    return f'"{printable(text)}"'


def printable(text: str) -> str:
    """Text of somebody else, without what could steer a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)
