"""The roster on a real space: presence, forged deltas, sessions, names, and coming back."""

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest

import tidings
from tidings.admin.agents import AgentFile
from tidings.client.connect import connect_directly
from tidings.contract.admin import RotateKeyRequest
from tidings.contract.agents import BeatRequest
from tidings.contract.channels import ChangeChannelRequest, RawRecord
from tidings.errors import AmbiguousPeer, Superseded, TidingsError, UnknownPeer
from tidings.util.private_files import write_private
from tidings.wire.roster import AgentEntry, Delta, sign_delta
from tidings.wire.signing import KeyPair
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


def connect(space: RealSpace, name: str, **options: object) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)  # type: ignore[arg-type]


def row(endpoint: tidings.DirectAgent, name: str) -> AgentEntry:
    return next(agent for agent in endpoint.transport.roster.agents() if agent.name == name)


async def sees(endpoint: tidings.DirectAgent, name: str, status: str, within: float = 10) -> AgentEntry:
    await eventually(lambda: row(endpoint, name).status == status, within=within, what=f"{name} is {status}")
    return row(endpoint, name)


async def vanish(endpoint: tidings.DirectAgent) -> None:
    """The end of a process that had no time to say goodbye."""
    assert endpoint.transport.presence._task is not None
    endpoint.transport.presence._task.cancel()
    await endpoint.transport.connection.stop()


@pytest.mark.requirement("P3")
async def test_who_lists_everybody_with_name_roles_and_state(space: RealSpace) -> None:
    await space.add("ada", roles=["reviewer"])
    await space.add("bob")
    async with connect(space, "ada") as ada:
        await sees(ada, "ada", "idle")
        agents = await ada.who()
        assert [(a.name, a.roles, a.online) for a in agents] == [("ada", ("reviewer",), True), ("bob", (), False)]
        async with connect(space, "bob") as bob:
            await sees(ada, "bob", "idle")
            heard: list[AgentEntry] = []
            ada.on("presence", heard.append)
            bob.transport.presence.set_model("a-model")
            bob.transport.presence.set_attention("dnd")
            bob.transport.presence.set_status("working", "reading the tests")
            found = await sees(ada, "bob", "working")
            assert (found.activity, found.model, found.attention) == ("reading the tests", "a-model", "dnd")
            assert [agent.name for agent in heard][-1] == "bob"
        gone = await sees(ada, "bob", "offline", within=1.5)
        assert (gone.attention, gone.activity) == (None, None), "offline at once, and nothing is claimed for it"
        assert gone.last_seen is not None
        assert ada.transport.roster.freshness is not None
        assert ada.transport.roster.freshness < 5


async def test_a_silent_observer_hears_everything_and_is_seen_by_nobody_until_it_attends(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob")
    async with connect(space, "ada") as ada:
        await ada.who()
        heard: list[AgentEntry] = []
        ada.on("presence", heard.append)
        async with connect(space, "bob", channels=["general"], presence=False, beat=0.05) as bob:
            sent = await ada.send("general", "is anybody here?")
            assert (await bob.next_message(10)).id == sent.id
            said = await bob.send("general", "nobody")
            bob.transport.presence.set_status("working")
            await eventually(lambda: bob.transport.roster.head >= said.seq, what="it hears of the log all the same")
            assert (row(ada, "bob").status, bob.transport.presence.beats) == ("offline", 0)
            bob.transport.presence.attend(True)
            await sees(ada, "bob", "working")
            await eventually(
                lambda: bob.transport.presence.beats > 5, within=2, what="beats as often as it was told to"
            )
            bob.transport.presence.attend(False)
            await sees(ada, "bob", "offline", within=1.5)
        seen = ["offline", *(agent.status for agent in heard if agent.name == "bob")]
        assert [after for before, after in pairwise(seen) if after != before] == ["working", "offline"]


async def test_a_process_that_dies_is_offline_once_it_was_silent_for_its_time(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob")
    async with connect(space, "ada") as ada:
        bob = connect(space, "bob")
        await bob.open()
        await sees(ada, "bob", "idle")
        await vanish(bob)
        await sees(ada, "bob", "offline")
        assert row(ada, "ada").online, "who beats stays"
        await bob.close()


async def test_unchanged_beats_make_no_news_and_the_heartbeat_tells_the_head(space: RealSpace) -> None:
    """F23, N20: quiet agents cost nothing, and head and floor travel with the roster."""
    await space.add("ada")
    async with connect(space, "ada") as ada:
        await sees(ada, "ada", "idle")
        changes: list[AgentEntry] = []
        ada.on("presence", changes.append)
        receipt = await ada.send("general", "hello")
        beats = ada.transport.presence.beats
        await eventually(lambda: ada.transport.roster.head >= receipt.seq and ada.transport.presence.beats >= beats + 2)
        assert changes == []
        assert (ada.transport.roster.backstop.running, ada.transport.roster.backstop.behind) == (False, None)
        assert ada.transport.roster.snapshots == 1


async def test_an_agent_that_is_added_or_revoked_appears_and_goes(space: RealSpace) -> None:
    await space.add("ada")
    async with connect(space, "ada") as ada:
        await space.add("bob", roles=["builder"])
        await eventually(lambda: "bob" in {a.name for a in ada.transport.roster.agents()})
        assert row(ada, "bob").roles == ("builder",)
        async with space.administer() as admin:
            await admin.revoke("bob")
        await eventually(lambda: "bob" not in {a.name for a in ada.transport.roster.agents()})
        assert ada.transport.roster.snapshots == 1


@pytest.mark.requirement("P4")
async def test_what_others_put_on_the_rosters_subject_is_dropped_and_counted(space: RealSpace) -> None:
    """F23: agents do not write presence; nothing they send erases or forges a row."""
    await space.add("ada")
    await space.add("mal")
    async with connect(space, "ada") as ada, space.agent("mal") as mal, space.core() as core:
        live = space.subjects.live_roster
        before = ada.transport.roster.agents()
        await mal.connection.publish(space.subjects.chat(mal.id, "general"), b"{}", reply=live)
        await mal.connection.publish(space.subjects.control("roster", mal.id), b"junk", reply=live)
        await mal.connection.flush()
        await eventually(lambda: ada.transport.roster.refused["unsigned"] >= 2, what="both strays are counted")
        assert await mal.refused(lambda: mal.connection.publish(live, b"{}")), "the broker lets no agent publish there"

        assert space.steward is not None
        forged = Delta(boot=space.steward.roster.boot, n=space.steward.roster.n + 1, gone=(ada.id,))
        payload, headers = sign_delta(KeyPair.generate(), space.info.id, forged)
        await core.connection.publish(live, payload, headers=headers)
        await core.connection.publish(live, b"\x00junk", headers=headers)
        await core.connection.flush()
        await eventually(lambda: ada.transport.roster.refused["signature"] >= 2)
        assert [a.id for a in ada.transport.roster.agents()] == [a.id for a in before]
        mine, signed = sign_delta(space.steward.writer.key, space.info.id, Delta(boot=space.steward.roster.boot, n=1))
        await core.connection.publish(live, mine, headers=signed)
        await core.connection.flush()
        await eventually(lambda: ada.transport.roster.refused["stale"] == 1, what="a replayed delta is dropped")


@pytest.mark.requirement("P5")
async def test_a_hole_in_the_deltas_is_filled_by_a_snapshot(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob")
    assert space.steward is not None
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        await sees(ada, "bob", "idle")
        taken = ada.transport.roster.snapshots
        space.steward.roster.n += 1
        bob.transport.presence.set_status("waiting")
        await sees(ada, "bob", "waiting")
        await eventually(lambda: ada.transport.roster.snapshots > taken)
        bob.transport.presence.set_status("working")
        await sees(ada, "bob", "working")


async def test_a_restarted_steward_knows_who_is_here_and_when_others_were_seen(space: RealSpace) -> None:
    for name in ("ada", "bob", "eve"):
        await space.add(name)
    async with connect(space, "eve"):
        pass
    async with connect(space, "ada") as ada, connect(space, "bob", channels=["general"]) as bob:
        await sees(ada, "bob", "idle")
        seen, number = (await sees(ada, "eve", "offline")).last_seen, bob.transport.session.number
        await space.stop_steward()
        assert len(await ada.who()) == 3, "the roster stays what it was"
        assert (await ada.send("general", "still works", mentions=["bob"])).seq
        boot = ada.transport.roster._boot
        await space.start_steward()
        await eventually(lambda: ada.transport.roster._boot != boot)
        bob.transport.presence.set_status("working")
        await sees(ada, "bob", "working")
        assert row(ada, "eve").last_seen == seen
        await eventually(lambda: row(ada, "bob").session == number, what="the steward is told the session again")
        assert not bob.transport.session.superseded.is_set()


@pytest.mark.requirement("P6")
async def test_without_a_steward_an_endpoint_opens_sends_and_learns_the_roster_later(space: RealSpace) -> None:
    await space.add("ada")
    await space.stop_steward()
    async with connect(space, "ada") as ada:
        assert (await ada.send("general", "hello")).seq
        assert (ada.transport.roster.loaded, ada.transport.roster.freshness) == (False, None)
        with pytest.raises(TidingsError, match="not known yet"):
            await ada.who(timeout=0.1)
        await space.start_steward()
        assert [agent.name for agent in await ada.who(timeout=10)] == ["ada"]


async def test_the_roster_is_followed_through_a_rotation_of_the_stewards_key(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob")

    async def rotate() -> None:
        write_private(space.home.creds / "steward.key.next", KeyPair.generate().seed + "\n")
        async with space.administer() as admin:
            await admin.call(RotateKeyRequest())

    async with connect(space, "ada") as ada:
        await rotate()
        await rotate()
        async with connect(space, "bob") as bob:
            assert space.steward is not None
            assert bob.transport.roster._key == space.steward.writer.key.id != bob.transport.identity.steward_key
            await sees(ada, "bob", "idle")
            bob.transport.presence.set_status("working")
            await sees(ada, "bob", "working")
            assert ada.transport.roster.refused["rotation"] == bob.transport.roster.refused["rotation"] == 0


async def test_a_chain_of_keys_that_does_not_verify_changes_nothing(space: RealSpace) -> None:
    await space.add("ada")
    async with connect(space, "ada") as ada, space.core() as core:
        stored = await core.last(space.subjects.log_stream, space.subjects.access(ada.id))
        assert stored is not None
        payload = b'{"op":"x","steward_key":"X"}'
        record = RawRecord(7, "1970-01-01T00:00:00.000000000Z", space.subjects.space_record, b"", payload)
        assert ada.transport.roster._follow_key((record,)) == ada.transport.identity.steward_key
        assert ada.transport.roster.refused["rotation"] == 1


# --- sessions ---


@pytest.mark.requirement("S1")
async def test_the_newer_session_receives_and_the_older_is_told_and_can_still_send(space: RealSpace) -> None:
    """F22: two processes of one identity do not share its mail."""
    await space.add("ada")
    await space.add("bob")
    async with connect(space, "ada") as ada, connect(space, "bob", channels=["general"]) as older:
        told: list[Any] = []
        older.on("superseded", told.append)
        await ada.send("general", "one")
        assert (await older.next_message(10)).text == "one"
        waiting = asyncio.create_task(older.next_message(20))
        async with connect(space, "bob", channels=["general"]) as newer:
            with pytest.raises(Superseded):
                await waiting
            assert told == [older.transport.session.number]
            assert older.transport.session.superseded.is_set()
            with pytest.raises(Superseded):
                await older.join("general")
            with pytest.raises(Superseded):
                async for _ in older.messages():
                    pass
            await ada.send("general", "two")
            texts = [(await newer.next_message(10)).text for _ in range(2)]
            assert texts == ["one", "two"], "what the older one did not settle for both comes again, then what is new"
            assert (await older.send("general", "from the older one")).seq
            older.transport.connection.reconnect()
            await eventually(lambda: older.transport.connection.rebuilds == 1)
            await ada.send("general", "three")
            assert (await newer.next_message(10)).text == "three"
            assert len(older.transport.queue) == 0
            assert not newer.transport.session.superseded.is_set()
        assert row(ada, "bob").online, "the older one lives, so bob does"


@pytest.mark.requirement("S3")
async def test_a_session_that_was_cut_off_meanwhile_learns_it_when_it_is_back(space: RealSpace) -> None:
    await space.add("bob")
    async with connect(space, "bob", channels=["general"]) as older:
        older.transport.connection._open, opening = _never, older.transport.connection._open  # type: ignore[method-assign]
        older.transport.connection.reconnect()
        await eventually(lambda: older.transport.state == "reconnecting")
        async with connect(space, "bob", channels=["general"]) as newer:
            older.transport.connection._open = opening  # type: ignore[method-assign]
            await eventually(older.transport.session.superseded.is_set, what="the older one is told", within=15)
            assert not newer.transport.session.superseded.is_set()


async def _never() -> None:
    raise ConnectionRefusedError


@pytest.mark.requirement("S2")
async def test_sending_history_and_who_take_no_session(space: RealSpace) -> None:
    """N17: a second terminal that sends does not supersede the first."""
    await space.add("bob")
    async with connect(space, "bob", channels=["general"]) as receiver:
        async with connect(space, "bob") as second:
            await second.send("general", "hello")
            await second.history("general")
            await second.who()
            assert second.transport.session.number is None
            second.transport.presence.set_status("working")
            await eventually(lambda: second.transport.presence.beats >= 2)
        await eventually(lambda: receiver.transport.presence.beats >= 4)
        assert not receiver.transport.session.superseded.is_set()
        assert (row(receiver, "bob").status, row(receiver, "bob").session) == (
            "idle",
            receiver.transport.session.number,
        )


# --- names and attention ---


@pytest.mark.requirement("P7")
async def test_mentions_are_resolved_and_a_mention_of_nobody_is_refused_before_sending(space: RealSpace) -> None:
    await space.add("ada", roles=["reviewer"])
    for name in ("bob", "carol"):
        await space.add(name)
    async with space.administer() as admin:  # as a space from before such names were refused has it
        key = KeyPair.generate()
        await admin.issue(AgentFile("Bob", read=("general",), post=("general",)), key.id, key)
    async with connect(space, "ada") as ada, connect(space, "bob", channels=["general"]) as bob:
        await ada.send("general", "hello", mentions=["bob", bob.id, "CAROL"])
        message = await bob.next_message(10)
        assert [mention.name for mention in message.mentions] == ["bob", "carol"]
        assert message.mentions_me
        assert message.sender.role == "reviewer"
        with pytest.raises(UnknownPeer, match="did you mean carol"):
            await ada.send("general", "hello", mentions=["carrol"])
        with pytest.raises(AmbiguousPeer, match="Bob, bob"):
            await ada.send("general", "hello", mentions=["BOB"])
        assert len(await ada.history("general")) == 1, "nothing was sent"
        await space.add("dave")
        sent = await ada.send("general", "hello", mentions=["dave", "bob", ada.id])
        assert sent.warnings == ("dave is not in general, so it does not get this",), "known without waiting"
        await space.add("erin", read=())
        sent = await ada.send("general", "hello", mentions=["erin"])
        assert sent.warnings == ("erin may not read general, so it does not get this",)


async def test_a_mention_on_a_live_channel_is_warned_of(space: RealSpace) -> None:
    await space.add("ada", manage=["general"])
    await space.add("bob")
    async with connect(space, "bob", channels=["general"]), connect(space, "ada") as ada:
        await ada.call(ChangeChannelRequest("general", cls="live"))
        assert (await ada.send("general", "hello", mentions=["bob"])).warnings == (), "its class is not known yet"
        await ada.join("general")
        assert "live channel" in (await ada.send("general", "hello", mentions=["bob"])).warnings[0]
        assert (await ada.send("general", "hello")).warnings == ()


@pytest.mark.requirement("P8")
async def test_attention_decides_what_wakes_and_never_what_arrives(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob")
    async with connect(space, "ada") as ada, connect(space, "bob", channels=["general"]) as bob:
        bob.transport.presence.set_attention("dnd")
        await ada.send("general", "chatter")
        await ada.send("general", "urgent", priority="now")
        await ada.send("general", "for bob", mentions=["bob"])
        bob_heard = {m.text: m.wakes for m in [await bob.next_message(10) for _ in range(3)]}
        assert bob_heard == {"chatter": False, "urgent": True, "for bob": True}
        bob.transport.presence.set_channel_attention("general", "muted")
        await ada.send("general", "again", mentions=["bob"])
        assert (await bob.next_message(10)).wakes is False


async def test_every_request_of_these_services_is_answered_and_junk_is_counted(space: RealSpace) -> None:
    await space.add("ada")
    assert space.steward is not None
    bodies: list[bytes] = [
        b"",
        b"junk",
        b'{"op":"12345678","do":"nonsense"}',
        b'{"op":"12345678","do":"beat"}',
        b'{"op":"12345678","do":"beat","session":"session-1","status":"dancing"}',
        b'{"op":"12345678","do":"snapshot","after":7}',
        b'{"op":"12345678","do":"take"}',
        b'{"op":"12345678","do":"take","session":"session-1","held":99999999999999999}',
    ]
    async with space.agent("ada") as ada:
        for service in ("presence", "roster", "session"):
            for body in bodies:
                reply = await ada.connection.request(space.subjects.control(service, ada.id), body, timeout=5)
                assert json.loads(reply.data)["ok"] is False, (service, body)
        beat = BeatRequest(session="session-1", status="idle")
        assert (await ada.control.call(beat)).boot == space.steward.roster.boot
        counts = space.steward.dispatcher.counts
        refused = counts["refused"]
        await ada.connection.publish(space.subjects.control("presence", ada.id), b"junk")
        await ada.connection.flush()
        assert await eventually(lambda: counts["refused"] == refused + 1)
