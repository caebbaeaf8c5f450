"""`tidings outbox`: the messages that the host sends for its agents, and their states."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Argument, Option

from tidings.cli import output
from tidings.cli.completion import among
from tidings.cli.connection import act_at_host, ask_host, outbox_in_file
from tidings.cli.context import AgentContext, Context, CountOption, Group, SpaceContext, countable
from tidings.cli.talk import printable
from tidings.contract.host import PauseSpaceRequest, ResumeSpaceRequest, SpacePausedAnswer
from tidings.errors import UsageError

app = Group(help="List, show, requeue, cancel or hold back messages that the host sends for you.")
STATES = ("pending", "inflight", "confirmed", "done", "dead", "cancelled")
MessageArgument = Annotated[str, Argument(help="Id of the message.", metavar="ID")]


@app.command("list")
def list_outbox(
    ctx: AgentContext,
    state: Annotated[str | None, Option(help=f"Only: {', '.join(STATES)}.", autocompletion=among(*STATES))] = None,
    count: CountOption = 20,
    before: Annotated[int | None, Option(help="Only rows below this one.", metavar="ROW", callback=countable)] = None,
) -> None:
    """List your messages in the outbox, newest first. Reads the host's file if no host runs.

    Examples:
      tidings outbox list
      tidings outbox list --state pending --json
    """
    if state is not None and state not in STATES:
        raise UsageError(f"--state is one of {', '.join(STATES)}, not {state!r}")
    file = outbox_in_file(ctx)
    page = (state, count, before)
    rows = file.outbox(*page) if file else act_at_host(ctx, lambda agent: agent.transport.outbox(*page))
    ctx.end_if_json(rows)
    output.table(
        ("row", "id", "to", "state", "attempts", "accepted", "why"),
        [(row["row"], row["id"], _to(row), row["state"], row["attempts"], row["accepted"], _why(row)) for row in rows],
        empty="nothing was handed to the host" + (f" that is {state}" if state else ""),
    )
    output.hint(f"tidings outbox show {rows[0]['id']}" if rows else "tidings send general 'hello'")


def _to(row: dict[str, Any]) -> str:
    return {"chat": "#", "dm": "", "task": "role "}[row["kind"]] + str(row.get("to_name") or row["to"])


def _why(row: dict[str, Any]) -> str:
    return printable(f"{row['code']}: {row['words']}") if row["code"] else ""


@app.command("show")
def show(ctx: AgentContext, message: MessageArgument) -> None:
    """Show one message in the outbox: its state, why it waits, and what replaced it.

    Reads the host's file if no host runs: the state is that when the host stopped.

    Example:
      tidings outbox show 019a8b7c-5f3e-7d21-9c64-0a1b2c3d4e5f
    """
    file = outbox_in_file(ctx)
    row = file.outbox_row(message) if file else act_at_host(ctx, lambda agent: agent.transport.outbox_row(message))
    ctx.end_if_json(row)
    chain, waits = row.pop("chain"), row.pop("waits", [])
    row["to"], _ = _to(row), row.pop("to_name", None)
    facts = [(key, value) for key, value in row.items() if value not in (None, False)]
    facts += [("waits because", printable(each)) for each in waits]
    facts += [("replaced by" if each["row"] > row["row"] else "replaces", each["id"]) for each in chain[:20]]
    facts = [(what, value) for what, value in facts if (what, value) != ("replaces", row["id"])]
    output.table(("what", "value"), facts)
    output.hint(f"tidings outbox requeue {message}" if row["state"] in ("dead", "cancelled") else "tidings outbox list")


@app.command("requeue")
def requeue(ctx: AgentContext, message: MessageArgument) -> None:
    """Send a dead or cancelled message again, under a new id. Needs the host.

    Example:
      tidings outbox requeue 019a8b7c-5f3e-7d21-9c64-0a1b2c3d4e5f
    """
    from tidings.client.message_json import to_json
    from tidings.contract.host import RequeueRequest

    row = to_json(act_at_host(ctx, lambda agent: agent.call(RequeueRequest(message))))
    ctx.end_if_json(row)
    output.line(row["id"])
    output.say(f"stored again as {row['id']}, in place of {message}")
    output.hint(f"tidings outbox show {row['id']}")


@app.command("cancel")
def cancel(ctx: AgentContext, message: MessageArgument) -> None:
    """Cancel a message that is not sent yet. Needs the host.

    A message that is being sent may still arrive; the command then says so.

    Example:
      tidings outbox cancel 019a8b7c-5f3e-7d21-9c64-0a1b2c3d4e5f
    """
    from tidings.client.message_json import to_json
    from tidings.contract.host import CancelRequest

    row = to_json(act_at_host(ctx, lambda agent: agent.call(CancelRequest(message))))
    ctx.end_if_json(row)
    if row["state"] == "cancelled":
        output.say(f"message {message} is cancelled")
    elif row["cancel_asked"]:
        output.say(f"message {message} is on its way: it is cancelled unless the space has it already")
    else:
        output.say(f"message {message} is {row['state']}: there is nothing to cancel")
    output.hint(f"tidings outbox show {message}")


@app.command("pause")
def pause(ctx: SpaceContext, reason: Annotated[str | None, Option(help="Reason to show.")] = None) -> None:
    """Hold back all messages to a space until `resume`. The host still accepts and stores new ones.

    Examples:
      tidings outbox pause
      tidings outbox pause --space lab --reason 'on a plane'
    """
    request = PauseSpaceRequest(ctx.home.name, **({"reason": reason} if reason else {}))
    _show_held(ctx, ask_host(ctx.home.home, lambda host: host.call(request)))


@app.command("resume")
def resume(ctx: SpaceContext) -> None:
    """Send the messages that are held back for a space.

    Example:
      tidings outbox resume --space lab
    """
    _show_held(ctx, ask_host(ctx.home.home, lambda host: host.call(ResumeSpaceRequest(ctx.home.name))))


def _show_held(ctx: Context, answer: SpacePausedAnswer) -> None:
    ctx.end_if_json(answer)
    output.say(f"the outbox of {ctx.home.name} {'is held back' if answer.paused else 'leaves again'}")
    output.hint("tidings outbox resume" if answer.paused else "tidings outbox list")
