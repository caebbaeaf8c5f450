"""Hypothesis profiles, and the fixture every integration test stands on.

`ci` repeats itself exactly, `deep` (TIDINGS_DEEP=1) searches further.
"""

import os
import signal
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from bare import BareServer, bare_server
from crowd import Crowd, gathered
from declared_answers import held_to_the_table
from terminal import Terminal
from tidings.errors import PrerequisiteMissing
from tidings.server import nats_server as server
from tidings_testing.real_space import RealSpace, real_space

settings.register_profile("ci", derandomize=True, max_examples=50, deadline=None)
settings.register_profile("deep", max_examples=1000, deadline=None)
settings.load_profile("deep" if os.environ.get("TIDINGS_DEEP") else "ci")

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: warnings are errors here; these are not ours to mend
SPARKS_OWN_WARNINGS = (
    "ignore::ResourceWarning",  # py4j leaves its sockets to the garbage collector
    "ignore::DeprecationWarning:pyspark",
    "ignore::FutureWarning:pyspark",
    "ignore::pytest.PytestUnraisableExceptionWarning",  # the same sockets, once they are collected
)

#: a JVM that lives for minutes never earns back what its second compiler costs
QUICK_TO_START = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
NEEDS_BROKER = ("contract", "integration", "faults", "e2e", "spark")


def pytest_configure() -> None:
    """In the background of a script Ctrl-C is ignored, by all that is started there, too; some tests are about it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _have_ports_of_our_own()


def _have_ports_of_our_own() -> None:
    """Of several workers each has a part of the range: the port of a broker that is down for a moment stays its own."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if worker is not None:
        (low, high), mine = server.PORT_RANGE, int(worker.removeprefix("gw"))
        size = (high - low) // count
        server.PORT_RANGE = (low + mine * size, low + (mine + 1) * size)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in NEEDS_BROKER:
            item.add_marker(pytest.mark.broker)
        if folder == "faults":
            item.add_marker(pytest.mark.faults)
        if folder == "spark":
            item.add_marker(pytest.mark.spark)
        if item.get_closest_marker("spark"):
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(180))
            for reason in SPARKS_OWN_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(reason))


#: tests that share what is dear to set up: the one JVM, a run of a whole suite of attacks, a space with its host, a
#: cluster, an object store, figures of whole worlds
TOGETHER = {
    "tests/spark/": "spark",
    **{
        f"tests/integration/test_security.py::test_{name}": "security"
        for name in ("no_probe_finds", "the_suite_has_nobody_cut", "what_remains_observable", "the_report_is_json")
    },
    **{
        f"tests/integration/test_doctor_link.py::test_{name}": "hostile links"
        for name in ("no_lie_of_a_peer", "the_report_has_a_line")
    },
    "tests/e2e/test_everyday_commands.py": "everyday",
    "tests/contract/test_batches.py": "batches",
    "tests/integration/test_external.py": "servers of others",
    "tests/integration/test_ledger_in_a_store.py": "object store",
    "tests/unit/scripts/test_scale.py": "scale",
}


class Together(LoadScopeScheduling):  # type: ignore[misc]
    """Every test is handed out alone, but those that share something dear: one worker has all of those.

    xdist's own groups do nothing under this pytest: xdist writes the group into the item's id where pytest no longer
    looks for it.
    """

    def _split_scope(self, nodeid: str) -> str:
        return next((group for start, group in TOGETHER.items() if nodeid.startswith(start)), nodeid)


@pytest.hookimpl(optionalhook=True)  # one worker needs none
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together:
    return Together(config, log)


@pytest.fixture
def spark(spark_session: "SparkSession") -> "SparkSession":
    """The session, and the active one: a query's own session may have been active on this thread before."""
    jvm: Any = spark_session._jvm
    jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(spark_session._jsparkSession)
    return spark_session


@pytest.fixture(scope="session")
def spark_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator["SparkSession"]:
    """The one session of this process, with the nats source; skipped without Spark or Java, except in CI."""
    try:
        from tidings.delivery.session import SessionSettings, start_session, stop_session
        from tidings.delivery.source import NatsSource

        work = tmp_path_factory.mktemp("spark")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Spark's start warns of is not ours
            session = start_session(SessionSettings(work, master="local[2]", java=QUICK_TO_START))
    except (ImportError, PrerequisiteMissing) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"needs Spark and Java (`pip install 'tidings[spark]'`): {error}")
    session.dataSource.register(NatsSource)
    yield session
    stop_session(session)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareServer]:
    """A nats-server with JetStream and nothing of ours, for what needs no space."""
    with bare_server(tmp_path_factory.mktemp("bare")) as server:
        yield server


@pytest.fixture(autouse=True)
def declared_answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with held_to_the_table(monkeypatch):
        yield


@pytest.fixture
def archive_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """What retention does for an archive is proved before there is one."""
    monkeypatch.setattr("tidings.steward.admin_handlers.ARCHIVE_EXISTS", True)


@pytest.fixture
async def space(tmp_path: Path) -> AsyncIterator[RealSpace]:
    """A fresh space on a real broker, with its steward."""
    async with real_space(tmp_path / "home") as running:
        yield running


@pytest.fixture
async def pair(space: RealSpace) -> RealSpace:
    """The same with ada and bob in it, who may talk in general."""
    await space.add("ada")
    await space.add("bob")
    return space


@pytest.fixture
async def crowd(space: RealSpace) -> AsyncIterator[Crowd]:
    """The same with four agents in it who may read, post and manage everywhere."""
    async with gathered(space) as people:
        yield people


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """A shell with a home of its own; whatever it left running is stopped."""
    shell = Terminal(tmp_path)
    yield shell
    shell.close()
