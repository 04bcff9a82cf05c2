"""The tables, the figure and the sentences of `scaling.py`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Found = dict[str, Any]
"""One simulation: what was varied, and its figures."""

MARK = "<!-- below: written by benchmarks/scaling.py -->"
"""What a page holds above this line is kept."""
SATURATED = 0.95
"""Share of time at work from which a part counts as saturated."""
WITHIN = 0.10
"""How far below the rate of so many single searchers still counts as linear."""
PARTS = (("depot", "depot"), ("trainer", "trainer"), ("searching", "searchers, mean"))
"""Key and label of the shares that are drawn."""
WIDTH, HEIGHT, LEFT, GAP, TOP = 200, 130, 62, 26, 40
"""Of a panel; what is left of the first; between two; above the first; in pixels."""
STYLE = """<style>
svg { --back: #ffffff; --text: #1c2430; --quiet: #5b6675; --rule: #d5dae0; --depot: #1768b3; --trainer: #c2570c;
  --searching: #2f7d4f; }
@media (prefers-color-scheme: dark) {
  svg { --back: #14171b; --text: #e6e9ed; --quiet: #a3acb7; --rule: #39404a; --depot: #6db3f8; --trainer: #f5a35c;
    --searching: #7bcf9c; }
}
.back { fill: var(--back); } text { fill: var(--text); } .quiet { fill: var(--quiet); }
.rule { stroke: var(--rule); fill: none; } .ideal { stroke: var(--quiet); stroke-dasharray: 4 3; fill: none; }
.depot { stroke: var(--depot); } .trainer { stroke: var(--trainer); } .searching { stroke: var(--searching); }
.depot, .trainer, .searching { stroke-width: 1.5; fill: none; }
</style>"""
"""Colours for a light and a dark page."""


# ---- figures ------------------------------------------------------------------------------------


def shares_between(
    first: tuple[float, Mapping[str, float]], last: tuple[float, Mapping[str, float]]
) -> dict[str, float]:
    """Share of the time between two moments that each part was at work.

    A moment is its time in seconds, and the shares of the time from 0 to it.
    """
    (start, before), (end, after) = first, last
    return {name: (after[name] * end - before[name] * start) / (end - start) for name in after}


def grouped(found: Sequence[Found]) -> dict[str, dict[int, list[Found]]]:
    """Rounds by setting, in the order of the runs, and number of searchers."""
    groups: dict[str, dict[int, list[Found]]] = {}
    for row in found:
        groups.setdefault(row["name"], {}).setdefault(row["searchers"], []).append(row)
    return {name: dict(sorted(cells.items())) for name, cells in groups.items()}


def median(rows: Sequence[Found], key: str) -> float:
    """Of a figure over rounds."""
    return statistics.median(row[key] for row in rows)


def linearity(cells: Mapping[int, Sequence[Found]]) -> dict[int, float]:
    """Completions per second over those of one searcher times their number; of the fewest, if one is not there."""
    fewest = min(cells)
    alone = median(cells[fewest], "per_s") / fewest
    return {searchers: median(rows, "per_s") / (searchers * alone) for searchers, rows in cells.items()}


def limiting(rows: Sequence[Found]) -> list[str]:
    """Saturated parts that searchers wait for: the depot always, the trainer where their lead is bounded."""
    parts = ["depot"] if rows[0]["lead"] is None else ["depot", "trainer"]
    return [part for part in parts if median(rows, part) >= SATURATED]


def calls_of(rows: Sequence[Found], part: str) -> list[tuple[str, float, float]]:
    """Name, share of time and milliseconds of each kind of call of a part, the largest share first."""
    own = ("step", "publish") if part == "trainer" else ("deliver", "draw", "lease", "store")
    named = [name for name in own if all(name in row["calls"] for row in rows)]
    medians = [(name, *(statistics.median(row["calls"][name][key] for row in rows) for key in ("share", "ms")))
               for name in named]
    return sorted(medians, key=lambda one: -one[1])


def verdict(cells: Mapping[int, Sequence[Found]]) -> str:
    """A sentence: how far it is linear, which part saturates first, and on what."""
    over = linearity(cells)
    until = [n for n in cells if all(over[m] >= 1 - WITHIN for m in cells if m <= n)]
    first = next((n for n, rows in cells.items() if limiting(rows)), None)
    broken = [n for n in cells if over[n] < 1 - WITHIN and (first is None or n < first)]
    said = [f"linear to within {WITHIN:.0%} up to {max(until)} searchers (lowest {min(over[n] for n in until):.2f})"]
    if first is None:
        said.append("no part that searchers wait for saturates")
    else:
        part = limiting(cells[first])[0]
        name, share, ms = calls_of(cells[first], part)[0]
        said.append(f"at {first} the {part} is saturated, {share:.0%} of its time by {name} ({ms:.2g} ms a call)")
    if broken:
        said.append(f"missed before that at {', '.join(map(str, broken))}")
    trainers = [n for n, rows in cells.items() if median(rows, "trainer") >= SATURATED]
    if trainers and cells[trainers[0]][0]["lead"] is None:
        said.append(f"the trainer is saturated from {trainers[0]} on, and nobody waits for it")
    return "; ".join(said)


# ---- text ---------------------------------------------------------------------------------------


def line_of(rows: Sequence[Found], over: float | None = None) -> str:
    """A line of `table`: the rounds of one setting and number of searchers."""
    rates = [row["per_s"] for row in rows]
    rate = f"{statistics.median(rates):,.0f}"
    if len(rates) > 1:
        rate += f" ({min(rates):,.0f} to {max(rates):,.0f})"
    depot = ", ".join(f"{name} {share:.2f}" for name, share, _ in calls_of(rows, "depot") if share >= 0.005)
    saturated = [part for part in ("depot", "trainer") if median(rows, part) >= SATURATED]
    cells = [
        rows[0]["name"], f"{rows[0]['rate']:g}", str(rows[0]["searchers"]), rate, "" if over is None else f"{over:.2f}",
        f"{median(rows, 'depot'):.2f}" + (f" ({depot})" if depot else ""), f"{median(rows, 'trainer'):.2f}",
        f"{median(rows, 'searching'):.2f}", f"{median(rows, 'steps_per_s'):.1f}", " and ".join(saturated) or "-",
    ]
    return "| " + " | ".join(cells) + " |"


def table(found: Sequence[Found]) -> str:
    """Markdown: a line for each setting and number of searchers, medians over rounds."""
    head = ["setting", "groups/s each", "searchers", "completions/s", "over n x one", "depot at work", "trainer",
            "searchers", "steps/s", "saturated"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for cells in grouped(found).values():
        over = linearity(cells)
        lines += [line_of(rows, over[searchers]) for searchers, rows in cells.items()]
    return "\n".join(lines)


def bar_table(bar: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Markdown: share of a second of the bar by call, median over rounds, for each number of groups a step."""
    def figures(total: Callable[[Mapping[str, float]], float]) -> str:
        values = [[total(one) for one in seconds] for seconds in bar.values()]
        return " | ".join(f"{statistics.median(v):.3f} ({min(v):.3f} to {max(v):.3f})" for v in values)

    names = list(next(iter(bar.values()))[0])
    heads = " | ".join(f"steps of {groups} groups" for groups in bar)
    lines = [f"| share of the depot's time | {heads} |", "|" + "---|" * (1 + len(bar))]
    lines += [f"| {name} | {figures(lambda one, name=name: one[name])} |" for name in names]
    for label, kinds in (("searchers' calls together", ("lease", "deliver")), ("all calls", ("",))):
        lines.append(f"| {label} | {figures(lambda one, k=kinds: total_of(one, k))} |")
    return "\n".join(lines)


def total_of(second: Mapping[str, float], kinds: tuple[str, ...]) -> float:
    """Sum over the calls whose name begins with one of `kinds`."""
    return math.fsum(share for name, share in second.items() if name.startswith(kinds))


def page(found: Mapping[str, Any], folder: Path) -> None:
    """Writes `scaling_measured.svg`, and the tables into `scaling_measured.md` below what was written by hand."""
    path = folder / "scaling_measured.md"
    above = path.read_text("utf-8").split(MARK)[0].rstrip() if path.exists() else "# Scaling, measured"
    (folder / "scaling_measured.svg").write_text(figure(found["runs"]), "utf-8")
    path.write_text(f"{above}\n\n{below(found)}", "utf-8")


def below(found: Mapping[str, Any]) -> str:
    """What a page holds from the mark on."""
    rounds = len({row["seed"] for row in found["runs"]})
    verdicts = "\n".join(f"- *{name}*: {verdict(cells)}." for name, cells in grouped(found["runs"]).items())
    return (f"{MARK}\n\n## One second of the bar\n\nMedians of {rounds} rounds (smallest to largest).\n\n"
            f"{bar_table(found['bar'])}\n\n## By the number of searchers\n\n"
            f"![completions per second and shares of time at work by searchers](scaling_measured.svg)\n\n"
            f"Medians of {rounds} rounds (smallest to largest).\n\n{verdicts}\n\n{table(found['runs'])}\n")


# ---- the figure ---------------------------------------------------------------------------------


def figure(found: Sequence[Found]) -> str:
    """SVG: for each setting, completions per second over searchers with the line of n x one, and shares at work."""
    groups = grouped(found)
    axis = sorted({row["searchers"] for row in found})
    rates = [row["per_s"] for row in found]
    low, high = math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates)))
    parts = [f'<text class="quiet" x="{LEFT - 6}" y="{_down(0, (power - low) / (high - low)) + 4:.1f}" '
             f'text-anchor="end">{10**power:,}</text>' for power in range(low, high + 1)]
    parts += [f'<text class="quiet" x="{LEFT - 6}" y="{_down(1, share) + 4:.1f}" text-anchor="end">{share:g}</text>'
              for share in (0, 0.5, 1)]
    for line, label in enumerate(("completions/s", "share at work")):
        parts.append(f'<text transform="translate(12 {_down(line, 0.5):.0f}) rotate(-90)" '
                     f'text-anchor="middle">{label}</text>')
    for column, (name, cells) in enumerate(groups.items()):
        left = LEFT + column * (WIDTH + GAP)
        parts.append(f'<text x="{left + WIDTH / 2}" y="{TOP - 12}" text-anchor="middle">{name}</text>')
        alone = median(cells[min(cells)], "per_s") / min(cells)
        heights = {n: (math.log10(median(rows, "per_s")) - low) / (high - low) for n, rows in cells.items()}
        ideal = {n: min(1.0, (math.log10(alone * n) - low) / (high - low)) for n in cells}
        parts += [_line("ideal", left, 0, axis, ideal), _line("depot", left, 0, axis, heights)]
        parts += [_line(key, left, 1, axis, {n: median(rows, key) for n, rows in cells.items()}) for key, _ in PARTS]
        parts += [f'<rect class="rule" x="{left}" y="{_down(line, 1):.1f}" width="{WIDTH}" height="{HEIGHT}"/>'
                  for line in (0, 1)]
        parts += [f'<text class="quiet" x="{_across(left, axis, n):.1f}" y="{_down(1, 0) + 14:.1f}" '
                  f'text-anchor="middle">{n}</text>' for n in axis]
    bottom = _down(1, 0) + 36
    for number, (kind, label) in enumerate((*PARTS, ("ideal", "n x one searcher"))):
        x = LEFT + number * 140
        parts.append(f'<line class="{kind}" x1="{x}" x2="{x + 18}" y1="{bottom - 4:.1f}" y2="{bottom - 4:.1f}"/>')
        parts.append(f'<text class="quiet" x="{x + 24}" y="{bottom:.1f}">{label}</text>')
    width, height = LEFT + max(3, len(groups)) * (WIDTH + GAP), bottom + 14
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" font-family="sans-serif" '
            f'font-size="11">\n{STYLE}\n<rect class="back" width="{width}" height="{height:.0f}"/>\n'
            + "\n".join(parts) + "\n</svg>\n")


def _across(left: float, axis: Sequence[int], searchers: int) -> float:
    """Numbers of searchers stand at equal distances."""
    return left + WIDTH * (axis.index(searchers) + 0.5) / len(axis)


def _down(line: int, share: float) -> float:
    """Place of a share of a panel's height in a row of panels."""
    return TOP + line * (HEIGHT + GAP) + HEIGHT * (1 - share)


def _line(kind: str, left: float, line: int, axis: Sequence[int], shares: Mapping[int, float]) -> str:
    points = " ".join(f"{_across(left, axis, n):.1f},{_down(line, share):.1f}" for n, share in shares.items())
    return f'<polyline class="{kind}" points="{points}"/>'
