"""The ledger of people and mail of linked spaces, on a real database."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tidings.errors import ConflictError, PageRefused, UnknownPeer
from tidings.links import directory, mail_store
from tidings.links.directory import PeerPlace, ReadThrough
from tidings.links.mail_store import HandledMail, MailLooked, MailState
from tidings.links.schema import SCHEMA
from tidings.util.database import Database
from tidings.wire.ids import new_id
from tidings.wire.keys import ACCOUNT, KeyPair
from tidings.wire.marks import Stamp
from tidings.wire.people import Person

PLACE = PeerPlace(KeyPair.generate(ACCOUNT).id, KeyPair.generate(ACCOUNT).id)
OTHER = PLACE._replace(peer=KeyPair.generate(ACCOUNT).id)
ADA, BOB = KeyPair.generate().id, KeyPair.generate().id


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path / "links.db", SCHEMA)
    database.write_blocking(
        lambda c: c.execute("INSERT INTO space (space, secret) VALUES (?, ?)", (PLACE[0], b"x" * 32))
    )
    yield database
    database.close()


def mail(seq: int, outcome: str = "admitted", mid: str = "") -> HandledMail:
    return HandledMail(ADA, mid or new_id(), BOB, seq, outcome, "why" if outcome == "refused" else "")  # type: ignore[arg-type]


def test_a_page_moves_the_token_and_a_message_that_comes_again_keeps_what_became_of_it(book: Database) -> None:
    first, looked = mail(3), MailLooked("e1", "p", 5)
    book.write_blocking(lambda c: mail_store.commit(c, PLACE, [first, mail(4, "refused")], looked, 1_000))
    assert book.read_blocking(lambda c: mail_store.state(c, PLACE)) == MailState("e1", "p", 5, "", 0)
    again = first._replace(seq=1, outcome="had")
    book.write_blocking(lambda c: mail_store.commit(c, PLACE, [again], MailLooked("e2", "p", 1), 2_000))
    assert book.read_blocking(lambda c: mail_store.seqs_of(c, PLACE, [first.key])) == {first.key: 1}
    assert book.read_blocking(lambda c: mail_store.counts(c, PLACE)) == {"admitted": 1, "refused": 1}
    assert book.read_blocking(lambda c: mail_store.seqs_of(c, OTHER, [first.key])) == {}


def test_what_was_refused_is_told_once_and_again_when_the_other_space_may_have_forgotten_it(book: Database) -> None:
    refused = mail(1, "refused")
    book.write_blocking(lambda c: mail_store.commit(c, PLACE, [refused], MailLooked("e1", "p", 1), 1_000))
    assert book.read_blocking(lambda c: mail_store.refused(c, PLACE, 10)) == [refused]
    book.write_blocking(lambda c: mail_store.note_told(c, PLACE, [refused.key]))
    book.write_blocking(lambda c: mail_store.move_told(c, PLACE, "a1", Stamp(7, "m")))
    assert book.read_blocking(lambda c: mail_store.refused(c, PLACE, 10)) == []
    book.write_blocking(lambda c: mail_store.tell_again(c, PLACE))
    assert book.read_blocking(lambda c: mail_store.refused(c, PLACE, 10)) == [refused]
    assert book.read_blocking(lambda c: mail_store.state(c, PLACE)) == MailState("e1", "p", 1, "a1", 0)


def test_of_many_messages_the_newest_are_remembered_and_the_newest_that_nothing_was_told_of(book: Database) -> None:
    old, new = [[mail(n)._replace(mark=f"m{n}") for n in range(*at)] for at in ((1, 20), (20, 60))]
    told = Stamp(1, "t")

    def claims(through: int = 99) -> list[int]:
        return [each.seq for each in book.read_blocking(lambda c: mail_store.claims(c, PLACE, through))]

    book.write_blocking(lambda c: mail_store.commit(c, PLACE, [*old, *new], MailLooked("e", "p", 60), 1_000))
    book.write_blocking(lambda c: mail_store.move_told(c, PLACE, "a", told, [each.key for each in new]))
    assert claims() == [*range(59, 51, -1), *range(19, 11, -1)]
    assert claims(10) == [*range(10, 2, -1)]
    shown = {each.key for each in old[:5]}
    found = book.read_blocking(lambda c: mail_store.gone(c, PLACE, 2, 12, shown))
    assert sorted(found) == sorted(each.key for each in old[5:12])
    book.write_blocking(lambda c: mail_store.set_back(c, PLACE, 15))
    assert claims() == [*range(15, 7, -1)]
    assert book.read_blocking(lambda c: mail_store.state(c, PLACE)).told_through == 0


def test_rows_of_mail_are_bounded_by_age_and_number(book: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail_store, "MOST_ROWS", 2)
    for number in range(1, 6):
        page = [mail(number)]
        looked = MailLooked("e", "p", number)
        book.write_blocking(lambda c, page=page, at=looked: mail_store.commit(c, PLACE, page, at, at.through))  # type: ignore[misc]
    assert book.read_blocking(lambda c: mail_store.counts(c, PLACE))["admitted"] <= 3
    late = [mail(9)]
    at = mail_store.KEPT_FOR + 100
    book.write_blocking(lambda c: mail_store.commit(c, PLACE, late, MailLooked("e", "p", 9), at))
    assert book.read_blocking(lambda c: mail_store.counts(c, PLACE)) == {"admitted": 1}


def test_a_pin_outlives_that_everybody_is_told_anew_and_is_changed_by_the_operator(book: Database) -> None:
    def take(*told: Person) -> None:
        read = ReadThrough("e", told[-1].seq, "k")
        book.write_blocking(lambda c: directory.take(c, PLACE, told, read))

    take(Person(id=ADA, name="ada", seq=1))
    book.write_blocking(lambda c: directory.begin_again(c, PLACE, "e2", "k"))
    take(Person(id=BOB, name="ada", seq=1))
    book.write_blocking(lambda c: directory.drop_stale(c, PLACE))
    found = book.read_blocking(lambda c: directory.sorted_people(c, PLACE))
    assert ([each.id for each in found.refused], found.known) == ([BOB], ())
    with pytest.raises(UnknownPeer):
        book.write_blocking(lambda c: directory.trust(c, PLACE, "bob", BOB))
    assert book.read_blocking(lambda c: directory.trustable(c, PLACE, "ada")) == (ADA, BOB)
    assert book.write_blocking(lambda c: directory.trust(c, PLACE, "ada", BOB)) == (ADA, BOB)
    assert [each.id for each in book.read_blocking(lambda c: directory.sorted_people(c, PLACE)).known] == [BOB]


def test_a_key_that_was_swapped_after_the_operator_saw_another_is_not_trusted(book: Database) -> None:
    for seq, key in enumerate((ADA, BOB), 1):
        told, read = [Person(id=key, name="ada", seq=seq)], ReadThrough("e", seq, "k")
        book.write_blocking(lambda c, told=told, read=read: directory.take(c, PLACE, told, read))  # type: ignore[misc]
    _, shown = book.read_blocking(lambda c: directory.trustable(c, PLACE, "ada"))
    swapped = KeyPair.generate().id
    later = [Person(id=swapped, name="ada", seq=3)]
    book.write_blocking(lambda c: directory.take(c, PLACE, later, ReadThrough("e", 3, "k")))
    with pytest.raises(ConflictError, match=f"yet another key there now, {swapped}"):
        book.write_blocking(lambda c: directory.trust(c, PLACE, "ada", shown))
    assert book.read_blocking(lambda c: directory.sorted_people(c, PLACE)).pins == {"ada": ADA}


def test_a_space_that_tells_of_too_many_agents_is_refused_and_nothing_of_that_page_is_kept(
    book: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "MOST_PEOPLE", 2)
    many = [Person(id=KeyPair.generate().id, name=f"n{n}", seq=n) for n in range(1, 4)]
    with pytest.raises(PageRefused, match="more than 2 agents"):
        book.write_blocking(lambda c: directory.take(c, PLACE, many, ReadThrough("e", 3, "k")))
    assert book.read_blocking(lambda c: directory.read_through(c, PLACE)) == ReadThrough()


def test_another_life_of_the_mail_here_is_noted_and_all_but_refusals_is_looked_at_again(book: Database) -> None:
    admitted, refused = mail(1), mail(2, "refused")
    looked = MailLooked("e1", "p", 2)
    book.write_blocking(lambda c: mail_store.commit(c, PLACE, [admitted, refused], looked, 1_000))
    book.write_blocking(lambda c: mail_store.begin_again(c, PLACE, "a2"))
    assert book.read_blocking(lambda c: mail_store.state(c, PLACE)) == MailState("", "", 0, "a2", 0)
    kept = book.read_blocking(lambda c: mail_store.seqs_of(c, PLACE, [admitted.key, refused.key]))
    assert kept == {refused.key: 2}
