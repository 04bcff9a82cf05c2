"""Searcher: leased prompts become scored groups, whatever scorers, references and engines do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from support import STOP, TEMPERATURE, llama_policy, make_completion, make_lease, make_prompt, table_policy
from tba.engines.protocol import Engine, Sampling
from tba.engines.table import TableEngine
from tba.engines.transformers import TransformersEngine
from tba.exploration import Exploration
from tba.leases import completion_seed
from tba.policy import Policy, copy_out
from tba.records import Completion, Group, Lease, Prompt
from tba.rewards.functions import MAX_DETAIL, Failure, Score
from tba.searcher import Searcher
from tba.weights import Weights, WrongWeightsError, digest

SAMPLING = Sampling(max_new_tokens=3, temperature=TEMPERATURE)
PROMPTS = [make_prompt("long", (1, 3, 4)), make_prompt("short", (1,)), make_prompt("other", (1, 5))]
LEASES = [make_lease(p, number, visit=number % 2) for number, p in enumerate([*PROMPTS, PROMPTS[0], PROMPTS[2]], 3)]


class LengthTask:
    """Rewards a completion's length."""

    characters = "abc"

    def prompts(self, encode: Any) -> Sequence[Prompt]:
        return PROMPTS

    def held_out(self, encode: Any) -> Sequence[Prompt]:
        return PROMPTS

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Any]:
        return [len(c.tokens) + len(prompt.tokens) / 10 for c in completions]

    def gold(self, prompt: Prompt) -> None:
        return None


class FixedTask(LengthTask):
    """Returns what it was made with."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Any:
        return self.returned


class FixedReference:
    """Gives the log-probs it was made with, one after the other."""

    def __init__(self, logps: Sequence[float]) -> None:
        self.logps = list(logps)

    def sequence_logps(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        return [self.logps.pop(0) for _ in pairs]


class DeafEngine(TableEngine):
    """Takes the version and ignores the weights."""

    def load(self, tensors: Mapping[str, np.ndarray], version: int) -> None:
        self.version = version


class FixedEngine:
    """Answers every prompt with the same completions."""

    version = 6

    def __init__(self, completions: Sequence[Completion]) -> None:
        self.completions = list(completions)

    def generate(self, prompts: Sequence[Prompt], **unused: Any) -> list[list[Completion]]:
        return [self.completions for _ in prompts]

    def load(self, tensors: Mapping[str, np.ndarray], version: int) -> None:
        raise AssertionError

    def tensors(self) -> Mapping[str, np.ndarray]:
        return {}


def make_searcher(
    *, engine: Engine | None = None, reference: Any = None, task: Any = None, num_samples: int = 4,
    batch_prompts: int = 2, seed: int = 8, **options: Any,
) -> Searcher:
    return Searcher(
        engine=engine or TableEngine(table_policy(1)), reference=reference or table_policy(2),
        task=task or LengthTask(), exploration=Exploration(SAMPLING), num_samples=num_samples,
        batch_prompts=batch_prompts, seed=seed, **options,
    )  # fmt: skip


def answer(completions: Sequence[Completion], **options: Any) -> Group:
    """The group of one lease that an engine answers with `completions`."""
    options.setdefault("reference", FixedReference([-2.5] * len(completions)))
    (group,) = make_searcher(engine=FixedEngine(completions), **options).search([make_lease(PROMPTS[0])])
    return group


COMPLETIONS = [make_completion((n, STOP), version=6) for n in (3, 4, 5, 0)]


# ---- what a group says --------------------------------------------------------------------------


def test_groups_answer_leases_in_order() -> None:
    policy, reference = table_policy(1), table_policy(2)
    searcher = make_searcher(engine=TableEngine(policy), reference=reference, name="searcher-3")
    weights = Weights.of(copy_out(policy.model), version=6, round_=2)
    searcher.adopt(weights)
    leases = [*LEASES[:3], make_lease(PROMPTS[1], 40, visit=2, attempt=5)]
    groups = list(searcher.search(leases, run_attempt=4))
    assert [(g.prompt, g.number, g.attempt) for g in groups] == [(x.prompt, x.number, x.attempt) for x in leases]
    assert {(g.version, g.digest, g.searcher, g.run_attempt) for g in groups} == {(6, weights.digest, "searcher-3", 4)}
    for group in groups:
        assert len(group.trajectories) == 4
        for t in group.trajectories:
            assert t.completion.version == 6
            assert t.reward == len(t.completion.tokens) + len(group.prompt.tokens) / 10
            ((expected),) = reference.sequence_logps([(group.prompt.tokens, t.completion.tokens)])
            assert t.ref_logp == pytest.approx(expected, abs=1e-5)
            (now,) = policy.sequence_logps([(group.prompt.tokens, t.completion.tokens)])
            assert t.completion.logp == pytest.approx(now, abs=1e-5)


def test_completions_are_those_of_the_leases_seed() -> None:
    engine = TableEngine(table_policy(1))
    for lease in [*LEASES, make_lease(PROMPTS[0], 9, visit=1, attempt=5)]:
        (group,) = make_searcher(seed=8).search([lease])
        seeds = [completion_seed(8, lease.prompt.id, lease.visit, lease.attempt)]
        expected = engine.generate([lease.prompt], num_samples=4, sampling=SAMPLING, seeds=seeds)
        assert [list(group.completions)] == expected


def test_visit_attempt_prompt_and_run_seed_all_matter_d08() -> None:
    base = {"seed": 8, "prompt_id": "p", "visit": 2, "attempt": 1}
    seeds = {completion_seed(**{**base, **change}) for change in
             ({}, {"seed": 9}, {"prompt_id": "q"}, {"visit": 3}, {"attempt": 0}, {"visit": 21, "attempt": 0})}
    assert len(seeds) == 6
    assert completion_seed(**base) == completion_seed(**base)


@pytest.mark.parametrize("kind", ["table", "transformers"])
def test_one_call_is_many_calls(kind: str) -> None:
    def searcher(batch_prompts: int) -> Searcher:
        engine = TableEngine(table_policy(1)) if kind == "table" else TransformersEngine(llama_policy(1))
        reference = table_policy(2) if kind == "table" else llama_policy(2)
        return make_searcher(engine=engine, reference=reference, batch_prompts=batch_prompts)

    def plain(groups: Sequence[Group]) -> list[Any]:
        return [(g.number, g.version, [(c.tokens, c.text, c.finish) for c in g.completions],
                 [t.reward for t in g.trajectories]) for g in groups]

    def logps(groups: Sequence[Group]) -> list[float]:
        return [x for g in groups for t in g.trajectories for x in (t.completion.logp, t.ref_logp)]

    together = list(searcher(2).search(LEASES[:4]))
    two = searcher(2)
    assert [*two.search(LEASES[:2]), *two.search(LEASES[2:4])] == together  # to the bit: the same batches
    for batch_prompts in (1, 3, 99):
        groups = list(searcher(batch_prompts).search(LEASES[:4]))
        assert plain(groups) == plain(together)
        assert logps(groups) == pytest.approx(logps(together), abs=1e-5)


def test_no_leases_make_no_groups() -> None:
    assert list(make_searcher().search([])) == []


# ---- weights ------------------------------------------------------------------------------------


def test_the_digest_is_that_of_what_the_engine_holds() -> None:
    weights = Weights.of(copy_out(table_policy(7).model), version=5, round_=1)
    searcher = make_searcher(engine=TableEngine(table_policy(1)))
    searcher.adopt(weights)
    (group,) = searcher.search(LEASES[:1])
    assert group.version == 5
    assert group.digest == weights.digest == digest(copy_out(table_policy(7).model))


def test_an_engine_that_keeps_its_weights_is_told_so() -> None:
    searcher = make_searcher(engine=DeafEngine(table_policy(1)))
    with pytest.raises(WrongWeightsError, match=r"version 5 as .*'logits' is still that of version 0"):
        searcher.adopt(Weights.of(copy_out(table_policy(7).model), version=5, round_=1))


def test_weights_adopted_between_batches_sample_the_next() -> None:
    searcher = make_searcher(batch_prompts=1)
    under_way = searcher.sample([make_lease(PROMPTS[0], 0)])
    searcher.adopt(Weights.of(copy_out(table_policy(7).model), version=5, round_=1))
    (first,) = searcher.scored(under_way)  # scored after the newer weights came, and still of the older
    (second,) = searcher.search([make_lease(PROMPTS[0], 1)])
    assert (first.version, first.digest) == (0, "")
    assert second.version == 5
    assert {t.completion.version for t in second.trajectories} == {5}
    assert [c.tokens for c in first.completions] != [c.tokens for c in second.completions]


def test_weights_that_do_not_fit_are_refused_and_search_goes_on_with_the_old_ones() -> None:  # cases h04, h11
    searcher = make_searcher()
    searcher.adopt(Weights.of(copy_out(table_policy(7).model), version=5, round_=1))
    (before,) = searcher.search(LEASES[:1])
    torn = {name: tensor[:-1] for name, tensor in copy_out(table_policy(8).model).items()}
    with pytest.raises(ValueError, match=r"weights do not fit the model.*shapes"):
        searcher.adopt(Weights.of(torn, version=6, round_=2))
    assert list(searcher.search(LEASES[:1])) == [before]
    searcher.adopt(Weights.of(copy_out(table_policy(8).model), version=6, round_=2))
    (after,) = searcher.search(LEASES[:1])
    assert (before.version, after.version) == (5, 6)


def test_reference_stays_when_weights_are_adopted() -> None:
    policy: Policy = table_policy(1)
    searcher = make_searcher(engine=TableEngine(policy.frozen_copy()), reference=policy.frozen_copy())
    searcher.adopt(Weights.of(copy_out(table_policy(7).model), version=5, round_=1))
    (group,) = searcher.search(LEASES[:1])
    pairs = [(group.prompt.tokens, t.completion.tokens) for t in group.trajectories]
    assert [t.ref_logp for t in group.trajectories] == pytest.approx(policy.sequence_logps(pairs), abs=1e-5)


# ---- unscored -----------------------------------------------------------------------------------


def test_what_has_no_reward_is_recorded_and_not_in_the_group_mean() -> None:
    group = answer(COMPLETIONS, task=FixedTask([0.5, None, math.nan, -1]))
    assert [(t.completion, t.reward) for t in group.trajectories] == [(COMPLETIONS[0], 0.5), (COMPLETIONS[3], -1.0)]
    assert [(u.completion, u.reason) for u in group.unscored] == [
        (COMPLETIONS[1], "none"), (COMPLETIONS[2], "non_finite")
    ]  # fmt: skip
    assert group.num_tokens == 8  # delivered: scored and unscored


@pytest.mark.parametrize(
    ("returned", "reason"),
    [(None, "none"), ([1.0], "wrong_length"), ("four", "wrong_type"), ([math.inf] * 4, "non_finite")],
)
def test_a_whole_group_may_be_unscored(returned: Any, reason: str) -> None:
    group = answer(COMPLETIONS, task=FixedTask(returned))
    assert group.trajectories == ()
    assert [u.reason for u in group.unscored] == [reason] * 4


def test_scores_and_failures_of_a_task_are_kept() -> None:
    returned = [Score(reward=0.5, parts={"length": 0.2}), Failure(reason="timeout", detail="x" * 999)] * 2
    group = answer(COMPLETIONS, task=FixedTask(returned))
    assert [(t.reward, t.reward_parts) for t in group.trajectories] == [(0.5, {"length": 0.2})] * 2
    assert [u.reason for u in group.unscored] == ["timeout"] * 2
    assert {len(u.detail) for u in group.unscored} == {MAX_DETAIL}


def test_a_failure_beside_numbers_keeps_its_reason() -> None:
    group = answer(COMPLETIONS, task=FixedTask([0.5, Failure(reason="timeout"), 1, None]))
    assert [t.reward for t in group.trajectories] == [0.5, 1.0]
    assert [u.reason for u in group.unscored] == ["timeout", "none"]


def test_a_score_that_is_not_finite_is_unscored() -> None:
    group = answer(COMPLETIONS, task=FixedTask([Score(reward=r) for r in (0.5, math.nan, math.inf, 1.0)]))
    assert [t.reward for t in group.trajectories] == [0.5, 1.0]
    assert [u.reason for u in group.unscored] == ["non_finite", "non_finite"]


def test_log_probs_that_are_not_finite_are_unscored_c05() -> None:
    completions = [
        COMPLETIONS[0],
        make_completion((4, STOP), version=6, logps=(-0.5, -math.inf)),
        make_completion((5, STOP), version=6, logps=(math.nan, -0.5)),
        COMPLETIONS[3],
    ]
    reference = FixedReference([-1.0, -2.0, -3.0, -math.inf])
    group = answer(completions, reference=reference, task=FixedTask([1, 2, 3, 4]))
    assert [(t.reward, t.ref_logp) for t in group.trajectories] == [(1.0, -1.0)]
    assert [u.reason for u in group.unscored] == ["logp_non_finite", "logp_non_finite", "ref_non_finite"]


def test_reference_log_probs_stay_with_their_completions() -> None:
    searcher = make_searcher(engine=FixedEngine(COMPLETIONS[:2]), reference=FixedReference([-1, -2, -3, -4, -5, -6]))
    groups = list(searcher.search([make_lease(p, n) for n, p in enumerate(PROMPTS)]))
    assert [[t.ref_logp for t in g.trajectories] for g in groups] == [[-1, -2], [-3, -4], [-5, -6]]


def test_time_is_booked() -> None:
    searcher = make_searcher()
    searcher.adopt(Weights.of(copy_out(table_policy(7).model), version=5, round_=1))
    leases: Sequence[Lease] = LEASES
    list(searcher.search(leases))
    spent = searcher.times
    assert min(spent.sampling_s, spent.scoring_s, spent.reference_s, spent.loading_s) > 0
