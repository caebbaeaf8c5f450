"""Who said something in another space is shown as `name@space`, and is nobody of this one."""

from typing import Any

import pytest

from linking import OtherSpace
from tidings.client.directory import NameDirectory
from tidings.client.incoming import Incoming
from tidings.client.message_json import message_json, read_message
from tidings.errors import InvalidName
from tidings.wire.message import Mention
from tidings.wire.names import check_agent_name, foreign_name, shown_space
from tidings.wire.roster import AgentEntry
from tidings.wire.signing import KeyPair

WEST = OtherSpace("west")


def incoming(space: str = "west", name: str = "ada", **fields: Any) -> Incoming:
    message = WEST.message("hello", name=name, **fields)
    return Incoming(
        kind="channel",
        sender=message.sender,
        message=message,
        channel="general",
        seq=7,
        time_ns=1_700_000_000_000_000_000,
        origin=space,
        origin_id=WEST.id,
    )


def test_no_agent_of_this_space_can_be_called_like_one_of_another() -> None:
    for name in ("ada@west", foreign_name("ada", WEST.ada.id, "", WEST.id), "@", "ada@"):
        with pytest.raises(InvalidName):
            check_agent_name(name)


def test_what_does_not_fit_the_grammar_is_the_beginning_of_an_id() -> None:
    key = WEST.ada.id
    assert foreign_name("ada", key, "west", WEST.id) == "ada@west"
    assert foreign_name("ada", key, "", WEST.id) == f"ada@{WEST.id[:10]}…"
    for name in ("", "bob@east", "a b", "x" * 65, "ada\n", "…"):
        assert foreign_name(name, key, "west", WEST.id) == f"{key[:10]}…@west"
        assert shown_space(name, WEST.id) == f"{WEST.id[:10]}…"


def test_a_local_agent_of_the_same_key_is_not_looked_up_and_nobody_is_asked() -> None:
    local, cat = AgentEntry(id=WEST.ada.id, name="zoe", roles=("boss",)), KeyPair.generate().id
    directory = NameDirectory(None, {local.id: local}, {})  # type: ignore[arg-type]
    directory.connection = _Nobody()  # type: ignore[assignment]
    shown = directory.introduce(incoming(mentions=[Mention(cat, "cat"), Mention(local.id, "ada")]))
    assert (shown.sender.name, shown.sender.id, shown.sender.role) == ("ada@west", local.id, None)
    assert [each.name for each in shown.mentions] == [f"{cat[:10]}…", "zoe"]
    assert (shown.origin, shown.claims, shown._naming) == ("west", None, None)


class _Nobody:
    class identity:  # noqa: N801
        id, name = "nobody", "nobody"


def test_json_says_where_it_was_said_and_reads_back_the_same() -> None:
    directory = NameDirectory(_Nobody(), {}, {})  # type: ignore[arg-type]
    shown = directory.introduce(incoming())
    written = message_json(shown)
    assert (written["origin"], written["origin_id"]) == ("west", WEST.id)
    assert written["from"] == {"id": WEST.ada.id, "name": "ada@west"}
    back = read_message(written)
    assert (back.origin, back.origin_id, back.sender.name) == ("west", WEST.id, "ada@west")
    assert back.message.sender.name == "ada"
    assert message_json(back) == written
