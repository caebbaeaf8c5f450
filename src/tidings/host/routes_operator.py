"""Routes that open and end sessions, and the operator's view: states and counts for every program of this user.

Nothing here shows what a message says or whom it is for. Opening a session is the only way from a user to an agent: the
host reads the identity where the program says it is, and believes the program if it signed with that key.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from tidings.admin.home import SpaceHome
from tidings.admin.identity import Identity
from tidings.client.host_session import is_proven
from tidings.errors import AmbiguousPeer, ConfigError, DeniedError, NoSession, StoreError, UsageError
from tidings.host import inbox as inbox_views
from tidings.host import outbox_views
from tidings.host.http_api import ApiRoute, AppState, Asked, Scoped
from tidings.host.registry import Scope, Source, check_source, identity_of
from tidings.version import __version__

Json = dict[str, Any]
API = 1
#: seconds that a trial of the store may take
TRIAL_PATIENCE = 10.0


class Opening(msgspec.Struct, forbid_unknown_fields=True):
    source: list[str]
    nonce: str
    signature: str
    #: whose key it is; unless said, that of the agent in `source`
    agent: str | None = None
    receive: bool = False
    program: str = ""


class Pause(msgspec.Struct, forbid_unknown_fields=True):
    reason: str = "paused by its user"


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


# --- sessions ---


async def challenge(asked: Asked) -> Json:
    """A nonce to sign, worth one proof for a short while."""
    await asked.fields(Nothing)
    return {"nonce": asked.app.sessions.challenges.issue()}


async def open_session(asked: Asked) -> Json:
    """Open a session of an agent, proven with its key: `token` is for the Authorization header of what follows."""
    wanted = await asked.fields(Opening)
    if not asked.app.sessions.challenges.spend(wanted.nonce):
        raise NoSession("this challenge was used or is too old: ask for another")
    source = check_source(tuple(wanted.source))
    identity = await _identity(source)
    proven = is_proven(wanted.signature, identity.space_id, identity.id, str(asked.app.socket), wanted.nonce)
    if wanted.agent not in (None, identity.id) or not proven:
        raise DeniedError(f"this is not signed with the key of {identity.name} in {identity.subjects.space}")
    scope = await asked.host.adopt(source, wanted.receive, identity)
    session, token = await asked.app.sessions.begin(scope, receive=wanted.receive, program=wanted.program)
    return {"session": session.id, "token": token, **_scope(scope)}


async def _identity(source: Source) -> Identity:
    """As it is on disk. An agent that does not exist is not made for somebody who has proven nothing."""
    if source[0] == "home":
        _, home, space, name = source
        if not SpaceHome(Path(home), space).agent_creds(name).exists():
            raise UsageError(f"there is no credential for agent {name[:64]} in space {space}: `tidings agent add` it")
    try:
        return await identity_of(source)
    except OSError as error:
        raise ConfigError(f"cannot read the identity at {source[1]}: {error.strerror}") from error


async def me(asked: Scoped) -> Json:
    """The session itself, and `health`: how the connection of its agent is."""
    session = asked.session
    facts = {"session": session.id, "receive": session.receive, "program": session.program}
    return facts | _scope(session.scope) | {"health": health_of(asked.app, session.scope)}


async def end_session(asked: Scoped) -> Json:
    """End the session: its token is worth nothing from now on, and what it claimed goes back."""
    written = await asked.app.sessions.end(asked.session)
    return {"session": asked.session.id, "ended": True, "written": written}


def _scope(scope: Scope) -> Json:
    return {"space": scope.space, "space_id": scope.space_id, "agent": scope.agent, "name": scope.name}


# --- how it is ---


def health_of(app: AppState, scope: Scope) -> Json:
    """How one agent's connection is; `age` is that of the last round trip to its broker."""
    for each in app.host.health():
        if (each.scope.space_id, each.scope.agent) == (scope.space_id, scope.agent):
            return {
                "state": each.state,
                "age": each.age,
                "receiving": each.receiving,
                "superseded": each.superseded,
                "reason": each.reason,
                "stuck": each.stuck,
                "unkept": each.unkept and {"cause": each.unkept.cause, "since": each.unkept.since},
            }
    unknown = {"state": "unknown", "age": None, "receiving": False, "superseded": False}
    return unknown | {"reason": None, "stuck": False, "unkept": None}


async def health(asked: Asked) -> Json:
    """Version, process, how many messages wait, and how old the last word of each space is."""
    counts: Counter[str] = Counter()
    for (_, state), number in (await asked.host.outbox.read(outbox_views.counts)).items():
        counts[state] += number
    return {
        "version": __version__,
        "api": API,
        "pid": os.getpid(),
        "started": asked.app.started,
        "outbox": dict(counts),
        "spaces": _ages(asked.app),
    }


def _ages(app: AppState) -> dict[str, float | None]:
    """Of each space, seconds since the last round trip of any agent."""
    found: dict[str, list[float | None]] = {}
    for each in app.host.health():
        found.setdefault(each.scope.space, []).append(each.age)
    return {space: min((age for age in ages if age is not None), default=None) for space, ages in found.items()}


async def status(asked: Asked) -> Json:
    """Every space and agent of this host with its state and counts, and whether its files can be written."""
    app, outbox = asked.app, asked.host.outbox
    counts, unread = await outbox.read(outbox_views.counts), await asked.host.inbox.read(inbox_views.unread_counts)
    paused = {
        each.space: each.pause_reason for each in await outbox.read(outbox_views.spaces) if each.paused_at is not None
    }
    spaces: dict[str, Json] = {}
    for scope in asked.host.scopes():
        spaces.setdefault(
            scope.space_id,
            {
                "space": scope.space,
                "space_id": scope.space_id,
                "outbox": {state: number for (space, state), number in counts.items() if space == scope.space_id},
                "paused": paused.get(scope.space_id),
                "agents": [],
            },
        )["agents"].append(
            {
                "name": scope.name,
                "agent": scope.agent,
                "unread": sum(n for (*whose, _), n in unread.items() if whose == [scope.space_id, scope.agent]),
                "notices": unread.get((scope.space_id, scope.agent, "notice"), 0),
                **health_of(app, scope),
            }
        )
    more = {"sessions": len(app.sessions), "streams": app.streams, "home": str(asked.host.home)}
    store = await _trouble(asked, asked.host.database.try_to_write)
    trials = {"store": store, "mail": store or await _trouble(asked, asked.host.inbox.try_to_keep)}
    return await health(asked) | more | trials | {"spaces": list(spaces.values())}


async def _trouble(asked: Asked, trial: Callable[[], Awaitable[None]]) -> str | None:
    """Why this cannot be written now; None if it was tried and it can."""
    path = asked.host.database.path
    try:
        async with asyncio.timeout(TRIAL_PATIENCE):
            await trial()
    except TimeoutError:
        return f"{path} was not written within {TRIAL_PATIENCE:.0f} s: look after its disk"
    except StoreError as error:
        return str(error)
    except sqlite3.Error as error:
        return f"{path} refuses it ({error}): restore a copy"
    return None


# --- what an operator does ---


async def pause(asked: Asked) -> Json:
    """Hold everything for a space back."""
    scope, reason = _space(asked), (await asked.fields(Pause)).reason
    await asked.host.pause(scope.space_id, reason[:200] or "paused by its user")
    return {"space": scope.space, "paused": True}


async def resume(asked: Asked) -> Json:
    """Let what is held back for a space leave."""
    await asked.fields(Nothing)
    scope = _space(asked)
    await asked.host.resume(scope.space_id)
    return {"space": scope.space, "paused": False}


def _space(asked: Asked) -> Scope:
    """Some scope of the space that is meant, by name or id."""
    text = asked.part("space")
    found = {each.space_id: each for each in asked.host.scopes() if text in (each.space, each.space_id)}
    if not found:
        raise UsageError(f"this host works for nobody in a space {text[:64]!r}: `tidings host status` lists its spaces")
    if len(found) > 1:
        raise AmbiguousPeer(f"several spaces are called {text[:64]}: name it by its id, one of {', '.join(found)}")
    return next(iter(found.values()))


async def stop(asked: Asked) -> Json:
    """End the host; the answer comes before it does."""
    await asked.fields(Nothing)
    asked.app.stopping.set()
    return {"stopping": True, "pid": os.getpid()}


ROUTES = [
    ApiRoute("GET", "/v1/health", health, session=False),
    ApiRoute("POST", "/v1/challenge", challenge, body=Nothing, session=False),
    ApiRoute("POST", "/v1/sessions", open_session, body=Opening, session=False),
    ApiRoute("GET", "/v1/sessions/me", me),
    ApiRoute("DELETE", "/v1/sessions/me", end_session),
    ApiRoute("GET", "/v1/status", status, session=False),
    ApiRoute("POST", "/v1/spaces/{space}/pause", pause, body=Pause, session=False),
    ApiRoute("POST", "/v1/spaces/{space}/resume", resume, body=Nothing, session=False),
    ApiRoute("POST", "/v1/stop", stop, body=Nothing, session=False),
]
