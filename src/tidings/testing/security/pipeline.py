"""What the pipeline's credential may not do: it reads the log and writes mailboxes, and that is all.

It lives in CORE with Spark's workers, so whoever takes it from a worker has it. It must not speak for anybody, rule,
read mail or tasks, change a stream, or touch what others keep in the state bucket.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from tidings.testing.security.actor import acting, line
from tidings.testing.security.report import Collection, Verdict, broken, refused
from tidings.testing.security.stage import Stage
from tidings.wire.subjects import AGENT_SERVICES

PROBES = Collection()
TAG = "A" * 26
#: kept in the state bucket by others
FOREIGN_KEYS = ("floor.log", "floor.archive", "beat.steward", "session.probe", "x", "floor.deliver.x")


async def _all_refused(stage: Stage, attempts: Mapping[str, bytes]) -> Verdict:
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
async def pipeline_publish(stage: Stage) -> Verdict:
    s, mal, vic = stage.subjects, stage.mal.id, stage.vic.id
    spoken = [
        s.chat(vic, stage.channel),
        s.via("probe", vic, stage.channel),
        s.direct(vic, mal),
        s.task(stage.role, vic),
    ]
    rulings = [s.access(vic), s.member(vic, TAG), s.channel(TAG), s.link("probe"), s.steward_lease, s.space_record]
    kept = [s.audit("probe"), s.dead("probe", vic), s.live_roster, f"{s.root}.live.chat.{vic}.{stage.channel}"]
    asked = [s.control(service, vic) for service in (*AGENT_SERVICES, "admin")]
    state = [f"$KV.{s.state_bucket}.{key}" for key in FOREIGN_KEYS]
    return await _all_refused(
        stage, {each: _request(each, stage.marked()) for each in (*spoken, *rulings, *kept, *asked, *state)}
    )


@PROBES.probe("F26", "With the pipeline's credential, read mail, tasks and audit, make consumers, change streams.")
async def pipeline_jetstream(stage: Stage) -> Verdict:
    s, vic = stage.subjects, stage.vic.id
    state = stage.watch.state_stream
    unread = (s.direct_stream, s.task_stream, s.audit_stream, s.dead_stream)
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
async def pipeline_subscribe(stage: Stage) -> Verdict:
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
