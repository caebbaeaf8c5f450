"""docs/control.md: the table of operations as a page. `make docs` writes it."""

from __future__ import annotations

import sys
from pathlib import Path

from tidings.wire.operations import OPERATIONS, Operation, answer_fields

HEAD = """# Control requests

Written by `make docs` from the table in `wire/operations.py`, which is also what requests are held against. A client in
any language asks the steward by publishing strict JSON to `td.<space>.ctl.<service>.<its id>`, with a reply subject in
its own inbox:

    {"op": "<8 to 64 characters, yours to choose>", "do": "<verb>", "<argument>": <value>, ...}

The answer is `{"ok": true, ...}` or `{"ok": false, "error": {"code": ..., "message": ...}}`, with the words of
[errors](errors.md) as codes. `null` is the same as leaving an argument out; an argument or verb that is not known is
refused with those that are.

- `once`: the same `op` of the same agent takes effect once and is told the same, whatever happened in between: repeat
  it after an unknown outcome. (Of an agent the last 1,024 that wrote a record are remembered.)
- answer: the fields beside `ok`; one in parentheses may be missing. Their types are in `control.schema.json`.
- `waits`: seconds for which the answer may be kept waiting, if `wait` asks for it.
- `host`: programs may also ask it through the host of their machine ([its API](host-api.md)).

`health describe` answers with this table, and `control.schema.json` in the package has it as JSON Schema. `admin` is
for the administrator of a space and cannot be reached with an agent's credential.
"""


def page() -> str:
    """The whole document."""
    lines = [
        HEAD,
        "| service | verb | arguments | answer | | |",
        "|---|---|---|---|---|---|",
        *map(_row, OPERATIONS.values()),
    ]
    return "\n".join(lines) + "\n"


def _row(operation: Operation) -> str:
    arguments = ", ".join(f"`{name}` {kind.words}" for name, kind in operation.arguments.items())
    marks = ["once"] if operation.once else []
    marks += [f"waits {operation.waits:.0f} s"] if operation.waits else []
    marks += ["host"] if operation.host else []
    answer = ", ".join(f"`{name}`" if always else f"(`{name}`)" for name, always in answer_fields(operation).items())
    words = (operation.service, f"`{operation.do}`", arguments, answer, operation.says, ", ".join(marks))
    return f"| {' | '.join(words)} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
