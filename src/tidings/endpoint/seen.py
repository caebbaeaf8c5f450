"""What was surfaced and what was settled, per channel, as a few numbers.

A record is known by its log sequence. `through` says that everything of the channel up to it was surfaced; `beyond`
holds single sequences after a hole that is still being filled. The settled mark trails behind: it is what may be
written to a state file, because what was surfaced but not settled, or is missing, must come again after a crash.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from tidings.broker.private_files import write_private
from tidings.errors import ConfigError

IDENTITIES_KEPT = 8_192


@dataclass(slots=True)
class ChannelSeen:
    """One channel's memory."""

    through: int = 0
    beyond: set[int] = field(default_factory=set)
    #: surfaced and not settled yet, in order
    open: list[int] = field(default_factory=list)
    #: up to here the log itself was read; what came live after it may have holes that nobody knows of yet
    read: int = 0
    #: the newest that was surfaced
    newest: int = 0
    #: subject -> the sequence above which some of it is known to be missing
    missing: dict[str, int] = field(default_factory=dict)

    def is_new(self, seq: int) -> bool:
        return seq > self.through and seq not in self.beyond

    def surface(self, seq: int, *, contiguous: bool) -> None:
        """`contiguous`: nothing of this channel lies between what was seen and this record."""
        if not contiguous:
            self.beyond.add(seq)
        elif seq > self.through:
            self.through = seq
            if self.beyond:
                self.beyond = {each for each in self.beyond if each > seq}
        self.open.append(seq)
        self.newest = max(self.newest, seq)

    def surface_missed(self, seq: int) -> None:
        """A record inside a hole: `through` may be beyond it already, and stays where it is."""
        if seq > self.through:
            self.beyond.add(seq)
        self.open.append(seq)
        self.newest = max(self.newest, seq)

    def close_hole(self, through: int) -> None:
        """Everything up to `through` was seen now."""
        self.through = max(self.through, through)
        self.read = max(self.read, through)
        self.beyond = {seq for seq in self.beyond if seq > self.through}

    def settle(self, seq: int) -> None:
        if seq in self.open:
            self.open.remove(seq)

    @property
    def settled_through(self) -> int:
        """Everything up to here was surfaced and settled."""
        return min((self.through, *(seq - 1 for seq in self.open), *self.missing.values()))


class Seen:
    """The memory of one endpoint, kept in a state file if it is given one."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.channels: dict[str, ChannelSeen] = {}
        self._identities: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._unsettled: dict[int, tuple[str, str]] = {}
        #: direct messages have sequences of their own, so they are held by identity
        self._unsettled_direct: set[tuple[str, str]] = set()
        self._dirty = False
        if path is not None and path.exists():
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text())
            self.channels = {name: ChannelSeen(int(seq), read=int(seq)) for name, seq in found["channels"].items()}
            self._identities = OrderedDict(((sender, mid), None) for sender, mid in found.get("identities", []))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is not a state file of an endpoint ({error}): move it away") from error

    def channel(self, name: str) -> ChannelSeen:
        return self.channels.setdefault(name, ChannelSeen())

    def first_time(self, identity: tuple[str, str]) -> bool:
        """Was (sender, id) never surfaced here? A message is surfaced once, whatever record holds it."""
        if identity in self._identities:
            return False
        self._identities[identity] = None
        if len(self._identities) > IDENTITIES_KEPT:
            self._identities.popitem(last=False)
        return True

    def forget(self, identity: tuple[str, str]) -> None:
        self._identities.pop(identity, None)

    def hold(self, seq: int, identity: tuple[str, str]) -> None:
        """Handed out, not settled: it must come again after a crash."""
        self._unsettled[seq] = identity

    def settle(self, channel: str, seq: int) -> None:
        self.channel(channel).settle(seq)
        self._unsettled.pop(seq, None)
        self._dirty = True

    def hold_direct(self, identity: tuple[str, str]) -> None:
        self._unsettled_direct.add(identity)

    def settle_direct(self, identity: tuple[str, str]) -> None:
        self._unsettled_direct.discard(identity)
        self._dirty = True

    def save(self) -> None:
        """Write what was settled. Cheap when nothing was."""
        if self.path is None or not self._dirty:
            return
        channels = {name: seen.settled_through for name, seen in self.channels.items() if seen.settled_through}
        unsettled = {*self._unsettled.values(), *self._unsettled_direct}
        identities = [identity for identity in self._identities if identity not in unsettled]
        write_private(self.path, json.dumps({"channels": channels, "identities": identities[-1_024:]}))
        self._dirty = False
