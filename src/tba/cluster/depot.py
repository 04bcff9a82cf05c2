"""The depot's process: buffer, leases and weight store behind waits."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba import metrics as m
from tba.buffer.entries import Draw, EmptyBufferError
from tba.cluster.notices import Notice, Orders
from tba.cluster.shards import RemoteShards
from tba.cluster.start import YIELDS, settle, use_threads
from tba.depot import Depot
from tba.reading import check_settings
from tba.records import Group, Lease, Prompt
from tba.weights import check_monotone

if TYPE_CHECKING:
    from tba.batch import Batch
    from tba.recorder import Source


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
