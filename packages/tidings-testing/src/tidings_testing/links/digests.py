"""Digests that lie: what is compared, what is fetched because of it, and what comes then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from tidings.wire import message as wire_message
from tidings.wire.digests import BUCKETS, ChannelDigests, RecordIdentity, bucket_of, payload_hash
from tidings.wire.links import LinkedRecord
from tidings.wire.message import new_id
from tidings_testing.links.peer import Answer, Lie, page_fields, record_row
from tidings_testing.links.stage import LinkStage, lies_refused
from tidings_testing.security.report import Collection, ProbeOutcome, broken, held, refused
from tidings_testing.waiting import eventually

PROBES = Collection()
ZERO = "0" * 64
ONE = "0" * 63 + "1"


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def _digest(stage: LinkStage, **changes: Any) -> Lie:
    return lambda asked: stage.peer.honest(asked) | changes


def _counting(count: Any, total: Any = ONE, channel: str = "general", day: str | None = None) -> Answer:
    return {channel: {day or _today(): [count, total]}}


@PROBES.probe("L5", "Answer with digests that no log has.")
async def digests_that_cannot_be(stage: LinkStage) -> ProbeOutcome:
    lies = {
        "fewer than none": _digest(stage, channels=_counting(-1)),
        "more than there is room for": _digest(stage, channels=_counting(10**6)),
        "no end": _digest(stage, channels=_counting(2**200)),
        "a part of one": _digest(stage, channels=_counting(0.5)),
        "a sum of none": _digest(stage, channels=_counting(0)),
        "a sum that is none": _digest(stage, channels=_counting(1, "x" * 64)),
        "no channel": _digest(stage, channels=_counting(1, channel="No Channel")),
        "no day": _digest(stage, channels=_counting(1, day="2026-02-30")),
        "no days": _digest(stage, channels={"general": []}),
        "another part of the log": lambda asked: stage.peer.honest(asked) | {"through": asked["through"] + 1},
        "a floor above all": _digest(stage, floor=2**60),
        "a floor below none": _digest(stage, floor=-5),
        "junk": lambda _asked: b'{"ok":true,"channels":[[[[',
    }
    found = await lies_refused(stage, "digest", lies, repair=True)
    return refused(f"{len(found)} refused: {found[0][:160]}") if isinstance(found, list) else found


@PROBES.probe("L5", "Answer with buckets that do not add up to their day.")
async def buckets_that_lie(stage: LinkStage) -> ProbeOutcome:
    def differing(lie: Lie) -> Lie:
        """A day that differs, so that buckets are asked for."""

        def told(asked: Answer) -> Any:
            stage.peer.lies["buckets"] = lie
            return stage.peer.honest(asked) | {"channels": _counting(1)}

        return told

    def buckets(first: list[Any], count: int = BUCKETS) -> Lie:
        rows = [first, *([[0, ZERO]] * (count - 1))]
        return lambda asked: {"floor": 1, "through": asked["through"], "buckets": rows}

    lies = {
        "other sums": differing(buckets([1, ZERO[:-1] + "2"])),
        "fewer than none": differing(buckets([-1, ONE])),
        "too many": differing(buckets([1, ONE], 257)),
        "none": differing(lambda _asked: {}),
    }
    found = await lies_refused(stage, "digest", lies, repair=True)
    return refused(f"{len(found)} refused: {found[0][:160]}") if isinstance(found, list) else found


def _claim(stage: LinkStage, claimed: list[RecordIdentity], ids: Lie | None = None) -> None:
    """Say that these are in the log, in digests that agree with each other, beside what is there."""

    def made(asked: Answer) -> ChannelDigests:
        found = stage.peer.digests(asked["through"])
        for each in claimed:
            found.add("general", each.sender, each.id, f"{_today()}T00:00:00.000Z", each.hash)
        return found

    def digest(asked: Answer) -> Answer:
        totals = made(asked).totals()
        channels = {name: {day: each.encode() for day, each in days.items()} for name, days in totals.items()}
        return {"floor": 1, "through": asked["through"], "channels": channels, "more": False}

    def buckets(asked: Answer) -> Answer:
        found = made(asked).day(asked["channel"], asked["day"]).buckets
        return {"floor": 1, "through": asked["through"], "buckets": [each.encode() for each in found]}

    def honest_ids(asked: Answer) -> Answer:
        there = [each for name, day, each in stage.peer.messages(asked["through"]) if name == "general"]
        rows = [each for each in (*there, *claimed) if bucket_of(each.item) in asked["buckets"]]
        rows = sorted(each for each in rows if each.seq > asked["after"])
        more = len(rows) > 4_000
        fields = [[each.seq, each.sender, each.id, each.hash.hex()] for each in rows[:4_000]]
        return {"floor": 1, "through": asked["through"], "ids": fields, "more": more}

    stage.peer.lies |= {"digest": digest, "buckets": buckets, "ids": ids or honest_ids}


async def _room(stage: LinkStage, count: int = 1) -> list[int]:
    """Sequences that were handled and hold nothing."""
    first = stage.peer.head + 1
    stage.peer.head += count
    honest = stage.honest()
    await stage.handled(honest.seq)
    await stage.recovers()
    return list(range(first, first + count))


def _named(record: LinkedRecord, seq: int) -> RecordIdentity:
    return RecordIdentity(seq, record.sender, wire_message.decode(record.payload).id, payload_hash(record.payload))


@PROBES.probe("L5", "Answer with ids that are not in their bucket, are no ids, or have no end.")
async def ids_that_lie(stage: LinkStage) -> ProbeOutcome:
    (seq,) = await _room(stage)
    record = stage.peer.say("never said")
    named, other = _named(record, seq), _named(stage.peer.say("another"), seq)

    def ids(*rows: Any, more: bool = False) -> Lie:
        return lambda asked: {"floor": 1, "through": asked["through"], "ids": list(rows), "more": more}

    row = [named.seq, named.sender, named.id, named.hash.hex()]
    lies = {
        "of another bucket": ids([other.seq, other.sender, other.id, other.hash.hex()]),
        "none, and more": ids(more=True),
        "none": ids(),
        "twice": ids(row, row),
        "of nobody": ids([seq, "nobody", named.id, named.hash.hex()]),
        "beyond": ids([2**60, *row[1:]]),
        "no row": ids(None),
    }

    def told(lie: Lie) -> Lie:
        def digest(asked: Answer) -> Any:
            _claim(stage, [named], lie)
            return stage.peer.lies["digest"](asked)

        return digest

    found = await lies_refused(stage, "digest", {name: told(lie) for name, lie in lies.items()}, repair=True)
    return refused(f"{len(found)} refused: {found[0][:160]}") if isinstance(found, list) else found


@PROBES.probe("L5", "Claim records that are not there, and answer for them with none, another, or a forged one.")
async def records_that_are_claimed(stage: LinkStage) -> ProbeOutcome:
    outcomes: dict[str, tuple[Any, tuple[str, str]]] = {
        "none": (lambda _record: None, ("omitted", "vanished")),
        "a forged one": (lambda record: replace(record, payload=record.payload + b" "), ("quarantined", "signature")),
        "one that is not shared": (lambda record: replace(record, channel="secret"), ("omitted", "not_shared")),
    }
    for name, (make, wanted) in outcomes.items():
        (seq,) = await _room(stage)
        record = replace(stage.peer.say("claimed"), seq=seq)
        given = make(record)
        _claim(stage, [_named(record, seq)])
        rows, missing = ([record_row(given)], []) if given is not None else ([], [seq])
        stage.peer.lies["fetch"] = _fetched(stage, rows, missing)
        stage.look(repair=True)

        async def is_settled(seq: int = seq, wanted: tuple[str, str] = wanted) -> bool:
            stage.look()
            return await stage.fates(seq) == [wanted]

        await eventually(is_settled, within=6, every=0.1, what=f"{name}: record {seq} becomes {wanted}")
        await stage.recovers()
    strayed = await stage.strayed()
    return broken(strayed) if strayed else held("each was asked for, and became what it was")


def _fetched(stage: LinkStage, rows: list[Any], missing: list[Any]) -> Lie:
    return lambda _asked: {"epoch": stage.peer.epoch, "records": rows, "missing": missing}


@PROBES.probe("L5", "Answer a question for single records with others, with one twice, or with nothing.")
async def fetched_that_was_not_asked_for(stage: LinkStage) -> ProbeOutcome:
    row, epoch = record_row(stage.peer.say("not claimed")), stage.peer.epoch
    answers: dict[str, Callable[[int], Any]] = {
        "another": lambda seq: {"records": [row | {"seq": seq + 1}], "missing": []},
        "twice": lambda seq: {"records": [row | {"seq": seq}] * 2, "missing": []},
        "there and missing": lambda seq: {"records": [row | {"seq": seq}], "missing": [seq]},
        "nothing": lambda _seq: {"records": [], "missing": []},
        "missing is no number": lambda seq: {"records": [], "missing": [[seq]]},
        "missing is no list": lambda _seq: {"records": [], "missing": {"a": 1}},
        "no records": lambda seq: {"records": None, "missing": [seq]},
        "no life": lambda seq: {"records": [], "missing": [seq], "epoch": None},
    }
    said = []
    for name, answer in answers.items():
        (seq, *_) = await _room(stage, 2)
        _claim(stage, [_named(stage.peer.say("claimed"), seq)])
        told, given = list[int](), {"epoch": epoch} | answer(seq)

        def fetch(asked: Answer, told: list[int] = told, given: Answer = given) -> Answer:
            told += asked["seqs"]
            return given

        stage.peer.lies["fetch"] = fetch
        stage.look(repair=True)

        def was_refused(told: list[int] = told, seq: int = seq) -> bool:
            stage.look()
            return seq in told and bool(stage.words)

        await eventually(was_refused, within=20, every=0.1, what=f"{name} is refused")
        said.append(stage.words)
        if (found := await stage.fates(seq)) != [("obligation", "not_received")]:
            return broken(f"{name}: the record became {found}")
        await stage.recovers()
    strayed = await stage.strayed()
    return broken(strayed) if strayed else refused(f"{len(said)} refused: {said[0][:160]}")


@PROBES.probe("L5", "Claim more records than anybody could fetch.")
async def endless_claims(stage: LinkStage) -> ProbeOutcome:
    count = 12_000
    await stage.recovers()
    first = stage.peer.head + 1
    sender, hashed = stage.peer.agent.id, b"\1" * 32
    claimed = [RecordIdentity(first + number, sender, new_id(), hashed) for number in range(count)]
    stage.peer.head += count
    await stage.recovers()
    _claim(stage, claimed)
    stage.peer.lies["fetch"] = lambda asked: {"epoch": stage.peer.epoch, "records": [], "missing": asked["seqs"][:1]}
    before = stage.peer.asked["fetch"]
    stage.look(repair=True)
    await eventually(lambda: stage.peer.asked["fetch"] > before, within=15, what="something is fetched")
    owed = await _owed(stage)
    await stage.recovers()
    strayed = await stage.strayed()
    if owed > 10_000 or strayed:
        return broken(f"{owed} records are owed because the peer says so; {strayed}")
    return held(f"{owed} of {count} that were claimed are owed at a time")


async def _owed(stage: LinkStage) -> int:
    row = stage.carried.ledger.row
    query = "SELECT count(*) FROM obligation WHERE link = ?"
    return int((await stage.carried.ledger.read(lambda c: c.execute(query, (row,)).fetchone()))[0])


@PROBES.probe("L5", "Give another digest each time it is asked for.")
async def digests_that_change(stage: LinkStage) -> ProbeOutcome:
    """Known records in another place: the log is read again, and that is all."""
    await stage.recovers()
    known = stage.peer.log[stage.peer.head]
    before = len(await stage.arrived())
    for _ in range(3):
        other = stage.peer.say("another text")
        _claim(stage, [_named(other, known.seq)])
        asked = stage.peer.asked["digest"]
        stage.look(repair=True)
        await eventually(lambda asked=asked: stage.peer.asked["digest"] > asked, what="it is compared")  # type: ignore[misc]
        stage.peer.lies["page"] = lambda asked: page_fields(stage.peer.page_after(asked))
        await stage.recovers()
    after, strayed = len(await stage.arrived()), await stage.strayed()
    if strayed or after != before + 3:
        return broken(f"{after - before} came, and three were said; {strayed}")
    return held("read again each time; nothing came twice")
