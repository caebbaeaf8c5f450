"""The contract: what travels between Tidings programs, as pure functions without I/O.

Subjects, names, patterns, tags, keys, signatures, headers, messages and ruling records. Nothing here opens a
connection or a file, so another language can be tested against the same golden vectors (`wire/schema`).
"""
