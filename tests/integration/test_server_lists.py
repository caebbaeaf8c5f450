"""Several addresses of one space: whoever is on one that goes is on another soon, and who fails says what each said."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import tidings
from tidings.admin.creation import broker_config
from tidings.admin.identity import Identity, bundle_identity, move_bundle
from tidings.client.connect import connect_directly
from tidings.client.connection_check import check_connection
from tidings.errors import AuthRevoked, BrokerUnreachable, TidingsError, UntrustedServer, WireError
from tidings.nats.address import moved, parse_address, parse_addresses, trusting
from tidings.nats.client import connect
from tidings.nats.jetstream_blocking import WorkerConnection
from tidings.nats.jwt import split_credentials
from tidings.server.certificate_files import CertificateFiles
from tidings.server.certificates import ensure_certificates
from tidings.server.nats_server import Broker, free_port
from tidings.util.private_files import write_private
from tidings_testing.proxy import FaultProxy, fault_proxy
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually

HERE, ELSEWHERE = "127.0.0.2", "127.0.0.3"


@pytest.fixture
async def space(tmp_path: Path) -> AsyncIterator[RealSpace]:
    async with real_space(tmp_path / "home", listen=HERE) as found:
        for name in ("ada", "bob"):
            await found.add(name)
        yield found


def through(space: RealSpace, *proxies: FaultProxy) -> str:
    """The space by way of each of these, trusted as before."""
    return moved(space.info.url, [f"127.0.0.1:{proxy.port}" for proxy in proxies])


def bundle(space: RealSpace, name: str, path: Path, url: str) -> Path:
    creds = space.home.agent_creds(name).read_text()
    _, key = split_credentials(creds)
    held = {
        "space": space.info.name,
        "space_id": space.info.id,
        "steward_key": space.info.steward_key,
        "url": url,
        "agent": {"name": name, "id": key.id},
        "creds": creds,
    }
    write_private(path, json.dumps(held))
    return path


async def both_drivers(space: RealSpace, url: str) -> list[TidingsError | None]:
    """What each says of these servers."""
    path, found = space.home.agent_creds("ada"), list[TidingsError | None]()
    _, key = split_credentials(path.read_text())
    try:
        await (await connect(url, path, key.id, name="ada", reconnect=False)).close()
        found.append(None)
    except TidingsError as error:
        found.append(error)
    try:
        (await asyncio.to_thread(WorkerConnection.open, url, path)).close()
        found.append(None)
    except TidingsError as error:
        found.append(error)
    return found


@asynccontextmanager
async def at_another_address(space: RealSpace) -> AsyncIterator[None]:
    """The broker of a space is somewhere else for a while."""
    space.broker.stop()
    there = space.home.update_info(listen=ELSEWHERE)
    broker = Broker(broker_config(space.home, there), space.home.run / "moved.conf")
    broker.start()
    try:
        yield
    finally:
        broker.stop()
        space.home.update_info(listen=HERE)
        space.broker.start()


@pytest.mark.parametrize("fault", ["gone", "half open"])
async def test_whoever_is_on_a_server_that_goes_is_on_another_of_its_list_and_misses_nothing(
    space: RealSpace, fault: str
) -> None:
    host, port = HERE, space.info.port
    async with fault_proxy(port, host) as first, fault_proxy(port, host) as second:
        url, home = through(space, first, second), space.home.home
        async with (
            connect_directly("main", name="bob", channels=["general"], home=home, url=url, ping_interval=0.5) as bob,
            connect_directly("main", name="ada", home=home) as ada,
        ):
            assert (first.connections, second.connections) == (1, 0), "the first of the list, if it answers"
            if fault == "gone":
                first.refuse = True
                first.cut()
            else:
                first.black_hole = True
            await ada.send("general", "while it looked for another way")
            assert (await bob.next_message(20)).text == "while it looked for another way"
            await eventually(lambda: bob.transport.state == "ready")
            assert second.connections >= 1
            await ada.send("general", "live again")
            assert (await bob.next_message(20)).text == "live again"
            first.refuse = first.black_hole = False
            second.refuse = True
            second.cut()
            await eventually(
                lambda: bob.transport.connection.rebuilds == 2 and bob.transport.state == "ready", within=20
            )


async def test_a_server_that_is_dead_silent_or_not_trusted_is_passed_over(space: RealSpace, tmp_path: Path) -> None:
    other = ensure_certificates(CertificateFiles(tmp_path / "other"), "main")
    dead = trusting("127.0.0.1", free_port(), other, "main.tidings.internal")
    false = trusting(HERE, space.info.port, other, "main.tidings.internal")
    assert await both_drivers(space, f"{dead},{false},{space.info.url}") == [None, None]
    async with fault_proxy(space.info.port, HERE) as silent:
        silent.black_hole = True
        began = time.monotonic()
        url = f"{through(space, silent)},{space.info.url}"
        path = space.home.agent_creds("ada")
        connection = await connect(url, path, split_credentials(path.read_text())[1].id, name="ada", reconnect=False)
        assert connection.address == parse_address(space.info.url)
        assert time.monotonic() - began < 2.5, "a server that is silent costs a moment, not its timeout"
        await connection.close()


async def test_when_all_fail_one_sentence_names_each_with_its_reason(space: RealSpace, tmp_path: Path) -> None:
    other = ensure_certificates(CertificateFiles(tmp_path / "other"), "main")
    dead = trusting("127.0.0.1", free_port(), other, "main.tidings.internal")
    false = trusting(HERE, space.info.port, other, "main.tidings.internal")
    for error in await both_drivers(space, f"{dead},{false},nats://no-such-name.invalid:4222"):
        assert isinstance(error, BrokerUnreachable)
        dead_at, false_at = parse_address(dead).url, parse_address(false).url
        assert f"no broker answers at {dead_at}: nothing listens there; {false_at}: its certificate is not by" in str(
            error
        )
        assert "nats://no-such-name.invalid:4222: there is no such name" in str(error)
        assert "authority=" not in str(error)
    assert [type(error) for error in await both_drivers(space, f"{false},{false}")] == [UntrustedServer] * 2


@pytest.mark.slow
async def test_a_revoked_credential_is_said_to_be_so_also_while_another_server_is_away(space: RealSpace) -> None:
    path = space.home.agent_creds("ada")
    kept = path.read_text()
    away = f"nats://127.0.0.1:{free_port()}"
    _, key = split_credentials(kept)
    closed = asyncio.Event()
    connection = await connect(f"{space.info.url},{away}", path, key.id, name="ada", on_closed=closed.set)
    async with space.administer() as admin:
        await admin.revoke("ada")
    write_private(path, kept)
    async with asyncio.timeout(40):
        await closed.wait()
    assert connection.is_closed
    for url in (f"{away},{space.info.url}", f"{space.info.url},{away}"):
        errors = await both_drivers(space, url)
        assert [type(error) for error in errors] == [AuthRevoked] * 2
        assert "Authorization Violation" in str(errors[0])


async def test_a_server_that_stands_still_is_left_for_another_of_the_list(space: RealSpace, tmp_path: Path) -> None:
    """Its process is stopped: the kernel still takes connections for it, and nobody answers."""
    async with real_space(tmp_path / "still", "still", listen=ELSEWHERE) as still:
        await still.add("ada")
        path = still.home.agent_creds("ada")
        _, key = split_credentials(path.read_text())
        still.broker.process.send_signal(signal.SIGSTOP)  # type: ignore[union-attr]
        try:
            errors = await both_drivers(space, f"{still.info.url},{space.info.url}")
            assert errors == [None, None]
        finally:
            still.broker.process.send_signal(signal.SIGCONT)  # type: ignore[union-attr]
        connection = await connect(f"{space.info.url},{still.info.url}", path, key.id, name="ada", reconnect=False)
        assert connection.address == parse_address(still.info.url), "the first one refuses the agent of another space"
        await connection.close()


async def test_a_space_that_moved_is_found_by_programs_that_have_both_addresses(
    space: RealSpace, tmp_path: Path
) -> None:
    path = bundle(space, "bob", tmp_path / "bob.json", moved(space.info.url, [HERE, ELSEWHERE]))
    async with tidings.connect(bundle=path, ping_interval=0.5) as bob, at_another_address(space):
        await eventually(lambda: bob.transport.connection.rebuilds >= 1 and bob.transport.state == "ready", within=30)
        assert bob.transport.connection.current.address == parse_addresses(bob.transport.identity.url)[1]


async def test_an_address_that_was_changed_in_place_is_used_by_programs_that_run(
    space: RealSpace, tmp_path: Path
) -> None:
    path = bundle(space, "bob", tmp_path / "bob.json", space.info.url)
    before = json.loads(path.read_text())
    async with tidings.connect(bundle=path, ping_interval=0.5) as bob, at_another_address(space):
        await eventually(lambda: bob.transport.state == "reconnecting")
        move_bundle(path, [ELSEWHERE])
        await eventually(lambda: bob.transport.state == "ready", within=30)
        assert bob.transport.connection.current.address == parse_address(space.info.url_at(ELSEWHERE))
    after = json.loads(path.read_text())
    assert after == before | {"url": space.info.url_at(ELSEWHERE)}, (
        "nothing else has changed, and nobody else is trusted"
    )
    with pytest.raises(WireError):
        move_bundle(path, ["ftp://elsewhere"])
    assert json.loads(path.read_text()) == after


async def test_doctor_takes_one_good_server_of_a_list_for_a_way_and_notes_what_the_others_lack(
    space: RealSpace, tmp_path: Path
) -> None:
    dead = moved(space.info.url, [f"127.0.0.1:{free_port()}"])

    async def steps(url: str) -> list[tuple[str, str]]:
        identity: Identity = bundle_identity(bundle(space, "bob", tmp_path / "bob.json", url))
        return [(step.what, step.verdict) async for step in check_connection(identity)]

    good = [("name", "ok"), ("port", "ok"), ("TLS", "ok"), ("greeting", "ok")]
    asked = [("credential", "ok"), ("steward", "ok"), ("clock", "ok")]
    assert await steps(f"{dead},{space.info.url}") == [("name", "ok"), ("port", "note"), *good, *asked]
    assert await steps(f"{dead},{dead}") == [("name", "ok"), ("port", "problem")] * 2
