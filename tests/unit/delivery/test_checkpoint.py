"""A checkpoint that Spark would refuse for ever is known before Spark sees it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tidings.delivery import stream_job
from tidings.delivery.folders import LocalFolder
from tidings.delivery.stream_job import ATTEMPTS, Checkpoint, JvmWatchdog
from tidings.errors import UnhealthyError

OFFSET = 'v1\n{"batchWatermarkMs":0}\n{"epoch":"e","seq":7,"mark":"m"}'
COMMIT = 'v1\n{"nextBatchWatermarkMs":0}'


def path_of(checkpoint: Checkpoint) -> Path:
    return Path(checkpoint.folder.place)


@pytest.fixture
def sound(tmp_path: Path) -> Checkpoint:
    checkpoint = Checkpoint(LocalFolder(tmp_path / "spark"))
    checkpoint.identity()
    (path_of(checkpoint) / "metadata").write_text('{"id":"x"}')
    for name, text in (("offsets", OFFSET), ("commits", COMMIT)):
        (path_of(checkpoint) / name).mkdir()
        for number in (0, 1, 10):
            (path_of(checkpoint) / name / str(number)).write_text(text)
        (path_of(checkpoint) / name / ".10.crc").write_bytes(b"\x00crc")
    return checkpoint


def test_a_sound_checkpoint_says_what_it_knows_and_a_new_one_nothing(sound: Checkpoint, tmp_path: Path) -> None:
    assert sound.damage() is None
    assert [each["seq"] for each in sound.offsets()] == [7, 7, 7]
    new = Checkpoint(LocalFolder(tmp_path / "new"))
    assert (new.damage(), new.offsets()) == (None, [])
    assert new.identity() == new.identity() != sound.identity()


def test_the_range_of_a_batch_and_the_one_that_was_broken_off_are_known_from_what_spark_wrote(
    tmp_path: Path,
) -> None:
    checkpoint = Checkpoint(LocalFolder(tmp_path / "spark"))
    assert checkpoint.pending() is None
    for name in ("offsets", "commits"):
        (path_of(checkpoint) / name).mkdir(parents=True)
    for number, seq in enumerate((4, 9, 9, 30)):
        (path_of(checkpoint) / "offsets" / str(number)).write_text(OFFSET.replace("7", str(seq)))
    assert [checkpoint.range_of(number) for number in range(4)] == [(None, 4), (4, 9), (9, 9), (9, 30)]
    with pytest.raises(UnhealthyError, match="says nothing of batch 4"):
        checkpoint.range_of(4)
    assert checkpoint.pending() == 3
    for number in range(3):
        (path_of(checkpoint) / "commits" / str(number)).write_text(COMMIT)
    assert checkpoint.pending() == 3
    (path_of(checkpoint) / "commits" / "3").write_text(COMMIT)
    assert checkpoint.pending() is None


def test_attempts_are_counted_for_one_batch_until_it_can_be_encoded(sound: Checkpoint) -> None:
    assert [sound.count_attempt(11) for _ in range(3)] == [1, 2, 3]
    assert [sound.count_attempt(12) for _ in range(2)] == [1, 2]
    (path_of(sound) / ATTEMPTS).write_text("torn")
    assert sound.count_attempt(12) == 1
    sound.count_success()
    sound.count_success()
    assert sound.count_attempt(12) == 1


@pytest.mark.parametrize("name", ["offsets/10", "offsets/0", "commits/10", "metadata", "tidings-id"])
@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe"])
def test_a_file_that_is_empty_or_no_text_is_named(sound: Checkpoint, name: str, content: bytes) -> None:
    (path_of(sound) / name).write_bytes(content)
    assert str(sound.damage()).startswith(name)


@pytest.mark.parametrize("content", ["v1", "v2\n{}", OFFSET[:-5], "garbage", "\0\0\0", "v1\n{}\nnonsense"])
def test_a_file_that_is_torn_or_another_ones_is_named(sound: Checkpoint, content: str) -> None:
    (path_of(sound) / "offsets" / "10").write_text(content)
    assert str(sound.damage()).startswith("offsets/10")


def test_one_that_is_put_aside_is_kept_and_the_next_is_new(sound: Checkpoint) -> None:
    before = sound.identity()
    sound.retire()
    assert (sound.damage(), sound.offsets()) == (None, [])
    assert sound.identity() != before
    assert [path.name.startswith("spark.") for path in path_of(sound).parent.iterdir() if path != path_of(sound)] == [
        True
    ]


# --- whether the JVM answers ---


def test_whoever_does_not_answer_is_silent_ever_longer_and_whoever_does_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_job, "BEAT_EVERY", 0.001)
    asked, answers = threading.Event(), threading.Event()

    def ask() -> None:
        asked.set()
        assert answers.wait(30)

    watched = JvmWatchdog(ask)
    assert asked.wait(10)
    first = watched.silent_for
    while watched.silent_for < first + 0.05:
        threading.Event().wait(0.01)
    answers.set()
    while watched.silent_for > 0.04:
        threading.Event().wait(0.001)
    watched.end()
    assert watched.silent_for == 0.0


def test_what_asking_raises_is_for_others_to_see() -> None:
    asked = threading.Event()

    def gone() -> None:
        asked.set()
        raise OSError("gone")

    watched = JvmWatchdog(gone)
    assert asked.wait(10)
    while watched.silent_for:
        threading.Event().wait(0.001)
