"""The desk of the tests answers as the host's does: the same calls, the same fields, the same refusals.

Most tests of the MCP server stand on `FakeDesk`. What it says that no host says, they would prove in vain: so both are
walked through one scene, and every answer is compared by its fields, and every outcome as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blocking_host import HostClient, Session
from coding_agents import hosted, peer
from fake_desk import FakeDesk
from tidings.errors import TidingsError
from tidings.mcp.desk import Desk
from tidings.mcp.host_desk import HostDesk
from tidings.testing.real_space import real_space
from tidings.testing.waiting import eventually
from tidings.wire.ids import new_id

PATIENCE = 20.0


class Scene:
    """bob's desk, and what ada does elsewhere in the space."""

    def __init__(self, desk: Desk, says: Callable[..., str]) -> None:
        self.desk, self.says = desk, says
        self.fields: dict[str, Any] = {}
        self.outcomes: dict[str, Any] = {}

    def told(self, call: str, value: Any) -> Any:
        """Remember what fields an answer has."""
        self.fields[call] = fields(value)
        return value

    def came_out(self, what: str, value: Any) -> None:
        self.outcomes[what] = value

    def refused(self, what: str, act: Callable[[], Any]) -> None:
        try:
            self.outcomes[what] = act()
        except TidingsError as error:
            self.outcomes[what] = error.code

    async def until(self, look: Callable[[], Any], what: str) -> Any:
        return await eventually(lambda: asyncio.to_thread(look), what=what, within=PATIENCE)


def fields(value: Any) -> Any:
    """The names in an answer; a list is as its first item."""
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
    """Everything a desk can be asked, once."""
    for part in (channels, mail, sending, tasks, presence):
        await part(scene)
    scene.desk.close()
    scene.came_out("a desk has a name", (scene.desk.name, scene.desk.space, len(scene.desk.agent)))


async def channels(scene: Scene) -> None:
    desk = scene.desk
    scene.came_out("reachable", desk.reachable())
    scene.told("access", desk.access())
    scene.came_out("nothing is joined", (desk.memberships(), desk.channels()))
    scene.told("join", desk.join("general"))
    scene.came_out("joined", (desk.memberships(), [each["joined"] for each in desk.channels()]))
    scene.told("channels", desk.channels())
    scene.says("in the channel", channel="general")
    (row,) = await scene.until(lambda: desk.inbox(unread=True, limit=5), "what is said there comes")
    scene.told("a row of a channel", row)
    past = desk.history("general", 5, None)
    scene.came_out("nothing of the past is missing", (past.gone, past.hidden))
    (heard,) = scene.told("history", past)
    scene.came_out("history is below", (heard["seq"] == row["seq"], desk.history("general", 5, row["seq"])))
    scene.told("leave", desk.leave("general"))
    scene.came_out("left", (desk.memberships(), [each["joined"] for each in desk.channels()]))
    scene.came_out("left again", desk.leave("general")["state"])


async def mail(scene: Scene) -> None:
    desk = scene.desk
    before = desk.newest_row()
    first = scene.says("to you")
    await scene.until(lambda: desk.newest_row() > before, "a direct message comes")
    event = next(iter(desk.events(before)))
    scene.came_out("the event", (event.kind, event.row == desk.newest_row()))
    rows = desk.inbox(unread=True, limit=5)
    scene.came_out("direct ones first", [each["kind"] for each in rows])
    scene.told("a direct row", rows[0])
    scene.told("unread", desk.unread())
    scene.came_out("unread", desk.unread())
    scene.came_out("an ending", (desk.ending(first[-12:]) == [first], desk.ending("0" * 12)))
    scene.came_out("a thread", [each["id"] == first for each in desk.thread(first)])
    numbers = [int(each["row"]) for each in rows]
    scene.came_out("marked", (desk.mark_read(numbers), desk.mark_read(numbers), desk.unread()))
    scene.came_out("all of it is kept", len(desk.inbox(unread=False, limit=5)))


async def sending(scene: Scene) -> None:
    desk, chosen = scene.desk, new_id()
    request = {"agent": "ada", "text": "answer", "id": chosen}
    sent = scene.told("send", desk.send(request, PATIENCE))
    scene.came_out("sent", (sent["id"] == chosen, sent["stage"]))
    scene.came_out("sent again", desk.send(request, 0)["id"] == chosen)
    scene.refused("sent otherwise", lambda: desk.send({**request, "text": "other"}, 0))
    scene.told("outbox", desk.outbox(5))
    scene.told("outbox_row", desk.outbox_row(chosen))
    scene.refused("a row that is not there", lambda: desk.outbox_row(new_id()))
    traced = desk.trace(chosen)
    scene.came_out("a trace has", sorted(traced))


async def tasks(scene: Scene) -> None:
    desk = scene.desk
    scene.came_out("nothing to do", (desk.claim("reviewer", 0, take_over=False), desk.held(), desk.show_life()))
    asked = scene.says("look", role="reviewer")
    claimed = scene.told("claim", await scene.until(lambda: desk.claim("reviewer", 1, take_over=False), "a task"))
    scene.came_out("claimed", claimed["id"] == asked)
    scene.told("held", desk.held())
    scene.told("show_life", desk.show_life())
    scene.refused("a task that is not held", lambda: desk.finish(new_id(), "x", None))
    scene.told("fail", desk.fail(asked, "not now", retry=True))
    await scene.until(lambda: desk.claim("reviewer", 1, take_over=False), "the task again")
    desk.finish(asked, "done", {"ok": True})
    scene.came_out("nothing is held", desk.held())
    own = new_id()
    desk.send({"role": "reviewer", "text": "for myself", "id": own}, PATIENCE)
    scene.told("task", desk.task(own, 0))
    scene.came_out("of a task", desk.task(own, 0)["state"])


async def presence(scene: Scene) -> None:
    desk = scene.desk
    desk.set_status("working", "writes", "m")
    desk.set_attention("dnd", {"general": "quiet"})
    scene.told("who", desk.who())


def fake_scene() -> Scene:
    desk = FakeDesk()
    return Scene(desk, desk.from_ada)


async def real_walk(home: Path) -> Scene:
    async with real_space(home) as space:
        await space.add("ada")
        await space.add("bob", roles=["reviewer"])
        async with hosted(space.home.home):
            ada, bob = await peer(space, "ada"), await peer(space, "bob")
            desk = HostDesk(lambda: HostClient(space.home.home), lambda _: bob)
            scene = Scene(desk, lambda text, **to: sent_by(ada, text, **to))
            # its calls block, and the host is in this process
            await asyncio.to_thread(asyncio.run, walk(scene))
            return scene


def sent_by(ada: Session, text: str, channel: str | None = None, role: str | None = None) -> str:
    to = {"channel": channel, "role": role} if channel or role else {"agent": "bob"}
    return ada.send(text=text, wait=PATIENCE, **to).id


async def test_the_desk_of_the_tests_answers_as_the_desk_of_a_host_does(tmp_path: Path) -> None:
    fake = fake_scene()
    await asyncio.to_thread(asyncio.run, walk(fake))
    real = await real_walk(tmp_path / "home")
    assert fake.outcomes == real.outcomes
    assert fake.fields.keys() == real.fields.keys()
    for call, told in fake.fields.items():
        assert invented(told, real.fields[call]) == [], f"the host's {call} says no such thing"


def test_the_scene_asks_a_desk_everything_it_can_be_asked() -> None:
    asked = Path(__file__).read_text()
    methods = {name for name in vars(Desk) if not name.startswith("_")}
    assert {name for name in methods if f"desk.{name}" not in asked} == set()
