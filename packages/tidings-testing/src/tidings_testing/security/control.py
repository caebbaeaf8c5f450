"""The control services: nobody administers from an agent's account, nobody gets more than its access says.

Every request is answered, junk too: an unanswered one through an import stays in the broker's memory for good.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from tidings.contract.agents import AccessRequest
from tidings.contract.catalogue import OPERATIONS
from tidings.contract.channels import LeaveRequest
from tidings.errors import DeniedError, UsageError
from tidings.nats import jwt
from tidings.server.grants import ACK_ANSWER
from tidings.steward.fair_queue import MOST_REQUESTS
from tidings.wire.message import new_id
from tidings_testing.raw_requests import raw_call
from tidings_testing.security.actor import PATIENCE, line
from tidings_testing.security.report import Collection, ProbeOutcome, broken, held, refused
from tidings_testing.security.stage import Stage

PROBES = Collection()
ADMIN_VERBS = tuple(each.verb for each in OPERATIONS.values() if each.caller == "admin")
#: what the broker may grow by in a round after the first; an unanswered request costs it about 700 bytes
GROWTH = 8 * 1024 * 1024
PACE = MOST_REQUESTS * 0.9
WINDOW = 500
UNANSWERED_BYTES = 700
LONGEST = 60 * 1_000_000_000


@PROBES.probe("N14", "Send administrative requests: grant itself everything, revoke another, change the space.")
async def administration(stage: Stage) -> ProbeOutcome:
    mal, before = stage.mal.id, await stage.watch.mark()
    wide: dict[str, Any] = {"id": mal, "name": "probe-mal", "read": [">"], "post": [">"], "manage": [">"]}
    for do in ADMIN_VERBS:
        arguments = wide if do == "grant" else {"id": stage.vic.id, "ids": [stage.vic.id], "channels": "listed"}
        body = json.dumps({"op": new_id(), "do": do} | arguments).encode()
        if not await _nobody_answers(stage, stage.subjects.control("admin", mal), body):
            return broken(f"somebody answered admin {do}")
    changed = await stage.unchanged(before)
    return broken(changed) if changed else held(f"{len(ADMIN_VERBS)} requests, nobody answers, nothing changed")


async def _nobody_answers(stage: Stage, subject: str, payload: bytes) -> bool:
    """Does a request stay without any answer but the broker's own?"""
    try:
        said = await stage.mal.request(subject, payload, timeout=0.5)
    except TimeoutError:
        return True
    return not said.data


@PROBES.probe(
    "F1", "Join, look into or configure a channel its access does not name; act for another in the arguments."
)
async def escalation(stage: Stage) -> ProbeOutcome:
    before = await stage.watch.mark()
    other = {"owner": stage.vic.id, "sender": stage.vic.id, "id": stage.vic.id, "from": stage.vic.id}
    attempts: list[tuple[str, str, dict[str, Any]]] = [
        *(("member", "join", {"pattern": p}) for p in (stage.secret, ">", f"{stage.base}.>", "*.*.secret")),
        ("member", "members", {"channel": stage.secret}),
        ("channel", "info", {"channel": stage.secret}),
        ("channel", "set", {"channel": stage.channel, "class": "live"}),
        ("channel", "set", {"channel": stage.secret, "description": "mine"}),
        ("member", "grant", wide_access(stage)),
        ("access", "set", wide_access(stage)),
    ]
    attempts += [(service, do, {**arguments, **other}) for service, do, arguments in attempts]
    attempts += [(*verb, other) for verb in (("member", "list"), ("channel", "list"), ("access", "get"))]
    attempts.append(("member", "leave", {"pattern": stage.secret, **other}))
    for service, do, arguments in attempts:
        try:
            said = await raw_call(stage.mal.control, service, do, **arguments)
        except (DeniedError, UsageError):
            continue
        return broken(f"{service} {do} {arguments} was answered {said}")
    return await _only_its_own(stage, before, len(attempts))


def wide_access(stage: Stage) -> dict[str, Any]:
    return {"id": stage.mal.id, "read": [">"], "post": [">"], "manage": [">"]}


async def _only_its_own(stage: Stage, before: Any, tried: int) -> ProbeOutcome:
    mal = stage.mal.control
    told = json.dumps([await raw_call(mal, "member", "list"), await raw_call(mal, "channel", "list")])
    access = (await mal.call(AccessRequest())).access
    await mal.call(LeaveRequest(stage.secret))
    if stage.secret in told or access.name != "probe-mal":
        return broken("arguments chose whose memberships, channels or access were told")
    changed = await stage.unchanged(before)
    return broken(changed) if changed else refused(f"{tried} refused; what is answered is its own; nothing changed")


def junk(stage: Stage, reply: str) -> Iterator[bytes]:
    """Requests no program of ours would send, over and over."""
    s, mal = stage.subjects, stage.mal.id
    member, nowhere = s.control("member", mal), f"{s.root}.ctl.nosuch.{mal}"
    op = new_id()
    bodies = [
        (nowhere, b"{}"),
        (member, b""),
        (member, b"{not json"),
        (member, b'{"do":"join","pattern":"x"}'),
        (member, b'{"op":"12345678","op":"87654321","do":"list"}'),
        (member, b'{"op":"12345678","do":"list","n":NaN}'),
        (member, b"[" * 5_000),
        (member, b'["a"]'),
        (member, b'{"op":"short","do":"list"}'),
        (member, json.dumps({"op": op, "do": "no such thing"}).encode()),
        (member, json.dumps({"op": op, "do": "join", "pattern": "a..b"}).encode()),
        (member, json.dumps({"op": op, "do": "join", "pattern": {"deep": [1]}}).encode()),
        (member, b"\xff\xfe\x00"),
        (s.control("task", mal), json.dumps({"op": op, "do": "claim"}).encode()),
        (s.control("health", mal), json.dumps({"op": op, "do": "x" * 900}).encode()),
    ]
    giant = line(member, json.dumps({"op": op, "do": "list", "fill": "x" * 100_000}).encode(), reply=reply)
    small = [line(subject, body, reply=reply) for subject, body in bodies]
    yield from cycle([giant, *small * 12])


@PROBES.probe("N23", "Flood the control services with junk until the broker forgets to forget.")
async def junk_requests(stage: Stage) -> ProbeOutcome:
    before, count = await stage.watch.mark(), 7_500 if stage.deep else 1_500
    resident = []
    for _ in range(2):
        answered = await _round(stage, count)
        if answered < count:
            return broken(f"{count - answered} of {count} junk requests were not answered")
        resident.append(_resident(stage))
    if changed := await stage.unchanged(before):
        return broken(changed)
    grown = resident[1] - resident[0]
    if grown > GROWTH:
        return broken(f"the broker grew by {grown / 1e6:.1f} MB over {count} junk requests after the first round")
    said = f"the broker grew by {grown / 1e6:.1f} MB in the second round" if resident[0] else "the broker is not local"
    return held(f"{2 * count} junk requests answered; {said}")


@PROBES.probe("N23", "Send requests that nobody answers, the broker included, until it remembers too many.")
async def unanswered_requests(stage: Stage) -> ProbeOutcome:
    """Every export must say when it forgets; in a deep run, the broker must also be seen to."""
    served = jwt.decode((stage.home.resolver / f"{stage.info.id}.jwt").read_text().strip())["nats"]["exports"]
    services = [each for each in served if each["type"] == "service"]
    endless = [each["subject"] for each in services if not 0 < each.get("response_threshold", 0) <= LONGEST]
    if endless:
        return broken(f"the broker keeps unanswered requests on {', '.join(endless[:3])} for minutes")
    if not stage.deep:
        return held(f"{len(services)} exports, each forgets within a minute")
    before, resident = await stage.watch.mark(), []
    for pause in (2 * ACK_ANSWER + 0.5, 0):  # it looks once per threshold, so it takes up to twice that
        await _unanswered(stage)
        resident.append(_resident(stage))
        await asyncio.sleep(pause)
    if changed := await stage.unchanged(before):
        return broken(changed)
    grown = resident[1] - resident[0]
    said = f"the broker grew by {grown / 1e6:.1f} MB over {stage.flood} unanswered requests after the first round"
    return broken(said) if grown > stage.flood * UNANSWERED_BYTES // 2 else held(said)


async def _unanswered(stage: Stage) -> None:
    """Acknowledge what was never delivered: the broker has nothing to say to that."""
    stream, consumer = stage.watch.mailboxes(stage.mal.id)[0]
    for start in range(0, stage.flood, WINDOW):
        numbers = range(start, start + WINDOW)
        ack = f"$JS.ACK.{stream}.{consumer}.1.{10**9}.1.0"
        await stage.mal.send(
            *(line(f"{ack}.{n}", b"+ACK", reply=f"_INBOX_{stage.mal.id}.unanswered.{n}") for n in numbers)
        )


async def _round(stage: Stage, count: int) -> int:
    """Send `count` requests, a window at a time; answers how many were answered."""
    answered = 0

    async def took(_message: object) -> None:
        nonlocal answered
        answered += 1

    inbox = stage.mal.connection.new_inbox()
    subscription = await stage.mal.connection.subscribe(inbox, cb=took)
    requests = junk(stage, inbox)
    try:
        due = time.monotonic()
        for start in range(0, count, WINDOW):
            size = min(WINDOW, count - start)
            # the steward cuts an agent that asks faster, even after a delay; other tests check that
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due = time.monotonic() + size / PACE
            await stage.mal.send(*islice(requests, size))
            try:
                async with asyncio.timeout(2 * PATIENCE):
                    while answered < start + size:
                        await asyncio.sleep(0.002)
            except TimeoutError:
                break
    finally:
        await subscription.unsubscribe()
    return answered


def _resident(stage: Stage) -> int:
    """Resident bytes of the broker, 0 if it is not a process of this machine."""
    try:
        pid = (stage.home.run / "broker.pid").read_text().strip()
        lines = Path(f"/proc/{int(pid)}/status").read_text().splitlines()
    except (OSError, ValueError):
        return 0
    return next((int(each.split()[1]) * 1024 for each in lines if each.startswith("VmRSS")), 0)
