"""What the pipeline's credential may not do: it reads the log and writes mailboxes, and that is all.

It lies beside Spark's workers, so whoever takes it from a worker has it. It must not speak for anybody, rule, read mail
or tasks, change a stream, or touch what others keep in the state bucket; neither itself nor by aiming the answer to
something it may ask at something it may not.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from tidings.contract.catalogue import services_of
from tidings.errors import ConflictError
from tidings.nats import jwt
from tidings.nats.errors import ApiError
from tidings.nats.jetstream_api import NO_END
from tidings.server.state import StateBucket
from tidings_testing.security.actor import Actor, acting, line
from tidings_testing.security.replies import targets
from tidings_testing.security.report import Collection, ProbeOutcome, broken, held, refused
from tidings_testing.security.stage import Stage

PROBES = Collection()
#: what would destroy a space that is not safe
REPLIES = Collection()
TAG = "A" * 26
#: where the pipeline may write what it likes and read it back: a request of its own making, in the broker's words
OWN_KEY = "figures.deliver"
#: kept in the state bucket by others
FOREIGN_KEYS = ("floor.log", "floor.archive", "beat.steward", "session.probe", "x", "floor.deliver.x")


async def _all_refused(stage: Stage, attempts: Mapping[str, bytes]) -> ProbeOutcome:
    """`attempts`: what is forbidden -> the protocol line, with {inbox} where the answer would go."""
    before = await stage.watch.mark()
    async with acting(stage.info.url, stage.subjects, stage.home.pipeline_creds) as pipeline:
        inbox = f"_INBOX_{pipeline.id}.probe".encode()
        allowed = await pipeline.not_refused({name: each.replace(b"{inbox}", inbox) for name, each in attempts.items()})
    changed = await stage.unchanged(before)
    if allowed or changed:
        return broken("; ".join(filter(None, (f"not refused: {', '.join(allowed[:5])}" * bool(allowed), changed))))
    return refused(f"{len(attempts)} refused, nothing changed")


def _request(subject: str, payload: bytes) -> bytes:
    return line(subject, payload, reply="{inbox}")


@PROBES.probe("F14", "With the pipeline's credential, speak, rule, or write what others keep.")
async def pipeline_publish(stage: Stage) -> ProbeOutcome:
    s, mal, vic = stage.subjects, stage.mal.id, stage.vic.id
    spoken = [
        s.chat(vic, stage.channel),
        s.via("probe", vic, stage.channel),
        s.direct(vic, mal),
        s.task(stage.role, vic),
    ]
    rulings = [s.access(vic), s.member(vic, TAG), s.channel(TAG), s.link("probe"), s.steward_lease, s.space_record]
    kept = [s.audit("probe"), s.dead("probe", vic), s.live_roster, f"{s.root}.live.chat.{vic}.{stage.channel}"]
    asked = [s.control(service, vic) for service in services_of("agent", "admin")]
    state = [f"$KV.{s.state_bucket}.{key}" for key in FOREIGN_KEYS]
    return await _all_refused(
        stage, {each: _request(each, stage.marked()) for each in (*spoken, *rulings, *kept, *asked, *state)}
    )


@PROBES.probe("F26", "With the pipeline's credential, read mail, tasks and audit, make consumers, change streams.")
async def pipeline_jetstream(stage: Stage) -> ProbeOutcome:
    s, vic = stage.subjects, stage.vic.id
    state = stage.watch.state_stream
    unread = (s.direct_stream, s.task_stream, s.audit_stream, s.dead_stream, s.block_stream)
    asked: dict[str, bytes] = {"INFO": b"", "STREAM.NAMES": b"", "STREAM.LIST": b""}
    for stream in (*unread, state):
        asked |= {
            f"STREAM.INFO.{stream}": b'{"subjects_filter":">"}',
            f"STREAM.MSG.GET.{stream}": b'{"seq":1}',
            f"STREAM.PURGE.{stream}": b"",
            f"DIRECT.GET.{stream}": b'{"seq":1,"batch":10}',
        }
    asked |= {
        f"DIRECT.GET.{s.direct_stream}.{s.direct(vic, vic)}": b"",
        f"DIRECT.GET.{s.delivery_stream}": b'{"seq":1}',
        f"DIRECT.GET.{s.block_stream}.{s.block(stage.block)}": b"",
        f"STREAM.PURGE.{s.log_stream}": b"",
        **{f"DIRECT.GET.{state}.$KV.{s.state_bucket}.{key}": b"" for key in FOREIGN_KEYS if key != "floor.log"},
    }
    for stream in (s.log_stream, s.delivery_stream, *unread, state):
        config = json.dumps({"stream_name": stream, "config": {}}).encode()
        asked |= {f"STREAM.{verb}.{stream}": b"" for verb in ("DELETE", "SNAPSHOT", "UPDATE", "MSG.DELETE")}
        asked |= {f"CONSUMER.CREATE.{stream}{tail}": config for tail in ("", f".{stage.nonce}")}
        asked[f"CONSUMER.DURABLE.CREATE.{stream}.{stage.nonce}"] = b"{}"
    for stream, consumer in stage.watch.mailboxes(vic):
        asked |= {f"CONSUMER.{verb}.{stream}.{consumer}": b"" for verb in ("MSG.NEXT", "DELETE", "RESET", "PAUSE")}
    return await _all_refused(
        stage, {f"$JS.API.{name}": _request(f"$JS.API.{name}", body) for name, body in asked.items()}
    )


@PROBES.probe("N6", "With the pipeline's credential, listen to anything but its own answers.")
async def pipeline_subscribe(stage: Stage) -> ProbeOutcome:
    s, vic = stage.subjects, stage.vic.id
    wanted = [
        ">",
        "*",
        "td.>",
        f"{s.root}.>",
        f"{s.root}.dm.>",
        f"{s.root}.chat.>",
        f"{s.root}.ctl.>",
        f"{s.root}.dlv.>",
    ]
    wanted += [
        f"{s.root}.live.>",
        s.live_roster,
        "_INBOX.>",
        "_INBOX_*.>",
        f"_INBOX_{vic}.>",
        "$JS.>",
        "$KV.>",
        "$SYS.>",
    ]
    return await _all_refused(
        stage, {name: b"SUB %b %d\r\n" % (name.encode(), 9_000_000 + n) for n, name in enumerate(wanted)}
    )


@REPLIES.probe("S4", "With the pipeline's credential, aim the answers to what it may ask at what it may not.")
async def pipeline_replies(stage: Stage) -> ProbeOutcome:
    """A value of its own becomes a request: whoever reads it back with such a reply has made the call."""
    s = stage.subjects
    literal = _literal_imports(stage)
    if literal:
        return broken(f"imports without a wildcard take an answer for a request: {', '.join(literal[:5])}")
    aims = [*targets(stage), *_reading(stage), s.delivery(stage.mal.id)]
    before = await stage.watch.mark()
    async with acting(stage.info.url, s, stage.home.pipeline_creds) as pipeline, _own_key_kept(stage):
        for request in _requests(stage):
            await _aim(stage, pipeline, request, aims)
    found = [*await _readers(stage), *filter(None, [await stage.unchanged(before)])]
    if found:
        return broken("; ".join(found))
    return held(f"{len(aims)} subjects, each tried with 4 calls and {len(_requests(stage))} requests, nothing changed")


def _literal_imports(stage: Stage) -> list[str]:
    """Service imports of any account the broker serves that name one subject."""
    tokens = [jwt.decode(path.read_text().strip())["nats"] for path in sorted(stage.home.resolver.glob("A*.jwt"))]
    services = [each for claims in tokens for each in claims.get("imports", ()) if each["type"] == "service"]
    return [each["subject"] for each in services if not {"*", ">"} & set(each["subject"].split("."))]


def _requests(stage: Stage) -> list[bytes]:
    """What would be believed where it must not arrive: a consumer over mail and tasks, a change of a stream."""
    s = stage.subjects
    consumers = [
        {"stream_name": stream, "config": {"name": stage.nonce, "ack_policy": "none", "mem_storage": True}}
        for stream in (s.direct_stream, s.task_stream)
    ]
    return [json.dumps(each).encode() for each in (*consumers, {})]


def _reading(stage: Stage) -> list[str]:
    """Calls that would hand over what it may not read."""
    s = stage.subjects
    return [f"$JS.API.CONSUMER.CREATE.{stream}.{stage.nonce}" for stream in (s.direct_stream, s.task_stream)]


async def _readers(stage: Stage) -> list[str]:
    found = []
    for stream in (stage.subjects.direct_stream, stage.subjects.task_stream):
        with suppress(ApiError):  # gone: the marks say so
            if stage.nonce in ((await stage.js.api(f"CONSUMER.NAMES.{stream}"))["consumers"] or ()):
                found.append(f"{stream} has a reader of the pipeline's making")
    return found


@asynccontextmanager
async def _own_key_kept(stage: Stage) -> AsyncIterator[None]:
    """What a running pipeline says of itself there is put back, unless it said something newer."""
    bucket = StateBucket(stage.js, stage.subjects)
    kept = await bucket.get(OWN_KEY)
    try:
        yield
    finally:
        with suppress(ConflictError, ApiError):  # it said something newer; or an attack took the bucket away
            left = await bucket.get(OWN_KEY)
            if kept is None:
                key = f"$KV.{stage.subjects.state_bucket}.{OWN_KEY}"
                await stage.js.purge(stage.watch.state_stream, subject_filter=key, below=NO_END)
            elif left is not None and not left.value.get("at_ns"):
                await bucket.put(OWN_KEY, kept.value, left.revision)


async def _aim(stage: Stage, pipeline: Actor, request: bytes, aims: list[str]) -> None:
    """Every call that is answered, with its answer aimed at each of `aims`; returns when all have been answered."""
    s, key = stage.subjects, f"$KV.{stage.subjects.state_bucket}.{OWN_KEY}"
    await pipeline.request(key, request)
    calls = [
        (f"$JS.API.DIRECT.GET.KV_{s.state_bucket}.{key}", b""),
        (f"$JS.API.DIRECT.GET.{s.log_stream}", b'{"seq":1,"batch":1}'),
        (f"$JS.API.STREAM.INFO.{s.log_stream}", b""),
        (f"$JS.API.STREAM.MSG.GET.{s.delivery_stream}", b'{"seq":1}'),
    ]
    for subject, body in calls:
        await pipeline.send(*(line(subject, body, reply=aim) for aim in aims))
        await pipeline.request(subject, body)  # answered after those before it
