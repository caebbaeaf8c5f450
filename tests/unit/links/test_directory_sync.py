"""What a worker tells its own steward of the agents of a linked space."""

import msgspec

from tidings.contract.core import MAX_REQUEST
from tidings.links.directory_sync import row_pages
from tidings.wire.link_exchange import PEOPLE_PER_PAGE, Person
from tidings.wire.signing import KeyPair


def test_agents_with_many_roles_are_told_in_pages_that_a_steward_takes() -> None:
    roles = tuple(f"{number:03d}{'r' * 40}" for number in range(64))
    known = [Person(id=KeyPair.generate().id, name=f"n{n}", roles=roles, seq=n + 1) for n in range(100)]
    pages = list(row_pages(known))
    assert [row.id for page in pages for row in page] == [each.id for each in known]
    gone = [KeyPair.generate().id] * 500
    assert all(len(msgspec.json.encode({"people": page, "gone": gone})) < MAX_REQUEST - 1_000 for page in pages)


def test_agents_are_told_as_many_at_once_as_there_may_be_and_nobody_in_one_page() -> None:
    known = [Person(id=KeyPair.generate().id, name=f"n{n}", seq=n + 1) for n in range(PEOPLE_PER_PAGE + 1)]
    assert [len(page) for page in row_pages(known)] == [PEOPLE_PER_PAGE, 1]
    assert list(row_pages([])) == [[]]
