"""Strict JSON refuses what two readers could understand differently, and reads the rest as everybody does."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.errors import MalformedMessage
from tidings.wire.strict_json import MAX_DEPTH, dumps, loads

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text
)
documents = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4), max_leaves=25
)


@given(documents, st.booleans(), st.sampled_from([None, 1]))
def test_a_well_behaved_document_reads_as_the_standard_library_reads_it(
    document: Any, ascii_: bool, indent: int | None
) -> None:
    data = json.dumps(document, ensure_ascii=ascii_, indent=indent).encode()
    assert loads(data) == json.loads(data) == document


@given(documents)
def test_what_is_written_reads_back(document: Any) -> None:
    assert loads(dumps(document)) == document


@given(st.binary(max_size=60) | st.text('{}[]",:\\u01dDeE+-. \nNaIfty', max_size=60).map(str.encode))
def test_whatever_is_accepted_the_standard_library_reads_the_same_way(data: bytes) -> None:
    try:
        document = loads(data)
    except MalformedMessage:
        return
    assert document == json.loads(data)
    assert loads(dumps(document)) == document


@given(st.dictionaries(text, scalars, min_size=1, max_size=4), st.integers(0, 3), st.data())
def test_a_key_twice_is_refused_at_every_level(members: dict[str, Any], level: int, data: st.DataObject) -> None:
    pairs = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in members.items()]
    pairs.append(f"{json.dumps(data.draw(st.sampled_from(sorted(members))), ensure_ascii=False)}: 0")
    document = "[" * level + "{" + ",".join(pairs) + "}" + "]" * level
    with pytest.raises(MalformedMessage, match="twice"):
        loads(document.encode())


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
def test_nesting_is_read_to_the_limit_and_refused_beyond_it(opening: str) -> None:
    per = opening.count("[") + opening.count("{")
    closing = "".join("]" if c == "[" else "}" for c in reversed(opening) if c in "[{")

    def nested(times: int) -> bytes:
        return (opening * times + "0" + closing * times).encode()

    assert loads(nested(MAX_DEPTH // per)) == json.loads(nested(MAX_DEPTH // per))
    for times in (MAX_DEPTH // per + 1, 10_000):
        with pytest.raises(MalformedMessage, match="deeper than 32"):
            loads(nested(times))
        with pytest.raises(MalformedMessage):
            loads((opening * times).encode())


@given(st.lists(st.text('[]{}"\\', max_size=30), min_size=5, max_size=30))
def test_brackets_inside_text_are_not_nesting(texts: list[str]) -> None:
    assert loads(json.dumps(texts).encode()) == texts


@pytest.mark.parametrize("inside", ["[", "{", '"[', '\\"[', "\\[", '\n"['])
def test_many_brackets_inside_text_are_not_nesting_either(inside: str) -> None:
    document = [inside * 100, {inside * 50: "]"}]
    assert loads(json.dumps(document).encode()) == document


def test_wide_documents_are_not_deep() -> None:
    wide: list[Any] = [[[]], {}] * 2000
    assert loads(json.dumps(wide).encode()) == wide


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"NaN", "no NaN"),
        (b"[Infinity]", "no Infinity"),
        (b'{"a":-Infinity}', "no -Infinity"),
        (b"1e999", "does not fit a double"),
        (b"0." + b"1" * 70, "does not fit a double"),
        (b"9223372036854775808", "does not fit 64 bits"),
        (b"-9223372036854775809", "does not fit 64 bits"),
        (b"1" * 100_000, "does not fit 64 bits"),
        (b'"\\ud800"', "lone surrogate"),
        (b'{"\\uDC00":1}', "lone surrogate"),
        (b'"\\ude00\\ud83d"', "lone surrogate"),
        (b'"\xed\xa0\x80"', "not UTF-8"),
        (b"\xff", "not UTF-8"),
        ('"a"'.encode("utf-16"), "not UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"{} {}", "not JSON: Extra data"),
        (b"1,", "not JSON: Extra data"),
        (b"", "not JSON"),
        (b"{'a':1}", "not JSON"),
        (b'"\x01"', "not JSON"),
        (b"[1,]", "not JSON"),
        (b"01", "not JSON"),
        ("٣".encode(), "not JSON"),
    ],
)
def test_a_document_that_is_not_strict_is_refused_with_the_reason(data: bytes, sentence: str) -> None:
    with pytest.raises(MalformedMessage, match=sentence):
        loads(data)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"9223372036854775807", 2**63 - 1),
        (b"-9223372036854775808", -(2**63)),
        (b'"\\ud83d\\ude00"', "😀"),
        (b'"\\\\ud800"', "\\ud800"),
        (b" \t\r\n1 ", 1),
    ],
)
def test_the_edges_of_what_is_allowed_are_read(data: bytes, value: Any) -> None:
    assert loads(data) == value


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "\ud800", 2**63, b"bytes", {1: "a", "1": "b"}, {1, 2}])
def test_what_could_not_be_read_back_is_not_written(bad: Any) -> None:
    with pytest.raises(MalformedMessage):
        dumps([bad])


def test_a_document_that_contains_itself_is_not_written() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(MalformedMessage):
        dumps(loop)


def test_writing_is_compact_and_utf8() -> None:
    assert dumps({"a": [1, "ü"]}) == '{"a":[1,"ü"]}'.encode()
