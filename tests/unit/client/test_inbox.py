"""The inbox: bounded, nothing dropped, and mail is not buried under chatter."""

import asyncio
from typing import Any

from tidings.client.incoming import Inbox, Incoming
from tidings.wire.message import Sender, compose
from tidings.wire.signing import KeyPair

SENDER = Sender(KeyPair.generate().id, "ada")


def incoming(text: str, kind: Any = "channel", priority: Any = "next") -> Incoming:
    message = compose(SENDER, text=text, priority=priority)
    return Incoming(kind, SENDER, message, "general" if kind == "channel" else None, seq=1, time_ns=0)


def test_direct_and_urgent_messages_come_before_a_channels_backlog() -> None:
    inbox = Inbox(1_000)
    for number in range(300):
        inbox.put(incoming(f"chatter {number}"))
    inbox.put(incoming("whenever", priority="low"))
    inbox.put(incoming("for you", "direct"))
    inbox.put(incoming("urgent", priority="now"))
    inbox.put(incoming("one more"))
    texts = [each.text for each in iter(inbox.take, None)]
    assert texts == ["for you", "urgent", *(f"chatter {n}" for n in range(300)), "one more", "whenever"]


async def test_who_feeds_a_full_inbox_waits_and_nothing_is_dropped() -> None:
    inbox = Inbox(2)

    async def feed() -> None:
        for number in range(20):
            await inbox.wait_for_room()
            inbox.put(incoming(str(number)))

    feeding = asyncio.create_task(feed())
    taken: list[str] = []
    while len(taken) < 20:
        assert len(inbox) <= 2
        if (message := inbox.take()) is not None:
            taken.append(message.text)
        await asyncio.sleep(0)
    await feeding
    assert taken == [str(number) for number in range(20)]
