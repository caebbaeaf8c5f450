"""Where delivery meets retention, an older checkpoint, older mailboxes and time: nothing is lost without a word.

Each of these days lost messages once, or stopped delivery for ever.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from crowd import Crowd, check, check_order, clients, join, narrow, read_all, retain_nothing, say, say_on, set_class
from tidings.contract.admin import ChangeSpaceRequest, PartsChange
from tidings.delivery import deliverer as rules
from tidings.delivery.range_encoder import RangeEncoder
from tidings.errors import TidingsError
from tidings.wire.frames import Lost
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually
from tools.delivering import Mailbox, delivering

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]
#: mailboxes are looked after at every turn
OFTEN = {"look_every": 0.0}


async def set_space(space: RealSpace, settings: ChangeSpaceRequest) -> None:
    async with space.administer() as admin:
        await admin.call(settings)


def told(box: Mailbox) -> list[Lost]:
    return [lost for frame in box.frames for lost in frame.lost]


async def test_an_older_checkpoint_that_is_put_back_skips_nothing(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path
) -> None:
    """H3: Spark plans a number that was done before, over a longer range."""
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "team.>")
    checkpoint, copy = tmp_path / "checkpoint" / "spark", tmp_path / "copy"

    async def deliver(text: str, *channels: str) -> None:
        await say_on(ada, channels, text)
        async with delivering(spark, space, tmp_path) as job:
            await job.caught_up()

    await deliver("first", "team.0", "team.1")
    shutil.copytree(checkpoint, copy)
    await deliver("second", "team.0")
    await deliver("third", "team.1")
    shutil.rmtree(checkpoint)
    shutil.copytree(copy, checkpoint)
    await deliver("fourth", "team.0", "team.1", "team.2")
    boxes = await read_all({"bob": bob})
    await check(space, {"bob": bob}, boxes)
    assert (len(boxes["bob"].records), boxes["bob"].repeats) == (7, 0)


@pytest.mark.parametrize("which", ["lake checkpoint/debts", "lake", "checkpoint/debts"])
@pytest.mark.parametrize("older", [True, False], ids=["older", "gone"])
async def test_a_ledger_that_is_older_than_what_was_delivered_or_gone_costs_no_message(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path, which: str, *, older: bool
) -> None:
    """Mailboxes were emptied of what the older ledger did not know, and the floor was above it."""
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "team.>")
    folders, boxes = which.split(), {"bob": Mailbox()}
    async with delivering(spark, space, tmp_path, **OFTEN) as job:
        await say(ada, "team.0", "read before it was copied")
        await job.caught_up()
        await read_all({"bob": bob}, boxes)
    for folder in folders:
        shutil.copytree(tmp_path / folder, tmp_path / "copy" / folder)
    async with delivering(spark, space, tmp_path, **OFTEN) as job:
        await say(ada, "team.1", "unread")
        await job.caught_up()
    for folder in folders:
        shutil.rmtree(tmp_path / folder)
        if older:
            shutil.copytree(tmp_path / "copy" / folder, tmp_path / folder)
    async with delivering(spark, space, tmp_path) as job:
        await say(ada, "team.2", "afterwards")
        await job.caught_up()
        assert "the ledger is older" in str(job.job.tally.last_error)
        await read_all({"bob": bob}, boxes)
        assert not told(boxes["bob"])
        await check(space, {"bob": bob}, boxes)
        await say(ada, "team.1", "and then")
        await job.caught_up()
    await read_all({"bob": bob}, boxes)
    await check(space, {"bob": bob}, boxes)
    assert len(boxes["bob"].records) == 4


@pytest.mark.parametrize("table", ["lake/deliveries", "checkpoint/debts"])
async def test_a_table_of_the_ledger_that_cannot_be_read_is_put_aside_and_costs_no_message(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path, table: str
) -> None:
    """It stopped delivery until somebody moved it away."""
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "team.>")
    async with delivering(spark, space, tmp_path) as job:
        await say(ada, "team.0", "unread")
        await job.caught_up()
    for file in (tmp_path / table).glob("*.parquet"):
        content = bytearray(file.read_bytes())
        content[-200:-8] = bytes(192)  # in the footer, which says where everything is
        file.write_bytes(content)
    async with delivering(spark, space, tmp_path) as job:
        await say(ada, "team.1", "afterwards")
        await job.caught_up()
    boxes = await read_all({"bob": bob})
    await check(space, {"bob": bob}, boxes)
    assert len(boxes["bob"].records) == 2
    assert list((tmp_path / table).parent.glob("*.damaged-*"))


@pytest.mark.parametrize("noticed", [True, False])
async def test_a_log_and_mailboxes_that_are_put_back_together_skip_nothing(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path, *, noticed: bool
) -> None:
    """The copy was made after a message was stored and before it was delivered; the checkpoint knows it as done.

    A steward that noticed it gives the log another epoch.
    """
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "team.>")
    await say(ada, "team.0", "first")
    await space.stop_steward()

    async def deliver() -> None:
        async with delivering(spark, space, tmp_path) as job:
            await job.caught_up()

    await deliver()
    await say(ada, "team.0", "second")
    space.broker.stop()
    shutil.copytree(space.home.store, tmp_path / "copy")
    space.broker.start()
    await deliver()
    async with clients(space, ["ada"]) as again:
        await say(again["ada"], "team.0", "third, which is forgotten")
    await deliver()
    if noticed:
        await space.start_steward()
        await space.stop_steward()  # it writes down how far the log is
    space.broker.stop()
    shutil.rmtree(space.home.store)
    shutil.copytree(tmp_path / "copy", space.home.store)
    space.broker.start()
    await space.start_steward()
    async with clients(space, ["ada", "bob"]) as both:
        await say(both["ada"], "team.1", "fourth")
        async with delivering(spark, space, tmp_path) as job:
            await job.caught_up()
            assert "the log went backwards" in str(job.job.tally.last_error)
        boxes = await read_all({"bob": both["bob"]})
        await check(space, {"bob": both["bob"]}, boxes)
    assert len(boxes["bob"].records) == 3


async def test_a_batch_that_was_broken_off_after_its_floor_is_done_although_retention_took_its_records(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H4: it is not asked for again, and nobody hears that the log lost what it delivered."""
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "team.>")
    await set_space(space, ChangeSpaceRequest(keep_age=0, parts=PartsChange(deliver="on", archive="off")))
    struck: list[str] = []
    async with delivering(spark, space, tmp_path, **OFTEN) as job:
        await say_on(ada, ["team.0", "team.1"], "before")
        await job.caught_up()
        boxes = await read_all({"bob": bob})
        await eventually(lambda: job.job.deliverer.needed is None, what="all was read")

        unheard: list[int] = []

        def break_off(name: str) -> None:
            """In a batch that ends after the first of them: a batch may be a single message."""
            is_reached = bool(unheard) and job.job.deliverer.floor > unheard[0]
            if name == "deliver.floor" and is_reached and not struck:
                struck.append(name)
                job.job.stop()
                raise TidingsError("broken off before Spark noted the batch")

        monkeypatch.setattr(rules, "reach", break_off)
        unheard.append(await say(ada, "nobody.here", "first"))
        for number in range(4):
            await say(ada, "nobody.here", str(number))
        await eventually(lambda: struck, within=60, what="the batch is broken off")
    assert await retain_nothing(space) > unheard[0]
    async with delivering(spark, space, tmp_path) as job:
        later = await say(ada, "team.0", "after")
        await job.caught_up()
        assert job.job.tally.last_error is None
    await read_all({"bob": bob}, boxes)
    assert (len(boxes["bob"].records), boxes["bob"].repeats, told(boxes["bob"])) == (3, 0, [])
    assert later in boxes["bob"].records


async def test_the_log_keeps_what_is_unread_so_that_an_emptied_mailbox_is_made_good(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path
) -> None:
    """H2: retention used to take what an absent member had in its mailbox only."""
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "team.>")
    await set_space(space, ChangeSpaceRequest(keep_age=0, parts=PartsChange(deliver="on", archive="off")))
    seqs = await say_on(ada, ["team.0", "team.1"] * 5, "while bob is away")
    async with delivering(spark, space, tmp_path, **OFTEN) as job:
        await job.caught_up()
        assert await retain_nothing(space) <= min(seqs)
        await narrow(space, "bob", "team.0", "team.1")
        boxes = {"bob": Mailbox()}
        async with clients(space, ["bob"]) as again:

            async def has_all() -> bool:
                return set(seqs) <= set((await read_all(again, boxes))["bob"].records)

            await eventually(has_all, within=30, what="bob gets again what is allowed")
            assert set(boxes["bob"].records) == set(seqs)  # the log may be without them as soon as they are read
            check_order(boxes["bob"])
        await eventually(lambda: job.job.deliverer.needed is None, what="it was read: nothing is needed any more")
        assert await retain_nothing(space) >= max(seqs)
    assert told(boxes["bob"]) == []


async def test_what_retention_took_against_the_rules_is_told_with_its_range_and_count(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path
) -> None:
    """H2: a space that switches delivery off lets the log go; what was owed out of it is a loss, and no silence."""
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "team.>")
    seqs = [await say(ada, "team.0", str(n)) for n in range(10)]
    async with delivering(spark, space, tmp_path, **OFTEN) as job:
        await job.caught_up()
    await set_space(space, ChangeSpaceRequest(keep_age=0, parts=PartsChange(deliver="off", archive="off")))
    kept_from = await retain_nothing(space)
    assert kept_from > max(seqs)
    await narrow(space, "bob", "team.0")
    async with delivering(spark, space, tmp_path, **OFTEN) as job:
        await job.caught_up()
        boxes = {"bob": Mailbox()}
        async with clients(space, ["bob"]) as again:

            async def is_told() -> bool:
                return bool(told((await read_all(again, boxes))["bob"]))

            await eventually(is_told, within=30, what="bob is told")
    box = boxes["bob"]
    (lost,) = told(box)
    assert (lost.channel, lost.first, lost.count) == ("team.0", min(seqs), 10)
    assert lost.last >= max(seqs)
    assert "removed" in lost.cause
    assert box.records == {}


async def test_a_mailbox_stream_that_was_set_back_is_made_good_from_the_log(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path
) -> None:
    """D2: the log is whole, the mailboxes are older than the ledger; and one who read already hears nothing twice."""
    ada, bob, cal, _ = crowd.values()
    for agent in (bob, cal):
        await join(agent, "team.>")
    await say(ada, "team.0", "before")
    async with delivering(spark, space, tmp_path) as job:
        await job.caught_up()
    space.broker.stop()
    (stored,) = space.home.store.glob("jetstream/*/streams/DLV_main")
    copy = tmp_path / "copy"
    shutil.copytree(stored, copy)
    space.broker.start()
    async with clients(space, ["ada", "cal"]) as some:
        await say_on(some["ada"], ["team.0", "team.1"] * 10, "meanwhile")
        async with delivering(spark, space, tmp_path) as job:
            await job.caught_up()
        read_before = await read_all({"cal": some["cal"]})
        for _ in range(3):  # the floor is written under leases that the older stream will not reach soon
            await say(some["ada"], "ops.0", "nobody is a member")
            async with delivering(spark, space, tmp_path) as job:
                await job.caught_up()
    assert len(read_before["cal"].records) == 21
    space.broker.stop()
    shutil.rmtree(stored)
    shutil.copytree(copy, stored)
    space.broker.start()
    async with clients(space, ["bob", "cal"]) as some, delivering(spark, space, tmp_path) as job:
        await job.caught_up()
        assert "not as they were left" in str(job.job.tally.last_error), "and nothing after that"
        boxes = await read_all(some)
        await check(space, some, boxes)
        assert (len(boxes["bob"].records), told(boxes["bob"])) == (21, [])
        assert {frame.series for frame in boxes["bob"].frames} != {"first"}


async def test_what_nobody_read_for_too_long_is_given_up_and_told(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path
) -> None:
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "team.>")
    await set_space(space, ChangeSpaceRequest(keep_unread=1))
    seqs = [await say(ada, "team.0", str(n)) for n in range(3)]
    async with delivering(spark, space, tmp_path, **OFTEN) as job:
        await job.caught_up()
        await eventually(lambda: job.job.deliverer.needed is None, within=30, what="nothing is kept for bob any more")
        box = Mailbox()

        async def is_told() -> bool:
            return bool(told((await read_all({"bob": bob}, {"bob": box}))["bob"]))

        await eventually(is_told, within=30, what="bob is told, again if it did not read that either")
    assert [(each.channel, each.first, each.last, each.count) for each in told(box)][:1] == [
        ("team.0", seqs[0], seqs[2], 3)
    ]
    assert "nobody read it" in told(box)[0].cause
    assert box.records == {}


async def test_a_mailbox_that_was_emptied_is_made_good_although_nothing_new_is_said(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path
) -> None:
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "team.>")
    assert space.steward is not None
    async with delivering(spark, space, tmp_path, **OFTEN) as job:
        seq = await say(ada, "team.0", "hello")
        await job.caught_up()
        await eventually(lambda: not job.job.busy)
        await space.steward.admin.empty_mailbox(bob.id)
        boxes = {"bob": Mailbox()}

        async def has_it() -> bool:
            return seq in (await read_all({"bob": bob}, boxes))["bob"].records

        await eventually(has_it, within=30, what="it is delivered again")


async def test_a_range_that_cannot_be_encoded_at_once_is_delivered_in_pieces(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H6: the same range failed again and again, for ever."""
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "team.>")
    seqs = [await say(ada, "team.0", str(n)) for n in range(12)]
    begin_there, sizes = RangeEncoder.begin_there, list[int]()

    def bounded(self: RangeEncoder, after: int, frame: Any, *rest: Any) -> Any:
        sizes.append(frame.count())
        if sizes[-1] > 7:
            raise TidingsError("out of memory")
        return begin_there(self, after, frame, *rest)

    monkeypatch.setattr(RangeEncoder, "begin_there", bounded)
    async with delivering(spark, space, tmp_path) as job:
        await job.caught_up(within=120)
    box = (await read_all({"bob": bob}))["bob"]
    assert (sorted(box.records), box.repeats) == (seqs, 0)
    assert max(sizes) > 7


async def test_a_small_range_is_the_same_bytes_whoever_encodes_it(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path
) -> None:
    ada, bob = crowd["ada"], crowd["bob"]
    await join(bob, "team.>")
    for n in range(30):
        await say(ada, f"team.{n % 3}", str(n), (bob.id,) if n % 7 == 0 else ())
    await set_class(ada, "team.1", "live")
    seqs = [await say(ada, f"team.{n % 3}", "later", (bob.id,)) for n in range(9)]
    await ada.post("team.0", b"no message at all")
    async with space.core() as js:
        await js.api(f"STREAM.MSG.DELETE.{space.subjects.log_stream}", {"seq": seqs[4]})
    async with delivering(spark, space, tmp_path, small_records=1_000) as running:
        last, encoder = await running.caught_up(), running.job.encoder
        for after in (0, seqs[0] - 5, seqs[4] - 1):
            here = encoder.encode_here(after, last)
            assert here is not None
            assert here == encoder.begin_there(after, encoder.read(after, last))()
            assert here.blocks
            assert here.missing == [(seqs[4], seqs[4])]
            assert here.poison
        assert encoder.encode_here(0, last + encoder.small) is None
