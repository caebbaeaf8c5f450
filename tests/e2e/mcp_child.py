"""`tidings mcp` for a test that cannot wait for minutes: SECONDS between two signs of life, AGENT, HOME."""

import sys

from tidings.cli.context import Context
from tidings.cli.mcp import mcp
from tidings.client import host_tasks

seconds, agent, home = sys.argv[1:]
host_tasks.SLOW_REPORT_EVERY = float(seconds)
mcp(Context(home_dir=home), agent=agent)
