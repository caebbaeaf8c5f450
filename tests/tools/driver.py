"""The pipeline's process without the seconds of a JVM of its own, for tests that kill it.

    with gateway(spark) as way:
        async with child("-m", "tools.driver", *arguments, more=way, failpoint="deliver.frame:kill"): ...

It is `tidings.delivery.process` word for word, with its own interpreter, connections, lease, tables and failpoints;
only the JVM is the one of the session that was given, through a gateway server of its own so that neither process is
called back for the other. Everything the job does to the outside it does here, in Python, and all of that dies with it.
What lives on is the JVM: a query whose driver is gone fails there, where a JVM of its own would have died.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark import SparkContext

import tidings
from tidings.delivery import process

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def gateway(spark: SparkSession) -> Iterator[dict[str, str]]:
    """Another way into the JVM of a session: the environment of a process that is to drive it too."""
    jvm: Any = spark._jvm
    server = jvm.org.apache.spark.api.python.Py4JServer(spark.sparkContext._jsc.sc().conf())
    server.start()
    try:
        yield {
            "PYSPARK_GATEWAY_PORT": str(server.getListeningPort()),
            "PYSPARK_GATEWAY_SECRET": server.secret(),
            "PYTHONPATH": f"{Path(tidings.__file__).parents[1]}:{Path(__file__).parents[1]}",
        }
    finally:
        server.shutdown()


def _running_context(self: SparkContext, jconf: Any) -> Any:
    jvm: Any = self._jvm
    return jvm.JavaSparkContext.fromSparkContext(jvm.org.apache.spark.SparkContext.getOrCreate())


def _leave_running(_session: SparkSession) -> None:
    """It is somebody else's."""


if __name__ == "__main__":
    SparkContext._initialize_context = _running_context  # type: ignore[method-assign]
    setattr(process, "stop_session", _leave_running)  # noqa: B010  a name it imported
    process.end(process.main())
