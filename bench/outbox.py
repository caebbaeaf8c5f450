"""What the host's outbox costs, against bare SQLite, an empty HTTP handler and bare `publish_async` in the same run.

    python bench/outbox.py --json

accept_ratio_N   sealed and signed messages a second that N callers get accepted by the store / rows a second of a bare
                 table with the same pragmas and N rows a commit
send_ratio_N     the same with composing, sealing and signing each of them: what `host.send` costs in all
http_ratio       `POST /v1/message/send` / a handler that reads the same body and answers nothing, 8 connections
drain_ratio      rows a second from the outbox to the log, 256 lanes / `publish_async` to a bare server

The steward runs as its own process, as it does in a space that is up.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import nats
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from measuring import bare_server, bare_stream, median_ratio, options, pairs, report
from tidings.client.host_http import socket_path
from tidings.contract.host import SendRequest
from tidings.host import outbox_views
from tidings.host.compose import compose_request
from tidings.host.daemon import Daemon, HostServer
from tidings.host.host import Host, Scope, _draft
from tidings.host.outbox import NewRow
from tidings.util.private_sockets import bind
from tidings.wire.message import new_id
from tidings.wire.signing import KeyPair
from tidings_testing.processes import steward_child
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually

from blocking_host import HostClient  # isort: skip

TEXT = "what is to be said about it " * 4
CALLERS = (1, 8, 64)
CONNECTIONS = 8
LANES = 256
DRAINED = 5_000
TARGET = KeyPair.generate().id


async def rate(callers: int, seconds: float, act: Callable[[], Awaitable[object]]) -> float:
    done = 0
    started = time.perf_counter()
    end = started + seconds

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await act()
            done += 1

    await asyncio.gather(*(caller() for _ in range(callers)))
    return done / (time.perf_counter() - started)


def draft(host: Host, scope: Scope) -> NewRow:
    agent = host._agent(scope)
    assert agent.identity is not None
    request = SendRequest(agent=TARGET, text=TEXT)
    return _draft(scope, compose_request(request, agent.identity, host.directories.of(scope.space_id)))


async def sending(host: Host, scope: Scope, callers: int, seconds: float) -> float:
    return await rate(callers, seconds, lambda: host.send(scope, SendRequest(agent=TARGET, text=TEXT)))


async def accepting(host: Host, scope: Scope, callers: int, seconds: float) -> float:
    made = draft(host, scope)
    return await rate(callers, seconds, lambda: host.outbox.accept(replace(made, id=new_id())))


async def bare_rows(folder: Path, rows: int, seconds: float) -> float:
    """One connection, `rows` inserts a commit, the columns of an accepted message and its key."""
    return await asyncio.to_thread(_bare_rows, folder / f"{new_id()}.db", rows, seconds)


def _bare_rows(path: Path, rows: int, seconds: float) -> float:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(
        "CREATE TABLE bare (row INTEGER PRIMARY KEY AUTOINCREMENT, space TEXT, sender TEXT, id TEXT, fingerprint BLOB,"
        " destination TEXT, subject TEXT, payload BLOB, signature TEXT, at INTEGER, UNIQUE (space, sender, id))"
    )
    insert = "INSERT INTO bare (space, sender, id, fingerprint, destination, subject, payload, signature, at)"
    values = ("s" * 36, TARGET, b"f" * 32, TARGET, "td.main.dm." + TARGET * 2, b"x" * 560, "A" * 86, 1)
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        connection.execute("BEGIN IMMEDIATE")
        for _ in range(rows):
            connection.execute(f"{insert} VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*values[:2], new_id(), *values[2:]))
        connection.execute("COMMIT")
        done += rows
    connection.close()
    return done / (time.perf_counter() - started)


async def posting(path: Path, token: str, seconds: float) -> float:
    """Requests a second over a few connections that stay open; the client is in this process, for both alike."""
    lines = await asyncio.gather(*(asyncio.open_unix_connection(str(path)) for _ in range(CONNECTIONS)))
    free = list(lines)

    async def post() -> None:
        reader, writer = free.pop()
        body = json.dumps({"agent": TARGET, "text": TEXT}).encode()
        head = (
            f"POST {SendRequest.operation.path} HTTP/1.1\r\nHost: host\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {token}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if answer[9:10] != b"2":
            raise RuntimeError(answer.decode())
        size = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(size.split(b":")[1]))
        free.append((reader, writer))

    try:
        return await rate(CONNECTIONS, seconds, post)
    finally:
        for _, writer in lines:
            writer.close()


async def nothing(request: Request) -> Response:
    await request.body()
    return Response(b"{}", media_type="application/json")


async def draining(host: Host, scope: Scope) -> float:
    """Rows are stored while the space is paused; then the time is taken until all of them are confirmed."""
    await host.pause(scope.space_id)
    made = [SendRequest(channel=f"lane.c{number % LANES}", text=TEXT) for number in range(DRAINED)]
    for start in range(0, DRAINED, 500):
        await asyncio.gather(*(host.send(scope, request) for request in made[start : start + 500]))

    async def left() -> int:
        counts = await host.outbox.read(outbox_views.counts)
        return sum(n for (space, state), n in counts.items() if space == scope.space_id and state in OWED)

    started = time.perf_counter()
    await host.resume(scope.space_id)
    while await left():
        await asyncio.sleep(0.02)
    return DRAINED / (time.perf_counter() - started)


OWED = ("pending", "inflight")


async def bare_publishing(client: Any) -> float:
    js = client.jetstream(publish_async_max_pending=LANES)
    body = b"x" * 420
    started = time.perf_counter()
    for number in range(DRAINED):
        headers = {"Nats-Msg-Id": new_id(), "Td-Sig": "A" * 86}
        await js.publish_async(f"bare.ada.c{number % LANES}", body, headers=headers)
    await js.publish_async_completed()
    return DRAINED / (time.perf_counter() - started)


async def measure(stack: AsyncExitStack, chosen: Any) -> dict[str, Any]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    space = await stack.enter_async_context(real_space(folder / "home", budget=4 * 1024**3, steward=False))
    await stack.enter_async_context(steward_child(space.home, ttl=3.0))
    await space.add("ada")
    await space.add("bob", post=[">"], read=[">"])
    figures: dict[str, Any] = {}
    daemon = Daemon(folder / "host")
    running = asyncio.create_task(daemon.run())
    await daemon.ready.wait()
    try:
        host = daemon.host
        scope = await host.adopt(("home", str(space.home.home), "main", "ada"), receive=False)
        await host.pause(scope.space_id)
        for callers in CALLERS:
            bare = partial(bare_rows, folder, callers, chosen.seconds)
            for name, ours in (("accept", accepting), ("send", sending)):
                rates = await pairs(partial(ours, host, scope, callers, chosen.seconds), bare, chosen.pairs)
                figures[f"{name}_ratio_{callers}"] = round(median_ratio(*rates), 3)
                figures[f"{name}_per_s_{callers}"] = round(statistics.median(rates[0]))
            figures[f"bare_per_s_{callers}"] = round(statistics.median(rates[1]))
        figures |= await http(daemon, chosen)
    finally:
        daemon.stopping.set()
        await running
    return figures | await drain(stack, space, Host(folder / "draining"), chosen)


async def http(daemon: Daemon, chosen: Any) -> dict[str, Any]:
    path = socket_path(daemon.home)
    client = await asyncio.to_thread(HostClient.find, daemon.home)
    assert client is not None
    (agent,) = daemon.host._agents.values()
    assert agent.identity is not None
    session = await asyncio.to_thread(client.session, agent.identity)
    empty = path.with_name("empty.sock")
    stopping = asyncio.Event()
    listener = bind(empty)
    server = HostServer(Starlette(routes=[Route(SendRequest.operation.path, nothing, methods=["POST"])]), stopping)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        rates = await pairs(
            lambda: posting(path, session.file.token, chosen.seconds),
            lambda: posting(empty, session.file.token, chosen.seconds),
            chosen.pairs,
        )
    finally:
        stopping.set()
        await serving
        listener.close()
    return {
        "http_ratio": round(median_ratio(*rates), 3),
        "http_per_s": round(statistics.median(rates[0])),
        "empty_per_s": round(statistics.median(rates[1])),
    }


async def drain(stack: AsyncExitStack, space: RealSpace, host: Host, chosen: Any) -> dict[str, Any]:
    await host.open()
    stack.push_async_callback(host.close)
    scope = await host.adopt(("home", str(space.home.home), "main", "bob"), receive=False)
    await eventually(lambda: any(each.scope == scope and each.state == "open" for each in host.health()))
    url = await stack.enter_async_context(bare_server())
    await bare_stream(url)
    client = await nats.connect(url)
    stack.push_async_callback(client.close)
    rates = await pairs(lambda: draining(host, scope), lambda: bare_publishing(client), chosen.pairs)
    return {
        "drain_ratio": round(median_ratio(*rates), 3),
        "drain_per_s": round(statistics.median(rates[0])),
        "publish_async_per_s": round(statistics.median(rates[1])),
    }


async def main() -> None:
    chosen = options(__doc__ or "")
    async with AsyncExitStack() as stack:
        figures = await measure(stack, chosen)
    aims = {"accept_ratio_1": 0.6, "accept_ratio_8": 0.6, "accept_ratio_64": 0.3, "http_ratio": 0.6, "drain_ratio": 0.5}
    rows = [
        (name + (f" (aim >= {aims[name]})" if name in aims else ""), f"{value:,}") for name, value in figures.items()
    ]
    report("outbox: what keeping a message costs", rows, figures | {"pairs": chosen.pairs}, as_json=chosen.json)


if __name__ == "__main__":
    asyncio.run(main())
