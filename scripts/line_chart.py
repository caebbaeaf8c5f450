"""Line charts with two logarithmic axes, and bars along one, as SVG text: few enough to be written by hand.

The same input gives the same bytes. A chart has a background of its own, light or dark as its reader prefers, so its
words can be read wherever it is shown. Lines are named at their right ends; names that would lie on each other are
moved apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 420
LEFT, RIGHT, TOP, BOTTOM = 86, 250, 48, 52
#: of lines, told apart also without colours by their dashes; readable on light and on dark
COLOURS = ("#2f7fd8", "#d9622b", "#2f9e62", "#a35bd0", "#c2417c", "#8a8420", "#1f9aa8")
DASHES = ("", "7 4", "2 4", "10 3 2 3", "4 3", "12 4", "1 3")
LABEL_GAP = 17
STYLE = """<style>
.ground { fill: #ffffff; } .words { fill: #1f2328; font: 13px sans-serif; } .title { font: bold 15px sans-serif; }
.grid { stroke: #d0d7de; } .axis { stroke: #57606a; } .limit { stroke: #57606a; stroke-dasharray: 3 3; }
@media (prefers-color-scheme: dark) {
.ground { fill: #161b22; } .words { fill: #e6edf3; } .grid { stroke: #30363d; } .axis, .limit { stroke: #9198a1; }
}
</style>"""


@dataclass(frozen=True)
class Line:
    """A line through points of (x, y), or a limit: one y for every x."""

    name: str
    points: Sequence[tuple[float, float]] = ()
    limit: float | None = None


@dataclass(frozen=True)
class LineChart:
    title: str
    x: str
    y: str
    lines: Sequence[Line]
    tick: Callable[[float], str]

    def svg(self) -> str:
        points = [point for line in self.lines for point in line.points if point[1] > 0]
        ys = [y for _, y in points] + [line.limit for line in self.lines if line.limit]
        across, up = _decades([x for x, _ in points]), _decades(ys)
        parts = [*self._grid(across, up), *self._drawn(across, up)]
        return _document(self.title, HEIGHT, parts)

    def _grid(self, across: range, up: range) -> Iterator[str]:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        step = max(1, math.ceil((len(up) - 1) / 8))
        for power in across:
            x = _place(10.0**power, across, LEFT, right)
            yield f'<line class="grid" x1="{x}" y1="{TOP}" x2="{x}" y2="{bottom}"/>'
            yield _words(x, bottom + 18, f"{10**power:,}", "middle")
        for power in up[::step]:
            y = _place(10.0**power, up, bottom, TOP)
            yield f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{right}" y2="{y}"/>'
            yield _words(LEFT - 8, y + 4, self.tick(10.0**power), "end")
        yield f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>'
        yield f'<line class="axis" x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{bottom}"/>'
        yield _words((LEFT + right) / 2, HEIGHT - 12, self.x, "middle")
        middle = (TOP + bottom) / 2
        yield _words(18, middle, self.y, "middle", f' transform="rotate(-90 18 {middle})"')

    def _drawn(self, across: range, up: range) -> Iterator[str]:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        ends: list[float] = []
        number = 0
        colours: list[str | None] = []
        for line in self.lines:
            if line.limit is not None:
                y = _place(line.limit, up, bottom, TOP)
                yield f'<line class="limit" x1="{LEFT}" y1="{y}" x2="{right}" y2="{y}"/>'
                ends.append(y)
                colours.append(None)
                continue
            colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
            number += 1
            placed = [(_place(x, across, LEFT, right), _place(y, up, bottom, TOP)) for x, y in line.points if y > 0]
            path = " ".join(f"{x},{y}" for x, y in placed)
            dashes = f' stroke-dasharray="{dash}"' if dash else ""
            yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
            yield from (f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in placed)
            ends.append(placed[-1][1])
            colours.append(colour)
        for line, end, y, drawn in zip(self.lines, ends, apart(ends, TOP, bottom), colours, strict=True):
            kind = 'class="limit"' if drawn is None else f'stroke="{drawn}"'
            yield f'<line {kind} x1="{right + 4}" y1="{end}" x2="{right + 16}" y2="{y}"/>'
            yield _words(right + 20, y + 4, line.name)


def bars(title: str, x: str, rows: Sequence[tuple[str, float]], least: float, most: float) -> str:
    """Names with a bar from the left edge to a place on a logarithmic axis, each with its number."""
    left, right, gap = 330, WIDTH - 90, 22
    height = TOP + gap * len(rows) + BOTTOM
    bottom = height - BOTTOM
    across = _decades([least, most])
    parts = []
    for power in across:
        place = _place(10.0**power, across, left, right)
        parts.append(f'<line class="grid" x1="{place}" y1="{TOP}" x2="{place}" y2="{bottom}"/>')
        parts.append(_words(place, bottom + 18, f"{10**power:,}", "middle"))
    for number, (name, value) in enumerate(rows):
        y = TOP + gap * number + gap / 2
        end = max(left + 2, _place(value, across, left, right))
        size = f'width="{round(end - left, 1)}" height="12" rx="2"'
        parts.append(f'<rect x="{left}" y="{y - 6}" {size} fill="{COLOURS[0]}"/>')
        parts.append(_words(left - 8, y + 4, name, "end"))
        parts.append(_words(end + 6, y + 4, f"{value:,.0f}"))
    parts.append(f'<line class="axis" x1="{left}" y1="{TOP}" x2="{left}" y2="{bottom}"/>')
    parts.append(_words((left + right) / 2, height - 12, x, "middle"))
    return _document(title, height, parts)


def apart(wanted: Sequence[float], top: float, bottom: float, gap: float = LABEL_GAP) -> list[float]:
    """Places for names at these heights, in their order, none closer to another than the gap."""
    order = sorted(range(len(wanted)), key=lambda index: (wanted[index], index))
    placed = [0.0] * len(wanted)
    last = top - gap
    for index in order:
        last = placed[index] = max(wanted[index], last + gap)
    last = bottom + gap
    for index in reversed(order):
        last = placed[index] = min(placed[index], last - gap)
    return [round(place, 1) for place in placed]


def _decades(values: Iterable[float]) -> range:
    found = list(values)
    low, high = math.floor(math.log10(min(found)) + 1e-9), math.ceil(math.log10(max(found)) - 1e-9)
    return range(low, max(high, low + 1) + 1)


def _place(value: float, decades: range, start: float, end: float) -> float:
    share = (math.log10(value) - decades[0]) / (decades[-1] - decades[0])
    return round(start + share * (end - start), 1)


def _words(x: float, y: float, text: str, anchor: str = "start", more: str = "") -> str:
    return f'<text class="words" x="{round(x, 1)}" y="{round(y, 1)}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _document(title: str, height: float, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">'
    ground = f'<rect class="ground" width="{WIDTH}" height="{height:g}" rx="8"/>'
    named = f'<text class="words title" x="24" y="28">{escape(title)}</text>'
    return "\n".join([head, f"<title>{escape(title)}</title>", STYLE, ground, named, *parts, "</svg>", ""])
