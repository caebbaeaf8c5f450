"""What a probe found: refused, held, known, or BROKEN, each with its evidence.

`refused`: the broker said no and nothing changed. `held`: nobody said no, and nothing changed. `known`: something
can be observed; the sentence about it stands in SECURITY.md. `BROKEN`: a promise does not hold here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["refused", "held", "known", "BROKEN"]


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    outcome: Outcome
    evidence: str


def refused(evidence: str) -> ProbeOutcome:
    return ProbeOutcome("refused", evidence)


def held(evidence: str) -> ProbeOutcome:
    return ProbeOutcome("held", evidence)


def known(sentence: str) -> ProbeOutcome:
    """`sentence` stands word for word in SECURITY.md."""
    return ProbeOutcome("known", sentence)


def broken(evidence: str) -> ProbeOutcome:
    return ProbeOutcome("BROKEN", evidence)


#: gets the stage of its suite
Attempt = Callable[[Any], Awaitable[ProbeOutcome]]


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing that is tried, on the stage of its suite. `title` says what, `finding` which weakness it would be."""

    name: str
    finding: str
    title: str
    run: Attempt


@dataclass(frozen=True, slots=True)
class ProbeResult:
    name: str
    finding: str
    title: str
    outcome: Outcome
    evidence: str
    seconds: float


@dataclass(slots=True)
class Report:
    """Every probe's result. `cleanup` holds what could not be taken away again, in words; normally nothing."""

    space: str
    results: list[ProbeResult] = field(default_factory=list)
    cleanup: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return bool(self.results) and not self.broken and not self.cleanup

    @property
    def broken(self) -> list[ProbeResult]:
        return [result for result in self.results if result.outcome == "BROKEN"]

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(result.outcome for result in self.results))

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok, "counts": self.counts}

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1)


class Collection(list[Probe]):
    """The probes of one module, in the order they are written."""

    def probe(self, finding: str, title: str) -> Callable[[Attempt], Any]:
        def add(run: Attempt) -> Any:
            self.append(Probe(run.__name__, finding, title, run))
            return run

        return add
