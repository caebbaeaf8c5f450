"""`tidings wire check`: would a reader take these bytes, and otherwise which rule of docs/wire.md refuses them?

For whoever writes a client in another language. What it has in hand may be the bytes of the protocol (`HPUB ...`), a
header block with its payload, a payload alone, a frame, or JSON as the golden vectors and answers of the steward have
it. The verdict is that of the functions every reader uses; nothing is sent and nobody is asked.
"""

from __future__ import annotations

import base64
import binascii
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from tidings.cli import output
from tidings.cli.context import Context, Group, SpaceContext
from tidings.errors import MalformedRecord, TidingsError, UsageError, WireError
from tidings.wire import message as messages
from tidings.wire import records, rulings, seal, signing
from tidings.wire.envelope import ClaimedOrigin, Received, Refused, open_record
from tidings.wire.frames import Frame, Ref, decode_frame, open_block
from tidings.wire.roster import open_delta
from tidings.wire.subjects import Chat, Control, Direct, Parsed, Ruling, Subjects, Task, Via

if TYPE_CHECKING:
    from tidings.wire.signing import KeyPair

app = Group(help="For clients in other languages: check what they write (docs/wire.md).")
REFUSED = 1
_PROTOCOL = (b"HPUB ", b"PUB ", b"HMSG ", b"MSG ")
_BLOCK = b"NATS/1.0"


@dataclass(frozen=True, slots=True)
class Anchor:
    """What a reader knows before it reads: which space this is, whose word the steward's is, and its own key."""

    space: str = ""
    space_id: str = ""
    steward_key: str = ""
    key: KeyPair | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """What was handed over. `subject` is empty of a payload alone; `frame` of anything but a frame."""

    subject: str = ""
    block: bytes = b""
    payload: bytes = b""
    frame: bytes = b""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """`reason` is empty of what is taken; `unsure` says what could not be checked."""

    what: str
    reason: str = ""
    detail: str = ""
    unsure: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        unsure = "".join(f"\nnot checked: {each}" for each in self.unsure)
        if self.reason:
            return f"refused ({self.reason}): {self.detail}{unsure}"
        return f"a reader takes it: {self.what}{unsure}"


@app.command("check")
def check(
    ctx: SpaceContext,
    file: Annotated[str, Argument(metavar="FILE", help="What to check; `-` is standard input.")],
    bundle: Annotated[Path | None, Option(help="Bundle that names the space, the steward and the key.")] = None,
    subject: Annotated[str | None, Option(help="The subject, if the file does not say it.")] = None,
    space_id: Annotated[str | None, Option(help="Public key of the space (A...).")] = None,
    steward_key: Annotated[str | None, Option(help="Public key of the steward (U...).")] = None,
) -> None:
    """Say whether a reader would take a record, a frame or a request, and otherwise why it refuses it.

    FILE is one of these; which one is seen by how it begins:
      HPUB SUBJECT ... : the bytes of the protocol, as they go over the socket; also PUB, HMSG and MSG.
      NATS/1.0 ... : a header block, an empty line, the payload. Its subject by --subject, unless it is a live copy.
      {"subject": ...} : JSON with `headers` (an object, a list of pairs, a block, a block in base64) and `payload`
        (text; base64 if the headers are; or `payload_base64`), as golden vectors and answers of the steward have them.
      {"id": ...} : the payload of a message alone: JSON and fields are checked, the signature is not.
      A msgpack array : a frame; also JSON with `frame_hex`.

    A signature is checked with the public key of the space: of --bundle, of --space-id, or of the space of this home.
    What the agent of a bundle can open is opened. Exit code 0: it is taken. 1: it is refused. 2: this is none of these.

    Examples:
      tidings wire check record.bin --bundle ada.tidings.json
      node my-client.mjs | tidings wire check - --subject td.main.chat.UABC.general --json
    """
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    given = read_given(data)
    given = replace(given, subject=subject) if subject else given
    verdict = judge(given, _anchor(ctx, bundle, space_id, steward_key))
    if ctx.as_json:
        output.data(
            {
                "taken": not verdict.reason,
                "what": verdict.what,
                "reason": verdict.reason or None,
                "detail": verdict.detail or None,
                "not_checked": list(verdict.unsure),
            }
        )
    else:
        output.line(verdict.text)
    if verdict.reason:
        raise typer.Exit(REFUSED)


def _anchor(ctx: Context, bundle: Path | None, space_id: str | None, steward_key: str | None) -> Anchor:
    if bundle is not None:
        from tidings.admin.identity import bundle_identity

        found = bundle_identity(bundle.absolute())
        known = Anchor(found.subjects.space, found.space_id, found.steward_key, found.key)
    else:
        info = ctx.home.read_info() if ctx.home.exists and not space_id else None
        known = Anchor(info.name, info.id, info.steward_key) if info else Anchor(ctx.space or "")
    return replace(known, space_id=space_id or known.space_id, steward_key=steward_key or known.steward_key)


# --- what was handed over ---


def read_given(data: bytes) -> Given:
    """Which of the forms these bytes have; UsageError for none of them."""
    if data.startswith(_PROTOCOL):
        return _from_protocol(data)
    if data.startswith(_BLOCK):
        block, end, payload = data.partition(b"\r\n\r\n")
        return Given(block=block + end, payload=payload)
    if data.lstrip()[:1] == b"{":
        return _from_json(data)
    if data[:1] and (data[0] & 0xF0 == 0x90 or data[0] in (0xDC, 0xDD)):
        return Given(frame=data)
    raise UsageError(
        "this is neither a record nor a frame nor JSON: `tidings wire check --help` lists what can be checked"
    )


def _from_protocol(data: bytes) -> Given:
    """`HPUB subject [reply] header-bytes all-bytes`, `HMSG subject sid [reply] ...`; PUB and MSG have no header."""
    line, _, body = data.partition(b"\r\n")
    word, *tokens = line.decode("latin-1").split()
    sizes = tokens[-2:] if word in ("HPUB", "HMSG") else ["0", *tokens[-1:]]
    try:
        head, size = map(int, sizes)
    except ValueError:
        raise UsageError(f"{word} ends with its sizes in bytes, this line does not: {line[:80]!r}") from None
    if not tokens or not 0 <= head <= size <= len(body):
        raise UsageError(f"{word} says it has {size} bytes, {head} of them headers, and {len(body)} bytes follow")
    return Given(tokens[0], body[:head], body[head:size])


def _from_json(data: bytes) -> Given:
    try:
        found = json.loads(data)
    except ValueError:
        return Given(payload=data)  # perhaps a message; the strict reader says what is wrong with it
    if isinstance(found.get("frame_hex"), str):
        return Given(frame=_decoded(bytes.fromhex, found["frame_hex"], "frame_hex"))
    if not isinstance(found.get("subject"), str):
        return Given(payload=data)
    if "request" in found:
        return Given(found["subject"], payload=json.dumps(found["request"]).encode())
    raw, fields = False, found.get("block", found.get("headers"))
    if found.get("signature"):
        fields = {"Td-Sig": found["signature"]}
    if isinstance(fields, str) and not fields.startswith("NATS/"):
        raw, block = True, _decoded(_unbase64, fields, "headers")
    else:
        block = fields.encode() if isinstance(fields, str) else _block_of(fields)
    if isinstance(found.get("payload_base64"), str):
        return Given(found["subject"], block, _decoded(_unbase64, found["payload_base64"], "payload_base64"))
    payload = found.get("payload", "")
    if not isinstance(payload, str):
        raise UsageError("`payload` is the text of the payload, not the JSON in it: what is signed is bytes")
    body = _decoded(_unbase64, payload, "payload") if raw else payload.encode() + b" " * int(found.get("blanks", 0))
    return Given(found["subject"], block, body)


def _unbase64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _decoded(decode: Any, text: str, name: str) -> bytes:
    try:
        return bytes(decode(text))
    except (ValueError, binascii.Error):
        raise UsageError(f"`{name}` is not what its name says") from None


def _block_of(fields: Any) -> bytes:
    """A block of an object or a list of pairs; a value may be a list of values."""
    pairs = fields.items() if isinstance(fields, dict) else fields or ()
    try:
        named = [(name, each) for name, value in pairs for each in (value if isinstance(value, list) else [value])]
        return records.encode_headers(named)
    except (TypeError, ValueError):
        raise UsageError("`headers` is an object of names and values, or a list of [name, value]") from None


# --- what a reader says of it ---


def judge(given: Given, anchor: Anchor) -> CheckResult:
    if given.frame:
        return _judge_frame(given.frame, anchor)
    if not given.subject and not given.block:
        return _judge_message(given.payload)
    root = _root_of(given, anchor)
    subjects = Subjects(root)
    own, said = records.split_block(given.block, records.REPUBLISH_HEADERS) if given.block else (b"", {})
    is_copy = {"Nats-Stream", "Nats-Subject", "Nats-Sequence"} <= said.keys()
    if given.subject.startswith(f"{subjects.root}.live.") and given.subject != subjects.live_roster and not is_copy:
        return CheckResult(
            "", "not_a_log_copy", "it came on a live subject without the broker's headers at the end of its block"
        )
    subject = said["Nats-Subject"] if is_copy else given.subject
    if is_copy and given.subject and given.subject not in (subject, f"{subjects.root}.live.{subjects.tail(subject)}"):
        return CheckResult("", "not_a_log_copy", f"it came on {given.subject} and the broker says it is {subject}")
    try:
        fields = records.Headers.parse(own if is_copy else given.block).fields if given.block else ()
    except WireError as error:
        return CheckResult("", "header", str(error))
    if subject == subjects.live_roster:
        return _judge_delta(subjects, fields, given.payload, anchor)
    match subjects.parse(subject):
        case Control() as parsed:
            return _judge_request(subjects, subject, given.payload, parsed)
        case Chat() | Direct() | Task() | Via() as parsed:
            return _judge_record(subjects, subject, fields, given.payload, parsed, anchor)
        case parsed if isinstance(parsed, Ruling):
            return _judge_ruling(subjects, subject, fields, given.payload, anchor)
    refused = open_record(subjects, anchor.space_id, subject, fields, given.payload)
    assert isinstance(refused, Refused)
    return CheckResult("", refused.reason, refused.detail)


def _root_of(given: Given, anchor: Anchor) -> str:
    """The space this reader is in; unless it is known, the one the subject names."""
    if anchor.space:
        return anchor.space
    subject = given.subject
    if not subject:
        subject = records.split_block(given.block, records.REPUBLISH_HEADERS)[1].get("Nats-Subject", "")
    if not subject:
        raise UsageError("a header block does not say its subject: give it with --subject")
    tokens = subject.split(".")
    return tokens[1] if len(tokens) > 1 and tokens[0] == "td" and tokens[1] else "main"


def _judge_record(
    subjects: Subjects, subject: str, fields: records.Fields, payload: bytes, parsed: Parsed, anchor: Anchor
) -> CheckResult:
    found = open_record(subjects, anchor.space_id, subject, fields, payload, _any_link)
    is_here = not isinstance(parsed, Via)  # else what is signed says itself in which space
    if isinstance(found, Refused) and found.reason == "signature" and not anchor.space_id and is_here:
        signatures = records.values_of(fields, signing.SIGNATURE_HEADER)
        if signatures:
            later = _judge_message(payload)
            return replace(later, unsure=("the signature: give --bundle or --space-id",))
    if isinstance(found, Refused):
        return CheckResult("", found.reason, found.detail + _advice(found, parsed, fields, payload, anchor))
    what = f"{found.kind} from {found.sender} to {found.destination}, message {found.message.id}"
    if found.admission is not None:
        what += f", said in {found.admission.theirs} of {found.origin}"
        return CheckResult(what, unsure=(f"whether the link {found.link} lets it in: `space links` says that",))
    return _with_seal(CheckResult(what), found, anchor)


def _any_link(_asked: ClaimedOrigin) -> bool:
    """What a link lets in is in its space; what can be seen without it is checked."""
    return True


def _advice(refused: Refused, parsed: Parsed, fields: records.Fields, payload: bytes, anchor: Anchor) -> str:
    """Of a signature that does not verify: how it is spelled, and what should have been signed."""
    if refused.reason != "signature" or not isinstance(parsed, Chat | Direct | Task):
        return ""
    found = records.values_of(fields, signing.SIGNATURE_HEADER)
    if found and not signing.is_spelled(found[0]):
        spelled = "86 characters of URL-safe base64 without padding, the last one of A Q g w"
        return f". A signature is {spelled}; this has {len(found[0])} characters"
    kind, destination = {Chat: ("chat", "channel"), Direct: ("dm", "target"), Task: ("task", "role")}[type(parsed)]
    first = f"td1\n{anchor.space_id}\n{kind}\n{parsed.sender}\n{getattr(parsed, destination)}\n"
    return f". What is signed begins with {json.dumps(first)}, and the {len(payload)} bytes of the payload follow"


def _with_seal(verdict: CheckResult, found: Received, anchor: Anchor) -> CheckResult:
    if found.kind != "dm" or not seal.is_sealed(found.message):
        return verdict
    if anchor.key is None or anchor.key.id not in (found.sender, found.destination):
        return replace(verdict, unsure=("the seal: only a bundle of one of the two agents opens it",))
    try:
        seal.open_sealed(anchor.key, found.sender, found.message, target_id=found.destination)
    except WireError as error:
        return CheckResult("", "seal", f"{error}, and its reader terminates it")
    return replace(verdict, what=f"{verdict.what}, sealed")


def _judge_message(payload: bytes) -> CheckResult:
    try:
        message = messages.decode(payload)
    except WireError as error:
        return CheckResult("", "malformed", str(error))
    return CheckResult(f"message {message.id} from {message.sender.id}", unsure=("subject and signature",))


def _judge_delta(subjects: Subjects, fields: records.Fields, payload: bytes, anchor: Anchor) -> CheckResult:
    if not (anchor.space_id and anchor.steward_key):
        raise UsageError(
            "a word of the steward is checked with its key: give --bundle, or --space-id and --steward-key"
        )
    found = open_delta(subjects, anchor.space_id, anchor.steward_key, subjects.live_roster, fields, payload)
    if isinstance(found, str):
        return CheckResult("", found, "it is not the word of the steward whose key this is")
    return CheckResult(f"delta {found.n} of the roster")


def _judge_ruling(
    subjects: Subjects, subject: str, fields: records.Fields, payload: bytes, anchor: Anchor
) -> CheckResult:
    tail, signatures = subjects.tail(subject), records.values_of(fields, signing.SIGNATURE_HEADER)
    unsure: tuple[str, ...] = ()
    if not (anchor.space_id and anchor.steward_key):
        unsure = ("the signature: give --bundle, or --space-id and --steward-key",)
    elif not rulings.verify_ruling("".join(signatures), anchor.space_id, anchor.steward_key, tail, payload):
        return CheckResult("", "signature", f"the steward {anchor.steward_key} did not sign it for {tail}")
    try:
        rulings.decode(tail.partition(".")[0], payload)
    except MalformedRecord as error:
        return CheckResult("", "malformed", str(error))
    return CheckResult(f"the ruling record {tail}", unsure=unsure)


def _judge_request(subjects: Subjects, subject: str, payload: bytes, parsed: Control) -> CheckResult:
    from tidings.steward.requests import parse_request

    try:
        call = parse_request(subjects, subject, payload)
    except TidingsError as error:
        return CheckResult("", error.code, str(error))
    unsure = ("what its values mean: the steward says that",)
    return CheckResult(f"the request {call.name} of {parsed.sender}", unsure=unsure)


def _judge_frame(data: bytes, anchor: Anchor) -> CheckResult:
    try:
        frame = decode_frame(data)
    except WireError as error:
        return CheckResult("", "frame", str(error))
    if anchor.key is not None and frame.owner != anchor.key.id:
        return CheckResult("", "frame", f"it is for {frame.owner}, not for {anchor.key.id}")
    what = f"frame {frame.number} of series {frame.series} for {frame.owner}, {len(frame.blocks)} blocks"
    unsure: tuple[str, ...] = ()
    if refs := sum(isinstance(block, Ref) for block in frame.blocks):
        unsure = (f"the {refs} blocks it names: they lie in the space",)
    if not (anchor.space and anchor.space_id):
        return _opened_blocks(CheckResult(what, unsure=("the records in it: give --bundle", *unsure)), frame, None)
    return _opened_blocks(CheckResult(what, unsure=unsure), frame, anchor)


def _opened_blocks(verdict: CheckResult, frame: Frame, anchor: Anchor | None) -> CheckResult:
    for number, block in enumerate(frame.blocks, 1):
        if isinstance(block, Ref):
            continue
        try:
            records = open_block(block)
        except WireError as error:
            return CheckResult("", "block", f"block {number}: {error}")
        for kept in records if anchor is not None else ():
            assert anchor is not None
            subject = f"td.{anchor.space}.{kept.tail}"
            found = open_record(Subjects(anchor.space), anchor.space_id, subject, kept.headers, kept.payload, _any_link)
            if isinstance(found, Refused):
                return CheckResult("", found.reason, f"record {kept.seq} of block {number}: {found.detail}")
    return verdict
