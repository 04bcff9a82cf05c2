"""A searcher's process."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ray

from tba.cluster.notices import Orders
from tba.cluster.scorers import RemoteScoring
from tba.cluster.start import YIELDS, settle, start_process
from tba.inflight import Lookout

if TYPE_CHECKING:
    from tba.searcher import Found

POLL_S = 1.0
"""Seconds between looks at whether groups could be handed over, while leases are awaited."""


class SearcherProcess:
    """A searcher that asks, answers and scores until the run is over; it may die at any time.

    consumes: leases
    waits for: the lead, inside the depot's `lease`; scores of the batch before
    woken by: the depot's answer; its own scoring
    produces: groups
    """

    def __init__(
        self, tree: dict[str, Any], threads: int, name: str, brought: object = None, scorers: Sequence[Any] = ()
    ) -> None:
        """`tree` is the resolved settings tree; `brought` is what a script hands over for scoring.

        `scorers` are the processes that score; none: it does so itself.
        """
        from tba import assembly

        settings, task, policy = start_process(tree, threads, brought)
        self._searcher = assembly.make_searcher(settings, task, policy, name)
        if scorers:
            self._searcher.scoring = RemoteScoring(scorers)
        self._searcher.warm_up(sorted(policy.stop_ids)[:1])
        self._adopt_every = settings.engine.adopt_every

    def run(self, depot: Any, life: str) -> None:
        """Searches with the newest weights, batch after batch; `depot` is the handle of the depot's process.

        `life` names this life of the searcher to the depot. The next leases are asked for while groups are scored and
        handed over, and sampled if they come meanwhile. Groups are handed over only after those before them have
        arrived, so that they arrive in their order.
        """
        settle(nicer_by=YIELDS)
        searcher = self._searcher
        lookout = None if self._adopt_every is None else Lookout(
            self._adopt_every, ask=depot.latest.remote, read=ray.get,
            is_here=lambda handle: bool(ray.wait([handle], timeout=0)[0]))
        asked: Any = depot.lease.remote(life, f"{ray.util.get_node_ip_address()} pid {os.getpid()}")
        handing = ThreadPoolExecutor(1, "hander")
        handed: Future[float] | None = None
        while True:
            orders = self._awaited(asked, handed)
            if orders is None:
                break
            if not searcher.holds(notice := orders.notice):
                (tensors,) = orders.tensors
                is_new = notice.ref_version != searcher.ref_version
                searcher.adopt(notice.weights(ray.get(tensors), ray.get(orders.reference[0]) if is_new else None))
            found = searcher.sample(orders.leases, run_attempt=orders.run_attempt, lookout=lookout)
            if handed is not None:  # no more than one batch waits to be scored
                started = time.perf_counter()
                handed.result()
                searcher.times.scoring_s += time.perf_counter() - started
            handed = handing.submit(self._hand_over, depot, life, found)
            asked = depot.lease.remote(life)
        if handed is not None:
            handed.result()

    def _hand_over(self, depot: Any, life: str, found: Found) -> float:
        """Gives the depot groups once they are scored; returns when that was."""
        groups = self._searcher.scored(found)
        scored_at = time.perf_counter()
        ray.get(depot.deliver.remote(life, groups, dataclasses.asdict(self._searcher.times)))
        return scored_at

    def _awaited(self, asked: Any, handed: Future[float] | None) -> Orders | None:
        """What the depot answers; what goes wrong in the handing over meanwhile is raised here.

        As long as its own groups are being scored, the depot may wait for these: that is no idleness.
        """
        started = time.perf_counter()
        while not ray.wait([asked], timeout=POLL_S)[0]:
            if handed is not None and handed.done():
                handed.result()
        now = time.perf_counter()
        scored_at = started if handed is None else handed.result() if handed.done() else now
        scoring_s = max(0.0, scored_at - started)
        times = self._searcher.times
        times.scoring_s, times.idle_s = times.scoring_s + scoring_s, times.idle_s + now - started - scoring_s
        return ray.get(asked)
