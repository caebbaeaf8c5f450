"""A peer answers what a log can answer, or is refused."""

from __future__ import annotations

import pytest

from tidings.errors import PageRefused
from tidings.links.validation import PAGE_BYTES, agreed_token, check_gap, check_page
from tidings.wire.links import GapKind, LinkedRecord, LinkGap, LinkPage, Token

ASKED = Token(space="APEER", epoch="e1", seq=10, mark="m10")


def record(seq: int, size: int = 10) -> LinkedRecord:
    return LinkedRecord(seq=seq, time_ns=0, origin="APEER", channel="c", sender="U", signature="s", payload=bytes(size))


def page(*records: LinkedRecord, through: int, head: int | None = None, epoch: str = "e1", mark: str = "m") -> LinkPage:
    token = Token(space="APEER", epoch=epoch, seq=through, mark=mark)
    return LinkPage(records=records, through=token, head=through if head is None else head, floor=1)


@pytest.mark.parametrize(
    "good",
    [
        page(through=10, mark="m10"),
        page(through=15, head=90),
        page(record(11), record(15), through=15),
        page(record(12, size=PAGE_BYTES + 1), through=12),
    ],
)
def test_what_a_log_answers_is_taken(good: LinkPage) -> None:
    check_page(ASKED, good)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (page(through=9), "goes back"),
        (page(through=10, head=12, mark="m10"), "does not move"),
        (page(through=10, mark="other"), "another record"),
        (page(through=15, head=14), "ends at"),
        (page(through=15, epoch="e2"), "answers about"),
        (page(record(10), through=15), "comes behind"),
        (page(record(16), through=15), "comes behind"),
        (page(record(12), record(11), through=15), "comes behind"),
        (page(record(12), record(12), through=15), "comes behind"),
        (page(record(11, size=PAGE_BYTES), record(12), through=15), "bytes"),
        (page(record(11, size=5 * PAGE_BYTES), through=15), "bytes"),
        (page(*map(record, range(11, 16)), through=15), "at most 4"),
    ],
)
def test_what_no_log_answers_is_refused(bad: LinkPage, why: str) -> None:
    with pytest.raises(PageRefused, match=why):
        check_page(ASKED, bad, limit=4)


def gap(kind: GapKind, oldest: int = 0, head: int = 50, epoch: str = "e1", agreed: int = 0) -> LinkGap:
    return LinkGap(kind=kind, oldest=oldest, head=head, epoch=epoch, agreed=agreed)


@pytest.mark.parametrize(
    "bad",
    [
        gap(GapKind.TOO_OLD, oldest=10),
        gap(GapKind.TOO_OLD, oldest=51),
        gap(GapKind.TOO_OLD, oldest=20, epoch="e2"),
        gap(GapKind.TOO_NEW, head=10),
        gap(GapKind.EPOCH),
        gap(GapKind.RECORD, epoch="e2"),
        gap(GapKind.EPOCH, epoch="e2", agreed=51),
        gap(GapKind.EPOCH, epoch="e2", agreed=-1),
    ],
)
def test_a_gap_that_contradicts_itself_is_refused(bad: LinkGap) -> None:
    with pytest.raises(PageRefused):
        check_gap(ASKED, bad)


@pytest.mark.parametrize(
    ("good", "agreed"),
    [
        (gap(GapKind.EPOCH, epoch="e2", agreed=7), 7),
        (gap(GapKind.EPOCH, epoch="e2", agreed=30), 10),
        (gap(GapKind.TOO_NEW, head=5, agreed=5), 5),
        (gap(GapKind.RECORD, agreed=10), 9),
    ],
)
def test_after_a_gap_it_begins_where_the_log_is_the_one_it_knew(good: LinkGap, agreed: int) -> None:
    check_gap(ASKED, good)
    assert agreed_token(ASKED, good) == Token(space="APEER", epoch=good.epoch, seq=agreed)
