"""The oracle, which knows only the log and the naive model, says what the fold says."""

import pytest

from tidings.pipeline.judging import Deliverable, Judge
from tidings.testing.delivery import World, verify_once
from tidings.testing.oracle import Oracle


def lived(seed: int) -> tuple[World, Oracle]:
    world = World(seed)
    for _ in range(60):
        world.step_log()
    log = world.log
    return world, Oracle.of(world.stored, "main", log.space_id, log.anchor_key, verify_once)


@pytest.mark.parametrize("seed", range(8))
def test_who_is_owed_and_allowed_what_is_the_same_by_model_and_fold(seed: int) -> None:
    world, oracle = lived(seed)
    judge, table = Judge(world.log.subjects, world.table.rules), world.table
    owed: dict[int, tuple[str, str, set[str]]] = {}
    for record in world.stored:
        judged = judge.judge(record)
        if isinstance(judged, Deliverable):
            named = judged.mentions is not None
            owners = (
                set(judged.mentions or ()) if named else table.audience_at(judged.channel, record.seq) - {judged.sender}
            )
            owed[record.seq] = judged.sender, judged.channel, set(owners)
    for owner in world.log.agents:
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
            if owner in owners and world._was_allowed_since(owner, channel, seq)
        }
        assert oracle.allowed_throughout(owner) <= oracle.owed(owner) <= oracle.owed_at_all(owner).keys()


def test_the_oracle_knows_mentions_and_links_and_forgets_poison() -> None:
    lives = [lived(seed) for seed in range(8)]
    assert any(oracle.mentions() for _, oracle in lives)
    assert any(oracle.admitted() for _, oracle in lives)
    for world, oracle in lives:
        assert all(oracle.due[seq].owners == owners for seq, owners in world.truth.items() if owners)
        assert {seq for seq, owners in world.truth.items() if owners} == set(oracle.due)
        assert oracle.owners() <= set(world.log.agents)
