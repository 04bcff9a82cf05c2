"""The table and the figure of `ablations.py`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Found = dict[str, Any]
"""One run: what it was, and its figures."""

CENTRE = "recipe"
"""The cell that changes nothing."""
KNOBS: dict[str, tuple[str, float | None]] = {
    "m": ("recent share m", 0.8),
    "k": ("steps between publications k", 2),
    "K": ("group size K", 8),
    "beta": ("beta", 0.02),
    "T": ("reward temperature T, pools of 16", None),
}
"""Title of each knob's panels, and the value that the recipe gives it; None: the recipe is not on its axis."""
MARK = "<!-- below: written by benchmarks/ablations.py -->"
"""What a page holds above this line is kept."""
COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("pass@1", "pass@1", 3), ("pass@1_greedy", "greedy", 3), ("pass@k", "pass@k", 3), ("kl", "KL", 2),
    ("entropy", "entropy", 2), ("distinct", "distinct", 3), ("age", "age", 1), ("flat", "flat", 2),
    ("wait_share", "waits", 2), ("seconds", "s", 0),
)
"""Key, head and decimals of each column of figures."""
ROWS: tuple[tuple[str, str], ...] = (("pass@1", "pass@1"), ("kl", "KL, nats"), ("distinct", "distinct"))
"""Key and label of each row of panels."""
WIDTH, HEIGHT, LEFT, GAP, TOP = 176, 120, 62, 22, 46
"""Of a panel; what is left of the first; between two; above the first; in pixels."""
STYLE = """<style>
svg { --back: #ffffff; --text: #1c2430; --quiet: #5b6675; --rule: #d5dae0; --dot: #1768b3; --own: #c2570c; }
@media (prefers-color-scheme: dark) {
  svg { --back: #14171b; --text: #e6e9ed; --quiet: #a3acb7; --rule: #39404a; --dot: #6db3f8; --own: #f5a35c; }
}
.back { fill: var(--back); } text { fill: var(--text); } .quiet { fill: var(--quiet); }
.rule { stroke: var(--rule); fill: none; } .span { stroke: var(--dot); stroke-width: 1.5; fill: none; }
.dot { fill: var(--dot); } .own { stroke: var(--own); stroke-width: 1.5; fill: none; } .owndot { fill: var(--own); }
</style>"""
"""Colours for a light and a dark page; the back is drawn, so that either stays readable on any."""


def split(cell: str) -> tuple[str, float]:
    """Knob and value of a cell's name; value 0 for the centre."""
    if cell == CENTRE:
        return CENTRE, 0.0
    knob, value = cell.split(" ")
    return knob, float(value)


def grouped(found: Sequence[Found]) -> dict[tuple[str, float], list[Found]]:
    """Runs by knob and value, the centre first, knobs in the order of KNOBS; seeds of one cell are together.

    Raises:
        SystemExit: they are of different modes or numbers of steps, or there are none.
    """
    kinds = sorted({(row["mode"], row["steps"]) for row in found})
    if len(kinds) != 1:
        raise SystemExit(f"one mode and one number of steps make a table; found {kinds}: give --add files of one kind.")
    groups: dict[tuple[str, float], list[Found]] = defaultdict(list)
    for row in sorted(found, key=lambda row: row["seed"]):
        groups[split(row["cell"])].append(row)
    order = [CENTRE, *KNOBS]
    return {key: groups[key] for key in sorted(groups, key=lambda key: (order.index(key[0]), key[1]))}


def values(rows: Sequence[Found], key: str) -> list[float]:
    """A figure of every run that was done."""
    return [row[key] for row in rows if row["status"] == "done"]


def mean(numbers: Sequence[float]) -> float:
    """Arithmetic mean; of at least one."""
    return math.fsum(numbers) / len(numbers)


def spread(numbers: Sequence[float], decimals: int) -> str:
    """`mean (smallest to largest)`; the mean alone where both look the same, n/a of none."""
    if not numbers:
        return "n/a"
    middle, low, high = (f"{number:.{decimals}f}" for number in (mean(numbers), min(numbers), max(numbers)))
    return middle if low == high else f"{middle} ({low} to {high})"


def table(found: Sequence[Found]) -> str:
    """Markdown: a line for each cell, mean and smallest to largest over seeds."""
    lines = [f"| knob | value | seeds | {' | '.join(head for _, head, _ in COLUMNS)} |",
             "|" + "---|" * (3 + len(COLUMNS))]
    for (knob, value), rows in grouped(found).items():
        failed = sum(row["status"] != "done" for row in rows)
        seeds = f"{len(rows)}" + (f", {failed} failed" if failed else "")
        figures = [spread(values(rows, key), decimals) for key, _, decimals in COLUMNS]
        start = [knob, "-" if knob == CENTRE else f"{value:g}", seeds]
        lines.append(f"| {' | '.join([*start, *figures])} |")
    return "\n".join(lines)


def page(found: Sequence[Found], folder: Path) -> None:
    """Writes `ablations.svg`, and the table into `ablations.md` below what was written there by hand."""
    path = folder / "ablations.md"
    above = path.read_text("utf-8").split(MARK)[0].rstrip() if path.exists() else "# Ablations"
    (folder / "ablations.svg").write_text(figure(found), "utf-8")
    path.write_text(f"{above}\n\n{below(found)}", "utf-8")


def below(found: Sequence[Found]) -> str:
    """What a page holds from the mark on."""
    done = values(found, "start")
    ran = f"{len(found)} runs, mode {found[0]['mode']}, {found[0]['steps']} steps."
    if done:
        first = ", ".join(f"{head} {spread([start[key] for start in done], decimals)}"
                          for key, head, decimals in COLUMNS if key in done[0])
        ran += f" Before training, over all runs: {first}."
    return (f"{MARK}\n\n![pass@1, KL and distinct completions by knob](ablations.svg)\n\n{ran}\n\n"
            f"{table(found)}\n")


def figure(found: Sequence[Found]) -> str:
    """SVG: a panel for each knob and figure; a dot a seed, a line through the means, the recipe in its own colour."""
    groups = grouped(found)
    knobs = [knob for knob in KNOBS if any(key[0] == knob for key in groups)]
    parts: list[str] = []
    for line, (key, label) in enumerate(ROWS):
        low, high = limits([number for rows in groups.values() for number in values(rows, key)])
        top = TOP + line * (HEIGHT + GAP)
        parts.append(f'<text transform="translate(14 {top + HEIGHT / 2:.0f}) rotate(-90)" '
                     f'text-anchor="middle">{label}</text>')
        parts += [f'<text class="quiet" x="{LEFT - 6}" y="{_down(top, low, high, at) + 4:.1f}" '
                  f'text-anchor="end">{at:.3g}</text>' for at in ticks(low, high)]
        for column, knob in enumerate(knobs):
            parts += _panel(groups, knob, key, (LEFT + column * (WIDTH + GAP), top), (low, high))
    bottom = TOP + len(ROWS) * (HEIGHT + GAP)
    for column, knob in enumerate(knobs):
        left = LEFT + column * (WIDTH + GAP)
        parts.append(f'<text x="{left + WIDTH / 2:.1f}" y="{TOP - 10}" text-anchor="middle">{KNOBS[knob][0]}</text>')
        axis = _axis(groups, knob)
        parts += [f'<text class="quiet" x="{_across(left, axis, at):.1f}" y="{bottom - 6}" '
                  f'text-anchor="middle">{at:g}</text>' for at in axis]
    parts += [
        f'<circle class="dot" cx="{LEFT + 6}" cy="{bottom + 14}" r="2.5"/>',
        f'<text class="quiet" x="{LEFT + 14}" y="{bottom + 18}">a seed; the line joins means</text>',
        f'<circle class="owndot" cx="{LEFT + 186}" cy="{bottom + 14}" r="2.5"/>',
        f'<text class="quiet" x="{LEFT + 194}" y="{bottom + 18}">the recipe; the broken line is its mean</text>',
    ]
    width = LEFT + max(2, len(knobs)) * (WIDTH + GAP)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 30}" font-family="sans-serif" '
            f'font-size="11">\n{STYLE}\n<rect class="back" width="{width}" height="{bottom + 30}"/>\n'
            + "\n".join(parts) + "\n</svg>\n")


def limits(numbers: Sequence[float]) -> tuple[float, float]:
    """The smallest and the largest, and a twentieth of their distance beyond; around a single one, 1 is added."""
    if not numbers:
        return 0.0, 1.0
    low, high = min(numbers), max(numbers)
    beyond = 0.05 * (high - low) or 0.5
    return low - beyond, high + beyond


def ticks(low: float, high: float) -> list[float]:
    """Two to five multiples of 1, 2 or 5 times a power of ten, between `low` and `high`."""
    power = 10.0 ** math.floor(math.log10(high - low) - 1)
    for step in (power * factor for factor in (1, 2, 5, 10, 20, 50)):
        found = [at * step for at in range(math.ceil(low / step), math.floor(high / step) + 1)]
        if len(found) <= 5:
            break
    return found


def _axis(groups: dict[tuple[str, float], list[Found]], knob: str) -> list[float]:
    """Values of a knob, that of the recipe among them; they stand at equal distances."""
    own = KNOBS[knob][1]
    return sorted({value for name, value in groups if name == knob} | ({own} if own is not None else set()))


def _rows_at(groups: dict[tuple[str, float], list[Found]], knob: str, value: float) -> list[Found]:
    return groups.get((CENTRE, 0.0), []) if value == KNOBS[knob][1] else groups[knob, value]


def _panel(
    groups: dict[tuple[str, float], list[Found]], knob: str, key: str, corner: tuple[int, int],
    ends: tuple[float, float],
) -> list[str]:
    (left, top), (low, high) = corner, ends
    axis = _axis(groups, knob)
    parts = [f'<line class="rule" x1="{left}" x2="{left + WIDTH}" y1="{_down(top, low, high, at):.1f}" '
             f'y2="{_down(top, low, high, at):.1f}"/>' for at in ticks(low, high)]
    own = values(groups.get((CENTRE, 0.0), []), key)
    if own:
        y = _down(top, low, high, mean(own))
        parts.append(f'<line class="own" stroke-dasharray="4 3" x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" '
                     f'y2="{y:.1f}"/>')
    shown = {at: values(_rows_at(groups, knob, at), key) for at in axis}
    middles = [f"{_across(left, axis, at):.1f},{_down(top, low, high, mean(numbers)):.1f}"
               for at, numbers in shown.items() if numbers]
    parts.append(f'<polyline class="span" points="{" ".join(middles)}"/>')
    for at, numbers in shown.items():
        kind = "owndot" if at == KNOBS[knob][1] else "dot"
        parts += [f'<circle class="{kind}" cx="{_across(left, axis, at):.1f}" '
                  f'cy="{_down(top, low, high, number):.1f}" r="2.5"/>' for number in numbers]
    return [*parts, f'<rect class="rule" x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}"/>']


def _across(left: float, axis: Sequence[float], at: float) -> float:
    return left + WIDTH * (axis.index(at) + 0.5) / len(axis)


def _down(top: float, low: float, high: float, at: float) -> float:
    return top + HEIGHT * (high - at) / (high - low)
