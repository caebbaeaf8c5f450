"""How a pull ends that nobody waits for any more, in the order in which the broker hears of it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tidings.broker.acks import NAK
from tidings.broker.ending import end_tasks
from tidings.endpoint.pull import NO_PULL, pull

ASKED = "$JS.API.CONSUMER.MSG.NEXT.S.c"
DELIVERED = "$JS.ACK.S.c.1.7.1.1700000000000000000.0"


class Broker:
    """Stands for a connection: writes down what is said, and answers a request when it is let."""

    is_closed = False

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.subscription: Any = Subscription(SimpleNamespace(is_closed=False))
        vars(self.subscription)["unsubscribe"] = self._send_unsubscribe
        self.answers, self.asked = asyncio.Event(), asyncio.Event()

    def new_inbox(self) -> str:
        return "inbox"

    async def subscribe(self, subject: str, **_options: Any) -> Any:
        self.heard.append(("SUB", subject))
        return self.subscription

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        self.heard.append(("PUB", subject) if reply else ("PUB", subject, payload))

    async def ask(self, subject: str, payload: bytes, *, timeout: float) -> None:
        self.heard.append(("ASK", subject, payload))
        self.asked.set()
        async with asyncio.timeout(timeout):
            await self.answers.wait()

    async def _send_unsubscribe(self, _sid: int = 0) -> None:
        self.heard.append(("UNSUB",))

    async def flush(self, timeout: float) -> None:
        assert timeout > 0
        self.heard.append(("PING",))


async def never(_message: Any, _delivery: Any) -> None:
    raise AssertionError("a pull that was cancelled takes nothing")


async def test_a_cancelled_pull_leaves_once_the_broker_knows_of_it_and_gives_back_what_came_meanwhile() -> None:
    broker: Any = Broker()
    pulling = asyncio.create_task(pull(broker, "S", "c", 1, 10.0, never))
    await asyncio.sleep(0)
    ending = asyncio.create_task(end_tasks([pulling]))
    async with asyncio.timeout(5):
        await broker.asked.wait()
    before = [("SUB", "inbox"), ("PUB", ASKED), ("ASK", ASKED, NO_PULL)]
    assert broker.heard == before
    pulling.cancel()  # told again, as one is who takes long
    for _ in range(5):
        await asyncio.sleep(0)
    assert broker.heard == before, "it does not leave before it was answered"
    broker.subscription._pending_queue.put_nowait(Msg(broker, subject="inbox", reply=DELIVERED, data=b"x"))
    broker.answers.set()
    await ending
    assert pulling.cancelled()
    assert broker.heard[3:] == [("UNSUB",), ("PING",), ("PUB", DELIVERED, NAK), ("UNSUB",)]


async def test_a_broker_that_does_not_answer_holds_up_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidings.endpoint.pull.GIVING_BACK", 0.01)
    broker: Any = Broker()
    pulling = asyncio.create_task(pull(broker, "S", "c", 1, 10.0, never))
    await asyncio.sleep(0)
    await end_tasks([pulling])
    assert pulling.cancelled()
    assert broker.heard[3:] == [("UNSUB",), ("PING",), ("UNSUB",)]
