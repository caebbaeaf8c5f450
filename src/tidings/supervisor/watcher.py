"""Who takes more of the broker than one agent may: found in a fraction of a second, cut and named.

`AgentBounds` decides, pure: connections by the broker's own words (each CONNECT and DISCONNECT of the agents' account),
bytes and subscriptions by its list of connections, asked ten times a second. `Watcher` is the thin shell: a narrow
user of the system account that may hear those words, ask for that list, and close a connection. Whoever is over a
bound loses its connections at once and its credential by the administrator, whom the supervisor starts; until that is
done every new connection of it is closed too. What an agent stores is watched by the steward (`quotas.py`).

It has no memory: after a start it learns who is connected and counts bytes from there. While it does not run, the
limits of the broker still hold (buffers, subscriptions of a connection); connections and bytes are not bounded then,
and `status` says so.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tidings.admin.home import SpaceHome, SpaceInfo
from tidings.errors import TidingsError, UsageError
from tidings.nats.client import Connection, close_quietly, connect
from tidings.nats.errors import NatsError
from tidings.nats.jwt import split_credentials
from tidings.steward.quotas import DEFAULT_BYTES
from tidings.util.private_files import read_private
from tidings.util.task_ends import end_tasks
from tidings.wire.names import is_agent_id

MOST_CONNECTIONS = 32
#: of whoever has the line of an invitation: its account is small, and others want in
MOST_INVITED = 4
#: of the worker of a link, of another space or our own
MOST_LINKED = 4
#: connections beyond that are closed; whoever comes back so often in so many seconds loses its credential
MOST_RETURNS, RETURNS_WITHIN = 200, 10.0
#: of all connections of an agent together
MOST_SUBSCRIPTIONS = 4_000
#: bytes an agent may be ahead of its rate
BURST = 32 * 1024 * 1024
#: what an agent may send in an hour: this share of the log's budget, and no less than this many bytes; as many times
#: that as the byte quota was raised
HOUR_SHARE, HOUR_LEAST = 0.05, 64 * 1024 * 1024
LOOK_EVERY = 0.1
SUBSCRIPTIONS_EVERY, COMPARE_EVERY = 1.0, 30.0
#: connections asked about at each look: those that sent most since they came, and the next of all in turn
LOOKED_AT, IN_TURN = 128, 512
LEARNED_AT_ONCE = 256
ASK_AGAIN = 5.0
PATIENCE = 2.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Breach:
    """A bound that an agent broke. `void`: its credential must go, not only its posting."""

    agent: str
    why: str
    void: bool = True


@dataclass(slots=True)
class _Taken:
    """What one agent takes now."""

    connections: set[int] = field(default_factory=set)
    returns: deque[float] = field(default_factory=deque)
    #: bytes above its rate, and when that was
    ahead: float = 0.0
    at: float = 0.0
    #: bytes since the hour began
    hour: int = 0
    hour_began: float = 0.0


class AgentBounds:
    """What each agent takes of the broker, and who takes too much. No clock, no I/O."""

    def __init__(self, budget: int, rate: int | None, most: int = MOST_CONNECTIONS) -> None:
        """`most`: connections of one at once."""
        self.budget, self.most = budget, most
        #: bytes each second; None is no limit
        self.rate = rate
        self._taken: dict[str, _Taken] = {}
        #: connection -> (agent, bytes counted)
        self._known: dict[int, tuple[str, int]] = {}
        #: known connections that the last list did not have
        self._missing: set[int] = set()

    def connections_of(self, agent: str) -> set[int]:
        return set(self._taken[agent].connections) if agent in self._taken else set()

    def agent_of(self, connection: int) -> str | None:
        return self._known[connection][0] if connection in self._known else None

    def connected(self, agent: str, connection: int, now: float, sent: int = 0) -> tuple[bool, Breach | None]:
        """Note a connection. Answers whether it is one too many, and a breach if that happens too often.

        `sent`: what came over it before anybody watched, which counts against nobody.
        """
        taken = self._taken.setdefault(agent, _Taken(at=now, hour_began=now))
        taken.connections.add(connection)
        if self.agent_of(connection) != agent:
            self._known[connection] = (agent, sent)
        if len(taken.connections) <= self.most:
            return False, None
        taken.returns.append(now)
        while taken.returns and taken.returns[0] < now - RETURNS_WITHIN:
            taken.returns.popleft()
        if len(taken.returns) <= MOST_RETURNS:
            return True, None
        taken.returns.clear()
        return True, Breach(agent, f"{MOST_RETURNS} connections beyond the {self.most} one may have")

    def disconnected(self, connection: int, received: int, now: float) -> Breach | None:
        """Note its end; what it had sent counts, however short it was here."""
        breach = self.sent(connection, received, now)
        agent, _ = self._known.pop(connection, ("", 0))
        if agent in self._taken:
            self._taken[agent].connections.discard(connection)
        return breach

    def sent(self, connection: int, received: int, now: float) -> Breach | None:
        """Note how many bytes came over a connection in all."""
        agent, counted = self._known.get(connection, ("", 0))
        taken = self._taken.get(agent)
        if taken is None:
            return None
        new = max(0, received - counted)
        self._known[connection] = (agent, max(received, counted))
        if self.rate is None:
            return None
        taken.ahead = max(0.0, taken.ahead - (now - taken.at) * self.rate) + new
        taken.at = now
        if now - taken.hour_began >= 3600:
            taken.hour, taken.hour_began = 0, now
        taken.hour += new
        if taken.ahead > BURST:
            taken.ahead = 0.0
            return Breach(agent, f"more than {self.rate / 1e6:.1f} MB a second, {BURST / 1e6:.0f} MB ahead of that")
        most = self.most_an_hour(self.rate)
        if taken.hour > most:
            taken.hour = 0
            why = f"more than {most / 1e6:,.0f} MB in an hour, where the log has room for {self.budget / 1e6:,.0f} MB"
            return Breach(agent, why, void=False)
        return None

    def most_an_hour(self, rate: int) -> int:
        """Bytes; an owner who lets agents send more than usual in a second lets them send more in an hour."""
        return int(max(HOUR_LEAST, HOUR_SHARE * self.budget) * max(1.0, rate / DEFAULT_BYTES))

    def subscribed(self, counts: Iterable[tuple[int, int]]) -> list[Breach]:
        """Judge the subscriptions of connections."""
        found: Counter[str] = Counter()
        for connection, count in counts:
            if (agent := self.agent_of(connection)) is not None:
                found[agent] += count
        return [
            Breach(agent, f"{count:,} subscriptions, where an agent may have {MOST_SUBSCRIPTIONS:,} in all")
            for agent, count in found.items()
            if count > MOST_SUBSCRIPTIONS
        ]

    def compare(self, present: Iterable[int]) -> None:
        """Forget who is gone although the broker's word of it was lost.

        A list is read page by page while it changes, so one may be missing in it by chance; in two it is gone.
        """
        missing = self._known.keys() - set(present)
        for connection in missing & self._missing:
            agent, _ = self._known.pop(connection)
            if agent in self._taken:
                self._taken[agent].connections.discard(connection)
        self._missing = missing


@dataclass(frozen=True, slots=True)
class Watched:
    """Whose connections are watched, and how many of them one may have."""

    account: Callable[[SpaceInfo], str]
    most: int
    #: are its bytes counted? What our own worker admits comes as fast as the log takes it
    counted: bool = True


AGENTS = Watched(lambda info: info.agents_account, MOST_CONNECTIONS)
INVITED = Watched(lambda info: info.invite_account, MOST_INVITED)
LINKED = Watched(lambda info: info.link_account, MOST_LINKED, counted=False)


class Watcher:
    """Watches the agents of one space for its supervisor. `cut` takes a credential or the posting of an agent away."""

    def __init__(
        self,
        home: SpaceHome,
        *,
        cut: Callable[[Breach], Awaitable[None]],
        note: Callable[[dict[str, Any]], None] = lambda _facts: None,
        who: Watched = AGENTS,
    ) -> None:
        self._home, self._who = home, who
        self._cut, self._note = cut, note
        self.rate: int | None = DEFAULT_BYTES
        #: agents the administrator is asked to see to, and those of them whose connections are closed until then
        self._asked: dict[str, asyncio.Task[None]] = {}
        self._barred: set[str] = set()
        self._bounds = AgentBounds(0, None)
        #: how many connections were looked at in this turn
        self._turn = 0
        self._server = ""
        self._link: Connection | None = None

    async def keep(self) -> None:
        """Watch for ever; a broker that goes away is looked for again, and a fault of ours is said and gone on from."""
        while True:
            try:
                await self._watch()
            except (TidingsError, NatsError, OSError, TimeoutError) as error:
                self._note({"running": False, "why": str(error) or type(error).__name__, "at": time.time()})
                log.warning("nobody watches what agents take: %s", error or type(error).__name__)
            except Exception as error:  # boundary: whatever is wrong with the broker's words must not end the space
                self._note({"running": False, "why": f"{type(error).__name__}: {error}", "at": time.time()})
                log.exception("nobody watches what agents take")
            await asyncio.sleep(0.5)

    def heed(self, quota: Mapping[str, Any]) -> None:
        """What the steward says one agent may send each second."""
        self.rate = int(quota["bytes"]) if quota.get("bytes") else None
        self._bounds.rate = self.rate

    def bar(self, breach: Breach) -> None:
        """Somebody else found it: close what it has, and see to the rest."""
        self._judge(self._link, breach)

    async def close(self) -> None:
        await end_tasks(self._asked.values())

    async def _watch(self) -> None:
        info = self._home.read_info()
        _, key = split_credentials(read_private(self._home.watcher_creds))
        link = await connect(info.url, self._home.watcher_creds, key.id, name="watcher", reconnect=False)
        rate = self.rate if self._who.counted else None
        self._bounds, self._turn = AgentBounds(info.budget, rate, self._who.most), 0
        self._account, self._link = self._who.account(info), link
        try:
            words = f"$SYS.ACCOUNT.{self._account}"
            await link.listen(f"{words}.CONNECT", lambda message: self._heard(link, message.data, came=True))
            await link.listen(f"{words}.DISCONNECT", lambda message: self._heard(link, message.data, came=False))
            await self._compare(link)
            self._note({"running": True, "why": None, "at": time.time()})
            looked, compared = 0.0, time.monotonic()
            while link.is_connected:
                now = time.monotonic()
                if now - compared >= COMPARE_EVERY:
                    compared = now
                    await self._compare(link)
                await self._look(link, now)
                if now - looked >= SUBSCRIPTIONS_EVERY:
                    looked = now
                    await self._look_at_subscriptions(link)
                await asyncio.sleep(max(LOOK_EVERY, 10 * (time.monotonic() - now)))
            raise OSError("the broker closed the connection")
        finally:
            self._link = None
            await close_quietly(link)

    # --- what the broker says ---

    async def _list(self, link: Connection, **wanted: Any) -> list[dict[str, Any]]:
        body = json.dumps(wanted).encode()
        answer = json.loads((await link.request(f"$SYS.REQ.ACCOUNT.{self._account}.CONNZ", body, timeout=5)).data)
        self._server = answer["server"]["id"]
        return list(answer["data"].get("connections") or [])

    async def _compare(self, link: Connection) -> None:
        """Learn of connections whose coming was not heard, before we came or since, and forget those that are gone."""
        now, offset, present = time.monotonic(), 0, set[int]()
        while page := await self._list(link, auth=True, limit=LEARNED_AT_ONCE, offset=offset):
            offset += len(page)
            for row in page:
                connection, agent = int(row["cid"]), str(row.get("authorized_user"))
                present.add(connection)
                if is_agent_id(agent) and self._bounds.agent_of(connection) is None:
                    self._came(link, agent, connection, now, int(row["in_bytes"]))
        self._bounds.compare(present)

    def _heard(self, link: Connection, data: bytes, *, came: bool) -> None:
        """A word of the broker about a connection. Called where it is read, so it must not raise."""
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            said = json.loads(data)
            client, now = said["client"], time.monotonic()
            self._server = said["server"]["id"]
            if came:
                self._came(link, str(client["user"]), int(client["id"]), now)
            else:
                # "sent" is the client's sending, "received" what the broker sent to it
                sent = int((said.get("sent") or {}).get("bytes", 0))
                self._judge(link, self._bounds.disconnected(int(client["id"]), sent, now))

    def _came(self, link: Connection, agent: str, connection: int, now: float, sent: int = 0) -> None:
        too_many, breach = self._bounds.connected(agent, connection, now, sent)
        self._judge(link, breach)
        if too_many or agent in self._barred:
            self._close(link, connection)

    async def _look(self, link: Connection, now: float) -> None:
        """Who sent how much. All have a turn: one that just began hides behind those that sent much in long lives."""
        begin = self._turn
        rows = await self._list(link, sort="cid", limit=IN_TURN, offset=begin)
        self._turn = begin + len(rows) if len(rows) == IN_TURN else 0
        if begin or self._turn:  # not all are in this page
            rows += await self._list(link, sort="bytes_from", limit=LOOKED_AT)
        for row in rows:
            self._judge(link, self._bounds.sent(int(row["cid"]), int(row["in_bytes"]), now))

    async def _look_at_subscriptions(self, link: Connection) -> None:
        rows = await self._list(link, sort="subs", limit=LOOKED_AT)
        for breach in self._bounds.subscribed((int(row["cid"]), int(row["subscriptions"])) for row in rows):
            self._judge(link, breach)

    # --- what is done about it ---

    def _judge(self, link: Connection | None, breach: Breach | None) -> None:
        if breach is None or breach.agent in self._asked:
            return
        said = breach
        if not said.why.startswith("since "):
            said = Breach(breach.agent, f"since {datetime.now(UTC):%Y-%m-%d %H:%M} UTC: {breach.why}", breach.void)
        log.error("%s is to be cut, %s", said.agent, said.why)
        self._asked[said.agent] = asyncio.create_task(self._take_away(said))
        if said.void:
            self._barred.add(said.agent)
        if said.void and link is not None:
            for connection in self._bounds.connections_of(said.agent):
                self._close(link, connection)

    async def _take_away(self, breach: Breach) -> None:
        """Have it done, however often that must be asked. An agent that is gone, or is another now, is left alone."""
        try:
            while True:
                try:
                    await self._cut(breach)
                    break
                except UsageError as error:
                    log.warning("%s is not cut: %s", breach.agent, error)
                    break
                except (TidingsError, OSError) as error:
                    log.error("%s could not be cut: %s; trying again", breach.agent, error)
                    await asyncio.sleep(ASK_AGAIN)
        finally:  # whatever ended it: it is asked for anew if the agent goes on
            self._barred.discard(breach.agent)
            self._asked.pop(breach.agent, None)

    def _close(self, link: Connection, connection: int) -> None:
        # without a reply the server does nothing (measured), so this is a request although nobody needs its answer
        ask = link.request(f"$SYS.REQ.SERVER.{self._server}.KICK", json.dumps({"cid": connection}).encode(), timeout=5)
        task = asyncio.create_task(_quietly(ask))
        _closing.add(task)
        task.add_done_callback(_closing.discard)


_closing: set[asyncio.Task[None]] = set()


async def _quietly(ask: Awaitable[Any]) -> None:
    with suppress(NatsError, OSError, TimeoutError):
        await ask
