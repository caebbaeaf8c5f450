"""Sealed blocks: an agent gets the one whose name it has from a frame, and nothing of any other.

A direct get takes wildcards in its subject, and wishes in its body; each form is tried, against a block whose name the
attacker does not know. What it may know is told as known: whoever names a block can have it sent to a live subject.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from tidings.nats.client import status_of
from tidings.nats.jetstream_api import NO_END
from tidings.wire.envelope import Received
from tidings.wire.subjects import block_shard
from tidings_testing.security.actor import line
from tidings_testing.security.report import Collection, ProbeOutcome, broken, held, known
from tidings_testing.security.stage import Stage

PROBES = Collection()
KNOWN_BLOCK_STRAYS = (
    "An agent that has the name of a sealed block from a frame of its own can have it sent to a live subject, where "
    "other agents read and drop it: up to 304 KiB to each for a request of 200 bytes. It opens nothing without its "
    "key; how often, is bounded by what an agent may send and by nothing else."
)
UNKNOWN = "0" * 40
BODIES = (
    b"",
    b"{}",
    b"null",
    b"nonsense",
    b"[1]",
    b'{"no_hdr":true}',
    b'{"seq":1}',
    b'{"batch":5}',
    b'{"seq":1,"batch":5}',
    b'{"max_bytes":1000000}',
    b'{"start_time":"2020-01-01T00:00:00Z"}',
    b'{"up_to_seq":1000000}',
    b'{"up_to_time":"2100-01-01T00:00:00Z"}',
    b'{"last_by_subj":"%b.>"}',
    b'{"next_by_subj":"%b.>"}',
    b'{"seq":1,"next_by_subj":"%b.>"}',
    b'{"multi_last":["%b.>"]}',
    b'{"multi_last":["%b.>"],"batch":5}',
)


def _bodies(stage: Stage) -> list[bytes]:
    blocks = f"{stage.subjects.root}.blk".encode()
    return [body % blocks if b"%b" in body else body for body in BODIES]


def _wild(stage: Stage) -> tuple[list[str], list[str]]:
    """Subjects that could cover a block without its name: those an agent may ask, and those it may not."""
    s, shard, name = stage.subjects, str(block_shard(stage.block)), stage.block
    get = f"$JS.API.DIRECT.GET.{s.block_stream}"
    asked = [f"{get}.{s.root}.blk.{a}.{b}.b" for a, b in product((shard, "1", "*", ">"), ("*", ">"))]
    tails = ["", ".>", ".*", ".*.>", ".*.*", ".*.*.>", ".*.*.*", f".{shard}.>", f".{shard}.*", f".{shard}.*.*"]
    tails += [f".{shard}.*.>", f".{shard}.{name}", f".{shard}.{name}.>", f".{shard}.{name}.*", f".{shard}.{name}.b.b"]
    refused = [f"{get}.{s.root}.blk{tail}" for tail in tails]
    refused += [get, f"{get}.>", f"{get}.*", f"{get}.td.>", f"{get}.{s.root}.>", f"{get}.{s.root}.*.*.*.b"]
    return asked, refused


def _is_leak(answer: Any) -> bool:
    """Anything but the broker's word that there is nothing, or that this is no request."""
    status = status_of(answer)
    return status is None or status.status not in (404, 408) or bool(answer.data)


@PROBES.probe("F26", "Ask for sealed blocks without the name of one: wildcards, sequences, batches, times.")
async def unnamed_blocks(stage: Stage) -> ProbeOutcome:
    before, (asked, refused) = await stage.watch.mark(), _wild(stage)
    allowed = await stage.mal.not_refused(
        {each: line(each, b"", reply=f"_INBOX_{stage.mal.id}.probe") for each in refused}
    )
    if allowed:
        return broken(f"not refused: {', '.join(allowed[:5])}")
    asked += [stage.subjects.block_get(UNKNOWN)]
    for subject, body in product(asked, _bodies(stage)):
        answer = await stage.mal.request(subject, body)
        if _is_leak(answer):
            return broken(f"{subject} with {body!r} answers {bytes(answer.block + answer.data)[:200]!r}")
    if changed := await stage.unchanged(before):
        return broken(changed)
    return held(f"{len(refused)} refused; {len(asked)} subjects with {len(BODIES)} bodies answer nothing")


@PROBES.probe("F26", "Ask for a sealed block by its name, and in the body for others.")
async def named_block(stage: Stage) -> ProbeOutcome:
    other = f"sealed {stage.base} other".encode()
    name = UNKNOWN[:-1] + "1"
    await stage.js.publish(stage.subjects.block(name), other)
    try:
        for body in _bodies(stage):
            answer = await stage.mal.request(stage.subjects.block_get(stage.block), body)
            if _is_leak(answer) and answer.data != stage.sealed:
                return broken(f"{body!r} answers {bytes(answer.block + answer.data)[:200]!r}")
        got = await stage.mal.request(stage.subjects.block_get(stage.block))
        lied = stage.subjects.block_get(stage.block).replace(f".{block_shard(stage.block)}.", ".7.")
        again = await stage.mal.request(lied)
    finally:
        await stage.js.purge(stage.subjects.block_stream, subject_filter=stage.subjects.block(name), below=NO_END)
    if got.data != stage.sealed or again.data != stage.sealed:
        return broken("the block that was named did not come, or not under the shard that the broker computes")
    return held(f"{len(BODIES)} bodies answer the named block or nothing")


@PROBES.probe("S2", "Have a sealed block sent to a live subject.")
async def stray_blocks(stage: Stage) -> ProbeOutcome:
    before, since = await stage.watch.mark(), len(stage.heard)
    aimed = f"{stage.subjects.root}.live.chat.{stage.vic.id}.{stage.channel}"
    await stage.mal.send(line(stage.subjects.block_get(stage.block), b"", reply=aimed))
    await stage.mal.request(stage.subjects.block_get(stage.block))
    strays = [each for each in (await stage.barrier())[since:] if each.subject == aimed]
    if changed := await stage.unchanged(before):
        return broken(changed)
    if any(isinstance(stage.opened(each), Received) for each in strays):
        return broken("a stray block passes for a message")
    return known(KNOWN_BLOCK_STRAYS) if strays else held("no stray arrived")
