"""Frames and blocks: what goes in comes out, and nothing malformed opens, whatever it claims to hold."""

import tracemalloc

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tidings.errors import MalformedFrame
from tidings.wire.frames import (
    MAX_FRAME_MESSAGES,
    Block,
    Frame,
    FrameRecord,
    Lost,
    Ref,
    decode_frame,
    encode_block,
    encode_frame,
    frame_id,
    open_block,
    raw_size,
)

pack = msgspec.msgpack.encode
texts = st.text(max_size=20)
headers = st.lists(st.tuples(texts, texts), max_size=3).map(tuple)


@st.composite
def records(draw: st.DrawFn) -> list[FrameRecord]:
    seqs = sorted(draw(st.sets(st.integers(0, 2**63 - 1), min_size=1, max_size=8)))
    return [
        FrameRecord(seq, draw(st.integers(0, 2**62)), draw(texts), draw(headers), draw(st.binary(max_size=60)))
        for seq in seqs
    ]


def opened(block: Block | Ref) -> tuple[FrameRecord, ...]:
    assert isinstance(block, Block)
    return open_block(block)


lost = st.lists(st.builds(Lost, texts, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), texts), max_size=3)


@given(st.lists(records(), max_size=4), lost, st.integers(1, 2**63 - 1), st.none() | st.just((1, 2, 3)))
def test_what_goes_into_a_frame_comes_out(
    runs: list[list[FrameRecord]], losses: list[Lost], number: int, prev: tuple[int, int, int] | None
) -> None:
    data = encode_frame("owner", "epoch", "first", number, map(encode_block, runs), prev=prev, lost=losses)
    frame = decode_frame(data)
    assert (frame.owner, frame.epoch, frame.series, frame.number, frame.prev) == (
        "owner",
        "epoch",
        "first",
        number,
        prev,
    )
    assert frame.lost == tuple(losses)
    assert [opened(block) for block in frame.blocks] == [tuple(run) for run in runs]
    again = encode_frame("owner", "epoch", "first", number, map(encode_block, runs), prev=prev, lost=losses)
    assert frame_id(again) == frame_id(data)
    assert frame_id(encode_frame("owner", "epoch", "again", number, map(encode_block, runs))) != frame_id(data)


@given(records())
def test_the_size_of_a_record_is_never_understated(run: list[FrameRecord]) -> None:
    assert sum(map(raw_size, run)) >= sum(len(record.payload) + len(record.tail) for record in run)


@given(st.binary(max_size=200))
def test_garbage_is_no_frame_and_no_block(garbage: bytes) -> None:
    with pytest.raises(MalformedFrame):
        decode_frame(garbage)
    for codec in (0, 1):
        with pytest.raises(MalformedFrame):
            open_block(Block(codec, 1, 1, 1, max(len(garbage), 1), garbage))


@given(records(), st.data())
def test_a_damaged_frame_opens_as_what_it_says_or_not_at_all(run: list[FrameRecord], data: st.DataObject) -> None:
    frame = bytearray(encode_frame("owner", "epoch", "first", 1, [encode_block(run)]))
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= data.draw(st.integers(1, 255))
    try:
        damaged = decode_frame(bytes(frame)).blocks
        records = [opened(block) for block in damaged]
    except MalformedFrame:
        return
    for block, found in zip(damaged, records, strict=True):
        assert (len(found), found[0].seq, found[-1].seq) == (block.count, block.first, block.last)


def kept(seq: int) -> FrameRecord:
    return FrameRecord(seq, 1, "chat.a.b", (), b"x")


def block_of(run: list[FrameRecord], **lies: object) -> Block:
    true = msgspec.msgpack.decode(encode_block(run), type=Block)
    return msgspec.structs.replace(true, **lies)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block_of([kept(1), kept(2)], count=1), id="more records than it says"),
        pytest.param(block_of([kept(1)], count=2), id="fewer records than it says"),
        pytest.param(block_of([kept(2), kept(1)], first=1, last=2), id="not in order"),
        pytest.param(block_of([kept(1), kept(1)]), id="one twice"),
        pytest.param(block_of([kept(1), kept(2)], first=0), id="another first"),
        pytest.param(block_of([kept(1), kept(2)], last=3), id="another last"),
        pytest.param(block_of([kept(1)], raw_size=9), id="another size"),
        pytest.param(block_of([kept(1)], codec=1), id="another codec"),
        pytest.param(block_of([kept(1)], body=b""), id="empty"),
        pytest.param(block_of([kept(1)], body=pack([]), raw_size=1), id="no records"),
        pytest.param(block_of([kept(1)], body=pack([[1, 1, "t", [], "text"]]), raw_size=8), id="a text for bytes"),
    ],
)
def test_a_block_that_is_not_what_it_says_is_refused(block: Block) -> None:
    with pytest.raises(MalformedFrame):
        open_block(block)


GOOD = (1, "owner", "epoch", "first", 1, None, (), ())


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param((2, *GOOD[1:]), id="another version"),
        pytest.param(GOOD[:-1], id="a field too few"),
        pytest.param((*GOOD[:3], "", *GOOD[4:]), id="no series"),
        pytest.param((*GOOD[:3], "s" * 129, *GOOD[4:]), id="a series too long"),
        pytest.param((*GOOD[:4], 0, *GOOD[5:]), id="number zero"),
        pytest.param((*GOOD[:4], -1, *GOOD[5:]), id="a negative number"),
        pytest.param((*GOOD[:5], (1, 2), *GOOD[6:]), id="half a previous frame"),
        pytest.param((*GOOD[:7], ((0, 0, 1, 1, 5, b"x"),)), id="an empty block"),
        pytest.param((*GOOD[:7], ((0, MAX_FRAME_MESSAGES + 1, 1, 1, 5, b"x"),)), id="a block of too many"),
        pytest.param((*GOOD[:7], ((0, 1, 1, 1, 400_000, b"x"),)), id="a block too large"),
        pytest.param((*GOOD[:7], ((0, 4_000, 1, 1, 5, b"x"), (0, 97, 1, 1, 5, b"x"))), id="too many messages"),
    ],
)
def test_a_frame_outside_the_bounds_is_refused(fields: tuple[object, ...]) -> None:
    assert isinstance(decode_frame(pack(GOOD)), Frame)
    with pytest.raises(MalformedFrame):
        decode_frame(pack(fields))


def test_an_empty_frame_is_a_frame() -> None:
    assert decode_frame(encode_frame("owner", "epoch", "first", 1, [])).blocks == ()


@pytest.mark.parametrize("claimed", [True, False], ids=["with its size", "without its size"])
def test_a_block_that_swells_is_refused_without_the_memory_it_asks_for(claimed: bool) -> None:
    bomb = zstandard.ZstdCompressor(write_content_size=claimed).compress(bytes(64 * 1024 * 1024))
    assert len(bomb) < 20_000
    tracemalloc.start()
    try:
        with pytest.raises(MalformedFrame):
            open_block(Block(1, 1, 1, 1, 1_000, bomb))
        assert tracemalloc.get_traced_memory()[1] < 4 * 1024 * 1024
    finally:
        tracemalloc.stop()
