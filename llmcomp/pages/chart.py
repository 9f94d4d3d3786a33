"""Plain charts as SVG to be put into HTML, in the page's text colour. Drawn by hand: a plotting library takes longer to load than a small model to
compress, and keeps caches in the user's home."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

COLORS = ("#2f7fc1", "#d9691f", "#2a9d6f", "#c8527a", "#8a6fd1", "#a8862d", "#2f9faa", "#888888")
"""Told apart on white and on near-black."""
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 900, 300, 78, 46, 12, 16
"""Of the whole chart, and of its margins; in pixels, as all places here are."""
ROW, COLUMNS, BAR, LABELS = 20, 3, 24, 260
"""Height of a line of the legend, entries in it; height of a bar, width of the names beside bars."""
LONGEST = 40
"""Characters of a name."""
TICKS = 6


@dataclass(frozen=True)
class Line:
    """Points (x, y) under a name. `faint` ones are dashed, without marks and not in the legend; `color` is a number."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int
    faint: bool = False
    connected: bool = True


def lines(given: Sequence[Line], x_label: str, y_label: str, log: bool = False, x_ticks: Mapping[float, str] | None = None) -> str:
    """The lines, their vertical axis from zero on or, with `log`, logarithmic, where every y is above zero. `x_ticks`: place -> text."""
    xs, ys = ([point[axis] for line in given for point in line.points] for axis in (0, 1))
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1)
    if log:
        low, high = log10(min(ys)) - 0.05, log10(max(ys)) + 0.05
    else:
        low, high = 0.0, 1.08 * max(ys) or 1.0
    right, floor_y = WIDTH - RIGHT, HEIGHT - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        value = log10(y) if log else y
        return LEFT + 8 + (right - LEFT - 16) * (x - x_low) / (x_high - x_low), floor_y - (floor_y - TOP) * (value - low) / (high - low)

    parts = []
    for value in _log_ticks(low, high) if log else _ticks(low, high):
        y = place(x_low, value)[1]
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>{_text(LEFT - 8, y + 4, f"{value:.4g}", "end")}')
    for value, text in (x_ticks or {v: f"{v:g}" for v in _ticks(x_low, x_high, whole=True)}).items():
        x = place(value, 10**low if log else low)[0]
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{floor_y}"/>{_text(x, floor_y + 18, text, "middle")}')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{floor_y}H{right}"/>')
    parts.append(_text((LEFT + right) / 2, HEIGHT - 8, x_label, "middle"))
    parts.append(f'<g transform="translate(14 {(TOP + floor_y) / 2:.0f}) rotate(-90)">{_text(0, 0, y_label, "middle")}</g>')
    for line in given:
        color = COLORS[line.color % len(COLORS)]
        places = [place(*point) for point in line.points]
        if line.connected:
            way = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            parts.append(f'<path class="{"faint" if line.faint else "line"}" stroke="{color}" d="M{way}"/>')
        if not line.faint:
            for (x, y), (at, value) in zip(places, line.points, strict=True):
                told = escape(f"{line.name}, {at:g}: {value:.4g}")
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"><title>{told}</title></circle>')
    named = [line for line in given if not line.faint]
    for i, line in enumerate(named):
        x, y = LEFT + i % COLUMNS * (right - LEFT) / COLUMNS, HEIGHT + ROW * (i // COLUMNS) + 12
        parts.append(
            f'<circle cx="{x + 5:.0f}" cy="{y - 4}" r="4" fill="{COLORS[line.color % len(COLORS)]}"/>{_text(x + 16, y, _short(line.name))}'
        )
    return _svg(HEIGHT + ROW * ceil(len(named) / COLUMNS), parts)


def bars(values: Mapping[str, float], unit: str) -> str:
    """A bar with its figure for each name."""
    longest, parts = max(values.values(), default=0) or 1.0, []
    for i, (name, value) in enumerate(values.items()):
        y, width = BAR * i, (WIDTH - LABELS - 140) * value / longest
        figure = f"{value:,.{1 if value >= 1 else 3}f} {unit}"
        parts.append(
            f'{_text(LABELS - 8, y + 16, _short(name), "end")}<rect x="{LABELS}" y="{y + 4}" width="{width:.1f}" height="16" fill="{COLORS[0]}"/>'
        )
        parts.append(_text(LABELS + width + 8, y + 16, figure))
    return _svg(BAR * len(values), parts)


def _ticks(low: float, high: float, whole: bool = False) -> Iterator[float]:
    """Multiples of one, two or five times a power of ten."""
    rough = (high - low) / TICKS
    power = 10 ** floor(log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    step = max(1, step) if whole else step
    return (k * step for k in range(ceil(low / step), floor(high / step) + 1))


def _log_ticks(low: float, high: float) -> Iterator[float]:
    """The same between two powers of ten, given by their logarithms."""
    digits = (1, 2, 5) if high - low < 2 else (1,)
    return (d * 10.0**k for k in range(floor(low), ceil(high) + 1) for d in digits if low <= log10(d) + k <= high)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else name[: LONGEST // 2] + "…" + name[-LONGEST // 2 :]


def _svg(height: int, parts: Sequence[str]) -> str:
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">' + "\n".join(parts) + "</svg>"
