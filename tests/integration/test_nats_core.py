"""Both drivers on a real nats-server: plain and with TLS, large and many, denied and gone."""

from __future__ import annotations

import asyncio
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tidings.nats import aio
from tidings.nats.blocking import BlockingConnection
from tidings.nats.core import Auth, Msg, header_block
from tidings.nats.errors import AuthRefused, ConnectionGone, NoResponders, PublishDenied
from tidings.server.nats_server import find_binary, free_port, greeting
from tidings_testing.waiting import eventually

pytestmark = pytest.mark.broker

USERS = """
authorization { users = [
  { user: ada, password: secret, permissions: { publish: { deny: "Denied.>" } } }
] }
"""


class Server:
    def __init__(self, folder: Path, more: str = "", log_file: Path | None = None) -> None:
        self.port = free_port()
        self._conf = folder / "nats.conf"
        self._log_file = f'log_file: "{log_file}"\n' if log_file is not None else ""
        self._configure(more)
        self._process: subprocess.Popen[bytes] | None = None

    def _configure(self, more: str) -> None:
        rules = f'listen: "127.0.0.1:{self.port}"\nmax_payload: 9MB\nmax_pending: 64MB\n'
        self._conf.write_text(f"{rules}{self._log_file}{more}\n")

    @property
    def url(self) -> str:
        return f"nats://localhost:{self.port}"

    def reload(self, more: str) -> None:
        assert self._process is not None
        self._configure(more)
        self._process.send_signal(signal.SIGHUP)

    def spawn(self) -> None:
        self._process = subprocess.Popen([find_binary(), "-c", self._conf], stderr=subprocess.DEVNULL)

    async def start(self, *, greets: bool = True) -> None:
        self.spawn()
        if greets:
            await eventually(lambda: greeting(self.port) is not None, within=20)

    def end(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(20)
            self._process = None


@asynccontextmanager
async def serving(
    folder: Path, more: str = "", *, greets: bool = True, log_file: Path | None = None
) -> AsyncIterator[Server]:
    server = Server(folder, more, log_file)
    try:
        await server.start(greets=greets)
        yield server
    finally:
        server.end()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for localhost."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not there to make a certificate")
    folder = tmp_path_factory.mktemp("authority")
    made = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        f"-addext subjectAltName=DNS:localhost -keyout {folder}/key.pem -out {folder}/cert.pem"
    )
    subprocess.run([openssl, *made.split()], check=True, capture_output=True)
    return folder


def trusting(authority: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority / "cert.pem"))


async def test_large_and_many_messages_come_whole_and_in_order(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        connection = await aio.connect(server.url)
        subscription = await connection.subscribe("a.>")
        large = bytes(range(256)) * 4096 * 8
        await connection.publish("a.large", large, headers={"K": "v"})
        for number in range(5_000):
            await connection.publish(f"a.{number % 7}", b"%d" % number)
        first = await subscription.next(20)
        assert (first.data == large, first.block) == (True, header_block([("K", "v")]))
        assert [int((await subscription.next(20)).data) for _ in range(5_000)] == list(range(5_000))
        with pytest.raises(NoResponders):
            await connection.request("nobody", timeout=5)
        await connection.close()


async def test_who_stood_still_while_connecting_is_not_refused_and_comes_back(tmp_path: Path) -> None:
    """A laptop that slept, or a machine too busy to greet in time: its credential is as good as before."""
    delays: list[float] = []

    def slow(_info: object) -> dict[str, str]:
        if delays:
            time.sleep(delays.pop())
        return {"user": "ada", "pass": "secret"}

    quick = USERS.replace("authorization {", "authorization { timeout: 0.2,")
    async with serving(tmp_path, quick) as server, asyncio.timeout(30):
        delays.append(0.6)
        with pytest.raises(ConnectionGone):
            await aio.connect(server.url, auth=lambda: slow)
        delays.append(0.6)
        with pytest.raises(ConnectionGone):
            await asyncio.to_thread(BlockingConnection.connect, server.url, auth=slow)
        connection = await aio.connect(server.url, auth=lambda: slow, reconnect=True)
        delays += [0.6] * 4  # more often than a refusal is taken for the last word
        server.end(signal.SIGKILL)
        await server.start()
        await eventually(lambda: not delays and connection.is_connected, within=20)
        await connection.close()


async def test_a_good_credential_is_accepted_although_the_server_reloads_while_we_connect(tmp_path: Path) -> None:
    """nats-server refuses every connection that has not sent CONNECT when it reloads, whatever its credential."""
    log_file, greeted = tmp_path / "nats.log", 0

    def answer(_info: object) -> dict[str, str]:
        nonlocal greeted
        greeted += 1
        if greeted % 2:
            before = reloads()
            server.reload(USERS.replace("users = [", f'users = [ {{ user: "other{greeted}", password: x }}'))
            deadline = time.monotonic() + 10
            while reloads() == before and time.monotonic() < deadline:
                time.sleep(0.01)
        return {"user": "ada", "pass": "secret"}

    def reloads() -> int:
        return log_file.read_text().count("Reloaded server configuration")

    async with serving(tmp_path, USERS, log_file=log_file) as server, asyncio.timeout(40):
        connection = await aio.connect(server.url, auth=lambda: answer)
        assert (connection.is_connected, greeted) == (True, 2)
        await connection.close()
        blocking = await asyncio.to_thread(BlockingConnection.connect, server.url, auth=answer)
        assert greeted == 4
        blocking.close()
        assert log_file.read_text().count("authentication error") == 2, "each was refused once"


async def test_a_refused_user_and_a_denied_subject_are_said_at_once(tmp_path: Path) -> None:
    def password(secret: str) -> Auth:
        return lambda _info: {"user": "ada", "pass": secret}

    async with serving(tmp_path, USERS) as server, asyncio.timeout(10):
        with pytest.raises(AuthRefused):
            await aio.connect(server.url, auth=lambda: password("wrong"))
        with pytest.raises(AuthRefused):
            await asyncio.to_thread(BlockingConnection.connect, server.url, auth=password("wrong"))
        connection = await aio.connect(server.url, auth=lambda: password("secret"))
        with pytest.raises(PublishDenied):
            await connection.request('Denied."quoted\\', timeout=60)
        assert connection.is_connected
        await connection.close()
        blocking = await asyncio.to_thread(BlockingConnection.connect, server.url, auth=password("secret"))
        with pytest.raises(PublishDenied):
            await asyncio.to_thread(blocking.request, "Denied.b")
        blocking.close()


async def test_a_killed_server_is_noticed_and_a_connection_that_reconnects_hears_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        closed, back = asyncio.Event(), asyncio.Event()
        plain = await aio.connect(server.url, on_closed=closed.set)
        lasting = await aio.connect(server.url, reconnect=True, on_reconnected=back.set)
        heard: list[bytes] = []
        await lasting.listen("a", lambda message: heard.append(message.data))
        before = lasting.incarnation
        server.end(signal.SIGKILL)
        async with asyncio.timeout(10):
            await closed.wait()
        with pytest.raises(ConnectionGone):
            await plain.request("a")
        await server.start()
        async with asyncio.timeout(10):
            await back.wait()
        await lasting.publish("a", b"x")
        await eventually(lambda: heard == [b"x"])
        assert lasting.incarnation not in ("", before)
        await lasting.close()
        await plain.close()


async def test_a_connection_that_breaks_during_a_callback_serves_the_next_message_once_it_is_back(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as server:
        back, heard = asyncio.Event(), list[bytes]()

        async def hear(message: Msg) -> None:
            heard.append(message.data)
            if message.data == b"break":
                connection.abort()  # the connection learns only in a later turn that its socket is gone

        connection = await aio.connect(server.url, reconnect=True, on_reconnected=back.set)
        await connection.subscribe("a", hear)
        await connection.publish("a", b"break")
        async with asyncio.timeout(20):
            await back.wait()
        await connection.publish("a", b"next")
        await eventually(lambda: heard == [b"break", b"next"])
        await connection.close()


async def test_what_a_subscription_has_on_its_way_is_there_when_it_is_drained(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        connection = await aio.connect(server.url)
        subscription = await connection.subscribe("a")
        for number in range(100):
            await connection.publish("a", b"%d" % number)
        await subscription.drain(5)
        await connection.publish("a", b"after")
        await connection.flush()
        assert [int(each.data) for each in subscription.waiting()] == list(range(100))
        assert connection.subscriptions == ()
        await connection.close()


@pytest.mark.parametrize("first", [False, True])
async def test_tls_is_spoken_after_the_greeting_or_first_and_only_to_who_is_trusted(
    tmp_path: Path, authority: Path, first: bool
) -> None:
    handshake = "handshake_first: true" if first else ""
    more = f'tls {{ cert_file: "{authority}/cert.pem", key_file: "{authority}/key.pem", timeout: 5\n{handshake} }}'
    async with serving(tmp_path, more, greets=not first) as server, asyncio.timeout(30):

        async def is_up() -> bool:
            try:
                await (await aio.connect(server.url, tls=trusting(authority), tls_first=first)).close()
            except ConnectionGone:
                return False
            return True

        await eventually(is_up, within=20)
        connection = await aio.connect(server.url, tls=trusting(authority), tls_first=first)

        async def echo(message: Msg) -> None:
            await connection.publish(message.reply, message.data)

        await connection.subscribe("echo", cb=echo)
        assert (await connection.request("echo", b"x" * 500_000)).data == b"x" * 500_000
        blocking = await asyncio.to_thread(
            BlockingConnection.connect, server.url, tls=trusting(authority), tls_first=first
        )
        assert (await asyncio.to_thread(blocking.request, "echo", b"y")).payload == b"y"
        blocking.close()
        await connection.close()
        with pytest.raises(ConnectionGone, match=r"(?i)certificate"):
            await aio.connect(server.url, tls=ssl.create_default_context(), tls_first=first)
        url = server.url.replace("localhost", "127.0.0.1")
        with pytest.raises(ConnectionGone, match=r"(?i)match|certificate"):
            await aio.connect(url, tls=trusting(authority), tls_first=first)


async def test_a_blocking_connection_reads_in_bulk_what_it_asked_for_and_answers_pings(tmp_path: Path) -> None:
    async with serving(tmp_path, 'ping_interval: "200ms"\nping_max: 2') as server:
        responder = await aio.connect(server.url)

        async def pages(message: Msg) -> None:
            for number in range(int(message.data)):
                await responder.publish(message.reply, b"%d" % number, headers={"N": str(number)})
            await responder.publish(message.reply, b"end")

        await responder.subscribe("pages", cb=pages)
        await responder.flush()

        def read() -> list[bytes]:
            connection = BlockingConnection.connect(server.url)
            older = connection.send_request("pages", b"300")
            token = connection.send_request("pages", b"2000")
            found = []
            for block, payload in connection.parts(token, 20):
                if not block:
                    break
                found.append(payload)
            for _ in range(6):  # longer than the server waits for somebody who answers no PING
                signal.sigtimedwait([], 0.15)
                connection.ping()
            assert older < token
            connection.close()
            return found

        assert await asyncio.to_thread(read) == [b"%d" % number for number in range(2_000)]
        await responder.close()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_connection_that_reconnects_goes_on_by_another_server_of_its_list(
    tmp_path: Path, fault: signal.Signals
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    async with serving(tmp_path / "first") as first, serving(tmp_path / "second") as second:
        connection = await aio.connect([first.url, second.url], reconnect=True, ping_interval=0.3)
        subscription = await connection.subscribe("a.>")

        def port() -> int:
            return connection.address.port if connection.is_connected and connection.address else 0

        assert port() == first.port
        assert first._process is not None
        first._process.send_signal(fault)
        try:
            await eventually(lambda: port() == second.port, within=20)
            await connection.publish("a.b", b"still heard")
            assert (await subscription.next(10)).data == b"still heard"
        finally:
            if fault is signal.SIGSTOP:
                first._process.send_signal(signal.SIGCONT)
        await connection.close()
