"""How hard this code is to own, in figures: `python scripts/count.py [--check] [--json] [--static] [--operation NAME]`.

`scripts/count.json` records every figure. This fails if one is worse than its record, but for `host message, returns`,
which varies. A better one becomes the record, except with `--check`, as in CI. `--json` only prints. A feature may
raise the lines of its package: by hand in that file, in the same commit, with the reason in its message.

**The path of a message** is measured on a real space with real processes; the steward, the broker and the pipeline are
not on it. `channel`: from `Agent.send` until it has returned, and in the receiving program until `next_message` has.
`host`: from a program's `send` through the host until it has returned, and in the host until the other agent's inbox
has the message and the host is done with it. After a warm-up one message at a time is traced, several times, and what
is not entered every time (beats, rosters, retries) is not on the path. Then
    functions   of `tidings` that are entered, each once, in the order of their first entry, program after program
    modules     those functions are in
    returns     how often that order goes on in another module that it had been in before; the least of the messages

**files of an operation**: files of `src/tidings` (without `demo`) whose code spells its name: it defines or
calls a function or method of that name, perhaps with `_` before it, or has it as a text or as a part of a path in one.
Comments, docstrings, imports and variables do not count. **class names used twice**: names that more than one `class`
statement in `src` has. **lines, files**: of Python files in `src`. **duplicated runs**: pairs of files in `src` that
share six lines to the letter; blank lines, comments, imports and lone punctuation are passed over. **words**: in
`docs/` and the pages at the top of the repository.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"
RECORD = ROOT / "scripts" / "count.json"
#: seconds that `make test` took here
LAST_TEST = ROOT / ".venv" / "test-seconds"
AIMS = {
    "lines shipped": 72_000,
    "files in src": 330,
    "channel message, modules": 20,
    "channel message, returns": 12,
    "host message, modules": 30,
    "host message, returns": 40,
    "files of one operation": 8,
    "words in docs": 35_000,
}
#: shown, not compared: tasks of the host run side by side, and their order differs by a few returns from run to run
UNSTEADY = "host message, returns"
#: of `make test` on two quiet cores
MINUTES = 9
#: lines in a row that count as duplicated
RUN = 6
WARM_UP, MESSAGES = 6, 7
#: a program that was told to wait for a message needs a moment to do so
SETTLE = 0.1
PATIENCE = 20.0
NOT_TOUCHED = ("demo",)
#: a function of a module
Step = tuple[str, str]
Trace = list[Step]


# ------------------------------------------------------------------------------------------------- from the text alone


def python_files(sources: Path) -> list[Path]:
    return sorted(sources.rglob("*.py"))


def lines_by_package(sources: Path) -> dict[str, int]:
    """Lines of each package of `tidings`, and of its own modules as `tidings`."""
    found: Counter[str] = Counter()
    for path in python_files(sources):
        inside = path.relative_to(sources).parts
        found[inside[1] if len(inside) > 2 else inside[0]] += len(path.read_text().splitlines())
    return dict(sorted(found.items()))


def classes_used_twice(sources: Path) -> dict[str, list[str]]:
    """Name -> the files that have a class of that name, for names that more than one class has."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in python_files(sources):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(sources)))
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def duplicated_runs(sources: Path) -> list[tuple[str, str]]:
    """Pairs of files that share a run of lines."""
    places: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for path in python_files(sources):
        folded = (line.strip() for line in path.read_text().splitlines())
        lines = [line for line in folded if re.search(r"\w", line) and not line.startswith(("#", "import ", "from "))]
        for start in range(len(lines) - RUN + 1):
            places[tuple(lines[start : start + RUN])].add(str(path.relative_to(sources)))
    return sorted({pair for found in places.values() for pair in combinations(sorted(found), 2)})


def words_of_pages(root: Path) -> int:
    return sum(len(path.read_text().split()) for path in (*root.glob("*.md"), *(root / "docs").rglob("*.md")))


def files_of_operation(sources: Path, name: str) -> list[str]:
    return [
        str(path.relative_to(sources))
        for path in python_files(sources)
        if not set(path.relative_to(sources).parts) & set(NOT_TOUCHED) and _spells(ast.parse(path.read_text()), name)
    ]


def _spells(tree: ast.Module, name: str) -> bool:
    wanted = {name, f"_{name}"}
    prose = set(map(id, _docstrings(tree)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in wanted:
            return True
        if isinstance(node, ast.Call) and _called(node) in wanted:
            return True
        if isinstance(node, ast.Constant) and id(node) not in prose and _names(node.value, name):
            return True
    return False


def _names(value: object, name: str) -> bool:
    """Is this the name, or a path with it?"""
    return isinstance(value, str) and (value == name or ("/" in value and name in re.split(r"[/?{}]", value)))


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", "") or getattr(node.func, "id", "")


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Texts that stand alone: nobody reads them at run time."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


# ------------------------------------------------------------------------------------------------------ the way itself


def returns_of(way: Sequence[Step]) -> int:
    """How often a way goes on in another module that it had been in before."""
    been: set[str] = set()
    returns = 0
    for before, now in pairwise(module for module, _ in way):
        been.add(before)
        returns += now != before and now in been
    return returns


def way_of(traces: Sequence[Trace]) -> dict[str, Any]:
    """What the traces of several messages have in common, in numbers and by name."""
    common = set.intersection(*map(set, traces))
    ways = [[step for step in dict.fromkeys(trace) if step in common] for trace in traces]
    return {
        "modules": len({module for module, _ in common}),
        "functions": len(common),
        "returns": min(map(returns_of, ways)),
        "way": [f"{module}:{function}" for module, function in ways[0]],
    }


class Role:
    """A program on the way (`traced.py`), told what to do by lines."""

    def __init__(self, name: str, home: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "traced.py"), name, str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(home),
        )
        self.answer()

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        signal.alarm(round(PATIENCE))
        line = self.process.stdout.readline()
        signal.alarm(0)
        if not line:
            raise SystemExit(f"{self.process.args!r} ended with {self.process.wait()}; its words are above")
        return json.loads(line)

    def do(self, word: str) -> Trace:
        self.tell(word)
        return [(module, function) for module, function in self.answer()]

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def environment(home: Path) -> dict[str, str]:
    ours = {"PYTHONPATH": str(SOURCES), "TIDINGS_HOME": str(home), "TIDINGS_PIPELINE": "off"}
    return {name: value for name, value in os.environ.items() if not name.startswith("TIDINGS_")} | ours


def tidings(home: Path, *words: str) -> None:
    command = [sys.executable, "-m", "tidings", *words]
    ran = subprocess.run(command, env=environment(home), capture_output=True, text=True, timeout=60)
    if ran.returncode:
        raise SystemExit(f"`tidings {' '.join(words)}` ended with {ran.returncode}: {ran.stderr}")


@contextmanager
def space() -> Iterator[Path]:
    """A space with ada and bob, in a directory that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="tidings-count-") as folder:
        home = Path(folder)
        tidings(home, "up", "--detach", "--no-pipeline")
        try:
            for name in ("ada", "bob"):
                tidings(home, "agent", "add", name)
            yield home
        finally:
            tidings(home, "down")


def channel_message(home: Path) -> list[Trace]:
    with ExitStack() as stack:
        sender, reader = Role("sender", home), Role("reader", home)
        stack.callback(sender.end)
        stack.callback(reader.end)

        def one() -> Trace:
            reader.tell("next")
            time.sleep(SETTLE)
            sent = sender.do("send")
            received = [tuple(step) for step in reader.answer()]
            reader.do("ack")
            return [*sent, *received]

        return _traced(one)


def host_message(home: Path) -> list[Trace]:
    with ExitStack() as stack:
        host = Role("host", home)
        stack.callback(host.end)
        wait_until(lambda: (home / "run" / "host.sock").exists(), "the host answers")
        for words in (("join", "general", "--as", "bob"), ("inbox", "--as", "bob")):
            tidings(home, *words)
        client = Role("client", home)
        stack.callback(client.end)

        def one() -> Trace:
            before = inbox_rows(home)
            time.sleep(SETTLE)
            host.do("begin")
            sent = client.do("send")
            wait_until(lambda: inbox_rows(home) > before, "bob's inbox has it")
            time.sleep(SETTLE)
            return [*sent, *host.do("end")]

        return _traced(one)


def _traced(one: Callable[[], Trace]) -> list[Trace]:
    for _ in range(WARM_UP):
        one()
    return [one() for _ in range(MESSAGES)]


def inbox_rows(home: Path) -> int:
    with closing(sqlite3.connect(f"file:{home / 'host.db'}?mode=ro", uri=True)) as connection:
        return int(connection.execute("SELECT count(*) FROM inbox WHERE kind = 'channel'").fetchone()[0])


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {PATIENCE:.0f} s: {what}")
        time.sleep(0.001)


# ---------------------------------------------------------------------------------------------------------- the report


def static_figures(operation: str) -> dict[str, Any]:
    return {
        "operation": {"name": operation, "files": files_of_operation(SOURCES, operation)},
        "classes_used_twice": classes_used_twice(SOURCES),
        "duplicated_runs": duplicated_runs(SOURCES),
        "words": words_of_pages(ROOT),
        "files": len(python_files(SOURCES)),
        "lines": lines_by_package(SOURCES),
    }


def paths() -> dict[str, Any]:
    with space() as home:
        return {"channel": way_of(channel_message(home)), "host": way_of(host_message(home))}


def recorded_figures(figures: dict[str, Any]) -> dict[str, int]:
    """Each figure that must not get worse, by the name under which it is recorded."""
    paths = figures.get("paths", {}).items()
    return {
        "lines shipped": sum(figures["lines"].values()),
        "files in src": figures["files"],
        **{f"{name} message, {what}": path[what] for name, path in paths for what in ("modules", "returns")},
        "files of one operation": len(figures["operation"]["files"]),
        "duplicated runs": len(figures["duplicated_runs"]),
        "class names used twice": len(figures["classes_used_twice"]),
        "words in docs": figures["words"],
        **{f"lines in {package}": count for package, count in figures["lines"].items()},
    }


def compare(figures: dict[str, int], record: dict[str, int]) -> list[str]:
    """What is worse than recorded, in words. A package that is new has no record yet, so it is worse too."""
    return [
        f"{name}: {count:,}, recorded {record.get(name, 0):,}"
        for name, count in figures.items()
        if name != UNSTEADY and count > record.get(name, 0)
    ]


def improved(figures: dict[str, int], record: dict[str, int], *, static: bool) -> dict[str, int]:
    """The record with what got better. Of a package that is gone it keeps nothing."""
    kept = {name: count for name, count in record.items() if static and "message" in name}
    return kept | {name: min(count, record.get(name, 0)) for name, count in figures.items()}


def show(figures: dict[str, int], record: dict[str, int]) -> None:
    print(f"{'figure':<30}{'now':>9}{'recorded':>11}{'aim':>9}")
    for name, count in figures.items():
        aim = f"{AIMS[name]:,}" if name in AIMS else ""
        print(f"{name:<30}{count:>9,}{record.get(name, 0):>11,}{aim:>9}")
    if LAST_TEST.exists():
        print(f"{'minutes of the last make test':<30}{int(LAST_TEST.read_text()) / 60:>9.1f}{'':>11}{MINUTES:>9}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object, with the paths function by function")
    parser.add_argument("--check", action="store_true", help="compare with the record, and do not change it")
    parser.add_argument("--static", action="store_true", help="only what is read from the text: starts nothing")
    parser.add_argument("--operation", default="history", help="whose files are counted")
    chosen = parser.parse_args()
    figures = static_figures(chosen.operation)
    if not chosen.static:
        for number in (signal.SIGTERM, signal.SIGALRM):  # whatever ends this, the space is stopped
            signal.signal(number, lambda found, _frame: sys.exit(f"ended by {signal.Signals(found).name}"))
        figures = {"paths": paths()} | figures
    if chosen.json:
        print(json.dumps(figures, indent=1))
        return
    now, record = recorded_figures(figures), json.loads(RECORD.read_text())
    show(now, record)
    if not chosen.check:
        RECORD.write_text(json.dumps(improved(now, record, static=chosen.static), indent=1) + "\n")
    if worse := compare(now, record):
        lines = "\n  ".join(worse)
        remedy = "Make it smaller, or raise the figure there by hand and give the reason in the commit message."
        sys.exit(f"worse than recorded in scripts/count.json:\n  {lines}\n{remedy}")


if __name__ == "__main__":
    main()
