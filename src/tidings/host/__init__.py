"""The host daemon's state: what its agents have to send and what they received, in one database that survives anything.

`schema` makes the bad states impossible, `outbox` and `inbox` are every transition over it, as functions of a SQLite
connection. Nothing here opens a connection to a broker yet.
"""
