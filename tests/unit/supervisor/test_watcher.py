"""The watcher of a supervisor, over a list of connections in memory; and a broker that met a full disk."""

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tidings.admin.home import SpaceHome
from tidings.errors import TidingsError, UsageError
from tidings.server.disk import Room
from tidings.supervisor import supervisor as supervising
from tidings.supervisor import watcher as watching
from tidings.supervisor.supervisor import Supervisor, UpOptions
from tidings.supervisor.watcher import BURST, IN_TURN, Breach, Watcher
from tidings.wire.signing import KeyPair
from tidings_testing.waiting import eventually


class Broker:
    """Lists connections as the broker does, and closes them."""

    def __init__(self) -> None:
        #: connection -> its agent and the bytes it sent
        self.rows: dict[int, tuple[str, int]] = {}
        self.closed: list[int] = []

    async def request(self, subject: str, body: bytes, timeout: float) -> Any:
        assert timeout
        wanted = json.loads(body)
        if subject.endswith(".KICK"):
            self.closed.append(wanted["cid"])
            return SimpleNamespace(data=b"{}")
        rows: list[dict[str, Any]] = [
            {"cid": cid, "authorized_user": who, "in_bytes": sent} for cid, (who, sent) in self.rows.items()
        ]
        rows.sort(key=lambda row: -row["in_bytes"] if wanted.get("sort") == "bytes_from" else row["cid"])
        begin = wanted.get("offset", 0)
        found = {"server": {"id": "S"}, "data": {"connections": rows[begin : begin + wanted["limit"]]}}
        return SimpleNamespace(data=json.dumps(found).encode())


class Cuts:
    """An administrator that fails as it is told, and then does it."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.asked: list[str] = []

    async def __call__(self, breach: Breach) -> None:
        self.asked.append(breach.agent)
        if self.errors:
            raise self.errors.pop(0)


def watcher(tmp_path: Path, cut: Cuts) -> Watcher:
    made = Watcher(SpaceHome(tmp_path, "main"), cut=cut, note=lambda _: None)
    made._account = "A"
    made.heed({"bytes": 8_000_000})
    return made


async def settled(watched: Watcher) -> None:
    await asyncio.gather(*watched._asked.values(), return_exceptions=True)


async def test_an_agent_that_is_gone_is_asked_for_once(tmp_path: Path) -> None:
    cuts = Cuts(UsageError("there is no active agent"))
    watched = watcher(tmp_path, cuts)
    watched.bar(Breach("ada", "too much"))
    await settled(watched)
    assert cuts.asked == ["ada"]
    assert (watched._asked, watched._barred) == ({}, set())


async def test_a_cut_that_fails_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "ASK_AGAIN", 0.0)
    cuts = Cuts(TidingsError("no keys"), OSError("no process"))
    watched = watcher(tmp_path, cuts)
    watched.bar(Breach("ada", "too much"))
    await settled(watched)
    assert cuts.asked == ["ada"] * 3


async def test_a_fault_of_ours_leaves_nobody_barred_for_ever(tmp_path: Path) -> None:
    cuts = Cuts(RuntimeError("a fault"))
    watched = watcher(tmp_path, cuts)
    watched.bar(Breach("ada", "too much"))
    await settled(watched)
    assert (watched._asked, watched._barred) == ({}, set())
    watched.bar(Breach("ada", "too much"))
    await settled(watched)
    assert cuts.asked == ["ada", "ada"]


async def test_one_that_has_just_begun_is_found_behind_many_that_sent_more_in_a_long_life(tmp_path: Path) -> None:
    broker, cuts = Broker(), Cuts()
    watched = watcher(tmp_path, cuts)
    old, mal = KeyPair.generate().id, KeyPair.generate().id
    broker.rows = {cid: (old if cid % 30 == 0 else KeyPair.generate().id, 1000 * BURST) for cid in range(IN_TURN + 20)}
    link = cast("Any", broker)
    await watched._compare(link)
    newest = max(broker.rows) + 1
    broker.rows[newest] = (mal, 0)
    watched._came(link, mal, newest, time.monotonic())
    broker.rows[newest] = (mal, 2 * BURST)
    for _ in range(2):
        await watched._look(link, time.monotonic())
    await settled(watched)
    assert cuts.asked == [mal]
    await eventually(lambda: broker.closed == [newest])


async def test_a_connection_whose_coming_was_not_heard_is_learned_of_later(tmp_path: Path) -> None:
    broker, cuts = Broker(), Cuts()
    watched = watcher(tmp_path, cuts)
    mal = KeyPair.generate().id
    link = cast("Any", broker)
    await watched._compare(link)
    broker.rows[7] = (mal, 3 * BURST)
    await watched._look(link, time.monotonic())
    await watched._compare(link)
    await watched._look(link, time.monotonic())
    assert (cuts.asked, watched._bounds.connections_of(mal)) == ([], {7})
    broker.rows[7] = (mal, 5 * BURST)
    await watched._look(link, time.monotonic())
    await settled(watched)
    assert cuts.asked == [mal]


async def test_a_broker_that_met_a_full_disk_is_started_again_also_if_it_was_a_moment_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "LOOK_AT_DISK", 0.01)
    monkeypatch.setattr(supervising, "RESTART_EVERY", 0.2)
    supervisor = Supervisor(SpaceHome(tmp_path, "main"), UpOptions(person="ada"))
    stops: list[float] = []
    supervisor.broker = cast("Any", SimpleNamespace(alive=True, stop=stops.append))
    free = [0]

    def look() -> Room:
        return Room(tmp_path, free.pop() if free else 10**12, 10**8, reserved=True)

    monkeypatch.setattr(supervisor.disk, "look", look)
    monkeypatch.setattr(supervisor.disk, "make", lambda: False)
    supervisor._broker_restarted = time.monotonic()
    running = asyncio.create_task(supervisor._watch_disk())
    try:
        await eventually(lambda: bool(stops))
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert len(stops) == 1
