"""Blocks by reference: sealed the same way twice, opened by their own reference and by nothing else."""

import hashlib

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tidings.errors import InvalidName, MalformedFrame
from tidings.wire.frames import (
    MAX_FRAME_MESSAGES,
    MAX_FRAME_REFS,
    MAX_INLINE,
    Block,
    BlockSealer,
    FrameRecord,
    Ref,
    SealedBlock,
    decode_frame,
    decode_seqs,
    encode_block,
    encode_frame,
    encode_seqs,
    is_by_reference,
    open_ref,
    ref_size,
    without_keys,
)
from tidings.wire.subjects import BLOCK_SHARDS, Subjects, block_shard

SECRET, SPACE, EPOCH = bytes(range(32)), "ASPACE", "epoch"
SEALER = BlockSealer(SECRET, SPACE, EPOCH)
seqs = st.sets(st.integers(0, 2**63 - 1), min_size=1, max_size=20).map(sorted)


def records(*sequences: int, text: bytes = b"hello ") -> list[FrameRecord]:
    return [FrameRecord(seq, 1, "chat.a.general", (), text * 20) for seq in sequences]


def sealed(found: list[FrameRecord], sealer: BlockSealer = SEALER) -> SealedBlock:
    return sealer.seal("general", encode_block(found), encode_seqs([each.seq for each in found]))


def ref_of(block: SealedBlock) -> Ref:
    (ref,) = decode_frame(encode_frame("owner", EPOCH, "first", 1, [block.ref])).blocks
    assert isinstance(ref, Ref)
    return ref


@given(seqs)
def test_what_is_sealed_opens_by_its_reference(sequences: list[int]) -> None:
    found = records(*sequences)
    block = sealed(found)
    ref = ref_of(block)
    assert open_ref(SPACE, EPOCH, ref, block.data) == tuple(found)
    assert ref.seqs == tuple(sequences)
    assert (ref.size, ref.name.hex()) == (len(block.data), block.name)
    assert sealed(found) == block, "a replay makes the same bytes"


@given(seqs)
def test_sequences_come_out_as_they_went_in(sequences: list[int]) -> None:
    assert decode_seqs(sequences[0], encode_seqs(sequences)) == tuple(sequences)


@given(st.integers(0, 2**62), st.binary(max_size=40))
def test_packed_sequences_have_one_spelling(first: int, packed: bytes) -> None:
    try:
        found = decode_seqs(first, packed)
    except MalformedFrame:
        return
    assert encode_seqs(found) == packed
    assert list(found) == sorted(set(found))


@given(seqs, st.sampled_from(["general", "c" * 200, "a.b.c"]))
def test_the_size_of_a_reference_is_never_understated_and_not_by_much_overstated(
    sequences: list[int], channel: str
) -> None:
    packed = encode_seqs(sequences)
    block = SEALER.seal(channel, encode_block(records(*sequences)), packed)
    assert 0 <= ref_size(channel, packed) - len(block.ref) <= 40


def test_a_frame_of_full_references_fits() -> None:
    most = MAX_FRAME_MESSAGES // MAX_FRAME_REFS
    packed = encode_seqs([n * 100_000 for n in range(most)])
    assert MAX_FRAME_REFS * ref_size("c" * 200, packed) < 64 * 1024


def test_two_outputs_of_a_compressor_have_two_keys() -> None:
    """A key that came from the text, and not from the bytes, would encrypt two texts under one nonce."""
    found = records(1, 2, 3)
    block = msgspec.msgpack.decode(encode_block(found), type=Block)
    raw = zstandard.ZstdDecompressor().decompress(block.body)
    other = msgspec.structs.replace(block, body=zstandard.ZstdCompressor(level=19, write_checksum=True).compress(raw))
    assert other.body != block.body
    packed = encode_seqs([1, 2, 3])
    made = [SEALER.seal("general", msgspec.msgpack.encode(each), packed) for each in (block, other)]
    refs = [ref_of(each) for each in made]
    assert len({each.name for each in refs}) == len({each.key for each in refs}) == 2
    assert [open_ref(SPACE, EPOCH, ref, each.data) for ref, each in zip(refs, made, strict=True)] == [tuple(found)] * 2


def test_a_key_and_a_name_depend_on_the_secret_and_on_all_that_a_block_is_bound_to() -> None:
    found = records(1, 2)
    block, packed = encode_block(found), encode_seqs([1, 2])
    made = [
        sealer.seal(channel, block, packed)
        for sealer, channel in [
            (SEALER, "general"),
            (SEALER, "other"),
            (BlockSealer(SECRET[::-1], SPACE, EPOCH), "general"),
            (BlockSealer(SECRET, "BSPACE", EPOCH), "general"),
            (BlockSealer(SECRET, SPACE, "another"), "general"),
        ]
    ]
    assert len({each.name for each in made}) == len({ref_of(each).key for each in made}) == len(made)
    body = msgspec.msgpack.decode(block, type=Block).body
    assert hashlib.sha256(body).digest() not in (ref_of(made[0]).key, ref_of(made[0]).name), "nobody confirms a guess"


@pytest.mark.parametrize(
    "lie",
    [
        {"codec": 0},
        {"count": 1, "last": 5, "packed_seqs": b""},
        {"first": 4, "packed_seqs": encode_seqs([4, 9])},
        {"last": 10, "packed_seqs": encode_seqs([5, 10])},
        {"raw_size": 7},
        {"channel": "other"},
        {"key": bytes(32)},
        {"packed_seqs": encode_seqs([5, 6, 9])},
        {"size": 100},
    ],
    ids=lambda lie: next(iter(lie)),
)
def test_a_reference_with_another_field_opens_nothing(lie: dict[str, object]) -> None:
    block = sealed(records(5, 9))
    ref = msgspec.structs.replace(ref_of(block), **lie)
    with pytest.raises(MalformedFrame):
        open_ref(SPACE, EPOCH, ref, block.data)


def test_references_of_two_blocks_cannot_be_swapped() -> None:
    one, two = sealed(records(1, 2)), sealed(records(1, 2, text=b"other "))
    assert len(one.data) == len(two.data)
    with pytest.raises(MalformedFrame):
        open_ref(SPACE, EPOCH, ref_of(one), two.data)


@pytest.mark.parametrize(
    ("size", "readers", "expected"),
    [(MAX_INLINE, 50, False), (MAX_INLINE + 1, 50, True), (MAX_INLINE + 1, 1, False), (MAX_INLINE + 1, 2, True)],
)
def test_small_blocks_and_blocks_for_one_reader_travel_in_the_frame(size: int, readers: int, expected: bool) -> None:
    assert is_by_reference(size, readers) is expected


def test_a_secret_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        BlockSealer(b"short", SPACE, EPOCH)


def test_whoever_keeps_a_frame_finds_no_key_in_it_also_if_it_is_cut_anywhere() -> None:
    block = sealed(records(5, 9))
    ref = ref_of(block)
    frame = encode_frame("owner", EPOCH, "first", 1, [block.ref, encode_block(records(11))])
    start = frame.index(ref.key)
    struck = without_keys(frame)
    (first, second) = decode_frame(struck).blocks
    assert first == msgspec.structs.replace(ref, key=bytes(32))
    assert second == decode_frame(frame).blocks[1]
    for length in range(start + 1, len(frame)):
        kept = without_keys(frame[:length])
        assert len(kept) == length
        assert ref.key[: length - start][:32] not in kept or length - start < 3


def test_a_block_is_named_by_hex_and_its_shard_is_within_the_broker_s_bounds() -> None:
    name = sealed(records(1)).name
    assert Subjects("main").block(name) == f"td.main.blk.{block_shard(name)}.{name}.b"
    assert 0 <= block_shard(name) < BLOCK_SHARDS
    assert block_shard("a") == 0xE40C292C % BLOCK_SHARDS, "a published value of FNV-1a"
    for wrong in ("", "*", ">", name[:-1], name + "0", name.upper(), f"{name[:-1]}\n"):
        with pytest.raises(InvalidName):
            Subjects("main").block(wrong)
    assert Subjects("main").parse(Subjects("main").block(name)) is None, "no record of anybody's is there"
