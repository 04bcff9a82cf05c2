"""Async against each of its sides alone, and against lockstep: medians and ratios of interleaved runs.

Each side alone works on a policy that stays where it is, and so does the async run beside them: their learning
rate is so small that every measurement sees the same work. Async against lockstep are runs that learn.

    python benchmarks/speed.py --rounds 5 --json speed.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

STILL = ["trainer.learning_rate=1e-12", "evaluation.prompts=8", "evaluation.samples=1", "evaluation.every=0",
         "checkpoint.every=0"]
WARM_STEPS = 20
"""Steps at the start of a run that are not counted."""


def alone(side: str, recipe: str, overrides: list[str], steps: int) -> float:
    """Steps per second that one side could sustain by itself on one thread, in this process."""
    import torch

    torch.set_num_threads(1)
    from tba import assembly
    from tba.batch import collate
    from tba.depot import Depot
    from tba.reading import read_settings
    from tba.trainer import Trainer

    settings = read_settings(recipe, [*STILL, *overrides])
    task = assembly.make_task_of(settings)
    policy = assembly.make_policy(settings, task)
    questions = assembly.make_questions(settings, task, policy)
    searcher = assembly.make_searcher(settings, task, policy, "searcher-0")
    trainer = Trainer(policy.trainable_copy(), settings)
    depot = Depot(questions.training, settings, lead=None)
    searcher.adopt(trainer.publish(0))
    batch = settings.search.batch_prompts
    prompts_per_step = settings.prompts_per_round / settings.trainer.sync_every
    if side == "searcher":
        list(searcher.search(depot.leases.take(batch)))
        rounds = max(1, round(steps * prompts_per_step / batch))
        started = time.perf_counter()
        for _ in range(rounds):
            list(searcher.search(depot.leases.take(batch)))
        return rounds * batch / prompts_per_step / (time.perf_counter() - started)
    for _ in range(12):
        for group in searcher.search(depot.leases.take(batch)):
            depot.deliver(group)
    draws = [depot.draw(0)[0] for _ in range(10)]
    for timed in (False, True):
        started = time.perf_counter()
        for number in range(steps if timed else WARM_STEPS):
            fed = draws[number % len(draws)]
            trainer.step(collate(fed, max_tokens=settings.trainer.micro_batch_tokens))
    return steps / (time.perf_counter() - started)


def run(mode: str, recipe: str, overrides: list[str], steps: int) -> tuple[float, float]:
    """Steps per second of a run after its first steps, and the share of that time that the trainer waited."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "run"
        command = [sys.executable, "-m", "tba", "train", recipe, f"mode={mode}", f"trainer.steps={steps + WARM_STEPS}",
                   *STILL, *overrides, "--run", str(where)]
        finish(command)
        lines = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    counted = [line for line in lines if "step" in line][WARM_STEPS - 1 :]
    seconds = counted[-1]["wall_s"] - counted[0]["wall_s"]
    return (len(counted) - 1) / seconds, sum(line["train/wait_s"] for line in counted[1:]) / seconds


def in_process(side: str, recipe: str, overrides: list[str], steps: int) -> float:
    """`alone` in a process of its own."""
    command = [sys.executable, __file__, "--alone", side, "--recipe", recipe, "--steps", str(steps), *overrides]
    return float(finish(command, OMP_NUM_THREADS="1").split()[-1])


def finish(command: list[str], **environment: str) -> str:
    """What a command prints; with what it says if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def main() -> None:
    """Prints the table, and writes the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="arithmetic")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", choices=("trainer", "searcher"))
    parser.add_argument("overrides", nargs="*")
    chosen = parser.parse_args()
    recipe, overrides, steps = chosen.recipe, chosen.overrides, chosen.steps
    if chosen.alone:
        print(alone(chosen.alone, recipe, overrides, steps))
        return
    waits: list[float] = []

    def run_async() -> float:
        rate, wait = run("async", recipe, overrides, steps)
        waits.append(wait)
        return rate

    measures: dict[str, Callable[[], float]] = {
        "trainer alone": lambda: in_process("trainer", recipe, overrides, steps),
        "async": run_async,
        "searcher alone": lambda: in_process("searcher", recipe, overrides, steps),
        "lockstep": lambda: run("lockstep", recipe, overrides, steps)[0],
    }
    rates: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(chosen.rounds):
        for name, measure in measures.items():
            rates[name].append(measure())
        newest = ", ".join(f"{name} {rate[-1]:.2f}" for name, rate in rates.items())
        print(f"round {number + 1}: {newest} steps/s", flush=True)
    slower = [min(a, b) for a, b in zip(rates["trainer alone"], rates["searcher alone"], strict=True)]
    over_slower = [a / b for a, b in zip(rates["async"], slower, strict=True)]
    over_lockstep = [a / b for a, b in zip(rates["async"], rates["lockstep"], strict=True)]
    figures = {
        "rates_steps_per_s": rates,
        "async_over_slower_side": over_slower, "async_over_lockstep": over_lockstep, "trainer_wait_share": waits,
    }
    print(f"{'median of ' + str(chosen.rounds) + ' rounds':28} {'min':>7} {'median':>7} {'max':>7}")
    for name, values in [*rates.items(), *list(figures.items())[1:]]:
        print(f"{name:28} {min(values):7.3f} {statistics.median(values):7.3f} {max(values):7.3f}")
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
