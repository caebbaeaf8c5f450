"""A host killed wherever it can be: whatever it answered `stored` is in the reader's inbox once, or ended by name."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import tidings.host
from hosting import host_in, inbox_of
from terminal import Terminal
from tidings.host import outbox_views
from tidings.steward import admin_handlers
from tidings_testing.history import History, HistoryError
from tidings_testing.processes import Child, child
from tidings_testing.real_space import RealSpace

PROGRAM = Path(__file__).parent / "host_child.py"
#: every failpoint of accept, drain and receive, and how often it is passed before it strikes
POINTS = [
    "host.accepted:kill",
    "host.accepted:kill:4",
    "drain.leased:kill",
    "drain.leased:kill:5",
    "drain.published:kill",
    "drain.published:kill:5",
    "drain.confirmed:kill",
    "drain.confirmed:kill:5",
    "drain.settled:kill",
    "drain.released:kill",
    "inbox.surfaced:kill",
    "inbox.surfaced:kill:2",
    "inbox.kept:kill",
    "inbox.kept:kill:2",
    "inbox.acked:kill",
    "inbox.acked:kill:2",
    "inbox.aside:kill",
    "inbox.told:kill",
    "store.before_commit:kill:12",
    "store.before_commit:kill:30",
    "store.after_commit:kill:12",
    "store.after_commit:kill:30",
]
#: those of an inbox that is read without a host
MAILBOX_POINTS = ["inbox.surfaced", "inbox.kept", "inbox.acked", "mailbox.shown", "mailbox.marked"]
QUICK = ("host.accepted:kill:4", "drain.published:kill:5", "inbox.kept:kill")


@dataclass
class Runs:
    """A host in a directory, run again and again by processes that may not survive it."""

    space: RealSpace
    folder: Path

    @property
    def record(self) -> Path:
        return self.folder / "history.jsonl"

    @asynccontextmanager
    async def run(self, count: int, failpoint: str = "") -> AsyncIterator[Child]:
        arguments = (str(self.folder / "host"), str(self.space.home.home), str(self.record), str(count))
        async with child(PROGRAM, *arguments, failpoint=failpoint) as running:
            yield running

    async def killed_at(self, failpoint: str) -> None:
        async with self.run(10, failpoint) as running:
            assert await running.ended(60) == -signal.SIGKILL, f"{failpoint} was not reached"

    async def to_the_end(self) -> None:
        async with self.run(3) as running:
            assert await running.ended(90) == 0

    async def check(self) -> None:
        """Every promise of the history, with what bob's inbox and ada's outbox hold."""
        history = History().merge(self.record)
        async with host_in(self.folder / "host") as host:
            ada, bob = sorted(host.scopes(), key=lambda scope: scope.name)
            kept = await inbox_of(host, bob)
            rows = {
                row.id: row
                for row in await host.outbox.read(outbox_views.listed, ada.space_id, ada.agent, limit=100_000)
            }
        for each in kept:  # what a process that died had in hand comes again after newer ones
            history.read("bob", "ada", "direct", each.id, each.seq, ahead=True)
        history.owed("bob", "direct", after=-1)
        history.check()
        in_log = [each.id for each in sorted(kept, key=lambda each: each.seq)]
        assert in_log == [row.id for row in rows.values() if row.kind == "dm"], "in the order they were accepted"
        for event in history.of("acknowledged"):
            row = rows[event.id]
            ended = ("done", None) if event.where == "direct" else ("dead", "denied")
            assert (row.state, row.code) == ended


@pytest.fixture
async def runs(space: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """ada and bob, in whose mailbox something lies that does not open. The broker delivers again after two seconds."""
    monkeypatch.setattr(admin_handlers, "ACK_WAIT_NS", 2_000_000_000)
    for name in ("ada", "bob"):
        await space.add(name)
    async with space.agent("ada") as ada, space.agent("bob") as bob:
        await ada.connection.request(space.subjects.direct(bob.id, ada.id), b"does not open", timeout=5)
    return Runs(space, tmp_path)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "failpoint", [pytest.param(each, marks=[] if each in QUICK else [pytest.mark.slow]) for each in POINTS]
)
async def test_a_host_killed_anywhere_loses_nothing_and_repeats_nothing(runs: Runs, failpoint: str) -> None:
    await runs.killed_at(failpoint)
    await runs.to_the_end()
    await runs.check()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_host_killed_while_it_verifies_what_another_broker_process_confirmed(runs: Runs) -> None:
    await runs.killed_at("drain.confirmed:kill:3")
    await runs.space.restart_broker(kill=True)
    await runs.killed_at("drain.verified:kill")
    await runs.to_the_end()
    await runs.check()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_host_killed_again_and_again_while_the_broker_restarts(runs: Runs) -> None:
    for point in ("drain.published:kill:2", "inbox.kept:kill", "host.accepted:kill:3", "drain.confirmed:kill:4"):
        await runs.killed_at(point)
        await runs.space.restart_broker(kill=True)
    await runs.to_the_end()
    await runs.check()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("points", [MAILBOX_POINTS[1::2], pytest.param(MAILBOX_POINTS[::2], marks=pytest.mark.slow)])
async def test_an_inbox_that_is_killed_while_it_is_read_without_a_host_shows_everything_and_settles_it_once(
    space: RealSpace, points: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_handlers, "ACK_WAIT_NS", 2_000_000_000)
    for name in ("bob", "me"):
        await space.add(name)
    terminal = Terminal(space.home.home.parent)
    try:
        assert (await asyncio.to_thread(terminal.run, "join", "general", "--as", "bob")).returncode == 0
        for point in points:
            for words in (("dm", "bob", f"to you at {point}"), ("send", "general", f"to all at {point}")):
                assert (await asyncio.to_thread(terminal.run, *words)).returncode == 0
            read = ("inbox", "--as", "bob", "--json", "--wait", "10", "-n", "2")
            reading = terminal.start(*read, TIDINGS_FAILPOINT=f"{point}:kill")
            shown, _ = await asyncio.to_thread(reading.communicate, timeout=60)
            assert reading.returncode == -signal.SIGKILL, f"{point} was not reached"
            marked = 1 if point == "mailbox.marked" else 0
            # one at a time: what the killed one had in hand comes when the broker's patience is over
            runs = [(await asyncio.to_thread(terminal.run, *read[:-1], "1")).stdout for _ in range(2 - marked)]
            outputs = (shown, "".join(runs))
            seen, again = ([json.loads(line)["text"] for line in text.splitlines()] for text in outputs)
            # a message that is kept may be shown and settled before the killed process has acknowledged all of them
            assert {*seen, *again} == {f"to all at {point}", f"to you at {point}"}, (point, seen, again)
            assert len(again) == len(set(again)), "what was settled does not come again"
            assert not marked or not set(seen) & set(again), "nor does what the killed process settled"
        assert "is empty" in (await asyncio.to_thread(terminal.run, "inbox", "--as", "bob", "--wait", "3")).stderr
    finally:
        terminal.close()
    async with host_in(space.home.home) as host:
        bob = await host.adopt(("home", str(space.home.home), "main", "bob"), receive=True)
        rows = await inbox_of(host, bob)
        assert len(rows) == len({row.id for row in rows}) == 2 * len(points)
        assert all(row.read_at for row in rows)


def test_every_failpoint_of_the_host_is_struck_here() -> None:
    source = Path(tidings.host.__file__).parent
    named = {name for path in source.glob("*.py") for name in re.findall(r'reach\("([^"]+)"\)', path.read_text())}
    struck = {point.split(":")[0] for point in POINTS} | {"drain.verified", *MAILBOX_POINTS}
    assert named <= struck


def test_the_check_of_these_runs_finds_a_message_that_was_lost() -> None:
    history = History()
    history.attempted("ada", "direct", "one")
    history.acknowledged("ada", "direct", "one", 0)
    history.owed("bob", "direct", after=-1)
    with pytest.raises(HistoryError, match="lost"):
        history.check()
