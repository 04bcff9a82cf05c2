"""Prompts in the run's order, handed out as leases; and the pace of search and training."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tba.records import Lease, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Which prompts belong to which round, and who may go on."""

    first: int
    """Prompts of round 0: those searched for before the first step."""
    per_round: int
    """Prompts of every later round."""
    lead: int | None = None
    """Rounds a searcher may start beyond the newest published one; None: any."""

    def before(self, round_: int) -> int:
        """Prompts of all rounds before `round_`."""
        return 0 if round_ == 0 else self.first + (round_ - 1) * self.per_round

    def round_of(self, number: int) -> int:
        """The round of the prompt at place `number` of the run's order."""
        return 0 if number < self.first else 1 + (number - self.first) // self.per_round

    def may_search(self, round_: int, published: int) -> bool:
        """Whether round `round_` may start when the weights for round `published` are the newest."""
        return self.lead is None or round_ <= published + self.lead

    def most_delivered(self, published: int) -> int | None:
        """Prompts that can have been delivered while the weights for round `published` are the newest; None: any."""
        return None if self.lead is None else self.before(published + self.lead + 1)

    def may_train(self, round_: int, delivered: int) -> bool:
        """Whether the steps of round `round_` may start: enough prompts are delivered for its `reuse`."""
        return delivered >= self.before(round_ + 1)


class Leases:
    """Hands out the task's prompts for ever, each pass in a new order, and knows which are still out.

    The order is a function of (seed, pass). Prompts leased = delivered + open + lost at any moment.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, pace: Pace) -> None:
        """`prompts` have unique ids; `seed` fixes the order of every pass."""
        if not prompts:
            raise ValueError("the task has 0 training prompts; it needs at least 1.")
        self._prompts = prompts
        self._seed = seed
        self._pace = pace
        self._next = 0
        self._order: list[int] = []
        self._order_pass = -1
        self._open: dict[int, Lease] = {}
        self._again: list[Lease] = []
        self.delivered = 0
        """Leases answered with a group."""
        self.lost = 0
        """Leases given up because their searcher died; each is handed out again as a new lease."""

    @property
    def next_round(self) -> int:
        """The round of the prompt that the next lease would hand out."""
        return self._again[0].round if self._again else self._pace.round_of(self._next)

    def take(self, most: int) -> list[Lease]:
        """The next prompts, at most `most` of them and all of one round; returned ones first."""
        taken: list[Lease] = []
        round_ = self.next_round
        while len(taken) < most and self.next_round == round_:
            lease = self._again.pop(0) if self._again else self._new_lease()
            self._open[lease.number] = lease
            taken.append(lease)
        return taken

    def deliver(self, number: int, attempt: int) -> bool:
        """Closes a lease; False if it is not open (a late copy of one that was handed out again)."""
        lease = self._open.get(number)
        if lease is None or lease.attempt != attempt:
            return False
        del self._open[number]
        self.delivered += 1
        return True

    def give_back(self, leases: Sequence[Lease]) -> list[Lease]:
        """Counts open leases as lost and queues their prompts again, one attempt higher."""
        returned = [lease for lease in leases if self._open.get(lease.number) == lease]
        for lease in returned:
            del self._open[lease.number]
            self._again.append(
                Lease(prompt=lease.prompt, visit=lease.visit, attempt=lease.attempt + 1,
                      number=lease.number, round=lease.round)
            )
        self._again.sort(key=lambda lease: lease.number)
        self.lost += len(returned)
        return returned

    def ledger(self) -> dict[str, int]:
        """Prompts leased, delivered, open and lost so far."""
        return {
            "leased": self.delivered + len(self._open) + self.lost,
            "delivered": self.delivered, "open": len(self._open), "lost": self.lost,
        }

    def state(self) -> dict[str, Any]:
        """Everything `restore` needs, as plain data."""
        def out(leases: Sequence[Lease]) -> list[list[int]]:
            return [[lease.number, lease.attempt] for lease in leases]

        return {"next": self._next, "delivered": self.delivered, "lost": self.lost,
                "open": out(list(self._open.values())), "again": out(self._again)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`; leases that were open then are handed out again."""
        self._next, self.delivered, self.lost = state["next"], state["delivered"], state["lost"]
        self._open = {number: self._lease(number, attempt) for number, attempt in state["open"]}
        self._again = [self._lease(number, attempt) for number, attempt in state["again"]]
        self.give_back(list(self._open.values()))

    def _new_lease(self) -> Lease:
        lease = self._lease(self._next, 0)
        self._next += 1
        return lease

    def _lease(self, number: int, attempt: int) -> Lease:
        visit, place = divmod(number, len(self._prompts))
        if visit != self._order_pass:
            self._order = list(range(len(self._prompts)))
            random.Random(f"order {self._seed} {visit}").shuffle(self._order)
            self._order_pass = visit
        prompt = self._prompts[self._order[place]]
        return Lease(prompt=prompt, visit=visit, attempt=attempt, number=number, round=self._pace.round_of(number))


def completion_seed(seed: int, prompt_id: str, visit: int | str, attempt: int = 0) -> int:
    """The 64-bit seed of a prompt's completions: a function of these four and of nothing else."""
    text = f"{seed}\x00{prompt_id}\x00{visit}\x00{attempt}"
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "little")
