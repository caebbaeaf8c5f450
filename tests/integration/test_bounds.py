"""What one agent can take from the others is bounded: buffers of the broker, mailboxes, connections."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

import tidings
from tidings.admin.agents import AgentFile, Ledger
from tidings.client.connect import connect_directly
from tidings.contract.agents import HealthRequest, RosterRequest
from tidings.contract.channels import MembershipsRequest
from tidings.errors import AuthRevoked, DeniedError
from tidings.nats import client as broker
from tidings.supervisor import watcher as watching
from tidings.supervisor.status import resident_bytes
from tidings.supervisor.watcher import Breach, Watcher
from tidings.util.private_files import write_private
from tidings.util.task_ends import end_tasks
from tidings.wire.message import new_id
from tidings.wire.signing import KeyPair
from tidings_testing.real_space import AgentClient, RealSpace
from tidings_testing.security.actor import line
from tidings_testing.waiting import eventually
from tools.attacks import ATTACKS, Attacker

MB = 1_000_000


def connect(space: RealSpace, name: str, **options: object) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)  # type: ignore[arg-type]


async def attack(space: RealSpace, name: str, seconds: float, run: Callable[[Attacker], None]) -> Attacker:
    """Run an attack with the credential of an agent, in a thread, for at most so many seconds."""
    attacker = Attacker.of(space.info.url, space.info.name, space.home.agent_creds(name), seconds)
    try:
        await asyncio.to_thread(run, attacker)
    finally:
        attacker.close()
    return attacker


def memory(space: RealSpace) -> int:
    assert space.broker.pid is not None
    return resident_bytes(space.broker.pid) or 0


@asynccontextmanager
async def watched(space: RealSpace) -> AsyncIterator[list[dict[str, Any]]]:
    """A watcher as a supervisor has it; the administrator runs in this process. Yields what it says of itself."""
    notes: list[dict[str, Any]] = []

    async def cut(breach: Breach) -> None:
        async with space.administer() as admin:
            await (admin.bar if breach.void else admin.withhold)(breach.agent, breach.why)

    watcher = Watcher(space.home, cut=cut, note=notes.append)
    assert space.steward is not None
    space.steward.life.tell_supervisor = lambda said: _heed(watcher, said)
    running = asyncio.create_task(watcher.keep())
    try:
        await eventually(lambda: bool(notes))
        yield notes
    finally:
        await end_tasks([running])
        await watcher.close()


def _heed(watcher: Watcher, said: dict[str, Any]) -> None:
    asked = said.get("bar") or said.get("withhold")
    if asked:
        watcher.bar(Breach(asked["id"], asked["why"], "bar" in said))


def withheld(space: RealSpace, name: str) -> str:
    row = Ledger(space.home.issued).active(name)
    return row.withheld if row else ""


async def test_whoever_opens_connection_after_connection_is_cut_and_named_and_comes_back_by_its_owner(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "MOST_RETURNS", 30)
    await space.add("mal")
    await space.add("vic")
    async with watched(space), space.agent("vic") as vic:
        running = asyncio.create_task(attack(space, "mal", 20.0, ATTACKS["connections"]))
        while not running.done():
            await vic.control.call(MembershipsRequest())
            await asyncio.wait({running}, timeout=0.05)
        attacker = await running
        assert attacker.refused >= 20, "it was let in until its time was over"
        await eventually(lambda: "its credential is void" in withheld(space, "mal"))
        assert "connections beyond the 32" in withheld(space, "mal")
        health = await vic.control.call(HealthRequest())
        assert [each for each in health.withheld if each.startswith("mal may not post since")]
        with pytest.raises(AuthRevoked):
            async with space.agent("mal"):
                pass
        async with space.administer() as admin:
            await admin.set_access("mal", AgentFile("mal", read=("general",), post=("general",)))
        async with space.agent("mal") as mal:
            assert (await mal.post("general", b"{}"))["seq"]
        assert withheld(space, "mal") == ""


async def test_whoever_sends_more_than_its_rate_is_cut_in_the_act(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "BURST", 4 * MB)
    await space.add("mal")
    async with watched(space):
        running = asyncio.create_task(attack(space, "mal", 20.0, ATTACKS["steady"]))
        assert (await running).refused >= 20
        await eventually(lambda: "MB a second" in withheld(space, "mal"))


async def test_what_short_connections_sent_counts_and_what_a_reader_was_sent_does_not(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "BURST", 1 * MB)
    monkeypatch.setattr(watching, "DEFAULT_BYTES", 1_000)
    monkeypatch.setattr(watching, "LOOK_EVERY", 60.0)  # only what the broker says of each connection
    await space.add("mal")
    await space.add("vic")
    heard = 0

    async def hear(message: Any) -> None:
        nonlocal heard
        heard += len(message.data)

    async with watched(space):
        async with space.agent("vic") as vic:
            for _ in range(4):
                await vic.connection.subscribe(space.subjects.live_chat("general"), cb=hear)
            await vic.connection.flush()
            for _ in range(3):
                async with space.agent("mal") as mal:
                    for _ in range(12):
                        await put(mal, space.subjects.chat(mal.id, "general"), 40_000)
            await eventually(lambda: heard >= 4 * 3 * 12 * 40_000)
        await eventually(lambda: "MB a second" in withheld(space, "mal"))
        async with space.agent("vic") as vic:
            await vic.control.call(MembershipsRequest())
        assert withheld(space, "vic") == ""


async def test_a_watcher_that_cannot_watch_says_so_and_watches_again_when_it_can(space: RealSpace) -> None:
    async with watched(space) as notes:
        assert notes[-1]["running"]
        good = space.home.watcher_creds.read_text()
        await space.add("ada")
        write_private(space.home.watcher_creds, space.home.agent_creds("ada").read_text())
        await space.restart_broker()
        await eventually(lambda: not notes[-1]["running"] and bool(notes[-1]["why"]))
        write_private(space.home.watcher_creds, good)
        await eventually(lambda: bool(notes[-1]["running"]))


@pytest.mark.parametrize("row", [{"cid": None, "in_bytes": 1}, "no row at all"])
async def test_a_row_of_the_broker_that_makes_no_sense_is_noted_and_watching_goes_on(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, row: Any
) -> None:
    ask, spoiled = Watcher._list, [True]

    async def listed(watcher: Watcher, link: Any, **wanted: Any) -> list[Any]:
        rows = await ask(watcher, link, **wanted)
        return [*rows, row] if "offset" in wanted and spoiled else rows

    monkeypatch.setattr(Watcher, "_list", listed)
    async with watched(space) as notes:
        assert (notes[-1]["running"], "Error: " in notes[-1]["why"]) == (False, True)
        assert "Traceback" in caplog.text
        spoiled.clear()
        await eventually(lambda: bool(notes[-1]["running"]))


async def test_a_word_of_the_broker_that_makes_no_sense_is_passed_over(space: RealSpace) -> None:
    watcher = Watcher(space.home, cut=_never, note=lambda _: None)
    for said in (b"", b"[]", b'{"client":[]}', b'{"client":{"id":1},"server":{"id":"S"},"sent":[1]}'):
        for came in (True, False):
            watcher._heard(cast("Any", None), said, came=came)


async def _never(breach: Breach) -> None:
    raise AssertionError(breach)


async def test_a_watcher_that_lost_its_link_holds_what_was_sent_before_against_nobody(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "BURST", 1 * MB)
    links: list[Any] = []

    async def connected(*args: Any, **options: Any) -> Any:
        links.append(await broker.connect(*args, **options))
        return links[-1]

    monkeypatch.setattr(watching, "connect", connected)
    await space.add("mal")
    await space.add("vic")
    async with space.agent("vic") as vic, space.agent("mal") as mal:
        for _ in range(40):
            await put(vic, space.subjects.chat(vic.id, "general"), 40_000)
        async with watched(space) as notes:
            await links[0].close()
            await eventually(lambda: len(links) == 2 and bool(notes[-1]["running"]))
            for _ in range(15):
                await mal.connection.publish(space.subjects.chat(mal.id, "general"), b"x" * 200_000)
            await eventually(lambda: "MB a second" in withheld(space, "mal"))
            assert withheld(space, "vic") == ""
            assert vic.connection.is_connected


@asynccontextmanager
async def supervised(space: RealSpace) -> AsyncIterator[None]:
    """Does for the steward in this process what a supervisor does: runs the administrator when asked."""
    assert space.steward is not None
    running: list[asyncio.Task[None]] = []

    async def cut(agent: str, why: str, *, void: bool) -> None:
        async with space.administer() as admin:
            await (admin.bar if void else admin.withhold)(agent, why)

    def heed(said: dict[str, Any]) -> None:
        asked = said.get("bar") or said.get("withhold")
        if asked:
            running.append(asyncio.create_task(cut(asked["id"], asked["why"], void="bar" in said)))

    space.steward.life.tell_supervisor = heed
    yield
    await asyncio.gather(*running)


async def put(client: AgentClient, subject: str, size: int, **headers: str) -> dict[str, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()} or None
    reply = await client.connection.request(subject, b"x" * size, timeout=5, headers=named)
    return dict(json.loads(reply.data))


async def direct_senders(space: RealSpace) -> set[str]:
    async with space.core() as js:
        found = await js.subjects_of(space.subjects.direct_stream, f"{space.subjects.root}.dm.>")
    return {subject.rpartition(".")[2] for subject in found}


async def test_who_holds_more_than_its_share_of_the_direct_messages_loses_it_and_is_named(space: RealSpace) -> None:
    for name in ("mal", "ada", "bob"):
        await space.add(name)
    async with supervised(space), space.agent("mal") as mal, space.agent("ada") as ada, space.agent("bob") as bob:
        assert "seq" in await put(ada, space.subjects.direct(bob.id, ada.id), 1000)
        answers = [await put(mal, space.subjects.direct(KeyPair.generate().id, mal.id), 250_000) for _ in range(28)]
        assert "seq" in answers[-1]
        assert "seq" in await put(mal, space.subjects.direct(bob.id, mal.id), 1000)
        await eventually(lambda: "MB of direct messages" in withheld(space, "mal"))
        async with asyncio.timeout(10):
            while mal.id in await direct_senders(space):
                await asyncio.sleep(0.05)
        assert ada.id in await direct_senders(space)
        assert "seq" in await put(ada, space.subjects.direct(bob.id, ada.id), 1000)
        told = (await bob.control.call(RosterRequest())).damage
        assert [row.text for row in told] == [
            "1 direct messages of mal were removed: it held more than its share of the mail"
        ]
        health = await ada.control.call(HealthRequest())
        assert health.mail["beyond_share"] >= 29
        assert any(each.startswith("mal may not post since") for each in health.withheld)


async def test_a_shared_stream_that_is_full_is_unhealthy_and_says_whose_it_is(space: RealSpace) -> None:
    for name in ("ada", "bob"):
        await space.add(name)
    async with space.agent("ada") as ada, space.agent("bob") as bob:
        for client in (ada, bob):
            for _ in range(16):
                await put(client, space.subjects.direct(bob.id, client.id), 255_000)
        async with asyncio.timeout(10):
            while not (said := await full(ada)):
                await asyncio.sleep(0.05)
        assert said[0].startswith("DM_main is full")
        async with asyncio.timeout(10):
            while not all(f"{name} " in said[0] for name in ("ada", "bob")):
                said = await full(ada)
                await asyncio.sleep(0.05)


async def full(client: AgentClient) -> list[str]:
    return [each for each in (await client.control.call(HealthRequest())).problems if "is full" in each]


@pytest.mark.parametrize("what", ["id", "subject"])
async def test_an_id_or_a_subject_that_is_longer_than_anybody_needs_costs_the_credential(
    space: RealSpace, what: str
) -> None:
    await space.add("mal", post=["general", "general.>"])
    async with supervised(space), space.agent("mal") as mal:
        seq = (await put(mal, space.subjects.chat(mal.id, "general"), 10))["seq"]
        assert space.steward is not None
        shares = space.steward.shares
        await eventually(lambda: shares._fills[space.subjects.log_stream].head >= seq)
        if what == "id":
            await put(mal, space.subjects.chat(mal.id, "general"), 10, Nats_Msg_Id="i" * 2_000)
        else:
            await put(mal, f"{space.subjects.chat(mal.id, 'general')}.{'s' * 2_000}", 10)
        await eventually(lambda: "its credential is void" in withheld(space, "mal"))
        assert f"a {'message id' if what == 'id' else 'subject'} of 2," in withheld(space, "mal")


def many_requests(attacker: Attacker) -> None:
    """4,000 a second: the steward of a test shares its processor with the attacker."""
    body = json.dumps({"op": new_id(), "do": "list"}).encode()
    batch = line(attacker.subjects.control("member", attacker.id), body, reply=f"_INBOX_{attacker.id}.x") * 100
    attacker.pour(itertools.repeat(batch), bytes_per_second=40 * len(batch))


async def test_a_flood_of_control_requests_is_cut_and_others_go_on(space: RealSpace) -> None:
    await space.add("mal")
    await space.add("vic")
    async with watched(space), space.agent("vic") as vic:
        attacker = await attack(space, "mal", 20.0, many_requests)
        assert attacker.refused >= 20
        await eventually(lambda: "control requests or" in withheld(space, "mal"))
        await vic.control.call(MembershipsRequest())
        assert space.steward is not None
        assert space.steward.dispatcher.counts["not_admitted"] > 0


async def test_connections_that_do_not_read_cost_the_broker_little_and_are_cut(space: RealSpace) -> None:
    await space.add("mal")
    before, peak = memory(space), 0
    running = asyncio.create_task(attack(space, "mal", 2.0, ATTACKS["subscriptions"]))
    while not running.done():
        peak = max(peak, memory(space))
        await asyncio.wait({running}, timeout=0.02)
    assert (await running).connected >= 10
    assert peak - before < 250 * MB


async def test_a_mailbox_of_many_large_messages_is_read_without_being_cut(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob")
    async with connect(space, "ada", receive=False) as ada:
        for number in range(20):
            await ada.dm("bob", f"{number} " + "x" * 190_000)
    async with connect(space, "bob") as bob:
        link = bob.transport.connection.current
        async with asyncio.timeout(30):
            seen = [message.text.split()[0] async for message in _first(bob, 20)]
        assert seen == [str(number) for number in range(20)]
        assert bob.transport.connection.current is link, "the broker cut a reader that reads"


async def test_a_subscription_too_many_is_refused_with_a_sentence_and_costs_no_connection(space: RealSpace) -> None:
    await space.add("bob")
    async with connect(space, "bob") as bob:
        link, refused = bob.transport.connection.current, list[str]()
        assert link is not None
        link.on_complaint.append(refused.append)
        more = [await link.listen(space.subjects.live_chat("general"), lambda _: None) for _ in range(985)]
        with pytest.raises(DeniedError, match="1,000 subscriptions, two for each channel"):
            await bob.join("general")
        assert refused == []
        more += [await link.listen(space.subjects.live_chat("general"), lambda _: None) for _ in range(40)]
        await link.flush()
        assert "maximum subscriptions exceeded" in refused[0]
        for each in more:
            await each.unsubscribe()
        assert (await bob.join("general")).channel == "general"
        assert bob.transport.connection.current is link, "the connection was lost over it"


async def _first(endpoint: tidings.DirectAgent, count: int):  # type: ignore[no-untyped-def]
    numbers = itertools.count(1)
    async for message in endpoint.messages():
        yield message
        if next(numbers) >= count:
            return
