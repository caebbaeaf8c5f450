"""F1, F14: every call of an agent that is answered, with the answer aimed at every subject it could hurt.

A reply subject is never checked by the broker. What protects a space is that an answer across a service import is
resolved in the account without streams, so each combination is tried: what must not happen is not left to argument.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tidings.contract.catalogue import services_of
from tidings.errors import TidingsError
from tidings.nats.errors import NatsError
from tidings.nats.jetstream_api import NO_END
from tidings.wire.envelope import Received
from tidings.wire.message import new_id
from tidings_testing.security.actor import line
from tidings_testing.security.report import Probe, ProbeOutcome, broken, held, known
from tidings_testing.security.stage import Stage

#: pulls that may wait at one consumer at a time
WAITING = 24
#: seconds for one answer of our own; an attack that worked may have taken away whoever would give it
SETTLED = 3.0
KNOWN_STRAYS = (
    "An agent can aim the answers to its own requests at a live subject, where other agents see them: such a stray has "
    "no signature and no sequence of the log, so readers drop it; a reader of `td.S.live.roster` must demand the "
    "steward's signature for the same reason."
)


def targets(stage: Stage) -> list[str]:
    """Every subject an answer must not reach."""
    s, mal, vic = stage.subjects, stage.mal.id, stage.vic.id
    streams = (*stage.watch.streams, stage.watch.state_stream)
    tag = "A" * 26
    api = [f"$JS.API.STREAM.{verb}.{name}" for verb in ("UPDATE", "PURGE", "DELETE") for name in streams]
    boxes = [f"{name}.{consumer}" for name, consumer in stage.watch.mailboxes(vic)]
    consumers = [f"$JS.API.CONSUMER.{verb}.{box}" for verb in ("MSG.NEXT", "RESET", "DELETE") for box in boxes]
    acks = [f"$JS.ACK.{box}.1.{seq}.1.0.0" for box, seq in zip(boxes, (stage.frame, stage.direct), strict=True)]
    rulings = [s.member(vic, tag), s.member(mal, tag), s.access(vic), s.access(mal), s.channel(tag), s.link("probe")]
    traffic = [
        s.chat(vic, stage.channel),
        s.via("probe", vic, stage.channel),
        s.direct(mal, vic),
        s.direct(vic, vic),
        s.task(stage.role, vic),
        s.delivery(vic),
        s.delivery_lease,
        s.audit("probe"),
        s.dead("probe", "probe"),
        s.block(stage.block),
        s.block_get(stage.block),
        f"{s.root}.live.chat.{vic}.{stage.channel}",
        s.live_roster,
    ]
    control = [s.control("member", vic), s.control("admin", vic), s.control("admin", mal)]
    state = [f"$KV.{s.state_bucket}.{key}" for key in ("beat.steward", "floor.deliver", "floor.log")]
    system = ["$SYS.REQ.CLAIMS.UPDATE", "$SYS.REQ.CLAIMS.DELETE", "$SYS.REQ.SERVER.PING"]
    inboxes = [f"_INBOX_{vic}.probe", f"_INBOX_{vic}.>", f"_INBOX_{vic}.*.*", "_R_.probe"]
    ruling = [*rulings, s.steward_lease, s.space_record]
    return [*ruling, *traffic, *control, *state, *system, *inboxes, *acks, *consumers, *api]


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is answered. `prepare` makes what a chunk of calls needs, `finish` takes it away again."""

    name: str
    title: str
    make: Callable[[Stage, str], bytes]
    chunk: int = 1_000
    prepare: Callable[[Stage, int], Awaitable[list[int]]] | None = None
    finish: Callable[[Stage, list[int]], Awaitable[None]] | None = None


def _dm(stage: Stage, reply: str) -> bytes:
    return line(stage.subjects.direct(stage.mal.id, stage.mal.id), stage.marked(), reply=reply)


def _task(stage: Stage, reply: str) -> bytes:
    return line(stage.subjects.task(stage.role, stage.mal.id), stage.marked(), reply=reply)


def _block(stage: Stage, reply: str) -> bytes:
    return line(stage.subjects.block_get(stage.block), b"", reply=reply)


def _no_block(stage: Stage, reply: str) -> bytes:
    return line(stage.subjects.block_get("0" * 40), b"", reply=reply)


def _ctl(service: str) -> Callable[[Stage, str], bytes]:
    def make(stage: Stage, reply: str) -> bytes:
        do = "list" if service == "member" else f"probe {stage.nonce}"
        body = json.dumps({"op": new_id(), "do": do}).encode()
        return line(stage.subjects.control(service, stage.mal.id), body, reply=reply)

    return make


def _pull(box: int, request: bytes) -> Callable[[Stage, str], bytes]:
    def make(stage: Stage, reply: str) -> bytes:
        stream, consumer = stage.watch.mailboxes(stage.mal.id)[box]
        return line(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", request, reply=reply)

    return make


def _ack(box: int, word: bytes) -> Callable[[Stage, str], bytes]:
    def make(stage: Stage, reply: str) -> bytes:
        return line(stage.held[box], word, reply=reply)

    return make


def _hold(box: int) -> Callable[[Stage, int], Awaitable[list[int]]]:
    """Pull one message of its own: only what was delivered has an acknowledgement that is answered."""

    async def hold(stage: Stage, _count: int) -> list[int]:
        seqs = await _fill(box)(stage, 1)
        stage.held[box] = (await stage.mal.pull(stage.watch.mailboxes(stage.mal.id)[box], wait=True)).reply
        return seqs

    return hold


def _fill(box: int) -> Callable[[Stage, int], Awaitable[list[int]]]:
    """Put messages into the attacker's own mailbox: what it will route elsewhere is all its own words."""

    async def fill(stage: Stage, count: int) -> list[int]:
        s, mal = stage.subjects, stage.mal
        payload, headers = stage.signed(mal, stage.channel, "routed")
        subject = (s.delivery(mal.id), s.direct(mal.id, mal.id))[box]
        return [await stage.js.publish(subject, payload, dict(headers)) for _ in range(count)]

    return fill


def _settle(box: int) -> Callable[[Stage, list[int]], Awaitable[None]]:
    """Acknowledge what was pulled, whichever it was: the answers went elsewhere. The rest is taken away."""

    async def settle(stage: Stage, seqs: list[int]) -> None:
        stream, consumer = stage.watch.mailboxes(stage.mal.id)[box]
        info = await stage.js.api(f"CONSUMER.INFO.{stream}.{consumer}")
        counts = range(info["ack_floor"]["consumer_seq"] + 1, info["delivered"]["consumer_seq"] + 1)
        pairs = ((seq, count) for seq in seqs for count in counts)
        await stage.mal.send(*(line(f"$JS.ACK.{stream}.{consumer}.1.{seq}.{n}.0.0", b"+ACK") for seq, n in pairs))
        await stage.js.purge(stream, subject_filter=info["config"]["filter_subject"], below=NO_END)

    return settle


NO_WAIT = b'{"batch":1,"no_wait":true}'
EXPIRES = b'{"batch":1,"expires":15000000}'
CALLS = [
    Call("chat", "a chat", lambda stage, reply: stage.chat(reply=reply)),
    Call(
        "refused_chat",
        "a chat the log refuses",
        lambda stage, reply: stage.chat(reply=reply, headers=[("Nats-Expected-Stream", "NOPE")]),
    ),
    Call("empty_pull", "an empty pull (404) of its own frames", _pull(0, NO_WAIT)),
    Call("empty_pull_direct", "an empty pull (404) of its own direct messages", _pull(1, NO_WAIT)),
    Call("expired_pull", "a pull of its own frames that expires (408)", _pull(0, EXPIRES), WAITING),
    Call("expired_pull_direct", "a pull of its own direct messages that expires (408)", _pull(1, EXPIRES), WAITING),
    Call("bad_pull", "a pull request that is not one (400)", _pull(0, b'{"batch":-1,"expires":"x"}')),
    Call("frame_pull", "a pull that delivers a frame", _pull(0, NO_WAIT), 3, _fill(0), _settle(0)),
    Call("direct_pull", "a pull that delivers a direct message", _pull(1, NO_WAIT), WAITING, _fill(1), _settle(1)),
    Call("ack", "an acknowledgement of a frame", _ack(0, b"+ACK"), 1_000, _hold(0), _settle(0)),
    Call("ack_direct", "an acknowledgement of a direct message", _ack(1, b"+ACK"), 1_000, _hold(1), _settle(1)),
    Call("progress", "a request for more time with a frame", _ack(0, b"+WPI"), 1_000, _hold(0), _settle(0)),
    Call("ack_next", "a request for the next frame", _ack(0, b"+NXT " + NO_WAIT), 1_000, _hold(0), _settle(0)),
    Call("dm", "a direct message", _dm),
    Call("task", "a task", _task),
    Call("block", "a request for a sealed block", _block),
    Call("no_block", "a request for a block that is not there (404)", _no_block),
    *(Call(f"ctl_{service}", f"a `{service}` control request", _ctl(service)) for service in services_of("agent")),
]


def _probe(call: Call) -> Probe:
    async def run(stage: Stage) -> ProbeOutcome:
        return await _attack(stage, call)

    title = f"Aim the answer to {call.title} at the API, rulings, mailboxes, traffic and inboxes of others."
    return Probe(f"reply_of_{call.name}", "F14" if call.name == "chat" else "F1", title, run)


async def _attack(stage: Stage, call: Call) -> ProbeOutcome:
    before, since = await stage.watch.mark(), len(stage.heard)
    aimed, trouble = targets(stage), ""
    try:
        for start in range(0, len(aimed), call.chunk):
            await _fire(stage, call, aimed[start : start + call.chunk])
        strays = (await stage.barrier())[since:]
    except (NatsError, TidingsError, TimeoutError, OSError) as error:
        strays, trouble = [], f"the probe could not finish ({type(error).__name__}: {error})"
    changed = await stage.unchanged(before)
    if changed or trouble:
        return broken(" ".join(filter(None, (changed, trouble))))
    forged = [each for each in strays if isinstance(stage.opened(each), Received)]
    if forged:
        return broken(f"{len(forged)} answers pass for messages at the victim, the first on {forged[0].subject}")
    return held(f"{len(aimed)} targets, nothing changed, {len(strays)} strays dropped by the reader")


async def _fire(stage: Stage, call: Call, aimed: list[str]) -> None:
    """One chunk, then the same call with a reply of our own: once that is answered, so are those before it."""
    made = await call.prepare(stage, len(aimed) + 1) if call.prepare else []
    await stage.mal.send(*(call.make(stage, target) for target in aimed))
    await stage.mal.ask(lambda inbox: call.make(stage, inbox), timeout=SETTLED)
    if call.finish:
        await call.finish(stage, made)


async def stray_answers(stage: Stage) -> ProbeOutcome:
    before, since = await stage.watch.mark(), len(stage.heard)
    s, vic = stage.subjects, stage.vic.id
    forged = f"{s.root}.live.chat.{vic}.{stage.channel}"
    await stage.mal.send(*(_ctl("member")(stage, target) for target in (forged, s.live_roster)))
    await stage.mal.ask(lambda inbox: _ctl("member")(stage, inbox))
    strays = (await stage.barrier())[since:]
    if changed := await stage.unchanged(before):
        return broken(changed)
    if any(isinstance(stage.opened(each), Received) for each in strays):
        return broken("a stray answer passes for a message")
    return known(KNOWN_STRAYS) if _on(strays, forged, s.live_roster) else held("no stray arrived")


def _on(messages: list[Any], *subjects: str) -> bool:
    return any(each.subject in subjects for each in messages)


PROBES = [
    Probe("stray_answers", "S2", "Show other agents an answer as if it were live traffic.", stray_answers),
    *(_probe(call) for call in CALLS),
]
