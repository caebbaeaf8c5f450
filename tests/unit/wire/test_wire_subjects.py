"""Subjects are built and parsed in one place, and nothing parses as something it is not."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.errors import InvalidName
from tidings.wire import subjects as s
from tidings.wire.subjects import SHARDS, Subjects, shard_of
from tools.generated import seeded_key

MAIN = Subjects("main")
RANDOM = random.Random("subjects")
AGENTS = [seeded_key(RANDOM).id for _ in range(8)]

tokens = st.text("ABCxyz019_-", min_size=1, max_size=12)
agents = st.sampled_from(AGENTS)
tag_texts = st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", min_size=26, max_size=26)
channels = st.lists(tokens, min_size=1, max_size=5).map(".".join)
services = st.sampled_from(s.SERVICES)

Case = tuple[str, Any]


def built(
    build: Callable[..., str], value: Callable[..., Any], *parts: st.SearchStrategy[Any]
) -> st.SearchStrategy[Case]:
    return st.tuples(*parts).map(lambda arguments: (build(*arguments), value(*arguments)))


BUILDERS: dict[str, st.SearchStrategy[Case]] = {
    "chat": built(MAIN.chat, s.Chat, agents, channels),
    "via": built(MAIN.via, s.Via, tokens, agents, channels),
    "member": built(MAIN.member, s.MemberSubject, agents, tag_texts),
    "acl": built(MAIN.access, s.AccessSubject, agents),
    "channel": built(MAIN.channel, s.ChannelSubject, tag_texts),
    "link": built(MAIN.link, s.LinkSubject, tokens),
    "lease": st.just((MAIN.steward_lease, s.StewardLeaseSubject())),
    "space": st.just((MAIN.space_record, s.SpaceSubject())),
    "dm": built(MAIN.direct, lambda target, sender: s.Direct(shard_of(target), target, sender), agents, agents),
    "task": built(MAIN.task, s.Task, tokens, agents),
    "dlv": built(MAIN.delivery, lambda owner: s.Delivery(shard_of(owner), owner), agents)
    | st.just((MAIN.delivery_lease, s.DeliveryLease())),
    "aud": st.lists(tokens, min_size=1, max_size=4).map(lambda parts: (MAIN.audit(*parts), s.Audit(".".join(parts)))),
    "dead": built(MAIN.dead, s.Dead, tokens, tokens),
    "ctl": built(MAIN.control, s.Control, services, agents),
}
any_subject = st.one_of(*BUILDERS.values())


@pytest.mark.parametrize("kind", BUILDERS)
@given(data=st.data())
def test_every_subject_built_parses_as_exactly_what_was_built(kind: str, data: st.DataObject) -> None:
    subject, expected = data.draw(BUILDERS[kind])
    assert subject.split(".")[2] == kind
    assert MAIN.parse(subject) == expected


@given(any_subject)
def test_a_subject_of_one_space_is_nothing_in_another(case: Case) -> None:
    subject, _ = case
    for other in ("main2", "mai", "Main", "td", "live"):
        assert Subjects(other).parse(subject) is None
        assert MAIN.parse(subject.replace("td.main", f"td.{other}", 1)) is None


@given(any_subject)
def test_a_live_copy_is_only_ever_of_a_message(case: Case) -> None:
    subject, expected = case
    live = subject.replace("td.main.", "td.main.live.", 1)
    assert MAIN.parse(live) is None
    assert MAIN.parse_live(subject) is None
    assert MAIN.parse_live(live) == (expected if isinstance(expected, s.Chat | s.Via) else None)


def test_the_live_roster_parses_only_as_a_live_subject() -> None:
    assert MAIN.parse_live(MAIN.live_roster) == s.LiveRoster()
    assert MAIN.parse(MAIN.live_roster) is None


def rebuilt(parsed: Any) -> str:
    match parsed:
        case s.Chat():
            return MAIN.chat(parsed.sender, parsed.channel)
        case s.Via():
            return MAIN.via(parsed.link, parsed.sender, parsed.channel)
        case s.MemberSubject():
            return MAIN.member(parsed.owner, parsed.tag)
        case s.AccessSubject():
            return MAIN.access(parsed.owner)
        case s.ChannelSubject():
            return MAIN.channel(parsed.tag)
        case s.LinkSubject():
            return MAIN.link(parsed.link)
        case s.StewardLeaseSubject():
            return MAIN.steward_lease
        case s.SpaceSubject():
            return MAIN.space_record
        case s.Direct():
            return MAIN.direct(parsed.target, parsed.sender)
        case s.Task():
            return MAIN.task(parsed.role, parsed.sender)
        case s.Delivery():
            return MAIN.delivery(parsed.owner)
        case s.DeliveryLease():
            return MAIN.delivery_lease
        case s.Audit():
            return MAIN.audit(*parsed.rest.split("."))
        case s.Dead():
            return MAIN.dead(parsed.kind, parsed.key)
        case s.Control():
            return MAIN.control(parsed.service, parsed.sender)
    raise AssertionError(f"no builder for {parsed!r}")


NO_TOKENS = ["*", ">", "", " ", "ü", "\n", "a b", "٣", "a\n", "\ud800", "x" * 65, "$JS"]
odd = st.sampled_from([*NO_TOKENS, "live", "lease"])
soup_token = st.one_of(st.sampled_from([*BUILDERS, "td", "main", "steward", "0", "7"]), tokens, agents, tag_texts, odd)


@given(st.lists(soup_token, max_size=7).map(lambda parts: ".".join(["td", "main", *parts])))
def test_what_parses_in_token_soup_is_spelled_exactly_as_the_builder_spells_it(subject: str) -> None:
    parsed = MAIN.parse(subject)
    assert parsed is None or rebuilt(parsed) == subject


@given(any_subject, st.data())
def test_a_mutated_subject_parses_as_itself_or_not_at_all(case: Case, data: st.DataObject) -> None:
    parts = case[0].split(".")
    at = data.draw(st.integers(0, len(parts) - 1))
    parts[at : at + data.draw(st.integers(0, 1))] = data.draw(st.lists(soup_token, max_size=2))
    mutated = ".".join(parts)
    parsed = MAIN.parse(mutated)
    assert parsed is None or rebuilt(parsed) == mutated


@pytest.mark.parametrize("kind", BUILDERS)
@given(data=st.data())
def test_a_token_that_is_no_token_makes_a_subject_nobodys_wherever_it_stands(kind: str, data: st.DataObject) -> None:
    parts = data.draw(BUILDERS[kind])[0].split(".")
    for at, bad in itertools.product(range(len(parts)), NO_TOKENS):
        assert MAIN.parse(".".join([*parts[:at], bad, *parts[at + 1 :]])) is None


@given(st.text())
def test_arbitrary_text_is_not_a_subject(text: str) -> None:
    assert MAIN.parse(text) is None
    assert MAIN.parse_live(text) is None


@pytest.mark.parametrize("wrong", range(1, SHARDS))
def test_a_wrong_shard_is_a_mailbox_nobody_reads_and_does_not_parse(wrong: int) -> None:
    owner, sender = AGENTS[0], AGENTS[1]
    shard = (shard_of(owner) + wrong) % SHARDS
    assert MAIN.parse(f"td.main.dm.{shard}.{owner}.{sender}") is None
    assert MAIN.parse(f"td.main.dlv.{shard}.{owner}") is None


@pytest.mark.parametrize("name", ["*", ">", "", "a b", "ü", "a\n", "x" * 65, "team..a", "team."])
def test_a_builder_refuses_what_is_not_a_name(name: str) -> None:
    for build in (
        lambda: MAIN.chat(AGENTS[0], name),
        lambda: MAIN.via("west", AGENTS[0], name),
        lambda: MAIN.via(name, AGENTS[0], "general"),
        lambda: MAIN.member(AGENTS[0], name),
        lambda: MAIN.task(name, AGENTS[0]),
        lambda: MAIN.direct(name, AGENTS[0]),
        lambda: MAIN.direct(AGENTS[0], name),
        lambda: MAIN.control(name, AGENTS[0]),
        lambda: MAIN.dead("task", name),
        lambda: MAIN.link(name),
        lambda: Subjects(name),
    ):
        with pytest.raises(InvalidName):
            build()
