"""Somebody who runs a NATS of their own, with tenants: an operator, a system account, a signing key, three servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tidings.nats import jwt
from tidings.nats.client import Connection, connect
from tidings.nats.jetstream_blocking import WorkerConnection
from tidings.server import grants
from tidings.server.config import BrokerConfig
from tidings.util.private_files import write_private
from tidings.wire.signing import ACCOUNT, OPERATOR, KeyPair
from tidings.wire.subjects import Subjects
from tidings_testing.cluster import Cluster


@dataclass
class Administrator:
    """Has every right on the servers, and gives Tidings as little as it needs."""

    folder: Path
    operator: KeyPair
    signing: KeyPair
    system: KeyPair
    cluster: Cluster

    @property
    def url(self) -> str:
        return self.cluster.urls

    def put(self, token: str) -> None:
        """Into the resolvers of all servers."""
        key = KeyPair.generate()
        creds = self.folder / "admin.creds"
        creds.write_text(jwt.credentials(jwt.user_jwt(self.system, key.id, "admin", None), key))
        connection = WorkerConnection.open(self.cluster.nodes[0].url, creds)
        try:
            said = json.loads(connection.request("$SYS.REQ.CLAIMS.UPDATE", token.encode()).payload)
            if "error" in said:
                raise ValueError(said["error"]["description"])
        finally:
            connection.close()

    def put_all(self, written: Path) -> None:
        """What Tidings wrote beside its instructions."""
        for path in written.glob("*.jwt"):
            self.put(path.read_text())

    def sign(self, claims: Path) -> None:
        """Sign what Tidings only described, and put it into the resolvers."""
        said = json.loads(claims.read_text())
        nats = {name: value for name, value in said["nats"].items() if name != "version"}
        self.put(jwt.encode(self.operator, said["sub"], said["name"], nats))

    def keys_for(self, *accounts: str) -> tuple[str, str]:
        """Files: the operator signing key, and a user that may push the tokens of these accounts."""
        key, path, creds = KeyPair.generate(), self.folder / "signing.nk", self.folder / "push.creds"
        write_private(path, self.signing.seed + "\n")
        words = [f"$SYS.REQ.ACCOUNT.{account}.CLAIMS.{verb}" for account in accounts for verb in ("UPDATE", "LOOKUP")]
        allowed = jwt.Permissions(words, [grants.inbox(key.id)])
        write_private(creds, jwt.credentials(jwt.user_jwt(self.system, key.id, "push", allowed), key))
        return str(path), str(creds)

    async def tenant(self, name: str, imports: Callable[[str], Sequence[jwt.Claims]]) -> Connection:
        """Another account of these servers, given its id, with a user of every right in it, connected."""
        account, user = KeyPair.generate(ACCOUNT), KeyPair.generate()
        self.put(jwt.account_jwt(self.operator, account.id, jwt.AccountSpec(name, imports=imports(account.id))))
        token = jwt.user_jwt(account, user.id, name, None)
        return await connect(self.url, jwt.credentials(token, user), user.id, name=name, reconnect=False)


@contextmanager
def administered(folder: Path, count: int = 3, *, control_line: int = 65_536) -> Iterator[Administrator]:
    operator, signing = KeyPair.generate(OPERATOR), KeyPair.generate(OPERATOR)
    system = KeyPair.generate(ACCOUNT)
    resolver = folder / "resolver"
    resolver.mkdir(parents=True)
    (resolver / f"{system.id}.jwt").write_text(jwt.account_jwt(operator, system.id, jwt.AccountSpec("SYS")))
    claims = {"type": "operator", "system_account": system.id, "signing_keys": [signing.id]}
    alone = BrokerConfig(
        subjects=Subjects("theirs"),
        port=0,
        operator_token=jwt.encode(operator, operator.id, "their operator", claims),
        system_account=system.id,
        store=folder,
        resolver=resolver,
        log_file=folder,
        pid_file=folder,
        max_file_store=4 * 1024**3,
    )
    cluster = Cluster.of(alone, folder, count, more=f"max_control_line: {control_line}\n")
    cluster.start()
    try:
        yield Administrator(folder, operator, signing, system, cluster)
    finally:
        cluster.stop()
