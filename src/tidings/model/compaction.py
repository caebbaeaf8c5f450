"""Which superseded ruling versions may be purged without changing any answer at or above the floor.

A purge removes every version of one subject below a sequence, so the question per subject is how far it may go.
A version is superseded by a newer *effective* one at or below the floor; three things hold it longer:

- an access version under which a retained join was judged (a later fold would void that join);
- an access version whose name voided a record that is still there (a later fold would revive that record);
- a space version that rotated the steward key, and so every version after the first rotation (chain of trust).

Nothing above the floor is touched, leases included: a sequence missing there is a fault, and a reader cannot know
that it was only a lease. Whatever is in doubt stays. Carrying out only some of the purges is safe too; memberships
come first, so that stopping in between turns no old join void in the statistics.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping

from tidings.model.projection import Table
from tidings.wire import subjects

#: (subject, below): purge the versions of `subject` whose sequence is smaller than `below`
Purge = tuple[str, int]
#: by subject, the sequences of its records that changed something
Versions = Mapping[str, list[int]]


def removable(table: Table, floor: int) -> list[Purge]:
    """The purges that are safe at `floor`, where `table` is the fold of the whole log."""
    # of most subjects the oldest record is the one in force: nothing of them can go, and they are not looked at further
    several = {subject: each for subject, each in table.effective.items() if table.oldest[subject] < each[-1]}
    cuts = [*_member_cuts(table, several, floor), *_other_cuts(table, several, floor)]
    return [(subject, below) for subject, below in cuts if table.oldest[subject] < below]


def _member_cuts(table: Table, several: Versions, floor: int) -> Iterator[Purge]:
    for subject, versions in several.items():
        if isinstance(table.subjects.parse(subject), subjects.MemberSubject):
            yield subject, _newest(versions, floor)


def _other_cuts(table: Table, several: Versions, floor: int) -> Iterator[Purge]:
    for subject, versions in several.items():
        match table.subjects.parse(subject):
            case subjects.AccessSubject(owner):
                holds = (floor, _first_retained_join(table, owner, floor), table.name_pins.get(owner, floor))
                yield subject, _newest(versions, min(holds))
            case subjects.SpaceSubject():
                yield subject, _newest(versions, min([floor, *table.rotations]))
            case subjects.ChannelSubject() | subjects.LinkSubject() | subjects.StewardLeaseSubject():
                yield subject, _newest(versions, floor)


def _first_retained_join(table: Table, owner: str, floor: int) -> int:
    """The oldest effective join of an owner that survives the membership purges at this floor, or the floor."""
    return min((i.joined for i in table.intervals(owner) if i.left is None or i.left > floor), default=floor)


def _newest(versions: list[int], limit: int) -> int:
    """The newest version at or below `limit`, or 0: nothing is below it."""
    index = bisect_right(versions, limit)
    return versions[index - 1] if index else 0
