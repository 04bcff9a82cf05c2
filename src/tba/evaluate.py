"""Held-out quality of one version: pass@k, reward, KL, diversity, and distance to an exact target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tba import metrics as m
from tba.comparison import Compares, Comparison
from tba.engines.protocol import Engine, Sampling
from tba.leases import completion_seed
from tba.policy import Policy
from tba.records import Completion, Prompt
from tba.rewards.functions import Failure, Score
from tba.tasks.enumerable import Enumerable, log_target
from tba.tasks.protocol import Task, outcomes
from tba.weights import Tensors

FULL_MARKS = 1.0
"""Reward from which on a completion counts as right."""
BATCH_PROMPTS = 128
"""Prompts sampled together in one engine call."""
SHOWN = 20
"""Prompts whose completions an evaluation keeps for reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Metrics of one version, and some of its completions."""

    version: int
    metrics: Mapping[str, Any]
    shown: Sequence[Mapping[str, Any]]
    """Lines of `completions.jsonl`."""


class Evaluator:
    """Samples, scores and sums up held-out prompts with weights of any version."""

    def __init__(
        self, *, policy: Policy, engine: Engine, reference: Policy, task: Task, prompts: Sequence[Prompt],
        max_new_tokens: int, seed: int, reference_engine: Engine | None = None,
    ) -> None:
        """`engine` samples with `policy`, so that weights loaded into one are in the other.

        `reference_engine` samples with `reference`; only tasks that compare completions with humans' use it.
        """
        self._policy, self._engine, self._reference, self._task = policy, engine, reference, task
        self._prompts, self._max_new_tokens, self._seed = prompts, max_new_tokens, seed
        self._comparison = Comparison(
            task, reference, reference_engine, max_new_tokens=max_new_tokens, seed=seed
        ) if isinstance(task, Compares) else None

    def evaluate(
        self, tensors: Tensors, version: int, *, prompts: int, samples: int, beta: float, greedy: bool = True
    ) -> Evaluation:
        """Metrics of `tensors` on the first `prompts` held-out prompts, `samples` completions each.

        Completions are sampled at `policy.temperature` with seeds that depend on the run's seed alone, so
        that two versions answer with common random numbers. `beta` is that of the exact target.
        """
        self._engine.load(tensors, version)
        chosen = self._prompts[:prompts]
        sampled = self._score(chosen, samples, self._policy.temperature)
        found = {m.EVAL_STEP: version, **self._summary(chosen, sampled)}
        if greedy:
            likely = self._score(chosen, 1, 0.0)
            found[m.PASS_1_GREEDY] = m.mean(float(_is_right(s)) for _, scores in likely for s in scores)
            if self._comparison is not None:
                found |= self._comparison.greedy(chosen, likely)
                found |= self._comparison.reverse_kl(chosen, self._policy, samples)
        if isinstance(self._task, Enumerable) and beta > 0:  # without KL there is no such target
            found |= self._distance(self._task, beta)
        shown = [_show(version, p, c, s) for p, (c, s) in zip(chosen[:SHOWN], sampled, strict=False)]
        return Evaluation(version=version, metrics=found, shown=shown)

    def _score(
        self, prompts: Sequence[Prompt], samples: int, temperature: float
    ) -> list[tuple[list[Completion], list[Score | Failure]]]:
        sampling = Sampling(max_new_tokens=self._max_new_tokens, temperature=temperature)
        found: list[tuple[list[Completion], list[Score | Failure]]] = []
        for at in range(0, len(prompts), BATCH_PROMPTS):
            part = prompts[at : at + BATCH_PROMPTS]
            seeds = [completion_seed(self._seed, p.id, "evaluation") for p in part]
            completions = self._engine.generate(part, num_samples=samples, sampling=sampling, seeds=seeds)
            found += [(c, outcomes(self._task, p, c)) for p, c in zip(part, completions, strict=True)]
        return found

    def _summary(
        self, prompts: Sequence[Prompt], sampled: Sequence[tuple[list[Completion], list[Score | Failure]]]
    ) -> dict[str, Any]:
        flat = [c for completions, _ in sampled for c in completions]
        rights = [sum(map(_is_right, scores)) for _, scores in sampled]
        samples = len(sampled[0][0])
        pairs = [(p.tokens, c.tokens) for p, (cs, _) in zip(prompts, sampled, strict=True) for c in cs]
        ref_logps = self._reference.sequence_logps(pairs)
        rewards = [s.reward for _, scores in sampled for s in scores if isinstance(s, Score)]
        several = {
            m.PASS_K: m.mean(pass_at_k(samples, right, samples) for right in rights),
            m.DISTINCT: m.mean(len({c.tokens for c in cs}) / len(cs) for cs, _ in sampled),
        }
        return {
            m.PASS_1: m.mean(right / samples for right in rights), **(several if samples > 1 else {}),
            **({} if self._comparison is None else self._comparison.sampled(prompts, sampled, ref_logps)),
            m.SAMPLES: samples, m.PROMPTS: len(prompts),
            m.EVAL_REWARD: m.mean(rewards), m.EVAL_UNSCORED: len(flat) - len(rewards),
            m.EVAL_KL: m.mean(c.logp - r for c, r in zip(flat, ref_logps, strict=True)),
            m.EVAL_ENTROPY: m.mean(-c.logp for c in flat), m.EVAL_LENGTH: m.mean(len(c.tokens) for c in flat),
        }

    def _distance(self, task: Enumerable, beta: float) -> dict[str, float]:
        """Total variation and KL to the exact target, mean over prompts."""
        (stop,) = self._policy.stop_ids
        listed = task.completions(len(self._policy.tokenizer), stop)
        tv, kl = [], []
        for prompt in self._prompts:
            pairs = [(prompt.tokens, ids) for ids in listed]
            log_policy = np.array(self._policy.sequence_logps(pairs))
            rewards = [task.reward(prompt.id, ids) for ids in listed]
            target, _ = log_target(self._reference.sequence_logps(pairs), rewards, beta)
            tv.append(0.5 * float(np.abs(np.exp(log_policy) - np.exp(target)).sum()))
            kl.append(float((np.exp(log_policy) * (log_policy - np.array(target))).sum()))
        return {m.TV: m.mean(tv), m.TARGET_KL: m.mean(kl)}


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased chance that one of k completions is right, from `right` of `samples` (arXiv 2107.03374, eq. 1)."""
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {right} right of {samples} completions.")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def _is_right(score: Score | Failure) -> bool:
    return isinstance(score, Score) and score.reward >= FULL_MARKS


def _show(
    version: int, prompt: Prompt, completions: Sequence[Completion], scores: Sequence[Score | Failure]
) -> dict[str, Any]:
    return {
        "version": version, "prompt_id": prompt.id, "prompt": prompt.text,
        "completions": [
            {"text": c.text, "reward": s.reward if isinstance(s, Score) else None, "logp": c.logp, "finish": c.finish}
            for c, s in zip(completions, scores, strict=True)
        ],
    }
