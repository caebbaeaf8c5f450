"""What it costs to judge messages, and to tell Spark's workers the rules to judge them by.

judge_ratio    CPU time of a message judged by `Classifier` / by the same questions asked plainly: the subject parsed,
               the rules looked up and the whole message decoded for each record. 30,000 messages of 400 bytes of prose,
               200 senders, 20 channels
rules_ratio    bytes of what workers get of the rules at 20,000 agents / of the whole rulebook, pickled
batch_ratio    seconds of the encode job of a warm Spark, local[2], over these messages with the rules borrowed from the
               broadcast / with the whole rulebook in the closure of the job
sending_ms     the rules made for the workers and broadcast, what a ruling about posts costs the next batch

Medians of interleaved pairs.
"""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from measuring import median_ratio, options, pairs, report
from tidings.delivery.encoding import SCHEMA, EncodingRules, RulesHolder, decode_rows, encode_partition
from tidings.delivery.range_encoder import SentRules
from tidings.delivery.session import SessionSettings, start_session
from tidings.model.classify import KEPT_HEADERS, Classifier, Deliverable
from tidings.model.rulebook import Rulebook
from tidings.wire import message as wire_message
from tidings.wire.frames import FrameRecord
from tidings.wire.message import Sender, compose, new_id
from tidings.wire.records import Headers, StoredRecord, encode_headers
from tidings.wire.rulings import Access, Channel
from tidings.wire.subjects import Chat, Subjects

AGENTS, MESSAGES, SENDERS, CHANNELS = 20_000, 30_000, 200, 20
SUBJECTS = Subjects("main")
TEXT = "the reader asks for what it has not heard and gets it once, in the order of the log, or is told what is lost"
WORDS = TEXT.split()


@dataclass(frozen=True)
class Whole:
    """The rules as they are, for a closure."""

    value: Rulebook


def agents(rng: random.Random) -> list[str]:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
    return ["U" + "".join(rng.choices(letters, k=55)) for _ in range(AGENTS)]


def rulebook(rng: random.Random, ids: list[str]) -> Rulebook:
    book = Rulebook(SUBJECTS.log_stream)
    for seq, owner in enumerate(ids, 1):
        token = base64.b64encode(rng.randbytes(600)).decode()
        access = Access(op=new_id(), name=f"agent{seq}", read=(">",), post=("team.>", "general"), jwt=token)
        book.put_access(owner, seq, access)
    for number in range(CHANNELS):
        book.put_channel(AGENTS + number + 1, Channel(op=new_id(), name=f"team.{number}", description="a room"))
    return book


def messages(rng: random.Random, ids: list[str]) -> list[StoredRecord]:
    made = []
    for seq in range(AGENTS + 100, AGENTS + 100 + MESSAGES):
        sender = rng.choice(ids[:SENDERS])
        message = compose(Sender(sender, "ada"), text=" ".join(rng.choices(WORDS, k=90)))
        block = encode_headers([("Td-Sig", "A" * 86), ("Nats-Msg-Id", message.id)])
        made.append(StoredRecord(seq, seq, SUBJECTS.chat(sender, f"team.{seq % CHANNELS}"), block, message.raw))
    return made


def judged_plainly(book: Rulebook, record: StoredRecord) -> Deliverable | None:
    parsed = SUBJECTS.parse(record.subject)
    assert isinstance(parsed, Chat)
    fields = Headers.parse(record.own_block).fields
    if not book.post_allowed(parsed.sender, parsed.channel, record.seq):
        return None
    message = wire_message.decode(record.payload)
    if message.sender.id != parsed.sender or book.class_at(parsed.channel, record.seq) == "live":
        return None
    kept = tuple((name, value) for name, value in fields if name.lower() in KEPT_HEADERS)
    tail = SUBJECTS.tail(record.subject)
    return Deliverable(
        parsed.channel, parsed.sender, FrameRecord(record.seq, record.time_ns, tail, kept, record.payload)
    )


def microseconds(step: Callable[[], object]) -> float:
    """CPU time of a message."""
    started = time.process_time()
    step()
    return (time.process_time() - started) / MESSAGES * 1e6


def as_table(records: list[StoredRecord]) -> pa.Table:
    columns: dict[str, Any] = {
        "seq": [record.seq for record in records],
        "time_ns": [record.time_ns for record in records],
        "subject": [record.subject for record in records],
        "headers": pa.array([record.own_block for record in records], pa.binary()),
        "data": pa.array([record.payload for record in records], pa.binary()),
        "missing": pa.nulls(len(records), pa.int64()),
    }
    return pa.table(columns)


async def main() -> None:
    chosen = options(__doc__ or "")
    rng = random.Random(7)
    ids = agents(rng)
    book, records = rulebook(rng, ids), messages(rng, ids)
    classifier = Classifier(SUBJECTS, book)
    assert all(classifier.classify(each) == judged_plainly(book, each) for each in records[:1_000])

    async def ours() -> float:
        fresh = Classifier(SUBJECTS, book)
        return microseconds(lambda: [fresh.classify(each) for each in records])

    async def plainly() -> float:
        return microseconds(lambda: [judged_plainly(book, each) for each in records])

    judging = await pairs(ours, plainly, chosen.pairs)
    slim, whole = (len(pickle.dumps(each, -1)) for each in (book.for_workers(AGENTS + 100), book))
    with tempfile.TemporaryDirectory() as folder:
        spark = start_session(SessionSettings(Path(folder), master="local[2]"))
        frame = spark.createDataFrame(as_table(records)).cache()
        sent = SentRules(spark.sparkContext)

        def batch(rules: RulesHolder) -> float:
            encoding = EncodingRules(SUBJECTS.space, rules, ())
            started = time.perf_counter()
            found = decode_rows(frame.mapInArrow(partial(encode_partition, encoding), SCHEMA).toArrow())
            assert sum(block.info.count for block in found.blocks) == MESSAGES
            return time.perf_counter() - started

        async def borrowed() -> float:
            with sent.lend(book, AGENTS + 99) as rules:
                return batch(rules)

        async def in_closure() -> float:
            return batch(Whole(book))

        sendings = []
        for _ in range(3):
            started = time.perf_counter()
            with sent.lend(book, AGENTS + 99):
                sendings.append(time.perf_counter() - started)
            sent.close()
        await borrowed()
        await in_closure()
        load = os.getloadavg()[0]
        batches = await pairs(borrowed, in_closure, chosen.pairs)
        sent.close()
        spark.stop()
    figures = {
        "judge_ratio": round(median_ratio(*judging), 3),
        "judge_us": round(statistics.median(judging[0]), 2),
        "plain_us": round(statistics.median(judging[1]), 2),
        "rules_ratio": round(slim / whole, 3),
        "rules_bytes": slim,
        "whole_bytes": whole,
        "batch_ratio": round(median_ratio(*batches), 3),
        "batch_s": round(statistics.median(batches[0]), 3),
        "closure_s": round(statistics.median(batches[1]), 3),
        "sending_ms": round(statistics.median(sendings) * 1000),
        "pairs": chosen.pairs,
        "load": round(load, 1),
    }
    rows = [
        ("a message judged (us of CPU)", f"{figures['judge_us']}, asked plainly {figures['plain_us']}"),
        ("judge_ratio", f"{figures['judge_ratio']}"),
        (f"rules of {AGENTS:,} agents", f"{slim:,} bytes of {whole:,}: {figures['rules_ratio']}"),
        ("they are made and sent in", f"{figures['sending_ms']} ms"),
        (f"a batch of {MESSAGES:,}", f"{figures['batch_s']} s, with the rules in its closure {figures['closure_s']} s"),
        ("batch_ratio", f"{figures['batch_ratio']}"),
    ]
    report("judge: messages, and the rules they are judged by", rows, figures, as_json=chosen.json)


if __name__ == "__main__":
    asyncio.run(main())
