"""How a pull ends that nobody waits for any more, in the order in which the broker hears of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from scripted_server import Scripted, scripted_server
from tidings.broker.acks import NAK
from tidings.broker.aio import end_tasks
from tidings.endpoint.mailbox import NO_PULL, pull
from tidings.nats import aio
from tidings.testing.waiting import eventually

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
    monkeypatch.setattr("tidings.endpoint.mailbox.GIVING_BACK", 0.05)
    broker = Broker()
    async with scripted_server(broker) as url, asyncio.timeout(10):
        connection = await aio.connect(url)
        pulling = asyncio.create_task(pull(connection, "S", "c", 1, 10.0, never))
        await eventually(lambda: b"PULL" in broker.said)
        await end_tasks([pulling])
        assert pulling.cancelled()
        assert broker.said == [b"SUB", b"PULL", b"NO PULL"]
        await connection.close()
