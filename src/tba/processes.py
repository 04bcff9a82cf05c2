"""What runs in each process of an async run: the depot, the trainer, the searchers."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from tba import metrics as m
from tba.buffer.entries import Draw
from tba.depot import Depot
from tba.reading import check_settings
from tba.records import Group, Lease, Prompt
from tba.settings import Settings
from tba.weights import Weights, check_monotone

if TYPE_CHECKING:
    from tba.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A publication, without its tensors."""

    version: int
    round: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What a searcher is to do next."""

    leases: Sequence[Lease]
    notice: Notice
    """The newest publication."""
    tensors: Sequence[Any]
    """One reference to its tensors, owned by the driver."""
    run_attempt: int


class DepotProcess:
    """Depot and weight store behind waits; every wait is the depot's, so that nobody else polls.

    consumes: groups from searchers, notices from the trainer
    waits for: in `lease`, the lead; in `draw`, enough delivered prompts and the draws before it
    woken by: `publish`, `deliver`, `draw`, `stop`
    produces: leases, draws, the newest weights
    """

    def __init__(self, tree: dict[str, Any], prompts: Sequence[Prompt], resume_from: str | None) -> None:
        """`tree` is the resolved settings tree."""
        settings = check_settings(tree)
        self._depot = Depot(prompts, settings, lead=settings.async_.lead)
        self._batch_prompts = settings.search.batch_prompts
        if resume_from is not None:
            self._depot.load(Path(resume_from))
        self._changed = asyncio.Condition()
        self._newest: Notice | None = None
        self._tensors: Sequence[Any] = ()
        self._is_stopped = False
        self._next_draw: int | None = None
        self._out: dict[str, dict[int, Lease]] = {}
        self._delivered: dict[str, int] = {}
        self._last_delivery: dict[str, float] = {}
        self._times: dict[str, dict[str, float]] = {}

    async def ready(self) -> int:
        """The run's attempt, once the depot is up."""
        return self._depot.attempt

    async def publish(self, notice: Notice, tensors: Sequence[Any]) -> None:
        """Makes a publication the newest; `tensors` holds one reference."""
        check_monotone(self._newest, notice)
        async with self._changed:
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
            return Orders(leases=leases, notice=self._newest, tensors=self._tensors, run_attempt=self._depot.attempt)

    def _may_search(self) -> bool:
        newest, depot = self._newest, self._depot
        return newest is not None and depot.pace.may_search(depot.leases.next_round, newest.round)

    async def deliver(self, searcher: str, groups: Sequence[Group], times: dict[str, float]) -> None:
        """Takes groups in."""
        async with self._changed:
            for group in groups:
                self._depot.deliver(group)
                self._out.get(searcher, {}).pop(group.number, None)
            self._delivered[searcher] = self._delivered.get(searcher, 0) + len(groups)
            self._last_delivery[searcher] = time.monotonic()
            self._times[searcher] = times
            self._changed.notify_all()

    async def give_back(self, searcher: str) -> tuple[int, int]:
        """Queues a dead searcher's open prompts again; returns how many, and how many groups it had delivered."""
        async with self._changed:
            lost = self._depot.leases.give_back(list(self._out.pop(searcher, {}).values()))
            self._changed.notify_all()
            return len(lost), self._delivered.pop(searcher, 0)

    async def draw(self, step: int, round_: int, version: int) -> tuple[list[Draw], dict[str, Any]]:
        """The groups of `step`, once its round has its data and earlier steps have theirs."""
        async with self._changed:
            if self._next_draw is None:
                self._next_draw = step
            await self._changed.wait_for(lambda: self._next_draw == step and self._may_train(round_))
            drawn = self._depot.draw(version)
            self._next_draw = step + 1
            self._changed.notify_all()
            return drawn

    def _may_train(self, round_: int) -> bool:
        return self._depot.pace.may_train(round_, self._depot.leases.delivered)

    async def missing(self, round_: int) -> str:
        """What a trainer that waits for `round_` still lacks, and who was heard of last."""
        now = time.monotonic()
        heard = [f"{name} {now - at:.0f} s ago" for name, at in sorted(self._last_delivery.items())]
        return (
            f"round {round_} needs {self._depot.pace.before(round_ + 1)} prompts delivered, "
            f"{self._depot.leases.delivered} are; prompts {self._depot.leases.ledger()}; "
            f"last deliveries: {', '.join(heard) or 'none'}"
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


def start_process(tree: dict[str, Any], threads: int) -> tuple[Settings, Any, Any]:
    """Settings, task and start policy in a new process that is to use `threads` threads."""
    import torch

    torch.set_num_threads(threads)
    from tba import assembly

    settings = check_settings(tree)
    task = assembly.make_task_of(settings)
    return settings, task, assembly.make_policy(settings, task)


class TrainerProcess:
    """The trainer, fed with draws: a second thread makes the next batch while a step runs.

    consumes: draws, one call of `feed` a step
    waits for: in `step`, the batch that `feed` makes
    woken by: the driver's calls, in order
    produces: metrics, and weights as return values, which the driver owns
    """

    def __init__(self, tree: dict[str, Any], threads: int, resume_from: str | None) -> None:
        """`tree` is the resolved settings tree."""
        from tba.trainer import Trainer

        settings, _, policy = start_process(tree, threads)
        self._trainer = Trainer(policy.trainable_copy(), settings)
        self._max_tokens = settings.trainer.micro_batch_tokens
        self._limit_s = settings.async_.wait_limit_s
        self._fed: queue.Queue[tuple[int, Batch, dict[str, Any]]] = queue.Queue()
        if resume_from is not None:
            self._trainer.load(Path(resume_from))
        self._free = time.perf_counter()
        self._publish_s = 0.0

    def ready(self) -> tuple[int, int]:
        """(steps tried, version), once the trainer is up."""
        return self._trainer.steps, self._trainer.version

    @ray.method(concurrency_group="feed")
    def feed(self, step: int, drawn: tuple[list[Draw], dict[str, Any]]) -> None:
        """Makes the batch of a later step, on a thread of its own; calls come in the order of the steps."""
        from tba.batch import collate

        draws, found = drawn
        started = time.perf_counter()
        batch = collate(draws, max_tokens=self._max_tokens)
        self._fed.put((step, batch, {**found, m.COLLATE_SECONDS: time.perf_counter() - started}))

    def step(self, step: int, round_: int, fed: None) -> dict[str, Any]:
        """The optimizer step `step` on the batch fed for it; `fed` is what `feed` returned, which orders the two."""
        del fed
        number, batch, found = self._fed.get(timeout=self._limit_s)
        assert number == step, f"step {step} was fed the batch of step {number}"
        waited = time.perf_counter()
        made = self._trainer.step(batch)
        record = {
            **made, **found, m.ROUND: round_, m.WAIT_SECONDS: waited - self._free, m.PUBLISH_SECONDS: self._publish_s
        }
        self._publish_s = 0.0
        self._free = time.perf_counter()
        return record

    def publish(self, round_: int) -> tuple[Notice, Any]:
        """A publication: its notice, and its tensors."""
        started = time.perf_counter()
        waited = started - self._free
        weights = self._trainer.publish(round_)
        self._publish_s = time.perf_counter() - started
        self._free = time.perf_counter() - waited
        return Notice(version=weights.version, round=round_, digest=weights.digest), weights.tensors

    def begin(self) -> None:
        """Starts the clock of the first wait."""
        self._free = time.perf_counter()

    def save(self, path: str) -> None:
        """See `Trainer.save`."""
        self._trainer.save(Path(path))

    def save_model(self, path: str) -> None:
        """Writes the policy as a Hugging Face model folder."""
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

    def run(self, depot: Any) -> None:
        """Searches with the newest weights, batch after batch; `depot` is the handle of the depot's process."""
        held: Notice | None = None
        searcher = self._searcher
        deliver: Callable[..., Any] = depot.deliver.remote
        while True:
            asked = time.perf_counter()
            orders: Orders | None = ray.get(depot.lease.remote(searcher.name))
            searcher.times.idle_s += time.perf_counter() - asked
            if orders is None:
                return
            if orders.notice != held:
                held = orders.notice
                (tensors,) = orders.tensors
                searcher.adopt(
                    Weights(version=held.version, round=held.round, digest=held.digest, tensors=ray.get(tensors))
                )
            groups = list(searcher.search(orders.leases, run_attempt=orders.run_attempt))
            deliver(searcher.name, groups, dataclasses.asdict(searcher.times))
