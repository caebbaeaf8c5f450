"""A worker of links is kept while a link takes something in, and only then."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tidings.admin.home import SpaceHome, SpaceInfo
from tidings.admin.link_registry import AgreedLink, LinkLedger
from tidings.supervisor import keepers
from tidings.supervisor.keepers import LinkKeeper
from tidings.util.backoff import Backoff
from tidings_testing.waiting import eventually


class MadeUpProcess:
    """Says what it is told to say, and ends when it is told to."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.said: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.ended = False

    async def lines(self) -> AsyncIterator[dict[str, Any]]:
        while (each := await self.said.get()) is not None:
            yield each

    async def wait(self) -> int:
        return 7

    async def end(self) -> None:
        self.ended = True
        self.said.put_nowait(None)


class Kept:
    def __init__(self, home: SpaceHome) -> None:
        self.processes: list[MadeUpProcess] = []
        self.notes: list[dict[str, Any]] = []
        self.told: list[str] = []
        self.links = LinkLedger.below(home, home.read_info().id)
        self.keeper = LinkKeeper(
            home, note=self.notes.append, tell=self.told.append, look_every=0.01, start=self._start
        )

    async def _start(self, home: SpaceHome) -> MadeUpProcess:
        del home
        self.processes.append(MadeUpProcess(100 + len(self.processes)))
        return self.processes[-1]

    def put(self, **changes: Any) -> None:
        fields: dict[str, Any] = {"link": "east", "origin": "A", "state": "on", "op": "1"}
        self.links.put(AgreedLink(**{**fields, "terms": {"channels": {"a": "b"}}, **changes}))

    @property
    def phases(self) -> list[str]:
        return [note["phase"] for note in self.notes]


@pytest.fixture
async def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kept]:
    monkeypatch.setattr(keepers, "RESTART", Backoff(0.01, 0.02))
    home = SpaceHome(tmp_path, "main")
    home.make()
    home.write_info(SpaceInfo("main", "A", "", "", "", 4222, 1, "", False, ""))
    found = Kept(home)
    keeping = asyncio.create_task(found.keeper.keep())
    yield found
    keeping.cancel()
    await asyncio.wait({keeping})
    assert keeping.cancelled()


async def test_a_space_without_links_has_no_process_for_them(kept: Kept) -> None:
    kept.put(terms={"channels": {}, "shares": ["general"]})
    kept.put(link="over", terms={"channels": {"a": "b"}, "until": 1})
    kept.put(link="ended", state="off")
    await asyncio.sleep(0.1)
    assert (kept.processes, kept.notes) == ([], [])


async def test_it_starts_with_the_first_link_and_ends_with_the_last(kept: Kept) -> None:
    kept.put()
    await eventually(lambda: len(kept.processes) == 1)
    kept.processes[0].said.put_nowait({"ready": True})
    await eventually(lambda: kept.phases == ["starting", "running"])
    assert kept.notes[-1]["pid"] == 100
    kept.put(state="off")
    await eventually(lambda: kept.phases[-1] == "not needed")
    assert kept.processes[0].ended
    kept.put(terms={"channels": {}, "beyond": {"B": {"a": "b"}}, "until": time.time() + 60})
    await eventually(lambda: len(kept.processes) == 2)
    await kept.keeper.stop()
    assert kept.processes[1].ended


async def test_it_is_started_again_and_why_it_ended_is_noted(kept: Kept) -> None:
    kept.put()
    await eventually(lambda: len(kept.processes) == 1)
    kept.processes[0].said.put_nowait({"error": {"code": "store_busy", "message": "another one runs"}})
    kept.processes[0].said.put_nowait(None)
    await eventually(lambda: len(kept.processes) == 2)
    assert ("restarting", "another one runs") in [(note["phase"], note["why"]) for note in kept.notes]
    kept.processes[1].said.put_nowait(None)
    await eventually(lambda: len(kept.processes) == 3)
    assert ("restarting", "exit code 7") in [(note["phase"], note["why"]) for note in kept.notes]


async def test_a_file_that_is_damaged_changes_nothing_and_is_noted(kept: Kept) -> None:
    kept.put()
    path = kept.links.folder / "east.json"
    good = path.read_text()
    await eventually(lambda: len(kept.processes) == 1)
    path.write_text("{")
    await eventually(lambda: any("is damaged" in (note["why"] or "") for note in kept.notes))
    assert not kept.processes[0].ended
    path.write_text(good)
    kept.put(state="off")
    await eventually(lambda: kept.processes[0].ended)
    assert len(kept.processes) == 1
