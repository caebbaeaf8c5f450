"""What an agent holds: one supervised connection, the channels it is in, its mail, its tasks.

`endpoint.Endpoint` is the class everyone knows; `tidings.connect` makes one. Nothing here waits for Spark, and every
wait on the broker has an end.
"""
