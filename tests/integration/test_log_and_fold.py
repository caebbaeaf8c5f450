"""The log on a real broker, folded: what was written there decides, and nothing that only looks like it."""

import dataclasses
import json
import random
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import pytest

from folded_log import fold_log
from tidings.admin.home import SpaceInfo
from tidings.contract.admin import ChangeSpaceRequest, GrantRequest, TableRequest
from tidings.contract.agents import HealthRequest
from tidings.contract.channels import ChangeChannelRequest, ChannelRequest, ChannelsRequest, JoinRequest, LeaveRequest
from tidings.errors import DeniedError, TooLarge
from tidings.model.projection import LogRecord, Table, Verdict
from tidings.nats.client import Connection
from tidings.nats.jetstream import JetStream
from tidings.rpc.control import pages
from tidings.server.log import read_rulings
from tidings.steward import agent_handlers
from tidings.steward.admin_handlers import ACK_WAIT_NS, AdminHandlers
from tidings.wire import rulings
from tidings.wire.rulings import Access, Member
from tidings.wire.signing import SIGNATURE_HEADER, KeyPair
from tidings_testing.real_space import RealSpace, real_space
from tools.generated import PUBACK, GeneratedLog, generate_log, seeded_key
from tools.model import Model, may_read, members, owed
from tools.pouring import Pour, pour

FILLER = "td.main.chat.UFILLER.general"


@pytest.fixture
async def space_only(tmp_path: Path) -> AsyncIterator[RealSpace]:
    """A space without a steward: its log is empty."""
    async with real_space(tmp_path / "home", steward=False) as running:
        yield running


# --- generated logs, through a real log --------------------------------------------------------------------------


def replayable(log: GeneratedLog) -> list[LogRecord]:
    """The generated records with a message wherever one is missing, or where LOG would not take the subject."""
    by_seq = {record.seq: record for record in log.records}
    blanks = {seq: LogRecord(seq, 0, FILLER, {}, b"gone") for seq in range(1, log.seq + 1)}
    kept = {seq: record for seq, record in by_seq.items() if not record.subject.endswith(".space.extra")}
    return [(blanks | kept)[seq] for seq in range(1, log.seq + 1)]


def poured(records: list[LogRecord]) -> Iterator[Pour]:
    return ((record.subject, record.payload, record.headers) for record in records)


def info_of(space: RealSpace, log: GeneratedLog) -> SpaceInfo:
    return dataclasses.replace(space.info, id=log.space_id, steward_key=log.anchor_key)


def assert_agrees(table: Table, model: Model, log: GeneratedLog, sequences: Iterable[int]) -> None:
    """At each sequence: who is in, who is owed, who may read, and what is printed."""
    for seq in sequences:
        state = model.state(seq)
        view = table.as_of(seq)
        assert {owner: access["name"] for owner, access in view.access.items()} == {
            owner: access.name for owner, access in state.access.items()
        }
        assert view.steward_key == state.key
        for channel in log.channels:
            assert table.members_at(channel, seq) == members(state, channel, seq)
            for agent in log.agents:
                assert table.owed(seq, agent, channel) == owed(state, seq, agent, channel)
                assert table.allowed_at(agent, channel, seq) == may_read(state, agent, channel)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_the_table_on_a_real_server_equals_the_model_at_every_sequence(space_only: RealSpace, seed: int) -> None:
    log = generate_log(random.Random(seed), 150)
    records = replayable(log)
    info = info_of(space_only, log)
    async with space_only.core() as js:
        assert await pour(js, poured(records)) == list(range(1, log.seq + 1))
        model = Model(records, "main", log.space_id, log.anchor_key)
        for end in (1, log.seq // 3, log.seq // 2):
            table = await fold_log(js, info, 0, end)
            assert table.head <= end
            assert_agrees(table, model, log, range(max(1, end - 3), end + 1))
        table = await fold_log(js, info, 0)
        assert_agrees(table, model, log, range(1, log.seq + 1))
        assert sum(table.void.values()) > 0


# --- size --------------------------------------------------------------------------------------------------------


def ruling_of(space: RealSpace, key: KeyPair, subject: str, payload: bytes) -> Pour:
    signature = rulings.sign_ruling(key, space.info.id, space.subjects.tail(subject), payload)
    return subject, payload, {SIGNATURE_HEADER: signature}


def steward_key(space: RealSpace) -> KeyPair:
    return KeyPair((space.home.creds / "steward.key").read_text().strip())


def many_members(space: RealSpace, owners: int, patterns: int, prefix: str = "team") -> Iterator[Pour]:
    """Access for each owner, then each of them in each channel."""
    rng, key, s = random.Random(9), steward_key(space), space.subjects
    ids = [seeded_key(rng).id for _ in range(owners)]
    for number, owner in enumerate(ids):
        granted = rulings.encode(Access(op="granted", name=f"agent{number}", read=(">",)))
        yield ruling_of(space, key, s.access(owner), granted)
    for number in range(patterns):
        tag = GeneratedLog(s, space.info.id, key, ids, ()).tag(f"{prefix}.c{number}")
        joined = rulings.encode(Member(op="joined", state="in", pattern=f"{prefix}.c{number}"))
        for owner in ids:
            yield ruling_of(space, key, s.member(owner, tag), joined)


async def test_eleven_hundred_member_subjects_are_too_many_for_the_broker_and_not_for_the_fold(
    space_only: RealSpace,
) -> None:
    async with space_only.core() as js:
        await pour(js, many_members(space_only, 11, 100))
        multi_last = json.dumps({"multi_last": ["td.main.member.>"], "batch": 10}).encode()
        said = await js.connection.request("$JS.API.DIRECT.GET.LOG_main", multi_last, timeout=5)
        assert said.status == 413
        table = await fold_log(js, space_only.info, 0)
        assert len(table.members_at("team.c99", table.head + 1)) == 11
        assert sum(len(table.intervals(owner)) for owner in table.owners()) == 1100


async def test_twenty_thousand_member_subjects_fold_page_by_page(space_only: RealSpace) -> None:
    async with space_only.core() as js:
        await pour(js, many_members(space_only, 200, 100), timeout=50)
        table = await fold_log(js, space_only.info, 0)
        assert not table.void
        assert {len(table.members_at(f"team.c{n}", table.head + 1)) for n in range(100)} == {200}
        assert sum(len(table.intervals(owner)) for owner in table.owners()) == 20_000
        half = await read_rulings(js, space_only.subjects, end=200 + 10_000)
        assert [record.seq for record in half] == list(range(1, 10_201))


async def test_a_table_too_long_for_one_answer_comes_in_pages(space: RealSpace) -> None:
    await space.stop_steward()
    async with space.core() as js:
        await pour(js, many_members(space, 60, 100, prefix=f"{'x' * 60}.{'y' * 60}.{'z' * 60}"))
    await space.start_steward()
    members, pages = dict[str, dict[str, int]](), 0
    following: int | None = 0
    async with space.administer() as admin:
        while following is not None:
            page = await admin.call(TableRequest(offset=following))
            members |= page.table.members
            following, pages = page.next, pages + 1
    assert pages > 1
    assert [len(held) for held in members.values()] == [100] * 60


async def test_an_answer_too_long_for_a_message_is_refused_and_not_left_out(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await space.add("ada", read=[">"], manage=[">"])
    async with space.agent("ada") as ada:
        for number in range(520):
            await ada.control.call(ChangeChannelRequest(f"c{number}", instructions="i" * 2_000))
        listed = [row async for page in pages(ada.control.call, ChannelsRequest()) for row in page.channels]
        assert len(listed) == 520, "in pages it is answered whole, though it is longer than a message"
        monkeypatch.setattr(agent_handlers, "CHANNELS_PER_PAGE", 1_000)
        monkeypatch.setattr(agent_handlers, "PAGE_BYTES", 10**9)
        with pytest.raises(TooLarge, match="ask for less"):
            await ada.control.call(ChannelsRequest())
        assert (await ada.control.call(ChannelRequest("c7"))).instructions == "i" * 2_000


async def test_eleven_hundred_agents_each_get_a_mailbox(space_only: RealSpace) -> None:
    rng, s = random.Random(5), space_only.subjects
    async with space_only.core() as js:
        for owner in (seeded_key(rng).id for _ in range(1_100)):
            name = f"dlv_{owner}"
            config = {"durable_name": name, "filter_subject": s.delivery(owner), "ack_policy": "explicit"}
            body = {"stream_name": s.delivery_stream, "config": {**config, "ack_wait": ACK_WAIT_NS}}
            await js.api(f"CONSUMER.CREATE.{s.delivery_stream}.{name}.{s.delivery(owner)}", body)
        assert (await js.info(s.delivery_stream))["state"]["consumer_count"] == 1_100
    space_only.broker.kill()  # a clean stop writes every consumer's state and takes ten seconds


# --- what does not count -----------------------------------------------------------------------------------------


async def send_raw(connection: Connection, subject: str, block: bytes, payload: bytes) -> None:
    """HPUB with a header block a library would refuse to write."""
    sizes = f"{len(block)} {len(block) + len(payload)}"
    await connection.write_raw(f"HPUB {subject} {sizes}\r\n".encode() + block + payload + b"\r\n")
    await connection.flush()


async def write_junk(js: JetStream, subject: str, genuine: bytes) -> int:
    """Everything that may land on a ruling subject and must not rule. Answers how many records."""
    blocks = [
        b"garbage!",
        b"NATS/1.0\r\nTd-Sig\r\n\r\n",
        b"NATS/1.0\r\nTd-Sig: a\nTd-Sig: b\r\n\r\n",
        b"NATS/1.0\r\n\r\n",
    ]
    for block in blocks:
        await send_raw(js.connection, subject, block, genuine)
    for payload in (PUBACK, b"", b"\xff\xfe", b"[1]", genuine):
        await js.publish(subject, payload)
    await js.publish(subject, genuine, {SIGNATURE_HEADER: "A" * 86})
    return len(blocks) + 6


async def test_junk_on_ruling_subjects_is_void_and_counted_and_the_older_version_stays(space: RealSpace) -> None:
    await space.add("ada", read=["general"])
    assert space.steward is not None
    async with space.agent("ada") as ada, space.core() as js:
        joined = await ada.control.call(JoinRequest("general"))
        subject = space.subjects.member(ada.id, space.steward.space.tag("general"))
        acl = space.subjects.access(ada.id)
        record, access = await js.last("LOG_main", subject), await js.last("LOG_main", acl)
        assert record is not None
        assert access is not None
        junk = await write_junk(js, subject, record.payload.replace(b'"in"', b'"out"'))
        junk += await write_junk(js, acl, access.payload.replace(b'"revoked":false', b'"revoked":true'))
        junk += await write_junk(js, space.subjects.space_record, b'{"op":"x","channels":"listed"}')
        await space.stop_steward()
        steward = await space.start_steward()
        assert sum(steward.table.void.values()) == junk
        assert set(steward.table.void) == {Verdict.BAD_SIGNATURE}
        assert (await ada.control.call(HealthRequest())).void_records == junk
        again = await ada.control.call(JoinRequest("general"))
        assert (again.state, again.seq) == ("resumed", joined.seq)
        # and a later ruling of ours on the same subjects counts again
        assert (await ada.control.call(LeaveRequest("general"))).state == "left"


async def test_signed_records_that_do_not_decode_are_void_too(space: RealSpace) -> None:
    await space.add("ada", read=["general"])
    await space.stop_steward()
    key, s = steward_key(space), space.subjects
    owner = (await ledger_id(space, "ada")) or ""
    payloads = [
        b"",
        PUBACK,
        b'{"op":"x","op":"y"}',
        b'{"op":"x","name":"a b"}',
        b'{"op":"x","name":"ada","read":["a..b"]}',
    ]
    async with space.core() as js:
        for payload in payloads:
            signature = rulings.sign_ruling(key, space.info.id, s.tail(s.access(owner)), payload)
            await js.publish(s.access(owner), payload, {SIGNATURE_HEADER: signature})
    steward = await space.start_steward()
    assert steward.table.void[Verdict.MALFORMED] == len(payloads)
    async with space.agent("ada") as ada:
        assert (await ada.control.call(JoinRequest("general"))).state == "opened"


async def ledger_id(space: RealSpace, name: str) -> str | None:
    async with space.administer() as admin:
        row = admin.ledger.active(name)
    return row.id if row else None


async def test_a_senders_status_line_neither_hides_messages_nor_ends_a_page(space: RealSpace) -> None:
    await space.add("ada")
    async with space.agent("ada") as ada, space.core() as js:
        for block in (
            b"NATS/1.0 204 EOB\r\n\r\n",
            b"NATS/1.0 204 EOB\r\nA: b\r\n\r\n",
            b"NATS/1.0 404\r\n\r\n",
            b"garbage!",
        ):
            await send_raw(ada.connection, space.subjects.chat(ada.id, "general"), block, b"")
        acknowledged = await ada.post("general", b"after")
        head = acknowledged["seq"]
        pages = [page async for page in js.read("LOG_main", "td.main.chat.>", 1, head)]
        assert [record.seq for page in pages for record in page] == list(range(head - 4, head + 1))


# --- patterns and rights -----------------------------------------------------------------------------------------


async def test_a_pattern_beside_a_channel_it_covers_joins_and_leaves_by_itself(space: RealSpace) -> None:
    await space.add("bob", read=["team.>"])
    async with space.agent("bob") as bob, space.core() as js:
        wide = await bob.control.call(JoinRequest("team.>"))
        narrow = await bob.control.call(JoinRequest("team.backend"))
        left = await bob.control.call(LeaveRequest("team.>"))
        again = await bob.control.call(JoinRequest("team.>"))
        assert wide.seq < narrow.seq < left.seq < again.seq
        assert (left.state, again.state) == ("left", "opened")
        table = await fold_log(js, space.info, 0)
        patterns = [(i.pattern, i.joined, i.left) for i in table.intervals(bob.id)]
        assert patterns == [
            ("team.>", wide.seq, left.seq),
            ("team.backend", narrow.seq, None),
            ("team.>", again.seq, None),
        ]
        assert table.members_at("team.backend", table.head + 1) == {bob.id}
        assert table.members_at("team.frontend", left.seq + 1) == frozenset()


async def test_what_is_posted_between_the_access_record_and_the_cut_is_owed_to_nobody(space: RealSpace) -> None:
    """The record decides: a connection that is cut seconds later can still publish, and it does not count."""
    await space.add("ada")
    await space.add("bob")
    async with space.agent("ada") as ada, space.agent("bob") as bob, space.core() as js:
        await bob.control.call(JoinRequest("general"))
        before = (await ada.post("general", b"before"))["seq"]
        async with space.administer() as admin:
            await admin.call(GrantRequest(id=ada.id, name="ada", read=("general",), post=()))
        after = (await ada.post("general", b"after: the broker has not cut her yet"))["seq"]
        table = await fold_log(js, space.info, 0)
        assert table.owed(before, ada.id, "general") == {bob.id}
        assert table.owed(after, ada.id, "general") == frozenset()


async def test_a_listed_space_voids_posts_to_channels_without_a_record(space: RealSpace) -> None:
    await space.add("ada", read=[">"], post=[">"], manage=[">"])
    await space.add("bob", read=[">"])
    async with space.agent("ada") as ada, space.agent("bob") as bob, space.core() as js:
        await bob.control.call(JoinRequest(">"))
        open_post = (await ada.post("random", b"1"))["seq"]
        async with space.administer() as admin:
            await admin.call(ChangeSpaceRequest(channels="listed"))
        void_post = (await ada.post("random", b"2"))["seq"]
        await ada.control.call(ChangeChannelRequest("random", description="now listed"))
        listed_post = (await ada.post("random", b"3"))["seq"]
        await ada.control.call(ChangeChannelRequest("random", listed=False))
        unlisted_post = (await ada.post("random", b"4"))["seq"]
        table = await fold_log(js, space.info, 0)
        owed_to = [table.owed(s, ada.id, "random") for s in (open_post, void_post, listed_post, unlisted_post)]
        assert owed_to == [{bob.id}, frozenset(), {bob.id}, frozenset()]


async def test_narrowing_empties_the_delivery_box_even_of_channels_that_were_left(space: RealSpace) -> None:
    """N10: the steward purges at once; what the pipeline adds afterwards is the pipeline's to purge."""
    await space.add("ada", read=["general", "ops"])
    async with space.agent("ada") as ada, space.core() as js:
        await ada.control.call(JoinRequest("ops"))
        await ada.control.call(LeaveRequest("ops"))
        await js.publish(space.subjects.delivery(ada.id), b"a frame of ops")
        async with space.administer() as admin:
            await admin.call(GrantRequest(id=ada.id, name="ada", read=("general",), post=("general",)))
        assert (await js.info(space.subjects.delivery_stream))["state"]["messages"] == 0
        with pytest.raises(DeniedError):
            await ada.control.call(JoinRequest("ops"))


async def test_what_is_delivered_between_the_note_of_an_emptied_mailbox_and_its_purge_stays(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H5: the pipeline found the note, took it away and delivered again before the steward's purge came."""
    await space.add("ada", read=["general", "ops"])
    assert space.steward is not None
    admin = space.steward.admin
    async with space.agent("ada") as ada, space.core() as js:
        await js.publish(space.subjects.delivery(ada.id), b"a frame of both")
        note = AdminHandlers.note_emptied

        async def noted_and_delivered_again(self: AdminHandlers, owner: str) -> None:
            await note(self, owner)
            await js.publish(space.subjects.delivery(owner), b"a frame of what is allowed")

        monkeypatch.setattr(AdminHandlers, "note_emptied", noted_and_delivered_again)
        await admin.empty_mailbox(ada.id)
        left = await js.last(space.subjects.delivery_stream, space.subjects.delivery(ada.id))
        assert left is not None
        assert left.payload == b"a frame of what is allowed"
        assert (await js.info(space.subjects.delivery_stream))["state"]["messages"] == 1


async def test_an_agent_cannot_write_a_ruling_even_through_a_reply(space: RealSpace) -> None:
    await space.add("mal")
    await space.add("bob")
    bob = await ledger_id(space, "bob") or ""
    assert space.steward is not None
    subject = space.subjects.member(bob, space.steward.space.tag("general"))
    async with space.agent("mal") as mal, space.core() as js:
        head = (await js.info("LOG_main"))["state"]["last_seq"]
        await mal.connection.publish(space.subjects.chat(mal.id, "general"), b"{}", reply=subject)
        assert await mal.refused(lambda: mal.connection.publish(subject, PUBACK)) is not None
        acknowledged = await mal.post("general", b"last")
        assert acknowledged["seq"] == head + 2
        assert await js.last("LOG_main", subject) is None
