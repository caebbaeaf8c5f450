"""Writing many records quickly: many in flight, every acknowledgement looked at."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any

from tidings.nats.jetstream import JetStream

#: subject, payload, headers
Pour = tuple[str, bytes, Mapping[str, str]]
WINDOW = 512


async def pour(js: JetStream, records: Iterable[Pour], *, timeout: float = 30.0) -> list[int]:
    """Publish in order and answer the sequence of each. A refusal is an AssertionError with the broker's words."""
    inbox = js.connection.new_inbox()
    room, answers = asyncio.Semaphore(WINDOW), list[bytes]()

    async def on_answer(message: Any) -> None:
        answers.append(message.data)
        room.release()

    subscription = await js.connection.subscribe(f"{inbox}.*", cb=on_answer)
    sent = 0
    async with asyncio.timeout(timeout):
        for sent, (subject, payload, headers) in enumerate(records, 1):
            await room.acquire()
            await js.connection.publish(subject, payload, reply=f"{inbox}.{sent}", headers=dict(headers) or None)
        for _ in range(WINDOW):  # all of them back: everything was answered
            await room.acquire()
    await subscription.unsubscribe()
    return [_sequence(each) for each in answers]


def _sequence(answer: bytes) -> int:
    said = json.loads(answer) if answer else {"error": "no stream takes this subject"}
    assert "error" not in said, said["error"]
    return int(said["seq"])
