"""One knob at a time around the recipe `arithmetic`: recent share, k, K, beta, and the reward sampler's temperature.

Every run is a `tba train` in a process of its own, with its final held-out evaluation. JSON is written after each, so
that a grid that was interrupted goes on with `--add`, and one that is to grow runs cell by cell. Lockstep by
default: with one number of threads, a seed then gives the same figures again.

    python benchmarks/ablations.py --seeds 0 1 2 --json ablations.json
    python benchmarks/ablations.py --json ablations.json --add ablations.json --docs docs
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ablations_page import CENTRE, KNOBS, Found, page, table
from tba import metrics as m

RECIPE = "arithmetic"
WITHOUT = ("evaluation.every=0", "checkpoint.every=0")
"""Nothing beside training but the evaluations before and after it."""
BATCH = 512
"""Trajectories of a step, and completions of a round of the recipe: equal in every cell."""
RECENT_AGE = 7
"""The recipe's `buffer.recent_age`; more where the paper's bound, 2 k - 1, is more."""
FIGURES = (m.PASS_1, m.PASS_1_GREEDY, m.PASS_K, m.EVAL_KL, m.EVAL_ENTROPY, m.DISTINCT)
"""What is kept of an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One setting of the recipe: a knob, its value, and the overrides that give it."""

    knob: str
    """A key of KNOBS, or CENTRE."""
    value: float
    """In the knob's own unit; 0 for the centre."""
    overrides: tuple[str, ...] = ()
    """Of the recipe."""

    @property
    def name(self) -> str:
        """Knob and value: `k 8`."""
        return self.knob if self.knob == CENTRE else f"{self.knob} {self.value:g}"


def recent_share(value: float) -> Cell:
    """m of the paper; the rest is split between reward and uniform as in the recipe, half and half."""
    rest = round((1 - value) / 2, 6)
    mix = f"buffer.mix={{recent: {value:g}, reward: {rest:g}, uniform: {rest:g}}}"
    return Cell(knob="m", value=value, overrides=(mix,))


def sync_every(value: int) -> Cell:
    """k of the paper, with its window of 2 k - 1 steps where that is more than the recipe's."""
    window = f"buffer.recent_age={max(RECENT_AGE, 2 * value - 1)}"
    return Cell(knob="k", value=value, overrides=(f"trainer.sync_every={value}", window))


def group_size(value: int) -> Cell:
    """K of the paper, with S = K: as many trajectories a step, completions a round and an engine call as before."""
    sizes = {"trainer.group_size": value, "trainer.groups_per_step": BATCH // value, "search.num_samples": value,
             "search.batch_prompts": BATCH // value}
    return Cell(knob="K", value=value, overrides=tuple(f"{key}={size}" for key, size in sizes.items()))


def beta(value: float) -> Cell:
    """Strength of the KL, in reward units per nat."""
    return Cell(knob="beta", value=value, overrides=(f"objective.beta={value:g}",))


def reward_temperature(value: float) -> Cell:
    """Temperature of the reward sampler where it has a choice: twice as many completions of half as many prompts.

    In the recipe every pool holds one delivery of 8, of which a group takes all 8 whatever the temperature.
    Half of the groups are drawn by reward, as in the paper's TL;DR.
    """
    return Cell(knob="T", value=value, overrides=(
        "search.num_samples=16", "search.batch_prompts=32", "buffer.reuse=4",
        "buffer.mix={recent: 0.5, reward: 0.5, uniform: 0.0}", f"buffer.reward_temperature={value:g}",
    ))


CELLS: dict[str, Cell] = {cell.name: cell for cell in (
    Cell(knob=CENTRE, value=0),
    *map(recent_share, (0.0, 0.5, 0.95)),
    *map(sync_every, (1, 8, 20)),
    *map(group_size, (2, 4, 32)),
    *map(beta, (0.002, 0.006, 0.06)),
    *map(reward_temperature, (0.1, 1.0, 10.0)),
)}


def words_of(cell: Cell, seed: int, steps: int, mode: str) -> list[str]:
    """What follows `tba train arithmetic`, or `tba check arithmetic`."""
    return [*WITHOUT, *cell.overrides, f"seed={seed}", f"trainer.steps={steps}", f"mode={mode}"]


def run(cell: Cell, seed: int, steps: int, mode: str) -> Found:
    """One run from the base model to the last step.

    A run that fails (a loss that stays non-finite) is a result; SystemExit if the command is wrong.
    """
    words = words_of(cell, seed, steps, mode)
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "run"
        command = [sys.executable, "-m", "tba", "train", RECIPE, *words, "--run", str(where), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
        if done.returncode not in (0, 1) or not done.stdout:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        summary = json.loads(done.stdout.splitlines()[-1])
        logged = (where / "metrics.jsonl").read_text("utf-8") if (where / "metrics.jsonl").exists() else ""
    lines = [json.loads(line) for line in logged.splitlines()]
    return {
        "cell": cell.name, "seed": seed, "steps": steps, "mode": mode, "overrides": list(cell.overrides),
        **outcome(summary, [line for line in lines if m.STEP in line], group_count(cell)),
    }


def group_count(cell: Cell) -> int:
    """Groups of a step."""
    return BATCH // int(cell.value) if cell.knob == "K" else BATCH // 8


def outcome(summary: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], groups: int) -> Found:
    """The figures of a run: those of its last evaluation, and means over its steps."""
    if summary["status"] != "done":
        return {"status": summary["status"], "message": summary["message"], "steps_done": summary["steps"]}
    return {
        "status": "done",
        **{name: summary["final"][name] for name in FIGURES},
        "start": {name: summary["start"][name] for name in FIGURES},
        "samples": summary["final"][m.SAMPLES], "wait_share": summary["trainer"]["wait_share"],
        "seconds": summary["wall_s"],
        "age": math.fsum(step[m.AGE_MEAN] for step in steps) / len(steps),
        "flat": math.fsum(step[m.FLAT_GROUPS] for step in steps) / (len(steps) * groups),
    }


def kept(paths: Sequence[Path]) -> list[Found]:
    """Earlier runs; SystemExit if one is of a cell that no longer is what it was."""
    found = [row for path in paths for row in json.loads(path.read_text("utf-8"))]
    for row in found:
        cell = CELLS.get(row["cell"])
        if cell is None or list(cell.overrides) != row["overrides"]:
            raise SystemExit(f"{row['cell']!r}, seed {row['seed']}, was run with {row['overrides']}, and is now "
                             f"{None if cell is None else list(cell.overrides)}; remove it, to run it again.")
    return found


def write(found: Sequence[Found], path: Path) -> None:
    """Replaces the file, whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    partial.replace(path)


def main(arguments: Sequence[str] | None = None, run: Callable[[Cell, int, int, str], Found] = run) -> None:
    """Runs what is asked for and is not there yet, prints the table, and writes JSON and the page of the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--knobs", nargs="*", default=[CENTRE, *KNOBS], choices=[CENTRE, *KNOBS])
    parser.add_argument("--cells", nargs="*", choices=list(CELLS), help="these alone, by name: 'k 8'")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400, help="a multiple of every k")
    parser.add_argument("--mode", choices=("lockstep", "async"), default="lockstep")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="JSON of earlier runs, kept as they are")
    parser.add_argument("--docs", type=Path, help="folder of ablations.md and ablations.svg")
    chosen = parser.parse_args(arguments)
    found = kept(chosen.add)
    done = {(row["cell"], row["seed"], row["steps"], row["mode"]) for row in found}
    names = chosen.cells if chosen.cells is not None else [n for n, c in CELLS.items() if c.knob in chosen.knobs]
    for seed, name in itertools.product(chosen.seeds, names):
        if (name, seed, chosen.steps, chosen.mode) in done:
            continue
        row = run(CELLS[name], seed, chosen.steps, chosen.mode)
        found.append(row)
        said = (f"pass@1 {row[m.PASS_1]:.3f} kl {row[m.EVAL_KL]:.2f} distinct {row[m.DISTINCT]:.3f} "
                f"{row['seconds']:.0f} s" if row["status"] == "done" else f"{row['status']}: {row['message']}")
        print(f"{name}, seed {seed}: {said}", flush=True)
        if chosen.json:
            write(found, chosen.json)
    if chosen.json:
        write(found, chosen.json)
    print(table(found))
    if chosen.docs:
        page(found, chosen.docs)


if __name__ == "__main__":
    main()
