"""The history checker finds what it is for: each kind of broken promise, planted one at a time."""

import random
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings_testing.history import Event, History, HistoryError

PEOPLE = ("ada", "bob", "eve")


def kept(messages: int = 6) -> History:
    """Ada and bob send to general, everybody reads what others sent, one task is done: every promise is kept."""
    history = History()
    for seq in range(1, messages + 1):
        sender = PEOPLE[seq % 2]
        history.attempted(sender, "general", f"m{seq}")
        history.acknowledged(sender, "general", f"m{seq}", seq)
    for reader in PEOPLE:
        history.owed(reader, "general")
        for event in history.of("acknowledged"):
            if event.sender != reader:
                history.read(reader, event.sender, "general", event.id, event.seq)
    history.attempted("ada", "reviewer", "task")
    history.effect("task", "bob")
    return history


def broken(history: History) -> str:
    with pytest.raises(HistoryError) as caught:
        history.check()
    return str(caught.value)


def without(history: History, act: str, by: str, message: str) -> History:
    history.events = [e for e in history.events if (e.act, e.by, e.id) != (act, by, message)]
    return history


def test_a_history_that_keeps_every_promise_passes() -> None:
    kept().check()


def test_what_was_acknowledged_and_not_read_by_who_was_owed_it_is_found() -> None:
    assert "lost: eve never read m3 of bob (general 3)" in broken(without(kept(), "read", "eve", "m3"))


def test_what_nobody_was_owed_may_go_unread() -> None:
    history = History()
    for seq in (1, 2, 3, 4):
        history.attempted("ada", "general", f"m{seq}")
        history.acknowledged("ada", "general", f"m{seq}", seq)
    history.owed("bob", "general", after=1, before=3)
    history.owed("ada", "general")
    history.read("bob", "ada", "general", "m2", 2)
    history.check()
    history.owed("bob", "general", after=3)
    assert "bob never read m4" in broken(history)


def test_a_note_to_oneself_can_be_owed_too() -> None:
    history = History()
    history.attempted("ada", "direct", "note")
    history.acknowledged("ada", "direct", "note", 1)
    history.owed("ada", "direct", own=True)
    assert "ada never read note" in broken(history)


def test_what_was_attempted_and_not_acknowledged_may_be_read_or_not() -> None:
    history = kept()
    history.attempted("ada", "general", "unknown")
    history.check()
    history.read("bob", "ada", "general", "unknown", 99)
    history.check()


def test_what_was_read_and_never_attempted_is_found() -> None:
    history = kept()
    history.read("bob", "ada", "general", "ghost", 99)
    assert "invented: bob read ghost of ada (general 99), which nobody sent" in broken(history)


def test_what_is_read_under_another_sender_or_at_another_place_is_found() -> None:
    for sender, where in (("bob", "general"), ("ada", "secret")):
        history = kept()
        history.attempted("ada", "general", "mine")
        history.read("eve", sender, where, "mine", 99)
        assert "invented" in broken(history)


def test_an_acknowledgement_of_what_was_never_attempted_is_found() -> None:
    history = kept()
    history.acknowledged("ada", "general", "ghost", 99)
    assert "invented: ghost of ada (general 99)" in broken(history)


def test_what_is_read_twice_without_saying_so_is_found() -> None:
    history = kept()
    history.read("eve", "ada", "general", "m6", 6)
    assert "twice: eve read m6 of ada (general 6) again, and nothing said so" in broken(history)


def test_a_redelivery_that_says_so_is_allowed_until_it_was_settled() -> None:
    history = kept()
    history.read("eve", "ada", "general", "m2", 2, again=True)
    history.check()
    history.settled("eve", "ada", "general", "m2")
    history.read("eve", "ada", "general", "m2", 2, again=True)
    assert "twice: eve read m2 of ada (general 2) again after it was settled" in broken(history)


def test_what_comes_out_of_the_order_of_the_log_is_found_and_what_is_marked_ahead_is_not() -> None:
    history = History()
    for seq in (1, 2, 3):
        history.attempted("ada", "general", f"m{seq}")
    history.read("bob", "ada", "general", "m3", 3, ahead=True)
    history.read("bob", "ada", "general", "m1", 1)
    history.check()
    history.read("eve", "ada", "general", "m2", 2)
    history.read("eve", "ada", "general", "m1", 1)
    assert "disorder: eve read m1 of ada (general 1) after m2 of ada (general 2)" in broken(history)


def test_order_is_asked_of_one_sender_at_one_place_to_one_reader_only() -> None:
    history = History()
    for sender, where, seq in (("ada", "general", 3), ("bob", "general", 2), ("ada", "ops", 1)):
        history.attempted(sender, where, f"m{seq}")
        history.read("eve", sender, where, f"m{seq}", seq)
    history.check()


def test_a_message_stored_twice_is_found_unless_the_store_may_have_lost_its_tail() -> None:
    history = kept()
    history.acknowledged("ada", "general", "m6", 60)
    assert "two places: m6 of ada (general 6) is also at 60" in broken(history)
    history.check(stored_once=False)


def test_two_messages_at_one_sequence_are_found() -> None:
    history = kept()
    history.attempted("ada", "general", "other")
    history.read("eve", "ada", "general", "other", 6)
    assert "share a sequence" in broken(history)


def test_a_task_done_twice_is_found_whoever_did_it() -> None:
    for worker in ("bob", "eve"):
        history = kept()
        history.effect("task", worker)
        assert f"done twice: task task by bob, then by {worker}" in broken(history)


def test_the_effect_of_a_task_nobody_asked_is_found() -> None:
    history = kept()
    history.effect("other", "bob")
    assert "invented: bob did other, which nobody asked" in broken(history)


def test_the_account_names_every_kind_counts_all_and_shows_some() -> None:
    history = kept(messages=100)
    history.events = [e for e in history.events if not (e.act == "read" and e.by == "eve")]
    history.effect("task", "eve")
    said = broken(history)
    assert said.startswith("the history breaks 101 promises (done twice, lost):")
    assert "and 91 more" in said


@given(st.data())
def test_any_single_fault_in_a_kept_history_is_found(data: st.DataObject) -> None:
    history = kept(data.draw(st.integers(3, 12)))
    reads = [e for e in history.events if e.act == "read"]
    victim = data.draw(st.sampled_from(reads))
    fault = data.draw(st.sampled_from(["lose", "repeat", "forge", "swap"]))
    if fault == "lose":
        history.events.remove(victim)
    elif fault == "repeat":
        history.read(victim.by, victim.sender, victim.where, victim.id, victim.seq)
    elif fault == "forge":
        history.read(victim.by, victim.sender, victim.where, victim.id + "x", victim.seq + 1_000)
    else:
        lane = [e for e in reads if (e.by, e.sender) == (victim.by, victim.sender)]
        if len(lane) < 2:
            return
        first, second = history.events.index(lane[0]), history.events.index(lane[-1])
        history.events[first], history.events[second] = lane[-1], lane[0]
    broken(history)


@given(st.randoms(use_true_random=False))
def test_however_lanes_interleave_a_kept_history_passes(rng: random.Random) -> None:
    history = kept(12)
    lanes: dict[tuple[str, str], list[Event]] = {}
    for event in history.events:
        lanes.setdefault((event.by, event.sender) if event.act == "read" else ("", event.act), []).append(event)
    mixed: list[Event] = []
    while lanes:
        key = rng.choice(sorted(lanes))
        mixed.append(lanes[key].pop(0))
        lanes = {k: v for k, v in lanes.items() if v}
    history.events = mixed
    history.check()


def test_threads_record_into_one_history(tmp_path: Path) -> None:
    history = History(tmp_path / "lines")

    def record(sender: str) -> None:
        for number in range(200):
            history.attempted(sender, "general", str(number))

    threads = [threading.Thread(target=record, args=(name,)) for name in PEOPLE]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history.close()
    assert len(history.events) == 600
    assert len(History().merge(tmp_path / "lines").events) == 600


def test_what_others_wrote_to_files_is_merged_in_the_order_of_time(tmp_path: Path) -> None:
    history, first, second = History(), History(tmp_path / "first"), History(tmp_path / "second")
    history.attempted("ada", "direct", "m1")
    first.read("bob", "ada", "direct", "m1", 1)
    second.read("bob", "ada", "direct", "m1", 1, again=True)
    second.settled("bob", "ada", "direct", "m1")
    for each in (second, first):
        each.close()
    history.merge(tmp_path / "second").merge(tmp_path / "first")
    assert [(e.act, e.again) for e in history.events] == [
        ("attempted", False),
        ("read", False),
        ("read", True),
        ("settled", False),
    ]
    history.check()
    history.read("bob", "ada", "direct", "m1", 1, again=True)
    assert "twice: bob read m1" in broken(history)
