"""A space on three servers: replicas, batches through the pipeline's account, and one incarnation for all of them."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from foreign import connect
from tidings.admin.identity import local_identity
from tidings.client.publishing import prepare_chat
from tidings.contract.channels import HistoryRequest
from tidings.delivery.publishing import Outgoing, batch_of, publish_in_order
from tidings.errors import LeaseLost
from tidings.nats.errors import NO_ROOM, ApiError
from tidings.nats.jetstream_api import publish
from tidings.nats.jetstream_blocking import BlockingJetStream, WorkerConnection
from tidings.server.lease import DeliverLease
from tidings.server.streams import ensure_streams, stream_specs
from tidings.wire import message as wire
from tidings.wire.message import Sender
from tidings.wire.signing import KeyPair
from tidings_testing.cluster import Cluster
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually, insist

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def space(tmp_path: Path) -> AsyncIterator[RealSpace]:
    async with real_space(tmp_path / "home", nodes=3) as running:
        await running.add("ada")
        await running.add("bob")
        yield running


def cluster_of(space: RealSpace) -> Cluster:
    assert space.cluster is not None
    return space.cluster


@contextmanager
def pipeline_js(space: RealSpace) -> Iterator[BlockingJetStream]:
    """As the pipeline's driver has it: in an account of its own."""
    open_one = lambda: WorkerConnection.open(space.info.url, space.home.pipeline_creds, name="test")  # noqa: E731
    with closing(BlockingJetStream(open_one)) as js:
        yield js


async def test_every_stream_has_three_replicas_and_a_second_look_changes_nothing(space: RealSpace) -> None:
    async with space.core() as core:
        names = [spec.name for spec in stream_specs(space.subjects, space.info.budget, "", 3)]
        configs = {name: (await core.info(name))["config"] for name in names}
        assert {config["num_replicas"] for config in configs.values()} == {3}
        assert [name for name, config in configs.items() if config.get("allow_atomic")] == ["DLV_main"]
        assert batch_of(configs["DLV_main"]) == 500
        assert await ensure_streams(core, space.subjects, space.info.budget, space.info.epoch, 3) == []


async def test_frames_go_in_batches_through_the_pipelines_account_and_only_under_its_lease(space: RealSpace) -> None:
    owners = [KeyPair.generate().id for _ in range(40)]

    def frames(word: str, most: int = 1) -> dict[str, list[Outgoing]]:
        subject = space.subjects.delivery
        return {
            owner: [Outgoing(subject(owner), f"{owner}{word}{n}", word.encode()) for n in range(most)]
            for owner in owners
        }

    def deliver() -> None:
        with pipeline_js(space) as js:
            first = DeliverLease(js, space.subjects, ttl=0.2, replicated=js.replicated)
            first.take()
            sent = publish_in_order(js.connection, frames("first", 2), first.fence, batch=500)
            assert sorted(seq for each in sent.values() for seq in each.sequences) == list(
                range(first.seq + 1, first.seq + 81)
            )
            full = {owners[0]: frames("full", 70)[owners[0]], owners[1]: frames("more")[owners[1]]}
            sent = publish_in_order(js.connection, full, first.fence, batch=500)
            assert len(sent[owners[0]].sequences) == 62
            assert str(NO_ROOM) in str(sent[owners[0]].refused)
            assert len(sent[owners[1]].sequences) == 1
            second = DeliverLease(js, space.subjects, ttl=0.2, replicated=js.replicated)
            js.run(second.take_steps(after=first.holder_id))
            with pytest.raises(LeaseLost):
                publish_in_order(js.connection, frames("stale"), first.fence, batch=500)
            with pytest.raises(LeaseLost):
                first.beat()
            assert js.run(second.prove_steps()).id == second.holder_id

    await asyncio.to_thread(deliver)


async def test_the_incarnation_of_a_cluster_is_its_epoch_whichever_node_answers(space: RealSpace) -> None:
    expected = f"cluster:{space.info.epoch}"
    ada = await local_identity(space.home, "ada")
    async with connect(space, "ada", receive=False) as endpoint:
        assert endpoint.transport.incarnation == expected == await endpoint.transport.connection.prove()
        before = endpoint.transport.connection.current.incarnation
        cluster_of(space).node(str(endpoint.transport.connection.current.info["server_name"])).kill()
        await eventually(
            lambda: endpoint.transport.connection.rebuilds and endpoint.transport.state == "ready", within=20
        )
        assert endpoint.transport.connection.current.incarnation != before
        assert endpoint.transport.incarnation == expected

        async def send() -> str:
            said = prepare_chat(ada, "general", wire.compose(Sender(ada.id, "ada"), text="still here"))
            return (await endpoint.transport.publish(said, only=expected)).incarnation

        assert await insist(send, within=20) == expected


async def test_direct_messages_and_tasks_arrive_as_everywhere(space: RealSpace) -> None:
    await space.add("wim", roles=["reviewer"])
    async with connect(space, "ada") as ada, connect(space, "bob") as bob, connect(space, "wim") as wim:
        for n in range(5):
            await ada.dm("bob", f"direct {n}")
        got = []
        for _ in range(5):
            message = await bob.next_message(10)
            got.append(message.text)
            await message.ack()
        assert got == [f"direct {n}" for n in range(5)]
        asked = await ada.ask("reviewer", "look at this")
        job = await asyncio.wait_for(anext(aiter(wim.work("reviewer"))), 20)
        assert job.text == "look at this"
        await job.done("seen")
        assert asked.seq > 0


async def test_with_two_of_three_gone_a_send_is_refused_in_words_and_nothing_confirmed_is_lost(
    space: RealSpace,
) -> None:
    cluster = cluster_of(space)
    async with connect(space, "ada", receive=False) as ada:
        stored = [(await ada.send("general", f"before {n}")).seq for n in range(5)]
        for node in cluster.nodes[1:]:
            node.kill()
        with pytest.raises(Exception) as refused:
            await ada.send("general", "nobody can store this", timeout=3)
        assert any(word in str(refused.value) for word in ("no confirmation", "nobody takes", "steward"))
        for node in cluster.nodes[1:]:
            node.start()
        after = await insist(lambda: ada.send("general", "after"), within=40)
        async with space.core() as core:
            kept = [
                record.seq
                async for page in core.read("LOG_main", f"{space.subjects.root}.chat.>", 1, after.seq)
                for record in page
            ]
        assert set(stored) <= set(kept)


async def test_a_write_while_a_leader_is_chosen_is_told_as_unreachable_and_never_as_full(space: RealSpace) -> None:
    cluster = cluster_of(space)
    async with space.core() as core:
        leader = (await core.info("LOG_main"))["cluster"]["leader"]
        keeps = next(node for node in cluster.nodes if node.config.server_name != leader)
    with closing(BlockingJetStream(lambda: WorkerConnection.open(keeps.url, space.home.pipeline_creds))) as js:
        await asyncio.to_thread(js.connection.ping)
        cluster.node(leader).kill()
        codes: set[str] = set()

        def ask() -> bool:
            try:
                js.run(publish(space.subjects.delivery("U" * 56), b"x"))
                return True
            except ApiError as error:
                codes.add(str(error.err_code))
            except Exception as error:
                codes.add(type(error).__name__)
            return False

        await eventually(lambda: asyncio.to_thread(ask), within=30, every=0.05)
        assert codes <= {"BrokerUnreachable", "OutcomeUnknown"}


async def test_a_page_reaches_what_its_reader_heard_of_although_a_replica_that_lags_says_the_log_ends_before(
    space: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that finds a hole asks for it up to the record that a copy named. One page too short, and it is lost."""
    assert space.steward is not None
    js, lagging = space.steward.js, [5]
    async with space.agent("ada") as ada, space.agent("bob") as bob:
        seq = int((await ada.post("general", b"{}"))["seq"])
        perform = js._perform

        async def behind(request: Any) -> Any:
            answer = await perform(request)
            if getattr(request, "subject", "") != "$JS.API.STREAM.INFO.LOG_main" or not lagging[0]:
                return answer
            lagging[0] -= 1
            assert answer is not None
            said = json.loads(answer[1])
            said["state"]["last_seq"] = seq - 1
            return answer[0], json.dumps(said).encode()

        monkeypatch.setattr(js, "_perform", behind)
        page = await bob.control.call(HistoryRequest("general", after=seq - 1, until=seq, limit=10))
        assert [each.seq for each in page.records] == [seq]
        assert not lagging[0]
