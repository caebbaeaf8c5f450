"""S1: what another user of this machine could do to the programs of a space. Loopback and `/proc` belong to everybody.

Every port that broker, steward, supervisor and pipeline listen on is tried without any secret (`neighbour.py`), as
another user where this process may become one (root, or `sudo -n`). Where it may not, the ports are tried as this user,
because they do not know who connects, and the evidence says what was not tried.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidings.admin.home import SpaceHome
from tidings.util.private_files import lock_pid
from tidings_testing.security import neighbour
from tidings_testing.security.report import Collection, ProbeOutcome, broken, refused
from tidings_testing.security.stage import Stage

PROBES = Collection()
#: by custom nobody's; it needs no entry in any file
NOBODY = 65_534
WITHIN = 60.0
_LISTENING = "0A"


@dataclass(frozen=True, slots=True)
class AttackSurface:
    """What a space shows to the machine: its processes, and the ports they listen on."""

    pids: list[int]
    ports: dict[int, int]


def surface(home: SpaceHome) -> AttackSurface:
    """Of every process of a space on this machine; empty where there is no `/proc`."""
    state = home.read_state()
    known = [state.get("pid"), state.get("broker_pid"), state.get("steward_pid"), lock_pid(home.up_lock)]
    known += [(state.get("pipeline") or {}).get("pid"), _broker_pid(home)]
    sessions = {pid for pid in known if isinstance(pid, int) and pid != os.getpid()}
    return surface_of([pid for pid in _processes() if pid in sessions or _session(pid) in sessions])


def surface_of(pids: Iterable[int]) -> AttackSurface:
    owners = {inode: pid for pid in sorted(pids) for inode in _sockets(pid)}
    return AttackSurface(sorted(pids), {port: owners[inode] for port, inode in _listening() if inode in owners})


def _broker_pid(home: SpaceHome) -> int | None:
    try:
        return int((home.run / "broker.pid").read_text())
    except (OSError, ValueError):
        return None


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _session(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])
    except (OSError, IndexError, ValueError):
        return None


def _sockets(pid: int) -> list[str]:
    try:
        targets = [_target(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:  # it ended, or is not ours to look into
        return []
    return [match[1] for target in targets if (match := re.fullmatch(r"socket:\[([0-9]+)\]", target))]


def _target(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:  # closed meanwhile
        return ""


def _listening() -> list[tuple[int, str]]:
    found = []
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        rows = [line.split() for line in lines]
        found += [(int(row[1].rpartition(":")[2], 16), row[9]) for row in rows if row[3] == _LISTENING]
    return found


def secrets_of(home: SpaceHome) -> list[str]:
    """Folders and files that are nobody else's."""
    folders = (home.home, home.root, home.keys, home.creds, home.checkpoint, home.lake, home.run, home.logs, home.store)
    return [str(path) for path in (*folders, home.pipeline_creds, home.link_creds, home.run / "spark", home.info_path)]


@PROBES.probe("S1", "As another user of the machine, use what the space's programs listen on, or read their files.")
async def another_user(stage: Stage) -> ProbeOutcome:
    found = surface(stage.home)
    if not found.pids:
        return refused("the programs of this space do not run on this machine, or it has no /proc: nothing to try")
    told = await attack(found, secrets_of(stage.home))
    if told["found"]:
        return broken("; ".join(told["found"][:5]))
    tried = f"{len(found.ports)} ports of {len(found.pids)} processes, {len(neighbour.ATTACKS)} attacks on each"
    if told["uid"] == os.getuid():
        return refused(
            f"{tried}, as this user; files and environments were not tried as another one: that takes root or `sudo -n`"
        )
    return refused(f"{tried}, as user {told['uid']}; files, environments and command lines keep their secrets")


async def attack(found: AttackSurface, files: list[str]) -> dict[str, Any]:
    """Run the neighbour. Answers what it found, and as whom it ran."""
    asked = {"ports": list(found.ports), "pids": found.pids, "files": files}
    for before, uid in _ways():
        command = [*before, sys.executable, "-I", neighbour.__file__]
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
        try:
            async with asyncio.timeout(WITHIN):
                said, complaint = await child.communicate(json.dumps(asked | {"uid": uid}).encode())
        except BaseException:
            child.kill()
            await child.wait()
            raise
        if child.returncode == 0:
            return dict(json.loads(said))
    raise RuntimeError(f"the other user could not begin: {complaint.decode(errors='replace').strip()[-200:]}")


def _ways() -> list[tuple[list[str], int]]:
    """How to become somebody else here, best first; the last way is not to."""
    if os.geteuid() == 0:
        return [([], NOBODY)]
    sudo = shutil.which("sudo")
    return [*([([sudo, "-n"], NOBODY)] if sudo else []), ([], 0)]
