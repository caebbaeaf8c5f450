"""The part of the demonstration about being away: durable copies, which Spark makes while the story is told.

Three agents are in a channel and go. One stays a member, one leaves, one may read less afterwards. When delivery has
come as far as what was said, they come back, and each must get exactly what it was owed and may read, once; else
`UnhealthyError`. `Phases` tells where the pipeline is while the rest of the story goes on.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidings.cli import output
from tidings.errors import UnhealthyError

if TYPE_CHECKING:
    from tidings.admin.home import SpaceHome
    from tidings.delivery.status import DeliveryStatus

#: a message on its way, and a pipeline on its way from nothing to the last message
PATIENCE, START_PATIENCE = 15.0, 120.0
LOOK_EVERY = 0.2
FIRST = ("ada: we meet at noon", "bob: bring the map")
SECOND = ("ada: make that one o'clock", "bob: and bring another map")
#: said last where all three are: whoever has heard it has everything that was said before
LAST = "ada: that was all"
WELCOME, AGAIN = "ada: welcome back", "ada: and once more"
EXPECTED = {"dora": [*FIRST, *SECOND], "eve": [*FIRST], "finn": []}


class Phases:
    """A line whenever the pipeline comes further, whatever else is going on."""

    def __init__(self, home: SpaceHome) -> None:
        self.home = home
        self._began = time.monotonic()
        self._told = ""

    @property
    def facts(self) -> dict[str, Any]:
        return self.home.read_state().get("pipeline") or {}

    async def follow(self) -> None:
        while True:
            self.tell()
            await asyncio.sleep(LOOK_EVERY)

    def tell(self) -> None:
        facts = self.facts
        words = facts.get("step") or facts.get("phase") or "off"
        words += f" ({facts['why']})" if facts.get("why") else ""
        if words != self._told:
            self._told = words
            output.line(f"  [durable delivery: {words}, {time.monotonic() - self._began:.1f} s]")
            sys.stdout.flush()


@dataclass
class Away:
    """The three and what was said while they were away."""

    home: SpaceHome
    phases: Phases
    #: sequence of the last thing said
    last: int = 0

    async def go(self) -> None:
        """They join, some words are said, one leaves, one is narrowed, more words are said."""
        from tidings.admin.administration import administer
        from tidings.admin.agents import AgentFile
        from tidings.admin.session import open_session

        output.line("\nThree agents are in #plans, and away while others talk. Spark starts meanwhile")
        async with administer(self.home, "demo") as admin:
            for name in EXPECTED:
                await admin.add(AgentFile(name, read=("plans", "lobby")))
        await self._join("dora", "eve")
        await self._finn_hears_the_first()
        await self._say(FIRST[1])
        async with open_session(self.home, "eve") as eve:
            left = await eve.control.call("member", "leave", pattern="plans")
        output.line(f"  {left['seq']:>4}  eve leaves #plans: what was said before is owed, what comes is not")
        async with administer(self.home, "demo") as admin:
            narrowed = await admin.set_access("finn", AgentFile("finn", read=("lobby",)))
        output.line(f"  {narrowed.row.seq:>4}  finn may read #lobby only from now on")
        for words in SECOND:
            await self._say(words)
        await self._say(LAST, "lobby")

    async def _join(self, *names: str) -> None:
        from tidings.admin.session import open_session

        for name in names:
            async with open_session(self.home, name) as session:
                for channel in ("lobby", "plans"):
                    joined = await session.control.call("member", "join", pattern=channel)
            output.line(f"  {joined['seq']:>4}  {name} joins #plans and is gone")

    async def _finn_hears_the_first(self) -> None:
        import tidings

        channels = ["lobby", "plans"]
        async with tidings.connect(self.home.name, name="finn", channels=channels, home=self.home.home) as finn:
            await self._say(FIRST[0])
            heard = await _hear(finn, FIRST[0])
            if heard != [FIRST[0]]:
                raise UnhealthyError(f"finn heard {heard} while he was there")
        output.line("        finn joined too, has heard this one, and is gone")

    async def _say(self, words: str, channel: str = "plans") -> None:
        import tidings

        name, _, text = words.partition(": ")
        async with tidings.connect(self.home.name, name=name, receive=False, home=self.home.home) as speaker:
            self.last = (await speaker.send(channel, text)).seq
        output.line(f"  {self.last:>4}  {name} says in #{channel}: {text}")

    async def come_back(self) -> None:
        output.line("\nThey come back, once durable delivery has come as far")
        await self._delivered(self.last)
        await self._agents_know(self.last)
        heard = await self._all_come_back()
        for name, expected in EXPECTED.items():
            if heard[name] != [*expected, LAST, WELCOME]:
                raise UnhealthyError(f"{name} should have got {expected}, and heard {heard[name]}")
        output.line(f"  dora, who was away, gets all {len(EXPECTED['dora'])} once and in order")
        output.line(f"  eve, who left, gets the {len(EXPECTED['eve'])} she was owed and no other")
        output.line("  finn, whose access was narrowed, gets nothing more of #plans, and #lobby as before")
        await self._nothing_comes_again()
        await self._numbers()

    async def _delivered(self, seq: int) -> None:
        """Wait until durable delivery has come as far as a sequence."""
        from tidings.delivery.status import look

        deadline = time.monotonic() + START_PATIENCE
        with output.working("durable delivery"):
            while (delivery := await asyncio.to_thread(look, self.home)).floor < seq or not delivery.running:
                if time.monotonic() > deadline:
                    raise UnhealthyError(
                        f"durable delivery came to {delivery.floor} and not to {seq} in {START_PATIENCE:.0f} s: "
                        f"{self.phases.facts}"
                    )
                await asyncio.sleep(LOOK_EVERY)
        self.phases.tell()

    async def _agents_know(self, seq: int) -> None:
        """The steward looks once a second. Whoever comes before it knows reads the log instead of waiting."""
        import tidings

        async with (
            asyncio.timeout(PATIENCE),
            tidings.connect(self.home.name, name="ada", receive=False, home=self.home.home) as ada,
        ):
            while (await ada.channel_info("lobby"))["backstop"]["floor"] < seq:
                await asyncio.sleep(LOOK_EVERY)

    async def _all_come_back(self) -> dict[str, list[str]]:
        import tidings

        heard: dict[str, list[str]] = {}
        async with AsyncExitStack() as stack:
            here = {}
            for name in EXPECTED:
                channels = ["lobby", "plans"] if name == "dora" else ["lobby"]
                state = self.home.run / f"{name}.state"
                here[name] = await stack.enter_async_context(
                    tidings.connect(self.home.name, name=name, channels=channels, home=self.home.home, state=state)
                )
                heard[name] = await _hear(here[name], LAST)
            await self._say(WELCOME, "lobby")
            for name, agent in here.items():
                heard[name] += await _hear(agent, WELCOME)
        return heard

    async def _nothing_comes_again(self) -> None:
        """What was settled comes no more: in a new session the first thing dora hears is new."""
        import tidings

        where: dict[str, Any] = {"home": self.home.home, "state": self.home.run / "dora.state"}
        async with tidings.connect(self.home.name, name="dora", channels=["lobby", "plans"], **where) as dora:
            await self._say(AGAIN, "lobby")
            heard = await _hear(dora, AGAIN)
        if heard != [AGAIN]:
            raise UnhealthyError(f"dora had settled what she heard, and heard {heard} when she came again")
        output.line("  dora goes and comes again: nothing comes twice")

    async def _numbers(self) -> None:
        """What the pipeline says of its work, once it speaks of all that was said. Others were owed something too."""
        await self._delivered(self.last)
        delivery = await self._reported(time.time())
        figures = delivery.figures
        owed = sum(map(len, EXPECTED.values())) + len(EXPECTED) * len((LAST, WELCOME, AGAIN))
        if figures["deliveries"] < owed:
            raise UnhealthyError(f"{owed} copies and more were owed, and the pipeline says {figures}")
        output.line(
            f"  the pipeline: {figures['messages']} messages, {figures['deliveries']} deliveries in "
            f"{figures['frames']} frames, the last batch in {figures['last_batch_ms']:.0f} ms; "
            f"{delivery.behind} records behind, {delivery.debts or 0} debts, {figures['poison']} quarantined"
        )

    async def _reported(self, since: float) -> DeliveryStatus:
        """It reports between batches, every second or so."""
        from tidings.delivery.status import look

        deadline = time.monotonic() + PATIENCE
        while ((delivery := await asyncio.to_thread(look, self.home)).figures_at or 0) < since:
            if time.monotonic() > deadline:
                raise UnhealthyError(f"the pipeline has not reported for {PATIENCE:.0f} s: {delivery.figures}")
            await asyncio.sleep(LOOK_EVERY)
        return delivery


async def _hear(agent: Any, last: str) -> list[str]:
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
