"""What this agent says of itself: a beat on every change, and one now and then while it is connected.

Beats are published without a reply, so nobody waits for the steward. A graceful end beats `offline`; whoever ends
otherwise is found offline by its silence. A session that does not attend beats nothing: a silent observer, or mail that
is only kept for somebody. Attention set here decides what wakes this agent (`intake.py`). The
attention that the steward keeps for the agent is taken over when a session starts and whenever it changes: of the two,
the later word holds.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec

from tidings.client.connection import AgentConnection
from tidings.client.roster import Roster
from tidings.contract.agents import BeatRequest
from tidings.errors import TidingsError, UsageError
from tidings.nats.errors import NatsError
from tidings.rpc.control import encode_request
from tidings.util.task_ends import end_tasks
from tidings.wire.names import unmarked
from tidings.wire.roster import Attention, Level, Mode, Status

#: beats per time to live, rounded down: two may be lost before the steward takes us for offline
BEATS_PER_TTL = 2.5
#: changes closer together than this share a beat
GATHER = 0.05


class Presence:
    """`attending`: others see this session. `every`: seconds between beats, if more often than the steward asks for."""

    def __init__(
        self,
        connection: AgentConnection,
        roster: Roster,
        session: str,
        *,
        attending: bool = True,
        every: float | None = None,
    ) -> None:
        self.connection = connection
        self.roster = roster
        self.beats = 0
        self.attending, self._every = attending, every
        self._leaving = False
        self._said = BeatRequest(session=session, status="idle")
        self.attention: Attention = self._said.attention
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._chosen_here = False
        roster.on_snapshot.append(self._changed.set)
        roster.on_kept_attention.append(self._stand)

    @property
    def said(self) -> BeatRequest:
        """What the last or next beat says."""
        return self._said

    def attend(self, attending: bool) -> None:
        """Be seen by others from now on, or no longer; receiving and sending go on either way."""
        if attending != self.attending:
            self.attending, self._leaving = attending, not attending
            self._changed.set()

    def set_status(self, status: Status, activity: str | None = None) -> None:
        self._say(status=status, activity=activity)

    def set_model(self, model: str | None) -> None:
        self._say(model=model)

    def _stand(self, attention: Attention, number: int) -> None:
        """The steward keeps this for us. What it kept before this session began is no answer to what was said here."""
        if number and not self._chosen_here:
            self._say(attention=msgspec.to_builtins(attention))
        self._chosen_here = False  # from now on a higher number is a later word

    def set_attention(self, mode: Mode) -> None:
        self._chosen_here = self._chosen_here or not self.roster.loaded
        self._say(attention={"mode": mode, "channels": self.attention.channels})

    def set_channel_attention(self, pattern: str, level: Level) -> None:
        """How loud one channel or pattern is; `normal` forgets it."""
        self._chosen_here, pattern = self._chosen_here or not self.roster.loaded, unmarked(pattern)
        channels = {key: value for key, value in self.attention.channels.items() if key != pattern}
        if level != "normal" or any("*" in key or ">" in key for key in channels):
            channels[pattern] = level
        self._say(attention={"mode": self.attention.mode, "channels": channels})

    def _say(self, **changes: Any) -> None:
        try:
            said = msgspec.convert(msgspec.to_builtins(self._said) | changes, BeatRequest)
        except (msgspec.ValidationError, ValueError) as error:
            raise UsageError(f"this cannot be said of an agent: {error}") from error
        if said != self._said:
            self._said, self.attention = said, said.attention
            self._changed.set()

    # --- beating ---

    def start(self) -> None:
        self._task = asyncio.create_task(self._beat_on(), name=f"presence of {self.connection.identity.name}")

    async def _beat_on(self) -> None:
        self._changed.set()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(self._every or self.roster.ttl, self.roster.ttl / BEATS_PER_TTL)):
                    await self._changed.wait()
            self._changed.clear()
            if self.attending:
                await self._beat(self._said)
            elif self._leaving:
                self._leaving = False
                await self._beat_offline()
            await asyncio.sleep(GATHER)

    async def _beat_offline(self) -> None:
        await self._beat(msgspec.structs.replace(self._said, status="offline", activity=None))

    async def _beat(self, said: BeatRequest) -> None:
        subject = self.connection.identity.subjects.control("presence", self.connection.identity.id)
        # Boundary: while the connection is being rebuilt nobody hears a beat; the next session starts with one.
        with suppress(TidingsError, NatsError, OSError):
            await self.connection.current.publish(subject, encode_request(said, None))
            self.beats += 1

    async def close(self) -> None:
        """Say that we are gone, if anybody hears it."""
        if self._task is None:
            return
        await end_tasks([self._task])
        if not (self.attending or self._leaving):
            return
        await self._beat_offline()
        with suppress(TidingsError, NatsError, OSError, TimeoutError):
            await self.connection.current.flush(timeout=1)
