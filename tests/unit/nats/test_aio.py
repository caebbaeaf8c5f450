"""The asyncio driver towards a server that does what no real one does on purpose. Nobody is left waiting."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import pytest

from scripted_server import Scripted, scripted_server, stay
from tidings.nats import aio
from tidings.nats.address import parse_address
from tidings.nats.core import Msg
from tidings.nats.errors import (
    AuthRefused,
    ConnectionGone,
    NatsError,
    NoResponders,
    NotConnected,
    ProtocolError,
    PublishDenied,
    ServerComplaint,
    SlowReader,
    Unwritable,
)
from tidings_testing.waiting import eventually


async def welcoming(server: Scripted) -> None:
    await server.welcome()
    await stay(server)


def inbox_of(server: Scripted) -> str:
    """Where the client hears answers, by its first SUB."""
    return next(line for line in server.heard if line.startswith(b"SUB ")).split()[1].decode().removesuffix("*")


async def answering(server: Scripted) -> None:
    """Every request with `!` before its payload."""
    await server.welcome()
    while True:
        words = (await server.line()).split()
        if words[0] == b"PUB" and len(words) == 4:
            payload = b"!" + await server.line()
            server.say(b"MSG %b 1 %d\r\n%b\r\n" % (words[2], len(payload), payload))
        elif words[0] == b"PING":
            server.say(b"PONG\r\n")


async def test_a_request_is_answered_and_many_at_once_each_by_its_own() -> None:
    async with scripted_server(answering) as url:
        connection = await aio.connect(url)
        assert (await connection.request("a", b"x")).data == b"!x"
        answers = await asyncio.gather(*(connection.request("a", b"%d" % n) for n in range(200)))
        assert [each.data for each in answers] == [b"!%d" % n for n in range(200)]
        assert (connection.incarnation, connection.is_connected) == ("SCRIPTED", True)
        await connection.close()
        assert (connection.is_closed, connection.is_connected) == (True, False)


async def test_who_waits_hears_at_once_that_the_connection_went() -> None:
    async def hangs_up(server: Scripted) -> None:
        await server.welcome()
        await server.until(b"PUB")
        server.hang_up()

    closed = asyncio.Event()
    async with scripted_server(hangs_up) as url:
        connection = await aio.connect(url, on_closed=closed.set)
        subscription = await connection.subscribe("s")
        waits = [
            asyncio.create_task(connection.flush(60)),
            asyncio.create_task(subscription.next(60)),
            asyncio.create_task(subscription.next(60)),
            asyncio.create_task(connection.request("a", timeout=60)),
        ]
        async with asyncio.timeout(5):
            ended = await asyncio.gather(*waits, return_exceptions=True)
            await closed.wait()
        assert all(isinstance(each, ConnectionGone) for each in ended), ended
        for ask in (connection.request("a"), connection.publish("a"), connection.flush(), connection.subscribe("a")):
            with pytest.raises(NotConnected):
                await ask
        await subscription.unsubscribe()
        await connection.close()


async def test_a_denial_ends_the_requests_it_speaks_of_and_no_other_and_nobody_listens_is_heard() -> None:
    async def denying(server: Scripted) -> None:
        await server.welcome()
        await server.until(b"PUB no.one")
        server.say(b"HMSG %b1 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n" % inbox_of(server).encode())
        await server.until(b"PUB Denied.a")
        server.say(b"-ERR 'Permissions Violation for Publish to \"Denied.a\"'\r\n")
        await stay(server)

    told: list[Exception] = []
    async with scripted_server(denying) as url:
        connection = await aio.connect(url, on_error=told.append)
        complaints: list[str] = []
        connection.on_complaint.append(complaints.append)
        with pytest.raises(NoResponders):
            await connection.request("no.one", timeout=5)
        other = asyncio.create_task(connection.request("other", timeout=0.3))
        with pytest.raises(PublishDenied, match=r"Denied\.a"):
            await connection.request("Denied.a", timeout=5)
        with pytest.raises(TimeoutError):
            await other
        assert (len(complaints), [type(each) for each in told]) == (1, [ServerComplaint])
        assert connection.is_connected
        await connection.close()


@pytest.mark.parametrize("turns", range(5))
async def test_a_cancellation_gets_through_and_takes_no_message_with_it(turns: int) -> None:
    sending = asyncio.Event()

    async def sends(server: Scripted) -> None:
        await server.welcome()
        await server.until(b"SUB s")
        await sending.wait()
        server.say(b"MSG s 2 1\r\nx\r\n")
        await stay(server)

    async with scripted_server(sends) as url:
        connection = await aio.connect(url)
        subscription = await connection.subscribe("s")
        arrived = asyncio.Event()
        keep = subscription.handler

        def noting(message: Msg) -> None:
            keep(message)
            arrived.set()

        subscription.handler = noting
        waiting = asyncio.create_task(subscription.next(5))
        await asyncio.sleep(0)
        sending.set()
        await arrived.wait()
        for _ in range(turns):
            await asyncio.sleep(0)
        told = waiting.cancel()
        got = [each.data for each in await asyncio.gather(waiting, return_exceptions=True) if isinstance(each, Msg)]
        assert waiting.cancelled() == told, "who was told before the end stops"
        assert got + [each.data for each in subscription.waiting()] == [b"x"], "and the message is not lost"
        await connection.close()


async def test_of_two_who_wait_the_other_gets_what_the_cancelled_one_was_woken_for() -> None:
    async with scripted_server(welcoming) as url:
        connection = await aio.connect(url)
        subscription = await connection.subscribe("s")
        first, second = (asyncio.create_task(subscription.next(5)) for _ in range(2))
        await asyncio.sleep(0.01)
        subscription.handler(Msg(2, b"s", b"", b"", b"x"))
        first.cancel()
        assert (await second).data == b"x"
        with pytest.raises(asyncio.CancelledError):
            await first
        with pytest.raises(TimeoutError):
            await subscription.next(0.01)
        await connection.close()


async def test_a_cancelled_ping_keeps_its_place() -> None:
    async def late(server: Scripted) -> None:
        await server.welcome()
        await server.until(b"PING")
        await server.until(b"PING")
        server.say(b"PONG\r\n")
        await server.until(b"PUB first.was.answered")
        server.say(b"PONG\r\n")
        await stay(server)

    async with scripted_server(late) as url:
        connection = await aio.connect(url)
        first = asyncio.create_task(connection.flush(5))
        await asyncio.sleep(0.01)
        first.cancel()
        second = asyncio.create_task(connection.flush(5))
        await asyncio.sleep(0.1)
        assert not second.done(), "the first PONG is not the second's"
        await connection.publish("first.was.answered")
        await second
        await connection.close()


async def test_a_handler_that_raises_unsubscribes_or_closes_in_the_middle_of_a_batch_stops_nobody() -> None:
    async def batch(server: Scripted) -> None:
        await server.welcome()
        await server.until(b"PING")
        server.say(b"PONG\r\n" + b"".join(b"MSG s %d 1\r\n%d\r\n" % (2 + n % 3, n) for n in range(9)))
        await stay(server)

    told: list[Exception] = []
    heard: list[str] = []
    async with scripted_server(batch) as url:
        connection = await aio.connect(url, on_error=told.append)

        def raises(message: Msg) -> None:
            heard.append(f"a{message.data.decode()}")
            raise ValueError("mine")

        def leaves(message: Msg) -> None:
            heard.append(f"b{message.data.decode()}")
            connection._forget(second)

        def closes(message: Msg) -> None:
            heard.append(f"c{message.data.decode()}")
            if message.data == b"5":
                closing.append(asyncio.ensure_future(connection.close()))

        closing: list[Any] = []
        await connection.listen("s", raises)
        second = await connection.listen("s", leaves)
        await connection.listen("s", closes)
        await connection.flush()
        await eventually(lambda: closing)
        await closing[0]
        assert heard[:6] == ["a0", "b1", "c2", "a3", "c5", "a6"][: len(heard[:6])]
        assert "b4" not in heard
        assert all(isinstance(each, ValueError) for each in told)


async def test_what_one_message_does_keeps_no_callback_from_the_next() -> None:
    async with scripted_server(welcoming) as url:
        told: list[Exception] = []
        connection = await aio.connect(url, on_error=told.append)
        heard: list[bytes] = []

        async def callback(message: Msg) -> None:
            heard.append(message.data)
            if message.data == b"bad":
                raise ValueError(message.data)

        subscription = await connection.subscribe("s", cb=callback)
        for data in (b"bad", b"good"):
            subscription.handler(Msg(2, b"s", b"", b"", data))
        await eventually(lambda: heard == [b"bad", b"good"])
        assert [type(each) for each in told] == [ValueError]
        await connection.close()


async def test_a_subscription_nobody_reads_is_bounded_and_says_so() -> None:
    async with scripted_server(welcoming) as url:
        told: list[Exception] = []
        connection = await aio.connect(url, on_error=told.append)
        subscription = await connection.subscribe("s")
        subscription.limit = 1_000
        for _ in range(100):
            subscription.handler(Msg(2, b"s", b"", b"", b"x" * 100))
        kept = len(list(subscription.waiting()))
        assert kept <= 12
        assert len(told) == 100 - kept
        assert isinstance(told[0], SlowReader)
        subscription.handler(Msg(2, b"s", b"", b"", b"x"))
        assert (await subscription.next(1)).data == b"x", "it hears again once there is room"
        await connection.close()


async def test_publishing_to_a_server_that_does_not_read_is_bounded_and_so_is_closing() -> None:
    async def deaf(server: Scripted) -> None:
        await server.welcome()
        server._reader._transport.pause_reading()  # type: ignore[attr-defined]
        await stay(server)

    async with scripted_server(deaf) as url:
        connection = await aio.connect(url)
        sent = 0

        async def pour() -> None:
            nonlocal sent
            while True:
                await connection.publish("a", b"x" * 100_000)
                sent += 100_000

        pouring = asyncio.create_task(pour())
        done, _ = await asyncio.wait({pouring}, timeout=0.5)
        assert not done, "it waits"
        assert sent < 64 << 20, "instead of keeping everything"
        pouring.cancel()
        with pytest.raises(TimeoutError):
            await connection.request("a", b"x", timeout=0.1)
        async with asyncio.timeout(5):
            await connection.close()
        assert connection.is_closed


# --- opening ---


@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"INFO {\r\n",
        b"-ERR 'nope'\r\n",
        b"INFO {}\r\n-ERR 'Maximum Connections Exceeded'\r\n",
    ],
)
async def test_whatever_is_no_server_is_said_in_time(greeting: bytes) -> None:
    async def odd(server: Scripted) -> None:
        server.say(greeting)
        server._writer.close()

    async with scripted_server(odd) as url, asyncio.timeout(5):
        with pytest.raises(ConnectionGone):
            await aio.connect(url, timeout=3)


async def test_a_server_that_never_greets_is_given_up_and_cancelling_leaves_no_socket() -> None:
    async with scripted_server(stay) as url:
        with pytest.raises(ConnectionGone, match="it does not answer"):
            await aio.connect(url, timeout=0.1)
        opening = asyncio.create_task(aio.connect(url, timeout=60))
        await asyncio.sleep(0.05)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening


async def refusing(server: Scripted) -> None:
    server.greet()
    await server.until(b"PING")
    server.say(b"-ERR 'Authorization Violation'\r\n")
    await stay(server)


async def test_a_credential_that_all_refuse_is_told_apart_and_one_that_another_takes_is_good() -> None:
    async with scripted_server(refusing) as first, scripted_server(welcoming) as second, asyncio.timeout(10):
        with pytest.raises(AuthRefused, match=f"{first}: Authorization Violation") as refused:
            await aio.connect(first)
        assert refused.value.by_all
        with pytest.raises(AuthRefused, match=r"nats://127\.0\.0\.1:1: nothing listens there; ") as refused:
            await aio.connect(["nats://127.0.0.1:1", first])
        assert not refused.value.by_all, "the other one might take it"
        connection = await aio.connect([first, second])
        assert (connection.is_connected, connection.address) == (True, parse_address(second))
        await connection.close()
        connection = await aio.connect(f"nats://127.0.0.1:1,{second}")
        assert connection.is_connected
        await connection.close()


@pytest.mark.parametrize("url", ["", "http://localhost:4222", "nats://:x", "nats://"])
async def test_an_address_that_is_none_is_said(url: str) -> None:
    with pytest.raises(Unwritable, match="NATS server"):
        await aio.connect(url)


# --- TLS ---


async def test_no_tls_server_is_ever_spoken_to_in_plain() -> None:
    heard: list[bytes] = []

    async def plain(server: Scripted) -> None:
        server.greet()
        heard.append(await server.line())

    async with scripted_server(plain) as url, asyncio.timeout(5):
        with pytest.raises(ConnectionGone, match="offers no TLS"):
            await aio.connect(url, tls=ssl.create_default_context())
        with pytest.raises(ConnectionGone, match="offers no TLS"):
            await aio.connect(url.replace("nats://", "tls://"))
    assert heard == [], "no CONNECT, and so no credential"


async def test_what_is_said_between_the_greeting_and_tls_ends_it() -> None:
    heard: list[bytes] = []

    async def injecting(server: Scripted) -> None:
        server.say(b'INFO {"tls_required":true}\r\nMSG _INBOX 1 1\r\nx\r\n')
        heard.append(await server.line())

    async with scripted_server(injecting) as url, asyncio.timeout(5):
        with pytest.raises(ConnectionGone, match="before TLS"):
            await aio.connect(url)
    assert not any(b"CONNECT" in each for each in heard)


# --- reconnecting ---


async def test_a_connection_that_reconnects_subscribes_again_and_says_so_and_requests_wait_for_it() -> None:
    again = asyncio.Event()

    async def first(server: Scripted) -> None:
        await server.welcome()
        await server.until(b"SUB s")
        server.hang_up()

    async def second(server: Scripted) -> None:
        await again.wait()
        server.greet(server_id="SECOND")
        await server.until(b"PING")
        assert any(line.startswith(b"SUB s 2") for line in server.heard)
        server.say(b"PONG\r\nMSG s 2 1\r\nx\r\n")
        words = (await server.until(b"PUB")).split()
        server.say(b"MSG %b 1 2\r\nok\r\n" % words[2])
        await stay(server)

    happened: list[str] = []
    async with scripted_server(first, second) as url:
        connection = await aio.connect(
            url,
            reconnect=True,
            on_disconnected=lambda: happened.append("gone"),
            on_reconnected=lambda: happened.append("back"),
            on_closed=lambda: happened.append("closed"),
        )
        heard: list[bytes] = []

        async def callback(message: Msg) -> None:
            heard.append(message.data)

        await connection.subscribe("s", cb=callback)
        await eventually(lambda: happened == ["gone"])
        assert (connection.is_connected, connection.is_closed) == (False, False)
        with pytest.raises(NotConnected):
            await connection.publish("a")
        with pytest.raises(NotConnected):
            await connection.request("a", timeout=0.05)
        asked = asyncio.create_task(connection.request("a", timeout=10))
        again.set()
        assert (await asked).data == b"ok"
        await eventually(lambda: heard == [b"x"])
        assert (happened, connection.incarnation) == (["gone", "back"], "SECOND")
        await connection.close()
        assert happened == ["gone", "back", "closed"]


async def test_a_connection_whose_credential_is_refused_twice_is_closed_for_good() -> None:
    async def first(server: Scripted) -> None:
        await server.welcome()
        server.hang_up()

    async def refusing(server: Scripted) -> None:
        server.greet()
        await server.until(b"PING")
        server.say(b"-ERR 'User Authentication Revoked'\r\n")
        await stay(server)

    closed = asyncio.Event()
    async with scripted_server(first, refusing) as url, asyncio.timeout(10):
        connection = await aio.connect(url, reconnect=True, on_closed=closed.set)
        await closed.wait()
        assert connection.is_closed
        with pytest.raises(NatsError):
            await connection.request("a")
        await connection.close()


async def test_closing_while_it_reconnects_ends_it() -> None:
    async def first(server: Scripted) -> None:
        await server.welcome()
        server.hang_up()

    gone = asyncio.Event()
    async with scripted_server(first, stay) as url:
        connection = await aio.connect(url, reconnect=True, on_disconnected=gone.set)
        await gone.wait()
        asked = asyncio.create_task(connection.request("a", timeout=60))
        await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            await connection.close()
            with pytest.raises(NotConnected):
                await asked


async def test_a_server_that_went_silent_is_given_up_after_two_pings() -> None:
    async def silent(server: Scripted) -> None:
        await server.welcome()
        await stay(server)

    closed = asyncio.Event()
    async with scripted_server(silent) as url, asyncio.timeout(10):
        connection = await aio.connect(url, ping_interval=0.05, on_closed=closed.set)
        waiting = [asyncio.create_task(connection.flush(60)) for _ in range(5)]
        await closed.wait()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert all("silent" in str(each) for each in ended)
        await connection.close()


async def test_a_server_that_does_not_keep_to_the_protocol_is_given_up() -> None:
    async def broken(server: Scripted) -> None:
        await server.welcome()
        await server.until(b"PUB")
        server.say(b"MSG a 1 +1\r\nx\r\n")
        await stay(server)

    async with scripted_server(broken) as url, asyncio.timeout(5):
        connection = await aio.connect(url)
        with pytest.raises((ProtocolError, ConnectionGone)):
            await connection.request("a", timeout=60)
        await eventually(lambda: connection.is_closed)
        await connection.close()
