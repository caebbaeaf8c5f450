"""A stream in memory that takes atomic batches under a lease, as a blocking connection meets it.

It passes the contract of `tests/contract/test_batches.py` like a server. What a server does when it likes it does on
demand: refuse for a while (`refusals`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tidings.nats.blocking import Reply
from tidings.nats.errors import BATCH_HAS_DUPLICATE, NO_ROOM, WRONG_LAST_SEQUENCE
from tidings.nats.jetstream_api import EXPECT_SEQUENCE
from tidings.wire.records import Headers

Sent = tuple[str, bytes, bytes]


class BatchStream:
    def __init__(self, most: int) -> None:
        self.most = most
        self.records: list[tuple[str, bytes]] = [("dlv.lease", b"")]
        self.lease = 1
        #: errors with which the next batches are refused; an int is a status of the protocol
        self.refusals: list[dict[str, Any] | int] = []
        self.asked: list[int] = []
        self._ids: dict[str, int] = {}
        self._answers: dict[int, Reply] = {}

    def take_lease(self) -> None:
        self.records.append(("dlv.lease", b""))
        self.lease = len(self.records)

    def publish_together(self, messages: Sequence[Sent]) -> int:
        token = len(self._answers) + 1
        self.asked.append(len(messages))
        said = self.refusals.pop(0) if self.refusals else self._store(messages)
        if isinstance(said, int):
            self._answers[token] = Reply(token, f"NATS/1.0 {said}\r\n\r\n".encode(), b"")
        else:
            self._answers[token] = Reply(token, b"", json.dumps(said).encode())
        return token

    def answer(self, token: int, timeout: float | None = None) -> Reply:
        del timeout
        return self._answers[token]

    def _store(self, messages: Sequence[Sent]) -> dict[str, Any]:
        fields = [dict(Headers.parse(block).fields) for _, block, _ in messages]
        self._check_batch(fields)
        ids = [each.get("Nats-Msg-Id") for each in fields]
        if int(fields[0].get(EXPECT_SEQUENCE) or 0) != self.lease:
            return _error(WRONG_LAST_SEQUENCE, f"wrong last sequence: {self.lease}")
        if len(messages) == 1 and ids[0] in self._ids:
            return {"stream": "S", "seq": self._ids[str(ids[0])], "duplicate": True}
        if len(set(ids)) < len(ids) or any(each in self._ids for each in ids):
            return _error(BATCH_HAS_DUPLICATE, "atomic publish batch contains duplicate message id")
        held = Counter(subject for subject, _ in self.records) + Counter(subject for subject, _, _ in messages)
        if any(held[subject] > self.most for subject, _, _ in messages):
            return _error(NO_ROOM, "maximum messages per subject exceeded")
        for name, (subject, _, payload) in zip(ids, messages, strict=True):
            self.records.append((subject, payload))
            self._ids[str(name)] = len(self.records)
        return {"stream": "S", "seq": len(self.records)}

    def _check_batch(self, fields: Sequence[dict[str, str]]) -> None:
        if len(fields) == 1:
            assert fields[0].get("Nats-Batch-Id") is None
            return
        assert len({each.get("Nats-Batch-Id") for each in fields}) == 1
        assert [each.get("Nats-Batch-Sequence") for each in fields] == [str(n + 1) for n in range(len(fields))]
        assert [each.get("Nats-Batch-Commit") for each in fields] == [None] * (len(fields) - 1) + ["1"]
        assert all(each.get(EXPECT_SEQUENCE) is None for each in fields[1:])


def _error(code: int, words: str) -> dict[str, Any]:
    return {"error": {"code": 400, "err_code": code, "description": words}}
