"""Who is owed what, as joins, is who is owed what by the rules, on generated logs."""

import random

from pyspark.sql import SparkSession

from tidings.delivery.audience import MESSAGES, AudienceRules, Facts, deliverable, facts_of, owed
from tidings.model.projection import Table
from tidings.wire.subjects import Chat
from tools.generated import generate_log, verify_once
from tools.model import Model

LOGS = 24


def test_the_joins_agree_with_the_rules_on_generated_logs(spark: SparkSession) -> None:
    facts = Facts([], [], [])
    messages: list[tuple[int, int, str, str, bool]] = []
    heads: list[tuple[int, int]] = []
    owed_by_rules: set[tuple[int, int, str]] = set()
    allowed_by_rules: set[tuple[int, int, str]] = set()
    for log in range(LOGS):
        rng = random.Random(log)
        made = generate_log(rng, 220)
        table = Table(made.subjects, made.space_id, made.anchor_key, verify=verify_once).apply_all(made.records)
        model = Model(made.records, "main", made.space_id, made.anchor_key, verify_once)
        facts += facts_of(table, log)
        head = rng.randint(made.seq // 2, made.seq)
        heads.append((log, head))
        for record in made.records:
            parsed = made.subjects.parse(record.subject)
            if isinstance(parsed, Chat):
                valid = table.post_allowed(parsed.sender, parsed.channel, record.seq)
                messages.append((log, record.seq, parsed.sender, parsed.channel, valid))
                owners = table.owed(record.seq, parsed.sender, parsed.channel)
                assert owners == model.owed(record.seq, parsed.sender, parsed.channel)
                owed_by_rules |= {(log, record.seq, owner) for owner in owners}
                allowed = table.deliverable(record.seq, parsed.sender, parsed.channel, head)
                allowed_by_rules |= {(log, record.seq, owner) for owner in allowed}

    rules = AudienceRules.of(spark, facts)
    pairs = owed(spark.createDataFrame(messages, MESSAGES), rules).cache()  # asked for twice
    left = deliverable(pairs, rules.access, spark.createDataFrame(heads, "log long, head long"))
    marked = pairs.selectExpr("'owed' kind", "log", "seq", "owner").union(
        left.selectExpr("'allowed' kind", "log", "seq", "owner")
    )
    found = [(row.kind, (row.log, row.seq, row.owner)) for row in marked.collect()]
    pairs.unpersist()
    assert sorted(key for kind, key in found if kind == "owed") == sorted(owed_by_rules)
    assert sorted(key for kind, key in found if kind == "allowed") == sorted(allowed_by_rules)
    assert len(owed_by_rules) > len(allowed_by_rules) > 150
