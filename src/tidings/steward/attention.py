"""Attention that outlives a session: kept by the steward for an agent, whichever of its programs set it.

`attention set` changes it and `attention get` shows it, to the agent itself and nobody else: channel names are in it.
Rows of the roster carry its number, so a running session learns that it changed, and a snapshot carries it, so a new
session starts with it. It is kept in one bounded value of the state bucket; losing it costs nobody a message.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from tidings.errors import ConflictError, UsageError
from tidings.steward.agent_handlers import access_of
from tidings.steward.requests import Request
from tidings.wire.roster import Attention, Count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidings.steward.service import Steward

log = logging.getLogger(__name__)
KEY = "roster.attention"
#: what all agents together may keep; the bucket also holds floors and beats
MAX_BYTES = 512 * 1024


class Standing(msgspec.Struct, frozen=True):
    """What an agent last said, and the number of that change: milliseconds, so that a later one is higher."""

    attention: Attention
    number: Count


class StandingAttention:
    """Every agent's standing attention, in memory and in the state bucket."""

    def __init__(self, steward: Steward) -> None:
        self.steward = steward
        self._by_owner: dict[str, Standing] = {}
        self._lock = asyncio.Lock()

    async def load(self) -> dict[str, int]:
        """Read what was kept. Answers the number of each agent."""
        entry = await self.steward.state.get(KEY)
        try:
            self._by_owner = msgspec.convert(entry.value if entry is not None else {}, dict[str, Standing])
        except (msgspec.ValidationError, ValueError) as error:  # a steward that serves matters more
            log.warning("kept attention cannot be read and is forgotten: %s", error)
        return {owner: each.number for owner, each in self._by_owner.items()}

    def of(self, owner: str) -> Standing | None:
        return self._by_owner.get(owner)

    async def set(self, owner: str, mode: str | None, levels: Mapping[str, str]) -> Standing:
        """Change what is named, keep it, and answer what holds now."""
        async with self._lock:
            before = self._by_owner.get(owner)
            number = max(time.time_ns() // 1_000_000, (before.number if before else 0) + 1)
            changed = Standing(changed_attention(before.attention if before else Attention(), mode, levels), number)
            rows = {key: value for key, value in self._by_owner.items() if self._is_agent(key)}
            await self._keep({**rows, owner: changed})
            self._by_owner = {**rows, owner: changed}
            return changed

    def _is_agent(self, owner: str) -> bool:
        return self.steward.active_access(owner) is not None

    async def _keep(self, rows: dict[str, Standing]) -> None:
        value = msgspec.to_builtins(rows)
        if len(msgspec.json.encode(value)) > MAX_BYTES:
            raise ConflictError("the attention of all agents together is too long to keep: name fewer channels")
        entry = await self.steward.state.get(KEY)
        await self.steward.state.put(KEY, value, entry.revision if entry else 0)


def changed_attention(before: Attention, mode: str | None, levels: Mapping[str, str]) -> Attention:
    """Attention with what was named changed. `normal` is forgotten, unless a wider pattern would speak instead."""
    kept = {pattern: level for pattern, level in before.channels.items() if pattern not in levels}
    wide = any("*" in pattern or ">" in pattern for pattern in (*kept, *levels))
    named = {pattern: level for pattern, level in levels.items() if level != "normal" or wide}
    try:
        return msgspec.convert({"mode": mode or before.mode, "channels": {**kept, **named}}, Attention)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"this is not an attention: {str(error)[:300]}") from error


def _answer(steward: Steward, request: Request) -> dict[str, Any]:
    standing = steward.roster.attention.of(request.sender)
    running = steward.roster.table.running(request.sender, but=request.optional("session", str) or "")
    return {
        "standing": msgspec.to_builtins(standing.attention) if standing else None,
        "number": standing.number if standing else 0,
        "running": msgspec.to_builtins(running.attention) if running else None,
    }


async def get_attention(steward: Steward, request: Request) -> dict[str, Any]:
    """The caller's standing attention, and what its running session says now, if another than `session` runs."""
    access_of(steward, request.sender)
    return _answer(steward, request)


async def set_attention(steward: Steward, request: Request) -> dict[str, Any]:
    """Change mode, levels of channels, or both."""
    access_of(steward, request.sender)
    mode, levels = request.optional("mode", str), request.optional("channels", dict) or {}
    if mode is None and not levels:
        raise UsageError("attention set needs `mode`, or `channels` with a level each")
    standing = await steward.roster.attention.set(request.sender, mode, levels)
    steward.roster.table.stand(request.sender, standing.number)
    return _answer(steward, request)
