"""Workers of links between two real spaces: live, killed, cut off and back, paused, changed and removed."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import tidings
from carried_links import (
    LinkedSpaces,
    WorkerProcess,
    agree,
    call_worker,
    came,
    linked_spaces,
    running_status,
    said,
    status,
    stored,
    until_came,
    worker,
    worker_process,
)
from linked_spaces import LINK, linked, say, text_of, unlinked
from tidings.admin.link_peers import LinkPeers
from tidings.cli import link_words
from tidings.cli.context import Context
from tidings.cli.link import _links
from tidings.client.connect import connect_directly
from tidings.contract.core import Request
from tidings.contract.link_worker import (
    FollowLinkRequest,
    ForgetLinkRequest,
    LinkEvent,
    LinkReported,
    ListLinksRequest,
    ListQuarantineRequest,
    PauseLinkRequest,
    PullAdvanced,
    PushAdvanced,
    RebuildLinkRequest,
    ResumeLinkRequest,
    ShowQuarantinedRequest,
    VerifyLinkRequest,
)
from tidings.errors import StewardUnreachable, StoreBusy, UsageError, WorkerUnreachable
from tidings.links import operations, replicator
from tidings.links.operations import alone
from tidings.links.source import PeerSource
from tidings.links.worker import LinkWorker
from tidings.rpc.local_socket import follow
from tidings.wire import signing
from tidings.wire.digests import DigestAnswer
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


def connect(space: RealSpace, name: str) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, channels=["general"])


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[LinkedSpaces]:
    async with linked_spaces(tmp_path) as spaces:
        yield spaces


async def until(space: RealSpace, wanted: str, link: str = LINK) -> None:
    async def look() -> bool:
        live = (await status(space, link)).live
        return live is not None and live.status == wanted

    deadline = asyncio.get_running_loop().time() + 30
    while not await look():
        assert asyncio.get_running_loop().time() < deadline, await status(space, link)
        await asyncio.sleep(0.05)


async def test_what_is_said_in_either_space_is_heard_live_in_the_other_and_an_answer_comes_back_once(
    both: LinkedSpaces,
) -> None:
    async with (
        worker(both.main),
        worker(both.acme),
        connect(both.main, "ada") as ada,
        connect(both.acme, "bob") as bob,
    ):
        await until(both.main, "live")
        await until(both.acme, "live")
        sent = await ada.send("general", "hello over there")
        heard = await bob.next_message(20)
        assert (heard.text, heard.sender.name, heard.origin) == ("hello over there", "ada@main", "main")
        await bob.send("general", "hello back", reply_to=heard.message.id)
        answer = await ada.next_message(20)
        assert (answer.text, answer.sender.name, answer.message.reply_to) == ("hello back", "bob@acme", sent.id)
        live = await running_status(both.acme)
        assert (live.status, live.connectivity) == ("live", "online")
    assert await came(both.main) == ["hello back"]
    assert await came(both.acme) == ["hello over there"]


async def test_a_space_that_is_300_records_behind_catches_up_in_order_and_says_how_far_it_is(
    both: LinkedSpaces,
) -> None:
    texts = [f"word {number}" for number in range(300)]
    await said(both.main, "ada", *texts)
    async with worker(both.acme):
        events = follow(both.acme.home.link_socket, FollowLinkRequest(LINK))
        first = await anext(events)
        assert isinstance(first, LinkReported)
        assert first.live is not None
        await until_came(both.acme, texts)
        seen = {first.name}
        while "pull_advanced" not in seen and first.live.lag_records:
            seen.add((await asyncio.wait_for(anext(events), 10)).name)
        await events.aclose()
        await until(both.acme, "live")
        assert (await running_status(both.acme)).lag_records == 0
        assert (await stored(both.acme)).counts == {"admitted": 300}


@pytest.mark.parametrize("place", ["store.before_commit:kill:5", "store.after_commit:kill:5"])
async def test_a_worker_that_is_killed_around_a_commit_loses_nothing_and_doubles_nothing(
    both: LinkedSpaces, place: str
) -> None:
    texts = [f"word {number}" for number in range(60)]
    await said(both.main, "ada", *texts[:30])
    async with worker_process(both.acme, TIDINGS_FAILPOINT=place) as doomed:
        saying = asyncio.create_task(said(both.main, "ada", *texts[30:]))
        assert await asyncio.wait_for(doomed.child.wait(), 30) == -9
        await saying
    async with worker(both.acme):
        await until_came(both.acme, texts)
        await until(both.acme, "live")
        answer = await call_worker(both.acme, VerifyLinkRequest(link=LINK))
        assert (answer.equal, answer.counts) == (True, {"admitted": 60})
    assert await came(both.acme) == texts


async def test_killed_time_and_again_while_both_sides_talk_everything_is_there_once(both: LinkedSpaces) -> None:
    texts = [f"word {number}" for number in range(80)]
    saying = asyncio.create_task(said(both.main, "ada", *texts))
    for _ in range(3):
        running = await WorkerProcess.start(both.acme)
        assert (await running.said())["ready"]
        await asyncio.sleep(0.15)
        await running.kill()
    await saying
    async with worker(both.acme):
        await until_came(both.acme, texts)


async def test_a_link_goes_on_when_the_broker_it_waits_for_is_back_and_not_when_it_is_next_polled(
    both: LinkedSpaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicator, "LADDER", (0.2, 0.4, 1.0))
    monkeypatch.setattr(replicator, "POLL", (600.0, 600.0))
    async with worker(both.acme) as running:
        await until(both.acme, "live")
        await both.main.stop_steward()
        both.main.broker.stop()
        direction = running._carried[LINK].direction
        running._carried[LINK].source.patience = 0.3  # type: ignore[attr-defined]
        direction.ask()  # it sleeps until it is polled
        await eventually(lambda: direction._failures > 3, within=60, what="it is only polled now")
        both.main.broker.start()
        await both.main.start_steward()
        await said(both.main, "ada", "back again")
        await until_came(both.acme, ["back again"])
        await until(both.acme, "live")
        await both.acme.stop_steward()
        await said(both.main, "ada", "while our steward is away")
        direction.ask()
        await eventually(lambda: direction._failures > 3, within=60, what="it is only polled now")
        await both.acme.start_steward()
        await until_came(both.acme, ["back again", "while our steward is away"])


async def test_a_peer_that_is_away_is_said_to_be_and_what_was_said_comes_when_it_is_back(both: LinkedSpaces) -> None:
    async with worker(both.acme) as running:
        await until(both.acme, "live")
        await both.main.stop_steward()
        both.main.broker.stop()
        running._carried[LINK].direction.ask()

        async def is_offline() -> bool:
            return bool((await running_status(both.acme)).connectivity == "offline")

        deadline = asyncio.get_running_loop().time() + 20
        while not await is_offline():
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.1)
        assert (await running_status(both.acme)).words
        both.main.broker.start()
        await both.main.start_steward()
        await said(both.main, "ada", "back again")
        running._carried[LINK].direction.ask()
        await until_came(both.acme, ["back again"])
        await until(both.acme, "live")


async def test_a_paused_link_takes_nothing_in_and_goes_on_where_it_was(both: LinkedSpaces) -> None:
    async with worker(both.acme):
        await said(both.main, "ada", "one")
        await until_came(both.acme, ["one"])
        assert (await call_worker(both.acme, PauseLinkRequest(link=LINK, reason="a look at it"))).paused_before is None
        await until(both.acme, "paused")
        await said(both.main, "ada", "two")
        await asyncio.sleep(0.5)
        assert await came(both.acme) == ["one"]
        assert (await running_status(both.acme)).words == "a look at it"
    async with worker(both.acme):  # it stays so
        await until(both.acme, "paused")
        assert (await call_worker(both.acme, ResumeLinkRequest(link=LINK))).paused_before == "a look at it"
        await until_came(both.acme, ["one", "two"])


async def test_another_agreement_takes_effect_while_it_runs_and_a_pause_outlives_it(both: LinkedSpaces) -> None:
    async with worker(both.acme):
        await said(both.main, "ada", "one")
        await until_came(both.acme, ["one"])
        await call_worker(both.acme, PauseLinkRequest(link=LINK))
        await linked(
            both.acme,
            origin=both.main.info.id,
            space="main",
            channels={"general": "news"},
            make_peer=False,
            steward=both.main.info.steward_key,
        )
        await said(both.main, "ada", "two")
        await eventually_paused_under_the_new_one(both.acme)
        assert await came(both.acme) == ["one"]
        await call_worker(both.acme, ResumeLinkRequest(link=LINK))
        await until_came(both.acme, ["one", "two"])


async def eventually_paused_under_the_new_one(space: RealSpace) -> None:
    deadline = asyncio.get_running_loop().time() + 20
    while True:
        facts = await status(space)
        if facts.store and facts.store.paused and facts.live and facts.store.handled is None:
            return
        assert asyncio.get_running_loop().time() < deadline, facts
        await asyncio.sleep(0.05)


async def test_a_link_that_ended_is_carried_no_more_and_others_go_on_untouched(
    both: LinkedSpaces, tmp_path: Path
) -> None:
    from tidings_testing.real_space import real_space

    async with real_space(tmp_path / "c", name="lab") as lab:
        await lab.add("cyd")
        await agree(lab, both.acme, "bcdefghijklm")
        await linked(
            both.acme,
            "bcdefghijklm",
            origin=lab.info.id,
            space="lab",
            channels={"general": "lab"},
            shares=[],
            make_peer=False,
        )
        async with worker(both.acme) as running:
            await until(both.acme, "live")
            await until(both.acme, "live", "bcdefghijklm")
            untouched = running._carried["bcdefghijklm"]
            await unlinked(both.acme)
            await eventually(lambda: LINK not in running._carried)
            await said(both.main, "ada", "nobody listens")
            await said(lab, "cyd", "somebody does")
            await until_came(both.acme, ["somebody does"])
            assert running._carried == {"bcdefghijklm": untouched}


async def test_a_peer_that_ends_the_link_is_said_to_and_takes_nothing_with_it(both: LinkedSpaces) -> None:
    async with worker(both.acme) as running:
        await said(both.main, "ada", "one")
        await until_came(both.acme, ["one"])
        await unlinked(both.main)
        running._carried[LINK].direction.ask()
        await until(both.acme, "paused")
        assert (await running_status(both.acme)).words
    assert await came(both.acme) == ["one"]


async def test_a_second_worker_is_refused_with_the_first_one_named(both: LinkedSpaces) -> None:
    async with worker(both.acme):
        async with worker_process(both.acme) as second:
            said_last = await second.said()
            assert said_last["error"]["code"] == StoreBusy.code
            assert "carried by another process (pid " in said_last["error"]["message"]
            assert await second.child.wait() == StoreBusy.exit_code
        with pytest.raises(StoreBusy, match="one does it at a time"):
            async with alone(both.acme.home):
                pass


async def test_a_process_that_is_told_to_ends_in_order_and_leaves_no_socket(both: LinkedSpaces) -> None:
    async with worker_process(both.acme) as running:
        assert (await running.said())["ready"]
        await until(both.acme, "live")
        assert await running.end() == 0
        assert await running.said() == {"stopped": True}
    assert not both.acme.home.link_socket.exists()
    with pytest.raises(WorkerUnreachable, match="no link worker runs"):
        await status(both.acme)


async def test_who_looks_every_so_often_takes_the_same_without_being_woken(both: LinkedSpaces) -> None:
    async with worker(both.acme, every=0.3):
        await said(both.main, "ada", "one", "two")
        await until_came(both.acme, ["one", "two"])


async def test_a_link_whose_other_space_cannot_be_reached_yet_waits_and_says_so(both: LinkedSpaces) -> None:
    peers = LinkPeers.below(both.acme.home)
    access, creds = peers.get(LINK), peers.creds(LINK).read_text()
    assert access is not None
    peers.forget(LINK)
    async with worker(both.acme):
        facts = await status(both.acme)
        assert facts.live is None
        assert "is not known here" in facts.words
        await said(both.main, "ada", "one")
        peers.put(access, creds)
        await until_came(both.acme, ["one"])
        assert (await status(both.acme)).words == ""


async def test_rebuilt_a_link_reads_everything_again_and_nothing_comes_twice(both: LinkedSpaces) -> None:
    async with worker(both.acme):
        await said(both.main, "ada", "one", "two", "three")
        await until_came(both.acme, ["one", "two", "three"])
        await until(both.acme, "live")
        assert (await call_worker(both.acme, RebuildLinkRequest(link=LINK))).handled > 0
        await until(both.acme, "live")
        await said(both.main, "ada", "four")
        await until_came(both.acme, ["one", "two", "three", "four"])
        answer = await call_worker(both.acme, VerifyLinkRequest(link=LINK))
        assert (answer.equal, sum(answer.counts.values())) == (True, 4)


async def test_what_is_in_quarantine_outlives_a_rebuild_when_the_other_log_has_it_no_more(both: LinkedSpaces) -> None:
    async with worker(both.acme):
        async with both.main.agent("ada") as ada:
            payload = text_of(ada, "not signed so")
            wrong = signing.sign(ada.key, ada.space_id, "chat", "another", payload)
            subject = ada.subjects.chat(ada.id, "general")
            reply = await ada.connection.request(subject, payload, timeout=5, headers={"Td-Sig": wrong})
        seq = int(json.loads(reply.data)["seq"])

        async def listed() -> list[int]:
            found = await call_worker(both.acme, ListQuarantineRequest(link=LINK))
            return [each.seq for each in found.records]

        await eventually(listed, within=20)
        async with both.main.core() as js:
            await js.api(f"STREAM.MSG.DELETE.{both.main.subjects.log_stream}", {"seq": seq})
        assert (await call_worker(both.acme, RebuildLinkRequest(link=LINK))).quarantined == 1
        await until(both.acme, "live")
        assert await listed() == [seq]
        kept = await call_worker(both.acme, ShowQuarantinedRequest(link=LINK, seq=seq))
        assert kept.payload == payload


async def has_compared(running: LinkWorker) -> None:
    """Waits until the first comparison of the worker has ended: it would fetch what a test takes away."""
    link = running._carried[LINK].direction
    await eventually(lambda: link._repair_at and link._end_comparing is None and link._compared is None, within=20)


async def test_verify_says_what_is_missing_here_and_it_is_fetched(both: LinkedSpaces) -> None:
    async with worker(both.acme) as running:
        await said(both.main, "ada", "one", "two", "three")
        await until_came(both.acme, ["one", "two", "three"])
        await until(both.acme, "live")
        await has_compared(running)
        database = running._database
        assert database is not None
        await database.write(lambda c: c.execute("DELETE FROM disposition WHERE local_seq = ?", (seq_of_two(c),)))
        answer = await call_worker(both.acme, VerifyLinkRequest(link=LINK))
        assert (answer.equal, answer.lacking, answer.extra) == (False, 1, 0)
        assert (answer.differences[0].channel, answer.more) == ("general", False)
        deadline = asyncio.get_running_loop().time() + 20
        while not (await call_worker(both.acme, VerifyLinkRequest(link=LINK))).equal:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.1)
    assert await came(both.acme) == ["one", "two", "three"]


async def test_verify_looks_for_a_bounded_number_of_differences_and_says_that_there_may_be_more(
    both: LinkedSpaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "MOST_DIFFERING", 3)
    await said(both.main, "ada", *map(str, range(8)))
    async with worker(both.acme):
        await until_came(both.acme, list(map(str, range(8))))
    async with alone(both.acme.home) as ledger:
        await ledger.database.write(lambda c: c.execute("DELETE FROM disposition"))
        answer = await ledger.call(VerifyLinkRequest(LINK))
    assert (answer.equal, answer.more, answer.extra) == (False, True, 0)
    assert 3 <= answer.lacking <= 8
    assert f"at least {answer.lacking} records of main are not here" in next(link_words.verified("main", answer))


def seq_of_two(connection: object) -> int:
    rows = connection.execute("SELECT local_seq FROM disposition ORDER BY seq").fetchall()  # type: ignore[attr-defined]
    return int(rows[1][0])


async def test_what_is_forgotten_is_gone_from_the_ledger_and_what_it_brought_stays(both: LinkedSpaces) -> None:
    async with worker(both.acme):
        await said(both.main, "ada", "one")
        await until_came(both.acme, ["one"])
        await unlinked(both.acme)
        LinkPeers.below(both.acme.home).forget(LINK)
        assert (await call_worker(both.acme, ForgetLinkRequest(link=LINK))).count == 1
        assert (await status(both.acme)).store is None
    assert await came(both.acme) == ["one"]


async def test_what_cannot_be_meant_is_refused_in_words_and_the_worker_goes_on(both: LinkedSpaces) -> None:
    async with worker(both.acme):
        requests: tuple[Request[Any], ...] = (ListLinksRequest("nothing"), PauseLinkRequest("no link"))
        for request in (*requests, ShowQuarantinedRequest(LINK, 0)):
            with pytest.raises(UsageError):
                await call_worker(both.acme, request)
        await said(both.main, "ada", "one")
        await until_came(both.acme, ["one"])


async def test_everything_that_happens_to_a_link_is_an_event_for_whoever_follows_it(both: LinkedSpaces) -> None:
    """Each of them happens on real spaces, and is one line with its name, in JSON and in words."""
    seen: dict[str, str] = {}

    async def hear() -> None:
        async for each in follow(both.acme.home.link_socket, FollowLinkRequest(LINK)):
            seen[each.name] = link_words.event(each)

    async def wait_for(*names: str) -> None:
        await eventually(lambda: set(names) <= set(seen), within=30, what=f"{names} of {seen}")

    async with worker(both.acme) as running, worker(both.main):
        await until(both.acme, "live")
        following = asyncio.create_task(hear())
        try:
            await wait_for("link_reported")
            carried = running._carried[LINK]
            await said(both.main, "ada", "one")
            await said(both.acme, "bob", "two")
            await wait_for("pull_advanced", "push_advanced")
            carried.direction.ask(repair=True)
            await wait_for("repair_started", "repair_completed")

            async def no_digest(through: int) -> DigestAnswer:
                raise StewardUnreachable(f"no digest up to {through}")

            carried.source.digest, digest = no_digest, carried.source.digest  # type: ignore[method-assign]
            carried.direction.ask(repair=True)
            await wait_for("repair_failed")
            carried.source.digest = digest  # type: ignore[method-assign]
            await running._database.write(lambda c: c.execute("UPDATE link SET handled_mark = 'another record'"))  # type: ignore[union-attr]
            await said(both.main, "ada", "three")
            await wait_for("gap_detected")
            await until(both.acme, "live")
            assert isinstance(carried.source, PeerSource)
            carried.source.patience = 1.0
            await both.main.stop_steward()
            both.main.broker.stop()

            async def given_up() -> bool:
                carried.direction.ask()
                return "degraded_poll_entered" in seen

            await eventually(given_up, within=60)
            await wait_for("status_changed", "connectivity_changed")
        finally:
            following.cancel()
            await asyncio.wait({following})
        assert all("Z  " in words and name not in words.split("Z  ")[1] for name, words in seen.items()), seen
        both.main.broker.start()
        await both.main.start_steward()
    assert await came(both.acme) == ["one", "three"]


async def test_who_listens_to_a_worker_hears_every_event_until_it_does_not_want_to(both: LinkedSpaces) -> None:
    heard: list[LinkEvent] = []
    async with worker(both.acme) as running:
        remove = running.listen(heard.append)
        await said(both.main, "ada", "one")
        await eventually(lambda: any(isinstance(each, PullAdvanced) and each.admitted for each in heard), within=20)
        remove()
        count = len(heard)
        await said(both.main, "ada", "two")
        await until_came(both.acme, ["one", "two"])
        await until(both.acme, "live")
        assert len(heard) == count


# --- the other direction ---


async def test_how_far_the_other_space_is_with_what_is_shared_is_told_and_each_advance_is_an_event(
    both: LinkedSpaces,
) -> None:
    async with worker(both.main):
        await said(both.main, "ada", "one", "two")

        async def is_behind() -> bool:
            push = (await status(both.main)).push
            return push is not None and push.lag_records >= 2 and push.waiting_since is not None

        await eventually(is_behind, within=20)
        push = (await status(both.main)).push
        assert push is not None
        assert push.asked_at is None, "nobody asked yet"
        events = follow(both.main.home.link_socket, FollowLinkRequest(LINK))
        assert isinstance(await anext(events), LinkReported), "from here on it is followed"
        async with worker(both.acme):
            await until_came(both.acme, ["one", "two"])
            async for event in events:
                if isinstance(event, PushAdvanced):
                    handled = event.handled
                    break
            await events.aclose()

            async def is_told() -> bool:
                push = (await status(both.main)).push
                return bool(push and push.lag_records == 0 and push.asked_at and push.handled >= handled)

            await eventually(is_told, within=20)
            await both.main.add("cid", post=["secret"])
            async with both.main.agent("cid") as cid:
                await say(cid, "secret", "not shared")
            await eventually(is_told, within=20)


async def test_a_space_that_only_shares_is_told_too_how_far_the_other_is_without_a_worker(both: LinkedSpaces) -> None:
    await linked(both.main, origin=both.acme.info.id, shares=["general"], space="acme", make_peer=False)
    await said(both.main, "ada", "one")
    where = Context(space="main", home_dir=str(both.main.home.home))
    (found,), by_worker = await asyncio.to_thread(_links, where, ListLinksRequest())
    assert (by_worker, found.live) == (False, None)
    assert found.push is not None
    assert found.push.lag_records > 0
    assert link_words.push_lag(found, time.time()).startswith(f"{found.push.lag_records} records, ")
    async with worker(both.acme):
        await until_came(both.acme, ["one"])

        async def caught_up() -> bool:
            (now,), _ = await asyncio.to_thread(_links, where, ListLinksRequest())
            return link_words.push_lag(now, time.time()) == "nothing"

        await eventually(caught_up, within=20)


async def test_a_link_that_the_other_side_ended_is_said_to_be_at_once(both: LinkedSpaces) -> None:
    async with worker(both.acme):
        await until(both.acme, "live")
        await unlinked(both.main)
        async with asyncio.timeout(8):  # it would be asked again after 15 seconds at least
            await until(both.acme, "paused")
        live = await running_status(both.acme)
        assert (live.ended_there, live.connectivity) == (True, "offline")
        assert "its operator ended the link" in live.words
