"""How a pull ends that nobody waits for any more, in the order in which the broker hears of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from scripted_server import Scripted, scripted_server
from tidings.client.mailbox import NO_PULL, pull
from tidings.nats import aio
from tidings.nats.acks import NAK
from tidings.util.task_ends import end_tasks
from tidings_testing.waiting import eventually

ASKED = b"$JS.API.CONSUMER.MSG.NEXT.S.c"
DELIVERED = b"$JS.ACK.S.c.1.7.1.1700000000000000000.0"


class Broker:
    """Hears a pull, and answers the word that ends it only when it is let."""

    def __init__(self) -> None:
        self.said: list[bytes] = []
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def __call__(self, server: Scripted) -> None:
        await server.welcome()
        inbox = b""
        while True:
            words = (await server.line()).split()
            if words[0] == b"SUB":
                sid = words[-1]
            elif words[0] == b"PING":
                self.said.append(b"PING")
                server.say(b"PONG\r\n")
                continue
            elif words[0] == b"PUB":
                words.append(await server.line())
            if words[:2] == [b"PUB", ASKED] and words[-1] == NO_PULL:
                self.said.append(b"NO PULL")
                self.asked.set()
                await self.answers.wait()
                # what the broker had handed to the pull meanwhile comes before its answer
                server.say(b"MSG %b %b %b 1\r\nx\r\n" % (inbox, sid, DELIVERED))
                server.say(b"HMSG %b 1 16 16\r\nNATS/1.0 400\r\n\r\n\r\n" % words[2])
            elif words[:2] == [b"PUB", ASKED]:
                inbox = words[2]
                self.said.append(b"PULL")
            elif words[0] in (b"SUB", b"UNSUB"):
                self.said.append(words[0])
            else:
                self.said.append(b" ".join([words[1], words[-1]]))


async def never(_message: Any, _delivery: Any) -> None:
    raise AssertionError("a pull that was cancelled takes nothing")


async def test_a_cancelled_pull_leaves_once_the_broker_knows_of_it_and_gives_back_what_came_meanwhile() -> None:
    broker = Broker()
    async with scripted_server(broker) as url, asyncio.timeout(10):
        connection = await aio.connect(url)
        pulling = asyncio.create_task(pull(connection, "S", "c", 1, 10.0, never))
        await eventually(lambda: b"PULL" in broker.said)
        ending = asyncio.create_task(end_tasks([pulling]))
        await broker.asked.wait()
        before = [b"SUB", b"PULL", b"NO PULL"]
        assert broker.said == before
        pulling.cancel()  # told again, as one is who takes long
        await asyncio.sleep(0.05)
        assert broker.said == before, "it does not leave before it was answered"
        broker.answers.set()
        await ending
        assert pulling.cancelled()
        await connection.flush()
        assert broker.said[3:] == [b"UNSUB", b"PING", DELIVERED + b" " + NAK, b"PING"]
        await connection.close()


async def test_a_broker_that_does_not_answer_holds_up_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidings.client.mailbox.GIVING_BACK", 0.05)
    broker = Broker()
    async with scripted_server(broker) as url, asyncio.timeout(10):
        connection = await aio.connect(url)
        pulling = asyncio.create_task(pull(connection, "S", "c", 1, 10.0, never))
        await eventually(lambda: b"PULL" in broker.said)
        await end_tasks([pulling])
        assert pulling.cancelled()
        assert broker.said == [b"SUB", b"PULL", b"NO PULL"]
        await connection.close()


class Hasty(Broker):
    """One of several: it says that a pull is over before it sends what it handed to it."""

    def __init__(self, status: bytes, pending: int, sends: int) -> None:
        super().__init__()
        self.status, self.pending, self.sends = status, pending, sends

    async def __call__(self, server: Scripted) -> None:
        await server.welcome()
        sid = b""
        while True:
            words = (await server.line()).split()
            if words[0] == b"SUB":
                sid = words[-1]
            elif words[0] == b"PING":
                server.say(b"PONG\r\n")
            elif words[0] == b"PUB":
                await server.line()
                block = b"NATS/1.0 %b\r\nNats-Pending-Messages: %d\r\n\r\n" % (self.status, self.pending)
                server.say(b"HMSG %b %b %d %d\r\n%b\r\n" % (words[2], sid, len(block), len(block), block))
                for number in range(self.sends):
                    delivered = b"$JS.ACK.S.c.1.%d.1.1700000000000000000.0" % (number + 1)
                    server.say(b"MSG s %b %b 1\r\nx\r\n" % (sid, delivered))


@pytest.mark.parametrize(
    ("status", "pending", "sends", "ended"),
    [
        (b"409 Batch Completed", 0, 3, "full"),
        (b"409 Message Size Exceeds MaxBytes", 1, 2, "full"),
        (b"408 Request Timeout", 2, 1, "over"),
        (b"408 Request Timeout", 3, 0, "over"),
        (b"409 Consumer Deleted", 3, 0, "refused"),
    ],
)
async def test_what_was_handed_to_a_pull_is_taken_although_its_end_was_told_before(
    status: bytes, pending: int, sends: int, ended: str
) -> None:
    async with scripted_server(Hasty(status, pending, sends)) as url, asyncio.timeout(10):
        connection = await aio.connect(url)
        taken: list[int] = []

        async def take(_message: Any, delivery: Any) -> None:
            taken.append(delivery.seq)

        started = asyncio.get_running_loop().time()
        assert await pull(connection, "S", "c", 3, 30.0, take) == ended
        assert taken == list(range(1, sends + 1))
        assert asyncio.get_running_loop().time() - started < 1, "nothing more is waited for"
        await connection.close()
