"""The process in which a supervisor has done what needs the space's keys.

    async with AdminProcess(home) as admin:
        await admin.ask("provision")
        await admin.ask("agents", person="me")

Most of what such a process costs is loading its modules, so one serves for all there is to do while a space comes up.
It lives no longer than that: the supervisor itself opens no key. `children.py` is its other end.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from typing import Any, Self

from tidings.admin.home import SpaceHome
from tidings.errors import ERRORS_BY_CODE, TidingsError
from tidings.server.nats_server import die_at_once_with_parent
from tidings.supervisor.json_lines_process import end_child

#: seconds that one thing may take
PATIENCE = 120.0
#: an answer is one line, and may name every agent
LONGEST_LINE = 16 * 1024 * 1024


async def spawn(
    home: SpaceHome, program: str, *arguments: str, stdin: int = asyncio.subprocess.DEVNULL, stderr: int
) -> asyncio.subprocess.Process:
    """A program of `children.py`, which ends with us."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tidings.supervisor.children",
        program,
        "--home",
        str(home.home),
        "--space",
        home.name,
        *arguments,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=die_at_once_with_parent,
        limit=LONGEST_LINE,
    )


def error_of(line: dict[str, Any], who: str) -> TidingsError:
    """What a child said went wrong, as the error it was there."""
    error = line.get("error") or {"code": "failed", "message": f"{who} ended without a word; see `tidings logs`"}
    return ERRORS_BY_CODE.get(error["code"], TidingsError)(error["message"])


class AdminProcess:
    """One such process. It does one thing at a time; an error it answers with is raised here."""

    def __init__(self, home: SpaceHome) -> None:
        self._home = home
        self._child: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        self._child = await spawn(self._home, "admin", stdin=pipe, stderr=pipe)
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
