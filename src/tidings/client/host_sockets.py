"""Where the host of a home listens."""

from __future__ import annotations

import os
from pathlib import Path


def socket_path(home: Path) -> Path:
    """Spelled one way, because sessions are proven for it."""
    return Path(os.path.realpath(home)) / "run" / "host.sock"
