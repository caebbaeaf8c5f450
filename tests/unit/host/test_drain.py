"""The drain with outlets that do as they are told, over the real SQL: order, turns, doubt, verification, cancelling."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hosted import draft
from tidings.client.publishing import Kind, Prepared, Stored
from tidings.errors import DeniedError, OutcomeUnknown, Reconnecting, StewardUnreachable, StoreFull
from tidings.host import drain as drains
from tidings.host import outbox_views
from tidings.host.agent_sessions import AgentSession, SessionPublisher
from tidings.host.drain import SpaceDrain
from tidings.host.outbox import Lane, LogPosition, OutboxRow, OutboxStore, Terms
from tidings.host.schema import SCHEMA
from tidings.server.streams import stream_specs
from tidings.util.backoff import Backoff
from tidings.util.database import Database
from tidings.wire.subjects import Subjects
from tidings_testing.waiting import eventually

TERMS = Terms("this run", backoff=Backoff(first=10, longest=40))
DAY = 86_400_000


class Broker:
    """What a space would be: a log of ids, and what it was told to do with each."""

    def __init__(self) -> None:
        self.run = "run 1"
        self.log: list[str] = []
        self.asked: list[str] = []
        self.looked: list[str] = []
        #: what was asked for together
        self.looks: list[list[str]] = []
        #: id -> what publishing it raises, the first times
        self.fails: dict[str, list[Exception]] = {}
        #: ids that are taken only when this is set
        self.holds: dict[str, asyncio.Event] = {}
        self.steward_away = False
        self.at_work: dict[str, int] = {}
        self.most_at_work = 0
        self.lanes_at_work = 0

    # the ways out of it
    def of(self, _space: str, _sender: str) -> Broker:
        return self

    def any_of(self, _space: str) -> Broker:
        return self

    @property
    def incarnation(self) -> str:
        return self.run

    async def prove(self) -> str:
        return self.run

    async def publish(self, prepared: Prepared, incarnation: str, timeout: float) -> Stored:  # noqa: ARG002
        if incarnation != self.run:
            raise Reconnecting("another run")
        self.asked.append(prepared.id)
        lane = prepared.subject
        self.at_work[lane] = self.at_work.get(lane, 0) + 1
        self.most_at_work = max(self.most_at_work, self.at_work[lane])
        self.lanes_at_work = max(self.lanes_at_work, sum(self.at_work.values()))
        try:
            await asyncio.sleep(0)
            if prepared.id in self.holds:
                await self.holds[prepared.id].wait()
            if self.fails.get(prepared.id):
                raise self.fails[prepared.id].pop(0)
        finally:
            self.at_work[lane] -= 1
        self.log.append(prepared.id)
        return Stored(len(self.log), False, self.run)

    async def is_stored(self, prepared: Prepared, seq: int) -> bool:
        if self.steward_away:
            raise StewardUnreachable("away")
        return seq <= len(self.log) and self.log[seq - 1] == prepared.id

    async def find_stored(self, prepared: Prepared, since: float) -> int | None:  # noqa: ARG002
        self.looked.append(prepared.id)
        if self.steward_away:
            raise StewardUnreachable("away")
        return self.log.index(prepared.id) + 1 if prepared.id in self.log else None

    async def which_stored(self, kind: Kind, destination: str, ids: list[str], since: float) -> set[str]:  # noqa: ARG002
        self.looks.append(ids)
        if self.steward_away:
            raise StewardUnreachable("away")
        return set(ids) & set(self.log)


class Clock:
    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[OutboxStore]:
    """Its clock goes on by itself, so that pauses end."""
    database = Database(tmp_path / "host.db", SCHEMA, clock=lambda: clock() + time.monotonic())
    yield OutboxStore(database, TERMS, lambda: int(time.monotonic() * 1000))
    database.close()


@asynccontextmanager
async def draining(store: OutboxStore, broker: Broker, lanes: int = 64) -> AsyncIterator[SpaceDrain]:
    drain = SpaceDrain("main", store, broker, 50, lanes=lanes, publish_within=5.0)
    await store.meet("main", broker.run)
    drain.start()
    try:
        yield drain
    finally:
        await drain.stop()


def lane(to: str) -> Lane:
    return Lane("main", "ada", "dm", to)


async def accept(store: OutboxStore, *ids: str, to: str = "bob", **changed: object) -> list[int]:
    return [(await store.accept(draft(each, lane(to), **changed))).row.row for each in ids]


async def states(store: OutboxStore) -> dict[str, str]:
    return {row.id: row.state for row in await store.read(outbox_views.listed, limit=10_000)}


async def until(store: OutboxStore, *wanted: str) -> None:
    async def found() -> bool:
        return set((await states(store)).values()) <= set(wanted)

    await eventually(found, what=f"every row is {' or '.join(wanted)}")


async def test_lanes_leave_side_by_side_and_each_in_its_order(store: OutboxStore) -> None:
    broker = Broker()
    for number in range(15):
        for to in ("bob", "eve", "zoe"):
            await accept(store, f"{to} {number:02}", to=to)
    async with draining(store, broker):
        await until(store, "confirmed", "done")
    for to in ("bob", "eve", "zoe"):
        assert [each for each in broker.log if each.startswith(to)] == [f"{to} {n:02}" for n in range(15)]
    assert broker.most_at_work == 1, "one row of a lane at a time"
    assert broker.lanes_at_work > 1, "several lanes at a time"
    assert len(broker.log) == 45


async def test_more_lanes_than_turns_all_get_one(store: OutboxStore) -> None:
    broker = Broker()
    for number in range(60):
        await accept(store, f"first {number}", f"second {number}", to=f"peer{number}")
    async with draining(store, broker, lanes=4):
        await until(store, "confirmed", "done")
    assert len(broker.log) == 120
    assert broker.lanes_at_work <= 4


async def test_a_lane_that_made_room_for_others_goes_on_when_they_are_through(
    store: OutboxStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was confirmed without its next row, because others waited; by then they had their turn."""
    broker, answer, held = Broker(), store.confirmed_and_next, asyncio.Event()

    async def late(row: OutboxRow, place: LogPosition, *, go_on: bool) -> Any:
        if row.id == "one":
            await held.wait()
        return await answer(row, place, go_on=go_on)

    monkeypatch.setattr(store, "confirmed_and_next", late)
    await accept(store, "one", "two", to="bob")
    await accept(store, "to cal", to="cal")
    await accept(store, "to dee", to="dee")
    async with draining(store, broker, lanes=2) as drain:
        await eventually(lambda: "to dee" in broker.log and not drain._crowded)
        await eventually(lambda: len(drain._carrying) == 1)
        held.set()
        await until(store, "confirmed", "done")
    assert broker.log[-1] == "two"


async def test_what_is_accepted_while_it_sleeps_leaves_at_once_and_a_stuck_lane_holds_up_nobody(
    store: OutboxStore,
) -> None:
    broker = Broker()
    broker.holds["stuck"] = asyncio.Event()
    async with draining(store, broker) as drain:
        await accept(store, "stuck", "behind it", to="bob")
        drain.wake()
        await eventually(lambda: "stuck" in broker.asked)
        await accept(store, "another lane", to="eve")
        drain.wake()
        await eventually(lambda: broker.log == ["another lane"])
        broker.holds["stuck"].set()
        await until(store, "confirmed", "done")
    assert broker.log == ["another lane", "stuck", "behind it"]


async def test_a_failure_that_passes_keeps_the_order_and_one_that_does_not_ends_its_row_only(
    store: OutboxStore,
) -> None:
    broker = Broker()
    broker.fails = {"one": [OutcomeUnknown("no answer")] * 3, "two": [DeniedError("may not")]}
    await accept(store, "one", "two", "three")
    async with draining(store, broker):
        await until(store, "confirmed", "done", "dead")
    assert broker.log == ["one", "three"]
    assert (await store.read(outbox_views.show, 2)).code == "denied"


async def test_what_comes_due_while_the_drain_asks_when_to_wake_is_not_slept_through(
    store: OutboxStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pause is over by the time the question is answered, and it was not when the drain looked."""
    answer = store.next_due
    broker = Broker()
    broker.fails = {"one": [OutcomeUnknown("no answer")] * 3}
    await accept(store, "one")
    async with draining(store, broker) as drain:

        async def late(space: str, since: int) -> int | None:
            if not drain._carrying:  # nothing will end, and wake it
                await asyncio.sleep(2 * TERMS.backoff.bound / 1000)
            return await answer(space, since)

        monkeypatch.setattr(store, "next_due", late)
        await until(store, "confirmed", "done")
    assert broker.asked.count("one") == 4


async def test_a_row_whose_attempt_had_no_answer_is_looked_for_before_it_is_sent_again(store: OutboxStore) -> None:
    """The broker's own deduplication may have forgotten it."""
    broker = Broker()
    await accept(store, "arrived", "did not", to="bob")
    await accept(store, "never tried", to="eve")
    earlier = OutboxStore(store.database, Terms("an earlier run"), store.tick)
    (leased,) = await earlier.take(lane=lane("bob"))
    broker.log.append(leased.row.id)
    assert await store.recover() == 1
    async with draining(store, broker):
        await until(store, "confirmed", "done")
    assert broker.looked == ["arrived"]
    assert sorted(broker.log) == ["arrived", "did not", "never tried"], "each once"
    assert "arrived" not in broker.asked


async def test_a_doubtful_row_waits_alone_for_the_steward_once_the_broker_has_forgotten_its_id(
    store: OutboxStore, clock: Clock
) -> None:
    broker = Broker()
    broker.steward_away = True
    broker.fails = {"doubtful": [OutcomeUnknown("no answer")]}
    await accept(store, "doubtful", to="bob")
    async with draining(store, broker) as drain:
        await until(store, "confirmed", "done")
        assert broker.looked == ["doubtful"]
        assert broker.log == ["doubtful"], "within the window the broker itself knows its ids"
        broker.fails = {"old": [OutcomeUnknown("no answer")]}
        broker.holds["old"] = asyncio.Event()
        await accept(store, "old", to="bob")
        drain.wake()
        await eventually(lambda: "old" in broker.asked)
        clock.now += 3_600
        broker.holds["old"].set()
        await accept(store, "other lane", to="eve")
        drain.wake()
        await eventually(lambda: broker.looked.count("old") >= 2)
        await eventually(lambda: "other lane" in broker.log)
        assert broker.asked.count("old") == 1
        broker.steward_away = False
        drain.wake()
        await until(store, "confirmed", "done")
    assert broker.log.count("old") == 1


async def test_what_waited_longer_than_the_broker_remembers_is_looked_for_once_for_all_of_its_lane(
    store: OutboxStore, clock: Clock
) -> None:
    """A program that was not answered may have sent it itself, under its id."""
    broker = Broker()
    ids = [f"row {number:04}" for number in range(300)]
    await accept(store, *ids)
    broker.log.append("row 0200")
    clock.now += 3_600
    await accept(store, "young", to="eve")
    async with draining(store, broker):
        await until(store, "confirmed", "done")
    assert sorted(broker.log) == sorted([*ids, "young"]), "each once"
    assert broker.looks == [ids], "one look is enough for three hundred rows, and none for a young one"
    assert broker.looked == ["row 0200"]


def test_what_is_not_looked_for_the_broker_still_knows_when_it_is_published() -> None:
    specs = stream_specs(Subjects("main"), 2**30, "epoch")
    for name in ("LOG_main", "DM_main", "TASK_main"):
        (known,) = [spec.config["duplicate_window"] / 1e6 for spec in specs if spec.name == name]
        on_the_way = 1000 * (drains.LOOK_WITHIN + drains.PUBLISH_WITHIN)
        assert known > drains.WINDOW_MS + on_the_way + drains.CLOCK_SLACK_MS
    assert TERMS.lease > 1000 * (drains.TURN_WITHIN + drains.LOOK_WITHIN + drains.PUBLISH_WITHIN)


async def test_a_row_from_before_the_clock_was_put_back_is_looked_for(
    store: OutboxStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock it is young, and the broker has long forgotten its id."""
    broker = Broker()
    broker.holds["first"] = asyncio.Event()
    await accept(store, "first", "before", to="bob")
    async with draining(store, broker) as drain:
        await eventually(lambda: "first" in broker.asked)
        monkeypatch.setattr(store, "tick", lambda: int(time.monotonic() * 1000) + 3_600_000)
        clock.now += 30  # an hour went by, and the clock was put back by nearly as much
        broker.log.append("before")
        broker.holds["first"].set()
        await until(store, "confirmed", "done")
        assert broker.log == ["before", "first"], "each once"
        clock.now += 3_600
        await accept(store, "after", to="bob")
        drain.wake()
        await until(store, "confirmed", "done")
    assert broker.looks == [["before"]], "what came when the clock was past that again is young"


async def test_lanes_that_wait_for_their_turn_to_be_looked_for_are_as_they_were(
    store: OutboxStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of them was sent: looked for one by one they would wait even longer."""
    monkeypatch.setattr(drains, "TURN_WITHIN", 0.05)
    broker, answer = Broker(), asyncio.Event()
    plain = broker.which_stored

    async def slow(*asked: Any) -> set[str]:
        await answer.wait()
        return await plain(*asked)

    monkeypatch.setattr(broker, "which_stored", slow)
    rows = [(await accept(store, f"for {to}", to=to))[0] for to in ("bob", "eve", "zoe")]
    clock.now += 3_600

    async def refused() -> bool:
        return [(await store.read(outbox_views.show, row)).code for row in rows].count("not_looked_for") >= 2

    async with draining(store, broker):
        await eventually(refused, what="two wait for the third")
        assert {(await store.read(outbox_views.show, row)).doubt for row in rows} == {0}
        answer.set()
        await until(store, "confirmed", "done")
    assert broker.looked == []
    assert sorted(broker.log) == ["for bob", "for eve", "for zoe"]


async def test_a_look_has_its_whole_time_however_long_it_waited_for_its_turn(
    store: OutboxStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drains, "LOOK_WITHIN", 0.5)
    broker = Broker()
    plain = broker.which_stored

    async def slow(*asked: Any) -> set[str]:
        await asyncio.sleep(0.3)
        return await plain(*asked)

    monkeypatch.setattr(broker, "which_stored", slow)
    rows = [(await accept(store, f"for {to}", to=to))[0] for to in ("bob", "eve", "zoe")]
    clock.now += 3_600
    async with draining(store, broker):
        await until(store, "confirmed", "done")
    assert {(await store.read(outbox_views.show, row)).attempts for row in rows} == {1}, "none was given up"


async def test_a_drain_of_few_lanes_waits_for_one_of_them_and_does_not_ask_for_nothing(
    store: OutboxStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, taken = Broker(), list[int]()
    take = store.take_and_look

    async def counted(free: int, lane: Lane) -> Any:
        taken.append(free)
        return await take(free, lane)

    monkeypatch.setattr(store, "take_and_look", counted)
    for to in ("bob", "eve", "zoe"):
        broker.holds[f"for {to}"] = asyncio.Event()
        await accept(store, f"for {to}", to=to)
    async with draining(store, broker, lanes=2):
        await eventually(lambda: len(broker.asked) == 2)
        await store.read(outbox_views.counts)  # a turn of the database: it would have asked again by now
        for held in broker.holds.values():
            held.set()
        await until(store, "confirmed", "done")
    assert 0 not in taken


async def test_a_look_counts_only_while_the_broker_knows_what_was_stored_after_it(
    store: OutboxStore, clock: Clock
) -> None:
    broker = Broker()
    broker.holds["two"] = asyncio.Event()
    await accept(store, "one", "two", "three")
    clock.now += 3_600
    async with draining(store, broker):
        await eventually(lambda: "two" in broker.asked)
        clock.now += 600
        broker.log.append("three")
        broker.holds["two"].set()
        await until(store, "confirmed", "done")
    assert broker.looks == [["one", "three", "two"], ["three"]]
    assert broker.log.count("three") == 1


async def test_an_id_that_was_made_long_before_it_was_handed_over_is_looked_for(
    store: OutboxStore, clock: Clock
) -> None:
    broker = Broker()
    made = f"{int((clock() - 3_600) * 1000):012x}"
    mid = f"{made[:8]}-{made[8:]}-7000-8000-000000000000"
    broker.log.append(mid)
    await accept(store, mid, fingerprint=mid.encode()[:32])
    async with draining(store, broker):
        await until(store, "confirmed", "done")
    assert broker.log == [mid]


async def test_what_may_have_gone_another_way_waits_alone_for_the_steward(store: OutboxStore, clock: Clock) -> None:
    broker = Broker()
    broker.steward_away = True
    await accept(store, "old")
    clock.now += 3_600
    await accept(store, "young", to="eve")
    async with draining(store, broker) as drain:
        await eventually(lambda: broker.looks and "young" in broker.log)
        assert broker.asked == ["young"]
        broker.log.append("old")
        broker.steward_away = False
        drain.wake()
        await until(store, "confirmed", "done")
    assert broker.log == ["young", "old"]


@pytest.mark.parametrize(("answer", "state"), [(None, "confirmed"), (OutcomeUnknown("no answer"), "cancelled")])
async def test_what_is_cancelled_on_its_way_is_what_its_answer_says(
    store: OutboxStore, answer: Exception | None, state: str
) -> None:
    broker = Broker()
    broker.holds["one"] = asyncio.Event()
    broker.fails = {"one": [answer] if answer else []}
    (row,) = await accept(store, "one")
    async with draining(store, broker):
        await eventually(lambda: broker.asked == ["one"])
        assert (await store.cancel(row)).state == "inflight"
        broker.holds["one"].set()
        await eventually(lambda: is_in(store, row, state, "done" if state == "confirmed" else state))
    assert len(broker.asked) == 1


async def test_an_acknowledgement_after_the_cancel_is_noted_and_changes_nothing(
    store: OutboxStore, clock: Clock
) -> None:
    """Its lease had ended and it was cancelled; only then the broker answered."""
    broker = Broker()
    broker.holds["one"] = asyncio.Event()
    (row,) = await accept(store, "one")
    async with draining(store, broker) as drain:
        await eventually(lambda: broker.asked == ["one"])
        await store.cancel(row)
        clock.now += TERMS.lease / 1000 + 1
        drain.wake()
        await eventually(lambda: is_in(store, row, "cancelled"))
        assert (await store.read(outbox_views.show, row)).late_seq is None
        broker.holds["one"].set()
        await eventually(lambda: has_late(store, row))
    assert (await store.read(outbox_views.show, row)).state == "cancelled"
    assert (broker.log, broker.asked) == (["one"], ["one"])


async def has_late(store: OutboxStore, row: int) -> bool:
    return (await store.read(outbox_views.show, row)).late_seq == 1


async def is_in(store: OutboxStore, row: int, *wanted: str) -> bool:
    return (await store.read(outbox_views.show, row)).state in wanted


async def test_what_another_run_lost_is_sent_again_before_what_follows_it(store: OutboxStore) -> None:
    broker = Broker()
    drain = SpaceDrain("main", store, broker, 600_000, lanes=8)
    await store.meet("main", "run 1")
    drain.start()
    await accept(store, "kept", "lost 1", "lost 2")
    drain.wake()
    await until(store, "confirmed")
    broker.run = "run 2"
    del broker.log[1:]
    broker.log.append("somebody else's")
    await accept(store, "after it")
    await store.meet("main", "run 2")
    drain.wake()
    await drain.verify("ada", "run 2")
    await until(store, "confirmed")
    await drain.stop()
    assert broker.log == ["kept", "somebody else's", "lost 1", "lost 2", "after it"]
    assert {row.incarnation for row in await store.read(outbox_views.listed)} == {"run 2"}


async def test_nothing_is_done_before_the_broker_still_ran_a_horizon_later(store: OutboxStore) -> None:
    broker = Broker()
    proofs = 0

    async def prove() -> str:
        nonlocal proofs
        proofs += 1
        return "another run" if proofs <= 2 else broker.run

    broker.prove = prove  # type: ignore[method-assign]
    await accept(store, "one")
    async with draining(store, broker) as drain:
        await until(store, "confirmed")
        await eventually(lambda: proofs >= 1)
        assert await states(store) == {"one": "confirmed"}, "the run that answered did not confirm it"

        def poked() -> bool:
            drain._unreleased.set()
            return proofs >= 3

        await eventually(poked)
        await until(store, "done")


async def test_a_horizon_is_measured_from_the_confirmation_of_each_row(store: OutboxStore) -> None:
    ticks, proofs = 1_000, 0
    store.tick = lambda: ticks
    broker = Broker()

    async def prove() -> str:
        nonlocal proofs
        proofs += 1
        return broker.run

    broker.prove = prove  # type: ignore[method-assign]
    await accept(store, "one")
    async with draining(store, broker):
        await until(store, "confirmed")
        before = proofs
        await eventually(lambda: proofs >= before + 3, what="the broker is asked again")
        assert await states(store) == {"one": "confirmed"}
        ticks += 50
        await until(store, "done")


def test_an_outlet_answers_only_for_the_run_of_the_broker_that_the_outbox_has_met() -> None:
    connected = SimpleNamespace(transport=SimpleNamespace(incarnation="run 1"))
    outlet = SessionPublisher(cast("AgentSession", SimpleNamespace(endpoint=connected, agent="ada", space="main")))
    with pytest.raises(Reconnecting):
        _ = outlet.incarnation
    outlet.met = "run 1"
    assert outlet.incarnation == "run 1"
    for now in ("run 2", None):
        connected.transport.incarnation = now
        with pytest.raises(Reconnecting):
            _ = outlet.incarnation


async def test_what_is_too_old_is_not_sent(store: OutboxStore, clock: Clock) -> None:
    broker = Broker()
    await accept(store, "old", max_age=1_000)
    clock.now += 3_600
    await accept(store, "young", max_age=DAY)
    async with draining(store, broker):
        await until(store, "dead", "confirmed", "done")
    assert broker.asked == ["young"]
    assert (await store.read(outbox_views.show, 1)).code == "too_old"


@pytest.mark.parametrize("failure", [StoreFull("no room"), sqlite3.OperationalError("out of memory")])
async def test_a_store_that_fails_for_a_while_ends_nothing(
    store: OutboxStore, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    broker, real, refused = Broker(), store.take_and_look, 0

    async def full(*arguments: object, **named: object) -> object:
        nonlocal refused
        refused += 1
        if refused <= 2:
            raise failure
        return await real(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "take_and_look", full)
    monkeypatch.setattr(drains, "STORE_RETRY", Backoff(0.01, 15.0))
    await accept(store, "one")
    async with draining(store, broker):
        await until(store, "confirmed", "done")
    assert refused >= 3
    assert broker.log == ["one"]


# --------------------------------------------------------------------------------------------- nothing is slept through


async def test_lanes_whose_wait_ends_while_the_drain_goes_to_sleep_leave_at_once(
    store: OutboxStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something is confirmed, so nobody waits for the space any more: between what was taken and when to look again."""
    monkeypatch.setattr(drains, "LOOK_EVERY", 3_600.0)
    broker, real = Broker(), store.next_due
    broker.holds["to eve"] = asyncio.Event()
    broker.fails["to bob"] = [Reconnecting("away")]
    for to in ("bob", "eve"):
        await accept(store, f"to {to}", to=to)

    async def confirmed_meanwhile(space: str, since: int) -> int | None:
        if await store.read(outbox_views.blocks) and not broker.holds["to eve"].is_set():
            broker.holds["to eve"].set()
            await eventually(lambda: _is_confirmed(store, "to eve"))
        return await real(space, since)

    monkeypatch.setattr(store, "next_due", confirmed_meanwhile)
    async with draining(store, broker):
        await until(store, "confirmed", "done")
    assert broker.log == ["to eve", "to bob"]


async def _is_confirmed(store: OutboxStore, message: str) -> bool:
    return (await states(store))[message] in ("confirmed", "done")


class MoodyBroker(Broker):
    """Answers after a while or at once, and fails now and then in the ways that pass."""

    def __init__(self, luck: random.Random) -> None:
        super().__init__()
        self.luck, self.slow, self.frail = luck, luck.choice((0.0, 0.0, 0.01)), luck.choice((0.0, 0.02, 0.2))

    async def publish(self, prepared: Prepared, incarnation: str, timeout: float) -> Stored:
        if self.slow:
            await asyncio.sleep(self.luck.uniform(0, self.slow))
        if self.luck.random() < self.frail:
            raise self.luck.choice((OutcomeUnknown("no answer"), Reconnecting("away"), StewardUnreachable("away")))
        return await super().publish(prepared, incarnation, timeout)


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 300))])
async def test_everything_leaves_by_itself_whatever_the_lanes_the_turns_and_the_failures(
    store: OutboxStore, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Nothing waits for the look that a jumping clock needs."""
    monkeypatch.setattr(drains, "LOOK_EVERY", 3_600.0)
    luck = random.Random(seed)
    broker, turns = MoodyBroker(luck), luck.choice((1, 2, 5, 16, 64, 256))
    peers = [f"peer{number}" for number in range(luck.choice((1, 3, turns, turns + 1, 2 * turns)))]
    rows = [(f"{to} {number:03}", to) for to in peers for number in range(luck.choice((1, 1, 2, 8)))]
    luck.shuffle(rows)
    rows.sort(key=lambda row: row[0].split()[1])  # each lane in its order, the lanes mixed
    early = luck.randint(0, len(rows))
    await asyncio.gather(*(accept(store, each, to=to) for each, to in rows[:early]))
    async with draining(store, broker, lanes=turns) as drain:
        for each, to in rows[early:]:
            await accept(store, each, to=to)
            drain.wake()
        await until(store, "confirmed", "done")
    assert broker.lanes_at_work <= turns
    for to in peers:
        sent = [each for each in broker.log if each.split()[0] == to]
        assert sent == sorted(sent)
