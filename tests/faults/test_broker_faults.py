"""The broker is killed and paused under load: what it acknowledged is there, and the steward finds its way back."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from folded_log import fold_log
from tidings.contract.admin import ChangeSpaceRequest, PartsChange
from tidings.contract.channels import JoinRequest
from tidings.nats.errors import NatsError
from tidings.nats.jetstream import JetStream
from tidings.wire.subjects import Chat
from tidings_testing.history import History
from tidings_testing.processes import steward_child
from tidings_testing.real_space import AgentClient, RealSpace, real_space
from tidings_testing.waiting import eventually, insist

PUBLISHERS = 8
CHANNELS = 20


@pytest.fixture
async def crowd(tmp_path: Path) -> AsyncIterator[RealSpace]:
    """A space with as many agents as publishers."""
    async with real_space(tmp_path / "home") as space:
        for number in range(PUBLISHERS):
            await space.add(f"agent{number}", read=[">"], post=["general"])
        yield space


class Publisher:
    """Posts until told to stop; an answer that does not come is not an acknowledgement."""

    def __init__(self, agent: AgentClient, history: History) -> None:
        self.agent = agent
        self.history = history
        self.acknowledged = 0

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            confirmed = self.history.sending(self.agent.id, "general")
            try:
                said = await asyncio.wait_for(self.agent.post("general", confirmed.id.encode()), 1)
            except (TimeoutError, NatsError, OSError):
                continue
            confirmed(said["seq"])
            self.acknowledged += 1


async def assert_nothing_lost(js: JetStream, space: RealSpace, history: History) -> None:
    """The log is the reader: it has what it acknowledged, where it said, and nothing that nobody sent."""
    state = (await js.info("LOG_main"))["state"]
    stored = [r async for page in js.read("LOG_main", "td.main.>", 1, state["last_seq"]) for r in page]
    assert [r.seq for r in stored] == list(range(1, state["last_seq"] + 1)), "sequences are continuous"
    for record in stored:
        chat = space.subjects.parse(record.subject)
        if isinstance(chat, Chat):
            history.read("the log", chat.sender, chat.channel, record.payload.decode(), record.seq)
    history.owed("the log", "general")
    history.check()


async def load_while(space: RealSpace, strikes: list[Callable[[], None]], more: Callable[[], int]) -> None:
    """Publish; after each `more()` further acknowledgements strike the broker."""
    history = History()
    async with AsyncExitStack() as stack:
        agents = [
            await stack.enter_async_context(space.agent(f"agent{number}", reconnect=True))
            for number in range(PUBLISHERS)
        ]
        publishers, stop = [Publisher(agent, history) for agent in agents], asyncio.Event()
        running = [asyncio.create_task(publisher.run(stop)) for publisher in publishers]

        def acknowledged() -> int:
            return sum(publisher.acknowledged for publisher in publishers)

        for strike in strikes:
            goal = acknowledged() + more()
            await eventually(lambda goal=goal: acknowledged() >= goal, within=30)  # type: ignore[misc]
            strike()
        goal = acknowledged() + more()
        await eventually(lambda: acknowledged() >= goal, within=30, what="publishing goes on afterwards")
        stop.set()
        await asyncio.gather(*running)
        joined = await insist(lambda: agents[0].control.call(JoinRequest("general"), op="after-all"))
        async with space.core() as js:
            await assert_nothing_lost(js, space, history)
            table = await fold_log(js, space.info, 0)
            assert agents[0].id in table.members_at("general", joined.seq + 1)


def kill_and_restart(space: RealSpace) -> Callable[[], None]:
    def strike() -> None:
        space.broker.kill()
        space.broker.start()

    return strike


async def test_a_broker_killed_under_load_keeps_every_acknowledged_message(crowd: RealSpace) -> None:
    await crowd.stop_steward()
    async with steward_child(crowd.home) as steward:
        await load_while(crowd, [kill_and_restart(crowd)] * 2, more=lambda: 800)
        assert steward.process.returncode is None, "the steward lived through it"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
async def test_a_broker_killed_many_times_keeps_every_acknowledged_message(crowd: RealSpace, seed: int) -> None:
    rng = random.Random(seed)
    await crowd.stop_steward()
    async with steward_child(crowd.home):
        strikes = [kill_and_restart(crowd)] * 10
        await load_while(crowd, strikes, more=lambda: rng.randint(50, 2_000))


async def joins_through(space: RealSpace, strike: Callable[[], None], recover: Callable[[], None]) -> None:
    """Eight agents join channel after channel; with writes in flight the broker is struck; each is one record."""
    async with AsyncExitStack() as stack:
        agents = [
            await stack.enter_async_context(space.agent(f"agent{number}", reconnect=True))
            for number in range(PUBLISHERS)
        ]

        answered = 0

        async def join_all(agent: AgentClient) -> dict[str, int]:
            nonlocal answered
            agent.control.timeout = 1
            told = {}
            for number in range(CHANNELS):
                op = f"{agent.name}-join-{number}"
                answer = await insist(
                    lambda op=op, number=number: agent.control.call(JoinRequest(f"c{number}"), op=op),  # type: ignore[misc]
                    within=40,
                )
                assert answer.state == "opened"
                told[f"c{number}"] = answer.seq
                answered += 1
            return told

        joining = [asyncio.create_task(join_all(agent)) for agent in agents]
        await eventually(lambda: answered >= 2 * PUBLISHERS, every=0)
        strike()
        recover()
        answers = await asyncio.wait_for(asyncio.gather(*joining), 50)
        async with space.core() as js:
            table = await fold_log(js, space.info, 0)
        for agent, told in zip(agents, answers, strict=True):
            assert {i.pattern: i.joined for i in table.intervals(agent.id)} == told
        assert not table.void
        assert table.repeats == 0


async def test_a_paused_broker_that_resumes_gets_every_write_once(crowd: RealSpace) -> None:
    await crowd.stop_steward()
    loop = asyncio.get_running_loop()

    def resume_later() -> None:
        loop.call_later(3, os.kill, crowd.broker.pid, signal.SIGCONT)

    async with steward_child(crowd.home) as steward:
        await joins_through(crowd, lambda: os.kill(crowd.broker.pid, signal.SIGSTOP), resume_later)
        assert steward.process.returncode is None, "the steward lived through it"


async def test_a_broker_killed_while_agents_join_writes_each_membership_once(crowd: RealSpace) -> None:
    await crowd.stop_steward()
    async with steward_child(crowd.home) as steward:
        await joins_through(crowd, crowd.broker.kill, crowd.broker.start)
        assert steward.process.returncode is None, "the steward lived through it"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [4, 7, 12])
async def test_a_broker_paused_beyond_every_timeout_gets_every_write_once(crowd: RealSpace, seconds: int) -> None:
    """Longer than the steward's own patience with one request, so that renewals are unanswered too."""
    await crowd.stop_steward()
    loop = asyncio.get_running_loop()

    def resume_later() -> None:
        loop.call_later(seconds, os.kill, crowd.broker.pid, signal.SIGCONT)

    async with steward_child(crowd.home):
        await joins_through(crowd, lambda: os.kill(crowd.broker.pid, signal.SIGSTOP), resume_later)


async def test_memberships_older_than_any_limit_survive_a_clean_restart_of_everything(crowd: RealSpace) -> None:
    async with crowd.agent("agent0") as agent:
        joined = (await agent.control.call(JoinRequest("general"))).seq
        await agent.post("general", b"old")
    async with crowd.administer() as admin:
        await admin.call(ChangeSpaceRequest(keep_age=0, parts=PartsChange(deliver="off", archive="off")))
    async with crowd.core() as js:

        async def is_empty() -> bool:
            return await js.last("LOG_main", "td.main.chat.>") is None

        await eventually(is_empty)
    await crowd.stop_steward()
    await crowd.restart_broker()
    async with steward_child(crowd.home), crowd.agent("agent0") as agent:
        told = await agent.control.call(JoinRequest("general"))
        assert (told.state, told.seq) == ("resumed", joined)
