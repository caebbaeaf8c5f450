"""How far back the log is needed by what is unread: never less than by looking at every frame."""

import random

import pytest

from tidings.model import unread
from tidings.model.unread import UnreadWindow


@pytest.mark.parametrize("most", [4, 4_096])
def test_it_never_lets_go_of_what_an_unread_frame_holds(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(unread, "MOST_ENTRIES", most)
    for seed in range(200):
        rng = random.Random(seed)
        window, frames, place = UnreadWindow(), list[tuple[int, int]](), 0
        for _ in range(60):
            if rng.random() < 0.7:
                place += rng.randint(1, 3)
                # one that was there already when it was made again has the place it had
                at = rng.choice([place, place, place, *(each for each, _ in frames)])
                frames.append((at, rng.randint(1, 100)))
                window.add(*frames[-1])
            else:
                oldest = rng.choice([None, *(each for each, _ in frames)])
                frames = [] if oldest is None else [frame for frame in frames if frame[0] >= oldest]
                window.read_below(oldest)
            exact = min((first for _, first in frames), default=None)
            if exact is not None:
                assert window.needed is not None
                assert window.needed <= exact
        window.read_below(None)
        assert window.needed is None


def test_it_is_exact_while_it_need_not_merge_and_can_be_made_of_rows_in_any_order() -> None:
    frames = [(5, 50), (1, 10), (3, 20), (4, 70)]
    window = UnreadWindow(frames)
    found = []
    for oldest in (1, 2, 4, 5, 6):
        window.read_below(oldest)
        found.append(window.needed)
    assert found == [10, 20, 50, 50, None]
