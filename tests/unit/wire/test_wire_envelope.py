"""One function decides whether a record is a message; forged, moved and replayed ones are refused with a reason."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.wire.envelope import REASONS, ClaimedOrigin, Received, Refused, open_record
from tidings.wire.message import MAX_PAYLOAD, Sender, compose
from tidings.wire.records import Fields
from tidings.wire.signing import ACCOUNT, KeyPair, sign
from tidings.wire.subjects import Subjects
from tools.generated import seeded_key

# fixed keys: the names of parametrised tests must be the same in every process
RANDOM = random.Random("envelope")
ADA, BOB, MAL = (seeded_key(RANDOM) for _ in range(3))
SPACE, OTHER = (seeded_key(RANDOM, ACCOUNT).id for _ in range(2))
MAIN = Subjects("main")
MESSAGE = compose(Sender(ADA.id, "ada"), text="hello")
PLACES = {
    "chat": (MAIN.chat(ADA.id, "team.backend"), "team.backend"),
    "dm": (MAIN.direct(BOB.id, ADA.id), BOB.id),
    "task": (MAIN.task("reviewer", ADA.id), "reviewer"),
}


def signed(
    kind: str, destination: str, payload: bytes = MESSAGE.raw, *, key: KeyPair = ADA, space: str = SPACE
) -> Fields:
    return (("Nats-Msg-Id", "i"), ("Td-Sig", sign(key, space, kind, destination, payload)))


def reason(subject: str, headers: Fields, payload: bytes = MESSAGE.raw) -> str:
    opened = open_record(MAIN, SPACE, subject, headers, payload)
    assert isinstance(opened, Refused)
    assert opened.reason in REASONS
    assert opened.detail
    return opened.reason


@pytest.mark.parametrize("kind", PLACES)
def test_a_signed_message_opens_and_its_address_comes_from_the_subject(kind: str) -> None:
    subject, destination = PLACES[kind]
    headers = signed(kind, destination)
    opened = open_record(MAIN, SPACE, subject, headers, MESSAGE.raw)
    assert opened == Received(kind, ADA.id, destination, MESSAGE, headers[1][1], headers)  # type: ignore[arg-type]
    assert isinstance(opened, Received)
    assert opened.identity == (ADA.id, MESSAGE.id)
    assert opened.message.raw == MESSAGE.raw


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["chat", "dm", "task", "result", "ruling"])
def test_a_signature_for_one_kind_is_none_for_another(place: str, kind: str) -> None:
    subject, destination = PLACES[place]
    opened = open_record(MAIN, SPACE, subject, signed(kind, destination), MESSAGE.raw)
    assert isinstance(opened, Received) is (kind == place)
    if kind != place:
        assert reason(subject, signed(kind, destination)) == "signature"


def test_a_message_moved_to_another_channel_target_or_role_is_refused() -> None:
    """F13."""
    assert reason(MAIN.chat(ADA.id, "deploy"), signed("chat", "random")) == "signature"
    assert reason(MAIN.direct(MAL.id, ADA.id), signed("dm", BOB.id)) == "signature"
    assert reason(MAIN.task("admin", ADA.id), signed("task", "reviewer")) == "signature"


@pytest.mark.parametrize("kind", PLACES)
def test_a_message_replayed_from_another_space_of_the_same_name_is_refused(kind: str) -> None:
    """F13."""
    subject, destination = PLACES[kind]
    assert reason(subject, signed(kind, destination, space=OTHER)) == "signature"


@pytest.mark.parametrize("kind", PLACES)
def test_nobody_else_can_sign_for_the_sender_in_the_subject(kind: str) -> None:
    subject, destination = PLACES[kind]
    assert reason(subject, signed(kind, destination, key=MAL)) == "signature"


def test_an_agent_cannot_claim_another_sender_in_its_payload() -> None:
    assert reason(MAIN.chat(MAL.id, "general"), signed("chat", "general", key=MAL)) == "sender_mismatch"


def test_a_changed_payload_is_refused() -> None:
    assert reason(PLACES["chat"][0], signed("chat", "team.backend"), MESSAGE.raw + b" ") == "signature"


def test_a_missing_a_second_and_a_shadowing_header_are_refused() -> None:
    subject, destination = PLACES["chat"]
    good = signed("chat", destination)
    assert reason(subject, ()) == "signature"
    assert reason(subject, (*good, ("td-sig", good[1][1]))) == "header"
    for name in ("Nats-Subject", "nats-sequence", "Status", "KV-Operation", "Nats-Request-Info"):
        assert reason(subject, (*good, (name, "1"))) == "header"


def test_a_signature_header_is_found_whatever_its_case() -> None:
    subject, destination = PLACES["chat"]
    value = signed("chat", destination)[1][1]
    assert isinstance(open_record(MAIN, SPACE, subject, (("TD-SIG", value),), MESSAGE.raw), Received)


def test_what_is_signed_but_not_a_message_is_malformed() -> None:
    subject, destination = PLACES["chat"]
    twice = MESSAGE.raw[:-1] + b',"id":"' + MESSAGE.id.encode() + b'"}'
    for payload in (b"", b"null", b"[" * 10_000, b"\xff", twice, json.dumps({"id": MESSAGE.id}).encode()):
        assert reason(subject, signed("chat", destination, payload), payload) == "malformed"


def test_a_payload_beyond_the_limit_is_refused_before_anything_is_computed_over_it() -> None:
    payload = b" " * (MAX_PAYLOAD + 1)
    assert reason(PLACES["chat"][0], signed("chat", "team.backend", payload), payload) == "too_large"


@pytest.mark.parametrize(
    "subject",
    ["", "td.main.chat.ada.general", f"td.main2.chat.{ADA.id}.general", f"td.main.live.chat.{ADA.id}.general"],
)
def test_a_subject_that_is_not_of_this_space_is_refused(subject: str) -> None:
    assert reason(subject, signed("chat", "general")) == "malformed_subject"


@pytest.mark.parametrize(
    "subject",
    [MAIN.space_record, MAIN.steward_lease, MAIN.access(ADA.id), MAIN.delivery(ADA.id), MAIN.control("health", ADA.id)],
)
def test_a_record_that_is_no_message_is_the_wrong_kind(subject: str) -> None:
    assert reason(subject, signed("chat", "general")) == "wrong_kind"


def test_a_linked_message_needs_a_link_table() -> None:
    opened = open_record(MAIN, SPACE, MAIN.via("west", ADA.id, "general"), signed("chat", "general"), MESSAGE.raw)
    assert opened == Refused("wrong_kind", "via needs a link table")


any_text = st.text(max_size=20)
hostile_subjects = (
    any_text
    | st.sampled_from([subject for subject, _ in PLACES.values()])
    | any_text.map(lambda text: f"td.main.chat.{ADA.id}.{text}")
)
hostile_fields = st.lists(
    st.tuples(any_text | st.just("Td-Sig"), any_text | st.text("ABCw-_", min_size=86, max_size=86)), max_size=3
)


@given(hostile_subjects, hostile_fields.map(tuple), st.binary(max_size=100) | st.just(MESSAGE.raw))
def test_hostile_records_are_refused_and_nothing_is_raised(subject: str, headers: Fields, payload: bytes) -> None:
    assert reason(subject, headers, payload) in ("malformed_subject", "header", "signature")


@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode(errors="replace")))
def test_arbitrary_signed_bytes_are_malformed_and_nothing_is_raised(payload: bytes) -> None:
    assert reason(PLACES["chat"][0], signed("chat", "team.backend", payload), payload) == "malformed"


# --- what came over a link ---

WEST = seeded_key(RANDOM, ACCOUNT).id
SAID_THERE = ClaimedOrigin("west", WEST, "random", "west.random", 1)


def linked(
    said: str = f"{WEST} random", *more: tuple[str, str], signed_for: tuple[str, str] = (WEST, "random"), **made: object
) -> Fields:
    payload = made.get("payload", MESSAGE.raw)
    key = made.get("key", ADA)
    assert isinstance(payload, bytes)
    assert isinstance(key, KeyPair)
    return (("Td-Sig", sign(key, signed_for[0], "chat", signed_for[1], payload)), ("Td-Origin", said), *more)


def opened_via(
    headers: Fields,
    payload: bytes = MESSAGE.raw,
    *,
    channel: str = "west.random",
    asked: list[ClaimedOrigin] | None = None,
) -> Received | Refused:
    def admits(admission: ClaimedOrigin) -> bool:
        if asked is not None:
            asked.append(admission)
        return admission == SAID_THERE

    return open_record(MAIN, SPACE, MAIN.via("west", ADA.id, channel), headers, payload, admits)


def test_a_message_of_another_space_opens_for_who_knows_the_link_and_for_nobody_else() -> None:
    headers = linked()
    opened = opened_via(headers)
    assert isinstance(opened, Received)
    assert (opened.kind, opened.sender, opened.destination) == ("chat", ADA.id, "west.random")
    assert (opened.origin, opened.link, opened.admission) == (WEST, "west", SAID_THERE)
    assert opened.message.raw == MESSAGE.raw
    assert reason(MAIN.via("west", ADA.id, "west.random"), headers) == "wrong_kind"


def test_of_a_message_that_was_said_here_no_link_is_asked() -> None:
    subject, destination = PLACES["chat"]
    opened = open_record(MAIN, SPACE, subject, signed("chat", destination), MESSAGE.raw, lambda _: False)
    assert isinstance(opened, Received)
    assert (opened.origin, opened.link) == ("", "")


@pytest.mark.parametrize(
    ("why", "headers", "expected"),
    [
        ("for this space", linked(signed_for=(SPACE, "random")), "signature"),
        ("for the name it has here", linked(signed_for=(WEST, "west.random")), "signature"),
        ("words of another channel", linked(signed_for=(WEST, "secrets")), "signature"),
        ("another space of the same name", linked(signed_for=(OTHER, "random")), "signature"),
        ("somebody else", linked(key=MAL), "signature"),
        ("a channel that is not let in", linked(f"{WEST} secrets", signed_for=(WEST, "secrets")), "link"),
        ("a space that is not let in", linked(f"{OTHER} random", signed_for=(OTHER, "random")), "link"),
        ("more hops than may be", linked(f"{WEST} random", ("Td-Hops", "2")), "link"),
        ("no hops", linked(f"{WEST} random", ("Td-Hops", "0")), "link"),
        ("hops beyond any", linked(f"{WEST} random", ("Td-Hops", "10")), "link"),
        ("hops twice", linked(f"{WEST} random", ("Td-Hops", "1"), ("td-hops", "1")), "link"),
        ("two origins", linked(f"{WEST} random", ("td-origin", f"{WEST} random")), "link"),
        ("no channel", linked(WEST), "link"),
        ("no origin", (("Td-Sig", sign(ADA, WEST, "chat", "random", MESSAGE.raw)),), "link"),
        ("a reserved header", linked(f"{WEST} random", ("Nats-Sequence", "1")), "header"),
        ("two signatures", (*linked(), ("td-sig", "x")), "header"),
    ],
)
def test_a_forged_message_of_another_space_is_refused(why: str, headers: Fields, expected: str) -> None:
    found = opened_via(headers)
    assert isinstance(found, Refused), why
    assert (found.reason, bool(found.detail)) == (expected, True)


def test_what_was_said_here_never_comes_in_over_a_link_whatever_the_link_says() -> None:
    headers = linked(f"{SPACE} general", signed_for=(SPACE, "general"))
    found = open_record(MAIN, SPACE, MAIN.via("west", ADA.id, "general"), headers, MESSAGE.raw, lambda _: True)
    assert isinstance(found, Refused)
    assert found.reason == "link"


def test_a_link_is_asked_only_of_what_its_sender_signed() -> None:
    """Whoever makes readers ask the steward needs messages that somebody signed."""
    asked: list[ClaimedOrigin] = []
    opened_via(linked(key=MAL), asked=asked)
    assert asked == []
    opened_via(linked(), asked=asked)
    assert asked == [SAID_THERE]


def test_a_message_under_another_name_than_the_links_is_refused() -> None:
    found = opened_via(linked(), channel="general")
    assert isinstance(found, Refused)
    assert found.reason == "link"


def test_size_strict_json_and_claimed_sender_hold_for_messages_of_other_spaces() -> None:
    large, lies = b" " * (MAX_PAYLOAD + 1), compose(Sender(BOB.id, "bob"), text="I am bob").raw
    twice = MESSAGE.raw[:-1] + b',"id":"' + MESSAGE.id.encode() + b'"}'
    for payload, expected in ((large, "too_large"), (twice, "malformed"), (lies, "sender_mismatch")):
        found = opened_via(linked(payload=payload), payload)
        assert isinstance(found, Refused)
        assert found.reason == expected
