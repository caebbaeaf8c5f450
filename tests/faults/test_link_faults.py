"""Linked spaces on real brokers through networks that are cut, refuse, swallow, delay, lose and stall: once that stops,
both hold the same, and nobody sees anything twice."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import tidings
from failing_links import FailingLinks, failing_links, has_failed, look_soon
from tidings.client.connect import connect_directly
from tidings.links import mail_sync
from tidings.links.validation import PAGE_RECORDS
from tidings.links.worker import LinkWorker
from tidings_testing.proxy import FaultProxy
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually

#: seconds until an answer that does not come is given up: networks here swallow them
PATIENCE = 1.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    look_soon(monkeypatch)


@pytest.fixture
async def links(tmp_path: Path) -> AsyncIterator[FailingLinks]:
    async with failing_links(tmp_path) as found, found.read_along():
        yield found


async def test_two_spaces_that_cannot_reach_each_other_and_both_talk_hold_the_same_when_they_can_again(
    links: FailingLinks,
) -> None:
    async with links.carried(PATIENCE) as (main, acme):
        await links.both_say("before")
        await links.converged(main, acme)
        links.gone()
        await links.both_say("meanwhile", 10)
        await eventually(lambda: has_failed(main) and has_failed(acme), within=20, what="both say so")
        await links.both_say("later", 10)
        links.back()
        await links.both_say("after")
        await links.converged(main, acme)


def strike(network: FaultProxy, how: str) -> None:
    if how == "swallows":
        network.black_hole = True
        return
    network.refuse = how == "refuses"
    network.cut()


async def connected_again(links: FailingLinks, before: list[int], how: str) -> None:
    def both() -> bool:
        return all(network.connections > count for network, count in zip(links.networks, before, strict=True))

    await eventually(both, within=20, what=f"both are there again after it {how}")


async def flap(links: FailingLinks, main: LinkWorker, acme: LinkWorker, cycles: int) -> None:
    """Both talk while their networks come and go."""
    for cycle in range(cycles):
        how = ("is cut", "refuses", "swallows")[cycle % 3]
        before = [network.connections for network in links.networks]
        talking = asyncio.create_task(links.both_say(f"in cycle {cycle}"))
        for network in links.networks:
            strike(network, how)
        if how != "is cut":
            await eventually(lambda: has_failed(main) and has_failed(acme), within=20, what=f"it {how}")
        links.back()
        for network in links.networks:
            if how == "swallows":
                network.cut()  # what was swallowed is never sent again on that connection
        await connected_again(links, before, how)
        await eventually(lambda: not (has_failed(main) or has_failed(acme)), within=20, what=f"and ask, after it {how}")
        await talking


async def test_a_connection_that_comes_and_goes_while_both_talk_costs_nothing(links: FailingLinks) -> None:
    async with links.carried(PATIENCE) as (main, acme):
        await flap(links, main, acme, 8)
        await links.converged(main, acme)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_connection_that_comes_and_goes_for_long_costs_nothing(links: FailingLinks) -> None:
    async with links.carried(PATIENCE) as (main, acme):
        await flap(links, main, acme, 60)
        await links.converged(main, acme)


async def behind(links: FailingLinks, count: int) -> None:
    await links.talk.say(links.main, "ada", *(f"word {number}" for number in range(count)))


@pytest.mark.parametrize("count", [1_000, pytest.param(5_000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
async def test_a_space_far_away_that_is_behind_catches_up_in_pages_and_not_record_by_record(
    tmp_path: Path, count: int
) -> None:
    async with failing_links(tmp_path) as links:
        await behind(links, count)
        links.to_main.delay = 0.15
        async with links.carried() as (main, acme):
            asked = acme._spaces.asked  # type: ignore[attr-defined]
            await eventually(lambda: pages_handled(acme), within=60, what="it has everything")
            pages = -(-count // PAGE_RECORDS)
            assert asked["page"] <= pages + 3, asked
            assert asked.total() <= pages + 8, "and little else is asked"
            assert acme._carried[next(iter(acme._carried))].direction.status().lag_records == 0
            await links.converged(main, acme)


def pages_handled(running: LinkWorker) -> bool:
    (carried,) = running._carried.values()
    status = carried.direction.status()
    return status.status == "live" and not status.lag_records


async def test_packets_that_are_lost_and_networks_that_stall_cost_time_and_nothing_else(links: FailingLinks) -> None:
    async with links.carried(PATIENCE) as (main, acme):
        for network in links.networks:
            network.delay, network.loss = 0.01, 0.3
        rounds = itertools.count()

        async def many_are_lost() -> bool:
            await links.both_say(f"in round {next(rounds)}", 1)
            return min(network.lost for network in links.networks) > 3

        await eventually(many_are_lost, within=30, every=0.1)
        for network in links.networks:
            network.stalled = True
        await links.both_say("stalled", 5)
        await eventually(lambda: has_failed(main) and has_failed(acme), within=20, what="nothing comes through")
        links.back()
        await links.both_say("after")
        await links.converged(main, acme)


# --- direct messages and tasks ---


def connect(space: RealSpace, name: str) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home)


async def knows(agent: tidings.DirectAgent, *names: str) -> None:
    async def known() -> bool:
        return set(names) <= {each.name for each in await agent.who()}

    await eventually(known, within=20, what=", ".join(names))


async def write_to(writer: tidings.DirectAgent, reader: str, letters: list[str]) -> None:
    for letter in letters:
        await writer.dm(reader, letter)


async def read_all(reader: tidings.DirectAgent, letters: list[str]) -> None:
    """These come, in this order, and nothing else does."""
    for letter in letters:
        got = await reader.next_message(timeout=30)
        assert got.text == letter
        await got.ack()


async def work(worker: tidings.DirectAgent, count: int) -> list[str]:
    """Do so many tasks; what they were."""
    done: list[str] = []
    while len(done) < count:
        job = await worker.claim("reviewer", 20)
        assert job is not None
        done.append(job.text)
        await job.done(f"done: {job.text}")
    return done


async def last_seq(space: RealSpace, stream: str) -> int:
    async with space.core() as js:
        return int((await js.info(stream))["state"]["last_seq"])


@pytest.mark.parametrize("cycles", [4, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_mail_and_tasks_under_way_while_the_connection_comes_and_goes_arrive_once_and_results_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cycles: int
) -> None:
    monkeypatch.setattr(mail_sync, "LOOK_AGAIN", 0.2)
    count = cycles * 3
    to_acme, to_main, asked = ([f"{kind} {number}" for number in range(count)] for kind in ("there", "back", "task"))
    async with failing_links(tmp_path, roster="on", direct="on", tasks="on") as links:
        await links.main.add("dora")
        await links.acme.add("dirk")
        await links.acme.add("rita", roles=["reviewer"])
        async with (
            links.carried(PATIENCE) as (main, acme),
            connect(links.main, "dora") as dora,
            connect(links.acme, "dirk") as dirk,
            connect(links.acme, "rita") as rita,
        ):
            await knows(dora, "dirk@acme", "rita@acme")
            await knows(dirk, "dora@main")

            async def ask_all() -> list[str]:
                tickets = [await dora.ask("reviewer@acme", text) for text in asked]
                return [(await each.result(60)).text for each in tickets]

            results, working = asyncio.create_task(ask_all()), asyncio.create_task(work(rita, count))
            await asyncio.gather(
                flap(links, main, acme, cycles),
                write_to(dora, "dirk@acme", to_acme),
                write_to(dirk, "dora@main", to_main),
                read_all(dirk, to_acme),
                read_all(dora, to_main),
            )
            assert sorted(await working) == sorted(asked)
            assert await results == [f"done: {each}" for each in asked]
            await links.converged(main, acme)
            for agent in (dirk, dora):
                assert len(agent.transport.queue) == 0
            assert await last_seq(links.acme, links.acme.subjects.task_stream) == count, "none is queued twice"
            for space in (links.main, links.acme):  # what was sent there, and what came
                assert await last_seq(space, space.subjects.direct_stream) == 2 * count
