"""Mailboxes of others: pulled from, acknowledged, guessed at, or emptied through one's own."""

from __future__ import annotations

from tidings_testing.security.actor import line
from tidings_testing.security.report import Collection, ProbeOutcome, broken, held, refused
from tidings_testing.security.stage import Stage

PROBES = Collection()
WORDS = (b"+ACK", b"", b"-NAK", b"+WPI", b"+TERM", b'+NXT {"batch":1,"no_wait":true}')


async def _refused(stage: Stage, attempts: dict[str, bytes]) -> ProbeOutcome:
    before = await stage.watch.mark()
    allowed = await stage.mal.not_refused(attempts)
    changed = await stage.unchanged(before)
    if allowed or changed:
        return broken("; ".join(filter(None, (f"not refused: {', '.join(allowed[:3])}" * bool(allowed), changed))))
    return refused(f"{len(attempts)} refused, nothing changed")


@PROBES.probe("F1", "Pull the frames or direct messages of another agent.")
async def pull_of_another(stage: Stage) -> ProbeOutcome:
    boxes = stage.watch.mailboxes(stage.vic.id)
    names = [f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}" for stream, consumer in boxes]
    reply = f"_INBOX_{stage.mal.id}.probe"
    attempts = {name: line(name, b'{"batch":1,"no_wait":true}', reply=reply) for name in names}
    return await _refused(stage, attempts)


@PROBES.probe(
    "F24", "Acknowledge, refuse or end what another agent or a task's holder has pulled, by guessed subjects."
)
async def ack_of_another(stage: Stage) -> ProbeOutcome:
    s, tails = stage.subjects, []
    for (stream, consumer), seq in zip(stage.watch.mailboxes(stage.vic.id), (stage.frame, stage.direct), strict=True):
        tails += [f"{stream}.{consumer}.{count}.{seq}.{count}.0.0" for count in (1, 2)]
        tails += [f"_.{stage.info.id}.{stream}.{consumer}.1.{seq}.1.0.0", f"hub.x.{stream}.{consumer}.1.{seq}.1.0.0.x"]
    tails += [f"{s.task_stream}.{stage.role}.1.{seq}.1.0.0" for seq in (1, 2)]
    tails += [f"{stream}.probe.1.1.1.0.0" for stream in (s.log_stream, s.audit_stream, s.dead_stream)]
    for word in WORDS:
        verdict = await _refused(stage, {f"$JS.ACK.{tail}": line(f"$JS.ACK.{tail}", word) for tail in tails})
        if verdict.outcome == "BROKEN":
            return verdict
    return refused(f"{len(tails) * len(WORDS)} refused, nothing changed")


@PROBES.probe("F24", "Acknowledge the sequences of another's frame and direct message through its own mailbox.")
async def ack_through_own(stage: Stage) -> ProbeOutcome:
    before = await stage.watch.mark()
    lines = []
    for (stream, consumer), seq in zip(stage.watch.mailboxes(stage.mal.id), (stage.frame, stage.direct), strict=True):
        lines += [line(f"$JS.ACK.{stream}.{consumer}.1.{seq}.{n}.0.0", w) for w in WORDS for n in (0, 1, 2)]
    await stage.mal.send(*lines)
    await _settled(stage)
    changed = await stage.unchanged(before)
    return broken(changed) if changed else held(f"{len(lines)} acknowledgements of sequences of others changed nothing")


@PROBES.probe("F24", "Acknowledge sequences that do not exist yet, so that later frames vanish.")
async def ack_ahead(stage: Stage) -> ProbeOutcome:
    s, mal = stage.subjects, stage.mal.id
    stream, consumer = stage.watch.mailboxes(mal)[0]
    last = (await stage.js.info(stream))["state"]["last_seq"]
    await stage.mal.send(*(line(f"$JS.ACK.{stream}.{consumer}.1.{last + n}.{n}.0.0", b"+ACK") for n in range(1, 20)))
    await _settled(stage)
    stage.frame = await stage.js.publish(s.delivery(stage.vic.id), b"a later frame for the victim")
    kept = await stage.js.at(stream, stage.frame)
    if kept is None:
        return broken(f"frame {stage.frame} vanished: it had been acknowledged before it existed")
    got = await stage.vic.pull((stream, f"dlv_{stage.vic.id}"), wait=True)
    arrived = got.data == b"a later frame for the victim"
    return held(f"frame {stage.frame} arrived") if arrived else broken(f"the victim got {got.data[:60]!r} instead")


async def _settled(stage: Stage) -> None:
    """Once a pull of its own is answered, the acknowledgements sent before it have been worked off."""
    for mailbox in stage.watch.mailboxes(stage.mal.id):
        await stage.mal.pull(mailbox)
