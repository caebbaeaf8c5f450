"""A folder that was put back in part: what does not fit is said in words of its owner, with a way out."""

from dataclasses import replace

import pytest

from tidings.admin.moving import _core
from tidings.errors import AuthRevoked
from tidings.nats import jwt
from tidings.server.keyring import Keyring
from tidings.supervisor.supervisor import Supervisor, UpOptions
from tidings.util.private_files import write_private
from tidings.wire.signing import ACCOUNT, KeyPair
from tidings_testing.real_space import RealSpace


async def test_a_credential_of_another_copy_is_named_with_what_to_put_back(space: RealSpace) -> None:
    other, user = KeyPair.generate(ACCOUNT), KeyPair.generate()
    write_private(
        space.home.creds / "steward.creds", jwt.credentials(jwt.user_jwt(other, user.id, "steward", None), user)
    )
    with pytest.raises(AuthRevoked, match=f"Put all of {space.home.root} back from one copy") as refused:
        await Supervisor(space.home, UpOptions("me"))._round_trip()
    assert "readiness" not in str(refused.value)


async def test_keys_of_another_copy_move_nothing_and_say_why(space: RealSpace) -> None:
    keyring = replace(Keyring.load(space.home.keys), core=KeyPair.generate(ACCOUNT))
    with pytest.raises(AuthRevoked, match="does not take the account keys of space main") as refused:
        async with _core(space.info, keyring):
            pass
    assert "refuses move" not in str(refused.value)
