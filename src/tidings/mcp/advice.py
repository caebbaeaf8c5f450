"""What to call next when something failed: a sentence for a model beside each error's own.

Found by the class of the error, the most special first, so that a new error has at least the advice of its kind.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import ValidationError

from tidings import errors
from tidings.errors import TidingsError

NEXT: dict[type[TidingsError], str] = {
    errors.UnknownPeer: "Call `who` to see the agents of this space, and name one of them.",
    errors.AmbiguousPeer: "Call `who` and give the agent's id instead of its name.",
    errors.InvalidName: "Use letters, digits, `-` and `_`, and dots between the parts of a channel's name.",
    errors.UnknownMessage: "Call `read_inbox` or `outbox_status` for ids that exist here.",
    errors.ConfigError: "A person has to mend this configuration; tell them.",
    errors.UsageError: "Correct the arguments and call it again.",
    errors.TooLarge: "Send less, in several messages, or put it where others can read it and send a reference.",
    errors.WireError: "Do not repeat it unchanged.",
    errors.AuthRevoked: "This agent may not act here any more; tell a person.",
    errors.NoSession: "This server has to be started again; tell a person.",
    errors.DeniedError: "Call `orient` to see your roles and what you may read and post to; a person can widen it.",
    errors.Reconnecting: "Call it again in a few seconds. What you send meanwhile is stored and goes out by itself.",
    errors.HostUnreachable: "Call it again: this server starts the host if it can. If that fails, tell a person.",
    errors.PeerUnheard: "Call it again in a few seconds. If it stays so, tell a person that the link may be paused.",
    errors.UnreachableError: "Sending still works: messages are stored and go out later. Call this again later, "
    "or `outbox_status` to see what waits.",
    errors.IdReused: "Leave `id` out to send this as a new message, or repeat the first one exactly.",
    errors.IdBurned: "Leave `id` out: it is sent under a new one.",
    errors.WrongState: "Call `outbox_status` or `task_result` to see how far it is.",
    errors.Superseded: "Another program of this agent receives now; tell a person if that is not meant.",
    errors.ConflictError: "Look at how things are now, then decide whether to repeat it.",
    errors.OutcomeUnknown: "Repeat it with the same `id`: if it happened it does not happen twice.",
    errors.MailboxFull: "Wait until the other agent has read some, or write to a channel.",
    errors.QueueFull: "Wait until some of your tasks are done, see `task_result`.",
    errors.HostBusy: "Call it again in a moment.",
    errors.UnhealthyError: "Call it again later; if it stays so, tell a person to run `tidings status`.",
    errors.StoreFull: "Nothing was stored. A person has to make room on this machine.",
    errors.StoreError: "Nothing was stored. Tell a person to run `tidings host status`.",
    errors.TaskDead: "Ask again if it still matters, perhaps with more to go on.",
    errors.PrerequisiteMissing: "A person has to install it.",
    TidingsError: "Call `orient` to see how things are.",
}


#: where a tool knows better
OF_TOOLS: dict[tuple[str, type[TidingsError]], str] = {
    ("finish_task", errors.UnknownMessage): "Call `orient` to see what you hold, or `claim_task` to take a task.",
    ("acknowledge_inbox", errors.UsageError): "Call `read_inbox`: it has a new receipt.",
    ("read_inbox", errors.UsageError): "Call `read_inbox` without `acknowledge`: it has a new receipt.",
}


def advice(error: TidingsError, tool: str = "") -> str:
    known = (OF_TOOLS.get((tool, each)) or NEXT.get(each) for each in type(error).__mro__)
    return next(each for each in known if each)


def sentence(text: str) -> str:
    """It, with a full stop unless it ends like a sentence."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def meant(said: str, known: Iterable[str]) -> str:
    """` Did you mean ...?` if something there is called nearly so."""
    near = difflib.get_close_matches(said, list(known), n=2)
    return f" Did you mean {' or '.join(f'`{each}`' for each in near)}?" if near else ""


def wrong_arguments(error: ValidationError) -> str:
    """Which arguments do not fit, and why, without what the library says to programmers."""
    shown = error.errors()[:8]
    return "; ".join(f"`{'.'.join(map(str, e['loc']))}`: {e['msg'][:1].lower()}{e['msg'][1:]}" for e in shown)
