"""What runs in each process of an async run: the depot, the trainer, the searchers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from tba import metrics as m
from tba.buffer.entries import Draw, EmptyBufferError
from tba.buffer.options import Options
from tba.buffer.shards import Call, Shard
from tba.cluster_shards import RemoteShards
from tba.depot import Depot
from tba.inflight import Lookout
from tba.reading import check_settings
from tba.records import Group, Lease, Prompt
from tba.settings import Settings
from tba.weights import Tensors, Weights, check_monotone

if TYPE_CHECKING:
    from tba.batch import Batch
    from tba.recorder import Source


YIELDS = 10
"""How much nicer depot and searchers are than the trainer they share a machine with: who is ahead makes room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A publication, without its tensors."""

    version: int
    round: int
    digest: str
    ref_version: int = 0

    @staticmethod
    def of(weights: Weights) -> Notice:
        """What is to be said of `weights`."""
        return Notice(
            version=weights.version, round=weights.round, digest=weights.digest, ref_version=weights.ref_version
        )

    def weights(self, tensors: Tensors, reference: Tensors | None = None) -> Weights:
        """The publication with its tensors, and with its reference's where they are needed."""
        return Weights(
            version=self.version, round=self.round, digest=self.digest, tensors=tensors,
            ref_version=self.ref_version, reference=reference,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What a searcher is to do next."""

    leases: Sequence[Lease]
    notice: Notice
    """The newest publication."""
    tensors: Sequence[Any]
    """One reference to its tensors, owned by the driver."""
    reference: Sequence[Any]
    """The same to the tensors of the policy's reference; None are there for the start policy."""
    run_attempt: int


class DepotProcess:
    """Depot and weight store behind waits; every wait is the depot's, so that nobody else polls.

    consumes: groups from searchers, notices from the trainer
    waits for: in `lease`, the lead; in `draw`, enough delivered prompts, the draws before it, and data young enough
    woken by: `publish`, `deliver`, `draw`, `stop`
    produces: leases, draws, the newest weights
    """

    def __init__(
        self, tree: dict[str, Any], prompts: Sequence[Prompt], resume_from: str | None, shards: Sequence[Any] = ()
    ) -> None:
        """`tree` is the resolved settings tree; `shards` are handles of the buffer's shards, if it has any."""
        settings = check_settings(tree)
        remote = RemoteShards(shards, limit_s=settings.async_.wait_limit_s) if shards else None
        self._depot = Depot(prompts, settings, lead=settings.async_.lead, shards=remote)
        self._batch_prompts = settings.search.batch_prompts
        self._max_tokens = settings.trainer.micro_batch_tokens
        if resume_from is not None:
            self._depot.load(Path(resume_from))
        self._changed = asyncio.Condition()
        self._newest: Notice | None = None
        self._tensors: Sequence[Any] = ()
        self._reference: Sequence[Any] = ()
        self._is_stopped = False
        self._next_draw = 0
        self._lacking = ""
        self._out: dict[str, dict[int, Lease]] = {}
        self._delivered: dict[str, int] = {}
        self._last_delivery: dict[str, float] = {}
        self._times: dict[str, dict[str, float]] = {}

    async def ready(self) -> int:
        """The run's attempt, once the depot is up."""
        use_threads(1)
        settle(nicer_by=YIELDS)
        return self._depot.attempt

    async def begin(self, step: int) -> None:
        """Makes `step` the first to draw for: calls may arrive in another order than they were made in."""
        async with self._changed:
            self._next_draw = step
            self._changed.notify_all()

    async def publish(
        self, notice: Notice, tensors: Sequence[Any], reference: Sequence[Any] = (), after: None = None
    ) -> None:
        """Makes a publication the newest; `tensors` holds one reference, and so does `reference`.

        The latter counts only where the version of the policy's reference is another than before.
        `after` is what the publication before it returned, which orders the two.
        """
        del after
        check_monotone(self._newest, notice)
        async with self._changed:
            if self._newest is None or notice.ref_version != self._newest.ref_version:
                self._reference = reference
            self._newest, self._tensors = notice, tensors
            self._depot.expect(notice.version, notice.digest)
            self._changed.notify_all()

    async def latest(self) -> tuple[Notice | None, Sequence[Any]]:
        """The newest publication."""
        return self._newest, self._tensors

    async def lease(self, searcher: str) -> Orders | None:
        """The next prompts for a searcher, once the lead allows them; None when the run is over."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_stopped or self._may_search())
            if self._is_stopped or self._newest is None:
                return None
            leases = self._depot.leases.take(self._batch_prompts)
            self._out.setdefault(searcher, {}).update({lease.number: lease for lease in leases})
            return Orders(leases=leases, notice=self._newest, tensors=self._tensors, reference=self._reference,
                          run_attempt=self._depot.attempt)

    def _may_search(self) -> bool:
        newest, depot = self._newest, self._depot
        return newest is not None and depot.may_search(newest.round)

    async def deliver(self, searcher: str, groups: Sequence[Group], times: dict[str, float]) -> None:
        """Takes groups in."""
        async with self._changed:
            for group in groups:
                self._depot.deliver(group)
                self._out.get(searcher, {}).pop(group.number, None)
            self._delivered[searcher] = self._delivered.get(searcher, 0) + len(groups)
            self._last_delivery[searcher] = time.monotonic()
            self._times[searcher] = times
            gc.freeze()  # records hold no cycles: they go when nothing refers to them
            self._changed.notify_all()

    async def give_back(self, searcher: str) -> tuple[int, int]:
        """Queues a dead searcher's open prompts again; returns how many, and how many groups it had delivered."""
        async with self._changed:
            lost = self._depot.leases.give_back(list(self._out.pop(searcher, {}).values()))
            self._changed.notify_all()
            return len(lost), self._delivered.pop(searcher, 0)

    async def draw(self, step: int, round_: int, version: int) -> tuple[Batch, dict[str, Any], list[Source]]:
        """The batch of `step` and its groups' sources, once its round has its data and earlier steps have theirs.

        Searchers that are far ahead can leave nothing in the buffer that is young enough (`buffer.recent_age`,
        `buffer.max_age`): then it waits for what they search next. Batches are made here: as tensors they
        take the trainer no time to receive.

        Raises:
            EmptyBufferError: nothing can be drawn, and waiting would not change it.
        """
        from tba.batch import collate
        from tba.recorder import Source

        async with self._changed:
            await self._changed.wait_for(lambda: self._next_draw == step and self._depot.may_train(round_))
            while (drawn := self._draw(round_, version)) is None:
                await self._changed.wait()
            draws, found = drawn
            self._next_draw = step + 1
            self._changed.notify_all()
        started = time.perf_counter()
        batch = collate(draws, max_tokens=self._max_tokens)
        found = {**found, m.COLLATE_SECONDS: time.perf_counter() - started}
        return batch, found, [Source.of(draw) for draw in draws]

    def _draw(self, round_: int, version: int) -> tuple[list[Draw], dict[str, Any]] | None:
        """A draw; None while there is nothing to draw but something may still come.

        It will: round `round_` + lead is not searched for before the weights of `round_` are out, so that its data
        have an age of at most sync_every - 1 in every step of `round_`, and no setting may call that too old.
        """
        self._lacking = ""
        try:
            return self._depot.draw(version)
        except EmptyBufferError as error:
            depot, newest = self._depot, self._newest
            is_last = newest is not None and newest.round >= round_ and not self._may_search()
            if not depot.buffer.inserted or (is_last and not depot.leases.ledger()["open"]):
                raise
            self._lacking = f"; {error}"
            return None

    async def missing(self, round_: int) -> str:
        """What a trainer that waits for `round_` still lacks, and who was heard of last."""
        now = time.monotonic()
        heard = [f"{name} {now - at:.0f} s ago" for name, at in sorted(self._last_delivery.items())]
        return (
            f"round {round_} needs {self._depot.pace.before(round_ + 1)} prompts delivered, "
            f"{self._depot.leases.delivered} are; prompts {self._depot.leases.ledger()}; "
            f"last deliveries: {', '.join(heard) or 'none'}{self._lacking}"
        )

    async def ledger(self) -> dict[str, Any]:
        """See `Depot.ledger`."""
        return self._depot.ledger()

    async def times(self) -> dict[str, dict[str, float]]:
        """Seconds that each searcher has spent on each part of its work."""
        return self._times

    async def save(self, path: str) -> None:
        """See `Depot.save`."""
        self._depot.save(Path(path))

    async def stop(self) -> None:
        """Sends searchers home when they next ask."""
        async with self._changed:
            self._is_stopped = True
            self._changed.notify_all()


class ShardProcess:
    """A shard of the buffer.

    consumes: what the depot tells and asks
    waits for: nothing
    woken by: the depot
    produces: groups drawn, reports
    """

    def __init__(self, options: Options) -> None:
        """`options` are the shard's own."""
        self._shard = Shard(options)

    def ready(self) -> None:
        """Nothing, once the shard is up."""
        settle(nicer_by=YIELDS)

    def do(self, calls: Sequence[Call]) -> Any:
        """Does one after another; returns what the last one gives."""
        return [getattr(self._shard, name)(*values) for name, *values in calls][-1]


def settle(*, nicer_by: int = 0) -> None:
    """Ends the start of a process: it makes room by `nicer_by`, and spares the garbage collector what is there now.

    What the libraries hold after their import takes the collector 0.2 s a pass, in which the process stands still.
    """
    threads = Path("/proc/self/task")
    if threads.is_dir():  # niceness is each thread's own here, and the caller may be one of several
        for thread in map(int, os.listdir(threads)):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nicer_by)
    else:
        os.nice(nicer_by)
    gc.collect()
    gc.freeze()


def use_threads(threads: int) -> None:
    """Makes the calling thread compute with `threads` threads."""
    import torch

    torch.set_num_threads(threads)


def start_process(tree: dict[str, Any], threads: int) -> tuple[Settings, Any, Any]:
    """Settings, task and start policy in a new process that is to use `threads` threads."""
    use_threads(threads)
    from tba import assembly

    settings = check_settings(tree)
    task = assembly.make_task_of(settings)
    return settings, task, assembly.make_policy(settings, task)


class TrainerProcess:
    """The trainer, on a thread that does nothing else and never asks Ray between two steps.

    consumes: draws, one call of `feed` a step
    waits for: on the trainer's thread, the next batch; in `step` and `publication`, what that thread makes
    woken by: `feed`; the trainer's thread
    produces: metrics, and weights as return values, which the driver owns
    """

    def __init__(self, tree: dict[str, Any], threads: int, resume_from: str | None, run_dir: str) -> None:
        """`tree` is the resolved settings tree."""
        from tba.assembly import make_recorder
        from tba.trainer import Trainer

        settings, _, policy = start_process(tree, threads)
        self._trainer = Trainer(policy.trainable_copy(), settings, make_recorder(settings, Path(run_dir)))
        self._sync = settings.trainer.sync_every
        self._limit_s = settings.async_.wait_limit_s
        self._thread = ThreadPoolExecutor(1, "trainer", initializer=use_threads, initargs=(threads,))
        self._steps: dict[int, Future[dict[str, Any]]] = {}
        self._published: dict[int, Future[Weights]] = {}
        if resume_from is not None:
            self._trainer.load(Path(resume_from))
        self._free = time.perf_counter()
        self._publish_s = 0.0
        self._sent_reference = 0
        self._publish()

    def ready(self) -> tuple[int, int]:
        """(steps tried, version), once the trainer is up."""
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
        record = {
            **self._trainer.step(batch, sources, search_kl=found[m.SEARCH_KL]), **found,
            m.ROUND: (step - 1) // self._sync, m.WAIT_SECONDS: started - self._free,
            m.PUBLISH_SECONDS: self._publish_s,
        }
        self._publish_s = 0.0
        if step % self._sync == 0:
            self._publish()
        self._free = time.perf_counter()
        return record

    def _publish(self) -> None:
        started = time.perf_counter()
        round_ = self._trainer.steps // self._sync
        weights = self._trainer.publish(round_)
        if weights.ref_version == self._sent_reference:
            weights = dataclasses.replace(weights, reference=None)
        self._sent_reference = weights.ref_version
        self._publication_of(round_).set_result(weights)
        self._publish_s = time.perf_counter() - started

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

        Third come the tensors of the reference, or None if they were in an earlier publication.
        """
        weights = self._publication_of(round_).result(timeout=self._limit_s)
        del self._published[round_]
        return Notice.of(weights), weights.tensors, weights.reference

    def weights(self) -> tuple[Notice, Any]:
        """The weights as they are; only while no step is under way."""
        weights = self._trainer.publish(self._trainer.steps // self._sync)
        return Notice.of(weights), weights.tensors

    def begin(self) -> None:
        """Starts the clock of the next wait: at the start, and after a checkpoint, which is not waiting for data."""
        self._free = time.perf_counter()

    def save(self, path: str) -> None:
        """See `Trainer.save`; only while no step is under way."""
        self._trainer.save(Path(path))

    def save_model(self, path: str) -> None:
        """Writes the policy as a Hugging Face model folder; only while no step is under way."""
        self._trainer.policy.save(Path(path))


class SearcherProcess:
    """A searcher that asks, answers and scores until the run is over; it may die at any time.

    consumes: leases
    waits for: the lead, inside the depot's `lease`
    woken by: the depot's answer
    produces: groups
    """

    def __init__(self, tree: dict[str, Any], threads: int, name: str) -> None:
        """`tree` is the resolved settings tree."""
        from tba import assembly

        settings, task, policy = start_process(tree, threads)
        self._searcher = assembly.make_searcher(settings, task, policy, name)
        self._searcher.warm_up(sorted(policy.stop_ids)[:1])
        self._adopt_every = settings.engine.adopt_every

    def run(self, depot: Any) -> None:
        """Searches with the newest weights, batch after batch; `depot` is the handle of the depot's process.

        The next leases are asked for before groups are handed over, which takes time on both sides; and groups
        are handed over only after those before them have arrived, so that they arrive in their order.
        """
        settle(nicer_by=YIELDS)
        searcher = self._searcher
        lookout = None if self._adopt_every is None else Lookout(
            self._adopt_every, ask=depot.latest.remote, read=ray.get,
            is_here=lambda handle: bool(ray.wait([handle], timeout=0)[0]))
        asked: Any = depot.lease.remote(searcher.name)
        delivered: Any = None
        while True:
            started = time.perf_counter()
            orders: Orders | None = ray.get(asked)
            searcher.times.idle_s += time.perf_counter() - started
            if orders is None:
                break
            if not searcher.holds(notice := orders.notice):
                (tensors,) = orders.tensors
                is_new = notice.ref_version != searcher.ref_version
                searcher.adopt(notice.weights(ray.get(tensors), ray.get(orders.reference[0]) if is_new else None))
            groups = list(searcher.search(orders.leases, run_attempt=orders.run_attempt, lookout=lookout))
            asked = depot.lease.remote(searcher.name)
            if delivered is not None:
                ray.get(delivered)
            delivered = depot.deliver.remote(searcher.name, groups, dataclasses.asdict(searcher.times))
        if delivered is not None:
            ray.get(delivered)
