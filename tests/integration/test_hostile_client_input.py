"""What other agents can put on the wire does not silence our client, and `flush` means what it says."""

import asyncio
from typing import Any

import pytest

from tidings_testing.real_space import RealSpace


async def _heard_after(space: RealSpace, hostile: bytes) -> list[str]:
    """Subjects a reader of `team.>` hears when `hostile` is posted there as a channel, then a plain message."""
    s = space.subjects
    await space.add("mal", post=["team.>"])
    await space.add("vic", read=["team.>"])
    heard: list[str] = []
    done = asyncio.Event()

    async def hear(message: Any) -> None:
        heard.append(message.subject)
        if message.subject.endswith(".team.last"):
            done.set()

    async with space.agent("vic") as vic, space.agent("mal") as mal:
        await vic.connection.subscribe(s.live_chat("team.>"), cb=hear)
        await vic.connection.flush()
        stem = f"{s.root}.chat.{mal.id}.team.".encode()
        for channel in (hostile, b"last"):
            await mal.connection.write_raw(b"PUB %b%b 1\r\nx\r\n" % (stem, channel))
        await mal.connection.flush()
        await asyncio.wait_for(done.wait(), 5)
    return heard


@pytest.mark.parametrize("hostile", [b"\xff\xfe", b"a\x0b1", b"a\x0b999", b"\xc3(", b"a\x00b"])
async def test_a_channel_name_that_is_not_text_does_not_silence_its_readers(space: RealSpace, hostile: bytes) -> None:
    first, last = await _heard_after(space, hostile)
    assert space.subjects.parse_live(first) is None
    assert space.subjects.parse_live(last) is not None


async def test_a_channel_name_of_sixty_kilobytes_is_heard_and_is_no_channel(space: RealSpace) -> None:
    first, _ = await _heard_after(space, b"a" * 60_000)
    assert space.subjects.parse_live(first) is None


async def test_after_a_flush_the_broker_has_read_and_answered_what_was_sent_before(space: RealSpace) -> None:
    await space.add("mal")
    async with space.agent("mal") as mal:
        for number in range(10):
            await mal.connection.publish(f"forbidden.{number}", b"x" * 100_000)
        await mal.connection.flush()
        assert len(mal.complaints) == 10
