"""`spark.read.format("nats")`, found by Spark itself.

Spark looks for top-level modules named `pyspark_*` when a data source is first asked for, and takes their
`DefaultSource`. Nothing has to be registered. The source is `tidings.delivery.source`; this is only its name.
"""

from tidings.delivery.source import NatsSource as DefaultSource

__all__ = ["DefaultSource"]
