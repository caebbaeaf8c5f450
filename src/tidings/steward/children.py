"""The programs a supervisor starts, each in its own process with its own secrets.

    python -m tidings.steward.children steward   --home H --space S [--after HOLDER]
    python -m tidings.steward.children create    --home H --space S [--open] [--port N] [--budget BYTES]
    python -m tidings.steward.children migrate   --home H --space S
    python -m tidings.steward.children provision --home H --space S
    python -m tidings.steward.children agents    --home H --space S [--person NAME]
    python -m tidings.steward.children withhold  --home H --space S --agent ID --why REASON
    python -m tidings.steward.children bar       --home H --space S --agent ID --why REASON

A child says what became of it in one JSON line on standard output: a result, or an error with its code. A steward says
there too when it is ready and what it asks its supervisor to do. Everything else goes to the log files.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from tidings.broker.config import LOG_FILE_BYTES, LOG_FILES
from tidings.broker.private_files import locked
from tidings.errors import NameTaken, TidingsError
from tidings.space.administration import administer, create_space
from tidings.space.agents import AgentFile
from tidings.space.home import SpaceHome
from tidings.space.layout import migrate
from tidings.steward.pace import Pace
from tidings.wire.names import check_agent_id

log = logging.getLogger(__name__)


def say(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def log_to(path: Path, level: int = logging.INFO) -> None:
    """Everything this process logs, into one file that rotates."""
    handler = RotatingFileHandler(path, maxBytes=LOG_FILE_BYTES, backupCount=LOG_FILES)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)


async def run_steward(home: SpaceHome, options: argparse.Namespace) -> dict[str, Any]:
    from tidings.steward.service import Steward  # a quarter of what the others load, and they need nothing of it

    steward = Steward(home, pace=Pace(lease_ttl=options.lease_ttl, presence=options.presence), tell_supervisor=say)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, steward.stop)
    running = asyncio.create_task(steward.run(after=options.after))
    ready = asyncio.create_task(steward.ready.wait())
    await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        say({"ready": True, "holder": steward.lease.holder_id, "lease": steward.lease.seq})
    ready.cancel()
    await running
    return {"stopped": True}


async def run_create(home: SpaceHome, options: argparse.Namespace) -> dict[str, Any]:
    info = create_space(home, port=options.port, open_space=options.open, budget=options.budget)
    return {"space": info.name, "port": info.port}


async def run_migrate(home: SpaceHome, _options: argparse.Namespace) -> dict[str, Any]:
    with locked(home.admin_lock, "bringing the space to this layout", wait=30):
        return {"done": migrate(home)}


async def run_provision(home: SpaceHome, _options: argparse.Namespace) -> dict[str, Any]:
    async with administer(home, "provisioning the broker") as admin:
        return {"changes": await admin.provision()}


async def run_agents(home: SpaceHome, options: argparse.Namespace) -> dict[str, Any]:
    """Finish what was interrupted; and the person at the keyboard is an agent too, one that may do everything."""
    async with administer(home, "reconciling agents") as admin:
        done = await admin.reconcile()
        held = admin.ledger.newest(options.person) if options.person else None
        if held is not None and held.state == "revoked":
            done.append(f"{options.person} was revoked and stays so: `tidings agent add {options.person}` undoes it")
        elif options.person:
            everything = (">",)
            person = AgentFile(
                options.person,
                description="the person at the keyboard",
                read=everything,
                post=everything,
                manage=everything,
            )
            try:
                await admin.add(person, existing_ok=True)
            except NameTaken as error:  # another agent is called so, or nearly so: the space runs all the same
                done.append(f"{options.person} was not made an agent: {error}")
    return {"done": done}


async def run_withhold(home: SpaceHome, options: argparse.Namespace) -> dict[str, Any]:
    """The steward found a flood; it holds no key, so this is done for it."""
    async with administer(home, "withholding the posting of a flooder") as admin:
        granted = await admin.withhold(check_agent_id(options.agent or ""), options.why or "for flooding")
    return {"name": granted.row.name, "note": granted.note}


async def run_bar(home: SpaceHome, options: argparse.Namespace) -> dict[str, Any]:
    """An agent takes what others need, and its posting is not all of it."""
    async with administer(home, "cutting an agent that broke a bound") as admin:
        granted = await admin.bar(check_agent_id(options.agent or ""), options.why or "for flooding")
    return {"name": granted.row.name, "note": granted.note}


PROGRAMS: dict[str, Callable[[SpaceHome, argparse.Namespace], Coroutine[Any, Any, dict[str, Any]]]] = {
    "steward": run_steward,
    "create": run_create,
    "migrate": run_migrate,
    "provision": run_provision,
    "agents": run_agents,
    "withhold": run_withhold,
    "bar": run_bar,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tidings-child", description="started by `tidings up`")
    parser.add_argument("program", choices=sorted(PROGRAMS))
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--space", required=True)
    parser.add_argument("--after")
    parser.add_argument("--lease-ttl", type=float, default=3.0)
    parser.add_argument("--presence", type=float, default=25.0)
    parser.add_argument("--open", action="store_true")
    parser.add_argument("--port", type=int)
    parser.add_argument("--budget", type=int)
    parser.add_argument("--person")
    parser.add_argument("--agent")
    parser.add_argument("--why")
    options = parser.parse_args(arguments)
    os.umask(0o077)
    try:
        home = SpaceHome(options.home, options.space)
        home.make()
        log_to(home.logs / f"{'steward' if options.program == 'steward' else 'admin'}.log")
        say(asyncio.run(PROGRAMS[options.program](home, options)))
    except TidingsError as error:
        log.error("%s: %s", options.program, error)
        say({"error": {"code": error.code, "message": str(error)}})
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
