"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tba import metrics as m
from tba.records import visible

PLAIN_EVERY_S = 5.0
"""Seconds between plain lines."""


class Progress:
    """Shows steps, evaluations and notes as they come."""

    def __init__(self, steps: int, started: float, console: Console | None = None) -> None:
        """`steps` of the whole run; `started` is the perf_counter at which the command began."""
        self._steps, self._started = steps, started
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._first: Mapping[str, Any] | None = None
        self._last_line_at = 0.0
        self._pass_1: float | None = None
        self.startup_s: float | None = None
        """Seconds from the command to the first evaluation: imports, processes, model."""

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, kind: str, record: Mapping[str, Any]) -> None:
        """Takes a ("ready" | "step" | "evaluation" | "checkpoint" | "note", record) in."""
        if kind == "ready":
            self.startup_s = time.perf_counter() - self._started
            self._print(f"start-up took {self.startup_s:.1f} s")
        elif kind == "note":
            self._print(str(record["text"]))
        elif kind == "evaluation":
            self._pass_1 = record[m.PASS_1]
            shown = [name for name in m.foremost(record) if record.get(name) is not None]
            self._print(f"version {record[m.EVAL_STEP]}: " + ", ".join(f"{n} {_number(record[n])}" for n in shown))
        elif kind == "step":
            self._show_step(record)

    def _show_step(self, record: Mapping[str, Any]) -> None:
        self._first = self._first or record
        cells = self._cells(record)
        if self._live is not None:
            table = Table(*cells, box=None, pad_edge=False)
            table.add_row(*cells.values())
            self._live.update(table)
        elif time.monotonic() - self._last_line_at >= PLAIN_EVERY_S or record[m.STEP] == self._steps:
            self._last_line_at = time.monotonic()
            self._print("  ".join(f"{name} {value}" for name, value in cells.items()))

    def _cells(self, record: Mapping[str, Any]) -> dict[str, str]:
        assert self._first is not None
        steps = record[m.STEP] - self._first[m.STEP]
        seconds = record[m.WALL] - self._first[m.WALL]
        rate = steps / seconds if seconds > 0 else None
        searched = record[m.DELIVERED_TOKENS] - self._first[m.DELIVERED_TOKENS]
        left = (self._steps - record[m.STEP]) / rate if rate else None
        return {
            "step": f"{record[m.STEP]}/{self._steps}",
            "reward": _number(record[m.REWARD]),
            "pass@1": _number(self._pass_1),
            "kl": _number(record[m.KL]),
            "age": _number(record[m.AGE_MEAN]),
            "train tok/s": _number(record[m.TRAIN_TOKENS] / record[m.STEP_SECONDS]),
            "search tok/s": _number(searched / seconds if seconds > 0 else None),
            "buffer": str(record[m.BUFFER_SIZE]),
            "left": f"{left:.0f} s" if left is not None else "-",
        }

    def show_summary(self, summary: Mapping[str, Any], *, on_stdout: bool) -> None:
        """The end of a run: what it began and ended with, how long it took, and where the report is."""
        console = Console() if on_stdout else self._console
        start, final = summary["start"], summary["final"]
        lines = [f"{summary['status']} after {summary['steps']} steps in {summary['wall_s']:.1f} s of training"]
        if self.startup_s is not None:
            lines[0] += f" (start-up {self.startup_s:.1f} s)"
        for name in m.foremost(final):
            if start.get(name) is not None and final.get(name) is not None:
                lines.append(f"{name:17} {_number(start[name])} -> {_number(final[name])}")
        share = summary["trainer"]["wait_share"]
        if share is not None:
            lines.append(f"trainer waited {100 * share:.1f} % of its time")
        if summary["advice"]:
            lines.append(f"advice            {summary['advice']}")
        lines.append(f"report            {summary['run']}/report.html")
        console.print(Text("\n".join(lines)))

    def _print(self, line: str) -> None:
        self._console.print(Text(visible(line)), soft_wrap=True)


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3f}"
