"""A part that does not answer is never called healthy, whatever its process or its lease look like."""

import signal
from dataclasses import replace

import pytest

from tidings.server.disk import DiskReserve
from tidings.supervisor.status import UNHEALTHY, UNREACHABLE, collect
from tidings.util.private_files import locked
from tidings_testing.processes import pause, steward_child
from tidings_testing.real_space import RealSpace


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


async def test_a_broker_that_does_not_answer_under_a_supervisor_is_not_advised_to_be_started_twice(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await space.add("ada")
    await space.stop_steward()
    with locked(space.home.up_lock, "tidings up, space main"):
        space.home.write_state({"phase": "ready", "broker_pid": space.broker.pid})
        await pause(space.broker.pid)
        facts = await collect(space.home, "ada")
        (problem,) = facts["problems"]
        assert (facts["exit_code"], "`tidings down --space main`" in problem) == (UNREACHABLE, True)
        assert "does not answer and did not end" in problem
        space.broker.kill()
        space.home.write_state({"phase": "broker restarting"})
        first, second = (await collect(space.home, "ada"))["problems"]
        assert "the supervisor starts it" in first
        assert "tidings up" not in first + second
    room = DiskReserve(space.home.store).look()
    monkeypatch.setattr(DiskReserve, "look", lambda _self: replace(room, free=0, reserved=False))
    disk, broker = (await collect(space.home, "ada"))["problems"]
    assert disk.startswith(f"the disk of {space.home.store} is full: 0.0 MB are free, its reserve was given up")
    assert "`tidings up --space main`" in broker
    monkeypatch.undo()
    space.broker.start()
