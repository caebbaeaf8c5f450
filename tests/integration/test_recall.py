"""What was taken from an agent stays taken when an older copy of its space is put back."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tidings.admin import recall
from tidings.admin.agents import AgentFile, Issued, Ledger
from tidings.admin.home import SpaceHome
from tidings.admin.recall import is_older
from tidings.contract.admin import AcknowledgeRequest
from tidings.contract.agents import AccessRequest, HealthRequest
from tidings.errors import AuthRevoked
from tidings.nats import jwt
from tidings.util.private_files import write_private
from tidings_testing.real_space import RealSpace, real_space


class Backup:
    """The folder of a space, copied and put back as docs/operations.md says: while nothing runs."""

    def __init__(self, space: RealSpace, folder: Path) -> None:
        self.space = space
        self.folder = folder

    async def take(self) -> None:
        await self.space.stop_steward()
        self.space.broker.stop()
        shutil.copytree(self.space.home.root, self.folder)
        self.space.broker.start()
        await self.space.start_steward()

    async def put_back(self) -> None:
        await self.space.stop_steward()
        self.space.broker.stop()
        shutil.rmtree(self.space.home.root)
        shutil.copytree(self.folder, self.space.home.root)


@pytest.fixture
def backup(space: RealSpace, tmp_path: Path) -> Backup:
    return Backup(space, tmp_path / "copy")


def row_of(space: RealSpace, agent_id: str) -> Issued:
    row = Ledger(space.home.issued).get(agent_id)
    assert row is not None
    return row


def said(space: RealSpace) -> list[str]:
    return recall.problems(space.home, space.info.id)


async def start(space: RealSpace) -> list[str]:
    """As `tidings up` does it; answers what the administrator wrote again."""
    async with space.administer() as admin:
        await admin.push_revocations()
    space.broker.start()
    await space.start_steward()
    async with space.administer() as admin:
        return await admin.reconcile()


async def test_a_revocation_after_the_copy_holds_before_a_broker_serves_the_copy(
    space: RealSpace, backup: Backup
) -> None:
    rex = (await space.add("rex")).row.id
    creds = space.home.agent_creds("rex").read_text()
    await backup.take()
    async with space.administer() as admin:
        await admin.revoke("rex")
    await backup.put_back()
    assert row_of(space, rex).state == "active", "the copy knows nothing of it"
    async with space.administer():
        pass
    served = jwt.decode((space.home.resolver / f"{space.info.agents_account}.jwt").read_text())
    assert rex in served["nats"]["revocations"]
    assert not space.home.agent_creds("rex").exists()
    assert await start(space) == ["wrote the revocation of rex again: the log had lost it"]
    write_private(space.home.agent_creds("rex"), creds)
    with pytest.raises(AuthRevoked):
        async with space.agent("rex"):
            pass


async def test_what_was_withheld_or_barred_after_the_copy_stays_so_and_is_said(
    space: RealSpace, backup: Backup
) -> None:
    dan, eve = (await space.add("dan")).row.id, (await space.add("eve")).row.id
    await backup.take()
    async with space.administer() as admin:
        await admin.withhold(dan, "for flooding")
        await admin.bar(eve, "for flooding")
    await backup.put_back()
    assert len(await start(space)) == 2
    assert (row_of(space, dan).withheld, row_of(space, eve).barred) == ("for flooding", True)
    (problem,) = said(space)
    assert "dan may not post, as was decided since; eve may not post, as was decided since" in problem
    async with space.agent("dan") as agent:  # with the credential of the copy, brought up to date
        assert (await agent.control.call(AccessRequest())).access.post == ()
        health = await agent.control.call(HealthRequest())
        assert problem in health.problems
    with pytest.raises(AuthRevoked):
        async with space.agent("eve"):
            pass
    async with space.administer() as admin:
        await admin.call(AcknowledgeRequest())
    assert said(space) == []


async def test_a_space_of_which_nothing_is_remembered_works_and_what_it_took_is_remembered(
    space: RealSpace, backup: Backup
) -> None:
    rex, bob = (await space.add("rex")).row.id, (await space.add("bob")).row.id
    await backup.take()
    async with space.administer() as admin:
        await admin.revoke("rex")
    shutil.rmtree(space.home.remembered)  # an older version, or another machine
    async with space.administer():
        pass
    kept = space.home.remembered / space.info.id
    assert [path.stem for path in kept.iterdir()] == [rex]
    assert {path.stat().st_mode & 0o777 for path in kept.iterdir()} == {0o600}
    assert said(space) == []
    await backup.put_back()
    await start(space)
    assert (row_of(space, rex).state, row_of(space, bob).state) == ("revoked", "active")


async def test_a_change_that_was_killed_between_its_two_writes_is_no_copy_that_was_put_back(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    rex = (await space.add("rex")).row.id
    async with space.administer() as admin:
        with monkeypatch.context() as patched:
            patched.setattr("tidings.admin.agents.private_dir", _killed)
            with pytest.raises(RuntimeError, match="killed"):
                await admin.revoke("rex")
    async with space.administer() as admin:
        assert await admin.finish() == ["finished the revocation of rex"]
    assert said(space) == []
    kept = Ledger(space.home.remembered / space.info.id).get(rex)
    assert kept == row_of(space, rex)


def _killed(_path: Path) -> Path:
    raise RuntimeError("killed")


async def test_a_memory_that_cannot_be_read_is_put_aside_and_the_space_works(space: RealSpace) -> None:
    rex = (await space.add("rex")).row.id
    kept = space.home.remembered / space.info.id
    write_private(kept / f"{rex}.json", "{")
    async with space.administer() as admin:
        await admin.set_access("rex", AgentFile("rex", read=("general", "ops"), post=("general",)))
    assert len(list(kept.glob(f"{rex}.json.damaged-*"))) == 1
    assert Ledger(kept).get(rex) == row_of(space, rex)


async def test_another_space_of_the_same_name_ignores_what_is_remembered_and_removing_one_removes_it(
    tmp_path: Path,
) -> None:
    home = SpaceHome(tmp_path / "home", "main")
    async with real_space(home.home) as first:
        await first.add("rex")
        async with first.administer() as admin:
            await admin.revoke("rex")
    shutil.rmtree(home.root)
    async with real_space(home.home) as second:
        assert second.info.id != first.info.id
        assert (await second.add("rex")).created
        assert (second.info.id, said(second)) == (home.read_info().id, [])
        recall.note_recalled(home, second.info.id, ["rex stays revoked"])
        assert recall.problems(home, first.info.id) == []
    home.remove()
    assert list(home.marks.parent.iterdir()) == []


def test_of_two_states_of_a_key_the_later_holds_and_a_cut_always() -> None:
    now = Issued("U1", "rex", "active", "op", iat=100, version=3)
    assert is_older(None, now)
    assert not is_older(now, now)
    assert is_older(now, replace(now, version=4))
    assert is_older(now, replace(now, version=0, iat=200)), "written by a version that did not count"
    assert is_older(now, replace(now, version=1, state="revoked")), "no key comes back"
    assert not is_older(replace(now, version=1, state="revoked"), now)
