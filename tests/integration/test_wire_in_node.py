"""The wire in another language: a client in JavaScript that was written from docs/wire.md alone."""

from pathlib import Path

import pytest

from node_client import installed, prove, vectors_hold
from tidings_testing.real_space import RealSpace
from tools.frames import stub_pipeline

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("node"))


def test_where_node_is_installed_every_golden_vector_holds_in_javascript(node: Path) -> None:
    assert vectors_hold(node).endswith(" 0 differ")


async def test_where_node_is_installed_a_client_of_the_document_joins_speaks_seals_works_and_opens_a_block_by_reference(
    node: Path, space: RealSpace, tmp_path: Path
) -> None:
    async with stub_pipeline(space) as pipeline:

        async def deliver(owner: str, seq: int) -> None:
            await pipeline.deliver(owner, [seq], by_reference=True)

        steps = await prove(space, node, tmp_path, deliver)
    assert [each["step"] for each in steps if each["step"] == "refused"] == []
    frame = next(each for each in steps if each["step"] == "frame")
    assert (frame["number"], frame["prev"], frame["codecs"], frame["refs"]) == (1, None, [1], 1)
