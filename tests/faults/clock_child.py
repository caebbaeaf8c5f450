"""An agent on a machine whose clock is wrong: the library, `doctor connection`, a host, or a credential that ends.

    LD_PRELOAD=clock.so CLOCK_OFF=-86400 python clock_child.py (speak | host | stay) BUNDLE [FOLDER | SECONDS]

Says in lines of JSON what it met.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from tidings.client.connect import connect_directly, find_identity
from tidings.client.connection_check import check_connection
from tidings.client.direct_transport import DirectAgent
from tidings.contract.host import SendRequest
from tidings.host import inbox as inbox_views
from tidings.host.host import Host
from tidings.host.inbox import Wanted
from tidings.wire.message import new_id
from tidings_testing.waiting import eventually


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def far(bundle: Path) -> DirectAgent:
    return connect_directly("main", bundle=bundle, channels=("general",))


async def speak(bundle: Path, _rest: str) -> None:
    """Says something, hears an answer, and asks what is wrong."""
    async with far(bundle) as agent:
        say(ready=True, clock=time.time())
        await agent.send("general", "from afar", timeout=20)
        say(heard=(await agent.next_message(20)).text)
    identity = await find_identity("main", None, None, bundle)
    say(steps=[(step.what, step.verdict, step.said) async for step in check_connection(identity)])


async def host(bundle: Path, folder: str) -> None:
    """The same through an outbox and an inbox."""
    running = Host(Path(folder))
    await running.open()
    try:
        scope = await running.adopt(("bundle", str(bundle)), receive=True)
        await eventually(lambda: len(running.directories.of(scope.space_id).known) >= 2, within=20)
        mid = new_id()
        await running.send(scope, SendRequest(id=mid, text="from afar", agent="ada", channel=None))

        async def texts() -> list[str]:
            rows = await running.inbox.read(inbox_views.listed, scope.space_id, scope.agent, Wanted(limit=100))
            return [row.text for row in rows if row.kind != "notice"]

        heard = await eventually(texts, within=30)

        async def is_done() -> bool:
            return (await running.find(scope, mid)).state in ("confirmed", "done")

        await eventually(is_done, within=30)
        say(heard=heard)
    finally:
        await running.close()


async def stay(bundle: Path, seconds: str) -> None:
    """Connected for longer than its first token holds."""
    async with far(bundle) as agent:
        say(ready=True, clock=time.time())
        await asyncio.sleep(float(seconds))
        await agent.send("general", "still here", timeout=10)
        say(state=agent.transport.state)


async def main(what: str, bundle: str, rest: str = "") -> None:
    await {"speak": speak, "host": host, "stay": stay}[what](Path(bundle), rest)


asyncio.run(main(*sys.argv[1:]))
