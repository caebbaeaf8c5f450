"""The lease fences: one steward rules, the broker refuses every other, and an unknown outcome is found out."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from folded_log import fold_log
from tidings.contract.admin import ChangeSpaceRequest, PartsChange
from tidings.contract.agents import HealthRequest
from tidings.contract.channels import JoinRequest, MembershipsRequest
from tidings.errors import ConflictError, LeaseHeld, LeaseLost, OutcomeUnknown
from tidings.model.projection import Verdict
from tidings.nats.client import connect
from tidings.nats.errors import NO_ROOM, WRONG_LAST_SEQUENCE, ApiError
from tidings.nats.jetstream import JetStream
from tidings.nats.jetstream_api import EXPECT_SEQUENCE, EXPECT_SUBJECT, Steps
from tidings.server.lease import Holder, StewardLease
from tidings.server.state import StateBucket
from tidings.steward.context import Intervals
from tidings.steward.retention import claim_floor, read_floor
from tidings.steward.service import Steward
from tidings.steward.store_watch import StoreWatch
from tidings.wire.rulings import Member
from tidings.wire.signing import SIGNATURE_HEADER, KeyPair
from tidings_testing.processes import pause
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually, insist

#: beats so seldom that it does not notice by itself that it was replaced
UNAWARE = Intervals(lease_ttl=60, gate=60, retention=60, marks=60, store=60)
BRISK = Intervals(lease_ttl=0.4, gate=0.1, retention=0.2, marks=0.1)


@pytest.fixture(params=["one server", pytest.param("three servers", marks=pytest.mark.slow)])
async def space(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RealSpace]:
    """The promises of a lease are the same whatever the log lies on."""
    async with real_space(tmp_path / "home", nodes=3 if request.param == "three servers" else 1) as running:
        yield running


@asynccontextmanager
async def steward_js(space: RealSpace) -> AsyncIterator[JetStream]:
    """A connection of its own with the steward's credential."""
    user = KeyPair((space.home.creds / "steward.user").read_text().strip())
    connection = await connect(space.info.url, space.home.creds / "steward.creds", user.id, name="rival")
    try:
        yield JetStream(connection)
    finally:
        await connection.close()


def lease_of(space: RealSpace, js: JetStream, ttl: float = 0.4) -> StewardLease:
    key = KeyPair((space.home.creds / "steward.key").read_text().strip())
    return StewardLease(js, space.subjects, space.info.id, key, ttl=ttl, replicated=js.replicated)


def serving(space: RealSpace) -> Steward:
    assert space.steward is not None
    return space.steward


async def kill_in_process(space: RealSpace) -> None:
    """End the steward without a word, as a kill would."""
    assert space._steward_task is not None
    task, space.steward, space._steward_task = space._steward_task, None, None
    while not task.done():  # `wait_for` of Python 3.11 may swallow one
        task.cancel()
        await asyncio.wait({task}, timeout=1)


async def test_a_second_steward_refuses_and_names_the_holder(space: RealSpace) -> None:
    rival = Steward(space.home, intervals=BRISK)
    with pytest.raises(LeaseHeld) as refused:
        await asyncio.wait_for(rival.run(), 20)
    text = str(refused.value)
    assert serving(space).lease.holder_id in text
    assert f"pid {os.getpid()} on {socket.gethostname()}" in text
    assert await serving(space).lease.prove()


@pytest.fixture
def _store_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the whole store proves the lease, at a moment that no test can choose."""

    async def read_nothing(_: StoreWatch) -> None:
        pass

    monkeypatch.setattr(StoreWatch, "read_all", read_nothing)


@pytest.mark.usefixtures("_store_is_not_read")
async def test_a_stale_holder_is_refused_by_the_broker_whatever_it_believes(space: RealSpace) -> None:
    await space.stop_steward()
    old = await space.start_steward(UNAWARE)
    await space.add("ada")
    async with space.agent("ada") as ada, steward_js(space) as js, space.core() as core:
        stale_fence = old.lease.fence
        new = lease_of(space, js)
        await new.take(after=old.lease.holder_id)
        head = (await core.info("LOG_main"))["state"]["last_seq"]
        async with old.writer.lock:
            with pytest.raises(LeaseLost, match=new.holder_id):
                await old.writer.write(
                    space.subjects.member(ada.id, old.space.tag("general")),
                    Member(op="x" * 8, state="in", pattern="general"),
                )
        for connection in (core, old.js):
            with pytest.raises(ApiError) as refused:
                await connection.publish(space.subjects.access(ada.id), b"{}", {SIGNATURE_HEADER: "s", **stale_fence})
            assert refused.value.err_code == WRONG_LAST_SEQUENCE
        assert (await core.info("LOG_main"))["state"]["last_seq"] == head
        # what it is asked now it does not answer from its old table
        with pytest.raises(OutcomeUnknown, match="ask again with the same op"):
            await ada.control.call(JoinRequest("general"))
    assert isinstance(await space.steward_ended(), LeaseLost)


@pytest.mark.usefixtures("_store_is_not_read")
async def test_a_steward_that_was_paused_past_its_lease_does_not_answer_from_its_old_table(space: RealSpace) -> None:
    await space.stop_steward()
    old = await space.start_steward(UNAWARE)
    await space.add("ada")
    async with space.agent("ada") as ada, steward_js(space) as js:
        await lease_of(space, js).take(after=old.lease.holder_id)
        assert (await ada.control.call(MembershipsRequest())).memberships == ()  # nobody can have taken over unseen yet
        old.lease._beaten -= 1_000  # as if it had been paused
        with pytest.raises(OutcomeUnknown, match="replaced"):
            await ada.control.call(MembershipsRequest())
    assert isinstance(await space.steward_ended(), LeaseLost)


async def test_a_clean_stop_lets_the_next_one_take_over_at_once(space: RealSpace) -> None:
    await space.stop_steward()
    await space.start_steward(UNAWARE)
    await space.stop_steward()
    started = time.monotonic()
    await space.start_steward(UNAWARE)
    assert time.monotonic() - started < 5


async def test_a_silent_holder_is_waited_out_for_twice_its_time(space: RealSpace) -> None:
    first = serving(space).lease.seq
    await kill_in_process(space)
    started = time.monotonic()
    second = await space.start_steward(BRISK)
    assert time.monotonic() - started >= 2 * BRISK.lease_ttl
    assert second.lease.seq > first


async def test_after_a_holder_known_to_be_dead_nobody_waits(space: RealSpace) -> None:
    await space.stop_steward()
    dead = (await space.start_steward(UNAWARE)).lease.holder_id
    await kill_in_process(space)
    started = time.monotonic()
    await space.start_steward(UNAWARE, after=dead)
    assert time.monotonic() - started < 5


async def test_after_names_one_holder_and_no_other(space: RealSpace) -> None:
    with pytest.raises(LeaseHeld):
        await asyncio.wait_for(Steward(space.home, intervals=BRISK).run(after="somebody-else"), 20)


@pytest.mark.parametrize("kill", [True, False])
async def test_the_lease_survives_the_end_of_the_broker(space: RealSpace, kill: bool) -> None:
    lease = serving(space).lease.seq
    await space.add("ada")
    await space.restart_broker(kill=kill)
    async with space.agent("ada") as ada:
        joined = await insist(lambda: ada.control.call(JoinRequest("general"), op="operation-1"))
        assert joined.state == "opened"
        health = await insist(lambda: ada.control.call(HealthRequest()))
        assert health.steward["lease"] == lease


async def test_seventy_takeovers_leave_the_log_as_usable_as_before(space: RealSpace) -> None:
    await space.add("ada")
    async with steward_js(space) as js, space.core() as core:
        await space.stop_steward()
        before = ""
        for _ in range(70):
            lease = lease_of(space, js)
            await lease.take(after=before)
            before = lease.holder_id
            await lease.release()
        steward = await space.start_steward()
        async with space.agent("ada") as ada:
            assert (await ada.control.call(JoinRequest("general"))).state == "opened"
        assert not steward.table.void
        assert (await fold_log(core, space.info, 0)).lease == steward.table.lease


async def test_the_delivery_lease_needs_its_older_versions_purged_at_each_takeover(space: RealSpace) -> None:
    """Why the next holder purges with `keep` 1: the per-subject limit of DLV counts leases too."""
    stream, subject = space.subjects.delivery_stream, space.subjects.delivery_lease
    async with space.core() as js:
        seq = 0
        for number in range(64):
            seq = await js.publish(subject, str(number).encode(), {EXPECT_SEQUENCE: str(seq)})
        with pytest.raises(ApiError) as refused:
            await js.publish(subject, b"65th", {EXPECT_SEQUENCE: str(seq)})
        assert refused.value.err_code == NO_ROOM
        for number in range(65):
            await js.purge(stream, subject_filter=subject, keep=1)
            stale, seq = seq, await js.publish(subject, str(number).encode(), {EXPECT_SEQUENCE: str(seq)})
        frame = space.subjects.delivery(KeyPair.generate().id)
        with pytest.raises(ApiError):
            await js.publish(frame, b"stale", {EXPECT_SEQUENCE: str(stale), EXPECT_SUBJECT: subject})
        await js.publish(frame, b"fresh", {EXPECT_SEQUENCE: str(seq), EXPECT_SUBJECT: subject})


# --- unknown outcomes --------------------------------------------------------------------------------------------


async def one_effective(space: RealSpace, subject: str) -> int:
    """The sequence of the only record of a subject, which counts."""
    async with space.core() as js:
        head = (await js.info("LOG_main"))["state"]["last_seq"]
        stored = [record.seq async for page in js.read("LOG_main", subject, 1, head) for record in page]
        table = await fold_log(js, space.info, 0)
    assert len(stored) == 1
    assert table.effective[subject] == stored
    return stored[0]


async def test_a_write_that_a_paused_broker_did_not_answer_becomes_exactly_one_record(
    space: RealSpace, caplog: pytest.LogCaptureFixture
) -> None:
    await space.add("ada")
    steward = serving(space)
    steward.js.timeout = 0.3
    async with space.agent("ada") as ada:
        subject = space.subjects.member(ada.id, steward.space.tag("general"))
        await pause(space.broker.pid)
        try:
            async with steward.writer.lock:
                record = Member(op="operation-1", state="in", pattern="general")
                writing = asyncio.create_task(steward.writer.write(subject, record))
                await eventually(lambda: "asking again" in caplog.text, what="the writer is in doubt")
                assert not writing.done()
                os.kill(space.broker.pid, signal.SIGCONT)
                steward.js.timeout = 5
                seq = await asyncio.wait_for(writing, 20)
        finally:
            os.kill(space.broker.pid, signal.SIGCONT)
        assert await one_effective(space, subject) == seq
        told = await ada.control.call(JoinRequest("general"), op="operation-1")
        assert (told.state, told.seq) == ("opened", seq)
        await steward.lease.prove()


class LostOnce:
    """A JetStream publish that loses one ruling on its way, and remembers it."""

    def __init__(self, js: JetStream, *, arrives: bool) -> None:
        self._publish = js.publish
        self._arrives = arrives
        self.lost: tuple[str, bytes, dict[str, str]] | None = None

    async def __call__(self, subject: str, payload: bytes, headers: Any = None, **named: Any) -> int:
        if self.lost is None and ".member." in subject:
            self.lost = (subject, payload, dict(headers))
            if self._arrives:
                await self._publish(subject, payload, headers, **named)
            raise OutcomeUnknown("no answer")
        return await self._publish(subject, payload, headers, **named)


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_lost_answer_or_a_lost_write_becomes_exactly_one_record(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    await space.add("ada")
    steward = serving(space)
    before = steward.lease.seq
    async with space.agent("ada") as ada, space.core() as core:
        lossy = LostOnce(steward.js, arrives=arrives)
        monkeypatch.setattr(steward.js, "publish", lossy)
        told = await ada.control.call(JoinRequest("general"), op="operation-1")
        assert lossy.lost is not None
        assert await one_effective(space, lossy.lost[0]) == told.seq
        assert steward.lease.seq > before
        # the lost one turns up now: the broker knows that its lease is over
        with pytest.raises(ApiError) as refused:
            await core.publish(*lossy.lost)
        assert refused.value.err_code == WRONG_LAST_SEQUENCE


async def test_a_renewal_of_our_own_that_was_not_answered_is_not_another_holder(space: RealSpace) -> None:
    steward = serving(space)
    async with steward_js(space) as js:
        unanswered = lease_of(space, js)
        unanswered.holder_id, unanswered.seq = steward.lease.holder_id, steward.lease.seq
        newer = await unanswered.renew()
        proven = await steward.lease.prove()
        assert proven.id == steward.lease.holder_id
        assert proven.seq == newer or js.replicated, "by a beat it is proven without looking at the log"
        assert await steward.lease.renew() == newer
        rival = lease_of(space, js)
        await rival.take(after=steward.lease.holder_id)
        # asked on a connection of the test's own: the steward closes its own as soon as it notices
        with pytest.raises(LeaseLost):
            await unanswered.prove()
        with pytest.raises(LeaseLost):
            await unanswered.renew()
    assert isinstance(await space.steward_ended(), LeaseLost)


async def test_a_renewal_that_is_answered_while_the_lease_is_read_loses_nothing(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a broker that stood still: what is read is older than the renewal that was answered meanwhile."""
    async with steward_js(space) as js:
        lease = lease_of(space, js)
        before = serving(space).lease.seq
        lease.holder_id, lease.seq = serving(space).lease.holder_id, before
        read = lease.current_steps

        def renewed_meanwhile() -> Steps[Holder]:
            found = yield from read()
            yield from lease.renew_steps()
            return found

        monkeypatch.setattr(lease, "current_steps", renewed_meanwhile)
        assert (await lease.prove()).id == lease.holder_id
        assert lease.seq > before or js.replicated


# --- floors ------------------------------------------------------------------------------------------------------


async def test_a_replaced_holder_cannot_move_the_floor_by_what_it_knew(space: RealSpace) -> None:
    """Parts are switched on by the new holder; the old one still believes that they are off."""
    await space.stop_steward()
    old = await space.start_steward(UNAWARE)
    await space.add("ada")
    async with space.administer() as admin, space.agent("ada") as ada, steward_js(space) as js, space.core() as core:
        posted = (await ada.post("general", b"owed to the archive"))["seq"]
        await admin.call(ChangeSpaceRequest(keep_age=0, parts=PartsChange(deliver="off", archive="off")))
        new = lease_of(space, js)
        await new.take(after=old.lease.holder_id)
        state = StateBucket(js, space.subjects)
        floor = await claim_floor(state, new.seq)
        assert old.gate.state is not None
        with pytest.raises(ConflictError, match="under lease"):
            await old.retention.run(old.gate.state, old.lease.seq)
        assert await read_floor(state) == floor
        assert await core.at("LOG_main", posted) is not None
    old.stop()
    with pytest.raises(LeaseLost):
        await space.stop_steward()


async def test_floors_are_written_by_compare_and_set(space: RealSpace) -> None:
    async with space.core() as js:
        state = StateBucket(js, space.subjects)
        entry = await state.get("floor.log")
        assert entry is not None
        assert entry.value == {"seq": 0, "lease": serving(space).lease.seq}
        await state.put("floor.log", {"seq": 0, "lease": 10**6}, entry.revision)
        with pytest.raises(ConflictError, match="changed meanwhile"):
            await state.put("floor.log", {"seq": 99, "lease": 10**6}, entry.revision)


async def test_a_table_knows_the_same_lease_as_the_broker(space: RealSpace) -> None:
    async with space.core() as js:
        table = await fold_log(js, space.info, 0)
    assert table.lease is not None
    assert table.lease[0] == serving(space).lease.seq
    assert table.void[Verdict.BAD_SIGNATURE] == 0


async def test_a_space_without_a_steward_has_no_holder(tmp_path: Any) -> None:
    async with real_space(tmp_path / "home", steward=False) as space, steward_js(space) as js:
        assert str(await lease_of(space, js).current()) == "nobody"
