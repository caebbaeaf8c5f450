"""Server URLs: `nats://host:port`, `tls://host:port`, a bare `host:port`, or several of them.

A `tls://` server is never spoken to in plain. Whom to trust is part of the address, so whoever has it needs nothing
else:

    tls://192.0.2.7:4222?authority=<base64 of a certificate>&name=main.tidings.internal

The server must show a certificate of that name, signed by that authority and by no other; then the handshake comes
before the server has said anything. Without an authority the system's roots decide, the name is the host's, and the
handshake follows the greeting as NATS servers commonly do it, unless `handshake=first` asks for the other order.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs, urlencode, urlsplit

from tidings.nats.errors import Unwritable

if TYPE_CHECKING:
    import ssl

DEFAULT_PORT = 4222
QUERY = ("authority", "name", "handshake")


class Address(NamedTuple):
    host: str
    port: int
    #: `tls://`: never spoken to in plain
    tls: bool = False
    #: whose certificates are accepted, in DER; without, those of the system's roots
    authority: bytes | None = None
    #: what the certificate must be for; without, the host
    name: str = ""
    #: does the handshake come before the greeting?
    tls_first: bool = False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Where it is, for people: without what it trusts."""
        return f"{'tls' if self.tls else 'nats'}://{self}"

    @property
    def server_name(self) -> str:
        return self.name or self.host

    def context(self) -> ssl.SSLContext:
        """What a handshake with it must satisfy."""
        import ssl  # only where there is one: whoever asks for `tidings --help` does not wait for it

        if self.authority is None:
            return ssl.create_default_context()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # asks for a certificate and checks its name
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_verify_locations(cadata=self.authority)
        except ssl.SSLError as error:
            raise Unwritable(f"the authority of {self} is not a certificate: {error}") from error
        return context


def parse_address(url: str) -> Address:
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        port = parts.port or DEFAULT_PORT
        asked = (
            parse_qs(parts.query, strict_parsing=True, keep_blank_values=True, max_num_fields=8) if parts.query else {}
        )
        der = _decoded(asked.pop("authority")[0]) if "authority" in asked else None
    except ValueError as error:
        raise Unwritable(f"{url!r} is not an address of a NATS server: {error}") from error
    if parts.scheme not in ("nats", "tls") or not parts.hostname:
        raise Unwritable(f"{url!r} is not an address of a NATS server: nats://host:port or tls://host:port")
    name, order = asked.pop("name", [""])[0], asked.pop("handshake", ["first" if der else ""])[0]
    if asked or order not in ("", "first") or (parts.query and parts.scheme != "tls"):
        raise Unwritable(f"{parts.scheme}://{parts.netloc}: after `?` a tls:// address may say {', '.join(QUERY)}")
    return Address(parts.hostname, port, parts.scheme == "tls", der, name, order == "first")


def _decoded(authority: str) -> bytes:
    padded = authority.replace("-", "+").replace("_", "/") + "=" * (-len(authority) % 4)
    found = base64.b64decode(padded, validate=True)
    if not found:
        raise ValueError("its authority is empty")
    return found


def parse_addresses(servers: str | Sequence[str]) -> list[Address]:
    """One URL, several in a list, or several in one text with commas between."""
    urls = servers.split(",") if isinstance(servers, str) else servers
    found = [parse_address(url.strip()) for url in urls if url.strip()]
    if not found:
        raise Unwritable("no NATS server is named")
    return found


def nearest(host: str) -> str:
    """How its own machine reaches a server that listens there."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  compared, not listened on


def trusting(host: str, port: int, authority: bytes, name: str) -> str:
    """The URL of a server that must show a certificate of this name by this authority."""
    said = urlencode({"authority": base64.urlsafe_b64encode(authority).decode().rstrip("="), "name": name})
    return f"{Address(host, port, tls=True).url}?{said}"


def named(host: str, port: int, name: str) -> str:
    """The URL of a server that must show a certificate of this name by somebody the system trusts, handshake first."""
    return f"{Address(host, port, tls=True).url}?{urlencode({'name': name, 'handshake': 'first'})}"


def shown(servers: str) -> str:
    """The same addresses for people: without what they trust. What is no address is shown as it is."""
    try:
        return ",".join(address.url for address in parse_addresses(servers))
    except Unwritable:
        return servers
