"""Tokens: our bytes are frozen, what is not ours is refused, and nothing is granted by an empty list."""

import random

import pytest

from tidings.errors import WireError
from tidings.nats import jwt
from tidings.server import grants
from tidings.wire.signing import ACCOUNT, OPERATOR, KeyPair
from tidings.wire.subjects import ADMIN_SERVICE, AGENT_SERVICES, Subjects
from tools.generated import seeded_key

RANDOM = random.Random("jwt")
OPERATOR_KEY, SYSTEM, CORE, AGENTS = (
    seeded_key(RANDOM, OPERATOR),
    *(seeded_key(RANDOM, ACCOUNT) for _ in range(3)),
)
ADA = seeded_key(RANDOM)
MAIN = Subjects("main")


def test_an_account_token_says_what_the_server_expects_to_read() -> None:
    spec = jwt.AccountSpec("AGENTS_main", imports=grants.agents_imports(MAIN, CORE.id), revocations={ADA.id: 1_700})
    claims = jwt.decode(jwt.account_jwt(OPERATOR_KEY, AGENTS.id, spec, iat=1_000))
    assert (claims["iss"], claims["sub"], claims["iat"]) == (OPERATOR_KEY.id, AGENTS.id, 1_000)
    nats = claims["nats"]
    assert (nats["type"], nats["version"], nats["revocations"]) == ("account", 2, {ADA.id: 1_700})
    assert "disk_storage" not in nats["limits"], "agents have no JetStream"
    assert {each["account"] for each in nats["imports"]} == {CORE.id}


def test_core_may_store_and_exports_each_control_service_by_name() -> None:
    spec = jwt.AccountSpec("CORE_main", jwt.AccountLimits(jetstream=True), exports=grants.core_exports(MAIN))
    nats = jwt.decode(jwt.account_jwt(OPERATOR_KEY, CORE.id, spec))["nats"]
    assert nats["limits"]["disk_storage"] == -1
    subjects = {each["subject"] for each in nats["exports"]}
    assert {f"td.main.ctl.{service}.*" for service in AGENT_SERVICES} <= subjects
    assert not any(f".ctl.{ADMIN_SERVICE}" in each or each in ("td.main.ctl.>", "td.main.>") for each in subjects)
    assert {each["subject"] for each in nats["exports"] if each["type"] == "stream"} == {
        "td.main.live.chat.>",
        "td.main.live.via.>",
        "td.main.live.roster",
        "td.main.live.link.*",
    }


def test_an_agents_rights_name_itself_everywhere() -> None:
    permissions = grants.agent_permissions(MAIN, ADA.id, ["general"], ["team.>"])
    blocks = "$JS.API.DIRECT.GET.BLK_main.td.main.blk.*.*.b"
    assert [subject for subject in permissions.publish if ADA.id not in subject] == [blocks], "shared, and sealed"
    others = {"td.main.live.roster", "td.main.live.chat.*.general", "td.main.live.via.*.*.general"}
    assert set(permissions.subscribe) == {f"_INBOX_{ADA.id}.>", *others}


def test_empty_rights_are_refused_because_they_would_mean_everything() -> None:
    with pytest.raises(ValueError, match="allowed everything"):
        jwt.Permissions(publish=[], subscribe=["x"]).claims()


def test_the_bytes_of_a_token_are_frozen() -> None:
    token = jwt.user_jwt(
        AGENTS, ADA.id, "ada", grants.agent_permissions(MAIN, ADA.id, ["general"], ["general"]), iat=1_700_000_000
    )
    again = jwt.user_jwt(
        AGENTS, ADA.id, "ada", grants.agent_permissions(MAIN, ADA.id, ["general"], ["general"]), iat=1_700_000_000
    )
    assert token == again
    assert jwt.decode(token)["jti"] == "A7KRK3V5UYZT6MPIF6VBUBRV36XSNRY4SU2GARBFZ2RLHNVQVH2A"


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_token_with_one_character_changed_is_refused(part: int) -> None:
    pieces = jwt.operator_jwt(OPERATOR_KEY, "op", SYSTEM.id).split(".")
    pieces[part] = pieces[part][:-2] + ("A" if pieces[part][-2] != "A" else "B") + pieces[part][-1]
    with pytest.raises(WireError):
        jwt.decode(".".join(pieces))


@pytest.mark.parametrize("text", ["", "a.b", "a.b.c.d", "é.é.é", "e30.e30.e30"])
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(WireError):
        jwt.decode(text)


def test_a_creds_file_gives_back_token_and_key() -> None:
    token, key = jwt.split_credentials(jwt.credentials("a.b.c", ADA))
    assert (token, key.id) == ("a.b.c", ADA.id)
    with pytest.raises(WireError, match="not a NATS credentials file"):
        jwt.split_credentials("hello")


def test_a_key_pair_signs_what_its_id_verifies() -> None:
    key = KeyPair.generate()
    assert KeyPair(key.seed).id == key.id
    assert key.seed not in repr(key)


def test_workers_of_links_ask_for_themselves_and_only_our_own_admits() -> None:
    peer, worker = grants.peer_permissions(MAIN, ADA.id), grants.link_permissions(MAIN, ADA.id)
    assert peer.publish == [f"td.main.ctl.link.{ADA.id}"]
    assert set(peer.subscribe) == {f"_INBOX_{ADA.id}.>", f"td.main.live.link.{ADA.id}"}
    admitted = {f"td.main.{kind}.>" for kind in ("via", "dm", "task")}
    assert set(worker.publish) == admitted | {f"td.main.ctl.admission.{ADA.id}"}
    assert worker.subscribe == [f"_INBOX_{ADA.id}.>"]
