"""Processor time of a depot in a process of its own for each group that reaches it through Ray.

What `scaling.py` leaves out of a delivery: Ray's receiving, its threads, its answer. The depot is full, groups are 8
completions x 128 tokens, a message holds 4 of them and is answered before the sender's next but 16.

    OMP_NUM_THREADS=1 python benchmarks/scaling_ray.py --rounds 3
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import ray

import scaling
from tba.depot import Depot
from tba.records import Group, Lease

AHEAD = 16
"""Messages on their way at once."""


class Served:
    """A depot behind the calls of searchers."""

    def __init__(self) -> None:
        """It is full from the start."""
        asked = scaling.prompts()
        self._depot = Depot(asked, scaling.settings_of(64, None), lead=None)
        scaling.fill(self._depot, asked)

    async def lease(self) -> list[Lease]:
        """The next prompts."""
        return self._depot.leases.take(scaling.BATCH_PROMPTS)

    async def deliver(self, groups: Sequence[Group]) -> None:
        """Takes groups in."""
        for group in groups:
            self._depot.deliver(group)

    async def spent(self) -> float:
        """Seconds of processor time of all threads of this process so far."""
        return time.process_time()


def second(depot: Any, source: scaling.Prepared) -> float:
    """Processor seconds of the depot's process for the groups of one second of the bar, their leases included."""
    before = ray.get(depot.spent.remote())
    sent: deque[Any] = deque()
    for _ in range(scaling.CARRIED_GROUPS // scaling.BATCH_PROMPTS):
        groups = list(source.search(ray.get(depot.lease.remote())))
        sent.append(depot.deliver.remote(groups))
        if len(sent) > AHEAD:
            ray.get(sent.popleft())
    ray.get(list(sent))
    return ray.get(depot.spent.remote()) - before


def main() -> None:
    """Prints the share of a second that the process is at work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        depot: Any = ray.remote(Served).options(num_cpus=0).remote()
        source = scaling.Prepared("all", 7)
        second(depot, source)
        found = [second(depot, source) for _ in range(chosen.rounds)]
    finally:
        ray.shutdown()
    print(f"share of the depot's process at {scaling.CARRIED_GROUPS} groups/s through Ray: "
          f"{statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})")


if __name__ == "__main__":
    main()
