"""A worker's connection to one broker: opened when it is first needed, opened again when it was closed for good.

A broker that is away is looked for by the connection itself; what is asked meanwhile says that nobody answers. A
credential that is refused closes it, and the next question tries again with what the file says then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from tidings.errors import BrokerUnreachable, OutcomeUnknown, StewardUnreachable
from tidings.nats.client import Connection, close_quietly, connect
from tidings.nats.core import Msg
from tidings.nats.errors import NatsError, NoResponders, NotConnected
from tidings.nats.jwt import split_credentials
from tidings.util.private_files import check_private, read_private


class LinkConnection:
    """`on_open` hears of every connection that was opened, before anything is asked on it."""

    def __init__(
        self,
        url: str | Callable[[], str],
        creds: Path,
        *,
        name: str,
        on_open: Callable[[Connection], Awaitable[None]] | None = None,
        on_reconnected: Callable[[], None] = lambda: None,
        on_closed: Callable[[], None] = lambda: None,
        timeout: float = 5.0,
    ) -> None:
        self.creds, self.timeout = creds, timeout
        self._url, self._name = url, name
        self._on_open, self._on_reconnected, self._on_closed = on_open, on_reconnected, on_closed
        self._connection: Connection | None = None
        #: the user it was opened as
        self._as = ""
        #: whose credential the file held when it was last read, and which file that was
        self._user, self._read = "", (0, 0, 0)
        self._opening = asyncio.Lock()

    @property
    def user(self) -> str:
        """Whose credential it is. It is asked with every question, and read again only if the file is another one."""
        found = check_private(self.creds).stat()
        if (file := (found.st_ino, found.st_ctime_ns, found.st_size)) != self._read:
            self._user, self._read = split_credentials(read_private(self.creds))[1].id, file
        return self._user

    async def get(self) -> Connection:
        """The connection. `UnreachableError` and `AuthRevoked` say why there is none."""
        async with self._opening:
            user = self.user
            if self._connection is not None and self._as != user:
                # it would come back with the new key, and listen for answers where only the old one may
                before, self._connection = self._connection, None
                await close_quietly(before)
            if self._connection is None or self._connection.is_closed:
                opened = await connect(
                    self._url,
                    self.creds,
                    user,
                    name=self._name,
                    timeout=self.timeout,
                    on_reconnected=self._on_reconnected,
                    on_closed=self._on_closed,
                )
                try:
                    if self._on_open is not None:
                        await self._on_open(opened)
                except BaseException:
                    await close_quietly(opened)
                    raise
                self._connection, self._as = opened, user
            return self._connection

    async def ask(self, subject: str, payload: bytes, who: str, timeout: float | None = None) -> Msg:
        """One answer of a steward; `who` it is, for people."""
        timeout = timeout or self.timeout
        connection = await self.get()
        try:
            return await connection.request(subject, payload, timeout=timeout)
        except NoResponders as error:
            raise StewardUnreachable(f"the steward of {who} does not answer") from error
        except TimeoutError as error:
            raise OutcomeUnknown(f"the steward of {who} did not answer within {timeout:.0f} s") from error
        except NotConnected as error:
            raise BrokerUnreachable(f"the broker of {who} is away ({error})") from error
        except (NatsError, OSError) as error:
            raise BrokerUnreachable(f"the connection to {who} is gone ({error})") from error

    async def close(self) -> None:
        async with self._opening:
            connection, self._connection = self._connection, None
            if connection is not None:
                await close_quietly(connection)
