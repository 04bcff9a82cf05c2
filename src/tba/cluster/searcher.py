"""A searcher's process."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import ray

from tba.cluster.notices import Orders
from tba.cluster.start import YIELDS, settle, start_process
from tba.inflight import Lookout


class SearcherProcess:
    """A searcher that asks, answers and scores until the run is over; it may die at any time.

    consumes: leases
    waits for: the lead, inside the depot's `lease`
    woken by: the depot's answer
    produces: groups
    """

    def __init__(self, tree: dict[str, Any], threads: int, name: str, brought: object = None) -> None:
        """`tree` is the resolved settings tree; `brought` is what a script hands over for scoring."""
        from tba import assembly

        settings, task, policy = start_process(tree, threads, brought)
        self._searcher = assembly.make_searcher(settings, task, policy, name)
        self._searcher.warm_up(sorted(policy.stop_ids)[:1])
        self._adopt_every = settings.engine.adopt_every

    def run(self, depot: Any, life: str) -> None:
        """Searches with the newest weights, batch after batch; `depot` is the handle of the depot's process.

        `life` names this life of the searcher to the depot. The next leases are asked for before groups are handed
        over, which takes time on both sides; and groups are handed over only after those before them have arrived,
        so that they arrive in their order.
        """
        settle(nicer_by=YIELDS)
        searcher = self._searcher
        lookout = None if self._adopt_every is None else Lookout(
            self._adopt_every, ask=depot.latest.remote, read=ray.get,
            is_here=lambda handle: bool(ray.wait([handle], timeout=0)[0]))
        asked: Any = depot.lease.remote(life, f"{ray.util.get_node_ip_address()} pid {os.getpid()}")
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
            asked = depot.lease.remote(life)
            if delivered is not None:
                ray.get(delivered)
            delivered = depot.deliver.remote(life, groups, dataclasses.asdict(searcher.times))
        if delivered is not None:
            ray.get(delivered)
