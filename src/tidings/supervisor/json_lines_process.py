"""A child that says what it does in lines of JSON, and that is ended with everything it started."""

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
from tidings.server.nats_server import die_with_parent


async def end_child(child: asyncio.subprocess.Process, grace: float) -> None:
    """Stop a child we started: ask, wait, make."""
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
        errors = os.open(home.logs / cls.errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        place = ("--home", str(home.home), "--space", home.name)
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                cls.module,
                *place,
                *options,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        finally:
            os.close(errors)
        return cls(child)

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
