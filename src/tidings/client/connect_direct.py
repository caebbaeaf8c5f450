"""From a space and a name to an identity, and to an endpoint that goes to the space itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tidings.admin.home import SpaceHome
from tidings.admin.identity import Identity, bundle_identity, local_identity
from tidings.admin.settings import Settings
from tidings.client.endpoint import Endpoint
from tidings.client.redelivery import Retry

log = logging.getLogger(__name__)


def connect_directly(
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
    """An endpoint for agent `name` of `space`; the arguments are those of `tidings.connect`."""
    return Endpoint(
        lambda: find_identity(space, name, home, bundle, url),
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


async def find_identity(
    space: str | None = None,
    name: str | None = None,
    home: str | Path | None = None,
    bundle: str | Path | None = None,
    url: str | None = None,
) -> Identity:
    """Who is meant: the agent of a bundle, or of a space in a home; what is not said, the settings say."""
    if bundle is not None:
        identity = bundle_identity(Path(bundle))
    else:
        settings = Settings({"space": space, "as": name, "home": str(home) if home else None})
        for note in (*settings.notes, *filter(None, [settings.chosen_by_folder])):
            log.warning(note)
        identity = await local_identity(SpaceHome(settings.home, settings["space"]), settings["as"])
    return replace(identity, url=url, follow=None) if url else identity
