"""The HTTP application of the host: checks every request, finds its caller, and encodes answers and refusals.

    no Origin, no token in the address -> operation by path -> session by token -> decoded request -> handler -> JSON

Every operation is `POST /v1/<service>/<verb>` with its fields as a JSON object; only the stream of events is a GET. A
refusal is `{"error": {"code", "message", "retryable"}}`: code and message of a TidingsError, and whether the same
request may succeed later. Handlers are in `mail_handlers`, `space_handlers` and `operator_handlers`; each gets its
caller and uses the caller's scope. Nothing here blocks the loop, and every wait ends when the host stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidings.contract.catalogue import SERVED
from tidings.contract.core import Operation, explain, oversize, read_body
from tidings.contract.host import Wait
from tidings.errors import (
    ConflictError,
    DeniedError,
    HostBusy,
    HostUnreachable,
    LogFull,
    MailboxFull,
    NoSession,
    OutcomeUnknown,
    QueueFull,
    StoreError,
    TidingsError,
    TooLarge,
    UnhealthyError,
    UnknownMessage,
    UnreachableError,
    UsageError,
    WireError,
)
from tidings.host.claims import Claims
from tidings.host.host import Host
from tidings.host.registry import Scope as RegisteredScope
from tidings.host.sessions import HostSession, ProgramPresence, Sessions
from tidings.util.task_ends import end_tasks

T = TypeVar("T")
EVENTS = "/v1/events"
#: seconds for reading the beginning of a body whose stated length is too large, to name its largest field
TOO_LARGE_WITHIN = 1.0
#: concurrent requests of one agent
MOST_AT_ONCE = 128
#: query parameters that look like a secret: addresses are written to logs
SECRET_PARAMETERS = frozenset(
    {"token", "access_token", "session_token", "auth", "authorization", "bearer", "secret", "key"}
)
log = logging.getLogger(__name__)

#: the first class that fits decides
STATUS: tuple[tuple[type[TidingsError], int], ...] = (
    (NoSession, 401),
    (DeniedError, 403),
    (UnknownMessage, 404),
    (TooLarge, 413),
    (HostBusy, 429),
    (LogFull, 429),
    (MailboxFull, 429),
    (QueueFull, 429),
    (ConflictError, 409),
    (UsageError, 400),
    (WireError, 400),
    (UnreachableError, 503),
    (OutcomeUnknown, 503),
    (StoreError, 503),
)
RETRYABLE = (UnreachableError, OutcomeUnknown, UnhealthyError, StoreError)


@dataclass
class AppState:
    """The state that all handlers share."""

    host: Host
    sessions: Sessions
    claims: Claims
    #: the path that clients sign to prove a session
    socket: Path
    stopping: asyncio.Event
    started: float
    streams: int = field(default=0)
    #: number of current requests and of open streams, by agent
    asking: Counter[RegisteredScope] = field(default_factory=Counter)
    streaming: Counter[RegisteredScope] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.presence = ProgramPresence(lambda scope: self.claims.held(scope) is not None, self.host.attend)
        self.sessions.on_end(self.presence.ended)

    @contextmanager
    def count_request(self, scope: RegisteredScope) -> Iterator[None]:
        """Counts a request, and limits them: the waiting requests of one agent must not hold all connections."""
        if self.asking[scope] >= MOST_AT_ONCE:
            raise HostBusy(f"the host is answering {MOST_AT_ONCE} requests of {scope.name}: retry in a moment")
        self.asking[scope] += 1
        try:
            yield
        finally:
            self.asking[scope] -= 1

    async def unless_stopping(
        self, waiting: Coroutine[Any, Any, T], instead: TidingsError | None = None, grace: float = 0.0
    ) -> T:
        """Returns the result of `waiting`. When the host stops, raises `instead` after `grace` seconds (default:
        HostUnreachable, which means that nothing was done; a handler that changes something passes another error)."""
        stopped = instead or HostUnreachable("the host is stopping: retry when it runs again")
        return await _unless(self.stopping.wait(), waiting, stopped, grace)


async def _unless(
    over: Coroutine[Any, Any, object], waiting: Coroutine[Any, Any, T], error: Exception, grace: float = 0.0
) -> T:
    """Returns the result of `waiting`. If `over` ends first, raises the error after `grace` seconds."""
    asked, stop = asyncio.ensure_future(waiting), asyncio.ensure_future(over)
    try:
        await asyncio.wait({asked, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done() and grace:
            await asyncio.wait({asked}, timeout=grace)
        if asked.done():
            return asked.result()
        raise error
    finally:
        await end_tasks([stop, asked])


class UserCaller:
    """The caller of a request: a program of this user."""

    def __init__(self, http: Request, app: AppState) -> None:
        self.http, self.app, self.host = http, app, app.host


class SessionCaller(UserCaller):
    """The caller of a request: a program with a session. `scope`: its agent; `ending` is set when the session ends."""

    def __init__(self, http: Request, app: AppState, session: HostSession) -> None:
        super().__init__(http, app)
        self.session, self.scope = session, session.scope
        self.ending = app.sessions.ending(session)

    async def unless_over(self, waiting: Coroutine[Any, Any, T], stopped: TidingsError | None = None) -> T:
        """Returns the result of `waiting`. Raises NoSession as soon as the session ends, `stopped` (default:
        HostUnreachable) as soon as the host stops, and ClientDisconnect when the program disconnects."""
        ended = NoSession(f"session {self.session.id} has ended: open another")
        connected = _unless(self._disconnected(), waiting, ClientDisconnect())
        return await _unless(self.ending.wait(), self.app.unless_stopping(connected, stopped), ended)

    async def _disconnected(self) -> None:
        while (await self.http.receive())["type"] != "http.disconnect":
            pass

    @property
    def mine(self) -> tuple[str, str]:
        """The key of this scope in the stores."""
        return self.scope.space_id, self.scope.agent


# --- requests ---

Handler = Callable[..., Awaitable[Any]]


class ForwardOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Additional fields of a forwarded request. `op`: the id under which it takes effect once. `wait`: additional
    seconds that the steward may take."""

    op: str | None = None
    wait: Wait = 0.0


async def read_content(http: Request, operation: Operation) -> bytes:
    """Returns the body. Raises TooLarge without reading more than the operation allows."""
    limit, held = operation.limit, bytearray()
    stated = http.headers.get("content-length", "")
    size = int(stated) if stated.isdigit() else 0
    if size <= limit:
        await _fill(held, http, limit)
    else:
        with suppress(TimeoutError):
            async with asyncio.timeout(TOO_LARGE_WITHIN):
                await _fill(held, http, limit)
    if max(len(held), size) > limit:
        raise TooLarge(f"{oversize(operation.name, bytes(held[:limit]), limit)}: send an artifact reference")
    if held and http.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise UsageError("the body must be JSON: send it with `Content-Type: application/json`")
    return bytes(held)


async def _fill(held: bytearray, http: Request, limit: int) -> None:
    async for chunk in http.stream():
        held += chunk
        if len(held) > limit:
            return


def _forward_options(operation: Operation, body: dict[str, Any]) -> ForwardOptions:
    own = ForwardOptions.__struct_fields__
    try:
        return msgspec.convert({name: body.pop(name) for name in own if name in body}, ForwardOptions)
    except msgspec.ValidationError as error:
        raise UsageError(f"{operation.name}: {explain(error)}") from error


def as_json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def refusal(error: TidingsError, status: int | None = None) -> Response:
    found = status or next((number for kind, number in STATUS if isinstance(error, kind)), 500)
    facts = {"code": error.code, "message": str(error), "retryable": isinstance(error, RETRYABLE)}
    return as_json({"error": facts}, found)


def _token(http: Request) -> str:
    kind, _, token = http.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not token.strip():
        raise NoSession("a session is required: open one with the agent's key, and send its token as a Bearer")
    return token.strip()


def _check_safe(scope: Scope) -> None:
    """Refuses requests from web pages, and addresses with parameters, which may contain a secret."""
    if any(name == b"origin" for name, _ in scope["headers"]):
        raise DeniedError("the host does not answer web pages: a request with an Origin is refused")
    if scope["query_string"]:
        if SECRET_PARAMETERS & {name.lower() for name in QueryParams(scope["query_string"])}:
            raise UsageError("send a token in the Authorization header: addresses are written to logs")
        raise UsageError(f"{scope['path'][:100]} has no parameters: send its fields as a JSON object in the body")


# --- the application ---


class HostApi:
    """The ASGI application of the host. `forward` sends a request to the steward; `events` starts a stream."""

    def __init__(self, app: AppState, handlers: Mapping[str, Handler], forward: Handler, events: Handler) -> None:
        self.app, self._handlers, self._forward, self._events = app, handlers, forward, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive, send)
        try:
            _check_safe(scope)
            response = await self._respond(http)
        except TidingsError as error:
            response = refusal(error)
        except ClientDisconnect:
            response = Response(status_code=400)
        except Exception:  # boundary: a bug of ours must not stop the host
            log.exception("%s %s failed", http.method, http.url.path)
            response = refusal(TidingsError(f"the host failed at {http.url.path[:100]}: see logs/host.log in its home"))
        await response(scope, receive, send)

    async def _respond(self, http: Request) -> Response:
        path: str = http.scope["path"]
        operation = SERVED.get(path)
        if operation is None and path != EVENTS:
            unknown = UsageError(f"the host has no operation {path[:100]!r}: see docs/host-api.md")
            return refusal(unknown, 404)
        if http.method != ("GET" if operation is None else "POST"):
            wrong = UsageError(f"the host has no {http.method} {path}: operations are POST, events are GET")
            return refusal(wrong, 405)
        if operation is not None and operation.caller == "user":
            return as_json(await self._answer(UserCaller(http, self.app), operation))
        session = await self.app.sessions.find(_token(http))
        self.app.claims.heard(session)
        caller = SessionCaller(http, self.app, session)
        with self.app.count_request(session.scope), self.app.presence.asking(session):
            if operation is None:
                return await self._events(caller)  # type: ignore[no-any-return]
            return as_json(await self._answer(caller, operation))

    async def _answer(self, caller: UserCaller, operation: Operation) -> Any:
        content = await read_content(caller.http, operation)
        body = read_body(operation.name, content, operation.limit) if content else {}
        if operation.server == "host":
            return await self._handlers[operation.name](caller, operation.decode(body))
        options = _forward_options(operation, body)
        return await self._forward(caller, options, operation.decode(body))
