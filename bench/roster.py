"""What idle agents cost: roster messages one agent hears, and the steward's share of a core.

    deltas_per_s      roster messages per second seen by one agent while all of them idle
    steward_cpu       percent of one core the steward process uses, less what it uses with nobody there
    steward_cpu_bare  the same process with nobody there: lease, gate, retention, marks

The agents are bare connections that beat as an endpoint does, every 10 s with a phase of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from measuring import report
from tidings.admin.agents import AgentFile
from tidings.contract.agents import BeatRequest, RosterRequest
from tidings.rpc.control import encode_request
from tidings.wire.message import new_id
from tidings_testing.processes import steward_child
from tidings_testing.real_space import AgentClient, RealSpace, real_space

BEAT_EVERY = 10.0


def chosen_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each measurement")
    return parser.parse_args()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def share_of_core(pid: int, seconds: float) -> float:
    """Percent of one core over `seconds`."""
    before, started = cpu_seconds(pid), time.monotonic()
    await asyncio.sleep(seconds)
    return 100 * (cpu_seconds(pid) - before) / (time.monotonic() - started)


async def beat_for_ever(agent: AgentClient, phase: float) -> None:
    beat = BeatRequest(session=new_id(), status="idle")
    subject = agent.subjects.control("presence", agent.id)
    while True:
        await agent.connection.publish(subject, encode_request(beat, None))
        await asyncio.sleep(phase or BEAT_EVERY)
        phase = 0.0


async def add_agents(space: RealSpace, count: int) -> list[str]:
    names = [f"agent{number}" for number in range(count)]
    async with space.administer() as admin:
        for name in names:
            await admin.add(AgentFile(name, read=("general",), post=("general",)))
    return names


async def main() -> None:
    chosen = chosen_options()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        space = await stack.enter_async_context(real_space(Path(folder) / "home", steward=False))
        steward = await stack.enter_async_context(steward_child(space.home, ttl=3.0))
        names = await add_agents(space, chosen.agents)
        pid = steward.process.pid
        await asyncio.sleep(2)
        bare = await share_of_core(pid, chosen.seconds)
        agents = [await stack.enter_async_context(space.agent(name)) for name in names]
        heard: list[int] = []

        async def hear(message: Any) -> None:
            heard.append(len(message.data))

        await agents[0].connection.subscribe(space.subjects.live_roster, cb=hear)
        beating = [
            asyncio.create_task(beat_for_ever(agent, BEAT_EVERY * (number + 1) / len(agents)))
            for number, agent in enumerate(agents)
        ]
        await asyncio.sleep(3)
        arrival = len(heard)
        roster = await agents[0].control.call(RosterRequest())
        online = sum(row.online for row in roster.rows)
        if online != len(agents):
            raise RuntimeError(f"{online} of {len(agents)} agents are online: this would measure something else")
        heard.clear()
        busy = await share_of_core(pid, chosen.seconds)
        deltas, size = len(heard), sum(heard)
        for task in beating:
            task.cancel()
        await asyncio.gather(*beating, return_exceptions=True)
    figures = {
        "agents": chosen.agents,
        "seconds": chosen.seconds,
        "deltas_per_s": round(deltas / chosen.seconds, 3),
        "delta_bytes_per_s": round(size / chosen.seconds),
        "steward_cpu": round(max(0.0, busy - bare), 2),
        "steward_cpu_bare": round(bare, 2),
        "deltas_at_arrival": arrival,
    }
    rows = [
        (f"roster messages/s heard by one of {chosen.agents} idle agents", str(figures["deltas_per_s"])),
        ("bytes/s of them", str(figures["delta_bytes_per_s"])),
        ("steward, percent of a core, for them", str(figures["steward_cpu"])),
        ("steward, percent of a core, nobody there", str(figures["steward_cpu_bare"])),
        ("deltas in the 3 s in which all of them arrived", str(arrival)),
    ]
    report("roster: what idle agents cost", rows, figures, as_json=chosen.json)


if __name__ == "__main__":
    asyncio.run(main())
