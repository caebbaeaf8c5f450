"""`ctl.task` and `ctl.dead`: what workers and askers may say to the task desk.

A worker claims, beats and settles; an asker asks what became of its task; both see the dead letters that concern
them. Whoever has nothing to do with a task is told the same as if it did not exist. Claims and results may wait up to
20 seconds and are always answered.
"""

from __future__ import annotations

import base64
import binascii
import time
from typing import TYPE_CHECKING, Any

from tidings.errors import BadSignature, ConflictError, DeniedError, MalformedMessage, UsageError
from tidings.steward import dead_mail
from tidings.steward.agent_handlers import Answer, Handler, access_of
from tidings.steward.history import encoded
from tidings.steward.requests import Request
from tidings.steward.task_rules import Settled, TaskState, is_overdue
from tidings.steward.unread import predecessors
from tidings.wire import message as wire
from tidings.wire.ids import is_message_id
from tidings.wire.names import check_role
from tidings.wire.operations import TASK_WAIT
from tidings.wire.signing import verifies

if TYPE_CHECKING:
    from tidings.steward.service import Steward

LONGEST_WAIT = TASK_WAIT
LISTED = 200


def _wait(request: Request) -> float:
    value = request.arguments.get("wait", 0)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= LONGEST_WAIT:
        raise UsageError(f"{request.service} {request.do}: `wait` is 0 to {LONGEST_WAIT:.0f} seconds")
    return float(value)


def _seq(request: Request) -> int:
    seq = request.optional("seq", int)
    if seq is None or seq < 1:
        raise UsageError(f"{request.service} {request.do} needs `seq`, the number of a task")
    return int(seq)


def _named(steward: Steward, owner: str | None) -> str | None:
    access = steward.table.access_at(owner, steward.position) if owner else None
    return access.name if access else None


async def claim(steward: Steward, request: Request) -> Answer:
    role, seconds, session = check_role(request.text("role")), _wait(request), request.optional("session", str)
    access = access_of(steward, request.sender)
    if role not in access.roles:
        raise DeniedError(
            f"{access.name} does not hold the role {role}, so it may not take its tasks; "
            f"its roles are {', '.join(access.roles) or 'none'}"
        )
    desk = steward.desk
    async with desk.parked(request.sender, seconds) as allowed:
        task = await desk.handout.claim(request.sender, session, role, allowed)
    if task is None:
        return {"task": None}
    record = await desk.intake.record_of(task)
    if record is None:
        raise ConflictError(f"task {task.seq} is gone; claim again")
    return {
        "task": encoded(record),
        "role": task.role,
        "attempt": task.attempt,
        "deadline": task.deadline,
        "claimed_at": task.claimed_at,
        "beat_every": steward.intervals.task_silence / 6,
    }


async def beat(steward: Steward, request: Request) -> Answer:
    access_of(steward, request.sender)
    task = await steward.desk.settling.beat(request.sender, _seq(request), request.optional("session", str))
    return {"state": "held", "attempt": task.attempt, "deadline": task.deadline}


async def done(steward: Steward, request: Request) -> Answer:
    """A signed result; repeating it gives the same answer."""
    access_of(steward, request.sender)
    desk, seq, session = steward.desk, _seq(request), request.optional("session", str)
    try:
        payload = base64.b64decode(request.text("result"), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError("task done: `result` is base64") from error
    async with desk.lock:
        settled = desk.settling.done_before(request.sender, seq, session)
        if settled is None:
            task = desk.settling.held(request.sender, seq, session)
            _check_result(steward, task, request.sender, payload, request.text("sig"))
            if is_overdue(task, time.time()):
                await desk.settling.bury(task, "deadline", "its result came after its deadline")
                raise ConflictError(f"this agent lost task {seq}: its deadline has passed")
            settled = await desk.settling.finish(task, payload, request.text("sig"))
    return {"state": "done", "record": settled.record}


def _check_result(steward: Steward, task: TaskState, worker: str, payload: bytes, signature: str) -> None:
    if not verifies(signature, steward.info.id, "result", worker, f"{task.asker}.{task.id}", payload):
        raise BadSignature(f"the result of task {task.seq} is not signed by its worker for its asker and task")
    message = wire.decode(payload)
    if message.sender.id != worker:
        raise MalformedMessage(f"the result of task {task.seq} claims to be from {message.sender.id}")


async def fail(steward: Steward, request: Request) -> Answer:
    access_of(steward, request.sender)
    desk, seq, reason = steward.desk, _seq(request), request.text("reason")
    retry = request.optional("retry", bool)
    async with desk.lock:
        known = desk.book.open.get(seq) or desk.book.settled.get(seq)
        if known is not None and known.ended_by == request.op:
            settled = known if isinstance(known, Settled) else None
        else:
            task = desk.settling.held(request.sender, seq, request.optional("session", str))
            if request.optional("untouched", bool):
                await desk.settling.put_back(task, request.op)
                settled = None
            elif retry is False:
                settled = await desk.settling.bury(task, "failed", reason, op=request.op)
            else:
                settled = await desk.settling.give_back(
                    task, reason, request.op, pause=steward.intervals.task_backoff, cause="failed"
                )
    if settled is not None:
        return {"state": settled.state, "cause": settled.cause}
    return {"state": "queued"}


async def check(steward: Steward, request: Request) -> Answer:
    """How many agents hold a role, how many of them are here, and when one was last seen."""
    access_of(steward, request.sender)
    return steward.desk.lookup.presence(check_role(request.text("role")))


async def room(steward: Steward, request: Request) -> Answer:
    """Make room for an asker whose share of a queue is full of what is settled."""
    access_of(steward, request.sender)
    return {"made": await steward.desk.upkeep.make_room(request.sender, check_role(request.text("role")))}


async def result(steward: Steward, request: Request) -> Answer:
    """What became of a task, for whoever asked it: with its key of now, or one it had before a rotation (`asker`)."""
    access_of(steward, request.sender)
    message_id, seq, seconds = request.text("id"), request.optional("seq", int), _wait(request)
    if not is_message_id(message_id) or (seq is not None and seq < 1):
        raise UsageError("task result needs `id`, the id of a task of yours")
    desk = steward.desk
    asker, found = await desk.lookup.locate(request.sender, message_id, seq)
    until = time.monotonic() + seconds
    if not _is_final(found) and seconds:
        async with desk.parked(request.sender, seconds) as allowed:
            until = min(until, time.monotonic() + allowed)
            while not _is_final(found) and (left := until - time.monotonic()) > 0:
                # one the desk has not met is looked up again now and then: it may be gone
                await desk.wait_for_change(asker, message_id, left if not isinstance(found, str) else min(left, 2))
                if desk.closed:
                    break
                found = await desk.lookup.find(asker, message_id, seq)
    return {**await _told(steward, found), "asker": asker}


def _is_final(found: TaskState | Settled | str) -> bool:
    return isinstance(found, Settled) or found in ("gone", "unknown")


async def _told(steward: Steward, found: TaskState | Settled | str) -> Answer:
    if isinstance(found, str):
        return {"state": found}
    facts: dict[str, Any] = {
        "seq": found.seq,
        "attempt": found.attempt,
        "reasons": list(found.reasons),
        "worker": found.worker,
        "worker_name": _named(steward, found.worker),
    }
    if isinstance(found, TaskState):
        return {**facts, "state": "claimed" if found.worker else "queued"}
    if found.state != "done":
        return {**facts, "state": found.state, "cause": found.cause}
    kept = await steward.desk.records.result_of(found)
    if kept is None:
        return {**facts, "state": "gone"}
    payload, signature = kept
    return {**facts, "state": "done", "result": base64.b64encode(payload).decode(), "sig": signature}


# --- dead letters ---


def _concerns(steward: Steward, settled: Settled, agent: str) -> bool:
    return _asked(steward, settled, agent) or steward.desk.lookup.holds_role(agent, settled.role)


def _asked(steward: Steward, task: Settled | TaskState, agent: str) -> bool:
    """Did the agent ask it, with its key of now or one it had before a rotation?"""
    return task.asker == agent or task.asker in predecessors(steward, agent)


def _dead(steward: Steward, request: Request) -> Settled:
    found = steward.desk.book.settled.get(_seq(request))
    is_dead = found is not None and found.state == "dead" and found.seq not in steward.desk.book.open
    if found is None or not is_dead or not _concerns(steward, found, request.sender):
        raise UsageError(f"there is no dead letter {_seq(request)} of yours: `tidings dead list` shows them")
    return found


def _line(steward: Steward, settled: Settled) -> dict[str, Any]:
    return {
        "seq": settled.seq,
        "id": settled.id,
        "role": settled.role,
        "asker": settled.asker,
        "asker_name": _named(steward, settled.asker),
        "cause": settled.cause,
        "attempts": settled.attempt,
        "reasons": list(settled.reasons),
        "workers": list(settled.workers),
        "at": settled.at,
    }


async def dead_list(steward: Steward, request: Request) -> Answer:
    access_of(steward, request.sender)
    book = steward.desk.book
    found = [
        _line(steward, each)
        for each in reversed(book.settled.values())
        if each.state == "dead" and each.seq not in book.open and _concerns(steward, each, request.sender)
    ]
    return {"dead": found[:LISTED], "more": len(found) > LISTED, "mail": dead_mail.lines(steward, request.sender)}


async def dead_show(steward: Steward, request: Request) -> Answer:
    access_of(steward, request.sender)
    if request.arguments.get("letter") is not None:
        return await dead_mail.show(steward, request)
    dead = _dead(steward, request)
    record = await steward.desk.records.dead_record(dead.record)
    return {**_line(steward, dead), "record": encoded(record) if record else None}


async def dead_retry(steward: Steward, request: Request) -> Answer:
    access_of(steward, request.sender)
    if request.arguments.get("letter") is not None:
        return await dead_mail.retry(steward, request)
    desk = steward.desk
    async with desk.lock:
        waiting = desk.book.open.get(_seq(request))
        if waiting is not None and waiting.revived_from and _asked(steward, waiting, request.sender):
            return {"state": "queued", "seq": waiting.seq}
        dead = _dead(steward, request)
        if dead.cause == "malformed":
            raise UsageError(f"task {dead.seq} is malformed and always will be: drop it, and ask again")
        await desk.settling.revive(dead)
    return {"state": "queued", "seq": dead.seq}


async def dead_drop(steward: Steward, request: Request) -> Answer:
    access_of(steward, request.sender)
    if request.arguments.get("letter") is not None:
        return await dead_mail.drop(steward, request)
    desk = steward.desk
    async with desk.lock:
        dead = _dead(steward, request)
        desk.book.settle(await desk.records.write_dropped(dead, request.sender))
    return {"state": "dropped", "seq": dead.seq}


TASK_HANDLERS: dict[tuple[str, str], Handler] = {
    ("task", "claim"): claim,
    ("task", "beat"): beat,
    ("task", "done"): done,
    ("task", "fail"): fail,
    ("task", "check"): check,
    ("task", "room"): room,
    ("task", "result"): result,
    ("dead", "list"): dead_list,
    ("dead", "show"): dead_show,
    ("dead", "retry"): dead_retry,
    ("dead", "drop"): dead_drop,
}
