"""`tidings demo`: a space starts, two agents use it, every attack on it fails, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidings.cli import output
from tidings.errors import TidingsError, UnhealthyError

if TYPE_CHECKING:
    from tidings.space.home import SpaceHome
    from tidings.space.session import Session

START_TIMEOUT = 60.0


def demo() -> None:
    """Start a space in a temporary directory, use it, attack it, and show that every attack is refused."""
    root = Path(tempfile.mkdtemp(prefix="tidings-demo-"))
    child: subprocess.Popen[bytes] | None = None
    started = time.monotonic()
    try:
        _heading("A space starts")
        child = _start(root)
        asyncio.run(_story(root))
    finally:
        if child is not None:
            _stop(child)
        shutil.rmtree(root, ignore_errors=True)
    output.line(f"\nDone in {time.monotonic() - started:.0f} s. The space is stopped and its files are gone.")
    output.line("Your own: `tidings up`, then `tidings agent add NAME`.")


def _start(root: Path) -> subprocess.Popen[bytes]:
    """The same program a user runs, in a directory of its own."""
    from tidings.space.home import SpaceHome

    home = SpaceHome(root / "home", "demo")
    said = root / "up.out"
    with said.open("w") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "tidings.cli", "up", "--space", "demo", "--home", str(root / "home")],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=os.environ | {"TIDINGS_AS": "you"},
        )
    deadline = time.monotonic() + START_TIMEOUT
    while (state := home.read_state()).get("phase") != "ready":
        if child.poll() is not None or time.monotonic() > deadline:
            _stop(child)
            raise TidingsError(f"the demonstration's space did not start: {said.read_text().strip() or state}")
        time.sleep(0.05)
    output.line(
        f"  nats-server {state['nats_server']} on loopback, a steward under lease {state['lease']}; you are `you`"
    )
    return child


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


async def _story(root: Path) -> None:
    from tidings.space.home import SpaceHome

    home = SpaceHome(root / "home", "demo")
    await _add_agents(home)
    await _join_and_leave(home)
    await _show_table(home)
    await _talk(home)
    await _impersonate(home)
    await _attack(home)
    await _revoke(home)


async def _add_agents(home: SpaceHome) -> None:
    from tidings.space.administration import administer
    from tidings.space.agents import AgentFile

    _heading("Two agents are added: a key, an access record and a credential each")
    async with administer(home, "demo") as admin:
        for name, read, post in (("ada", ("general", "team.>"), ("general",)), ("bob", ("general",), ("general",))):
            granted = await admin.add(AgentFile(name, read=read, post=post, roles=("reviewer",)))
            output.line(f"  {name} {granted.row.id[:10]}… may read {', '.join(read)}; record {granted.row.seq}")


async def _join_and_leave(home: SpaceHome) -> None:
    from tidings.errors import DeniedError
    from tidings.space.session import open_session

    _heading("ada joins a channel, messages are posted, ada leaves")
    async with open_session(home, "ada") as ada, open_session(home, "bob") as bob:
        joined = await ada.control.call("member", "join", pattern="general")
        output.line(f"  {joined['seq']:>4}  ada joins #general ({joined['state']})")
        output.line(f"  {await _post(bob, 'general', 'hello ada'):>4}  bob posts: ada is owed this one")
        left = await ada.control.call("member", "leave", pattern="general")
        output.line(f"  {left['seq']:>4}  ada leaves")
        output.line(f"  {await _post(bob, 'general', 'still there?'):>4}  bob posts: ada is not owed this one")
        try:
            await bob.control.call("member", "join", pattern="team.secret")
        except DeniedError as error:
            output.line(f"        bob asks for #team.secret: {error}")


async def _post(session: Session, channel: str, text: str) -> int:
    """A signed message, confirmed by the log; the answer is its sequence."""
    import json

    from tidings.wire import message, signing

    composed = message.compose(message.Sender(session.key.id, session.name), text=text)
    payload = message.encode(composed)
    signature = signing.sign(session.key, session.info.id, "chat", channel, payload)
    subject = session.info.subjects.chat(session.key.id, channel)
    headers = {signing.SIGNATURE_HEADER: signature, "Nats-Msg-Id": composed.id}
    reply = await session.connection.request(subject, payload, timeout=5, headers=headers)
    return int(json.loads(reply.data)["seq"])


async def _show_table(home: SpaceHome) -> None:
    from tidings.space.administration import administer

    _heading("The table, as of each sequence: one ordered log decides who is owed what")
    async with administer(home, "demo") as admin:
        head = (await admin.ask("table"))["table"]["seq"]
        for seq in range(1, head + 2):
            table = (await admin.ask("table", seq=seq))["table"]
            output.line(f"  as of {seq:>3}: {_members(table)}")


def _members(table: dict[str, Any]) -> str:
    names = {owner: access["name"] for owner, access in table["access"].items()}
    held = [
        f"{names.get(owner, owner)} in #{pattern} since {joined}"
        for owner, patterns in table["members"].items()
        for pattern, joined in patterns.items()
    ]
    known = f"{len(names)} agent{'' if len(names) == 1 else 's'}"
    return f"{known}; {', '.join(held) or 'nobody is in a channel'}"


async def _talk(home: SpaceHome) -> None:
    """All three ways of addressing, and an agent that goes away and comes back."""
    import tidings

    _heading("Two agents talk: to a channel, to one agent, to a role")
    state = home.run / "bob.state"
    here: dict[str, Any] = {"space": home.name, "home": home.home}
    async with tidings.connect(name="ada", channels=["general"], **here) as ada:
        async with tidings.connect(name="bob", channels=["general"], state=state, **here) as bob:
            await ada.send("general", "shall we start?", mentions=["bob"])
            await _hear(bob)
            receipt = await ada.dm("bob", "the password is swordfish")
            await _hear(bob)
            stage = (await ada.receipt(receipt, "read", timeout=10)).stage
            output.line(f"  ada's direct message was sealed, and is {stage}")
            ticket = await ada.ask("reviewer", "please review the change")
            async for job in bob.work("reviewer"):
                await job.done("looks good")
                break
            result = await ticket.result(timeout=10)
            output.line(f"  ada asked a reviewer; {result.worker_name or 'bob'} answered, signed: {result.text}")
        output.line("  bob goes away")
        await ada.send("general", "are you still there?")
        async with tidings.connect(name="bob", channels=["general"], state=state, **here) as bob:
            output.line("  bob comes back, and hears what he missed, once:")
            await _hear(bob)


async def _hear(endpoint: Any) -> None:
    message = await endpoint.next_message(10)
    await message.ack()
    where = f"#{message.channel}" if message.channel else "directly"
    output.line(f"  {endpoint.name} hears {message.sender.name} {where}: {message.text}")


async def _impersonate(home: SpaceHome) -> None:
    """A message that claims another sender is stored under its real one, and shown to nobody."""
    import json

    import tidings
    from tidings.space.session import open_session
    from tidings.wire import message, signing

    _heading("bob pretends to be ada")
    async with tidings.connect(home.name, name="ada", channels=["general"], home=home.home) as ada:
        async with open_session(home, "bob") as bob:
            forged = message.compose(message.Sender(ada.id, "ada"), text="ada says: delete everything").raw
            signature = signing.sign(bob.key, bob.info.id, "chat", "general", forged)
            subject = bob.info.subjects.chat(bob.key.id, "general")
            reply = await bob.connection.request(subject, forged, timeout=5, headers={"Td-Sig": signature})
            seq = json.loads(reply.data)["seq"]
            await _post(bob, "general", "just me, bob")
        while (heard := await ada.next_message(10)).text != "just me, bob":
            if heard.seq == seq:
                raise UnhealthyError("a forged message was shown")
        output.line(f"  record {seq} is in the log under bob's key, and was dropped: {dict(ada.opener.refused)}")


async def _attack(home: SpaceHome) -> None:
    from tidings.testing.security import run_security_suite

    _heading("Now the attacks: raw clients with an agent's credential try what they must not do")
    report = await run_security_suite(home, tell=lambda text: output.line(f"  {text}"))
    if not report.ok:
        raise UnhealthyError(f"{len(report.broken)} attacks were not refused")
    output.line(f"  {len(report.results)} kinds of attack in {report.seconds:.0f} s: nothing changed")


async def _revoke(home: SpaceHome) -> None:
    from tidings.errors import AuthRevoked
    from tidings.space.administration import administer
    from tidings.space.session import open_session

    _heading("bob is revoked")
    creds = home.agent_creds("bob").read_text()
    async with administer(home, "demo") as admin:
        started = time.monotonic()
        await admin.revoke("bob")
    output.line(f"  cut and recorded in {(time.monotonic() - started) * 1000:.0f} ms")
    home.agent_creds("bob").write_text(creds)
    home.agent_creds("bob").chmod(0o600)
    try:
        async with open_session(home, "bob"):
            raise UnhealthyError("bob could still connect")
    except AuthRevoked as error:
        output.line(f"  with his old credential: {error}")


def _heading(text: str) -> None:
    output.line(f"\n{text}")
