"""An agreement that ends or changes while records are under way; too much put aside; how it is after everything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from tidings.contract.admin import ChangeSpaceRequest
from tidings.links.link_store import MOST_QUARANTINED, MOST_QUARANTINED_BYTES
from tidings.wire import message as wire_message
from tidings.wire.links import LinkedRecord
from tidings_testing.links.peer import Answer
from tidings_testing.links.stage import CHANNELS, LinkStage
from tidings_testing.security.report import Collection, ProbeOutcome, broken, held
from tidings_testing.waiting import eventually

PROBES = Collection()


async def _under_way(stage: LinkStage, meanwhile: Callable[[], Awaitable[None]], record: LinkedRecord) -> None:
    """The page with this record is asked for before, and answered after something happened; and what the worker does
    with it is done."""
    begun, done = asyncio.Event(), asyncio.Event()

    async def lie(asked: Answer) -> Answer:
        if not begun.is_set():
            begun.set()
            await meanwhile()
            done.set()
        await done.wait()
        return stage.peer.honest(asked)

    ended = stage.worker.ended
    stage.carried.source.patience = 10.0  # type: ignore[attr-defined]
    stage.peer.lies["page"] = lie
    stage.peer.put(record)
    stage.look()
    await asyncio.wait_for(done.wait(), 10)
    await eventually(lambda: stage.worker.ended > ended, within=15, what="the link is carried no more as it was")
    stage.peer.lies.clear()


async def _not_read(stage: LinkStage, record: LinkedRecord) -> str | None:
    """It may be in the log, if nobody counts it."""
    await stage.make_void(record.payload)
    async with stage.main.agent("reader") as agent:  # what this agent says is read behind it
        made = wire_message.compose(wire_message.Sender(agent.id, agent.name), text=stage.text())
        await agent.post("general", made.raw)
    past = await stage.reader.history("general", 50)
    if any(each.message.raw == record.payload for each in (*past, *stage.seen)):
        return "it was read"
    return await stage.strayed()


@PROBES.probe("L8", "Answer with a page after the link was ended here, and have it agreed anew.")
async def revoked_in_the_middle(stage: LinkStage) -> ProbeOutcome:
    await stage.recovers()
    record = stage.peer.say(stage.text())
    await _under_way(stage, stage.end_link, record)
    if problem := await _not_read(stage, record):
        return broken(problem)
    await stage.agree()
    stage.expect(record)
    await stage.arrives(record)
    await stage.recovers()
    strayed = await stage.strayed()
    return broken(strayed) if strayed else held("nobody read it while the link was off; it came when it was on again")


@PROBES.probe("L8", "Answer with a page after the link's time is over.")
async def expired_in_the_middle(stage: LinkStage) -> ProbeOutcome:
    await stage.recovers()
    until = int(time.time()) + 2
    await stage.agree(until=until)
    record = stage.peer.say(stage.text())

    async def wait() -> None:
        await asyncio.sleep(max(0.0, until + 0.1 - time.time()))

    await _under_way(stage, wait, record)
    if problem := await _not_read(stage, record):
        return broken(problem)
    late = stage.peer.say(stage.text())
    stage.peer.put(late)
    await stage.peer.wake(stage.user)
    await asyncio.sleep(0.2)
    if problem := await _not_read(stage, late):
        return broken(problem)
    stage.expect(record), stage.expect(late)
    await stage.agree()
    await stage.arrives(record, late)
    await stage.recovers()
    strayed = await stage.strayed()
    return broken(strayed) if strayed else held("nothing was read after its end; it came under the next agreement")


@PROBES.probe("L8", "Say something in a channel that is not listed here, and has to be.")
async def not_listed(stage: LinkStage) -> ProbeOutcome:
    await stage.recovers()
    async with stage.main.administer() as admin:
        await admin.call(ChangeSpaceRequest(channels="listed"))
    try:
        (placed,) = stage.peer.put(stage.peer.say(stage.text()))
        await stage.handled(placed.seq)
        found, problem = await stage.fates(placed.seq), await stage.strayed()
    finally:
        async with stage.main.administer() as admin:
            await admin.call(ChangeSpaceRequest(channels="open"))
    stage.expect(placed)
    if problem or found != [("quarantined", "not_listed")]:
        return broken(problem or f"it became {found}")
    await stage.arrives(placed)
    await stage.recovers()
    strayed = await stage.strayed()
    return broken(strayed) if strayed else held("it was put aside, and came when every channel could be used again")


@PROBES.probe("L8", "Answer with a page after its channel was given another name here.")
async def mapping_changed_in_the_middle(stage: LinkStage) -> ProbeOutcome:
    await stage.recovers()
    record = stage.peer.say(stage.text())
    other = {"general": "elsewhere"}

    async def change() -> None:
        await stage.agree(channels=other, wait=False)

    await _under_way(stage, change, record)
    stage.expect(record, "elsewhere")
    await stage.agree(channels=other)
    await stage.handled(stage.peer.head)
    await eventually(lambda: any(each.message.raw == record.payload for each in stage.seen), what="it is read")
    shown = [(each.channel, each.text) for each in stage.seen if each.message.raw == record.payload]
    stage.void |= {
        each.seq for each in await stage.arrived() if each.payload == record.payload and each.channel != "elsewhere"
    }
    strayed = await stage.strayed()
    await stage.agree()
    await stage.recovers()
    if [channel for channel, _ in shown] != ["elsewhere"] or strayed:
        return broken(f"it was read as {shown}; {strayed}")
    return held("it was read in the channel that it was mapped to when it was put into the log, once")


@PROBES.probe("L8", "Have more put aside than there is room for.")
async def quarantine_filled(stage: LinkStage) -> ProbeOutcome:
    """Under an agreement of its own, because nothing comes over a link that is full."""
    await stage.recovers()
    await stage.agree(channels=CHANNELS | {"flood": "flood"})
    await stage.recovers()
    forged = replace(stage.peer.say("forged"), signature="A" * 86)
    honest = dict(stage.peer.log), stage.peer.head
    stage.peer.put(*[forged] * (MOST_QUARANTINED + 600))
    stage.look()

    async def is_full() -> bool:
        if not stage.words:
            stage.look()
        return "quarantine" in stage.words

    await eventually(is_full, within=60, what="it says that quarantine is full")
    count, size = await stage.quarantined()
    stage.peer.log, stage.peer.head = honest
    await stage.agree()
    await stage.recovers()
    if count > MOST_QUARANTINED or size > MOST_QUARANTINED_BYTES:
        return broken(f"{count} records, {size} bytes in quarantine")
    strayed = await stage.strayed()
    return broken(strayed) if strayed else held(f"{count} were put aside, and then nothing more was taken")


@PROBES.probe(
    "L8", "After everything: each record has one disposition, the log holds what it may, the worker carries on."
)
async def everything_accounted_for(stage: LinkStage) -> ProbeOutcome:
    stage.peer.lies.clear()
    await stage.recovers()
    token, row = await stage.token(), stage.carried.ledger.row
    assert token is not None
    query = "SELECT seq, count(*) FROM disposition WHERE link = ? AND life = 0 GROUP BY seq"
    found = dict(await stage.carried.ledger.read(lambda c: c.execute(query, (row,)).fetchall()))
    lacking = [seq for seq in stage.peer.log if seq <= token.seq and found.get(seq) != 1]
    if lacking:
        return broken(f"{len(lacking)} records up to {token.seq} have no disposition, or two: {lacking[:5]}")
    count, size = await stage.quarantined()
    if count > MOST_QUARANTINED or size > MOST_QUARANTINED_BYTES:
        return broken(f"{count} records, {size} bytes in quarantine")
    if stage.running is None or stage.running.done():
        return broken("the worker has ended")
    missing = set(stage.expected) - {(each.sender.id, each.message.id) for each in stage.seen}
    strayed = await stage.strayed()
    if missing or strayed:
        return broken(f"{len(missing)} honest messages were not read; {strayed}")
    return held(f"{len(found)} records, each with one disposition; {len(stage.expected)} messages read once, no other")
