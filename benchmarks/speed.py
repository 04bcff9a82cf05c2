"""Async against each of its sides alone, and against lockstep: medians and ratios of interleaved runs.

Two busy processes slow each other down, on some machines by a quarter; what that leaves is measured too, with a
searcher and a trainer that know nothing of each other. Each side alone works on a policy that stays where it is,
and so does the async run beside them: their learning rate is so small that every measurement sees the same work.
Async against lockstep are runs that learn.

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
from pathlib import Path

WITHOUT = ["evaluation.every=0", "checkpoint.every=0"]
STILL = [*WITHOUT, "trainer.learning_rate=1e-12", "evaluation.prompts=8", "evaluation.samples=1"]
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


def train(mode: str, recipe: str, overrides: list[str], folder: str) -> Path:
    """A finished run in `mode`, in a process of its own; returns its directory."""
    where = Path(folder) / "run"
    finish([sys.executable, "-m", "tba", "train", recipe, f"mode={mode}", *overrides, "--run", str(where)])
    return where


def still(recipe: str, overrides: list[str], steps: int) -> tuple[float, float]:
    """Steps per second of an async run after its first steps, and the share of that time that the trainer waited."""
    with tempfile.TemporaryDirectory() as folder:
        where = train("async", recipe, [*STILL, f"trainer.steps={steps + WARM_STEPS}", *overrides], folder)
        lines = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    counted = [line for line in lines if "step" in line][WARM_STEPS - 1 :]
    seconds = counted[-1]["wall_s"] - counted[0]["wall_s"]
    return (len(counted) - 1) / seconds, sum(line["train/wait_s"] for line in counted[1:]) / seconds


def learning(mode: str, recipe: str, overrides: list[str]) -> dict[str, float]:
    """Steps per second of a whole run as the recipe has it, its final pass@1, and the share that the trainer waited."""
    with tempfile.TemporaryDirectory() as folder:
        where = train(mode, recipe, [*WITHOUT, *overrides], folder)
        summary = json.loads((where / "summary.json").read_text())
    return {
        "steps_per_s": summary["steps"] / summary["wall_s"], "pass@1": summary["final"]["pass@1"],
        "wait_share": summary["trainer"]["wait_share"],
    }


def in_process(side: str, recipe: str, overrides: list[str], steps: int) -> float:
    """`alone` in a process of its own."""
    command = [sys.executable, __file__, "--alone", side, "--recipe", recipe, "--steps", str(steps), *overrides]
    return float(finish(command, OMP_NUM_THREADS="1").split()[-1])


def unconnected(recipe: str, overrides: list[str], steps: int) -> float:
    """Steps per second of the trainer alone while a searcher, of which it knows nothing, has the other core."""
    command = [sys.executable, __file__, "--alone", "searcher", "--recipe", recipe, "--steps", str(100 * steps),
               *overrides]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}) as other:
        try:
            return in_process("trainer", recipe, overrides, steps)
        finally:
            other.kill()


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
    figures = measure(chosen.rounds, recipe, overrides, steps)
    print(f"{'median of ' + str(chosen.rounds) + ' rounds':56} {'min':>7} {'median':>7} {'max':>7}")
    for name, values in figures.items():
        print(f"{name:56} {min(values):7.3f} {statistics.median(values):7.3f} {max(values):7.3f}", flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1))


def measure(rounds: int, recipe: str, overrides: list[str], steps: int) -> dict[str, list[float]]:
    """The figures by name, one value a round; each round runs everything once, in turn."""
    figures: dict[str, list[float]] = {}

    def note(name: str, value: float) -> float:
        figures.setdefault(name, []).append(value)
        return value

    for number in range(rounds):
        trainer = note("trainer alone, steps/s", in_process("trainer", recipe, overrides, steps))
        beside_it = note("trainer beside an unconnected searcher, steps/s", unconnected(recipe, overrides, steps))
        rate, wait = still(recipe, overrides, steps)
        searcher = note("searcher alone, steps/s", in_process("searcher", recipe, overrides, steps))
        note("async still, steps/s", rate)
        note("async still over slower side", rate / min(trainer, searcher))
        note("async still over trainer beside an unconnected searcher", rate / beside_it)
        note("async still, trainer waits", wait)
        beside = learning("async", recipe, overrides)
        alone_ = learning("lockstep", recipe, overrides)
        note("async learning, steps/s", beside["steps_per_s"])
        note("lockstep learning, steps/s", alone_["steps_per_s"])
        note("async over lockstep", beside["steps_per_s"] / alone_["steps_per_s"])
        note("async pass@1", beside["pass@1"])
        note("lockstep pass@1", alone_["pass@1"])
        note("async learning, trainer waits", beside["wait_share"])
        print(f"round {number + 1}: " + ", ".join(f"{name} {values[-1]:.3f}" for name, values in figures.items()),
              flush=True)
    return figures


if __name__ == "__main__":
    main()
