"""Reasons why a log cannot go on from a token, where it could."""

from __future__ import annotations

import asyncio
from typing import Any

from tidings.contract.core import MAX_INTEGER as MOST
from tidings.links import link_store as books
from tidings.wire.links import GapKind, LinkGap
from tidings.wire.message import new_id
from tidings_testing.links.pages import refused_pages
from tidings_testing.links.peer import Answer, Lie, page_fields
from tidings_testing.links.stage import LinkStage
from tidings_testing.security.report import Collection, ProbeOutcome, broken, held
from tidings_testing.waiting import eventually

PROBES = Collection()


def _gap(stage: LinkStage, kind: str, **fields: Any) -> Lie:
    """`fields` may be functions of what was asked."""

    def lie(asked: Answer) -> Answer:
        said = {"oldest": 0, "head": stage.peer.head, "epoch": stage.peer.epoch, "agreed": 0}
        said |= {name: each(asked) if callable(each) else each for name, each in fields.items()}
        return page_fields(stage.peer.page([], asked, 0)) | {"gap": {"kind": kind, **said}}

    return lie


@PROBES.probe("L4", "Give reasons for a gap that contradict themselves.")
async def gaps_that_cannot_be(stage: LinkStage) -> ProbeOutcome:
    def here(asked: Answer) -> int:
        return int(asked["after"])

    lies = {
        "older than what is there": _gap(stage, "too_old", oldest=here),
        "removed beyond the end": _gap(stage, "too_old", oldest=MOST, head=here),
        "removed in another life": _gap(stage, "too_old", oldest=lambda a: here(a) + 5, head=MOST, epoch=new_id()),
        "beyond an end that is not before": _gap(stage, "too_new", head=here),
        "another life of the same name": _gap(stage, "epoch"),
        "another record in another life": _gap(stage, "record", epoch=new_id()),
        "agreed beyond the end": _gap(stage, "epoch", epoch=new_id(), agreed=MOST),
        "an end below none": _gap(stage, "too_new", head=-1),
        "no such reason": _gap(stage, "tired"),
        "no reason": lambda asked: page_fields(stage.peer.page([], asked, 0)) | {"gap": {}},
        "another space": _gap(stage, "stream"),
        "a life without end": _gap(stage, "epoch", epoch="x" * 200_000),
    }
    return await refused_pages(stage, lies)


@PROBES.probe("L4", "Say gap after gap, each in another life of the log.")
async def endless_gaps(stage: LinkStage) -> ProbeOutcome:
    await stage.recovers()
    stage.peer.lies["page"] = lambda asked: _gap(stage, "epoch", epoch=new_id())(asked)
    before = stage.peer.asked["page"]
    stage.look()
    words = await eventually(lambda: stage.words, within=4, what="gaps are refused at last")
    await asyncio.sleep(1)
    asked = stage.peer.asked["page"] - before
    await stage.recovers()
    if strayed := await stage.strayed():
        return broken(strayed)
    return held(f"after {asked} it waits: {words}") if asked <= 8 else broken(f"{asked} gaps in a second or two")


@PROBES.probe("L4", "Say gap after gap, with an empty page between two of them.")
async def gaps_between_pages(stage: LinkStage) -> ProbeOutcome:
    await stage.recovers()
    peer, lives = stage.peer, [stage.peer.epoch]

    def lie(asked: Answer) -> Answer:
        if asked["after"]:
            lives.append(new_id())
            return page_fields(peer.page([], asked, 0)) | {"gap": _as_fields(lives[-1])}
        fields = page_fields(peer.page([], asked, 1, 1_000))
        return fields | {"through": fields["through"] | {"epoch": asked["epoch"]}}

    peer.lies["page"] = lie
    before = peer.asked["page"]
    stage.look()
    await asyncio.sleep(1)
    asked = peer.asked["page"] - before
    await stage.recovers()
    if strayed := await stage.strayed():
        return broken(strayed)
    return held(f"{asked} questions in a second") if asked <= 60 else broken(f"{asked} questions in a second")


def _as_fields(epoch: str) -> Answer:
    gap = LinkGap(kind=GapKind.EPOCH, oldest=0, head=1_000, epoch=epoch)
    return {"kind": gap.kind.value, "oldest": gap.oldest, "head": gap.head, "epoch": gap.epoch, "agreed": gap.agreed}


@PROBES.probe("L4", "Say that records were removed which are there.")
async def removed_though_there(stage: LinkStage) -> ProbeOutcome:
    await stage.recovers()
    token = await stage.token()
    assert token is not None
    hidden = stage.honest()
    stage.peer.lies["page"] = _gap(stage, "too_old", oldest=hidden.seq, head=hidden.seq)
    await stage.handled(hidden.seq)
    row = stage.carried.ledger.row
    named = await stage.carried.ledger.read(lambda c: books.omissions(c, row, token.seq))
    if [each for each in named if each.first <= hidden.seq <= each.last] == []:
        return broken(f"what is between {token.seq} and {hidden.seq} was passed over, and is named nowhere: {named}")
    stage.peer.lies.clear()
    stage.look(repair=True)
    await stage.arrives(hidden)
    await stage.recovers()
    strayed = await stage.strayed()
    return broken(strayed) if strayed else held("named as not there; found by comparing, once it was shown again")


@PROBES.probe("L4", "Say that the log begins anew, and show everything again.")
async def log_that_begins_anew(stage: LinkStage) -> ProbeOutcome:
    await stage.recovers()
    before = len(await stage.arrived())
    stage.peer.epoch = new_id()
    stage.look()
    await stage.recovers()
    strayed, after = await stage.strayed(), len(await stage.arrived())
    if strayed or after != before + 1:
        return broken(f"{after - before} came, and one was said; {strayed}")
    return held(f"{stage.peer.head} records were read again, and the new one came")
