"""Agents are provisioned, narrowed, rotated and revoked; every step is a record and a credential together."""

import asyncio

import pytest

from tidings.admin.agents import AgentFile
from tidings.contract.agents import AccessRequest
from tidings.contract.channels import (
    ChangeChannelRequest,
    ChannelRequest,
    JoinRequest,
    LeaveRequest,
    MembershipsRequest,
)
from tidings.errors import AuthRevoked, BrokerUnreachable, DeniedError, NameTaken, UsageError
from tidings_testing.raw_requests import raw_call
from tidings_testing.real_space import RealSpace


async def test_an_added_agent_can_join_what_it_may_read_and_nothing_else(space: RealSpace) -> None:
    await space.add("ada", read=["general", "team.>"])
    async with space.agent("ada") as ada:
        assert (await ada.control.call(JoinRequest("general"))).state == "opened"
        assert (await ada.control.call(JoinRequest("team.backend"))).state == "opened"
        with pytest.raises(DeniedError, match="may not read secret"):
            await ada.control.call(JoinRequest("secret"))
        with pytest.raises(DeniedError):
            await ada.control.call(JoinRequest(">"))
        held = (await ada.control.call(MembershipsRequest())).memberships
    assert [each.pattern for each in held] == ["general", "team.backend"]


async def test_a_join_is_resumed_and_a_repeated_request_is_told_the_same_again(space: RealSpace) -> None:
    await space.add("ada")
    async with space.agent("ada") as ada:
        first = await ada.control.call(JoinRequest("general"), op="operation-1")
        again = await ada.control.call(JoinRequest("general"), op="operation-1")
        other = await ada.control.call(JoinRequest("general"), op="operation-2")
    assert (first.state, again.state, other.state) == ("opened", "opened", "resumed")
    assert first.seq == again.seq == other.seq


async def test_leaving_closes_one_pattern_and_says_what_still_covers_the_channel(space: RealSpace) -> None:
    await space.add("ada", read=["team.>"])
    async with space.agent("ada") as ada:
        for pattern in ("team.>", "team.backend"):
            await ada.control.call(JoinRequest(pattern))
        left = await ada.control.call(LeaveRequest("team.backend"))
        again = await ada.control.call(LeaveRequest("team.backend"))
        held = (await ada.control.call(MembershipsRequest())).memberships
    assert (left.state, left.still_covered_by, again.state) == ("left", ("team.>",), "absent")
    assert [each.pattern for each in held] == ["team.>"]


async def test_a_name_belongs_to_one_agent_at_a_time(space: RealSpace) -> None:
    """F31: a name is granted, and granted once."""
    await space.add("ada")
    with pytest.raises(NameTaken, match="agent ada exists"):
        await space.add("ada")


async def test_revocation_cuts_the_live_connection_and_voids_later_joins(space: RealSpace) -> None:
    await space.add("ada")
    async with space.agent("ada") as ada:
        await ada.control.call(JoinRequest("general"))
        creds = space.home.agent_creds("ada").read_text()
        async with space.administer() as admin:
            await admin.revoke("ada")
        await asyncio.wait_for(ada.closed.wait(), 2)
        space.home.agent_creds("ada").write_text(creds)
        space.home.agent_creds("ada").chmod(0o600)
        with pytest.raises((AuthRevoked, BrokerUnreachable)):
            async with space.agent("ada"):
                pass
        assert space.steward is not None
        table = space.steward.table
        assert table.members_at("general", table.head + 1) == frozenset()
        access = table.access_at(ada.id, table.head)
        assert access is not None
        assert access.revoked


async def test_narrowing_closes_memberships_and_replaces_the_credential(space: RealSpace) -> None:
    await space.add("ada", read=["general", "ops"])
    async with space.agent("ada") as ada:
        for pattern in ("general", "ops"):
            await ada.control.call(JoinRequest(pattern))
        async with space.administer() as admin:
            changed = await admin.set_access("ada", AgentFile("ada", read=("general",), post=("general",)))
        assert changed.closed == ["ops"]
        await asyncio.wait_for(ada.closed.wait(), 2)
    async with space.agent("ada") as ada:
        complaint = await ada.refused(lambda: ada.connection.subscribe(ada.subjects.live_chat("ops")))
        assert complaint is not None
        assert "permissions violation" in complaint
        held = (await ada.control.call(MembershipsRequest())).memberships
        assert [each.pattern for each in held] == ["general"]


async def test_widening_cuts_nobody_and_the_new_token_is_in_the_access_record(space: RealSpace) -> None:
    await space.add("ada", read=["general"])
    async with space.agent("ada") as ada:
        async with space.administer() as admin:
            changed = await admin.set_access("ada", AgentFile("ada", read=("general", "ops"), post=("general",)))
        access = (await ada.control.call(AccessRequest())).access
        assert access.jwt == changed.row.token
        assert not ada.closed.is_set()
        assert (await ada.control.call(JoinRequest("ops"))).state == "opened"


async def test_a_rotated_agent_keeps_its_name_and_channels_and_the_old_key_is_cut(space: RealSpace) -> None:
    before = await space.add("ada", read=["general", "ops"])
    async with space.agent("ada") as old:
        for pattern in ("general", "ops"):
            await old.control.call(JoinRequest(pattern))
        async with space.administer() as admin:
            after = await admin.rotate("ada")
        await asyncio.wait_for(old.closed.wait(), 2)
    assert after.row.id != before.row.id
    async with space.agent("ada") as new:
        held = (await new.control.call(MembershipsRequest())).memberships
    assert sorted(each.pattern for each in held) == ["general", "ops"]
    assert space.steward is not None
    assert space.steward.table.owner_named("ada") == after.row.id
    assert space.steward.table.members_at("general", space.steward.table.head + 1) == {after.row.id}


async def test_two_hundred_channels_fit_a_credential_and_too_many_are_refused_in_a_sentence(space: RealSpace) -> None:
    channels = [f"team{n}.project" for n in range(200)]
    await space.add("wide", read=channels, post=channels)
    async with space.agent("wide") as wide:
        assert (await wide.control.call(JoinRequest("team199.project"))).state == "opened"
    too_many = [f"team{n}.project" for n in range(2000)]
    with pytest.raises(UsageError, match="use fewer, wider patterns"):
        await space.add("wider", read=too_many, post=too_many)


async def test_channel_settings_change_only_for_those_who_manage_them(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob", manage=["general"])
    async with space.agent("ada") as ada, space.agent("bob") as bob:
        with pytest.raises(DeniedError, match="may not change settings"):
            await ada.control.call(ChangeChannelRequest("general", cls="live"))
        said = await bob.control.call(ChangeChannelRequest("general", description="talk", cls="live"))
        assert said.cls == "live"
        with pytest.raises(UsageError, match="channel set: unknown field 'colour'; it has channel, class"):
            await raw_call(bob.control, "channel", "set", channel="general", colour="red")
        info = await ada.control.call(ChannelRequest("general"))
        assert (info.cls, info.description, info.by) == ("live", "talk", bob.id)
