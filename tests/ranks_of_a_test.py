"""Trainer ranks as plain processes that meet at a file, for tests; and what they are asked to do there."""

from __future__ import annotations

import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support import LETTERS, STOP, llama_policy, make_draw, make_prompt, make_settings, make_trajectory, random_draws

LIMIT_S = 240.0
"""Seconds that ranks may take for what they are asked, on a busy machine."""
PRELOADED = ["torch.distributed.fsdp", "transformers.models.llama", "peft", "tba.sharded", "tba.trainer",
             "ranks_of_a_test"]


class Company:
    """Ranks that wait for what to do."""

    def __init__(self, ends: Sequence[Connection]) -> None:
        self._ends = ends

    def do(self, job: Callable[..., Any], *values: Any) -> list[Any]:
        """What `job(ranks, *values)` returns on each rank."""
        for end in self._ends:
            end.send((job, values))
        found = []
        for rank, end in enumerate(self._ends):
            assert end.poll(LIMIT_S), f"rank {rank} did not answer within {LIMIT_S} s"
            found.append(end.recv())
        errors = [f"rank {rank}: {value}" for rank, (is_right, value) in enumerate(found) if not is_right]
        assert not errors, "\n".join(errors)
        return [value for _, value in found]


@contextmanager
def company(count: int, *, limit_s: float = 120.0) -> Iterator[Company]:
    """`count` ranks; their libraries are imported once for all that a test session starts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        pairs = [context.Pipe() for _ in range(count)]
        processes = [
            context.Process(target=serve, args=(rank, count, folder, limit_s, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()
        try:
            yield Company([ours for ours, _ in pairs])
        finally:
            for process in processes:
                process.kill()
                process.join()


def serve(rank: int, count: int, folder: str, limit_s: float, end: Connection) -> None:
    """A rank's process."""
    import torch
    import torch.distributed as dist

    from tba.sharded import Seat, Sharded

    torch.set_num_threads(1)
    seat = Seat(rank=rank, count=count, host="", port=0, start_limit_s=LIMIT_S, limit_s=limit_s)
    ranks = Sharded(dist.FileStore(str(Path(folder) / "store"), count), seat)
    while True:
        try:
            job, values = end.recv()
        except EOFError:
            return
        try:
            end.send((True, job(ranks, *values)))
        except Exception as error:  # told to the test
            end.send((False, f"{type(error).__name__}: {error}"))


# ---- what they do -------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "full, tied": {"trainer": {"clip_norm": 0.7, "weight_decay": 0.1}},
    "steered beta": {"objective": {"target_kl": 0.9}},
    "cut": {"trainer": {"clip_norm": None}, "max_tokens": 30},
    "adapter": {"policy": {"lora": {"rank": 3}}, "trainer": {"clip_norm": 3.0}},
    "learned log Z": {"objective": {"name": "trajectory_balance_learned_z"}},
    "moving reference": {"reference": {"kind": "ema", "every": 3, "decay": 0.4}},
    "reference reset": {"reference": {"kind": "reset", "every": 7}},
    "adapter, moving reference": {"policy": {"lora": {"rank": 2}},
                                  "reference": {"kind": "ema", "every": 3, "decay": 0.4}},
    "over tokens": {"objective": {"name": "tba_prime", "ratio": "clamp", "ratio_max": 1.2, "normalise": "token"},
                    "max_tokens": 60},
    "few groups": {"sizes": (5, 1), "trainer": {"clip_norm": 2.0}},
    "prompts apart": {"prompt": 12},
    "head apart": {"worth": 1},
    "table": {"table": True, "trainer": {"learning_rate": 0.0005}},  # AdamW magnifies what is left of rows that cancel
}
"""What is trained, and how; the rest is plain."""


def make_trainer(case: dict[str, Any], ranks: Any = None, seed: int = 5) -> Any:
    """A trainer of `case` on a tiny model."""
    import torch

    import tba.policy
    from tba.policy import load_policy, named_tensors
    from tba.ranks import ALONE
    from tba.settings import ArchitectureSettings
    from tba.trainer import Trainer

    tba.policy.WORTH = case.get("worth", 2**22)
    settings = settings_of(case)
    if case.get("table"):
        shape = ArchitectureSettings(positions=4)
        policy = load_policy("new-table", architecture=shape, characters=LETTERS, seed=seed, temperature=0.7)
    elif settings.policy.lora.rank:
        shape = ArchitectureSettings(layers=2, width=16, heads=2, positions=32)
        policy = load_policy("new-llama", architecture=shape, characters=LETTERS, seed=seed, temperature=0.7,
                             adapter=settings.policy.lora)
        draw = torch.Generator().manual_seed(7)
        for name, tensor in named_tensors(policy.model).items():
            if "lora_B" in name:  # from zero the first gradients are, and AdamW makes much of their rounding
                tensor.data.normal_(0, 0.3, generator=draw)
    else:
        policy = llama_policy(seed, sharpness=2.0)
    return Trainer(policy.trainable_copy(), settings, ranks=ALONE if ranks is None else ranks)


def settings_of(case: dict[str, Any]) -> Any:
    """Settings of a case."""
    trainer = {"learning_rate": 0.001, "steps": 100, "groups_per_step": 7, "group_size": 4, **case.get("trainer", {})}
    return make_settings(
        mode="lockstep", objective={"beta": 0.37, **case.get("objective", {})}, trainer=trainer,
        policy=case.get("policy", {}), reference=case.get("reference", {}),
    )


def draws_of(case: dict[str, Any], step: int) -> list[Any]:
    """A step's groups: unequal, some too small to count, in some a completion twice."""
    if "prompt" in case:
        rng = random.Random(step)
        return [
            make_draw(make_prompt(f"p{n}", prompt), [
                make_trajectory(f"p{n}", [*rng.choices(range(3, 11), k=size % 4), STOP], reward=rng.gauss(0, 1))
                for size in range(4 + n)
            ])
            for n, prompt in enumerate([[1, *rng.choices(range(3, 11), k=case["prompt"])] for _ in range(3)])
        ]
    kind = case["draws"][step] if "draws" in case else "good"
    if kind == "bad":  # rewards whose square overflows float32
        draws = random_draws((3, 2), seed=step)
        bad = [make_trajectory("bad", (n, STOP), reward=n * 1e30) for n in (3, 5)]
        return [*draws, make_draw(make_prompt("bad"), bad)]
    if kind == "none":
        return random_draws((1, 1, 1), seed=step)
    draws = random_draws(case.get("sizes", (4, 2, 1, 3, 2, 6, 3)), seed=step, longest=3 if case.get("table") else 6)
    first = draws[0].trajectories
    return [make_draw(draws[0].prompt, [*first, first[1]]), *draws[1:]]


def train(ranks: Any, case: dict[str, Any], steps: Sequence[int], trainer: Any = None) -> dict[str, Any]:
    """Trains for some steps; metrics by step, and the weights at the end."""
    from tba.batch import collate

    trainer = make_trainer(case, ranks) if trainer is None else trainer
    count = 1 if ranks is None else ranks.count
    found, start = [], dict(trainer.snapshot(0).tensors)
    for step in steps:
        batch = collate(draws_of(case, step), max_tokens=case.get("max_tokens", 16_384), ranks=count)
        for micro in batch.micro_batches:
            micro.version_N.clamp_(max=trainer.version)
        found.append(trainer.step(batch, search_kl=0.2 + 0.1 * step))
    return {"metrics": found, "tensors": dict(trainer.snapshot(0).tensors), "start": start}


def tensors_of(file: dict[str, Any]) -> dict[str, Any]:
    """The weights in a saved file."""
    return {name: tensor for name, tensor in file.items() if name.startswith("weights.")}


def train_some(ranks: Any, names: Sequence[str], steps: int) -> dict[str, dict[str, Any]]:
    """Cases, one after another."""
    return {name: train(ranks, CASES[name], range(steps)) for name in names}


def late(ranks: Any, who: int, seconds: float) -> tuple[str, int]:
    """A sum that rank `who` never comes to: what each rank hears of it, and how much it has begun."""
    if ranks.rank == who:
        time.sleep(seconds)
        return "", ranks.begun
    try:
        ranks.totals([1.0])
    except RuntimeError as error:
        return str(error), ranks.begun
    return "all came", ranks.begun


def saved(ranks: Any, case: dict[str, Any], steps: Sequence[int], start: str | None, end: str) -> None:
    """Trains on from the folder `start`, or afresh, and saves into the folder `end`."""
    trainer = make_trainer(case, ranks, seed=5 if start is None else 6)
    if start is not None:
        trainer.load(Path(start))
    train(ranks, case, steps, trainer)
    trainer.save(Path(end))
