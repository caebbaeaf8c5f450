"""The client of the control service: sends a request to the steward and returns a typed answer or raises a typed error.

A request is strict JSON with an operation id. After an unknown outcome it may be sent again with the same id: the
steward reads whether it took effect. The broker enforces the sender in the subject, so a request carries no signature.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from tidings.contract.core import Request
from tidings.errors import (
    ERRORS_BY_CODE,
    AuthRevoked,
    BrokerUnreachable,
    OutcomeUnknown,
    StewardUnreachable,
    TidingsError,
    WireError,
)
from tidings.nats.client import Connection
from tidings.nats.errors import NatsError, NoResponders
from tidings.wire.message import new_id
from tidings.wire.subjects import Subjects

A = TypeVar("A")


class _Refusal(msgspec.Struct, frozen=True):
    code: str = ""
    message: str = "refused without a reason"


class _Refused(msgspec.Struct, frozen=True):
    error: _Refusal = _Refusal()


def encode_request(request: Request[Any], op: str | None) -> bytes:
    """Returns a request as JSON for the steward. `op`: the id under which it takes effect once."""
    body, head = msgspec.json.encode(request), msgspec.json.encode({"op": op or new_id(), "do": request.operation.verb})
    return head[:-1] + (b"," + body[1:] if len(body) > 2 else b"}")


def decode_answer(request: Request[A], data: bytes) -> A:
    """Returns the answer to a request. Raises the error that the steward named if it refused."""
    if data.startswith(b'{"ok":true'):
        return request.operation.read_answer(data)  # type: ignore[no-any-return]
    raise decode_refusal(request.operation.name, data)


def decode_refusal(name: str, data: bytes) -> TidingsError:
    """Returns the error that an answer names. Raises WireError if the answer is not a JSON object."""
    try:
        refusal = msgspec.json.decode(data, type=_Refused).error
    except msgspec.MsgspecError as error:
        raise WireError(f"{name}: the answer is not a JSON object: {error}") from error
    return ERRORS_BY_CODE.get(refusal.code, TidingsError)(refusal.message)


class ListingPage(Protocol):
    """The answer of an operation that lists something in pages."""

    @property
    def next(self) -> str | None: ...


P = TypeVar("P", bound=ListingPage)


async def pages(call: Callable[[Request[P]], Awaitable[P]], request: Request[P]) -> AsyncIterator[P]:
    """Yields every page of a listing."""
    while True:
        page = await call(request)
        yield page
        if page.next is None:
            return
        request = replace(request, after=page.next)


class ControlClient:
    """Control requests of one sender over one connection."""

    def __init__(self, connection: Connection, subjects: Subjects, sender: str, timeout: float = 5.0) -> None:
        self.connection = connection
        self.subjects = subjects
        self.sender = sender
        self.timeout = timeout

    async def call(self, request: Request[A], /, *, op: str | None = None) -> A:
        """Sends a request and returns its answer. Raises the error that the steward named if it refused."""
        return decode_answer(request, await self.exchange(request.operation.name, encode_request(request, op)))

    async def exchange(self, name: str, body: bytes) -> bytes:
        """Sends an encoded request to the service of an operation and returns the encoded answer."""
        subject = self.subjects.control(name.split()[0], self.sender)
        try:
            return (await self.connection.request(subject, body, timeout=self.timeout)).data
        except NoResponders as error:
            raise StewardUnreachable(
                f"the steward of space {self.subjects.space} does not answer; `tidings status` says why"
            ) from error
        except TimeoutError as error:
            raise OutcomeUnknown(f"no answer to {name} within {self.timeout:.0f} s: retry") from error
        except AuthRevoked:  # the credential ended while the request was on its way
            raise
        except (NatsError, OSError) as error:
            raise BrokerUnreachable(f"lost the connection to space {self.subjects.space} ({error})") from error
