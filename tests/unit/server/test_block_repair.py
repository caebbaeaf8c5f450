"""The broker's blocks, and the hash by which it knows whether a record is whole."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest

from tidings.server.block_repair import highway_hash_64, read_block, seal_damaged

#: published with the algorithm, for the key 00 01 02 ... and data of as many bytes 00 01 02 ...
VECTORS = {0: 0x907A56DE22C26E53, 1: 0x7EAB43AAC7CDDD78, 2: 0xB8D0569AB0B53D62, 3: 0x5C6BEFAB8A463D80}


@pytest.mark.parametrize("size", VECTORS)
def test_the_hash_is_the_published_one(size: int) -> None:
    assert highway_hash_64(bytes(range(32)), bytes(range(size))) == VECTORS[size].to_bytes(8, "little")


def record(number: int, seq: int, payload: bytes, headers: bytes = b"", stream: str = "S") -> bytes:
    key = hashlib.sha256(f"{stream}-{number}".encode()).digest()
    subject = b"a.b"
    content = struct.pack("<I", len(headers)) + headers + payload if headers else payload
    length = 22 + len(subject) + len(content) + 8
    head = struct.pack("<IQqH", length | (1 << 31 if headers else 0), seq, 1_700_000_000, len(subject))
    return head + subject + content + highway_hash_64(key, head[4:20] + subject + headers + payload)


def stream(folder: Path, *blocks: list[bytes]) -> Path:
    (folder / "msgs").mkdir()
    for number, records in enumerate(blocks, 1):
        (folder / "msgs" / f"{number}.blk").write_bytes(b"".join(records))
    return folder


def damage(folder: Path, block: int, what: bytes) -> None:
    path = folder / "msgs" / f"{block}.blk"
    data = bytearray(path.read_bytes())
    data[data.index(what)] ^= 1
    path.write_bytes(data)


def broken(folder: Path, block: int) -> list[int]:
    key = hashlib.sha256(f"S-{block}".encode()).digest()
    return [each.seq for each in read_block((folder / "msgs" / f"{block}.blk").read_bytes()) if not each.is_whole(key)]


def test_a_damaged_record_gets_a_checksum_that_fits_and_no_other_byte_changes(tmp_path: Path) -> None:
    blocks = [[record(n, 10 * n + m, b"say %d" % (10 * n + m), b"H: x") for m in range(1, 6)] for n in range(1, 12)]
    folder = stream(tmp_path, *blocks)
    damage(folder, 11, b"say 113")
    damage(folder, 2, b"say 22")
    before = {path.name: path.read_bytes() for path in (folder / "msgs").iterdir()}
    assert (broken(folder, 2), broken(folder, 11)) == ([22], [113])
    done = seal_damaged(folder, "S", [(113, 113), (22, 23)])
    assert (sorted(done.sealed), done.left) == ([22, 113], [])
    assert (broken(folder, 2), broken(folder, 11)) == ([], [])
    for path in (folder / "msgs").iterdir():
        changed = [at for at, (a, b) in enumerate(zip(before[path.name], path.read_bytes(), strict=True)) if a != b]
        assert len(changed) <= 8, "the checksum alone"
    assert seal_damaged(folder, "S", [(113, 113), (22, 23)]).sealed == [], "once is enough"


def test_what_is_not_named_is_not_touched(tmp_path: Path) -> None:
    folder = stream(tmp_path, [record(1, seq, b"say %d" % seq) for seq in range(1, 6)])
    damage(folder, 1, b"say 3")
    assert seal_damaged(folder, "S", [(4, 4)]).sealed == []
    assert broken(folder, 1) == [3]


def test_a_file_of_another_format_is_left_alone_and_said(tmp_path: Path) -> None:
    folder = stream(tmp_path, [record(1, seq, b"say %d" % seq, stream="OTHER") for seq in range(1, 6)])
    before = (folder / "msgs" / "1.blk").read_bytes()
    done = seal_damaged(folder, "S", [(3, 3)])
    assert (done.sealed, len(done.left)) == ([], 1)
    assert (folder / "msgs" / "1.blk").read_bytes() == before


def test_a_record_whose_length_is_damaged_is_left_and_said(tmp_path: Path) -> None:
    folder = stream(tmp_path, [record(1, seq, b"say %d" % seq) for seq in range(1, 6)])
    path = folder / "msgs" / "1.blk"
    data = bytearray(path.read_bytes())
    third = data.index(b"say 3") - 25
    data[third + 2] ^= 0x40
    path.write_bytes(data)
    done = seal_damaged(folder, "S", [(3, 3)])
    assert done.sealed == []
    assert "1.blk cannot be read from byte" in done.left[0]


@pytest.mark.parametrize("data", [b"", b"x" * 29, b"\xff" * 200, bytes(200)])
def test_whatever_lies_in_a_file_is_read_in_bounds(data: bytes) -> None:
    assert len(list(read_block(data))) <= 10
