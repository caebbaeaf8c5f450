"""A store that lost something: said in status, told to whom it concerns, and everything can be read once."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tidings
from tidings.steward.store_reading import read_store
from tidings.testing.real_space import RealSpace
from tidings.testing.waiting import eventually


def stream_folder(space: RealSpace, stream: str) -> Path:
    (folder,) = space.home.store.glob(f"jetstream/*/streams/{stream}")
    return folder


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


async def struck(space: RealSpace, strike: Callable[[], object]) -> None:
    """Stop everything in order, damage the store, and start again."""
    await space.stop_steward()
    space.broker.stop()
    strike()
    space.broker.start()
    await space.start_steward()


def connect(space: RealSpace, name: str) -> tidings.Endpoint:
    return tidings.connect(space.home.name, name=name, home=space.home.home, receive=False)


async def health(space: RealSpace) -> dict[str, Any]:
    async with space.agent("ada") as agent:
        return await agent.control.call("health", "ping")


async def told(space: RealSpace, name: str) -> list[tidings.Notice]:
    """The notices of damage an agent gets when it connects."""
    notices: list[tidings.Notice] = []
    endpoint = connect(space, name)
    endpoint.on("notice", notices.append)
    async with endpoint:
        await eventually(lambda: endpoint.roster.loaded)
    return [each for each in notices if each.kind == "damage"]


@pytest.mark.parametrize("strike", [flip, truncate])
async def test_direct_messages_and_tasks_the_store_lost_are_said_and_told_to_both_sides(
    space: RealSpace, strike: Callable[[Path], None]
) -> None:
    for name in ("ada", "bob", "carol"):
        await space.add(name, roles=["builder"])
    async with connect(space, "ada") as ada:
        for number in range(10):
            await ada.dm("bob", f"mail {number}")
            await ada.ask("builder", f"task {number}")
        await ada.send("general", "kept")
    assert (await read_store(space.home)).wrong == 0

    def damage() -> None:
        for stream in ("DM_main", "TASK_main"):
            (block,) = (stream_folder(space, stream) / "msgs").glob("*.blk")
            strike(block)

    await struck(space, damage)
    said = await health(space)
    lost = {line.split()[0]: line for line in said["problems"]}
    assert (said["healthy"], sorted(lost)) == (False, ["DM_main", "TASK_main"])
    assert not any(name in line for line in lost.values() for name in ("ada", "bob")), "every agent may ask"
    assert "(ada to bob; noticed" in (await told(space, "bob"))[0].text
    assert "(tasks of ada for builder; noticed" in (await told(space, "ada"))[1].text
    assert [each.count for each in await told(space, "bob")] == [each.count for each in await told(space, "ada")][:1]
    assert len(await told(space, "ada")) == 2
    assert await told(space, "carol") == []
    # found once, said until somebody has seen it
    await space.stop_steward()
    await space.start_steward()
    assert sorted(line.split()[0] for line in (await health(space))["problems"]) == ["DM_main", "TASK_main"]
    async with space.administer() as admin:
        assert (await admin.ask("acknowledge"))["acknowledged"] == 2
    assert (await health(space))["healthy"]


async def test_mailboxes_of_durable_copies_that_were_set_back_are_said_and_told_to_their_owners(
    space: RealSpace, tmp_path: Path
) -> None:
    owner = (await space.add("ada")).row.id
    await space.add("bob")
    subject = space.subjects.delivery(owner)
    async with space.core() as js:
        await js.publish(subject, b"a frame")
    await struck(space, lambda: shutil.copytree(stream_folder(space, "DLV_main"), tmp_path / "copy"))
    async with space.core() as js:
        for _ in range(3):
            await js.publish(subject, b"a later frame")

    def put_back() -> None:
        folder = stream_folder(space, "DLV_main")
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "copy", folder)

    await struck(space, put_back)
    (problem,) = (await health(space))["problems"]
    assert problem.startswith("DLV_main lost 3 records between 2 and 4 (it ends earlier than it did)")
    (notice,) = await told(space, "ada")
    assert (notice.count, notice.first, notice.last) == (3, 2, 4)
    assert await told(space, "bob") == []


async def test_records_of_the_log_that_are_missing_above_its_floor_are_said_and_named_with_all_that_does_not_verify(
    space: RealSpace,
) -> None:
    await space.add("ada")
    async with connect(space, "ada") as ada:
        await ada.join("general")
        sent = [(await ada.send("general", f"{number}")).seq for number in range(3)]
    async with space.agent("ada") as raw:
        junk = (await raw.post("general", b"no message"))["seq"]
    async with space.core() as js:
        await js.api("STREAM.MSG.DELETE.LOG_main", {"seq": sent[1]})  # as a block that was damaged in its middle
    await space.stop_steward()
    await space.start_steward()
    (problem,) = (await health(space))["problems"]
    assert f"LOG_main lost 1 record between {sent[1]} and {sent[1]} (missing above the floor)" in problem
    report = await read_store(space.home)
    found = {(each.stream, each.first): each.what for each in report.found}
    assert found.keys() == {("LOG_main", sent[1]), ("LOG_main", junk)}
    assert found["LOG_main", sent[1]] == "missing above the floor"
    assert found["LOG_main", junk].startswith("malformed: ")


async def test_one_flipped_bit_in_the_log_is_found_by_reading_and_told_to_sender_and_members(space: RealSpace) -> None:
    """The broker counts the record as if it were there, and shows it to nobody."""
    for name in ("ada", "bob", "carol"):
        await space.add(name)
    async with connect(space, "bob") as bob:
        await bob.join("general")
    async with connect(space, "ada") as ada:
        for number in range(20):
            await ada.send("general", f"{number}")
    (block,) = (stream_folder(space, "LOG_main") / "msgs").glob("*.blk")
    await struck(space, lambda: flip(block))

    async def is_said() -> bool:
        return any("LOG_main lost 1 record between" in problem for problem in (await health(space))["problems"])

    await eventually(is_said, what="the record that cannot be read is said")
    for name, channels in (("ada", ["general"]), ("bob", ["general"]), ("carol", [])):
        assert [each.channel for each in await told(space, name)] == channels


async def test_an_ordinary_life_is_no_damage(space: RealSpace) -> None:
    """Mail that is read and removed, restarts in order and with kill -9, and retention."""
    for name in ("ada", "bob"):
        await space.add(name)
    for kill in (False, True):
        async with connect(space, "ada") as ada:
            for number in range(3):
                await ada.dm("bob", f"mail {number}")
                await ada.send("general", f"{number}")
        async with tidings.connect(space.home.name, name="bob", home=space.home.home) as bob:
            for _ in range(3):
                await (await bob.next_message(10)).ack()
        async with space.administer() as admin:
            await admin.ask("space_set", keep_age=0, parts={"deliver": "off", "archive": "off"})
        async with space.core() as js:

            async def is_empty(js: Any = js) -> bool:
                return await js.last("LOG_main", "td.main.chat.>") is None and await js.last("DM_main", ">") is None

            await eventually(is_empty)
        await space.stop_steward()
        await space.restart_broker(kill=kill)
        await space.start_steward()
        assert (await health(space))["problems"] == []
