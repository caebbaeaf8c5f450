"""Agents without a host and without a broker: a third transport, `HostTransport` as the MCP server sees it, in memory.

    bob = fake_agent()                   bob of a space of his own, with ada in it
    FakeSpace().agent("ada")             one of several agents that talk with each other

It keeps everything it was asked. `tests/contract/test_agent_interface.py` holds it to the interface, and
`tests/integration/test_fake_agent.py` walks it and a real one through one scene: it answers as that does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from tidings.client.agent import Agent
from tidings.client.directory import resolve_among
from tidings.client.host_http import Json, ServerEvent
from tidings.client.incoming import Events, Inbox, Past
from tidings.client.message_json import content_json, read_message
from tidings.client.redelivery import Retry, UnreadRows
from tidings.client.tasks import Job, TaskResult
from tidings.client.transport import Addressee, Agents, Joined, Left, Receipt, Transport
from tidings.contract.core import Request
from tidings.contract.host import HostTrace, OutboxEntry
from tidings.contract.mail import DeadTaskRow, TracedReceipt
from tidings.errors import (
    AuthRevoked,
    DeniedError,
    HostUnreachable,
    IdReused,
    TidingsError,
    UnknownMessage,
    UsageError,
)
from tidings.util.task_ends import end_tasks
from tidings.wire import message as wire
from tidings.wire.message import Draft, Mention, Message, Sender, write_parts
from tidings.wire.names import check_channel, covers_any, covers_pattern
from tidings.wire.roster import AgentEntry, Status
from tidings.wire.states import ReceiptStage, has_reached

A = TypeVar("A")

ADA, BOB = "U" + "A" * 55, "U" + "B" * 55
NOW = "2026-01-01T00:00:00.000+00:00"
REFUSED = {"state": "dead", "code": "denied", "words": "may not post\x1b[2J"}
ANYWHERE = ("general", "team.>")


def message(row: int, text: str, **changed: Any) -> Json:
    """A row of an inbox, by default from ada and direct."""
    plain: Json = {
        "row": row,
        "id": f"0199a8b7-5f3e-7d21-9c64-{row:012x}",
        "kind": "direct",
        "channel": None,
        "from": {"id": ADA, "name": "ada"},
        "text": text,
        "parts": [{"kind": "text", "text": text}],
        "mentions": [],
        "mention_ids": [],
        "ts": None,
        "role": None,
        "priority": "next",
        "reply_to": None,
        "context": None,
        "mentions_me": False,
        "wakes": True,
        "historical": False,
        "sealed": False,
        "origin": None,
        "origin_id": None,
        "seq": row,
        "time": NOW,
        "received": NOW,
        "read": None,
    }
    return plain | ({"kind": "channel"} if changed.get("channel") else {}) | changed


def channel(name: str, *, joined: bool = False, **changed: Any) -> Json:
    plain = {"channel": name, "class": "durable", "replay": True, "replay_window": None, "own": [], "last": None}
    return plain | {"members": 1, "joined": joined} | changed


@dataclass
class Box:
    """What the space keeps of one agent, whichever of its programs asks."""

    access: Json
    rows: list[Json] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    #: rows of the outbox, and what was asked, by the id of the message
    outbox: dict[str, Json] = field(default_factory=dict)
    sent: dict[str, Json] = field(default_factory=dict)
    attention: Json = field(default_factory=lambda: {"mode": "open", "channels": {}})
    holds: Task | None = None


@dataclass
class Task:
    seq: int
    role: str
    message: Message
    asker: Sender
    state: str = "queued"
    attempt: int = 0
    holder: FakeTransport | None = None
    reasons: list[str] = field(default_factory=list)
    result: TaskResult | None = None


class FakeSpace:
    """A space whose agents hear each other at once."""

    def __init__(self, name: str = "main") -> None:
        self.name = name
        self.agents: list[AgentEntry] = []
        self.boxes: dict[str, Box] = {}
        #: what was said in channels, as rows
        self.said: list[Json] = []
        self.tasks: list[Task] = []
        #: final stages of direct messages that were not read, by their ids
        self.ended: dict[str, ReceiptStage] = {}
        self.seq = 0
        self._changed = asyncio.Event()

    def add(
        self, name: str, *, read: Sequence[str] = ANYWHERE, post: Sequence[str] = ANYWHERE, roles: Sequence[str] = ()
    ) -> str:
        key = "U" + name[0].upper() * 55
        self.agents.append(AgentEntry(id=key, name=name, roles=tuple(roles), status="idle"))
        self.boxes[key] = Box({"roles": list(roles), "read": list(read), "post": list(post), "manage": []})
        return key

    def agent(self, name: str, *, channels: Sequence[str] = (), retry: Retry | None = None) -> FakeAgent:
        return Agent(FakeTransport(resolve_among(self.agents, name).id, self, retry=retry), channels=channels)

    def revoke(self, name: str) -> None:
        """An agent is gone; what it had not read is undeliverable."""
        gone = resolve_among(self.agents, name)
        self.agents.remove(gone)
        unread = [row for row in self.boxes[gone.id].rows if row["kind"] == "direct" and not row["read"]]
        self.ended.update(dict.fromkeys((row["id"] for row in unread), ReceiptStage.UNDELIVERABLE))
        self.change()

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def put(self, key: str, row: Json) -> None:
        """A row for an inbox; its number is the next one there."""
        rows = self.boxes[key].rows
        rows.append(row | {"row": max((each["row"] for each in rows), default=0) + 1})
        self.change()

    def change(self) -> None:
        """Wake everybody who waits for something."""
        self._changed.set()
        self._changed = asyncio.Event()

    def next_change(self) -> asyncio.Event:
        return self._changed

    async def until(self, look: Callable[[], Any], seconds: float | None) -> Any:
        """What is true within so many seconds, or what is then."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            changed = self.next_change()
            if (found := look()) or (end is not None and time.monotonic() >= end):
                return found
            left = None if end is None else end - time.monotonic()
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                return look()


def _own_space() -> FakeSpace:
    space = FakeSpace()
    space.add("bob", post=["general"], roles=["reviewer"])
    space.add("ada")
    space.agents[1] = replace(space.agents[1], status="working", activity="writes")
    return space


class FakeTransport(Transport):
    """A program of an agent. `down` is what everything that needs the space raises."""

    via = "host"

    def __init__(self, key: str = BOB, space: FakeSpace | None = None, *, retry: Retry | None = None) -> None:
        self.world = space or _own_space()
        self.box = self.world.boxes[key]
        self._key = key
        self.queue = Inbox()
        self.events = Events()
        self._unread = UnreadRows(self.queue, self.events, retry or Retry(), self._read)
        self._receiving: asyncio.Task[None] | None = None
        self.down: TidingsError | None = None
        self.closed = False
        #: how long it said nothing, for its agent's other programs
        self.silent = 0.0
        #: what of the past is not there, or not shown
        self.gone, self.hidden = 0, False
        #: channels that are listed although nobody is in them
        self.listed: list[Json] = []
        #: everything it was asked to send or to say of itself, how its tasks ended, where events were followed from
        self.asked: list[tuple[Any, ...]] = []
        self.ended: list[tuple[Any, ...]] = []
        self.followed: list[int | None] = []
        self._broken: list[TidingsError] = []
        self._jobs: dict[str, Job] = {}

    @property
    def id(self) -> str:
        return self._key

    @property
    def name(self) -> str:
        return next(each.name for each in self.world.agents if each.id == self._key)

    @property
    def space(self) -> str:
        return self.world.name

    @property
    def rows(self) -> list[Json]:
        return self.box.rows

    @rows.setter
    def rows(self, rows: list[Json]) -> None:
        self.box.rows = rows

    @property
    def joined(self) -> list[str]:
        return self.box.joined

    # --- what a test does to it ---

    def arrive(self, row: Json) -> None:
        self.box.rows.append(row)
        self.world.change()

    def interrupt(self, error: TidingsError) -> None:
        """Break the stream of events."""
        self._broken.append(error)
        self.world.change()

    def give(self, text: str, role: str = "reviewer", **said: Any) -> str:
        """A task that ada asks."""
        asker = Sender(ADA, "ada")
        asked = wire.compose(asker, text=text, **said)
        self.world.tasks.append(Task(self.world.next_seq(), role, asked, asker))
        self.world.change()
        return asked.id

    def lose(self) -> None:
        """The host gave back what is held."""
        assert self.box.holds is not None
        self.box.holds.state, self.box.holds.holder, self.box.holds = "queued", None, None

    def _needs_the_space(self) -> None:
        if self.down is not None:
            raise self.down

    # --- life ---

    async def open(self) -> None:
        """Nothing has to be reached."""

    async def close(self) -> None:
        self.closed = True
        if self.box.holds is not None and self.box.holds.holder is self:
            await self.give_up(self._job(self.box.holds), "left unfinished", retry=True)
        await end_tasks([self._receiving])
        self._unread.close()
        self.queue.close(asyncio.CancelledError())
        self.world.change()

    # --- sending ---

    async def send(self, addressee: Addressee, to: str, draft: Draft, timeout: float) -> Receipt:
        if addressee == "channel":
            return self._send_to_channel(to, draft, timeout)
        composed = self._composed(draft)
        target = resolve_among(self.world.agents, to).id if addressee == "agent" else to

        def leave(seq: int) -> None:
            if addressee == "agent":
                self.world.put(target, self._row(composed, "direct", seq, sealed=True))
            else:
                self.world.tasks.append(Task(seq, to, composed, composed.sender))
                self.world.change()

        if addressee == "agent":
            return self._hand_over("dm", target, {"to": to}, composed, timeout, leave)
        return self._hand_over("task", to, {"role": to, "deadline": draft.deadline}, composed, timeout, leave)

    def _send_to_channel(self, channel: str, draft: Draft, timeout: float) -> Receipt:
        named = [each if isinstance(each, str) else each.id for each in draft.mentions]
        meant = [resolve_among(self.world.agents, each) for each in named]
        composed = self._composed(draft, meant)

        def leave(seq: int) -> str | None:
            if not covers_any(self.box.access["post"], channel):
                return f"may not post to {channel}"
            row = self._row(composed, "channel", seq, meant, channel=channel)
            self.world.said.append(row)
            for key, box in self.world.boxes.items():
                if key != self.id and covers_any(box.joined, channel):
                    self.world.put(key, row | {"mentions_me": key in row["mention_ids"]})
            return None

        return self._hand_over("chat", channel, {"channel": channel, "mentions": named}, composed, timeout, leave)

    def _composed(self, draft: Draft, meant: Iterable[AgentEntry] = ()) -> Message:
        return draft.compose(Sender(self.id, self.name), [Mention(each.id, each.name) for each in meant])

    def _row(self, said: Message, kind: str, seq: int, meant: Iterable[AgentEntry] = (), **changed: Any) -> Json:
        mentioned = [Mention(each.id, each.name) for each in meant]
        by = {"id": said.id, "kind": kind, "from": {"id": self.id, "name": self.name}, "seq": seq}
        return message(0, said.text) | by | content_json(said, mentioned) | changed

    def _hand_over(
        self,
        kind: str,
        to: str,
        fields: Json,
        said: Message,
        timeout: float,
        leave: Callable[[int], str | None],
    ) -> Receipt:
        """`leave` puts it where it belongs, or says why not."""
        told = fields | {"priority": said.priority, "reply_to": said.reply_to, "context": said.context}
        told |= {"parts": write_parts(said.parts), "id": said.id}
        request = {name: value for name, value in told.items() if value not in (None, []) and value != "next"}
        self.asked.append(("send", request, timeout))
        if isinstance(self.down, HostUnreachable | AuthRevoked):
            raise self.down
        if self.box.sent.setdefault(said.id, request) != request:
            raise IdReused(f"{said.id} was accepted before, for another message")
        row = self.box.outbox.get(said.id)
        if row is None:
            row = self.box.outbox[said.id] = _outbox_row(len(self.box.outbox) + 1, said.id, kind, to)
            row |= {"to_name": next(each.name for each in self.world.agents if each.id == to)} if kind == "dm" else {}
            if self.down is None:
                seq = self.world.next_seq()
                refused = leave(seq)
                row |= REFUSED if refused else {"state": "confirmed", "stage": "confirmed", "seq": seq, "ended": NOW}
        if timeout and row["state"] == "dead":
            raise DeniedError(f"message {said.id} was not sent: {row['words']}")
        shown = row if timeout else row | {"state": "pending", "stage": "stored", "seq": None}
        whom = to if kind == "dm" else None
        return Receipt(said.id, shown["seq"] or 0, shown["stage"], to=whom, row=row["row"], state=shown["state"])

    async def receipt(self, sent: Receipt | str, stage: str, to: str | None, wait: float) -> Receipt:
        mid = sent if isinstance(sent, str) else sent.id
        row = self.box.outbox[mid]

        def current() -> str:
            (came,) = [each for each in self.world.boxes[row["to"]].rows if each["id"] == mid]
            return self.world.ended.get(mid) or ("read" if came["read"] else "delivered")

        await self.world.until(lambda: has_reached(current(), stage), wait)
        return Receipt(mid, row["seq"] or 0, current(), to=to or row["to"])

    # --- the outbox and the inbox ---

    async def outbox(self, state: str | None = None, limit: int = 50, before: int | None = None) -> list[Json]:
        rows = [row for row in self.box.outbox.values() if state in (None, row["state"])]
        return [row for row in rows[::-1] if before is None or row["row"] < before][:limit]

    async def outbox_row(self, message_id: str) -> Json:
        if message_id not in self.box.outbox:
            raise UnknownMessage(f"the outbox has no message {message_id}")
        return self.box.outbox[message_id] | {"chain": [], "waits": []}

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
        assert (sender, channel, kind, search, starts) == (None, None, None, None, True), "nobody asked so before"

        def look() -> list[Json]:
            between = [row for row in self.rows if (after or 0) < row["row"] < (before or 2**62)]
            found = [row for row in between if not (unread and row["read"])]
            ordered = sorted(found, key=lambda row: (direct_first and row["kind"] != "direct", row["row"]))
            return ordered[-limit:] if newest else ordered[:limit]

        return list(await self.world.until(look, wait))

    async def unread(self) -> dict[str, int]:
        kinds = [row["kind"] for row in self.rows if not row["read"]]
        return {kind: kinds.count(kind) for kind in ("direct", "channel", "notice")}

    async def mark_read(self, rows: Sequence[int]) -> int:
        changed = [row for row in self.rows if row["row"] in rows and not row["read"]]
        for row in changed:
            row["read"] = "now"
        self.world.change()
        return len(changed)

    async def thread(self, message_id: str, *, starts: bool = True) -> list[Json]:
        del starts
        return [row for row in self.rows if message_id in (row["id"], row["reply_to"])]

    def _message_ids(self, ending: str) -> Json:
        known = {*self.box.outbox, *(str(row["id"]) for row in self.rows)}
        return {"ids": sorted(each for each in known if each.endswith(ending))}

    async def newest_row(self) -> int:
        return max((row["row"] for row in self.rows), default=0)

    async def follow(self, after: int | None) -> AsyncIterator[ServerEvent]:
        self.followed.append(after)
        seen = await self.newest_row() if after is None else after
        while not self.closed:
            changed = self.world.next_change()
            for row in [each for each in self.rows if each["row"] > seen]:
                seen = row["row"]
                yield ServerEvent("notice" if row["kind"] == "notice" else "message", seen, row)
            if self._broken:
                raise self._broken.pop()
            await changed.wait()

    # --- receiving as a program does ---

    async def receive(self) -> None:
        if self._receiving is None:
            self._receiving = asyncio.create_task(self._hand_out())

    async def _hand_out(self) -> None:
        newest = 0
        while True:
            changed = self.world.next_change()
            for row in [each for each in self.rows if each["row"] > newest]:
                newest = row["row"]
                if not row["read"] and row["kind"] != "notice":
                    await self.queue.wait_for_room()
                    self._unread.hand_out(newest, read_message(row))
            await changed.wait()

    async def _read(self, row: int) -> None:
        await self.mark_read([row])

    # --- the space ---

    async def join(self, channel: str, backfill: int) -> Joined:
        self._needs_the_space()
        if backfill:
            raise UsageError("the host has no backfill: call `history` after joining")
        self._may_read(channel)
        state = "resumed" if channel in self.joined else "opened"
        self.box.joined = sorted({*self.joined, channel})
        return Joined(channel, state, self.world.next_seq(), durable=True, reason="")

    async def leave(self, channel: str) -> Left:
        self._needs_the_space()
        state = "left" if channel in self.joined else "absent"
        self.box.joined = [each for each in self.joined if each != channel]
        covering = tuple(each for each in self.joined if covers_pattern(each, channel))
        return Left(state, self.world.next_seq(), None, covering)

    def _may_read(self, channel: str) -> None:
        if not covers_any(self.box.access["read"], channel):
            raise DeniedError(f"{self.name} may not read {channel}")

    async def history(self, channel: str, limit: int, before: int | None) -> Past:
        self._needs_the_space()
        self._may_read(channel)
        known = {row["id"]: row for row in (*self.world.said, *self.rows) if row["channel"] == channel}
        found = sorted((row for row in known.values() if before is None or row["seq"] < before), key=_newest_first)
        page = [read_message(row | {"historical": True}) for row in found[:limit]]
        gone = self.gone if len(page) < limit else 0
        return Past(page, more=len(found) > limit, gone=gone, hidden=self.hidden)

    async def who(self, timeout: float) -> Agents:  # noqa: ARG002
        return Agents(self.world.agents, reason="" if self.down is None else str(self.down))

    async def access(self) -> dict[str, Any]:
        self._needs_the_space()
        return self.box.access

    async def announce(self, status: Status, activity: str | None, model: str | None) -> bool:
        self.asked.append(("status", status, activity, model))
        return True

    async def call(
        self,
        request: Request[A],
        /,
        *,
        op: str | None = None,  # noqa: ARG002
        timeout: float = 5.0,  # noqa: ARG002
        starts: bool = True,  # noqa: ARG002
    ) -> A:
        name = request.operation.name
        if request.operation.server == "steward":
            self._needs_the_space()
            if not request.operation.host:
                raise UsageError(f"the host does not pass on {name}")
        found = getattr(self, f"_{name.replace(' ', '_')}")(**msgspec.to_builtins(request))
        answer: A = msgspec.convert(found, request.operation.answer)
        return answer

    def _channel_list(self) -> Json:
        """Those that somebody is in, as far as it may be read, and those that are listed anyway."""
        inside = {each for box in self.world.boxes.values() for each in box.joined}
        readable = {each for each in inside if covers_any(self.box.access["read"], each) or each in self.joined}
        others = sorted(readable - {each["channel"] for each in self.listed})
        return {"channels": [*self.listed, *map(self._channel, others)], "next": None, "seq": 0}

    def _channel(self, name: str) -> Json:
        members = len(self._member_members(name)["members"])
        return channel(name, joined=covers_any(self.joined, name), members=members) | {"seq": 0, "backstop": {}}

    def _channel_info(self, channel: str) -> Json:
        return self._channel(check_channel(channel))

    def _member_list(self) -> Json:
        return {"memberships": [{"pattern": each, "joined": 1} for each in self.joined], "seq": 0}

    def _member_members(self, channel: str) -> Json:
        inside = [each for each in self.world.agents if covers_any(self.world.boxes[each.id].joined, channel)]
        return {"members": [{"id": each.id, "name": each.name} for each in inside], "next": None, "seq": 0}

    def _attention_get(self) -> Json:
        return {"standing": self.box.attention, "number": 1, "running": None}

    def _attention_set(self, mode: str | None = None, channels: dict[str, str] | None = None) -> Json:
        channels = channels or {}
        self.asked.append(("attention", mode, channels))
        before = self.box.attention
        self.box.attention = {"mode": mode or before["mode"], "channels": before["channels"] | channels}
        return self._attention_get()

    def _dead_list(self) -> Json:
        dead = [each for each in self.world.tasks if each.state == "dead" and each.asker.id == self.id]
        rows = [
            DeadTaskRow(
                seq=each.seq,
                id=each.message.id,
                role=each.role,
                asker=each.asker.id,
                asker_name=each.asker.name,
                cause="failed",
                attempts=each.attempt,
                reasons=tuple(each.reasons),
                workers=(),
                at="",
            )
            for each in dead
        ]
        return {"dead": rows, "more": False, "mail": []}

    async def trace(self, sent: Receipt | str) -> HostTrace:
        self._needs_the_space()
        mid = sent if isinstance(sent, str) else sent.id
        row = self.box.outbox.get(mid)
        read = row and row["kind"] == "dm" and (await self.receipt(mid, "read", None, 0)).stage == "read"
        receipts = (TracedReceipt(kind="dm", sender=self.id, stage=ReceiptStage.READ, stages={}),) if read else ()
        return HostTrace(mid, (), receipts, {}, msgspec.convert(row, OutboxEntry | None))

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
        del looping, silence
        self._needs_the_space()
        if role not in self.box.access["roles"]:
            raise DeniedError(f"{self.name} does not hold the role {role}")

        def take() -> Task | None:
            held = self.box.holds
            if held is None:
                held = next((each for each in self.world.tasks if (each.role, each.state) == (role, "queued")), None)
                if held is None:
                    return None
                self.box.holds, held.state, held.attempt = held, "claimed", held.attempt + 1
            elif held.holder is not self and not take_over:
                return None
            held.holder = self
            return held

        found = await self.world.until(take, wait)
        return None if found is None else self._job(found)

    def _job(self, task: Task) -> Job:
        job = self._jobs.get(task.message.id)
        if job is None or job.attempt != task.attempt:
            job = Job(task.seq, task.role, task.attempt, time.time() + 600, task.message, task.asker, self)
            self._jobs[task.message.id] = job
        return job

    async def claimed(self, message_id: str) -> Job:
        held = self.box.holds
        if held is None or held.holder is not self or held.message.id != message_id:
            raise UnknownMessage(f"this session holds no task {message_id}")
        return self._job(held)

    def _task_held(self) -> Json:
        held = self.box.holds
        if held is None or held.holder is None:
            return {"held": None}
        about = {"id": held.message.id, "role": held.role, "attempt": held.attempt}
        return {"held": about | {"mine": held.holder is self, "program": "mcp", "silent": held.holder.silent}}

    async def result(self, message_id: str, seq: int | None, wait: float) -> TaskResult:
        del seq
        self._needs_the_space()
        found = [each for each in self.world.tasks if (each.message.id, each.asker.id) == (message_id, self.id)]
        if not found:
            return TaskResult("unknown")
        (task,) = found
        await self.world.until(lambda: task.result, wait)
        return task.result or TaskResult(task.state, attempt=task.attempt, reasons=tuple(task.reasons))

    async def finish(self, job: Job, text: str | None, data: Any) -> None:
        task = await self._ending(job)
        said = wire.compose(Sender(self.id, self.name), text=text or "", **({} if data is None else {"data": data}))
        task.state, task.result = "done", TaskResult("done", said, self.id, self.name, None, task.attempt)
        self._end(job, ("done", job.message.id, text, data))

    async def give_up(self, job: Job, reason: str, *, retry: bool, untouched: bool = False) -> str:
        task = await self._ending(job)
        task.state = "queued" if retry else "dead"
        task.attempt -= untouched
        if not untouched:
            task.reasons.append(f"attempt {task.attempt}: {reason}")
        if not retry:
            tried = tuple(task.reasons)
            task.result = TaskResult("dead", cause="failed", attempt=task.attempt, reasons=tried)
        self._end(job, ("fail", job.message.id, reason, retry))
        return task.state

    async def _ending(self, job: Job) -> Task:
        if job.settled:
            raise UsageError(f"task {job.seq} has already been finished or given back")
        await self.claimed(job.message.id)
        assert self.box.holds is not None
        return self.box.holds

    def _end(self, job: Job, how: tuple[Any, ...]) -> None:
        job._ended.set()
        self._jobs.pop(job.message.id, None)
        assert self.box.holds is not None
        self.box.holds.holder = None
        self.box.holds = None
        self.ended.append(how)
        self.world.change()


FakeAgent = Agent[FakeTransport]


def fake_agent() -> FakeAgent:
    """bob of a space of his own, with ada in it."""
    return Agent(FakeTransport())


def _newest_first(row: Json) -> int:
    return -int(row["seq"])


def _outbox_row(number: int, message_id: str, kind: str, to: str) -> Json:
    return {
        "row": number,
        "id": message_id,
        "kind": kind,
        "to": to,
        "state": "pending",
        "stage": "stored",
        "seq": None,
        "attempts": 1,
        "accepted": NOW,
        "gives_up": NOW,
        "ended": None,
        "code": None,
        "words": None,
        "cancel_asked": False,
        "late_seq": None,
        "supersedes": None,
        "superseded_by": None,
    }
