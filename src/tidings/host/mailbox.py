"""One agent's inbox while no host runs: the file of the host, opened in its place and received into.

    with held_mail(home):                          nobody else has host.db open, and no host starts meanwhile
        async with open_mailbox(home, source) as mailbox: ...

There is one inbox, whoever fills it: what is shown and marked here is read through a host later, what a host that was
killed had kept is unread here, and the order of effects is the same (`receiving`): committed, then acknowledged. A host
that starts is not kept waiting: `is_wanted` says so, and the one who reads gives way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from tidings.admin.identity import Identity
from tidings.admin.settings import Settings
from tidings.client.agent import Agent
from tidings.client.direct_transport import DirectAgent, DirectTransport
from tidings.errors import AuthRevoked, HostRuns, SpaceBusy
from tidings.host import inbox as inbox_views
from tidings.host.agent_sessions import HeldNumber
from tidings.host.directory import names_in
from tidings.host.inbox import Bound, InboxRow, InboxStore, Wanted
from tidings.host.receiver import Receiver
from tidings.host.registry import Scope, Source, identity_of
from tidings.host.schema import SCHEMA
from tidings.util.database import Database
from tidings.util.failpoints import reach
from tidings.util.private_files import lock_holder, locked, private_dir

#: another reader is soon done
OTHERS_PATIENCE = 5.0
#: a host that was killed holds its locks until the kernel has taken it down
ENDING_PATIENCE = 1.0
#: a host that starts waits so long for whoever reads without it
HOST_PATIENCE = 20.0
TELL_PATIENCE = 2.0
#: a full disk is waited for so long; a host has more time
KEEP_PATIENCE = 5.0


def mail_lock(home: Path) -> Path:
    """Held by whoever has `host.db` open: the host, or a program that reads an inbox without one."""
    return home / "run" / "mail.lock"


def state_file(home: Path, scope: Scope) -> Path:
    """Where the endpoint of an agent keeps how far it read; what it holds is never ahead of the inbox."""
    folder = home / "run" / "host"
    private_dir(folder)
    return folder / f"{scope.space_id}.{scope.agent}.json"


def held_number(home: Path, scope: Scope) -> HeldNumber:
    """Of whoever receives for this agent in this home, with a host and without."""
    return HeldNumber(state_file(home, scope).with_suffix(".session"))


def bound_of(home: Path) -> Bound:
    """How much of one sender is kept, as the settings of this home say."""
    settings = Settings({"home": str(home)})
    rows, size = settings.number("inbox_rows"), settings.number("inbox_bytes")
    return Bound(rows=max(1, int(rows or 1)), bytes=int(size or 1))


@contextmanager
def held_mail(home: Path, wait: float = OTHERS_PATIENCE) -> Iterator[None]:
    """HostRuns if somebody else has it."""
    private_dir(home)
    private_dir(home / "run")
    lock = locked(mail_lock(home), "has the inbox open", wait=wait)
    try:
        lock.__enter__()
    except SpaceBusy as error:
        holder = (lock_holder(mail_lock(home)) or "another process").split(" (")[0]
        raise HostRuns(f"the inbox of {home} is open in {holder}: go through the host, or ask again soon") from error
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def is_wanted(home: Path) -> bool:
    """Does a host run, or wait to begin?"""
    return lock_holder(home / "run" / "host.lock") is not None


@asynccontextmanager
async def open_mailbox(home: Path, source: Source, bound: Bound | None = None) -> AsyncIterator[LocalInbox]:
    """The inbox of an agent. Needs no space: see `LocalInbox.receive`."""
    identity = await identity_of(source)
    database = await asyncio.to_thread(Database, home / "host.db", SCHEMA)
    try:
        yield LocalInbox(home, source, identity, await InboxStore.open(database, bound or bound_of(home)))
    finally:
        await asyncio.to_thread(database.close)


class LocalInbox:
    """See above. Made by `open_mailbox`."""

    def __init__(self, home: Path, source: Source, identity: Identity, inbox: InboxStore) -> None:
        self.home, self.identity, self.inbox = home, identity, inbox
        self.scope = Scope(identity.subjects.space, identity.space_id, identity.id, identity.name)
        self._mine = (self.scope.space_id, self.scope.agent)
        self._source = source
        self._changed = asyncio.Event()
        self._endpoint: DirectAgent | None = None
        self._receiver = Receiver(self.scope, inbox, self._changed.set, self._changed.set, KEEP_PATIENCE)

    @asynccontextmanager
    async def receive(self) -> AsyncIterator[DirectAgent]:
        """Take what was sent, as long as the block lasts; UnreachableError if the space cannot be reached.

        StoreError if something came that cannot be kept: it is not acknowledged, and comes again. AuthRevoked if the
        steward says so, though the broker lets the agent in.
        At the end senders are told what was read. Whom that does not reach is told by whoever receives next.
        """
        state = state_file(self.home, self.scope)
        await self._receiver.check_memory(state)
        endpoint = Agent(DirectTransport(lambda: identity_of(self._source), state=state, presence=False))
        endpoint.on("notice", self._receiver.keep_notice)
        endpoint.transport.on_session_number = held_number(self.home, self.scope).write
        async with endpoint:
            self._endpoint = endpoint
            await self._receiver.begin(endpoint)
            try:
                yield endpoint
                if isinstance(self._receiver.error, AuthRevoked):
                    raise self._receiver.error
                if self._receiver.unkept is not None:
                    raise self._receiver.unkept.error
                await self._until_told()
            finally:
                await self._receiver.end()

    async def _until_told(self) -> None:
        self._receiver.tell()
        deadline = asyncio.get_running_loop().time() + TELL_PATIENCE
        while (
            await self.inbox.read(inbox_views.receipts_to_tell, *self._mine)
            and asyncio.get_running_loop().time() < deadline
        ):
            await asyncio.sleep(0.02)

    @property
    def is_complete(self) -> bool:
        """Was every channel asked for what was missed? Else something may come any moment."""
        return self._receiver.followed.is_set()

    async def names(self) -> dict[str, str]:
        """Names of the agents of the space by their ids: as a host last saw them, and as they are now."""
        kept = await self.inbox.database.read(lambda c: names_in(c, self.scope.space_id))
        now = self._endpoint.transport.roster.agents() if self._endpoint is not None else []
        return kept | {each.id: each.name for each in now} | {self.scope.agent: self.scope.name}

    async def listed(self, wanted: Wanted) -> list[InboxRow]:
        return await self.inbox.read(inbox_views.listed, *self._mine, wanted)

    async def mark_read(self, rows: Sequence[int]) -> int:
        reach("mailbox.shown")
        count = await self.inbox.mark_read(*self._mine, rows)
        reach("mailbox.marked")
        return count

    async def delete(self, rows: Sequence[int]) -> int:
        return await self.inbox.delete(*self._mine, rows)

    async def news(self, seconds: float) -> None:
        """Until there may be more, or so long; raises what ended the receiving."""
        if self._receiver.error is not None:
            raise self._receiver.error
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()
