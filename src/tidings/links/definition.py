"""What a direction of a link takes, as the link record in force says it, and the key its ledger has it under; pure."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import msgspec

from tidings.wire.links import ChannelMap, scope_id


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
