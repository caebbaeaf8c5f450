"""The line of an invitation: what goes in comes out, fits where it is pasted, and no letter of it can change."""

import hashlib
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.errors import UsageError, WireError
from tidings.nats import jwt
from tidings.server.grants import invitation_text, invitation_token
from tidings.wire.invitations import AUTHORITY_BYTES, LONGEST, InvitationLine, Trust, check_kind, parse_invitation
from tidings.wire.signing import ACCOUNT, sealed_for
from tidings.wire.subjects import Subjects
from tools.generated import seeded_key

RANDOM = random.Random("invitations")
ACCOUNT_KEY, KEY = seeded_key(RANDOM, ACCOUNT), seeded_key(RANDOM)
#: version 1 of the line stands for this token; another one needs another version
TOKEN_OF_1 = "5fc9aa3fee84924e"
#: the same of a line for a link
LINK_TOKEN_OF_1 = "55c32966e5a402eb"


def line(
    space: str = "main",
    host: str = "192.0.2.7",
    trust: Trust = Trust.AUTHORITY,
    issued: int = 1_800_000_000,
    *,
    for_link: bool = False,
) -> InvitationLine:
    when = issued, issued + 3_600
    text = invitation_text(Subjects(space), ACCOUNT_KEY.id, KEY.id, *when, for_link=for_link)
    authority = bytes(range(AUTHORITY_BYTES)) if trust is Trust.AUTHORITY else b""
    signature = ACCOUNT_KEY.sign(text.encode())
    held = KEY, ACCOUNT_KEY.id, issued, 3_600, signature
    return InvitationLine(space, host, 4222, *held, trust, authority, for_link=for_link)


def same(one: InvitationLine, other: InvitationLine) -> bool:
    return str(one) == str(other) and one.key.id == other.key.id and one.expires == other.expires


@pytest.mark.parametrize(
    ("host", "trust"),
    [
        ("192.0.2.7", Trust.AUTHORITY),
        ("2001:db8::7", Trust.AUTHORITY),
        ("broker.example", Trust.SYSTEM),
        ("127.0.0.1", Trust.PLAIN),
        ("::1", Trust.PLAIN),
    ],
)
def test_what_goes_in_comes_out(host: str, trust: Trust) -> None:
    made = line(host=host, trust=trust)
    found = parse_invitation(str(made))
    assert same(found, made)
    assert (found.host, found.port, found.trust, found.authority) == (host, 4222, trust, made.authority)


def test_it_fits_with_a_long_name_of_a_machine() -> None:
    assert len(str(line())) == 262
    assert len(str(line("engineering", "broker-7.eu-central.example.com"))) <= LONGEST


@pytest.mark.parametrize("around", ["'{}'", "`{}`", "  {}\n", '"{}"', "<{}>"])
def test_it_may_be_pasted_in_quotes_and_broken_into_lines(around: str) -> None:
    text = str(line())
    assert same(parse_invitation(around.format(text)), line())
    assert same(parse_invitation("\n".join(text[i : i + 70] for i in range(0, len(text), 70))), line())


@given(st.data())
def test_no_letter_of_it_can_be_another(data: st.DataObject) -> None:
    text = str(line())
    at = data.draw(st.integers(0, len(text) - 1))
    letter = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:@#"))
    changed = text[:at] + letter + text[at + 1 :]
    try:
        found = parse_invitation(changed)
    except UsageError:
        return
    assert same(found, line()), "the last letter has two bits that nobody reads"


@given(st.integers(0, 261))
def test_a_piece_of_it_is_refused(length: int) -> None:
    with pytest.raises(UsageError, match="invitation"):
        parse_invitation(str(line())[:length])


@given(st.text(max_size=400))
def test_whatever_is_pasted_is_a_sentence(text: str) -> None:
    with pytest.raises(UsageError, match="invitation"):
        parse_invitation(text)


def test_it_never_leads_to_another_machine_in_plain() -> None:
    with pytest.raises(UsageError, match="in plain"):
        parse_invitation(str(line(host="192.0.2.7", trust=Trust.PLAIN)))


def test_both_sides_derive_the_same_token_and_it_is_frozen() -> None:
    claims = jwt.decode(invitation_token(parse_invitation(str(line()))))
    assert (claims["iss"], claims["sub"], claims["exp"]) == (ACCOUNT_KEY.id, KEY.id, 1_800_003_600)
    assert set(claims["nats"]["pub"]["allow"]) == {f"td.main.ctl.accept.{KEY.id}"}
    assert set(claims["nats"]["sub"]["allow"]) == {f"_INBOX_{KEY.id}.>"}
    digest = hashlib.sha256(invitation_token(line()).encode()).hexdigest()[:16]
    assert digest == TOKEN_OF_1, "lines of version 1 that people have would no longer work"


def test_a_line_for_a_link_says_so_and_has_a_token_of_its_own() -> None:
    made = line(for_link=True)
    found = parse_invitation(str(made))
    assert (same(found, made), found.for_link, found.trust) == (True, True, Trust.AUTHORITY)
    assert not parse_invitation(str(line())).for_link
    assert len(str(made)) == len(str(line()))
    digest = hashlib.sha256(invitation_token(made).encode()).hexdigest()[:16]
    assert digest == LINK_TOKEN_OF_1, "lines for links that people have would no longer work"
    assert (
        jwt.decode(invitation_token(made))["nats"]["payload"] > jwt.decode(invitation_token(line()))["nats"]["payload"]
    )
    with pytest.raises(WireError):  # the other kind was not signed
        jwt.decode(invitation_token(replace(made, for_link=False)))


def test_each_kind_names_the_command_that_takes_it() -> None:
    check_kind(line(for_link=True), for_link=True)
    check_kind(line(), for_link=False)
    with pytest.raises(UsageError, match="`tidings link accept LINE`"):
        check_kind(line(for_link=True), for_link=False)
    with pytest.raises(UsageError, match="`tidings accept LINE`"):
        check_kind(line(), for_link=True)


def test_what_is_sealed_opens_for_its_key_alone() -> None:
    sealed = sealed_for(KEY.id, b"a place")
    assert KEY.open_sealed(sealed) == b"a place"
    for other, bytes_of_it in ((ACCOUNT_KEY, sealed), (KEY, sealed[:-1]), (KEY, b"")):
        with pytest.raises(Exception, match="not sealed for this key"):
            other.open_sealed(bytes_of_it)
