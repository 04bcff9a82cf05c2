"""Numbers to the places of a small drawing: axes, lines, dots and their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 420, 260
"""Of a drawing, in its own units, which are pixels on a narrow screen."""
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 40
"""Of the frame's distance from the drawing's edges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """One value, with its interval if it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one run contributes to a drawing."""

    run: int
    """Its number, which gives its colour."""
    dots: Sequence[Dot]
    is_line: bool
    """Joined, or each alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark on an axis."""

    at: float
    """Drawing units."""
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A trace in drawing units."""

    run: int
    path: str
    """Points of the line, `x,y x,y`; empty without one."""
    dots: Sequence[tuple[float, float]]
    """Only of traces without a line, and of lines of one point."""
    whiskers: Sequence[tuple[float, float, float]]
    """x, upper and lower end of each interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A drawing, as the page's template puts it into SVG."""

    id: str
    title: str
    about: str
    x_label: str
    y_label: str
    x_ticks: Sequence[Tick] = ()
    y_ticks: Sequence[Tick] = ()
    traces: Sequence[Placed] = ()
    """Empty where there is nothing to draw."""


def drawing(id: str, title: str, about: str, x_label: str, y_label: str, traces: Sequence[Trace]) -> Drawing:
    """Places `traces` in one frame that holds all of them, their intervals too."""
    dots = [dot for trace in traces for dot in trace.dots]
    if not dots:
        return Drawing(id=id, title=title, about=about, x_label=x_label, y_label=y_label)
    across = limits([dot.x for dot in dots])
    ys = [value for dot in dots for value in (dot.y, dot.low, dot.high) if value is not None]
    up = limits(ys)

    def x(value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (value - across[0]) / (across[1] - across[0]), 1)

    def y(value: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (up[1] - value) / (up[1] - up[0]), 1)

    placed = [
        Placed(
            run=trace.run,
            path=" ".join(f"{x(dot.x)},{y(dot.y)}" for dot in trace.dots) if trace.is_line else "",
            dots=[] if trace.is_line and len(trace.dots) > 1 else [(x(dot.x), y(dot.y)) for dot in trace.dots],
            whiskers=[(x(dot.x), y(dot.high), y(dot.low)) for dot in trace.dots
                      if dot.low is not None and dot.high is not None],
        )
        for trace in traces if trace.dots
    ]
    return Drawing(
        id=id, title=title, about=about, x_label=x_label, y_label=y_label, traces=placed,
        x_ticks=[Tick(at=x(value), label=f"{value:.6g}") for value in ticks(*across)],
        y_ticks=[Tick(at=y(value), label=f"{value:.6g}") for value in ticks(*up)],
    )


def limits(values: Sequence[float]) -> tuple[float, float]:
    """The smallest and the largest, and a twentieth of their distance beyond; around a single value, room for it."""
    low, high = min(values), max(values)
    beyond = 0.05 * (high - low)
    if not beyond > 1e-9 * max(abs(low), abs(high)):
        beyond = 0.05 * abs(high) or 0.5
    return low - beyond, high + beyond


def ticks(low: float, high: float) -> list[float]:
    """Two to six multiples of 1, 2 or 5 times a power of ten, from `low` to `high`."""
    power = 10.0 ** math.floor(math.log10((high - low) / 6))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= 6)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]
