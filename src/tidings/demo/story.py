"""The story that `tidings demo` tells: each scene does the real thing, checks what came of it, and says so in a line.

A scene that does not end as promised raises `UnhealthyError`, so that the demonstration ends with another code than 0.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidings.cli import output
from tidings.contract.channels import JoinRequest
from tidings.demo.away import PATIENCE, come_back, connect_to, follow_pipeline, go_away
from tidings.errors import AuthRevoked, DeniedError, UnhealthyError
from tidings.util.task_ends import end_tasks

if TYPE_CHECKING:
    from tidings.admin.home import SpaceHome
    from tidings.admin.session import Session
    from tidings.client.notices import Notice
    from tidings_testing.processes import Child

BEFORE = "nobody but me is here yet"


async def tell(home: SpaceHome, *, durable: bool) -> None:
    """The whole story; with `durable` also what needs the pipeline, which starts while the rest is told."""
    following = asyncio.create_task(follow_pipeline(home)) if durable else None
    try:
        await _add_agents(home)
        last = await go_away(home) if durable else 0
        await _talk(home)
        await _tell_a_loss(home)
        await _impersonate(home)
        await _attack(home)
        if durable:
            await come_back(home, last)
        await _revoke(home)
    finally:
        await end_tasks([following])


async def _add_agents(home: SpaceHome) -> None:
    from tidings.admin.administration import administer
    from tidings.admin.agents import AgentFile

    heading("Two agents are added: a key, an access record and a credential each")
    async with administer(home, "demo") as admin:
        for name, read in (("ada", ("general", "team.>")), ("bob", ("general",))):
            post = ("general", "plans", "lobby")
            granted = await admin.add(AgentFile(name, read=read, post=post, roles=("reviewer",)))
            output.line(f"  {name} {granted.row.id[:10]}… may read {', '.join(read)}; record {granted.row.seq}")
    async with connect_to(home, "bob", receive=False) as bob:
        try:
            await bob.join("team.secret")
        except DeniedError as error:
            output.line(f"  bob asks for #team.secret: {error}")


async def _post(bob: Session, text: str, *, sender: str | None = None, name: str = "bob") -> int:
    """A message under bob's key, whoever it says it is of; the log takes it. The answer is its sequence."""
    from tidings.wire import message, signing

    payload = message.compose(message.Sender(sender or bob.key.id, name), text=text).raw
    headers = {signing.SIGNATURE_HEADER: signing.sign(bob.key, bob.info.id, "chat", "general", payload)}
    subject = bob.info.subjects.chat(bob.key.id, "general")
    reply = await bob.connection.request(subject, payload, timeout=5, headers=headers)
    return int(json.loads(reply.data)["seq"])


async def _talk(home: SpaceHome) -> None:
    """All three ways of addressing, and a process that is killed and comes back."""
    from tidings_testing.processes import child

    state = home.run / "bob.state"
    bob = ("-m", "tidings.demo.agent", home.home, home.name, "bob", state)
    async with connect_to(home, "ada", channels=["general"]) as ada:
        heading("Two agents talk: to a channel, to one agent, to a role. bob is a process of its own")
        await ada.send("general", BEFORE)
        async with child(*bob) as first:
            await _expect(first, "ready")
            await _three_ways(home, ada, first)
            await _until_written(state, (await ada.send("general", "last words before the night")).seq, first)
            heading("bob is killed (SIGKILL) with a message in hand, and comes back")
            await ada.send("general", "hold this: do not settle it")
            await _expect(first, "heard", "hold this: do not settle it")
            first.signal(signal.SIGKILL)
            output.line(f"  bob has it in hand and is killed: the process ended with {await first.ended()}")
        await ada.send("general", "are you still there?")
        await ada.dm("bob", "and this is for you alone")
        output.line("  meanwhile ada says something to the channel and something to bob alone")
        async with child(*bob) as second:
            await _expect(second, "ready")
            await _hears_each_once(ada, second)


async def _three_ways(home: SpaceHome, ada: Any, bob: Child) -> None:
    await ada.send("general", "shall we start?", mentions=["bob"])
    await _expect(bob, "heard", "shall we start?")
    await _asks_for_the_past(home)
    receipt = await ada.dm("bob", "the password is swordfish")
    await _expect(bob, "heard", "the password is swordfish")
    stage = (await ada.receipt(receipt, "read", timeout=PATIENCE)).stage
    output.line(f"  ada's direct message was sealed, and is {stage}")
    ticket = await ada.ask("reviewer", "please review the change")
    result = await ticket.result(timeout=PATIENCE)
    if result.state != "done":
        raise UnhealthyError(f"the task is {result.state}, not done")
    output.line(f"  ada asked a reviewer; {result.worker_name or result.worker} answered, signed: {result.text}")


async def _asks_for_the_past(home: SpaceHome) -> None:
    """A first join brought nothing of what was said before it."""
    async with connect_to(home, "bob", receive=False) as bob:
        past = [each for each in await bob.history("general", 20) if each.text == BEFORE]
    if len(past) != 1 or not past[0].historical:
        raise UnhealthyError(f"bob asked for the past and got {past}")
    output.line(f"  what was said before he joined came only when he asked, marked as history: {BEFORE}")


async def _until_written(state: Path, seq: int, bob: Child) -> None:
    """What bob settled is in its state file: from here on a kill cannot make it come again."""
    await _expect(bob, "heard", "last words before the night")
    async with asyncio.timeout(PATIENCE):
        while not state.exists() or json.loads(state.read_text())["channels"].get("general", 0) < seq:
            await asyncio.sleep(0.02)


async def _hears_each_once(ada: Any, bob: Child) -> None:
    """What was in hand, what was said meanwhile, what was sent meanwhile: each once, and nothing that was settled."""
    expected = {"hold this: do not settle it", "are you still there?", "and this is for you alone"}
    await ada.send("general", "that was all")
    heard: list[str] = []
    while "that was all" not in heard or len(heard) <= len(expected):
        heard.append((await _expect(bob, "heard"))["text"])
    if sorted(heard) != sorted((*expected, "that was all")):
        raise UnhealthyError(f"bob heard {heard}: something came twice, or again")
    output.line("  nothing lost, nothing twice: what was in hand came again, what was settled did not")


async def _expect(bob: Child, what: str, text: str | None = None) -> dict[str, Any]:
    """The next thing bob says; anything else is not the story."""
    try:
        said = await bob.line(PATIENCE)
    except (TimeoutError, AssertionError) as error:
        raise UnhealthyError(f"bob should have said {what} {text or ''}, and said nothing") from error
    if said["what"] != what or (text is not None and said["text"] != text):
        raise UnhealthyError(f"bob should have said {what} {text or ''}, and said {said}")
    if what == "heard":
        output.line(f"  bob hears {said['from']} {said['where']}: {said['text']}")
    elif what == "ready":
        output.line(f"  bob runs as process {said['pid']}")
    return said


async def _tell_a_loss(home: SpaceHome) -> None:
    """An inbox keeps so much of one sender; what it did not keep is a notice in it, with range and count."""
    from tidings.admin.administration import administer
    from tidings.admin.agents import AgentFile
    from tidings.admin.session import open_session
    from tidings.host.inbox import Bound, Wanted
    from tidings.host.mailbox import held_mail, open_mailbox

    heading("cleo's inbox keeps three messages of one sender. bob says five things, and what was not kept is told")
    async with administer(home, "demo") as admin:
        await admin.add(AgentFile("cleo", read=("general",)))
    async with open_session(home, "cleo") as cleo, open_session(home, "bob") as bob:
        await cleo.control.call(JoinRequest("general"))
        said = [await _post(bob, f"number {number} of five") for number in range(1, 6)]
    source = ("home", str(home.home), home.name, "cleo")
    with held_mail(home.home):
        async with open_mailbox(home.home, source, Bound(rows=3)) as mailbox, mailbox.receive():
            lost: list[dict[str, Any]] = []
            async with asyncio.timeout(PATIENCE):
                while sum(each["count"] for each in lost) < 2:
                    await mailbox.news(0.2)
                    lost = [json.loads(row.raw) for row in await mailbox.listed(Wanted(kind="notice"))]
            kept = await mailbox.listed(Wanted(kind="channel"))
    if [row.seq for row in kept] != said[:3] or (lost[0]["first"], lost[-1]["last"]) != (said[3], said[4]):
        raise UnhealthyError(f"of {said} cleo has {[row.seq for row in kept]} and was told {lost}")
    output.line(f"  in her inbox: {', '.join(row.text for row in kept)}")
    for each in lost:
        output.line(f"  and a notice: {each['text'].partition(';')[0]}")


async def _impersonate(home: SpaceHome) -> None:
    """Ada's id under bob's key is shown to nobody, and bob is told; ada's name under bob's id is a claim."""
    from tidings.admin.session import open_session

    heading("bob pretends to be ada")
    async with (
        connect_to(home, "ada", channels=["general"]) as ada,
        connect_to(home, "bob", channels=["general"]) as bob,
        open_session(home, "bob") as raw,
    ):
        told: asyncio.Queue[Notice] = asyncio.Queue()
        bob.on("notice", told.put_nowait)
        seq = await _post(raw, "ada says: delete everything", sender=ada.id, name="ada")
        output.line(f"  {seq:>4}  he writes ada's id into a message: stored under his own key, shown to nobody")
        await _post(raw, "it is me, ada", name="ada")
        while (heard := await ada.next_message(PATIENCE)).seq < seq:
            pass  # what she was owed from before
        if (heard.text, heard.sender.name, heard.claims) != ("it is me, ada", "bob", "ada"):
            raise UnhealthyError(f"a forged name was shown: {heard.sender} claims {heard.claims}: {heard.text}")
        output.line(f'  {heard.seq:>4}  he writes her name only: ada hears bob (claims to be "ada"): {heard.text}')
        output.line(f"        and nothing is lost in silence. bob is told: {await _void(told, seq)}")


async def _void(told: asyncio.Queue[Notice], seq: int) -> str:
    """What bob is told of the message that nobody is shown."""
    try:
        async with asyncio.timeout(PATIENCE):
            while (notice := await told.get()).first != seq:
                pass
    except TimeoutError as error:
        raise UnhealthyError(f"record {seq} is shown to nobody, and nobody said so to its sender") from error
    return notice.text.partition(": ")[0]


async def _attack(home: SpaceHome) -> None:
    from tidings_testing.security import run_security_suite

    heading("Now the attacks: raw clients with an agent's credential try what they must not do")
    with output.working("attacking"):
        report = await run_security_suite(home)
    if not report.ok:
        raise UnhealthyError(f"{len(report.broken)} attacks were not refused: `tidings doctor security` names them")
    for each in [each for each in report.results if each.outcome == "refused"][:6]:
        output.line(f"  refused: {each.title}")
    counts = report.counts
    output.line(
        f"  {len(report.results)} kinds of attack in {report.seconds:.0f} s: {counts.get('refused', 0)} refused, "
        f"{counts.get('held', 0)} without effect, {counts.get('known', 0)} observable as SECURITY.md says"
    )
    output.line("  the whole list: `tidings doctor security`")


async def _revoke(home: SpaceHome) -> None:
    from tidings.admin.administration import administer
    from tidings.admin.session import open_session

    heading("bob is revoked")
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


def heading(text: str) -> None:
    """Begin a scene; whoever reads through a pipe sees the story as it goes."""
    output.line(f"\n{text}")
    sys.stdout.flush()
