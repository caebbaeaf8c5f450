"""Which links a worker carries, and what it does when that changes; both spaces are made up."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import pytest

from tidings.admin.home import SpaceHome, SpaceInfo
from tidings.admin.link_peers import LinkPeers, PeerAccess
from tidings.admin.link_registry import AgreedLink, LinkLedger
from tidings.contract.core import Request
from tidings.contract.link_worker import (
    FollowLinkRequest,
    LinkNotRunning,
    LinkReported,
    ListLinksRequest,
    PauseLinkRequest,
    ShowQuarantinedRequest,
    StatusChanged,
)
from tidings.errors import BrokerUnreachable, ConflictError, StewardUnreachable, StoreBusy, TidingsError, UsageError
from tidings.links import link_store, running_link
from tidings.links import worker as worker_module
from tidings.links.destination import LinkInForce, LocalLinks
from tidings.links.operations import alone
from tidings.links.ports import AdmittedAt, Fetched, IndexPage, LinkAdmission, LocalFacts, PeerFacts, Prepare
from tidings.links.running_link import half_is_over
from tidings.links.store_file import LedgerDatabase, open_store
from tidings.links.worker import LinkWorker
from tidings.nats import jwt
from tidings.rpc.local_socket import call, follow
from tidings.wire.digests import BucketsAnswer, DigestAnswer, IdsAnswer
from tidings.wire.links import LinkPage, Token
from tidings.wire.rulings import Link
from tidings.wire.signing import ACCOUNT, KeyPair
from tidings.wire.subjects import Subjects
from tidings_testing.waiting import eventually

A = TypeVar("A")

HERE, EAST, WEST = (KeyPair.generate(ACCOUNT).id for _ in range(3))


class EmptyLog:
    """A space that shares nothing yet."""

    def __init__(self, access: PeerAccess, on_wake: Callable[[], None]) -> None:
        self.access, self.on_wake = access, on_wake
        self.closed, self.pages, self.hellos = False, 0, 0
        self.stuck: asyncio.Event | None = None

    async def hello(self) -> PeerFacts:
        self.hellos += 1
        return PeerFacts(space=self.access.id, epoch="e1", head=0, floor=0, shares=(), hops=1)

    async def page(self, token: Token, limit: int) -> LinkPage:
        del limit
        self.pages += 1
        if self.stuck is not None:
            await self.stuck.wait()
        return LinkPage(records=(), through=token, head=0, floor=0)

    async def fetch(self, seqs: Sequence[int]) -> Fetched:
        return Fetched(epoch="e1", records=(), missing=tuple(seqs))

    async def digest(self, through: int) -> DigestAnswer:
        return DigestAnswer(0, through, {})

    async def buckets(self, channel: str, day: str, through: int) -> BucketsAnswer:
        raise AssertionError((channel, day, through))

    async def ids(self, channel: str, day: str, buckets: Sequence[int], through: int, after: int) -> IdsAnswer:
        raise AssertionError((channel, day, buckets, through, after))

    subjects = Subjects("elsewhere")

    async def ask(self, request: Request[A]) -> A:
        raise AssertionError(request)

    async def close(self) -> None:
        self.closed = True


class NoPost:
    """No link of these tests passes mail or tasks, or says who is there."""

    async def ask(self, request: Request[A]) -> A:
        raise AssertionError(request)

    async def put_mail(self, to: str, sender: str, payload: bytes, headers: Mapping[str, str]) -> None:
        raise AssertionError((to, sender, payload, headers))

    async def put_task(self, role: str, sender: str, payload: bytes, headers: Mapping[str, str]) -> int:
        raise AssertionError((role, sender, payload, headers))


class EmptyHere:
    async def facts(self) -> LocalFacts:
        return LocalFacts(space=HERE, epoch="h1", head=0)

    async def index(self, after: int) -> IndexPage:
        return IndexPage(epoch="h1", rows=(), through=after)

    async def unlisted(self, channels: Collection[str]) -> Collection[str]:
        del channels
        return ()

    async def admit(self, batch: Sequence[LinkAdmission], epoch: str) -> Sequence[AdmittedAt | TidingsError]:
        assert epoch == "h1"
        return [AdmittedAt(number) for number, _ in enumerate(batch, 1)]


class MadeUpSpaces(NoPost):
    """What the steward says is in `records`; `fails` is what it raises instead."""

    def __init__(self) -> None:
        self.records: dict[str, Link] = {}
        self.fails: TidingsError | None = None
        self.asked = 0
        self.sources: list[EmptyLog] = []
        self.closed = False

    async def links(self) -> LocalLinks:
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        rows = tuple(LinkInForce(record) for record in self.records.values())
        return LocalLinks(LocalFacts(space=HERE, epoch="h1", head=0), rows)

    def source(self, access: PeerAccess, creds: Path, on_wake: Callable[[], None], prepare: Prepare) -> EmptyLog:
        assert creds.exists()
        del prepare
        self.sources.append(EmptyLog(access, on_wake))
        return self.sources[-1]

    def destination(self, link: str) -> EmptyHere:
        del link
        return EmptyHere()

    @property
    def here(self) -> Self:
        return self

    async def close(self) -> None:
        self.closed = True


def agreed(link: str, origin: str, **fields: Any) -> Link:
    given = {"channels": {"general": f"{link}-general"}, "space": link, **fields}
    return Link(**{"op": "1", "link": link, "state": "on", "origin": origin, **given})


@pytest.fixture
def home(tmp_path: Path) -> SpaceHome:
    made = SpaceHome(tmp_path, "main")
    made.make()
    made.write_info(SpaceInfo("main", HERE, "", "", "", 4222, 1, "", False, ""))
    peers = LinkPeers.below(made)
    for link, origin in (("east", EAST), ("west", WEST)):
        access = PeerAccess(link=link, space=link, id=origin, steward="", url="nats://127.0.0.1:1")
        peers.put(access, jwt.credentials("a.b.c", KeyPair.generate()))
    return made


@pytest.fixture
def spaces() -> MadeUpSpaces:
    found = MadeUpSpaces()
    found.records = {"east": agreed("east", EAST), "west": agreed("west", WEST)}
    return found


@asynccontextmanager
async def running(home: SpaceHome, spaces: MadeUpSpaces, **options: Any) -> AsyncIterator[LinkWorker]:
    worker = LinkWorker(home, spaces, look_every=0.02, **options)
    task = asyncio.create_task(worker.run())
    await worker.ready.wait()
    try:
        yield worker
    finally:
        worker.stop()
        await asyncio.wait_for(task, 20)


def of(spaces: MadeUpSpaces, link: str) -> list[EmptyLog]:
    return [each for each in spaces.sources if each.access.link == link]


async def states(home: SpaceHome) -> dict[str, str]:
    """What followers of each link hear first."""
    found = {}
    for link in ("east", "west"):
        events = follow(home.link_socket, FollowLinkRequest(link))
        first = await anext(events)
        live = first.live if isinstance(first, LinkReported) else None
        found[link] = live.status if live is not None else first.name
        await events.aclose()
    return found


async def test_every_link_that_takes_something_in_is_carried_and_all_are_let_go_at_the_end(
    home: SpaceHome, spaces: MadeUpSpaces
) -> None:
    spaces.records["quiet"] = agreed("quiet", KeyPair.generate(ACCOUNT).id, channels={})
    async with running(home, spaces):
        await eventually(lambda: [each.pages > 0 for each in spaces.sources] == [True, True])
        await eventually(lambda: len(spaces.sources) == 2)
        assert await states(home) == {"east": "live", "west": "live"}
    assert [each.closed for each in spaces.sources] == [True, True]
    assert spaces.closed


async def test_a_worker_that_starts_waits_for_a_command_that_holds_the_ledger(
    home: SpaceHome, spaces: MadeUpSpaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tidings link list` opens the ledger itself while no worker runs."""
    tries: list[SpaceHome] = []

    def counted(place: SpaceHome) -> LedgerDatabase:
        tries.append(place)
        return open_store(place)

    monkeypatch.setattr(worker_module, "open_store", counted)
    command = open_store(home)
    async with AsyncExitStack() as stack:
        starting = asyncio.create_task(stack.enter_async_context(running(home, spaces)))
        try:
            await eventually(lambda: len(tries) > 1)
            assert not starting.done()
        finally:
            await asyncio.to_thread(command.close)
        await asyncio.wait_for(starting, 10)
        before = len(tries)
        with pytest.raises(StoreBusy, match="one does it at a time"):
            await LinkWorker(home, spaces).run()
        assert len(tries) == before + 1, "another worker is not waited for"


@pytest.mark.parametrize("carried", [True, False], ids=["worker", "no worker"])
async def test_whoever_asks_about_a_link_whose_terms_are_not_in_force_yet_takes_nothing_from_what_is_carried(
    home: SpaceHome, spaces: MadeUpSpaces, carried: bool
) -> None:
    async def rows() -> list[int]:
        assert worker._database is not None
        return [row.row for row in await worker._database.read(lambda c: link_store.links(c, HERE))]

    asked = LinkLedger.below(home, HERE)
    asked.put(AgreedLink("east", EAST, "setting", op="2", terms={"channels": {"news": "news"}, "space": "east"}))
    async with running(home, spaces) as worker:
        await eventually(lambda: len(of(spaces, "east")) == 1)
        before = await rows()
        if carried:
            await call(home.link_socket, PauseLinkRequest("east"))
            assert (await rows(), len(of(spaces, "east"))) == (before, 1)
    if not carried:
        async with alone(home) as operations:
            await operations.call(PauseLinkRequest("east"))
            found = await operations.database.read(lambda c: link_store.links(c, HERE))
        assert [row.row for row in found] == before
        assert [row.paused is not None for row in found if row.definition.link == "east"] == [True]


async def test_a_command_without_a_worker_is_refused_what_a_worker_refuses(home: SpaceHome) -> None:
    async with alone(home) as operations:
        with pytest.raises(UsageError, match="quarantine show: `seq`: expected int >= 1"):
            await operations.call(ShowQuarantinedRequest("east", seq=0))


async def test_a_link_that_is_not_in_force_yet_and_was_never_carried_gets_no_place_in_the_ledger(
    home: SpaceHome,
) -> None:
    terms = {"channels": {"news": "news"}, "space": "east"}
    LinkLedger.below(home, HERE).put(AgreedLink("east", EAST, "setting", op="2", terms=terms))
    async with alone(home) as operations:
        with pytest.raises(ConflictError, match="is not in force"):
            await operations.call(PauseLinkRequest("east"))
        assert await operations.database.read(lambda c: link_store.links(c, HERE)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"state": "off"},
        {"channels": {}},
        {"until": 1},
    ],
    ids=["ended", "takes nothing any more", "is over"],
)
async def test_a_link_that_takes_nothing_any_more_is_let_go_and_the_other_is_not_touched(
    home: SpaceHome, spaces: MadeUpSpaces, change: dict[str, Any]
) -> None:
    async with running(home, spaces):
        await eventually(lambda: len(spaces.sources) == 2)
        spaces.records["east"] = msgspec.structs.replace(spaces.records["east"], **change)
        await eventually(lambda: of(spaces, "east")[0].closed)
        seen = of(spaces, "west")[0].pages
        of(spaces, "west")[0].on_wake()
        await eventually(lambda: of(spaces, "west")[0].pages > seen)
        assert await states(home) == {"east": "link_not_running", "west": "live"}
    assert len(spaces.sources) == 2


async def test_another_agreement_or_another_place_begins_the_link_anew_and_nothing_else_does(
    home: SpaceHome, spaces: MadeUpSpaces
) -> None:
    async with running(home, spaces):
        await eventually(lambda: len(spaces.sources) == 2)
        before = spaces.asked
        spaces.records["east"] = msgspec.structs.replace(spaces.records["east"], op="2", space="orient")
        await eventually(lambda: spaces.asked > before + 3)
        assert len(spaces.sources) == 2  # how it is shown is no agreement
        spaces.records["east"] = msgspec.structs.replace(spaces.records["east"], hops=2)
        await eventually(lambda: len(of(spaces, "east")) == 2)
        assert of(spaces, "east")[0].closed
        peers = LinkPeers.below(home)
        access = peers.get("east")
        assert access is not None
        moved = msgspec.structs.replace(access, url="nats://127.0.0.1:2")
        peers.put(moved, peers.creds("east").read_text())
        await eventually(lambda: len(of(spaces, "east")) == 3)
        assert of(spaces, "east")[2].access.url == "nats://127.0.0.1:2"
        assert len(of(spaces, "west")) == 1


async def test_a_steward_that_is_away_changes_nothing_and_is_named(home: SpaceHome, spaces: MadeUpSpaces) -> None:
    async with running(home, spaces):
        await eventually(lambda: len(spaces.sources) == 2)
        spaces.fails = StewardUnreachable("nobody is there")
        before = spaces.asked
        await eventually(lambda: spaces.asked > before + 3)
        assert [each.closed for each in spaces.sources] == [False, False]
        assert (await call(home.link_socket, ListLinksRequest())).steward == "nobody is there"
        spaces.fails = None
        before = spaces.asked
        await eventually(lambda: spaces.asked > before + 1)
        assert (await call(home.link_socket, ListLinksRequest())).steward == ""
    assert len(spaces.sources) == 2


async def test_what_leads_to_another_space_than_the_record_names_is_not_carried(
    home: SpaceHome, spaces: MadeUpSpaces
) -> None:
    spaces.records["east"] = agreed("east", KeyPair.generate(ACCOUNT).id)
    async with running(home, spaces):
        events = follow(home.link_socket, FollowLinkRequest("east"))
        event = await anext(events)
        await events.aclose()
        assert isinstance(event, LinkNotRunning)
        assert f"leads to {EAST}" in event.words
    assert [each.access.link for each in spaces.sources] == ["west"]


async def test_a_link_that_does_not_end_in_time_is_broken_off_and_keeps_nobody_waiting(
    home: SpaceHome, spaces: MadeUpSpaces
) -> None:
    del spaces.records["west"]
    async with running(home, spaces, deadline=0.1):
        await eventually(lambda: len(spaces.sources) == 1)
        east = spaces.sources[0]
        east.stuck = asyncio.Event()
        seen = east.pages
        east.on_wake()
        await eventually(lambda: east.pages > seen)
    assert east.closed


async def test_who_follows_hears_of_its_link_alone(home: SpaceHome, spaces: MadeUpSpaces) -> None:
    async with running(home, spaces) as worker:
        await eventually(lambda: len(spaces.sources) == 2)
        events = follow(home.link_socket, FollowLinkRequest("east"))
        assert isinstance(await anext(events), LinkReported)
        worker._heard(StatusChanged("west", 1.0, "live", "paused"))
        worker._heard(StatusChanged("east", 2.0, "live", "paused", "a word"))
        heard = [await asyncio.wait_for(anext(events), 10)]
        while isinstance(heard[-1], LinkReported):
            heard.append(await asyncio.wait_for(anext(events), 10))
        await events.aclose()
    assert heard[-1] == StatusChanged("east", 2.0, "live", "paused", "a word")


def test_events_are_named_as_json_names_things() -> None:
    assert msgspec.to_builtins(StatusChanged("l", 1.0, "live", "paused"))["event"] == "status_changed"


def creds(iat: int, exp: int | None = None) -> str:
    user = KeyPair.generate()
    return jwt.credentials(jwt.encode(KeyPair.generate(ACCOUNT), user.id, "x", {}, iat=iat, expires=exp), user)


def test_a_credential_is_due_when_half_of_its_time_is_over_and_one_without_an_end_never_is() -> None:
    assert [half_is_over(creds(iat=100, exp=200), now) for now in (149, 150, 250)] == [False, True, True]
    assert not half_is_over(creds(iat=100), 10**12)
    assert not half_is_over("no credential", 1)


async def test_a_credential_that_ends_before_long_is_renewed_by_greeting_the_other_space(
    home: SpaceHome, spaces: MadeUpSpaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_link, "LOOK_AT_CREDENTIAL", 0.02)
    peers = LinkPeers.below(home)
    access = peers.get("east")
    assert access is not None
    peers.put(access, creds(iat=1, exp=2))
    async with running(home, spaces):
        await eventually(lambda: len(spaces.sources) == 2)
        await eventually(lambda: of(spaces, "east")[0].hellos > 3)
        assert of(spaces, "west")[0].hellos == 1


async def test_a_renewal_that_fails_is_tried_again(
    home: SpaceHome, spaces: MadeUpSpaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_link, "LOOK_AT_CREDENTIAL", 0.02)
    peers = LinkPeers.below(home)
    access = peers.get("east")
    assert access is not None
    peers.put(access, creds(iat=1, exp=2))
    async with running(home, spaces):
        await eventually(lambda: len(spaces.sources) == 2)
        east, tries = of(spaces, "east")[0], 0

        async def failing() -> PeerFacts:
            nonlocal tries
            tries += 1
            raise BrokerUnreachable("away")

        monkeypatch.setattr(east, "hello", failing)
        await eventually(lambda: tries > 3)
