"""The ledger of a link: one transaction per page, tokens that only go forward, nothing dropped, nothing said twice."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from tidings.errors import (
    ConflictError,
    LinkConflict,
    QuarantineFull,
    StoreBusy,
    StoreTooNew,
    TokenRefused,
    UnknownMessage,
    UsageError,
)
from tidings.links import link_store, local_index, obligations
from tidings.links.definition import LinkDefinition
from tidings.links.link_store import BookedLink, Disposed, LinkRow
from tidings.links.ports import IndexPage, IndexRow, LocalFacts, OriginIdentity
from tidings.links.schema import SCHEMA
from tidings.util.database import Database
from tidings.wire.links import LinkedRecord, Token

HERE, PEER = "AHERE", "APEER"
TAKES = LinkDefinition(link="l1", space=HERE, peer=PEER, authority="a1", channels={"general": "acme"})
SECRET = b"s" * 32


def token(seq: int, epoch: str = "e1", space: str = PEER) -> Token:
    return Token(space=space, epoch=epoch, seq=seq, mark=f"m{seq}" if seq else "")


def said(seq: int, kind: str = "admitted", reason: str = "", name: str | None = None) -> Disposed:
    there = kind in ("admitted", "duplicate")
    return Disposed(
        seq=seq,
        identity=OriginIdentity(PEER, "UADA", name or f"id{seq}"),
        channel="general",
        hash=f"h{seq}",
        day="2025-11-15",
        kind=kind,  # type: ignore[arg-type]
        reason=reason,
        local_seq=1_000 + seq if there else None,
        record=record(seq) if kind == "quarantined" else None,
    )


def record(seq: int, payload: bytes = b"poison") -> LinkedRecord:
    return LinkedRecord(
        seq=seq, time_ns=seq, origin=PEER, channel="general", sender="UADA", signature="sig", payload=payload
    )


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    found = sqlite3.connect(":memory:", isolation_level=None)
    found.executescript(SCHEMA.sql)
    found.execute("PRAGMA foreign_keys = ON")
    yield found
    found.close()


@pytest.fixture
def row(connection: sqlite3.Connection) -> int:
    link = link_store.open_link(connection, TAKES, SECRET, now=1)
    link_store.begin(connection, link.row, token(0))
    return link.row


def moved(connection: sqlite3.Connection, row: int) -> Token | None:
    return link_store.find(connection, row).handled


def kinds(connection: sqlite3.Connection, life: int = 0) -> dict[int, str]:
    query = "SELECT seq, kind || CASE reason WHEN '' THEN '' ELSE ':' || reason END FROM disposition WHERE life = ?"
    return dict(connection.execute(query, (life,)).fetchall())


def commit(connection: sqlite3.Connection, row: int, last: int, *disposed: Disposed) -> None:
    before = moved(connection, row)
    assert before is not None
    with undone(connection):
        link_store.commit_page(connection, row, before, token(last), disposed, now=5)


class undone:  # noqa: N801  reads as a sentence
    """A transaction, as the writer makes one for a job."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN")

    def __exit__(self, kind: object, *_: object) -> None:
        self._connection.execute("COMMIT" if kind is None else "ROLLBACK")


def test_the_same_definition_is_the_same_link_and_another_one_is_refused(connection: sqlite3.Connection) -> None:
    first = link_store.open_link(connection, TAKES, SECRET, now=1)
    assert link_store.open_link(connection, TAKES, b"t" * 32, now=2) == first
    assert link_store.secret(connection, HERE) == SECRET
    other = LinkDefinition(link="l1", space=HERE, peer=PEER, authority="a1", channels={"general": "acme"}, hops=2)
    with pytest.raises(LinkConflict, match="otherwise"):
        link_store.open_link(connection, other, SECRET, now=3)


def test_another_scope_or_authority_is_another_link_with_a_token_of_its_own(connection: sqlite3.Connection) -> None:
    wider = {"general": "acme", "team.>": "acme-team.>"}
    made: list[LinkRow] = []
    for channels, authority in ((TAKES.channels, "a1"), (wider, "a1"), (TAKES.channels, "a2")):
        definition = LinkDefinition(link="l1", space=HERE, peer=PEER, authority=authority, channels=channels)
        made.append(link_store.open_link(connection, definition, SECRET, now=1))
    assert len({each.row for each in made}) == 3
    link_store.begin(connection, made[0].row, token(0))
    assert [each.handled is None for each in link_store.links(connection, HERE)] == [False, True, True]
    assert link_store.links(connection, "AELSE") == []
    assert [each.definition for each in link_store.links(connection)] == [each.definition for each in made]


def test_a_page_and_its_token_are_one(connection: sqlite3.Connection, row: int) -> None:
    commit(connection, row, 7, said(2), said(5, "omitted", "echo"), said(6, "duplicate"))
    assert moved(connection, row) == token(7)
    assert kinds(connection) == {2: "admitted", 5: "omitted:echo", 6: "duplicate"}
    with pytest.raises(sqlite3.IntegrityError):
        commit(connection, row, 9, said(8), said(9, "omitted", "because"))
    assert moved(connection, row) == token(7)
    assert 8 not in kinds(connection)


def test_a_record_has_one_disposition(connection: sqlite3.Connection, row: int) -> None:
    with pytest.raises(sqlite3.IntegrityError):
        commit(connection, row, 3, said(2), said(2, "omitted", "echo"))
    commit(connection, row, 3, said(2))
    with pytest.raises(sqlite3.IntegrityError, match="said once"):
        connection.execute("UPDATE disposition SET kind = 'omitted', reason = 'echo', local_seq = NULL")


@pytest.mark.parametrize("seq", [3, 9])
def test_a_record_outside_its_page_is_refused(connection: sqlite3.Connection, row: int, seq: int) -> None:
    commit(connection, row, 3, said(2))
    with pytest.raises(TokenRefused):
        commit(connection, row, 8, said(seq))


def test_a_token_does_not_go_back_or_to_another_log(connection: sqlite3.Connection, row: int) -> None:
    commit(connection, row, 7)
    for other in (token(6), token(9, epoch="e2"), token(9, space="AELSE")):
        with pytest.raises(TokenRefused):
            link_store.commit_page(connection, row, token(7), other, (), now=1)
    with pytest.raises(TokenRefused):
        link_store.receive(connection, row, token(9, epoch="e2"))
    with pytest.raises(LinkConflict):
        link_store.begin(connection, row, token(0, epoch="e2"))
    assert moved(connection, row) == token(7)


def test_the_slower_of_two_workers_is_refused(connection: sqlite3.Connection, row: int) -> None:
    commit(connection, row, 7, said(3))
    with pytest.raises(LinkConflict, match="another worker"), undone(connection):
        link_store.commit_page(connection, row, token(0), token(9), [said(9)], now=1)
    assert kinds(connection) == {3: "admitted"}


def test_received_pages_are_bounded_and_one_that_comes_again_counts_once(
    connection: sqlite3.Connection, row: int
) -> None:
    for seq in (5, 5, 3):
        assert link_store.receive(connection, row, token(seq))
    assert link_store.find(connection, row).received_pages == 1
    for seq in range(6, 6 + link_store.MOST_RECEIVED - 1):
        assert link_store.receive(connection, row, token(seq))
    assert not link_store.receive(connection, row, token(10_000))
    assert link_store.find(connection, row).received == token(104)
    commit(connection, row, 104)
    link = link_store.find(connection, row)
    assert (link.received, link.received_pages) == (token(104), 0)


def test_what_was_removed_before_it_was_asked_for_is_named(connection: sqlite3.Connection, row: int) -> None:
    commit(connection, row, 3, said(3, "omitted", "hops"))
    link_store.omit_range(connection, row, token(3), token(90), now=1)
    assert moved(connection, row) == token(90)
    assert link_store.omissions(connection, row) == [(3, 3, "hops"), (4, 90, "too_old")]


def test_going_back_gives_up_what_is_read_again_and_keeps_what_is_not(connection: sqlite3.Connection, row: int) -> None:
    commit(
        connection, row, 9, said(2), said(4), said(5, "quarantined", "signature"), said(6), said(7, "omitted", "echo")
    )
    link_store.omit_range(connection, row, token(9), token(20), now=1)
    obligations.owe(connection, row, [8], now=1)
    assert link_store.go_back(connection, row, token(20), token(4, epoch="e2")) == (2, 1)
    assert moved(connection, row) == token(4, epoch="e2")
    assert kinds(connection) == {2: "admitted", 4: "admitted"}
    assert kinds(connection, life=1) == {5: "quarantined:signature", 8: "omitted:vanished"}
    assert [each.life for each in obligations.in_quarantine(connection, row)] == [1]
    link_store.commit_page(connection, row, token(4, "e2"), token(12, "e2"), [said(5), said(8)], now=2)
    assert kinds(connection) == {2: "admitted", 4: "admitted", 5: "admitted", 8: "admitted"}
    with pytest.raises(LinkConflict):
        link_store.go_back(connection, row, token(20), token(0, epoch="e2"))


def test_what_the_peer_removed_by_age_is_counted_and_not_kept_but_what_waits_is(
    connection: sqlite3.Connection, row: int
) -> None:
    commit(
        connection,
        row,
        9,
        said(2),
        said(4),
        said(5, "omitted", "echo"),
        said(6, "duplicate"),
        said(7, "quarantined", "signature"),
    )
    obligations.owe(connection, row, [8], now=1)
    before = link_store.counts(connection, row)
    kept = connection.execute("SELECT count(*) FROM disposition WHERE kind IN ('quarantined', 'obligation')").fetchone()
    everything = connection.execute("SELECT count(*), max(seq) FROM disposition").fetchone()
    assert link_store.forget_removed(connection, row, everything[1] + 1, limit=1) == 1, "a few at a time"
    assert link_store.forget_removed(connection, row, everything[1] + 1) == everything[0] - kept[0] - 1
    assert link_store.forget_removed(connection, row, everything[1] + 1) == 0
    assert connection.execute("SELECT count(*) FROM disposition").fetchone() == kept
    assert link_store.counts(connection, row) == before
    assert link_store.held_days(connection, row, everything[1] + 1, 10**6) == []


def test_a_range_that_was_named_is_cut_where_the_log_goes_back(connection: sqlite3.Connection, row: int) -> None:
    link_store.omit_range(connection, row, token(0), token(20), now=1)
    link_store.go_back(connection, row, token(20), token(8, epoch="e2"))
    assert link_store.omissions(connection, row) == [(1, 8, "too_old")]


def test_a_full_quarantine_stops_the_page_and_drops_nothing(
    connection: sqlite3.Connection, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_store, "MOST_QUARANTINED", 2)
    commit(connection, row, 2, said(1, "quarantined", "signature"), said(2, "quarantined", "signature"))
    with pytest.raises(QuarantineFull):
        commit(connection, row, 4, said(3), said(4, "quarantined", "signature"))
    assert moved(connection, row) == token(2)
    obligations.drop(connection, row, 1, "spam")
    commit(connection, row, 4, said(3), said(4, "quarantined", "signature"))
    assert link_store.quarantined(connection, row) == (2, 12)
    monkeypatch.setattr(link_store, "MOST_QUARANTINED_BYTES", 12)
    obligations.drop(connection, row, 2, "spam")
    with pytest.raises(QuarantineFull):
        commit(connection, row, 6, said(5, "quarantined", "size"), said(6, "quarantined", "size"))


def test_a_dropped_record_says_why_and_its_bytes_go(connection: sqlite3.Connection, row: int) -> None:
    commit(connection, row, 2, said(2, "quarantined", "signature"))
    with pytest.raises(UsageError):
        obligations.drop(connection, row, 2, "  ")
    obligations.drop(connection, row, 2, "forged")
    assert link_store.omissions(connection, row) == [(2, 2, "operator: forged")]
    assert obligations.in_quarantine(connection, row) == []
    with pytest.raises(UnknownMessage):
        obligations.drop(connection, row, 2, "again")


def test_what_waits_is_tried_later_each_time_and_settled_once(connection: sqlite3.Connection, row: int) -> None:
    commit(connection, row, 9, said(2))
    assert obligations.owe(connection, row, [2, 4, 5, 12], now=100) == 2, "2 has its disposition, 12 is still to come"
    assert [each.seq for each in obligations.owed(connection, row, 100, 10)] == [4, 5]
    obligations.postpone(connection, row, [4], 100, luck=0.5)
    assert [each.seq for each in obligations.owed(connection, row, 1_099, 10)] == [5]
    assert obligations.next_due(connection, row) == 100
    obligations.settle(connection, row, [said(5, "omitted", "vanished")], now=1)
    obligations.settle(connection, row, [said(5)], now=1)
    assert kinds(connection)[5] == "omitted:vanished"
    assert obligations.next_due(connection, row) == 1_100
    obligations.postpone(connection, row, [4], 1_100, luck=0.5)
    assert obligations.next_due(connection, row) == 3_100
    obligations.due_again(connection, row, [4], 1_100)
    assert [(each.seq, each.attempts) for each in obligations.owed(connection, row, 1_100, 10)] == [(4, 0)]
    obligations.settle(connection, row, [said(4, "quarantined", "signature")], now=1)
    (kept,) = obligations.due_in_quarantine(connection, row, 70_000, 10)
    assert kept.record == record(4)


def test_what_had_vanished_is_not_held_and_is_owed_again_if_the_peer_has_it(
    connection: sqlite3.Connection, row: int
) -> None:
    commit(connection, row, 9, said(2), said(3, "omitted", "vanished"), said(4, "omitted", "echo"))
    assert link_store.held_days(connection, row, 1, 9) == [("general", "2025-11-15")]
    assert [each.seq for each in link_store.held_rows(connection, row, "general", "2025-11-15", 1, 9)] == [2, 4]
    assert obligations.owe(connection, row, [2, 3, 4], now=1) == 1
    assert [(each.seq, each.identity.id) for each in obligations.owed(connection, row, 1, 10)] == [(3, "")], (
        "whatever it is"
    )


def test_quarantined_records_come_back_whole_and_sparsely(connection: sqlite3.Connection, row: int) -> None:
    commit(connection, row, 3, said(2, "quarantined", "signature"))
    assert obligations.due_in_quarantine(connection, row, 60_004, 10) == []
    (kept,) = obligations.due_in_quarantine(connection, row, 60_005, 10)
    assert (kept.record, kept.reason) == (record(2), "signature")
    obligations.quarantine_tried(connection, row, [(0, 2)], now=60_005, luck=0.5)
    obligations.still_quarantined(connection, row, 0, 2, "malformed", "no JSON")
    assert obligations.due_in_quarantine(connection, row, 120_004, 10) == []
    assert obligations.retry_quarantined(connection, row, None, now=6) == 1
    assert [each.words for each in obligations.due_in_quarantine(connection, row, 6, 10)] == ["no JSON"]
    obligations.settle(connection, row, [said(2)], now=1)
    assert obligations.in_quarantine(connection, row) == []


def test_a_link_is_deleted_whole_and_rebuilt_from_nothing_but_its_quarantine(
    connection: sqlite3.Connection, row: int
) -> None:
    commit(connection, row, 9, said(2), said(3, "quarantined", "signature"))
    obligations.owe(connection, row, [4], now=1)
    local_index.meet(connection, facts("b1", 10))
    local_index.complete(connection, facts("b1", 10), now=1)
    link_store.rebuild(connection, row)
    assert moved(connection, row) is None
    assert local_index.meet(connection, facts("b1", 10)).anew, "what the log here holds is read again, too"
    assert link_store.counts(connection, row) == {"quarantined": 1}
    assert [each.record for each in obligations.due_in_quarantine(connection, row, 0, 10)] == [record(3)]
    link_store.begin(connection, row, token(0, epoch="e3"))
    link_store.commit_page(connection, row, token(0, "e3"), token(9, "e3"), [said(2, "quarantined", "x")], now=1)
    assert [each.record.seq for each in obligations.in_quarantine(connection, row)] == [2, 3]
    link_store.rebuild(connection, row)
    assert [(each.record.seq, each.life) for each in obligations.in_quarantine(connection, row)] == [(2, 2), (3, 1)]
    link_store.begin(connection, row, token(0, epoch="e4"))
    again = [said(2), said(3, "quarantined", "signature")]
    link_store.commit_page(connection, row, token(0, "e4"), token(9, "e4"), again, now=1)
    assert [(each.record.seq, each.life) for each in obligations.in_quarantine(connection, row)] == [(3, 0)], (
        "each once"
    )
    link_store.delete(connection, row)
    assert link_store.links(connection) == []
    for table in ("disposition", "quarantine", "obligation"):
        assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    with pytest.raises(LinkConflict, match="removed"):
        link_store.find(connection, row)


def test_what_is_in_quarantine_stays_there_when_something_else_is_taken_and_is_there_once_when_it_comes_again(
    connection: sqlite3.Connection, row: int
) -> None:
    commit(connection, row, 9, said(2), *(said(seq, "quarantined", "signature") for seq in (5, 6, 7)))
    now = 1_000
    for number, ours in enumerate(("far", "farther"), 2):
        otherwise = msgspec.structs.replace(TAKES, authority=f"a{number}", channels={"general": ours})
        anew = link_store.opened(connection, otherwise, now)
        assert [link.row for link in link_store.links(connection)] == [anew.row]
        assert [each.record for each in obligations.in_quarantine(connection, anew.row)] == [
            record(n) for n in (5, 6, 7)
        ]
        assert len(obligations.due_in_quarantine(connection, anew.row, now, 10)) == 3, "the new terms may let it in"
        assert link_store.counts(connection, anew.row) == {"quarantined": 3}
    link_store.begin(connection, anew.row, token(0))
    commit(connection, anew.row, 9, said(2), said(5), said(6, "quarantined", "signature"))  # the peer has 7 no more
    assert [each.record.seq for each in obligations.in_quarantine(connection, anew.row)] == [6, 7]
    assert link_store.counts(connection, anew.row) == {"admitted": 2, "quarantined": 2}


def test_of_two_records_in_quarantine_at_one_sequence_one_is_meant(connection: sqlite3.Connection, row: int) -> None:
    commit(connection, row, 9, said(5, "quarantined", "signature"))
    link_store.go_back(connection, row, token(9), token(0, epoch="e2"))
    other = record(5, payload=b"another")
    after = Token(space=PEER, epoch="e2", seq=9)
    aside = msgspec.structs.replace(said(5, "quarantined", "signature"), record=other, hash="other")
    link_store.commit_page(connection, row, token(0, epoch="e2"), after, [aside], 1)
    with pytest.raises(ConflictError, match="--life, one of 0, 1"):
        obligations.one_quarantined(connection, row, 5)
    with pytest.raises(ConflictError, match="different lives"):
        obligations.drop(connection, row, 5, "which one?")
    assert obligations.one_quarantined(connection, row, 5, 0).record == other
    assert obligations.one_quarantined(connection, row, 5, 1).record == record(5)
    with pytest.raises(UnknownMessage):
        obligations.one_quarantined(connection, row, 5, 2)
    obligations.drop(connection, row, 5, "the old one", 1)
    assert obligations.one_quarantined(connection, row, 5).record == other


def test_what_was_spent_is_paid_back_by_time_and_outlives_other_terms(connection: sqlite3.Connection, row: int) -> None:
    assert link_store.spent(connection, row, 1_000, now=5) == 0
    link_store.spend(connection, row, 600, 1_000, now=link_store.DAY)
    link_store.spend(connection, row, 700, 1_000, now=link_store.DAY)
    assert link_store.spent(connection, row, 1_000, now=link_store.DAY) == 1_300
    assert link_store.spent(connection, row, 1_000, now=link_store.DAY * 3 // 2) == 800
    assert link_store.spent(connection, row, 1_000, now=0) == 1_300, "a clock that went back"
    assert link_store.spent(connection, row, 1_000, now=link_store.DAY * 9) == 0
    otherwise = msgspec.structs.replace(TAKES, authority="a2", channels={"general": "far"})
    anew = link_store.opened(connection, otherwise, 1)
    assert link_store.spent(connection, anew.row, 1_000, now=link_store.DAY) == 1_300


def test_a_pause_is_remembered(connection: sqlite3.Connection, row: int) -> None:
    link_store.pause(connection, row, "moving house", now=1)
    assert link_store.find(connection, row).paused == "moving house"
    link_store.resume(connection, row)
    assert link_store.find(connection, row).paused is None


def index(epoch: str, through: int, *rows: IndexRow) -> IndexPage:
    return IndexPage(epoch=epoch, rows=rows, through=through)


def here(seq: int, name: str) -> IndexRow:
    return IndexRow(seq, "l1", PEER, "general", "UADA", name, "h")


def facts(epoch: str, head: int, floor: int = 0) -> LocalFacts:
    return LocalFacts(space=HERE, epoch=epoch, head=head, floor=floor)


def test_the_index_is_shared_by_the_links_of_a_space_and_goes_on_where_it_was(
    connection: sqlite3.Connection, row: int
) -> None:
    known = local_index.meet(connection, facts("b1", 10))
    assert known == ("b1", 0, True, 1)
    known = local_index.extend(connection, HERE, known, index("b1", 5, here(4, "id1")))
    local_index.complete(connection, facts("b1", 10), now=1)
    stale = known
    known = local_index.extend(connection, HERE, local_index.state(connection, HERE), index("b1", 9, here(7, "id2")))
    assert local_index.extend(connection, HERE, stale, index("b1", 8, here(8, "id3"))) == known
    assert local_index.meet(connection, facts("b1", 12)) == ("b1", 9, False, 1)
    wanted = [OriginIdentity(PEER, "UADA", name) for name in ("id1", "id2", "id3")]
    assert [each.id for each in local_index.present(connection, HERE, wanted)] == ["id1", "id2"]


def test_what_a_worker_put_in_itself_is_known_at_once_if_nothing_lies_between(
    connection: sqlite3.Connection, row: int
) -> None:
    def own(*rows: IndexRow) -> dict[int, IndexRow]:
        return {each.seq: each for each in rows}

    anew = local_index.meet(connection, facts("b1", 10))
    anew = local_index.extend(connection, HERE, anew, index("b1", 10))
    assert local_index.extend_own(connection, HERE, anew, own(here(11, "id1"))) == anew, "it is not complete yet"
    local_index.complete(connection, facts("b1", 10), now=1)
    known = local_index.state(connection, HERE)
    assert known.through == 10
    for rows in ((), (here(12, "id2"),), (here(11, "id1"), here(13, "id3"))):
        assert local_index.extend_own(connection, HERE, known, own(*rows)) == known, "something is not ours"
    after = local_index.extend_own(connection, HERE, known, own(here(12, "id2"), here(11, "id1")))
    assert after == known._replace(through=12) == local_index.state(connection, HERE)
    assert local_index.extend_own(connection, HERE, known, own(here(11, "id9"))) == after, "it went on meanwhile"
    wanted = [OriginIdentity(PEER, "UADA", name) for name in ("id1", "id2", "id3", "id9")]
    found = local_index.present(connection, HERE, wanted)
    assert {name.id: each.seq for name, each in found.items()} == {"id1": 11, "id2": 12}


def test_what_the_log_here_lost_is_owed_again_but_not_what_it_removed_by_age(
    connection: sqlite3.Connection, row: int
) -> None:
    local_index.meet(connection, facts("b1", 2_000))
    local_index.complete(connection, facts("b1", 2_000), now=1)
    commit(connection, row, 9, said(1), said(2), said(3), said(4, "omitted", "echo"))
    known = local_index.meet(connection, facts("b2", 1_003))
    assert known == ("b2", 0, True, 2)
    assert local_index.present(connection, HERE, [said(1).identity]) == {}
    local_index.extend(connection, HERE, known, index("b2", 1_003, here(1_002, "id2")))
    assert local_index.complete(connection, facts("b2", 1_003, floor=1_002), now=1) == 1
    assert kinds(connection) == {1: "admitted", 2: "admitted", 3: "obligation:lost_here", 4: "omitted:echo"}
    assert [each.identity.id for each in obligations.owed(connection, row, 1, 10)] == ["id3"]
    assert local_index.meet(connection, facts("b2", 900)).anew, "a log that ends before the index was set back"


async def test_on_disk_it_is_kept_and_a_newer_or_second_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "links.db"
    database = Database(path, SCHEMA)
    link = await database.write(lambda c: link_store.open_link(c, TAKES, SECRET, now=1))
    kept = BookedLink(database, link.row)
    await kept.write(lambda c: link_store.begin(c, link.row, token(0)))
    page = [said(2), said(3, "quarantined", "signature")]
    await kept.write(lambda c: link_store.commit_page(c, link.row, token(0), token(5), page, now=1))
    with pytest.raises(StoreBusy):
        Database(path, SCHEMA)
    database.close()
    database = Database(path, SCHEMA)
    kept = BookedLink(database, link.row)
    assert (await kept.link()).handled == token(5)
    assert await kept.read(lambda c: link_store.held_days(c, link.row, 1, 5)) == [("general", "2025-11-15")]
    held = await kept.read(lambda c: link_store.held_rows(c, link.row, "general", "2025-11-15", 2, 2))
    assert [each.seq for each in held] == [2]
    database.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA.version + 1}")
    with pytest.raises(StoreTooNew):
        Database(path, SCHEMA)
