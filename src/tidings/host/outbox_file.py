"""The outbox of an agent, read from `host.db` while no host runs: what was handed over, and how far it had come.

It answers what a session answers (`outbox`, `outbox_row`) and changes nothing: what is to leave, be cancelled or be
sent again needs the host. One that starts meanwhile is in nobody's way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidings.client.message_json import to_json
from tidings.errors import UnknownMessage
from tidings.host import outbox_views
from tidings.host.outbox_views import OutboxRow, outbox_details, outbox_entry, paused_reason
from tidings.host.schema import SCHEMA
from tidings.util.database_snapshot import look

Json = dict[str, Any]
NEWEST = 2**62
WAITING = ("pending", "inflight")
NO_HOST = "no host runs: it leaves once one does, `tidings host up`"


class OutboxFile:
    """What the agent `name` (`agent` is its id) of a space handed to the host of `home`."""

    def __init__(self, home: Path, space: str, space_id: str, agent: str, name: str) -> None:
        self.path = home / "host.db"
        self._space, self._mine, self._name = space, (space_id, agent), name

    def outbox(self, state: str | None = None, limit: int = 50, before: int | None = None) -> list[Json]:
        """Newest first; `before`: rows below that one."""
        states, below = (state,) if state else (), before or NEWEST
        rows = look(self.path, SCHEMA, lambda c: outbox_views.newest(c, *self._mine, states, below, limit))
        return [to_json(outbox_entry(row, self._destination(row))) for row in rows]

    def outbox_row(self, message_id: str) -> Json:
        """One row, with `chain`: what it replaced and what replaced it."""
        row = look(self.path, SCHEMA, lambda c: outbox_views.find(c, *self._mine, message_id))
        if row is None:
            raise UnknownMessage(f"the outbox of {self._name} has no message {message_id}: list it to see what it has")
        waits = self._why_it_waits() if row.state in WAITING else []
        chain = look(self.path, SCHEMA, lambda c: outbox_views.chain(c, row.row))
        return to_json(outbox_details(row, self._destination(row), chain, waits))

    def _why_it_waits(self) -> list[str]:
        """What keeps a row here: a space that was held back stays so when a host runs again."""
        spaces = look(self.path, SCHEMA, outbox_views.spaces)
        held = (each for each in spaces if each.space == self._mine[0] and each.paused_at is not None)
        return [*(paused_reason(self._space, each.pause_reason) for each in held), NO_HOST]

    def _destination(self, row: OutboxRow) -> str | None:
        return look(self.path, SCHEMA, lambda c: outbox_views.named(c, row)) if row.kind == "dm" else None
