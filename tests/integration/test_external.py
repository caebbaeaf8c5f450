"""A space on a NATS that others run: what must be added is said, what lacks is named, no tenant gets in."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from administrator import Administrator, administered
from inviting import attend
from tidings.admin.accepting import accept
from tidings.admin.agents import AgentFile
from tidings.admin.creation import create_space
from tidings.admin.external import SHORT_LIVED, describe, live_on, missing_line
from tidings.admin.home import SpaceHome, SpaceInfo
from tidings.admin.invitations import Invitation
from tidings.admin.inviting import Inviter, reach_of
from tidings.admin.pushing import problems, push_to_all, system_user
from tidings.client.connect import connect_directly
from tidings.contract.admin import AcknowledgeRequest
from tidings.errors import AuthRevoked, BrokerUnreachable, ConfigError, TidingsError, UnreachableError, UsageError
from tidings.nats import jwt
from tidings.nats.client import Connection
from tidings.nats.errors import NatsError
from tidings.server import grants
from tidings.server.keyring import Keyring
from tidings.supervisor.keepers import TokenKeeper
from tidings.util.private_files import write_private
from tidings.wire.invitations import parse_invitation
from tidings_testing.real_space import RealSpace, _provisioned
from tidings_testing.waiting import eventually

pytestmark = pytest.mark.timeout(120)
BUDGET = 64 * 1024 * 1024


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Administrator]:
    """Their three servers. Spaces have names of their own there."""
    with administered(tmp_path_factory.mktemp("theirs")) as administrator:
        yield administrator


def new_space(
    root: Path, name: str, administrator: Administrator, *, signing: bool = True
) -> tuple[SpaceHome, SpaceInfo]:
    home = SpaceHome(root, name)
    info = create_space(home, port=4222, open_space=False, budget=BUDGET)
    keyring = Keyring.load(home.keys)
    pushed = (info.agents_account, keyring.invite.id, keyring.link.id)
    keys = administrator.keys_for(*pushed) if signing else None
    info = live_on(home, administrator.url, operator_key=keys)
    describe(home, Keyring.load(home.keys), info)
    return home, info


async def lacks(home: SpaceHome) -> str | None:
    """What is missing; a cluster that just started has nobody yet who leads."""
    for _ in range(60):
        try:
            return await missing_line(home, Keyring.load(home.keys))
        except TidingsError as error:
            last = error
            await asyncio.sleep(0.3)
    raise last


@asynccontextmanager
async def running(home: SpaceHome, administrator: Administrator) -> AsyncIterator[RealSpace]:
    space = RealSpace(home, home.read_info(), administrator.cluster.nodes[0], administrator.cluster)
    async with space.administer() as admin:
        await _provisioned(admin, patient=True)
    await space.start_steward()
    try:
        yield space
    finally:
        await space.stop_steward()


async def test_what_is_not_there_is_named_one_after_the_other_until_nothing_is(
    tmp_path: Path, three: Administrator
) -> None:
    home, info = new_space(tmp_path, "named", three)
    assert info.replicas == 3
    accounts = {
        json.loads(path.read_text())["name"]: json.loads(path.read_text())["sub"]
        for path in home.external.glob("*.json")
    }
    for name in ("CORE_named", "AGENTS_named", "PIPE_named", "LINK_named"):
        words = await lacks(home)
        assert words is not None
        assert f"account {name}" in words
        three.put((home.external / f"{accounts[name]}.jwt").read_text())
    assert await lacks(home) is None
    said = (home.external / "README.txt").read_text()
    for line in (
        *accounts,
        *accounts.values(),
        "max_control_line: 65536",
        "sync_interval",
        f"tidings up --space {home.name}",
        "streams: 8 or more",
        "can stop the space for good, by one header",
    ):
        assert line in said


async def test_a_space_there_works_and_its_revoked_are_cut_at_once_on_every_server(
    tmp_path: Path, three: Administrator
) -> None:
    home, _ = new_space(tmp_path, "works", three)
    three.put_all(home.external)
    assert await lacks(home) is None
    async with running(home, three) as space:
        for name in ("ada", "bob", "mal"):
            await space.add(name)
        assert space.info.replicas == 3
        async with connect_to(space, "bob", "general") as bob, connect_to(space, "ada") as ada:
            await ada.send("general", "hello from elsewhere")
            assert (await bob.next_message(10)).text == "hello from elsewhere"
            await ada.dm("bob", "and directly")
            assert (await bob.next_message(10)).text == "and directly"
        creds = home.agent_creds("mal").read_text()
        async with space.agent("mal") as mal:
            assert not mal.closed.is_set()
            async with space.administer() as admin:
                await admin.revoke("mal")
            await asyncio.wait_for(mal.closed.wait(), 5)
        for node in three.cluster.nodes:
            with pytest.raises(AuthRevoked):
                await _enter(node.url, creds)


def connect_to(space: RealSpace, name: str, *channels: str):  # type: ignore[no-untyped-def]
    from tidings.client.connect import connect_directly

    return connect_directly(space.home.name, name=name, channels=channels, home=space.home.home)


@pytest.mark.slow
async def test_a_server_that_was_down_during_a_revocation_is_told_when_it_is_back(
    tmp_path: Path, three: Administrator
) -> None:
    home, _ = new_space(tmp_path, "back", three)
    three.put_all(home.external)
    assert await lacks(home) is None
    async with running(home, three) as space:
        await space.add("mal")
        creds = home.agent_creds("mal").read_text()
        keeper = asyncio.create_task((kept := TokenKeeper(home)).keep())
        try:
            await eventually(lambda: len(kept.told) == 3, within=20)
            node = three.cluster.nodes[2]
            node.stop()
            async with space.administer() as admin:
                await admin.revoke("mal")
            await eventually(lambda: len(kept.told) == 2, within=30, what="it is known to be away")
            node.spawn()
            await eventually(node.is_ready, within=30)
            await eventually(lambda: len(kept.told) == 3, within=30, what="the server that is back was told")
            with pytest.raises(AuthRevoked):
                await _enter(node.url, creds)
        finally:
            keeper.cancel()
            with suppress(asyncio.CancelledError):
                await keeper


async def test_a_server_that_stands_still_during_revocations_is_said_every_time_until_it_is_told(
    tmp_path: Path, three: Administrator
) -> None:
    home, info = new_space(tmp_path, "still", three)
    three.put_all(home.external)
    assert await lacks(home) is None
    async with running(home, three) as space:
        for name in ("mal", "eve", "dan"):
            await space.add(name)
        node = three.cluster.nodes[2]
        assert node.pid is not None
        os.kill(node.pid, signal.SIGSTOP)
        try:
            for name in ("mal", "eve"):
                async with space.administer() as admin:
                    said = (await admin.revoke(name)).untold
                assert "2 of 3 servers were told: n3 did not answer" in said
                assert "server n3 did not hear yet who is revoked" in str(problems(home, info))
        finally:
            os.kill(node.pid, signal.SIGCONT)
        keeper = asyncio.create_task(TokenKeeper(home).keep())
        try:
            await eventually(lambda: problems(home, info) == [], within=20, what="the server that is back was told")
        finally:
            keeper.cancel()
            with suppress(asyncio.CancelledError):
                await keeper
        async with space.administer() as admin:
            assert (await admin.revoke("dan")).untold == ""


async def test_a_server_that_is_started_again_is_counted_once_and_one_that_is_gone_can_be_forgotten(
    tmp_path: Path,
) -> None:
    with administered(tmp_path / "theirs", 1) as alone:
        home, info = new_space(tmp_path, "once", alone)
        alone.put_all(home.external)
        assert await lacks(home) is None
        async with running(home, alone) as space:
            alone.cluster.nodes[0].stop()
            alone.cluster.nodes[0].spawn()
            await eventually(alone.cluster.nodes[0].is_ready, within=30)
            for name in ("ada", "bob"):
                await eventually_added(space, name)
            async with space.administer() as admin:
                assert (await admin.revoke("ada")).untold == "", "it has another id, and is the same"
            kept = home.external / "servers.json"
            kept.write_text(json.dumps(json.loads(kept.read_text()) | {"gone": {}}))
            async with space.administer() as admin:
                assert "1 of 2 servers were told: gone did not answer" in (await admin.revoke("bob")).untold
                assert (await admin.call(AcknowledgeRequest())).acknowledged == 1
            assert problems(home, info) == []


async def eventually_added(space: RealSpace, name: str) -> None:
    """A steward whose broker was away for a moment answers when it is back."""
    for _ in range(50):
        try:
            await space.add(name)
            return
        except UnreachableError:
            await asyncio.sleep(0.2)
    raise AssertionError(f"{name} could not be added")


async def _enter(url: str, creds: str) -> None:
    from tidings.nats import jwt
    from tidings.nats.client import connect as open_connection

    key = jwt.split_credentials(creds)[1]
    connection = await open_connection(url, creds, key.id, name="mal", reconnect=False)
    await connection.close()


async def test_no_other_tenant_can_import_a_space(tmp_path: Path, three: Administrator) -> None:
    home, info = new_space(tmp_path, "closed", three)
    three.put_all(home.external)
    assert await lacks(home) is None
    keyring = Keyring.load(home.keys)
    wanted = grants.agents_imports(info.subjects, info.id)
    with pytest.raises(ValueError, match="validation failed"):  # tokens that CORE signed for another account
        await three.tenant("thief", lambda _: keyring._activated(wanted, info.agents_account))
    async with running(home, three) as space:
        ada = (await space.add("ada")).row.id
        async with space.agent("ada") as agent:
            stranger = await three.tenant("stranger", lambda _: wanted)
            guest = await three.tenant("guest", lambda own: keyring._activated(wanted, own))
            strangers, guests = [await listening(space, tenant) for tenant in (stranger, guest)]

            async def guest_hears() -> bool:
                await agent.post("general", b"{}")
                return bool(guests)

            # what is known at one server is known at the others in a moment
            await eventually(lambda: stores(space, guest, ada), what="one that CORE let in is seen to be in")
            await eventually(guest_hears, what="and hears")
            assert not await stores(space, stranger, ada)
            assert strangers == []
            await stranger.close()
            await guest.close()


async def listening(space: RealSpace, tenant: Connection) -> list[object]:
    """What a tenant hears of what is said in the space, from now on."""
    heard: list[object] = []

    async def hear(message: object) -> None:
        heard.append(message)

    await tenant.subscribe(f"{space.subjects.root}.live.chat.>", cb=hear)
    await tenant.flush()
    return heard


async def stores(space: RealSpace, tenant: Connection, as_whom: str) -> bool:
    """Could a tenant store a message as somebody?"""
    async with space.core() as core:
        stream = space.subjects.log_stream
        before = (await core.info(stream))["state"]["last_seq"]
        with suppress(NatsError, TimeoutError):
            await tenant.request(space.subjects.chat(as_whom, "general"), b"forged", timeout=10)
        return bool((await core.info(stream))["state"]["last_seq"] > before)


async def test_limits_that_are_too_small_are_named_by_their_line(tmp_path: Path, three: Administrator) -> None:
    home, info = new_space(tmp_path, "small", three)
    keyring = Keyring.load(home.keys)
    three.put_all(home.external)
    for disk, replicas, words in ((1_000_000, 3, "disk_storage: "), (10**9, 1, "a tier R3")):
        spec = keyring.shared_specs(info.subjects, {}, {}, {}, disk=disk, replicas=replicas)[info.id]
        three.put(jwt.account_jwt(three.operator, info.id, spec))
        found = await lacks(home)
        assert found is not None
        assert words in found
        assert "CORE_small" in found
    agents = keyring.shared_specs(info.subjects, {}, {}, {}, disk=1, replicas=3)[info.agents_account]
    three.put_all(home.external)
    links = jwt.AccountSpec("LINK_small", imports=grants.link_imports(info.subjects, info.id))
    three.put(jwt.account_jwt(three.operator, info.link_account, links))
    assert "the imports of account LINK_small" in str(await lacks(home))
    three.put_all(home.external)
    plain = jwt.AccountSpec(agents.name, imports=grants.agents_imports(info.subjects, info.id))
    three.put(jwt.account_jwt(three.operator, info.agents_account, plain))
    assert "the imports of account AGENTS_small" in str(await lacks(home))


async def test_the_tokens_may_be_signed_by_the_administrator_alone(tmp_path: Path, three: Administrator) -> None:
    home, _ = new_space(tmp_path, "theirs", three, signing=False)
    assert not list(home.external.glob("*.jwt"))
    for account in ("CORE", "AGENTS", "PIPE", "LINK", "INVITE"):
        assert f"account {account}_theirs" in str(await lacks(home))
        three.sign(home.external / f"{account}_theirs.json")
    assert await lacks(home) is None
    async with running(home, three) as space:
        await space.add("ada")
        async with space.agent("ada") as ada:
            assert (await ada.post("general", b"{}"))["seq"] > 0


async def test_where_nobody_can_be_cut_credentials_are_short_lived_and_renewed(
    tmp_path: Path, three: Administrator
) -> None:
    home, _ = new_space(tmp_path, "brief", three, signing=False)
    for path in home.external.glob("*.json"):
        three.sign(path)
    assert await lacks(home) is None
    async with running(home, three) as space:
        row = (await space.add("ada")).row
        claims = jwt.decode(row.token)
        assert claims["exp"] == claims["iat"] + SHORT_LIVED
        assert row.is_due(row.iat + SHORT_LIVED / 2)
        async with space.administer() as admin:
            changed = await admin.set_access("ada", AgentFile("ada", read=("general",)), lifetime=10 * SHORT_LIVED)
            assert changed.row.lifetime == SHORT_LIVED


async def test_somebody_is_invited_to_a_space_there(tmp_path: Path, three: Administrator) -> None:
    home, info = new_space(tmp_path, "guests", three)
    three.put_all(home.external)
    assert await lacks(home) is None
    async with running(home, three) as space:
        attend(space)
        async with space.administer() as admin:
            made = Invitation(id="", issued=0, expires=0, name="bob", read=("general",), post=("general",))
            kept, line = Inviter(admin).invite(made, 3_600, reach_of(admin, None))
        there = SpaceHome(tmp_path / "there", "guests")
        found = await accept(there, parse_invitation(str(line)), "")
        assert found.url == info.url
        async with connect_directly("guests", name="bob", home=there.home) as bob:
            await bob.send("general", "from outside")
        async with space.administer() as admin:
            await Inviter(admin).revoke(kept)
        with pytest.raises(TidingsError):
            await accept(SpaceHome(tmp_path / "late", "guests"), parse_invitation(str(line)), "")


async def test_an_account_of_the_invited_that_imports_nothing_is_named(tmp_path: Path, three: Administrator) -> None:
    home, info = new_space(tmp_path, "deaf", three, signing=False)
    for path in home.external.glob("*.json"):
        three.sign(path)
    invite = Keyring.load(home.keys).invite.id
    plain = jwt.AccountSpec("INVITE_deaf", imports=grants.invitation_imports(info.subjects, info.id))
    three.put(jwt.account_jwt(three.operator, invite, plain))
    assert "the imports of account INVITE_deaf" in str(await lacks(home))


async def test_the_system_user_may_push_what_it_was_given_and_nothing_else(
    tmp_path: Path, three: Administrator
) -> None:
    home, info = new_space(tmp_path, "narrow", three)
    three.put_all(home.external)
    assert await lacks(home) is None
    async with system_user(home, info) as system:
        token = (home.external / f"{info.agents_account}.jwt").read_text()
        assert len(await push_to_all(system, info.agents_account, token)) == 3
        with pytest.raises((NatsError, TimeoutError)):
            await system.request("$SYS.REQ.CLAIMS.UPDATE", token.encode(), timeout=1)


def test_a_default_control_line_is_named(tmp_path: Path) -> None:
    with administered(tmp_path / "theirs", 1, control_line=4_096) as alone:
        home, info = new_space(tmp_path, "line", alone)
        assert info.replicas == 1
        alone.put_all(home.external)
        assert "max_control_line: 65536" in str(asyncio.run(lacks(home)))


@pytest.mark.parametrize("open_to_others", [0, 1])
def test_keys_that_others_can_read_are_refused_with_what_mends_them(
    tmp_path: Path, three: Administrator, open_to_others: int
) -> None:
    home = SpaceHome(tmp_path, "keys")
    create_space(home, port=4222, open_space=False, budget=BUDGET)
    given = three.keys_for("A" * 56)
    Path(given[open_to_others]).chmod(0o644)
    with pytest.raises(ConfigError, match=f"run `chmod 600 {given[open_to_others]}`"):
        live_on(home, three.url, operator_key=given)
    assert not home.read_info().servers


async def test_servers_that_have_too_little_room_for_an_account_are_told_of(tmp_path: Path) -> None:
    with administered(tmp_path / "theirs", 1) as alone:
        home, info = new_space(tmp_path, "large", alone)
        alone.put_all(home.external)
        spec = Keyring.load(home.keys).shared_specs(info.subjects, {}, {}, {}, disk=10**13, replicas=1)[info.id]
        alone.put(jwt.account_jwt(alone.operator, info.id, spec))
        with pytest.raises(BrokerUnreachable, match=r"CORE_large: do its servers have .* left for it"):
            await missing_line(home, Keyring.load(home.keys))


def test_an_operator_key_that_is_none_is_refused(tmp_path: Path, three: Administrator) -> None:
    home = SpaceHome(tmp_path, "keys")
    create_space(home, port=4222, open_space=False, budget=BUDGET)
    wrong = tmp_path / "wrong.nk"
    write_private(wrong, three.system.seed)
    with pytest.raises(UsageError, match="no operator signing key"):
        live_on(home, three.url, operator_key=(str(wrong), three.keys_for("A" * 56)[1]))
    assert not home.read_info().servers


async def test_without_a_signing_key_tokens_end_by_themselves_and_are_renewed_for_whoever_is_not_revoked(
    tmp_path: Path, three: Administrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidings.admin.external.SHORT_LIVED", 6)
    home, _ = new_space(tmp_path, "ends", three, signing=False)
    for path in home.external.glob("*.json"):
        three.sign(path)
    assert await lacks(home) is None
    async with running(home, three) as space:
        for name in ("ada", "mal"):
            await space.add(name)

        async def renew() -> None:
            while True:
                await asyncio.sleep(1)
                async with space.administer() as admin:
                    await admin.renew()

        renewing = asyncio.create_task(renew())
        async with connect_to(space, "ada") as ada, space.agent("mal") as mal:
            async with space.administer() as admin:
                assert "nobody is cut" in (await admin.revoke("mal")).untold
            first = ada.transport.connection.token_used
            assert not mal.closed.is_set(), "nobody could tell the servers"
            await asyncio.wait_for(mal.closed.wait(), 10)
            await eventually(lambda: ada.transport.connection.token_used != first, within=10)
            ends = [ada.transport.connection.token_used]
            await eventually(
                lambda: ada.transport.connection.token_used != ends[0] and ada.transport.state == "ready", within=10
            )
            assert (await ada.send("general", "still here")).seq > 0
        renewing.cancel()
        with suppress(asyncio.CancelledError):
            await renewing
