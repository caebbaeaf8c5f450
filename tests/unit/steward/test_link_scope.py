"""What goes over a link, and why nothing can follow a token: pure, by the rules in force."""

from typing import Any

import pytest

from tidings.contract.links import LinkPageRequest
from tidings.links.source import read_page
from tidings.model.rulebook import Rulebook
from tidings.steward.link_handlers import LogFacts, gap_before_reading
from tidings.steward.link_scope import MOST_FILTERS, LinkScope, identity_of, minimal
from tidings.wire import message as wire_message
from tidings.wire.links import GapKind, LinkedRecord, LinkPage, Token, origin_fields
from tidings.wire.message import MAX_PAYLOAD
from tidings.wire.records import StoredRecord, encode_headers
from tidings.wire.rulings import Access, Link, Space
from tidings.wire.signing import ACCOUNT, KeyPair
from tidings.wire.subjects import Subjects
from tidings_testing.links.peer import page_fields, record_row
from tools.typed_answers import typed_answer

MAIN, HERE = Subjects("main"), KeyPair.generate(ACCOUNT).id
THERE, FAR = KeyPair.generate(ACCOUNT).id, KeyPair.generate(ACCOUNT).id
ADA, EVE = KeyPair.generate().id, KeyPair.generate().id


def link(name: str = "there", **fields: Any) -> Link:
    known = {"origin": THERE, "channels": {}, "shares": ("general", "team.>"), **fields}
    return Link(op="-", link=name, state="on", **known)


def rules() -> Rulebook:
    book = Rulebook("LOG_main")
    book.put_access(ADA, 1, Access(op="-", name="ada", post=(">",)))
    book.put_link(2, link("there", channels={"general": "general"}, hops=8))
    book.put_link(3, link("far", origin=FAR, channels={"theirs": "general"}, hops=8))
    return book


def scope(**fields: Any) -> LinkScope:
    return LinkScope(MAIN, HERE, rules(), "there", link(**fields))


def stored(subject: str, payload: bytes | None = None, *fields: tuple[str, str], seq: int = 10) -> StoredRecord:
    body = wire_message.compose(wire_message.Sender(ADA, "ada"), text="hi").raw if payload is None else payload
    return StoredRecord(seq, 1_000_000_000, subject, encode_headers(fields or [("Td-Sig", "x")]), body)


def via(name: str, origin: str, theirs: str, hops: int = 1) -> StoredRecord:
    fields = [("Td-Sig", "x"), *origin_fields(origin, theirs, hops)]
    return stored(MAIN.via(name, ADA, "general"), None, *fields)


def test_a_message_in_a_shared_channel_goes_as_it_is() -> None:
    record = stored(MAIN.chat(ADA, "team.a"))
    found = scope().shared(record)
    assert found is not None
    assert (found.origin, found.channel, found.sender, found.hops) == (HERE, "team.a", ADA, 1)
    assert (found.payload, found.signature, found.seq) == (record.payload, "x", 10)


@pytest.mark.parametrize(
    "record",
    [
        stored(MAIN.chat(ADA, "secret")),
        stored(MAIN.chat(ADA, "team")),
        stored(MAIN.chat(EVE, "general"), wire_message.compose(wire_message.Sender(EVE, "eve"), text="hi").raw),
        stored(MAIN.chat(ADA, "general"), b"{}"),
        stored(MAIN.chat(ADA, "general"), b"x" * (MAX_PAYLOAD + 1)),
        stored(MAIN.chat(ADA, "general"), wire_message.compose(wire_message.Sender(EVE, "eve"), text="hi").raw),
        stored(MAIN.chat(ADA, "general"), None, ("Nats-Msg-Id", "unsigned")),
        stored(MAIN.chat(ADA, "general"), None, ("Td-Sig", "x"), ("Td-Sig", "y")),
        stored(MAIN.chat(ADA, "general"), None, ("Td-Sig", "x"), ("Nats-TTL", "1s")),
        stored(MAIN.space_record),
        stored("td.main.chat.general"),
    ],
    ids=range(11),
)
def test_what_is_not_shared_or_does_not_count_does_not_go(record: StoredRecord) -> None:
    assert scope().shared(record) is None


def test_a_day_that_no_calendar_has_does_not_go() -> None:
    payload = wire_message.compose(wire_message.Sender(ADA, "ada"), text="hi").raw
    ts = identity_of(payload)
    assert ts is not None
    odd = payload.replace(ts.ts.encode(), b"2025-02-30T00:00:00.000Z")
    assert identity_of(odd) is None, "it is no message, so every message has its day"
    assert scope().shared(stored(MAIN.chat(ADA, "general"), odd)) is None


@pytest.mark.parametrize(
    ("record", "hops", "goes"),
    [
        (via("far", FAR, "theirs"), 1, None),
        (via("far", FAR, "theirs"), 2, 2),
        (via("far", FAR, "theirs", 2), 2, None),
        (via("far", FAR, "theirs", 2), 3, 3),
        (via("far", FAR, "theirs", 8), 8, None),
        (via("far", FAR, "other"), 8, None),
        (via("far", HERE, "theirs"), 8, None),
        (via("there", THERE, "general"), 8, None),
        (via("unknown", FAR, "theirs"), 8, None),
    ],
    ids=range(9),
)
def test_what_came_over_a_link_goes_on_as_far_as_agreed_and_never_back(
    record: StoredRecord, hops: int, goes: int | None
) -> None:
    found = scope(hops=hops).shared(record)
    assert (found.hops if found else None) == goes
    if found is not None:
        assert (found.origin, found.channel) == (FAR, "theirs")


def test_words_of_the_peer_that_came_around_do_not_go_back() -> None:
    book = rules()
    book.put_link(4, link("far", origin=FAR, channels={}, beyond={THERE: {"general": "general"}}, hops=8))
    around = via("far", THERE, "general", 2)
    assert LinkScope(MAIN, HERE, book, "there", link(hops=8)).shared(around) is None
    assert LinkScope(MAIN, HERE, book, "third", link("third", origin=HERE, hops=8)).shared(around) is not None


def test_only_what_may_be_shared_is_read() -> None:
    assert minimal(("a", "b.>", "b.c", "a", "b.*")) == ["a", "b.>"]
    assert scope(shares=("a", "b.>", "b.c")).filters() == ["td.main.chat.*.a", "td.main.chat.*.b.>"]
    assert scope(shares=("a",), hops=2).filters() == ["td.main.chat.*.a", "td.main.via.*.*.a"]
    assert scope(shares=tuple(f"c{n}" for n in range(MOST_FILTERS + 1))).filters() == ["td.main.chat.*.>"]
    assert scope(shares=("a", "b.>")).filters("b.c") == ["td.main.chat.*.b.c"]
    assert scope(shares=("a", "b.>")).filters("c") == []
    assert scope(shares=()).filters() == []


FACTS = LogFacts(HERE, "now", 10, 50)


@pytest.mark.parametrize(
    ("token", "agreed", "kind", "known"),
    [
        (("now", 20), None, None, 0),
        (("now", 9), None, None, 0),
        (("now", 50), None, None, 0),
        (("now", 51), None, GapKind.TOO_NEW, 0),
        (("now", 8), None, GapKind.TOO_OLD, 8),
        (("now", 0), None, GapKind.TOO_OLD, 0),
        (("before", 20), 15, GapKind.EPOCH, 15),
        (("before", 12), 15, GapKind.EPOCH, 12),
        (("before", 90), 0, GapKind.EPOCH, 0),
        (("before", 0), 0, GapKind.EPOCH, 0),
        (("", 0), 0, GapKind.TOO_OLD, 0),
    ],
)
def test_why_nothing_follows_a_token(
    token: tuple[str, int], agreed: int | None, kind: GapKind | None, known: int
) -> None:
    gap = gap_before_reading(Token(space=HERE, epoch=token[0], seq=token[1]), FACTS, agreed)
    assert (gap.kind if gap else None) == kind
    if gap is not None:
        assert (gap.oldest, gap.head, gap.epoch, gap.agreed) == (9, 50, "now", known)


def test_a_token_of_another_space_is_never_compared() -> None:
    gap = gap_before_reading(Token(space=THERE, epoch="now", seq=20), FACTS, None)
    assert gap is not None
    assert gap.kind is GapKind.STREAM


def test_a_page_is_read_as_it_was_written() -> None:
    record = LinkedRecord(
        seq=2**53 - 1,
        time_ns=1_795_000_000_123_456_789,
        origin=HERE,
        channel="general",
        sender=ADA,
        signature="x",
        payload=b"\x00\xff",
        hops=2,
        mark="m",
    )
    page = LinkPage(records=(record,), through=Token(space=HERE, epoch="e", seq=5, mark="m"), head=9, floor=1)
    assert read_page(typed_answer(LinkPageRequest(), page_fields(page))) == page
    assert record_row(record)["time"] == "2026-11-18T11:06:40.123456789Z"
    gap = gap_before_reading(Token(space=THERE, epoch="now", seq=20), FACTS, None)
    other = LinkPage(records=(), through=page.through, head=9, floor=1, gap=gap)
    assert read_page(typed_answer(LinkPageRequest(), page_fields(other))) == other


def test_listed_channels_count_for_what_goes_out_too() -> None:
    book = rules()
    book.put_space(5, Space(op="-", channels="listed"))
    assert LinkScope(MAIN, HERE, book, "there", link()).shared(stored(MAIN.chat(ADA, "general"))) is None
