"""Frames of a websocket, made and read by hand: what a server sends, good or bad, and what a client must send."""

from __future__ import annotations

import base64
import hashlib
import re

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
CONT, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True, masked: bool = False, reserved: int = 0) -> bytes:
    head = bytes([fin << 7 | reserved << 4 | opcode])
    size, mask = len(payload), 0x80 if masked else 0
    if size < 126:
        head += bytes([mask | size])
    elif size < 1 << 16:
        head += bytes([mask | 126]) + size.to_bytes(2, "big")
    else:
        head += bytes([mask | 127]) + size.to_bytes(8, "big")
    return head + (b"\0\0\0\0" if masked else b"") + payload


def agreed(request: bytes) -> bytes:
    """What a server answers to this request."""
    found = re.search(rb"Sec-WebSocket-Key: (\S+)", request)
    assert found is not None
    accept = base64.b64encode(hashlib.sha1(found[1] + GUID).digest())
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n"
    )


def unmasked(data: bytes) -> tuple[int, bytes, bytes]:
    """Opcode, mask and payload of a frame of ours, which is masked."""
    assert data[1] & 0x80, "a client masks what it sends"
    size, at = data[1] & 0x7F, 2
    if size >= 126:
        at = 4 if size == 126 else 10
        size = int.from_bytes(data[2:at], "big")
    mask, body = data[at : at + 4], data[at + 4 :]
    assert len(body) == size
    key = int.from_bytes((mask * (size // 4 + 1))[:size], "big")
    return data[0] & 15, mask, (int.from_bytes(body, "big") ^ key).to_bytes(size, "big")
