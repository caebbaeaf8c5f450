"""`tidings.connect`: one agent, over one of two transports.

    tidings.connect("main", name="ada")                 to the space itself
    tidings.connect("main", name="ada", via="host")     through the host of this machine, with its outbox and its inbox
    tidings.connect("main", name="ada", via="auto")     through the host if one runs, else to the space itself

Each answers with an `Agent`. Which way `auto` took when it was opened, `agent.via` says; it does not change over. Mail
that a host has kept stays in its inbox: an agent receives through its host always, or never.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack, overload

from tidings.admin.settings import Settings
from tidings.client.agent import Agent
from tidings.client.direct_transport import DirectAgent, DirectTransport
from tidings.client.redelivery import Retry
from tidings.errors import HostUnreachable, NoSession, OutcomeUnknown, UsageError

if TYPE_CHECKING:
    from tidings.client.host_http import HostClient
    from tidings.client.host_transport import HostAgent
    from tidings.client.transport import Transport
import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any, TypeVar

from tidings.admin.home import SpaceHome
from tidings.admin.identity import Identity, bundle_identity, local_identity
from tidings.client.incoming import Incoming
from tidings.client.transport import Receipt

log = logging.getLogger(__name__)
#: what only a connection of one's own can have
DIRECT_ONLY = ("state", "url", "ping_interval", "backfill", "presence", "beat")


class ConnectOptions(TypedDict, total=False):
    """What `connect` takes besides the space and the way."""

    name: str | None
    channels: Sequence[str]
    home: str | Path | None
    bundle: str | Path | None
    inbox: int
    receive: bool
    retry: Retry | None
    state: str | Path | None
    url: str | None
    ping_interval: float
    backfill: int
    presence: bool
    beat: float | None


@overload
def connect(
    space: str | None = None, *, via: Literal["direct"] = "direct", **options: Unpack[ConnectOptions]
) -> DirectAgent: ...
@overload
def connect(space: str | None = None, *, via: Literal["host"], **options: Unpack[ConnectOptions]) -> HostAgent: ...
@overload
def connect(space: str | None = None, *, via: Literal["auto"], **options: Unpack[ConnectOptions]) -> Connecting: ...
def connect(
    space: str | None = None, *, via: Literal["auto", "host", "direct"] = "direct", **options: Unpack[ConnectOptions]
) -> Agent[Transport] | Connecting:
    """Agent `name` of `space`; use it with `async with`.

    Without arguments: the space and the agent of your settings (`tidings config`). `bundle` is a file written by
    `tidings agent export`, for an agent on another machine. `channels` are joined. `receive=False` leaves mail where it
    is: for programs that only send. `inbox`: messages that wait in memory for this program. `retry`: how often a
    message that a handler failed on is handed out again before it is a dead letter; through the host, before it stays
    unread there.

    The rest is for a connection of one's own, and refused with `via="host"`: the host remembers by itself, is present
    while a program follows, and puts no past into an inbox. `state` is a file in which the agent remembers what was
    settled, so that "once" holds across restarts. `url` is another way to the same broker, such as a tunnel.
    `backfill`: so many messages of the past of each channel that is joined for the first time, marked `historical`; by
    default none. `presence=False` is a silent observer: others do not see that it is here. `beat`: seconds between two
    signs of life, if more often than the space asks for (`presence` in `tidings config` is after how many it is
    offline); `ping_interval`: seconds between two looks whether the connection lives.
    """
    if via == "direct":
        return connect_directly(space, **options)
    if via == "auto":
        return Connecting(
            home_of(options),
            lambda host: _at_the_host(space, options, host),
            lambda: connect_directly(space, **options),
        )
    if via != "host":
        raise UsageError(f"via is auto, host or direct, not {via!r}")
    if strange := [name for name in DIRECT_ONLY if name in options]:
        raise UsageError(f"{', '.join(strange)}: for a connection of one's own (via='direct'), not through the host")
    return _at_the_host(space, options)


class Connecting:
    """A connection whose way is found when it is opened. A host that is there and cannot be used is gone without."""

    def __init__(
        self,
        home: Path,
        through: Callable[[HostClient], HostAgent],
        directly: Callable[[], DirectAgent],
    ) -> None:
        self._home, self._through, self._directly = home, through, directly

    async def __aenter__(self) -> Agent[Transport]:
        from tidings.client.host_http import HostClient

        host = await HostClient.find(self._home)
        if host is not None:
            self._opened: Agent[Transport] = self._through(host)
            try:
                await self._opened.open()
            except (HostUnreachable, NoSession, OutcomeUnknown):
                pass
            else:
                return self._opened
        if (self._home / "host.db").exists():
            log.warning("no host answers in %s: going without it; mail that it kept is in its inbox", self._home)
        self._opened = self._directly()
        await self._opened.open()
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._opened.close()


def _at_the_host(space: str | None, options: ConnectOptions, found: HostClient | None = None) -> HostAgent:
    from tidings.client.host_session import ProvenSession
    from tidings.client.host_transport import HostTransport

    name, home, bundle = options.get("name"), options.get("home"), options.get("bundle")
    first = [found] if found is not None else []

    async def host() -> HostClient:
        return first.pop() if first else await required_host(home_of(options))

    source = ProvenSession(lambda: find_identity(space, name, home, bundle), receive=options.get("receive", True))
    transport = HostTransport(host, source, inbox=options.get("inbox", 512), retry=options.get("retry"))
    return Agent(transport, channels=options.get("channels", ()))


async def required_host(home: Path) -> HostClient:
    """The host of a home; HostUnreachable says whether none runs, or one does not answer."""
    from tidings.client.host_http import HostClient

    found = await HostClient.find(home)
    if found is not None:
        return found
    if (holder := host_process(home)) is not None:
        raise HostUnreachable(f"the host of {home} ({holder}) does not answer: `tidings host status`")
    raise HostUnreachable(f"no host runs in {home}: `tidings host up` starts one")


def host_process(home: Path) -> str | None:
    """The process that is the host of this home, whether or not it answers: `pid 1234`."""
    from tidings.util.private_files import lock_holder

    found = lock_holder(home / "run" / "host.lock")
    return None if found is None else found.split(" (")[0]


def home_of(options: ConnectOptions) -> Path:
    home = options.get("home")
    return Settings({"home": str(home) if home else None}).home


# --- to the space itself ---


def connect_directly(space: str | None = None, **options: Unpack[ConnectOptions]) -> DirectAgent:
    """Agent `name` of `space`; the arguments are those of `tidings.connect`."""
    own: dict[str, Any] = dict(options)
    name, home, bundle, url = (own.pop(each, None) for each in ("name", "home", "bundle", "url"))
    channels, backfill, state = own.pop("channels", ()), own.pop("backfill", 0), own.pop("state", None)
    transport = DirectTransport(
        lambda: find_identity(space, name, home, bundle, url), state=Path(state) if state else None, **own
    )
    return Agent(transport, channels=channels, backfill=backfill)


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


# --- for scripts ---
# One call, no event loop.
#
#     tidings.send("general", "the build is green")
#
# Each call connects, does one thing and closes. A program that talks more than now and then holds an agent instead.


T = TypeVar("T")


def send(channel: str, text: str, *, space: str | None = None, name: str | None = None, **options: Any) -> Receipt:
    """Post to a channel and wait until the log has it."""
    return _once(space, name, lambda agent: agent.send(channel, text, **options))


def history(channel: str, limit: int = 50, *, space: str | None = None, name: str | None = None) -> list[Incoming]:
    """The newest messages of a channel, newest first."""
    return _once(space, name, lambda agent: agent.history(channel, limit))


def _once(space: str | None, name: str | None, act: Callable[[Agent[Transport]], Awaitable[T]]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_act(space, name, act))
    raise UsageError("inside an event loop use `async with tidings.connect(...)` instead")


async def _act(space: str | None, name: str | None, act: Callable[[Agent[Transport]], Awaitable[T]]) -> T:
    async with connect(space, name=name, presence=False) as agent:
        return await act(agent)
