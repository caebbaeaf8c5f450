"""A server that is killed takes nothing with it: mail, session and task are the host's. One that thinks is not gone.

The host counts silence on a clock of the test, so that a quarter of an hour passes when the test says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from blocking_host import Session
from coding_agents import Pipe, coding, command, hosted, peer, piped
from tidings.host.claims import SILENCE, Claim, Claims
from tidings.host.daemon import Daemon
from tidings.mcp.ids import short
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually

CHILD = str(Path(__file__).with_name("mcp_child.py"))


class Office:
    """ada asks, bob has a server of his own, cal could do it too; all on one host with a clock that stands still."""

    def __init__(self, home: Path, daemon: Daemon, ada: Session, cal: Session) -> None:
        self.home, self.daemon, self.ada, self.cal = home, daemon, ada, cal
        self.now = 0.0

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.daemon.claims.sweep_once()

    @property
    def claim(self) -> Claim | None:
        (bob,) = [scope for scope in self.daemon.host.scopes() if scope.name == "bob"]
        return self.daemon.claims.held(bob)

    def silence(self) -> float:
        assert self.claim is not None, "bob holds it still"
        return self.daemon.claims.silent(self.claim)

    async def sessions(self) -> int:
        database = self.daemon.host.database
        return await database.read(lambda c: int(c.execute("SELECT count(*) FROM session").fetchone()[0]))

    async def ask(self) -> str:
        return (await asyncio.to_thread(self.ada.send, role="reviewer", text="look", wait=15)).id

    async def state(self, task: str) -> str:
        return str((await asyncio.to_thread(self.ada.task, task))["state"])

    async def cal_gets(self) -> str | None:
        found = await asyncio.to_thread(self.cal.claim, "reviewer")
        return str(found["id"]) if found else None

    async def cal_gets_after_the_silence(self) -> str | None:
        """Whatever the dead said last may be heard late, so that more than one silence is needed."""
        self.pass_time(SILENCE + 1)
        return await self.cal_gets()


@asynccontextmanager
async def office(space: RealSpace) -> AsyncIterator[Office]:
    await space.add("ada")
    for name in ("bob", "cal"):
        await space.add(name, roles=["reviewer"])
    claims = Claims(lambda: work.now)
    async with hosted(space.home.home, claims) as daemon:
        work = Office(space.home.home, daemon, await peer(space, "ada"), await peer(space, "cal"))
        assert await asyncio.to_thread(work.cal.inbox) == []
        yield work


async def claims_it(bob: Pipe, task: str) -> None:
    async def claimed() -> bool:
        found: Any = await bob.call(2, "claim_task", role="reviewer")
        return bool(found and found["id"] == short(task))

    await eventually(claimed, what="bob has the task", within=20)


async def test_mail_that_a_killed_server_showed_is_shown_by_the_next_one_unless_it_was_acknowledged(
    space: RealSpace,
) -> None:
    async with office(space) as work:
        for text in ("one", "two", "three"):
            await asyncio.to_thread(work.ada.send, agent="bob", text=text, wait=15)
        async with piped(command(work.home, "bob")) as bob:

            async def all_here() -> bool:
                return bool((await bob.call(2, "orient"))["unread_direct"] == 3)

            await eventually(all_here, what="bob's mail is here", within=20)
            first = await bob.call(3, "read_inbox", limit=1)
            assert (await bob.call(4, "acknowledge_inbox", receipt=first["receipt"])) == {"acknowledged": 1}
            lost = await bob.call(5, "read_inbox")
            assert [each["text"] for each in lost["messages"]] == ["two", "three"]
            await bob.kill()
        assert await work.sessions() == 3, "nobody ended the session of the killed server"
        async with coding(work.home, "bob") as (again,):
            shown = await again("read_inbox")
            assert [each["text"] for each in shown["messages"]] == ["two", "three"]
            assert "shown again" in await again.refused("acknowledge_inbox", receipt=lost["receipt"])
            assert await again("acknowledge_inbox", receipt=shown["receipt"]) == {"acknowledged": 2}


async def test_a_task_of_a_killed_server_goes_to_another_agent_once_its_claim_ran_out_and_not_before(
    space: RealSpace,
) -> None:
    async with office(space) as work:
        task = await work.ask()
        async with piped(command(work.home, "bob")) as bob:
            await claims_it(bob, task)
            await bob.kill()
        work.pass_time(SILENCE - 1)
        assert await work.cal_gets() is None
        assert await asyncio.to_thread(work.cal.held) is None, "what bob holds is not told to cal"
        assert await work.state(task) == "claimed"
        assert await eventually(work.cal_gets_after_the_silence, what="cal has the task") == task


async def test_the_next_server_of_an_agent_sees_the_task_of_a_killed_one_and_can_go_on_with_it(
    space: RealSpace,
) -> None:
    async with office(space) as work:
        task = await work.ask()
        async with piped(command(work.home, "bob")) as bob:
            await claims_it(bob, task)
            await bob.kill()
        work.pass_time(40)
        async with coding(work.home, "bob") as (again,):
            (note,) = (await again("orient"))["notes"]
            nothing = await again("claim_task", role="reviewer")
            assert nothing["id"] is None
            for said in (note, nothing["why"]):
                assert short(task) in said
                assert "take_over=true" in said
                assert "40 s" in said
            found = await again("claim_task", role="reviewer", take_over=True)
            assert (found["id"], found["request"]["text"]) == (short(task), "look")
            work.pass_time(SILENCE - 1)
            assert (await again("orient"))["held_tasks"] == [short(task)]
            await again("finish_task", id=task, outcome="done", text="looked")
        assert (await asyncio.to_thread(work.ada.task, task, 15))["text"] == "looked"


async def test_a_task_stays_with_a_model_that_thinks_for_long_and_goes_when_its_server_is_gone(
    space: RealSpace,
) -> None:
    async with office(space) as work:
        task = await work.ask()
        async with piped([CHILD, "0.2", "bob", str(work.home)]) as bob:
            await claims_it(bob, task)
            for _ in range(4):
                work.pass_time(SILENCE - 1)
                await eventually(lambda: work.silence() == 0, what="a sign of life", within=20)
                assert await work.cal_gets() is None
            await bob.kill()
        assert work.now > 3 * SILENCE
        assert await work.state(task) == "claimed"
        assert await eventually(work.cal_gets_after_the_silence, what="cal has the task") == task
