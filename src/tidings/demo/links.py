"""The story that `tidings demo links` tells: two spaces are linked, cut apart while both go on talking, and healed.

Each is reached by the other through a proxy of this process, which is what is cut. A scene that does not end as
promised raises `UnhealthyError`.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from tidings.cli import link_words, output
from tidings.contract.core import Request
from tidings.contract.link_worker import ListLinksRequest, VerifyLinkRequest
from tidings.demo.away import connect_to
from tidings.demo.story import heading
from tidings.errors import TidingsError, UnhealthyError

if TYPE_CHECKING:
    import tidings
    from tidings.admin.home import SpaceHome
    from tidings_testing.proxy import FaultProxy

A = TypeVar("A")
#: seconds for a message on its way; and until a link that was cut has caught up, which asks again after a growing pause
PATIENCE, HEAL_PATIENCE = 20.0, 60.0
LOOK_EVERY = 0.1
CHANNEL = "general"
#: how long an offer can be accepted, in seconds
OFFERED_FOR = 600
MORNING = {"west": "good morning from the west", "east": "and a good day from the east"}
APART = {
    "west": ("can you hear me?", "we go on without you", "it is noon here"),
    "east": ("the west is silent", "we decided: the blue one", "it is night here"),
}


@dataclass
class Side:
    """One of the two, and the agent who speaks there."""

    home: SpaceHome
    speaker: str
    proxy: FaultProxy
    agent: tidings.DirectAgent | None = None
    link: str = ""
    #: what its agent said, in order
    said: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.home.name

    async def say(self, text: str) -> None:
        assert self.agent is not None
        await self.agent.send(CHANNEL, text)
        self.said.append(f"{self.speaker}@{self.name}: {text}")
        output.line(f"  {self.speaker} says in {self.name}: {text}")

    async def hears(self, text: str) -> None:
        """Its agent is told who said it, and in which space."""
        assert self.agent is not None
        try:
            heard = await self.agent.next_message(PATIENCE)
        except TimeoutError as error:
            raise UnhealthyError(
                f"{self.speaker} in {self.name} should have heard {text!r}, and heard nothing"
            ) from error
        if heard.text != text or not heard.origin:
            raise UnhealthyError(f"{self.speaker} in {self.name} should have heard {text!r}, and heard {heard}")
        await heard.ack()
        output.line(f"  {self.speaker} in {self.name} hears {heard.sender.name}: {heard.text}")

    async def held(self) -> list[str]:
        """The channel as this space holds it, oldest first; who spoke here is named as elsewhere."""
        assert self.agent is not None
        past = await self.agent.history(CHANNEL, 100)
        names = [each.sender.name if each.origin else f"{each.sender.name}@{self.name}" for each in past]
        return [f"{name}: {each.text}" for name, each in zip(names, past, strict=True)][::-1]


async def tell(west: SpaceHome, east: SpaceHome) -> None:
    """The whole story, on two spaces that run."""
    from tidings.admin.administration import administer
    from tidings.admin.agents import AgentFile
    from tidings_testing.proxy import fault_proxy

    async with AsyncExitStack() as stack:
        sides = []
        for home, speaker in ((west, "ada"), (east, "bob")):
            proxy = await stack.enter_async_context(fault_proxy(home.read_info().port))
            sides.append(Side(home, speaker, proxy))
            async with administer(home, "demo") as admin:
                await admin.add(AgentFile(speaker, read=(CHANNEL,), post=(CHANNEL,)))
            output.line(f"  {speaker} is an agent of {home.name}")
        await _link(*sides)
        for side in sides:
            side.agent = await stack.enter_async_context(connect_to(side.home, side.speaker, channels=[CHANNEL]))
        await _talk(*sides)
        await _cut_apart(*sides)
        await _heal(*sides)
        await _compare(*sides)


async def _link(west: Side, east: Side) -> None:
    """As `tidings link invite` and `tidings link accept` do it."""
    from tidings.admin.administration import administer
    from tidings.admin.inviting import reach_of
    from tidings.admin.link_accepting import LinkWishes, accept_link
    from tidings.admin.link_inviting import LinkInviter, LinkTerms
    from tidings.wire.invitations import parse_invitation

    heading(f"Their operators link them: one makes a line, the other accepts it. Both share #{CHANNEL}")
    terms = LinkTerms(shares=(CHANNEL,), takes={CHANNEL: CHANNEL}, called="east")
    async with administer(west.home, "demo") as admin:
        _, line = LinkInviter(admin).invite(terms, OFFERED_FOR, reach_of(admin, west.proxy.url))
    output.line(f"  west offers it: {str(line).partition('#')[0]}#…")
    wishes = LinkWishes(called="west", urls=(east.proxy.url,))
    accepted = await accept_link(east.home, parse_invitation(str(line)), wishes, lambda _proposal: None)
    west.link = east.link = accepted.record.link
    output.line(f"  east accepts: link {east.link}, in which it is called {accepted.known_as}")
    for here, there in ((west, east), (east, west)):
        await _until_carried(here, there)


async def _until_carried(here: Side, there: Side) -> None:
    """The worker that `tidings up` starts for a link that takes something in has come to the end of the other log."""
    deadline = time.monotonic() + PATIENCE
    shown = "nothing"
    while shown != "live":
        if time.monotonic() > deadline:
            raise UnhealthyError(f"what {there.name} shares should be carried to {here.name}, and is {shown}")
        await asyncio.sleep(LOOK_EVERY)
        try:
            shown = link_words.state((await _call(here, ListLinksRequest(link=here.link))).links[0])
        except TidingsError as error:
            shown = str(error)
    output.line(f"  a worker of {here.name} takes over what {there.name} shares: {shown}")


async def _call(side: Side, request: Request[A]) -> A:
    from tidings.rpc.local_socket import call

    return await call(side.home.link_socket, request, timeout=PATIENCE)


async def _talk(west: Side, east: Side) -> None:
    heading("An agent of each speaks, and is heard in the other space")
    for speaker, listener in ((west, east), (east, west)):
        await speaker.say(MORNING[speaker.name])
        await listener.hears(MORNING[speaker.name])


async def _cut_apart(west: Side, east: Side) -> None:
    heading("The way between them is cut, and both go on talking")
    for side in (west, east):
        side.proxy.refuse = True
        side.proxy.cut()
    for said_west, said_east in zip(APART["west"], APART["east"], strict=True):
        await west.say(said_west)
        await east.say(said_east)
    held = [set(await side.held()) for side in (west, east)]
    common = held[0] & held[1]
    if common != {west.said[0], east.said[0]}:
        raise UnhealthyError(f"they are cut apart, and both hold {sorted(common)}")
    output.line(f"  west holds {len(held[0])} messages and east {len(held[1])}; {len(common)} are in both")


async def _heal(west: Side, east: Side) -> None:
    heading("The way is there again")
    for side in (west, east):
        side.proxy.refuse = False
    healed = time.monotonic()
    everything = {*west.said, *east.said}
    with output.working("catching up"):
        while (held := [await west.held(), await east.held()]) and any(set(each) != everything for each in held):
            if time.monotonic() > healed + HEAL_PATIENCE:
                raise UnhealthyError(f"{sorted(everything)} was said; west holds {held[0]}, east {held[1]}")
            await asyncio.sleep(LOOK_EVERY)
    output.line(f"  after {time.monotonic() - healed:.1f} s both hold all {len(everything)}:")
    for name, messages in zip(("west", "east"), held, strict=True):
        output.line(f"  {name} holds, in its order:")
        for each in messages:
            output.line(f"    {each}")
        for side in (west, east):
            if [each for each in messages if each in side.said] != side.said:
                raise UnhealthyError(f"{side.speaker} said {side.said}, and {name} holds {messages}")
    output.line("  each once, and what one of them said is in the same order in both")


async def _compare(west: Side, east: Side) -> None:
    heading("Both compare by digests what the other shares with what came (`tidings link verify`)")
    for here, there in ((west, east), (east, west)):
        answer = await _call(here, VerifyLinkRequest(here.link))
        if not answer.equal or answer.counts != {"admitted": len(there.said)}:
            raise UnhealthyError(f"{here.name} should have all that {there.name} shares: {answer}")
        for words in link_words.verified(there.name, answer):
            output.line(f"  {here.name}: {words}")
