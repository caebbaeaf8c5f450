"""A program that keeps mail for its agent: settled upstream at once, `read` only when the agent has read it."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from foreign import connect
from tidings.client.direct_transport import DirectAgent
from tidings.client.incoming import DirectRef
from tidings.client.mailbox import PendingAck, PendingAcks
from tidings.client.publishing import prepare_direct
from tidings.client.transport import Receipt
from tidings.contract.mail import ReaderReceipt, ReportReceiptsRequest
from tidings.errors import UsageError
from tidings.nats.jetstream_api import NO_END
from tidings.wire.message import Sender, compose, new_id
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually

CHILD = Path(__file__).with_name("keeping_child.py")


async def kept_by(keeper: DirectAgent) -> DirectRef:
    message = await keeper.next_message(10)
    await message.keep()
    return message.kept


async def stage(sender: DirectAgent, receipt: Receipt, wanted: str, within: float = 10.0) -> str:
    return (await sender.receipt(receipt, wanted, timeout=within)).stage


async def acknowledged(space: RealSpace, owner: str) -> bool:
    async with space.core() as core:
        info = await core.api(f"CONSUMER.INFO.DM_main.dm_{owner}")
    return not info["num_ack_pending"] and not info["num_pending"]


async def test_what_is_kept_is_settled_and_delivered_and_read_only_when_that_is_told(pair: RealSpace) -> None:
    async with connect(pair, "ada", receive=False) as ada, connect(pair, "bob") as bob:
        receipt = await ada.dm("bob", "keep this")
        assert await stage(ada, receipt, "confirmed") in ("confirmed", "delivered")
        kept = await kept_by(bob)
        assert kept == DirectRef(ada.id, receipt.id, receipt.seq)
        assert await stage(ada, receipt, "delivered") == "delivered"
        await eventually(lambda: acknowledged(pair, bob.id))
        await bob.transport._direct.receipts.flush()
        assert await stage(ada, receipt, "read", within=0) == "delivered", "nobody read it yet"
        assert await bob.transport.tell_read(kept) == []
        assert await stage(ada, receipt, "read") == "read"


async def test_a_keeper_killed_in_between_and_its_successor_tells_what_was_read(pair: RealSpace) -> None:
    async with connect(pair, "ada", receive=False) as ada:
        receipt = await ada.dm("bob", "keep this")
        child = await asyncio.create_subprocess_exec(
            sys.executable, str(CHILD), str(pair.home.home), "bob", stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        try:
            kept = DirectRef(**json.loads(await asyncio.wait_for(child.stdout.readline(), 20)))
            assert await stage(ada, receipt, "delivered") == "delivered"
        finally:
            child.kill()
            await child.wait()
        async with connect(pair, "bob") as bob:
            await eventually(lambda: acknowledged(pair, bob.id), what="it does not come again")
            assert await stage(ada, receipt, "read", within=0) == "delivered"
            assert await bob.transport.tell_read(kept) == []
            assert await stage(ada, receipt, "read") == "read"
            assert len(bob.transport.queue) == 0


async def test_keeping_and_telling_again_does_no_harm(pair: RealSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The acknowledgement is lost: the message comes again to the next keeper, which keeps it again."""
    async with connect(pair, "ada", receive=False) as ada:
        receipt = await ada.dm("bob", "keep this")
        with monkeypatch.context() as lost:
            lost.setattr(PendingAcks, "acknowledge", _say_nothing)
            async with connect(pair, "bob") as first:
                kept = await kept_by(first)
                assert await first.transport.tell_read(kept) == []
                assert await stage(ada, receipt, "read") == "read"
        async with connect(pair, "bob") as second:
            again = await second.next_message(20)
            assert (again.kept, again.redelivered) == (kept, True)
            await again.keep()
            await again.keep()
            assert await second.transport.tell_delivered(kept) == []
            assert await second.transport.tell_read(kept, kept) == []
            await eventually(lambda: acknowledged(pair, second.id))
        assert await stage(ada, receipt, "read", within=0) == "read", "a later `delivered` takes nothing back"
        (life,) = (await ada.trace(receipt)).receipts
        assert set(life.stages) == {"delivered", "read"}


def _say_nothing(self: PendingAcks, held: PendingAck) -> None:
    """Not settled as far as the broker hears, so that closing gives it back."""
    held.acking = asyncio.get_running_loop().create_task(asyncio.sleep(0))


async def test_what_was_kept_and_then_removed_can_still_be_told_read(pair: RealSpace) -> None:
    async with connect(pair, "ada", receive=False) as ada, connect(pair, "bob") as bob:
        receipt = await ada.dm("bob", "keep this")
        kept = await kept_by(bob)
        assert await stage(ada, receipt, "delivered") == "delivered"
        async with pair.core() as core:
            await core.purge("DM_main", subject_filter=pair.subjects.direct_inbox(bob.id), below=NO_END)
        await pair.stop_steward()
        await pair.start_steward()
        await eventually(lambda: bob.transport.state == "ready")
        assert await bob.transport.tell_read(kept) == []
        assert await stage(ada, receipt, "read") == "read"


async def test_mail_that_was_removed_before_its_receipt_came_is_known_as_stored_and_the_late_receipt_counts(
    pair: RealSpace,
) -> None:
    """Its reader acknowledged it and was cut off before it reported: the sender's host does not store it again."""
    async with connect(pair, "ada", receive=False) as ada, connect(pair, "bob") as bob:
        composed = compose(Sender(ada.id, "ada"), text="read and not reported")
        prepared = prepare_direct(ada.transport.identity, bob.id, composed)
        stored = await ada.transport.publish(prepared)
        bob.transport.intake.tells_delivered = False  # as of a host that is cut off before it reports
        kept = await kept_by(bob)
        async with pair.core() as core:

            async def is_removed() -> bool:
                return bool((await core.info("DM_main"))["state"]["messages"] == 0)

            await eventually(is_removed, within=15, what="read mail goes")
        assert await ada.transport.publisher.find(prepared) == stored.seq
        assert await bob.transport.tell_delivered(kept) == []
        assert await stage(ada, Receipt(prepared.id, stored.seq, to=bob.id), "delivered") == "delivered"


async def test_a_sequence_used_again_for_another_message_is_not_told_read_by_it(pair: RealSpace) -> None:
    """A broker that lost its tail gives a sequence twice; who kept the first message speaks of that one only."""
    async with connect(pair, "ada", receive=False) as ada, connect(pair, "bob", receive=False) as bob:
        receipt = await ada.dm("bob", "the second of that sequence")
        lost = DirectRef(ada.id, new_id(), receipt.seq)
        assert await bob.transport.tell_read(lost) == [lost]
        assert await stage(ada, receipt, "read", within=0) == "confirmed"


async def test_nobody_can_tell_of_mail_that_was_not_addressed_to_it(pair: RealSpace) -> None:
    await pair.add("mal")
    async with connect(pair, "ada", receive=False) as ada, connect(pair, "mal", receive=False) as mal:
        receipt = await ada.dm("bob", "for bob")
        kept = DirectRef(ada.id, receipt.id, receipt.seq)
        assert await mal.transport.tell_read(kept) == [kept]
        assert await stage(ada, receipt, "read", within=0) == "confirmed"
        with pytest.raises(UsageError, match="both `sender` and `id`"):
            await mal.call(ReportReceiptsRequest(receipts=(ReaderReceipt(seq=1, stage="read", sender=ada.id),)))


async def test_to_keep_a_channel_message_is_to_settle_it(pair: RealSpace, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    async with connect(pair, "ada") as ada, connect(pair, "bob", "general", state=state) as bob:
        await ada.send("general", "kept")
        await (await bob.next_message(10)).keep()
    async with connect(pair, "ada") as ada, connect(pair, "bob", "general", state=state) as bob:
        await ada.send("general", "next")
        assert (await bob.next_message(10)).text == "next"
