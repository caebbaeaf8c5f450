"""The contract: what travels between Tidings programs, as pure functions without I/O.

Subjects, names, patterns, tags, keys, signatures, headers, messages and ruling records. Nothing here opens a
connection; only `schema` touches files, to write the JSON Schema and the golden vectors (`wire/vectors`) that another
language can be tested against.
"""
