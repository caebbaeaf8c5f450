"""`tidings work`: a command for each task of a role, one at a time, claimed by the host or by ourselves.

Through the host a worker has a session of its own: the host beats for what it holds while the worker says that it
lives, and gives the task back when the session ends. If the host goes away the work goes on without it; what was held
then is given back by the host, or by its silence.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidings.cli import completion, output
from tidings.cli.connection import direct_session, host_session
from tidings.cli.context import Context, DirectContext
from tidings.cli.talk import writer
from tidings.cli.tasks import on_a_line
from tidings.errors import ConflictError, HostUnreachable, OutcomeUnknown, UnknownMessage

if TYPE_CHECKING:
    from tidings.client.tasks import Job

OUTPUT_CHARACTERS = 60_000
Facts = dict[str, Any]
#: what a command is told of its task, and `--json` prints
TOLD = ("seq", "role", "attempt", "deadline", "asker", "text", "message")


def work(
    ctx: DirectContext,
    role: Annotated[str, typer.Option("--role", help="Role whose tasks to take.", autocompletion=completion.roles)],
    execute: Annotated[
        str | None,
        typer.Option(
            "--exec", help="Command to run for each task; without it, the first task is shown and given back."
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End after one task.")] = False,
) -> None:
    """Work on the tasks of a role: a command for each, one at a time. Ctrl-C stops, and gives back what is held.

    The command gets the task as JSON on standard input, its text in TIDINGS_TEXT, who asked in TIDINGS_ASKER (the name
    of its access record, whatever the task says) and TIDINGS_ASKER_ID (its verified id). If it ends with 0 its output
    is the result; otherwise the task is tried again, with the last line of its errors as reason.
    An agent holds one task at a time, whichever of its programs has it.

    Examples:
      tidings work --role reviewer --exec './review.sh'
      tidings work --role reviewer --exec 'wc -w' --once
    """
    ctx.check()

    async def all_tasks() -> None:
        async with aclosing(_each_task(ctx, role)) as tasks:
            async for job in tasks:
                facts = _facts_of(job)
                _announce(facts, ctx.as_json)
                if execute is None:
                    await job.put_back()
                    output.say("it was only shown, and is queued again; no attempt was made")
                    return
                await _run(job, facts, execute)
                if once:
                    return

    try:
        asyncio.run(all_tasks())
    except KeyboardInterrupt:
        output.say("stopped; a task that was held is given back")
    output.hint("tidings dead list")


async def _each_task(ctx: Context, role: str) -> AsyncGenerator[Job, None]:
    """Through the host, in a session of its own that ends with it; without it, if none runs or it goes away."""
    async with host_session(ctx, own="tidings work") as agent:
        if agent is not None:
            try:
                async with aclosing(agent.work(role)) as jobs:  # type: ignore[type-var]
                    async for job in jobs:
                        yield job
            except (HostUnreachable, OutcomeUnknown) as error:
                # a claim without an answer: a host that stops gives back what it took
                output.say(f"note: {error}; going without it")
    async with direct_session(ctx, presence=True) as endpoint, aclosing(endpoint.work(role)) as jobs:  # type: ignore[type-var]
        async for job in jobs:
            yield job


def _facts_of(job: Job) -> Facts:
    from tidings.client.message_json import job_json

    facts = job_json(job)
    return {name: facts[name] for name in TOLD}


def _announce(facts: Facts, as_json: bool) -> None:
    if as_json:
        output.line(json.dumps(facts))
    else:
        who, attempt = writer(facts["asker"]), facts["attempt"]
        output.say(f"task {facts['seq']} from {who} (attempt {attempt}): {on_a_line(facts['text'])}")


async def _run(job: Job, facts: Facts, command: str) -> None:
    environment = {
        **os.environ,
        "TIDINGS_TEXT": facts["text"].replace("\0", "")[:100_000],
        "TIDINGS_ASKER": facts["asker"]["name"],
        "TIDINGS_ASKER_ID": facts["asker"]["id"],
        "TIDINGS_ATTEMPT": str(facts["attempt"]),
    }
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_shell(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
    try:
        out, err = await process.communicate(json.dumps(facts).encode())
    finally:
        if process.returncode is None:
            process.kill()
    try:
        if process.returncode == 0:
            await job.done(out.decode(errors="replace").rstrip("\n")[:OUTPUT_CHARACTERS])
            output.say(f"task {facts['seq']} is done")
        else:
            said = err.decode(errors="replace").strip().splitlines()
            state = await job.fail(said[-1] if said else f"the command ended with {process.returncode}")
            output.say(f"task {facts['seq']} failed and is {state}")
    except (ConflictError, UnknownMessage) as error:
        output.say(f"note: {error}")
    except (HostUnreachable, OutcomeUnknown) as error:
        output.say(f"note: task {facts['seq']} is settled, or another worker gets it: {error}")
