"""A desk without a host: what the MCP server would be told, in memory, and everything that was asked of it.

`tests/integration/test_desk.py` walks it and a real one through one scene: it answers as that does.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from blocking_host import PastPage
from tidings.errors import HostUnreachable, IdReused, TidingsError, UnknownMessage
from tidings.mcp.desk import Event, Facts
from tidings.wire.ids import new_id

REFUSED = {"code": "denied", "words": "may not post\x1b[2J"}
NOT_YET: Facts = {
    "state": "queued",
    "text": "",
    "worker": None,
    "attempt": 0,
    "cause": None,
    "reasons": [],
    "message": None,
}
#: what only rows of the inbox have
NOT_OF_HISTORY = ("row", "wakes", "historical", "read")
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
        "wakes": True,
        "historical": False,
        "seq": row,
        "time": "2026-01-01T00:00:00+00:00",
        "read": None,
    }
    return plain | ({"kind": "channel"} if changed.get("channel") else {}) | changed


def channel(name: str, *, joined: bool = False, **changed: Any) -> Facts:
    return {"channel": name, "class": "durable", "replay": True, "members": 1, "joined": joined, "last": None} | changed


def agent(key: str, name: str, status: str = "idle", **changed: Any) -> Facts:
    return {"id": key, "name": name, "roles": [], "status": status, "activity": None, "last_seen": None} | changed


class FakeDesk:
    """bob's desk in the space main. `down` is what everything that needs the space raises."""

    space, agent, name = "main", BOB, "bob"

    def __init__(self) -> None:
        self.rows: list[Facts] = []
        self.sent: dict[str, Facts] = {}
        self.agents: list[Facts] = [
            agent(BOB, "bob", roles=["reviewer"]),
            agent(ADA, "ada", "working", activity="writes"),
        ]
        self.joined: list[str] = []
        #: what of the past is not there, or not shown
        self.gone, self.hidden = 0, False
        #: channels that are listed although nobody is in them
        self.listed: list[Facts] = []
        #: patterns that still cover what was left
        self.covered_by: list[str] = []
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
        if request.get("role"):
            self.results[request["id"]] = NOT_YET | {"id": request["id"]}
        return {"id": request["id"], "state": state, "stage": stage, "seq": None, "warnings": ()}

    def outbox(self, limit: int) -> list[Facts]:
        rows: list[Facts] = [{"id": each, "kind": "dm", "to": ADA, "state": "pending"} for each in self.sent]
        return rows[:limit]

    def ending(self, ending: str) -> list[str]:
        return [each for each in (*self.sent, *(str(row["id"]) for row in self.rows)) if each.endswith(ending)]

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
            if event.row is None or event.row > after:
                yield event

    def arrive(self, row: Facts) -> None:
        self.rows.append(row)
        self.stream.put(Event("message", row["row"], row))

    def from_ada(self, text: str, channel: str | None = None, role: str | None = None) -> str:
        """What ada says: to bob, in a channel, or to whoever holds a role."""
        if role is None:
            row = message(self.newest_row() + 1, text, channel=channel)
            self.arrive(row)
        else:
            row = {"id": new_id(), "seq": 1, "role": role, "attempt": 1, "deadline": None, "text": text}
            self.tasks.append(row | {"asker": {"id": ADA, "name": "ada"}})
        return str(row["id"])

    # --- the space ---

    def who(self) -> Facts:
        return {"agents": self.agents, "backstop": "", "fresh": self.down is None}

    def access(self) -> Facts:
        self._space()
        return {"roles": ["reviewer"], "read": ["general", "team.>"], "post": ["general"], "manage": []}

    def channels(self) -> list[Facts]:
        self._space()
        names = [each["channel"] for each in self.listed]
        return [*self.listed, *(channel(each, joined=True) for each in self.joined if each not in names)]

    def memberships(self) -> list[str]:
        self._space()
        return list(self.joined)

    def join(self, channel: str) -> Facts:
        self._space()
        self.joined.append(channel)
        return {"channel": channel, "state": "opened", "seq": 1, "durable": True, "reason": None, "cls": "durable"}

    def leave(self, channel: str) -> Facts:
        self._space()
        state = "left" if channel in self.joined else "absent"
        self.joined = [each for each in self.joined if each != channel]
        return {"state": state, "seq": 2, "still_covered_by": self.covered_by}

    def history(self, channel: str, limit: int, before: int | None) -> PastPage:
        self._space()
        found = [row for row in self.rows if row["channel"] == channel and (before is None or row["seq"] < before)]
        shown = [{name: row[name] for name in row if name not in NOT_OF_HISTORY} for row in found]
        page = sorted(shown, key=lambda row: -row["seq"])[:limit]
        return PastPage(page, gone=self.gone if len(page) < limit else 0, hidden=self.hidden)

    def trace(self, message_id: str) -> Facts:
        self._space()
        return {"id": message_id, "stored": [], "receipts": [], "names": {}, "outbox": self.sent.get(message_id)}

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
        task = self.tasks[0] if self.elsewhere else self.claimed
        told = {name: task[name] for name in ("id", "role", "attempt")} if task else {}
        whose = {"mine": not self.elsewhere, "program": "mcp", "silent": 40.2 if self.elsewhere else 0.0}
        return told | whose if told else None

    def show_life(self) -> Facts | None:
        self.asked.append(("life",))
        return self.held()

    def finish(self, task: str, text: str, data: Any) -> None:
        self._holds(task)
        self.claimed, self.tasks = None, self.tasks[1:]
        self.ended.append(("done", task, text, data))

    def fail(self, task: str, reason: str, *, retry: bool) -> Facts:
        self._holds(task)
        self.claimed = None
        self.ended.append(("fail", task, reason, retry))
        return {"id": task, "state": "queued" if retry else "dead"}

    def _holds(self, task: str) -> None:
        if self.claimed is None or self.claimed["id"] != task:
            raise UnknownMessage(f"this session holds no task {task}")

    def task(self, message_id: str, wait: float) -> Facts:
        return self.results[message_id]

    def close(self) -> None:
        self.closed.set()
        self.stream.put(None)
