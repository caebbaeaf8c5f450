"""The data pipeline: what reads the log and hands every member what it is owed.

Rules first (`judging`, `runs`, `planning`, `debts`: pure, no Spark, no connection), then the plain sockets that read
and write the broker, then Spark around them. Nothing outside `pipeline/` and `lake/` imports pyspark.
"""
