"""Held-out quality of one version: pass@k, reward, KL, diversity, and distance to an exact target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tba import metrics as m
from tba.audit import Audit, Audits
from tba.catalog import MAX_LISTED
from tba.comparison import Compares, Comparison
from tba.diversity import distinct_n, effective_answers, embedding_distance, self_bleu
from tba.embeddings import Embedder
from tba.engines.protocol import Engine, Sampling
from tba.estimates import bootstrap, kinds, vote_of, wilson
from tba.estimates import pass_at_k as pass_at_k  # other rooms know it as a word of evaluation
from tba.leases import completion_seed
from tba.policy import Policy
from tba.records import Completion, Prompt
from tba.rewards.functions import FULL_MARKS, Failure, Score
from tba.scoring import Scores, Scoring
from tba.tasks.enumerable import Enumerable, listed, log_target
from tba.tasks.protocol import Answers, Task, outcomes
from tba.weights import Tensors

BATCH_PROMPTS = 128
"""Prompts sampled together in one engine call."""
SHOWN = 20
"""Prompts whose completions an evaluation keeps for reading."""

Scored = tuple[list[Completion], list[Score | Failure]]
"""A prompt's completions and what each scored."""


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
        max_new_tokens: int, seed: int, reference_engine: Engine | None = None, prior: float = 1.0,
    ) -> None:
        """`engine` samples with `policy`, so that weights loaded into one are in the other. `prior` is the weight of
        the reference's log-prob in the exact target.

        `reference_engine` samples with `reference`; only tasks that compare completions with humans' use it.
        """
        self._policy, self._engine, self._reference, self._task = policy, engine, reference, task
        self._prompts, self._max_new_tokens, self._seed, self._prior = prompts, max_new_tokens, seed, prior
        self._audit = Audit(task) if isinstance(task, Audits) else None
        self.embed = Embedder(None) if self._audit is None else self._audit.embed
        """What completions of a prompt are told apart by; an audit's own if it has one."""
        self.scoring: Scores = Scoring(task)
        """What has completions scored, as many prompts at once as it was made for."""
        self._listed: list[tuple[Prompt, Sequence[tuple[int, ...]], Sequence[float]]] = []
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
            found |= self._share(m.PASS_1_GREEDY, m.GREEDY_INTERVAL, likely)
            if self._comparison is not None:
                found |= self._comparison.greedy(chosen, likely)
                found |= self._comparison.reverse_kl(chosen, self._policy, samples)
        if self._audit is not None:
            found |= self._audit.of([c for completions, _ in sampled for c in completions], is_last=greedy)
        if beta > 0:  # without KL there is no such target
            found |= self._distance(beta)
        shown = [_show(version, p, c, s) for p, (c, s) in zip(chosen[:SHOWN], sampled, strict=False)]
        return Evaluation(version=version, metrics=found, shown=shown)

    def _score(
        self, prompts: Sequence[Prompt], samples: int, temperature: float
    ) -> list[Scored]:
        sampling = Sampling(max_new_tokens=self._max_new_tokens, temperature=temperature)
        found: list[Scored] = []
        for at in range(0, len(prompts), BATCH_PROMPTS):
            part = prompts[at : at + BATCH_PROMPTS]
            seeds = [completion_seed(self._seed, p.id, "evaluation") for p in part]
            completions = self._engine.generate(part, num_samples=samples, sampling=sampling, seeds=seeds)
            asked = [(c, self.scoring.begin(p, c)) for p, c in zip(part, completions, strict=True)]
            found += [(c, scores.result()) for c, scores in asked]
        return found

    def _summary(
        self, prompts: Sequence[Prompt], sampled: Sequence[Scored]
    ) -> dict[str, Any]:
        flat = [c for completions, _ in sampled for c in completions]
        rights = [sum(map(_is_right, scores)) for _, scores in sampled]
        samples = len(sampled[0][0])
        pairs = [(p.tokens, c.tokens) for p, (cs, _) in zip(prompts, sampled, strict=True) for c in cs]
        ref_logps = self._reference.sequence_logps(pairs)
        rewards = [s.reward for _, scores in sampled for s in scores if isinstance(s, Score)]
        shares = [right / samples for right in rights]
        return {
            m.PASS_1: m.mean(shares), m.PASS_1_INTERVAL: bootstrap(shares, self._seed),
            **(self._of_several(prompts, sampled, rights) if samples > 1 else {}), **self._by_level(prompts, shares),
            **self._diversity(sampled),
            **({} if self._comparison is None else self._comparison.sampled(prompts, sampled, ref_logps)),
            m.SAMPLES: samples, m.PROMPTS: len(prompts), m.EVAL_SEED: self._seed,
            m.EVAL_REWARD: m.mean(rewards), m.EVAL_UNSCORED: len(flat) - len(rewards),
            m.EVAL_KL: m.mean(c.logp - r for c, r in zip(flat, ref_logps, strict=True)),
            m.EVAL_ENTROPY: m.mean(-c.logp for c in flat), m.EVAL_LENGTH: m.mean(len(c.tokens) for c in flat),
        }

    def _of_several(
        self, prompts: Sequence[Prompt], sampled: Sequence[Scored], rights: Sequence[int]
    ) -> dict[str, Any]:
        """What several completions of a prompt say together."""
        samples = len(sampled[0][0])
        ks = [k for k in (2**n for n in range(samples.bit_length())) if k < samples]
        found: dict[str, Any] = {
            m.PASS_K: m.mean(pass_at_k(samples, right, samples) for right in rights),
            m.PASS_EACH: {str(k): m.mean(pass_at_k(samples, right, k) for right in rights) for k in (*ks, samples)},
        }
        if not isinstance(self._task, Answers):
            return found
        task: Answers = self._task
        kinds_PK = [kinds([task.answer_of(p, c) for c in completions], partial(task.same_answer, p))
                    for p, (completions, _) in zip(prompts, sampled, strict=True)]
        votes = [vote_of(kinds_K, [_is_right(s) for s in scores])
                 for kinds_K, (_, scores) in zip(kinds_PK, sampled, strict=True)]
        return {**found, m.EFFECTIVE: effective_answers(kinds_PK), m.MAJ_K: m.mean(votes),
                m.MAJ_INTERVAL: bootstrap(votes, self._seed)}

    def _diversity(self, sampled: Sequence[Scored]) -> dict[str, float]:
        """How unlike the completions of a prompt are, if it has several; all attacks of an audit are of one prompt."""
        completions_PK = [completions for completions, _ in sampled]
        texts_PK = [[c.text for c in completions] for completions in completions_PK]
        if isinstance(self._task, Audits):
            completions_PK = [[c for completions in completions_PK for c in completions]]
            texts_PK = [[self._task.attack_of(c) for c in completions_PK[0]]]
        if len(completions_PK[0]) < 2:
            return {}
        ids_PK = [[c.tokens for c in completions] for completions in completions_PK]
        flat = [ids for ids_K in ids_PK for ids in ids_K]
        return {
            m.DISTINCT: m.mean(len({*ids_K}) / len(ids_K) for ids_K in ids_PK),
            m.DISTINCT_1: distinct_n(flat, 1), m.DISTINCT_2: distinct_n(flat, 2),
            m.SELF_BLEU: self_bleu(ids_PK, self._seed), m.EMBEDDING_DISTANCE: embedding_distance(texts_PK, self.embed),
            **({} if isinstance(self._task, Answers) else {m.EFFECTIVE: effective_answers(texts_PK)}),
        }

    def _by_level(self, prompts: Sequence[Prompt], shares: Sequence[float]) -> dict[str, Any]:
        """pass@1 of the prompts of each level, if the task tells levels apart."""
        levels: dict[str, list[float]] = {}
        for prompt, share in zip(prompts, shares, strict=True):
            if "level" in prompt.columns:
                levels.setdefault(str(prompt.columns["level"]), []).append(share)
        return {m.BY_LEVEL: {
            level: {"pass@1": m.mean(of), "interval": bootstrap(of, self._seed), "prompts": len(of)}
            for level, of in sorted(levels.items())
        }} if levels else {}

    def _share(self, name: str, interval: str, likely: Sequence[Scored]) -> dict[str, Any]:
        """Share of prompts whose one completion is right."""
        rights = [_is_right(scores[0]) for _, scores in likely]
        return {name: m.mean(map(float, rights)), interval: wilson(sum(rights), len(rights))}

    def vary(
        self, tensors: Tensors, version: int, sides: Mapping[str, tuple[Sequence[Prompt], Sequence[Sequence[Prompt]]]]
    ) -> dict[str, Any]:
        """Metrics of problems beside variants of them that have other numbers; every answer is the most likely one.

        `sides` are problems and the variants of each, under `held_out` and perhaps `training`; those without
        variants are left out.
        """
        self._engine.load(tensors, version)
        found: dict[str, Any] = {}
        for side, (originals, variants) in sides.items():
            pairs = [(p, vs) for p, vs in zip(originals, variants, strict=True) if vs]
            names = m.VARIANTS[side]
            found[names.prompts] = len(pairs)
            if not pairs:
                continue
            right = self._right([p for p, _ in pairs])
            fresh = iter(self._right([v for _, vs in pairs for v in vs]))
            fresh_P = [[next(fresh) for _ in vs] for _, vs in pairs]
            every = [all(rights) for rights in fresh_P]
            shares = [sum(rights) / len(rights) for rights in fresh_P]
            gaps = [was - share for was, share in zip(right, shares, strict=True)]
            found |= {
                names.instances: len(fresh_P[0]), names.original: m.mean(map(float, right)),
                names.fresh: m.mean(shares), names.fresh_interval: bootstrap(shares, self._seed),
                names.all_right: m.mean(map(float, every)), names.all_interval: wilson(sum(every), len(every)),
                names.gap: m.mean(gaps), names.gap_interval: bootstrap(gaps, self._seed),
            }
        return found

    def _right(self, prompts: Sequence[Prompt]) -> list[bool]:
        """Whether the most likely completion of each prompt is right."""
        return [_is_right(scores[0]) for _, scores in self._score(prompts, 1, 0.0)]

    def _distance(self, beta: float) -> dict[str, float]:
        """Total variation and KL to the exact target, mean over prompts; nothing where completions are not listed."""
        tv, kl = [], []
        self._listed = self._listed or list(self._listing())
        for prompt, completions, rewards in self._listed:
            pairs = [(prompt.tokens, ids) for ids in completions]
            log_policy = np.array(self._policy.sequence_logps(pairs))
            target, _ = log_target(self._reference.sequence_logps(pairs), rewards, beta, self._prior)
            share = np.exp(log_policy)
            tv.append(0.5 * float(np.abs(share - np.exp(target)).sum()))
            kl.append(float((share[share > 0] * (log_policy - np.array(target))[share > 0]).sum()))
        return {m.TV: m.mean(tv), m.TARGET_KL: m.mean(kl)} if tv else {}

    def _listing(self) -> Iterator[tuple[Prompt, Sequence[tuple[int, ...]], Sequence[float]]]:
        """Prompts with all their completions and the reward of each, where they can be listed."""
        task, vocabulary = self._task, len(self._policy.tokenizer)
        if isinstance(task, Enumerable):
            (stop,) = self._policy.stop_ids
            listing = task.completions(vocabulary, stop)
            for prompt in self._prompts:
                yield prompt, listing, [task.reward(prompt.id, ids) for ids in listing]
        elif isinstance(task, Audits) and task.modes and vocabulary**self._max_new_tokens <= MAX_LISTED:
            (stop,) = self._policy.stop_ids
            limits = self._policy.limits
            listing = listed(vocabulary, stop, longest=self._max_new_tokens, shortest=limits.first,
                             is_forced=limits.last is not None)
            said = [Completion(tokens=ids, text=self._policy.decode(ids), logps=(0.0,) * len(ids), version=0,
                               finish="stop") for ids in listing]
            scores = outcomes(task, self._prompts[0], said)
            yield self._prompts[0], listing, [s.reward for s in scores if isinstance(s, Score)]


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
