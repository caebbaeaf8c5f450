"""The agent in memory answers as an agent at the host does: the same calls, the same fields, the same refusals.

Most tests of the MCP server stand on `FakeTransport`. What it says that no host says, they would prove in vain. The
contract tests hold it to the interface; here both are walked through one scene with what only the host has, outbox and
inbox, and every answer is compared by its fields, and every outcome as it is.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import msgspec

import tidings
from coding_agents import hosted
from fake_agent import FakeSpace, FakeTransport
from tidings.client.agent import Agent
from tidings.client.host_transport import HostTransport
from tidings.client.incoming import Incoming
from tidings.client.message_json import job_json, message_json, result_json
from tidings.client.tasks import Job, TaskResult
from tidings.client.transport import Transport
from tidings.contract.host import HeldTaskRequest, MessageIdsRequest
from tidings.errors import TidingsError
from tidings.wire.message import new_id
from tidings_testing.real_space import real_space
from tidings_testing.waiting import eventually

PATIENCE = 20.0
SOURCES = Path(tidings.__file__).parent / "mcp"


class Scene:
    """bob, and ada elsewhere in the space."""

    def __init__(self, bob: Any, ada: Agent[Transport]) -> None:
        self.bob, self.ada = bob, ada
        self.fields: dict[str, Any] = {}
        self.outcomes: dict[str, Any] = {}

    def told(self, call: str, value: Any) -> Any:
        """Remember what fields an answer has."""
        self.fields[call] = fields(value)
        return value

    def came_out(self, what: str, value: Any) -> None:
        self.outcomes[what] = value

    async def refused(self, what: str, asking: Awaitable[Any]) -> None:
        try:
            self.outcomes[what] = await asking
        except TidingsError as error:
            self.outcomes[what] = error.code

    async def until(self, look: Callable[[], Awaitable[Any]], what: str) -> Any:
        return await eventually(look, what=what, within=PATIENCE)


def fields(value: Any) -> Any:
    """The names in an answer; a list is as its first item."""
    if isinstance(value, Incoming):
        return fields(message_json(value))
    if isinstance(value, Job):
        return fields(job_json(value))
    if isinstance(value, TaskResult):
        return fields(result_json("", value))
    if isinstance(value, msgspec.Struct):
        return fields(msgspec.to_builtins(value))
    if is_dataclass(value) and not isinstance(value, type):
        return fields(asdict(value))
    if isinstance(value, dict):
        return {name: fields(each) for name, each in sorted(value.items())}
    if isinstance(value, list | tuple):
        return [fields(value[0])] if value else []
    return "value"


def invented(told: Any, real: Any, where: str = "") -> list[str]:
    """The fields that only the first has."""
    if isinstance(told, dict) and isinstance(real, dict):
        more = [where + name for name in told.keys() - real.keys()]
        both = told.keys() & real.keys()
        return more + [one for name in both for one in invented(told[name], real[name], name + ".")]
    if isinstance(told, list) and isinstance(real, list):
        return [one for mine, theirs in zip(told, real, strict=False) for one in invented(mine, theirs, where)]
    return []


async def walk(scene: Scene) -> None:
    """Everything that a server asks an agent, once."""
    for part in (channels, mail, sending, tasks, presence):
        await part(scene)
    scene.came_out("it has a name", (scene.bob.name, scene.bob.space, len(scene.bob.id)))


async def channels(scene: Scene) -> None:
    bob, host = scene.bob, scene.bob.transport
    scene.told("access", await bob.access())
    scene.came_out("nothing is joined", (await bob.memberships(), await bob.channels()))
    scene.told("join", await bob.join("general"))
    scene.came_out("joined", (await bob.memberships(), [each.joined for each in await bob.channels()]))
    scene.told("channels", await bob.channels())
    said = await scene.ada.send("general", "in the channel", mentions=["bob"], timeout=PATIENCE)
    (row,) = await scene.until(lambda: host.inbox(unread=True, limit=5), "what is said there comes")
    scene.told("a row of a channel", row)
    scene.came_out("the row", (row["id"] == said.id, row["mentions"], row["mentions_me"], row["seq"] == said.seq))
    past = await bob.history("general", 5)
    scene.came_out("nothing of the past is missing", (past.gone, past.hidden, past.missing("general")))
    (heard,) = scene.told("history", past)
    scene.came_out("history is below", (heard.seq == row["seq"], await bob.history("general", 5, before=row["seq"])))
    scene.told("leave", await bob.leave("general"))
    scene.came_out("left", (await bob.memberships(), [each.joined for each in await bob.channels()]))
    scene.came_out("left again", (await bob.leave("general")).state)


async def mail(scene: Scene) -> None:
    host = scene.bob.transport
    before = await host.newest_row()
    first = (await scene.ada.dm("bob", "to you", timeout=PATIENCE)).id

    async def came() -> bool:
        return bool(await host.newest_row() > before)

    await scene.until(came, "a direct message comes")
    async with aclosing(host.follow(before)) as events:
        event = await anext(event async for event in events if event.kind == "message")
    scene.came_out("the event", (event.kind, event.row == await host.newest_row()))
    scene.told("the event", event.data)
    rows = await host.inbox(unread=True, limit=5, direct_first=True)
    scene.came_out("direct ones first", [each["kind"] for each in rows])
    scene.told("a direct row", rows[0])
    scene.came_out("the newest", [each["id"] == first for each in await host.inbox(newest=True, limit=1)])
    scene.told("unread", await host.unread())
    scene.came_out("unread", await host.unread())
    known, unknown = [await host.call(MessageIdsRequest(each)) for each in (first[-12:], "0" * 12)]
    scene.came_out("an ending", (known.ids == (first,), unknown.ids))
    scene.came_out("a thread", [each["id"] == first for each in await host.thread(first)])
    numbers = [int(each["row"]) for each in rows]
    scene.came_out(
        "marked",
        (await host.mark_read(numbers), await host.mark_read(numbers), await host.unread()),
    )
    scene.came_out("all of it is kept", len(await host.inbox(limit=5)))


async def sending(scene: Scene) -> None:
    bob, host, chosen = scene.bob, scene.bob.transport, new_id()
    sent = scene.told("send", await bob.dm("ada", "answer", id=chosen, timeout=PATIENCE))
    scene.came_out("sent", (sent.id == chosen, sent.stage, sent.to == scene.ada.id, sent.code, sent.why))
    scene.came_out("sent again", (await bob.dm("ada", "answer", id=chosen, timeout=0)).id == chosen)
    await scene.refused("sent otherwise", bob.dm("ada", "other", id=chosen, timeout=0))
    scene.told("outbox", await host.outbox(limit=5))
    scene.told("outbox_row", await host.outbox_row(chosen))
    await scene.refused("a row that is not there", host.outbox_row(new_id()))
    traced = await bob.trace(chosen)
    scene.came_out("a trace has", sorted(msgspec.to_builtins(traced)))
    refused = new_id()
    await scene.refused("sent where it may not", bob.send("secret", "hello", id=refused, timeout=PATIENCE))
    row = await host.outbox_row(refused)
    scene.came_out("what was refused", (row["state"], row["code"], row["kind"], row["to"], bool(row["words"])))


async def tasks(scene: Scene) -> None:
    bob, host = scene.bob, scene.bob.transport
    held = await bob.call(HeldTaskRequest())
    scene.came_out("nothing to do", (await bob.claim("reviewer"), held))
    await scene.refused("not its role", bob.claim("painter"))
    asked = (await scene.ada.ask("reviewer", "look", timeout=PATIENCE)).id
    job = scene.told("claim", await scene.until(lambda: bob.claim("reviewer", 1), "a task"))
    scene.came_out("claimed", (job.message.id == asked, await host.claimed(asked) == job, job.attempt))
    scene.told("held", await bob.call(HeldTaskRequest()))
    await scene.refused("a task that is not held", host.claimed(new_id()))
    scene.came_out("given up", await job.fail("not now", retry=True))
    again = await scene.until(lambda: bob.claim("reviewer", 1), "the task again")
    scene.came_out("again", (again.message.id == asked, again.attempt))
    await again.done("done", data={"ok": True})
    scene.came_out("nothing is held", await bob.call(HeldTaskRequest()))
    own = await bob.ask("reviewer", "for myself", timeout=PATIENCE)
    scene.told("task", await bob.task(own.id))
    scene.came_out("of a task", ((await bob.task(own.id)).state, (await bob.task(new_id())).state))


async def presence(scene: Scene) -> None:
    bob = scene.bob
    scene.came_out("announced", await bob.announce("working", "writes", "m"))
    kept = await bob.keep_attention("dnd", {"general": "quiet"})
    scene.came_out("attention", kept.standing)
    found = scene.told("who", await bob.who())
    scene.came_out("who", (sorted(each.name for each in found), found.fresh))


async def real_walk(home: Path) -> Scene:
    async with real_space(home) as space:
        await space.add("ada")
        await space.add("bob", roles=["reviewer"])
        where: Any = {"home": space.home.home, "via": "host"}
        async with (
            hosted(space.home.home),
            tidings.connect(space.home.name, name="ada", **where) as ada,
            tidings.connect(space.home.name, name="bob", **where) as bob,
        ):
            scene = Scene(bob, ada)
            await walk(scene)
            return scene


async def test_the_agent_of_the_tests_answers_as_an_agent_at_a_host_does(tmp_path: Path) -> None:
    space = FakeSpace()
    space.add("ada")
    space.add("bob", roles=["reviewer"])
    async with space.agent("ada") as ada, space.agent("bob") as bob:
        fake = Scene(bob, ada)
        await walk(fake)
    real = await real_walk(tmp_path / "home")
    assert fake.outcomes == real.outcomes
    assert fake.fields.keys() == real.fields.keys()
    for call, told in fake.fields.items():
        assert invented(told, real.fields[call]) == [], f"the host's {call} says no such thing"
        assert invented(real.fields[call], told) == [], f"{call} of the tests does not say what the host's does"


def test_the_scene_asks_everything_that_the_server_asks() -> None:
    asked = Path(__file__).read_text()
    used = {
        name
        for path in SOURCES.glob("*.py")
        for name in re.findall(r"agent\.(?:transport\.)?(\w+)\(", path.read_text())
    }
    assert {"claim", "inbox", "follow", "send"} <= used
    missing = {name for name in used - {"close"} if not re.search(rf"\b(bob|ada|host)\.{name}\(", asked)}
    assert not missing, "the MCP server calls these, and no function of this file does"


def test_the_agent_of_the_tests_takes_what_the_real_one_takes() -> None:
    mine = [
        name for name, each in vars(FakeTransport).items() if inspect.isfunction(each) and hasattr(HostTransport, name)
    ]
    assert "inbox" in mine
    for name in mine:
        if not name.startswith("_"):
            fake, real = (inspect.signature(getattr(each, name)) for each in (FakeTransport, HostTransport))
            assert fake == real, name
