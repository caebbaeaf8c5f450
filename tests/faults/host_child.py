"""A host of ada, who sends, and bob, who receives, as a process that can be killed anywhere.

It sends what earlier runs attempted and were not answered (the same ids, the same words), then so many new messages,
and one that its channel refuses; it waits until all of it is in bob's inbox, is read and told, and done; then it ends.
"""

import asyncio
import sys
from pathlib import Path

from tidings.contract.host import SendRequest
from tidings.errors import TidingsError
from tidings.host import inbox as inbox_views
from tidings.host import outbox_views
from tidings.host.host import Host, Scope
from tidings.host.inbox import Wanted
from tidings.wire.message import new_id
from tidings_testing.history import History
from tidings_testing.waiting import eventually

REFUSED = "secret"


async def main(home: str, space_home: str, record: str, count: str) -> None:
    before = History()
    if Path(record).exists():
        before.merge(Path(record))
    history = History(Path(record))
    host = Host(Path(home))
    await host.open()
    ada = await host.adopt(("home", space_home, "main", "ada"), receive=False)
    bob = await host.adopt(("home", space_home, "main", "bob"), receive=True)
    await eventually(lambda: len(host.directories.of(ada.space_id).known) >= 2, within=20)
    answered = {event.id for event in before.of("acknowledged")}
    again = [(event.id, event.where) for event in before.of("attempted") if event.id not in answered]
    fresh = [(new_id(), where) for where in ["direct", "direct", REFUSED, *["direct"] * int(count)]]
    for mid, where in again + fresh:
        await send(host, ada, history, mid, where)
    await eventually(lambda: settled(host, bob), within=60, every=0.05)
    await host.close()


async def send(host: Host, ada: Scope, history: History, mid: str, where: str) -> None:
    agent, channel = ("bob", None) if where == "direct" else (None, where)
    history.attempted("ada", where, mid)
    await host.send(ada, SendRequest(id=mid, text=f"says {mid}", agent=agent, channel=channel))
    history.acknowledged("ada", where, mid, 0)


async def settled(host: Host, bob: Scope) -> bool:
    """Everything left and arrived, was read, and its sender was told."""
    states = {state for _, state in await host.outbox.read(outbox_views.counts)}
    if not states <= {"done", "dead"}:
        return False
    rows = await host.inbox.read(inbox_views.listed, bob.space_id, bob.agent, Wanted(limit=100_000))
    owed = [row for row in await host.outbox.read(outbox_views.listed, limit=100_000) if row.state == "done"]
    if len(rows) < len(owed):
        return False
    await host.mark_read(bob, [row.row for row in rows])
    try:
        return not await host.inbox.read(inbox_views.receipts_to_tell, bob.space_id, bob.agent)
    except TidingsError:
        return False


asyncio.run(main(*sys.argv[1:]))
