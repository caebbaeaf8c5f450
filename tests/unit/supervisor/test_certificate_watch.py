"""What happens while a space is up: a certificate that was made again is taken up, and a full disk ends nothing."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tidings.admin.creation import broker_config, create_space
from tidings.admin.home import SpaceHome
from tidings.admin.listening import listen_on
from tidings.errors import ConfigError
from tidings.server.nats_server import free_port
from tidings.supervisor import supervisor as supervising
from tidings.supervisor.supervisor import Supervisor, UpOptions
from tidings.util.private_files import private_dir
from tidings_testing.waiting import eventually


async def test_a_certificate_that_was_made_again_is_taken_up_and_a_failure_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "LOOK_AT_CERTIFICATE", 0.02)
    monkeypatch.setattr(supervising, "RENEW_CERTIFICATE", 0.02)
    home = SpaceHome(tmp_path, "main")
    create_space(home, port=free_port(), open_space=False, budget=10**9)
    info = listen_on(home, "127.0.0.2")
    supervisor = Supervisor(home, UpOptions(person="ada"))
    reloads: list[bytes] = []
    files = home.certificates
    stub = SimpleNamespace(config=broker_config(home, info), reload=lambda: reloads.append(files.server.read_bytes()))
    supervisor.broker = cast("Any", stub)
    looks = 0

    async def administer(program: str, **options: Any) -> dict[str, Any]:
        nonlocal looks
        looks += 1
        assert (program, options) == ("listen", {"wanted": None})
        if looks == 1:
            raise ConfigError("the disk is full")
        return {"address": listen_on(home, None).address}

    monkeypatch.setattr(supervisor, "_administer", administer)
    running = asyncio.create_task(supervisor._watch_certificate())
    try:
        await eventually(lambda: looks >= 4)
        assert reloads == []
        files.server.unlink()
        await eventually(lambda: bool(reloads))
        assert reloads == [files.server.read_bytes()]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_a_state_that_cannot_be_written_on_a_full_disk_does_not_end_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home = SpaceHome(tmp_path, "main")
    private_dir(home.run)

    def no_room(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    Supervisor(home, UpOptions(person="ada")).phase("ready")
    assert "cannot write state" in caplog.text
    assert "No space left on device" in caplog.text
