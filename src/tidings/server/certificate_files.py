"""Where the certificates of a space lie, and the name they are for. `certificates.py` makes them, and loads more."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def server_name(space: str) -> str:
    """What a broker's certificate is for, wherever it runs: the space, as far as it is a label of such a name."""
    label = space if _LABEL.fullmatch(space) else f"space-{hashlib.sha256(space.encode()).hexdigest()[:16]}"
    return f"{label}.tidings.internal"


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Below the folder of a space. `server` has the authority's certificate behind the broker's own."""

    folder: Path

    @property
    def following(self) -> CertificateFiles:
        """Those of the authority that will take this one's place."""
        return CertificateFiles(self.folder / "next")

    @property
    def authority_key(self) -> Path:
        return self.folder / "authority.key"

    @property
    def authority(self) -> Path:
        return self.folder / "authority.pem"

    @property
    def server_key(self) -> Path:
        return self.folder / "server.key"

    @property
    def server(self) -> Path:
        return self.folder / "server.pem"
