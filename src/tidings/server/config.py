"""The configuration file of a space's nats-server. Generated at every start, never edited.

Loopback only, unless other machines are to reach it: then everybody speaks TLS to it, the handshake first, and nobody
is let in without; websockets have a port of their own, with TLS always. No monitoring port (it has no authentication);
no `max_age` anywhere; one second between syncs, so that a power cut loses at most what the outbox still holds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from tidings.nats.address import Address
from tidings.wire.subjects import Subjects

SYNC_SECONDS = 1
RESERVE = 64 * 1024 * 1024
LOG_FILE_BYTES = 16 * 1024 * 1024
LOG_FILES = 4
MAX_CONNECTIONS = 20_000
#: What the broker keeps for a connection that does not read before it cuts it. Whoever asks for much at once (a pull, a
#: page) asks for at most half of this, so that only those are cut who do not read.
MAX_PENDING = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    subjects: Subjects
    port: int
    operator_token: str
    system_account: str
    store: Path
    resolver: Path
    log_file: Path
    pid_file: Path
    max_file_store: int
    #: the address it listens on; one that others reach needs a certificate and its key
    host: str = "127.0.0.1"
    certificate: tuple[Path, Path] | None = None
    #: address and port on which it takes websockets, and the certificate shown there
    websocket: tuple[str, int] | None = None
    websocket_certificate: tuple[Path, Path] | None = None
    sync_seconds: int = SYNC_SECONDS

    @property
    def shown(self) -> tuple[Path, Path] | None:
        """The certificate that others see, and its key."""
        return self.certificate or self.websocket_certificate

    @property
    def server_name(self) -> str:
        return f"tidings-{self.subjects.space}"

    def _tls(self) -> str:
        return f"{_tls(self.certificate, 'handshake_first: true')}\n" if self.certificate else ""

    def _websocket(self) -> str:
        """Never in plain, and not for pages of other sites in somebody's browser."""
        if self.websocket is None:
            return ""
        assert self.websocket_certificate is not None, "others reach it, and in plain"
        rules = f"listen: {json.dumps(str(Address(*self.websocket)))}, same_origin: true"
        # whoever connects and says nothing is let go, as on the other port; the broker's files need the descriptors
        rules += ', handshake_timeout: "3s"'
        return f"websocket {{ {rules}, {_tls(self.websocket_certificate)} }}\n"

    def render(self) -> str:
        quoted = json.dumps
        assert self.certificate is not None or ip_address(self.host).is_loopback, "others reach it, and in plain"
        return f"""# written by tidings at every start; changes here are lost
server_name: {quoted(self.server_name)}
listen: {quoted(str(Address(self.host, self.port)))}
{self._tls()}{self._websocket()}operator: {self.operator_token}
system_account: {self.system_account}
resolver {{ type: full, dir: {quoted(str(self.resolver))}, allow_delete: false }}
# an agent's token travels in its CONNECT line
max_control_line: 65536
max_payload: 1048576
max_pending: {MAX_PENDING}
max_connections: {MAX_CONNECTIONS}
ping_interval: "20s"
ping_max: 2
write_deadline: "5s"
pid_file: {quoted(str(self.pid_file))}
log_file: {quoted(str(self.log_file))}
logfile_size_limit: {LOG_FILE_BYTES}
logfile_max_num: {LOG_FILES}
jetstream {{
  store_dir: {quoted(str(self.store))}
  max_file_store: {self.max_file_store}
  max_memory_store: 67108864
  sync_interval: "{self.sync_seconds}s"
}}
# the reply of a delivered message keeps the layout our clients parse
feature_flags {{ js_ack_fc_v2: false }}
"""


def _tls(files: tuple[Path, Path], *more: str) -> str:
    certificate, key = (json.dumps(str(path)) for path in files)
    rules = ", ".join(["timeout: 3", 'min_version: "1.3"', *more])
    return f"tls {{ cert_file: {certificate}, key_file: {key}, {rules} }}"
