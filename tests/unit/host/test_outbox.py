"""The outbox of a host, one sentence at a time; `test_outbox_model.py` mixes them all."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import tidings
from hosted import GENERAL, NOW, REFUSED, TERMS, draft
from tidings.errors import IdReused, UnknownMessage, WrongState
from tidings.host import outbox_transitions as moves
from tidings.host import outbox_views as views
from tidings.host.outbox import Lane, LogPosition, OutboxStore
from tidings.host.outcomes import Outcome
from tidings.host.schema import SCHEMA
from tidings.util.database import Database

AWAY = Outcome("broker_unreachable", "away", retryable=True, blocks="space")
LATER = Outcome("mailbox_full", "full", retryable=True, blocks="lane")
PLACE = LogPosition(7, "LOG", "server 1")


class Host(OutboxStore):
    """An outbox whose clocks the test holds."""

    def __init__(self, path: Path) -> None:
        self.clock, self.ticks = NOW, 1_000
        super().__init__(Database(path, SCHEMA, clock=lambda: self.clock / 1000), TERMS, lambda: self.ticks)

    def later(self, milliseconds: int) -> None:
        self.clock += milliseconds
        self.ticks += milliseconds

    async def taken(self, lane: Lane | None = None) -> list[str]:
        return [leased.row.id for leased in await self.take(lane=lane)]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path / "host.db")
    yield made
    made.database.close()


async def test_a_message_is_accepted_sent_confirmed_and_done(host: Host) -> None:
    accepted = await host.accept(draft("one"))
    assert (accepted.new, accepted.row.state) == (True, "pending")
    (leased,) = await host.take()
    assert (leased.payload, leased.signature, leased.row.subject) == (
        b"says one",
        "signed one",
        "td.main.ada.chat.general",
    )
    assert await host.confirmed(leased.row, PLACE) == "confirmed"
    assert await host.release("main", "server 1", host.ticks, 5_000) == 0
    host.later(5_000)
    assert await host.release("main", "server 2", host.ticks, 5_000) == 0
    assert await host.release("main", "server 1", host.ticks, 5_000) == 1
    assert await host.read(views.counts) == {("main", "done"): 1}
    host.later(1)
    assert await host.drop_payloads(0) == 1
    assert await host.read(views.payload, 1) is None
    with pytest.raises(IdReused):
        await host.accept(draft("one", fingerprint=b"x" * 32))
    assert not (await host.accept(draft("one"))).new


async def test_a_poison_row_ends_and_its_lane_goes_on(host: Host) -> None:
    for message_id in ("poison", "next"):
        await host.accept(draft(message_id))
    (leased,) = await host.take()
    assert await host.settle(leased.row, REFUSED) == "dead"
    assert await host.taken() == ["next"]


async def test_a_space_that_is_away_stalls_its_own_lanes_only_and_failures_together_count_once(host: Host) -> None:
    lanes = [Lane("main", "ada", "dm", f"peer{n}") for n in range(5)] + [Lane("side", "ada", "dm", "bob")]
    for lane in lanes:
        await host.accept(draft(f"to {lane.destination}", lane))
    leased = await host.take()
    for one in leased[:5]:
        await host.settle(one.row, AWAY)
    await host.settle(leased[5].row, LATER)
    (block,) = await host.read(views.blocks)
    assert (block.space, block.sender, block.failures, block.code) == ("main", "", 1, "broker_unreachable")
    assert await host.taken() == []
    host.later(500)
    assert len(await host.taken()) == 6
    assert len(await host.taken()) == 0


async def test_a_success_lifts_what_waited_for_it_and_a_decision_stays(host: Host) -> None:
    for peer in ("bob", "eve"):
        await host.accept(draft(peer, Lane("main", "ada", "dm", peer)))
    first, second = await host.take()
    await host.settle(first.row, AWAY)
    await host.block(Lane("main", "zoe"), "told_to", "wait")
    assert await host.confirmed(second.row, PLACE) == "confirmed"
    assert [block.sender for block in await host.read(views.blocks)] == ["zoe"]
    assert await host.taken() == ["bob"]


async def test_pauses_grow_while_a_space_stays_away(host: Host) -> None:
    await host.accept(draft("one"))
    pauses = []
    for _ in range(4):
        (leased,) = await host.take()
        await host.settle(leased.row, AWAY)
        (block,) = await host.read(views.blocks)
        assert block.until is not None
        pauses.append(block.until - host.clock)
        host.later(pauses[-1])
    assert pauses == [500, 1_000, 2_000, 4_000]


async def test_a_broker_that_comes_back_is_tried_at_once_when_it_was_unblocked(host: Host) -> None:
    await host.accept(draft("one"))
    (leased,) = await host.take()
    await host.settle(leased.row, AWAY)
    assert await host.unblock(Lane("main"))
    assert await host.taken() == ["one"]


async def test_a_late_acknowledgement_of_a_cancelled_row_is_noted_and_changes_nothing(host: Host) -> None:
    await host.accept(draft("one"))
    (leased,) = await host.take()
    assert (await host.cancel(leased.row.row)).state == "inflight"
    assert await host.settle(leased.row, LATER) == "cancelled"
    assert await host.confirmed(leased.row, PLACE) == "late"
    shown = await host.read(views.show, leased.row.row)
    assert (shown.state, shown.late_seq, shown.late_incarnation) == ("cancelled", 7, "server 1")


async def test_what_lands_together_is_answered_each_by_its_own(host: Host) -> None:
    lanes = [Lane("main", "ada", "dm", name) for name in ("bob", "eve", "joe")]
    for lane in lanes:
        await host.accept(draft(f"first to {lane.destination}", lane))
        await host.accept(draft(f"then to {lane.destination}", lane))
    bob, eve, joe = await host.take()
    await host.settle(eve.row, LATER)
    host.later(host.terms.lease // 2)
    (again,) = (leased for leased in await host.take() if leased.row.row == eve.row.row)
    commits = host.database.commits
    said = await asyncio.gather(
        host.confirmed_and_next(bob.row, PLACE, go_on=True),
        host.confirmed_and_next(eve.row, PLACE, go_on=True),
        host.confirmed_and_next(joe.row, PLACE, go_on=False),
    )
    assert host.database.commits == commits + 1
    assert [word for word, _ in said] == ["confirmed", "ignored", "confirmed"]
    assert [leased and leased.row.id for _, leased in said] == ["then to bob", None, None]
    shown = await host.read(views.show, eve.row.row)
    assert (shown.state, shown.attempts) == ("inflight", again.row.attempts), "an earlier attempt confirms nothing"


async def test_a_row_that_cannot_be_confirmed_keeps_no_other_from_it(host: Host) -> None:
    for name in ("bob", "eve"):
        await host.accept(draft(name, Lane("main", "ada", "dm", name)))
    bob, eve = await host.take()
    nowhere = LogPosition(None, "LOG", "server 1")  # type: ignore[arg-type]
    asked = (host.confirmed_and_next(each.row, place, go_on=False) for each, place in ((bob, nowhere), (eve, PLACE)))
    refused, fine = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(refused, sqlite3.IntegrityError)
    assert fine == ("confirmed", None)


async def test_a_cancel_that_came_too_late_says_the_truth(host: Host) -> None:
    await host.accept(draft("one"))
    (leased,) = await host.take()
    await host.cancel(leased.row.row)
    assert await host.confirmed(leased.row, PLACE) == "confirmed"
    assert (await host.cancel(leased.row.row)).state == "confirmed"


async def test_what_the_broker_lost_is_owed_again_before_what_came_after_it(host: Host) -> None:
    for message_id in ("one", "two", "three"):
        await host.accept(draft(message_id))
    await host.meet("main", "server 1")
    for seq in (1, 2):
        (leased,) = await host.take()
        await host.confirmed(leased.row, LogPosition(seq, "LOG", "server 1"))
    assert await host.meet("main", "server 2")
    assert await host.taken() == [], "three waits until one and two are verified"
    one, two = await host.to_verify("main", "server 2")
    assert await host.still_there(one, "server 2")
    assert await host.lost(two)
    assert not await host.lost(one), "it was verified meanwhile"
    assert await host.taken() == ["two"]


async def test_what_the_broker_lost_waits_for_the_one_in_flight_behind_it_and_other_lanes_go_on(host: Host) -> None:
    await host.accept(draft("one"))
    await host.accept(draft("two"))
    await host.meet("main", "server 1")
    (one,) = await host.take()
    await host.confirmed(one.row, PLACE)
    (two,) = await host.take()
    await host.meet("main", "server 2")
    (lost,) = await host.to_verify("main", "server 2")
    assert await host.lost(lost)
    await host.accept(draft("elsewhere", Lane("main", "ada", "dm", "bob")))
    assert await host.taken() == ["elsewhere"]
    await host.confirmed(two.row, LogPosition(8, "LOG", "server 2"))
    assert await host.taken() == ["one"]


async def test_what_was_confirmed_before_the_machine_started_again_is_kept_one_horizon_and_no_longer(
    host: Host,
) -> None:
    host.ticks = 9_000_000
    await host.accept(draft("one"))
    (leased,) = await host.take()
    await host.confirmed(leased.row, PLACE)
    host.ticks = 1_000
    await host.recover()
    assert await host.release("main", "server 1", 1_000 + 3_999, horizon=4_000) == 0
    assert (await host.read(views.show, leased.row.row)).state == "confirmed"
    assert await host.release("main", "server 1", 1_000 + 4_000, horizon=4_000) == 1
    assert (await host.read(views.show, leased.row.row)).state == "done"


async def test_a_requeued_row_goes_where_the_old_one_went_and_the_chain_is_walkable(host: Host) -> None:
    lane = Lane("main", "ada", "dm", "bob")
    await host.accept(draft("one", lane, priority="now", max_age=5_000))
    host.later(5_000)
    (old,) = await host.expire()
    assert (old.state, old.code) == ("dead", "too_old")
    new = await host.requeue(old.row, "two", b"says two", "signed two")
    assert await host.requeue(old.row, "two", b"says two", "signed two") == new
    with pytest.raises(WrongState, match="two"):
        await host.requeue(old.row, "three", b"", "")
    with pytest.raises(WrongState, match="pending"):
        await host.requeue(new.row, "three", b"", "")
    assert (
        [row.id for row in await host.read(views.chain, old.row)]
        == [row.id for row in await host.read(views.chain, new.row)]
        == ["one", "two"]
    )
    (leased,) = await host.take()
    assert (leased.row.destination, leased.row.priority, leased.row.max_age) == ("bob", "now", 5_000)
    assert (leased.payload, leased.signature) == (b"says two", "signed two")


async def test_an_id_that_was_used_cannot_be_requeued_under(host: Host) -> None:
    for message_id in ("one", "two"):
        await host.accept(draft(message_id))
    await host.cancel(1)
    with pytest.raises(IdReused):
        await host.requeue(1, "two", b"", "")
    assert (await host.read(views.show, 1)).superseded_by is None


async def test_the_reason_of_an_old_row_names_what_kept_it(host: Host) -> None:
    await host.accept(draft("one", max_age=1_000))
    (leased,) = await host.take()
    await host.settle(leased.row, AWAY)
    host.later(1_000)
    (dead,) = await host.expire()
    assert dead.words == "not sent within its longest age; last: broker_unreachable: away"


async def test_attempts_are_never_a_reason_to_end(host: Host) -> None:
    await host.accept(draft("one"))
    for _ in range(200):
        (leased,) = await host.take()
        assert await host.settle(leased.row, LATER) == "pending"
        host.later(72_000)
    assert (await host.read(views.show, 1)).attempts == 200


async def test_a_paused_space_waits_and_the_others_do_not(host: Host) -> None:
    await host.accept(draft("here"))
    await host.accept(draft("there", Lane("side", "ada", "chat", "general")))
    await host.pause("main", "maintenance")
    assert await host.taken() == ["there"]
    assert [(space.space, space.pause_reason) for space in await host.read(views.spaces)] == [("main", "maintenance")]
    await host.resume("main")
    assert await host.taken() == ["here"]


async def test_pages_of_the_outbox(host: Host) -> None:
    for n in range(5):
        await host.accept(draft(f"id{n}", Lane("main", "ada" if n % 2 else "bob", "chat", "general")))
    await host.cancel(1)
    assert [row.row for row in await host.read(views.listed, limit=2)] == [1, 2]
    assert [row.row for row in await host.read(views.listed, after=2, limit=2)] == [3, 4]
    assert [row.row for row in await host.read(views.listed, space="main", sender="ada")] == [2, 4]
    assert [row.row for row in await host.read(views.listed, states=("cancelled", "dead"))] == [1]
    assert (await host.read(views.find, "main", "bob", "id2")) == await host.read(views.show, 3)
    assert await host.read(views.find, "main", "ada", "id2") is None
    with pytest.raises(UnknownMessage, match="99"):
        await host.read(views.show, 99)


async def test_the_head_of_each_lane_is_found_without_walking_ten_thousand_rows(host: Host) -> None:
    def queue(connection: object) -> None:
        for n in range(10_000):
            moves.accept(connection, draft(f"id{n}", Lane("main", "ada", "dm", f"peer{n % 4}")), NOW)  # type: ignore[arg-type]

    await host.database.write(queue)
    steps = 0

    def counted(connection: object) -> list[int]:
        nonlocal steps

        def step() -> None:
            nonlocal steps
            steps += 1

        connection.set_progress_handler(step, 100)  # type: ignore[attr-defined]
        try:
            return moves.due(connection, NOW, TERMS)  # type: ignore[arg-type]
        finally:
            connection.set_progress_handler(None, 0)  # type: ignore[attr-defined]

    assert await host.database.read(counted) == [1, 2, 3, 4]
    assert steps < 50, "a lookup a lane, not a walk"
    assert await host.taken(Lane("main", "ada", "dm", "peer2")) == ["id2"]


CHILD = """
    import sys
    from pathlib import Path
    from hosted import NOW, draft
    from tidings.host import outbox_transitions as moves
    from tidings.host.schema import SCHEMA
    from tidings.util.database import Database
    host = Database(Path(sys.argv[1]), SCHEMA)
    print(host.write_blocking(lambda c: moves.accept(c, draft("one"), NOW)), flush=True)
"""


@pytest.mark.parametrize(("failpoint", "new"), [("store.before_commit", True), ("store.after_commit", False)])
def test_a_killed_accept_is_asked_again_with_the_same_id_and_is_there_once(
    tmp_path: Path, failpoint: str, new: bool
) -> None:
    paths = os.pathsep.join([str(Path(tidings.__file__).parents[1]), str(Path(__file__).parents[2])])
    sources = {"PYTHONPATH": paths, "TIDINGS_FAILPOINT": f"{failpoint}:kill"}
    program = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path / "host.db")]
    ran = subprocess.run(program, env=os.environ | sources, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (-signal.SIGKILL, ""), ran.stderr
    host = Database(tmp_path / "host.db", SCHEMA)
    answer = host.write_blocking(lambda c: moves.accept(c, draft("one"), NOW))
    assert (answer.new, answer.row.state) == (new, "pending")
    taken = host.write_blocking(lambda c: moves.take(c, NOW, TERMS, lane=GENERAL))
    assert [leased.payload for leased in taken] == [b"says one"]
    host.close()


async def test_counting_never_reads_what_is_done(host: Host) -> None:
    """The outbox grows for ever, and its counts are asked for with every look at the host."""
    plan = await host.database.read(lambda c: c.execute(f"EXPLAIN QUERY PLAN {views._COUNTS}").fetchall())
    reads = [words for *_, words in plan if words.startswith(("SCAN", "SEARCH"))]
    assert [words.rpartition(" ")[2] for words in reads] == [
        "outbox_owed",
        "outbox_lane",
        "outbox_confirmed",
        "outbox_failed",
        "outbox_space",
    ]
