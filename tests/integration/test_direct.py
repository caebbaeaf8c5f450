"""Direct messages on a real space: sealed, kept until settled, once, with receipts; and nobody else's business."""

import asyncio
import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

import tidings
from tidings.client import mailbox as endpoint_mailbox
from tidings.client.connect import connect_directly
from tidings.client.intake import Intake
from tidings.client.mailbox import pull
from tidings.contract.admin import ChangeSpaceRequest, PartsChange
from tidings.contract.agents import HealthRequest
from tidings.contract.mail import (
    ReaderReceipt,
    ReportReceiptsRequest,
    TraceRequest,
    WaitForReceiptRequest,
    WatchReceiptsRequest,
)
from tidings.errors import DeniedError, IdBurned, MailboxFull, TidingsError, TooLarge, UnknownPeer, UsageError
from tidings.nats.acks import ACK, DeliveryInfo, parse_delivery
from tidings.steward import admin_handlers
from tidings.steward.context import Intervals
from tidings.util.task_ends import end_tasks
from tidings.wire import signing
from tidings.wire.message import Message, Sender, compose, new_id
from tidings.wire.seal import seal_message
from tidings.wire.signing import KeyPair
from tidings_testing.history import History
from tidings_testing.processes import child
from tidings_testing.raw_requests import raw_call
from tidings_testing.real_space import TEST_INTERVALS, AgentClient, RealSpace, real_space
from tidings_testing.waiting import eventually

CHILD = Path(__file__).parent / "direct_child.py"
#: read mail goes after two rounds: a receipt that was kept while nobody took it may be told a second later
KEEPS_MAIL = replace(TEST_INTERVALS, mail=60.0)


def connect(space: RealSpace, name: str, **options: object) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)  # type: ignore[arg-type]


async def people(space: RealSpace, *names: str) -> None:
    for name in names:
        await space.add(name)


def id_of(space: RealSpace, name: str) -> str:
    from tidings.nats import jwt

    return jwt.split_credentials(space.home.agent_creds(name).read_text())[1].id


async def mailbox(space: RealSpace, owner: str) -> dict[str, Any]:
    async with space.core() as core:
        return dict(await core.api(f"CONSUMER.INFO.{space.subjects.direct_stream}.dm_{owner}"))


async def stored(space: RealSpace) -> int:
    async with space.core() as core:
        return int((await core.info(space.subjects.direct_stream))["state"]["messages"])


async def switch_archive(space: RealSpace, to: Literal["on", "off"]) -> None:
    async with space.administer() as admin:
        await admin.call(ChangeSpaceRequest(parts=PartsChange(archive=to)))


async def raw_dm(
    client: AgentClient, target: str, payload: bytes, *, kind: str = "dm", sign_as: KeyPair | None = None, **more: str
) -> dict[str, Any]:
    """Whatever an agent can put into a mailbox with a raw client."""
    signature = signing.sign(sign_as or client.key, client.space_id, kind, target, payload)
    headers = {"Td-Sig": signature, **{name.replace("_", "-"): value for name, value in more.items()}}
    reply = await client.connection.request(client.subjects.direct(target, client.id), payload, headers=headers)
    return dict(json.loads(reply.data))


def says(client: AgentClient, text: str) -> Message:
    return compose(Sender(client.id, client.name), text=text)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> float:
    """A mailbox whose deliveries come again after a second."""
    monkeypatch.setattr(admin_handlers, "ACK_WAIT_NS", 1_000_000_000)
    monkeypatch.setattr(endpoint_mailbox, "IN_PROGRESS_EVERY", 0.3)
    return 1.0


# --- one to one ---


@pytest.mark.requirement("D1")
async def test_a_direct_message_reaches_its_target_and_nobody_else(space: RealSpace) -> None:
    await people(space, "ada", "bob", "eve")
    async with connect(space, "ada") as ada, connect(space, "bob") as bob, connect(space, "eve") as eve:
        about = new_id()
        receipt = await ada.dm(bob.id, "hello", data={"n": 1}, priority="now", reply_to=about, context="plan")
        assert (receipt.stage, receipt.to) == ("confirmed", bob.id)
        message = await bob.next_message(10)
        assert (message.kind, message.text, message.channel, message.sealed) == ("direct", "hello", None, True)
        assert (message.id, message.seq, message.redelivered) == (receipt.id, receipt.seq, False)
        assert (message.sender.id, message.sender.name) == (ada.id, "ada")
        inside = message.message
        assert (inside.priority, inside.reply_to, inside.context) == ("now", about, "plan")
        await message.ack()
        assert (await mailbox(space, bob.id))["num_ack_pending"] == 0, "ack() came back, so the broker knows"
        assert len(eve.transport.queue) == len(ada.transport.queue) == 0


@pytest.mark.requirement("D8")
async def test_the_broker_holds_ciphertext_unless_the_sender_says_otherwise(space: RealSpace) -> None:
    await people(space, "ada", "bob")
    async with connect(space, "ada") as ada, connect(space, "bob") as bob, space.core() as core:
        hidden, plain = await ada.dm(bob.id, "the secret word"), await ada.dm(bob.id, "open word", sealed=False)
        stream = space.subjects.direct_stream
        records = [await core.at(stream, receipt.seq) for receipt in (hidden, plain)]
        assert records[0] is not None
        assert records[1] is not None
        assert b"secret" not in records[0].payload
        assert b"dev.tidings.sealed" in records[0].payload
        assert b"open word" in records[1].payload
        received = [await bob.next_message(10) for _ in range(2)]
    assert [(m.text, m.sealed) for m in received] == [("the secret word", True), ("open word", False)]
    assert received[0].raw == records[0].payload, "raw is what was signed and stored"


@pytest.mark.requirement("D3")
async def test_what_was_sent_while_the_target_was_away_is_there_when_it_comes(space: RealSpace) -> None:
    await people(space, "ada", "bob")
    async with connect(space, "ada") as ada:
        for number in range(100):
            await ada.dm(id_of(space, "bob"), str(number))
    async with connect(space, "bob") as bob:
        received = []
        for _ in range(100):
            message = await bob.next_message(10)
            received.append(message.text)
            await message.ack()
        assert received == [str(number) for number in range(100)]
    async with connect(space, "bob") as bob:
        await asyncio.sleep(0.3)
        assert len(bob.transport.queue) == 0, "settled is settled"


async def test_one_that_could_not_be_handed_over_comes_again_and_is_no_repetition(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await people(space, "ada", "bob")
    put, failures = Intake.put, [RuntimeError("a mistake of ours")]

    async def once_in_vain(self: Intake, incoming: tidings.Incoming) -> None:
        if failures:
            raise failures.pop()
        await put(self, incoming)

    monkeypatch.setattr(Intake, "put", once_in_vain)
    monkeypatch.setattr(endpoint_mailbox, "DECLINED", 0.2)
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        await ada.dm(bob.id, "hello")
        message = await bob.next_message(10)
        assert (message.text, failures) == ("hello", [])
        await message.ack()


async def test_a_note_to_oneself_arrives(space: RealSpace) -> None:
    await people(space, "ada")
    async with connect(space, "ada", receive=False) as ada:
        await ada.dm(ada.id, "remember the milk")
    async with connect(space, "ada") as ada:
        message = await ada.next_message(10)
        assert (message.text, message.sender.id) == ("remember the milk", ada.id)


async def test_names_nobody_can_resolve_and_what_is_too_large_are_said_before_sending(space: RealSpace) -> None:
    await people(space, "ada", "bob")
    async with connect(space, "ada") as ada:
        with pytest.raises(UnknownPeer):
            await ada.dm("nobody", "hello")
        with pytest.raises(TooLarge):
            await ada.dm(id_of(space, "bob"), "x" * 200_000)
        assert await stored(space) == 0


# --- once, and at least once ---


async def test_the_same_id_sent_again_is_stored_once_and_another_text_under_it_is_refused(space: RealSpace) -> None:
    await people(space, "ada", "bob")
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        mid = new_id()
        first = await ada.dm(bob.id, "hello", id=mid)
        again = await ada.dm(bob.id, "hello", id=mid)
        assert (first.seq, await stored(space)) == (again.seq, 1)
        with pytest.raises(IdBurned):
            await ada.dm(bob.id, "something else", id=mid)
        assert (await bob.next_message(10)).text == "hello"
        assert len(bob.transport.queue) == 0


@pytest.mark.requirement("D2")
async def test_a_target_killed_before_it_settled_gets_it_again_and_is_told(
    space: RealSpace, impatient: float, tmp_path: Path
) -> None:
    """F8: nothing is acknowledged because it is in memory."""
    await people(space, "ada", "bob")
    history, lines = History(), tmp_path / "what bob read"
    async with connect(space, "ada") as ada:
        confirmed = history.sending("ada", "direct")
        confirmed((await ada.dm(id_of(space, "bob"), "hello", id=confirmed.id)).seq)
    async with child(CHILD, str(space.home.home), space.home.name, "bob", lines) as victim:
        assert await victim.line() == {"text": "hello", "redelivered": False}
        victim.signal(signal.SIGKILL)
        await victim.ended()
    async with connect(space, "bob") as bob:
        message = await bob.next_message(10)
        assert (message.text, message.redelivered) == ("hello", True)
        history.took("bob", message)
        await message.ack()
        history.settled("bob", "ada", "direct", message.id)
    async with connect(space, "bob") as bob:
        await asyncio.sleep(3 * impatient)
        assert len(bob.transport.queue) == 0
    history.merge(lines).owed("bob", "direct")
    history.check()
    assert [event.again for event in history.of("read")] == [False, True]


async def test_what_a_closed_endpoint_had_not_settled_comes_at_once_to_the_next(space: RealSpace) -> None:
    await people(space, "ada", "bob")
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        await ada.dm(bob.id, "one")
        await ada.dm(bob.id, "two")
        await (await bob.next_message(10)).ack()
        await bob.next_message(10)
    async with connect(space, "bob") as bob:
        message = await bob.next_message(5)
        assert (message.text, message.redelivered) == ("two", True)


async def test_what_was_on_its_way_to_a_pull_that_is_cancelled_goes_to_the_next_at_once(space: RealSpace) -> None:
    """Not after the broker's patience for an acknowledgement, which is half a minute."""
    await people(space, "ada", "bob")
    got: list[bytes] = []

    async def take(message: Any, delivery: DeliveryInfo) -> None:
        got.append(message.data)
        await bob.connection.publish(delivery.reply, ACK)

    async def pulled(batch: int) -> str:
        return await pull(bob.connection, space.subjects.direct_stream, f"dm_{bob.id}", batch, 5, take)

    async with space.agent("ada") as ada, space.agent("bob") as bob:
        for number in range(20):
            pulling = asyncio.create_task(pulled(2))
            await asyncio.sleep(0)
            await bob.connection.flush()
            await raw_dm(ada, bob.id, says(ada, f"message {number}").raw, Nats_Msg_Id=new_id())
            await end_tasks([pulling])
            if len(got) <= number:
                assert await pulled(1) == "full"
            assert len(got) == number + 1


@pytest.mark.requirement("D7")
async def test_what_is_held_long_is_not_delivered_again(space: RealSpace, impatient: float) -> None:
    """F8: a turn longer than the acknowledgement time is said to be in progress."""
    await people(space, "ada", "bob")
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        await ada.dm(bob.id, "think about it")
        message = await bob.next_message(10)
        await asyncio.sleep(3.5 * impatient)
        assert (await mailbox(space, bob.id))["num_redelivered"] == 0
        await message.ack()
        assert (await mailbox(space, bob.id))["num_ack_pending"] == 0
        assert len(bob.transport.queue) == 0


async def test_a_redelivery_of_what_is_in_hand_is_not_surfaced_twice(
    space: RealSpace, impatient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_mailbox, "IN_PROGRESS_EVERY", 60.0)  # it does not say that it is working
    await people(space, "ada", "bob")
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        await ada.dm(bob.id, "hello")
        message = await bob.next_message(10)
        await eventually(lambda: any(h.delivery.count > 1 for h in bob.transport._direct.pending.values()), within=10)
        assert len(bob.transport.queue) == 0
        await message.ack()
        assert (await mailbox(space, bob.id))["num_ack_pending"] == 0
        assert bob.transport._direct.pending == {}


async def test_with_a_state_file_what_was_settled_but_not_acknowledged_is_not_surfaced_again(
    space: RealSpace, tmp_path: Path, impatient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F28: the state file knows what the broker was not told."""
    await people(space, "ada", "bob")
    state = tmp_path / "bob.state"

    async def never(self: endpoint_mailbox.PendingAcks, held: endpoint_mailbox.PendingAck) -> None:
        self.pop(held.delivery.seq, None)

    async with connect(space, "ada") as ada:
        with monkeypatch.context() as patched:
            patched.setattr(endpoint_mailbox.PendingAcks, "_until_acknowledged", never)
            async with connect(space, "bob", state=state) as bob:
                await ada.dm(bob.id, "settled")
                await (await bob.next_message(10)).ack()
        await ada.dm(id_of(space, "bob"), "new")
        async with connect(space, "bob", state=state) as bob:
            assert (await bob.next_message(10)).text == "new"

            async def acknowledged() -> bool:
                return bool((await mailbox(space, bob.id))["num_ack_pending"] == 1)

            await eventually(acknowledged, what="the settled one is acknowledged, the new one is held")
            assert len(bob.transport.queue) == 0


async def test_a_broker_killed_with_9_in_between_loses_nothing_and_doubles_nothing(
    space: RealSpace, impatient: float
) -> None:
    await people(space, "ada", "bob")
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        history = History()

        async def write() -> None:
            confirmed = history.sending("ada", "direct")
            confirmed((await ada.dm(bob.id, "x", id=confirmed.id, timeout=20)).seq)

        for _ in range(10):
            await write()
        held = [await bob.next_message(10) for _ in range(5)]
        await space.restart_broker(kill=True)
        await eventually(lambda: ada.transport.state == "ready" and bob.transport.state == "ready", within=20)
        for _ in range(10):
            await write()
        held += [await bob.next_message(10) for _ in range(15)]
        await asyncio.gather(*(message.ack() for message in held))
        for message in held:
            history.took("bob", message)
        history.owed("bob", "direct")
        history.check()

        async def empty() -> bool:
            return bool((await mailbox(space, bob.id))["num_ack_pending"] == 0)

        await eventually(empty, within=15)
        assert len(bob.transport.queue) == 0


@pytest.mark.requirement("D6")
async def test_an_inbox_without_room_acknowledges_nothing_and_loses_nothing(space: RealSpace) -> None:
    """F8: what does not fit is not fetched, and nothing is acknowledged unseen."""
    await people(space, "ada", "bob")
    async with connect(space, "ada") as ada, connect(space, "bob", inbox=2) as bob:
        for number in range(12):
            await ada.dm(bob.id, str(number))
        await bob.transport.receive()
        await eventually(lambda: len(bob.transport.queue) == 2)
        await asyncio.sleep(0.3)
        info = await mailbox(space, bob.id)
        assert (info["ack_floor"]["stream_seq"], info["num_ack_pending"] <= 2) == (0, True)
        received = []
        for _ in range(12):
            message = await bob.next_message(10)
            received.append(message.text)
            await message.ack()
        assert received == [str(number) for number in range(12)]


# --- poison ---


@pytest.mark.requirement("D4")
async def test_poison_is_terminated_counted_and_said_and_the_next_real_one_arrives(space: RealSpace) -> None:
    """F16: a message is a message whatever its headers say; what cannot be opened is terminated at once."""
    await people(space, "ada", "bob", "mal")
    bob_id, ada_id = id_of(space, "bob"), id_of(space, "ada")
    async with space.agent("mal") as mal:
        for number in range(200):
            await raw_dm(mal, bob_id, b"x", Status="100", Description=str(number))
        good = says(mal, "hi")
        forged = compose(Sender(ada_id, "ada"), text="I am ada")
        await raw_dm(mal, bob_id, good.raw, sign_as=KeyPair.generate())
        await raw_dm(mal, bob_id, good.raw, kind="chat")
        await raw_dm(mal, bob_id, forged.raw)
        await raw_dm(mal, bob_id, b'{"not": "a message"}')
        await raw_dm(mal, bob_id, good.raw, Nats_Sequence="7")
        await raw_dm(mal, bob_id, seal_message(mal.key, ada_id, good).raw)  # sealed for somebody else
        await mal.connection.request(mal.subjects.direct(bob_id, mal.id), good.raw)
    errors: list[Any] = []
    bob = connect(space, "bob")
    bob.on("error", errors.append)
    async with bob, connect(space, "ada") as ada:
        await ada.dm(bob_id, "the real one")
        message = await bob.next_message(15)
        assert (message.text, message.sender.name) == ("the real one", "ada")
        assert bob.transport.opener.refused["direct"] == len(errors) == 207
        assert all(isinstance(error, TidingsError) for error in errors)
        await message.ack()
        info = await mailbox(space, bob_id)
        assert (info["num_ack_pending"], info["num_pending"], info["num_redelivered"]) == (0, 0, 0)


def test_both_forms_of_an_acknowledgement_subject_are_read() -> None:
    short = parse_delivery("$JS.ACK.DM_main.dm_U.2.17.4.1700000000000000000.9")
    long = parse_delivery("$JS.ACK._.ACCOUNT.DM_main.dm_U.2.17.4.1700000000000000000.9")
    longest = parse_delivery("$JS.ACK.hub.ACCOUNT.DM_main.dm_U.2.17.4.1700000000000000000.9.token")
    for found in (short, long, longest):
        assert found is not None
        assert (found.stream, found.consumer, found.count, found.seq, found.pending) == ("DM_main", "dm_U", 2, 17, 9)
    for other in ("", "_INBOX.x", "$JS.ACK.a.b.c", "$JS.ACK.a.b.1.2.3.4.x", "$JS.ACK.a.b.1.2.3.4.5.6"):
        assert parse_delivery(other) is None


# --- receipts ---


async def test_the_sender_learns_that_it_was_delivered_and_then_read(space: RealSpace) -> None:
    await people(space, "ada", "bob")
    async with connect(space, "ada") as ada:
        receipt = await ada.dm(id_of(space, "bob"), "hello")
        assert (await ada.receipt(receipt, timeout=0.2)).stage == "confirmed"
        async with connect(space, "bob") as bob:
            waiting = asyncio.create_task(ada.receipt(receipt, timeout=20))
            message = await bob.next_message(10)
            assert (await waiting).stage == "delivered"
            assert (await ada.receipt(receipt, "read", timeout=0.2)).stage == "delivered"
            await message.ack()
            assert (await ada.receipt(receipt.id, "read", timeout=20)).stage == "read"
            for who in (ada, bob):
                life = await who.trace(receipt.id)
                assert [(line.kind, line.seq) for line in life.stored] == [("dm", receipt.seq)]
                assert [set(each.stages) for each in life.receipts] == [{"delivered", "read"}]
    async with space.core() as core:
        s = space.subjects
        kept = [r async for page in core.read(s.audit_stream, f"{s.root}.aud.receipt.*", 1, 1_000) for r in page]
    said = [json.loads(record.payload) for record in kept]
    assert [(each["stage"], each["of"]["id"]) for each in said] == [("delivered", receipt.id), ("read", receipt.id)]


async def test_receipts_survive_a_steward_that_is_replaced(space: RealSpace) -> None:
    await people(space, "ada", "bob")
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        first = await ada.dm(bob.id, "one")
        await (await bob.next_message(10)).ack()
        assert (await ada.receipt(first, "read", timeout=20)).stage == "read"
        await space.stop_steward()
        second = await ada.dm(bob.id, "two")
        await (await bob.next_message(10)).ack()
        await space.start_steward(KEEPS_MAIL)
        assert (await ada.receipt(first, "read", timeout=20)).stage == "read", "read back from AUD"
        assert (await ada.receipt(second, "read", timeout=20)).stage == "read", "told once somebody was there to hear"


@pytest.mark.requirement("D9")
async def test_nobody_else_can_claim_or_wait_for_a_receipt_or_trace_a_message(space: RealSpace) -> None:
    """N16: receipts go through the steward, which checks whose message it was."""
    await people(space, "ada", "bob", "mal")
    bob_id = id_of(space, "bob")
    async with connect(space, "ada") as ada, space.agent("mal") as mal:
        receipt = await ada.dm(bob_id, "hello")
        with pytest.raises(DeniedError):
            await mal.control.call(ReportReceiptsRequest(stream="dm", seq=receipt.seq, stage="read"))
        many = tuple(ReaderReceipt(seq, "read") for seq in range(1, 20))
        assert (await mal.control.call(ReportReceiptsRequest(stream="dm", receipts=many))).new == 0
        found = await mal.control.call(WaitForReceiptRequest(receipt.id, to=bob_id, seq=receipt.seq, timeout=0))
        assert (found.stage, found.stages) == ("unknown", {})
        assert (await mal.control.call(TraceRequest(receipt.id, seq=receipt.seq))).stored == ()
        with pytest.raises(DeniedError):  # nor its own sender
            await ada.call(ReportReceiptsRequest(stream="dm", seq=receipt.seq, stage="read"))
        wrong: list[dict[str, Any]] = [
            {"receipts": []},
            {"receipts": [7]},
            {"seq": True, "stage": "read"},
            {"seq": 1, "stage": "x"},
        ]
        for junk in wrong:
            with pytest.raises(UsageError):
                await raw_call(mal.control, "receipt", "put", **junk)
        with pytest.raises(UsageError):
            await mal.control.call(TraceRequest("x"))
        assert (await ada.receipt(receipt, timeout=0.1)).stage == "confirmed"


async def test_many_who_wait_do_not_keep_the_steward_from_its_work(space: RealSpace) -> None:
    await people(space, "ada", "bob", "eve")
    async with connect(space, "ada") as ada, connect(space, "eve") as eve:
        receipt = await ada.dm(id_of(space, "bob"), "hello")
        polls = [
            asyncio.create_task(who.call(WaitForReceiptRequest(receipt.id, to=id_of(space, "bob"), wait=3), timeout=20))
            for who in (ada, eve)
            for _ in range(60)
        ]
        await asyncio.sleep(0.3)
        async with asyncio.timeout(2):
            await eve.call(HealthRequest())
        assert all(not answer.reached for answer in await asyncio.gather(*polls))
        assert space.steward is not None
        assert space.steward.receipts.waits.total() == 0
        assert space.steward.dispatcher.queue.running.total() == 0


async def test_a_sender_that_listens_is_told_of_each_stage_without_asking(space: RealSpace) -> None:
    await people(space, "ada", "bob")
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        told: list[Any] = []
        ada.on("receipt", told.append)
        sent = [await ada.dm(bob.id, str(number)) for number in range(20)]
        for _ in range(20):
            await (await bob.next_message(10)).ack()
        await eventually(lambda: sum(each.stage == "read" for each in told) == 20)
        assert {(each.id, each.stage) for each in told} == {(r.id, st) for r in sent for st in ("delivered", "read")}
        assert len(told) == 40, "each once"
        assert all(each.to == bob.id for each in told)
        assert ada.transport._direct.watch.polls <= 12, "one poll is answered with everything that happened meanwhile"
        polls = ada.transport._direct.watch.polls
        await eventually(lambda: ada.transport._direct.watch._task is None or ada.transport._direct.watch._task.done())
        assert ada.transport._direct.watch.polls == polls, "and with nothing open nobody asks"


async def test_who_does_not_listen_does_not_poll(space: RealSpace) -> None:
    await people(space, "ada", "bob")
    async with connect(space, "ada") as ada:
        receipt = await ada.dm(id_of(space, "bob"), "hello")
        assert ada.transport._direct.watch.polls == 0
        told: list[Any] = []
        ada.on("receipt", told.append)  # later is not too late
        async with connect(space, "bob") as bob:
            await (await bob.next_message(10)).ack()
            await eventually(lambda: [(each.id, each.stage) for each in told][-1:] == [(receipt.id, "read")])


async def test_the_watch_goes_on_with_the_next_steward_and_tells_nothing_twice(space: RealSpace) -> None:
    await people(space, "ada", "bob")
    told: list[Any] = []
    ada = connect(space, "ada")
    ada.on("receipt", told.append)
    async with ada, connect(space, "bob") as bob:
        first, second = await ada.dm(bob.id, "one"), await ada.dm(bob.id, "two")
        messages = [await bob.next_message(10) for _ in range(2)]
        await messages[0].ack()
        await eventually(lambda: (first.id, "read") in [(each.id, each.stage) for each in told])
        await space.stop_steward()
        await messages[1].ack()
        await space.start_steward(KEEPS_MAIL)
        await eventually(lambda: (second.id, "read") in [(each.id, each.stage) for each in told], within=20)
        assert len(told) == len({(each.id, each.stage) for each in told}) == 4


async def test_more_watches_than_allowed_are_answered_at_once_and_the_endpoint_slows_down(space: RealSpace) -> None:
    await people(space, "ada", "bob")
    assert space.steward is not None
    async with space.agent("ada") as raw, connect(space, "ada") as ada:
        raw.control.timeout = 20
        polls = [asyncio.create_task(raw.control.call(WatchReceiptsRequest(wait=3))) for _ in range(8)]
        await eventually(lambda: sum(poll.done() for poll in polls) == 4)
        began = asyncio.get_running_loop().time()
        ada.on("receipt", lambda _receipt: None)
        await ada.dm(id_of(space, "bob"), "unread")
        await asyncio.sleep(0.7)
        polled, took = ada.transport._direct.watch.polls, asyncio.get_running_loop().time() - began
        assert polled <= math.log2(took / 0.05 + 1) + 2, "50, 100, 200, 400 ms ..."
        answers = await asyncio.gather(*polls)
        assert sorted(answer.waited for answer in answers) == [False] * 4 + [True] * 4
        assert all(answer.news == () for answer in answers)
        await eventually(lambda: space.steward is not None and space.steward.receipts.waits.total() <= 1)


async def test_a_flood_of_receipts_and_traces_keeps_nobody_from_being_answered(space: RealSpace) -> None:
    await people(space, "ada", "mal")
    async with space.agent("mal") as mal, space.agent("ada") as ada:
        mal.control.timeout = ada.control.timeout = 20
        many = tuple(ReaderReceipt(seq, "read") for seq in range(1_000_000, 1_000_512))
        puts = [
            asyncio.create_task(_outcome(mal.control.call(ReportReceiptsRequest(receipts=many)))) for _ in range(50)
        ]
        traces = [asyncio.create_task(_outcome(mal.control.call(TraceRequest(new_id())))) for _ in range(50)]
        await asyncio.wait_for(ada.control.call(HealthRequest()), 10)
        for flood in (puts, traces):
            outcomes = await asyncio.gather(*flood)
            assert set(outcomes) == {"answered", "conflict"}, "every one is answered, most of them at once"


async def _outcome(call: Any) -> str:
    try:
        await call
    except TidingsError as error:
        return error.code
    return "answered"


# --- what may leave ---


async def test_read_mail_leaves_and_unread_mail_stays(space: RealSpace) -> None:
    await people(space, "ada", "bob", "eve")
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        for number in range(10):
            await ada.dm(bob.id, str(number))
        waiting = await ada.dm(id_of(space, "eve"), "unread")
        received = [await bob.next_message(10) for _ in range(10)]
        for message in received[:4]:
            await message.ack()
        await received[7].ack()

        async def removed() -> bool:
            return await stored(space) == 7

        await eventually(removed, within=15, what="the four below the first unsettled one go")
        await asyncio.sleep(1.2)
        assert await stored(space) == 7
    async with connect(space, "eve") as eve:
        assert (await eve.next_message(10)).seq == waiting.seq


@pytest.mark.usefixtures("archive_exists")
async def test_read_mail_waits_for_the_archive_unless_it_is_switched_off(space: RealSpace) -> None:
    await people(space, "ada", "bob")
    assert space.steward is not None
    await switch_archive(space, "on")
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        seqs = [(await ada.dm(bob.id, str(number))).seq for number in range(4)]
        for _ in range(4):
            await (await bob.next_message(10)).ack()
        rounds = [await space.steward.mail.run() for _ in range(3)]
        assert (rounds, await stored(space)) == ([0, 0, 0], 4)
        await space.steward.state.put("floor.archive.dm", {"seq": seqs[2]}, 0)

        async def halved() -> bool:
            return await stored(space) == 2

        await eventually(halved, what="what the archive has goes")


async def test_unread_mail_expires_and_its_sender_is_told(tmp_path: Path) -> None:
    intervals = type(TEST_INTERVALS)(lease_ttl=1.0, gate=0.1, retention=0.2, marks=0.1, mail=0.2, mail_ttl=1.0)
    async with real_space(tmp_path / "home", intervals=intervals) as space:
        await people(space, "ada", "bob")
        async with connect(space, "ada") as ada:
            told: list[Any] = []
            ada.on("receipt", told.append)
            receipt = await ada.dm(id_of(space, "bob"), "too late")
            await eventually(lambda: [(each.id, each.stage) for each in told] == [(receipt.id, "expired")])
            assert (await ada.receipt(receipt, "read", timeout=20)).stage == "expired"
            assert [each.stage for each in (await ada.trace(receipt)).receipts] == ["expired"]

            async def gone() -> bool:
                return await stored(space) == 0

            await eventually(gone)
        async with connect(space, "bob") as bob:
            await asyncio.sleep(0.3)
            assert len(bob.transport.queue) == 0


async def test_mail_to_nobody_or_to_a_revoked_agent_is_told_undeliverable(tmp_path: Path) -> None:
    intervals = type(TEST_INTERVALS)(lease_ttl=1.0, gate=0.1, retention=0.2, marks=0.1, mail=0.2, mail_grace=0.5)
    async with real_space(tmp_path / "home", intervals=intervals) as space:
        await people(space, "ada", "bob")
        async with connect(space, "ada") as ada:
            told: list[Any] = []
            ada.on("receipt", told.append)
            waiting = await ada.dm(id_of(space, "bob"), "unread")
            async with space.administer() as admin:
                await admin.revoke("bob")
            invented = await ada.dm(KeyPair.generate().id, "is anybody there?")
            for receipt in (waiting, invented):
                assert (await ada.receipt(receipt, "read", timeout=20)).stage == "undeliverable"
                async with asyncio.timeout(10):  # nothing more becomes of it, so nobody waits
                    assert (await ada.receipt(receipt, "void", timeout=3_600)).stage == "undeliverable"
            await eventually(lambda: len(told) == 2)
            assert {(each.id, each.stage) for each in told} == {
                (receipt.id, "undeliverable") for receipt in (waiting, invented)
            }

            async def gone() -> bool:
                return await stored(space) == 0

            await eventually(gone)


@pytest.mark.requirement("X6")
async def test_a_thousand_unread_from_one_sender_fill_its_share_of_a_mailbox_only(space: RealSpace) -> None:
    await people(space, "ada", "bob", "eve")
    bob_id = id_of(space, "bob")
    async with connect(space, "ada") as ada, connect(space, "eve") as eve:
        for _ in range(10):
            await asyncio.gather(*(ada.dm(bob_id, "x") for _ in range(100)))
        with pytest.raises(MailboxFull, match=f"the mailbox of {bob_id} is full from you"):
            await ada.dm(bob_id, "one too many")
        assert (await eve.dm(bob_id, "from another")).seq == 1_001


async def test_a_busy_pair_of_a_new_space_is_never_full_of_what_was_read(tmp_path: Path) -> None:
    """At the pace of a real space, so that no round of the steward comes in between: reading makes room by itself."""
    async with real_space(tmp_path / "home", intervals=Intervals(mail=600)) as space:
        await people(space, "ada", "bob")
        async with connect(space, "ada") as ada, connect(space, "bob") as bob:
            for _ in range(11):
                sent = await asyncio.gather(*(ada.dm(bob.id, "x", sealed=False) for _ in range(100)))
                for _ in range(100):
                    await (await bob.next_message(10)).ack()
            assert await stored(space) == 600
            assert (await ada.receipt(sent[-1], "read", timeout=20)).stage == "read"
            assert bob.transport._direct.receipts.dropped == 0, "what went early is still known when its receipt comes"
