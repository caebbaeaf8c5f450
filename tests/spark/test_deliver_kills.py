"""A deliver job that is really killed, or really paused, and what the next one makes of what it left.

The one that dies is a process of its own, as `tidings up` starts it, some with a JVM of their own and some on the one
of these tests (`tools/driver.py`): at its named places the JVM only waits. The next one runs from the same checkpoint
and lake. Between the two access changes: the second attempt judges what the first one planned.
"""

import random
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tidings
from crowd import (
    Crowd,
    check,
    clients,
    join,
    narrow,
    post_large,
    read_all,
    retain_nothing,
    revoke,
    say,
    say_on,
    set_class,
)
from tidings.wire.frames import MAX_FRAME_REFS
from tidings_testing import processes
from tidings_testing.real_space import AgentClient, RealSpace
from tidings_testing.waiting import eventually
from tools.delivering import Mailbox, delivering, owed
from tools.driver import gateway

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]
POINTS = ("deliver.read", "deliver.frame", "deliver.published", "deliver.recorded", "deliver.floor")
ROOMS = ("team.0", "team.1", "team.2")
JVM_SECONDS = 90.0


def job_process(
    space: RealSpace, root: Path, failpoint: str, way: Mapping[str, str] | None = None
) -> AbstractAsyncContextManager[processes.Child]:
    """The same job as `delivering`, in a process of its own; with `way`, on the JVM that leads to."""
    module = "tools.driver" if way else "tidings.delivery.process"
    place = ("--home", space.home.home, "--space", space.home.name, "--master", "local[1]", "--lease-ttl", "0.5")
    kept = ("--checkpoint", root / "checkpoint", "--lake", root / "lake")
    return processes.child("-m", module, *place, *kept, failpoint=failpoint, more=way)


async def killed_at(point: str, space: RealSpace, root: Path, way: Mapping[str, str] | None = None) -> None:
    """A job that runs until it kills itself there."""
    async with job_process(space, root, f"{point}:kill", way) as job:
        assert await job.ended(JVM_SECONDS) == -signal.SIGKILL, await job.last_line()


class Listener:
    """Cal, who comes and goes, and remembers in a file what was settled."""

    def __init__(self, space: RealSpace, state: Path) -> None:
        self._space, self._state = space, state
        self.id = ""
        self.heard: list[int] = []

    def _endpoint(self) -> tidings.DirectAgent:
        return tidings.connect(self._space.home.name, name="cal", home=self._space.home.home, state=self._state)

    async def join(self, pattern: str) -> None:
        async with self._endpoint() as cal:
            await cal.join(pattern, backfill=0)
            self.id = cal.id

    async def listen(self, pattern: str) -> None:
        """Settle everything until the mailbox is empty and nothing more comes."""
        async with self._endpoint() as cal:
            await cal.join(pattern)
            while not await self._is_done(cal):
                with suppress(TimeoutError):
                    message = await cal.next_message(0.2)
                    self.heard.append(message.seq)
                    await message.ack()

    async def _is_done(self, cal: tidings.DirectAgent) -> bool:
        stream = self._space.subjects.delivery_stream
        async with self._space.core() as js:
            info = await js.api(f"CONSUMER.INFO.{stream}.dlv_{self.id}")
        return not (info["num_pending"] or info["num_ack_pending"] or len(cal.transport.queue))


async def mailboxes(space: RealSpace, *owners: str) -> list[int]:
    """Frames that lie there for each of them."""
    async with space.core() as js:
        body = {"subjects_filter": f"{space.subjects.root}.dlv.*.*"}
        held = (await js.api(f"STREAM.INFO.{space.subjects.delivery_stream}", body))["state"].get("subjects") or {}
    return [held.get(space.subjects.delivery(owner), 0) for owner in owners]


@pytest.mark.requirement("X11")
@pytest.mark.parametrize(
    "whose_jvm", ["ours", pytest.param("its own", marks=(pytest.mark.slow, pytest.mark.timeout(480)))]
)
async def test_killed_with_9_at_one_point_after_the_other_exactly_what_is_owed_and_allowed_surfaces_once(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path, whose_jvm: str
) -> None:
    """F6, F12, F28, F29, N10, N28: each job goes on from what a killed one left, under another access.

    All of them attempt the same batch; what was said since is in the next one.
    """
    ada, bob, _, dan = crowd.values()
    cal = Listener(space, tmp_path / "cal.state")
    await cal.join("team.>")
    await join(dan, "team.>")
    for channel in ROOMS:
        await join(bob, channel)
    with gateway(spark) if whose_jvm == "ours" else nullcontext() as way:

        async def killed_after_more_talk(point: str) -> None:
            await say_on(ada, [*ROOMS, *ROOMS], point)
            await killed_at(point, space, tmp_path, way)

        large = await post_large(ada, "team.1", 100_000, MAX_FRAME_REFS + 2)  # they make two frames for each owner
        await killed_after_more_talk("deliver.block")
        assert await mailboxes(space, bob.id, cal.id, dan.id) == [0, 0, 0]
        await narrow(space, "bob", "team.1", "team.2")
        await killed_after_more_talk("deliver.frame")
        assert max(await mailboxes(space, bob.id, cal.id, dan.id)) == 1, "some frames, of nobody all"
        await cal.listen("team.>")
        await narrow(space, "dan", "team.>")
        await killed_after_more_talk("deliver.published")
        assert min(await mailboxes(space, bob.id, dan.id)) > 1, "all frames"
        await cal.listen("team.>")
        await revoke(space, "dan")
        await killed_after_more_talk("deliver.floor")
        await narrow(space, "bob", "team.1")
    async with delivering(spark, space, tmp_path) as job:
        await say_on(ada, ROOMS, "after")
        await job.caught_up()
    truth = await owed(space)
    await cal.listen("team.>")
    assert len(truth[cal.id]) == 4 * 6 + 3 + len(large)
    assert sorted(cal.heard) == sorted(truth[cal.id]), "everything, nothing else, nothing twice"
    async with clients(space, ["bob"]) as again:
        boxes = await read_all(again)
        await check(space, again, boxes)
    assert len(boxes["bob"].channel("team.1")) == len(boxes["bob"].records) == 4 * 2 + 1 + len(large)
    assert await mailboxes(space, dan.id) == [0], "nothing lies there for one who was revoked"


@pytest.mark.slow
async def test_f20_a_holder_paused_past_its_lease_is_refused_by_the_broker_and_ends_and_the_next_one_is_exact(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path
) -> None:
    """F20, N9."""
    ada, bob, cal, _ = crowd.values()
    for channel in ("team.0", "team.1"):
        await join(bob, channel)
    await join(cal, "team.>")
    for n in range(6):
        await say(ada, f"team.{n % 2}", str(n))
    async with job_process(space, tmp_path, "deliver.read:pause") as first:
        while not (await first.line(JVM_SECONDS)).get("ready"):
            pass
        await processes.paused(first.pid, JVM_SECONDS)
        await narrow(space, "bob", "team.1")  # what the first has judged is no longer true
        async with delivering(spark, space, tmp_path) as second, clients(space, ["bob", "cal"]) as readers:
            await second.caught_up()
            boxes = await read_all(readers)
            first.signal(signal.SIGCONT)
            assert await first.ended(JVM_SECONDS) != 0
            assert (await first.last_line())["error"]["code"] == "lease_lost"
            await say_on(ada, ["team.0", "team.1"], "after")
            await second.caught_up()
            await read_all(readers, boxes)
            await check(space, readers, boxes)
    assert [(len(box.records), box.repeats) for box in boxes.values()] == [(3 + 1, 0), (6 + 2, 0)]


Change = Callable[[RealSpace, Crowd], Awaitable[None]]


async def _narrowed(space: RealSpace, _crowd: Crowd) -> None:
    await narrow(space, "bob", "team.1")


async def _revoked(space: RealSpace, _crowd: Crowd) -> None:
    await revoke(space, "bob")


async def _flipped(_space: RealSpace, crowd: Crowd) -> None:
    await set_class(crowd["ada"], "team.0", "live")
    await say(crowd["ada"], "team.0", "live, with a mention", mentions=(crowd["dan"].id,))


async def _nothing(_space: RealSpace, _crowd: Crowd) -> None:
    """Only time passes."""


async def _retained(space: RealSpace, _crowd: Crowd) -> None:
    await retain_nothing(space)


OLDER = {"checkpoint": ("checkpoint/spark",), "ledger": ("checkpoint/debts", "lake"), "all": ("checkpoint", "lake")}


@pytest.mark.slow
@pytest.mark.parametrize("older", OLDER)
@pytest.mark.parametrize("point", POINTS)
async def test_killed_with_9_anywhere_and_older_files_put_back_everybody_has_what_is_owed(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path, point: str, older: str
) -> None:
    """The copy is of a moment at which something was read, something lay unread, and all of it was delivered."""
    ada, bob, cal, _ = crowd.values()
    readers = {"bob": bob, "cal": cal}
    for agent in (bob, cal):
        await join(agent, "team.>")
    await say_on(ada, ROOMS, "before")
    async with delivering(spark, space, tmp_path, look_every=0.0) as job:
        await job.caught_up()
    boxes = await read_all({"bob": bob})
    for folder in OLDER[older]:
        shutil.copytree(tmp_path / folder, tmp_path / "copy" / folder)
    with gateway(spark) as way:
        await say_on(ada, ROOMS, "delivered")
        await killed_at("deliver.floor", space, tmp_path, way)
        await say_on(ada, [*ROOMS, "team.3"], "broken off")
        await killed_at(point, space, tmp_path, way)
    await _retained(space, crowd)
    for folder in OLDER[older]:
        shutil.rmtree(tmp_path / folder)
        shutil.copytree(tmp_path / "copy" / folder, tmp_path / folder)
    async with delivering(spark, space, tmp_path) as job:
        await say_on(ada, ROOMS, "after")
        await job.caught_up()
    boxes |= {"cal": Mailbox()}
    await read_all(readers, boxes)
    await check(space, readers, boxes)
    assert [len(box.records) for box in boxes.values()] == [13, 13]
    assert not [lost for box in boxes.values() for frame in box.frames for lost in frame.lost]


@pytest.mark.slow
@pytest.mark.parametrize("change", [_narrowed, _revoked, _flipped, _retained, _nothing])
@pytest.mark.parametrize("point", POINTS)
async def test_killed_with_9_anywhere_and_access_changed_in_between_everybody_has_exactly_what_is_owed_and_allowed(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path, point: str, change: Change
) -> None:
    """F6, F12, F29, N10."""
    ada, bob, cal, _ = crowd.values()
    for agent in (bob, cal):
        await join(agent, "team.>")
    for n in range(20):
        await say(ada, f"team.{n % 4}", str(n))
    with gateway(spark) as way:
        await killed_at(point, space, tmp_path, way)
    await change(space, crowd)
    async with delivering(spark, space, tmp_path) as job:
        for n in range(4):
            await say(ada, f"team.{n}", "after")
        await job.caught_up()
    names = ["cal", "dan"] if change is _revoked else ["bob", "cal", "dan"]
    async with clients(space, names) as again:
        boxes = await read_all(again)
        await check(space, again, boxes)
    assert len(boxes["cal"].records) == 24 - (change is _flipped)
    if change is _revoked:
        assert await mailboxes(space, bob.id) == [0]


@pytest.mark.slow
async def test_jobs_killed_at_random_moments_leave_nothing_out_and_nothing_behind(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path
) -> None:
    """Not at our points but at any: frames of several batches, debts and floors are somewhere on their way.

    When so many frames are there and somebody talks on, whatever it is doing then. The JVM dies with it, in the middle
    of its own files.
    """
    ada, bob, cal, _ = crowd.values()
    for agent in (bob, cal):
        await join(agent, "team.>")
    chance, said = random.Random(4), 0
    for _ in range(3):
        async with job_process(space, tmp_path, "") as job:
            while not (await job.line(JVM_SECONDS)).get("ready"):
                pass
            said += await talk_until(ada, space, frames=chance.randint(1, 8), more=chance.randint(0, 6))
            job.signal(signal.SIGKILL)
            await job.ended()
    async with delivering(spark, space, tmp_path) as last:
        await last.caught_up()
    boxes = await read_all({"bob": bob, "cal": cal})
    await check(space, {"bob": bob, "cal": cal}, boxes)
    assert len(boxes["cal"].records) == said > 20


async def talk_until(ada: AgentClient, space: RealSpace, frames: int, more: int) -> int:
    """Talk until so many more frames were written, and some more. Answers how much was said."""
    said = 0

    async def written() -> int:
        return int((await js.info(space.subjects.delivery_stream))["state"]["last_seq"])

    async def talk() -> None:
        nonlocal said
        await say(ada, f"team.{said % 5}", str(said))
        said += 1

    async def enough() -> bool:
        await talk()
        return await written() >= before + frames

    async with space.core() as js:
        before = await written()
        await eventually(enough, within=60, what=f"{frames} frames after {before}")
        for _ in range(more):
            await talk()
    return said
