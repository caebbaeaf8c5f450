"""How the worker of links reaches the spaces it takes something from.

    links/peers/<link>.json     what that space calls itself, its ids, and where its broker is and whom to trust there
    links/peers/<link>.creds    our user there, made by the other space; the worker writes newer tokens into it

Both come from the other space's operator when a link is agreed, and go when it is removed. A link without them waits.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from tidings.admin.home import SpaceHome
from tidings.errors import ConfigError, TidingsError
from tidings.nats import jwt
from tidings.nats.address import parse_addresses, shown
from tidings.nats.errors import Unwritable
from tidings.util.private_files import private_dir, read_private, write_private
from tidings.wire.names import check_space, check_token, is_token


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
        try:
            jwt.split_credentials(creds)
        except (TidingsError, ValueError) as error:
            raise ConfigError(f"link {access.link}: this is not the credential of a user: {error}") from error
        private_dir(self.folder.parent)
        private_dir(self.folder)
        write_private(self.creds(access.link), creds)
        write_private(self._path(access.link), msgspec.json.format(msgspec.json.encode(access)).decode() + "\n")

    def forget(self, link: str) -> None:
        for path in (self._path(link), self.creds(link)):
            with suppress(FileNotFoundError):
                path.unlink()

    def _path(self, link: str) -> Path:
        return self.folder / f"{link}.json"
