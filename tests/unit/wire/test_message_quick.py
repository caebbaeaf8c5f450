"""Text is composed by a quicker way that must not differ from the strict one."""

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.errors import MalformedMessage, TooLarge
from tidings.wire import seal
from tidings.wire.message import (
    ExtensionPart,
    Mention,
    Message,
    Priority,
    Sender,
    _strictly_decoded,
    around,
    compose,
    decode,
)

ADA = Sender("U" + "A" * 55, "ada")


@given(st.text(min_size=1, max_size=300))
def test_what_the_quick_way_writes_the_strict_reader_reads_the_same(text: str) -> None:
    composed = compose(ADA, text=text)
    assert decode(composed.raw) == composed
    assert composed.text == text


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(MalformedMessage):
        compose(ADA, text="\ud800")


PLAIN = compose(ADA, text="hello").raw


def outcome(read: Callable[[bytes], Message], payload: bytes) -> Message | None:
    try:
        return read(payload)
    except (MalformedMessage, TooLarge):
        return None


@pytest.mark.parametrize(
    "payload",
    [
        PLAIN,
        PLAIN[:-1] + b',"priority":"now"}',
        PLAIN[:-1] + b',"priority":"next"}',
        PLAIN[:-1] + b',"id":"' + b"0" * 8 + b'"}',
        PLAIN.replace(b'{"kind"', b'{"kind":"text","kind"'),
        PLAIN.replace(b'"hello"', b'"hello","text":"other"'),
        PLAIN.replace(b'"hello"', b'"hello","unknown":NaN'),
        PLAIN.replace(b'"hello"', b'"\\ud800"'),
        PLAIN.replace(b'"hello"', b'"\xed\xa0\x80"'),
        PLAIN.replace(b'"hello"', b'"\\u0068ello"'),
        PLAIN.replace(b'"hello"', b'"h\\/i"'),
        PLAIN.replace(b'"hello"', b'"h\x7f\xc2\x85\\u0000"'),
        PLAIN.replace(b'"text","text"', b'"com.example.x","text"'),
        PLAIN[:-1] + b',"raw":"aGk="}',
        PLAIN[:-1] + b',"raw":""}',
        PLAIN[:-1] + b',"role":null}',
        PLAIN + b" ",
        b"\xef\xbb\xbf" + PLAIN,
        PLAIN.replace(b"T", b"t", 1),
        compose(ADA, text="hello", ts="2025-01-01T00:00:00.000Z").raw.replace(b"2025-01-01", b"2025-02-30"),
        compose(ADA, text="hi", data={"a": 1}).raw,
        b"[]",
        b"",
    ],
)
def test_the_quick_reader_says_what_the_strict_one_says(payload: bytes) -> None:
    assert outcome(decode, payload) == outcome(_strictly_decoded, payload)


@given(st.lists(st.tuples(st.integers(0, len(PLAIN) - 1), st.binary(max_size=3)), max_size=3))
def test_however_bytes_are_changed_both_readers_agree(changes: list[tuple[int, bytes]]) -> None:
    payload = PLAIN
    for position, piece in changes:
        payload = payload[:position] + piece + payload[position + 1 :]
    assert outcome(decode, payload) == outcome(_strictly_decoded, payload)


@given(
    text=st.text(max_size=200),
    priority=st.sampled_from(["now", "next", "low"]),
    mentions=st.sampled_from([(), (Mention("U" + "B" * 55, "bob"),)]),
    context=st.none() | st.just("lunch é \U0001f600"),
    role=st.none() | st.just("reviewer"),
)
def test_what_is_sealed_and_what_is_around_it_are_written_alike_by_both_ways(
    text: str, priority: Priority, mentions: tuple[Mention, ...], context: str | None, role: str | None
) -> None:
    sender = Sender(ADA.id, "ada", role)
    composed = compose(sender, text=text, priority=priority, mentions=mentions, context=context)
    without_bytes = msgspec.structs.replace(composed, raw=b"")
    assert seal.inside_of(composed) == seal.inside_of(without_bytes)
    part = ExtensionPart(seal.SEALED_KIND, {"v": 1, "n": "bm9uY2U=", "ct": "Y2lwaGVy"})
    assert around(composed, part).raw == around(without_bytes, part).raw
