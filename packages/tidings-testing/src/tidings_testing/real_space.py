"""A real space in a directory of your choice: real nats-server, real accounts, real steward.

    async with real_space(tmp_path) as space:
        await space.add("ada", read=["general"], post=["general"])
        async with space.agent("ada") as ada:
            await ada.control.call(JoinRequest("general"))

The steward runs in this process, so a test can look at it; fault tests that kill it start it as a child instead.
Everything listens on loopback, on ports the kernel chose, and is gone when the block ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidings.admin.administration import Administrator, Granted, administer
from tidings.admin.agents import AgentFile
from tidings.admin.creation import broker_config, create_space
from tidings.admin.home import SpaceHome, SpaceInfo
from tidings.admin.listening import listen_on, websocket_on
from tidings.errors import OutcomeUnknown, UnreachableError
from tidings.nats import jwt
from tidings.nats.client import Connection, connect
from tidings.nats.errors import ApiError
from tidings.nats.jetstream import JetStream
from tidings.rpc.control import ControlClient
from tidings.server.keyring import Keyring
from tidings.server.nats_server import Broker
from tidings.steward.context import Intervals
from tidings.steward.service import Steward
from tidings.wire import signing
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import Subjects
from tidings_testing.cluster import Cluster
from tidings_testing.partition import RouteNetwork

DEFAULT_BUDGET = 64 * 1024 * 1024
#: quick enough for tests, slow enough for two busy cores
TEST_INTERVALS = Intervals(
    lease_ttl=1.0,
    gate=0.1,
    retention=0.2,
    marks=0.1,
    roster=0.05,
    roster_heartbeat=0.5,
    presence=2.5,
    mail=0.5,
    links=0.05,
    voids=0.5,
)


@dataclass
class AgentClient:
    """A raw client with an agent's credential: it may try anything, politely or not."""

    name: str
    id: str
    key: KeyPair
    connection: Connection
    control: ControlClient
    subjects: Subjects
    space_id: str
    #: what the broker complained about, in order
    complaints: list[str] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def post(self, channel: str, payload: bytes, **headers: str) -> dict[str, Any]:
        """Publish a signed chat and return the broker's acknowledgement."""
        import json

        signature = signing.sign(self.key, self.space_id, "chat", channel, payload)
        named = {"Td-Sig": signature, **{name.replace("_", "-"): value for name, value in headers.items()}}
        reply = await self.connection.request(self.subjects.chat(self.id, channel), payload, timeout=5, headers=named)
        return dict(json.loads(reply.data))

    async def refused(self, act: Callable[[], Any], *, within: float = 1.0) -> str | None:
        """Do something and return the broker's complaint about it, or None if it did not complain in time."""
        before = len(self.complaints)
        await act()
        await self.connection.flush()
        deadline = asyncio.get_running_loop().time() + within
        while len(self.complaints) == before and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.005)
        return self.complaints[before] if len(self.complaints) > before else None


class RealSpace:
    """A running space. `steward` is None when it was started without one."""

    def __init__(self, home: SpaceHome, info: SpaceInfo, broker: Broker, cluster: Cluster | None = None) -> None:
        self.home = home
        self.info = info
        #: its own, or the first node of its cluster
        self.broker = broker
        self.cluster = cluster
        self.subjects = info.subjects
        self.steward: Steward | None = None
        self._steward_task: asyncio.Task[None] | None = None

    # --- the steward in this process ---

    async def start_steward(self, intervals: Intervals = TEST_INTERVALS, *, after: str | None = None) -> Steward:
        steward = Steward(self.home, intervals=intervals)
        task = asyncio.create_task(steward.run(after=after))
        ready = asyncio.create_task(steward.ready.wait())
        try:
            await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if task.done():
            task.result()
        self.steward, self._steward_task = steward, task
        return steward

    async def stop_steward(self) -> None:
        """Stop it and let its failure, if it had one, be seen."""
        if self.steward is None or self._steward_task is None:
            return
        self.steward.stop()
        task, self.steward, self._steward_task = self._steward_task, None, None
        await asyncio.wait_for(task, 20)

    async def steward_ended(self, within: float = 20.0) -> BaseException | None:
        """Wait until the steward ends by itself; answers why."""
        assert self._steward_task is not None
        task, self.steward, self._steward_task = self._steward_task, None, None
        await asyncio.wait({task}, timeout=within)
        if not task.done():
            task.cancel()
            raise TimeoutError(f"the steward still runs after {within} s")
        return task.exception()

    # --- people and programs ---

    @asynccontextmanager
    async def administer(self) -> AsyncIterator[Administrator]:
        async with administer(self.home, "test") as admin:
            yield admin

    async def add(
        self,
        name: str,
        read: Iterable[str] = ("general",),
        post: Iterable[str] = ("general",),
        *,
        manage: Iterable[str] = (),
        roles: Iterable[str] = (),
    ) -> Granted:
        agent = AgentFile(name, read=tuple(read), post=tuple(post), manage=tuple(manage), roles=tuple(roles))
        async with self.administer() as admin:
            return await admin.add(agent)

    @asynccontextmanager
    async def agent(self, name: str, *, reconnect: bool = False) -> AsyncIterator[AgentClient]:
        """A raw connection with the credential of an agent that was added."""
        path = self.home.agent_creds(name)
        _, key = jwt.split_credentials(path.read_text())
        async with self._client(name, path, key, reconnect=reconnect) as client:
            yield client

    @asynccontextmanager
    async def _client(
        self, name: str, creds: Path | str, key: KeyPair, *, reconnect: bool
    ) -> AsyncIterator[AgentClient]:
        complaints: list[str] = []
        closed = asyncio.Event()

        def on_error(error: Exception) -> None:
            complaints.append(str(error).lower())

        connection = await connect(
            self.info.url, creds, key.id, name=name, reconnect=reconnect, on_error=on_error, on_closed=closed.set
        )
        control = ControlClient(connection, self.subjects, key.id)
        try:
            yield AgentClient(name, key.id, key, connection, control, self.subjects, self.info.id, complaints, closed)
        finally:
            await _close(connection)

    @asynccontextmanager
    async def core(self, url: str | None = None) -> AsyncIterator[JetStream]:
        """Everything in CORE: for looking, and for doing what only an operator could. `url`: of one of its nodes."""
        keyring = Keyring.load(self.home.keys)
        token, key = keyring.short_lived(keyring.core, "test")
        connection = await connect(
            url or self.info.url, jwt.credentials(token, key), key.id, name="test core", reconnect=False
        )
        try:
            yield JetStream(connection)
        finally:
            await _close(connection)

    async def restart_broker(self, *, kill: bool = False) -> None:
        self.broker.kill() if kill else self.broker.stop()
        self.broker.start()


async def _close(connection: Connection) -> None:
    with suppress(Exception):  # a broker that was killed under the client: nothing is left to close
        await asyncio.wait_for(connection.close(), 3)


@asynccontextmanager
async def real_space(
    root: Path,
    name: str = "main",
    *,
    budget: int = DEFAULT_BUDGET,
    steward: bool = True,
    intervals: Intervals = TEST_INTERVALS,
    open_space: bool = False,
    listen: str | None = None,
    ws: str | None = None,
    certificate: tuple[str, str] | None = None,
    nodes: int = 1,
    network: RouteNetwork | None = None,
) -> AsyncIterator[RealSpace]:
    """Create a space below `root`, start its broker and (unless told not to) its steward.

    `nodes`: three for a cluster, of which every stream has three replicas. `network`: through which its nodes reach
    each other.

    `listen`: the address on which others reach it; everybody speaks TLS to it then, with the space's own certificate or
    with the one that is given, and its key. `ws`: the same for websockets.
    """
    home = SpaceHome(root, name)
    info = create_space(home, port=None, open_space=open_space, budget=budget)
    if listen is not None:
        info = listen_on(home, listen, certificate)
    if ws is not None:
        info = websocket_on(home, ws, certificate)
    running = _on_cluster(home, info, nodes, network) if nodes > 1 else _on_broker(home, info)
    space = running[0]
    try:
        async with space.administer() as admin:
            await _provisioned(admin, patient=nodes > 1)
        if steward:
            await space.start_steward(intervals)
        yield space
        await space.stop_steward()
    finally:
        if space._steward_task is not None:
            space._steward_task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await space._steward_task
        running[1]()


def _on_broker(home: SpaceHome, info: SpaceInfo) -> tuple[RealSpace, Callable[[], None]]:
    broker = Broker(broker_config(home, info), home.run / "nats.conf")
    broker.start()
    return RealSpace(home, info, broker), broker.stop


def _on_cluster(
    home: SpaceHome, info: SpaceInfo, nodes: int, network: RouteNetwork | None
) -> tuple[RealSpace, Callable[[], None]]:
    cluster = Cluster.of(broker_config(home, info), home.home / "cluster", nodes, network=network)
    info = home.update_info(servers=cluster.urls, replicas=nodes)
    cluster.start()
    return RealSpace(home, info, cluster.nodes[0], cluster), cluster.stop


async def _provisioned(admin: Administrator, *, patient: bool) -> None:
    """Streams are there. A cluster that just started has nobody yet who could make them."""
    deadline = asyncio.get_running_loop().time() + 30
    while True:
        try:
            await admin.provision()
            return
        except (ApiError, OutcomeUnknown, UnreachableError):
            if not patient or asyncio.get_running_loop().time() > deadline:
                raise
        await asyncio.sleep(0.2)
