"""What grows with a space: `python scripts/scale.py [--json] [--plots docs/scale] [--page docs/scale.md]`.

Spaces of 100 to 100,000 agents are made up (`scale_world.py`, from a seed) and the pure core is run over them, without
a broker and without Spark: the fold, retention, planning of durable copies, frames and blocks, tokens, the ledger of
agents, the roster, admission. Seconds are CPU time of this process, bytes are counted, memory is what the process grew
by; each size is measured in a process of its own. What follows from a measured figure by arithmetic (a day of traffic)
is computed here; what only a broker can say is taken from `docs/performance.md` or from a constant (`scale_page.py`).

`--plots` writes the figures (`figures.json`) and the charts made of them; `--page` writes the tables of the page anew.
With `--from FILE` nothing is measured: figures, charts and tables are made from that file.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import pickle
import platform
import random
import re
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from scale_page import (
    MAILBOX_FRAMES,
    MAX_PAYLOAD,
    MEANINGS,
    Figures,
    agents_words,
    charts,
    limits_in_order,
    shown,
    written_page,
)
from scale_world import BEGAN, SUBJECTS, Assumed, World
from tidings import __version__
from tidings.admin.agents import Issued, Ledger
from tidings.contract.agents import KeptAttention
from tidings.delivery.deliverer import DeliverBatch, Deliverer
from tidings.delivery.ledger import DELIVERIES, DeltaLedger, LedgerPaths
from tidings.model.blocks import MadeBlock, Segments, cut_blocks
from tidings.model.classify import Classifier, Deliverable
from tidings.model.compaction import removable
from tidings.model.deferred import Debts
from tidings.model.planning import Plan, by_reference, plan, settle
from tidings.model.projection import LogRecord, Table
from tidings.model.unread import UnreadWindow
from tidings.server.keyring import Keyring
from tidings.server.streams import MAX_BUDGET
from tidings.steward.context import Intervals
from tidings.steward.fair_queue import Admission
from tidings.steward.receipts import KEPT as RECEIPTS_KEPT
from tidings.steward.requests import parse_request
from tidings.steward.retention import DEFAULT_SHARE, RECORD_OVERHEAD, stored_size
from tidings.steward.roster import RosterTable
from tidings.wire.frames import SECRET_BYTES, BlockSealer, encode_frame
from tidings.wire.records import StoredRecord, encode_headers
from tidings.wire.roster import AgentEntry, Attention, Delta, sign_delta

ROOT = Path(__file__).parents[1]
SIZES = (100, 1_000, 10_000, 100_000)
DAY = 86_400
EPOCH = "epoch"
#: beats in a time to live, as `client/presence.py` makes them
BEATS_PER_TTL = 2.5

# --- measuring ---


@contextmanager
def cpu(figures: Figures, name: str, per: float = 1.0) -> Iterator[None]:
    """CPU seconds of what happens inside, times `per`."""
    started = time.process_time()
    yield
    figures[name] = (time.process_time() - started) * per


def resident() -> int:
    """Bytes of memory this process holds."""
    gc.collect()
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) * 1024  # type: ignore[index]


def measure(agents: int, assumed: Assumed | None = None) -> Figures:
    """Every figure of a space with so many agents."""
    world = World(agents, assumed or Assumed())
    found: Figures = {"agents": agents, "channels": len(world.channels), "largest_channel": max(world.sizes)}
    table = _measure_fold(world, found)
    _measure_rules(world, table, found)
    _measure_tokens(world, found)
    _measure_issued(world, found)
    _measure_roster(world, table, found)
    _measure_traffic(world, table, found)
    _count_on_broker(world, found)
    return {name: _rounded(value) for name, value in found.items()}


def _rounded(value: float) -> float:
    """Four digits: more would only be noise, and differ in every run."""
    return value if isinstance(value, int) or value == 0 else float(f"{value:.4g}")


def _measure_fold(world: World, found: Figures) -> Table:
    records = list(world.ruling_records())
    found["rulings"] = len(records)
    found["ruling_bytes"] = sum(map(_ruling_size, records))
    before = resident()
    with cpu(found, "fold_s"):
        table = Table(SUBJECTS, world.space_id, world.steward.id).apply_all(records)
    assert not table.void, table.void
    found["fold_bytes"] = max(0, resident() - before)
    return table


def _ruling_size(record: LogRecord) -> int:
    block = encode_headers(list(record.headers.items()))
    return RECORD_OVERHEAD + len(record.subject) + len(block) + len(record.payload)


def _measure_rules(world: World, table: Table, found: Figures) -> None:
    """Questions of the fold: for one agent, for one message, and those that go over everybody."""
    rng = random.Random(world.assumed.seed)
    asked = [(rng.choice(world.ids), world.channels[room]) for _, room in islice(world.posts(), 2_000)]
    with cpu(found, "lookup_us", 1e6 / len(asked)):
        for owner, channel in asked:
            table.allowed_at(owner, channel, table.head)
    with cpu(found, "audience_us", 1e6 / len(asked)):
        for owner, channel in asked:
            table.owed(table.head + 1, owner, channel)
    with cpu(found, "narrowings_s"):
        table.rules.narrowings(table.head - 10, table.head)
    with cpu(found, "retention_s"):
        removable(table, table.head)
    with cpu(found, "rules_s"):
        rules = pickle.dumps(table.rules.for_workers(table.head), -1)
    found["rules_bytes"] = len(rules)
    with cpu(found, "cuts_s"):
        segments = Segments(table.cuts)
        for channel in world.channels:
            segments.number(channel, table.head)


def _measure_tokens(world: World, found: Figures) -> None:
    found["agent_token_bytes"] = len(world.token(0))
    revoked = dict.fromkeys(world.ids, BEGAN)
    with cpu(found, "account_token_s"):
        token = world.keyring.agents_token(SUBJECTS, revoked)
    found["account_token_bytes"] = len(token)


def most_revocations(keyring: Keyring) -> int:
    """How many keys the account token can hold as void before the broker takes it no more."""
    sizes = [
        len(keyring.agents_token(SUBJECTS, {f"U{n:055}": BEGAN for n in range(count)})) for count in (1_000, 2_000)
    ]
    each = (sizes[1] - sizes[0]) / 1_000
    return int((MAX_PAYLOAD - sizes[0]) / each) + 1_000


def _measure_issued(world: World, found: Figures) -> None:
    """The rows of `agents/issued`, as the administrator writes and reads them; written without its syncs."""
    with tempfile.TemporaryDirectory() as folder:
        size = 0
        for number, owner in enumerate(world.ids):
            patterns = ("general", "team.>")
            token = world.token(number) if number < 100 else "x" * int(found["agent_token_bytes"])
            row = Issued(owner, world.name(number), "active", owner, patterns, patterns, (), ("worker",), token, BEGAN)
            text = json.dumps(asdict(row), indent=1) + "\n"
            size += len(text)
            (Path(folder) / f"{owner}.json").write_text(text)
        with cpu(found, "issued_read_s"):
            rows = Ledger(Path(folder)).rows()
    assert len(rows) == world.agents
    found["issued_bytes"] = size


def _measure_roster(world: World, table: Table, found: Figures) -> None:
    ttl = Intervals().presence
    access = {owner: table.access_at(owner, table.head) for owner in world.ids}
    roster = world.roster({owner: each for owner, each in access.items() if each is not None}, ttl)
    rows, _ = roster.news()
    payload, headers = sign_delta(world.steward, world.space_id, Delta(boot="x" * 36, n=1, rows=tuple(rows[:1])))
    found["row_bytes"] = len(msgspec.json.encode(rows[0])) + 1
    told = len(payload) + len(encode_headers(list(headers.items()))) + len(SUBJECTS.live_roster)
    _measure_snapshot(roster, found)
    found["arrival_s"] = found["snapshot_s"] * world.agents
    found["arrival_bytes"] = found["snapshot_bytes"] * world.agents
    found["beats_per_s"] = world.agents * BEATS_PER_TTL / ttl
    _measure_beats(world, roster, found)
    with cpu(found, "sweep_s"):
        roster.sweep(1.0)
    found["changes_per_s"] = world.messages_a_day * world.assumed.changes / DAY
    # changes within one interval of the roster share a delta
    rate = min(found["changes_per_s"], 1 / Intervals().roster)
    each = found["changes_per_s"] * found["row_bytes"] + rate * (told - found["row_bytes"])
    found["roster_bytes_each_per_s"] = each
    found["roster_bytes_per_s"] = each * world.agents
    standing = {owner: KeptAttention(Attention("focus", {"team.>": "quiet"}), BEGAN * 1000) for owner in world.ids}
    found["attention_bytes"] = len(msgspec.json.encode(standing))


def _measure_snapshot(roster: RosterTable, found: Figures) -> None:
    """Every page of it, as the steward answers; and what an endpoint holds of it."""
    answers, after, more = [], "", True
    with cpu(found, "snapshot_s"):
        while more:
            page, more = roster.page(after)
            answers.append(msgspec.json.encode({"rows": page, "next": page[-1].id if more else None}))
            after = page[-1].id
    found["snapshot_pages"] = len(answers)
    found["snapshot_bytes"] = sum(map(len, answers))
    tracemalloc.start()
    held = [msgspec.convert(row, AgentEntry) for each in answers for row in json.loads(each)["rows"]]
    found["roster_held_bytes"] = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del held


def _measure_beats(world: World, roster: RosterTable, found: Figures) -> None:
    """A beat from its bytes to the table; and the first request of everybody, which `Admission` has not seen before."""
    sample = min(world.agents, 2_000)
    asked = [
        (
            SUBJECTS.control("presence", world.ids[number]),
            json.dumps({"op": "beat-op-1", "do": "beat", **world.beat(number)}),
        )
        for number in range(sample)
    ]
    admission = Admission()
    with cpu(found, "beat_us", 1e6 / sample):
        for subject, body in asked:
            data = body.encode()
            admission.judge(subject.rpartition(".")[2], len(data), 0.0)
            call = parse_request(SUBJECTS, subject, data)
            roster.beat(call.caller.id, call.request, 0.0, BEGAN)
    found["beats_share"] = found["beats_per_s"] * found["beat_us"] / 1e6
    fresh = Admission()
    with cpu(found, "admission_s"):
        for number, owner in enumerate(world.ids):
            fresh.judge(owner, 300, number / 5_000)


# --- traffic ---


def _measure_traffic(world: World, table: Table, found: Figures) -> None:
    found["messages_a_day"] = world.messages_a_day
    sample = list(islice(world.messages(table.head), 2_000))
    found["message_bytes"] = sum(map(stored_size, sample)) / len(sample)
    found["log_bytes_a_day"] = found["message_bytes"] * world.messages_a_day
    kept = max(0.0, MAX_BUDGET * DEFAULT_SHARE - found["ruling_bytes"])
    found["log_days_kept"] = kept / found["log_bytes_a_day"]
    posts = list(islice(world.posts(), 20_000))
    found["mean_audience"] = sum(world.sizes[room] - 1 for _, room in posts) / len(posts)
    found["deliveries_a_day"] = found["mean_audience"] * world.messages_a_day
    found["live_bytes_per_s"] = found["deliveries_a_day"] * found["message_bytes"] / DAY
    second, minute = (max(1, round(world.messages_a_day * span / DAY)) for span in (1, 60))
    _measure_batches(world, table, second, "second", found)
    _measure_batches(world, table, minute, "minute", found)
    found["frames_a_day"] = found["second_frames"] / second * world.messages_a_day
    found["frames_per_s"] = found["frames_a_day"] / DAY
    frames_each = found["frames_a_day"] / world.agents
    found["mailbox_minutes"] = MAILBOX_FRAMES / frames_each * DAY / 60
    found["full_mailboxes_bytes"] = MAILBOX_FRAMES * world.agents * found["second_dlv_bytes"] / found["second_frames"]
    found["dlv_bytes_a_day"] = found["second_dlv_bytes"] / second * world.messages_a_day
    found["ledger_rows_a_day"] = found["second_rows"] / second * world.messages_a_day
    found["ledger_bytes_a_day"] = found["ledger_rows_a_day"] * found["ledger_row_bytes"]
    found["ledger_start_bytes"] = found["ledger_rows_a_day"] * found["ledger_row_memory"]
    found["planning_share"] = found["second_plan_s"]
    found["blk_bytes_a_day"] = found["minute_blk_bytes"] / minute * world.messages_a_day


#: messages of which batches are made, so that a batch of one message is no matter of chance
BATCHED = 500


def _measure_batches(world: World, table: Table, messages: int, name: str, found: Figures) -> None:
    """So many messages as one batch: judged, cut into blocks, planned, framed. The mean of several if they are few."""
    several = max(1, BATCHED // messages)
    batches = [_batch(world, table, messages) for _ in range(several)]
    for figure in batches[0][0]:
        found[f"{name}_{figure}"] = sum(figures[figure] for figures, _ in batches) / several
    found[f"{name}_messages"] = messages
    if "ledger_row_bytes" not in found:
        _measure_ledger(max((planned for _, planned in batches), key=lambda planned: len(planned.frames)), found)


def _batch(world: World, table: Table, messages: int) -> tuple[Figures, Plan]:
    found: Figures = {}
    blocks = _blocks(table, list(islice(world.messages(table.head), messages)))
    port: Any = None  # a plan needs none of them
    deliverer = Deliverer(port, port, port, debts=Debts(), counters={}, last_head=0, floor=0, unread=UnreadWindow())
    infos = [block.info for block in blocks]
    with cpu(found, "plan_s"):
        audience = deliverer.audience(table, table.head)
        refs = by_reference(infos, audience)
        planned = plan(infos, audience, Debts(), {}, refs=refs)
    frames = [frame for each in planned.frames.values() for frame in each]
    pieces = [piece for frame in frames for piece in frame.pieces]
    found |= {"blocks": len(blocks), "frames": len(frames), "rows": len(pieces), "deferred": len(planned.deferred)}
    found["deliveries"] = sum(piece.count for piece in pieces)
    found["dlv_bytes"], found["blk_bytes"] = _stored(world, blocks, planned)
    return found, planned


def _blocks(table: Table, records: Sequence[StoredRecord]) -> list[MadeBlock]:
    classifier = Classifier(SUBJECTS, table.rules)
    judged = [classifier.classify(record) for record in records]
    assert all(isinstance(each, Deliverable) for each in judged)
    return list(cut_blocks((each for each in judged if isinstance(each, Deliverable)), ()))


def _stored(world: World, blocks: Sequence[MadeBlock], planned: Plan) -> tuple[float, float]:
    """Bytes of DLV, by a sample of the frames where they are many, and of BLK."""
    sealer = BlockSealer(bytes(SECRET_BYTES), world.space_id, EPOCH)
    sealed = {i: sealer.seal(blocks[i].info.channel, blocks[i].data, blocks[i].seqs) for i in planned.named}
    frames = [frame for each in planned.frames.values() for frame in each]
    sample = frames[:: max(1, len(frames) // 5_000)]
    size = 0
    for frame in sample:
        inside = [sealed[index].ref if index in sealed else blocks[index].data for index in frame.blocks]
        data = encode_frame(frame.owner, EPOCH, frame.series, frame.number, inside, prev=frame.prev)
        size += RECORD_OVERHEAD + len(SUBJECTS.delivery(frame.owner)) + len(data)
    return size / max(1, len(sample)) * len(frames), sum(len(each.data) for each in sealed.values())


def _measure_ledger(planned: Plan, found: Figures) -> None:
    """Rows of `deliveries`, up to 100,000 in one commit as merging leaves them; and what a start takes to read them."""
    acknowledged = {owner: [n] for n, owner in enumerate(islice(planned.frames, 100_000), 1)}
    rows = settle(planned, acknowledged, {}).delivered
    with tempfile.TemporaryDirectory() as folder:
        paths = LedgerPaths.below(Path(folder) / "checkpoint", Path(folder) / "lake")
        ledger = DeltaLedger(paths, app="deliver:scale", epoch=EPOCH)
        ledger.load_debts()
        ledger.write_deliveries(DeliverBatch(1, 0, 10**6, 10**6), rows)
        files = list(Path(paths.deliveries).glob("*.parquet"))
        found["ledger_row_bytes"] = sum(file.stat().st_size for file in files) / len(rows)
        # the columns that `last_frames` reads of everything that was ever delivered in this epoch
        read = ledger._rows([name for name in DELIVERIES.names if name in UNREAD_FRAMES])
        found["ledger_row_memory"] = read.nbytes / len(rows)


UNREAD_FRAMES = ("owner", "dlv_seq", "at_ns")


def _count_on_broker(world: World, found: Figures) -> None:
    """What is one for each agent."""
    found["connections"] = world.agents
    found["consumers"] = world.agents
    directs = world.messages_a_day * world.assumed.direct
    found["receipts_a_day"] = 2 * directs
    found["receipt_hours"] = RECEIPTS_KEPT / max(1, directs) * 24


def report(sizes: Sequence[Figures]) -> None:
    width = max(len(each.name) for each in MEANINGS)
    print(f"{'figure':<{width}}" + "".join(f"{shown(each['agents'], ''):>14}" for each in sizes))
    for each in MEANINGS:
        print(f"{each.name:<{width}}" + "".join(f"{shown(size[each.name], each.unit):>14}" for size in sizes))
    print("\nlimits, the first one first")
    for met, limit in limits_in_order(sizes):
        print(f"  {agents_words(met):>9} agents  {limit.words}")


def measured(agents: Sequence[int]) -> list[Figures]:
    """Each size in a process of its own, one after the other."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        return list(pool.map(measure, sorted(agents)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--agents", type=int, nargs="+", default=SIZES, help="sizes of the spaces")
    parser.add_argument("--from", dest="figures", type=Path, help="take figures from this file instead of measuring")
    parser.add_argument("--plots", type=Path, help="a folder for figures.json and the charts")
    parser.add_argument("--page", type=Path, help="the page whose tables are written anew")
    chosen = parser.parse_args()
    if chosen.figures:
        kept = json.loads(chosen.figures.read_text())
    else:
        keyring = World(1).keyring
        versions = {"tidings": __version__, "python": platform.python_version()}
        kept = {"sizes": measured(chosen.agents), "most_revocations": most_revocations(keyring), "versions": versions}
    sizes = kept["sizes"]
    report(sizes)
    if chosen.plots:
        chosen.plots.mkdir(parents=True, exist_ok=True)
        (chosen.plots / "figures.json").write_text(json.dumps(kept, indent=1) + "\n")
        for name, text in charts(sizes).items():
            (chosen.plots / name).write_text(text)
    if chosen.page:
        chosen.page.write_text(written_page(chosen.page.read_text(), sizes))
    if chosen.json:
        print(json.dumps(kept))


if __name__ == "__main__":
    main()
