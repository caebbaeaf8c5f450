"""The wire for other languages: a JSON Schema of the message, and golden vectors. `make schema` writes them.

The schema is generated from the structs in `wire/message` and completed where they cannot say it: `raw` does not
travel, and a part may be of any reverse-DNS kind. It describes the shape only; duplicate keys, depth and numbers are
for the reader of the bytes, and the vectors, which `tests/golden` makes, have a case for each. The package ships the
files and not their maker; a test holds them against `contents()`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from golden import vectors
from tidings.contract.catalogue import OPERATIONS
from tidings.wire.message import EXTENSION_KIND, Message

FOLDER = Path(__file__).parents[1] / "src/tidings/wire/vectors"
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def answer_schema() -> dict[str, Any]:
    """JSON Schema of every answer that is not a refusal, by `<service> <do> answer`, and of what they are made of."""
    kinds = [each.answer for each in OPERATIONS.values()]
    references, parts = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    said = {"description": "besides `ok`, which is true"}
    return parts | {f"{name} answer": {**said, **each} for name, each in zip(OPERATIONS, references, strict=True)}


def control_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of every control request, by `<service> <do>`, and of what they are made of."""
    op = {"type": "string", "minLength": 8, "maxLength": 64, "description": "chosen by the caller"}
    found: dict[str, Any] = {}
    for each in OPERATIONS.values():
        _, parts = msgspec.json.schema_components([each.request], ref_template="#/$defs/{name}")
        fields = parts.pop(each.request.__name__)
        found |= parts
        found[each.name] = {
            "title": each.name,
            "description": each.summary,
            "type": "object",
            "properties": {"op": op, "do": {"const": each.verb}, **fields["properties"]},
            "required": ["op", "do", *fields["required"]],
            "additionalProperties": False,
        }
    return found


def message_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a message payload."""
    (root,), definitions = msgspec.json.schema_components([Message], ref_template="#/$defs/{name}")
    message = definitions["Message"]
    message["description"] = "What one agent says: strict JSON of at most 256 KiB. Unknown fields are ignored."
    del message["properties"]["raw"]
    # OpenAPI's `discriminator` would rule out kinds that are not in its mapping.
    del message["properties"]["parts"]["items"]["discriminator"]
    definitions["ExtensionPart"] = {
        "title": "ExtensionPart",
        "description": "A part of a kind we do not know, named in reverse-DNS style: kept verbatim, ignored.",
        "type": "object",
        "properties": {"kind": {"type": "string", "maxLength": 128, "pattern": EXTENSION_KIND}},
        "required": ["kind"],
    }
    return {"$schema": DIALECT, "title": "Tidings message", **root, "$defs": definitions}


def contents() -> dict[str, str]:
    """File name to text, exactly as it belongs into the package."""
    return {
        "message.schema.json": _text(message_schema()),
        "control.schema.json": _text(
            {"$schema": DIALECT, "title": "Tidings control requests", "$defs": control_schema() | answer_schema()}
        ),
        "vectors.json": _text(vectors()),
    }


def regenerate(folder: Path = FOLDER) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in contents().items():
        (folder / name).write_text(text, encoding="utf-8")


def _text(document: dict[str, Any]) -> str:
    # ASCII, because the vectors hold control characters and byte order marks that editors would hide or change
    return json.dumps(document, indent=1, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    regenerate()
