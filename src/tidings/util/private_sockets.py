"""Unix sockets of this user: bound 0600 in a 0700 directory, and reached under however long a path.

A kernel takes at most 107 bytes of path; a longer one is reached through its open directory. Who binds holds a lock
that others would need, so what lies there is stale. `peer_uid` asks the kernel who is at the other end: a path that
leads to a socket proves nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tidings.util.private_files import private_dir

LONGEST_PATH = 100
BACKLOG = 128
QUEUE_PAUSE = 0.02
_CREDENTIALS = struct.Struct("3i")


def bind(path: Path) -> socket.socket:
    """Listen there, for this user only. To be called under a lock: what is there is removed."""
    private_dir(path.parent)
    with suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        with _address(path) as address:
            listener.bind(address)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def connect(path: Path, timeout: float | None) -> socket.socket:
    """A connection to whoever listens there; OSError if nobody listens there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout)
    try:
        with _address(path) as address:
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


async def connect_at_once(path: Path) -> socket.socket:
    """The same without standing still: one whose queue is full is asked again, until the caller gives up."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        with _address(path) as address:
            while True:
                try:
                    connection.connect(address)
                except BlockingIOError:
                    await asyncio.sleep(QUEUE_PAUSE)
                else:
                    return connection
    except BaseException:
        connection.close()
        raise


def peer_uid(connection: socket.socket) -> int | None:
    """The user at the other end, by the kernel; None if it does not say."""
    try:
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _pid, uid, _gid = _CREDENTIALS.unpack(found)
    except (OSError, struct.error, AttributeError):
        return None
    return int(uid)


@contextmanager
def _address(path: Path) -> Iterator[str]:
    if len(os.fsencode(path)) <= LONGEST_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
