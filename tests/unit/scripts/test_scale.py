"""`scripts/scale.py`: its figures hold together, and `docs/scale.md` is what they say."""

import json
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from line_chart import LABEL_GAP, Line, LineChart, apart
from scale import SIZES, measure, most_revocations
from scale_page import LIMITS, MAX_PAYLOAD, MEANINGS, SHORT, Figures, Limit, charts, limits_in_order, written_page
from scale_world import BEGAN, SUBJECTS, World

ROOT = Path(__file__).parents[3]
FOLDER, PAGE = ROOT / "docs" / "scale", ROOT / "docs" / "scale.md"
COMMITTED = json.loads((FOLDER / "figures.json").read_text())
NAMES = {each.name for each in MEANINGS}
#: what is not more where there are more agents
SHRINKING = {"log_days_kept", "receipt_hours", "mailbox_minutes"}
STEADY = {"agent_token_bytes", "row_bytes", "message_bytes", "ledger_row_memory"}


@pytest.fixture(scope="module")
def small() -> list[Figures]:
    return [measure(agents) for agents in (20, 60)]


def test_every_figure_has_a_meaning_and_every_meaning_a_figure(small: list[Figures]) -> None:
    for figures in (*small, *COMMITTED["sizes"]):
        assert figures.keys() == NAMES


def test_what_is_counted_is_the_same_in_every_run(small: list[Figures]) -> None:
    counted = {each.name for each in MEANINGS if each.source == "counted"} | {"mean_audience", "frames_a_day"}
    again = measure(20)
    assert {name: again[name] for name in counted} == {name: small[0][name] for name in counted}


def test_figures_of_a_space_hold_together(small: list[Figures]) -> None:
    for each in small:
        world = World(int(each["agents"]))
        assert each["rulings"] == each["agents"] * (1 + world.assumed.memberships)
        assert each["largest_channel"] <= each["agents"]
        assert each["second_rows"] >= each["second_frames"] > 0
        assert each["minute_deliveries"] >= each["minute_rows"] >= each["minute_frames"]
        assert each["deliveries_a_day"] == pytest.approx(each["mean_audience"] * each["messages_a_day"], rel=1e-3)
        assert each["second_deferred"] == each["minute_deferred"] == 0


def test_what_grows_grows_with_the_agents() -> None:
    counted = NAMES - {each.name for each in MEANINGS if each.source == "measured"}
    assert [each["agents"] for each in COMMITTED["sizes"]] == list(SIZES)
    for one, next_one in pairwise(COMMITTED["sizes"]):
        for name in counted - STEADY - SHRINKING:
            assert one[name] <= next_one[name], name
        for name in SHRINKING:
            assert one[name] >= next_one[name], name


def test_the_account_token_holds_as_many_void_keys_as_the_script_says() -> None:
    world = World(1)
    most = most_revocations(world.keyring)
    sizes = [
        len(world.keyring.agents_token(SUBJECTS, {f"U{n:055}": BEGAN for n in range(count)}))
        for count in (most - 20, most + 20)
    ]
    assert sizes[0] < MAX_PAYLOAD < sizes[1]
    assert f"About {round(COMMITTED['most_revocations'], -2):,} keys" in PAGE.read_text()


def test_a_limit_is_met_between_the_sizes_around_it() -> None:
    sizes: list[Figures] = [{"agents": 100, "x": 1, "y": 8}, {"agents": 10_000, "x": 100, "y": 2}]

    def met(figure: str, at: float, *, below: bool = False) -> float | None:
        return Limit(figure, at, "", "", "", "", below).met(sizes)

    assert met("x", 10) == pytest.approx(1_000)
    assert met("y", 4, below=True) == pytest.approx(1_000)
    assert met("x", 1) == 100
    assert met("x", 101) is None


def test_every_limit_is_of_a_figure_and_the_first_comes_first() -> None:
    assert {limit.figure for limit in LIMITS} == SHORT.keys()
    assert SHORT.keys() <= NAMES
    met = [where for where, _ in limits_in_order(COMMITTED["sizes"])]
    assert met == sorted(met)
    assert len(met) > 8


def test_the_page_has_the_tables_of_the_committed_figures() -> None:
    page = PAGE.read_text()
    assert written_page(page, COMMITTED["sizes"]) == page
    assert {name for name in NAMES if f"| `{name}` |" not in page} == set()


def test_the_charts_are_those_of_the_committed_figures_and_the_page_shows_each() -> None:
    made = charts(COMMITTED["sizes"])
    assert {path.name: path.read_text() for path in FOLDER.glob("*.svg")} == made
    assert set(re.findall(r"\]\(scale/(\S+\.svg)\)", PAGE.read_text())) == set(made)


def test_a_chart_is_well_formed_and_its_names_lie_apart() -> None:
    lines = [Line(f"a & {n}", [(100, 10), (1_000, 10 + n / 100)]) for n in range(5)] + [Line("most", limit=11)]
    svg = LineChart("many <lines>", "agents", "bytes", lines, str).svg()
    words = [each for each in ET.fromstring(svg).iter() if each.tag.endswith("text")]
    heights = sorted(float(each.attrib["y"]) for each in words if (each.text or "").startswith(("a &", "most")))
    assert len(heights) == 6
    assert all(b - a >= LABEL_GAP - 0.01 for a, b in pairwise(heights))
    assert apart([300, 299, 100], 0, 300) == [300, 283, 100]
