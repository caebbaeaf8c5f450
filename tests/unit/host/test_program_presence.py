"""An agent is attached while one of its programs asks something, and for a while after."""

from tidings.host.registry import Scope
from tidings.host.sessions import LATELY, HostSession, ProgramPresence


def test_an_agent_stays_attached_until_the_last_request_of_its_session_has_ended() -> None:
    now = [1000.0]
    scope = Scope("S", "main", "U", "ada")
    presence = ProgramPresence(lambda _scope: False, lambda *_told: None, lambda: now[0])
    session = HostSession("session", scope, False, "program", 0, 0)
    with presence.asking(session):
        with presence.asking(session):
            pass
        now[0] += LATELY + 1
        assert presence.is_attached(scope)
