"""Stewards and administrators are killed and paused at the worst moments; the next one finds out and finishes."""

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from folded_log import fold_log
from tidings.admin import administration
from tidings.admin.agents import AgentFile
from tidings.contract.agents import AccessRequest
from tidings.contract.channels import (
    ChangeChannelRequest,
    ChannelChangedAnswer,
    JoinAnswer,
    JoinRequest,
    LeaveAnswer,
    LeaveRequest,
    MembershipsRequest,
)
from tidings.contract.core import Request
from tidings.errors import AuthRevoked, LeaseHeld, LeaseLost, OutcomeUnknown, UnreachableError
from tidings.model.projection import Table
from tidings.nats import jwt
from tidings.nats.jetstream import JetStream
from tidings_testing.processes import child, steward_child
from tidings_testing.real_space import AgentClient, RealSpace, real_space
from tidings_testing.waiting import eventually, insist

DRIVER = Path(__file__).parent / "admin_driver.py"
Member = TypeVar("Member", JoinAnswer, LeaveAnswer)
Ask = Callable[[], Awaitable[JoinAnswer | LeaveAnswer | ChannelChangedAnswer]]


@pytest.fixture
async def prepared(tmp_path: Path) -> AsyncIterator[RealSpace]:
    """A space with ada in it, who is in ops, and whose steward has stopped."""
    async with real_space(tmp_path / "home") as space:
        await space.add("ada", read=["general", "ops"], post=["general"], manage=[">"])
        async with space.agent("ada") as ada:
            await ada.control.call(JoinRequest("ops"))
        await space.stop_steward()
        yield space


async def rulings_with(js: JetStream, op: str) -> list[tuple[int, str]]:
    """Sequence and subject of every ruling in the log that an operation wrote."""
    head = (await js.info("LOG_main"))["state"]["last_seq"]
    pages = [page async for page in js.read("LOG_main", "td.main.>", 1, head)]
    return [(r.seq, r.subject) for page in pages for r in page if f'"op":"{op}"'.encode() in r.payload]


def asks(agent: AgentClient, op: str) -> dict[str, Ask]:
    return {
        "join": lambda: agent.control.call(JoinRequest("general"), op=op),
        "leave": lambda: agent.control.call(LeaveRequest("ops"), op=op),
        "channel": lambda: agent.control.call(ChangeChannelRequest("general", description="talk"), op=op),
    }


@pytest.mark.parametrize("failpoint", ["steward.before_write", "steward.after_write"])
@pytest.mark.parametrize("what", ["join", "leave", "channel"])
async def test_a_steward_killed_around_a_write_leaves_one_record_and_the_same_answer(
    prepared: RealSpace, failpoint: str, what: str
) -> None:
    op = f"operation-{what}"
    async with prepared.agent("ada") as ada, prepared.core() as js:
        ada.control.timeout = 1
        async with steward_child(prepared.home, failpoint=f"{failpoint}:kill") as doomed:
            with pytest.raises((OutcomeUnknown, UnreachableError)):
                await asks(ada, op)[what]()
            assert await doomed.ended() == -signal.SIGKILL
        written = await rulings_with(js, op)
        assert len(written) == (1 if failpoint.endswith("after_write") else 0)
        async with steward_child(prepared.home, after=doomed.holder):
            told = await insist(asks(ada, op)[what])
            again = await asks(ada, op)[what]()
        assert again == told
        assert getattr(told, "state", what) == {"join": "opened", "leave": "left"}.get(what, what)
        ((seq, subject),) = await rulings_with(js, op)
        assert seq == told.seq
        assert written in ([], [(seq, subject)])
        table = await fold_log(js, prepared.info, 0)
        assert table.effective[subject][-1] == seq


@pytest.mark.requirement("X2")
async def test_a_steward_paused_past_its_lease_writes_nothing_afterwards_and_ends(prepared: RealSpace) -> None:
    async with prepared.agent("ada") as ada, prepared.core() as js, steward_child(prepared.home, ttl=0.5) as old:
        old.signal(signal.SIGSTOP)
        async with steward_child(prepared.home, ttl=0.5) as new:
            assert new.lease > old.lease
            # both hear it: the old one when it wakes up
            joined = await insist(lambda: ada.control.call(JoinRequest("general"), op="operation-1"))
            marks = json.loads(prepared.home.marks.read_text())
            head = (await js.info("LOG_main"))["state"]["last_seq"]
            assert head == joined.seq
            old.signal(signal.SIGCONT)
            assert await old.ended() == LeaseLost.exit_code
            assert (await old.last_line())["error"]["code"] == "lease_lost"
            assert (await js.info("LOG_main"))["state"]["last_seq"] == head
            told = await ada.control.call(JoinRequest("general"), op="operation-1")
            assert (told.state, told.seq) == ("opened", joined.seq)
            assert len(json.loads(prepared.home.marks.read_text())["marks"]) >= len(marks["marks"])


@pytest.mark.requirement("X1")
async def test_a_second_steward_process_ends_with_the_name_of_the_first(prepared: RealSpace) -> None:
    place = ("--home", prepared.home.home, "--space", "main", "--lease-ttl", "1")
    async with (
        steward_child(prepared.home) as first,
        child("-m", "tidings.supervisor.children", "steward", *place) as second,
    ):
        error = (await second.line())["error"]
        assert error["code"] == "lease_held"
        assert f"pid {first.process.pid} " in error["message"]
        assert await second.ended() == LeaseHeld.exit_code
        assert first.process.returncode is None


async def test_a_steward_told_to_stop_releases_its_lease(prepared: RealSpace) -> None:
    async with steward_child(prepared.home, ttl=30) as first:
        first.signal(signal.SIGTERM)
        assert await first.ended() == 0
        assert await first.last_line() == {"stopped": True}
    async with steward_child(prepared.home, ttl=30) as second:
        assert second.lease > first.lease


async def test_a_steward_whose_broker_is_gone_still_stops_when_told(prepared: RealSpace) -> None:
    async with steward_child(prepared.home) as steward:
        prepared.broker.kill()
        steward.signal(signal.SIGTERM)
        assert await steward.ended(10) == 0


# --- administrators ----------------------------------------------------------------------------------------------


async def assert_consistent(space: RealSpace) -> dict[str, str]:
    """Ledger, log, credentials and account token say the same of every key. Answers name -> state of active ones."""
    async with space.core() as js:
        table = await fold_log(js, space.info, 0)
    async with space.administer() as admin:
        rows = admin.ledger.rows()
        assert admin.ledger.unfinished() == []
    token = (space.home.resolver / f"{space.info.agents_account}.jwt").read_text()
    revoked = jwt.decode(token)["nats"].get("revocations", {})
    for row in rows:
        access = table.access_at(row.id, table.head)
        creds = space.home.agent_creds(row.name)
        holds = creds.exists() and jwt.split_credentials(creds.read_text())[1].id == row.id
        if row.state == "active":
            assert access is not None
            assert (access.name, access.revoked, access.read) == (row.name, False, row.read)
            assert holds
            assert jwt.split_credentials(creds.read_text())[0] == row.token
            assert revoked.get(row.id, 0) < row.iat
            assert (space.home.agents / f"{row.name}.md").exists()
            async with space.agent(row.name) as agent:
                await agent.control.call(AccessRequest())
        else:
            assert row.state in ("revoked", "undone")
            assert access is None or access.revoked
            assert not holds
            assert revoked[row.id] >= row.iat
    names = [row.name for row in rows if row.state == "active"]
    assert len(names) == len(set(names))
    return {row.name: row.id for row in rows if row.state == "active"}


async def killed(space: RealSpace, operation: str, name: str, failpoint: str) -> None:
    place = (str(space.home.home), space.home.name)
    async with child(DRIVER, *place, operation, name, failpoint=f"{failpoint}:kill") as driver:
        assert await driver.ended() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("failpoint", "stays"), [("add.after_ledger", False), ("add.after_creds", True), ("add.after_grant", True)]
)
@pytest.mark.requirement("X5")
async def test_an_add_killed_anywhere_is_completed_or_undone_by_the_next_operation(
    space: RealSpace, failpoint: str, stays: bool
) -> None:
    await killed(space, "add", "ada", failpoint)
    await space.add("zoe")
    active = await assert_consistent(space)
    assert ("ada" in active) is stays
    if not stays:
        await space.add("ada")
        assert "ada" in await assert_consistent(space)


@pytest.mark.parametrize("failpoint", ["revoke.after_ledger", "revoke.after_push"])
async def test_a_revocation_killed_anywhere_is_completed_by_the_next_operation(
    space: RealSpace, failpoint: str
) -> None:
    await space.add("ada")
    creds = space.home.agent_creds("ada").read_text()
    async with space.agent("ada") as ada:
        await ada.control.call(JoinRequest("general"))
        await killed(space, "revoke", "ada", failpoint)
        await space.add("zoe")
        await asyncio.wait_for(ada.closed.wait(), 5)
    assert list(await assert_consistent(space)) == ["zoe"]
    assert not space.home.agent_creds("ada").exists()
    space.home.agent_creds("ada").write_text(creds)
    space.home.agent_creds("ada").chmod(0o600)
    with pytest.raises(AuthRevoked):
        async with space.agent("ada"):
            pass


@pytest.mark.parametrize(
    ("failpoint", "rotated"),
    [
        ("add.after_ledger", False),
        ("add.after_creds", True),
        ("add.after_grant", True),
        ("rotate.before_cut", True),
        ("revoke.after_ledger", True),
        ("revoke.after_push", True),
    ],
)
async def test_a_rotation_killed_anywhere_leaves_one_key_that_works(
    space: RealSpace, failpoint: str, rotated: bool
) -> None:
    before = (await space.add("ada")).row.id
    async with space.agent("ada") as ada:
        await ada.control.call(JoinRequest("general"))
    await killed(space, "rotate", "ada", failpoint)
    await space.add("zoe")
    active = await assert_consistent(space)
    assert (active["ada"] != before) is rotated
    async with space.agent("ada") as ada:
        assert (await ada.control.call(JoinRequest("general"))).state == "resumed"


@pytest.mark.parametrize("failpoint", ["access.after_ledger", "add.after_grant"])
async def test_a_narrowing_killed_anywhere_is_completed_and_the_agent_can_connect(
    space: RealSpace, failpoint: str
) -> None:
    await space.add("ada", read=["general", "ops"])
    async with space.agent("ada") as ada:
        await ada.control.call(JoinRequest("ops"))
        await killed(space, "narrow", "ada", failpoint)
        await space.add("zoe")
        await asyncio.wait_for(ada.closed.wait(), 5)
    assert "ada" in await assert_consistent(space)
    async with space.agent("ada") as ada:
        assert (await ada.control.call(MembershipsRequest())).memberships == ()


async def test_a_start_finishes_what_was_interrupted_too(space: RealSpace) -> None:
    await space.add("bob")
    await killed(space, "add", "ada", "add.after_grant")
    await killed(space, "revoke", "bob", "revoke.after_push")
    async with space.administer() as admin:
        done = await admin.reconcile()
    assert sorted(done) == ["completed an interrupted change of ada", "finished the revocation of bob"]
    assert list(await assert_consistent(space)) == ["ada"]


# --- under load --------------------------------------------------------------------------------------------------


class Flapper:
    """Joins and leaves for ever, each with an operation id, asking again until it is told; keeps the answers."""

    def __init__(self, agent: AgentClient, pattern: str) -> None:
        self.agent = agent
        self.pattern = pattern
        self.told: dict[str, tuple[str, int]] = {}

    async def run(self, rounds: int) -> None:
        for number in range(rounds):
            await self._insist(JoinRequest(self.pattern), f"{self.pattern}-join-{number:04d}")
            await self._insist(LeaveRequest(self.pattern), f"{self.pattern}-leave-{number:04d}")

    async def _insist(self, request: Request[Member], op: str) -> None:
        answer = await insist(partial(self.agent.control.call, request, op=op), within=40)
        self.told[op] = (answer.state, answer.seq)

    def check(self, table: Table) -> None:
        """Every answer is a record, every record was answered, and they alternate."""
        intervals = [i for i in table.intervals(self.agent.id) if i.pattern == self.pattern]
        joins = [seq for op, (_, seq) in self.told.items() if "-join-" in op]
        leaves = [seq for op, (_, seq) in self.told.items() if "-leave-" in op]
        assert [(i.joined, i.left) for i in intervals] == list(zip(joins, leaves, strict=True))
        assert {state for state, _ in self.told.values()} == {"opened", "left"}


async def storm(space: RealSpace, kills: int, rounds: int, rng: random.Random) -> None:
    """Several agents flap while their steward is killed again and again."""
    async with space.agent("ada") as ada, space.core() as js:
        ada.control.timeout = 0.5
        flappers = [Flapper(ada, f"team.c{number}") for number in range(4)]
        running = asyncio.gather(*(flapper.run(rounds) for flapper in flappers))
        holder = ""
        for _ in range(kills):
            async with steward_child(space.home, after=holder) as steward:
                holder = steward.holder
                told = sum(len(flapper.told) for flapper in flappers) + rng.randint(1, 20)
                await eventually(lambda told=told: sum(len(f.told) for f in flappers) >= told or running.done())  # type: ignore[misc,arg-type]
                os.kill(steward.process.pid, signal.SIGKILL)
                await steward.ended()
        async with steward_child(space.home, after=holder):
            await asyncio.wait_for(running, 60)
        table = await fold_log(js, space.info, 0)
        for flapper in flappers:
            flapper.check(table)
        assert not table.void
        assert table.repeats == 0


async def test_joins_and_leaves_are_exact_while_stewards_are_killed(tmp_path: Path) -> None:
    async with real_space(tmp_path / "home") as space:
        await space.add("ada", read=[">"])
        await space.stop_steward()
        await storm(space, kills=3, rounds=30, rng=random.Random(1))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
async def test_joins_and_leaves_are_exact_through_many_kills(tmp_path: Path, seed: int) -> None:
    async with real_space(tmp_path / "home") as space:
        await space.add("ada", read=[">"])
        await space.stop_steward()
        await storm(space, kills=15, rounds=150, rng=random.Random(seed))


async def test_a_narrowing_killed_before_its_push_is_enforced_by_the_next_operation(space: RealSpace) -> None:
    """The old token is void however the change ended: the row stays `changing` until it is."""
    await space.add("ada", read=["general", "ops"])
    wide = space.home.agent_creds("ada").read_text()
    async with space.administer() as admin:
        row = admin.ledger.active("ada")
        assert row is not None
        monkey = pytest.MonkeyPatch()
        monkey.setattr(administration, "NARROWING_GRACE", 0)
        monkey.setattr(admin, "push_revocations", _killed)
        with pytest.raises(RuntimeError, match="killed"):
            await admin.set_access("ada", AgentFile("ada", read=("general",), post=("general",)))
        monkey.undo()
    async with space.administer() as admin:
        assert await admin.finish() == ["completed an interrupted change of ada"]
    space.home.agent_creds("ada").write_text(wide)
    with pytest.raises(AuthRevoked):
        async with space.agent("ada"):
            pass


async def _killed() -> None:
    raise RuntimeError("killed")
