"""`tidings mcp` for a test that cannot wait for minutes: SECONDS between two signs of life, AGENT, HOME."""

import asyncio
import sys

from tidings.cli.mcp import _session, running_host
from tidings.cli.options import place
from tidings.mcp.host_desk import HostDesk
from tidings.mcp.server import serve

seconds, agent, home = sys.argv[1:]
where = place(None, home, agent)
asyncio.run(
    serve(
        HostDesk(lambda: running_host(where), lambda host: _session(host, where)),
        sign_of_life=float(seconds),
    )
)
