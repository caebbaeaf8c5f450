"""The links of a space as an endpoint knows them: what may come in over each, and since when.

A record that a link admitted is judged by the link record in force at its sequence, as everywhere. The steward tells
those (`space links`); it is asked when a record came that cannot be judged by what is known here, one question at a
time and not often. Roster and history say the sequence of the newest link record, so a link that was changed is known
to be so within a beat, and is asked for with the next record that came over one.

    in force up to `through`   judged for good
    after it, nothing changed  taken if the newest record known lets it in; else it is asked first
    a newer record is known of, or none was ever told   asked first

Whoever offers a record that cannot be judged yet offers it again: nothing is refused for want of an answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tidings.client.connection import AgentConnection
from tidings.contract.agents import LinksAnswer, LinksRequest, LinkVersionRow
from tidings.errors import OutcomeUnknown, StewardUnreachable, TidingsError, UnreachableError, WireError
from tidings.model.rulebook import Timeline
from tidings.nats.client import Connection
from tidings.util.task_ends import end_tasks
from tidings.wire.envelope import ClaimedOrigin
from tidings.wire.links import read_mail_origin
from tidings.wire.records import Fields
from tidings.wire.rulings import Link

log = logging.getLogger(__name__)

#: seconds between two questions, and after one that came to nothing
ASK_EVERY = 1.0
REFUSED_PAUSE = 10.0
PATIENCE = 5.0
#: versions of link records that are kept; a space has few
ROWS_KEPT = 10_000


class Judge:
    """Decides about one record; `is_open` if nobody can say yet."""

    __slots__ = ("_seq", "_table", "_time_ns", "is_open")

    def __init__(self, table: LinkTable, seq: int, time_ns: int) -> None:
        self._table, self._seq, self._time_ns = table, seq, time_ns
        self.is_open = False

    def __call__(self, asked: ClaimedOrigin) -> bool:
        verdict = self._table.judge(asked, self._seq, self._time_ns)
        self.is_open = verdict is None
        return bool(verdict)


class LinkTable:
    """What links let in, for one endpoint."""

    def __init__(self, connection: AgentConnection) -> None:
        self.connection = connection
        #: questions that were asked
        self.asked = 0
        #: hear that more is known than before
        self.on_learned: list[Callable[[], None]] = []
        self._links: dict[str, Timeline[Link]] = {}
        #: no link record lies at or below this but those that are known; -1: nothing is known
        self._through = -1
        #: where the log of that answer began
        self._floor = 0
        #: sequence of the newest link record that is known, and whether another one is known of
        self._newest = 0
        self._is_old = False
        self._token: Any = None
        self._may_ask = 0.0
        self._question: asyncio.Task[TidingsError | None] | None = None
        self._wanting: asyncio.Task[None] | None = None
        self._wanted = 0
        self._epoch = ""
        connection.on_session(self._on_session)

    # --- judging ---

    def judge(self, asked: ClaimedOrigin, seq: int, time_ns: int) -> bool | None:
        """May the record at `seq` be taken for one of this channel? None: the steward is to be asked first."""
        if asked.agreed:
            return self._judge_mail(asked, time_ns)
        if self._through < 0 or (seq > self._through and self._is_old):
            return None
        record = self._at(asked.link, seq)
        ours = record and record.admits(asked.origin, asked.theirs, hops=asked.hops, time_ns=time_ns)
        if ours == asked.channel:
            return True
        return False if seq <= self._through else None

    def _judge_mail(self, asked: ClaimedOrigin, time_ns: int) -> bool | None:
        """A direct message or a task names the record it came by, which is as old as it or older."""
        if self._through < asked.agreed:
            return None
        record = self._at(asked.link, asked.agreed)
        if record is None or asked.agreed < self._floor:  # what was agreed there is not known any more
            return record is not None and record.origin == asked.origin
        return record.admits_to_agents(asked.kind, asked.origin, time_ns=time_ns)

    def space_name(self, link: str, origin: str, seq: int) -> str:
        """What the space of this id is called here; empty if no link record says it."""
        via = self._at(link, seq)
        if via is not None and via.origin == origin:
            return via.space
        named = (each.newest() for each in self._links.values())
        return next((each.space for each in named if each is not None and each.origin == origin and each.space), "")

    def _at(self, link: str, seq: int) -> Link | None:
        history = self._links.get(link)
        return history.at(seq) if history else None

    # --- what is known ---

    def hear(self, newest: int, head: int) -> None:
        """The newest link record of a log that ends at `head` is at `newest`."""
        if self._through < 0 or head < self._through:
            return
        if newest == self._newest:
            self._through = head
        else:
            self._is_old = True

    def follow_epoch(self, epoch: str) -> None:
        """The log may be another one: what was in force at a sequence, too."""
        if epoch and self._epoch and epoch != self._epoch:
            self._forget()
        self._epoch = epoch or self._epoch

    async def _on_session(self, _connection: Connection) -> None:
        if self.connection.token_used != self._token:  # with another access other channels are told
            self._token = self.connection.token_used
            self._forget()

    def _forget(self) -> None:
        self._through = -1

    # --- asking ---

    def want(self, seq: int) -> None:
        """Have it known what was in force at `seq`, for as long as that takes; `on_learned` tells."""
        self._wanted = max(self._wanted, seq)
        if self._wanting is None or self._wanting.done():
            self._wanting = asyncio.create_task(self._ask_until_known())

    async def _ask_until_known(self) -> None:
        while self._through < self._wanted:
            try:
                await self.connection.ready(30)
                await self.learn(self._wanted)
            except (UnreachableError, OutcomeUnknown):
                await asyncio.sleep(ASK_EVERY)

    async def learn(self, seq: int) -> None:
        """Know what was in force at `seq`, of a record that was seen. UnreachableError, OutcomeUnknown: not now."""
        if not await self.learn_record(seq):
            return
        self._through = max(self._through, seq)
        for hear in self.on_learned:
            hear()

    async def learn_origin(self, sender: str, fields: Fields, is_ours: Callable[[str], Awaitable[bool]]) -> None:
        """Know the link record that a direct message or a task came by, if it says that it came over a link. An agent
        of this space that says so of its own is refused (WireError) before anybody is asked about links. Raises as
        `learn`."""
        origin = read_mail_origin(fields)
        if origin is None:
            return
        if await is_ours(sender):
            raise WireError(f"{sender} is an agent of this space, and what it says comes over no link")
        await self.learn_record(origin.agreed)

    async def learn_record(self, seq: int) -> bool:
        """Ask for the link record that is said to be at `seq`, which need not be true; whether that was needed. Raises
        as `learn`."""
        if self._question is not None and self._through < seq:  # asked before that record was written, perhaps
            await asyncio.wait([self._question])
        if self._through >= seq:
            return False
        if self._question is None:
            self._question = asyncio.create_task(self._ask())
        question = self._question
        await asyncio.wait([question])
        error = question.result()
        if error is not None:
            raise error
        return True

    async def _ask(self) -> TidingsError | None:
        try:
            await asyncio.sleep(max(0.0, self._may_ask - time.monotonic()))
            self.asked += 1
            self._may_ask = time.monotonic() + ASK_EVERY
            await self._read()
        except (UnreachableError, OutcomeUnknown) as error:
            return error
        except TidingsError as error:
            self._may_ask = time.monotonic() + REFUSED_PAUSE
            log.warning("the links of %s are not known: %s", self.connection.identity.subjects.space, error)
            return StewardUnreachable(f"the links of this space are not known: {error}")
        finally:
            self._question = None
        return None

    async def _read(self) -> None:
        first = page = await self.connection.call(LinksRequest(), timeout=PATIENCE)
        rows = list(page.links)
        while page.next is not None and len(rows) < ROWS_KEPT:
            page = await self.connection.call(LinksRequest(page.next), timeout=PATIENCE)
            rows += page.links
        self._adopt(rows[:ROWS_KEPT], first)

    def _adopt(self, rows: list[LinkVersionRow], told: LinksAnswer) -> None:
        links: dict[str, Timeline[Link]] = {}
        for row in sorted(rows, key=lambda each: each.seq):
            # what held where the log begins counts below that too: a durable copy may be older than the log
            seq = row.seq if row.seq > told.floor else 0
            links.setdefault(row.link, Timeline()).put(seq, _link_record(row))
        self._links, self._newest = links, told.newest
        self._through, self._is_old = told.through, False
        self._floor = told.floor

    async def close(self) -> None:
        await end_tasks([self._wanting, self._question])


def _link_record(row: LinkVersionRow) -> Link:
    return Link(
        op="told",
        link=row.link,
        state=row.state,
        origin=row.origin,
        channels=row.channels,
        space=row.space,
        beyond=row.beyond,
        hops=row.hops,
        until=row.until,
        direct="on" if row.mail else "off",
        roster="on",
        tasks="on" if row.tasks else "off",
    )
