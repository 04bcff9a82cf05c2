"""Distance to an exact posterior, for every objective, by how old the data is and with and without replay.

Each run is the package's own lockstep loop on a task whose completions can all be listed. A lag of L comes from
a weight store that hands out the publication L versions before the newest: from step L on, a searcher works with
weights that are exactly L steps old, so that no trajectory is younger than L when it is first consumed.

    python benchmarks/posterior.py --seeds 5 --json posterior.json --docs docs
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posterior_page import Found, grouped, mean, page, table
from tba import assembly
from tba import metrics as m
from tba.catalog import OBJECTIVES
from tba.depot import Depot
from tba.loop import lockstep
from tba.policy import Policy
from tba.reading import read_settings
from tba.records import Prompt
from tba.settings import Settings
from tba.tasks.enumerable import Enumerable, log_target
from tba.trainer import Trainer
from tba.weights import Weights, check_monotone

SMALL = ["task.prompts=2", "task.symbols=3", "search.max_new_tokens=3", "architecture.positions=4",
         "trainer.groups_per_step=4", "trainer.warmup_steps=60"]
TASKS: dict[str, list[str]] = {
    "random": [*SMALL, "objective.beta=0.7"],
    "one_mode": [*SMALL, "task.kind=one_mode", "objective.beta=0.15"],
    "many_modes": [*SMALL, "task.kind=many_modes", "task.modes=8", "objective.beta=0.2"],
    "sparse": ["task.prompts=1", "task.symbols=20", "search.max_new_tokens=3", "architecture.positions=4",
               "task.kind=sparse", "objective.beta=0.1", "buffer.reuse=1", "policy.temperature=2",
               "trainer.groups_per_step=16"],
}
"""Overrides of the recipe `enumerable` by task."""
LONGER = {"sparse": 2}
"""How many times the steps of the other tasks: many of them pass before the reward is found."""
FED = {
    True: ["buffer.reuse=2", "buffer.mix={recent: 0.5, reward: 0.25, uniform: 0.25}", "buffer.reward_temperature=0.1"],
    False: ["buffer.reuse=1", "buffer.mix={recent: 1.0}", "buffer.max_uses=1", "buffer.dedup=none"],
}
"""Overrides with replay and without: there each trajectory is consumed once, in the step after it was sampled."""
LAGS = (0, 4, 15, 64)
POSTERIOR = {
    "trajectory_balance", "trajectory_balance_learned_z", "tba_prime", "kimi_k15", "reinforce", "rloo", "ppo_clip"
}
"""Objectives that have pi_ref exp(r / beta) as their optimum on policy."""
FOUND_SHARE = 0.5
"""A mode is found when it has at least this share of its probability under the exact target."""


class LateStore:
    """Hands out the publication `lag` before the newest; the first as long as there are not that many."""

    def __init__(self, lag: int) -> None:
        """`lag` is in publications."""
        self._kept: deque[Weights] = deque(maxlen=lag + 1)

    def publish(self, weights: Weights) -> None:
        """Makes `weights` the newest; ValueError if the version goes backwards."""
        check_monotone(self._kept[-1] if self._kept else None, weights)
        self._kept.append(weights)

    def latest(self) -> Weights:
        """The oldest publication kept; RuntimeError before the first."""
        if not self._kept:
            raise RuntimeError("no weights have been published yet; the trainer publishes before searchers ask.")
        return self._kept[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Every completion of one prompt, with what is known of each exactly."""

    pairs: list[tuple[tuple[int, ...], tuple[int, ...]]]
    reward: list[float]
    log_ref: list[float]
    modes: list[int]
    """Places of the rewarded ones; empty where every completion has its own reward."""


def list_completions(task: Enumerable, prompts: Sequence[Prompt], reference: Policy) -> list[Listing]:
    """One listing per prompt."""
    (stop,) = reference.stop_ids
    found = []
    for prompt in prompts:
        ids = task.completions(len(reference.tokenizer), stop)
        pairs = [(prompt.tokens, completion) for completion in ids]
        found.append(Listing(
            pairs=pairs, reward=[task.reward(prompt.id, completion) for completion in ids],
            log_ref=reference.sequence_logps(pairs),
            modes=[place for place, completion in enumerate(ids) if completion in task.modes(prompt.id)],
        ))
    return found


def own_optimum(objective: str, settings: Settings, listing: Listing, target: list[float]) -> list[float] | None:
    """Log-probs that the objective leads to on policy, where they can be written down."""
    if objective in POSTERIOR:
        return target
    if objective == "dr_grpo":
        size = settings.trainer.group_size
        return k3_optimum(listing, settings.objective.beta * size / (size - 1))  # baseline of the group holds the row
    return None


def k3_optimum(listing: Listing, beta: float) -> list[float]:
    """Log-probs at which E reward's gradient cancels that of k3 at every prefix, by recursion from the ends.

    On policy, the gradient of mean k3 at a prefix is that of KL(pi_ref || pi) over the next token. With Q the mean
    reward from a token on and V that from the prefix on, pi (Q - V) + beta (pi_ref - pi) is then zero:
    pi(a) = beta pi_ref(a) / (level - Q(a)), where the level, V + beta, makes them sum to 1.
    """
    leaf = {ids: (reward, math.exp(log_ref))
            for (_, ids), reward, log_ref in zip(listing.pairs, listing.reward, listing.log_ref, strict=True)}
    chance: dict[tuple[int, ...], float] = {}

    def value(prefix: tuple[int, ...], below: dict[tuple[int, ...], tuple[float, float]]) -> float:
        if prefix in below:
            return below[prefix][0]
        by_token: dict[int, dict[tuple[int, ...], tuple[float, float]]] = {}
        for ids, what in below.items():
            by_token.setdefault(ids[len(prefix)], {})[ids] = what
        ref = {token: math.fsum(p for _, p in part.values()) for token, part in by_token.items()}
        total = math.fsum(ref.values())
        q = {token: value((*prefix, token), part) for token, part in by_token.items()}
        low, high = max(q.values()), max(q.values()) + beta
        for _ in range(80):  # the sum falls as the level rises; at the highest Q plus beta it is at most 1
            level = (low + high) / 2
            over = math.fsum(beta * ref[a] / total / max(level - q[a], 1e-300) for a in q) > 1
            low, high = (level, high) if over else (low, level)
        for token in q:
            chance[(*prefix, token)] = beta * ref[token] / total / max(high - q[token], 1e-300)
        return math.fsum(chance[(*prefix, a)] * q[a] for a in q)

    value((), leaf)
    return [math.fsum(math.log(chance[ids[: at + 1]]) for at in range(len(ids))) for _, ids in listing.pairs]


def measure(policy: Policy, listings: Sequence[Listing], objective: str, settings: Settings) -> dict[str, Any]:
    """Exact figures of `policy`: means over prompts, and modes found of all there are."""
    rows: list[dict[str, float]] = []
    found = total = 0
    for listing in listings:
        log_policy = torch.tensor(policy.sequence_logps(listing.pairs), dtype=torch.float64)
        chance = log_policy.exp()
        target, _ = log_target(listing.log_ref, listing.reward, settings.objective.beta)
        own = own_optimum(objective, settings, listing, target)
        row = {
            "tv": _tv(chance, target), "kl": _kl(log_policy, target),
            "reward": float(chance @ torch.tensor(listing.reward, dtype=torch.float64)),
            "entropy": float(-(chance * log_policy).sum()),
        }
        if own is not None:
            row |= {"own_tv": _tv(chance, own), "own_kl": _kl(log_policy, own)}
        rows.append(row)
        total += len(listing.modes)
        found += sum(float(log_policy[at]) - target[at] >= math.log(FOUND_SHARE) for at in listing.modes)
    means = {key: math.fsum(row[key] for row in rows) / len(rows) for key in rows[0]}
    return {"own_tv": None, "own_kl": None, **means, "modes_found": found, "modes": total}


def _tv(chance: torch.Tensor, target: Sequence[float]) -> float:
    return 0.5 * float((chance - torch.tensor(target, dtype=torch.float64).exp()).abs().sum())


def _kl(log_policy: torch.Tensor, target: Sequence[float]) -> float:
    return float((log_policy.exp() * (log_policy - torch.tensor(target, dtype=torch.float64))).sum())


def settings_of(task: str, objective: str, lag: int, replay: bool, seed: int, steps: int) -> Settings:
    """The recipe `enumerable` with one publication a step."""
    return read_settings("enumerable", [
        *FED[replay], *TASKS[task], f"objective.name={objective}", f"seed={seed}", f"task.seed={seed}",
        f"trainer.steps={steps}", "trainer.sync_every=1", f"buffer.recent_age={lag + 1}",
        *(["objective.normalise=1"] if "normalise" in OBJECTIVES[objective].defaults else []),
    ])


def run(task: str, objective: str, lag: int, replay: bool, seed: int, steps: int) -> Found:
    """One run from the start policy to the last step, and how far from its target it ended."""
    started = time.perf_counter()
    settings = settings_of(task, objective, lag, replay, seed, steps)
    built = assembly.make_task_of(settings)
    if not isinstance(built, Enumerable):
        raise TypeError(f"task.name = {settings.task.name!r} cannot be listed; use the recipe enumerable.")
    policy = assembly.make_policy(settings, built)
    questions = assembly.make_questions(settings, built, policy)
    trainer = Trainer(policy.trainable_copy(), settings)
    searcher = assembly.make_searcher(settings, built, policy, "searcher-0")
    depot = Depot(questions.training, settings, lead=None)
    journey = lockstep(trainer, depot, searcher, LateStore(lag), settings.trainer)
    youngest = math.inf
    for number, step in enumerate(itertools.islice(journey, steps)):
        if number >= lag:
            youngest = min(youngest, *map(int, step[m.AGE_HISTOGRAM]))
    listings = list_completions(built, questions.training, policy)
    return {
        "task": task, "objective": objective, "lag": lag, "replay": replay, "seed": seed, "steps": steps,
        **measure(trainer.policy, listings, objective, settings), "youngest_age": youngest,
        "start_tv": measure(policy, listings, objective, settings)["tv"], "seconds": time.perf_counter() - started,
    }


def verdicts(found: Sequence[Found]) -> list[str]:
    """The two bars, over what was run: tv of trajectory balance with replay, and of REINFORCE on policy."""
    lines = []
    for (task, objective, replay, lag, steps), rows in grouped(found).items():
        if objective == "trajectory_balance" and replay:
            bar = 0.02
        elif objective == "reinforce" and not replay and lag == 0:
            bar = 0.03
        else:
            continue
        tv = mean(rows, "tv") or 0.0
        missed = sum(row["modes"] - row["modes_found"] for row in rows)
        verdict = "holds" if tv <= bar and not missed else "MISSED"
        lines.append(f"bar {bar}: {task} {objective} lag {lag}, {steps} steps, {len(rows)} seeds: "
                     f"tv {tv:.4f}, modes missed {missed}: {verdict}")
    return lines


def chosen_from(text: str, known: Sequence[str]) -> list[str]:
    """Names separated by commas; all that are known for `all`."""
    names = list(known) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: unknown; known: {', '.join(known)}.")
    return names


def main() -> None:
    """Runs what is asked for, prints the table, and writes JSON and the page of the docs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objectives", default="all")
    parser.add_argument("--tasks", default="all")
    parser.add_argument("--lags", default=",".join(map(str, LAGS)))
    parser.add_argument("--replay", default="all", help="on, off or all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", type=Path, help="folder of posterior.md and posterior.svg")
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="JSON of earlier runs, kept as they are")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found: list[Found] = [row for path in chosen.add for row in json.loads(path.read_text("utf-8"))]
    done = {(r["task"], r["objective"], r["lag"], r["replay"], r["seed"], r["steps"]) for r in found}
    for seed, objective, task, lag, replay in itertools.product(
        range(chosen.seeds), chosen_from(chosen.objectives, list(OBJECTIVES)), chosen_from(chosen.tasks, list(TASKS)),
        [int(lag) for lag in chosen.lags.split(",")], chosen_from(chosen.replay, ["on", "off"]),
    ):
        key = (task, objective, lag, replay == "on", seed, chosen.steps * LONGER.get(task, 1))
        if key in done:
            continue
        row = run(*key)
        found.append(row)
        print(f"{task} {objective} lag {lag} replay {replay} seed {seed}: tv {row['tv']:.4f} "
              f"reward {row['reward']:.3f} modes {row['modes_found']}/{row['modes']} "
              f"{row['seconds']:.1f} s", flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps(found, indent=1), "utf-8")
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1), "utf-8")
    print(table(found))
    for line in verdicts(found):
        print(line)
    if chosen.docs:
        page(found, chosen.docs)


if __name__ == "__main__":
    main()
