"""The shipped security suite: a raw client tries every forbidden act; refusal and no change are asserted.

    report = await run_security_suite(SpaceHome(Path(home), "main"))
    assert report.ok, report.broken

It runs against any space that is up, with three temporary agents that are revoked at the end. `report.py` says what
an outcome means, `stage.py` what is set up, `watch.py` how "no change" is seen; the other modules are the probes.
"""

from tidings_testing.security.report import Probe, ProbeResult, Report
from tidings_testing.security.suite import PROBES, run_security_suite

__all__ = ["PROBES", "Probe", "ProbeResult", "Report", "run_security_suite"]
