"""The documented backup, put back as docs/operations.md says: nobody misses what is new, and everybody is told."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

import tidings
from blocking_host import HostClient
from terminal import Terminal, done, until
from tidings.client.host_session import SessionFile, own_file
from tidings.errors import AuthRevoked, DeniedError


async def post(terminal: Terminal, count: int, text: str) -> list[str]:
    texts = [f"{text} {number}" for number in range(count)]
    async with tidings.connect("main", name="me", home=terminal.home.home, receive=False) as me:
        for each in texts:
            await me.send("general", each, timeout=30)
    return texts


async def read(terminal: Terminal, name: str, count: int, state: Path | None = None) -> list[str]:
    """What a program of the library gets, with its state file."""
    async with tidings.connect("main", name=name, channels=["general"], home=terminal.home.home, state=state) as agent:
        found = []
        for _ in range(count):
            message = await agent.next_message(30)
            await message.ack()
            found.append(message.text)
        assert len(agent.transport.queue) == 0
        return found


def kept(terminal: Terminal, *, notices: bool = False) -> list[str]:
    """What the host keeps for carol: messages, or what it was told."""
    home = terminal.home.home
    rows = HostClient(home).resume(SessionFile.read(own_file(home, "main", "carol"))).inbox()
    return [str(row["text"]) for row in rows if (row["kind"] == "notice") is notices]


def level(terminal: Terminal) -> bool:
    facts = json.loads(terminal.run("pipeline", "status", "--json").stdout)
    return bool(facts["running"] and facts["behind"] == 0)


@pytest.mark.timeout(600)  # three starts and two stops, each of three processes
@pytest.mark.parametrize("pipeline", ["off", pytest.param("on", marks=[pytest.mark.spark, pytest.mark.slow])])
def test_a_space_put_back_as_documented_hides_nothing_new_from_state_file_host_or_mailbox(
    terminal: Terminal, tmp_path: Path, pipeline: str
) -> None:
    terminal.env["TIDINGS_PIPELINE"] = pipeline
    folder, copy, state = terminal.home.root, tmp_path / "copy", tmp_path / "bob.state"
    done(terminal, "up", "--detach")
    for name in ("bob", "carol", *(["dan"] if pipeline == "on" else [])):
        done(terminal, "agent", "add", name, "--read", "general")
    assert terminal.run("host", "up").returncode == 0
    done(terminal, "join", "general", "--as", "carol")
    asyncio.run(read(terminal, "bob", 0, state))
    if pipeline == "on":
        asyncio.run(read(terminal, "dan", 0))

    done(terminal, "down")
    shutil.copytree(folder, copy)
    done(terminal, "up", "--detach")
    lost = asyncio.run(post(terminal, 8, "lost"))
    assert asyncio.run(read(terminal, "bob", 8, state)) == lost
    until(lambda: set(lost) <= set(kept(terminal)))
    if pipeline == "on":
        until(lambda: level(terminal), 180)
        assert asyncio.run(read(terminal, "dan", 8, tmp_path / "dan.state")) == lost
    done(terminal, "down")
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    done(terminal, "up", "--detach")

    new = asyncio.run(post(terminal, 5, "new"))
    assert asyncio.run(read(terminal, "bob", 5, state)) == new
    until(lambda: set(new) <= set(kept(terminal)))
    assert sorted(kept(terminal)) == sorted([*lost, *new]), "each once"
    assert sum("went backwards" in text for text in kept(terminal, notices=True)) == 1
    if pipeline == "on":
        until(lambda: level(terminal), 180)
        assert asyncio.run(read(terminal, "dan", 5, tmp_path / "dan.state")) == new
    status = terminal.run("status", "--json")
    problems = json.loads(status.stdout)["problems"]
    assert (status.returncode, "the log went backwards: it was at" in problems[0]) == (3, True)
    done(terminal, "space", "acknowledge")
    assert terminal.run("status").returncode == 0
    assert terminal.run("host", "down").returncode == 0


async def send_with(bundle: Path, text: str) -> None:
    async with tidings.connect(bundle=bundle, receive=False) as agent:
        await agent.send("general", text, timeout=30)


def exported(terminal: Terminal, name: str, path: Path) -> Path:
    done(terminal, "agent", "export", name, "--output", str(path))
    return path


@pytest.mark.timeout(600)
def test_a_space_put_back_as_documented_gives_nobody_back_what_was_taken_since(
    terminal: Terminal, tmp_path: Path
) -> None:
    terminal.env["TIDINGS_PIPELINE"] = "off"
    folder, copy = terminal.home.root, tmp_path / "copy"
    done(terminal, "up", "--detach")
    for name in ("rex", "ada"):
        done(terminal, "agent", "add", name)
    done(terminal, "agent", "add", "bob", "--read", "general,ops", "--post", "general,ops")
    rex, ada = exported(terminal, "rex", tmp_path / "rex.json"), exported(terminal, "ada", tmp_path / "ada.json")
    bob = exported(terminal, "bob", tmp_path / "bob.json")
    done(terminal, "down")
    shutil.copytree(folder, copy)
    done(terminal, "up", "--detach")
    done(terminal, "agent", "revoke", "rex", "--yes")
    done(terminal, "agent", "access", "bob", "--read", "general", "--post", "general")
    done(terminal, "agent", "rotate", "ada")
    for name in ("eve", "carol"):
        done(terminal, "agent", "add", name)
    eve, carol = exported(terminal, "eve", tmp_path / "eve.json"), exported(terminal, "carol", tmp_path / "carol.json")
    new_ada = exported(terminal, "ada", tmp_path / "new-ada.json")
    done(terminal, "agent", "revoke", "eve", "--yes")
    done(terminal, "down")
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    done(terminal, "up", "--detach")

    for bundle in (rex, ada, eve):
        with pytest.raises(AuthRevoked):
            asyncio.run(send_with(bundle, "I am back"))
    for bundle in (new_ada, carol):
        asyncio.run(send_with(bundle, "hello"))
    done(terminal, "send", "general", "with the credential of the copy", "--as", "bob")
    with pytest.raises((AuthRevoked, DeniedError)):
        asyncio.run(send_narrowed(bob))
    listed = {row["name"]: row for row in json.loads(done(terminal, "agent", "list", "--json"))}
    assert listed.keys() == {"ada", "bob", "carol", "me"}
    assert (listed["bob"]["read"], listed["bob"]["post"]) == (["general"], ["general"])
    status = terminal.run("status", "--json")
    (said,) = [each for each in json.loads(status.stdout)["problems"] if "from a copy" in each]
    assert status.returncode == 3
    for part in ("rex stays revoked", "eve stays revoked", "bob has the access it was given since"):
        assert part in said
    assert "the key ada had before its rotation stays void" in said
    assert "carol, added since" in said
    assert "ops" not in said, "every agent may ask for this, and it names no channel"
    # once, and restarts and the ledger of the copy have it from now on
    done(terminal, "space", "acknowledge")
    assert terminal.run("status").returncode == 0
    done(terminal, "down")
    done(terminal, "up", "--detach")
    assert terminal.run("status").returncode == 0
    with pytest.raises(AuthRevoked):
        asyncio.run(send_with(rex, "I am back"))


async def send_narrowed(bundle: Path) -> None:
    async with tidings.connect(bundle=bundle, receive=False) as agent:
        await agent.send("ops", "not mine any more", timeout=10)
