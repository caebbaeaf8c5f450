"""The pipeline as a process of its own: one session, one job and one narrow credential for each space.

    python -m tidings.delivery.process --home H --space S [--master M] [--checkpoint DIR] [--lake DIR] ...

It opens `space.toml` and `creds/pipeline.creds` and nothing else of the space's secrets. On standard output it says one
JSON object a line: `{"phase": ...}` while it starts, `{"ready": true}` when the query runs, `{"halted": why}` when it
ended and is tried again, then a result or an error with its code. A JVM that ends is such an error. Its own log is
`pipeline.log`; what Spark writes goes to `spark.log`, and what the JVM and its workers print to `spark.out`. SIGTERM
ends it in order: query, lease, JVM, and what is left of its process group. Killed with -9 it takes the JVM along,
because the JVM's standard input ends; whoever started it ends what is left then.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, NoReturn

from tidings.admin.home import SpaceHome
from tidings.delivery.session import (
    SessionSettings,
    archive_for,
    is_local,
    missing,
    start_session,
    stop_session,
    submitted,
    unguarded,
)
from tidings.delivery.spark_home import ArchiveMaker
from tidings.delivery.storage import below, checked_place, checked_storage, is_folder
from tidings.errors import PrerequisiteMissing, TidingsError, UnhealthyError, UsageError
from tidings.server.config import LOG_FILE_BYTES, LOG_FILES
from tidings.util.private_files import close_to_others, private_dir, read_private

#: seconds an orderly end may take; after that this process ends as it is, and the next one repeats the batch
ORDERLY = 25.0
#: bounds of what a batch takes of the log, whatever the heap
SMALLEST_BATCH, LARGEST_BATCH = 16 << 20, 512 << 20
Say = Callable[[dict[str, Any]], None]
log = logging.getLogger(__name__)


class _Told(BaseException):
    """SIGTERM while Spark was starting: nothing is held yet that would have to be given back."""


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """What differs from one machine to another. Folders and credential are those of the space unless named.

    `also`: other spaces of the same home that this process delivers for.
    """

    master: str = "local[*]"
    url: str | None = None
    creds: Path | None = None
    checkpoint: str | None = None
    lake: str | None = None
    storage: dict[str, str] = field(default_factory=dict, repr=False)
    memory: str = "700m"
    lease_ttl: float = 3.0
    small_records: int | None = None
    also: tuple[str, ...] = ()
    more: dict[str, str] = field(default_factory=dict)


class DeliverProcess:
    """One life of the process. `stop` may come at any moment, from a signal."""

    def __init__(self, home: SpaceHome, options: ProcessOptions, say: Say) -> None:
        self.home, self.options, self.say = home, options, say
        self._job: Any = None
        #: space -> where it was reached when its job began
        self._urls: dict[str, str] = {}
        self._archiving: ArchiveMaker | None = None
        self._stopping = False

    def stop(self, *_signal: object) -> None:
        if self._stopping:
            return
        self._stopping = True
        _end_for_sure_after(ORDERLY)
        if self._job is None:
            raise _Told
        self._job.stop()

    @property
    def _homes(self) -> list[SpaceHome]:
        return [self.home, *(SpaceHome(self.home.home, name) for name in self.options.also)]

    def run(self) -> None:
        for home in self._homes:
            home.read_info()
            read_private(self._creds(home))  # refuses a credential that others can read
        lacking = missing()
        if lacking:
            raise PrerequisiteMissing(lacking)
        self.say({"phase": "starting Spark"})
        settings = self._session()
        session = start_session(settings)
        open_ports = unguarded(session)
        if open_ports is not None:
            open_ports += f". The credential is not sent through it: its workers open {self._creds(self.home)}"
            log.warning("%s", open_ports)
            self.say({"warning": open_ports})
        carried = open_ports is None and not is_local(str(session.sparkContext.master))
        self._archiving = self._archive_maker(session, settings)
        try:
            self._deliver(session, carried=carried)
        finally:
            self.say({"phase": "stopping"})
            if self._archiving is not None:
                self._archiving.stop()
            stop_session(session)

    def _creds(self, home: SpaceHome) -> Path:
        return (self.options.creds or home.pipeline_creds).absolute()

    def _session(self) -> SessionSettings:
        return SessionSettings(
            work=private_dir(self.home.run / "spark"),
            master=self.options.master,
            name=f"tidings-{self.home.name}",
            memory=self.options.memory,
            log=self.home.logs / "spark.log",
            lean=True,
            more=({"spark.scheduler.mode": "FAIR"} if self.options.also else {}) | self.options.more,
        )

    def _archive_maker(self, session: Any, settings: SessionSettings) -> ArchiveMaker | None:
        """What makes the next start faster, if this one was slow."""
        archive = archive_for(settings)
        if archive is None or archive.path.is_file():
            return None
        return ArchiveMaker.of(session, archive, has_worked=lambda: self._job is not None and self._job.has_worked)

    def _deliver(self, session: Any, *, carried: bool) -> None:
        from tidings.delivery.several import SeveralJobs

        makers = {home.name: partial(self._make_job, session, home, carried=carried) for home in self._homes}
        if self.options.also:
            job: Any = SeveralJobs(session, makers, on_halt=self._on_halt)
        else:
            job = makers[self.home.name]()
        self.say({"phase": "taking over delivery"})
        signal.signal(signal.SIGINT, self.stop)  # Spark took it for itself
        self._job = job
        job.run()

    def _make_job(self, session: Any, home: SpaceHome, *, carried: bool) -> Any:
        from tidings.delivery.job import DeliverJob
        from tidings.delivery.stream_job import JobSettings

        info = home.read_info()
        settings = JobSettings(
            space=info.name,
            space_id=info.id,
            anchor_key=info.steward_key,  # the first one: rotations are followed in the log
            url=self.options.url or info.url,
            creds=str(self._creds(home)),
            carry_creds=carried,
            checkpoint=_folder(self._of(home, self.options.checkpoint), home.checkpoint),
            lake=_folder(self._of(home, self.options.lake), home.lake),
            storage=self.options.storage,
            lease_ttl=self.options.lease_ttl,
            max_bytes=batch_bytes(self._heap(session)) // len(self._homes),
        )
        if self.options.small_records is not None:
            settings = replace(settings, small_records=self.options.small_records)
        self._urls[home.name] = settings.url
        return DeliverJob(
            session,
            settings,
            on_ready=partial(self._on_ready, home.name),
            on_halt=partial(self._on_halt, home.name),
            on_stuck=self._on_stuck,
        )

    def _of(self, home: SpaceHome, place: str | None) -> str | None:
        """Of several spaces each has a part of a place that was named."""
        return below(place, home.name) if place and self.options.also else place

    def _heap(self, session: Any) -> str:
        """Of the driver, as whoever started its JVM said."""
        if not submitted():
            return self.options.memory
        return str(session.sparkContext.getConf().get("spark.driver.memory", "1g"))

    def _on_ready(self, space: str) -> None:
        log.info("the query of space %s runs", space)
        if self._archiving is not None:
            self._archiving.start()
        self.say({"ready": True, "pid": os.getpid(), "space": space})

    def _on_halt(self, space: str, why: str) -> None:
        self.say({"halted": why, "space": space})
        now = next(home.read_info().url for home in self._homes if home.name == space)
        if self.options.url is None and now != self._urls[space]:
            self._on_stuck(f"space {space} is reached in another way now: starting again with it")

    def _on_stuck(self, why: str) -> None:
        """Whoever started us starts another: a JVM that does not answer cannot be asked to stop either."""
        log.error("%s", why)
        self.say({"error": {"code": UnhealthyError.code, "message": why}})
        _end_as_it_is()


def batch_bytes(memory: str) -> int:
    """How much of the log a batch may hold: the heap has it in several forms at once."""
    found = re.fullmatch(r"(\d+)([kmgt]?)b?", memory.strip().lower())
    if found is None:
        raise UsageError(f"--memory is {memory!r}: an amount like 700m or 4g is needed")
    heap = int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}[found[2]]
    return min(max(heap // 10, SMALLEST_BATCH), LARGEST_BATCH)


def _folder(named: str | None, own: Path) -> str:
    """The space's own folder is private; a place that was named is whoever named it's to protect."""
    if named is None:
        if mended := close_to_others(private_dir(own)):
            log.warning("%d files and folders in %s were open to others and are not any more", mended, own)
        return str(own)
    if is_folder(named):
        Path(named).mkdir(parents=True, exist_ok=True)
    return named


def _end_for_sure_after(seconds: float) -> None:
    """A broker or a JVM that does not answer must not keep us."""

    def end() -> None:
        log.error("not stopped in order within %.0f s: ending as it is", seconds)
        _end_as_it_is()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _end_as_it_is() -> NoReturn:
    """With the JVM, if whoever started us gave us a process group."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def redirect_noise(path: Path) -> Say:
    """From now on whatever this process or a child prints goes to a file; the answer is the old standard output."""
    said = os.fdopen(os.dup(1), "w")
    noise = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(noise, descriptor)
    os.close(noise)

    def say(result: dict[str, Any]) -> None:
        try:
            said.write(json.dumps(result) + "\n")
            said.flush()
        except OSError:
            log.warning("nobody listens: %s", result)

    return say


def log_to(path: Path) -> None:
    handler = RotatingFileHandler(path, maxBytes=LOG_FILE_BYTES, backupCount=LOG_FILES)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # it raises whatever it logs, some of it to the root logger: a JVM that was killed is one sentence of ours
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    handler.addFilter(lambda record: Path(record.pathname).parent.name != "py4j")


def parse(arguments: list[str] | None) -> tuple[SpaceHome, ProcessOptions]:
    parser = argparse.ArgumentParser(
        prog="tidings-pipeline", description="started by `tidings up`, `pipeline run` or spark-submit"
    )
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--space", required=True)
    parser.add_argument("--also", action="append", default=[], metavar="SPACE", help="another space of the same home")
    parser.add_argument("--master", default="local[*]")
    parser.add_argument("--url")
    parser.add_argument("--creds", type=Path)
    for name in ("--checkpoint", "--lake"):
        parser.add_argument(name, metavar="PLACE", help="a folder or a URI")
    parser.add_argument("--storage", action="append", default=[], metavar="KEY=VALUE", help="an option of deltalake's")
    parser.add_argument("--memory", default="700m")
    parser.add_argument("--lease-ttl", type=float, default=3.0)
    parser.add_argument("--small-records", type=int, help="a batch of at most so many is encoded by the driver")
    parser.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE")
    given = vars(parser.parse_args(arguments))
    more = dict(each.partition("=")[::2] for each in given.pop("conf"))
    storage = checked_storage(given.pop("storage"))
    for name in ("checkpoint", "lake"):
        given[name] = given[name] and checked_place(f"--{name}", given[name])
    home = SpaceHome(given.pop("home").absolute(), given.pop("space"))
    given["also"] = also_checked(home.name, given["also"], url=given["url"], creds=given["creds"])
    return home, ProcessOptions(**given, storage=storage, more=more)


def also_checked(space: str, also: Sequence[str], *, url: object, creds: object) -> tuple[str, ...]:
    """The other spaces, each once."""
    if also and (url or creds):
        raise UsageError("--url and --creds are of one space: with --also each space has its own")
    if len({space, *also}) != len(also) + 1:
        raise UsageError(f"--also names {space} or another space twice: give each once")
    return tuple(also)


def main(arguments: list[str] | None = None) -> int:
    os.umask(0o077)
    try:
        home, options = parse(arguments)
    except TidingsError as error:
        sys.stdout.write(json.dumps({"error": {"code": error.code, "message": str(error)}}) + "\n")
        sys.stdout.flush()
        return error.exit_code
    for path in (home.run, home.logs):
        private_dir(path)
    log_to(home.logs / "pipeline.log")
    say = redirect_noise(home.logs / "spark.out")
    process = DeliverProcess(home, options, say)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, process.stop)
    try:
        process.run()
        say({"stopped": True})
        return 0
    except _Told:
        say({"stopped": True})
        return 0
    except TidingsError as error:
        log.error("%s", error)
        say({"error": {"code": error.code, "message": str(error)}})
        return error.exit_code
    except Exception as error:
        log.exception("the pipeline failed")
        words = (str(error).strip().splitlines() or [""])[0]
        say({"error": {"code": "failed", "message": f"{type(error).__name__}: {words}; `tidings logs pipeline`"}})
        return 1


def end(code: int) -> NoReturn:
    """Leave, and leave nothing. Threads of a gateway that is gone must not keep the process.

    A JVM whose start was broken off waits for ever (measured): pyspark has taken away the file it was to write. It is
    in our process group if whoever started us gave us one.
    """
    if os.getpgid(0) == os.getpid():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    end(main())
