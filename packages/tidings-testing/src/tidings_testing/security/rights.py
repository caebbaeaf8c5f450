"""What an agent may not publish, subscribe to or ask of the broker: each is refused, and nothing changed."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tidings.contract.catalogue import services_of
from tidings.contract.channels import ChangeChannelRequest, JoinRequest
from tidings.errors import AuthRevoked, BrokerUnreachable
from tidings.nats import jwt
from tidings.nats.client import connect
from tidings.wire.signing import ACCOUNT, OPERATOR, KeyPair
from tidings_testing.security.actor import line
from tidings_testing.security.report import Collection, ProbeOutcome, broken, held, refused
from tidings_testing.security.stage import Stage

PROBES = Collection()
TAG = "A" * 26


async def _all_refused(stage: Stage, attempts: Mapping[str, bytes]) -> ProbeOutcome:
    before = await stage.watch.mark()
    allowed = await stage.mal.not_refused(attempts)
    changed = await stage.unchanged(before)
    if allowed or changed:
        return broken("; ".join(filter(None, (f"not refused: {', '.join(allowed[:5])}" * bool(allowed), changed))))
    return refused(f"{len(attempts)} refused, nothing changed")


def _marked(stage: Stage, subjects: list[str]) -> dict[str, bytes]:
    return {subject: line(subject, stage.marked(), reply=f"_INBOX_{stage.mal.id}.probe") for subject in subjects}


@PROBES.probe("F1", "Publish a chat, direct message, task or control request in another's name.")
async def other_sender(stage: Stage) -> ProbeOutcome:
    s, mal, vic = stage.subjects, stage.mal.id, stage.vic.id
    forged = [s.chat(vic, stage.channel), s.direct(vic, vic), s.direct(mal, vic), s.task(stage.role, vic)]
    forged += [s.control(service, vic) for service in services_of("agent", "admin")]
    return await _all_refused(stage, _marked(stage, forged))


@PROBES.probe("F14", "Publish ruling records, frames, audit, dead letters, link traffic and state.")
async def reserved_subjects(stage: Stage) -> ProbeOutcome:
    s, mal, vic = stage.subjects, stage.mal.id, stage.vic.id
    owners = [subject for owner in (mal, vic) for subject in (s.access(owner), s.member(owner, TAG))]
    rulings = [*owners, s.channel(TAG), s.link("probe"), s.steward_lease, s.space_record]
    via = [s.via("probe", sender, stage.channel) for sender in (mal, vic)]
    frames = [s.delivery(mal), s.delivery(vic), s.delivery_lease, s.block(stage.block), s.block("0" * 40)]
    kept = [s.audit("probe"), s.dead("probe", mal), f"$KV.{s.state_bucket}.beat.steward"]
    return await _all_refused(stage, _marked(stage, [*rulings, *via, *frames, *kept]))


@PROBES.probe("F3", "Publish straight to the live subjects, so that others see what the log never had.")
async def live_subjects(stage: Stage) -> ProbeOutcome:
    s, mal, vic = stage.subjects, stage.mal.id, stage.vic.id
    live = f"{s.root}.live"
    tails = [f"chat.{mal}.{stage.channel}", f"chat.{vic}.{stage.channel}", f"via.probe.{vic}.{stage.channel}"]
    tails += ["roster", f"member.{vic}.{TAG}", f"acl.{vic}", "space", "lease.steward"]
    return await _all_refused(stage, _marked(stage, [f"{live}.{tail}" for tail in tails]))


@PROBES.probe("F1", "Post to a channel its access does not name.")
async def foreign_channel(stage: Stage) -> ProbeOutcome:
    s, mal = stage.subjects, stage.mal.id
    return await _all_refused(stage, _marked(stage, [s.chat(mal, stage.secret), s.chat(mal, "general")]))


@PROBES.probe("F26", "Ask JetStream anything: list, read, create, change, purge, delete.")
async def jetstream_api(stage: Stage) -> ProbeOutcome:
    s, vic = stage.subjects, stage.vic.id
    asked: dict[str, bytes] = {"INFO": b"", "STREAM.NAMES": b"", "STREAM.LIST": b'{"subject":">"}'}
    for stream in (*stage.watch.streams, stage.watch.state_stream):
        asked |= {f"STREAM.{verb}.{stream}": b"" for verb in ("PURGE", "DELETE", "SNAPSHOT")}
        asked |= {f"CONSUMER.{verb}.{stream}": b"" for verb in ("NAMES", "LIST")}
        asked |= {
            f"STREAM.INFO.{stream}": b'{"subjects_filter":">"}',
            f"STREAM.MSG.GET.{stream}": b'{"seq":1}',
            f"STREAM.MSG.DELETE.{stream}": b'{"seq":1}',
            f"STREAM.UPDATE.{stream}": json.dumps({"name": stream, "subjects": [stage.nonce]}).encode(),
            f"STREAM.CREATE.{stream}": json.dumps({"name": stream, "subjects": [stage.nonce]}).encode(),
            f"DIRECT.GET.{stream}": b'{"seq":1,"batch":10}',
            f"DIRECT.GET.{stream}.{s.access(vic)}": b"",
            f"CONSUMER.CREATE.{stream}": json.dumps({"stream_name": stream, "config": {}}).encode(),
            f"CONSUMER.CREATE.{stream}.{stage.nonce}": json.dumps({"stream_name": stream, "config": {}}).encode(),
            f"CONSUMER.DURABLE.CREATE.{stream}.{stage.nonce}": b"{}",
        }
    for stream, consumer in stage.watch.mailboxes(vic):
        asked |= {f"CONSUMER.{verb}.{stream}.{consumer}": b"" for verb in ("INFO", "DELETE", "RESET", "PAUSE")}
    reply = f"_INBOX_{stage.mal.id}.probe"
    attempts = {f"$JS.API.{name}": line(f"$JS.API.{name}", body, reply=reply) for name, body in asked.items()}
    return await _all_refused(stage, attempts)


@PROBES.probe("N7", "Give the broker account tokens: an older one, one of its own making; ask the system account.")
async def system_account(stage: Stage) -> ProbeOutcome:
    info = stage.info
    older = stage.home.resolver / f"{info.agents_account}.jwt"
    stolen = older.read_bytes() if older.exists() else b""
    attempts = {"$SYS.REQ.CLAIMS.UPDATE": stolen, "$SYS.REQ.CLAIMS.DELETE": stolen, "$SYS.REQ.CLAIMS.LIST": b""}
    attempts |= {f"$SYS.REQ.ACCOUNT.{info.agents_account}.CLAIMS.{verb}": stolen for verb in ("UPDATE", "LOOKUP")}
    attempts |= {"$SYS.REQ.SERVER.PING": b"", "$SYS.REQ.USER.INFO": b"", "$SYS.ACCOUNT.probe.CONNECT": b""}
    reply = f"_INBOX_{stage.mal.id}.probe"
    return await _all_refused(stage, {name: line(name, body, reply=reply) for name, body in attempts.items()})


@PROBES.probe("N6", "Listen to everything, to rulings, to other agents' inboxes and to channels it may not read.")
async def subscriptions(stage: Stage) -> ProbeOutcome:
    s, mal, vic = stage.subjects, stage.mal.id, stage.vic.id
    live = f"{s.root}.live"
    wanted = [">", "*", "*.>", "td.>", f"{s.root}.>", f"{live}.>", f"{live}.chat.>", f"{live}.via.>", f"{live}.*"]
    wanted += [f"{live}.{kind}.>" for kind in ("member", "acl", "channel", "link", "lease")]
    wanted += [f"{live}.space", s.live_chat(">"), s.live_chat(stage.secret), s.live_via(">"), s.live_chat("general")]
    wanted += [f"{live}.chat.{vic}.{stage.secret}", f"{live}.chat.{vic}.>", f"{s.root}.chat.>", f"{s.root}.dm.>"]
    wanted += [s.chat(mal, stage.channel), s.direct_inbox(vic), f"{s.root}.ctl.>", f"{s.root}.dlv.>"]
    wanted += ["_INBOX.>", "_INBOX_*.>", f"_INBOX_{vic}.>", f"_INBOX_{vic}.*.*", "_R_.>", "$JS.>", "$JS.ACK.>"]
    wanted += ["$SYS.>", "$KV.>", f"$KV.{s.state_bucket}.>", "$SYS._INBOX.>"]
    lines = {name: b"SUB %b %d\r\n" % (name.encode(), 9_000_000 + n) for n, name in enumerate(wanted)}
    queued = {name: b"SUB %b probe %d\r\n" % (name.encode(), 9_100_000 + n) for n, name in enumerate(wanted)}
    verdicts = [await _all_refused(stage, lines), await _all_refused(stage, queued)]
    await stage.mal.send(*(b"UNSUB %d\r\n" % (9_000_000 + n) for n in range(len(wanted))))
    await stage.mal.send(*(b"UNSUB %d\r\n" % (9_100_000 + n) for n in range(len(wanted))))
    return next((each for each in verdicts if each.outcome == "BROKEN"), refused(f"{2 * len(wanted)} refused"))


@PROBES.probe("N6", "Watch for the live copy of a ruling while one is written.")
async def ruling_copies(stage: Stage) -> ProbeOutcome:
    """Everything the attacker may subscribe to is open; a ruling about the victim and one about a channel happen."""
    heard: list[str] = []

    async def hear(message: object) -> None:
        heard.append(getattr(message, "subject", ""))

    s, connection = stage.subjects, stage.mal.connection
    for subject in (s.live_chat(stage.channel), s.live_via(stage.channel), s.live_roster):
        await connection.subscribe(subject, cb=hear)
    await stage.mal.send()
    ruled = await stage.vic.control.call(JoinRequest(f"{stage.base}.wild.>"))
    await stage.vic.control.call(ChangeChannelRequest(stage.channel, description="probe"))
    await stage.barrier()
    await stage.mal.send()
    seen = [subject for subject in heard if f"{s.root}.live.chat." not in subject and subject != s.live_roster]
    if seen:
        return broken(f"a ruling was seen live: {seen[0]}")
    return held(f"ruling {ruled.seq} was written, {len(heard)} live copies were seen, no ruling among them")


@PROBES.probe("N7", "Connect with tokens of its own making: other account, other rights, self-signed, no signature.")
async def forged_tokens(stage: Stage) -> ProbeOutcome:
    creds, info = stage.home.agent_creds("probe-mal").read_text(), stage.info
    token, key = jwt.split_credentials(creds)
    head, body, signature = token.split(".")
    forgers = {
        "its own key": key,
        "a made-up account": KeyPair.generate(ACCOUNT),
        "operator": KeyPair.generate(OPERATOR),
    }
    tokens = {f"signed by {who}": jwt.user_jwt(pair, key.id, "probe", None) for who, pair in forgers.items()}
    claims = json.loads(jwt._unb64(body))
    for account in (info.id, info.system_account, info.agents_account):
        wide = claims | {"iss": account, "nats": claims["nats"] | {"pub": {}, "sub": {}}}
        tokens[f"claims of {account[:5]}"] = f"{head}.{jwt._b64(json.dumps(wide).encode())}.{signature}"
    none = jwt._b64(json.dumps({"typ": "JWT", "alg": "none"}).encode())
    tokens["no algorithm"] = f"{none}.{body}.{signature}"
    for name, forged in tokens.items():
        try:
            made = await connect(info.url, jwt.credentials(forged, key), key.id, name="probe", reconnect=False)
        except (AuthRevoked, BrokerUnreachable):
            continue
        await made.close()
        return broken(f"the broker let a forged token in: {name}")
    return refused(f"{len(tokens)} forged tokens refused")
