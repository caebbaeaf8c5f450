"""What a fresh look at administration found, each as a test."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tidings.admin.agents import AgentFile
from tidings.admin.identity import ensure_agent
from tidings.contract.agents import HealthRequest
from tidings.contract.channels import JoinRequest
from tidings.errors import AuthRevoked, LogFull, UnreachableError
from tidings.nats.errors import NO_ROOM, ApiError
from tidings.steward.marks import KEPT, LogMark, thinned
from tidings_testing.real_space import TEST_INTERVALS, RealSpace, real_space


async def test_adding_an_agent_while_the_space_is_down_leaves_nothing_behind(space: RealSpace) -> None:
    async def refused() -> None:
        with pytest.raises(UnreachableError, match="agent ada was not added"):
            await space.add("ada")
        async with space.administer() as admin:
            assert (admin.ledger.rows(), admin.ledger.unfinished()) == ([], [])
        assert not space.home.agent_creds("ada").exists()
        assert not (space.home.agents / "ada.md").exists()

    await space.stop_steward()
    await refused()
    space.broker.stop()
    await refused()
    space.broker.start()
    await space.start_steward()
    assert (await space.add("ada")).created


async def test_an_agent_may_be_called_steward_and_the_steward_stays_who_it_is(space: RealSpace) -> None:
    before = (space.home.creds / "steward.creds").read_text()
    await space.add("steward")
    assert (space.home.creds / "steward.creds").read_text() == before
    await space.stop_steward()
    await space.start_steward()


async def test_access_changes_without_the_key_at_hand_and_nothing_is_undone(space: RealSpace) -> None:
    """An exported agent's key may be elsewhere; its change is completed, and no later operation revokes it."""
    await space.add("ada", read=["general", "ops"])
    space.home.agent_creds("ada").unlink()
    async with space.administer() as admin:
        await admin.set_access("ada", AgentFile("ada", read=("general", "ops", "team.>"), post=("general",)))
        assert await admin.finish() == []
        row = admin.ledger.active("ada")
    assert row is not None
    assert row.state == "active"


async def test_revoking_after_an_interrupted_rotation_cuts_both_keys(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await space.add("ada")
    old = space.home.agent_creds("ada").read_text()
    async with space.administer() as admin:
        monkeypatch.setattr(admin, "cut", _killed)
        with pytest.raises(RuntimeError, match="killed"):
            await admin.rotate("ada")
    new = space.home.agent_creds("ada").read_text()
    async with space.administer() as admin:
        await admin.revoke("ada")
        assert admin.ledger.living("ada") == []
    for creds in (old, new):
        space.home.agent_creds("ada").write_text(creds)
        space.home.agent_creds("ada").chmod(0o600)
        with pytest.raises(AuthRevoked):
            async with space.agent("ada"):
                pass


async def _killed(*_arguments: Any) -> None:
    raise RuntimeError("killed")


async def test_a_rotated_agent_has_what_was_granted_whatever_its_file_says(space: RealSpace) -> None:
    await space.add("ada", read=["general"])
    path = space.home.agents / "ada.md"
    path.write_text(path.read_text().replace("- general", "- '>'"))
    async with space.administer() as admin:
        rotated = await admin.rotate("ada")
        assert rotated.row.read == ("general",)
        path.unlink()
        assert (await admin.rotate("ada")).row.read == ("general",)


async def test_a_revoked_name_does_not_provision_itself_again_in_an_open_space(tmp_path: Path) -> None:
    async with real_space(tmp_path / "home", open_space=True) as space:
        assert await ensure_agent(space.home, "ada") is True
        assert await ensure_agent(space.home, "ada") is False
        async with space.administer() as admin:
            await admin.revoke("ada")
        with pytest.raises(AuthRevoked, match="was revoked"):
            await ensure_agent(space.home, "ada")


async def test_a_reserve_that_is_used_up_is_said_at_once(space: RealSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    await space.add("ada")
    assert space.steward is not None
    calls = 0

    async def no_room(subject: str, *_arguments: Any, **_options: Any) -> int:
        nonlocal calls
        calls += 1
        raise ApiError(subject, {"err_code": NO_ROOM, "description": "maximum bytes exceeded"})

    async with space.agent("ada") as ada:
        with monkeypatch.context() as patched:
            patched.setattr(space.steward.js, "publish", no_room)
            with pytest.raises(LogFull, match="reserve"):
                await ada.control.call(JoinRequest("general"))
            writes = calls
        assert 2 <= writes <= 20, "the write and one more after the gate was closed, beside the steward's own beats"


async def test_a_revocation_while_the_space_is_down_holds_from_its_first_moment(tmp_path: Path) -> None:
    async with real_space(tmp_path / "home") as space:
        await space.add("ada")
        creds = space.home.agent_creds("ada").read_text()
        await space.stop_steward()
        space.broker.stop()
        async with space.administer() as admin:
            await admin.revoke("ada")
        space.broker.start()
        space.home.agent_creds("ada").write_text(creds)
        space.home.agent_creds("ada").chmod(0o600)
        with pytest.raises(AuthRevoked):
            async with space.agent("ada"):
                pass


def test_marks_thin_out_but_reach_back_to_the_first() -> None:
    marks: list[LogMark] = []
    for seq in range(1, 20_001):
        marks = thinned([*marks, LogMark(seq, seq, "s")])
    assert len(marks) <= KEPT
    assert (marks[0].seq, marks[-1].seq) == (1, 20_000)
    assert [mark.seq for mark in marks] == sorted({mark.seq for mark in marks})
    assert json.dumps([mark.seq for mark in marks[-100:]]) == json.dumps(list(range(19_901, 20_001)))


async def test_a_successor_keeps_its_channels_when_the_log_went_back_to_before_the_rotation(tmp_path: Path) -> None:
    async with real_space(tmp_path / "home") as space:
        await space.add("ada")
        async with space.agent("ada") as ada:
            await ada.control.call(JoinRequest("general"))
        await space.stop_steward()
        space.broker.stop()
        shutil.copytree(space.home.store, tmp_path / "older")
        space.broker.start()
        await space.start_steward()
        async with space.administer() as admin:
            rotated = await admin.rotate("ada")
        await space.stop_steward()
        space.broker.stop()
        shutil.rmtree(space.home.store)
        shutil.copytree(tmp_path / "older", space.home.store)
        space.broker.start()
        steward = await space.start_steward()
        async with space.administer() as admin:
            await admin.reconcile()
            row = admin.ledger.get(rotated.row.id)
        assert steward.table.members_at("general", steward.table.head + 1) == {rotated.row.id}
        assert row is not None
        assert (row.state, row.succeeds) == ("active", rotated.row.succeeds)


async def test_how_a_space_is_is_told_by_a_write_that_is_read_back(space: RealSpace) -> None:
    """A log that grows stores; one that does not is written to when somebody asks, now and then."""
    await space.add("ada")
    await space.stop_steward()
    steward = await space.start_steward(replace(TEST_INTERVALS, log_write=0.0))
    async with space.agent("ada") as ada, space.core() as js:
        first = await ada.control.call(HealthRequest())
        again = await ada.control.call(HealthRequest())
        assert (first.healthy, again.healthy, again.log_head) == (True, True, first.log_head + 1)
        stored = await js.last("KV_td_state_main", "$KV.td_state_main.probe")
        assert stored is not None
        lease = await js.last("LOG_main", space.subjects.steward_lease)
        assert lease is not None
        assert lease.seq == steward.lease.seq
