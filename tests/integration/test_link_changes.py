"""Links whose terms change while they are, and words that go on from space to space, on real brokers."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from carried_links import (
    LinkedSpaces,
    came,
    linked_spaces,
    said,
    status,
    stored,
    three_spaces,
    until_came,
    until_recorded,
    worker,
)
from linked_spaces import say
from tidings.cli.main import main
from tidings.client.connect import connect_directly
from tidings.contract.link_worker import LinkEvent, RepairCompleted
from tidings.links.worker import LinkWorker
from tidings.wire.signing import ACCOUNT, KeyPair
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[LinkedSpaces]:
    async with linked_spaces(tmp_path) as spaces:
        await spaces.main.add("eve", post=["general", "news"])
        await spaces.acme.add("bea", read=[">"])
        yield spaces


async def run(space: RealSpace, *words: str) -> tuple[int, str]:
    """The exit code of `tidings link`, and what it said."""
    said = io.StringIO()

    def command() -> int:
        with redirect_stdout(said), redirect_stderr(said):
            return main(["link", *words, "--space", space.home.name, "--home", str(space.home.home)])

    code = await asyncio.to_thread(command)
    return code, said.getvalue()


async def done(space: RealSpace, *words: str) -> str:
    code, text = await run(space, *words)
    assert code == 0, text
    return text


# --- changing terms ---


async def test_what_one_operator_narrows_holds_at_once_and_what_came_stays(both: LinkedSpaces) -> None:
    async with worker(both.acme), both.main.agent("eve") as eve:
        await say(eve, "general", "one")
        await until_came(both.acme, ["one"])
        await done(both.main, "set", "acme", "--share", "news", "--yes")
        await say(eve, "general", "two")
        await say(eve, "news", "three")

        async def handled() -> bool:
            facts = await status(both.acme)
            return bool(facts.live and facts.live.handled and facts.live.lag_records == 0)

        await eventually(handled, within=20)
        assert await came(both.acme) == ["one"]
        assert "they may read general" in await done(both.main, "set", "acme", "--share", "general", "--yes")
        await until_came(both.acme, ["one", "two"])


async def test_verify_compares_what_is_shared_and_taken_now_and_says_what_is_outside_of_that(
    both: LinkedSpaces,
) -> None:
    async with worker(both.acme), both.main.agent("eve") as eve:
        await done(both.main, "set", "acme", "--share", "general,news", "--yes")
        await done(both.acme, "set", "main", "--take", "general", "--take", "news")
        await say(eve, "general", "one")
        await say(eve, "news", "two", "three")
        await until_came(both.acme, ["one", "two", "three"])
        assert "not compared" not in await done(both.acme, "verify", "main")

        await done(both.main, "set", "acme", "--share", "general", "--yes")
        told = await done(both.acme, "verify", "main")
        assert told.startswith("equal: every record that main shares"), told
        assert "not compared: 2 records of news, which main does not share any more; what came stays" in told
        await said(both.main, "ada", "four")
        await until_came(both.acme, ["one", "two", "three", "four"])
        found = json.loads(await done(both.acme, "verify", "main", "--json"))
        assert (found["equal"], found["extra"], found["not_taken"]) == (True, 0, [])
        assert found["not_shared"] == [[both.main.info.id, "news", 2]]

        await done(both.main, "set", "acme", "--share", "general,news", "--yes")
        await done(both.acme, "set", "main", "--take", "general")

        async def left_out() -> bool:
            told = await done(both.acme, "verify", "main")
            assert told.startswith("equal"), told
            return "left out: 2 records of news, which main shares and this space does not take" in told

        await eventually(left_out, within=20)
        assert await came(both.acme) == ["one", "two", "three", "four"]


async def test_a_repair_that_finds_only_what_is_not_shared_any_more_finds_nothing(both: LinkedSpaces) -> None:
    await said(both.main, "ada", "one")
    heard: list[LinkEvent] = []
    async with worker(both.acme) as running:
        await until_came(both.acme, ["one"])
        running.listen(heard.append)
        await done(both.main, "set", "acme", "--share", "news", "--yes")
        await said(both.main, "ada", "two")
        completed = await eventually(lambda: [each for each in heard if isinstance(each, RepairCompleted)], within=20)
        assert [(each.lacking, each.extra) for each in completed] == [(0, 0)] * len(completed)


async def test_more_passes_once_both_have_said_so_and_under_the_names_of_whoever_takes_it(both: LinkedSpaces) -> None:
    await said(both.main, "ada", "general")
    async with worker(both.acme), both.main.agent("eve") as eve:
        await say(eve, "news", "news")
        await until_came(both.acme, ["general"])
        await done(both.acme, "set", "main", "--take", "general=far.general", "--take", "news=far.news")
        await done(both.main, "set", "acme", "--share", "general,news", "--yes")
        await until_came(both.acme, ["general", "news"])
        await say(eve, "general", "again")
        await until_came(both.acme, ["general", "news", "again"])
    async with connect_directly("acme", name="bea", home=both.acme.home.home) as bea:
        for channel, texts in (("general", ["general"]), ("far.news", ["news"]), ("far.general", ["again"])):
            assert [each.text for each in await bea.history(channel, 10)] == texts


async def test_what_cannot_be_is_refused_in_a_sentence_and_changes_nothing(both: LinkedSpaces) -> None:
    before = await done(both.main, "show", "acme", "--json")
    for words, reason in (
        ((), "it is so already"),
        (("--share", "", "--take", ""), "nothing would pass"),
        (("--beyond", "general"), "SPACE:THEIRS=OURS"),
        (("--beyond", "nobody:general"), "no space is meant"),
        (("--hops", "9"), "1 to 8 links"),
        (("--until", "soon"), "is not a time"),
        (("--take", "a=x,b=x"), "two channels would have one name"),
        (("--direct", "--no-roster"), "direct messages and tasks need the roster"),
        (("--tasks", "--no-roster"), "direct messages and tasks need the roster"),
    ):
        code, text = await run(both.main, "set", "acme", *words)
        assert (code, reason in " ".join(text.split())) == (2, True), text
    assert await done(both.main, "show", "acme", "--json") == before


async def test_an_end_that_is_put_off_or_named_goes_on_where_it_was(both: LinkedSpaces) -> None:
    async with worker(both.acme):
        await said(both.main, "ada", "one")
        await until_came(both.acme, ["one"])
        await done(both.acme, "set", "main", "--until", "90d")
        await said(both.main, "ada", "two")
        await until_came(both.acme, ["one", "two"])
        await until_recorded(both.acme, {"admitted": 2})  # nothing was read again
        assert (await status(both.acme)).until is not None
        await done(both.acme, "set", "main", "--until", "never")
        assert (await status(both.acme)).until is None


async def test_mail_is_on_with_who_is_here_and_off_without_and_whoever_opens_either_is_asked(
    both: LinkedSpaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuse(words: str, **_options: Any) -> bool:
        asked.append(words)
        return False

    monkeypatch.setattr("typer.confirm", refuse)

    async def switches() -> tuple[str, str]:
        facts = json.loads(await done(both.main, "show", "acme", "--json"))
        return facts["direct"], facts["roster"]

    for words, question in (
        (("--roster",), "Let them know all agents here by name?"),
        (("--direct",), "Let them know all agents here by name and write to agents here?"),
        (("--direct", "--share", "general,news"), "Let them read more and know all agents here by name and write to"),
    ):
        code, _ = await run(both.main, "set", "acme", *words)
        assert (code, asked.pop().startswith(question), await switches()) == (1, True, ("off", "off")), words
    told = await done(both.main, "set", "acme", "--direct", "--yes")
    assert "direct messages: on" in told
    assert "each tells the other who its agents are: on" in told
    assert await switches() == ("on", "on")
    await done(both.main, "set", "acme", "--no-roster")
    assert (asked, await switches()) == ([], ("off", "off")), "nobody is asked for less"


# --- words that go on ---


def settled(*running: LinkWorker) -> Callable[[], bool]:
    def look() -> bool:
        states = [each.direction.status() for worker in running for each in worker._carried.values()]
        return all(each.status == "live" and not each.lag_records for each in states)

    return look


async def test_in_a_chain_words_go_on_once_the_middle_lets_them_and_the_end_takes_them(tmp_path: Path) -> None:
    async with three_spaces(tmp_path, "ab", "bc") as spaces, worker(spaces["b"]), worker(spaces["c"]):
        await said(spaces["a"], "ada", "from a")
        await until_came(spaces["b"], ["from a"])
        await said(spaces["b"], "ada", "from b")
        await until_came(spaces["c"], ["from b"])
        told = await done(spaces["b"], "set", "c", "--hops", "2", "--yes")
        assert "what other spaces said goes on to them" in told

        async def offered() -> bool:
            return bool((await stored(spaces["c"], "linkbetweenbc")).not_taken)

        # it reads what is new; what was passed over is read again once it is taken
        await said(spaces["a"], "ada", "and more")
        await eventually(offered, within=20)
        assert "passed on, not taken" in await done(spaces["c"], "show", "b")
        known = spaces["a"].info.id[:12]
        await done(spaces["c"], "set", "b", "--beyond", f"{known}:general=a.general", "--yes")
        await eventually(lambda: has_come(spaces["c"], {"from a", "from b", "and more"}), within=30)
        assert "from A" in await done(spaces["c"], "show", "b")
        async with connect_directly("c", name="ada", home=spaces["c"].home.home) as ada:
            past = await ada.history("a.general", 10)
        assert [each.text for each in past] == ["and more", "from a"]
        taken_back = await done(spaces["c"], "set", "b", "--beyond", "")
        assert "through them you take nothing of others" in taken_back
        assert "what other spaces said does not go on to them" in taken_back
        shown = json.loads(await done(spaces["c"], "show", "b", "--json"))
        assert (shown["beyond"], shown["hops"]) == ({}, 1)
        code, text = await run(spaces["c"], "set", "b", "--beyond", "")
        assert (code, "it is so already" in text) == (2, True)


async def test_who_takes_nothing_from_behind_any_more_may_go_on_passing_on(both: LinkedSpaces) -> None:
    behind = KeyPair.generate(ACCOUNT).id
    told = await done(both.acme, "set", "main", "--beyond", f"{behind}:general=far.general", "--yes")
    assert "a message may come over 2 links: what other spaces said goes on to them" in told
    await done(both.acme, "set", "main", "--beyond", "", "--hops", "2")
    shown = json.loads(await done(both.acme, "show", "main", "--json"))
    assert (shown["beyond"], shown["hops"]) == ({}, 2)


async def has_come(space: RealSpace, texts: set[str]) -> bool:
    return set(await came(space)) == texts


async def test_in_a_ring_of_three_each_word_is_in_every_space_once_and_nothing_goes_round(tmp_path: Path) -> None:
    async with (
        three_spaces(tmp_path, "ab", "bc", "ac", passing=True) as spaces,
        worker(spaces["a"]) as a,
        worker(spaces["b"]) as b,
        worker(spaces["c"]) as c,
    ):
        for number in range(5):
            for name, space in spaces.items():
                await said(space, "ada", f"{name} {number}")
        wanted = {here: {f"{n} {i}" for n in "abc" if n != here for i in range(5)} for here in "abc"}
        for here, texts in wanted.items():
            await eventually(lambda here=here, texts=texts: has_come(spaces[here], texts), within=30)  # type: ignore[misc]
        heads = {name: await head(space) for name, space in spaces.items()}
        await eventually(settled(a, b, c), within=30)
        for name, space in spaces.items():
            assert len(await came(space)) == 10, "each word once"
            assert await head(space) == heads[name], "and nothing goes round"


async def head(space: RealSpace) -> int:
    """Of records that links brought."""
    return len(await came(space))
