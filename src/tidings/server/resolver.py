"""Account tokens on the broker: written while it is down, pushed while it runs, read back always.

The server takes an *older* token without complaint, which would undo a revocation. So a token is derived afresh
under the space's admin lock, pushed, and read back; nobody edits one.
"""

from __future__ import annotations

import json
from pathlib import Path

from tidings.errors import BrokerFailed
from tidings.nats.client import Connection
from tidings.nats.errors import NatsError
from tidings.util.private_files import private_dir, write_private


def write_tokens(folder: Path, tokens: dict[str, str]) -> None:
    """Write the tokens a broker finds at its next start."""
    private_dir(folder)
    for account, token in tokens.items():
        write_private(folder / f"{account}.jwt", token)


async def push_token(system: Connection, account: str, token: str) -> None:
    """Give the broker an account token; returns once it serves exactly this one."""
    try:
        reply = await system.request("$SYS.REQ.CLAIMS.UPDATE", token.encode(), timeout=5)
        said = json.loads(reply.data)
        if said.get("data", {}).get("code") != 200:
            raise BrokerFailed(f"the broker refused the token of account {account}: {said.get('error') or said}")
        served = await system.request(f"$SYS.REQ.ACCOUNT.{account}.CLAIMS.LOOKUP", b"", timeout=5)
    except (TimeoutError, NatsError) as error:
        raise BrokerFailed(f"the broker did not take the token of account {account} ({error})") from error
    if served.data.decode() != token:
        raise BrokerFailed(f"the broker serves another token for account {account} than the one just pushed")
