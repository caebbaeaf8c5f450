"""Handlers that open and end sessions, and show states and counts to every program of this user.

Nothing here shows the content or the recipient of a message. A program of the user acts as an agent only with a
session: the host reads the identity from the source that the program names, and checks its signature.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tidings.admin.home import SpaceHome
from tidings.admin.identity import Identity
from tidings.client.host_session import is_proven
from tidings.contract import host as contract
from tidings.errors import AmbiguousPeer, ConfigError, DeniedError, NoSession, StoreError, UsageError
from tidings.host import inbox as inbox_views
from tidings.host import outbox_views
from tidings.host.host import AgentHealth
from tidings.host.http_api import AppState, SessionCaller, UserCaller
from tidings.host.registry import Scope, Source, check_source, identity_of
from tidings.rpc.dispatch import handler
from tidings.version import __version__

#: seconds that a test write to the store may take
TRIAL_PATIENCE = 10.0


# --- sessions ---


@handler(contract.ChallengeRequest)
async def challenge(caller: UserCaller, _request: contract.ChallengeRequest) -> contract.ChallengeAnswer:
    return contract.ChallengeAnswer(caller.app.sessions.challenges.issue())


@handler(contract.OpenSessionRequest)
async def open_session(caller: UserCaller, request: contract.OpenSessionRequest) -> contract.OpenSessionAnswer:
    if not caller.app.sessions.challenges.spend(request.nonce):
        raise NoSession("this challenge was used or has expired: request another one")
    source = check_source(request.source)
    identity = await _identity(source)
    proven = is_proven(request.signature, identity.space_id, identity.id, str(caller.app.socket), request.nonce)
    if request.agent not in (None, identity.id) or not proven:
        raise DeniedError(f"the proof is not signed with the key of {identity.name} in {identity.subjects.space}")
    scope = await caller.host.adopt(source, request.receive, identity)
    session, token = await caller.app.sessions.begin(scope, receive=request.receive, program=request.program)
    return contract.OpenSessionAnswer(session=session.id, token=token, **_facts(scope))


async def _identity(source: Source) -> Identity:
    """Returns the identity on disk. Does not create a missing agent, because the caller has proven nothing yet."""
    if source[0] == "home":
        _, home, space, name = source
        if not SpaceHome(Path(home), space).agent_creds(name).exists():
            raise UsageError(f"there is no credential for agent {name[:64]} in space {space}: run `tidings agent add`")
    try:
        return await identity_of(source)
    except OSError as error:
        raise ConfigError(f"cannot read the identity at {source[1]}: {error.strerror}") from error


@handler(contract.ShowSessionRequest)
async def show_session(caller: SessionCaller, _request: contract.ShowSessionRequest) -> contract.ShowSessionAnswer:
    session = caller.session
    return contract.ShowSessionAnswer(
        session=session.id,
        receive=session.receive,
        program=session.program,
        health=health_of(caller.app, session.scope),
        **_facts(session.scope),
    )


@handler(contract.EndSessionRequest)
async def end_session(caller: SessionCaller, _request: contract.EndSessionRequest) -> contract.EndSessionAnswer:
    return contract.EndSessionAnswer(caller.session.id, await caller.app.sessions.end(caller.session))


def _facts(scope: Scope) -> dict[str, str]:
    return {"space": scope.space, "space_id": scope.space_id, "agent": scope.agent, "name": scope.name}


# --- health and status ---


def health_of(app: AppState, scope: Scope) -> contract.ConnectionHealth:
    """Returns the state of one agent's connection."""
    for each in app.host.health():
        if (each.scope.space_id, each.scope.agent) == (scope.space_id, scope.agent):
            return contract.ConnectionHealth(**_connection(each))
    return contract.ConnectionHealth(
        state="unknown", age=None, receiving=False, superseded=False, reason=None, stuck=False, unkept=None
    )


def _connection(health: AgentHealth) -> dict[str, Any]:
    return {
        "state": health.state,
        "age": health.age,
        "receiving": health.receiving,
        "superseded": health.superseded,
        "reason": health.reason,
        "stuck": health.stuck,
        "unkept": health.unkept and contract.UnkeptMail(health.unkept.cause, health.unkept.since),
    }


def _host_facts(app: AppState, counts: dict[tuple[str, str], int]) -> dict[str, Any]:
    states: Counter[str] = Counter()
    for (_, state), number in counts.items():
        states[state] += number
    return {
        "version": __version__,
        "api": contract.API,
        "pid": os.getpid(),
        "started": app.started,
        "outbox": dict(states),
    }


@handler(contract.HostHealthRequest)
async def host_health(caller: UserCaller, _request: contract.HostHealthRequest) -> contract.HostHealthAnswer:
    counts = await caller.host.outbox.read(outbox_views.counts)
    return contract.HostHealthAnswer(**_host_facts(caller.app, counts), spaces=_ages(caller.app))


def _ages(app: AppState) -> dict[str, float | None]:
    """Returns, by space, the seconds since the last round trip of any agent."""
    found: dict[str, list[float | None]] = {}
    for each in app.host.health():
        found.setdefault(each.scope.space, []).append(each.age)
    return {space: min((age for age in ages if age is not None), default=None) for space, ages in found.items()}


@handler(contract.HostStatusRequest)
async def host_status(caller: UserCaller, _request: contract.HostStatusRequest) -> contract.HostStatusAnswer:
    app, outbox = caller.app, caller.host.outbox
    counts, unread = await outbox.read(outbox_views.counts), await caller.host.inbox.read(inbox_views.unread_counts)
    paused = {
        each.space: each.pause_reason for each in await outbox.read(outbox_views.spaces) if each.paused_at is not None
    }
    spaces: dict[str, contract.HostedSpace] = {}
    for health in caller.host.health():
        scope = health.scope
        mine = {state: number for (space, state), number in counts.items() if space == scope.space_id}
        hosted = contract.HostedSpace(scope.space, scope.space_id, mine, paused.get(scope.space_id), [])
        spaces.setdefault(scope.space_id, hosted).agents.append(
            contract.HostedAgent(
                name=scope.name,
                agent=scope.agent,
                unread=sum(n for (*whose, _), n in unread.items() if whose == [scope.space_id, scope.agent]),
                notices=unread.get((scope.space_id, scope.agent, "notice"), 0),
                **_connection(health),
            )
        )
    store = await _trouble(caller, caller.host.database.try_to_write)
    return contract.HostStatusAnswer(
        **_host_facts(app, counts),
        sessions=len(app.sessions),
        streams=app.streams,
        home=str(caller.host.home),
        store=store,
        mail=store or await _trouble(caller, caller.host.inbox.try_to_keep),
        spaces=tuple(spaces.values()),
    )


async def _trouble(caller: UserCaller, trial: Callable[[], Awaitable[None]]) -> str | None:
    """Returns why the trial write failed; None if it succeeded."""
    path = caller.host.database.path
    try:
        async with asyncio.timeout(TRIAL_PATIENCE):
            await trial()
    except TimeoutError:
        return f"{path} was not written within {TRIAL_PATIENCE:.0f} s: check its disk"
    except StoreError as error:
        return str(error)
    except sqlite3.Error as error:
        return f"{path} cannot be written ({error}): restore a copy"
    return None


# --- operator commands ---


@handler(contract.PauseSpaceRequest)
async def pause_space(caller: UserCaller, request: contract.PauseSpaceRequest) -> contract.SpacePausedAnswer:
    scope = _space(caller, request.space)
    await caller.host.pause(scope.space_id, request.reason[:200] or "paused by its user")
    return contract.SpacePausedAnswer(scope.space, True)


@handler(contract.ResumeSpaceRequest)
async def resume_space(caller: UserCaller, request: contract.ResumeSpaceRequest) -> contract.SpacePausedAnswer:
    scope = _space(caller, request.space)
    await caller.host.resume(scope.space_id)
    return contract.SpacePausedAnswer(scope.space, False)


def _space(caller: UserCaller, text: str) -> Scope:
    """Returns a scope of the space with this name or id."""
    found = {each.space_id: each for each in caller.host.scopes() if text in (each.space, each.space_id)}
    if not found:
        raise UsageError(f"this host has no agent in a space {text[:64]!r}: `tidings host status` lists its spaces")
    if len(found) > 1:
        raise AmbiguousPeer(f"several spaces are called {text[:64]}: use one of the ids {', '.join(found)}")
    return next(iter(found.values()))


@handler(contract.StopHostRequest)
async def stop_host(caller: UserCaller, _request: contract.StopHostRequest) -> contract.StopHostAnswer:
    caller.app.stopping.set()
    return contract.StopHostAnswer(os.getpid())
