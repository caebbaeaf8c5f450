"""The child processes of a supervisor: starting one, hearing what it says in lines of JSON, ending it.

`children.py` is the other end of the steward and of the admin process. What keeps a child running is in `keepers.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Self

from tidings.admin.home import SpaceHome
from tidings.errors import ERRORS_BY_CODE, TidingsError
from tidings.server.nats_server import die_at_once_with_parent, die_with_parent

CHILDREN = "tidings.supervisor.children"
#: seconds that one thing may take
PATIENCE = 120.0
#: an answer is one line, and may name every agent
LONGEST_LINE = 16 * 1024 * 1024


async def start_child(
    home: SpaceHome, module: str, *options: str, errors: str = "", stdin: int = asyncio.subprocess.DEVNULL
) -> asyncio.subprocess.Process:
    """Starts a module with a process group of its own, which ends with us. `errors`: the log file of its standard
    error, else a pipe."""
    pipe = asyncio.subprocess.PIPE
    stderr = os.open(home.logs / errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) if errors else pipe
    place = ("--home", str(home.home), "--space", home.name)
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *place,
            *options,
            stdin=stdin,
            stdout=pipe,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=die_at_once_with_parent if module == CHILDREN else die_with_parent,
            limit=LONGEST_LINE,
        )
    finally:
        if errors:
            os.close(stderr)


async def end_child(child: asyncio.subprocess.Process, grace: float) -> None:
    """Stop a child we started: SIGTERM, a wait, then SIGKILL."""
    if child.returncode is not None:
        return
    child.send_signal(signal.SIGCONT)
    child.terminate()
    try:
        async with asyncio.timeout(grace):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()


def error_of(line: dict[str, Any], who: str) -> TidingsError:
    """What a child said went wrong, as the error it was there."""
    error = line.get("error") or {"code": "failed", "message": f"{who} ended without a word; see `tidings logs`"}
    return ERRORS_BY_CODE.get(error["code"], TidingsError)(error["message"])


class SpeakingProcess:
    """One process, with a group of its own: what it starts belongs to it. `errors`: its standard error."""

    module: ClassVar[str]
    errors: ClassVar[str]
    #: seconds for an orderly end
    grace: ClassVar[float] = 10.0

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child
        self.pid = child.pid

    @classmethod
    async def start(cls, home: SpaceHome, options: Sequence[str] = ()) -> Self:
        return cls(await start_child(home, cls.module, *options, errors=cls.errors))

    async def lines(self) -> AsyncIterator[dict[str, Any]]:
        """What it says, until it ends."""
        assert self._child.stdout is not None
        while line := await self._child.stdout.readline():
            with suppress(ValueError):
                yield dict(json.loads(line))

    async def wait(self) -> int:
        """Its exit code, once it and whatever it left behind are gone."""
        code = await self._child.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        return code

    async def end(self) -> None:
        await end_child(self._child, self.grace)
        await self.wait()


class AdminProcess:
    """The process in which a supervisor has done what needs the space's keys.

        async with AdminProcess(home) as admin:
            await admin.ask("provision")
            await admin.ask("agents", person="me")

    Loading its modules is most of its cost, so one process does everything while a space comes up; later tasks start a
    new one. The supervisor itself never opens a key. It does one thing at a time; an error it answers with is raised
    here.
    """

    def __init__(self, home: SpaceHome) -> None:
        self._home = home
        self._child: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._child = await start_child(self._home, CHILDREN, "admin", stdin=asyncio.subprocess.PIPE)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._child is not None
        await end_child(self._child, 2)

    async def ask(self, program: str, **options: Any) -> dict[str, Any]:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps({"program": program, **options}).encode() + b"\n")
        try:
            async with asyncio.timeout(PATIENCE):
                with suppress(ConnectionError):  # it is gone; what it last said tells why
                    await child.stdin.drain()
                line = await child.stdout.readline()
        except TimeoutError:
            raise TidingsError(f"`{program}` did not end within {PATIENCE:.0f} s; `tidings logs admin`") from None
        try:
            result = dict(json.loads(line))
        except ValueError:
            why = await self._last_words(child)
            raise TidingsError(f"`{program}` failed: {why}; `tidings logs admin` says more") from None
        if "error" in result:
            raise error_of(result, f"`{program}`")
        return result

    @staticmethod
    async def _last_words(child: asyncio.subprocess.Process) -> str:
        await end_child(child, 2)
        assert child.stderr is not None
        said = (await child.stderr.read()).decode(errors="replace").strip().splitlines()
        return said[-1] if said else "it said nothing"
