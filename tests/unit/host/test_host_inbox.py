"""The inbox of a host: each message once for each recipient, and nobody reads another's."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hosted import NOW, arrival, break_trigger, mend_trigger
from tidings.client.notices import Notice
from tidings.errors import StoreBroken
from tidings.host import inbox as inbox_views
from tidings.host import inbox as module
from tidings.host.inbox import Bound, InboxStore, Wanted
from tidings.host.schema import SCHEMA
from tidings.util.database import Database

DAY = 24 * 3_600_000


class Clock:
    def __init__(self) -> None:
        self.seconds = NOW / 1000

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=[True, False], ids=["fts5", "like"])
async def inbox(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[InboxStore]:
    if not request.param:
        monkeypatch.setattr(module, "prepare_search", lambda _: False)
    database = Database(tmp_path / "host.db", SCHEMA, clock=clock)
    store = await InboxStore.open(database)
    assert store.words == request.param
    yield store
    database.close()


async def ids(inbox: InboxStore, recipient: str = "bob", **wanted: Any) -> list[str]:
    return [row.id for row in await inbox.read(inbox_views.listed, "main", recipient, Wanted(**wanted))]


async def found(inbox: InboxStore, text: str, recipient: str = "bob") -> list[str]:
    return [row.id for row in await inbox.search("main", recipient, text)]


async def test_a_message_that_comes_again_is_not_new(inbox: InboxStore) -> None:
    first = await inbox.keep(arrival("one"))
    again = await inbox.keep(arrival("one", "other text"))
    assert first.new
    assert (again.row, again.new) == (first.row, False)
    assert [row.text for row in await inbox.read(inbox_views.listed, "main", "bob")] == ["hello"]


def everything(connection: sqlite3.Connection) -> list[list[Any]]:
    tables = ("inbox", "inbox_held", "inbox_overflow", "inbox_not_kept", "quarantine", "sqlite_sequence")
    return [connection.execute(f"SELECT * FROM {table}").fetchall() for table in tables]


async def test_a_trial_of_keeping_leaves_nothing_and_says_what_would_keep_mail_out(inbox: InboxStore) -> None:
    await inbox.keep(arrival("one", "some words"))
    before = await inbox.database.read(everything)
    await inbox.try_to_keep()
    assert await inbox.database.read(everything) == before
    assert await found(inbox, "words") == ["one"]
    assert await inbox.search("trial", "trial", "trial") == []
    await inbox.database.write(break_trigger)
    with pytest.raises(StoreBroken, match="no such function: coalerce"):
        await inbox.try_to_keep()
    await inbox.database.write(mend_trigger)
    await inbox.try_to_keep()
    assert await inbox.database.read(everything) == before


async def test_one_message_reaches_every_local_recipient_and_an_id_is_each_senders_own(inbox: InboxStore) -> None:
    kept = [
        await inbox.keep(arrival("one", recipient="bob")),
        await inbox.keep(arrival("one", recipient="eve")),
        await inbox.keep(arrival("one", sender="eve")),
        await inbox.keep(arrival("one", space="side")),
    ]
    assert all(one.new for one in kept)


async def test_every_question_is_answered_for_one_recipient_only(inbox: InboxStore) -> None:
    row = (await inbox.keep(arrival("one", "secret plans", context="plans"))).row
    await inbox.keep(arrival("answer", "secret reply", reply_to="one"))
    await inbox.quarantine("main", "bob", b"garbage", "does not open")
    receipts = await inbox.read(inbox_views.receipts_to_tell, "main", "bob")
    assert receipts
    for space, other in (("main", "eve"), ("side", "bob"), ("main", ""), ("main", "%")):
        assert await inbox.read(inbox_views.listed, space, other) == []
        assert await inbox.search(space, other, "secret") == []
        assert await inbox.read(inbox_views.thread, space, other, "one") == []
        assert await inbox.read(inbox_views.aside, space, other) == []
        assert await inbox.read(inbox_views.receipts_to_tell, space, other) == []
        assert await inbox.mark_read(space, other, [row]) == 0
        assert await inbox.delete(space, other, [row]) == 0
        await inbox.told(space, other, receipts)
    assert await ids(inbox, unread=True) == ["one", "answer"]
    assert await inbox.read(inbox_views.receipts_to_tell, "main", "bob") == receipts


async def test_pages_and_filters(inbox: InboxStore) -> None:
    await inbox.keep(arrival("c1", channel="general"))
    await inbox.keep(arrival("c2", channel="ops", sender="eve"))
    third = (await inbox.keep(arrival("d1"))).row
    await inbox.keep(arrival("d2", sender="eve"))
    assert await ids(inbox) == ["c1", "c2", "d1", "d2"]
    assert await ids(inbox, direct_first=True) == ["d1", "d2", "c1", "c2"]
    assert await ids(inbox, channel="ops") == ["c2"]
    assert await ids(inbox, sender="eve") == ["c2", "d2"]
    assert await ids(inbox, kind="direct", limit=1) == ["d1"]
    assert await ids(inbox, after=third) == ["d2"]
    assert await ids(inbox, before=third, newest=True, limit=1) == ["c2"]
    await inbox.mark_read("main", "bob", [third])
    assert await ids(inbox, unread=True) == ["c1", "c2", "d2"]


async def test_read_is_said_once_and_stays(inbox: InboxStore, clock: Clock) -> None:
    rows = [(await inbox.keep(arrival(f"{n}"))).row for n in range(3)]
    assert await inbox.read(inbox_views.unread_counts) == {("main", "bob", "direct"): 3}
    assert await inbox.mark_read("main", "bob", rows[:2]) == 2
    clock.seconds += 60
    assert await inbox.mark_read("main", "bob", rows) == 1
    assert [row.read_at for row in await inbox.read(inbox_views.listed, "main", "bob")] == [NOW, NOW, NOW + 60_000]
    assert await inbox.read(inbox_views.unread_counts) == {}


async def test_what_is_deleted_is_gone_read_or_not_and_does_not_come_again(inbox: InboxStore) -> None:
    rows = [(await inbox.keep(arrival(name, f"words of {name}"))).row for name in ("one", "two", "three")]
    await inbox.mark_read("main", "bob", rows[:1])
    assert await inbox.delete("main", "bob", [*rows[:2], rows[0], 99]) == 2
    assert await inbox.delete("main", "bob", rows[:2]) == 0, "once"
    assert await ids(inbox) == ["three"]
    assert [row.id for row in await inbox.search("main", "bob", "words")] == ["three"]
    assert await inbox.read(inbox_views.thread, "main", "bob", "one") == []
    assert await inbox.read(inbox_views.unread_counts) == {("main", "bob", "direct"): 1}
    again = await inbox.keep(arrival("two", "words of two"))
    assert (again.row, again.new) == (rows[1], False)
    assert await ids(inbox) == ["three"]
    assert len(await inbox.read(inbox_views.receipts_to_tell, "main", "bob")) == 3, "that it came is told all the same"


async def test_expiry_never_removes_unread_mail_and_once_stays_once(inbox: InboxStore, clock: Clock) -> None:
    old = (await inbox.keep(arrival("read", "readable words"))).row
    await inbox.keep(arrival("unread", "unread words"))
    await inbox.mark_read("main", "bob", [old])
    clock.seconds += 40 * DAY / 1000
    await inbox.keep(arrival("new"))
    assert await inbox.expire(30 * DAY) == 1
    assert await inbox.expire(30 * DAY) == 0
    assert await ids(inbox) == ["unread", "new"]
    assert await found(inbox, "words") == ["unread"]
    assert not (await inbox.keep(arrival("read", "readable words"))).new


async def test_words_are_found_newest_first(inbox: InboxStore) -> None:
    await inbox.keep(arrival("1", "the deploy failed at noon"))
    await inbox.keep(arrival("2", "Deploy again, please"))
    await inbox.keep(arrival("3", "lunch?"))
    assert await found(inbox, "deploy") == ["2", "1"]
    assert await found(inbox, "noon deploy") == ["1"]
    assert await found(inbox, "dep") == ["2", "1"]
    assert await found(inbox, "  ") == []


COMMANDS = (
    '"',
    "w*",
    "NEAR(",
    "x OR y",
    "-w",
    "^",
    "%",
    "_",
    "\\",
    "'; DROP TABLE inbox; --",
    "text:x",
    "\x00",
    "((",
    "{}",
)


@pytest.mark.parametrize("text", COMMANDS)
async def test_nothing_in_a_search_is_a_command(inbox: InboxStore, text: str) -> None:
    await inbox.keep(arrival("1", "x and y and z"))
    assert await found(inbox, text) == []
    await inbox.keep(arrival("2", "x or y, text x, a, near"))
    assert set(await found(inbox, text)) <= {"2"}


@given(st.text())
def test_any_text_can_be_searched_for(text: str) -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.executescript(SCHEMA.sql)
        words = module.prepare_search(connection)
        module.keep(connection, arrival("1", "hello there"), NOW, words=words)
        for indexed in {words, False}:
            module.search(connection, "main", "bob", text.encode(errors="ignore").decode(), words=indexed)


@pytest.mark.parametrize("inbox", [True], ids=["fts5"], indirect=True)
async def test_what_was_kept_without_the_index_is_found_once_there_is_one(inbox: InboxStore) -> None:
    without = InboxStore(inbox.database, words=False)
    await without.keep(arrival("1", "kept by another SQLite"))
    assert await found(inbox, "another") == []
    again = await InboxStore.open(inbox.database)
    assert await found(again, "another") == ["1"]


async def test_a_thread_is_what_it_answers_what_answers_it_and_its_context(inbox: InboxStore) -> None:
    await inbox.keep(arrival("root"))
    await inbox.keep(arrival("reply", reply_to="root"))
    await inbox.keep(arrival("deeper", reply_to="reply", context="lunch"))
    await inbox.keep(arrival("beside", context="lunch"))
    await inbox.keep(arrival("other", reply_to="elsewhere"))
    await inbox.keep(arrival("loop", reply_to="loop"))
    shown = {
        row: [one.id for one in await inbox.read(inbox_views.thread, "main", "bob", row)]
        for row in ("root", "deeper", "loop", "mine")
    }
    assert shown["root"] == ["root", "reply", "deeper"]
    assert shown["deeper"] == ["root", "reply", "deeper", "beside"]
    assert shown["loop"] == ["loop"]
    assert shown["mine"] == []
    await inbox.keep(arrival("to me", reply_to="mine"))
    assert [one.id for one in await inbox.read(inbox_views.thread, "main", "bob", "mine")] == ["to me"]


async def test_what_cannot_be_opened_is_kept_aside_once_with_its_reason(inbox: InboxStore) -> None:
    assert (await inbox.quarantine("main", "bob", b"\x00garbage", "no such key")).new
    assert not (await inbox.quarantine("main", "bob", b"\x00garbage", "no such key")).new
    (aside,) = await inbox.read(inbox_views.aside, "main", "bob")
    assert (aside.raw, aside.reason) == (b"\x00garbage", "no such key")
    assert await ids(inbox) == []


async def test_receipts_are_told_until_they_were_taken_and_never_go_back(inbox: InboxStore) -> None:
    row = (await inbox.keep(arrival("one", seq=41))).row
    await inbox.keep(arrival("posted", channel="general"))
    (delivered,) = await inbox.read(inbox_views.receipts_to_tell, "main", "bob")
    assert (delivered.seq, delivered.stage) == (41, "delivered")
    await inbox.mark_read("main", "bob", [row])
    (read,) = await inbox.read(inbox_views.receipts_to_tell, "main", "bob")
    assert read.stage == "read"
    await inbox.told("main", "bob", [delivered])
    assert await inbox.read(inbox_views.receipts_to_tell, "main", "bob") == [read]
    await inbox.told("main", "bob", [read])
    await inbox.told("main", "bob", [delivered])
    assert await inbox.read(inbox_views.receipts_to_tell, "main", "bob") == []


@pytest.mark.parametrize("linked", ["context", "reply_to"])
async def test_a_message_is_in_its_own_thread_however_long_that_is(inbox: InboxStore, linked: str) -> None:
    number = module.THREAD_SHOWN + 100

    def fill(connection: sqlite3.Connection) -> None:
        for each in range(number):
            link = {"context": "a long talk"} if linked == "context" else {"reply_to": f"m{each - 1}"}
            module.keep(connection, arrival(f"m{each}", **link), NOW, words=inbox.words)

    await inbox.database.write(fill)
    for named in ("m0", "m150", f"m{number - 1}"):
        found = [row.id for row in await inbox.read(inbox_views.thread, "main", "bob", named)]
        assert named in found
        assert len(found) == module.THREAD_SHOWN
        assert found == sorted(found, key=lambda text: int(text[1:])), "oldest first"


async def test_a_conversation_is_walked_by_an_index(inbox: InboxStore) -> None:
    """A chain of answers is as long as its writers like: each step must not read the whole inbox."""
    asked = ("",) * module._THREAD.count("?")

    def plan(connection: sqlite3.Connection) -> list[str]:
        return [str(each[3]) for each in connection.execute("EXPLAIN QUERY PLAN " + module._THREAD, asked)]

    steps = await inbox.database.read(plan)
    assert [each for each in steps if "inbox_kept" in each or each.startswith("SCAN i")] == []


async def test_the_unread_mail_of_one_is_counted_without_reading_that_of_others(inbox: InboxStore) -> None:
    for number, recipient in enumerate(("bob", "bob", "eve")):
        await inbox.keep(arrival(f"direct {number}", recipient=recipient))
    await inbox.keep(arrival("posted", channel="general"))
    await inbox.mark_read("main", "bob", [1])
    assert await inbox.read(inbox_views.unread_of, "main", "bob") == {"direct": 1, "channel": 1, "notice": 0}
    assert await inbox.read(inbox_views.unread_of, "main", "zoe") == {"direct": 0, "channel": 0, "notice": 0}
    asked: list[str] = []

    def plan(connection: sqlite3.Connection) -> list[str]:
        connection.set_trace_callback(asked.append)
        module.unread_of(connection, "main", "bob")
        connection.set_trace_callback(None)
        (query,) = asked
        return [str(each[3]) for each in connection.execute(f"EXPLAIN QUERY PLAN {query}")]

    assert "SEARCH inbox USING INDEX inbox_unread (space=? AND recipient=?)" in await inbox.database.read(plan)


# --- notices ---

LOST = Notice("lost", "7 messages of general will not come", "general", 10, 20, 7, "cancelled")


async def test_a_notice_is_a_row_of_its_kind_told_once_and_unread_if_something_is_missing(inbox: InboxStore) -> None:
    first = await inbox.keep_notice("main", "bob", LOST)
    again = await inbox.keep_notice("main", "bob", LOST)
    assert (first.new, again.new, again.row) == (True, False, first.row)
    await inbox.keep_notice("main", "bob", Notice("gap", "3 came late", "general", 1, 9, 3, "connection"))
    rows = await inbox.read(inbox_views.listed, "main", "bob", Wanted(kind="notice"))
    assert [(row.text, row.read_at is None, bool(row.wakes)) for row in rows] == [
        ("7 messages of general will not come", True, True),
        ("3 came late", False, False),
    ]
    assert await inbox.read(inbox_views.unread_of, "main", "bob") == {"direct": 0, "channel": 0, "notice": 1}
    assert await inbox.read(inbox_views.receipts_to_tell, "main", "bob") == []
    assert await inbox.read(inbox_views.listed, "main", "eve", Wanted(kind="notice")) == []


# --- how much of one sender ---

SMALL = Bound(rows=3, bytes=1_000, times=2)


@pytest.fixture
def bounded(inbox: InboxStore) -> InboxStore:
    inbox.bound = SMALL
    return inbox


async def notices(inbox: InboxStore) -> list[dict[str, Any]]:
    return [json.loads(row.raw) for row in await inbox.read(inbox_views.listed, "main", "bob", Wanted(kind="notice"))]


async def test_of_one_sender_on_one_channel_so_much_is_kept_and_the_rest_is_told_with_range_and_count(
    bounded: InboxStore,
) -> None:
    kept = [await bounded.keep(arrival(f"{seq}", channel="general", seq=seq)) for seq in range(1, 11)]
    assert [each.kept for each in kept] == [True] * 3 + [False] * 7
    other = await bounded.keep(arrival("other", channel="general", sender="eve", seq=11))
    assert other.new, "one sender takes nobody else's room"
    assert (await bounded.keep(arrival("2", channel="general", seq=2))).kept, "what came before is no loss"
    assert not (await bounded.keep(arrival("7", channel="general", seq=7))).kept, "and what comes again counts once"
    assert await bounded.tell_overflow("main", "bob") == 1
    assert await bounded.tell_overflow("main", "bob") == 0, "told once"
    (told,) = await notices(bounded)
    assert (told["kind"], told["channel"], told["first"], told["last"], told["count"]) == ("flood", "general", 4, 10, 7)
    await bounded.keep(arrival("12", channel="general", seq=12))
    await bounded.tell_overflow("main", "bob")
    assert [(each["first"], each["last"], each["count"]) for each in await notices(bounded)] == [
        (4, 10, 7),
        (12, 12, 1),
    ]


async def test_what_there_is_no_room_for_is_counted_in_whatever_order_it_comes_and_after_the_log_went_backwards(
    bounded: InboxStore,
) -> None:
    for seq in range(1, 4):
        await bounded.keep(arrival(f"{seq}", channel="general", seq=seq))
    for seq in (9, 6, 7, 9, 6):
        assert not (await bounded.keep(arrival(f"{seq}", channel="general", seq=seq))).kept
    await bounded.tell_overflow("main", "bob")
    for ident, seq in (("5", 5), ("7", 7), ("another with a sequence of before", 9)):
        assert not (await bounded.keep(arrival(ident, channel="general", seq=seq))).kept
    await bounded.tell_overflow("main", "bob")
    assert [(each["first"], each["last"], each["count"]) for each in await notices(bounded)] == [(6, 9, 3), (5, 9, 2)]


async def test_what_was_not_kept_is_remembered_in_bounds(bounded: InboxStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidings.host.inbox.NOT_KEPT_KNOWN", 4)
    for seq in range(1, 20):
        await bounded.keep(arrival(f"{seq}", channel="general", seq=seq))
    known = await bounded.database.read(lambda c: c.execute("SELECT id FROM inbox_not_kept ORDER BY row").fetchall())
    assert known == [("16",), ("17",), ("18",), ("19",)]


async def test_what_was_read_makes_room_before_anything_is_refused(bounded: InboxStore) -> None:
    rows = [(await bounded.keep(arrival(f"{seq}", channel="general", seq=seq))).row for seq in range(1, 4)]
    await bounded.mark_read("main", "bob", rows[:2])
    assert (await bounded.keep(arrival("4", channel="general", seq=4))).new
    assert await ids(bounded) == ["2", "3", "4"]
    assert not (await bounded.keep(arrival("1", channel="general", seq=1))).new, "that it came is never forgotten"


async def test_bytes_and_the_channels_of_a_sender_together_are_bounded_too(bounded: InboxStore) -> None:
    assert (await bounded.keep(arrival("large", "x" * 400, channel="a", seq=1))).kept
    assert not (await bounded.keep(arrival("larger", "x" * 400, channel="a", seq=2))).kept
    spread = [await bounded.keep(arrival(f"c{n}", channel=f"c{n}", seq=3 + n)) for n in range(10)]
    assert sum(each.kept for each in spread) == 5, "six of one sender in all"
    direct = await bounded.keep(arrival("direct", seq=1))
    assert not direct.kept, "direct messages count among them"


async def test_how_much_is_held_of_a_sender_is_what_is_there_whatever_happened(inbox: InboxStore) -> None:
    for number in range(6):
        await inbox.keep(arrival(f"{number}", "text" * number, channel="general" if number % 2 else "side", seq=number))
    await inbox.mark_read("main", "bob", [1, 2, 3])
    assert await inbox.expire(-1) == 3

    def held(connection: sqlite3.Connection) -> tuple[list[Any], list[Any]]:
        counted = connection.execute("SELECT channel, rows, bytes FROM inbox_held WHERE rows > 0 ORDER BY channel")
        there = connection.execute(
            """SELECT channel, count(*), sum(length(raw) + length(text)) FROM inbox WHERE expired_at IS NULL
            GROUP BY channel UNION ALL SELECT '*', count(*), sum(length(raw) + length(text)) FROM inbox
            WHERE expired_at IS NULL ORDER BY 1"""
        )
        return counted.fetchall(), there.fetchall()

    counted, there = await inbox.database.read(held)
    assert counted == there


async def test_of_what_cannot_be_opened_the_newest_is_kept(inbox: InboxStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUARANTINE_ROWS", 3)
    monkeypatch.setattr(module, "QUARANTINE_BYTES", 1_000)
    for number in range(5):
        await inbox.quarantine("main", "bob", f"garbage {number}".encode(), "does not open")
    assert [each.raw for each in await inbox.read(inbox_views.aside, "main", "bob")] == [
        b"garbage 2",
        b"garbage 3",
        b"garbage 4",
    ]
    await inbox.quarantine("main", "bob", b"x" * 2_000, "does not open")
    assert [len(each.raw) for each in await inbox.read(inbox_views.aside, "main", "bob")] == [2_000], (
        "the newest in any case"
    )
