"""docs/wire.md says the numbers and words that the code has."""

from pathlib import Path

import pytest

from tidings.client.frame_mailbox import GAP_PATIENCE
from tidings.client.mailbox import PULL_BYTES
from tidings.client.tasks import MAX_RESULT
from tidings.contract.core import MAX_REQUEST
from tidings.contract.mail import MAX_RECEIPTS
from tidings.contract.tasks import TASK_WAIT
from tidings.links.compare import FEWEST_IDS, MOST_IDS
from tidings.nats.acks import ACK, ACK_WAIT, IN_PROGRESS, NAK, TERM
from tidings.server.grants import MAX_MESSAGE, MAX_SUBSCRIPTIONS
from tidings.steward.agent_handlers import MOST_CLAIMS
from tidings.steward.history import MAX_PAGE
from tidings.wire import envelope, frames, message, names, records, roster, seal, signing, subjects
from tidings.wire.seal import TASK_PART

TEXT = (Path(__file__).parents[3] / "docs" / "wire.md").read_text()
FLAT = " ".join(TEXT.split())
PHRASES = [
    f"JSON object of at most {message.MAX_PAYLOAD:,} bytes",
    f"payload at most {message.MAX_PAYLOAD:,} bytes",
    f"1 to {message.MAX_PARTS}:",
    f"at most {message.MAX_MENTIONS} of",
    f"at most {MAX_MESSAGE:,} bytes (264 KiB)",
    f"may hold {MAX_SUBSCRIPTIONS:,} subscriptions",
    f"1 to {names.MAX_TOKEN} of",
    f"at most {names.MAX_CHANNEL} characters in all",
    f"at most {subjects.MAX_TAIL:,} characters",
    f"modulo {subjects.SHARDS}",
    f"at most {seal.MAX_SEALED:,} bytes",
    seal.SEALED_KIND,
    TASK_PART,
    f"msgpack, at most {frames.MAX_FRAME_BYTES:,} bytes",
    f"all together are above {frames.MAX_FRAME_MESSAGES:,}",
    f"more than {frames.MAX_FRAME_REFS} references",
    f"not {frames.TAG_BYTES + 1} to {frames.LARGEST_RECORD + frames.TAG_BYTES:,}",
    f"A block of {frames.MAX_INLINE:,} bytes or fewer",
    f"modulo {subjects.BLOCK_SHARDS:,}",
    f"not 1 to {frames.LARGEST_RECORD:,}",
    frames.HEAD_HEADER,
    f'"max_bytes": {PULL_BYTES}',
    f"After {ACK_WAIT:.0f} s of silence",
    f"wait {GAP_PATIENCE:.0f} s",
    f"at most {MAX_REQUEST:,} bytes",
    f"at most {MAX_RESULT:,} bytes",
    f"at most {MAX_RECEIPTS}",
    f"at most {MOST_CLAIMS}: mark",
    f"`limit` up to {MAX_PAGE}",
    f"`wait` up to {TASK_WAIT:.0f}",
    f"names at most {roster.MAX_LEVELS} patterns",
    f"at most {roster.MAX_ACTIVITY}",
    f"at least {FEWEST_IDS} if there are `more`, at most {MOST_IDS:,}",
    signing.SIGNATURE_HEADER,
    *(f"`{word.decode()}`" for word in (ACK, NAK, IN_PROGRESS, TERM)),
    *(f"`{kind}`" for kind in signing.KINDS),
    *(f"`{reason}`" for reason in envelope.REASONS),
    *(f"`{name}`" for name in sorted(records.REPUBLISH_HEADERS)),
]


@pytest.mark.parametrize("phrase", PHRASES)
def test_the_page_says_what_the_code_does(phrase: str) -> None:
    assert phrase in FLAT
