"""The driver's side of searchers: they join, leave, die and are replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from tba.metrics import Say
from tba.settings import Settings

BACK_OFF_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Seconds before the first, second, ... restart in a row of a searcher."""
START_LIMIT_S = 120.0
"""Seconds that a process may take to start, at least: the libraries' import is no wait of the run."""
GOODBYE_LIMIT_S = 5.0
"""Seconds that searchers may take to finish their batch when the run is over."""
ASK_S = 1.0
"""Seconds between two looks at what the depot knows of searchers."""
MAX_WRONG_BATCHES = 3
"""Batches in a row with other weights than were published, after which the run ends."""
MAX_ADDED = 1000
"""Searchers that may be added by one request."""


class RunFailedError(RuntimeError):
    """A part of the run failed for good; the message names it."""


@dataclass(slots=True)
class SearcherState:
    """What the driver knows of one searcher."""

    name: str
    life: int = 0
    """How often it has been started."""
    handle: Any = None
    running: Any = None
    """Reference to its endless call; ready only when it has ended or died."""
    born_at: float = 0.0
    """Monotonic time of its newest start."""
    deaths: list[int] = field(default_factory=list[int])
    """In a row, without a group of its own in between: what all searchers had delivered at each."""
    start_at: float = 0.0
    """Monotonic time of its next start."""
    verdict: str = ""
    """Why it was ended, if it did not die by itself."""
    is_leaving: bool = False
    is_awaited: bool = True
    """Whether nothing has been said of its being late."""

    @property
    def holder(self) -> str:
        """What its present life is called in the depot."""
        return f"{self.name}.{self.life}"


class Searchers:
    """All searchers of a run.

    consumes: their ends, what the depot knows of them, requests to add and remove some
    waits for: nothing, but the depot's answers
    woken by: the driver, several times a second
    produces: starts, burials, notes
    """

    def __init__(
        self, settings: Settings, spawn: Callable[[str], Any], ask: Callable[[Any, str], Any], say: Say
    ) -> None:
        """Starts their processes. `spawn` makes one by name; `ask` gets an answer that is named in errors."""
        self._limit, self._settings, self._spawn, self._ask, self._say = (
            settings.async_.max_restarts, settings, spawn, ask, say
        )
        self._depot: Any = None
        self._known: Any = None
        self._known_at = 0.0
        self._holders: dict[str, dict[str, Any]] = {}
        self._named = 0
        self._all: list[SearcherState] = []
        for state in self._new(settings.search.searchers):
            state.handle = spawn(state.name)

    def _new(self, count: int) -> list[SearcherState]:
        made = [SearcherState(name=f"searcher-{self._named + n}") for n in range(count)]
        self._named += count
        self._all += made
        return made

    def begin(self, depot: Any) -> None:
        """Sends them to work; `depot` is the handle of its process."""
        self._depot = depot
        for state in self._all:
            self._send(state)

    def _send(self, state: SearcherState) -> None:
        state.life += 1
        state.born_at, state.is_awaited, state.verdict = time.monotonic(), True, ""
        state.running = state.handle.run.remote(self._depot, state.holder)

    # ---- life and death ----

    def look_after(self) -> None:
        """Buries the dead, starts what is due, and asks the depot what it knows.

        Raises:
            RunFailedError: one has died too often, or samples with other weights than were published.
        """
        now = time.monotonic()
        for state in list(self._all):
            if state.running is not None and ray.wait([state.running], timeout=0)[0]:
                self._bury(state, now)
            elif state.running is None and now >= state.start_at:
                state.handle = self._spawn(state.name)
                self._say("note", {"text": f"{state.name} {'restarted' if state.life else 'is added'}"})
                self._send(state)
        self._hear(now)

    def _hear(self, now: float) -> None:
        """Takes in what the depot knows, without waiting for it."""
        if self._known is None and now - self._known_at >= ASK_S:
            self._known, self._known_at = self._depot.holders.remote(), now
        if self._known is None or not ray.wait([self._known], timeout=0)[0]:
            return
        self._holders, self._known = self._ask(self._known, "the depot"), None
        lease_limit = self._settings.async_.longest_lease_s
        most_wrong = MAX_WRONG_BATCHES * self._settings.search.batch_prompts
        for state in self._all:
            told = self._holders.get(state.holder)
            if told is None:
                if state.is_awaited and state.running is not None and now - state.born_at > START_LIMIT_S:
                    state.is_awaited = False
                    needs = _room_for(self._settings)
                    self._say("note", {"text": f"{state.name} has not come up in {START_LIMIT_S:g} s: {needs}"})
            elif told["wrong"] >= most_wrong:
                raise RunFailedError(
                    f"{state.name} ({told['where']}) delivered {told['wrong']} groups in a row that were sampled with "
                    f"other weights than were published: its engine does not keep what it loads."
                )
            elif told["stuck_s"] is not None and told["stuck_s"] > 2 * lease_limit and not state.verdict:
                state.verdict = (
                    f"it held prompts for {told['stuck_s']:.0f} s without delivering any; "
                    f"async.lease_limit_s = {lease_limit:g}"
                )
                _end(state, told["where"])

    def _bury(self, state: SearcherState, now: float) -> None:
        """Logs a searcher's end, hands its prompts out again, and sets the time of its restart."""
        reason = ""
        try:
            ray.get(state.running)
        except RayError as error:
            reason = state.verdict or reason_of(error)
        ray.kill(state.handle)
        lost, own, total = self._ask(self._depot.give_back.remote(state.holder), "the depot")
        state.running = None
        if state.is_leaving:
            self._all.remove(state)
            self._say("note", {"text": f"{state.name} left; {lost} prompts are handed out again"})
            return
        state.deaths = [total] if own else [*state.deaths, total]
        reason = reason or "it ended by itself"
        self._say("note", {"text": f"{state.name} died ({reason}); {lost} prompts are handed out again"})
        if is_in_vain(state.deaths, self._limit):
            raise RunFailedError(
                f"{state.name} died {len(state.deaths)} times in a row, with no group delivered by any searcher since "
                f"the first of the last {self._limit + 1}, and async.max_restarts = {self._limit}; the last time: "
                f"{reason}."
            )
        state.start_at = now + BACK_OFF_S[min(len(state.deaths), len(BACK_OFF_S)) - 1]

    def send_home(self) -> None:
        """Waits for those that are finishing their batch; the depot has been told to give out no more."""
        running = [state.running for state in self._all if state.running is not None]
        if running:
            ray.wait(running, num_returns=len(running), timeout=GOODBYE_LIMIT_S)

    # ---- requests ----

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Does what is asked: `{"do": "add" | "remove" | "list", "count": n}`; ValueError says why it is not done."""
        count = int(request.get("count") or 0)
        if request["do"] == "add":
            if count > MAX_ADDED:
                raise ValueError(f"{count} searchers are more than may be added at once ({MAX_ADDED}).")
            changed = [state.name for state in self._new(count)]
        elif request["do"] == "remove":
            changed = self._dismiss(count)
        else:
            changed = []
        now = time.monotonic()
        return {"changed": changed, "searchers": [self._line(state, now) for state in self._all]}

    def _dismiss(self, count: int) -> list[str]:
        staying = [state for state in self._all if not state.is_leaving]
        if count >= len(staying):
            raise ValueError(f"{count} of {len(staying)} searchers cannot be removed: at least 1 has to stay.")
        for state in staying[-count:]:
            state.is_leaving = True
            if state.running is None:
                self._all.remove(state)
            else:
                self._ask(self._depot.dismiss.remote(state.holder), "the depot")
        return [state.name for state in staying[-count:]]

    def _line(self, state: SearcherState, now: float) -> dict[str, Any]:
        told = self._holders.get(state.holder, {})
        if state.is_leaving:
            doing = "leaving"
        elif state.running is None:
            doing = "to be started" if state.life == 0 else f"restarts in {max(0.0, state.start_at - now):.0f} s"
        else:
            doing = "searching" if told else "on its way up"
        kept = ("where", "held", "delivered", "overdue", "heard_s")
        return {"name": state.name, "state": doing, "life": state.life, **{key: told.get(key) for key in kept}}


def is_in_vain(deaths: Sequence[int], most_restarts: int) -> bool:
    """Whether a searcher has died once more than it may be restarted while nobody delivered a group.

    While others deliver, one that keeps dying costs a restart now and then, and no run. `deaths` holds how many groups
    all searchers had delivered at each death in a row.
    """
    return len(deaths) > most_restarts and deaths[-1] == deaths[-1 - most_restarts]


def _end(state: SearcherState, where: str) -> None:
    """Ends a process that may stand still, in which case it does not hear of it otherwise."""
    ray.kill(state.handle)
    node, _, pid = where.partition(" pid ")
    if node == ray.util.get_node_ip_address() and pid.isdigit():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(int(pid), signal.SIGKILL)


def _room_for(settings: Settings) -> str:
    """What a searcher needs, and what there is of it."""
    share = settings.resources.searcher
    free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
    return f"it needs {share.cpus or 0:g} CPUs and {share.gpus:g} GPUs, of which the cluster has free: {free}"


def reason_of(error: RayError) -> str:
    """One line of what Ray says."""
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, RayActorError) and any("creation task" in line for line in lines[:2]):
        return lines[-1]
    return lines[0] if lines else type(error).__name__
