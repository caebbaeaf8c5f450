"""Challenges and the proofs that answer them: pure rules, without a host."""

import pytest

from tidings.client.host_session import is_proven, proof_bytes, prove
from tidings.errors import UsageError
from tidings.host.sessions import CHALLENGE_SECONDS, Challenges
from tidings.wire.signing import KINDS, KeyPair, signed_bytes


def test_a_challenge_is_good_once_and_for_a_while() -> None:
    now = 0.0
    challenges = Challenges(lambda: now)
    first, second, third = (challenges.issue() for _ in range(3))
    assert len({first, second, third}) == 3
    assert challenges.spend(first)
    assert not challenges.spend(first)
    now = CHALLENGE_SECONDS - 0.1
    assert challenges.spend(second)
    now = CHALLENGE_SECONDS
    assert not challenges.spend(third)
    assert not challenges.spend("")


def test_challenges_that_nobody_answers_keep_nobody_from_one_and_cost_nothing() -> None:
    now = 0.0
    challenges = Challenges(lambda: now)
    honest = challenges.issue()
    for _ in range(10_000):
        challenges.issue()
    assert challenges.spend(honest)
    assert challenges.spend(challenges.issue())
    assert len(challenges._used) == 2, "only what was used is kept"
    now = CHALLENGE_SECONDS
    assert challenges.spend(challenges.issue())
    assert len(challenges._used) == 1, "and no longer than it is good"


def test_a_challenge_that_was_not_given_out_by_this_run_is_none() -> None:
    now = 0.0
    challenges, another_run = Challenges(lambda: now), Challenges(lambda: now)
    good = challenges.issue()
    until, random, mark = good.split(".")
    later = f"{int(until, 16) + 60_000:x}"
    forged = (
        another_run.issue(),
        f"{later}.{random}.{mark}",
        f"{until}.{random}",
        "..",
        ".",
        "\u00e4.\u00e4",
        good + "0",
    )
    assert not any(challenges.spend(each) for each in forged)
    now = CHALLENGE_SECONDS
    assert not challenges.spend(f"{later}.{random}.{mark}"), "nobody makes one last longer"


def test_a_proof_is_for_one_space_agent_socket_and_nonce_and_is_no_signature_of_a_message() -> None:
    key, other = KeyPair.generate(), KeyPair.generate()
    asked = ("SPACE", "/run/host.sock", "nonce")
    signature = prove(key, *asked)
    assert is_proven(signature, "SPACE", key.id, "/run/host.sock", "nonce")
    for wrong in (("OTHER", key.id, *asked[1:]), ("SPACE", other.id, *asked[1:]), ("SPACE", key.id, "/x", "nonce")):
        assert not is_proven(signature, *wrong)
    assert not is_proven(signature, "SPACE", key.id, "/run/host.sock", "nonce 2")
    for garbage in ("", "=", "\u00e4", signature[:-2], signature + "AA", "\n"):
        assert not is_proven(garbage, "SPACE", key.id, "/run/host.sock", "nonce")
    with pytest.raises(UsageError):
        proof_bytes("SPACE", key.id, "/run/a\nb", "nonce")
    proven = proof_bytes("SPACE", key.id, "/run/host.sock", "nonce")
    assert not any(proven.startswith(signed_bytes("SPACE", kind, key.id, "x", b"")[:4]) for kind in KINDS)
