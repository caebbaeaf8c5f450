"""The command `tidings`: every subcommand, and the one place where errors become sentences and exit codes.

Exit codes: 0 ok, 1 failed, 2 usage, 3 unhealthy, 4 denied, 5 unreachable, 6 conflict.
"""

from __future__ import annotations

import functools
import os
from typing import Annotated, Any

import typer

from tidings.cli import (
    about,
    agent,
    attention,
    channel,
    demo,
    doctor,
    host,
    inbox,
    mcp,
    outbox,
    output,
    people,
    pipeline,
    running,
    spaces,
    talk,
    tasks,
    work,
)
from tidings.errors import TidingsError

app = typer.Typer(
    name="tidings",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A durable message mesh for AI agents.",
    epilog="Start with `tidings up`, then `tidings agent add NAME`; `tidings demo` shows it all.",
)


@app.callback()
def everything(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=about.print_version)
    ] = False,
) -> None:
    pass


for each in (
    running.up,
    running.down,
    running.status,
    running.logs,
    talk.send,
    talk.tail,
    talk.join,
    talk.leave,
    talk.history,
    people.who,
    people.dm,
    people.trace,
    people.set_status,
    attention.attention,
    tasks.ask,
    tasks.result,
    work.work,
    about.config,
    about.version,
    demo.demo,
    mcp.mcp,
):
    app.command()(each)
app.add_typer(inbox.app, name="inbox")
app.add_typer(outbox.app, name="outbox")
app.add_typer(host.app, name="host")
app.add_typer(channel.app, name="channels")
app.add_typer(agent.app, name="agent")
app.add_typer(spaces.app, name="space")
app.add_typer(doctor.app, name="doctor")
app.add_typer(tasks.app, name="dead")
app.add_typer(pipeline.app, name="pipeline")


@functools.cache
def command() -> Any:
    """Everything that can be typed, built once: that takes longer than most commands."""
    return typer.main.get_command(app)


def main(arguments: list[str] | None = None) -> int:
    """Run a command line and answer its exit code; nothing escapes as a traceback that was meant as a sentence."""
    os.umask(0o077)
    try:
        command()(arguments, prog_name="tidings")
    except SystemExit as ended:  # the parser's own way to end: usage errors, `--help`, `typer.Exit`
        return ended.code if isinstance(ended.code, int) else 0
    except TidingsError as error:
        output.say(f"tidings: {error}")
        return error.exit_code
    except BrokenPipeError:
        return 0
    return 0
