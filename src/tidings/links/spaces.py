"""The spaces a worker is between, as it needs them: its own, and those that share something with it.

`NatsSpaces` reaches both over their brokers. A test gives the worker other ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tidings.admin.home import SpaceHome
from tidings.admin.link_peers import PeerAccess
from tidings.links.compare import PeerSide
from tidings.links.destination import LocalDestination, LocalLinks, LocalSpace
from tidings.links.directory_sync import AskedPeer
from tidings.links.mail_sync import LocalPost
from tidings.links.ports import Destination, Prepare, Source
from tidings.links.source import PeerSource
from tidings.links.task_sync import LocalQueue


class SharedLog(Source, PeerSide, AskedPeer, Protocol):
    """The log of another space, on a connection that is closed when the link ends."""

    async def close(self) -> None: ...


class WorkersSpace(LocalPost, LocalQueue, Protocol):
    """This space, as its steward answers its worker, and takes mail and tasks from it."""


class Spaces(Protocol):
    async def links(self) -> LocalLinks:
        """The link records in force here."""
        ...

    def source(self, access: PeerAccess, creds: Path, on_wake: Callable[[], None], prepare: Prepare) -> SharedLog: ...

    def destination(self, link: str) -> Destination: ...

    @property
    def here(self) -> WorkersSpace: ...

    async def close(self) -> None: ...


class NatsSpaces:
    def __init__(self, home: SpaceHome) -> None:
        self._local = LocalSpace(lambda: home.read_info().url, home.link_creds, home.name)

    async def links(self) -> LocalLinks:
        return await self._local.links()

    def source(self, access: PeerAccess, creds: Path, on_wake: Callable[[], None], prepare: Prepare) -> SharedLog:
        return PeerSource(access.url, creds, access.space, on_wake=on_wake, prepare=prepare)

    def destination(self, link: str) -> Destination:
        return LocalDestination(self._local, link)

    @property
    def here(self) -> WorkersSpace:
        return self._local

    async def close(self) -> None:
        await self._local.close()
