"""`tidings host`: the program of this machine that sends and receives for its agents."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from tidings.cli import output, systemd
from tidings.cli.context import Group, HomeContext, PlainHomeContext
from tidings.cli.systemd import Unit
from tidings.errors import HostUnreachable, PrerequisiteMissing, TidingsError, UnhealthyError

app = Group(help="Run the host, which sends and receives for the agents of this machine.")
START_SECONDS = 30.0
STOP_SECONDS = 40.0
WELL = ("open", "superseded")


@app.command("up")
def up(
    ctx: PlainHomeContext,
    foreground: Annotated[bool, Option("--foreground", help="Run until Ctrl-C or a signal.")] = False,
) -> None:
    """Start the host of this home. It stores messages while a space cannot be reached, and sends them later.

    No space needs to be running. The host learns its agents from the commands and programs that use it.

    Examples:
      tidings host up                    in the background
      tidings host up --foreground       for a supervisor; `tidings host install` writes a unit for systemd
    """
    home = ctx.home.home
    _check_installed()
    unit = systemd.host_unit(home)
    if foreground:
        _run(home)
    elif _pid(home) is None and systemd.takes(unit):
        _start_unit(home, unit)
    else:
        _detach(home)


def _check_installed() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("starlette", "uvicorn", "sse_starlette") if find_spec(name) is None]
    if missing:
        raise PrerequisiteMissing(f"the host needs {', '.join(missing)}: `pip install 'tidings[host]'`")


def _run(home: Path) -> None:
    from tidings.host.daemon import Daemon, run_until_told

    def announce(daemon: Daemon) -> None:
        output.say(f"the host of {daemon.home} runs (pid {os.getpid()}). Ctrl-C stops it.")

    asyncio.run(run_until_told(home, announce))
    output.say("the host is down; what it holds stays on disk")


def _detach(home: Path) -> None:
    from tidings.cli.running import start_process
    from tidings.util.private_files import private_dir

    private_dir(home)
    pid = start_process(
        "the host",
        ["host", "up", "--foreground", "--home", str(home)],
        private_dir(home / "logs") / "host.out",
        lambda pid: _answering(home) == pid,
        lambda words: words or "it said nothing",
        within=START_SECONDS,
    )
    _say_it_runs(home, pid)


def _start_unit(home: Path, unit: Unit) -> None:
    """A host beside its unit would keep that from ever starting."""
    with output.working("starting the host"):
        systemd.start_installed(unit)
        deadline = time.monotonic() + START_SECONDS
        while (pid := _answering(home)) is None:
            if time.monotonic() > deadline or not systemd.is_up(unit):
                raise TidingsError(f"{unit.name} was started and does not answer: `journalctl --user -u {unit.name}`")
            time.sleep(0.05)
    _say_it_runs(home, pid, f", by systemd ({unit.name})")


def _say_it_runs(home: Path, pid: int, how: str = "") -> None:
    uses = "`send`, `inbox`, `join`, `who`, `work` and others go through it from now on"
    output.say(f"the host of {home} runs (pid {pid}){how}; {uses}")
    output.hint("tidings host status")


def _answering(home: Path) -> int | None:
    """The process of the host that answers, if one does."""
    from tidings.client.host_http import HostClient

    async def ask() -> int | None:
        host = await HostClient.find(home)
        if host is not None:
            host.close()
        return host.pid if host is not None else None

    return asyncio.run(ask())


async def _status(home: Path) -> tuple[dict[str, Any], str | None] | None:
    """What the host says of itself, and whether it is of another release; None if it does not answer."""
    from msgspec import to_builtins

    from tidings.client.host_http import HostClient
    from tidings.contract.host import HostStatusRequest

    host = await HostClient.find(home)
    if host is None:
        return None
    try:
        return to_builtins(await host.call(HostStatusRequest())), host.mismatch
    finally:
        host.close()


@app.command("down")
def down(ctx: PlainHomeContext) -> None:
    """Stop the host. Its messages stay on disk; it continues when it runs again.

    Example:
      tidings host down
    """
    from tidings.cli.running import stop_process

    home = ctx.home.home
    unit = systemd.host_unit(home)
    by_systemd = systemd.takes(unit) and systemd.is_up(unit)
    for sentence in systemd.stop(unit) if by_systemd else ():
        output.say(sentence)
    pid = _pid(home)
    if pid is None and not by_systemd:
        output.say(f"no host of {home} runs")
        return
    if pid is not None:
        stop_process("the host", pid, lambda: _pid(home) is not None, STOP_SECONDS)
    output.say("the host is down; what it holds stays on disk")
    output.hint("tidings host up")


def _pid(home: Path) -> int | None:
    """The process that holds the host's lock; a host that hangs is one too."""
    from tidings.util.private_files import lock_pid

    return lock_pid(home / "run" / "host.lock")


# --- how it is ---


@app.command("status")
def status(ctx: HomeContext) -> None:
    """Show the host's agents with the age of their last round trip, and the messages that wait to be sent.

    Exit code 0 if every agent is connected or connecting and a test write reached the disk; 3 if an agent cannot
    connect, or messages or mail cannot be stored; 5 if no host runs. An agent whose mail another program receives is a
    note, not a problem.

    Examples:
      tidings host status
      tidings host status --json
    """
    home = ctx.home.home
    facts = look(home)
    if ctx.as_json:
        output.data(facts)
    elif facts["runs"]:
        _show(facts)
    if not facts["runs"]:
        raise HostUnreachable(facts["problems"][0])
    for problem in facts["problems"]:
        output.say(f"problem: {problem}")
    for note in facts["notes"]:
        output.say(f"note: {note}")
    if facts["problems"]:
        raise typer.Exit(UnhealthyError.exit_code)
    output.hint("tidings outbox list")


def look(home: Path) -> dict[str, Any]:
    """What is true of the host now: `runs`, `problems`, `notes`, and what it says of itself.

    A note is what somebody may want and should know: that a program of an agent receives in the place of this host.
    """
    found = asyncio.run(_status(home))
    if found is None:
        said = f"no host runs in {home}: `tidings host up` starts one"
        if (pid := _pid(home)) is not None:
            said = f"the host (pid {pid}) does not answer: see {home / 'logs' / 'host.log'}, or `tidings host down`"
        return {"runs": False, "pid": pid, "problems": [said], "notes": []}
    facts, mismatch = found
    problems, notes = [*failures(facts), *([mismatch] if mismatch else [])], []
    for space, agent in ((each["space"], agent) for each in facts["spaces"] for agent in each["agents"]):
        if not _is_well(agent):
            problems.append(_trouble(space, agent))
        elif agent["state"] == "superseded":
            notes.append(f"{agent['name']} of {space}: {agent['reason']}")
    return {"runs": True, "problems": list(dict.fromkeys(problems)), "notes": notes, **facts}


def failures(facts: dict[str, Any], of_space: str | None = None) -> list[str]:
    """What the host itself fails at, of all spaces or one: to store, to keep mail, to get an agent connected.

    That a space cannot be reached is none of these.
    """
    found = [f"the host can store nothing: {facts['store']}"] if facts.get("store") else []
    if facts.get("mail") and not found:
        found.append(f"the host can keep no mail: {facts['mail']}")
    for space in facts.get("spaces", []):
        if of_space not in (None, space["space"]):
            continue
        for agent in space["agents"]:
            unkept = agent.get("unkept")
            if unkept and unkept["cause"] != facts.get("store"):
                whose = f"mail of {agent['name']} in {space['space']}"
                found.append(f"{whose} cannot be kept, for {output.age(unkept['since'])} now: {unkept['cause']}")
            if agent.get("stuck"):
                found.append(_trouble(space["space"], agent))
    return found


def _is_well(agent: dict[str, Any]) -> bool:
    """Connected, or just connecting: what fails has a reason."""
    return agent["state"] in WELL or (agent["state"] == "waiting" and not agent["reason"])


def _trouble(space: str, agent: dict[str, Any]) -> str:
    seen = "never reached" if agent["age"] is None else f"last reached {_ago(agent['age'])} ago"
    reason = f": {agent['reason']}" if agent["reason"] else ""
    return f"{agent['name']} is not connected to {space} ({agent['state']}, {seen}){reason}"


def _ago(age: float | None) -> str:
    return "-" if age is None else output.age(0.0, age)


def _show(facts: dict[str, Any]) -> None:
    running = f"pid {facts['pid']}, Tidings {facts['version']}, since {output.age(facts['started'])}"
    output.line(f"host: {running}; {facts['sessions']} sessions, {facts['streams']} followed")
    rows = [
        {**agent, "space": space["space"], "agent": agent["name"], "last round trip": _ago(agent["age"])}
        for space in facts["spaces"]
        for agent in space["agents"]
    ]
    output.table(
        ("space", "agent", "state", "receiving", "unread", "notices", "last round trip"),
        rows,
        empty="no agent uses this host yet: `tidings send` or `tidings inbox` makes one of yours known",
    )
    for space in facts["spaces"]:
        paused = f"; PAUSED ({space['paused']})" if space["paused"] else ""
        output.line(f"outbox of {space['space']}: {outbox_words(space['outbox'])}{paused}")


def outbox_words(counts: dict[str, int]) -> str:
    waiting = counts.get("pending", 0) + counts.get("inflight", 0)
    gone = counts.get("confirmed", 0) + counts.get("done", 0)
    return f"{waiting} waiting, {gone} sent, {counts.get('dead', 0)} dead, {counts.get('cancelled', 0)} cancelled"


# --- systemd ---


@app.command("install")
def install(ctx: PlainHomeContext) -> None:
    """Write a systemd unit of this user that keeps the host running, and start it if systemd answers.

    Can be repeated safely. Without systemd it still writes the file.

    Example:
      tidings host install
    """
    home = ctx.home.home
    _check_installed()
    for sentence in systemd.install(systemd.host_unit(home), _pid(home)):
        output.say(sentence)
    output.hint("tidings host status")


@app.command("uninstall")
def uninstall(ctx: PlainHomeContext) -> None:
    """Stop the host's systemd unit and remove it. The host's messages stay on disk.

    Example:
      tidings host uninstall
    """
    for sentence in systemd.uninstall(systemd.host_unit(ctx.home.home)):
        output.say(sentence)
    output.hint("tidings host status")
