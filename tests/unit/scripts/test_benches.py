"""Every benchmark starts from a checkout, and `make bench` runs every one."""

import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[3]
BENCHES = sorted((ROOT / "bench").glob("*.py"))
#: each file as a process of its own would load it, but what all of them import is loaded once
LOADER = dedent("""
    import os, runpy, sys
    import nats, tidings_testing.real_space
    for path in sys.argv[1:]:
        if not (pid := os.fork()):
            sys.path[0] = os.path.dirname(path)
            runpy.run_path(path, run_name="loaded")
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            sys.exit(path)
""")


def test_every_benchmark_can_be_loaded_on_its_own() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", LOADER, *map(str, BENCHES)], capture_output=True, text=True, cwd=ROOT, timeout=55
    )
    assert loaded.returncode == 0, loaded.stderr


def test_make_bench_runs_every_benchmark() -> None:
    programs = {f"bench/{path.name}" for path in BENCHES if "__main__" in path.read_text()}
    assert len(programs) > 15
    called = set(re.findall(r"bench/\w+\.py", (ROOT / "Makefile").read_text()))
    assert programs - called == {"bench/ledger.py"}, "bench/deliver.py starts this one"
