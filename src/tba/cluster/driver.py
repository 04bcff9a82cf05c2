"""The same journey as `loop`, as Ray actors: nobody waits but at bounds that the settings name."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from tba import metrics as m
from tba.assembly import Questions
from tba.cluster.depot import DepotProcess
from tba.cluster.notices import Notice
from tba.cluster.searcher import SearcherProcess
from tba.cluster.shards import ShardProcess
from tba.cluster.start import settle
from tba.cluster.trainer import TrainerProcess
from tba.depot import options_of
from tba.loop import LOOKAHEAD, Ask
from tba.metrics import Say
from tba.policy import Policy
from tba.settings import Settings
from tba.signals import interrupts_held
from tba.weights import Weights

POLL_S = 0.2
"""Seconds between looks at the searchers while a step is awaited."""
BACK_OFF_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Seconds before the first, second, ... restart in a row of a searcher."""
START_LIMIT_S = 120.0
"""Seconds that a process may take to start, at least: the libraries' import is no wait of the run."""
GOODBYE_LIMIT_S = 20.0
"""Seconds that searchers may take to finish their batch when the run is over."""


class RunFailedError(RuntimeError):
    """A part of the run failed for good; the message names it."""


@dataclass(slots=True)
class SearcherState:
    """What the driver knows of one searcher."""

    name: str
    handle: Any = None
    running: Any = None
    """Reference to its endless call; ready only when it has ended or died."""
    deaths: int = 0
    """In a row, without a delivered group in between."""
    start_at: float = 0.0
    """Monotonic time of its next start."""


class Cluster:
    """The driver's side: hands steps to the trainer, owns the published weights, looks after searchers."""

    def __init__(self, settings: Settings, resume_from: Path | None, say: Say, run_dir: Path) -> None:
        """Starts Ray, and all processes but the depot, which `start` adds."""
        self._settings, self._say = settings, say
        self._resume_from = None if resume_from is None else str(resume_from.resolve())
        self._tree = settings.resolved()
        self._limit = settings.async_.wait_limit_s
        self._sync = settings.trainer.sync_every
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = settings.async_.threads or max(1, cores // (1 + settings.search.searchers))
        self._temp = tempfile.mkdtemp(prefix="tba-")
        self._depot: Any = None
        self._publishing: Any = None
        self._is_searching = False
        try:
            with interrupts_held():  # of what is half started nobody knows, and it would be left behind
                ray.init(
                    address="local", num_cpus=cores, include_dashboard=False, log_to_driver=False,
                    logging_level=logging.ERROR, _temp_dir=self._temp,
                )
            self._trainer: Any = self._spawn(
                TrainerProcess, self._tree, self._threads, self._resume_from, str(run_dir.resolve()),
                groups={"feed": 1, "publish": 1},
            )
            self._searchers = [SearcherState(name=f"searcher-{i}") for i in range(settings.search.searchers)]
            for state in self._searchers:
                state.handle = self._spawn(SearcherProcess, self._tree, self._threads, state.name)
            count = settings.buffer.shards
            parts = options_of(settings).shared_out(count) if count > 1 else []
            self._shards = [self._spawn(ShardProcess, options) for options in parts]
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _spawn(process: type, *arguments: Any, groups: dict[str, int] | None = None) -> Any:
        make: Any = ray.remote(concurrency_groups=groups) if groups else ray.remote  # pyright: ignore
        actor = make(process)
        return actor.options(num_cpus=0, max_restarts=0).remote(*arguments)

    def start(self, settings: Settings, questions: Questions, policy: Policy) -> None:
        """Starts the depot with the training prompts, and waits until depot and trainer are up."""
        del policy
        prompts = ray.put(list(questions.training))
        limit = max(self._limit, START_LIMIT_S)
        for number, shard in enumerate(self._shards):
            self._get(shard.ready.remote(), f"shard {number} of the buffer to start", limit)
        self._depot = self._spawn(DepotProcess, self._tree, prompts, self._resume_from, self._shards)
        self._get(self._depot.ready.remote(), "the depot to start", limit)
        self._steps, self._version = self._get(self._trainer.ready.remote(), "the trainer to start", limit)
        settle()

    # ---- steps ----

    def steps(self, ask: Callable[[int], Ask]) -> Iterator[dict[str, Any]]:
        """See `Journey.steps`.

        consumes: metrics of steps, in order
        waits for: the oldest step handed over, at most `async.wait_limit_s`
        woken by: the trainer
        produces: draws asked of the depot, steps asked of the trainer, publications
        """
        self._begin()
        handed: deque[tuple[int, Any]] = deque()
        answer: Ask = "go"
        while True:
            while answer == "go" and len(handed) < LOOKAHEAD:
                step = self._steps + len(handed)
                if step % self._sync == 0 and (answer := ask(step)) != "go":
                    break
                handed.append((step + 1, self._hand_over(step, len(handed))))
            if handed:
                step, reference = handed.popleft()
                record = self._await_step(step, reference)
                self._steps, self._version = step, record[m.VERSION]
                yield record
            elif answer == "stop":
                break
            else:
                answer = "go"
        self._send_home()

    def _begin(self) -> None:
        self._is_searching = True
        self._get(self._depot.begin.remote(self._steps + 1), "the depot")
        self._get(self._trainer.begin.remote(), "the trainer")
        for state in self._searchers:
            state.running = state.handle.run.remote(self._depot)

    def _hand_over(self, step: int, ahead: int) -> Any:
        """Asks for the step after `step` steps, and for the publication before it if its round begins."""
        round_ = step // self._sync
        if step % self._sync == 0:
            notice, tensors, reference = self._trainer.publication.options(num_returns=3).remote(round_)
            self._publishing = self._depot.publish.remote(notice, [tensors], [reference], self._publishing)
        drawn = self._depot.draw.remote(step + 1, round_, self._version + ahead)
        return self._trainer.step.remote(step + 1, self._trainer.feed.remote(step + 1, drawn))

    def _await_step(self, step: int, reference: Any) -> dict[str, Any]:
        deadline = time.monotonic() + self._limit
        while not ray.wait([reference], timeout=POLL_S)[0]:
            self._look_after_searchers()
            if time.monotonic() > deadline:
                round_ = (step - 1) // self._sync
                missing = self._get(self._depot.missing.remote(round_), "the depot")
                raise RunFailedError(
                    f"step {step} was not done within async.wait_limit_s = {self._limit:g} s: {missing}."
                )
        self._look_after_searchers()
        if self._publishing is not None and ray.wait([self._publishing], timeout=0)[0]:
            self._get(self._publishing, "the depot to take published weights")
            self._publishing = None
        return self._get(reference, "the trainer")

    # ---- searchers ----

    def _look_after_searchers(self) -> None:
        now = time.monotonic()
        for state in self._searchers:
            if state.running is not None and ray.wait([state.running], timeout=0)[0]:
                self._bury(state, now)
            elif state.running is None and now >= state.start_at:
                state.handle = self._spawn(SearcherProcess, self._tree, self._threads, state.name)
                state.running = state.handle.run.remote(self._depot)
                self._say("note", {"text": f"{state.name} restarted"})

    def _bury(self, state: SearcherState, now: float) -> None:
        """Logs a searcher's death, hands its prompts out again, and sets the time of its restart."""
        try:
            ray.get(state.running)
            reason = "it ended by itself"
        except RayError as error:
            reason = _reason(error)
        ray.kill(state.handle)
        lost, delivered = self._get(self._depot.give_back.remote(state.name), "the depot")
        state.deaths = 1 if delivered else state.deaths + 1
        state.running = None
        self._say("note", {"text": f"{state.name} died ({reason}); {lost} prompts are handed out again"})
        limit = self._settings.async_.max_restarts
        if state.deaths > limit:
            raise RunFailedError(
                f"{state.name} died {state.deaths} times in a row without delivering a group "
                f"(async.max_restarts = {limit}); the last time: {reason}."
            )
        state.start_at = now + BACK_OFF_S[min(state.deaths, len(BACK_OFF_S)) - 1]

    def _send_home(self) -> None:
        self._is_searching = False
        self._get(self._depot.stop.remote(), "the depot")
        running = [state.running for state in self._searchers if state.running is not None]
        if running:
            ray.wait(running, num_returns=len(running), timeout=GOODBYE_LIMIT_S)

    # ---- the rest of a journey ----

    def weights(self) -> Weights:
        """The newest publication during training; the trainer's own weights before and after."""
        if self._is_searching:
            notice, references = self._get(self._depot.latest.remote(), "the depot")
            tensors = self._get(references[0], "published weights")
        else:
            both = self._trainer.weights.options(num_returns=2).remote()
            notice, tensors = (self._get(part, "the trainer's weights") for part in both)
        assert isinstance(notice, Notice)
        return notice.weights(tensors)

    def save(self, path: Path) -> None:
        """See `Journey.save`."""
        where = str(path.resolve())
        saves = [self._trainer.save.remote(where), self._depot.save.remote(where)]
        for reference in saves:
            self._get(reference, "trainer and depot to save")
        self._get(self._trainer.begin.remote(), "the trainer")

    def save_model(self, path: Path) -> None:
        """See `Journey.save_model`."""
        self._get(self._trainer.save_model.remote(str(path.resolve())), "the trainer to save the model")

    def ledger(self) -> dict[str, Any]:
        """See `Journey.ledger`."""
        return self._get(self._depot.ledger.remote(), "the depot's ledger")

    def times(self) -> dict[str, dict[str, float]]:
        """See `Journey.times`."""
        return self._get(self._depot.times.remote(), "the searchers' times")

    def close(self) -> None:
        """Ends every process of the run, and removes Ray's temporary files."""
        if ray.is_initialized():
            ray.shutdown()
        shutil.rmtree(self._temp, ignore_errors=True)

    def _get(self, reference: Any, awaited: str, limit_s: float | None = None) -> Any:
        """The value of a reference, within the limit, which is `async.wait_limit_s` unless given.

        Raises:
            RunFailedError: the limit passed, or the process failed or died.
            OSError: the process could not write.
        """
        try:
            return ray.get(reference, timeout=limit_s or self._limit)
        except GetTimeoutError as error:
            raise RunFailedError(
                f"waited {limit_s or self._limit:g} s for {awaited} (async.wait_limit_s = {self._limit:g})."
            ) from error
        except RayTaskError as error:
            if isinstance(error.cause, OSError):
                raise error.cause from error
            if isinstance(error.cause, RayActorError):
                raise RunFailedError(
                    f"waiting for {awaited}: a process that it asked has died; go on from the newest checkpoint with "
                    f"tba resume."
                ) from error
            raise RunFailedError(f"waiting for {awaited}: {_reason(error)}") from error
        except RayActorError as error:
            raise RunFailedError(
                f"waiting for {awaited}: its process died ({_reason(error)}); go on from the newest checkpoint with "
                f"tba resume."
            ) from error


def _reason(error: RayError) -> str:
    """One line of what Ray says."""
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
