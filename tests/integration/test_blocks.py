"""Sealed blocks on a real broker: who may write one, who gets one, and what the broker removes."""

import os
import random

import pytest

from tidings.admin.agents import AgentFile
from tidings.errors import AuthRevoked, BrokerUnreachable
from tidings.nats.client import connect
from tidings.nats.errors import ApiError
from tidings.nats.jetstream_api import NO_END
from tidings.wire.subjects import block_shard
from tidings_testing.real_space import RealSpace
from tidings_testing.security.actor import acting, line

NAMES = random.Random("blocks")


def a_name() -> str:
    return NAMES.randbytes(20).hex()


async def test_the_shard_of_a_name_is_the_one_that_the_broker_computes(space: RealSpace) -> None:
    """Whatever shard the agent writes, it gets the block: so the broker put ours in its place."""
    await space.add("ada")
    s, names = space.subjects, [a_name() for _ in range(300)]
    async with space.core() as js, space.agent("ada") as ada:
        for name in names:
            await js.publish(s.block(name), name.encode())
        for name in names:
            asked = s.block_get(name).replace(f".blk.{block_shard(name)}.", ".blk.0.")
            answer = await ada.connection.request(asked, timeout=5)
            assert (answer.status, answer.data.decode()) == (None, name)


async def test_the_pipeline_writes_blocks_and_nobody_else_does(space: RealSpace) -> None:
    await space.add("mal")
    s, name = space.subjects, a_name()
    async with acting(space.info.url, s, space.home.pipeline_creds) as pipeline, space.core() as js:
        answer = await pipeline.request(s.block(name), b"sealed")
        assert b'"stream":"BLK_main"' in answer.data
        taken = await js.info(s.block_stream)
        assert (taken["state"]["messages"], taken["state"]["bytes"] > 0) == (1, True)
        get = {s.block_get(name): line(s.block_get(name), reply=f"_INBOX_{pipeline.id}.x")}
        assert await pipeline.not_refused(get) == [], "it needs none of them back"
    for creds in (space.home.agent_creds("mal"), space.home.creds / "steward.creds"):
        async with acting(space.info.url, s, creds) as other:
            assert await other.not_refused({s.block(name): line(s.block(name), b"forged")}) == []


async def test_a_block_that_is_written_again_is_the_same_one_and_is_acknowledged_again(space: RealSpace) -> None:
    """Without a Msg-Id: after a removal an acknowledgement that says `duplicate` would leave nothing there."""
    s, name = space.subjects, a_name()
    async with space.core() as js:
        first = await js.publish(s.block(name), b"sealed")
        assert await js.publish(s.block(name), b"sealed") > first
        assert (await js.info(s.block_stream))["state"]["messages"] == 1
        await js.purge(s.block_stream, subject_filter=s.block(name), below=NO_END)
        await js.publish(s.block(name), b"sealed")
        assert (await js.info(s.block_stream))["state"]["messages"] == 1


async def test_the_broker_removes_the_oldest_blocks_when_there_is_no_room(space: RealSpace) -> None:
    s, names = space.subjects, [a_name() for _ in range(40)]
    async with space.core() as js:
        most = (await js.info(s.block_stream))["config"]["max_bytes"]
        for name in names:
            await js.publish(s.block(name), os.urandom(300 * 1024))
        state = (await js.info(s.block_stream))["state"]
        assert state["bytes"] <= most
        assert 0 < state["messages"] < len(names)
        with pytest.raises(ApiError, match="maximum allowed"):
            await js.publish(s.block(a_name()), bytes(304 * 1024 + 1))


@pytest.mark.parametrize("subject", ["td.main.blk.1.x", "td.main.blk.1.x.b.b", "td.main.blk.x.b", "td.main.blk"])
async def test_no_stream_takes_another_subject_for_a_block(space: RealSpace, subject: str) -> None:
    async with space.core() as js:
        with pytest.raises(BrokerUnreachable, match="no stream takes"):
            await js.publish(subject, b"x")


async def test_what_was_named_to_an_agent_before_it_was_narrowed_it_can_still_fetch_and_once_revoked_it_cannot(
    space: RealSpace,
) -> None:
    """A limit that SECURITY.md says: what was pulled is out of reach. Frames it had not pulled are removed."""
    await space.add("bob")
    s, name = space.subjects, a_name()
    async with space.core() as js:
        await js.publish(s.block(name), b"sealed")
        async with space.administer() as admin:
            await admin.set_access("bob", AgentFile("bob"))
        async with space.agent("bob") as bob:
            assert (await bob.connection.request(s.block_get(name), timeout=5)).data == b"sealed"
        creds = space.home.agent_creds("bob").read_text()
        async with space.administer() as admin:
            await admin.revoke("bob")
        with pytest.raises(AuthRevoked):
            await connect(space.info.url, creds, bob.id, name="test", reconnect=False)
