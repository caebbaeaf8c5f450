"""What another space answers is read for what it can be, whatever it says; no broker is needed for that."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tidings.contract.core import Request
from tidings.contract.links import (
    LinkHelloRequest,
    LinkMailRequest,
    LinkPageAnswer,
    LinkPageRequest,
    LinkProgressRequest,
    LinkRosterRequest,
    LinkTasksRequest,
)
from tidings.errors import (
    AuthRevoked,
    DeniedError,
    EndedThere,
    MalformedDigest,
    MalformedRecord,
    OutcomeUnknown,
    PageRefused,
    UnreachableError,
)
from tidings.links.destination import WINDOW, WINDOW_BYTES, _windows
from tidings.links.ports import LinkAdmission
from tidings.links.source import AHEAD_FOR, RENEW_EVERY, PeerSource
from tidings.nats import jwt
from tidings.util.private_files import write_private
from tidings.wire.digests import BucketsAnswer, Digest, DigestAnswer, IdsAnswer, RecordIdentity
from tidings.wire.link_exchange import TASKS_PER_PAGE
from tidings.wire.links import LONGEST, LinkedRecord, LinkPage, Token
from tidings.wire.signing import ACCOUNT, KeyPair
from tidings_testing.links.peer import page_fields
from tools.typed_answers import typed_answer

PAGE: dict[str, Any] = {
    "ok": True,
    "records": [],
    "through": {"space": "A", "epoch": "e", "seq": 1},
    "head": 1,
    "floor": 0,
    "gap": None,
    "granted": 0,
}


def page(**changes: Any) -> bytes:
    return msgspec.json.encode(PAGE | changes)


def refusal(code: str, message: str = "no") -> bytes:
    return msgspec.json.encode({"ok": False, "error": {"code": code, "message": message}})


def source_that_hears(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> PeerSource:
    class Said:
        data = answer

    async def ask(*_arguments: Any, **_how: Any) -> Said:
        return Said()

    user = KeyPair.generate().id
    monkeypatch.setattr("tidings.links.connection.LinkConnection.user", property(lambda _self: user))
    source = PeerSource("nats://127.0.0.1:1", Path("/nowhere"), "main")
    monkeypatch.setattr(source.connection, "ask", ask)
    return source


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"not json", PageRefused),
        (b"[1]", PageRefused),
        (b'{"ok":true}', MalformedRecord),
        (b'{"ok":false}', PageRefused),
        (b'{"ok":true,"records":' + b"[" * 5_000, PageRefused),
        (page(through={"space": "A", "epoch": "e", "seq": -1}), MalformedRecord),
        (page(head=2**60), MalformedRecord),
        (page(records=[{"seq": 1}]), MalformedRecord),
        (page(gap={"kind": "whatever", "oldest": 0, "head": 0, "epoch": "e"}), MalformedRecord),
        (refusal("denied", "no\x1b[31m\n"), DeniedError),
        (refusal(AuthRevoked.code), DeniedError),
        (refusal("conflict", "busy"), UnreachableError),
        (refusal("failed"), UnreachableError),
        (refusal("store_broken", "ours?"), PageRefused),
        (refusal("lease_lost", "ours?"), PageRefused),
        (refusal("x" * 5_000, "y" * 5_000), PageRefused),
    ],
)
async def test_a_hostile_steward_is_taken_for_what_its_answer_can_be(
    answer: bytes, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_that_hears(answer, monkeypatch)
    with pytest.raises(error) as raised:
        await source.page(Token(space="A", epoch="e", seq=0), 10)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 500


async def test_a_peer_that_does_not_know_what_happened_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutcomeUnknown):
        await source_that_hears(refusal(OutcomeUnknown.code), monkeypatch).hello()


RECORD = LinkedRecord(
    seq=5, time_ns=1, origin="o", channel="general", sender="s", signature="x", payload=b"{}", mark="m"
)


def record_page(**changes: Any) -> dict[str, Any]:
    through = Token(space="A", epoch="e", seq=5, mark="m")
    return page_fields(LinkPage(records=(RECORD,), through=through, head=9, floor=1)) | changes


def row(**changes: Any) -> dict[str, Any]:
    fields = record_page()
    return fields | {"records": [fields["records"][0] | changes]}


async def read_page(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> LinkPage:
    answer = msgspec.json.encode({"ok": True, **fields})
    return await source_that_hears(answer, monkeypatch)._page(Token(space="A", epoch="e", seq=0), 10, 0)


async def test_a_page_is_read_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await read_page(record_page(), monkeypatch)
    assert (found.records, found.head, found.floor, found.gap) == ((RECORD,), 9, 1, None)


@pytest.mark.parametrize("name", ["origin", "channel", "sender", "sig", "mark", "time"])
async def test_no_name_in_a_record_is_longer_than_names_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MalformedRecord):
        await read_page(row(**{name: "x" * (LONGEST + 1)}), monkeypatch)


@pytest.mark.parametrize("name", ["space", "epoch", "mark"])
async def test_no_name_in_a_token_is_longer_than_names_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept, and sent with the next question: a longer one would not fit into it, and end the link for good."""
    with pytest.raises(MalformedRecord):
        await read_page(record_page(through=record_page()["through"] | {name: "x" * (LONGEST + 1)}), monkeypatch)


async def test_nor_is_the_epoch_of_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    gap = {"kind": "epoch", "oldest": 0, "head": 9, "epoch": "x" * (LONGEST + 1), "agreed": 0}
    with pytest.raises(MalformedRecord):
        await read_page(record_page(gap=gap), monkeypatch)
    assert (await read_page(record_page(gap=gap | {"epoch": "x"}), monkeypatch)).gap is not None


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00.000000000Z", "1969-12-31T23:59:59.9Z", "9999-12-31T23:59:59Z"])
async def test_a_time_that_no_ledger_can_keep_is_refused(time: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MalformedRecord, match="was said at"):
        await read_page(row(time=time), monkeypatch)


ROSTER = {"people": [], "through": 1, "more": False, "epoch": "", "key": "", "rotations": [], "direct": True}
ROSTER |= {"tasks": False}
HELLO = {"link": "l", "seq": 1, "name": "n", "space": "A", "steward": "U", "epoch": "e", "head": 1, "floor": 1}
HELLO |= {
    "shares": [],
    "hops": 1,
    "until": None,
    "direct": "off",
    "roster": "off",
    "tasks": "off",
    "time": "",
    "jwt": "",
}


@pytest.mark.parametrize(
    ("request_", "fields", "error"),
    [
        (LinkRosterRequest(), {}, MalformedRecord),
        (LinkRosterRequest(), ROSTER | {"people": [{"text": "x"}]}, MalformedRecord),
        (LinkRosterRequest(), ROSTER | {"through": -1}, MalformedRecord),
        (LinkRosterRequest(), ROSTER | {"rotations": [{"seq": 1}]}, MalformedRecord),
        (LinkTasksRequest(), {}, MalformedRecord),
        (LinkTasksRequest(), {"tasks": "x", "more": False}, MalformedRecord),
        (LinkTasksRequest(), {"tasks": [{}] * (TASKS_PER_PAGE + 1), "more": False}, MalformedRecord),
        (LinkMailRequest(), {"mail": []}, MalformedRecord),
        (LinkProgressRequest(), {"refused": []}, MalformedRecord),
        (LinkHelloRequest(), HELLO | {"head": 2**60}, PageRefused),
        (LinkHelloRequest(), HELLO | {"epoch": "x" * (LONGEST + 1)}, PageRefused),
        (LinkHelloRequest(), HELLO | {"jwt": "x" * 30_000}, PageRefused),
        (LinkHelloRequest(), HELLO | {"shares": "\x1b[31m"}, PageRefused),
    ],
)
async def test_an_answer_that_is_none_is_refused(
    request_: Request[Any], fields: dict[str, Any], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error) as raised:
        await source_that_hears(msgspec.json.encode({"ok": True, **fields}), monkeypatch).ask(request_)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 500


SPAN = {"floor": 1, "through": 9}
GOOD_ID = [4, KeyPair.generate().id, "0" * 26, "0" * 64]
ONE = Digest(1, 7).encode()


async def test_digests_are_read_as_they_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    scope = {**SPAN, "channels": {"general": {"2025-11-15": ONE}}, "more": False}
    found = await source_that_hears(msgspec.json.encode({"ok": True, **scope}), monkeypatch).digest(9)
    assert found == DigestAnswer(1, 9, {"general": {"2025-11-15": Digest(1, 7)}})
    buckets = {**SPAN, "buckets": [ONE] * 256}
    heard = source_that_hears(msgspec.json.encode({"ok": True, **buckets}), monkeypatch)
    assert await heard.buckets("general", "2025-11-15", 9) == BucketsAnswer(1, 9, (Digest(1, 7),) * 256)
    ids = {**SPAN, "ids": [GOOD_ID], "more": True}
    heard = source_that_hears(msgspec.json.encode({"ok": True, **ids}), monkeypatch)
    named = RecordIdentity(4, str(GOOD_ID[1]), "0" * 26, bytes(32))
    assert await heard.ids("general", "2025-11-15", [1], 9, 0) == IdsAnswer(1, 9, (named,), more=True)


@pytest.mark.parametrize(
    ("verb", "fields"),
    [
        ("digest", {"floor": 1, "channels": {}, "more": False}),
        ("digest", {"floor": 1, "through": "9", "channels": {}, "more": False}),
        ("digest", {"floor": True, "through": 9, "channels": {}, "more": False}),
        ("digest", {**SPAN, "channels": [], "more": False}),
        ("digest", {**SPAN, "channels": {"general": []}, "more": False}),
        ("digest", {**SPAN, "channels": {"general": {"2025-11-15": 5}}, "more": False}),
        ("digest", {**SPAN, "channels": {"general": {"2025-11-15": [1, "0" * 63]}}, "more": False}),
        ("buckets", {**SPAN, "buckets": [[0, "0" * 64]] * 255}),
        ("buckets", {**SPAN, "buckets": [[0, "0" * 64]] * 257}),
        ("buckets", {**SPAN, "buckets": [[-1, "0" * 64]] * 256}),
        ("ids", {**SPAN, "ids": [GOOD_ID]}),
        ("ids", {**SPAN, "ids": [GOOD_ID[:3]], "more": False}),
        ("ids", {**SPAN, "ids": [[*GOOD_ID[:3], "0" * 62]], "more": False}),
        ("ids", {**SPAN, "ids": [["4", *GOOD_ID[1:]]], "more": False}),
        ("ids", {**SPAN, "ids": [[4, 5, *GOOD_ID[2:]]], "more": False}),
        ("ids", {**SPAN, "ids": GOOD_ID, "more": False}),
    ],
)
async def test_a_digest_of_another_shape_is_refused(
    verb: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_that_hears(msgspec.json.encode({"ok": True, **fields}), monkeypatch)
    asking: dict[str, Callable[[], Awaitable[object]]] = {
        "digest": lambda: source.digest(9),
        "buckets": lambda: source.buckets("general", "2025-11-15", 9),
        "ids": lambda: source.ids("general", "2025-11-15", [1], 9, 0),
    }
    with pytest.raises(MalformedDigest):
        await asking[verb]()


async def test_records_that_were_not_asked_for_cannot_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = msgspec.json.encode({"ok": True, "epoch": "e", "records": [], "missing": [7]})
    with pytest.raises(MalformedRecord):
        await source_that_hears(answer, monkeypatch).fetch([5])
    assert (await source_that_hears(answer, monkeypatch).fetch([5, 7])).missing == (7,)


async def test_a_newer_token_is_asked_for_now_and_then_while_pages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_that_hears(page(), monkeypatch)
    greeted: list[None] = []

    async def hello() -> None:
        greeted.append(None)

    monkeypatch.setattr(source, "hello", hello)
    await source.page(Token(space="A", epoch="e", seq=0), 10)
    assert not greeted
    source._said_at -= RENEW_EVERY + 1
    await source.page(Token(space="A", epoch="e", seq=0), 10)
    assert greeted


class Pages:
    """Another space whose log has so many pages of one record each. `failing`: pages that are refused once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, *failing: int) -> None:
        self.count, self.failing = count, list(failing)
        #: (after, handled) of every question
        self.asked: list[tuple[int, int]] = []
        self.under_way = 0
        self.source = source_that_hears(b"", monkeypatch)
        monkeypatch.setattr(self.source, "ask", self._answer)

    async def _answer(self, request: LinkPageRequest) -> LinkPageAnswer:
        after, handled = request.after, request.handled
        assert handled is not None
        self.asked.append((after, handled))
        assert not self.under_way, "it answers one question at a time"
        self.under_way += 1
        await asyncio.sleep(0)
        self.under_way -= 1
        if after in self.failing:
            self.failing.remove(after)
            raise UnreachableError("not now")
        seq = min(after + 1, self.count)
        changed = {"through": {"space": "A", "epoch": "e", "seq": seq}, "head": self.count}
        return typed_answer(request, PAGE | changed)

    async def page(self, after: int) -> int:
        return (await self.source.page(at(after), 10)).through.seq


def at(seq: int) -> Token:
    return Token(space="A", epoch="e", seq=seq)


async def test_the_page_behind_is_asked_for_while_one_is_handled_and_none_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = Pages(monkeypatch, 4)
    assert [await pages.page(after) for after in range(4)] == [1, 2, 3, 4]
    assert pages.asked == [(0, 0), (1, 0), (2, 1), (3, 2)], "what is handled is never ahead of what was"
    assert await pages.page(4) == 4
    assert pages.asked[-1] == (4, 4), "nothing is behind the end"


async def test_what_comes_ahead_is_prepared_before_it_is_given_out_and_what_does_not_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages, prepared = Pages(monkeypatch, 3), list[object]()

    async def prepare(records: Sequence[LinkedRecord]) -> None:
        await asyncio.sleep(0)
        prepared.append(records)

    monkeypatch.setattr(pages.source, "_prepare", prepare)
    await pages.page(0)
    assert not prepared, "it is wanted now"
    given = [(await pages.source.page(at(after), 10)).records for after in (1, 2)]
    assert [each is known for each, known in zip(given, prepared, strict=True)] == [True, True]


async def test_a_page_that_was_asked_for_ahead_and_is_not_wanted_failed_or_is_old_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = Pages(monkeypatch, 9, 1)
    assert await pages.page(0) == 1
    assert await pages.page(1) == 2, "it failed ahead"
    assert pages.asked == [(0, 0), (1, 0), (1, 1)]
    assert await pages.page(0) == 1, "another one is wanted"
    assert pages.asked[3:] == [(2, 1), (0, 0)]
    assert pages.source._ahead is not None
    pages.source._ahead = pages.source._ahead._replace(at=time.monotonic() - AHEAD_FOR)
    assert await pages.page(1) == 2
    assert pages.asked[5:] == [(1, 0), (1, 1)], "it is old"
    await pages.source.close()


def admission(size: int) -> LinkAdmission:
    record = LinkedRecord(
        seq=1, time_ns=1, origin="A", channel="general", sender="U", signature="x", payload=b"x" * size
    )
    return LinkAdmission(record, "news", "id")


@pytest.mark.parametrize("sizes", [[], [1], [1] * 600, [WINDOW_BYTES, 1, WINDOW_BYTES, WINDOW_BYTES // 2, 1]])
def test_what_is_put_in_at_once_is_bounded_and_nothing_is_left_out(sizes: list[int]) -> None:
    batch = [admission(size) for size in sizes]
    windows = list(_windows(batch))
    assert [each for window in windows for each in window] == batch
    for window in windows:
        size = sum(len(each.record.payload) for each in window)
        assert 1 <= len(window) <= WINDOW
        assert size <= WINDOW_BYTES or len(window) == 1


@pytest.mark.parametrize(
    ("ends", "error", "words"),
    [
        (None, EndedThere, "its operator ended the link"),
        (10**10, EndedThere, "its operator ended the link"),
        (1_000, AuthRevoked, r"held until 1970-01-01 00:16 UTC, and was not renewed in time"),
    ],
)
async def test_a_key_that_is_refused_was_cut_unless_its_time_is_over(
    ends: int | None, error: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = KeyPair.generate()
    token = jwt.encode(KeyPair.generate(ACCOUNT), user.id, "x", {}, iat=1, expires=ends)
    write_private(tmp_path / "creds", jwt.credentials(token, user))
    source = PeerSource("nats://127.0.0.1:1", tmp_path / "creds", "main")

    async def refused(*_arguments: Any, **_how: Any) -> None:
        raise AuthRevoked("the broker refuses")

    monkeypatch.setattr(source.connection, "ask", refused)
    with pytest.raises(error, match=words):
        await source.hello()
