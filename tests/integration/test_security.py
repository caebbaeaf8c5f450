"""The shipped security suite holds on a real space, fails on a weak one, and what it cannot try is tried here."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tidings.admin.agents import LIVE, Ledger
from tidings.contract.agents import HealthRequest
from tidings.contract.channels import ChangeChannelRequest, ChannelsRequest, JoinRequest, LeaveRequest
from tidings.errors import AuthRevoked, BrokerFailed, BrokerUnreachable, ConflictError, DeniedError, UnreachableError
from tidings.model.task_rules import TaskBook, TaskState
from tidings.nats import jwt
from tidings.nats.client import connect
from tidings.nats.errors import NO_ROOM
from tidings.nats.jetstream import JetStream
from tidings.server import grants
from tidings.server.config import MAX_CONNECTIONS
from tidings.server.keyring import Keyring
from tidings.server.resolver import push_token
from tidings.steward.context import SpaceContext
from tidings.steward.link_handlers import GrantedLink, LinkHandlers
from tidings.steward.receipts import ReceiptStore
from tidings.steward.store_reading import read_store
from tidings.steward.task_handlers import TaskHandlers
from tidings.wire import rulings
from tidings.wire.rulings import Access, Link
from tidings.wire.signing import SIGNATURE_HEADER, KeyPair
from tidings.wire.subjects import Subjects, is_tag, shard_of, tag
from tidings_testing.real_space import AgentClient, RealSpace, real_space
from tidings_testing.security import PROBES, Probe, ProbeResult, Report, run_security_suite
from tidings_testing.security.actor import acting, line
from tidings_testing.waiting import eventually

SECURITY_MD = Path(__file__).parents[2] / "SECURITY.md"
FINDINGS = {
    "F1",
    "F3",
    "F4",
    "F14",
    "F17",
    "F18",
    "F24",
    "F26",
    "N5",
    "N6",
    "N7",
    "N14",
    "N16",
    "N23",
    "S1",
    "S2",
    "S4",
}


# --- the suite on a space as it is shipped ---


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, dict[str, Any]]:
    """One run of the whole suite, and what it left in the space."""
    return asyncio.run(_run_and_look(tmp_path_factory.mktemp("suite") / "home"))


async def _run_and_look(root: Path) -> tuple[Report, dict[str, Any]]:
    async with real_space(root) as space:
        assert space.steward is not None
        told: list[dict[str, Any]] = []
        space.steward.life.tell_supervisor = told.append
        report = await run_security_suite(space.home)
        names = {row.id: row.name for row in Ledger(space.home.issued).rows()}
        left: dict[str, Any] = {
            "cut": [names[each["bar"]["id"]] for each in told if "bar" in each],
            "files": [path.name for path in space.home.root.rglob("probe-*")],
            "active": [owner for owner in space.steward.table.owners() if space.steward.space.active_access(owner)],
            "members": space.steward.table.as_of(space.steward.space.position).members,
            "agents": [row.name for row in Ledger(space.home.issued).rows() if row.state in LIVE],
        }
        async with space.core() as js:
            s = space.subjects
            for stream in (s.direct_stream, s.task_stream, s.delivery_stream):
                state = (await js.info(stream))["state"]
                left[stream] = (state["messages"], state["consumer_count"])
            left["store"] = await read_store(space.home)
            gone = (await js.info(s.log_stream))["state"]["last_seq"] - 1
            await js.api(f"STREAM.MSG.DELETE.{s.log_stream}", {"seq": gone})
            left["damaged"] = gone, await read_store(space.home)
        await space.add("ada", read=[">"])
        async with space.agent("ada") as ada:
            left["channels"] = (await ada.control.call(ChannelsRequest())).channels
            left["dead"] = (await ada.control.call(HealthRequest())).tasks.get("dead", 0)
        return report, left


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
@pytest.mark.requirement("X9")
def test_no_probe_finds_a_promise_broken(tried: tuple[Report, dict[str, Any]], probe: Probe) -> None:
    result = _result(tried[0], probe.name)
    assert result.outcome != "BROKEN", f"{result.title} {result.evidence}"
    assert result.evidence


#: it sends the one header that stops a stream with replicas of nats-server 2.15.1 for good (`contract/test_batches.py`)
STOPS_REPLICAS = "header_tricks"


@pytest.mark.slow
@pytest.mark.timeout(500)
async def test_but_for_one_header_the_suite_finds_nothing_on_a_cluster_either(tmp_path: Path) -> None:
    wanted = {probe.name for probe in PROBES} - {STOPS_REPLICAS}
    async with real_space(tmp_path / "home", nodes=3) as space:
        report = await run_security_suite(space.home, only=wanted)
    assert [(each.name, each.evidence) for each in report.results if each.outcome == "BROKEN"] == []
    assert len(report.results) == len(PROBES) - 1


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_the_suite_finds_nothing_over_tls_either(tmp_path: Path) -> None:
    async with real_space(tmp_path / "home", listen="127.0.0.2") as space:
        report = await run_security_suite(space.home)
    assert [result for result in report.results if result.outcome == "BROKEN"] == []
    assert len(report.results) == len(PROBES)


def _result(report: Report, name: str) -> ProbeResult:
    return next(result for result in report.results if result.name == name)


def test_the_suite_has_nobody_cut_it_needs_and_leaves_no_agent_channel_credential_membership_or_mail_behind(
    tried: tuple[Report, dict[str, Any]],
) -> None:
    report, left = tried
    assert report.cleanup == []
    assert set(left["cut"]) <= {"probe-loud"}, "the others are needed to the end"
    assert {name: found for name, found in left.items() if name not in ("cut", "store", "damaged")} == {
        "files": [],
        "active": [],
        "members": {},
        "agents": [],
        "channels": (),
        "dead": 0,
        "DM_main": (0, 0),
        "TASK_main": (0, 0),
        "DLV_main": (0, 0),
    }


def test_what_the_suite_wrote_void_is_counted_and_only_real_damage_is_a_defect_of_the_store(
    tried: tuple[Report, dict[str, Any]],
) -> None:
    store, (gone, damaged) = tried[1]["store"], tried[1]["damaged"]
    assert (store.found, store.wrong, store.void["signature"] > 0) == ([], 0, True)
    assert [(each.stream, each.first, each.last) for each in damaged.found] == [("LOG_main", gone, gone)]


def test_what_remains_observable_is_written_in_security_md(tried: tuple[Report, dict[str, Any]]) -> None:
    said = " ".join(SECURITY_MD.read_text().split())
    sentences = {result.evidence for result in tried[0].results if result.outcome == "known"}
    assert len(sentences) == 8
    assert [sentence for sentence in sentences if sentence not in said] == []


def test_the_report_is_json_and_every_finding_has_a_probe(tried: tuple[Report, dict[str, Any]]) -> None:
    told = json.loads(tried[0].to_json())
    assert told["ok"] is True
    assert len(told["results"]) == len(PROBES) == len({probe.name for probe in PROBES})
    assert {probe.finding for probe in PROBES} >= FINDINGS
    assert all(probe.title.endswith(".") for probe in PROBES)


@pytest.mark.parametrize("missing", ["steward", "broker"])
async def test_on_a_space_that_is_not_up_the_suite_says_so_and_writes_nothing(space: RealSpace, missing: str) -> None:
    await space.stop_steward()
    if missing == "broker":
        space.broker.stop()
    with pytest.raises(UnreachableError):
        await run_security_suite(space.home)
    assert [path.name for path in space.home.root.rglob("probe-*")] == []
    assert list(space.home.issued.glob("*.json")) == []


async def test_agents_of_an_interrupted_suite_are_revoked_by_the_next_one(space: RealSpace) -> None:
    left = await space.add("probe-mal", read=["general"])
    report = await run_security_suite(space.home, only={"other_sender"})
    assert report.ok
    async with space.administer() as admin:
        row = admin.ledger.get(left.row.id)
    assert row is not None
    assert row.state == "revoked"


# --- the suite can fail ---


def _in_core(self: Keyring, s: Subjects, agent_id: str, name: str, read: Any, post: Any, **how: Any) -> str:
    """Agents as careful grants make them, but in the account that holds the streams."""
    permissions = grants.agent_permissions(s, agent_id, read, post)
    return jwt.user_jwt(self.core, agent_id, name, permissions, grants.agent_limits(), iat=how["iat"])


def _unbound(self: Keyring, s: Subjects, agent_id: str, name: str, read: Any, post: Any, **how: Any) -> str:
    """Agents that may do everything where the streams are."""
    return jwt.user_jwt(self.core, agent_id, name, None, iat=how["iat"])


async def _on_weak_space(root: Path, only: set[str]) -> Report:
    report = Report("none")
    with suppress(Exception):  # the attack takes the log away under the steward, which then ends badly
        async with real_space(root) as space:
            report = await run_security_suite(space.home, only=only)
    return report


async def test_the_suite_finds_that_a_wildcard_covers_blocks_where_the_broker_does_not_compute_their_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grants, "agents_mappings", lambda _s: {})
    report = await _on_weak_space(tmp_path / "home", {"unnamed_blocks", "named_block"})
    assert [result.outcome for result in report.results] == ["BROKEN", "BROKEN"]


async def test_the_suite_finds_that_a_wildcard_covers_blocks_whose_subject_ends_in_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = f"$JS.API.DIRECT.GET.BLK_main.{Subjects('main').root}.blk.>"
    monkeypatch.setattr(grants, "block_get", lambda _s: wide)
    monkeypatch.setattr(grants, "agents_mappings", lambda _s: {})
    report = await _on_weak_space(tmp_path / "home", {"unnamed_blocks"})
    assert [result.outcome for result in report.results] == ["BROKEN"]


@pytest.mark.parametrize("call", ["chat", "refused_chat", "empty_pull", "expired_pull", "direct_pull", "ack", "dm"])
async def test_the_suite_finds_that_one_account_obeys_replies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(Keyring, "agent_token", _in_core)
    report = await _on_weak_space(tmp_path / "home", {f"reply_of_{call}"})
    assert [result.outcome for result in report.results] == ["BROKEN"]
    assert not report.results[0].evidence.startswith("the probe could not finish")
    assert not report.ok


async def test_the_suite_finds_rights_that_are_too_broad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keyring, "agent_token", _unbound)
    broad = {"other_sender", "reserved_subjects", "live_subjects", "foreign_channel", "jetstream_api"}
    report = await _on_weak_space(tmp_path / "home", broad)
    assert {result.name for result in report.broken} == broad
    assert "$JS.API.INFO" in _result(report, "jetstream_api").evidence


@pytest.mark.slow  # its probes wait for what a narrower pipeline would not get
async def test_the_suite_finds_a_pipeline_that_may_do_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = grants.pipeline_permissions

    def wider(s: Subjects, pipeline_id: str) -> jwt.Permissions:
        """One line too many of each kind."""
        given = narrow(s, pipeline_id)
        more = [f"{s.root}.chat.>", f"$KV.{s.state_bucket}.>", f"$JS.API.DIRECT.GET.{s.direct_stream}"]
        return jwt.Permissions([*given.publish, *more], [*given.subscribe, f"{s.root}.dm.>"])

    monkeypatch.setattr(grants, "pipeline_permissions", wider)
    names = {"pipeline_publish", "pipeline_jetstream", "pipeline_subscribe"}
    report = await _on_weak_space(tmp_path / "home", names)
    assert {result.name for result in report.broken} == names
    assert "floor.log" in _result(report, "pipeline_publish").evidence
    assert "DIRECT.GET.DM_main" in _result(report, "pipeline_jetstream").evidence


async def test_the_suite_finds_workers_of_links_that_may_do_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, worker = grants.peer_permissions, grants.link_permissions

    def wider(given: jwt.Permissions, s: Subjects) -> jwt.Permissions:
        """One line too many of each kind."""
        more = [f"{s.root}.via.x.>", f"{s.root}.ctl.health.*", f"{s.root}.chat.>", f"$JS.API.DIRECT.GET.{s.log_stream}"]
        return jwt.Permissions([*given.publish, *more], [*given.subscribe, f"{s.root}.live.link.*"])

    monkeypatch.setattr(grants, "peer_permissions", lambda s, user: wider(peer(s, user), s))
    monkeypatch.setattr(grants, "link_permissions", lambda s, user: wider(worker(s, user), s))
    names = {f"{who}_{what}" for who in ("peer", "worker") for what in ("publish", "jetstream", "subscribe")}
    report = await _on_weak_space(tmp_path / "home", names)
    assert {result.name for result in report.broken} == names
    assert "ctl.health" in _result(report, "peer_publish").evidence
    assert "DIRECT.GET.LOG_main" in _result(report, "worker_jetstream").evidence
    assert "live.link.*" in _result(report, "peer_subscribe").evidence


def _worker_in_core(self: Keyring, s: Subjects, worker_id: str) -> str:
    """Careful rights, in the account that holds the streams."""
    return jwt.user_jwt(self.core, worker_id, "link", grants.link_permissions(s, worker_id))


async def test_the_suite_finds_a_worker_of_links_whose_replies_are_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Keyring, "worker_token", _worker_in_core)
    report = await _on_weak_space(tmp_path / "home", {"link_replies"})
    assert [result.outcome for result in report.results] == ["BROKEN"]
    assert not report.results[0].evidence.startswith("the probe could not finish")


async def test_the_suite_finds_a_steward_that_answers_whom_no_link_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def anybody(self: LinkHandlers, user: str) -> GrantedLink:
        return GrantedLink("any", 1, Link(op="-", link="any", state="on", origin=self.space.info.id, channels={}))

    monkeypatch.setattr(LinkHandlers, "granted", anybody)
    report = await _on_weak_space(tmp_path / "home", {"peer_of_no_link"})
    assert [result.outcome for result in report.results] == ["BROKEN"]


def _pipeline_in_core(self: Keyring, s: Subjects, pipeline_id: str) -> str:
    """The pipeline as the first layout had it: careful rights, in the account that holds the streams."""
    return jwt.user_jwt(self.core, pipeline_id, "pipeline", grants.pipeline_permissions(s, pipeline_id))


async def test_the_suite_finds_a_pipeline_whose_replies_are_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Keyring, "pipeline_token", _pipeline_in_core)
    report = await _on_weak_space(tmp_path / "home", {"pipeline_replies"})
    assert [result.outcome for result in report.results] == ["BROKEN"]
    assert not report.results[0].evidence.startswith("the probe could not finish")


async def test_the_suite_finds_an_import_without_a_wildcard_and_such_an_import_obeys_replies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wild = grants.pipeline_service_subjects

    def literal(s: Subjects) -> dict[str, int]:
        others = {subject: seconds for subject, seconds in wild(s).items() if "PURGE" not in subject}
        return others | {f"$JS.API.STREAM.PURGE.{s.dead_stream}": 5}

    monkeypatch.setattr(grants, "pipeline_service_subjects", literal)
    async with real_space(tmp_path / "home") as space, space.core() as js:
        report = await run_security_suite(space.home, only={"pipeline_replies"})
        assert "PURGE.DEAD_main" in report.broken[0].evidence
        s = space.subjects
        await js.publish(s.dead("probe", "probe"), b"kept by whom?")
        async with acting(space.info.url, s, space.home.pipeline_creds) as pipeline:
            ask = f"$JS.API.DIRECT.GET.{s.log_stream}", b'{"seq":1,"batch":1}'
            await pipeline.send(line(*ask, reply=f"$JS.API.STREAM.PURGE.{s.dead_stream}"))

            async def purged() -> bool:
                return bool((await js.info(s.dead_stream))["state"]["messages"] == 0)

            await eventually(purged, what="a literal import takes the answer for a request")


async def test_the_suite_finds_subscriptions_and_mailboxes_that_are_too_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Keyring, "agent_token", _unbound)
    broad = {"subscriptions", "pull_of_another", "ack_of_another"}
    report = await _on_weak_space(tmp_path / "home", broad)
    assert {result.name for result in report.broken} == broad


async def test_the_suite_finds_tags_made_without_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpaceContext, "tag", lambda _self, text: tag(b"", text))
    report = await _on_weak_space(tmp_path / "home", {"spelled_names"})
    assert [result.outcome for result in report.results] == ["BROKEN"]


def _anybodys_hold(self: TaskBook, seq: int, worker: str) -> TaskState:
    """A desk that asks whether a task is held, and not by whom."""
    del worker
    if seq not in self.open:
        raise ConflictError(f"task {seq} is over")
    return self.open[seq]


async def test_the_suite_finds_a_desk_that_lets_anybody_settle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TaskBook, "require", _anybodys_hold)
    report = await _on_weak_space(tmp_path / "home", {"settle_anothers_task"})
    assert "task done was answered" in _result(report, "settle_anothers_task").evidence


async def test_the_suite_finds_a_desk_that_takes_unsigned_results_and_anybodys_receipts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def everybodys(self: ReceiptStore, seq: int) -> tuple[str, str, str]:
        del self, seq
        return _MAL.id, "01890a5d-ac96-774b-bcce-b302099a8057", _Anybody(_MAL.id)

    monkeypatch.setattr(TaskHandlers, "_check_result", lambda *_: None)
    monkeypatch.setattr(ReceiptStore, "addressed", everybodys)
    names = {"forged_results", "receipts_of_others"}
    report = await _on_weak_space(tmp_path / "home", names)
    assert {result.name for result in report.broken} == names
    assert not any("could not finish" in result.evidence for result in report.broken), report.broken


class _Anybody(str):
    """A reader that is whoever asks."""

    __slots__ = ()

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True


_MAL = KeyPair.generate()


# --- what the suite leaves to tests ---


async def test_a_burnt_id_is_acknowledged_as_a_duplicate_of_somebody_elses_record(space: RealSpace) -> None:
    """F7: the acknowledgement alone does not prove that our message is in the log; the record at its sequence does."""
    for name in ("mal", "ada"):
        await space.add(name)
    async with space.agent("mal") as mal, space.agent("ada") as ada, space.core() as js:
        first = await mal.post("general", b"{}", Nats_Msg_Id="burnt-1")
        said = await ada.post("general", b"{}", Nats_Msg_Id="burnt-1")
        assert (said["duplicate"], said["seq"]) == (True, first["seq"])
        record = await js.at(space.subjects.log_stream, said["seq"])
        assert record is not None
        assert record.subject == space.subjects.chat(mal.id, "general")
        again = await ada.post("general", b"{}", Nats_Msg_Id="burnt-1.fresh")
        stored = await js.at(space.subjects.log_stream, again["seq"])
        assert stored is not None
        assert stored.subject == space.subjects.chat(ada.id, "general")


async def test_ruling_records_carry_no_message_id_and_no_name_in_their_subject(space: RealSpace) -> None:
    """F7, F18: nobody can burn a ruling, and a tag holds no wildcard whatever the pattern."""
    await space.add("ada", read=["team.>"], manage=["team.>"])
    async with space.agent("ada") as ada:
        for pattern in ("team.>", "team.*", "team.backend"):
            await ada.control.call(JoinRequest(pattern))
        await ada.control.call(ChangeChannelRequest("team.backend", description="x"))
    s = space.subjects
    async with space.core() as js:
        pages = [page async for page in js.read(s.log_stream, f"{s.root}.>", 1, 1_000)]
    records = [record for page in pages for record in page]
    tagged = [r.subject for r in records if s.tail(r.subject).startswith(("member.", "channel."))]
    assert len(tagged) == 4
    assert all(is_tag(subject.rpartition(".")[2]) for subject in tagged)
    assert not any("Nats-Msg-Id" in dict(record.own_fields() or ()) for record in records)


async def test_direct_messages_to_an_invented_target_are_bounded_per_pair(space: RealSpace) -> None:
    """F25: the 1,001st is refused; another pair and another sender go on."""
    await space.add("mal")
    await space.add("ada")
    s, nobody = space.subjects, KeyPair.generate().id
    async with acting(space.info.url, s, space.home.agent_creds("mal")) as mal, space.core() as js:
        await mal.send(*(line(s.direct(nobody, mal.id), b"x") for _ in range(1_200)))
        said = json.loads((await mal.request(s.direct(nobody, mal.id), b"x")).data)
        assert said["error"]["err_code"] == NO_ROOM
        info = await js.api(f"STREAM.INFO.{s.direct_stream}", {"subjects_filter": ">"})
        assert info["state"]["subjects"] == {s.direct(nobody, mal.id): 1_000}
        assert "seq" in json.loads((await mal.request(s.direct(mal.id, mal.id), b"x")).data)
        async with acting(space.info.url, s, space.home.agent_creds("ada")) as ada:
            assert "seq" in json.loads((await ada.request(s.direct(nobody, ada.id), b"x")).data)


@asynccontextmanager
async def _account(space: RealSpace, account: str) -> AsyncIterator[Any]:
    keyring = Keyring.load(space.home.keys)
    token, key = keyring.short_lived(getattr(keyring, account), "test")
    connection = await connect(space.info.url, jwt.credentials(token, key), key.id, name="test", reconnect=False)
    try:
        yield connection
    finally:
        await connection.close()


async def _is_let_in(space: RealSpace, creds: str) -> bool:
    _, key = jwt.split_credentials(creds)
    try:
        connection = await connect(space.info.url, creds, key.id, name="test", reconnect=False)
    except (AuthRevoked, BrokerUnreachable):
        return False
    await connection.close()
    return True


async def test_a_revoked_agent_stays_out_after_a_restart_of_the_broker(space: RealSpace) -> None:
    """N7: the token placed before the first start is older than the revocation; the broker keeps the newer one."""
    await space.add("ada")
    creds = space.home.agent_creds("ada").read_text()
    assert await _is_let_in(space, creds)
    async with space.administer() as admin:
        await admin.revoke("ada")
    assert not await _is_let_in(space, creds)
    await space.stop_steward()
    for kill in (False, True):
        await space.restart_broker(kill=kill)
        assert not await _is_let_in(space, creds)


async def test_an_older_account_token_would_undo_a_revocation_and_every_start_derives_it_afresh(
    space: RealSpace,
) -> None:
    """N7: the server takes an older token without complaint, so nothing of ours ever pushes one it did not derive."""
    await space.add("ada")
    creds = space.home.agent_creds("ada").read_text()
    older = (space.home.resolver / f"{space.info.agents_account}.jwt").read_text()
    async with space.administer() as admin:
        await admin.revoke("ada")
    async with _account(space, "system") as system:
        await push_token(system, space.info.agents_account, older)
        assert await _is_let_in(space, creds)
        async with space.administer() as admin:
            await admin.provision()
        assert not await _is_let_in(space, creds)
        with pytest.raises(BrokerFailed, match="serves another token"):
            await push_token(system, space.info.id, older)


async def test_a_ruling_signed_by_another_key_is_void_on_a_real_log(space: RealSpace) -> None:
    """N15: whoever can write to the log still cannot rule; the anchor is the key in `space.toml`."""
    granted = await space.add("ada")
    owner, s = granted.row.id, space.subjects
    wide = rulings.encode(Access(op="forged-operation", name="ada", read=(">",), post=(">",), manage=(">",)))
    forger = KeyPair.generate()
    signature = rulings.sign_ruling(forger, space.info.id, s.tail(s.access(owner)), wide)
    moved = rulings.sign_ruling(_steward_key(space), space.info.id, s.tail(s.access(forger.id)), wide)
    elsewhere = rulings.sign_ruling(_steward_key(space), KeyPair.generate().id, s.tail(s.access(owner)), wide)
    async with space.core() as js:
        for forged in (signature, moved, elsewhere):
            await js.publish(s.access(owner), wide, {SIGNATURE_HEADER: forged})
    await space.stop_steward()
    steward = await space.start_steward()
    assert sum(steward.table.void.values()) == 3
    access = steward.table.access_at(owner, steward.space.position)
    assert access is not None
    assert access.read == ("general",)
    async with space.agent("ada") as ada:
        with pytest.raises(DeniedError):
            await ada.control.call(JoinRequest("secret"))


def _steward_key(space: RealSpace) -> KeyPair:
    return KeyPair((space.home.creds / "steward.key").read_text().strip())


async def test_the_steward_rules_and_restarts_without_the_keys_that_mint(space: RealSpace) -> None:
    """N14: operator and account keys are elsewhere while it serves and starts again."""
    await space.add("ada", read=["general", "ops"])
    away = space.home.root / "keys-away"
    space.home.keys.rename(away)
    try:
        async with space.agent("ada") as ada:
            assert (await ada.control.call(JoinRequest("general"))).state == "opened"
            await space.stop_steward()
            await space.start_steward()
            assert (await ada.control.call(JoinRequest("ops"))).state == "opened"
            assert (await ada.control.call(HealthRequest())).healthy
    finally:
        away.rename(space.home.keys)


async def test_the_stewards_credential_can_neither_mint_speak_nor_delete(space: RealSpace) -> None:
    """N14: it may rule; it has no right in the system account, on messages, frames or streams as such."""
    granted = await space.add("ada")
    s, ada = space.subjects, granted.row.id
    forbidden = ["$SYS.REQ.CLAIMS.UPDATE", f"$SYS.REQ.ACCOUNT.{space.info.agents_account}.CLAIMS.UPDATE"]
    forbidden += [s.chat(ada, "general"), s.via("x", ada, "general"), s.direct(ada, ada), s.task("x", ada)]
    forbidden += [s.delivery(ada), s.delivery_lease, f"{s.root}.live.chat.{ada}.general", s.control("admin", ada)]
    streams = (s.log_stream, s.direct_stream, s.task_stream, s.delivery_stream, s.audit_stream, s.dead_stream)
    forbidden += [f"$JS.API.STREAM.{verb}.{name}" for verb in ("DELETE", "CREATE") for name in streams]
    forbidden += [f"$JS.API.STREAM.MSG.DELETE.{name}" for name in streams]
    forbidden += [f"$JS.API.CONSUMER.CREATE.{s.log_stream}.x", f"$JS.API.CONSUMER.MSG.NEXT.{s.direct_stream}.dm_{ada}"]
    async with acting(space.info.url, s, space.home.creds / "steward.creds") as steward:
        assert await steward.not_refused({name: line(name, b"") for name in forbidden}) == []
        listening = [">", f"{s.root}.live.>", f"{s.root}.dm.>", f"_INBOX_{ada}.>", "$SYS.>", "$JS.>"]
        asked = {name: b"SUB %b %d\r\n" % (name.encode(), 900 + n) for n, name in enumerate(listening)}
        assert await steward.not_refused(asked) == []


async def test_fifteen_thousand_junk_requests_are_answered_and_the_broker_forgets_them(space: RealSpace) -> None:
    """N23: an unanswered request through an import stays in the broker's memory; none is left unanswered."""
    report = await run_security_suite(space.home, deep=True, only={"junk_requests"})
    assert [result.outcome for result in report.results] == ["held"], report.results[0].evidence
    assert report.results[0].evidence.startswith("15000 junk requests answered; the broker grew by")


async def test_requests_nobody_answers_are_forgotten_by_the_broker(space: RealSpace) -> None:
    """N23: the broker never answers the acknowledgement of what it did not deliver; it must not remember it either."""
    report = await run_security_suite(space.home, deep=True, only={"unanswered_requests"})
    assert [result.outcome for result in report.results] == ["held"], report.results[0].evidence
    assert "unanswered requests after the first round" in report.results[0].evidence


async def test_the_suite_finds_a_broker_that_remembers_unanswered_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ACK_ANSWER", "PULL_ANSWER"):
        monkeypatch.setattr(grants, name, 600)
    report = await _on_weak_space(tmp_path / "home", {"unanswered_requests"})
    assert [result.outcome for result in report.results] == ["BROKEN"]


async def test_agents_cannot_take_every_connection_of_the_broker(space: RealSpace) -> None:
    served = jwt.decode((space.home.resolver / f"{space.info.agents_account}.jwt").read_text().strip())
    assert 0 < served["nats"]["limits"]["conn"] < MAX_CONNECTIONS


async def test_the_suite_is_not_misled_by_what_others_do_meanwhile(space: RealSpace) -> None:
    """Somebody posts, joins, leaves and is provisioned while the probes run."""
    await space.add("ada", read=["general", "team.>"], manage=[">"])
    quick = {probe.name for probe in PROBES} - {"junk_requests", "forged_tokens"}
    done = asyncio.Event()
    async with space.agent("ada") as ada:
        work = asyncio.create_task(_busy(space, ada, done))
        report = await run_security_suite(space.home, only=quick)
        done.set()
        rounds = await work
    assert report.ok, report.broken
    assert rounds > 10


async def _busy(space: RealSpace, ada: AgentClient, done: asyncio.Event) -> int:
    rounds = 0
    while not done.is_set():
        rounds += 1
        await ada.post("general", b"{}")
        if rounds <= 40:  # joins are paced; the suite may take longer than what one agent may join in it
            await ada.control.call(JoinRequest(f"team.n{rounds % 7}"))
            await ada.control.call(LeaveRequest(f"team.n{(rounds + 3) % 7}"))
        await ada.control.call(ChangeChannelRequest("general", description=f"round {rounds}"))
        await ada.connection.request(space.subjects.direct(ada.id, ada.id), b"{}", timeout=5)
    return rounds


async def test_wrong_shards_and_literal_wildcards_are_no_ones_mail(space: RealSpace) -> None:
    """F18, F25: what an agent can store under odd direct subjects reaches no mailbox and parses as nothing."""
    granted = await space.add("vic")
    await space.add("mal")
    s, vic = space.subjects, granted.row.id
    wrong = (shard_of(vic) + 1) % 16
    async with acting(space.info.url, s, space.home.agent_creds("mal")) as mal, space.core() as js:
        odd = [f"{s.root}.dm.{wrong}.{vic}.{mal.id}", f"{s.root}.dm.*.*.{mal.id}", f"{s.root}.dm.x.>.{mal.id}"]
        await mal.send(*(line(subject, b"x") for subject in odd))
        assert [s.parse(subject) for subject in odd] == [None] * 3
        assert (await _pending(js, s, vic)) == 0


async def _pending(js: JetStream, s: Subjects, owner: str) -> int:
    return int((await js.api(f"CONSUMER.INFO.{s.direct_stream}.dm_{owner}"))["num_pending"])
