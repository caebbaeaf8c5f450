"""Messages of another space in this one: read live, from the log, after losses and from frames; forged, by nobody."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

import tidings
from linking import OtherSpace, admit
from tidings.admin.agents import AgentFile
from tidings.client.connect import connect_directly
from tidings.client.notices import Gap
from tidings.contract.admin import UnreadRequest
from tidings.contract.agents import LinksRequest
from tidings.contract.channels import HistoryRequest
from tidings.contract.mail import DeadLettersRequest, LetterRow
from tidings.errors import UnreachableError
from tidings.steward.damage import Damage
from tidings.steward.store_reading import read_store
from tidings.wire import signing
from tidings.wire.links import MOST_HOPS
from tidings.wire.message import Mention
from tidings.wire.signing import KeyPair
from tidings_testing.raw_requests import raw_call
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually
from tools.frames import stub_pipeline


def connect(space: RealSpace, name: str, **options: object) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)  # type: ignore[arg-type]


async def received(endpoint: tidings.DirectAgent, count: int) -> list[tidings.Incoming]:
    found = []
    for _ in range(count):
        found.append(await endpoint.next_message(10))
        await found[-1].ack()
    return found


def lose_linked(endpoint: tidings.DirectAgent, is_lost: Callable[[Any], bool]) -> list[str]:
    lost: list[str] = []

    def lossy(handler: Callable[[Any], None]) -> Callable[[Any], None]:
        def hand_over(message: Any) -> None:
            if ".live.via." in message.subject and is_lost(message):
                lost.append(message.data.decode())
            else:
                handler(message)

        return hand_over

    for subscription in endpoint.transport.connection.current.subscriptions:
        subscription.handler = lossy(subscription.handler)
    return lost


async def test_a_message_of_another_space_comes_live_with_who_said_it_where(space: RealSpace) -> None:
    await space.add("bob")
    west = OtherSpace()
    await west.link(space)
    async with connect(space, "bob", channels=["general"]) as bob:
        seq = await west.admit(space, west.say("hello from the west", context="plan"))
        (heard,) = await received(bob, 1)
        later = await west.admit(space, west.say("and again"))
        await received(bob, 1)
        await eventually(lambda: bob.transport.links._through >= later, what="the roster says that nothing changed")
        assert (bob.transport.links._is_old, bob.transport.links.asked) == (False, 1)
    assert (heard.text, heard.channel, heard.seq, heard.kind) == ("hello from the west", "general", seq, "channel")
    assert (heard.sender.name, heard.sender.id, heard.origin) == ("ada@west", west.ada.id, "west")
    assert (heard.origin_id, heard.claims, heard.message.context) == (west.id, None, "plan")


async def test_a_space_without_links_is_never_asked_for_them(space: RealSpace) -> None:
    for name in ("ada", "bob"):
        await space.add(name)
    async with connect(space, "ada") as ada, connect(space, "bob", channels=["general"]) as bob:
        await ada.send("general", "hello")
        (heard,) = await received(bob, 1)
        assert (heard.origin, heard.origin_id, bob.transport.links.asked) == ("", "", 0)


async def test_a_local_agent_is_never_shown_for_somebody_elsewhere_of_the_same_name_or_key(space: RealSpace) -> None:
    for name in ("ada", "bob"):
        await space.add(name)
    west = OtherSpace()
    await west.link(space)
    async with connect(space, "bob", channels=["general"]) as reader, connect(space, "ada") as local:
        twin = local.transport.identity.key
        await west.admit(space, west.say("I am elsewhere", key=twin, name="bob"))
        await local.send("general", "I am here")
        foreign, here = await received(reader, 2)
    assert (foreign.sender.name, foreign.sender.id) == ("bob@west", twin.id)
    assert (here.sender.name, here.origin) == ("ada", "")


async def test_a_link_without_a_name_and_a_space_behind_it_are_shown_by_the_beginning_of_their_ids(
    space: RealSpace,
) -> None:
    await space.add("bob", read=[">"])
    west, north = OtherSpace(name=""), OtherSpace("north")
    await west.link(space, beyond={north.id: {"news": "general"}}, channels={"general": "general2"}, hops=2)
    async with connect(space, "bob", channels=["general", "general2"]) as bob:
        await west.admit(space, west.say("one"), "general2")
        await admit(space, north.say("two", "news").but(hops=2))
        # two channels have no order between them
        one, two = sorted(await received(bob, 2), key=lambda each: each.text)
        assert (one.sender.name, one.origin) == (f"ada@{west.id[:10]}…", f"{west.id[:10]}…")
        assert two.origin == f"{north.id[:10]}…"
        await north.link(space, "north", channels={})
        await eventually(lambda: bob.transport.links._is_old)
        await admit(space, north.say("three", "news").but(hops=2))
        (three,) = await received(bob, 1)
        assert three.sender.name == "ada@north", "another link record names the space"


async def test_what_is_forged_comes_by_no_way(space: RealSpace) -> None:
    """A hostile worker: forged senders, foreign channels, words from another channel, a replay of another space."""
    await space.add("bob", read=[">"])
    west, east = OtherSpace(), OtherSpace("west")  # two spaces of one name
    await west.link(space, channels={"general": "general", "team.>": "west.team.>"})
    await west.link(space, "off", "off")
    await west.link(space, "over", until=1)
    other = KeyPair.generate()
    async with connect(space, "bob", channels=["general", "west.team.>"]) as bob:
        good = west.say("good")
        here = space.info.id
        secret = west.say("secret", "secrets")
        forged = [
            (good.but(sender=other.id), "general", "west"),
            (good.but(payload=good.payload.replace(b"good", b"evil")), "general", "west"),
            (good.but(theirs="team.a"), "west.team.a", "west"),
            (good, "west.team.a", "west"),
            (secret, "general", "west"),
            (secret.but(theirs="general"), "general", "west"),
            (east.say("east"), "general", "west"),
            (east.say("east").but(origin=west.id), "general", "west"),
            (west.say("far").but(hops=2), "general", "west"),
            (west.say("far").but(hops=MOST_HOPS), "general", "west"),
            (west.say("off"), "general", "off"),
            (west.say("over"), "general", "over"),
            (west.say("nobody"), "general", "unknown"),
            (good.but(origin=here), "general", "west"),
        ]
        stored = [await admit(space, *each) for each in forged]
        altered = {stored[0], stored[1], stored[2], stored[5], stored[7]}  # the link would let such a record in
        seq = await west.admit(space, good)
        (heard,) = await received(bob, 1)
        assert (heard.text, heard.seq) == ("good", seq)
        past = await bob.history("general", limit=50)
        assert ([each.text for each in past], past.hidden) == (["good"], False)
        assert await bob.history("west.team.a") == []
        page = await bob.call(HistoryRequest(">", limit=200))
        shown = {line.seq for line in page.records}
        assert {each.seq for each in past} <= shown <= {seq, *altered}, "what is altered only its readers can tell"
        assert page.void == len(forged) - len(altered)
        bob.transport.connection.reconnect()
        last = await west.admit(space, west.say("last"))
        (end,) = await received(bob, 1)
        assert (end.seq, len(bob.transport.queue)) == (last, 0)
        refused = bob.transport.opener.refused
        assert refused["signature"] >= 6
        assert refused["link"] >= 7


async def test_what_was_said_in_this_space_does_not_come_back_into_it(space: RealSpace) -> None:
    await space.add("bob", read=[">"])
    await space.add("ada")
    west = OtherSpace()
    # a link record that a mistaken operator wrote: it takes this space itself for what is behind the other
    await west.link(space, beyond={space.info.id: {"general": "echo"}})
    async with connect(space, "ada") as ada, connect(space, "bob", channels=["echo"]) as bob:
        mine = OtherSpace("mine", key=west.key, ada=ada.transport.identity.key)
        said = mine.say("echo")
        signature = signing.sign(ada.transport.identity.key, space.info.id, "chat", "general", said.payload)
        await admit(space, said.but(signature=signature, origin=space.info.id), "echo")
        await eventually(lambda: bob.transport.opener.refused["link"] == 1)
        assert await bob.history("echo") == []


async def test_a_record_is_judged_by_the_link_record_in_force_at_its_sequence(space: RealSpace) -> None:
    await space.add("bob", read=[">"])
    west = OtherSpace()
    async with connect(space, "bob", channels=["general", "other"]) as bob:
        early = await west.admit(space, west.say("before there was a link"))
        await eventually(lambda: bob.transport.opener.refused["link"] == 1)
        await west.link(space)
        await west.admit(space, west.say("one"))
        (one,) = await received(bob, 1)
        await west.link(space, channels={"general": "other"})
        await eventually(lambda: bob.transport.links._is_old, what="the roster tells of the change within a beat")
        await west.admit(space, west.say("by the old name"))
        await west.admit(space, west.say("two"), "other")
        (two,) = await received(bob, 1)
        off = await west.link(space, state="off")
        await eventually(lambda: bob.transport.links._is_old)
        await west.admit(space, west.say("after it was off"), "other")
        await eventually(lambda: bob.transport.opener.refused["link"] == 3)
        assert [m.text for m in await bob.history("general")] == ["one"]
        assert [m.text for m in await bob.history("other")] == ["two"]
        rows = (await bob.call(LinksRequest())).links
        assert [(row.state, row.channels, row.origin) for row in rows] == [
            ("on", {"general": "general"}, west.id),
            ("on", {"general": "other"}, west.id),
            ("off", {"general": "general"}, west.id),
        ]
        assert rows[-1].seq == off > one.seq > early
        assert two.text == "two"


async def test_a_link_switched_on_a_moment_ago_loses_no_live_copy(space: RealSpace) -> None:
    """The reader knows the link as off; the roster has not told of the change yet: it asks before it refuses."""
    await space.add("bob")
    west = OtherSpace()
    await west.link(space, state="off")
    async with connect(space, "bob", channels=["general"]) as bob:
        await west.admit(space, west.say("refused"))
        await eventually(lambda: bob.transport.opener.refused["link"] == 1)
        for number in range(3):
            await west.link(space, state="on", hops=number + 1)
            await west.admit(space, west.say(f"on {number}"))
            await west.link(space, state="off")
        assert [m.text for m in await received(bob, 3)] == ["on 0", "on 1", "on 2"]


async def test_agents_are_told_no_channel_they_may_not_read_and_nothing_of_the_grant(space: RealSpace) -> None:
    await space.add("bob", read=["general", "west.team.a"])
    west = OtherSpace()
    peer = KeyPair.generate().id
    await west.link(
        space,
        channels={"general": "general", "secrets": "west.secrets", "team.>": "west.team.>"},
        shares=("plans",),
        peer=peer,
        steward=KeyPair.generate().id,
    )
    async with space.agent("bob") as bob:
        (row,) = (await raw_call(bob.control, "space", "links"))["links"]
    assert row["channels"] == {"general": "general", "team.>": "west.team.>"}
    assert {"peer", "shares", "steward", "direct", "roster"} & row.keys() == set()


async def test_lost_live_copies_of_linked_messages_are_noticed_and_read(space: RealSpace) -> None:
    await space.add("bob")
    west = OtherSpace()
    await west.link(space)
    eve = KeyPair.generate()
    async with connect(space, "bob", channels=["general"]) as bob:
        told: list[Gap] = []
        bob.on("gap", told.append)
        await west.admit(space, west.say("first"))
        (_,) = await received(bob, 1)
        lost = lose_linked(bob, lambda message: b"lost" in message.data)
        for number in range(4):
            await west.admit(space, west.say(f"lost {number}"))
        await west.admit(space, west.say("eve", key=eve, name="eve"))
        await west.admit(space, west.say("last"))
        found = await received(bob, 6)
        assert bob.transport.opener.refused["repeated"] == 0
    assert len(lost) == 4
    assert sorted(m.text for m in found) == ["eve", "last", "lost 0", "lost 1", "lost 2", "lost 3"]
    mine = [m.text for m in found if m.sender.id == west.ada.id]
    assert mine == ["lost 0", "lost 1", "lost 2", "lost 3", "last"]
    assert {m.origin for m in found} == {"west"}
    assert [(gap.recovered, gap.sender, gap.gone) for gap in told] == [(4, west.ada.id, False)]


async def test_a_lost_copy_of_what_no_link_lets_in_is_no_gap(space: RealSpace) -> None:
    await space.add("bob")
    west = OtherSpace()
    await west.link(space)
    async with connect(space, "bob", channels=["general"]) as bob:
        told: list[Gap] = []
        bob.on("gap", told.append)
        await west.admit(space, west.say("first"))
        await received(bob, 1)
        lost = lose_linked(bob, lambda message: b"forged" in message.data)
        await west.admit(space, west.say("forged", "secrets"))
        await west.admit(space, west.say("last"))
        (last,) = await received(bob, 1)
    assert (last.text, len(lost), told) == ("last", 1, [])


async def test_what_was_missed_while_away_comes_after_a_reconnect_with_its_origin(space: RealSpace) -> None:
    await space.add("bob")
    west = OtherSpace()
    await west.link(space)
    async with connect(space, "bob", channels=["general"]) as bob:
        await west.admit(space, west.say("one"))
        await received(bob, 1)
        await space.restart_broker()
        for text in ("two", "three"):
            await west.admit(space, west.say(text))
        came = await received(bob, 2)
        assert {(m.text, m.sender.name) for m in came} == {("two", "ada@west"), ("three", "ada@west")}
        # the next test has the other order
        assert [m.text for m in came] == ["two", "three"] or (came[0].ahead and came[1].late)


async def test_while_the_steward_is_away_a_message_behind_a_lost_copy_comes_marked_ahead_and_the_lost_one_late(
    space: RealSpace,
) -> None:
    await space.add("bob")
    west = OtherSpace()
    await west.link(space)
    async with connect(space, "bob", channels=["general"]) as bob:
        await west.admit(space, west.say("one"))
        await received(bob, 1)
        await space.stop_steward()
        lost = lose_linked(bob, lambda message: b"two" in message.data)
        for text in ("two", "three"):
            await west.admit(space, west.say(text))
        (ahead,) = await received(bob, 1)
        await space.start_steward()
        (late,) = await received(bob, 1)
    assert (ahead.text, ahead.ahead, ahead.late, len(lost)) == ("three", True, False, 1)
    assert (late.text, late.ahead, late.late) == ("two", False, True)


async def test_while_the_steward_is_away_local_messages_go_on_and_linked_ones_come_later(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ada", "bob"):
        await space.add(name)
    west = OtherSpace()
    await west.link(space)
    async with connect(space, "ada") as ada, connect(space, "bob", channels=["general"]) as bob:
        asked = bob.transport.links._read

        async def nobody() -> None:
            raise UnreachableError("nobody answers")

        monkeypatch.setattr(bob.transport.links, "_read", nobody)
        await west.admit(space, west.say("from the west"))
        await ada.send("general", "from here")
        (first,) = await received(bob, 1)
        assert first.text == "from here"
        monkeypatch.setattr(bob.transport.links, "_read", asked)
        (second,) = await received(bob, 1)
        assert (second.text, second.late) == ("from the west", True)


async def test_who_only_watches_gets_linked_messages_too(space: RealSpace) -> None:
    await space.add("bob", read=[">"])
    west = OtherSpace()
    await west.link(space)
    async with connect(space, "bob") as bob:
        await bob.transport.watch(">")
        for text in ("one", "two"):
            await west.admit(space, west.say(text))
        assert [m.text for m in await received(bob, 2)] == ["one", "two"]


async def test_what_a_sender_said_later_does_not_pass_what_cannot_be_judged_yet(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links are known a moment before who waits for that is told: what comes in between waits too."""
    await space.add("bob", read=[">"])
    west = OtherSpace()
    await west.link(space)
    async with connect(space, "bob") as bob:
        await bob.transport.watch(">")
        known, go_on = asyncio.Event(), asyncio.Event()
        adopt = bob.transport.links._read

        async def slowly() -> None:
            await adopt()
            known.set()
            await go_on.wait()

        monkeypatch.setattr(bob.transport.links, "_read", slowly)
        await west.admit(space, west.say("one"))
        await asyncio.wait_for(known.wait(), 20)
        await west.admit(space, west.say("two"))
        with pytest.raises(TimeoutError):
            await bob.next_message(timeout=0.5)
        go_on.set()
        assert [m.text for m in await received(bob, 2)] == ["one", "two"]


async def test_an_answer_keeps_the_thread_and_a_mention_of_somebody_elsewhere_harms_nobody(space: RealSpace) -> None:
    bob = (await space.add("bob")).row
    west, cat = OtherSpace(), KeyPair.generate()
    await west.link(space)
    async with connect(space, "bob", channels=["general"]) as reader, connect(space, "bob", receive=False) as other:
        mentions = [Mention(cat.id, "cat"), Mention(bob.id, "robert")]
        await west.admit(space, west.say("well?", mentions=mentions, context="plan"))
        (asked,) = await received(reader, 1)
        assert asked.mentions_me
        assert [each.name for each in asked.mentions] == [f"{cat.id[:10]}…", "bob"]
        sent = await other.send("general", "yes", reply_to=asked.id, context=asked.message.context)
        newest, older = await other.history("general", limit=2)
        assert (newest.id, newest.message.reply_to, newest.message.context) == (sent.id, asked.id, "plan")
        assert (older.id, older.sender.name, older.historical) == (asked.id, "ada@west", True)


@pytest.mark.parametrize("by_reference", [False, True])
async def test_a_durable_copy_opens_at_a_member_who_was_away(space: RealSpace, by_reference: bool) -> None:
    bob = (await space.add("bob")).row
    west = OtherSpace()
    await west.link(space)
    async with connect(space, "bob", channels=["general"]):
        pass
    async with stub_pipeline(space) as pipeline:
        good = await west.admit(space, west.say("while you were away"))
        forged = await admit(space, west.say("forged", "secrets"))
        await pipeline.deliver(bob.id, [good, forged], by_reference=by_reference)
        await pipeline.level()
        async with connect(space, "bob") as reader:
            (heard,) = await received(reader, 1)
            assert (heard.text, heard.sender.name, heard.seq) == ("while you were away", "ada@west", good)
            assert heard.durable
            await eventually(lambda: pipeline.acknowledged(bob.id))
            assert len(reader.transport.queue) == 0


async def test_a_linked_message_given_back_too_often_is_a_dead_letter_of_somebody_elsewhere(space: RealSpace) -> None:
    await space.add("bob")
    west = OtherSpace()
    await west.link(space)
    async with connect(space, "bob", channels=["general"], retry=tidings.Retry(attempts=1)) as bob:
        seq = await west.admit(space, west.say("poison"))
        heard = await bob.next_message(10)
        await heard.nak(error="cannot")
        await eventually(lambda: _letters(bob))
        ((letter,), (_, text)) = await _letters(bob), await bob.transport.dead_letter(letter=f"channel-{seq}")
        assert (letter.seq, letter.sender_name) == (seq, f"{west.ada.id[:10]}…@west")
        assert text == "poison"


async def _letters(endpoint: tidings.DirectAgent) -> list[LetterRow]:
    return list((await endpoint.call(DeadLettersRequest())).mail)


async def test_one_question_at_a_time_and_not_often_whatever_comes(space: RealSpace) -> None:
    await space.add("bob")
    west = OtherSpace()
    async with connect(space, "bob", channels=["general"]) as bob:
        began = asyncio.get_running_loop().time()
        for number in range(40):
            await west.admit(space, west.say(f"no link {number}"))
        await eventually(lambda: bob.transport.opener.refused["link"] == 40, within=20)
        took = asyncio.get_running_loop().time() - began
        assert bob.transport.links.asked <= took + 2


async def test_the_life_of_a_message_that_its_sender_said_elsewhere_names_the_other_space(space: RealSpace) -> None:
    await space.add("ada")
    west = OtherSpace()
    await west.link(space)
    async with connect(space, "ada", receive=False) as ada:
        said = west.say("from my other space", key=ada.transport.identity.key)
        seq = await west.admit(space, said)
        mid = json.loads(said.payload)["id"]
        (line,) = (await ada.trace(mid)).stored
    assert (line.seq, line.kind, line.to) == (seq, "chat", "general")
    assert (line.origin, line.link) == (west.id, "west")


async def test_whoever_reads_the_whole_store_judges_linked_messages_too(space: RealSpace) -> None:
    west = OtherSpace()
    await west.link(space)
    good = west.say("good")
    await west.admit(space, good)
    assert (await read_store(space.home)).void == {}
    await west.admit(space, good.but(payload=west.message("altered").raw))
    await admit(space, west.say("foreign", "secrets"))
    report = await read_store(space.home)
    assert (report.wrong, dict(report.void)) == (0, {"signature": 1, "link": 1})


async def test_what_the_store_lost_of_another_space_is_told_to_members_and_not_as_a_local_agents(
    space: RealSpace,
) -> None:
    bob = (await space.add("bob")).row
    west = OtherSpace()
    await west.link(space)
    async with connect(space, "bob", channels=["general"]) as reader:
        seq = await west.admit(space, west.say("kept"))
        assert space.steward is not None
        watch = space.steward.store
        damage = Damage("LOG_main", seq, seq, 1, "test", "now", {space.subjects.via("west", west.ada.id, "general"): 1})
        watch.file.damages.append(damage)
        (row,) = watch.told_to(bob.id)
        assert watch.told_to(west.ada.id) == []
        assert reader.id == bob.id
    assert f"{west.ada.id[:10]}…@west in general, over the link west" in row.text


async def test_what_is_owed_of_another_space_and_not_delivered_yet_counts_as_unread(space: RealSpace) -> None:
    bob = (await space.add("bob")).row
    west = OtherSpace()
    await west.link(space)
    async with connect(space, "bob", channels=["general"]):
        pass
    async with stub_pipeline(space) as pipeline, space.administer() as admin:
        await pipeline.level()
        await west.admit(space, west.say("owed"))
        await admit(space, west.say("forged", "secrets"))
        assert (await admin.call(UnreadRequest(bob.id))).undelivered == 1


async def test_a_channel_that_an_agent_may_read_since_a_moment_ago_is_known_to_it(space: RealSpace) -> None:
    """Rows name only what may be read, so another access is another table."""
    await space.add("bob")
    west = OtherSpace()
    await west.link(space, channels={"general": "general", "plans": "west.plans"})
    async with connect(space, "bob", channels=["general"]) as bob:
        await west.admit(space, west.say("one"))
        await received(bob, 1)
        early = await west.admit(space, west.say("early", "plans"), "west.plans")
        await eventually(lambda: bob.transport.links._through >= early)
        async with space.administer() as admin:
            await admin.set_access("bob", AgentFile("bob", read=("general", "west.plans"), post=("general",)))
        await bob.join("west.plans")
        past = await bob.history("west.plans")
        await west.admit(space, west.say("two", "plans"), "west.plans")
        (two,) = await received(bob, 1)
    assert (two.text, two.channel) == ("two", "west.plans")
    assert [each.text for each in past] == ["early"]
