"""Lies about who is in the other space, mail that nobody there wrote, and receipts of what was never sent there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace

from tidings.contract.links import LinkMailRequest
from tidings.errors import TidingsError
from tidings.wire import message as wire_message
from tidings.wire import signing
from tidings.wire.link_exchange import LinkedMail, Person, state
from tidings.wire.links import MailOrigin, mail_origin_field
from tidings.wire.message import new_id
from tidings.wire.signing import ACCOUNT, KeyPair
from tidings.wire.subjects import LINK_SERVICE
from tidings_testing.links.peer import LINK, Lie
from tidings_testing.links.stage import LinkStage
from tidings_testing.raw_requests import raw_call
from tidings_testing.security.actor import acting
from tidings_testing.security.report import Collection, ProbeOutcome, broken, held, refused
from tidings_testing.waiting import eventually

PROBES = Collection()
#: seconds in which something that must not come would have come
WITHIN = 1.5


@asynccontextmanager
async def _open(stage: LinkStage) -> AsyncIterator[None]:
    """Both spaces let direct messages and rosters pass while this lasts."""
    peer = stage.peer
    peer.people, peer.mail = [], []
    peer.people.append(peer.person("mallory"))
    peer.epoch_of_people, peer.epoch_of_mail = new_id(), new_id()
    await stage.agree(roster="on", direct="on", steward=peer.steward.id)
    try:
        await _until_known(stage, "mallory@acme")
        yield
    finally:
        stage.peer.lies.clear()
        await stage.agree()


def _always(answer: Any) -> Lie:
    return lambda _asked: answer


async def _names(stage: LinkStage) -> dict[str, str]:
    return {each.name: each.id for each in await stage.reader.who()}


async def _until_known(stage: LinkStage, name: str) -> None:
    async def known() -> bool:
        stage.carried.ask()
        return name in await _names(stage)

    await eventually(known, within=10, every=0.05, what=f"{name} is known")


async def _mail_arrives(stage: LinkStage, mail: LinkedMail) -> None:
    def seen() -> bool:
        stage.carried.ask()
        return mail.id in {each.message.id for each in stage.seen}

    await eventually(seen, within=10, every=0.05, what="an honest direct message arrives")


async def _let_in(stage: LinkStage) -> set[bytes]:
    """What lies in the mail of the reader, whether or not it opens."""
    s, found = stage.main.subjects, set[bytes]()
    async with stage.main.core() as js:
        head = (await js.info(s.direct_stream))["state"]["last_seq"]
        async for records in js.read(s.direct_stream, s.direct_inbox(stage.reader.id), 1, head):
            found |= {each.payload for each in records}
    return found


@PROBES.probe("L1", "State agents that the steward did not sign, agents of this space, or another key for a name.")
async def agents_that_are_none(stage: LinkStage) -> ProbeOutcome:
    peer, own = stage.peer, stage.reader.id
    async with _open(stage):
        stranger, said = KeyPair.generate(), peer.person("eve")
        lies: dict[str, Any] = {
            "another key signs": state(stranger, peer.id, LINK, said),
            "for another link": state(peer.steward, peer.id, "otherlink", said),
            "for another space": state(peer.steward, stage.main.info.id, LINK, said),
        }
        for statement in lies.values():
            peer.lies["roster"] = _always(peer.roster_of([statement], said.seq))
            await asyncio.sleep(WITHIN / 3)
            if "eve@acme" in await _names(stage):
                return broken("an agent is known whom no steward stated")
        peer.lies["roster"] = _always(peer.roster_of([], 0, key=stranger.id))
        await asyncio.sleep(WITHIN / 3)
        peer.lies.clear()
        peer.people.append(peer.person("mallory"))
        peer.people.append(Person(id=own, name="twin", seq=peer.next_person()))
        peer.people.append(peer.person("last"))
        await _until_known(stage, "last@acme")
        names = await _names(stage)
        if names.get("mallory@acme") != peer.people[0].id or "twin@acme" in names or own not in names.values():
            return broken(f"a name changed its key, or an agent of ours is shown as theirs: {names}")
    return refused(f"{len(lies) + 1} pages refused; a name keeps its key, and an agent of ours stays ours")


@PROBES.probe("L1", "Hand out mail that its sender did not sign, for somebody else, or in another space.")
async def mail_that_is_none(stage: LinkStage) -> ProbeOutcome:
    peer, reader = stage.peer, stage.reader.id
    async with _open(stage):
        before, before_it = len(stage.seen), await _let_in(stage)
        said = peer.write(reader, "forged")
        other = KeyPair.generate().id
        chat = signing.sign(peer.agent, peer.id, "chat", reader, said.payload)
        tries = [
            replace(said, sig="A" * 86),
            replace(said, payload=said.payload + b" "),
            replace(said, sig=chat),
            replace(said, sender=reader),
            replace(peer.write(other, "to another"), to=reader),
            peer.write(reader, "in main", space=stage.main.info.id),
            peer.write(reader, "elsewhere", space=KeyPair.generate(ACCOUNT).id),
            replace(said, payload=b"[]", sig=signing.sign(peer.agent, peer.id, "dm", reader, b"[]")),
        ]
        peer.post(*tries)
        peer.post(honest := peer.write(reader, "honest mail"))
        await _mail_arrives(stage, honest)
        strange = [each.text for each in stage.seen[before:] if each.kind == "direct" and each.text != "honest mail"]
        let_in = await _let_in(stage) - before_it - {honest.payload}
        if strange or let_in:
            return broken(f"shown: {strange}; let in: {let_in}")
    return refused(f"{len(tries)} were not let in, and what was honest behind them came")


@PROBES.probe("L2", "Hand out the same mail again: under other sequences, in another epoch, and in one page.")
async def mail_again(stage: LinkStage) -> ProbeOutcome:
    peer = stage.peer
    async with _open(stage):
        first = peer.write(stage.reader.id, "once")
        peer.post(first, first, first)
        await _mail_arrives(stage, first)
        peer.epoch_of_mail = new_id()
        peer.post(*[first] * 5)
        peer.post(last := peer.write(stage.reader.id, "the last"))
        await _mail_arrives(stage, last)
        count = sum(each.message.id == first.id for each in stage.seen)
    return held("it was read once") if count == 1 else broken(f"it was read {count} times")


@PROBES.probe("L3", "Hand out pages of mail and agents that go back, stand still, or are no pages.")
async def mail_out_of_order(stage: LinkStage) -> ProbeOutcome:
    peer = stage.peer
    async with _open(stage):
        first, second = (peer.write(stage.reader.id, text) for text in ("one", "two"))
        rows = [peer.mail_row(replace(each, seq=seq)) for each, seq in ((first, 9), (second, 8))]
        page = {"mail": [], "epoch": "x", "people": "", "after": 0, "through": 0, "more": False}
        page |= {"mark": "", "set_back": False, "broker": ""}
        lies: list[tuple[str, Any]] = [
            ("mail", page | {"mail": rows, "through": 9}),
            ("mail", page | {"epoch": peer.epoch_of_mail, "people": "all", "more": True}),
            ("mail", page | {"mail": rows[:1], "through": 1}),
            ("mail", {"mail": "x"}),
            ("mail", b"[]"),
            ("roster", peer.roster_of([], 0) | {"more": True}),
            ("roster", {"people": 7}),
        ]
        rounds = stage.carried.rounds
        assert rounds is not None

        def goes_on() -> bool:
            stage.carried.ask()
            return not rounds.words

        for do, lie in lies:
            peer.lies = {do: _always(lie)}
            stage.carried.ask()
            await eventually(lambda: rounds.words, within=10, what=f"{str(lie)[:80]} is refused")
            peer.lies = {}
            await eventually(goes_on, within=10, what="it goes on")
        if any(each.text in ("one", "two") for each in stage.seen):
            return broken("mail came out of a page that is none")
    return refused(f"{len(lies)} answers refused, and it went on after each")


@PROBES.probe("L7", "As the worker of a linked space, ask for mail that is not for its agents, and tell of it.")
async def mail_of_others(stage: LinkStage) -> ProbeOutcome:
    await _added(stage)
    async with _open(stage):
        sent = await stage.reader.dm("neighbour", "between us")
        theirs = await stage.reader.dm("mallory@acme", "for you")
        tries = [
            {"sender": stage.reader.id, "id": sent.id, "to": sent.to, "stage": "read", "seq": sent.seq},
            {"sender": stage.reader.id, "id": sent.id, "to": theirs.to, "stage": "read", "seq": sent.seq},
            {"sender": stage.reader.id, "id": new_id(), "to": theirs.to, "stage": "read", "seq": theirs.seq},
            {"sender": theirs.to, "id": theirs.id, "to": theirs.to, "stage": "read", "seq": theirs.seq},
        ]
        async with acting(stage.main.info.url, stage.main.subjects, stage.creds) as peer:
            said = await peer.control.call(LinkMailRequest())
            told = await raw_call(peer.control, LINK_SERVICE, "told", receipts=tries)
            for stage_name in ("confirmed", "stored", "unknown", "x"):
                try:
                    await raw_call(peer.control, LINK_SERVICE, "told", receipts=[tries[0] | {"stage": stage_name}])
                except TidingsError:
                    continue
                return broken(f"a receipt {stage_name} was taken")
        found = await stage.reader.receipt(sent, "read", timeout=0)
    shown = {each.to for each in said.mail}
    if shown != {theirs.to} or told["refused"] != [0, 1, 2, 3] or found.stage != "confirmed":
        return broken(f"shown mail to {shown}; refused {told['refused']} of 4; the receipt says {found.stage}")
    return refused(f"{len(said.mail)} for its own agents, nothing else; {len(tries) + 4} receipts refused")


async def _added(stage: LinkStage) -> None:
    if not stage.main.home.agent_creds("neighbour").exists():
        await stage.main.add("neighbour")


@PROBES.probe("L7", "With this space's own worker stolen, write to an agent in the name of another.")
async def stolen_worker_writes(stage: LinkStage) -> ProbeOutcome:
    """It may publish, so these are in the mailbox; they open for nobody."""
    await _added(stage)
    s, reader, peer = stage.main.subjects, stage.reader.id, stage.peer
    async with stage.main.agent("neighbour") as other:
        neighbour = other.id
    async with _open(stage):
        before, said = len(stage.seen), peer.write(reader, "stolen")
        of_ours = wire_message.compose(wire_message.Sender(neighbour, "neighbour"), text="stolen").raw
        true = MailOrigin(peer.id, LINK, 1 << 40)
        tries: list[tuple[str, bytes, dict[str, str]]] = [
            (neighbour, of_ours, {"Td-Sig": signing.sign(peer.agent, stage.main.info.id, "dm", reader, of_ours)}),
            (said.sender, said.payload, {"Td-Sig": said.sig}),
            (said.sender, said.payload, {"Td-Sig": said.sig, **dict([mail_origin_field(true)])}),
            (said.sender, said.payload, {"Td-Sig": said.sig, "Td-Origin": peer.id}),
            (said.sender, said.payload, {"Td-Sig": said.sig, "Td-Origin": f"{peer.id} otherlink 1"}),
            (neighbour, of_ours, {"Td-Sig": said.sig, "Td-Origin": f"{peer.id} {LINK} 1"}),
        ]
        async with acting(stage.main.info.url, s, stage.main.home.link_creds) as worker:
            for sender, payload, headers in tries:
                await worker.request(s.direct(reader, sender), payload, headers=list(headers.items()))
        peer.post(honest := peer.write(reader, "after the theft"))
        await _mail_arrives(stage, honest)
        strange = [each.text for each in stage.seen[before:] if each.kind == "direct" and each.text == "stolen"]
    return broken("a stolen worker speaks for others") if strange else held(f"{len(tries)} are in the mail, none opens")
