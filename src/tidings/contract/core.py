"""How an operation is declared, and how its requests and answers are read and written.

    @operation("member join", once=True)
    class JoinRequest(Request[JoinAnswer]):
        '''Join a channel or pattern.'''
        pattern: str

A field without a default is required. A field accepts `null` only if its type says so; `UNSET` as a default
distinguishes `null` from a missing field. An answer omits fields that equal their default.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec

from tidings.errors import MalformedMessage, UsageError, WireError
from tidings.wire import strict_json

#: the largest integer that every language reads exactly
MAX_INTEGER = 2**53 - 1
#: the largest body of a request, in bytes
MAX_REQUEST = 128 * 1024

Integer = Annotated[int, msgspec.Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]
Number = Annotated[float, msgspec.Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]
#: a point in time: RFC 3339 on the wire
Moment = Annotated[datetime, msgspec.Meta(tz=True)]
#: the process that answers an operation
Server = Literal["steward", "host", "link worker"]
#: the kind of caller that an operation allows. The broker's permissions derive from it. At the host an agent has a
#: session; a user is any program of the same operating system user
CallerKind = Literal["agent", "admin", "invited", "peer", "link worker", "user"]

A = TypeVar("A")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Caller(NamedTuple):
    """The sender of a request, as the broker authenticated it, and the id under which the request takes effect once."""

    id: str
    op: str


class Answer(msgspec.Struct, omit_defaults=True):
    """The base of every answer. Readers ignore fields they do not know."""


class Request(msgspec.Struct, Generic[A], forbid_unknown_fields=True, omit_defaults=True):
    """The base of every request. The parameter is the type of its answer, or an `AsyncGenerator` of answers."""

    operation: ClassVar[Operation]


class EmptyAnswer(Answer):
    """Success without fields."""


@dataclass(frozen=True)
class Operation:
    """One declared operation. `name` is its service and its verb."""

    name: str
    request: type[Request[Any]]
    answer: type[Any]
    caller: CallerKind
    #: takes effect once per `op` of its caller; handlers enforce it
    once: bool
    #: seconds for which a request may ask its server to wait; infinite if the work has no time limit
    waits: float
    #: whether the host forwards it for its agents
    host: bool
    server: Server = "steward"
    #: whether it changes something: without an answer the caller does not know whether it took effect
    changes: bool = True
    #: whether it returns a stream of answers, one per line
    stream: bool = False
    #: the largest body of a request, in bytes, over HTTP
    limit: int = MAX_REQUEST

    @property
    def path(self) -> str:
        """Returns its path in the host's HTTP API."""
        return "/v1/" + self.name.replace(" ", "/")

    @property
    def service(self) -> str:
        return self.name.split()[0]

    @property
    def verb(self) -> str:
        return self.name.split()[1]

    @property
    def summary(self) -> str:
        """Returns the docstring of the request as one line."""
        return " ".join((self.request.__doc__ or "").split())

    @cached_property
    def fields(self) -> Mapping[str, msgspec.inspect.Field]:
        """Returns the fields of the request by their name on the wire."""
        described = msgspec.inspect.type_info(self.request)
        assert isinstance(described, msgspec.inspect.StructType)
        return {field.encode_name: field for field in described.fields}

    @cached_property
    def _plain_fields(self) -> frozenset[str]:
        """Fields that take any JSON value unchanged."""
        return frozenset(n for n, field in self.fields.items() if isinstance(field.type, msgspec.inspect.AnyType))

    def describe(self) -> dict[str, Any]:
        """Returns the declaration as plain values, for clients in other languages."""
        answer = msgspec.inspect.type_info(self.answer)
        assert isinstance(answer, msgspec.inspect.StructType)
        return {
            "service": self.service,
            "do": self.verb,
            "says": self.summary,
            "arguments": {name: "required" if field.required else "optional" for name, field in self.fields.items()},
            "once": self.once,
            "waits": self.waits,
            "host": self.host,
            "answer": sorted(field.encode_name for field in answer.fields),
        }

    def decode(self, arguments: Mapping[str, Any]) -> Request[Any]:
        """Returns the typed request. Raises UsageError, naming the field, if the arguments are invalid."""
        if unknown := sorted(arguments.keys() - self.fields.keys()):
            raise UsageError(
                f"{self.name}: unknown field {', '.join(repr(name[:64]) for name in unknown[:8])}; "
                f"it has {', '.join(self.fields) or 'no fields'}"
            )
        try:
            # `3.0` and `3e0` are the integer 3, as in JSON Schema and JavaScript
            values = {
                name: int(value)
                if isinstance(value, float) and value.is_integer() and name not in self._plain_fields
                else value
                for name, value in arguments.items()
            }
            found: Request[Any] = msgspec.convert(values, self.request)
        except msgspec.ValidationError as error:
            raise UsageError(f"{self.name}: {explain(error)}{self._choices(error)}") from error
        return found

    def _choices(self, error: msgspec.ValidationError) -> str:
        """Returns the values that a field allows, if the error is about one of a fixed set."""
        named = re.match(r"Invalid enum value .* - at `\$\.(\w+)`", str(error))
        if named is None:
            return ""
        kind = self.fields[named[1]].type
        options = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
        values = [str(v) for each in options if isinstance(each, msgspec.inspect.LiteralType) for v in each.values]
        return f"; use one of: {', '.join(values)}" if values else ""

    def read_answer(self, data: bytes) -> Any:
        """Returns the typed answer. Raises WireError if the bytes are not such an answer."""
        try:
            return msgspec.json.decode(data, type=self.answer)
        except msgspec.MsgspecError as error:
            raise WireError(f"{self.name}: invalid answer: {explain(error)}") from error


#: every declared operation of each server, by name, in the order of declaration
DECLARED: dict[Server, dict[str, Operation]] = {"steward": {}, "host": {}, "link worker": {}}
#: what the host serves, by path: its own operations, and those it forwards
SERVED: dict[str, Operation] = {}
R = TypeVar("R", bound=type[Request[Any]])


def operation(
    name: str,
    *,
    server: Server = "steward",
    caller: CallerKind = "agent",
    once: bool = False,
    waits: float = 0.0,
    host: bool = False,
    changes: bool = True,
    limit: int = MAX_REQUEST,
) -> Callable[[R], R]:
    """Declares the operation whose request is the decorated struct."""

    def declare(request: R) -> R:
        if name in DECLARED[server]:
            raise LookupError(f"operation {name} is declared twice")
        (base,) = getattr(request, "__orig_bases__")  # noqa: B009  typing has no name for it
        answer = get_args(base)[0]
        if stream := get_origin(answer) is AsyncGenerator:
            answer = get_args(answer)[0]
        found = Operation(name, request, answer, caller, once, waits, host, server, changes, stream, limit)
        if (host or server == "host") and SERVED.setdefault(found.path, found) is not found:
            raise LookupError(f"two operations have the path {found.path}")
        request.operation = DECLARED[server][name] = found
        return request

    return declare


def explain(error: msgspec.MsgspecError) -> str:
    """Returns msgspec's error with the field first: `limit`: expected int, got str."""
    text = str(error)
    if missing := re.fullmatch(r"Object missing required field `(.+?)`(?: - at `\$\.?(.*)`)?", text):
        where = f"{missing[2]}." if missing[2] else ""
        return f"missing field `{where}{missing[1]}`"
    if found := re.fullmatch(r"(.+) - at `\$\.?(.+)`", text, re.DOTALL):
        reason = found[1].replace("`", "")
        return f"`{found[2][:64]}`: {reason[0].lower()}{reason[1:300]}"
    return text[:300]


def read_body(name: str, data: bytes, limit: int = MAX_REQUEST) -> dict[str, Any]:
    """Returns the JSON object of a request. Raises UsageError if it is too large or not strict JSON."""
    if len(data) > limit:
        raise UsageError(oversize(name, data, limit))
    try:
        body = strict_json.loads(data)
    except MalformedMessage as error:
        raise UsageError(f"{name}: the request is not strict JSON: {error}") from error
    if not isinstance(body, dict):
        raise UsageError(f"{name}: the request must be a JSON object")
    return body


def oversize(name: str, data: bytes, limit: int) -> str:
    """Returns the error text for a request above the limit. `data`: the bytes of it that were read."""
    largest = _largest_field(data)
    named = f"; its largest field is `{largest[:64]}`" if largest else ""
    return f"{name}: the request has more than {limit:,} bytes{named}"


def nanoseconds(moment: datetime | None) -> int:
    """Returns the Unix time in nanoseconds; 0 for None."""
    return 0 if moment is None else (moment - _EPOCH) // timedelta(microseconds=1) * 1000


_READER = json.JSONDecoder()
_BETWEEN = re.compile(r"[\s,:]*")
#: fields of an oversize request that are measured: no request has so many
MOST_FIELDS = 100


def _largest_field(data: bytes) -> str:
    """Returns the name of the largest field of a JSON object, which may be cut off; empty if there is none."""
    text, largest, most = data.decode("utf-8", "replace").lstrip(), "", 0
    at = 1
    for _ in range(MOST_FIELDS if text.startswith("{") else 0):
        begin = _skip(text, at)
        try:
            name, at = _READER.raw_decode(text, begin)
        except (ValueError, RecursionError):
            break
        try:
            _, at = _READER.raw_decode(text, _skip(text, at))
        except (ValueError, RecursionError):
            at = len(text)
        if at - begin > most and isinstance(name, str):
            largest, most = name, at - begin
    return largest


def _skip(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    return found.end() if found else at
