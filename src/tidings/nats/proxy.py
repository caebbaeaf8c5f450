"""An HTTP proxy on the way to a websocket, as the environment names it (`HTTPS_PROXY`, `NO_PROXY`). Without I/O.

It is asked for a tunnel (CONNECT) and sees nothing of what goes through: TLS begins inside.
"""

from __future__ import annotations

import base64
import re
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from tidings.nats.address import Address
from tidings.nats.errors import ProtocolError, Unwritable

#: more is no answer to CONNECT
MAX_ANSWER = 16_384
END = b"\r\n\r\n"
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: ([ -~]*))?\r\n")


class Proxy(NamedTuple):
    host: str
    port: int
    #: `name:password`, if it wants one
    login: str = ""

    def __str__(self) -> str:
        return str(Address(self.host, self.port))


def proxy_for(address: Address) -> Proxy | None:
    """The proxy by which this machine reaches an encrypted websocket, if the environment names one."""
    if not (address.websocket and address.tls):
        return None
    from urllib.request import getproxies, proxy_bypass  # 20 ms that few need

    named = getproxies()
    url = named.get("https") or named.get("all")
    if not url or proxy_bypass(str(address)):
        return None
    return parse_proxy(url)


def parse_proxy(url: str) -> Proxy:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        host, port = None, 0
    if not host or parts.scheme != "http":
        raise Unwritable("HTTPS_PROXY does not name a proxy that can be used: http://host:port")
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else ""
    return Proxy(host, port, login)


def tunnel_request(proxy: Proxy, address: Address) -> bytes:
    lines = [f"CONNECT {address} HTTP/1.1", f"Host: {address}"]
    if proxy.login:
        lines.append(f"Proxy-Authorization: Basic {base64.b64encode(proxy.login.encode()).decode()}")
    return "\r\n".join([*lines, "", ""]).encode()


def check_tunnel(proxy: Proxy, answer: bytes) -> None:
    """Does this answer open a tunnel?"""
    found = _STATUS.match(answer)
    if found is None or END not in answer:
        raise ProtocolError(f"the proxy {proxy} does not answer as a proxy does")
    if answer.partition(END)[2]:
        raise ProtocolError(f"the proxy {proxy} speaks where the server should")
    status, words = int(found[1]), (found[2] or b"").decode()
    if not 200 <= status < 300:
        raise ProtocolError(f"the proxy {proxy} answered {status} {words}".rstrip() + _advice(status))


def _advice(status: int) -> str:
    if status == 407:
        return ": it wants a password (HTTPS_PROXY=http://name:password@host:port)"
    return ": it lets nobody through to that address and port" if status == 403 else ""
