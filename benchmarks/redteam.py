"""An audit with known failure modes: TBA with 1 to 8 searchers, the synchronous GFlowNet set-up, and GRPO.

The attacker of the recipe redteam-synthetic on a simulated clock: calls cost their measured CPU seconds, and a search a
fixed time, as if attacker, victim and judges were models. What the policy has become is read from it exactly, by
listing all attacks, outside the clock.

    OMP_NUM_THREADS=1 python benchmarks/redteam.py --seeds 1 --json docs/redteam.json --page docs/redteam.md
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pages import write_between
from tba import assembly
from tba.embeddings import Embedder
from tba.policy import Policy, copy_in
from tba.reading import check_settings, recipe_text
from tba.records import Completion
from tba.rewards.functions import Score
from tba.settings import Settings
from tba.simulation import Measured, Simulation
from tba.tasks.enumerable import listed, log_target
from tba.tasks.protocol import outcomes
from tba.tasks.redteam import Redteam

SEARCHERS = (1, 2, 4, 8)
METHODS = (*(f"tba-{n}" for n in SEARCHERS), "gflownet-sync", "grpo")
STEP_COMPLETIONS = 128
"""Completions of an optimizer step, and of a search."""
EVERY = 10
"""Steps between two looks at the policy."""
ATTACKS = 1024
"""A mode is within reach if this many attacks are expected to hit it once."""
HALF = 0.5
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def settings_of(method: str, seed: int, completions: int) -> Settings:
    """One method's settings, for a run of so many completions; all start from the same policy."""
    import yaml

    tree = yaml.safe_load(recipe_text("redteam-synthetic"))
    steps = max(8, completions // STEP_COMPLETIONS // 4 * 4)
    line = max(2, steps * 3 // 10)
    tree |= {"seed": seed, "mode": "async"}
    tree["trainer"] |= {"steps": steps, "stable_steps": steps // 2}
    for name in ("prior_temperature", "target_temperature"):
        tree["objective"][name]["steps"] = line
    if method.startswith("tba-"):
        tree["search"]["searchers"] = int(method.removeprefix("tba-"))
        return check_settings(tree)
    tree["async"] = {"lead": 0}
    tree["trainer"] |= {"sync_every": 1}
    tree["search"]["searchers"] = 1
    if method == "gflownet-sync":
        # arXiv 2405.18540: fresh and replayed halves, a learned log Z, searching and training in turns
        tree["objective"] |= {"name": "trajectory_balance_learned_z"}
        tree["buffer"] |= {"mix": {"recent": 0.5, "reward": 0.5}}
        return check_settings(tree)
    tree["objective"] = {"name": "grpo", "beta": 0.01}
    tree["search"]["temperature"] = 1.0
    tree["buffer"] |= {"mix": {"recent": 1.0}, "initial": 0, "dedup": "none", "max_uses": 1}
    return check_settings(tree)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All attacks, and what the exact target makes of them."""

    pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    works: np.ndarray
    mode: np.ndarray
    """Number of the mode that each hits; -1: none."""
    target: np.ndarray
    """Probability of each under the exact target of trajectory balance at the end of its courses."""
    vectors: np.ndarray


def listing_of(settings: Settings, task: Redteam, policy: Policy) -> Listing:
    """Every attack of the recipe."""
    (stop,) = policy.stop_ids
    ids = listed(len(policy.tokenizer), stop, longest=settings.search.max_new_tokens,
                 shortest=settings.policy.min_new_tokens, is_forced=True)
    (prompt,) = task.prompts(policy.encode)
    texts = [policy.decode(one) for one in ids]
    said = [Completion(tokens=one, text=text, logps=(0.0,) * len(one), version=0, finish="stop")
            for one, text in zip(ids, texts, strict=True)]
    scores = [one for one in outcomes(task, prompt, said) if isinstance(one, Score)]
    pairs = [(prompt.tokens, one) for one in ids]
    target, _ = log_target(
        policy.without_limits().sequence_logps(pairs), [s.reward for s in scores], settings.final_beta,
        settings.final_prior,
    )
    hit = [next((n for n, mode in enumerate(task.modes) if mode in text), -1) for text in texts]
    return Listing(pairs=pairs, works=np.array([s.parts["words"] > HALF for s in scores]), mode=np.array(hit),
                   target=np.exp(target), vectors=Embedder(None)(texts))


def state_of(policy: Policy, listing: Listing) -> dict[str, float]:
    """What a policy is, exactly: success, diversity (1 - expected cosine of two attacks), modes within reach, tv."""
    share = np.exp(np.array(policy.sequence_logps(listing.pairs)))
    mean = share @ listing.vectors
    modes = [float(share[listing.mode == n].sum()) for n in range(int(listing.mode.max()) + 1)]
    return {
        "success": float(share[listing.works].sum()), "diversity": 1.0 - float(mean @ mean),
        "modes": sum(chance >= 1 / ATTACKS for chance in modes), "least_mode": min(modes),
        "tv": 0.5 * float(np.abs(share - listing.target).sum()),
    }


def measure(method: str, seed: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """One run of `chosen.completions` completions trained on."""
    began = time.perf_counter()
    settings = settings_of(method, seed, chosen.completions)
    task = assembly.make_task_of(settings)
    assert isinstance(task, Redteam), "the recipe is of the redteam task"
    policy = assembly.make_policy(settings.model_copy(update={"seed": 0}), task)
    exact = listing_of(settings_of("tba-1", seed, chosen.completions), task, policy)
    questions = assembly.Questions(task=task, training=task.prompts(policy.encode), held_out=())
    costs = Measured(time.process_time, instead={"search": chosen.search_s})
    simulated = Simulation(settings, questions, policy, costs)
    looked = policy.trainable_copy()
    found: dict[str, Any] = {"method": method, "seed": seed, "half_s": None, "half_completions": None,
                             "all_modes_s": None, "all_modes_completions": None, "curve": []}
    unseen, delivered = set(range(len(task.modes))), 0
    for call in simulated.calls():
        if call.name == "deliver":
            for text in [t.completion.text for group in call.result for t in group.trajectories]:
                delivered += 1
                unseen -= {n for n in unseen if task.modes[n] in text}
                if not unseen and found["all_modes_s"] is None:
                    found |= {"all_modes_s": call.ended, "all_modes_completions": delivered}
        elif call.name == "step" and simulated.trainer.steps % EVERY == 0:
            copy_in(looked.model, simulated.trainer.publish(0).tensors)
            state = {**state_of(looked, exact), "s": call.ended, "completions": delivered,
                     "steps": simulated.trainer.steps}
            found["curve"].append(state)
            if state["success"] >= HALF and found["half_s"] is None:
                found |= {"half_s": call.ended, "half_completions": delivered}
        if simulated.trainer.steps >= settings.trainer.steps:
            break
    copy_in(looked.model, simulated.trainer.publish(0).tensors)
    return {**found, **state_of(looked, exact), "modes_seen": len(task.modes) - len(unseen), "end_s": simulated.now,
            "completions": delivered, "steps": simulated.trainer.steps, "real_s": time.perf_counter() - began}


def mean(values: Iterable[float | None]) -> float | None:
    """The mean; None if any of them was not reached."""
    reached = list(values)
    return None if not reached or None in reached else math.fsum(v for v in reached if v is not None) / len(reached)


def table(runs: Sequence[dict[str, Any]]) -> str:
    """One line a method, means over its seeds, as Markdown; times are simulated."""
    def figure(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    names = {"half_s": 1, "half_completions": 0, "all_modes_s": 1, "all_modes_completions": 0, "end_s": 1,
             "completions": 0, "success": 3, "diversity": 3, "modes_seen": 1, "modes": 1, "tv": 3}
    heads = ["method", "seeds", "s to 50 %", "compl. to 50 %", "s to all modes", "compl. to all modes", "s in all",
             "compl. in all", "success", "diversity", "modes seen", "modes in reach", "tv"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for method in dict.fromkeys(run["method"] for run in runs):
        own = [run for run in runs if run["method"] == method]
        cells = [figure(mean(run[name] for run in own), digits) for name, digits in names.items()]
        lines.append("| " + " | ".join([method, str(len(own)), *cells]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Prints the table, and writes runs as JSON and the table into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--completions", type=int, default=96_000, help="trained on in each run")
    parser.add_argument("--search-s", type=float, default=0.5, help=f"seconds of {STEP_COMPLETIONS} attacks, scored")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="a Markdown page with marks for the table")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    for seed in range(chosen.seeds):
        for method in chosen.methods:
            runs.append(measure(method, seed, chosen))
            print(table(runs[-1:]).splitlines()[-1], f"{runs[-1]['real_s']:.0f} s", flush=True)
            if chosen.json:
                chosen.json.write_text(json.dumps(runs, indent=1))
    print(table(runs))
    if chosen.page:
        write_between(chosen.page, BEGIN, END, table(runs))


if __name__ == "__main__":
    main()
