"""Server URLs: `nats://host:port`, `tls://host:port`, `wss://host:port/path`, a bare `host:port`, or several of them.

A `tls://` or `wss://` server is never spoken to in plain. Whom to trust is part of the address, so whoever has it needs
nothing else:

    tls://192.0.2.7:4222?authority=<base64 of a certificate>&name=main.tidings.internal

The server must show a certificate of that name, signed by that authority and by no other; then the handshake comes
before the server has said anything. Without an authority the system's roots decide, the name is the host's, and the
handshake follows the greeting as NATS servers commonly do it, unless `handshake=first` asks for the other order.
`wss://` is the same inside of a websocket, for networks that let nothing else out; `ws://` is not encrypted and only
for addresses of this machine.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs, urlencode, urlsplit

from tidings.nats.errors import InvalidAddress

if TYPE_CHECKING:
    import ssl

#: scheme -> its port, if an address names none
DEFAULT_PORTS = {"nats": 4222, "tls": 4222, "ws": 80, "wss": 443}
ENCRYPTED, WEBSOCKET = ("tls", "wss"), ("ws", "wss")
QUERY = ("authority", "name", "handshake")
_PATH = re.compile(r"[!-~]*")


class Address(NamedTuple):
    host: str
    port: int
    #: `tls://`: never spoken to in plain
    tls: bool = False
    #: whose certificates are accepted, in DER, one or several after each other; without, those of the system's roots
    authority: bytes | None = None
    #: what the certificate must be for; without, the host
    name: str = ""
    #: does the handshake come before the greeting?
    tls_first: bool = False
    #: `ws://`, `wss://`: inside of a websocket that is asked for under this path
    websocket: bool = False
    path: str = ""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Where it is, for people: without what it trusts."""
        scheme = (("nats", "ws"), ("tls", "wss"))[self.tls][self.websocket]
        return f"{scheme}://{self}{self.path}"

    @property
    def full_url(self) -> str:
        """The same with whom it trusts: `parse_address` reads it again."""
        said = {}
        if self.authority is not None:
            said["authority"] = base64.urlsafe_b64encode(self.authority).decode().rstrip("=")
        if self.name:
            said["name"] = self.name
        if self.tls_first and self.authority is None and not self.websocket:
            said["handshake"] = "first"
        return self.url + (f"?{urlencode(said)}" if said else "")

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
        # what is trusted may be the server's own certificate: whoever was invited knows no more at first
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            context.load_verify_locations(cadata=self.authority)
        except ssl.SSLError as error:
            raise InvalidAddress(f"the authority of {self} is not a certificate: {error}") from error
        return context


def parse_address(url: str) -> Address:
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        port = parts.port or DEFAULT_PORTS.get(parts.scheme, 0)
        asked = (
            parse_qs(parts.query, strict_parsing=True, keep_blank_values=True, max_num_fields=8) if parts.query else {}
        )
        der = _decoded(asked.pop("authority")[0]) if "authority" in asked else None
    except ValueError as error:
        raise InvalidAddress(f"{url!r} is not an address of a NATS server: {error}") from error
    scheme, host = parts.scheme, parts.hostname
    if scheme not in DEFAULT_PORTS or not host or not _PATH.fullmatch(parts.path):
        raise InvalidAddress(f"{url!r} is not an address of a NATS server: nats://, tls:// or wss://host:port")
    websocket = scheme in WEBSOCKET
    name, order = asked.pop("name", [""])[0], asked.pop("handshake", ["first" if der or scheme == "wss" else ""])[0]
    if asked or order not in ("", "first") or (parts.query and scheme not in ENCRYPTED):
        raise InvalidAddress(f"{scheme}://{parts.netloc}: after `?` a tls:// address may say {', '.join(QUERY)}")
    if scheme == "ws" and not _is_here(host):
        raise InvalidAddress(f"ws://{parts.netloc} is not encrypted, and not an address of this machine: wss://")
    path = parts.path if websocket else ""
    return Address(host, port, scheme in ENCRYPTED, der, name, order == "first", websocket, path)


def _is_here(host: str) -> bool:
    from ipaddress import ip_address  # few addresses need it, and every command reads this module

    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


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
        raise InvalidAddress("no NATS server is named")
    return found


def nearest(host: str) -> str:
    """How its own machine reaches a server that listens there."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  compared, not listened on


def trusting(host: str, port: int, authority: bytes, name: str) -> str:
    """The URL of a server that must show a certificate of this name by this authority."""
    return Address(host, port, True, authority, name, True).full_url


def with_authority(servers: str, authority: bytes) -> str:
    """The same servers, where whoever trusted an authority of its own trusts these instead."""
    return ",".join(
        each._replace(authority=authority).full_url if each.authority else url.strip()
        for url, each in ((url, parse_address(url.strip())) for url in servers.split(",") if url.strip())
    )


def named(host: str, port: int, name: str) -> str:
    """The URL of a server that must show a certificate of this name by somebody the system trusts, handshake first."""
    return Address(host, port, True, None, name, True).full_url


def in_websocket(url: str) -> str:
    """The URL of a server with the same trust, spoken to inside of a websocket."""
    return parse_address(url)._replace(tls=True, tls_first=True, websocket=True).full_url


def moved(before: str, urls: Sequence[str]) -> str:
    """The same space at other addresses. Of a URL that does not say whom to trust, scheme, host and port count: it is
    trusted as before, and never spoken to in plain if it was not."""
    known = parse_addresses(before)
    each = [url.strip() for text in urls for url in text.split(",") if url.strip()]
    if not each:
        raise InvalidAddress("no NATS server is named")
    return ",".join(_moved(known, url) for url in each)


def _moved(known: Sequence[Address], url: str) -> str:
    given = parse_address(url)
    websocket = given.websocket if "://" in url else known[0].websocket
    same = [address for address in known if address.websocket == websocket]
    like = (same or known)[0]
    if "?" in url or ("://" in url and not like.tls):
        return url
    has_port = urlsplit(url if "://" in url else f"nats://{url}").port is not None
    port = given.port if has_port else like.port if same else DEFAULT_PORTS["wss" if websocket else "tls"]
    path = given.path or (like.path if websocket else "")
    first = like.tls_first or websocket
    return like._replace(host=given.host, port=port, tls_first=first, websocket=websocket, path=path).full_url


def shown(servers: str) -> str:
    """The same addresses for people: without what they trust. What is no address is shown as it is."""
    try:
        return ",".join(address.url for address in parse_addresses(servers))
    except InvalidAddress:
        return servers
