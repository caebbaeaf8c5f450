"""F17: size. What fits is stored, what does not is refused, and only the connection that sent it may suffer."""

from __future__ import annotations

import asyncio
import json

from tidings.contract.channels import MembershipsRequest
from tidings.server.grants import MAX_MESSAGE
from tidings.wire.envelope import Received, Refused
from tidings.wire.message import MAX_PAYLOAD
from tidings_testing.security.actor import PATIENCE, acting, line
from tidings_testing.security.report import Collection, ProbeOutcome, broken, held, refused
from tidings_testing.security.stage import MAL, Stage

PROBES = Collection()


@PROBES.probe("F17", "Send a message of exactly the largest size, and one just above what a reader takes.")
async def largest(stage: Stage) -> ProbeOutcome:
    s, since = stage.subjects, len(stage.heard)
    empty = len(stage.signed(stage.mal, stage.channel, "")[0])
    fits, headers = stage.signed(stage.mal, stage.channel, "x" * (MAX_PAYLOAD - empty))
    subject = s.chat(stage.mal.id, stage.channel)
    said = await stage.mal.request(subject, fits, headers=headers)
    over = await stage.mal.request(subject, b"x" * (MAX_PAYLOAD + 1), headers=headers)
    if len(fits) != MAX_PAYLOAD or "seq" not in json.loads(said.data):
        return broken(f"a message of {len(fits)} bytes was answered {said.data[:120]!r}")
    heard = {len(each.data): stage.opened(each) for each in (await stage.barrier())[since:]}
    above = heard.get(MAX_PAYLOAD + 1)
    if not isinstance(heard.get(MAX_PAYLOAD), Received):
        return broken(f"a message of {MAX_PAYLOAD} bytes is not surfaced: {heard.get(MAX_PAYLOAD)}")
    if not isinstance(above, Refused) or above.reason != "too_large":
        return broken(f"one byte more is not refused as too large by readers: {above} ({over.data[:80]!r})")
    return held(f"{MAX_PAYLOAD} bytes surfaced; one byte more is dropped by readers as too large")


@PROBES.probe("F17", "Send more than the broker takes: in the payload, in the headers, far beyond, and without end.")
async def oversize(stage: Stage) -> ProbeOutcome:
    subject, before = stage.subjects.chat(stage.mal.id, stage.channel), await stage.watch.mark()
    attempts = {
        "264 KiB and a byte": line(subject, b"x" * (MAX_MESSAGE + 1)),
        "300 KB of headers": line(subject, stage.marked(), headers=[("X-Fill", "x" * 300_000)]),
        "1 MiB and a byte": line(subject, b"x" * (1024 * 1024 + 1)),
        "a size line of 2 GB": b"PUB %b 2147483647\r\n" % subject.encode(),
        "a control line of 100 KB": b"PUB %b 1\r\n" % (b"x" * 100_000),
    }
    last = (await stage.js.info(stage.subjects.log_stream))["state"]["last_seq"]
    for name, attempt in attempts.items():
        if not await _is_cut(stage, attempt):
            return broken(f"{name}: neither refused nor cut")
    stored = await _stored_since(stage, last)
    await stage.vic.control.call(MembershipsRequest())
    await stage.barrier()
    changed = await stage.unchanged(before)
    if changed or stored:
        return broken(changed or f"{stored} oversized chats were stored")
    return refused(f"{len(attempts)} refused and cut; the agent's other connection and the victim's go on")


async def _is_cut(stage: Stage, attempt: bytes) -> bool:
    async with acting(stage.info.url, stage.subjects, stage.home.agent_creds(MAL)) as another:
        try:
            await another.throw(attempt)
            await asyncio.wait_for(another.closed.wait(), PATIENCE)
        except TimeoutError:
            return False
        return True


async def _stored_since(stage: Stage, last: int) -> int:
    s = stage.subjects
    head = (await stage.js.info(s.log_stream))["state"]["last_seq"]
    own = stage.js.read(s.log_stream, f"{s.root}.chat.{stage.mal.id}.>", last + 1, head)
    return sum([len(page) async for page in own])
