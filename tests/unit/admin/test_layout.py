"""Grants are frozen, no import takes an answer for a request, a newer layout is refused."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tidings.admin.administration import administer
from tidings.admin.creation import create_space
from tidings.admin.home import SpaceHome
from tidings.admin.layout import LAYOUT, check_layout
from tidings.errors import ConfigError
from tidings.nats import jwt
from tidings.server.keyring import Keyring
from tidings.supervisor.supervisor import Supervisor, UpOptions
from tidings.wire.signing import ACCOUNT, OPERATOR
from tidings.wire.subjects import Subjects
from tools.generated import seeded_key

RANDOM = random.Random("layout")
FIRST = [seeded_key(RANDOM, OPERATOR), *(seeded_key(RANDOM, ACCOUNT) for _ in range(4))]
USER = seeded_key(RANDOM).id
KEYS = Keyring(*[*FIRST, *(seeded_key(RANDOM, ACCOUNT) for _ in range(2))])
MAIN = Subjects("main")
#: digest of what the accounts and roles of `LAYOUT` may do, and of what an agent may
FROZEN, FROZEN_AGENT = "0ddcf3a6059dc2d5", "d36e585f328bb47c"


def accounts() -> dict[str, Any]:
    tokens = KEYS.account_tokens(MAIN, {}).values()
    return {claims["name"]: claims["nats"] for claims in map(jwt.decode, tokens)}


def digest(claims: Any) -> str:
    return hashlib.sha256(json.dumps(claims, sort_keys=True).encode()).hexdigest()[:16]


def test_no_account_imports_a_service_without_a_wildcard() -> None:
    """A reply aimed at a literal import is obeyed by the broker; at a wildcard import it is not (measured)."""
    imported = {
        (name, each["subject"]): set(each["subject"].split("."))
        for name, claims in accounts().items()
        for each in claims.get("imports", ())
        if each["type"] == "service"
    }
    assert {name for name, _ in imported} == {"AGENTS_main", "PIPE_main", "INVITE_main", "LINK_main"}
    assert [subject for subject, tokens in imported.items() if not tokens & {"*", ">"}] == []


def test_only_core_has_streams_and_what_is_imported_is_exported() -> None:
    found = accounts()
    assert [name for name, claims in found.items() if "disk_storage" in claims["limits"]] == ["CORE_main"]
    exported = {(each["subject"], each["type"]) for each in found["CORE_main"]["exports"]}
    for name in ("AGENTS_main", "PIPE_main", "INVITE_main", "LINK_main"):
        assert {(each["subject"], each["type"]) for each in found[name]["imports"]} <= exported
        assert {each["account"] for each in found[name]["imports"]} == {KEYS.core.id}


def test_the_broker_computes_the_shard_of_the_block_that_an_agent_asks_for() -> None:
    asked = "$JS.API.DIRECT.GET.BLK_main.td.main.blk"
    made = f"{asked}.{{{{partition(2147483647,2)}}}}.{{{{wildcard(2)}}}}.b"
    assert accounts()["AGENTS_main"]["mappings"] == {f"{asked}.*.*.b": [{"subject": made}]}
    assert [name for name, claims in accounts().items() if "mappings" in claims] == ["AGENTS_main"]


def test_what_an_account_or_a_role_may_do_is_changed_on_purpose_only() -> None:
    tokens = [KEYS.steward_token(MAIN, USER), KEYS.pipeline_token(MAIN, USER), KEYS.watcher_token(USER)]
    tokens += [KEYS.worker_token(MAIN, USER), KEYS.peer_token(MAIN, USER, "acme", iat=1)]
    roles = [jwt.decode(token)["nats"] for token in tokens]
    assert digest([accounts(), roles]) == FROZEN


def test_what_an_agent_may_do_is_changed_on_purpose_only() -> None:
    token = KEYS.agent_token(MAIN, USER, "ada", ["general"], ["general"])
    assert digest(jwt.decode(token)["nats"]) == FROZEN_AGENT


async def test_a_space_of_a_newer_layout_is_refused_with_what_to_do(tmp_path: Path) -> None:
    home = SpaceHome(tmp_path / "home", "main")
    create_space(home, port=None, open_space=False, budget=None)
    check_layout(home.read_info())
    home.update_info(layout=LAYOUT + 1)
    with pytest.raises(ConfigError, match="by a newer one, install that again"):
        async with administer(home, "test"):
            pass
    with pytest.raises(ConfigError, match="by a newer one, install that again"):
        await Supervisor(home, UpOptions(person="ada"))._bring_up()
