"""A message that was stored and that no reader shows is told to its sender: trace, receipts, notices, and a count."""

from typing import Any

import pytest

import tidings
from tidings.client.connect import connect_directly
from tidings.client.notices import Notice
from tidings.contract.admin import ChangeSpaceRequest, GrantRequest
from tidings.contract.channels import ChangeChannelRequest
from tidings.contract.mail import TraceRequest
from tidings.errors import ConnectionLost
from tidings.steward.receipts import Key
from tidings.steward.store_reading import read_store
from tidings.wire import signing
from tidings.wire.envelope import RULED_OUT
from tidings.wire.message import Sender, compose
from tidings_testing.real_space import TEST_INTERVALS, AgentClient, RealSpace
from tidings_testing.waiting import eventually

#: what a careless client may write, and the word in what its sender is told
RESERVED = ("Nats-Expected-Stream", "nats-msg-id", "KV-Foo")


def connect(space: RealSpace, name: str, **options: Any) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)


async def write_void(agent: AgentClient, subject: str, kind: str, destination: str, header: str, stream: str) -> str:
    """Store a signed message that has a reserved header; the broker says that it has it. Answers its id."""
    message = compose(Sender(agent.id, agent.name), text=f"with {header}")
    signature = signing.sign(agent.key, agent.space_id, kind, destination, message.raw)
    value = stream if header == "Nats-Expected-Stream" else message.id
    reply = await agent.connection.request(
        subject, message.raw, timeout=5, headers={"Td-Sig": signature, header: value}
    )
    assert b'"seq"' in reply.data, "a positive answer"
    return message.id


async def test_a_message_with_reserved_headers_is_told_to_its_sender_as_void_and_counted(pair: RealSpace) -> None:
    s = pair.subjects
    async with (
        connect(pair, "bob", channels=["general"]) as bob,
        connect(pair, "ada", channels=["general"]) as ada,
        pair.agent("ada") as raw,
    ):
        notices: list[Notice] = []
        ada.on("notice", notices.append)
        void = {
            await write_void(raw, s.chat(raw.id, "general"), "chat", "general", header, s.log_stream): header
            for header in RESERVED
        }
        direct = await write_void(raw, s.direct(bob.id, raw.id), "dm", bob.id, "KV-Foo", s.direct_stream)
        await eventually(lambda: len(notices) == 4, what="the sender is told of each, once")
        for mid, header in void.items():
            (notice,) = [each for each in notices if mid in each.text]
            assert (notice.kind, notice.channel, notice.count) == ("void", "general", 1)
            assert header in notice.cause
            told = await ada.trace(mid)
            assert [(each.kind, each.to) for each in told.stored] == [("chat", "general")]
            assert header in told.stored[0].void
            (receipt,) = told.receipts
            assert (receipt.stage, receipt.kind, header in receipt.why) == ("void", "chat", True)
        known = await ada.receipt(direct, "read", timeout=10, to=bob.id)
        assert (known.stage, "KV-Foo" in known.why) == ("void", True)
        assert (await bob.trace(next(iter(void)))).stored == (), "nobody else is told"
        assert pair.steward is not None
        assert (await pair.steward.health.facts()).void_messages == {"header": 4}
        await ada.send("general", "a good one")
        assert (await bob.next_message(10)).text == "a good one"
    await pair.stop_steward()
    await pair.start_steward(TEST_INTERVALS)
    async with connect(pair, "ada", channels=["general"]) as ada:
        assert (await ada.trace(direct)).receipts[0].stage == "void", "and it is remembered"
        again: list[Notice] = []
        ada.on("notice", again.append)
        await eventually(lambda: len(again) == 4, what="a program that was away hears of it, under the same ids")
        assert {each.id for each in again} == {each.id for each in notices}
        steward = pair.steward
        await eventually(lambda: steward.voids._looked is not None)
        assert not steward.voids.found, "what was looked at is not looked at again"


async def test_a_post_that_the_rules_did_not_allow_is_told_to_its_sender_as_void_with_the_ruling(
    space: RealSpace,
) -> None:
    """It opens, and is owed to nobody: a channel that is not listed, access that was narrowed a moment before."""
    for name in ("ada", "bob"):
        await space.add(name, read=[">"], post=[">"], manage=[">"])
    steward = space.steward
    assert steward is not None
    async with connect(space, "ada", channels=["random"]) as ada, space.agent("bob") as bob:
        notices: list[Notice] = []
        ada.on("notice", notices.append)
        fine = [await ada.send("random", "while every channel is open")]
        async with space.administer() as admin:
            await admin.call(ChangeSpaceRequest(channels="listed"))
        unlisted = await ada.send("random", "to nobody")
        await ada.call(ChangeChannelRequest("random", description="now listed"))
        fine.append(await ada.send("random", "to its members"))
        await eventually(lambda: len(notices) == 1, what="the sender is told")
        cause = f"{RULED_OUT}: only listed channels are posted to in this space, and #random was none"
        assert (notices[0].kind, notices[0].channel, notices[0].cause) == ("void", "random", cause)
        assert unlisted.id in notices[0].text
        assert "owed to nobody" in notices[0].text
        told = await ada.trace(unlisted.id)
        assert [each.void for each in told.stored] == [cause]
        assert [(each.stage, each.why) for each in told.receipts] == [("void", cause)]
        for each in fine:
            told = await ada.trace(each.id)
            assert ([line.void for line in told.stored], told.receipts) == ([""], ())
        async with space.administer() as admin:
            await admin.call(GrantRequest(id=bob.id, name="bob", read=(">",), post=("general",)))
        late = compose(Sender(bob.id, "bob"), text="the broker has not cut him yet")
        signature = signing.sign(bob.key, bob.space_id, "chat", "random", late.raw)
        await bob.connection.request(
            space.subjects.chat(bob.id, "random"), late.raw, timeout=5, headers={"Td-Sig": signature}
        )
        await eventually(lambda: steward.voids.found == {"ruling": 2}, what="it is found")
        (receipt,) = (await bob.control.call(TraceRequest(late.id))).receipts
        assert receipt.why == f"{RULED_OUT}: its sender might not post in #random"
        assert (await steward.health.facts()).void_messages == {"ruling": 2}
    assert (await read_store(space.home)).void == {"ruling": 2}, "and whoever reads the store counts the same"


async def test_a_flood_of_void_messages_is_counted_and_told_in_bounds(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidings.steward.voids.MOST_TOLD", 3)
    monkeypatch.setattr("tidings.steward.voids.PAGE", 5)
    monkeypatch.setattr("tidings.steward.voids.MOST_RECORDS", 10)
    steward = pair.steward
    assert steward is not None
    await eventually(lambda: steward.voids._looked is not None, what="a first look")
    async with pair.agent("ada") as raw:
        for _ in range(25):
            await raw.post("general", b"no message at all")
    await eventually(lambda: steward.voids.found["malformed"] == 25, what="all are found, some in each round")
    assert 3 <= sum(life.channel == "general" for life in steward.receipts.lives.values()) <= 12


async def test_a_round_in_which_nobody_could_be_told_is_done_again(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker restarts between the look and the receipt: the sender is told once it is back."""
    steward = pair.steward
    assert steward is not None
    await eventually(lambda: bool(steward.voids._saved), what="a first look, which is remembered though nothing came")
    tell, failed = steward.receipts.tell_ended, list[str]()

    async def cut_off(key: Key, *rest: Any, **more: Any) -> None:
        if len(failed) < 2:
            failed.append(key[1])
            raise ConnectionLost("the broker restarts")
        await tell(key, *rest, **more)

    monkeypatch.setattr(steward.receipts, "tell_ended", cut_off)
    async with connect(pair, "ada", channels=["general"]) as ada, pair.agent("ada") as raw:
        s = pair.subjects
        mid = await write_void(raw, s.chat(raw.id, "general"), "chat", "general", "KV-Foo", s.log_stream)
        await eventually(lambda: bool(steward.voids.found), what="a round that told its sender")
        assert failed == [mid, mid]
        assert [each.stage for each in (await ada.trace(mid)).receipts] == ["void"]
        assert steward.voids.found == {"header": 1}, "and it counts once"


async def test_what_a_broker_took_of_somebody_the_log_no_longer_lets_speak_is_in_no_history(pair: RealSpace) -> None:
    """Servers that others run may learn late that an agent was revoked or narrowed: the log knew before."""
    s = pair.subjects
    async with connect(pair, "bob", channels=["general"]) as bob, pair.agent("ada") as raw, pair.core() as core:
        gaps: list[object] = []
        bob.on("gap", gaps.append)

        async def said(text: str) -> None:
            message = compose(Sender(raw.id, raw.name), text=text)
            signature = signing.sign(raw.key, raw.space_id, "chat", "general", message.raw)
            await core.publish(s.chat(raw.id, "general"), message.raw, headers={"Td-Sig": signature})

        await said("while it may")
        assert (await bob.next_message(10)).text == "while it may"
        async with pair.administer() as admin:
            await admin.revoke("ada")
        await said("too late")
        shown = [message.text for message in await bob.history("general")]
        assert "while it may" in shown
        assert "too late" not in shown
        # and a reader that lost the live copy of it is not told that something it was owed is gone
        answer = await bob.transport._log.of_sender(
            "general", raw.id, 0, (await core.info(s.log_stream))["state"]["last_seq"]
        )
        assert [record.message.parts[0].text for record in answer[0]] == ["while it may"]  # type: ignore[union-attr]
        assert answer[1] == (await core.info(s.log_stream))["state"]["last_seq"]
        assert gaps == []
