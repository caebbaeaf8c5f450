"""Files that hold secrets, and locks: 0600 in 0700, written whole or not at all.

A secret that others can read is refused with the command that mends it, never quietly repaired: somebody may have
read it already. Locks are the kernel's (`flock`), so they end with the process, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tidings.errors import ConfigError, DiskFull, SpaceBusy

#: no file of keys or settings is larger
LARGEST_READ = 16 * 1024 * 1024


def private_dir(path: Path) -> Path:
    """Create a 0700 directory, and those above it that are missing, or check that an existing one is."""
    try:
        for missing in [each for each in reversed(path.parents) if not each.exists()]:
            missing.mkdir(mode=0o700, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ConfigError(f"cannot use directory {path}: {error.strerror}; set TIDINGS_HOME to one you own") from error
    if mode & 0o077:
        raise ConfigError(f"{path} is open to others (mode {mode:04o}): run `chmod 700 {path}`")
    return path


def close_to_others(folder: Path) -> int:
    """Take from everything below a folder what others may do. For data that another program wrote, not for secrets."""
    mended = 0
    for path in (folder, *folder.rglob("*")):
        with suppress(OSError):  # another program removed it, or it belongs to somebody else
            mode = stat.S_IMODE(path.lstat().st_mode)
            if mode & 0o077 and not path.is_symlink():
                path.chmod(mode & ~0o077)
                mended += 1
    return mended


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically, mode 0600, on disk before this returns."""
    write_atomic(path, text, 0o600)


def write_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise _write_failure(path, error) from error
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except OSError as error:
        raise _write_failure(path, error) from error
    finally:
        with suppress(FileNotFoundError):
            Path(temporary).unlink()
    _sync_dir(path.parent)


def _write_failure(path: Path, error: OSError) -> ConfigError:
    kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else ConfigError
    return kind(f"cannot write {path}: {error.strerror}")


def _sync_dir(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_private(path: Path) -> str:
    """The text of a secret file; refused if anybody else may read it."""
    check_private(path)
    return read_plain(path)


def read_plain(path: Path) -> str:
    """The text of a file that is one: whoever names a pipe or a device must not make its reader wait for ever."""
    # Without O_NONBLOCK opening a pipe waits for its other end.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path} is not a plain file: name one that is")
        if found.st_size > LARGEST_READ:
            raise ConfigError(f"{path} has {found.st_size} bytes, no file of Tidings is larger than {LARGEST_READ}")
        with os.fdopen(handle, encoding="utf-8", closefd=False) as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is damaged: it is not UTF-8 text ({error.reason} at byte {error.start})") from error
    finally:
        os.close(handle)


def own_secret(path: Path, size: int) -> bytes:
    """Random bytes that are made when they are first asked for, and the same from then on."""
    if not path.exists():
        write_private(path, os.urandom(size).hex() + "\n")
    try:
        secret = bytes.fromhex(read_private(path))
    except ValueError:
        secret = b""
    if len(secret) != size:
        raise ConfigError(f"{path} does not hold a secret of {size} bytes: remove it, and another one is made")
    return secret


def check_private(path: Path) -> Path:
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise ConfigError(f"{path} can be read by others (mode {mode:04o}): run `chmod 600 {path}`, then rotate it")
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{path} belongs to another user (uid {found.st_uid}): copy it and make the copy yours")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"cannot read {path}: permission denied")
    return path


#: a lock is held for a moment before its file says by whom
LOOKS = 50


@contextmanager
def locked(path: Path, purpose: str, *, wait: float = 0.0) -> Iterator[IO[str]]:
    """Hold an exclusive lock; the file says who holds it. Raises SpaceBusy naming the holder after `wait` seconds."""
    try:
        file = path.open("a+")
        os.fchmod(file.fileno(), 0o600)
    except OSError as error:
        raise ConfigError(f"cannot lock {path}: {error.strerror}") from error
    with file:
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise SpaceBusy(f"{purpose}: held by {lock_holder(path) or 'another process'}") from None
                time.sleep(0.02)
        try:  # past the file's own buffer, which would try again when it is closed
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"pid {os.getpid()} ({purpose})\n".encode())
        except OSError as error:
            raise ConfigError(f"cannot lock {path}: {error.strerror}") from error
        yield file
        os.ftruncate(file.fileno(), 0)


def lock_holder(path: Path) -> str | None:
    """Who holds a lock, in words, or None if nobody does."""
    try:
        file = path.open("r+")
    except OSError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return path.read_text().strip() or "another process"
    return None


def lock_pid(path: Path) -> int | None:
    """The pid that holds a lock, or None if nobody does."""
    for _ in range(LOOKS):
        holder = lock_holder(path)
        words = (holder or "").split()
        if len(words) > 1 and words[1].isdigit():
            return int(words[1])
        if holder is None:
            break
        time.sleep(0.01)  # it has the lock and is about to say who it is, or about to give it back
    return None
