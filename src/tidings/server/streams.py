"""The streams of a space with their exact settings, and the gate of the log.

No stream of records ages by itself: `max_age`, TTLs and `discard: old` would let the broker remove what decides who is
owed what. Only the sealed blocks, which are copies and decide nothing, are the broker's to remove. An existing stream
with other settings is brought back to these, or refused by name if the server will not.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidings.errors import StreamMismatch
from tidings.nats import jetstream_api as api
from tidings.nats.errors import NO_STREAM, ApiError
from tidings.nats.jetstream import JetStream
from tidings.nats.jetstream_api import EPOCH_KEY, Steps
from tidings.server.config import RESERVE
from tidings.server.grants import MAX_MESSAGE
from tidings.wire.subjects import RULING_KINDS, Subjects

MINUTE_NS = 60 * 1_000_000_000
BUDGET_KEY = "td.budget"
MAX_BUDGET = 8 * 1024**3
MIN_BUDGET = 1024 * 1024
MAX_FRAME = 600 * 1024
MAX_BLOCK = 304 * 1024
#: Sealed blocks, all together: small, because the broker keeps much of what is read at random in memory.
BLOCK_BUDGET = 256 * 1024**2
BLOCK_AGE = 7 * 24 * 60 * MINUTE_NS
#: settings no stream of records may have, compared and restored like the others
_FORBIDDEN = {
    "max_age": 0,
    "max_msgs": -1,
    "allow_rollup_hdrs": False,
    "allow_msg_ttl": False,
    "sealed": False,
    "deny_purge": False,
    "deny_delete": False,
    "mirror_direct": False,
}


def default_budget(folder: Path) -> int:
    """Bytes the log may take: 8 GiB or 40 % of the free disk, whichever is less."""
    return max(MIN_BUDGET, min(MAX_BUDGET, int(shutil.disk_usage(folder).free * 0.4)))


def storage_needed(budget: int) -> int:
    """What all streams together may reserve, the gate's reserve included."""
    return int(budget * 1.75) + 2 * RESERVE


@dataclass(frozen=True, slots=True)
class StreamSpec:
    name: str
    config: Mapping[str, Any]


def log_subjects(s: Subjects, *, gate_open: bool = True) -> list[str]:
    ruling = [*(f"{s.root}.{kind}.>" for kind in RULING_KINDS if kind != "space"), s.space_record]
    return [f"{s.root}.chat.>", f"{s.root}.via.>", *ruling] if gate_open else ruling


def _spec(name: str, subjects: list[str], **settings: Any) -> StreamSpec:
    base = {
        "name": name,
        "subjects": subjects,
        "storage": "file",
        "num_replicas": 1,
        "retention": "limits",
        "discard": "new",
        "allow_direct": True,
        "duplicate_window": 10 * MINUTE_NS,
        "max_msg_size": MAX_MESSAGE,
        "max_msgs_per_subject": -1,
        **_FORBIDDEN,
    }
    return StreamSpec(name, base | settings)


def stream_specs(s: Subjects, budget: int, epoch: str, replicas: int = 1) -> list[StreamSpec]:
    """Every stream of a space. `epoch` is used only when LOG is created.

    With replicas the pipeline writes frames in atomic batches: such a stream takes one write of a lease at a time.
    """
    specs = _specs_alone(s, budget, epoch)
    if replicas == 1:
        return specs
    atomic = {s.delivery_stream: {"allow_atomic": True}}
    return [
        StreamSpec(each.name, {**each.config, "num_replicas": replicas, **atomic.get(each.name, {})}) for each in specs
    ]


def _specs_alone(s: Subjects, budget: int, epoch: str) -> list[StreamSpec]:
    mailbox = {"max_msgs_per_subject": 1_000, "discard_new_per_subject": True, "max_bytes": budget // 8}
    return [
        _spec(
            s.log_stream,
            log_subjects(s),
            max_bytes=budget,
            max_consumers=16,
            republish={"src": f"{s.root}.>", "dest": f"{s.root}.live.>"},
            metadata={BUDGET_KEY: str(budget), EPOCH_KEY: epoch},
        ),
        _spec(s.direct_stream, [f"{s.root}.dm.>"], max_consumers=10_000, **mailbox),
        _spec(s.task_stream, [f"{s.root}.task.>"], max_consumers=1_000, **mailbox),
        _spec(
            s.delivery_stream,
            [f"{s.root}.dlv.>"],
            retention="workqueue",
            max_msgs_per_subject=64,
            discard_new_per_subject=True,
            duplicate_window=2 * MINUTE_NS,
            max_msg_size=MAX_FRAME,
            max_bytes=budget // 4,
            max_consumers=10_000,
        ),
        _spec(s.audit_stream, [f"{s.root}.aud.>"], max_bytes=budget // 16, max_consumers=16),
        _spec(s.dead_stream, [f"{s.root}.dead.>"], max_bytes=budget // 16, max_consumers=16),
        _spec(
            s.block_stream,
            [f"{s.root}.blk.*.*.b"],
            max_msgs_per_subject=1,
            discard="old",
            max_age=BLOCK_AGE,
            max_msg_size=MAX_BLOCK,
            max_bytes=min(BLOCK_BUDGET, budget // 8),
            max_consumers=1,
            duplicate_window=2 * MINUTE_NS,
        ),
        _spec(
            f"KV_{s.state_bucket}",
            [f"$KV.{s.state_bucket}.>"],
            max_msgs_per_subject=1,
            # one value per key, the newest: state, not history
            discard="old",
            max_bytes=16 * 1024 * 1024,
            max_consumers=16,
            duplicate_window=2 * MINUTE_NS,
        ),
    ]


async def ensure_streams(js: JetStream, s: Subjects, budget: int, epoch: str, replicas: int = 1) -> list[str]:
    """Create what is missing, reconcile what differs. Answers what was changed, in words."""
    changes: list[str] = []
    for spec in stream_specs(s, budget, epoch, replicas):
        changes += await _ensure(js, s, spec)
    return changes


async def _ensure(js: JetStream, s: Subjects, spec: StreamSpec) -> list[str]:
    try:
        current = (await js.info(spec.name))["config"]
    except ApiError as error:
        if error.err_code != NO_STREAM:
            raise
        await js.api(f"STREAM.CREATE.{spec.name}", spec.config)
        return [f"{spec.name} created"]
    wanted = _respecting_gate_and_epoch(s, spec, current)
    differences = _differences(wanted, current)
    if not differences:
        return []
    try:
        await js.api(f"STREAM.UPDATE.{spec.name}", _updatable(current) | wanted)
    except ApiError as error:
        raise StreamMismatch(
            f"stream {spec.name} has other settings than Tidings needs ({'; '.join(differences)}) and the broker will "
            f"not change them: {error.description}. Move it away or start a new space."
        ) from error
    left = _differences(wanted, (await js.info(spec.name))["config"])
    if left:
        raise StreamMismatch(f"stream {spec.name} kept other settings than Tidings needs: {'; '.join(left)}")
    return [f"{spec.name} reconciled ({'; '.join(differences)})"]


def _respecting_gate_and_epoch(s: Subjects, spec: StreamSpec, current: Mapping[str, Any]) -> dict[str, Any]:
    """A closed gate is a state, not a wrong setting; and an epoch, once given, is changed by the steward only."""
    wanted = dict(spec.config)
    if spec.name != s.log_stream:
        return wanted
    if sorted(current["subjects"]) == sorted(log_subjects(s, gate_open=False)):
        wanted["subjects"] = current["subjects"]
        wanted["max_bytes"] = wanted["max_bytes"] + RESERVE
    epoch = (current.get("metadata") or {}).get(EPOCH_KEY)
    if epoch:
        wanted["metadata"] = wanted["metadata"] | {EPOCH_KEY: epoch}
    return wanted


def _differences(wanted: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    found = []
    for key, value in wanted.items():
        have = current.get(key)
        if key == "subjects":
            same = sorted(have or []) == sorted(value)
        elif key == "metadata":
            same = value.items() <= (have or {}).items()
        elif key == "republish":
            same = have is not None and value.items() <= have.items()
        else:
            same = have == value or (have is None and not value)
        if not same:
            found.append(f"{key} is {have!r}, should be {value!r}")
    unwanted = [key for key in ("mirror", "sources", "subject_transform") if current.get(key)]
    return found + [f"{key} is set" for key in unwanted]


def _updatable(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as the server reported it, without what only the server may write."""
    metadata = {k: v for k, v in (config.get("metadata") or {}).items() if not k.startswith("_nats.")}
    return {**config, "metadata": metadata}


# --- the gate: chat and via are taken out of LOG before it is full, so that ruling goes on -----------------------


@dataclass(frozen=True, slots=True)
class GateState:
    open: bool
    used: int
    budget: int

    @property
    def share(self) -> float:
        return self.used / self.budget


async def gate_state(js: JetStream, s: Subjects) -> GateState:
    return gate_of(s, await js.info(s.log_stream))


def gate_of(s: Subjects, info: Mapping[str, Any]) -> GateState:
    config = info["config"]
    budget = int((config.get("metadata") or {}).get(BUDGET_KEY, config["max_bytes"]))
    return GateState(f"{s.root}.chat.>" in config["subjects"], info["state"]["bytes"], budget)


def gate_steps(s: Subjects, *, gate_open: bool) -> Steps[GateState]:
    """Open or close the gate. Idempotent and needs no lease: closing must work when the lease cannot be written."""
    info = yield from api.info(s.log_stream)
    state = gate_of(s, info)
    if state.open != gate_open:
        wanted = {
            "subjects": log_subjects(s, gate_open=gate_open),
            "max_bytes": state.budget if gate_open else state.budget + RESERVE,
        }
        yield from api.api(f"STREAM.UPDATE.{s.log_stream}", _updatable(info["config"]) | wanted)
    return GateState(gate_open, state.used, state.budget)


async def set_gate(js: JetStream, s: Subjects, *, gate_open: bool) -> GateState:
    return await js.run(gate_steps(s, gate_open=gate_open))


async def set_epoch(js: JetStream, s: Subjects, epoch: str) -> None:
    """Give the log a new epoch: said once, after it went backwards."""
    config = _updatable((await js.info(s.log_stream))["config"])
    config["metadata"] = config["metadata"] | {EPOCH_KEY: epoch}
    await js.api(f"STREAM.UPDATE.{s.log_stream}", config)
