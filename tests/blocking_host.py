"""The host's HTTP API as a foreign program uses it: the standard library over its unix socket, blocking, in any thread.

It shares nothing with `tidings.client.host_transport`, so that what the tests say of the host holds for both.

    client = HostClient.find(home)                        None if no host runs
    session = client.session(identity, receive=True)      or client.resume(SessionFile.read(path))
    session.send(channel="general", text="hello")         -> Sent: `stored`, or `confirmed` if waited for
    for event in session.events(after=row): ...           resumes by itself, every row once

Each call is one connection. Refusals are raised as the class of their code. A send has its id before the first try, so
asking again, here or by another way, never makes a second message; an answer that did not come is OutcomeUnknown.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tidings import __version__
from tidings.client.host_http import socket_path
from tidings.client.host_session import SessionFile, prove
from tidings.contract.catalogue import SERVED
from tidings.errors import (
    ERRORS_BY_CODE,
    ConfigError,
    HostBusy,
    HostUnreachable,
    OutcomeUnknown,
    TidingsError,
    UsageError,
)
from tidings.util.backoff import Backoff
from tidings.util.private_sockets import connect, peer_uid
from tidings.wire.message import check_said, new_id
from tidings.wire.names import unmarked

if TYPE_CHECKING:
    from tidings.admin.identity import Identity

API = 1
#: seconds an answer may take beyond what was asked to be waited for
PATIENCE = 10.0
FIND_PATIENCE = 2.0
#: a stream that says nothing for so long, not even that it lives, is dead
STREAM_SILENCE = 45.0
RETRY = Backoff(0.1, 2.0)
Json = dict[str, Any]


class PastPage(list[Json]):
    """Messages of a channel's past, and what of it is not among them: see `Past` of the library."""

    def __init__(self, found: Iterable[Json], *, gone: int = 0, hidden: bool = False) -> None:
        super().__init__(found)
        self.gone = gone
        self.hidden = hidden

    def missing(self, channel: str) -> str | None:
        """What is not among them, as a sentence."""
        if self.hidden:
            return f"{channel} does not replay everything: what was said before you were in it is not shown"
        return f"the log no longer has what was said up to sequence {self.gone}" if self.gone else None


@dataclass(frozen=True, slots=True)
class Sent:
    """What the host has of a message. `stage`: stored (it will leave) or confirmed (the space has it, at `seq`)."""

    id: str
    row: int
    state: str
    stage: Literal["stored", "confirmed"]
    seq: int | None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """`message`: an inbox row, `row` its number. `state`: how the agent's connection is now."""

    kind: str
    row: int | None
    data: Json = field(default_factory=dict)


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = connect(self._path, self.timeout)
        if peer_uid(self.sock) != os.geteuid():
            self.close()
            raise ConfigError(f"another user serves {self._path}: nothing was sent")


class HostClient:
    """The host of a home. Without a session it tells states and counts, never contents."""

    def __init__(self, home: Path, *, patience: float = PATIENCE) -> None:
        self.home = home
        self.socket = socket_path(home)
        self.patience = patience
        #: what the host said it is, once `find` or `health` asked
        self.version: str | None = None
        self.pid: int | None = None

    @classmethod
    def find(cls, home: Path) -> HostClient | None:
        """The host of this home, if it answers. ConfigError if it speaks another version than this program."""
        client = cls(home)
        try:
            client.health(timeout=FIND_PATIENCE)
        except HostUnreachable:
            return None
        return client

    @property
    def mismatch(self) -> str | None:
        """What to say if the host is of another release than this program."""
        if self.version in (None, __version__):
            return None
        return (
            f"the host runs Tidings {self.version} and this is {__version__}: "
            "`tidings host down`, then `tidings host up`"
        )

    # --- what needs no session ---

    def health(self, timeout: float | None = None) -> Json:
        found = self.call("host health", timeout=timeout)
        self.version, self.pid = str(found.get("version")), found.get("pid")
        if found.get("api") != API:
            raise ConfigError(
                f"the host runs Tidings {self.version} with API version {found.get('api')}, this is {__version__} "
                f"with API version {API}: `tidings host down`, then `tidings host up`"
            )
        return found

    def status(self) -> Json:
        return self.call("host status")

    def pause(self, space: str, reason: str | None = None) -> Json:
        return self.call("space pause", {"space": space} | ({"reason": reason} if reason else {}))

    def resume_space(self, space: str) -> Json:
        return self.call("space resume", {"space": space})

    def stop(self) -> Json:
        """Ask it to end; the answer comes before it does."""
        return self.call("host stop")

    # --- sessions ---

    def session(
        self, identity: Identity, *, receive: bool = False, program: str = "", source: Sequence[str] | None = None
    ) -> Session:
        """A session of this agent, proven with its key. `receive`: the host takes its mail from now on."""
        told = list(source) if source else source_of(identity)
        nonce = str(self.call("session challenge")["nonce"])
        body = {
            "source": told,
            "agent": identity.id,
            "nonce": nonce,
            "signature": prove(identity.key, identity.space_id, str(self.socket), nonce),
            "receive": receive,
            "program": program,
        }
        found = self.call("session open", body)
        names = ("session", "token", "space", "space_id", "agent", "name")
        return Session(self, SessionFile(socket=str(self.socket), receive=receive, **{n: str(found[n]) for n in names}))

    def resume(self, file: SessionFile) -> Session:
        """A session that was opened before; whether it still lasts, its first request tells (NoSession)."""
        if file.socket != str(self.socket):
            raise ConfigError(f"session {file.session} is of the host at {file.socket}, not of {self.socket}")
        return Session(self, file)

    # --- asking ---

    def call(self, operation: str, body: Any = None, *, token: str | None = None, timeout: float | None = None) -> Json:
        """One request. HostUnreachable: it was not taken; OutcomeUnknown: it may have been."""
        connection = _Connection(self.socket, self.patience if timeout is None else timeout)
        try:
            self._request(connection, operation, body or {}, token)
            return _answer(*self._response(connection, operation))
        finally:
            connection.close()

    def _request(self, connection: _Connection, operation: str, body: Any, token: str | None) -> None:
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {token}"} if token else {}
        payload = _encoded(body)
        try:
            connection.connect()
        except OSError as error:
            raise HostUnreachable(
                f"no host answers at {self.socket} ({error.strerror or error}): `tidings host up` starts it"
            ) from error
        try:
            connection.request("POST", "/v1/" + operation.replace(" ", "/"), payload, headers)
        except OSError as error:
            # It may answer and close before it has read everything, and then its answer says why.
            if not isinstance(error, BrokenPipeError | ConnectionResetError):
                raise self._unknown(operation, error) from error

    def _response(self, connection: _Connection, operation: str) -> tuple[int, bytes]:
        try:
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._unknown(operation, error) from error

    def _unknown(self, operation: str, error: Exception) -> TidingsError:
        why = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        if not SERVED["/v1/" + operation.replace(" ", "/")].changes:
            return HostUnreachable(f"the host at {self.socket} did not answer {operation} ({why}): retry")
        return OutcomeUnknown(f"the host did not answer {operation} ({why}): it may have taken effect; retry")


class Session:
    """One agent's view of the host. Everything here is about that agent and nobody else."""

    def __init__(self, client: HostClient, file: SessionFile) -> None:
        self.client, self.file = client, file

    @property
    def id(self) -> str:
        return self.file.session

    @property
    def space(self) -> str:
        return self.file.space

    @property
    def agent(self) -> str:
        return self.file.agent

    @property
    def name(self) -> str:
        return self.file.name

    @classmethod
    def from_file(cls, path: Path, home: Path | None = None) -> Session:
        """The session in a file. `home`: of the host; unless said, that of the socket in the file."""
        file = SessionFile.read(path)
        return HostClient(home or Path(file.socket).parents[1]).resume(file)

    def save(self, path: Path) -> None:
        self.file.write(path)

    def _ask(self, operation: str, *, patience: float = 0.0, **fields: Any) -> Json:
        """Fields that are None or False are left out: that is their default."""
        body = {name: value for name, value in fields.items() if value is not None and value is not False}
        timeout = self.client.patience + patience + float(fields.get("wait") or 0.0)
        return self.client.call(operation, body, token=self.file.token, timeout=timeout)

    # --- the session itself ---

    def me(self) -> Json:
        """session, space, space_id, agent, name, receive, program, and `health` of the agent's connection."""
        return self._ask("session show")

    def end(self) -> bool:
        """Its token is worth nothing from now on. False: the host could not write that yet and tries again; one that
        is killed before it could would take this token again."""
        return bool(self._ask("session end")["written"])

    # --- sending ---

    def send(
        self,
        *,
        channel: str | None = None,
        agent: str | None = None,
        role: str | None = None,
        text: str | None = None,
        data: Any = None,
        parts: Sequence[Json] = (),
        mentions: Sequence[str] = (),
        priority: str = "next",
        reply_to: str | None = None,
        context: str | None = None,
        id: str | None = None,  # noqa: A002
        max_age: float | None = None,
        deadline: float | None = None,
        wait: float = 0.0,
    ) -> Sent:
        """Hand a message to the host, for exactly one of a channel, an agent or a role. It answers once it is on disk;
        `wait`: for so many seconds, that the space has it. Asked again under the same id it is the same message."""
        check_said(text, parts, mentions, more=data is not None)
        chosen = id or new_id()
        fields: Json = {
            "channel": unmarked(channel) if channel is not None else None,
            "agent": agent,
            "role": role,
            "text": text,
            "data": data,
            "parts": list(parts),
            "mentions": list(mentions),
            "priority": priority,
            "reply_to": reply_to,
            "context": context,
            "id": chosen,
            "max_age": max_age,
            "deadline": deadline,
        }
        lists = ("parts", "mentions")  # `data` may be an empty one
        body = {name: value for name, value in fields.items() if (value or name not in lists) and value is not None}
        body |= {"wait": wait} if wait else {}
        timeout = self.client.patience + wait
        found = self._insisting(
            lambda: self.client.call("message send", body, token=self.file.token, timeout=timeout), chosen
        )
        return sent_of(found)

    def _insisting(self, ask: Any, chosen: str) -> Json:
        """Ask twice if the first answer was lost: the id is the same, so it is one message."""
        try:
            return dict(ask())
        except OutcomeUnknown:
            pass
        try:
            return dict(ask())
        except (OutcomeUnknown, HostUnreachable) as error:
            raise OutcomeUnknown(
                f"message {chosen} may be in the host's outbox or not ({error}): send it again under the same id"
            ) from error

    def outbox(self, state: str | None = None, limit: int = 50, before: int | None = None) -> list[Json]:
        """What this agent handed over, newest first; `before`: rows below that one."""
        return list(self._ask("outbox list", states=[state] if state else None, limit=limit, before=before)["rows"])

    def outbox_show(self, message_id: str) -> Json:
        """One row, with `chain`: what it replaced and what replaced it."""
        return self._ask("outbox show", id=message_id)

    def requeue(self, message_id: str) -> Json:
        """Send again, under a new id, what is dead or was cancelled; the new row."""
        return self._ask("outbox requeue", id=message_id)

    def cancel(self, message_id: str) -> Json:
        """Do not send it, if it has not left; the row as it is then."""
        return self._ask("outbox cancel", id=message_id)

    def receipt(self, message_id: str, stage: str = "delivered", wait: float = 0.0) -> Json:
        """How far a direct message has come: `id`, `stage`, `seq`."""
        return self._ask("message receipt", id=message_id, stage=stage, wait=wait)

    # --- mail ---

    def inbox(
        self,
        *,
        unread: bool = False,
        sender: str | None = None,
        channel: str | None = None,
        kind: str | None = None,
        after: int | None = None,
        before: int | None = None,
        newest: bool = False,
        limit: int = 50,
        search: str | None = None,
        direct_first: bool = False,
        wait: float = 0.0,
    ) -> list[Json]:
        """Messages this agent has, oldest first. `sender`: name or id; `newest`: the last of them instead of the first;
        `after`, `before`: rows between; `wait`: seconds, if there is none yet."""
        rows = {"after": after, "before": before, "limit": limit}
        asked: Json = {"sender": sender, "channel": channel, "kind": kind, "search": search, **rows}
        flags = {"unread": unread, "newest": newest, "direct_first": direct_first}
        return list(self._ask("inbox list", wait=wait, **asked, **flags)["messages"])

    def unread(self) -> dict[str, int]:
        """How many unread rows: `direct`, `channel` and `notice`."""
        return dict(self._ask("inbox unread")["unread"])

    def quarantine(self, after: int = 0) -> list[Json]:
        """What came and could not be opened: row, reason, size, how it begins, when it was received."""
        return list(self._ask("inbox quarantine", after=after)["quarantine"])

    def receive(self) -> None:
        """Let the host receive this agent's mail again, if a program elsewhere has since it began."""
        self._ask("inbox receive")

    def mark_read(self, rows: Sequence[int]) -> int:
        """How many of these became read now."""
        return int(self._ask("inbox read", rows=list(rows))["read"])

    def delete(self, rows: Sequence[int]) -> int:
        """How many of these lost their content now. That they came stays, so none comes again."""
        return int(self._ask("inbox delete", rows=list(rows))["deleted"])

    def thread(self, message_id: str) -> list[Json]:
        return list(self._ask("inbox thread", id=message_id)["messages"])

    def ending(self, ending: str) -> list[str]:
        """Whole ids of messages this agent was sent or sent, by how they end."""
        return list(self._ask("message ids", ending=ending)["ids"])

    def events(self, after: int | None = None, *, states: bool = False, give_up: bool = False) -> Iterator[Event]:
        """Inbox rows behind `after` (None: those that come from now on), then each as it comes, once and in order.

        A host that goes away is waited for, and the stream goes on where it was; with `give_up` it raises instead.
        """
        seen, delays = after, RETRY.delays()
        while True:
            try:
                for event in self._stream(seen):
                    delays = RETRY.delays()
                    seen = event.row if event.row is not None else seen
                    if event.kind in ("message", "notice") or (states and event.kind == "state"):
                        yield event
            except HostUnreachable:
                if give_up:
                    raise
            time.sleep(next(delays))

    def _stream(self, after: int | None) -> Iterator[Event]:
        """One connection of events; ends when the host ends it."""
        headers = {"Accept": "text/event-stream", "Authorization": f"Bearer {self.file.token}"}
        if after is not None:
            headers["Last-Event-ID"] = str(after)
        connection = _Connection(self.client.socket, STREAM_SILENCE)
        try:
            connection.request("GET", "/v1/events", headers=headers)
            response = connection.getresponse()
            if response.status != 200:
                _answer(response.status, response.read())
            yield from _events(response)
        except (OSError, http.client.HTTPException) as error:
            raise HostUnreachable(f"the host at {self.client.socket} went away ({error}): `tidings host up`") from error
        finally:
            connection.close()

    # --- the space ---

    def who(self) -> Json:
        """`agents`, and `backstop`: what to say of durable copies that are late. Unless `fresh` the space could not be
        asked, `reason` says why, and they are those that were last seen, with the status `unknown`."""
        return self._ask("agent list")

    def access(self) -> Json:
        """What this agent may do now: `roles`, and what it may `read`, `post` to and `manage`."""
        return self._ask("agent access")

    def control(self, service: str, do: str, **arguments: Any) -> Json:
        """A question that the host passes on to the steward."""
        return self.client.call(f"{service} {do}", arguments, token=self.file.token)

    def channels(self) -> list[Json]:
        return list(self.control("channel", "list")["channels"])

    def memberships(self) -> list[str]:
        """The channels and patterns this agent has joined, whichever of its programs did."""
        return sorted({str(each["pattern"]) for each in self.control("member", "list")["memberships"]})

    def channel_info(self, channel: str) -> Json:
        """Settings of a channel, how many are in it, what goes on there."""
        return self.control("channel", "info", channel=unmarked(channel))

    def members(self, channel: str) -> list[Json]:
        return list(self.control("member", "members", channel=unmarked(channel))["members"])

    def join(self, channel: str) -> Json:
        return self._ask("channel join", channel=unmarked(channel))

    def leave(self, channel: str) -> Json:
        return self._ask("channel leave", channel=unmarked(channel))

    def history(self, channel: str, limit: int = 50, before: int | None = None) -> PastPage:
        """The newest messages of a channel, newest first; `before`: below that sequence."""
        said = self._ask("channel history", channel=unmarked(channel), limit=limit, before=before)
        return PastPage(said["messages"], gone=said["gone"], hidden=said["hidden"])

    def trace(self, message_id: str) -> Json:
        return self._ask("message trace", id=message_id)

    def set_status(self, status: str, activity: str | None = None, model: str | None = None) -> Json:
        return self._ask("agent announce", status=status, activity=activity, model=model)

    def attention(self) -> Json:
        """What may wake this agent: `standing`, kept by the steward, and `running`, what a session of it says now."""
        return self.control("attention", "get")

    def set_attention(self, mode: str | None = None, channels: dict[str, str] | None = None) -> Json:
        levels = {unmarked(pattern): level for pattern, level in (channels or {}).items()}
        return self.control("attention", "set", mode=mode, channels=levels)

    # --- tasks ---

    def claim(
        self, role: str, wait: float = 0.0, *, take_over: bool = False, silence: float | None = None
    ) -> Json | None:
        """A task of a role, held for this session until it is settled or the session ends; None if none came.
        An agent holds one task at a time: claimed again, it is the same one. `take_over`: also if another program
        of this agent holds it, which is gone. A session that makes no request for `silence` seconds (a quarter of an
        hour, unless said) gives it back."""
        found = self._ask("task claim", role=role, wait=wait, take_over=take_over, silence=silence)
        return found["task"]  # type: ignore[no-any-return]

    def held(self) -> Json | None:
        """The task in the hands of this agent's programs: id, role, attempt, whether it is `mine`, else of which
        `program`, and for how many seconds that said nothing. None if there is none."""
        return self._ask("task held")["held"]  # type: ignore[no-any-return]

    def finish(self, task_id: str, text: str | None = None, data: Any = None, *, patience: float = PATIENCE) -> Json:
        """`patience`: seconds for a space that is away; the host goes on trying after them, until the deadline."""
        return self._ask("task done", id=task_id, text=text, data=data, patience=patience)

    def fail(self, task_id: str, reason: str, *, retry: bool = True, patience: float = PATIENCE) -> Json:
        body = {"id": task_id, "reason": reason, "retry": retry}
        timeout = self.client.patience + patience
        return self.client.call("task fail", body, token=self.file.token, timeout=timeout)

    def put_back(self, task_id: str, *, patience: float = PATIENCE) -> Json:
        """Let somebody else have it, untouched: no attempt was made."""
        return self._ask("task fail", id=task_id, reason="put back", untouched=True, patience=patience)

    def task(self, task_id: str, wait: float = 0.0) -> Json:
        """What became of a task this agent asked: state, text, worker, attempt, cause, reasons, message."""
        return self._ask("task state", id=task_id, wait=wait)


def source_of(identity: Identity) -> list[str]:
    """Where the host finds this identity too."""
    if identity.is_bundle:
        return ["bundle", str(identity.path.absolute())]
    # <home>/spaces/<space>/creds/agents/<name>.creds
    return ["home", str(identity.path.absolute().parents[4]), identity.subjects.space, identity.name]


def sent_of(found: Json) -> Sent:
    return Sent(
        found["id"], found["row"], found["state"], found["stage"], found["seq"], tuple(found.get("warnings") or ())
    )


def _encoded(body: Any) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the value cannot be written as JSON: {error}") from error


def _answer(status: int, body: bytes) -> Json:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if status < 400 and isinstance(found, dict):
        return found
    refusal = (found or {}).get("error") if isinstance(found, dict) else None
    if not isinstance(refusal, dict):
        if status == 503:
            raise HostBusy("the host has too many connections: retry in a moment")
        raise TidingsError(f"the host answered {status} without JSON: see `tidings host status`")
    known = ERRORS_BY_CODE.get(str(refusal.get("code")), TidingsError)
    raise known(str(refusal.get("message") or f"the host refused this ({status}) without a reason"))


def _events(response: http.client.HTTPResponse) -> Iterator[Event]:
    """Server-Sent Events as they come; comments, which say that the host lives, are passed over."""
    kind, row = "message", None
    data: list[str] = []
    while line := response.readline():
        text = line.decode("utf-8").rstrip("\r\n")
        if not text:
            if data:
                yield Event(kind, row, json.loads("\n".join(data)))
            kind, row, data = "message", None, []
            continue
        name, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            kind = value
        elif name == "data":
            data.append(value)
        elif name == "id" and value.isdigit():
            row = int(value)


__all__ = ["API", "Event", "HostClient", "Sent", "Session", "sent_of"]
