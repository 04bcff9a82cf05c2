"""The journey in lockstep: one process, deterministic, the specification of what `cluster` does side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from tba import metrics as m
from tba.batch import collate
from tba.depot import Depot
from tba.searcher import Searcher
from tba.settings import TrainerSettings
from tba.trainer import Trainer
from tba.weights import WeightStore


def lockstep(
    trainer: Trainer, depot: Depot, searcher: Searcher, store: WeightStore, settings: TrainerSettings
) -> Iterator[dict[str, Any]]:
    """Yields the metrics of each step, for ever; logging, saving, evaluating and stopping are the consumer's.

    Trainer and depot are whole, and may be saved, whenever a round ends: at every multiple of `sync_every` steps.
    """
    while True:
        waiting = time.perf_counter()
        round_ = trainer.steps // settings.sync_every
        store.publish(trainer.publish(round_))                                    # weights -> searcher
        searcher.adopt(store.latest())
        for group in searcher.search(depot.take(round_), run_attempt=depot.attempt):  # prompt -> scored group
            depot.deliver(group)
        for _ in range(settings.sync_every):
            draws, drawn = depot.draw(trainer.version)                            # buffer -> group
            collating = time.perf_counter()
            batch = collate(draws, max_tokens=settings.micro_batch_tokens)        # group -> batch
            collated = time.perf_counter()
            step = trainer.step(batch)                                            # batch -> loss -> new version
            yield {
                **step, **drawn, m.ROUND: round_, m.COLLATE_SECONDS: collated - collating,
                m.WAIT_SECONDS: collating - waiting,
            }
            waiting = time.perf_counter()
