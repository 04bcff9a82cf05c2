"""Gold win-rate against KL to the reference: four objectives, four strengths of KL, data of age 0 and 15.

Each run is the package's own lockstep loop from the same language model, with a noisy proxy as reward; a gold scorer
of another family, which no training sees, judges what came of it (`movies.py`, `gold.py`). As in `posterior.py`, a lag
of L comes from a weight store that hands out the publication L versions before the newest: from step L on, every
trajectory is exactly L steps old when it is consumed. JSON is written after each run; `--add` of that file goes on.

    python benchmarks/movies.py my_movies
    python benchmarks/frontier.py my_movies --seeds 3 --json frontier.json --docs docs
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from frontier_page import Found, page, table, verdicts
from posterior import LateStore
from tba import assembly
from tba import metrics as m
from tba.depot import Depot
from tba.diversity import distinct_n
from tba.engines.protocol import Sampling
from tba.estimates import Z_95
from tba.leases import completion_seed
from tba.loop import lockstep
from tba.policy import Policy
from tba.preference_metrics import mean_with_error, perplexity, perplexity_diluted, sampled_kl, win_rate
from tba.reading import read_settings
from tba.records import Prompt
from tba.rewards.functions import Score
from tba.settings import Settings
from tba.tasks.preference import Preference
from tba.tasks.protocol import outcomes
from tba.trainer import Trainer

RECIPE = Path(__file__).with_name("frontier.yaml")
BETAS: dict[str, tuple[float, ...]] = {
    "trajectory_balance": (0.03, 0.06, 0.1, 0.3),
    "rloo": (0.03, 0.06, 0.1, 0.3),
    "online_dpo": (0.1, 0.3, 1.0, 3.0),
    "grpo": (0.01, 0.02, 0.03, 0.1),
}
"""Strengths of KL by objective, weakest first. What a beta means differs: compare at equal KL, not at equal beta."""
LAGS = (0, 15)
SAMPLES = 2
"""Completions of each held-out prompt."""
EVALUATION_SEED = 1_000_003
"""Of every run's evaluation, so that policies are compared with common random numbers."""


class Judge(Protocol):
    """What scores texts without having been trained against."""

    def scores(self, texts: Sequence[str]) -> list[float]:
        """One score per text."""
        ...


class Spread(Protocol):
    """What tells how far apart texts are."""

    def distance(self, texts: Sequence[str]) -> float:
        """Mean distance between two of the texts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run's place in the grid."""

    objective: str
    beta: float
    lag: int
    """Steps."""
    seed: int
    steps: int

    @property
    def key(self) -> tuple[str, float, int, int, int]:
        """What tells it from every other."""
        return self.objective, self.beta, self.lag, self.seed, self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A completion of a held-out prompt, and the human's."""

    prompt: str
    """Its id."""
    text: str
    """Of the completion alone."""
    length: int
    """Tokens, stop token included."""
    before: int
    """Tokens of the prompt."""
    has_ended: bool
    """By itself."""
    logp: float
    """Under the policy, nats."""
    ref_logp: float
    """Under the reference, nats."""
    proxy: float
    """Reward that training sees."""
    gold: float
    human_proxy: float
    """Of the human's text."""
    human_gold: float


# ---- figures ------------------------------------------------------------------------------------------


def figures(said: Sequence[Said], spread: Spread) -> dict[str, Any]:
    """What a run is judged by; intervals and errors take the completions of one prompt as one draw."""
    owners = [s.prompt for s in said]
    won = win_rate([s.gold for s in said], [s.human_gold for s in said])
    error = mean_with_error([float(s.gold > s.human_gold) for s in said], owners).error
    kl = sampled_kl([s.logp for s in said], [s.ref_logp for s in said], owners)
    words = [s.text.lower().split() for s in said]
    by_prompt = [[s.text for s in group] for _, group in itertools.groupby(said, key=lambda s: s.prompt)]
    logps, lengths = [s.ref_logp for s in said], [s.length for s in said]
    proxy, gold = standardised(said, "proxy"), standardised(said, "gold")
    return {
        "win_rate": won.rate, "win_low": won.rate - Z_95 * error, "win_high": won.rate + Z_95 * error,
        "ties": won.ties, "judged": won.wins + won.ties + won.losses,
        "proxy_win_rate": win_rate([s.proxy for s in said], [s.human_proxy for s in said]).rate,
        "kl": kl.value, "kl_error": kl.error,
        "perplexity": perplexity(logps, lengths),
        "perplexity_diluted": perplexity_diluted(logps, lengths, [s.before for s in said]),
        "proxy_z": proxy, "gold_z": gold, "gap": proxy - gold,
        "distinct_1": distinct_n(words, 1), "distinct_2": distinct_n(words, 2),
        "embedding": _mean([spread.distance(texts) for texts in by_prompt]),
        "length": _mean(lengths), "ended": _mean([float(s.has_ended) for s in said]),
    }


def standardised(said: Sequence[Said], score: str) -> float:
    """Mean of a score above the humans' mean, in standard deviations of the humans' scores."""
    human = list({s.prompt: getattr(s, f"human_{score}") for s in said}.values())
    middle = _mean(human)
    deviation = math.sqrt(_mean([(h - middle) ** 2 for h in human]))
    return (_mean([getattr(s, score) for s in said]) - middle) / deviation


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def listen(
    policy: Policy, reference: Policy, task: Preference, prompts: Sequence[Prompt], settings: Settings, gold: Judge
) -> list[Said]:
    """Samples and scores SAMPLES completions of each prompt, those of a prompt one after another."""
    engine = assembly.make_engine(settings, policy.frozen_copy())
    sampling = Sampling(max_new_tokens=settings.search.max_new_tokens, temperature=policy.temperature)
    found: list[Said] = []
    for at in range(0, len(prompts), 64):
        part = prompts[at : at + 64]
        seeds = [completion_seed(EVALUATION_SEED, prompt.id, "frontier") for prompt in part]
        made = engine.generate(part, num_samples=SAMPLES, sampling=sampling, seeds=seeds)
        rows = [(prompt, c) for prompt, completions in zip(part, made, strict=True) for c in completions]
        ref_logps = reference.sequence_logps([(prompt.tokens, c.tokens) for prompt, c in rows])
        golds = gold.scores([prompt.text + c.text for prompt, c in rows])
        human_golds = gold.scores([prompt.text + str(task.reference(prompt)) for prompt, _ in rows])
        for (prompt, c), ref_logp, own, human in zip(rows, ref_logps, golds, human_golds, strict=True):
            wrote = dataclasses.replace(c, text=str(task.reference(prompt)), finish="stop")
            proxy, human_proxy = (_reward(outcomes(task, prompt, [one])[0]) for one in (c, wrote))
            found.append(Said(
                prompt=prompt.id, text=c.text, length=len(c.tokens), before=len(prompt.tokens),
                has_ended=c.finish == "stop", logp=c.logp, ref_logp=ref_logp, proxy=proxy, gold=own,
                human_proxy=human_proxy, human_gold=human,
            ))
    return found


def _reward(outcome: Any) -> float:
    if not isinstance(outcome, Score):
        raise RuntimeError(f"the proxy gave no score: {outcome}; every completion of this experiment has one.")
    return outcome.reward


# ---- runs ---------------------------------------------------------------------------------------------


def settings_of(cell: Cell, folder: Path) -> Settings:
    """The recipe with the models and data of `folder`."""
    return read_settings(str(RECIPE), [
        f"model={folder / 'language' / 'final'}", f"task.path={folder / 'prompts.jsonl'}",
        f"task.held_out_path={folder / 'held_out.jsonl'}",
        f"task.rewards=[{{model: {json.dumps(str(folder / 'proxy' / 'final'))}, without_eos: -1.0}}]",
        f"objective.name={cell.objective}", f"objective.beta={cell.beta:g}", f"seed={cell.seed}",
        f"trainer.steps={max(1, cell.steps)}", f"buffer.recent_age={cell.lag + 1}",
    ])


def run(cell: Cell, folder: Path, gold: Judge, spread: Spread, prompts: int | None = None) -> Found:
    """One run from the language model to the last step, and how it is judged on the first `prompts` held-out ones."""
    settings = settings_of(cell, folder)
    task = assembly.make_task_of(settings)
    if not isinstance(task, Preference):
        raise TypeError(f"task.name = {settings.task.name!r} compares with no humans; use preference.")
    policy = assembly.make_policy(settings, task)
    questions = assembly.make_questions(settings, task, policy)
    trainer = Trainer(policy.trainable_copy(), settings)
    searcher = assembly.make_searcher(settings, task, policy, "searcher-0")
    depot = Depot(questions.training, settings, lead=None)
    started = time.perf_counter()
    ages: list[float] = []
    youngest = math.inf
    for step in itertools.islice(
        lockstep(trainer, depot, searcher, LateStore(cell.lag), settings.trainer), cell.steps
    ):
        ages.append(step[m.AGE_MEAN])
        if len(ages) > cell.lag:
            youngest = min(youngest, *map(int, step[m.AGE_HISTOGRAM]))
    trained = time.perf_counter()
    said = listen(trainer.policy, policy.frozen_copy(), task, questions.held_out[:prompts], settings, gold)
    task.close()
    return {
        **dataclasses.asdict(cell), **figures(said, spread), "age": _mean(ages) if ages else None,
        "youngest_age": None if math.isinf(youngest) else youngest, "seconds": trained - started,
        "evaluation_seconds": time.perf_counter() - trained,
    }


def cells(
    objectives: Sequence[str], strengths: Sequence[int], lags: Sequence[int], seeds: int, steps: int
) -> list[Cell]:
    """The grid, a whole seed before the next, the two ages of a cell one after another."""
    return [
        Cell(objective=name, beta=BETAS[name][place], lag=lag, seed=seed, steps=steps)
        for seed, place, name, lag in itertools.product(range(seeds), strengths, objectives, lags)
    ]


def write(found: Sequence[Found], path: Path) -> None:
    """Replaces the file, whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", "utf-8")
    partial.replace(path)


def judges(folder: Path) -> tuple[Judge, Spread, float]:
    """Gold scorer, embedding of the human texts, and the gold scorer's correlation with held-out ratings."""
    import gold

    judge, rows = gold.gold_of(folder), gold.read(folder / "held_out.jsonl")
    human = [row["prompt"] + row["human"] for row in gold.read(folder / "language.jsonl")]
    return judge, gold.Embedding(human), gold.agreement(judge, rows)


def main(arguments: Sequence[str] | None = None, run: Callable[..., Found] = run) -> None:
    """Runs what is asked for and is not there yet, prints table and verdicts, and writes JSON and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what movies.py made")
    parser.add_argument("--objectives", nargs="*", default=list(BETAS), choices=list(BETAS))
    parser.add_argument("--strengths", type=int, nargs="*", default=[0, 1, 2, 3], choices=range(4),
                        help="places in BETAS, weakest KL first")
    parser.add_argument("--lags", type=int, nargs="*", default=list(LAGS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--prompts", type=int, help="held-out prompts used; all if left out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="JSON of earlier runs, kept as they are")
    parser.add_argument("--docs", type=Path, help="folder of frontier.md and frontier.svg")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: list[Found] = [row for path in chosen.add for row in json.loads(path.read_text("utf-8"))]
    done = {tuple(row[field.name] for field in dataclasses.fields(Cell)) for row in found}
    start = Cell(objective="none", beta=1.0, lag=0, seed=0, steps=0)
    wanted = cells(chosen.objectives, chosen.strengths, chosen.lags, chosen.seeds, chosen.steps)
    missing = [cell for cell in (start, *wanted) if cell.key not in done]
    if missing:
        gold, spread, correlation = judges(chosen.folder)
        print(f"the gold scorer's correlation with held-out ratings: {correlation:.3f}", flush=True)
    for cell in missing:
        as_run = dataclasses.replace(cell, objective="trajectory_balance") if cell == start else cell
        row = {**run(as_run, chosen.folder, gold, spread, chosen.prompts), "objective": cell.objective}
        found.append(row)
        print(f"{cell.objective} beta {cell.beta:g} lag {cell.lag} seed {cell.seed}: gold win-rate "
              f"{row['win_rate']:.3f} kl {row['kl']:.2f} gap {row['gap']:.2f} {row['seconds']:.0f} s", flush=True)
        if chosen.json:
            write(found, chosen.json)
    print(table(found))
    for line in verdicts(found):
        print(line)
    if chosen.docs:
        page(found, chosen.docs)


if __name__ == "__main__":
    main()
