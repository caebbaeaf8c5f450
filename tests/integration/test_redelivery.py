"""Messages a program fails on: handed out again, then dead letters that can be seen, retried and dropped."""

import asyncio
from collections import Counter
from typing import Any

import pytest

import tidings
from tidings.client import redelivery
from tidings.client.connect import connect_directly
from tidings.contract.mail import (
    DeadLettersRequest,
    DropLetterRequest,
    KeepLetterRequest,
    LetterRow,
    RetryLetterRequest,
)
from tidings.errors import DeadLetter, LogFull, UsageError
from tidings.nats.errors import ApiError
from tidings.steward import backstop, dead_letters
from tidings.steward.dead_letters import Letter
from tidings.util.backoff import Backoff
from tidings_testing.real_space import TEST_INTERVALS, RealSpace
from tidings_testing.waiting import eventually
from tools.frames import stub_pipeline

QUICK = tidings.Retry(attempts=3, first=0.02)


def connect(space: RealSpace, name: str, **options: Any) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)


class Worker:
    """A program whose handler fails on poison until it is mended."""

    def __init__(self, endpoint: tidings.DirectAgent) -> None:
        self.endpoint = endpoint
        self.tried: Counter[str] = Counter()
        self.done: list[str] = []
        self.buried: list[str] = []
        self.mended = False
        endpoint.on("error", self._hear)
        self.task = asyncio.create_task(endpoint.handle(self._work))

    def _hear(self, error: BaseException) -> None:
        if isinstance(error, DeadLetter):
            self.buried.append(str(error))

    async def _work(self, message: tidings.Incoming) -> None:
        self.tried[message.text] += 1
        if "poison" in message.text and not self.mended:
            raise ValueError("I choke on this")
        self.done.append(message.text)


async def letters(endpoint: tidings.DirectAgent) -> tuple[LetterRow, ...]:
    return (await endpoint.call(DeadLettersRequest())).mail


@pytest.mark.requirement("D10")
async def test_what_a_handler_keeps_failing_on_is_a_dead_letter_with_its_error_and_stops_no_mailbox(
    pair: RealSpace,
) -> None:
    """More poison than the broker hands out unsettled (64): everything behind it still comes."""
    async with connect(pair, "ada") as ada, connect(pair, "bob", channels=["general"], retry=QUICK) as bob:
        worker = Worker(bob)
        posted = await ada.send("general", "poison for all")
        first = await ada.dm(bob.id, "poison 0")
        for number in range(1, 66):
            await ada.dm(bob.id, f"poison {number}")
        await ada.dm(bob.id, "bread")
        await eventually(lambda: "bread" in worker.done, within=20, what="what lies behind the poison comes")
        await eventually(lambda: len(worker.buried) == 67, within=20, what="every poison is a dead letter")
        assert set(worker.tried.values()) == {1, 3}
        assert "ValueError: I choke on this" in worker.buried[0]
        await eventually(lambda: not bob.transport._direct.pending, what="nothing of it is left in hand")
        kept = {each.letter: each for each in await letters(bob)}
        assert len(kept) == 67
        letter = kept[f"channel-{posted.seq}"]
        assert (letter.channel, letter.error) == ("general", "ValueError: I choke on this")
        assert (letter.sender_name, letter.attempts, letter.state) == ("ada", 3, "dead")
        assert kept[f"direct-{first.seq}"].channel is None
        assert await letters(ada) == (), "nobody sees another's"
        with pytest.raises(UsageError, match="no direct message"):
            await ada.call(KeepLetterRequest("direct", seq=first.seq, error="mine", attempts=1))
        assert (await ada.receipt(first, "delivered", timeout=10)).stage == "delivered", "and it was not read"
        assert pair.steward is not None
        assert (await pair.steward.health.facts()).mail["dead"] == 67


@pytest.mark.requirement("D10")
async def test_a_message_whose_dead_letter_cannot_be_kept_stays_unsettled_until_it_is(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full stream, a closed gate, a bug of the steward's: none of them costs the message."""
    monkeypatch.setattr(redelivery, "RETRY", Backoff(0.02, 60.0))
    steward = pair.steward
    assert steward is not None
    keep = steward.letters.keep
    full = ApiError("publish", {"err_code": 10077, "description": "maximum bytes exceeded"})
    failures: list[Exception] = [LogFull("no room"), full, ZeroDivisionError()]
    unsettled: list[int] = []

    async def failing(letter: Letter, payload: bytes = b"") -> Letter:
        unsettled.append(len(bob.transport._direct.pending))
        if failures:
            raise failures.pop(0)
        return await keep(letter, payload)

    monkeypatch.setattr(steward.letters, "keep", failing)
    async with connect(pair, "ada") as ada, connect(pair, "bob", retry=QUICK) as bob:
        worker, errors = Worker(bob), list[BaseException]()
        bob.on("error", errors.append)
        written = await ada.dm(bob.id, "poison")
        await eventually(lambda: len(worker.buried) == 1, what="it is kept at last")
        assert unsettled == [1, 1, 1, 1]
        assert [each.letter for each in await letters(bob)] == [f"direct-{written.seq}"]
        assert "could not be kept" not in worker.buried[0]
        told = [type(each) for each in errors if isinstance(each, tidings.TidingsError)]
        assert told == [LogFull, DeadLetter], "and its program hears why, not at every try"


async def test_a_dead_letter_is_retried_by_the_program_that_receives_and_dropped_when_it_is_settled(
    pair: RealSpace,
) -> None:
    async with connect(pair, "ada") as ada:
        async with connect(pair, "bob", channels=["general"], retry=QUICK) as bob:
            worker = Worker(bob)
            posted = await ada.send("general", "poison in public")
            written = await ada.dm(bob.id, "poison in private")
            await eventually(lambda: len(worker.buried) == 2, what="both are dead letters")
            direct, channel = f"direct-{written.seq}", f"channel-{posted.seq}"
            await bob.call(RetryLetterRequest(letter=direct))
            await eventually(lambda: worker.tried["poison in private"] == 6, what="it is tried as often again")
            await eventually(lambda: len(worker.buried) == 3, what="and kept again")
            assert {each.state for each in await letters(bob)} == {"dead"}
            worker.mended = True
            await bob.call(RetryLetterRequest(letter=channel))
            await eventually(lambda: worker.done == ["poison in public"], what="the mended program has it")
        await pair.stop_steward()
        await pair.start_steward(TEST_INTERVALS)
        async with connect(pair, "bob", receive=False) as bob:
            await eventually(lambda: bob.transport.roster.loaded)
            assert [each.letter for each in await letters(bob)] == [direct], "kept by the next steward"
            await bob.call(RetryLetterRequest(letter=direct))
        async with connect(pair, "bob", channels=["general"]) as bob:
            again = await bob.next_message(10)
            assert (again.text, again.kind, again.redelivered, again.sealed) == (
                "poison in private",
                "direct",
                True,
                True,
            )
            await again.ack()
            assert await letters(bob) == ()
            assert (await ada.receipt(written, "read", timeout=10)).stage == "read"
            assert (await bob.call(DropLetterRequest(letter=direct))).state == "dropped"
            with pytest.raises(UsageError, match="no dead letter"):
                await bob.call(RetryLetterRequest(letter=direct))


async def test_whoever_has_too_many_dead_letters_loses_its_oldest_and_hears_how_many(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A letter of a direct message is the only copy left: its record went when it was settled."""
    monkeypatch.setattr(dead_letters, "MOST_EACH", 2)
    heard: list[tidings.Notice] = []
    async with connect(pair, "ada") as ada, connect(pair, "bob", retry=QUICK) as bob:
        bob.on("notice", heard.append)
        worker = Worker(bob)
        for number in range(1, 5):
            await ada.dm(bob.id, f"poison {number}")
            await eventually(lambda number=number: len(worker.buried) == number, what="it is a dead letter")  # type: ignore[misc]
        await eventually(lambda: len(heard) == 2, what="its owner hears of both that went")
        assert [(each.kind, each.count) for each in heard] == [("damage", 1), ("damage", 1)]
        assert "1 of your dead letters was removed because you had more than one agent may keep" in heard[0].text
        assert len(await letters(bob)) == 2
    await pair.stop_steward()
    await pair.start_steward(TEST_INTERVALS)
    later: list[tidings.Notice] = []
    endpoint = connect(pair, "bob", receive=False)
    endpoint.on("notice", later.append)
    async with endpoint:
        await eventually(lambda: endpoint.transport.roster.loaded)
    assert {each.id for each in later} == {each.id for each in heard}, "written down, under any steward"


async def test_poison_in_frames_holds_up_neither_its_frame_nor_the_next_ones(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backstop, "LOOK_EVERY", 0.03)
    async with connect(pair, "bob") as bob:
        await bob.join("general")
        owner = bob.id
    async with stub_pipeline(pair) as pipeline, connect(pair, "ada") as ada:
        await pipeline.level()
        steward = pair.steward
        assert steward is not None
        await eventually(lambda: steward.roster.backstop.running, what="the steward sees it run")
        for number in range(6):  # the broker hands out four frames unsettled
            said = [await ada.send("general", f"{what} {number}") for what in ("poison", "bread")]
            await pipeline.deliver(owner, [each.seq for each in said])
        head = await pipeline.level()
        seen = steward.roster.backstop
        await eventually(lambda: seen.fact(head).behind == 0, what="the steward sees that all is delivered")
        bob = connect(pair, "bob", channels=["general"], retry=QUICK)
        kinds: set[tuple[str, bool]] = set()
        bob.on("message", lambda message: kinds.add((message.text.split()[0], message.durable)))
        async with bob:
            facts = bob.transport._channels.memberships["general"].facts
            worker = Worker(bob)
            await eventually(lambda: len(worker.buried) == 6, within=20, what="each poison is a dead letter")
            await eventually(lambda: pipeline.acknowledged(owner), what="every frame is acknowledged")
            assert sorted(worker.done) == [f"bread {number}" for number in range(6)]
            assert kinds == {("poison", True), ("bread", True)}, str(facts)
            await ada.send("general", "live bread")
            await eventually(lambda: "live bread" in worker.done)
            assert ("live", False) in kinds, "a live copy is not a durable one"


async def test_who_settles_by_hand_gives_a_message_back_for_as_long_as_it_says(pair: RealSpace) -> None:
    async with connect(pair, "ada") as ada, connect(pair, "bob", channels=["general"]) as bob:
        await ada.dm(bob.id, "not now")
        first = await bob.next_message(10)
        assert (first.attempt, first.redelivered, first.durable) == (1, False, True)
        await first.nak(delay=0.05)
        await first.ack()
        second = await bob.next_message(10)
        assert (second.text, second.attempt, second.redelivered) == ("not now", 2, True)
        await second.nak(delay=3600, error="later")
        await ada.dm(bob.id, "another")
        assert (await bob.next_message(10)).text == "another", "nobody waits behind it"
    async with connect(pair, "bob") as bob:
        again = {(await bob.next_message(10)).text for _ in range(2)}
        assert again == {"not now", "another"}, "what was not settled comes again, however long it was to wait"
