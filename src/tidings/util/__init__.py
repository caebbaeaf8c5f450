"""Helpers without domain knowledge: private files and sockets, task ends, backoff, failpoints, SQLite conventions."""
