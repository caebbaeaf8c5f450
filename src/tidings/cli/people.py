"""`who`, `set-status`, `attention`, `dm`, `trace`: other agents, and what they see of you."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import asdict, replace
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

from msgspec import UnsetType
from typer import Argument, Option

from tidings.cli import output
from tidings.cli.completion import among
from tidings.cli.connection import IdOption, act, act_at_host, chosen_id, show_receipt
from tidings.cli.context import AgentArgument, AgentContext, DirectContext, PriorityOption, TextArgument, duration
from tidings.cli.talk import ReplyOption, checked_priority, checked_reply, printable, spoken
from tidings.contract.host import HostTrace
from tidings.contract.mail import TraceAnswer, TracedReceipt, TracedRecord
from tidings.errors import TidingsError, UnreachableError, UsageError
from tidings.wire.states import READER_STAGES, ReceiptStage

if TYPE_CHECKING:
    from tidings.client.agent import Agent
    from tidings.client.transport import Receipt, Transport
    from tidings.contract.agents import AttentionAnswer
    from tidings.wire.roster import AgentEntry

KINDS = {"chat": "message", "dm": "direct message", "task": "task"}
STATUSES = ("idle", "working", "waiting")


def who(ctx: DirectContext) -> None:
    """List the agents of a space: who is here, what they do, when the others were last seen.

    Agents of linked spaces that share their roster come last, as name@space: mention them, or write to them, by that.

    While the space cannot be reached the host tells whom it last saw, with the status `unknown`, and that is said.

    Examples:
      tidings who
      tidings who --json
    """
    found = act(ctx, lambda agent: agent.who())
    if not (found.fresh or found):
        raise UnreachableError(f"the host never saw who is in {ctx.home.name}: {found.reason}")
    agents = sorted(found, key=lambda agent: (bool(agent.elsewhere), agent.status == "offline", agent.name))
    columns = ("name", "status", "attention", "roles", "activity", "seen")
    everybody = [asdict(agent) for agent in agents]
    ctx.show_rows(everybody, columns, map(_agent_row, agents), empty="nobody is in this space yet")
    if not found.fresh:
        output.say(f"note: these are the agents as last seen: {found.reason}")
    # Who looks at others should know that what was said may still be on its way.
    if found.delay:
        output.say(f"note: {found.delay}")
    if not ctx.as_json:
        other = next((agent.name for agent in agents if agent.name != ctx.agent), None)
        output.hint(f"tidings dm {other} 'hello'" if other else "tidings agent add NAME")


def _agent_row(agent: AgentEntry) -> tuple[object, ...]:
    said = printable(agent.activity or "")
    if agent.elsewhere:  # how it is there is not told
        return agent.name, f"in {agent.elsewhere}", None, list(agent.roles), "", ""
    return agent.name, agent.status, agent.attention, list(agent.roles), said, output.age(agent.last_seen)


def set_status(
    ctx: AgentContext,
    status: Annotated[str, Argument(help="idle, working, waiting.", metavar="STATUS", autocompletion=among(*STATUSES))],
    activity: Annotated[str | None, Argument(help="What you do, in a line.", metavar="TEXT")] = None,
) -> None:
    """Say what you do, for whoever looks (`tidings who`). Needs the host, which stays connected for you.

    Examples:
      tidings set-status working 'reviewing the parser'
      tidings set-status idle --as bob
    """
    if status not in STATUSES:
        raise UsageError(f"a status is {', '.join(STATUSES)}, not {status!r}")
    attached = act_at_host(ctx, lambda agent: agent.announce(status, activity))  # type: ignore[arg-type]
    ctx.end_if_json({"status": status, "activity": activity, "attached": attached})
    output.say(f"{status}{': ' + printable(activity) if activity else ''}")
    if not attached:
        output.say("note: others see it while a program of yours is attached, such as `tidings inbox --follow`")
    output.hint("tidings who")


def dm(
    ctx: DirectContext,
    to: AgentArgument,
    text: TextArgument,
    priority: PriorityOption = "next",
    reply_to: ReplyOption = None,
    wait: Annotated[str | None, Option(help="Wait until it is delivered or read.", metavar="STAGE")] = None,
    seconds: Annotated[float, Option(help="How long to wait.", callback=duration)] = 30.0,
    message_id: IdOption = None,
) -> None:
    """Write to one agent, sealed. It is kept until it is read.

    The host says `stored` at once and `confirmed` when the space has the message.

    Examples:
      tidings dm bob 'can you look at this?'
      tidings dm bob 'urgent' --priority now --wait read
    """
    if wait not in (None, *READER_STAGES):
        raise UsageError(f"--wait is delivered or read, not {wait!r}")
    words, wakes, chosen = spoken(text), checked_priority(priority), chosen_id(message_id)
    answers = checked_reply(reply_to)

    async def write(agent: Agent[Transport]) -> Receipt:
        sent = await agent.dm(to, words, priority=wakes, id=chosen, reply_to=answers)
        if wait is None:
            return sent
        reached = await agent.receipt(sent, wait, timeout=seconds)
        return replace(sent, stage=reached.stage, seq=reached.seq)

    receipt = act(ctx, write)
    is_reached = wait is None or receipt.stage in (wait, ReceiptStage.READ)
    if ctx.as_json or is_reached:
        show_receipt(ctx, receipt)
    if not is_reached:  # whoever waited in vain is told so by the exit code, too
        raise TidingsError(
            f"message {receipt.id} is {receipt.stage}, not {wait}, after {seconds:g} s; it stays sent, and "
            f"`tidings trace {receipt.id}` tells what becomes of it"
        )
    output.hint(f"tidings trace {receipt.id}")


def trace(
    ctx: DirectContext,
    message: Annotated[str, Argument(help="Id of a message you sent or were sent.", metavar="ID")],
) -> None:
    """Tell the life of one message: where it is stored, who got it, when.

    Example:
      tidings trace 019a8b7c-5f3e-7d21-9c64-0a1b2c3d4e5f
    """
    found = act(ctx, lambda agent: agent.trace(message))
    row = found.outbox if isinstance(found, HostTrace) else None
    if row and not (found.stored or found.receipts):
        output.say(f"note: it is {row.state} in the outbox of the host: `tidings outbox show {message}`")
    ctx.end_if_json(TraceAnswer(found.id, found.stored, found.receipts, found.names))
    if found.stored or found.receipts:
        for line in life_of(found):
            output.line(printable(line))
        output.hint("tidings inbox")
    elif not row:
        output.say(f"nothing is known of {message}: it is not a message {ctx.agent} sent or was sent, or it is gone")


def life_of(trace: TraceAnswer) -> list[str]:
    """What is known of a message, a line for each thing that happened to it."""

    def who(agent: str | UnsetType | None) -> str:
        agent = agent or "?"
        return trace.names.get(agent) or f"{agent[:10]}…"

    def destination(row: TracedRecord | TracedReceipt) -> str:
        to = row.to or "?"
        return {"chat": f"#{to}", "task": f"the role {to}"}.get(row.kind) or who(to)

    lines = []
    for record in trace.stored:
        when = datetime.fromisoformat(record.time).astimezone()
        what = f"{KINDS[record.kind]} from {who(record.sender)} to {destination(record)}"
        lines.append(f"{what}, sequence {record.seq}, {when:%F %T}")
        extras = {"origin": record.origin, "link": record.link, "void": record.void}
        lines += [f"  {name}: {value}" for name, value in extras.items() if value]
    for each in trace.receipts:
        by = f" by {who(each.worker)}" if each.worker else ""
        tries = f", attempt {each.attempt}" if each.attempt else ""
        why = f" ({each.cause})" if each.cause else ""
        lines.append(f"{KINDS[each.kind]} to {destination(each)} is {each.state or each.stage}{by}{tries}{why}")
        stages = sorted(each.stages.items(), key=lambda stage: stage[1])
        lines += [f"  {stage} {datetime.fromisoformat(when).astimezone():%F %T}" for stage, when in stages]
        lines += [f"  {reason}" for reason in each.reasons or ()]
        lines += [f"  why: {each.why}"] if each.why else []
    return lines


MODES = {
    "open": "everything wakes it",
    "dnd": "mentions, direct messages, tasks and what is urgent (now) wake it",
    "focus": "mentions, direct messages and tasks wake it",
}
LEVELS = ("normal", "quiet", "muted")


def attention(
    ctx: DirectContext,
    mode: Annotated[
        str | None, Argument(help="open, dnd, focus.", metavar="MODE", autocompletion=among(*MODES))
    ] = None,
    channel: Annotated[
        tuple[str, str] | None,
        Option("--channel", help="How loud a channel or pattern is.", metavar="CHANNEL normal|quiet|muted"),
    ] = None,
) -> None:
    """Show or set what may wake an agent. It never decides what is kept: everything stays in the inbox.

    The steward keeps it for the agent: its running programs take it over within a second, later ones begin with it. On
    a muted channel nothing wakes; on a quiet one mentions and what is urgent do. Others see the mode only.

    Examples:
      tidings attention                                   show
      tidings attention dnd --as bob                      bob, wherever it runs
      tidings attention --channel team.builds muted
      tidings attention open --channel 'team.>' quiet --json
    """
    if mode is not None and mode not in MODES:
        raise UsageError(f"attention is {', '.join(MODES)}, not {mode!r}")
    if channel is not None and channel[1] not in LEVELS:
        raise UsageError(f"a channel is {', '.join(LEVELS)}, not {channel[1]!r}")
    levels = {} if channel is None else {channel[0]: channel[1]}

    def ask(agent: Agent[Transport]) -> Awaitable[AttentionAnswer]:
        return agent.keep_attention(mode, levels) if mode or levels else agent.attention()  # type: ignore[arg-type]

    answer = act(ctx, ask)
    from tidings.wire.roster import Attention

    kept, running = answer.standing or Attention(), answer.running
    facts = {"kept": answer.standing is not None, "running": running}
    ctx.end_if_json({"mode": kept.mode, "channels": kept.channels, **facts})
    rows: list[tuple[str, str, str]] = [("everything", kept.mode, MODES[kept.mode])]
    rows += [(pattern, level, "") for pattern, level in sorted(kept.channels.items())]
    output.table(("what", "level", "meaning"), rows)
    if running is None:
        output.say(f"{ctx.agent} does not run now; it begins with this when it does")
    elif running != kept and not (mode or levels):
        output.say(f"a program of {ctx.agent} runs and chose otherwise for itself: {running.mode}")
    output.hint("tidings who" if mode or levels else "tidings attention dnd")
