"""How a user of a space proves to the broker who it is."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from tidings.nats.core import Auth
from tidings.nats.errors import AuthRefused
from tidings.wire.keys import KeyPair


def signed(token: str, key: KeyPair) -> Auth:
    """The token, and the server's nonce signed by the key that it names."""

    def answer(info: Mapping[str, Any]) -> dict[str, str]:
        nonce = info.get("nonce")
        if not isinstance(nonce, str) or not nonce:
            raise AuthRefused("this server asks for no proof: it is not the broker of a space")
        signature = base64.urlsafe_b64encode(key.sign(nonce.encode())).rstrip(b"=")
        return {"jwt": token, "sig": signature.decode()}

    return answer
