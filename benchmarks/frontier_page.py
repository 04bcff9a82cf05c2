"""The table, the verdicts and the figure of `frontier.py`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ablations_page import STYLE, limits, mean, spread, ticks

Found = dict[str, Any]
"""One run: what it was, and its figures."""

START = "none"
"""The objective of the row that was not trained."""
OWN = "trajectory_balance"
"""The objective that the verdicts are about."""
MARK = "<!-- below: written by benchmarks/frontier.py -->"
"""What a page holds above this line is kept."""
COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("win_rate", "gold win-rate", 3), ("proxy_win_rate", "proxy win-rate", 3), ("kl", "KL", 2),
    ("perplexity", "ppl", 1), ("perplexity_diluted", "ppl, diluted", 2), ("gap", "gap", 2),
    ("distinct_1", "distinct-1", 3), ("distinct_2", "distinct-2", 3), ("embedding", "embedding", 3),
    ("length", "length", 1), ("ended", "ended", 2), ("age", "age", 1), ("seconds", "s", 0),
)
"""Key, head and decimals of each column of figures."""
WITHIN = 0.02
"""Of its own win-rate at age 0 that trajectory balance may lose at the larger age: two points."""
COLOURS = {"trajectory_balance": "a", "rloo": "b", "online_dpo": "c", "grpo": "d", START: "e"}
"""Class of each objective's lines and dots."""
KL_TICKS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Nats; of those, the ones between which runs lie are drawn."""
WIDTH, HEIGHT, LEFT, GAP, TOP = 300, 220, 56, 62, 34
"""Of a panel; what is left of the first; between two; above them; in pixels."""
LINES = """<style>
svg { --a: #0757a0; --b: #b54708; --c: #0b7a57; --d: #8b2f8f; --e: #5b6675; }
@media (prefers-color-scheme: dark) {
  svg { --a: #6db3f8; --b: #f5a35c; --c: #5fd0a2; --d: #d99be0; --e: #a3acb7; }
}
""" + "\n".join(f".l{c} {{ stroke: var(--{c}); fill: none; stroke-width: 1.5; }} .d{c} {{ fill: var(--{c}); "
                f"stroke: none; }}" for c in "abcde") + "\n</style>"
"""Colours of the objectives on a light and a dark page."""


def grouped(found: Sequence[Found]) -> dict[tuple[str, int, float], list[Found]]:
    """Runs by objective, lag and beta, the untrained first; seeds of one cell are together.

    Raises:
        SystemExit: trained runs differ in their number of steps.
    """
    kinds = sorted({row["steps"] for row in found if row["objective"] != START})
    if len(kinds) > 1:
        raise SystemExit(f"one number of steps makes a table; found {kinds}: give --add files of one kind.")
    groups: dict[tuple[str, int, float], list[Found]] = defaultdict(list)
    for row in sorted(found, key=lambda row: row["seed"]):
        groups[row["objective"], row["lag"], row["beta"]].append(row)
    order = list(COLOURS)
    return {key: groups[key] for key in sorted(groups, key=lambda k: (k[0] != START, k[1], order.index(k[0]), k[2]))}


def table(found: Sequence[Found]) -> str:
    """Markdown: a line for each cell, mean and smallest to largest over seeds; of one seed the win-rate's interval."""
    lines = [f"| lag | objective | beta | seeds | {' | '.join(head for _, head, _ in COLUMNS)} | ties |",
             "|" + "---|" * (5 + len(COLUMNS))]
    for (objective, lag, beta), rows in grouped(found).items():
        figures = [spread([row[key] for row in rows if row[key] is not None], decimals) for key, _, decimals in COLUMNS]
        if len(rows) == 1:
            figures[0] += f" ({rows[0]['win_low']:.3f} to {rows[0]['win_high']:.3f})"
        trained = objective != START
        first = [str(lag) if trained else "-", objective, f"{beta:g}" if trained else "-", str(len(rows))]
        ties = f"{sum(row['ties'] for row in rows)} of {sum(row['judged'] for row in rows)}"
        lines.append(f"| {' | '.join([*first, *figures, ties])} |")
    return "\n".join(lines)


# ---- verdicts -----------------------------------------------------------------------------------------


def frontier(found: Sequence[Found], objective: str, lag: int) -> list[tuple[float, float, float]]:
    """(KL, win-rate, half its interval) of an objective's cells at a lag, by KL; means over seeds."""
    points = []
    for (name, at, _), rows in grouped(found).items():
        if (name, at) == (objective, lag):
            half = mean([(row["win_high"] - row["win_low"]) / 2 for row in rows]) / math.sqrt(len(rows))
            points.append((mean([row["kl"] for row in rows]), mean([row["win_rate"] for row in rows]), half))
    return sorted(points)


def at_kl(points: Sequence[tuple[float, float, float]], kl: float) -> tuple[float, float] | None:
    """(win-rate, half its interval) of a frontier at a KL, on the line between its neighbours; None outside of it."""
    for (low, first, half_first), (high, second, half_second) in pairwise(points):
        if low <= kl <= high:
            share = (kl - low) / (high - low) if high > low else 0.0
            return first + share * (second - first), half_first + share * (half_second - half_first)
    return None


def verdicts(found: Sequence[Found]) -> list[str]:
    """The two bars, over what was run: at equal KL against the best baseline, and against its own age 0."""
    lines: list[str] = []
    lags = sorted({row["lag"] for row in found if row["objective"] != START})
    if not lags:
        return lines
    last = lags[-1]
    others = {name: frontier(found, name, last) for name in COLOURS if name not in (OWN, START)}
    for kl, rate, half in frontier(found, OWN, last):
        rivals = {name: value for name, points in others.items() if (value := at_kl(points, kl)) is not None}
        if not rivals:
            lines.append(f"lag {last}, KL {kl:.2f}: {OWN} {rate:.3f}, no baseline reaches this KL from both sides")
            continue
        name = max(rivals, key=lambda key: rivals[key][0])
        rival, beside = rivals[name]
        verdict = "holds" if rate + math.hypot(half, beside) >= rival else "MISSED"
        lines.append(f"lag {last}, KL {kl:.2f}: {OWN} {rate:.3f}, best baseline {name} {rival:.3f}, interval of the "
                     f"difference +-{math.hypot(half, beside):.3f}: {verdict}")
    if len(lags) > 1:
        lines += _own_ages(found, lags[0], last)
    return lines


def _own_ages(found: Sequence[Found], first: int, last: int) -> list[str]:
    groups = grouped(found)
    lines = []
    for (name, lag, beta), rows in groups.items():
        before = groups.get((OWN, first, beta))
        if (name, lag) == (OWN, last) and before:
            lost = mean([row["win_rate"] for row in before]) - mean([row["win_rate"] for row in rows])
            lines.append(f"beta {beta:g}: {OWN} loses {100 * lost:.1f} points from lag {first} to {last}: "
                         f"{'holds' if lost <= WITHIN else 'MISSED'}")
    return lines


# ---- page and figure ----------------------------------------------------------------------------------


def page(found: Sequence[Found], folder: Path) -> None:
    """Writes `frontier.svg`, and table and verdicts into `frontier.md` below what was written there by hand."""
    path = folder / "frontier.md"
    above = path.read_text("utf-8").split(MARK)[0].rstrip() if path.exists() else "# Win-rate against KL"
    (folder / "frontier.svg").write_text(figure(found), "utf-8")
    said = "".join(f"- {line}\n" for line in verdicts(found))
    steps = sorted({row["steps"] for row in found if row["objective"] != START})
    ran = f"{sum(row['objective'] != START for row in found)} runs of {', '.join(map(str, steps)) or 'no'} steps."
    path.write_text(f"{above}\n\n{MARK}\n\n![gold win-rate and over-optimisation against KL](frontier.svg)\n\n{ran}\n\n"
                    f"{table(found)}\n\n{said}", "utf-8")


def figure(found: Sequence[Found]) -> str:
    """SVG: gold win-rate against KL, a panel for each lag, then proxy minus gold (broken: late data); a dot a run."""
    lags = sorted({row["lag"] for row in found if row["objective"] != START}) or [0]
    panels = [*[("win_rate", f"gold win-rate, lag {lag}", [lag]) for lag in lags],
              ("gap", "proxy minus gold, sd of humans", lags)]
    across = limits([_place(row["kl"]) for row in found])
    parts: list[str] = []
    for place, (key, title, shown) in enumerate(panels):
        rows = [row for row in found if row["lag"] in shown or row["objective"] == START]
        ends = limits([row[key] for row in found])
        parts += _panel(rows, key, title, LEFT + place * (WIDTH + GAP), across, ends)
    width, bottom = LEFT + len(panels) * (WIDTH + GAP), TOP + HEIGHT + 48
    names = [name for name in COLOURS if any(row["objective"] == name for row in found)]
    for place, name in enumerate(names):
        x = LEFT + 150 * place
        parts.append(f'<circle class="d{COLOURS[name]}" cx="{x}" cy="{bottom - 4}" r="4"/>')
        parts.append(f'<text x="{x + 9}" y="{bottom}">{"before training" if name == START else name}</text>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 14}" font-family="sans-serif" '
            f'font-size="11">\n{STYLE}\n{LINES}\n<rect class="back" width="{width}" height="{bottom + 14}"/>\n'
            + "\n".join(parts) + "\n</svg>\n")


def _place(kl: float) -> float:
    """Where a KL lies: near zero in proportion, far from it by factors, so that a run that left the reference for good
    does not press the others together."""
    return math.log1p(max(0.0, kl))


def _panel(
    rows: Sequence[Found], key: str, title: str, left: int, across: tuple[float, float], ends: tuple[float, float]
) -> list[str]:
    def x(kl: float) -> float:
        return left + WIDTH * (_place(kl) - across[0]) / (across[1] - across[0])

    def y(at: float) -> float:
        return TOP + HEIGHT * (ends[1] - at) / (ends[1] - ends[0])

    parts = [f'<text x="{left}" y="{TOP - 10}" font-weight="bold">{title}</text>',
             f'<text class="quiet" x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 28}" text-anchor="middle">KL to the '
             f'reference, nats per completion</text>']
    for at in ticks(*ends):
        parts.append(f'<line class="rule" x1="{left}" x2="{left + WIDTH}" y1="{y(at):.1f}" y2="{y(at):.1f}"/>')
        parts.append(f'<text class="quiet" x="{left - 4}" y="{y(at) + 4:.1f}" text-anchor="end">{at:.4g}</text>')
    for at in (kl for kl in KL_TICKS if across[0] <= _place(kl) <= across[1]):
        parts.append(f'<text class="quiet" x="{x(at):.1f}" y="{TOP + HEIGHT + 13}" text-anchor="middle">'
                     f'{at:.4g}</text>')
    lines: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for (objective, lag, _), of in grouped(rows).items():
        lines[objective, lag].append((mean([row["kl"] for row in of]), mean([row[key] for row in of])))
    for (objective, lag), points in lines.items():
        joined = " ".join(f"{x(kl):.1f},{y(value):.1f}" for kl, value in sorted(points))
        dashes = ' stroke-dasharray="5 3"' if lag and key == "gap" else ""
        parts.append(f'<polyline class="l{COLOURS[objective]}" points="{joined}"{dashes}/>')
    for row in rows:
        name = COLOURS[row["objective"]]
        if key == "win_rate":
            parts.append(f'<line class="l{name}" x1="{x(row["kl"]):.1f}" x2="{x(row["kl"]):.1f}" opacity="0.5" '
                         f'y1="{y(row["win_low"]):.1f}" y2="{y(row["win_high"]):.1f}"/>')
        parts.append(f'<circle class="d{name}" cx="{x(row["kl"]):.1f}" cy="{y(row[key]):.1f}" r="3.5"/>')
    return [*parts, f'<rect class="rule" x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"/>']
