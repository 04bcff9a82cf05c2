"""Between searchers and trainer: prompts go out as leases, groups come in, groups are drawn."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba import metrics as m
from tba.buffer.entries import Draw, TooOldError
from tba.buffer.memory import ReplayBuffer
from tba.buffer.options import Options
from tba.buffer.shards import ShardedBuffer, Shards
from tba.leases import Leases, Pace
from tba.records import Group, Lease, Prompt, Trajectory
from tba.settings import Settings

WRONG_WEIGHTS = "wrong weights"
"""Why a group is rejected that echoes another digest than its version was published with."""
KEPT_DIGESTS = 64
"""Newest publications whose digest is remembered; an echo of an older one is not checked."""


class Depot:
    """The buffer, the leases, and the ledger of both. One object in lockstep, one process in async."""

    def __init__(
        self, prompts: Sequence[Prompt], settings: Settings, *, lead: int | None, shards: Shards | None = None
    ) -> None:
        """`prompts` are the training prompts; `lead` bounds searchers in async mode; `shards` as in `make_buffer`."""
        self._settings = settings
        self.pace = Pace(first=settings.initial_prompts, per_round=settings.prompts_per_round, lead=lead)
        self.buffer = make_buffer(settings, shards)
        self.leases = Leases(prompts, seed=settings.seed, pace=self.pace)
        self.attempt = 0
        """Restarts of the run."""
        self._rng = np.random.default_rng([settings.seed, 1])
        self._digests: dict[int, str] = {}
        self._unscored = self._completions = self._straddling = 0
        self._fresh: list[Sequence[float]] = []
        """Reward, log-prob over the reference, and log weight of each trajectory that came since the last draw."""

    def expect(self, version: int, digest: str) -> None:
        """Notes the digest of a publication, which groups sampled with it must echo."""
        self._digests[version] = digest
        while len(self._digests) > KEPT_DIGESTS:
            del self._digests[min(self._digests)]

    def may_search(self, published: int) -> bool:
        """Whether the next lease may go out when the weights for round `published` are the newest."""
        return self.pace.may_search(self.leases.next_round, published)

    def may_train(self, round_: int) -> bool:
        """Whether the steps of round `round_` have the prompts delivered that they wait for."""
        return self.pace.may_train(round_, self.leases.delivered)

    def take(self, round_: int) -> list[Lease]:
        """All leases of the rounds up to `round_` that are still to be handed out."""
        taken: list[Lease] = []
        while self.leases.next_round <= round_:
            taken += self.leases.take(self._settings.search.batch_prompts)
        return taken

    def deliver(self, group: Group) -> str:
        """Takes a group in; returns why its trajectories were rejected, or ''."""
        reason = self._refusal(group)
        self._unscored += len(group.unscored)
        self._completions += len(group.completions)
        self._straddling += sum(1 for completion in group.completions if completion.token_versions)
        if reason:
            self.buffer.reject(group, reason)
        else:
            self.buffer.add(group)
            self._fresh += [(t.reward, *_drift(t)) for t in group.trajectories]
        return reason

    def _refusal(self, group: Group) -> str:
        if group.run_attempt < self.attempt:
            return "older attempt"
        if not self.leases.deliver(group.number, group.attempt):
            return "late"
        echoes = ((group.version, group.digest), *group.echoes)
        sampled_with = {version for completion in group.completions for version in completion.token_versions}
        is_right = all(self._digests.get(version, digest) == digest for version, digest in echoes)
        return "" if is_right and sampled_with <= {version for version, _ in echoes} else WRONG_WEIGHTS

    def draw(self, version: int) -> tuple[list[Draw], dict[str, Any]]:
        """The groups of one step for a trainer at `version`, and the buffer's metrics.

        Raises:
            EmptyBufferError: no prompt has a whole group.
            TooOldError: the buffer gave out what is older than `buffer.max_age`, or as recent what is not.
        """
        started = time.perf_counter()
        trainer = self._settings.trainer
        draws = self.buffer.sample(
            self._settings.groups_per_step, trainer.group_size, version=version, rng=self._rng
        )
        check_ages(draws, version, max_age=self._settings.buffer.max_age, recent_age=self._settings.recent_age)
        fresh, self._fresh = self._fresh, []
        longest, hardest = self.buffer.served()
        return draws, {
            m.ATTEMPT: self.attempt,
            m.BUFFER_SIZE: len(self.buffer), m.BUFFER_PROMPTS: self.buffer.num_prompts,
            m.INSERTED: self.buffer.inserted, m.REUSE: self.buffer.consumed / max(1, self.buffer.inserted),
            m.UNSCORED: self._unscored, m.STRADDLING: self._straddling / max(1, self._completions),
            m.DELIVERED_TOKENS: self.buffer.delivered_tokens,
            m.SEARCH_REWARD: m.mean(reward for reward, _, _ in fresh),
            m.SEARCH_KL: _weighted_mean([drift for _, drift, _ in fresh], [weight for _, _, weight in fresh]),
            m.USES_MEAN: m.mean(float(u) for draw in draws for u in draw.uses),
            m.UNMET: dict(self.buffer.unmet), m.LONGEST: longest, m.HARDEST: hardest,
            m.DRAWN_BY: dict(Counter(draw.sampler for draw in draws)), m.DRAW_SECONDS: time.perf_counter() - started,
        }

    def ledger(self) -> dict[str, Any]:
        """Trajectories and tokens by fate, and prompts by the state of their lease."""
        return {**self.buffer.ledger(), "prompts": self.leases.ledger()}

    def save(self, path: Path) -> None:
        """Writes buffer, leases, counters and the state of the drawing RNG into the folder `path`."""
        self.buffer.save(path)
        state = {
            "leases": self.leases.state(), "attempt": self.attempt,
            "unscored": self._unscored, "completions": self._completions, "straddling": self._straddling,
            "rng": self._rng.bit_generator.state, "fresh": self._fresh,
        }
        (path / "depot.json").write_text(json.dumps(state), "utf-8")

    def load(self, path: Path) -> None:
        """Continues from what `save` wrote, one attempt higher: groups of the earlier attempt are refused."""
        self.buffer.load(path)
        state = json.loads((path / "depot.json").read_text("utf-8"))
        self.leases.restore(state["leases"])
        self.attempt = state["attempt"] + 1
        self._unscored = state["unscored"]
        self._completions, self._straddling = state["completions"], state["straddling"]
        self._fresh = state["fresh"]
        self._rng.bit_generator.state = state["rng"]


def check_ages(draws: Sequence[Draw], version: int, *, max_age: int | None, recent_age: int) -> None:
    """Holds what was drawn for a trainer at `version` to the bounds on age, in steps; see docs/asynchrony.md.

    Raises:
        TooOldError: a trajectory is older than `max_age`, or drawn as recent and older than `recent_age`.
    """
    for draw in draws:
        age = version - min(trajectory.completion.version for trajectory in draw.trajectories)
        for name, bound in (("max_age", max_age), ("recent_age", recent_age if draw.sampler == "recent" else None)):
            if bound is not None and age > bound:
                raise TooOldError(
                    f"the sampler {draw.sampler!r} drew a trajectory of prompt {draw.prompt.id!r} that is {age} steps "
                    f"old for version {version}, and buffer.{name} = {bound}: a fault of the buffer; nothing was "
                    f"trained on it, so that tba resume can go on from the newest checkpoint."
                )


def _drift(trajectory: Trajectory) -> tuple[float, float]:
    """Log-prob minus reference log-prob, nats; and the log of its weight under the policy, if sampled otherwise."""
    completion = trajectory.completion
    logp = completion.logp
    return logp - trajectory.ref_logp, logp - math.fsum(completion.behaviour_logps) if completion.behaviour_logps else 0


def _weighted_mean(values: Sequence[float], log_weights: Sequence[float]) -> float:
    """Mean of `values` under weights that need not sum to 1; NaN without values."""
    largest = max(log_weights, default=0.0)
    weights = [math.exp(log_weight - largest) for log_weight in log_weights]
    total = math.fsum(weights)
    return math.fsum(w * value for w, value in zip(weights, values, strict=True)) / total if values else math.nan


def make_buffer(settings: Settings, shards: Shards | None = None) -> ReplayBuffer | ShardedBuffer:
    """An empty buffer with the settings' bounds and mixture; its shards are in this process unless given."""
    count = settings.buffer.shards
    return ReplayBuffer(options_of(settings)) if count == 1 else ShardedBuffer(options_of(settings), count, shards)


def options_of(settings: Settings) -> Options:
    """The whole buffer's bounds and mixture."""
    buffer = settings.buffer
    same = ("capacity", "capacity_per_prompt", "capacity_tokens", "capacity_bytes", "eviction", "dedup",
            "near_similarity", "reward_temperature", "max_uses", "max_age", "keep_text")
    return Options(
        recent_age=settings.recent_age, mix=buffer.shares, keep_logps=settings.keeps_logps,
        **{name: getattr(buffer, name) for name in same}
    )
