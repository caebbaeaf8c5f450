"""A message decodes to what every reader sees, keeps its bytes, and cannot be sent in a form nobody would accept."""

import json
import time
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.errors import MalformedMessage, TooLarge, WireError
from tidings.wire.message import (
    MAX_MENTIONS,
    MAX_PAYLOAD,
    ArtifactPart,
    DataPart,
    ExtensionPart,
    Mention,
    Part,
    Priority,
    Sender,
    TextPart,
    compose,
    decode,
    encode,
    id_time_ms,
    is_message_id,
    new_id,
    timestamp,
)
from tidings.wire.signing import KeyPair

ADA = Sender(KeyPair.generate().id, "ada", "planner")
BOB = Mention(KeyPair.generate().id, "bob")

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
artifacts = st.builds(
    ArtifactPart,
    name=st.sampled_from(["plan.pdf", "…", "a b", "..."]),
    media_type=st.sampled_from(["text/plain", "application/vnd.x+json", "text/plain; charset=utf-8"]),
    digest=st.just("sha256:" + "ab" * 32),
    size=st.integers(0, 2**53 - 1),
    uri=st.none() | st.just("https://files.example/x?y#z"),
)
extensions = st.dictionaries(text, values, max_size=3).map(
    lambda body: ExtensionPart("com.example.widget", body | {"kind": "com.example.widget"})
)
parts: st.SearchStrategy[list[Part]] = st.lists(
    st.builds(TextPart, text) | st.builds(DataPart, values) | artifacts | extensions, min_size=1, max_size=4
)


@given(parts, st.sampled_from(["now", "next", "low"]), st.lists(st.just(BOB), max_size=3), st.none() | st.just("c 1"))
def test_what_is_composed_is_what_is_read(
    parts: list[Part], priority: Priority, mentions: list[Mention], context: str | None
) -> None:
    message = compose(ADA, parts=parts, priority=priority, mentions=mentions, context=context)
    assert decode(message.raw) == message
    assert encode(message) is message.raw
    assert message.parts == tuple(parts)
    assert (message.sender, message.priority, message.context) == (ADA, priority, context)
    assert message.mentions == tuple(mentions)


def test_composing_fills_in_what_a_sender_need_not_say() -> None:
    before = datetime.now(UTC)
    message = compose(ADA, text="hello", data={"a": 1}, parts=[TextPart("more")])
    assert is_message_id(message.id)
    assert message.priority == "next"
    assert message.parts == (TextPart("hello"), DataPart({"a": 1}), TextPart("more"))
    assert message.text == "hello\nmore"
    assert [part.kind for part in message.parts] == ["text", "data", "text"]
    assert abs(message.ts_ms - before.timestamp() * 1000) < 10_000


def test_data_may_be_null() -> None:
    assert compose(ADA, data=None).parts == (DataPart(None),)


def test_time_is_written_in_utc_with_milliseconds() -> None:
    when = datetime(2025, 11, 15, 14, 0, 0, 1999, tzinfo=timezone(timedelta(hours=2)))
    assert timestamp(when) == "2025-11-15T12:00:00.001Z"
    assert compose(ADA, text="x", ts=timestamp(when)).ts_ms == 1763208000001


def test_a_received_message_is_never_written_again() -> None:
    payload = json.dumps(json.loads(compose(ADA, text="hi").raw) | {"new": [1], "raw": "forged"}, indent=3).encode()
    message = decode(payload)
    assert message.raw is payload
    assert encode(message) is payload


def test_a_message_changed_after_it_was_received_is_not_sent_as_if_it_were_not() -> None:
    changed = msgspec.structs.replace(compose(ADA, text="hi"), parts=(TextPart("other"),))
    with pytest.raises(MalformedMessage, match="compose a new one"):
        encode(changed)


def test_an_unknown_reverse_dns_part_is_kept_verbatim_and_ignored() -> None:
    part = {"kind": "com.example.widget", "body": {"kind": "text"}, "of": 1, "text": "not text"}
    message = decode(json.dumps(json.loads(compose(ADA, text="x").raw) | {"parts": [part]}).encode())
    assert message.parts == (ExtensionPart("com.example.widget", part),)
    assert message.text == ""


@pytest.mark.parametrize(
    "kind", ["widget", "extension", "", "Com.example", "com.", ".com", "com..x", "a.b\n", "a." + "b" * 130]
)
def test_an_unknown_kind_that_is_no_reverse_dns_name_is_refused(kind: str) -> None:
    document = json.loads(compose(ADA, text="x").raw) | {"parts": [{"kind": kind, "of": "a.b", "body": {}}]}
    with pytest.raises(MalformedMessage, match="unknown"):
        decode(json.dumps(document).encode())


def test_the_payload_limit_is_exact_and_found_before_sending() -> None:
    room = MAX_PAYLOAD - len(compose(ADA, text="").raw)
    assert len(compose(ADA, text="x" * room).raw) == MAX_PAYLOAD
    with pytest.raises(TooLarge, match="artifact reference"):
        compose(ADA, text="x" * (room + 1))


@pytest.mark.parametrize(
    "changes",
    [
        {"mentions": [BOB] * (MAX_MENTIONS + 1)},
        {"reply_to": "yesterday"},
        {"context": ""},
        {"context": "a\nb"},
        {"id": "1"},
        {"ts": "2025-02-30T00:00:00.000Z"},
        {"ts": "2025-01-01T24:00:00.000Z"},
        {"priority": "urgent"},
        {"data": float("nan")},
        {"data": 2**64},
        {"data": b"bytes"},
        {"data": "\ud800"},
        {"parts": [TextPart("x")] * 65},
        {"parts": [ExtensionPart("widget", {})]},
        {"parts": [ArtifactPart("../x", "text/plain", "sha256:" + "0" * 64, 1)]},
        {"parts": [ArtifactPart("..", "text/plain", "sha256:" + "0" * 64, 1)]},
        {"parts": [ArtifactPart("x", "text", "sha256:" + "0" * 64, 1)]},
        {"parts": [ArtifactPart("x", "text/plain", "sha256:" + "0" * 63, 1)]},
        {"parts": [ArtifactPart("x", "text/plain", "sha256:" + "0" * 64, -1)]},
        {"parts": [ArtifactPart("x", "text/plain", "sha256:" + "0" * 64, 1, "no uri")]},
    ],
)
def test_what_no_reader_would_accept_cannot_be_composed(changes: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        compose(ADA, **({"text": "x"} | changes))


def test_a_message_without_parts_says_nothing_and_is_refused() -> None:
    with pytest.raises(MalformedMessage):
        compose(ADA)


def test_a_complaint_about_a_hostile_payload_is_short_and_printable() -> None:
    hostile = json.loads(compose(ADA, text="x").raw) | {"priority": "\x1b[2J" + "x" * 5000}
    with pytest.raises(MalformedMessage) as caught:
        decode(json.dumps(hostile).encode())
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


json_values = values.map(lambda value: json.dumps(value).encode())


@given(st.binary(max_size=60) | json_values)
def test_arbitrary_bytes_are_a_wire_error(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode(payload)


@given(st.sampled_from(["id", "ts", "from", "parts", "priority", "mentions", "reply_to", "context"]), values)
def test_a_field_of_any_other_value_is_refused_or_understood(name: str, value: Any) -> None:
    payload = json.dumps(json.loads(compose(ADA, text="x").raw) | {name: value}).encode()
    try:
        message = decode(payload)
    except MalformedMessage:
        return
    again = decode(encode(msgspec.structs.replace(message, raw=b"")))
    assert msgspec.structs.replace(again, raw=payload) == message


# --- Ids sort by time and have one spelling ---


def test_new_ids_are_message_ids_that_differ_and_carry_the_time() -> None:
    before = time.time_ns() // 1_000_000
    made = [new_id() for _ in range(100)]
    after = time.time_ns() // 1_000_000
    assert len(set(made)) == 100
    assert all(is_message_id(one) for one in made)
    times = [id_time_ms(one) for one in made]
    assert all(when is not None and before <= when <= after for when in times)


def test_ids_made_later_sort_later() -> None:
    made = [new_id() for _ in range(1000)]
    assert made == sorted(made)


@pytest.mark.parametrize(
    "change", [str.upper, lambda t: t + "\n", lambda t: t.replace("-", ""), lambda t: "{" + t + "}"]
)
def test_another_spelling_of_an_id_is_not_an_id(change: object) -> None:
    assert callable(change)
    spelled = change("019a8a3c-5c00-7abc-8def-0123456789ab")
    assert not is_message_id(spelled)
    assert id_time_ms(spelled) is None


@given(st.uuids(version=4).map(str) | st.text(max_size=40))
def test_what_is_not_version_7_has_no_time(text: str) -> None:
    assert id_time_ms(text) is None
