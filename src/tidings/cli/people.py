"""`who`, `dm`, `trace`: one agent to another."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidings.cli import output
from tidings.cli.options import (
    AgentArgument,
    AsOption,
    HomeOption,
    JsonOption,
    PriorityOption,
    SpaceOption,
    TextArgument,
    place,
)
from tidings.cli.talk import checked_priority, endpoint_at, printable, show_receipt, spoken
from tidings.cli.through_host import (
    DirectOption,
    IdOption,
    chosen_id,
    handed_over,
    session_if_any,
    show_sent,
    wait_until,
)

if TYPE_CHECKING:
    from tidings.host.client import Session


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
    message_id: IdOption = None,
    direct: DirectOption = False,
    space: SpaceOption = None,
    home: HomeOption = None,
    acting_as: AsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write to one agent, sealed. It is kept until it is read.

    With the host it is `stored` at once and leaves by itself, `confirmed` once the space has it.

    Examples:

      tidings dm bob 'can you look at this?'

      tidings dm bob 'urgent' --priority now --wait read
    """
    from tidings.errors import UsageError

    if wait not in (None, "delivered", "read"):
        raise UsageError(f"--wait is delivered or read, not {wait!r}")
    where = place(space, home, acting_as)
    words, wakes, chosen = spoken(text), checked_priority(priority), chosen_id(message_id)
    session = session_if_any(where, direct=direct)
    sent = handed_over(session, agent=to, text=words, priority=wakes, id=chosen) if session else None
    if session is not None and sent is not None:
        stage = _stage_within(session, chosen, wait, seconds) if wait else sent.stage
        show_sent(replace(sent, stage=stage), as_json=as_json)  # type: ignore[arg-type]
        _note_stage(chosen, stage, wait, seconds)
        return

    async def act() -> Any:
        async with endpoint_at(where) as endpoint:
            receipt = await endpoint.dm(to, words, priority=wakes, id=chosen)
            return await endpoint.receipt(receipt, wait, timeout=seconds) if wait else receipt

    receipt = asyncio.run(act())
    show_receipt(receipt, as_json=as_json)
    _note_stage(receipt.id, receipt.stage, wait, seconds)


def _note_stage(message_id: str, stage: str, wait: str | None, seconds: float) -> None:
    if wait and stage not in (wait, "read"):
        output.say(f"note: not {wait} after {seconds:g} s; `tidings trace {message_id}` tells what becomes of it")
    output.hint(f"tidings trace {message_id}")


def _stage_within(session: Session, message_id: str, stage: str, seconds: float) -> str:
    """How far it has come, at last or in time."""
    found = "stored"

    def reached(left: float) -> bool:
        nonlocal found
        asked = time.monotonic()
        found = session.receipt(message_id, stage, wait=left)["stage"]
        if found == "stored":  # it has not left, so there is nobody to ask yet
            time.sleep(max(0.0, min(left, 0.2) - (time.monotonic() - asked)))
        return found in (stage, "read")

    wait_until(reached, seconds)
    return found


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
