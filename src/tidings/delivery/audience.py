"""Who is owed what, as joins: the rules of `model/projection.py` in the form of DataFrames, for whole logs at once.

`facts_of` writes down what a folded table knows as rows; `owed` and `deliverable` join messages with them. Nothing here
runs Python per row, and which pattern covers which channel is found once, so it scales to logs that no driver could
walk. The rules exist twice because one form cannot serve
both; a test holds this one against the other on generated logs, exactly. Every frame has a column `log`, so that many
logs (or epochs) are judged in one job; it is part of every join.

    messages   log, seq, sender, channel, valid     `valid`: it parsed, and its sender or its link might put it there
    intervals  log, owner, pattern, joined, left    `left` null: still in
    access     log, owner, since, until, pattern    one row per pattern that may be read; a revoked owner has none
    classes    log, channel, since, until, cls      `channel` null: the default of the space
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pyspark.sql import functions as F  # noqa: N812  how Spark's own documentation calls it

from tidings.model.projection import Table
from tidings.model.rulebook import Timeline
from tidings.wire.names import pattern_regex

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

T = TypeVar("T")
MESSAGES = "log long, seq long, sender string, channel string, valid boolean"
INTERVALS = "log long, owner string, pattern string, joined long, left long"
ACCESS = "log long, owner string, since long, until long, pattern string"
CLASSES = "log long, channel string, since long, until long, cls string"
#: later than every sequence
END = 2**62

IntervalRow = tuple[int, str, str, int, int | None]
AccessRow = tuple[int, str, int, int, str]
ClassRow = tuple[int, str | None, int, int, str]


@dataclass
class Facts:
    """Rows for the frames; patterns are regular expressions already."""

    intervals: list[IntervalRow]
    access: list[AccessRow]
    classes: list[ClassRow]

    def __add__(self, other: Facts) -> Facts:
        return Facts(self.intervals + other.intervals, self.access + other.access, self.classes + other.classes)


@dataclass(frozen=True)
class AudienceRules:
    """The facts as frames."""

    intervals: DataFrame
    access: DataFrame
    classes: DataFrame

    @classmethod
    def of(cls, spark: SparkSession, facts: Facts) -> AudienceRules:
        return cls(
            spark.createDataFrame(facts.intervals, INTERVALS),
            spark.createDataFrame(facts.access, ACCESS),
            spark.createDataFrame(facts.classes, CLASSES),
        )


def facts_of(table: Table, log: int = 0) -> Facts:
    """What a folded table knows. Versions cover [since, until)."""
    intervals: list[IntervalRow] = [
        (log, owner, pattern_regex(i.pattern), i.joined, i.left)
        for owner in sorted(table.owners())
        for i in table.intervals(owner)
    ]
    access: list[AccessRow] = [
        (log, owner, since, until, pattern_regex(pattern))
        for owner, history in table.rules.access.items()
        for since, until, version in _versions(history)
        for pattern in (() if version.revoked else version.read)
    ]
    classes: list[ClassRow] = [
        (log, name, since, until, record.cls)
        for name, history in table.rules.channels.items()
        for since, until, record in _versions(history)
        if record.cls
    ]
    classes += [
        (log, None, since, until, record.defaults.cls)
        for since, until, record in _versions(table.rules.spaces)
        if record.defaults.cls
    ]
    return Facts(intervals, access, classes)


def _versions(history: Timeline[T]) -> Iterator[tuple[int, int, T]]:
    changes = [(seq, now) for seq, _, now in history.changes(-1, END)]
    for (seq, now), (until, _) in zip(changes, [*changes[1:], (END, None)], strict=True):
        yield seq, until, now


def owed(messages: DataFrame, rules: AudienceRules) -> DataFrame:
    """(log, seq, owner, channel) of every message and everybody who is owed it."""
    counting = _durable(messages.where("valid"), rules.classes)
    held = counting.join(_covered(counting, rules.intervals), ["log", "channel"]).join(
        rules.intervals, ["log", "pattern"]
    )
    within = "joined < seq and (left is null or seq < left) and owner <> sender"
    return held.where(within).select("log", "seq", "owner", "channel").distinct()


def deliverable(pairs: DataFrame, access: DataFrame, heads: DataFrame) -> DataFrame:
    """Those of `owed` whose owner may read the channel at the head; `heads` has (log, head)."""
    at_head = access.join(heads, "log").where("since <= head and head < until")
    readable = at_head.join(_covered(pairs, at_head), ["log", "pattern"])
    return pairs.join(readable, ["log", "owner", "channel"], "left_semi")


def _covered(named: DataFrame, patterned: DataFrame) -> DataFrame:
    """(log, channel, pattern) where the pattern covers the channel: each pair is compared once, whatever its rows."""
    channels = named.select("log", "channel").distinct()
    return channels.join(patterned.select("log", "pattern").distinct(), "log").where("channel rlike pattern")


def _durable(messages: DataFrame, classes: DataFrame) -> DataFrame:
    """Messages whose channel was durable at their sequence: its own class, else the space's, else durable."""
    own = classes.where("channel is not null").selectExpr("log", "channel", "since", "until", "cls as own")
    default = classes.where("channel is null").selectExpr("log", "since", "until", "cls as given")
    with_own = _in_force(messages, own, ["log", "channel"], "own")
    with_default = _in_force(with_own, default, ["log"], "given")
    durable: Column = F.coalesce("own", "given", F.lit("durable")) == "durable"
    return with_default.where(durable).drop("own", "given")


def _in_force(messages: DataFrame, versions: DataFrame, keys: list[str], value: str) -> DataFrame:
    same = [F.col(f"m.{key}") == F.col(f"v.{key}") for key in keys]
    at = (F.col("v.since") <= F.col("m.seq")) & (F.col("m.seq") < F.col("v.until"))
    joined = messages.alias("m").join(versions.alias("v"), [*same, at], "left")
    return joined.select("m.*", f"v.{value}")
