"""The deliver job on a Spark of several processes, with Tidings shipped to its executors as the documents say."""

import json
import os
import signal
import zipfile
from pathlib import Path

import pytest

import tidings
from crowd import Crowd, check, join, read_all, say
from tidings.pipeline.watching import look
from tidings.testing.processes import child
from tidings.testing.real_space import RealSpace
from tidings.testing.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(240)]
#: the shipped copy says which process has loaded it, and whose child that is
NOTE = """
import json as _json, os as _os, pathlib as _pathlib
_parent = _pathlib.Path(f"/proc/{_os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
_pathlib.Path(%r, str(_os.getpid())).write_text(_json.dumps([__file__, int(_parent)]))
"""


def packed(path: Path, notes: Path) -> Path:
    """Tidings as one file to ship, whose encoder notes where it was loaded."""
    package = Path(tidings.__file__).parent
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(package.rglob("*.py")):
            text = file.read_text()
            if file.name == "encoding.py" and file.parent.name == "pipeline":
                text += NOTE % str(notes)
            archive.writestr(str(file.relative_to(package.parent)), text)
    return path


async def test_on_two_executors_with_the_code_shipped_to_them_everybody_gets_exactly_what_is_owed(
    space: RealSpace, crowd: Crowd, tmp_path: Path
) -> None:
    ada, bob, cal, _ = crowd.values()
    for agent in (bob, cal):
        await join(agent, "team.>")
    for n in range(40):
        await say(ada, f"team.{n % 4}", str(n))
    notes = tmp_path / "notes"
    notes.mkdir()
    shipped = packed(tmp_path / "tidings.zip", notes)
    settings = {
        "spark.submit.pyFiles": shipped,
        "spark.executor.memory": "512m",
        "spark.executorEnv.PYTHONPATH": "",
    }
    command = ["--home", str(space.home.home), "--space", space.home.name, "--master", "local-cluster[2,1,512]"]
    for key, value in settings.items():
        command += ["--conf", f"{key}={value}"]
    async with child("-m", "tidings.pipeline.child", *command) as job:
        while not (said := await job.line(120)).get("ready"):
            assert "error" not in said, said
        await eventually(lambda: look(space.home).behind == 0, within=60, what="everything is delivered")
        await say(ada, "team.0", "after")
        await eventually(lambda: look(space.home).behind == 0, within=60, what="and what came later")
        loaded = [json.loads(note.read_text()) for note in notes.iterdir()]
        job.signal(signal.SIGTERM)
        assert await job.ended(60) == 0
    boxes = await read_all({"bob": bob, "cal": cal})
    await check(space, {"bob": bob, "cal": cal}, boxes)
    assert len(boxes["cal"].records) == 41
    assert loaded, "the workers ran the code that was shipped"
    assert all("tidings.zip" in file for file, _ in loaded)
    assert os.getpid() not in {parent for _, parent in loaded}
