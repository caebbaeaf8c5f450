"""`HostTransport`: the way through the host of this machine, for `tidings.connect(via="host")`.

The host stores a sent message at once and sends it later by itself; it receives mail into its inbox while no program
runs. A request is one exchange over a kept connection. If the host has forgotten the session, a new one is opened
(`SessionSource`); if the host is gone, it is looked for once (`find_host`). Every request may be repeated, because
sends carry their ids. Requests in the background, such as following and liveness reports, never start a host.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from msgspec.structs import asdict

from tidings.client.agent import Agent
from tidings.client.host_http import HostClient, Json, ServerEvent, json_value
from tidings.client.host_session import SessionFile, SessionSource
from tidings.client.host_tasks import CALL_PATIENCE, SILENCE, HostTasks
from tidings.client.incoming import Events, Inbox, Past
from tidings.client.message_json import read_message, read_result, to_json
from tidings.client.notices import Notice
from tidings.client.redelivery import Retry, UnreadRows
from tidings.client.tasks import Job, TaskResult
from tidings.client.transport import Addressee, Agents, Joined, Left, Receipt, Transport
from tidings.contract import host as contract
from tidings.contract.core import Request
from tidings.contract.host import HostTrace
from tidings.errors import (
    ERRORS_BY_CODE,
    HostBusy,
    HostUnreachable,
    NoSession,
    OutcomeUnknown,
    StoreError,
    TidingsError,
    UnreachableError,
    UsageError,
    WireError,
)
from tidings.util.backoff import Backoff
from tidings.util.task_ends import end_tasks
from tidings.wire.message import Draft, new_id, write_parts
from tidings.wire.roster import Status

A = TypeVar("A")
#: messages in a page of the inbox, and of a channel's history
PAGE, HISTORY_PAGE = contract.MAX_ROWS, contract.MAX_HISTORY
RETRY = Backoff(0.1, 2.0)
#: seconds that closing allows for the last acks to reach the host
CLOSE_PATIENCE = 2.0
#: states of an outbox row that is not sent yet
WAITING = ("pending", "inflight")


class HostTransport(Transport):
    """One agent's session at the host."""

    via = "host"

    def __init__(
        self,
        find_host: Callable[[], Awaitable[HostClient]],
        source: SessionSource,
        *,
        inbox: int = 512,
        retry: Retry | None = None,
    ) -> None:
        self._find, self._source = find_host, source
        #: held while looking for the host or opening a session: calls that fail together do it once
        self._opening = asyncio.Lock()
        self._closing = asyncio.Lock()
        self._closed = False
        self._following: asyncio.Task[None] | None = None
        self._tasks = HostTasks(self)
        #: rows that are acked, and not yet marked as read at the host
        self._unmarked: set[int] = set()
        self._emitted_state: str | None = None
        self.queue = Inbox(inbox)
        self.events = Events()
        self._unread = UnreadRows(self.queue, self.events, retry or Retry(), self._mark_soon)

    @property
    def id(self) -> str:
        return self.session.agent

    @property
    def name(self) -> str:
        return self.session.name

    @property
    def space(self) -> str:
        return self.session.space

    # --- life ---

    async def open(self) -> None:
        self.host = await self._find()
        try:
            self.session = await self._source.obtain(self.host, None)
        except BaseException:
            self.host.close()
            raise

    async def close(self) -> None:
        """Give back claimed tasks, and end the session unless it is borrowed. A second call waits for the first to
        finish."""
        async with self._closing:
            if self._closed:
                return
            self._closed = True
            await end_tasks([self._following])
            self._unread.close()
            with suppress(TidingsError, TimeoutError):
                async with asyncio.timeout(CLOSE_PATIENCE):
                    await self._mark_late()
            await self._tasks.close()
            self.queue.close(asyncio.CancelledError())
            await self._end_own_session()
            self.host.close()

    async def _end_own_session(self) -> None:
        if self._source.ends:
            with suppress(TidingsError):
                await self.end_session()

    async def end_session(self) -> bool:
        """End the session: its token becomes invalid. False: the host could not store that yet and retries; if it is
        killed before, the token is valid again."""
        return (await self.host.call(contract.EndSessionRequest(), token=self.session.token)).written

    # --- requests ---

    async def call(
        self, request: Request[A], /, *, op: str | None = None, timeout: float = CALL_PATIENCE, starts: bool = True
    ) -> A:
        """Sends one request in this agent's session: an operation of the host, or one that it forwards to the steward.
        `starts`: if the host is gone, look for it or start it, and retry once."""
        wait = max(0.0, timeout - CALL_PATIENCE)

        async def once(session: SessionFile) -> A:
            return await self.host.call(request, token=session.token, op=op, wait=wait)

        session, host = self.session, self.host
        try:
            return await once(session)
        except HostUnreachable:
            if not starts or self._closed:
                raise
            await self._find_again(host)
        except NoSession:
            if not starts:
                raise
            return await once(await self._renewed(session))
        try:
            return await once(session)
        except NoSession:
            return await once(await self._renewed(session))

    async def _find_again(self, gone: HostClient) -> None:
        async with self._opening:
            if self.host is gone:
                gone.close()
                self.host = await self._find()

    async def _renewed(self, stale: SessionFile) -> SessionFile:
        async with self._opening:
            if self.session is stale:
                if self._closed:
                    raise NoSession("this session has ended")
                self.session = await self._source.obtain(self.host, stale)
            return self.session

    # --- sending ---

    async def send(self, addressee: Addressee, to: str, draft: Draft, timeout: float) -> Receipt:
        """Hands a message to the host, which answers once it is on disk. It waits up to `timeout` seconds for the
        space, unless that is known to be unreachable. Repeating an id sends once."""
        if addressee == "agent" and not draft.sealed:
            raise UsageError("the host seals every direct message: connect with via='direct' to send one unsealed")
        mid = draft.id or new_id()
        destination: Json = {addressee: to}
        request = contract.SendRequest(
            **destination,
            text=draft.text,
            data=None if draft.data is None else json_value(draft.data),
            parts=tuple(write_parts(draft.parts)),
            mentions=tuple(each if isinstance(each, str) else each.id for each in draft.mentions),
            priority=draft.priority,
            reply_to=draft.reply_to,
            context=draft.context,
            deadline=draft.deadline,
            id=mid,
            wait=timeout,
        )
        answer = await self._send_with_retry(mid, lambda: self.call(request))
        if answer.state in ("dead", "cancelled"):
            why = answer.why or f"it is {answer.state}"
            raise ERRORS_BY_CODE.get(str(answer.code), TidingsError)(f"message {mid} was not sent: {why}")
        return Receipt(**(asdict(answer) | {"seq": answer.seq or 0}))

    async def _send_with_retry(self, mid: str, ask: Callable[[], Awaitable[A]]) -> A:
        """Asks again if the answer was lost: the id is the same, so it is one message. Does not ask again after a
        timeout."""
        try:
            return await ask()
        except OutcomeUnknown as error:
            if isinstance(error.__cause__, TimeoutError):
                raise _in_doubt(mid, error) from error
        try:
            return await ask()
        except (OutcomeUnknown, HostUnreachable) as error:
            raise _in_doubt(mid, error) from error

    async def receipt(self, sent: Receipt | str, stage: str, to: str | None, wait: float) -> Receipt:  # noqa: ARG002
        """The outbox knows `to`."""
        mid = sent if isinstance(sent, str) else sent.id
        found = await self.call(contract.MessageReceiptRequest(mid, stage, wait))  # type: ignore[arg-type]
        return Receipt(mid, found.seq or 0, found.stage, to=found.to, why=found.why)

    # --- the outbox ---

    async def outbox(self, state: str | None = None, limit: int = 50, before: int | None = None) -> list[Json]:
        """Returns the messages in this agent's outbox, newest first. `before`: rows below this one."""
        rows: list[Json] = []
        while len(rows) < limit:
            wanted = min(PAGE, limit - len(rows))
            states = tuple(state.split(",")) if state else ()
            page = (await self.call(contract.ListOutboxRequest(states, wanted, before))).rows  # type: ignore[arg-type]
            rows += map(to_json, page)
            if len(page) < wanted:
                break
            before = page[-1].row
        return rows

    async def outbox_row(self, message_id: str) -> Json:
        """Returns one row, with `chain`: the messages that it replaced or was replaced by."""
        return to_json(await self.call(contract.ShowOutboxRequest(message_id)))

    # --- the inbox ---

    async def inbox(
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
        starts: bool = True,
    ) -> list[Json]:
        """Returns rows of the inbox, oldest first, with the fields of `InboxMessage`. `sender`: name or id; `newest`:
        the last page instead of the first; `after`, `before`: only rows in between; `wait`: seconds to wait for one."""
        request = contract.ListInboxRequest(
            unread=unread,
            sender=sender,
            channel=channel,
            kind=kind,  # type: ignore[arg-type]
            after=after or 0,
            before=before,
            limit=limit,
            direct_first=direct_first,
            newest=newest,
            search=search,
            wait=wait,
        )
        return [to_json(each) for each in (await self.call(request, starts=starts)).messages]

    async def unread(self) -> dict[str, int]:
        """Returns the number of unread rows by kind: `direct`, `channel` and `notice`."""
        return (await self.call(contract.UnreadCountsRequest())).unread

    async def mark_read(self, rows: Sequence[int]) -> int:
        """Marks rows as read. Returns how many of them were unread."""
        return (await self.call(contract.MarkReadRequest(tuple(rows)))).read

    async def thread(self, message_id: str, *, starts: bool = True) -> list[Json]:
        return [to_json(each) for each in (await self.call(contract.ThreadRequest(message_id), starts=starts)).messages]

    async def newest_row(self) -> int:
        """Returns the newest row, 0 if there is none. Does not start a host, because followers call it repeatedly."""
        session = self.session
        try:
            found = await self.inbox(newest=True, limit=1, starts=False)
        except NoSession:
            await self._renewed(session)
            found = await self.inbox(newest=True, limit=1, starts=False)
        return int(found[-1]["row"]) if found else 0

    async def follow(self, after: int | None) -> AsyncIterator[ServerEvent]:
        """Yields rows after `after` (None: only new rows), then each as it arrives, and states of the connection. Ends
        when the host ends the stream; raises HostUnreachable if the host stops."""
        session = self.session
        try:
            async with aclosing(self.host.stream(session.token, after)) as stream:  # type: ignore[type-var]
                async for event in stream:
                    yield event
        except NoSession:
            await self._renewed(session)

    async def rows(self, after: int) -> AsyncIterator[ServerEvent]:
        """Yields every row after `after`, each once and in order, without end. Waits for a host that is down."""
        delays = RETRY.delays()
        while True:
            try:
                async with aclosing(self.follow(after)) as events:  # type: ignore[type-var]
                    async for event in events:
                        delays, after = RETRY.delays(), after if event.row is None else event.row
                        if event.kind in ("message", "notice"):
                            yield event
            except HostUnreachable:
                pass
            await asyncio.sleep(next(delays))

    # --- receiving ---

    async def receive(self) -> None:
        if not self.session.receive:
            raise UsageError("this session does not receive: connect with receive=True")
        if self._following is None:
            self._following = asyncio.create_task(self._keep_following())

    async def _keep_following(self) -> None:
        """Follows the inbox. On an error that ends this, everything that waits for a message gets the error."""
        try:
            await self._follow_inbox()
        except Exception as error:  # noqa: BLE001  boundary: raised again where messages are waited for
            self.queue.close(error)

    async def _follow_inbox(self) -> None:
        """Hands out unread rows, then new ones. Waits for a host that is down, and continues where it stopped."""
        after, delays = 0, RETRY.delays()
        begun = None
        while True:
            try:
                await self._mark_late()
                begun = await self.newest_row() if begun is None else begun
                while after < begun:
                    rows = await self.inbox(unread=True, after=after, before=begun + 1, limit=16, starts=False)
                    for row in rows:
                        await self._take(row)
                    after = int(rows[-1]["row"]) if rows else begun
                async with aclosing(self.follow(after)) as events:  # type: ignore[type-var]
                    async for event in events:
                        delays = RETRY.delays()
                        if event.kind == "state":
                            self._emit_state(event.data)
                        elif event.row is not None:
                            await self._take(event.data)
                            after = event.row
            except NoSession:
                raise
            except TidingsError as error:  # unreachable, busy, a full disk: none is permanent
                self._emit_state({"state": "reconnecting"})
                self.events.emit("error", error)
            await asyncio.sleep(next(delays))

    async def _take(self, row: Json) -> None:
        await self.queue.wait_for_room()
        try:
            if row["kind"] != "notice":
                self._unread.hand_out(int(row["row"]), read_message(row))
            elif self.events.is_heard("notice"):
                self.events.emit("notice", Notice(**(row["notice"] | {"text": row["text"]})))
                await self.mark_read([row["row"]])
        except (WireError, LookupError, TypeError, ValueError) as error:  # a newer host wrote it; it stays unread
            self.events.emit("error", UsageError(f"cannot read row {row.get('row')} of the inbox: {error}"))

    async def _mark_soon(self, row: int) -> None:
        """Marks a row as read. If the host is down, the row is marked later, so that an ack does not end a loop."""
        self._unmarked.add(row)
        with suppress(UnreachableError, OutcomeUnknown, HostBusy, StoreError):
            await self._mark_late()

    async def _mark_late(self) -> None:
        """Marks all rows that were acked, even while the host was down. Marking twice does no harm."""
        if late := sorted(self._unmarked):
            await self.mark_read(late)
            self._unmarked.difference_update(late)

    def _emit_state(self, health: Json) -> None:
        if health["state"] != self._emitted_state:
            self._emitted_state = health["state"]
            self.events.emit("connection", health["state"])
        if health.get("superseded"):
            self.events.emit("superseded", health)

    # --- the space ---

    async def join(self, channel: str, backfill: int) -> Joined:
        if backfill:
            raise UsageError("the host has no backfill: call `history` after joining")
        found = await self.call(contract.JoinChannelRequest(channel))
        return Joined(**asdict(found))

    async def leave(self, channel: str) -> Left:
        found = await self.call(contract.LeaveChannelRequest(channel))
        return Left(**asdict(found))

    async def history(self, channel: str, limit: int, before: int | None) -> Past:
        found = Past([])
        while len(found) < limit:
            wanted = min(HISTORY_PAGE, limit - len(found))
            page = await self.call(contract.ChannelHistoryRequest(channel, wanted, before))
            found += [read_message(to_json(each)) for each in page.messages]
            found.gone, found.hidden, found.more = page.gone, page.hidden, page.more
            if len(page.messages) < wanted:
                break
            before = page.messages[-1].seq
        return found

    async def who(self, timeout: float) -> Agents:  # noqa: ARG002  the host answers at once
        found = await self.call(contract.ListAgentsRequest())
        return Agents(found.agents, reason=found.reason, delay=found.backstop)

    async def access(self) -> dict[str, Any]:
        return to_json(await self.call(contract.AgentAccessRequest()))

    async def announce(self, status: Status, activity: str | None, model: str | None) -> bool:
        return (await self.call(contract.AnnounceRequest(status, activity, model))).attached

    async def trace(self, sent: Receipt | str) -> HostTrace:
        return await self.call(contract.MessageTraceRequest(sent if isinstance(sent, str) else sent.id))

    # --- tasks ---

    async def claim(
        self,
        role: str,
        wait: float = 0.0,
        *,
        looping: bool = False,
        take_over: bool = False,
        silence: float | None = None,
    ) -> Job | None:
        """Claims a task. The host beats for it while this program lives, and gives it back when the session ends, or
        makes no request for `silence` seconds (default: a quarter of an hour). An agent holds one task at a time;
        claiming again returns it. `take_over`: also if another program of this agent holds it, which is gone."""
        if looping:
            wait, silence = wait / 4, SILENCE
        return await self._tasks.claim(role, wait, take_over=take_over, silence=silence)

    async def claimed(self, message_id: str) -> Job:
        """Returns the task with this id. Raises UnknownMessage if this session does not hold it."""
        return await self._tasks.claimed(message_id)

    async def result(self, message_id: str, seq: int | None, wait: float) -> TaskResult:  # noqa: ARG002
        """The state is `stored` while the task waits in the outbox, which knows its `seq`."""
        found = await self.call(contract.TaskStateRequest(message_id, wait))
        if found.state in WAITING:
            found.state = "stored"
        return read_result(found)


HostAgent = Agent[HostTransport]


def _in_doubt(mid: str, error: TidingsError) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"message {mid} may be in the host's outbox or not ({error}): send it again under the same id"
    )
