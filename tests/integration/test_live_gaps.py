"""Live copies that are lost between broker and endpoint: each is noticed, read from the log, and surfaced once."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tidings
from tidings.client import backfill, channels, live
from tidings.client.connect import connect_directly
from tidings.client.notices import Gap
from tidings.errors import StewardUnreachable
from tidings.nats.jetstream_api import NO_END
from tidings.server.config import MAX_PENDING, BrokerConfig
from tidings_testing.proxy import fault_proxy
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually


def connect(space: RealSpace, name: str, **options: object) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)  # type: ignore[arg-type]


def lose(endpoint: tidings.DirectAgent, is_lost: Callable[[Any], bool]) -> list[str]:
    """Drop live copies where they would be handed over; answers the texts' list of what was dropped."""
    connection = endpoint.transport.connection.current
    lost: list[str] = []

    def lossy(handler: Callable[[Any], None]) -> Callable[[Any], None]:
        def hand_over(message: Any) -> None:
            if ".live.chat." in message.subject and is_lost(message):
                lost.append(message.data.decode())
            else:
                handler(message)

        return hand_over

    for subscription in connection.subscriptions:
        subscription.handler = lossy(subscription.handler)
    return lost


def gaps(endpoint: tidings.DirectAgent) -> list[Gap]:
    found: list[Gap] = []
    endpoint.on("gap", found.append)
    return found


def says(*texts: str) -> Callable[[Any], bool]:
    return lambda message: any(f'"text":"{text}"' in message.data.decode() for text in texts)


async def received(endpoint: tidings.DirectAgent, count: int) -> list[tidings.Incoming]:
    found = []
    for _ in range(count):
        found.append(await endpoint.next_message(10))
        await found[-1].ack()
    return found


async def test_every_live_copy_that_is_lost_surfaces_once_and_in_the_order_of_its_sender(space: RealSpace) -> None:
    for name in ("ada", "eve", "bob"):
        await space.add(name)
    async with connect(space, "ada") as ada, connect(space, "eve") as eve, connect(space, "bob") as bob:
        await bob.join("general")
        told, count = gaps(bob), iter(range(1_000))
        lost = lose(bob, lambda m: b'"last' not in m.data and next(count) % 3 == 1)
        for number in range(30):
            await ada.send("general", f"ada {number}")
            await eve.send("general", f"eve {number}")
        for sender in (ada, eve):
            await sender.send("general", f"last of {sender.name}")
        found = await received(bob, 62)
        assert len(bob.transport.queue) == 0
    assert len(lost) == 20
    for name in ("ada", "eve"):
        mine = [m.text for m in found if m.sender.name == name]
        assert mine == [*(f"{name} {n}" for n in range(30)), f"last of {name}"]
    assert sum(gap.recovered for gap in told) == bob.transport._channels.backfill.recovered == len(lost)
    assert {(gap.cause, gap.gone, gap.channel) for gap in told} == {("live", False, "general")}
    assert bob.transport.opener.refused["repeated"] == 0
    newest = 0
    for message in found:
        assert message.late == (message.seq < newest), "what comes after newer ones says so, and nothing else does"
        newest = max(newest, message.seq)


async def test_a_hole_longer_than_a_page_and_than_the_inbox_is_read_completely(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob")
    async with connect(space, "ada") as ada, connect(space, "bob", channels=["general"], inbox=16) as bob:
        told, lost = gaps(bob), lose(bob, lambda m: b'"end' not in m.data)
        for number in range(230):
            await ada.send("general", str(number))
        await ada.send("general", "end")
        assert [m.text for m in await received(bob, 231)] == [*map(str, range(230)), "end"]
    assert len(lost) == 230
    assert [(gap.recovered, gap.sender) for gap in told] == [(230, ada.id)]


async def test_the_first_message_of_a_channel_under_a_pattern_is_missed_and_found(space: RealSpace) -> None:
    await space.add("ada", post=["team.>"], read=["team.>"])
    await space.add("bob", read=["team.>"])
    async with connect(space, "ada") as ada, connect(space, "bob", channels=["team.>"]) as bob:
        lose(bob, says("one"))
        for text in ("one", "two"):
            await ada.send("team.new", text)
        assert [m.text for m in await received(bob, 2)] == ["one", "two"]


async def test_nothing_is_called_lost_that_was_never_owed_here(space: RealSpace, tmp_path: Path) -> None:
    """Said before the join, after leaving, on another channel, by oneself, as junk, or read at a resumed join."""
    await space.add("ada", post=["general", "ops"], read=["general", "ops"])
    await space.add("bob", post=["general"], read=[">"])
    await space.add("mal")
    state = tmp_path / "bob.state"
    told: list[Gap] = []
    async with connect(space, "ada") as ada, connect(space, "bob", state=state) as bob, space.agent("mal") as mal:
        bob.on("gap", told.append)
        await ada.send("general", "before the join")
        await bob.join("general", backfill=0)
        await ada.send("general", "1")
        await ada.send("ops", "elsewhere")
        for _ in range(2):
            await bob.send("general", "by bob")
            await mal.post("general", b"junk")
        await ada.send("general", "2")
        await bob.leave("general")
        await ada.send("general", "while away")
        await bob.join("general", backfill=0)
        await ada.send("general", "3")
        assert [m.text for m in await received(bob, 3)] == ["1", "2", "3"]
        await bob.join(">", backfill=0)
        await ada.send("ops", "4")
        await ada.send("general", "5")
        assert sorted(m.text for m in await received(bob, 2)) == ["4", "5"]
    async with connect(space, "ada") as ada:
        await ada.send("general", "6")
        async with connect(space, "bob", channels=["general", ">"], state=state) as bob:
            bob.on("gap", told.append)
            await ada.send("general", "7")
            assert [m.text for m in await received(bob, 2)] == ["6", "7"]
            async with space.core() as core:
                await core.purge(
                    space.subjects.log_stream, subject_filter=f"{space.subjects.root}.chat.>", below=NO_END
                )
            await ada.send("general", "8")
            await ada.send("ops", "9")
            assert [m.text for m in await received(bob, 2)] == ["8", "9"]
            assert (bob.transport._channels.backfill.recovered, bob.transport._channels.backfill.gone) == (0, 0)
    assert told == []


async def test_what_was_said_under_a_pattern_before_this_session_is_not_a_lost_copy(space: RealSpace) -> None:
    await space.add("ada", post=["team.>"], read=["team.>"])
    await space.add("bob", read=["team.>"])
    async with connect(space, "ada") as ada:
        async with connect(space, "bob", channels=["team.>"]):
            pass
        await ada.send("team.new", "while away")
        async with connect(space, "bob", channels=["team.>"]) as bob:
            told = gaps(bob)
            await ada.send("team.new", "now")
            await ada.send("team.new", "then")
            assert [m.text for m in await received(bob, 2)] == ["now", "then"]
            assert told == []


async def test_a_busy_channel_without_losses_reports_none(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob")
    async with connect(space, "ada") as ada, connect(space, "bob", inbox=2_000) as bob:
        told = gaps(bob)
        sending = [asyncio.create_task(ada.send("general", str(n), timeout=20)) for n in range(600)]
        await eventually(lambda: sum(task.done() for task in sending) > 50, every=0.001)
        joined = await bob.join("general", backfill=0)
        owed = {receipt.seq for receipt in await asyncio.gather(*sending) if receipt.seq > joined.seq}
        assert {m.seq for m in await received(bob, len(owed))} == owed
        assert told == []


async def test_a_message_that_left_the_log_before_it_could_be_read_is_said_to_be_gone(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob")
    async with connect(space, "ada") as ada, connect(space, "bob", channels=["general"]) as bob:
        told = gaps(bob)
        lose(bob, says("lost"))
        history = bob.transport._log.of_sender

        async def purged_first(*args: Any) -> Any:
            async with space.core() as core:
                await core.purge(
                    space.subjects.log_stream, subject_filter=f"{space.subjects.root}.chat.>", below=NO_END
                )
            return await history(*args)

        bob.transport._log.of_sender = purged_first  # type: ignore[method-assign, assignment]
        receipt = await ada.send("general", "lost")
        await ada.send("general", "seen")
        assert [m.text for m in await received(bob, 1)] == ["seen"]
    assert [(gap.gone, gap.recovered, gap.through) for gap in told] == [(True, 0, receipt.seq)]


async def test_a_hole_nobody_can_read_yet_holds_nothing_up_and_is_not_forgotten_in_the_state_file(
    space: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "RETRY_PAUSE", 60.0)  # nobody tries again while this test looks
    await space.add("ada")
    await space.add("bob")
    state = tmp_path / "bob.state"
    async with connect(space, "ada") as ada:
        async with connect(space, "bob", channels=["general"], state=state) as bob:
            await ada.send("general", "one")
            assert [m.text for m in await received(bob, 1)] == ["one"]
            lose(bob, says("two", "five"))
            await space.stop_steward()
            for text in ("two", "three", "four", "five", "six"):
                await ada.send("general", text)
            assert [m.text for m in await received(bob, 3)] == ["three", "four", "six"]
        await space.start_steward()
        async with connect(space, "bob", channels=["general"], state=state) as bob:
            await ada.send("general", "seven")
            assert [m.text for m in await received(bob, 3)] == ["two", "five", "seven"]
            assert len(bob.transport.queue) == 0


async def test_a_slow_reader_cut_by_the_broker_loses_nothing_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker gives up a client that does not read (a slow consumer): the log has what it missed."""
    render = BrokerConfig.render

    def impatient(config: BrokerConfig) -> str:
        text = render(config).replace('write_deadline: "5s"', 'write_deadline: "300ms"')
        text = text.replace(f"max_pending: {MAX_PENDING}", "max_pending: 1048576")
        assert "300ms" in text
        assert text.count("max_pending: 1048576") == text.count("max_pending") == 1
        return text

    monkeypatch.setattr(BrokerConfig, "render", impatient)
    async with real_space(tmp_path / "home") as space, fault_proxy(space.info.port) as proxy:
        await space.add("ada")
        await space.add("bob")
        async with connect(space, "ada") as ada, connect(space, "bob", channels=["general"], url=proxy.url) as bob:
            told, states = gaps(bob), list[object]()
            bob.on("connection", states.append)
            await ada.send("general", "first")
            proxy.stalled = True
            sent = ["first"]
            said = space.home.logs / "broker.log"
            # the steward's connection may be one too, on a busy machine: this is about bob's
            while not any("Slow Consumer" in line and ':bob"' in line for line in said.read_text().splitlines()):
                assert len(sent) < 500, "the broker does not mind a client that does not read"
                sent.append(f"{len(sent)} " + "x" * 200_000)
                await ada.send("general", sent[-1])
            proxy.stalled = False
            sent.append("last")
            await ada.send("general", "last")
            assert [m.text for m in await received(bob, len(sent))] == sent
            assert bob.transport.connection.rebuilds == 1
            assert "reconnecting" in states
            assert sum(gap.recovered for gap in told if gap.cause == "connection") > 0


async def test_many_channels_are_all_read_after_a_lost_connection(space: RealSpace) -> None:
    """More than the steward lets one agent read at a time: they take turns, and none is given up."""
    names = [f"team.{n}" for n in range(9)]
    await space.add("ada", post=["team.>"], read=["team.>"])
    await space.add("bob", read=["team.>"])
    async with connect(space, "ada") as ada, connect(space, "bob", channels=names) as bob:
        errors: list[object] = []
        bob.on("error", errors.append)
        bob.transport.connection.current.abort()
        for name in names:
            await ada.send(name, f"missed {name}")
        found = {m.text for m in await received(bob, len(names))}
        assert found == {f"missed {name}" for name in names}
        assert (errors, bob.transport.joined) == ([], names)


async def test_more_than_is_held_behind_a_hole_comes_in_order_or_says_that_it_does_not(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the log cannot be read for a hole, more copies come than are held: all of it is read again."""
    for name in ("ada", "eve", "bob"):
        await space.add(name)
    monkeypatch.setattr(live, "HELD_AT_MOST", 10)
    async with connect(space, "ada") as ada, connect(space, "eve") as eve, connect(space, "bob") as bob:
        await bob.join("general")
        readable, page = asyncio.Event(), bob.transport._log._page

        async def slow(*args: Any, **options: Any) -> Any:
            await readable.wait()
            return await page(*args, **options)

        monkeypatch.setattr(bob.transport._log, "_page", slow)
        lose(bob, says("ada 3"))
        for number in range(40):
            await ada.send("general", f"ada {number}")
            await eve.send("general", f"eve {number}")
            if number == 25:
                readable.set()
        found = await received(bob, 80)
    for name in ("ada", "eve"):
        assert [m.text for m in found if m.sender.name == name] == [f"{name} {number}" for number in range(40)]
    newest = 0
    for message in found:
        assert message.late == (message.seq < newest), "what comes after newer ones says so, and nothing else does"
        newest = max(newest, message.seq)


async def test_a_log_is_read_to_its_end_although_more_of_it_than_is_read_at_once_came_live_before(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nobody could read the log live copies went on; then a connection is lost. What came meanwhile is known."""
    await space.add("ada")
    await space.add("bob")
    monkeypatch.setattr(backfill, "FILL_LIMIT", 20)
    monkeypatch.setattr(backfill, "PAGE", 10)
    async with connect(space, "ada") as ada, connect(space, "bob", channels=["general"]) as bob:
        reading = bob.transport._log._page

        async def unread(*_args: Any, **_options: Any) -> Any:
            raise StewardUnreachable("nobody reads the log now")

        await ada.send("general", "before")
        assert (await bob.next_message(10)).text == "before"
        monkeypatch.setattr(bob.transport._log, "_page", unread)
        await lost_connection(bob)
        membership = bob.transport._channels.memberships["general"]
        await eventually(lambda: membership.unreadable, what="it is known that the log cannot be read")
        for number in range(50):
            await ada.send("general", str(number))
        assert [m.text for m in await received(bob, 50)] == [str(number) for number in range(50)]
        lose(bob, says("lost"))
        await ada.send("general", "lost")
        monkeypatch.setattr(bob.transport._log, "_page", reading)
        await eventually(lambda: membership.is_whole, what="all of it was read")
        assert [m.text for m in await received(bob, 1)] == ["lost"]
        await ada.send("general", "after")
        assert [m.text for m in await received(bob, 1)] == ["after"]


async def lost_connection(endpoint: tidings.DirectAgent) -> None:
    before = endpoint.transport.connection.rebuilds
    await endpoint.transport.connection.current.close()
    await eventually(lambda: endpoint.transport.connection.rebuilds > before and endpoint.transport.state == "ready")
