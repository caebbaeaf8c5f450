"""Agent files are read as people write them, and the ledger is the source of revocations."""

import json
from pathlib import Path

import pytest

from tidings.admin.agents import Issued, Ledger, as_patterns, parse_agent_file
from tidings.errors import ConfigError, InvalidName, UsageError
from tidings.wire.signing import KeyPair

TEXT = """---
name: ada
role: reviewer
read: [general, team.>]
post: general
description: careful
model: some-model
---

You are Ada.
---
You review code.
"""


def test_front_matter_is_the_card_and_the_rest_the_persona() -> None:
    ada = parse_agent_file(TEXT, "ada.md")
    assert (ada.name, ada.roles, ada.read, ada.post) == ("ada", ("reviewer",), ("general", "team.>"), ("general",))
    assert ada.persona == "You are Ada.\n---\nYou review code."
    assert ada.extra == {"model": "some-model"}


def test_a_file_survives_being_written_and_read() -> None:
    ada = parse_agent_file(TEXT, "ada.md")
    assert parse_agent_file(ada.render(), "again") == ada


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name: ada", "must begin with"),
        ("---\nname: ada\n", "no closing"),
        ("---\n- ada\n---\n", "needs at least `name"),
        ("---\nname: ada\nread: {a: b}\n---\n", "`read` must be a list"),
        ("---\nname: ada\nread: [1]\n---\n", "`read` must be a list"),
        ("---\nname: [\n---\n", "not YAML"),
        ("---\n!!python/object/apply:os.system [id]\n---\n", "not YAML"),
    ],
)
def test_what_is_no_agent_file_is_refused_with_its_name(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as refused:
        parse_agent_file(text, "x.md")
    assert "x.md" in str(refused.value)


@pytest.mark.parametrize("text", ["---\nname: a b\n---\n", "---\nname: ada\nread: ['team..x']\n---\n"])
def test_names_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(InvalidName):
        parse_agent_file(text, "x.md")


def test_patterns_may_be_repeated_or_joined_by_commas() -> None:
    assert as_patterns(["general, team.>", "general", ""]) == ("general", "team.>")


def test_the_ledger_knows_who_holds_a_name_and_whose_tokens_are_void(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    old, new = KeyPair.generate().id, KeyPair.generate().id
    ledger.put(Issued(old, "ada", "revoked", "op", iat=1, void_until=5))
    held = ledger.put(Issued(new, "ada", "pending", "op", read=("general",), iat=2))
    assert ledger.active("ada") == held
    assert ledger.unfinished() == [held]
    assert ledger.revocations() == {old: 5}
    ledger.put(held, state="revoked", void_until=9)
    assert ledger.active("ada") is None
    newest = ledger.newest("ada")
    assert newest is not None
    assert newest.id == new


def test_a_damaged_row_is_named_not_skipped(tmp_path: Path) -> None:
    key = KeyPair.generate().id
    (tmp_path / f"{key}.json").write_text(json.dumps({"id": key}))
    with pytest.raises(ConfigError, match=key):
        Ledger(tmp_path).rows()
