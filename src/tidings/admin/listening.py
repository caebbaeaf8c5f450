"""On which address other machines reach a space: `ADDR[:PORT]`, remembered in `space.toml` until another one is named.

What listens beyond loopback speaks TLS, so the first time the space becomes its own certificate authority.
"""

from __future__ import annotations

import base64
import re
import socket
from collections.abc import Sequence
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from tidings.admin.home import SpaceHome, SpaceInfo
from tidings.errors import UsageError
from tidings.nats.address import moved, nearest
from tidings.server.certificates import (
    authority_in,
    ensure_certificates,
    make_following,
    name_of,
    promote_following,
)
from tidings.server.nats_server import check_port, free_port
from tidings.util import failpoints
from tidings.util.private_files import locked

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
    with locked(home.admin_lock, f"listening of space {home.name}", wait=30):
        info = home.read_info()
        if wanted == OFF:
            lost = info.authority and not home.certificates.authority_key.exists()
            return home.update_info(listen="", **({"authority": ""} if lost else {}))
        listen, port = parse_listen(wanted) if wanted is not None else ListenAddress(info.listen, None)
        if not listen:
            return info
        if wanted:
            check_port(listen, port or info.port, info.name)  # before anything is remembered
        _have_certificates(home, info, certificate)
        return home.update_info(listen=listen, port=port or info.port)


def _have_certificates(home: SpaceHome, info: SpaceInfo, certificate: tuple[str, str] | None) -> None:
    """The one that is shown, and the space's own in any case."""
    if certificate is not None:
        info = home.update_info(**_given(certificate))
    elif info.certificate:
        info = home.update_info(**_given((info.certificate, info.certificate_key)))  # it may have been renewed
    known = base64.b64decode(info.authority) if info.authority else None
    if known is not None and authority_in(home.certificates.following) == known:
        promote_following(home.certificates)  # a change of authority was interrupted
    made = ensure_certificates(home.certificates, info.name, known=known)
    home.update_info(authority=base64.b64encode(made).decode())


def websocket_on(home: SpaceHome, wanted: str | None, certificate: tuple[str, str] | None = None) -> SpaceInfo:
    """The same for websockets, which have a port of their own. It is kept when they are `off`: addresses stay good."""
    with locked(home.admin_lock, f"listening of space {home.name}", wait=30):
        info = home.read_info()
        if wanted == OFF:
            return home.update_info(ws="")
        host, port = parse_listen(wanted) if wanted is not None else ListenAddress(info.ws, None)
        if not host:
            return info
        port = port or info.ws_port or free_port()
        if wanted:
            if port == info.port:
                raise UsageError(f"port {port} is the broker's own: websockets need another (--ws ADDR:PORT)")
            check_port(host, port, info.name, elsewhere="`tidings up --ws ADDR:PORT`")
        _have_certificates(home, info, certificate)
        return home.update_info(ws=host, ws_port=port)


def announce_authority(home: SpaceHome) -> SpaceInfo:
    """Make the authority that will take the place of this one. Whoever connects from now on learns to trust both."""
    with locked(home.admin_lock, f"another authority of space {home.name}", wait=30):
        info = _own_authority(home)
        following = make_following(home.certificates, info.name)
        return home.update_info(authority_next=base64.b64encode(following).decode())


def change_authority(home: SpaceHome) -> SpaceInfo:
    """Have it take its place: those who did not learn of it cannot reach us any more.

    Both are trusted until the broker can show a certificate of the new one: the same again finishes what was
    interrupted.
    """
    with locked(home.admin_lock, f"another authority of space {home.name}", wait=30):
        info = _own_authority(home)
        if not info.authority_next:
            raise UsageError("there is no other authority yet: `tidings keys rotate authority` makes one")
        if authority_in(home.certificates.following) == base64.b64decode(info.authority_next):
            info = home.update_info(authority=info.authority_next, authority_next=info.authority)
            failpoints.reach("authority.after_swap")
        _have_certificates(home, info, None)
        failpoints.reach("authority.after_certificates")
        return home.update_info(authority_next="")


def _own_authority(home: SpaceHome) -> SpaceInfo:
    info = home.read_info()
    if info.servers:
        raise UsageError(
            f"space {info.name} lives on a NATS that others run: whom to trust there is theirs to say, and to change"
        )
    if not info.authority or info.certificate:
        raise UsageError(
            f"space {info.name} is not its own authority: that begins with `tidings up --listen ADDR`, and a "
            "certificate of yours is renewed where you have it from"
        )
    return info


def _given(certificate: tuple[str, str]) -> dict[str, str]:
    path, key = certificate
    if path == OFF:
        return {"certificate": "", "certificate_key": "", "certificate_name": ""}
    name = name_of(Path(path), Path(key))
    return {"certificate": path, "certificate_key": key, "certificate_name": name}


def address_for(info: SpaceInfo, urls: Sequence[str]) -> str:
    """What an agent elsewhere is given: where the space listens, and behind it where it takes websockets. Of a URL that
    says nothing of whom to trust, host and port count."""
    if info.servers:
        return moved(info.servers, urls) if urls else info.servers
    if urls:
        known = [info.url_at(info.host), *([info.ws_url_at(nearest(info.ws))] if info.ws else [])]
        return moved(",".join(known), urls)
    found = [info.ws_url_at(_known_host(replace(info, listen=info.ws, port=info.ws_port), "wss"))] if info.ws else []
    if info.listen or not info.ws:
        found.insert(0, info.url_at(_known_host(info, "tls")))
    return ",".join(found)


def _known_host(info: SpaceInfo, scheme: str) -> str:
    host = public_host(info)
    if info.listen and ip_address(info.listen).is_unspecified and host == info.host:
        raise UsageError(
            f"this machine does not say by which address others reach it: `--url {scheme}://ADDRESS:{info.port}`"
        )
    return host


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
