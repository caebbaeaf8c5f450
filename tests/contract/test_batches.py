"""Publishing in atomic batches under a lease: the same of a stream in memory, of one server, and of three."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from bare import BareServer, bare_cluster
from tidings.delivery.publishing import BATCH, BatchPublisher, Outgoing, publish_in_order
from tidings.errors import BrokerUnreachable, LeaseLost, OutcomeUnknown
from tidings.nats import errors
from tidings.nats import jetstream_api as api
from tidings.nats.jetstream_blocking import BlockingJetStream, WorkerConnection
from tidings.wire.records import Page
from tools.batch_stream import BatchStream

MOST = 3
_names = count()


@dataclass
class Place:
    """A stream of mailboxes with a lease, wherever it is."""

    connection: WorkerConnection
    root: str
    lease: int
    take_over: Callable[[], None]
    records: Callable[[], list[tuple[str, bytes]]]

    def publish(self, frames: dict[str, list[str]], batch: int | None = BATCH) -> dict[str, tuple[list[int], bool]]:
        destinations = {
            owner: [Outgoing(f"{self.root}.{owner}", f"{owner}-{each}", each.encode()) for each in contents]
            for owner, contents in frames.items()
        }
        fence = api.fence(f"{self.root}.lease", self.lease)
        sent = publish_in_order(self.connection, destinations, fence, batch=batch)
        return {owner: (each.sequences, each.refused is not None) for owner, each in sent.items()}

    def mailbox(self, owner: str) -> list[str]:
        return [data.decode() for subject, data in self.records() if subject == f"{self.root}.{owner}"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareServer]:
    with bare_cluster(tmp_path_factory.mktemp("cluster")) as three:
        yield three


@pytest.fixture(params=["memory", "one server", "three servers"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "memory":
        stream = BatchStream(MOST)
        yield Place(stream, "dlv", 1, stream.take_lease, lambda: stream.records)  # type: ignore[arg-type]
        return
    server: BareServer = request.getfixturevalue("bare" if request.param == "one server" else "cluster")
    js = BlockingJetStream(server.connect)
    yield made(server, js, 3 if request.param == "three servers" else 1)
    js.close()


def made(server: BareServer, js: BlockingJetStream, replicas: int) -> Place:
    name = f"dlv{next(_names)}"
    limits: dict[str, Any] = {"max_msgs_per_subject": MOST, "discard": "new", "discard_new_per_subject": True}
    server.stream(name, num_replicas=replicas, allow_atomic=True, **limits)
    lease = js.run(api.publish(f"{name}.lease", b"", {api.EXPECT_SEQUENCE: "0"}))

    def take_over() -> None:
        js.run(api.publish(f"{name}.lease", b"", {api.EXPECT_SEQUENCE: str(lease)}))

    def records() -> list[tuple[str, bytes]]:
        reader = api.RangeReader(
            *(name, ">", 1, js.run(api.info(name))["state"]["last_seq"]),
            page=100,
            max_bytes=1 << 20,
            replicated=js.replicated,
        )
        found: list[tuple[str, bytes]] = []
        while not reader.done:
            for part in js.run(reader.next_parts()):
                assert isinstance(part, Page)
                found += zip(part.subjects, part.payloads, strict=True)
        return found

    return Place(js.connection, name, lease, take_over, records)


def test_frames_are_stored_in_their_order_and_each_is_told_where(place: Place) -> None:
    sent = place.publish({"ada": ["1", "2"], "bob": ["1"], "cy": []})
    assert sent == {"ada": ([2, 3], False), "bob": ([4], False), "cy": ([], False)}
    records = place.records()
    assert [records[seq - 1] for seq in (2, 3, 4)] == [
        (f"{place.root}.ada", b"1"),
        (f"{place.root}.ada", b"2"),
        (f"{place.root}.bob", b"1"),
    ]


def test_a_full_mailbox_gets_no_more_and_keeps_nobody_else_from_anything(place: Place) -> None:
    place.publish({"full": ["1", "2"]})
    sent = place.publish({"ada": ["1"], "full": ["3", "4", "5"], "bob": ["1", "2"]})
    assert {owner: refused for owner, (_, refused) in sent.items()} == {"ada": False, "full": True, "bob": False}
    assert place.mailbox("full") == ["1", "2", "3"]
    assert (place.mailbox("ada"), place.mailbox("bob")) == (["1"], ["1", "2"])


def test_what_was_stored_before_is_not_stored_again_and_is_told_where_it_is(place: Place) -> None:
    frames = {"ada": ["1", "2"], "bob": ["1"]}
    first = place.publish(frames)
    assert place.publish({**frames, "cy": ["1"]}) == {**first, "cy": ([5], False)}
    assert place.mailbox("ada") == ["1", "2"]


def test_under_a_lease_that_went_to_another_nothing_is_stored(place: Place) -> None:
    place.publish({"ada": ["1"]})
    place.take_over()
    with pytest.raises(LeaseLost, match="somebody else delivers now"):
        place.publish({"ada": ["2"], "bob": ["1"]})
    with pytest.raises(LeaseLost):
        place.publish({"bob": ["1"]}, batch=1)
    assert (place.mailbox("ada"), place.mailbox("bob")) == (["1"], [])


def test_one_at_a_time_comes_to_the_same(place: Place) -> None:
    assert place.publish({"ada": ["1", "2"], "bob": ["1"]}, batch=1) == {"ada": ([2, 3], False), "bob": ([4], False)}


def test_more_than_a_batch_takes_several(place: Place) -> None:
    owners = {f"o{number}": ["1"] for number in range(BATCH + 7)}
    sent = place.publish(owners)
    assert [seq for seqs, _ in sent.values() for seq in seqs] == list(range(2, BATCH + 9))


def test_a_window_of_single_writes_under_a_lease_loses_none_where_it_is_slow(
    bare: BareServer, cluster: BareServer
) -> None:
    """What the batches are for: three servers refuse all but one of those under way, and all are stored at last."""
    for server, replicas in ((bare, 1), (cluster, 3)):
        js = BlockingJetStream(server.connect)
        place = made(server, js, replicas)
        sent = place.publish({f"o{number}": ["1"] for number in range(64)}, batch=None)
        assert all(len(seqs) == 1 and not refused for seqs, refused in sent.values())
        js.close()


# --- what a server does when it likes ---


def publisher(stream: BatchStream) -> BatchPublisher:
    return BatchPublisher(stream, api.fence("dlv.lease", stream.lease))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "refusal",
    [
        503,
        {"error": {"err_code": errors.WRITE_UNDER_WAY, "description": "wrong last sequence"}},
        {"error": {"err_code": errors.ID_UNDER_WAY, "description": "duplicate message id is in process"}},
        {"error": {"err_code": errors.WRONG_LAST_SEQUENCE, "description": "wrong last sequence: 0"}},
        {"error": {"err_code": errors.BATCH_INCOMPLETE, "description": "atomic publish batch is incomplete"}},
    ],
)
def test_a_refusal_that_passes_is_waited_out_and_nobody_owes_anything_for_it(
    refusal: "dict[str, object] | int", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidings.delivery.publishing.PAUSE", 0)
    stream = BatchStream(MOST)
    stream.refusals = [refusal, refusal]
    sent = publisher(stream).run({"ada": [Outgoing("dlv.ada", "a", b"1"), Outgoing("dlv.ada", "b", b"2")]})
    assert sent["ada"].sequences == [2, 3]
    assert stream.asked == [2, 2, 2]


def test_a_stream_that_is_not_back_in_time_refuses_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidings.delivery.publishing.PATIENCE", 0)
    monkeypatch.setattr("tidings.delivery.publishing.PAUSE", 0)
    stream = BatchStream(MOST)
    stream.refusals = [503] * 8
    sent = publisher(stream).run({"ada": [Outgoing("dlv.ada", "a", b"1")]})
    assert sent["ada"].refused is not None
    assert "no stream takes dlv.ada" in sent["ada"].refused


# --- what this server cannot ---


def test_one_header_stops_a_stream_with_replicas_of_this_server_for_good(cluster: BareServer, bare: BareServer) -> None:
    """A fault of nats-server 2.15.1 that SECURITY.md warns of. If this fails, the server was mended: say so there, let
    the whole security suite run on a cluster, and have `up` no longer warn."""
    stopped: dict[str, bool] = {}
    for server, replicas in ((bare, 1), (cluster, 3)):
        name = f"header{replicas}"
        server.stream(name, num_replicas=replicas)
        js = BlockingJetStream(server.connect)
        js.run(api.publish(f"{name}.a", b"", {"Nats-Msg-Id": "first"}))
        with pytest.raises(errors.ApiError, match="wrong last msg ID"):
            js.run(api.publish(f"{name}.a", b"", {"Nats-Expected-Last-Msg-Id": "another"}))
        try:
            js.run(api.publish(f"{name}.a", b"", timeout=5))
            stopped[name] = False
        except (OutcomeUnknown, BrokerUnreachable):
            stopped[name] = True
        js.close()
    assert stopped == {"header1": False, "header3": True}
