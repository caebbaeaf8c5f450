"""The rules of the roster, without a broker."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.client.directory import resolve_among
from tidings.contract.agents import BeatRequest
from tidings.errors import AmbiguousPeer, UnknownPeer, UsageError
from tidings.steward.roster import SESSIONS_KEPT, RosterTable, pages
from tidings.wire.roster import AgentEntry, Attention, Delta, open_delta, sign_delta
from tidings.wire.rulings import Access
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import Subjects

ADA, BOB = "UADA", "UBOB"
MAIN = Subjects("main")
KEY = KeyPair.generate()


class Clock:
    def __init__(self) -> None:
        self.access = {
            ADA: Access(op="1", name="ada", roles=("reviewer",)),
            BOB: Access(op="1", name="bob"),
        }
        self.table = RosterTable(self.access.get, ttl=25)
        self.table.admit(self.access)
        self.table.news()
        self.table.sweep(0)

    def beat(self, owner: str = ADA, at: float = 0, session: str = "session-1", **said: Any) -> None:
        self.table.beat(owner, BeatRequest(session=session, **({"status": "idle"} | said)), at, 1000 + at)

    def sweep(self, until: float, step: float = 1.0) -> None:
        """Time passes as it does for a steward that is awake."""
        now = self.table._swept or 0.0
        while now < until:
            now += step
            self.table.sweep(now)

    def row(self, owner: str = ADA) -> AgentEntry:
        row = self.table.row(owner)
        assert row is not None
        return row


def test_the_directory_holds_everybody_who_is_not_revoked_before_anyone_beat() -> None:
    clock = Clock()
    assert [(row.name, row.status) for row in clock.table.page()[0]] == [("ada", "offline"), ("bob", "offline")]
    assert clock.table.page(ADA)[0][0].name == "bob"


def test_whoever_was_answered_a_row_that_no_delta_told_hears_when_it_is_gone() -> None:
    clock = Clock()
    clock.access["UCAT"] = Access(op="1", name="cat")
    clock.table.admit(["UCAT"])
    assert [row.name for row in clock.table.page(BOB)[0]] == ["cat"], "a snapshot has it before the next delta"
    del clock.access["UCAT"]
    clock.table.admit(["UCAT"])
    assert clock.table.news() == ([], ["UCAT"])
    assert clock.table.news() == ([], []), "once"


def test_name_and_roles_are_the_access_records_and_a_change_of_them_is_news() -> None:
    clock = Clock()
    assert clock.row().roles == ("reviewer",)
    clock.access[ADA] = Access(op="2", name="ada2", roles=())
    clock.table.admit([ADA])
    rows, gone = clock.table.news()
    assert ([(row.name, row.roles) for row in rows], gone) == ([("ada2", ())], [])


def test_a_revoked_agent_is_gone_once() -> None:
    clock = Clock()
    clock.beat()
    clock.access[ADA] = Access(op="2", name="ada", revoked=True)
    clock.table.admit([ADA])
    assert clock.table.news() == ([], [ADA])
    clock.table.admit([ADA])
    assert clock.table.news() == ([], [])
    assert clock.table.row(ADA) is None


def test_an_unchanged_beat_is_no_news() -> None:
    clock = Clock()
    clock.beat(status="working", activity="tests")
    assert [row.activity for row in clock.table.news()[0]] == ["tests"]
    for second in range(10, 60, 10):
        clock.beat(at=second, status="working", activity="tests")
        assert not clock.table.has_news


def test_silence_is_offline_without_attention_and_with_the_time_it_was_last_seen() -> None:
    clock = Clock()
    clock.beat(at=1, attention=Attention("dnd"))
    clock.table.news()
    clock.sweep(25)
    assert clock.row().online
    clock.sweep(27)
    assert (clock.row().status, clock.row().attention, clock.row().last_seen) == (
        "offline",
        None,
        "1970-01-01T00:16:41.000Z",
    )
    assert len(clock.table.news()[0]) == 1


def test_a_graceful_end_is_offline_at_once() -> None:
    clock = Clock()
    clock.beat()
    clock.beat(status="offline")
    assert not clock.row().online


def test_a_steward_that_slept_takes_nobody_for_silent() -> None:
    clock = Clock()
    clock.beat(at=1)
    clock.table.sweep(1)
    clock.table.sweep(100)
    assert clock.row().online
    clock.sweep(130)
    assert not clock.row().online


def test_the_receiving_session_speaks_and_another_ones_end_does_not_take_it_offline() -> None:
    clock = Clock()
    clock.beat(session="receiver", status="working")
    clock.table.take(ADA, "receiver", None, 5)
    clock.beat(session="sender-01", status="idle")
    assert clock.row().status == "working"
    clock.beat(session="sender-01", status="offline")
    assert clock.row().status == "working"
    clock.beat(session="receiver", status="offline")
    assert clock.row().status == "offline"


def test_an_agent_with_many_sessions_costs_a_bounded_amount() -> None:
    clock = Clock()
    for number in range(100):
        clock.beat(at=number, session=f"session-{number}")
    assert len(clock.table._presence[ADA].sessions) == SESSIONS_KEPT


def test_the_newest_session_wins_and_asking_again_changes_nothing() -> None:
    table = Clock().table
    first, _ = table.take(ADA, "session-a", None, 1000)
    second, _ = table.take(ADA, "session-b", None, 1000)
    assert second > first
    assert table.take(ADA, "session-b", None, 2000) == (second, False)
    assert table.take(ADA, "session-a", first, 2000) == (second, True)


def ended(clock: Clock, now: float) -> int | None:
    return clock.table.ended(ADA, now)


def test_a_session_ended_if_it_said_so_or_was_silent_for_long_after_it_was_heard() -> None:
    clock = Clock()
    table = clock.table
    number, _ = table.take(ADA, "session-a", None, 1000, heard=0)
    assert ended(clock, 10_000) is None, "it never said that it lives: silence proves nothing"
    table.take(ADA, "session-a", number, 2000, heard=10)
    assert (ended(clock, 110), ended(clock, 111)) == (None, number)
    clock.beat(at=100, session="session-a")
    assert (ended(clock, 200), ended(clock, 201)) == (None, number)
    clock.beat(at=200, session="session-a", status="offline")
    assert ended(clock, 10_000) is None, "it is not seen any more, and may receive"
    table.release(ADA, "session-b")
    assert ended(clock, 10_000) is None, "another one's end is not its end"
    table.release(ADA, "session-a")
    assert ended(clock, 200) == number


def test_whoever_starts_again_goes_on_with_its_session_and_takes_nobody_elses() -> None:
    table = Clock().table
    number, _ = table.take(ADA, "session-a", None, 1000)
    assert table.take(ADA, "session-b", number, 2000) == (number + 1, False), "the process before it was killed"
    assert table.take(ADA, "session-a", number, 2000) == (number + 1, True), "or lives after all"
    table.release(ADA, "session-b")
    assert table.take(ADA, "session-c", number + 1, 2000) == (number + 1, False), "it ended in order"
    newer, _ = table.take(ADA, "session-d", None, 3000)
    assert table.take(ADA, "session-e", number + 1, 4000) == (newer, True)


def test_a_steward_that_slept_takes_nobody_for_ended() -> None:
    clock = Clock()
    number, _ = clock.table.take(ADA, "session-a", None, 1000)
    clock.table.take(ADA, "session-a", number, 1000, heard=0)
    clock.table.sweep(5_000)
    assert ended(clock, 5_001) is None


def test_whoever_lives_may_take_its_session_again_before_a_new_steward_says_that_there_is_none() -> None:
    clock = Clock()
    clock.sweep(101)
    assert (ended(clock, 100), ended(clock, 101)) == (None, 0)


def test_the_place_of_a_session_that_ended_is_not_taken_from_one_that_began_meanwhile() -> None:
    clock = Clock()
    table = clock.table
    gone, _ = table.take(ADA, "session-a", None, 1000)
    table.release(ADA, "session-a")
    began, _ = table.take(ADA, "session-b", None, 2000)
    assert table.take(ADA, "session-c", None, 3000, ended=gone) == (began, True)
    table.release(ADA, "session-b")
    assert table.take(ADA, "session-c", None, 3000, ended=began) == (3000, False)


@given(st.permutations(["session-a", "session-b", "session-c"]))
def test_after_a_restart_the_session_that_won_wins_whoever_asks_first(order: list[str]) -> None:
    before, after = Clock().table, Clock().table
    held = {name: before.take(ADA, name, None, 1000)[0] for name in ("session-a", "session-b", "session-c")}
    for name in order:
        after.take(ADA, name, held[name], 2000)
    assert after.take(ADA, "session-c", held["session-c"], 2000) == (held["session-c"], False)
    assert after.take(ADA, "session-d", None, 2000)[0] > held["session-c"]


def test_pages_keep_every_row_in_order_and_bounded() -> None:
    rows = [AgentEntry(id=f"U{n:03}", name=f"agent{n}") for n in range(50)]
    found = pages(rows, limit=1000)
    assert [row for page in found for row in page] == rows
    assert all(len(msgspec.json.encode(page)) <= 1002 for page in found)
    assert pages([]) == []
    assert pages(rows[:1], limit=1) == [rows[:1]]


def test_a_snapshot_looks_at_each_row_once_however_many_pages_it_has() -> None:
    access = {f"U{n:03}": Access(op="1", name=f"agent{n}") for n in range(50)}
    asked: list[str] = []

    def access_of(owner: str) -> Access | None:
        asked.append(owner)
        return access.get(owner)

    table = RosterTable(access_of, ttl=25)
    table.admit([*access, "UGONE"])
    found: list[AgentEntry] = []
    more, count = True, 0
    while more:
        page, more = table.page(found[-1].id if found else "", limit=1000)
        found, count = [*found, *page], count + 1
    assert [row.id for row in found] == sorted(access)
    assert found == [row for part in pages(found, limit=1000) for row in part]
    assert count == len(pages(found, limit=1000)) > 5
    assert len(asked) <= len(access) + count + 1, "the first row of the next page is looked at twice"
    assert RosterTable(access.get, ttl=25).page() == ([], False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"status": "asleep"},
        {"session": "short"},
        {"activity": "x" * 201},
        {"activity": "\x1b[2J"},
        {"attention": {"mode": "deaf"}},
        {"attention": {"mode": "open", "channels": {"a b": "quiet"}}},
        {"attention": {"mode": "open", "channels": {f"c{n}": "quiet" for n in range(65)}}},
        {"model": 7},
    ],
)
def test_a_beat_that_says_something_else_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        BeatRequest.operation.decode({"session": "session-1", "status": "idle", **wrong})


def test_a_row_never_names_the_channels_of_an_agents_attention() -> None:
    clock = Clock()
    said = {"session": "session-1", "status": "idle", "attention": {"mode": "dnd", "channels": {"secret": "muted"}}}
    clock.table.beat(ADA, msgspec.convert(said, BeatRequest), 0, 0)
    assert clock.row().attention == "dnd"
    assert b"secret" not in msgspec.json.encode(clock.row())


# --- deltas on the wire ---


def opened(delta: Delta, *, subject: str = MAIN.live_roster, key: str = KEY.id, **headers: str) -> Delta | str:
    payload, named = sign_delta(KEY, "SPACE", delta)
    return open_delta(MAIN, "SPACE", key, subject, tuple((named | headers).items()), payload)


def test_a_delta_is_opened_only_with_the_right_subject_key_and_bytes() -> None:
    delta = Delta(boot="b", n=3, rows=(AgentEntry(id=ADA, name="ada", status="idle", attention="open"),), gone=(BOB,))
    assert opened(delta) == delta
    assert opened(delta, subject="td.main.live.rosters") == "wrong_subject"
    assert opened(delta, key=KeyPair.generate().id) == "signature"
    payload, headers = sign_delta(KEY, "SPACE", delta)
    assert open_delta(MAIN, "OTHER", KEY.id, MAIN.live_roster, tuple(headers.items()), payload) == "signature"
    assert open_delta(MAIN, "SPACE", KEY.id, MAIN.live_roster, (), payload) == "unsigned"
    assert open_delta(MAIN, "SPACE", KEY.id, MAIN.live_roster, tuple(headers.items()), payload + b" ") == "signature"


@given(st.binary(max_size=200), st.text(max_size=90))
def test_junk_is_never_a_delta(payload: bytes, signature: str) -> None:
    assert isinstance(open_delta(MAIN, "SPACE", KEY.id, MAIN.live_roster, (("Td-Sig", signature),), payload), str)


# --- names ---

PEERS = [AgentEntry(id="U1", name="bob"), AgentEntry(id="U2", name="Bob"), AgentEntry(id="U3", name="Carol")]


def test_an_id_or_an_exact_name_is_one_agent() -> None:
    assert resolve_among(PEERS, "bob").id == "U1"
    assert resolve_among(PEERS, "Bob").id == "U2"
    assert resolve_among(PEERS, "U3").name == "Carol"


def test_another_case_is_understood_if_it_can_mean_only_one() -> None:
    assert resolve_among(PEERS, "carol").id == "U3"
    with pytest.raises(AmbiguousPeer, match="Bob, bob"):
        resolve_among(PEERS, "BOB")


def test_nobody_is_said_with_names_that_are_near() -> None:
    with pytest.raises(UnknownPeer, match="did you mean Carol"):
        resolve_among(PEERS, "Carrol")
    with pytest.raises(UnknownPeer, match="lists the agents"):
        resolve_among(PEERS, "zzz")
