"""A new key under the same name: what lies unread for the old one is not dropped unasked, and nobody is left untold."""

from typing import Any

import pytest

import tidings
from tidings.client.connect import connect_directly
from tidings.contract.admin import UnreadRequest
from tidings.errors import ConflictError
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually
from tools.frames import stub_pipeline


def connect(space: RealSpace, name: str, **options: Any) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)


async def told(space: RealSpace, name: str, kind: str = "lost") -> list[tidings.Notice]:
    """What an agent hears when it connects."""
    heard: list[tidings.Notice] = []
    async with connect(space, name, receive=False) as agent:
        agent.on("notice", heard.append)
        await eventually(lambda: agent.transport.roster.loaded)
    return [each for each in heard if each.kind == kind]


async def write_to(space: RealSpace, target: str, count: int) -> list[tidings.Receipt]:
    async with connect(space, "ada", receive=False) as ada:
        return [await ada.dm(target, f"unread {number}") for number in range(count)]


@pytest.fixture
async def pair(space: RealSpace) -> RealSpace:
    for name in ("ada", "hal"):
        await space.add(name)
    async with connect(space, "hal", channels=["general"]):
        pass
    return space


async def test_a_rotation_is_refused_while_something_is_unread_and_says_how_much_and_how_to_go_on(
    pair: RealSpace,
) -> None:
    async with pair.administer() as admin:
        hal = admin.ledger.active("hal")
    assert hal is not None
    await write_to(pair, "hal", 2)
    async with stub_pipeline(pair) as pipeline, connect(pair, "ada", receive=False) as ada:
        sent = [(await ada.send("general", f"{number}")).seq for number in range(4)]
        await pipeline.deliver(hal.id, sent[:3])
        await pipeline.floor(sent[2])
        async with pair.administer() as admin:
            with pytest.raises(ConflictError) as refused:
                await admin.rotate("hal")
            assert admin.ledger.active("hal") == hal, "nothing was changed"
        for part in (
            "2 direct messages, 3 channel messages in its mailbox, 1 channel message that is not delivered yet",
            "`tidings inbox --as hal`",
            "`tidings agent rotate hal --drop-unread`",
        ):
            assert part in str(refused.value)
        await pipeline.level()
        async with connect(pair, "hal") as reader:
            for _ in range(5):
                await (await reader.next_message(10)).ack()

        async def is_read() -> bool:
            async with pair.administer() as admin:
                return not (await admin.call(UnreadRequest(hal.id))).words

        await eventually(is_read, what="the mailbox is empty")
        async with pair.administer() as admin:
            assert (await admin.rotate("hal")).note == ""
    assert await told(pair, "hal") == []
    assert await told(pair, "ada") == []


@pytest.mark.parametrize("killed", [False, True])
async def test_what_a_rotation_drops_is_told_to_the_agent_and_to_the_senders(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    sent = await write_to(pair, "hal", 2)
    async with pair.administer() as admin:
        if killed:
            monkeypatch.setattr(admin, "cut", _killed)
            with pytest.raises(RuntimeError, match="killed"):
                await admin.rotate("hal", drop_unread=True)
        else:
            assert (await admin.rotate("hal", drop_unread=True)).note == "2 direct messages"
    async with pair.administer() as admin:
        await admin.finish()
    for _ in range(2):  # every time it connects, under the same id
        (lost,) = await told(pair, "hal")
        assert (lost.count, "2 direct messages" in lost.text, "new" in lost.text) == (2, True, True)
        (unread,) = await told(pair, "ada")
        assert unread.count == 2
        assert "2 direct messages you sent to hal will not be read: hal has a new key" in unread.text
    async with connect(pair, "ada", receive=False) as ada:
        for each in sent:
            assert (await ada.trace(each.id)).receipts[0].stage == "undeliverable"


async def _killed(*_arguments: Any) -> None:
    raise RuntimeError("killed")


async def test_the_sender_of_what_a_revoked_agent_did_not_read_is_told_at_once(pair: RealSpace) -> None:
    async with connect(pair, "ada", receive=False) as ada:
        heard: list[tidings.Notice] = []
        ada.on("notice", heard.append)
        await ada.dm("hal", "are you there?")
        async with pair.administer() as admin:
            await admin.revoke("hal")
        await eventually(lambda: bool(heard), what="a notice while it is connected")
        (unread,) = heard
    assert (unread.kind, unread.count) == ("lost", 1)
    assert unread.text == "a direct message you sent to hal will not be read: hal was revoked"


async def test_a_successor_has_the_results_and_traces_of_tasks_its_predecessors_asked(pair: RealSpace) -> None:
    await pair.add("bob", roles=["reviewer"])
    async with connect(pair, "hal", receive=False) as hal:
        first, second, third = [await hal.ask("reviewer", f"look {number}") for number in range(3)]
    async with pair.administer() as admin:
        await admin.rotate("hal")
        await admin.rotate("hal")
    async with connect(pair, "bob", receive=False) as bob, connect(pair, "hal", receive=False) as hal:
        assert (await hal.task(first.id, 0)).state == "queued"
        for expected in ("one", "two"):
            job = await bob.claim("reviewer", 10)
            assert job is not None
            await (job.done(expected) if expected == "one" else job.fail("not today", retry=False))
        found = await hal.task(first.id, 10)
        assert found.state == "done"
        assert found.message is not None
        assert found.message.text == "one"
        assert (await hal.task(second.id, 0)).state == "dead"
        assert (await hal.task(third.id, 0)).state == "queued"
        life = await hal.trace(first.id)
        assert [each.state for each in life.receipts] == ["done"]
        async with connect(pair, "ada", receive=False) as ada:
            assert (await ada.task(first.id, 0)).state == "unknown", "nobody else's"
            assert (await ada.trace(first.id)).receipts == ()
