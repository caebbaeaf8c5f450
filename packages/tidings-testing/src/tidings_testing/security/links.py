"""What the workers of links may not do: those of linked spaces ask the steward, our own admits, and that is all.

The first is somebody else's program, with a credential that lies on another machine. The second is ours and speaks for
agents of other spaces, so it must not speak for ours, rule, or read what it was not shown. Users are made for the
probes; they belong to no link, and end by themselves.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tidings.errors import DeniedError
from tidings.nats import jwt
from tidings.server.keyring import Keyring
from tidings.util.private_files import write_private
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import ADMIN_SERVICE, ADMISSION_SERVICE, AGENT_SERVICES, INVITATION_SERVICE, LINK_SERVICE
from tidings_testing.raw_requests import raw_call
from tidings_testing.security.actor import Actor, acting, line
from tidings_testing.security.replies import targets
from tidings_testing.security.report import Collection, ProbeOutcome, broken, held, refused
from tidings_testing.security.stage import Stage

PROBES = Collection()
#: what would destroy a space that is not safe
REPLIES = Collection()
TAG = "A" * 26
SECONDS = 300


@asynccontextmanager
async def _peer(stage: Stage) -> AsyncIterator[Actor]:
    """The worker of a space that is linked with nobody."""
    keyring, key, now = Keyring.load(stage.home.keys), KeyPair.generate(), int(time.time())
    token = keyring.peer_token(stage.subjects, key.id, "probe", iat=now, expires=now + SECONDS)
    with TemporaryDirectory() as folder:
        creds = Path(folder) / "peer.creds"
        write_private(creds, jwt.credentials(token, key))
        async with acting(stage.info.url, stage.subjects, creds) as actor:
            yield actor


@asynccontextmanager
async def _worker(stage: Stage) -> AsyncIterator[Actor]:
    async with acting(stage.info.url, stage.subjects, stage.home.link_creds) as actor:
        yield actor


async def _all_refused(stage: Stage, actor: Actor, attempts: Mapping[str, bytes]) -> ProbeOutcome:
    before = await stage.watch.mark()
    allowed = await actor.not_refused(attempts)
    changed = await stage.unchanged(before)
    if allowed or changed:
        return broken("; ".join(filter(None, (f"not refused: {', '.join(allowed[:5])}" * bool(allowed), changed))))
    return refused(f"{len(attempts)} refused, nothing changed")


def _requests(actor: Actor, subjects: Mapping[str, bytes]) -> dict[str, bytes]:
    return {each: line(each, payload, reply=f"_INBOX_{actor.id}.probe") for each, payload in subjects.items()}


def _unpublished(stage: Stage, actor: Actor) -> list[str]:
    """What neither may publish."""
    s, vic = stage.subjects, stage.vic.id
    spoken = [s.chat(vic, stage.channel), s.chat(actor.id, stage.channel), s.direct(vic, actor.id)]
    spoken += [s.task(stage.role, actor.id), s.delivery(vic), s.delivery_lease, s.block(stage.block)]
    rulings = [s.access(vic), s.member(vic, TAG), s.channel(TAG), s.link("probe"), s.steward_lease, s.space_record]
    kept = [s.audit("probe"), s.dead("probe", vic), f"$KV.{s.state_bucket}.floor.link.probe", s.live_roster]
    live = [f"{s.root}.live.chat.{vic}.{stage.channel}", s.live_link(actor.id), s.live_link(vic)]
    live += [f"{s.root}.live.via.probe.{vic}.{stage.channel}"]
    services = (*AGENT_SERVICES, INVITATION_SERVICE, ADMIN_SERVICE)
    asked = [s.control(service, sender) for service in services for sender in (actor.id, vic)]
    asked += [s.control(service, vic) for service in (LINK_SERVICE, ADMISSION_SERVICE)]
    return [*spoken, *rulings, *kept, *live, *asked]


def _jetstream(stage: Stage) -> dict[str, bytes]:
    asked: dict[str, bytes] = {"INFO": b"", "STREAM.NAMES": b"", "STREAM.LIST": b""}
    for stream in (*stage.watch.streams, stage.watch.state_stream):
        asked |= {f"STREAM.{verb}.{stream}": b"" for verb in ("INFO", "PURGE", "DELETE", "SNAPSHOT", "UPDATE")}
        asked |= {f"STREAM.MSG.GET.{stream}": b'{"seq":1}', f"DIRECT.GET.{stream}": b'{"seq":1,"batch":10}'}
        asked |= {f"DIRECT.GET.{stream}.{stage.subjects.space_record}": b"", f"CONSUMER.NAMES.{stream}": b""}
        asked |= {f"CONSUMER.CREATE.{stream}{tail}": b"{}" for tail in ("", f".{stage.nonce}")}
    for stream, consumer in stage.watch.mailboxes(stage.vic.id):
        asked |= {f"CONSUMER.{verb}.{stream}.{consumer}": b"" for verb in ("MSG.NEXT", "INFO", "DELETE")}
    return {f"$JS.API.{name}": body for name, body in asked.items()}


def _unheard(stage: Stage) -> dict[str, bytes]:
    """What neither may listen to: chat, rulings, others' wakes and answers."""
    s, vic = stage.subjects, stage.vic.id
    live = f"{s.root}.live"
    wanted = [">", "*", "td.>", f"{s.root}.>", f"{live}.>", f"{live}.chat.>", f"{live}.via.>", f"{live}.link.*"]
    wanted += [
        f"{live}.link.>",
        f"{live}.link.probe",
        s.live_link(vic),
        s.live_roster,
        f"{live}.acl.>",
        f"{live}.space",
    ]
    wanted += [s.live_chat(stage.channel), s.live_via(stage.channel), f"{s.root}.chat.>", f"{s.root}.via.>"]
    wanted += [f"{s.root}.ctl.>", f"{s.root}.ctl.{LINK_SERVICE}.*", f"{s.root}.ctl.{ADMISSION_SERVICE}.*"]
    wanted += [f"{s.root}.dm.>", "_INBOX.>", "_INBOX_*.>", f"_INBOX_{vic}.>", "_R_.>", "$JS.>", "$KV.>", "$SYS.>"]
    return {name: b"SUB %b %d\r\n" % (name.encode(), 9_200_000 + n) for n, name in enumerate(wanted)}


@PROBES.probe("F14", "As the worker of a linked space, speak, admit, rule, wake others, or ask other services.")
async def peer_publish(stage: Stage) -> ProbeOutcome:
    s = stage.subjects
    async with _peer(stage) as peer:
        more = [s.via("probe", stage.vic.id, stage.channel), s.via("probe", peer.id, stage.channel)]
        more += [s.control(ADMISSION_SERVICE, peer.id)]
        subjects = dict.fromkeys((*_unpublished(stage, peer), *more), stage.marked())
        return await _all_refused(stage, peer, _requests(peer, subjects))


@PROBES.probe("F26", "As the worker of a linked space, ask JetStream anything.")
async def peer_jetstream(stage: Stage) -> ProbeOutcome:
    async with _peer(stage) as peer:
        return await _all_refused(stage, peer, _requests(peer, _jetstream(stage)))


@PROBES.probe("N6", "As the worker of a linked space, listen to chat, rulings, others' wakes and answers.")
async def peer_subscribe(stage: Stage) -> ProbeOutcome:
    async with _peer(stage) as peer:
        return await _all_refused(stage, peer, _unheard(stage))


@PROBES.probe("N6", "As a user that no link names, ask for what links share.")
async def peer_of_no_link(stage: Stage) -> ProbeOutcome:
    asked: dict[str, dict[str, Any]] = {
        "hello": {},
        "page": {"after": 0},
        "digest": {"through": 1},
        "fetch": {"seqs": [1]},
        "roster": {},
        "mail": {},
        "told": {"receipts": []},
    }
    async with _peer(stage) as peer:
        for do, arguments in asked.items():
            try:
                await raw_call(peer.control, LINK_SERVICE, do, **arguments)
            except DeniedError:
                continue
            return broken(f"{do} was answered")
    return refused(f"{len(asked)} requests refused")


@PROBES.probe("F14", "As this space's own worker of links, speak for its agents, rule, wake, or ask other services.")
async def worker_publish(stage: Stage) -> ProbeOutcome:
    async with _worker(stage) as worker:
        more = [stage.subjects.control(LINK_SERVICE, worker.id)]
        # mail and tasks of linked spaces are all it publishes besides; what it could forge of them has no name
        admitted = (stage.subjects.direct(stage.vic.id, worker.id), stage.subjects.task(stage.role, worker.id))
        kept = [each for each in (*_unpublished(stage, worker), *more) if each not in admitted]
        return await _all_refused(stage, worker, _requests(worker, dict.fromkeys(kept, stage.marked())))


@PROBES.probe("F26", "As this space's own worker of links, ask JetStream anything.")
async def worker_jetstream(stage: Stage) -> ProbeOutcome:
    async with _worker(stage) as worker:
        return await _all_refused(stage, worker, _requests(worker, _jetstream(stage)))


@PROBES.probe("N6", "As this space's own worker of links, listen to anything but its own answers.")
async def worker_subscribe(stage: Stage) -> ProbeOutcome:
    async with _worker(stage) as worker:
        own = stage.subjects.live_link(worker.id)
        return await _all_refused(stage, worker, _unheard(stage) | {own: b"SUB %b 9300000\r\n" % own.encode()})


@REPLIES.probe("S4", "As a worker of links, aim the answers to what it may ask at what it may not.")
async def link_replies(stage: Stage) -> ProbeOutcome:
    s, aims = stage.subjects, [*targets(stage), stage.subjects.live_link(stage.vic.id)]
    before = await stage.watch.mark()
    async with _peer(stage) as peer:
        asked = s.control(LINK_SERVICE, peer.id)
        await peer.send(*(line(asked, b"{}", reply=aim) for aim in aims))
        await peer.request(asked, b"{}")
    async with _worker(stage) as worker:
        # a word that counts for nobody: no link is called so
        said = s.via("probe", worker.id, stage.channel), b"[]"
        for subject, payload in ((s.control(ADMISSION_SERVICE, worker.id), b"{}"), said):
            await worker.send(*(line(subject, payload, reply=aim) for aim in aims))
            await worker.request(subject, payload)
    if changed := await stage.unchanged(before):
        return broken(changed)
    return held(f"{len(aims)} subjects, each tried with 3 calls, nothing changed")
