"""New keys for the roles of a space and for its authority, while agents go on."""

import asyncio
import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inviting import attend
from tidings.admin.accepting import accept
from tidings.admin.administration import Administrator
from tidings.admin.agents import AgentFile, Ledger
from tidings.admin.creation import create_space
from tidings.admin.home import SpaceHome
from tidings.admin.invitations import Invitation
from tidings.admin.inviting import Inviter, reach_of
from tidings.admin.listening import announce_authority, change_authority, listen_on
from tidings.admin.rotation import recall_voided, rotate_pipeline, rotate_steward
from tidings.client.connect import connect_directly
from tidings.contract.admin import IssuedAnswer, IssuedRequest
from tidings.contract.agents import HealthRequest
from tidings.errors import AuthRevoked, ConfigError, UnreachableError, UntrustedServer, UsageError
from tidings.nats import jwt
from tidings.nats.client import connect
from tidings.server.certificates import is_pair
from tidings.supervisor import supervisor as supervising
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually

HERE = "127.0.0.2"


async def lets_in(space: RealSpace, creds: str) -> bool:
    try:
        found = await connect(space.info.url, creds, jwt.split_credentials(creds)[1].id, name="try", reconnect=False)
    except AuthRevoked:
        return False
    await found.close()
    return True


async def test_the_pipelines_old_credential_is_cut_and_the_new_one_is_let_in(space: RealSpace) -> None:
    path = space.home.pipeline_creds
    before, cut = path.read_text(), asyncio.Event()
    held = await connect(
        space.info.url, path, jwt.split_credentials(before)[1].id, name="old", reconnect=False, on_closed=cut.set
    )
    async with space.administer() as admin:
        made = await rotate_pipeline(admin)
    await asyncio.wait_for(cut.wait(), 10)
    await held.close()
    assert jwt.split_credentials(path.read_text())[1].id == made
    assert (await lets_in(space, before), await lets_in(space, path.read_text())) == (False, True)
    await space.restart_broker()
    assert (await lets_in(space, before), await lets_in(space, path.read_text())) == (False, True)


async def test_the_stewards_keys_are_new_and_the_next_steward_serves_with_them(space: RealSpace) -> None:
    await space.add("ada")
    creds = space.home.creds / "steward.creds"
    before = creds.read_text()
    async with space.administer() as admin:
        said = await rotate_steward(admin)
    assert isinstance(await space.steward_ended(), UnreachableError), "its credential is void: it ends, to start again"
    assert await lets_in(space, before) is False
    steward = await space.start_steward()
    assert steward.table.steward_key == said.steward_key
    async with space.agent("ada") as ada:
        assert (await ada.control.call(HealthRequest())).healthy


# --- credentials that end ---


async def test_a_credential_that_ends_is_renewed_before_and_its_agent_goes_on(space: RealSpace, tmp_path: Path) -> None:
    async with space.administer() as admin:
        for name in ("ada", "bob"):
            await admin.add(AgentFile(name, read=("general",), post=("general",)), lifetime=6)
        assert admin.ledger.due(time.time()) == []
        ended = admin.ledger.rows()[0].iat + 6
        ada, bob = (bundle(space, name, tmp_path) for name in ("ada", "bob"))
        async with connect_directly("main", bundle=ada) as agent:
            await eventually(lambda: len(admin.ledger.due(time.time())) == 2)
            assert sorted(await admin.renew()) == ["ada", "bob"]
            assert admin.ledger.due(time.time()) == []
            first = jwt.decode(jwt.split_credentials(json.loads(bob.read_text())["creds"])[0])
            await eventually(lambda: time.time() > first["exp"] + 1)
            await agent.send("general", "still here")
            assert time.time() > ended
            token = jwt.decode(jwt.split_credentials(json.loads(ada.read_text())["creds"])[0])
            assert token["exp"] == token["iat"] + 6
        with pytest.raises(AuthRevoked):
            async with connect_directly("main", bundle=bob):
                pass
        await admin.set_access("ada", AgentFile("ada", read=("general",), post=("general",)), lifetime=0)
        row = admin.ledger.active("ada")
        assert row is not None
        assert "exp" not in jwt.decode(row.token)


async def test_a_supervisor_has_renewed_what_ends_before_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, space: RealSpace
) -> None:
    monkeypatch.setattr(supervising, "LOOK_AT_CREDENTIALS", 0.05)
    async with space.administer() as admin:
        await admin.add(AgentFile("ada", read=("general",), post=("general",)), lifetime=2)
        before = admin.ledger.rows()[0]
    supervisor = supervising.Supervisor(space.home, supervising.UpOptions(person="me"))
    watching = asyncio.create_task(supervisor._watch_credentials())
    try:
        await eventually(lambda: Ledger(space.home.issued).rows()[0].iat > before.iat, within=30)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


# --- the authority ---


@pytest.fixture
async def listening(tmp_path: Path) -> AsyncIterator[RealSpace]:
    async with real_space(tmp_path / "home", listen=HERE) as space:
        for name in ("ada", "bob"):
            await space.add(name)
        yield space


def bundle(space: RealSpace, name: str, folder: Path) -> Path:
    path = folder / f"{name}.json"
    creds = space.home.agent_creds(name).read_text()
    agent = {"name": name, "id": jwt.split_credentials(creds)[1].id}
    info = space.info
    anchors = {"space_id": info.id, "steward_key": info.steward_key, "url": info.url}
    path.write_text(json.dumps({"tidings": 1, "space": info.name, **anchors, "agent": agent, "creds": creds}))
    path.chmod(0o600)
    return path


async def test_whoever_connected_since_it_was_announced_trusts_the_other_authority(
    listening: RealSpace, tmp_path: Path
) -> None:
    space = listening
    ada, bob = (bundle(space, name, tmp_path) for name in ("ada", "bob"))
    before = ada.read_text()
    async with connect_directly("main", bundle=ada) as agent:
        await agent.send("general", "before")
        announced = announce_authority(space.home)
        assert announce_authority(space.home) == announced, "announced once"
    async with connect_directly("main", bundle=ada) as agent:
        await eventually(lambda: ada.read_text() != before)
        assert announced.authority != announced.authority_next
        await agent.send("general", "both are trusted")
    finished = change_authority(space.home)
    assert (finished.authority, finished.authority_next) == (announced.authority_next, "")
    space.broker.reload()

    async def is_shown() -> bool:
        try:
            async with connect_directly("main", bundle=bob):
                return False
        except UntrustedServer:
            return True

    await eventually(is_shown, within=20)
    async with connect_directly("main", bundle=ada) as agent:
        await agent.send("general", "after")
    here = connect_directly("main", name="bob", home=space.home.home)
    async with here as agent:
        assert [each.text for each in await agent.history("general")][:1] == ["after"]
    await space.restart_broker()
    async with connect_directly("main", bundle=ada) as agent:
        await agent.send("general", "after a restart")


async def test_who_is_connected_learns_of_it_without_coming_back(
    listening: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidings.client.remote_changes.ASK_AGAIN", 0.2)
    ada = bundle(listening, "ada", tmp_path)
    async with connect_directly("main", bundle=ada):
        before = ada.read_text()
        announce_authority(listening.home)
        await eventually(lambda: ada.read_text() != before, within=20)


@pytest.mark.parametrize("interrupted", ["after the swap", "after the key", "after the certificates"])
def test_a_change_of_authority_that_was_interrupted_is_finished_by_the_same_again(
    tmp_path: Path, interrupted: str
) -> None:
    home = SpaceHome(tmp_path, "main")
    create_space(home, port=None, open_space=False, budget=10**8)
    with pytest.raises(UsageError, match="not its own authority"):
        announce_authority(home)
    listen_on(home, HERE)
    with pytest.raises(UsageError, match="there is no other authority yet"):
        change_authority(home)
    announced = announce_authority(home)
    files = home.certificates
    before, following = announced.authority, announced.authority_next
    home.update_info(authority=following, authority_next=before)
    if interrupted == "after the key":
        files.following.authority_key.replace(files.authority_key)
    if interrupted == "after the certificates":
        assert listen_on(home, None).authority == following, "also by the next start"
    assert base64.b64decode(before) in home.read_info().trusted, "until then both are"
    finished = change_authority(home)
    assert (finished.authority, finished.authority_next) == (following, "")
    assert is_pair(files.authority, files.authority_key)
    assert is_pair(files.server, files.server_key)
    assert listen_on(home, None).authority == finished.authority


def test_another_authority_than_the_trusted_one_is_never_taken_up(tmp_path: Path) -> None:
    home = SpaceHome(tmp_path, "main")
    create_space(home, port=None, open_space=False, budget=10**8)
    listen_on(home, HERE)
    copy = tmp_path / "copy"
    shutil.copytree(home.certificates.folder, copy)
    announce_authority(home)
    change_authority(home)
    trusted = home.read_info().authority
    shutil.rmtree(home.certificates.folder)
    shutil.copytree(copy, home.certificates.folder)
    with pytest.raises(ConfigError, match="another authority than the one that every bundle trusts"):
        listen_on(home, None)
    assert home.read_info().authority == trusted


async def test_the_steward_comes_back_and_invites_after_the_authority_is_another(
    listening: RealSpace, tmp_path: Path
) -> None:
    attend(listening)
    announce_authority(listening.home)
    async with listening.administer() as admin:
        made = Invitation(id="", issued=0, expires=0, name="early", read=("general",), post=("general",))
        _, early = Inviter(admin).invite(made, 3_600, reach_of(admin, None))
    there = SpaceHome(tmp_path / "there", "main")
    await accept(there, early, "")
    await asyncio.to_thread(change_authority, listening.home)  # an administrator may still hold the lock
    await listening.restart_broker()
    assert listening.steward is not None
    async with listening.administer() as admin:
        assert (await eventually_asked(admin)).found == {}
        made = Invitation(id="", issued=0, expires=0, name="late", read=("general",), post=("general",))
        _, late = Inviter(admin).invite(made, 3_600, reach_of(admin, None))
    await accept(SpaceHome(tmp_path / "late", "main"), late, "")
    async with connect_directly("main", name="early", home=there.home) as agent:
        await agent.send("general", "it learned of both when it accepted")


async def eventually_asked(admin: Administrator) -> IssuedAnswer:
    for _ in range(100):
        try:
            return await admin.call(IssuedRequest())
        except UnreachableError:
            await asyncio.sleep(0.1)
    raise AssertionError("the steward did not come back")


async def test_an_old_credential_of_a_role_stays_void_when_a_copy_is_put_back(space: RealSpace, tmp_path: Path) -> None:
    kept = [space.home.keys, space.home.creds, space.home.resolver]
    for folder in kept:
        shutil.copytree(folder, tmp_path / "copy" / folder.name)
    before = space.home.pipeline_creds.read_text()
    async with space.administer() as admin:
        await rotate_pipeline(admin)
    await space.stop_steward()
    space.broker.stop()
    for folder in kept:
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "copy" / folder.name, folder)
    async with space.administer() as admin:  # as `tidings up` does it
        said = await recall_voided(admin)
    assert said == ["the pipeline has a new credential: the one in the copy was void"]
    space.broker.start()
    assert (await lets_in(space, before), await lets_in(space, space.home.pipeline_creds.read_text())) == (False, True)
    async with space.administer() as admin:
        assert await recall_voided(admin) == []


@pytest.mark.parametrize("point", ["rotate_role.after_void", "rotate_role.after_creds"])
async def test_a_rotation_that_is_killed_is_finished_by_the_same_again(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    before = space.home.pipeline_creds.read_text()
    command = [sys.executable, "-m", "tidings.cli", "keys", "rotate", "pipeline", "--home", str(space.home.home)]
    armed = {**os.environ, "TIDINGS_FAILPOINT": f"{point}:kill"}
    killed = await asyncio.to_thread(subprocess.run, command, env=armed, capture_output=True, check=False)
    assert killed.returncode == -9
    again = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)
    assert again.returncode == 0, again
    assert (await lets_in(space, before), await lets_in(space, space.home.pipeline_creds.read_text())) == (False, True)


async def test_a_shorter_life_voids_the_credential_that_had_a_longer_one(space: RealSpace) -> None:
    await space.add("ada")
    before = space.home.agent_creds("ada").read_text()
    async with space.administer() as admin:
        await admin.set_access("ada", AgentFile("ada", read=("general",), post=("general",)), lifetime=3_600)
    assert await lets_in(space, before) is False
    assert await lets_in(space, space.home.agent_creds("ada").read_text()) is True


async def test_a_file_that_people_broke_keeps_nobodys_credential_from_being_renewed(space: RealSpace) -> None:
    async with space.administer() as admin:
        for name in ("ada", "bob"):
            await admin.add(AgentFile(name, read=("general",), post=("general",)), lifetime=2)
        (space.home.agents / "ada.md").write_text("no front matter")
        await eventually(lambda: len(admin.ledger.due(time.time())) == 2)
        assert sorted(await admin.renew()) == ["ada", "bob"]
