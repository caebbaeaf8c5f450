"""Running the probes against a space that is up: yours, or one a test started."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from tidings.admin.home import SpaceHome
from tidings_testing.security import (
    blocks,
    control,
    headers,
    links,
    machine,
    mailboxes,
    pipeline,
    replies,
    rights,
    sizes,
    tasks,
)
from tidings_testing.security.report import Probe, ProbeResult, Report, broken
from tidings_testing.security.stage import Stage, set_stage

#: harmless first; what would destroy a space that is not safe comes last
PROBES: list[Probe] = [
    *rights.PROBES,
    *headers.PROBES,
    *mailboxes.PROBES,
    *blocks.PROBES,
    *tasks.PROBES,
    *pipeline.PROBES,
    *links.PROBES,
    *machine.PROBES,
    *control.PROBES,
    *sizes.PROBES,
    *replies.PROBES,
    *pipeline.REPLIES,
    *links.REPLIES,
]


def _silent(_text: str) -> None:
    return None


async def run_security_suite(
    home: SpaceHome,
    tell: Callable[[str], None] = _silent,
    *,
    deep: bool = False,
    only: Collection[str] | None = None,
) -> Report:
    """Try every forbidden act against the running space of `home`; `tell` hears a line per probe.

    `deep` floods with 25,000 requests instead of 1,500. `only` names the probes to run.
    """
    started = time.monotonic()
    report = Report(home.name)
    wanted = [probe for probe in PROBES if only is None or probe.name in only]
    async with set_stage(home, report.cleanup, deep=deep) as stage:
        for probe in wanted:
            result = await _run(stage, probe)
            report.results.append(result)
            tell(f"{result.outcome:8} {result.finding:4} {result.title}")
    report.seconds = round(time.monotonic() - started, 3)
    return report


async def _run(stage: Stage, probe: Probe) -> ProbeResult:
    started = time.monotonic()
    try:
        verdict = await probe.run(stage)
    except Exception as error:  # noqa: BLE001  boundary: a probe that cannot finish proves nothing, so it fails
        verdict = broken(f"the probe could not finish ({type(error).__name__}: {error})")
    seconds = round(time.monotonic() - started, 3)
    return ProbeResult(probe.name, probe.finding, probe.title, verdict.outcome, verdict.evidence, seconds)
