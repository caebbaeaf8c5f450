"""What any Tidings endpoint must do, each sentence with its requirement id (docs/conformance.md has the list)."""

import asyncio
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tidings
from tidings.broker import jwt
from tidings.errors import DeniedError
from tidings.testing.real_space import AgentClient, RealSpace
from tidings.testing.waiting import eventually
from tidings.wire.ids import new_id
from tidings.wire.subjects import Chat

DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"


def connect(space: RealSpace, name: str, *channels: str) -> tidings.Endpoint:
    return tidings.connect("main", name=name, channels=channels, home=space.home.home)


def body(sender: AgentClient | tidings.Endpoint, text: str = "hello", **changes: object) -> bytes:
    """A message as bytes, changed at will: what a client that is not ours might send."""
    fields: dict[str, object] = {
        "id": new_id(),
        "ts": "2026-01-01T00:00:00.000Z",
        "from": {"id": sender.id, "name": sender.name},
        "parts": [{"kind": "text", "text": text}],
    }
    return json.dumps(fields | changes).encode()


async def surfaced(reader: tidings.Endpoint, sender: AgentClient, channel: str = "general") -> list[str]:
    """The texts a reader surfaced, up to and including a last good message."""
    await sender.post(channel, body(sender, "end of test"))
    found: list[str] = []
    while not found or found[-1] != "end of test":
        found.append((await reader.next_message(10)).text)
    return found[:-1]


@pytest.fixture
async def pair(space: RealSpace) -> RealSpace:
    await space.add("ada")
    await space.add("bob")
    return space


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


@pytest.mark.requirement("C2")
async def test_an_agent_publishes_only_as_itself(pair: RealSpace) -> None:
    async with pair.agent("ada") as ada, pair.agent("bob") as bob, pair.core() as core:
        before = (await core.info("LOG_main"))["state"]["last_seq"]
        for subject in (
            pair.subjects.chat(bob.id, "general"),
            pair.subjects.direct(ada.id, bob.id),
            pair.subjects.task("reviewer", bob.id),
            pair.subjects.control("presence", bob.id),
        ):
            complaint = await ada.refused(partial(ada.connection.publish, subject, body(bob)))
            assert complaint is not None
            assert "permissions violation" in complaint
        assert (await core.info("LOG_main"))["state"]["last_seq"] == before


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
        raw = await ada.link.connection.ask(
            stored.subject, stored.payload, headers=dict(stored.own_fields() or ()), timeout=5
        )
        assert json.loads(raw.data)["duplicate"] is True
        assert (await core.info("LOG_main"))["state"]["messages"] == count


@pytest.mark.requirement("C4")
async def test_how_a_message_was_addressed_comes_from_the_subject_alone(pair: RealSpace) -> None:
    async with connect(pair, "bob", "general") as bob, pair.agent("ada") as ada:
        await ada.post("general", body(ada, channel="secret", to=bob.id, toService="reviewer"))
        message = await bob.next_message(10)
        assert (message.kind, message.channel) == ("channel", "general")


@pytest.mark.requirement("C5")
async def test_a_payload_that_claims_another_sender_is_surfaced_on_no_path(pair: RealSpace) -> None:
    async with connect(pair, "bob", "general") as bob, pair.agent("ada") as ada:
        await ada.post("general", body(ada, "forged", **{"from": {"id": bob.id, "name": "bob"}}))
        await ada.post("general", body(ada, "nameless", **{"from": {"name": "ada"}}))
        assert await surfaced(bob, ada) == []
        assert [m.text for m in await bob.history("general")] == ["end of test"]
        assert bob.opener.refused["sender_mismatch"] >= 1
        assert bob.opener.refused["malformed"] >= 1


@pytest.mark.requirement("C6")
async def test_an_unsigned_or_wrongly_signed_message_is_surfaced_on_no_path(pair: RealSpace) -> None:
    async with connect(pair, "bob", "general") as bob, pair.agent("ada") as ada:
        subject = pair.subjects.chat(ada.id, "general")
        await ada.connection.request(subject, body(ada, "unsigned"), timeout=5)
        await ada.post("general", body(ada, "badly signed"), Td_Sig="A" * 86)
        assert await surfaced(bob, ada) == []
        assert bob.opener.refused["signature"] == 2


@pytest.mark.requirement("C7")
async def test_headers_a_sender_may_not_set_keep_a_message_from_being_surfaced(pair: RealSpace) -> None:
    async with connect(pair, "bob", "general") as bob, pair.agent("ada") as ada:
        for headers in ({"Nats_Sequence": "999"}, {"Status": "100"}, {"KV_Operation": "DEL"}):
            await ada.post("general", body(ada, "shadow"), **headers)
        assert await surfaced(bob, ada) == []
        assert bob.opener.refused["header"] == 3


@pytest.mark.requirement("C8")
async def test_malformed_json_is_refused_and_the_reader_goes_on(pair: RealSpace) -> None:
    async with connect(pair, "bob", "general") as bob, pair.agent("ada") as ada:
        good = body(ada, "x").decode()
        for payload in (b"", b"{", b"\xff", b"[]", good.replace('"id"', '"id":"a","id"').encode(), b"[" * 10_000):
            await ada.post("general", payload)
        assert await surfaced(bob, ada) == []
        assert bob.opener.refused["malformed"] == 6
        assert bob.state == "ready"


@pytest.mark.requirement("C9")
async def test_nobody_can_listen_to_the_answers_of_others(pair: RealSpace) -> None:
    async with pair.agent("ada") as ada, pair.agent("bob") as bob:
        for subject in ("_INBOX.>", f"_INBOX_{bob.id}.>", ">", "td.main.>"):
            complaint = await ada.refused(partial(ada.connection.subscribe, subject))
            assert complaint is not None
            assert "permissions violation" in complaint


@pytest.mark.requirement("C10")
async def test_unknown_fields_and_extension_parts_are_ignored_and_unknown_bare_kinds_refused(pair: RealSpace) -> None:
    async with connect(pair, "bob", "general") as bob, pair.agent("ada") as ada:
        parts = [{"kind": "text", "text": "seen", "colour": "red"}, {"kind": "com.example.widget", "size": 3}]
        await ada.post("general", body(ada, parts=parts, colour="blue"))
        await ada.post("general", body(ada, parts=[{"kind": "widget"}]))
        assert await surfaced(bob, ada) == ["seen"]


@pytest.mark.requirement("C11")
async def test_the_class_of_a_channel_is_the_same_to_everyone_from_one_sequence_on(pair: RealSpace) -> None:
    await pair.add("carol", manage=["general"])
    async with connect(pair, "ada") as ada, connect(pair, "carol") as carol:
        assert (await ada.join("general")).cls == "durable"
        live: dict[str, Any] = {"class": "live"}
        changed = await carol.link.call("channel", "set", channel="general", **live)
        info = await ada.link.call("channel", "info", channel="general")
        assert (info["class"], (await carol.join("general")).cls) == ("live", "live")
        assert pair.steward is not None
        assert pair.steward.table.class_at("general", changed["seq"] - 1) == "durable"
        assert pair.steward.table.class_at("general", changed["seq"]) == "live"


@pytest.mark.requirement("C12")
async def test_what_was_missed_while_away_from_the_broker_is_surfaced_once(pair: RealSpace) -> None:
    async with connect(pair, "bob", "general") as bob, connect(pair, "ada") as ada:
        bob.reconnect()
        await asyncio.gather(*(ada.send("general", str(n)) for n in range(50)))
        await eventually(lambda: len(bob.inbox) == 50)
        bob.reconnect()
        await eventually(lambda: bob.link.rebuilds == 2 and bob.state == "ready")
        await ada.send("general", "last")
        texts = [(await bob.next_message(10)).text for _ in range(51)]
        assert sorted(texts[:-1], key=int) == [str(n) for n in range(50)]
        assert texts[-1] == "last"
        assert len(bob.inbox) == 0


@pytest.mark.requirement("C13")
async def test_a_join_outside_its_access_is_refused_by_the_broker_and_leaves_nothing(pair: RealSpace) -> None:
    async with connect(pair, "ada") as ada:
        errors: list[object] = []
        ada.on("error", errors.append)
        with pytest.raises(DeniedError):
            await ada.join("secret")
        assert (ada.joined, errors) == ([], [])
        assert (await ada.link.call("member", "list"))["memberships"] == []


@pytest.mark.requirement("C14")
async def test_history_is_bounded_by_access_and_leaving_is_a_hard_cut(pair: RealSpace) -> None:
    await pair.add("carol", read=["ops"], post=["ops"])
    async with connect(pair, "ada", "general") as ada, connect(pair, "carol") as carol:
        with pytest.raises(DeniedError):
            await carol.history("general")
        with pytest.raises(DeniedError):
            await ada.recall("ops", 0)
        await ada.leave("general")
        assert pair.steward is not None
        table = pair.steward.table
        assert ada.id not in table.members_at("general", table.head + 1)


def test_every_requirement_has_a_test_and_every_test_a_requirement() -> None:
    listed = set(re.findall(r"^\| (C\d+) \|", DOCUMENT.read_text(), re.MULTILINE))
    tagged = re.findall(r'mark\.requirement\("(C\d+)"\)', Path(__file__).read_text())
    assert sorted(listed) == sorted(tagged)
