"""Tasks over a link, by seeds: every task has its end where it was asked, and is begun once."""

import itertools
from collections.abc import Mapping

import pytest

from tidings.links import task_sync
from tools import linked_tasks
from tools.linked_tasks import TaskWorld

Patch = pytest.MonkeyPatch


def live(seed: int, monkeypatch: Patch) -> TaskWorld:
    world = TaskWorld(seed)
    monkeypatch.setattr(task_sync, "milliseconds", lambda: int(world.now * 1000))
    try:
        world.live()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return world


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_every_task_has_its_end_where_it_was_asked_and_is_begun_once(first: int, monkeypatch: Patch) -> None:
    for seed in range(first, first + 50):
        live(seed, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(200, 5_000, 400))
def test_they_have_on_thousands_of_seeds(first: int, monkeypatch: Patch) -> None:
    for seed in range(first, first + 400):
        live(seed, monkeypatch)


def test_the_lives_hold_what_they_are_meant_to(monkeypatch: Patch) -> None:
    begun = forgotten = dead = 0
    for seed in range(20):
        world = live(seed, monkeypatch)
        begun += world.begun.total()
        forgotten += len(world.forgotten)
        dead += sum(state == "dead" for state in world.there.ended.values())
    assert begun > 400
    assert forgotten > 5
    assert dead > 20


async def test_a_task_that_one_page_holds_several_times_is_queued_once_as_a_minute_ends(monkeypatch: Patch) -> None:
    minutes = itertools.count(1)
    monkeypatch.setattr(task_sync, "milliseconds", lambda: next(minutes) * 60_000)
    world = TaskWorld(0)
    world.faulty, world.refused = False, set()
    queued: list[str] = []
    put_task = world.here.put_task

    async def put(role: str, sender: str, payload: bytes, headers: Mapping[str, str]) -> int:
        queued.append(headers["Nats-Msg-Id"])
        return await put_task(role, sender, payload, headers)

    monkeypatch.setattr(world.here, "put_task", put)
    world.there.queue = [linked_tasks.TASKS[0]] * 3
    await world.round.run()
    assert len(queued) == 1


def _never_told(monkeypatch: Patch) -> None:
    async def silent(*_arguments: object) -> None:
        return None

    monkeypatch.setattr(task_sync.TaskRound, "_tell", silent)


def _forgotten_at_once(monkeypatch: Patch) -> None:
    monkeypatch.setattr(task_sync, "find_tasks", lambda *_arguments: {})
    monkeypatch.setattr(linked_tasks.WorkersSpace, "_verdict", lambda *_arguments: "take")


def _queued_again_when_ended(monkeypatch: Patch) -> None:
    begin = linked_tasks.WorkersSpace._store

    def anew(self: linked_tasks.WorkersSpace, task: str, message_id: str) -> dict[str, object]:
        self.queue.pop(task, None)
        return begin(self, task, message_id)

    monkeypatch.setattr(linked_tasks.WorkersSpace, "_store", anew)
    _forgotten_at_once(monkeypatch)


@pytest.mark.parametrize("broken", [_never_told, _queued_again_when_ended])
def test_a_broken_rule_of_tasks_is_found(broken: object, monkeypatch: Patch) -> None:
    assert callable(broken)
    broken(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        _live_all(40, monkeypatch)


def _live_all(count: int, monkeypatch: Patch) -> None:
    for seed in range(count):
        live(seed, monkeypatch)
