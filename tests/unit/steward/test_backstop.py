"""How late durable copies are, by the steward's own clock, and when that is worth a word."""

import asyncio

import pytest

from tidings.server.state import Entry
from tidings.steward.backstop import BEAT_KEY, FLOOR_KEY, MOST_WAITING, BackstopWatch
from tidings.wire.roster import TOLERATED_S, Backstop


class Scene:
    """A state bucket, a clock, and a pipeline that beats whenever it is looked at."""

    def __init__(self) -> None:
        self.now, self.floor, self.looks = 1_000.0, 0, 0
        self.beat: dict[str, bool] = {}
        self.is_starting = False
        self.watch = BackstopWatch(self, lambda: self.now, lambda: self.is_starting)  # type: ignore[arg-type]

    async def get(self, key: str) -> Entry | None:
        self.looks += 1
        beat, floor = Entry(self.looks, dict(self.beat), 0), Entry(1, {"seq": self.floor}, 0)
        return beat if key == BEAT_KEY else floor if key == FLOOR_KEY else None

    def after(self, seconds: float, head: int, floor: int) -> Backstop:
        self.now, self.floor = self.now + seconds, floor
        asyncio.run(self.watch.look())
        return self.watch.fact(head)


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    made.after(0, 10, 10)
    made.after(2, 10, 10)
    return made


def test_a_pipeline_that_beats_without_a_query_does_not_run(scene: Scene) -> None:
    scene.beat = {"query": False}
    assert not scene.after(1, 10, 10).running
    scene.beat = {"query": True}
    assert scene.after(1, 10, 10).running


def test_one_that_is_being_started_is_not_called_absent(scene: Scene) -> None:
    scene.beat = {"released": True}
    assert scene.after(1, 10, 10).delay == "durable delivery is not running: durable copies delayed"
    scene.is_starting = True
    assert scene.after(1, 12, 10).delay == "durable delivery is starting: durable copies delayed, 2 behind"
    scene.beat = {}
    known = scene.after(1, 12, 12)
    assert (known.running, known.starting, known.delay) == (True, False, ""), "the supervisor hears of it later"


def test_copies_that_always_lag_a_little_are_not_late_however_long_that_goes_on(scene: Scene) -> None:
    for n in range(30):
        known = scene.after(1, 20 + 5 * n, 15 + 5 * n)
        assert (known.running, known.behind, known.delay) == (True, 5, "")


def test_one_record_that_waits_longer_than_is_tolerated_is_late_and_delivered_it_is_forgotten(scene: Scene) -> None:
    assert scene.after(1, 11, 10).delay == ""
    assert scene.after(TOLERATED_S - 1, 12, 10).delay == ""
    known = scene.after(1, 13, 10)
    assert (known.late_s, known.delay) == (TOLERATED_S, "durable copies delayed, 3 behind")
    assert scene.after(1, 13, 12).late_s == 1.0, "13 is known since the last look"
    assert scene.after(1, 13, 13) == Backstop(True, 0, 13)


def test_a_backstop_that_stands_still_is_timed_from_the_first_record_it_left_and_what_is_kept_is_bounded(
    scene: Scene,
) -> None:
    for n in range(10 * MOST_WAITING):
        known = scene.after(1, 11 + n, 10)
    assert known.late_s == 10 * MOST_WAITING - 1
    assert len(scene.watch._waiting) <= MOST_WAITING


async def test_whoever_asks_while_somebody_looks_hears_what_was_found() -> None:
    """Not half of it: that it runs, and not how far it is."""
    scene, read = Scene(), asyncio.Event()
    beats = 0

    async def get(key: str) -> Entry | None:
        nonlocal beats
        if key == BEAT_KEY:
            beats += 1
            return Entry(beats, {}, 0)
        await read.wait()
        return Entry(1, {"seq": 7}, 0) if key == FLOOR_KEY else None

    scene.get = get  # type: ignore[method-assign]
    read.set()
    await scene.watch.look()
    scene.watch._floor = None  # as before the first floor was written
    read.clear()
    scene.now += 2
    first = asyncio.create_task(scene.watch.look())
    await asyncio.sleep(0)
    second = asyncio.create_task(scene.watch.look())
    await asyncio.sleep(0.01)
    assert not second.done()
    read.set()
    await asyncio.gather(first, second)
    assert (scene.watch.fact(10).running, scene.watch.fact(10).behind) == (True, 3)
