"""`tidings work`: a command for each task of a role, one at a time, claimed by the host or by ourselves.

Through the host a worker has a session of its own: the host beats for what it holds while the worker says that it
lives, and gives the task back when the session ends. If the host goes away the work goes on without it; what was held
then is given back by the host, or by its silence.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tidings.cli import completion, output
from tidings.cli.options import AsOption, HomeOption, JsonOption, Place, SpaceOption, place
from tidings.cli.talk import endpoint_at, writer
from tidings.cli.tasks import on_a_line
from tidings.cli.through_host import DirectOption, own_session_if_any
from tidings.errors import (
    ConflictError,
    HostUnreachable,
    OutcomeUnknown,
    TidingsError,
    UnknownMessage,
    UnreachableError,
)

if TYPE_CHECKING:
    from tidings.endpoint.tasks import Job
    from tidings.host.client import Session

OUTPUT_CHARACTERS = 60_000
#: seconds of one question for a task: after Ctrl-C the host may wait for an answer for so long
POLL = 5.0
#: how often the host hears that we live, and after how long without that it gives a task back
SIGN_EVERY, SILENCE = 5.0, 30.0
PAUSE = 1.0
LONGEST_PATIENCE = 86_400.0
Facts = dict[str, Any]
#: what a command is told of its task, and `--json` prints
TOLD = ("seq", "role", "attempt", "deadline", "asker", "text", "message")


@dataclass(frozen=True, slots=True)
class Held:
    """A task in our hands, the two ways to settle it, and the way to leave it; `fail` answers its state then."""

    facts: Facts
    done: Callable[[str], Awaitable[object]]
    fail: Callable[[str], Awaitable[str]]
    put_back: Callable[[], Awaitable[object]]


def work(
    role: Annotated[str, typer.Option("--role", help="Role whose tasks to take.", autocompletion=completion.roles)],
    execute: Annotated[
        str | None,
        typer.Option(
            "--exec", help="Command to run for each task; without it, the first task is shown and given back."
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End after one task.")] = False,
    direct: DirectOption = False,
    acting_as: AsOption = None,
    space: SpaceOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
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
    where = place(space, home, acting_as)
    where.check()

    async def act(session: Session | None) -> None:
        tasks = cast("AsyncGenerator[Held, None]", _each_task(where, role, session))
        async with aclosing(tasks):
            async for task in tasks:
                _announce(task.facts, as_json)
                if execute is None:
                    await task.put_back()
                    output.say("it was only shown, and is queued again; no attempt was made")
                    return
                await _run(task, execute)
                if once:
                    return

    try:
        asyncio.run(act(own_session_if_any(where, direct=direct)))
    except KeyboardInterrupt:
        output.say("stopped; a task that was held is given back")
    output.hint("tidings dead list")


def _announce(facts: Facts, as_json: bool) -> None:
    if as_json:
        output.line(json.dumps(facts))
    else:
        who, attempt = writer(facts["asker"]), facts["attempt"]
        output.say(f"task {facts['seq']} from {who} (attempt {attempt}): {on_a_line(facts['text'])}")


async def _run(task: Held, command: str) -> None:
    facts = task.facts
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
            await task.done(out.decode(errors="replace").rstrip("\n")[:OUTPUT_CHARACTERS])
            output.say(f"task {facts['seq']} is done")
        else:
            said = err.decode(errors="replace").strip().splitlines()
            state = await task.fail(said[-1] if said else f"the command ended with {process.returncode}")
            output.say(f"task {facts['seq']} failed and is {state}")
    except (ConflictError, UnknownMessage) as error:
        output.say(f"note: {error}")
    except (HostUnreachable, OutcomeUnknown) as error:
        output.say(f"note: task {facts['seq']} is settled, or another worker gets it: {error}")


# --- where tasks come from ---


async def _each_task(where: Place, role: str, session: Session | None) -> AsyncIterator[Held]:
    if session is not None:
        try:
            async with aclosing(_through_host(session, role)) as tasks:
                async for task in tasks:
                    yield task
        except HostUnreachable as error:
            output.say(f"note: {error}; going without it")
    async with aclosing(_directly(where, role)) as tasks:
        async for task in tasks:
            yield task


async def _directly(where: Place, role: str) -> AsyncGenerator[Held, None]:
    async with endpoint_at(where, presence=True) as endpoint:
        jobs = cast("AsyncGenerator[Job, None]", endpoint.work(role))
        async with aclosing(jobs):
            async for job in jobs:
                yield Held(_facts_of(job), job.done, job.fail, job.put_back)


def _facts_of(job: Job) -> Facts:
    """A task as the host tells of it."""
    from tidings.host import shown

    task = shown.task(job)
    return {name: task[name] for name in TOLD}


async def _through_host(session: Session, role: str) -> AsyncGenerator[Held, None]:
    from tidings.broker.aio import end_tasks

    living = asyncio.create_task(_say_that_we_live(session))
    try:
        async with aclosing(_claimed(session, role)) as tasks:
            async for task in tasks:
                yield _held_there(session, task)
    finally:
        await end_tasks([living])
        with suppress(TidingsError):  # a host that is gone has given back what it held for us
            session.end()


def _held_there(session: Session, task: Facts) -> Held:
    from tidings.mcp.desk import off_loop

    def patience() -> float:
        return min(LONGEST_PATIENCE, max(0.0, float(task["deadline"]) - time.time()))

    async def done(text: str) -> None:
        await off_loop(lambda: session.finish(task["id"], text, patience=patience()))

    async def fail(reason: str) -> str:
        return str((await off_loop(lambda: session.fail(task["id"], reason, patience=patience())))["state"])

    async def put_back() -> None:
        await off_loop(lambda: session.put_back(task["id"], patience=patience()))

    return Held({name: task[name] for name in TOLD}, done, fail, put_back)


async def _claimed(session: Session, role: str) -> AsyncGenerator[Facts, None]:
    """Tasks as they come. A space that is away at first is an error, as without the host; later it is waited for."""
    from tidings.mcp.desk import off_loop

    begun = False
    while True:
        try:
            task = await off_loop(lambda: session.claim(role, POLL, silence=SILENCE))
        except HostUnreachable:
            raise
        except (UnreachableError, OutcomeUnknown):
            if not begun:
                raise
            await asyncio.sleep(PAUSE)
            continue
        begun = True
        if task is not None:
            yield task


async def _say_that_we_live(session: Session) -> None:
    from tidings.mcp.desk import off_loop

    while True:
        await asyncio.sleep(SIGN_EVERY)
        with suppress(TidingsError):  # whoever asks for the next task hears it too
            await off_loop(session.me)
