"""Links are agreed, changed and ended: what is refused, what survives an interruption, a restore and a new layout."""

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from linked_spaces import ELSEWHERE, LINK, linked, peer_of, unlinked
from tidings.admin.layout import lay_out
from tidings.admin.linking import Linker, terms_of
from tidings.admin.rotation import recall_voided
from tidings.cli.context import Context
from tidings.cli.link_words import summarise_links
from tidings.contract.admin import EndLinkRequest, SetLinkRequest
from tidings.errors import AuthRevoked, ConflictError, DeniedError, InvalidName, UsageError
from tidings.nats import jwt
from tidings.nats.client import connect
from tidings.steward import link_records
from tidings.supervisor import children
from tidings.supervisor.watcher import LINKED, MOST_LINKED, Watcher
from tidings.util import failpoints
from tidings.wire.message import new_id
from tidings.wire.rulings import Link
from tidings.wire.signing import ACCOUNT, KeyPair
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


def another() -> str:
    return KeyPair.generate(ACCOUNT).id


async def lets_in(space: RealSpace, creds: str) -> bool:
    try:
        async with peer_of(space, creds):
            return True
    except AuthRevoked:
        return False


def in_force(space: RealSpace, link: str = LINK) -> Link | None:
    assert space.steward is not None
    return space.steward.table.link_at(link, space.steward.space.position)


async def test_a_link_is_a_signed_record_that_says_all_that_was_agreed(space: RealSpace) -> None:
    steward, until = KeyPair.generate().id, int(time.time()) + 3600
    made = await linked(
        space,
        channels={"team.>": "acme.team.>"},
        shares=["general"],
        space="acme",
        steward=steward,
        beyond={(far := another()): {"x": "y"}},
        hops=3,
        until=until,
        direct="on",
    )
    record = in_force(space)
    assert record is not None
    assert (record.state, record.origin, record.space, record.steward) == ("on", ELSEWHERE, "acme", steward)
    assert (record.channels, record.beyond) == ({"team.>": "acme.team.>"}, {far: {"x": "y"}})
    assert (record.shares, record.hops, record.until) == (("general",), 3, until)
    assert (record.direct, record.roster, record.peer) == ("on", "off", made.row.peer)
    assert jwt.decode(made.row.token)["exp"] == until
    assert terms_of(made.row).channels == record.channels
    async with space.core() as js:
        stored = await js.last(space.subjects.log_stream, space.subjects.link(LINK))
    assert stored is not None
    assert stored.seq == made.row.seq


@pytest.mark.parametrize(
    ("terms", "error", "words"),
    [
        ({"channels": {"a.*": "b"}}, UsageError, "link maps channels"),
        ({"channels": {"a": "x", "b": "x"}}, UsageError, "one name here"),
        ({"shares": ["not a pattern"]}, UsageError, "not a link record"),
        ({"beyond": {ELSEWHERE: {"a": "a"}}}, UsageError, "said in `channels`"),
        ({"space": "main"}, UsageError, "is this space"),
        ({"hops": 9}, UsageError, "admin link_set: `hops`: expected int <= 8"),
        ({"until": 1}, UsageError, "ended already"),
        ({"make_peer": False}, UsageError, "shares something with nobody"),
    ],
)
async def test_what_cannot_be_agreed_is_refused_and_leaves_nothing(
    space: RealSpace, terms: dict[str, Any], error: type[Exception], words: str
) -> None:
    async with space.administer() as admin:
        fields: dict[str, Any] = {"origin": ELSEWHERE, "channels": {}, "shares": ["general"], **terms}
        peer = KeyPair.generate().id if fields.pop("make_peer", True) else None
        with pytest.raises(error, match=words):
            await admin.call(SetLinkRequest(link=LINK, peer=peer, **fields))
    assert in_force(space) is None


async def test_a_space_is_not_linked_with_itself_nor_a_link_called_like_a_user(space: RealSpace) -> None:
    with pytest.raises(UsageError, match="not linked with itself"):
        await linked(space, origin=space.info.id)
    with pytest.raises(UsageError, match="not linked with itself"):
        await linked(space, beyond={space.info.id: {"a": "a"}})
    with pytest.raises(InvalidName, match="not called like a user"):
        await linked(space, KeyPair.generate().id)
    async with space.administer() as admin:
        assert admin.links.rows() == [], "what was refused is not remembered"


async def test_a_link_keeps_its_space_and_a_space_its_link(space: RealSpace) -> None:
    first = await linked(space, space="acme")
    with pytest.raises(ConflictError, match="needs another name"):
        await linked(space, origin=another())
    with pytest.raises(ConflictError, match="already, abcdefghijkl"):
        await linked(space, "second")
    with pytest.raises(ConflictError, match="choose another name"):
        await linked(space, "second", origin=another(), space="acme")
    with pytest.raises(ConflictError, match="is the worker of link"):
        await linked(space, "second", origin=another(), make_peer=False, peer=first.row.peer)
    async with space.administer() as admin:
        row = admin.links.get(LINK)
    assert row is not None
    assert (row.origin, row.state) == (ELSEWHERE, "on"), "what was refused changed nothing"
    assert await lets_in(space, first.creds)
    await unlinked(space)
    with pytest.raises(ConflictError, match="on or off"):
        await linked(space, origin=another())
    await linked(space, "second", origin=ELSEWHERE)


async def test_a_space_has_so_many_links(space: RealSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_records, "MOST_LINKS", 2)
    await linked(space, "one", origin=another())
    await linked(space, "two", origin=another())
    with pytest.raises(ConflictError, match="at most 2 links"):
        await linked(space, "three", origin=another())
    await linked(space, "two", origin=(in_force(space, "two") or _none()).origin, shares=["other"])
    await unlinked(space, "one")
    await linked(space, "three", origin=another())


def _none() -> Link:
    raise AssertionError("there is no such link")


async def test_another_user_takes_the_place_of_the_first_which_is_cut(space: RealSpace) -> None:
    first = await linked(space)
    async with peer_of(space, first.creds) as peer:
        second = await linked(space)
        await eventually(lambda: peer.connection.is_closed, within=5)
    assert (await lets_in(space, first.creds), await lets_in(space, second.creds)) == (False, True)
    await space.restart_broker()
    assert (await lets_in(space, first.creds), await lets_in(space, second.creds)) == (False, True)


async def test_an_ended_link_can_be_agreed_on_again_with_the_same_user(space: RealSpace) -> None:
    made = await linked(space)
    await unlinked(space)
    assert in_force(space) is not None
    assert not await lets_in(space, made.creds)
    await unlinked(space)
    again = await linked(space, make_peer=False)
    assert again.row.peer == made.row.peer
    _, key = jwt.split_credentials(made.creds)
    assert not await lets_in(space, made.creds), "the old token stays void"
    async with peer_of(space, jwt.credentials(again.row.token, key)) as peer:
        await peer.page()


async def test_who_is_ended_stays_so_in_a_new_layout_and_in_a_folder_that_was_put_back(
    space: RealSpace, tmp_path: Path
) -> None:
    made = await linked(space)
    shutil.copytree(space.home.root, tmp_path / "copy")
    await unlinked(space)
    await space.stop_steward()
    space.broker.stop()
    async with space.administer() as admin:
        lay_out(space.home, admin.keyring)
    space.broker.start()
    assert not await lets_in(space, made.creds), "all accounts were derived anew"
    space.broker.stop()
    shutil.rmtree(space.home.root)
    shutil.copytree(tmp_path / "copy", space.home.root)
    await children.recall(space.home)
    space.broker.start()
    assert not await lets_in(space, made.creds), "the copy is from before"
    await space.start_steward()
    assert (in_force(space) or _none()).state == "on", "the log in the copy has it on"
    done = await children.agents(space.home)
    assert any("wrote the end of link" in each for each in done["done"])
    assert (in_force(space) or _none()).state == "off"


async def test_a_link_that_the_log_lost_is_written_again(space: RealSpace, tmp_path: Path) -> None:
    await space.stop_steward()
    space.broker.stop()
    shutil.copytree(space.home.store, tmp_path / "copy")
    space.broker.start()
    await space.start_steward()
    made = await linked(space)
    await space.stop_steward()
    space.broker.stop()
    shutil.rmtree(space.home.store)
    shutil.copytree(tmp_path / "copy", space.home.store)
    space.broker.start()
    await space.start_steward()
    assert in_force(space) is None
    async with peer_of(space, made.creds) as peer:
        with pytest.raises(DeniedError, match="no link of space main is with you"):
            await peer.page()
        assert any("wrote link" in each for each in (await children.agents(space.home))["done"])
        await peer.page()
    assert not any("link" in each for each in (await children.agents(space.home))["done"]), "once"


@pytest.mark.parametrize("at", ["link.after_ledger", "link.after_record"])
async def test_a_change_that_was_interrupted_is_finished_by_the_next(
    space: RealSpace, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_at(at, monkeypatch)
    with pytest.raises(Interrupted):
        await linked(space)
    monkeypatch.undo()
    async with space.administer() as admin:
        assert await Linker(admin).finish() == [f"completed an interrupted change of link {LINK}"]
        assert [row.state for row in admin.links.rows()] == ["on"]
    assert (in_force(space) or _none()).state == "on"


@pytest.mark.parametrize("at", ["unlink.after_ledger", "unlink.after_push"])
async def test_an_end_that_was_interrupted_is_finished_by_the_next(
    space: RealSpace, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await linked(space)
    _break_at(at, monkeypatch)
    with pytest.raises(Interrupted):
        await unlinked(space)
    monkeypatch.undo()
    async with space.administer() as admin:
        assert await Linker(admin).finish() == [f"finished the end of link {LINK}"]
    assert not await lets_in(space, made.creds)
    assert (in_force(space) or _none()).state == "off"


async def test_who_is_ended_while_the_steward_is_away_is_cut_at_once_and_the_record_follows(space: RealSpace) -> None:
    made = await linked(space)
    await space.stop_steward()
    await unlinked(space)
    assert not await lets_in(space, made.creds)
    await space.start_steward()
    assert (in_force(space) or _none()).state == "on"
    await children.agents(space.home)
    assert (in_force(space) or _none()).state == "off"


class Interrupted(BaseException):
    pass


def _break_at(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def reach(name: str) -> None:
        if name == place:
            raise Interrupted

    monkeypatch.setattr(failpoints, "reach", reach)


# --- bounds ---


async def test_a_worker_of_a_link_has_few_connections(space: RealSpace) -> None:
    made = await linked(space)

    async def note(_breach: Any) -> None:
        return None

    watching = asyncio.create_task(Watcher(space.home, cut=note, who=LINKED).keep())
    _, key = jwt.split_credentials(made.creds)
    held = []
    try:
        held += [await connect(space.info.url, made.creds, key.id, name="idle", reconnect=False) for _ in range(12)]
        await eventually(lambda: sum(each.is_connected for each in held) <= MOST_LINKED, within=20)
    finally:
        watching.cancel()
        await asyncio.gather(watching, *(each.close() for each in held), return_exceptions=True)


async def test_a_worker_that_floods_loses_its_link(space: RealSpace) -> None:
    made = await linked(space)
    done = await children.bar(space.home, made.row.peer, "since now: it floods")
    assert done["note"] == "the link was ended"
    assert not await lets_in(space, made.creds)
    assert (in_force(space) or _none()).state == "off"
    async with space.administer() as admin:
        assert [row.why for row in admin.links.rows()] == ["since now: it floods"]


async def test_a_void_credential_of_the_worker_in_a_copy_is_made_anew(space: RealSpace) -> None:
    before = space.home.link_creds.read_text()
    await space.stop_steward()
    space.broker.stop()
    async with space.administer() as admin:
        lay_out(space.home, admin.keyring)
        after = space.home.link_creds.read_text()
        space.home.link_creds.write_text(before)
        assert any("worker of links" in each for each in await recall_voided(admin))
    space.broker.start()
    assert space.home.link_creds.read_text() not in (before, after)
    assert not await lets_in(space, before)
    assert await lets_in(space, space.home.link_creds.read_text())


async def test_a_link_that_was_made_anew_survives_a_log_in_which_its_forerunner_is_still_on(space: RealSpace) -> None:
    """A backup from before the change is put back: the ledger outside of it knows better, and the space starts."""
    await linked(space, "zzzzzzzzzzzz")
    await unlinked(space, "zzzzzzzzzzzz")
    await linked(space, "aaaaaaaaaaaa")
    async with space.administer() as admin:
        before = admin.links.get("zzzzzzzzzzzz")
        assert before is not None
        # the log as the backup has it
        await admin.call(EndLinkRequest("aaaaaaaaaaaa"), op=new_id())
        again = SetLinkRequest(link="zzzzzzzzzzzz", origin=ELSEWHERE, peer=before.peer, **before.terms)
        await admin.call(again, op=new_id())
        done = await Linker(admin).reconcile()
    assert [words.split(":")[0] for words in done] == [
        "wrote the end of link zzzzzzzzzzzz again",
        "wrote link aaaaaaaaaaaa again",
    ]
    old, new = in_force(space, "zzzzzzzzzzzz"), in_force(space, "aaaaaaaaaaaa")
    assert old is not None
    assert new is not None
    assert (old.state, new.state) == ("off", "on")


async def test_a_link_that_cannot_be_as_it_was_keeps_nothing_else_from_starting(space: RealSpace) -> None:
    await linked(space, "aaaaaaaaaaaa", space="acme")
    await linked(space, "bbbbbbbbbbbb", origin=another())
    async with space.administer() as admin:
        for link in ("aaaaaaaaaaaa", "bbbbbbbbbbbb"):
            await admin.call(EndLinkRequest(link), op=new_id())
        # the log has another one under its name, of which the ledger knows nothing
        await admin.call(
            SetLinkRequest(link="cccccccccccc", origin=another(), space="acme", channels={"a": "b"}), op=new_id()
        )
        done = await Linker(admin).reconcile()
        assert await Linker(admin).reconcile() == done[:1], "it is tried again at each start, and said"
    assert "lets nothing pass" in done[0]
    assert "acme is what the space of link cccccccccccc is called" in done[0]
    found = in_force(space, "bbbbbbbbbbbb")
    assert found is not None
    assert found.state == "on"


async def test_a_link_that_nobody_ended_and_one_that_leads_nowhere_are_problems_of_the_space(space: RealSpace) -> None:
    async def problems() -> list[str]:
        where = Context(space=space.home.name, home_dir=str(space.home.home))
        return list((await asyncio.to_thread(summarise_links, where, False))["problems"])

    await linked(space, channels={"general": "acme"}, space="acme")
    (waiting,) = await problems()
    assert "nothing comes from acme: how it is reached is not known here" in waiting
    async with space.administer() as admin:
        await Linker(admin).end(LINK, "its worker opened 200 connections")
        (ended,) = await problems()
        assert "the link with acme was ended: its worker opened 200 connections" in ended
        await Linker(admin).end(LINK)
    assert await problems() == [], "its owner has seen it"
    await linked(space, "another", space="acme")
    await unlinked(space, "another")
    assert await problems() == [], "what its owner ends is none"
