"""What a neighbour notices while one agent floods a space: the attacks of `tools.attacks` on a real one.

    victim_p95_ms     the worst of what the victim asks ten times a second meanwhile: control requests, posts, direct
                      messages, tasks, and twice a second a new connection; what is refused, or not answered within
                      5 s, counts as 5 s
    broker_peak_mb    the most memory the broker held during any attack

A fresh space is started with `tidings up --no-pipeline` in a folder of its own and is gone afterwards. Each attack has
an agent of its own, lasts at most `--seconds`, and begins when the space is quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from measuring import report
from tidings.admin.administration import administer
from tidings.admin.agents import AgentFile, Ledger
from tidings.admin.home import SpaceHome
from tidings.contract.channels import MembershipsRequest
from tidings.errors import TidingsError
from tidings.nats.client import close_quietly, connect
from tidings.nats.jwt import split_credentials
from tidings.rpc.control import ControlClient
from tidings.supervisor.status import collect, resident_bytes
from tidings.wire import message as wire
from tidings.wire import signing
from tidings.wire.message import Sender
from tools import attacks

PATIENCE = 5.0
PACE = 0.1


def chosen_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each attack")
    parser.add_argument("--budget", type=int, default=512 * 1024 * 1024, help="bytes the log may take")
    parser.add_argument("--only", nargs="*", choices=sorted(attacks.ATTACKS), help="run only these")
    return parser.parse_args()


class Victim:
    """An agent that goes on with its work and notes how long each step takes."""

    def __init__(self, home: SpaceHome, name: str) -> None:
        self.home = home
        self.info = home.read_info()
        self.path = home.agent_creds(name)
        _, self.key = split_credentials(self.path.read_text())
        self.name = name
        self.taken: dict[str, list[float]] = {}
        self.failed: dict[str, int] = {}
        self.connection: Any = None

    async def work(self, seconds: float) -> None:
        """Everything is asked at its time whether or not what was asked before is answered: a stall counts in full."""
        self.taken, self.failed = {}, {}
        under_way: set[asyncio.Task[None]] = set()
        started = time.monotonic()
        for turn in range(int(seconds / PACE)):
            await asyncio.sleep(max(0.0, started + turn * PACE - time.monotonic()))
            steps = self._steps()
            if turn % 5:
                steps.pop("connect")
            for what, step in steps.items():
                task = asyncio.create_task(self._note(what, step))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
        if under_way:
            await asyncio.wait(under_way)

    def _steps(self) -> dict[str, Callable[[], Awaitable[None]]]:
        s = self.info.subjects
        return {
            "connect": self._come_and_go,
            "control": self._ask,
            "post": lambda: self._publish("chat", s.chat(self.key.id, "general"), "general"),
            "direct": lambda: self._publish("dm", s.direct(self.key.id, self.key.id), self.key.id),
            "task": lambda: self._publish("task", s.task("reviewer", self.key.id), "reviewer"),
        }

    async def _note(self, what: str, step: Callable[[], Awaitable[None]]) -> None:
        started = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                await step()
            self.taken.setdefault(what, []).append(time.monotonic() - started)
        except Exception as error:  # noqa: BLE001  boundary: whatever the victim meets is its answer
            self.taken.setdefault(what, []).append(PATIENCE)
            key = f"{what}: {type(error).__name__} {str(error)[:80]}"
            self.failed[key] = self.failed.get(key, 0) + 1

    async def _come_and_go(self) -> None:
        link = await connect(self.info.url, self.path, self.key.id, name=self.name, reconnect=False)
        await close_quietly(link)

    async def connect(self) -> None:
        self.connection = await connect(self.info.url, self.path, self.key.id, name=self.name)

    async def _ask(self) -> None:
        await ControlClient(self.connection, self.info.subjects, self.key.id, timeout=PATIENCE).call(
            MembershipsRequest()
        )

    async def _publish(self, kind: str, subject: str, destination: str) -> None:
        composed = wire.compose(Sender(self.key.id, self.name), text="as every day")
        signature = signing.sign(self.key, self.info.id, kind, destination, composed.raw)
        reply = await self.connection.request(subject, composed.raw, timeout=PATIENCE, headers={"Td-Sig": signature})
        said = json.loads(reply.data)
        if said.get("error"):
            raise TidingsError(said["error"]["description"])

    async def close(self) -> None:
        if self.connection is not None:
            await close_quietly(self.connection)
        self.connection = None

    def p95(self) -> dict[str, float]:
        """Of each kind of request."""
        return {what: round(1000 * _p95(values), 1) for what, values in self.taken.items()}


def _p95(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.95))]


async def peak_while(home: SpaceHome, work: Awaitable[Any]) -> tuple[Any, int]:
    """The result of something, and the most memory the broker held meanwhile."""
    peak, done = 0, asyncio.ensure_future(work)
    while not done.done():
        peak = max(peak, resident_bytes(home.read_state().get("broker_pid") or 0) or 0)
        await asyncio.wait({done}, timeout=0.05)
    return done.result(), peak


async def one_attack(home: SpaceHome, victim: Victim, name: str, seconds: float) -> dict[str, Any]:
    mal = f"mal-{name.replace('_', '-')}"
    async with administer(home, "flood bench") as admin:
        granted = await admin.add(AgentFile(mal, read=("general",), post=("general", "general.>")))
    info = home.read_info()
    command = [sys.executable, attacks.__file__, name, "--url", info.url, "--space", info.name]
    command += ["--creds", str(home.agent_creds(mal)), "--seconds", str(seconds)]
    copied = home.root / f"{mal}.creds"  # an attacker keeps what it was given
    copied.write_bytes(home.agent_creds(mal).read_bytes())
    copied.chmod(0o600)
    command[command.index("--creds") + 1] = str(copied)
    started = time.time()
    attacker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    _, peak = await peak_while(home, victim.work(seconds + 1))
    async with asyncio.timeout(seconds + 60):
        said, _ = await attacker.communicate()
    row = Ledger(home.issued).get(granted.row.id)
    facts = json.loads(said or b"{}")
    count = sum(map(len, victim.taken.values()))
    return {
        "victim_p95_ms": max(victim.p95().values()),
        "of": victim.p95(),
        "victim_max_ms": round(1000 * max(max(values) for values in victim.taken.values()), 1),
        "requests": count,
        "failed": victim.failed,
        "broker_peak_mb": round(peak / 1e6, 1),
        "attacker": facts,
        "withheld": row.withheld if row else None,
        "seconds": round(time.time() - started, 1),
    }


async def quiet(home: SpaceHome, within: float = 60.0) -> list[str]:
    """Wait until the space is healthy again; answers what still is not."""
    until, problems = time.monotonic() + within, ["not asked"]
    while problems and time.monotonic() < until:
        problems = (await collect(home, "vic"))["problems"]
        problems = [each for each in problems if "durable" not in each and "pipeline" not in each]
        if problems:
            await asyncio.sleep(0.5)
    return problems


async def measure(home: SpaceHome, options: argparse.Namespace) -> dict[str, Any]:
    async with administer(home, "flood bench") as admin:
        await admin.add(AgentFile("vic", read=("general",), post=("general",), roles=("reviewer",)))
    victim = Victim(home, "vic")
    await victim.connect()
    _, peak = await peak_while(home, victim.work(2))
    found: dict[str, Any] = {
        "idle": {"victim_p95_ms": max(victim.p95().values()), "broker_peak_mb": round(peak / 1e6, 1)}
    }
    print(f"  {'idle':<14} {found['idle']}", flush=True)
    for name in options.only or attacks.ATTACKS:
        found[name] = await one_attack(home, victim, name, options.seconds)
        found[name]["unhealthy_after"] = await quiet(home)
        print(f"  {name:<14} {found[name]}", flush=True)
    await victim.close()
    return found


def main() -> None:
    options = chosen_options()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TIDINGS_HOME": folder, "TIDINGS_AS": "me"}
        words = [sys.executable, "-m", "tidings.cli", "up", "--no-pipeline", "--budget", str(options.budget)]
        up = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        home = SpaceHome(Path(folder), "main")
        try:
            deadline = time.monotonic() + 60
            while not home.exists or home.read_state().get("phase") != "ready":
                if up.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the space did not start")
                time.sleep(0.1)
            found = asyncio.run(measure(home, options))
        finally:
            up.send_signal(signal.SIGTERM)
            try:
                up.wait(60)
            except subprocess.TimeoutExpired:
                up.kill()
    attacks = {name: facts for name, facts in found.items() if name != "idle"}
    rows = [
        (name, f"p95 {facts['victim_p95_ms']} ms, broker {facts['broker_peak_mb']} MB") for name, facts in found.items()
    ]
    figures = {
        "victim_p95_ms": {name: facts["victim_p95_ms"] for name, facts in attacks.items()},
        "broker_peak_mb": max(facts["broker_peak_mb"] for facts in attacks.values()),
        "worst_p95_ms": max(facts["victim_p95_ms"] for facts in attacks.values()),
        "median_p95_ms": statistics.median(facts["victim_p95_ms"] for facts in attacks.values()),
        "attacks": found,
    }
    report("flood", rows, figures, as_json=options.json)


if __name__ == "__main__":
    main()
