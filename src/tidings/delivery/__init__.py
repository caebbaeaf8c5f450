"""The Spark application: the `nats` source and sink, streaming delivery, and the delivery ledger."""
