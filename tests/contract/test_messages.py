"""What any endpoint must do with messages, its own and others', on every path (docs/conformance.md)."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tidings
from foreign import ask_for, body, connect, surfaced, write_to
from tidings.contract.channels import ChangeChannelRequest
from tidings.contract.mail import DeadLettersRequest
from tidings.errors import MalformedMessage, UsageError
from tidings.nats import jwt
from tidings.wire.message import new_id
from tidings.wire.subjects import AGENT_SERVICES, Chat
from tidings_testing.proxy import fault_proxy
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


@pytest.mark.requirement("C1")
async def test_one_identity_stands_in_subject_payload_signature_and_mailboxes(pair: RealSpace) -> None:
    async with connect(pair, "ada") as ada, pair.core() as core:
        receipt = await ada.send("general", "hello")
        stored = await core.at("LOG_main", receipt.seq)
        assert stored is not None
        _, key = jwt.split_credentials(pair.home.agent_creds("ada").read_text())
        assert key.id == ada.id == json.loads(stored.payload)["from"]["id"]
        assert pair.subjects.parse(stored.subject) == Chat(ada.id, "general")
        for stream, prefix in (("DLV_main", "dlv"), ("DM_main", "dm")):
            assert (await core.api(f"CONSUMER.INFO.{stream}.{prefix}_{ada.id}"))["name"] == f"{prefix}_{ada.id}"
        assert {row.name: row.id for row in await ada.who()}["ada"] == ada.id


@pytest.mark.requirement("C1")
async def test_a_credential_of_another_key_than_its_name_says_is_refused_before_connecting(
    pair: RealSpace, tmp_path: Path
) -> None:
    async with fault_proxy(pair.info.port) as proxy:
        bundle = tmp_path / "ada.json"
        content = {"space": "main", "space_id": pair.info.id, "steward_key": pair.info.steward_key, "url": proxy.url}
        _, bob = jwt.split_credentials(pair.home.agent_creds("bob").read_text())
        creds = pair.home.agent_creds("ada").read_text()
        bundle.write_text(json.dumps(content | {"agent": {"name": "ada", "id": bob.id}, "creds": creds}))
        bundle.chmod(0o600)
        with pytest.raises(UsageError, match="holds the key of"):
            async with tidings.connect(bundle=bundle):
                pass
        assert proxy.connections == 0


@pytest.mark.requirement("C2")
async def test_an_agent_publishes_only_as_itself(pair: RealSpace) -> None:
    async with pair.agent("ada") as ada, pair.agent("bob") as bob, pair.core() as core:

        async def stored() -> list[int]:
            return [(await core.info(f"{s}_main"))["state"]["last_seq"] for s in ("LOG", "DM", "TASK", "AUD")]

        before = await stored()
        for subject in (
            pair.subjects.chat(bob.id, "general"),
            pair.subjects.direct(ada.id, bob.id),
            pair.subjects.task("reviewer", bob.id),
            *(pair.subjects.control(service, bob.id) for service in AGENT_SERVICES),
        ):
            complaint = await ada.refused(partial(ada.connection.publish, subject, body(bob)))
            assert complaint is not None
            assert "permissions violation" in complaint
        assert await stored() == before


@pytest.mark.requirement("C3")
async def test_a_message_sent_twice_under_one_id_is_stored_once(pair: RealSpace) -> None:
    async with connect(pair, "ada") as ada, pair.core() as core:
        name = new_id()
        first = await ada.send("general", "hello", id=name)
        stored = await core.at("LOG_main", first.seq)
        assert stored is not None
        assert ("Nats-Msg-Id", name) in (stored.own_fields() or ())
        again = await core.connection.request("$JS.API.STREAM.INFO.LOG_main", b"", timeout=5)
        count = json.loads(again.data)["state"]["messages"]
        composed = json.loads(stored.payload)
        assert composed["id"] == name
        raw = await ada.transport.connection.current.request(
            stored.subject, stored.payload, headers=dict(stored.own_fields() or ()), timeout=5
        )
        assert json.loads(raw.data)["duplicate"] is True
        with pytest.raises(MalformedMessage):
            await ada.send("general", "not Unicode: \udcff")
        assert (await core.info("LOG_main"))["state"]["messages"] == count


@pytest.mark.requirement("C4")
async def test_how_a_message_was_addressed_comes_from_the_subject_alone(pair: RealSpace) -> None:
    async with connect(pair, "bob", "general") as bob, pair.agent("ada") as ada:
        await ada.post("general", body(ada, channel="secret", to=bob.id, toService="reviewer"))
        message = await bob.next_message(10)
        assert (message.kind, message.channel) == ("channel", "general")
        await write_to(ada, bob.id, body(ada, channel="general", toService="reviewer"))
        message = await bob.next_message(10)
        assert (message.kind, message.channel) == ("direct", None)


@pytest.mark.requirement("C5")
async def test_a_payload_that_claims_another_sender_is_surfaced_on_no_path(pair: RealSpace) -> None:
    async with connect(pair, "bob", "general") as bob, pair.agent("ada") as ada:
        await ada.post("general", body(ada, "forged", **{"from": {"id": bob.id, "name": "bob"}}))
        await ada.post("general", body(ada, "nameless", **{"from": {"name": "ada"}}))
        assert await surfaced(bob, ada) == []
        assert [m.text for m in await bob.history("general")] == ["end of test"]
        assert bob.transport.opener.refused["sender_mismatch"] >= 1
        assert bob.transport.opener.refused["malformed"] >= 1


@pytest.mark.requirement("C5")
async def test_neither_mail_nor_a_task_that_claims_another_sender_is_surfaced_or_comes_again(pair: RealSpace) -> None:
    await pair.add("cat", roles=["reviewer"])
    async with pair.agent("ada") as ada, connect(pair, "bob") as bob, connect(pair, "cat") as cat, pair.core() as core:
        forged = {"from": {"id": bob.id, "name": "bob"}}
        for wrong in (forged, {"from": {"name": "ada"}}):
            await write_to(ada, cat.id, body(ada, "forged", **wrong))
            await ask_for(ada, "reviewer", body(ada, "forged", **wrong))
        await write_to(ada, cat.id, body(ada, "true mail"))
        await ask_for(ada, "reviewer", body(ada, "true task"))
        message = await cat.next_message(10)
        assert message.text == "true mail"
        await message.ack()
        job = await asyncio.wait_for(anext(aiter(cat.work("reviewer"))), 10)
        assert job.text == "true task"
        await job.done("yes")
        info = await core.api(f"CONSUMER.INFO.DM_main.dm_{cat.id}")
        assert (info["num_ack_pending"], info["num_pending"], info["num_redelivered"]) == (0, 0, 0)
        dead = (await ada.control.call(DeadLettersRequest())).dead
        assert [each.cause for each in dead] == ["malformed", "malformed"]


@pytest.mark.requirement("C6")
async def test_an_unsigned_or_wrongly_signed_message_is_surfaced_on_no_path(pair: RealSpace) -> None:
    async with connect(pair, "bob", "general") as bob, pair.agent("ada") as ada:
        subject = pair.subjects.chat(ada.id, "general")
        await ada.connection.request(subject, body(ada, "unsigned"), timeout=5)
        await ada.post("general", body(ada, "badly signed"), Td_Sig="A" * 86)
        assert await surfaced(bob, ada) == []
        assert bob.transport.opener.refused["signature"] == 2


@pytest.mark.requirement("C7")
async def test_headers_a_sender_may_not_set_keep_a_message_from_being_surfaced(pair: RealSpace) -> None:
    async with connect(pair, "bob", "general") as bob, pair.agent("ada") as ada:
        for headers in ({"Nats_Sequence": "999"}, {"Status": "100"}, {"KV_Operation": "DEL"}):
            await ada.post("general", body(ada, "shadow"), **headers)
        assert await surfaced(bob, ada) == []
        assert bob.transport.opener.refused["header"] == 3


@pytest.mark.requirement("C8")
async def test_malformed_json_is_refused_and_the_reader_goes_on(pair: RealSpace) -> None:
    async with connect(pair, "bob", "general") as bob, pair.agent("ada") as ada:
        good = body(ada, "x").decode()
        for payload in (
            body(ada, id=""),
            b"",
            b"{",
            b"\xff",
            b"[]",
            good.replace('"id"', '"id":"a","id"').encode(),
            b"[" * 10_000,
        ):
            await ada.post("general", payload)
        assert await surfaced(bob, ada) == []
        assert bob.transport.opener.refused["malformed"] == 7
        assert bob.transport.state == "ready"


@pytest.mark.requirement("C9")
async def test_nobody_can_listen_to_the_answers_of_others(pair: RealSpace) -> None:
    async with pair.agent("ada") as ada, pair.agent("bob") as bob:
        for subject in ("_INBOX.>", f"_INBOX_{bob.id}.>", ">", "td.main.>"):
            complaint = await ada.refused(partial(ada.connection.subscribe, subject))
            assert complaint is not None
            assert "permissions violation" in complaint


@pytest.mark.requirement("C9")
async def test_an_endpoint_does_all_it_offers_without_one_violation_in_the_brokers_log(pair: RealSpace) -> None:
    """The rights an endpoint has are the rights it needs: a missing one would be an empty answer, not an error."""
    await pair.add("cat", roles=["reviewer"], manage=["general"])
    async with connect(pair, "ada", "general") as ada, connect(pair, "cat", "general") as cat:
        await ada.send("general", "hello", mentions=["cat"])
        receipt = await ada.dm("cat", "hello")
        for _ in range(2):
            await (await cat.next_message(10)).ack()
        await ada.receipt(receipt, "read", timeout=10)
        await ada.trace(receipt)
        ticket = await ada.ask("reviewer", "look")
        await (await asyncio.wait_for(anext(aiter(cat.work("reviewer"))), 10)).done("good")
        await ticket.result(10)
        await ada.history("general")
        await ada.transport.recall("general", 0)
        await ada.transport.watch("general")
        await ada.who()
        await ada.access()
        await ada.transport._access.refresh()
        ada.transport.presence.set_status("working", "a test")
        await cat.call(ChangeChannelRequest("general", description="talk"))
        await ada.call(DeadLettersRequest())
        ada.transport.connection.reconnect()
        await eventually(lambda: ada.transport.connection.rebuilds == 1 and ada.transport.state == "ready")
        await ada.leave("general")
    assert "violation" not in pair.broker.config.log_file.read_text().lower()
    async with pair.agent("ada") as raw:
        assert await raw.refused(partial(raw.connection.subscribe, "td.main.>"))
    await eventually(lambda: "violation" in pair.broker.config.log_file.read_text().lower(), what="the log would tell")


@pytest.mark.requirement("C10")
async def test_unknown_fields_and_extension_parts_are_ignored_and_unknown_bare_kinds_refused(pair: RealSpace) -> None:
    async with connect(pair, "bob", "general") as bob, pair.agent("ada") as ada:
        parts = [{"kind": "text", "text": "seen", "colour": "red"}, {"kind": "com.example.widget", "size": 3}]
        sender: dict[str, Any] = {"from": {"id": ada.id, "name": "ada", "mood": "good"}}
        mentions = [{"id": bob.id, "name": "bob", "loud": True}]
        await ada.post("general", body(ada, parts=parts, colour="blue", mentions=mentions, **sender))
        await ada.post("general", body(ada, parts=[{"kind": "widget"}]))
        assert await surfaced(bob, ada) == ["seen"]
