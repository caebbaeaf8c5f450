"""Durable delivery as an operator sees it, without starting Spark: status, debts, quarantine, a child that dies."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tidings.admin.home import SpaceHome
from tidings.cli.main import main
from tidings.delivery.deliverer import DeliverBatch
from tidings.delivery.status import look
from tidings.errors import AuthRevoked
from tidings.model.classify import Poison
from tidings.model.deferred import DebtEvent, Debts
from tidings.nats.jetstream import JetStream
from tidings.server.state import StateBucket
from tidings.steward import backstop
from tidings.supervisor.keepers import PipelineKeeper
from tidings.supervisor.status import delivery
from tidings.wire import roster
from tidings.wire.roster import Backstop
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually
from tools.frames import stub_pipeline

DAY = 86_400


class Operator:
    """Runs commands on a space."""

    def __init__(self, space: RealSpace, capsys: pytest.CaptureFixture[str]) -> None:
        self._place = ("--home", str(space.home.home), "--space", space.home.name)
        self._capsys = capsys

    async def run(self, *words: str) -> tuple[int, str, str]:
        self._capsys.readouterr()
        code = await asyncio.to_thread(main, [*words, *self._place])
        said = self._capsys.readouterr()
        return code, said.out, said.err

    async def json(self, *words: str) -> Any:
        return json.loads((await self.run(*words, "--json"))[1])


@pytest.fixture
def operator(pair: RealSpace, capsys: pytest.CaptureFixture[str]) -> Operator:
    return Operator(pair, capsys)


async def keep(js: JetStream, space: RealSpace, key: str, value: dict[str, Any]) -> None:
    bucket = StateBucket(js, space.subjects)
    entry = await bucket.get(key)
    await bucket.put(key, value, entry.revision if entry else 0)


def beat(**more: Any) -> dict[str, Any]:
    return {"lease": 1, "holder": "h", "host": "there", "pid": 4_711, **more}


async def test_how_far_delivery_is_comes_from_the_broker_in_records_and_seconds(pair: RealSpace) -> None:
    never = look(pair.home)
    assert (never.running, never.floor, never.behind) == (False, 0, never.head)
    assert never.head > 0
    async with pair.core() as js, pair.agent("ada") as ada:
        await keep(js, pair, "beat.deliver", beat(beat=1))
        await keep(
            js, pair, "figures.deliver", {"debts": 2, "owners_in_debt": 1, "deliveries": 40, "last_batch_ms": 9.5}
        )
        await keep(js, pair, "floor.deliver", {"seq": never.head})
        caught_up = look(pair.home)
        assert (caught_up.running, caught_up.behind, caught_up.behind_s) == (True, 0, 0.0)
        assert (caught_up.debts, caught_up.figures["deliveries"], caught_up.holder) == (2, 40, "pid 4711 on there")
        for _ in range(3):
            await ada.post("general", b"{}")
        behind = look(pair.home)
        assert behind.behind == 3
        assert 0 < behind.behind_s < DAY
        await keep(js, pair, "beat.deliver", beat(beat=2, query=False))
        assert not look(pair.home).running, "it holds the lease, and its query does not run"
        await keep(js, pair, "beat.deliver", beat(beat=3, query=True))
        assert look(pair.home).running
        await keep(js, pair, "beat.deliver", beat(released=1))
        assert not look(pair.home).running, "it said that it stopped"


async def test_a_beat_that_is_old_or_of_a_process_that_was_seen_to_die_is_no_life(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair.core() as js:
        await keep(js, pair, "beat.deliver", beat(beat=1))
    assert (await delivery(pair.home))["running"]
    monkeypatch.setattr("tidings.supervisor.status.lock_holder", lambda _path: "somebody")
    pair.home.write_state({"pipeline": {"wanted": True, "phase": "restarting", "gone": 4_711}})
    facts = await delivery(pair.home)
    assert not facts["running"]
    assert "restarting" in facts["problems"][0]
    pair.home.write_state({"pipeline": {"wanted": True, "phase": "running", "gone": 1}})
    assert (await delivery(pair.home))["running"]
    later = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: later)
    silent = await delivery(pair.home)
    assert (silent["running"], silent["supervised"]["phase"]) == (False, "not running"), "whatever it said last"
    assert "is running" not in silent["problems"][0]


async def test_pipeline_status_says_what_is_behind_and_answers_with_its_exit_code(
    pair: RealSpace, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = await operator.run("pipeline", "status")
    assert (code, "leaves it out" in out) == (0, True)
    monkeypatch.setattr("tidings.supervisor.status.lock_holder", lambda _path: "somebody")
    pair.home.write_state({"pipeline": {"wanted": True, "phase": "unavailable", "why": "there is no Java."}})
    code, out, err = await operator.run("pipeline", "status")
    assert (code, "there is no Java; durable delivery adds" in err) == (3, True)
    assert f"0 of {look(pair.home).head}" in out
    told = await operator.json("pipeline", "status")
    assert (told["running"], told["supervised"]["phase"]) == (False, "unavailable")
    pair.broker.stop()
    code, _, err = await operator.run("pipeline", "status")
    assert (code, "no broker answers" in err) == (5, True)
    pair.broker.start()


def _missing(creds: Path) -> None:
    creds.unlink()


def _open_to_others(creds: Path) -> None:
    creds.chmod(0o644)


def _empty(creds: Path) -> None:
    creds.write_text("")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(_missing, "cannot read"), (_open_to_others, "can be read by others"), (_empty, "not a NATS credentials file")],
)
async def test_delivery_that_is_wanted_and_cannot_be_looked_at_is_a_problem_with_its_reason(
    pair: RealSpace,
    operator: Operator,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], None],
    reason: str,
) -> None:
    monkeypatch.setattr("tidings.supervisor.status.lock_holder", lambda _path: "somebody")
    pair.home.write_state({"phase": "ready", "pipeline": {"wanted": True, "phase": "running"}})
    spoil(pair.home.pipeline_creds)
    code, out, _ = await operator.run("status", "--as", "ada", "--json")
    (problem,) = json.loads(out)["problems"]
    assert (code, problem.startswith("how durable delivery is cannot be seen: "), reason in problem) == (3, True, True)
    code, _, err = await operator.run("pipeline", "status")
    assert (code, reason in err) == (3, True)
    pair.home.write_state({"phase": "ready", "pipeline": {"wanted": False, "phase": "not started"}})
    assert (await operator.run("status", "--as", "ada"))[0] == 0, "nobody wants it"
    pair.home.write_state({"phase": "ready", "pipeline": {"wanted": True, "phase": "running"}})
    await pair.stop_steward()
    pair.broker.stop()
    assert (await delivery(pair.home))["problems"] == [], "that no broker answers is said once"
    pair.broker.start()


async def test_where_the_space_has_switched_delivery_off_its_silence_is_no_problem_and_status_says_so(
    pair: RealSpace, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidings.supervisor.status.lock_holder", lambda _path: "somebody")
    pair.home.write_state({"phase": "ready", "pipeline": {"wanted": True, "phase": "restarting", "why": "it died"}})

    async def problems() -> list[bool]:
        said = [(await operator.json(*words))["problems"] for words in (("status",), ("pipeline", "status"))]
        return [any("durable copies are delayed" in problem for problem in each) for each in said]

    assert await problems() == [True, True]
    assert (await operator.run("space", "set", "deliver=off"))[0] == 0
    assert await problems() == [False, False]
    assert "restarting (deliver=off)" in (await operator.run("status"))[1]
    code, out, _ = await operator.run("pipeline", "status")
    assert (code, "off for this space" in out) == (0, True)
    assert (await operator.run("space", "set", "deliver=on"))[0] == 0
    assert await problems() == [True, True]


async def owe(space: RealSpace, *events: DebtEvent) -> None:
    from tidings.delivery.delta_writer import DeltaWriter
    from tidings.delivery.ledger import DEBTS, LedgerPaths, append_events

    path = LedgerPaths.below(space.home.checkpoint, space.home.lake).debts
    DeltaWriter(path, DEBTS)
    append_events(path, events, writer="deliver:test")


async def test_debts_are_listed_with_names_and_a_cancelled_one_becomes_a_loss_its_owner_is_told(
    pair: RealSpace, operator: Operator
) -> None:
    from deltalake import DeltaTable

    from tidings.delivery.ledger import LedgerPaths, events_of

    code, out, err = await operator.run("pipeline", "debts")
    assert (code, out, "nobody in space main is owed anything" in err) == (0, "", True)
    async with pair.agent("bob") as bob:
        owner = bob.id
    since = time.time_ns()
    await owe(
        pair,
        DebtEvent(since, "owe", owner, "general", 1, "mailbox full"),
        DebtEvent(since + 1, "owe", owner, "other", 2, "mailbox full"),
    )
    async with pair.core() as js:
        await keep(js, pair, "floor.deliver", {"seq": 3})
    listed = await operator.json("pipeline", "debts")
    assert [(r["name"], r["owner"], r["channel"], r["after"], r["behind"], r["cause"]) for r in listed] == [
        ("bob", owner, "general", 1, 2, "mailbox full"),
        ("bob", owner, "other", 2, 1, "mailbox full"),
    ]
    code, _, err = await operator.run("pipeline", "cancel-debt", "ada", "general", "--yes")
    assert (code, "ada has no debt on general" in err) == (2, True)
    code, _, err = await operator.run("pipeline", "cancel-debt", "bob", "general", "--why", "bob is new", "--yes")
    assert (code, "bob will be told with its next frame: 2..3 of general" in err) == (0, True)
    path = LedgerPaths.below(pair.home.checkpoint, pair.home.lake).debts
    left = Debts.of(events_of(DeltaTable(path).to_pyarrow_table()))
    assert [(x.lost.channel, x.lost.first, x.lost.last, x.lost.cause) for x in left.untold[owner]] == [
        ("general", 2, 3, "bob is new")
    ]
    assert left.open[owner, "general"].after == 3
    assert left.open[owner, "other"].after == 2
    code, _, err = await operator.run("pipeline", "cancel-debt", owner, "general", "--yes")
    assert (code, "as good as paid" in err) == (2, True)


async def test_a_debt_is_not_cancelled_without_a_yes(
    pair: RealSpace, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair.agent("bob") as bob:
        await owe(pair, DebtEvent(time.time_ns(), "owe", bob.id, "general", 1, "mailbox full"))
    async with pair.core() as js:
        await keep(js, pair, "floor.deliver", {"seq": 3})
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    code, _, _ = await operator.run("pipeline", "cancel-debt", "bob", "general")
    assert code == 1
    assert [row["after"] for row in await operator.json("pipeline", "debts")] == [1]


def test_a_batch_that_is_repeated_quarantines_nothing_twice_and_the_next_one_is_not_taken_for_it(
    tmp_path: Path,
) -> None:
    from tidings.delivery.ledger import DeltaLedger, LedgerPaths

    paths = LedgerPaths.below(tmp_path / "checkpoint", tmp_path / "lake")
    poison = [Poison(seq, "td.main.chat.X.general", "json", "depth") for seq in (5, 6, 9)]
    for _ in range(2):  # the process after this one knows it too
        ledger = DeltaLedger(paths, app="deliver:test", epoch="e")
        for through, found in ((6, poison[:2]), (6, poison[:2]), (8, []), (9, poison[2:]), (9, poison[2:])):
            ledger.write_quarantine(DeliverBatch(0, 0, through, 9), found)
    assert sorted(DeltaTable(paths.quarantine).to_pyarrow_table()["seq"].to_pylist()) == [5, 6, 9]


async def test_what_was_quarantined_is_listed_once_with_its_reason(pair: RealSpace, operator: Operator) -> None:
    from tidings.delivery.ledger import DeltaLedger, LedgerPaths

    assert await operator.json("pipeline", "quarantine") == []
    paths = LedgerPaths.below(pair.home.checkpoint, pair.home.lake)
    ledger = DeltaLedger(paths, app="deliver:test", epoch="e")
    poison = [Poison(5, "td.main.chat.X.general", "signature", "it does not verify"), Poison(6, "y", "json", "depth")]
    batch = DeliverBatch(0, 0, 6, 6)
    ledger.write_quarantine(batch, poison)
    DeltaLedger(paths, app="deliver:other", epoch="e").write_quarantine(batch, poison[:1])  # the checkpoint was lost
    rows = await operator.json("pipeline", "quarantine")
    assert sorted((row["seq"], row["reason"], row["detail"]) for row in rows) == [
        (5, "signature", "it does not verify"),
        (6, "json", "depth"),
    ]
    assert len(await operator.json("pipeline", "quarantine", "-n", "1")) == 1


async def test_n20_who_info_join_and_inbox_say_how_late_durable_copies_are(
    pair: RealSpace, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backstop, "SILENT_AFTER", 1.5)
    assert pair.steward is not None
    told = pair.steward.roster
    surfaces = (("who",), ("who", "--json"), ("channels", "info", "general"), ("inbox", "--wait", "0"))

    async def said() -> list[str]:
        shown = [await operator.run(*words, "--as", "bob") for words in surfaces]
        assert [code for code, *_ in shown] == [0] * len(surfaces)
        return [out + err for _, out, err in shown]

    async with stub_pipeline(pair) as pipeline:
        head = await pipeline.level()
        await eventually(lambda: told.backstop.fact(head) == Backstop(True, 0, head))
        assert [text for text in await said() if "delayed" in text] == []
        assert "durable copies are up to date" in (await said())[2]
        for text in ("one", "two"):
            assert (await operator.run("send", "general", text, "--as", "ada"))[0] == 0
        late = "durable copies delayed, 2 behind"
        assert [text for text in await said() if "delayed" in text] == [], "a second or two is no delay"
        monkeypatch.setattr(roster, "TOLERATED_S", 0.0)
        assert [text for text in await said() if f"note: {late}" not in text and f"copies\t{late}" not in text] == []
        assert "note: durable copies delayed, 3 behind" in (await operator.run("join", "general", "--as", "bob"))[2]
    await eventually(lambda: not told.backstop.running, what="its silence is noticed")
    down = "durable delivery is not running: durable copies delayed, 3 behind"
    assert [text for text in await said() if down not in text] == []
    assert f"note: {down}" in (await operator.run("join", "general", "--as", "bob"))[2]
    pair.home.write_state({"pipeline": {"wanted": True, "phase": "starting"}})
    begins = down.replace("not running", "starting")
    await eventually(lambda: told.backstop.fact(0).starting, what="the supervisor's word is heard")
    assert [text for text in await said() if begins not in text] == []
    assert f"note: {begins}" in (await operator.run("join", "general", "--as", "bob"))[2]


async def test_a_pipeline_that_dies_is_started_again_with_growing_pauses_and_its_reason_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidings.util.backoff.random.random", lambda: 0.5)  # no jitter
    home = SpaceHome(tmp_path / "home", "main")  # there is no such space: the child says so and ends
    home.make()
    notes: list[dict[str, Any]] = []
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    keeper = PipelineKeeper(home, [], note=notes.append, tell=lambda _text: None, pause=pause)
    running = asyncio.create_task(keeper.keep())
    try:
        await eventually(lambda: len(pauses) >= 3, within=30, what="it ended three times")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await keeper.stop()
    assert pauses[:3] == [1.0, 2.0, 4.0]
    dead = [note for note in notes if note["phase"] == "restarting" and note["pid"] is None]
    assert "there is no space 'main'" in dead[0]["why"]
    assert not any(Path(f"/proc/{note['gone']}").exists() for note in dead)
    assert notes[-1]["phase"] == "stopped"


async def test_a_space_made_before_there_was_a_pipeline_gets_its_credential_at_the_next_start(pair: RealSpace) -> None:
    pair.home.pipeline_creds.unlink()
    async with pair.administer() as admin:
        await admin.provision()
    assert look(pair.home).head > 0


async def test_a_credential_of_another_space_is_refused_in_a_sentence(pair: RealSpace, tmp_path: Path) -> None:
    from tidings.admin.creation import create_space

    other = SpaceHome(tmp_path / "other", "main")
    await asyncio.to_thread(create_space, other, port=None, open_space=False, budget=10**8)
    with pytest.raises(AuthRevoked, match="does not accept this credential"):
        look(pair.home, creds=other.pipeline_creds)
