"""The two ends of a link on real brokers: asking another space, and putting into our own what was said there."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from linked_spaces import LINK, is_signed, linked, peer_of, say, texts, unlinked, worker_of
from tidings.contract.admin import EndLinkRequest
from tidings.contract.links import ImportFactsRequest, ImportIndexRequest, ImportLinksRequest
from tidings.errors import (
    AuthRevoked,
    EndedThere,
    LogFull,
    MalformedDigest,
    NotLookedFor,
    OutcomeUnknown,
    TooLarge,
    UnreachableError,
    UsageError,
    WireError,
)
from tidings.links.destination import LocalDestination, LocalSpace
from tidings.links.ports import AdmittedAt, LinkAdmission
from tidings.links.source import PeerSource
from tidings.nats import jwt
from tidings.server.disk import DiskReserve, Room
from tidings.steward import link_handlers, link_wakes
from tidings.util.private_files import write_private
from tidings.wire import message as wire_message
from tidings.wire.digests import Digest, RecordIdentity, item_hash, payload_hash
from tidings.wire.links import LinkedRecord, Token
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually


class Two:
    """Space `main` shares with space `acme`, which lets it in."""

    def __init__(self, main: RealSpace, acme: RealSpace, creds: Path) -> None:
        self.main, self.acme, self.creds = main, acme, creds
        self.woken = 0
        self.epoch = ""
        self.source = PeerSource(main.info.url, creds, "main", on_wake=self._wake)
        self.local = LocalSpace(acme.info.url, acme.home.link_creds, "acme")
        self.destination = LocalDestination(self.local, LINK)

    def _wake(self) -> None:
        self.woken += 1

    async def close(self) -> None:
        await self.source.close()
        await self.local.close()

    async def pages(self, **how: Any) -> list[LinkedRecord]:
        facts = await self.source.hello()
        token = Token(space=facts.space, epoch=facts.epoch, seq=0)
        found: list[LinkedRecord] = []
        while True:
            page = await self.source.page(token, how.get("limit", 500))
            assert page.gap is None
            found += page.records
            if not page.more:
                return found
            token = page.through

    async def admit(self, *records: LinkedRecord, **names: str) -> list[Any]:
        batch = [
            LinkAdmission(each, names.get("ours", "news"), names.get("id") or os.urandom(8).hex()) for each in records
        ]
        if not self.epoch:
            self.epoch = (await self.destination.facts()).epoch
        return list(await self.destination.admit(batch, self.epoch))


@asynccontextmanager
async def two_spaces(root: Path, **terms: Any) -> AsyncIterator[Two]:
    async with real_space(root / "main") as main, real_space(root / "acme", name="acme") as acme:
        made = await linked(main, origin=acme.info.id, shares=["general", "team"], **terms)
        await linked(
            acme,
            origin=main.info.id,
            shares=[],
            make_peer=False,
            channels={"general": "news", "team": "acme-team"},
            space="main",
            steward=main.info.steward_key,
        )
        await main.add("ada", post=["general", "team", "secret"])
        creds = root / "peer.creds"
        write_private(creds, made.creds)
        both = Two(main, acme, creds)
        try:
            yield both
        finally:
            await both.close()


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    async with two_spaces(tmp_path) as both:
        yield both


async def test_what_was_said_in_one_space_is_stored_in_the_other_as_its_sender_signed_it(two: Two) -> None:
    async with two.main.agent("ada") as ada:
        await say(ada, "general", "one", "two")
        await say(ada, "secret", "three")
    records = await two.pages()
    assert all(is_signed(each) for each in records)
    before = await two.destination.facts()
    stored = await two.admit(*records)
    assert [type(each) for each in stored] == [AdmittedAt, AdmittedAt]
    assert [each.duplicate for each in stored] == [False, False]
    after = await two.destination.facts()
    assert (after.space, after.epoch, after.head) == (two.acme.info.id, before.epoch, before.head + 2)
    async with two.acme.core() as js:
        found = [await js.at(two.acme.subjects.log_stream, each.seq) for each in stored]
    for record, there in zip(records, found, strict=True):
        assert there is not None
        assert there.subject == f"td.acme.via.{LINK}.{record.sender}.news"
        assert there.payload == record.payload
        fields = dict(there.own_fields() or ())
        assert fields["Td-Origin"] == f"{two.main.info.id} general"
        assert fields["Td-Sig"] == record.signature
        assert set(fields) == {"Td-Origin", "Td-Sig", "Nats-Msg-Id"}
    index = await two.destination.index(0)
    assert [(row.seq, row.link, row.origin, row.channel, row.sender) for row in index.rows] == [
        (each.seq, LINK, two.main.info.id, "general", record.sender)
        for each, record in zip(stored, records, strict=True)
    ]
    assert [row.hash for row in index.rows] == [payload_hash(record.payload).hex() for record in records]
    assert [row.id for row in index.rows] == [wire_message.decode(record.payload).id for record in records]
    assert (index.through, index.epoch) == (after.head, after.epoch)
    assert (await two.destination.index(stored[0].seq)).rows == index.rows[1:]


async def test_many_records_are_put_in_in_their_order_and_the_index_comes_in_pages(two: Two) -> None:
    async with two.main.agent("ada") as ada:
        for start in range(0, 600, 100):
            await asyncio.gather(*(say(ada, "general", str(start + each)) for each in range(100)))
    records = await two.pages(limit=200)
    assert len(records) == 600
    stored = await two.admit(*records)
    seqs = [each.seq for each in stored]
    assert seqs == sorted(seqs)
    rows: list[Any] = []
    after = 0
    while True:
        said = await two.local.ask(ImportIndexRequest(after=after, limit=250))
        rows += said.rows
        if said.through == said.head:
            break
        assert said.through > after
        after = said.through
    assert [row[0] for row in rows] == seqs


async def test_a_record_no_link_admits_is_stored_and_counts_for_nobody(two: Two) -> None:
    async with two.main.agent("ada") as ada:
        await say(ada, "general", "one")
    (record,) = await two.pages()
    await two.admit(record, ours="another")
    from_nowhere = LinkedRecord(**{**_fields(record), "channel": "secret"})
    await two.admit(from_nowhere)
    own = LinkedRecord(**{**_fields(record), "origin": two.acme.info.id})
    await two.admit(own)
    far = LinkedRecord(**{**_fields(record), "hops": 2})
    await two.admit(far)
    assert (await two.destination.index(0)).rows == ()
    (stored,) = await two.admit(record)
    assert [row.seq for row in (await two.destination.index(0)).rows] == [stored.seq]
    await unlinked(two.acme)
    (late,) = await two.admit(record)
    assert [row.seq for row in (await two.destination.index(0)).rows] == [stored.seq], f"{late} came after its end"


def _fields(record: LinkedRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


async def test_a_message_id_that_is_taken_is_told_with_where_and_says_nothing_of_the_record(two: Two) -> None:
    async with two.main.agent("ada") as ada:
        await say(ada, "general", "one", "two")
    first, second = await two.pages()
    (stored,) = await two.admit(first, id="taken")
    assert await two.admit(second, id="taken") == [AdmittedAt(stored.seq, duplicate=True)]
    assert [row.id for row in (await two.destination.index(stored.seq - 1)).rows] == [
        wire_message.decode(first.payload).id
    ]


async def test_what_can_never_be_stored_is_told_of_that_record_alone(two: Two) -> None:
    async with two.main.agent("ada") as ada:
        await say(ada, "general", "one")
    (record,) = await two.pages()
    large = LinkedRecord(**{**_fields(record), "payload": b"x" * 300_000})
    nobody = LinkedRecord(**{**_fields(record), "sender": "nobody"})
    unsigned = LinkedRecord(**{**_fields(record), "signature": "x\r\nNats-TTL: 1s"})
    breaking = LinkedRecord(**{**_fields(record), "origin": "A\r\nNats-TTL: 1s"})
    answers = await two.admit(large, nobody, record, unsigned, breaking)
    assert [type(each) for each in answers[:3]] == [TooLarge, *[type(answers[1])], AdmittedAt]
    assert isinstance(answers[1], UsageError)
    assert all(isinstance(each, WireError) for each in answers[3:])


async def test_a_log_that_takes_nothing_is_full_and_a_broker_that_is_away_unreachable(two: Two) -> None:
    async with two.main.agent("ada") as ada:
        await say(ada, "general", "one")
    (record,) = await two.pages()
    assert two.acme.steward is not None
    gate, disk = two.acme.steward.gate, two.acme.steward.gate.disk
    gate.disk = FullDisk(disk.folder)
    await gate.tend()
    (answer,) = await two.admit(record)
    assert isinstance(answer, LogFull)
    gate.disk = disk
    await gate.tend()
    assert isinstance((await two.admit(record))[0], AdmittedAt)
    two.destination.patience = 0.5
    two.acme.broker.stop()
    try:
        (answer,) = await two.admit(record)
        assert isinstance(answer, UnreachableError | OutcomeUnknown)
        with pytest.raises((UnreachableError, OutcomeUnknown)):
            await two.destination.facts()
    finally:
        two.acme.broker.start()

    async def answers(kind: type) -> bool:
        try:
            return isinstance((await two.admit(record))[0], kind)
        except (UnreachableError, OutcomeUnknown):
            return False

    # another process may have another log: what was looked for in the one before is looked for again
    await eventually(lambda: answers(NotLookedFor), within=30)
    two.epoch = ""
    await eventually(lambda: answers(AdmittedAt), within=30)


class FullDisk(DiskReserve):
    """A disk that other programs filled: the gate closes, and stays closed whoever looks at it meanwhile."""

    def look(self) -> Room:
        return replace(super().look(), free=0)


async def test_an_acknowledgement_that_does_not_come_is_an_unknown_outcome(two: Two) -> None:
    async with two.main.agent("ada") as ada:
        await say(ada, "general", "one")
    (record,) = await two.pages()
    two.epoch = (await two.destination.facts()).epoch
    two.destination.patience = 0.3
    os.kill(two.acme.broker.pid, signal.SIGSTOP)
    try:
        assert [type(each) for each in await two.admit(record)] == [OutcomeUnknown]
    finally:
        os.kill(two.acme.broker.pid, signal.SIGCONT)


async def test_the_worker_reads_the_links_of_its_space(two: Two) -> None:
    said, found = await two.local.ask(ImportLinksRequest()), await two.local.links()
    assert (said.name, found.facts.space) == ("acme", two.acme.info.id)
    ((record, _),) = found.links
    assert (record.link, record.state, record.origin) == (LINK, "on", two.main.info.id)
    assert (record.channels, record.space) == ({"general": "news", "team": "acme-team"}, "main")
    await unlinked(two.acme)
    later, ((ended, _),) = await two.local.ask(ImportLinksRequest()), (await two.local.links()).links
    assert (ended.state, later.links[0].seq > said.links[0].seq) == ("off", True)


# --- no echo, no loop ---


async def test_what_came_from_a_space_does_not_go_back_to_it_and_goes_on_only_where_that_is_agreed(two: Two) -> None:
    """A third space asks acme for what main said."""
    async with two.main.agent("ada") as ada:
        await say(ada, "general", "from main")
    await two.admit(*await two.pages())
    await two.acme.add("bob", post=["news"])
    async with two.acme.agent("bob") as bob:
        await say(bob, "news", "from acme")
    made = await linked(two.acme, "thirdthird33", shares=["news"])
    async with peer_of(two.acme, made.creds) as peer:
        assert texts(await peer.all_of()) == ["from acme"], "one link is as far as it goes"
        await linked(two.acme, "thirdthird33", shares=["news"], make_peer=False, hops=2)
        (page,) = await peer.all_of()
        assert texts([page]) == ["from main", "from acme"]
        passed = page.records[0]
        assert (passed.origin, passed.channel, passed.hops) == (two.main.info.id, "general", 2)
        assert is_signed(passed)
    back = await linked(
        two.acme,
        origin=two.main.info.id,
        shares=["news"],
        channels={"general": "news"},
        space="main",
        hops=8,
    )
    async with peer_of(two.acme, back.creds) as peer:
        assert texts(await peer.all_of()) == ["from acme"], "main does not hear its own words again"


# --- asking ---


async def test_wakes_come_for_what_is_shared_and_for_nothing_else(two: Two) -> None:
    await two.source.hello()
    assert two.main.steward is not None
    wakes = two.main.steward.wakes
    assert wakes is not None
    await eventually(lambda: bool(wakes._heard), what="the steward hears what is shared")
    async with two.main.agent("ada") as ada:
        await say(ada, "secret", "x")
        before, began = two.woken, asyncio.get_running_loop().time()
        await say(ada, "general", "y")
        await eventually(lambda: two.woken > before, what="a wake")
        await asyncio.gather(*(say(ada, "general", "z") for _ in range(50)))
        await eventually(lambda: not wakes._timers, what="it is quiet again")
        took = asyncio.get_running_loop().time() - began
        assert two.woken - before <= took / link_wakes.APART + 1, "they are told together"
    await unlinked(two.main)
    await eventually(lambda: wakes._connection is None, what="nothing is heard for nobody")


async def test_a_link_that_was_ended_is_denied_or_revoked(two: Two) -> None:
    await two.source.hello()
    async with two.main.administer() as admin:
        await admin.call(EndLinkRequest(LINK))
    with pytest.raises(EndedThere, match="was ended by the owner"):
        await two.source.hello()
    await unlinked(two.main)

    async def refused() -> bool:
        try:
            await two.source.hello()
        except EndedThere as error:
            return isinstance(error.__cause__, AuthRevoked) and "does not take the key of this space" in str(error)
        except UnreachableError:
            return False
        return False

    await eventually(refused, within=20)


async def test_a_newer_token_is_kept_beside_the_key(two: Two) -> None:
    held, key = jwt.split_credentials(two.creds.read_text())
    assert two.main.steward is not None
    await asyncio.sleep(1.1)  # tokens are dated in seconds
    made = await linked(two.main, origin=two.acme.info.id, shares=["general"], make_peer=False)
    assert made.row.token != held
    await two.source.hello()
    assert jwt.split_credentials(two.creds.read_text())[0] == made.row.token
    assert jwt.split_credentials(two.creds.read_text())[1].id == key.id


def item_of(record: LinkedRecord) -> bytes:
    return item_hash(record.sender, wire_message.decode(record.payload).id, payload_hash(record.payload))


async def test_single_records_and_digests_are_asked_for(two: Two) -> None:
    async with two.main.agent("ada") as ada:
        seqs = await say(ada, "general", "a", "b", "c")
        await say(ada, "team", "d")
        await say(ada, "secret", "e")
    records = await two.pages()
    fetched = await two.source.fetch([*seqs, 1])
    assert (fetched.records, fetched.missing) == (tuple(records[:3]), (1,))
    head = (await two.source.hello()).head
    items = [
        item_hash(each.sender, wire_message.decode(each.payload).id, payload_hash(each.payload)) for each in records
    ]
    day = wire_message.decode(records[0].payload).ts[:10]
    answer = await two.source.digest(head)
    assert (answer.through, set(answer.channels)) == (head, {"general", "team"})
    assert answer.channels["general"] == {day: Digest.of(items[:3])}
    assert answer.channels["team"] == {day: Digest.of(items[3:])}
    buckets = await two.source.buckets("general", day, head)
    assert sum(buckets.buckets, Digest()) == Digest.of(items[:3])
    assert all(buckets.buckets[item[0]].count for item in items[:3])
    named = await two.source.ids("general", day, sorted({item[0] for item in items[:3]}), head, 0)
    assert [each.seq for each in named.ids] == seqs
    assert [each.item for each in named.ids] == items[:3]
    assert [each.seq for each in (await two.source.ids("general", day, range(256), head, seqs[0])).ids] == seqs[1:]
    earlier = await two.source.digest(seqs[0])
    assert earlier.channels == {"general": {day: Digest.of(items[:1])}}
    assert (await two.source.digest(head)).channels == answer.channels
    assert (await two.source.buckets("secret", day, head)).buckets == (Digest(),) * 256


async def test_a_digest_that_takes_long_is_made_in_several_answers(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two.main.agent("ada") as ada:
        for _ in range(4):
            await asyncio.gather(*(say(ada, "general", str(each)) for each in range(25)))
    head = (await two.source.hello()).head
    whole = await two.source.digest(head)
    assert two.main.steward is not None
    two.main.steward.linked._scans.clear()  # it would be continued
    monkeypatch.setattr(link_handlers, "SCAN_SECONDS", 0.0)
    monkeypatch.setattr(link_handlers, "SCANNED_AT_ONCE", 20)
    monkeypatch.setattr("tidings.links.source.DIGEST_PAUSE", 0.0)
    assert await two.source.digest(head) == whole
    assert sum(each.count for days in whole.channels.values() for each in days.values()) == 100
    monkeypatch.setattr(link_handlers, "MOST_IDS", 30)
    day = next(iter(whole.channels["general"]))
    found: list[RecordIdentity] = []
    after, more = 0, True
    while more:
        answer = await two.source.ids("general", day, range(256), head, after)
        found += answer.ids
        after, more = answer.ids[-1].seq, answer.more
    assert len(found) == 100
    assert Digest.of([each.item for each in found]) == whole.channels["general"][day]


async def test_a_digest_of_many_days_comes_in_several_answers_and_is_continued_when_the_log_has_grown(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two.main.agent("ada") as ada:
        await say(ada, "general", "a", "b")
        await say(ada, "team", "c")
    head = (await two.source.hello()).head
    whole = await two.source.digest(head)
    assert set(whole.channels) == {"general", "team"}
    assert two.main.steward is not None
    walks: list[int] = []
    walk = two.main.steward.linked._walk

    async def counted(user: str, channel: str | None, scan: Any, end: int, add: Any) -> bool:
        walks.append(scan.position)
        return await walk(user, channel, scan, end, add)

    monkeypatch.setattr(two.main.steward.linked, "_walk", counted)
    monkeypatch.setattr(link_handlers, "MOST_DAYS", 1)
    two.main.steward.linked._scans.clear()
    assert await two.source.digest(head) == whole
    assert walks == [1, head + 1], "the second answer goes on from what the first one found"
    async with two.main.agent("ada") as ada:
        (seq,) = await say(ada, "general", "d")
    walks.clear()
    more = await two.source.digest(seq)
    assert walks == [head + 1, seq + 1], "what was counted is not counted again"
    assert await two.source.digest(head) == whole, "less than was counted is counted by itself"
    two.main.steward.linked._scans.clear()
    assert await two.source.digest(seq) == more
    walks.clear()
    monkeypatch.setattr(link_handlers, "RECOUNTED_AFTER", 0.0)
    assert await two.source.digest(seq) == more
    assert walks[0] == 1, "now and then all is counted anew"
    monkeypatch.setattr(link_handlers, "RECOUNTED_AFTER", 3_600.0)
    monkeypatch.setattr("tidings.links.source.MOST_PAIRS", 1)
    with pytest.raises(MalformedDigest, match="more than 1 days"):
        await two.source.digest(head)


async def test_only_the_worker_may_ask_what_was_admitted(two: Two) -> None:
    async with worker_of(two.acme) as worker:
        assert (await worker.call(ImportFactsRequest())).space == two.acme.info.id
