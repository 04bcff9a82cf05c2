"""A run's records to an HTML page, written whole or not at all."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba import metrics
from tba.report import charts, ledger, times
from tba.report.files import write_whole
from tba.report.read import Answered, RunRecord, read_run, setting
from tba.report.text import count, duration, figure, number, script_json, visible

if TYPE_CHECKING:
    import jinja2

NUM_SHOWN = 25
"""Prompts that the browser of completions shows before it is asked for more."""
MAX_HEADLINES = 16
_HEADLINES = (
    metrics.PASS_1,
    metrics.PASS_K,
    metrics.EVAL_ENTROPY,
    metrics.EFFECTIVE,
    metrics.DISTINCT,
    metrics.SELF_BLEU,
    metrics.EMBEDDING_DISTANCE,
    metrics.TV,
    metrics.TARGET_KL,
    metrics.ATTACK_CLUSTERS,
    metrics.HELD_OUT_SUCCESS,
    metrics.JUDGE_AGREEMENT,
    metrics.TRANSFER,
)
_NOT_HEADLINES = {
    metrics.EVAL_STEP,
    metrics.WALL,
    metrics.STEP,
    metrics.SAMPLES,
    metrics.PROMPTS,
    metrics.VERSION,
}
_SETTINGS_SHOWN = (
    "task.name",
    "mode",
    "model",
    "objective.name",
    "objective.beta",
    "search.searchers",
    "trainer.sync_every",
)
_STATUS = ("done", "failed", "interrupted")


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html`, one page that needs no other file and no network.

    The same files give the same bytes. Files that are missing or broken are named on the page.

    Args:
        run_dir: a run directory; anything in it is taken as untrusted.

    Returns:
        The path of the page. An older page is replaced only by a whole new one.

    Raises:
        FileNotFoundError: there is no such directory.
        OSError: the page cannot be written there.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(
            f"no run directory {str(run_dir)!r}; give the directory that `tba train` wrote."
        )
    target = run_dir / "report.html"
    write_whole(render(read_run(run_dir)), target)
    return target


def render(run: RunRecord) -> str:
    """The page of a run as HTML text."""
    from markupsafe import Markup

    drawn, columns = charts.build(run)
    scripts = ["\n".join(resource(name) for name in ("charts.js", "page.js"))]
    if any(chart.spec for chart in drawn):
        scripts.insert(0, plotly_js())
    data = {
        "charts": {chart.id: chart.spec for chart in drawn if chart.spec},
        "columns": columns,
        "answered": [asdict(answered) for answered in run.answered],
        "shown": NUM_SHOWN,
    }
    versions = list(dict.fromkeys(answered.version for answered in run.answered))
    return environment().get_template("page.html.jinja").render(
        run=run,
        status=_status(run),
        message=visible(run.summary.get("message") or ""),
        facts=facts(run),
        headlines=headlines(run),
        sides=times.sides(run),
        advice=visible(run.summary.get("advice") or "", 400),
        charts=drawn,
        balances=ledger.balances(run.ledger),
        reasons=ledger.reasons(run.ledger),
        versions=versions,
        newest=_newest(run.answered),
        num_shown=NUM_SHOWN,
        is_hidden=setting(run.settings, "task.name") == "redteam",
        is_thinned=_is_thinned(run),
        thinned_to=charts.MAX_POINTS,
        css=Markup(resource("page.css")),
        scripts=[Markup(script) for script in scripts],
        data=Markup(script_json(data)),
        policy=_policy(scripts),
    )


@cache
def environment(*folders: str) -> jinja2.Environment:
    """What fills in the templates of `tba.report` and of the packages `folders`; all that they are given is escaped."""
    import jinja2  # only here: `import tba.report` stays quick

    def source(name: str) -> str | None:
        found = [resources.files(folder).joinpath(name) for folder in (*folders, "tba.report")]
        return next((file.read_text(encoding="utf-8") for file in found if file.is_file()), None)

    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(source),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(figure=figure, count=count)
    return made


def _policy(scripts: Sequence[str]) -> str:
    """Content-Security-Policy: nothing is fetched, and no script runs but these."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def plotly_js() -> str:
    """The library that draws."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs().replace("\r\n", "\n")


@cache
def resource(name: str) -> str:
    """A file of `tba.report`."""
    return resources.files("tba.report").joinpath(name).read_text(encoding="utf-8")


def _status(run: RunRecord) -> str:
    known = run.summary.get("status")
    return known if known in _STATUS else "not finished"


def facts(run: RunRecord) -> list[tuple[str, str]]:
    """What stands under the run's name: label and value."""
    last = run.steps[-1] if run.steps else {}
    steps = number(run.summary.get("steps"))
    wall = number(run.summary.get("wall_s"))
    facts = [
        ("steps", figure(steps if steps is not None else last.get(metrics.STEP))),
        ("version", figure(run.summary.get("version", last.get(metrics.VERSION)))),
        ("time", duration(wall if wall is not None else last.get(metrics.WALL))),
        ("start-up", duration(run.summary.get("startup_s"))),
        ("seed", figure(run.summary.get("seed", setting(run.settings, "seed"))).replace(",", "")),
    ]
    for path in _SETTINGS_SHOWN:
        value = setting(run.settings, path)
        if value is not None and value != "":
            facts.append((path, visible(value, 120)))
    return [(label, value) for label, value in facts if value != "not known"]


def headlines(run: RunRecord) -> list[dict[str, Any]]:
    """Held-out numbers at the start and at the end; from the evaluations where the summary lacks them."""
    start, final = run.held_out
    foremost = metrics.foremost({**start, **final})
    names = [
        name for name in dict.fromkeys((*foremost, *_HEADLINES, *sorted({*start, *final})))
        if name not in _NOT_HEADLINES
    ]
    known = [
        name for name in names if number(final.get(name)) is not None or number(start.get(name)) is not None
    ]
    rows = []
    for name in known[:MAX_HEADLINES]:
        declared = metrics.METRICS.get(name)
        rows.append(
            {
                "name": visible(name, 60),
                "unit": metrics.unit_shown(name),
                "meaning": declared.meaning if declared else "",
                "start": figure(start.get(name)),
                "final": figure(final.get(name)),
                "is_main": name in foremost and name != metrics.TV,
            }
        )
    return rows


def _newest(answered: Sequence[Answered]) -> list[Answered]:
    """The prompts that are on the page without any script."""
    of_newest = takewhile(lambda one: one.version == answered[0].version, answered)
    return list(of_newest)[:NUM_SHOWN]


def _is_thinned(run: RunRecord) -> bool:
    return max(len(run.steps), len(run.evaluations)) > charts.MAX_POINTS
