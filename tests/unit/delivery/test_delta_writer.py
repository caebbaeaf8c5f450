"""A table that is written for years: each batch once, by one writer, at the same cost, through every crash."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tidings.delivery.delta_writer import DeltaWriter, Tended, Upkeep
from tidings.errors import ConfigError, ConflictError, OutcomeUnknown, StoreBroken, StoreError

SCHEMA = pa.schema([("n", pa.int64()), ("who", pa.string())])
#: so brief that everything of it happens within a few batches
BRIEF = Upkeep(
    small_files=5, merged_files=4, checkpoint_every=5, log_entries=10, keep_hours=0, vacuum_every=0, sizes=(4096, 65536)
)


def rows(*numbers: int, who: str = "us") -> pa.Table:
    return pa.table({"n": list(numbers), "who": [who] * len(numbers)}, schema=SCHEMA)


def opened(path: Path, upkeep: Upkeep = BRIEF, **options: Any) -> DeltaWriter:
    return DeltaWriter(str(path / "table"), SCHEMA, upkeep=upkeep, **options)


def numbers(writer: DeltaWriter) -> list[int]:
    writer.refresh()
    return sorted(writer.read(["n"])["n"].to_pylist())


def written(path: Path, count: int, *, tended: bool = False, upkeep: Upkeep = BRIEF) -> DeltaWriter:
    writer = opened(path, upkeep)
    for number in range(count):
        writer.append(rows(number), app="job", version=number)
        if tended:
            writer.tend()
    return writer


def log_file(path: Path, version: int, kind: str = "json") -> Path:
    return path / "table" / "_delta_log" / f"{version:020}.{kind}"


def checkpoints(path: Path) -> list[int]:
    return sorted(int(each.name[:20]) for each in (path / "table" / "_delta_log").glob("*.checkpoint.parquet"))


# --- a batch is committed once ---


def test_a_batch_is_committed_once_and_its_range_is_in_the_history(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    assert writer.reached("job") is None
    assert writer.append(rows(1, 2), app="job", version=7, metadata={"after": "0", "through": "2"})
    for again in (writer, opened(tmp_path)):
        assert again.reached("job") == 7
        assert not again.append(rows(1, 2), app="job", version=7)
        assert not again.append(rows(0), app="job", version=3)
        assert numbers(again) == [1, 2]
    newest = writer.table.history(1)[0]
    assert (newest["after"], newest["through"]) == ("0", "2")


def test_two_applications_count_for_themselves(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    writer.append(rows(1), app="one", version=5)
    writer.append(rows(2), app="two", version=1)
    assert (writer.reached("one"), writer.reached("two"), writer.reached("three")) == (5, 1, None)


@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("tended", [False, True])
def test_a_second_writer_of_the_same_application_is_refused_and_stays_so(
    tmp_path: Path, looked: bool, tended: bool
) -> None:
    """Whether or not it looked meanwhile, and also if the log it opened from is gone."""
    first, second = opened(tmp_path), opened(tmp_path)
    if looked:
        second.reached("job")
    for number in range(40):
        first.append(rows(number), app="job", version=number)
        if tended:
            first.tend()
    for _ in range(2):
        with pytest.raises(ConflictError, match="is another one running"):
            second.append(rows(99), app="job", version=40)
        second.refresh()
    assert first.append(rows(40), app="job", version=40)
    assert numbers(first) == list(range(41))


def test_appends_of_others_and_merges_stand_in_nobodys_way(tmp_path: Path) -> None:
    ours, operator = opened(tmp_path), opened(tmp_path)
    ours.append(rows(0), app="job", version=0)
    operator.append(rows(100, who="operator"))
    assert ours.append(rows(1), app="job", version=1)
    operator.append(rows(101, who="operator"), app="operator", version=0)
    assert ours.append(rows(2), app="job", version=2)
    DeltaTable(ours.uri).optimize.compact()
    assert ours.append(rows(3), app="job", version=3)
    assert numbers(ours) == [0, 1, 2, 3, 100, 101]
    assert ours.read(["n"], [("who", "=", "operator"), ("n", ">", 100)])["n"].to_pylist() == [101]


def test_many_write_at_once_while_one_tends_and_nobody_is_refused(tmp_path: Path) -> None:
    upkeep = Upkeep(small_files=5, checkpoint_every=5, log_entries=10, vacuum_every=0)
    opened(tmp_path, upkeep)

    def appends(base: int) -> None:
        other = opened(tmp_path, upkeep)
        for number in range(base, base + 25):
            other.append(rows(number), app=f"job {base}", version=number)

    with ThreadPoolExecutor(3) as others:
        started = [others.submit(appends, base) for base in (100, 200, 300)]
        writer = written(tmp_path, 40, tended=True, upkeep=upkeep)
        for each in started:
            each.result(60)
    assert numbers(writer) == [*range(40), *range(100, 125), *range(200, 225), *range(300, 325)]
    assert [opened(tmp_path).reached(app) for app in ("job", "job 100", "job 300")] == [39, 124, 324]


def test_an_operator_whose_view_is_long_gone_appends_all_the_same(tmp_path: Path) -> None:
    operator = opened(tmp_path)
    writer = written(tmp_path, 40, tended=True)
    assert not log_file(tmp_path, 1).exists()
    assert operator.append(rows(100))
    assert numbers(writer) == [*range(40), 100]


def test_a_commit_whose_checkpoint_failed_is_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = written(tmp_path, 3)
    log_file(tmp_path, 4, "checkpoint.parquet").mkdir()
    (log_file(tmp_path, 4, "checkpoint.parquet") / "in the way").touch()
    assert writer.append(rows(3), app="job", version=3)
    assert "committed, but not what follows" in caplog.text
    assert writer.reached("job") == 3
    assert numbers(writer) == [0, 1, 2, 3]


def test_rows_that_do_not_fit_are_refused_as_what_they_are(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    with pytest.raises(StoreError, match="cannot be written") as refused:
        writer.append(pa.table({"other": [1]}), app="job", version=0)
    assert not isinstance(refused.value, StoreBroken)
    assert writer.append(rows(0), app="job", version=0)


def test_a_table_that_went_away_is_not_begun_anew_by_its_writer(tmp_path: Path) -> None:
    writer = written(tmp_path, 3)
    (tmp_path / "table").rename(tmp_path / "away")
    (tmp_path / "table").touch()
    with pytest.raises(OutcomeUnknown, match="committed or not"):
        writer.append(rows(3), app="job", version=3)
    (tmp_path / "table").unlink()
    (tmp_path / "away").rename(tmp_path / "table")
    assert writer.append(rows(3), app="job", version=3)
    assert numbers(writer) == [0, 1, 2, 3]


# --- a table written anew ---


def doubled(table: pa.Table) -> pa.Table:
    return rows(*(2 * each for each in table["n"].to_pylist()))


def test_a_table_is_folded_in_one_commit_and_keeps_its_count(tmp_path: Path) -> None:
    writer = written(tmp_path, 3)
    before = writer.table.version()
    writer.replace(doubled, metadata={"why": "folded"})
    assert (writer.table.version(), writer.reached("job")) == (before + 1, 2)
    assert numbers(writer) == [0, 2, 4]
    assert writer.table.history(1)[0]["why"] == "folded"


@pytest.mark.parametrize("meanwhile", ["append", "merge"])
def test_nothing_appended_or_merged_meanwhile_is_lost_or_doubled(tmp_path: Path, meanwhile: str) -> None:
    writer, calls = written(tmp_path, 3), []

    def fold(table: pa.Table) -> pa.Table:
        calls.append(table.num_rows)
        if len(calls) == 1 and meanwhile == "append":
            opened(tmp_path).append(rows(50))
        elif len(calls) == 1:
            DeltaTable(writer.uri).optimize.compact()
        return doubled(table)

    writer.replace(fold)
    assert len(calls) == 2
    assert numbers(writer) == ([0, 2, 4, 100] if meanwhile == "append" else [0, 2, 4])


def test_a_table_that_never_stands_still_is_given_up(tmp_path: Path) -> None:
    writer = written(tmp_path, 1)

    def fold(table: pa.Table) -> pa.Table:
        opened(tmp_path).append(rows(50))
        return table

    with pytest.raises(ConflictError, match="too quickly"):
        writer.replace(fold)
    assert 0 in numbers(writer)


# --- upkeep ---


def test_files_and_log_stay_few_and_nothing_is_lost(tmp_path: Path) -> None:
    writer, steps = opened(tmp_path), Counter[str]()
    for number in range(120):
        writer.append(rows(number), app="job", version=number)
        done = writer.tend()
        steps[" ".join(name for name in ("merged", "files_removed", "entries_removed") if getattr(done, name))] += 1
    assert set(steps) == {"", "merged", "files_removed", "entries_removed"}  # one step at a time, and not in each batch
    assert steps[""] >= 30
    assert len(writer.table.file_uris()) <= BRIEF.small_files + BRIEF.merged_files + 4
    assert len(list((tmp_path / "table").glob("*.parquet"))) <= 20
    assert len(list((tmp_path / "table" / "_delta_log").iterdir())) <= 40
    assert len(writer.table.history(BRIEF.log_entries)) == BRIEF.log_entries
    for each in (writer, opened(tmp_path)):
        assert numbers(each) == list(range(120))
        assert each.reached("job") == 119


def test_upkeep_is_due_by_what_the_table_has_not_by_what_this_process_did(tmp_path: Path) -> None:
    """A process that dies every few batches never tends otherwise."""
    for number in range(8):
        assert opened(tmp_path).append(rows(number), app="job", version=number)
    assert opened(tmp_path).tend().merged == 8
    assert opened(tmp_path).tend().merged == 0


def test_files_of_a_snapshot_stay_for_its_readers(tmp_path: Path) -> None:
    upkeep = Upkeep(small_files=5, checkpoint_every=5, log_entries=10, keep_hours=1, vacuum_every=0)
    reader = written(tmp_path, 4, upkeep=upkeep)
    writer = opened(tmp_path, upkeep)
    for number in range(4, 30):
        writer.append(rows(number), app="job", version=number)
        assert not writer.tend().files_removed
    assert sorted(reader.read()["n"].to_pylist()) == [0, 1, 2, 3]


def test_a_reader_whose_files_are_gone_reads_the_newest(tmp_path: Path) -> None:
    reader = written(tmp_path, 4)
    writer = opened(tmp_path)
    for number in range(4, 30):
        writer.append(rows(number), app="job", version=number)
        writer.tend()
    assert sorted(reader.read()["n"].to_pylist()) == list(range(30))


def test_what_a_killed_writer_left_is_removed_once_it_is_old(tmp_path: Path) -> None:
    upkeep = Upkeep(small_files=1, keep_hours=1, vacuum_every=0)
    writer = written(tmp_path, 1, upkeep=upkeep)
    old, new = (tmp_path / "table" / f"part-{name}.parquet" for name in ("old", "new"))
    for each, age in ((old, 7200), (new, 60)):
        each.write_bytes(b"half")
        os.utime(each, (time.time() - age,) * 2)
    assert writer.tend().files_removed == 1
    assert (old.exists(), new.exists()) == (False, True)


def test_upkeep_that_fails_is_said_and_stops_no_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = written(tmp_path, 6)
    for file in (tmp_path / "table").glob("*.parquet"):
        file.unlink()
    done = writer.tend()
    assert done.failed
    assert "could not be tended" in caplog.text
    assert writer.tend() == Tended()  # not again at once
    assert writer.append(rows(6), app="job", version=6)
    with pytest.raises(StoreBroken, match=r"repair\(\)"):
        writer.read()


# --- opening ---


def test_a_uri_is_no_path(tmp_path: Path) -> None:
    uri = (tmp_path / "a table").as_uri()
    writer = DeltaWriter(uri, SCHEMA, upkeep=BRIEF)
    for number in range(40):
        writer.append(rows(number), app="job", version=number)
        writer.tend()
    assert numbers(DeltaWriter(uri, SCHEMA, upkeep=BRIEF)) == list(range(40))
    assert [path.name for path in tmp_path.iterdir()] == ["a table"]


def test_a_table_that_would_forget_or_is_another_ones_is_refused(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    DeltaTable.create(uri, SCHEMA, configuration={"delta.setTransactionRetentionDuration": "interval 1 days"})
    with pytest.raises(ConfigError, match="setTransactionRetentionDuration"):
        opened(tmp_path)
    DeltaTable.create(str(tmp_path / "other" / "table"), pa.schema([("n", pa.string())]))
    with pytest.raises(ConfigError, match="another type in n"):
        opened(tmp_path / "other")
    DeltaTable.create(str(tmp_path / "narrow" / "table"), pa.schema([("n", pa.int64())]))
    with pytest.raises(ConfigError, match="no column who"):
        opened(tmp_path / "narrow")


# --- what a power cut leaves: 13 commits after the first, checkpoints at 4 and 9 ---


@pytest.mark.parametrize("left", [b"", b'{"version":', b'{"version":8,"size":3}', None])
def test_the_hint_of_the_last_checkpoint_is_a_hint(tmp_path: Path, left: bytes | None) -> None:
    written(tmp_path, 13)
    hint = tmp_path / "table" / "_delta_log" / "_last_checkpoint"
    hint.unlink() if left is None else hint.write_bytes(left)
    assert numbers(opened(tmp_path)) == list(range(13))


@pytest.mark.parametrize("left", ["empty", "torn", "gone"])
@pytest.mark.parametrize("broken", [1, 2])
def test_a_checkpoint_that_cannot_be_read_is_made_again(
    tmp_path: Path, left: str, broken: int, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, 13)
    assert checkpoints(tmp_path) == [4, 9]
    for version in checkpoints(tmp_path)[-broken:]:
        file = log_file(tmp_path, version, "checkpoint.parquet")
        content = file.read_bytes()
        file.unlink() if left == "gone" else file.write_bytes(content[: len(content) // 2] if left == "torn" else b"")
    with caplog.at_level(logging.WARNING):
        writer = opened(tmp_path)
    assert "opened from the entries before" in caplog.text
    assert (numbers(writer), writer.reached("job")) == (list(range(13)), 12)
    caplog.clear()
    assert numbers(opened(tmp_path)) == list(range(13))
    assert not caplog.text


def test_a_trimmed_log_still_has_a_checkpoint_to_fall_back_on(tmp_path: Path) -> None:
    writer, number = written(tmp_path, 60, tended=True), 59
    while not writer.tend().entries_removed:
        number += 1
        writer.append(rows(number), app="job", version=number)
    log_file(tmp_path, checkpoints(tmp_path)[-1], "checkpoint.parquet").write_bytes(b"")
    again = opened(tmp_path)
    assert (numbers(again), again.reached("job")) == (list(range(number + 1)), number)


def test_the_last_commits_are_not_done_if_they_are_empty_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, 13)
    for version in (12, 13):
        log_file(tmp_path, version).write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        writer = opened(tmp_path)
    assert "[12, 13] are empty" in caplog.text
    assert (numbers(writer), writer.reached("job")) == (list(range(11)), 10)
    caplog.clear()
    opened(tmp_path)
    assert not caplog.text  # once
    for number in (11, 12):
        assert writer.append(rows(number), app="job", version=number)
    assert numbers(opened(tmp_path)) == list(range(13))


def tear(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("version", "damage", "said"),
    [
        (12, tear, r"12\.json is torn and later commits are there.* backup"),
        (12, Path.unlink, r"12\.json is missing.* backup"),
        (12, lambda file: file.write_bytes(b""), r"12\.json is empty and later commits.*create_checkpoint\(\)"),
    ],
)
def test_a_commit_that_cannot_be_read_is_named_with_what_to_do(
    tmp_path: Path, version: int, damage: Any, said: str
) -> None:
    written(tmp_path, 13)
    damage(log_file(tmp_path, version))
    for _ in range(2):
        with pytest.raises(StoreBroken, match=said):
            opened(tmp_path)


@pytest.mark.parametrize("torn", [(13,), (12, 13)])
def test_the_newest_commits_if_they_are_torn_are_put_aside_and_not_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, torn: tuple[int, ...]
) -> None:
    written(tmp_path, 13)
    for version in torn:
        tear(log_file(tmp_path, version))
    left = torn[0] - 1
    for _ in range(2):
        writer = opened(tmp_path)
        assert (numbers(writer), writer.reached("job")) == (list(range(left)), left - 1)
    assert "13.json, _delta_log/_last_checkpoint could not be read" in caplog.text
    assert writer.append(rows(left), app="job", version=left)
    assert numbers(opened(tmp_path)) == list(range(left + 1))
    assert len(list(log_file(tmp_path, 0).parent.glob("*.torn-*"))) == len(torn), "somebody may want to look"


def test_a_table_that_was_being_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "table" / "_delta_log").mkdir(parents=True)
    log_file(tmp_path, 0).write_bytes(b"")
    with pytest.raises(StoreBroken, match="Move its folder away"):
        opened(tmp_path)
    log_file(tmp_path, 0).unlink()
    assert numbers(opened(tmp_path)) == []


# --- kill -9 ---

CHILD = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from test_delta_writer import opened, rows
writer = opened(Path(sys.argv[1]))
number = -1 if writer.reached("job") is None else writer.reached("job")
while True:
    number += 1
    writer.append(rows(number, number, number), app="job", version=number)
    print(number, flush=True)
    writer.tend()
"""


def killed_somewhere(folder: Path, chance: random.Random) -> int:
    """Let a writer run, kill it at a moment of its upkeep or between; the last batch it said was done."""
    script = CHILD.format(path=[str(Path(__file__).parent), *sys.path])
    child = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        for _ in range(chance.randint(1, 25)):
            said = child.stdout.readline()
            assert said, "the writer ended by itself"
        time.sleep(chance.random() * 0.02)  # anywhere in what comes next
        child.send_signal(signal.SIGKILL)
        return int([said, *child.stdout.read().split("\n")[:-1]][-1])
    finally:
        child.kill()
        child.wait(20)
        child.stdout and child.stdout.close()


def survives(folder: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(kills):
        done = killed_somewhere(folder, chance)
        writer = opened(folder)
        reached = writer.reached("job")
        assert reached is not None
        assert done <= reached <= done + 1
        assert Counter(numbers(writer)) == dict.fromkeys(range(reached + 1), 3)
    assert len(writer.table.file_uris()) <= 40


@pytest.mark.faults
@pytest.mark.timeout(180)
def test_a_writer_killed_at_any_moment_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    survives(tmp_path, 6, seed=1)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_writer_killed_many_times_loses_nothing(tmp_path: Path) -> None:
    survives(tmp_path, 120, seed=int(os.environ.get("TIDINGS_SEED", "7")))
