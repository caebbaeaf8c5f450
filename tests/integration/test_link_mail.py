"""Direct messages between agents of linked spaces: sealed, once, receipts come back; nothing else passes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tidings
from carried_links import (
    LinkedSpaces,
    agree,
    call_worker,
    directory_status,
    linked_spaces,
    worker,
    worker_process,
)
from coding_agents import hosted
from linked_spaces import ELSEWHERE, LINK, linked, peer_of, unlinked, worker_of
from tidings.admin.link_peers import LinkPeers
from tidings.client.connect import connect_directly
from tidings.contract.link_worker import PauseLinkRequest, ResumeLinkRequest
from tidings.contract.links import (
    DirectoryRow,
    ImportDirectoryRequest,
    ImportMailRequest,
    LinkMailRequest,
    LinkReceiptsRequest,
    MailOffer,
)
from tidings.errors import ConflictError, DeniedError, PeerUnheard, UnknownPeer
from tidings.links import mail_sync, running_link
from tidings.nats.jetstream import JetStream, StoredRecord
from tidings.steward import link_mail, linked_people, mail
from tidings.wire import message as wire_message
from tidings.wire.link_exchange import ToldReceipt
from tidings.wire.links import MailOrigin, mail_origin_field
from tidings.wire.message import Sender, compose, new_id
from tidings.wire.seal import seal_message
from tidings.wire.signing import SIGNATURE_HEADER, KeyPair, sign
from tidings.wire.states import ReceiptStage
from tidings_testing.real_space import TEST_INTERVALS, RealSpace
from tidings_testing.waiting import eventually


def connect(space: RealSpace, name: str, **options: Any) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_link, "EVERY", 0.1)
    monkeypatch.setattr(mail_sync, "LOOK_AGAIN", 0.2)


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[LinkedSpaces]:
    async with linked_spaces(tmp_path, roster="on", direct="on") as spaces:
        yield spaces


async def knows(agent: tidings.DirectAgent, name: str) -> None:
    async def known() -> bool:
        return any(each.name == name for each in await agent.who())

    await eventually(known, within=20, what=name)


async def heard(agent: tidings.DirectAgent) -> tidings.Incoming:
    return await agent.next_message(timeout=20)


async def stored(space: RealSpace) -> int:
    """How many direct messages there ever were in the mail of a space."""
    async with space.core() as js:
        return int((await js.info(space.subjects.direct_stream))["state"]["last_seq"])


async def silent(agent: tidings.DirectAgent, seconds: float = 1.0) -> None:
    with pytest.raises(TimeoutError):
        await agent.next_message(timeout=seconds)


async def test_a_direct_message_to_a_linked_space_is_read_there_answered_and_its_receipts_come_back(
    both: LinkedSpaces,
) -> None:
    async with (
        worker(both.main),
        worker(both.acme),
        connect(both.main, "ada") as ada,
        connect(both.acme, "bob") as bob,
    ):
        await knows(ada, "bob@acme")
        sent = await ada.dm("bob@acme", "are you there?")
        got = await heard(bob)
        assert (got.text, got.kind, got.sender.name, got.sender.id) == ("are you there?", "direct", "ada@main", ada.id)
        assert (got.sealed, got.origin, got.origin_id) == (True, "main", both.main.info.id)
        assert (await ada.receipt(sent, "delivered", timeout=20)).stage == "delivered"
        await got.ack()
        assert (await ada.receipt(sent, "read", timeout=20)).stage == "read"

        answer = await bob.dm(got.sender.id, "yes", reply_to=got.message.id)
        back = await heard(ada)
        assert (back.text, back.sender.name, back.message.reply_to) == ("yes", "bob@acme", sent.id)
        await back.ack()
        assert (await bob.receipt(answer, "read", timeout=20)).stage == "read"
        traced = await ada.trace(sent)
        assert [each.stage for each in traced.receipts] == ["read"]

        async def gone() -> bool:
            async with both.main.core() as js:
                return not await js.subjects_of(both.main.subjects.direct_stream, f"{both.main.subjects.root}.dm.>")

        await eventually(gone, within=20, what="what was read there goes here")


async def test_before_anything_was_written_rounds_about_mail_are_in_order(both: LinkedSpaces) -> None:
    async with worker(both.main), worker(both.acme), connect(both.main, "ada") as ada:
        await knows(ada, "bob@acme")

        async def in_order() -> bool:
            found = [await directory_status(each) for each in (both.main, both.acme)]
            return all(each.known == 1 and each.words == "" for each in found)

        await eventually(in_order, within=20, what="no round fails")


async def test_a_direct_message_waits_for_a_space_that_is_away_and_comes_once(both: LinkedSpaces) -> None:
    async with connect(both.main, "ada") as ada, connect(both.acme, "bob") as bob:
        async with worker(both.main):
            await knows(ada, "bob@acme")
        sent = [await ada.dm("bob@acme", f"number {n}") for n in range(70)]
        for _ in range(2):
            async with worker(both.acme):
                await asyncio.sleep(0)
        async with worker(both.acme):
            got = []
            for _ in sent:
                got.append(await heard(bob))
                await got[-1].ack()
            assert [each.text for each in got] == [f"number {n}" for n in range(70)]
            await silent(bob)
            assert await stored(both.acme) == 70


@pytest.mark.parametrize("place", ["link.mail.admitted", "link.mail.committed"])
async def test_a_worker_that_is_killed_around_its_commit_loses_nothing_and_nothing_comes_twice(
    both: LinkedSpaces, place: str
) -> None:
    async with connect(both.main, "ada") as ada, connect(both.acme, "bob") as bob:
        async with worker(both.main):
            await knows(ada, "bob@acme")
        sent = [await ada.dm("bob@acme", text) for text in ("one", "two")]
        async with worker_process(both.acme, TIDINGS_FAILPOINT=f"{place}:kill") as doomed:
            await asyncio.wait_for(doomed.child.wait(), 30)
        async with worker(both.acme):
            for wanted in ("one", "two"):
                got = await heard(bob)
                assert got.text == wanted
                await got.ack()
            await silent(bob)
            assert (await ada.receipt(sent[1], "read", timeout=20)).stage == "read"
            assert await stored(both.acme) == 2


async def test_mail_to_an_agent_that_was_revoked_there_is_undeliverable(both: LinkedSpaces) -> None:
    async with connect(both.main, "ada") as ada:
        async with worker(both.main):
            await knows(ada, "bob@acme")
        first = await ada.dm("bob@acme", "too late")
        async with both.acme.administer() as admin:
            await admin.revoke("bob")
        async with worker(both.main), worker(both.acme):
            found = await ada.receipt(first, "read", timeout=20)
            assert (found.stage, found.why) == ("undeliverable", "its reader was revoked")


async def test_nothing_passes_over_a_link_that_was_ended_and_what_came_before_stays_readable(
    both: LinkedSpaces,
) -> None:
    async with connect(both.main, "ada") as ada:
        async with worker(both.main), worker(both.acme):
            await knows(ada, "bob@acme")
            await ada.dm("bob@acme", "before")

            async def came() -> bool:
                mail = (await directory_status(both.acme)).mail
                return bool(mail and mail.came == 1)

            await eventually(came, within=20)
        late = await ada.dm("bob@acme", "after")
        await unlinked(both.acme)
        await unlinked(both.main)
        await both.main.stop_steward()
        await both.main.start_steward(replace(TEST_INTERVALS, mail=0.2, mail_grace=0.0))
        async with worker(both.main), worker(both.acme), connect(both.acme, "bob") as bob:
            got = await heard(bob)
            assert got.text == "before"
            await silent(bob)
            with pytest.raises(UnknownPeer):
                await ada.transport.resolve("bob@acme")
            assert (await ada.receipt(late, "read", timeout=30)).stage == "undeliverable"


async def test_without_both_switches_no_mail_passes(tmp_path: Path) -> None:
    async with linked_spaces(tmp_path, roster="on") as both:
        async with worker(both.main), worker(both.acme), connect(both.main, "ada") as ada:
            await knows(ada, "bob@acme")
            with pytest.raises(DeniedError, match="the link with acme passes no direct messages"):
                await ada.dm("bob@acme", "psst")
        creds = LinkPeers.below(both.main.home).creds(LINK).read_text()
        async with peer_of(both.acme, creds) as peer, worker_of(both.acme) as own:
            for call in (peer.control.call(LinkMailRequest()), peer.control.call(LinkReceiptsRequest(receipts=()))):
                with pytest.raises(DeniedError, match="passes no direct messages"):
                    await call
            with pytest.raises(DeniedError, match="passes no direct messages"):
                await own.call(ImportMailRequest(LINK, mail=()))


async def test_mail_that_has_no_room_waits_in_its_own_space_and_comes_when_there_is(
    both: LinkedSpaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_mail, "MOST_WAITING", 1)
    async with connect(both.main, "ada") as ada:
        async with worker(both.main):
            await knows(ada, "bob@acme")
        for text in ("one", "two", "three"):
            await ada.dm("bob@acme", text)
        async with worker(both.acme):

            async def waits() -> bool:
                mail = (await directory_status(both.acme)).mail
                return mail is not None and mail.came == 1 and "as many messages of this link lie here" in mail.waits

            await eventually(waits, within=20)
            monkeypatch.setattr(link_mail, "MOST_WAITING", 5_000)
            async with connect(both.acme, "bob") as bob:
                for wanted in ("one", "two", "three"):
                    got = await heard(bob)
                    assert got.text == wanted
                    await got.ack()


async def test_mail_of_a_space_whose_store_was_set_back_is_read_from_the_beginning_and_comes_once(
    both: LinkedSpaces,
) -> None:
    async with connect(both.main, "ada") as ada, connect(both.acme, "bob") as bob:
        async with worker(both.main), worker(both.acme):
            await knows(ada, "bob@acme")
            await ada.dm("bob@acme", "before")
            got = await heard(bob)
        # its stream is made anew, under the same name: sequences begin again, and lie below what was handled
        stream = both.main.subjects.direct_stream
        async with both.main.core() as js:
            config = (await js.info(stream))["config"]
            await js.api(f"STREAM.DELETE.{stream}")
            await js.api(f"STREAM.CREATE.{stream}", config)
        await got.ack()
        await ada.dm("bob@acme", "after")
        async with worker(both.main), worker(both.acme):
            again = await heard(bob)
            assert again.text == "after"
            await again.ack()
            await silent(bob)


async def test_what_a_key_wrote_before_it_was_rotated_still_comes_and_the_new_key_is_the_same_name(
    both: LinkedSpaces,
) -> None:
    async with worker(both.main), worker(both.acme):
        async with connect(both.main, "ada") as ada, connect(both.acme, "bob") as bob:
            await knows(ada, "bob@acme")
            await ada.dm("bob@acme", "from the old key")
            old = await heard(bob)
            await old.ack()
        async with both.main.administer() as admin:
            await admin.rotate("ada", drop_unread=True)
        async with connect(both.main, "ada") as ada, connect(both.acme, "bob") as bob:

            async def renamed() -> bool:
                return any(each.id == ada.id and each.name == "ada@main" for each in await bob.who())

            await eventually(renamed, within=20)
            await knows(ada, "bob@acme")
            sent = await ada.dm("bob@acme", "from the new key")
            got = await heard(bob)
            assert (got.text, got.sender.name, got.sender.id) == ("from the new key", "ada@main", ada.id)
            await got.ack()
            assert (await ada.receipt(sent, "read", timeout=20)).stage == "read"


async def test_programs_at_hosts_write_to_and_hear_agents_of_a_linked_space(both: LinkedSpaces) -> None:
    async with (
        worker(both.main),
        worker(both.acme),
        hosted(both.main.home.home),
        hosted(both.acme.home.home),
        tidings.connect("main", name="ada", home=both.main.home.home, via="host") as ada,
        tidings.connect("acme", name="bob", home=both.acme.home.home, via="host") as bob,
    ):

        async def known() -> bool:
            return any(each.name == "bob@acme" for each in await ada.who())

        await eventually(known, within=20)
        sent = await ada.dm("bob@acme", "by way of hosts")
        got = await bob.next_message(timeout=20)
        assert (got.text, got.sender.name, got.origin) == ("by way of hosts", "ada@main", "main")
        await got.ack()
        assert (await ada.receipt(sent, "read", timeout=20)).stage == "read"


async def test_mail_is_not_passed_over_by_a_steward_that_does_not_know_yet_who_is_there(both: LinkedSpaces) -> None:
    async with connect(both.main, "ada") as ada, connect(both.acme, "bob") as bob:
        async with worker(both.main):
            await knows(ada, "bob@acme")
        to = (await ada.transport.resolve("bob@acme")).id
        await both.main.stop_steward()
        await both.main.start_steward()
        await ada.dm(to, "written while nobody was known")
        async with worker(both.acme):

            async def told() -> bool:
                return "is not known yet" in (await directory_status(both.acme)).words

            await eventually(told, within=20)
            async with worker(both.main):
                assert (await heard(bob)).text == "written while nobody was known"


async def test_what_a_space_lost_by_being_set_back_is_fetched_again_from_where_it_was_written(
    both: LinkedSpaces,
) -> None:
    async with connect(both.main, "ada") as ada:
        async with worker(both.main), worker(both.acme):
            await knows(ada, "bob@acme")
            await ada.dm("bob@acme", "lost and found")

            async def came() -> bool:
                mail = (await directory_status(both.acme)).mail
                return bool(mail and mail.came == 1)

            await eventually(came, within=20)
        async with both.acme.core() as js:
            await js.purge(both.acme.subjects.direct_stream, subject_filter=f"{both.acme.subjects.root}.>", below=2)
            stream = both.acme.subjects.audit_stream
            config = (await js.info(stream))["config"]
            await js.api(f"STREAM.DELETE.{stream}")
            await js.api(f"STREAM.CREATE.{stream}", config)
        await both.acme.stop_steward()
        await both.acme.start_steward()
        async with worker(both.main), worker(both.acme), connect(both.acme, "bob") as bob:
            assert (await heard(bob)).text == "lost and found"


async def put_mail(space: RealSpace, key: KeyPair, name: str, to: str, origin: str, agreed: int) -> None:
    """What a worker's credential can publish: a message of this key that says it came over the link."""
    said = seal_message(key, to, compose(Sender(key.id, name), text="the safe is open"))
    headers = {
        SIGNATURE_HEADER: sign(key, origin, "dm", to, said.raw),
        **dict([mail_origin_field(MailOrigin(origin, LINK, agreed))]),
    }
    async with space.core() as js:
        await js.publish(space.subjects.direct(to, key.id), said.raw, headers)


async def test_nobody_of_this_space_speaks_as_one_of_a_linked_space_and_a_stranger_has_no_name(
    both: LinkedSpaces,
) -> None:
    """With the signature of its own key over the other space's id, and a link record that passes mail."""
    await both.acme.add("eve")
    async with both.acme.agent("eve") as client:
        eve = client.key
    assert both.acme.steward is not None
    agreed = both.acme.steward.space.table.rules.links_revised
    async with connect(both.acme, "bob") as bob:
        await put_mail(both.acme, eve, "ceo", bob.id, both.main.info.id, agreed)
        stranger = KeyPair.generate()
        await put_mail(both.acme, stranger, "ceo", bob.id, both.main.info.id, agreed)
        got = await heard(bob)
        assert got.sender.id == stranger.id
        assert bob.transport.opener.refused["direct"] == 1, "an agent of this space is refused"
        assert "ceo" not in got.sender.name
        assert got.sender.name.endswith("@main")
        async with both.acme.core() as js:
            first = await js.at(both.acme.subjects.direct_stream, 1)
        assert both.acme.steward.space.received(first) is None, "the steward has no part in it either"


async def test_receipts_are_not_refused_by_a_steward_that_does_not_know_yet_who_is_there(both: LinkedSpaces) -> None:
    async with connect(both.main, "ada") as ada, connect(both.acme, "bob") as bob:
        async with worker(both.main), worker(both.acme):
            await knows(ada, "bob@acme")
            sent = await ada.dm("bob@acme", "read while nobody is known")
            got = await heard(bob)
            await ada.receipt(sent, "delivered", timeout=20)
        await both.main.stop_steward()
        await both.main.start_steward()
        await got.ack()
        async with worker(both.acme):

            async def told() -> bool:
                return "is not known yet" in (await directory_status(both.acme)).words

            await eventually(told, within=20)
            creds = LinkPeers.below(both.acme.home).creds(LINK).read_text()
            row = ToldReceipt(ada.id, sent.id, bob.id, ReceiptStage.READ, sent.seq)
            async with peer_of(both.main, creds) as peer:
                with pytest.raises(ConflictError, match="is not known yet"):
                    await peer.control.call(LinkReceiptsRequest((row,)))
                async with worker_of(both.main) as own:  # withdraws them, as for a link that is paused
                    await own.call(ImportDirectoryRequest(LINK, version="0", people=()))
                with pytest.raises(ConflictError, match="nobody at the end of link abcdefghijkl is known now"):
                    await peer.control.call(LinkReceiptsRequest((row,)))
            async with worker(both.main):
                assert (await ada.receipt(sent, "read", timeout=20)).stage == "read"


async def test_neither_a_link_nor_an_agent_of_it_takes_the_room_of_another(
    both: LinkedSpaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, eve, stranger = "otherlinkabc", KeyPair.generate().id, KeyPair.generate().id
    async with connect(both.main, "ada") as ada, worker(both.main), worker(both.acme):
        await knows(ada, "bob@acme")
        bob = (await ada.transport.resolve("bob@acme")).id
        await ada.dm("bob@acme", "nobody reads it")

        async def came() -> bool:
            mail = (await directory_status(both.acme)).mail
            return bool(mail and mail.came == 1)

        await eventually(came, within=20)
    await linked(both.acme, other, origin=ELSEWHERE, roster="on", direct="on")
    async with worker_of(both.acme) as own:

        async def offer(link: str, *senders: str, size: int = 100) -> list[str]:
            rows = tuple(MailOffer(each, new_id(), bob, size) for each in senders)
            return list((await own.call(ImportMailRequest(link, rows))).verdicts)

        await own.call(ImportDirectoryRequest(other, version="1", people=(DirectoryRow(id=eve, name="eve"),)))
        assert await offer(LINK, ada.id) == await offer(other, eve) == ["take"]
        known, unknown = await offer(LINK, ada.id, stranger)
        assert (known, unknown[:35]) == ("take", "wait: its space has not stated that")
        assert (await offer(other, ada.id)) == ["no: its sender is an agent of another space than it came from"]

        monkeypatch.setattr(link_mail, "MOST_FILLED", 1e-9)  # less than a message, for each of both
        assert [each[:34] for each in await offer(LINK, ada.id)] == ["wait: messages of this link fill t"]
        one, two = await offer(other, eve, eve)
        assert (one, two[:34]) == ("take", "wait: messages of this link fill t")
        monkeypatch.setattr(link_mail, "MOST_FILLED", 0.5)

        ian = KeyPair.generate().id
        rows = (DirectoryRow(ada.id, "ada"), DirectoryRow(ian, "ian"))
        await own.call(ImportDirectoryRequest(LINK, version="2", people=rows))
        monkeypatch.setattr(link_mail, "MOST_WAITING", 10)  # one of each agent
        mine, his, again = await offer(LINK, ada.id, ian, ian)
        assert (mine[:22], his, again[:22]) == ("wait: as many messages", "take", "wait: as many messages")
        monkeypatch.setattr(link_mail, "MOST_WAITING", 1)
        assert (await offer(LINK, ian))[0].startswith("wait: as many messages of this link")
        assert await offer(other, eve) == ["take"]


@pytest.mark.parametrize("one_by_one", [100, 2])
async def test_for_a_page_of_mail_little_more_is_read_than_fits_however_many_have_mail(
    both: LinkedSpaces, monkeypatch: pytest.MonkeyPatch, one_by_one: int
) -> None:
    monkeypatch.setattr(link_mail, "MAIL_PER_PAGE", 4)
    monkeypatch.setattr(link_mail, "MOST_INBOXES", one_by_one, raising=False)
    keys, read, reading = [KeyPair.generate().id for _ in range(8)], [0], JetStream.read
    handing_out, looking = ContextVar("handing_out", default=False), link_mail.LinkMail._waiting

    async def counted(js: JetStream, stream: str, *where: Any, **how: Any) -> AsyncIterator[list[StoredRecord]]:
        async for page in reading(js, stream, *where, **how):
            read[0] += len(page) * handing_out.get()
            yield page

    async def waiting(mail: link_mail.LinkMail, *where: Any) -> Any:
        handing_out.set(True)  # others of the steward's read too
        return await looking(mail, *where)

    async with connect(both.main, "ada") as ada, worker_of(both.main) as own:
        rows = tuple(DirectoryRow(each, f"n{number}") for number, each in enumerate(keys))
        await own.call(ImportDirectoryRequest(LINK, version="1", people=rows))
        sent = [await ada.dm(key, f"number {n}") for n in range(5) for key in keys]
        monkeypatch.setattr(JetStream, "read", counted)
        monkeypatch.setattr(link_mail.LinkMail, "_waiting", waiting)
        creds, found, more = LinkPeers.below(both.acme.home).creds(LINK).read_text(), [], True
        request = LinkMailRequest()
        async with peer_of(both.main, creds) as peer:
            while more:
                read[0] = 0
                said = await peer.control.call(request)
                assert len(said.mail) <= 4
                # one more than fits of the first mailbox; of each further one what lies before the fifth of the others
                assert read[0] <= 5 + sum(-(-5 // before) + 1 for before in range(1, len(keys)))
                found += [each.seq for each in said.mail]
                request, more = LinkMailRequest(epoch=said.epoch, people="1", after=said.through), said.more
        assert found == [each.seq for each in sent]


MALLORY = "mallorylink1"


async def test_a_linked_space_that_states_an_agent_of_another_one_gets_nothing_of_it_and_is_not_believed_about_it(
    both: LinkedSpaces,
) -> None:
    made = await linked(both.main, MALLORY, origin=ELSEWHERE, space="mallory", roster="on", direct="on")
    async with connect(both.main, "ada") as ada, connect(both.acme, "bob") as bob, worker_of(both.main) as own:
        nobody = KeyPair.generate().id

        async def hand_over(link: str, name: str, version: str, *gone: str) -> list[str]:
            own_agent = (DirectoryRow(nobody, "mal"),) if link == MALLORY else ()
            rows = own_agent if gone else (DirectoryRow(bob.id, name), *own_agent)
            told = await own.call(ImportDirectoryRequest(link, version=version, people=rows, gone=gone))
            assert told.version == version
            return list(told.refused)

        assert await hand_over(LINK, "bob", "v1") == []
        assert await hand_over(MALLORY, "x", "v1") == [bob.id]
        await ada.dm("bob@acme", "not for mallory")
        async with peer_of(both.main, made.creds) as mallory:
            for version in ("v2", "v3"):
                assert (await mallory.control.call(LinkMailRequest())).mail == ()
                [lying] = await _lying(both.main)
                told = await mallory.control.call(
                    LinkReceiptsRequest((ToldReceipt(ada.id, lying, bob.id, ReceiptStage.READ, 1),))
                )
                assert told.refused == (0,)
                await hand_over(MALLORY, "x", version, bob.id)
        assert [each.name for each in await ada.who() if each.id == bob.id] == ["bob@acme"]
        async with worker(both.acme):
            assert (await heard(bob)).text == "not for mallory"


async def _lying(space: RealSpace) -> list[str]:
    """The ids of direct messages in the mail of a space."""
    stream, root = space.subjects.direct_stream, space.subjects.root
    async with space.core() as js:
        pages = js.read(stream, f"{root}.dm.>", 1, int((await js.info(stream))["state"]["last_seq"]))
        return [wire_message.decode(record.payload).id async for page in pages for record in page]


async def test_what_was_written_to_a_linked_space_waits_while_the_link_is_paused_or_ended_there(
    both: LinkedSpaces,
) -> None:
    await both.main.stop_steward()
    await both.main.start_steward(replace(TEST_INTERVALS, mail=0.1, mail_grace=0.0))
    async with connect(both.main, "ada") as ada, connect(both.acme, "bob") as bob:

        async def unknown() -> bool:
            return not any(each.name == "bob@acme" for each in await ada.who())

        async def looked(times: int) -> None:
            """Rounds of the mail pass: a message to nobody that is written now is told of, `times` over."""
            for _ in range(times):
                nobody = KeyPair.generate().id
                assert (await ada.receipt(await ada.dm(nobody, "?"), "read", timeout=20)).stage == "undeliverable"

        async with worker(both.main):
            await knows(ada, "bob@acme")
            sent = await ada.dm("bob@acme", "it waits")
            await call_worker(both.main, PauseLinkRequest(link=LINK))
            await eventually(unknown, within=20)
            await looked(2)
            await call_worker(both.main, ResumeLinkRequest(link=LINK))
            await knows(ada, "bob@acme")
            await unlinked(both.acme)
            await eventually(unknown, within=20)
            await looked(2)
            assert (await _lying(both.main)) == [sent.id]
            await both.agree(roster="on", direct="on")
            async with worker(both.acme):
                assert (await heard(bob)).text == "it waits"


async def test_a_link_that_nobody_carries_does_not_keep_mail_to_nobody_for_ever(
    both: LinkedSpaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail, "MOST_AWAITED", 3)
    await both.main.stop_steward()
    await both.main.start_steward(replace(TEST_INTERVALS, mail=0.1, links=0.1, mail_grace=0.0))
    async with connect(both.main, "ada") as ada:
        for _ in range(3):
            await ada.dm(KeyPair.generate().id, "who is this?")
        assert len(await _lying(both.main)) == 3
        await ada.dm(KeyPair.generate().id, "one too many")

        async def none() -> bool:
            return await _lying(both.main) == []

        await eventually(none, within=20)
        sent = await ada.dm(KeyPair.generate().id, "who is this?")
        monkeypatch.setattr(linked_people, "AWAITED", 0.0)
        assert (await ada.receipt(sent, "read", timeout=20)).stage == "undeliverable"


@pytest.mark.parametrize("end", ["on again", "expired"])
async def test_agents_of_a_space_that_switched_direct_messages_off_are_refused_at_once_and_what_lies_here_is_kept(
    both: LinkedSpaces, end: str
) -> None:
    async def passes(*, wanted: bool) -> None:
        async def so() -> bool:
            return [each.direct for each in await ada.who() if each.name == "bob@acme"] == [wanted]

        await eventually(so, within=20, what=f"direct messages pass: {wanted}")

    async with (
        connect(both.main, "ada") as ada,
        worker(both.main),
        hosted(both.main.home.home),
        tidings.connect("main", name="ada", home=both.main.home.home, via="host") as at_host,
    ):
        await passes(wanted=True)
        sent = await ada.dm("bob@acme", "it waits")
        await agree(both.acme, both.main, roster="on", direct="off")
        await passes(wanted=False)
        with pytest.raises(DeniedError, match="the link with acme passes no direct messages now"):
            await ada.dm("bob@acme", "not now")

        async def refused_there() -> bool:
            try:
                await at_host.dm("bob@acme", "not now")
            except DeniedError as error:
                return "passes no direct messages" in str(error)
            return False

        await eventually(refused_there, within=20, what="the host refuses it, too")
        found = await directory_status(both.main)
        assert found.words == ""
        assert found.mail is not None
        assert found.mail.waits == "the other space lets no direct messages pass now"
        if end == "expired":
            assert sent.id in await _lying(both.main)
            await both.main.stop_steward()
            await both.main.start_steward(replace(TEST_INTERVALS, mail=0.1, mail_ttl=0.1))
            assert (await ada.receipt(sent, "read", timeout=20)).stage == "expired"
            return
        await agree(both.acme, both.main, roster="on", direct="on")
        await passes(wanted=True)
        assert sent.id in await _lying(both.main)
        async with worker(both.acme), connect(both.acme, "bob") as bob:
            assert (await heard(bob)).text == "it waits"


async def test_who_was_known_is_not_nobody_after_a_start_or_in_a_pause_and_the_host_takes_what_is_written_to_it(
    both: LinkedSpaces,
) -> None:
    async with (
        connect(both.main, "ada") as ada,
        connect(both.acme, "bob") as bob,
        hosted(both.main.home.home),
        tidings.connect("main", name="ada", home=both.main.home.home, via="host") as at_host,
    ):
        async with worker(both.main):
            await knows(ada, "bob@acme")

            async def taken() -> bool:
                with suppress(PeerUnheard):
                    return bool(await at_host.dm("bob@acme", "one"))
                return False

            await eventually(taken, within=20, what="the host has seen who is there")
        await both.main.stop_steward()
        await both.main.start_steward()

        async def unheard(words: str) -> bool:
            try:
                await ada.transport.resolve("bob@acme")
            except PeerUnheard as error:
                return words in str(error)
            return False

        await eventually(lambda: unheard("is not known yet"), within=20)
        assert (await at_host.dm("bob@acme", "two", timeout=20)).stage == "confirmed"
        async with worker(both.main):
            await knows(ada, "bob@acme")
            await call_worker(both.main, PauseLinkRequest(link=LINK))
            await eventually(lambda: unheard("the link with acme is paused"), within=20)
            assert (await at_host.dm("bob@acme", "three", timeout=20)).stage == "confirmed"

            async def unheard_at_the_host() -> bool:
                try:
                    await at_host.dm("eve@acme", "nobody has told of her")
                except (PeerUnheard, UnknownPeer) as error:
                    return isinstance(error, PeerUnheard)
                return False

            await eventually(unheard_at_the_host, within=20)
            await call_worker(both.main, ResumeLinkRequest(link=LINK))
            async with worker(both.acme):
                assert [(await heard(bob)).text for _ in range(3)] == ["one", "two", "three"]
            await unlinked(both.main)

            async def nobody() -> bool:
                try:
                    await at_host.dm("bob@acme", "over")
                except UnknownPeer:
                    return True
                return False

            await eventually(nobody, within=20, what="the host forgets whoever is in no linked space")
