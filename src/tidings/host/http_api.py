"""The host over HTTP: what every request has to pass, who is asking, and how an answer or a refusal is written.

    guard (Origin, tokens in addresses) -> route -> session by token -> handler(Asked) -> JSON

A refusal is `{"error": {"code", "message", "retryable"}}`: the code and the sentence of a TidingsError, and whether the
same request may succeed later. Handlers are in `routes_mail`, `routes_space` and `routes_operator`;
each gets the session it answers and passes its scope on. Nothing here blocks the loop, and no wait outlives the host.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tidings.errors import (
    ConflictError,
    DeniedError,
    HostBusy,
    HostUnreachable,
    LogFull,
    MailboxFull,
    MalformedMessage,
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
from tidings.wire import strict_json

T = TypeVar("T")
MAX_BODY = 512 * 1024
LONGEST_WAIT = 60.0
#: requests of one agent that are answered at a time
MOST_AT_ONCE = 128
#: words in an address that look like a secret: addresses end in logs
SECRET_WORDS = frozenset({"token", "access_token", "session_token", "auth", "authorization", "bearer", "secret", "key"})
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
    """What the handlers work with."""

    host: Host
    sessions: Sessions
    claims: Claims
    #: as clients spell it when they prove a session
    socket: Path
    stopping: asyncio.Event
    started: float
    streams: int = field(default=0)
    #: requests of each agent that are being answered, and its streams
    asking: Counter[RegisteredScope] = field(default_factory=Counter)
    streaming: Counter[RegisteredScope] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.presence = ProgramPresence(lambda scope: self.claims.held(scope) is not None, self.host.attend)
        self.sessions.on_end(self.presence.ended)

    @contextmanager
    def turn(self, scope: RegisteredScope) -> Iterator[None]:
        """Count a request. Connections are few, and no agent's programs may hold them all with patient questions."""
        if self.asking[scope] >= MOST_AT_ONCE:
            raise HostBusy(f"{MOST_AT_ONCE} requests of {scope.name} are being answered: ask again in a moment")
        self.asking[scope] += 1
        try:
            yield
        finally:
            self.asking[scope] -= 1

    async def unless_stopping(
        self, waiting: Coroutine[Any, Any, T], instead: TidingsError | None = None, grace: float = 0.0
    ) -> T:
        """What it returns. When the host stops, `instead` after `grace` seconds, which unless said is HostUnreachable:
        that says nothing was done, so whatever changes something has words of its own."""
        stopped = instead or HostUnreachable("the host is stopping: ask again when it runs")
        return await _unless(self.stopping.wait(), waiting, stopped, grace)


async def _unless(
    over: Coroutine[Any, Any, object], waiting: Coroutine[Any, Any, T], error: Exception, grace: float = 0.0
) -> T:
    """What it returns; the error if `over` ends before, or `grace` seconds after that."""
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


class Asked:
    """One request: its parameters and its body, checked as they are read."""

    def __init__(self, request: Request, app: AppState) -> None:
        self.request, self.app, self.host = request, app, app.host

    def word(self, name: str) -> str | None:
        return (self.request.query_params.get(name) or None) if self.request.scope["query_string"] else None

    def part(self, name: str) -> str:
        """A part of the path."""
        return str(self.request.path_params[name])

    def number(self, name: str, default: int, most: int) -> int:
        text = self.word(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit() and len(text) < 20) or int(text) > most:
            raise UsageError(f"`{name}` is a number from 0 to {most}, not {text[:32]!r}")
        return int(text)

    def flag(self, name: str) -> bool:
        text = self.word(name)
        if text not in (None, "0", "1", "true", "false"):
            raise UsageError(f"`{name}` is 1 or 0, not {text[:32]!r}")
        return text in ("1", "true")

    def wait(self) -> float:
        """Seconds to wait, no more than a minute at a time."""
        return seconds(self.word("wait") or "0")

    async def body(self, limit: int = MAX_BODY) -> bytes:
        """The whole body; TooLarge before more than `limit` of it is held."""
        said = self.request.headers.get("content-length", "")
        if said.isdigit() and int(said) > limit:
            raise _too_large(limit, int(said))
        held = bytearray()
        async for chunk in self.request.stream():
            held += chunk
            if len(held) > limit:
                raise _too_large(limit, len(held))
        if held and self.request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise UsageError("a body is JSON: send it with `Content-Type: application/json`")
        return bytes(held)

    async def fields(self, kind: type[T]) -> T:
        """The body as a struct; nothing is `{}`."""
        body = await self.body()
        try:
            return msgspec.convert(strict_json.loads(body or b"{}"), kind, strict=True)
        except MalformedMessage as error:
            raise UsageError(f"a request is strict JSON: {error}") from error
        except msgspec.ValidationError as error:
            known = getattr(kind, "__struct_fields__", ())
            has = f"; it has {', '.join(known) or 'no fields'}" if "unknown field" in str(error) else ""
            raise UsageError(f"this request does not say what it should: {str(error)[:300]}{has}") from error


class Scoped(Asked):
    """A request of a session; `scope` is whose, and `ending` is set when that session ends."""

    def __init__(self, request: Request, app: AppState, session: HostSession) -> None:
        super().__init__(request, app)
        self.session, self.scope = session, session.scope
        self.ending = app.sessions.ending(session)

    async def unless_over(self, waiting: Coroutine[Any, Any, T]) -> T:
        """What it returns; NoSession as soon as the session ends, HostUnreachable as soon as the host stops. Nothing is
        waited for when its program has gone."""
        over = NoSession(f"session {self.session.id} has ended: open another")
        needed = _unless(self._program_left(), waiting, ClientDisconnect())
        return await _unless(self.ending.wait(), self.app.unless_stopping(needed), over)

    async def _program_left(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass  # the rest of a body that nobody read

    @property
    def mine(self) -> tuple[str, str]:
        """How the stores name this scope."""
        return self.scope.space_id, self.scope.agent


def seconds(said: str | float) -> float:
    try:
        wanted = float(said)
    except ValueError:
        wanted = -1.0
    if not 0 <= wanted <= 86_400:
        raise UsageError(f"`wait` is a number of seconds, not {str(said)[:32]!r}")
    return min(wanted, LONGEST_WAIT)


def _too_large(limit: int, found: int) -> TooLarge:
    return TooLarge(f"a request has at most {limit} bytes, this one has {found} or more: send an artifact reference")


# --- answers ---

Handler = Callable[[Any], Awaitable[Any]]


class ApiRoute(Route):
    """A route, and what the reference page (docs/host-api.md) says of it: the handler's docstring, its parameters, its
    body. `session`: it answers the session of the token, and nobody else; otherwise every program of this user."""

    def __init__(
        self, method: str, path: str, handler: Handler, *query: str, body: Any = None, session: bool = True
    ) -> None:
        self.handler, self.query, self.body, self.session = handler, query, body, session
        super().__init__(path, _answered(self._in_session if session else self._for_user), methods=[method])
        self.method = method

    async def _in_session(self, request: Request) -> Response:
        self._check_query(request)
        app: AppState = request.app.state.app
        session = await app.sessions.find(_token(request))
        app.claims.heard(session)
        with app.turn(session.scope), app.presence.asking(session):
            return await self.handler(Scoped(request, app, session))  # type: ignore[no-any-return]

    async def _for_user(self, request: Request) -> Response:
        self._check_query(request)
        return await self.handler(Asked(request, request.app.state.app))  # type: ignore[no-any-return]

    def _check_query(self, request: Request) -> None:
        if not request.scope["query_string"]:
            return
        if strange := request.query_params.keys() - set(self.query):
            has = ", ".join(self.query) or "none"
            said = ", ".join(sorted(each[:32] for each in strange))
            raise UsageError(f"{self.method} {self.path} has no parameter {said}; it has {has}")


def _answered(answer: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        try:
            found = await answer(request)
        except TidingsError as error:
            return refusal(error)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception:  # boundary: a mistake of ours must not take the host down
            log.exception("%s %s failed", request.method, request.url.path)
            return refusal(TidingsError("the host failed at this, and wrote down why: see logs/host.log of this home"))
        return found if isinstance(found, Response) else as_json(found)

    return respond


def as_json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def refusal(error: TidingsError) -> Response:
    status = next((number for kind, number in STATUS if isinstance(error, kind)), 500)
    said = {"code": error.code, "message": str(error), "retryable": isinstance(error, RETRYABLE)}
    return as_json({"error": said}, status)


def _token(request: Request) -> str:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not token.strip():
        raise NoSession("this needs a session: open one with the agent's key, and send its token as a Bearer")
    return token.strip()


# --- the application ---


class Guard:
    """What no request may have, whatever it asks: it comes from a web page, or shows a secret.

    Most requests are for an address without parameters. Those are looked up here: Starlette would try one route after
    the other, which costs more than what a short answer needs.
    """

    def __init__(self, app: Starlette, routes: Iterable[ApiRoute]) -> None:
        self.app = app
        self._short: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {
            (method, route.path): route.endpoint
            for route in routes
            if "{" not in route.path
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = _unwanted(scope) if scope["type"] == "http" else None
        if error is not None:
            await refusal(error)(scope, receive, send)
            return
        answer = self._short.get((scope.get("method", ""), scope.get("path", "")))
        if answer is None:
            await self.app(scope, receive, send)
            return
        scope["app"] = self.app
        await (await answer(Request(scope, receive, send)))(scope, receive, send)


def _unwanted(scope: Scope) -> TidingsError | None:
    if any(name == b"origin" for name, _ in scope["headers"]):
        return DeniedError("the host does not answer web pages: a request with an Origin is refused")
    if scope["query_string"] and SECRET_WORDS & {name.lower() for name in QueryParams(scope["query_string"])}:
        return UsageError("a token belongs into the Authorization header: addresses are written into logs")
    return None


async def _no_such(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    words = UsageError(f"the host has no {request.method} {request.url.path[:100]}: it speaks version 1")
    return as_json({"error": {"code": words.code, "message": str(words), "retryable": False}}, status)


def api_routes() -> list[ApiRoute]:
    from tidings.host import routes_mail, routes_operator, routes_space

    return [*routes_operator.ROUTES, *routes_mail.ROUTES, *routes_space.ROUTES]


def application(app: AppState) -> ASGIApp:
    """Every route of the host."""
    routes = api_routes()
    starlette = Starlette(routes=routes, exception_handlers={HTTPException: _no_such})
    starlette.router.redirect_slashes = False
    starlette.state.app = app
    return Guard(starlette, routes)
