"""The table and the figure of `posterior.py`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Found = dict[str, Any]
"""One run: what it was, and its exact figures."""

MARK = "<!-- below: written by benchmarks/posterior.py -->"
"""What a page holds above this line is kept."""
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf",
           "#000000", "#aa5500")
WIDTH, HEIGHT, EDGE = 250, 190, 46
"""Of a panel, and what is left of it on the left and below, in pixels."""
DECADES = (-4, 0)
"""Powers of ten at the lower and upper end of every panel."""


def grouped(found: Sequence[Found]) -> dict[tuple[str, str, bool, int, int], list[Found]]:
    """Runs by task, objective, replay, lag and steps, in that order; runs that differ in seed alone are together."""
    groups: dict[tuple[str, str, bool, int, int], list[Found]] = defaultdict(list)
    for row in found:
        groups[row["task"], row["objective"], row["replay"], row["lag"], row["steps"]].append(row)
    return {key: groups[key] for key in sorted(groups, key=lambda key: (*key[:2], not key[2], *key[3:]))}


def mean(rows: Sequence[Found], key: str) -> float | None:
    """Over seeds; None where a figure does not exist."""
    values = [row[key] for row in rows]
    return None if None in values else math.fsum(values) / len(values)


def table(found: Sequence[Found]) -> str:
    """Markdown: one line for each task, objective, replay, lag and steps; means over seeds, and the largest tv."""
    lines = ["| task | objective | replay | lag | steps | seeds | tv | largest tv | kl | own tv | own kl | reward "
             "| entropy | modes |",
             "|" + "---|" * 14]
    for (task, objective, replay, lag, steps), rows in grouped(found).items():
        figures = [f"{mean(rows, 'tv'):.4f}", f"{max(row['tv'] for row in rows):.4f}", f"{mean(rows, 'kl'):.4f}"]
        for key in ("own_tv", "own_kl"):
            value = mean(rows, key)
            figures.append("n/a" if value is None else f"{value:.4f}")
        figures += [f"{mean(rows, 'reward'):.3f}", f"{mean(rows, 'entropy'):.2f}"]
        total = sum(row["modes"] for row in rows)
        figures.append(f"{sum(row['modes_found'] for row in rows)} of {total}" if total else "n/a")
        start = [task, objective, "on" if replay else "off", str(lag), str(steps), str(len(rows))]
        lines.append(f"| {' | '.join([*start, *figures])} |")
    return "\n".join(lines)


def page(found: Sequence[Found], folder: Path) -> None:
    """Writes `posterior.svg`, and the table into `posterior.md` below what was written there by hand."""
    (folder / "posterior.svg").write_text(figure(found), "utf-8")
    path = folder / "posterior.md"
    above = path.read_text("utf-8").split(MARK)[0].rstrip() if path.exists() else "# Distance to an exact posterior"
    start = [f"{task} {tv:.3f}" for task, tv in start_tv(found).items()]
    path.write_text(
        f"{above}\n\n{MARK}\n\n![tv against lag](posterior.svg)\n\n"
        f"tv of the start policy, mean: {', '.join(start)}.\n\n{table(found)}\n",
        "utf-8",
    )


def start_tv(found: Sequence[Found]) -> dict[str, float]:
    """Total variation before the first step, mean over runs, by task."""
    tasks = sorted({row["task"] for row in found})
    return {task: mean([row for row in found if row["task"] == task], "start_tv") or 0.0 for task in tasks}


def figure(found: Sequence[Found]) -> str:
    """SVG: a panel for each task and replay, mean tv on a logarithmic scale against lag, a line an objective.

    Of runs that differ in steps, the longest are shown.
    """
    tasks = sorted({row["task"] for row in found})
    lags = sorted({row["lag"] for row in found})
    colour_of = dict(zip(sorted({row["objective"] for row in found}), COLOURS, strict=False))
    longest = {key[:4]: rows for key, rows in grouped(found).items()}
    parts: list[str] = []
    for column, task in enumerate(tasks):
        for line, replay in enumerate((True, False)):
            left, top = EDGE + column * (WIDTH + EDGE), 30 + line * (HEIGHT + EDGE)
            parts += _frame(left, top, f"{task}, replay {'on' if replay else 'off'}", lags)
            for objective, colour in colour_of.items():
                points = [(_across(left, lags, lag), _down(top, mean(rows, "tv") or 0.0))
                          for lag in lags if (rows := longest.get((task, objective, replay, lag)))]
                joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
                parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
                parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points]
    width, below = EDGE + len(tasks) * (WIDTH + EDGE), 30 + 2 * (HEIGHT + EDGE)
    across = max(1, width // 200)
    for number, (objective, colour) in enumerate(colour_of.items()):
        x, y = EDGE + number % across * 200, below + 16 * (number // across)
        parts.append(f'<rect x="{x}" y="{y - 8}" width="12" height="8" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{y}">{objective}</text>')
    height = below + 16 * (len(colour_of) // across + 1)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            f'font-size="11">\n<rect width="{width}" height="{height}" fill="white"/>\n' + "\n".join(parts)
            + "\n</svg>\n")


def _across(left: float, lags: Sequence[int], lag: int) -> float:
    """Lags stand at equal distances."""
    return left + WIDTH * (lags.index(lag) + 0.5) / len(lags)


def _down(top: float, tv: float) -> float:
    power = min(DECADES[1], max(DECADES[0], math.log10(max(tv, 1e-12))))
    return top + HEIGHT * (DECADES[1] - power) / (DECADES[1] - DECADES[0])


def _frame(left: float, top: float, title: str, lags: Sequence[int]) -> list[str]:
    """Axes of a panel, with the bar of 0.02 as a broken line."""
    parts = [f'<text x="{left}" y="{top - 6}" font-weight="bold">{title}</text>',
             f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>']
    for power in range(DECADES[0], DECADES[1] + 1):
        y = _down(top, 10.0**power)
        parts.append(f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    y = _down(top, 0.02)
    parts.append(f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#555" '
                 f'stroke-dasharray="4 3"/>')
    for lag in lags:
        x = _across(left, lags, lag)
        parts.append(f'<text x="{x:.1f}" y="{top + HEIGHT + 14}" text-anchor="middle">lag {lag}</text>')
    return parts
