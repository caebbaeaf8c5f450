"""What is true of a space now, asked of each part itself. Nothing is inferred from a pid file.

The broker is greeted, the steward makes a round trip to the log, the supervisor is known by its lock. Every fact
has the moment it was learnt, so that whoever reads it sees how old it is.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec

from tidings.admin.home import SpaceHome, SpaceInfo
from tidings.admin.session import open_session
from tidings.contract.agents import HealthRequest
from tidings.delivery.status import look, mode_of, problems_of
from tidings.errors import TidingsError
from tidings.server.disk import DiskReserve
from tidings.util.private_files import lock_holder, lock_pid

OK, UNHEALTHY, UNREACHABLE = 0, 3, 5


async def collect(home: SpaceHome, agent: str) -> dict[str, Any]:
    """Every fact of a space, with `healthy`, `problems` and the `exit_code` that says the same."""
    info = home.read_info()
    state = home.read_state()
    facts: dict[str, Any] = {
        "space": info.name,
        "url": info.address,
        "servers_of_others": bool(info.servers),
        "websocket": info.ws_address or None,
        "open": info.open,
        "supervisor": _supervisor(home, state),
        "broker": _broker(info, state),
        "disk": _disk(home),
        "steward": await _steward(home, agent),
        "pipeline": await delivery(home),
    }
    problems = [*_problems_of(facts), *facts["steward"].get("problems", []), *facts["pipeline"]["problems"]]
    code = UNREACHABLE if not facts["broker"]["answers"] else UNHEALTHY if problems else OK
    return {"healthy": not problems, "problems": problems, "exit_code": code, "at": time.time(), **facts}


async def delivery(home: SpaceHome) -> dict[str, Any]:
    """How durable delivery is: what the supervisor was told to do about it, and what the broker knows of it."""
    told: dict[str, Any] = {"wanted": False, "phase": "not started"}
    if lock_holder(home.up_lock) is not None:
        told |= home.read_state().get("pipeline") or {}
    facts: dict[str, Any] = {"answers": False, "why": None}
    try:
        facts |= {"answers": True, **(await asyncio.to_thread(look, home)).as_dict()}
        # a beat outlives its sender by seconds; the supervisor saw it die
        facts["running"] = facts["running"] and facts["holder_pid"] != told.get("gone")
        if not facts["running"] and told["phase"] == "running":  # its last word is older than what the broker knows
            told["phase"] = "not running"
    except (TidingsError, OSError, ValueError) as error:
        facts |= {"answers": False, "why": str(error) or type(error).__name__}
    now = time.time()
    # of a broker that does not answer it is said elsewhere
    unseen = facts["why"] if facts["why"] and home.read_info().greeting() is not None else None
    problems = problems_of(told, facts if facts["answers"] else None, now, unseen=unseen)
    mode = mode_of(told, facts if facts["answers"] else None)
    return {"running": False, "at": now, **facts, "supervised": told, "mode": mode, "problems": problems}


def _supervisor(home: SpaceHome, state: dict[str, Any]) -> dict[str, Any]:
    holder = lock_holder(home.up_lock)
    phase = state.get("phase", "never started") if holder else "not running"
    return {
        "running": holder is not None,
        "pid": lock_pid(home.up_lock),
        "phase": phase,
        "at": state.get("at"),
        "watcher": state.get("watcher") if holder else None,
    }


def _broker(info: SpaceInfo, state: dict[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    said = info.greeting()
    facts: dict[str, Any] = {"answers": said is not None, "at": time.time()}
    if said is not None:
        facts |= {"version": said.get("version"), "greeting_ms": round((time.monotonic() - started) * 1000, 2)}
        pid = state.get("broker_pid")
        facts |= {"pid": pid, "resident_bytes": resident_bytes(pid) if pid else None}
    return facts


def _disk(home: SpaceHome) -> dict[str, Any]:
    """Looked at here too: who would say that it is full may be gone because of that."""
    room = DiskReserve(home.store).look()
    return {"free": room.free, "full": str(room) if room.is_short else None, "at": time.time()}


def resident_bytes(pid: int) -> int | None:
    """Memory a process holds now, from the kernel; None where there is no /proc or no such process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), None)


async def _steward(home: SpaceHome, agent: str) -> dict[str, Any]:
    try:
        async with open_session(home, agent, timeout=3) as session:
            answer = await session.control.call(HealthRequest())
    except TidingsError as error:
        return {"answers": False, "why": str(error), "code": error.code, "at": time.time()}
    return {"answers": True, **msgspec.to_builtins(answer)}


def _broker_words(facts: dict[str, Any]) -> str:
    """Who could start a broker that does not answer; a second `tidings up` is no advice beside one that runs."""
    space, url = facts["space"], facts["url"]
    if facts["servers_of_others"]:
        return (
            f"no server answers at {url}: others run that NATS, and start it. The space goes on by itself when it is "
            f"back{'' if facts['supervisor']['running'] else f', once `tidings up --space {space}` runs'}"
        )
    if not facts["supervisor"]["running"]:
        return f"no broker answers at {url}: `tidings up --space {space}`"
    if facts["supervisor"]["phase"] == "ready":
        return (
            f"the broker at {url} does not answer and did not end: `tidings logs broker --space {space}`; "
            f"`tidings down --space {space}` stops everything and `tidings up` starts it anew"
        )
    return (
        f"no broker answers at {url}; the supervisor starts it: `tidings logs broker --space {space}` says why it ended"
    )


def _problems_of(facts: dict[str, Any]) -> list[str]:
    found = []
    if facts["disk"]["full"] and not facts["steward"]["answers"]:  # a steward says it, with what follows from it
        found.append(f"{facts['disk']['full']}: make room on it before anything else")
    if not facts["broker"]["answers"]:
        found.append(_broker_words(facts))
    elif not facts["steward"]["answers"]:
        found.append(f"the steward does not answer: {facts['steward']['why']}")
    if facts["supervisor"]["running"] and facts["supervisor"]["phase"] != "ready":
        found.append(f"the supervisor is not ready: {facts['supervisor']['phase']}")
    watcher = facts["supervisor"]["watcher"]
    if facts["supervisor"]["running"] and facts["broker"]["answers"] and watcher and not watcher["running"]:
        found.append(
            f"nobody watches what one agent takes of the broker: {watcher['why']}; `tidings logs up` says more"
        )
    return found
