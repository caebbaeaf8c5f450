"""`tidings up` as a user runs it: a real process with real children, started, stopped, struck and interrupted."""

import json
import os
import signal
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from terminal import Terminal
from tidings.util.private_files import lock_holder


def until(condition: Callable[[], bool], within: float = 30.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.02)


def test_a_space_comes_up_is_used_and_goes_down_leaving_nothing_behind(terminal: Terminal) -> None:
    up = terminal.run("up", "--detach")
    assert up.returncode == 0, up.stderr
    assert "space main is up at nats://127.0.0.1:" in up.stderr

    status = terminal.run("status", "--json")
    facts = json.loads(status.stdout)
    assert (status.returncode, facts["healthy"], facts["problems"]) == (0, True, [])
    assert facts["steward"]["agents"] == 1
    assert set(facts["steward"]["streams"]) == {f"{s}_main" for s in ("LOG", "DM", "TASK", "DLV", "AUD", "DEAD")}
    assert facts["steward"]["free_disk"] > 0
    assert facts["broker"]["resident_bytes"] > 0

    read = terminal.run("doctor", "store")
    assert (read.returncode, "none is damaged or missing" in read.stderr) == (0, True), read
    added = json.loads(terminal.run("agent", "add", "ada", "--read", "team.>", "--json").stdout)
    assert (added["read"], added["post"]) == (["team.>"], ["general"])
    assert stat.S_IMODE(Path(added["creds"]).stat().st_mode) == 0o600
    listed = json.loads(terminal.run("agent", "list", "--json").stdout)
    assert [row["name"] for row in listed] == ["ada", "me"]

    down = terminal.run("down")
    assert (down.returncode, terminal.processes()) == (0, [])
    assert lock_holder(terminal.home.up_lock) is None
    gone = terminal.run("status")
    assert gone.returncode == 5
    assert "no broker answers" in gone.stderr


def test_a_second_up_refuses_and_names_the_first(terminal: Terminal) -> None:
    assert terminal.run("up", "--detach").returncode == 0
    holder = lock_holder(terminal.home.up_lock)
    assert holder is not None
    second = terminal.run("up", "--detach")
    assert second.returncode == 6
    assert holder.split(" (")[0] in second.stderr
    foreground = terminal.start("up")
    assert holder.split(" (")[0] in foreground.communicate(timeout=30)[1]
    assert foreground.returncode == 6
    assert terminal.run("status").returncode == 0


def test_the_port_is_kept_and_one_in_use_is_named(terminal: Terminal) -> None:
    assert terminal.run("up", "--detach").returncode == 0
    port = terminal.home.read_info().port
    assert terminal.run("down").returncode == 0
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        refused = terminal.run("up", "--detach")
    assert refused.returncode == 1
    assert f"port {port} of space main is in use" in refused.stderr
    assert terminal.run("up", "--detach").returncode == 0
    assert terminal.home.read_info().port == port


@pytest.mark.parametrize(
    "phase",
    [
        "creating",
        "ready",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("broker", "streams", "steward", "agents")),
    ],
)
def test_ctrl_c_at_every_stage_leaves_no_process_and_no_lock(terminal: Terminal, phase: str) -> None:
    up = terminal.start("up", TIDINGS_FAILPOINT=f"up.{phase}:interrupt")
    _, words = up.communicate(timeout=40)
    assert up.returncode == 0, words
    assert "stopping" in words
    assert terminal.processes() == []
    assert lock_holder(terminal.home.up_lock) is None
    assert terminal.run("up", "--detach").returncode == 0, "the next start completes what was interrupted"


def test_a_supervisor_killed_with_9_takes_its_children_along_and_the_next_one_recovers(terminal: Terminal) -> None:
    assert terminal.run("up", "--detach").returncode == 0
    assert terminal.run("agent", "add", "ada").returncode == 0
    state = terminal.home.read_state()
    os.kill(state["pid"], signal.SIGKILL)
    until(lambda: state["steward_pid"] not in terminal.processes(), 2)  # it does not wait for a broker that is gone
    until(lambda: terminal.processes() == [])
    assert terminal.run("up", "--detach").returncode == 0
    assert terminal.run("agent", "show", "ada").returncode == 0


@pytest.mark.parametrize("victim", ["broker_pid", pytest.param("steward_pid", marks=pytest.mark.slow)])
@pytest.mark.requirement("X1")
def test_a_child_killed_with_9_is_started_again(terminal: Terminal, victim: str) -> None:
    assert terminal.run("up", "--detach").returncode == 0
    before = terminal.home.read_state()
    os.kill(before[victim], signal.SIGKILL)
    until(lambda: terminal.home.read_state().get(victim) not in (None, before[victim]))
    until(lambda: terminal.home.read_state()["phase"] == "ready")
    until(lambda: terminal.run("status").returncode == 0)


def test_a_creds_file_others_can_read_is_refused_with_the_command_that_mends_it(terminal: Terminal) -> None:
    assert terminal.run("up", "--detach").returncode == 0
    creds = terminal.home.agent_creds("me")
    creds.chmod(0o644)
    refused = terminal.run("status", "--json")
    facts = json.loads(refused.stdout)
    assert refused.returncode == 3
    assert f"chmod 600 {creds}" in facts["steward"]["why"]
    creds.chmod(0o600)
    assert terminal.run("status").returncode == 0


def test_no_write_permission_is_said_in_a_sentence(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    refused = terminal.run("up", TIDINGS_HOME=str(tmp_path / "file" / "home"))
    assert refused.returncode == 2
    assert "cannot use directory" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_home_open_to_others_is_refused(terminal: Terminal, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    refused = terminal.run("up", TIDINGS_HOME=str(shared))
    assert refused.returncode == 2
    assert f"chmod 700 {shared}" in refused.stderr


def test_several_spaces_run_side_by_side(terminal: Terminal) -> None:
    for space in ("one", "two"):
        assert terminal.run("up", "--detach", "--space", space).returncode == 0
    listed = json.loads(terminal.run("space", "list", "--json").stdout)
    assert [(each["space"], each["running"]) for each in listed] == [("one", True), ("two", True)]
    assert len({each["url"] for each in listed}) == 2
    assert terminal.run("agent", "add", "ada", "--space", "one").returncode == 0
    other = json.loads(terminal.run("agent", "list", "--space", "two", "--json").stdout)
    assert [row["name"] for row in other] == ["me"]
    assert terminal.run("space", "remove", "one", "--yes").returncode == 6
    for space in ("one", "two"):
        assert terminal.run("down", "--space", space).returncode == 0
    assert terminal.run("space", "remove", "one", "--yes").returncode == 0
    assert [each["space"] for each in json.loads(terminal.run("space", "list", "--json").stdout)] == ["two"]


def test_a_revoked_agent_stays_out_of_a_broker_that_starts_again_on_older_tokens(terminal: Terminal) -> None:
    assert terminal.run("up", "--detach").returncode == 0
    assert terminal.run("agent", "add", "ada").returncode == 0
    creds = terminal.home.agent_creds("ada").read_text()
    older = {path: path.read_text() for path in terminal.home.resolver.glob("*.jwt")}
    assert terminal.run("agent", "revoke", "ada", "--yes").returncode == 0
    for path, token in older.items():
        path.write_text(token)
    before = terminal.home.read_state()["broker_pid"]
    os.kill(before, signal.SIGKILL)
    until(lambda: terminal.home.read_state().get("broker_pid") not in (None, before))
    until(lambda: terminal.run("status").returncode == 0)
    terminal.home.agent_creds("ada").write_text(creds)
    terminal.home.agent_creds("ada").chmod(0o600)
    refused = terminal.run("status", "--as", "ada", "--json")
    assert json.loads(refused.stdout)["steward"]["code"] == "revoked"


def test_a_revoked_agent_stays_out_after_a_restart(terminal: Terminal) -> None:
    assert terminal.run("up", "--detach").returncode == 0
    assert terminal.run("agent", "add", "ada").returncode == 0
    creds = terminal.home.agent_creds("ada").read_text()
    assert terminal.run("agent", "revoke", "ada", "--yes").returncode == 0
    assert terminal.run("down").returncode == 0
    assert terminal.run("up", "--detach").returncode == 0
    terminal.home.agent_creds("ada").write_text(creds)
    terminal.home.agent_creds("ada").chmod(0o600)
    refused = terminal.run("status", "--as", "ada", "--json")
    assert json.loads(refused.stdout)["steward"]["code"] == "revoked"
