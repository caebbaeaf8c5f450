"""What two spaces say to each other over a link: channels and their names on both sides, tokens, gaps, pages; pure.

A link passes on what was said in shared channels. Its receiving side maps a channel of the other space to one of its
own (`ChannelMap`), remembers how far it has handled the other log (`Token`), and asks for what comes after (`Page`).
A token belongs to one epoch of one log. Tokens of two of them are neither older nor newer than each other; the side
that has the log says why it cannot go on from one (`LinkGap`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec

from tidings.errors import InvalidName, UsageError
from tidings.wire.names import check_channel, check_pattern, covers, is_channel
from tidings.wire.records import Fields, values_of

if TYPE_CHECKING:
    from tidings.wire.rulings import Link

#: characters of a name, an id, a signature or a time that another space sends; it bounds what is stored
LONGEST: Final = 256
ShortText = Annotated[str, msgspec.Meta(max_length=LONGEST)]
#: a sequence of a log, as every language reads it exactly
Seq = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
ORIGIN_HEADER: Final = "Td-Origin"
HOPS_HEADER: Final = "Td-Hops"
#: spaces a record may have passed on its way, whatever a link record says
MOST_HOPS: Final = 8
_SCOPE_VERSION: Final = 1
#: fields of a link record that are what was agreed
_AGREED: Final = ("origin", "steward", "channels", "shares", "beyond", "hops", "until", "direct", "roster", "peer")
_HOPS: Final = re.compile(r"[1-9]\Z")
_MAIL_ORIGIN: Final = re.compile(r"([A-Z0-9]{56}) ([A-Za-z0-9_-]{1,64}) ([1-9][0-9]{0,15})\Z")


class ChannelMap:
    """Which channels of another space are taken, and under which name.

    A key is a channel, or a pattern that ends in `>`; its value is of the same kind: `{"team.>": "acme.team.>"}` takes
    `team.a` as `acme.team.a`. A channel that is named wins over patterns, a longer pattern over a shorter one. Two
    channels never become one: a value is used once, and no pattern of values covers another value.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names: Final = dict(sorted(names.items()))
        self._patterns = sorted((key for key in names if not is_channel(key)), key=lambda key: (-len(key), key))
        for theirs, ours in names.items():
            _check_pair(theirs, ours)
        _check_apart(list(self.names.values()))

    def ours(self, theirs: str) -> str | None:
        """What their channel is called here; None if it is not taken."""
        if not is_channel(theirs):
            return None
        if theirs in self.names:
            return self.names[theirs]
        for pattern in self._patterns:
            if covers(pattern, theirs):
                named = self.names[pattern][:-1] + theirs[len(pattern) - 1 :]
                return named if is_channel(named) else None
        return None

    def theirs(self, ours: str) -> str | None:
        """Which of their channels is called so here; None if none is."""
        for theirs, named in self.names.items():
            if named == ours:
                return theirs
        for theirs in self._patterns:
            named = self.names[theirs]
            if covers(named, ours):
                found = theirs[:-1] + ours[len(named) - 1 :]
                return found if self.ours(found) == ours else None
        return None


def channel_map(names: Mapping[str, str]) -> ChannelMap:
    """The map of these names; made once for equal ones."""
    return _map_of(tuple(sorted(names.items())))


@lru_cache(maxsize=1_024)
def _map_of(names: tuple[tuple[str, str], ...]) -> ChannelMap:
    return ChannelMap(dict(names))


def read_origin(fields: Fields) -> tuple[str, str, int] | None:
    """(space, channel, hops) of a record that a link admitted; None if its headers do not say it in the one way."""
    origins, hops = values_of(fields, ORIGIN_HEADER), values_of(fields, HOPS_HEADER) or ["1"]
    if len(origins) != 1 or len(hops) != 1 or _HOPS.match(hops[0]) is None:
        return None
    space, _, channel = origins[0].partition(" ")
    return (space, channel, int(hops[0])) if is_channel(channel) else None


def origin_fields(space: str, channel: str, hops: int) -> list[tuple[str, str]]:
    """The headers that say where an admitted record was said."""
    return [(ORIGIN_HEADER, f"{space} {channel}"), *([(HOPS_HEADER, str(hops))] if hops > 1 else [])]


class MailOrigin(NamedTuple):
    """Where a direct message or a task came from: a space, over which link, and the sequence of the link record it
    came by."""

    space: str
    link: str
    agreed: int


def read_mail_origin(fields: Fields) -> MailOrigin | None:
    """Of a direct message or a task that came over a link; None if its headers do not say it in the one way."""
    said = values_of(fields, ORIGIN_HEADER)
    found = _MAIL_ORIGIN.match(said[0]) if len(said) == 1 else None
    return MailOrigin(found[1], found[2], int(found[3])) if found else None


def mail_origin_field(origin: MailOrigin) -> tuple[str, str]:
    return ORIGIN_HEADER, f"{origin.space} {origin.link} {origin.agreed}"


def scope_id(names: Mapping[str, str]) -> str:
    """Names a scope: the same for equal maps, whatever their order. Golden vectors hold it still."""
    canonical = json.dumps({"channels": dict(names), "v": _SCOPE_VERSION}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def authorization_epoch(record: Link) -> str:
    """Names an agreement: what a link record lets pass, with whom and until when. Records that say the same have one
    name, however often they were written; another name is another agreement, under which nothing was handled yet."""
    said = {name: getattr(record, name) for name in _AGREED}
    if record.tasks == "on":  # what was agreed on before there were tasks keeps its name
        said["tasks"] = record.tasks
    canonical = json.dumps(said | {"shares": sorted(record.shares)}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """How far a log was handled: every record up to `seq` has its disposition. `mark` tells the record there from
    another one at the same sequence of a log that was set back; 0 is before the first."""

    space: ShortText
    epoch: ShortText
    seq: Seq
    mark: ShortText = ""

    @property
    def domain(self) -> tuple[str, str]:
        return self.space, self.epoch

    def is_before(self, other: Token) -> bool:
        """Only tokens of one domain have an order."""
        if self.domain != other.domain:
            raise UsageError(f"a token of {self.domain} is neither before nor after one of {other.domain}")
        return self.seq < other.seq


class GapKind(StrEnum):
    """Why a log cannot go on from a token."""

    #: what follows it was removed: it is below the floor
    TOO_OLD = "too_old"
    #: it is beyond the end of the log
    TOO_NEW = "too_new"
    #: the log was set back or made anew since
    EPOCH = "epoch"
    #: it is a token of another space
    STREAM = "stream"
    #: another record is at its sequence
    RECORD = "record"


class LinkGap(msgspec.Struct, frozen=True, kw_only=True):
    kind: GapKind
    #: what a page can be asked after: before the oldest record that is there
    oldest: Seq
    head: Seq
    epoch: ShortText
    #: up to here the log is the one the token knew; 0 if nobody can say
    agreed: Seq = 0


class LinkedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A message as the other space's log has it. `origin` and `channel` are where it was said, and what its sender
    signed; `hops` counts the links it came over, this one too."""

    seq: int
    time_ns: int
    origin: str
    channel: str
    sender: str
    signature: str
    payload: bytes
    hops: int = 1
    mark: str = ""


class LinkPage(msgspec.Struct, frozen=True, kw_only=True):
    """What follows a token: shared records in the order of the log, and how far it was looked for them."""

    records: tuple[LinkedRecord, ...]
    #: everything shared up to here is in this page; it is before `head` if there is more
    through: Token
    head: int
    floor: int
    #: nothing follows the token until this is dealt with
    gap: LinkGap | None = None
    #: the sequence of the record by which it is shared: with another one more may be shared of what lies behind; 0 if
    #: that is not told
    granted: int = 0

    @property
    def more(self) -> bool:
        return self.gap is None and self.through.seq < self.head


def _check_pair(theirs: str, ours: str) -> None:
    for each in (theirs, ours):
        check_pattern(each)
        if "*" in each.split("."):
            raise InvalidName(f"{each!r}: a link maps channels, and patterns that end in `>`; `*` has no place in one")
    if is_channel(theirs) != is_channel(ours):
        raise InvalidName(
            f"{theirs!r} cannot be called {ours!r} here: a channel gets a channel's name, a pattern a pattern"
        )
    if is_channel(theirs):
        check_channel(ours)


def _check_apart(values: list[str]) -> None:
    """No two channels may become one, or what was said in one could be read in another's place."""
    for number, value in enumerate(values):
        for other in values[number + 1 :]:
            if value == other or _can_meet(value, other) or _can_meet(other, value):
                raise InvalidName(f"two channels would have one name here: {value} and {other}")


def _can_meet(wide: str, narrow: str) -> bool:
    """Could a channel that `narrow` names be one that `wide` names? Both end in `>` or name one channel."""
    if is_channel(wide):
        return wide == narrow
    return (narrow[:-1] if narrow.endswith(">") else narrow + ".").startswith(wide[:-1]) and narrow != wide[:-2]
