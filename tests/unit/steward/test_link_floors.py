"""How far linked spaces have read: what retention is told of each, also while others are linked."""

from types import SimpleNamespace
from typing import Any

from tidings.model.rulebook import Rulebook
from tidings.steward.link_floors import LinkFloors
from tidings.wire.rulings import Link
from tidings.wire.signing import ACCOUNT, KeyPair


def link(name: str) -> Link:
    return Link(
        op="-", link=name, state="on", origin=KeyPair.generate(ACCOUNT).id, channels={}, shares=("general",), hops=1
    )


class SlowState:
    """A state bucket that knows nothing; while it is asked, another space is linked."""

    def __init__(self, book: Rulebook) -> None:
        self.book = book

    async def get(self, _key: str) -> None:
        seq = len(self.book.links) + 1
        self.book.put_link(seq, link(f"link{seq}"))


async def test_a_space_that_is_linked_while_floors_are_read_has_its_floor_the_next_time() -> None:
    book = Rulebook("LOG_main")
    book.put_link(1, link("link1"))
    space: Any = SimpleNamespace(table=SimpleNamespace(rules=book), position=100, state=SlowState(book))
    floors = LinkFloors(space)
    assert await floors.floors() == {"link.link1": 1}
    assert await floors.floors() == {"link.link1": 1, "link.link2": 2}
