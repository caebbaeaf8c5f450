"""A space that takes websockets: everything an agent does, inside of one, with TLS and nothing else.

Addresses of the loopback range stand for machines.
"""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import tidings
from connect_proxy import ConnectProxy, connect_proxy
from tidings.admin.inviting import reach_of
from tidings.admin.listening import address_for
from tidings.client.connect import connect_directly, find_identity
from tidings.client.connection_check import check_connection
from tidings.errors import AuthRevoked, BrokerUnreachable, TidingsError, UntrustedServer
from tidings.nats.address import in_websocket, moved, parse_address, trusting
from tidings.nats.aio import Connection
from tidings.nats.client import connect
from tidings.nats.jetstream_blocking import WorkerConnection
from tidings.nats.jwt import credentials, split_credentials
from tidings.server.certificate_files import CertificateFiles
from tidings.server.certificates import ensure_certificates
from tidings.server.keyring import Keyring
from tidings.server.nats_server import free_port
from tidings.util.private_files import write_private
from tidings.wire.invitations import Trust
from tidings_testing.proxy import fault_proxy
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually

HERE = "127.0.0.2"
PROXY_NAMES = ("https_proxy", "http_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXY_NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
async def space(tmp_path: Path) -> AsyncIterator[RealSpace]:
    async with real_space(tmp_path / "home", listen=HERE, ws=HERE) as found:
        for name in ("ada", "bob"):
            await found.add(name)
        yield found


def wss(space: RealSpace) -> str:
    return space.info.ws_url_at(HERE)


def endpoint(space: RealSpace, name: str, url: str, **options: object) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, url=url, **options)  # type: ignore[arg-type]


async def opened(space: RealSpace, url: str, name: str = "ada") -> Connection:
    path = space.home.agent_creds(name)
    _, key = split_credentials(path.read_text())
    return await connect(url, path, key.id, name=name, reconnect=False)


async def refusal(space: RealSpace, url: str) -> TidingsError:
    with pytest.raises(TidingsError) as refused:
        await (await opened(space, url)).close()
    return refused.value


async def test_agents_send_receive_and_read_what_was_said_inside_of_a_websocket(space: RealSpace) -> None:
    assert space.info.ws_address == f"wss://{HERE}:{space.info.ws_port}"
    async with (
        endpoint(space, "bob", wss(space), channels=["general"]) as bob,
        endpoint(space, "ada", wss(space)) as ada,
    ):
        assert ada.transport.connection.current.address == parse_address(wss(space))
        await ada.send("general", "through a closed network")
        message = await bob.next_message(10)
        assert (message.text, message.sender.name) == ("through a closed network", "ada")
        await message.ack()
        await asyncio.gather(*(ada.send("general", f"{n} {'x' * 2_000}") for n in range(300)))
        assert len(await bob.history("general", 300)) == 300
        await bob.dm("ada", "and back")
        assert (await ada.next_message(10)).text == "and back"
        assert {each.name for each in await ada.who()} >= {"ada", "bob"}


async def test_a_megabyte_goes_both_ways_and_many_keep_their_order(space: RealSpace) -> None:
    keyring = Keyring.load(space.home.keys)
    token, key = keyring.short_lived(keyring.core, "test")
    connection = await connect(wss(space), credentials(token, key), key.id, name="test", reconnect=False)
    subscription = await connection.subscribe("large.>")
    large = os.urandom((1 << 20) - 64)
    for number in range(4):
        await connection.publish(f"large.{number}", large, headers={"N": str(number)})
    for number in range(2_000):
        await connection.publish("large.small", b"%d" % number)
    for number in range(4):
        found = await subscription.next(20)
        assert (found.subject, found.data == large) == (f"large.{number}", True)
    assert [int((await subscription.next(20)).data) for _ in range(2_000)] == list(range(2_000))
    await connection.close()


@pytest.mark.parametrize("fault", ["cut", "restart"])
async def test_an_endpoint_comes_back_after_its_websocket_went(space: RealSpace, fault: str) -> None:
    async with fault_proxy(space.info.ws_port, HERE) as proxy:
        url = moved(wss(space), [f"127.0.0.1:{proxy.port}"])
        async with endpoint(space, "bob", url, channels=["general"]) as bob, endpoint(space, "ada", wss(space)) as ada:
            if fault == "cut":
                proxy.cut()
            else:
                await space.restart_broker(kill=True)
            await ada.send("general", "after it went", timeout=30)
            assert (await bob.next_message(30)).text == "after it went"
            assert bob.transport.connection.rebuilds >= 1


async def test_a_wrong_authority_a_wrong_name_and_no_authority_at_all_are_refused(
    space: RealSpace, tmp_path: Path
) -> None:
    other = ensure_certificates(CertificateFiles(tmp_path / "other"), "main")
    right = parse_address(wss(space))
    for wrong in (
        in_websocket(trusting(HERE, space.info.ws_port, other, right.name)),
        right._replace(name="lab.tidings.internal").full_url,
        f"wss://{HERE}:{space.info.ws_port}",
    ):
        error = await refusal(space, wrong)
        assert isinstance(error, UntrustedServer), error
        assert "was told nothing" in str(error)


async def test_nothing_is_ever_said_in_plain(space: RealSpace) -> None:
    port = space.info.ws_port
    assert isinstance(await refusal(space, f"ws://{HERE}:{port}"), BrokerUnreachable)
    reader, writer = await asyncio.open_connection(HERE, port)
    writer.write(
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    heard = await asyncio.wait_for(reader.read(), 10)
    assert b"101" not in heard
    assert b"INFO" not in heard
    writer.close()
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        await asyncio.open_connection(HERE, port, ssl=old)

    heard_by: list[bytes] = []

    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard_by.append(await reader.read(65_536))
        writer.close()

    server = await asyncio.start_server(stranger, HERE, 0)
    assert isinstance(
        await refusal(space, moved(wss(space), [f"{HERE}:{server.sockets[0].getsockname()[1]}"])), BrokerUnreachable
    )
    assert [each[:1] for each in heard_by] == [b"\x16"], "the beginning of a handshake"
    server.close()


async def test_a_path_is_no_matter_to_the_server_and_can_be_one_to_whoever_is_in_front_of_it(space: RealSpace) -> None:
    url = parse_address(wss(space))._replace(path="/mesh/main").full_url
    connection = await opened(space, url)
    assert connection.is_connected
    await connection.close()


async def test_a_page_of_another_site_in_a_browser_is_not_let_in(space: RealSpace) -> None:
    address = parse_address(wss(space))
    reader, writer = await asyncio.open_connection(
        HERE, space.info.ws_port, ssl=address.context(), server_hostname=address.server_name
    )
    writer.write(
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nOrigin: https://elsewhere.example\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    assert (await asyncio.wait_for(reader.readline(), 10)).split()[1] == b"403"
    writer.close()


async def test_a_revoked_agent_is_told_so_and_cut(space: RealSpace) -> None:
    path = space.home.agent_creds("ada")
    kept, connection = path.read_text(), await opened(space, wss(space))
    async with space.administer() as admin:
        await admin.revoke("ada")
    await eventually(lambda: connection.is_closed)
    write_private(path, kept)
    assert isinstance(await refusal(space, wss(space)), AuthRevoked)


async def test_whoever_is_given_both_addresses_takes_the_websocket_where_nothing_else_is_let_out(
    space: RealSpace,
) -> None:
    given = address_for(space.info, [])
    tls, websocket = given.split(",")
    assert (parse_address(tls).url, parse_address(websocket).url) == (space.info.address, space.info.ws_address)
    connection = await opened(space, given)
    assert connection.address == parse_address(tls), "where both are open, it is not needed"
    await connection.close()
    async with fault_proxy(space.info.port, HERE) as closed:
        closed.black_hole = True
        connection = await opened(space, f"{moved(tls, [f'127.0.0.1:{closed.port}'])},{websocket}")
        assert connection.address == parse_address(websocket)
        await connection.close()


async def test_workers_that_read_in_bulk_take_another_address_of_the_list_or_say_what_they_need(
    space: RealSpace,
) -> None:
    path = space.home.agent_creds("ada")
    both = f"{wss(space)},{space.info.url}"
    (await asyncio.to_thread(WorkerConnection.open, both, path)).close()
    with pytest.raises(BrokerUnreachable, match="speak no websocket: give them a tls:// or nats:// address"):
        await asyncio.to_thread(WorkerConnection.open, wss(space), path)


async def test_websockets_alone_need_no_other_door(tmp_path: Path) -> None:
    async with real_space(tmp_path / "home", ws=HERE) as space:
        await space.add("ada")
        assert space.info.address.startswith("nats://127.0.0.1:")
        assert address_for(space.info, []) == wss(space)
        assert space.info.trusted == parse_address(wss(space)).authority
        async with space.administer() as admin:
            reach = reach_of(admin, None)
            assert (reach.trust, reach.websocket, reach.port) == (Trust.AUTHORITY, True, space.info.ws_port)
        async with endpoint(space, "ada", wss(space)) as ada:
            await ada.send("general", "by the only way in")
        port = space.info.port
        for name in (HERE, "127.0.0.3"):
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(name, port)


async def test_a_certificate_is_swapped_under_websockets_that_stay(space: RealSpace) -> None:
    files, info = space.home.certificates, space.info

    def shown() -> str:
        return ssl.get_server_certificate((HERE, info.ws_port))

    async with endpoint(space, "ada", wss(space)) as ada:
        before = await asyncio.to_thread(shown)
        files.server.unlink()
        ensure_certificates(files, info.name)
        space.broker.reload()

        async def is_new() -> bool:
            return await asyncio.to_thread(shown) != before

        await eventually(is_new, what="the new one is shown")
        await ada.send("general", "nobody noticed")
        assert ada.transport.connection.rebuilds == 0


# --- a proxy on the way ---


@asynccontextmanager
async def behind(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ConnectProxy]:
    """This machine reaches nobody but a proxy."""
    async with connect_proxy() as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        yield proxy


async def test_a_proxy_that_the_environment_names_is_gone_through_and_sees_nothing(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with behind(monkeypatch) as proxy, endpoint(space, "ada", wss(space)) as ada:
        await ada.send("general", "through the proxy")
        assert [each.split()[1] for each in proxy.asked] == [f"{HERE}:{space.info.ws_port}".encode()]
        assert proxy.carried[:1] == b"\x16"
        assert all(word not in proxy.carried for word in (b"CONNECT {", b"through the proxy", b"Upgrade"))
        proxy.cut()
        await ada.send("general", "and again", timeout=20)
        assert len(proxy.asked) == 2
        monkeypatch.setenv("NO_PROXY", HERE)
        await (await opened(space, wss(space))).close()
        assert len(proxy.asked) == 2, "what goes without it does"


async def test_a_proxy_that_refuses_or_wants_a_password_is_named_with_its_answer(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with behind(monkeypatch) as proxy:
        proxy.status = b"403 Forbidden"
        said = str(await refusal(space, wss(space)))
        assert f"the proxy 127.0.0.1:{proxy.port} answered 403 Forbidden: it lets nobody through" in said
        proxy.status, proxy.wants = b"200 OK", b"Proxy-Authorization: Basic YWRhOnNlY3JldA=="
        said = str(await refusal(space, wss(space)))
        assert "answered 407 Proxy Authentication Required: it wants a password" in said
        monkeypatch.setenv("HTTPS_PROXY", f"http://ada:secret@127.0.0.1:{proxy.port}")
        await (await opened(space, wss(space))).close()
        monkeypatch.setenv("HTTPS_PROXY", f"http://ada:secret@127.0.0.1:{free_port()}")
        said = str(await refusal(space, wss(space)))
        assert "cannot be reached" in said
        assert "secret" not in said


# --- doctor ---


async def steps_of(space: RealSpace, url: str) -> list[tuple[str, str, str]]:
    identity = replace(await find_identity("main", "ada", space.home.home), url=url, follow=None)
    return [(step.what, step.verdict, step.said) async for step in check_connection(identity)]


async def test_doctor_names_each_step_to_a_websocket_and_which_fails(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await steps_of(space, wss(space))
    names = ["name", "port", "TLS", "websocket", "greeting", "credential", "steward", "clock"]
    assert [(what, verdict) for what, verdict, _ in found] == [(name, "ok") for name in names]
    (*before, (what, verdict, said)) = await steps_of(
        space, moved(wss(space), [f"{HERE}:{space.info.port}"])
    )  # the broker's other port: TLS is right, and it says INFO where a websocket answers
    assert ([each[0] for each in before], what, verdict) == (["name", "port", "TLS"], "websocket", "problem")
    assert "no websocket" in said
    async with behind(monkeypatch) as proxy:
        assert [each[0] for each in await steps_of(space, wss(space))] == [*names[:2], "proxy", *names[2:]]
        proxy.status = b"403 Forbidden"
        (*before, (what, verdict, said)) = await steps_of(space, wss(space))
        assert ([each[0] for each in before], what, verdict) == (["name", "port"], "proxy", "problem")
        assert "answered 403 Forbidden" in said
        monkeypatch.setenv("HTTPS_PROXY", "socks5://127.0.0.1:1080")
        assert (await steps_of(space, wss(space)))[0][:2] == ("proxy", "problem")


@pytest.mark.parametrize("answer", ["200 OK", "403 Forbidden", "407 Log In", "502 Bad Gateway", ""])
async def test_doctor_says_what_was_answered_instead_of_a_websocket(space: RealSpace, answer: str) -> None:
    async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer:
            writer.write(f"HTTP/1.1 {answer}\r\nContent-Length: 2\r\n\r\nhi".encode())
            await writer.drain()
        writer.close()

    files = space.home.certificates
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.server, files.server_key)
    server = await asyncio.start_server(web, HERE, 0, ssl=context)
    url = moved(wss(space), [f"{HERE}:{server.sockets[0].getsockname()[1]}"])
    (*_, (what, verdict, said)) = await steps_of(space, url)
    assert (what, verdict) == ("websocket", "problem")
    assert (answer or "hung up") in said
    assert (answer or "hung up") in str(await refusal(space, url))
    server.close()


async def test_who_connects_and_says_nothing_is_let_go(space: RealSpace) -> None:
    """Descriptors are what the broker's files need too."""
    silent = [await asyncio.open_connection(HERE, space.info.ws_port) for _ in range(20)]
    async with asyncio.timeout(30):
        assert [await reader.read() for reader, _ in silent] == [b""] * 20
    for _, writer in silent:
        writer.close()
