"""The terms of one direction of a link, and its key in the ledger."""

from __future__ import annotations

import hashlib
import hmac
import os
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec

from tidings.nats.jwt import split_credentials
from tidings.util.private_files import read_private
from tidings.wire.links import ChannelMap, authorization_epoch, scope_id
from tidings.wire.rulings import Link
from tidings.wire.signing import seed_bytes

SECRET_BYTES = 32


class LinkKey(NamedTuple):
    """Another scope or another authority is another link: what was handled under the one says nothing of the other."""

    space: str
    peer: str
    scope: str
    authority: str


class LinkDefinition(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What comes from the space `peer` into `space` (ids of both). `authority` is the authorization epoch of the
    record; `beyond` are spaces behind the peer, each with the channels of it that may come through the peer."""

    link: str
    space: str
    peer: str
    authority: str
    channels: dict[str, str]
    beyond: dict[str, dict[str, str]] = {}
    hops: int = 1
    #: unix seconds; nothing is taken from then on
    until: float | None = None

    @cached_property
    def key(self) -> LinkKey:
        return LinkKey(self.space, self.peer, scope_id(self.channels), self.authority)

    @cached_property
    def _maps(self) -> dict[str, ChannelMap]:
        return {self.peer: ChannelMap(self.channels)} | {
            origin: ChannelMap(names) for origin, names in self.beyond.items() if origin != self.peer
        }

    @property
    def takes(self) -> tuple[object, ...]:
        """What decides what becomes of a record; what else is agreed on says nothing of what was handled."""
        return self.space, self.peer, self.channels, self.beyond, self.hops

    def ours(self, origin: str, channel: str) -> str | None:
        """What a channel of that space is called here; None if it is not taken over this link."""
        names = self._maps.get(origin)
        return names.ours(channel) if names is not None else None

    def text(self) -> str:
        """One text for equal definitions."""
        return msgspec.json.encode(self, order="sorted").decode()


def takes_something(record: Link, now: float) -> bool:
    """Does it let anything in at this moment?"""
    return record.state == "on" and carries(record) and not record.has_ended(int(now * 1e9))


def carries(record: Link) -> bool:
    """Is there anything for a worker to do, as it is agreed?"""
    return bool(record.channels or record.beyond) or record.roster == "on"


def definition_of(space: str, record: Link) -> LinkDefinition:
    """`space`: the id of the space the record is of."""
    return LinkDefinition(
        link=record.link,
        space=space,
        peer=record.origin,
        authority=authorization_epoch(record),
        channels=record.channels,
        beyond=record.beyond,
        hops=record.hops,
        until=record.until,
    )


def secret_of(creds: Path) -> bytes:
    """What message ids of a space are made with: known to nobody who does not have its worker's key. Two ledgers of one
    space, in a copied home say, have the same one, so that of two workers at once the log takes one copy."""
    if not creds.exists():
        return os.urandom(SECRET_BYTES)
    key = split_credentials(read_private(creds))[1]
    return hmac.digest(seed_bytes(key), b"message ids of links", hashlib.sha256)
