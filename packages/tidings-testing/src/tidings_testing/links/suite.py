"""Running the probes of links: two throw-away spaces are made, one of them hostile, and taken away again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path
from tempfile import TemporaryDirectory

from tidings_testing.links import agreements, answers, digests, gaps, ids, pages, people, records, rights, tasks
from tidings_testing.links.stage import LinkStage, set_link_stage
from tidings_testing.security.report import Probe, ProbeOutcome, ProbeResult, Report, broken

LINK_PROBES: list[Probe] = [
    *records.PROBES,
    *ids.PROBES,
    *pages.PROBES,
    *gaps.PROBES,
    *digests.PROBES,
    *answers.PROBES,
    *rights.PROBES,
    *people.PROBES,
    *tasks.PROBES,
    *agreements.PROBES,
]
#: what is true after every probe, and is looked at after all of them
LAST = "everything_accounted_for"


def _silent(_text: str) -> None:
    return None


async def run_link_suite(
    tell: Callable[[str], None] = _silent, *, folder: Path | None = None, only: Collection[str] | None = None
) -> Report:
    """Lie to a worker in every way; `tell` hears a line per probe. `only` names the probes to run, the last one of all
    is always run. `folder`: where the spaces are made; a temporary one if not said."""
    started, report = time.monotonic(), Report("main")
    wanted = [probe for probe in LINK_PROBES if only is None or probe.name in only or probe.name == LAST]
    with TemporaryDirectory(prefix="tidings-link-", dir=folder) as root:
        async with set_link_stage(Path(root)) as stage:
            for probe in wanted:
                report.results.append(result := await _try(stage, probe))
                tell(f"{result.outcome:8} {result.finding:4} {result.title}")
    report.seconds = round(time.monotonic() - started, 3)
    return report


async def _try(stage: LinkStage, probe: Probe) -> ProbeResult:
    started = time.monotonic()
    try:
        verdict = await probe.run(stage)
    except Exception as error:  # boundary: a probe that cannot finish proves nothing, so it fails
        logging.getLogger(__name__).info("probe %s", probe.name, exc_info=True)
        verdict = broken(f"the probe could not finish ({type(error).__name__}: {error})")
    stage.peer.lies.clear()
    if verdict.outcome == "BROKEN" and probe.name != LAST:
        verdict = await _start_over(stage, verdict)
    seconds = round(time.monotonic() - started, 3)
    return ProbeResult(probe.name, probe.finding, probe.title, verdict.outcome, verdict.evidence, seconds)


async def _start_over(stage: LinkStage, verdict: ProbeOutcome) -> ProbeOutcome:
    try:
        await stage.start_over()
    except Exception as error:  # noqa: BLE001  the same boundary: whatever else fails is said where it fails
        return broken(f"{verdict.evidence}; and the link does not go on after it ({error})")
    return verdict
