"""The deliver job on a Spark of several processes, with Tidings shipped to its executors as the documents say."""

import json
import secrets
import signal
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

import tidings
from crowd import Crowd, check, join, read_all, say
from tidings.delivery.status import look
from tidings_testing.processes import child
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(240)]
SECRET = secrets.token_hex(16)
#: batches after which chance has given each of two executors one
BATCHES = 40
#: the shipped copy says where it was loaded from, and which executor the worker belongs to
NOTE = """
import json as _json, os as _os, pathlib as _pathlib
_parent = _pathlib.Path(f"/proc/{_os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
_words = _pathlib.Path(f"/proc/{_parent}/cmdline").read_text().split(chr(0))
_executor = _words[_words.index("--executor-id") + 1] if "--executor-id" in _words else "none"
_pathlib.Path(%r, str(_os.getpid())).write_text(_json.dumps([__file__, _executor, int(_parent)]))
"""


def packed(path: Path, notes: Path) -> Path:
    """Tidings as one file to ship, whose encoder notes where it was loaded."""
    package = Path(tidings.__file__).parent
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(package.rglob("*.py")):
            text = file.read_text()
            if file.name == "encoding.py" and file.parent.name == "delivery":
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
    command += ["--small-records", "0"]
    for key, value in settings.items():
        command += ["--conf", f"{key}={value}"]
    async with child("-m", "tidings.delivery.process", *command, more=with_secret(tmp_path / "conf")) as job:
        while not (said := await job.line(120)).get("ready"):
            assert not {"error", "warning"} & set(said), said
        assert not [words for words in command_lines() if SECRET in words], "every user reads those"
        await eventually(lambda: look(space.home).behind == 0, within=60, what="everything is delivered")
        later = 0
        while len(executors(notes)) < 2 and later < BATCHES:  # a batch has one task, and either may get it
            later += 1
            await say(ada, "team.0", "after")
            await eventually(lambda: look(space.home).behind == 0, within=60, what="and what came later")
        worked = executors(notes)
        job.signal(signal.SIGTERM)
        assert await job.ended(60) == 0
    boxes = await read_all({"bob": bob, "cal": cal})
    await check(space, {"bob": bob, "cal": cal}, boxes)
    assert len(boxes["cal"].records) == 40 + later
    assert set(worked) == {"0", "1"}, "both executors encoded"
    assert len(set(worked.values())) == 2, "each a process of its own"
    assert all(f"{shipped.name}/tidings/" in file for file in loaded_from(notes)), "with the code that was shipped"


def with_secret(folder: Path) -> dict[str, str]:
    """A cluster whose operator set a secret, as docs/operations.md says: both executors ask the driver for it."""
    folder.mkdir()
    settings = {"authenticate": "true", "authenticate.secret": SECRET, "network.crypto.enabled": "true"}
    path = folder / "spark-defaults.conf"
    path.write_text("".join(f"spark.{key} {value}\n" for key, value in settings.items()))
    path.chmod(0o600)
    return {"SPARK_CONF_DIR": str(folder)}


def command_lines() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_text(errors="replace"))
    return found


def executors(notes: Path) -> dict[str, int]:
    """The executors whose workers encoded, and their processes."""
    return {executor: pid for _, executor, pid in map(_noted, notes.iterdir())}


def loaded_from(notes: Path) -> list[str]:
    return [file for file, _, _ in map(_noted, notes.iterdir())]


def _noted(note: Path) -> tuple[str, str, int]:
    file, executor, pid = json.loads(note.read_text())
    return file, executor, pid
