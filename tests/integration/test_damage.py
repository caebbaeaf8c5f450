"""A store that lost something: said in status, told to whom it concerns, and everything can be read once."""

import shutil
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tidings
from tidings.contract.admin import AcknowledgeRequest, ChangeSpaceRequest, PartsChange
from tidings.contract.agents import HealthAnswer, HealthRequest
from tidings.errors import ConfigError
from tidings.nats.jetstream import JetStream, StoredRecord
from tidings.steward.damage import Removed
from tidings.steward.store_reading import read_store
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


def stream_folder(space: RealSpace, stream: str) -> Path:
    (folder,) = space.home.store.glob(f"jetstream/*/streams/{stream}")
    return folder


def flip(file: Path, at: float = 0.5) -> None:
    data = bytearray(file.read_bytes())
    data[int(len(data) * at)] ^= 1
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


def connect(space: RealSpace, name: str) -> tidings.DirectAgent:
    return tidings.connect(space.home.name, name=name, home=space.home.home, receive=False)


async def health(space: RealSpace) -> HealthAnswer:
    async with space.agent("ada") as agent:
        return await agent.control.call(HealthRequest())


async def told(space: RealSpace, name: str) -> list[tidings.Notice]:
    """The notices of damage an agent gets when it connects."""
    notices: list[tidings.Notice] = []
    endpoint = connect(space, name)
    endpoint.on("notice", notices.append)
    async with endpoint:
        await eventually(lambda: endpoint.transport.roster.loaded)
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
    lost = {line.split()[0]: line for line in said.problems}
    assert (said.healthy, sorted(lost)) == (False, ["DM_main", "TASK_main"])
    assert not any(name in line for line in lost.values() for name in ("ada", "bob")), "every agent may ask"
    assert "(ada to bob; noticed" in (await told(space, "bob"))[0].text
    assert "(tasks of ada for builder; noticed" in (await told(space, "ada"))[1].text
    assert [each.count for each in await told(space, "bob")] == [each.count for each in await told(space, "ada")][:1]
    assert len(await told(space, "ada")) == 2
    assert await told(space, "carol") == []
    # found once, said until somebody has seen it
    await space.stop_steward()
    await space.start_steward()
    assert sorted(line.split()[0] for line in (await health(space)).problems) == ["DM_main", "TASK_main"]
    async with space.administer() as admin:
        assert (await admin.call(AcknowledgeRequest())).acknowledged == 2
    assert (await health(space)).healthy


async def test_a_memory_of_what_was_lost_that_is_damaged_is_put_aside_and_said_until_it_is_acknowledged(
    space: RealSpace,
) -> None:
    await space.add("ada")
    memory = space.home.marks.with_name("main.store.json")
    steward = space.steward
    assert steward is not None
    await steward.store.note_removed([Removed(next(iter(steward.table.owners())), "it was taken", 1, "a test")])
    await space.stop_steward()
    before = memory.read_text()
    truncate(memory)
    await space.start_steward()
    for _ in range(2):  # also under the next steward
        (problem,) = (await health(space)).problems
        assert "the memory of what the store lost could not be read and lies in" in problem
        (aside,) = memory.parent.glob("main.store.json.damaged-*")
        assert (before.startswith(aside.read_text()), str(aside) in problem) == (True, True)
        report = await read_store(space.home)
        assert [(each.stream, str(aside) in each.what) for each in report.found] == [("memory", True)]
        await space.stop_steward()
        await space.start_steward()
    async with space.administer() as admin:
        assert (await admin.call(AcknowledgeRequest())).acknowledged == 1
    assert (await health(space)).healthy
    assert (await read_store(space.home)).wrong == 0


async def test_a_memory_of_what_was_lost_that_cannot_be_read_is_an_error_and_stays(space: RealSpace) -> None:
    memory = space.home.marks.with_name("main.store.json")
    await space.stop_steward()
    kept = memory.rename(memory.with_suffix(".kept"))
    memory.mkdir()
    with pytest.raises(ConfigError, match=r"cannot read .*main\.store\.json, which has what the store lost: Is a dir"):
        await space.start_steward()
    memory.rmdir()
    kept.rename(memory)
    await space.start_steward()


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
        await js.api("STREAM.MSG.DELETE.DLV_main", {"seq": 3})  # as one that was read: it is not lost

    def put_back() -> None:
        folder = stream_folder(space, "DLV_main")
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "copy", folder)

    await struck(space, put_back)
    (problem,) = (await health(space)).problems
    assert problem.startswith("DLV_main lost 2 records between 2 and 4 (it ends earlier than it did)")
    (notice,) = await told(space, "ada")
    assert (notice.count, notice.first, notice.last) == (2, 2, 4)
    assert "what they held is in the log" in notice.text
    assert await told(space, "bob") == []


async def test_damage_after_damage_that_was_acknowledged_counts_and_tells_only_what_is_new_and_whom_it_was_owed(
    space: RealSpace,
) -> None:
    for name in ("ada", "bob"):
        await space.add(name, roles=["builder"])
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        await bob.join("general")
        for number in range(20):
            await ada.send("general", f"{number}")
            await ada.ask("builder", f"task {number}")
    await space.add("late")
    async with connect(space, "late") as late:
        await late.join("general")

    def damage(at: float) -> None:
        for stream in ("LOG_main", "TASK_main"):
            (block, *_) = sorted((stream_folder(space, stream) / "msgs").glob("*.blk"))
            flip(block, at)

    heard: dict[str, list[tidings.Notice]] = {"ada": [], "bob": []}
    left = {stream: await readable(space, stream) for stream in ("LOG_main", "TASK_main")}
    for at in (0.5, 0.7):
        await struck(space, partial(damage, at))

        async def said() -> dict[str, str]:
            problems = (await health(space)).problems
            return {line.split()[0]: line for line in problems} if len(problems) == 2 else {}

        problems = await eventually(said, what="both losses are said")
        for stream, before in left.items():
            there = await readable(space, stream)
            (gone, left[stream]) = before - there, there
            assert problems[stream].startswith(f"{stream} lost {len(gone)} record"), (gone, problems)
            for name in ("ada", "bob") if stream == "LOG_main" else ("ada",):
                known = {each.id for each in heard[name]}
                channel = "general" if stream == "LOG_main" else None
                (new,) = [each for each in await told(space, name) if each.id not in known and each.channel == channel]
                heard[name].append(new)
                assert new.count == len(gone)
                assert stream == "TASK_main" or (new.first, new.last) == (min(gone), max(gone))
                assert ("ask ada to send" if name == "bob" else ": send again") in new.text
        async with space.administer() as admin:
            assert (await admin.call(AcknowledgeRequest())).acknowledged == 2
    assert await told(space, "late") == [], "it joined after what was lost was said"


async def readable(space: RealSpace, stream: str) -> set[int]:
    async with space.core() as js:
        last = (await js.info(stream))["state"]["last_seq"]
        return {record.seq async for page in js.read(stream, ">", 1, last) for record in page}


async def test_records_of_the_log_that_are_missing_above_its_floor_are_said_and_named_and_void_messages_counted(
    space: RealSpace,
) -> None:
    await space.add("ada")
    async with connect(space, "ada") as ada:
        await ada.join("general")
        sent = [(await ada.send("general", f"{number}")).seq for number in range(3)]
    async with space.agent("ada") as raw:
        await raw.post("general", b"no message")
    async with space.core() as js:
        await js.api("STREAM.MSG.DELETE.LOG_main", {"seq": sent[1]})  # as a block that was damaged in its middle
    await space.stop_steward()
    await space.start_steward()
    (problem,) = (await health(space)).problems
    assert f"LOG_main lost 1 record between {sent[1]} and {sent[1]} (missing above the floor)" in problem
    report = await read_store(space.home)
    assert [(each.stream, each.first, each.what) for each in report.found] == [
        ("LOG_main", sent[1], "missing above the floor")
    ]
    assert report.void == {"malformed": 1}


def flip_record(space: RealSpace, stream: str, number: int, of: int) -> None:
    """One bit inside a record of a stopped store; the broker's index of the block stays as it is."""
    (block,) = (stream_folder(space, stream) / "msgs").glob("*.blk")
    assert (block.parent / "index.db").exists()
    data = bytearray(block.read_bytes())
    data[int(len(data) * (number - 0.4) / of)] ^= 1
    block.write_bytes(data)


async def test_one_bit_that_flipped_while_the_space_was_down_is_found_said_and_told(space: RealSpace) -> None:
    """The broker counts the record as if it were there, and shows it to nobody."""
    for name in ("ada", "bob", "carol"):
        await space.add(name, roles=["builder"])
    async with connect(space, "bob") as bob:
        await bob.join("general")
    async with connect(space, "ada") as ada:
        for number in range(20):
            await ada.send("general", f"{number}")
        for number in range(4):
            await ada.dm("bob", f"mail {number}")
            await ada.ask("builder", f"task {number}")
    (block,) = (stream_folder(space, "LOG_main") / "msgs").glob("*.blk")

    def damage() -> None:
        flip(block)
        flip_record(space, "DM_main", 2, 4)
        flip_record(space, "TASK_main", 3, 4)

    await struck(space, damage)

    async def is_said() -> bool:
        said = [line.partition(" between")[0] for line in (await health(space)).problems]
        return sorted(said) == [f"{each}_main lost 1 record" for each in ("DM", "LOG", "TASK")]

    await eventually(is_said, what="the records that cannot be read are said")
    for name, channels in (("ada", [None, None, "general"]), ("bob", [None, "general"]), ("carol", [])):
        assert [each.channel for each in await told(space, name)] == channels
    assert [(each.first, each.last, each.count) for each in await told(space, "bob")][:1] == [(2, 2, 1)]
    report = await read_store(space.home)
    missing = {each.stream: (each.first, each.what) for each in report.found if each.is_missing}
    assert missing["DM_main"] == (2, "the broker counts it and cannot read it")
    assert missing["TASK_main"] == (3, "the broker counts it and cannot read it")
    assert (sorted(missing), report.wrong, report.said) == (["DM_main", "LOG_main", "TASK_main"], 3, 3)
    assert report.advice == "`tidings status` says what was lost"


async def test_a_record_that_cannot_be_read_is_told_from_what_is_removed_while_the_store_is_read(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ada", "bob"):
        await space.add(name)
    async with connect(space, "ada") as ada:
        for number in range(4):
            await ada.dm("bob", f"mail {number}")
    read = JetStream.read

    async def removing(js: JetStream, stream: str, *arguments: Any, **named: Any) -> AsyncIterator[list[StoredRecord]]:
        """While the direct messages are read, the first one of them is settled and goes, time after time."""
        async for page in read(js, stream, *arguments, **named):
            yield page
            if stream == "DM_main":
                await js.purge(stream, subject_filter=page[0].subject, below=page[0].seq + 1)

    monkeypatch.setattr(JetStream, "read", removing)
    await struck(space, lambda: flip_record(space, "DM_main", 4, 4))

    async def is_said() -> list[str]:
        said = (await health(space)).problems
        return [line for line in said if line.startswith("DM_main lost 1 record between 4 and 4")]

    await eventually(is_said, what="the record that cannot be read is said")
    assert [(each.first, each.last, each.count) for each in await told(space, "bob")] == [(4, 4, 1)]


async def test_what_the_steward_remembers_of_a_mailbox_is_named_by_whoever_reads_the_store(space: RealSpace) -> None:
    """A record that is gone from the middle of the direct messages looks like one that was read."""
    for name in ("ada", "bob"):
        await space.add(name)
    async with connect(space, "ada") as ada:
        for number in range(3):
            await ada.dm("bob", f"mail {number}")
    await space.stop_steward()
    async with space.core() as js:
        await js.api("STREAM.MSG.DELETE.DM_main", {"seq": 2})
    await space.start_steward()
    (finding,) = (await read_store(space.home)).found
    assert finding.what.startswith("DM_main lost 1 record (fewer records than when the steward stopped), noticed ")
    assert [each.count for each in await told(space, "bob")] == [1]
    async with connect(space, "bob") as bob:  # as the guide has it: told while connecting, heard by who listens later
        await eventually(lambda: bob.transport.roster.loaded)
        heard: list[tidings.Notice] = []
        bob.on("notice", heard.append)
        assert [(each.kind, each.count) for each in heard] == [("damage", 1)]
    async with space.administer() as admin:
        await admin.call(AcknowledgeRequest())
    assert (await read_store(space.home)).found == []


async def test_whoever_is_connected_hears_of_damage_and_of_removed_mail_at_once_and_once(space: RealSpace) -> None:
    for name in ("ada", "bob", "carol"):
        await space.add(name)
    steward = space.steward
    assert steward is not None
    async with connect(space, "ada") as ada, connect(space, "bob") as bob, connect(space, "carol") as carol:
        await bob.join("general")
        heard: dict[str, list[tidings.Notice]] = {"ada": [], "bob": [], "carol": []}
        presence: list[Any] = []
        for endpoint in (ada, bob, carol):
            endpoint.on("notice", heard[endpoint.name].append)
        sent = [(await ada.send("general", f"{number}")).seq for number in range(3)]
        await eventually(lambda: all(endpoint.transport.roster.loaded for endpoint in (ada, bob, carol)))
        await steward.store.run()
        async with space.core() as js:
            await js.api("STREAM.MSG.DELETE.LOG_main", {"seq": sent[1]})
        await eventually(lambda: steward.roster.table.has_news is False)
        carol.on("presence", presence.append)
        await steward.store.run()
        await eventually(lambda: len(heard["ada"]) == len(heard["bob"]) == 1, what="both hear while they are connected")
        assert {(each.kind, each.channel) for each in (*heard["ada"], *heard["bob"])} == {("damage", "general")}
        await steward.store.note_removed([Removed(bob.id, "2 direct messages of mal were removed", 2, "share of mal")])
        await eventually(lambda: len(heard["bob"]) > 1, what="and of mail that was removed")
        assert [each.count for each in heard["bob"]] == [1, 2], "each of them once"
        assert (len(heard["ada"]), heard["carol"], presence) == (1, [], [])
    await space.stop_steward()
    await space.start_steward()
    assert sorted(str(each.channel) for each in await told(space, "bob")) == ["None", "general"], "the next one knows"


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
            await admin.call(ChangeSpaceRequest(keep_age=0, parts=PartsChange(deliver="off", archive="off")))
        async with space.core() as js:

            async def is_empty(js: Any = js) -> bool:
                return await js.last("LOG_main", "td.main.chat.>") is None and await js.last("DM_main", ">") is None

            await eventually(is_empty)
        await space.stop_steward()
        await space.restart_broker(kill=kill)
        await space.start_steward()
        assert (await health(space)).problems == ()


async def test_what_the_broker_cuts_behind_a_damaged_record_when_it_is_killed_is_reported(space: RealSpace) -> None:
    """nats-server 2.15 rebuilds a block after a crash and cuts it at the first record whose checksum is wrong."""
    for name in ("ada", "bob"):
        await space.add(name)
    async with connect(space, "ada") as ada:
        stored = [(await ada.send("general", f"message {number:02}")).seq for number in range(30)]

        def strike() -> None:
            (block,) = (stream_folder(space, "LOG_main") / "msgs").glob("*.blk")
            data = bytearray(block.read_bytes())
            data[data.index(b"message 05")] ^= 1
            block.write_bytes(data)

        await struck(space, strike)

        async def is_known() -> bool:
            return any(each.startswith("LOG_main lost ") for each in (await health(space)).problems)

        await eventually(is_known)
        async with space.administer() as admin:
            await admin.call(AcknowledgeRequest())
        await eventually(lambda: ada.transport.state == "ready")
        stored += [(await ada.send("general", f"message {number}", timeout=20)).seq for number in range(30, 40)]
        await space.stop_steward()
        space.broker.kill()
        space.broker.start()
        async with space.core() as core:
            there = [seq for seq in stored if await core.at("LOG_main", seq) is not None]
        assert len(there) < 40
        await space.start_steward()
        await eventually(is_known)
