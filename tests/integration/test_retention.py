"""What may leave the log, what holds it, and what goes on when the log is full."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from folded_log import fold_log
from tidings.admin.agents import AgentFile
from tidings.contract.admin import ChangeSpaceRequest, PartsChange
from tidings.contract.agents import HealthRequest
from tidings.contract.channels import ChangeChannelRequest, JoinRequest, LeaveRequest
from tidings.contract.mail import DeadLettersRequest
from tidings.errors import UsageError
from tidings.model.projection import Table
from tidings.model.task_rules import TaskState
from tidings.nats.errors import NoResponders
from tidings.nats.jetstream import JetStream
from tidings.server.state import StateBucket
from tidings.server.streams import GateState, gate_state
from tidings.steward import retention, side_streams, store_watch
from tidings.steward.context import Intervals
from tidings.steward.dead_letters import Letter
from tidings.steward.retention import Retention, RetentionFloors, counted_parts, read_floor
from tidings.steward.service import Steward
from tidings.wire.rulings import Parts, Space
from tidings.wire.states import TaskCause
from tidings_testing.real_space import TEST_INTERVALS, AgentClient, RealSpace, real_space
from tidings_testing.waiting import eventually, insist
from tools.generated import generate_log
from tools.pouring import pour

CHAT = "td.main.chat.>"
OFF = PartsChange(deliver="off", archive="off")
#: a steward that tends nothing by itself
IDLE = Intervals(lease_ttl=60, gate=60, retention=60, marks=60)


def serving(space: RealSpace) -> Steward:
    assert space.steward is not None
    return space.steward


async def sequences(js: JetStream, subject_filter: str = CHAT) -> list[int]:
    head = (await js.info("LOG_main"))["state"]["last_seq"]
    return [record.seq async for page in js.read("LOG_main", subject_filter, 1, head) for record in page]


async def set_space(space: RealSpace, settings: ChangeSpaceRequest) -> None:
    async with space.administer() as admin:
        await admin.call(settings)


async def post_many(agent: AgentClient, count: int, size: int = 100) -> list[int]:
    return [(await agent.post("general", b"x" * size))["seq"] for _ in range(count)]


async def a_round(space: RealSpace) -> RetentionFloors:
    """Wait until retention has looked at the log as it is now."""
    before = serving(space).retention.last
    steward = serving(space)
    await eventually(lambda: steward.retention.last is not before, what="a round of retention")
    await eventually(lambda: steward.retention.last is not before and steward.gate is not None)
    assert steward.retention.last is not None
    return steward.retention.last


# --- what holds the floor ----------------------------------------------------------------------------------------


def test_the_floor_is_the_least_of_what_counts() -> None:
    on, off = (Space(op="x", parts=Parts(deliver=each, archive=each)) for each in ("on", "off"))
    reported = {"deliver": 40, "archive": 30, "link.east": 20}
    assert RetentionFloors(50, counted_parts(on, reported)).floor == 20
    assert RetentionFloors(10, counted_parts(on, reported)).floor == 10
    assert RetentionFloors(50, counted_parts(on, {"deliver": 40})).floor == 0
    assert RetentionFloors(50, counted_parts(off, {})).floor == 50
    assert RetentionFloors(50, counted_parts(on, {"deliver": 40, "archive": 30})).held_by == "archive"
    assert RetentionFloors(10, counted_parts(on, reported)).held_by is None


@pytest.mark.usefixtures("archive_exists")
async def test_a_pipeline_that_was_never_started_holds_everything_until_it_is_switched_off(space: RealSpace) -> None:
    await space.add("ada")
    async with space.agent("ada") as ada, space.core() as js:
        await ada.control.call(JoinRequest("general"))
        posted = await post_many(ada, 20)
        await set_space(space, ChangeSpaceRequest(keep_age=0, parts=PartsChange(archive="on")))
        await eventually(lambda: (last := serving(space).retention.last) and last.limit > posted[-1])
        health = await ada.control.call(HealthRequest())
        assert (health.floor, health.floor_held_by) == (0, "deliver")
        await set_space(space, ChangeSpaceRequest(parts=PartsChange(deliver="off")))
        await eventually(lambda: (last := serving(space).retention.last) and last.held_by == "archive")
        assert await sequences(js) == posted
        rulings = await sequences(js, "td.main.member.>")
        await set_space(space, ChangeSpaceRequest(parts=OFF))

        async def is_empty() -> bool:
            return await sequences(js) == []

        await eventually(is_empty, what="messages below the floor are gone")
        assert await sequences(js, "td.main.member.>") == rulings
        assert await sequences(js, "td.main.acl.>") != []
        assert (await ada.control.call(JoinRequest("general"))).state == "resumed"


@pytest.mark.usefixtures("archive_exists")
async def test_the_slowest_part_holds_the_floor(space: RealSpace) -> None:
    await space.add("ada")
    async with space.agent("ada") as ada, space.core() as js:
        posted = await post_many(ada, 30)
        state = StateBucket(js, space.subjects)
        await state.put("floor.deliver", {"seq": posted[20]}, 0)
        await state.put("floor.archive.log", {"seq": posted[10]}, 0)
        await set_space(space, ChangeSpaceRequest(keep_age=0, parts=PartsChange(archive="on")))

        async def is_cut() -> bool:
            return await sequences(js) == posted[10:]

        await eventually(is_cut)
        await a_round(space)
        assert await sequences(js) == posted[10:]
        assert await read_floor(state) == posted[10]
        assert (await ada.control.call(HealthRequest())).floor_held_by == "archive"


async def test_the_floor_is_written_before_anything_is_removed_and_purges_go_in_steps(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "STEP", 10)
    await space.stop_steward()
    steward = await space.start_steward(IDLE)
    await space.add("ada")
    async with space.agent("ada") as ada, space.core() as js:
        posted = await post_many(ada, 45)
        await set_space(space, ChangeSpaceRequest(keep_age=0, parts=OFF))
        state = StateBucket(js, space.subjects)
        cuts: list[int] = []
        purge = steward.js.purge

        async def watched(stream: str, *, subject_filter: str, **named: Any) -> int:
            if subject_filter == CHAT:
                cuts.append(named["below"])
                assert await read_floor(state) >= named["below"]
            return await purge(stream, subject_filter=subject_filter, **named)

        monkeypatch.setattr(steward.js, "purge", watched)
        removed = await steward.retention.run(await gate_state(js, space.subjects), steward.lease.seq)
        assert removed >= 45
        assert await sequences(js) == []
        assert cuts[-1] > posted[-1]
        assert max(b - a for a, b in zip([posted[0], *cuts], cuts, strict=False)) <= 10


async def test_a_message_that_arrives_while_age_is_measured_is_not_taken_for_old(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await space.stop_steward()
    steward = await space.start_steward(IDLE)
    await space.add("ada")
    await set_space(space, ChangeSpaceRequest(keep_age=3600, parts=OFF))
    async with space.agent("ada") as ada, space.core() as js:
        first_after, arrived = steward.js.first_after, list[int]()

        async def then_one_arrives(*arguments: Any) -> int | None:
            found = await first_after(*arguments)
            arrived.extend(await post_many(ada, 1))
            return found

        monkeypatch.setattr(steward.js, "first_after", then_one_arrives)
        await steward.retention.run(await gate_state(js, space.subjects), steward.lease.seq)
        assert await sequences(js) == arrived


# --- by size -----------------------------------------------------------------------------------------------------


async def test_retention_by_size_keeps_the_newest_messages_that_fit(space: RealSpace) -> None:
    await space.add("ada")
    async with space.agent("ada") as ada, space.core() as js:
        posted = await post_many(ada, 300, 1_000)
        await set_space(space, ChangeSpaceRequest(keep_bytes=150_000, parts=OFF))

        async def fits() -> bool:
            return bool((await js.info("LOG_main"))["state"]["bytes"] <= 150_000)

        await eventually(fits)
        await a_round(space)
        kept = await sequences(js)
        assert kept == posted[-len(kept) :]
        assert (await js.info("LOG_main"))["state"]["bytes"] > 140_000


async def test_small_rulings_do_not_make_retention_cut_too_far(space: RealSpace) -> None:
    await space.add("ada", manage=[">"])
    async with space.agent("ada") as ada, space.core() as js:
        for number in range(300):
            await ada.control.call(ChangeChannelRequest(f"c{number}", description="small"))
        posted = await post_many(ada, 60, 4_000)
        used = (await js.info("LOG_main"))["state"]["bytes"]
        await set_space(space, ChangeSpaceRequest(keep_bytes=used - 100_000, parts=OFF))

        async def shrunk() -> bool:
            return bool((await js.info("LOG_main"))["state"]["bytes"] <= used - 99_000)

        await eventually(shrunk)
        await a_round(space)
        kept = await sequences(js)
        assert kept == posted[-len(kept) :]
        assert 30 <= len(kept) <= 40


# --- the fold after a purge --------------------------------------------------------------------------------------


class Unlimited(Retention):
    """Removes whatever the parts allow."""

    async def _limit(self, space: Space, gate: GateState) -> int:  # noqa: ARG002
        return await self._head() + 1


def answers(table: Table, channels: tuple[str, ...], agents: list[str], since: int, until: int) -> list[Any]:
    return [
        (
            table.as_of(seq),
            [table.members_at(channel, seq) for channel in channels],
            [table.owed(seq, agent, channel) for agent in agents for channel in channels],
        )
        for seq in range(since, until + 1)
    ]


@pytest.mark.parametrize("seed", [11, 12])
async def test_the_fold_after_a_purge_equals_the_fold_before_at_and_above_the_floor(tmp_path: Path, seed: int) -> None:
    log = generate_log(random.Random(seed), 300)
    records = [record for record in log.records if not record.subject.endswith(".space.extra")]
    async with real_space(tmp_path / "home", steward=False) as space, space.core() as js:
        head = (await pour(js, ((r.subject, r.payload, r.headers) for r in records)))[-1]
        info = type(space.info)(
            **{name: getattr(space.info, name) for name in type(space.info).__dataclass_fields__}
            | {"id": log.space_id, "steward_key": log.anchor_key}
        )
        before = await fold_log(js, info, 0)
        state = StateBucket(js, space.subjects)
        gone = 0
        for floor in (head // 3, head // 2, head - 5):
            for part in ("deliver", "archive.log"):
                entry = await state.get(f"floor.{part}")
                await state.put(f"floor.{part}", {"seq": floor}, entry.revision if entry else 0)
            table = await fold_log(js, info, await read_floor(state))
            gone += await Unlimited(js, table, state).run(await gate_state(js, space.subjects), 1)
            assert await read_floor(state) == floor
            after = await fold_log(js, info, floor)
            question = (log.channels, log.agents, floor, head)
            assert answers(after, *question) == answers(before, *question)
            assert await sequences(js) == [r for r in await sequences(js) if r >= floor]
            # above the floor nothing is missing
            above = [r async for page in js.read("LOG_main", "td.main.>", floor, head) for r in page]
            assert [r.seq for r in above] == list(range(floor, head + 1))
        assert gone > len(records) // 4


async def test_memberships_older_than_any_limit_survive_restart_and_kill(space: RealSpace) -> None:
    await space.add("ada")
    async with space.agent("ada") as ada, space.core() as js:
        joined = (await ada.control.call(JoinRequest("general"))).seq
        await post_many(ada, 5)
        await set_space(space, ChangeSpaceRequest(keep_age=0, parts=OFF))

        async def is_empty() -> bool:
            return await sequences(js) == []

        await eventually(is_empty)
    for kill in (False, True):
        await space.restart_broker(kill=kill)
        async with space.agent("ada") as ada:
            told = await insist(partial(ada.control.call, JoinRequest("general")))
            assert (told.state, told.seq) == ("resumed", joined)


# --- the gate ----------------------------------------------------------------------------------------------------


async def fill(agent: AgentClient, size: int = 8_000) -> tuple[list[int], str]:
    """Post until the log takes no more. Answers what was acknowledged, and how it was refused."""
    acknowledged: list[int] = []
    while True:
        try:
            said = await agent.post("general", b"x" * size)
        except NoResponders:
            return acknowledged, "no responders"
        if "error" in said:
            return acknowledged, str(said["error"]["err_code"])
        acknowledged.append(said["seq"])


async def fill_to_the_brim(agent: AgentClient) -> list[int]:
    acknowledged = []
    for size in (8_000, 500, 1):
        posted, refusal = await fill(agent, size)
        assert refusal == "10077"
        acknowledged += posted
    return acknowledged


def full(size_mib: int = 2) -> int:
    return size_mib * 1024 * 1024


async def test_a_full_log_closes_its_gate_and_ruling_goes_on(tmp_path: Path) -> None:
    async with real_space(tmp_path / "home", budget=full()) as space:
        await space.add("ada", read=["general", "ops"])
        async with space.agent("ada", reconnect=True) as ada, space.core() as js:
            await ada.control.call(JoinRequest("ops"))
            acknowledged, _ = await fill(ada)

            async def is_closed() -> bool:
                return not (await gate_state(js, space.subjects)).open

            await eventually(is_closed, what="the gate is closed")
            with pytest.raises(NoResponders):
                await ada.post("general", b"refused")
            health = await ada.control.call(HealthRequest())
            assert not health.healthy
            assert "log is full" in health.problems[0]
            assert (await ada.control.call(JoinRequest("general"))).state == "opened"
            assert (await ada.control.call(LeaveRequest("general"))).state == "left"
            async with space.administer() as admin:
                narrowed = await admin.set_access("ada", AgentFile("ada", read=("general",), post=("general",)))
            assert narrowed.closed == ["ops"]
            await space.stop_steward()
            await space.start_steward()
            assert await sequences(js) == acknowledged
        async with space.agent("ada") as ada, space.core() as js:
            await set_space(space, ChangeSpaceRequest(keep_bytes=full() // 2, parts=OFF))
            resumed = await insist_on_posting(ada)
            assert resumed > acknowledged[-1]
            left = await sequences(js)
            assert left[:-1] == acknowledged[-len(left[:-1]) :]
            assert (await ada.control.call(HealthRequest())).healthy


async def insist_on_posting(agent: AgentClient) -> int:
    async def posted() -> int:
        try:
            return int((await agent.post("general", b"again")).get("seq", 0))
        except NoResponders:
            return 0

    return await eventually(posted, what="publishing resumes")


async def test_a_steward_that_starts_on_a_log_full_to_the_brim_takes_its_lease(tmp_path: Path) -> None:
    async with real_space(tmp_path / "home", budget=full()) as space:
        await space.add("ada")
        await space.stop_steward()
        async with space.agent("ada") as ada, space.core() as js:
            acknowledged = await fill_to_the_brim(ada)
            assert (await gate_state(js, space.subjects)).open
            steward = await space.start_steward(IDLE)
            assert steward.gate is not None
            assert steward.gate.state is not None
            assert not steward.gate.state.open
            assert (await ada.control.call(JoinRequest("general"))).state == "opened"
            assert await sequences(js) == acknowledged


async def test_a_ruling_or_a_renewal_refused_for_want_of_room_closes_the_gate_itself(tmp_path: Path) -> None:
    async with real_space(tmp_path / "home", budget=full(), intervals=IDLE) as space:
        await space.add("ada")
        async with space.agent("ada") as ada, space.core() as js:
            acknowledged = await fill_to_the_brim(ada)
            assert (await gate_state(js, space.subjects)).open
            assert (await ada.control.call(JoinRequest("general"))).state == "opened"
            assert not (await gate_state(js, space.subjects)).open
            gate = (await ada.control.call(HealthRequest())).gate
            assert gate is not None
            assert not gate.open
            assert await sequences(js) == acknowledged


async def test_a_lease_refused_for_want_of_room_closes_the_gate_itself(tmp_path: Path) -> None:
    async with real_space(tmp_path / "home", budget=full(), intervals=IDLE) as space:
        await space.add("ada")
        async with space.agent("ada") as ada, space.core() as js:
            await fill_to_the_brim(ada)
            before = serving(space).lease.seq
            assert await serving(space).lease.renew() > before
            assert not (await gate_state(js, space.subjects)).open


async def test_health_warns_before_the_log_is_full_and_says_what_retention_waits_for(tmp_path: Path) -> None:
    async with real_space(tmp_path / "home", budget=full()) as space:
        await space.add("ada")
        async with space.agent("ada") as ada:
            await post_many(ada, 190, 8_000)
            await a_round(space)
            await a_round(space)
            health = await ada.control.call(HealthRequest())
            assert health.gate is not None
            assert health.gate.open
            assert "retention waits for" in health.problems[0]


async def test_closing_and_opening_the_gate_under_load_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    async with real_space(tmp_path / "home", budget=full()) as space:
        await space.add("ada")
        async with space.agent("ada") as ada, space.core() as js:
            acknowledged, _ = await fill(ada)

            async def keep_posting() -> list[int]:
                return [await insist_on_posting(ada) for _ in range(20)]

            posting = asyncio.create_task(keep_posting())
            await set_space(space, ChangeSpaceRequest(keep_bytes=full() // 2, parts=OFF))
            acknowledged += await asyncio.wait_for(posting, 20)
            left = await sequences(js)
            assert left == [seq for seq in acknowledged if seq >= left[0]]
            assert left[0] >= await read_floor(StateBucket(js, space.subjects))


# --- receipts, results and dead letters ---


async def side(js: JetStream, stream: str) -> int:
    return int((await js.info(stream))["state"]["messages"])


async def test_an_archive_is_off_and_switching_it_on_is_refused_until_one_exists(space: RealSpace) -> None:
    assert serving(space).space.settings().parts == Parts(deliver="on", archive="off")
    with pytest.raises(UsageError, match="Cannot set archive=on: the archive does not exist yet"):
        await set_space(space, ChangeSpaceRequest(keep_age=0, parts=PartsChange(archive="on")))
    await set_space(space, ChangeSpaceRequest(parts=PartsChange(archive="off")))
    assert (serving(space).space.settings().parts.archive, serving(space).space.settings().keep_age) == (
        "off",
        None,
    )


@pytest.fixture
async def calm(tmp_path: Path) -> AsyncIterator[RealSpace]:
    """A small space whose side streams are tended only when a test says so."""
    async with real_space(
        tmp_path / "calm", budget=1024 * 1024, intervals=replace(TEST_INTERVALS, retention=600)
    ) as space:
        yield space


@pytest.mark.usefixtures("archive_exists")
async def test_receipts_go_by_age_once_the_archive_has_them_and_are_counted(calm: RealSpace) -> None:
    space, s = calm, calm.subjects
    async with space.core() as js:
        seqs = [await js.publish(s.audit("receipt", "x"), b"{}") for _ in range(6)]
        await serving(space).sides.run()
        assert await side(js, s.audit_stream) == 6, "young"
        await set_space(space, ChangeSpaceRequest(keep_receipts=0, parts=PartsChange(archive="on")))
        await serving(space).sides.run()
        assert await side(js, s.audit_stream) == 6, "not archived"
        await StateBucket(js, s).put("floor.archive.aud", {"seq": seqs[4]}, 0)
        await serving(space).sides.run()
        assert await side(js, s.audit_stream) == 2
        await set_space(space, ChangeSpaceRequest(parts=PartsChange(archive="off")))
        await serving(space).sides.run()
        assert await side(js, s.audit_stream) == 0
        assert serving(space).sides.removed == {"receipts": 6, "dead": 0}
        assert (await serving(space).health.facts()).removed["receipts"] == 6


@pytest.mark.usefixtures("archive_exists")
async def test_a_side_stream_that_is_nearly_full_loses_its_oldest_or_says_who_holds_it(calm: RealSpace) -> None:
    space, s = calm, calm.subjects
    await set_space(space, ChangeSpaceRequest(parts=PartsChange(archive="on")))
    async with space.core() as js:
        count = 0
        while (await js.info(s.audit_stream))["state"]["bytes"] < 0.85 * 1024 * 1024 / 16:
            await js.publish(s.audit("receipt", "x"), b"x" * 1_000)
            count += 1
        await serving(space).sides.run()
        assert await side(js, s.audit_stream) == count
        assert "AUD_main is nearly full and waits for the archive" in (await serving(space).health.facts()).problems[0]
        await set_space(space, ChangeSpaceRequest(parts=PartsChange(archive="off")))
        await serving(space).sides.run()
        assert await side(js, s.audit_stream) == count - count // 4
        assert (await js.following(s.audit_stream, f"{s.root}.aud.>", 1)).seq == count // 4 + 1  # type: ignore[union-attr]
        assert (await serving(space).health.facts()).problems == ()


async def test_dead_letters_are_bounded_in_number_and_the_newest_stay(
    calm: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = calm
    monkeypatch.setattr(side_streams, "MOST_DEAD", 5)
    async with space.core() as js:
        for number in range(8):
            await js.publish(space.subjects.dead("task", str(number)), b"x")
        await serving(space).sides.run()
        left = await js.subjects_of(space.subjects.dead_stream, "td.main.dead.>")
        assert sorted(left) == [space.subjects.dead("task", str(number)) for number in range(3, 8)]
        assert (await serving(space).health.facts()).removed["dead"] == 3


async def test_dead_letters_that_were_removed_are_not_listed(calm: RealSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    space, s = calm, calm.subjects
    steward = serving(space)
    await space.add("ada")
    async with space.agent("ada") as ada, space.core() as js:
        for seq in (1, 2):
            letter = Letter(
                owner=ada.id,
                kind="channel",
                seq=seq,
                time_ns=1,
                subject=s.chat(ada.id, "general"),
                sender=ada.id,
                id="i",
                channel="general",
                error="no",
                attempts=1,
                at=1.0,
            )
            await steward.letters.keep(letter)
        for seq in (1, 2):
            task = TaskState(seq=seq, time_ns=1, role="reviewer", asker=ada.id, id=f"t{seq}")
            steward.tasks.holds.book.end(await steward.tasks.holds.records.write_dead(task, TaskCause.FAILED, None, ""))
        for number in range(3, 5):
            await js.publish(s.dead("task", str(number)), b"x")
        monkeypatch.setattr(side_streams, "MOST_DEAD", 3)
        await steward.sides.run()
        said = await ada.control.call(DeadLettersRequest())
        assert [each.seq for each in said.dead] == [2]
        assert said.mail == ()
        told = steward.store.told_to(ada.id)
        assert [each.count for each in told] == [3], "and whose they were is told, once for all of them"
        assert "(2 of channel messages, 1 of tasks)" in told[0].text
        await steward.sides.run()
        assert len(steward.store.told_to(ada.id)) == 1


async def test_letters_that_grew_old_go_once_a_day_and_their_owners_hear_of_it(
    calm: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    steward = serving(calm)
    await calm.add("ada")
    async with calm.agent("ada") as ada:
        task = TaskState(seq=1, time_ns=1, role="reviewer", asker=ada.id, id="t1")
        steward.tasks.holds.book.end(await steward.tasks.holds.records.write_dead(task, TaskCause.FAILED, None, ""))
        monkeypatch.setattr(side_streams, "DEAD_KEPT", 0)
        await steward.sides.run()
        assert len((await ada.control.call(DeadLettersRequest())).dead) == 1, "it is of today"
        monkeypatch.setattr(side_streams, "DEAD_KEPT", -side_streams.DAY)
        await steward.sides.run()
        assert (await ada.control.call(DeadLettersRequest())).dead == ()
        assert [each.count for each in steward.store.told_to(ada.id)] == [1]


async def test_letters_of_one_owner_take_no_more_than_its_share_of_a_small_stream(calm: RealSpace) -> None:
    steward, s = serving(calm), calm.subjects
    await steward.sides.run()  # the first look, which a busy machine has not had yet: it learns how large the stream is
    for name in ("ada", "bob"):
        await calm.add(name)
    async with calm.agent("ada") as ada, calm.agent("bob") as bob, calm.core() as js:
        for owner, seq in [(bob.id, 1), *((ada.id, seq) for seq in range(2, 40))]:
            letter = Letter(
                owner=owner,
                kind="direct",
                seq=seq,
                time_ns=1,
                subject=s.direct(owner, bob.id),
                sender=bob.id,
                id="i",
                channel=None,
                error="no",
                attempts=1,
                at=1.0,
            )
            await steward.letters.keep(letter, b"x" * 2_000)
        await steward.sides.run()
        assert [each.seq for each in steward.letters.of(bob.id)] == [1]
        mine = [each.seq for each in steward.letters.of(ada.id)]
        assert mine == list(range(mine[0], 40)), "its newest"
        kept = {each.subject for each in await anext(js.read(s.dead_stream, f"{s.root}.dead.>", 1, 10_000))}
        assert len(kept) == 1 + len(mine)
        assert (await js.info(s.dead_stream))["state"]["bytes"] < 64 * 1024 // 4
        assert sum(each.count or 0 for each in steward.store.told_to(ada.id)) == 38 - len(mine)
        assert steward.store.told_to(bob.id) == []
        counted = {each.seq: each.size for each in steward.letters.of(ada.id)}
        await steward.letters.load()
        read = {each.seq: each.size for each in steward.letters.of(ada.id)}
        assert all(abs(read[seq] - size) < 64 for seq, size in counted.items()), "as it is counted, so it is stored"


async def test_one_owners_dead_letters_do_not_push_out_what_others_are_told(calm: RealSpace) -> None:
    steward = serving(calm)
    await steward.store.note_letters_gone({"bob": Counter(direct=3)}, "once")
    for _ in range(200):
        await steward.store.note_letters_gone({"mal": Counter(channel=1)}, "again")
    counts: Counter[str] = Counter()
    for each in steward.store.file.removed:
        counts[each.target] += each.count
    assert counts == {"bob": 3, "mal": 200}, "none is forgotten"
    assert len(steward.store.file.removed) <= 1 + store_watch.KEPT_OF_LETTERS
