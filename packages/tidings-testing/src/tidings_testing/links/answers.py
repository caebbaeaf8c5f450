"""Answers that are none: junk, refusals that pretend, silence, and a flood of wakes."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from typing import Any

from tidings.admin.link_peers import LinkPeers
from tidings.errors import StoreBusy, TidingsError
from tidings.nats import jwt
from tidings.server.keyring import Keyring
from tidings.wire.signing import ACCOUNT, KeyPair
from tidings_testing.links.peer import LINK, Answer, Lie
from tidings_testing.links.stage import LinkStage, lies_refused
from tidings_testing.security.report import Collection, ProbeOutcome, broken, held, refused
from tidings_testing.waiting import eventually

PROBES = Collection()
JUNK: dict[str, bytes] = {
    "nothing": b"",
    "null": b"null",
    "a list": b"[]",
    "a number": b"1",
    "no text": b"\xff\xfe\x00",
    "half of it": b'{"ok":true,"records":[',
    "a deep one": b'{"ok":true,"records":' + b"[" * 200_000,
    "only ok": b'{"ok":true}',
    "ok in words": b'{"ok":"yes"}',
    "much of nothing": b'{"ok":true,"x":"' + b"x" * 900_000 + b'"}',
    "a wrong error": b'{"ok":false,"error":[1]}',
}


@PROBES.probe("L6", "Answer with junk.")
async def junk_answers(stage: LinkStage) -> ProbeOutcome:
    lies: dict[str, Lie] = {name: (lambda _asked, data=data: data) for name, data in JUNK.items()}  # type: ignore[misc]
    found = await lies_refused(stage, "page", lies)
    return refused(f"{len(found)} refused: {found[0][:160]}") if isinstance(found, list) else found


@PROBES.probe("L6", "Refuse in words that are not for people, or under errors that are ours alone.")
async def refusals_that_pretend(stage: LinkStage) -> ProbeOutcome:
    words = "\x1b[2J\r\n\x00 tidings: all is well " + "x" * 5_000

    def refusal(code: str) -> Lie:
        return lambda _asked: _error(code, words)

    lies = {code: refusal(code) for code in (StoreBusy.code, "denied", "conflict", "", "x" * 4_000)}
    found = await lies_refused(stage, "page", lies)
    if not isinstance(found, list):
        return found
    bad = [each for each in found if not each.isprintable() or len(each) > 1_000]
    return broken(f"words of the peer are shown as they are: {bad[0][:100]!r}") if bad else refused(found[0][:200])


def _error(code: str, words: str) -> bytes:
    return json.dumps({"ok": False, "error": {"code": code, "message": words}}).encode()


@PROBES.probe("L6", "Never answer.")
async def no_answer(stage: LinkStage) -> ProbeOutcome:
    found = await lies_refused(stage, "page", {"a page": lambda _asked: None})
    return refused(found[0][:160]) if isinstance(found, list) else found


@PROBES.probe("L6", "Introduce oneself as another space, or as nobody.")
async def another_space_answers(stage: LinkStage) -> ProbeOutcome:
    other = KeyPair.generate(ACCOUNT).id
    lies: dict[str, dict[str, Any]] = {
        "another space": {"space": other},
        "this space": {"space": stage.main.info.id},
        "nobody": {"space": None},
        "an end beyond all": {"head": 2**63},
        "an end below none": {"head": -1},
    }
    said = []
    for name, changes in lies.items():
        await stage.recovers()
        stage.peer.lies["page"] = lambda _asked: b"null"  # after a failure it is asked again who is there
        stage.look()
        first = await eventually(lambda: stage.words, within=4, what="a page is refused")

        told: list[str] = []

        def hello(asked: Answer, name: str = name, changes: dict[str, Any] = changes, told: list[str] = told) -> Answer:
            told.append(name)
            return stage.peer.honest(asked) | changes

        def page(asked: Answer, told: list[str] = told) -> Answer | bytes:
            """Refused until the lie was told: a turn under way, that asked before who is there, would go on with it."""
            return stage.peer.honest(asked) if told else b"null"

        stage.peer.lies = {"hello": hello, "page": page}
        before = await stage.token()
        stage.look()

        def other_words(first: str = first) -> bool:
            return stage.words not in ("", first)

        try:
            await eventually(other_words, within=4)
        except AssertionError:
            return broken(f"{name}: was believed")
        said.append(stage.words)
        if await stage.token() != before:
            return broken(f"{name}: moved the token")
    await stage.recovers()
    return refused(f"{len(said)} refused: {said[0][:160]}")


@PROBES.probe("L6", "Hand out a token of another user, of another key, or junk, as a newer one.")
async def tokens_that_are_not_ours(stage: LinkStage) -> ProbeOutcome:
    path = LinkPeers.below(stage.main.home).creds(LINK)
    before, now = path.read_text(), int(time.time())
    keyring, other = Keyring.load(stage.main.home.keys), KeyPair.generate()
    theirs = keyring.peer_token(stage.peer.subjects, other.id, LINK, iat=now + 10)
    old = jwt.split_credentials(before)[0]
    for token in (theirs, old, "x", "a.b.c", theirs.rsplit(".", 1)[0] + "." + "A" * 86, "x" * 500_000):
        stage.peer.lies["hello"] = lambda asked, token=token: stage.peer.honest(asked) | {"jwt": token}  # type: ignore[misc]
        with suppress(TidingsError):
            await stage.carried.source.hello()
        if path.read_text() != before:
            return broken(f"the credential was replaced by {token[:60]!r}")
    await stage.recovers()
    return held("the credential is what it was")


@PROBES.probe("L6", "Wake it without end.")
async def flood_of_wakes(stage: LinkStage) -> ProbeOutcome:
    await stage.recovers()
    before, started = stage.peer.asked["page"], time.monotonic()
    while time.monotonic() - started < 1:
        await stage.peer.wake(stage.user, 500)
        await asyncio.sleep(0)
    awake = stage.peer.asked["page"] - before
    stage.peer.lies["page"] = lambda _asked: b"null"
    await eventually(lambda: stage.words, within=4, what="a page is refused")
    before, started = stage.peer.asked["page"], time.monotonic()
    while time.monotonic() - started < 1:
        await stage.peer.wake(stage.user, 500)
        await asyncio.sleep(0)
    failing = stage.peer.asked["page"] - before
    await stage.recovers()
    if awake > 60 or failing > 2:
        return broken(f"{awake} questions in a second while it was woken, {failing} while it failed")
    return held(f"{awake} questions in a second while it was woken, {failing} while it failed")
