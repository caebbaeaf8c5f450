"""Another user of the machine: a program of its own that gives up its rights and tries every open port and file.

    python neighbour.py < {"uid": 65534, "ports": [40001], "files": ["/..."], "pids": [4711]} > {"found": [...], ...}

It is started by the probes in `machine.py` and uses only the standard library, because it runs as somebody who may not
read ours. It does not know which program listens where, so each attack is tried on each port: what would be an answer
to somebody without a secret is a finding.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

#: seconds for a port to answer; one that stays silent has given nothing away
PATIENCE = 3.0
#: kinds of message in Spark's own protocol that answer a question
_ANSWERS = {1: "a block", 4: "an answer", 7: "a file"}
_RPC_FAILURE = 5
#: what Spark says to whoever did not authenticate
_UNAUTHENTICATED = (b"sasl", b"auth", b"challenge")
_OBJECTS = [f"p{number}" for number in range(4)]


def _exchange(port: int, data: bytes, most: int = 65_536) -> bytes:
    """Send, and whatever comes back until it is silent, closes, or sent enough."""
    got = b""
    with socket.socket() as link:
        link.settimeout(PATIENCE)
        link.connect(("127.0.0.1", port))  # by number: who gave up its rights may not load what resolves names
        link.sendall(data)
        try:
            while len(got) < most and (chunk := link.recv(4096)):
                got += chunk
                if _is_whole(got):
                    break
        except OSError:
            pass
    return got


def _is_whole(got: bytes) -> bool:
    """One answer is enough: a line, or a frame of Spark's."""
    return got.endswith(b"\n") or (len(got) >= 9 and len(got) >= struct.unpack(">q", got[:8])[0] > 8)


def _text(value: bytes) -> bytes:
    return struct.pack(">i", len(value)) + value


def _rpc(body: bytes) -> bytes:
    """A request in Spark's protocol: length, kind 3, number, body."""
    return struct.pack(">qbqi", 21 + len(body), 3, 7, len(body)) + body


def _judge_spark(got: bytes) -> str | None:
    if len(got) < 9 or struct.unpack(">q", got[:8])[0] > 1 << 24:
        return None
    kind = got[8]
    if kind in _ANSWERS:
        return f"Spark gives {_ANSWERS[kind]} to somebody without its secret"
    if kind == _RPC_FAILURE and not any(word in got.lower() for word in _UNAUTHENTICATED):
        return f"Spark looked at a request of somebody without its secret: {got[21:140].decode(errors='replace')!r}"
    return None


def fetch_of_a_block(port: int) -> str | None:
    """The first broadcast of a job holds its task, and with it PySpark's own secret."""
    blocks = (b"broadcast_0_piece0", b"broadcast_0")
    body = b"\0" + _text(b"app") + _text(b"driver") + struct.pack(">i", len(blocks)) + b"".join(map(_text, blocks))
    return _judge_spark(_exchange(port, _rpc(body)))


def call_of_an_endpoint(port: int) -> str | None:
    """A message to the driver's block manager master: no address of ours, its address and name, a Java string."""
    name = b"BlockManagerMaster"
    host = b"127.0.0.1"
    to = b"\1" + struct.pack(">H", len(host)) + host + struct.pack(">i", port) + struct.pack(">H", len(name)) + name
    return _judge_spark(_exchange(port, _rpc(b"\0" + to + b"\xac\xed\0\5t\0\1x")))


def gateway_without_token(port: int) -> str | None:
    """A call of a static method through py4j."""
    got = _exchange(port, b"c\nz:java.lang.System\ncurrentTimeMillis\ne\n")
    return "the gateway to the JVM obeys without its token" if got.startswith(b"!y") else None


def callback_without_token(port: int) -> str | None:
    """A call of an object in the Python driver. What exists answers, if only with an error of its own."""
    for name in _OBJECTS:
        got = _exchange(port, f"c\n{name}\n__str__\ne\n".encode())
        if got.startswith(b"!y") or (got.startswith(b"!x") and b"Traceback" in got):
            return f"the driver's Python object {name} is called by anybody"
    return None


def worker_without_secret(port: int) -> str | None:
    got = _exchange(port, _text(b"not the secret"))
    return "a Python worker obeys without its secret" if got[4:6] == b"ok" else None


def web_page(port: int) -> str | None:
    return "a web page is served" if _exchange(port, b"GET / HTTP/1.0\r\n\r\n").startswith(b"HTTP/") else None


ATTACKS: tuple[Callable[[int], str | None], ...] = (
    fetch_of_a_block,
    call_of_an_endpoint,
    gateway_without_token,
    callback_without_token,
    worker_without_secret,
    web_page,
)


def try_ports(ports: list[int]) -> list[str]:
    def attempt(pair: tuple[int, Callable[[int], str | None]]) -> str | None:
        port, attack = pair
        try:
            found = attack(port)
        except OSError:
            return None  # it closed, or refuses to talk
        return f"port {port}: {found}" if found else None

    pairs = [(port, attack) for port in ports for attack in ATTACKS]
    with ThreadPoolExecutor(max(1, len(pairs))) as pool:
        return [found for found in pool.map(attempt, pairs) if found]


def try_files(paths: list[str]) -> list[str]:
    """Those of `paths` that this user can open, or list."""
    found = []
    for path in paths:
        try:
            os.listdir(path) if Path(path).is_dir() else Path(path).open("rb").close()  # noqa: PTH208
        except OSError:
            continue
        found.append(f"{path} can be read")
    return found


def try_command_lines(pids: list[int]) -> list[str]:
    """Command lines are for everybody to read."""
    found = []
    for pid in pids:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().lower().split(b"\0")
        except OSError:
            continue
        said = [word for word in words if any(secret in word for secret in (b"secret=", b"token=", b"password="))]
        found += [f"the command line of process {pid} says {word[:30].decode(errors='replace')!r}" for word in said]
    return found


def become(uid: int) -> None:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def main() -> None:
    asked: dict[str, Any] = json.load(sys.stdin)
    if asked.get("uid"):
        become(int(asked["uid"]))
        readable = try_files([*asked["files"], *(f"/proc/{pid}/environ" for pid in asked["pids"])])
    else:
        readable = []
    found = [*try_ports(asked["ports"]), *readable, *try_command_lines(asked["pids"])]
    json.dump({"uid": os.getuid(), "found": found}, sys.stdout)


if __name__ == "__main__":
    main()
