"""The endpoint on a real space: channels, live copies, history, and coming back."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tidings
from tidings.admin.agents import AgentFile, Ledger
from tidings.client import channels, read_state
from tidings.client.agent import JOINS_AT_ONCE
from tidings.client.connect import connect_directly
from tidings.client.connection import AgentConnection
from tidings.contract.channels import HistoryRequest, JoinRequest
from tidings.contract.core import Request
from tidings.errors import ConnectionLost, DeniedError, LogFull, StewardUnreachable, TooLarge, UsageError
from tidings.nats import jwt
from tidings.server.streams import set_gate
from tidings.steward import gate
from tidings_testing.history import History
from tidings_testing.processes import child
from tidings_testing.proxy import fault_proxy
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually

PUBLISHER = Path(__file__).parent / "publishing_child.py"


def connect(space: RealSpace, name: str, **options: object) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)  # type: ignore[arg-type]


def cut(endpoint: tidings.DirectAgent) -> None:
    """Cut the socket under a client, as a network does."""
    endpoint.transport.connection.current.abort()


async def recorded_send(history: History, sender: tidings.DirectAgent, channel: str, text: str = "x") -> int:
    """Send and record it; answers the sequence."""
    confirmed = history.sending(sender.name, channel)
    receipt = await sender.send(channel, text, id=confirmed.id, timeout=20)
    confirmed(receipt.seq)
    return receipt.seq


async def texts(endpoint: tidings.DirectAgent, count: int) -> list[str]:
    found = []
    for _ in range(count):
        message = await endpoint.next_message(10)
        await message.ack()
        found.append(message.text)
    return found


async def test_what_one_sends_the_other_receives_with_its_sender_and_sequence(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob")
    async with connect(space, "ada", channels=["general"]) as ada, connect(space, "bob", channels=["general"]) as bob:
        receipt = await ada.send("general", "hello")
        async for message in bob.messages():
            assert (message.text, message.channel, message.seq) == ("hello", "general", receipt.seq)
            assert (message.sender.id, message.sender.name) == (ada.id, "ada")
            break
        assert len(ada.transport.queue) == 0, "a sender gets no copy of its own"


async def test_a_joiner_who_asks_is_shown_what_was_said_before_and_told_that_it_is_history(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob")
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        for number in range(5):
            await ada.send("general", f"old {number}")
        joined = await bob.join("general", backfill=100)
        assert (joined.state, joined.backfilled, joined.durable) == ("opened", 5, False)
        assert "durable delivery is not running" in joined.reason
        await ada.send("general", "new")
        received = [await bob.next_message(10) for _ in range(6)]
    assert [(m.text, m.historical) for m in received] == [*((f"old {n}", True) for n in range(5)), ("new", False)]


@pytest.mark.requirement("X3")
async def test_nothing_is_missed_and_nothing_is_twice_when_one_joins_while_another_publishes(
    space: RealSpace, tmp_path: Path
) -> None:
    """The join race: another process publishes as fast as it can, and the sequences of the log are the judge."""
    await space.add("ada")
    await space.add("bob")
    history, lines = History(), tmp_path / "what ada sent"
    place = (str(space.home.home), space.home.name)
    async with (
        connect(space, "bob", inbox=1_000_000) as bob,
        child(PUBLISHER, *place, "ada", "general", "3000", lines) as ada,
    ):
        await ada.line()
        began = time.monotonic_ns()
        joined = await bob.join("general", backfill=1_000_000)
        over = time.monotonic_ns()
        assert await ada.ended() == 0
        sent = history.merge(lines).of("acknowledged")
        await eventually(lambda: len(bob.transport.queue) >= len(sent), within=20, what="every message arrives")
        received = [await bob.next_message(5) for _ in range(len(bob.transport.queue))]
    for message in received:
        history.took("bob", message)
    history.owed("bob", "general")
    history.check()
    seqs = [message.seq for message in received]
    assert seqs == sorted(event.seq for event in sent), "no gap, no duplicate, in the order of the log"
    assert set(range(seqs[0], seqs[-1] + 1)) - set(seqs) == {joined.seq}, "the join is all that lies between"
    assert [m.historical for m in received] == [seq < joined.seq for seq in seqs], "backfill below it, live above"
    assert sum(began < event.at < over for event in sent) > 0, "ada went on while bob joined"


async def test_leaving_is_a_hard_boundary(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob")
    async with connect(space, "ada") as ada, connect(space, "bob", channels=["general"]) as bob:
        await ada.send("general", "before")
        assert (await bob.leave("general")).state == "left"
        await ada.send("general", "after")
        await bob.join("general", backfill=0)
        await ada.send("general", "again")
        assert await texts(bob, 2) == ["before", "again"]


async def test_overlapping_patterns_surface_a_message_once(space: RealSpace) -> None:
    await space.add("ada", post=["team.>"], read=[">"])
    await space.add("bob", read=["team.>"])
    async with connect(space, "ada") as ada, connect(space, "bob", channels=["team.>", "team.backend"]) as bob:
        await ada.send("team.backend", "one")
        await ada.send("team.frontend", "two")
        assert await texts(bob, 2) == ["one", "two"]
        assert len(bob.transport.queue) == 0


async def test_a_channel_it_may_not_read_is_refused_and_not_joined(space: RealSpace) -> None:
    await space.add("ada")
    async with connect(space, "ada") as ada:
        with pytest.raises(DeniedError):
            await ada.join("secret")
        assert ada.transport.joined == []
        with pytest.raises(DeniedError, match="refuses this agent"):
            await ada.send("secret", "hello")
        assert ada.transport.state == "ready"


async def test_oversize_is_found_before_sending_and_the_connection_stays(space: RealSpace) -> None:
    await space.add("ada")
    async with connect(space, "ada") as ada:
        with pytest.raises(TooLarge):
            await ada.send("general", "x" * (256 * 1024))
        assert (await ada.send("general", "y" * 200_000)).seq > 0
        assert ada.transport.connection.rebuilds == 0


async def test_a_lost_connection_is_rebuilt_and_what_was_missed_is_read(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob")
    async with connect(space, "ada") as ada, connect(space, "bob", channels=["general"]) as bob:
        await ada.send("general", "one")
        assert await texts(bob, 1) == ["one"]
        cut(bob)
        for text in ("two", "three"):
            await ada.send("general", text)
        assert await texts(bob, 2) == ["two", "three"]
        assert bob.transport.connection.rebuilds == 1


@pytest.mark.requirement("X8")
async def test_a_broker_killed_with_9_loses_nothing_confirmed_and_clients_resume(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob")
    history = History()
    async with connect(space, "ada") as ada, connect(space, "bob", channels=["general"]) as bob:
        for _ in range(20):
            await recorded_send(history, ada, "general")
        await space.restart_broker(kill=True)
        await eventually(lambda: ada.transport.state == "ready" and bob.transport.state == "ready", within=20)
        await recorded_send(history, ada, "general", "after")
        for _ in range(21):
            history.took("bob", await bob.next_message(10))
        assert len(bob.transport.queue) == 0
    history.owed("bob", "general")
    history.check()


async def test_an_inbox_with_no_room_loses_nothing(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob")
    async with connect(space, "ada") as ada, connect(space, "bob", channels=["general"], inbox=4) as bob:
        for number in range(30):
            await ada.send("general", str(number))
        assert await texts(bob, 30) == [str(n) for n in range(30)]


@pytest.mark.requirement("S4")
async def test_with_a_state_file_a_message_is_surfaced_once_across_restarts(space: RealSpace, tmp_path: Path) -> None:
    """F28: what was settled does not come again, what was not does."""
    await space.add("ada")
    await space.add("bob")
    state = tmp_path / "bob.state"
    async with connect(space, "ada") as ada:
        async with connect(space, "bob", channels=["general"], state=state) as bob:
            for text in ("one", "two", "three"):
                await ada.send("general", text)
            assert await texts(bob, 2) == ["one", "two"]
        await ada.send("general", "four")
        async with connect(space, "bob", channels=["general"], state=state) as bob:
            assert await texts(bob, 2) == ["three", "four"]
            assert len(bob.transport.queue) == 0


async def test_history_is_newest_first_and_bounded(space: RealSpace) -> None:
    await space.add("ada")
    async with connect(space, "ada") as ada:
        receipts = await asyncio.gather(*(ada.send("general", str(n)) for n in range(250)))
        newest = sorted((receipt.seq for receipt in receipts), reverse=True)
        assert [m.seq for m in await ada.history("general", 10)] == newest[:10]
        assert [m.seq for m in await ada.history("general", 240)] == newest[:240]
        assert [m.seq for m in await ada.history("general", 10, before=newest[100])] == newest[101:111]
        assert [m.seq for m in await ada.transport.recall("general", newest[5])] == list(reversed(newest[:5]))
        with pytest.raises(DeniedError):
            await ada.history("secret")


async def test_a_burnt_id_does_not_suppress_a_message(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("mal")
    async with connect(space, "ada") as ada, space.agent("mal") as mal:
        burnt = tidings.Receipt("", 0).id or "01890a5d-ac96-774b-bcce-b302099a8057"
        assert "seq" in await mal.post("general", b"junk", Nats_Msg_Id=burnt)
        receipt = await ada.send("general", "hello", id=burnt)
        assert receipt.id == burnt
        newest = (await ada.history("general", 1))[0]
        assert (newest.seq, newest.text) == (receipt.seq, "hello")
        again = await ada.send("general", "hello again")
        assert again.seq == receipt.seq + 1


@pytest.mark.requirement("C13")
async def test_a_steward_that_is_away_leaves_the_live_path_and_the_join_is_completed_later(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob")
    await space.stop_steward()
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        joined = await bob.join("general")
        assert (joined.durable, joined.seq) == (False, 0)
        assert "steward is away" in joined.reason
        await ada.send("general", "live")
        assert await texts(bob, 1) == ["live"]
        await space.start_steward()
        await eventually(lambda: bob.transport._channels.memberships["general"].joined is not None, within=15)
        assert space.steward is not None
        assert bob.id in space.steward.table.members_at("general", space.steward.table.head + 1)


async def test_a_closed_gate_is_said_as_a_full_log(space: RealSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "OPEN_BELOW", -1.0)  # or the steward would open it again, as there is room
    await space.add("ada")
    async with connect(space, "ada") as ada, space.core() as core:
        await set_gate(core, space.subjects, gate_open=False)
        with pytest.raises(LogFull, match="full"):
            await ada.send("general", "hello")


async def test_a_gate_that_opens_while_the_sender_asks_why_costs_only_time(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "OPEN_BELOW", -1.0)
    await space.add("ada")
    async with connect(space, "ada") as ada, space.core() as core:
        await set_gate(core, space.subjects, gate_open=False)
        call, asked = ada.transport.connection.call, []

        async def opened_meanwhile(request: Request[Any], **options: Any) -> Any:
            asked.append(request.operation.service)
            await set_gate(core, space.subjects, gate_open=True)
            return await call(request, **options)

        ada.transport.connection.call = opened_meanwhile  # type: ignore[method-assign]
        receipt = await ada.send("general", "hello")
        assert asked[0] == "health"
        ada.transport.connection.call = call  # type: ignore[method-assign]
        assert [m.seq for m in await ada.history("general", 2)] == [receipt.seq]


async def test_wider_access_is_used_without_a_restart(space: RealSpace) -> None:
    await space.add("ada", read=["general"], post=["general"])
    async with connect(space, "ada", channels=["general"]) as ada:
        with pytest.raises(DeniedError):
            await ada.send("ops", "too early")
        async with space.administer() as admin:
            wide = AgentFile("ada", read=("general", "ops"), post=("general", "ops"))
            await admin.set_access("ada", wide)
        assert (await ada.send("ops", "now")).seq > 0
        assert (await ada.join("ops")).state == "opened"
        assert ada.transport.joined == ["general", "ops"]


async def test_an_agent_elsewhere_fetches_its_wider_access_from_its_record(space: RealSpace, tmp_path: Path) -> None:
    """A bundle holds its own copy of the credential; the new token is in the access record."""
    await space.add("ada", read=["general"], post=["general"])
    bundle = tmp_path / "ada.json"
    content = {
        "space": "main",
        "space_id": space.info.id,
        "steward_key": space.info.steward_key,
        "url": space.info.url,
        "agent": {"name": "ada", "id": Ledger(space.home.issued).rows()[0].id},
        "creds": space.home.agent_creds("ada").read_text(),
    }
    bundle.write_text(json.dumps(content))
    bundle.chmod(0o600)
    async with tidings.connect(bundle=bundle) as ada:
        async with space.administer() as admin:
            await admin.set_access("ada", AgentFile("ada", read=("general", "ops"), post=("general",)))
        assert (await ada.join("ops")).state == "opened"
        assert "ops" in json.dumps(jwt.decode(ada.transport.identity.token()))


async def test_who_joins_while_its_connection_is_rebuilt_waits_for_it(pair: RealSpace) -> None:
    async with fault_proxy(pair.info.port) as proxy, connect(pair, "bob", url=proxy.url) as bob:
        proxy.refuse = True
        proxy.cut()
        await eventually(lambda: bob.transport.state == "reconnecting")
        joining = asyncio.create_task(bob.join("general"))
        await asyncio.sleep(0)
        proxy.refuse = False
        bob.transport.connection.reconnect()
        assert (await joining).state == "opened"


async def test_history_of_large_messages_comes_in_pages_and_is_complete(space: RealSpace) -> None:
    await space.add("ada")
    async with connect(space, "ada") as ada:
        sent = [(await ada.send("general", f"{n} " + "x" * 40_000)).seq for n in range(40)]
        for number in range(30):
            await ada.send("general", str(number))
        found = [message.seq for message in await ada.history("general", 70)]
        assert found[30:] == list(reversed(sent))
        assert len(found) == 70
        assert [m.seq for m in await ada.transport.recall("general", sent[0] - 1, 70)] == list(reversed(found))
        page = await ada.call(HistoryRequest("general", limit=200))
        assert page.more is True
        assert sum(len(line.payload) for line in page.records) < 400_000


def counted_joins(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[str]]:
    """How many joins were under way each time one began, and of what, in the order of their beginnings."""
    call, under_way, began = AgentConnection.call, [0], []
    crowds: list[int] = []

    async def counting(self: AgentConnection, request: Request[Any], **options: Any) -> Any:
        if not isinstance(request, JoinRequest):
            return await call(self, request, **options)
        under_way[0] += 1
        crowds.append(under_way[0])
        began.append(request.pattern)
        try:
            return await call(self, request, **options)
        finally:
            under_way[0] -= 1

    monkeypatch.setattr(AgentConnection, "call", counting)
    return crowds, began


async def test_an_endpoint_joins_its_channels_side_by_side_and_not_all_at_once(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"team.c{number}" for number in range(2 * JOINS_AT_ONCE)]
    await space.add("bob", read=["team.>"])
    crowds, began = counted_joins(monkeypatch)
    async with fault_proxy(space.info.port) as proxy:
        proxy.delay = 0.02  # an answer never comes in the turn of its question
        async with connect(space, "bob", url=proxy.url, channels=[*names, names[0]]) as bob:
            assert bob.transport.joined == sorted(names)
    assert max(crowds) == JOINS_AT_ONCE
    assert sorted(began) == sorted(names)


async def test_answers_of_joins_side_by_side_are_in_order_and_a_refused_one_fails_the_opening(space: RealSpace) -> None:
    names = [f"team.c{number}" for number in range(12)]
    await space.add("bob", read=["team.>"])
    async with connect(space, "bob") as bob:
        answers = await asyncio.gather(*map(bob.join, names))
        assert [(each.channel, each.state) for each in answers] == [(name, "opened") for name in names]
    with pytest.raises(DeniedError, match="may not read secret"):
        await connect(space, "bob", channels=[*names, "secret"]).open()


async def test_the_return_of_a_callback_settles_and_what_it_raises_does_not(space: RealSpace) -> None:
    """Channel and direct messages alike: settled ones are over, the other is given back and comes again."""
    await space.add("ada")
    await space.add("bob")
    handled: list[str] = []
    errors: list[BaseException] = []
    plain = asyncio.Event()

    async def think(message: tidings.Incoming) -> None:
        await asyncio.sleep(0)
        handled.append(message.text)
        if message.text == "poison":
            raise ValueError("cannot read this")

    def look(message: tidings.Incoming) -> None:
        handled.append(message.text)
        plain.set()

    patient = tidings.Retry(first=60)
    async with connect(space, "ada") as ada, connect(space, "bob", channels=["general"], retry=patient) as bob:
        bob.on("error", errors.append)
        handling = asyncio.create_task(bob.handle(think))
        for text in ("good", "poison", "better"):
            await ada.dm(bob.id, text)
            await eventually(partial(handled.__contains__, text))
        sent = await ada.send("general", "to all")
        await eventually(lambda: "to all" in handled)
        await eventually(lambda: bob.transport.read_state.channel("general").settled_through >= sent.seq)
        assert [str(error) for error in errors] == ["cannot read this"]
        (unsettled,) = await eventually(
            lambda: [held for held in bob.transport._direct.pending.values() if not held.settled]
        )
        assert unsettled.delivery.seq == 2
        await bob.close()
        await asyncio.wait_for(handling, 5)
    assert handled == ["good", "poison", "better", "to all"]
    async with connect(space, "bob") as bob:
        handling = asyncio.create_task(bob.handle(look))
        await asyncio.wait_for(plain.wait(), 10)
        handling.cancel()
    assert handled[4:] == ["poison"]


async def test_a_join_whose_backfill_was_not_answered_says_so_and_completes_it_later(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "RETRY_PAUSE", 0.05)
    await space.add("ada")
    await space.add("bob")
    away = asyncio.Event()
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        for number in range(3):
            await ada.send("general", f"old {number}")
        call = bob.transport.connection.call

        async def unanswered(request: Request[Any], **options: Any) -> Any:
            if isinstance(request, HistoryRequest) and not away.is_set():
                raise StewardUnreachable("no answer to history page")
            return await call(request, **options)

        monkeypatch.setattr(bob.transport.connection, "call", unanswered)
        joined = await bob.join("general", backfill=100)
        assert (joined.state, joined.backfilled) == ("opened", 0)
        assert "what was said before could not be read yet and comes later" in joined.reason
        await ada.send("general", "new")
        first = await bob.next_message(10)
        assert (first.text, first.historical) == ("new", False), "live does not wait for it"
        away.set()
        rest = [await bob.next_message(10) for _ in range(3)]
        assert [(m.text, m.historical, m.late) for m in rest] == [(f"old {n}", True, True) for n in range(3)]
        await ada.send("general", "newer")
        assert await texts(bob, 1) == ["newer"]
        assert len(bob.transport.queue) == 0


async def test_a_resumed_join_whose_page_was_not_answered_misses_nothing(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "RETRY_PAUSE", 0.05)
    await space.add("ada")
    await space.add("bob")
    async with connect(space, "bob", channels=["general"]):
        pass
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        await ada.send("general", "missed")
        call, failures = bob.transport.connection.call, iter([True])

        async def unanswered_once(request: Request[Any], **options: Any) -> Any:
            if isinstance(request, HistoryRequest) and next(failures, False):
                raise StewardUnreachable("no answer to history page")
            return await call(request, **options)

        monkeypatch.setattr(bob.transport.connection, "call", unanswered_once)
        joined = await bob.join("general")
        assert "what was missed could not be read yet and comes later" in joined.reason
        assert await texts(bob, 1) == ["missed"]


async def test_a_join_whose_connection_goes_meanwhile_is_done_on_the_next(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it goes when access was widened: the endpoint connects again with its new credential."""
    await space.add("ada")
    await space.add("bob")
    async with connect(space, "bob") as bob, connect(space, "ada") as ada:
        subscribe, tried = bob.transport._channels.live.subscribe, list[object]()

        async def cut_at_first(connection: Any, membership: Any) -> None:
            tried.append(connection)
            if len(tried) == 1:
                connection.abort()
            await subscribe(connection, membership)

        monkeypatch.setattr(bob.transport._channels.live, "subscribe", cut_at_first)
        assert (await bob.join("general")).state == "opened"
        assert len(set(tried)) >= 2
        await ada.send("general", "hello")
        assert await texts(bob, 1) == ["hello"]


async def test_a_hundred_joins_and_leaves_leave_no_handler_on_the_connection(space: RealSpace) -> None:
    await space.add("bob")
    async with connect(space, "bob") as bob:
        await bob.join("general")
        await bob.leave("general")
        connection = bob.transport.connection.current

        def live() -> list[str]:
            return [each.subject for each in connection.subscriptions if ".live." in each.subject]

        before = live()
        for _ in range(100):
            await bob.join("general", backfill=0)
            await bob.leave("general")
        assert live() == before
        assert connection.on_complaint == []


async def test_channels_under_a_pattern_are_remembered_in_bounds_and_none_surfaces_again(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_state, "CHANNELS_KEPT", 4)
    monkeypatch.setattr(read_state, "IDENTITIES_KEPT", 1)
    await space.add("ada", post=["team.>"], read=["team.>"])
    await space.add("bob", read=["team.>"])
    async with connect(space, "ada") as ada, connect(space, "bob", channels=["team.kept", "team.>"]) as bob:
        for number in range(12):
            await ada.send(f"team.c{number}", f"old {number}")
            assert await texts(bob, 1) == [f"old {number}"]
        assert len(bob.transport.read_state.channels) <= 5
        assert "team.c0" not in bob.transport.read_state.channels
        assert "team.kept" in bob.transport.read_state.channels, "one that is joined by name is not forgotten"
        ask = bob.transport._channels._ask_join

        async def after_news(membership: Any, *arguments: Any) -> Any:
            """The log is read once a copy of a forgotten channel came: it is then among those that are read."""
            if membership.pattern == "team.>":
                await eventually(lambda: bool(membership.held))
            return await ask(membership, *arguments)

        monkeypatch.setattr(bob.transport._channels, "_ask_join", after_news)
        rebuilds = bob.transport.connection.rebuilds
        cut(bob)
        await eventually(lambda: bob.transport.connection.rebuilds > rebuilds and bob.transport.state == "ready")
        await ada.send("team.c0", "new")
        assert await texts(bob, 1) == ["new"]
        await eventually(lambda: bob.transport._channels.memberships["team.>"].is_whole)
        assert len(bob.transport.queue) == 0


async def test_mistakes_of_a_program_are_refused_with_a_sentence_before_anything_is_sent(pair: RealSpace) -> None:
    with pytest.raises(UsageError, match="channels is a list, not one str: write \\['general'\\]"):
        connect(pair, "ada", channels="general")
    async with connect(pair, "ada") as ada:
        mistakes: list[tuple[str, dict[str, Any]]] = [
            ("a str, not bytes: decode it", {"text": b"hello"}),
            ("a str, not int", {"text": 42}),
            ("nothing to say", {"text": ""}),
            ("nothing to say", {}),
            ("mentions is a list, not one str", {"text": "hello", "mentions": "bob"}),
            ("parts is a list, not one bytes", {"text": "hello", "parts": b"more"}),
        ]
        for words, fields in mistakes:
            with pytest.raises(UsageError, match=words):
                await ada.send("general", **fields)
        for ways in (ada.dm, ada.ask):
            with pytest.raises(UsageError, match="a str, not bytes"):
                await ways("bob", b"hello")  # type: ignore[arg-type]
        assert await ada.history("general") == []
        assert (await ada.send("#general", "", data={"a": 1})).seq


async def test_whatever_is_asked_of_an_endpoint_that_is_closed_fails_at_once(pair: RealSpace) -> None:
    async with connect(pair, "ada", channels=["general"]) as ada:
        pass
    async with asyncio.timeout(5):  # each would wait longer for a connection
        acts: list[Callable[[], Awaitable[Any]]] = [
            lambda: ada.send("general", "hello", timeout=60),
            lambda: ada.dm(ada.id, "hello", timeout=60),
            lambda: ada.history("general"),
            lambda: ada.join("other"),
        ]
        for act in acts:
            with pytest.raises(ConnectionLost, match="closed"):
                await act()
