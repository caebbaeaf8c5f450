"""Flood control on a real space: F25, and that nobody's requests starve another's."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tidings
from tidings.admin import administration
from tidings.admin.agents import AgentFile, Ledger
from tidings.client.connect import connect_directly
from tidings.contract.admin import ChangeSpaceRequest
from tidings.contract.agents import BeatRequest, HealthRequest
from tidings.contract.channels import JoinRequest, MembershipsAnswer, MembershipsRequest
from tidings.contract.core import Caller
from tidings.errors import ConflictError, DeniedError
from tidings.nats.errors import NatsError
from tidings.steward import requests
from tidings.wire.signing import KeyPair
from tidings_testing.real_space import TEST_INTERVALS, AgentClient, RealSpace, real_space
from tidings_testing.waiting import eventually

QUICK = replace(TEST_INTERVALS, quotas=0.2, mail=0.2)


def connect(space: RealSpace, name: str, **options: object) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)  # type: ignore[arg-type]


async def space_set(space: RealSpace, settings: ChangeSpaceRequest) -> None:
    async with space.administer() as admin:
        await admin.call(settings)


@asynccontextmanager
async def supervised(space: RealSpace) -> AsyncIterator[None]:
    """Does for the steward in this process what a supervisor does: runs the administrator when asked."""
    assert space.steward is not None
    running: list[asyncio.Task[None]] = []

    async def withhold(asked: dict[str, str]) -> None:
        async with space.administer() as admin:
            await admin.withhold(asked["id"], asked["why"])

    def heed(said: dict[str, Any]) -> None:
        if "withhold" in said:
            running.append(asyncio.create_task(withhold(said["withhold"])))

    space.steward.life.tell_supervisor = heed
    yield
    await asyncio.gather(*running)


async def flood(client: AgentClient) -> int:
    """Publish without asking for an answer until the broker closes the connection."""
    sent = 0
    try:
        while not client.closed.is_set():
            for _ in range(100):
                await client.connection.publish(client.subjects.chat(client.id, "general"), b"x" * 100)
                await client.connection.publish(client.subjects.direct(KeyPair.generate().id, client.id), b"x")
            sent += 200
            await client.connection.flush(timeout=5)
            await asyncio.sleep(0.05)  # the flood of a client that shares a processor with everybody else here
    except (NatsError, OSError):
        assert client.closed.is_set() or not client.connection.is_connected
    return sent


async def direct_subjects(space: RealSpace) -> list[str]:
    async with space.core() as js:
        return await js.subjects_of(space.subjects.direct_stream, "td.main.dm.>")


async def test_f25_a_flooder_loses_its_posting_and_invented_mail_goes_while_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(administration, "NARROWING_GRACE", 0.2)
    async with real_space(tmp_path / "home", intervals=QUICK) as space:
        for name in ("ada", "bob", "mal"):
            await space.add(name)
        await space_set(space, ChangeSpaceRequest(quota_records=200))
        async with supervised(space), connect(space, "ada") as ada, connect(space, "bob") as bob:
            async with space.agent("mal") as mal:
                flooding = asyncio.create_task(flood(mal))
                await ada.join("general", backfill=0)
                await bob.send("general", "still here")
                await bob.dm(ada.id, "and here")
                assert await asyncio.wait_for(flooding, 20) > 200
            row = Ledger(space.home.issued).active("mal")
            assert row is not None
            assert row.post == ()
            assert "records in" in row.withheld
            assert administration.read_agent_file(space.home, "mal").post == ("general",), "for whoever restores it"

            async def bounded() -> bool:
                return len(await direct_subjects(space)) <= 64 + 1

            await eventually(bounded, what="mail to invented targets goes")
            health = await ada.call(HealthRequest())
            assert health.mail["invented"] > 0
            assert health.withheld == (f"mal may not post {row.withheld}",)
            assert health.problems == ()
            await bob.send("general", "and afterwards")

            async with connect(space, "mal") as mal_again:
                for sending in (mal_again.send("general", "x"), mal_again.dm(ada.id, "x")):
                    with pytest.raises(DeniedError, match=r"mal may not post since .* records in .* restores it"):
                        await sending
                async with space.administer() as admin:
                    await admin.set_access("mal", AgentFile("mal", read=("general",), post=("general",)))
                assert (await mal_again.send("general", "better now")).seq > 0
                assert (await mal_again.dm(ada.id, "sorry")).seq > 0


async def test_without_a_supervisor_a_cut_is_owed_and_said_until_an_administrator_decides(tmp_path: Path) -> None:
    async with real_space(tmp_path / "home", intervals=QUICK) as space:
        await space.add("mal")
        await space_set(space, ChangeSpaceRequest(quota_bytes=1_000))
        async with space.agent("mal") as mal:
            told: list[str] = []

            async def owed() -> bool:
                for _ in range(20):
                    await mal.connection.publish(mal.subjects.chat(mal.id, "general"), b"x" * 1_000)
                told[:] = (await mal.control.call(HealthRequest())).problems
                return bool(told)

            await eventually(owed)
            assert "mal floods (since" in told[0]
            assert "no supervisor runs that could do it: `tidings agent access mal --post ''`" in told[0]
            await space_set(space, ChangeSpaceRequest(quota_bytes=0))
            async with space.administer() as admin:
                await admin.set_access("mal", AgentFile("mal", read=("general",), post=("general", "ops")))
            assert (await mal.control.call(HealthRequest())).problems == ()


async def test_a_busy_agent_below_its_quota_is_left_alone(tmp_path: Path) -> None:
    async with real_space(tmp_path / "home", intervals=QUICK) as space:
        assert space.steward is not None
        await space.add("ada")
        async with space.agent("ada") as ada:
            looks = space.steward.floods.rules.windows + 3
            noted: list[int] = []
            note = space.steward.floods.rules.note
            space.steward.floods.rules.note = lambda used, *more: [noted.append(len(used)), note(used, *more)][1]  # type: ignore

            async def looked() -> bool:
                for _ in range(10):
                    await ada.post("general", b"x")
                return len(noted) > looks

            await eventually(looked)
            assert space.steward.floods.owed == {}


async def test_tasks_of_roles_nobody_holds_stay_bounded_and_those_of_others_are_kept(tmp_path: Path) -> None:
    async with real_space(tmp_path / "home", intervals=QUICK) as space:
        await space.add("ada", roles=["reviewer"])
        await space.add("mal")
        async with space.agent("ada") as ada, space.agent("mal") as mal, space.core() as js:
            await ada.connection.publish(space.subjects.task("reviewer", ada.id), b"held")
            await ada.connection.publish(space.subjects.task("poet", ada.id), b"not held")
            await ada.connection.flush()
            for number in range(200):
                await mal.connection.publish(space.subjects.task(f"role{number}", mal.id), b"x")

            async def subjects() -> list[str]:
                return await js.subjects_of(space.subjects.task_stream, "td.main.task.>")

            async def bounded() -> bool:
                health = await ada.control.call(HealthRequest())
                return health.tasks["invented"] == 136 and len(await subjects()) == 66

            await eventually(bounded)
            kept = set(await subjects())
            assert {space.subjects.task(role, ada.id) for role in ("reviewer", "poet")} <= kept


async def test_many_slow_requests_of_one_agent_do_not_keep_another_from_the_steward(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await space.add("ada")
    await space.add("mal")
    gate = asyncio.Event()
    most = 0

    assert space.steward is not None
    dispatcher = space.steward.dispatcher

    async def slow(_caller: Caller, _request: MembershipsRequest) -> MembershipsAnswer:
        nonlocal most
        most = max(most, dispatcher.queue.running.total())
        await gate.wait()
        return MembershipsAnswer((), 0)

    monkeypatch.setitem(dispatcher.handlers, "member list", slow)
    monkeypatch.setattr(dispatcher.queue, "waiting", 200)
    async with space.agent("ada") as ada, space.agent("mal") as mal:
        asked = [asyncio.create_task(mal.control.call(MembershipsRequest())) for _ in range(300)]
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert isinstance(done.pop().exception(), ConflictError), "what does not fit is refused at once"
        assert (await ada.control.call(JoinRequest("general"))).state == "opened"
        assert (await mal.control.call(BeatRequest(session="session-1", status="idle"))).boot
        gate.set()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        refused = [each for each in answers if isinstance(each, ConflictError)]
        assert len(refused) == 300 - 200 - requests.IN_FLIGHT_EACH
        assert len([each for each in answers if isinstance(each, MembershipsAnswer)]) == 200 + requests.IN_FLIGHT_EACH
        assert most <= requests.IN_FLIGHT_EACH + 1
