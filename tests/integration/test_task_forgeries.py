"""What is forged is handed to nobody, settles nothing, and is found out by whoever it is told to."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reviewing import claimed, connect, one, reviewers, signed_result
from tidings.contract.channels import RawRecord
from tidings.contract.core import Request
from tidings.contract.mail import DeadLetterRequest, DeadLettersRequest, DropLetterRequest, RetryLetterRequest
from tidings.contract.tasks import (
    ClaimRequest,
    TaskBeatRequest,
    TaskDoneRequest,
    TaskFailRequest,
    TaskResultAnswer,
    TaskResultRequest,
)
from tidings.errors import (
    BadSignature,
    DeniedError,
    UsageError,
)
from tidings.nats.jetstream import StoredRecord
from tidings.steward import task_handlers
from tidings.steward.history import raw_record
from tidings.wire import message as wire
from tidings.wire import signing
from tidings.wire.message import Sender
from tidings.wire.signing import KeyPair
from tidings_testing.raw_requests import raw_call
from tidings_testing.real_space import AgentClient, RealSpace


@pytest.fixture
async def space(tmp_path: Path) -> AsyncIterator[RealSpace]:
    async with reviewers(tmp_path / "home") as running:
        yield running


async def test_a_forged_result_is_refused_and_the_true_one_taken(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, space.agent("bob") as bob, space.agent("cat") as cat:
        ticket = await ada.ask("reviewer", "one")
        seq = await claimed(bob)
        for forged in (
            signed_result(cat, ada.id, ticket.id),
            signed_result(bob, ada.id, "01890a5d-ac96-774b-bcce-b302099a8057"),
            signed_result(bob, cat.id, ticket.id),
        ):
            with pytest.raises(BadSignature):
                await bob.control.call(TaskDoneRequest(seq, **forged))
        good = signed_result(bob, ada.id, ticket.id)
        told = await bob.control.call(TaskDoneRequest(seq, **good))
        assert await bob.control.call(TaskDoneRequest(seq, **good)) == told, "the same answer again"
        assert (await ticket.result(5)).text == "yes"


@pytest.mark.requirement("T2")
async def test_a_steward_that_lies_about_a_result_is_found_out_by_the_asker(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, space.agent("bob") as bob:
        ticket = await ada.ask("reviewer", "one")
        lie = signed_result(bob, ada.id, ticket.id)
        answer = msgspec.convert({"state": "done", "asker": ada.id, "worker": bob.id, **lie}, TaskResultAnswer)
        assert ada.transport.tasks._opened(ticket.id, answer).text == "yes"
        other = wire.compose(Sender(bob.id, "bob"), text="no").raw
        with pytest.raises(BadSignature):
            ada.transport.tasks._opened(ticket.id, msgspec.structs.replace(answer, result=other))


def forged(kind: str, mal: AgentClient, other: str) -> tuple[bytes, dict[str, str]]:
    """A record on the attacker's own task subject that no worker may be handed."""
    good = wire.compose(Sender(mal.id, mal.name), text="do it").raw
    foreign = wire.compose(Sender(other, "ada"), text="do it for ada").raw
    big = json.dumps({"x": "y" * 262_200}).encode()

    def sig(payload: bytes, of: str = "task", role: str = "reviewer") -> dict[str, str]:
        return {"Td-Sig": signing.sign(mal.key, mal.space_id, of, role, payload)}

    stranger = signing.sign(KeyPair.generate(), mal.space_id, "task", "reviewer", good)
    return {
        "missing signature": (good, {}),
        "signature of another key": (good, {"Td-Sig": stranger}),
        "signature for another role": (good, sig(good, role="painter")),
        "signature of another kind": (good, sig(good, of="chat")),
        "foreign sender": (foreign, sig(foreign)),
        "header of the broker's": (good, sig(good) | {"Nats-Sequence": "7"}),
        "oversize": (big, sig(big)),
    }[kind]


FORGERIES = (
    "missing signature",
    "signature of another key",
    "signature for another role",
    "signature of another kind",
    "foreign sender",
    "header of the broker's",
    "oversize",
)


async def test_what_does_not_verify_is_never_handed_to_a_worker_and_becomes_a_dead_letter(space: RealSpace) -> None:
    async with space.agent("cat") as mal, connect(space, "ada") as ada, connect(space, "bob") as bob:
        for kind in FORGERIES:
            payload, headers = forged(kind, mal, ada.id)
            said = await mal.connection.request(space.subjects.task("reviewer", mal.id), payload, headers=headers)
            assert b'"seq"' in said.data, f"{kind}: {said.data!r}"
        ticket = await ada.ask("reviewer", "the real one")
        job = await one(bob)
        assert job.message.id == ticket.id, "the first thing a program sees is the real one"
        await job.done("yes")
        dead = (await mal.control.call(DeadLettersRequest())).dead
        assert [(each.cause, each.attempts) for each in dead] == [("malformed", 0)] * len(FORGERIES)


async def test_a_worker_verifies_for_itself_what_a_steward_hands_out(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        bad, good = await ada.ask("reviewer", "altered"), await ada.ask("reviewer", "good")

        def altered(record: StoredRecord) -> RawRecord:
            raw = raw_record(record)
            if raw.seq == bad.seq:
                raw.payload = record.payload.replace(b"altered", b"alterea")
            return raw

        monkeypatch.setattr(task_handlers, "raw_record", altered)
        job = await one(bob)
        assert job.message.id == good.id
        await job.done("yes")
        found = await bad.status(5)
        assert (found.state, found.cause) == ("dead", "failed")
        assert "signature" in found.reasons[-1]


async def test_a_worker_cannot_make_a_task_unfit_to_be_tried_again(space: RealSpace) -> None:
    async with connect(space, "ada") as ada, space.agent("ada") as raw, space.agent("bob") as bob:
        ticket = await ada.ask("reviewer", "fine")
        await bob.control.call(ClaimRequest("reviewer", wait=2))
        fields = {"seq": ticket.seq, "reason": "spite", "retry": False, "cause": "malformed"}
        with pytest.raises(UsageError, match="unknown field 'cause'"):
            await raw_call(bob.control, "task", "fail", **fields)
        told = await bob.control.call(TaskFailRequest(ticket.seq, reason="spite", retry=False))
        assert (told.state, told.cause) == ("dead", "failed")
        assert (await raw.control.call(RetryLetterRequest(seq=ticket.seq))).state == "queued"


async def test_strangers_neither_settle_nor_see_nor_wait_for_a_task(space: RealSpace) -> None:
    """F24: only its holder settles a task."""
    await space.add("mal", roles=["painter"])
    async with connect(space, "ada") as ada, space.agent("bob") as bob, space.agent("mal") as mal:
        ticket = await ada.ask("reviewer", "secret")
        seq = await claimed(bob)
        settling: tuple[Request[Any], ...] = (
            TaskBeatRequest(seq),
            TaskDoneRequest(seq, **signed_result(mal, ada.id, ticket.id)),
            TaskFailRequest(seq, "spite", retry=False),
        )
        for settle in settling:
            with pytest.raises(DeniedError, match="holds no task"):
                await mal.control.call(settle)
        assert (await mal.control.call(TaskResultRequest(ticket.id, seq=seq))).state == "unknown"
        assert (await mal.control.call(TaskResultRequest(ticket.id))).state == "unknown"
        await bob.control.call(TaskFailRequest(seq, reason="no", retry=False))
        assert (await mal.control.call(DeadLettersRequest())).dead == ()
        letters: tuple[Request[Any], ...] = (DeadLetterRequest(seq), RetryLetterRequest(seq), DropLetterRequest(seq))
        for request in letters:
            with pytest.raises(UsageError, match="no dead letter"):
                await mal.control.call(request)
