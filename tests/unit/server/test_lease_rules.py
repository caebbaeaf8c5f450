"""The rules of a lease over streams in memory, the same for the steward and for durable delivery."""

import base64
import json
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest

from tidings.errors import BrokerUnreachable, LeaseHeld, LeaseLost, LogFull
from tidings.nats.errors import NO_MESSAGE, NO_ROOM, WRITE_UNDER_WAY, WRONG_LAST_SEQUENCE, ConnectionGone
from tidings.nats.jetstream_api import EXPECT_SEQUENCE, Ask, Request, Sleep, Steps
from tidings.server.lease import LOOKS, DeliverLease, LeaseSteps, StewardLease
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import Subjects

T = TypeVar("T")
TIME = "2026-01-02T03:04:05Z"
SUBJECTS = Subjects("main")
KEY = KeyPair.generate()


class Streams:
    """Every subject's records in one sequence, with the broker's compare-and-set. `meanwhile` runs in each pause."""

    def __init__(self) -> None:
        self.records: list[tuple[str, bytes]] = []
        self.slept: list[float] = []
        self.meanwhile: Callable[[], None] = lambda: None
        #: of the next publications to leases: "lost" before they are stored, "unanswered" after it, "full", "busy" with
        #: another write, "former": answered by who led before the last record
        self.fates: list[str] = []
        #: of the next writes of a beat: "busy", or "unanswered"
        self.beat_fates: list[str] = []
        #: how many of the newest records whoever is read from does not have yet; one fewer after each pause
        self.behind = 0
        self.purged: list[str] = []

    def _last(self, subject: str) -> tuple[int, bytes]:
        return self._newest(self.records, subject)

    def _read(self, subject: str) -> tuple[int, bytes]:
        return self._newest(self.records[: len(self.records) - self.behind], subject)

    def _newest(self, records: list[tuple[str, bytes]], subject: str) -> tuple[int, bytes]:
        found = [(seq, data) for seq, (name, data) in enumerate(records, 1) if name == subject]
        return found[-1] if found else (0, b"")

    def run(self, steps: Steps[T]) -> T:
        try:
            request = next(steps)
            while True:
                try:
                    said = self._answer(request)
                except ConnectionGone as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(said)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def _answer(self, request: Request) -> tuple[bytes, bytes] | None:
        if isinstance(request, Sleep):
            self.slept.append(request.seconds)
            self.behind = max(0, self.behind - 1)
            self.meanwhile()
            return None
        assert isinstance(request, Ask)
        subject = request.subject
        if subject.startswith("$JS.API.STREAM.MSG.GET."):
            return b"", json.dumps(self._message(**json.loads(request.payload))).encode()
        if subject.startswith("$JS.API.DIRECT.GET."):
            return self._direct(subject.removeprefix(f"$JS.API.DIRECT.GET.KV_{SUBJECTS.state_bucket}."))
        if subject.startswith("$JS.API.STREAM.PURGE."):
            self.purged.append(json.loads(request.payload)["filter"])
            return b"", b'{"purged": 1}'
        if subject.startswith("$JS.API."):
            config = {"subjects": ["td.main.chat.>"], "max_bytes": 1, "metadata": {}}
            state = {"bytes": 1, "last_seq": len(self.records), "first_seq": 1, "messages": len(self.records)}
            return b"", json.dumps({"config": config, "state": state}).encode()
        return b"", json.dumps(self._publish(request)).encode()

    def _message(self, last_by_subj: str = "", seq: int = 0, next_by_subj: str = "") -> dict[str, Any]:
        subject = last_by_subj
        if seq:
            assert next_by_subj == ">"
            readable = len(self.records) - self.behind
            subject, data = self.records[seq - 1] if seq <= readable else ("", b"")
            seq = seq if subject else 0
        else:
            seq, data = self._read(subject)
        if not seq:
            return {"error": {"err_code": NO_MESSAGE}}
        return {"message": {"seq": seq, "time": TIME, "subject": subject, "data": base64.b64encode(data).decode()}}

    def _direct(self, subject: str) -> tuple[bytes, bytes]:
        seq, data = self._read(subject)
        if not seq:
            return b"NATS/1.0 404 Message Not Found\r\n\r\n", b""
        said = f"Nats-Stream: S\r\nNats-Subject: {subject}\r\nNats-Sequence: {seq}\r\nNats-Time-Stamp: {TIME}\r\n\r\n"
        return b"NATS/1.0\r\n" + said.encode(), data

    def _publish(self, request: Ask) -> dict[str, Any]:
        fates = self.fates if ".lease" in request.subject else self.beat_fates
        fate = fates.pop(0) if fates else ""
        if fate == "lost":
            raise ConnectionGone("lost")
        if fate == "full":
            return {"error": {"err_code": NO_ROOM}}
        if fate == "busy":
            return {"error": {"err_code": WRITE_UNDER_WAY, "description": "wrong last sequence"}}
        expected = int((request.headers or {})[EXPECT_SEQUENCE])
        found = (
            self._newest(self.records[:-1], request.subject)[0] if fate == "former" else self._last(request.subject)[0]
        )
        if found != expected:
            return {"error": {"err_code": WRONG_LAST_SEQUENCE, "description": f"wrong last sequence: {found}"}}
        self.records.append((request.subject, request.payload))
        if fate == "unanswered":
            raise ConnectionGone("unanswered")
        return {"seq": len(self.records)}


def steward_lease(*, replicated: bool = False) -> LeaseSteps:
    return StewardLease(None, SUBJECTS, "SPACE", KEY, ttl=1.0, replicated=replicated)  # type: ignore[arg-type]


def deliver_lease(*, replicated: bool = False) -> LeaseSteps:
    return DeliverLease(None, SUBJECTS, ttl=1.0, replicated=replicated)  # type: ignore[arg-type]


MAKERS = [
    pytest.param(partial(make, replicated=replicated), id=f"{make.__name__}-{'replicas' if replicated else 'alone'}")
    for make in (steward_lease, deliver_lease)
    for replicated in (False, True)
]


@pytest.fixture(params=MAKERS)
def lease_of(request: pytest.FixtureRequest) -> Callable[[], LeaseSteps]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=MAKERS[1::2])
def replicated(request: pytest.FixtureRequest) -> Callable[[], LeaseSteps]:
    """The same, of streams with replicas only."""
    return request.param  # type: ignore[no-any-return]


Maker = Callable[[], LeaseSteps]


def test_a_holder_that_released_is_not_waited_for(lease_of: Maker) -> None:
    streams, first, second = Streams(), lease_of(), lease_of()
    streams.run(first.take_steps())
    streams.run(first.release_steps())
    assert streams.run(second.take_steps()) > first.seq
    assert not streams.slept


def test_a_silent_holder_is_waited_out_for_twice_its_time_and_one_known_to_be_dead_is_not(lease_of: Maker) -> None:
    streams, first, second, third = Streams(), lease_of(), lease_of(), lease_of()
    streams.run(first.take_steps())
    streams.run(second.take_steps())
    assert len(streams.slept) == LOOKS
    assert sum(streams.slept) == pytest.approx(2 * second.ttl)
    streams.run(third.take_steps(after=second.holder_id))
    assert len(streams.slept) == LOOKS


def test_a_holder_that_beats_is_named_and_keeps_its_lease(lease_of: Maker) -> None:
    streams, first, second = Streams(), lease_of(), lease_of()
    streams.run(first.take_steps())
    streams.meanwhile = lambda: streams.run(first.beat_steps())
    with pytest.raises(LeaseHeld, match=r"pid \d+ on "):
        streams.run(second.take_steps())
    assert streams.run(first.prove_steps()).id == first.holder_id


@pytest.mark.parametrize("fates", [["unanswered"], ["lost"], ["lost", "unanswered"]])
def test_a_write_without_an_answer_becomes_one_lease(lease_of: Maker, fates: list[str]) -> None:
    streams, lease = Streams(), lease_of()
    streams.fates = list(fates)
    seq = streams.run(lease.take_steps())
    assert [at for at, (subject, _) in enumerate(streams.records, 1) if subject == lease.subject] == [seq]


def test_whoever_was_replaced_learns_it_from_each_of_its_calls(lease_of: Maker) -> None:
    streams, first, second = Streams(), lease_of(), lease_of()
    streams.run(first.take_steps())
    streams.run(second.take_steps(after=first.holder_id))
    for steps in (first.beat_steps(), first.prove_steps(), first.renew_steps()):
        with pytest.raises(LeaseLost):
            streams.run(steps)
    assert streams.run(second.prove_steps()).seq == second.seq


def test_an_own_beat_that_was_not_answered_is_no_other_holder(lease_of: Maker) -> None:
    streams, lease = Streams(), lease_of()
    streams.run(lease.take_steps())
    before = lease._beat_revision
    streams.run(lease.beat_steps())
    lease._beat_revision = before
    streams.run(lease.beat_steps())
    streams.run(lease.beat_steps())
    assert lease.is_fresh


def test_a_stream_without_room_is_given_some_once(lease_of: Maker) -> None:
    streams = Streams()
    streams.fates = ["full"]
    assert streams.run(lease_of().take_steps())
    full = Streams()
    full.fates = ["full", "full"]
    with pytest.raises(LogFull):
        full.run(lease_of().take_steps())


def test_only_the_newest_deliver_lease_is_kept() -> None:
    streams, lease = Streams(), deliver_lease()
    streams.run(lease.take_steps())
    assert streams.purged == [SUBJECTS.delivery_lease]


def test_a_lease_that_cannot_be_read_is_waited_out_like_any_other(lease_of: Maker) -> None:
    streams, lease = Streams(), lease_of()
    streams.records.append((lease.subject, b"garbage"))
    assert str(streams.run(lease.current_steps())) == "an unreadable lease at 1"
    assert streams.run(lease.take_steps()) > 1


# --- streams with replicas ---


def test_a_lease_that_is_refused_because_a_write_is_under_way_is_written_again(replicated: Maker) -> None:
    streams, lease = Streams(), replicated()
    streams.fates = ["busy", "busy"]
    assert streams.run(lease.take_steps()) == lease.seq
    streams.fates = ["busy"]
    assert streams.run(lease.renew_steps()) > 1


def test_a_former_leader_who_has_an_older_lease_takes_it_from_nobody(replicated: Maker) -> None:
    streams, lease = Streams(), replicated()
    streams.run(lease.take_steps())
    before = streams.run(lease.renew_steps())
    streams.fates = ["former", "former"]
    assert streams.run(lease.renew_steps()) > before


@pytest.mark.parametrize("fate", ["lost", "unanswered"])
def test_an_unanswered_lease_is_asked_for_again_and_never_read_from_who_lags(replicated: Maker, fate: str) -> None:
    streams, lease = Streams(), replicated()
    streams.run(lease.take_steps())
    streams.behind = 0
    streams.fates = [fate]
    seq = streams.run(lease.renew_steps())
    leases = [each for each, _ in streams.records if each == lease.subject]
    assert len(leases) == 2
    assert streams.records[seq - 1][0] == lease.subject


def test_a_lease_that_went_to_another_is_lost_although_whoever_is_read_does_not_know(replicated: Maker) -> None:
    streams, first, second = Streams(), replicated(), replicated()
    streams.run(first.take_steps())
    streams.run(second.take_steps(after=first.holder_id))
    streams.behind = len(streams.records) - first.seq
    with pytest.raises(LeaseLost):
        streams.run(first.renew_steps())


def test_a_holder_proves_itself_by_a_beat_and_who_was_replaced_cannot(replicated: Maker) -> None:
    streams, first, second = Streams(), replicated(), replicated()
    streams.run(first.take_steps())
    assert streams.run(first.prove_steps()).id == first.holder_id
    streams.run(second.take_steps(after=first.holder_id))
    streams.behind = 3
    with pytest.raises(LeaseLost, match="another"):
        streams.run(first.prove_steps())
    assert streams.run(second.prove_steps()).seq == second.seq


def test_who_takes_over_has_the_beat_before_it_has_the_lease(replicated: Maker) -> None:
    streams, first, second = Streams(), replicated(), replicated()
    streams.run(first.take_steps())
    steps = second.take_steps(after=first.holder_id)
    request = next(steps)
    while not (isinstance(request, Ask) and request.subject == second.subject):
        request = steps.send(streams._answer(request))
    with pytest.raises(LeaseLost):
        streams.run(first.prove_steps())


def test_a_holder_that_beats_again_while_another_takes_over_keeps_its_lease(replicated: Maker) -> None:
    streams, first, second = Streams(), replicated(), replicated()
    streams.run(first.take_steps())
    looks = 0

    def wakes() -> None:
        nonlocal looks
        looks += 1
        if looks == LOOKS:
            streams.beat_fates = []
            streams.run(first.beat_steps())

    streams.meanwhile = wakes
    with pytest.raises(LeaseHeld):
        streams.run(second.take_steps())
    streams.meanwhile = lambda: None
    assert streams.run(first.prove_steps()).seq == first.seq


def test_a_beat_under_way_is_no_other_holder(replicated: Maker) -> None:
    streams, lease = Streams(), replicated()
    streams.run(lease.take_steps())
    streams.beat_fates = ["busy", "busy"]
    streams.run(lease.beat_steps())
    assert lease.is_fresh


def test_a_lease_that_stays_busy_is_an_error_and_nobodys(replicated: Maker) -> None:
    streams, lease = Streams(), replicated()
    streams.fates = ["busy"] * 1_000
    with pytest.raises(BrokerUnreachable):
        streams.run(lease.take_steps())
