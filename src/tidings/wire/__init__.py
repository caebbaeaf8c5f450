"""The contract: what travels between Tidings programs, as pure functions without I/O.

Subjects, names, patterns, tags, keys, signatures, headers, messages and ruling records. Nothing here opens a
connection or a file. `wire/vectors` has the JSON Schema and the golden vectors that another language can be tested
against; `scripts/schema.py` writes them.
"""
