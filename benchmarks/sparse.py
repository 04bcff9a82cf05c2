"""Time and completions until a rare reward is found, and found steadily, by 1 to 8 searchers on a simulated clock.

One prompt, one rewarded completion of known probability under the start policy. Searchers sample at that policy's
temperature, or hotter (exploration). Calls cost their measured CPU seconds (`tba.simulation`), so that saturation
shows; --search-s gives searchers the speed of a larger model instead.

    OMP_NUM_THREADS=1 python benchmarks/sparse.py --seeds 5 --json sparse.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tba import assembly
from tba.policy import Policy
from tba.reading import check_settings, recipe_text
from tba.records import Completion, Prompt
from tba.settings import Settings
from tba.simulation import Measured, Simulation
from tba.tasks.protocol import Encode

LENGTH = 4
"""Ids of a completion, at most."""
FAVOURITE, RARE = "a", "b"
"""The start policy prefers the one; the reward is for a completion of nothing but the other."""
REST = 0.02
"""Probability of each other id at each place."""
WINDOW = 32
"""Newest completions that say whether the reward is found steadily: at half of them or more."""
LEARNING = 5000
"""Completions beside those for finding that a run is given to learn; about what one searcher takes."""


class Sparse:
    """One empty prompt; reward 1 for `bbbb`, 0 for everything else."""

    characters = "abc"

    def prompts(self, encode: Encode) -> Sequence[Prompt]:
        """The prompt."""
        return [Prompt(id="only", tokens=encode(""), text="")]

    def held_out(self, encode: Encode) -> Sequence[Prompt]:
        """The same prompt."""
        return self.prompts(encode)

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[float]:
        """1 for the rewarded completion."""
        del prompt
        return [float(completion.text == RARE * LENGTH) for completion in completions]

    def gold(self, prompt: Prompt) -> None:
        """Not checked."""
        del prompt


def settings_of(searchers: int, temperature: float, seed: int) -> Settings:
    """A table, trajectory balance, a buffer that keeps every distinct completion and draws half by reward."""
    import yaml

    tree = yaml.safe_load(recipe_text("enumerable"))
    tree |= {
        "seed": seed, "mode": "async", "architecture": {"positions": LENGTH},
        "search": {"searchers": searchers, "num_samples": 32, "batch_prompts": 4, "max_new_tokens": LENGTH,
                   "temperature": temperature},
        "buffer": {"capacity": 4000, "capacity_per_prompt": 4000, "mix": {"recent": 0.5, "reward": 0.5},
                   "reward_temperature": 0.1},
        "objective": {"beta": 0.05},
        "trainer": {"steps": 10**9, "learning_rate": 0.1, "adam_betas": [0.9, 0.999], "clip_norm": None,
                    "groups_per_step": 4, "group_size": 16, "sync_every": 2},
    }
    return check_settings(tree)


def start_policy(settings: Settings, task: Any, prior: float) -> tuple[Policy, float]:
    """A policy that rewards with probability `prior`, and that probability at the searchers' temperature."""
    policy = assembly.make_policy(settings, task)
    encode = policy.tokenizer.get_vocab()
    rare = prior ** (1 / LENGTH)
    row = torch.full((len(encode),), REST, dtype=torch.float64)
    row[encode[RARE]] = rare
    row[encode[FAVOURITE]] = 1 - rare - REST * (len(encode) - 2)
    with torch.no_grad():
        policy.model.logits.copy_(row.log().expand_as(policy.model.logits))
    hot = (row.log() / settings.sampling_temperature).softmax(0)[encode[RARE]]
    return policy, float(hot) ** LENGTH


def measure(prior: float, searchers: int, temperature: float, seed: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """One run until the reward is found steadily, or given up after `chosen.most` / prior + LEARNING completions."""
    started = time.perf_counter()
    settings = settings_of(searchers, temperature, seed)
    task = Sparse()
    policy, sampled = start_policy(settings, task, prior)
    questions = assembly.Questions(task=task, training=task.prompts(policy.encode), held_out=())
    instead = {} if chosen.search_s is None else {"search": chosen.search_s}
    simulated = Simulation(settings, questions, policy, Measured(time.process_time, instead=instead))
    found: dict[str, Any] = {
        "prior": prior, "sampled_prior": sampled, "searchers": searchers, "temperature": temperature, "seed": seed,
        "first_s": None, "first_completions": None, "steady_s": None, "steady_completions": None,
    }
    newest: deque[bool] = deque(maxlen=WINDOW)
    completions = 0
    for call in simulated.calls():
        if call.name != "deliver":
            continue
        for is_rewarded in (t.reward > 0 for group in call.result for t in group.trajectories):
            completions += 1
            newest.append(is_rewarded)
            if is_rewarded and found["first_s"] is None:
                found |= {"first_s": call.ended, "first_completions": completions}
            if sum(newest) * 2 >= WINDOW and found["steady_s"] is None:
                found |= {"steady_s": call.ended, "steady_completions": completions}
        if found["steady_s"] is not None or completions >= chosen.most / prior + LEARNING:
            break
    return {
        **found, "completions": completions, "end_s": simulated.now, "steps": simulated.trainer.steps,
        "busy": simulated.busy(), "real_s": time.perf_counter() - started,
    }


def mean(values: Iterable[float | None]) -> float | None:
    """The mean; None if any of them was not reached."""
    reached = list(values)
    return None if not reached or None in reached else math.fsum(v for v in reached if v is not None) / len(reached)


def summarize(runs: list[dict[str, Any]], budget: float) -> dict[str, Any]:
    """Means over the seeds of one cell, and how many seeds were there by budget / prior + LEARNING completions."""
    limit = budget / runs[0]["prior"] + LEARNING
    row: dict[str, Any] = {k: runs[0][k] for k in ("prior", "sampled_prior", "temperature", "searchers")}
    for key in ("first_s", "first_completions", "steady_s", "steady_completions"):
        row[key] = mean(run[key] for run in runs)
    for what in ("first", "steady"):
        row[f"{what}_by_budget"] = sum((run[f"{what}_completions"] or math.inf) <= limit for run in runs)
    row["per_s"] = math.fsum(run["completions"] for run in runs) / math.fsum(run["end_s"] for run in runs)
    for part in ("depot", "trainer", "searcher-0"):
        row[f"busy_{part.split('-')[0]}"] = mean(run["busy"][part] for run in runs)
    return {**row, "seeds": len(runs)}


def table(rows: list[dict[str, Any]], budget: float) -> str:
    """The rows as Markdown."""
    def figure(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    limit = f"{budget:g}/prior + {LEARNING}"
    head = ["prior", "T", "at T", "searchers", "first s", "first compl.", "steady s", "steady compl.",
            f"first by {limit}", f"steady by {limit}", "compl./s", "depot busy", "trainer busy"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [
            f"{row['prior']:.0e}", f"{row['temperature']:g}", f"{row['sampled_prior']:.1e}", str(row["searchers"]),
            figure(row["first_s"], 2), figure(row["first_completions"], 0), figure(row["steady_s"], 2),
            figure(row["steady_completions"], 0), f"{row['first_by_budget']}/{row['seeds']}",
            f"{row['steady_by_budget']}/{row['seeds']}", figure(row["per_s"], 0), figure(row["busy_depot"], 2),
            figure(row["busy_trainer"], 2),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Prints the table, and writes runs and table as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--priors", type=float, nargs="+", default=[1e-3, 1e-4, 1e-5])
    parser.add_argument("--searchers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 2.0], help="1 is no exploration")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--search-s", type=float, help="seconds of a search of 128 completions; measured if left out")
    parser.add_argument("--most", type=float, default=6.0, help="x 1/prior: completions (+ 5000) of a run at most")
    parser.add_argument("--budget", type=float, default=1.0, help="the same, at which runs are compared")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    measure(1e-3, 1, 1.0, 10**6, chosen)  # what is slow only once
    runs: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for prior, temperature, searchers in itertools.product(chosen.priors, chosen.temperatures, chosen.searchers):
        cell = [measure(prior, searchers, temperature, seed, chosen) for seed in range(chosen.seeds)]
        runs += cell
        rows.append(summarize(cell, chosen.budget))
        print(table(rows, chosen.budget).splitlines()[-1], f"{sum(r['real_s'] for r in cell):.0f} s", flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps({"table": rows, "runs": runs}, indent=1))
    print(table(rows, chosen.budget))


if __name__ == "__main__":
    main()
