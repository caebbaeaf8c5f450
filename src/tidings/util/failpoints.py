"""Named places where a test may strike: `TIDINGS_FAILPOINT=name:action[:after]`.

Actions: `kill` (SIGKILL to this process), `pause` (SIGSTOP), `interrupt` (SIGINT), `raise`. `after` counts how often
the place is passed before. Nothing happens, and nothing is parsed twice, when the variable is not set.
"""

from __future__ import annotations

import os
import signal

_armed: list[str] | None = None
_left = 0


class FailpointRaised(Exception):
    """What `raise` raises: not a TidingsError, because no code may expect it."""


def reach(name: str) -> None:
    """Pass the place called `name`."""
    global _armed, _left
    if _armed is None:
        _armed = os.environ.get("TIDINGS_FAILPOINT", "").split(":")
        _left = int(_armed[2]) if len(_armed) > 2 else 0
    if _armed[0] != name:
        return
    if _left > 0:
        _left -= 1
        return
    action = _armed[1]
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "pause":
        _armed = [""]
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    elif action == "raise":
        raise FailpointRaised(name)
