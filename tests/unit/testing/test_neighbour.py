"""The probe that tries open ports as another user: what it takes for a finding, on the words real programs said."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tidings_testing.security import neighbour


@contextmanager
def saying(answer: bytes) -> Iterator[int]:
    """A port that says the same to everybody."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    link, _ = server.accept()
                except OSError:
                    return
                with link:
                    link.recv(4096)
                    link.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def frame(kind: int, rest: bytes) -> bytes:
    return struct.pack(">qb", 9 + len(rest), kind) + rest


def failure(text: bytes) -> bytes:
    return frame(5, struct.pack(">qi", 7, len(text)) + text)


FOUND = {
    "an open block manager": failure(
        b"org.apache.spark.storage.BlockNotFoundException: Block broadcast_0_piece0 not found"
    ),
    "an open driver": frame(4, struct.pack(">qi", 7, 4) + b"\xac\xed\0\5"),
    "a gateway without a token": b"!yL1763310000000\n",
    "an object of the driver": b"!ys<function>\n",
    "an object that fails": b"!xsTraceback (most recent call last)\n",
    "a worker without a secret": struct.pack(">i", 2) + b"ok",
    "a web page": b"HTTP/1.1 200 OK\r\n\r\n",
}
REFUSED = {
    "a driver with a secret": failure(
        b"java.lang.IllegalStateException: Expected SaslMessage, received something else"
    ),
    "a gateway with a token": b"!xsAuthentication error: unexpected command.\n",
    "an unguessable object": b"!xsObject ID unknown\n",
    "a worker with a secret": struct.pack(">i", 3) + b"err",
    "a broker": b'INFO {"server_id":"x"}\r\n-ERR \'Authorization Violation\'\r\n',
    "silence": b"",
}


@pytest.mark.parametrize("who", FOUND)
def test_whoever_answers_somebody_without_a_secret_is_found(who: str) -> None:
    with saying(FOUND[who]) as port:
        assert neighbour.try_ports([port]) != []


@pytest.mark.parametrize("who", REFUSED)
def test_whoever_refuses_is_not(who: str) -> None:
    with saying(REFUSED[who]) as port:
        assert neighbour.try_ports([port]) == []
