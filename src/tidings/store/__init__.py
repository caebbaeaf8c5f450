"""What host and links share: a SQLite database with one writer, typed outcomes of an attempt, and when to try again.

Nothing here knows what a message is or opens a connection. `database` does the I/O; `outcomes` and `retry` are pure.
"""
