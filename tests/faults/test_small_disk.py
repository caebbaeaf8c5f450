"""A disk that is really full or really read-only: refused by name, still readable, and going on once it is mended.

The small disk is a tmpfs in a mount namespace (of root, or of a user where the kernel lets users have one). A disk
cannot be remounted read-only under files that are open for writing; immutable files refuse writes as such a disk does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tidings
from hosted import NOW, draft
from tidings.errors import StoreReadOnly
from tidings.host import outbox_transitions as moves
from tidings.host import outbox_views as views
from tidings.host.schema import SCHEMA
from tidings.util.database import Database

CHILD = Path(__file__).parent / "small_disk_child.py"
SPACE_CHILD = Path(__file__).parent / "full_disk_child.py"
STUCK_CHILD = Path(__file__).parent / "stuck_stream_child.py"
NODE_CHILD = Path(__file__).parent / "small_node_child.py"
NAMESPACE = ["unshare", "--mount", "--map-root-user"]
FULL = r"no room to write .*host\.db: make room on that disk and ask again"
READ_ONLY = r"cannot be written: make it and its disk writable and ask again"


def may_mount(directory: Path) -> None:
    tried = [*NAMESPACE, "mount", "-t", "tmpfs", "-o", "size=65536", "tidings", str(directory)]
    try:
        subprocess.run(tried, check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"needs the right to mount a tmpfs in a mount namespace (root, or user namespaces): {error}")


def met_by_child(directory: Path, *what: str, child: Path = CHILD, within: float = 50) -> dict[str, Any]:
    may_mount(directory)
    sources = os.pathsep.join((str(Path(tidings.__file__).parents[1]), str(Path(__file__).parents[1])))
    program = [*NAMESPACE, sys.executable, str(child), *what, str(directory)]
    env = os.environ | {"PYTHONPATH": sources}
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=within)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refused(met: list[str], name: str, words: str) -> None:
    assert met[0] == name, met
    assert re.search(words, met[1]), met


def test_a_disk_that_fills_up_is_said_reads_go_on_and_room_is_enough_to_go_on(tmp_path: Path) -> None:
    met = met_by_child(tmp_path, "full")
    for refusal in (
        met["first"],
        *met["again"],
        met["tried while full"],
        met["opened while full"],
        met["made while full"],
    ):
        refused(refusal, "StoreFull", FULL)
    assert met["answered"] > 10
    assert met["tried after"] == ["answered", "None"]
    assert [met[name] for name in ("read while full", "read after", "kept", "sound")] == [True] * 4


def test_a_disk_that_is_read_only_is_said_at_the_start_and_what_was_answered_is_kept(tmp_path: Path) -> None:
    met = met_by_child(tmp_path, "read-only")
    for refusal in (met["opened"], met["made"]):
        refused(refusal, "StoreReadOnly", READ_ONLY)
    assert [met[name] for name in ("kept", "sound")] == [True] * 2


@pytest.mark.timeout(300)
def test_on_a_full_disk_agents_leave_are_narrowed_and_the_steward_is_replaced_and_room_is_enough_to_go_on(
    tmp_path: Path,
) -> None:
    met = met_by_child(tmp_path, child=SPACE_CHILD, within=280)
    assert met["before"] == [0, []]
    assert met["broker started again"], "it may keep a write error"
    noticed, (code, problems) = met["full"]
    assert (noticed, code) == (True, 3)
    assert re.search(r"^the disk of .*/js is full: [\d.]+ MB are free, its reserve was given up", problems[0]), problems
    code, words = met["sent while full"]
    assert (code, "the disk of this space is full" in words) == (3, True), words
    assert (met["left"], met["narrowed"][0], met["taken over"]) == (0, 0, True)
    assert met["still full"][0] == 3
    assert met["healthy again"] == [True, [0, []]]
    assert (met["sent again"], met["reserve again"], met["history"]) == (0, True, ["before", "after"])
    refused, started, healthy, joined = met["unseen"]
    assert (refused, started, healthy, joined) == (True, True, True, 0), "a broker that keeps its write error"
    assert (met["down"], met["reserve after down"]) == (0, False)
    code, words, reachable, problems = met["started on a full disk"]
    assert code != 0
    assert re.search(r"did not start: the disk of .*/js is full: 0\.0 MB are free.* make room", words), words
    assert (reachable, "the disk of" in problems[0]) == (5, True), problems


def test_a_mailbox_that_keeps_the_error_of_a_full_disk_is_said_though_the_log_stores_and_the_broker_is_to_start_again(
    tmp_path: Path,
) -> None:
    met = met_by_child(tmp_path, child=STUCK_CHILD)
    assert [met[name] for name in ("before", "while full", "after")] == [True, False, False], "room alone mends nothing"
    (problem,) = met["problems"]
    assert problem.startswith("DM_main keeps an error of its disk and stores nothing (no space left on device)"), (
        problem
    )
    assert met["asked"] == [{"restart_broker": "DM_main: no space left on device"}]
    assert met["problems after a restart"] == []


@contextmanager
def immutable(*files: Path) -> Iterator[None]:
    """Files that even root and whoever has them open cannot write."""
    names = [str(file) for file in files]
    try:
        subprocess.run(["chattr", "+i", *names], check=True, capture_output=True, timeout=30)
        yield
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs root and a file system with immutable files: {error}")
    finally:
        subprocess.run(["chattr", "-i", *reversed(names)], check=False, capture_output=True, timeout=30)


def test_a_database_that_becomes_read_only_while_it_runs_is_said_is_read_and_recovers(tmp_path: Path) -> None:
    home = tmp_path / "home"
    path = home / "host.db"
    database = Database(path, SCHEMA)

    def send(message_id: str) -> None:
        database.write_blocking(lambda c: moves.accept(c, draft(message_id), NOW), 30)

    def stored() -> list[str]:
        return [row.id for row in database.read_blocking(views.listed, 30)]

    try:
        send("before")
        with immutable(path.with_name("host.db-wal"), path, home):
            for _ in range(3):
                with pytest.raises(StoreReadOnly, match=READ_ONLY):
                    send("refused")
                assert stored() == ["before"]
        send("after")
        assert stored() == ["before", "after"]
    finally:
        database.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_full_disk_on_one_node_of_three_stops_nobody_and_with_room_the_node_comes_back(tmp_path: Path) -> None:
    met = met_by_child(tmp_path, child=NODE_CHILD, within=380)
    assert met["said"], "it could not write"
    assert met["confirmed while full"] > 0
    assert met["whole again"]
