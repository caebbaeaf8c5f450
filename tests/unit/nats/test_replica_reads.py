"""Reading a stream whose replicas lag: nothing is taken to be absent because somebody does not have it yet."""

import base64
import itertools
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.errors import BrokerUnreachable, LogRegressed
from tidings.nats import jetstream_api as api
from tidings.nats.errors import NO_MESSAGE
from tidings.nats.jetstream_api import SHORT_LOOKS, AskPage, RangeReader, Sleep, Steps
from tidings.wire.records import Missing, Page

T = TypeVar("T")


def stamp(seq: int) -> str:
    return f"2026-01-02T03:{seq // 60:02}:{seq % 60:02}Z"


class Replicas:
    """One stream, by replicas that each have it up to somewhere. Every question is answered by the next of them, and
    every pause lets each take one record more. Whoever is asked for the state is a leader, or was one."""

    def __init__(
        self, subjects: dict[int, str], *, end: int, has: Iterable[int], leads: Iterable[int] = (0,), most: int = 1_024
    ) -> None:
        self.subjects, self.end, self.most = subjects, end, most
        self.has = list(has)
        self._turns = itertools.cycle(range(len(self.has)))
        self._leads = itertools.cycle(leads)
        self.slept = 0

    def run(self, steps: Steps[T]) -> T:
        try:
            request = next(steps)
            while True:
                request = steps.send(self._answer(request))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def _answer(self, request: Any) -> tuple[bytes, bytes] | None:
        if isinstance(request, Sleep):
            self.slept += 1
            self.has = [min(has + 1, self.end) for has in self.has]
            return None
        body = json.loads(request.payload or b"{}")
        if "INFO" in request.subject:
            return b"", json.dumps({"state": self._state(self.has[next(self._leads)])}).encode()
        has = self.has[next(self._turns)]
        if isinstance(request, AskPage):
            self._page(request.page, body, has)
            return None
        found = next((seq for seq in self._records(has, body["next_by_subj"]) if seq >= body["seq"]), None)
        if found is None:
            return b"", json.dumps({"error": {"err_code": NO_MESSAGE}}).encode()
        data = base64.b64encode(b"x").decode()
        message = {"seq": found, "time": stamp(found), "subject": self.subjects[found], "data": data}
        return b"", json.dumps({"message": message}).encode()

    def _state(self, has: int) -> dict[str, Any]:
        kept = self._records(has, ">")
        gone = [seq for seq in range(1, has + 1) if seq not in self.subjects]
        return {"last_seq": has, "first_seq": kept[0] if kept else has + 1, "messages": len(kept), "deleted": gone}

    def _records(self, has: int, wanted: str) -> list[int]:
        return [seq for seq in sorted(self.subjects) if seq <= has and api._matches(wanted, self.subjects[seq])]

    def _page(self, page: Page, body: dict[str, Any], has: int) -> None:
        newest = ""
        if filters := body.get("multi_last"):
            last = {self.subjects[seq]: seq for each in filters for seq in self._records(has, each)}
            if len(last) > self.most:
                page.take(b"NATS/1.0 413 Too Many Results\r\n\r\n", b"")
                return
            if not last:
                page.take(b"NATS/1.0 404 No Results\r\n\r\n", b"")
                return
            found, newest = (
                sorted(seq for seq in last.values() if seq >= body.get("seq", 0)),
                f"Nats-UpTo-Sequence: {has}\r\n",
            )
        elif "start_time" in body:
            when = datetime.fromisoformat(body["start_time"])
            found = [s for s in self._records(has, body["next_by_subj"]) if datetime.fromisoformat(stamp(s)) >= when]
        else:
            found = [seq for seq in self._records(has, body["next_by_subj"]) if seq >= body["seq"]]
        for seq in found[: body["batch"]]:
            subject = self.subjects[seq]
            tail = f"Nats-Stream: S\r\nNats-Subject: {subject}\r\nNats-Sequence: {seq}\r\n"
            tail += f"Nats-Time-Stamp: {stamp(seq)}\r\n"
            assert page.take(f"NATS/1.0\r\n{tail}\r\n".encode(), b"x")
        pending = max(0, len(found) - body["batch"])
        page.take(f"NATS/1.0 204 EOB\r\nNats-Num-Pending: {pending}\r\n{newest}\r\n".encode(), b"")


def read(replicas: Replicas, first: int, last: int, wanted: str = ">", *, holes: bool = False) -> list[int | Missing]:
    reader = RangeReader("S", wanted, first, last, page=3, max_bytes=1_000, holes=holes, replicated=True)
    found: list[int | Missing] = []
    while not reader.done:
        for part in replicas.run(reader.next_parts()):
            found += [part] if isinstance(part, Missing) else part.seqs
    return found


STREAMS = st.dictionaries(st.integers(1, 12), st.sampled_from(["a.x", "a.y", "b.x", "b.y.z"]), min_size=1)


@given(
    STREAMS, st.lists(st.integers(0, 12), min_size=3, max_size=3), st.sampled_from([">", "a.*", "b.>"]), st.booleans()
)
def test_a_read_has_every_record_of_its_range_whoever_answers(
    subjects: dict[int, str], has: list[int], wanted: str, many: bool
) -> None:
    replicas = Replicas(subjects, end=12, has=[*has[:2], 12], leads=(2,), most=1 if many else 1_024)
    owed = [seq for seq in sorted(subjects) if api._matches(wanted, subjects[seq])]
    assert read(replicas, 1, 12, wanted) == owed


@given(STREAMS, st.lists(st.integers(0, 12), min_size=2, max_size=2))
def test_what_is_missing_was_removed_and_is_not_only_late(subjects: dict[int, str], has: list[int]) -> None:
    found = read(Replicas(subjects, end=12, has=[*has, 12], leads=(2,)), 1, 12, holes=True)
    records = [each for each in found if isinstance(each, int)]
    gone = [seq for each in found if isinstance(each, Missing) for seq in range(each.first, each.last + 1)]
    assert records == sorted(subjects)
    assert sorted([*records, *gone]) == list(range(1, 13))


def test_a_former_leader_is_not_believed_that_the_stream_is_shorter() -> None:
    stream = dict.fromkeys(range(1, 9), "a")
    replicas = Replicas(stream, end=8, has=[3, 8], leads=(0, 1))
    assert read(replicas, 1, 8, holes=True) == list(range(1, 9))


def test_a_stream_that_stays_shorter_went_backwards() -> None:
    replicas = Replicas({1: "a", 2: "a"}, end=2, has=[2, 2])
    with pytest.raises(LogRegressed, match="ends at 2, before 9"):
        read(replicas, 1, 9, holes=True)
    assert replicas.slept >= SHORT_LOOKS
    assert read(Replicas({1: "a", 2: "a"}, end=2, has=[2, 2]), 1, 9) == [1, 2]


def test_the_record_at_a_sequence_is_waited_for_and_one_that_was_removed_is_not() -> None:
    stream = {1: "a", 2: "a", 3: "b", 5: "b"}
    lagging = Replicas(stream, end=6, has=[1, 6], leads=(1,))
    found = lagging.run(api.at("S", 5, replicated=True))
    assert found is not None
    assert found.seq == 5
    for seq in (4, 6):
        current = Replicas(stream, end=6, has=[6, 6])
        assert current.run(api.at("S", seq, replicated=True)) is None
        assert not current.slept


def test_a_number_beyond_the_end_that_anybody_may_have_made_up_is_not_waited_for() -> None:
    replicas = Replicas({1: "a"}, end=1, has=[1, 1])
    assert replicas.run(api.at("S", 10**12, replicated=True, patient=False)) is None
    assert not replicas.slept
    assert replicas.run(api.at("S", 10**12, replicated=True)) is None
    assert replicas.slept >= SHORT_LOOKS, "one that was there is looked for"


def test_the_next_of_a_filter_is_none_only_if_a_replica_proves_it() -> None:
    stream = {1: "a", 2: "b", 7: "a"}
    found = Replicas(stream, end=8, has=[2, 8], leads=(1,)).run(api.following("S", "a", 2, replicated=True))
    assert found is not None
    assert found.seq == 7
    assert Replicas(stream, end=8, has=[5, 8], leads=(1,)).run(api.following("S", "b", 3, replicated=True)) is None


def test_nothing_since_a_time_is_proven_too() -> None:
    stream = {1: "a", 20: "b", 30: "a"}

    def since(seq: int, wanted: str, *has: int) -> int | None:
        when = datetime.fromisoformat(stamp(seq)).astimezone(UTC)
        return Replicas(stream, end=30, has=has, leads=(1,)).run(api.first_after("S", wanted, when, replicated=True))

    assert since(25, "a", 20, 30) == 30
    assert since(25, "b", 20, 30) is None
    assert since(25, "a", 1, 30) == 30
    assert since(31, "a", 20, 30) is None


def test_the_newest_of_a_subject_is_read_from_a_replica_that_has_what_was_written_after_it() -> None:
    stream = {1: "s", 2: "lease", 3: "s", 4: "lease"}
    lagging = Replicas(stream, end=4, has=[2, 2])
    found = lagging.run(api.last_as_of("S", "s", "lease", 4))
    assert found is not None
    assert found.seq == 3
    assert lagging.slept == 2
    assert Replicas(stream, end=4, has=[4]).run(api.last_as_of("S", "other", "lease", 4)) is None


def test_replicas_that_never_catch_up_are_an_error_and_no_end() -> None:
    stuck = Replicas({1: "a", 2: "lease"}, end=2, has=[1])
    stuck.end = 1
    with pytest.raises(BrokerUnreachable, match="its replicas lag"):
        stuck.run(api.last_as_of("S", "a", "lease", 2))


@pytest.mark.parametrize(
    ("wanted", "subject", "is_so"),
    [
        (">", "a.b", True),
        ("a.>", "a", False),
        ("a.>", "a.b.c", True),
        ("a.*", "a.b.c", False),
        ("a.*.c", "a.b.c", True),
        ("*", "a.b", False),
        ("a.b", "a.b", True),
    ],
)
def test_a_filter_covers_a_subject_as_the_broker_has_it(wanted: str, subject: str, is_so: bool) -> None:
    assert api._matches(wanted, subject) is is_so
