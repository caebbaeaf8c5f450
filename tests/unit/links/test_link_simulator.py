"""Links keep their promises through losses, crashes, logs that are set back, liars and second workers, on any seed."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from uuid import uuid4

import msgspec
import pytest

from tidings.contract.link_worker import (
    ConnectivityChanged,
    DegradedPollEntered,
    GapDetected,
    LocalLogSetBack,
    PullAdvanced,
    RepairCompleted,
    RepairFailed,
    StatusChanged,
)
from tidings.errors import PageRefused
from tidings.links import importing, link_store, local_index, obligations, replicator
from tidings.links.definition import LinkDefinition
from tidings.links.importing import Admitter
from tidings.links.link_store import Disposed
from tidings.links.local_index import IndexState, Present
from tidings.links.ports import AdmittedAt, LocalFacts, OriginIdentity
from tidings.links.replicator import Direction
from tidings.links.validation import Admit, Omit, Verdict, judge
from tidings.wire.links import GapKind, LinkedRecord, LinkGap, LinkPage, Token
from tools.links import Violation, simulate

CHUNK = 40
#: a broken rule is found within so many lives
FOUND_WITHIN = 120
#: on request: TIDINGS_LINK_SEEDS=5000
MANY = int(os.environ.get("TIDINGS_LINK_SEEDS", "5000"))


@pytest.mark.parametrize("first", range(0, 200, CHUNK))
def test_both_sides_hold_the_same_once_the_faults_stop(first: int) -> None:
    for seed in range(first, first + CHUNK):
        simulate(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(1_000, 1_000 + MANY, 250))
def test_they_do_on_thousands_of_seeds(first: int) -> None:
    for seed in range(first, min(first + 250, 1_000 + MANY)):
        simulate(seed)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(1013, id="what does not fit into one answer is asked for at once, not later and later"),
        pytest.param(1131, id="gaps of several kinds in a row are crossed, however many"),
        pytest.param(
            1495, id="what had vanished, in a log that was put back unnoticed behind the token, comes after all"
        ),
        pytest.param(1699, id="a log that was put back between two attempts takes nothing twice"),
        pytest.param(2011, id="a log that was set back unnoticed below a token without a mark is read again"),
        pytest.param(2305, id="what the index found at another place is not lost when that place is removed"),
        pytest.param(2793, id="two links bring the same while the log here is put back"),
        pytest.param(
            4644, id="a message where something that was none was put aside, in a log that was set back, comes"
        ),
        pytest.param(2975, id="what had vanished and is in the log that was put back comes after all"),
    ],
)
def test_it_does_on_seeds_that_once_found_something(seed: int) -> None:
    simulate(seed)


def test_the_simulated_lives_hold_what_they_are_meant_to() -> None:
    worlds = [simulate(seed) for seed in range(40)]
    heard = [event for world in worlds for event in world.heard]
    assert {event.kind for event in heard if isinstance(event, GapDetected)} == set(GapKind) - {GapKind.STREAM}
    assert {event.now for event in heard if isinstance(event, StatusChanged)} == {
        "initializing",
        "live",
        "repairing",
        "degraded_poll",
        "paused",
    }
    kinds = {type(event) for event in heard}
    assert {ConnectivityChanged, DegradedPollEntered, PullAdvanced, RepairCompleted, RepairFailed} <= kinds
    assert sum(event.lost for event in heard if isinstance(event, LocalLogSetBack)) > 50
    assert sum(event.fetching for event in heard if isinstance(event, RepairCompleted)) > 20
    assert {len(world.logs) for world in worlds} == {2, 3}
    assert sum(world.rebuilt for world in worlds) > 10
    assert sum(world.agreements for world in worlds) > 10
    assert sum(len(log.removed) for world in worlds for log in world.logs.values()) > 100
    assert sum(world.lies for world in worlds) > 50
    assert sum(world.starts - len(world.carriers) for world in worlds) > 200, "workers die and are started again"
    rows: dict[tuple[str, str], int] = {}
    query = "SELECT kind, CASE kind WHEN 'duplicate' THEN '' ELSE reason END, count(*) FROM disposition GROUP BY 1, 2"
    for world in worlds:
        for books in world.books.values():
            for kind, reason, count in books.connection.execute(query):
                rows[kind, reason] = rows.get((kind, reason), 0) + count
    assert rows["admitted", ""] > 1_000
    assert {("admitted", "late"), ("duplicate", ""), ("omitted", "hops"), ("omitted", "vanished")} <= set(rows)
    assert {("quarantined", reason) for reason in ("signature", "malformed", "conflict", "too_large")} <= set(rows)
    assert not any(kind == "obligation" for kind, _ in rows)


LIFE = """
from tools.links import simulate
for seed in range(8):
    world = simulate(seed)
    print(seed, [(log.head, log.records[-1].mark if log.records else "") for log in world.logs.values()], world.heard)
"""


def test_a_seed_is_the_same_life_in_every_process() -> None:
    def lived(order_of_sets: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": order_of_sets, "PYTHONPATH": ":".join(sys.path)}
        return subprocess.run([sys.executable, "-c", LIFE], env=environment, text=True, capture_output=True).stdout

    first = lived("1")
    assert first
    assert lived("2") == first


# --- the simulator can fail: each rule, broken, is found ---

Patch = pytest.MonkeyPatch


def the_token_moves_before_the_page_is_let_in(patch: Patch) -> None:
    take = Direction._take_page

    async def early(self: Direction, token: Token, page: LinkPage) -> None:
        await self._commit(token, page.through, (), 0)
        moved = page.through
        await take(self, moved, page)

    async def dispose_only(
        self: Direction, before: Token, through: Token, done: Sequence[Disposed], at: int, _floor: int = 0
    ) -> None:
        row = self._ledger.row
        if before != through:
            await self._ledger.write(lambda c: link_store.commit_page(c, row, before, through, (), 0))
        for each in done:
            await self._ledger.write(lambda c, each=each: _insert(c, row, each))  # type: ignore[misc]

    patch.setattr(Direction, "_commit", dispose_only)
    patch.setattr(Direction, "_take_page", early)


def _insert(connection: object, row: int, each: Disposed) -> None:
    values = (row, each.seq, *each.identity, each.channel, each.hash, each.day, each.kind, each.reason, each.local_seq)
    connection.execute(  # type: ignore[attr-defined]
        "INSERT OR IGNORE INTO disposition (link, seq, origin, sender, id, channel, hash, day, kind, reason, local_seq)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        values,
    )


def the_index_is_not_asked(patch: Patch) -> None:
    def nothing(_connection: object, _space: str, _names: object) -> dict[OriginIdentity, Present]:
        return {}

    patch.setattr(local_index, "present", nothing)


def the_index_is_not_caught_up(patch: Patch) -> None:
    catch_up = Direction._catch_up

    async def once(self: Direction) -> IndexState:
        return self._index if self._index is not None else await catch_up(self)

    patch.setattr(Direction, "_catch_up", once)


def message_ids_differ_from_worker_to_worker(patch: Patch) -> None:
    patch.setattr(link_store, "message_id", lambda *_name: uuid4().hex)


def a_message_id_that_was_burnt_counts_as_there(patch: Patch) -> None:
    async def answered(self: Admitter, each: Admit, answer: object) -> object:
        if isinstance(answer, AdmittedAt):
            return importing._Landed(answer.seq, self._definition.link)
        return await real(self, each, answer)  # type: ignore[arg-type]

    real = Admitter._answered
    patch.setattr(Admitter, "_answered", answered)


def what_the_log_here_lost_is_not_looked_for(patch: Patch) -> None:
    patch.setattr(obligations, "lost_here", lambda *_: 0)


def what_was_removed_by_age_is_forgotten_with_the_index(patch: Patch) -> None:
    complete = local_index.complete

    def forget(connection: sqlite3.Connection, facts: LocalFacts, now: int) -> int:
        connection.execute("DELETE FROM present WHERE space = ? AND seq < 0", (facts.space,))
        return complete(connection, facts, now)

    patch.setattr(local_index, "complete", forget)


def signatures_are_not_looked_at(patch: Patch) -> None:
    patch.setattr(importing, "judge", lambda record, _signed, definition: judge(record, True, definition))


def hops_are_not_counted(patch: Patch) -> None:

    def lenient(record: LinkedRecord, signed: bool, definition: LinkDefinition) -> Verdict:
        wide = msgspec.structs.replace(definition, hops=8)
        return judge(record, signed, wide)

    patch.setattr(importing, "judge", lenient)


def a_page_is_let_in_backwards(patch: Patch) -> None:
    patch.setattr(importing, "order", lambda page: list(reversed(page)))


def pages_are_not_checked(patch: Patch) -> None:
    patch.setattr(replicator, "check_page", lambda *_: None)


def another_epoch_is_another_log_from_the_same_place_on(patch: Patch) -> None:
    def stay(asked: Token, gap: LinkGap) -> Token:
        return Token(space=asked.space, epoch=gap.epoch, seq=min(asked.seq, gap.head))

    patch.setattr(replicator, "agreed_token", stay)
    patch.setattr(obligations, "first_other", lambda *_: None)


def what_does_not_fit_is_dropped(patch: Patch) -> None:
    real = importing._put_aside

    def drop(verdict: Admit, reason: str, words: str) -> Disposed:
        return (
            real(verdict, reason, words) if reason == "id_reused" else importing._left_out(Omit(verdict.record, "echo"))
        )

    patch.setattr(importing, "_put_aside", drop)


def what_comparing_found_is_not_fetched(patch: Patch) -> None:
    patch.setattr(obligations, "owe", lambda *_: 0)


def a_refused_page_ends_the_loop(patch: Patch) -> None:
    failed = Direction._failed

    def give_up(self: Direction, error: Exception) -> float:
        if isinstance(error, PageRefused):
            self.end()
        return failed(self, error)

    patch.setattr(Direction, "_failed", give_up)


BROKEN: tuple[Callable[[Patch], None], ...] = (
    the_token_moves_before_the_page_is_let_in,
    the_index_is_not_asked,
    the_index_is_not_caught_up,
    message_ids_differ_from_worker_to_worker,
    a_message_id_that_was_burnt_counts_as_there,
    what_the_log_here_lost_is_not_looked_for,
    what_was_removed_by_age_is_forgotten_with_the_index,
    signatures_are_not_looked_at,
    hops_are_not_counted,
    a_page_is_let_in_backwards,
    pages_are_not_checked,
    another_epoch_is_another_log_from_the_same_place_on,
    what_does_not_fit_is_dropped,
    what_comparing_found_is_not_fetched,
    a_refused_page_ends_the_loop,
)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_rule_is_found(broken: Callable[[Patch], None], monkeypatch: Patch) -> None:
    broken(monkeypatch)
    with pytest.raises(Violation):
        live_until_found()


def live_until_found() -> None:
    for seed in range(FOUND_WITHIN):
        simulate(seed)
