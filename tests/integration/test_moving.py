"""A space goes to a NATS that others run and comes back, with everything; interrupted, it lives where it lived."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from administrator import Administrator, administered
from tidings.admin.creation import broker_config, create_space
from tidings.admin.home import SpaceHome
from tidings.admin.moving import finish_move, move_back, move_out
from tidings.client.connect import connect_directly
from tidings.errors import AuthRevoked, BrokerFailed, ConfigError, SpaceBusy, UsageError
from tidings.server.keyring import Keyring
from tidings.server.nats_server import Broker, check_port
from tidings_testing.real_space import RealSpace, _provisioned
from tidings_testing.waiting import eventually

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Administrator]:
    with administered(tmp_path / "theirs", 1) as administrator:
        yield administrator


@asynccontextmanager
async def running(home: SpaceHome, theirs: Administrator | None = None) -> AsyncIterator[RealSpace]:
    """The space, wherever it lives."""
    info = home.read_info()
    broker = theirs.cluster.nodes[0] if theirs else Broker(broker_config(home, info), home.run / "nats.conf")
    if theirs is None:
        broker.start()
    space = RealSpace(home, info, broker)
    try:
        async with space.administer() as admin:
            await _provisioned(admin, patient=True)
        await space.start_steward()
        yield space
        await space.stop_steward()
    finally:
        if theirs is None:
            broker.stop()


def keys(theirs: Administrator, home: SpaceHome) -> tuple[str, str]:
    keyring = Keyring.load(home.keys)
    return theirs.keys_for(home.read_info().agents_account, keyring.invite.id, keyring.link.id)


async def said_so_far(space: RealSpace) -> list[tuple[int, str]]:
    async with connect_directly("main", name="ada", home=space.home.home) as ada:
        return [(each.seq, each.text) for each in await ada.history("general", limit=200)]


@pytest.fixture
async def home(tmp_path: Path) -> SpaceHome:
    found = SpaceHome(tmp_path / "home", "main")
    create_space(found, port=None, open_space=False, budget=64 * 1024 * 1024)
    async with running(found) as space:
        for name in ("ada", "bob", "mal"):
            await space.add(name)
        async with connect_directly("main", name="ada", home=found.home) as ada:
            for number in range(50):
                await ada.send("general", str(number))
            await ada.dm("bob", "unread")
        async with space.administer() as admin:
            await admin.revoke("mal")
    return found


async def ready(home: SpaceHome, theirs: Administrator) -> tuple[str, str]:
    """What the administrator adds, once it was said."""
    given = keys(theirs, home)
    with pytest.raises(ConfigError, match="lacks account CORE_main"):
        await move_out(home, theirs.url, given, None, lambda _: None)
    assert not home.read_info().servers
    said = (home.external / "README.txt").read_text().splitlines()[-1]
    assert said.startswith(f"Then: tidings space move --server {theirs.url} --operator-key"), said
    theirs.put_all(home.external)
    return given


async def test_a_space_moves_out_works_there_and_comes_home(
    home: SpaceHome, alone: Administrator, tmp_path: Path
) -> None:
    async with running(home) as space:
        before = await said_so_far(space)
    given = await ready(home, alone)
    moved = await move_out(home, alone.url, given, None, lambda _: None)
    assert moved.records["DM_main"] == 1
    assert moved.kept is not None
    assert moved.kept.exists()
    async with running(home, alone) as space:
        assert await said_so_far(space) == before
        async with connect_directly("main", name="bob", home=home.home) as bob:
            assert (await bob.next_message(10)).text == "unread"
            sent = await bob.send("general", "there")
        assert sent.seq is not None
        assert sent.seq > before[0][0]
        async with space.administer() as admin:
            await admin.revoke("bob")
        with pytest.raises(AuthRevoked):
            async with connect_directly("main", name="bob", home=home.home):
                pass
        after = await said_so_far(space)
    with pytest.raises(UsageError, match="lives on"):
        await move_out(home, alone.url, given, None, lambda _: None)
    await move_back(home, lambda _: None)
    assert not home.read_info().servers
    async with running(home) as space:
        assert await said_so_far(space) == after
        assert (await space.add("carol")).created
    with pytest.raises(UsageError, match="a broker of its own already"):
        await move_back(home, lambda _: None)


@pytest.mark.parametrize(
    "point",
    [
        "move.before_info",
        *(pytest.param(f"move.{each}", marks=pytest.mark.slow) for each in ("after_stream", "after_info")),
    ],
)
async def test_a_move_that_is_killed_leaves_a_space_that_works_and_is_done_by_the_same_again(
    home: SpaceHome, alone: Administrator, point: str
) -> None:
    key, creds = await ready(home, alone)
    command = [sys.executable, "-m", "tidings.cli", "space", "move", "--home", str(home.home), "--server", alone.url]
    command += ["--operator-key", key, "--system-creds", creds]
    armed = {**os.environ, "TIDINGS_FAILPOINT": f"{point}:kill"}
    killed = await asyncio.to_thread(subprocess.run, command, env=armed, capture_output=True, check=False)
    assert killed.returncode == -9, killed
    await eventually(lambda: port_is_free(home), what="its broker is gone")
    if point != "move.after_info":
        async with running(home) as space:
            assert len(await said_so_far(space)) == 50
        again = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False, text=True)
        assert again.returncode == 0, again
    else:
        finish_move(home)  # as `tidings up` does
    async with running(home, alone) as space:
        assert len(await said_so_far(space)) == 50
        async with space.administer() as admin:
            await admin.revoke("bob")


def port_is_free(home: SpaceHome) -> bool:
    try:
        check_port("127.0.0.1", home.read_info().port, home.name)
    except BrokerFailed:
        return False
    return True


async def test_a_space_that_runs_is_not_moved(home: SpaceHome, alone: Administrator) -> None:
    from tidings.util.private_files import locked

    with locked(home.up_lock, "tidings up"), pytest.raises(SpaceBusy, match="`tidings down` first"):
        await move_out(home, alone.url, keys(alone, home), None, lambda _: None)
