"""A message of another space on every surface: terminal, host, its HTTP interface, and coding agents."""

import asyncio
import json
import subprocess

from coding_agents import CodingAgent, coding_here, hosted, peer
from hosting import adopt, host_in, inbox_of
from linking import OtherSpace, admit
from terminal import Terminal
from tidings.client.message_json import Json, to_json
from tidings.host.inbox import inbox_message
from tidings.mcp.ids import short
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


async def run(terminal: Terminal, *words: str) -> "subprocess.CompletedProcess[str]":
    return await asyncio.to_thread(terminal.run, *words)


async def _unread(agent: CodingAgent) -> Json | None:
    found = await agent("read_inbox")
    return found if found["messages"] else None


async def test_a_terminal_says_who_said_it_in_which_space(terminal: Terminal, space: RealSpace) -> None:
    await space.add("me", read=[">"])
    west = OtherSpace()
    await west.link(space)
    assert (await run(terminal, "join", "general")).returncode == 0
    watching = terminal.start("tail", "general", "--count", "1", "--json", TIDINGS_AS="me")
    assert watching.stderr is not None
    await asyncio.to_thread(watching.stderr.readline)
    said = west.say("hello from the west")
    seq = await west.admit(space, said)
    await admit(space, west.say("forged", "secrets"))
    out, _ = await asyncio.to_thread(watching.communicate, timeout=30)
    (heard,) = map(json.loads, out.splitlines())
    expected = {"id": west.ada.id, "name": "ada@west"}
    assert (heard["seq"], heard["from"], heard["origin"]) == (seq, expected, "west")
    assert "#general ada@west: hello from the west" in (await run(terminal, "history", "general")).stdout
    sent = await run(terminal, "send", "general", "hello here", "--reply-to", heard["id"])
    assert sent.returncode == 0, sent.stderr
    lines = [json.loads(line) for line in (await run(terminal, "history", "general", "--json")).stdout.splitlines()]
    assert [(each["text"], each["origin"], each["reply_to"]) for each in lines] == [
        ("hello from the west", "west", None),
        ("hello here", None, heard["id"]),
    ]
    (listed,) = json.loads((await run(terminal, "channels", "list", "--json")).stdout)
    info = json.loads((await run(terminal, "channels", "info", "general", "--json")).stdout)
    assert listed["last"]["seq"] == lines[-1]["seq"]
    assert info["messages"] == 3, "what is void is in the log too"
    direct = await run(terminal, "dm", "ada@west", "hello")
    assert direct.returncode == 2
    assert "no linked space tells who is there" in direct.stderr


async def test_the_host_keeps_where_a_message_was_said_and_a_terminal_shows_it(
    terminal: Terminal, space: RealSpace
) -> None:
    await space.add("me")
    west = OtherSpace()
    await west.link(space)
    assert (await run(terminal, "join", "general")).returncode == 0
    async with host_in(space.home.home) as host:
        scope = await adopt(host, space, "me", receive=True)
        await west.admit(space, west.say("kept"))
        (row,) = await eventually(lambda: inbox_of(host, scope))
    assert (row.sender_name, row.origin, row.origin_id, row.sender) == ("ada@west", "west", west.id, west.ada.id)
    shown = to_json(inbox_message(row, None, {}))
    assert (shown["origin"], shown["origin_id"]) == ("west", west.id)
    assert shown["from"] == {"id": west.ada.id, "name": "ada@west"}
    assert "#general ada@west: kept" in (await run(terminal, "inbox")).stdout


async def test_a_coding_agent_and_a_program_of_the_host_see_where_it_was_said(
    terminal: Terminal, space: RealSpace
) -> None:
    await space.add("bob")
    west = OtherSpace()
    await west.link(space)
    async with hosted(space.home.home), coding_here(space, "bob") as (bob,):
        await bob("join", channel="general")
        said = west.say("hello agents")
        await west.admit(space, said)
        window = await eventually(lambda: _unread(bob), within=20)
        assert window is not None
        (message,) = window["messages"]
        assert (message["sender"]["name"], message["origin"]) == ("ada@west", "west")
        assert message["sender"]["id"] == short(west.ada.id)
        assert message["sender"].get("claims") is None
        session = await peer(space, "bob")
        listed = await asyncio.to_thread(session.inbox)
        assert [(each["from"]["name"], each["origin"]) for each in listed] == [("ada@west", "west")]
        shown = await run(terminal, "inbox", "--as", "bob", "--json")
        (line,) = map(json.loads, shown.stdout.splitlines())
        assert (line["from"]["name"], line["origin"]) == ("ada@west", "west")
        assert "#general ada@west: hello agents" in (await run(terminal, "inbox", "--as", "bob")).stdout
        answered = await bob("send", channel="general", text="hello back", reply_to=message["id"], wait=10)
        assert answered["stage"] == "confirmed"
        page = await bob.resource("tidings://channel/general")
        assert [(each["text"], each.get("origin")) for each in page["messages"]] == [
            ("hello agents", "west"),
            ("hello back", None),
        ]
        assert page["messages"][1]["reply_to"] == message["id"]
        text = (await bob.raw("history", channel="general")).content
        assert "ada@west" in str(text)
        assert "said in the space west" in str(text)
