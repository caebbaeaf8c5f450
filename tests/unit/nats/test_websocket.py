"""A websocket as a stream of bytes: whatever a server or somebody in between sends, it is read right or refused."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.nats.address import parse_address
from tidings.nats.core import MAX_MESSAGE
from tidings.nats.errors import ProtocolError
from tidings.nats.websocket import WebSocketStream
from websocket_frames import BINARY, CLOSE, CONT, PING, PONG, TEXT, agreed, frame, unmasked

INFO = b'INFO {"server_id":"X","max_payload":1048576}\r\n'


def opened() -> WebSocketStream:
    stream = WebSocketStream(parse_address("wss://mesh.example:8443/nats"))
    assert stream.receive(agreed(stream.to_send())) == []
    assert stream.is_open
    return stream


def test_it_asks_as_a_websocket_does_under_its_path_and_offers_no_compression() -> None:
    request = WebSocketStream(parse_address("wss://mesh.example:8443/nats")).to_send()
    assert request.startswith(b"GET /nats HTTP/1.1\r\nHost: mesh.example:8443\r\n")
    assert b"Upgrade: websocket\r\n" in request
    assert b"Extensions" not in request
    assert b"GET / HTTP/1.1" in WebSocketStream(parse_address("ws://127.0.0.1")).to_send()


def test_bytes_that_come_one_at_a_time_are_the_same() -> None:
    stream = WebSocketStream(parse_address("wss://mesh.example"))
    said = agreed(stream.to_send()) + frame(BINARY, INFO) + frame(BINARY, b"x" * 70_000) + frame(BINARY, b"PING\r\n")
    heard = b"".join(payload for at in range(len(said)) for payload in stream.receive(said[at : at + 1]))
    assert heard == INFO + b"x" * 70_000 + b"PING\r\n"


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=6), st.integers(1, 64))
def test_fragments_are_one_stream_and_a_ping_between_them_is_answered(parts: list[bytes], step: int) -> None:
    stream = opened()
    frames = [
        frame(BINARY if not at else CONT, part, fin=at == len(parts) - 1) + frame(PING, b"%d" % at)
        for at, part in enumerate(parts)
    ]
    said, heard, sent = b"".join(frames), b"", b""
    for at in range(0, len(said), step):
        heard += b"".join(stream.receive(said[at : at + step]))
        sent += stream.to_send()
    assert heard == b"".join(parts)
    for at in range(len(parts)):
        size = 6 + len(str(at))
        assert unmasked(sent[:size])[::2] == (PONG, b"%d" % at)
        sent = sent[size:]
    assert not sent


def test_a_large_frame_costs_its_size() -> None:
    stream, large = opened(), os.urandom(8 << 20)
    said = frame(BINARY, large)
    began = time.process_time()
    heard = [payload for at in range(0, len(said), 4096) for payload in stream.receive(said[at : at + 4096])]
    assert heard == [large]
    assert time.process_time() - began < 3, "2,000 pieces: each looked at once"


@pytest.mark.parametrize("size", [0, 5, 125, 126, 65_535, 65_536, 1 << 20])
def test_what_is_sent_is_one_masked_frame_of_bytes(size: int) -> None:
    stream, data = opened(), os.urandom(size)
    first, second = unmasked(stream.wrap(data)), unmasked(stream.wrap(data))
    assert (first[0], first[2], second[2]) == (BINARY, data, data)
    assert first[1] != second[1], "every frame has a mask of its own"


@pytest.mark.parametrize(
    "said",
    [
        frame(TEXT, b"INFO {}\r\n"),
        frame(BINARY, b"x", masked=True),
        frame(BINARY, b"x", reserved=4),
        frame(3, b"x"),
        frame(CONT, b"x"),
        frame(BINARY, b"x", fin=False) + frame(BINARY, b"y"),
        frame(PING, b"x" * 126),
        frame(PING, b"x", fin=False),
        frame(CLOSE, b"x"),
        bytes([0x82, 127]) + (MAX_MESSAGE + 1).to_bytes(8, "big"),
        bytes([0x82, 127]) + ((1 << 63) + 5).to_bytes(8, "big"),
        b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n" + b"400 " * 20,
        b"-ERR 'Authorization Violation'\r\n",
    ],
    ids=[
        "text",
        "masked",
        "reserved bit",
        "unknown kind",
        "nothing to continue",
        "a fragment is left open",
        "long ping",
        "half ping",
        "bad close",
        "too large",
        "larger than there are bytes",
        "a page",
        "no frame",
    ],
)
def test_what_breaks_the_rules_is_refused(said: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"rules of a websocket|text where"):
        opened().receive(said)


def test_fragments_are_not_larger_together_than_one_frame_may_be() -> None:
    stream, part = opened(), b"x" * (16 << 20)
    assert stream.receive(frame(BINARY, part, fin=False)) == [part]
    for _ in range(3):
        assert stream.receive(frame(CONT, part, fin=False)) == [part]
    with pytest.raises(ProtocolError, match="rules of a websocket"):
        stream.receive(frame(CONT, part[:1], fin=False))


def test_what_came_before_a_close_is_heard_and_nothing_after_it() -> None:
    stream = opened()
    last = b"-ERR 'Authorization Violation'\r\n"
    said = frame(BINARY, last) + frame(CLOSE, (1008).to_bytes(2, "big") + b"away") + frame(BINARY, b"PING\r\n")
    assert stream.receive(said) == [last]
    assert "1008" in stream.ended
    assert unmasked(stream.to_send())[0] == CLOSE
    assert stream.receive(frame(BINARY, b"PING\r\n")) == []
    assert (stream.wrap(b"more"), stream.goodbye()) == (b"", b"")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", "answered 403 Forbidden: another web server"),
        (
            b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n",
            "407 .* a proxy that wants a pass",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "answered 200 OK"),
        (b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", "answered 302 Found"),
        (b'INFO {"server_id":"X"}\r\n', "no websocket"),
        (b"\x82\x05hello" * 9000, "no websocket"),
        (b"HTTP/1.1 101 Yes\r\n" + b"x: y\r\n" * 100_000, "no websocket"),
        (
            b"HTTP/1.1 101 Yes\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: wrong\r\n\r\n",
            "no websocket",
        ),
        (b"HTTP/1.1 101 Yes\r\nUpgrade: mud\r\nConnection: Upgrade\r\n\r\n", "no websocket"),
    ],
)
def test_an_answer_that_is_no_websocket_is_said_in_words(answer: bytes, said: str) -> None:
    stream = WebSocketStream(parse_address("wss://mesh.example"))
    stream.to_send()
    with pytest.raises(ProtocolError, match=said):
        stream.receive(answer)
    assert not stream.is_open
    assert stream.wrap(b"CONNECT") == b"", "nothing is told to it"


@pytest.mark.parametrize(
    ("answer", "said"),
    [(b"", "hung up"), (b"HTTP/1.1 101", "hung up"), (b"HTTP/1.1 200 OK\r\n\r\nhalf a page", "answered 200 OK")],
)
def test_who_hangs_up_before_it_is_a_websocket_is_said(answer: bytes, said: str) -> None:
    stream = WebSocketStream(parse_address("wss://mesh.example"))
    stream.to_send()
    assert stream.receive(answer) == []
    with pytest.raises(ProtocolError, match=said):
        stream.at_end()
    after = opened()
    after.at_end()  # one that was open just ends


@given(st.binary(max_size=400), st.booleans())
def test_no_bytes_at_all_do_more_than_break_it(data: bytes, is_open: bool) -> None:
    stream = opened() if is_open else WebSocketStream(parse_address("wss://mesh.example"))
    stream.to_send()
    try:
        heard = b"".join(stream.receive(data))
        stream.at_end()
    except ProtocolError:
        return
    assert len(heard) <= len(data)
