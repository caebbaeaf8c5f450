"""What two spaces agree on: what is accepted is never wider than what was offered, and both sides read it alike."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.errors import DeniedError, InvalidName, UsageError
from tidings.wire.link_terms import (
    LONGEST_TEXT,
    MOST_PATTERNS,
    LinkAcceptance,
    LinkOffer,
    check_within,
    hash_of,
    limits_of,
    minimal,
    read_acceptance,
    read_offer,
    renamed,
    restricted,
    signed_acceptance,
    signed_offer,
    text_of,
)
from tidings.wire.links import ChannelMap, channel_map
from tidings.wire.names import covers_any
from tidings.wire.signing import ACCOUNT
from tools.generated import seeded_key

RANDOM = random.Random("link terms")
INVITER, ACCEPTOR = seeded_key(RANDOM, ACCOUNT), seeded_key(RANDOM, ACCOUNT)
INVITATION, OURS, THEIRS, STEWARD = (seeded_key(RANDOM) for _ in range(4))


def offer(**changes: Any) -> LinkOffer:
    fields: dict[str, Any] = {
        "invitation": INVITATION.id,
        "link": "abcdefghijkl",
        "space": "main",
        "space_id": INVITER.id,
        "steward": STEWARD.id,
        "user": OURS.id,
        "shares": ("general", "team.>"),
        "wants": ("news", "ops.>"),
        "until": 2_000_000_000,
        "hops": 2,
        "direct": "on",
    }
    return LinkOffer(**{**fields, **changes})


def acceptance(of: LinkOffer, **changes: Any) -> LinkAcceptance:
    fields: dict[str, Any] = {
        "invitation": of.invitation,
        "link": of.link,
        "space": "lab",
        "space_id": ACCEPTOR.id,
        "steward": STEWARD.id,
        "user": THEIRS.id,
        "shares": of.wants,
        "takes": of.shares,
        "until": of.until,
        "hops": of.hops,
        "direct": of.direct,
        "roster": of.roster,
        "offer": hash_of(text_of(of)),
        "url": "",
        "token": "",
    }
    return LinkAcceptance(**{**fields, **changes})


def test_what_was_signed_is_read_and_nothing_else() -> None:
    text, signature = signed_offer(INVITER, offer())
    assert read_offer(text, signature) == offer()
    for changed, sig in ((text.replace("main", "mane"), signature), (text, signature[:-4] + "AAA="), (text, "?")):
        with pytest.raises(DeniedError, match="not signed"):
            read_offer(changed, sig)
    with pytest.raises(DeniedError, match="not signed"):
        read_offer(*signed_offer(ACCEPTOR, offer()))


def test_an_acceptance_needs_both_signatures_and_the_offer_it_names() -> None:
    text, whole = text_of(offer()), signed_acceptance(ACCEPTOR, THEIRS, acceptance(offer()))
    assert read_acceptance(text, THEIRS.id, whole) == acceptance(offer())
    wrong = [
        whole._replace(sig=whole.proof),
        whole._replace(proof=whole.sig),
        signed_acceptance(INVITER, THEIRS, acceptance(offer())),
        signed_acceptance(ACCEPTOR, OURS, acceptance(offer())),
        signed_acceptance(ACCEPTOR, THEIRS, acceptance(offer(), link="another")),
        signed_acceptance(ACCEPTOR, THEIRS, acceptance(offer(), invitation=OURS.id)),
        signed_acceptance(ACCEPTOR, THEIRS, acceptance(offer(shares=("general",)))),
    ]
    for said in wrong:
        with pytest.raises(DeniedError):
            read_acceptance(text, THEIRS.id, said)
    with pytest.raises(DeniedError):
        read_acceptance(text, OURS.id, whole)


def test_what_is_accepted_whole_is_what_was_offered() -> None:
    whole = acceptance(offer())
    check_within(offer(), whole)
    assert (whole.takes, whole.shares, limits_of(whole)) == (offer().shares, offer().wants, limits_of(offer()))
    less = acceptance(offer(), takes=("team.x", "team.x.>"), shares=(), until=1_999_999_999, hops=1, direct="off")
    check_within(offer(), less)
    assert list(limits_of(less).values()) == [1_999_999_999, 1, "off", "off", "off"]


@pytest.mark.parametrize(
    "changes",
    [
        {"takes": ("secret",)},
        {"takes": (">",)},
        {"takes": ("team",)},
        {"shares": ("ops",)},
        {"shares": ("news", "private")},
        {"takes": (), "shares": ()},
        {"until": None},
        {"until": 2_000_000_001},
        {"hops": 3},
        {"roster": "on"},
        {"space_id": INVITER.id},
        {"user": OURS.id},
        {"user": INVITATION.id},
    ],
)
def test_what_is_wider_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(DeniedError):
        check_within(offer(), acceptance(offer(), **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"link": "a.b"},
        {"link": OURS.id},
        {"space": "a b"},
        {"space_id": OURS.id},
        {"user": INVITER.id},
        {"shares": ("team.*",)},
        {"shares": ("a..b",)},
        {"wants": ("*.x",)},
        {"steward": "S"},
    ],
)
def test_what_no_link_could_be_is_no_offer(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidName):
        offer(**changes)
    fields = msgspec.json.decode(msgspec.json.encode(offer())) | {
        name: list(value) if isinstance(value, tuple) else value for name, value in changes.items()
    }
    with pytest.raises(DeniedError, match="nothing that could be agreed on"):
        read_offer(msgspec.json.encode(fields).decode(), "")


def test_it_is_bounded() -> None:
    with pytest.raises(DeniedError, match="at most"):
        read_offer(" " * LONGEST_TEXT + text_of(offer()), "")
    many = tuple(f"c{number}" for number in range(MOST_PATTERNS + 1))
    with pytest.raises(DeniedError):
        text_of(offer(shares=many))
    with pytest.raises(UsageError, match="name fewer"):
        text_of(acceptance(offer(), url="x" * 12_000, token="y" * 9_000))


def test_a_pattern_that_is_narrower_stands_for_what_is_taken() -> None:
    taken = {"team.>": "acme.>", "team.secret": "hidden", "news": "news"}
    assert restricted(taken, ["news"]) == {"news": "news"}
    assert restricted(taken, ["team.>"]) == {"team.>": "acme.>", "team.secret": "hidden"}
    assert restricted(taken, ["team.web.>", "team.web.x", "team.secret"]) == {
        "team.web.>": "acme.web.>",
        "team.secret": "hidden",
    }
    assert restricted(taken, [">"]) == taken
    assert restricted(taken, ["other"]) == {}


def test_names_are_given_to_what_is_there_only() -> None:
    assert renamed({"general": "general", "team.>": "team.>"}, {"team.web": "web"}) == {
        "general": "general",
        "team.>": "team.>",
        "team.web": "web",
    }
    with pytest.raises(UsageError, match="not offered"):
        renamed({"general": "general"}, {"secret": "x"})
    with pytest.raises(InvalidName, match="one name"):
        renamed({"general": "general", "news": "news"}, {"news": "general"})


_TOKENS = st.sampled_from(["a", "b", "c"])
_PATTERNS = st.builds(
    lambda head, tail: ".".join(head) + tail, st.lists(_TOKENS, min_size=1, max_size=2), st.sampled_from(["", ".>"])
)
_CHANNELS = st.builds(".".join, st.lists(_TOKENS, min_size=1, max_size=4))


@given(st.sets(_PATTERNS, max_size=4), st.sets(_PATTERNS, max_size=4), _CHANNELS)
def test_what_remains_is_in_both_and_keeps_its_name(keys: set[str], patterns: set[str], channel: str) -> None:
    taken = {key: f"x{number}.{key}" for number, key in enumerate(sorted(keys))}
    whole, rest = channel_map(taken), ChannelMap(restricted(taken, sorted(patterns)))
    is_in_both = whole.ours(channel) is not None and covers_any(patterns, channel)
    assert rest.ours(channel) == (whole.ours(channel) if is_in_both else None)


@given(st.lists(_PATTERNS, max_size=6), _CHANNELS)
def test_fewer_patterns_cover_the_same(patterns: list[str], channel: str) -> None:
    assert covers_any(minimal(patterns), channel) == covers_any(patterns, channel)
