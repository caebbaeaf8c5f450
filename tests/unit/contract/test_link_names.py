"""The name of a link becomes a part of subjects and file names."""

import pytest

from tidings.contract.link_worker import PauseLinkRequest
from tidings.errors import UsageError


@pytest.mark.parametrize("name", ["", "../evil", "\0", "a\n", "a b", "x" * 65])
def test_a_link_name_that_is_no_token_is_refused_by_the_name_of_its_field(name: str) -> None:
    with pytest.raises(UsageError, match="link pause: `link`: "):
        PauseLinkRequest.operation.decode({"link": name})
