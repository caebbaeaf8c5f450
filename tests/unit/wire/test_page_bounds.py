"""Pages of a link as another space may write them: what is no page is refused before anything is made of it."""

from typing import Any

import pytest

from tidings.errors import MalformedRecord
from tidings.wire.link_exchange import LONGEST, page_fields, read_page
from tidings.wire.links import GapKind, LinkedRecord, LinkGap, LinkPage, Token

RECORD = LinkedRecord(
    seq=5, time_ns=1, origin="o", channel="general", sender="s", signature="x", payload=b"{}", mark="m"
)


def page(**changes: Any) -> dict[str, Any]:
    through = Token(space="A", epoch="e", seq=5, mark="m")
    return page_fields(LinkPage(records=(RECORD,), through=through, head=9, floor=1)) | changes


def row(**changes: Any) -> dict[str, Any]:
    fields = page()
    return fields | {"records": [fields["records"][0] | changes]}


def test_a_page_is_read_as_it_was_written() -> None:
    found = read_page(page())
    assert (found.records, found.head, found.floor, found.gap) == ((RECORD,), 9, 1, None)


@pytest.mark.parametrize("name", ["origin", "channel", "sender", "sig", "mark", "time"])
def test_no_name_in_a_record_is_longer_than_names_are(name: str) -> None:
    with pytest.raises(MalformedRecord):
        read_page(row(**{name: "x" * (LONGEST + 1)}))


@pytest.mark.parametrize("name", ["space", "epoch", "mark"])
def test_no_name_in_a_token_is_longer_than_names_are(name: str) -> None:
    """It is kept, and sent with the next question: a longer one would not fit into it, and end the link for good."""
    with pytest.raises(MalformedRecord):
        read_page(page(through=page()["through"] | {name: "x" * (LONGEST + 1)}))


def test_nor_is_the_epoch_of_a_gap() -> None:
    gap = LinkGap(kind=GapKind.EPOCH, oldest=0, head=9, epoch="x" * (LONGEST + 1))
    fields = {"kind": gap.kind.value, "oldest": 0, "head": 9, "epoch": gap.epoch, "agreed": 0}
    with pytest.raises(MalformedRecord):
        read_page(page(gap=fields))


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00.000000000Z", "1969-12-31T23:59:59.9Z", "9999-12-31T23:59:59Z"])
def test_a_time_that_no_ledger_can_keep_is_refused(time: str) -> None:
    with pytest.raises(MalformedRecord, match="was said at"):
        read_page(row(time=time))
