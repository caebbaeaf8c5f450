"""One Spark session for all tests that need one: they share a worker, so there is one JVM."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tidings.pipeline.session import SessionSettings, start_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator["SparkSession"]:
    session = start_session(SessionSettings(Path(tmp_path_factory.mktemp("spark")), master="local[2]"))
    yield session
    session.stop()
