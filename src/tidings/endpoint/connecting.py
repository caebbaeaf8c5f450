"""`tidings.connect`: from a space and a name to an endpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tidings.endpoint.endpoint import Endpoint
from tidings.endpoint.identity import Identity, bundle_identity, local_identity
from tidings.endpoint.redelivery import Retry
from tidings.space.home import SpaceHome
from tidings.space.settings import Settings

log = logging.getLogger(__name__)


def connect(
    space: str | None = None,
    *,
    name: str | None = None,
    channels: Sequence[str] = (),
    home: str | Path | None = None,
    bundle: str | Path | None = None,
    state: str | Path | None = None,
    url: str | None = None,
    inbox: int = 512,
    ping_interval: float = 5.0,
    receive: bool = True,
    backfill: int = 0,
    retry: Retry | None = None,
    presence: bool = True,
    beat: float | None = None,
) -> Endpoint:
    """An endpoint for agent `name` of `space`; use it with `async with`.

    Without arguments: the space and the agent of your settings (`tidings config`). `bundle` is a file written by
    `tidings agent export`, for an agent on another machine. `state` is a file in which the endpoint remembers what was
    settled, so that "once" holds across restarts. `url` is another way to the same broker, such as a tunnel.
    `receive=False` leaves direct messages in the mailbox: for programs that only send. `backfill`: so many messages of
    the past of each channel that is joined for the first time, marked `historical`; by default none.
    `retry`: how often a message that a handler failed on is handed out again before it is a dead letter.
    `presence=False` is a silent observer: others do not see that it is here. `beat`: seconds between two signs of life,
    if more often than the space asks for (`presence` in `tidings config` of its host is after how many it is offline).
    """

    async def find() -> Identity:
        if bundle is not None:
            identity = bundle_identity(Path(bundle))
        else:
            settings = Settings({"space": space, "as": name, "home": str(home) if home else None})
            for note in (*settings.notes, *filter(None, [settings.chosen_by_folder])):
                log.warning(note)
            identity = await local_identity(SpaceHome(settings.home, settings["space"]), settings["as"])
        return replace(identity, url=url) if url else identity

    return Endpoint(
        find,
        channels=channels,
        state=Path(state) if state else None,
        inbox=inbox,
        ping_interval=ping_interval,
        receive=receive,
        backfill=backfill,
        retry=retry,
        presence=presence,
        beat=beat,
    )
