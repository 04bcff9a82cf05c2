"""Completions per second by the number of searchers, on a simulated clock, until a real part saturates.

Searchers deliver made-up groups of 8 completions x 128 tokens, each at its rate give or take a tenth; the depot and
the trainer do their real work, messages packed and unpacked, at the processor time it takes in this process
(`time.process_time`: both compute on one thread, and other work on the machine does not count). Each row is the median
of --rounds rounds.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py --json docs/scaling_measured.json --page docs
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import scaling_page
from tba import assembly
from tba.batch import collate
from tba.depot import Depot
from tba.policy import Policy, load_policy
from tba.reading import check_settings
from tba.records import Completion, Group, Lease, Prompt, Trajectory
from tba.settings import Settings
from tba.simulation import Costs, Measured, Simulation
from tba.weights import Weights

SIZE, TOKENS = 8, 128
"""Completions of a group, and tokens of each: the most that the bar asks for."""
PROMPTS, PROMPT_TOKENS = 2000, 16
LETTERS = "abcdefghijklmnopqrstuvwxyz"
FIRST_ID = 3
"""Of a letter; pad, BOS and stop come before."""
CAPACITY = 20_000
"""Trajectories in the buffer, which is full from the start, so that each addition evicts."""
GROUPS_PER_STEP, SYNC_EVERY, BATCH_PROMPTS = 8, 2, 4
SPREAD = 0.1
"""A search takes its time give or take this share, evenly."""
LEAST_S, SEARCHES, WARM_SEARCHES = 2.5, 60, 5
"""A measurement lasts so many simulated seconds, and searches; before it, each searcher has searched so often."""


@dataclass(frozen=True)
class Setting:
    """What is varied beside the number of searchers."""

    name: str
    rate: float
    """Groups per second that a searcher delivers when it waits for nobody."""
    lead: int | None


SETTINGS = (
    Setting("free", 10, None), Setting("free, fast searchers", 80, None), Setting("lead 4", 10, 4),
)
CARRIED_GROUPS = 640
"""Groups per second of the bar: 64 searchers at 10 each."""
CARRIED_STEPS = (8, 64)
"""Groups of a step where all of them are drawn beside."""


class Prepared:
    """A searcher whose completions cost nothing to make: random ids, as if sampled with the weights it was given."""

    def __init__(self, name: str, seed: int) -> None:
        """`name` is the searcher's."""
        self.name = name
        self._rng = np.random.default_rng(seed)
        self._version, self._digest = 0, ""

    def adopt(self, weights: Weights) -> None:
        """See `Searcher.adopt`."""
        self._version, self._digest = weights.version, weights.digest

    def search(self, leases: Sequence[Lease], *, run_attempt: int = 0) -> Iterator[Group]:
        """See `Searcher.search`."""
        shape = (len(leases), SIZE, TOKENS)
        ids = self._rng.integers(FIRST_ID, FIRST_ID + len(LETTERS), shape).tolist()
        logps = self._rng.normal(-1.0, 0.3, shape).astype(np.float32).tolist()
        rewards = self._rng.normal(size=shape[:2]).tolist()
        for lease, ids_KT, logps_KT, reward_K in zip(leases, ids, logps, rewards, strict=True):
            made = tuple(
                Trajectory(prompt_id=lease.prompt.id, reward=reward, ref_logp=-float(TOKENS), completion=Completion(
                    tokens=tuple(tokens), text="", logps=tuple(logp), version=self._version, finish="length"))
                for tokens, logp, reward in zip(ids_KT, logps_KT, reward_K, strict=True)
            )
            yield Group(prompt=lease.prompt, trajectories=made, version=self._version, digest=self._digest,
                        number=lease.number, attempt=lease.attempt, searcher=self.name, run_attempt=run_attempt)


class Paced:
    """Costs as they are measured, but for searching, which takes `search_s` give or take `SPREAD`."""

    def __init__(self, measured: Costs, search_s: float, seed: int) -> None:
        """`search_s` in seconds; `measured` is asked for every other call."""
        self._measured, self._search_s, self._random = measured, search_s, random.Random(seed)

    def __call__(self, name: str, work: Callable[[], Any]) -> tuple[Any, float]:
        """See `Costs`."""
        if name == "load":
            return work(), 0.0
        if name == "search":
            return work(), self._search_s * self._random.uniform(1 - SPREAD, 1 + SPREAD)
        return self._measured(name, work)


def settings_of(searchers: int, lead: int | None, groups_per_step: int = GROUPS_PER_STEP) -> Settings:
    """A tiny Llama, trajectory balance, a mixture of three samplers."""
    return check_settings({
        "mode": "async", "model": "new-llama",
        "architecture": {"layers": 1, "width": 32, "heads": 2, "positions": PROMPT_TOKENS + TOKENS},
        "search": {"searchers": searchers, "num_samples": SIZE, "batch_prompts": BATCH_PROMPTS,
                   "max_new_tokens": TOKENS},
        "buffer": {"capacity": CAPACITY, "mix": {"recent": 0.5, "reward": 0.25, "uniform": 0.25}},
        "trainer": {"steps": 10**6, "groups_per_step": groups_per_step, "group_size": SIZE, "sync_every": SYNC_EVERY},
        "async": {"lead": lead},
    })


def prompts() -> list[Prompt]:
    """Prompts of random letters."""
    ids = np.random.default_rng(0).integers(FIRST_ID, FIRST_ID + len(LETTERS), (PROMPTS, PROMPT_TOKENS)).tolist()
    return [Prompt(id=f"p{number}", tokens=tuple(row), text="") for number, row in enumerate(ids)]


def start_policy(settings: Settings) -> Policy:
    """The model that is trained."""
    return load_policy(
        settings.model, architecture=settings.architecture, characters=LETTERS, seed=settings.seed,
        temperature=settings.policy.temperature,
    )


def fill(depot: Depot, asked: Sequence[Prompt]) -> None:
    """Fills the buffer with groups that no lease asked for."""
    source = Prepared("before", 1)
    while len(depot.buffer) < CAPACITY:
        number = len(depot.buffer) // SIZE
        lease = Lease(prompt=asked[number % len(asked)], visit=0, attempt=0, number=number, round=0)
        depot.buffer.add(next(source.search([lease])))


def measure(setting: Setting, searchers: int, seed: int) -> dict[str, Any]:
    """One simulation: what was completed, and who was at work, after a start that is not counted."""
    settings, asked = settings_of(searchers, setting.lead), prompts()
    policy = start_policy(settings)
    questions = assembly.Questions(task=assembly.make_task_of(settings), training=asked, held_out=())
    search_s = BATCH_PROMPTS / setting.rate
    costs = Paced(Measured(time.process_time), search_s, seed)
    simulated = Simulation(
        settings, questions, policy, costs, packs=True,
        searchers=[Prepared(f"searcher-{number}", 1000 * seed + number) for number in range(searchers)],
    )
    fill(simulated.depot, asked)
    warm_s = WARM_SEARCHES * search_s
    end_s = warm_s + max(LEAST_S, SEARCHES * search_s / searchers)
    marks: list[tuple[float, dict[str, float]]] = []
    counts, seconds = Counter[str](), defaultdict[str, float](float)
    for call in simulated.calls():
        if not marks and simulated.now >= warm_s:
            marks.append((simulated.now, simulated.busy()))
        elif marks and not call.name.startswith(("load", "search")):
            counts[call.name] += 1
            seconds[call.name] += call.ended - call.started
            counts["completions"] += SIZE * len(call.result) if call.name == "deliver" else 0
        if simulated.now >= end_s:
            break
    marks.append((simulated.now, simulated.busy()))
    shares = scaling_page.shares_between(*marks)
    own = [share for name, share in shares.items() if name.startswith("searcher-")]
    window = marks[1][0] - marks[0][0]
    return {
        **asdict(setting), "searchers": searchers, "seed": seed, "seconds": window,
        "per_s": counts["completions"] / window, "steps_per_s": counts["step"] / window,
        "depot": shares["depot"], "trainer": shares["trainer"], "searching": math.fsum(own) / len(own),
        "calls": {name: {"share": seconds[name] / window, "ms": 1000 * seconds[name] / counts[name]}
                  for name in sorted(seconds)},
    }


class Second:
    """One second of the bar after another: what 64 searchers at 10 groups each, and a trainer, ask of the depot.

    The trainer draws as many groups as are delivered, which is more than the one of this benchmark can train on.
    """

    def __init__(self, groups_per_step: int) -> None:
        """The depot is full from the start."""
        self._settings = settings_of(64, None, groups_per_step)
        asked = prompts()
        self._depot = Depot(asked, self._settings, lead=None)
        self._source = Prepared("all", 7)
        fill(self._depot, asked)

    def run(self) -> dict[str, float]:
        """Seconds of processor time by call: the share of a second that the depot is at work."""
        clock, spent, depot = time.process_time, defaultdict[str, float](float), self._depot
        drawn, groups_per_step = 0, self._settings.groups_per_step
        for delivered in range(BATCH_PROMPTS, CARRIED_GROUPS + 1, BATCH_PROMPTS):
            started = clock()
            leases = depot.leases.take(BATCH_PROMPTS)
            pickle.dumps(leases)
            spent["lease"] += clock() - started
            message = pickle.dumps(list(self._source.search(leases)))
            started = clock()
            groups = pickle.loads(message)
            unpacked = clock()
            for group in groups:
                depot.deliver(group)
            spent["deliver: unpack"] += unpacked - started
            spent["deliver: take in"] += clock() - unpacked
            while drawn + groups_per_step <= delivered:
                drawn += groups_per_step
                started = clock()
                draws, _ = depot.draw(0)
                chosen = clock()
                batch = collate(draws, max_tokens=self._settings.trainer.micro_batch_tokens)
                made = clock()
                pickle.dumps(batch)
                spent["draw: choose and read"] += chosen - started
                spent["draw: make the batch"] += made - chosen
                spent["draw: pack it"] += clock() - made
        return dict(spent)


def carried(rounds: int) -> dict[str, list[dict[str, float]]]:
    """By groups a step: a second of the bar, `rounds` times, after one that is not counted."""
    found: dict[str, list[dict[str, float]]] = {}
    for groups_per_step in CARRIED_STEPS:
        second = Second(groups_per_step)
        second.run()
        found[str(groups_per_step)] = [second.run() for _ in range(rounds)]
    return found


def main() -> None:
    """Prints the tables; writes the figures as JSON, and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searchers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--settings", nargs="+", default=[setting.name for setting in SETTINGS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="folder of the page and its figure")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"bar": carried(chosen.rounds), "runs": []}
    print(scaling_page.bar_table(found["bar"]), flush=True)
    measure(SETTINGS[0], 1, 10**6)  # what is slow only once
    for seed in range(chosen.rounds):
        for setting in (one for one in SETTINGS if one.name in chosen.settings):
            for searchers in chosen.searchers:
                started = time.perf_counter()
                row = measure(setting, searchers, seed)
                found["runs"].append(row)
                print(seed, scaling_page.line_of([row]), f"{time.perf_counter() - started:.0f} s", flush=True)
                if chosen.json:
                    chosen.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(scaling_page.table(found["runs"]))
    if chosen.page:
        scaling_page.page(found, chosen.page)


if __name__ == "__main__":
    main()
