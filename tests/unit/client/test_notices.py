"""Notices: losses and gaps in one shape, told once however often they are found."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tidings.client import notices
from tidings.client.incoming import Events
from tidings.client.notices import FrameGap, Gap, Notice
from tidings.errors import DeliveryLost

LOST = DeliveryLost("7 messages of general between 10 and 20 will not be delivered", "general", 10, 20, 7, "cancelled")


def test_a_loss_becomes_a_notice_with_its_range_count_and_cause() -> None:
    told = notices.of_loss(LOST)
    assert told == Notice("lost", str(LOST), "general", 10, 20, 7, "cancelled")
    assert told.is_loss


def test_a_gap_that_was_filled_is_no_loss_and_one_the_log_could_not_fill_is() -> None:
    filled = notices.of_gap(Gap("general", None, 9, 20, 3, "connection"))
    assert (filled.kind, filled.first, filled.last, filled.count, filled.is_loss) == ("gap", 10, 20, 3, False)
    gone = notices.of_gap(Gap("general", "ada", 9, 20, 3, "live", gone=True))
    assert (gone.kind, gone.count, gone.is_loss) == ("lost", None, True)
    frames = notices.of_gap(FrameGap("first", 2, 2, 9, 20, 2, 2))
    assert (frames.kind, frames.channel, frames.cause) == ("gap", None, "frames")


def test_the_same_thing_found_twice_is_one_notice_whatever_words_tell_it() -> None:
    told = notices.of_loss(LOST)
    assert replace(told, text="in other words").id == told.id
    assert replace(told, count=8).id != told.id
    assert replace(told, kind="void").id != told.id


async def test_whoever_needs_it_can_wait_until_every_callback_of_a_notice_has_returned() -> None:
    events, done = Events(), asyncio.Event()

    async def keep(_notice: Notice) -> None:
        await done.wait()

    events.on("notice", keep)
    await asyncio.wait_for(events.handled("notice"), 5)
    events.emit("notice", notices.of_loss(LOST))
    waiting = asyncio.create_task(events.handled("notice"))
    await asyncio.sleep(0)
    assert not waiting.done()
    done.set()
    await asyncio.wait_for(waiting, 5)


async def test_losses_told_before_anybody_listens_are_given_to_the_first_who_does_once_and_in_order() -> None:
    events = Events()
    first, second = notices.of_loss(LOST), Notice("damage", "the store lost a record")
    for event, value in (
        ("notice", first),
        ("notice", second),
        ("error", LOST),
        ("error", ValueError("of its moment")),
    ):
        events.emit(event, value)
    heard: list[object] = []
    events.on("notice", heard.append)
    assert heard == [first, second]
    events.on("notice", lambda _notice: heard.append("the second callback"))
    assert heard == [first, second]
    events.on("error", heard.append)
    assert heard[2:] == [LOST]


async def test_of_more_losses_than_are_kept_for_who_listens_first_the_number_is_told() -> None:
    events, heard = Events(), list[Notice]()
    for number in range(Events.MOST_KEPT + 3):
        events.emit("notice", Notice("damage", f"{number}"))
    events.on("notice", heard.append)
    assert (heard[0].kind, heard[0].count, heard[0].cause) == ("lost", 3, "nobody listened")
    assert [each.text for each in heard[1:]] == [f"{number}" for number in range(3, Events.MOST_KEPT + 3)]
