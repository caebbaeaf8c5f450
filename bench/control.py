"""What a control request costs its steward and its client, in CPU time and without I/O.

steward_us      a request taken as it comes from the broker, decoded and dispatched, its answer built and encoded
steward_ratio   the same / json.loads of the same request and json.dumps of the same answer
client_us       a request encoded and its answer decoded
client_ratio    the same / json.dumps of the same request and json.loads of the same answer

`history page` has 50 records, `receipt put` 512 receipts, `channel list` 50 channels. Medians of interleaved pairs.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from measuring import median_ratio, options, pairs, report
from tidings.contract.channels import (
    ChannelRow,
    ChannelsAnswer,
    ChannelsRequest,
    ConfirmAnswer,
    ConfirmRequest,
    HistoryAnswer,
    HistoryRequest,
    JoinAnswer,
    JoinRequest,
    LastMessage,
)
from tidings.contract.core import Answer, Caller, Request
from tidings.contract.mail import ReaderReceipt, ReportReceiptsAnswer, ReportReceiptsRequest
from tidings.nats.core import Msg
from tidings.rpc.control import decode_answer, encode_request
from tidings.steward.context import Lifecycle
from tidings.steward.history import raw_record
from tidings.steward.requests import Dispatcher
from tidings.wire.message import Sender, compose, new_id
from tidings.wire.records import Stamp, StoredRecord, encode_headers, record_time
from tidings.wire.roster import Backstop
from tidings.wire.subjects import Subjects

SUBJECTS, SENDER, NOW = Subjects("main"), "U" + "A" * 55, 1_760_000_000_000_000_000
TEXT = (
    "the reader asks for what it has not heard and gets it once, in the order of the log, or is told what is lost. " * 3
)
RECORDS = [
    StoredRecord(
        1_000 + number,
        NOW + number,
        SUBJECTS.chat(SENDER, "general"),
        encode_headers([("Td-Sig", "s" * 86), ("Nats-Msg-Id", new_id())]),
        compose(Sender(SENDER, "ada"), text=TEXT).raw,
    )
    for number in range(50)
]
STAMP = Stamp(1_049, "m" * 20, "e" * 26, "p" * 86)
FACTS: dict[str, Any] = {"channel": "general", "cls": "durable", "replay": True, "own": (), "replay_window": None}


@dataclass(frozen=True)
class Exchange:
    """A request, and how its handler builds the answer from what the steward has in memory."""

    request: Request[Any]
    build: Callable[[], Answer]


def history() -> HistoryAnswer:
    records = tuple(raw_record(record) for record in RECORDS)
    return HistoryAnswer(records, True, 1_000, 1_049, STAMP, floor=1, links=0, void=0, hidden=False)


def joined() -> JoinAnswer:
    place: dict[str, Any] = {"state": "opened", "seq": 1_050, "left": None, "head": 1_050, "epoch": "e" * 26}
    return JoinAnswer(**FACTS, **place, backstop=Backstop(), agreed=1_049, stamp=STAMP)


def channels() -> ChannelsAnswer:
    last = LastMessage(1_049, record_time(NOW))
    return ChannelsAnswer(tuple(ChannelRow(**FACTS, members=5, joined=True, last=last) for _ in range(50)), None, 1_049)


def confirmed() -> ConfirmAnswer:
    return ConfirmAnswer(True, RECORDS[0].subject, RECORDS[0].payload)


RECEIPTS = tuple(ReaderReceipt(seq, "read", SENDER, new_id()) for seq in range(1, 513))
EXCHANGES = (
    Exchange(HistoryRequest("general", after=999, until=1_049), history),
    Exchange(ReportReceiptsRequest(receipts=RECEIPTS), lambda: ReportReceiptsAnswer(512, ())),
    Exchange(JoinRequest("general", epoch="e" * 26, marks=(STAMP,)), joined),
    Exchange(ChannelsRequest(), channels),
    Exchange(ConfirmRequest(1_000), confirmed),
)


class Steward:
    """A dispatcher whose handlers only build an answer; what it sends is kept."""

    def __init__(self) -> None:
        lease: Any = SimpleNamespace(is_fresh=True)
        self.dispatcher = Dispatcher(SUBJECTS, lease, Lifecycle(), lambda _sender, _why: None)
        for exchange in EXCHANGES:
            self.dispatcher.handlers[exchange.request.operation.name] = self._handler(exchange.build)
        self.sent = b""

    def _handler(self, build: Callable[[], Answer]) -> Callable[[Caller, Any], Any]:
        async def handle(_caller: Caller, _request: Any) -> Answer:
            return build()

        return handle

    async def publish(self, _subject: str, payload: bytes) -> None:
        self.sent = payload

    async def answer(self, message: Msg) -> bytes:
        """Takes a request and returns the bytes of its answer."""
        connection: Any = self
        self.sent = b""
        await self.dispatcher.take(connection, message)
        while not self.sent:
            await asyncio.sleep(0)
        return self.sent


async def microseconds(step: Callable[[], Any], seconds: float) -> float:
    """Returns the CPU time of a step, which may be a coroutine function."""
    count, started, until = 0, time.process_time(), time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(20):
            if (waiting := step()) is not None:
                await waiting
        count += 20
    return (time.process_time() - started) / count * 1e6


async def measured(exchange: Exchange, count: int, seconds: float) -> dict[str, float]:
    steward, request, operation = Steward(), exchange.request, exchange.request.operation
    body = encode_request(request, None)
    message = Msg(1, SUBJECTS.control(operation.service, SENDER).encode(), b"_INBOX.1", b"", body)
    data = await steward.answer(message)
    asked, said = json.loads(body), json.loads(data)
    assert said["ok"], said

    def client() -> None:
        decode_answer(request, data)
        encode_request(request, None)

    def plain_client() -> None:
        json.loads(data)
        json.dumps(asked).encode()

    def plain_steward() -> None:
        json.loads(body)
        json.dumps(said).encode()

    found: dict[str, float] = {"request_bytes": len(body), "answer_bytes": len(data)}
    sides: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "steward": (lambda: steward.answer(message), plain_steward),
        "client": (client, plain_client),
    }
    for side, (ours, plain) in sides.items():
        left, right = await pairs(partial(microseconds, ours, seconds), partial(microseconds, plain, seconds), count)
        found[f"{side}_us"] = round(statistics.median(left), 1)
        found[f"{side}_ratio"] = round(median_ratio(left, right), 2)
    return found


async def main() -> None:
    chosen = options(__doc__ or "")
    figures = {
        exchange.request.operation.name: await measured(exchange, chosen.pairs, chosen.seconds / 20)
        for exchange in EXCHANGES
    }
    rows = [
        (
            name,
            f"steward {each['steward_us']:.1f} us ({each['steward_ratio']:.2f}), "
            f"client {each['client_us']:.1f} us ({each['client_ratio']:.2f}), "
            f"{each['request_bytes']:,} and {each['answer_bytes']:,} bytes",
        )
        for name, each in figures.items()
    ]
    report("control requests, CPU time (ratio to json of the same bytes)", rows, figures, as_json=chosen.json)


if __name__ == "__main__":
    asyncio.run(main())
