"""Lines of standard input: half a character does not make a request disappear."""

import json

from hypothesis import example, given
from hypothesis import strategies as st

from tidings.mcp.server import whole

ANY = st.text(st.characters(codec=None, categories=["Cs", "Lu", "Po"]), max_size=20)


@given(ANY)
@example("\ud83d")
@example("\ude00\ud83d")
@example("\ud83d\ud83d\ude00")
@example("\\ud83d and \\\ud83d")
def test_a_line_without_halves_can_be_read_and_keeps_everything_else(text: str) -> None:
    read = json.loads(whole(json.dumps({"text": text})))["text"]
    read.encode()
    # what json reads joins two halves that stand together, so does this
    assert read == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@given(st.text(max_size=50))
def test_a_line_that_is_whole_stays_as_it_is(text: str) -> None:
    for line in (json.dumps(text), json.dumps(text, ensure_ascii=False)):
        assert whole(line) == line
