"""What an endpoint makes of links: judged by the record in force, asked when it must be, refused for good or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from linking import OtherSpace
from tidings.client import links
from tidings.client.links import Judge, LinkTable
from tidings.contract.agents import LinksAnswer, LinksRequest, LinkVersionRow
from tidings.errors import DeniedError, StewardUnreachable, UnreachableError
from tidings.wire.envelope import ClaimedOrigin
from tidings.wire.subjects import Subjects
from tidings_testing.waiting import eventually

WEST, NORTH = OtherSpace("west"), OtherSpace("north")
SECOND = 1_000_000_000


def row(seq: int, link: str = "west", state: str = "on", **fields: Any) -> dict[str, Any]:
    given = {"link": link, "seq": seq, "state": state, "origin": WEST.id, "space": "west", "hops": 1, "until": None}
    return {**given, "channels": {"general": "general"}, "beyond": {}, "mail": False, "tasks": False, **fields}


class Steward:
    """Answers `space links`, and counts who asks."""

    def __init__(self, *rows: dict[str, Any], through: int = 100, floor: int = 1, page: int = 100) -> None:
        self.rows, self.through, self.floor, self.page = list(rows), through, floor, page
        self.asked = self.under_way = self.most = 0
        self.failure: Exception | None = None
        self.token_used = "token"
        self.hooks: list[Callable[[Any], Awaitable[None]]] = []

    class identity:  # noqa: N801
        subjects = Subjects("main")

    def on_session(self, hook: Callable[[Any], Awaitable[None]]) -> None:
        self.hooks.append(hook)

    async def ready(self, _timeout: float) -> None:
        return None

    async def call(self, request: LinksRequest, **_: float) -> LinksAnswer:
        after = request.after
        self.asked += after is None
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        if self.failure is not None:
            raise self.failure
        start = int(after or 0)
        end = start + self.page
        return LinksAnswer(
            links=msgspec.convert(tuple(self.rows[start:end]), tuple[LinkVersionRow, ...]),
            next=str(end) if end < len(self.rows) else None,
            newest=max((each["seq"] for each in self.rows), default=0),
            through=self.through,
            floor=self.floor,
        )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "ASK_EVERY", 0.0)


def asked(theirs: str = "general", ours: str = "general", *, link: str = "west", hops: int = 1) -> ClaimedOrigin:
    return ClaimedOrigin(link, WEST.id, theirs, ours, hops)


async def known(steward: Steward) -> LinkTable:
    table = LinkTable(steward)  # type: ignore[arg-type]
    await table.learn(steward.through)
    return table


async def test_nothing_is_judged_before_the_steward_was_asked() -> None:
    table = LinkTable(Steward(row(10)))  # type: ignore[arg-type]
    assert table.judge(asked(), 20, 0) is None
    judge = Judge(table, 20, 0)
    assert not judge(asked())
    assert judge.is_open
    await table.learn(20)
    assert (table.judge(asked(), 20, 0), table.asked) == (True, 1)


async def test_a_record_is_judged_by_the_version_in_force_at_its_sequence() -> None:
    table = await known(
        Steward(row(10), row(20, state="off"), row(30, channels={"general": "other"}, hops=2), row(40, until=5))
    )
    said = [table.judge(asked(), seq, 0) for seq in (9, 10, 19, 20, 29, 30, 45)]
    assert said == [False, True, True, False, False, False, True]
    assert [table.judge(asked(ours="other", hops=hops), 30, 0) for hops in (1, 2, 3)] == [True, True, False]
    assert [table.judge(asked(), 45, second * SECOND) for second in (4, 5, 6)] == [True, False, False]
    assert table.judge(asked(link="unknown"), 45, 0) is False


async def test_a_space_behind_the_other_comes_by_its_own_names_only() -> None:
    table = await known(Steward(row(10, beyond={NORTH.id: {"news": "north.news"}}, hops=2)))
    behind = ClaimedOrigin("west", NORTH.id, "news", "north.news", 2)
    assert table.judge(behind, 20, 0) is True
    assert table.judge(behind._replace(theirs="general", channel="general"), 20, 0) is False
    assert table.judge(asked("news", "north.news"), 20, 0) is False


async def test_a_refusal_is_for_good_only_where_everything_is_known() -> None:
    table = await known(Steward(row(10), through=100))
    assert table.judge(asked(ours="other"), 100, 0) is False
    assert table.judge(asked(ours="other"), 101, 0) is None, "a newer link record may let it in"
    table.hear(10, 105)
    assert table.judge(asked(ours="other"), 101, 0) is False, "there is no newer one"


async def test_what_the_newest_known_record_lets_in_is_taken_until_another_one_is_known_of() -> None:
    table = await known(Steward(row(10), through=100))
    assert table.judge(asked(), 150, 0) is True
    table.hear(120, 130)
    assert table.judge(asked(), 150, 0) is None
    assert table.judge(asked(), 100, 0) is True, "what was known before stays known"
    table.hear(10, 90)
    assert table.judge(asked(), 150, 0) is None, "an older word takes nothing back"


async def test_a_change_is_asked_for_when_it_is_needed_and_then_counts(quick: None) -> None:
    steward = Steward(row(10), through=100)
    table = await known(steward)
    steward.rows.append(row(120, state="off"))
    steward.through = 130
    table.hear(120, 130)
    assert table.asked == 1
    await table.learn(125)
    assert (table.judge(asked(), 125, 0), table.judge(asked(), 119, 0), table.asked) == (False, True, 2)


async def test_what_is_older_than_the_log_is_judged_by_what_held_where_it_begins() -> None:
    table = await known(Steward(row(50), row(60, "east", origin=NORTH.id), through=100, floor=50))
    assert table.judge(asked(), 20, 0) is True
    east = ClaimedOrigin("east", NORTH.id, "general", "general", 1)
    assert table.judge(east, 55, 0) is False, "this link was written later"
    assert table.judge(east, 60, 0) is True


async def test_one_question_at_a_time_whoever_asks(quick: None) -> None:
    steward = Steward(*(row(seq) for seq in range(1, 11)), through=5, page=2)
    table = LinkTable(steward)  # type: ignore[arg-type]
    await asyncio.gather(*(table.learn(seq) for seq in range(40, 60)))
    assert steward.most == 1
    assert steward.asked <= 3
    assert table.judge(asked(ours="other"), 59, 0) is False


async def test_questions_are_not_asked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    table = LinkTable(Steward(row(1), through=5))  # type: ignore[arg-type]
    monkeypatch.setattr(asyncio, "sleep", sleep)
    await table.learn(5)
    await table.learn(6)
    assert pauses[0] == 0.0
    assert 0.0 < max(pauses) <= links.ASK_EVERY


async def test_whoever_wants_to_know_is_told_once_it_is_known_however_long_that_takes(quick: None) -> None:
    steward = Steward(row(10))
    table = LinkTable(steward)  # type: ignore[arg-type]
    learned = asyncio.Event()
    table.on_learned.append(learned.set)
    steward.failure = StewardUnreachable("away")
    with pytest.raises(StewardUnreachable):
        await table.learn(20)
    table.want(20)
    table.want(15)
    while steward.asked < 4:
        await asyncio.sleep(0)
    assert not learned.is_set()
    steward.failure = None
    async with asyncio.timeout(5):
        await learned.wait()
    assert table.judge(asked(), 20, 0) is True
    await table.close()


async def test_a_refusal_of_the_steward_is_no_answer_and_ends_nothing(quick: None) -> None:
    steward = Steward(row(10))
    table = LinkTable(steward)  # type: ignore[arg-type]
    steward.failure = DeniedError("not you")
    with pytest.raises(UnreachableError, match="not you"):
        await table.learn(20)
    assert table.judge(asked(), 20, 0) is None


async def test_another_access_or_another_log_is_asked_for_anew(quick: None) -> None:
    steward = Steward(row(10))
    table = await known(steward)
    for hook in steward.hooks:
        await hook(None)
    await table.learn(100)
    before = table.asked
    for hook in steward.hooks:
        await hook(None)
    assert table.judge(asked(), 20, 0) is True, "the same access"
    steward.token_used = "wider"
    for hook in steward.hooks:
        await hook(None)
    assert table.judge(asked(), 20, 0) is None
    await table.learn(100)
    table.follow_epoch("first")
    assert table.judge(asked(), 20, 0) is True
    table.follow_epoch("second")
    assert table.judge(asked(), 20, 0) is None
    assert table.asked == before + 1


async def test_a_space_is_called_what_a_link_record_of_it_says() -> None:
    table = await known(
        Steward(row(10), row(11, "north", origin=NORTH.id, space="north"), row(30, space="acme"), through=50)
    )
    assert table.space_name("west", WEST.id, 20) == "west"
    assert table.space_name("west", WEST.id, 30) == "acme"
    assert table.space_name("west", NORTH.id, 20) == "north", "another link has it"
    assert table.space_name("west", OtherSpace().id, 20) == ""


async def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "ROWS_KEPT", 10)
    table = await known(Steward(*(row(seq, f"link{seq}") for seq in range(1, 50)), page=4))
    assert len(table._links) == 10


async def test_mail_that_was_let_in_before_the_log_began_is_judged_by_whom_the_link_is_with() -> None:
    """What was agreed then is not known any more; whoever reads it late reads it all the same."""
    steward = Steward(row(50, state="off"))
    steward.floor, steward.through = 50, 60
    table = await known(steward)
    mail = asked()._replace(theirs="U", channel="U", agreed=20)
    assert table.judge(mail, 0, 0) is True
    assert table.judge(mail._replace(origin=NORTH.id), 0, 0) is False
    assert table.judge(mail._replace(agreed=55), 0, 0) is False


async def test_a_link_record_that_a_question_under_way_may_not_know_is_asked_for_again(quick: None) -> None:
    steward = Steward(row(10), through=15)
    table = LinkTable(steward)  # type: ignore[arg-type]
    answered, read = asyncio.Event(), steward.call

    async def slow(*words: Any, **more: Any) -> LinksAnswer:
        said = await read(*words, **more)
        await answered.wait()
        return said

    steward.call = slow  # type: ignore[method-assign]
    before = asyncio.create_task(table.learn_record(12))
    await eventually(lambda: steward.asked == 1 and not steward.under_way)
    steward.through = 30
    after = asyncio.create_task(table.learn_record(25))
    await asyncio.sleep(0)
    answered.set()
    await asyncio.gather(before, after)
    assert (table._through, steward.asked) == (30, 2)
