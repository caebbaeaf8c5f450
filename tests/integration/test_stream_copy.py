"""Streams go from one broker to another as they are, and what is not equal is found."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tidings.admin.creation import broker_config
from tidings.admin.home import SpaceHome
from tidings.admin.moving import compare_streams, copy_stream
from tidings.client.connect_direct import connect_directly
from tidings.errors import UnhealthyError
from tidings.nats.jetstream_api import ApiError
from tidings.server.nats_server import Broker, free_port
from tidings.server.streams import stream_specs
from tidings_testing.real_space import RealSpace


@asynccontextmanager
async def another_broker(space: RealSpace, folder: Path) -> AsyncIterator[RealSpace]:
    """The same space with an empty store, on another port."""
    home = SpaceHome(folder, space.home.name)
    shutil.copytree(space.home.home, folder, ignore=shutil.ignore_patterns("js", "run", "logs"))
    home.make()
    info = home.update_info(port=free_port())
    broker = Broker(broker_config(home, info), home.run / "nats.conf")
    broker.start()
    other = RealSpace(home, info, broker)
    try:
        yield other
        await other.stop_steward()
    finally:
        broker.stop()


async def test_a_space_goes_on_at_another_broker_with_every_record_and_every_mailbox(
    space: RealSpace, tmp_path: Path
) -> None:
    for name in ("ada", "bob"):
        await space.add(name)
    async with connect_directly("main", name="bob", home=space.home.home, channels=["general"]):
        pass
    async with connect_directly("main", name="ada", home=space.home.home) as ada:
        for number in range(300):
            await ada.send("general", f"{number} " + "x" * 1_000)
        await ada.dm("bob", "unread")
    await space.stop_steward()
    async with another_broker(space, tmp_path / "other") as other:
        streams = [spec.name for spec in stream_specs(space.subjects, space.info.budget, space.info.epoch)]
        async with space.core() as source, other.core() as target:
            copied = {stream: await copy_stream(source, target, stream) for stream in streams}
            counts = {stream: await compare_streams(source, target, stream) for stream in streams}
        assert (counts["LOG_main"] > 300, counts["DM_main"], copied["LOG_main"] > 0) == (True, 1, True)
        await other.start_steward()
        async with connect_directly("main", name="bob", home=other.home.home, channels=["general"]) as bob:
            message = await bob.next_message(10)
            assert (message.text, message.kind) == ("unread", "direct")
            assert (await bob.history("general"))[0].text.startswith("299 ")
            sent = await bob.send("general", "here now")
        assert sent.seq > counts["LOG_main"]


async def test_what_differs_is_found(space: RealSpace, tmp_path: Path) -> None:
    await space.add("ada")
    async with connect_directly("main", name="ada", home=space.home.home) as ada:
        for number in range(3):
            await ada.send("general", str(number))
    await space.stop_steward()
    async with another_broker(space, tmp_path / "other") as other, space.core() as source, other.core() as target:
        await copy_stream(source, target, "LOG_main")
        await compare_streams(source, target, "LOG_main")
        with pytest.raises(ApiError):
            await copy_stream(source, target, "LOG_main")
        last = (await target.info("LOG_main"))["state"]["last_seq"]
        await target.api("STREAM.MSG.DELETE.LOG_main", {"seq": last - 1})
        with pytest.raises(UnhealthyError, match="messages is"):
            await compare_streams(source, target, "LOG_main")
        await source.api("STREAM.MSG.DELETE.LOG_main", {"seq": last - 2})
        with pytest.raises(UnhealthyError, match=f"from sequence {last - 1} on|from sequence {last - 2} on"):
            await compare_streams(source, target, "LOG_main")
