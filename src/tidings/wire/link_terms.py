"""What two operators agree on when they link their spaces: an offer, its acceptance, and the terms of both; pure.

    inviter    offer        what it shares, what it wants, until when; signed by the key that is its space's id
    acceptor   acceptance   what it takes of that and what it gives; signed by its space's id and its worker's user

Both are JSON texts and signed as they stand, so nobody needs a canonical form. An acceptance names the offer by its
hash and is never wider than it (`check_within`): what one side takes is what the other one shares. What each side
calls the channels of the other is its own affair and is in neither.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import msgspec

from tidings.errors import DeniedError, InvalidName, MalformedMessage, UsageError
from tidings.wire import names, strict_json
from tidings.wire.links import MOST_HOPS, channel_map
from tidings.wire.names import covers_any, covers_pattern
from tidings.wire.rulings import Count, Link, Switch
from tidings.wire.signing import KeyPair, public_bytes, verify

#: of an offer or an acceptance: it must fit into a request of whoever was invited
LONGEST_TEXT: Final = 20_000
#: channels and patterns that are named for one direction
MOST_PATTERNS: Final = 64
#: what passes beside channels, if both sides say so
SWITCHES: Final = ("direct", "roster", "tasks")
_Texts = Annotated[tuple[str, ...], msgspec.Meta(max_length=MOST_PATTERNS)]
_Hops = Annotated[int, msgspec.Meta(ge=1, le=MOST_HOPS)]


class _Side(msgspec.Struct, frozen=True, kw_only=True):
    v: Literal[1] = 1
    invitation: str
    link: str
    #: what the space calls itself, its id, and its steward's key
    space: str
    space_id: str
    steward: str
    #: its worker's user at the other broker
    user: str
    #: its own channels that the other may read
    shares: _Texts
    until: Count | None = None
    hops: _Hops = 1
    direct: Switch = "off"
    roster: Switch = "off"
    tasks: Switch = "off"

    def __post_init__(self) -> None:
        for each in (self.invitation, self.user):
            names.check_agent_id(each)
        names.check_token(self.link, "link")
        names.check_space(self.space)
        if names.is_agent_id(self.link) or not self.space_id.startswith("A"):
            raise InvalidName(f"{self.link} of {self.space_id} is no link of a space")
        for key in (self.space_id, self.steward):
            public_bytes(key)
        check_patterns(self.shares)


class LinkOffer(_Side, frozen=True, kw_only=True):
    #: what it would like to read of the other's
    wants: _Texts
    #: it is for the link that there is between the two: new keys, on the terms that it has
    renews: bool = False

    def __post_init__(self) -> None:
        _Side.__post_init__(self)
        check_patterns(self.wants)


class LinkAcceptance(_Side, frozen=True, kw_only=True):
    #: SHA-256 of the offer's text
    offer: str
    #: what it takes of what is offered
    takes: _Texts
    #: where its broker is and whom to trust there; empty: nobody can reach it
    url: Annotated[str, msgspec.Meta(max_length=12_000)]
    #: of the other worker's user at its broker
    token: Annotated[str, msgspec.Meta(max_length=6_000)]

    def __post_init__(self) -> None:
        _Side.__post_init__(self)
        check_patterns(self.takes)


class SignedAcceptance(NamedTuple):
    """The text, and its signatures in base64 by the user of the worker and by the space."""

    text: str
    sig: str
    proof: str


_Kind = TypeVar("_Kind", LinkOffer, LinkAcceptance)


def check_patterns(patterns: Iterable[str]) -> None:
    """A link passes on channels, and patterns that end in `>`."""
    for each in patterns:
        channel_map({each: each})


def text_of(side: LinkOffer | LinkAcceptance) -> str:
    text = msgspec.json.encode(side).decode()
    if len(text) > LONGEST_TEXT:
        raise UsageError(
            f"what is to be agreed has {len(text)} characters, more than {LONGEST_TEXT}: name fewer channels"
        )
    _read(text, LinkOffer) if isinstance(side, LinkOffer) else _read(text, LinkAcceptance)
    return text


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read(text: str, kind: type[_Kind]) -> _Kind:
    if len(text) > LONGEST_TEXT:
        raise DeniedError(f"what is to be agreed has at most {LONGEST_TEXT} characters")
    try:
        return msgspec.convert(strict_json.loads(text.encode()), kind, strict=True)
    except (msgspec.ValidationError, MalformedMessage, InvalidName, UnicodeEncodeError) as error:
        raise DeniedError(f"this is nothing that could be agreed on: {error}") from error


# --- signatures ---


def asking(space: str, invitation: str, user: str) -> bytes:
    """What a new user signs to be told what a line offers."""
    return f"td1-link-ask\n{space}\n{invitation}\n{user}".encode()


def _offering(text: str) -> bytes:
    return b"td1-link-offer\n" + text.encode()


def _accepting(text: str) -> bytes:
    return b"td1-link-accept\n" + text.encode()


def signed_offer(space: KeyPair, offer: LinkOffer) -> tuple[str, str]:
    """Its text, and the space's signature."""
    text = text_of(offer)
    return text, _b64(space.sign(_offering(text)))


def read_offer(text: str, signature: str) -> LinkOffer:
    """An offer that the space signed which it names."""
    offer = _read(text, LinkOffer)
    if not verify(offer.space_id, _offering(text), signature_bytes(signature)):
        raise DeniedError("this offer is not signed by the space that it names")
    return offer


def signed_acceptance(space: KeyPair, user: KeyPair, acceptance: LinkAcceptance) -> SignedAcceptance:
    text = text_of(acceptance)
    said = _accepting(text)
    return SignedAcceptance(text, _b64(user.sign(said)), _b64(space.sign(said)))


def read_acceptance(offer_text: str, user: str, said: SignedAcceptance) -> LinkAcceptance:
    """An acceptance of this offer by this user, signed by both keys that it names."""
    found = _read(said.text, LinkAcceptance)
    offer = _read(offer_text, LinkOffer)
    if found.user != user or not verify(user, _accepting(said.text), signature_bytes(said.sig)):
        raise DeniedError("this request is not signed by the key that it names")
    if not verify(found.space_id, _accepting(said.text), signature_bytes(said.proof)):
        raise DeniedError("this request is not signed by the space that it names")
    if (found.invitation, found.link) != (offer.invitation, offer.link) or found.offer != hash_of(offer_text):
        raise DeniedError("this accepts something else than was offered: ask for the offer again")
    return found


def signature_bytes(text: str) -> bytes:
    """What is in no signature's form is nobody's."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


def _b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


# --- narrowing ---


def minimal(patterns: Iterable[str]) -> tuple[str, ...]:
    """Without those that another one covers, in their order."""
    each = list(dict.fromkeys(patterns))
    return tuple(one for one in each if not any(covers_pattern(other, one) for other in each if other != one))


def common(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """What two lists of patterns both cover."""
    return minimal(
        [*(each for each in one if covers_any(other, each)), *(each for each in other if covers_any(one, each))]
    )


def earliest(*ends: int | None) -> int | None:
    """The first of several ends; None is no end."""
    return min((each for each in ends if each is not None), default=None)


def limits_of(terms: object) -> dict[str, Any]:
    """What is agreed on beside channels; an offer, an acceptance and a link record have the same names for it."""
    return {name: getattr(terms, name) for name in ("until", "hops", *SWITCHES)}


def limited(record: Link, current: Link) -> Link:
    """The record of a link that is renewed, with limits that are no wider than the link has now."""
    switches = {name: "on" if getattr(record, name) == getattr(current, name) == "on" else "off" for name in SWITCHES}
    return msgspec.structs.replace(
        record,
        beyond=current.beyond,
        hops=min(record.hops, current.hops),
        until=earliest(record.until, current.until),
        **switches,
    )


def restricted(channels: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    """Of what is taken, what is also in `patterns`; a pattern that is narrower than what is taken stands for it."""
    wanted = minimal(patterns)
    found = {theirs: ours for theirs, ours in channels.items() if covers_any(wanted, theirs)}
    for pattern in wanted:
        around = [theirs for theirs in channels if theirs != pattern and covers_pattern(theirs, pattern)]
        if around and not covers_any(found, pattern):
            nearest = max(around, key=len)
            found[pattern] = channels[nearest][:-1] + pattern[len(nearest) - 1 :]
    return found


def renamed(channels: Mapping[str, str], names_here: Mapping[str, str]) -> dict[str, str]:
    """The same with other names for some; UsageError for what is not among them."""
    for theirs in names_here:
        if not covers_any(channels, theirs):
            raise UsageError(f"{theirs} is not offered: that is {', '.join(channels) or 'nothing'}")
    found = {**channels, **names_here}
    channel_map(found)
    return found


def check_within(offer: LinkOffer, acceptance: LinkAcceptance) -> None:
    """DeniedError if an acceptance is wider than the offer, or nothing comes of both."""
    for what, said, most in (
        ("takes", acceptance.takes, offer.shares),
        ("shares", acceptance.shares, offer.wants),
    ):
        if wider := [each for each in said if not covers_any(most, each)]:
            raise DeniedError(f"`{what}` is wider than what was offered: {', '.join(wider)}")
    if not acceptance.takes and not acceptance.shares:
        raise DeniedError("a link over which nothing passes is none: take or share something")
    if offer.until is not None and (acceptance.until is None or acceptance.until > offer.until):
        raise DeniedError("the link would end later than was offered")
    if acceptance.hops > offer.hops:
        raise DeniedError(f"records may come over {offer.hops} links as it was offered, not {acceptance.hops}")
    for switch in SWITCHES:
        if getattr(acceptance, switch) == "on" and getattr(offer, switch) == "off":
            raise DeniedError(f"`{switch}` was not offered")
    if acceptance.space_id == offer.space_id:
        raise DeniedError("a space is not linked with itself")
    if offer.user == acceptance.user or offer.invitation in (offer.user, acceptance.user):
        raise DeniedError("the key of an invitation is known to whoever has its line: make another one")
