"""The token behind an invitation: derived from the few facts in its line, the same on both sides.

A line has room for a signature, not for what was signed. So every byte of the token follows from the line; whoever
changes what an invited user may do (`grants.invitation_*`) makes another version of the line.
"""

from __future__ import annotations

from tidings.nats import jwt
from tidings.server import grants
from tidings.wire.invitations import InvitationLine
from tidings.wire.subjects import Subjects

NAME = "invitation"


def text_to_sign(
    s: Subjects, account: str, invitation: str, issued: int, expires: int, *, for_link: bool = False
) -> str:
    """What the account signs to invite."""
    limits = grants.invitation_limits(expires, for_link=for_link)
    claims = jwt.user_claims(grants.invitation_permissions(s, invitation), limits)
    return jwt.unsigned(account, invitation, NAME, claims, iat=issued, expires=expires)


def token_of(line: InvitationLine) -> str:
    """The whole token, put together again by whoever accepts."""
    when = line.issued, line.expires
    text = text_to_sign(Subjects(line.space), line.account, line.key.id, *when, for_link=line.for_link)
    return jwt.with_signature(text, line.signature)
