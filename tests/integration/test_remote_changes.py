"""Joining and leaving when requests repeat, come late, or come from another program of the same agent."""

import asyncio
from typing import Any

import pytest

import tidings
from tidings.admin.agents import AgentFile
from tidings.client.connect import connect_directly
from tidings.client.live import MembershipChange
from tidings.contract.admin import ChangeSpaceRequest
from tidings.contract.channels import (
    ChangeChannelRequest,
    ChannelChangedAnswer,
    JoinAnswer,
    JoinRequest,
    LeaveAnswer,
    LeaveRequest,
    MembershipRow,
    MembershipsRequest,
)
from tidings.contract.core import Request
from tidings.errors import ConflictError, StewardUnreachable
from tidings_testing.real_space import TEST_INTERVALS, RealSpace
from tidings_testing.waiting import eventually


def connect(space: RealSpace, name: str, **options: Any) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)


async def test_an_operation_takes_effect_once_whatever_happened_in_between_and_whichever_steward_is_asked(
    pair: RealSpace,
) -> None:
    async with pair.agent("ada", reconnect=True) as ada:

        async def join(op: str) -> JoinAnswer:
            return await ada.control.call(JoinRequest("general"), op=op)

        async def leave(op: str, joined: int | None = None) -> LeaveAnswer:
            return await ada.control.call(LeaveRequest("general", joined), op=op)

        joined = await join("join-one-A")
        left = await leave("leave-one-B")
        again = await join("join-one-A")
        assert (again.state, again.seq, again.left) == ("opened", joined.seq, left.seq)
        assert (await ada.control.call(MembershipsRequest())).memberships == (), "it joined once, and that is over"
        newer = await join("join-two-C")
        assert newer.seq > left.seq
        for steward in ("the same", "the next"):
            if steward == "the next":
                await pair.stop_steward()
                await pair.start_steward(TEST_INTERVALS)
            repeat = await leave("leave-one-B")
            assert (repeat.state, repeat.seq, repeat.open) == ("left", left.seq, newer.seq)
            late = await leave(f"late-leave-{steward}", joined.seq)
            assert (late.state, late.seq) == ("left", left.seq), "what it named was over already"
            assert (await join("join-one-A")).seq == joined.seq
            held = (await ada.control.call(MembershipsRequest())).memberships
            assert held == (MembershipRow("general", newer.seq),)
        resumed = await join("join-again")
        assert (resumed.state, resumed.seq) == ("resumed", newer.seq)
        end = await leave("leave-two", newer.seq)
        assert (await join("join-again")).left == end.seq, "nor does one that found a membership open one"
        with pytest.raises(ConflictError, match="used for something else"):
            await join("leave-two")
        assert (await ada.control.call(MembershipsRequest())).memberships == ()


async def test_settings_that_are_repeated_late_do_not_undo_newer_ones(pair: RealSpace) -> None:
    await pair.add("carol", manage=["general"])
    async with pair.agent("carol") as carol:

        async def set_to(replay: bool, op: str) -> ChannelChangedAnswer:
            return await carol.control.call(ChangeChannelRequest("general", replay=replay), op=op)

        first = await set_to(False, "set-one-A")
        await set_to(True, "set-two-B")
        again = await set_to(False, "set-one-A")
        assert (again.seq, again.replay) == (first.seq, True)
    async with pair.administer() as admin:
        changed = await admin.call(ChangeSpaceRequest(keep_age=100), op="space-one-A")
        await admin.call(ChangeSpaceRequest(keep_age=200), op="space-two-B")
        repeat = await admin.call(ChangeSpaceRequest(keep_age=100), op="space-one-A")
        assert (repeat.seq, repeat.space.keep_age) == (changed.seq, 200)


async def test_what_another_program_of_the_agent_joins_or_leaves_reaches_the_one_that_runs(space: RealSpace) -> None:
    await space.add("ada", read=[">"], post=[">"])
    await space.add("bob", read=[">"], post=[">"])
    async with (
        connect(space, "ada") as ada,
        connect(space, "bob", channels=["general", "ops"]) as bob,
        connect(space, "bob", receive=False) as other,
    ):
        heard: list[MembershipChange] = []
        bob.on("membership", heard.append)
        joined = await other.join("team.>")
        await eventually(lambda: "team.>" in bob.transport.joined, what="what another program joined is heard here")
        await ada.send("team.a", "to the team")
        message = await bob.next_message(10)
        assert (message.text, message.channel) == ("to the team", "team.a")
        await other.leave("general")
        await eventually(
            lambda: bob.transport.joined == ["ops", "team.>"], what="what another program left is left here"
        )
        await ada.send("general", "bob is gone")
        await ada.send("ops", "bob is here")
        assert (await bob.next_message(10)).text == "bob is here"
        assert [(each.channel, each.state) for each in heard] == [("team.>", "joined"), ("general", "left")]
        assert heard[0].seq == joined.seq
        assert other.transport.joined == ["team.>"], "a program that does not receive joins what it asked for"
        again = await bob.join("general")
        assert again.state == "opened"
        assert (await bob.leave("ops")).state == "left"
        await ada.send("general", "bob is back")
        assert (await bob.next_message(10)).text == "bob is back"
        assert len(heard) == 2, "what this program does itself is no news to it"


async def test_join_confirms_what_it_says_and_leave_ends_what_stands_now(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await space.add("ada")
    async with connect(space, "ada", channels=["general"]) as ada, space.agent("ada") as raw:
        moves = ada.transport._membership_watch
        monkeypatch.setattr(moves, "_on_row", lambda _row: None)
        ada.transport.roster.on_own_row.clear()  # as if the roster had not told yet
        first = ada.transport._channels.memberships["general"].record
        await raw.control.call(LeaveRequest("general"))
        joined = await ada.join("general")
        assert joined.state == "opened"
        assert joined.seq > first, "it was left elsewhere, so this is a new membership and not the remembered one"
        await raw.control.call(LeaveRequest("general"))
        newer = await raw.control.call(JoinRequest("general"))
        left = await ada.leave("general")
        assert (left.state, left.seq > newer.seq, left.open) == ("left", True, None)
        assert (await ada.leave("general")).state == "absent"
        await ada.transport.watch("general")
        assert (await ada.join("general")).state == "opened", "looking is not being in"
        call = ada.transport.connection.call

        async def away(request: Request[Any], **options: Any) -> Any:
            if request.operation.service == "member":
                raise StewardUnreachable("nobody answers")
            return await call(request, **options)

        monkeypatch.setattr(ada.transport.connection, "call", away)
        told = await ada.join("general")
        assert (told.state, told.durable) == ("live", False)
        assert "nobody can say that it still stands" in told.reason


@pytest.mark.parametrize("how", ["no answer came", "it was cancelled"])
async def test_a_leave_asked_again_because_its_answer_was_lost_does_not_end_what_another_program_joined_since(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with connect(pair, "ada", channels=["general"]) as ada, pair.agent("ada") as raw:
        ada.transport.roster.on_own_row.clear()  # as if the roster had not told yet
        call = ada.transport.connection.call

        async def losing(request: Request[Any], **options: Any) -> Any:
            await call(request, **options)
            if how == "no answer came":
                raise StewardUnreachable("the answer was lost")
            raise asyncio.CancelledError

        monkeypatch.setattr(ada.transport.connection, "call", losing)
        with pytest.raises((StewardUnreachable, asyncio.CancelledError)):
            await ada.leave("general")
        monkeypatch.setattr(ada.transport.connection, "call", call)
        newer = await raw.control.call(JoinRequest("general"))
        assert newer.state == "opened", "the leave was done"
        again = await ada.leave("general")
        assert (again.state, again.open, ada.transport.joined) == ("left", newer.seq, [])
        assert again.seq < newer.seq
        held = (await raw.control.call(MembershipsRequest())).memberships
        assert held == (MembershipRow("general", newer.seq),)
        now = await ada.leave("general")
        assert (now.state, now.open) == ("left", None), "asked anew it ends what stands now"
        assert (await raw.control.call(MembershipsRequest())).memberships == ()


async def test_a_leave_ends_a_newer_membership_this_program_heard_of_though_its_first_leave_got_no_answer(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(pair, "bob", channels=["general"]) as bob, pair.agent("bob") as raw:
        heard: list[MembershipChange] = []
        bob.on("membership", heard.append)
        call = bob.transport.connection.call

        async def losing(request: Request[Any], **options: Any) -> Any:
            answer = await call(request, **options)
            if isinstance(request, LeaveRequest):
                raise StewardUnreachable("the answer was lost")
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(bob.transport.connection, "call", losing)
            with pytest.raises(StewardUnreachable):
                await bob.leave("general")
        newer = await raw.control.call(JoinRequest("general"))
        await eventually(
            lambda: heard[-1:] == [MembershipChange("general", "joined", newer.seq)], what="it hears of the new one"
        )
        assert (await bob.leave("general")).open is None
        assert (await raw.control.call(MembershipsRequest())).memberships == ()


async def test_a_membership_that_was_left_elsewhere_while_away_is_not_joined_again_by_coming_back(
    pair: RealSpace,
) -> None:
    async with connect(pair, "bob", channels=["general"]) as bob, pair.agent("bob") as raw:
        heard: list[MembershipChange] = []
        bob.on("membership", heard.append)
        bob.transport.roster.on_own_row.clear()
        left = await raw.control.call(LeaveRequest("general"))
        bob.transport.connection.reconnect()
        await eventually(lambda: bob.transport.joined == [], what="it hears that it left")
        assert heard == [MembershipChange("general", "left", left.seq)]
        await asyncio.sleep(0)
        assert (await raw.control.call(MembershipsRequest())).memberships == ()


async def test_whoever_was_away_while_its_access_was_narrowed_and_restored_is_told_which_memberships_that_closed(
    space: RealSpace,
) -> None:
    both = AgentFile("ada", read=("general", "ops"), post=("general",))
    await space.add("ada", read=both.read)
    async with connect(space, "ada", channels=both.read, receive=False):
        pass
    async with space.administer() as admin:
        assert (await admin.set_access("ada", AgentFile("ada", read=("general",), post=("general",)))).closed == ["ops"]
        await admin.set_access("ada", both)
    for steward in ("the same", "the next"):
        if steward == "the next":
            await space.stop_steward()
            await space.start_steward(TEST_INTERVALS)
        heard = await told_while_joining(space, "ada", "ops")
        assert [(each.kind, each.channel, each.is_loss) for each in heard] == [("membership", "ops", True)]
        assert "Being given access again does not open it: join again" in heard[0].text
    async with space.administer() as admin:
        await admin.revoke("ada")
    assert space.steward is not None
    assert len(space.steward.store.file.removed) == 1, "whoever is revoked is told nothing more"


async def told_while_joining(space: RealSpace, name: str, channel: str) -> list[tidings.Notice]:
    heard: list[tidings.Notice] = []
    async with connect(space, name, channels=[channel], receive=False) as endpoint:
        await eventually(lambda: endpoint.transport.roster.loaded)
        endpoint.on("notice", heard.append)
    return heard
