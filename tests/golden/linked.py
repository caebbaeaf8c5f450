"""Golden vectors of what comes over links: rows of `space links`, and records with the reason they are refused for.

Ada and Bob are agents of `other_space`, which is called west here; `third_space` is behind it.
"""

from __future__ import annotations

import json
from typing import Any

from golden.cast import ADA, BOB, MESSAGE_ID, OTHER_SPACE, SPACE, SPACE_NAME, THIRD_SPACE
from golden.messages import base
from tidings.wire import signing
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import Subjects

#: 2025-11-15T12:00:00Z
_NOON = 1_763_208_000
_WEST, _NORTH = OTHER_SPACE.id, THIRD_SPACE.id


def vectors() -> dict[str, Any]:
    return {"links": _rows(), "linked": _records()}


def _rows() -> list[dict[str, Any]]:
    first = {
        "link": "west",
        "seq": 10,
        "state": "on",
        "origin": _WEST,
        "space": "west",
        "channels": {"general": "west.general", "team.>": "west.team.>", "team.plan": "plans"},
        "beyond": {_NORTH: {"news": "north.news"}},
        "hops": 2,
        "until": None,
    }
    nameless = {"link": "east", "seq": 12, "origin": _NORTH, "space": "", "channels": {"news": "news"}, "beyond": {}}
    last = {"seq": 30, "channels": {"general": "general"}, "beyond": {}, "hops": 1, "until": _NOON}
    return [first, first | nameless, first | {"seq": 20, "state": "off"}, first | last]


def _records() -> list[dict[str, Any]]:
    plain = json.dumps(base())
    lies = json.dumps(base(**{"from": {"id": BOB.id, "name": "ada"}}))

    def record(
        why: str,
        channel: str = "west.general",
        refused: str | None = None,
        *,
        seq: int = 15,
        second: int = _NOON - 1,
        link: str = "west",
        said: tuple[str, str] = (_WEST, "general"),
        signed: tuple[str, str] | None = None,
        key: KeyPair = ADA,
        payload: str = plain,
        more: tuple[tuple[str, str], ...] = (),
        origins: int = 1,
        shown: str | None = None,
    ) -> dict[str, Any]:
        space, destination = signed or said
        fields = [("Td-Sig", signing.sign(key, space, "chat", destination, payload.encode()))]
        fields += [("Td-Origin", " ".join(said))] * origins
        lines = "".join(f"{name}: {value}\r\n" for name, value in (*fields, ("Nats-Msg-Id", MESSAGE_ID), *more))
        return {
            "why": why,
            "seq": seq,
            "time_ns": str(second * 1_000_000_000),
            "subject": Subjects(SPACE_NAME).via(link, ADA.id, channel),
            "block": f"NATS/1.0\r\n{lines}\r\n",
            "payload": payload,
            "refused": refused,
            "shown": shown,
        }

    def hops(*values: str) -> tuple[tuple[str, str], ...]:
        return tuple(("Td-Hops", value) for value in values)

    own = (SPACE.id, "general")
    return [
        record("a channel that is named", shown="ada@west"),
        record("a channel of a pattern", "west.team.a.b", said=(_WEST, "team.a.b"), shown="ada@west"),
        record("the name before the pattern", "plans", said=(_WEST, "team.plan"), shown="ada@west"),
        record("two links on its way", more=hops("2"), shown="ada@west"),
        record(
            "a space behind the other", "north.news", said=(_NORTH, "news"), more=hops("2"), shown="ada@AAJZR5RMNU…"
        ),
        record("a space without a name", "news", link="east", said=(_NORTH, "news"), shown="ada@AAJZR5RMNU…"),
        record("after it was mapped anew", "general", seq=31, shown="ada@west"),
        record("signed for this space, not for where it was said", refused="signature", signed=own),
        record("signed for another channel there", refused="signature", signed=(_WEST, "secrets")),
        record("signed by somebody else", refused="signature", key=BOB),
        record("a space of the same name, and another id", refused="signature", signed=(_NORTH, "general")),
        record("no word of where it was said", refused="link", origins=0),
        record("two of them", refused="link", origins=2),
        record("no channel in it", refused="link", said=(_WEST, "")),
        record("no hops", refused="link", more=hops("0")),
        record("hops spelled otherwise", refused="link", more=hops("02")),
        record("hops twice", refused="link", more=hops("1", "1")),
        record("more links than it may have come over", refused="link", more=hops("3")),
        record("a channel that the link does not let in", refused="link", said=(_WEST, "secrets")),
        record("under the name of another channel", "general", refused="link"),
        record("a pattern's name without its channel", "west.team", refused="link", said=(_WEST, "team")),
        record("what a name wins, by the pattern", "west.team.plan", refused="link", said=(_WEST, "team.plan")),
        record("another space", refused="link", said=(_NORTH, "general")),
        record("this space itself", refused="link", said=own),
        record("a link that nobody wrote", refused="link", link="south"),
        record("before the link was", refused="link", seq=9),
        record("after it was switched off", refused="link", seq=20),
        record("by the names it had before", refused="link", seq=31),
        record("when it has ended", "general", refused="link", seq=31, second=_NOON),
        record("not JSON", refused="malformed", payload="hello"),
        record("from somebody else", refused="sender_mismatch", payload=lies),
        record("a header of the broker's", refused="header", more=(("Nats-Subject", "x"),)),
    ]
