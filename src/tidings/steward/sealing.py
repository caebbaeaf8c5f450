"""Before the broker starts: records that are known to be damaged are kept from costing those behind them.

`damage.py` remembers what cannot be read, `broker/block_repair.py` knows the files. Nothing is mended: what was lost
stays lost and told.
"""

from __future__ import annotations

import logging

from tidings.broker.block_repair import seal_damaged
from tidings.errors import TidingsError
from tidings.space.home import SpaceHome
from tidings.steward.damage import ABOVE_FLOOR, UNREADABLE, load

log = logging.getLogger(__name__)


def seal_known_damage(home: SpaceHome, space_id: str) -> list[int]:
    """Sequences that were sealed. What cannot be done is logged and keeps no broker from starting."""
    sealed: list[int] = []
    try:
        known = load(home, space_id).damages
        damages = [each for each in known if each.cause in (ABOVE_FLOOR, UNREADABLE) and each.first]
        for stream in sorted({each.stream for each in damages}):
            runs = [(each.first, each.last) for each in damages if each.stream == stream]
            for folder in home.store.glob(f"jetstream/*/streams/{stream}"):
                done = seal_damaged(folder, stream, runs)
                sealed += done.sealed
                for words in done.left:
                    log.error("%s: %s", stream, words)
    except (TidingsError, OSError) as error:
        log.error("what is known to be damaged could not be sealed: %s", error)
    if sealed:
        log.warning("damaged records were sealed, so that a crash of the broker costs no others: %s", sealed[:50])
    return sealed
