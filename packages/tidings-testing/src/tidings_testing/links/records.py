"""Records that are not what they are said to be. Each has its disposition, and none is in the log here."""

from __future__ import annotations

import json

from msgspec.structs import replace

from tidings.wire import message as wire_message
from tidings.wire.links import LinkedRecord
from tidings.wire.message import MAX_PAYLOAD, new_id
from tidings.wire.signing import ACCOUNT, KeyPair
from tidings_testing.links.stage import LinkStage
from tidings_testing.security.report import Collection, ProbeOutcome, broken, held

PROBES = Collection()


async def _become(stage: LinkStage, wanted: tuple[str, str], *records: LinkedRecord) -> ProbeOutcome:
    """Put them before an honest one: each becomes what is wanted (kind and reason), the honest one arrives."""
    placed = stage.peer.put(*records)
    honest = stage.honest()
    await stage.handled(honest.seq)
    for each in placed:
        if (found := await stage.fates(each.seq)) != [wanted]:
            strayed = await stage.strayed()
            return broken(
                f"record {each.seq} became {found}, and should be {wanted}; {strayed or 'nothing came of it'}"
            )
    await stage.arrives(honest)
    if strayed := await stage.strayed():
        return broken(strayed)
    return held(f"{len(placed)} became {' '.join(wanted)}; an honest one behind arrived")


@PROBES.probe("L1", "Show a message that another key than its sender's has signed.")
async def forged_sender(stage: LinkStage) -> ProbeOutcome:
    mine, victim = stage.peer.say("forged"), KeyPair.generate()
    as_victim = stage.peer.say("forged", key=victim)
    known = replace(mine, sender=stage.reader.id)
    swapped = replace(as_victim, signature=mine.signature)
    return await _become(stage, ("quarantined", "signature"), replace(mine, sender=victim.id), known, swapped)


@PROBES.probe("L1", "Show a message whose text names another sender than the one who signed it.")
async def claimed_sender(stage: LinkStage) -> ProbeOutcome:
    claims = wire_message.compose(wire_message.Sender(stage.reader.id, "reader"), text="forged").raw
    return await _become(stage, ("quarantined", "sender_mismatch"), stage.peer.sign(claims))


@PROBES.probe("L1", "Show a message without a signature, or with what is none.")
async def unsigned(stage: LinkStage) -> ProbeOutcome:
    said = stage.peer.say("unsigned")
    none = ["", "A" * 86, "A" * 88, said.signature[:-1], said.signature + "=", said.signature + "\r\nNats-Rollup: all"]
    return await _become(stage, ("quarantined", "signature"), *(replace(said, signature=each) for each in none))


@PROBES.probe("L1", "Alter the bytes of a signed message.")
async def altered_bytes(stage: LinkStage) -> ProbeOutcome:
    said = stage.peer.say("do not send it")
    altered = replace(said, payload=said.payload.replace(b"do not ", b"please "))
    spaced = replace(said, payload=said.payload + b" ")
    return await _become(stage, ("quarantined", "signature"), altered, spaced)


@PROBES.probe("L1", "Show what was said in a channel that is not shared.")
async def foreign_channel(stage: LinkStage) -> ProbeOutcome:
    names = ("secret", "elsewhere", "general.sub", "team", "acme.team.a", "Not A Channel", "general\n", "*", ">", "")
    said = stage.peer.say("from elsewhere")
    records = [stage.peer.say("from elsewhere", each) for each in names[:5]]
    records += [replace(said, channel=each) for each in names[5:]]
    return await _become(stage, ("omitted", "not_shared"), *records)


@PROBES.probe("L1", "Show words that were signed for one channel as words of another.")
async def words_from_another_channel(stage: LinkStage) -> ProbeOutcome:
    moved = replace(stage.peer.say("said in secret", "secret"), channel="general")
    inside = replace(stage.peer.say("said in general"), channel="team.a")
    return await _become(stage, ("quarantined", "signature"), moved, inside)


@PROBES.probe("L1", "Show what was said in another space of the same name.")
async def space_of_the_same_name(stage: LinkStage) -> ProbeOutcome:
    other = KeyPair.generate(ACCOUNT).id
    said = stage.peer.say("said over there", space=other)
    found = await _become(stage, ("quarantined", "signature"), replace(said, origin=stage.peer.id))
    return found if found.outcome == "BROKEN" else await _become(stage, ("omitted", "not_shared"), said)


@PROBES.probe("L1", "Show this space its own messages, as they are or as somebody else's.")
async def echo(stage: LinkStage) -> ProbeOutcome:
    async with stage.main.agent("reader") as agent:
        payload = wire_message.compose(wire_message.Sender(agent.id, agent.name), text="said here").raw
        await agent.post("general", payload)
        mine = stage.peer.sign(payload, key=agent.key, space=stage.main.info.id)
    found = await _become(stage, ("omitted", "echo"), mine, replace(mine, hops=2))
    if found.outcome == "BROKEN":
        return found
    return await _become(stage, ("quarantined", "signature"), replace(mine, origin=stage.peer.id))


@PROBES.probe("L1", "Show what came over more links than may be, or over none.")
async def hops_beyond(stage: LinkStage) -> ProbeOutcome:
    said = stage.peer.say("from far away")
    found = await _become(stage, ("omitted", "hops"), *(replace(said, hops=each) for each in (2, 8, 9)))
    if found.outcome == "BROKEN":
        return found
    return await _become(stage, ("quarantined", "malformed"), *(replace(said, hops=each) for each in (0, 10, 10**9)))


@PROBES.probe("L1", "Show what was said in a third space, though nothing behind the peer is let in.")
async def from_behind_the_peer(stage: LinkStage) -> ProbeOutcome:
    third = KeyPair.generate(ACCOUNT).id
    said = stage.peer.say("from a third space", space=third)
    return await _become(stage, ("omitted", "not_shared"), said, replace(said, hops=2), replace(said, origin="x" * 56))


@PROBES.probe("L1", "Show a message that is larger than any may be.")
async def oversize_payload(stage: LinkStage) -> ProbeOutcome:
    sender = {"id": stage.peer.agent.id, "name": "mallory"}
    text = "x" * (MAX_PAYLOAD + 1)
    payload = json.dumps({"v": 1, "id": new_id(), "from": sender, "parts": [{"kind": "text", "text": text}]}).encode()
    return await _become(stage, ("quarantined", "too_large"), stage.peer.sign(payload))


@PROBES.probe("L1", "Show signed bytes that are no message.")
async def signed_junk(stage: LinkStage) -> ProbeOutcome:
    junk = [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"v":1}',
        b"[" * 50_000,
        b'{"a":' * 5_000,
        b"1e999",
        b"\x00" * 64,
    ]
    return await _become(stage, ("quarantined", "malformed"), *map(stage.peer.sign, junk))
