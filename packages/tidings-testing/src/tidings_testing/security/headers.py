"""Headers and subjects as weapons: expectations as an oracle, tricks of the log, forged metadata, hostile bytes."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import msgspec

from tidings.contract.agents import HealthRequest
from tidings.nats.jetstream_api import EXPECT_SEQUENCE, EXPECT_SUBJECT
from tidings.wire.envelope import Received, Refused
from tidings.wire.records import Field
from tidings.wire.subjects import is_tag, tag
from tidings_testing.security.actor import line
from tidings_testing.security.replies import targets
from tidings_testing.security.report import Collection, ProbeOutcome, broken, held, known, refused
from tidings_testing.security.stage import VIC, Stage

PROBES = Collection()
KNOWN_MEMBERSHIPS = (
    "An agent that knows another agent's id can learn when that agent's memberships or access last changed, as a "
    "sequence of the log, but not which channels they are."
)
KNOWN_TRAFFIC = (
    "An agent that guesses the name of a channel can learn whether and at which sequence it last had a message, and "
    "who sent it if it also knows the sender's id; it cannot read it."
)
KNOWN_PAIRS = (
    "An agent that knows two ids can learn whether and at which sequence one last sent the other a direct message; it "
    "cannot read it."
)
KNOWN_IDS = (
    "An agent that may publish can learn the id of the newest message of the log, of direct messages and of tasks, and "
    "so when something was sent; the id names neither sender nor content."
)
KNOWN_RULINGS = (
    "An agent can learn at which sequence the steward's lease and the settings of the space were last written."
)
KNOWN_HEALTH = (
    "Every agent may ask for the health of the space: how many messages, bytes and agents there are, how far the "
    "log is and which process holds the lease on which host; it names no channel, but roles that have tasks, and of "
    "agents those whose posting is withheld or is to be, those who fill a stream that is full, and, after an older "
    "copy was put back, those of whom something was decided since (revoked, other access, a new key)."
)


async def _asked(stage: Stage, subject: str, *, direct: bool = False) -> int:
    """The last sequence of a subject or pattern, as the broker tells anyone who expects a wrong one."""
    s, mal = stage.subjects, stage.mal.id
    through = s.direct(mal, mal) if direct else s.chat(mal, stage.channel)
    headers = [(EXPECT_SEQUENCE, "999999999999"), (EXPECT_SUBJECT, subject)]
    said = await stage.mal.request(through, stage.marked(), headers=headers)
    found = re.search(r"wrong last sequence: (\d+)", said.data.decode())
    if found is None:
        raise ValueError(f"the broker answered {said.data[:200]!r}")
    return int(found[1])


@PROBES.probe("N5", "Spell the subject of a membership or channel record and ask for its last sequence.")
async def spelled_names(stage: Stage) -> ProbeOutcome:
    s, vic, names = stage.subjects, stage.vic.id, (stage.secret, f"{stage.base}.>")
    guesses = [tag(secret, name) for secret in (b"", b"\0" * 32, os.urandom(32), s.space.encode()) for name in names]
    tails = [*names, *guesses, *(name.replace(".", "-") for name in names)]
    spelled = [f"{s.root}.member.{vic}.{each}" for each in tails[1:] if ">" not in each]
    spelled += [f"{s.root}.channel.{each}" for each in tails if ">" not in each]
    before = await stage.watch.mark()
    told = [subject for subject in spelled if await _asked(stage, subject)]
    if changed := await stage.unchanged(before):
        return broken(changed)
    return broken(f"the broker told about {told[0]}") if told else held(f"{len(spelled)} guesses, each answered 0")


@PROBES.probe("F18", "Find a wildcard or a name in the subject of a ruling record.")
async def tags_only(stage: Stage) -> ProbeOutcome:
    s = stage.subjects
    filters = {f"{s.root}.member.{stage.vic.id}.>": 4, f"{s.root}.channel.>": 3}
    seen = 0
    for subject_filter, at in filters.items():
        head = (await stage.js.info(s.log_stream))["state"]["last_seq"]
        async for page in stage.js.read(s.log_stream, subject_filter, 1, head):
            wrong = [each.subject for each in page if not is_tag(each.subject.split(".", at)[-1])]
            if wrong:
                return broken(f"{wrong[0]} is not a tag")
            seen += len(page)
    return (
        held(f"{seen} records, each named by a tag of 26 characters") if seen else broken("no ruling record to look at")
    )


async def _pinned(stage: Stage, sentence: str, subject: str, *, direct: bool = False) -> ProbeOutcome:
    before = await stage.watch.mark()
    told = await _asked(stage, subject, direct=direct)
    if changed := await stage.unchanged(before):
        return broken(changed)
    return known(sentence) if told else held("the broker answered 0")


@PROBES.probe("N5", "Ask when the memberships of another agent last changed.")
async def membership_times(stage: Stage) -> ProbeOutcome:
    return await _pinned(stage, KNOWN_MEMBERSHIPS, f"{stage.subjects.root}.member.{stage.vic.id}.>")


@PROBES.probe("N5", "Ask when the access of another agent last changed.")
async def access_times(stage: Stage) -> ProbeOutcome:
    return await _pinned(stage, KNOWN_MEMBERSHIPS, stage.subjects.access(stage.vic.id))


@PROBES.probe("N5", "Ask when a guessed channel it may not read last had traffic.")
async def channel_traffic(stage: Stage) -> ProbeOutcome:
    s = stage.subjects
    payload, headers = stage.signed(stage.vic, stage.secret, "secret")
    # acknowledged, so that the log has it before the state of the space is taken down
    await stage.vic.request(s.chat(stage.vic.id, stage.secret), payload, headers=headers)
    return await _pinned(stage, KNOWN_TRAFFIC, f"{s.root}.chat.*.{stage.secret}")


@PROBES.probe("N5", "Ask whether two other agents exchange direct messages.")
async def direct_pairs(stage: Stage) -> ProbeOutcome:
    vic = stage.vic.id
    return await _pinned(stage, KNOWN_PAIRS, stage.subjects.direct(vic, vic), direct=True)


@PROBES.probe("N5", "Ask for the id of the newest message of others.")
async def newest_ids(stage: Stage) -> ProbeOutcome:
    if stage.js.replicated:
        return held("not tried: the header that asks stops a stream with replicas, as docs/scale.md says")
    s = stage.subjects
    payload, headers = stage.signed(stage.vic, stage.secret, "secret")
    newest = [("Nats-Msg-Id", os.urandom(8).hex())]
    await stage.vic.request(s.chat(stage.vic.id, stage.secret), payload, headers=[*headers, *newest])
    asks = [("Nats-Expected-Last-Msg-Id", "nope")]
    before = await stage.watch.mark()
    said = await stage.mal.request(s.chat(stage.mal.id, stage.channel), stage.marked(), headers=asks)
    if changed := await stage.unchanged(before):
        return broken(changed)
    return known(KNOWN_IDS) if newest[0][1] in said.data.decode() else held("the broker named no id")


@PROBES.probe("N5", "Ask the steward for the health of the space and look for names in it.")
async def health_facts(stage: Stage) -> ProbeOutcome:
    told = msgspec.json.encode(await stage.mal.control.call(HealthRequest())).decode()
    names = [name for name in (stage.secret, stage.base, stage.vic.id, VIC) if name in told]
    return broken(f"health tells {names}") if names else known(KNOWN_HEALTH)


@PROBES.probe("N5", "Ask when the lease and the settings of the space were last written.")
async def ruling_times(stage: Stage) -> ProbeOutcome:
    return await _pinned(stage, KNOWN_RULINGS, stage.subjects.steward_lease)


FIRST_USE = "first use of an id"
TRICKS: dict[str, list[Field]] = {
    "wrong stream": [("Nats-Expected-Stream", "NOPE")],
    "wrong sequence": [("Nats-Expected-Last-Sequence", "1")],
    "wrong subject sequence": [("Nats-Expected-Last-Subject-Sequence", "999999999")],
    "wrong message id": [("Nats-Expected-Last-Msg-Id", "nope")],
    "ttl": [("Nats-TTL", "1s")],
    "ttl for ever": [("Nats-TTL", "never")],
    "bad ttl": [("Nats-TTL", "nope")],
    "rollup all": [("Nats-Rollup", "all")],
    "rollup subject": [("Nats-Rollup", "sub")],
    "schedule": [("Nats-Schedule", "@every 1s"), ("Nats-Schedule-Target", "td.probe")],
    "batch": [("Nats-Batch-Id", "probe"), ("Nats-Batch-Sequence", "1")],
    "batch commit": [("Nats-Batch-Id", "probe"), ("Nats-Batch-Sequence", "1"), ("Nats-Batch-Commit", "1")],
    "counter": [("Nats-Incr", "1")],
    "required level": [("Nats-Required-Api-Level", "999")],
    "marker": [("Nats-Marker-Reason", "MaxAge")],
    "source": [("Nats-Stream-Source", "NOPE 1")],
    "kv delete": [("KV-Operation", "PURGE")],
}


@PROBES.probe("F3", "Use the log's own headers to be seen without being stored, or to remove what is stored.")
async def header_tricks(stage: Stage) -> ProbeOutcome:
    subject = stage.subjects.chat(stage.mal.id, stage.channel)
    before, since = await stage.watch.mark(), len(stage.heard)
    burnt = ("Nats-Msg-Id", os.urandom(8).hex())
    sent: dict[str, tuple[bytes, int]] = {}
    for name, extra in ({FIRST_USE: [burnt], "burnt id": [burnt]} | TRICKS).items():
        payload, headers = stage.signed(stage.mal, stage.channel, name)
        said = await stage.mal.request(subject, payload, headers=[*headers, *extra])
        sent[name] = payload, _stored(said.data)
    heard = {each.data: each for each in (await stage.barrier())[since:]}
    return await _judged(stage, before, sent, heard)


def _stored(answer: bytes) -> int:
    """The sequence an acknowledgement names, 0 if it was refused or is a duplicate."""
    said = json.loads(answer)
    return 0 if said.get("error") or said.get("duplicate") else int(said.get("seq", 0))


async def _judged(
    stage: Stage, before: Any, sent: dict[str, tuple[bytes, int]], heard: dict[bytes, Any]
) -> ProbeOutcome:
    if changed := await stage.unchanged(before):
        return broken(changed)
    for name, (payload, seq) in sent.items():
        if not seq and payload in heard:
            return broken(f"{name}: the log refused it and the victim saw it")
        if seq and name != FIRST_USE:
            record = await stage.js.at(stage.subjects.log_stream, seq)
            if record is None or record.payload != payload:
                return broken(f"{name}: stored at {seq} and gone again")
            if isinstance(stage.opened(heard[payload]), Received):
                return broken(f"{name}: a reader surfaces it")
    kept = [name for name, (_, seq) in sent.items() if seq]
    return refused(
        f"{len(sent) - len(kept)} refused and unseen; stored but never surfaced: {', '.join(kept[1:]) or '-'}"
    )


@PROBES.probe("F3", "Have the broker send traces of its own to subjects of others.")
async def trace_destinations(stage: Stage) -> ProbeOutcome:
    before, since = await stage.watch.mark(), len(stage.heard)
    aimed = targets(stage)
    for only in ([], [("Nats-Trace-Only", "true")]):
        await stage.mal.send(*(stage.chat(headers=[("Nats-Trace-Dest", each), *only]) for each in aimed))
    strays = (await stage.barrier())[since:]
    if changed := await stage.unchanged(before):
        return broken(changed)
    passed = [each for each in strays if isinstance(stage.opened(each), Received)]
    return broken("a trace passes for a message") if passed else held(f"{2 * len(aimed)} traces, nothing changed")


FORGED: dict[str, list[Field]] = {
    "subject": [("Nats-Subject", "td.main.member.X.Y"), ("Nats-Sequence", "999999999")],
    "whole tail": [
        ("Nats-Stream", "LOG"),
        ("Nats-Subject", "td.forged"),
        ("Nats-Sequence", "7"),
        ("Nats-Time-Stamp", "2000-01-01T00:00:00Z"),
        ("Nats-Last-Sequence", "6"),
        ("Nats-Num-Pending", "0"),
    ],
    "status": [("Status", "204"), ("Description", "EOB")],
    "lower case": [("nats-sequence", "999999999"), ("status", "404")],
    "kv": [("KV-Operation", "DEL")],
}


@PROBES.probe("F4", "Forge the broker's metadata in a chat's headers, or end a page with an empty or status-like one.")
async def shadow_headers(stage: Stage) -> ProbeOutcome:
    s = stage.subjects
    subject, since = s.chat(stage.mal.id, stage.channel), len(stage.heard)
    truth: dict[int, bytes] = {}
    for name, extra in FORGED.items():
        payload, headers = stage.signed(stage.mal, stage.channel, name)
        truth[await _store(stage, subject, payload, [*headers, *extra])] = payload
    truth[await _store(stage, subject, b"", FORGED["status"])] = b""
    truth[await _store(stage, subject, b"", b"NATS/1.0 204 EOB\r\nNats-Sequence: 1\r\n\r\n")] = b""
    truth[await _store(stage, subject, stage.marked(), b"garbage\r\n\r\n")] = b"?"
    heard = (await stage.barrier())[since:]
    surfaced = [each for each in heard if isinstance(stage.opened(each), Received)]
    if surfaced:
        return broken(f"a reader surfaces a record with forged headers: {surfaced[0].data[:80]!r}")
    unnamed = [each for each in heard if not isinstance(stage.opened(each), Refused)]
    if unnamed or len(heard) < len(truth):
        return broken(f"{len(truth)} records, {len(heard)} live copies, {len(unnamed)} not refused as such")
    return await _read_truly(stage, subject, truth)


async def _store(stage: Stage, subject: str, payload: bytes, headers: list[Field] | bytes) -> int:
    said = await stage.mal.request(subject, payload, headers=headers)
    return int(json.loads(said.data)["seq"])


async def _read_truly(stage: Stage, subject: str, truth: dict[int, bytes]) -> ProbeOutcome:
    """Paging over the forged records gives each with its own sequence and subject, and does not end early."""
    found: dict[int, tuple[str, bytes]] = {}
    async for page in stage.js.read(stage.subjects.log_stream, subject, min(truth), max(truth), page=2):
        found |= {each.seq: (each.subject, each.payload) for each in page}
    for seq, payload in truth.items():
        if seq not in found or found[seq][0] != subject or (payload != b"?" and found[seq][1] != payload):
            return broken(f"record {seq} is read as {found.get(seq)}")
    return held(f"{len(truth)} forged records read with their true sequence and subject, none surfaced")


HOSTILE = [b"\xff\xfe", b"a\x0b1", b"a\x0c1", b"\xc3(", b"*", b">", b"\x00", b"\x1b[2J", "ä".encode()]


@PROBES.probe("S1", "Silence readers with a channel name that is not text, holds control characters or is very long.")
async def hostile_subjects(stage: Stage) -> ProbeOutcome:
    before, since = await stage.watch.mark(), len(stage.heard)
    stem, own = (f"{stage.subjects.root}.chat.{actor.id}.{stage.base}.wild." for actor in (stage.mal, stage.loud))
    await stage.mal.send(*(line(stem.encode() + each, stage.marked()) for each in HOSTILE))
    await stage.loud.send(line(own + "a" * 4_000, b"an agent is cut for a subject of that length"))
    try:
        heard = (await stage.barrier())[since:]
    except TimeoutError:
        return broken("the victim's connection looks open and hears nothing any more")
    if changed := await stage.unchanged(before):
        return broken(changed)
    surfaced = [each for each in heard if isinstance(stage.opened(each), Received)]
    return broken("a hostile subject is surfaced") if surfaced else held(f"{len(heard)} seen, the victim still hears")
