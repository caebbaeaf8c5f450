"""`up`, `down`, `status`, `logs`: the life of a space."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Annotated, Any

import typer
from typer import Argument, Option

from tidings.cli import output
from tidings.cli.completion import among
from tidings.cli.context import AgentContext, Context, PlainSpaceContext, byte_count
from tidings.errors import ConfigError, TidingsError, UsageError

DETACH_TIMEOUT = 180.0
STOP_TIMEOUT = 120.0


def up(
    ctx: PlainSpaceContext,
    open_space: Annotated[bool, Option("--open", help="Your programs provision themselves on first use.")] = False,
    detach: Annotated[bool, Option("--detach", "-d", help="Return once the space is ready.")] = False,
    port: Annotated[int | None, Option(help="Port of the broker; kept for later starts.")] = None,
    listen: Annotated[
        str | None, Option(help="Address for other machines, over TLS; kept. Or off.", metavar="ADDR[:PORT]")
    ] = None,
    ws: Annotated[
        str | None, Option(help="The same for websockets, on another port. Or off.", metavar="ADDR[:PORT]")
    ] = None,
    cert: Annotated[
        str | None, Option(help="Certificate to show instead of the space's own; kept. Or off.", metavar="FILE")
    ] = None,
    key: Annotated[str | None, Option(help="Key of that certificate.", metavar="FILE")] = None,
    budget: Annotated[str | None, Option(help="Bytes the log may take, such as 500M or 4G; kept.")] = None,
    nats_server: Annotated[str | None, Option(help="nats-server binary to run.", metavar="PATH")] = None,
    server: Annotated[
        str | None, Option(help="A NATS (2.15, operator mode) that others run; kept.", metavar="URL[,URL]")
    ] = None,
    replicas: Annotated[int | None, Option(help="Stream replicas there: 1, 3 or 5 (3 on a cluster).")] = None,
    sync_interval: Annotated[int | None, Option(help="Their `sync_interval`, in seconds (120).", metavar="S")] = None,
    operator_key: Annotated[
        str | None, Option(help="Operator signing key, to cut revoked agents at once.", metavar="FILE")
    ] = None,
    system_creds: Annotated[
        str | None, Option(help="User that may push the token of the agents' account.", metavar="FILE")
    ] = None,
    no_pipeline: Annotated[bool, Option("--no-pipeline", help="Do not start durable delivery (Spark).")] = False,
    no_links: Annotated[bool, Option("--no-links", help="Do not start the link worker (`tidings link run`).")] = False,
) -> None:
    """Start a space: its broker, its steward, durable delivery and its links. Creates it the first time.

    Examples:
      tidings up                         the space "main", in the foreground until Ctrl-C
      tidings up --detach                the same, in the background
      tidings up --space lab --open      another space, where your programs need no `agent add`
      tidings up --no-pipeline           without Spark: durable copies wait until it runs
      tidings up --listen 192.0.2.7      accept agents on other machines, over TLS; then `tidings invite NAME`
      tidings up --listen 0.0.0.0 --ws 0.0.0.0:8443      and inside of websockets, for networks with a web proxy only
      tidings up --listen 0.0.0.0 --cert broker.pem --key broker.key     with a certificate that you have
      tidings up --space ops --server nats://n1:4222,nats://n2:4222      on a NATS that you run already
      tidings up --space ops --server nats://n1:4222 --operator-key op.nk --system-creds push.creds
    """
    if port is not None and not 1 <= port <= 65_535:
        raise UsageError(f"port {port} is not between 1 and 65535")
    left_out = {"pipeline": "off" if no_pipeline else None, "links": "off" if no_links else None}
    ctx = ctx.at(flags={"nats_server": nats_server, "budget": budget, "listen": listen, "ws": ws, **left_out})
    for name, address in (("listen", listen), ("ws", ws)):
        wanted = address if address is not None else ctx.settings[name] or "off"
        if wanted != "off":
            from tidings.admin.listening import parse_listen

            parse_listen(wanted)
    given: dict[str, Any] = {"open_space": open_space, "port": port, "certificate": _certificate(cert, key)}
    given |= _elsewhere(server, replicas, sync_interval, operator_key, system_creds)
    checked_budget(ctx)
    for name in left_out:
        ctx.settings.switch(name)
    ctx.home.check_free()
    if detach:
        _detach(ctx, given)
    else:
        asyncio.run(_foreground(ctx, given))


def _elsewhere(
    server: str | None, replicas: int | None, sync: int | None, operator_key: str | None, system_creds: str | None
) -> dict[str, Any]:
    """What was said of a NATS that others run, checked."""
    if server is not None:
        from tidings.admin.external import check_servers

        check_servers(server)
    if replicas not in (None, 1, 3, 5):
        raise UsageError(f"{replicas} replicas are not possible: 1, 3 or 5")
    if sync is not None and not 0 <= sync <= 3_600:
        raise UsageError(f"a sync interval of {sync} seconds is not between 0 and 3600")
    if (operator_key is None) != (system_creds is None):
        raise UsageError(
            "an operator signing key needs the system user, and the other way: --operator-key --system-creds"
        )
    keys = None
    if operator_key is not None and system_creds is not None:
        keys = (str(Path(operator_key).absolute()), str(Path(system_creds).absolute()))
        for each in keys:
            if not Path(each).is_file():
                raise UsageError(f"there is no file {each}")
    return {"server": server, "replicas": replicas, "sync_seconds": sync, "operator_key": keys}


def _certificate(cert: str | None, key: str | None) -> tuple[str, str] | None:
    """As absolute paths: whoever starts the space next may stand elsewhere."""
    if cert == "off" and key is None:
        return "off", ""
    if (cert is None) != (key is None):
        raise UsageError("a certificate needs its key, and a key its certificate: --cert FILE --key FILE")
    return None if cert is None or key is None else (str(Path(cert).absolute()), str(Path(key).absolute()))


def checked_budget(ctx: Context) -> int | None:
    from tidings.server.streams import MIN_BUDGET

    text = ctx.settings["budget"]
    wanted = byte_count("budget", text) if text else None
    if wanted is not None and wanted < MIN_BUDGET:
        raise UsageError(f"a budget of {wanted} bytes is too small: at least {MIN_BUDGET}, such as 500M")
    return wanted


async def _foreground(ctx: Context, given: dict[str, Any]) -> None:
    from tidings.supervisor.children import log_to
    from tidings.supervisor.supervisor import Supervisor, UpOptions

    ctx.home.make()
    log_to(ctx.home.logs / "up.log")
    options = UpOptions(
        person=ctx.agent,
        budget=checked_budget(ctx),
        nats_server=ctx.settings["nats_server"] or None,
        listen=ctx.settings["listen"] or None,
        ws=ctx.settings["ws"] or None,
        lease_ttl=ctx.settings.number("lease_ttl") or 3.0,
        presence=ctx.settings.number("presence") or 25.0,
        pipeline=ctx.settings.switch("pipeline"),
        links=ctx.settings.switch("links"),
        **given,
    )
    supervisor = Supervisor(ctx.home, options, tell=output.say)
    running = asyncio.create_task(supervisor.run())
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            output.say("stopping")
            running.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    announced = asyncio.create_task(_announce(ctx))
    try:
        await running
    except asyncio.CancelledError:
        if not stopping:
            raise
    finally:
        announced.cancel()


async def _announce(ctx: Context) -> None:
    while ctx.home.read_state().get("phase") != "ready" or ctx.home.read_state().get("pid") != os.getpid():
        await asyncio.sleep(0.1)
    info = ctx.home.read_info()
    output.say(f"space {info.name} is up at {info.addresses}; you are {ctx.agent}. Ctrl-C stops it.")
    output.hint("tidings status")


def _detach(ctx: Context, given: dict[str, Any]) -> None:
    ctx.home.make()
    command = ["up", "--space", ctx.home.name, "--home", str(ctx.home.home)]
    command += ["--open"] if given["open_space"] else []
    flags = {"port": given["port"], "server": given["server"], "replicas": given["replicas"]}
    flags["sync-interval"] = given["sync_seconds"]
    flags["cert"], flags["key"] = given["certificate"] or (None, None)
    flags["operator-key"], flags["system-creds"] = given["operator_key"] or (None, None)
    command += [word for flag, value in flags.items() if value not in (None, "") for word in (f"--{flag}", str(value))]
    # the child stands elsewhere, so a tidings.toml here would not be read again: it gets every setting as it is now
    resolved = {f"TIDINGS_{each.name.upper()}": each.value for each in ctx.settings.all() if each.value}

    def is_ready(pid: int) -> bool:
        state = ctx.home.read_state()
        return state.get("pid") == pid and state.get("phase") == "ready"

    space, said = f"space {ctx.home.name}", ctx.home.logs / "up.out"
    pid = start_process(space, command, said, is_ready, lambda words: _why_it_ended(ctx, words), env=resolved)
    info = ctx.home.read_info()
    output.say(f"space {info.name} is up at {info.addresses} (pid {pid}); you are {ctx.agent}")
    if info.replicas > 1:
        from tidings.admin.external import danger_of_replicas

        output.say(danger_of_replicas(info))
    pipeline = ctx.home.read_state().get("pipeline") or {}
    if pipeline.get("phase") == "unavailable":
        output.say(str(pipeline["why"]))
    output.hint("tidings status")


def start_process(
    what: str,
    command: Sequence[str],
    said: Path,
    is_ready: Callable[[int], bool],
    explain: Callable[[str], str],
    *,
    env: Mapping[str, str] = MappingProxyType({}),
    within: float = DETACH_TIMEOUT,
) -> int:
    """Runs `tidings` with `command` in the background and waits until `is_ready` says so. Returns its process id.

    What it prints goes to the file `said`. If it ends early, `explain` makes an error of its last line.
    """
    try:
        file = said.open("w")
    except OSError as error:
        raise ConfigError(f"{what} did not start: cannot write {said}: {error.strerror}") from error
    with file:
        child = subprocess.Popen(
            [sys.executable, "-m", "tidings.cli", *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            cwd="/",
            env=os.environ | env,
        )
    deadline = time.monotonic() + within
    try:
        with output.working(f"starting {what}"):
            while not is_ready(child.pid):
                if child.poll() is not None:
                    last = (said.read_text().strip().splitlines() or [""])[-1]
                    ended = TidingsError(explain(last.removeprefix("tidings: ")))
                    ended.exit_code = child.returncode or 1  # type: ignore[misc]
                    raise ended
                if time.monotonic() > deadline:
                    raise TidingsError(f"{what} was not ready within {within:.0f} s; see {said.with_suffix('.log')}")
                time.sleep(0.05)
    except BaseException:
        if child.poll() is None:
            child.terminate()
            child.wait(STOP_TIMEOUT)
        raise
    return child.pid


def stop_process(what: str, pid: int, is_locked: Callable[[], bool], within: float = STOP_TIMEOUT) -> None:
    """Ends a process of this user, and waits until it is gone and has left its lock."""
    try:
        os.kill(pid, signal.SIGTERM)
    except PermissionError as error:
        raise ConfigError(f"{what} runs as another user (pid {pid}); stop it as that user") from error
    except ProcessLookupError:
        pass
    deadline = time.monotonic() + within
    with output.working(f"stopping {what}"):
        while is_locked() or _lives(pid):
            if time.monotonic() > deadline:
                raise TidingsError(f"{what} (pid {pid}) did not stop within {within:.0f} s")
            time.sleep(0.05)


def _why_it_ended(ctx: Context, words: str) -> str:
    """Its last words; on a full disk it could not write any, or not to their end."""
    from tidings.server.disk import DiskReserve

    room = DiskReserve(ctx.home.store).look()
    if room.is_short:
        return f"space {ctx.home.name} did not start: {room}; make room and start it again" + (words and f" ({words})")
    return words or f"space {ctx.home.name} did not start and said nothing: `tidings logs up`"


def down(ctx: PlainSpaceContext) -> None:
    """Stop a space that is running. What it holds stays on disk.

    Examples:
      tidings down
      tidings down --space lab
    """
    from tidings.util.private_files import lock_pid

    ctx.home.read_info()
    pid = lock_pid(ctx.home.up_lock)
    if pid is None:
        output.say(f"space {ctx.home.name} is not running")
        return
    stop_process(f"space {ctx.home.name}", pid, lambda: lock_pid(ctx.home.up_lock) is not None)
    output.say(f"space {ctx.home.name} is down")
    output.hint("tidings up --detach")


def _lives(pid: int) -> bool:
    """Is there still such a process? One that has ended but was not yet collected by its parent does not count."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def status(ctx: AgentContext) -> None:
    """Show the state of a space, and how old each fact is. Exits with 0 only if the space is healthy.

    Examples:
      tidings status
      tidings status --space lab --json
    """
    from tidings.cli.link_words import summarise_links
    from tidings.supervisor.status import collect

    ctx.home.read_info()
    if ctx.acting_as is not None and not ctx.home.agent_creds(ctx.agent).exists():
        raise UsageError(
            f"there is no agent {ctx.agent} of space {ctx.home.name} here to ask as: `--as` names another, "
            "`tidings agent list` shows them"
        )
    facts = asyncio.run(collect(ctx.home, ctx.agent))
    facts = _with_parts(facts, _host(ctx), summarise_links(ctx, facts["supervisor"]["running"]))
    output.data(facts) if ctx.as_json else _show_status(facts)
    if facts["exit_code"]:
        raise typer.Exit(facts["exit_code"])
    output.hint("tidings who")


def _with_parts(facts: dict[str, Any], host: dict[str, Any], links: dict[str, Any]) -> dict[str, Any]:
    """A space needs no host, but one that does not answer or keeps no mail is a problem. So are links that should be
    carried and are not; one that waits for another space is none."""
    from tidings.supervisor.status import UNHEALTHY

    failing = [*host.pop("failures"), *links.pop("problems")]
    problems, code = [*facts["problems"], *failing], facts["exit_code"] or (UNHEALTHY if failing else 0)
    return facts | {"host": host, "links": links, "healthy": not problems, "problems": problems, "exit_code": code}


def _host(ctx: Context) -> dict[str, Any]:
    """What is to be said of the host."""
    from tidings.cli.host import failures, look, outbox_words

    facts = look(ctx.home.home)
    mine = next((each for each in facts.get("spaces", []) if each["space"] == ctx.home.name), None)
    said = outbox_words(mine["outbox"]) if mine else "works for nobody in this space"
    notices = sum(agent["notices"] for agent in mine["agents"]) if mine else 0
    said += f", {notices} unread notices: `tidings inbox --unread`" if notices else ""
    silent = "not running" if facts["pid"] is None else f"pid {facts['pid']}, DOES NOT ANSWER"
    words = f"pid {facts['pid']}, {said}" if facts["runs"] else silent
    failing = failures(facts, ctx.home.name) if facts["runs"] else facts["problems"] if facts["pid"] else []
    told = {"said": words, "notices": notices, "problems": facts["problems"], "failures": failing}
    return {"runs": facts["runs"], "pid": facts["pid"], **told}


def _show_status(facts: dict[str, Any]) -> None:
    now = facts["at"]
    supervisor, broker, steward = facts["supervisor"], facts["broker"], facts["steward"]
    rows: list[tuple[str, str, str]] = [
        ("space", facts["space"], output.age(now, now)),
        ("health", "healthy" if facts["healthy"] else "NOT HEALTHY", output.age(now, now)),
        ("supervisor", f"{supervisor['phase']}, pid {supervisor['pid'] or '-'}", output.age(supervisor["at"], now)),
    ]
    if broker["answers"]:
        held = output.size(broker.get("resident_bytes"))
        rows.append(("broker", f"nats-server {broker['version']}, {held} resident", output.age(broker["at"], now)))
    if steward["answers"]:
        rows += _steward_rows(steward, now)
    if facts["pipeline"]["answers"]:
        rows.append(("pipeline", delivery_words(facts["pipeline"]), output.age(facts["pipeline"]["at"], now)))
    if facts["links"]["said"]:
        rows.append(("links", facts["links"]["said"], output.age(now, now)))
    rows.append(("host", facts["host"]["said"], output.age(now, now)))
    output.table(("what", "value", "age"), rows)
    if steward["answers"]:
        output.line()
        output.table(("stream", "records", "bytes", "limit", "consumers"), _stream_rows(steward))
    for problem in facts["problems"]:
        output.say(f"problem: {problem}")
    if facts["pipeline"].get("mode"):
        output.say(f"note: {facts['pipeline']['mode']}")
    for seq in steward.get("doubts", []):
        output.say(
            f"note: a reader remembers another record at {seq} than the log has: `tidings logs steward` names it"
        )
    if steward["answers"] and steward["tasks"]["dead"]:
        output.say(
            f"note: {steward['tasks']['dead']} tasks are dead letters: `tidings dead list --as` who asked them, or "
            "holds their role"
        )
    if steward["answers"] and steward["mail"].get("dead"):
        output.say(
            f"note: {steward['mail']['dead']} messages are dead letters of their readers: `tidings dead list --as`"
        )


def _steward_rows(steward: dict[str, Any], now: float) -> list[tuple[str, str, str]]:
    gate, when = steward["gate"], output.age(steward["at"], now)
    used = f"{output.size(gate['used'])} of {output.size(gate['budget'])} ({gate['used'] / gate['budget']:.0%})"
    waiting = f", held by {steward['floor_held_by']}" if steward["floor_held_by"] else ""
    return [
        ("steward", f"{steward['steward']['holder']}, round trip {steward['broker_rtt_ms']} ms", when),
        ("log", f"head {steward['log_head']}, floor {steward['floor']}{waiting}, epoch {steward['epoch']}", when),
        ("gate", f"{'open' if gate['open'] else 'CLOSED'}, {used}", when),
        ("agents", str(steward["agents"]), when),
        ("tasks", task_words(steward["tasks"]), output.age(steward["tasks"]["at"], now)),
        ("void records", str(steward["void_records"]), when),
        ("void messages", _voids(steward.get("void_messages") or {}), when),
        ("free disk", output.size(steward["free_disk"]), when),
        *(("withheld", each, when) for each in steward.get("withheld", [])),
    ]


def delivery_words(pipeline: dict[str, Any]) -> str:
    """Durable delivery in one line."""
    supervised = pipeline["supervised"]
    state = "running" if pipeline["running"] else supervised["phase"] if supervised["wanted"] else "not running"
    last = pipeline["figures"].get("last_batch_ms")
    return ", ".join(
        (
            state if pipeline["deliver"] == "on" else f"{state} (deliver=off)",
            f"{pipeline['behind']} records / {pipeline['behind_s']:.1f} s behind",
            f"{pipeline['debts'] or 0} debts",
            f"last batch {last:.0f} ms" if last else "no batch yet",
        )
    )


def task_words(tasks: dict[str, Any]) -> str:
    """The figures of tasks in one line."""
    roles = ", ".join(f"{role} {count}" for role, count in tasks["queued"].items())
    queued = f"{sum(tasks['queued'].values())} queued" + (f" ({roles})" if roles else "")
    oldest = "" if tasks["oldest_s"] is None else f", the oldest {output.age(0.0, tasks['oldest_s'])}"
    return f"{queued}, {tasks['held']} held{oldest}, {tasks['dead']} dead"


def _voids(found: dict[str, int]) -> str:
    """How many messages no reader shows, by reason, since this steward began."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(found.items()))
    return f"{sum(found.values())}" + (f" ({reasons}); their senders are told" if found else "")


def _stream_rows(steward: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (name, each["messages"], output.size(each["bytes"]), output.size(each["limit"]), each["consumers"])
        for name, each in steward["streams"].items()
    ]


LOG_NAMES = ("broker", "steward", "pipeline", "spark", "links", "admin", "up")


def logs(
    ctx: PlainSpaceContext,
    which: Annotated[str, Argument(help=f"{', '.join(LOG_NAMES)}.", autocompletion=among(*LOG_NAMES))] = "steward",
    lines: Annotated[int, Option("-n", "--lines", help="How many lines from the end.", min=0, max=1_000_000)] = 50,
    follow: Annotated[bool, Option("-f", "--follow", help="Go on as lines are written.")] = False,
) -> None:
    """Show a log file of a space: broker, steward, pipeline, spark, links, admin or up. `-f` goes on when it
    rotates.

    Examples:
      tidings logs
      tidings logs broker -n 200
      tidings logs steward -f
    """
    if which not in LOG_NAMES:
        raise UsageError(f"there is no log {which!r}; one of {', '.join(LOG_NAMES)}")
    ctx.home.read_info()
    path = ctx.home.logs / f"{which}.log"
    if not path.exists():
        output.say(f"{path} was not written yet")
    try:
        for text in follow_lines(path, lines) if follow else last_lines(path, lines):
            output.line(text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        output.say("stopped")
    output.hint("tidings status")


PAUSE = 0.2


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines of a file; none if there is no file."""
    try:
        with path.open(errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=max(0, count))]
    except FileNotFoundError:
        return []


def follow_lines(path: Path, count: int, pause: Callable[[], None] = lambda: time.sleep(PAUSE)) -> Iterator[str]:
    """The last `count` lines, then each line as it is written, for ever.

    A file that was renamed is read to its end before the new one is opened; one that was cut short is read from its
    start; one that is not there is waited for. `pause` is called whenever there is nothing to read.
    """
    fresh = False
    while True:
        try:
            file = path.open(errors="replace")
        except FileNotFoundError:
            fresh = True
            pause()
            continue
        with file:
            if not fresh:
                yield from (line.rstrip("\n") for line in deque(file, maxlen=max(0, count)))
            yield from _until_replaced(path, file, pause)
        fresh = True


def _until_replaced(path: Path, file: IO[str], pause: Callable[[], None]) -> Iterator[str]:
    partial = ""
    while True:
        replaced = _is_replaced(path, file)  # looked at before reading: what was written until then is still read
        while text := file.readline():
            partial += text
            if partial.endswith("\n"):
                yield partial.rstrip("\n")
                partial = ""
        if replaced:
            if partial:
                yield partial
            return
        pause()


def _is_replaced(path: Path, file: IO[str]) -> bool:
    held = os.fstat(file.fileno())
    try:
        named = path.stat()
    except FileNotFoundError:
        return True
    return (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino) or held.st_size < file.tell()
