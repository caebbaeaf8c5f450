"""One round about the mail of a linked space, against stewards that answer what a test wants; the ledger is real."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from tidings.contract.core import Request
from tidings.contract.link_worker import LinkedMailCounts
from tidings.errors import ConflictError, OutcomeUnknown, TidingsError
from tidings.links import directory, mail_store, mail_sync
from tidings.links.link_store import BookedLink
from tidings.links.mail_sync import MailRound
from tidings.links.schema import SCHEMA
from tidings.util.database import Database
from tidings.wire import message as wire_message
from tidings.wire import signing
from tidings.wire.link_exchange import MAIL_PER_PAGE, LinkedMail
from tidings.wire.rulings import Link
from tidings.wire.signing import ACCOUNT, KeyPair
from tools.typed_answers import fields_of, typed_answer

A = TypeVar("A")

HERE, THERE = KeyPair.generate(ACCOUNT).id, KeyPair.generate(ACCOUNT).id
ADA, EVE = KeyPair.generate(), KeyPair.generate()
BOB = KeyPair.generate().id


def letter(text: str, sender: KeyPair = ADA, to: str = BOB) -> LinkedMail:
    payload = wire_message.compose(wire_message.Sender(sender.id, "ada"), text=text).raw
    sig = signing.sign(sender, THERE, "dm", to, payload)
    return LinkedMail(seq=1, sender=sender.id, to=to, sig=sig, payload=payload)


def mark_of(mail: LinkedMail) -> str:
    return hashlib.sha256(mail.payload).hexdigest()[:20]


class Peer:
    """The steward of the other space."""

    def __init__(self) -> None:
        self.mail: list[LinkedMail] = []
        self.head, self.broker = 0, "b"
        self.told: list[tuple[str, str]] = []
        self.failing: dict[str, TidingsError] = {}
        self.asked = 0

    def post(self, *letters: LinkedMail) -> None:
        for each in letters:
            self.head += 1
            self.mail.append(msgspec.structs.replace(each, seq=self.head))

    def set_back(self, head: int) -> None:
        """What follows is not there any more, and its sequences are free."""
        self.mail, self.head = [each for each in self.mail if each.seq <= head], head

    async def ask(self, request: Request[A]) -> A:
        return typed_answer(request, self._answer(request.operation.verb, fields_of(request)))

    def _answer(self, do: str, said: dict[str, Any]) -> dict[str, Any]:
        if do in self.failing:
            raise self.failing[do]
        if do == "told":
            self.told += [(each["id"], str(each["stage"])) for each in said["receipts"]]
            return {"new": len(said["receipts"]), "refused": []}
        self.asked += 1
        head = self.head
        after = said["after"] if said["epoch"] == "e" and said["after"] <= head else 0
        marks = {each.seq: mark_of(each) for each in self.mail}
        set_back = False
        if said.get("marks"):
            assert said["epoch"] == "e"
            after = next((seq for seq, mark, *_ in said["marks"] if marks.get(seq) == mark), 0)
            set_back = any(marks.get(seq, mark) != mark or seq > head for seq, mark, *_ in said["marks"])
        page = [each for each in self.mail if each.seq > after][:MAIL_PER_PAGE]
        through = page[-1].seq if len(page) == MAIL_PER_PAGE else head
        rows = [msgspec.to_builtins(each) for each in page]
        answer = {"mail": rows, "epoch": "e", "people": "p", "through": through, "more": through < head}
        rows[:] = [{**row, "mark": marks[row["seq"]]} for row in rows]
        more = {"mark": marks.get(through, ""), "set_back": set_back, "broker": self.broker}
        return {**answer, "after": after, **more}


class Local:
    """Our own steward and broker."""

    def __init__(self) -> None:
        self.epoch, self.broker = "a", "b"
        self.lying: list[tuple[str, str]] = []
        self.receipts: list[dict[str, Any]] = []
        #: ids that have no room
        self.full: set[str] = set()
        #: ids that never may come in
        self.never: set[str] = set()
        #: ids whose acknowledgement does not come; they are stored all the same
        self.unsure: set[str] = set()

    def delivered(self, mail: LinkedMail) -> None:
        said = {"sender": mail.sender, "id": mail.id, "to": mail.to, "stage": "delivered", "why": ""}
        self.receipts.append({**said, "n": len(self.receipts) + 1, "mark": mail.id})

    async def ask(self, request: Request[A]) -> A:
        return typed_answer(request, self._answer(request.operation.verb, fields_of(request)))

    def _answer(self, do: str, said: dict[str, Any]) -> dict[str, Any]:
        if do == "receipts":
            marks = ["", *(each["mark"] for each in self.receipts)]
            is_there = said["after"] < len(marks) and marks[said["after"]] == said["mark"]
            after = said["after"] if said["epoch"] == self.epoch and is_there else 0
            told = {"receipts": self.receipts[after:], "epoch": self.epoch, "broker": self.broker, "more": False}
            return {**told, "after": after, "through": len(self.receipts), "mark": marks[-1]}
        if do == "mail":
            return {"agreed": 1, "verdicts": [self._verdict(each) for each in said["mail"]]}
        return {}

    def _verdict(self, each: Mapping[str, str]) -> str:
        if (each["sender"], each["id"]) in self.lying:
            return "have"
        if each["id"] in self.never:
            return "no: its reader was revoked"
        return "wait: there is no room" if each["id"] in self.full else "take"

    async def put_mail(self, to: str, sender: str, payload: bytes, headers: Mapping[str, str]) -> None:
        assert to == BOB
        assert signing.SIGNATURE_HEADER in headers
        found = wire_message.decode(payload).id
        if (sender, found) not in self.lying:
            self.lying.append((sender, found))
        if found in self.unsure:
            raise OutcomeUnknown("no acknowledgement came")


class Scene:
    def __init__(self, database: Database) -> None:
        self.database, self.peer, self.local = database, Peer(), Local()
        self.start()

    def start(self) -> None:
        record = Link(op="-", link="abcdefghijkl", state="on", origin=THERE, channels={}, shares=(), roster="on")
        self.round = MailRound(HERE, record, BookedLink(self.database, 0), self.peer, self.local)

    async def fails(self) -> str:
        with pytest.raises(TidingsError) as failure:
            await self.round.run()
        return str(failure.value)

    def state(self) -> mail_store.MailState:
        return self.database.read_blocking(lambda c: mail_store.state(c, self.round.place))


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(mail_sync, "LOOK_AGAIN", 0.0)
    database = Database(tmp_path / "links.db", SCHEMA)
    database.write_blocking(lambda c: c.execute("INSERT INTO space (space, secret) VALUES (?, ?)", (HERE, b"x" * 32)))
    yield Scene(database)
    database.close()


async def test_receipts_that_the_other_space_cannot_take_now_are_told_later(scene: Scene) -> None:
    scene.peer.post(mail := letter("one"))
    await scene.round.run()
    scene.local.delivered(mail)
    scene.peer.failing = {"mail": ConflictError("not known yet"), "told": ConflictError("nobody is known")}
    assert await scene.fails() == "not known yet"
    scene.peer.failing = {}
    await scene.round.run()
    assert scene.peer.told == [(mail.id, "delivered")]


async def test_what_came_in_before_a_failure_is_written_down_and_its_receipts_are_told(scene: Scene) -> None:
    first, second = letter("one"), letter("two")
    scene.peer.post(first, second)
    scene.local.unsure = {second.id}
    scene.local.delivered(first)  # its reader is fast
    await scene.fails()
    assert scene.state().through == 1
    assert scene.peer.told == [(first.id, "delivered")]
    scene.local.delivered(second)  # it was stored, and nobody here knows that yet
    scene.peer.failing = {"mail": ConflictError("not now")}
    await scene.fails()
    scene.peer.failing = {}
    await scene.round.run()
    assert (second.id, "delivered") in scene.peer.told
    assert scene.state().told_through == 2


@pytest.mark.parametrize("lost", ["a worker", "the ledger of a worker", "the mail here"])
async def test_receipts_of_what_is_not_written_down_wait_until_the_mail_was_looked_at(scene: Scene, lost: str) -> None:
    scene.peer.post(mail := letter("one"))
    if lost == "a worker":  # killed between the broker and its ledger
        scene.local.lying = [(mail.sender, mail.id)]
    else:
        await scene.round.run()
    scene.local.delivered(mail)
    if lost == "the mail here":
        scene.local.epoch = "another"
    elif lost == "the ledger of a worker":
        scene.database.write_blocking(lambda c: directory.forget(c, scene.round.place))
    scene.start()
    scene.peer.failing = {"mail": ConflictError("not now")}
    await scene.fails()
    scene.peer.failing, scene.peer.told = {}, []
    await scene.round.run()
    assert scene.peer.told == [(mail.id, "delivered")]


async def test_receipts_of_mail_of_other_links_hold_nothing_up_once_the_mail_was_looked_at(scene: Scene) -> None:
    scene.local.delivered(letter("of another link", EVE))
    await scene.round.run()
    assert (scene.peer.told, scene.state().told_through) == ([], 1)


async def test_a_message_that_waits_keeps_nothing_back_but_what_its_sender_wrote_after_it(scene: Scene) -> None:
    held, after = [letter(f"{n}", EVE) for n in range(MAIL_PER_PAGE)], letter("after them", EVE)
    first, last = letter("one"), letter("two")
    scene.peer.post(first, *held, last, after)
    scene.local.full = {each.id for each in held}
    await scene.round.run()
    assert (await scene.round.facts()).waits == "there is no room"
    assert scene.local.lying == [(ADA.id, first.id), (ADA.id, last.id)]
    assert scene.state().through == 1
    scene.local.delivered(last)
    await scene.round.run()
    assert scene.peer.told == [(last.id, "delivered")]
    scene.local.full = set()
    await scene.round.run()
    assert scene.local.lying[2:] == [(EVE.id, each.id) for each in (*held, after)]
    assert scene.state().through == len(scene.peer.mail)
    assert (await scene.round.facts()).waits == ""


async def test_however_much_waits_what_others_wrote_behind_it_is_come_to(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail_sync, "MOST_PAGES", 1)
    held = [letter(f"{n}", EVE) for n in range(2 * MAIL_PER_PAGE)]
    scene.peer.post(*held, last := letter("one"))
    scene.local.full = {each.id for each in held}
    for _ in range(3):
        await scene.round.run()
    assert (scene.local.lying, scene.state().through) == ([(ADA.id, last.id)], 0)


async def test_mail_that_was_set_back_in_the_same_epoch_is_looked_at_from_the_beginning(scene: Scene) -> None:
    kept, refused = letter("kept"), letter("refused")
    scene.peer.post(kept, refused, letter("lost"), letter("lost too"))
    scene.local.never = {refused.id}
    await scene.round.run()
    scene.local.delivered(kept)
    await scene.round.run()
    scene.peer.set_back(2)
    scene.peer.told = []
    scene.peer.post(new := letter("new"))
    await scene.round.run()
    assert scene.local.lying[-1] == (ADA.id, new.id)
    assert scene.state().through == 3
    assert sorted(scene.peer.told) == sorted([(kept.id, "delivered"), (refused.id, "undeliverable")])


async def test_mail_that_does_not_open_is_counted_for_good_and_stops_nothing(scene: Scene) -> None:
    no_message = msgspec.structs.replace(letter("x"), payload=b"[]", sig=signing.sign(ADA, THERE, "dm", BOB, b"[]"))
    unsigned, held, last = msgspec.structs.replace(letter("x"), sig="A" * 86), letter("held", EVE), letter("last")
    scene.peer.post(unsigned, no_message, held, unsigned, last)
    scene.local.full = {held.id}
    for _ in range(2):
        await scene.round.run()
        expected = LinkedMailCounts(came=1, refused=1, forged=1, waits="there is no room")
        assert await scene.round.facts() == expected
    scene.local.full = set()
    await scene.round.run()
    scene.start()
    await scene.round.run()
    assert await scene.round.facts() == LinkedMailCounts(came=2, refused=1, forged=2, waits="")
    scene.database.write_blocking(lambda c: mail_store.tell_again(c, scene.round.place))
    await scene.round.run()
    assert scene.peer.told == []


async def test_what_is_new_comes_while_something_waits_and_what_waits_is_not_fetched_each_time(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail_sync, "LOOK_AGAIN", 3_600.0)
    held = [letter(f"{n}", EVE) for n in range(3 * MAIL_PER_PAGE)]
    scene.peer.post(*held)
    scene.local.full = {each.id for each in held}
    await scene.round.run()
    scene.local.full, before = set(), scene.peer.asked
    scene.peer.post(new := letter("new"), letter("not before the others", EVE))
    await scene.round.run()
    assert (scene.local.lying, scene.peer.asked - before) == ([(ADA.id, new.id)], 1)
    scene.start()
    await scene.round.run()
    assert len(scene.local.lying) == len(scene.peer.mail)


async def test_mail_at_sequences_that_were_used_before_comes_however_late_it_is_looked_at(scene: Scene) -> None:
    scene.peer.post(kept := letter("kept"), *(letter(f"lost {n}") for n in range(3)))
    await scene.round.run()
    scene.peer.set_back(1)
    scene.peer.post(*(new := [letter(f"new {n}") for n in range(5)]))
    scene.start()
    before = len(scene.local.lying)
    await scene.round.run()
    assert scene.local.lying[before:] == [(ADA.id, each.id) for each in new]
    assert scene.local.lying.count((ADA.id, kept.id)) == 1
    assert scene.state().through == 6


async def test_mail_comes_although_every_record_that_was_remembered_is_gone(scene: Scene) -> None:
    scene.peer.post(*(letter(f"{n}") for n in range(3)))
    await scene.round.run()
    scene.peer.set_back(0)
    scene.peer.post(*(letter(f"read by now {n}") for n in range(2)), new := letter("new"), letter("newer"))
    scene.peer.mail = scene.peer.mail[2:3]  # at the sequence of a record that was handled, and marked as another
    scene.start()
    await scene.round.run()
    assert scene.local.lying[3:] == [(ADA.id, new.id)]


async def test_who_is_handed_out_again_what_it_told_the_end_of_tells_it_again(scene: Scene) -> None:
    scene.peer.post(mail := letter("one"), refused := letter("never"))
    scene.local.never = {refused.id}
    await scene.round.run()
    scene.local.delivered(mail)
    await scene.round.run()
    posted, scene.peer.mail, scene.peer.told = scene.peer.mail, [], []
    await scene.round.run()
    assert scene.peer.told == []
    scene.peer.mail, scene.peer.broker = posted, "another"  # it lost the receipts, and that the messages were removed
    await scene.round.run()
    assert sorted(scene.peer.told) == sorted([(mail.id, "delivered"), (refused.id, "undeliverable")])
    assert scene.local.lying == [(ADA.id, mail.id)]


async def test_what_our_own_broker_lost_is_fetched_again_and_the_rest_is_not(scene: Scene) -> None:
    scene.peer.post(first := letter("kept"), second := letter("lost"), third := letter("kept too"))
    await scene.round.run()
    scene.local.lying.remove((ADA.id, second.id))
    await scene.round.run()
    assert len(scene.local.lying) == 2, "nothing says that it is gone"
    scene.local.broker = "another"
    await scene.round.run()  # finds it
    await scene.round.run()
    assert scene.local.lying == [(ADA.id, each.id) for each in (first, third, second)]


async def test_receipts_at_sequences_that_were_used_before_are_told(scene: Scene) -> None:
    scene.peer.post(*(mail := [letter(f"{n}") for n in range(3)]))
    await scene.round.run()
    scene.local.delivered(mail[0])
    await scene.round.run()
    scene.local.receipts = []  # set back
    for each in mail[1:]:
        scene.local.delivered(each)
    await scene.round.run()
    assert scene.peer.told == [(each.id, "delivered") for each in mail]
