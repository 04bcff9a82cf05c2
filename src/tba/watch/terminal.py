"""A run in the terminal: the same view as the page's, in tables and small bars."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tba.report import charts, ledger, times
from tba.report.page import facts, headlines
from tba.report.read import setting
from tba.report.text import figure
from tba.report.times import Side
from tba.watch.board import EVERY_S, REST, progress
from tba.watch.follower import Follower, View, is_hidden
from tba.watch.searchers import Known, SearcherList

WIDTHS = range(12, 61)
"""Points of a small curve, as the terminal has room beside `BESIDE` columns."""
BESIDE = 70
BARS = "▁▂▃▄▅▆▇█"
GROUPS, COMPLETIONS, CHARACTERS = 2, 2, 100
"""Of the newest completions, what is shown."""


def show(run_dir: Path, console: Console | None = None) -> None:
    """Shows a run until it ends, or until Ctrl-C; a run that has ended once, and so where there is no terminal."""
    console = console or Console()
    follower, searchers = Follower(run_dir), SearcherList(run_dir)

    def drawn(view: View) -> RenderableType:
        has_any = view.is_under_way and setting(view.record.settings, "mode") != "lockstep"
        return frame(view, searchers.known() if has_any else Known(), console.width)

    view = follower.look()
    if view.is_under_way and console.is_terminal:
        with Live(console=console, auto_refresh=False, vertical_overflow="crop", screen=True) as live:
            for view in looks(follower, time.sleep):
                live.update(drawn(view), refresh=True)
    else:
        drawn(view)  # asks for the searchers, if there are any
        searchers.wait()
    console.print(drawn(view))


def looks(follower: Follower, rest: Callable[[float], None]) -> Iterator[View]:
    """The run again and again until it ends, at a pace that takes a hundredth of a core at most."""
    while True:
        started = time.thread_time()
        view = follower.look()
        yield view
        if not view.is_under_way:
            return
        rest(max(EVERY_S, REST * (time.thread_time() - started)))


def frame(view: View, known: Known, width: int) -> RenderableType:
    """One picture of a run, `width` columns wide; its texts are no markup, and steer no terminal."""
    run = view.record
    line = Text.assemble((run.name, "bold"), "  ", (view.status, "bold cyan"), f"  {progress(view)}")
    message = run.summary.get("message")
    pieces: list[RenderableType] = [line]
    if message:
        pieces.append(_text(str(message)[:400]))
    pieces.append(_text("  ".join(f"{label} {value}" for label, value in facts(run)[:5])))
    curves = _curves(view, min(max(width - BESIDE, WIDTHS[0]), WIDTHS[-1]))
    others = (_time(times.sides(run)), _ledger(view), _searchers(view, known), _newest(view))
    pieces += [piece for piece in (_results(view), curves, *others) if piece is not None]
    return Group(*pieces, *(_text(note, "dim") for note in run.notes))


def small_curve(values: Sequence[float | None], width: int) -> str:
    """The last value of each of `width` parts as a bar, from the lowest to the highest."""
    known = [value for value in values if value is not None]
    cuts = [place * len(known) // width for place in range(1, width + 1)] if len(known) > width else []
    picked = [known[cut - 1] for cut in cuts] or known
    if not picked:
        return ""
    low, span = min(picked), max(picked) - min(picked)
    return "".join(BARS[int((value - low) / span * (len(BARS) - 1) + 0.5) if span > 0 else 0] for value in picked)


def _text(line: str, style: str = "") -> Text:
    """Untrusted text on one line."""
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return Text(plain, style=style, no_wrap=True, overflow="ellipsis")


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for place, head in enumerate(heads):
        table.add_column(head, no_wrap=True, overflow="ellipsis", justify="left" if place == 0 else "right")
    return table


def _results(view: View) -> Table | None:
    rows = headlines(view.record)
    if not rows:
        return None
    table = _table("held out", "start", "now")
    for row in rows[:8]:
        table.add_row(_text(row["name"]), row["start"], row["final"])
    return table


def _curves(view: View, width: int) -> Table | None:
    drawn, columns = charts.build(view.record, max_points=4 * WIDTHS[-1])
    table = _table("curve", "last", "from first to last", "unit")
    table.columns[2].justify = table.columns[3].justify = "left"
    for chart in drawn:
        spec: Any = chart.spec
        for line in spec.get("lines", ()):
            values = columns[line["table"]][line["y"]]
            last = next((value for value in reversed(values) if value is not None), None)
            name = _text(f"{chart.title}: {line['name']}")
            table.add_row(name, figure(last), small_curve(values, width), spec["unit"])
    return table if table.row_count else None


def _time(sides: Sequence[Side]) -> RenderableType | None:
    return Group(*(_text(side.caption) for side in sides)) if sides else None


def _ledger(view: View) -> RenderableType | None:
    rows = []
    for row in ledger.balances(view.record.ledger):
        sums = " + ".join(f"{value} {label}" for label, value in row.parts)
        rows.append(_text(f"{row.what}: {row.whole[1]} {row.whole[0]} = {sums}  (adds up: {row.verdict})"))
    return Group(*rows) if rows else None


def _searchers(view: View, known: Known) -> RenderableType | None:
    if not view.is_under_way or setting(view.record.settings, "mode") == "lockstep":
        return None
    table = _table("searcher", "state", "groups", "last heard of", "prompts held")
    for line in known.lines:
        table.add_row(_text(line["name"]), line["state"], line["delivered"], line["heard"], line["held"])
    return Group(table, _text(known.trouble, "yellow")) if known.trouble else table


def _newest(view: View) -> RenderableType | None:
    if view.newest is None:
        return None
    if is_hidden(view.record.settings):
        return _text("The newest completions are attacks and not shown here; the page shows them after a click.", "dim")
    rows = [_text(f"trained on in step {view.newest.step}:", "dim")]
    for group in view.newest.groups[:GROUPS]:
        rows.append(_text(group.prompt[:CHARACTERS] or group.prompt_id, "bold"))
        rows += [_text(f"  reward {figure(reward)}  age {figure(age)}  {text[:CHARACTERS]}")
                 for text, reward, _, age in group.completions[:COMPLETIONS]]
    return Group(*rows)
