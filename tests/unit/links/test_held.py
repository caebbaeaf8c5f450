"""What the ledger holds, compared by digests with a peer that holds the same, less, or more."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tidings.links import link_store as books
from tidings.links.compare import Comparison
from tidings.links.definition import LinkDefinition
from tidings.links.held import HeldRecords
from tidings.links.link_store import BookedLink, Disposed
from tidings.links.ports import OriginIdentity
from tidings.links.schema import SCHEMA
from tidings.util.database import Database
from tidings.wire.digests import BucketsAnswer, DigestAnswer, IdsAnswer
from tidings.wire.ids import new_id
from tidings.wire.keys import KeyPair
from tidings.wire.links import LinkedRecord, Token

HERE, PEER = "AHERE", "APEER"
ADA = KeyPair.generate().id
TAKES = LinkDefinition(link="l1", space=HERE, peer=PEER, authority="a1", channels={"general": "acme"})


def token(seq: int) -> Token:
    return Token(space=PEER, epoch="e1", seq=seq, mark=f"m{seq}" if seq else "")


def record(seq: int, kind: str = "admitted", channel: str = "general", day: str = "2025-11-15") -> Disposed:
    payload = f"payload {seq}".encode()
    raw = LinkedRecord(seq=seq, time_ns=seq, origin=PEER, channel=channel, sender=ADA, signature="s", payload=payload)
    return Disposed(
        seq=seq,
        identity=OriginIdentity(PEER, ADA, new_id()),
        channel=channel,
        hash=hashlib.sha256(payload).hexdigest(),
        day=day,
        kind=kind,  # type: ignore[arg-type]
        reason={"omitted": "not_shared", "quarantined": "signature"}.get(kind, ""),
        local_seq=1_000 + seq if kind in ("admitted", "duplicate") else None,
        record=raw if kind == "quarantined" else None,
    )


class AnotherLedger:
    """A peer that answers from a ledger of its own, from a floor on."""

    def __init__(self, held: HeldRecords, floor: int = 1) -> None:
        self.held, self.floor = held, floor

    async def digest(self, through: int) -> DigestAnswer:
        return await self.held.digest(through, floor=self.floor)

    async def buckets(self, channel: str, day: str, through: int) -> BucketsAnswer:
        return await self.held.buckets(channel, day, through, floor=self.floor)

    async def ids(self, channel: str, day: str, buckets: list[int], through: int, after: int) -> IdsAnswer:
        return await self.held.ids(channel, day, buckets, through, after, floor=self.floor)


@pytest.fixture
def databases(tmp_path: Path) -> Iterator[list[Database]]:
    found = [Database(tmp_path / str(number) / "links.db", SCHEMA) for number in range(2)]
    yield found
    for each in found:
        each.close()


async def held(database: Database, records: list[Disposed], through: int) -> HeldRecords:
    link = await database.write(lambda c: books.open_link(c, TAKES, b"s" * 32, 1))
    await database.write(lambda c: books.begin(c, link.row, token(0)))
    await database.write(lambda c: books.commit_page(c, link.row, token(0), token(through), records, 1))
    return HeldRecords(BookedLink(database, link.row))


async def test_whatever_became_of_records_both_sides_are_equal(databases: list[Database]) -> None:
    kinds = ["admitted", "duplicate", "omitted", "quarantined"]
    records = [record(seq, kinds[seq % 4], day=f"2025-11-{10 + seq % 3}") for seq in range(1, 40)]
    plain = [
        msgspec.structs.replace(each, kind="admitted", reason="", local_seq=each.seq, record=None) for each in records
    ]
    ours, theirs = await held(databases[0], records, 50), await held(databases[1], plain, 50)
    found = await Comparison(ours, AnotherLedger(theirs)).divergence(50)  # type: ignore[arg-type]
    assert found.days == ()


async def test_what_one_side_lacks_is_named_and_what_lies_below_the_floor_is_not(databases: list[Database]) -> None:
    records = [record(seq, channel=("general", "team")[seq % 2]) for seq in range(1, 301)]
    ours = await held(databases[0], [each for each in records if each.seq not in (3, 100, 201)], 300)
    theirs = await held(databases[1], [each for each in records if each.seq != 50], 300)
    comparison = Comparison(ours, AnotherLedger(theirs, floor=10))  # type: ignore[arg-type]
    found = [each async for each in comparison.differences(300)]
    assert sorted(one.seq for each in found for one in each.lacking) == [100, 201]
    assert [(each.channel, one.seq) for each in found for one in each.extra] == [("general", 50)]


async def test_only_what_is_at_or_before_the_end_counts(databases: list[Database]) -> None:
    records = [record(seq) for seq in range(1, 11)]
    ours = await held(databases[0], records, 10)
    assert (await ours.digest(4, floor=1)).channels["general"]["2025-11-15"].count == 4
    assert sum(each.count for each in (await ours.buckets("general", "2025-11-15", 10, floor=6)).buckets) == 5
    every = await ours.ids("general", "2025-11-15", range(256), 10, 7, floor=1)
    assert ([each.seq for each in every.ids], every.more) == ([8, 9, 10], False)
    above = await ours.ids("general", "2025-11-15", range(256), 10, 7, floor=9)
    assert [each.seq for each in above.ids] == [9, 10]
