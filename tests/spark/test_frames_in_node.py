"""A client in JavaScript opens what the real pipeline packs."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from node_client import installed, prove
from tidings_testing.real_space import RealSpace
from tools.delivering import delivering

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: what the pipeline packs goes through the functions that tests/integration/test_wire_in_node.py has frames of, too
pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(240)]


async def test_where_node_is_installed_a_client_of_the_document_opens_a_frame_of_the_real_pipeline(
    spark: "SparkSession", space: RealSpace, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    node = installed(tmp_path_factory.mktemp("node"))
    async with delivering(spark, space, tmp_path) as job:

        async def deliver(_owner: str, _seq: int) -> None:
            await job.caught_up()

        steps = await prove(space, node, tmp_path, deliver)
    frame = next(each for each in steps if each["step"] == "frame")
    assert frame["number"] == 1
    assert int(frame["head"]) > 0
