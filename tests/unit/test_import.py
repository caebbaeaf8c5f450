"""`import tidings` stays light."""

import os
import subprocess
import sys
from pathlib import Path

import tidings


def test_importing_the_library_loads_neither_spark_nor_a_web_server_nor_the_command_line() -> None:
    program = "import sys, tidings; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    sources = {"PYTHONPATH": str(Path(tidings.__file__).parents[1])}
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ | sources
    )
    loaded = set(ran.stdout.split())
    assert "tidings" in loaded
    assert not loaded & {"pyspark", "pyarrow", "deltalake", "fastapi", "starlette", "uvicorn", "mcp", "typer", "rich"}
