"""The same journey as `loop`, as Ray actors: nobody waits but at bounds that the settings name."""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tba import metrics as m
from tba.assembly import Questions
from tba.cluster.depot import DepotProcess
from tba.cluster.evaluator import EvaluatorProcess
from tba.cluster.notices import Notice
from tba.cluster.ranks import TrainerRanks, room_for
from tba.cluster.scorers import ScorerProcess
from tba.cluster.searcher import SearcherProcess
from tba.cluster.searchers import START_LIMIT_S, RunFailedError, Searchers, reason_of
from tba.cluster.shards import ShardProcess
from tba.cluster.start import settle
from tba.cluster.temporary import TemporaryFolder, start_in_folder
from tba.cluster.trainer import RankProcess, TrainerProcess
from tba.cluster_settings import ShareSettings, bound_cores
from tba.control import Requests
from tba.depot import options_of
from tba.evaluate import Evaluation
from tba.evaluations import EvaluatorLostError
from tba.loop import LOOKAHEAD, Ask, Evaluate
from tba.metrics import Say
from tba.policy import Policy
from tba.settings import Settings, SettingsError
from tba.sharded import Seat, hold_store
from tba.signals import interrupts_held
from tba.weights import Tensors, Weights

CONNECT_LIMIT_S = 10.0
"""Seconds in which a cluster's head has to take a connection."""
POLL_S = 0.2
"""Seconds between looks at the searchers while a step is awaited, and at the requests of others."""


class Cluster:
    """The driver's side: hands steps to the trainer, owns the published weights, looks after searchers."""

    def __init__(
        self, settings: Settings, resume_from: Path | None, say: Say, run_dir: Path, brought: object = None
    ) -> None:
        """Starts or joins Ray, and starts all processes; `brought` is what a script hands over for scoring.

        Raises:
            SettingsError: the cluster cannot be reached, or has not what a process needs.
        """
        self._settings, self._say, self._brought = settings, say, brought
        self._resume_from = None if resume_from is None else str(resume_from.resolve())
        self._run_dir = str(run_dir.resolve())
        self._tree = settings.resolved()
        self._limit = settings.async_.wait_limit_s
        self._sync = settings.trainer.sync_every
        self._temporary: TemporaryFolder | None = None
        self._publishing: Any = None
        self._is_searching = False
        self._requests, self._served_at = Requests(run_dir), 0.0
        try:
            with interrupts_held():  # of what is half started nobody knows, and it would be left behind
                self._cores = self._join() if settings.ray.address is not None else self._start_ray()
            self._trainer, self._ranks = self._spawn_trainer()
            count = settings.buffer.shards
            parts = options_of(settings).shared_out(count) if count > 1 else []
            self._shards = [self._spawn(ShardProcess, options, share="depot") for options in parts]
            self._depot: Any = self._spawn(DepotProcess, self._tree, self._resume_from, self._shards, share="depot")
            self._scorers = [
                self._spawn(ScorerProcess, self._tree, self._threads("scorer"), brought, share="scorer")
                for _ in range(settings.search.scorer_processes)
            ]
            self._evaluator: Any = None
            if self._has_evaluator():
                self._evaluator = self._spawn(
                    EvaluatorProcess, self._tree, self._threads("evaluator"), brought, self._scorers,
                    share="evaluator",
                )
            # Searchers come last: where there is not room for all of them, the run goes on with those that fit.
            self._searchers = Searchers(settings, self._spawn_searcher, self._get, say)
        except BaseException:
            self.close()
            raise

    def _start_ray(self) -> int:
        """Starts Ray on this machine; returns its cores."""
        cores = bound_cores()
        self._temporary = start_in_folder(lambda folder: ray.init(
            address="local", num_cpus=cores, include_dashboard=False, log_to_driver=False,
            logging_level=logging.ERROR, _temp_dir=folder,
        ), self._say)
        self._check_room()
        return cores

    def _join(self) -> int:
        """Joins a cluster; returns its cores."""
        address = self._settings.ray.address
        try:
            _check_listens(str(address))
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, OSError, ValueError, RuntimeError) as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise SettingsError([
                f"ray.address = {address!r} cannot be joined ({said}); start a cluster with `ray start --head`, or "
                f"leave ray.address out to use this machine."
            ]) from error
        self._check_room()
        return int(ray.cluster_resources().get("CPU", 1))

    def _check_room(self) -> None:
        """SettingsError if no node has what a process is to take."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        problems = []
        for name, share in self._settings.resources:
            needs = {"CPU": self._cpus(share), "GPU": share.gpus}
            count = self._settings.trainer.processes if name == "trainer" else 1
            fit = room_for(needs, nodes, count)
            if 0 < fit < count:
                problems.append(
                    f"resources.trainer: {needs['CPU']:g} CPUs and {needs['GPU']:g} GPUs for each of "
                    f"trainer.processes = {count} ranks; the nodes have room for {fit}."
                )
            if not fit:
                most = {kind: max((node.get(kind, 0.0) for node in nodes), default=0.0) for kind in needs}
                problems.append(
                    f"resources.{name}: {needs['CPU']:g} CPUs and {needs['GPU']:g} GPUs are on no node; the most "
                    f"on one are {most['CPU']:g} CPUs and {most['GPU']:g} GPUs."
                )
        if problems:
            raise SettingsError(problems)

    def _cpus(self, share: ShareSettings) -> float:
        """CPUs set aside: on this machine none, since the processes share its cores, unless they are asked for."""
        return share.cpus if share.cpus is not None else float(self._settings.ray.address is not None)

    def _threads(self, name: str) -> int:
        """Threads that a process computes with."""
        settings = self._settings
        if settings.async_.threads is not None:
            return settings.async_.threads
        if settings.ray.address is not None:
            return max(1, int(self._cpus(getattr(settings.resources, name))))
        return max(1, self._cores // (settings.trainer.processes + settings.search.searchers))

    def _has_evaluator(self) -> bool:
        """Whether evaluations have a process of their own: on a cluster, and where a core is left for it."""
        settings = self._settings
        return settings.ray.address is not None or self._cores > settings.trainer.processes + settings.search.searchers

    def _spawn_searcher(self, name: str) -> Any:
        return self._spawn(
            SearcherProcess, self._tree, self._threads("searcher"), name, self._brought, self._scorers,
            share="searcher",
        )

    def _spawn_trainer(self) -> tuple[Any, TrainerRanks]:
        """The trainer's first rank, and what looks after all of them."""
        count, threads = self._settings.trainer.processes, self._threads("trainer")
        seats: list[Seat | None] = [None]
        if count > 1:
            is_here = self._settings.ray.address is None
            has_gpu = self._settings.resources.trainer.gpus > 0 and self._settings.policy.device != "cpu"
            host = "127.0.0.1" if is_here else ray.util.get_node_ip_address()
            self._store = hold_store(host)
            seats = [
                Seat(rank=rank, count=count, host=host, port=self._store.port, limit_s=self._limit / 2,
                     start_limit_s=max(self._limit, START_LIMIT_S), has_gpu=has_gpu)
                for rank in range(count)
            ]
        first: Any = self._spawn(
            TrainerProcess, self._tree, threads, self._resume_from, self._run_dir, seats[0], share="trainer",
            groups={"feed": 1, "publish": 1, "look": 1},
        )
        others = [
            self._spawn(RankProcess, self._tree, threads, self._resume_from, seat, share="trainer", groups={"look": 1})
            for seat in seats[1:]
        ]
        return first, TrainerRanks(first, others, limit_s=self._limit)

    def _spawn(self, process: type, *arguments: Any, share: str, groups: dict[str, int] | None = None) -> Any:
        make: Any = ray.remote(concurrency_groups=groups) if groups else ray.remote  # pyright: ignore
        takes: ShareSettings = getattr(self._settings.resources, share)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        # A score is a function of what is scored: a scorer that dies starts anew, and is asked again.
        lives = {"max_restarts": self._settings.async_.max_restarts, "max_task_retries": -1,
                 "max_concurrency": self._settings.search.scorers} if share == "scorer" else {"max_restarts": 0}
        return make(process).options(
            num_cpus=self._cpus(takes), num_gpus=takes.gpus, **lives,
            scheduling_strategy="SPREAD" if share in ("searcher", "scorer") else here,
        ).remote(*arguments)

    def start(self, settings: Settings, questions: Questions, policy: Policy) -> None:
        """Gives the depot its training prompts, and waits until depot and trainer are up."""
        del policy
        prompts = ray.put(list(questions.training))
        limit = max(self._limit, START_LIMIT_S)
        for number, shard in enumerate(self._shards):
            self._get(shard.ready.remote(), f"shard {number} of the buffer to start", limit)
        self._get(self._depot.ready.remote(prompts, self._run_dir), "the depot to start", limit)
        ready = self._trainer.ready.remote(self._run_dir)
        deadline = time.monotonic() + limit * min(2, self._settings.trainer.processes)  # ranks wait for one another
        while not ray.wait([ready], timeout=POLL_S)[0] and time.monotonic() < deadline:
            self._ranks.look_after()
        self._steps, self._version = self._get(ready, "the trainer to start", POLL_S)
        if self._evaluator is not None:
            self._evaluator.ask.remote(ray.put(list(questions.held_out)))
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
        self._searchers.begin(self._depot)

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
            self._look_around()
            if time.monotonic() > deadline:
                self._ranks.blame()
                round_ = (step - 1) // self._sync
                missing = self._get(self._depot.missing.remote(round_), "the depot")
                raise RunFailedError(
                    f"step {step} was not done within async.wait_limit_s = {self._limit:g} s: {missing}."
                )
        self._look_around()
        if self._publishing is not None and ray.wait([self._publishing], timeout=0)[0]:
            self._get(self._publishing, "the depot to take published weights")
            self._publishing = None
        return self._get(reference, "the trainer")

    def _look_around(self) -> None:
        """Looks after searchers; and, now and then, for what others ask of the run, which is a look at the disk."""
        self._searchers.look_after()
        self._ranks.look_after()
        now = time.monotonic()
        if now - self._served_at >= POLL_S:
            self._served_at = now
            self._requests.serve(self._searchers.answer)

    def _send_home(self) -> None:
        self._is_searching = False
        self._get(self._depot.stop.remote(), "the depot")
        self._searchers.send_home()

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

    def evaluator(self) -> Evaluate | None:
        """See `Journey.evaluator`."""
        if self._evaluator is None:
            return None

        def evaluate(tensors: Tensors, version: int, **options: Any) -> Evaluation:
            asked = self._evaluator.evaluate.remote(tensors, version, options)
            try:
                return ray.get(asked)
            except RayTaskError as error:
                raise RunFailedError(f"an evaluation failed: {reason_of(error)}") from error
            except RayError as error:
                raise EvaluatorLostError(f"the evaluator died ({reason_of(error)})") from error

        return evaluate

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
        if self._temporary is not None:
            self._temporary.remove()

    def _get(self, reference: Any, awaited: str, limit_s: float | None = None) -> Any:
        """The value of a reference, within the limit, which is `async.wait_limit_s` unless given.

        Raises:
            RunFailedError: the limit passed, or the process failed or died.
            OSError: the process could not write.
        """
        try:
            return ray.get(reference, timeout=limit_s or self._limit)
        except GetTimeoutError as error:
            self._ranks.blame()
            raise RunFailedError(
                f"waited {limit_s or self._limit:g} s for {awaited} (async.wait_limit_s = {self._limit:g})."
            ) from error
        except RayTaskError as error:
            if isinstance(error.cause, OSError):
                raise error.cause from error
            self._ranks.blame(str(error))
            if isinstance(error.cause, RayActorError):
                raise RunFailedError(
                    f"waiting for {awaited}: a process that it asked has died; go on from the newest checkpoint with "
                    f"tba resume."
                ) from error
            raise RunFailedError(f"waiting for {awaited}: {reason_of(error)}") from error
        except RayError as error:  # it died, its node is lost, or the system ended it for want of memory
            self._ranks.blame(str(error))
            raise RunFailedError(
                f"waiting for {awaited}: its process died ({reason_of(error)}); go on from the newest checkpoint with "
                f"tba resume."
            ) from error


def _check_listens(address: str) -> None:
    """OSError if nothing listens at `host:port`, which Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_LIMIT_S).close()
