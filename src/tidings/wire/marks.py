"""What tells a record of the log from another one at the same sequence; pure.

A log that was set back, by a power cut or a restored copy, uses its sequences again. Whoever remembers a sequence
remembers the mark of the record that was there, and sees by itself that another one is there now. A stamp is a mark
with the epoch of the log and the steward's proof that it said so: only a stamp convinces the steward itself.
"""

from __future__ import annotations

import hashlib

import msgspec


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """At `seq` was the record with this mark. `epoch` and `proof` are empty if nobody but the reader says so."""

    seq: int
    mark: str
    epoch: str = ""
    proof: str = ""

    @property
    def proved_text(self) -> str:
        """What the proof is made of; no name or pattern can be equal to it."""
        return f"stamp\n{self.epoch}\n{self.seq}\n{self.mark}"


def record_mark(time_ns: int, subject: str, payload: bytes) -> str:
    digest = hashlib.blake2b(f"{time_ns}\n{subject}\n".encode(), digest_size=10)
    digest.update(payload)
    return digest.hexdigest()
