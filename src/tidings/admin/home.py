"""Where a space lives on disk, and `space.toml`, its public face.

<home>/spaces/<S>/space.toml      what anyone of this user may know: ids, port, steward's public key
                  keys/           operator and account seeds: admin processes only
                  creds/          one creds file per role; creds/agents/: one per agent
                  agents/         <name>.md, and issued/<id>.json: what was granted, the source of revocations;
                                  invited/<id>.json: what was promised, to whoever has a line
                  links/          <link>.json: what was agreed with which space; peers/: how its broker is reached;
                                  accepting/: links that are not agreed yet
                  links.db        what came over links: the ledger of their worker
                  resolver/       account tokens as the broker serves them
                  js/             the broker's store
                  checkpoints/    deliver/: how far durable delivery is, and its debts
                  tls/            the certificate authority of the space, once other machines reach it
                  external/       what the administrator of a NATS that others run is to add for it
                  lake/           tables of what was delivered and what was quarantined
<home>/imported/<S>/<name>.json   agents of spaces elsewhere: bundles that `agent import` or `accept` took
<home>/accepting/<id>.json        keys whose invitation was not answered yet
<home>/marks/<S>.json             where the log was: outside of what is copied and put back, so that this is noticed
<home>/marks/<S>.issued/<id>/     rows of agents/issued once more, by the id of the space: what was taken stays taken
<home>/run/<S>/                   locks, pids, state of what runs
<home>/logs/<S>/                  broker.log, steward.log, pipeline.log, spark.log, links.log, up.log
"""

from __future__ import annotations

import base64
import json
import shutil
import tomllib
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tidings.errors import ConfigError, ConflictError, SpaceBusy, UsageError
from tidings.nats.address import Address, in_websocket, named, nearest, parse_addresses, shown, trusting
from tidings.server.certificate_files import CertificateFiles, server_name
from tidings.server.nats_server import greeting
from tidings.util.private_files import locked, private_dir, read_plain, write_private
from tidings.wire.names import check_space, is_token
from tidings.wire.subjects import Subjects

#: who signs the tokens of the accounts there: Tidings, with a key of the administrator's, or they themselves
SIGNING, SIGNED_ELSEWHERE = "signing", "signed elsewhere"
#: seconds within which servers that others run have on disk what they acknowledged, unless it is said
SYNC_ASSUMED = 120


@dataclass(frozen=True, slots=True)
class SpaceInfo:
    """What `space.toml` says."""

    name: str
    id: str
    agents_account: str
    system_account: str
    steward_key: str
    port: int
    budget: int
    epoch: str
    open: bool
    created: str
    #: of whoever was invited
    invite_account: str = ""
    #: of the workers of links
    link_account: str = ""
    #: which accounts and credentials it has (`admin/layout.py`)
    layout: int = 1
    #: the address on which other machines reach it; none: loopback only, and in plain
    listen: str = ""
    #: the certificate of its authority, in base64, once it has one
    authority: str = ""
    #: the certificate of the authority that will take its place, which bundles already trust
    authority_next: str = ""
    #: a certificate of somebody else's, its key, and the name it is for; none: the space is its own authority
    certificate: str = ""
    certificate_key: str = ""
    certificate_name: str = ""
    #: the address on which it takes websockets, with TLS, and their port; none: it takes none
    ws: str = ""
    ws_port: int = 0
    #: the servers of a NATS that others run, with commas between; none: a broker of its own
    servers: str = ""
    #: who signs the tokens of its accounts there (`admin/external.py`); none: its own operator
    mode: str = ""
    #: of every stream: three on a cluster
    replicas: int = 1
    #: seconds after which those servers have on disk what they acknowledged, as their administrator says
    sync_seconds: int = SYNC_ASSUMED

    @property
    def host(self) -> str:
        """How this machine reaches its broker."""
        return nearest(self.listen or "127.0.0.1")

    @property
    def url(self) -> str:
        """Where this machine's programs find the broker, and whom they trust there."""
        return self.servers or self.url_at(self.host)

    @property
    def address(self) -> str:
        """The same for people."""
        return shown(self.url)

    @property
    def addresses(self) -> str:
        """The same, and where it takes websockets."""
        return f"{self.address} and {self.ws_address}" if self.ws else self.address

    @property
    def ws_address(self) -> str:
        return shown(self.ws_url_at(nearest(self.ws))) if self.ws else ""

    def url_at(self, host: str) -> str:
        """The same broker by another name or address of its machine."""
        return self._trusted_at(host, self.port) if self.listen else Address(host, self.port).url

    def ws_url_at(self, host: str) -> str:
        """The same inside of a websocket."""
        return in_websocket(self._trusted_at(host, self.ws_port))

    def _trusted_at(self, host: str, port: int) -> str:
        if self.certificate:
            return named(host, port, self.certificate_name)
        return trusting(host, port, self.trusted, server_name(self.name))

    @property
    def trusted(self) -> bytes:
        """Whose certificates its clients accept, in DER: one authority's, or two while another takes its place."""
        own = (self.listen or self.ws) and not self.certificate
        return base64.b64decode(self.authority) + base64.b64decode(self.authority_next) if own else b""

    def greeting(self) -> dict[str, object] | None:
        """What the broker greets with, or None if nobody does."""
        if self.servers:
            return greeted(self.servers)
        return greeting(self.port, host=self.host, tls=bool(self.listen))

    @property
    def subjects(self) -> Subjects:
        return Subjects(self.name)


def greeted(servers: str) -> dict[str, object] | None:
    """What the first of these servers that answers greets with."""
    said = (greeting(each.port, host=each.host, tls=each.tls_first) for each in parse_addresses(servers))
    return next((each for each in said if each is not None), None)


class SpaceHome:
    """The directories of one space."""

    def __init__(self, home: Path, name: str) -> None:
        self.home = home
        self.name = check_space(name)
        self.root = home / "spaces" / name
        self.info_path = self.root / "space.toml"
        self.keys = self.root / "keys"
        self.creds = self.root / "creds"
        self.agent_creds_dir = self.creds / "agents"
        self.agents = self.root / "agents"
        self.issued = self.agents / "issued"
        self.invited = self.agents / "invited"
        self.linked = self.root / "links"
        #: how the spaces it takes something from are reached (`admin/link_peers.py`)
        self.link_peers = self.linked / "peers"
        #: links that are being accepted (`admin/link_accepting.py`)
        self.link_accepting = self.linked / "accepting"
        self.link_store = self.root / "links.db"
        self.resolver = self.root / "resolver"
        self.store = self.root / "js"
        self.checkpoints = self.root / "checkpoints"
        self.checkpoint = self.checkpoints / "deliver"
        self.lake = self.root / "lake"
        self.certificates = CertificateFiles(self.root / "tls")
        self.pipeline_creds = self.creds / "pipeline.creds"
        self.link_creds = self.creds / "link.creds"
        self.external = self.root / "external"
        #: the operator's key of where it moves to, until that is done (`admin/moving.py`)
        self.unfinished_move = self.keys / "operator.next.seed"
        self.watcher_creds = self.creds / "watcher.creds"
        self.marks = home / "marks" / f"{name}.json"
        #: where they lay once, inside of what a backup copies
        self.remembered = home / "marks" / f"{name}.issued"
        self.recalled = home / "marks" / f"{name}.recalled.json"
        self.run = home / "run" / name
        self.logs = home / "logs" / name
        self.up_lock = self.run / "up.lock"
        self.admin_lock = self.run / "admin.lock"
        self.state_path = self.run / "state.json"
        self.link_socket = self.run / "links.sock"

    @property
    def exists(self) -> bool:
        return self.info_path.exists()

    def make(self) -> None:
        for path in (
            self.home,
            self.root,
            self.keys,
            self.creds,
            self.agent_creds_dir,
            self.agents,
            self.issued,
            self.checkpoints,
            self.checkpoint,
            self.lake,
            self.marks.parent,
            self.run,
            self.logs,
        ):
            private_dir(path)

    def agent_creds(self, name: str) -> Path:
        """Agents have a folder of their own: whatever one is called, it is not a role's credential."""
        return self.agent_creds_dir / f"{name}.creds"

    def imported(self, name: str) -> Path:
        """Where the bundle of an agent from elsewhere is kept."""
        return self.home / "imported" / self.name / f"{name}.json"

    def imports(self) -> list[str]:
        """Names of the agents that were imported from a space elsewhere which is called like this one."""
        return sorted(path.stem for path in (self.home / "imported" / self.name).glob("*.json"))

    def check_free(self) -> None:
        """May a space of this name be made here? Agents that were imported under it would no longer be found."""
        if not self.exists and (names := self.imports()):
            raise ConflictError(
                f"agents of another space {self.name} were imported into {self.home} ({', '.join(names)}): choose "
                "another name (`tidings up --space NAME`), or forget them "
                f"(`tidings agent forget {names[0]} --space {self.name}`)"
            )

    def read_info(self, instead: str = "") -> SpaceInfo:
        """`instead`: what to do if there is no such space, where making one is no advice."""
        try:
            found = tomllib.loads(read_plain(self.info_path))
            return SpaceInfo(**{name: value for name, value in found.items() if name in SpaceInfo.__dataclass_fields__})
        except FileNotFoundError:
            advice = instead or f"create it with `tidings up --space {self.name}`"
            if names := self.imports():
                advice = (
                    f"agents of it were imported ({', '.join(names)}), and it runs elsewhere. Ask there for its "
                    f"status; here one can be these agents: `tidings who --space {self.name} --as {names[0]}`"
                )
            raise UsageError(f"there is no space {self.name!r} in {self.home}: {advice}") from None
        except (PermissionError, NotADirectoryError) as error:
            raise ConfigError(f"cannot read {self.info_path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, TypeError) as error:
            raise ConfigError(f"{self.info_path} is damaged: {error}") from error

    def write_info(self, info: SpaceInfo) -> None:
        # what nobody chose is not written
        chosen = [each.name for each in fields(SpaceInfo) if getattr(info, each.name) != each.default]
        lines = [f"{name} = {_toml(getattr(info, name))}" for name in chosen]
        write_private(self.info_path, "# written by tidings\n" + "\n".join(lines) + "\n")

    def update_info(self, **changes: Any) -> SpaceInfo:
        info = replace(self.read_info(), **changes)
        self.write_info(info)
        return info

    def read_state(self) -> dict[str, Any]:
        """What the supervisor last wrote about itself; empty when it never ran."""
        try:
            found = json.loads(self.state_path.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def write_state(self, state: dict[str, Any]) -> None:
        write_private(self.state_path, json.dumps(state, indent=1) + "\n")

    def remove(self) -> None:
        """Delete everything of this space. Refused while it runs."""
        private_dir(self.run)
        with ExitStack() as held:
            for lock in (self.up_lock, self.admin_lock):
                try:
                    held.enter_context(locked(lock, f"removing space {self.name}", wait=0.5))
                except SpaceBusy as error:
                    raise SpaceBusy(f"space {self.name} is in use: {error}; `tidings down` first") from error
            for marks in self.marks.parent.glob(f"{self.name}.*json*"):
                marks.unlink()
            for path in (self.root, self.remembered, self.logs, self.run):
                if path.exists():
                    shutil.rmtree(path)


def list_spaces(home: Path) -> list[str]:
    folder = home / "spaces"
    if not folder.is_dir():
        return []
    return sorted(path.parent.name for path in folder.glob("*/space.toml") if is_token(path.parent.name))


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else json.dumps(value)
