"""`tidings wire check` says what a reader says, of every form in which somebody has a record in hand."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest

import schema
from golden.cast import BOB
from tidings.cli.main import main
from tidings.cli.wire import Anchor, judge, read_given
from tidings.errors import UsageError
from tidings.wire.records import encode_headers

SHIPPED: dict[str, Any] = json.loads((schema.FOLDER / "vectors.json").read_text())
IDS = {name: key["id"] for name, key in SHIPPED["keys"].items()}
READER = Anchor(SHIPPED["subjects"]["space"], IDS["space"], IDS["steward"], BOB)
GOOD: dict[str, Any] = SHIPPED["records"][0]


def why(vector: dict[str, Any]) -> str:
    return str(vector["why"])


def reason(data: bytes | dict[str, Any], anchor: Anchor = READER) -> str | None:
    return judge(read_given(json.dumps(data).encode() if isinstance(data, dict) else data), anchor).reason or None


@pytest.mark.parametrize("vector", [v for v in SHIPPED["records"] if v["refused"] != "wrong_kind"], ids=why)
def test_a_record_is_refused_for_the_reason_of_the_vectors(vector: dict[str, Any]) -> None:
    expected = "not_a_log_copy" if ".live." in vector["subject"] else vector["refused"]
    assert reason(vector) == expected


@pytest.mark.parametrize(
    "vector", SHIPPED["frames"]["valid"] + [v for v in SHIPPED["frames"]["invalid"] if v["frame_hex"]], ids=why
)
def test_a_frame_is_refused_for_the_reason_of_the_vectors(vector: dict[str, Any]) -> None:
    named = "stored_hex" in vector  # what is wrong is not in the frame but in what it names, which is in the space
    refused = None if named else vector.get("refused")
    assert reason(vector) == refused
    if bytes.fromhex(vector["frame_hex"])[0] >= 0x90:
        assert reason(bytes.fromhex(vector["frame_hex"])) in (refused, "malformed")
    if named:
        assert "not checked: the 1 blocks it names" in judge(read_given(json.dumps(vector).encode()), READER).text


@pytest.mark.parametrize("vector", SHIPPED["deltas"] + SHIPPED["rulings"], ids=why)
def test_a_word_of_the_steward_is_refused_for_the_reason_of_the_vectors(vector: dict[str, Any]) -> None:
    expected = "not_a_log_copy" if vector["refused"] == "wrong_subject" else vector["refused"]
    assert reason(vector) == expected


@pytest.mark.parametrize("vector", SHIPPED["exchanges"], ids=why)
def test_a_request_is_refused_as_the_steward_refuses_it(vector: dict[str, Any]) -> None:
    verdict = judge(read_given(json.dumps(vector).encode()), READER)
    error = vector["answer"].get("error", {})
    told = (error["code"], error["message"]) if error.get("code") == "usage" else ("", "")
    assert (verdict.reason, verdict.detail) == told


@pytest.mark.parametrize("vector", SHIPPED["messages"]["invalid"], ids=why)
def test_a_payload_alone_is_refused_as_the_reader_refuses_it(vector: dict[str, str]) -> None:
    if vector["payload"].lstrip().startswith("{"):
        assert reason(vector["payload"].encode()) == "malformed"


def forms(payload: str) -> dict[str, bytes]:
    """The same record in every form; with another payload than was signed, refused in every form."""
    subject, block = GOOD["subject"], GOOD["block"].encode()
    name, signature = GOOD["block"].split("\r\n")[1].split(": ")
    body = payload.encode()
    tail = [("Nats-Stream", "LOG_main"), ("Nats-Subject", subject), ("Nats-Sequence", "7")]
    tail += [("Nats-Time-Stamp", "2025-11-15T12:00:00.1Z"), ("Nats-Last-Sequence", "0")]
    copy = encode_headers([(name, signature), *tail])
    live = subject.replace("td.main.", "td.main.live.")
    line = {"subject": subject, "headers": base64.b64encode(block).decode(), "payload": base64.b64encode(body).decode()}
    return {
        "published": b"HPUB %s _INBOX.x %d %d\r\n" % (subject.encode(), len(block), len(block) + len(body))
        + block
        + body,
        "a copy": b"HMSG %s 3 %d %d\r\n" % (live.encode(), len(copy), len(copy) + len(body)) + copy + body + b"\r\n",
        "a copy's block": copy + body,
        "an object": json.dumps({"subject": subject, "headers": {name: signature}, "payload": payload}).encode(),
        "pairs": json.dumps({"subject": subject, "headers": [[name, signature]], "payload": payload}).encode(),
        "a line of a page": json.dumps({"seq": 7, **line}).encode(),
        "bytes": json.dumps(
            {"subject": subject, "block": GOOD["block"], "payload_base64": base64.b64encode(body).decode()}
        ).encode(),
    }


@pytest.mark.parametrize("form", forms(""))
def test_every_form_of_a_record_is_understood(form: str) -> None:
    assert reason(forms(GOOD["payload"])[form]) is None
    assert reason(forms(GOOD["payload"] + " ")[form]) == "signature"


def test_a_shadow_of_the_broker_s_headers_is_refused_and_not_believed() -> None:
    form = forms(GOOD["payload"])["a copy's block"]
    shadow = form.replace(b"NATS/1.0\r\n", b"NATS/1.0\r\nNats-Subject: td.main.chat.x.secret\r\n")
    assert reason(shadow) == "header"


def test_a_copy_on_another_subject_than_the_broker_says_is_none() -> None:
    form = forms(GOOD["payload"])["a copy"]
    assert reason(form.replace(b".general 3 ", b".secret 3 ")) == "not_a_log_copy"


def test_a_wrong_signature_is_explained_by_its_spelling_or_by_what_is_signed() -> None:
    verdict = judge(read_given(forms(GOOD["payload"] + " ")["an object"]), READER)
    assert f"td1\\n{IDS['space']}\\nchat\\n{IDS['ada']}\\ngeneral\\n" in verdict.text
    padded = forms(GOOD["payload"])["an object"].decode().replace('"}, "payload"', '=="}, "payload"')
    assert "86 characters" in judge(read_given(padded.encode()), READER).text


def test_a_sealed_message_is_opened_by_a_bundle_of_one_of_the_two_and_else_said_not_to_be_checked() -> None:
    from golden.cast import ADA
    from tidings.wire import signing
    from tidings.wire.subjects import Subjects

    def record(payload: str) -> dict[str, Any]:
        signature = signing.sign(ADA, IDS["space"], "dm", BOB.id, payload.encode())
        return {
            "subject": Subjects("main").direct(BOB.id, ADA.id),
            "headers": {"Td-Sig": signature},
            "payload": payload,
        }

    good = record(SHIPPED["sealed"][0]["sealed"])
    assert judge(read_given(json.dumps(good).encode()), READER).what.endswith("sealed")
    stranger = Anchor(READER.space, READER.space_id)
    assert "only a bundle of one of the two" in judge(read_given(json.dumps(good).encode()), stranger).text
    assert reason(record(SHIPPED["bad_seals"][0]["sealed"])) == "seal"


def test_without_a_space_the_signature_is_said_not_to_be_checked() -> None:
    verdict = judge(read_given(forms(GOOD["payload"])["an object"]), Anchor())
    assert not verdict.reason
    assert "not checked: the signature" in verdict.text


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"HPUB x\r\n", b"HPUB s 9 99\r\nshort", b"\xff", b'{"subject":"s","payload":{}}']
)
def test_what_is_none_of_these_is_a_matter_of_usage(data: bytes) -> None:
    with pytest.raises(UsageError):
        read_given(data)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "ada.tidings.json"
    path.write_text(json.dumps(SHIPPED["bundles"]["valid"][0]))
    path.chmod(0o600)
    return path


def test_the_command_ends_with_0_1_or_2(
    tmp_path: Path, bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "record"
    file.write_bytes(forms(GOOD["payload"])["published"])
    assert main(["wire", "check", str(file), "--bundle", str(bundle)]) == 0
    assert capsys.readouterr().out.startswith("a reader takes it: chat from U")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(forms(GOOD["payload"] + " ")["an object"])))
    assert main(["wire", "check", "-", "--bundle", str(bundle), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["taken"], told["reason"]) == (False, "signature")
    file.write_bytes(GOOD["block"].encode() + GOOD["payload"].encode())
    assert main(["wire", "check", str(file), "--space-id", IDS["space"], "--subject", GOOD["subject"]]) == 0
    assert main(["wire", "check", str(tmp_path / "none")]) == 2
    file.write_bytes(b"hello")
    assert main(["wire", "check", str(file), "--space-id", IDS["space"]]) == 2
