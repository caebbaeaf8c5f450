"""A flood as the owner of a space meets it: the supervisor cuts it when the steward asks, and every surface says so."""

import asyncio
import json
import time

import pytest

from terminal import Terminal
from tidings.nats.client import connect
from tidings.nats.jwt import split_credentials


async def pour(terminal: Terminal, name: str, megabytes: int) -> None:
    info, path = terminal.home.read_info(), terminal.home.agent_creds(name)
    _, key = split_credentials(path.read_text())
    connection = await connect(info.url, path, key.id, name=name, reconnect=False)
    for _ in range(megabytes * 10):
        await connection.publish(info.subjects.chat(key.id, "general"), b"x" * 100_000)
    await connection.flush()
    await connection.close()


def withheld(terminal: Terminal, name: str) -> str:
    rows = json.loads(terminal.run("agent", "list", "--json").stdout)
    return str(next(row["withheld"] for row in rows if row["name"] == name))


@pytest.mark.slow
def test_f25_the_supervisor_cuts_a_flooder_and_its_owner_restores_it(terminal: Terminal) -> None:
    assert terminal.run("up", "--detach", "--budget", "20000000").returncode == 0
    assert terminal.run("agent", "add", "mal").returncode == 0
    assert terminal.run("space", "set", "quota.records=1", "quota.bytes=1K").returncode == 0
    asyncio.run(pour(terminal, "mal", 6))
    deadline = time.monotonic() + 40
    while not (why := withheld(terminal, "mal")):
        assert time.monotonic() < deadline, "nobody cut the flooder"
        time.sleep(0.2)
    assert "records in" in why
    assert f"mal may not post {why}" in terminal.run("agent", "list").stderr
    assert f"mal may not post {why}" in terminal.run("agent", "show", "mal").stderr
    status = terminal.run("status", "--json")
    assert json.loads(status.stdout)["steward"]["withheld"] == [f"mal may not post {why}"]
    assert status.returncode == 0, "a flooder that was cut is no problem any more"
    refused = terminal.run("send", "general", "hello", "--as", "mal")
    assert refused.returncode == 4
    assert f"mal may not post {why}" in refused.stderr
    assert terminal.run("agent", "access", "mal", "--post", "general").returncode == 0
    assert terminal.run("space", "set", "quota.records=", "quota.bytes=").returncode == 0
    assert terminal.run("send", "general", "hello", "--as", "mal").returncode == 0
    assert withheld(terminal, "mal") == ""
