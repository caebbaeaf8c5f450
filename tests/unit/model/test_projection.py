"""The fold answers who is owed what at every sequence, and nothing void changes the answer."""

import random

import msgspec
import pytest

from tidings.errors import LogRegressed, UsageError
from tidings.model.membership import Interval
from tidings.model.projection import LogRecord, Table, Verdict
from tidings.wire.rulings import Access, Channel, Defaults, Lease, Link, Member, Space
from tidings.wire.subjects import Subjects
from tools import model as naive
from tools.generated import PUBACK, GeneratedLog, generate_log, new_log, seeded_key, verify_once
from tools.model import Model


@pytest.fixture
def log() -> GeneratedLog:
    return new_log(random.Random(1))


@pytest.fixture
def ada(log: GeneratedLog) -> str:
    log.access(log.agents[0], Access(op="ada", name="ada", read=(">",), post=(">",)))
    return log.agents[0]


@pytest.fixture
def bob(log: GeneratedLog) -> str:
    log.access(log.agents[1], Access(op="bob", name="bob", read=(">",), post=(">",)))
    return log.agents[1]


def fold(log: GeneratedLog, floor: int = 0) -> Table:
    return Table(log.subjects, log.space_id, log.anchor_key, floor=floor).apply_all(log.records)


def verdict_of(log: GeneratedLog, record: LogRecord) -> Verdict:
    table = Table(log.subjects, log.space_id, log.anchor_key)
    return {r.seq: table.apply(r) for r in log.records}[record.seq]


# --- the rule of the design ---


def test_the_example_of_the_design_holds(log: GeneratedLog, ada: str, bob: str) -> None:
    log.seq = 100
    chats = [log.chat(ada, "general").seq]
    join = log.member(bob, "general", "in").seq
    chats.append(log.chat(ada, "general").seq)
    leave = log.member(bob, "general", "out").seq
    chats.append(log.chat(ada, "general").seq)
    assert (chats, join, leave) == ([101, 103, 105], 102, 104)

    table = fold(log)
    assert [table.owed(seq, ada, "general") for seq in chats] == [frozenset(), frozenset({bob}), frozenset()]
    assert [table.members_at("general", seq) for seq in (102, 103, 104)] == [frozenset(), frozenset({bob}), frozenset()]
    assert table.intervals(bob) == [Interval(bob, "general", 102, 104)]
    assert [len(table.memberships_at(bob, seq)) for seq in (102, 103, 104)] == [0, 1, 0]


def test_a_sender_is_not_owed_its_own_message(log: GeneratedLog, ada: str, bob: str) -> None:
    log.member(ada, "general", "in")
    log.member(bob, "general", "in")
    seq = log.chat(ada, "general").seq
    assert fold(log).members_at("general", seq) == {ada, bob}
    assert fold(log).owed(seq, ada, "general") == {bob}


def test_class_decides_at_the_sequence_of_the_message(log: GeneratedLog, ada: str, bob: str) -> None:
    log.member(bob, "general", "in")
    durable = log.chat(ada, "general").seq
    log.channel(Channel(op="1", name="general", cls="live"))
    live = log.chat(ada, "general").seq
    log.channel(Channel(op="2", name="general", cls="durable"))
    again = log.chat(ada, "general").seq

    table = fold(log)
    assert [table.class_at("general", seq) for seq in (durable, live, again)] == ["durable", "live", "durable"]
    assert [len(table.owed(seq, ada, "general")) for seq in (durable, live, again)] == [1, 0, 1]


def test_class_is_the_channels_else_the_spaces_else_durable(log: GeneratedLog) -> None:
    first = log.channel(Channel(op="1", name="general")).seq
    default = log.space(Space(op="2", defaults=Defaults(cls="live"))).seq
    own = log.channel(Channel(op="3", name="general", cls="durable")).seq
    table = fold(log)
    assert table.class_at("general", first) == "durable"
    assert table.class_at("general", default) == "live"
    assert table.class_at("general", own) == "durable"
    assert table.class_at("ops", own) == "live"


def test_a_join_counts_whatever_the_class(log: GeneratedLog, ada: str, bob: str) -> None:
    log.channel(Channel(op="1", name="general", cls="live"))
    log.member(bob, "general", "in")
    log.channel(Channel(op="2", name="general", cls="durable"))
    assert fold(log).owed(log.chat(ada, "general").seq, ada, "general") == {bob}


def test_n13_a_post_outside_the_senders_access_at_its_sequence_is_owed_to_nobody(
    log: GeneratedLog, ada: str, bob: str
) -> None:
    log.member(bob, ">", "in")
    before = log.chat(ada, "general").seq
    log.access(ada, Access(op="2", name="ada", read=(">",), post=("ops",)))
    between = log.chat(ada, "general").seq
    elsewhere = log.chat(ada, "ops").seq
    log.access(ada, Access(op="3", name="ada", read=(">",), post=(">",), revoked=True))
    revoked = log.chat(ada, "ops").seq
    stranger = log.chat(log.agents[2], "ops").seq

    table = fold(log)
    assert table.owed(before, ada, "general") == {bob}
    assert table.owed(between, ada, "general") == frozenset()
    assert table.owed(elsewhere, ada, "ops") == {bob}
    assert table.owed(revoked, ada, "ops") == frozenset()
    assert table.owed(stranger, log.agents[2], "ops") == frozenset()


def test_n22_a_channel_needs_no_record_unless_the_space_says_listed(log: GeneratedLog, ada: str, bob: str) -> None:
    log.member(bob, ">", "in")
    log.channel(Channel(op="1", name="ops"))
    log.channel(Channel(op="2", name="random", listed=False))
    opened = log.chat(ada, "general").seq
    log.space(Space(op="3", channels="listed"))
    closed = log.chat(ada, "general").seq

    table = fold(log)
    assert table.owed(opened, ada, "general") == {bob}
    assert table.owed(closed, ada, "general") == frozenset()
    assert table.owed(closed, ada, "ops") == {bob}
    assert table.owed(closed, ada, "random") == frozenset()


def test_n11_a_part_counts_until_a_space_record_switches_it_off(log: GeneratedLog) -> None:
    before = log.chat(log.agents[0], "general").seq
    off = log.rule(log.subjects.space_record, b'{"op":"1","parts":{"deliver":"off"}}').seq
    table = fold(log)
    assert (table.space_at(before).parts.deliver, table.space_at(before).parts.archive) == ("on", "off")
    assert (table.space_at(off).parts.deliver, table.space_at(off).parts.archive) == ("off", "off")


# --- memberships ---


def test_f9_in_after_in_keeps_the_earlier_opening(log: GeneratedLog, ada: str, bob: str) -> None:
    first = log.member(bob, "general", "in").seq
    chat = log.chat(ada, "general").seq
    repeat = log.member(bob, "general", "in")
    table = fold(log)
    assert table.intervals(bob) == [Interval(bob, "general", first, None)]
    assert table.owed(chat, ada, "general") == {bob}
    assert verdict_of(log, repeat) is Verdict.REPEAT
    assert (table.repeats, table.void.total()) == (1, 0)


def test_f9_out_after_out_is_void(log: GeneratedLog, bob: str) -> None:
    joined = log.member(bob, "general", "in").seq
    left = log.member(bob, "general", "out").seq
    again = log.member(bob, "general", "out")
    never = log.member(bob, "ops", "out")
    table = fold(log)
    assert table.intervals(bob) == [Interval(bob, "general", joined, left)]
    assert table.void == {Verdict.NOT_IN: 2}
    assert [v.seq for v in table.void_records] == [again.seq, never.seq]


def test_a_leave_ends_the_join_it_names_and_no_newer_one(log: GeneratedLog, bob: str) -> None:
    first = log.member(bob, "general", "in").seq
    left = log.member(bob, "general", "out", ends=first).seq
    second = log.member(bob, "general", "in").seq
    late = log.member(bob, "general", "out", ends=first)
    table = fold(log)
    assert [(each.joined, each.left) for each in table.intervals(bob)] == [(first, left), (second, None)]
    assert [each.seq for each in table.void_records] == [late.seq]
    unnamed = log.member(bob, "general", "out").seq
    assert fold(log).intervals(bob)[-1].left == unnamed, "a record of before ends whichever is open"


def test_who_comes_back_is_not_owed_what_was_said_in_between(log: GeneratedLog, ada: str, bob: str) -> None:
    log.member(bob, "general", "in")
    log.member(bob, "general", "out")
    missed = log.chat(ada, "general").seq
    log.member(bob, "general", "in")
    heard = log.chat(ada, "general").seq
    table = fold(log)
    assert table.owed(missed, ada, "general") == frozenset()
    assert table.owed(heard, ada, "general") == {bob}
    assert len(table.intervals(bob)) == 2


def test_f18_leaving_one_of_two_overlapping_patterns_closes_only_that_one(
    log: GeneratedLog, ada: str, bob: str
) -> None:
    log.member(bob, "team.>", "in")
    log.member(bob, "team.backend", "in")
    log.member(bob, "team.backend", "out")
    seq = log.chat(ada, "team.backend").seq
    table = fold(log)
    assert table.owed(seq, ada, "team.backend") == {bob}
    assert [interval.pattern for interval in table.memberships_at(bob, seq)] == ["team.>"]


def test_f18_the_other_way_round_only_the_concrete_channel_stays(log: GeneratedLog, ada: str, bob: str) -> None:
    log.member(bob, "team.>", "in")
    log.member(bob, "team.backend", "in")
    log.member(bob, "team.>", "out")
    seq = log.chat(ada, "team.backend").seq
    table = fold(log)
    assert table.owed(seq, ada, "team.backend") == {bob}
    assert table.owed(seq, ada, "team.frontend") == frozenset()


def test_a_pattern_is_not_a_channel_that_has_members(log: GeneratedLog, bob: str) -> None:
    log.member(bob, "team.>", "in")
    table = fold(log)
    assert table.members_at("team.>", 99) == frozenset()
    assert table.members_at("team", 99) == frozenset()
    assert not table.allowed_now(bob, "team.>")
    assert not table.post_allowed(bob, "team.>", 99)


def test_a_tag_stands_for_one_pattern_for_ever(log: GeneratedLog, bob: str) -> None:
    log.member(bob, "general", "in")
    subject = log.subjects.member(bob, log.tag("general"))
    log.rule(subject, Member(op="x", state="out", pattern="ops"))
    table = fold(log)
    assert table.void == {Verdict.MISMATCH: 1}
    assert table.members_at("general", 99) == {bob}


# --- access ---


def test_f12_a_join_without_an_access_record_is_void(log: GeneratedLog) -> None:
    record = log.member(log.agents[0], "general", "in")
    assert verdict_of(log, record) is Verdict.NOT_PROVISIONED
    assert fold(log).members_at("general", 99) == frozenset()


def test_f12_a_join_counts_only_if_the_access_at_its_sequence_covers_the_pattern(log: GeneratedLog, bob: str) -> None:
    log.access(bob, Access(op="1", name="bob", read=("team.*",)))
    refused = [log.member(bob, pattern, "in") for pattern in ("team.>", "general", "team.a.b")]
    accepted = [log.member(bob, pattern, "in") for pattern in ("team.backend", "team.*")]
    log.access(bob, Access(op="2", name="bob", read=(">",)))
    assert [verdict_of(log, record) for record in refused] == [Verdict.NOT_COVERED] * 3
    assert [verdict_of(log, record) for record in accepted] == [Verdict.EFFECTIVE] * 2
    assert fold(log).members_at("general", 99) == frozenset()  # a later widening revives nothing


def test_a_join_of_a_revoked_owner_is_void_and_a_leave_needs_no_access(log: GeneratedLog, bob: str) -> None:
    log.member(bob, "general", "in")
    log.access(bob, Access(op="1", name="bob", read=(">",), revoked=True))
    join, leave = log.member(bob, "ops", "in"), log.member(bob, "general", "out")
    assert verdict_of(log, join) is Verdict.REVOKED
    assert verdict_of(log, leave) is Verdict.EFFECTIVE


def test_f12_narrowing_leaves_the_interval_and_filters_delivery(log: GeneratedLog, ada: str, bob: str) -> None:
    log.member(bob, "general", "in")
    seq = log.chat(ada, "general").seq
    assert fold(log).deliverable(seq, ada, "general") == {bob}
    narrowed = log.access(bob, Access(op="1", name="bob", read=("ops",))).seq

    table = fold(log)
    assert table.owed(seq, ada, "general") == {bob}
    assert table.deliverable(seq, ada, "general") == frozenset()
    assert table.deliverable(seq, ada, "general", head=narrowed - 1) == {bob}
    assert not table.allowed_now(bob, "general")
    assert table.uncovered(bob) == table.intervals(bob)


def test_access_counts_from_its_own_sequence(log: GeneratedLog, bob: str) -> None:
    seq = log.access(bob, Access(op="1", name="bob", read=("ops",))).seq
    table = fold(log)
    assert table.allowed_at(bob, "general", seq - 1)
    assert not table.allowed_at(bob, "general", seq)
    assert table.access_at(bob, 0) is None


def test_a_name_is_granted_once(log: GeneratedLog, ada: str, bob: str) -> None:
    stolen = log.access(bob, Access(op="1", name="ada"))
    table = fold(log)
    assert verdict_of(log, stolen) is Verdict.NAME_TAKEN
    assert (table.owner_named("ada"), table.owner_named("bob")) == (ada, bob)


def test_a_name_is_free_again_after_renaming_or_revocation(log: GeneratedLog, ada: str, bob: str) -> None:
    log.access(ada, Access(op="1", name="ada2"))
    log.access(bob, Access(op="2", name="ada"))
    assert (fold(log).owner_named("ada"), fold(log).owner_named("bob")) == (bob, None)
    log.access(bob, Access(op="3", name="ada", revoked=True))
    assert fold(log).owner_named("ada") is None
    log.access(log.agents[2], Access(op="4", name="ada", succeeds=bob))
    assert fold(log).owner_named("ada") == log.agents[2]


# --- what is void ---


def test_f14_an_acknowledgement_on_a_member_subject_is_void_and_the_older_version_stays(
    log: GeneratedLog, ada: str, bob: str
) -> None:
    joined = log.member(bob, "general", "in")
    log.append(joined.subject, PUBACK)
    log.append(log.subjects.access(bob), PUBACK)
    seq = log.chat(ada, "general").seq
    table = fold(log)
    assert table.owed(seq, ada, "general") == {bob}
    assert table.void == {Verdict.BAD_SIGNATURE: 2}


@pytest.mark.parametrize("payload", [PUBACK, b"", b'{"op":"1","name":"bob","name":"bob"}', b'{"op":"1","name":"b b"}'])
def test_a_signed_record_that_does_not_decode_is_void_and_the_older_version_stays(
    log: GeneratedLog, bob: str, payload: bytes
) -> None:
    before = fold(log).access_at(bob, 99)
    record = log.rule(log.subjects.access(bob), payload)
    assert verdict_of(log, record) is Verdict.MALFORMED
    assert fold(log).access_at(bob, 99) == before


def test_a_record_moved_to_another_subject_or_space_is_void(log: GeneratedLog, ada: str, bob: str) -> None:
    genuine = log.member(bob, "general", "in")
    moved = log.append(log.subjects.member(ada, log.tag("general")), genuine.payload, genuine.headers["Td-Sig"])
    assert verdict_of(log, moved) is Verdict.BAD_SIGNATURE
    other = Table(log.subjects, seeded_key(random.Random(9)).id, log.anchor_key).apply_all(log.records)
    assert other.void == {Verdict.BAD_SIGNATURE: 4}


def test_a_subject_that_is_not_ours_is_void(log: GeneratedLog) -> None:
    for tail in ("member.bob.general", "lease.other", "dlv.lease", "acl"):
        log.rule(f"{log.subjects.root}.{tail}", Member(op="1", state="in", pattern="general"))
    assert fold(log).void == {Verdict.BAD_SUBJECT: 4}


def test_a_link_record_must_name_its_link(log: GeneratedLog) -> None:
    link = Link(op="1", link="east", state="on", origin=log.space_id, channels={"general": "general"})
    good, bad = log.rule(log.subjects.link("east"), link), log.rule(log.subjects.link("west"), link)
    table = fold(log)
    assert verdict_of(log, bad) is Verdict.MISMATCH
    assert (table.link_at("east", good.seq), table.link_at("west", 99)) == (link, None)


def test_a_malformed_lease_leaves_the_older_one(log: GeneratedLog) -> None:
    lease = Lease(op="1", holder="one", host="h", pid=1, key=log.steward.id)
    good = log.rule(log.subjects.steward_lease, lease)
    log.rule(log.subjects.steward_lease, b'{"op":"2","holder":"two"}')
    assert fold(log).lease == (good.seq, lease)


def test_a_lease_holds_from_its_own_sequence_on(log: GeneratedLog, bob: str) -> None:
    at = log.rule(log.subjects.steward_lease, Lease(op="3", holder="one", host="h", pid=1, key=log.steward.id)).seq
    log.member(bob, "general", "in")
    assert fold(log).as_of(at).lease is not None
    assert fold(log).as_of(at - 1).lease is None


def test_messages_are_neither_void_nor_effective(log: GeneratedLog, ada: str) -> None:
    chat, via = log.chat(ada, "general"), log.append(log.subjects.via("east", ada, "general"), b"{}")
    assert [verdict_of(log, record) for record in (chat, via)] == [Verdict.MESSAGE] * 2
    assert fold(log).void.total() == 0


def test_void_records_are_kept_up_to_a_bound_and_all_counted(log: GeneratedLog) -> None:
    for _ in range(1200):
        log.append(log.subjects.space_record, PUBACK)
    table = fold(log)
    assert table.void == {Verdict.BAD_SIGNATURE: 1200}
    assert len(table.void_records) == 1000
    assert table.void_records[-1].seq == 1200


# --- the chain of trust ---


def test_n15_the_old_key_signs_the_rotation_and_the_new_one_everything_after_it(log: GeneratedLog, bob: str) -> None:
    old, new = log.steward, seeded_key(random.Random(2))
    rotation = log.space(Space(op="1", steward_key=new.id))
    stale = log.member(bob, "general", "in")
    log.steward = new
    fresh = log.member(bob, "ops", "in")

    table = fold(log)
    assert verdict_of(log, rotation) is Verdict.EFFECTIVE
    assert verdict_of(log, stale) is Verdict.BAD_SIGNATURE
    assert verdict_of(log, fresh) is Verdict.EFFECTIVE
    assert [table.steward_key_at(seq) for seq in (rotation.seq, rotation.seq + 1)] == [old.id, new.id]
    assert table.rotations == [rotation.seq]


def test_n15_a_key_cannot_introduce_itself(log: GeneratedLog) -> None:
    thief = seeded_key(random.Random(3))
    log.rule(log.subjects.space_record, Space(op="1", steward_key=thief.id), key=thief)
    table = fold(log)
    assert table.void == {Verdict.BAD_SIGNATURE: 1}
    assert table.steward_key == log.steward.id


def test_n15_naming_the_key_in_force_or_none_is_no_rotation(log: GeneratedLog) -> None:
    log.space(Space(op="1", steward_key=log.steward.id))
    log.space(Space(op="2"))
    assert fold(log).rotations == []
    assert fold(log).void.total() == 0


def test_n15_keys_rotate_twice_in_a_row(log: GeneratedLog, bob: str) -> None:
    for seed in (4, 5):
        fresh = seeded_key(random.Random(seed))
        log.space(Space(op=f"{seed}", steward_key=fresh.id))
        log.steward = fresh
    assert verdict_of(log, log.member(bob, "general", "in")) is Verdict.EFFECTIVE


# --- order, floor and snapshots ---


def test_records_must_come_in_increasing_order(log: GeneratedLog, bob: str) -> None:
    table = fold(log)
    with pytest.raises(LogRegressed):
        table.apply(log.records[-1])


def test_n27_nothing_is_answered_below_the_floor(log: GeneratedLog, bob: str) -> None:
    log.member(bob, "general", "in")
    table = fold(log, floor=2)
    assert table.members_at("general", 3) == {bob}
    for question in (table.members_at, table.class_at, table.channel_at, table.access_at, table.memberships_at):
        with pytest.raises(UsageError, match="floor 2"):
            question(bob if question in (table.access_at, table.memberships_at) else "general", 1)


def test_a_table_of_nothing_above_its_floor_still_answers_for_now(log: GeneratedLog, bob: str) -> None:
    table = fold(log, floor=50)
    assert table.allowed_now(bob, "general")


def test_a_snapshot_shows_the_state_after_its_record_and_no_credential(log: GeneratedLog, bob: str) -> None:
    log.access(bob, Access(op="1", name="bob", read=(">",), jwt="a.b.c"))
    joined = log.member(bob, "general", "in").seq
    log.channel(Channel(op="2", name="general", cls="live"))
    log.rule(log.subjects.steward_lease, Lease(op="3", holder="one", host="h", pid=1, key=log.steward.id))
    left = log.member(bob, "general", "out").seq

    table = fold(log)
    plain = msgspec.to_builtins(table.as_of(joined))
    assert plain["members"] == {bob: {"general": joined}}
    assert plain["access"][bob]["name"] == "bob"
    assert "jwt" not in plain["access"][bob]
    assert (plain["channels"], plain["lease"], plain["steward_key"]) == ({}, None, log.steward.id)
    after = table.as_of(left)
    assert after.members == {}
    assert after.channels["general"]["class"] == "live"
    assert after.lease is not None


def test_verification_can_be_injected_and_sees_what_was_signed(log: GeneratedLog, bob: str) -> None:
    seen: list[tuple[str | None, str, str, str, bytes]] = []

    def remember(signature: str | None, space_id: str, key: str, tail: str, payload: bytes) -> bool:
        seen.append((signature, space_id, key, tail, payload))
        return True

    Table(Subjects("main"), log.space_id, log.anchor_key, verify=remember).apply_all(log.records)
    record = log.records[0]
    assert seen == [(record.headers["Td-Sig"], log.space_id, log.anchor_key, f"acl.{bob}", record.payload)]


# --- against the model ---


@pytest.mark.parametrize("seed", range(200))
def test_the_fold_agrees_with_the_model_at_every_sequence(seed: int) -> None:
    rng = random.Random(seed)
    log = generate_log(rng, size=rng.randint(60, 200), agents=rng.randint(2, 6), channels=rng.randint(2, 8))
    table = Table(log.subjects, log.space_id, log.anchor_key, verify=verify_once).apply_all(log.records)
    model = Model(log.records, log.subjects.space, log.space_id, log.anchor_key, verify=verify_once)
    now = model.state(log.seq)

    assert {seq for versions in table.effective.values() for seq in versions} == now.counted
    for seq in range(log.seq + 2):
        state = model.state(seq)
        assert {o: a for o in log.agents if (a := table.access_at(o, seq))} == state.access
        assert table.steward_key_at(seq + 1) == state.key
        held = {(o, i.pattern, i.joined) for o in log.agents for i in table.memberships_at(o, seq)}
        assert held == {(s.owner, s.pattern, s.joined) for s in state.stays if s.joined < seq and s.left is None}
        for channel in rng.sample(log.channels, 2):
            sender = rng.choice(log.agents)
            owed = naive.owed(state, seq, sender, channel)
            assert table.members_at(channel, seq) == naive.members(state, channel, seq), (seq, channel)
            assert table.class_at(channel, seq) == naive.class_of(state, channel), (seq, channel)
            assert table.channel_at(channel, seq) == state.channels.get(channel)
            assert table.post_allowed(sender, channel, seq) == naive.may_post(state, sender, channel)
            assert table.owed(seq, sender, channel) == owed, (seq, channel)
            assert table.deliverable(seq, sender, channel) == {o for o in owed if naive.may_read(now, o, channel)}
    for owner in log.agents:
        stays = sorted((stay.joined, stay.pattern, stay.left) for stay in now.stays if stay.owner == owner)
        assert [(i.joined, i.pattern, i.left) for i in table.intervals(owner)] == stays


def test_generated_logs_contain_every_outcome_and_depend_only_on_the_seed() -> None:
    seen: set[Verdict] = set()
    owed = 0
    for seed in range(40):
        log = generate_log(random.Random(seed), size=120)
        table = Table(log.subjects, log.space_id, log.anchor_key, verify=verify_once)
        for record in log.records:
            seen.add(table.apply(record))
        owed += sum(len(table.owed(seq, log.agents[0], "general")) for seq in range(log.seq))
    assert seen == set(Verdict)
    assert owed > 500
    assert generate_log(random.Random(3), 80).records == generate_log(random.Random(3), 80).records
