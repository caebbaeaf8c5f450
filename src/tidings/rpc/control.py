"""Asking the steward: one request, one answer, typed errors on this side too.

A request is strict JSON with an operation id. The same id may be sent again after an unknown outcome: the steward
resolves it by reading, never by guessing. The sender is pinned by the subject, so a request carries no signature.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tidings.errors import ERRORS_BY_CODE, BrokerUnreachable, OutcomeUnknown, StewardUnreachable, TidingsError
from tidings.nats.client import Connection
from tidings.nats.errors import NatsError, NoResponders
from tidings.wire.message import new_id
from tidings.wire.subjects import Subjects


def request_body(do: str, op: str | None, arguments: Mapping[str, Any]) -> bytes:
    return json.dumps({"op": op or new_id(), "do": do, **arguments}).encode()


def read_answer(data: bytes) -> dict[str, Any]:
    """The fields of an answer; a refusal raises the error the steward named."""
    answer = json.loads(data)
    if answer.get("ok"):
        return dict(answer)
    refusal = answer.get("error", {})
    raise ERRORS_BY_CODE.get(refusal.get("code"), TidingsError)(refusal.get("message", "refused without a reason"))


async def collect(
    call: Callable[..., Awaitable[dict[str, Any]]], service: str, do: str, key: str, **arguments: Any
) -> list[dict[str, Any]]:
    """Every row of a listing, page after page."""
    page = await call(service, do, **arguments)
    rows = list(page[key])
    while page.get("next") is not None:
        page = await call(service, do, after=page["next"], **arguments)
        rows += page[key]
    return rows


class ControlClient:
    """Control requests of one sender over one connection."""

    def __init__(self, connection: Connection, subjects: Subjects, sender: str, timeout: float = 5.0) -> None:
        self.connection = connection
        self.subjects = subjects
        self.sender = sender
        self.timeout = timeout

    async def call(self, service: str, do: str, *, op: str | None = None, **arguments: Any) -> dict[str, Any]:
        """Ask, and return the answer's fields; a refusal raises the error the steward named."""
        try:
            message = await self.connection.request(
                self.subjects.control(service, self.sender), request_body(do, op, arguments), timeout=self.timeout
            )
        except NoResponders as error:
            raise StewardUnreachable(
                f"the steward of space {self.subjects.space} does not answer; `tidings status` says why"
            ) from error
        except TimeoutError as error:
            raise OutcomeUnknown(f"no answer to {service} {do} within {self.timeout:.0f} s: ask again") from error
        except (NatsError, OSError) as error:
            raise BrokerUnreachable(f"the connection to space {self.subjects.space} is gone ({error})") from error
        return read_answer(message.data)
