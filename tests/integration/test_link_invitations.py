"""Two spaces are linked by one line: both write down what was agreed, whatever is killed, and nobody else gets in."""

import asyncio
import base64
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inviting import attend
from linked_spaces import peer_of
from tidings.admin import accepting, inviting, link_accepting
from tidings.admin.accepting import accept
from tidings.admin.home import SpaceHome
from tidings.admin.invitations import Invitation
from tidings.admin.inviting import Inviter, reach_of
from tidings.admin.link_accepting import AcceptedLink, LinkWishes, Proposal, accept_link
from tidings.admin.link_inviting import LinkInviter, LinkTerms
from tidings.admin.link_peers import LinkPeers
from tidings.admin.linking import Linker
from tidings.admin.rotation import rotate_signing_key
from tidings.contract.admin import OfferRequest, RedeemRequest
from tidings.contract.links import LinkHelloRequest
from tidings.errors import AuthRevoked, ConfigError, DeniedError, OutcomeUnknown, TidingsError, UsageError
from tidings.nats import jwt
from tidings.nats.client import connect
from tidings.nats.errors import NatsError
from tidings.rpc.control import ControlClient
from tidings.server.grants import invitation_token
from tidings.server.keyring import Keyring
from tidings.supervisor.processes import AdminProcess
from tidings.wire.invitations import InvitationLine, acceptance, parse_invitation
from tidings.wire.link_terms import (
    LinkAcceptance,
    LinkOffer,
    SignedAcceptance,
    asking,
    hash_of,
    read_offer,
    signed_acceptance,
)
from tidings.wire.rulings import Link
from tidings.wire.signing import ACCOUNT, KeyPair
from tidings.wire.subjects import Subjects
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually

HERE, THERE = "127.0.0.2", "127.0.0.3"
TERMS = LinkTerms(shares=("general", "team.>"), takes={"news": "acme.news", "ops.>": "acme.ops.>"}, called="acme")


@pytest.fixture
async def spaces(tmp_path: Path) -> AsyncIterator[tuple[RealSpace, RealSpace]]:
    async with (
        real_space(tmp_path / "a", "main", listen=HERE) as inviter,
        real_space(tmp_path / "b", "lab", listen=THERE) as acceptor,
    ):
        for each in (inviter, acceptor):
            attend(each)
        yield inviter, acceptor


@pytest.fixture
async def inviter(tmp_path: Path) -> AsyncIterator[RealSpace]:
    async with real_space(tmp_path / "a", "main", listen=HERE) as space:
        attend(space)
        yield space


async def offered(space: RealSpace, terms: LinkTerms = TERMS, seconds: int = 3_600) -> InvitationLine:
    async with space.administer() as admin:
        _, line = LinkInviter(admin).invite(terms, seconds, reach_of(admin, None))
    return parse_invitation(str(line))


def yes(_proposal: Proposal) -> None:
    pass


async def taken(space: RealSpace, line: InvitationLine, **wishes: Any) -> AcceptedLink:
    return await accept_link(space.home, line, LinkWishes(**wishes), yes)


def record(space: RealSpace, link: str) -> Link | None:
    """As it is in force."""
    assert space.steward is not None
    return space.steward.table.link_at(link, space.steward.space.position)


def on(space: RealSpace) -> list[Link]:
    assert space.steward is not None
    records = (record(space, link) for link in space.steward.table.rules.links)
    return [each for each in records if each is not None and each.state == "on"]


async def test_both_spaces_write_down_what_was_agreed_and_each_can_ask_the_other(
    spaces: tuple[RealSpace, RealSpace],
) -> None:
    a, b = spaces
    line = await offered(a)
    assert len(str(line)) <= 300
    shown: list[Proposal] = []
    found = await accept_link(b.home, line, LinkWishes(called="head", names={"general": "head.general"}), shown.append)
    link = found.record.link
    ours, theirs = record(a, link), record(b, link)
    assert ours is not None
    assert theirs is not None
    assert (ours.origin, ours.space, ours.steward) == (b.info.id, "acme", b.info.steward_key)
    assert (theirs.origin, theirs.space, theirs.steward) == (a.info.id, "head", a.info.steward_key)
    assert (ours.shares, theirs.channels) == (("general", "team.>"), {"general": "head.general", "team.>": "team.>"})
    assert (theirs.shares, ours.channels) == (("news", "ops.>"), {"news": "acme.news", "ops.>": "acme.ops.>"})
    assert (ours.hops, ours.until, ours.direct, ours.roster) == (1, None, "off", "off")
    assert (found.known_as, found.already, bool(found.url), found.unreached) == ("acme", False, True, "")
    assert (shown[0].offer.shares, shown[0].record.space) == (("general", "team.>"), "head")
    for here, there in ((a, b), (b, a)):
        peers = LinkPeers.below(here.home)
        peer = peers.get(link)
        assert peer is not None
        assert (peer.space, peer.id, peer.steward) == (there.info.name, there.info.id, there.info.steward_key)
        creds = peers.creds(link)
        assert creds.stat().st_mode & 0o077 == 0
        async with peer_of(there, creds.read_text()) as client:
            hello = await client.control.call(LinkHelloRequest())
        assert (hello.space, hello.link) == (there.info.id, link)
        key = jwt.split_credentials(creds.read_text())[1]
        in_files = [path for path in there.home.home.rglob("*") if path.is_file() and key.seed in text_of(path)]
        assert in_files == [], "a seed is where it was made, and nowhere else"
    assert list(a.home.link_peers.glob("*.seed")) == []


def text_of(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")


async def test_the_address_that_each_was_given_leads_to_the_other_and_is_trusted(
    spaces: tuple[RealSpace, RealSpace],
) -> None:
    a, b = spaces
    link = (await taken(b, await offered(a))).record.link
    for here, there in ((a, b), (b, a)):
        peers = LinkPeers.below(here.home)
        peer, creds = peers.get(link), peers.creds(link).read_text()
        assert peer is not None
        user = jwt.split_credentials(creds)[1].id
        connection = await connect(peer.url, creds, user, name="worker", reconnect=False)
        hello = await ControlClient(connection, Subjects(peer.space), user).call(LinkHelloRequest())
        assert hello.steward == there.info.steward_key == peer.steward
        await connection.close()


async def test_whoever_accepts_may_take_and_share_less(spaces: tuple[RealSpace, RealSpace]) -> None:
    a, b = spaces
    until = int(time.time()) + 10_000
    line = await offered(a, LinkTerms(TERMS.shares, TERMS.takes, hops=3, direct="on", roster="on", until=until + 5))
    wishes: dict[str, Any] = {"only": ("team.web.>",), "share": ("ops.eu",), "names": {"team.>": "far.>"}}
    found = await taken(b, line, **wishes, until=until, direct=False)
    ours, theirs = record(a, found.record.link), record(b, found.record.link)
    assert ours is not None
    assert theirs is not None
    assert (ours.shares, theirs.channels) == (("team.web.>",), {"team.web.>": "far.web.>"})
    assert (theirs.shares, ours.channels) == (("ops.eu",), {"ops.eu": "acme.ops.eu"})
    for each in (ours, theirs):
        assert (each.until, each.hops, each.direct, each.roster) == (until, 3, "off", "on")
    assert ours.space == "lab", "by its own name, as nobody gave it another"


WISHES: list[tuple[dict[str, Any], str]] = [
    ({"only": ("secret",)}, "is not offered"),
    ({"share": ("secret",)}, "is not offered"),
    ({"names": {"secret": "x"}}, "is not offered"),
    ({"only": (), "share": ()}, "nothing would pass"),
    ({"called": "lab"}, "--as NAME"),
    ({"called": "a b"}, "space name"),
    ({"names": {"general": "team.x"}}, "two channels would have one name"),
    ({"until": 1}, "ended already"),
]


async def test_more_than_is_offered_cannot_be_wished_for(spaces: tuple[RealSpace, RealSpace]) -> None:
    a, b = spaces
    line = await offered(a)
    for wishes, said in WISHES:
        with pytest.raises(UsageError, match=said):
            await taken(b, line, **wishes)
        assert (on(a), on(b)) == ([], [])
    assert (await taken(b, line)).known_as == "acme", "the line is as good as it was"


async def test_who_says_no_leaves_nothing(spaces: tuple[RealSpace, RealSpace]) -> None:
    a, b = spaces
    line = await offered(a)

    def no(_proposal: Proposal) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await accept_link(b.home, line, LinkWishes(), no)
    assert (on(a), on(b)) == ([], [])
    async with b.administer() as admin:
        assert admin.links.rows() == []
    assert (await taken(b, line)).record.state == "on"


async def test_the_same_line_again_is_the_same_link_and_no_alarm(spaces: tuple[RealSpace, RealSpace]) -> None:
    a, b = spaces
    line = await offered(a)
    first, again = await taken(b, line), await taken(b, line)
    assert (again.already, again.record, again.known_as) == (True, first.record, "acme")
    assert a.steward is not None
    assert a.steward.invited.problems() == []
    assert (len(on(a)), len(on(b))) == (1, 1)


async def test_two_who_accept_at_once_and_one_is_linked(spaces: tuple[RealSpace, RealSpace], tmp_path: Path) -> None:
    a, b = spaces
    line = await offered(a)
    async with real_space(tmp_path / "c", "thief", listen="127.0.0.4") as c:
        attend(c)
        said = await asyncio.gather(taken(b, line), taken(c, line), return_exceptions=True)
        (refused,) = [each for each in said if isinstance(each, BaseException)]
        assert isinstance(refused, DeniedError)
        assert "used already, by another key" in str(refused)
        assert len(on(a)) == 1
        assert len(on(b)) + len(on(c)) == 1, "who was refused has taken back what it wrote"
        assert a.steward is not None
        assert [line.key.id[:12] in each for each in a.steward.invited.problems()] == [True]


async def test_two_processes_of_one_home_are_one_link(spaces: tuple[RealSpace, RealSpace]) -> None:
    a, b = spaces
    line = await offered(a)
    one, two = await asyncio.gather(accepted_by_command(b, line), accepted_by_command(b, line))
    assert (one, two) == ((0, one[1]), (0, one[1]))
    assert (len(on(a)), len(on(b))) == (1, 1)


async def accepted_by_command(space: RealSpace, line: InvitationLine, **env: str) -> tuple[int | None, str]:
    words = ["link", "accept", str(line), "--yes", "--space", space.info.name, "--home", str(space.home.home)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tidings", *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **env},
    )
    said, _ = await process.communicate()
    return process.returncode, said.decode().strip()


# --- interrupted ---


@pytest.mark.parametrize("point", ["after_kept", "after_record", "after_said", "after_answer", "after_peer"])
async def test_whoever_accepts_and_is_killed_finishes_by_the_same_line(
    spaces: tuple[RealSpace, RealSpace], point: str
) -> None:
    a, b = spaces
    line = await offered(a)
    code, said = await accepted_by_command(b, line, TIDINGS_FAILPOINT=f"link_accept.{point}:kill")
    assert (code, said) == (-9, "")
    assert [each.shares for each in on(a)] in ([], [("general", "team.>")])
    assert [each.shares for each in on(b)] in ([], [("news", "ops.>")]), "nothing but what was agreed"
    found = await taken(b, line)
    await agreed_on_both_sides(a, b, found.record.link)


async def agreed_on_both_sides(a: RealSpace, b: RealSpace, link: str) -> None:
    ours, theirs = record(a, link), record(b, link)
    assert ours is not None
    assert theirs is not None
    assert (ours.state, theirs.state, len(on(a)), len(on(b))) == ("on", "on", 1, 1)
    assert set(ours.shares) == set(theirs.channels)
    assert set(theirs.shares) == set(ours.channels)
    for here, there in ((a, b), (b, a)):
        async with peer_of(there, LinkPeers.below(here.home).creds(link).read_text()) as client:
            assert (await client.control.call(LinkHelloRequest())).link == link


@pytest.mark.parametrize(
    "point",
    [
        "link_redeem.after_taken",
        "link.after_ledger",
        "link.after_record",
        "link_redeem.after_record",
        "link_redeem.after_peer",
    ],
)
async def test_an_administrator_that_is_killed_leaves_no_half_link(
    spaces: tuple[RealSpace, RealSpace], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, point: str
) -> None:
    a, b = spaces
    line = await offered(a)
    dead: list[BaseException] = []

    def tell(said: dict[str, Any]) -> None:
        """The first administrator is killed, those after it are not."""
        if "redeem" in said and not dead:
            dead.append(TimeoutError())
            tasks.append(asyncio.create_task(killed(said["redeem"])))
        elif working is not None:
            working(said)

    async def killed(asked: dict[str, str]) -> None:
        with monkeypatch.context() as armed:
            armed.setenv("TIDINGS_FAILPOINT", f"{point}:kill")
            async with AdminProcess(a.home) as admin:
                with pytest.raises(TidingsError):
                    await admin.ask("redeem", **asked)

    tasks: list[asyncio.Task[None]] = []
    assert a.steward is not None
    working = a.steward.life.tell_supervisor
    a.steward.life.tell_supervisor = tell
    monkeypatch.setattr("tidings.steward.invitations.PATIENCE", 3.0)
    found = await taken(b, line)
    await asyncio.gather(*tasks)
    assert dead
    await agreed_on_both_sides(a, b, found.record.link)
    async with real_space(tmp_path / "c", "thief", listen="127.0.0.4") as c:
        with pytest.raises(DeniedError, match="used already"):
            await taken(c, line)


async def test_an_answer_that_was_lost_comes_again(
    spaces: tuple[RealSpace, RealSpace], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = spaces
    line, whole = await offered(a), accepting._ask_once

    async def lost(*asked: Any) -> Any:
        answer = await whole(*asked)
        if isinstance(asked[2], RedeemRequest):
            raise OutcomeUnknown("the answer was lost")
        return answer

    monkeypatch.setattr(accepting, "ATTEMPTS", 1)
    with monkeypatch.context() as cut:
        cut.setattr(accepting, "_ask_once", lost)
        with pytest.raises(OutcomeUnknown):
            await taken(b, line)
    assert LinkPeers.below(b.home).all() == []
    found = await taken(b, line, only=("general",))  # what was said holds, whatever is said now
    assert set(found.record.channels) == {"general", "team.>"}
    await agreed_on_both_sides(a, b, found.record.link)


async def test_what_was_not_finished_before_the_line_expired_is_ended(
    spaces: tuple[RealSpace, RealSpace], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = spaces
    line = await offered(a)
    code, _ = await accepted_by_command(b, line, TIDINGS_FAILPOINT="link_accept.after_said:kill")
    assert (code, len(on(b)), len(on(a))) == (-9, 1, 0)
    async with a.administer() as admin:
        known = admin.invitations.get(line.key.id)
        assert known is not None
        await Inviter(admin).revoke(known)
    with pytest.raises(AuthRevoked, match="has expired"):
        await taken(b, line)
    assert (on(a), on(b)) == ([], [])
    assert (await taken(b, await offered(a))).record.state == "on"


async def test_another_line_of_the_same_space_takes_over_what_was_never_finished(
    spaces: tuple[RealSpace, RealSpace],
) -> None:
    a, b = spaces
    first = await offered(a, LinkTerms(shares=("general",)))
    code, _ = await accepted_by_command(b, first, TIDINGS_FAILPOINT="link_accept.after_said:kill")
    assert (code, len(on(b))) == (-9, 1)
    found = await taken(b, await offered(a))
    await agreed_on_both_sides(a, b, found.record.link)


# --- what does not belong together ---


async def test_a_space_is_not_linked_with_itself_nor_twice_with_another(spaces: tuple[RealSpace, RealSpace]) -> None:
    a, b = spaces
    with pytest.raises(UsageError, match="of this very space"):
        await taken(a, await offered(a, LinkTerms(shares=("general",))))
    link = (await taken(b, await offered(a))).record.link
    for here, there in ((a, b), (b, a)):
        line = await offered(here, LinkTerms(shares=("other",)))
        with pytest.raises(DeniedError, match=f"already .{link}.: .*remove {link}` on both sides"):
            await taken(there, line, called="again")
    assert (len(on(a)), len(on(b))) == (1, 1)
    for space in (a, b):
        async with space.administer() as admin:
            await Linker(admin).end(link)
            LinkPeers.below(space.home).forget(link)
    found = await taken(b, await offered(a))
    assert found.record.link != link
    await agreed_on_both_sides(a, b, found.record.link)


async def test_a_link_that_was_removed_does_not_come_back_by_its_line(spaces: tuple[RealSpace, RealSpace]) -> None:
    a, b = spaces
    line = await offered(a)
    link = (await taken(b, line)).record.link
    async with a.administer() as admin:
        await Linker(admin).end(link)
    (kept,) = b.home.link_accepting.glob("U*.json")
    progress = msgspec.json.decode(kept.read_bytes())
    _, key = jwt.split_credentials(LinkPeers.below(b.home).creds(link).read_text())
    kept.write_text(msgspec.json.encode({**progress, "done": False, "seed": key.seed}).decode())
    with pytest.raises(AuthRevoked):
        await taken(b, line)
    assert (on(a), on(b)) == ([], [])


async def test_two_spaces_of_one_name_can_be_linked(tmp_path: Path) -> None:
    async with (
        real_space(tmp_path / "a", "main", listen=HERE) as a,
        real_space(tmp_path / "b", "main", listen=THERE) as b,
    ):
        attend(a)
        line = await offered(a, LinkTerms(shares=("general",)))
        with pytest.raises(UsageError, match="--as NAME"):
            await taken(b, line)
        found = await taken(b, line, called="head")
        assert found.known_as == f"main-{b.info.id[1:7].lower()}"


async def test_a_line_of_the_other_kind_is_refused_and_names_its_command(
    spaces: tuple[RealSpace, RealSpace], tmp_path: Path
) -> None:
    a, b = spaces
    async with a.administer() as admin:
        promised = Invitation(id="", issued=0, expires=0, name="bob", read=("general",), post=("general",))
        _, for_agent = Inviter(admin).invite(promised, 3_600, reach_of(admin, None))
    for_link = await offered(a)
    with pytest.raises(UsageError, match="`tidings accept LINE`"):
        await taken(b, for_agent)
    with pytest.raises(UsageError, match="`tidings link accept LINE`"):
        await accept(SpaceHome(tmp_path / "there", "main"), for_link, "")
    # also for whoever asks by hand
    async with asker(a, for_link) as control:
        key = KeyPair.generate()
        sig = signed(key, acceptance("main", for_link.key.id, key.id, "bob"))
        with pytest.raises(DeniedError, match="`tidings link accept LINE`"):
            await control.call(RedeemRequest(id=key.id, name="bob", sig=sig))
    async with asker(a, for_agent) as control:
        sig = signed(key, asking("main", for_agent.key.id, key.id))
        with pytest.raises(DeniedError, match="`tidings accept LINE`"):
            await control.call(OfferRequest(id=key.id, sig=sig))
    async with a.administer() as admin:
        with pytest.raises(DeniedError, match="`tidings link accept LINE`"):
            await Inviter(admin).redeem(for_link.key.id, key.id, "bob")
        assert admin.ledger.rows() == []


async def test_what_the_other_cannot_reach_is_said_and_the_other_direction_works(tmp_path: Path) -> None:
    async with (
        real_space(tmp_path / "a", "main", listen=HERE) as a,
        real_space(tmp_path / "b", "lab") as b,
    ):
        attend(a)
        shown: list[Proposal] = []
        local = await accept_link(b.home, await offered(a), LinkWishes(), shown.append)
        assert local.url == b.info.url, "on one machine loopback is enough"
        for space in (a, b):
            async with space.administer() as admin:
                await Linker(admin).end(local.record.link)
        line = await offered(a)
        found = await taken_from_far(b, line)
        assert (found.url, found.record.shares) == ("", ("news", "ops.>"))
        assert LinkPeers.below(a.home).get(found.record.link) is None, "a worker has nowhere to go"
        async with peer_of(a, LinkPeers.below(b.home).creds(found.record.link).read_text()) as client:
            assert (await client.control.call(LinkHelloRequest())).shares == ("general", "team.>")
        again = await taken(b, line)
        assert (again.already, again.url) == (True, "")


async def test_a_file_that_cannot_be_read_is_named_with_what_to_do(
    spaces: tuple[RealSpace, RealSpace],
) -> None:
    a, b = spaces
    line = await offered(a)
    b.home.link_accepting.mkdir(parents=True, mode=0o700)
    b.home.linked.chmod(0o700)
    damaged = b.home.link_accepting / f"{line.key.id}.json"
    damaged.touch(0o600)
    with pytest.raises(ConfigError, match="is damaged: remove it"):
        await taken(b, line)
    damaged.unlink()
    assert (await taken(b, line)).record.state == "on"


async def test_an_address_that_leads_nowhere_is_said_and_the_link_is_made(
    spaces: tuple[RealSpace, RealSpace],
) -> None:
    a, b = spaces
    found = await taken(b, await offered(a), urls=("tls://127.0.0.9:1",))
    assert "127.0.0.9:1" in found.unreached
    (peer,) = LinkPeers.below(a.home).all()
    assert peer.address == "tls://127.0.0.9:1"
    assert (len(on(a)), len(on(b))) == (1, 1)


async def taken_from_far(space: RealSpace, line: InvitationLine) -> AcceptedLink:
    """As if the other space were on another machine."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(link_accepting, "is_loopback", lambda _host: False)
        return await taken(space, line)


# --- somebody who has the line and a client of its own ---


@asynccontextmanager
async def asker(space: RealSpace, line: InvitationLine) -> AsyncIterator[ControlClient]:
    creds = jwt.credentials(invitation_token(line), line.key)
    connection = await connect(space.info.url, creds, line.key.id, name="raw", reconnect=False)
    try:
        yield ControlClient(connection, Subjects(space.info.name), line.key.id, timeout=30)
    finally:
        await connection.close()


def signed(key: KeyPair, said: bytes) -> str:
    return base64.b64encode(key.sign(said)).decode()


class Stranger:
    """A space that nobody runs, and its worker's user."""

    def __init__(self, line: InvitationLine) -> None:
        self.line = line
        self.space, self.user = KeyPair.generate(ACCOUNT), KeyPair.generate()
        self.text, self.signature = "", ""

    async def ask(self, control: ControlClient) -> LinkOffer:
        sig = signed(self.user, asking(self.line.space, self.line.key.id, self.user.id))
        said = await control.call(OfferRequest(id=self.user.id, sig=sig))
        found = msgspec.json.decode(self.user.open_sealed(said.sealed))
        self.text, self.signature = found["offer"], found["signature"]
        return read_offer(self.text, self.signature)

    def acceptance(self, offer: LinkOffer, **changes: Any) -> LinkAcceptance:
        fields: dict[str, Any] = {
            "invitation": offer.invitation,
            "link": offer.link,
            "space": "strange",
            "space_id": self.space.id,
            "steward": KeyPair.generate().id,
            "user": self.user.id,
            "shares": offer.wants,
            "until": offer.until,
            "hops": offer.hops,
            "direct": offer.direct,
            "roster": offer.roster,
            "offer": hash_of(self.text),
            "takes": offer.shares,
            "url": "",
            "token": made_token(offer.user),
        }
        return LinkAcceptance(**{**fields, **changes})

    def sign(self, acceptance: LinkAcceptance) -> SignedAcceptance:
        return signed_acceptance(self.space, self.user, acceptance)

    async def accept(self, control: ControlClient, said: SignedAcceptance) -> dict[str, Any]:
        answer = await control.call(RedeemRequest(id=self.user.id, **said._asdict()))
        return dict(msgspec.json.decode(self.user.open_sealed(answer.sealed)))


def replaced(acceptance: LinkAcceptance, **changes: Any) -> LinkAcceptance:
    return msgspec.structs.replace(acceptance, **changes)


def made_token(user: str) -> str:
    account = KeyPair.generate(ACCOUNT)
    claims = jwt.user_claims(jwt.Permissions(publish=["x"], subscribe=["x"]), jwt.UserLimits())
    text = jwt.unsigned(account.id, user, "link", claims, iat=1)
    return jwt.with_signature(text, account.sign(text.encode()))


WIDER: list[dict[str, Any]] = [
    {"takes": ("general", "secret")},
    {"takes": (">",)},
    {"takes": ("team.>", "team")},
    {"shares": ("news", "private")},
    {"shares": (">",)},
    {"takes": (), "shares": ()},
    {"hops": 2},
    {"direct": "on"},
    {"roster": "on"},
    {"until": None},
    {"until": 2**40},
    {"until": 1},
]
ALTERED: list[dict[str, Any]] = [
    {"offer": "0" * 64},
    {"link": "abcdefghijkl"},
    {"invitation": KeyPair.generate().id},
    {"user": KeyPair.generate().id},
    {"space_id": KeyPair.generate(ACCOUNT).id},
    {"token": "x"},
    {"token": made_token(KeyPair.generate().id)},
    {"url": "nats://192.0.2.7:4222"},
    {"url": "gopher://192.0.2.7"},
    {"url": "tls://192.0.2.7:4222,nats://192.0.2.7:4222"},
]


async def test_what_is_wider_than_the_offer_or_not_of_it_is_refused_before_anybody_works_for_it(
    inviter: RealSpace,
) -> None:
    asked = attend(inviter)
    line = await offered(inviter, LinkTerms(TERMS.shares, TERMS.takes, until=int(time.time()) + 10_000))
    stranger = Stranger(line)
    async with asker(inviter, line) as control:
        offer = await stranger.ask(control)
        wrong = [stranger.sign(replaced(stranger.acceptance(offer), **each)) for each in [*WIDER, *ALTERED]]
        for said in wrong:
            with pytest.raises(DeniedError):
                await stranger.accept(control, said)
            async with inviter.administer() as admin:
                with pytest.raises(DeniedError):
                    await LinkInviter(admin).redeem(line.key.id, stranger.user.id, said)
        assert ([each for each in asked if "redeem" in each], on(inviter)) == ([], [])
        answer = await stranger.accept(control, stranger.sign(stranger.acceptance(offer)))
        assert (answer["link"], answer["called"]) == (offer.link, "strange")


async def test_signatures_are_of_the_keys_that_are_named_and_only_the_user_opens_the_answer(inviter: RealSpace) -> None:
    line = await offered(inviter)
    stranger, other = Stranger(line), Stranger(line)
    async with asker(inviter, line) as control:
        overheard = await control.connection.subscribe(f"_INBOX_{line.key.id}.>")
        for sig in (
            signed(other.user, asking("main", line.key.id, stranger.user.id)),
            signed(stranger.user, asking("lab", line.key.id, stranger.user.id)),
            signed(stranger.user, asking("main", other.user.id, stranger.user.id)),
            signed(stranger.user, acceptance("main", line.key.id, stranger.user.id, "")),
            "?",
        ):
            with pytest.raises(DeniedError, match="not signed"):
                await control.call(OfferRequest(id=stranger.user.id, sig=sig))
        offer = await stranger.ask(control)
        whole = stranger.sign(stranger.acceptance(offer))
        forged = other.sign(stranger.acceptance(offer))
        for said in (
            whole._replace(sig=forged.sig),
            whole._replace(proof=forged.proof),
            whole._replace(proof=whole.sig),
            whole._replace(text=whole.text.replace('"hops":1', '"hops": 1')),
            whole._replace(sig="?", proof="?"),
            whole._replace(text='{"v":1}'),
            whole._replace(text=whole.text.replace('"v":1', '"v":1,"v":1')),
        ):
            with pytest.raises(DeniedError):
                await stranger.accept(control, said)
        sig = signed(line.key, asking("main", line.key.id, line.key.id))
        with pytest.raises(DeniedError, match="known to whoever has its line"):
            await control.call(OfferRequest(id=line.key.id, sig=sig))
        assert on(inviter) == []
        await stranger.accept(control, whole)
        heard = b"".join(message.data for message in overheard.waiting())
        assert b"team.>" not in heard
        assert b"eyJ" not in heard
    (made,) = on(inviter)
    assert (made.peer, made.origin) == (stranger.user.id, stranger.space.id)


async def test_a_key_that_took_it_gets_the_same_again_and_nothing_for_other_terms(inviter: RealSpace) -> None:
    line = await offered(inviter)
    stranger = Stranger(line)
    async with asker(inviter, line) as control:
        offer = await stranger.ask(control)
        whole = stranger.sign(stranger.acceptance(offer, takes=("general",)))
        first = await stranger.accept(control, whole)
        assert await stranger.accept(control, whole) == first
        with pytest.raises(DeniedError, match="other terms"):
            await stranger.accept(control, stranger.sign(stranger.acceptance(offer)))
        async with inviter.administer() as admin:
            with pytest.raises(DeniedError, match="other terms"):
                await LinkInviter(admin).redeem(
                    line.key.id, stranger.user.id, stranger.sign(stranger.acceptance(offer))
                )
        thief = Stranger(line)
        thief.text = stranger.text
        with pytest.raises(DeniedError, match="used already"):
            await thief.ask(control)
        for replayed in (whole, thief.sign(thief.acceptance(offer))):
            with pytest.raises(DeniedError):
                await thief.accept(control, replayed)
    assert [each.shares for each in on(inviter)] == [("general",)]


async def test_an_offer_of_another_line_is_not_accepted_by_this_one(inviter: RealSpace) -> None:
    small, large = await offered(inviter, LinkTerms(shares=("general",))), await offered(inviter)
    stranger = Stranger(large)
    async with asker(inviter, large) as control:
        offer = await stranger.ask(control)
    stranger.line = small
    async with asker(inviter, small) as control:
        with pytest.raises(DeniedError):
            await stranger.accept(control, stranger.sign(stranger.acceptance(offer)))
    assert on(inviter) == []


async def test_what_is_too_large_is_refused_and_breaks_nothing(inviter: RealSpace) -> None:
    line = await offered(inviter)
    stranger = Stranger(line)
    async with asker(inviter, line) as control:
        offer = await stranger.ask(control)
        whole = stranger.sign(stranger.acceptance(offer))
        with pytest.raises(DeniedError, match="at most"):
            await stranger.accept(control, whole._replace(text=whole.text + " " * 25_000))
    async with asker(inviter, line) as control:
        with pytest.raises((TidingsError, NatsError)):
            await stranger.accept(control, whole._replace(text=whole.text + " " * 40_000))
    async with asker(inviter, line) as control:
        assert (await stranger.accept(control, whole))["link"] == offer.link


async def test_guessed_expired_and_revoked_lines_open_nothing(
    spaces: tuple[RealSpace, RealSpace], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = spaces
    line = await offered(a)
    monkeypatch.setattr(accepting, "ATTEMPTS", 1)
    for forged in (
        replace(line, key=KeyPair.generate()),
        replace(line, holds=line.holds + 1),
        replace(line, signature=bytes(64)),
    ):
        with pytest.raises(AuthRevoked):
            await taken(b, forged)
    monkeypatch.setattr(inviting, "SHORTEST", 1)
    short = await offered(a, LinkTerms(shares=("general",)), seconds=1)
    async with a.administer() as admin:
        known = admin.invitations.get(line.key.id)
        assert known is not None
        await Inviter(admin).revoke(known)
    with pytest.raises(AuthRevoked, match="it was revoked"):
        await taken(b, line)

    async def is_over() -> bool:
        try:
            async with asker(a, short):
                return False
        except AuthRevoked:
            return True

    await eventually(is_over, within=20)
    with pytest.raises(AuthRevoked, match="has expired"):
        await taken(b, short)
    assert (on(a), on(b)) == ([], [])


async def test_an_offer_that_is_not_the_spaces_own_or_not_the_lines_is_not_agreed_to(
    spaces: tuple[RealSpace, RealSpace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever answers in the space's name can still not offer what its owner did not sign."""
    a, b = spaces
    shown: list[Proposal] = []
    line, other = await offered(a), await offered(a, LinkTerms(shares=("general",)))
    async with a.administer() as admin:
        mine, others = (admin.invitations.get(each.key.id) for each in (line, other))
    assert mine is not None
    assert mine.link is not None
    assert others is not None
    assert others.link is not None
    text, sig = mine.link.offer, mine.link.signature
    wide = text.replace('"wants":["news","ops.>"]', '"wants":["news",">"]')
    assert wide != text
    for answer in ((wide, sig), (text, others.link.signature), (others.link.offer, others.link.signature), ("{}", "")):

        async def forged(_self: Any, answer: tuple[str, str] = answer) -> tuple[str, str]:
            return answer

        monkeypatch.setattr(link_accepting._Acceptor, "_ask_offer", forged)
        with pytest.raises(DeniedError):
            await accept_link(b.home, line, LinkWishes(), shown.append)
    assert (shown, on(a), on(b)) == ([], [], []), "the operator is not even asked"


async def test_a_link_that_the_other_space_names_never_takes_the_place_of_another(
    spaces: tuple[RealSpace, RealSpace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = spaces
    known = (await taken(b, await offered(a))).record.link
    monkeypatch.setattr("tidings.admin.link_inviting.new_link_id", lambda: known)
    async with real_space(tmp_path / "c", "greedy", listen="127.0.0.4") as c:
        attend(c)
        with pytest.raises(DeniedError, match="there was a link"):
            await taken(b, await offered(c, LinkTerms(shares=("general",))))
    (kept,) = on(b)
    assert kept.origin == a.info.id


async def test_an_offer_with_a_steward_key_that_is_gone_is_no_more(spaces: tuple[RealSpace, RealSpace]) -> None:
    a, b = spaces
    line = await offered(a)
    async with a.administer() as admin:
        key = (await rotate_signing_key(admin)).steward_key
    with pytest.raises(DeniedError, match="another key of its steward"):
        await taken(b, line)
    found = await taken(b, await offered(a, LinkTerms(shares=("general",))))
    assert found.record.steward == key != a.info.steward_key


async def test_the_key_of_the_space_itself_signs_what_is_offered(inviter: RealSpace) -> None:
    line = await offered(inviter)
    async with inviter.administer() as admin:
        known = admin.invitations.get(line.key.id)
    assert known is not None
    assert known.link is not None
    offer = read_offer(known.link.offer, known.link.signature)
    assert (offer.space_id, offer.steward) == (Keyring.load(inviter.home.keys).core.id, inviter.info.steward_key)
    assert offer.user != line.key.id
