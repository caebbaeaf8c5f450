"""A desk without a host: what the MCP server would be told, in memory, and everything that was asked of it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tidings.errors import HostUnreachable, IdReused, TidingsError, UnknownMessage
from tidings.mcp.desk import Event, Facts

REFUSED = {"code": "denied", "words": "may not post\x1b[2J"}
ADA, BOB = "U" + "A" * 55, "U" + "B" * 55


def message(row: int, text: str, **changed: Any) -> Facts:
    plain: Facts = {
        "row": row,
        "id": f"0199a8b7-5f3e-7d21-9c64-{row:012x}",
        "kind": "direct",
        "channel": None,
        "from": {"id": ADA, "name": "ada"},
        "text": text,
        "parts": [{"kind": "text", "text": text}],
        "priority": "next",
        "reply_to": None,
        "context": None,
        "mentions_me": False,
        "historical": False,
        "seq": row,
        "time": "2026-01-01T00:00:00+00:00",
        "read": None,
    }
    return plain | ({"kind": "channel"} if changed.get("channel") else {}) | changed


class FakeDesk:
    """bob's desk in the space main. `down` is what everything that needs the space raises."""

    space, agent, name = "main", BOB, "bob"

    def __init__(self) -> None:
        self.rows: list[Facts] = []
        self.sent: dict[str, Facts] = {}
        self.agents: list[Facts] = [
            {"id": BOB, "name": "bob", "roles": ["reviewer"], "status": "idle"},
            {"id": ADA, "name": "ada", "roles": [], "status": "working", "activity": "writes"},
        ]
        self.listed: list[Facts] = [{"name": "general", "joined": True}]
        self.left: Facts = {"state": "closed", "still_covered_by": []}
        self.down: TidingsError | None = None
        self.tasks: list[Facts] = []
        self.claimed: Facts | None = None
        #: is the first task in the hands of another program of bob?
        self.elsewhere = False
        self.ended: list[tuple[Any, ...]] = []
        self.results: dict[str, Facts] = {}
        self.asked: list[tuple[Any, ...]] = []
        self.stream: queue.Queue[Event | TidingsError | None] = queue.Queue()
        self.followed: list[int] = []
        self.claiming = threading.Event()
        self.may_claim = threading.Event()
        self.may_claim.set()
        self.closed = threading.Event()

    def _space(self) -> None:
        if self.down is not None:
            raise self.down

    # --- mail ---

    def reachable(self) -> bool:
        return self.down is None

    def send(self, request: Mapping[str, Any], wait: float) -> Facts:
        self.asked.append(("send", dict(request), wait))
        if isinstance(self.down, HostUnreachable):
            raise self.down
        before = self.sent.setdefault(request["id"], dict(request))
        if before != dict(request):
            raise IdReused(f"{request['id']} was accepted before, for another message")
        stage = "stored" if self.down or not wait else "confirmed"
        state = "dead" if wait and request.get("channel") == "forbidden" else "pending"
        return {"id": request["id"], "state": state, "stage": stage, "seq": None, "warnings": ()}

    def outbox(self, limit: int) -> list[Facts]:
        rows: list[Facts] = [{"id": each, "kind": "dm", "to": ADA, "state": "pending"} for each in self.sent]
        return rows[:limit]

    def outbox_row(self, message_id: str) -> Facts:
        if message_id not in self.sent:
            raise UnknownMessage(f"the outbox has no message {message_id}")
        return {"id": message_id, "kind": "dm", "to": ADA, "state": "dead", **REFUSED}

    def inbox(self, *, unread: bool, limit: int) -> list[Facts]:
        found = [row for row in self.rows if not (unread and row["read"])]
        return sorted(found, key=lambda row: (row["kind"] != "direct", row["row"]))[:limit]

    def unread(self) -> Mapping[str, int]:
        kinds = [row["kind"] for row in self.rows if not row["read"]]
        return {kind: kinds.count(kind) for kind in ("direct", "channel", "notice")}

    def mark_read(self, rows: Sequence[int]) -> int:
        changed = [row for row in self.rows if row["row"] in rows and not row["read"]]
        for row in changed:
            row["read"] = "now"
        return len(changed)

    def thread(self, message_id: str) -> list[Facts]:
        return [row for row in self.rows if message_id in (row["id"], row["reply_to"])]

    def newest_row(self) -> int:
        return max((row["row"] for row in self.rows), default=0)

    def events(self, after: int) -> Iterator[Event]:
        self.followed.append(after)
        while (event := self.stream.get()) is not None:
            if isinstance(event, TidingsError):
                raise event
            yield event

    def arrive(self, row: Facts) -> None:
        self.rows.append(row)
        self.stream.put(Event("message", row["row"], row))

    # --- the space ---

    def who(self) -> Facts:
        return {"agents": self.agents, "backstop": "", "fresh": self.down is None}

    def access(self) -> Facts:
        self._space()
        return {"roles": ["reviewer"], "read": ["general", "team.>"], "post": ["general"], "manage": []}

    def channels(self) -> list[Facts]:
        self._space()
        return self.listed

    def join(self, channel: str) -> Facts:
        self._space()
        return {"channel": channel, "state": "opened"}

    def leave(self, channel: str) -> Facts:
        self._space()
        return self.left

    def history(self, channel: str, limit: int, before: int | None) -> list[Facts]:
        self._space()
        found = [row for row in self.rows if row["channel"] == channel and (before is None or row["seq"] < before)]
        return sorted(found, key=lambda row: -row["seq"])[:limit]

    def trace(self, message_id: str) -> Facts:
        self._space()
        return {"ok": True, "stored": [], "receipts": [], "outbox": self.sent.get(message_id)}

    def set_status(self, status: str, activity: str | None, model: str | None) -> None:
        self.asked.append(("status", status, activity, model))

    def set_attention(self, mode: str | None, channels: Mapping[str, str]) -> None:
        self.asked.append(("attention", mode, dict(channels)))

    # --- tasks ---

    def claim(self, role: str, wait: float, *, take_over: bool) -> Facts | None:
        self.claiming.set()
        assert self.may_claim.wait(10)
        self._space()
        if not self.tasks or (self.elsewhere and not take_over):
            return None
        self.elsewhere, self.claimed = False, self.tasks[0]
        return self.claimed

    def held(self) -> Facts | None:
        if not self.elsewhere:
            return self.claimed and self.claimed | {"mine": True, "program": "mcp", "silent": 0.0}
        return self.tasks[0] | {"mine": False, "program": "mcp", "silent": 40.2}

    def show_life(self) -> Facts | None:
        self.asked.append(("life",))
        return self.held()

    def finish(self, task: str, text: str, data: Any) -> None:
        self.claimed = None
        self.ended.append(("done", task, text, data))

    def fail(self, task: str, reason: str, *, retry: bool) -> Facts:
        if self.claimed is None or self.claimed["id"] != task:
            raise UnknownMessage(f"this session holds no task {task}")
        self.claimed = None
        self.ended.append(("fail", task, reason, retry))
        return {"state": "queued" if retry else "dead"}

    def task(self, message_id: str, wait: float) -> Facts:
        return self.results[message_id]

    def close(self) -> None:
        self.closed.set()
        self.stream.put(None)
