"""Nodes of a cluster are stopped, killed and paused under load: what was acknowledged is in the log once, and every
member reads all of it once."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from cluster_load import BETWEEN, Load, leader_of, populate, rolling_restart, up_again, whole_again
from tidings.errors import TidingsError
from tidings.nats.errors import NatsError
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
async def space(tmp_path: Path) -> AsyncIterator[RealSpace]:
    async with real_space(tmp_path / "home", nodes=3) as running:
        await populate(running)
        yield running


# --- what happens ---


async def restarted_one_by_one(load: Load) -> None:
    await rolling_restart(load.space)


async def leader_killed(load: Load) -> None:
    node = await leader_of(load.space, "LOG_main")
    node.kill()
    await asyncio.sleep(0.5)
    await up_again(node)
    await whole_again(load.space)


async def leader_paused_until_replaced(load: Load) -> None:
    """It comes back believing that it leads, and answers whoever asks it."""
    node = await leader_of(load.space, "LOG_main")
    os.kill(node.pid, signal.SIGSTOP)
    try:
        others = [each for each in load.cluster.nodes if each is not node]
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with suppress(TidingsError, NatsError, OSError, AssertionError):
                before = load.acknowledged
                await eventually(lambda: load.acknowledged > before + 5, within=5)  # noqa: B023
                break
        assert all(each.alive for each in others)
    finally:
        os.kill(node.pid, signal.SIGCONT)
    await whole_again(load.space)


async def a_node_gone(load: Load) -> None:
    """For as long as it takes to confirm some more without it."""
    node = load.cluster.nodes[2]
    node.kill()
    before = load.acknowledged
    await eventually(lambda: load.acknowledged > before + BETWEEN, within=60)
    await up_again(node)
    await whole_again(load.space)


async def two_gone(load: Load) -> None:
    """Nothing can be stored: nothing is confirmed meanwhile."""
    for node in load.cluster.nodes[1:]:
        node.kill()
    await asyncio.sleep(3)  # what was under way has been answered or will not be
    before = load.acknowledged
    await asyncio.sleep(3)
    assert load.acknowledged == before
    for node in load.cluster.nodes[1:]:
        await up_again(node)
    await whole_again(load.space)


async def test_a_rolling_restart_under_load_loses_nothing_and_repeats_nothing(space: RealSpace) -> None:
    await Load(space).around(restarted_one_by_one)


@pytest.mark.slow
async def test_a_killed_and_a_paused_leader_lose_nothing_and_repeat_nothing(space: RealSpace) -> None:
    await Load(space).around(leader_killed, leader_paused_until_replaced)


@pytest.mark.slow
async def test_one_node_gone_stops_nobody_and_with_two_gone_nothing_is_confirmed_or_lost(space: RealSpace) -> None:
    await Load(space).around(a_node_gone, two_gone)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_many_of_all_of_these_lose_nothing_and_repeat_nothing(space: RealSpace) -> None:
    strikes = [leader_killed, restarted_one_by_one, leader_paused_until_replaced, a_node_gone, two_gone] * 3
    await Load(space).around(*strikes, between=200)
