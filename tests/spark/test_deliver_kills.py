"""A deliver job that is really killed, or really paused, and what the next one makes of what it left.

The one that dies is a process with a JVM of its own, as `tidings up` starts it; the next one runs here, from the same
checkpoint and lake. Between the two access changes: the second attempt judges what the first one planned.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tidings
from crowd import Crowd, check, clients, join, narrow, read_all, revoke, say, set_class
from tidings.testing import processes
from tidings.testing.delivering import delivering, owed
from tidings.testing.real_space import AgentClient, RealSpace

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]
POINTS = ("deliver.read", "deliver.published", "deliver.recorded", "deliver.floor")
JVM_SECONDS = 90.0


def job_process(space: RealSpace, root: Path, failpoint: str) -> AbstractAsyncContextManager[processes.Child]:
    """The same job as `delivering`, in a process of its own."""
    place = ("--home", space.home.home, "--space", space.home.name, "--master", "local[1]", "--lease-ttl", "1")
    kept = ("--checkpoint", root / "checkpoint", "--lake", root / "lake")
    return processes.child("-m", "tidings.pipeline.child", *place, *kept, failpoint=failpoint)


async def killed_at(point: str, space: RealSpace, root: Path) -> None:
    """A job that runs until it kills itself there."""
    async with job_process(space, root, f"{point}:kill") as job:
        assert await job.ended(JVM_SECONDS) == -signal.SIGKILL, await job.last_line()


class Listener:
    """Cal, who comes and goes, and remembers in a file what was settled."""

    def __init__(self, space: RealSpace, state: Path) -> None:
        self._space, self._state = space, state
        self.id = ""
        self.heard: list[int] = []

    def _endpoint(self) -> tidings.Endpoint:
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

    async def _is_done(self, cal: tidings.Endpoint) -> bool:
        stream = self._space.subjects.delivery_stream
        async with self._space.core() as js:
            info = await js.api(f"CONSUMER.INFO.{stream}.dlv_{self.id}")
        return not (info["num_pending"] or info["num_ack_pending"] or len(cal.inbox))


async def frames_of(space: RealSpace, owner: str) -> int:
    async with space.core() as js:
        body = {"subjects_filter": space.subjects.delivery(owner)}
        answer = await js.api(f"STREAM.INFO.{space.subjects.delivery_stream}", body)
    return sum((answer["state"].get("subjects") or {}).values())


@pytest.mark.slow
@pytest.mark.parametrize("points", [POINTS[1:3], POINTS], ids=["two", "four"])
async def test_killed_with_9_at_one_point_after_the_other_exactly_what_is_owed_and_allowed_surfaces_once(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path, points: tuple[str, ...]
) -> None:
    """F6, F12, F28, F29, N10, N28: each job goes on from what a killed one left, under another access."""
    ada, bob, _, dan = crowd.values()
    cal = Listener(space, tmp_path / "cal.state")
    await cal.join("team.>")
    await join(dan, "team.>")
    for channel in ("team.0", "team.1"):
        await join(bob, channel)

    async def bob_may_read_less() -> None:
        await narrow(space, "bob", "team.1")

    async def cal_reads_what_is_there() -> None:
        await cal.listen("team.>")

    async def dan_is_revoked() -> None:
        assert await frames_of(space, dan.id)
        await revoke(space, "dan")

    changes = (bob_may_read_less, cal_reads_what_is_there, dan_is_revoked)
    for number, point in enumerate(points):
        for n in range(4):
            await say(ada, f"team.{n % 2}", f"{point} {n}")
        await killed_at(point, space, tmp_path)
        for change in changes[number : number + 1]:
            await change()
    async with delivering(spark, space, tmp_path) as job:
        await say(ada, "team.0", "after")
        await say(ada, "team.1", "after")
        await job.caught_up()
    truth = await owed(space)
    await cal.listen("team.>")
    assert len(truth[cal.id]) == 4 * len(points) + 2
    assert sorted(cal.heard) == sorted(truth[cal.id]), "everything, nothing else, nothing twice"
    async with clients(space, ["bob"]) as again:
        boxes = await read_all(again)
        await check(space, again, boxes)
    assert (boxes["bob"].channel("team.0"), len(boxes["bob"].records)) == ([], 2 * len(points) + 1)
    assert bool(await frames_of(space, dan.id)) == (len(points) < 3), "nothing lies there for one who was revoked"


@pytest.mark.slow
async def test_f20_a_holder_paused_past_its_lease_is_refused_by_the_broker_and_ends_and_the_next_one_is_exact(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path
) -> None:
    """F20, N9."""
    ada, bob, cal, _ = crowd.values()
    for agent in (bob, cal):
        await join(agent, "team.>")
    for n in range(6):
        await say(ada, f"team.{n % 2}", str(n))
    async with job_process(space, tmp_path, "deliver.read:pause") as first:
        while not (await first.line(JVM_SECONDS)).get("ready"):
            pass
        await processes.paused(first.pid, JVM_SECONDS)
        async with delivering(spark, space, tmp_path) as second:
            await second.caught_up()
            boxes = await read_all({"bob": bob, "cal": cal})
            first.signal(signal.SIGCONT)
            assert await first.ended(JVM_SECONDS) != 0
            assert (await first.last_line())["error"]["code"] == "lease_lost"
            await say(ada, "team.0", "after")
            await second.caught_up()
    await read_all({"bob": bob, "cal": cal}, boxes)
    await check(space, {"bob": bob, "cal": cal}, boxes)
    assert [boxes[name].repeats for name in ("bob", "cal")] == [0, 0]


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


@pytest.mark.slow
@pytest.mark.parametrize("change", [_narrowed, _revoked, _flipped, _nothing])
@pytest.mark.parametrize("point", [*POINTS, "deliver.frame"])
async def test_killed_with_9_anywhere_and_access_changed_in_between_everybody_has_exactly_what_is_owed_and_allowed(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path, point: str, change: Change
) -> None:
    """F6, F12, F29, N10."""
    ada, bob, cal, _ = crowd.values()
    for agent in (bob, cal):
        await join(agent, "team.>")
    for n in range(20):
        await say(ada, f"team.{n % 4}", str(n))
    await killed_at(point, space, tmp_path)
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
        assert await frames_of(space, bob.id) == 0


@pytest.mark.slow
async def test_jobs_killed_at_random_moments_leave_nothing_out_and_nothing_behind(
    spark: "SparkSession", space: RealSpace, crowd: Crowd, tmp_path: Path
) -> None:
    """Not at our points but at any: frames of several batches, debts and floors are somewhere on their way."""
    ada, bob, cal, _ = crowd.values()
    for agent in (bob, cal):
        await join(agent, "team.>")
    for pause in (0.1, 0.4, 0.9):
        async with job_process(space, tmp_path, "") as job:
            while not (await job.line(JVM_SECONDS)).get("ready"):
                pass
            posting = asyncio.create_task(_keep_talking(ada, 100))
            await asyncio.sleep(pause)  # where in its work the job is then is the chance this test takes
            job.signal(signal.SIGKILL)
            await job.ended()
            await posting
    async with delivering(spark, space, tmp_path) as last:
        await last.caught_up()
    boxes = await read_all({"bob": bob, "cal": cal})
    await check(space, {"bob": bob, "cal": cal}, boxes)
    assert len(boxes["cal"].records) == 300


async def _keep_talking(ada: AgentClient, count: int) -> None:
    for n in range(count):
        await say(ada, f"team.{n % 5}", str(n))
