"""What the broker answers, and what its answers are called: no connection and no client here.

Workers of the pipeline load this and not `jetstream.py`: the client costs each of their processes a fifth of its start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidings.errors import TidingsError

EXPECT_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
EXPECT_SUBJECT = "Nats-Expected-Last-Subject-Sequence-Subject"
WRONG_LAST_SEQUENCE = 10071
NO_ROOM = 10077
NO_MESSAGE = 10037
NO_STREAM = 10059
NO_CONSUMER = 10014
#: what a stream says of its life: another one, another stream, whatever its sequences
EPOCH_KEY = "td.epoch"


class ApiError(TidingsError):
    """The broker answered, and its answer was no."""

    code = "broker_refused"

    def __init__(self, what: str, error: Mapping[str, Any]) -> None:
        self.err_code = int(error.get("err_code", error.get("code", 0)))
        self.description = str(error.get("description", ""))
        super().__init__(f"{what}: {self.description} ({self.err_code})")
