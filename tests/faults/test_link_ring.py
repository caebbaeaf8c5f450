"""Three real spaces, each linked with both others, which pass on what they hear: one is gone for a while, everybody
talks, and in the end each word is everywhere once."""

import itertools
from collections.abc import Collection
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest

from carried_links import three_spaces, worker
from failing_links import CountedSpaces, Talk, agrees, has_failed, holds, is_settled, look_soon, texts_in
from tidings.links.worker import LinkWorker
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually

PAIRS = ("ab", "bc", "ac")
#: seconds for an answer of a space that is down
PATIENCE = 1.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    look_soon(monkeypatch)


def link_of(one: str, other: str) -> str:
    return f"linkbetween{min(one, other)}{max(one, other)}"


class Ring:
    def __init__(self, spaces: dict[str, RealSpace], workers: dict[str, LinkWorker]) -> None:
        self.spaces, self.workers = spaces, workers
        self.talk = Talk()

    async def say(self, what: str, count: int = 4, *, without: str = "") -> None:
        for number in range(count):
            for name, space in self.spaces.items():
                if name != without:
                    await self.talk.say(space, "ada", f"{name} {what} {number}")

    async def stop(self, name: str) -> None:
        await self.spaces[name].stop_steward()
        self.spaces[name].broker.stop()

    async def start(self, name: str) -> None:
        self.spaces[name].broker.start()
        await self.spaces[name].start_steward()

    async def missed(self, name: str, by: Collection[str]) -> None:
        for other in by:
            await eventually(partial(has_failed, self.workers[other], link_of(name, other)), within=20)

    async def converged(self) -> None:
        """Each word is in every space once, in its sender's order, and nothing goes round any more."""
        for space in self.spaces.values():
            await holds(space, self.talk)
        for here, there in itertools.permutations(self.spaces, 2):
            await agrees(self.workers[here], self.spaces[here], self.spaces[there], link_of(here, there))
        before = [len(await texts_in(space)) for space in self.spaces.values()]
        for name, running in self.workers.items():
            for carried in running._carried.values():
                carried.ask()
            for other in set(self.spaces) - {name}:
                await eventually(partial(is_settled, running, link_of(name, other)), within=20)
        assert [len(await texts_in(space)) for space in self.spaces.values()] == before


@pytest.mark.parametrize(
    "times", [1, pytest.param(5, marks=[pytest.mark.slow, pytest.mark.timeout(300)])], ids=["once", "time and again"]
)
async def test_in_a_ring_of_three_of_which_one_is_gone_for_a_while_each_word_is_everywhere_once(
    tmp_path: Path, times: int
) -> None:
    async with three_spaces(tmp_path, *PAIRS, passing=True) as spaces, AsyncExitStack() as stack:
        running = {
            name: await stack.enter_async_context(worker(space, spaces=CountedSpaces(space.home, PATIENCE)))
            for name, space in spaces.items()
        }
        ring = Ring(spaces, running)
        await ring.say("before")
        await ring.converged()
        for turn in range(times):
            gone = "cab"[turn % 3]
            await ring.say(f"on its way {turn}", 2)
            await ring.stop(gone)
            await ring.say(f"meanwhile {turn}", without=gone)
            await ring.missed(gone, set(spaces) - {gone})
            await ring.say(f"later {turn}", without=gone)
            await ring.start(gone)
            await ring.say(f"after {turn}")
            await ring.converged()
