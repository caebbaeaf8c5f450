"""Server URLs: `nats://host:port`, `tls://host:port`, a bare `host:port`, or several of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from tidings.nats.errors import Unwritable

DEFAULT_PORT = 4222


class Address(NamedTuple):
    host: str
    port: int
    #: `tls://`: never spoken to in plain
    tls: bool

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(url: str) -> Address:
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        port = parts.port or DEFAULT_PORT
    except ValueError as error:
        raise Unwritable(f"{url!r} is not an address of a NATS server: {error}") from error
    if parts.scheme not in ("nats", "tls") or not parts.hostname:
        raise Unwritable(f"{url!r} is not an address of a NATS server: nats://host:port or tls://host:port")
    return Address(parts.hostname, port, parts.scheme == "tls")


def parse_addresses(servers: str | Sequence[str]) -> list[Address]:
    """One URL, several in a list, or several in one text with commas between."""
    urls = servers.split(",") if isinstance(servers, str) else servers
    found = [parse_address(url.strip()) for url in urls if url.strip()]
    if not found:
        raise Unwritable("no NATS server is named")
    return found
