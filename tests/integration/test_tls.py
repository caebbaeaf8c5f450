"""A space that other machines reach: everybody speaks TLS to it, and tells nothing to a server that is not trusted.

Addresses of the loopback range stand for machines.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import tidings
from tidings.admin.creation import broker_config
from tidings.admin.listening import listen_on, public_host
from tidings.client.connect import connect_directly
from tidings.errors import BrokerUnreachable, TidingsError, UntrustedServer
from tidings.nats.address import trusting
from tidings.nats.client import connect
from tidings.nats.jetstream_blocking import WorkerConnection
from tidings.nats.jwt import split_credentials
from tidings.server.certificate_files import CertificateFiles
from tidings.server.certificates import SERVER_FOR, ensure_certificates
from tidings.server.nats_server import Broker
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually

HERE, ELSEWHERE = "127.0.0.2", "127.0.0.3"


@pytest.fixture
async def reachable(tmp_path: Path) -> AsyncIterator[RealSpace]:
    async with real_space(tmp_path / "home", listen=HERE) as space:
        for name in ("ada", "bob"):
            await space.add(name)
        yield space


def endpoint(space: RealSpace, name: str, **options: object) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)  # type: ignore[arg-type]


async def refusal(space: RealSpace, url: str) -> list[TidingsError]:
    """What both drivers say of a server at this address."""
    path, found = space.home.agent_creds("ada"), list[TidingsError]()
    _, key = split_credentials(path.read_text())
    try:
        await (await connect(url, path, key.id, name="ada", reconnect=False)).close()
    except TidingsError as error:
        found.append(error)
    try:
        (await asyncio.to_thread(WorkerConnection.open, url, path)).close()
    except TidingsError as error:
        found.append(error)
    return found


async def test_agents_speak_over_tls_and_the_steward_serves_them(reachable: RealSpace) -> None:
    assert reachable.info.address == f"tls://{HERE}:{reachable.info.port}"
    async with endpoint(reachable, "bob", channels=["general"]) as bob, endpoint(reachable, "ada") as ada:
        await ada.send("general", "over there")
        message = await bob.next_message(10)
        assert (message.text, message.sender.name) == ("over there", "ada")
        await message.ack()
        assert {each.name for each in await ada.who()} >= {"ada", "bob"}
    assert await refusal(reachable, reachable.info.url) == []


async def test_who_speaks_plainly_is_not_let_in(reachable: RealSpace) -> None:
    plain = f"nats://{HERE}:{reachable.info.port}"
    assert [type(error) for error in await refusal(reachable, plain)] == [BrokerUnreachable] * 2
    reader, writer = await asyncio.open_connection(HERE, reachable.info.port)
    writer.write(b"CONNECT {}\r\nPING\r\n")
    left = await asyncio.wait_for(reader.read(), 10)
    assert b"PONG" not in left
    assert b"INFO" not in left
    writer.close()


async def test_a_program_that_was_busy_while_it_connected_gets_through(reachable: RealSpace) -> None:
    """A server that loses patience and greets plainly would be taken for one that does not speak TLS."""

    async def be_busy() -> None:
        while True:
            time.sleep(0.12)  # noqa: ASYNC251  that is what it is about
            await asyncio.sleep(0)

    busy = asyncio.create_task(be_busy())
    try:
        assert await refusal(reachable, reachable.info.url) == []
    finally:
        busy.cancel()


async def test_an_address_that_changed_is_no_matter(reachable: RealSpace) -> None:
    info = reachable.info
    reachable.broker.stop()
    moved = reachable.home.update_info(listen=ELSEWHERE)
    broker = Broker(broker_config(reachable.home, moved), reachable.home.run / "moved.conf")
    broker.start()
    try:
        assert await refusal(reachable, info.url_at(ELSEWHERE)) == []
        assert [type(error) for error in await refusal(reachable, info.url)] == [BrokerUnreachable] * 2
    finally:
        broker.stop()
        reachable.home.update_info(listen=HERE)
        reachable.broker.start()


@contextmanager
def served(space: RealSpace, at: datetime, name: str = "") -> Iterator[None]:
    """The broker with a certificate that was made at another time, or for another space, by the same authority."""
    files = space.home.certificates
    space.broker.stop()
    kept = {path: path.read_bytes() for path in (files.server, files.server_key)}
    files.server.unlink()
    ensure_certificates(files, name or space.info.name, at)
    space.broker.start()
    try:
        yield
    finally:
        space.broker.stop()
        for path, content in kept.items():
            path.write_bytes(content)
        space.broker.start()


NOW = datetime.now(UTC)


@pytest.mark.parametrize(
    ("at", "name", "said"),
    [
        (NOW - SERVER_FOR - timedelta(days=2), "", "has expired, or the clock of this machine is wrong"),
        (NOW + timedelta(days=3), "", "not valid yet: is the clock of this machine right"),
        (NOW, "lab", "not by the authority|another server's or space's"),
    ],
    ids=["expired", "not yet", "another space"],
)
async def test_a_certificate_that_does_not_hold_is_said_in_words_and_nothing_is_told_to_its_server(
    reachable: RealSpace, at: datetime, name: str, said: str
) -> None:
    with served(reachable, at, name):
        errors = await refusal(reachable, reachable.info.url)
        assert [type(error) for error in errors] == [UntrustedServer] * 2
        for error in errors:
            assert any(part in str(error) for part in said.split("|")), error
            assert "authority=" not in str(error), "an address is shown without what it trusts"
    assert await refusal(reachable, reachable.info.url) == []


async def test_a_broker_whose_certificate_was_renewed_is_the_same_to_everybody(reachable: RealSpace) -> None:
    async with endpoint(reachable, "bob", channels=["general"]) as bob:
        before = reachable.home.certificates.server.read_bytes()
        with served(reachable, datetime.now(UTC)):
            assert reachable.home.certificates.server.read_bytes() != before
            async with endpoint(reachable, "ada") as ada:
                await ada.send("general", "still here", timeout=30)
            assert (await bob.next_message(30)).text == "still here"


async def test_a_certificate_is_swapped_under_connections_that_stay(reachable: RealSpace) -> None:
    files, info = reachable.home.certificates, reachable.info

    def shown() -> str:
        return ssl.get_server_certificate((HERE, info.port))

    async with endpoint(reachable, "bob", channels=["general"]) as bob, endpoint(reachable, "ada") as ada:
        before = await asyncio.to_thread(shown)
        files.server.unlink()
        ensure_certificates(files, info.name)
        reachable.broker.reload()

        async def is_new() -> bool:
            return await asyncio.to_thread(shown) != before

        await eventually(is_new, what="the new one is shown")
        await ada.send("general", "nobody noticed")
        assert (await bob.next_message(10)).text == "nobody noticed"
        assert (ada.transport.connection.rebuilds, bob.transport.connection.rebuilds) == (0, 0)
    assert await refusal(reachable, info.url) == []


async def test_nothing_older_than_tls_1_3_is_spoken(reachable: RealSpace) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        await asyncio.open_connection(HERE, reachable.info.port, ssl=context)


@asynccontextmanager
async def stranger(answer: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Somebody who took the place of the broker, and what was said to it."""
    heard: list[bytes] = []

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        heard.append(await reader.read(65_536))
        writer.close()

    server = await asyncio.start_server(meet, HERE, 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1], heard
    finally:
        server.close()


GREETING = b'INFO {"server_id":"X","version":"2.15.1","max_payload":1048576,"nonce":"abc"}\r\n'


async def test_somebody_in_between_hears_neither_token_nor_signature(reachable: RealSpace, tmp_path: Path) -> None:
    files = CertificateFiles(tmp_path / "other")
    ensure_certificates(files, reachable.info.name)  # the right name, by an authority of its own
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.server, files.server_key)
    authority = tidings_authority(reachable)
    async with stranger(GREETING, context) as (port, heard):
        assert len(await refusal(reachable, trusting(HERE, port, authority, "main.tidings.internal"))) == 2
        assert not any(heard), "no handshake, and nothing else"
    async with stranger(GREETING) as (port, heard):
        assert len(await refusal(reachable, trusting(HERE, port, authority, "main.tidings.internal"))) == 2
        await eventually(lambda: len(heard) == 2, what="both drivers said something")
        assert all(each[:1] == b"\x16" and b"CONNECT" not in each for each in heard), "the beginning of a handshake"


def tidings_authority(space: RealSpace) -> bytes:
    return ensure_certificates(space.home.certificates, space.info.name)


async def test_a_certificate_by_an_authority_that_machines_trust_is_shown_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = CertificateFiles(tmp_path / "theirs")
    ensure_certificates(files, "broker")
    monkeypatch.setenv("SSL_CERT_FILE", str(files.authority))
    given = (str(files.server), str(files.server_key))
    async with real_space(tmp_path / "home", listen=HERE, certificate=given) as space:
        assert "authority=" not in space.info.url
        assert public_host(space.info) == "broker.tidings.internal"
        await space.add("ada")
        async with endpoint(space, "ada") as ada:
            await ada.send("general", "with a certificate of somebody's")
        monkeypatch.delenv("SSL_CERT_FILE")
        errors = await refusal(space, space.info.url)
        assert [type(error) for error in errors] == [UntrustedServer] * 2
        assert listen_on(space.home, None, ("off", "")).url_at(HERE).count("authority=") == 1
