"""Routes that ask the space, through the one endpoint of the session's agent: who is here, channels, history, tasks.

They need the space now, and say UnreachableError if it is away. Only `who` answers from what was last seen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec

from tidings.client.endpoint import Endpoint
from tidings.client.message_json import job_json, message_json, result_json
from tidings.client.tasks import Job, TaskResult
from tidings.contract.catalogue import OPERATIONS
from tidings.contract.mail import HostTrace
from tidings.errors import AuthRevoked, OutcomeUnknown, Reconnecting, StewardUnreachable, UnreachableError, UsageError
from tidings.host import outbox_views, serialise
from tidings.host.claims import SILENCE
from tidings.host.http_api import ApiRoute, Scoped, seconds
from tidings.host.routes_operator import health_of
from tidings.wire.roster import Status
from tidings.wire.states import TaskStatus

Json = dict[str, Any]
MOST_HISTORY = 200
#: how long a connection that is being made is waited for
CONNECT_PATIENCE = 3.0
#: how long a steward is waited for, besides what a question asks for
CALL_PATIENCE = 5.0
#: an answer of several questions, shorter than clients of the host wait for one
QUESTION_PATIENCE = 8.0
#: how long a steward that is being told something may still answer when the host stops
LAST_WORDS = 1.0
T = TypeVar("T")
SHORTEST_SILENCE = 5.0


class ChannelBody(msgspec.Struct, forbid_unknown_fields=True):
    channel: str


class PresenceBody(msgspec.Struct, forbid_unknown_fields=True):
    status: Status
    activity: str | None = None
    model: str | None = None


class ClaimBody(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    wait: float = 0.0
    take_over: bool = False
    #: seconds without a word after which its program is gone
    silence: float | None = None


class Done(msgspec.Struct, forbid_unknown_fields=True):
    text: str | None = None
    data: Any = None


class Failed(msgspec.Struct, forbid_unknown_fields=True):
    reason: str
    retry: bool = True
    untouched: bool = False


async def _endpoint(asked: Scoped) -> Endpoint:
    """The agent's endpoint, connected. One that is just connecting is waited for; a question is not kept for later."""
    until = time.monotonic() + CONNECT_PATIENCE
    while True:
        health = health_of(asked.app, asked.scope)
        if health["state"] in ("open", "superseded"):
            endpoint = asked.host.endpoint(asked.scope)
            if endpoint.state == "ready":
                return endpoint
        if health["state"] == "revoked":
            raise AuthRevoked(f"{asked.scope.name} may not act in {asked.scope.space}: {health['reason']}")
        if health["reason"] or time.monotonic() > until:
            why = f" ({health['reason']})" if health["reason"] else ""
            raise Reconnecting(f"{asked.scope.name} is not connected to {asked.scope.space} now{why}: ask again later")
        await asyncio.sleep(0.02)


async def who(asked: Scoped) -> Json:
    """The agents of the space; `fresh` is false if it could not be asked, and they are those last seen."""
    try:
        endpoint = await _endpoint(asked)
        agents = await endpoint.who()
    except (UnreachableError, AuthRevoked, TimeoutError) as error:
        seen = asked.host.directories.of(asked.scope.space_id).agents()
        rows = [msgspec.to_builtins(each) | {"status": "unknown"} for each in seen]
        return {"agents": rows, "fresh": False, "backstop": "", "reason": str(error) or "nobody answered in time"}
    return {
        "agents": [msgspec.to_builtins(each) for each in agents],
        "fresh": True,
        "backstop": endpoint.roster.backstop.delay,
    }


async def access(asked: Scoped) -> Json:
    """What this agent may do: its roles, and the patterns of channels it may read, post to and manage."""
    record = await (await _endpoint(asked)).access()
    return {name: list(record.get(name) or ()) for name in ("roles", "read", "post", "manage")}


async def history(asked: Scoped) -> Json:
    """The newest messages of a channel, newest first; `before`: below that sequence."""
    limit, before = asked.number("limit", 50, MOST_HISTORY), asked.number("before", 0, 2**62)
    endpoint = await _endpoint(asked)
    try:
        async with asyncio.timeout(QUESTION_PATIENCE):
            found = await endpoint.history(_channel(asked), limit, before=before or None)
    except TimeoutError as error:
        raise StewardUnreachable(
            f"the steward of {asked.scope.space} did not answer within {QUESTION_PATIENCE:.0f} s: ask again"
        ) from error
    said = [message_json(each) for each in found]
    return {"messages": said, "gone": found.gone, "hidden": found.hidden, "more": found.more}


def _plain(answer: Json) -> Json:
    return {key: value for key, value in answer.items() if key != "ok"}


def _channel(asked: Scoped) -> str:
    channel = asked.word("channel")
    if channel is None:
        raise UsageError("name the `channel`")
    return channel


async def join(asked: Scoped) -> Json:
    """Be in a channel or pattern: what is said there from now on comes into the inbox."""
    channel = (await asked.fields(ChannelBody)).channel
    joined = await (await _endpoint(asked)).join(channel, backfill=0)  # history is asked for, not put into the inbox
    return {name: value for name, value in asdict(joined).items() if name != "backfilled"}


async def leave(asked: Scoped) -> Json:
    """Leave a channel or pattern."""
    left = await (await _endpoint(asked)).leave((await asked.fields(ChannelBody)).channel)
    return asdict(left)


async def trace(asked: Scoped) -> HostTrace:
    """The life of one message: where it is stored, its receipts, and its row in the outbox."""
    message_id = asked.word("id")
    if message_id is None:
        raise UsageError("name the message by its `id`")
    row = await asked.host.outbox.read(outbox_views.find, *asked.mine, message_id)
    found = await (await _endpoint(asked)).trace(message_id)
    outbox = serialise.owed(row) if row else None
    return HostTrace(found.id, found.stored, found.receipts, found.names, outbox)


async def status(asked: Scoped) -> Json:
    """Say what this agent does; `attached`: whether others see it now."""
    told, endpoint = await asked.fields(PresenceBody), await _endpoint(asked)
    attached = await endpoint.announce(told.status, told.activity, told.model)
    return {"status": told.status, "activity": told.activity, "attached": attached}


async def control(asked: Scoped) -> Any:
    """Forward a request to the steward, if its declaration allows that."""
    service, do = asked.part("service"), asked.part("do")
    operation = OPERATIONS.get(f"{service} {do}")
    if operation is None or not operation.host:
        known = ", ".join(each.name.replace(" ", "/") for each in OPERATIONS.values() if each.host)
        raise UsageError(f"the host does not pass on {service[:32]}/{do[:32]}: it does {known}")
    body = await asked.fields(dict[str, Any])
    op = body.pop("op", None)
    if op is not None and not isinstance(op, str):
        raise UsageError("`op` is the id of an operation, a text")
    request = operation.decode(body)
    call = (await _endpoint(asked)).call(request, op=op, timeout=CALL_PATIENCE + asked.wait())
    return await asked.unless_over(call)


# --- tasks ---


async def claim(asked: Scoped) -> Json:
    """Take a task of a role, held for this session until it is settled or the session ends. `silence`: seconds without
    a request after which it goes back."""
    told = await asked.fields(ClaimBody)
    endpoint, wait = await _endpoint(asked), seconds(told.wait)
    silence = told.silence and min(SILENCE, max(SHORTEST_SILENCE, told.silence))
    claims, before = asked.app.claims, asked.app.claims.held(asked.scope)
    waiting = claims.claim(asked.session, endpoint, told.role, wait, silence, take_over=told.take_over)
    job = await asked.unless_over(waiting)
    came = job is not None and (before is None or before.job is not job)
    if job is not None and came and await asked.request.is_disconnected():
        claims.left(asked.session, job)
    return {"task": job_json(job) if job else None}


async def held(asked: Scoped) -> Json:
    """The task in the hands of this agent's programs, and of which: it has one at most."""
    claims = asked.app.claims
    claim = claims.held(asked.scope)
    if claim is None:
        return {"held": None}
    job, mine = claim.job, claim.session == asked.session.id
    about: Json = {"id": job.message.id, "role": job.role, "attempt": job.attempt, "mine": mine}
    return {"held": about | {"program": claim.program, "silent": round(claims.silent(claim), 1)}}


async def done(asked: Scoped) -> Json:
    """Finish a task that this session holds, with a result signed by the agent."""
    told = await asked.fields(Done)
    job = asked.app.claims.job(asked.session, asked.part("id"))
    await _settled(asked, job, job.done(told.text, data=told.data))
    return {"id": job.message.id, "state": TaskStatus.DONE}


async def failed(asked: Scoped) -> Json:
    """Give a task up; `untouched`: no attempt was made."""
    told = await asked.fields(Failed)
    job = asked.app.claims.job(asked.session, asked.part("id"))
    ending = job.put_back() if told.untouched else job.fail(told.reason, retry=told.retry)
    state = await _settled(asked, job, ending)
    return {"id": job.message.id, "state": state}


async def _settled(asked: Scoped, job: Job, settling: Coroutine[Any, Any, T]) -> T:
    """The steward's answer. Once it was told, only its answer says whether it heard."""
    unknown = OutcomeUnknown(
        f"task {job.message.id} may be settled or not, the steward's answer did not come: claim a task of {job.role} "
        "again when the host runs and the space can be reached; if it is this one, it was not settled"
    )
    try:
        return await asked.app.unless_stopping(settling, unknown, LAST_WORDS)
    except UnreachableError as error:
        raise unknown from error


async def task(asked: Scoped) -> Json:
    """What became of a task this agent asked."""
    message_id = asked.part("id")
    row = await asked.host.outbox.read(outbox_views.find, *asked.mine, message_id)
    if row is not None and row.seq is None:
        return result_json(message_id, TaskResult(row.state))
    waiting = (await _endpoint(asked)).task(message_id, asked.wait(), seq=row.seq if row else None)
    return result_json(message_id, await asked.unless_over(waiting))


ROUTES = [
    ApiRoute("GET", "/v1/who", who),
    ApiRoute("GET", "/v1/access", access),
    ApiRoute("GET", "/v1/history", history, "channel", "limit", "before"),
    ApiRoute("POST", "/v1/join", join, body=ChannelBody),
    ApiRoute("POST", "/v1/leave", leave, body=ChannelBody),
    ApiRoute("GET", "/v1/trace", trace, "id"),
    ApiRoute("POST", "/v1/status", status, body=PresenceBody),
    ApiRoute("POST", "/v1/control/{service}/{do}", control, "wait", body=dict),
    ApiRoute("GET", "/v1/tasks", held),
    ApiRoute("POST", "/v1/tasks/claim", claim, "wait", body=ClaimBody),
    ApiRoute("POST", "/v1/tasks/{id}/done", done, "wait", body=Done),
    ApiRoute("POST", "/v1/tasks/{id}/fail", failed, "wait", body=Failed),
    ApiRoute("GET", "/v1/tasks/{id}", task, "wait"),
]
