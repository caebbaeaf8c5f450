"""How the worker of links reaches the spaces it takes something from.

    links/peers/<link>.json     what that space calls itself, its ids, and where its broker is and whom to trust there
    links/peers/<link>.creds    our user there, made by the other space; the worker writes newer tokens into it
    links/peers/<link>.seed     the key of that user while the link is only offered: on disk before anybody hears of it

The first two come from the other space's operator when a link is agreed, and go when it is removed. A link without them
waits.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tidings.admin.home import SpaceHome
from tidings.errors import ConfigError, DeniedError, InvalidName, TidingsError
from tidings.nats import jwt
from tidings.nats.address import parse_addresses, shown
from tidings.nats.errors import Unwritable
from tidings.util.private_files import private_dir, read_private, write_private
from tidings.wire.names import check_space, check_token, is_token
from tidings.wire.signing import KeyPair


class PeerAccess(msgspec.Struct, frozen=True, kw_only=True):
    """One of them."""

    link: str
    #: what it calls itself: the root of its subjects
    space: str
    #: its id, and the key of its steward
    id: str
    steward: str
    #: its servers with whom to trust there (`nats/address.py`), with commas between
    url: str

    def __post_init__(self) -> None:
        check_token(self.link, "link")
        check_space(self.space)
        try:
            parse_addresses(self.url)
        except Unwritable as error:
            raise ConfigError(f"link {self.link}: cannot be reached at {self.url[:80]!r}: {error}") from error

    @property
    def address(self) -> str:
        """Where it is, for people."""
        return shown(self.url)


class LinkPeers:
    """Those of one space."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def below(cls, home: SpaceHome) -> LinkPeers:
        return cls(home.link_peers)

    def creds(self, link: str) -> Path:
        return self.folder / f"{link}.creds"

    def get(self, link: str) -> PeerAccess | None:
        """None unless both files are here."""
        path = self._path(link)
        if not path.exists() or not self.creds(link).exists():
            return None
        try:
            return msgspec.json.decode(read_private(path), type=PeerAccess)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path} is damaged: {error}; accept the link again") from error

    def all(self) -> list[PeerAccess]:
        names = sorted(path.stem for path in self.folder.glob("*.json") if is_token(path.stem))
        return [found for found in map(self.get, names) if found is not None]

    def put(self, access: PeerAccess, creds: str) -> None:
        """The credential first: whoever finds the other file finds both."""
        self.put_creds(access.link, creds)
        write_private(self._path(access.link), msgspec.json.format(msgspec.json.encode(access)).decode() + "\n")

    def put_creds(self, link: str, creds: str) -> None:
        """The credential alone, if nobody knows where the other space is."""
        try:
            jwt.split_credentials(creds)
        except (TidingsError, ValueError) as error:
            raise ConfigError(f"link {link}: this is not the credential of a user: {error}") from error
        self._write(self.creds(link), creds)

    def has(self, link: str, user: str, url: str) -> bool:
        """Is it known how the other space is reached as this user, if it has an address?"""
        if not self.creds(link).exists() or (url and self.get(link) is None):
            return False
        return jwt.split_credentials(read_private(self.creds(link)))[1].id == user

    def make_key(self, link: str) -> KeyPair:
        key = KeyPair.generate()
        self._write(self._seed(link), key.seed + "\n")
        return key

    def key(self, link: str) -> KeyPair:
        try:
            return KeyPair(read_private(self._seed(link)).strip())
        except (ConfigError, InvalidName, OSError) as error:
            raise DeniedError(f"the key that belongs to link {link} is lost: ask for another invitation") from error

    def forget_key(self, link: str) -> None:
        self._seed(link).unlink(missing_ok=True)

    def _write(self, path: Path, text: str) -> None:
        for folder in (self.folder.parent, self.folder):
            private_dir(folder)
        write_private(path, text)

    def forget(self, link: str) -> None:
        for path in (self._path(link), self.creds(link)):
            path.unlink(missing_ok=True)

    def _seed(self, link: str) -> Path:
        return self.folder / f"{link}.seed"

    def _path(self, link: str) -> Path:
        return self.folder / f"{link}.json"
