"""The journey in lockstep: one process, deterministic, and the specification of `cluster`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

from tba import metrics as m
from tba.assembly import Questions, make_newest, make_recorder, make_searcher
from tba.batch import collate
from tba.depot import Depot
from tba.evaluate import Evaluation
from tba.policy import Policy
from tba.recorder import Source
from tba.searcher import Searcher
from tba.settings import Settings, TrainerSettings
from tba.trainer import Trainer
from tba.weights import MemoryStore, Weights, WeightStore


def lockstep(
    trainer: Trainer, depot: Depot, searcher: Searcher, store: WeightStore, settings: TrainerSettings
) -> Iterator[dict[str, Any]]:
    """Yields the metrics of each step, for ever; logging, saving, evaluating and stopping are the consumer's.

    Trainer and depot are whole, and may be saved, whenever a round ends: at every multiple of `sync_every` steps.
    """
    while True:
        free = time.perf_counter()
        round_ = trainer.steps // settings.sync_every
        published = trainer.publish(round_)
        store.publish(published)                                                      # weights -> searcher
        depot.expect(published.version, published.digest)
        searcher.adopt(store.latest())
        for group in searcher.search(depot.take(round_), run_attempt=depot.attempt):  # prompt -> scored group
            depot.deliver(group)
        for _ in range(settings.sync_every):
            draws, drawn = depot.draw(trainer.version)                                # buffer -> group
            waited = time.perf_counter()
            batch = collate(draws, max_tokens=settings.micro_batch_tokens)            # group -> batch
            collated = time.perf_counter()
            sources = [Source.of(draw) for draw in draws]
            step = trainer.step(batch, sources, search_kl=drawn[m.SEARCH_KL])         # loss -> new version
            yield {
                **step, **drawn, m.ROUND: round_, m.WAIT_SECONDS: waited - free, m.COLLATE_SECONDS: collated - waited
            }
            free = time.perf_counter()


LOOKAHEAD = 3
"""Steps handed to an async trainer before the first of them is done, so that it never waits for the driver."""

Ask = Literal["go", "hold", "stop"]
"""Whether the next round may start; `hold`: once everything before it has been consumed."""


Evaluate = Callable[..., Evaluation]
"""`Evaluator.evaluate`, wherever it runs."""


class Journey(Protocol):
    """A run under way, in one process or in many."""

    def start(self, settings: Settings, questions: Questions, policy: Policy) -> None:
        """Makes the parts that this process holds; others may be on their way up already."""
        ...

    def steps(self, ask: Callable[[int], Ask]) -> Iterator[dict[str, Any]]:
        """Metrics of each step; `ask` is told the steps so far before each round, and ends the journey."""
        ...

    def weights(self) -> Weights:
        """The newest weights that may be evaluated."""
        ...

    def evaluator(self) -> Evaluate | None:
        """What evaluates in a process of its own; None if there is none, and the caller is to do it."""
        ...

    def save(self, path: Path) -> None:
        """Writes trainer, buffer and leases into the folder `path`; only between rounds."""
        ...

    def save_model(self, path: Path) -> None:
        """Writes the policy as a plain Hugging Face model folder."""
        ...

    def ledger(self) -> dict[str, Any]:
        """Where every trajectory, token and prompt went."""
        ...

    def times(self) -> dict[str, dict[str, float]]:
        """Seconds that each searcher spent on each part of its work."""
        ...

    def close(self) -> None:
        """Ends every process of the run."""
        ...


class Lockstep:
    """The journey in this process."""

    def __init__(self, resume_from: Path | None, run_dir: Path | None = None) -> None:
        """`resume_from` is a complete checkpoint folder; None starts afresh. Without `run_dir` no step is recorded."""
        self._resume_from, self._run_dir = resume_from, run_dir

    def start(self, settings: Settings, questions: Questions, policy: Policy) -> None:
        """See `Journey.start`."""
        self._settings = settings
        self._searcher = make_searcher(settings, questions.task, policy, "searcher-0")
        self._depot = Depot(questions.training, settings, lead=None)
        recorder, newest = make_recorder(settings, self._run_dir), make_newest(policy, self._run_dir)
        self._trainer = Trainer(policy.trainable_copy(), settings, recorder, newest)
        if self._resume_from is not None:
            self._trainer.load(self._resume_from)
            self._depot.load(self._resume_from)

    def steps(self, ask: Callable[[int], Ask]) -> Iterator[dict[str, Any]]:
        """See `lockstep`."""
        settings = self._settings.trainer
        if ask(self._trainer.steps) == "stop":
            return
        for step in lockstep(self._trainer, self._depot, self._searcher, MemoryStore(), settings):
            yield step
            if self._trainer.steps % settings.sync_every == 0 and ask(self._trainer.steps) == "stop":
                return

    def weights(self) -> Weights:
        """The trainer's weights as they are now."""
        return self._trainer.publish(self._trainer.steps // self._settings.trainer.sync_every)

    def evaluator(self) -> Evaluate | None:
        """See `Journey.evaluator`."""
        return None

    def save(self, path: Path) -> None:
        """See `Journey.save`."""
        self._trainer.save(path)
        self._depot.save(path)

    def save_model(self, path: Path) -> None:
        """See `Journey.save_model`."""
        self._trainer.policy.save(path)

    def ledger(self) -> dict[str, Any]:
        """See `Journey.ledger`."""
        return self._depot.ledger()

    def times(self) -> dict[str, dict[str, float]]:
        """See `Journey.times`."""
        return {self._searcher.name: dataclasses.asdict(self._searcher.times)}

    def close(self) -> None:
        """Nothing to end."""
