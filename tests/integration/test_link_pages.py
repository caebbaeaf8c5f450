"""Pages of a link on a real broker: what is shared and nothing else, from where the asker is, and why not if not."""

import asyncio
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from linked_spaces import ELSEWHERE, LINK, is_signed, linked, peer_of, say, text_of, texts, unlinked, worker_of
from tidings.admin.linking import Linker
from tidings.contract.admin import ChangeSpaceRequest, EndLinkRequest, PartsChange
from tidings.contract.core import Request
from tidings.contract.links import (
    ImportLinksRequest,
    LinkDigestRequest,
    LinkFetchRequest,
    LinkHelloRequest,
    LinkPageRequest,
    PeerProgress,
)
from tidings.errors import AuthRevoked, ConflictError, DeniedError, UnreachableError, UsageError
from tidings.nats.errors import NatsError
from tidings.steward import link_floors, link_handlers
from tidings.wire.links import GapKind, LinkPage, Token
from tidings.wire.message import MAX_PAYLOAD
from tidings.wire.signing import KeyPair
from tidings_testing.raw_requests import raw_call
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually


def serving(space: RealSpace) -> Any:
    assert space.steward is not None
    return space.steward


async def test_a_page_has_what_is_shared_as_its_sender_signed_it_and_nothing_else(space: RealSpace) -> None:
    made = await linked(space, shares=["general", "team.>"])
    await space.add("ada", post=[">"])
    async with space.agent("ada") as ada, peer_of(space, made.creds) as peer:
        await say(ada, "secret", "not for them")
        seqs = await say(ada, "general", "one") + await say(ada, "team.a", "two")
        await say(ada, "team", "the pattern does not cover it")
        page = await peer.page()
    assert texts([page]) == ["one", "two"]
    assert [record.seq for record in page.records] == seqs
    assert [(record.origin, record.channel, record.hops) for record in page.records] == [
        (space.info.id, "general", 1),
        (space.info.id, "team.a", 1),
    ]
    assert all(is_signed(record) for record in page.records)
    assert (page.gap, page.more, page.through.seq) == (None, False, page.head)


async def test_hello_says_what_the_space_is_and_what_it_shares(space: RealSpace) -> None:
    until = int(time.time()) + 3600
    made = await linked(space, shares=["general"], until=until, hops=2, roster="on")
    async with peer_of(space, made.creds) as peer:
        said = await peer.control.call(LinkHelloRequest())
    assert (said.space, said.name, said.steward) == (space.info.id, "main", space.info.steward_key)
    assert (said.link, said.shares, said.until, said.hops) == (LINK, ("general",), until, 2)
    assert (said.direct, said.roster) == ("off", "on")
    assert said.jwt == made.row.token
    assert said.epoch == serving(space).marks.file.epoch
    assert said.head >= made.row.seq


async def test_what_waits_for_a_linked_space_is_found_behind_much_that_is_not_shared(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_floors, "LOOKED_AT", 5)
    monkeypatch.setattr(link_floors, "MOST_LOOKED_AT", 10)
    await linked(space, shares=["general"])
    await space.add("ada")
    async with space.agent("ada") as ada, worker_of(space) as worker:
        for number in range(27):
            await ada.post("general", b"no message %d" % number)

        async def push() -> PeerProgress:
            progress = (await worker.call(ImportLinksRequest())).links[0].push
            assert progress is not None
            return progress

        await say(ada, "general", "hello")
        asked = [await push() for _ in range(4)]
    assert [each.waiting_since is not None for each in asked] == [False, False, True, True]
    assert asked[-1].lag_records >= 28


async def test_pages_are_bounded_and_go_on_where_they_ended(space: RealSpace) -> None:
    made = await linked(space)
    await space.add("ada", post=["general", "secret"])
    async with space.agent("ada") as ada, peer_of(space, made.creds) as peer:
        for number in range(60):
            await say(ada, "secret", "x")
            await say(ada, "general", str(number))
        pages = await peer.all_of(limit=7)
        assert texts(pages) == [str(number) for number in range(60)]
        assert max(len(page.records) for page in pages) == 7
        assert [page.through.seq for page in pages] == sorted({page.through.seq for page in pages}), "it moves"
        token = pages[-1].through
        assert (await peer.page(token)).records == ()
        await say(ada, "secret", "nothing for them, and yet the log went on")
        after = await peer.page(token)
        assert (after.records, after.through.seq) == ((), token.seq + 1)


async def test_a_page_has_payloads_of_256_kib_or_one_record(space: RealSpace) -> None:
    made = await linked(space)
    await space.add("ada")
    large = "x" * (MAX_PAYLOAD - 600)
    async with space.agent("ada") as ada, peer_of(space, made.creds) as peer:
        await say(ada, "general", large, "small", large, large, *["y" * 50_000] * 9)
        pages = await peer.all_of()
    sizes = [sum(len(record.payload) for record in page.records) for page in pages]
    assert [len(text) for text in texts(pages)] == [len(large), 5, len(large), len(large), *[50_000] * 9]
    assert all(
        size <= link_handlers.PAGE_BYTES or len(page.records) == 1 for size, page in zip(sizes, pages, strict=True)
    )
    assert max(len(page.records) for page in pages) > 1


async def test_what_does_not_count_here_goes_nowhere(space: RealSpace) -> None:
    made = await linked(space, shares=[">"])
    await space.add("ada", read=[">"], post=[">"], manage=[">"])
    s = space.subjects
    async with space.agent("ada") as ada, peer_of(space, made.creds) as peer, space.core() as js:
        await say(ada, "general", "good")
        await ada.post("general", b"no message at all")
        await ada.post("general", b'{"id":1}')
        await ada.post("general", text_of(ada, "bad header"), Nats_TTL_x="1")
        stranger = KeyPair.generate()
        await js.publish(s.chat(stranger.id, "general"), text_of(ada, "who?"), {"Td-Sig": "x"})
        await js.publish(s.chat(ada.id, "general"), text_of(ada, "unsigned"))
        await js.publish(s.via("nolink", ada.id, "general"), text_of(ada, "x"), {"Td-Sig": "x"})
        async with space.administer() as admin:
            await admin.set_access("ada", replace(admin.read_file("ada"), post=("other",)))
        await js.publish(s.chat(ada.id, "general"), text_of(ada, "narrowed"), {"Td-Sig": "x"})
        pages = await peer.all_of()
    assert texts(pages) == ["good"]


async def test_single_records_are_fetched_if_they_are_shared_and_there(space: RealSpace) -> None:
    made = await linked(space)
    await space.add("ada", post=["general", "secret"])
    async with space.agent("ada") as ada, peer_of(space, made.creds) as peer, space.core() as js:
        seqs = await say(ada, "general", "a", "b", "c")
        hidden = await say(ada, "secret", "x")
        await js.api(f"STREAM.MSG.DELETE.{space.subjects.log_stream}", {"seq": seqs[1]})
        wanted = [*seqs, *hidden, 1, 10_000_000]
        said = await peer.control.call(LinkFetchRequest(tuple(wanted)))
        assert [row.seq for row in said.records] == [seqs[0], seqs[2]]
        assert sorted(said.missing) == sorted([seqs[1], *hidden, 1, 10_000_000])
        with pytest.raises(UsageError, match="link fetch: `seqs`: expected array of length <= 256"):
            await peer.control.call(LinkFetchRequest(tuple(range(1, 400))))
        with pytest.raises(UsageError, match=r"link fetch: `seqs\[0\]`: expected int, got str"):
            await raw_call(peer.control, "link", "fetch", seqs=["1"])


# --- an authority that ends ---


async def test_a_link_that_was_ended_in_the_middle_of_paging_shows_nothing_more_and_is_cut(space: RealSpace) -> None:
    made = await linked(space)
    await space.add("ada")
    async with space.agent("ada") as ada, peer_of(space, made.creds) as peer:
        await say(ada, "general", *"abcdef")
        first = await peer.page(limit=2)
        assert texts([first]) == ["a", "b"]
        begun = time.monotonic()
        await unlinked(space)
        await eventually(lambda: peer.connection.is_closed, within=5, what="its connection is cut")
        assert time.monotonic() - begun < 5
        with pytest.raises((UnreachableError, NatsError)):
            await peer.page(first.through)
    with pytest.raises(AuthRevoked):
        async with peer_of(space, made.creds):
            pass


async def test_a_link_that_is_off_is_denied_in_words_whoever_is_still_connected(space: RealSpace) -> None:
    """The record alone decides: the cut at the broker is a second wall."""
    made = await linked(space)
    async with peer_of(space, made.creds) as peer:
        await peer.page()
        async with space.administer() as admin:
            await admin.call(EndLinkRequest(LINK))
        asked: list[Request[Any]] = [LinkHelloRequest(), LinkPageRequest(), LinkFetchRequest(), LinkDigestRequest(1)]
        for request in asked:
            with pytest.raises(DeniedError, match="was ended by the owner of space main"):
                await peer.control.call(request)


async def test_a_link_past_its_end_is_denied_in_words(space: RealSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await linked(space, until=int(time.time()) + 3600)
    async with peer_of(space, made.creds) as peer:
        await peer.page()
        real = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: real() + 3_601 * 10**9)
        with pytest.raises(DeniedError, match="ended when it was agreed to"):
            await peer.page()


async def test_the_broker_closes_who_stays_past_the_end(space: RealSpace) -> None:
    for lasts in (2, 4, 8, 16):
        made = await linked(space, f"ends-{lasts}", until=int(time.time()) + lasts)
        with suppress(AuthRevoked):  # it ended before we were in: one that lasts longer, then
            async with peer_of(space, made.creds) as peer:
                await eventually(lambda: peer.connection.is_closed, within=10 + lasts)
                return
    raise AssertionError("nobody came in before the end")


async def test_what_is_no_longer_shared_is_not_in_the_next_page(space: RealSpace) -> None:
    made = await linked(space, shares=["general", "team"])
    await space.add("ada", post=["general", "team"])
    async with space.agent("ada") as ada, peer_of(space, made.creds) as peer:
        await say(ada, "general", "a")
        seqs = await say(ada, "team", "b", "c")
        first = await peer.page(limit=2)
        await linked(space, shares=["general"], make_peer=False)
        assert texts([first, await peer.page(first.through)]) == ["a", "b"]
        said = await peer.control.call(LinkFetchRequest(tuple(seqs)))
        assert (said.records, said.missing) == ((), tuple(seqs))


@pytest.mark.parametrize("do", ["page", "fetch", "digest"])
async def test_what_is_narrowed_or_ended_while_the_log_is_read_is_not_shown(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch, do: str
) -> None:
    made = await linked(space, shares=["general", "team"])
    await space.add("ada", post=["general", "team"])
    async with space.agent("ada") as ada, peer_of(space, made.creds) as peer:
        seqs = await say(ada, "general", "a") + await say(ada, "team", "b")
        handlers, control = serving(space).linked, peer.control
        control.timeout = 20.0
        asked: dict[str, Request[Any]] = {
            "page": LinkPageRequest(space=space.info.id),
            "fetch": LinkFetchRequest(tuple(seqs)),
            "digest": LinkDigestRequest(seqs[1]),
        }

        async def narrowed() -> None:
            await linked(space, shares=["general"], make_peer=False)

        monkeypatch.setattr(handlers, "_settled", narrowed)
        said = await control.call(asked[do])
        if do == "digest":
            assert list(said.channels) == ["general"]
        else:
            assert [row.seq for row in said.records] == seqs[:1]

        async def ended() -> None:
            async with space.administer() as admin:
                await admin.call(EndLinkRequest(LINK))

        monkeypatch.setattr(handlers, "_settled", ended)
        with pytest.raises(DeniedError, match="was ended by the owner"):
            await control.call(asked[do])


async def test_one_page_of_a_link_is_under_way_at_a_time(space: RealSpace) -> None:
    made = await linked(space)
    async with peer_of(space, made.creds) as peer:
        async with serving(space).writer.lock:  # holds a page up where it waits for rulings
            waiting = asyncio.create_task(peer.page())
            await eventually(lambda: serving(space).linked.turns._under_way.total() == 1)
            with pytest.raises(ConflictError, match="under way already"):
                await peer.page()
        assert (await waiting).gap is None


# --- gaps ---


async def begun(space: RealSpace, *texts_said: str) -> tuple[Any, LinkPage]:
    """A link whose other end has handled what was said; answers its credential, and the last page."""
    made = await linked(space)
    await space.add("ada")
    async with space.agent("ada") as ada, peer_of(space, made.creds) as peer:
        await say(ada, "general", *(texts_said or ("a", "b", "c")))
        return made, (await peer.all_of())[-1]


async def gap_of(space: RealSpace, creds: str, token: Token) -> Any:
    async with peer_of(space, creds) as peer:
        page = await peer.page(token)
    assert page.records == ()
    assert page.through == token, "it does not move"
    return page.gap


def changed(token: Token, **fields: Any) -> Token:
    return Token(**{"space": token.space, "epoch": token.epoch, "seq": token.seq, "mark": token.mark, **fields})


async def test_a_token_of_another_space_of_an_unknown_epoch_or_beyond_the_end_is_a_gap(space: RealSpace) -> None:
    made, page = await begun(space)
    token = page.through
    stream = await gap_of(space, made.creds, changed(token, space=ELSEWHERE))
    assert (stream.kind, stream.epoch, stream.head) == (GapKind.STREAM, token.epoch, page.head)
    epoch = await gap_of(space, made.creds, changed(token, epoch="another"))
    assert (epoch.kind, epoch.agreed) == (GapKind.EPOCH, 0)
    new = await gap_of(space, made.creds, changed(token, seq=page.head + 100, mark=""))
    assert (new.kind, new.head) == (GapKind.TOO_NEW, page.head)
    record = await gap_of(space, made.creds, changed(token, mark="0" * 20))
    assert record.kind == GapKind.RECORD
    assert await gap_of_none(space, made.creds, token)


async def gap_of_none(space: RealSpace, creds: str, token: Token) -> bool:
    async with peer_of(space, creds) as peer:
        return (await peer.page(token)).gap is None


async def test_what_retention_removed_after_the_token_is_too_old(space: RealSpace) -> None:
    made, page = await begun(space)
    steward = serving(space)
    async with space.agent("ada") as ada:
        await say(ada, "general", *"defgh")
    steward.retention.link_age = 0  # it holds nothing for longer
    async with space.administer() as admin:
        await admin.call(ChangeSpaceRequest(parts=PartsChange(deliver="off", archive="off"), keep_age=0))
    await eventually(lambda: steward.table.floor > page.through.seq + 1, what="the floor passed the token")
    gap = await gap_of(space, made.creds, page.through)
    assert (gap.kind, gap.agreed) == (GapKind.TOO_OLD, page.through.seq)
    async with peer_of(space, made.creds) as peer:
        again = await peer.page(Token(space=space.info.id, epoch=gap.epoch, seq=gap.oldest))
        assert again.gap is None, "from the oldest it can go on"


async def test_a_link_holds_what_it_has_not_handled_and_no_longer_when_it_ends(space: RealSpace) -> None:
    made, page = await begun(space)
    steward = serving(space)
    async with space.agent("ada") as ada:
        await say(ada, "general", *"defgh")
    async with space.administer() as admin:
        await admin.call(ChangeSpaceRequest(parts=PartsChange(deliver="off", archive="off"), keep_age=0))
    await eventually(lambda: steward.retention.last is not None and steward.retention.last.held_by == f"link.{LINK}")
    async with peer_of(space, made.creds) as peer:
        assert texts(await peer.all_of(page.through)) == list("defgh"), "kept for it"
        await peer.page((await peer.all_of(page.through))[-1].through)
    await eventually(lambda: steward.table.floor > page.through.seq + 5, what="what it handled may go")

    async def written() -> bool:
        found = await steward.state.get(f"floor.link.{LINK}")
        return found is not None and found.value["seq"] > page.through.seq

    await eventually(written, what="it is written down, after what is in memory was acted on")
    await unlinked(space)

    async def ended() -> bool:
        found = await steward.state.get(f"floor.link.{LINK}")
        return bool(found and found.value.get("ended"))

    await eventually(ended)
    assert LINK not in steward.link_floors._said
    await eventually(lambda: f"link.{LINK}" not in steward.retention.last.parts)


async def test_who_asks_for_a_page_before_it_has_handled_the_one_before_says_so_and_that_is_held(
    space: RealSpace,
) -> None:
    made, page = await begun(space)
    floors, token = serving(space).link_floors, page.through
    async with peer_of(space, made.creds) as peer:
        for handled, needed in ((token.seq - 2, token.seq - 1), (token.seq + 9, token.seq + 1), (None, token.seq + 1)):
            assert (await peer.page(token, **({} if handled is None else {"handled": handled}))).gap is None
            assert floors._said[LINK] == needed


async def test_a_link_that_holds_too_much_is_passed_over(space: RealSpace) -> None:
    _, page = await begun(space)
    steward = serving(space)
    steward.retention.link_share = -0.6  # what it may hold beyond the limit of 0.6: nothing at all
    async with space.agent("ada") as ada:
        await say(ada, "general", *"defgh")
    async with space.administer() as admin:
        await admin.call(ChangeSpaceRequest(parts=PartsChange(deliver="off", archive="off"), keep_age=0))
    await eventually(lambda: steward.table.floor > page.through.seq + 1, what="the floor passed the token")


async def test_a_purge_by_hand_past_the_token_is_too_old(space: RealSpace) -> None:
    made, page = await begun(space)
    # all are connected before: the steward, whose lease goes with it, soon ends
    async with space.core() as js, space.agent("ada") as ada, peer_of(space, made.creds) as peer:
        await js.purge(space.subjects.log_stream, subject_filter=">", below=page.head + 1)
        await say(ada, "general", "d")
        gap = (await peer.page(changed(page.through, seq=2, mark=""))).gap
    assert gap is not None
    assert (gap.kind, gap.oldest) == (GapKind.TOO_OLD, page.head)
    await stop_quietly(space)


async def test_a_log_that_was_deleted_and_made_anew_under_its_name_is_another_epoch(space: RealSpace) -> None:
    made, page = await begun(space)
    await mark_head(space)
    async with space.core() as js:
        await js.api(f"STREAM.DELETE.{space.subjects.log_stream}")
    await stop_quietly(space)
    async with space.administer() as admin:
        await admin.provision()
    await space.start_steward()
    await relinked(space)
    gap = await gap_of(space, made.creds, page.through)
    assert (gap.kind, gap.agreed) == (GapKind.EPOCH, 0)
    assert gap.epoch != page.through.epoch


async def stop_quietly(space: RealSpace) -> None:
    with suppress(Exception):  # the log went away under it
        await space.stop_steward()


async def relinked(space: RealSpace) -> None:
    """What a start does: links that the log lost are written again."""
    async with space.administer() as admin:
        await admin.reconcile()
        await Linker(admin).reconcile()


async def mark_head(space: RealSpace) -> int:
    async with space.core() as js:
        head = int((await js.info("LOG_main"))["state"]["last_seq"])
    await eventually(lambda: serving(space).marks.file.marks[-1].seq >= head, what=f"a mark at {head}")
    return head


async def test_a_log_restored_to_an_older_point_is_another_epoch_and_says_how_far_it_agrees(
    space: RealSpace, tmp_path: Any
) -> None:
    made, old = await begun(space)
    await space.stop_steward()
    space.broker.stop()
    shutil.copytree(space.home.store, tmp_path / "copy")
    space.broker.start()
    await space.start_steward()
    async with space.agent("ada") as ada, peer_of(space, made.creds) as peer:
        await say(ada, "general", *"defgh")
        page = (await peer.all_of())[-1]
    await mark_head(space)
    await space.stop_steward()
    space.broker.stop()
    shutil.rmtree(space.home.store)
    shutil.copytree(tmp_path / "copy", space.home.store)
    space.broker.start()
    await space.start_steward()
    async with space.agent("ada") as ada:
        await say(ada, "general", *"DEFGHIJKLMNOP")  # sequences are used again
    gap = await gap_of(space, made.creds, page.through)
    assert gap.kind == GapKind.EPOCH
    assert gap.epoch != page.through.epoch
    assert gap.agreed >= old.through.seq - 1
    async with peer_of(space, made.creds) as peer:
        pages = await peer.all_of(
            Token(space=space.info.id, epoch=gap.epoch, seq=old.through.seq, mark=old.through.mark)
        )
    assert texts(pages) == list("DEFGHIJKLMNOP")


async def test_reused_sequences_that_the_steward_did_not_notice_are_another_record(space: RealSpace) -> None:
    """A steward whose memory was put back too, or that slept through it: the mark of the token tells."""
    made, page = await begun(space)
    async with space.core() as js, space.agent("ada") as ada:
        stream = space.subjects.log_stream
        seqs = await say(ada, "general", "last")
        async with peer_of(space, made.creds) as peer:
            token = (await peer.all_of(page.through))[-1].through
        assert token.seq == seqs[0]
        assert await gap_of_none(space, made.creds, token)
        await js.api(f"STREAM.MSG.DELETE.{stream}", {"seq": seqs[0]})
        assert await gap_of_none(space, made.creds, token), "a record that is gone proves nothing"
    gap = await gap_of(space, made.creds, changed(token, seq=page.through.seq, mark=token.mark))
    assert gap.kind == GapKind.RECORD


@pytest.mark.slow  # three brokers
@pytest.mark.timeout(300)
async def test_of_a_log_with_replicas_a_token_is_beyond_the_end_only_if_that_stays_so(tmp_path: Any) -> None:
    async with real_space(tmp_path / "home", nodes=3) as space:
        made = await linked(space)
        await space.add("ada")
        async with space.agent("ada") as ada, peer_of(space, made.creds) as peer:
            peer.control.timeout = 30.0
            await say(ada, "general", *"abc")
            page = (await peer.all_of(limit=2))[-1]
            assert (page.gap, page.through.seq) == (None, page.head)
            beyond = changed(page.through, seq=page.head + 50, mark="")
            for _ in range(link_handlers.LAGS_BELIEVED - 1):
                with pytest.raises(UnreachableError, match="lags"):
                    await peer.page(beyond)
            gap = (await peer.page(beyond)).gap
            assert gap is not None
            assert gap.kind == GapKind.TOO_NEW
            await say(ada, "general", "d")
            assert texts(await peer.all_of(page.through)) == ["d"]
