"""The worker of links as a process of its own, as `tidings up` starts it.

    python -m tidings.links --home H --space S [--every SECONDS]

It opens `space.toml`, `creds/link.creds`, what is below `links/` and `links.db`, and none of the space's keys. On
standard output it says one JSON object a line: `{"ready": true}` once it has looked at the links, and at last a result
or an error with its code. Its log is `links.log`. SIGTERM ends it in order; whatever ends it otherwise loses nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from tidings.admin.home import SpaceHome
from tidings.errors import TidingsError
from tidings.links.worker import LinkWorker
from tidings.server.config import LOG_FILE_BYTES, LOG_FILES

log = logging.getLogger(__name__)


def say(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


async def run(home: SpaceHome, every: float | None) -> None:
    worker = LinkWorker(home, every=every)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    running = asyncio.create_task(worker.run())
    ready = asyncio.create_task(worker.ready.wait())
    await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        say({"ready": True, "pid": os.getpid()})
    ready.cancel()
    await running


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tidings-link", description="started by `tidings up`")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--space", required=True)
    parser.add_argument("--every", type=float)
    options = parser.parse_args(arguments)
    os.umask(0o077)
    try:
        home = SpaceHome(options.home, options.space)
        home.make()
        handler = RotatingFileHandler(home.logs / "links.log", maxBytes=LOG_FILE_BYTES, backupCount=LOG_FILES)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
        asyncio.run(run(home, options.every))
    except TidingsError as error:
        log.error("%s", error)
        say({"error": {"code": error.code, "message": str(error)}})
        return error.exit_code
    say({"stopped": True})
    return 0


if __name__ == "__main__":
    sys.exit(main())
