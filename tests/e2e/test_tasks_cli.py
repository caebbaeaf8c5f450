"""Tasks as a user types them: ask, work with a command, and what is left over."""

import json

from terminal import Terminal


def test_a_task_is_asked_worked_on_by_a_command_and_answered(terminal: Terminal) -> None:
    assert terminal.run("up", "--detach").returncode == 0
    assert terminal.run("agent", "add", "bob", "--role", "counter").returncode == 0
    worker = terminal.start(
        "work", "--role", "counter", "--exec", 'printf %s "$TIDINGS_TEXT" | wc -w', "--once", TIDINGS_AS="bob"
    )
    answered = terminal.run("ask", "counter", "three short words", "--wait", "20", "--json")
    assert answered.returncode == 0, answered.stderr
    facts = json.loads(answered.stdout)
    said = worker.communicate(timeout=30)
    assert (worker.returncode, facts["state"], facts["worker"]) == (0, "done", "bob"), said
    assert facts["text"].strip() == "3"


def test_a_command_that_fails_ends_as_a_dead_letter_that_is_shown_retried_and_dropped(terminal: Terminal) -> None:
    assert terminal.run("up", "--detach").returncode == 0
    nobody = terminal.run("ask", "counter", "anyone?", "--deadline", "1", "--wait", "10")
    assert nobody.returncode == 1
    assert "nobody holds the role counter" in nobody.stderr
    assert "(deadline)" in nobody.stderr
    (dead,) = json.loads(terminal.run("dead", "list", "--json").stdout)
    shown = json.loads(terminal.run("dead", "show", str(dead["seq"]), "--json").stdout)
    assert (dead["cause"], json.loads(shown["payload"])["parts"][0]["text"]) == ("deadline", "anyone?")
    assert json.loads(terminal.run("dead", "retry", str(dead["seq"]), "--json").stdout)["state"] == "queued"
    terminal.run("agent", "add", "bob", "--role", "counter")
    failed = terminal.run("work", "--role", "counter", "--exec", "echo no pen >&2; exit 3", "--once", "--as", "bob")
    assert (failed.returncode, "failed and is queued" in failed.stderr) == (0, True), failed.stderr
    refused = terminal.run("work", "--role", "painter", "--exec", "true", "--as", "bob")
    assert (refused.returncode, "does not hold the role painter" in refused.stderr) == (4, True)
    assert terminal.run("dead", "drop", "99", "--yes").returncode == 2
