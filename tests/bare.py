"""A bare nats-server for tests that need a stream and no space: one account, no authentication."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidings.broker.blocking import WorkerConnection
from tidings.broker.server import find_binary, free_port, greeting
from tidings.wire.headers import encode_headers


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
