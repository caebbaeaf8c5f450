"""How a link is said to be, and why."""

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tidings.admin.home import SpaceHome, SpaceInfo
from tidings.admin.link_peers import LinkPeers
from tidings.admin.link_registry import AgreedLink
from tidings.cli import link_words
from tidings.contract.link_worker import LinkEvent, LinkReport
from tidings.links.operations import describe
from tidings.nats import jwt
from tidings.wire.links import GapKind, Token
from tidings.wire.signing import ACCOUNT, KeyPair

HERE, ACME = (KeyPair.generate(ACCOUNT).id for _ in range(2))


@pytest.fixture
def home(tmp_path: Path) -> SpaceHome:
    made = SpaceHome(tmp_path, "main")
    made.make()
    made.write_info(SpaceInfo("main", HERE, "", "", "", 4222, 1, "", False, ""))
    return made


def facts(home: SpaceHome, **terms: Any) -> LinkReport:
    row = AgreedLink(
        "link1", ACME, "on", op="1", terms={"space": "acme", "channels": {}, "shares": ["general"], **terms}
    )
    return describe(home, row)


def why(link: LinkReport) -> str:
    return str(dict(link_words.rows(link, time.time()))["why"])


@pytest.mark.parametrize("terms", [{"roster": "on"}, {"channels": {"general": "general"}}, {}], ids=str)
def test_a_link_past_its_end_is_over_whatever_passed_over_it(home: SpaceHome, terms: dict[str, Any]) -> None:
    assert link_words.state(facts(home, **terms, until=int(time.time()) - 1)) == "over"
    assert link_words.state(facts(home, **terms, until=int(time.time()) + 100)) in ("waiting", "shares only")


@pytest.mark.parametrize("kind", LinkEvent.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_event_of_a_link_has_a_line_in_words(kind: type[LinkEvent]) -> None:
    token, made = Token(space="s", epoch="e", seq=7), dict[str, Any]()
    values: dict[str, Any] = {
        "kind": GapKind.RECORD,
        "before": "live",
        "now": "paused",
        "words": "why",
        "live": None,
        "push": None,
    }
    for field in msgspec.structs.fields(kind):
        made[field.name] = token if field.type is Token else values.get(field.name, 3)
    event: Any = kind(**made)
    shown = link_words.event(event)
    assert shown.startswith("1970-01-01T00:00:03Z  ")
    assert event.name not in shown


def test_a_link_whose_space_gave_no_address_is_not_said_to_be_interrupted_or_put_back(home: SpaceHome) -> None:
    link = facts(home, roster="on")
    assert (link_words.state(link), "was interrupted or an older copy" in why(link)) == ("waiting", True)
    LinkPeers.below(home).put_creds("link1", jwt.credentials("a.b.c", KeyPair.generate()))
    link = facts(home, roster="on")
    assert link_words.state(link) == "waiting"
    assert "acme gave no address" in why(link)
    assert "interrupted" not in why(link)
