"""Secrets are 0600 in 0700 or refused; locks name their holder and end with the process."""

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidings.errors import ConfigError, DiskFull, SpaceBusy
from tidings.util.private_files import (
    check_private,
    close_to_others,
    lock_holder,
    lock_pid,
    locked,
    own_secret,
    private_dir,
    read_private,
    write_private,
)


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Whatever this process creates is open to all unless it says otherwise; other tests have their umask back."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_secret_is_written_for_its_owner_only(tmp_path: Path, no_umask: None) -> None:
    write_private(tmp_path / "seed", "secret")
    assert stat.S_IMODE((tmp_path / "seed").stat().st_mode) == 0o600
    assert read_private(tmp_path / "seed") == "secret"
    assert [path.name for path in tmp_path.iterdir()] == ["seed"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_secret_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "seed"
    write_private(path, "secret")
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        check_private(path)


def test_a_secret_of_ones_own_is_made_once_and_one_that_was_cut_is_refused(tmp_path: Path, no_umask: None) -> None:
    path = tmp_path / "blocks.secret"
    secret = own_secret(path, 32)
    assert (len(secret), stat.S_IMODE(path.stat().st_mode)) == (32, 0o600)
    assert own_secret(path, 32) == secret != own_secret(tmp_path / "another", 32)
    for torn in (path.read_text()[:40], "", "no hex"):
        path.write_text(torn)
        with pytest.raises(ConfigError, match="remove it"):
            own_secret(path, 32)


def test_a_missing_secret_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_private(tmp_path / "nowhere")


def test_a_directory_is_made_private_and_an_open_one_refused(tmp_path: Path) -> None:
    made = private_dir(tmp_path / "a" / "b")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    made.chmod(0o750)
    with pytest.raises(ConfigError, match="chmod 700"):
        private_dir(made)


def test_a_tree_that_was_open_is_closed_to_others_and_links_are_left_alone(tmp_path: Path) -> None:
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    (tree / "deep").mkdir(parents=True, mode=0o777)
    outside.touch()
    outside.chmod(0o644)  # whatever the umask is
    for name, mode in (("deep/a", 0o666), ("b", 0o600), ("program", 0o755)):
        (tree / name).touch()
        (tree / name).chmod(mode)
    (tree / "link").symlink_to(outside)
    (tree / "deep").chmod(0o777)
    tree.chmod(0o755)
    assert close_to_others(tree) == 4
    modes = {name: stat.S_IMODE((tree / name).stat().st_mode) for name in (".", "deep", "deep/a", "b", "program")}
    assert modes == {".": 0o700, "deep": 0o700, "deep/a": 0o600, "b": 0o600, "program": 0o700}
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644
    assert close_to_others(tree) == 0


def test_a_lock_is_held_once_and_names_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, "testing"):
        assert lock_pid(path) == os.getpid()
        with pytest.raises(SpaceBusy, match=f"pid {os.getpid()} \\(testing\\)"), locked(path, "again", wait=0.05):
            pass
    assert lock_holder(path) is None
    with locked(path, "afterwards"):
        pass


def test_a_lock_ends_with_the_process_that_held_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    program = (
        "import sys, time; from pathlib import Path; from tidings.util.private_files import locked\n"
        f"with locked(Path({str(path)!r}), 'child'):\n    print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        assert lock_pid(path) == child.pid
        child.kill()
        child.wait(10)
    assert lock_holder(path) is None


def test_a_lock_is_its_owners_only_whoever_made_it(tmp_path: Path, no_umask: None) -> None:
    (tmp_path / "old").touch(0o644)
    for name in ("new", "old"):
        with locked(tmp_path / name, "testing"):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_a_full_disk_has_an_error_of_its_own_that_handlers_of_unwritable_files_catch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    assert issubclass(DiskFull, ConfigError)
    with pytest.raises(DiskFull, match=r"cannot write .*: No space left on device"):
        write_private(tmp_path / "file", "text")
    assert list(tmp_path.iterdir()) == []
