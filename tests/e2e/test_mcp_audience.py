"""Who sees what through MCP: servers of several agents on one host, asked for every message in every way there is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from mcp.shared.exceptions import MCPError

from coding_agents import CodingAgent, coding_here, hosted, words
from tidings.mcp.ids import short
from tidings.wire.message import new_id
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually

#: surfaces of a message of the inbox
MAIL = ("read_inbox", "inbox resource", "thread resource", "read_message")
LOG = ("history", "channel resource")
CHANNELS = ("general", "secrets")


@dataclass
class Told:
    """A message, which agents may read it where, and which of them may trace it."""

    id: str
    text: str
    where: Mapping[str, set[str]]
    traced_by: set[str]


async def test_every_message_is_seen_by_exactly_its_audience_through_every_tool_and_resource(space: RealSpace) -> None:
    await space.add("ada", read=CHANNELS, post=CHANNELS)
    await space.add("bob", roles=["reviewer"])
    await space.add("cal", read=CHANNELS, post=CHANNELS)
    await space.add("dee", read=[], post=[])
    names = ("ada", "bob", "bob", "cal", "dee")
    async with hosted(space.home.home), coding_here(space, *names) as agents:
        ada, bob, _, cal, _ = agents
        told = await said(ada, bob, cal)
        await eventually(lambda: arrived(told, names, agents), what="every inbox has what it should", within=20)
        for name, agent in zip(names, agents, strict=True):
            await sees_its_own(name, agent, told)


async def sees_its_own(name: str, agent: CodingAgent, told: list[Told]) -> None:
    at_once = await listing(agent)
    for each in told:
        asked = await asking_for(agent, each)
        found = at_once | asked
        seen = {where for where, answer in found.items() if each.text in answer}
        assert seen == {where for where, who in each.where.items() if name in who}, (name, each.text)
        others = [other.text for other in told if other.id != each.id]
        assert [(where, text) for where in asked for text in others if text in asked[where]] == [], (name, each.text)
        assert (short(each.id) in found["trace"]) == (name in each.traced_by), (name, each.text)
        assert (short(each.id) in found["outbox_status"]) == (name == "ada"), (name, each.text)


async def said(ada: CodingAgent, bob: CodingAgent, cal: CodingAgent) -> list[Told]:
    """One of each kind, all of ada's."""
    for each, channel in ((bob, "general"), (cal, "general"), (cal, "secrets")):
        await each("join", channel=channel)
    told = []
    for to in ("ada", "bob", "cal"):
        text = f"for {to} alone"
        sent = new_id()
        await ada("direct_message", to=to, text=text, wait=15, id=sent)
        told.append(Told(sent, text, {where: {to} for where in MAIL}, {"ada", to}))
    for channel, members, readers in (
        ("general", {"bob", "cal"}, {"ada", "bob", "cal"}),
        ("secrets", {"cal"}, {"ada", "cal"}),
    ):
        text = f"for those in {channel}"
        sent = new_id()
        await ada("send", channel=channel, text=text, wait=15, id=sent)
        where = dict.fromkeys(MAIL, members) | dict.fromkeys(LOG, readers)
        told.append(Told(sent, text, where, {"ada"}))
    asked = new_id()
    await ada("ask_role", role="reviewer", text="for a reviewer", wait=15, id=asked)
    assert "denied" in await cal.refused("claim_task", role="reviewer")
    claimed = await bob("claim_task", role="reviewer", wait=15)
    assert claimed["request"]["text"] == "for a reviewer"
    await bob("finish_task", id=claimed["id"], outcome="done", text="for the asker of it")
    told.append(Told(asked, "for a reviewer", {}, {"ada"}))
    told.append(Told(asked, "for the asker of it", {"task_result": {"ada"}}, {"ada"}))
    return told


async def arrived(told: list[Told], names: tuple[str, ...], agents: list[CodingAgent]) -> bool:
    for name, agent in zip(names, agents, strict=True):
        unread = await agent("orient")
        wanted = sum(name in each.where.get("read_inbox", ()) for each in told)
        if unread["unread_direct"] + unread["unread_channel"] < wanted:
            return False
    return True


async def listing(agent: CodingAgent) -> dict[str, str]:
    """What an agent is shown without naming a message."""
    return {
        "read_inbox": await called(agent, "read_inbox"),
        "inbox resource": await read(agent, "tidings://inbox"),
        "history": "".join([await called(agent, "history", channel=each) for each in CHANNELS]),
        "channel resource": "".join([await read(agent, f"tidings://channel/{each}") for each in CHANNELS]),
    }


async def asking_for(agent: CodingAgent, told: Told) -> dict[str, str]:
    """What an agent is answered that asks for one message wherever it could be, refusals included."""
    return {
        "thread resource": await read(agent, f"tidings://thread/{told.id}"),
        "read_message": await called(agent, "read_message", id=told.id)
        + await called(agent, "read_message", id=short(told.id)),
        "trace": await called(agent, "trace", id=told.id),
        "outbox_status": await called(agent, "outbox_status", id=told.id),
        "task_result": await called(agent, "task_result", id=told.id),
    }


async def called(agent: CodingAgent, tool: str, **arguments: str) -> str:
    """The answer in both of its forms; of a refusal, its words without the id that was asked for."""
    answer = await agent.raw(tool, **arguments)
    if answer.is_error:
        return words(answer).replace(arguments.get("id", "-"), "…")
    return words(answer) + json.dumps(answer.structured_content)


async def read(agent: CodingAgent, uri: str) -> str:
    try:
        return json.dumps(await agent.resource(uri))
    except MCPError as error:
        return str(error)
