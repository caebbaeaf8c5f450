"""`pip install pyspark-nats`, and Spark finds the source by itself; what is secret stays so."""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from bare import guarded
from tidings.delivery.sink import SinkOptions, publish_batches

pa = pytest.importorskip("pyarrow")

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "packages" / "pyspark-nats" / "src"
PROGRAM = Path(__file__).with_name("plain_spark.py")


@pytest.mark.slow  # a JVM of its own
def test_spark_finds_the_source_without_registering_and_says_no_password_anywhere(tmp_path: Path) -> None:
    password = secrets.token_hex(12)
    work = tmp_path / "work"
    with guarded(tmp_path / "js", f'user: ada, password: "{password}"') as server:
        rows = pa.record_batch({"id": list("12345"), "data": [b"x"] * 5})
        login = {"url": server.url, "user": "ada", "password": password, "subject": "logged.in"}
        publish_batches(SinkOptions.of(login, rows.schema.names, overwrite=False), [rows])
        ran = subprocess.run(
            [sys.executable, PROGRAM, server.url, password, work],
            env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{PACKAGE}"},
            capture_output=True,
            text=True,
            check=False,
            timeout=150,
        )
    assert ran.returncode == 0, ran.stderr[-4_000:]
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said == {"read": [1, 2, 3, 4, 5], "batches": [4, 4, 2], "registered": 10, "refused": True}
    files = [path for path in work.rglob("*") if path.is_file() and "local" not in path.relative_to(work).parts]
    words = {str(path.relative_to(work)): path.read_bytes() for path in files}
    words |= {"out": ran.stdout.encode(), "err": ran.stderr.encode()}
    assert any(name.startswith("spark.log") for name in words)
    assert any(name.startswith("events") for name in words)
    assert any(name.startswith("checkpoint") for name in words)
    assert "BatchScan nats" in ran.stdout, "the plans were printed"
    assert sum(map(len, words.values())) > 100_000
    assert [name for name, text in words.items() if password.encode() in text] == []
