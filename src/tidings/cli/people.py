"""`who`, `dm`, `inbox`, `trace`: one agent to another."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from tidings.cli import output
from tidings.cli.options import (
    AgentArgument,
    AsOption,
    CountOption,
    HomeOption,
    JsonOption,
    PriorityOption,
    SpaceOption,
    TextArgument,
    place,
)
from tidings.cli.talk import checked_priority, endpoint_at, printable, show_message, show_receipt, spoken


def who(
    space: SpaceOption = None, home: HomeOption = None, acting_as: AsOption = None, as_json: JsonOption = False
) -> None:
    """List the agents of a space: who is here, what they do, when the others were last seen.

    Examples:

      tidings who

      tidings who --json
    """
    import msgspec

    where = place(space, home, acting_as)

    async def act() -> tuple[list[Any], str]:
        async with endpoint_at(where) as endpoint:
            return await endpoint.who(), endpoint.roster.backstop.delay

    found, delay = asyncio.run(act())
    agents = sorted(found, key=lambda agent: (agent.status == "offline", agent.name))
    if as_json:
        output.data([msgspec.to_builtins(agent) for agent in agents])
        _note_delay(delay)
        return
    rows = [
        (
            agent.name,
            agent.status,
            agent.attention,
            agent.roles,
            printable(agent.activity or ""),
            output.age(agent.last_seen),
        )
        for agent in agents
    ]
    columns = ("name", "status", "attention", "roles", "activity", "seen")
    output.table(columns, rows, empty="nobody is in this space yet")
    _note_delay(delay)
    other = next((agent.name for agent in agents if agent.name != where.agent), None)
    output.hint(f"tidings dm {other} 'hello'" if other else "tidings agent add NAME")


def _note_delay(delay: str) -> None:
    """Who looks at others, or into an empty mailbox, should know that what was said may still be on its way."""
    if delay:
        output.say(f"note: {delay}")


def dm(
    to: AgentArgument,
    text: TextArgument,
    priority: PriorityOption = "next",
    wait: Annotated[str | None, typer.Option(help="Wait until it is delivered or read.", metavar="STAGE")] = None,
    seconds: Annotated[float, typer.Option(help="How long to wait.")] = 30.0,
    space: SpaceOption = None,
    home: HomeOption = None,
    acting_as: AsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write to one agent, sealed. It is kept until it is read.

    Examples:

      tidings dm bob 'can you look at this?'

      tidings dm bob 'urgent' --priority now --wait read
    """
    from tidings.errors import UsageError

    if wait not in (None, "delivered", "read"):
        raise UsageError(f"--wait is delivered or read, not {wait!r}")
    where = place(space, home, acting_as)
    words, wakes = spoken(text), checked_priority(priority)

    async def act() -> Any:
        async with endpoint_at(where) as endpoint:
            receipt = await endpoint.dm(to, words, priority=wakes)
            return await endpoint.receipt(receipt, wait, timeout=seconds) if wait else receipt

    receipt = asyncio.run(act())
    show_receipt(receipt, as_json=as_json)
    if wait and receipt.stage not in (wait, "read"):
        output.say(f"note: not {wait} after {seconds:g} s; `tidings trace {receipt.id}` tells what becomes of it")
    output.hint(f"tidings trace {receipt.id}")


def inbox(
    wait: Annotated[float, typer.Option(help="Seconds to wait for the first message.")] = 2.0,
    count: CountOption = 50,
    space: SpaceOption = None,
    home: HomeOption = None,
    acting_as: AsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read your direct messages, and durable copies of your channels. What is shown is settled; the rest stays.

    It receives as you: a program of the same agent that is receiving is superseded, and told so.

    Examples:

      tidings inbox

      tidings inbox --as bob --wait 30 -n 1 --json
    """
    where = place(space, home, acting_as)

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
    if shown < count:
        _note_delay(delay)
    output.hint("tidings who")


def trace(
    message: Annotated[str, typer.Argument(help="Id of a message you sent or were sent.", metavar="ID")],
    space: SpaceOption = None,
    home: HomeOption = None,
    acting_as: AsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell the life of one message: where it is stored, who got it, when.

    Example:

      tidings trace 019a8b7c-5f3e-7d21-9c64-0a1b2c3d4e5f
    """
    where = place(space, home, acting_as)

    async def act() -> dict[str, Any]:
        async with endpoint_at(where) as endpoint:
            return await endpoint.trace(message)

    facts = {key: value for key, value in asyncio.run(act()).items() if key != "ok"}
    if as_json:
        output.data(facts)
        return
    if not facts["stored"] and not facts["receipts"]:
        output.say(f"nothing is known of {message}: it is not a message {where.agent} sent or was sent, or it is gone")
        return
    output.table(
        ("what", "value"), [(key, printable(str(value))) for key, value in facts.items()], empty="nothing is known"
    )
    output.hint("tidings inbox")
