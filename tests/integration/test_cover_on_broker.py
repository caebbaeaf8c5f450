"""`covers` decides as the broker does: the same patterns and channels, matched by a real nats-server."""

import itertools
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest
from nats.aio.msg import Msg

from tidings.wire.names import covers, covers_pattern, is_channel, is_pattern, pattern_regex

pytestmark = pytest.mark.broker

SERVER = Path(sys.executable).parent / "nats-server"
PREFIX = "cover"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("broker")
    command: list[str | Path] = [
        SERVER,
        "-a",
        "127.0.0.1",
        "-p",
        "-1",
        "--ports_file_dir",
        folder,
        "-l",
        folder / "log",
    ]
    process = subprocess.Popen(command)
    try:
        yield _address(folder / f"nats-server_{process.pid}.ports", process)
    finally:
        process.terminate()
        process.wait(10)


def _address(ports: Path, process: subprocess.Popen[bytes]) -> str:
    """The server writes the port it chose into a file once it listens."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and process.poll() is None:
        try:
            return str(json.loads(ports.read_text())["nats"][0])
        except (FileNotFoundError, json.JSONDecodeError):
            time.sleep(0.01)
    raise AssertionError(f"nats-server did not start (exit code {process.poll()})")


async def delivered(broker: str, patterns: list[str], channels: list[str]) -> dict[str, set[str]]:
    """Which channels the broker delivers to a subscription on each pattern."""
    got: dict[str, set[str]] = {pattern: set() for pattern in patterns}
    client = await nats.connect(broker, allow_reconnect=False)
    try:
        for pattern in patterns:

            async def take(msg: Msg, into: set[str] = got[pattern]) -> None:
                into.add(msg.data.decode())

            await client.subscribe(f"{PREFIX}.{pattern}", cb=take)
        await client.flush()
        for channel in channels:
            await client.publish(f"{PREFIX}.{channel}", channel.encode())
        await client.flush()
        await client.drain()
    finally:
        await client.close()
    return got


def every_pattern() -> list[str]:
    """All patterns of up to three tokens over a, b, `*` and a final `>`."""
    shapes = [(*head, last) for n in range(3) for head in itertools.product("ab*", repeat=n) for last in "ab*>"]
    return [".".join(shape) for shape in shapes]


def every_channel() -> list[str]:
    """All channels of up to four tokens over a, b and a letter no pattern names: enough to tell any two apart."""
    return [".".join(tokens) for n in range(1, 5) for tokens in itertools.product("abc", repeat=n)]


async def test_every_small_pattern_covers_exactly_what_the_broker_delivers(broker: str) -> None:
    patterns, channels = every_pattern(), every_channel()
    got = await delivered(broker, patterns, channels)
    for pattern in patterns:
        assert got[pattern] == {channel for channel in channels if covers(pattern, channel)}, pattern
        regex = re.compile(pattern_regex(pattern))
        assert got[pattern] == {channel for channel in channels if regex.match(channel)}, pattern
    assert sum(map(len, got.values())) > 500


async def test_a_pattern_covers_another_iff_the_broker_delivers_it_no_less(broker: str) -> None:
    patterns = every_pattern()
    got = await delivered(broker, patterns, every_channel())
    for wide, narrow in itertools.product(patterns, patterns):
        assert covers_pattern(wide, narrow) is (got[narrow] <= got[wide]), (wide, narrow)


async def test_generated_names_are_covered_as_the_broker_matches_them(broker: str) -> None:
    rng = random.Random(20251115)
    vocabulary = ["a", "A", "team", "Team", "team-1", "team_1", "-", "_", "0", "00", "x" * 64]

    def tokens(most: int) -> list[str]:
        return rng.choices(vocabulary, k=rng.randint(1, most))

    def loosened(channel: str) -> str:
        parts = [rng.choice([part, part, "*"]) for part in channel.split(".")]
        return ".".join([*parts[: rng.randint(1, len(parts))], ">"] if rng.random() < 0.4 else parts)

    made = (".".join(tokens(5)) for _ in range(200))
    channels = sorted({channel for channel in made if is_channel(channel)})
    patterns = sorted(
        {pattern for channel in channels for pattern in (channel, loosened(channel)) if is_pattern(pattern)}
    )
    got = await delivered(broker, patterns, channels)
    for pattern in patterns:
        regex = re.compile(pattern_regex(pattern))
        assert got[pattern] == {channel for channel in channels if covers(pattern, channel)}, pattern
        assert got[pattern] == {channel for channel in channels if regex.match(channel)}, pattern
    assert sum(map(len, got.values())) > len(channels)
