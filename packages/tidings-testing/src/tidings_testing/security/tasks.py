"""Tasks and receipts as a dishonest worker or asker would use them, with requests no endpoint sends.

The stage's role is held by both agents. The victim works honestly; the attacker wants its task, its result, or more
than one task at once; and it speaks of mail that is not its own.
"""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import suppress
from typing import Any

from tidings.contract.agents import HealthRequest
from tidings.contract.mail import (
    MAX_RECEIPTS,
    ReaderReceipt,
    ReportReceiptsRequest,
    TraceRequest,
    WaitForReceiptRequest,
    WatchReceiptsRequest,
)
from tidings.contract.tasks import ClaimRequest, TaskBeatRequest, TaskDoneRequest, TaskFailRequest, TaskResultRequest
from tidings.errors import ConflictError, DeniedError, TidingsError, UsageError, WireError
from tidings.nats.jetstream_api import NO_END
from tidings.wire import message as wire
from tidings.wire import signing
from tidings.wire.message import ExtensionPart, Message, Sender, new_id
from tidings.wire.seal import TASK_PART
from tidings.wire.states import TaskStatus
from tidings_testing.raw_requests import raw_call
from tidings_testing.security.actor import Actor
from tidings_testing.security.report import Collection, ProbeOutcome, broken, held, refused
from tidings_testing.security.stage import Stage

PROBES = Collection()
REFUSALS: tuple[type[TidingsError], ...] = (DeniedError, ConflictError, UsageError, WireError)


async def asked(stage: Stage, asker: Actor, role: str, *, deadline: float | None = None) -> tuple[Message, int]:
    """A task, properly asked."""
    terms = [ExtensionPart(TASK_PART, {"kind": TASK_PART, "deadline_s": deadline})] if deadline else []
    composed = wire.compose(Sender(asker.id, "probe"), text=f"probe {stage.nonce}", parts=terms)
    signature = signing.sign(asker.key, stage.info.id, "task", role, composed.raw)
    subject = stage.subjects.task(role, asker.id)
    reply = await asker.request(subject, composed.raw, headers=[("Td-Sig", signature)])
    return composed, int(json.loads(reply.data)["seq"])


def result(stage: Stage, signer: Actor, claims: str, asker: str, task_id: str) -> dict[str, Any]:
    """A result signed by `signer` that says it is from `claims`."""
    payload = wire.compose(Sender(claims, "probe"), text="probed", reply_to=task_id).raw
    signature = signing.sign(signer.key, stage.info.id, "result", f"{asker}.{task_id}", payload)
    return {"result": base64.b64encode(payload).decode(), "sig": signature}


async def allowed(actor: Actor, attempts: list[tuple[str, str, dict[str, Any]]]) -> list[str]:
    """The requests that were not refused."""
    found = []
    for service, do, arguments in attempts:
        try:
            answer = await raw_call(actor.control, service, do, **arguments)
        except REFUSALS:
            continue
        found.append(f"{service} {do} was answered {str(answer)[:120]}")
    return found


async def _claimed(actor: Actor, role: str) -> int | None:
    """Claims a task of the role and returns its sequence."""
    task = (await actor.control.call(ClaimRequest(role, 3.0))).task
    return task.seq if task is not None else None


@PROBES.probe("F24", "Settle, beat for or give back a task that another worker holds.")
async def settle_anothers_task(stage: Stage) -> ProbeOutcome:
    task, seq = await asked(stage, stage.vic, stage.role)
    if await _claimed(stage.vic, stage.role) != seq:
        return broken("the victim was given another task than the one that was asked")
    own, stolen = (result(stage, stage.mal, who, stage.vic.id, task.id) for who in (stage.mal.id, stage.vic.id))
    attempts: list[tuple[str, str, dict[str, Any]]] = [
        ("task", "done", {"seq": seq, **own}),
        ("task", "done", {"seq": seq, **stolen, "worker": stage.vic.id, "sender": stage.vic.id}),
        ("task", "fail", {"seq": seq, "reason": "spite", "retry": False}),
        ("task", "beat", {"seq": seq, "session": "any"}),
        ("dead", "drop", {"seq": seq}),
        ("dead", "retry", {"seq": seq}),
    ]
    got = await allowed(stage.mal, attempts)
    state = await stage.vic.control.call(TaskResultRequest(task.id, seq))
    if state.state != TaskStatus.CLAIMED or state.worker != stage.vic.id:
        got.append(f"the victim's task is {state.state}")
    honest = result(stage, stage.vic, stage.vic.id, stage.vic.id, task.id)
    if not await allowed(stage.vic, [("task", "done", {"seq": seq, **honest})]):
        got.append("the holder could not finish it")
    return broken("; ".join(got)) if got else refused(f"{len(attempts)} refused; the holder finished it")


@PROBES.probe("F24", "Claim tasks of a role it does not hold, or in the name of one who does.")
async def claim_without_role(stage: Stage) -> ProbeOutcome:
    role = f"{stage.role}-other"
    _, seq = await asked(stage, stage.mal, role)
    names = (role, "*", ">", f"{stage.role}.*", "", role.upper())
    attempts: list[tuple[str, str, dict[str, Any]]] = [("task", "claim", {"role": name, "wait": 0}) for name in names]
    attempts.append(("task", "claim", {"role": role, "wait": 0, "sender": stage.vic.id, "worker": stage.vic.id}))
    got = await allowed(stage.mal, attempts)
    await stage.js.purge(
        stage.subjects.task_stream, subject_filter=stage.subjects.task(role, stage.mal.id), below=NO_END
    )
    return broken("; ".join(got)) if got else refused(f"{len(attempts)} claims of task {seq} refused")


@PROBES.probe("F24", "Hold two tasks at once: many claims at the same time, under many session names.")
async def claim_two_at_once(stage: Stage) -> ProbeOutcome:
    seqs = [(await asked(stage, stage.vic, stage.role))[1] for _ in range(4)]
    claims = [stage.mal.control.call(ClaimRequest(stage.role, 1.0, f"s-{n}" if n % 2 else None)) for n in range(12)]
    answers = await asyncio.gather(*claims)
    got = {answer.task.seq for answer in answers if answer.task is not None}
    for seq in got:
        await stage.mal.control.call(TaskFailRequest(seq, "probe", retry=False))
    await _drain(stage, stage.vic)
    if len(got) != 1 or not got <= set(seqs):
        return broken(f"one worker holds {len(got)} tasks at once")
    return held(f"12 claims at once, one task held ({len(seqs)} waited)")


async def _drain(stage: Stage, worker: Actor) -> None:
    """Take what is left of the probes' tasks out of the queue."""
    while (task := (await worker.control.call(ClaimRequest(stage.role))).task) is not None:
        await worker.control.call(TaskFailRequest(task.seq, "probe", retry=False))


@PROBES.probe("F24", "Keep a task for ever by beating beyond its deadline, then finish it after all.")
async def beat_beyond_deadline(stage: Stage) -> ProbeOutcome:
    task, seq = await asked(stage, stage.vic, stage.role, deadline=0.6)
    if await _claimed(stage.mal, stage.role) != seq:
        return broken("the attacker was not given the task it should hold")
    beats, over = 0, False
    async with asyncio.timeout(10):
        while not over:
            try:
                await stage.mal.control.call(TaskBeatRequest(seq))
                beats += 1
            except ConflictError:
                over = True
            await asyncio.sleep(0.02)
    late = await allowed(
        stage.mal, [("task", "done", {"seq": seq, **result(stage, stage.mal, stage.mal.id, stage.vic.id, task.id)})]
    )
    state = await stage.vic.control.call(TaskResultRequest(task.id, seq))
    if late or (state.state, state.cause) != (TaskStatus.DEAD, "deadline"):
        return broken(f"after its deadline the task is {state.state}; {'; '.join(late)}")
    return refused(f"{beats} beats kept it until its deadline and not longer")


@PROBES.probe("F24", "Forge a result with another's signature, task or name, or none at all; replay an old one.")
async def forged_results(stage: Stage) -> ProbeOutcome:
    first, first_seq = await asked(stage, stage.vic, stage.role)
    if await _claimed(stage.mal, stage.role) != first_seq:
        return broken("the attacker was not given the task it should hold")
    old = result(stage, stage.mal, stage.mal.id, stage.vic.id, first.id)
    payload = base64.b64decode(old["result"])
    record = (await stage.mal.control.call(TaskDoneRequest(first_seq, payload, old["sig"]))).record
    task, seq = await asked(stage, stage.vic, stage.role)
    await _claimed(stage.mal, stage.role)
    good = result(stage, stage.mal, stage.mal.id, stage.vic.id, task.id)
    forgeries = [
        old,
        result(stage, stage.mal, stage.vic.id, stage.vic.id, task.id),
        result(stage, stage.mal, stage.mal.id, stage.mal.id, task.id),
        {"result": good["result"], "sig": old["sig"]},
        {"result": old["result"], "sig": good["sig"]},
        {"result": good["result"], "sig": "A" * 86},
        {"result": base64.b64encode(b"{}").decode(), "sig": good["sig"]},
        {"result": good["result"]},
        {"result": "not base64!", "sig": good["sig"]},
    ]
    got = await allowed(stage.mal, [("task", "done", {"seq": seq, **each}) for each in forgeries])
    with suppress(*REFUSALS):
        later = TaskDoneRequest(first_seq, base64.b64decode(good["result"]), good["sig"])
        if (await stage.mal.control.call(later)).record != record:
            got.append("a result was replaced by a later one")
    if (await stage.vic.control.call(TaskResultRequest(first.id, first_seq))).result != payload:
        got.append("the asker was told another result")
    await allowed(stage.mal, [("task", "fail", {"seq": seq, "reason": "probe", "retry": False})])
    return (
        broken("; ".join(got)) if got else refused(f"{len(forgeries)} forgeries refused; what is done stays as it is")
    )


@PROBES.probe("N16", "Send receipts for mail of others; wait for, watch or trace what others sent.")
async def receipts_of_others(stage: Stage) -> ProbeOutcome:
    mid, seq = await _direct_to_itself(stage)
    many = tuple(ReaderReceipt(n, "read") for n in (*range(max(1, seq - 20), seq + 20), 10**15))
    whose = {"to": stage.vic.id, "sender": stage.vic.id}
    tried = [{}, {"reader": stage.vic.id}, {"sender": stage.vic.id, "id": mid}]
    got = await allowed(stage.mal, [("receipt", "put", {"seq": seq, "stage": "read", **more}) for more in tried])
    got += await allowed(stage.mal, [("receipt", "wait", {"id": mid, "seq": seq, "timeout": 0, **whose})])
    got += await allowed(stage.mal, [("receipt", "watch", {"timeout": 0, "sender": stage.vic.id})])
    told = await stage.mal.control.call(ReportReceiptsRequest(receipts=many, sender=stage.vic.id))
    if told.new:
        got.append(f"{told.new} receipts for mail of others were taken")
    seen = await stage.mal.control.call(WaitForReceiptRequest(mid, stage.vic.id, seq=seq, timeout=0))
    if seen.stage != "unknown":
        got.append(f"a message of another is told to be {seen.stage}")
    await stage.vic.control.call(ReportReceiptsRequest(seq=seq, stage="delivered"))
    watched = await stage.mal.control.call(WatchReceiptsRequest(timeout=0))
    if any(news.id == mid for news in watched.news):
        got.append("the receipts of another were watched")
    traced = await stage.mal.control.call(TraceRequest(mid, seq))
    if traced.stored or traced.receipts:
        got.append("a message of another was traced")
    return broken("; ".join(got)) if got else refused("nothing told, nothing taken")


async def _direct_to_itself(stage: Stage) -> tuple[str, int]:
    """A note of the victim's to itself."""
    composed = wire.compose(Sender(stage.vic.id, "probe"), text="a note")
    signature = signing.sign(stage.vic.key, stage.info.id, "dm", stage.vic.id, composed.raw)
    subject = stage.subjects.direct(stage.vic.id, stage.vic.id)
    reply = await stage.vic.request(subject, composed.raw, headers=[("Td-Sig", signature)])
    return composed.id, int(json.loads(reply.data)["seq"])


@PROBES.probe("N23", "Flood receipts, traces and waits, so that the steward answers nobody.")
async def receipt_flood(stage: Stage) -> ProbeOutcome:
    junk = ReportReceiptsRequest(receipts=tuple(ReaderReceipt(10**12 + n, "read") for n in range(MAX_RECEIPTS)))
    call, count = stage.mal.control.call, 40
    calls = [_answered(call(junk)) for _ in range(count)]
    calls += [_answered(call(TraceRequest(new_id()))) for _ in range(count)]
    calls += [_answered(call(WatchReceiptsRequest(timeout=0.5))) for _ in range(count)]
    calls += [_answered(call(WaitForReceiptRequest(new_id(), stage.vic.id, timeout=0.5))) for _ in range(count)]
    flood = asyncio.gather(*calls)
    await stage.vic.control.call(HealthRequest())
    unanswered = (await flood).count(False)
    if unanswered:
        return broken(f"{unanswered} of {len(calls)} requests were not answered")
    return held(f"{len(calls)} requests answered, and another agent's in between")


async def _answered(call: Any) -> bool:
    try:
        await call
    except TidingsError as error:
        return error.code not in ("outcome_unknown", "unreachable", "broker_unreachable", "steward_unreachable")
    return True
