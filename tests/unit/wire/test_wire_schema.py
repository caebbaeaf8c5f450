"""The JSON Schema of a message and its strict reader refuse the same documents, whatever the spelling."""

import copy
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import golden
import schema
from golden.cast import ADA, MESSAGE_ID
from golden.messages import artifact, base
from tidings.errors import MalformedMessage, WireError
from tidings.wire import strict_json
from tidings.wire.message import decode

VALIDATOR = Draft202012Validator(schema.message_schema())
BASES: list[dict[str, Any]] = [json.loads(each["payload"]) for each in golden.vectors()["messages"]["valid"]]


def reads(payload: bytes) -> bool:
    try:
        decode(payload)
    except WireError:
        return False
    return True


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place of a document at which something else can be put."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield (*path, key)
        yield from places(below, (*path, key))


def changed(document: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(document)
    *above, last = path
    place: Any = made
    for key in above:
        place = place[key]
    place[last] = value
    return made


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
    st.sampled_from(["", "\n", "a\n", "text", "data", "artifact", "com.example.x", "a.b", "now", ADA.id, "x/y", "s:x"]),
    st.sampled_from([MESSAGE_ID, "sha256:" + "0" * 64, "x" * 64, "x" * 65, "x" * 256, "ü" * 256, "😀" * 256, "/"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    made: dict[str, Any] = draw(st.sampled_from(BASES))
    for _ in range(draw(st.integers(1, 2))):
        made = changed(made, draw(st.sampled_from(list(places(made)))), draw(VALUES))
    return made


@given(documents())
def test_a_document_that_strict_json_can_carry_is_read_iff_the_schema_takes_it(document: dict[str, Any]) -> None:
    payload = json.dumps(document).encode()
    try:
        found = strict_json.loads(payload)
    except MalformedMessage:
        return  # a lone surrogate, say: for the reader of the bytes alone
    assert reads(payload) is VALIDATOR.is_valid(found), document


LITERALS = [
    "0",
    "-0",
    "-0.0",
    "3.0",
    "1e2",
    "1E+2",
    "25e-1",
    "2.50",
    "0e5",
    "1e15",
    "1e16",
    "-1.0",
    "3.00000000000000000001",
]
LITERALS += ["9007199254740991", "9007199254740991.0", "9007199254740991.4", "9007199254740991.5", "9007199254740992"]
LITERALS += ["9007199254740992.0", "9007199254740993", "9223372036854775807", "true", '"3"', "null", "[3]"]


@pytest.mark.parametrize("literal", LITERALS)
def test_a_size_is_a_whole_number_up_to_2_to_the_53_however_it_is_spelled(literal: str) -> None:
    payload = json.dumps(artifact()).replace('"size": 3', f'"size": {literal}').encode()
    assert reads(payload) is VALIDATOR.is_valid(json.loads(payload))


def test_a_size_of_3_is_3_however_it_is_spelled() -> None:
    payload = json.dumps(artifact())
    spelled = {decode(payload.replace('"size": 3', f'"size": {each}').encode()).parts for each in ("3", "3.0", "30e-1")}
    assert len(spelled) == 1


YEARS = st.sampled_from([0, 1, 4, 96, 100, 400, 1600, 1900, 2000, 2023, 2024, 2100, 9996, 9999]) | st.integers(0, 9999)
TIMES = st.tuples(
    YEARS, st.integers(0, 13), st.integers(0, 32), st.integers(0, 25), st.integers(0, 61), st.integers(0, 61)
)


@given(TIMES)
@example((0, 1, 1, 0, 0, 0))
@example((2000, 2, 29, 23, 59, 59))
@example((1900, 2, 29, 0, 0, 0))
@example((2025, 1, 1, 24, 0, 0))
@example((2016, 12, 31, 23, 59, 60))
def test_a_time_is_one_of_the_calendar_from_year_1_on(parts: tuple[int, ...]) -> None:
    try:
        datetime(*parts)  # type: ignore[arg-type]  # noqa: DTZ001
        exists = True
    except ValueError:
        exists = False
    year, month, day, hour, minute, second = parts
    text = f"{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.000Z"
    document = base(ts=text)
    assert VALIDATOR.is_valid(document) is exists
    assert reads(json.dumps(document).encode()) is exists
