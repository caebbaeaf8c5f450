"""The broker's headers are the tail of a block; what a sender wrote before it cannot pass for them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.errors import HeaderRefused, WireError
from tidings.wire.records import (
    CONTROL_HEADERS,
    DIRECT_GET_HEADERS,
    REPUBLISH_HEADERS,
    Field,
    Headers,
    encode_headers,
    moment,
    own_fields,
    parse_time,
    read_plain_block,
    read_plain_copy,
    record_time,
    refused_headers,
    seconds_of,
    split_block,
)

APPENDED: tuple[Field, ...] = (
    ("Nats-Stream", "LOG_main"),
    ("Nats-Subject", "td.main.space"),
    ("Nats-Sequence", "7"),
    ("Nats-Time-Stamp", "2025-11-15T12:00:00Z"),
    ("Nats-Num-Pending", "3"),
    ("Nats-Last-Sequence", "6"),
)
COPIED = tuple(field for field in APPENDED if field[0] != "Nats-Num-Pending")

field_names = st.text(
    st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=":"), min_size=1, max_size=12
)
field_values = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=12).map(
    lambda value: value.strip(" \t")
)
broker_names = st.sampled_from(sorted(DIRECT_GET_HEADERS | CONTROL_HEADERS))
sender_fields = st.lists(st.tuples(field_names | broker_names, field_values), max_size=6).map(tuple)


@given(sender_fields)
def test_what_is_encoded_parses_back_in_wire_order(fields: tuple[Field, ...]) -> None:
    assert Headers.parse(encode_headers(fields)) == Headers(fields)


@given(sender_fields)
def test_the_broker_has_the_last_word_whatever_the_sender_set(fields: tuple[Field, ...]) -> None:
    headers = Headers.parse(encode_headers((*fields, *APPENDED)))
    for name, value in APPENDED:
        assert headers.last(name) == headers.last(name.lower()) == value
    assert own_fields(headers, DIRECT_GET_HEADERS) == fields


@given(sender_fields)
def test_a_live_copy_gives_back_exactly_what_the_sender_wrote(fields: tuple[Field, ...]) -> None:
    assert own_fields(Headers.parse(encode_headers((*fields, *COPIED))), REPUBLISH_HEADERS) == fields


@given(st.binary(max_size=80))
def test_the_broker_is_heard_even_after_garbage(garbage: bytes) -> None:
    # The broker cuts two bytes off the sender's block and writes on from there.
    tail = encode_headers(APPENDED).removeprefix(b"NATS/1.0\r\n")
    own, appended = split_block(garbage + b"\r\n" + tail, DIRECT_GET_HEADERS)
    assert appended == dict(APPENDED)
    assert own == garbage + b"\r\n\r\n"


@given(st.binary(max_size=40))
def test_a_block_left_open_by_the_sender_cannot_forge_more_than_it_loses(garbage: bytes) -> None:
    forged = encode_headers([("Nats-Stream", "X"), ("Nats-Subject", "forged"), ("Nats-Sequence", "999")])[:-4]
    tail = encode_headers(APPENDED).removeprefix(b"NATS/1.0\r\n")
    _, appended = split_block(forged + b"\r\nX-" + garbage + tail, DIRECT_GET_HEADERS)
    assert appended["Nats-Subject"] == "td.main.space"
    assert appended["Nats-Sequence"] == "7"


@given(st.binary(max_size=80) | st.binary(max_size=60).map(lambda middle: b"NATS/1.0\r\n" + middle + b"\r\n\r\n"))
def test_a_hostile_block_parses_or_is_a_wire_error_and_nothing_else(raw: bytes) -> None:
    own, appended = split_block(raw, DIRECT_GET_HEADERS)
    assert isinstance(own, bytes)
    assert set(appended) <= DIRECT_GET_HEADERS
    try:
        headers = Headers.parse(raw)
    except WireError:
        return
    assert Headers.parse(encode_headers(headers.fields)).fields == headers.fields


@given(sender_fields)
def test_cutting_a_block_and_cutting_its_fields_agree(fields: tuple[Field, ...]) -> None:
    raw = encode_headers((*fields, *APPENDED))
    own, _ = split_block(raw, DIRECT_GET_HEADERS)
    assert Headers.parse(own).fields == own_fields(Headers.parse(raw), DIRECT_GET_HEADERS)


def test_a_status_comes_only_from_the_first_line() -> None:
    shadow = Headers.parse(b"NATS/1.0\r\nStatus: 100\r\nDescription: x\r\n\r\n")
    assert (shadow.status, shadow.description) == (None, "")
    real = Headers.parse(b"NATS/1.0 409 Consumer Deleted\r\nNats-Num-Pending: 0\r\n\r\n")
    assert (real.status, real.description) == (409, "Consumer Deleted")
    assert Headers.parse(b"NATS/1.0 503\r\n\r\n").status == 503


@pytest.mark.parametrize(
    "first", [b"NATS/1.0 abc", b"NATS/1.0 20", b"NATS/1.0204", b"nats/1.0", b"NATS/1.1", b"", b"NATS/1.0\n"]
)
def test_a_block_with_another_first_line_is_malformed(first: bytes) -> None:
    with pytest.raises(WireError):
        Headers.parse(first + b"\r\nA: b\r\n\r\n")


@pytest.mark.parametrize(
    "name", ["Nats-Subject", "nats-ttl", "NATS-Rollup", "nats-msg-id", "Status", "status", "KV-Operation", "kv-x"]
)
def test_a_sender_may_not_set_what_is_the_brokers(name: str) -> None:
    fields = (("Td-Sig", "s"), (name, "1"))
    assert refused_headers(fields) == (name,)


def test_a_sender_may_name_its_message_and_add_headers_of_its_own() -> None:
    fields = (("Nats-Msg-Id", "i"), ("Td-Sig", "s"), ("Natso", "x"), ("X-Status", "1"), ("traceparent", "00"))
    assert refused_headers(fields) == ()


def test_a_header_the_broker_adds_to_control_requests_is_not_the_senders() -> None:
    headers = Headers((("Nats-Request-Info", "forged"), ("A", "b"), ("Nats-Request-Info", "{}")))
    assert own_fields(headers, CONTROL_HEADERS) == headers.fields[:2]
    twice = Headers((("Nats-Request-Info", "forged"), ("Nats-Request-Info", "{}")))
    assert own_fields(twice, CONTROL_HEADERS) == twice.fields[:1]


def test_a_shadow_right_before_the_brokers_tail_stays_the_senders() -> None:
    headers = Headers((("Nats-UpTo-Sequence", "9"), *APPENDED))
    assert own_fields(headers, DIRECT_GET_HEADERS) == (("Nats-UpTo-Sequence", "9"),)


@pytest.mark.parametrize(
    "field",
    [("A\r\nB", "x"), ("A", "x\r\nNats-Subject: y"), ("A", "x\n"), ("A", "\0"), ("A:", "x"), ("", "x"), ("A b", "x")],
)
def test_a_header_that_would_start_another_line_is_not_written(field: Field) -> None:
    with pytest.raises(HeaderRefused):
        encode_headers([field])


_TAIL = (
    b"Nats-Stream: LOG_main\r\nNats-Subject: td.main.chat.U.general\r\nNats-Sequence: 7\r\n"
    b"Nats-Time-Stamp: 2026-01-01T00:00:00.5Z\r\nNats-Last-Sequence: 3\r\n\r\n"
)


def _slowly(raw: bytes) -> tuple[object, ...]:
    own, broker = split_block(raw, REPUBLISH_HEADERS)
    names = ("Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Last-Sequence")
    return Headers.parse(own).fields, *(broker[name] for name in names)


def test_a_plain_live_copy_reads_the_same_in_one_look() -> None:
    raw = b"NATS/1.0\r\nTd-Sig: abc\r\nNats-Msg-Id: 1\r\n" + _TAIL
    assert read_plain_copy(raw) == _slowly(raw)


@pytest.mark.parametrize(
    "own",
    [
        b"",
        b"Td-Sig: abc\r\n",
        b"Td-Sig: abc\r\nTd-Sig: abc\r\nNats-Msg-Id: 1\r\n",
        b"Td-Sig: abc\r\nNats-Msg-Id: 1\r\nNats-Sequence: 99\r\n",
        b"Td-Sig: abc\r\nNats-Msg-Id: 1\r\nNats-Stream: X\r\n",
        b"Td-Sig: abc\r\nNats-Msg-Id: 1\r\nStatus: 503\r\n",
        b"td-sig: abc\r\nNats-Msg-Id: 1\r\n",
        b"Td-Sig: a b\r\nNats-Msg-Id: 1\r\n",
        b"Td-Sig: a\tb\r\nNats-Msg-Id: 1\r\n",
        b"Td-Sig: a\x0bb\r\nNats-Msg-Id: 1\r\n",
        b"Td-Sig: abc\r\nNats-Msg-Id: \xc3\xa9\r\n",
        b"Td-Sig:  abc\r\nNats-Msg-Id: 1\r\n",
        _TAIL[:-2],
        b"Td-Sig: abc\r\nNats-Msg-Id: 1\r\n" + _TAIL[:-2],
    ],
)
def test_anything_else_is_left_to_the_careful_reader(own: bytes) -> None:
    assert read_plain_copy(b"NATS/1.0\r\n" + own + _TAIL) is None


def test_a_first_line_with_a_status_is_no_plain_copy() -> None:
    block = b"NATS/1.0 503\r\nTd-Sig: abc\r\nNats-Msg-Id: 1\r\n" + _TAIL
    assert read_plain_copy(block) is None
    assert read_plain_copy(block.replace(b" 503", b"") + b"\r\n") is None


_LINES = st.sampled_from(
    [b"Td-Sig: abc", b"Nats-Msg-Id: 1", b"td-sig: abc", b"Td-Sig: a b", b"Td-Sig:  abc", b"Status: 503", b"X", b""]
)


@given(st.lists(_LINES, max_size=4), st.sampled_from([b"", b" 503", b"\r\n"]), st.sampled_from([b"", b"\r\n", b"x"]))
def test_a_plain_block_reads_as_the_careful_reader_reads_it(lines: list[bytes], first: bytes, last: bytes) -> None:
    raw = b"\r\n".join([b"NATS/1.0" + first, *lines]) + b"\r\n\r\n" + last
    found = read_plain_block(raw)
    assert found is None or found == Headers.parse(raw).fields
    if lines == [b"Td-Sig: abc", b"Nats-Msg-Id: 1"] and not first and not last:
        assert found == (("Td-Sig", "abc"), ("Nats-Msg-Id", "1"))


def test_a_plain_block_is_read_in_one_look() -> None:
    assert read_plain_block(b"NATS/1.0\r\nTd-Sig: abc\r\nNats-Msg-Id: 1\r\n\r\n") is not None


# --- Moments of the control plane: one spelling, exact to the nanosecond ---


#: 0001-01-01 and 9999-12-31 in nanoseconds since 1970
FIRST, LAST = -62_135_596_800 * 10**9, 253_402_300_799 * 10**9


@given(st.integers(0, LAST))
def test_the_time_of_a_record_is_read_back_to_the_nanosecond(time_ns: int) -> None:
    text = record_time(time_ns)
    assert len(text) == 30
    assert parse_time(text) == time_ns


@given(st.integers(0, LAST), st.integers(0, LAST))
def test_times_of_records_sort_as_text(one: int, other: int) -> None:
    assert (record_time(one) < record_time(other)) is (one < other)


def test_a_moment_has_three_decimals_as_the_time_of_a_message_does() -> None:
    assert moment(1_763_208_000.1234) == "2025-11-15T12:00:00.123Z"
    assert seconds_of("2025-11-15T12:00:00.123Z") == pytest.approx(1_763_208_000.123, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "time_ns"),
    [
        ("2025-11-15T12:00:00Z", 1_763_208_000_000_000_000),
        ("2025-11-15T12:00:00.1Z", 1_763_208_000_100_000_000),
        ("2025-11-15T12:00:00.000000001Z", 1_763_208_000_000_000_001),
        ("2025-11-15T12:00:00.123+00:00", 1_763_208_000_123_000_000),
        ("2025-11-15T13:00:00.123+01:00", 1_763_208_000_123_000_000),
    ],
)
def test_what_the_broker_and_older_stewards_wrote_is_read(text: str, time_ns: int) -> None:
    assert parse_time(text) == time_ns


@pytest.mark.parametrize(
    "text", ["", "Z", "yesterday", "2025-02-30T12:00:00Z", "2025-11-15T12:00:00.xZ", "0000-01-01T00:00:00Z"]
)
def test_what_is_no_time_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_time(text)
