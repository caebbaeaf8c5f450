"""The gate: `scripts/count.py` on a real space."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_figure_is_worse_than_recorded() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "count.py"), "--check"]
    counted = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert counted.returncode == 0, counted.stderr
    assert "channel message, modules" in counted.stdout
