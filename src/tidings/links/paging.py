"""Is a page one that a log can answer with? A peer is not trusted to move our token as it likes; pure."""

from __future__ import annotations

from tidings.errors import PageRefused
from tidings.wire.links import GapKind, LinkGap, LinkPage, Token
from tidings.wire.message import MAX_PAYLOAD

#: records of a page; a peer sends fewer if they are large
PAGE_RECORDS = 500
PAGE_BYTES = 256 * 1024
#: a single record may be larger than a page
RECORD_BYTES = 4 * MAX_PAYLOAD


def check_page(asked: Token, page: LinkPage, limit: int = PAGE_RECORDS) -> None:
    """PageRefused for what no log would answer to this token."""
    through = page.through
    if through.domain != asked.domain:
        raise PageRefused(f"asked about {asked.domain}, the peer answers about {through.domain}")
    if through.is_before(asked):
        raise PageRefused(f"asked what follows {asked.seq}, the peer goes back to {through.seq}")
    if page.head < through.seq:
        raise PageRefused(f"the peer says it looked up to {through.seq}, in a log that ends at {page.head}")
    if through.seq == asked.seq and (page.records or page.head > asked.seq):
        raise PageRefused(f"there is more behind {asked.seq} (up to {page.head}), but the peer's page does not move")
    if through.seq == asked.seq and asked.mark and through.mark != asked.mark:
        raise PageRefused(f"another record is at {asked.seq} than before, and the peer does not say why")
    _check_records(asked, page, limit)


def _check_records(asked: Token, page: LinkPage, limit: int) -> None:
    if len(page.records) > limit:
        raise PageRefused(f"{len(page.records)} records in a page of at most {limit}")
    size = sum(len(each.payload) for each in page.records)
    if size > (PAGE_BYTES if len(page.records) > 1 else RECORD_BYTES):
        raise PageRefused(f"{size} bytes in a page of {len(page.records)} records")
    last = asked.seq
    for each in page.records:
        if not last < each.seq <= page.through.seq:
            raise PageRefused(f"record {each.seq} comes behind {last}, in a page up to {page.through.seq}")
        last = each.seq


def check_gap(asked: Token, gap: LinkGap) -> None:
    """PageRefused for a reason that what is said of the log contradicts."""
    contradiction = {
        GapKind.TOO_OLD: gap.epoch != asked.epoch or not asked.seq < gap.oldest <= gap.head,
        GapKind.TOO_NEW: gap.epoch != asked.epoch or gap.head >= asked.seq,
        GapKind.EPOCH: gap.epoch == asked.epoch,
        GapKind.RECORD: gap.epoch != asked.epoch or asked.seq == 0,
        GapKind.STREAM: False,
    }[gap.kind]
    if contradiction or not 0 <= gap.agreed <= max(gap.head, 0):
        raise PageRefused(f"the peer cannot go on from {asked.seq}: {gap.kind.value}; but it says {gap}")


def agreed_token(asked: Token, gap: LinkGap) -> Token:
    """Where to begin again: up to there the log is the one we know. Its mark is not known. If nobody can say up to
    where that is, and its beginning was removed by age, that was handled when it was there: it begins behind it."""
    agreed = min(gap.agreed, asked.seq)
    if gap.agreed == 0 and gap.kind in (GapKind.RECORD, GapKind.TOO_NEW):
        agreed = max(0, min(gap.oldest, gap.head, asked.seq))
    if gap.kind is GapKind.RECORD:
        agreed = min(agreed, asked.seq - 1)
    return Token(space=asked.space, epoch=gap.epoch, seq=agreed)
