"""Who is in linked spaces, in the ledger: a key is of one of them; on a real database."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidings.errors import PageRefused
from tidings.links import directory
from tidings.links.directory import PeerPlace, ReadThrough
from tidings.links.schema import SCHEMA
from tidings.util.database import Database
from tidings.wire.keys import ACCOUNT, KeyPair
from tidings.wire.people import Person

ACME = PeerPlace(KeyPair.generate(ACCOUNT).id, KeyPair.generate(ACCOUNT).id)
MALLORY = ACME._replace(peer=KeyPair.generate(ACCOUNT).id)
ADA, BOB = KeyPair.generate().id, KeyPair.generate().id


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path / "links.db", SCHEMA)
    database.write_blocking(
        lambda c: c.execute("INSERT INTO space (space, secret) VALUES (?, ?)", (ACME.space, b"x" * 32))
    )
    yield database
    database.close()


def person(agent: str, name: str, seq: int, **more: Any) -> Person:
    return Person(id=agent, name=name, seq=seq, **more)


def told(book: Database, place: PeerPlace, *stated: Person, epoch: str = "e1") -> None:
    read = ReadThrough(epoch, max(each.seq for each in stated), "K")
    book.write_blocking(lambda c: directory.take(c, place, stated, read))


def known(book: Database, place: PeerPlace) -> list[tuple[str, str]]:
    found = book.read_blocking(lambda c: directory.sorted_people(c, place))
    return [(each.name, each.id) for each in found.known]


def gone(book: Database, place: PeerPlace) -> list[str]:
    return book.read_blocking(lambda c: directory.gone(c, place))


def taken(book: Database, place: PeerPlace) -> list[str]:
    return book.read_blocking(lambda c: directory.taken(c, place))


def test_a_key_is_of_the_space_that_stated_it_first_alive_or_revoked(book: Database) -> None:
    told(book, ACME, person(BOB, "bob", 3))
    told(book, MALLORY, person(BOB, "x", 1), person(ADA, "ada", 2))
    assert known(book, ACME) == [("bob", BOB)]
    assert known(book, MALLORY) == [("ada", ADA)]
    assert (taken(book, ACME), taken(book, MALLORY)) == ([], [BOB])
    told(book, MALLORY, person(BOB, "x", 7, revoked=True))
    assert gone(book, MALLORY) == []
    told(book, ACME, person(BOB, "bob", 8, revoked=True))
    assert (gone(book, ACME), gone(book, MALLORY)) == ([BOB], [])
    assert "x" not in book.read_blocking(lambda c: directory.sorted_people(c, MALLORY)).pins


def test_a_key_is_of_the_next_space_that_states_it_when_the_first_one_is_forgotten(book: Database) -> None:
    told(book, MALLORY, person(BOB, "x", 1))
    told(book, ACME, person(BOB, "bob", 3))
    assert (known(book, ACME), taken(book, ACME)) == ([], [BOB])
    book.write_blocking(lambda c: directory.forget(c, MALLORY))
    book.write_blocking(lambda c: directory.sort(c, ACME))
    assert (known(book, ACME), taken(book, ACME)) == ([("bob", BOB)], [])


def test_who_was_known_stays_so_until_everybody_was_told_anew(book: Database) -> None:
    told(book, ACME, person(BOB, "bob", 30), person(ADA, "ada", 40))
    book.write_blocking(lambda c: directory.begin_again(c, ACME, "e2", "K"))
    assert sorted(known(book, ACME)) == sorted([("bob", BOB), ("ada", ADA)])
    told(book, ACME, person(BOB, "bob", 3, roles=("new",)), epoch="e2")
    assert book.read_blocking(lambda c: directory.is_stale(c, ACME))
    book.write_blocking(lambda c: directory.drop_stale(c, ACME))
    assert not book.read_blocking(lambda c: directory.is_stale(c, ACME))
    [bob] = book.read_blocking(lambda c: directory.sorted_people(c, ACME)).known
    assert (bob.id, bob.seq, bob.roles) == (BOB, 3, ("new",))


def pins(book: Database, place: PeerPlace) -> dict[str, str]:
    return book.read_blocking(lambda c: directory.sorted_people(c, place)).pins


def test_a_key_that_is_called_otherwise_takes_its_pin_along(book: Database) -> None:
    for seq in range(1, 6):
        told(book, ACME, person(BOB, f"bob{seq}", seq))
    assert pins(book, ACME) == {"bob5": BOB}
    told(book, ACME, person(ADA, "bob1", 7))
    assert sorted(known(book, ACME)) == [("bob1", ADA), ("bob5", BOB)]


def test_pins_of_those_of_whom_a_space_says_nothing_any_more_go_when_there_are_too_many(
    book: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "MOST_PINS", 3)
    for life in range(6):
        told(book, ACME, person(BOB, "bob", 1), person(KeyPair.generate().id, f"n{life}", 2), epoch=f"e{life}")
        book.write_blocking(lambda c: directory.drop_stale(c, ACME))
        book.write_blocking(lambda c: directory.begin_again(c, ACME, "next", "K"))
    assert len(pins(book, ACME)) <= 4
    assert pins(book, ACME)["bob"] == BOB


def test_a_space_may_have_had_any_number_of_agents_and_only_the_living_count(
    book: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "MOST_PEOPLE", 2)
    monkeypatch.setattr(directory, "MOST_REVOKED", 3)
    for seq in range(1, 11):
        told(book, ACME, person(KeyPair.generate().id, f"n{seq}", seq, revoked=True))
    told(book, ACME, person(BOB, "bob", 20), person(ADA, "ada", 21))
    assert len(known(book, ACME)) == 2
    assert len(gone(book, ACME)) == 3
    with pytest.raises(PageRefused, match="more than 2 agents"):
        told(book, ACME, person(KeyPair.generate().id, "another", 30))
