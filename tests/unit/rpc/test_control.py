"""How a control request over NATS fails."""

from typing import Any, cast

import pytest

from tidings.contract.agents import HealthRequest
from tidings.errors import AuthRevoked, BrokerUnreachable, TidingsError
from tidings.nats.errors import AuthRefused, ConnectionGone
from tidings.rpc.control import ControlClient
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import Subjects


@pytest.mark.parametrize(
    ("met", "raised"),
    [(AuthRefused("User Authentication Expired"), AuthRevoked), (ConnectionGone("it went"), BrokerUnreachable)],
)
async def test_a_credential_that_ends_during_a_request_is_revoked_and_a_lost_connection_is_unreachable(
    met: Exception, raised: type[TidingsError]
) -> None:
    class Broken:
        async def request(self, *_arguments: Any, **_options: Any) -> None:
            raise met

    client = ControlClient(cast("Any", Broken()), Subjects("main"), KeyPair.generate().id)
    with pytest.raises(raised):
        await client.call(HealthRequest())
