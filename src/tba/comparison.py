"""Completions of a policy against humans' and against the reference's: win-rate, perplexity, KL."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from tba import metrics as m
from tba.engines.protocol import Engine, Sampling
from tba.leases import completion_seed
from tba.policy import Policy
from tba.preference_metrics import perplexity, perplexity_diluted, sampled_kl, win_rate
from tba.records import Completion, Prompt
from tba.rewards.functions import Failure, Score
from tba.tasks.protocol import Task, outcomes

BATCH_PROMPTS = 128
"""Prompts sampled together in one engine call."""

Scored = Sequence[tuple[Sequence[Completion], Sequence[Score | Failure]]]
"""By prompt: its completions and what became of each."""


@runtime_checkable
class Compares(Protocol):
    """A task with humans' completions to compare with."""

    def reference(self, prompt: Prompt) -> str | None:
        """A human's completion; None if there is none."""
        ...


class Comparison:
    """Sums up completions of held-out prompts; what does not depend on the policy is computed once."""

    def __init__(
        self, task: Task, reference: Policy, engine: Engine | None, *, max_new_tokens: int, seed: int
    ) -> None:
        """`engine` samples with `reference`; without it there is no KL of the reference to the policy."""
        self._task, self._reference, self._engine = task, reference, engine
        self._max_new_tokens, self._seed = max_new_tokens, seed
        self._human: dict[str, float | None] = {}
        self._own: dict[str, tuple[list[Completion], list[float]]] = {}

    def sampled(self, prompts: Sequence[Prompt], scored: Scored, ref_logps: Sequence[float]) -> dict[str, Any]:
        """Of completions sampled at `policy.temperature`, whose log-probs under the reference are `ref_logps`."""
        flat = [c for completions, _ in scored for c in completions]
        owners = [p.id for p, (completions, _) in zip(prompts, scored, strict=True) for _ in completions]
        won = win_rate(*self._scores(prompts, scored))
        return {
            m.WIN_RATE: won.rate, m.WIN_LOW: won.low, m.WIN_HIGH: won.high, m.WIN_TIES: won.ties,
            m.EVAL_KL_ERROR: sampled_kl([c.logp for c in flat], ref_logps, owners).error,
        }

    def greedy(self, prompts: Sequence[Prompt], scored: Scored) -> dict[str, Any]:
        """Of the likeliest completions, as the paper evaluates: win-rate, and perplexity under the reference."""
        pairs = [(p, c) for p, (completions, _) in zip(prompts, scored, strict=True) for c in completions]
        plain = dataclasses.replace(self._reference, temperature=1.0)
        logps = plain.sequence_logps([(p.tokens, c.tokens) for p, c in pairs])
        lengths = [len(c.tokens) for _, c in pairs]
        return {
            m.WIN_RATE_GREEDY: win_rate(*self._scores(prompts, scored)).rate,
            m.PERPLEXITY: perplexity(logps, lengths),
            m.PERPLEXITY_DILUTED: perplexity_diluted(logps, lengths, [len(p.tokens) for p, _ in pairs]),
        }

    def reverse_kl(self, prompts: Sequence[Prompt], policy: Policy, samples: int) -> dict[str, Any]:
        """KL of the reference to the policy, from completions that the reference samples."""
        if self._engine is None:
            return {}
        missing = [prompt for prompt in prompts if prompt.id not in self._own]
        for at in range(0, len(missing), BATCH_PROMPTS):
            self._sample(self._engine, missing[at : at + BATCH_PROMPTS], samples)
        chosen = [(p, c, logp) for p in prompts for c, logp in zip(*self._own[p.id], strict=True)]
        logps = policy.sequence_logps([(p.tokens, c.tokens) for p, c, _ in chosen])
        found = sampled_kl([logp for *_, logp in chosen], logps, [p.id for p, *_ in chosen])
        return {m.KL_REVERSE: found.value, m.KL_REVERSE_ERROR: found.error}

    def _sample(self, engine: Engine, prompts: Sequence[Prompt], samples: int) -> None:
        """Keeps completions of the reference, with their log-probs under it."""
        sampling = Sampling(max_new_tokens=self._max_new_tokens, temperature=self._reference.temperature)
        seeds = [completion_seed(self._seed, prompt.id, "reference") for prompt in prompts]
        completions = engine.generate(prompts, num_samples=samples, sampling=sampling, seeds=seeds)
        for prompt, made in zip(prompts, completions, strict=True):
            logps = self._reference.sequence_logps([(prompt.tokens, c.tokens) for c in made])
            self._own[prompt.id] = made, logps

    def _scores(self, prompts: Sequence[Prompt], scored: Scored) -> tuple[list[float | None], list[float | None]]:
        """The score of each completion, and that of the human's for the same prompt."""
        own, human = [], []
        for prompt, (_, scores) in zip(prompts, scored, strict=True):
            own += [s.reward if isinstance(s, Score) else None for s in scores]
            human += [self._of_human(prompt)] * len(scores)
        return own, human

    def _of_human(self, prompt: Prompt) -> float | None:
        if prompt.id not in self._human:
            assert isinstance(self._task, Compares), "only a task with humans' completions is compared"
            text = self._task.reference(prompt)
            if text is None:
                self._human[prompt.id] = None
            else:
                said = Completion(tokens=(0,), text=text, logps=(0.0,), version=0, finish="stop")
                (outcome,) = outcomes(self._task, prompt, [said])
                self._human[prompt.id] = outcome.reward if isinstance(outcome, Score) else None
        return self._human[prompt.id]
