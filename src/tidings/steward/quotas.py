"""Flood control: who sends more than its share for long may send nothing until the owner of the space says so.

`FloodRules`, `usage_of` and `excess` decide, pure and without a clock. `FloodWatch` looks every few seconds: the heads
of LOG, DM and TASK cost three questions and say how much came; only if that could be too much for one sender are some
records read, at most 1 MiB spread over what is new, to see whose it is. (Following the live copies would let a flood
flood the steward; counts per subject shrink when retention removes, so a flood into a full log would not show.)

The steward holds no key that mints, so it does not cut: it asks the supervisor, which starts the administrator for it.
A cut that nobody made yet is owed, asked for again, and said by health. Mail to invented targets is in `mail.py`.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from tidings.admin.agents import LIVE, Ledger
from tidings.nats.jetstream import StoredRecord
from tidings.server.grants import MAX_MESSAGE
from tidings.steward.context import Lifecycle, SpaceContext
from tidings.steward.gate import LogGate
from tidings.steward.retention import stored_size
from tidings.steward.writer import RulingWriter
from tidings.wire.rulings import Space

#: per second and sender, over `WINDOWS` looks in a row
DEFAULT_RECORDS = 1_000
DEFAULT_BYTES = 8_000_000
WINDOWS = 3
#: a sender over its quota that took this share of the log's budget meanwhile is not watched any longer
SHARE_AT_ONCE = 0.2
#: roles nobody holds that one sender may have tasks waiting for
MOST_INVENTED = 64
#: roles of other spaces that one agent has asked, and whose records lie here
MOST_ELSEWHERE = 256
POINTS, POINT_RECORDS, POINT_BYTES = 8, 64, 128 * 1024
ASK_AGAIN = 30.0
log = logging.getLogger(__name__)


# --- rules ---


@dataclass(frozen=True, slots=True)
class Usage:
    records: float = 0.0
    size: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.records + other.records, self.size + other.size)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sender may publish each second for long; None is no limit."""

    records: int | None
    size: int | None

    @staticmethod
    def of(space: Space) -> Limits:
        records = DEFAULT_RECORDS if space.quota_records is None else space.quota_records
        size = DEFAULT_BYTES if space.quota_bytes is None else space.quota_bytes
        return Limits(records or None, size or None)

    def exceeded(self, used: Usage, seconds: float) -> bool:
        many = self.records is not None and used.records > self.records * seconds
        return many or (self.size is not None and used.size > self.size * seconds)


def usage_of(sampled: Iterable[tuple[str | None, int]], total: int) -> dict[str, Usage]:
    """What each sender published of `total` records, by a sample of (sender, size); None is nobody who counts."""
    records: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    seen = 0
    for sender, size in sampled:
        seen += 1
        if sender is not None:
            records[sender] += 1
            sizes[sender] += size
    scale = total / seen if seen else 0.0
    return {sender: Usage(records[sender] * scale, sizes[sender] * scale) for sender in records}


def added(one: Mapping[str, Usage], other: Mapping[str, Usage]) -> dict[str, Usage]:
    return {sender: one.get(sender, Usage()) + other.get(sender, Usage()) for sender in one.keys() | other.keys()}


def strata(start: int, end: int, most: int) -> list[tuple[int, int]]:
    """The sequences start..end in at most so many ranges of nearly equal width."""
    total = end - start + 1
    count = min(most, total)
    edges = [start + total * number // count for number in range(count + 1)] if count > 0 else [start]
    return [(first, following - 1) for first, following in itertools.pairwise(edges)]


class FloodRules:
    """Who was over its quota in so many windows in a row."""

    def __init__(self, windows: int = WINDOWS, share: float = SHARE_AT_ONCE) -> None:
        self.windows = windows
        self.share = share
        self._runs: dict[str, tuple[int, float]] = {}

    def note(self, used: Mapping[str, Usage], seconds: float, limits: Limits, budget: int) -> list[str]:
        """Take what each sender did in one window; answers whose run has become too long. Its run begins anew."""
        runs: dict[str, tuple[int, float]] = {}
        floods = []
        for sender, usage in used.items():
            if not limits.exceeded(usage, seconds):
                continue
            count, size = self._runs.get(sender, (0, 0.0))
            count, size = count + 1, size + usage.size
            if count >= self.windows or size >= self.share * budget:
                floods.append(sender)
            else:
                runs[sender] = (count, size)
        self._runs = runs
        return floods


def excess(pairs: Iterable[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    """Of (invented name, sender) those beyond the first `most` of each sender, always the same ones."""
    counted: Counter[str] = Counter()
    found = []
    for name, sender in sorted(set(pairs)):
        counted[sender] += 1
        if counted[sender] > most:
            found.append((name, sender))
    return found


def reason(used: Usage, seconds: float, limits: Limits, moment: datetime) -> str:
    """Why posting is withheld, as it is said after "<name> may not post"."""
    span = f"{seconds:.0f}" if seconds >= 1 else f"{seconds:.1f}"
    if limits.records is not None and used.records > limits.records * seconds:
        much = f"{used.records:,.0f} records in {span} s, where {limits.records:,} a second are its quota"
    else:
        much = f"{used.size / 1e6:,.1f} MB in {span} s, where {(limits.size or 0) / 1e6:,.1f} MB a second are its quota"
    return f"since {moment:%Y-%m-%d %H:%M} UTC: {much}"


# --- watching ---


@dataclass(slots=True)
class Cut:
    """Posting that is to be withheld from whoever still has the access record at `seq`."""

    why: str
    seq: int
    #: its credential goes too, not only its posting
    void: bool = False
    asked: float = float("-inf")


class FloodWatch:
    def __init__(self, space: SpaceContext, writer: RulingWriter, gate: LogGate, life: Lifecycle) -> None:
        self.space = space
        self.writer = writer
        self.gate = gate
        self.life = life
        self.rules = FloodRules()
        #: cuts that are decided and not made
        self.owed: dict[str, Cut] = {}
        #: invitations that are to be revoked, and when that was asked for
        self._barred: dict[str, float] = {}
        #: tasks of roles nobody holds that were removed because their sender invented too many
        self.invented_tasks = 0
        self._heads: dict[str, int] = {}
        self._looked = time.monotonic()
        self._told: int | None = DEFAULT_BYTES
        s = space.subjects
        self._streams = (s.log_stream, s.direct_stream, s.task_stream)
        self._everything = f"{s.root}.>"

    async def run(self) -> None:
        """One look."""
        infos = {stream: await self.space.js.info(stream) for stream in self._streams}
        await self._trim_tasks(int(infos[self.space.subjects.task_stream]["state"].get("num_subjects", 0)))
        moment = time.monotonic()
        seconds, self._looked = moment - self._looked, moment
        fresh = {}
        for stream, info in infos.items():
            head = int(info["state"]["last_seq"])
            fresh[stream] = (self._heads.get(stream, head) + 1, head)
            self._heads[stream] = head
        limits = Limits.of(self.space.table.space_at(self.space.position))
        self._tell_quota(limits)
        used: dict[str, Usage] = {}
        new = sum(end - start + 1 for start, end in fresh.values())
        # could they be too much, if they are as large as may be and all of one sender?
        if limits.exceeded(Usage(new, new * MAX_MESSAGE), seconds):
            for stream, (start, end) in fresh.items():
                used = added(used, await self.usage(stream, start, end))
        budget = self.gate.state.budget if self.gate.state else self.space.info.budget
        for sender in self.rules.note(used, seconds, limits, budget):
            self._owe(sender, reason(used[sender], seconds, limits, datetime.now(UTC)))
        self._ask_for_cuts(moment)

    def _tell_quota(self, limits: Limits) -> None:
        """The watcher in the supervisor counts bytes of connections against the same quota."""
        if limits.size != self._told and self.life.tell_supervisor is not None:
            self._told = limits.size
            self.life.tell_supervisor({"quota": {"bytes": limits.size}})

    async def usage(self, stream: str, start: int, end: int) -> dict[str, Usage]:
        """By strata of equal width, each told by one page: large records, of which a page holds one, count too."""
        found: dict[str, Usage] = {}
        for first, last in strata(start, end, POINTS):
            width = last - first + 1
            begin = first + random.randrange(max(1, width - POINT_RECORDS + 1))
            reading = self.space.js.read(
                stream, self._everything, begin, last, page=POINT_RECORDS, max_bytes=POINT_BYTES
            )
            page: list[StoredRecord] = await anext(reading, [])
            sampled = ((self.sender_of(record.subject), stored_size(record)) for record in page)
            found = added(found, usage_of(sampled, width))
        return found

    def sender_of(self, subject: str) -> str | None:
        """Whose record this is, by where the broker pins the sender; rulings and links do not count."""
        kind, *rest = subject.split(".")[2:]
        sender = rest[0] if kind == "chat" else rest[-1] if kind in ("dm", "task") else None
        return sender if sender and self.space.active_access(sender) is not None else None

    # --- cuts ---

    def withhold(self, sender: str, why: str) -> None:
        """Have the posting of an agent withheld; asked for at once."""
        self._owe(sender, why)
        self._ask_for_cuts(time.monotonic())

    def bar(self, sender: str, why: str) -> None:
        """Have the credential of an agent voided; asked for at once."""
        self._owe(sender, why, void=True)
        self._ask_for_cuts(time.monotonic())

    def _owe(self, sender: str, why: str, *, void: bool = False) -> None:
        access, before = self.space.access(sender), self.owed.get(sender)
        if access is None and void:
            self._bar_invitation(sender, why)
        if access is None or access.revoked or "credential is void" in access.withheld:
            return
        if not void and (access.withheld or before is not None):
            return
        if before is None or (void and not before.void):
            log.error("%s (%s) floods; it may not post %s", access.name, sender, why)
            self.owed[sender] = Cut(why, self.writer.access_seq(sender), void)

    def _bar_invitation(self, invitation: str, why: str) -> None:
        """Whoever asks that often and is no agent was invited: its line goes."""
        tell, moment = self.life.tell_supervisor, time.monotonic()
        if tell is not None and moment - self._barred.get(invitation, float("-inf")) >= ASK_AGAIN:
            recent = {each: at for each, at in self._barred.items() if moment - at < ASK_AGAIN}
            self._barred = {**recent, invitation: moment}
            log.error("whoever has invitation %s floods: it is revoked (%s)", invitation, why)
            tell({"bar": {"id": invitation, "why": why}})

    def _ask_for_cuts(self, moment: float) -> None:
        # whatever an administrator did to its access meanwhile settles it; if it goes on, it is found anew
        self.owed = {sender: cut for sender, cut in self.owed.items() if cut.seq == self.writer.access_seq(sender)}
        tell = self.life.tell_supervisor
        for sender, cut in self.owed.items():
            if tell is not None and moment - cut.asked >= ASK_AGAIN:
                cut.asked = moment
                tell({"bar" if cut.void else "withhold": {"id": sender, "why": cut.why}})

    # --- health ---

    def withheld(self) -> list[str]:
        """Who may not post, and why, in sentences."""
        found = (self.space.active_access(owner) for owner in sorted(self.space.table.owners()))
        return [f"{each.name} may not post {each.withheld}" for each in found if each is not None and each.withheld]

    def problems(self) -> list[str]:
        """Cuts that were not made: without a supervisor nobody here can."""
        said = []
        for sender, cut in self.owed.items():
            access = self.space.access(sender)
            if access is None or cut.seq != self.writer.access_seq(sender):
                continue
            asked = self.life.tell_supervisor is not None
            waits = "the supervisor was asked" if asked else "no supervisor runs that could do it"
            said.append(
                f"{access.name} floods ({cut.why}) and its posting is to be withheld; {waits}: "
                f"`tidings agent access {access.name} --post ''` does it by hand"
            )
        return said

    # --- tasks of invented roles ---

    async def _trim_tasks(self, subjects: int) -> None:
        if subjects <= MOST_INVENTED:
            return
        s, js = self.space.subjects, self.space.js
        head = await self.space.head(s.task_stream)
        accesses = (self.space.access(owner) for owner in self.space.table.owners())
        held = {role for access in accesses if access is not None for role in access.roles}
        pairs = [subject.split(".")[3:5] for subject in await js.subjects_of(s.task_stream, f"{s.root}.task.*.*")]
        # whether a role of another space is invented is for that to say, and what has no link is ended soon
        elsewhere = excess(((role, sender) for role, sender in pairs if "@" in role), MOST_ELSEWHERE)
        pairs = [[role, sender] for role, sender in pairs if "@" not in role]
        beyond = excess(((role, sender) for role, sender in pairs if role not in held), MOST_INVENTED)
        if beyond:  # a log that was put back has forgotten roles, and nobody wrote them again yet
            held |= {role for row in Ledger(self.space.home.issued).rows() if row.state in LIVE for role in row.roles}
            beyond = excess(((role, sender) for role, sender in pairs if role not in held), MOST_INVENTED)
        for role, sender in [*beyond, *elsewhere]:
            subject = f"{s.root}.task.{role}.{sender}"
            self.invented_tasks += await js.purge(s.task_stream, subject_filter=subject, below=head + 1)
