"""One direction of a link, step by step: what it takes, what stops it, what it says of itself."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tidings.contract.link_worker import (
    ConnectivityChanged,
    DegradedPollEntered,
    GapDetected,
    LinkEvent,
    LocalLogSetBack,
    PullAdvanced,
    RepairCompleted,
    RepairFailed,
    RepairStarted,
    StatusChanged,
)
from tidings.errors import ConflictError, LinkConflict, OutcomeUnknown, TidingsError
from tidings.links import link_store, local_index, obligations, replicator
from tidings.links.link_store import BookedLink
from tidings.links.ports import AdmittedAt, IndexPage
from tidings.links.replicator import Direction
from tidings.links.running_link import LoopClock
from tidings.links.schema import SCHEMA
from tidings.util.database import Database
from tidings.wire import message as wire_message
from tidings.wire.links import GapKind, LinkPage, Token
from tidings.wire.message import Sender
from tidings.wire.signing import sign
from tools import links
from tools.link_ports import START, Grant, LogRecord, SimulatedClock, SimulatedLog, drafted, sleep
from tools.links import Carrier, World

HERE, PEER = "AALPHA", "ABETA"


class Pair:
    """Two spaces, and the direction from PEER to HERE. Nothing fails by itself."""

    def __init__(self, seed: int = 0, **definition: object) -> None:
        self.world = World(seed, spaces=2)
        for each in self.world.carriers:
            each.kill()
        self.carrier: Carrier = next(each for each in self.world.carriers if each.definition.space == HERE)
        self.carrier.skew = 0.0
        if definition:
            wanted = msgspec.structs.replace(self.carrier.definition, authority="a2", **definition)
            self.carrier.definition = wanted
            self.carrier.row = self.carrier.books.job(lambda c: link_store.open_link(c, wanted, b"", 0)).row
        self.heard: list[LinkEvent] = []
        self.start()

    def start(self) -> None:
        self.carrier.kill()
        self.carrier.start()
        assert self.carrier.direction is not None
        self.direction = self.carrier.direction
        self.direction.listen(self.heard.append)

    @property
    def here(self) -> SimulatedLog:
        return self.world.logs[HERE]

    @property
    def peer(self) -> SimulatedLog:
        return self.world.logs[PEER]

    @property
    def connection(self) -> sqlite3.Connection:
        return self.carrier.books.connection

    @property
    def token(self) -> int:
        handled = self.carrier.link.handled
        return handled.seq if handled is not None else -1

    def say(self, count: int = 1, channel: str = "general", agent: int = 0) -> list[LogRecord]:
        world = self.world
        made = [world._record(PEER, world.agents[PEER][agent], channel, None) for _ in range(count)]
        return [self.peer.append(each, world.scheduler.now) for each in made]

    def run(self, seconds: float = 60.0) -> None:
        self.world.scheduler.run(seconds)

    def texts(self) -> list[str]:
        return [record.id for record in self.here.there() if record.link]

    def kinds(self) -> dict[int, str]:
        query = "SELECT seq, kind, reason FROM disposition WHERE link = ? AND life = 0 ORDER BY seq"
        found = self.connection.execute(query, (self.carrier.row,))
        return {seq: kind + (f":{reason}" if reason else "") for seq, kind, reason in found}

    def events(self, kind: type[LinkEvent]) -> list[LinkEvent]:
        return [event for event in self.heard if type(event) is kind]


Paired = Callable[..., Pair]


@pytest.fixture
def paired() -> Iterator[Paired]:
    made: list[Pair] = []

    def pair(seed: int = 0, **definition: object) -> Pair:
        made.append(Pair(seed, **definition))
        return made[-1]

    yield pair
    for each in made:
        each.world.close()


def ids(records: list[LogRecord]) -> list[str]:
    return [each.id for each in records]


def test_what_is_said_in_shared_channels_comes_under_the_names_of_here_with_its_bytes(paired: Paired) -> None:
    pair = paired()
    (said,) = pair.say(channel="team.x")
    pair.say(channel="private")
    pair.run()
    (record,) = [each for each in pair.here.records if each.link]
    assert (record.ours, record.origin, record.hops) == ("abeta.team.x", PEER, 1)
    assert (record.payload, record.signature, record.sender) == (said.payload, said.signature, said.sender)
    assert pair.token == pair.peer.head == 2
    assert pair.kinds() == {1: "admitted"}


def test_many_pages_come_in_order_and_each_is_told_after_it_is_on_disk(paired: Paired) -> None:
    pair = paired()
    seen: list[int] = []
    pair.direction.listen(lambda event: seen.append(pair.token) if isinstance(event, PullAdvanced) else None)
    said = pair.say(30)
    pair.run()
    assert pair.texts() == ids(said)
    assert seen == [event.handled.seq for event in pair.heard if isinstance(event, PullAdvanced)]
    assert sum(event.admitted for event in pair.heard if isinstance(event, PullAdvanced)) == 30


def test_status_and_connectivity_come_from_what_happened(paired: Paired) -> None:
    pair = paired()
    status = pair.direction.status()
    assert (status.status, status.connectivity, status.last_activity) == ("initializing", "unknown", None)
    pair.say(3)
    pair.run()
    status = pair.direction.status()
    assert (status.status, status.connectivity, status.lag_records, status.lag_seconds) == ("live", "online", 0, 0.0)
    assert status.last_activity is not None
    pair.world.network.cut.add((HERE, PEER))
    pair.say(4)
    pair.run(200)
    assert (pair.direction.status().status, pair.direction.status().connectivity) == ("degraded_poll", "offline")
    assert len(pair.events(DegradedPollEntered)) == 1
    pair.world.network.cut.clear()
    pair.run(40)
    assert (pair.direction.status().status, pair.direction.status().connectivity) == ("live", "online")
    changes = [(event.before, event.now) for event in pair.heard if isinstance(event, ConnectivityChanged)]
    assert changes == [("unknown", "online"), ("online", "offline"), ("offline", "online")]
    pair.start()
    assert pair.direction.status().connectivity == "unknown", "whatever was known before the start"


def test_connectivity_is_of_the_peer_alone_and_one_that_is_silent_is_offline(paired: Paired) -> None:
    pair = paired()
    pair.say()
    pair.run()
    pair.world.network.cut.add((HERE, HERE))
    pair.run(200)
    status = pair.direction.status()
    assert (status.status, status.connectivity) == ("degraded_poll", "online"), "our own broker is away"
    pair.world.network.cut.clear()
    pair.run(40)
    assert pair.direction.status().status == "live"

    async def silent(_token: Token, _limit: int) -> LinkPage:
        raise OutcomeUnknown("nobody answered in time")

    pair.direction._source.page = silent  # type: ignore[method-assign,assignment]
    pair.run(200)
    assert (pair.direction.status().status, pair.direction.status().connectivity) == ("degraded_poll", "offline")


def test_lag_is_by_the_peers_clock_and_one_record_that_is_ahead_of_it_hides_nothing(paired: Paired) -> None:
    pair = paired()
    clock = pair.direction._clock
    assert isinstance(clock, SimulatedClock)
    clock.skew = -3_000.0
    pair.say()
    early = pair.peer.records[-1]
    pair.peer.records[-1] = early._replace(time_ns=early.time_ns + 10**15)
    pair.say()
    pair.run()
    pair.here.full = True
    pair.say()
    pair.run(200)
    status = pair.direction.status()
    assert status.lag_records == 1
    assert 200 <= status.lag_seconds <= 300, "since the last handled record was said, by the clock of its log"


def test_the_way_to_the_peer_is_tried_soon_at_first_and_then_polled_for_ever(paired: Paired) -> None:
    pair = paired()
    pair.world.network.cut.add((HERE, PEER))
    delays: list[float] = []
    turn = pair.direction.turn

    async def noted() -> float:
        delays.append(await turn())
        return delays[-1]

    pair.direction.turn = noted  # type: ignore[method-assign]
    pair.run(2_000)
    for delay, step in zip(delays, replicator.LADDER, strict=False):
        assert step * 0.8 <= delay <= step * 1.2
    assert len(delays) > 30
    assert all(15 <= delay <= 30 for delay in delays[3:])
    assert len(set(delays[3:])) > 20, "they are not in step with each other"


def test_a_wake_makes_it_look_at_once_and_moves_nothing(paired: Paired) -> None:
    pair = paired()
    pair.run()
    (said,) = pair.say()
    pair.run(0.3)
    assert pair.texts() == []
    pair.direction.wake()
    assert pair.token == 0
    pair.run(0.6)
    assert pair.texts() == [said.id]


def test_a_wake_does_not_hurry_what_fails(paired: Paired) -> None:
    pair = paired()
    pair.here.full = True
    pair.say()
    pair.run(1.0)
    asked = pair.direction._failures
    assert asked
    for _ in range(20):
        pair.direction.wake()
        pair.run(0.1)
    assert pair.direction._failures == asked
    pair.here.full = False
    pair.direction.ask()
    pair.run(1.0)
    assert len(pair.texts()) == 1, "an operator may"


def test_a_connection_that_came_back_is_used_at_once_and_one_that_comes_and_goes_does_not_hurry_us(
    paired: Paired,
) -> None:
    pair = paired()
    pair.run()
    pair.world.network.cut.add((HERE, PEER))
    said = pair.say()
    pair.run(200)
    failed = pair.direction._failures
    assert failed > len(replicator.LADDER)
    for _ in range(200):
        pair.direction.back()
        pair.run(0.1)
    assert pair.direction._failures - failed <= 20 / replicator.BACK_SPACING + 1
    pair.world.network.cut.clear()
    pair.run(7)  # whatever was asked before it was back
    pair.direction.back()
    pair.run(2)
    assert pair.texts() == ids(said)
    assert pair.direction.status().status == "live"


def test_a_full_log_is_not_hurried_by_a_connection_that_came_back(paired: Paired) -> None:
    pair = paired()
    pair.here.full = True
    pair.say()
    pair.run(1.0)
    asked = pair.direction._failures
    for _ in range(20):
        pair.direction.back()
        pair.run(0.1)
    assert pair.direction._failures == asked


def test_a_clock_that_jumps_delays_nothing(paired: Paired) -> None:
    pair = paired()
    clock = pair.direction._clock
    assert isinstance(clock, SimulatedClock)
    pair.say()
    pair.run()
    for skew in (90_000.0, -90_000.0):
        clock.skew = skew
        pair.here.put_back([], 1, noticed=True)
        pair.say()
        pair.run()
        assert len(pair.texts()) == pair.peer.head
        assert set(pair.kinds().values()) <= {"admitted", "admitted:late"}
    pair.direction.ask(repair=True)
    pair.run(1)
    assert [type(event) for event in pair.heard[-2:]] == [RepairStarted, RepairCompleted]


def test_it_can_poll_instead(paired: Paired) -> None:
    pair = paired()
    pair.direction.every = 200.0
    pair.run(30.5)  # the wait it had begun
    pair.say()
    pair.run(100.0)
    assert pair.texts() == []
    pair.run(200.0)
    assert len(pair.texts()) == 1


def test_a_full_log_stops_the_page_and_nothing_is_skipped(paired: Paired) -> None:
    pair = paired()
    pair.here.full = True
    said = pair.say(3)
    pair.run(200)
    assert (pair.token, pair.kinds()) == (0, {})
    link = pair.carrier.link
    assert link.received is not None
    assert (link.received.seq, link.received_pages) == (3, 1), "it came, and is not handled"
    assert "full" in pair.direction.status().words
    pair.here.full = False
    pair.run(400)
    assert pair.texts() == ids(said)
    assert pair.carrier.link.received_pages == 0


def test_another_space_in_the_place_of_the_peer_holds_the_link_back_until_it_is_gone(paired: Paired) -> None:
    pair = paired()
    pair.say()
    pair.run()
    pair.peer.space = "AELSE"
    pair.say()
    pair.run(600)
    status = pair.direction.status()
    assert (status.status, pair.token) == ("paused", 1)
    assert "another space" in status.words or "AELSE" in status.words
    pair.peer.space = PEER
    pair.run(400)
    assert (pair.direction.status().status, pair.token) == ("live", 2)


def test_past_its_end_nothing_is_taken(paired: Paired) -> None:
    pair = paired(until=START + 100)
    pair.say()
    pair.run(50)
    assert pair.token == 1
    pair.run(60)
    pair.say()
    pair.run(400)
    assert pair.token == 1
    assert pair.direction.status().status == "paused"
    assert "until" in pair.direction.status().words


def test_an_operator_pauses_and_resumes_it(paired: Paired) -> None:
    pair = paired()
    pair.run()
    pair.carrier.books.job(lambda c: link_store.pause(c, pair.carrier.row, "moving house", 0))
    pair.say()
    pair.run(300)
    assert (pair.token, pair.direction.status().status) == (0, "paused")
    assert pair.direction.status().words == "moving house"
    pair.carrier.books.job(lambda c: link_store.resume(c, pair.carrier.row))
    pair.direction.ask()
    pair.run(2)
    assert (pair.token, pair.direction.status().status) == (1, "live")


LIES = (
    links._stands_still,
    links._goes_back,
    links._names_another_log,
    links._turns_around,
    links._reaches_beyond,
    links._comes_twice,
    links._is_too_large,
)


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_page_that_no_log_answers_with_is_refused_and_the_link_goes_on_later(
    lie: Callable[[LinkPage, Token], LinkPage], paired: Paired
) -> None:
    pair = paired()
    pair.say(3)
    pair.run()
    assert pair.token == 3
    pair.world.lie = lambda _: lie  # type: ignore[method-assign,assignment]
    pair.start()
    said = pair.say(4)
    pair.run(100)
    assert pair.token == 3
    assert not set(ids(said)) & set(pair.texts())
    assert pair.direction.status().words
    pair.world.lie = lambda _: None  # type: ignore[method-assign,assignment]
    pair.run(300)
    assert pair.texts()[3:] == ids(said)


def test_a_record_the_log_stumbles_over_is_put_aside_with_its_bytes_and_comes_later(paired: Paired) -> None:
    pair = paired()
    first, bad, last = pair.say(3)
    troubles = pair.world.troubles[HERE]
    troubles.poison[bad.identity] = ConflictError
    pair.run(100)
    assert pair.kinds() == {1: "admitted", 2: "quarantined:conflict", 3: "admitted"}
    (kept,) = obligations.in_quarantine(pair.connection, pair.carrier.row)
    assert kept.record.payload == bad.payload
    assert pair.direction.status().quarantined == 1
    troubles.poison.clear()
    pair.run(3_000)
    assert pair.kinds() == {1: "admitted", 2: "admitted:late", 3: "admitted"}
    assert pair.texts() == [first.id, last.id, bad.id]


def test_what_goes_into_a_channel_that_is_not_listed_waits_until_it_is_and_others_go_on(paired: Paired) -> None:
    pair = paired()
    pair.run()
    pair.here.list_all_but("abeta.general")
    first, second = pair.say(), pair.say(channel="team.x")
    pair.run()
    assert pair.kinds() == {1: "quarantined:not_listed", 2: "admitted"}
    (words,) = obligations.unlisted(pair.connection, pair.carrier.row)
    assert "channel abeta.general is not listed here: `tidings channels set abeta.general`" in words
    pair.run(30_000)
    assert pair.kinds() == {1: "quarantined:not_listed", 2: "admitted"}
    pair.here.list_all_but()
    pair.run(31)
    assert pair.kinds() == {1: "admitted:late", 2: "admitted"}
    assert pair.texts() == ids([*second, *first])


def test_a_channel_that_is_removed_while_a_page_is_let_in_makes_it_look_again(paired: Paired) -> None:
    pair = paired()
    pair.here.list_all_but("elsewhere")
    pair.run()
    store = pair.here.store

    def then_removed(draft: LogRecord, message_id: str, now: float) -> object:
        pair.here.store = store  # type: ignore[method-assign]
        pair.here.list_all_but("abeta.general")
        return AdmittedAt(pair.here.append(draft._replace(link=""), now).seq)  # what does not count is in no index

    pair.here.store = then_removed  # type: ignore[method-assign,assignment]
    pair.say()
    pair.run()
    assert pair.kinds() == {1: "quarantined:not_listed"}
    pair.here.list_all_but()
    pair.run(31)
    assert (pair.kinds(), len(pair.texts())) == ({1: "admitted:late"}, 1)


def test_what_comes_over_a_link_in_a_day_is_bounded_waits_beyond_that_and_is_not_dropped(paired: Paired) -> None:
    pair = paired()
    pair.here.share = 10_000
    said = pair.say(60)
    pair.run(1_000)
    came = len(pair.texts())
    assert 10 <= came < 40, "and a page at most beyond it"
    status = pair.direction.status()
    assert (status.share, status.spent >= 9_000, status.status) == (10_000, True, "degraded_poll")
    assert "its part of this space's log" in status.words
    assert pair.token == came, "the page that did not fit is not handled"
    pair.here.append(pair.world._record(HERE, pair.world.agents[HERE][0], "general", None), pair.world.scheduler.now)
    pair.start()
    pair.run(1_000)
    assert len(pair.texts()) == came, "a worker that is started again knows it"
    pair.carrier.books.job(lambda c: link_store.rebuild(c, pair.carrier.row))
    pair.start()
    pair.run(1_000)
    assert came - links.PAGE < pair.token <= came, "what is here already passes"
    assert len(pair.texts()) == came
    pair.run(24 * 3_600)
    assert came < len(pair.texts()) <= 60
    pair.run(4 * 24 * 3_600)
    assert pair.texts() == ids(said)
    pair.run(24 * 3_600)
    assert (pair.direction.status().spent, pair.direction.status().status) == (0, "live")


def test_a_full_quarantine_stops_the_link(paired: Paired, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_store, "MOST_QUARANTINED", 1)
    pair = paired()
    for record in pair.say(2):
        pair.peer.records[record.seq - 1] = record._replace(signature=record.signature[::-1])
    pair.run(100)
    assert (pair.token, pair.kinds()) == (0, {})
    assert "quarantine" in pair.direction.status().words


def test_a_burnt_message_id_is_not_taken_for_the_message(paired: Paired) -> None:
    pair = paired()
    pair.world.troubles[HERE].burn = 1.0
    pair.here.append(pair.say()[0], 0.0)
    pair.run(10)
    assert pair.kinds() == {1: "quarantined:id_burned"}, "every id that was tried"
    pair.world.troubles[HERE].burn = 0.0
    pair.run(2_000)  # the log forgets message ids
    assert pair.kinds() == {1: "admitted:late"}


def test_a_second_message_under_one_id_is_put_aside(paired: Paired) -> None:
    pair = paired()
    (said,) = pair.say()
    other = wire_message.compose(
        Sender(said.sender, "agent"), text="something else", id=said.id, ts=links.timestamp_of(START)
    )
    key = next(each for each in links.KEYS if each.id == said.sender)
    signature = sign(key, PEER, "chat", "general", other.raw)
    pair.peer.append(said._replace(payload=other.raw, signature=signature), 0.0)
    pair.peer.append(said, 0.0)
    pair.run()
    assert pair.kinds() == {1: "admitted", 2: "quarantined:id_reused", 3: "duplicate"}
    assert len(pair.texts()) == 1


def test_what_was_removed_before_it_was_asked_for_is_named_and_the_link_goes_on(paired: Paired) -> None:
    pair = paired()
    pair.say(2)
    pair.run()
    pair.say(10)
    pair.peer.purge(9)
    pair.run()
    assert link_store.omissions(pair.connection, pair.carrier.row) == [(3, 8, "too_old")]
    assert pair.token == 12
    (gap,) = (event for event in pair.heard if isinstance(event, GapDetected))
    assert (gap.kind, gap.before.seq, gap.now.seq) == (GapKind.TOO_OLD, 2, 8)


@pytest.mark.parametrize(("noticed", "more", "kind"), [(True, 9, "epoch"), (False, 0, "too_new"), (False, 9, "record")])
def test_a_log_that_was_set_back_is_read_again_from_where_it_is_the_same(
    noticed: bool, more: int, kind: str, paired: Paired
) -> None:
    pair = paired(seed=3)
    said = pair.say(10)
    pair.run()
    pair.peer.put_back(pair.peer.records[:6], 1, noticed=noticed)
    again = pair.say(more)
    pair.run(900)
    gaps = [event for event in pair.heard if isinstance(event, GapDetected)]
    assert gaps[0].kind.value == kind
    assert gaps[0].reread == (4 if gaps[0].now.seq == 6 else 10)
    assert pair.texts() == [*ids(said), *ids(again)], "nothing twice, and what the peer lost stays"
    assert pair.direction.status().status == "live"
    assert (pair.token, len(pair.kinds())) == (6 + more, 6 + more)


@pytest.mark.parametrize(("more", "kind"), [(0, "too_new"), (9, "record")])
def test_what_was_let_in_and_removed_there_by_age_is_not_named_as_left_out_when_the_rest_is_read_again(
    more: int, kind: str, paired: Paired
) -> None:
    pair = paired()
    said = pair.say(10)
    pair.run()
    pair.peer.put_back(pair.peer.records[:8], 5, noticed=False)
    pair.peer.rewound = None  # nobody there can say up to where it is the same
    again = pair.say(more)
    pair.run(900)
    gaps = [event for event in pair.heard if isinstance(event, GapDetected)]
    assert [event.kind.value for event in gaps] == [kind]
    assert gaps[0].now.seq == 4
    assert link_store.omissions(pair.connection, pair.carrier.row) == []
    assert pair.texts() == [*ids(said), *ids(again)]
    assert pair.token == 8 + more


def test_what_the_log_here_lost_is_fetched_again_or_named(paired: Paired) -> None:
    pair = paired()
    said = pair.say(6)
    pair.run()
    pair.peer.purge(5)
    pair.here.put_back(pair.here.records[:2], 1, noticed=True)
    pair.run(900)
    assert pair.texts() == [*ids(said[:2]), *ids(said[4:])]
    assert pair.kinds() == {
        1: "admitted",
        2: "admitted",
        3: "omitted:vanished",
        4: "omitted:vanished",
        5: "admitted:late",
        6: "admitted:late",
    }
    (lost,) = (event for event in pair.heard if isinstance(event, LocalLogSetBack))
    assert lost.lost == 4


def test_a_page_let_in_while_the_log_here_was_set_back_is_handled_again(paired: Paired) -> None:
    """Another link read the index anew, and looked for what was lost, before this page was written down."""
    pair = paired()
    pair.run()
    commit = link_store.commit_page
    said = pair.say(2)
    store = pair.here.store

    def then_lost(draft: LogRecord, message_id: str, now: float) -> object:
        stored = store(draft, message_id, now)
        if draft.id == said[-1].id:
            pair.here.store = store  # type: ignore[method-assign]
            pair.here.put_back(pair.here.records[:0], 1, noticed=True)
            facts = pair.here.facts()
            pair.carrier.books.job(lambda c: local_index.meet(c, facts))
            pair.carrier.books.job(lambda c: local_index.complete(c, facts, 0))
        return stored

    pair.here.store = then_lost  # type: ignore[method-assign,assignment]
    pair.run(300)
    assert commit is link_store.commit_page
    assert pair.texts() == ids(said)
    assert pair.kinds() == {1: "admitted", 2: "admitted"}


def test_comparing_finds_what_a_peer_hid_and_fetches_it_once(paired: Paired) -> None:
    pair = paired()
    said = pair.say()
    pair.run()
    pair.world.lie = lambda _: lambda page, _t: pair.world._hide(page)  # type: ignore[method-assign,assignment]
    said += pair.say(3)
    pair.run()
    assert (pair.token, pair.kinds()) == (4, {1: "admitted"})
    pair.world.lie = lambda _: None  # type: ignore[method-assign,assignment]
    pair.direction.ask(repair=True)
    pair.run(5)
    assert sorted(pair.texts()) == sorted(ids(said))
    assert [pair.kinds()[seq] for seq in (2, 3, 4)] == ["admitted:late"] * 3
    found = [event for event in pair.heard if isinstance(event, RepairCompleted)]
    assert [(event.lacking, event.fetching) for event in found if event.lacking] == [(3, 3)]
    for _ in range(5):
        pair.direction.ask(repair=True)
        pair.run(5)
    assert pair.texts() == sorted(ids(said))
    last = [event for event in pair.heard if isinstance(event, RepairCompleted)][-1]
    assert (last.lacking, last.extra, last.unchanged, pair.direction.status().differing) == (0, 0, False, 0)


def test_what_stays_different_is_told_as_that_and_neither_fetched_nor_taken_for_equal(paired: Paired) -> None:
    pair = paired()
    pair.say(2)
    # something that is no message here, and counts as one there
    junk = pair.peer.records[0]._replace(payload=b"junk", hash=hashlib.sha256(b"junk").hexdigest())
    pair.peer.records[0] = junk
    pair.run()
    assert pair.kinds() == {1: "quarantined:signature", 2: "admitted"}
    for _ in range(3):
        pair.direction.ask(repair=True)
        pair.run(5)
    found = [event for event in pair.heard if isinstance(event, RepairCompleted)]
    told = {(event.lacking, event.extra, event.fetching) for event in found}
    assert told == {(1, 0, 0)}, "its id is not known here"
    assert [event.unchanged for event in found] == [False] + [True] * (len(found) - 1)
    status = pair.direction.status()
    assert (status.status, status.differing) == ("live", 1)
    pair.peer.purge(2)
    pair.direction.ask(repair=True)
    pair.run(5)
    assert pair.direction.status().differing == 0


def test_what_is_new_does_not_wait_for_all_that_is_owed(paired: Paired, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicator, "WAITING_AT_ONCE", 2)
    pair = paired()
    said = pair.say(20)
    pair.run()
    pair.here.put_back([], 1, noticed=True)
    new = pair.say()
    pair.direction.ask()
    pair.run(900)
    order = pair.texts()
    assert sorted(order) == sorted(ids([*said, *new]))
    assert order.index(new[0].id) <= 2, "a turn has some of the one and a page of the other"


def test_a_comparison_that_fails_is_told_and_stops_nothing(paired: Paired) -> None:
    pair = paired()
    assert pair.carrier.comparison is not None

    async def broken(_through: int) -> dict[int, tuple[str, str, str]]:
        raise TidingsError("no digests today")

    pair.carrier.comparison.source.inventory = broken  # type: ignore[method-assign,assignment]
    pair.say()
    pair.run()
    assert [event.words for event in pair.heard if isinstance(event, RepairFailed)] == ["no digests today"]
    pair.direction.ask(repair=True)
    pair.run(0.5)
    assert [event.words for event in pair.heard if isinstance(event, RepairFailed)] == ["no digests today"] * 2
    repairs = [event for event in pair.heard if isinstance(event, RepairStarted | RepairCompleted | RepairFailed)]
    assert [type(event) for event in repairs[-2:]] == [RepairStarted, RepairFailed]
    pair.say()
    pair.run()
    assert (pair.token, pair.direction.status().status) == (2, "live")


def test_a_comparison_that_takes_long_holds_nothing_up_and_the_next_one_is_as_much_later(paired: Paired) -> None:
    pair = paired()
    assert pair.carrier.comparison is not None
    begun: list[float] = []

    async def slow(_through: int) -> dict[int, tuple[str, str, str]]:
        begun.append(pair.world.scheduler.now)
        await sleep(100.0)
        raise TidingsError("too large")

    pair.carrier.comparison.source.inventory = slow  # type: ignore[method-assign,assignment]
    said = pair.say()
    pair.run(40)
    assert len(begun) == 1
    for _ in range(3):
        said += pair.say()
        pair.direction.wake()
        pair.run(1)
        assert pair.texts() == ids(said), "while it goes on"
    pair.run(5_000)
    assert len(begun) == 1, "50 times as long as it took"
    for _ in range(60):
        if len(begun) < 2:
            pair.run(10)
    assert len(begun) == 2
    pair.start()
    pair.run(300)
    assert len(pair.events(RepairFailed)) == 1, "the second ended with its worker"


def test_nothing_is_compared_before_the_end_of_the_peers_log_is_reached(paired: Paired) -> None:
    pair = paired()
    said = pair.say(100)
    pair.run()
    assert pair.texts() == ids(said)
    kinds = [type(event) for event in pair.heard if isinstance(event, PullAdvanced | RepairStarted)]
    assert kinds == [PullAdvanced] * (len(kinds) - 1) + [RepairStarted]


def test_listeners_can_be_removed_and_one_that_raises_harms_nobody(
    paired: Paired, caplog: pytest.LogCaptureFixture
) -> None:
    pair = paired()
    heard: list[LinkEvent] = []

    def raises(event: LinkEvent) -> None:
        raise RuntimeError("a listener's own trouble")

    pair.direction.listen(raises)
    remove, again = pair.direction.listen(heard.append), pair.direction.listen(heard.append)
    pair.say()
    pair.run()
    assert len([event for event in heard if isinstance(event, PullAdvanced)]) == 2
    assert "a listener" in caplog.text
    remove()
    remove()
    again()
    heard.clear()
    pair.say()
    pair.run()
    assert heard == []
    assert pair.token == 2
    assert any(isinstance(event, StatusChanged) for event in pair.heard)


def test_of_two_workers_the_slower_one_is_refused_and_looks_again(
    paired: Paired, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = paired()
    pair.world.second = second = pair.world._carrier(HERE, PEER, pair.carrier.books)
    second.skew = 0.0
    assert second.row == pair.carrier.row
    second.start()
    conflicts: list[Exception] = []
    failed = Direction._failed

    def noted(self: Direction, error: Exception) -> float:
        conflicts.append(error)
        return failed(self, error)

    monkeypatch.setattr(Direction, "_failed", noted)
    said = pair.say(40)
    pair.run(200)
    assert pair.texts() == ids(said)
    assert any(isinstance(error, LinkConflict) for error in conflicts)
    assert len(pair.kinds()) == 40


def test_the_log_here_is_not_asked_for_what_was_just_put_into_it_unless_others_spoke_between(paired: Paired) -> None:
    pair = paired()
    pair.run()
    asked: list[int] = []
    index = pair.here.index

    def noted(after: int, limit: int) -> IndexPage:
        asked.append(after)
        return index(after, limit)

    pair.here.index = noted  # type: ignore[method-assign,assignment]
    said = pair.say(30)
    pair.run()
    assert (pair.texts(), asked) == (ids(said), [])
    local = pair.world._record(HERE, pair.world.agents[HERE][0], "general", None)
    pair.here.append(local, pair.world.scheduler.now)
    said += pair.say(3)
    pair.run()
    assert pair.texts() == ids(said)
    assert asked == [30]


async def test_stopping_leaves_the_ledger_whole_in_time_or_not(paired: Paired, tmp_path: Path) -> None:
    pair = paired()
    pair.carrier.kill()
    pair.say(30)
    database = Database(tmp_path / "links.db", SCHEMA)
    wanted = pair.carrier.definition
    row = (await database.write(lambda c: link_store.open_link(c, wanted, bytes(32), 0))).row
    slow = asyncio.Event()

    class Here:
        """The simulated log, without its network: putting something into it may take for ever."""

        async def facts(self) -> object:
            return pair.here.facts()

        async def index(self, after: int) -> object:
            return pair.here.index(after, 100)

        async def admit(self, batch: object, _epoch: str) -> object:
            stored = [pair.here.store(drafted(each, "lAB"), each.message_id, 0.0) for each in batch]  # type: ignore[attr-defined]
            if pair.here.head > 10:
                slow.set()
                await asyncio.Event().wait()
            return stored

    class There:
        async def hello(self) -> object:
            return pair.peer.hello()

        async def page(self, token: Token, limit: int) -> object:
            grant = Grant("lAB", HERE, pair.world.shares(PEER, HERE))
            return pair.peer.page(grant, token, limit, 100)

    running = Direction(wanted, BookedLink(database, row), There(), Here(), LoopClock(), verify=links.verify, limit=8)  # type: ignore[arg-type]
    running.start()
    await asyncio.wait_for(slow.wait(), 10)
    assert await running.stop(0.05) is False
    link = await database.read(lambda c: link_store.find(c, row))
    assert link.handled is not None
    assert link.handled.seq == 8, "the page it was at is not handled, though it is in the log"
    counted = await database.read(lambda c: link_store.counts(c, row))
    assert counted == {"admitted": 8}
    Here.admit = _takes_all(pair)  # type: ignore[method-assign,assignment]
    running = Direction(wanted, BookedLink(database, row), There(), Here(), LoopClock(), verify=links.verify, limit=8)  # type: ignore[arg-type]
    running.start()
    async with asyncio.timeout(10):
        while pair.here.head < 30 or (await database.read(lambda c: link_store.find(c, row))).handled.seq < 30:  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
    assert await running.stop(5.0) is True
    assert len(set(pair.texts())) == len(pair.texts()) == 30
    database.close()


def _takes_all(pair: Pair) -> Callable[..., object]:
    async def admit(_self: object, batch: object, epoch: str) -> object:
        return [pair.here.store(drafted(each, "lAB"), each.message_id, 0.0) for each in batch]  # type: ignore[attr-defined]

    return admit
