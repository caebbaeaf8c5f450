"""Control requests that a typed client cannot express: unknown operations and fields, wrong types, forged arguments."""

from __future__ import annotations

import json
from typing import Any

from tidings.rpc.control import ControlClient, decode_refusal
from tidings.wire.message import new_id


async def raw_call(control: ControlClient, service: str, do: str, /, **arguments: Any) -> dict[str, Any]:
    """Sends these arguments unchecked and returns the fields of the answer. Raises the error that the steward named."""
    body = json.dumps({"op": new_id(), "do": do, **arguments}).encode()
    data = await control.exchange(name := f"{service} {do}", body)
    answer: dict[str, Any] = json.loads(data)
    if answer.get("ok"):
        return answer
    raise decode_refusal(name, data)
