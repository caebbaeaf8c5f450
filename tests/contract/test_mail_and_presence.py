"""What any endpoint must do with direct messages and about its presence, where no other test says it already."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreign import ask_for, body, connect, write_to
from tidings.contract.mail import DeadLettersRequest
from tidings_testing.processes import child
from tidings_testing.real_space import TEST_INTERVALS, RealSpace, real_space
from tidings_testing.waiting import eventually

PRESENT = Path(__file__).parent / "present_child.py"


@pytest.fixture
async def brisk(tmp_path: Path) -> AsyncIterator[RealSpace]:
    """A space in which a second of silence is offline."""
    async with real_space(tmp_path / "home", intervals=replace(TEST_INTERVALS, presence=1.0)) as space:
        await space.add("ada")
        await space.add("bob")
        yield space


@pytest.mark.requirement("D5")
async def test_what_a_mailbox_holds_is_direct_whatever_its_payload_says(pair: RealSpace) -> None:
    async with pair.agent("ada") as ada, connect(pair, "bob") as bob:
        for claims in ({"channel": "general"}, {"kind": "channel"}, {"to": ada.id}, {"toService": "reviewer"}):
            await write_to(ada, bob.id, body(ada, json.dumps(claims), **claims))
            message = await bob.next_message(10)
            assert (message.kind, message.channel, message.sender.id) == ("direct", None, ada.id)
            assert json.loads(message.text) == claims


@pytest.mark.requirement("T8")
async def test_a_task_nobody_can_read_is_never_worked_on_and_blocks_nobody(pair: RealSpace) -> None:
    await pair.add("cat", roles=["reviewer"])
    async with pair.agent("ada") as ada, connect(pair, "cat") as cat:
        for payload in (b"junk", b"", body(ada, parts=[{"kind": "widget"}])):
            await ask_for(ada, "reviewer", payload)
        await ada.connection.request(pair.subjects.task("reviewer", ada.id), body(ada, "unsigned"), timeout=5)
        await ask_for(ada, "reviewer", body(ada, "good"))
        job = await asyncio.wait_for(anext(aiter(cat.work("reviewer"))), 15)
        assert (job.text, job.asker.id) == ("good", ada.id)
        await job.done("done")
        dead = (await ada.control.call(DeadLettersRequest())).dead
        assert [each.cause for each in dead] == ["malformed"] * 4


@pytest.mark.requirement("P1")
async def test_an_endpoint_beats_as_itself_on_its_interval_and_stays_online_by_it(brisk: RealSpace) -> None:
    heard: list[tuple[str, Any]] = []

    async def hear(message: Any) -> None:
        heard.append((message.subject, json.loads(message.data)))

    async with brisk.core() as core, connect(brisk, "bob") as bob:
        await core.connection.subscribe(f"{brisk.subjects.root}.ctl.presence.*", cb=hear)
        await core.connection.flush()
        async with connect(brisk, "ada") as ada:
            gone: list[str] = []
            await eventually(lambda: {a.name: a.online for a in bob.transport.roster.agents()}["ada"])
            bob.on("presence", lambda agent: None if agent.online else gone.append(agent.name))
            mine = brisk.subjects.control("presence", ada.id)
            quiet = len(heard)
            await eventually(lambda: sum(subject == mine for subject, _ in heard[quiet:]) >= 4)
            assert gone == [], "beats on the interval keep it online"
    said = [what for subject, what in heard if subject == mine]
    assert {what["session"] for what in said} == {ada.transport.session.session}
    assert {subject for subject, _ in heard} == {mine, brisk.subjects.control("presence", bob.id)}
    assert said[-1]["status"] == "offline", "the last beat of a graceful end"


@pytest.mark.requirement("P2")
async def test_a_process_killed_with_9_is_offline_within_its_time_and_nothing_is_claimed_for_it(
    brisk: RealSpace,
) -> None:
    async with connect(brisk, "ada") as ada:

        def bob() -> Any:
            return next(agent for agent in ada.transport.roster.agents() if agent.name == "bob")

        async with child(PRESENT, str(brisk.home.home), brisk.home.name, "bob") as victim:
            await victim.line()
            await eventually(lambda: bob().attention == "dnd" and bob().status == "working")
            victim.signal(signal.SIGKILL)
            await victim.ended()
        # its time to live of a second, then the steward's next look; the rest is slack
        await eventually(lambda: bob().status == "offline", within=1.0 + 5)
        assert (bob().attention, bob().activity) == (None, None)
        assert bob().last_seen is not None
