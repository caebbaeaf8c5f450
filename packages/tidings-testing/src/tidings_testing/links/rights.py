"""What the users of links may not do at this space's broker: the other space's worker, and our own, stolen."""

from __future__ import annotations

import json
import time
from typing import Any

from msgspec.structs import replace

from tidings.errors import TidingsError
from tidings.wire import message as wire_message
from tidings.wire.links import LinkedRecord, origin_fields
from tidings.wire.signing import ACCOUNT, KeyPair
from tidings.wire.subjects import LINK_SERVICE
from tidings_testing.links.peer import LINK
from tidings_testing.links.stage import LinkStage
from tidings_testing.raw_requests import raw_call
from tidings_testing.security.actor import acting
from tidings_testing.security.report import Collection, ProbeOutcome, broken, held, refused
from tidings_testing.security.suite import run_security_suite

PROBES = Collection()
#: of the security suite
RAW = ("peer_publish", "peer_jetstream", "peer_subscribe", "peer_of_no_link")
OWN = ("worker_publish", "worker_jetstream", "worker_subscribe", "link_replies")


async def _suite(stage: LinkStage, names: tuple[str, ...]) -> ProbeOutcome:
    report = await run_security_suite(stage.main.home, only=names)
    if report.broken or report.cleanup or len(report.results) != len(names):
        return broken("; ".join([*(f"{each.name}: {each.evidence}" for each in report.broken), *report.cleanup]))
    stage.void |= {each.seq for each in await stage.arrived() if each.channel.startswith("probe.")}
    await stage.recovers()
    return refused("; ".join(each.evidence for each in report.results)[:200])


@PROBES.probe("L7", "As the worker of a linked space, speak, admit, rule, listen, or ask JetStream.")
async def raw_peer_user(stage: LinkStage) -> ProbeOutcome:
    return await _suite(stage, RAW)


@PROBES.probe("L7", "As this space's own worker, speak for its agents, rule, listen, or ask JetStream.")
async def raw_worker_user(stage: LinkStage) -> ProbeOutcome:
    return await _suite(stage, OWN)


@PROBES.probe("L7", "As the worker of a linked space, ask for what is not shared with it, or was its own.")
async def asks_for_more(stage: LinkStage) -> ProbeOutcome:
    async with stage.main.agent("reader") as agent:
        for channel in ("general", "own", "secret"):
            payload = wire_message.compose(wire_message.Sender(agent.id, agent.name), text=f"said in {channel}").raw
            head = (await agent.post(channel, payload))["seq"]
    asked: list[tuple[str, dict[str, Any]]] = [("page", {"after": 0, "space": stage.main.info.id, "limit": 500})]
    asked += [("fetch", {"seqs": list(range(start, start + 100))}) for start in range(1, head + 1, 100)]
    asked += [("digest", {"through": head})]
    told, refusals = list[Any](), 0
    async with acting(stage.main.info.url, stage.main.subjects, stage.creds) as peer:
        for do, arguments in asked:
            told.append((do, await raw_call(peer.control, LINK_SERVICE, do, **arguments)))
        for do, arguments in _out_of_scope(head):
            try:
                told.append((do, await raw_call(peer.control, LINK_SERVICE, do, **arguments)))
            except TidingsError:
                refusals += 1
    rows = [row for _, answer in told for row in answer.get("records", ())]
    strange = [row for row in rows if row["channel"] != "general" or row["origin"] != stage.main.info.id]
    channels = {name for do, answer in told if do == "digest" for name in answer["channels"]}
    ids = [each for do, answer in told if do == "ids" for each in answer["ids"]]
    counted = [each for do, answer in told if do == "buckets" for each in answer["buckets"] if each[0]]
    if strange or channels - {"general"} or ids or counted or not rows:
        return broken(f"shown: {strange[:2]}, {channels}, {ids[:2]}, {counted[:2]}; of its own right {len(rows)}")
    return refused(f"{len(rows)} records of what is shared, nothing else; {refusals} questions refused")


def _out_of_scope(head: int) -> list[tuple[str, dict[str, Any]]]:
    today = time.strftime("%Y-%m-%d", time.gmtime())
    found: list[tuple[str, dict[str, Any]]] = []
    for channel in ("own", "secret", ">", "*"):
        found.append(("buckets", {"channel": channel, "day": today, "through": head}))
        found.append(("ids", {"channel": channel, "day": today, "through": head, "buckets": [*range(256)], "after": 0}))
    return found


@PROBES.probe("L7", "With this space's own worker stolen, put into the log what no link lets in.")
async def stolen_worker(stage: LinkStage) -> ProbeOutcome:
    """It may publish, so these are in the log; they count for nobody."""
    said, other = stage.peer.say("stolen"), KeyPair.generate(ACCOUNT).id
    own = stage.peer.sign(_by(stage.reader.id), key=None)
    tries: list[tuple[str, str, LinkedRecord]] = [
        (LINK, "general", replace(said, signature="A" * 86)),
        (LINK, "general", replace(said, payload=said.payload + b" ")),
        (LINK, "general", replace(said, sender=stage.reader.id)),
        (LINK, "general", own),
        (LINK, "secret", stage.peer.say("stolen", "secret")),
        (LINK, "elsewhere", stage.peer.say("stolen")),
        (LINK, "general", replace(said, hops=2)),
        (LINK, "general", stage.peer.say("stolen", space=other)),
        (LINK, "general", stage.peer.say("stolen", space=stage.main.info.id)),
        ("otherlink", "general", said),
    ]
    put = set[int]()
    async with acting(stage.main.info.url, stage.main.subjects, stage.main.home.link_creds) as worker:
        for link, channel, each in tries:
            headers = {**dict(origin_fields(each.origin, each.channel, each.hops)), "Td-Sig": each.signature}
            subject = stage.main.subjects.via(link, each.sender, channel)
            reply = await worker.request(subject, each.payload, headers=list(headers.items()))
            put.add(json.loads(reply.data)["seq"])
    stage.void |= put
    await stage.recovers()
    if strayed := await stage.strayed():
        return broken(strayed)
    for channel in ("general", "secret", "elsewhere"):
        shown = [each.text for each in await stage.reader.history(channel, 200) if each.seq in put]
        if shown:
            return broken(f"shown when the past of {channel} is read: {shown}")
    return held(f"{len(tries)} are in the log, and no reader is shown any")


def _by(sender: str) -> bytes:
    return wire_message.compose(wire_message.Sender(sender, "reader"), text="stolen").raw
