"""The programs a supervisor starts, each in its own process with its own secrets.

    python -m tidings.supervisor.children steward --home H --space S [--after HOLDER]
    python -m tidings.supervisor.children admin   --home H --space S

A steward says on standard output, in lines of JSON, when it is ready and what it asks its supervisor to do, and at last
what became of it. The admin process is told what to do in lines of JSON on standard input, does one after the other
(`TASKS`) and says each one's result, or its error with its code; it ends with its input, or with the first error.
Everything else goes to the log files.
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

import msgspec

from tidings.admin.administration import Administrator, administer
from tidings.admin.agents import AgentFile
from tidings.admin.creation import create_space
from tidings.admin.home import SpaceHome
from tidings.contract.admin import RedemptionError, ReportRedemptionRequest
from tidings.errors import NameTaken, TidingsError
from tidings.server.config import LOG_FILE_BYTES, LOG_FILES
from tidings.server.keyring import Keyring
from tidings.steward.context import Intervals
from tidings.util.private_files import locked
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

    steward = Steward(
        home, intervals=Intervals(lease_ttl=options.lease_ttl, presence=options.presence), tell_supervisor=say
    )
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


async def create(
    home: SpaceHome,
    *,
    open: bool,  # noqa: A002
    port: int | None,
    budget: int | None,
    servers: str = "",
) -> dict[str, Any]:
    info = create_space(home, port=port, open_space=open, budget=budget, servers=servers)
    return {"space": info.name, "port": info.port}


async def external(home: SpaceHome, servers: str, **options: Any) -> dict[str, Any]:
    """A NATS that others run: what its administrator must add, and the first thing that is not there."""
    from tidings.admin.external import describe, live_on, missing_line

    with locked(home.admin_lock, "looking at the NATS of others", wait=30):
        info = live_on(home, servers, **options)
        keyring = Keyring.load(home.keys)
        path = describe(home, keyring, info)
        return {"written": str(path), "missing": await missing_line(home, keyring)}


async def complete_move(home: SpaceHome) -> dict[str, Any]:
    from tidings.admin.moving import finish_move

    with locked(home.admin_lock, "completing a move of the space", wait=30):
        finish_move(home)
    return {}


async def listen(
    home: SpaceHome, wanted: str | None, ws: str | None = None, certificate: tuple[str, str] | None = None
) -> dict[str, Any]:
    """Where other machines reach it, with the certificates for that."""
    from tidings.admin.listening import listen_on, websocket_on

    before = home.read_info()
    listen_on(home, wanted, certificate)
    try:
        return {"address": websocket_on(home, ws, certificate).addresses}
    except TidingsError:
        with locked(home.admin_lock, "taking back where it listens", wait=30):  # what was asked for together
            home.update_info(listen=before.listen, port=before.port, ws=before.ws, ws_port=before.ws_port)
        raise


async def recall(home: SpaceHome) -> dict[str, Any]:
    """Before a broker serves it: whoever was revoked since a copy was made is so from the first moment."""
    from tidings.admin.rotation import recall_voided

    async with administer(home, "recalling what was decided") as admin:
        await admin.push_revocations()  # also if a recall was interrupted before it came to that
        await admin.push_invitations()
        await admin.push_links()
        return {"done": await recall_voided(admin)}


async def provision(home: SpaceHome) -> dict[str, Any]:
    async with administer(home, "provisioning the broker") as admin:
        return {"changes": await admin.provision()}


async def agents(home: SpaceHome, person: str | None = None) -> dict[str, Any]:
    """Finish what was interrupted; and the person at the keyboard is an agent too, one that may do everything."""
    async with administer(home, "reconciling agents") as admin:
        await admin.renew()
        done = [*await admin.reconcile(), *await _reconcile_links(admin)]
        held = admin.ledger.newest(person) if person else None
        if held is not None and held.state == "revoked":
            done.append(f"{person} was revoked and stays so: `tidings agent add {person}` undoes it")
        elif person:
            everything = (">",)
            described = "the person at the keyboard"
            file = AgentFile(person, description=described, read=everything, post=everything, manage=everything)
            try:
                await admin.add(file, existing_ok=True)
            except NameTaken as error:  # another agent is called so, or nearly so: the space runs all the same
                done.append(f"{person} was not made an agent: {error}")
    return {"done": done}


async def _reconcile_links(admin: Administrator) -> list[str]:
    """Most spaces have none, and are spared what that loads."""
    if not admin.links.rows():
        return []
    from tidings.admin.linking import Linker

    linker = Linker(admin)
    linker.renew()
    return await linker.reconcile()


async def renew(home: SpaceHome) -> dict[str, Any]:
    """Credentials that end before long."""
    from tidings.admin.linking import Linker

    async with administer(home, "renewing credentials") as admin:
        return {"names": [*await admin.renew(), *(f"link {link}" for link in Linker(admin).renew())]}


async def withhold(home: SpaceHome, agent: str, why: str) -> dict[str, Any]:
    """The steward found a flood; it holds no key, so this is done for it."""
    async with administer(home, "withholding the posting of a flooder") as admin:
        granted = await admin.withhold(check_agent_id(agent), why or "for flooding")
    return {"name": granted.row.name, "note": granted.note}


async def redeem(home: SpaceHome, invitation: str, agent: str, asked: dict[str, str]) -> dict[str, Any]:
    """Somebody accepted an invitation, to a link if it says on which terms. The steward, who asked, is told what came
    of it."""
    async with administer(home, "accepting an invitation") as admin:
        name, refusal = "", None
        try:
            name = await _redeem(admin, invitation, check_agent_id(agent), asked)
        except TidingsError as error:
            refusal = RedemptionError(error.code, str(error))
        await admin.call(ReportRedemptionRequest(invitation, agent, refusal))
    return {"name": name, "refused": msgspec.to_builtins(refusal)}


async def _redeem(admin: Administrator, invitation: str, key: str, asked: dict[str, str]) -> str:
    if "text" not in asked:
        from tidings.admin.inviting import Inviter

        return (await Inviter(admin).redeem(invitation, key, asked["name"])).name
    from tidings.admin.link_inviting import LinkInviter
    from tidings.wire.link_terms import SignedAcceptance

    row = await LinkInviter(admin).redeem(invitation, key, SignedAcceptance(**asked))
    return f"link {row.link} with {row.terms['space']}"


async def bar(home: SpaceHome, agent: str, why: str) -> dict[str, Any]:
    """An agent takes what others need, and its posting is not all of it; or whoever was invited, or linked, does."""
    async with administer(home, "cutting an agent that broke a bound") as admin:
        if (invitation := admin.invitations.get(agent)) is not None:
            from tidings.admin.inviting import Inviter

            await Inviter(admin).revoke(invitation, why)
            return {"name": f"whoever has invitation {agent}", "note": "revoked"}
        if (linked := admin.links.of_peer(agent)) is not None:
            from tidings.admin.linking import Linker

            await Linker(admin).end(linked.link, why)
            return {"name": f"the worker of link {linked.link}", "note": "the link was ended"}
        granted = await admin.bar(check_agent_id(agent), why or "for flooding")
    return {"name": granted.row.name, "note": granted.note}


_TASKS = (create, external, complete_move, listen, recall, provision, agents, renew, withhold, bar, redeem)
TASKS: dict[str, Callable[..., Coroutine[Any, Any, dict[str, Any]]]] = {each.__name__: each for each in _TASKS}


def administrate(home: SpaceHome) -> None:
    for line in sys.stdin:
        told = json.loads(line)
        say(asyncio.run(TASKS[told.pop("program")](home, **told)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tidings-child", description="started by `tidings up`")
    parser.add_argument("program", choices=["admin", "steward"])
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--space", required=True)
    parser.add_argument("--after")
    parser.add_argument("--lease-ttl", type=float, default=3.0)
    parser.add_argument("--presence", type=float, default=25.0)
    options = parser.parse_args(arguments)
    os.umask(0o077)
    try:
        home = SpaceHome(options.home, options.space)
        home.make()
        log_to(home.logs / f"{options.program}.log")
        if options.program == "steward":
            say(asyncio.run(run_steward(home, options)))
        else:
            administrate(home)
    except TidingsError as error:
        log.error("%s: %s", options.program, error)
        say({"error": {"code": error.code, "message": str(error)}})
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
