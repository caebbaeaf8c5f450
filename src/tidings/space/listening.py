"""On which address other machines reach a space: `ADDR[:PORT]`, remembered in `space.toml` until another one is named.

What listens beyond loopback speaks TLS, so the first time the space becomes its own certificate authority.
"""

from __future__ import annotations

import base64
import re
import socket
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from tidings.broker.certificates import ensure_certificates, name_of
from tidings.broker.private_files import locked
from tidings.broker.server import check_port
from tidings.errors import UsageError
from tidings.nats.address import parse_address
from tidings.space.home import SpaceHome, SpaceInfo

#: what takes listening back
OFF = "off"
_FORM = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<four>[0-9.]+))(?::(?P<port>[0-9]{1,5}))?")
#: no packet is sent there: the kernel only says by which address it would leave
_ELSEWHERE = ("192.0.2.1", 9)


class ListenAddress(NamedTuple):
    host: str
    port: int | None


def parse_listen(text: str) -> ListenAddress:
    """`192.0.2.7`, `0.0.0.0:4222`, `[::]:4222`. An address, not a name: what a name means may change."""
    found = _FORM.fullmatch(text.strip())
    try:
        host = str(ip_address((found["six"] or found["four"]) if found else ""))
        port = int(found["port"]) if found and found["port"] else None
    except ValueError:
        raise UsageError(
            f"{text!r} is no address to listen on: an IP address of this machine, such as 192.0.2.7, 0.0.0.0 for all "
            "of them, [::] with IPv6, and if you like a port behind it (192.0.2.7:4222)"
        ) from None
    if port is not None and not 1 <= port <= 65_535:
        raise UsageError(f"port {port} is not between 1 and 65535")
    return ListenAddress(host, port)


def listen_on(home: SpaceHome, wanted: str | None, certificate: tuple[str, str] | None = None) -> SpaceInfo:
    """Remember where the space listens (`off`: on loopback only) and have the certificates for it. None: as before.

    `certificate`: one of somebody else's and its key, or (`off`, "") for the space's own again.
    """
    info = home.read_info()
    with locked(home.admin_lock, f"listening of space {home.name}", wait=30):
        if wanted == OFF:
            lost = info.authority and not home.certificates.authority_key.exists()
            return home.update_info(listen="", **({"authority": ""} if lost else {}))
        listen, port = parse_listen(wanted) if wanted else ListenAddress(info.listen, None)
        if not listen:
            return info
        if wanted:
            check_port(listen, port or info.port, info.name)  # before anything is remembered
        if certificate is not None:
            info = home.update_info(**_given(certificate))
        elif info.certificate:
            info = home.update_info(**_given((info.certificate, info.certificate_key)))  # it may have been renewed
        known = base64.b64decode(info.authority) if info.authority else None
        authority = base64.b64encode(ensure_certificates(home.certificates, info.name, known=known)).decode()
        return home.update_info(listen=listen, port=port or info.port, authority=authority)


def _given(certificate: tuple[str, str]) -> dict[str, str]:
    path, key = certificate
    if path == OFF:
        return {"certificate": "", "certificate_key": "", "certificate_name": ""}
    name = name_of(Path(path), Path(key))
    return {"certificate": path, "certificate_key": key, "certificate_name": name}


def address_for(info: SpaceInfo, url: str | None) -> str:
    """What an agent elsewhere is given. Of a `url` that says nothing of whom to trust, host and port count."""
    if url is None:
        host = public_host(info)
        if info.listen and ip_address(info.listen).is_unspecified and host == info.host:
            raise UsageError(
                f"this machine does not say by which address others reach it: `--url tls://ADDRESS:{info.port}`"
            )
        return info.url_at(host)
    given = parse_address(url)
    if not info.listen or "?" in url:
        return url
    return replace(info, port=given.port).url_at(given.host)


def public_host(info: SpaceInfo) -> str:
    """What to give to other machines: the name of its certificate, the address it listens on, or the usual one."""
    if info.listen and info.certificate:
        return info.certificate_name
    if not info.listen or not ip_address(info.listen).is_unspecified:
        return info.host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
            return str(probe.getsockname()[0])
        except OSError:
            return info.host
