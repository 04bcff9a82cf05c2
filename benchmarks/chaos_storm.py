"""A run whose searchers are killed, whose scorers fail and whose nodes come and go, beside calm ones."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_processes import AGENTS, AGENTS_GONE_S, Places, Watch, titled, watched
from chaos_runs import LIMIT_S, Started, last_step, ledger_faults, log_faults, reaches
from tba.reading import read_settings

REWARDS = Path(__file__).with_name("chaos_reward.py")
KILL_EVERY_S = {"enumerable": (5.0, 15.0), "arithmetic": (30.0, 60.0)}
GONE_S = 20.0
OF_CLUSTER = ("ray::IDLE", "raylet", "gcs_server", "ray/", "ray-core", "log_monitor", *AGENTS)
"""Titles of what belongs to the cluster that the run has joined."""
STEPS = 10**6
MIB = 2**20
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Student's t by the number of calm runs, two-sided."""
COMMON = ["task.name=custom", "mode=async", "async.threads=1", "search.score_limit_s=1", "evaluation.every=0",
          "trainer.schedule=constant", "trainer.record_every=0", "evaluation.prompts=4", "evaluation.samples=4"]
KIND = {
    "enumerable": ["engine.name=table", "search.searchers=3", "trainer.learning_rate=0.02", "objective.beta=0.7",
                   "buffer.capacity=4000", "checkpoint.every=1600"],
    "arithmetic": ["engine.name=transformers", "search.searchers=2", "checkpoint.every=100"],
}
PLACES = [f"resources.{who}.cpus=1.25" for who in ("trainer", "depot", "evaluator")]
"""These fit the head alone, so that the other nodes have searchers only."""


@dataclass(slots=True)
class Prepared:
    """What all runs of one kind share."""

    kind: str
    folder: Path
    words: list[str]
    metric: str
    start: list[str] = field(default_factory=list[str])
    """Overrides of the built-in recipe that give the start policy."""

    def train(self, weather: str, run: Path, *more: str) -> list[str]:
        """The command."""
        reward = f"task.reward={REWARDS}:{weather}_{self.kind}"
        return ["train", self.kind, *self.words, reward, *more, "--run", str(run), "--json"]

    def quality(self, run: Path) -> float:
        """The figure of a run's final model, on the built-in task, whose scorer has no faults."""
        from tba import jobs

        subject = read_settings(self.kind, [f"model={run / 'final'}", "mode=lockstep"])
        start = read_settings(self.kind, [*self.start, "mode=lockstep"])
        return float(jobs.evaluate(subject, start)[self.metric])


def prepare(kind: str, folder: Path) -> Prepared:
    """The built-in task's prompts as a custom task's files, and the start policy where it is made from scratch."""
    from tba import assembly

    settings = read_settings(kind)
    task = assembly.make_task_of(settings)
    policy = assembly.make_policy(settings, task)
    questions = assembly.make_questions(settings, task, policy)
    files = [folder / "prompts.jsonl", folder / "held_out.jsonl"]
    for file, prompts in zip(files, (questions.training, questions.held_out), strict=True):
        rows = ({"id": p.id, "prompt": p.text, **p.columns} for p in prompts)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*COMMON, *KIND[kind], f"task.path={files[0]}", f"task.held_out_path={files[1]}"]
    if kind != "enumerable":
        return Prepared(kind, folder, words, "pass@1")
    policy.save(folder / "model")
    return Prepared(kind, folder, [*words, f"model={folder / 'model'}"], "tv", [f"model={folder / 'model'}"])


def make_cluster(temporary: Path) -> Any:
    """A head for trainer, depot and evaluator, and two nodes for searchers."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": 150 * MIB, "temp_dir": str(temporary)}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    return cluster, [add_node(cluster) for _ in range(2)]


def add_node(cluster: Any) -> Any:
    """Room for two searchers."""
    return cluster.add_node(num_cpus=2, object_store_memory=80 * MIB)


def blow(prepared: Prepared, started: Started, run: Path, cluster: Any, nodes: list[Any], minutes: float) -> Any:
    """Kills searchers until the run ends, and exchanges a node half-way; what was done."""
    rng = random.Random(f"storm {prepared.kind}")
    begun, done = time.monotonic(), {"killed": 0, "found_none": 0, "removed": 0, "added": 0}
    while not started.is_over:
        try:
            started.process.wait(rng.uniform(*KILL_EVERY_S[prepared.kind]))
            break
        except subprocess.TimeoutExpired:
            pass
        spent = (time.monotonic() - begun) / 60 / minutes
        if spent > 1:
            break
        victims = titled(os.getpid(), "ray::SearcherProcess")
        done["killed" if victims else "found_none"] += 1
        if victims:
            os.kill(rng.choice(victims), signal.SIGKILL)
        if spent > 0.4 and not done["removed"]:
            cluster.remove_node(nodes[0], allow_graceful=False)
            done["removed"] += 1
        elif spent > 0.6 and not done["added"]:
            add_node(cluster)
            done["added"] += 1
        print(f"storm {60 * spent * minutes:.0f} s: step {last_step(run)}, {done}", file=sys.stderr, flush=True)
    return {**done, "minutes": (time.monotonic() - begun) / 60}


FREE = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
held = {k: v - ray.available_resources().get(k, 0) for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}
print(json.dumps({k: v for k, v in held.items() if v}))
"""


def still_held(address: str, environment: dict[str, str]) -> str:
    """What actors still hold of a cluster."""
    asked = subprocess.run([sys.executable, "-c", FREE, address], capture_output=True, text=True, timeout=LIMIT_S,
                           env=environment, check=True)
    return asked.stdout.splitlines()[-1]


def storm(prepared: Prepared, minutes: float, places: Places, watch: Watch) -> dict[str, Any]:
    """The run in the storm, and what is left of it on the cluster and after the cluster."""
    run, faults = prepared.folder / "storm", []
    cluster, nodes = make_cluster(places.folder / "r")
    try:
        words = [f"ray.address={cluster.address}", f"trainer.max_minutes={minutes}", f"trainer.steps={STEPS}", *PLACES]
        said = prepared.folder / "said-storm"
        started = Started(prepared.train("storm", run, *words), said, places.environment)
        if not reaches(started, run, 1):
            raise RuntimeError(f"the run in the storm has not begun: {started.errors[-2000:]}")
        done = blow(prepared, started, run, cluster, nodes, minutes)
        code, ended = started.wait(), time.monotonic()
        if left := watch.left_after(GONE_S, but=OF_CLUSTER):
            faults.append(f"{GONE_S:g} s after the run these run: {left}")
        if (held := still_held(cluster.address, places.environment)) != "{}":
            faults.append(f"actors hold {held} after the run")
        faults += [f"left: {path}" for path in places.left() if not path.endswith("/r")]
    finally:
        cluster.shutdown()
    if left := watch.left_after(GONE_S, but=AGENTS) or watch.left_after(AGENTS_GONE_S):
        faults.append(f"{AGENTS_GONE_S:g} s after the cluster these run: {left}")
    summary = started.summary()
    if code != 0:
        return {**done, "faults": [*faults, f"exit {code}: {started.errors[-600:]!r}"], "steps": last_step(run)}
    faults += [*ledger_faults(summary["ledger"]), *log_faults(run, summary["steps"])]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    unscored = [line["search/unscored"] for line in steps if "search/unscored" in line][-1]
    return {**done, "faults": faults, "steps": summary["steps"], "value": prepared.quality(run), "unscored": unscored,
            "prompts": summary["ledger"]["prompts"], "delivered": summary["ledger"]["trajectories"]["delivered"],
            "rejected": summary["ledger"]["trajectories"]["rejected"], "ended": ended,
            "deaths": started.errors.count(" died (")}


def calm(prepared: Prepared, steps: int, seed: int, places: Places) -> float:
    """The figure of a run of as many steps that nothing disturbs."""
    run = prepared.folder / f"calm-{seed}"
    words = prepared.train("calm", run, f"trainer.steps={steps}", f"seed={seed}")
    started = Started(words, prepared.folder / f"said-calm-{seed}", places.environment)
    code = started.wait()
    if code != 0:
        raise RuntimeError(f"a calm run ended with {code}: {started.errors[-600:]}")
    return prepared.quality(run)


def measure(kind: str, minutes: float, *, seeds: int, folder: Path) -> dict[str, Any]:
    """The storm, calm runs of `seeds` seeds, and whether the one is within the noise of the others."""
    places = Places()
    prepared = prepare(kind, folder)
    try:
        with watched() as watch:
            found = storm(prepared, minutes, places, watch)
        values: list[float] = []
        for seed in range(seeds if "value" in found else 0):
            values.append(calm(prepared, found["steps"], seed, places))
            print(f"calm {seed}: {prepared.metric} {values[-1]:.4f}", file=sys.stderr, flush=True)
    finally:
        places.remove()
    faults = found["faults"]
    if len(values) > 1:
        middle, spread = statistics.mean(values), statistics.stdev(values)
        noise = T_95[len(values)] * spread * math.sqrt(1 + 1 / len(values))
        found |= {"calm_mean": middle, "noise": noise}
        worse = found["value"] - middle if prepared.metric == "tv" else middle - found["value"]
        if worse > noise:
            faults.append(
                f"{prepared.metric} {found['value']:.4f} is worse than calm {middle:.4f} by more than {noise:.4f}"
            )
    found.pop("ended", None)
    return {"part": f"storm {kind}", "metric": prepared.metric, "calm": values, "holds": not faults, **found}
