"""What a command costs before it does anything: CPU seconds of `tidings` commands that need no broker.

    cpu_s             user and system time of the slowest of these commands, median of the rounds
    cpu_s_bare        the same for `python -c pass`
    <command>_cpu_s   each of them

CPU, not time that passes: a busy machine changes it less. `--help` draws with Rich and is shown for comparison only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import report

COMMANDS = ("--version", "version --json", "config --json", "space list --json", "agent list --json", "logs --help")
#: how a command ends in an empty home, if not with 0
ENDS_WITH = {"agent list --json": 2}
COUNTED = ("--version", "version --json", "config --json", "space list --json", "agent list --json")


def chosen_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each command, by turns")
    return parser.parse_args()


def cpu_of(arguments: list[str], home: Path, ends_with: int = 0) -> float:
    """CPU seconds of one process, from when it is started until it ended as it should."""
    environment = os.environ | {"TIDINGS_HOME": str(home)}
    child = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != ends_with:
        raise RuntimeError(f"{' '.join(arguments)} ended with {child.returncode}: it did not do its work")
    return used.ru_utime + used.ru_stime


def main() -> None:
    chosen = chosen_options()
    runs = {"python -c pass": ["-c", "pass"]} | {each: ["-m", "tidings.cli", *each.split()] for each in COMMANDS}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in runs.items():
            cpu_of(arguments, Path(folder), ENDS_WITH.get(name, 0))  # once, so that bytecode is there
        for _ in range(chosen.rounds):
            for name, arguments in runs.items():
                taken[name].append(cpu_of(arguments, Path(folder), ENDS_WITH.get(name, 0)))
    median = {name: round(statistics.median(each), 3) for name, each in taken.items()}
    figures = {
        "cpu_s": max(median[name] for name in COUNTED),
        "cpu_s_bare": median["python -c pass"],
        **{f"{name.split(' --')[0].strip('-').replace(' ', '_')}_cpu_s": median[name] for name in COUNTED},
    }
    rows = [(name, f"{median[name]:.3f} s of CPU") for name in runs]
    report("commands that need no broker", rows, figures, as_json=chosen.json)


if __name__ == "__main__":
    main()
