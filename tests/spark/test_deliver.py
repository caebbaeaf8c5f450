"""The deliver job on real Spark and a real broker: exactly what is owed, whatever happens."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from crowd import check, join, leave, read_all, say
from linking import OtherSpace
from tidings.admin.agents import AgentFile
from tidings.client.connect import connect_directly
from tidings.contract.channels import ChangeChannelRequest
from tidings.delivery import deliverer as rules
from tidings.delivery.job import SpaceTable
from tidings.delivery.stream_reader import StreamLocation, StreamReader
from tidings.errors import TidingsError
from tidings.model.projection import Verdict
from tidings.nats import jwt
from tidings.nats.jetstream_blocking import WorkerConnection
from tidings.server.keyring import Keyring
from tidings_testing.real_space import AgentClient, RealSpace
from tidings_testing.waiting import eventually
from tools.delivering import delivering, job_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]


async def test_members_get_exactly_what_they_are_owed_through_joins_leaves_patterns_and_class_changes(
    spark: "SparkSession", space: RealSpace, crowd: dict[str, AgentClient], tmp_path: Path
) -> None:
    ada, bob, cal, dan = crowd.values()
    await join(bob, "team.>")
    await say(ada, "team.a", "before cal")
    async with delivering(spark, space, tmp_path) as job:
        await join(cal, "team.a")
        await say(ada, "team.a", "for bob and cal")
        await leave(cal, "team.a")
        await say(ada, "team.a", "bob only")
        await job.caught_up()
        await join(cal, "team.a")
        await say(bob, "team.b", "nobody else is there")
        await ada.control.call(ChangeChannelRequest("team.a", cls="live"))
        await say(ada, "team.a", "live: nobody is owed this")
        await say(ada, "team.a", "live, with a mention", mentions=(dan.id, cal.id))
        await ada.control.call(ChangeChannelRequest("team.a", cls="durable"))
        await say(ada, "team.a", "durable again")
        await job.caught_up()
    boxes = await read_all(crowd)
    await check(space, crowd, boxes)
    assert len(boxes["dan"].records) == 1, "a mention on a live channel buys one copy"
    assert not any(box.repeats for box in boxes.values())


@pytest.mark.slow
@pytest.mark.requirement("X11")
@pytest.mark.parametrize("point", ["deliver.read", "deliver.published", "deliver.recorded", "deliver.floor"])
async def test_a_crash_and_a_narrowing_between_two_attempts_hand_out_exactly_what_is_owed_and_allowed(
    spark: "SparkSession",
    space: RealSpace,
    crowd: dict[str, AgentClient],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
) -> None:
    """F6, F12, N10: the second attempt sees another access than the first."""
    ada, bob, cal, _ = crowd.values()
    for agent in (bob, cal):
        await join(agent, ">")
    for n in range(10):
        await say(ada, f"team.{n % 2}", str(n))
    loop, struck = asyncio.get_running_loop(), list[str]()

    async def narrow() -> None:
        async with space.administer() as admin:
            await admin.set_access("bob", AgentFile("bob", read=("team.1",), post=(">",)))

    def strike(name: str) -> None:
        if name == point and not struck:
            struck.append(name)
            asyncio.run_coroutine_threadsafe(narrow(), loop).result(30)
            raise TidingsError(f"struck at {name}")

    monkeypatch.setattr(rules, "reach", strike)
    async with delivering(spark, space, tmp_path) as job:
        await job.caught_up()
        await say(ada, "team.0", "after")
        await say(ada, "team.1", "after")
        await job.caught_up()
    assert struck == [point]
    boxes = await read_all({"cal": cal})
    async with space.agent("bob") as again:
        boxes |= await read_all({"bob": again})
        await check(space, {"bob": again, "cal": cal}, boxes)
    assert len(boxes["cal"].records) == 12
    assert boxes["bob"].channel("team.0") == []


async def test_a_ruling_whose_headers_are_garbage_is_void_to_the_job_and_does_not_stop_it(
    space: RealSpace, tmp_path: Path
) -> None:
    """Nobody but the steward may write there; should it happen all the same, the fold goes on as everywhere else."""
    ada = (await space.add("ada")).row.id
    keyring = Keyring.load(space.home.keys)
    token, key = keyring.short_lived(keyring.core, "test")
    creds = tmp_path / "core.creds"
    creds.write_text(jwt.credentials(token, key))
    raw = WorkerConnection.open(space.info.url, creds)
    garbage = b"NATS/1.0\r\nno colon here\r\n\r\n"
    (sent,) = raw.publish_all([(space.subjects.member(ada, "A" * 26), garbage, b"{}")])
    assert b'"seq"' in raw.answer(sent).payload
    raw.close()
    await space.add("bob")
    settings = job_settings(space, tmp_path)
    reader = StreamReader(StreamLocation(settings.url, settings.creds, space.subjects.log_stream))
    folded = SpaceTable(reader, settings, 0)
    folded.advance(reader.state().last)
    reader.close()
    assert folded.table.void == {Verdict.BAD_SIGNATURE: 1}
    assert folded.table.owner_named("bob") is not None


async def test_a_member_who_was_away_gets_a_message_of_another_space_from_its_frame_and_never_a_forged_one(
    spark: "SparkSession", space: RealSpace, crowd: dict[str, AgentClient], tmp_path: Path
) -> None:
    """Signed by a key that is nobody's here; what the link does not let in is owed to nobody."""
    _, bob, cal, _ = crowd.values()
    west = OtherSpace()
    await west.link(space, channels={"general": "team.a", "news": "team.news"})
    for agent in (bob, cal):
        await join(agent, "team.>")
    async with delivering(spark, space, tmp_path) as job:
        good = await west.admit(space, west.say("while you were away"), "team.a")
        other_channel = await west.admit(space, west.say("foreign channel", "secrets"), "team.a")
        other_name = await west.admit(space, west.say("under another name", "news"), "team.a")
        too_far = await west.admit(space, west.say("too far").but(hops=2), "team.a")
        forged = await west.admit(space, west.say("forged").but(payload=west.message("not signed").raw), "team.a")
        await west.link(space, state="off", channels={"general": "team.a"})
        too_late = await west.admit(space, west.say("after it was off"), "team.a")
        await job.caught_up()
    box = (await read_all({"cal": cal}))["cal"]
    assert set(box.records) == {good, forged}, "who signed it every reader sees itself"
    assert not {other_channel, other_name, too_far, too_late} & set(box.records)
    assert dict(box.records[good].headers)["Td-Origin"] == f"{west.id} general"
    async with connect_directly(space.home.name, name="bob", home=space.home.home) as reader:
        heard = await reader.next_message(20)
        assert (heard.text, heard.seq, heard.durable) == ("while you were away", good, True)
        assert (heard.sender.name, heard.sender.id, heard.origin) == ("ada@west", west.ada.id, "west")
        await heard.ack()
        await eventually(lambda: reader.transport.opener.refused["signature"] == 1)
        assert len(reader.transport.queue) == 0
