"""The driver's side of a trainer's ranks: who of them died, or does not answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from tba.cluster.searchers import RunFailedError, reason_of

LATE = "imed out"
"""What the messages of collectives that took too long have in common."""
GO_ON = "go on from the newest checkpoint with tba resume RUN, with any number of ranks (trainer.processes)."
"""The way out."""
LOOK_SHARE = 0.25
"""Of `async.wait_limit_s`: what a rank has to answer within when it is looked at."""


def room_for(needs: Mapping[str, float], nodes: Sequence[Mapping[str, float]], most: int) -> int:
    """How many processes that take `needs` the nodes have room for, empty; on each up to `most`."""
    return sum(
        min([most, *(int(node.get(kind, 0.0) // amount) for kind, amount in needs.items() if amount)]) for node in nodes
    )


class TrainerRanks:
    """All ranks of a trainer; the first is the one that the driver speaks to.

    consumes: their ends
    waits for: nothing; when something has failed, answers to a look, for a quarter of `async.wait_limit_s`
    woken by: the driver
    produces: the name of the rank at fault
    """

    def __init__(self, first: Any, others: Sequence[Any], *, limit_s: float) -> None:
        """`others` are sent to work; `limit_s` is `async.wait_limit_s`."""
        self._all, self._limit_s = [first, *others], LOOK_SHARE * limit_s
        self._running = {handle.run.remote(): rank for rank, handle in enumerate(others, 1)}

    def look_after(self) -> None:
        """RunFailedError if a rank has ended, which none does by itself."""
        if self._running and ray.wait(list(self._running), timeout=0)[0]:
            self.blame()

    def blame(self, said: str = LATE) -> None:
        """Finds out which rank is at fault for what failed; nothing if none is, or there is one rank only.

        Who died comes before who does not answer, and that before who failed: the others fail for want of it. If what
        failed, as `said`, was a wait, who has done least comes last.

        Raises:
            RunFailedError: with its number.
        """
        if len(self._all) == 1:
            return
        asked = {handle.look.remote(): rank for rank, handle in enumerate(self._all)}
        answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=self._limit_s)
        done: dict[int, int] = {}
        for reference in sorted(answered, key=asked.__getitem__):
            try:
                done[asked[reference]] = ray.get(reference)
            except RayActorError as error:
                rank = asked[reference]
                raise RunFailedError(f"{self._name(rank)} died ({reason_of(error)}); {GO_ON}") from error
            except RayError:
                continue
        if silent:
            rank = min(asked[reference] for reference in silent)
            raise RunFailedError(f"{self._name(rank)} does not answer within {self._limit_s:g} s; {GO_ON}")
        for reference in ray.wait(list(self._running), num_returns=len(self._running), timeout=0)[0]:
            try:
                ray.get(reference)
            except RayTaskError as error:
                if LATE not in str(error):
                    rank = self._running[reference]
                    raise RunFailedError(f"{self._name(rank)} failed ({reason_of(error)}); {GO_ON}") from error
        least, most = min(done.values(), default=0), max(done.values(), default=0)
        if LATE in said and least < most:
            rank = next(rank for rank, value in done.items() if value == least)
            raise RunFailedError(
                f"{self._name(rank)} stands still: it has begun {least} passes, where others have begun {most}; {GO_ON}"
            )

    def _name(self, rank: int) -> str:
        return f"trainer rank {rank} of {len(self._all)}"
