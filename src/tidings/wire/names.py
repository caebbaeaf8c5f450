"""Names, patterns and their grammar. A name that does not fit is refused, never rewritten.

Rewriting would alias: if `foo/bar` silently became "foo_bar", an access check on the raw name and a grant on the
rewritten one would speak of different channels.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from tidings.errors import InvalidName

MAX_TOKEN = 64
MAX_CHANNEL = 200
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_AGENT_ID = re.compile(r"U[A-Z2-7]{55}\Z")
#: a role of another space, by the id of that
_ROLE_ELSEWHERE = re.compile(r"([A-Za-z0-9_-]{1,64})@(A[A-Z2-7]{55})\Z")
#: as much of an id as models are shown of it (`mcp/ids.py`), or more
_ID_BEGINNING = re.compile(r"U[A-Z2-7]{11,55}\Z")


def is_token(text: str) -> bool:
    return _TOKEN.match(text) is not None


def check_token(text: str, what: str) -> str:
    """One subject token: letters, digits, `_` and `-`, at most 64 of them."""
    if not isinstance(text, str) or not is_token(text):
        raise InvalidName(f"{what} {text!r} is not allowed: use 1 to {MAX_TOKEN} of A-Z a-z 0-9 _ -")
    return text


def check_space(name: str) -> str:
    return check_token(name, "space name")


def check_role(name: str) -> str:
    if isinstance(name, str) and "@" in name:
        raise InvalidName(
            f"role {name[:132]!r} is not allowed: agents hold roles of their own space, whose names have no `@`; of a "
            "linked space a role can be asked (`tidings ask reviewer@acme`), and not held"
        )
    return check_token(name, "role")


def split_role(text: str) -> tuple[str, str]:
    """A role as people ask it, `reviewer` or `reviewer@acme`: its name, and what its space is called here, or empty."""
    role, at, space = text.partition("@") if isinstance(text, str) else (text, "", "")
    return check_token(role, "role"), check_token(space, "space name") if at else ""


def role_elsewhere(role: str, space_id: str) -> str:
    """How a task is addressed that goes to a role of another space: what its asker signs."""
    return f"{role}@{space_id}"


def role_parts(address: str) -> tuple[str, str]:
    """The role a task is addressed to, and the id of its space; empty if that is this one."""
    role, _, space_id = address.partition("@")
    return role, space_id


def is_role_address(text: str) -> bool:
    return is_token(text) or _ROLE_ELSEWHERE.match(text) is not None


def check_role_address(text: str) -> str:
    if not isinstance(text, str) or not is_role_address(text):
        raise InvalidName(f"{text!r} is no role: a name of A-Z a-z 0-9 _ -, or that with `@` and the id of a space")
    return text


def check_agent_name(name: str) -> str:
    """Agent names are tokens too: they become file names and are typed by people."""
    return check_token(name, "agent name")


#: what one letter can pass for; pairs first. Names are ASCII, so this is the whole alphabet that matters
_LOOKS_LIKE = (("rn", "m"), ("vv", "w"))
_ONE_LETTER = str.maketrans({"0": "o", "1": "l", "i": "l", "5": "s", "8": "b", "_": "-"})
#: who notices are from; an agent's id is a key, so this is nobody's
TIDINGS = "tidings"


def skeleton(name: str) -> str:
    """What a name looks like at a glance: two names of one skeleton can be taken for each other.

    NFKC and casefold, then `0` is `o`, `1` and `i` are `l`, `5` is `s`, `8` is `b`, `_` is `-`, `rn` is `m` and `vv` is
    `w`; `-` at either end is not seen.
    """
    text = unicodedata.normalize("NFKC", name).casefold()
    for pair, letter in _LOOKS_LIKE:
        text = text.replace(pair, letter)
    return text.translate(_ONE_LETTER).strip("-")


def lookalikes(name: str, others: Iterable[str]) -> list[str]:
    """Those of the other names that this one can be taken for, by their order."""
    alike = skeleton(name)
    return sorted(other for other in set(others) if other != name and skeleton(other) == alike)


def unfit_to_grant(name: str) -> str | None:
    """Why a name is not given to a new agent; None if it may be. Agents that have such a name keep it."""
    if name.startswith("-"):
        return "it begins with `-`, so a command line would take it for an option"
    if skeleton(name) == skeleton(TIDINGS):
        return "notices are from `tidings`, and this could be taken for it"
    if is_agent_id(name):
        return "it is the id of an agent, and an id is nobody's name"
    if _ID_BEGINNING.match(name):
        return "it reads like the beginning of an agent's id, and could be taken for that agent"
    return None


def is_agent_id(text: str) -> bool:
    """An agent's id is its nkey public key (`U` and 55 base32 characters)."""
    return _AGENT_ID.match(text) is not None


def check_agent_id(text: str) -> str:
    if not isinstance(text, str) or not is_agent_id(text):
        raise InvalidName(f"agent id {text!r} is not an nkey user key (U and 55 characters of A-Z 2-7)")
    return text


#: characters of an id that people are shown
SHOWN_OF_ID = 10


def short_id(key: str) -> str:
    """An id for people; the last character is in no name, so nobody can be called so."""
    return f"{key[:SHOWN_OF_ID]}…"


def foreign_name(name: str, agent_id: str, space: str, space_id: str) -> str:
    """Who said something in another space, for people here: `ada@acme`. No agent of this space can be called so.

    `name` is what the message says, and `space` what the link record calls the other space. What does not fit the
    grammar, or is missing, is shown as the beginning of an id.
    """
    return f"{name if is_token(name) else short_id(agent_id)}@{shown_space(space, space_id)}"


def shown_space(space: str, space_id: str) -> str:
    return space if is_token(space) else short_id(space_id)


@lru_cache(maxsize=4_096)
def is_channel(name: str) -> bool:
    return 0 < len(name) <= MAX_CHANNEL and all(is_token(token) for token in name.split("."))


def check_channel(name: str) -> str:
    """A channel is one or more tokens joined by dots, at most 200 characters."""
    if not isinstance(name, str) or not is_channel(name):
        raise InvalidName(
            f"channel {name!r} is not allowed: tokens of A-Z a-z 0-9 _ - joined by dots, at most {MAX_CHANNEL} in all"
        )
    return name


def unmarked(channel: str) -> str:
    """A channel as people write it: `#general` is general. `#` is in no name, so nothing else can be meant."""
    return channel.removeprefix("#") if isinstance(channel, str) else channel


def is_pattern(text: str) -> bool:
    if not 0 < len(text) <= MAX_CHANNEL:
        return False
    *head, last = text.split(".")
    return all(token == "*" or is_token(token) for token in head) and (last in ("*", ">") or is_token(last))


def check_pattern(text: str) -> str:
    """A channel, or a channel with `*` for one token and a final `>` for one or more."""
    if not isinstance(text, str) or not is_pattern(text):
        raise InvalidName(f"pattern {text!r} is not allowed: a channel in which a token may be `*`, the last one `>`")
    return text


# --- patterns ---
# Whether a pattern covers a channel: the one place that decides it.
#
# The rules are those of NATS subjects: `*` is exactly one token, a final `>` is one or more. `team.>` does not cover
# `team`. The broker matches grants with the same rules, and a test holds the two against each other.


def covers(pattern: str, channel: str) -> bool:
    """Does `pattern` cover the concrete channel `channel`? False for anything malformed."""
    return is_channel(channel) and covers_pattern(pattern, channel)


def covers_pattern(wide: str, narrow: str) -> bool:
    """Is every channel that `narrow` covers also covered by `wide`?"""
    return _subsumes(wide, narrow)


def covers_any(patterns: Iterable[str], narrow: str) -> bool:
    """Does one of `patterns` alone cover `narrow` (a channel or a pattern)?"""
    return any(_subsumes(wide, narrow) for wide in patterns)


def may_meet(one: str, other: str) -> bool:
    """Is there a channel that both cover?"""
    if not is_pattern(one) or not is_pattern(other):
        return False
    left, right = one.split("."), other.split(".")
    for mine, theirs in zip(left, right, strict=False):
        if ">" in (mine, theirs):
            return True
        if mine != theirs and "*" not in (mine, theirs):
            return False
    return len(left) == len(right)


@lru_cache(maxsize=65_536)
def _subsumes(wide: str, narrow: str) -> bool:
    if not is_pattern(wide) or not is_pattern(narrow):
        return False
    left, right = wide.split("."), narrow.split(".")
    for index, token in enumerate(left):
        if token == ">":
            return len(right) > index
        if index >= len(right):
            return False
        other = right[index]
        # a narrow `>` spans several tokens, a narrow `*` any one: only `>` or an equal wildcard is as wide
        if other == ">" or (token != "*" and token != other):
            return False
    return len(left) == len(right)


def pattern_regex(pattern: str) -> str:
    """The same rule as an anchored regular expression, for SQL (`rlike`) and other languages.

    For well-formed channels only, such as those of parsed subjects: it does not repeat the length limit, and `$` lets
    a final newline pass in some dialects (lookahead would not, but not every engine has it).
    """
    if not is_pattern(pattern):
        return r"(?!)"
    token = r"[A-Za-z0-9_-]{1,64}"
    parts = [
        token if part == "*" else rf"{token}(\.{token})*" if part == ">" else re.escape(part).replace(r"\-", "-")
        for part in pattern.split(".")
    ]
    return r"^" + r"\.".join(parts) + r"$"
