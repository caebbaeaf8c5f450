"""New keys for the roles of a space, while it runs: the steward's and the pipeline's.

The old credential is written down as void first, the new one is written, and then the broker is told: whatever
interrupts this, the same again finishes it. The broker cuts whoever is connected with the old one; the supervisor
starts the steward or the pipeline again, which find the new one.
"""

from __future__ import annotations

from tidings.admin.administration import Administrator
from tidings.admin.home import SpaceInfo
from tidings.admin.layout import Voided, make_link_creds, make_pipeline_creds
from tidings.contract.admin import RotateKeyAnswer, RotateKeyRequest
from tidings.errors import UsageError
from tidings.nats import jwt
from tidings.util import failpoints
from tidings.util.private_files import write_private
from tidings.wire.signing import KeyPair


async def rotate_pipeline(admin: Administrator) -> str:
    """A new credential for durable delivery. Answers its id."""
    check_rotatable(admin.info)
    Voided.of(admin.home, admin.info.id).add(admin.home.pipeline_creds)
    failpoints.reach("rotate_role.after_void")
    admin.home.pipeline_creds.unlink(missing_ok=True)
    make_pipeline_creds(admin.home, admin.keyring)
    failpoints.reach("rotate_role.after_creds")
    await _push(admin, admin.keyring.pipe)
    return jwt.split_credentials(admin.home.pipeline_creds.read_text())[1].id


async def rotate_signing_key(admin: Administrator) -> RotateKeyAnswer:
    """A new signing key for the steward, by a record that the old one signs. Answers the record."""
    following = admin.home.creds / "steward.key.next"
    if not following.exists():
        write_private(following, KeyPair.generate().seed + "\n")
    return await admin.call(RotateKeyRequest())


async def rotate_steward(admin: Administrator) -> RotateKeyAnswer:
    """A new signing key, by a record that the old one signs, and then a new credential. Answers the record."""
    check_rotatable(admin.info)
    answer = await rotate_signing_key(admin)
    Voided.of(admin.home, admin.info.id).add(admin.home.creds / "steward.creds")
    failpoints.reach("rotate_role.after_void")
    _make_steward_creds(admin)
    failpoints.reach("rotate_role.after_creds")
    await _push(admin, admin.keyring.core)
    return answer


def _make_steward_creds(admin: Administrator) -> None:
    user = KeyPair.generate()
    creds = jwt.credentials(admin.keyring.steward_token(admin.subjects, user.id), user)
    write_private(admin.home.creds / "steward.creds", creds)
    write_private(admin.home.creds / "steward.user", user.seed + "\n")


async def recall_voided(admin: Administrator) -> list[str]:
    """After a copy was put back: what was voided since stays so, and whose credential that is gets another.

    Before the broker starts. Answers what was done, in words.
    """
    voided, done = Voided.of(admin.home, admin.info.id), list[str]()
    if admin.info.mode or not voided.read():
        return done
    if voided.covers(admin.home.creds / "steward.creds"):
        _make_steward_creds(admin)
        done.append("the steward has a new credential: the one in the copy was void")
    if voided.covers(admin.home.pipeline_creds):
        admin.home.pipeline_creds.unlink()
        make_pipeline_creds(admin.home, admin.keyring)
        done.append("the pipeline has a new credential: the one in the copy was void")
    if voided.covers(admin.home.link_creds):
        admin.home.link_creds.unlink()
        make_link_creds(admin.home, admin.keyring)
        done.append("the worker of links has a new credential: the one in the copy was void")
    for account in (admin.keyring.core, admin.keyring.pipe, admin.keyring.link, admin.keyring.system):
        await _push(admin, account)
    return done


def check_rotatable(info: SpaceInfo) -> None:
    """The tokens of CORE and PIPE, which say what is void, are an administrator's to put where others run the NATS."""
    if info.mode:
        raise UsageError(
            f"space {info.name} lives on a NATS that others run: the tokens of its accounts are theirs to replace, so "
            "the old credential of a role cannot be voided from here"
        )


async def _push(admin: Administrator, account: KeyPair) -> None:
    tokens = admin.keyring.account_tokens(
        admin.subjects,
        admin.ledger.revocations(),
        Voided.of(admin.home, admin.info.id).read(),
        admin.invitations.revocations(),
        admin.links.revocations(),
    )
    await admin.push(account.id, tokens[account.id])
