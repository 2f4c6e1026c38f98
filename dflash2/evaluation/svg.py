"""Two kinds of charts as inline SVG: lines over numbers, and bars over names. Colours are CSS variables of the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Bar", "Line", "Point", "bars", "lines", "ticks"]

WIDTH, HEIGHT = 440, 260
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 12, 40


@dataclass(frozen=True)
class Point:
    """A value over ``x`` with its interval; ``label`` is what a pointer over it shows."""

    x: float
    value: float
    low: float
    high: float
    label: str


@dataclass(frozen=True)
class Line:
    """Points of one run; ``color`` counts the page's colours."""

    points: Sequence[Point]
    color: int
    dashed: bool = False


@dataclass(frozen=True)
class Bar:
    """One run's value for one name."""

    color: int
    value: float
    low: float
    high: float
    label: str


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that enclose ``[low, high]``, about ``count`` of them."""
    span = max(high - low, 1e-9)
    raw = span / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def lines(
    found: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_from: float | None = None,
    y_to: float | None = None,
    names: Sequence[str] | None = None,
) -> str:
    """Lines with bands for their intervals.

    Args:
        found: at least one point in all.
        title: for readers who do not see it.
        x_label: under the axis.
        y_from, y_to: ends of the y axis; by default those of the data.
        names: of x = 0, 1, ...; by default the numbers themselves.
    """
    points = [p for line in found for p in line.points]
    xs = sorted({p.x for p in points})
    low = min(p.low for p in points) if y_from is None else y_from
    marks = ticks(low, max(p.high for p in points) if y_to is None else y_to)
    x_low, x_high = xs[0], max(xs[-1], xs[0] + 1)
    pad = 0.25 * (x_high - x_low) / max(len(xs) - 1, 1)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low + pad) / (x_high - x_low + 2 * pad)
        up = (y - marks[0]) / (marks[-1] - marks[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [_grid(y, at(x_low, y)[1]) for y in marks]
    for x in xs:
        name = f"{x:g}" if names is None else names[int(x)]
        parts.append(f'<text class="tick" x="{at(x, 0)[0]:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">')
        parts.append(f"{escape(name)}</text>")
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    parts += [_line(line, at) for line in found if line.points]
    return _svg(parts, HEIGHT, title)


def _line(line: Line, at: object) -> str:
    assert callable(at)
    edge = [at(p.x, p.high) for p in line.points] + [at(p.x, p.low) for p in reversed(line.points)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(p.x, p.value) for p in line.points))
    band = " ".join(f"{x:.1f},{y:.1f}" for x, y in edge)
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    parts = [] if line.dashed else [f'<polygon class="band c{line.color}" points="{band}"/>']
    parts.append(f'<polyline class="line c{line.color}" points="{path}"{dash}/>')
    for p in line.points:
        x, y = at(p.x, p.value)
        parts.append(f'<circle class="dot c{line.color}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">')
        parts.append(f"<title>{escape(p.label)}</title></circle>")
    return "".join(parts)


def bars(
    found: Sequence[tuple[str, Sequence[Bar]]], *, title: str, base: float = 0.0, mark: float | None = None
) -> str:
    """Horizontal bars, one group under each name, with whiskers for the intervals and the values in figures.

    Args:
        found: names, each with its bars.
        title: for readers who do not see it.
        base: where bars begin.
        mark: a value to draw a line at.
    """
    most = max(bar.high for _, group in found for bar in group)
    scale = ticks(base, most)[-1]
    thick, gap, head, room = 16, 12, 17, 44

    def across(value: float) -> float:
        return 4 + (value - base) / (scale - base) * (WIDTH - 8 - room)

    parts, y = [], 4.0
    for name, group in found:
        parts.append(f'<text class="name" x="4" y="{y + 12:.1f}">{escape(name)}</text>')
        y += head
        for bar in group:
            x, low, high, middle = across(bar.value), across(bar.low), across(bar.high), y + thick / 2 - 1
            parts.append(f'<g><title>{escape(bar.label)}</title><rect class="bar c{bar.color}" x="4" y="{y:.1f}" ')
            parts.append(f'width="{max(x - 4, 0):.1f}" height="{thick - 2}" rx="2"/>')
            parts.append(f'<path class="whisker" d="M{low:.1f} {middle:.1f}H{high:.1f}M{low:.1f} {middle - 3:.1f}v6')
            parts.append(f'M{high:.1f} {middle - 3:.1f}v6"/>')
            parts.append(f'<text class="value" x="{high + 6:.1f}" y="{middle + 4:.1f}">{bar.value:.2f}</text></g>')
            y += thick
        y += gap
    if mark is not None:
        parts.append(f'<path class="mark" d="M{across(mark):.1f} 4V{y - gap:.1f}"/>')
    return _svg(parts, y, title)


def _grid(value: float, y: float) -> str:
    return (
        f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
    )


def _svg(parts: Sequence[str], height: float, title: str) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title, quote=True)}">'
    return head + "".join(parts) + "</svg>"
