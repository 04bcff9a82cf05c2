"""The depot's process: buffer, leases and weight store behind waits."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba import metrics as m
from tba.buffer.entries import Draw, EmptyBufferError
from tba.cluster.notices import Notice, Orders
from tba.cluster.shards import RemoteShards
from tba.cluster.start import YIELDS, check_run_dir, settle, use_threads
from tba.depot import WRONG_WEIGHTS, Depot
from tba.reading import check_settings
from tba.records import Group, Lease, Prompt
from tba.weights import check_monotone

if TYPE_CHECKING:
    from tba.batch import Batch
    from tba.recorder import Source


@dataclass(slots=True)
class Holder:
    """What the depot knows of one life of a searcher, named `<searcher>.<number of the life>`."""

    where: str = ""
    """Its node and process."""
    out: dict[int, tuple[Lease, float]] = field(default_factory=dict[int, tuple[Lease, float]])
    """Leases that it holds by number, and when each was handed out."""
    delivered: int = 0
    """Groups."""
    wrong: int = 0
    """Groups in a row that echoed other weights than were published."""
    overdue: int = 0
    """Prompts that it held for too long."""
    overdue_since: float | None = None
    """When the first of these was handed out, if nothing has come since they were handed out again."""
    heard_at: float | None = None
    """When it delivered last."""
    is_leaving: bool = False
    times: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds by part of its work."""

    def told(self, now: float) -> dict[str, Any]:
        """The same at the moment `now`, as plain data: seconds since, instead of moments."""
        def since(moment: float | None) -> float | None:
            return None if moment is None else now - moment

        return {
            "where": self.where, "held": len(self.out), "delivered": self.delivered, "wrong": self.wrong,
            "overdue": self.overdue, "stuck_s": since(self.overdue_since), "heard_s": since(self.heard_at),
            "is_leaving": self.is_leaving,
        }


class DepotProcess:
    """Depot and weight store behind waits; every wait is the depot's, so that nobody else polls.

    consumes: groups from searchers, notices from the trainer
    waits for: in `lease`, the lead or the end; in `draw`, enough delivered prompts, the draws before it, and data that
        is young enough
    woken by: `publish`, `deliver`, `draw`, `give_back`, `dismiss`, `stop`, and its own look for overdue leases
    produces: leases, draws, the newest weights
    """

    def __init__(self, tree: dict[str, Any], resume_from: str | None, shards: Sequence[Any] = ()) -> None:
        """`tree` is the resolved settings tree; `shards` are handles of the buffer's shards, if it has any."""
        self._settings, self._resume_from, self._shards = check_settings(tree), resume_from, shards
        settings = self._settings
        self._batch_prompts = settings.search.batch_prompts
        self._max_tokens, self._ranks = settings.trainer.micro_batch_tokens, settings.trainer.processes
        self._changed = asyncio.Condition()
        self._newest: Notice | None = None
        self._tensors: Sequence[Any] = ()
        self._reference: Sequence[Any] = ()
        self._is_stopped = False
        self._next_draw = 0
        self._lacking = ""
        self._holders: dict[str, Holder] = {}
        self._lease_limit_s = settings.async_.longest_lease_s
        self._reclaiming: asyncio.Task[None] | None = None

    async def ready(self, prompts: Sequence[Prompt], run_dir: str) -> int:
        """Takes the training prompts; returns the run's attempt, once the depot is up.

        Raises:
            FileNotFoundError: `run_dir` is not there on this node.
        """
        use_threads(1)
        settle(nicer_by=YIELDS)
        check_run_dir(run_dir, "depot")
        self.hold(prompts)
        return self._depot.attempt

    def hold(self, prompts: Sequence[Prompt]) -> None:
        """Makes the depot, and restores it from the checkpoint if there is one."""
        settings, shards = self._settings, self._shards
        remote = RemoteShards(shards, limit_s=settings.async_.wait_limit_s) if shards else None
        self._depot = Depot(prompts, settings, lead=settings.lead, shards=remote)
        if self._resume_from is not None:
            self._depot.load(Path(self._resume_from))

    async def begin(self, step: int) -> None:
        """Makes `step` the first to draw for: calls may arrive in another order than they were made in."""
        async with self._changed:
            self._next_draw = step
            self._changed.notify_all()
        if self._reclaiming is None:
            self._reclaiming = asyncio.create_task(self._reclaim())

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

    # ---- searchers ----

    async def lease(self, name: str, where: str = "") -> Orders | None:
        """The next prompts for a life of a searcher, once the lead allows them; None when it is to end.

        `name` is that of the life, as in `Holder.life`; `where` is told to whoever asks for `holders`.
        """
        holder = self._holders.setdefault(name, Holder(where=where))
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_stopped or holder.is_leaving or self._may_search())
            if self._is_stopped or holder.is_leaving or self._newest is None:
                return None
            leases = self._depot.leases.take(self._batch_prompts)
            now = time.monotonic()
            holder.out.update({lease.number: (lease, now) for lease in leases})
            return Orders(leases=leases, notice=self._newest, tensors=self._tensors, reference=self._reference,
                          run_attempt=self._depot.attempt)

    def _may_search(self) -> bool:
        newest, depot = self._newest, self._depot
        return newest is not None and depot.may_search(newest.round)

    async def deliver(self, name: str, groups: Sequence[Group], times: dict[str, float]) -> None:
        """Takes groups in."""
        holder = self._holders.setdefault(name, Holder())
        async with self._changed:
            for group in groups:
                reason = self._depot.deliver(group)
                holder.out.pop(group.number, None)
                holder.wrong = holder.wrong + 1 if reason == WRONG_WEIGHTS else 0
            holder.delivered += len(groups)
            holder.heard_at, holder.overdue_since, holder.times = time.monotonic(), None, times
            gc.freeze()  # records hold no cycles: they go when nothing refers to them
            self._changed.notify_all()

    async def give_back(self, name: str) -> tuple[int, int, int]:
        """Queues a dead life's open prompts again; how many, and the groups delivered by it and by all lives.

        Whatever it asked for and has not got, it does not get.
        """
        async with self._changed:
            holder = self._holders.setdefault(name, Holder())
            holder.is_leaving = True
            lost = self._depot.leases.give_back([lease for lease, _ in holder.out.values()])
            holder.out.clear()
            holder.overdue_since = None
            self._changed.notify_all()
            return len(lost), holder.delivered, sum(one.delivered for one in self._holders.values())

    async def dismiss(self, name: str) -> None:
        """Lets a life end when it next asks; it still delivers what it holds."""
        async with self._changed:
            self._holders.setdefault(name, Holder()).is_leaving = True
            self._changed.notify_all()

    async def holders(self) -> dict[str, dict[str, Any]]:
        """What each life of a searcher does: see `Holder.told`."""
        now = time.monotonic()
        return {name: holder.told(now) for name, holder in self._holders.items()}

    async def _reclaim(self) -> None:
        """Hands out again, for ever, what has been held for longer than the limit."""
        while not self._is_stopped:
            await asyncio.sleep(min(1.0, self._lease_limit_s / 4))
            await self.give_back_overdue(time.monotonic())

    async def give_back_overdue(self, now: float) -> None:
        """Queues prompts again that have been held since longer before `now` than the limit."""
        async with self._changed:
            for holder in self._holders.values():
                overdue = [(lease, since) for lease, since in holder.out.values() if now - since > self._lease_limit_s]
                if overdue:
                    self._depot.leases.give_back([lease for lease, _ in overdue])
                    for lease, _ in overdue:
                        del holder.out[lease.number]
                    holder.overdue += len(overdue)
                    holder.overdue_since = min(since for _, since in overdue)
                    self._changed.notify_all()

    # ---- draws ----

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
        batch = collate(draws, max_tokens=self._max_tokens, ranks=self._ranks)
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
        heard = [f"{name} {now - holder.heard_at:.0f} s ago"
                 for name, holder in sorted(self._holders.items()) if holder.heard_at is not None]
        return (
            f"round {round_} needs {self._depot.pace.before(round_ + 1)} prompts delivered, "
            f"{self._depot.leases.delivered} are; prompts {self._depot.leases.ledger()}; "
            f"last deliveries: {', '.join(heard) or 'none'}{self._lacking}"
        )

    async def ledger(self) -> dict[str, Any]:
        """See `Depot.ledger`."""
        return self._depot.ledger()

    async def times(self) -> dict[str, dict[str, float]]:
        """Seconds that each searcher has spent on each part of its work, in all of its lives."""
        found: dict[str, dict[str, float]] = {}
        for name, holder in self._holders.items():
            spent = found.setdefault(name.rpartition(".")[0], {})
            for part, seconds in holder.times.items():
                spent[part] = spent.get(part, 0.0) + seconds
        return found

    async def save(self, path: str) -> None:
        """See `Depot.save`."""
        self._depot.save(Path(path))

    async def stop(self) -> None:
        """Sends searchers home when they next ask."""
        async with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
