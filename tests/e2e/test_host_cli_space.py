"""Commands that ask the space, through the host: they print what they print without it, over its one connection."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from blocking_host import HostClient
from connections import Count, connections_to
from daemons import ask, daemon_in, session_of
from terminal import Terminal
from tidings.client.host_tasks import SILENCE
from tidings.client.host_transport import HostTransport
from tidings.host import space_handlers
from tidings.host.claims import Claims
from tidings.host.daemon import Daemon
from tidings.host.registry import Scope
from tidings.wire.message import new_id
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually

THROUGH = "through the host"
#: differs from one moment to the next
PASSING = ("last_seen", "per_hour", "session", "attention_number")
Done = subprocess.CompletedProcess[str]


async def run(terminal: Terminal, *words: str) -> Done:
    return await asyncio.to_thread(terminal.run, *words)


async def facts(terminal: Terminal, *words: str) -> Any:
    done = await run(terminal, *words, "--json")
    assert done.returncode == 0, done
    return json.loads(done.stdout)


@asynccontextmanager
async def lively(terminal: Terminal, space: RealSpace) -> AsyncIterator[tuple[Daemon, str, Count]]:
    """A space in which me and bob talk, me through the host; the id of a message, and the connections there were."""
    await space.add("me", read=["general", "team.>"], post=["general"], roles=["reviewer", "author"])
    await space.add("bob")
    async with daemon_in(terminal.home.home) as daemon, connections_to(space) as count:
        assert (await run(terminal, "join", "general")).returncode == 0
        for text in ("one\ntwo", "three", "four"):
            assert (await facts(terminal, "send", "general", text, "--mention", "bob"))["stage"] == "confirmed"
        sent = await facts(terminal, "dm", "bob", "just you")
        yield daemon, sent["id"], count


def settled(text: str) -> str:
    """Without how long ago things were."""
    return re.sub(r"\b\d+(\.\d+)?( s| min| an hour)?\b", "N", text)


def lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: lasting(each) for key, each in value.items() if key not in PASSING}
    return [lasting(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "line",
    [
        "who",
        "channels list",
        "channels info general",
        "channels members general",
        "history general -n 2",
        "trace ID",
        "attention",
        "attention open --channel team.a quiet",
    ],
)
async def test_a_question_goes_over_the_connection_of_the_host_and_is_answered_as_without_it(
    terminal: Terminal, space: RealSpace, line: str
) -> None:
    async with lively(terminal, space) as (_, sent, count):
        words = line.replace("ID", sent).split()
        # what the host's own session says of attention and status is known a moment after it connected
        await eventually(lambda: same_both_ways(terminal, words), what=f"{line} says the same both ways")
        before = await count()
        for more in ((), ("--json",)):
            through = await run(terminal, *words, *more)
            assert (through.returncode, THROUGH in through.stderr, bool(through.stdout)) == (0, True, True), through
        assert await count() == before, "nobody connected but the host"
        direct = await run(terminal, *words, "--direct")
        assert (direct.returncode, THROUGH in direct.stderr) == (0, False), direct
        assert await count() > before


async def same_both_ways(terminal: Terminal, words: list[str]) -> bool:
    through, direct = [(await run(terminal, *words, *way)) for way in ((), ("--direct",))]
    assert (through.returncode, direct.returncode, bool(through.stdout)) == (0, 0, True), (through, direct)
    assert through.stderr.replace(f"{THROUGH}\n", "", 1) == direct.stderr
    told, told_direct = [await run(terminal, *words, "--json", *way) for way in ((), ("--direct",))]
    return settled(through.stdout) == settled(direct.stdout) and plain(told) == plain(told_direct)


def plain(done: Done) -> list[Any]:
    """Lines of JSON, or one document."""
    texts = done.stdout.splitlines() if done.stdout.startswith('{"') else [done.stdout]
    return [lasting(json.loads(text)) for text in texts]


async def test_history_is_as_long_as_was_asked_for_whatever_the_host_tells_at_a_time(
    terminal: Terminal, space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidings.client.host_transport.HISTORY_PAGE", 2)
    async with lively(terminal, space):
        for count, texts in ((2, ["three", "four"]), (3, ["one\ntwo", "three", "four"]), (500, None)):
            found = await run(terminal, "history", "general", "-n", str(count), "--json")
            assert THROUGH in found.stderr
            said = [json.loads(each)["text"] for each in found.stdout.splitlines()]
            assert said == (texts or ["one\ntwo", "three", "four"])


async def test_a_message_that_has_not_left_is_traced_to_the_outbox_of_the_host(
    terminal: Terminal, space: RealSpace
) -> None:
    async with lively(terminal, space):
        assert (await run(terminal, "outbox", "pause")).returncode == 0
        waiting = await facts(terminal, "send", "general", "later")
        for more in ((), ("--json",)):
            traced = await run(terminal, "trace", waiting["id"], *more)
            assert (traced.returncode, "it is pending in the outbox of the host" in traced.stderr) == (0, True), traced
            assert "nothing is known" not in traced.stderr
        assert json.loads(traced.stdout) == await facts(terminal, "trace", waiting["id"], "--direct")


async def test_a_refusal_is_the_same_sentence_and_exit_code_as_without_the_host(
    terminal: Terminal, space: RealSpace
) -> None:
    async with lively(terminal, space):
        for line, code in (
            ("history secret", 4),
            ("history a..b", 2),
            ("channels members a..b", 2),
            ("channels info secret", 4),
            ("trace nonsense", 2),
            ("attention --channel a..b muted", 2),
            ("work --role painter --exec true", 4),
            ("work --role Bad! --exec true", 2),
        ):
            through, direct = [await run(terminal, *line.split(), *way) for way in ((), ("--direct",))]
            assert THROUGH in through.stderr, through
            assert (through.returncode, through.stdout) == (direct.returncode, "") == (code, ""), (through, direct)
            assert through.stderr.splitlines()[-1] == direct.stderr.splitlines()[-1]


async def test_while_the_space_is_away_who_tells_whom_the_host_last_saw_and_the_others_say_that_they_cannot(
    terminal: Terminal, space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space_handlers, "CONNECT_PATIENCE", 0.2)
    async with lively(terminal, space) as (daemon, sent, _):
        await eventually(lambda: len(daemon.host.directories.of(space.info.id).known) == 2, what="it saw both")
        here = await facts(terminal, "who")
        await space.stop_steward()
        space.broker.stop()
        await eventually(lambda: daemon.host.health()[0].state != "open", what="it knows")
        seen = await run(terminal, "who", "--json")
        assert (seen.returncode, "as last seen: me is not connected to main" in seen.stderr) == (0, True), seen
        known = json.loads(seen.stdout)
        assert [(each["name"], each["status"]) for each in known] == [("bob", "unknown"), ("me", "unknown")]
        assert [each.keys() for each in known] == [each.keys() for each in here], "the same shape"
        assert "bob\tunknown\t-" in (await run(terminal, "who")).stdout
        assert (await run(terminal, "who", "--direct")).returncode == 5
        for line in ("channels list", "history general", f"trace {sent}", "attention dnd", "work --role author"):
            away = await run(terminal, *line.split())
            assert (away.returncode, "me is not connected to main now" in away.stderr) == (5, True), away


async def test_a_host_that_never_saw_who_is_in_a_space_does_not_say_that_nobody_is(
    terminal: Terminal, space: RealSpace
) -> None:
    await space.add("me")
    await space.stop_steward()
    space.broker.stop()
    async with daemon_in(terminal.home.home):
        done = await run(terminal, "who", "--json")
        assert (done.returncode, done.stdout, "never saw who is in main" in done.stderr) == (5, "", True), done


async def test_a_question_whose_host_goes_away_is_asked_without_it(
    terminal: Terminal, space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, gone = threading.Event(), threading.Event()

    history = HostTransport.history

    async def and_then_it_goes(*args: Any, **options: Any) -> Any:
        found.set()
        assert await ask(gone.wait, 30)
        return await history(*args, **options)

    async with lively(terminal, space):
        monkeypatch.setattr(HostTransport, "history", and_then_it_goes)
        asking = asyncio.create_task(run(terminal, "history", "general", "--json"))
        assert await ask(found.wait, 20)
    gone.set()
    done = await asking
    assert (done.returncode, len(done.stdout.splitlines()), "; going without it" in done.stderr) == (0, 3, True), done


# --- work ---


async def test_a_task_is_worked_on_through_the_host_over_its_one_connection(
    terminal: Terminal, space: RealSpace
) -> None:
    async with lively(terminal, space) as (daemon, _, count):
        bob = await session_of(space, "bob")
        asked = await ask(bob.send, role="reviewer", text="is it\nright?", wait=10)
        before = await count()
        shown = await run(terminal, "work", "--role", "reviewer", "--json")
        assert (shown.returncode, shown.stderr.splitlines()[0]) == (0, THROUGH), shown
        direct = await run(terminal, "work", "--role", "reviewer", "--json", "--direct")
        first, second = json.loads(shown.stdout), json.loads(direct.stdout)
        looked = (first["attempt"], second["attempt"], first["message"]["id"])
        assert looked == (1, 1, asked.id), "a look uses up no attempt"
        passing = ("deadline",)
        assert {k: v for k, v in first.items() if k not in passing} == {
            k: v for k, v in second.items() if k not in passing
        }
        assert await count() > before, "the one that was direct"
        before = await count()
        seen = terminal.home.home / "seen.json"
        command = f"cat > {seen}; echo no pen >&2; exit 3"
        failed = await run(terminal, "work", "--role", "reviewer", "--exec", command, "--once")
        assert "failed and is queued" in failed.stderr, failed
        assert json.loads(seen.read_text())["text"] == "is it\nright?"
        done = await run(terminal, "work", "--role", "reviewer", "--exec", 'printf %s "$TIDINGS_ASKER"', "--once")
        assert (done.returncode, "is done" in done.stderr) == (0, True), done
        result = await ask(bob.task, asked.id, wait=10)
        assert (result["state"], result["text"], result["worker"]) == ("done", "bob", "me")
        assert await count() == before
        assert daemon.app is not None
        assert len(daemon.app.sessions) == 2, "that of the commands and bob's: workers ended theirs"


def start(terminal: Terminal, *words: str) -> subprocess.Popen[str]:
    """Names its home, so that nothing of a test that failed goes on."""
    return terminal.start(*words, "--home", str(terminal.home.home))


async def busy(terminal: Terminal) -> subprocess.Popen[str]:
    """A worker with a task in its hands, as a process of its own."""
    worker = start(terminal, "work", "--role", "reviewer", "--exec", "exec sleep 300")
    assert worker.stderr is not None
    assert THROUGH in await ask(worker.stderr.readline)
    assert "is it right?" in await ask(worker.stderr.readline)
    return worker


async def test_ctrl_c_gives_back_the_task_that_the_host_holds_for_a_worker(
    terminal: Terminal, space: RealSpace
) -> None:
    async with lively(terminal, space) as (daemon, _, _count):
        bob = await session_of(space, "bob")
        asked = await ask(bob.send, role="reviewer", text="is it right?", wait=10)
        worker = await busy(terminal)
        claims, scope = claims_of_me(daemon)
        held = claims.held(scope)
        second = start(terminal, "work", "--role", "reviewer", "--exec", "echo fine", "--once")
        await eventually(lambda: claims._asking[scope].locked(), what="another worker of the same agent waits")
        assert held is claims.held(scope) is not None
        worker.send_signal(signal.SIGINT)
        _, said = await ask(worker.communicate, timeout=20)
        assert (worker.returncode, "stopped; a task that was held is given back" in said) == (0, True), said
        result = await ask(bob.task, asked.id, wait=30)
        assert (result["state"], result["text"], result["attempt"]) == ("done", "fine", 2)
        await ask(second.communicate, timeout=20)
        assert second.returncode == 0


def claims_of_me(daemon: Daemon) -> tuple[Claims, Scope]:
    assert daemon.app is not None
    (scope,) = [each for each in daemon.host.scopes() if each.name == "me"]
    return daemon.app.claims, scope


async def test_a_worker_that_is_killed_is_missed_by_the_host_and_one_that_lives_is_not(
    terminal: Terminal, space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidings.client.host_tasks.REPORT_EVERY", 0.05)
    async with lively(terminal, space) as (daemon, _, _count):
        bob = await session_of(space, "bob")
        asked = await ask(bob.send, role="reviewer", text="is it right?", wait=10)
        worker = await busy(terminal)
        claims, scope = claims_of_me(daemon)
        held = claims.held(scope)
        assert held is not None
        worker.kill()
        await ask(worker.communicate)
        claims._heard[held.session] -= SILENCE + 1
        claims.sweep_once()
        assert claims.held(scope) is None, "a killed program is silent"

        release = terminal.home.home / "release"
        waiting = f"until test -e {release}; do sleep 0.05; done; echo fine"
        living = asyncio.create_task(run(terminal, "work", "--role", "reviewer", "--exec", waiting, "--once"))
        try:
            again = await eventually(lambda: claims.held(scope), within=20, what="the next one has it")
            assert again is not None
            claims._heard[again.session] -= SILENCE + 1
            await eventually(lambda: claims._clock() - claims._heard[again.session] < 1, what="it says that it lives")
            claims.sweep_once()
            assert claims.held(scope) is again
        finally:
            release.touch()
            done = await living
        assert done.returncode == 0
        assert (await ask(bob.task, asked.id, wait=10))["text"] == "fine"


@pytest.mark.slow  # now and then the task comes only after 40 s: who held it meanwhile is not found yet
async def test_work_goes_on_without_a_host_that_went_away(terminal: Terminal, space: RealSpace) -> None:
    async with lively(terminal, space):
        worker = start(terminal, "work", "--role", "reviewer", "--exec", "echo fine", "--once")
        assert worker.stderr is not None
        assert THROUGH in await ask(worker.stderr.readline)
    asked = await facts(terminal, "ask", "reviewer", "is it?", "--wait", "40", "--as", "bob")
    _, said = await ask(worker.communicate, timeout=30)
    assert (asked["state"], asked["text"], worker.returncode) == ("done", "fine", 0), said
    assert "; going without it" in said


# --- beside a host ---


async def test_who_goes_around_a_running_host_takes_neither_mail_nor_the_session_from_it(
    terminal: Terminal, space: RealSpace
) -> None:
    await space.add("me", read=["general", "aside"], roles=["reviewer"])
    await space.add("bob", post=["general", "aside"])
    async with daemon_in(terminal.home.home) as daemon:
        me, bob = await session_of(space, "me", receive=True), await session_of(space, "bob")
        await ask(me.join, "general")
        tail = start(terminal, "tail", "general", "aside", "--count", "3", "--json")
        working = start(terminal, "work", "--role", "reviewer", "--exec", "echo fine", "--direct")
        assert tail.stderr is not None
        assert "watching general, aside" in await ask(tail.stderr.readline)
        for where, text in (("general", "one"), ("aside", "two"), ("general", "three")):
            assert (await ask(bob.send, channel=where, text=text, wait=10)).stage == "confirmed"
        assert (await ask(bob.send, agent="me", text="four", wait=10)).stage == "confirmed"
        asked = await ask(bob.send, role="reviewer", text="is it?", wait=10)
        assert (await ask(bob.task, asked.id, wait=20))["text"] == "fine"
        working.send_signal(signal.SIGINT)
        shown, _ = await ask(tail.communicate, timeout=20)
        _, said = await ask(working.communicate, timeout=20)
        assert (THROUGH in said, "stopped" in said) == (False, True)
        told = [json.loads(each)["text"] for each in shown.splitlines()]
        assert told == ["one", "two", "three"], "also of a channel that nobody follows"

        async def arrived() -> bool:
            return len(await ask(me.inbox)) >= 3

        await eventually(arrived, what="the host has the mail")
        # a message that comes after everything else: what a session that was taken would miss
        assert (await ask(bob.send, agent="me", text="last", wait=10)).stage == "confirmed"
        await eventually(lambda: has(me, "last"), what="and the mail after it")
        found = sorted(each["text"] for each in await ask(me.inbox))
        assert found == ["four", "last", "one", "three"], "each once, and nothing that was only watched"
        health = next(each for each in daemon.host.health() if each.scope.name == "me")
        assert (health.receiving, health.superseded) == (True, False)


async def has(session: Any, text: str) -> bool:
    return any(each["text"] == text for each in await ask(session.inbox))


# --- the outbox without a host ---


def _but_why(stdout: str) -> str:
    """What was printed but for why a row waits, as words or as JSON."""
    if not stdout.startswith("{"):
        return "".join(line for line in stdout.splitlines(keepends=True) if not line.startswith("waits because"))
    return json.dumps({key: value for key, value in json.loads(stdout).items() if key != "waits"})


async def test_an_outbox_is_read_from_its_file_while_no_host_runs_and_needs_one_to_change(
    terminal: Terminal, space: RealSpace
) -> None:
    home = terminal.home.home
    for name in ("me", "bob"):
        await space.add(name)
    await space.stop_steward()
    async with daemon_in(home):
        assert (await facts(terminal, "send", "general", "sent"))["stage"] == "confirmed"
        assert (await run(terminal, "outbox", "pause")).returncode == 0
        waiting = await facts(terminal, "send", "general", "later")
        cancelled = await facts(terminal, "send", "general", "never")
        await run(terminal, "outbox", "cancel", cancelled["id"])
        again = (await run(terminal, "outbox", "requeue", cancelled["id"])).stdout.strip()
        assert (await facts(terminal, "send", "general", "of bob", "--as", "bob"))["stage"] == "stored"
        lines = (
            "outbox list --state pending",
            "outbox list --state pending -n 1",
            f"outbox show {waiting['id']}",
            f"outbox show {cancelled['id']}",
        )
        said = [await run(terminal, *line.split(), *more) for line in lines for more in ((), ("--json",))]
        listed = await facts(terminal, "outbox", "list")
    before = (home / "host.db").read_bytes()
    read = [await run(terminal, *line.split(), *more) for line in lines for more in ((), ("--json",))]
    assert [_but_why(each.stdout) for each in read] == [_but_why(each.stdout) for each in said]
    held = "main is held back here (paused by its user): `tidings outbox resume`"
    assert json.loads(said[5].stdout)["waits"] == [held]
    assert json.loads(read[5].stdout)["waits"] == [held, "no host runs: it leaves once one does, `tidings host up`"]
    assert again in read[-2].stdout
    assert {(each.returncode, each.stderr) for each in read} == {(0, "no host runs: read from its file\n")}
    assert [each["id"] for each in await facts(terminal, "outbox", "list")] == [each["id"] for each in listed]
    assert len(await facts(terminal, "outbox", "list", "--as", "bob")) == 1, "each agent its own"
    for line, code, words in (
        (f"outbox show {new_id()}", 2, "has no message"),
        (f"outbox show {waiting['id']} --as bob", 2, "the outbox of bob has no message"),
        ("outbox list --as nobody", 2, "there is no credential for agent nobody"),
        ("outbox list -n 0", 2, "at least 1"),
        (f"outbox cancel {waiting['id']}", 5, "no host runs"),
        (f"outbox requeue {cancelled['id']}", 5, "`tidings host up` starts one"),
    ):
        refused = await run(terminal, *line.split())
        assert (refused.returncode, words in refused.stderr, refused.stdout) == (code, True, ""), refused
    assert (home / "host.db").read_bytes() == before
    assert all(each.stat().st_mode & 0o077 == 0 for each in home.glob("host.db*")), "whatever SQLite put beside it"
    async with daemon_in(home):
        assert (await run(terminal, "outbox", "resume")).returncode == 0
        sent = await facts(terminal, "outbox", "show", waiting["id"])
        assert sent["chain"][0]["id"] == waiting["id"], "and a host opens it as ever"


async def test_a_host_that_is_there_and_does_not_answer_is_unhealthy(terminal: Terminal, space: RealSpace) -> None:
    await space.add("me")
    up = await run(terminal, "host", "up")
    (pid,) = map(int, re.findall(r"\(pid (\d+)\)", up.stderr))
    try:
        assert (await facts(terminal, "status"))["healthy"]
        os.kill(pid, signal.SIGSTOP)
        silent = await run(terminal, "status")
        assert (silent.returncode, f"pid {pid}, DOES NOT ANSWER" in silent.stdout) == (3, True), silent
        assert f"problem: the host (pid {pid}) does not answer" in silent.stderr
        assert "NOT HEALTHY" in silent.stdout
    finally:
        os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not is_held(terminal.home.home), what="the lock ended with it")
    gone = await facts(terminal, "status")
    assert (gone["healthy"], gone["host"]["said"]) == (True, "not running")


async def test_what_a_killed_host_had_promised_is_in_its_file(terminal: Terminal, space: RealSpace) -> None:
    home = terminal.home.home
    await space.add("me")
    await space.stop_steward()
    space.broker.stop()
    up = await run(terminal, "host", "up")
    (pid,) = map(int, re.findall(r"\(pid (\d+)\)", up.stderr))
    sent = [(await facts(terminal, "send", "general", text))["id"] for text in ("one", "two")]
    os.kill(pid, signal.SIGSTOP)
    try:
        silent = await run(terminal, "outbox", "list")
        assert (silent.returncode, f"(pid {pid}) does not answer" in silent.stderr) == (5, True), silent
    finally:
        os.kill(pid, signal.SIGKILL)
    await eventually(lambda: HostClient.find(home) is None)
    await eventually(lambda: not is_held(home), what="the lock ended with it")
    left = (home / "host.db-wal").read_bytes()
    assert left, "nobody put it into the database"
    found = await facts(terminal, "outbox", "list")
    assert [each["id"] for each in reversed(found)] == sent
    assert (home / "host.db-wal").read_bytes() == left, "that is for the next host to do"


def is_held(home: Path) -> bool:
    from tidings.util.private_files import lock_pid

    return lock_pid(home / "run" / "host.lock") is not None
