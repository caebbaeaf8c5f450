"""A part that does not answer is never called healthy, whatever its process or its lease look like."""

import signal

from tidings.steward.status import UNHEALTHY, UNREACHABLE, collect
from tidings.testing.processes import pause, steward_child
from tidings.testing.real_space import RealSpace


async def test_a_steward_that_is_there_and_does_not_answer_is_unhealthy(space: RealSpace) -> None:
    await space.add("ada")
    await space.stop_steward()
    async with steward_child(space.home, ttl=30) as steward:
        assert (await collect(space.home, "ada"))["problems"] == []
        await pause(steward.process.pid)
        facts = await collect(space.home, "ada")
        assert (facts["exit_code"], facts["healthy"]) == (UNHEALTHY, False)
        assert "the steward does not answer" in facts["problems"][0]
        steward.signal(signal.SIGCONT)
    space.broker.kill()
    assert (await collect(space.home, "ada"))["exit_code"] == UNREACHABLE
    space.broker.start()
