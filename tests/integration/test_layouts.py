"""A space made by an older version is brought to this one's accounts and credentials, and nothing of it is lost."""

import json
from pathlib import Path
from typing import Any

import pytest

from old_layouts import make_first
from terminal import Terminal
from tidings.admin.home import SpaceHome
from tidings.admin.layout import LAYOUT, migrate
from tidings.delivery.stream_reader import StreamLocation, StreamReader
from tidings.errors import AuthRevoked, BrokerUnreachable
from tidings.nats import jwt
from tidings.nats.client import connect
from tidings.server import grants, streams
from tidings.server.keyring import Keyring
from tidings.util import failpoints, private_files
from tidings_testing.real_space import RealSpace, real_space


async def let_in(space: RealSpace, creds: str) -> bool:
    _, key = jwt.split_credentials(creds)
    try:
        connection = await connect(space.info.url, creds, key.id, name="test", reconnect=False)
    except (AuthRevoked, BrokerUnreachable):
        return False
    await connection.close()
    return True


def read_log(space: RealSpace) -> list[bytes]:
    """Every payload of the log, read with the pipeline's credential."""
    reader = StreamReader(StreamLocation(space.info.url, str(space.home.pipeline_creds), space.subjects.log_stream))
    try:
        return [record.payload for record in reader.read(1, reader.state().last) if hasattr(record, "payload")]
    finally:
        reader.close()


async def used(space: RealSpace) -> tuple[str, list[bytes]]:
    """Two agents, one of them revoked; a message. Answers the credential that was cut, and the log."""
    await space.add("ada")
    await space.add("mal")
    cut = space.home.agent_creds("mal").read_text()
    async with space.agent("ada") as ada:
        await ada.post("general", b'{"said":"before"}')
    async with space.administer() as admin:
        await admin.revoke("mal")
    return cut, read_log(space)


async def test_a_space_of_the_first_layout_is_migrated_and_nothing_of_it_is_lost(space: RealSpace) -> None:
    cut, log = await used(space)
    await space.stop_steward()
    space.broker.stop()
    make_first(space.home)
    space.broker.start()
    older = {name: (space.home.creds / f"{name}.creds").read_text() for name in ("steward", "pipeline")}
    assert [await let_in(space, each) for each in (*older.values(), cut)] == [True, True, False], "it is a whole space"
    assert read_log(space)[: len(log)] == log

    space.broker.stop()
    assert space.home.read_info().layout == 1
    done = migrate(space.home)
    assert done is not None
    assert f"from layout 1 to {LAYOUT}" in done
    assert migrate(space.home) is None, "once per layout"

    space.broker.start()
    assert [await let_in(space, each) for each in (*older.values(), cut)] == [False, False, False]
    async with space.administer() as admin:
        await admin.provision()
    await space.start_steward()
    assert read_log(space)[: len(log)] == log
    token, _ = jwt.split_credentials(space.home.pipeline_creds.read_text())
    assert jwt.decode(token)["iss"] == Keyring.load(space.home.keys).pipe.id
    token, _ = jwt.split_credentials(space.home.link_creds.read_text())
    assert jwt.decode(token)["iss"] == space.home.read_info().link_account == Keyring.load(space.home.keys).link.id
    assert await let_in(space, space.home.link_creds.read_text())
    async with space.agent("ada") as ada:
        assert (await ada.post("general", b'{"said":"after"}'))["seq"] > len(log)
    async with space.administer() as admin:
        assert await admin.reconcile() == []


async def test_a_migration_that_is_interrupted_anywhere_is_done_again_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with real_space(tmp_path / "home", steward=False) as space:
        space.broker.stop()
        make_first(space.home)
        older = space.home.pipeline_creds.read_text()
        _strike_at_every_write(space.home, monkeypatch)
        space.broker.start()
        assert not await let_in(space, older)
        for role in ("steward", "pipeline"):
            assert await let_in(space, (space.home.creds / f"{role}.creds").read_text())


def _strike_at_every_write(home: SpaceHome, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the migration die after its first write, then after its second, until it comes through."""
    real, allowed, left = private_files.write_private, 0, 0

    def write(path: Path, text: str) -> None:
        nonlocal left
        if left == 0:
            raise failpoints.FailpointRaised(str(path))
        left -= 1
        real(path, text)

    for module in ("admin.layout", "admin.home", "server.keyring", "server.resolver"):
        monkeypatch.setattr(f"tidings.{module}.write_private", write)
    while home.read_info().layout < LAYOUT:
        left = allowed
        try:
            migrate(home)
        except failpoints.FailpointRaised:
            allowed += 1
    assert allowed > 5
    monkeypatch.undo()


async def test_agents_get_credentials_with_other_rights_and_stay_who_they_are(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (await space.add("ada")).row
    narrow = grants.agent_permissions

    def wider(s: Any, agent_id: str, read: Any, post: Any, **how: Any) -> jwt.Permissions:
        given = narrow(s, agent_id, read, post, **how)
        return jwt.Permissions(given.publish, [*given.subscribe, f"{s.root}.live.via.>"])

    monkeypatch.setattr(grants, "agent_permissions", wider)
    monkeypatch.setattr(grants, "AGENT_RIGHTS", grants.AGENT_RIGHTS + 1)
    async with space.administer() as admin:
        assert len(await admin.reconcile()) == 1
        assert await admin.reconcile() == []
        row = admin.ledger.get(before.id)
    assert row is not None
    assert (row.state, row.read, row.post, row.void_until) == ("active", before.read, before.post, 0)
    async with space.agent("ada") as ada:
        assert ada.id == before.id
        subject = f"{space.subjects.root}.live.via.>"
        assert await ada.refused(lambda: ada.connection.subscribe(subject), within=0.2) is None
    assert await let_in(space, jwt.credentials(before.token, ada.key)), "the older one is not cut"


async def test_a_space_from_before_sealed_blocks_gets_their_stream_and_its_agents_the_right_to_ask(
    tmp_path: Path,
) -> None:
    with pytest.MonkeyPatch.context() as before:
        _without_blocks(before)
        async with real_space(tmp_path / "home", steward=False) as space:
            assert "BLK_main" not in await _streams(space)
            await space.start_steward()
            older = (await space.add("ada")).row
            await space.stop_steward()
            space.broker.stop()
            space.home.update_info(layout=3)

            before.undo()
            assert f"from layout 3 to {LAYOUT}" in (migrate(space.home) or "")
            space.broker.start()
            async with space.administer() as admin:
                assert await admin.provision() == ["BLK_main created"]
            await space.start_steward()
            name, s = "a" * 40, space.subjects
            async with space.core() as js:
                await js.publish(s.block(name), b"sealed")
            async with space.agent("ada") as ada:
                refused = await ada.refused(lambda: ada.connection.publish(s.block_get(name), b""), within=2)
                assert refused is not None, "its token is from before"
            async with space.administer() as admin:
                assert await admin.reconcile() == ["gave ada a credential with the rights of this version"]
                assert await admin.reconcile() == []
            async with space.agent("ada") as ada:
                assert ada.id == older.id
                assert (await ada.connection.request(s.block_get(name), timeout=5)).data == b"sealed"


async def _streams(space: RealSpace) -> list[str]:
    async with space.core() as js:
        return list((await js.api("STREAM.NAMES"))["streams"])


def _without_blocks(patch: pytest.MonkeyPatch) -> None:
    """Grants and streams as they were in layout 3, with the rights of agents numbered 2."""
    services, permissions, specs = grants.service_subjects, grants.agent_permissions, streams.stream_specs

    def without(s: Any) -> dict[str, int]:
        return {subject: after for subject, after in services(s).items() if subject != grants.block_get(s)}

    def narrower(s: Any, *given: Any, **how: Any) -> jwt.Permissions:
        made = permissions(s, *given, **how)
        return jwt.Permissions([each for each in made.publish if each != grants.block_get(s)], made.subscribe)

    def fewer(s: Any, *given: Any) -> list[streams.StreamSpec]:
        return [each for each in specs(s, *given) if each.name != s.block_stream]

    patch.setattr(grants, "service_subjects", without)
    patch.setattr(grants, "agents_mappings", lambda _s: {})
    patch.setattr(grants, "agent_permissions", narrower)
    patch.setattr(grants, "AGENT_RIGHTS", 2)
    patch.setattr(streams, "stream_specs", fewer)


def test_up_brings_an_older_space_here_and_says_so(terminal: Terminal) -> None:
    assert terminal.run("up", "--detach").returncode == 0
    assert terminal.run("send", "general", "before").returncode == 0
    assert terminal.run("down").returncode == 0
    make_first(terminal.home)
    refused = terminal.run("agent", "add", "ada")
    assert refused.returncode == 2
    assert "`tidings up --space main` brings it here; nothing is lost" in refused.stderr
    up = terminal.run("up", "--detach")
    assert up.returncode == 0, up.stderr
    assert f"from layout 1 to {LAYOUT}" in (terminal.home.logs / "up.log").read_text()
    assert terminal.run("send", "general", "after").returncode == 0
    told = [json.loads(line)["text"] for line in terminal.run("history", "general", "--json").stdout.splitlines()]
    assert told == ["before", "after"]
    assert terminal.run("status").returncode == 0
    assert terminal.run("pipeline", "status", "--json").returncode in (0, 3), "its credential reads the log"
