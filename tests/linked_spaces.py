"""Links between real spaces: one is agreed, and the worker of the other space asks for what is shared."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tidings.admin.linking import Linked, Linker
from tidings.contract.links import LinkPageRequest
from tidings.links.source import read_page
from tidings.nats import jwt
from tidings.nats.client import Connection, connect
from tidings.rpc.control import ControlClient
from tidings.wire import message as wire_message
from tidings.wire import signing
from tidings.wire.links import LinkPage, Token
from tidings.wire.rulings import Link
from tidings.wire.signing import ACCOUNT, KeyPair
from tidings_testing.real_space import AgentClient, RealSpace

LINK = "abcdefghijkl"
#: a space that nobody runs
ELSEWHERE = KeyPair.generate(ACCOUNT).id


async def linked(
    space: RealSpace,
    link: str = LINK,
    /,
    *,
    origin: str = ELSEWHERE,
    shares: Iterable[str] = ("general",),
    make_peer: bool = True,
    **terms: Any,
) -> Linked:
    """Agree on a link, or change one."""
    record = Link(
        op="-",
        link=link,
        state="on",
        origin=origin,
        channels=terms.pop("channels", {}),
        shares=tuple(shares),
        **terms,
    )
    async with space.administer() as admin:
        return await Linker(admin).set(record, make_peer=make_peer)


async def unlinked(space: RealSpace, link: str = LINK) -> None:
    async with space.administer() as admin:
        await Linker(admin).end(link)


@dataclass
class PeerClient:
    """A raw connection of a linked space's worker."""

    id: str
    connection: Connection
    control: ControlClient
    space_id: str

    async def page(self, token: Token | None = None, **fields: Any) -> LinkPage:
        token = token or Token(space=self.space_id, epoch="", seq=0)
        asked = {"space": token.space, "epoch": token.epoch, "after": token.seq, "mark": token.mark, **fields}
        return read_page(await self.control.call(LinkPageRequest(**asked)))

    async def all_of(self, token: Token | None = None, **fields: Any) -> list[LinkPage]:
        """Pages to the end."""
        pages = [await self.page(token, **fields)]
        while pages[-1].more:
            pages.append(await self.page(pages[-1].through, **fields))
        return pages


@asynccontextmanager
async def peer_of(space: RealSpace, creds: str) -> AsyncIterator[PeerClient]:
    """As the worker whose credential this is."""
    _, key = jwt.split_credentials(creds)
    connection = await connect(space.info.url, creds, key.id, name="peer", reconnect=False)
    try:
        yield PeerClient(key.id, connection, ControlClient(connection, space.subjects, key.id), space.info.id)
    finally:
        await connection.close()


@asynccontextmanager
async def worker_of(space: RealSpace) -> AsyncIterator[ControlClient]:
    """As the space's own worker of links."""
    creds = space.home.link_creds.read_text()
    _, key = jwt.split_credentials(creds)
    connection = await connect(space.info.url, creds, key.id, name="worker", reconnect=False)
    try:
        yield ControlClient(connection, space.subjects, key.id)
    finally:
        await connection.close()


def text_of(agent: AgentClient, text: str) -> bytes:
    return wire_message.compose(wire_message.Sender(agent.id, agent.name), text=text).raw


async def say(agent: AgentClient, channel: str, *texts: str) -> list[int]:
    """Messages that readers take; answers their sequences."""
    return [(await agent.post(channel, text_of(agent, text)))["seq"] for text in texts]


def texts(pages: Iterable[LinkPage]) -> list[str]:
    records = [record for page in pages for record in page.records]
    return [wire_message.decode(record.payload).text for record in records]


def is_signed(record: Any) -> bool:
    return signing.verifies(record.signature, record.origin, "chat", record.sender, record.channel, record.payload)
