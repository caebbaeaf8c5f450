"""The part of the demonstration about being away: durable copies, which Spark makes while the story is told.

Three agents are in a channel and go. One stays a member, one leaves, one may read less afterwards. When delivery has
come as far as what was said, they come back, and each must get exactly what it was owed and may read, once; else
`UnhealthyError`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import tidings
from tidings.cli import output
from tidings.errors import UnhealthyError

if TYPE_CHECKING:
    from tidings.admin.home import SpaceHome

#: a message on its way, and a pipeline on its way from nothing to the last message
PATIENCE, START_PATIENCE = 15.0, 120.0
LOOK_EVERY = 0.2
FIRST = ("ada: we meet at noon", "bob: bring the map")
SECOND = ("ada: make that one o'clock", "bob: and bring another map")
#: said last where all three are: whoever has heard it has everything that was said before
LAST = "ada: that was all"
WELCOME = "ada: welcome back"
EXPECTED = {"dora": [*FIRST, *SECOND], "eve": [*FIRST], "finn": []}
CHANNELS = ("lobby", "plans")


async def follow_pipeline(home: SpaceHome) -> None:
    """A line whenever the pipeline comes further, whatever else is going on."""
    began, told = time.monotonic(), ""
    while True:
        pipeline = home.read_state().get("pipeline") or {}
        words = pipeline.get("step") or pipeline.get("phase") or "off"
        words += f" ({pipeline['why']})" if pipeline.get("why") else ""
        if words != told:
            told = words
            output.line(f"  [durable delivery: {words}, {time.monotonic() - began:.1f} s]")
            sys.stdout.flush()
        await asyncio.sleep(LOOK_EVERY)


async def go_away(home: SpaceHome) -> int:
    """They join, some words are said, one leaves, one is narrowed, more words are said. The sequence of the last."""
    from tidings.admin.administration import administer
    from tidings.admin.agents import AgentFile

    output.line("\nThree agents are in #plans, and away while others talk. Spark starts meanwhile")
    async with administer(home, "demo") as admin:
        for name in EXPECTED:
            await admin.add(AgentFile(name, read=CHANNELS))
        for name in ("dora", "eve"):
            async with connect_to(home, name, channels=CHANNELS):
                output.line(f"        {name} joins #plans and is gone")
        async with connect_to(home, "finn", channels=CHANNELS) as finn:
            await _say(home, FIRST[0])
            await _hear(finn, FIRST[0])
        output.line("        finn joined too, has heard this one, and is gone")
        await _say(home, FIRST[1])
        async with connect_to(home, "eve", receive=False) as eve:
            await eve.leave("plans")
        output.line("        eve leaves #plans: what was said before is owed, what comes is not")
        await admin.set_access("finn", AgentFile("finn", read=("lobby",)))
        output.line("        finn may read #lobby only from now on")
    for words in SECOND:
        await _say(home, words)
    return await _say(home, LAST, "lobby")


async def come_back(home: SpaceHome, last: int) -> None:
    """Each comes back once durable delivery has come as far as the last that was said."""
    output.line("\nThey come back, once durable delivery has come as far")
    await _delivered(home, last)
    heard: dict[str, list[str]] = {}
    async with AsyncExitStack() as stack:
        here = {}
        for name in EXPECTED:
            channels = CHANNELS if name == "dora" else CHANNELS[:1]
            here[name] = await stack.enter_async_context(connect_to(home, name, channels=channels))
            heard[name] = await _hear(here[name], LAST)
        await _say(home, WELCOME, "lobby")
        for name, agent in here.items():
            heard[name] += await _hear(agent, WELCOME)
    for name, expected in EXPECTED.items():
        if heard[name] != [*expected, LAST, WELCOME]:
            raise UnhealthyError(f"{name} should have got {expected}, and heard {heard[name]}")
    output.line(f"  dora, who was away, gets all {len(EXPECTED['dora'])} once and in order")
    output.line(f"  eve, who left, gets the {len(EXPECTED['eve'])} she was owed and no other")
    output.line("  finn, whose access was narrowed, gets nothing more of #plans, and #lobby as before")


async def _delivered(home: SpaceHome, seq: int) -> None:
    """Wait until agents are told that durable delivery has come as far as a sequence."""
    deadline = time.monotonic() + START_PATIENCE
    with output.working("durable delivery"):
        async with connect_to(home, "ada", receive=False) as ada:
            while (floor := (await ada.channel_info("lobby")).backstop.floor) < seq:
                if time.monotonic() > deadline:
                    pipeline = home.read_state().get("pipeline")
                    raise UnhealthyError(
                        f"durable delivery came to {floor} and not to {seq} in {START_PATIENCE:.0f} s: {pipeline}"
                    )
                await asyncio.sleep(LOOK_EVERY)


async def _say(home: SpaceHome, words: str, channel: str = "plans") -> int:
    name, _, text = words.partition(": ")
    async with connect_to(home, name, receive=False) as speaker:
        seq: int = (await speaker.send(channel, text)).seq
    output.line(f"  {seq:>4}  {name} says in #{channel}: {text}")
    return seq


async def _hear(agent: tidings.DirectAgent, last: str) -> list[str]:
    """What an agent hears, up to something that was said last; each is settled."""
    heard: list[str] = []
    while last not in heard:
        try:
            message = await agent.next_message(PATIENCE)
        except TimeoutError as error:
            raise UnhealthyError(f"{agent.name} should have heard {last!r}, and heard {heard}") from error
        heard.append(f"{message.sender.name}: {message.text}")
        await message.ack()
    return heard


def connect_to(home: SpaceHome, name: str, **how: Any) -> Any:
    """An agent of the space whose files are in `home`."""
    return tidings.connect(home.name, name=name, home=home.home, **how)
