"""Pages that no log would answer with. None of them moves the token, and nothing of them is let in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from tidings.contract.core import MAX_INTEGER as MOST
from tidings.links.validation import PAGE_BYTES, PAGE_RECORDS
from tidings.wire.links import LinkedRecord
from tidings.wire.message import new_id
from tidings.wire.signing import ACCOUNT, KeyPair
from tidings_testing.links.peer import Answer, HostilePeer, Lie, page_fields
from tidings_testing.links.stage import LinkStage, lies_refused
from tidings_testing.security.report import Collection, ProbeOutcome, broken, held, refused

PROBES = Collection()


async def refused_pages(stage: LinkStage, lies: dict[str, Lie]) -> ProbeOutcome:
    found = await lies_refused(stage, "page", lies)
    return refused(f"{len(found)} refused: {found[0][:160]}") if isinstance(found, list) else found


def _records(peer: HostilePeer, *seqs: int, text: str = "not so") -> Callable[[int], list[LinkedRecord]]:
    """True messages, at these places behind the token."""
    said = [peer.say(text) for _ in seqs]
    return lambda after: [replace(each, seq=after + seq) for each, seq in zip(said, seqs, strict=True)]


@PROBES.probe("L3", "Answer with a page that is larger than pages are.")
async def oversize_page(stage: LinkStage) -> ProbeOutcome:
    peer = stage.peer
    large = _records(peer, 1, 2, 3, text="x" * (PAGE_BYTES // 3 + 1000))
    return await refused_pages(
        stage, {"bytes": lambda asked: page_fields(peer.page(large(asked["after"]), asked, asked["after"] + 3, MOST))}
    )


@PROBES.probe("L3", "Answer with more records than were asked for.")
async def too_many_records(stage: LinkStage) -> ProbeOutcome:
    peer, count = stage.peer, PAGE_RECORDS + 1
    many = _records(peer, *range(1, count + 1))
    return await refused_pages(
        stage,
        {"records": lambda asked: page_fields(peer.page(many(asked["after"]), asked, asked["after"] + count, MOST))},
    )


@PROBES.probe("L3", "Say that there is more, and do not move.")
async def cursor_that_does_not_move(stage: LinkStage) -> ProbeOutcome:
    peer = stage.peer
    same = _records(peer, 1)

    def with_record(asked: Answer) -> Answer:
        return page_fields(peer.page(same(asked["after"]), asked, asked["after"]))

    return await refused_pages(
        stage,
        {
            "empty": lambda asked: page_fields(peer.page([], asked, asked["after"], asked["after"] + 5)),
            "with a record": with_record,
        },
    )


@PROBES.probe("L3", "Go back behind what was handled, or behind the first record.")
async def cursor_that_goes_back(stage: LinkStage) -> ProbeOutcome:
    peer = stage.peer
    again = peer.log[1]
    return await refused_pages(
        stage,
        {
            "by one": lambda asked: page_fields(peer.page([], asked, asked["after"] - 1)),
            "to the start": lambda asked: page_fields(peer.page([again], asked, 1)),
            "before it": lambda asked: _changed(page_fields(peer.page([], asked, 0)), "through", seq=-1),
        },
    )


def _changed(fields: Answer, name: str, **changes: Any) -> Answer:
    return fields | {name: fields[name] | changes}


@PROBES.probe("L3", "Answer about another log, or another life of it, without saying so.")
async def another_domain(stage: LinkStage) -> ProbeOutcome:
    peer, other = stage.peer, KeyPair.generate(ACCOUNT).id
    some = _records(peer, 1)

    def about(**changes: Any) -> Lie:
        def lie(asked: Answer) -> Answer:
            fields = page_fields(peer.page(some(asked["after"]), asked, asked["after"] + 1, MOST))
            return _changed(fields, "through", **changes)

        return lie

    lies = {"epoch": about(epoch=new_id()), "no epoch": about(epoch=""), "space": about(space=other)}
    return await refused_pages(stage, lies)


@PROBES.probe("L3", "Put another record in the place of the last one that was handled.")
async def another_mark(stage: LinkStage) -> ProbeOutcome:
    peer = stage.peer

    def lie(asked: Answer) -> Answer:
        return _changed(page_fields(peer.page([], asked, asked["after"], asked["after"])), "through", mark="0" * 20)

    return await refused_pages(stage, {"mark": lie})


@PROBES.probe("L3", "Answer with records out of order, twice, or of another part of the log.")
async def records_out_of_order(stage: LinkStage) -> ProbeOutcome:
    peer = stage.peer
    places = {
        "backwards": (2, 1),
        "twice": (1, 1),
        "behind the page": (1, 9),
        "before the page": (0, 1),
        "long ago": (-1, 1),
    }

    def lie(seqs: tuple[int, ...]) -> Lie:
        some = _records(peer, *seqs)
        return lambda asked: page_fields(peer.page(some(asked["after"]), asked, asked["after"] + 3, MOST))

    return await refused_pages(stage, {name: lie(seqs) for name, seqs in places.items()})


@PROBES.probe("L3", "Name sequences, times and ends that no log has.")
async def numbers_that_cannot_be(stage: LinkStage) -> ProbeOutcome:
    peer = stage.peer
    some = _records(peer, 1)

    def page(**changes: Any) -> Lie:
        return lambda asked: page_fields(peer.page(some(asked["after"]), asked, asked["after"] + 1, MOST)) | changes

    def row(**changes: Any) -> Lie:
        def lie(asked: Answer) -> Answer:
            fields = page_fields(peer.page(some(asked["after"]), asked, asked["after"] + 1, MOST))
            return fields | {"records": [fields["records"][0] | changes]}

        return lie

    lies = {
        "an end before the page": page(head=0),
        "an end beyond all": page(head=2**63),
        "a floor below none": page(floor=-1),
        "a floor in words": page(floor="1"),
        "a sequence beyond all": row(seq=2**70),
        "a part of a sequence": row(seq=1.5),
        "links beyond all": row(hops=2**64),
        "the end of time": row(time="9999-12-31T23:59:59.999999999Z"),
        "the beginning of time": row(time="0001-01-01T00:00:00.000000000Z"),
        "no time": row(time="yesterday"),
        "half a letter": row(sender="\ud800"),
        "no payload": row(payload="%%%"),
        "no record": page(records=[None]),
        "no list": page(records={}),
    }
    return await refused_pages(stage, lies)


@PROBES.probe("L3", "Fill the ledger with names that have no end.")
async def endless_names(stage: LinkStage) -> ProbeOutcome:
    peer = stage.peer
    some, long = _records(peer, 1), "x" * 200_000

    def row(name: str) -> Lie:
        def lie(asked: Answer) -> Answer:
            fields = page_fields(peer.page(some(asked["after"]), asked, asked["after"] + 1, MOST))
            return fields | {"records": [fields["records"][0] | {name: long}]}

        return lie

    def mark(asked: Answer) -> Answer:
        return _changed(page_fields(peer.page([], asked, asked["after"] + 1, MOST)), "through", mark=long)

    lies = {name: row(name) for name in ("origin", "channel", "sender", "sig", "mark", "time")}
    return await refused_pages(stage, lies | {"the mark of a page": mark})


@PROBES.probe("L3", "Jump to the end of all numbers, and be honest again.")
async def jump_ahead(stage: LinkStage) -> ProbeOutcome:
    peer = stage.peer
    await stage.recovers()
    peer.lies["page"] = lambda asked: page_fields(peer.page([], asked, MOST, MOST))
    await stage.handled(MOST)
    await stage.recovers()
    token = await stage.token()
    strayed = await stage.strayed()
    if strayed or token is None or token.seq > peer.head:
        return broken(f"{token} is still there; {strayed}")
    return held("its own log was passed over and read again; nothing came twice")


@PROBES.probe("L3", "Keep it busy with pages that move and hold nothing.")
async def endless_empty_pages(stage: LinkStage) -> ProbeOutcome:
    peer = stage.peer
    await stage.recovers()
    peer.lies["page"] = lambda asked: page_fields(peer.page([], asked, asked["after"] + 1, MOST))
    stage.look()
    before = peer.asked["page"]
    await asyncio.sleep(1)
    asked = peer.asked["page"] - before
    await stage.recovers()
    if asked > 60:
        return broken(f"{asked} questions in a second, for nothing")
    return held(f"{asked} questions in a second")
