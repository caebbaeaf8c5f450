"""What two reviews of the design found, where no other test pins it already; docs/findings.md has the whole list."""

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from foreign import ask_for, body, connect, write_to
from tidings.contract.agents import BeatRequest
from tidings.nats.errors import ApiError
from tidings.wire import signing
from tidings.wire.message import new_id
from tidings_testing.real_space import TEST_INTERVALS, RealSpace, real_space
from tidings_testing.waiting import eventually


@pytest.fixture
async def pair(space: RealSpace) -> RealSpace:
    await space.add("ada")
    await space.add("bob", roles=["reviewer"])
    return space


async def test_f16_a_status_header_hides_no_task_and_blocks_no_queue(pair: RealSpace) -> None:
    async with pair.agent("ada") as ada, connect(pair, "bob") as bob:
        payload = body(ada, "shadow")
        signature = signing.sign(ada.key, ada.space_id, "task", "reviewer", payload)
        for _ in range(20):
            headers = {"Td-Sig": signature, "Status": "100"}
            await ada.connection.request(pair.subjects.task("reviewer", ada.id), payload, headers=headers)
        await ask_for(ada, "reviewer", body(ada, "real"))
        job = await asyncio.wait_for(anext(aiter(bob.work("reviewer"))), 15)
        assert job.text == "real"
        await job.done("done")


async def test_f22_mail_goes_to_the_newer_of_two_sessions_and_is_not_shared_out(pair: RealSpace) -> None:
    async with connect(pair, "ada") as ada, connect(pair, "bob") as older:
        await ada.dm("bob", "first")
        await (await older.next_message(10)).ack()
        async with connect(pair, "bob") as newer:
            await newer.transport.receive()
            await eventually(older.transport.session.superseded.is_set)
            await eventually(lambda: older.transport._direct._closed)
            for number in range(20):
                await ada.dm("bob", str(number))
            assert [(await newer.next_message(10)).text for _ in range(20)] == [str(n) for n in range(20)]
            assert len(older.transport.queue) == 0


async def test_f23_no_header_of_a_beat_erases_the_roster_or_makes_a_ghost(tmp_path: Path) -> None:
    async with real_space(tmp_path / "home", intervals=replace(TEST_INTERVALS, presence=1.0)) as space:
        for name in ("ada", "mal"):
            await space.add(name)
        async with connect(space, "ada") as ada, space.agent("mal") as mal, space.core() as core:

            def online() -> list[str]:
                return [agent.name for agent in ada.transport.roster.agents() if agent.online]

            beat = {"op": new_id(), "do": "beat", "session": "session-1", "status": "working"}
            for header in ({"Nats-Rollup": "all"}, {"KV-Operation": "PURGE"}, {"Nats-TTL": "never"}):
                subject = space.subjects.control("presence", mal.id)
                await mal.connection.publish(subject, json.dumps(beat).encode(), headers=header)
            await mal.control.call(BeatRequest(session="session-1", status="idle"))
            await eventually(lambda: online() == ["ada", "mal"])
            await eventually(lambda: online() == ["ada"], what="who falls silent goes, whatever its beats said")
            assert not (await core.info("LOG_main"))["config"].get("allow_rollup_hdrs")


async def test_f31_a_name_in_a_message_is_for_display_and_gets_nobodys_mail(pair: RealSpace) -> None:
    await pair.add("mal")
    async with pair.agent("mal") as mal, connect(pair, "bob", "general") as bob:
        await mal.post("general", body(mal, "I am ada", **{"from": {"id": mal.id, "name": "ada"}}))
        claimed = await bob.next_message(10)
        assert (claimed.sender.name, claimed.sender.id, claimed.claims) == ("mal", mal.id, "ada")
        ada = (await bob.transport.resolve("ada")).id
        assert ada != mal.id
        assert {agent.id: agent.name for agent in await bob.who()}[mal.id] == "mal"
        assert (await bob.dm("ada", "for the real one")).to == ada


async def test_n10_a_revocation_empties_the_delivery_box_and_takes_both_mailboxes_away(pair: RealSpace) -> None:
    async with pair.agent("bob") as bob, pair.core() as core:
        await core.publish(pair.subjects.delivery(bob.id), b"a frame")
        async with pair.administer() as admin:
            await admin.revoke("bob")
        assert (await core.info("DLV_main"))["state"]["messages"] == 0
        for consumer in (f"DLV_main.dlv_{bob.id}", f"DM_main.dm_{bob.id}"):
            with pytest.raises(ApiError):
                await core.api(f"CONSUMER.INFO.{consumer}")


async def test_n12_a_message_whose_time_is_far_off_is_delivered_and_shown_with_both_times(pair: RealSpace) -> None:
    async with pair.agent("ada") as ada, connect(pair, "bob", "general") as bob:
        for early in ("00000000-0001-7000-8000-000000000001", "7fffffff-ffff-7000-8000-000000000001"):
            await ada.post("general", body(ada, "odd clock", id=early, ts="1999-12-31T23:59:59.999Z"))
            message = await bob.next_message(10)
            assert (message.text, message.id) == ("odd clock", early)
            said = datetime.fromtimestamp(message.message.ts_ms / 1000, UTC)
            stored = datetime.fromtimestamp(message.time_ns / 1e9, UTC)
            assert (said.year, stored.year >= 2024) == (1999, True)


async def test_n12_a_repeated_sender_and_id_is_surfaced_once_and_another_senders_same_id_too(pair: RealSpace) -> None:
    async with pair.agent("ada") as ada, pair.agent("bob") as raw, connect(pair, "bob") as bob:
        await pair.add("cat")
        async with connect(pair, "cat", "general") as cat:
            same = body(ada, "once")
            for _ in range(3):
                assert "duplicate" not in await ada.post("general", same), "three records of one message"
            await raw.post("general", body(raw, "mine", id=json.loads(same)["id"]))
            assert [(await cat.next_message(10)).text for _ in range(2)] == ["once", "mine"]
            assert (len(cat.transport.queue), cat.transport.opener.refused["repeated"]) == (0, 2)
            for _ in range(3):
                await write_to(ada, bob.id, same)
            assert (await bob.next_message(10)).text == "once"
            await write_to(ada, bob.id, body(ada, "next"))
            assert (await bob.next_message(10)).text == "next"


@pytest.mark.parametrize("manual", [False, True])
async def test_n19_asking_for_the_next_message_settles_the_one_before_unless_told_otherwise(
    pair: RealSpace, manual: bool
) -> None:
    async with connect(pair, "ada") as ada, pair.core() as core:
        async with connect(pair, "bob") as bob:
            for text in ("one", "two", "three"):
                await ada.dm("bob", text)
            held: list[Any] = []
            async for message in bob.messages(manual_ack=manual):
                held.append(message)
                if len(held) == 3:
                    break
            assert [m.settled for m in held] == ([False] * 3 if manual else [True, True, False])
            info = await core.api(f"CONSUMER.INFO.DM_main.dm_{bob.id}")
            assert info["num_ack_pending"] == (3 if manual else 1)
            await held[2].ack()
        async with connect(pair, "bob") as bob:
            again = sorted([(await bob.next_message(10)).text for _ in range(2 if manual else 0)])
            assert again == (["one", "two"] if manual else [])
            await ada.dm("bob", "four")
            assert (await bob.next_message(10)).text == "four"
