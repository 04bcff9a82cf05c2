"""Several run directories to one table, and one HTML page without any script."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba import metrics
from tba.report.drawing import HEIGHT, WIDTH, Dot, Drawing, Trace, drawing
from tba.report.files import write_whole
from tba.report.page import environment, resource
from tba.report.read import RunRecord, read_run, setting
from tba.report.text import duration, figure, number, visible, whole

MARK = '<meta name="generator" content="tba compare">'
"""In every page that is written here, and only then replaced by another."""
FIRST_BYTES = 4096
"""Of a page, in which the mark is looked for."""
PREFERRED = (metrics.WIN_RATE, metrics.ATTACK_SUCCESS, metrics.PASS_1, metrics.EVAL_REWARD)
"""What runs are compared by if nothing is said: the first that they have."""
SHOWN = (metrics.EVAL_KL, metrics.EVAL_REWARD, metrics.PERPLEXITY, metrics.EFFECTIVE, metrics.DISTINCT,
         metrics.SELF_BLEU, metrics.EVAL_LENGTH)
"""Columns of the terminal's table besides the metric, as far as a run has them."""
DIVERSITY = (metrics.EFFECTIVE, metrics.DISTINCT, metrics.DISTINCT_2, metrics.EMBEDDING_DISTANCE, metrics.SELF_BLEU)
"""Drawn against step, as far as a run has them."""
NOT_FIGURES = {metrics.EVAL_STEP, metrics.WALL, metrics.STEP, metrics.VERSION, metrics.SAMPLES, metrics.PROMPTS,
               metrics.EVAL_SEED}
"""Numbers that say how was evaluated, not what came of it."""
MAX_POINTS = 400
"""Points of one line; longer ones are thinned."""
COLOURS = 8
"""Colours of the page; the ninth run has the first again, with a broken line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One run beside others."""

    label: str
    record: RunRecord
    start: Mapping[str, Any]
    final: Mapping[str, Any]

    def facts(self) -> dict[str, str]:
        """What it is: column to text."""
        summary, settings = self.record.summary, self.record.settings
        last = self.record.steps[-1] if self.record.steps else {}
        chosen = {
            "status": visible(summary.get("status") or "not finished", 20),
            "objective": _text(setting(settings, "objective.name")),
            "beta": _text(setting(settings, "objective.beta")), "seed": _text(setting(settings, "seed")),
            "steps": figure(summary.get("steps", last.get(metrics.STEP))),
            "time": duration(summary.get("wall_s", last.get(metrics.WALL))),
        }
        return {name: "-" if value == "not known" else value for name, value in chosen.items()}


def _text(value: object) -> str:
    known = number(value)
    return "-" if value is None else f"{known:g}" if known is not None else visible(value, 40)


# ---- reading ------------------------------------------------------------------------------------------


def problems_of(paths: Sequence[Path]) -> list[str]:
    """What keeps `paths` from being compared."""
    found = [f"{str(path)!r} is no run directory: it has no config.yaml and no metrics.jsonl."
             for path in paths if not any((path / name).is_file() for name in ("config.yaml", "metrics.jsonl"))]
    if len(paths) < 2:
        found.append(f"{len(paths)} run is nothing to compare; give two or more, or: tba report RUN")
    real = [os.path.realpath(path) for path in paths]
    found += [f"{str(path)!r} is given twice; give each run once."
              for place, path in enumerate(paths) if real[place] in real[:place]]
    return found


def read_sides(paths: Sequence[Path]) -> list[Side]:
    """Each run with what tells it from the others: as much of the end of its path as that takes."""
    return [_side(label, read_run(path)) for label, path in zip(labels(paths), paths, strict=True)]


def _side(label: str, record: RunRecord) -> Side:
    start, final = record.held_out
    return Side(label=label, record=record, start=start, final=final)


def labels(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as few as make all labels differ."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-length:]) for part in parts]
        if len(set(found)) == len(found):
            break
    return [visible(label, 80) for label in found]


def known_metrics(sides: Sequence[Side]) -> list[str]:
    """Names of the held-out numbers that a run has, those that are declared first and in their order."""
    had = {name for side in sides for values in (side.final, side.start) for name in values
           if isinstance(name, str) and number(values[name]) is not None and name not in NOT_FIGURES}
    return [name for name in metrics.METRICS if name in had] + sorted(had - metrics.METRICS.keys())


def metric_of(sides: Sequence[Side], asked: str | None) -> tuple[str | None, list[str]]:
    """The metric that runs are compared by, None if they have none; and what is wrong with the one `asked` for."""
    known = known_metrics(sides)
    if asked is None:
        return next((name for name in (*PREFERRED, *known) if name in known), None), []
    if asked in known:
        return asked, []
    close = difflib.get_close_matches(asked, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return None, [f"--metric {visible(asked, 60)!r}: no run has such a held-out number; {hint}there are: "
                  f"{', '.join(visible(name, 60) for name in known) or 'none'}."]


# ---- table --------------------------------------------------------------------------------------------


def table(sides: Sequence[Side], metric: str | None) -> list[list[str]]:
    """The terminal's table: a head and a row for each run."""
    known = known_metrics(sides)
    names = list(dict.fromkeys(name for name in (metric, *SHOWN) if name is not None and name in known))
    facts = [side.facts() for side in sides]
    rows = [["run", *facts[0], *(visible(name, 40) for name in names)]]
    for side, own in zip(sides, facts, strict=True):
        rows.append([side.label, *own.values(), *(_cell(side.final.get(name)) for name in names)])
    return rows


def _cell(value: object) -> str:
    return "-" if number(value) is None else figure(value)


# ---- drawings -----------------------------------------------------------------------------------------


def drawings(sides: Sequence[Side], metric: str | None) -> list[Drawing]:
    """The frontier, then the curves."""
    name = visible(metric or "no metric", 60)
    found = [drawing(
        "frontier", f"{name} against KL", "Held-out numbers of each run at its end; lines are its interval, if it "
        "has one.", "KL to the reference, nats per completion", name,
        [Trace(run=place, dots=_end(side, metric), is_line=False) for place, side in enumerate(sides)],
    )]
    curves = [
        (metric, metrics.EVAL_STEP, "Held-out"), (metrics.EVAL_KL, metrics.EVAL_STEP, "Held-out"),
        *((name, metrics.EVAL_STEP, "Diversity") for name in DIVERSITY if name != metric),
        (metrics.REWARD, metrics.STEP, "Training"), (metrics.KL, metrics.STEP, "Training"),
        (metrics.AGE_MEAN, metrics.STEP, "Training"),
    ]
    for column, place, kind in curves:
        if column is None:
            continue
        traces = [Trace(run=run, dots=_course(side, column, place), is_line=True) for run, side in enumerate(sides)]
        if any(trace.dots for trace in traces):
            declared = metrics.METRICS.get(column)
            found.append(drawing(
                f"curve-{len(found)}", f"{kind}: {visible(column, 60)}",
                f"{declared.meaning[0].upper()}{declared.meaning[1:]}." if declared else "Not declared.",
                "version" if place == metrics.EVAL_STEP else "step", metrics.unit_shown(column), traces,
            ))
    return found


def _end(side: Side, metric: str | None) -> list[Dot]:
    kl = number(side.final.get(metrics.EVAL_KL))
    value = None if metric is None else number(side.final.get(metric))
    if kl is None or value is None:
        return []
    low, high = interval(side.final, str(metric))
    return [Dot(x=kl, y=value, low=low, high=high)]


def interval(figures: Mapping[str, Any], metric: str) -> tuple[float | None, float | None]:
    """Both ends of a metric's interval, logged as a pair or as two numbers; (None, None) if there is none."""
    pair = figures.get(f"{metric}_interval")
    if not (isinstance(pair, (list, tuple)) and len(pair) == 2):
        pair = figures.get(f"{metric}_low"), figures.get(f"{metric}_high")
    low, high = number(pair[0]), number(pair[1])
    return (low, high) if low is not None and high is not None else (None, None)


def _course(side: Side, column: str, place: str) -> list[Dot]:
    lines = side.record.evaluations if place == metrics.EVAL_STEP else side.record.steps
    dots = [Dot(x=at, y=value) for line in lines
            if (at := whole(line.get(place))) is not None and (value := number(line.get(column))) is not None]
    stride = -(-len(dots) // MAX_POINTS) or 1
    return dots if stride == 1 else [*dots[:-1:stride], dots[-1]]


# ---- page ---------------------------------------------------------------------------------------------


def render(sides: Sequence[Side], metric: str | None) -> str:
    """The page as HTML text."""
    from markupsafe import Markup

    known = sorted(known_metrics(sides), key=lambda name: (name != metric, name != metrics.EVAL_KL))
    return environment().get_template("compare.html.jinja").render(
        mark=Markup(MARK), css=Markup(resource("page.css")),
        sides=[{
            "label": side.label, "colour": place % COLOURS, "is_broken": place // COLOURS % 2 == 1,
            "facts": side.facts(), "notes": list(side.record.notes),
            "values": [(_cell(side.final.get(name)), _cell(side.start.get(name))) for name in known],
        } for place, side in enumerate(sides)],
        columns=[_column(name, metric) for name in known], metric=visible(metric or "", 60),
        drawings=drawings(sides, metric), width=WIDTH, height=HEIGHT,
    )


def _column(name: str, metric: str | None) -> dict[str, Any]:
    declared = metrics.METRICS.get(name)
    return {"name": visible(name, 60), "is_chosen": name == metric, "unit": metrics.unit_shown(name),
            "meaning": "not declared" if declared is None else declared.meaning}


def target_problems(target: Path) -> list[str]:
    """What keeps a page from being written to `target`: no folder, or a file that is no such page."""
    if target.is_dir() or not target.parent.is_dir():
        return [f"--html {str(target)!r} must be a file in a folder that there is."]
    if target.is_file():
        with target.open("rb") as file:
            if MARK.encode() not in file.read(FIRST_BYTES):
                return [f"--html {str(target)!r} exists and was not written by tba compare; choose another name."]
    return []


def write_page(sides: Sequence[Side], metric: str | None, target: Path) -> None:
    """Writes the page whole or not at all; OSError if it cannot be written."""
    write_whole(render(sides, metric), target)
