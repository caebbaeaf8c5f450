"""The carrier over a unix socket: an answer, a stream, refusals, and a server that is absent, dies or hangs."""

import asyncio
import json
import socket
import stat
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tidings.contract import catalogue
from tidings.contract.core import DECLARED, MAX_REQUEST, Answer, EmptyAnswer, Operation
from tidings.contract.link_worker import (
    FollowLinkRequest,
    ForgetLinkRequest,
    LinkNotRunning,
    PauseAnswer,
    PauseLinkRequest,
    RefreshRequest,
    ResumeLinkRequest,
)
from tidings.errors import ConflictError, LinkConflict, TidingsError, UsageError, WorkerUnreachable
from tidings.rpc.local_socket import MAX_LINE, LocalServer, call, follow
from tools.examples import example

assert catalogue.MODULES
OPERATIONS = DECLARED["link worker"]


class Counting:
    """Handlers that count the callers that wait or follow."""

    def __init__(self) -> None:
        self.waiting = 0
        self.handlers: dict[str, Callable[..., Awaitable[Any]]] = {
            "link pause": self.answer,
            "link resume": self.refuse,
            "link forget": self.fail,
            "link follow": self.follow,
            "worker refresh": self.hang,
        }

    async def answer(self, request: PauseLinkRequest) -> PauseAnswer:
        return PauseAnswer(f"{request.link} {request.reason}")

    async def refuse(self, _request: ResumeLinkRequest) -> PauseAnswer:
        raise LinkConflict("somebody else went on")

    async def fail(self, _request: ForgetLinkRequest) -> Answer:
        raise RuntimeError("a secret")

    async def hang(self, _request: RefreshRequest) -> EmptyAnswer:
        self.waiting += 1
        try:
            await asyncio.sleep(60)
        finally:
            self.waiting -= 1
        raise AssertionError("nobody waits for that long")

    async def follow(self, request: FollowLinkRequest) -> AsyncGenerator[LinkNotRunning]:
        return self.events(request.link)

    async def events(self, link: str) -> AsyncGenerator[LinkNotRunning]:
        self.waiting += 1
        try:
            for number in range(10**6):
                yield LinkNotRunning(link, float(number), "")
                await asyncio.sleep(0.001)
        finally:
            self.waiting -= 1


@pytest.fixture
async def counting(tmp_path: Path) -> AsyncGenerator[tuple[Path, Counting]]:
    found, path = Counting(), tmp_path / "run" / "links.sock"
    server = LocalServer(path, "link worker", found.handlers)
    await server.start()
    yield path, found
    await server.close()


async def test_an_answer_a_refusal_and_a_fault_are_told_apart(counting: tuple[Path, Counting]) -> None:
    path, _ = counting
    assert await call(path, PauseLinkRequest("a", reason="b")) == PauseAnswer("a b")
    with pytest.raises(LinkConflict, match="somebody else went on"):
        await call(path, ResumeLinkRequest("a"))
    with pytest.raises(TidingsError, match=r"the link worker failed \(RuntimeError\): see its log") as failed:
        await call(path, ForgetLinkRequest("a"))
    assert "secret" not in str(failed.value)
    assert await call(path, PauseLinkRequest("a", reason="c")) == PauseAnswer("a c")


async def test_an_answer_may_be_longer_than_a_line_of_a_stream(tmp_path: Path) -> None:
    async def answer(_request: ResumeLinkRequest) -> PauseAnswer:
        return PauseAnswer("x" * 2 * MAX_LINE)

    server = LocalServer(tmp_path / "links.sock", "link worker", {"link resume": answer})
    await server.start()
    try:
        assert await call(server.path, ResumeLinkRequest("a")) == PauseAnswer("x" * 2 * MAX_LINE)
    finally:
        await server.close()


async def test_who_stops_following_is_let_go(counting: tuple[Path, Counting]) -> None:
    path, found = counting
    events = follow(path, FollowLinkRequest("a"))
    assert [await anext(events) for _ in range(3)] == [LinkNotRunning("a", number, "") for number in (0.0, 1.0, 2.0)]
    assert found.waiting == 1
    await events.aclose()
    async with asyncio.timeout(10):
        while found.waiting:
            await asyncio.sleep(0.01)


async def test_a_server_that_does_not_answer_is_not_waited_for_longer_than_asked(
    counting: tuple[Path, Counting],
) -> None:
    path, found = counting
    with pytest.raises(WorkerUnreachable, match="does not answer"):
        await call(path, RefreshRequest(), timeout=0.1)
    async with asyncio.timeout(10):  # what nobody waits for is given up
        while found.waiting:
            await asyncio.sleep(0.01)


async def test_one_that_ends_while_it_is_asked_or_followed_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "links.sock"
    server = LocalServer(path, "link worker", Counting().handlers)
    await server.start()
    asked = asyncio.create_task(call(path, RefreshRequest()))
    events = follow(path, FollowLinkRequest("a"))
    await anext(events)
    await asyncio.sleep(0.05)
    await server.close()
    with pytest.raises(WorkerUnreachable, match="stopped before it answered"):
        await asked
    with pytest.raises(WorkerUnreachable):
        await _all_of(events)
    assert not path.exists()


async def _all_of(events: AsyncGenerator[Any]) -> None:
    async for _ in events:
        pass


async def test_nobody_there_is_said_so_and_so_is_a_socket_that_was_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "links.sock"
    with pytest.raises(WorkerUnreachable, match="no link worker runs"):
        await call(path, RefreshRequest())
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    with pytest.raises(WorkerUnreachable, match="no link worker runs"):
        await call(path, RefreshRequest())


async def test_only_this_user_may_open_it_however_long_its_path_is(tmp_path: Path) -> None:
    path = tmp_path / ("deep" * 30) / "links.sock"
    server = LocalServer(path, "link worker", Counting().handlers)
    await server.start()
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert await call(path, PauseLinkRequest("a", reason="b")) == PauseAnswer("a b")
    finally:
        await server.close()


async def send(path: Path, line: bytes) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(str(path), limit=MAX_LINE)
    writer.write(line)
    answer: dict[str, Any] = json.loads(await reader.readline())
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b"nothing\n", "strict JSON"),
        (b"[]\n", "must be a JSON object"),
        (b'{"what": 1}\n', "no operation 'None' in `do`: it has link list, link pause"),
        (b'{"do": ["link pause"]}\n', "no operation"),
        (b'{"do": "link dance"}\n', "no operation 'link dance'"),
        (b'{"do": "link pause", "link": "a", "link": "b"}\n', "strict JSON"),
        (b"\n", "strict JSON"),
        (b" " * (MAX_LINE + 1), f"more than {MAX_LINE:,} bytes"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_is_no_request_is_refused(counting: tuple[Path, Counting], line: bytes, named: str) -> None:
    error = (await send(counting[0], line))["error"]
    assert (error["code"], named in error["message"]) == (UsageError.code, True), error


@pytest.fixture
async def declared(tmp_path: Path) -> AsyncGenerator[Path]:
    """Every operation is refused by its handler, so that a caller sees which requests reach it."""

    async def refuse(_request: Any) -> Any:
        raise ConflictError("it reached the handler")

    server = LocalServer(tmp_path / "links.sock", "link worker", dict.fromkeys(OPERATIONS, refuse))
    await server.start()
    yield server.path
    await server.close()


async def refusal(path: Path, operation: Operation, fields: dict[str, Any]) -> str:
    """Returns why a request is refused; empty if it reaches its handler."""
    error = (await send(path, json.dumps({"do": operation.name, **fields}).encode() + b"\n"))["error"]
    if error["code"] == ConflictError.code:
        return ""
    assert error["code"] == UsageError.code, (operation.name, fields)
    return str(error["message"])


def accepts_null(kind: msgspec.inspect.Type) -> bool:
    return isinstance(kind, msgspec.inspect.UnionType) and any(
        isinstance(each, msgspec.inspect.NoneType) for each in kind.types
    )


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda operation: str(operation.name))
async def test_a_request_reaches_its_handler_only_if_every_field_fits_and_a_refusal_names_the_field(
    declared: Path, operation: Operation
) -> None:
    complete = {name: example(field.type) for name, field in operation.fields.items()}
    required = {name: value for name, value in complete.items() if operation.fields[name].required}
    assert await refusal(declared, operation, complete) == ""
    assert await refusal(declared, operation, required) == ""
    assert "unknown field 'other'" in await refusal(declared, operation, {**required, "other": 1})
    for name in required:
        missing = {each: value for each, value in required.items() if each != name}
        assert f"missing field `{name}`" in await refusal(declared, operation, missing)
    for name, field in operation.fields.items():
        null = await refusal(declared, operation, {**required, name: None})
        assert (null == "") == accepts_null(field.type), null
        assert not null or f"`{name}`: expected" in null
        wrong_values: tuple[Any, ...] = ({}, {"a": 1}, [[]], 1.5, 2**53, -(2**63), "9" * MAX_REQUEST)
        for wrong in wrong_values:
            message = await refusal(declared, operation, {**required, name: wrong})
            assert f"`{name}" in message, wrong


async def test_the_largest_field_of_a_request_that_is_too_large_is_named(declared: Path) -> None:
    fields = {"link": "a", "reason": "x" * MAX_REQUEST}
    message = await refusal(declared, OPERATIONS["link pause"], fields)
    assert message.endswith("its largest field is `reason`"), message
