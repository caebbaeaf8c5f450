"""A program that lives through the host, while that host comes and goes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import tidings
from daemons import daemon_in
from tidings.endpoint import message_json
from tidings.errors import TidingsError
from tidings.host.endpoint import HostEndpoint
from tidings.testing.real_space import RealSpace
from tidings.testing.waiting import eventually

PATIENCE = 20.0


def at_the_host(space: RealSpace, name: str) -> HostEndpoint:
    return tidings.connect(space.home.name, name=name, home=space.home.home, via="host")


async def test_what_is_settled_while_the_host_is_away_is_read_when_it_is_back_and_the_loop_goes_on(
    pair: RealSpace,
) -> None:
    heard: list[str] = []
    bob = at_the_host(pair, "bob")
    async with daemon_in(pair.home.home):
        await bob.open()
        async with at_the_host(pair, "ada") as ada:
            await ada.dm("bob", "first", timeout=PATIENCE)
        messages = aiter(bob.messages(manual_ack=True))
        async with asyncio.timeout(PATIENCE):
            first = await anext(messages)
        heard.append(first.text)
    await first.ack()  # nobody hears it now
    async with daemon_in(pair.home.home):

        async def is_read() -> bool:
            return (await bob.unread())["direct"] == 0

        await eventually(is_read, within=PATIENCE, what="the host hears what was settled")
        async with at_the_host(pair, "ada") as ada:
            await ada.dm("bob", "second", timeout=PATIENCE)
        async with asyncio.timeout(PATIENCE):
            second = await anext(messages)
        await second.ack()
        heard.append(second.text)
        await eventually(is_read, within=PATIENCE, what="and the next")
        await bob.close()
    assert heard == ["first", "second"]


async def test_a_row_that_cannot_be_read_here_is_told_stays_unread_and_holds_nothing_up(
    pair: RealSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[BaseException] = []
    read = message_json.read_message

    def reading(row: dict[str, Any]) -> Any:
        if row["text"] == "strange":
            raise KeyError("ts")
        return read(row)

    monkeypatch.setattr("tidings.host.endpoint.read_message", reading)
    async with daemon_in(pair.home.home), at_the_host(pair, "bob") as bob, at_the_host(pair, "ada") as ada:
        bob.on("error", errors.append)
        for text in ("strange", "plain"):
            await ada.dm("bob", text, timeout=PATIENCE)
        message = await bob.next_message(PATIENCE)
        await message.ack()
        assert message.text == "plain"
        assert [isinstance(each, TidingsError) and "cannot be read here" in str(each) for each in errors] == [True]
        assert (await bob.unread())["direct"] == 1
