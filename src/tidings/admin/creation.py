"""A space is made: its keys, its credentials, `space.toml`, and from that the configuration of its broker."""

from __future__ import annotations

import os
import uuid
from datetime import UTC, datetime
from pathlib import Path

from tidings.admin.home import SpaceHome, SpaceInfo
from tidings.admin.layout import LAYOUT, lay_out
from tidings.server.config import BrokerConfig
from tidings.server.keyring import Keyring
from tidings.server.nats_server import free_port
from tidings.server.streams import default_budget, storage_needed
from tidings.util.private_files import locked, write_private
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import SECRET_BYTES


def create_space(
    home: SpaceHome, *, port: int | None, open_space: bool, budget: int | None, servers: str = ""
) -> SpaceInfo:
    """Keys, credentials and `space.toml`, which is written last: a space exists when it is complete.

    `servers`: those of a NATS that others run, on which it is to live.
    """
    home.check_free()
    home.make()
    with locked(home.admin_lock, f"creating space {home.name}", wait=30):
        if home.exists:
            return home.read_info()
        keyring = Keyring.create(home.keys)
        signing = _make_steward_secrets(home)
        lay_out(home, keyring)
        info = SpaceInfo(
            name=home.name,
            id=keyring.core.id,
            agents_account=keyring.agents.id,
            invite_account=keyring.invite.id,
            link_account=keyring.link.id,
            system_account=keyring.system.id,
            steward_key=signing.id,
            port=port or free_port(),
            budget=budget or default_budget(home.root),
            epoch=str(uuid.uuid4()),
            open=open_space,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            layout=LAYOUT,
            servers=servers,
        )
        write_broker_files(home, keyring, info)
        home.write_info(info)
        return info


def _make_steward_secrets(home: SpaceHome) -> KeyPair:
    user, signing = KeyPair.generate(), KeyPair.generate()
    write_private(home.creds / "steward.user", user.seed + "\n")
    write_private(home.creds / "steward.key", signing.seed + "\n")
    write_private(home.creds / "space.secret", os.urandom(SECRET_BYTES).hex() + "\n")
    return signing


def write_broker_files(home: SpaceHome, keyring: Keyring, info: SpaceInfo) -> None:
    """The operator's token is public; the supervisor renders the broker's configuration from it without any key."""
    write_private(home.root / "operator.jwt", keyring.operator_token(info.name))


def broker_config(home: SpaceHome, info: SpaceInfo) -> BrokerConfig:
    return BrokerConfig(
        subjects=info.subjects,
        port=info.port,
        operator_token=(home.root / "operator.jwt").read_text().strip(),
        system_account=info.system_account,
        store=home.store,
        resolver=home.resolver,
        log_file=home.logs / "broker.log",
        pid_file=home.run / "broker.pid",
        max_file_store=storage_needed(info.budget),
        host=info.listen or "127.0.0.1",
        certificate=_certificate(home, info) if info.listen else None,
        websocket=(info.ws, info.ws_port) if info.ws else None,
        websocket_certificate=_certificate(home, info) if info.ws else None,
    )


def _certificate(home: SpaceHome, info: SpaceInfo) -> tuple[Path, Path]:
    if info.certificate:
        return Path(info.certificate), Path(info.certificate_key)
    return home.certificates.server, home.certificates.server_key
