"""`tidings link`: links as an operator sees them, carried by `tidings up` or alone."""

import asyncio
import io
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from carried_links import agree
from linked_spaces import LINK, text_of
from terminal import Terminal, done, until
from tidings.admin.home import SpaceHome
from tidings.util.private_files import lock_pid
from tidings.wire import signing
from tidings_testing.real_space import RealSpace

ACME = ("--space", "acme")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(tmp_path)
    yield found
    found.close()


def on_disk(terminal: Terminal, name: str) -> RealSpace:
    """A space that runs elsewhere, to be administered and talked to."""
    home = SpaceHome(terminal.home.home, name)
    return RealSpace(home, home.read_info(), None)  # type: ignore[arg-type]


def agree_both(terminal: Terminal) -> None:
    async def both() -> None:
        main, acme = on_disk(terminal, "main"), on_disk(terminal, "acme")
        await agree(main, acme)
        await agree(acme, main)

    asyncio.run(both())


def link_of(terminal: Terminal, *where: str) -> dict[str, Any]:
    (found,) = json.loads(done(terminal, "link", "list", "--json", *where))
    return dict(found)


def is_live(terminal: Terminal, *where: str) -> bool:
    return bool(link_of(terminal, *where)["shown"] == "live")


def worker_pid(terminal: Terminal, name: str) -> int | None:
    return lock_pid(SpaceHome(terminal.home.home, name).root / "links.db.lock")


def heard(terminal: Terminal, text: str, *where: str) -> bool:
    return text in done(terminal, "history", "general", *where)


def start_both(terminal: Terminal, *how: str) -> None:
    done(terminal, "up", "--detach", *how)
    done(terminal, "up", "--detach", *ACME, *how)


@pytest.mark.timeout(240)
def test_up_carries_a_link_from_the_moment_it_is_agreed_until_it_is_removed(terminal: Terminal) -> None:
    start_both(terminal)
    assert "has no links" in terminal.run("link", "list").stderr
    assert worker_pid(terminal, "acme") is None
    agree_both(terminal)
    until(lambda: is_live(terminal) and is_live(terminal, *ACME))
    done(terminal, "send", "general", "hello over there")
    until(lambda: heard(terminal, "me@main: hello over there", *ACME))
    # the worker writes to its ledger after the log has the message
    until(lambda: "records\t1 let in" in done(terminal, "link", "show", "main", *ACME))
    assert "main live" in done(terminal, "status", *ACME)
    assert json.loads(done(terminal, "status", "--json"))["links"]["links"] == [{"space": "acme", "state": "live"}]

    shown = done(terminal, "link", "show", "main", *ACME)
    for words in ("handled through\t", "takes in\tgeneral", "records\t1 let in", "connection\tonline"):
        assert words in shown, shown
    assert json.loads(done(terminal, "link", "show", LINK, "--json", *ACME))["store"]["counts"] == {"admitted": 1}
    assert done(terminal, "link", "verify", "main", *ACME).startswith("equal: every record that main shares")

    killed = worker_pid(terminal, "acme")
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    done(terminal, "send", "general", "said while nobody carried")
    until(lambda: heard(terminal, "me@main: said while nobody carried", *ACME))
    assert worker_pid(terminal, "acme") not in (None, killed)
    assert done(terminal, "history", "general", *ACME).count("hello over there") == 1

    removed = terminal.run("link", "remove", "acme", "--yes")
    assert (removed.returncode, "operator of the other space should" in removed.stderr) == (0, True), removed
    until(lambda: worker_pid(terminal, "main") is None)
    assert "has no links" in terminal.run("link", "list").stderr
    assert "ended" in done(terminal, "link", "list", "--all")
    done(terminal, "send", "general", "nobody there reads this")
    until(lambda: link_of(terminal, *ACME)["shown"] == "ended there")
    cure = "main ended the link: nothing comes from there any more, and nothing goes there. `tidings link remove main"
    listed, healthy = terminal.run("link", "list", *ACME), terminal.run("status", *ACME)
    assert "ended there\toffline" in listed.stdout
    for said in (listed.stderr, done(terminal, "link", "show", "main", *ACME), healthy.stderr):
        assert cure in " ".join(said.split()), said
    assert (healthy.returncode, "main ended there" in healthy.stdout) == (3, True)
    assert not heard(terminal, "nobody there reads this", *ACME)
    done(terminal, "link", "remove", "main", "--yes", *ACME)
    assert terminal.run("status", *ACME).returncode == 0
    assert terminal.run("status").returncode == 0
    for where in ((), ACME):
        done(terminal, "down", *where)
    assert terminal.processes() == []


@pytest.mark.timeout(240)
def test_paused_resumed_followed_and_run_alone(terminal: Terminal) -> None:
    start_both(terminal, "--no-links")
    agree_both(terminal)
    done(terminal, "send", "general", "before")
    assert "no link worker runs" in terminal.run("link", "list", *ACME).stderr
    away = terminal.run("link", "show", "main", "--follow", *ACME)
    assert (away.returncode, "no link worker runs for this space: `tidings up" in away.stderr) == (5, True), away
    done(terminal, "link", "pause", "main", "--reason", "a look first", *ACME)
    assert link_of(terminal, *ACME)["shown"] == "paused"

    running = terminal.start("link", "run", "--poll", "--every", "1s", *ACME)
    try:
        until(lambda: link_of(terminal, *ACME)["live"] is not None)
        assert link_of(terminal, *ACME)["live"]["words"] == "a look first"
        second = terminal.run("link", "run", *ACME)
        assert (second.returncode, "one does it at a time" in second.stderr) == (6, True), second
        following = terminal.start("link", "show", "main", "--follow", "--json", *ACME)
        assert following.stdout is not None
        assert json.loads(following.stdout.readline())["live"]["status"] == "paused"
        done(terminal, "link", "resume", "main", *ACME)
        until(lambda: heard(terminal, "me@main: before", *ACME))
        events = [json.loads(following.stdout.readline()) for _ in range(4)]
        assert "pull_advanced" in {each["event"] for each in events}, events
        following.send_signal(signal.SIGINT)
        following.communicate(timeout=20)
        assert following.returncode == 0
        rebuilt = terminal.run("link", "rebuild", "main", "--yes", *ACME)
        assert (rebuilt.returncode, "begins anew" in rebuilt.stderr) == (0, True), rebuilt
        until(lambda: is_live(terminal, *ACME))
        assert done(terminal, "history", "general", *ACME).count("before") == 1
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=30)
        assert (running.returncode, "links are not carried now" in err) == (0, True), (out, err)
    finally:
        _end(running)
    assert done(terminal, "link", "verify", "main", *ACME).startswith("equal")


@pytest.mark.timeout(240)
def test_a_ledger_damaged_under_its_worker_is_a_problem_of_the_space_that_status_shows_with_its_cure(
    terminal: Terminal,
) -> None:
    start_both(terminal)
    agree_both(terminal)
    done(terminal, "send", "general", "before")
    until(lambda: heard(terminal, "me@main: before", *ACME))
    store = SpaceHome(terminal.home.home, "acme").link_store
    store.write_bytes(b"not a database at all" * 500)

    def refused() -> bool:
        shown = terminal.run("status", *ACME)
        assert "steward" in shown.stdout, shown
        assert "LOG_acme" in shown.stdout, shown
        said = " ".join((shown.stdout + shown.stderr).split())
        return shown.returncode == 3 and "not carried" in said and "tidings link rebuild --ledger" in said

    until(refused)
    done(terminal, "send", "general", "meanwhile")
    done(terminal, "link", "rebuild", "--ledger", "--yes", *ACME)
    until(lambda: heard(terminal, "me@main: meanwhile", *ACME))
    until(lambda: terminal.run("status", *ACME).returncode == 0)
    assert done(terminal, "history", "general", *ACME).count("before") == 1


def _end(running: subprocess.Popen[str]) -> None:
    if running.poll() is None:
        running.kill()
        running.communicate()


@pytest.mark.timeout(240)
def test_what_is_not_let_in_is_listed_shown_tried_again_and_given_up(terminal: Terminal) -> None:
    start_both(terminal)
    agree_both(terminal)

    async def forge() -> list[int]:
        async with on_disk(terminal, "main").agent("me") as me:
            found = []
            for text in ("not signed by me \x1b[2J", "nor this"):
                payload = text_of(me, text)
                wrong = signing.sign(me.key, me.space_id, "chat", "another", payload)
                subject = me.subjects.chat(me.id, "general")
                reply = await me.connection.request(subject, payload, timeout=5, headers={"Td-Sig": wrong})
                found.append(int(json.loads(reply.data)["seq"]))
            return found

    first, second = asyncio.run(forge())
    until(lambda: (link_of(terminal, *ACME)["store"] or {}).get("quarantined") == 2)
    listed = json.loads(done(terminal, "link", "quarantine", "list", "main", "--json", *ACME))
    assert [(each["seq"], each["reason"]) for each in listed] == [(first, "signature"), (second, "signature")]
    assert str(first) in done(terminal, "link", "quarantine", "main", "list", *ACME)
    shown = done(terminal, "link", "quarantine", "show", "main", str(first), *ACME)
    assert "not signed by me" in shown
    assert "\x1b" not in shown
    tried = terminal.run("link", "quarantine", "retry", "main", "--all", *ACME)
    assert (tried.returncode, "2 records of main are tried again" in tried.stderr) == (0, True), tried
    neither = terminal.run("link", "quarantine", "retry", "main", *ACME)
    assert (neither.returncode, "or --all" in neither.stderr) == (2, True)
    dropped = terminal.run("link", "quarantine", "drop", "main", str(first), "--reason", "forged", *ACME)
    assert (dropped.returncode, "1 are left in quarantine" in dropped.stderr) == (0, True), dropped
    assert "operator: forged" in done(terminal, "link", "show", "main", *ACME)
    gone = terminal.run("link", "quarantine", "show", "main", str(first), *ACME)
    assert (gone.returncode, "is not in quarantine" in gone.stderr) == (2, True)
    assert done(terminal, "link", "verify", "main", *ACME).startswith("equal")


@pytest.mark.timeout(120)
def test_sentences_for_what_is_not_there(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = terminal.run("link", "list")
    assert (nowhere.returncode, "there is no space 'main'" in nowhere.stderr) == (2, True)
    start_both(terminal, "--no-links")
    for words in (("show", "acme"), ("pause", "acme"), ("remove", "acme", "--yes"), ("quarantine", "list", "acme")):
        found = terminal.run("link", *words)
        assert (found.returncode, "no link is meant by 'acme'" in found.stderr) == (2, True), found
    agree_both(terminal)
    early = terminal.run("link", "verify", "acme")
    assert (early.returncode, "nothing came over link" in early.stderr) == (6, True), early
    monkeypatch.setattr("sys.stdin", io.StringIO())
    unsaid = terminal.run("link", "remove", "acme")
    assert (unsaid.returncode, "nothing was done: --yes says it in advance" in unsaid.stderr) == (2, True), unsaid
    sentences: tuple[tuple[tuple[str, ...], str], ...] = (
        (("set", "acme"), "otherwise on the link with acme"),
        (("resume", "acme"), "link with acme was not paused"),
        (("run", "--every", "5m"), "say --poll too"),
        (("rebuild",), "or --ledger for all of them, and not both"),
        (("quarantine", "show", "acme", "7"), f"`tidings link quarantine list {LINK}"),
        (("quarantine", "drop", "acme", "7", "--reason", "x"), f"record 7 of link {LINK} is not in quarantine"),
        (("quarantine", "retry", "acme", "7", "8"), f"none of 7, 8 of link {LINK} is in quarantine"),
        (("quarantine", "retry", "acme", "--all"), "nothing of acme is in quarantine"),
    )
    for asked, reason in sentences:
        told = terminal.run("link", *asked)
        assert reason in " ".join(told.stderr.split()), told
        assert "Traceback" not in told.stderr
    line = done(terminal, "link", "invite", "other", "--both", "general").strip()
    for where in ((), ACME):
        done(terminal, "down", *where)
    assert "not carried" in done(terminal, "link", "list")
    apart = terminal.run("link", "accept", "--as", "other", "--yes", line, "--space", "acme")
    assert (apart.returncode, "space main, which invited, does not answer" in apart.stderr) == (5, True), apart
    late = terminal.run("link", "set", "acme", "--take", "general=far.general")
    assert (late.returncode, "is written down: it holds when you repeat" in " ".join(late.stderr.split())) == (5, True)
    assert "is not in force yet" in done(terminal, "link", "show", "acme")
    again = terminal.run("link", "set", "acme", "--take", "general=far.general")
    assert (again.returncode, "is so already" in again.stderr) == (5, False), again
    removed = terminal.run("link", "remove", "acme", "--yes")
    assert (removed.returncode, "the steward does not answer" in removed.stderr) == (0, True), removed
    assert "ended" in done(terminal, "link", "list", "--all")
    done(terminal, "up", "--detach", "--no-links")
    assert json.loads(done(terminal, "link", "list", "--all", "--json"))[0]["state"] == "off"
