"""The network between the nodes of a cluster, which falls into parts and heals while every node runs.

    with route_network() as network:
        async with real_space(folder, nodes=3, network=network):
            network.part({0}, {1, 2})        # or silent=True: what is sent is taken and comes nowhere
            network.heal()

Every way from one node to another is a fault proxy of its own; clients of a node reach it as before. The proxies run on
a thread of their own, so that a test which waits for a process does not hold up the cluster.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TypeVar

from tidings_testing.proxy import FaultProxy, fault_proxy

T = TypeVar("T")


class RouteNetwork:
    """`ways` from each node to each other, by their places in the list of nodes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._stack = loop, AsyncExitStack()
        self.ways: dict[tuple[int, int], FaultProxy] = {}

    def between(self, ports: Sequence[int]) -> tuple[list[tuple[int, ...]], list[int]]:
        """For each node the ports at which it reaches all, and the one at which it says that others reach it.

        Nobody does: whoever hears of a node from a third one would go past the ways.
        """
        nodes = range(len(ports))
        for here in nodes:
            for there in nodes:
                if here != there:
                    self.ways[here, there] = self._run(self._open(ports[there]))
        told = [self._run(self._open(port)) for port in ports]
        for proxy in told:
            proxy.refuse = True
        reached = [tuple(ports[b] if a == b else self.ways[a, b].port for b in nodes) for a in nodes]
        return reached, [proxy.port for proxy in told]

    def part(self, *parts: Collection[int], silent: bool = False) -> None:
        """From now on nodes of different parts do not reach each other; `silent`: and are not told."""

        def sever() -> None:
            for (here, there), way in self.ways.items():
                if not any(here in part and there in part for part in parts):
                    way.black_hole, way.refuse = silent, not silent
                    if not silent:
                        way.cut()

        self._do(sever)

    def heal(self) -> None:
        """What was severed is there again, with new connections."""

        def mend() -> None:
            for way in self.ways.values():
                if way.black_hole or way.refuse:
                    way.black_hole = way.refuse = False
                    way.cut()

        self._do(mend)

    async def _open(self, port: int) -> FaultProxy:
        return await self._stack.enter_async_context(fault_proxy(port))

    def _do(self, act: Callable[[], None]) -> None:
        async def there() -> None:
            act()

        self._run(there())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def close(self) -> None:
        self._run(self._stack.aclose())


@contextmanager
def route_network() -> Iterator[RouteNetwork]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="routes", daemon=True)
    thread.start()
    network = RouteNetwork(loop)
    try:
        yield network
    finally:
        network.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
