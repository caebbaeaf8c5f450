"""What the figures of `scale.py` mean: their names, the limits they meet, and the tables and charts of `docs/scale.md`.

A limit is a figure and the value at which something ends; where it is met is read off the measured sizes. The words on
what is seen then and what an operator does are written here, beside the constants that they are about.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from line_chart import Line, LineChart, bars
from scale_world import SUBJECTS, Assumed
from tidings.server.grants import MAX_AGENT_CONNECTIONS
from tidings.server.streams import BLOCK_BUDGET, MAX_BUDGET, stream_specs
from tidings.steward.context import Intervals
from tidings.steward.roster import SEEN_KEPT
from tidings.steward.roster_service import MAX_BYTES as ATTENTION_BYTES

Figures = dict[str, float]
#: what a broker takes in one message, an account token included (`server/config.py`)
MAX_PAYLOAD = 1_048_576
#: seconds an endpoint waits for a page of the roster (`client/roster.py`)
SNAPSHOT_PATIENCE = 5.0
#: bytes a second of a network of one gigabit
GIGABIT = 125_000_000
#: copies a second of a plain socket, one acknowledgement each, where `bench/deliver.py` was run last
FRAMES_PER_S = 857_000 / 8.1
#: memory that a machine may well have for the driver of the pipeline
DRIVER_MEMORY = 4 * 1024**3


@dataclass(frozen=True)
class Meaning:
    name: str
    words: str
    unit: str
    #: where it comes from: measured, counted, computed, or taken from elsewhere
    source: str


MEANINGS = [
    Meaning("agents", "agents, all of them connected", "", "assumed"),
    Meaning("channels", "channels", "", "assumed"),
    Meaning("largest_channel", "members of the largest channel", "", "assumed"),
    Meaning("messages_a_day", "messages posted in a day", "", "assumed"),
    Meaning("mean_audience", "members of the channel that a message goes to, on average", "", "assumed"),
    Meaning("deliveries_a_day", "copies owed for a day's messages", "", "computed"),
    Meaning("rulings", "records of access and membership", "", "counted"),
    Meaning("ruling_bytes", "the log of them", "bytes", "counted"),
    Meaning("fold_s", "folding that log, each signature verified", "s", "measured"),
    Meaning("fold_bytes", "memory the fold takes", "bytes", "measured"),
    Meaning("lookup_us", "may this agent read that channel?", "us", "measured"),
    Meaning("audience_us", "whom is this message owed to?", "us", "measured"),
    Meaning("narrowings_s", "who lost a right? asked by every batch", "s", "measured"),
    Meaning("retention_s", "which rulings may go? asked every 10 s", "s", "measured"),
    Meaning("rules_s", "making the rules that Spark's workers get", "s", "measured"),
    Meaning("rules_bytes", "those rules", "bytes", "counted"),
    Meaning("cuts_s", "cutting every channel by all joins, when delivery begins at the beginning", "s", "measured"),
    Meaning("agent_token_bytes", "the token of an agent", "bytes", "counted"),
    Meaning("account_token_bytes", "the token of AGENTS if each key was narrowed or revoked once", "bytes", "counted"),
    Meaning("account_token_s", "making it", "s", "measured"),
    Meaning("issued_bytes", "`agents/issued`, one file for each key", "bytes", "counted"),
    Meaning("issued_read_s", "reading all of it, which an `agent add` does several times", "s", "measured"),
    Meaning("row_bytes", "a row of the roster", "bytes", "counted"),
    Meaning("snapshot_bytes", "a snapshot of the roster", "bytes", "counted"),
    Meaning("snapshot_pages", "its pages", "", "counted"),
    Meaning("snapshot_s", "the steward's time for it", "s", "measured"),
    Meaning("roster_held_bytes", "memory of it in each program", "bytes", "measured"),
    Meaning("arrival_s", "the steward's time until everybody has one, after a restart", "s", "computed"),
    Meaning("arrival_bytes", "what the broker sends meanwhile", "bytes", "computed"),
    Meaning("admission_s", "the first request of everybody admitted", "s", "measured"),
    Meaning("beats_per_s", "beats of presence a second", "", "computed"),
    Meaning("beat_us", "one of them, from its bytes to the table", "us", "measured"),
    Meaning("beats_share", "share of a core that takes", "", "computed"),
    Meaning("sweep_s", "looking who is silent, every second", "s", "measured"),
    Meaning("changes_per_s", "changes of status a second", "", "computed"),
    Meaning("roster_bytes_each_per_s", "of them, each agent hears a second", "bytes", "computed"),
    Meaning("roster_bytes_per_s", "and the broker sends to all of them", "bytes", "computed"),
    Meaning("attention_bytes", "standing attention, if everybody set one", "bytes", "counted"),
    Meaning("message_bytes", "a message in the log", "bytes", "counted"),
    Meaning("log_bytes_a_day", "the log grows by", "bytes", "computed"),
    Meaning("log_days_kept", "days of it that the largest default budget keeps", "", "computed"),
    Meaning("live_bytes_per_s", "live copies the broker sends a second", "bytes", "computed"),
    Meaning("second_messages", "messages of an average second", "", "computed"),
    Meaning("second_blocks", "blocks of a batch of them", "", "counted"),
    Meaning("second_deliveries", "copies in it", "", "counted"),
    Meaning("second_frames", "frames in it", "", "counted"),
    Meaning("second_rows", "rows of the ledger in it", "", "counted"),
    Meaning("second_plan_s", "planning it", "s", "measured"),
    Meaning("second_dlv_bytes", "bytes of its frames", "bytes", "counted"),
    Meaning("second_blk_bytes", "bytes of its blocks that frames name", "bytes", "counted"),
    Meaning("second_deferred", "lanes of it that become debts", "", "counted"),
    Meaning("minute_messages", "messages of an average minute", "", "computed"),
    Meaning("minute_blocks", "blocks of a batch of them", "", "counted"),
    Meaning("minute_deliveries", "copies in it", "", "counted"),
    Meaning("minute_frames", "frames in it", "", "counted"),
    Meaning("minute_rows", "rows of the ledger in it", "", "counted"),
    Meaning("minute_plan_s", "planning it", "s", "measured"),
    Meaning("minute_dlv_bytes", "bytes of its frames", "bytes", "counted"),
    Meaning("minute_blk_bytes", "bytes of its blocks that frames name", "bytes", "counted"),
    Meaning("minute_deferred", "lanes of it that become debts", "", "counted"),
    Meaning("planning_share", "share of a core that planning takes, a batch a second", "", "computed"),
    Meaning("frames_a_day", "frames in a day of such seconds", "", "computed"),
    Meaning("frames_per_s", "frames a second", "", "computed"),
    Meaning("mailbox_minutes", "minutes until the mailbox of who is away is full, and a debt begins", "", "computed"),
    Meaning("full_mailboxes_bytes", "all mailboxes, if everybody is away for longer", "bytes", "computed"),
    Meaning("dlv_bytes_a_day", "bytes through the mailboxes", "bytes", "computed"),
    Meaning("blk_bytes_a_day", "bytes of shared blocks, a batch a minute", "bytes", "computed"),
    Meaning("ledger_row_bytes", "a row of `deliveries` on disk", "bytes", "measured"),
    Meaning("ledger_row_memory", "the same where the driver reads it at a start", "bytes", "measured"),
    Meaning("ledger_rows_a_day", "rows of `deliveries` in a day", "", "computed"),
    Meaning("ledger_bytes_a_day", "the lake grows by", "bytes", "computed"),
    Meaning("ledger_start_bytes", "memory a start takes for each day that a member is away", "bytes", "computed"),
    Meaning("connections", "connections to the broker", "", "one for each agent"),
    Meaning("consumers", "consumers of DLV, and of DM", "", "one for each agent"),
    Meaning("receipts_a_day", "receipts written to AUD in a day", "", "computed"),
    Meaning("receipt_hours", "hours of direct messages whose receipts the steward has in memory", "", "computed"),
]


@dataclass(frozen=True)
class Limit:
    """Something that ends what grows. `below`: it is met when the figure falls to it."""

    figure: str
    at: float
    words: str
    grows: str
    seen: str
    does: str
    below: bool = False

    def met(self, sizes: Sequence[Figures]) -> float | None:
        """The number of agents at which the figure reaches the limit, between measured sizes by their logarithms."""
        points = [(each["agents"], each[self.figure]) for each in sizes]
        sign = -1 if self.below else 1
        for (n, low), (m, high) in pairwise(points):
            if sign * low >= sign * self.at:
                return n
            if sign * high >= sign * self.at:
                share = (math.log(self.at) - math.log(low)) / (math.log(high) - math.log(low))
                return math.exp(math.log(n) + share * (math.log(m) - math.log(n)))
        return None


def _config(name: str) -> Mapping[str, Any]:
    """The settings of a stream under the largest default budget."""
    return next(each.config for each in stream_specs(SUBJECTS, MAX_BUDGET, "") if each.name == name)


MAILBOX_FRAMES = int(_config(SUBJECTS.delivery_stream)["max_msgs_per_subject"])
MOST_CONSUMERS = int(_config(SUBJECTS.delivery_stream)["max_consumers"])
DELIVERY_BYTES = int(_config(SUBJECTS.delivery_stream)["max_bytes"])

LIMITS = [
    Limit(
        "arrival_s",
        SNAPSHOT_PATIENCE,
        "all agents ask for the roster at once, and wait 5 s each",
        "agents squared: each asks for a row of each, after a restart of broker or steward",
        'the steward at a whole core; `who` shows old rows with their age, a program that starts hears "the roster is '
        'not known yet"; who waited 5 s asks again, which makes it longer still. Messages and copies go on',
        "restarts at quiet hours; more than one space",
    ),
    Limit(
        "agents",
        SEEN_KEPT,
        "last-seen times that outlive a steward",
        "agents",
        "after a restart `who` does not know when the others were last seen",
        "nothing: it costs nobody a message",
    ),
    Limit(
        "attention_bytes",
        ATTENTION_BYTES,
        "standing attention of all agents",
        "agents that set one",
        '`attention` is refused: "the attention of all agents together is too long to keep"',
        "let agents name patterns, not channels; a running session's own attention has no such bound",
    ),
    Limit(
        "consumers",
        MOST_CONSUMERS,
        "consumers of DLV and of DM (`max_consumers`)",
        "agents that are not revoked",
        '`agent add` fails: "maximum consumers limit reached (10026)"; those who are there go on. '
        "`status` shows the consumers of each stream",
        "revoke who is gone (its consumers go with it); a second space",
    ),
    Limit(
        "connections",
        MAX_AGENT_CONNECTIONS,
        "connections of agents (`MAX_AGENT_CONNECTIONS`)",
        "programs that are connected",
        '"maximum account active connections exceeded" for the next; nobody is cut',
        "short-lived programs through a host, which holds one for each agent; a second space",
    ),
    Limit(
        "account_token_bytes",
        MAX_PAYLOAD,
        "keys ever revoked, narrowed or rotated: the token of AGENTS in one message",
        "keys, for ever: nothing takes one out again",
        '`agent revoke` and `tidings up` fail: "the broker did not take the token of account ..." '
        "(tried on a broker: 9,000 are taken, 12,000 are not)",
        "give short-lived programs sessions of a host instead of keys of their own, and count the files in "
        "`agents/issued` long before; then a new space",
    ),
    Limit(
        "roster_bytes_per_s",
        GIGABIT,
        "changes of status told to everybody, on a network of 1 Gbit/s",
        "agents times changes: their square",
        'live copies and answers come later; the broker cuts who does not read ("slow consumer" in its log)',
        "fewer changes of status; more than one space",
    ),
    Limit(
        "live_bytes_per_s",
        GIGABIT,
        "live copies, on a network of 1 Gbit/s",
        "messages times members",
        "live copies and answers come later; the broker cuts who does not read",
        "smaller channels: what everybody must hear is rarely said; a cluster of brokers",
    ),
    Limit(
        "beats_share",
        1.0,
        "beats of presence take a whole core of the steward",
        "agents",
        "control requests are answered later; agents seem offline and come back",
        "more than one space",
    ),
    Limit(
        "retention_s",
        Intervals().lease_ttl,
        "a round of retention stops the steward for as long as its lease lasts",
        "records of access and membership",
        "every 10 s nothing is answered for a moment",
        "more than one space",
    ),
    Limit(
        "fold_s",
        60.0,
        "a start of the steward or the pipeline folds for a minute",
        "records of access and membership",
        "`status`: the steward does not answer; everything that was accepted waits",
        "patience; fewer memberships: a pattern (`team.>`) is one",
    ),
    Limit(
        "cuts_s",
        60.0,
        "a batch cuts its channels by every join since where it begins, for a minute",
        "channels times memberships, when delivery begins at the beginning of a log",
        "`tidings pipeline status`: behind, and no batch ends",
        "let the pipeline run from the first day; fewer channels",
    ),
    Limit(
        "issued_read_s",
        10.0,
        "reading `agents/issued` once takes ten seconds",
        "keys, for ever",
        "`agent add` and `up` take minutes",
        "keep agents and their keys; a session of a host costs no key",
    ),
    Limit(
        "log_days_kept",
        1.0,
        "the log keeps less than a day (60 % of 8 GiB)",
        "bytes of messages",
        'history ends earlier. If the pipeline stands still as long: "the log is at 70 % of its budget; retention '
        'waits for deliver", and at 95 % the gate closes',
        "`tidings up --budget 500G`, as much as the disk has; `keep_age`, if less is enough",
        below=True,
    ),
    Limit(
        "full_mailboxes_bytes",
        DELIVERY_BYTES,
        "mailboxes that nobody reads fill DLV (a quarter of the budget of 8 GiB)",
        "agents that are away, 64 frames each",
        "the fullest mailboxes are emptied into debts; `tidings pipeline debts` grows. Nothing is lost",
        "a larger budget; revoke who will not come back; `keep_unread`",
    ),
    Limit(
        "blk_bytes_a_day",
        BLOCK_BUDGET,
        "shared blocks of a day no longer fit (256 MiB)",
        "bytes of messages",
        "who was away longer reads ranges from the steward: slower, and the same messages",
        "nothing, or fewer who are away long",
    ),
    Limit(
        "frames_per_s",
        FRAMES_PER_S,
        "frames a second: what a plain socket gets acknowledged (docs/performance.md: 857k/s are 8.1 times that)",
        "messages times members",
        "`behind` grows until batches are larger, which makes fewer frames of the same copies",
        "smaller channels; live instead of durable for what need not be kept",
    ),
    Limit(
        "ledger_start_bytes",
        DRIVER_MEMORY,
        "a day of `deliveries` is more than 4 GiB where a starting pipeline reads what may be unread",
        "messages times members, since the oldest message that a member has not read",
        "with a member away for a day the pipeline is killed for its memory at its start; live copies, direct messages "
        "and history go on",
        "a shorter `keep_unread`; or move `lake/deliveries` away while the pipeline is down: it begins again where "
        "anything may be unread. Smaller channels; live instead of durable for what need not be kept",
    ),
    Limit(
        "planning_share",
        1.0,
        "planning takes a whole core of the driver",
        "messages times members",
        "`behind` grows until batches are larger, which makes each copy cheaper",
        "smaller channels; live instead of durable",
    ),
    Limit(
        "receipt_hours",
        1.0,
        "receipts that the steward has in memory (50,000) reach back an hour",
        "direct messages",
        "the steward knows less of older ones; AUD has them",
        "nothing",
        below=True,
    ),
]


# --- showing ---


def shown(value: float, unit: str) -> str:
    """A figure for people."""
    if unit == "bytes":
        for size, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
            if value >= size:
                return f"{value / size:.3g} {name}" if value < 1000 * size else f"{value / size:,.0f} {name}"
        return f"{value:.0f} B"
    if unit == "s":
        if value >= 7_200:
            return f"{value / 3_600:,.0f} h"
        if value >= 100:
            return f"{value:,.0f} s"
        return f"{value:,.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"
    number = f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"
    return f"{number} {unit}".strip()


UNITS = {each.name: each.unit for each in MEANINGS}


def figures_table(sizes: Sequence[Figures]) -> list[str]:
    heads = [f"{each['agents']:,.0f} agents" for each in sizes]
    lines = [f"| figure | what | {' | '.join(heads)} | how |", f"|---|---|{'---|' * len(sizes)}---|"]
    for each in MEANINGS:
        values = " | ".join(shown(size[each.name], each.unit) for size in sizes)
        lines.append(f"| `{each.name}` | {each.words} | {values} | {each.source} |")
    return lines


def limits_in_order(sizes: Sequence[Figures]) -> list[tuple[float, Limit]]:
    """Those that are met, the first one first."""
    found = [(met, limit) for limit in LIMITS if (met := limit.met(sizes)) is not None]
    return sorted(found, key=lambda each: each[0])


def limits_table(sizes: Sequence[Figures]) -> list[str]:
    last = [each for each in sizes if each["agents"] >= 10_000] or list(sizes[-1:])
    heads = " | ".join(f"at {each['agents']:,.0f}" for each in last)
    lines = [
        f"| met at about | limit | grows with | {heads} | what is seen | what an operator does |",
        f"|---|---|---|{'---|' * len(last)}---|---|",
    ]
    met = limits_in_order(sizes)
    beyond = [limit for limit in LIMITS if limit not in [each for _, each in met]]
    for where, limit in [
        *((agents_words(where), each) for where, each in met),
        *(("not met", each) for each in beyond),
    ]:
        values = " | ".join(shown(each[limit.figure], UNITS[limit.figure]) for each in last)
        lines.append(
            f"| {where} | {limit.words} (`{limit.figure}`) | {limit.grows} | {values} | {limit.seen} | {limit.does} |"
        )
    return lines


def agents_words(number: float) -> str:
    """Two digits: the rest is the machine's."""
    return f"{float(f'{number:.2g}'):,.0f}"


def assumed_table() -> list[str]:
    notes = {
        "messages_each": "messages that an agent posts in a day",
        "agents_per_channel": "agents of the space for each of its channels",
        "memberships": "channels an agent is in, chosen by Zipf's law: the one of rank r has the weight 1/r",
        "quiet": "a member posts in a channel of m members with the weight m to the power of minus this",
        "text_median": "characters of a message: the median of a lognormal distribution",
        "text_sigma": "and its sigma",
        "longest": "and the most",
        "direct": "share of the messages that go to one agent; two receipts each",
        "changes": "changes of status for each message: working, idle",
        "seed": "of everything that is drawn",
    }
    values = asdict(Assumed())
    return ["| assumed | value |", "|---|---|", *(f"| {notes[name]} | {values[name]} |" for name in notes)]


def _tick(value: float, unit: str) -> str:
    return f"{value:,.0f} s" if unit == "s" and value >= 1 else shown(value, unit)


#: names of limits that fit beside a bar
SHORT = {
    "arrival_s": "rosters after a restart",
    "agents": "last-seen times kept",
    "attention_bytes": "standing attention",
    "consumers": "consumers of DLV and DM",
    "connections": "connections of agents",
    "account_token_bytes": "void keys in the account token",
    "roster_bytes_per_s": "status told to all, 1 Gbit/s",
    "live_bytes_per_s": "live copies, 1 Gbit/s",
    "beats_share": "beats, a core",
    "retention_s": "a round of retention, 3 s",
    "fold_s": "a start folds for a minute",
    "cuts_s": "cutting a batch, a minute",
    "issued_read_s": "reading agents/issued, 10 s",
    "log_days_kept": "the log keeps a day",
    "full_mailboxes_bytes": "full mailboxes",
    "blk_bytes_a_day": "shared blocks of a day",
    "frames_per_s": "frames a second",
    "ledger_start_bytes": "a day of the ledger, 4 GiB",
    "planning_share": "planning, a core",
    "receipt_hours": "receipts of an hour",
}


def charts(sizes: Sequence[Figures]) -> dict[str, str]:
    """The charts by their file names."""

    def line(figure: str, name: str) -> Line:
        return Line(name, [(each["agents"], each[figure]) for each in sizes])

    def chart(title: str, y: str, unit: str, *lines: Line) -> str:
        return LineChart(title, "agents", y, lines, lambda value: _tick(value, unit)).svg()

    made = {
        "traffic": chart(
            "What the broker sends each second",
            "bytes a second",
            "bytes",
            line("roster_bytes_per_s", "changes of status, to everybody"),
            line("live_bytes_per_s", "live copies"),
            Line("a network of 1 Gbit/s", limit=GIGABIT),
        ),
        "steward": chart(
            "CPU time of the steward",
            "seconds",
            "s",
            line("arrival_s", "everybody's first roster"),
            line("snapshot_s", "one roster"),
            line("fold_s", "the fold at a start"),
            line("issued_read_s", "reading agents/issued"),
            line("retention_s", "a round of retention"),
            line("sweep_s", "who is silent"),
            Line("an asker waits 5 s", limit=SNAPSHOT_PATIENCE),
        ),
        "sizes": chart(
            "What must be held or sent whole",
            "bytes",
            "bytes",
            line("fold_bytes", "the fold, in memory"),
            line("roster_held_bytes", "roster, in each program"),
            line("ruling_bytes", "rulings in the log"),
            line("account_token_bytes", "account token, all keys void"),
            line("attention_bytes", "standing attention"),
            Line("1 MiB: the token at most", limit=MAX_PAYLOAD),
            Line("512 KiB: attention at most", limit=ATTENTION_BYTES),
        ),
        "day": chart(
            "A day of 100 messages from each agent",
            "bytes a day",
            "bytes",
            line("ledger_start_bytes", "ledger, read at a start"),
            line("dlv_bytes_a_day", "frames through mailboxes"),
            line("ledger_bytes_a_day", "ledger on disk"),
            line("log_bytes_a_day", "the log"),
            line("blk_bytes_a_day", "shared blocks"),
            Line("8 GiB: the log's budget", limit=MAX_BUDGET),
        ),
    }
    met = [(SHORT[limit.figure], float(f"{where:.2g}")) for where, limit in limits_in_order(sizes)]
    if met:
        made["limits"] = bars("Where limits are met", "agents", met, sizes[0]["agents"], sizes[-1]["agents"])
    return {f"{name}.svg": text for name, text in made.items()}


def written_page(page: str, sizes: Sequence[Figures]) -> str:
    """The page with its tables made anew; what people wrote between them stays."""
    tables = {"assumed": assumed_table(), "limits": limits_table(sizes), "figures": figures_table(sizes)}
    for name, lines in tables.items():
        begin, end = f"<!-- {name}: written by scripts/scale.py -->", f"<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"the page needs a place for its {name}: {begin} ... {end}")
        page = "\n".join([f"{before}{begin}", "", *lines, "", f"{end}{after}"])
    return page
