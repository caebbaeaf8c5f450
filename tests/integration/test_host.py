"""The host on a real broker: what is stored leaves when it can, in order, once; what arrives is kept before it is
acknowledged."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import sqlite3
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tidings
from crowd import revoke
from duplicate_window import STREAM, forget_ids
from hosted import break_trigger, mend_trigger
from hosting import EVERYTHING, Clock, adopt, has_texts, host_in, in_state, inbox_of, notices_of, texts_of
from tidings.client.agent import Agent
from tidings.client.direct_transport import DirectAgent
from tidings.client.publishing import prepare_chat
from tidings.client.session_lease import SessionLease
from tidings.client.transport import Joined
from tidings.contract.core import Request
from tidings.contract.host import LONGEST_AGE, SendRequest
from tidings.errors import (
    AuthRevoked,
    DeniedError,
    IdReused,
    OutcomeUnknown,
    Reconnecting,
    StewardUnreachable,
    StoreBroken,
    UnknownPeer,
    UnreachableError,
    UsageError,
    WrongState,
)
from tidings.host import agent_sessions, outbox_views, receiver
from tidings.host import compose as composing
from tidings.host import host as hosts
from tidings.host import inbox as inbox_views
from tidings.host.inbox import Arrival, Bound, InboxRow
from tidings.host.mailbox import LocalInbox, held_number, open_mailbox
from tidings.nats.jetstream_api import NO_END
from tidings.steward import side_streams
from tidings.wire.message import Sender, compose, new_id
from tidings.wire.rulings import Space
from tidings_testing.processes import pause as pause_process
from tidings_testing.real_space import TEST_INTERVALS, RealSpace, real_space
from tidings_testing.waiting import eventually

DAY = 86_400.0


def dm(text: str, **more: object) -> SendRequest:
    return SendRequest(agent="bob", text=text, **more)  # type: ignore[arg-type]


async def test_a_message_is_stored_confirmed_and_kept_by_its_reader(pair: RealSpace, tmp_path: Path) -> None:
    async with host_in(tmp_path / "host") as host:
        ada = await adopt(host, pair, "ada", knows=2)
        bob = await adopt(host, pair, "bob", receive=True)
        changed = host.changes(bob)
        sent = await host.send(ada, dm("hello"), wait=10)
        assert (sent.state, sent.stage, sent.warnings) == ("confirmed", "confirmed", ())
        await has_texts(host, bob, ["hello"])
        (row,) = await inbox_of(host, bob)
        assert (row.id, row.sender, row.sealed) == (sent.id, ada.agent, 1)
        assert await changed.wait(5)
        assert await inbox_of(host, ada) == []
        await in_state(host, ada, sent.id, "done")
        assert {each.scope: (each.state, each.receiving) for each in host.health()} == {
            ada: ("open", False),
            bob: ("open", True),
        }


async def test_a_send_while_the_space_is_down_answers_stored_at_once_and_arrives_when_it_returns(
    pair: RealSpace, tmp_path: Path
) -> None:
    home = tmp_path / "host"
    async with host_in(home) as host:
        await adopt(host, pair, "ada", knows=2)
        await adopt(host, pair, "bob", receive=True)
    await pair.stop_steward()
    pair.broker.stop()
    async with host_in(home) as host:
        ada, bob = sorted(host.scopes(), key=lambda scope: scope.name)
        before = time.monotonic()
        sent = await host.send(ada, dm("while you were away"))
        assert time.monotonic() - before < 0.5
        assert (sent.state, sent.stage, sent.seq) == ("pending", "stored", 0)
        assert sent.warnings == ("stored: main cannot be reached now; it leaves when it can",)
        with pytest.raises(UnknownPeer, match="no agent 'bod' in this space; did you mean bob"):
            await host.send(ada, SendRequest(agent="bod", text="to nobody"))
        assert len(await host.outbox.read(outbox_views.listed)) == 1, "a name nobody has is refused, not stored"
        await eventually(lambda: health_of(host, ada).reason)  # the answer may come before the first attempt failed
        health = health_of(host, ada)
        assert (health.state, health.age) == ("waiting", None)
        assert "no broker answers" in str(health.reason)

        async def says_why_it_waits() -> bool:
            return any("no broker answers" in block.words for block in await host.outbox.read(outbox_views.blocks))

        await eventually(says_why_it_waits)
        pair.broker.start()
        await pair.start_steward()
        for scope in (ada, bob):
            host.wake(scope)
        await has_texts(host, bob, ["while you were away"])


async def test_a_space_that_was_never_seen_says_so_and_stores_nothing(pair: RealSpace, tmp_path: Path) -> None:
    await pair.stop_steward()
    pair.broker.stop()
    async with host_in(tmp_path / "host") as host:
        ada = await adopt(host, pair, "ada")
        with pytest.raises(UnknownPeer, match="never seen from this host"):
            await host.send(ada, dm("who?"))
        assert await host.outbox.read(outbox_views.listed) == []
        assert (await host.send(ada, SendRequest(channel="general", text="a channel needs no name"))).stage == "stored"


async def test_the_same_id_is_answered_the_same_across_restarts_and_never_means_something_else(
    pair: RealSpace, tmp_path: Path
) -> None:
    mid = new_id()
    for run in range(2):
        async with host_in(tmp_path / "host") as host:
            ada = await adopt(host, pair, "ada", knows=2)
            bob = await adopt(host, pair, "bob", receive=True)
            sent = await host.send(ada, dm("once", id=mid), wait=10)
            assert (sent.id, sent.row, sent.stage) == (mid, 1, "confirmed"), run
            with pytest.raises(IdReused, match="nothing was changed"):
                await host.send(ada, dm("something else", id=mid))
            await has_texts(host, bob, ["once"])


async def test_a_deaf_space_does_not_stall_the_other(pair: RealSpace, tmp_path: Path) -> None:
    """Of the same name even: a space is its id."""
    async with real_space(tmp_path / "other home") as other:
        for name in ("ada", "bob"):
            await other.add(name)
        async with host_in(tmp_path / "host") as host:
            here, there = [await adopt(host, space, "ada", knows=2) for space in (pair, other)]
            bob = await adopt(host, pair, "bob", receive=True)
            bob_there = await adopt(host, other, "bob", receive=True)
            assert here.space == there.space
            assert here.space_id != there.space_id
            assert other.broker.pid is not None
            await pause_process(other.broker.pid)
            try:
                for number in range(300):
                    await host.send(there, SendRequest(channel=f"general.{number}", text="into the void"))
                await host.send(there, dm("there"))
                for number in range(20):
                    sent = await host.send(here, dm(f"here {number}"), wait=10)
                    assert sent.stage == "confirmed"
                await has_texts(host, bob, [f"here {number}" for number in range(20)])
            finally:
                os.kill(other.broker.pid, signal.SIGCONT)
            await has_texts(host, bob_there, ["there"])


async def test_a_broker_killed_while_messages_leave_has_each_once_and_in_order(pair: RealSpace, tmp_path: Path) -> None:
    texts = [f"message {number}" for number in range(60)]
    async with host_in(tmp_path / "host") as host:
        ada = await adopt(host, pair, "ada", knows=2)
        bob = await adopt(host, pair, "bob", receive=True)
        for number, text in enumerate(texts):
            await host.send(ada, dm(text))
            if number in (20, 40):
                pair.broker.kill()
                pair.broker.start()
        await has_texts(host, bob, texts)
        async with pair.core() as core:
            state = (await core.info("DM_main"))["state"]
        assert state["last_seq"] == len(texts), "the broker stored each once"


async def test_a_publish_for_one_run_of_the_broker_goes_to_no_other_and_waits_for_none(pair: RealSpace) -> None:
    async with tidings.connect("main", name="ada", home=pair.home.home, receive=False) as ada:
        said = compose(Sender(ada.id, "ada"), text="for that run only")
        prepared = prepare_chat(ada.transport.identity, "general", said)
        with pytest.raises(Reconnecting, match="another run"):
            await ada.transport.publish(prepared, only="a run before")
        assert await ada.transport.publisher.find(prepared) is None
        run = ada.transport.incarnation
        assert (await ada.transport.publish(prepared, only=run)).incarnation == run
        pair.broker.kill()
        await eventually(lambda: ada.transport.state == "reconnecting")
        with pytest.raises(UnreachableError):
            async with asyncio.timeout(1):
                await ada.transport.publish(prepared, only=run)
        pair.broker.start()


class Copy:
    """The broker's store as it was: what a power cut may put back."""

    def __init__(self, space: RealSpace, folder: Path) -> None:
        self.space, self.folder = space, folder

    async def take(self) -> None:
        await self.space.stop_steward()
        self.space.broker.stop()
        shutil.copytree(self.space.home.store, self.folder)
        self.space.broker.start()
        await self.space.start_steward()

    async def put_back(self) -> None:
        await self.space.stop_steward()
        self.space.broker.stop()
        shutil.rmtree(self.space.home.store)
        shutil.copytree(self.folder, self.space.home.store)
        self.space.broker.start()
        await self.space.start_steward()


async def test_a_broker_that_lost_its_tail_gets_it_again_and_every_reader_has_each_once(
    pair: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "LOCAL_HORIZON_MS", 600_000)
    copy = Copy(pair, tmp_path / "copy")
    await pair.add("eve")
    async with host_in(tmp_path / "host") as host:
        ada = await adopt(host, pair, "ada", knows=3)
        eve = await adopt(host, pair, "eve", receive=True)
        early, late = [f"kept {n}" for n in range(5)], [f"lost {n}" for n in range(12)]

        async def send(texts: list[str]) -> None:
            for text in texts:
                for to in ("bob", "eve"):
                    assert (await host.send(ada, SendRequest(agent=to, text=text), wait=20)).stage == "confirmed"

        await send(early)
        await has_texts(host, eve, early)
        await eventually(lambda: nothing_to_tell(host, eve))
        async with pair.core() as core:  # what was read is removed sooner or later: that is not lost
            await core.purge("DM_main", subject_filter=pair.subjects.direct(eve.agent, ada.agent), below=NO_END)
        await copy.take()
        await send(late)
        await has_texts(host, eve, early + late)
        await copy.put_back()
        bob = await adopt(host, pair, "bob", receive=True)
        await has_texts(host, bob, early + late, within=40)
        rows = await eventually(lambda: all_confirmed(host, ada.space_id), within=30)
        assert rows == 2 * len(early + late)
        assert await texts_of(host, eve) == early + late, "eve has each once, although some came twice"
        attempts = {row.row: row.attempts for row in await host.outbox.read(outbox_views.listed)}
        assert list(attempts.values()) == [1] * 2 * len(early) + [2] * 2 * len(late), (
            "only what was lost was sent again"
        )


async def nothing_to_tell(host: hosts.Host, scope: hosts.Scope) -> bool:
    return not await host.inbox.read(inbox_views.receipts_to_tell, scope.space_id, scope.agent)


async def all_confirmed(host: hosts.Host, space: str) -> int:
    counts = await host.outbox.read(outbox_views.counts)
    left = sum(number for (_, state), number in counts.items() if state not in ("confirmed", "done"))
    return 0 if left else sum(counts.values())


async def test_a_day_without_the_broker_or_the_recipient_loses_nothing_and_a_week_ends_it_by_name(
    pair: RealSpace, tmp_path: Path
) -> None:
    clock = Clock()
    async with host_in(tmp_path / "host", clock=clock) as host:
        ada = await adopt(host, pair, "ada", knows=2)
        await pair.stop_steward()
        pair.broker.stop()
        await eventually(lambda: host.health()[0].state == "reconnecting")
        sent = await host.send(ada, dm("a day late"))
        hasty = await host.send(ada, SendRequest(channel="general", text="soon or never", max_age=3_600))
        clock.ahead += DAY
        await host.drain.keep_house()
        assert (await host.find(ada, sent.id)).state == "pending"
        dead = await host.find(ada, hasty.id)
        assert (dead.state, dead.code) == ("dead", "too_old")
        pair.broker.start()
        await pair.start_steward()
        host.wake(ada)
        await in_state(host, ada, sent.id, "confirmed", "done")
        clock.ahead += DAY
        bob = await adopt(host, pair, "bob", receive=True)
        await has_texts(host, bob, ["a day late"])
        again = await host.requeue(ada, hasty.id)
        assert (again.supersedes, again.id != hasty.id) == (dead.row, True)
        await in_state(host, ada, again.id, "confirmed", "done")


@pytest.mark.parametrize("kind", ["chat", "dm", "task"])
async def test_what_its_program_sent_itself_meanwhile_is_not_stored_again_however_much_later_it_leaves(
    space: RealSpace, tmp_path: Path, kind: str
) -> None:
    """The host's answer was lost, so its program sent it directly under its id; the host drains it a day later."""
    await space.add("ada", post=["general"])
    await space.add("bob", roles=["reviewer"])
    mid, clock = new_id(), Clock()
    where = {"chat": {"channel": "general"}, "dm": {"agent": "bob"}, "task": {"role": "reviewer"}}[kind]
    async with host_in(tmp_path / "host", clock=clock) as host:
        ada = await adopt(host, space, "ada", knows=2)
        await host.pause(ada.space_id)
        for number in range(3):
            await host.send(ada, SendRequest(text=f"before {number}", **where))  # type: ignore[arg-type]
        await host.send(ada, SendRequest(text="said once", id=mid, **where))  # type: ignore[arg-type]
        last = await host.send(ada, SendRequest(text="behind it", **where))  # type: ignore[arg-type]
        async with tidings.connect("main", name="ada", home=space.home.home, receive=False) as direct:
            sending: Any = {"chat": direct.send, "dm": direct.dm, "task": direct.ask}[kind]
            said = await sending({"chat": "general", "dm": "bob", "task": "reviewer"}[kind], "said once", id=mid)
        await forget_ids(space)
        clock.ahead += DAY
        await host.resume(ada.space_id)
        await in_state(host, ada, last.id, "confirmed", "done")
        row = await host.find(ada, mid)
        assert (row.state in ("confirmed", "done"), row.seq) == (True, said.seq)
        async with space.core() as core:
            assert (await core.counts_of(STREAM[kind], row.subject))[row.subject] == 5


def test_nothing_is_tried_for_longer_than_the_space_remembers_what_it_had() -> None:
    """A row that was tried without an answer is looked for: in the log, or by the receipt of what was read and removed.

    The log of a space is kept by size unless its people set an age, which the next test is about.
    """
    assert composing.DEFAULT_MAX_AGE < side_streams.RECEIPTS_KEPT
    assert LONGEST_AGE <= side_streams.RECEIPTS_KEPT
    assert Space(op="", at="").keep_age is None
    with pytest.raises(UsageError, match="`max_age`: expected float <= 2592000"):
        SendRequest.operation.decode({"agent": "bob", "text": "too late", "max_age": LONGEST_AGE + 1})


async def test_what_the_space_forgot_is_stored_again_and_its_reader_has_it_once(
    pair: RealSpace, tmp_path: Path
) -> None:
    """Beyond what the space remembers nobody can tell whether it was there: an inbox never forgets that it came."""
    mid, clock = new_id(), Clock()
    async with host_in(tmp_path / "host", clock=clock) as host:
        ada = await adopt(host, pair, "ada", knows=2)
        bob = await adopt(host, pair, "bob", receive=True)
        await host.pause(ada.space_id)
        await host.send(ada, dm("said once", id=mid))
        async with tidings.connect("main", name="ada", home=pair.home.home, receive=False) as direct:
            first = await direct.dm("bob", "said once", id=mid)
        await has_texts(host, bob, ["said once"])
        await host.mark_read(bob, [(await inbox_of(host, bob))[0].row])
        await eventually(lambda: nothing_to_tell(host, bob))
        await pair.stop_steward()
        async with pair.core() as core:
            await core.purge("DM_main", subject_filter="td.main.dm.>", below=NO_END)
            await core.purge("AUD_main", subject_filter="td.main.aud.>", below=NO_END)
        await forget_ids(pair)
        await pair.start_steward()
        clock.ahead += DAY
        await host.resume(ada.space_id)
        row = await in_state(host, ada, mid, "confirmed", "done")
        assert row.seq is not None
        assert row.seq > first.seq, "stored a second time"
        await eventually(lambda: host.send(ada, dm("after it"), wait=10), what="the lane goes on")
        await has_texts(host, bob, ["said once", "after it"])


@pytest.mark.parametrize("hours", [-1, 1, *(pytest.param(h, marks=pytest.mark.slow) for h in (-48, 48))])
async def test_a_clock_that_jumps_stops_nothing(
    pair: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    monkeypatch.setattr(hosts, "LOCAL_HORIZON_MS", 300)
    clock = Clock()
    async with host_in(tmp_path / "host", clock=clock) as host:
        ada = await adopt(host, pair, "ada", knows=2)
        bob = await adopt(host, pair, "bob", receive=True)
        texts = []
        for number in range(12):
            if number == 4:
                pair.broker.kill()
            if number == 6:
                clock.ahead += hours * 3_600
                pair.broker.start()
            await host.send(ada, dm(f"message {number}"))
            texts.append(f"message {number}")
        # What the broker had handed out when it was killed comes again after its patience (30 s), behind newer ones.
        await eventually(lambda: has_each(host, bob, texts), within=45)
        after = [text for text in await texts_of(host, bob) if text not in texts[:4]]
        assert after == texts[4:], "what was sent since comes in order"
        await eventually(lambda: all_done(host), within=20)


async def has_each(host: hosts.Host, scope: hosts.Scope, texts: list[str]) -> bool:
    return sorted(await texts_of(host, scope)) == sorted(texts)


async def all_done(host: hosts.Host) -> bool:
    return {state for (_, state) in await host.outbox.read(outbox_views.counts)} == {"done"}


async def test_mail_of_a_revoked_agent_waits_and_says_why_and_its_name_may_come_back(
    pair: RealSpace, tmp_path: Path
) -> None:
    async with host_in(tmp_path / "host") as host:
        ada = await adopt(host, pair, "ada", knows=2)
        bob = await adopt(host, pair, "bob", receive=True)
        await host.pause(ada.space_id, "being moved")
        queued = await host.send(ada, dm("too late"))
        assert queued.warnings == ("stored: main is paused here (being moved); it leaves when that ends",)
        await revoke(pair, "ada")
        await eventually(lambda: health_of(host, ada).state == "revoked", within=30)
        await host.resume(ada.space_id)
        with pytest.raises(AuthRevoked, match="nothing can be sent as ada of main"):
            await host.send(ada, dm("more"))
        (block,) = [each for each in await host.outbox.read(outbox_views.blocks) if each.sender == ada.agent]
        assert block.code == "revoked"
        await pair.add("ada")
        new = await adopt(host, pair, "ada")
        assert new.agent != ada.agent
        await host.send(new, dm("under a new key"), wait=10)
        await has_texts(host, bob, ["under a new key"])
        host.wake(ada)
        await eventually(lambda: "has another key now" in str(health_of(host, ada).reason))
        assert (await host.find(ada, queued.id)).state == "pending"
        assert (await host.cancel(ada, queued.id)).state == "cancelled"


async def test_a_request_that_is_repeated_is_answered_as_before_also_when_it_could_not_be_stored_now(
    pair: RealSpace, tmp_path: Path
) -> None:
    await pair.add("eve")
    async with host_in(tmp_path / "host") as host:
        ada = await adopt(host, pair, "ada", knows=3)
        (bob,) = (agent.id for agent in host.directories.of(ada.space_id).known if agent.name == "bob")
        direct, by_id = dm("hello", id=new_id()), SendRequest(agent=bob, text="hello", id=new_id())
        called = SendRequest(channel="general", text="look", mentions=("bob", "eve"), id=new_id())
        asked = (direct, by_id, called)
        first = [await host.send(ada, each, wait=10) for each in asked]
        assert {each.stage for each in first} == {"confirmed"}

        async def all_as_before() -> None:
            again = [await host.send(ada, each) for each in asked]
            assert [(each.id, each.row, each.seq) for each in again] == [(e.id, e.row, e.seq) for e in first]
            assert {each.stage for each in again} == {"confirmed"}

        await revoke(pair, "bob")
        await eventually(lambda: len(host.directories.of(ada.space_id).known) == 2, within=30)
        await all_as_before()
        assert "no agent 'bob'" in (await host.send(ada, direct)).warnings[0], "and it is said that it could not be now"
        with pytest.raises(IdReused, match="accepted before for another message"):
            await host.send(ada, dm("something else", id=direct.id))
        with pytest.raises(UnknownPeer, match=f"as row {first[2].row}, (confirmed|done)"):
            await host.send(ada, msgspec.structs.replace(called, mentions=("bod",)))
        with pytest.raises(UnknownPeer, match=r"^no agent 'bob' in this space; `who` lists the agents of this space$"):
            await host.send(ada, dm("hello", id=new_id()))

        await revoke(pair, "ada")
        await eventually(lambda: health_of(host, ada).state == "revoked", within=30)
        await all_as_before()
        with pytest.raises(IdReused):
            await host.send(ada, SendRequest(channel="general", text="another", id=called.id))
        with pytest.raises(AuthRevoked, match="nothing can be sent as ada of main"):
            await host.send(ada, SendRequest(channel="general", text="new"))
        assert len(await host.outbox.read(outbox_views.listed)) == 3


async def test_a_name_that_nobody_has_is_not_taken_for_an_agent_who_is_here_with_another(
    pair: RealSpace, tmp_path: Path
) -> None:
    async with host_in(tmp_path / "host") as host:
        ada = await adopt(host, pair, "ada", knows=2)
        sent = await host.send(ada, dm("hello"), wait=10)
        with pytest.raises(UnknownPeer, match=f"Message {sent.id} is in the outbox already, as row {sent.row}"):
            await host.send(ada, SendRequest(agent="bod", text="hello", id=sent.id))


def health_of(host: hosts.Host, scope: hosts.Scope) -> hosts.AgentHealth:
    return next(each for each in host.health() if each.scope == scope)


async def test_a_burnt_id_costs_nothing_and_a_poison_row_ends_while_its_lane_goes_on(
    pair: RealSpace, tmp_path: Path
) -> None:
    await pair.add("mal")
    burnt, own = new_id(), new_id()
    async with pair.agent("mal") as mal:
        subject = pair.subjects.direct(mal.id, mal.id)
        await mal.connection.request(subject, b"burnt", headers={"Nats-Msg-Id": burnt}, timeout=5)
    async with tidings.connect("main", name="ada", home=pair.home.home, receive=False) as direct:
        await direct.dm("bob", "sent without the host", id=own)
    async with host_in(tmp_path / "host") as host:
        ada = await adopt(host, pair, "ada", knows=3)
        bob = await adopt(host, pair, "bob", receive=True)
        await has_texts(host, bob, ["sent without the host"])
        await host.pause(ada.space_id)
        poison = await host.send(ada, dm("another message under that id", id=own))
        await host.send(ada, dm("behind it", id=burnt))
        refused = await host.send(ada, SendRequest(channel="secret", text="may not"))
        await host.resume(ada.space_id)
        await has_texts(host, bob, ["sent without the host", "behind it"])
        dead = await in_state(host, ada, poison.id, "dead")
        assert dead.code == "id_burned"
        assert "choose a new one" in str(dead.words)
        assert (await in_state(host, ada, refused.id, "dead")).code == "denied"
        requeued = await host.requeue(ada, poison.id)
        assert requeued.supersedes == dead.row
        await has_texts(host, bob, ["sent without the host", "behind it", "another message under that id"])
        with pytest.raises(WrongState, match="was queued again"):
            await host.requeue(ada, poison.id)


async def test_the_largest_message_goes_through(pair: RealSpace, tmp_path: Path) -> None:
    async with host_in(tmp_path / "host") as host:
        ada = await adopt(host, pair, "ada", knows=2)
        bob = await adopt(host, pair, "bob", receive=True)
        await eventually(lambda: health_of(host, bob).receiving)
        await host.endpoint(bob).join("general")
        large = "x" * (256 * 1024 - 400)
        assert (await host.send(ada, SendRequest(channel="general", text=large), wait=15)).stage == "confirmed"
        sealed = "y" * (190 * 1024)
        assert (await host.send(ada, dm(sealed), wait=15)).stage == "confirmed"
        await eventually(lambda: _lengths(host, bob, {len(large), len(sealed)}))


async def _lengths(host: hosts.Host, scope: hosts.Scope, wanted: set[int]) -> bool:
    return {len(text) for text in await texts_of(host, scope)} == wanted


async def test_channels_are_followed_again_after_a_restart_and_what_was_missed_comes(
    pair: RealSpace, tmp_path: Path
) -> None:
    async with tidings.connect("main", name="ada", home=pair.home.home, receive=False) as ada:
        async with host_in(tmp_path / "host") as host:
            bob = await adopt(host, pair, "bob", receive=True)
            await eventually(lambda: health_of(host, bob).receiving)
            await host.endpoint(bob).join("general")
            await ada.send("general", "while it runs")
            await has_texts(host, bob, ["while it runs"])
        await ada.send("general", "while it does not")
        async with host_in(tmp_path / "host") as host:
            await has_texts(host, bob, ["while it runs", "while it does not"])
            await ada.send("general", "again")
            await has_texts(host, bob, ["while it runs", "while it does not", "again"])


async def test_an_older_inbox_put_back_or_none_at_all_gets_what_came_since_again_and_its_agent_is_told(
    space: RealSpace, tmp_path: Path
) -> None:
    home = tmp_path / "host"
    source = ("home", str(space.home.home), space.home.name, "bob")
    await space.add("ada", post=["team.a"])
    await space.add("bob", read=["team.*"])

    async def told(host: hosts.Host, bob: hosts.Scope) -> list[str]:
        return [each["kind"] for each in await notices_of(host, bob)]

    async with tidings.connect("main", name="ada", home=space.home.home, receive=False) as ada:
        async with host_in(home) as host:
            bob = await adopt(host, space, "bob", receive=True)
            await eventually(lambda: health_of(host, bob).receiving)
            await host.endpoint(bob).join("team.*")
            await ada.send("team.a", "before the copy")
            await has_texts(host, bob, ["before the copy"])
        shutil.copy(home / "host.db", tmp_path / "older")
        async with host_in(home) as host:
            await ada.send("team.a", "after the copy")
            await ada.dm("bob", "to you alone")
            await eventually(lambda: _has_all(host, bob, {"before the copy", "after the copy", "to you alone"}))
            assert await told(host, bob) == []

        shutil.copy(tmp_path / "older", home / "host.db")
        async with open_mailbox(home, source) as mailbox, mailbox.receive():
            rows = await eventually(lambda: _rows_besides_notices(mailbox, 2), what="what came since")
            assert [row.text for row in rows] == ["before the copy", "after the copy"]
        async with host_in(home) as host:
            await has_texts(host, bob, ["before the copy", "after the copy"])
            assert await told(host, bob) == ["set_back"], "once"
            (notice,) = await notices_of(host, bob)
            assert "an older host.db was put back" in notice["text"]
            await ada.send("team.a", "later")
            await has_texts(host, bob, ["before the copy", "after the copy", "later"])

        (home / "host.db").unlink()
        async with host_in(home) as host:
            assert await adopt(host, space, "bob", receive=True) == bob
            await has_texts(host, bob, ["before the copy", "after the copy", "later"])
            assert await told(host, bob) == ["set_back"]
        async with host_in(home) as host:
            await ada.send("team.a", "at the end")
            await has_texts(host, bob, ["before the copy", "after the copy", "later", "at the end"])
            assert await told(host, bob) == ["set_back"]


async def _has_all(host: hosts.Host, scope: hosts.Scope, texts: set[str]) -> bool:
    return set(await texts_of(host, scope)) == texts


async def _rows_besides_notices(mailbox: LocalInbox, count: int) -> list[InboxRow]:
    rows = [row for row in await mailbox.listed(EVERYTHING) if row.kind != "notice"]
    return rows if len(rows) >= count else []


async def test_receipts_are_told_from_what_is_on_disk_also_after_a_restart(pair: RealSpace, tmp_path: Path) -> None:
    async with tidings.connect("main", name="ada", home=pair.home.home, receive=False) as ada:
        async with host_in(tmp_path / "host") as host:
            bob = await adopt(host, pair, "bob", receive=True)
            sent = await ada.dm("bob", "did you read it?")
            await has_texts(host, bob, ["did you read it?"])
            assert (await ada.receipt(sent, "delivered", timeout=10)).stage == "delivered"
            await eventually(lambda: told(host, bob, "delivered"))
            await pair.stop_steward()
            (row,) = await inbox_of(host, bob)
            assert await host.mark_read(bob, [row.row]) == 1
        await pair.start_steward()
        async with host_in(tmp_path / "host") as host:
            await eventually(lambda: told(host, bob, "read"))
        assert (await ada.receipt(sent, "read", timeout=10)).stage == "read"


async def told(host: hosts.Host, scope: hosts.Scope, stage: str) -> bool:
    found = await host.database.read(lambda c: c.execute("SELECT told FROM inbox").fetchall())
    return found == [(stage,)]


async def test_a_newer_session_elsewhere_receives_until_it_is_taken_back(pair: RealSpace, tmp_path: Path) -> None:
    async with host_in(tmp_path / "host") as host:
        bob = await adopt(host, pair, "bob", receive=True)
        ada = await adopt(host, pair, "ada", knows=2)
        await eventually(lambda: health_of(host, bob).receiving)
        await host.send(ada, dm("first"), wait=10)
        await has_texts(host, bob, ["first"])
        async with tidings.connect("main", name="bob", home=pair.home.home) as elsewhere:
            await elsewhere.transport.receive()
            await eventually(lambda: health_of(host, bob).superseded)
            assert not health_of(host, bob).receiving
            assert "take it back" in str(health_of(host, bob).reason)
            await host.send(ada, dm("second"), wait=10)
            await (await elsewhere.next_message(10)).ack()
            assert (await host.send(bob, SendRequest(channel="general", text="it still sends"), wait=10)).stage == (
                "confirmed"
            )
            host.take_back(bob)
            await eventually(lambda: health_of(host, bob).receiving)
            await host.send(ada, dm("third"), wait=10)
            await has_texts(host, bob, ["first", "third"])


#: a program that receives as bob until it is killed, seen by nobody
RECEIVES = """
import asyncio, sys, tidings
async def main():
    async with tidings.connect("main", name="bob", home=sys.argv[1], presence=False) as bob:
        await bob.transport.receive()
        await asyncio.sleep(1000)
asyncio.run(main())
"""


async def test_the_host_receives_again_by_itself_once_the_newer_session_ended_in_order(
    pair: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_sessions, "ASK_FOR_END", 0.2)
    async with host_in(tmp_path / "host") as host:
        bob = await adopt(host, pair, "bob", receive=True)
        ada = await adopt(host, pair, "ada", knows=2)
        for text in ("first", "second"):
            await eventually(lambda: health_of(host, bob).receiving)
            async with tidings.connect("main", name="bob", home=pair.home.home, presence=text == "first") as elsewhere:
                await elsewhere.transport.receive()
                await eventually(lambda: health_of(host, bob).superseded)
            await host.send(ada, dm(text), wait=10)
        await has_texts(host, bob, ["first", "second"])


async def test_a_newer_session_is_left_alone_while_it_lives_and_its_place_taken_after_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_sessions, "ASK_FOR_END", 0.2)
    intervals = dataclasses.replace(TEST_INTERVALS, presence=1.0)
    answers: list[int | None] = []
    ended = SessionLease.ended

    async def noted(lease: SessionLease) -> int | None:
        answers.append(await ended(lease))
        return answers[-1]

    monkeypatch.setattr(SessionLease, "ended", noted)
    async with real_space(tmp_path / "home", intervals=intervals) as space, host_in(tmp_path / "host") as host:
        await space.add("ada")
        await space.add("bob")
        bob = await adopt(host, space, "bob", receive=True)
        ada = await adopt(host, space, "ada", knows=2)
        await eventually(lambda: health_of(host, bob).receiving)
        elsewhere = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            RECEIVES,
            str(space.home.home),
            env=os.environ | {"PYTHONPATH": str(Path(tidings.__file__).parents[1])},
        )
        try:
            await eventually(lambda: health_of(host, bob).superseded, within=30)
            # longer than silence would be taken for an end
            await eventually(lambda: len(answers) >= 40, within=60)
            assert set(answers) == {None}
            assert health_of(host, bob).superseded
        finally:
            elsewhere.kill()
            await elsewhere.wait()
        await host.send(ada, dm("after the kill"), wait=10)
        await has_texts(host, bob, ["after the kill"], within=60)
        assert health_of(host, bob).receiving


@pytest.mark.parametrize("end", ["in order", "killed"])
@pytest.mark.parametrize("connects", ["while the host runs", "while none does"])
async def test_a_host_that_starts_leaves_the_session_of_a_running_program_alone_until_that_ended(
    pair: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, connects: str
) -> None:
    monkeypatch.setattr(agent_sessions, "ASK_FOR_END", 0.2)
    home = tmp_path / "host"
    elsewhere = tidings.connect("main", name="bob", home=pair.home.home, presence=False)
    async with host_in(home) as host:
        bob = await adopt(host, pair, "bob", receive=True)
        ada = await adopt(host, pair, "ada", knows=2)
        await eventually(lambda: health_of(host, bob).receiving)
        if connects == "while the host runs":
            await elsewhere.open()
            await elsewhere.transport.receive()
            await eventually(lambda: health_of(host, bob).superseded)
        if end == "killed":
            monkeypatch.setattr(host._agent(bob).session.endpoint.transport.session, "close", _nothing)
    if connects == "while none does":
        await elsewhere.open()
        await elsewhere.transport.receive()
    async with host_in(home) as host:
        await eventually(lambda: health_of(host, bob).superseded)
        assert "another session of bob receives" in str(health_of(host, bob).reason)
        await host.send(ada, dm("to the program"), wait=10)
        heard = await elsewhere.next_message(timeout=10)
        assert heard.text == "to the program"
        await heard.ack()
        assert not elsewhere.transport.session.superseded.is_set()
        await elsewhere.close()
        await eventually(lambda: health_of(host, bob).receiving)
        await host.send(ada, dm("to the host"), wait=10)
        await has_texts(host, bob, ["to the host"])


async def _nothing() -> None:
    return None


async def test_health_shows_an_agent_as_receiving_only_once_the_host_holds_its_session(
    pair: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, answers = SessionLease._take, asyncio.Event()

    async def take_later(lease: SessionLease) -> None:
        await answers.wait()
        await take(lease)

    monkeypatch.setattr(SessionLease, "_take", take_later)
    async with host_in(tmp_path / "host") as host:
        bob = await adopt(host, pair, "bob", receive=True)
        await eventually(lambda: health_of(host, bob).state == "open")
        await eventually(lambda: host.endpoint(bob).transport.session._wanted)
        assert not health_of(host, bob).receiving
        answers.set()
        await eventually(lambda: health_of(host, bob).receiving)
        assert held_number(host.home, bob).read() == host.endpoint(bob).transport.session.number


async def test_a_session_that_closes_before_the_steward_answered_is_released(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pair.steward is not None
    table = pair.steward.roster.table
    async with tidings.connect("main", name="bob", home=pair.home.home, presence=False) as bob:
        call, unheard = bob.transport.connection.call, asyncio.Event()

        async def call_without_answer(request: Request[Any], **options: Any) -> Any:
            answer = await call(request, **options)
            if request.operation.name == "session take":
                unheard.set()
                await asyncio.Event().wait()
            return answer

        monkeypatch.setattr(bob.transport.connection, "call", call_without_answer)
        receiving = asyncio.create_task(bob.transport.receive())
        await asyncio.wait_for(unheard.wait(), 10)
        assert table.is_held_by(bob.id, bob.transport.session.session)
        assert bob.transport.session.number is None
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        await bob.transport.session.close()
        number = await eventually(lambda: table.ended(bob.id, time.monotonic()))
        await eventually(lambda: (row := bob.transport.roster.get(bob.id)) and row.session == number)
        assert bob.transport.session._task is None or bob.transport.session._task.done(), (
            "a row of its own does not take it again"
        )
    assert table.ended(bob.id, time.monotonic()) == number


@pytest.mark.parametrize("end", ["in order", "killed"])
async def test_a_host_that_starts_again_goes_on_with_its_own_session_at_once(
    pair: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(agent_sessions, "ASK_FOR_END", 3_600.0)  # nobody is asked whether a session ended
    home = tmp_path / "host"
    async with host_in(home) as host:
        bob = await adopt(host, pair, "bob", receive=True)
        ada = await adopt(host, pair, "ada", knows=2)
        await eventually(lambda: health_of(host, bob).receiving)
        before = await eventually(lambda: host.endpoint(bob).transport.session.number)
        if end == "killed":
            monkeypatch.setattr(host.endpoint(bob).transport.session, "close", _nothing)
    async with host_in(home) as host:
        await host.send(ada, dm("hello"), wait=10)
        await has_texts(host, bob, ["hello"])
        number = host.endpoint(bob).transport.session.number
        assert before is not None
        assert number == (before if end == "in order" else before + 1)
        assert not health_of(host, bob).superseded


async def test_whoever_asks_the_host_to_receive_gets_it_also_just_after_it_started(
    pair: RealSpace, tmp_path: Path
) -> None:
    home = tmp_path / "host"
    async with host_in(home) as host:
        bob = await adopt(host, pair, "bob", receive=True)
        await eventually(lambda: health_of(host, bob).receiving)
    async with tidings.connect("main", name="bob", home=pair.home.home) as elsewhere:
        await elsewhere.transport.receive()
        async with host_in(home) as host:
            await adopt(host, pair, "bob", receive=True)
            async with asyncio.timeout(20):
                await elsewhere.transport.session.superseded.wait()
            await eventually(lambda: health_of(host, bob).receiving)


async def test_after_a_change_of_stewards_a_session_that_lives_is_left_alone(
    pair: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_sessions, "ASK_FOR_END", 0.2)
    async with host_in(tmp_path / "host") as host:
        bob = await adopt(host, pair, "bob", receive=True)
        await eventually(lambda: health_of(host, bob).receiving)
        async with tidings.connect("main", name="bob", home=pair.home.home, presence=False) as elsewhere:
            await elsewhere.transport.receive()
            await eventually(lambda: health_of(host, bob).superseded)
            await pair.stop_steward()
            steward = await pair.start_steward()
            number = elsewhere.transport.session.number
            await eventually(lambda: steward.roster.table._of(bob.agent).number == number)
            assert not elsewhere.transport.session.superseded.is_set()
        await eventually(lambda: health_of(host, bob).receiving)


async def joined(space: RealSpace, *channels: str) -> None:
    async with tidings.connect("main", name="bob", home=space.home.home, channels=channels):
        pass


async def test_a_channel_that_cannot_be_followed_at_first_is_tried_again_until_it_is(
    pair: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await joined(pair, "general")
    join, failures = Agent.join, [Reconnecting("not now"), OutcomeUnknown("perhaps"), StewardUnreachable("away")]

    async def fails_at_first(endpoint: DirectAgent, channel: str, *, backfill: int = 0) -> Joined:
        if failures:
            raise failures.pop()
        return await join(endpoint, channel, backfill=backfill)

    monkeypatch.setattr(Agent, "join", fails_at_first)
    async with host_in(tmp_path / "host") as host:
        bob = await adopt(host, pair, "bob", receive=True)
        ada = await adopt(host, pair, "ada", knows=2)
        receiver = host._agent(bob).receiver
        await eventually(receiver.followed.is_set, within=20)
        assert failures == []
        await host.send(ada, SendRequest(channel="general", text="heard"), wait=10)
        await has_texts(host, bob, ["heard"])
        assert await notices_of(host, bob) == []


async def test_a_channel_whose_following_is_denied_is_told_once_and_holds_no_other_up(
    space: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await space.add("ada")
    await space.add("bob", read=["general", "aside"])
    await joined(space, "general", "aside")
    join = Agent.join

    async def denied(endpoint: DirectAgent, channel: str, *, backfill: int = 0) -> Joined:
        if channel == "aside":
            raise DeniedError("bob may not read aside")
        return await join(endpoint, channel, backfill=backfill)

    monkeypatch.setattr(Agent, "join", denied)
    for text in ("first", "second"):  # with another endpoint, and told once
        async with host_in(tmp_path / "host") as host:
            bob = await adopt(host, space, "bob", receive=True)
            ada = await adopt(host, space, "ada", knows=2)
            await eventually(host._agent(bob).receiver.followed.is_set, within=20)
            await host.send(ada, SendRequest(channel="general", text=text), wait=10)
            await has_texts(host, bob, ["first", "second"][: 1 if text == "first" else 2])
            (notice,) = await notices_of(host, bob)
            assert (notice["kind"], notice["channel"]) == ("membership", "aside")
            assert "bob may not read aside" in notice["text"]


async def test_a_failure_nobody_foresaw_makes_mail_late_and_never_lost(
    pair: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with host_in(tmp_path / "host") as host:
        bob = await adopt(host, pair, "bob", receive=True)
        ada = await adopt(host, pair, "ada", knows=2)
        await eventually(lambda: health_of(host, bob).receiving)
        keep, told = host.inbox.keep, []

        async def fails_twice(arrival: Arrival) -> object:
            told.append(health_of(host, bob).receiving)
            if len(told) <= 2:
                raise RuntimeError("a mistake of ours")
            return await keep(arrival)

        monkeypatch.setattr(host.inbox, "keep", fails_twice)
        for text in ("first", "second"):
            await host.send(ada, dm(text), wait=10)

        async def both() -> bool:  # what was in hand comes again, perhaps behind newer ones
            return sorted(await texts_of(host, bob)) == ["first", "second"]

        await eventually(both)
        await eventually(lambda: health_of(host, bob).receiving)


async def test_without_a_host_an_inbox_that_cannot_be_written_is_an_error_and_the_mail_comes_again(
    pair: RealSpace, tmp_path: Path
) -> None:
    home, source = tmp_path / "host", ("home", str(pair.home.home), pair.home.name, "bob")
    async with host_in(home) as host:
        bob = await adopt(host, pair, "bob", receive=True)
        await eventually(lambda: health_of(host, bob).receiving)
        await host.database.write(break_trigger)
    async with tidings.connect("main", name="ada", home=pair.home.home, receive=False) as ada:
        await ada.dm("bob", "hello")
    async with asyncio.timeout(30):
        with pytest.raises(StoreBroken, match=r"host\.db is damaged .*coalerce"):
            await _receive_for_ever(home, source)
        (home / "host.db").rename(tmp_path / "kept")
        async with host_in(home) as host:
            await host.database.write(break_trigger)
        with pytest.raises(StoreBroken, match=r"host\.db is damaged .*coalerce"):  # told that the inbox is another one
            await _receive_for_ever(home, source)
    (tmp_path / "kept").rename(home / "host.db")
    with closing(sqlite3.connect(home / "host.db")) as connection, connection:
        mend_trigger(connection)
    async with host_in(home) as host:
        await has_texts(host, bob, ["hello"], within=60)


async def _receive_for_ever(home: Path, source: tuple[str, ...]) -> None:
    async with open_mailbox(home, source) as mailbox, mailbox.receive():
        while True:
            await mailbox.news(1.0)


async def test_a_failure_of_the_database_that_passes_puts_no_mail_aside(
    pair: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with host_in(tmp_path / "host") as host:
        bob = await adopt(host, pair, "bob", receive=True)
        ada = await adopt(host, pair, "ada", knows=2)
        await eventually(lambda: health_of(host, bob).receiving)
        keep, passing = host.inbox.keep, [sqlite3.OperationalError("passes"), sqlite3.OperationalError("passes")]

        async def fails_twice(arrival: Arrival) -> object:
            if passing:
                raise passing.pop()
            return await keep(arrival)

        monkeypatch.setattr(host.inbox, "keep", fails_twice)
        await host.send(ada, dm("late"), wait=10)
        await has_texts(host, bob, ["late"])
        assert await host.inbox.read(inbox_views.aside, bob.space_id, bob.agent) == []


@pytest.mark.parametrize("step", ["meet", "unblock"])
async def test_an_agent_speaks_though_the_outbox_failed_as_nobody_foresaw_when_it_connected(
    pair: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async with host_in(tmp_path / "host") as host:
        plain, failing = getattr(host.outbox, step), [sqlite3.OperationalError("odd"), RuntimeError("odder")]

        async def fails_twice(*asked: Any) -> Any:
            if failing:
                raise failing.pop()
            return await plain(*asked)

        monkeypatch.setattr(host.outbox, step, fails_twice)
        ada = await adopt(host, pair, "ada", knows=2)
        assert (await host.send(ada, dm("hello"), wait=10)).stage == "confirmed"
        assert not failing


async def test_an_agent_that_does_not_stop_well_is_said_and_keeps_nobody_from_it(
    pair: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with host_in(tmp_path / "host") as host:
        ada, bob = [await adopt(host, pair, name) for name in ("ada", "bob")]
        adas = host._agent(ada)

        async def fails() -> None:
            raise RuntimeError("a mistake of ours")

        stop = adas.stop
        monkeypatch.setattr(adas, "stop", fails)
        bobs = host._agent(bob).session
    await stop()
    assert "ada in main did not stop well" in caplog.text
    assert "a mistake of ours" in caplog.text
    assert bobs.state == "stopped"


async def test_what_does_not_open_is_kept_aside_before_the_broker_may_forget_it(
    pair: RealSpace, tmp_path: Path
) -> None:
    async with pair.agent("ada") as ada, pair.agent("bob") as reader:
        garbage = json.dumps({"not": "a message"}).encode()
        await ada.connection.request(pair.subjects.direct(reader.id, ada.id), garbage, timeout=5)
    async with host_in(tmp_path / "host") as host:
        bob = await adopt(host, pair, "bob", receive=True)
        (aside,) = await eventually(lambda: host.inbox.read(inbox_views.aside, bob.space_id, bob.agent))
        assert aside.raw == garbage
        assert "refused" in aside.reason
        assert await inbox_of(host, bob) == []


async def test_mail_that_was_read_long_ago_forgets_its_content_and_unread_mail_does_not(
    pair: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "TIDY_EVERY", 0.05)
    async with host_in(tmp_path / "host") as host:
        ada, bob = await adopt(host, pair, "ada", knows=2), await adopt(host, pair, "bob", receive=True)
        for text in ("read", "unread"):
            await host.send(ada, dm(text), wait=10)
        await has_texts(host, bob, ["read", "unread"])
        await host.mark_read(bob, [(await inbox_of(host, bob))[0].row])
        monkeypatch.setattr(hosts, "READ_MAIL_KEPT_MS", -1_000)
        await eventually(partial(_only, host, bob, ["unread"]), what="what was read is gone")


async def _only(host: hosts.Host, scope: hosts.Scope, texts: list[str]) -> bool:
    return await texts_of(host, scope) == texts


async def test_a_flood_fills_nobodys_inbox_and_what_was_not_kept_is_told_with_range_and_count(
    space: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "OVERFLOW_TOLD", 0.05)
    monkeypatch.setattr(receiver, "OVERFLOW_TOLD_AT_MOST", 0.1)
    for name in ("ada", "bob", "eve"):
        await space.add(name)
    bound = Bound(rows=40, bytes=1_000_000)
    async with host_in(tmp_path / "host", bound=bound) as host:
        bob = await adopt(host, space, "bob", receive=True)
        await eventually(lambda: host.health()[0].receiving)
        await host.endpoint(bob).join("general")

        senders = [tidings.connect("main", name=name, home=space.home.home, receive=False) for name in ("ada", "eve")]
        async with senders[0] as ada, senders[1] as eve:
            flood = [(await ada.send("general", f"flood {number}")).seq for number in range(200)]
            await eve.send("general", "a word of mine")

            async def heard() -> bool:
                texts = await texts_of(host, bob)
                return "a word of mine" in texts and sum(each["count"] for each in await notices_of(host, bob)) == 160

            await eventually(heard, within=30, what="the flood is told, and others are heard")
            rows = await inbox_of(host, bob)
            assert [row.text for row in rows] == [*(f"flood {number}" for number in range(40)), "a word of mine"]
            notices = await notices_of(host, bob)
            assert {(each["kind"], each["channel"]) for each in notices} == {("flood", "general")}
            assert (notices[0]["first"], notices[-1]["last"]) == (flood[40], flood[-1])
            await host.mark_read(bob, [row.row for row in rows])
            await ada.send("general", "after it was read")
            await eventually(lambda: _last_text(host, bob, "after it was read"), what="there is room again")
    async with host_in(tmp_path / "host", bound=bound) as host:
        await eventually(lambda: host.health()[0].receiving)
        assert sum(each["count"] for each in await notices_of(host, bob)) == 160, "told once, restarts included"


async def _last_text(host: hosts.Host, scope: hosts.Scope, text: str) -> bool:
    return (await texts_of(host, scope))[-1] == text


async def test_what_is_sealed_and_what_is_plain_in_the_file_is_as_the_documents_say(
    pair: RealSpace, tmp_path: Path
) -> None:
    secret = "swordfish at noon"
    async with host_in(tmp_path / "adas") as adas, host_in(tmp_path / "bobs") as bobs:
        ada = await adopt(adas, pair, "ada", knows=2)
        bob = await adopt(bobs, pair, "bob", receive=True)
        await adas.send(ada, dm(secret), wait=10)
        await has_texts(bobs, bob, [secret])
        (row,) = await inbox_of(bobs, bob)
        assert (row.sealed, secret.encode() in row.raw) == (1, False), "the bytes as they were signed are sealed"
    adas_file, bobs_file = ((tmp_path / name / "host.db").read_bytes() for name in ("adas", "bobs"))
    assert (secret.encode() in adas_file, secret.encode() in bobs_file) == (False, True)
    for name in ("ada", "bob"):
        creds = pair.home.agent_creds(name).read_text()
        seed = next(line for line in creds.splitlines() if line.startswith("SU"))
        assert seed.encode() not in adas_file + bobs_file, "no key is in it"


async def test_an_agent_that_only_sent_begins_to_receive_when_asked(pair: RealSpace, tmp_path: Path) -> None:
    async with host_in(tmp_path / "host") as host:
        ada = await adopt(host, pair, "ada", knows=2)
        bob = await adopt(host, pair, "bob")
        await host.send(ada, dm("waits in the mailbox"), wait=10)
        await eventually(lambda: health_of(host, bob).state == "open")
        assert not health_of(host, bob).receiving
        assert await inbox_of(host, bob) == []
        assert await adopt(host, pair, "bob", receive=True) == bob
        await has_texts(host, bob, ["waits in the mailbox"])
        await adopt(host, pair, "bob")
        assert health_of(host, bob).receiving, "another program that only sends changes nothing"


async def test_nobody_acts_for_an_agent_this_host_does_not_work_for(pair: RealSpace, tmp_path: Path) -> None:
    async with host_in(tmp_path / "host") as host:
        ada = await adopt(host, pair, "ada")
        stranger = hosts.Scope(ada.space, ada.space_id, "somebody", "eve")
        for act in (host.send(stranger, dm("x")), host.mark_read(stranger, [1])):
            with pytest.raises(DeniedError, match="does not work for eve"):
                await act
        with pytest.raises(DeniedError):
            host.changes(stranger)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_ten_thousand_queued_messages_leave_in_the_order_of_their_lanes(pair: RealSpace, tmp_path: Path) -> None:
    lanes, each = 20, 500
    await pair.add("all", read=[">"], post=[">"])
    async with host_in(tmp_path / "host") as host:
        sender = await adopt(host, pair, "all", knows=3)
        await host.pause(sender.space_id)
        for number in range(each):
            requests = [SendRequest(channel=f"lane{lane}", text=f"{lane} {number}") for lane in range(lanes)]
            await asyncio.gather(*(host.send(sender, request) for request in requests))
        await host.resume(sender.space_id)
        await eventually(lambda: all_confirmed(host, sender.space_id), within=300, every=0.5)
        for lane in range(lanes):
            found = await host.endpoint(sender).transport.recall(f"lane{lane}", 0, limit=each)
            assert [m.text for m in found] == [f"{lane} {number}" for number in range(each)]


async def test_what_is_sent_while_the_space_is_down_is_answered_at_once_and_so_is_what_waits_when_it_goes_down(
    space: RealSpace,
) -> None:
    await space.add("ada")
    async with host_in(space.home.home) as host:
        scope = await adopt(host, space, "ada", knows=1)
        await eventually(lambda: host.health()[0].state == "open")
        await host.pause(scope.space_id, "so that it waits")
        waiting = asyncio.create_task(host.send(scope, SendRequest(channel="general", text="one"), wait=300))
        await eventually(lambda: host._waiting)
        space.broker.stop()
        async with asyncio.timeout(60):
            assert (await waiting).stage == "stored"
            await eventually(lambda: host.health()[0].state == "reconnecting")
        async with asyncio.timeout(3):
            sent = await host.send(scope, SendRequest(channel="general", text="two"), wait=300)
        assert sent.stage == "stored"
        space.broker.start()
