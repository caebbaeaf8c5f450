"""How a connection of the `nats` source or sink proves who it is, and whom it trusts.

One of: a credentials file (`creds`), the text of one (`credsSecret`), an nkey (`nkey`, the path of its seed), `user`
with `password`, a `token`, or a client certificate alone. Files are read wherever a connection is made, so on a cluster
every executor has them, and a file that was renewed is the one that counts. `passwordFile` and `tokenFile` keep a
secret out of the query altogether; given as an option it travels to the tasks inside the pickled source and is in no
plan, log or representation: Spark hides the values of options whose names say secret, password or token.

Options come from Spark as texts under names whose case does not count. A name nobody knows is refused with the names
that are known: a misspelt limit would otherwise be no limit.
"""

from __future__ import annotations

import base64
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidings.errors import (
    AuthRevoked,
    BrokerUnreachable,
    TidingsError,
    UnreachableError,
    UntrustedServer,
    UsageError,
)
from tidings.nats.address import parse_addresses, shown
from tidings.nats.core import Auth, anonymous
from tidings.nats.errors import AuthRefused
from tidings.nats.jetstream_blocking import WorkerConnection
from tidings.nats.jwt import signed, split_credentials
from tidings.wire.signing import KeyPair

#: what Spark adds for itself
SPARKS_OWN = frozenset({"path", "checkpointlocation", "queryname"})
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class GivenOptions:
    """What was given to one `part` ("source" or "sink"), all of it known."""

    def __init__(self, given: Mapping[str, str], known: Iterable[str], part: str) -> None:
        self._part = part
        self._given = {key.lower(): value for key, value in given.items() if key.lower() not in SPARKS_OWN}
        names = {name.lower(): name for name in known}
        if unknown := sorted(key for key in given if key.lower() in self._given.keys() - names.keys()):
            raise UsageError(
                f"the nats {part} has no option {', '.join(unknown)}: it has {', '.join(sorted(names.values()))}"
            )

    def text(self, *names: str) -> str | None:
        """The value under the first of these names that has one; they are the same option, so one is enough."""
        found = [name for name in names if self._given.get(name.lower())]
        if len(found) > 1:
            raise UsageError(f"the options {' and '.join(found)} say the same thing: give one of them")
        return self._given[found[0].lower()] if found else None

    def needed(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise UsageError(f"the nats {self._part} needs the option {name!r}")
        return value

    def number(self, *names: str, least: int = 1) -> int | None:
        text = self.text(*names)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise UsageError(f"option {names[0]} is {text!r}: a whole number from {least} on is needed")
        return int(text)

    def size(self, *names: str) -> int | None:
        """Bytes: a number, or one with k, m or g behind it."""
        text = self.text(*names)
        if text is None:
            return None
        digits, unit = (text[:-1], text[-1].lower()) if text[-1:].isalpha() else (text, "")
        if not (digits.isascii() and digits.isdigit()) or unit not in _UNITS or not int(digits):
            raise UsageError(f"option {names[0]} is {text!r}: bytes are needed, such as 67108864 or 64m")
        return int(digits) * _UNITS[unit]

    def choice(self, name: str, values: Sequence[str]) -> str:
        """One of the values; the first is the default."""
        text = self.text(name)
        if text is not None and text not in values:
            raise UsageError(f"option {name} is {text!r}: one of {', '.join(values)}")
        return text or values[0]


#: seconds a server has to answer
TIMEOUT = 5.0


@dataclass(frozen=True)
class Login:
    """Everything but the address."""

    NAMES = (
        *("creds", "credsSecret", "nkey", "user", "password", "passwordFile", "token", "tokenFile"),
        *("inboxPrefix", "tlsCa", "tlsCert", "tlsKey", "tlsFirst"),
    )

    creds: str | None = None
    creds_secret: str | None = field(default=None, repr=False)
    nkey: str | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: str | None = None
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    inbox: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_first: bool = False

    @classmethod
    def of(cls, options: GivenOptions) -> Login:
        given = {name: options.text(name) for name in cls.NAMES}
        ways = [name for name in ("creds", "credsSecret", "nkey", "user", "token", "tokenFile") if given[name]]
        if len(ways) > 1:
            raise UsageError(f"the options {' and '.join(ways)} are different ways to log in: give one of them")
        passwords = [name for name in ("password", "passwordFile") if given[name]]
        if bool(given["user"]) != (len(passwords) == 1):
            raise UsageError("the option user needs password or passwordFile, one of them, and they need user")
        if given["tlsKey"] and not given["tlsCert"]:
            raise UsageError("the option tlsKey is the key of a certificate: give tlsCert too")
        return cls(
            creds=given["creds"],
            creds_secret=given["credsSecret"],
            nkey=given["nkey"],
            user=given["user"],
            password=given["password"],
            password_file=given["passwordFile"],
            token=given["token"],
            token_file=given["tokenFile"],
            inbox=given["inboxPrefix"],
            tls_ca=given["tlsCa"],
            tls_cert=given["tlsCert"],
            tls_key=given["tlsKey"],
            tls_first=options.choice("tlsFirst", ("false", "true")) == "true",
        )

    def connect(self, url: str, name: str) -> WorkerConnection:
        """A connection to the first of the servers in `url` that takes us."""
        auth, inbox = self._proof()
        try:
            return WorkerConnection.connect(
                url,
                auth=auth,
                inbox=self.inbox or inbox,
                name=name,
                tls=self._tls(),
                tls_first=self.tls_first,
                timeout=TIMEOUT,
            )
        except AuthRevoked as error:
            raise AuthRevoked(f"the broker does not accept this credential: {error}") from error
        except UntrustedServer as error:
            raise UntrustedServer(f"{shown(url)} is not trusted, and was told nothing: {error}") from error
        except UnreachableError as error:
            raise BrokerUnreachable(f"no broker answers at {error}") from error

    def _proof(self) -> tuple[Auth, str]:
        """What is said in CONNECT, and the inbox this user may listen on."""
        if self.creds or self.creds_secret:
            token, key = split_credentials(self.creds_secret or _read("creds", self.creds or ""))
            return signed(token, key), f"_INBOX_{key.id}"
        if self.nkey:
            return _signed_by(_seed(_read("nkey", self.nkey))), "_INBOX"
        if self.user:
            password = self.password or _read("passwordFile", self.password_file or "").strip()
            return _saying(user=self.user, **{"pass": password}), "_INBOX"
        if self.token or self.token_file:
            return _saying(auth_token=self.token or _read("tokenFile", self.token_file or "").strip()), "_INBOX"
        return anonymous, "_INBOX"

    def _tls(self) -> ssl.SSLContext | None:
        if not (self.tls_ca or self.tls_cert):
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca)
            if self.tls_cert:
                context.load_cert_chain(self.tls_cert, self.tls_key)
        except OSError as error:  # an SSLError is one
            raise UsageError(
                f"the files of tlsCa, tlsCert and tlsKey cannot be used ({self.tls_ca}, {self.tls_cert}, "
                f"{self.tls_key}): {error}"
            ) from error
        return context


def checked_url(url: str) -> str:
    """The servers, if nothing in them is a secret: they are printed in errors."""
    if "@" in url:
        raise UsageError("the option url holds a name or a password: give user and password as options of their own")
    try:
        parse_addresses(url)
    except TidingsError as error:
        raise UsageError(f"option url: {error}") from error
    return url


def _saying(**fields: str) -> Auth:
    return lambda _info: fields


def _signed_by(key: KeyPair) -> Auth:
    """How the holder of an nkey proves it: the server's nonce, signed."""

    def answer(info: Mapping[str, Any]) -> dict[str, str]:
        nonce = info.get("nonce")
        if not isinstance(nonce, str) or not nonce:
            raise AuthRefused("this server asks nobody for an nkey")
        signature = base64.urlsafe_b64encode(key.sign(nonce.encode())).decode().rstrip("=")
        return {"nkey": key.id, "sig": signature}

    return answer


def _seed(text: str) -> KeyPair:
    """The key of a seed file: comments and empty lines may be around the seed."""
    lines = [line.strip() for line in text.splitlines()]
    seeds = [line for line in lines if line.startswith("SU")]
    if len(seeds) != 1:
        raise UsageError("the file of the option nkey holds no seed of a user: a line that begins with SU")
    return KeyPair(seeds[0])


def _read(option: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, ValueError) as error:
        raise UsageError(f"the file of the option {option} cannot be read where it is needed: {error}") from error
