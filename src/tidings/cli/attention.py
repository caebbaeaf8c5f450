"""`tidings attention`: what may wake an agent, shown and set from a terminal."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidings.cli import completion, output
from tidings.cli.connection import act
from tidings.cli.context import DirectContext
from tidings.errors import UsageError

if TYPE_CHECKING:
    from tidings.client.interface import AgentInterface

MODES = {
    "open": "everything wakes it",
    "dnd": "mentions, direct messages, tasks and what is urgent (now) wake it",
    "focus": "mentions, direct messages and tasks wake it",
}
LEVELS = ("normal", "quiet", "muted")


def attention(
    ctx: DirectContext,
    mode: Annotated[
        str | None,
        typer.Argument(help="open, dnd or focus.", metavar="MODE", autocompletion=completion.among(*MODES)),
    ] = None,
    channel: Annotated[
        tuple[str, str] | None,
        typer.Option("--channel", help="How loud a channel or pattern is.", metavar="CHANNEL normal|quiet|muted"),
    ] = None,
) -> None:
    """Show or set what may wake an agent. It never decides what is kept: everything stays in the inbox.

    The steward keeps it for the agent, not for this terminal: a program of the same agent that runs now takes it over
    within a second, and one that starts later begins with it. A program may change its own afterwards; the later word
    holds. On a muted channel nothing wakes; on a quiet one mentions and what is urgent do. Others see the mode only.

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

    def ask(agent: AgentInterface) -> Awaitable[dict[str, Any]]:
        return agent.keep_attention(mode, levels) if mode or levels else agent.attention()  # type: ignore[arg-type]

    answer = act(ctx, ask)
    kept = answer["standing"] or {"mode": "open", "channels": {}}
    ctx.end_if_json({**kept, "kept": answer["standing"] is not None, "running": answer["running"]})
    _show(kept)
    running = answer["running"]
    if running is None:
        output.say(f"{ctx.agent} does not run now; it begins with this when it does")
    elif running != kept and not (mode or levels):
        output.say(f"a program of {ctx.agent} runs and chose otherwise for itself: {running['mode']}")
    output.hint("tidings who" if mode or levels else "tidings attention dnd")


def _show(kept: dict[str, Any]) -> None:
    rows = [("everything", kept["mode"], MODES[kept["mode"]])]
    rows += [(pattern, level, "") for pattern, level in sorted(kept["channels"].items())]
    output.table(("what", "level", "meaning"), rows, empty="")
