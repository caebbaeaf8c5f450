"""Notices: losses and gaps in one shape, told once however often they are found."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tidings.endpoint import notices
from tidings.endpoint.gaps import FrameGap, Gap
from tidings.endpoint.incoming import Events
from tidings.endpoint.notices import Notice
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
