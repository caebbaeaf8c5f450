"""A client in JavaScript beside a test: `tests/node/`, written from docs/wire.md alone.

Its packages are installed once per process into a temporary folder, from the registry npm is configured for and exactly
as the lock file says. Where there is no Node, or the registry is out of reach, tests that need it are skipped with the
reason.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import tidings
from schema import FOLDER
from tidings.cli.main import main
from tidings_testing.real_space import RealSpace

SOURCE = Path(__file__).parent / "node"
FILES = ("package.json", "package-lock.json", "wire.mjs", "vectors.mjs", "client.mjs")
OLDEST = 20
INSTALL_SECONDS = 120
STEP_SECONDS = 100
Facts = dict[str, Any]


def installed(folder: Path) -> Path:
    """The scripts with their packages; skips whoever asks if that cannot be."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.lstrip("v").partition(".")[0]) < OLDEST:
        pytest.skip(f"node {version} is older than {OLDEST}")
    for name in FILES:
        shutil.copy(SOURCE / name, folder / name)
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not install the packages within {INSTALL_SECONDS} s")
    if done.returncode:
        if any(word in done.stderr for word in ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENETUNREACH")):
            pytest.skip(f"the registry of npm is out of reach: {done.stderr[-200:]}")
        pytest.fail(f"npm ci: {done.stderr[-1000:]}")
    return folder


def vectors_hold(folder: Path) -> str:
    """Every golden vector, as JavaScript has it; what it said last."""
    command = ["node", "vectors.mjs", str(FOLDER / "vectors.json")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


class NodeClient:
    """A running client. `step` waits for what it says."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.steps: list[Facts] = []

    async def step(self, name: str) -> Facts:
        assert self.process.stdout is not None
        async with asyncio.timeout(STEP_SECONDS):
            while True:
                line = await self.process.stdout.readline()
                assert line, f"it ended before {name}, after {self.steps}: {await self.ended()}"
                said: Facts = json.loads(line)
                self.steps.append(said)
                if said["step"] == name:
                    return said

    async def ended(self) -> str:
        assert self.process.stderr is not None
        return f"{await self.process.wait()} {(await self.process.stderr.read()).decode()}"


@asynccontextmanager
async def node_client(folder: Path, bundle: Path, peer: str, role: str) -> AsyncIterator[NodeClient]:
    process = await asyncio.create_subprocess_exec(
        *("node", "client.mjs", str(bundle), peer, role),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield NodeClient(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def export(space: RealSpace, name: str, path: Path) -> Path:
    """A bundle, as a user gets it."""
    words = ["agent", "export", name, "--home", str(space.home.home), "--space", space.home.name, "-o", str(path)]
    assert await asyncio.to_thread(main, words) == 0
    return path


async def prove(
    space: RealSpace, folder: Path, tmp_path: Path, deliver: Callable[[str, int], Awaitable[None]]
) -> list[Facts]:
    """Ada, on Python, and Nova, on Node, say everything to each other that agents can say.

    `deliver` has a frame made for Nova (its id) that holds what is stored at a sequence.
    """
    await space.add("ada", roles=["oracle"])
    nova_id = (await space.add("nova", roles=["reviewer"])).row.id
    bundle = await export(space, "nova", tmp_path / "nova.tidings.json")
    async with tidings.connect(space.home.name, name="ada", home=space.home.home) as ada:
        await ada.join("general")
        async with node_client(folder, bundle, ada.id, "reviewer") as nova:
            assert (await nova.step("roster"))["peer"] == "ada"
            assert (await nova.step("ready"))["state"] == "opened"
            said = await ada.send("general", "hello from python " + "and again " * 50)
            assert (await nova.step("heard"))["seq"] == said.seq
            await deliver(nova_id, said.seq)

            heard = {each.kind: each for each in [await ada.next_message(30), await ada.next_message(30)]}
            spoken, letter = heard["channel"], heard["direct"]  # in whichever order they came
            assert (spoken.sender.id, spoken.message.text, spoken.mentions_me) == (nova_id, "hello from node", True)
            assert spoken.message.reply_to == said.id
            assert (letter.sealed, letter.message.text) == (True, "between us")
            await spoken.ack()
            await letter.ack()
            facts = await nova.step("spoke")
            assert (facts["seq"], facts["duplicate"], facts["same"]) == (spoken.seq, True, True)
            assert (await nova.step("history"))["texts"][0] == "hello from node"

            sealed = await ada.dm(nova_id, "between us two")
            facts = await nova.step("letter")
            assert (facts["from"], facts["text"], facts["sealed"]) == (ada.id, "between us two", True)
            assert (await ada.receipt(sealed, "read")).stage == "read"

            ticket = await ada.ask("reviewer", "review this")
            result = await ticket.result(60)
            assert (result.state, result.text, result.worker) == ("done", "node did: review this", nova_id)
            assert (await nova.step("worked"))["state"] == "done"
            async for job in ada.work("oracle"):
                await job.done("42")
                break
            facts = await nova.step("asked")
            assert (facts["text"], facts["worker"]) == ("42", ada.id)

            facts = await nova.step("frame")
            assert any(text.startswith("hello from python") for text in facts["texts"])
            await nova.step("done")
            assert (await nova.ended()).startswith("0 ")
    return nova.steps
