"""Messages that come again, under another name, or after their id was taken by somebody else."""

from __future__ import annotations

import hashlib
import hmac

from msgspec.structs import replace

from tidings.links import link_store as books
from tidings.links.ports import OriginIdentity
from tidings.wire import message as wire_message
from tidings.wire.links import LinkedRecord
from tidings.wire.message import new_id
from tidings_testing.links.stage import LinkStage
from tidings_testing.security.report import Collection, ProbeOutcome, broken, held

PROBES = Collection()


@PROBES.probe("L2", "Show the same messages again, under new sequences and in one page.")
async def replays(stage: LinkStage) -> ProbeOutcome:
    first = stage.honest()
    await stage.arrives(first)
    again = stage.peer.put(first, first, *[first] * 20)
    twice = stage.honest()
    again += stage.peer.put(twice)
    await stage.handled(again[-1].seq)
    for each in again:
        # what a link had let in itself counts as admitted also when it is shown again: a worker that died looks so
        if (found := await stage.fates(each.seq)) not in ([("duplicate", "")], [("admitted", "")]):
            return broken(f"record {each.seq}, shown before, became {found}")
    await stage.recovers()
    strayed = await stage.strayed()
    return broken(strayed) if strayed else held(f"{len(again)} were known, and are here once")


@PROBES.probe("L2", "Use the id of a message again, for another text of the same sender.")
async def id_used_twice(stage: LinkStage) -> ProbeOutcome:
    first = stage.honest()
    name = wire_message.decode(first.payload).id
    other = stage.peer.put(stage.peer.say("something else", id=name), stage.peer.say("and else", "team.a", id=name))
    await stage.handled(other[-1].seq)
    for each in other:
        if (found := await stage.fates(each.seq)) != [("quarantined", "id_reused")]:
            return broken(f"another message under the same id became {found}")
    await stage.recovers()
    strayed = await stage.strayed()
    return broken(strayed) if strayed else held("the first one counts, the others were put aside")


@PROBES.probe("L2", "Use the id of another sender's message for one's own, and the other way round.")
async def id_of_another_sender(stage: LinkStage) -> ProbeOutcome:
    name = new_id()
    mine = stage.expect(stage.peer.say("mine", id=name))
    key = type(stage.peer.agent).generate()
    theirs = stage.expect(stage.peer.say("theirs", key=key, id=name))
    placed = stage.peer.put(mine, theirs)
    await stage.handled(placed[-1].seq)
    fates = [await stage.fates(each.seq) for each in placed]
    await stage.recovers()
    if fates != [[("admitted", "")]] * 2:
        return broken(f"two senders who use one id are not told apart: {fates}")
    strayed = await stage.strayed()
    return broken(strayed) if strayed else held("an id is its sender's own: both arrived")


async def _burn(stage: LinkStage, ids: list[str]) -> None:
    """An agent here publishes under these message ids before the link can."""
    async with stage.main.agent("reader") as agent:
        for each in ids:
            payload = wire_message.compose(wire_message.Sender(agent.id, agent.name), text="burnt").raw
            await agent.post("own", payload, Nats_Msg_Id=each)


def _guesses(record: LinkedRecord) -> list[str]:
    """What somebody who has read the code, and the message, would try."""
    name = (record.origin, record.sender, wire_message.decode(record.payload).id)
    texts = ["\n".join(name), "\n".join((*name, "0")), " ".join(name), ".".join(name), "".join(name), name[2]]
    hashed = [hashlib.sha256(each.encode()).hexdigest() for each in texts]
    keyed = [hmac.new(key, each.encode(), hashlib.sha256).hexdigest() for key in (b"", b"\0" * 32) for each in texts]
    return [name[2], *(each[:size] for each in (*hashed, *keyed) for size in (32, 64))]


@PROBES.probe("L2", "As an agent here, take the message ids that a link could use before it does.")
async def ids_guessed_in_advance(stage: LinkStage) -> ProbeOutcome:
    said = stage.expect(stage.peer.say(stage.text()))
    guesses = _guesses(said)
    await _burn(stage, guesses)
    (placed,) = stage.peer.put(said)
    await stage.arrives(placed)
    await stage.handled(placed.seq)  # it is read before the ledger has what became of it
    found, strayed = await stage.fates(placed.seq), await stage.strayed()
    if found != [("admitted", "")] or strayed:
        return broken(f"it became {found}; {strayed}")
    return held(f"{len(guesses)} ids were taken, none of them is one that links use")


@PROBES.probe("L2", "Take the message ids that a link does use, as only its own worker could know them.")
async def ids_burnt(stage: LinkStage) -> ProbeOutcome:
    secret = await stage.carried.ledger.read(lambda c: books.secret(c, stage.main.info.id))
    once, always = stage.expect(stage.peer.say(stage.text())), stage.peer.say("burnt three times")
    for record, attempts in ((once, 1), (always, 3)):
        name = OriginIdentity(record.origin, record.sender, wire_message.decode(record.payload).id)
        await _burn(stage, [books.message_id(secret, *name, str(attempt)) for attempt in range(attempts)])
    placed = stage.peer.put(once, always)
    await stage.handled(placed[-1].seq)
    await stage.arrives(placed[0])
    found = [await stage.fates(each.seq) for each in placed]
    strayed = await stage.strayed()
    if found != [[("admitted", "")], [("quarantined", "id_burned")]] or strayed:
        return broken(f"they became {found}; {strayed}")
    return held("after one id another is used, after three the record is kept aside, whole; nothing is lost")


@PROBES.probe("L2", "Show an answer before what it answers, and a circle of answers.")
async def circle_of_answers(stage: LinkStage) -> ProbeOutcome:
    first, second = new_id(), new_id()
    said = [
        stage.expect(stage.peer.say(stage.text(), id=first, reply_to=second)),
        stage.expect(stage.peer.say(stage.text(), id=second, reply_to=first)),
        stage.expect(stage.peer.say(stage.text(), id=(own := new_id()), reply_to=own)),
    ]
    placed = stage.peer.put(*(replace(each, time_ns=1) for each in said))
    await stage.arrives(*placed)
    strayed = await stage.strayed()
    return broken(strayed) if strayed else held("all arrived, once")
