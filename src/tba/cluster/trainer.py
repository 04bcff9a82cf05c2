"""The trainer's process."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from tba import metrics as m
from tba.cluster.notices import Notice
from tba.cluster.start import check_run_dir, settle, start_process, use_threads
from tba.weights import Tensors, Weights

if TYPE_CHECKING:
    from tba.batch import Batch
    from tba.recorder import Source
    from tba.sharded import Seat
    from tba.trainer import Snapshot


MOST_UNDIGESTED = 2
"""Copies of the weights that may wait for their digests: beyond, the trainer waits, and memory stays bounded."""


class TrainerProcess:
    """The trainer, on a thread that does nothing else and never asks Ray between two steps.

    consumes: draws, one call of `feed` a step
    waits for: on the trainer's thread, the next batch, and digests that are too far behind; in `step` and
        `publication`, what that thread makes
    woken by: `feed`; the trainer's thread
    produces: metrics, and weights as return values, which the driver owns
    """

    def __init__(
        self, tree: dict[str, Any], threads: int, resume_from: str | None, run_dir: str, seat: Seat | None = None
    ) -> None:
        """`tree` is the resolved settings tree; `seat` is the first, where the trainer has several ranks."""
        from tba.assembly import make_newest, make_recorder
        from tba.trainer import Trainer

        settings, _, policy = start_process(tree, threads, on_host=seat is not None)
        self._ranks, self._start_policy = join(seat), policy
        recorder, newest = make_recorder(settings, Path(run_dir)), make_newest(policy, Path(run_dir))
        self._trainer = Trainer(policy.trainable_copy(), settings, recorder, newest, self._ranks)
        self._sync = settings.trainer.sync_every
        self._limit_s = settings.async_.wait_limit_s
        self._thread = ThreadPoolExecutor(1, "trainer", initializer=use_threads, initargs=(threads,))
        self._copying = ThreadPoolExecutor(1, "copier", initializer=use_threads, initargs=(threads,))
        self._copied: Future[None] | None = None
        self._digesting = ThreadPoolExecutor(1, "publisher")
        self._undigested = threading.BoundedSemaphore(MOST_UNDIGESTED)
        self._steps: dict[int, Future[dict[str, Any]]] = {}
        self._published: dict[int, Future[Weights]] = {}
        self._sent: Weights | None = None
        self._spare: list[Tensors] = []
        if resume_from is not None:
            self._trainer.load(Path(resume_from))
        self._free = time.perf_counter()
        self._publish_s = 0.0
        self._sent_reference = 0
        self._publish()

    def ready(self, run_dir: str) -> tuple[int, int]:
        """(steps tried, version), once the trainer is up.

        Raises:
            FileNotFoundError: `run_dir` is not there on this node.
        """
        check_run_dir(run_dir, "trainer")
        settle()
        return self._trainer.steps, self._trainer.version

    @ray.method(concurrency_group="feed")
    def feed(self, step: int, drawn: tuple[Batch, dict[str, Any], list[Source]]) -> None:
        """Takes the batch of a later step; calls come in the order of the steps."""
        self._steps[step] = self._thread.submit(self._train, step, *drawn)

    def _train(self, step: int, batch: Batch, found: dict[str, Any], sources: list[Source]) -> dict[str, Any]:
        """One step, and the publication after it if it ends a round."""
        started = time.perf_counter()
        assert step == self._trainer.steps + 1, f"step {self._trainer.steps + 1} was fed the batch of step {step}"
        published_s = self._publish_s
        self._ranks.tell("step", batch, found[m.SEARCH_KL])
        record = {
            **self._trainer.step(batch, sources, search_kl=found[m.SEARCH_KL], before_update=self._await_copy), **found,
            m.ROUND: (step - 1) // self._sync, m.WAIT_SECONDS: started - self._free,
            m.PUBLISH_SECONDS: self._publish_s,
        }
        record[m.STEP_SECONDS] -= self._publish_s - published_s  # the wait for the copy, which is booked as publishing
        self._publish_s = 0.0
        if step % self._sync == 0:
            self._publish()
        self._free = time.perf_counter()
        return record

    def _publish(self) -> None:
        """Has the weights copied, while the next step computes its gradient: only its update waits for the copy.

        The trainer's thread waits here only where steps are shorter than digests for long; `publish_s` shows it.
        """
        started = time.perf_counter()
        self._undigested.acquire()  # given back by `_digest`, whatever becomes of it
        round_ = self._trainer.steps // self._sync
        into = self._spare.pop() if self._spare else None
        self._copied = self._copying.submit(self._copy, round_, into, self._publication_of(round_))
        self._publish_s = time.perf_counter() - started
        if self._ranks.count > 1:  # all ranks give their share of it, and each does one thing at a time
            self._await_copy()

    def _await_copy(self) -> None:
        """Waits until the weights may change."""
        if self._copied is None:
            return
        started = time.perf_counter()
        if not wait([self._copied], self._limit_s).done:
            raise TimeoutError(
                f"the copy of the weights of version {self._trainer.version} was not made within {self._limit_s:g} s "
                f"(async.wait_limit_s): the machine may be out of memory; go on with tba resume."
            )
        self._copied.result()
        self._copied = None
        self._publish_s += time.perf_counter() - started

    def _copy(self, round_: int, into: Tensors | None, publication: Future[Weights]) -> None:
        try:
            self._ranks.tell("snapshot", round_)
            snapshot = self._trainer.snapshot(round_, into)
            if snapshot.ref_version == self._sent_reference:
                snapshot = dataclasses.replace(snapshot, reference=None)
            self._sent_reference = snapshot.ref_version
        except BaseException as error:
            self._undigested.release()
            publication.set_exception(error)
            raise
        self._digesting.submit(self._digest, snapshot, publication)

    def _digest(self, snapshot: Snapshot, publication: Future[Weights]) -> None:
        try:
            publication.set_result(snapshot.weights())
        except BaseException as error:
            publication.set_exception(error)
            raise
        finally:
            self._undigested.release()

    def _publication_of(self, round_: int) -> Future[Weights]:
        """The one future of a publication, whoever asks for it first."""
        return self._published.setdefault(round_, Future())

    def step(self, step: int, fed: None) -> dict[str, Any]:
        """Metrics of the optimizer step `step`, once it is done; `fed` is what its `feed` returned, or failed with."""
        del fed
        return self._steps.pop(step).result(timeout=self._limit_s)

    @ray.method(concurrency_group="publish")
    def publication(self, round_: int) -> tuple[Notice, Any, Any]:
        """The weights that round `round_` starts with, once they are made: a notice, and the tensors.

        Third come the tensors of the reference, or None if they were in an earlier publication. What the call before
        this one returned has been sent by now, so that its memory can take a later copy.
        """
        weights = self._publication_of(round_).result(timeout=self._limit_s)
        del self._published[round_]
        if self._sent is not None:
            self._spare.append(self._sent.tensors)
        self._sent = weights
        return Notice.of(weights), weights.tensors, weights.reference

    def weights(self) -> tuple[Notice, Any]:
        """The weights as they are; only while no step is under way."""
        round_ = self._trainer.steps // self._sync
        self._ranks.tell("snapshot", round_)
        weights = self._trainer.publish(round_)
        return Notice.of(weights), weights.tensors

    def begin(self) -> None:
        """Starts the clock of the next wait: at the start, and after a checkpoint, which is not waiting for data."""
        self._free = time.perf_counter()

    def save(self, path: str) -> None:
        """See `Trainer.save`; only while no step is under way."""
        self._ranks.tell("save", path)
        self._trainer.save(Path(path))

    def save_model(self, path: str) -> None:
        """Writes the policy as a Hugging Face model folder; only while no step is under way."""
        policy = self._trainer.policy
        if self._ranks.count > 1:  # the start policy is whole, and has done its part
            policy = self._start_policy
            policy.load(self.weights()[1])
        policy.save(Path(path))

    @ray.method(concurrency_group="look")
    def look(self) -> int:
        """Who answers is alive; how many passes and collectives of its own the rank has begun."""
        return self._ranks.begun


class RankProcess:
    """A trainer rank other than the first.

    consumes: the first one's words
    waits for: the next word, as long as the run is there; the other ranks, within the limit on collectives
    woken by: the first rank
    produces: its share of gradients, weights and what is saved
    """

    def __init__(self, tree: dict[str, Any], threads: int, resume_from: str | None, seat: Seat) -> None:
        """`tree` is the resolved settings tree."""
        from tba.trainer import Trainer

        settings, _, policy = start_process(tree, threads, on_host=True)
        self._ranks = join(seat)
        self._trainer = Trainer(policy.trainable_copy(), settings, ranks=self._ranks)
        if resume_from is not None:
            self._trainer.load(Path(resume_from))
        settle()

    def run(self) -> None:
        """Does what the first rank does, without end."""
        from tba.trainer import TrainingFailedError

        while True:
            word, values = self._ranks.hear()
            with contextlib.suppress(TrainingFailedError):  # the first rank says it
                getattr(self, f"_{word}")(*values)

    def _step(self, batch: Batch, search_kl: float) -> None:
        self._trainer.step(batch, search_kl=search_kl)

    def _snapshot(self, round_: int) -> None:
        self._trainer.snapshot(round_)

    def _save(self, path: str) -> None:
        self._trainer.save(Path(path))

    @ray.method(concurrency_group="look")
    def look(self) -> int:
        """See `TrainerProcess.look`."""
        return self._ranks.begun


def join(seat: Seat | None) -> Any:
    """The ranks of a trainer, once all are there; without a seat, the only one."""
    if seat is None:
        from tba.ranks import ALONE

        return ALONE
    from tba.sharded import Sharded, reach_store

    return Sharded(reach_store(seat), seat)
