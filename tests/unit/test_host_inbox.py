"""The inbox of a host: each message once for each recipient, and nobody reads another's."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hosted import NOW, arrival
from tidings.host import inbox as module
from tidings.host.inbox import InboxStore, Wanted
from tidings.host.schema import MIGRATIONS
from tidings.store.database import Database

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
    database = Database(tmp_path / "host.db", MIGRATIONS, clock=clock)
    store = await InboxStore.open(database)
    assert store.words == request.param
    yield store
    database.close()


async def ids(inbox: InboxStore, recipient: str = "bob", **wanted: Any) -> list[str]:
    return [row.id for row in await inbox.listed("main", recipient, Wanted(**wanted))]


async def found(inbox: InboxStore, text: str, recipient: str = "bob") -> list[str]:
    return [row.id for row in await inbox.search("main", recipient, text)]


async def test_a_message_that_comes_again_is_not_new(inbox: InboxStore) -> None:
    first = await inbox.keep(arrival("one"))
    again = await inbox.keep(arrival("one", "other text"))
    assert first.new
    assert (again.row, again.new) == (first.row, False)
    assert [row.text for row in await inbox.listed("main", "bob")] == ["hello"]


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
    receipts = await inbox.receipts_to_tell("main", "bob")
    assert receipts
    for space, other in (("main", "eve"), ("side", "bob"), ("main", ""), ("main", "%")):
        assert await inbox.listed(space, other) == []
        assert await inbox.search(space, other, "secret") == []
        assert await inbox.thread(space, other, "one") == []
        assert await inbox.in_context(space, other, "plans") == []
        assert await inbox.aside(space, other) == []
        assert await inbox.receipts_to_tell(space, other) == []
        assert await inbox.mark_read(space, other, [row]) == 0
        await inbox.told(space, other, receipts)
    assert await ids(inbox, unread=True) == ["one", "answer"]
    assert await inbox.receipts_to_tell("main", "bob") == receipts


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
    assert await inbox.unread_counts() == {("main", "bob", "direct"): 3}
    assert await inbox.mark_read("main", "bob", rows[:2]) == 2
    clock.seconds += 60
    assert await inbox.mark_read("main", "bob", rows) == 1
    assert [row.read_at for row in await inbox.listed("main", "bob")] == [NOW, NOW, NOW + 60_000]
    assert await inbox.unread_counts() == {}


async def test_expiry_never_removes_unread_mail_unless_told_and_once_stays_once(
    inbox: InboxStore, clock: Clock
) -> None:
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
    assert await inbox.expire(30 * DAY, unread_too=True) == 1
    assert await ids(inbox) == ["new"]
    assert await found(inbox, "words") == []


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
        connection.executescript(MIGRATIONS.steps[0])
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
        row: [one.id for one in await inbox.thread("main", "bob", row)] for row in ("root", "deeper", "loop", "mine")
    }
    assert shown["root"] == ["root", "reply", "deeper"]
    assert shown["deeper"] == ["root", "reply", "deeper", "beside"]
    assert shown["loop"] == ["loop"]
    assert shown["mine"] == []
    await inbox.keep(arrival("to me", reply_to="mine"))
    assert [one.id for one in await inbox.thread("main", "bob", "mine")] == ["to me"]
    assert [one.id for one in await inbox.in_context("main", "bob", "lunch")] == ["deeper", "beside"]


async def test_what_cannot_be_opened_is_kept_aside_once_with_its_reason(inbox: InboxStore) -> None:
    assert (await inbox.quarantine("main", "bob", b"\x00garbage", "no such key")).new
    assert not (await inbox.quarantine("main", "bob", b"\x00garbage", "no such key")).new
    (aside,) = await inbox.aside("main", "bob")
    assert (aside.raw, aside.reason) == (b"\x00garbage", "no such key")
    assert await ids(inbox) == []


async def test_receipts_are_told_until_they_were_taken_and_never_go_back(inbox: InboxStore) -> None:
    row = (await inbox.keep(arrival("one", seq=41))).row
    await inbox.keep(arrival("posted", channel="general"))
    (delivered,) = await inbox.receipts_to_tell("main", "bob")
    assert (delivered.seq, delivered.stage) == (41, "delivered")
    await inbox.mark_read("main", "bob", [row])
    (read,) = await inbox.receipts_to_tell("main", "bob")
    assert read.stage == "read"
    await inbox.told("main", "bob", [delivered])
    assert await inbox.receipts_to_tell("main", "bob") == [read]
    await inbox.told("main", "bob", [read])
    await inbox.told("main", "bob", [delivered])
    assert await inbox.receipts_to_tell("main", "bob") == []


@pytest.mark.parametrize("linked", ["context", "reply_to"])
async def test_a_message_is_in_its_own_thread_however_long_that_is(inbox: InboxStore, linked: str) -> None:
    number = module.THREAD_SHOWN + 100

    def fill(connection: sqlite3.Connection) -> None:
        for each in range(number):
            link = {"context": "a long talk"} if linked == "context" else {"reply_to": f"m{each - 1}"}
            module.keep(connection, arrival(f"m{each}", **link), NOW, words=inbox.words)

    await inbox.database.write(fill)
    for named in ("m0", "m150", f"m{number - 1}"):
        found = [row.id for row in await inbox.thread("main", "bob", named)]
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
    assert await inbox.unread_of("main", "bob") == {"direct": 1, "channel": 1}
    assert await inbox.unread_of("main", "zoe") == {"direct": 0, "channel": 0}
    asked: list[str] = []

    def plan(connection: sqlite3.Connection) -> list[str]:
        connection.set_trace_callback(asked.append)
        module.unread_of(connection, "main", "bob")
        connection.set_trace_callback(None)
        (query,) = asked
        return [str(each[3]) for each in connection.execute(f"EXPLAIN QUERY PLAN {query}")]

    assert "SEARCH inbox USING INDEX inbox_unread (space=? AND recipient=?)" in await inbox.database.read(plan)
