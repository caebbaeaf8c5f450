"""The oracle, which knows only the log and the naive model, says what the fold says."""

import random

import pytest

from tidings.model.classify import Classifier, Deliverable
from tools.delivery_space import SimulatedSpace
from tools.generated import new_log, verify_once
from tools.oracle import Oracle


def lived(seed: int) -> tuple[SimulatedSpace, Oracle]:
    rng = random.Random(seed)
    log = new_log(rng, channels=4)
    space = SimulatedSpace(rng, log, narrowed=lambda _owner: None)
    for _ in range(60):
        space.step()
    return space, Oracle.of(space.stored, "main", log.space_id, log.anchor_key, verify_once)


@pytest.mark.parametrize("seed", range(8))
def test_who_is_owed_and_allowed_what_is_the_same_by_model_and_fold(seed: int) -> None:
    space, oracle = lived(seed)
    classifier, table = Classifier(space.log.subjects, space.table.rules), space.table
    owed: dict[int, tuple[str, str, set[str]]] = {}
    for record in space.stored:
        judged = classifier.classify(record)
        if isinstance(judged, Deliverable):
            named = judged.mentions is not None
            owners = (
                set(judged.mentions or ()) if named else table.audience_at(judged.channel, record.seq) - {judged.sender}
            )
            owed[record.seq] = judged.sender, judged.channel, set(owners)
    for owner in space.log.agents:
        assert oracle.owed_at_all(owner) == {seq: (s, c) for seq, (s, c, owners) in owed.items() if owner in owners}
        for head in (None, 20, table.head // 2, table.head):
            at = table.head if head is None else head
            assert oracle.owed(owner, head) == {
                seq
                for seq, (_, channel, owners) in owed.items()
                if owner in owners and table.allowed_at(owner, channel, at) and seq <= at
            }
        assert oracle.allowed_throughout(owner) == {
            seq
            for seq, (_, channel, owners) in owed.items()
            if owner in owners and space.allowed_throughout(owner, channel, seq)
        }
        assert oracle.allowed_throughout(owner) <= oracle.owed(owner) <= oracle.owed_at_all(owner).keys()


def test_the_oracle_knows_mentions_and_links_and_forgets_poison() -> None:
    lives = [lived(seed) for seed in range(8)]
    assert any(oracle.mentions() for _, oracle in lives)
    assert any(oracle.admitted() for _, oracle in lives)
    for space, oracle in lives:
        assert all(oracle.due[seq].owners == owners for seq, owners in space.truth.items() if owners)
        assert {seq for seq, owners in space.truth.items() if owners} == set(oracle.due)
        assert oracle.owners() <= set(space.log.agents)
