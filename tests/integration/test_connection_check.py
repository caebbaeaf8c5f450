"""`doctor connection`: the step that fails is named, in words, and those after it are not tried."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tidings.admin.identity import Identity
from tidings.client import connection_check
from tidings.client.connect import find_identity
from tidings.client.connection_check import check_connection
from tidings.contract.admin import RevokeRequest
from tidings.nats.address import trusting
from tidings.server.certificate_files import CertificateFiles
from tidings.server.certificates import ensure_certificates
from tidings.server.nats_server import free_port
from tidings.util.private_files import write_private
from tidings_testing.real_space import RealSpace, real_space

HERE = "127.0.0.2"


@pytest.fixture(params=[None, HERE], ids=["plain", "tls"])
async def space(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RealSpace]:
    async with real_space(tmp_path / "home", listen=request.param) as found:
        await found.add("ada")
        yield found


async def identity_of(space: RealSpace) -> Identity:
    return await find_identity(space.home.name, "ada", space.home.home)


async def found(identity: Identity, url: str | None = None) -> list[tuple[str, str]]:
    """Each step with its verdict, and the words of the last."""
    steps = [step async for step in check_connection(replace(identity, url=url or identity.url))]
    assert all(bool(step.do) == (step.verdict != "ok") for step in steps), "what is wrong comes with what to do"
    return [(step.what, step.verdict) for step in steps[:-1]] + [(steps[-1].what, steps[-1].said)]


def good(space: RealSpace, *steps: str) -> list[tuple[str, str]]:
    tls = ("TLS",) if space.info.listen else ()
    return [(step, "ok") for step in ("name", "port", *tls, *steps)]


async def test_when_all_is_well_every_step_is(space: RealSpace) -> None:
    steps = await found(await identity_of(space))
    assert steps == [
        *good(space, "greeting", "credential", "steward"),
        ("clock", "this machine's clock and the space's agree"),
    ]


async def test_a_name_or_a_port_that_is_wrong_is_said(space: RealSpace) -> None:
    identity = await identity_of(space)
    assert (await found(identity, url="nats://no-such-name.invalid:4222"))[-1][0] == "name"
    (*before, (what, said)) = await found(identity, url=space.info.url.replace(str(space.info.port), str(free_port())))
    assert (before, what) == ([("name", "ok")], "port")
    assert "nothing listens there" in said


async def test_a_broker_that_is_gone_and_a_steward_that_is_are_told_apart(space: RealSpace) -> None:
    identity = await identity_of(space)
    await space.stop_steward()
    (*before, (what, _)) = await found(identity)
    assert (before, what) == (good(space, "greeting", "credential"), "steward")
    space.broker.stop()
    assert (await found(identity))[-1][0] == "port"
    space.broker.start()


async def test_a_credential_that_was_taken_is_said(space: RealSpace) -> None:
    identity = await identity_of(space)
    kept = identity.path.read_text()
    async with space.administer() as admin:
        await admin.revoke("ada")
    write_private(identity.path, kept)  # as whoever was revoked on another machine still has it
    (*before, (what, said)) = await found(identity)
    assert (before, what) == (good(space, "greeting"), "credential")
    assert "refuses agent ada: revoked" in said


async def test_an_agent_that_is_revoked_and_whose_token_holds_is_told_so(space: RealSpace) -> None:
    identity = await identity_of(space)
    async with space.administer() as admin:
        await admin.call(RevokeRequest(identity.id))
    (*before, (what, said)) = await found(identity)
    assert (before, what) == (good(space, "greeting", "credential"), "steward")
    assert f"the steward refuses agent ada: ada ({identity.id}) was revoked" in said


async def test_a_server_that_stands_still_is_told_from_one_that_is_away(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = await identity_of(space)
    monkeypatch.setattr(connection_check, "PATIENCE", 0.5)
    assert space.broker.pid is not None
    os.kill(space.broker.pid, signal.SIGSTOP)
    try:
        (*before, (what, said)) = await found(identity)
    finally:
        os.kill(space.broker.pid, signal.SIGCONT)
    assert (before, what) == ([("name", "ok"), ("port", "ok")], "greeting")
    assert "is open and says nothing" in said
    assert "it hangs" in said


async def test_what_is_no_nats_server_is_said(space: RealSpace) -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    identity = await identity_of(space)
    steps = await found(identity, url=f"nats://127.0.0.1:{port}")
    assert steps[-1] == ("greeting", f"what listens at 127.0.0.1:{port} is no NATS server")
    if space.info.listen:
        trusted = trusting("127.0.0.1", port, b"", "").partition("?")[0]
        url = f"{trusted}?{space.info.url.partition('?')[2]}"
        assert (await found(identity, url=url))[-1][0] == "TLS"
    server.close()


async def test_a_server_that_is_not_trusted_or_an_address_from_before_is_said(space: RealSpace, tmp_path: Path) -> None:
    if not space.info.listen:
        return
    identity, info = await identity_of(space), space.info
    other = ensure_certificates(CertificateFiles(tmp_path / "other"), "main")
    (*_, (what, said)) = await found(identity, url=trusting(HERE, info.port, other, "main.tidings.internal"))
    assert what == "TLS"
    assert "not by the authority" in said
    (*_, (what, said)) = await found(identity, url=f"nats://{HERE}:{info.port}")
    assert (what, said) == ("greeting", f"{HERE}:{info.port} says nothing: it may want TLS")


@pytest.mark.parametrize(("off", "verdict"), [(90.0, "note"), (-86_400.0, "problem")])
async def test_a_clock_that_is_wrong_is_said(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch, off: float, verdict: str
) -> None:
    identity = await identity_of(space)
    clock = SimpleNamespace(time=lambda: time.time() + off, monotonic=time.monotonic)
    monkeypatch.setattr(connection_check, "time", clock)
    steps = [step async for step in check_connection(identity)]
    assert (steps[-1].what, steps[-1].verdict) == ("clock", verdict)
    assert ("ahead of" if off > 0 else "behind") in steps[-1].said
