"""An agent from another machine by one line: made once, for one key, and for nobody who only has the line."""

import asyncio
import base64
import json
import shutil
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tidings
from inviting import attend
from tidings.admin import accepting, inviting
from tidings.admin.accepting import accept
from tidings.admin.home import SpaceHome
from tidings.admin.identity import bundle_identity
from tidings.admin.invitations import Invitation
from tidings.admin.inviting import Inviter, reach_of
from tidings.client.connect import connect_directly
from tidings.contract.admin import RedeemRequest
from tidings.errors import (
    AuthRevoked,
    BrokerUnreachable,
    ConfigError,
    ConflictError,
    DeniedError,
    NameTaken,
    UntrustedServer,
)
from tidings.nats import jwt
from tidings.nats.client import connect
from tidings.nats.errors import NatsError, PublishDenied
from tidings.rpc.control import ControlClient
from tidings.server.certificate_files import CertificateFiles
from tidings.server.certificates import ensure_certificates
from tidings.server.grants import invitation_token
from tidings.supervisor.processes import AdminProcess
from tidings.supervisor.watcher import INVITED, MOST_INVITED, Watcher
from tidings.util.private_files import private_dir, write_private
from tidings.wire.invitations import InvitationLine, acceptance, parse_invitation
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import Subjects
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually

HERE, ELSEWHERE = "127.0.0.2", "127.0.0.3"


@pytest.fixture
async def inviting_space(tmp_path: Path) -> AsyncIterator[RealSpace]:
    async with real_space(tmp_path / "home", listen=HERE) as space:
        attend(space)
        yield space


async def invited(space: RealSpace, seconds: int = 3_600, url: str | None = None, **promised: Any) -> InvitationLine:
    wanted: dict[str, Any] = {"name": "bob", "read": ("general",), "post": ("general",), **promised}
    async with space.administer() as admin:
        _, line = Inviter(admin).invite(Invitation(id="", issued=0, expires=0, **wanted), seconds, reach_of(admin, url))
    return parse_invitation(str(line))


def machine(tmp_path: Path, name: str = "there") -> SpaceHome:
    return SpaceHome(tmp_path / name, "main")


def agent(home: SpaceHome, name: str = "bob", **options: Any) -> tidings.DirectAgent:
    return connect_directly(home.name, name=name, home=home.home, **options)


async def test_whoever_accepts_is_an_agent_and_its_seed_was_never_where_the_space_is(
    inviting_space: RealSpace, tmp_path: Path
) -> None:
    await inviting_space.add("ada")
    there = machine(tmp_path)
    found = await accept(there, await invited(inviting_space, roles=("reviewer",)), "")
    assert (found.name, found.address) == ("bob", f"tls://{HERE}:{inviting_space.info.port}")
    here = connect_directly("main", name="ada", home=inviting_space.home.home, channels=["general"])
    async with here as ada, agent(there) as bob:
        await bob.send("general", "I am here")
        assert (await ada.next_message(10)).sender.name == "bob"
        assert {each.name: each.roles for each in await bob.who()}["bob"] == ("reviewer",)
    assert inviting_space.steward is not None
    seeds = [path for path in inviting_space.home.home.rglob("*") if path.is_file() and found.key.seed in text_of(path)]
    assert seeds == []
    assert list((there.home / "accepting").glob("*.json")) == []
    assert there.imported("bob").stat().st_mode & 0o077 == 0


async def test_it_leads_through_a_websocket_too_and_the_bundle_has_both_ways_in(tmp_path: Path) -> None:
    async with real_space(tmp_path / "home", listen=HERE, ws=HERE) as space:
        attend(space)
        line = await invited(space, url=f"wss://{HERE}:{space.info.ws_port}")
        assert (line.websocket, line.port, len(str(line)) <= 300) == (True, space.info.ws_port, True)
        found = await accept(machine(tmp_path), line, "")
        assert found.address == f"wss://{HERE}:{space.info.ws_port},tls://{HERE}:{space.info.port}"
        async with agent(machine(tmp_path)) as bob:
            await bob.send("general", "through the web")
        other = await accept(machine(tmp_path, "other"), await invited(space, name="carol"), "")
        assert other.address == f"tls://{HERE}:{space.info.port},wss://{HERE}:{space.info.ws_port}"


def text_of(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")


async def test_it_is_used_once_and_the_operator_hears_of_a_second_key(
    inviting_space: RealSpace, tmp_path: Path
) -> None:
    line = await invited(inviting_space)
    await accept(machine(tmp_path), line, "")
    with pytest.raises(DeniedError, match="used already, by another key"):
        await accept(machine(tmp_path, "a thief"), line, "")
    assert inviting_space.steward is not None
    assert [line.key.id[:12] in each for each in inviting_space.steward.invited.problems()] == [True]
    async with inviting_space.administer() as admin:
        known = admin.invitations.get(line.key.id)
        assert known is not None
        assert [row.name for row in admin.ledger.rows()] == ["bob"]
        await Inviter(admin).revoke(known)
    assert inviting_space.steward.invited.problems() == [], "who revokes it has seen to it"


async def test_two_may_have_names_of_their_own_and_the_third_has_none(
    inviting_space: RealSpace, tmp_path: Path
) -> None:
    line = await invited(inviting_space, name="", uses=2)
    with pytest.raises(tidings.errors.UsageError, match="leaves the name to you"):
        await accept(machine(tmp_path, "one"), line, "")
    assert (await accept(machine(tmp_path, "one"), line, "one")).name == "one"
    with pytest.raises(NameTaken):
        await accept(machine(tmp_path, "two"), line, "one")
    assert (await accept(machine(tmp_path, "two"), line, "two")).name == "two"
    with pytest.raises(DeniedError, match="used already"):
        await accept(machine(tmp_path, "three"), line, "three")


async def test_the_same_line_again_is_the_same_agent_and_no_alarm(inviting_space: RealSpace, tmp_path: Path) -> None:
    line, there = await invited(inviting_space), machine(tmp_path)
    first = await accept(there, line, "")
    assert (await accept(there, line, "")).id == first.id
    assert inviting_space.steward is not None
    assert inviting_space.steward.invited.problems() == []


async def test_two_accepts_in_one_home_are_one_agent(inviting_space: RealSpace, tmp_path: Path) -> None:
    line, there = await invited(inviting_space), machine(tmp_path)
    command = [sys.executable, "-m", "tidings.cli", "accept", str(line), "--home", str(there.home), "--json"]

    async def run() -> Any:
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said, _ = await process.communicate()
        return process.returncode, json.loads(said)["id"]

    one, two = await asyncio.gather(run(), run())
    assert one == two
    assert one[0] == 0


async def test_an_agent_that_lost_its_key_gets_another_elsewhere_and_keeps_its_channels(
    inviting_space: RealSpace, tmp_path: Path
) -> None:
    there = machine(tmp_path)
    old = await accept(there, await invited(inviting_space), "")
    async with agent(there, channels=["general"]):
        pass
    async with inviting_space.administer() as admin:
        inviter = Inviter(admin)
        _, line = inviter.invite(inviter.replacing("bob", 1), 3_600, reach_of(admin, None))
    new = machine(tmp_path, "new")
    found = await accept(new, line, "")
    assert (found.name, found.id != old.id) == ("bob", True)
    async with agent(new) as bob:
        assert list(await bob.memberships()) == ["general"]
    with pytest.raises(AuthRevoked):
        async with agent(there):
            pass


async def test_the_same_key_asks_as_often_as_it_likes(inviting_space: RealSpace, tmp_path: Path) -> None:
    line, key = await invited(inviting_space), KeyPair.generate()
    there = machine(tmp_path)
    for _ in range(3):  # as if each answer had been lost
        keep_key(there, line, key)
        assert (await accept(there, line, "")).id == key.id
    async with inviting_space.administer() as admin:
        assert [(row.id, row.invited, row.state) for row in admin.ledger.rows()] == [(key.id, line.key.id, "active")]


@pytest.mark.parametrize("point", ["redeem.after_taken", "add.after_ledger", "add.after_grant"])
async def test_an_administrator_that_is_killed_leaves_nobody_half_an_agent(
    inviting_space: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    line, key = await invited(inviting_space), KeyPair.generate()
    with monkeypatch.context() as armed:
        armed.setenv("TIDINGS_FAILPOINT", f"{point}:kill")
        async with AdminProcess(inviting_space.home) as admin:
            with pytest.raises(tidings.errors.TidingsError):
                await admin.ask("redeem", invitation=line.key.id, agent=key.id, asked={"name": ""})
    with pytest.raises(DeniedError, match="used already"):
        await accept(machine(tmp_path, "a thief"), line, "")
    there = machine(tmp_path)
    keep_key(there, line, key)
    assert (await accept(there, line, "")).id == key.id
    async with agent(there) as bob:
        await bob.send("general", "whole")


def keep_key(there: SpaceHome, line: InvitationLine, key: KeyPair) -> None:
    """As an acceptance that asked with this key and was interrupted."""
    path = there.home / "accepting" / f"{line.key.id}.json"
    for folder in (there.home, path.parent):
        private_dir(folder)
    write_private(path, json.dumps({"seed": key.seed}))


async def test_whoever_is_interrupted_after_asking_has_its_key_and_gets_the_answer(
    inviting_space: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, there = await invited(inviting_space), machine(tmp_path)

    def die(*_: object) -> None:
        raise RuntimeError("the power went")

    with monkeypatch.context() as cut:
        cut.setattr(accepting, "_bundle", die)
        with pytest.raises(RuntimeError):
            await accept(there, line, "")
    (kept,) = (there.home / "accepting").glob("*.json")
    assert kept.stat().st_mode & 0o077 == 0
    key = KeyPair(json.loads(kept.read_text())["seed"])
    assert (await accept(there, line, "")).id == key.id


async def test_it_expires_and_is_revoked_and_whoever_is_connected_with_it_is_cut(
    inviting_space: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inviting, "SHORTEST", 1)
    short = await invited(inviting_space, seconds=1, name="dan")
    closed = asyncio.Event()
    line = await invited(inviting_space)
    creds = jwt.credentials(invitation_token(line), line.key)
    url = inviting_space.info.url
    held = await connect(url, creds, line.key.id, name="held", reconnect=False, on_closed=closed.set)
    async with inviting_space.administer() as admin:
        known = admin.invitations.get(line.key.id)
        assert known is not None
        await Inviter(admin).revoke(known)
    await asyncio.wait_for(closed.wait(), 10)
    await held.close()
    for ended, why in ((line, "it was revoked, has expired by the clock"), (short, "it has expired; ask for another")):
        with pytest.raises(AuthRevoked, match=why):
            await eventually_refused(machine(tmp_path), ended)
    async with inviting_space.administer() as admin:
        assert admin.ledger.rows() == []


async def eventually_refused(home: SpaceHome, line: InvitationLine) -> None:
    while True:
        creds = jwt.credentials(invitation_token(line), line.key)
        url = accepting.where_of(line).full_url
        try:
            connection = await connect(url, creds, line.key.id, name="early", reconnect=False)
        except AuthRevoked:
            break
        await connection.close()
        await asyncio.sleep(0.1)
    await accept(home, line, "")


async def test_a_copy_that_is_put_back_opens_no_invitation_again(inviting_space: RealSpace, tmp_path: Path) -> None:
    space = inviting_space
    used, revoked = await invited(space), await invited(space, name="carol")
    copy = tmp_path / "copy"
    shutil.copytree(space.home.agents, copy)
    await accept(machine(tmp_path), used, "")
    async with space.administer() as admin:
        known = admin.invitations.get(revoked.key.id)
        assert known is not None
        await Inviter(admin).revoke(known)
    shutil.rmtree(space.home.agents)
    shutil.copytree(copy, space.home.agents)
    async with space.administer() as admin:
        await admin.push_invitations()
    with pytest.raises(DeniedError, match="used already"):
        await accept(machine(tmp_path, "a thief"), used, "")
    with pytest.raises(AuthRevoked):
        await accept(machine(tmp_path, "another"), revoked, "")


async def test_the_line_opens_nothing_but_the_one_question(inviting_space: RealSpace) -> None:
    line, s = await invited(inviting_space), Subjects("main")
    complaints: list[str] = []
    connection = await connect(
        inviting_space.info.url,
        jwt.credentials(invitation_token(line), line.key),
        line.key.id,
        name="curious",
        reconnect=False,
        on_error=lambda error: complaints.append(str(error).lower()),
    )
    denied = [
        s.chat(line.key.id, "general"),
        s.control("health", line.key.id),
        s.control("admin", line.key.id),
        s.control("accept", KeyPair.generate().id),
        "$JS.API.INFO",
        "$SYS.REQ.SERVER.PING",
    ]
    for subject in denied:
        with pytest.raises(PublishDenied):
            await connection.request(subject, b"{}", timeout=5)
    for subject in ("td.main.live.>", ">", "_INBOX_*.>", f"_INBOX_{KeyPair.generate().id}.>"):
        before = len(complaints)
        await connection.subscribe(subject)
        await eventually(lambda before=before: len(complaints) > before)  # type: ignore[misc]
        assert "permissions violation for subscription" in complaints[-1]
    await connection.close()


async def test_a_request_is_signed_by_the_key_it_names_and_only_that_key_opens_the_answer(
    inviting_space: RealSpace,
) -> None:
    line, key, other = await invited(inviting_space), KeyPair.generate(), KeyPair.generate()
    creds = jwt.credentials(invitation_token(line), line.key)
    connection = await connect(inviting_space.info.url, creds, line.key.id, name="raw", reconnect=False)
    overheard = await connection.subscribe(f"_INBOX_{line.key.id}.>")
    control = ControlClient(connection, Subjects("main"), line.key.id, timeout=30)

    def signed(by: KeyPair, *said: str) -> str:
        return base64.b64encode(by.sign(acceptance(*said))).decode()

    mine = ("main", line.key.id, key.id, "")
    wrong = [
        signed(other, *mine),
        signed(key, "lab", *mine[1:]),
        signed(key, "main", other.id, key.id, ""),
        signed(key, *mine[:3], "carol"),
        "",
        "?",
        base64.b64encode(b"short").decode(),
    ]
    for signature in wrong:
        with pytest.raises(tidings.errors.TidingsError, match=r"signed|needs `sig`"):
            await control.call(RedeemRequest(id=key.id, sig=signature))
    for strange in (line.account, "me", ""):
        with pytest.raises(tidings.errors.UsageError):
            await control.call(RedeemRequest(id=strange, sig=signed(key, *mine)))
    said = await control.call(RedeemRequest(id=key.id, sig=signed(key, *mine)))
    assert b'"name":"bob"' in key.open_sealed(said.sealed)
    heard = b"".join(message.data for message in overheard.waiting())
    assert b'"bob"' not in heard, "in quotes: three letters may occur in what is sealed"
    with pytest.raises(tidings.errors.BadSignature):
        other.open_sealed(said.sealed)
    await connection.close()


async def test_whoever_floods_with_a_line_loses_it(inviting_space: RealSpace) -> None:
    asked = attend(inviting_space)
    line = await invited(inviting_space)
    creds = jwt.credentials(invitation_token(line), line.key)
    connection = await connect(inviting_space.info.url, creds, line.key.id, name="flood", reconnect=False)
    subject = Subjects("main").control("accept", line.key.id)

    with suppress(NatsError, OSError):
        while not any("bar" in each for each in asked):
            for _ in range(1_000):
                await connection.publish(subject, b"{}")
            await asyncio.sleep(0)

    async def is_revoked() -> bool:
        async with inviting_space.administer() as admin:
            known = admin.invitations.get(line.key.id)
            return known is not None and known.revoked

    await eventually(is_revoked, within=30)
    await eventually(lambda: connection.is_closed, within=30)


async def test_one_line_cannot_fill_the_room_of_all_who_were_invited(inviting_space: RealSpace, tmp_path: Path) -> None:
    space, line = inviting_space, await invited(inviting_space)
    cut: list[Any] = []

    async def note(breach: Any) -> None:
        cut.append(breach)

    watcher = Watcher(space.home, cut=note, who=INVITED)
    watching = asyncio.create_task(watcher.keep())
    creds, held = jwt.credentials(invitation_token(line), line.key), []
    try:
        held += [await connect(space.info.url, creds, line.key.id, name="idle", reconnect=False) for _ in range(12)]
        await eventually(lambda: sum(each.is_connected for each in held) <= MOST_INVITED, within=20)
        assert (await accept(machine(tmp_path), await invited(space, name="carol"), "")).name == "carol"
    finally:
        watching.cancel()
        await asyncio.gather(watching, *(each.close() for each in held), return_exceptions=True)


async def test_the_key_of_the_line_is_nobodys_key(inviting_space: RealSpace) -> None:
    line = await invited(inviting_space)
    creds = jwt.credentials(invitation_token(line), line.key)
    connection = await connect(inviting_space.info.url, creds, line.key.id, name="raw", reconnect=False)
    control = ControlClient(connection, Subjects("main"), line.key.id, timeout=30)
    signature = line.key.sign(acceptance("main", line.key.id, line.key.id, ""))
    with pytest.raises(DeniedError, match="known to whoever has its line"):
        await control.call(RedeemRequest(id=line.key.id, sig=base64.b64encode(signature).decode()))
    await connection.close()


async def test_a_name_that_is_promised_is_nobody_elses(inviting_space: RealSpace, tmp_path: Path) -> None:
    line, other = await invited(inviting_space), await invited(inviting_space, name="", uses=2)
    with pytest.raises(NameTaken, match="is promised to somebody else"):
        await accept(machine(tmp_path, "quick"), other, "bob")
    with pytest.raises(NameTaken, match="is promised to somebody else"):
        await invited(inviting_space)
    assert (await accept(machine(tmp_path), line, "")).name == "bob"
    with pytest.raises(NameTaken, match="choose another"):
        await accept(machine(tmp_path, "late"), other, "bob")


@pytest.mark.parametrize("damage", [b"", b"{", b'{"raad": 1}'])
async def test_a_damaged_row_is_read_from_its_other_place_and_stops_nobody(
    inviting_space: RealSpace, tmp_path: Path, damage: bytes
) -> None:
    space = inviting_space
    line, lost = await invited(space), await invited(space, name="carol")
    (space.home.invited / f"{line.key.id}.json").write_bytes(damage)
    for folder in (space.home.invited, space.home.remembered / space.info.id / "invited"):
        (folder / f"{lost.key.id}.json").write_bytes(damage)
    async with space.administer() as admin:
        await admin.push_invitations()
        assert {each.name: each.state(0) for each in admin.invitations.all()} == {"bob": "open", "": "revoked"}
    assert (await accept(machine(tmp_path), line, "")).name == "bob"
    with pytest.raises(AuthRevoked):
        await accept(machine(tmp_path, "other"), lost, "")


async def test_a_key_that_cannot_be_read_is_named_with_what_to_do(inviting_space: RealSpace, tmp_path: Path) -> None:
    line, there = await invited(inviting_space), machine(tmp_path)
    seed = there.home / "accepting" / f"{line.key.id}.json"
    for folder in (there.home, seed.parent):
        folder.mkdir(mode=0o700)
    seed.touch(0o600)
    with pytest.raises(ConfigError, match=f"{seed.name} is damaged: remove it"):
        await accept(there, line, "")


# --- somebody in between ---


@contextmanager
def imposter(files: CertificateFiles) -> Iterator[tuple[int, list[bytes]]]:
    """A TLS server with a certificate of its own; what it hears is kept."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.server, files.server_key)
    heard: list[bytes] = []
    listener = socket.create_server((ELSEWHERE, 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(plain, server_side=True) as wrapped:
                    wrapped.settimeout(5)
                    heard.append(wrapped.recv(4096))
            except OSError:
                continue

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield int(listener.getsockname()[1]), heard
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


async def test_nothing_is_said_to_a_server_of_another_authority(inviting_space: RealSpace, tmp_path: Path) -> None:
    line = await invited(inviting_space)
    forged = CertificateFiles(tmp_path / "forged")
    ensure_certificates(forged, "main")
    with imposter(forged) as (port, heard):
        with pytest.raises(UntrustedServer, match="was told nothing"):
            await accept(machine(tmp_path), replace(line, host=ELSEWHERE, port=port), "")
        await eventually(lambda: bool(heard))
    assert b"".join(heard) == b""
    with pytest.raises(BrokerUnreachable, match="nobody answers"):
        await accept(machine(tmp_path), replace(line, host=ELSEWHERE, port=port), "")
    async with inviting_space.administer() as admin:
        assert admin.ledger.rows() == []
    assert (await accept(machine(tmp_path), line, "")).name == "bob", "the line is as good as it was"


async def test_a_certificate_that_was_copied_without_its_key_is_not_enough(
    inviting_space: RealSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody in between lets the first look through, and answers the connection that follows itself."""
    line = await invited(inviting_space)
    shown = accepting._look(line)
    monkeypatch.setattr(accepting, "_look", lambda _line: shown)
    monkeypatch.setattr(accepting, "ATTEMPTS", 1)
    forged = CertificateFiles(tmp_path / "forged")
    ensure_certificates(forged, "main")
    with imposter(forged) as (port, heard), pytest.raises(UntrustedServer):
        await accept(machine(tmp_path), replace(line, host=ELSEWHERE, port=port), "")
    assert b"".join(heard) == b""


async def test_a_home_that_has_such_an_agent_keeps_it_and_the_place_is_not_lost(
    inviting_space: RealSpace, tmp_path: Path
) -> None:
    there, first = machine(tmp_path), await invited(inviting_space)
    await accept(there, first, "")
    before = there.imported("bob").read_bytes()
    async with inviting_space.administer() as admin:
        await admin.revoke("bob")
    again = await invited(inviting_space)
    with pytest.raises(ConflictError, match="The place is yours, and its bundle is") as refused:
        await accept(there, again, "")
    assert there.imported("bob").read_bytes() == before
    (bundle,) = (there.home / "accepting").glob("*.tidings.json")
    assert bundle.stat().st_mode & 0o077 == 0
    assert f"`tidings agent import {bundle}` puts it into the place of the one here" in str(refused.value)


async def test_a_line_that_replaces_an_agent_is_accepted_where_that_agent_is(
    inviting_space: RealSpace, tmp_path: Path
) -> None:
    there = machine(tmp_path)
    old = await accept(there, await invited(inviting_space), "")
    async with agent(there, channels=["general"]):
        pass
    async with inviting_space.administer() as admin:
        inviter = Inviter(admin)
        _, line = inviter.invite(inviter.replacing("bob", 1), 3_600, reach_of(admin, None))
    said: list[str] = []
    found = await accept(there, line, "", said.append)
    assert (found.name, found.id != old.id, found.path) == ("bob", True, there.imported("bob"))
    async with agent(there) as bob:
        assert list(await bob.memberships()) == ["general"]
    (aside,) = (there.home / "accepting").glob("*.replaced.json")
    assert str(aside) in said[-1]
    assert (aside.stat().st_mode & 0o077, bundle_identity(aside).id) == (0, old.id)
    assert (await accept(there, line, "")).id == found.id, "the same line again"
