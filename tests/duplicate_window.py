"""The end of the broker's duplicate window, brought about now instead of in ten minutes."""

from __future__ import annotations

import itertools
import json
from typing import Any

from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually

STREAM = {"chat": "LOG_main", "dm": "DM_main", "task": "TASK_main"}


async def forget_ids(space: RealSpace) -> None:
    """What the end of the duplicate window does, now: every message id is forgotten."""
    probes = {"chat": "td.main.chat.probe.probe", "dm": "td.main.dm.0.probe.probe", "task": "td.main.task.probe.probe"}
    windows = itertools.count(100_000_000, 1_000_000)
    async with space.core() as core:
        for kind, stream in STREAM.items():
            config = (await core.info(stream))["config"]

            async def is_new(stream: str = stream, subject: str = probes[kind], config: Any = config) -> bool:
                # A changed window starts the broker's clean-up anew, which is otherwise due when the old one ends.
                await core.api(f"STREAM.UPDATE.{stream}", config | {"duplicate_window": next(windows)})
                answer = await core.connection.request(subject, b"", headers={"Nats-Msg-Id": "probe"}, timeout=5)
                return not json.loads(answer.data).get("duplicate")

            assert await is_new()
            await eventually(is_new, what=f"the ids of {stream} are forgotten", every=0.3)
            await core.api(f"STREAM.UPDATE.{stream}", config)
