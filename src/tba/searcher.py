"""Ask, answer, score: leased prompts become scored groups, with weights that may be stale."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from tba.engines.protocol import Engine, Pause
from tba.exploration import Exploration
from tba.inflight import Lookout
from tba.leases import completion_seed
from tba.records import Completion, Group, Lease, Prompt, Trajectory, Unscored
from tba.rewards.functions import Failure, Score, clip
from tba.scoring import Outcomes, Scores, Scoring
from tba.tasks.protocol import Task
from tba.weights import Publication, Tensors, Weights, check_held, digests

KEPT_DIGESTS = 3
"""Adopted versions whose digests by tensor are remembered, to tell which one a stale tensor is of."""


class Reference(Protocol):
    """The policy that KL is measured against."""

    def sequence_logps(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """Log p_ref(completion | prompt), nats, of (prompt ids, completion ids) pairs."""
        ...

    def completion_logps(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, ...]]:
        """The same by token."""
        ...

    def load(self, tensors: Tensors) -> None:
        """Becomes a newer reference."""
        ...


class Found(NamedTuple):
    """What was sampled for some leases, and is being scored."""

    blank: Sequence[Group]
    """The groups without their completions."""
    completions: Sequence[list[Completion]]
    outcomes: Sequence[Future[Outcomes]]
    ref_logps: Sequence[list[tuple[float, tuple[float, ...]]]]
    """Of each completion the sum, and its terms if they are kept."""
    ref_version: int


@dataclass(slots=True)
class SearchTimes:
    """Seconds a searcher has spent on each part of its work."""

    sampling_s: float = 0.0
    scoring_s: float = 0.0
    """Waited for scores: those that were there before they were needed cost nothing."""
    reference_s: float = 0.0
    loading_s: float = 0.0
    idle_s: float = 0.0


class Searcher:
    """Samples completions for leased prompts, scores them, and adds their reference log-probs."""

    def __init__(
        self, *, engine: Engine, reference: Reference, task: Task, exploration: Exploration, num_samples: int,
        batch_prompts: int, seed: int, name: str = "searcher-0", keeps_ref_logps: bool = False,
    ) -> None:
        """`num_samples` completions a prompt, `batch_prompts` prompts an engine call.

        `keeps_ref_logps`: trajectories carry the reference log-prob of each token, not only their sum.
        """
        self._engine, self._reference = engine, reference
        self.scoring: Scores = Scoring(task)
        """What has completions scored, as many prompts at once as it was made for."""
        self._exploration, self._num_samples, self._batch_prompts = exploration, num_samples, batch_prompts
        self._seed, self._keeps_ref_logps = seed, keeps_ref_logps
        self._digest = ""
        self._adopted: dict[int, Mapping[str, str]] = {}
        self.ref_version = 0
        """Version of the reference that it scores with."""
        self.name = name
        self.times = SearchTimes()

    def warm_up(self, ids: Sequence[int]) -> None:
        """Samples once for the prompt `ids`, so that the first lease does not pay for what is slow only once."""
        prompt = Prompt(id="warm-up", tokens=tuple(ids), text="")
        completions = self._engine.generate([prompt], num_samples=2, sampling=self._exploration.sampling, seeds=[0])
        self._reference_logps([prompt], completions)

    def adopt(self, weights: Weights) -> None:
        """Loads `weights`, and recomputes their digest from what the engine would sample with.

        The reference that goes with them is loaded if it is another than that held.

        Raises:
            WrongWeightsError: the engine holds something else than was published; nothing is sampled with it.
        """
        started = time.perf_counter()
        self._adopted = self._adopted or {self._engine.version: digests(self._engine.tensors())}
        self._engine.load(weights.tensors, weights.version)
        self._digest = check_held(weights, self._engine.tensors(), self._adopted)
        self._adopted = {**dict(list(self._adopted.items())[-KEPT_DIGESTS:]), weights.version: weights.digests}
        if weights.ref_version != self.ref_version:
            assert weights.reference is not None, f"reference {weights.ref_version} came without its tensors"
            self._reference.load(weights.reference)
            self.ref_version = weights.ref_version
        self.times.loading_s += time.perf_counter() - started

    def holds(self, publication: Publication) -> bool:
        """Whether its engine holds these weights, to the bit, and it scores with the reference that goes with them."""
        return (self._engine.version, self._digest, self.ref_version) == (
            publication.version, publication.digest, publication.ref_version
        )

    def search(
        self, leases: Sequence[Lease], *, run_attempt: int = 0, lookout: Lookout | None = None
    ) -> Iterator[Group]:
        """One scored group per lease, in order, `batch_prompts` of them sampled at a time, while others are scored.

        With `lookout` the newer weights that it finds are adopted while a batch is sampled.
        """
        found: Found | None = None
        for at in range(0, len(leases), self._batch_prompts):
            part = leases[at : at + self._batch_prompts]
            later = self.sample(part, run_attempt=run_attempt, lookout=lookout)
            if found is not None:
                yield from self._awaited(found)
            found = later
        if found is not None:
            yield from self._awaited(found)

    def _awaited(self, found: Found) -> list[Group]:
        started = time.perf_counter()
        groups = self.scored(found)
        self.times.scoring_s += time.perf_counter() - started
        return groups

    def sample(self, leases: Sequence[Lease], *, run_attempt: int = 0, lookout: Lookout | None = None) -> Found:
        """Samples completions of all leases at once, and has them scored, which is not waited for."""
        started = time.perf_counter()
        seeds = [completion_seed(self._seed, lease.prompt.id, lease.visit, lease.attempt) for lease in leases]
        prompts = [lease.prompt for lease in leases]
        held = [(self._engine.version, self._digest)]
        loading_s = self.times.loading_s
        completions = self._engine.generate(
            prompts, num_samples=self._num_samples, sampling=self._exploration.of(leases[0]), seeds=seeds,
            pause=None if lookout is None else Pause(every=lookout.every, do=lambda: self._look(lookout, held)),
        )
        sampled = time.perf_counter()
        loading_s = self.times.loading_s - loading_s
        outcomes = [self.scoring.begin(p, c) for p, c in zip(prompts, completions, strict=True)]
        ref_logps = self._reference_logps(prompts, completions)
        self.times.sampling_s += sampled - started - loading_s
        self.times.reference_s += time.perf_counter() - sampled
        blank = [
            Group(prompt=lease.prompt, trajectories=(), number=lease.number, attempt=lease.attempt,
                  searcher=self.name, run_attempt=run_attempt, **_sampled_with(held, own))
            for lease, own in zip(leases, completions, strict=True)
        ]
        return Found(blank, completions, outcomes, ref_logps, self.ref_version)

    def scored(self, found: Found) -> list[Group]:
        """The groups of what was sampled, once all of it is scored; any thread may wait for it."""
        scores = [outcomes.result() for outcomes in found.outcomes]
        return [
            _fill(group, c, s, r, found.ref_version)
            for group, c, s, r in zip(found.blank, found.completions, scores, found.ref_logps, strict=True)
        ]

    def _look(self, lookout: Lookout, held: list[tuple[int, str]]) -> None:
        """Adopts what `lookout` has found, and adds its version and digest to `held`.

        The reference stays until the batch is scored: no token depends on it, so that a newer one is not worth
        holding decoding up for, and `adopt` brings it before the next batch.
        """
        started = time.perf_counter()
        weights = lookout.newer(self._engine.version)
        self.times.loading_s += time.perf_counter() - started
        if weights is not None:
            self.adopt(replace(weights, ref_version=self.ref_version, reference=None))
            held.append((weights.version, self._digest))

    def _reference_logps(
        self, prompts: Sequence[Prompt], completions: Sequence[list[Completion]]
    ) -> list[list[tuple[float, tuple[float, ...]]]]:
        """The sum of each completion, and its terms if they are kept."""
        pairs = [(p.tokens, c.tokens) for p, of_prompt in zip(prompts, completions, strict=True) for c in of_prompt]
        if self._keeps_ref_logps:
            by_token = self._reference.completion_logps(pairs) if pairs else []
            flat = iter([(math.fsum(logps), logps) for logps in by_token])
        else:
            flat = iter([(logp, ()) for logp in self._reference.sequence_logps(pairs)] if pairs else [])
        return [[next(flat) for _ in of_prompt] for of_prompt in completions]


def _sampled_with(held: Sequence[tuple[int, str]], completions: Sequence[Completion]) -> dict[str, Any]:
    """Which of the (version, digest) in `held` sampled the first tokens of a group, and which others one of it."""
    digest_of, first = dict(held), min(completion.version for completion in completions)
    versions = {version for completion in completions for version in completion.token_versions}
    echoes = tuple(echo for echo in digest_of.items() if echo[0] in versions and echo[0] != first)
    return {"version": first, "digest": digest_of[first], "echoes": echoes}


def _fill(
    blank: Group, completions: Sequence[Completion], scores: Sequence[Score | Failure],
    ref_logps: Sequence[tuple[float, tuple[float, ...]]], ref_version: int,
) -> Group:
    """`blank` with its completions: those with a finite reward and finite log-probs as trajectories."""
    kept: list[Trajectory] = []
    lost: list[Unscored] = []
    for completion, score, (ref_logp, by_token) in zip(completions, scores, ref_logps, strict=True):
        if isinstance(score, Failure):
            lost.append(Unscored(completion=completion, reason=score.reason, detail=clip(score.detail)))
        elif not math.isfinite(ref_logp):
            lost.append(Unscored(completion=completion, reason="ref_non_finite", detail=f"log-prob {ref_logp}"))
        elif not math.isfinite(completion.logp):
            lost.append(Unscored(completion=completion, reason="logp_non_finite", detail=f"log-prob {completion.logp}"))
        else:
            kept.append(
                Trajectory(prompt_id=blank.prompt.id, completion=completion, reward=score.reward,
                           reward_parts=score.parts, ref_logp=ref_logp, ref_logps=by_token, ref_version=ref_version)
            )
    return replace(blank, trajectories=tuple(kept), unscored=tuple(lost))
