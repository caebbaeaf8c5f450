"""Who is meant by a name: pure rules over whatever list of agents is at hand, the live roster or a remembered one.

An exact id or name wins; a name in another case counts if only one agent has it; a near miss is suggested, never taken.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from tidings.endpoint.identity import Identity
from tidings.errors import AmbiguousPeer, UnknownPeer
from tidings.wire.message import Mention, Sender
from tidings.wire.roster import Agent


def resolve_among(agents: Iterable[Agent], text: str) -> Agent:
    """Who is meant: an id, a name, or a name in another case if only one agent has it."""
    known = list(agents)
    exact = [agent for agent in known if agent.id == text] or [agent for agent in known if agent.name == text]
    if exact:
        return exact[0]
    alike = [agent for agent in known if agent.name.casefold() == text.casefold()]
    if len(alike) > 1:
        raise AmbiguousPeer(f"{text!r} could be {', '.join(sorted(a.name for a in alike))}: say which")
    if alike:
        return alike[0]
    near = difflib.get_close_matches(text, [agent.name for agent in known], n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `who` lists the agents of this space"
    raise UnknownPeer(f"no agent {text[:64]!r} in this space{hint}")


def each_once(mentions: Iterable[Mention]) -> list[Mention]:
    """The same mentions, each agent once."""
    found: dict[str, Mention] = {}
    for each in mentions:
        found.setdefault(each.id, each)
    return list(found.values())


def speaking_as(identity: Identity, roles: Iterable[str | None], wanted: str | None = None) -> Sender:
    """The sender of a message: in the role it wants if it holds that one, otherwise in the first it holds."""
    held = list(roles)
    return Sender(identity.id, identity.name, wanted if wanted in held else next(iter(held), None))
