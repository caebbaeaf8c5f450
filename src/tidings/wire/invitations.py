"""The line that invites an agent, or a space to be linked: what a stranger needs to ask, in one text to paste.

    tidings:<space>@<host>:<port>#<base64url>

    1    version
    1    trust: 0 in plain, over loopback only; 1 the space's own authority; 2 the system's roots;
         16 more: by websocket; 32 more: the server greets before the handshake;
         64 more: for a link between two spaces, else for an agent
    32   seed of the invitation's key
    32   public key of the account that issued it
    4    when, in seconds since 1970
    4    for how many seconds it holds
    64   the account's signature of the invitation's token
    33   with trust 1: the public key of the authority (P-256, compressed)
    4    SHA-256 of everything before it, from the first letter of the line on: its first bytes

Numbers are big-endian. The token is not in it: both sides derive the same one (`server/grants.py`), so the
line stays short enough to paste. Whoever has the line may ask; what comes of it is sealed for the key that asked, and
that key proves with `acceptance` that it did.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import re
import struct
from dataclasses import dataclass
from enum import IntEnum

from tidings.errors import InvalidName, UsageError
from tidings.wire.names import check_space
from tidings.wire.signing import ACCOUNT, KeyPair, encode_public, key_of_seed, public_bytes, seed_bytes

VERSION = 1
#: what can be pasted anywhere
LONGEST = 300
SCHEME = "tidings:"
AUTHORITY_BYTES = 33
_FIXED = struct.Struct(">BB32s32sII64s")
_CHECK_BYTES = 4
_WEBSOCKET, _GREETS_FIRST, _FOR_LINK = 16, 32, 64
_LINE = re.compile(r"tidings:(?P<space>[^@#\s]+)@(?P<at>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})#")


class Trust(IntEnum):
    PLAIN = 0
    AUTHORITY = 1
    SYSTEM = 2


@dataclass(frozen=True, slots=True)
class InvitationLine:
    space: str
    host: str
    port: int
    key: KeyPair
    #: id of the account that issued it
    account: str
    issued: int
    holds: int
    signature: bytes
    trust: Trust
    #: public key of the authority, with `Trust.AUTHORITY`
    authority: bytes = b""
    #: is it spoken to inside of a websocket?
    websocket: bool = False
    #: does the server speak before TLS begins, as those that others run commonly do?
    greets_first: bool = False
    #: is it for a link, and not for an agent?
    for_link: bool = False

    @property
    def expires(self) -> int:
        return self.issued + self.holds

    def __str__(self) -> str:
        at = f"[{self.host}]" if ":" in self.host else self.host
        head = f"{SCHEME}{self.space}@{at}:{self.port}#"
        seed, account = seed_bytes(self.key), public_bytes(self.account)
        how = _WEBSOCKET * self.websocket | _GREETS_FIRST * self.greets_first | _FOR_LINK * self.for_link
        kind = self.trust | how
        fixed = _FIXED.pack(VERSION, kind, seed, account, self.issued, self.holds, self.signature)
        body = fixed + self.authority
        return head + base64.urlsafe_b64encode(body + _checksum(head, body)).decode().rstrip("=")


def parse_invitation(text: str) -> InvitationLine:
    """The line as it was pasted: also in quotes, or broken by a mail program. UsageError says what is wrong."""
    line = "".join(text.split()).strip("'\"`<>")
    found = _LINE.match(line)
    if found is None:
        raise UsageError("this is no invitation: one begins with tidings:SPACE@HOST:PORT# and is a single line")
    body = _body(found[0], line[found.end() :])
    version, kind, seed, account, issued, holds, signature = _FIXED.unpack_from(body)
    authority, trust = body[_FIXED.size :], kind & ~(_WEBSOCKET | _GREETS_FIRST | _FOR_LINK)
    how = bool(kind & _WEBSOCKET), bool(kind & _GREETS_FIRST), bool(kind & _FOR_LINK)
    if version != VERSION or trust not in list(Trust):
        raise UsageError(
            f"this invitation has version {version}.{trust}, and this Tidings reads {VERSION}: install a newer one"
        )
    if len(authority) != (AUTHORITY_BYTES if trust == Trust.AUTHORITY else 0) or not 1 <= int(found["port"]) <= 65_535:
        raise UsageError(_DAMAGED)
    try:
        space, host = check_space(found["space"]), found["at"].strip("[]")
        held = key_of_seed(seed), encode_public(ACCOUNT, account)
    except InvalidName as error:
        raise UsageError(f"this invitation is damaged: {error}") from error
    if trust == Trust.PLAIN and not is_loopback(host):
        raise UsageError(
            f"this invitation would speak to {host} in plain, which is for a space on this machine only: elsewhere a "
            "space listens with TLS (`tidings up --listen ADDR`)"
        )
    at = (space, host, int(found["port"]))
    return InvitationLine(*at, *held, issued, holds, signature, Trust(trust), authority, *how)


def wrong_kind(*, is_link: bool, for_link: bool) -> str | None:
    """Names the command that takes a line that was given to the other one."""
    if is_link and not for_link:
        return "this line links two spaces, and makes nobody an agent: `tidings link accept LINE`"
    if for_link and not is_link:
        return "this line invites an agent, and links no spaces: `tidings accept LINE`"
    return None


def check_kind(line: InvitationLine, *, for_link: bool) -> None:
    if why := wrong_kind(is_link=line.for_link, for_link=for_link):
        raise UsageError(why)


_DAMAGED = (
    "this invitation is damaged: something of it is missing or was changed; paste the whole line, or ask for another"
)


def _body(head: str, encoded: str) -> bytes:
    try:
        raw = base64.b64decode(encoded.replace("-", "+").replace("_", "/") + "=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise UsageError(_DAMAGED) from None
    body, check = raw[:-_CHECK_BYTES], raw[-_CHECK_BYTES:]
    if len(body) < _FIXED.size or check != _checksum(head, body):
        raise UsageError(_DAMAGED)
    return body


def _checksum(head: str, body: bytes) -> bytes:
    return hashlib.sha256(head.encode() + body).digest()[:_CHECK_BYTES]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def acceptance(space: str, invitation: str, agent: str, name: str) -> bytes:
    """What a new key signs to ask for its place. `name` is empty if the invitation is to say it."""
    return f"td1-accept\n{space}\n{invitation}\n{agent}\n{name}".encode()
