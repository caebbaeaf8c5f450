"""Tasks that nobody there asked, results that nobody there signed, and tasks that are for somebody else."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from msgspec.structs import replace

from tidings.client.connect import connect_directly
from tidings.client.direct_transport import DirectAgent
from tidings.contract.links import LinkTasksRequest
from tidings.errors import TidingsError
from tidings.wire import message as wire_message
from tidings.wire import signing
from tidings.wire.links import MailOrigin, mail_origin_field
from tidings.wire.message import Sender, new_id
from tidings.wire.signing import ACCOUNT, KeyPair
from tidings.wire.subjects import LINK_SERVICE
from tidings_testing.links.peer import LINK
from tidings_testing.links.stage import LinkStage
from tidings_testing.raw_requests import raw_call
from tidings_testing.security.actor import acting
from tidings_testing.security.report import Collection, ProbeOutcome, broken, held, refused
from tidings_testing.waiting import eventually

PROBES = Collection()
ROLE, REVIEWER = "reviewer", "reviewing"
#: seconds in which a task that must not come would have come
WITHIN = 1.5


@asynccontextmanager
async def _open(stage: LinkStage) -> AsyncIterator[DirectAgent]:
    """Both spaces let tasks and rosters pass while this lasts; the agent that holds a role here."""
    peer = stage.peer
    if not stage.main.home.agent_creds(REVIEWER).exists():
        await stage.main.add(REVIEWER, roles=[ROLE])
    peer.clear_tasks()
    peer.people = []
    peer.people.append(peer.person("mallory", "tester"))
    peer.epoch_of_people = new_id()
    await stage.agree(roster="on", tasks="on", steward=peer.steward.id)
    try:
        await eventually(lambda: _known(stage), within=10, every=0.05, what="mallory@acme is known")
        async with connect_directly("main", name=REVIEWER, home=stage.main.home.home) as reviewer:
            yield reviewer
    finally:
        peer.lies.clear()
        await stage.agree()


async def _known(stage: LinkStage) -> bool:
    stage.carried.ask()
    return any(each.name == "mallory@acme" and each.tasks for each in await stage.reader.who())


async def _done(stage: LinkStage, reviewer: DirectAgent) -> str:
    """The next task that the reviewer gets; it is done."""
    until = asyncio.get_running_loop().time() + 10
    while asyncio.get_running_loop().time() < until:
        stage.carried.ask()
        job = await reviewer.claim(ROLE, 0.5)
        if job is not None:
            await job.done("done")
            return job.text
    raise TimeoutError("no task came")


async def _queued(stage: LinkStage) -> int:
    async with stage.main.core() as js:
        return int((await js.info(stage.main.subjects.task_stream))["state"]["last_seq"])


@PROBES.probe("L1", "Hand out tasks that their asker did not sign, for another space or role, or open for all to read.")
async def tasks_that_are_none(stage: LinkStage) -> ProbeOutcome:
    peer, here = stage.peer, stage.main.info.id
    async with _open(stage) as reviewer:
        before = await _queued(stage)
        said = peer.task(ROLE, here, [reviewer.id], "forged")
        tries = [
            replace(said, sig="A" * 86),
            replace(said, payload=said.payload + b" "),
            replace(said, sender=stage.reader.id),
            replace(peer.task("tester", here, [reviewer.id], "another role"), role=ROLE),
            peer.task(ROLE, KeyPair.generate(ACCOUNT).id, [reviewer.id], "for another space"),
            peer.task(ROLE, here, [reviewer.id], "asked in main", origin=here),
            peer.task(ROLE, here, [reviewer.id], "asked elsewhere", origin=KeyPair.generate(ACCOUNT).id),
            peer.task(ROLE, here, [reviewer.id], "not sealed", sealed=False),
        ]
        tries.append(peer.task(ROLE, here, [KeyPair.generate().id], "for nobody here"))
        peer.queue(*tries, peer.task(ROLE, here, [reviewer.id], "honest"))
        text = await _done(stage, reviewer)
        count = await _queued(stage) - before
    if text != "honest" or count != 1:
        return broken(f"{count} were queued, and {text!r} was the first")
    return refused(f"{len(tries)} were not queued, and what was honest behind them came")


@PROBES.probe("L2", "Hand out the same task again: while it waits, under other sequences, and after it was done.")
async def task_again(stage: LinkStage) -> ProbeOutcome:
    peer, here = stage.peer, stage.main.info.id
    async with _open(stage) as reviewer:
        before = await _queued(stage)
        first = peer.task(ROLE, here, [reviewer.id], "once")
        peer.queue(first, first, first)
        await _done(stage, reviewer)
        task_id = wire_message.decode(first.payload).id

        def told() -> bool:
            stage.carried.ask()
            return any((each["id"], each["state"]) == (task_id, "done") for each in peer.told_tasks)

        await eventually(told, within=10, every=0.05, what="its end is told")
        peer.queue(*[first] * 4)
        peer.queue(peer.task(ROLE, here, [reviewer.id], "the last"))
        text = await _done(stage, reviewer)
        count = await _queued(stage) - before
    return held("it was queued once") if (text, count) == ("the last", 2) else broken(f"{count} queued, then {text!r}")


@PROBES.probe("L3", "Answer with tasks that are none, and with more than were asked for.")
async def tasks_that_cannot_be_read(stage: LinkStage) -> ProbeOutcome:
    peer = stage.peer
    async with _open(stage) as reviewer:
        before = await _queued(stage)
        rounds = stage.carried.rounds
        assert rounds is not None
        row = {"seq": 1, "sender": peer.agent.id, "role": "a.b", "sig": "x", "payload": "", "age": 0}
        lies: list[Any] = [{"tasks": "x", "more": False}, {"tasks": [row] * 99, "more": False}, b"[]", {}]

        def goes_on() -> bool:
            stage.carried.ask()
            return not rounds.words

        for lie in lies:
            peer.lies = {"tasks": lambda _asked, lie=lie: lie}  # type: ignore[misc]
            stage.carried.ask()
            await eventually(lambda: rounds.words, within=10, what=f"{str(lie)[:80]} is refused")
            peer.lies = {}
            await eventually(goes_on, within=10, what="it goes on")
        honest = peer.task(ROLE, stage.main.info.id, [reviewer.id], "behind what is none")
        rows: list[Any] = [{}, row, 7, {**row, "role": ROLE, "age": -1}, {**row, "role": ROLE, "seq": "1"}]
        peer.queue(honest)
        shown = msgspec.to_builtins(peer.tasks[-1])
        peer.lies = {"tasks": lambda _asked: {"tasks": [*rows, shown], "more": False}}
        text = await _done(stage, reviewer)
        peer.lies = {}
        count = await _queued(stage) - before
    if (text, count) != ("behind what is none", 1):
        return broken(f"{count} tasks were queued, and {text!r} was the first")
    return refused(f"{len(lies)} answers and {len(rows)} rows refused, and it went on")


@PROBES.probe("L7", "As the worker of a linked space, ask for tasks of others, and say that they are done.")
async def tasks_of_others(stage: LinkStage) -> ProbeOutcome:
    peer = stage.peer
    async with _open(stage):
        ours = await stage.reader.ask("archivist", "among ourselves")
        theirs = await stage.reader.ask("tester@acme", "for you")
        stranger = KeyPair.generate()
        asker = {"sender": stage.reader.id, "attempt": 1}
        tries = [
            asker | {"id": ours.id, "seq": ours.seq, **_result(peer.agent, peer.id, stage.reader.id, ours.id)},
            asker | {"id": new_id(), "seq": theirs.seq, "state": "dead", "why": "x"},
            asker | {"id": theirs.id, "seq": ours.seq, "state": "dead", "why": "x"},
            asker | {"id": theirs.id, "seq": theirs.seq, **_result(peer.agent, peer.id, stage.reader.id, new_id())},
            asker
            | {
                "id": theirs.id,
                "seq": theirs.seq,
                **_result(peer.agent, stage.main.info.id, stage.reader.id, theirs.id),
            },
            {"sender": peer.agent.id, "id": theirs.id, "seq": theirs.seq, "state": "dead", "why": "x"},
        ]
        others = asker | {"id": theirs.id, "seq": theirs.seq, **_result(stranger, peer.id, stage.reader.id, theirs.id)}
        async with acting(stage.main.info.url, stage.main.subjects, stage.creds) as worker:
            said = await worker.control.call(LinkTasksRequest(room=16))
            not_taken = (await raw_call(worker.control, LINK_SERVICE, "progress", tasks=tries))["refused"]
            unread = (await raw_call(worker.control, LINK_SERVICE, "progress", tasks=[others]))["refused"]
            for state in ("held", "gone", "dropped", "x"):
                try:
                    await raw_call(worker.control, LINK_SERVICE, "progress", tasks=[tries[1] | {"state": state}])
                except TidingsError:
                    continue
                return broken(f"a task was taken to be {state}")
        states = [(await each.status()).state for each in (ours, theirs)]
    shown = [each["seq"] for each in said.tasks]
    if shown != [theirs.seq] or not_taken != list(range(len(tries))) or states != ["queued", "queued"]:
        return broken(f"shown {shown}; refused {not_taken} of {len(tries)}; the tasks are {states}")
    if unread != [0]:
        return broken("somebody has done a task who could not open it")
    return refused(f"{len(shown)} for its own role, nothing else; {len(tries) + 5} words on tasks refused")


def _result(key: KeyPair, space: str, asker: str, task: str) -> dict[str, Any]:
    payload = wire_message.compose(Sender(key.id, "mallory"), text="done").raw
    signature = signing.sign(key, space, "result", f"{asker}.{task}", payload)
    return {"state": "done", "worker": key.id, "result": base64.b64encode(payload).decode(), "sig": signature}


@PROBES.probe("L7", "With this space's own worker stolen, queue tasks in the name of others.")
async def stolen_worker_asks(stage: LinkStage) -> ProbeOutcome:
    """It may publish, so these are in the queue; nobody is given them."""
    s, peer, here = stage.main.subjects, stage.peer, stage.main.info.id
    async with _open(stage) as reviewer:
        said = peer.task(ROLE, here, [reviewer.id], "stolen")
        open_one = peer.task(ROLE, here, [reviewer.id], "stolen", sealed=False)
        of_ours = wire_message.compose(Sender(stage.reader.id, "reader"), text="stolen").raw
        true = dict([mail_origin_field(MailOrigin(peer.id, LINK, 1 << 40))])
        nobodys = [s.task(ROLE, stage.reader.id).replace(stage.reader.id, each) for each in ("x", "UX", ROLE)]
        tries: list[tuple[str, bytes, dict[str, str]]] = [
            (stage.reader.id, of_ours, {"Td-Sig": signing.sign(peer.agent, here, "task", ROLE, of_ours)}),
            (said.sender, said.payload, {"Td-Sig": said.sig}),
            (said.sender, said.payload, {"Td-Sig": said.sig, **true}),
            (said.sender, said.payload, {"Td-Sig": said.sig, "Td-Origin": f"{peer.id} otherlink 1"}),
            (stage.reader.id, of_ours, {"Td-Sig": said.sig, "Td-Origin": f"{peer.id} {LINK} 1"}),
            (said.sender, open_one.payload, {"Td-Sig": open_one.sig, **true}),
        ]
        async with acting(stage.main.info.url, s, stage.main.home.link_creds) as worker:
            for sender, payload, headers in tries:
                await worker.request(s.task(ROLE, sender), payload, headers=list(headers.items()))
            for subject in nobodys:
                await worker.request(subject, said.payload, headers=[("Td-Sig", said.sig)])
        peer.queue(peer.task(ROLE, here, [reviewer.id], "after the theft"))
        text = await _done(stage, reviewer)
    if text != "after the theft":
        return broken("a stolen worker gives tasks in the name of others")
    return held(f"{len(tries) + len(nobodys)} are in the queue, nobody is given one")
