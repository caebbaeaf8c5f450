"""A bare nats-server for tests that need a stream and no space: one account, no authentication."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidings.errors import TidingsError
from tidings.nats.errors import NatsError
from tidings.nats.jetstream_blocking import WorkerConnection
from tidings.server.nats_server import find_binary, free_port, greeting
from tidings.wire.records import encode_headers


@dataclass
class BareServer:
    url: str
    monitor: str

    def connect(self) -> WorkerConnection:
        return WorkerConnection.open(self.url, name="test")

    def stream(self, name: str, count: int = 0, **config: Any) -> str:
        """A new stream with the subjects `<name>.>` and so many small records."""
        self.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"], "allow_direct": True, **config})
        self.fill(name, count)
        return name

    def fill(self, name: str, count: int, *, data: bytes = b"hello", channels: int = 3) -> None:
        self.publish((f"{name}.c{i % channels}", encode_headers([("Td-Sig", "A" * 86)]), data) for i in range(count))

    def publish(self, messages: Iterable[tuple[str, bytes, bytes]]) -> None:
        connection = self.connect()
        answers = connection.replies()
        for message in messages:
            connection.publish_all([message])
            assert b'"error"' not in next(answers).payload
        connection.close()

    def api(self, operation: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        connection = self.connect()
        try:
            reply = connection.request(f"$JS.API.{operation}", json.dumps(body or {}).encode())
        finally:
            connection.close()
        answer: dict[str, Any] = json.loads(reply.payload)
        assert "error" not in answer, answer
        return answer

    def connections(self) -> dict[int, str]:
        """Number and name of every client the server knows."""
        with urllib.request.urlopen(f"{self.monitor}/connz", timeout=10) as reply:
            return {each["cid"]: each.get("name", "") for each in json.load(reply)["connections"]}


@contextmanager
def bare_server(folder: Path, config: str = "", *, jetstream: str = "", greets: bool = True) -> Iterator[BareServer]:
    """`greets`: it says hello in plain, as all but those do that begin with TLS."""
    port, monitor = free_port(), free_port()
    path = folder / "bare.conf"
    storing = f'store_dir: "{folder}/js"\n{jetstream}'
    path.write_text(f'listen: "127.0.0.1:{port}"\nhttp: "127.0.0.1:{monitor}"\n{config}\njetstream {{ {storing} }}\n')
    process = subprocess.Popen([find_binary(), "-c", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while (greeting(port) is None) if greets else not _listens(port):
            assert time.monotonic() < deadline, "the bare server did not start"
            time.sleep(0.02)
        yield BareServer(f"nats://127.0.0.1:{port}", f"http://127.0.0.1:{monitor}")
    finally:
        process.terminate()
        process.wait(20)


@dataclass
class BareCluster(BareServer):
    """Three that are one. `nodes` by name, as JetStream says who leads."""

    nodes: dict[str, subprocess.Popen[bytes]]

    def leader(self, stream: str) -> subprocess.Popen[bytes]:
        return self.nodes[self.api(f"STREAM.INFO.{stream}")["cluster"]["leader"]]


@contextmanager
def bare_cluster(folder: Path) -> Iterator[BareCluster]:
    ports, routes = [free_port() for _ in range(3)], [free_port() for _ in range(3)]
    known = ", ".join(f'"nats://127.0.0.1:{route}"' for route in routes)
    nodes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for number, (port, route) in enumerate(zip(ports, routes, strict=True), 1):
            path = folder / f"n{number}.conf"
            path.write_text(
                f'server_name: n{number}\nlisten: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder}/n{number}" }}\n'
                f'cluster {{ name: bare, listen: "127.0.0.1:{route}", routes: [{known}] }}\n'
            )
            nodes[f"n{number}"] = subprocess.Popen(
                [find_binary(), "-c", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        cluster = BareCluster(",".join(f"nats://127.0.0.1:{port}" for port in ports), "", nodes)
        _wait_for_streams(cluster)
        yield cluster
    finally:
        for process in nodes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(20)


def _wait_for_streams(cluster: BareCluster) -> None:
    """Until somebody leads: before that no stream can be made."""
    deadline = time.monotonic() + 30
    while True:
        try:
            cluster.stream("first", num_replicas=3)
            return
        except (AssertionError, TidingsError, NatsError):
            assert time.monotonic() < deadline, "the bare cluster did not start"
            time.sleep(0.1)


@contextmanager
def guarded(folder: Path, user: str, more: str = "") -> Iterator[BareServer]:
    """A server with the stream `logged` that lets in `user` only; the stream was made while it was open."""
    folder.mkdir(exist_ok=True)
    with bare_server(folder) as opened:
        opened.stream("logged")
    with bare_server(folder, f"authorization {{ {user} }}\n{more}" if user else more) as server:
        yield server


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True
