"""The wheel, installed into an empty environment as people install it, and used from there.

Versions are those of the lock. What uv has in its cache is not asked of the index, so nothing is downloaded where
`make` installed this project; where it did not, the index is asked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements.lock"
#: what this test's own environment would add to that of a new user
OURS = ("PYTHONPATH", "VIRTUAL_ENV", "TIDINGS_HOME", "TIDINGS_AS", "TIDINGS_SPACE")


def run(
    *command: str | Path, within: float = 120.0, check: bool = True, **more: str
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in OURS} | more
    ran = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=within, env=environment, cwd="/"
    )
    assert not check or ran.returncode == 0, (command, ran.stdout, ran.stderr)
    return ran


def build(project: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=project, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


class Installed:
    """An environment with nothing but the wheel and what it needs, and a home of its own."""

    def __init__(self, folder: Path, wheel: Path, extras: str) -> None:
        self.bin, self.home = folder / "env" / "bin", folder / "home"
        uv = Path(sys.executable).parent / "uv"
        run(uv, "venv", "--quiet", "--python", sys.executable, folder / "env")
        wanted = f"tidings[{extras}] @ {wheel.as_uri()}"
        install = (str(uv), "pip", "install", "--quiet", "-c", str(LOCK), "-p", str(folder / "env"), wanted)
        if run(*install, "--offline", within=600, check=False).returncode:
            run(*install, within=1200)

    def add(self, wheel: Path) -> None:
        """Another distribution of this repository, as an extra would bring it from an index."""
        uv = Path(sys.executable).parent / "uv"
        run(uv, "pip", "install", "--quiet", "--offline", "--no-deps", "-p", self.bin.parent, wheel)

    def tidings(self, *words: str, within: float = 120.0, check: bool = True) -> str:
        return run(self.bin / "tidings", *words, within=within, check=check, TIDINGS_HOME=str(self.home)).stdout

    def json(self, *words: str, check: bool = True) -> Any:
        return json.loads(self.tidings(*words, "--json", check=check))


@pytest.fixture
def installed(request: pytest.FixtureRequest, wheel: Path, tmp_path: Path) -> Iterator[Installed]:
    found = Installed(tmp_path, wheel, request.param)
    try:
        yield found
    finally:
        for words in (("host", "down"), ("down",)):
            found.tidings(*words, check=False)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("installed", ["host,mcp"], indirect=True)
def test_the_wheel_with_host_and_mcp_serves_a_space_a_host_and_a_coding_agent(
    installed: Installed, tmp_path: Path
) -> None:
    assert installed.tidings("--version").split()[-1] == installed.json("version")["tidings"]
    installed.tidings("up", "--detach")
    installed.tidings("agent", "add", "ada")
    installed.tidings("send", "general", "from the wheel", "--as", "ada")
    assert "from the wheel" in installed.tidings("history", "general")
    installed.tidings("host", "up")
    installed.tidings("dm", "ada", "through the host")
    assert "send" in tools_of(installed, "ada")
    gone = run(installed.bin / "python", "-c", "import pyspark", check=False)
    assert "ModuleNotFoundError" in gone.stderr, "nobody pays for Spark who did not ask for it"
    refused = run(installed.bin / "tidings", "doctor", "security", check=False, TIDINGS_HOME=str(installed.home))
    assert "the attacks are not installed: `pip install 'tidings[doctor]'`" in refused.stderr
    installed.add(build(ROOT / "packages" / "tidings-testing", tmp_path / "dist"))
    assert installed.json("doctor", "security")["ok"]


def tools_of(installed: Installed, agent: str) -> list[str]:
    """What `tidings mcp` offers to a client that speaks the protocol line by line."""
    client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    said = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": client},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {}},
    ]
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    server = subprocess.Popen(
        [str(installed.bin / "tidings"), "mcp", "--agent", agent, "--home", str(installed.home)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write("".join(json.dumps(each) + "\n" for each in said))
        server.stdin.flush()
        answers = [json.loads(server.stdout.readline()) for _ in range(2)]
    finally:
        server.kill()
        server.communicate(timeout=30)
    return [tool["name"] for tool in answers[1]["result"]["tools"]]


@pytest.mark.slow  # a gigabyte is unpacked
@pytest.mark.timeout(900)
@pytest.mark.parametrize("installed", ["spark"], indirect=True)
def test_the_wheel_with_spark_delivers_to_an_agent_that_is_away(installed: Installed) -> None:
    installed.tidings("up", "--detach")
    for words in ("agent add ada", "agent add bob", "join general --as bob", "send general owed --as ada"):
        installed.tidings(*words.split())
    deadline = time.monotonic() + 240
    while not installed.json("pipeline", "status", check=False).get("figures", {}).get("deliveries"):
        assert time.monotonic() < deadline, installed.tidings("status", check=False)
        time.sleep(1)
    assert "owed" in installed.tidings("inbox", "--as", "bob")
