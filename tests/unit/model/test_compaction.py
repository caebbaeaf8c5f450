"""Purging superseded versions changes no answer at or above the floor."""

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tidings.model.compaction import Purge, removable
from tidings.model.projection import LogRecord, Table
from tidings.wire.rulings import Access, Channel, Lease, Link, Space
from tools.generated import PUBACK, GeneratedLog, generate_log, new_log, seeded_key, verify_once


@pytest.fixture
def log() -> GeneratedLog:
    return new_log(random.Random(1))


@pytest.fixture
def bob(log: GeneratedLog) -> str:
    log.access(log.agents[1], Access(op="bob", name="bob", read=(">",), post=(">",)))
    return log.agents[1]


def fold(log: GeneratedLog, records: Iterable[LogRecord]) -> Table:
    return Table(log.subjects, log.space_id, log.anchor_key, verify=verify_once).apply_all(records)


def compacted(records: Iterable[LogRecord], purges: Iterable[Purge]) -> list[LogRecord]:
    """What is left of `records` after the purges."""
    cuts = dict(purges)
    return [record for record in records if record.seq >= cuts.get(record.subject, 0)]


def purges_at(log: GeneratedLog, floor: int) -> list[Purge]:
    return removable(fold(log, log.records), floor)


def left_after(log: GeneratedLog, floor: int) -> list[LogRecord]:
    return compacted(log.records, purges_at(log, floor))


def answers(log: GeneratedLog, table: Table, seq: int) -> dict[str, Any]:
    """Everything the table can say about `seq`."""
    return {
        "view": table.as_of(seq),
        "members": {c: table.members_at(c, seq) for c in log.channels},
        "memberships": {o: table.memberships_at(o, seq) for o in log.agents},
        "access": {o: table.access_at(o, seq) for o in log.agents},
        "class": {c: table.class_at(c, seq) for c in log.channels},
        "owed": {(o, c): table.owed(seq, o, c) for o in log.agents for c in log.channels},
        "deliverable": {c: table.deliverable(seq, log.agents[0], c) for c in log.channels},
        "key": table.steward_key_at(seq),
        "space": table.space_at(seq),
    }


def present(log: GeneratedLog, table: Table, floor: int) -> dict[str, Any]:
    """Everything it says about now, and the intervals that reach above the floor."""
    names = [f"agent{index}" for index in range(len(log.agents))]
    return {
        "lease": table.lease,
        "names": [table.owner_named(name) for name in names],
        "next key": table.steward_key,
        "intervals": [i for o in log.agents for i in table.intervals(o) if i.left is None or i.left > floor],
        "uncovered": {o: table.uncovered(o) for o in log.agents},
    }


def assert_same_answers(log: GeneratedLog, kept: Sequence[LogRecord], floor: int, sample: Iterable[int]) -> None:
    full, small = fold(log, log.records), fold(log, kept)
    assert present(log, small, floor) == present(log, full, floor)
    for seq in {floor, floor + 1, log.seq, log.seq + 1, *sample}:
        if seq >= floor:
            assert answers(log, small, seq) == answers(log, full, seq), (floor, seq)


# --- each rule by name ---


def test_a_version_goes_once_a_newer_one_lies_at_or_below_the_floor(log: GeneratedLog) -> None:
    first = log.channel(Channel(op="1", name="general", cls="live"))
    second = log.channel(Channel(op="2", name="general"))
    assert purges_at(log, second.seq - 1) == []
    assert purges_at(log, second.seq) == [(first.subject, second.seq)]
    assert left_after(log, second.seq) == [second]


def test_a_void_version_supersedes_nothing(log: GeneratedLog) -> None:
    first = log.channel(Channel(op="1", name="general", cls="live"))
    log.append(first.subject, PUBACK)
    log.rule(first.subject, b"{}")
    log.rule(first.subject, Channel(op="2", name="general"), key=seeded_key(random.Random(3)))
    assert purges_at(log, 99) == []


def test_a_repeated_join_does_not_supersede_the_opening(log: GeneratedLog, bob: str) -> None:
    opening = log.member(bob, "general", "in")
    repeat = log.member(bob, "general", "in")
    assert purges_at(log, repeat.seq) == []
    assert fold(log, log.records).members_at("general", repeat.seq) == {bob}
    assert opening in left_after(log, repeat.seq)


def test_access_stays_for_a_join_whose_leave_lies_above_the_floor(log: GeneratedLog, bob: str) -> None:
    log.member(bob, "general", "in")
    narrowed = log.access(bob, Access(op="1", name="bob", read=("ops",)))
    log.chat(bob, "general")
    leave = log.member(bob, "general", "out")
    assert purges_at(log, leave.seq - 1) == []
    assert fold(log, left_after(log, narrowed.seq)).members_at("general", leave.seq - 1) == {bob}


def test_a_closed_interval_leaves_only_its_leave(log: GeneratedLog, bob: str) -> None:
    log.member(bob, "general", "in")
    leave = log.member(bob, "general", "out")
    kept = left_after(log, leave.seq)
    assert [record.seq for record in kept if ".member." in record.subject] == [leave.seq]
    assert fold(log, kept).members_at("general", leave.seq + 1) == frozenset()
    assert purges_at(log, leave.seq - 1) == []


def test_access_stays_while_a_join_judged_by_it_stays(log: GeneratedLog, bob: str) -> None:
    join = log.member(bob, "general", "in")
    narrowed = log.access(bob, Access(op="1", name="bob", read=("ops",), post=(">",)))
    assert purges_at(log, narrowed.seq) == []

    leave = log.member(bob, "general", "out")
    assert purges_at(log, leave.seq) == [(join.subject, leave.seq), (narrowed.subject, narrowed.seq)]
    assert_same_answers(log, left_after(log, leave.seq), leave.seq, [])


def test_access_goes_up_to_the_version_that_judged_the_oldest_join_that_stays(log: GeneratedLog, bob: str) -> None:
    judge = log.access(bob, Access(op="1", name="bob", read=("general",)))
    log.member(bob, "general", "in")
    newest = log.access(bob, Access(op="2", name="bob", read=("ops",)))
    assert purges_at(log, newest.seq) == [(judge.subject, judge.seq)]


def test_memberships_are_purged_before_the_access_that_waits_for_them(log: GeneratedLog, bob: str) -> None:
    log.member(bob, "general", "in")
    log.access(bob, Access(op="1", name="bob"))
    leave = log.member(bob, "general", "out")
    assert [".member." in subject for subject, _ in purges_at(log, leave.seq)] == [True, False]


def test_access_stays_while_a_record_it_voided_by_name_stays(log: GeneratedLog, bob: str) -> None:
    eve = log.agents[2]
    log.access(eve, Access(op="1", name="bob", read=(">",)))
    renamed = log.access(bob, Access(op="2", name="robert", read=(">",)))
    assert purges_at(log, renamed.seq) == []
    assert fold(log, left_after(log, 99)).access_at(eve, 99) is None

    granted = log.access(eve, Access(op="3", name="eve"))
    assert purges_at(log, granted.seq) == [(granted.subject, granted.seq)]
    log.records = left_after(log, granted.seq)
    assert purges_at(log, granted.seq) == [(renamed.subject, renamed.seq)]


def test_a_rotation_and_everything_after_it_stays(log: GeneratedLog) -> None:
    log.space(Space(op="1", channels="listed"))
    fresh = seeded_key(random.Random(2))
    rotation = log.space(Space(op="2", steward_key=fresh.id))
    log.steward = fresh
    log.space(Space(op="3"))
    last = log.space(Space(op="4"))
    assert purges_at(log, last.seq) == [(rotation.subject, rotation.seq)]
    kept = left_after(log, last.seq)
    assert fold(log, kept).steward_key == fresh.id
    assert fold(log, kept).void.total() == 0


def test_an_older_lease_goes_only_below_the_floor(log: GeneratedLog) -> None:
    for holder in ("one", "two", "three"):
        log.rule(log.subjects.steward_lease, Lease(op="1", holder=holder, host="h", pid=1, key=log.steward.id))
    log.append(log.subjects.steward_lease, PUBACK)
    assert purges_at(log, 0) == []
    assert purges_at(log, 2) == [(log.subjects.steward_lease, 2)]
    assert purges_at(log, 9) == [(log.subjects.steward_lease, 3)]


def test_links_are_superseded_like_channels(log: GeneratedLog) -> None:
    for number in range(2):
        link = Link(op=f"{number}", link="east", state="on", origin=log.space_id, channels={})
        log.rule(log.subjects.link("east"), link)
    assert purges_at(log, 2) == [(log.subjects.link("east"), 2)]


def test_messages_are_none_of_its_business(log: GeneratedLog, bob: str) -> None:
    for _ in range(3):
        log.chat(bob, "general")
    assert purges_at(log, 99) == []


# --- and all of them together ---


@pytest.mark.parametrize("seed", range(120))
def test_no_answer_at_or_above_the_floor_changes(seed: int) -> None:
    rng = random.Random(10_000 + seed)
    log = generate_log(rng, size=rng.randint(60, 160), agents=rng.randint(2, 4), channels=rng.randint(2, 5))
    for floor in rng.sample(range(log.seq + 1), 3):
        purges = purges_at(log, floor)
        some = [purge for purge in purges if rng.random() < 0.5]
        sample = [rng.randint(floor, log.seq + 1) for _ in range(6)]
        assert_same_answers(log, compacted(log.records, purges), floor, sample)
        assert_same_answers(log, compacted(log.records, some), floor, sample)


@pytest.mark.parametrize("seed", range(40))
def test_compacting_again_and_again_while_the_log_grows_changes_no_answer(seed: int) -> None:
    rng = random.Random(20_000 + seed)
    log = generate_log(rng, size=150, agents=3, channels=4)
    kept: list[LogRecord] = []
    cuts = [*sorted(rng.sample(range(20, 150), 3)), 150]
    for start, end in zip([0, *cuts], cuts, strict=False):
        kept += log.records[start:end]
        floor = rng.randint(log.records[start].seq, log.records[end - 1].seq)
        kept = compacted(kept, removable(fold(log, kept), floor))
    assert len(kept) < len(log.records)
    assert_same_answers(log, kept, floor, rng.sample(range(floor, log.seq + 2), min(6, log.seq + 2 - floor)))


def test_generated_logs_give_the_compaction_something_to_do() -> None:
    kinds: set[str] = set()
    for seed in range(10):
        log = generate_log(random.Random(seed), size=150)
        kinds |= {log.subjects.tail(subject).split(".")[0] for subject, _ in purges_at(log, log.seq)}
    assert kinds == {"member", "acl", "channel", "space", "lease", "link"}
