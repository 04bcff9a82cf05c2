"""Numbers of a run to charts: what is drawn, and the same in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from tba import metrics
from tba.report.plans import (
    EACH_K,
    PASS_OVER_K,
    PLANS,
    SEARCH_RATE,
    TRAIN_RATE,
    Chart,
    Line,
    Plan,
    Table,
    pass_each,
)
from tba.report.read import RunRecord, setting
from tba.report.text import count, figure, mapping, number, rounded, visible, whole

MAX_POINTS = 2000
"""Points of one line; longer ones are thinned."""
MAX_CHUNKS = 60
"""Columns of the age chart, and points of a rate."""
MAX_AGE_BINS = 40
MAX_SAMPLERS = 8
MAX_K = 16

Row = Mapping[str, Any]


def build(run: RunRecord, max_points: int = MAX_POINTS) -> tuple[list[Chart], dict[str, Any]]:
    """All charts of a run, and the columns of numbers that they draw from, by table; of `max_points` rows at most."""
    chunks = _chunks(run.steps)
    samplers = _samplers(run.steps)
    ks = sorted({k for row in run.evaluations for k in _each_k(row)})[:MAX_K]
    evaluations = [
        {**row, **{f"{metrics.PASS_EACH}:{k}": share for k, share in _each_k(row).items()}} for row in run.evaluations
    ]
    rows: dict[Table, Sequence[Row]] = {
        "train": run.steps,
        "eval": evaluations,
        "chunk": [_chunk_row(chunk, before, samplers) for before, chunk in chunks],
        "k": _by_k(run.evaluations, ks),
    }
    plans = [*PLANS, *([_sampler_plan(samplers)] if samplers else [])]
    place = next((i for i, plan in enumerate(plans) if plan.id == "pass"), 0) + 1
    plans[place:place] = [PASS_OVER_K, pass_each(ks)]
    charts = [chart for plan in plans if (chart := _line_chart(plan, rows)) is not None]
    place = next((i for i, chart in enumerate(charts) if chart.id == "throughput"), len(charts))
    charts[place:place] = _age_charts(run, [chunk for _, chunk in chunks])
    wanted: set[tuple[Table, str]] = {(line.table, line.column) for plan in plans for line in plan.lines}
    return charts, {table: _columns(table, rows[table], wanted, max_points) for table in rows}


def _place(table: Table) -> str:
    return {"eval": metrics.EVAL_STEP, "k": "k"}.get(table, metrics.STEP)


def _each_k(row: Row) -> dict[int, Any]:
    """pass@k by k, as an evaluation has it."""
    each = mapping(row.get(metrics.PASS_EACH))
    return {int(k): share for k, share in each.items() if k.isascii() and k.isdigit() and len(k) < 10 and int(k)}


def _by_k(evaluations: Sequence[Row], ks: Sequence[int]) -> list[dict[str, Any]]:
    """pass@k by k, of the first and of the last evaluation that has any."""
    having = [each for row in evaluations if (each := _each_k(row))]
    ends = dict(zip(EACH_K, [*having[:1], *having[1:][-1:]], strict=False))  # of one there is a start only
    return [{"k": k, **{name: each.get(k) for name, each in ends.items()}} for k in ks]


def _columns(
    table: Table, rows: Sequence[Row], wanted: set[tuple[Table, str]], max_points: int
) -> dict[str, list[Any]]:
    thin = _thinned(rows, max_points)
    columns = {
        "step": [whole(row.get(_place(table))) for row in thin],
        "wall_s": [rounded(row.get(metrics.WALL)) for row in thin],
    }
    for owner, column in sorted(wanted):
        if owner == table:
            columns[column] = [rounded(row.get(column)) for row in thin]
    return columns


def _thinned(rows: Sequence[Row], max_points: int) -> Sequence[Row]:
    if len(rows) <= max_points:
        return rows
    stride = (len(rows) - 2) // (max_points - 1) + 1
    picked = list(rows[::stride])
    return picked if picked[-1] is rows[-1] else [*picked, rows[-1]]


def _line_chart(plan: Plan, rows: Mapping[Table, Sequence[Row]]) -> Chart | None:
    spans: list[str] = []
    drawn: list[dict[str, Any]] = []
    for style, line in enumerate(plan.lines):
        known = [
            (row, value) for row in rows[line.table] if (value := number(row.get(line.column))) is not None
        ]
        if not known:
            continue
        (_, first), (row, last) = known[0], known[-1]
        unit = {"eval": "version", "k": "k ="}.get(line.table, "step")
        where = f"{unit} {count(whole(row.get(_place(line.table))) or 0)}"
        spans.append(
            f"{line.name} {figure(last)} at {where}" + (f" (first {figure(first)})" if len(known) > 1 else "")
        )
        drawn.append(
            {
                "table": line.table,
                "y": line.column,
                "name": line.name,
                "style": style,
                "marks": line.table in ("eval", "k") or len(known) == 1,
                "raw": line.table == "train",
            }
        )
    if not drawn:
        return (
            None
            if plan.is_optional
            else Chart(
                id=plan.id, title=plan.title, about=plan.about, caption="This run logged no such numbers."
            )
        )
    spec = {
        "kind": "lines",
        "x": plan.x,
        "unit": plan.unit,
        "share": plan.is_share,
        "zero": plan.is_from_zero,
        "lines": drawn,
    }
    return Chart(
        id=plan.id,
        title=plan.title,
        about=plan.about,
        spec=spec,
        caption=f"Last values, {plan.unit}: {'; '.join(spans)}.",
    )


def _chunks(steps: Sequence[Row]) -> list[tuple[Row | None, Sequence[Row]]]:
    """Consecutive steps in at most `MAX_CHUNKS` parts, each with the last step before it."""
    num_chunks = min(MAX_CHUNKS, len(steps))
    cuts = [place * len(steps) // num_chunks for place in range(num_chunks + 1)] if steps else []
    return [(steps[start - 1] if start else None, steps[start:end]) for start, end in pairwise(cuts)]


def _chunk_row(chunk: Sequence[Row], before: Row | None, samplers: Sequence[str]) -> dict[str, Any]:
    """Rates and means over a chunk, placed at its last step."""
    last = chunk[-1]
    row: dict[str, Any] = {metrics.STEP: last.get(metrics.STEP), metrics.WALL: last.get(metrics.WALL)}
    start, end = _reading(before, chunk[0], metrics.WALL), number(last.get(metrics.WALL))
    if start is not None and end is not None and end > start:
        row[TRAIN_RATE] = sum(number(r.get(metrics.TRAIN_TOKENS)) or 0 for r in chunk) / (end - start)
        had, has = (
            _reading(before, chunk[0], metrics.DELIVERED_TOKENS),
            number(last.get(metrics.DELIVERED_TOKENS)),
        )
        if had is not None and has is not None and has >= had:
            row[SEARCH_RATE] = (has - had) / (end - start)
    for column in (metrics.SEARCH_REWARD, metrics.STEP_SECONDS, metrics.WAIT_SECONDS):
        known = [value for r in chunk if (value := number(r.get(column))) is not None]
        if known:
            row[column] = sum(known) / len(known)
    drawn = _summed(chunk, metrics.DRAWN_BY)
    total = sum(drawn.values())
    for sampler in samplers:
        row[f"{metrics.DRAWN_BY}:{sampler}"] = drawn[sampler] / total if total else None
    return row


def _reading(before: Row | None, first: Row, column: str) -> int | float | None:
    """A cumulative number where a chunk begins: 0 where the run does."""
    if before is None:
        return 0 if (whole(first.get(metrics.STEP)) or 0) <= 1 else None
    return number(before.get(column))


def _summed(steps: Sequence[Row], column: str) -> Counter[str]:
    """Counts by key over steps; what is not a count is left out."""
    total: Counter[str] = Counter()
    for row in steps:
        for key, value in mapping(row.get(column)).items():
            total[key] += max(0, whole(value) or 0)
    return total


def _samplers(steps: Sequence[Row]) -> list[str]:
    return [name for name, _ in _summed(steps, metrics.DRAWN_BY).most_common(MAX_SAMPLERS)]


def _sampler_plan(samplers: Sequence[str]) -> Plan:
    lines = tuple(
        Line(table="chunk", column=f"{metrics.DRAWN_BY}:{name}", name=visible(name, 40)) for name in samplers
    )
    return Plan(
        id="drawn_by",
        title="Drawn by",
        unit="share",
        lines=lines,
        is_share=True,
        about="Share of the groups consumed, by the sampler of the buffer that drew them.",
    )


def _age_charts(run: RunRecord, chunks: Sequence[Sequence[Row]]) -> list[Chart]:
    by_chunk = [_ages(chunk) for chunk in chunks]
    over_run: Counter[int] = Counter()
    for ages in by_chunk:
        over_run.update(ages)
    about = "Trainer's version minus the version that sampled, when a trajectory is consumed"
    titles = {
        "age": ("Age over the run", f"{about}: share of the trajectories by age, step after step."),
        "age_sum": ("Age, whole run", f"{about}: trajectories by age."),
    }
    total = sum(over_run.values())
    if not total:
        return [
            Chart(id=key, title=title, about=text, caption="This run logged no ages.")
            for key, (title, text) in titles.items()
        ]
    width = -(-(max(over_run) + 1) // MAX_AGE_BINS)
    num_bins = max(over_run) // width + 1
    binned = [_binned(ages, width) for ages in by_chunk]
    heat = [[_share(ages, i) for ages in binned] for i in range(num_bins)]
    edges = [whole(chunk[-1].get(metrics.STEP)) for chunk in chunks]
    labels = [
        str(low) if width == 1 else f"{low}-{low + width - 1}" for low in range(0, num_bins * width, width)
    ]
    sums = [_binned(over_run, width)[i] for i in range(num_bins)]
    specs = {
        "age": {
            "kind": "heat",
            "unit": "age (steps)",
            "x": edges,
            "y": [i * width for i in range(num_bins)],
            "labels": labels,
            "z": heat,
        },
        "age_sum": {
            "kind": "bars",
            "unit": "trajectories",
            "x_unit": "age (steps)",
            "labels": labels,
            "y": sums,
        },
    }
    last = [ages for ages in by_chunk if ages][-1]
    captions = {
        "age": f"In the last steps the mean age is {figure(_mean(last))} steps, the largest "
        f"{count(max(last))}.",
        "age_sum": _age_caption(over_run, setting(run.settings, "buffer.recent_age")),
    }
    return [
        Chart(id=key, title=title, about=text, caption=captions[key], spec=specs[key])
        for key, (title, text) in titles.items()
    ]


def _age_caption(ages: Counter[int], bound: object) -> str:
    total = sum(ages.values())
    text = (
        f"{figure(total)} trajectories consumed: mean age {figure(_mean(ages))} steps, "
        f"largest {count(max(ages))}, {figure(100 * ages[0] / total)} % of age 0"
    )
    recent_age = whole(bound)
    if recent_age is None:
        return text + "."
    recent = sum(value for age, value in ages.items() if age <= recent_age)
    return f"{text}, {figure(100 * recent / total)} % recent (age at most {count(recent_age)})."


def _ages(steps: Sequence[Row]) -> Counter[int]:
    ages: Counter[int] = Counter()
    for key, value in _summed(steps, metrics.AGE_HISTOGRAM).items():
        if key.isascii() and key.isdigit() and len(key) < 10 and value:
            ages[int(key)] += value
    return ages


def _mean(ages: Counter[int]) -> float:
    return sum(age * value for age, value in ages.items()) / sum(ages.values())


def _binned(ages: Counter[int], width: int) -> Counter[int]:
    bins: Counter[int] = Counter()
    for age, value in ages.items():
        bins[age // width] += value
    return bins


def _share(bins: Counter[int], place: int) -> float | None:
    """Share of one bin; None, which is not drawn, where it is empty."""
    return rounded(bins[place] / sum(bins.values())) if bins[place] else None
