"""The outbox as a whole: whatever happens in whatever order, nothing accepted is lost, misreported or mixed up.

A state machine does to the real SQL, in a real file, what a host, its broker, its people and its clock can do to it.
After every step each `check_` below must hold; at the end everything heals, and then nothing may be left owed.
"""

from __future__ import annotations

import os
import random
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from forgetful import HORIZON, ForgetfulBroker, Stored
from tidings.errors import IdReused, WrongState
from tidings.host import outbox
from tidings.host import outbox_transitions as moves
from tidings.host import outbox_views as views
from tidings.host.outbox_transitions import Landed, Lane, Leased, LogPosition, NewRow, Terms
from tidings.host.outbox_views import OutboxRow
from tidings.host.outcomes import Outcome
from tidings.host.schema import SCHEMA
from tidings.util.database import Database

T = TypeVar("T")
HOUR = 3_600_000
START = 1_700_000_000_000
LANES = (
    Lane("main", "ada", "chat", "general"),
    Lane("main", "ada", "dm", "bob"),
    Lane("main", "bob", "chat", "general"),
    Lane("side", "ada", "chat", "general"),
)
TERMINAL = ("done", "dead", "cancelled")
REFUSED = Outcome("denied", "may not post", retryable=False, blocks="row")
LATER = Outcome("mailbox_full", "full", retryable=True, blocks="lane")
REVOKED = Outcome("revoked", "revoked", retryable=True, blocks="sender")
AWAY = Outcome("broker_unreachable", "away", retryable=True, blocks="space")
NO_ANSWER = Outcome("outcome_unknown", "no answer", retryable=True, blocks="lane", maybe_stored=True)
IDENTITY = ("space", "sender", "id", "fingerprint", "kind", "destination", "subject", "priority", "max_age")
LOST_ANSWER = ("tried again", "cancelled before", "cancelled", "the clock goes back", "forgotten")
pick = st.integers(0, 10_000)
spaces = st.sampled_from(["main", "main", "side"])
mostly = st.sampled_from([True, True, False])
rarely = st.sampled_from([False, False, True])


def lane_of(row: OutboxRow) -> Lane:
    return Lane(row.space, row.sender, row.kind, row.destination)


@dataclass(eq=False)
class Attempt:
    """A publish under way: what the drain holds of it, over which run of the broker, and what became of it there."""

    leased: Leased
    terms: Terms
    run: str
    place: LogPosition | None = None
    #: the drain gave it up; it may still arrive
    given_up: bool = False


class OutboxModel(RuleBasedStateMachine):
    @initialize(lanes=st.lists(st.sampled_from(LANES), min_size=2, max_size=4))
    def begin(self, lanes: list[Lane]) -> None:
        memory = Path("/dev/shm")
        self.folder = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="tidings-model-")
        self.true_time, self.booted, self.skew, self.runs = HOUR, 0, 0, 0
        self.brokers = {space: ForgetfulBroker(space) for space in ("main", "side")}
        self.met: dict[str, str] = {}
        self.drafts: dict[int, NewRow] = {}
        self.ended: dict[int, tuple[Any, ...]] = {}
        self.attempts: list[Attempt] = []
        self.known_since: dict[int, int] = {}
        self.paused: set[str] = set()
        self.blocked: set[Lane] = set()
        self.just_blocked: set[Lane] = set()
        self.ids = 0
        self.open()
        for lane in lanes:
            self.accept(lane, "x", HOUR * 24)

    def open(self) -> None:
        self.runs += 1
        self.terms = Terms(f"run {self.runs}", luck=lambda: 0.5)
        self.database = Database(Path(self.folder.name) / "host.db", SCHEMA)
        self.reader = sqlite3.connect(f"file:{self.database.path}?mode=ro", uri=True, isolation_level=None)
        self.do(lambda c: moves.recover(c, self.now, self.tick, self.terms))
        assert not [row for row in self.rows() if row.state == "inflight"], "a lease of an earlier run is void at once"

    def teardown(self) -> None:
        if not hasattr(self, "database"):
            return
        try:
            self.heal()
            self.check_everything()
            self.check_nothing_is_owed_once_all_is_well()
        finally:
            self.close()
            self.folder.cleanup()

    def close(self) -> None:
        self.reader.close()
        self.database.close()

    # ------------------------------------------------------------------------------------------------ conveniences

    @property
    def now(self) -> int:
        return START + self.true_time + self.skew

    @property
    def tick(self) -> int:
        """The clock that never jumps, and begins anew when the machine does."""
        return self.true_time - self.booted

    def do(self, job: Callable[[sqlite3.Connection], T]) -> T:
        return self.database.write_blocking(job, 10)

    def rows(self) -> list[OutboxRow]:
        return views.listed(self.reader, limit=10_000)

    def row_at(self, choice: int, *states: str) -> OutboxRow | None:
        rows = [row for row in self.rows() if not states or row.state in states]
        return rows[choice % len(rows)] if rows else None

    def draft(self, lane: Lane, text: str, message_id: str | None = None, max_age: int = HOUR * 24) -> NewRow:
        self.ids += 1
        message_id = message_id or f"id{self.ids}"
        return NewRow(
            space=lane.space,
            sender=lane.sender,
            id=message_id,
            fingerprint=text.encode().ljust(32, b"."),
            kind=lane.kind,  # type: ignore[arg-type]
            destination=lane.destination,
            subject=f"td.{'.'.join(lane)}",
            payload=f"{message_id} {text}".encode(),
            signature=f"signed {message_id}",
            max_age=max_age,
        )

    def held(self, row: OutboxRow) -> list[Stored]:
        return self.brokers[row.space].holds(row.sender, row.id)

    def publish(self, attempt: Attempt) -> None:
        row, broker = attempt.leased.row, self.brokers[attempt.leased.row.space]
        parts = (row.sender, row.id, row.subject, attempt.leased.payload, attempt.leased.signature)
        attempt.place = LogPosition(broker.publish(*parts, self.true_time), "LOG", attempt.run)

    def reachable(self, attempt: Attempt) -> bool:
        return attempt.run == self.brokers[attempt.leased.row.space].incarnation

    def confirm(self, attempt: Attempt, place: LogPosition) -> str:
        row = attempt.leased.row
        job = (row.row, row.attempts, place, self.now, self.tick, attempt.terms)
        said = self.do(lambda c: moves.confirmed(c, *job))
        if said == "confirmed":
            self.known_since[row.row] = self.true_time
            self.just_blocked -= {Lane(row.space), Lane(row.space, row.sender)}
        return said

    # ----------------------------------------------------------------------------------------------------- accepting

    @rule(lane=st.sampled_from(LANES), text=st.sampled_from("xyz"), age=st.sampled_from([60_000, HOUR, HOUR * 24]))
    def accept(self, lane: Lane, text: str, age: int) -> None:
        draft = self.draft(lane, text, max_age=age)
        answer = self.do(lambda c: moves.accept(c, draft, self.now))
        assert answer.new
        assert answer.row.state == "pending"
        assert answer.row.row > max(self.drafts, default=0)
        self.drafts[answer.row.row] = draft

    @rule(choice=pick, same=st.booleans())
    def ask_again(self, choice: int, same: bool) -> None:
        """A1.15 4: the same request has the same answer in every state, another under its id changes nothing."""
        row, before = self.row_at(choice), self.rows()
        assert row is not None
        if same:
            answer = self.do(lambda c: moves.accept(c, self.drafts[row.row], self.now))
            assert answer == (row, False)
        else:
            other = self.draft(lane_of(row), "other", row.id)
            with pytest.raises(IdReused, match=row.id):
                self.do(lambda c: moves.accept(c, other, self.now))
        assert self.rows() == before

    # ------------------------------------------------------------------------------------------------------ draining

    def meet(self, space: str) -> None:
        self.met[space] = self.brokers[space].incarnation
        said = self.do(lambda c: outbox.meet(c, space, self.met[space]))
        assert said == any(
            row.state == "confirmed" and row.space == space and row.incarnation != self.met[space]
            for row in self.rows()
        )

    @rule(
        limit=st.integers(1, 4), lane=st.none() | st.sampled_from(LANES), connected=st.sampled_from([True, True, False])
    )
    def take(self, limit: int, lane: Lane | None, connected: bool) -> None:
        for space in self.brokers if connected else ():
            self.meet(space)
        before = {row.row: row for row in self.rows()}
        taken = self.do(lambda c: moves.take(c, self.now, self.terms, limit, lane))
        assert len(taken) <= limit
        for leased in taken:
            self.check_what_was_taken(leased, before[leased.row.row], lane)
            self.attempts.append(Attempt(leased, self.terms, self.met.get(leased.row.space, "not connected")))

    def check_what_was_taken(self, leased: Leased, before: OutboxRow, lane: Lane | None) -> None:
        row = leased.row
        assert row.state == "inflight"
        mine = [one for one in self.rows() if one.row < row.row and lane_of(one) == lane_of(row)]
        assert all(one.state in ("confirmed", *TERMINAL) for one in mine), "the oldest of a lane goes first"
        unsure = [one for one in mine if one.state == "confirmed" and one.incarnation != self.met.get(row.space)]
        assert not unsure or row.space not in self.met, "a lane waits until what another run confirmed is verified"
        assert row.attempts == before.attempts + 1
        assert lane is None or lane == lane_of(row)
        assert row.space not in self.paused, "a paused space sends nothing"
        scopes = {Lane(row.space), Lane(row.space, row.sender), lane_of(row)}
        assert not scopes & (self.blocked | self.just_blocked), "what waits is not tried"
        if before.state == "inflight":
            old = before.lease_owner != self.terms.owner
            late = not self.now < (before.lease_until or 0) <= self.now + self.terms.lease
            assert row.doubt, "nobody knows whether it arrived"
            assert old or late, "a lease is taken over only when it is void"
        else:
            soon = before.next_attempt_at <= self.now
            assert soon or before.next_attempt_at > self.now + self.terms.backoff.bound, "no row before its time"
        assert (leased.payload, leased.signature) == self.written(row)

    def written(self, row: OutboxRow) -> tuple[bytes, str]:
        return self.drafts[row.row].payload, self.drafts[row.row].signature

    @precondition(lambda self: self.attempts)
    @rule(choice=pick)
    def the_broker_stores_it(self, choice: int) -> None:
        attempt = self.attempts[choice % len(self.attempts)]
        if self.reachable(attempt):
            self.publish(attempt)

    @precondition(lambda self: self.attempts)
    @rule(choice=pick)
    def it_is_sent_and_acknowledged(self, choice: int) -> None:
        self.the_broker_stores_it(choice)
        self.the_acknowledgement_arrives(choice)

    @rule(texts=st.lists(st.sampled_from("xyz"), min_size=1, max_size=3), lane=st.sampled_from(LANES))
    def a_good_moment(self, texts: list[str], lane: Lane) -> None:
        """A few are accepted, and what is due leaves."""
        for text in texts:
            self.accept(lane, text, HOUR * 24)
        self.meet(lane.space)
        for _ in texts:
            self.take(4, None, True)
            while ready := [attempt for attempt in self.attempts if self.reachable(attempt)]:
                self.it_is_sent_and_acknowledged(self.attempts.index(ready[0]))

    @precondition(lambda self: self.attempts)
    @rule(choice=pick)
    def the_acknowledgement_arrives(self, choice: int) -> None:
        attempt = self.attempts[choice % len(self.attempts)]
        if attempt.place is None:
            return
        self.attempts.remove(attempt)
        before = views.show(self.reader, attempt.leased.row.row)
        said = self.confirm(attempt, attempt.place)
        after = views.show(self.reader, before.row)
        ours = (before.lease_owner, before.attempts) == (attempt.terms.owner, attempt.leased.row.attempts)
        if before.state == "inflight" and ours:
            assert (said, after.state, after.seq) == ("confirmed", "confirmed", attempt.place.seq)
        else:
            assert after.state == before.state
            assert said == ("late" if before.state in ("dead", "cancelled") and not before.late_seq else "ignored")
            assert before.state not in ("dead", "cancelled") or after.late_seq is not None

    @precondition(lambda self: self.attempts)
    @rule(go_on=mostly)
    def several_acknowledgements_arrive_together(self, go_on: bool) -> None:
        """What the drain does: one job for all that landed in a turn, and each lane's next is leased with it."""
        ready = [attempt for attempt in self.attempts if attempt.place and attempt.terms is self.terms]
        before = {row.row: row for row in self.rows()}
        landed = [Landed(attempt.leased.row, attempt.place, go_on) for attempt in ready if attempt.place]
        answers = self.do(lambda c: moves.confirmed_all(c, landed, self.now, self.tick, self.terms))
        assert len(answers) == len(ready)
        for attempt, (said, _) in zip(ready, answers, strict=True):
            self.attempts.remove(attempt)
            self.check_what_was_said(attempt, before[attempt.leased.row.row], said)
        followers = [leased for _, leased in answers if leased is not None]
        assert go_on or not followers
        moved = {leased.row.row for leased in followers}
        moved |= {one.row.row for one, (said, _) in zip(landed, answers, strict=True) if said == "confirmed"}
        stayed = [row for row in self.rows() if row.row not in moved]
        assert all(row.state == before[row.row].state for row in stayed), "what was not confirmed did not move"
        for leased in followers:
            self.check_what_was_taken(leased, before[leased.row.row], None)
            assert leased.row == views.show(self.reader, leased.row.row)
            self.attempts.append(Attempt(leased, self.terms, self.met.get(leased.row.space, "not connected")))

    def check_what_was_said(self, attempt: Attempt, before: OutboxRow, said: str) -> None:
        row = attempt.leased.row
        if (before.state, before.lease_owner, before.attempts) == ("inflight", self.terms.owner, row.attempts):
            assert said == "confirmed"
            assert views.show(self.reader, row.row).seq == attempt.place.seq  # type: ignore[union-attr]
            self.known_since[row.row] = self.true_time
            self.just_blocked -= {Lane(row.space), Lane(row.space, row.sender)}
        else:
            ended = before.state in ("dead", "cancelled")
            assert said in (("late", "ignored") if ended else ("ignored",))
            assert not ended or views.show(self.reader, row.row).late_seq is not None

    @precondition(lambda self: self.attempts)
    @rule(choice=pick)
    def somebody_else_answers_for_it(self, choice: int) -> None:
        """Another run of the host knows the row and the attempt, and did not lease it."""
        row, before = self.attempts[choice % len(self.attempts)].leased.row, self.rows()
        if views.show(self.reader, row.row).state == "inflight":
            stranger = Terms("somebody else", luck=lambda: 0.5)
            place, held = LogPosition(99_999, "LOG", "elsewhere"), (row.row, row.attempts)
            assert self.do(lambda c: moves.confirmed(c, *held, place, self.now, 0, stranger)) == "ignored"
            assert self.do(lambda c: moves.settle(c, *held, REFUSED, self.now, stranger)) is None
            assert self.rows() == before

    @precondition(lambda self: self.attempts)
    @rule(choice=pick, outcome=st.sampled_from([REFUSED, LATER, REVOKED, AWAY, NO_ANSWER]))
    def it_fails(self, choice: int, outcome: Outcome) -> None:
        """Refused, or given up without an answer: then it may have been stored, or still be."""
        attempt = self.attempts[choice % len(self.attempts)]
        if attempt.given_up or (attempt.place and outcome is not NO_ANSWER):
            return
        row, terms = attempt.leased.row, attempt.terms
        before = views.show(self.reader, row.row)
        said = self.do(lambda c: moves.settle(c, row.row, row.attempts, outcome, self.now, terms))
        ours = (before.state, before.lease_owner, before.attempts) == ("inflight", terms.owner, row.attempts)
        expected = "cancelled" if before.cancel_asked else "pending" if outcome.retryable else "dead"
        assert said == (expected if ours else None)
        after = views.show(self.reader, row.row)
        assert said != "pending" or outcome.blocks != "lane" or after.next_attempt_at > self.now, "not again at once"
        attempt.given_up = True
        if outcome is not NO_ANSWER:
            self.attempts.remove(attempt)
        if ours and outcome.blocks in ("sender", "space"):
            self.just_blocked.add(Lane(row.space, row.sender if outcome.blocks == "sender" else ""))

    @precondition(lambda self: self.attempts)
    @rule(choice=pick, stored=st.booleans(), then=st.sampled_from(LOST_ANSWER))
    def its_answer_is_lost(self, choice: int, stored: bool, then: str) -> None:
        """It was stored or not, the drain does not know, and goes on in one of these ways."""
        row = self.attempts[choice % len(self.attempts)].leased.row
        if then == "cancelled before":
            self.do(lambda c: outbox.cancel(c, row.row, self.now))
        if stored:
            self.the_broker_stores_it(choice)
        self.it_fails(choice, NO_ANSWER)
        if then == "tried again":
            self.time_passes(61_000)
            self.take(4, lane_of(row), True)
        elif then == "the clock goes back":
            self.the_clock_jumps(-HOUR)
            self.take(4, lane_of(row), True)
        elif then == "cancelled":
            self.do(lambda c: outbox.cancel(c, row.row, self.now))

    # ---------------------------------------------------------------------------------------------------- bad days

    @rule(arrives=st.booleans(), reboots=st.booleans())
    def the_host_crashes(self, arrives: bool, reboots: bool) -> None:
        """What was on its way arrives now or never; nobody is left to hear of it."""
        for attempt in self.attempts:
            if arrives and attempt.place is None and self.reachable(attempt):
                self.publish(attempt)
        self.attempts.clear()
        inflight = [row.row for row in self.rows() if row.state == "inflight"]
        self.close()
        self.met.clear()
        self.booted = self.true_time if reboots else self.booted
        self.open()
        assert all(views.show(self.reader, row).doubt for row in inflight), "nobody knows whether they arrived"

    @rule(
        space=spaces,
        forget=st.integers(0, 4),
        later=st.sampled_from([0, 3_000, 5_000]),
    )
    def the_broker_restarts_and_forgets(self, space: str, forget: int, later: int) -> None:
        self.brokers[space].restart(forget, self.true_time)
        if later:
            self.time_passes(later)
            self.meet(space)

    @rule(by=st.sampled_from([100, 1_000, 3_000, 61_000, 121_000, HOUR]))
    def time_passes(self, by: int) -> None:
        self.true_time += by
        self.just_blocked.clear()

    @rule(by=st.sampled_from([-HOUR, HOUR]))
    def the_clock_jumps(self, by: int) -> None:
        self.skew += by
        self.just_blocked.clear()

    # ---------------------------------------------------------------------------------------------- after the broker

    @rule(space=spaces, most=st.integers(1, 3))
    def verify(self, space: str, most: int) -> None:
        broker = self.brokers[space]
        if space in self.met and self.met[space] == broker.incarnation:
            for row in self.do(lambda c: outbox.to_verify(c, space, broker.incarnation, limit=most)):
                self.verify_one(row, broker)

    def verify_one(self, row: OutboxRow, broker: ForgetfulBroker) -> None:
        record = broker.at(row.seq or 0)
        if record is not None and (record.sender, record.id) == (row.sender, row.id):
            assert self.do(lambda c: outbox.still_there(c, row, broker.incarnation, self.tick))
            self.known_since[row.row] = self.true_time
        else:
            assert self.do(lambda c: outbox.lost(c, row, self.now))
            assert views.show(self.reader, row.row).state == "pending"
        assert not self.do(lambda c: outbox.lost(c, row, self.now)), "what was verified is verified once"

    @rule(space=spaces)
    def release(self, space: str) -> None:
        """Only a run of the broker that answers now is asked for."""
        if self.met.get(space) == self.brokers[space].incarnation:
            before = {row.row for row in self.rows() if row.state == "confirmed"}
            self.do(lambda c: outbox.release(c, space, self.met[space], self.tick, HORIZON, self.now))
            done = [row for row in self.rows() if row.row in before and row.state == "done"]
            assert all(self.true_time - self.known_since[row.row] >= HORIZON for row in done), "not on disk yet"
            assert all(row.incarnation == self.met[space] for row in done)

    @rule()
    def old_payloads_are_dropped(self) -> None:
        self.do(lambda c: outbox.drop_payloads(c, self.now - HOUR))

    # -------------------------------------------------------------------------------------------------------- people

    @rule(choice=pick)
    def cancel(self, choice: int) -> None:
        if before := self.row_at(choice):
            after = self.do(lambda c: outbox.cancel(c, before.row, self.now))
            expected = {"pending": "cancelled"}.get(before.state, before.state)
            assert after.state == expected
            assert after.cancel_asked or before.state != "inflight"

    @rule(choice=pick, over=mostly)
    def requeue(self, choice: int, over: bool) -> None:
        if not over:
            if row := self.row_at(choice, "pending", "inflight", "confirmed", "done"):
                self.requeue_what_is_not_over(row)
        elif old := self.row_at(choice, "dead", "cancelled"):
            fresh = self.draft(lane_of(old), "again", max_age=old.max_age)
            made = (fresh.id, fresh.payload, fresh.signature, self.now)
            if old.superseded_by is not None:
                with pytest.raises(WrongState):
                    self.do(lambda c: outbox.requeue(c, old.row, *made))
                return
            new = self.do(lambda c: outbox.requeue(c, old.row, *made))
            self.drafts[new.row] = replace(fresh, fingerprint=old.fingerprint)
            assert self.do(lambda c: outbox.requeue(c, old.row, *made)) == new

    def requeue_what_is_not_over(self, row: OutboxRow) -> None:
        before = self.rows()
        with pytest.raises(WrongState, match=row.state):
            self.do(lambda c: outbox.requeue(c, row.row, "new", b"new", "new", self.now))
        assert self.rows() == before

    @rule(space=spaces, stays=rarely)
    def pause(self, space: str, stays: bool) -> None:
        self.do(lambda c: moves.pause(c, space, "told to", self.now))
        self.paused.add(space)
        self.take(4, None, True)
        if not stays:
            self.resume()

    @precondition(lambda self: self.paused)
    @rule()
    def resume(self) -> None:
        for space in list(self.paused):
            self.do(lambda c, space=space: moves.resume(c, space))  # type: ignore[misc]
        self.paused.clear()

    @rule(lane=st.sampled_from(LANES), width=st.integers(0, 2), stays=rarely)
    def block(self, lane: Lane, width: int, stays: bool) -> None:
        scope = (Lane(lane.space), Lane(*lane[:2]), lane)[width]
        self.do(lambda c: moves.block(c, scope, "told_to", "wait", self.now))
        self.blocked.add(scope)
        self.take(4, None, True)
        if not stays:
            self.unblock()

    @precondition(lambda self: self.blocked)
    @rule()
    def unblock(self) -> None:
        self.do(lambda c: [moves.unblock(c, scope) for scope in self.blocked])
        self.just_blocked -= self.blocked
        self.blocked.clear()

    @rule()
    def old_rows_end(self) -> None:
        overdue = {
            row.row for row in self.rows() if row.state == "pending" and row.accepted_at + row.max_age <= self.now
        }
        ended = self.do(lambda c: outbox.expire(c, self.now))
        assert {row.row for row in ended} == overdue
        assert all((row.state, row.code) == ("dead", "too_old") for row in ended)

    # -------------------------------------------------------------------------------------------------------- checks

    @invariant()
    def check_everything(self) -> None:
        if not hasattr(self, "database"):
            return
        rows = self.rows()
        self.check_every_accepted_row_is_there_and_is_who_it_was(rows)
        self.check_terminal_rows_never_change(rows)
        self.check_every_row_is_stored_or_owed_or_ended_by_name(rows)
        self.check_the_broker_holds_nothing_that_the_outbox_denies(rows)
        self.check_what_is_at_the_broker_is_what_was_accepted(rows)
        self.check_each_lane_is_in_order(rows)
        self.check_leases(rows)
        self.check_chains_are_walkable_both_ways(rows)
        self.check_counts(rows)

    def check_counts(self, rows: list[OutboxRow]) -> None:
        counted = self.database.read_blocking(views.counts)
        assert counted == Counter((row.space, row.state) for row in rows)

    def check_every_accepted_row_is_there_and_is_who_it_was(self, rows: list[OutboxRow]) -> None:
        """A1.15 1, 3, 6, 7: no id is freed, nothing is without a sender, a space and a destination."""
        assert [row.row for row in rows] == sorted(self.drafts)
        assert len({(row.space, row.sender, row.id) for row in rows}) == len(rows)
        for row in rows:
            assert all(getattr(row, name) == getattr(self.drafts[row.row], name) for name in IDENTITY)
            assert row.space
            assert row.sender
            assert row.destination

    def check_terminal_rows_never_change(self, rows: list[OutboxRow]) -> None:
        """A1.15 2. What may be added: that it arrived late, and what replaced it."""
        for row in rows:
            if row.state in TERMINAL:
                fixed = row._replace(late_seq=None, late_incarnation=None, superseded_by=None)
                assert self.ended.setdefault(row.row, tuple(fixed)) == tuple(fixed)
            else:
                assert row.row not in self.ended

    def check_every_row_is_stored_or_owed_or_ended_by_name(self, rows: list[OutboxRow]) -> None:
        for row in rows:
            if row.state == "done":
                assert self.held(row), "what is done is at the broker for ever"
            elif row.state == "confirmed" and row.incarnation == self.brokers[row.space].incarnation:
                record = self.brokers[row.space].at(row.seq or 0)
                assert record in self.held(row), "what this run confirmed is where it says"
            elif row.state in ("dead", "cancelled"):
                assert row.code
                assert row.words

    def check_the_broker_holds_nothing_that_the_outbox_denies(self, rows: list[OutboxRow]) -> None:
        """A row that ended otherwise and is at the broker says so, or that it may be."""
        for row in rows:
            if row.state in ("dead", "cancelled") and self.held(row):
                assert row.late_seq is not None or row.doubt
        known = {(row.space, row.sender, row.id) for row in rows}
        for space, broker in self.brokers.items():
            assert all((space, record.sender, record.id) in known for record in broker.log)

    def check_what_is_at_the_broker_is_what_was_accepted(self, rows: list[OutboxRow]) -> None:
        for row in rows:
            for record in self.held(row):
                assert (record.payload, record.signature, record.subject) == (*self.written(row), row.subject)

    def check_each_lane_is_in_order(self, rows: list[OutboxRow]) -> None:
        """A1.15 8, by the first appearance of each. A row given up takes no place in its lane any more."""
        for lane in LANES:
            first = [
                self.held(row)[0].seq
                for row in rows
                if lane_of(row) == lane and row.state not in ("dead", "cancelled") and self.held(row)
            ]
            assert first == sorted(first)

    def check_leases(self, rows: list[OutboxRow]) -> None:
        inflight = [row for row in rows if row.state == "inflight"]
        assert len({lane_of(row) for row in inflight}) == len(inflight)
        assert all((row.state == "inflight") == (row.lease_owner is not None) for row in rows)

    def check_chains_are_walkable_both_ways(self, rows: list[OutboxRow]) -> None:
        """A1.15 14, and a successor goes where its predecessor went."""
        by_row = {row.row: row for row in rows}
        same = [name for name in IDENTITY if name != "id"]
        for row in rows:
            if row.superseded_by is not None:
                after = by_row[row.superseded_by]
                assert after.supersedes == row.row
                assert [getattr(after, name) for name in same] == [getattr(row, name) for name in same]
                walked = views.chain(self.reader, row.row)
                assert walked == views.chain(self.reader, after.row)
                assert {row, after} <= set(walked)
            assert row.supersedes is None or by_row[row.supersedes].superseded_by == row.row

    # ------------------------------------------------------------------------------------------------------- the end

    def heal(self) -> None:
        """Everything works again: what is owed must leave, without anybody mending a row by hand."""
        self.resume()
        self.unblock()
        self.attempts.clear()
        for space in self.brokers:
            self.meet(space)
        for _ in range(len(self.drafts) + 6):
            self.time_passes(self.terms.backoff.bound)
            for space in self.brokers:
                self.verify(space, 1_000)
            self.take(100, None, True)
            while self.attempts:
                self.it_is_sent_and_acknowledged(0)
            for space in self.brokers:
                self.release(space)
            if all(row.state in TERMINAL for row in self.rows()):
                return

    def check_nothing_is_owed_once_all_is_well(self) -> None:
        assert [row for row in self.rows() if row.state not in TERMINAL] == []


TestOutboxModel = OutboxModel.TestCase
TestOutboxModel.settings = settings(
    settings.default,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


WALKS, STEPS = (400, 200) if os.environ.get("TIDINGS_DEEP") else (40, 100)


def one_step(model: OutboxModel, luck: random.Random) -> None:
    """A step as a host on a bad day would meet it: mostly sending, often failing, sometimes worse."""
    choice, space, lane = luck.randrange(10_000), luck.choice(["main", "main", "side"]), luck.choice(LANES)
    steps: list[tuple[int, Callable[[], object]]] = [
        (8, lambda: model.accept(lane, luck.choice("xyz"), luck.choice([60_000, HOUR, HOUR * 24]))),
        (2, lambda: model.ask_again(choice, luck.random() < 0.5)),
        (10, lambda: model.take(luck.randint(1, 4), luck.choice([None, None, lane]), luck.random() < 0.8)),
        (6, lambda: model.time_passes(luck.choice([100, 1_000, 1_000, 3_000, 61_000, 121_000]))),
        (2, lambda: model.the_clock_jumps(luck.choice([-HOUR, HOUR]))),
        (2, lambda: model.the_host_crashes(luck.random() < 0.5, luck.random() < 0.3)),
        (
            3,
            lambda: model.the_broker_restarts_and_forgets(space, luck.randint(0, 4), luck.choice([0, 0, 3_000, 5_000])),
        ),
        (4, lambda: model.verify(space, luck.randint(1, 3))),
        (6, lambda: model.release(space)),
        (1, lambda: model.old_payloads_are_dropped()),
        (3, lambda: model.cancel(choice)),
        (3, lambda: model.requeue(choice, luck.random() < 0.8)),
        (1, lambda: model.pause(space, luck.random() < 0.2)),
        (1, lambda: model.block(lane, luck.randint(0, 2), luck.random() < 0.2)),
        (1, lambda: model.resume()),
        (1, lambda: model.unblock()),
        (1, lambda: model.old_rows_end()),
    ]
    if model.attempts:
        failures = [REFUSED, LATER, LATER, REVOKED, AWAY, NO_ANSWER, NO_ANSWER]
        steps += [
            (6, lambda: model.the_broker_stores_it(choice)),
            (8, lambda: model.the_acknowledgement_arrives(choice)),
            (8, lambda: model.it_is_sent_and_acknowledged(choice)),
            (1, lambda: model.somebody_else_answers_for_it(choice)),
            (4, lambda: model.it_fails(choice, luck.choice(failures))),
            (4, lambda: model.its_answer_is_lost(choice, luck.random() < 0.6, luck.choice(LOST_ANSWER))),
        ]
    luck.choices([step for _, step in steps], [weight for weight, _ in steps])[0]()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", range(4))
def test_long_walks_keep_every_promise(seeds: int) -> None:
    """The machine above looks for short stories; these are long ones. A failure names its seed."""
    for seed in range(seeds, WALKS, 4):
        luck, model = random.Random(seed), OutboxModel()
        model.begin(luck.choices(LANES, k=3))
        try:
            for _ in range(STEPS):
                one_step(model, luck)
                model.check_everything()
        except Exception as error:
            error.add_note(f"seed {seed}")
            model.close()
            raise
        model.teardown()
