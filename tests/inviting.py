"""A supervisor for a steward that runs in a test: it does what the steward asks for."""

import asyncio
from typing import Any

from tidings.supervisor import children
from tidings_testing.real_space import RealSpace


def attend(space: RealSpace) -> list[dict[str, Any]]:
    """Do what a supervisor does for its steward; answers what it was asked for."""
    asked: list[dict[str, Any]] = []
    tasks: list[asyncio.Task[Any]] = []

    def tell(said: dict[str, Any]) -> None:
        asked.append(said)
        if "redeem" in said:
            tasks.append(asyncio.create_task(children.redeem(space.home, **said["redeem"])))
        if "bar" in said:
            tasks.append(asyncio.create_task(children.bar(space.home, said["bar"]["id"], said["bar"]["why"])))

    assert space.steward is not None
    space.steward.life.tell_supervisor = tell
    return asked
