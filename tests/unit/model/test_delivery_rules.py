"""Judging, cutting, planning, settling and debts: the rules between a record and a frame."""

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.delivery.deliverer import Deliverer
from tidings.errors import WireError
from tidings.model.blocks import BlockInfo, MadeBlock, Segments, cut_blocks
from tidings.model.classify import Classifier, Deliverable, NotForMembers, Poison, Void
from tidings.model.deferred import DebtEvent, Debts, EventKind
from tidings.model.planning import FRAME_OVERHEAD, Counter, Plan, by_reference, plan, settle
from tidings.model.projection import Table
from tidings.model.unread import UnreadWindow
from tidings.wire import signing
from tidings.wire.envelope import Received, Refused, open_record
from tidings.wire.frames import (
    MAX_BLOCK_BYTES,
    MAX_FRAME_BYTES,
    MAX_FRAME_MESSAGES,
    MAX_INLINE,
    Block,
    FrameRecord,
    open_block,
    raw_size,
)
from tidings.wire.message import MAX_PAYLOAD, Mention, Sender, compose
from tidings.wire.names import covers
from tidings.wire.records import Headers, StoredRecord, encode_headers, values_of
from tidings.wire.rulings import Access, Channel, Link
from tidings.wire.signing import ACCOUNT, KeyPair
from tools.generated import GeneratedLog, generate_log, new_log, seeded_key

# --- judging ---


class Scene:
    """A space in which ada may post, bob may not, and a link admits `theirs` as general."""

    def __init__(self) -> None:
        rng = random.Random(7)
        self.log: GeneratedLog = new_log(rng, agents=2)
        self.key: KeyPair = seeded_key(rng)
        self.ada, self.bob = self.key.id, self.log.agents[1]
        self.origin = seeded_key(rng, ACCOUNT).id
        self.log.access(self.ada, Access(op="1", name="ada", read=(">",), post=(">",)))
        self.log.access(self.bob, Access(op="2", name="bob", read=(">",), post=()))
        self.log.channel(Channel(op="3", name="ops", cls="live"))
        link = Link(op="4", link="east", state="on", origin=self.origin, channels={"theirs": "general"})
        self.log.rule(self.log.subjects.link("east"), link)
        self.table = Table(self.log.subjects, self.log.space_id, self.log.anchor_key).apply_all(self.log.records)
        self.classifier = Classifier(self.log.subjects, self.table.rules)
        self.message = compose(Sender(self.ada, "ada"), text="hello")

    def record(self, subject: str = "", payload: bytes | None = None, headers: bytes | None = None) -> StoredRecord:
        body = self.message.raw if payload is None else payload
        signature = signing.sign(self.key, self.log.space_id, "chat", "general", body)
        block = encode_headers([("Td-Sig", signature)]) if headers is None else headers
        return StoredRecord(9, 1, subject or self.log.subjects.chat(self.ada, "general"), block, body)


@pytest.fixture(scope="module")
def scene() -> Scene:
    return Scene()


def test_a_good_message_keeps_its_bytes_and_what_readers_need_of_its_headers(scene: Scene) -> None:
    fields = [("td-sig", "s"), ("X-Other", "x"), ("Nats-Msg-Id", "i"), ("Td-Hops", "1")]
    judged = scene.classifier.classify(scene.record(headers=encode_headers(fields)))
    assert isinstance(judged, Deliverable)
    assert (judged.channel, judged.sender, judged.mentions) == ("general", scene.ada, None)
    assert judged.kept == FrameRecord(
        9, 1, f"chat.{scene.ada}.general", (("td-sig", "s"), ("Nats-Msg-Id", "i"), ("Td-Hops", "1")), scene.message.raw
    )


def test_everything_that_is_not_what_it_claims_is_poison_with_its_reason(scene: Scene) -> None:
    forged = encode_headers([("Td-Sig", "s"), ("Nats-Sequence", "1")])
    another = compose(Sender(scene.bob, "bob"), text="not me").raw
    cases = {
        "malformed_subject": scene.record("td.main.nonsense.x"),
        "header": scene.record(headers=forged),
        "signature": scene.record(headers=b""),
        "too_large": scene.record(payload=b"x" * (MAX_PAYLOAD + 1)),
        "malformed": scene.record(payload=b'{"id":1}'),
        "sender_mismatch": scene.record(payload=another),
    }
    for reason, record in cases.items():
        judged = scene.classifier.classify(record)
        assert isinstance(judged, Poison), reason
        assert (judged.seq, judged.reason) == (9, reason)
    garbage = scene.classifier.classify(scene.record(headers=b"NATS/1.0\r\ngarbage"))
    assert isinstance(garbage, Poison)
    assert garbage.reason == "header"
    endless = scene.classifier.classify(scene.record("td.main." + "x" * 5_000))
    assert isinstance(endless, Poison)
    assert len(endless.subject) <= 1_000


def test_well_formed_and_owed_to_nobody_is_void(scene: Scene) -> None:
    subjects = scene.log.subjects
    bobs = scene.record(subjects.chat(scene.bob, "general"), compose(Sender(scene.bob, "b"), text="x").raw)
    assert isinstance(scene.classifier.classify(bobs), Void)
    for link, origin, theirs, counts in (
        ("east", scene.origin, "theirs", True),
        ("east", scene.origin, "general", False),
        ("east", scene.log.space_id, "theirs", False),
        ("west", scene.origin, "theirs", False),
    ):
        block = encode_headers([("Td-Sig", "s"), ("Td-Origin", f"{origin} {theirs}")])
        judged = scene.classifier.classify(scene.record(subjects.via(link, scene.ada, "general"), headers=block))
        assert isinstance(judged, Deliverable if counts else Void), (link, origin, theirs)


def test_a_live_channel_owes_only_those_who_are_mentioned(scene: Scene) -> None:
    subject = scene.log.subjects.chat(scene.ada, "ops")
    assert scene.classifier.classify(scene.record(subject)) == NotForMembers(9)
    mentions = [Mention(scene.bob, "b"), Mention(scene.ada, "me"), Mention(scene.bob, "again")]
    named = compose(Sender(scene.ada, "ada"), text="you", mentions=mentions).raw
    judged = scene.classifier.classify(scene.record(subject, named))
    assert isinstance(judged, Deliverable)
    assert judged.mentions == (scene.bob,)
    assert scene.classifier.classify(scene.record(scene.log.subjects.space_record)) == NotForMembers(9)


def test_a_payload_that_nests_without_end_is_poison_and_stops_nothing(scene: Scene) -> None:
    deep = scene.message.raw[:-1] + b',"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    judged = scene.classifier.classify(scene.record(payload=deep))
    assert isinstance(judged, Poison)
    assert judged.reason == "malformed"


@given(st.integers(0, 2**32), st.randoms(use_true_random=False))
def test_whatever_is_remembered_a_record_is_judged_by_the_rules_at_its_own_sequence(
    seed: int, order: random.Random
) -> None:
    log = generate_log(random.Random(seed), 40, agents=2, channels=2)
    table = Table(log.subjects, log.space_id, log.anchor_key).apply_all(log.records)
    floor = order.randrange(1, len(log.records))
    remembering, sent = (Classifier(log.subjects, each) for each in (table.rules, table.rules.for_workers(floor)))
    asked = [(s, sender, c) for s in range(floor, floor + 40) for sender in log.agents for c in log.channels]
    bodies = {sender: compose(Sender(sender, "a"), text="x").raw for sender in log.agents}
    block = encode_headers([("Td-Sig", "s")])
    for seq, sender, channel in order.sample(asked, 60):
        record = StoredRecord(seq, 1, log.subjects.chat(sender, channel), block, bodies[sender])
        judged = remembering.classify(record)
        assert judged == Classifier(log.subjects, table.rules).classify(record)
        assert judged == sent.classify(record)


blocks = st.one_of(
    st.binary(max_size=30),
    st.lists(
        st.tuples(st.sampled_from(["Td-Sig", "td-sig", "Nats-Msg-Id", "Status", "X", "KV-Operation"]), st.just("v")),
        max_size=3,
    ).map(encode_headers),
)


@given(blocks, st.sampled_from(["good", "cut", "other", "large", "nothing"]), st.booleans())
def test_the_pipeline_refuses_what_every_reader_refuses_but_for_the_signature(
    block: bytes, body: str, signed: bool
) -> None:
    scene = Scene()
    good = scene.message.raw
    payload = {
        "good": good,
        "cut": good[:-1],
        "other": compose(Sender(scene.bob, "bob"), text="x").raw,
        "large": b"x" * (MAX_PAYLOAD + 1),
        "nothing": b"",
    }[body]
    record = scene.record(payload=payload) if signed else scene.record(payload=payload, headers=block)
    judged = scene.classifier.classify(record)
    try:
        fields = Headers.parse(record.own_block or b"NATS/1.0\r\n\r\n").fields
    except WireError:  # no reader gets as far as to ask
        assert isinstance(judged, Poison)
        assert judged.reason == "header"
        return
    opened = open_record(scene.log.subjects, scene.log.space_id, record.subject, fields, payload)
    if isinstance(opened, Received):
        assert isinstance(judged, Deliverable)
    elif opened.reason != "signature":
        assert isinstance(judged, Poison)
        assert judged.reason == opened.reason
    elif not values_of(fields, "Td-Sig"):
        assert judged == Poison(9, record.subject, "signature", judged.detail if isinstance(judged, Poison) else "")
    assert isinstance(opened, Received | Refused)


# --- runs ---

CHANNELS = ("general", "team", "team.a", "team.b")
cut_patterns = st.sampled_from([*CHANNELS, "team.>", "team.*", ">"])


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Deliverable], list[tuple[int, str]]]:
    """Messages and cuts of a log, which never share a sequence."""
    messages: list[Deliverable] = []
    cuts: list[tuple[int, str]] = []
    size = draw(st.sampled_from([1, 1_000, 60_000]))
    for seq in range(1, draw(st.integers(1, 60)) + 1):
        if draw(st.integers(0, 4)) == 0:
            cuts.append((seq, draw(cut_patterns)))
            continue
        channel, sender = draw(st.sampled_from(CHANNELS)), draw(st.sampled_from(["ada", "bob"]))
        kept = FrameRecord(seq, 0, f"chat.{sender}.{channel}", (), bytes(draw(st.sampled_from([0, size]))))
        mentions = ("carl",) if draw(st.integers(0, 9)) == 0 else None
        messages.append(Deliverable(channel, sender, kept, mentions))
    return messages, cuts


def opened(block: MadeBlock) -> tuple[FrameRecord, ...]:
    return open_block(msgspec.msgpack.decode(block.data, type=Block))


@given(histories())
def test_blocks_are_the_messages_cut_where_an_audience_may_change(
    history: tuple[list[Deliverable], list[tuple[int, str]]],
) -> None:
    messages, cuts = history
    made = list(cut_blocks(messages, cuts))
    by_seq = {message.kept.seq: message for message in messages}
    assert sorted(kept.seq for block in made for kept in opened(block)) == sorted(by_seq)
    lanes: dict[tuple[str, bool], list[BlockInfo]] = defaultdict(list)
    for block in made:
        info, kept = block.info, opened(block)
        of = [by_seq[record.seq] for record in kept]
        assert {message.channel for message in of} == {info.channel}
        assert (info.first, info.last, info.count) == (kept[0].seq, kept[-1].seq, len(kept))
        assert info.size == len(block.data)
        assert not any(info.first < at < info.last and covers(pattern, info.channel) for at, pattern in cuts)
        assert {message.mentions for message in of} == {info.mentioned}
        assert info.mentioned is None or info.count == 1
        assert info.count <= MAX_FRAME_MESSAGES
        assert info.count == 1 or sum(raw_size(record) for record in kept) <= MAX_BLOCK_BYTES
        for owner in ("ada", "bob", "carl"):
            assert info.owed_to(owner) == sum(message.sender != owner for message in of)
        lanes[info.channel, info.mentioned is None].append(info)
    for lane in lanes.values():
        assert all(a.last < b.first for a, b in pairwise(lane))


def test_a_block_holds_no_more_messages_than_a_frame() -> None:
    messages = [Deliverable("general", "ada", FrameRecord(s, 0, "chat.a.b", (), b"")) for s in range(1, 4_201)]
    assert [block.info.count for block in cut_blocks(messages, [])] == [4_096, 104]


CUT = ("general", "team", "team.backend", "team.>", "*", ">", "*.backend")


@given(st.lists(st.tuples(st.integers(1, 60), st.sampled_from(CUT))).map(sorted), st.integers(0, 61))
def test_a_run_is_numbered_by_every_cut_before_it_that_may_concern_its_channel(
    cuts: list[tuple[int, str]], seq: int
) -> None:
    segments = Segments(cuts)
    for channel in ("general", "team", "team.backend", "elsewhere"):
        assert segments.number(channel, seq) == sum(at < seq and covers(pattern, channel) for at, pattern in cuts)


# --- planning ---

OWNERS = ("ada", "bob", "carl")


@st.composite
def planned_worlds(draw: st.DrawFn) -> "World":
    made: list[BlockInfo] = []
    seq = 0
    for _ in range(draw(st.integers(0, 25))):
        count = draw(st.sampled_from([1, 3, 100, 256]))
        senders = (("ada", count),) if draw(st.booleans()) else (("dora", count),)
        size = draw(st.sampled_from([50, 20_000, 300_000]))
        made.append(BlockInfo(draw(st.sampled_from(CHANNELS)), seq + 1, seq + count, count, size, 200, senders))
        seq += count
    audience = {block.first: draw(st.lists(st.sampled_from(OWNERS), unique=True)) for block in made}
    debts = Debts()
    for lane in draw(st.lists(st.tuples(st.sampled_from(OWNERS), st.sampled_from(CHANNELS)), max_size=3, unique=True)):
        debts.apply(DebtEvent(1, "owe", *lane, 0))
    for owner in draw(st.lists(st.sampled_from(OWNERS), max_size=1)):
        debts.apply(DebtEvent(2, "lost", owner, "general", 5, "gone", first=1, count=5))
    counters = {"bob": Counter("access:7", 4, (1, 2, 2))} if draw(st.booleans()) else {}
    refs = by_reference(made, lambda block: audience[block.first])
    return made, audience, debts, counters, draw(st.sampled_from([1_000, 100_000, 10**9])), refs


World = tuple[list[BlockInfo], dict[int, list[str]], Debts, dict[str, Counter], int, frozenset[int]]


def planned(world: World) -> Plan:
    made, audience, debts, counters, cap, refs = world
    return plan(made, lambda block: audience[block.first], debts, counters, refs=refs, cap=cap)


@given(planned_worlds())
def test_a_plan_gives_everybody_its_blocks_once_in_order_within_bounds_or_defers_them(world: World) -> None:
    made, audience, debts, counters, cap, refs = world
    result = planned(world)
    sizes = [block.ref_size if index in refs else block.size for index, block in enumerate(made)]
    due = {
        owner: [i for i, b in enumerate(made) if owner in audience[b.first] and b.owed_to(owner)
                and (owner, b.channel) not in debts.open]
        for owner in OWNERS
    }  # fmt: skip
    for owner in OWNERS:
        frames = result.frames.get(owner, [])
        deferred = {channel: after for (who, channel), after in result.deferred.items() if who == owner}
        sent = [index for frame in frames for index in frame.blocks]
        assert not (sent and deferred)
        if deferred:
            assert deferred == {
                channel: min(made[i].first for i in due[owner] if made[i].channel == channel) - 1
                for channel in {made[i].channel for i in due[owner]}
            }
        else:
            assert sent == due[owner]
        before = counters.get(owner, Counter("first"))
        for frame in frames:
            assert (frame.series, frame.number, frame.prev) == (before.series, before.number + 1, before.prev)
            assert frame.blocks or frame.lost
            assert len(frame.blocks) <= 1 or sum(made[i].count for i in frame.blocks) <= MAX_FRAME_MESSAGES
            assert len(frame.blocks) <= 1 or sum(sizes[i] for i in frame.blocks) <= MAX_FRAME_BYTES - FRAME_OVERHEAD
            assert sum(piece.count for piece in frame.pieces) == sum(made[i].owed_to(owner) for i in frame.blocks)
            before = frame.counter
        told = [loss for frame in frames for loss in frame.losses]
        assert told == (debts.untold.get(owner, []) if frames else [])
    taken = {o: [i for frame in frames for i in frame.blocks] for o, frames in result.frames.items()}
    assert result.named == set(chain.from_iterable(taken.values())) & refs
    assert result.bytes == sum(made[i].size for i in result.named) + sum(
        sum(sizes[i] for i in taken[o]) + FRAME_OVERHEAD * sum(1 for frame in frames if frame.blocks)
        for o, frames in result.frames.items()
    )
    if result.deferred:
        alone = [sum(made[i].size + sizes[i] + FRAME_OVERHEAD for i in taken[o]) for o in result.frames]
        assert result.bytes <= max(cap, *alone)


def block_of(size: int, *senders: tuple[str, int], channel: str = "general") -> BlockInfo:
    return BlockInfo(channel, 1, 9, 3, size, 200, senders or (("dora", 3),))


@pytest.mark.parametrize(
    ("block", "readers", "named"),
    [
        (block_of(MAX_INLINE + 1), ["ada", "bob"], True),
        (block_of(MAX_INLINE), ["ada", "bob", "carl"], False),
        (block_of(MAX_INLINE + 1), ["ada"], False),
        (block_of(MAX_INLINE + 1, ("ada", 3)), ["ada", "bob"], False),
        (block_of(MAX_INLINE + 1, ("ada", 2), ("bob", 1)), ["ada", "bob"], True),
    ],
)
def test_a_block_is_named_if_it_is_large_and_more_than_one_did_not_write_all_of_it(
    block: BlockInfo, readers: list[str], named: bool
) -> None:
    assert by_reference([block], lambda _: readers) == ({0} if named else set())


def test_a_frame_names_no_more_blocks_than_a_reader_takes() -> None:
    made = [BlockInfo("general", n, n, 1, 5_000, 200, (("dora", 1),)) for n in range(1, 71)]
    found = plan(made, lambda _: ["ada", "bob"], Debts(), {}, refs=frozenset(range(70)))
    assert [len(frame.blocks) for frame in found.frames["bob"]] == [32, 32, 6]
    assert len(plan(made, lambda _: ["bob"], Debts(), {}).frames["bob"]) == 1, "blocks in a frame are not counted"


def test_one_who_is_owed_little_does_not_wait_for_those_who_are_named_much() -> None:
    much = BlockInfo("crowded", 1, 20, 20, 20_000, 120, (("dora", 20),))
    little = BlockInfo("small", 21, 21, 1, 400, 120, (("dora", 1),))
    crowd = [f"member {n}" for n in range(9)]
    readers = {"crowded": crowd, "small": ["zoe"]}
    cap = 20_000 + 5 * (FRAME_OVERHEAD + 400)
    found = plan([much, little], lambda block: readers[block.channel], Debts(), {}, refs=frozenset({0}), cap=cap)
    assert "zoe" in found.frames
    assert {owner for owner, _ in found.deferred} < set(crowd)


def test_what_was_refused_is_in_the_frames_and_everything_else_is_stored_once() -> None:
    made = [
        BlockInfo("general", n, n, 1, size, 200, (("dora", 1),)) for n, size in ((20, 5_000), (21, 9_000), (22, 99))
    ]
    calls: list[list[int]] = []

    class Outlet:
        def store(self, blocks: Sequence[int]) -> set[int]:
            calls.append(list(blocks))
            return {1} & set(blocks)

    found = Deliverer(Any, Outlet(), Any, debts=Debts(), counters={}, last_head=0, floor=0, unread=UnreadWindow())  # type: ignore[arg-type]
    chosen = by_reference(made, lambda _: ["ada", "bob"])
    assert chosen == {0, 1}
    result, fitting = found._plan(made, lambda _: ["ada", "bob"], Debts(), chosen)
    assert calls == [[0, 1]]
    assert (set(result.refs), result.named, fitting) == ({0}, {0}, result)
    assert result.bytes == 5_000 + 2 * (200 + 9_000 + 99 + FRAME_OVERHEAD)
    _, fitting = found._plan(made, lambda _: ["ada"], Debts(), chosen, {"ada": 0})
    assert (calls[1:], fitting.frames) == ([], {"ada": []}), "nothing is stored for a mailbox that is full"


@given(planned_worlds(), st.data())
def test_every_prefix_of_acknowledgements_settles_into_deliveries_and_debts(world: World, data: st.DataObject) -> None:
    result = planned(world)
    acknowledged = {
        owner: list(range(100, 100 + data.draw(st.integers(0, len(frames))))) for owner, frames in result.frames.items()
    }
    settled = settle(result, acknowledged, world[3])
    for owner, frames in result.frames.items():
        stored, rest = frames[: len(acknowledged[owner])], frames[len(acknowledged[owner]) :]
        rows = [row for row in settled.delivered if row.owner == owner]
        assert [(r.number, r.channel, r.first, r.last, r.count) for r in rows] == [
            (f.number, p.channel, p.first, p.last, p.count) for f in stored for p in f.pieces
        ]
        owed = {channel: after for (who, channel), after in settled.owed.items() if who == owner}
        assert owed == {
            channel: min(p.first for f in rest for p in f.pieces if p.channel == channel) - 1
            for channel in {p.channel for f in rest for p in f.pieces}
        }
        if stored:
            assert settled.counters[owner] == stored[-1].counter
        else:
            assert settled.counters.get(owner) == world[3].get(owner)
        assert (owner in settled.told) == any(frame.lost for frame in stored)


# --- debts ---

events = st.lists(
    st.tuples(
        st.sampled_from(get_args(EventKind)),
        st.sampled_from(OWNERS[:2]),
        st.sampled_from(CHANNELS[:2]),
        st.integers(0, 30),
    ),
    max_size=20,
).map(lambda drawn: [DebtEvent(order, *event) for order, event in enumerate(drawn, 1)])


@given(events, st.randoms(use_true_random=False))
def test_debts_do_not_depend_on_the_order_in_which_they_are_read(written: list[DebtEvent], rng: random.Random) -> None:
    shuffled = rng.sample(written, len(written))
    assert Debts.of(shuffled) == Debts.of(written)


@given(events)
def test_debts_agree_with_a_set_of_what_is_owed(written: list[DebtEvent]) -> None:
    """The naive form: for each lane the sequence after which it is owed, and losses with the order they came in."""
    after: dict[tuple[str, str], int] = {}
    untold: dict[str, list[tuple[int, str, int, int]]] = defaultdict(list)
    told: dict[str, list[tuple[int, tuple[int, str, int, int]]]] = defaultdict(list)
    for event in written:
        lane = (event.owner, event.channel)
        if event.kind == "owe":
            after[lane] = min(event.seq, after.get(lane, event.seq))
        elif event.kind == "lost":
            untold[event.owner].append((event.order, event.channel, event.first, event.seq))
        elif event.kind == "told":
            told[event.owner] += [(event.first, loss) for loss in untold[event.owner] if loss[0] == event.seq]
            untold[event.owner] = [loss for loss in untold[event.owner] if loss[0] != event.seq]
        elif event.kind == "reset":
            untold[event.owner] = sorted(
                [*untold[event.owner], *(x for at, x in told.pop(event.owner, ()) if at > event.first)]
            )
        elif lane in after:
            if event.kind == "settled" and event.seq >= after[lane]:
                del after[lane]
            elif event.kind == "cancel" and event.seq > after[lane]:
                untold[event.owner].append((event.order, event.channel, after[lane] + 1, event.seq))
                after[lane] = event.seq
            elif event.kind == "paid":
                after[lane] = max(after[lane], event.seq)
    debts = Debts.of(written)
    assert {lane: debt.after for lane, debt in debts.open.items()} == after
    found = {
        o: [(x.order, x.lost.channel, x.lost.first, x.lost.last) for x in losses] for o, losses in debts.untold.items()
    }
    assert found == {owner: losses for owner, losses in untold.items() if losses}
    assert debts.oldest() == min(after.values(), default=None)
    for owner in OWNERS:
        assert [d.after for d in debts.of_owner(owner)] == sorted(a for (o, _), a in after.items() if o == owner)


def test_a_debt_set_back_keeps_the_time_since_when_it_is_owed() -> None:
    debts = Debts.of(
        [DebtEvent(5, "owe", "ada", "general", 9, "full"), DebtEvent(7, "owe", "ada", "general", 3, "again")]
    )
    (debt,) = debts.open.values()
    assert (debt.after, debt.since_ns, debt.cause) == (3, 5, "again")
