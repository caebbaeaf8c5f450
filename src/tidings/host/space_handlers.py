"""Handlers that ask the space, over the connection of the session's agent: agents, channels, history, tasks.

They raise UnreachableError if the space cannot be reached. Only `list_agents` then answers with the agents last seen.
`forward` forwards operations to the steward.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from tidings.client.direct_transport import DirectAgent
from tidings.client.message_json import task_in_hands, task_state, verified_message
from tidings.client.tasks import Job, TaskResult
from tidings.contract import host as contract
from tidings.contract.core import Request
from tidings.errors import AuthRevoked, OutcomeUnknown, Reconnecting, StewardUnreachable, UnreachableError
from tidings.host import outbox_views
from tidings.host.claims import SILENCE
from tidings.host.http_api import ForwardOptions, SessionCaller
from tidings.host.operator_handlers import health_of
from tidings.rpc.dispatch import handler
from tidings.wire.states import TaskStatus

A = TypeVar("A")
T = TypeVar("T")
#: seconds to wait for a connection that is being opened
CONNECT_PATIENCE = 3.0
#: seconds to wait for the steward, in addition to the requested wait
CALL_PATIENCE = 5.0
#: seconds for an answer that takes several requests; clients of the host wait longer
QUESTION_PATIENCE = 8.0
#: seconds that the steward may still take for a sent result when the host stops
STOP_GRACE = 1.0
SHORTEST_SILENCE = 5.0


async def _endpoint(caller: SessionCaller) -> DirectAgent:
    """Returns the agent's connected endpoint. Waits for a connection that is being opened."""
    until = time.monotonic() + CONNECT_PATIENCE
    while True:
        health = health_of(caller.app, caller.scope)
        if health.state in ("open", "superseded"):
            endpoint = caller.host.endpoint(caller.scope)
            if endpoint.transport.state == "ready":
                return endpoint
        if health.state == "revoked":
            raise AuthRevoked(f"{caller.scope.name} may not act in {caller.scope.space}: {health.reason}")
        if health.reason or time.monotonic() > until:
            why = f" ({health.reason})" if health.reason else ""
            raise Reconnecting(f"{caller.scope.name} is not connected to {caller.scope.space} now{why}: retry later")
        await asyncio.sleep(0.02)


async def forward(caller: SessionCaller, options: ForwardOptions, request: Request[A]) -> A:
    """Sends a request to the steward."""
    timeout = CALL_PATIENCE + min(options.wait, contract.LONGEST_WAIT)
    call = (await _endpoint(caller)).call(request, op=options.op, timeout=timeout)
    name = request.operation.name
    unknown = OutcomeUnknown(f"the host stopped before the steward answered `{name}`: it may have taken effect; retry")
    return await caller.unless_over(call, unknown if request.operation.changes else None)


@handler(contract.ListAgentsRequest)
async def list_agents(caller: SessionCaller, _request: contract.ListAgentsRequest) -> contract.ListAgentsAnswer:
    try:
        endpoint = await _endpoint(caller)
        agents = await endpoint.who()
    except (UnreachableError, AuthRevoked, TimeoutError) as error:
        last_seen = caller.host.directories.of(caller.scope.space_id).agents()
        rows = [replace(each, status="unknown") for each in last_seen]
        return contract.ListAgentsAnswer(rows, False, "", str(error) or "no answer in time")
    return contract.ListAgentsAnswer(list(agents), True, endpoint.transport.roster.backstop.delay)


@handler(contract.AgentAccessRequest)
async def agent_access(caller: SessionCaller, _request: contract.AgentAccessRequest) -> contract.AgentAccessAnswer:
    record = await (await _endpoint(caller)).access()
    return contract.AgentAccessAnswer(
        *(list(record.get(name) or ()) for name in contract.AgentAccessAnswer.__struct_fields__)
    )


@handler(contract.AnnounceRequest)
async def announce(caller: SessionCaller, request: contract.AnnounceRequest) -> contract.AnnounceAnswer:
    attached = await (await _endpoint(caller)).announce(request.status, request.activity, request.model)
    return contract.AnnounceAnswer(request.status, request.activity, attached)


@handler(contract.ChannelHistoryRequest)
async def channel_history(
    caller: SessionCaller, request: contract.ChannelHistoryRequest
) -> contract.ChannelHistoryAnswer:
    endpoint = await _endpoint(caller)
    try:
        async with asyncio.timeout(QUESTION_PATIENCE):
            found = await endpoint.history(request.channel, request.limit, before=request.before or None)
    except TimeoutError as error:
        raise StewardUnreachable(
            f"the steward of {caller.scope.space} did not answer within {QUESTION_PATIENCE:.0f} s: retry"
        ) from error
    return contract.ChannelHistoryAnswer(
        [verified_message(each) for each in found], found.gone, found.hidden, found.more
    )


@handler(contract.JoinChannelRequest)
async def join_channel(caller: SessionCaller, request: contract.JoinChannelRequest) -> contract.JoinChannelAnswer:
    # no backfill: programs ask for history, and the inbox has only what was received
    joined = await (await _endpoint(caller)).join(request.channel, backfill=0)
    return msgspec.convert(joined, contract.JoinChannelAnswer, from_attributes=True)


@handler(contract.LeaveChannelRequest)
async def leave_channel(caller: SessionCaller, request: contract.LeaveChannelRequest) -> contract.LeaveChannelAnswer:
    left = await (await _endpoint(caller)).leave(request.channel)
    return msgspec.convert(left, contract.LeaveChannelAnswer, from_attributes=True)


@handler(contract.MessageTraceRequest)
async def message_trace(caller: SessionCaller, request: contract.MessageTraceRequest) -> contract.HostTrace:
    row = await caller.host.outbox.read(outbox_views.find, *caller.mine, request.id)
    found = await (await _endpoint(caller)).trace(request.id)
    outbox = outbox_views.outbox_entry(row) if row else None
    return contract.HostTrace(found.id, found.stored, found.receipts, found.names, outbox)


# --- tasks ---


@handler(contract.ClaimTaskRequest)
async def claim_task(caller: SessionCaller, request: contract.ClaimTaskRequest) -> contract.ClaimTaskAnswer:
    endpoint, wait = await _endpoint(caller), min(request.wait, contract.LONGEST_WAIT)
    silence = request.silence and min(SILENCE, max(SHORTEST_SILENCE, request.silence))
    claims, before = caller.app.claims, caller.app.claims.held(caller.scope)
    waiting = claims.claim(caller.session, endpoint, request.role, wait, silence, take_over=request.take_over)
    job = await caller.unless_over(waiting)
    is_new = job is not None and (before is None or before.job is not job)
    if job is not None and is_new and await caller.http.is_disconnected():
        claims.left(caller.session, job)
    return contract.ClaimTaskAnswer(task_in_hands(job) if job else None)


@handler(contract.HeldTaskRequest)
async def held_task(caller: SessionCaller, _request: contract.HeldTaskRequest) -> contract.HeldTaskAnswer:
    claims = caller.app.claims
    claim = claims.held(caller.scope)
    if claim is None:
        return contract.HeldTaskAnswer(None)
    job, mine, silent = claim.job, claim.session == caller.session.id, round(claims.silent(claim), 1)
    return contract.HeldTaskAnswer(
        contract.TaskInHand(job.message.id, job.role, job.attempt, mine, claim.program, silent)
    )


@handler(contract.FinishTaskRequest)
async def finish_task(caller: SessionCaller, request: contract.FinishTaskRequest) -> contract.SettleTaskAnswer:
    job = caller.app.claims.job(caller.session, request.id)
    await _settle(caller, job, job.done(request.text, data=request.data))
    return contract.SettleTaskAnswer(job.message.id, TaskStatus.DONE)


@handler(contract.GiveUpTaskRequest)
async def give_up_task(caller: SessionCaller, request: contract.GiveUpTaskRequest) -> contract.SettleTaskAnswer:
    job = caller.app.claims.job(caller.session, request.id)
    ending = job.put_back() if request.untouched else job.fail(request.reason, retry=request.retry)
    return contract.SettleTaskAnswer(job.message.id, await _settle(caller, job, ending))


async def _settle(caller: SessionCaller, job: Job, settling: Coroutine[Any, Any, T]) -> T:
    """Returns the steward's answer. Without one, it is unknown whether the request took effect."""
    unknown = OutcomeUnknown(
        f"the steward did not answer, so task {job.message.id} may have ended: claim a task of {job.role} again when "
        "the host runs and the space can be reached; if it is this one, it has not ended"
    )
    try:
        return await caller.app.unless_stopping(settling, unknown, STOP_GRACE)
    except UnreachableError as error:
        raise unknown from error


@handler(contract.TaskStateRequest)
async def show_task(caller: SessionCaller, request: contract.TaskStateRequest) -> contract.TaskStateAnswer:
    row = await caller.host.outbox.read(outbox_views.find, *caller.mine, request.id)
    if row is not None and row.seq is None:
        return task_state(request.id, TaskResult(row.state))
    seq, wait = row.seq if row else None, min(request.wait, contract.LONGEST_WAIT)
    return task_state(request.id, await caller.unless_over((await _endpoint(caller)).task(request.id, wait, seq=seq)))
