"""The rules of delivery keep their promises through crashes, full mailboxes, narrowing and operators, on any seed."""

import dataclasses
import os
import subprocess
import sys
from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from tidings.delivery import deliverer
from tidings.delivery.deliverer import DeliverBatch, Deliverer, Emptied
from tidings.model import planning
from tidings.model.classify import Classifier
from tidings.model.deferred import DebtEvent, Debts
from tidings.model.planning import Counter, Plan, Settlement
from tidings.model.projection import Table
from tidings.model.rulebook import Rulebook
from tidings.model.unread import UnreadWindow
from tidings.wire.frames import decode_frame
from tools import delivery_ports
from tools.delivery import World, simulate
from tools.delivery_ports import Books, Mailboxes
from tools.delivery_reader import Violation
from tools.delivery_space import SimulatedSpace

CHUNK = 40
#: a broken rule is found within so many lives
FOUND_WITHIN = 150


@pytest.mark.parametrize("first", range(0, 160, CHUNK))
def test_everything_owed_arrives_once_numbered_in_order_and_nothing_else_does(first: int) -> None:
    for seed in range(first, first + CHUNK):
        simulate(seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(1_000, 4_000, 250))
def test_it_does_on_thousands_of_seeds(first: int) -> None:
    for seed in range(first, first + 250):
        simulate(seed)


def test_the_simulated_lives_hold_what_they_are_meant_to() -> None:
    worlds = [simulate(seed) for seed in range(30)]
    kinds = {event.kind for world in worlds for event in world.books.events}
    assert kinds == {"owe", "paid", "settled", "cancel", "lost", "told", "reset", "held"}
    assert sum(world.set_back for world in worlds) > 12
    assert sum(world.ledger_set_back for world in worlds) > 2
    assert sum(world.expired for world in worlds) > 2
    assert all(world.kept_from for world in worlds)
    tails = [record.subject.split(".")[2] for world in worlds for record in world.space.stored]
    assert {"chat", "via", "link", "member", "acl", "channel", "space"} <= set(tails)
    assert any(reader.told for world in worlds for reader in world.readers.values())
    assert {reader.orderly for world in worlds for reader in world.readers.values()} == {True, False}
    seen = {(world, seq) for world in worlds for reader in world.readers.values() for seq in reader.seen}
    assert any(".via." in world.space.stored[seq - 1].subject for world, seq in seen)
    fetched = sum((reader.fetches for world in worlds for reader in world.readers.values()), Tally[str]())
    assert {"known", "fetched", "from the log"} <= set(fetched), "blocks are named, stored and forgotten"
    assert any(series.startswith("access:") for world in worlds for r in world.readers.values() for series in r.numbers)


LIFE = """
from tools.delivery import simulate
for seed in range(12):
    world = simulate(seed)
    print(seed, len(world.space.stored), world.books.events, world.books.rows)
"""


def test_a_seed_is_the_same_life_in_every_process() -> None:
    def lived(order_of_sets: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": order_of_sets, "PYTHONPATH": ":".join(sys.path)}
        return subprocess.run([sys.executable, "-c", LIFE], env=environment, text=True, capture_output=True).stdout

    first = lived("1")
    assert first
    assert all(lived(other) == first for other in ("2", "3"))


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        pytest.param(31, {"telling": True}, id="the frame that told of a cancelled debt was emptied by a narrowing"),
        pytest.param(509, {"busy_operator": True}, id="`told` covers a cancel written between the telling and it"),
        pytest.param(86, {"busy_operator": True}, id="a loss without an open debt is told with the next batch only"),
    ],
)
def test_a_cancelled_debt_is_told_whatever_happens_meanwhile(seed: int, options: dict[str, bool]) -> None:
    simulate(seed, **options)


# --- the simulator can fail: each rule, broken, is found ---

Patch = pytest.MonkeyPatch


def one_series_for_ever(patch: Patch) -> None:
    patch.setattr(deliverer, "Counter", lambda _: Counter("first"))


def unacknowledged_counts_as_delivered(patch: Patch) -> None:
    def settle(planned: Plan, acked: Mapping[str, Sequence[int]], counters: Mapping[str, Counter]) -> Settlement:
        padded = {
            owner: [*acked.get(owner, ()), *range(10**6, 10**6 + len(frames))][: len(frames)]
            for owner, frames in planned.frames.items()
        }
        return planning.settle(planned, padded, counters)

    patch.setattr(deliverer, "settle", settle)


def emptying_ignores_its_own_note(patch: Patch) -> None:
    noting = Mailboxes.note_and_empty

    def forgetful(self: Mailboxes, owner: str, *, trusted: bool = True) -> Emptied:
        acknowledged = self.box(owner).acknowledged
        return dataclasses.replace(noting(self, owner, trusted=trusted), above=acknowledged)

    patch.setattr(Mailboxes, "note_and_empty", forgetful)


def runs_span_changes_of_their_audience(patch: Patch) -> None:
    patch.setattr(Table, "cuts_within", lambda *_: ())


def lanes_in_debt_get_news(patch: Patch) -> None:
    def plan(blocks: Any, audience: Any, debts: Debts, counters: Any, **more: Any) -> Plan:
        return planning.plan(blocks, audience, Debts(untold=debts.untold), counters, **more)

    patch.setattr(deliverer, "plan", plan)


def access_at_the_head_is_not_asked(patch: Patch) -> None:
    patch.setattr(Table, "allowed_at", lambda *_: True)
    # the simulator asks the same question; it must go on hearing the truth
    patch.setattr(SimulatedSpace, "may_read", lambda self, *asked: self.table.rules.allowed_at(*asked))


def narrowing_empties_nothing(patch: Patch) -> None:
    patch.setattr(Deliverer, "_empty_mailboxes", lambda *_: frozenset())
    patch.setattr(Mailboxes, "note_and_empty", lambda self, *_, **__: Emptied(0, self.seq))
    patch.setattr(Mailboxes, "purge", lambda *_: None)


def what_the_cap_left_out_is_forgotten(patch: Patch) -> None:
    write = Deliverer._write

    def forgetful(self: Deliverer, kind: Any, seqs: Any, cause: str = "") -> None:
        write(self, kind, {} if "too large" in cause else seqs, cause)

    patch.setattr(Deliverer, "_write", forgetful)


def every_link_admits_everything(patch: Patch) -> None:
    patch.setattr(Rulebook, "admission_allowed", lambda *_, **__: True)


def anybody_may_post_anywhere(patch: Patch) -> None:
    patch.setattr(Rulebook, "post_allowed", lambda *_: True)


def a_frame_is_named_by_owner_and_number(patch: Patch) -> None:
    def name(data: bytes) -> str:
        frame = decode_frame(data)
        return f"{frame.owner} {frame.number}"

    patch.setattr(delivery_ports, "frame_id", name)


def forged_headers_are_not_looked_at(patch: Patch) -> None:
    patch.setattr(Classifier, "_fields", lambda *_: ())


def a_payment_is_written_before_it_is_made(patch: Patch) -> None:
    def settle(planned: Plan, acked: Any, counters: Any) -> Settlement:
        return dataclasses.replace(planning.settle(planned, acked, counters), owed={})

    patch.setattr(deliverer, "settle", settle)


def what_is_unread_may_leave_the_log(patch: Patch) -> None:
    patch.setattr(UnreadWindow, "needed", None)


def done_is_judged_by_the_number_of_a_batch(patch: Patch) -> None:
    deliver, start = Deliverer.deliver, World._start_once
    done: dict[int, int] = {}

    def delivered(self: Deliverer, batch: DeliverBatch, *rest: Any) -> Any:
        figures = deliver(self, batch, *rest)
        assert batch.number is not None
        done[id(self._ledger)] = max(batch.number, done.get(id(self._ledger), -1))
        return figures

    def remaining(self: Deliverer, batch: DeliverBatch) -> DeliverBatch | None:
        assert batch.number is not None
        if batch.through <= self.floor or batch.number <= done.get(id(self._ledger), -1):
            return None
        return dataclasses.replace(batch, after=max(batch.after, self.floor))

    def started(self: World) -> Deliverer:
        if not self.books.rows:
            done.pop(id(self.books), None)
        return start(self)

    patch.setattr(Deliverer, "deliver", delivered)
    patch.setattr(Deliverer, "remaining", remaining)
    patch.setattr(World, "_start_once", started)


def mailboxes_are_taken_as_they_are(patch: Patch) -> None:
    patch.setattr(Deliverer, "_differing_mailboxes", lambda *_, **__: {})


def a_purge_has_no_end(patch: Patch) -> None:
    purge = Mailboxes.purge
    patch.setattr(Mailboxes, "purge", lambda self, owner, _end: purge(self, owner, self.seq))


def frames_are_forgotten_while_a_note_is_open(patch: Patch) -> None:
    patch.setattr(Deliverer, "forget_read", lambda self, oldest: self.unread.read_below(oldest))


def a_debt_begins_behind_frames_that_no_row_is_about(patch: Patch) -> None:
    def settle(planned: Plan, acked: Any, counters: Any) -> Settlement:
        settled = planning.settle(planned, acked, counters)
        return dataclasses.replace(settled, begun=settled.owed)

    patch.setattr(deliverer, "settle", settle)


def an_older_ledger_is_taken_for_the_newest(patch: Patch) -> None:
    patch.setattr(Books, "is_older", False)


def what_the_log_lost_is_not_told(patch: Patch) -> None:
    patch.setattr(Deliverer, "write_off", lambda *_: None)


BROKEN: tuple[Callable[[Patch], None], ...] = (
    one_series_for_ever,
    unacknowledged_counts_as_delivered,
    emptying_ignores_its_own_note,
    runs_span_changes_of_their_audience,
    lanes_in_debt_get_news,
    access_at_the_head_is_not_asked,
    narrowing_empties_nothing,
    what_the_cap_left_out_is_forgotten,
    every_link_admits_everything,
    anybody_may_post_anywhere,
    a_frame_is_named_by_owner_and_number,
    forged_headers_are_not_looked_at,
    a_payment_is_written_before_it_is_made,
    what_is_unread_may_leave_the_log,
    done_is_judged_by_the_number_of_a_batch,
    mailboxes_are_taken_as_they_are,
    a_purge_has_no_end,
    frames_are_forgotten_while_a_note_is_open,
    a_debt_begins_behind_frames_that_no_row_is_about,
    an_older_ledger_is_taken_for_the_newest,
)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_rule_is_found(broken: Callable[[Patch], None], monkeypatch: Patch) -> None:
    broken(monkeypatch)
    with pytest.raises(Violation):
        all(simulate(seed) for seed in range(FOUND_WITHIN))


def test_what_retention_took_against_the_rules_is_told_as_lost(monkeypatch: Patch) -> None:
    worlds = [simulate(seed, careless=True) for seed in range(CHUNK)]
    causes = {loss.cause for world in worlds for reader in world.readers.values() for loss in reader.told}
    assert any("log removed it" in cause for cause in causes)
    what_the_log_lost_is_not_told(monkeypatch)
    with pytest.raises(Violation):
        all(simulate(seed, careless=True) for seed in range(FOUND_WITHIN))


def test_what_was_owed_of_a_log_that_went_backwards_is_told_as_lost() -> None:
    delivery = World(1).deliverer
    for channel, after in (("general", 5), ("team", 12), ("edge", 20), ("late", 30)):
        delivery._record([DebtEvent(delivery._ledger.next_order(), "owe", "A", channel, after, "no room")])
    delivery.lose_debts(8, 20)
    told = [
        (each.lost.channel, each.lost.first, each.lost.last, each.lost.count) for each in delivery.debts.untold["A"]
    ]
    assert told == [("general", 8, 20, 13), ("team", 13, 20, 8)]


def test_a_debt_that_is_written_off_is_told_with_its_range_and_count() -> None:
    delivery = World(1).deliverer
    delivery._record([DebtEvent(delivery._ledger.next_order(), "owe", "A", "general", 5, "no room")])
    delivery.write_off(9)
    assert [(each.lost.first, each.lost.last, each.lost.count) for each in delivery.debts.untold["A"]] == [(6, 8, 3)]
