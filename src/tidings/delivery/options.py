"""Options of the `nats` source and sink as Spark hands them over: texts under names whose case does not count.

A name nobody knows is refused with the names that are known: a misspelt limit would otherwise be no limit. What a
refusal prints of a value is never the value of an option that may hold a secret.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tidings.errors import UsageError

#: what Spark adds for itself
SPARKS_OWN = frozenset({"path", "checkpointlocation", "queryname"})
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class GivenOptions:
    """What was given to one `part` ("source" or "sink"), all of it known."""

    def __init__(self, given: Mapping[str, str], known: Iterable[str], part: str) -> None:
        self._part = part
        self._given = {key.lower(): value for key, value in given.items() if key.lower() not in SPARKS_OWN}
        names = {name.lower(): name for name in known}
        if unknown := sorted(key for key in given if key.lower() in self._given.keys() - names.keys()):
            raise UsageError(
                f"the nats {part} has no option {', '.join(unknown)}: it has {', '.join(sorted(names.values()))}"
            )

    def text(self, *names: str) -> str | None:
        """The value under the first of these names that has one; they are the same option, so one is enough."""
        found = [name for name in names if self._given.get(name.lower())]
        if len(found) > 1:
            raise UsageError(f"the options {' and '.join(found)} say the same thing: give one of them")
        return self._given[found[0].lower()] if found else None

    def needed(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise UsageError(f"the nats {self._part} needs the option {name!r}")
        return value

    def number(self, *names: str, least: int = 1) -> int | None:
        text = self.text(*names)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise UsageError(f"option {names[0]} is {text!r}: a whole number from {least} on is needed")
        return int(text)

    def size(self, *names: str) -> int | None:
        """Bytes: a number, or one with k, m or g behind it."""
        text = self.text(*names)
        if text is None:
            return None
        digits, unit = (text[:-1], text[-1].lower()) if text[-1:].isalpha() else (text, "")
        if not (digits.isascii() and digits.isdigit()) or unit not in _UNITS or not int(digits):
            raise UsageError(f"option {names[0]} is {text!r}: bytes are needed, such as 67108864 or 64m")
        return int(digits) * _UNITS[unit]

    def choice(self, name: str, values: Sequence[str]) -> str:
        """One of the values; the first is the default."""
        text = self.text(name)
        if text is not None and text not in values:
            raise UsageError(f"option {name} is {text!r}: one of {', '.join(values)}")
        return text or values[0]
