"""The state file of an endpoint: what is saved is read again, and what is none is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidings.client.read_state import ReadState
from tidings.client.state_file import KeptAs
from tidings.errors import ConfigError


def test_what_is_saved_is_what_the_next_process_knows(tmp_path: Path) -> None:
    path = tmp_path / "bob.state"
    before = ReadState(path)
    before.adopt("e1")
    before.note_kept(KeptAs(4, "ada", "m4"))
    before.note_frames({"series": 3})
    before.deliver(before.channel("general"), 9, ("ada", "m9"), "mark")
    before.save()
    after = ReadState(path)
    assert (after.epoch, after.kept_as) == ("e1", KeptAs(4, "ada", "m4"))
    assert (after.numbers, [each.seq for each in after.marks.own]) == ({"series": 3}, [9])
    assert 9 not in after.known, "it was not settled, so it must come again"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"channels": 3}', '{"channels": {"a": "b"}}', '{"channels": {}', "\x00"]
)
def test_a_file_that_is_no_state_file_is_refused_with_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bob.state"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"is not a state file of an endpoint .*: move it away"):
        ReadState(path)
