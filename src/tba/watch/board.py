"""A run to what the live page asks for: the page itself, the run's state, two versions side by side."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.metrics import finite
from tba.report import charts, ledger, times
from tba.report.page import environment, facts, headlines
from tba.report.read import Answered, RunRecord, read_settings, setting
from tba.report.text import count, duration, visible
from tba.watch.differences import difference
from tba.watch.follower import Follower, View, is_hidden
from tba.watch.searchers import Known, SearcherList

EVERY_S = 2.0
"""Seconds between two looks at the run, at least."""
REST = 100
"""Times the processor time of a look that pass before the next: watching takes a hundredth of a core, at most."""
MAX_POINTS = 500
"""Points of one line."""
FOLDER = "tba.watch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is sent, and a tag that changes with it."""

    body: bytes
    tag: str

    @staticmethod
    def of(body: bytes) -> Answer:
        """With its tag."""
        return Answer(body=body, tag=hashlib.sha256(body).hexdigest()[:32])


class Board:
    """What is shown of one run, made when it is asked for and kept until something changes."""

    def __init__(
        self, run_dir: Path, *, searchers: SearcherList | None = None,
        clock: Callable[[], float] = time.monotonic, work: Callable[[], float] = time.thread_time,
    ) -> None:
        """`clock` gives seconds, `work` processor seconds of the thread."""
        self._run_dir = run_dir
        self._follower, self._searchers = Follower(run_dir), searchers or SearcherList(run_dir)
        self._clock, self._work = clock, work
        self._lock = threading.Lock()
        self._due_at = clock()
        self._shown: tuple[View, Known] | None = None
        self._curves: tuple[RunRecord, dict[str, Any]] | None = None
        self._state = Answer.of(b"{}")
        self._answered: Sequence[Answered] = ()

    def page(self) -> Answer:
        """The page before it has asked for the run's state, which of a long run takes a while to read."""
        _, settings = read_settings(self._run_dir / "config.yaml", [])
        name = visible(self._run_dir.resolve().name, 200)
        template = environment(FOLDER).get_template("watch.html.jinja")
        return Answer.of(template.render(name=name, is_hidden=is_hidden(settings)).encode("utf-8", errors="replace"))

    def state(self) -> Answer:
        """All that the page shows, as JSON; not older than the pace at which the run is looked at."""
        with self._lock:
            if self._clock() >= self._due_at:
                started = self._work()
                self._refresh()
                self._due_at = self._clock() + max(EVERY_S, REST * (self._work() - started))
            return self._state

    def _refresh(self) -> None:
        view = self._follower.look()
        is_async = setting(view.record.settings, "mode") != "lockstep"
        known = self._searchers.known() if view.is_under_way and is_async else Known()
        if self._shown is not None and self._shown[0] is view and self._shown[1] == known:
            return
        self._shown, self._answered = (view, known), view.record.answered
        state = {
            "status": view.status, "logged_at": view.logged_at, "progress": progress(view),
            "parts": parts(view, known), "curves": self._curves_of(view.record), "choices": choices(view.record),
        }
        self._state = Answer.of(json.dumps(finite(state), allow_nan=False, separators=(",", ":")).encode())

    def _curves_of(self, record: RunRecord) -> dict[str, Any]:
        """Charts and their numbers; those of before where the metrics are the same."""
        kept = self._curves
        if kept is None or kept[0].steps is not record.steps or kept[0].evaluations is not record.evaluations:
            kept = self._curves = (record, curves(record))
        return kept[1]

    def difference(self, prompt_id: str, one: int, other: int) -> Answer:
        """Two versions' completions of a prompt, as HTML."""
        with self._lock:
            answered = self._answered
        found = difference(answered, prompt_id, one, other)
        template = environment(FOLDER).get_template("difference.html.jinja")
        return Answer.of(template.render(found=found).encode("utf-8", errors="replace"))


def progress(view: View) -> str:
    """How far the run is, in words."""
    done, total = view.steps
    said = f"step {count(done)}" + (f" of {count(total)}" if total is not None else "")
    return said if view.left_s is None else f"{said}, about {duration(view.left_s)} left"


def parts(view: View, known: Known) -> dict[str, str]:
    """HTML of each part of the page that is not drawn, by the name of its place; everything in it is escaped."""
    run = view.record
    given: Mapping[str, Mapping[str, Any]] = {
        "facts": {"facts": facts(run)},
        "message": {"message": visible(run.summary.get("message") or "")},
        "notes": {"run": run},
        "results": {"headlines": headlines(run)},
        "time": {"sides": times.sides(run), "advice": visible(run.summary.get("advice") or "", 400)},
        "searchers": {"view": view, "known": known, "mode": setting(run.settings, "mode")},
        "ledger": {"balances": ledger.balances(run.ledger), "reasons": ledger.reasons(run.ledger)},
        "newest": {"newest": view.newest},
        "settings": {"run": run},
    }
    made = environment(FOLDER)
    return {name: made.get_template(f"{name}.html.jinja").render(values) for name, values in given.items()}


def curves(run: RunRecord) -> dict[str, Any]:
    """The charts: HTML of their places, which is only taken where other charts appear; captions, specs, numbers."""
    drawn, columns = charts.build(run, MAX_POINTS)
    return {
        "html": environment(FOLDER).get_template("curves.html.jinja").render(charts=drawn),
        "shape": [[chart.id, bool(chart.spec)] for chart in drawn],
        "captions": {chart.id: chart.caption for chart in drawn},
        "specs": {chart.id: chart.spec for chart in drawn if chart.spec}, "columns": columns,
    }


def choices(run: RunRecord) -> dict[str, Any]:
    """The prompts and versions whose completions can be put side by side."""
    versions: dict[str, list[int]] = {}
    for answered in run.answered:
        versions.setdefault(answered.prompt_id, []).append(answered.version)
    return {
        "versions": sorted({answered.version for answered in run.answered}),
        "prompts": [prompt for prompt, of in versions.items() if len(of) > 1],
    }
