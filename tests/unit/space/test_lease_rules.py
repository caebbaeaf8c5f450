"""The rules of a lease over streams in memory, the same for the steward and for durable delivery."""

import base64
import json
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from tidings.broker.jetstream_api import (
    EXPECT_SEQUENCE,
    NO_MESSAGE,
    NO_ROOM,
    WRONG_LAST_SEQUENCE,
    Ask,
    Request,
    Sleep,
    Steps,
)
from tidings.errors import LeaseHeld, LeaseLost, LogFull
from tidings.nats.errors import ConnectionGone
from tidings.space.lease import LOOKS, DeliverLease, LeaseSteps, StewardLease
from tidings.wire.keys import KeyPair
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
        #: of the next publications to leases: "lost" before they are stored, "unanswered" after it, "full"
        self.fates: list[str] = []
        self.purged: list[str] = []

    def _last(self, subject: str) -> tuple[int, bytes]:
        found = [(seq, data) for seq, (name, data) in enumerate(self.records, 1) if name == subject]
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
            self.meanwhile()
            return None
        assert isinstance(request, Ask)
        subject = request.subject
        if subject.startswith("$JS.API.STREAM.MSG.GET."):
            return b"", json.dumps(self._message(json.loads(request.payload)["last_by_subj"])).encode()
        if subject.startswith("$JS.API.DIRECT.GET."):
            return self._direct(subject.removeprefix(f"$JS.API.DIRECT.GET.KV_{SUBJECTS.state_bucket}."))
        if subject.startswith("$JS.API.STREAM.PURGE."):
            self.purged.append(json.loads(request.payload)["filter"])
            return b"", b'{"purged": 1}'
        if subject.startswith("$JS.API."):
            config = {"subjects": ["td.main.chat.>"], "max_bytes": 1, "metadata": {}}
            return b"", json.dumps({"config": config, "state": {"bytes": 1}}).encode()
        return b"", json.dumps(self._publish(request)).encode()

    def _message(self, subject: str) -> dict[str, Any]:
        seq, data = self._last(subject)
        if not seq:
            return {"error": {"err_code": NO_MESSAGE}}
        return {"message": {"seq": seq, "time": TIME, "subject": subject, "data": base64.b64encode(data).decode()}}

    def _direct(self, subject: str) -> tuple[bytes, bytes]:
        seq, data = self._last(subject)
        if not seq:
            return b"NATS/1.0 404 Message Not Found\r\n\r\n", b""
        said = f"Nats-Stream: S\r\nNats-Subject: {subject}\r\nNats-Sequence: {seq}\r\nNats-Time-Stamp: {TIME}\r\n\r\n"
        return b"NATS/1.0\r\n" + said.encode(), data

    def _publish(self, request: Ask) -> dict[str, Any]:
        fate = self.fates.pop(0) if self.fates and ".lease" in request.subject else ""
        if fate == "lost":
            raise ConnectionGone("lost")
        if fate == "full":
            return {"error": {"err_code": NO_ROOM}}
        expected = int((request.headers or {})[EXPECT_SEQUENCE])
        if self._last(request.subject)[0] != expected:
            return {"error": {"err_code": WRONG_LAST_SEQUENCE}}
        self.records.append((request.subject, request.payload))
        if fate == "unanswered":
            raise ConnectionGone("unanswered")
        return {"seq": len(self.records)}


def steward_lease() -> LeaseSteps:
    return StewardLease(None, SUBJECTS, "SPACE", KEY, ttl=1.0)  # type: ignore[arg-type]


def deliver_lease() -> LeaseSteps:
    return DeliverLease(None, SUBJECTS, ttl=1.0)  # type: ignore[arg-type]


@pytest.fixture(params=[steward_lease, deliver_lease])
def lease_of(request: pytest.FixtureRequest) -> Callable[[], LeaseSteps]:
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
