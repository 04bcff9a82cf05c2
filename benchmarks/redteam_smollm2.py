"""Puts finished audits side by side: success, diversity and the held-out judge's word, before and after.

Everything comes out of the run directories that are given, and nothing of it is computed again.

    python benchmarks/redteam_smollm2.py my_audit my_grpo --json docs/redteam_smollm2.json --page docs/redteam.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pages import write_between
from tba import metrics as m
from tba.jobs import settings_of
from tba.settings import SettingsError

BEGIN, END = "<!-- smollm2: begin -->", "<!-- smollm2: end -->"
GRPO = (
    "objective.name=grpo", "objective.beta=0.01", "objective.target_temperature=null", "search.temperature=null",
    "buffer.mix={recent: 1.0}", "buffer.reuse=1.0", "buffer.max_uses=1", "buffer.initial=0", "buffer.dedup=none",
    "trainer.sync_every=1", "async.lead=1",
)
"""What turns the recipe into the same audit by GRPO: on policy but for one round, at the policy's own temperature."""
COLUMNS: tuple[tuple[str, str, str | None, int], ...] = (
    ("attacks", m.ATTACKS, None, 0), ("success", m.ATTACK_SUCCESS, m.ATTACK_INTERVAL, 3),
    ("mean of logs", m.ATTACK_LOG, None, 2), ("diversity", m.ATTACK_DIVERSITY, None, 3),
    ("clusters", m.ATTACK_CLUSTERS, None, 0), ("held-out success", m.HELD_OUT_SUCCESS, m.HELD_OUT_INTERVAL, 3),
    ("judges agree", m.JUDGE_AGREEMENT, m.JUDGE_AGREEMENT_INTERVAL, 3), ("KL", m.EVAL_KL, None, 1),
)
"""Head, metric, metric of its interval, and decimals."""


def read_run(run: Path) -> dict[str, Any]:
    """What one audit was and found; SystemExit if it is no finished audit."""
    try:
        settings = settings_of(run)
    except SettingsError as error:
        raise SystemExit(str(error)) from error
    file = run / "summary.json"
    if not file.is_file():
        raise SystemExit(f"{str(run)!r} has no summary.json: it is not finished; go on with: tba resume {run}")
    summary = json.loads(file.read_text("utf-8"))
    if summary["status"] != "done" or m.ATTACK_SUCCESS not in summary["final"]:
        raise SystemExit(f"{str(run)!r} is no finished audit: status {summary['status']!r}, task "
                         f"{settings.task.name!r}.")
    names = [name for _, *pair, _ in COLUMNS for name in pair if name is not None]
    return {
        "run": run.name, "objective": settings.objective.name, "beta": settings.final_beta, "seed": settings.seed,
        "model": settings.model, "victim": settings.task.redteam.victim.model, "steps": summary["steps"],
        "wall_s": summary["wall_s"], "delivered": summary["ledger"]["trajectories"]["delivered"],
        **{when: {name: summary[when].get(name) for name in names} for when in ("start", "final")},
    }


def figure(found: Mapping[str, Any], name: str, interval: str | None, digits: int) -> str:
    """A figure with its interval; - if there is none."""
    value = found.get(name)
    if value is None:
        return "-"
    around = found.get(interval) if interval is not None else None
    ends = f" ({around[0]:.{digits}f} to {around[1]:.{digits}f})" if around else ""
    return f"{value:,.{digits}f}{ends}"


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Two lines a run, before and after training, as Markdown."""
    heads = ["attacker", "steps", "attacks searched", "minutes", *(head for head, *_ in COLUMNS)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for run in runs:
        said = f"{run['objective']}, beta {run['beta']:g}, seed {run['seed']}"
        before = [f"{said}, before", "0", "0", "0"]
        after = [f"{said}, after", f"{run['steps']:,}", f"{run['delivered']:,}", f"{run['wall_s'] / 60:.0f}"]
        for first, when in ((before, "start"), (after, "final")):
            lines.append("| " + " | ".join([*first, *(figure(run[when], *column[1:]) for column in COLUMNS)]) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table, and writes what was read as JSON and the table into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="a Markdown page with marks for the table")
    chosen = parser.parse_args(arguments)
    runs = [read_run(run) for run in chosen.runs]
    print(table(runs))
    if chosen.json:
        chosen.json.write_text(json.dumps(runs, indent=1) + "\n", "utf-8")
    if chosen.page:
        write_between(chosen.page, BEGIN, END, table(runs))


if __name__ == "__main__":
    main()
