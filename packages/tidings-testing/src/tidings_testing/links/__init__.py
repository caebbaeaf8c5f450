"""The shipped suite of hostile links: a raw peer says everything it must not get away with, to a real worker.

    report = await run_link_suite()
    assert report.ok, report.broken

It makes two throw-away spaces in a folder of its own and takes both away again. `peer.py` is the space that lies,
`stage.py` the one that is lied to and how it is looked at; the other modules are the probes.
"""

from tidings_testing.links.suite import LINK_PROBES, run_link_suite

__all__ = ["LINK_PROBES", "run_link_suite"]
