"""A simulated clock: the parts of an async run as discrete events.

For more searchers than there are cores. Every call does its real work, in this process, and takes its measured time
on the simulated clock; a part does one call at a time, in the order of asking. So a depot, a trainer or a searcher
that cannot keep up shows as it would with a process to each.
"""

from __future__ import annotations

import heapq
import pickle
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from tba import metrics as m
from tba.assembly import Questions, make_searcher
from tba.batch import Batch, collate
from tba.buffer.entries import EmptyBufferError
from tba.depot import Depot
from tba.loop import LOOKAHEAD
from tba.policy import Policy
from tba.records import Group, Lease
from tba.settings import Settings
from tba.trainer import Trainer
from tba.weights import MemoryStore, Weights

Costs = Callable[[str, Callable[[], Any]], tuple[Any, float]]
"""Does the work of the call that it is given the name of; returns the result, and the seconds it is to cost.

The names are lease, deliver, draw, store (depot), load, search (searcher), step and publish (trainer).
"""


class Measured:
    """Costs as `clock` measures them; kept, so that `Recorded` can repeat the run."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, *, instead: Mapping[str, float] | None = None
    ) -> None:
        """`clock` gives seconds; `instead` gives some calls a fixed cost, in seconds, by name."""
        self._clock, self._instead = clock, dict(instead or {})
        self.seconds: list[tuple[str, float]] = []
        """Name and cost of each call, in the order in which they were made."""

    def __call__(self, name: str, work: Callable[[], Any]) -> tuple[Any, float]:
        """See `Costs`."""
        started = self._clock()
        result = work()
        seconds = self._instead.get(name, self._clock() - started)
        self.seconds.append((name, seconds))
        return result, seconds


class Recorded:
    """Costs that an earlier run of the same settings was measured with."""

    def __init__(self, seconds: Sequence[tuple[str, float]]) -> None:
        """`seconds` is that of `Measured`."""
        self._seconds = iter(seconds)

    def __call__(self, name: str, work: Callable[[], Any]) -> tuple[Any, float]:
        """See `Costs`.

        Raises:
            ValueError: the recorded run made another call here, or none.
        """
        recorded, seconds = next(self._seconds, ("the end", 0.0))
        if recorded != name:
            raise ValueError(
                f"the recorded costs go on with {recorded!r}, the simulation with {name!r}; repeat it with the "
                f"settings and the seed of the recording, no longer than it was."
            )
        return work(), seconds


class Fixed:
    """The same cost for every call of a name."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        """`seconds` by name; a call that is not named costs nothing."""
        self._seconds = dict(seconds)

    def __call__(self, name: str, work: Callable[[], Any]) -> tuple[Any, float]:
        """See `Costs`."""
        return work(), self._seconds.get(name, 0.0)


class Place:
    """A part that does one call at a time: the first that was asked for among those that may start."""

    def __init__(self, name: str) -> None:
        """`name` is the part's."""
        self.name = name
        self.busy_s = 0.0
        """Simulated seconds of its calls that are done."""
        self.waiting: list[Call] = []
        self.current: Call | None = None

    def busy_until(self, now: float) -> float:
        """Simulated seconds that it has been at work."""
        return self.busy_s + (0.0 if self.current is None else now - self.current.started)


class Call:
    """Work asked of a place, and when it was asked for, started and done, in simulated seconds."""

    def __init__(
        self, place: Place, name: str, by: str, work: Callable[[], Any], may_start: Callable[[], bool]
    ) -> None:
        """`by` is who asked."""
        self.place, self.name, self.by = place, name, by
        self.work, self.may_start = work, may_start
        self.asked = self.started = self.ended = 0.0
        self.is_done = False
        self.result: Any = None
        self.waiter: Life | None = None


Life = Generator[Call, Any, None]
"""What a process does: it yields the call that it waits for, and is sent the result."""


class Clock:
    """Simulated time, and what happens in it, in order; at one time, in the order of starting."""

    def __init__(self, costs: Costs) -> None:
        """Time starts at 0."""
        self.now = 0.0
        self._costs = costs
        self._started = 0
        self._ends: list[tuple[float, int, Call]] = []
        self._places: dict[str, Place] = {}

    def ask(
        self, place: Place, name: str, work: Callable[[], Any], *, by: str = "",
        may_start: Callable[[], bool] = lambda: True,
    ) -> Call:
        """Queues a call, and starts it if the place is free; a life waits for it by yielding it.

        `may_start` may read only what calls of the same place change.
        """
        call = Call(place, name, by or place.name, work, may_start)
        call.asked = self.now
        self._places[place.name] = place
        place.waiting.append(call)
        self._start_next(place)
        return call

    def live(self, life: Life, value: Any = None) -> None:
        """Takes a life to its next call that is not done."""
        while True:
            try:
                call = life.send(value)
            except StopIteration:
                return
            if not call.is_done:
                call.waiter = life
                return
            value = call.result

    def calls(self) -> Iterator[Call]:
        """Each call when it is done.

        Raises:
            RuntimeError: nothing is under way, and something is waited for.
        """
        while self._ends:
            self.now, _, call = heapq.heappop(self._ends)
            call.ended, call.is_done, call.place.current = self.now, True, None
            call.place.busy_s += call.ended - call.started
            yield call
            self._start_next(call.place)
            if call.waiter is not None:
                self.live(call.waiter, call.result)
        waiting = [f"{c.name} by {c.by}" for place in self._places.values() for c in place.waiting]
        if waiting:
            raise RuntimeError(
                f"at {self.now:g} simulated s nothing is under way, and these may not start: {', '.join(waiting)}; "
                f"each waits for one of the others."
            )

    def _start_next(self, place: Place) -> None:
        call = next((c for c in place.waiting if c.may_start()), None) if place.current is None else None
        if call is None:
            return
        place.waiting.remove(call)
        place.current, call.started = call, self.now
        call.result, seconds = self._costs(call.name, call.work)
        heapq.heappush(self._ends, (self.now + seconds, self._started, call))
        self._started += 1


class Searches(Protocol):
    """What the simulation asks of a searcher: see `searcher.Searcher`."""

    name: str

    def adopt(self, weights: Weights) -> None:
        """Searches with `weights` from now on."""
        ...

    def search(self, leases: Sequence[Lease], *, run_attempt: int = 0) -> Iterator[Group]:
        """One group per lease."""
        ...


class Simulation:
    """An async run of `search.searchers` searchers: what `cluster` does with processes, on a simulated clock.

    Deterministic given settings, start policy and costs. The way of a message between the parts takes no time.
    """

    def __init__(
        self, settings: Settings, questions: Questions, policy: Policy, costs: Costs, *,
        searchers: Sequence[Searches] | None = None, packs: bool = False,
    ) -> None:
        """`policy` is the start policy, which is also the reference.

        `searchers` are in place of those of the settings. With `packs`, leases, groups and batches are pickled in the
        call that sends them and unpickled in the call that takes them, as between processes, which costs both.
        """
        self._settings = settings
        self._pack, self._unpack = (pickle.dumps, pickle.loads) if packs else (_same, _same)
        self.depot = Depot(questions.training, settings, lead=settings.lead)
        self.trainer = Trainer(policy.trainable_copy(), settings)
        self.searchers: Sequence[Searches] = searchers if searchers is not None else [
            make_searcher(settings, questions.task, policy, f"searcher-{number}")
            for number in range(settings.search.searchers)
        ]
        self._store = MemoryStore()
        self._clock = Clock(costs)
        self._places = {name: Place(name) for name in ("depot", "trainer", *(s.name for s in self.searchers))}
        self._published = -1
        self._drawn = 0
        """Steps that have been drawn for."""
        self._in_vain = -1
        """Prompts that had been delivered when a draw last found nothing young enough."""

    @property
    def now(self) -> float:
        """Simulated seconds so far."""
        return self._clock.now

    def calls(self) -> Iterator[Call]:
        """Each call when it is done, for ever; stopping is the consumer's. To be asked for once.

        `result` is: lease (leases, weights); search, deliver the groups; draw (batch, metrics), or None where it found
        nothing; step its metrics; publish, store, load the weights. Where it packs, leases, what was searched and
        batches are bytes.
        """
        self._clock.live(self._trains())
        for searcher in self.searchers:
            self._clock.live(self._searches(searcher))
        yield from self._clock.calls()

    def busy(self) -> dict[str, float]:
        """Share of simulated time so far that each part was at work."""
        return {name: place.busy_until(self.now) / self.now if self.now else 0.0
                for name, place in self._places.items()}

    # ---- lives ----

    def _trains(self) -> Life:
        """Publishes when a round begins, and trains on draws that are asked for ahead."""
        trainer, sync = self.trainer, self._settings.trainer.sync_every
        place, drawn = self._places["trainer"], deque[Call]()
        while True:
            round_, place_in_round = divmod(trainer.steps, sync)
            if place_in_round == 0:
                weights = yield self._clock.ask(place, "publish", partial(trainer.publish, round_))
                self._ask_depot("store", partial(self._take_weights, weights), by="trainer")
            while len(drawn) < LOOKAHEAD:
                ahead = len(drawn)
                drawn.append(self._ask_draw(trainer.steps + ahead, trainer.version + ahead))
            while (made := (yield drawn[0])) is None:
                drawn[0] = self._ask_draw(trainer.steps, trainer.version)
            drawn.popleft()
            batch, found = made
            yield self._clock.ask(place, "step", partial(self._step, batch, found, round_))

    def _searches(self, searcher: Searches) -> Life:
        """Searches with the newest weights; asks for leases before it hands over, as a process does."""
        place, name, held = self._places[searcher.name], searcher.name, None
        asked = self._ask_lease(name)
        delivered: Call | None = None
        while True:
            leases, weights = yield asked
            if weights is not held:
                held = yield self._clock.ask(place, "load", partial(_load, searcher, weights))
            groups = yield self._clock.ask(place, "search", partial(self._search, searcher, leases))
            asked = self._ask_lease(name)
            if delivered is not None:
                yield delivered
            delivered = self._ask_depot("deliver", partial(self._deliver, groups), by=name)

    # ---- the depot's calls ----

    def _ask_depot(
        self, name: str, work: Callable[[], Any], *, by: str, may_start: Callable[[], bool] = lambda: True
    ) -> Call:
        return self._clock.ask(self._places["depot"], name, work, by=by, may_start=may_start)

    def _ask_lease(self, searcher: str) -> Call:
        return self._ask_depot("lease", self._lease, by=searcher, may_start=self._may_search)

    def _ask_draw(self, steps: int, version: int) -> Call:
        """The draw of the step after `steps` others, for a trainer at `version`."""
        return self._ask_depot(
            "draw", partial(self._draw, version), by="trainer", may_start=partial(self._may_draw, steps)
        )

    def _may_draw(self, steps: int) -> bool:
        return (
            steps == self._drawn
            and self.depot.may_train(steps // self._settings.trainer.sync_every)
            and self.depot.leases.delivered > self._in_vain
        )

    def _may_search(self) -> bool:
        return self._published >= 0 and self.depot.may_search(self._published)

    def _lease(self) -> tuple[Any, Weights]:
        return self._pack(self.depot.leases.take(self._settings.search.batch_prompts)), self._store.latest()

    def _deliver(self, message: Any) -> list[Group]:
        groups: list[Group] = self._unpack(message)
        for group in groups:
            self.depot.deliver(group)
        return groups

    def _take_weights(self, weights: Weights) -> Weights:
        self._store.publish(weights)
        self.depot.expect(weights.version, weights.digest)
        self._published = weights.round
        return weights

    def _draw(self, version: int) -> tuple[Any, dict[str, Any]] | None:
        """None while nothing in the buffer is young enough: then it is asked for again when more is delivered."""
        try:
            draws, found = self.depot.draw(version)
        except EmptyBufferError:
            if not self.depot.buffer.inserted:
                raise
            self._in_vain = self.depot.leases.delivered
            return None
        self._drawn += 1
        return self._pack(collate(draws, max_tokens=self._settings.trainer.micro_batch_tokens)), found

    # ---- the others' ----

    def _step(self, message: Any, found: dict[str, Any], round_: int) -> dict[str, Any]:
        batch: Batch = self._unpack(message)
        return {**self.trainer.step(batch, search_kl=found[m.SEARCH_KL]), **found, m.ROUND: round_}

    def _search(self, searcher: Searches, message: Any) -> Any:
        leases: list[Lease] = self._unpack(message)
        return self._pack(list(searcher.search(leases, run_attempt=self.depot.attempt)))


def _same(message: Any) -> Any:
    return message


def _load(searcher: Searches, weights: Weights) -> Weights:
    searcher.adopt(weights)
    return weights
