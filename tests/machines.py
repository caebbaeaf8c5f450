"""Machines on one machine: network namespaces with an address each, and a switch between them whose cables can be bad.

    with Lan("server", "laptop") as lan:
        lan["laptop"].terminal(tmp_path).run("send", "general", "hello")
        lan["laptop"].pull_cable()

Needs the rights to make namespaces, and `ip`; `why_not` says what is missing. Nothing leaves the namespaces. Delay and
loss are the fault proxy's part: not every kernel has netem.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

from terminal import TIDINGS, Terminal

#: addresses of the machines, in namespaces that nothing else is in
NETWORK = "10.213.7"
_IP = shutil.which("ip") or "/usr/sbin/ip"


def why_not() -> str:
    """Why there can be no machines here; empty if there can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if not Path(_IP).exists():
        return "`ip` is not installed (Debian: iproute2)"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return "" if probe.returncode == 0 else f"no network namespaces here: {probe.stderr.strip()}"


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


class Machine:
    """A namespace with one address, at a port of the switch."""

    def __init__(self, lan: Lan, name: str, number: int) -> None:
        self.lan, self.name = lan, name
        self.namespace = f"{lan.prefix}-{name}"
        self.address = f"{NETWORK}.{number}"
        #: its end of the cable, and the switch's
        self._own, self._port = f"eth{number}", f"port{number}"

    def make(self) -> None:
        _do(_IP, "netns", "add", self.namespace)
        peer = ("peer", "name", self._own, "netns", self.namespace)
        self.lan.at_switch(_IP, "link", "add", self._port, "type", "veth", *peer)
        self.lan.at_switch(_IP, "link", "set", self._port, "master", "switch", "up")
        self._inside(_IP, "link", "set", "lo", "up")
        self._inside(_IP, "link", "set", self._own, "up")
        self._inside(_IP, "address", "add", f"{self.address}/24", "dev", self._own)

    def remove(self) -> None:
        subprocess.run([_IP, "netns", "delete", self.namespace], capture_output=True, check=False)

    def prefix(self) -> tuple[str, ...]:
        """In front of a command that is to run on this machine."""
        return (_IP, "netns", "exec", self.namespace)

    def _inside(self, *words: str) -> None:
        _do(*self.prefix(), *words)

    def terminal(self, root: Path) -> MachineTerminal:
        return MachineTerminal(self, root)

    # --- what becomes of its cable ---

    def pull_cable(self) -> None:
        """Packets vanish both ways; no connection is told."""
        self.lan.at_switch(_IP, "link", "set", self._port, "down")

    def plug_in(self) -> None:
        self.lan.at_switch(_IP, "link", "set", self._port, "up")

    def moves_to(self, number: int) -> None:
        """It has another address from now on; connections to the one before hear nothing more."""
        before, self.address = self.address, f"{NETWORK}.{number}"
        self._inside(_IP, "address", "delete", f"{before}/24", "dev", self._own)
        self._inside(_IP, "address", "add", f"{self.address}/24", "dev", self._own)


class Lan:
    """Machines by their names, and the switch between them."""

    def __init__(self, *names: str) -> None:
        self.prefix = f"td{os.getpid()}"
        self._switch = f"{self.prefix}-switch"
        self.machines = {name: Machine(self, name, number) for number, name in enumerate(names, start=1)}

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def at_switch(self, *words: str) -> None:
        _do(_IP, "netns", "exec", self._switch, *words)

    def __enter__(self) -> Lan:
        try:
            _do(_IP, "netns", "add", self._switch)
            self.at_switch(_IP, "link", "add", "switch", "type", "bridge")
            self.at_switch(_IP, "link", "set", "switch", "up")
            for machine in self.machines.values():
                machine.make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for machine in self.machines.values():
            machine.remove()
        subprocess.run([_IP, "netns", "delete", self._switch], capture_output=True, check=False)


class MachineTerminal(Terminal):
    """Commands typed at one of the machines."""

    def __init__(self, machine: Machine, root: Path) -> None:
        super().__init__(root / machine.name)
        self.machine = machine

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.typed(*words, **env)

    def typed(self, *words: str, text: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; `text` is what it reads."""
        command = [*self.machine.prefix(), *TIDINGS, *words]
        return subprocess.run(
            command, env=self.env | env, input=text or "", capture_output=True, text=True, timeout=120, check=False
        )

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        command = [*self.machine.prefix(), *TIDINGS, *words]
        return subprocess.Popen(command, env=self.env | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
