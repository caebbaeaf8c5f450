"""Three nats-servers that are one, as an administrator would run them: one operator, routes, JetStream, loopback.

    cluster = Cluster.of(config, folder)
    cluster.start()
    cluster.nodes[1].kill()

Each node is a `Broker`: it can be killed, stopped, and started again. `real_space(..., nodes=3)` puts a space on one.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tidings.errors import BrokerFailed
from tidings.server.config import BrokerConfig
from tidings.server.nats_server import Broker, free_port
from tidings_testing.partition import RouteNetwork

START_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class NodeConfig(BrokerConfig):
    """A node of a cluster: the same with routes to the others."""

    node: str = "n1"
    route_port: int = 0
    routes: tuple[int, ...] = ()
    #: where others are told to reach it, if not at its route port
    advertised: int = 0
    #: more lines of the administrator's
    more: str = ""

    @property
    def server_name(self) -> str:
        return self.node

    def render(self) -> str:
        if len(self.routes) == 1:
            return f"{BrokerConfig.render(self)}{self.more}"
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self.routes)
        listen = f'"127.0.0.1:{self.route_port}"'
        if self.advertised:
            listen += f', advertise: "127.0.0.1:{self.advertised}"'
        # super() without arguments does not work in a dataclass with slots
        return f"{BrokerConfig.render(self)}cluster {{ name: trio, listen: {listen}, routes: [{routes}] }}\n{self.more}"


class Cluster:
    """Nodes that know each other. `nodes` in the order of `urls`."""

    def __init__(self, nodes: Sequence[Broker]) -> None:
        self.nodes = list(nodes)

    @classmethod
    def of(
        cls,
        alone: BrokerConfig,
        folder: Path,
        count: int = 3,
        more: str = "",
        network: RouteNetwork | None = None,
    ) -> Cluster:
        """Nodes with the operator, the accounts and the limits of a broker that would be alone.

        With `network` they reach each other through it.
        """
        ports = tuple(free_port() for _ in range(count))
        routes, told = network.between(ports) if network else ([ports] * count, [0] * count)
        shared = {each.name: getattr(alone, each.name) for each in fields(BrokerConfig)}
        nodes = []
        for number, route in enumerate(ports, 1):
            home = folder / f"n{number}"
            home.mkdir(parents=True, exist_ok=True)
            shutil.copytree(alone.resolver, home / "resolver")
            own: dict[str, Any] = {
                "port": free_port(),
                "store": home / "js",
                "resolver": home / "resolver",
                "log_file": home / "log",
                "pid_file": home / "pid",
            }
            own |= {"routes": routes[number - 1], "advertised": told[number - 1]}
            config = NodeConfig(**(shared | own), node=f"n{number}", route_port=route, more=more)
            nodes.append(Broker(config, home / "nats.conf"))
        return cls(nodes)

    @property
    def urls(self) -> str:
        return ",".join(node.url for node in self.nodes)

    def node(self, name: str) -> Broker:
        """The node of that name, as JetStream says who leads."""
        return next(node for node in self.nodes if node.config.server_name == name)

    def start(self) -> None:
        """Start them together: none is ready before it has met another."""
        for node in self.nodes:
            node.spawn()
        deadline = time.monotonic() + START_SECONDS
        for node in self.nodes:
            while not node.is_ready():
                if time.monotonic() > deadline:
                    self.stop()
                    raise BrokerFailed(f"node {node.config.server_name} did not answer within {START_SECONDS:.0f} s")
                time.sleep(0.02)

    def stop(self) -> None:
        for node in self.nodes:
            if node.process is not None and node.alive:
                node.process.terminate()
        for node in self.nodes:
            node.stop()
