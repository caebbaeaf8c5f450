"""`ask`, `result`, `dead` and `work`: tasks from the command line.

Through the host a worker has a session of its own: the host beats for what it holds while the worker says that it
lives, and gives the task back when the session ends. If the host goes away the work goes on without it; what was held
then is given back by the host, or by its silence.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from typer import Argument, Option

from tidings.cli import completion, output
from tidings.cli.connection import IdOption, act, chosen_id, direct_session, host_session
from tidings.cli.context import (
    AgentContext,
    Context,
    DirectContext,
    Group,
    RoleArgument,
    TextArgument,
    YesOption,
    duration,
)
from tidings.cli.talk import spoken, writer
from tidings.contract.mail import (
    DeadLettersRequest,
    DropLetterRequest,
    LetterChangedAnswer,
    LetterRow,
    RetryLetterRequest,
)
from tidings.errors import (
    ConflictError,
    HostUnreachable,
    OutcomeUnknown,
    TidingsError,
    UnknownMessage,
    UnreachableError,
    UsageError,
)
from tidings.wire.message import is_message_id
from tidings.wire.states import TaskStatus

if TYPE_CHECKING:
    from tidings.client.agent import Agent
    from tidings.client.direct_transport import DirectAgent
    from tidings.client.tasks import Job, TaskResult, TaskTicket
    from tidings.client.transport import Transport

T = TypeVar("T")
app = Group(help="Tasks that nobody could finish: look at them, try again, drop them.")
WaitOption = Annotated[float, Option("--wait", "-w", help="Seconds to wait for the result.", callback=duration)]
LetterArgument = Annotated[str, Argument(help="Task or message, as `tidings dead list` shows it.", metavar="LETTER")]


def ask(
    ctx: DirectContext,
    role: RoleArgument,
    text: TextArgument,
    wait: WaitOption = 0.0,
    deadline: Annotated[float | None, Option(help="Seconds in which it must be finished.", callback=duration)] = None,
    message_id: IdOption = None,
) -> None:
    """Ask any one holder of a role to do something; of a role of a linked space, too, as `reviewer@acme`.

    Prints the id of the task, or with --wait its result. A task that ends as a dead letter exits with 1. What goes to
    another space is sealed for those who hold the role there now, and waits here while that space is away.

    Examples:
      tidings ask reviewer 'is the change in src/ right?'
      tidings ask reviewer 'look at it' --wait 600 --deadline 3600
      tidings ask reviewer@acme 'would you?' --wait 600        in a linked space (`tidings link set acme --tasks`)
    """
    words, chosen = spoken(text), chosen_id(message_id)
    ctx.check()

    async def queue(agent: Agent[Transport]) -> tuple[TaskTicket, TaskResult]:
        ticket = await agent.ask(role, words, deadline=deadline, id=chosen)
        for warning in ticket.warnings:
            output.say(f"note: {warning}")
        try:
            return ticket, await ticket.status(wait)
        except HostUnreachable:
            raise
        except UnreachableError as error:
            if agent.via == "direct":  # asking again would make a second task, so say which one there is
                raise type(error)(f"task {ticket.id} is queued, but nobody tells how it goes: {error}") from error
            output.say(f"note: task {ticket.id} is stored, but nobody tells how it goes: {error}")
            from tidings.client.tasks import TaskResult

            return ticket, TaskResult("stored")

    with output.working(f"waiting for a {role}") if wait else nullcontext():
        ticket, found = act(ctx, queue)
    facts = {"id": ticket.id, "seq": ticket.seq or None, "role": role, "warnings": list(ticket.warnings)}
    _show_asked(ctx, facts | {"stage": ticket.receipt.stage}, found, wait)


def result(
    ctx: DirectContext,
    task: Annotated[str, Argument(help="Id of a task you asked.", metavar="ID")],
    wait: WaitOption = 0.0,
) -> None:
    """Print the result of a task you asked, by the id that `tidings ask` printed.

    As long as there is none, nothing is printed on standard output and this ends with 1.

    Examples:
      tidings result 019a8b7c-5f3e-7d21-9c64-0a1b2c3d4e5f
      tidings result 019a8b7c-5f3e-7d21-9c64-0a1b2c3d4e5f --wait 600
    """
    if not is_message_id(task):
        raise UsageError(f"a task is named by the id that `tidings ask` printed, not {task!r}")
    ctx.check()
    with output.working("waiting for the result") if wait else nullcontext():
        found = act(ctx, lambda agent: agent.task(task, wait))
    if ctx.as_json:
        output.data(_facts_of(task, found))
    elif found.state == TaskStatus.DONE:
        output.line(found.text)
    _check_done(task, found, wait)


def _facts_of(task: str, found: TaskResult) -> dict[str, Any]:
    from tidings.client.message_json import result_json

    return {name: value for name, value in result_json(task, found).items() if name != "worker_id"}


def _check_done(task: str, result: TaskResult, wait: float) -> None:
    """Only a task that is done has an answer; whoever waited for one in vain is told so by the exit code, too."""
    state = result.state
    if state == TaskStatus.DONE:
        return
    if state in (TaskStatus.DEAD, TaskStatus.DROPPED):
        why = "; ".join(map(on_a_line, result.reasons)) or "no reason was given"
        raise TidingsError(f"task {task} was not done ({result.cause or state}): {why}")
    if state in (TaskStatus.GONE, TaskStatus.UNKNOWN):
        raise UnknownMessage(f"nothing is known of task {task}: its result is gone, or nobody of this name asked it")
    after = f" after {wait:g} s" if wait else ""
    raise TidingsError(
        f"task {task} is {state}{after}; it goes on without us, and `tidings result {task}` has its result"
    )


def _show_asked(ctx: Context, facts: dict[str, Any], result: TaskResult, wait: float) -> None:
    state, task = result.state, facts["id"]
    if ctx.as_json:
        output.data(facts | _facts_of(task, result))
    elif state == TaskStatus.DONE or not wait:
        output.line(result.text if state == TaskStatus.DONE else task)
    if wait or state in (TaskStatus.DEAD, TaskStatus.DROPPED):
        _check_done(task, result, wait)
    if state != TaskStatus.DONE:
        output.hint(f"tidings result {task} --wait 600")


def on_a_line(text: str) -> str:
    """One line that cannot steer a terminal: the text is somebody else's."""
    return "".join(character if character.isprintable() else " " for character in text[:200])


@app.command("list")
def list_dead(ctx: AgentContext) -> None:
    """List dead letters: tasks you asked or your roles could do, and messages your programs gave up on.

    Examples:
      tidings dead list
      tidings dead list --as bob --json
    """
    answer = _ask(ctx, lambda endpoint: endpoint.call(DeadLettersRequest()))
    found, mail = answer.dead, answer.mail
    ctx.end_if_json([*found, *mail])
    if mail:
        _show_mail(mail)
    if not found and mail:
        output.hint(f"tidings dead show {mail[0].letter}")
        return
    rows = [
        (
            each.seq,
            each.role,
            each.asker_name or each.asker,
            each.cause,
            each.attempts,
            output.age(each.at),
            on_a_line("".join(each.reasons[-1:])),
        )
        for each in found
    ]
    columns = ("seq", "role", "asker", "cause", "attempts", "age", "reason")
    output.table(columns, rows, empty="there are no dead letters")
    output.hint(f"tidings dead show {found[0].seq}" if found else "tidings who")


def _show_mail(mail: tuple[LetterRow, ...]) -> None:
    rows = [
        (
            each.letter,
            each.sender_name or each.sender,
            each.channel,
            each.attempts,
            output.age(each.at),
            each.state,
            on_a_line(each.error),
        )
        for each in mail
    ]
    output.table(("letter", "from", "channel", "attempts", "age", "state", "error"), rows)


@app.command("show")
def show_dead(ctx: AgentContext, letter: LetterArgument) -> None:
    """Show a dead letter: what was asked or said, who tried, why it failed.

    Examples:
      tidings dead show 42
      tidings dead show direct-17
    """
    which = _which(letter)
    found, text = _ask(ctx, lambda endpoint: endpoint.transport.dead_letter(**which))
    payload = found.record.payload.decode(errors="replace") if found.record and text is None else text
    fields: dict[str, Any] = msgspec.to_builtins(found)
    del fields["record"]
    ctx.end_if_json({**fields, "payload": payload})
    output.table(("what", "value"), [*fields.items(), ("payload", on_a_line(payload or ""))])
    output.hint(f"tidings dead {'drop' if '@' in (found.role or '') else 'retry'} {letter}")


@app.command("retry")
def retry_dead(ctx: AgentContext, letter: LetterArgument) -> None:
    """Try a dead letter again: a task by its workers, a message by the program that receives for you.

    Examples:
      tidings dead retry 42
      tidings dead retry channel-117
    """
    request = RetryLetterRequest(**_which(letter))
    _report(ctx, letter, _ask(ctx, lambda endpoint: endpoint.call(request)))


@app.command("drop")
def drop_dead(ctx: AgentContext, letter: LetterArgument, yes: YesOption = False) -> None:
    """Drop a dead letter for good.

    Example:
      tidings dead drop 42 --yes
    """
    request = DropLetterRequest(**_which(letter))
    output.confirm(yes, f"Drop {letter}? What was asked or said is gone then.")
    _report(ctx, letter, _ask(ctx, lambda endpoint: endpoint.call(request)))


def _which(letter: str) -> dict[str, Any]:
    """A task has a number; a message is named by its kind and number."""
    if re.fullmatch("((direct|channel)-)?[0-9]{1,18}", letter) is None:
        raise UsageError(
            f"{on_a_line(letter)!r} names no dead letter: 42, direct-17 or channel-17 does, see `tidings dead list`"
        )
    return {"seq": int(letter)} if letter.isdigit() else {"letter": letter}


def _report(ctx: Context, letter: str, answer: LetterChangedAnswer) -> None:
    ctx.end_if_json(answer)
    output.say(f"{'task ' if letter.isdigit() else ''}{letter} is {answer.state}")
    output.hint("tidings dead list")


def _ask(ctx: Context, question: Callable[[DirectAgent], Coroutine[Any, Any, T]]) -> T:
    """Asks the space itself: what is sealed is opened with the agent's key."""
    ctx.check()

    async def ask() -> T:
        async with direct_session(ctx) as endpoint:
            return await question(endpoint)

    return asyncio.run(ask())


OUTPUT_CHARACTERS = 60_000
#: what a command is told of its task, and `--json` prints
TASK_FIELDS = ("seq", "role", "attempt", "deadline", "asker", "text", "message")


def work(
    ctx: DirectContext,
    role: Annotated[str, Option("--role", help="Role whose tasks to take.", autocompletion=completion.roles)],
    execute: Annotated[
        str | None, Option("--exec", help="Command for each task; else the first is only shown.")
    ] = None,
    once: Annotated[bool, Option("--once", help="End after one task.")] = False,
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
    from tidings.client.message_json import job_json

    ctx.check()

    async def all_tasks() -> None:
        async with aclosing(_each_task(ctx, role)) as tasks:
            async for job in tasks:
                told = job_json(job)
                facts = {name: told[name] for name in TASK_FIELDS}
                if ctx.as_json:
                    output.line(json.dumps(facts))
                else:
                    by = f"{writer(facts['asker'])} (attempt {facts['attempt']})"
                    output.say(f"task {facts['seq']} from {by}: {on_a_line(facts['text'])}")
                if execute is None:
                    await job.put_back()
                    output.say("it was only shown, and is queued again; no attempt was made")
                    return
                await _execute(job, facts, execute)
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


async def _execute(job: Job, facts: dict[str, Any], command: str) -> None:
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
