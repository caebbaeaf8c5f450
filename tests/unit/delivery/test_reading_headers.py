"""Records read in bulk are cut from the broker's words exactly as `split_block` cuts them."""

from hypothesis import given
from hypothesis import strategies as st

from tidings.nats.core import status_of
from tidings.wire.records import DIRECT_GET_HEADERS, Page, encode_headers, parse_time, split_block

APPENDED = (
    ("Nats-Stream", "LOG_main"),
    ("Nats-Subject", "td.main.chat.x.general"),
    ("Nats-Sequence", "71"),
    ("Nats-Time-Stamp", "2026-01-02T03:04:05.123456789Z"),
    ("Nats-Num-Pending", "3"),
    ("Nats-Last-Sequence", "70"),
)
lines = st.sampled_from(
    [
        *(f"{name}: {value}".encode() for name, value in APPENDED),
        b"Td-Sig: abc",
        b"Nats-Sequence: 999",
        b"X",
        b"",
        b": x",
    ]
) | st.binary(max_size=20)
own_blocks = st.one_of(
    st.binary(max_size=60),
    st.lists(lines, max_size=8).map(lambda each: b"NATS/1.0\r\n" + b"\r\n".join(each) + b"\r\n\r\n"),
    st.lists(lines, max_size=8).map(lambda each: b"NATS/1.0\r\n" + b"\r\n".join(each)),
)


def tail(fields: tuple[tuple[str, str], ...] = APPENDED) -> bytes:
    return encode_headers(fields).removeprefix(b"NATS/1.0\r\n")


@given(own_blocks, st.integers(4, 6), st.sampled_from(["2026-01-02T03:04:05Z", "2026-01-02T03:04:05.5Z", None]))
def test_a_record_is_cut_where_split_block_cuts_it(own: bytes, count: int, stamp: str | None) -> None:
    fields = tuple((n, stamp if stamp and n == "Nats-Time-Stamp" else v) for n, v in APPENDED[:count])
    block = (own[:-2] if own else b"NATS/1.0\r\n") + tail(fields)  # how the broker appends: two bytes off, then its own
    page = Page()
    assert page.take(block, b"body")
    expected, said = split_block(block, DIRECT_GET_HEADERS)
    assert page.own_blocks == [expected]
    assert (page.seqs, page.subjects, page.payloads) == ([71], ["td.main.chat.x.general"], [b"body"])
    assert page.times == [parse_time(said["Nats-Time-Stamp"])]


@given(st.binary(max_size=80) | own_blocks)
def test_what_is_no_record_is_not_taken_for_one(block: bytes) -> None:
    _, said = split_block(block, DIRECT_GET_HEADERS)
    needed = {"Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp"}
    if not needed <= said.keys():
        assert not Page().take(block, b"")


def test_the_end_of_a_page_is_no_record_and_has_a_status() -> None:
    end = b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: 9\r\n\r\n"
    assert not Page().take(end, b"")
    assert (status_of(end), status_of(b"NATS/1.0\r\n\r\n"), status_of(b"garbage! 204\r\n\r\n")) == (204, None, None)
