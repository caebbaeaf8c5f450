"""The process that opens the keys for a supervisor: its answers, its errors and its end."""

import asyncio
from pathlib import Path

import pytest

from tidings.admin.home import SpaceHome
from tidings.errors import BrokerUnreachable, TidingsError
from tidings.supervisor.processes import AdminProcess


async def test_one_process_does_one_thing_after_the_other_and_ends_with_the_block(tmp_path: Path) -> None:
    home = SpaceHome(tmp_path, "main")
    async with AdminProcess(home) as admin:
        made = await admin.ask("create", open=False, port=None, budget=64 * 1024 * 1024)
        assert made == {"space": "main", "port": home.read_info().port}
        assert await admin.ask("complete_move") == {}
        child = admin._child
        assert child is not None
        assert child.returncode is None
    assert child.returncode is not None


async def test_an_error_there_is_the_same_error_here_and_a_crash_is_told_with_its_last_line(tmp_path: Path) -> None:
    async with AdminProcess(SpaceHome(tmp_path, "main")) as admin:
        await admin.ask("create", open=False, port=None, budget=64 * 1024 * 1024)
        with pytest.raises(BrokerUnreachable):
            await admin.ask("provision")
    async with AdminProcess(SpaceHome(tmp_path, "main")) as admin:
        with pytest.raises(TidingsError, match=r"`nothing` failed: KeyError: 'nothing'; `tidings logs admin`"):
            await admin.ask("nothing")


async def test_one_that_was_killed_is_told_at_once(tmp_path: Path) -> None:
    async with AdminProcess(SpaceHome(tmp_path, "main")) as admin:
        assert admin._child is not None
        admin._child.kill()
        async with asyncio.timeout(20):
            with pytest.raises(TidingsError, match="`provision` failed: it said nothing"):
                await admin.ask("provision")
