"""The deliver job when something around it is full, gone, set back, or hostile: everybody else gets everything."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from crowd import AGENTS, Crowd, check, check_order, clients, gathered, join, others, post_large, read_all, say, say_on
from tidings.cli.main import main
from tidings.delivery import deliverer as rules
from tidings.delivery import stream_job
from tidings.delivery.broker_state import MAILBOX_FRAMES, BrokerState, DeliverFloor
from tidings.delivery.job import DeliverJob
from tidings.delivery.range_encoder import RangeEncoder
from tidings.delivery.status import look
from tidings.errors import LeaseHeld, LeaseLost, TidingsError
from tidings.model import planning
from tidings.nats.jetstream_blocking import BlockingJetStream, WorkerConnection
from tidings.server.lease import DeliverLease
from tidings.wire.message import MAX_PAYLOAD, Sender, compose
from tidings_testing.proxy import fault_proxy
from tidings_testing.real_space import AgentClient, RealSpace, real_space
from tidings_testing.waiting import eventually
from tools.delivering import Mailbox, RunningJob, delivering, empty_mailbox, job_settings, owed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]
ROOMS = [f"room.{n}" for n in range(40)]
MIB = 1 << 20


def strike_once(monkeypatch: pytest.MonkeyPatch, point: str, act: Callable[[], None]) -> list[str]:
    """Do something the first time the job passes a point. The answer has the point once that is done."""
    armed, struck = [point], list[str]()

    def reach(name: str) -> None:
        if name in armed:
            armed.remove(name)
            try:
                act()
            finally:
                struck.append(name)

    monkeypatch.setattr(rules, "reach", reach)
    return struck


def fail() -> None:
    raise TidingsError("struck")


async def operator(space: RealSpace, root: Path, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """What a command about the tables answers with --json."""
    place = ("--home", str(space.home.home), "--space", space.home.name, "--checkpoint", str(root / "checkpoint"))
    capsys.readouterr()
    code = await asyncio.to_thread(main, ["pipeline", *words, *place, "--json"])
    said = capsys.readouterr()
    assert code == 0, said.err
    return json.loads(said.out)


async def in_debt(job: RunningJob, crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bob is away and owed more frames than his mailbox takes: what did not fit is a debt for each room."""
    monkeypatch.setattr(planning, "MAX_FRAME_MESSAGES", 1)  # a frame for each room
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "room.*")
    for text in ("first", "second"):
        await say_on(ada, ROOMS, text)
        await job.caught_up(debts=False)
    assert len(job.job.deliverer.debts.open) == 2 * len(ROOMS) - MAILBOX_FRAMES


@pytest.mark.slow
async def test_f11_one_whose_mailbox_is_full_is_owed_numbers_others_get_everything_and_it_all_arrives_in_order(
    spark: "SparkSession",
    space: RealSpace,
    crowd: Crowd,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """F11, F27."""
    ada, bob, cal, _ = crowd.values()
    await join(cal, "room.*")
    boxes = {"bob": Mailbox(), "cal": Mailbox()}
    async with delivering(spark, space, tmp_path) as job:
        reading = asyncio.create_task(_keep_reading(cal, boxes["cal"]))
        await in_debt(job, crowd, monkeypatch)
        await say_on(ada, ROOMS, "third")
        await job.caught_up(debts=False)
        everything = len((await owed(space))[cal.id])
        await eventually(lambda: len(boxes["cal"].records) == everything == 3 * len(ROOMS), what="cal has it all")
        reading.cancel()
        rows = await operator(space, tmp_path, capsys, "debts")
        assert {(row["name"], row["cause"]) for row in rows} == {("bob", "the mailbox took no more")}
        assert {row["channel"] for row in rows} == set(ROOMS), "who is behind on a channel gets nothing newer of it"
        assert await _held(space, bob) == MAILBOX_FRAMES
        while job.job.deliverer.debts.open:
            await empty_mailbox(bob, boxes["bob"])
        await job.caught_up()
    await read_all({"bob": bob}, boxes)
    await check(space, {"bob": bob, "cal": cal}, boxes)
    assert [box.repeats for box in boxes.values()] == [0, 0]


async def _keep_reading(agent: AgentClient, box: Mailbox) -> None:
    while True:
        await empty_mailbox(agent, box)


async def _held(space: RealSpace, owner: AgentClient) -> int:
    async with space.core() as js:
        body = {"subjects_filter": space.subjects.delivery(owner.id)}
        return sum((await js.api(f"STREAM.INFO.{space.subjects.delivery_stream}", body))["state"]["subjects"].values())


async def test_a_debt_cancelled_while_the_job_runs_is_told_with_its_exact_range_and_count(
    spark: "SparkSession",
    space: RealSpace,
    crowd: Crowd,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ada, bob = crowd["ada"], crowd["bob"]
    async with delivering(spark, space, tmp_path) as job:
        await in_debt(job, crowd, monkeypatch)
        lane = next(iter(job.job.deliverer.debts.open))
        owner, channel = lane
        after = job.job.deliverer.debts.open[lane].after
        for text in ("third", "fourth"):
            await say(ada, channel, text)
        await say(bob, channel, "his own is no loss")
        await job.caught_up(debts=False)
        said = await operator(space, tmp_path, capsys, "cancel-debt", "bob", channel, "--why", "rebuilt", "--yes")
        assert (said["owner"], said["first"]) == (owner, after + 1) == (bob.id, said["first"])
        await eventually(lambda: bob.id not in dict(job.job.deliverer.debts.uncounted()) and _told_or_known(job, bob))
        box = Mailbox()
        while job.job.deliverer.debts.open or not any(frame.lost for frame in box.frames):
            await empty_mailbox(bob, box)
        await job.caught_up()
        await say(ada, channel, "after the cancelled ones")
        await job.caught_up()
    await read_all({"bob": bob}, {"bob": box})
    (lost,) = [lost for frame in box.frames for lost in frame.lost]
    assert (lost.channel, lost.first, lost.last, lost.cause) == (channel, said["first"], said["last"], "rebuilt")
    truth = (await owed(space))[bob.id]
    missing = truth - others(bob, box)
    assert lost.count == len(missing) == 3, "second, third, fourth"
    assert all(lost.first <= seq <= lost.last for seq in missing)
    check_order(box)


def _told_or_known(job: RunningJob, owner: AgentClient) -> bool:
    debts = job.job.deliverer.debts
    return owner.id in debts.untold or owner.id in debts.told


@pytest.mark.slow
async def test_f11_mailboxes_that_fill_the_disk_become_numbers_and_others_still_get_their_copies(
    spark: "SparkSession", tmp_path: Path
) -> None:
    async with real_space(tmp_path / "home", budget=16 * MIB) as space, gathered(space) as crowd:
        ada, bob, cal, _ = crowd.values()
        await join(bob, "big")
        await join(cal, "other")
        async with delivering(spark, space, tmp_path) as job:
            await post_large(ada, "big", 250_000, 30)  # more than all mailboxes together hold
            await job.caught_up(debts=False)
            used, most = job.job.mailboxes._used()
            assert used > 0.8 * most, "there is nearly no room left"
            await post_large(ada, "other", 250_000, 2)
            await job.caught_up(debts=False)
            boxes = await read_all({"cal": cal})
            assert len(boxes["cal"].records) == 2, "at once, although bob is away"
            assert set(job.job.deliverer.debts.open) == {(bob.id, "big")}
            boxes["bob"] = Mailbox()
            reading = asyncio.create_task(_keep_reading(bob, boxes["bob"]))
            await eventually(lambda: len(boxes["bob"].records) == 30, within=60, what="bob has it all")
            reading.cancel()
            await job.caught_up()
        await check(space, {"bob": bob, "cal": cal}, boxes)


async def test_a_second_pipeline_is_told_in_a_sentence_that_another_one_delivers(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path
) -> None:
    async with delivering(spark, space, tmp_path) as job:
        await job.caught_up()
        second = DeliverJob(spark, job_settings(space, tmp_path / "elsewhere"))
        with pytest.raises(
            LeaseHeld, match=r"another pipeline delivers for this space \(pid \d+ on .+\): stop it first"
        ):
            await asyncio.to_thread(second.run)
        await join(crowd["bob"], "general")
        await say(crowd["ada"], "general")
        await job.caught_up()
    boxes = await read_all({"bob": crowd["bob"]})
    await check(space, {"bob": crowd["bob"]}, boxes)


def lease_of(space: RealSpace) -> DeliverLease:
    creds = space.home.creds / "pipeline.creds"
    js = BlockingJetStream(lambda: WorkerConnection.open(space.info.url, creds))
    return DeliverLease(js, space.subjects, ttl=0.05)


def floor_of(lease: DeliverLease) -> DeliverFloor:
    return DeliverFloor(BrokerState(lease.js, lease.subjects), lease, "epoch")


async def test_n8_seventy_takeovers_leave_the_deliver_lease_as_takeable_as_before_and_n9_an_old_holder_moves_no_floor(
    space: RealSpace,
) -> None:
    def take_over() -> None:
        first = lease_of(space)
        first.take()
        first.release()
        for _ in range(MAILBOX_FRAMES + 6):
            lease = lease_of(space)
            lease.take()
            floor_of(lease).advance(lease.seq, None, (0, 0))
            lease.release()
            lease.js.close()
        with pytest.raises(LeaseLost, match="the deliver floor was written under lease"):
            floor_of(first).advance(10**6, None, (0, 0))
        with pytest.raises(LeaseLost, match="another pipeline beats"):
            first.beat()
        first.js.close()

    await asyncio.to_thread(take_over)


@pytest.mark.parametrize("point", ["deliver.read", "deliver.published"])
@pytest.mark.slow
async def test_f28_a_broker_killed_with_9_in_the_middle_of_a_batch_costs_nobody_a_message(
    spark: "SparkSession",
    space: RealSpace,
    crowd: Crowd,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
) -> None:
    ada, bob, cal, _ = crowd.values()
    for agent in (bob, cal):
        await join(agent, "team.>")
    for n in range(10):
        await say(ada, f"team.{n % 2}", str(n))

    def kill() -> None:
        space.broker.kill()
        space.broker.start()

    struck = strike_once(monkeypatch, point, kill)
    async with delivering(spark, space, tmp_path) as job:
        await eventually(lambda: struck, within=30, what="the broker was killed")
        async with clients(space, AGENTS) as again:
            await job.caught_up()
            await say(again["ada"], "team.0", "after")
            await job.caught_up()
            readers = {name: again[name] for name in ("bob", "cal")}
            boxes = await read_all(readers)
            await check(space, readers, boxes)
    assert len(boxes["cal"].records) == 11
    assert job.job.tally.last_error


@pytest.mark.slow
async def test_a_broker_killed_with_9_while_workers_read_the_log_starts_the_query_again(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes while a worker has some of a range and waits for the rest."""
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "general")
    await post_large(ada, "general", 250_000, 20)
    encode, reading, heard_then, struck = RangeEncoder.encode, list[int](), list[int](), list[str]()

    def away(encoder: RangeEncoder, *arguments: Any, **more: Any) -> Any:
        if struck:
            return encode(encoder, *arguments, **more)
        reading.append(proxy.connections)
        try:
            return encode(encoder, *arguments, **more)
        except Exception as error:
            space.broker.start()
            struck.append(str(error))
            raise

    def kill(connection: int, heard: int) -> None:
        if reading and not heard_then and connection > reading[0] and heard >= MIB:
            space.broker.kill()
            heard_then.append(heard)

    monkeypatch.setattr(RangeEncoder, "encode", away)
    async with fault_proxy(space.info.port) as proxy:
        proxy.on_answer = kill
        async with delivering(spark, space, tmp_path, url=proxy.url) as job:
            await eventually(lambda: struck or job.failure, within=60, what="the broker was killed")
            await job.caught_up()
            async with clients(space, ["bob"]) as again:
                boxes = await read_all(again)
                await check(space, again, boxes)
    assert MIB <= heard_then[0] < 20 * 250_000, "it had some, and not all"
    assert len(struck) == 1, "and no batch was made of that: the worker failed, or was told to stop"
    assert len(boxes["bob"].records) == 20


@pytest.mark.slow
async def test_a_batch_that_failed_in_a_worker_is_repeated_and_the_reason_said_in_a_sentence(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "general")
    await say(ada, "general", "before")
    encode, struck = RangeEncoder.encode, list[str]()

    def stumble(batches: Any) -> Any:
        raise RuntimeError("the worker stumbled")

    def failing(encoder: RangeEncoder, *arguments: Any, **more: Any) -> Any:
        if not struck:
            struck.append("failed")
            spark.range(1).mapInArrow(stumble, "id bigint").toArrow()
        return encode(encoder, *arguments, **more)

    monkeypatch.setattr(RangeEncoder, "encode", failing)
    async with delivering(spark, space, tmp_path) as job:
        await job.caught_up()
    boxes = await read_all({"bob": bob})
    await check(space, {"bob": bob}, boxes)
    assert struck
    assert "\n" not in str(job.job.tally.last_error)


@pytest.mark.slow
async def test_f5_a_log_set_back_under_a_running_job_is_rewound_and_said_and_what_is_new_arrives(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path
) -> None:
    said = "the log went backwards; delivery began again after"
    for name in ("bob", "cal"):
        await join(crowd[name], "general")
    await say_on(crowd["ada"], ["general"] * 5, "kept")
    await space.stop_steward()
    space.broker.stop()
    shutil.copytree(space.home.store, tmp_path / "copy")
    space.broker.start()
    await space.start_steward()
    async with delivering(spark, space, tmp_path) as job:
        async with clients(space, ["ada"]) as before:
            await say_on(before["ada"], ["general"] * 20, "lost")
            await job.caught_up()
        before_it = job.job.deliverer
        await space.stop_steward()
        space.broker.stop()
        shutil.rmtree(space.home.store)
        shutil.copytree(tmp_path / "copy", space.home.store)
        space.broker.start()
        await space.start_steward()
        async with clients(space, ("ada", "bob", "cal")) as after:
            await say_on(after["ada"], ["general"] * 7, "new")
            await eventually(lambda: said in str(job.job.tally.last_error) or job.failure, within=60, what=said)
            await eventually(lambda: job.job.deliverer is not before_it or job.failure, what="it begins again")
            await job.caught_up()
            readers = {name: after[name] for name in ("bob", "cal")}
            boxes = await read_all(readers)
            await check(space, readers, boxes)
    assert len(boxes["cal"].records) == 12


async def test_f33_a_lost_checkpoint_goes_on_at_the_deliver_floor_and_nothing_is_missing_or_twice(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path
) -> None:
    ada, bob, cal, _ = crowd.values()
    for agent in (bob, cal):
        await join(agent, "team.>")
    for round_ in range(2):
        await say_on(ada, ["team.0", "team.1", "team.0"], str(round_))
        async with delivering(spark, space, tmp_path) as job:
            await job.caught_up()
            assert job.job.tally.deliveries == 6, "the second job delivers only what the first did not"
        shutil.rmtree(tmp_path / "checkpoint" / "spark")
    boxes = await read_all({"bob": bob, "cal": cal})
    await check(space, {"bob": bob, "cal": cal}, boxes)
    assert [box.repeats for box in boxes.values()] == [0, 0]


@pytest.mark.parametrize(("name", "content"), [("offsets", b""), ("commits", b""), ("offsets", b"garbage\x00")])
async def test_a_checkpoint_that_spark_would_refuse_is_put_aside_and_said_and_delivery_goes_on(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path, name: str, content: bytes
) -> None:
    """As a power cut leaves it: the newest file of one of its logs is there, and holds nothing of use."""
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "team.>")
    await say_on(ada, ["team.0", "team.1"], "before")

    def written() -> list[Path]:
        """Spark notes a batch as done after we did."""
        folder = tmp_path / "checkpoint" / "spark" / name
        return [path for path in folder.iterdir() if path.name.isdigit()] if folder.exists() else []

    async with delivering(spark, space, tmp_path) as job:
        await job.caught_up()
        await eventually(written, within=30, what=f"Spark writes its {name}")
    max(written(), key=lambda path: int(path.name)).write_bytes(content)
    await say_on(ada, ["team.0"], "after")
    async with delivering(spark, space, tmp_path) as job:
        await job.caught_up()
        assert f"the checkpoint could not be read ({name}/" in str(job.job.tally.last_error)
    assert len([path for path in (tmp_path / "checkpoint").iterdir() if path.name.startswith("spark.")]) == 1
    boxes = await read_all({"bob": bob})
    await check(space, {"bob": bob}, boxes)
    assert len(boxes["bob"].records) == 3


async def test_nobody_says_that_delivery_runs_while_the_jvm_is_stopped_and_it_goes_on_after(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_job, "JVM_SILENT", 0.5)
    monkeypatch.setattr(stream_job, "BEAT_EVERY", 0.1)
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "team.>")
    jvm = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]

    async def runs() -> bool:
        return bool((await asyncio.to_thread(look, space.home)).running)

    async with delivering(spark, space, tmp_path) as job:
        await eventually(runs, within=30)
        os.kill(jvm, signal.SIGSTOP)
        try:
            await eventually(lambda: _not(runs), within=30)
        finally:
            os.kill(jvm, signal.SIGCONT)
        await eventually(runs, within=30)
        await say_on(ada, ["team.0"], "after")
        await job.caught_up()
    assert len((await read_all({"bob": bob}))["bob"].records) == 1


async def _not(condition: Callable[[], Awaitable[bool]]) -> bool:
    return not await condition()


async def test_poison_is_kept_aside_with_its_reason_and_stops_nobody(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row is there once, although the batch is repeated."""
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "general")
    honest = compose(Sender(ada.id, "ada"), text="fine").raw
    await say(ada, "general", "before")
    unsigned = await ada.connection.request(space.subjects.chat(ada.id, "general"), honest, timeout=5)
    poison = {
        int((await ada.post("general", b"\xff\x00 no json"))["seq"]): "malformed",
        int((await ada.post("general", b"{}"))["seq"]): "malformed",
        int((await ada.post("general", compose(Sender(bob.id, "bob"), text="I am bob").raw))["seq"]): "sender_mismatch",
        int((await ada.post("general", honest, Status="404"))["seq"]): "header",
        int((await ada.post("general", honest, Nats_Subject="td.main.acl.x"))["seq"]): "header",
        int(json.loads(unsigned.data)["seq"]): "signature",
    }
    await say(ada, "general", "after")
    struck = strike_once(monkeypatch, "deliver.published", fail)
    async with delivering(spark, space, tmp_path) as job:
        await job.caught_up()
        assert (job.job.tally.poison, len(struck)) == (len(poison), 1)
    rows = DeltaTable(str(tmp_path / "lake" / "quarantine")).to_pyarrow_table().to_pylist()
    assert len(rows) == len(poison)
    assert {row["seq"]: row["reason"] for row in rows} == poison
    assert all(row["detail"] and row["subject"].endswith(".general") for row in rows)
    boxes = await read_all({"bob": bob})
    assert set(boxes["bob"].records) == (await owed(space))[bob.id] - set(poison)
    assert len(boxes["bob"].records) == 2


async def test_f17_a_message_of_256_kib_and_a_run_of_10_mb_arrive_whole(spark: "SparkSession", tmp_path: Path) -> None:
    async with real_space(tmp_path / "home", budget=256 * MIB) as space, gathered(space) as crowd:
        ada, bob, cal, _ = crowd.values()
        for agent in (bob, cal):
            await join(agent, "big")
        async with delivering(spark, space, tmp_path) as job:
            seqs = await post_large(ada, "big", MAX_PAYLOAD, 1) + await post_large(ada, "big", 250_000, 40)
            await job.caught_up()
            boxes = await read_all({"bob": bob, "cal": cal})
        await check(space, {"bob": bob, "cal": cal}, boxes)
        assert boxes["bob"].channel("big") == seqs
        assert sum(len(kept.payload) for kept in boxes["bob"].records.values()) > 10_000_000
        assert max(len(kept.payload) for kept in boxes["bob"].records.values()) == MAX_PAYLOAD


@pytest.mark.slow
@pytest.mark.parametrize("point", ["deliver.published", "deliver.recorded"])
async def test_records_the_log_has_lost_are_told_to_every_member_once_even_if_the_batch_is_repeated(
    spark: "SparkSession",
    space: RealSpace,
    crowd: Crowd,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
) -> None:
    """At the first point the second telling would be the same frame, which the broker knows; at the other it is not."""
    ada, bob, cal, dan = crowd.values()
    for agent in (bob, cal):
        await join(agent, "team.>")
    await say(ada, "team.0", "before")
    async with delivering(spark, space, tmp_path) as job:
        await job.caught_up()
    seqs = [await say(ada, "team.0", str(n)) for n in range(5)]
    async with space.core() as js:
        for seq in seqs[1:3]:
            await js.api(f"STREAM.MSG.DELETE.{space.subjects.log_stream}", {"seq": seq})

    struck = strike_once(monkeypatch, point, fail)
    async with delivering(spark, space, tmp_path) as job:
        await job.caught_up()
        await eventually(lambda: job.job.tally.batches, within=60, what="the batch was repeated")
        await eventually(lambda: not job.job.deliverer.debts.untold, what="everybody was told")
    assert struck == [point]
    events = DeltaTable(job.job.ledger.paths.debts).to_pyarrow_table().to_pylist()
    assert sorted(event["owner"] for event in events if event["kind"] == "lost") == sorted([bob.id, cal.id])
    boxes = await read_all({"bob": bob, "cal": cal, "dan": dan})
    await check(space, crowd | {"bob": bob}, boxes | {"ada": Mailbox()})
    for name in ("bob", "cal"):
        told = [lost for frame in boxes[name].frames for lost in frame.lost]
        assert [(lost.channel, lost.first, lost.last, lost.count) for lost in told] == [("*", seqs[1], seqs[2], 2)]
    assert boxes["dan"].frames == [], "who is no member of anything has lost nothing"
