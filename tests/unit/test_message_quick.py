"""Text is composed by a quicker way that must not differ from the strict one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.errors import MalformedMessage
from tidings.wire.message import Sender, compose, decode

ADA = Sender("U" + "A" * 55, "ada")


@given(st.text(min_size=1, max_size=300))
def test_what_the_quick_way_writes_the_strict_reader_reads_the_same(text: str) -> None:
    composed = compose(ADA, text=text)
    assert decode(composed.raw) == composed
    assert composed.text == text


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(MalformedMessage):
        compose(ADA, text="\ud800")
