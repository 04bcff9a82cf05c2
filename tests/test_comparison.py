"""Comparing completions with humans' and the reference's: against enumerated distributions and by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from support import STOP, TEMPERATURE, make_completion, make_prompt, table_policy
from tba import metrics as m
from tba.comparison import Compares, Comparison
from tba.engines.protocol import Sampling
from tba.engines.table import TableEngine
from tba.policy import Policy, copy_out
from tba.records import Completion, Prompt
from tba.rewards.functions import Failure, Score
from tba.settings import TaskSettings
from tba.tasks.enumerable import Enumerable

PROMPTS = [make_prompt("a", (1, 3)), make_prompt("b", (1, 4)), make_prompt("c", (1, 5))]
HUMAN = {"a": "xx", "b": "fail", "c": None}


class Lengths:
    """A completion is worth its text's length; humans said `HUMAN`."""

    characters = "abc"

    def __init__(self) -> None:
        self.asked = 0

    def prompts(self, encode: Any) -> Sequence[Prompt]:
        return PROMPTS

    def held_out(self, encode: Any) -> Sequence[Prompt]:
        return PROMPTS

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Any]:
        self.asked += 1
        return [Failure(reason="timeout") if c.text == "fail" else float(len(c.text)) for c in completions]

    def gold(self, prompt: Prompt) -> None:
        return None

    def reference(self, prompt: Prompt) -> str | None:
        return HUMAN[prompt.id]


def sharp_table(seed: int) -> Policy:
    policy = table_policy(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(3.0)
    return policy


def comparison(policy: Policy, task: Any = None) -> Comparison:
    return Comparison(task or Lengths(), policy, TableEngine(policy), max_new_tokens=2, seed=7)


def exact_kl(one: Policy, other: Policy) -> float:
    """KL(one || other), mean over prompts, of completions of up to two tokens: all are listed."""
    task = Enumerable(TaskSettings(name="enumerable"), max_new_tokens=2, score_limit_s=1.0)
    listed = task.completions(len(one.tokenizer), STOP)
    total = 0.0
    for prompt in PROMPTS:
        pairs = [(prompt.tokens, ids) for ids in listed]
        ours, theirs = one.sequence_logps(pairs), other.sequence_logps(pairs)
        assert math.fsum(map(math.exp, ours)) == pytest.approx(1.0, abs=1e-5)
        total += math.fsum(math.exp(a) * (a - b) for a, b in zip(ours, theirs, strict=True))
    return total / len(PROMPTS)


def test_kl_of_the_reference_to_the_policy_is_the_enumerated_one() -> None:
    reference, policy = sharp_table(2), sharp_table(4)
    exact = exact_kl(reference, policy)
    assert exact_kl(policy, reference) > 1.5 * exact  # the two directions differ
    found = comparison(reference).reverse_kl(PROMPTS, policy, 600)
    assert found[m.KL_REVERSE] == pytest.approx(exact, rel=0.1)
    assert found[m.KL_REVERSE_ERROR] > 0


def test_the_references_completions_are_sampled_once() -> None:
    reference, made = sharp_table(1), comparison(sharp_table(1))
    assert made.reverse_kl(PROMPTS, reference, 5)[m.KL_REVERSE] == pytest.approx(0.0, abs=1e-6)
    kept = dict(made._own)
    made.reverse_kl(PROMPTS, sharp_table(2), 5)
    assert made._own == kept
    assert Comparison(Lengths(), reference, None, max_new_tokens=2, seed=7).reverse_kl(PROMPTS, reference, 5) == {}


def scored(texts: Sequence[Sequence[str]], task: Lengths) -> list[tuple[list[Completion], list[Any]]]:
    rows = []
    for prompt, of_prompt in zip(PROMPTS, texts, strict=True):
        completions = [make_completion((5, STOP), text=text) for text in of_prompt]
        rewards = task.score(prompt, completions)
        rows.append((completions, [r if isinstance(r, Failure) else Score(reward=r) for r in rewards]))
    return rows


def test_each_completion_is_compared_with_the_human_of_its_prompt() -> None:
    task = Lengths()
    made = comparison(sharp_table(1), task)
    rows = scored([["xxx", "xx", "x", "fail"], ["xxx", "x", "x", "x"], ["xxx", "x", "x", "x"]], task)
    before = task.asked
    found = made.sampled(PROMPTS, rows, [-1.5] * 12)
    # of the four of prompt a: one win, one tie, one loss, one unscored; b's human is unscored; c has none
    assert (found[m.WIN_RATE], found[m.WIN_TIES]) == (pytest.approx(1 / 3), 1)
    assert 0 < found[m.WIN_LOW] < 1 / 3 < found[m.WIN_HIGH] < 1
    made.sampled(PROMPTS, rows, [-1.5] * 12)
    assert task.asked == before + 2  # the humans of a and b, once


def test_errors_take_a_prompts_completions_as_one_draw() -> None:
    task = Lengths()
    rows = scored([["x", "x"], ["x", "x"], ["x", "x"]], task)
    # logp -0.75 each; ref -1, -1, -2, -2, -5, -5: gaps 0.25, 1.25, 4.25, twice each; mean 23/12
    found = comparison(sharp_table(1), task).sampled(PROMPTS, rows, [-1.0, -1.0, -2.0, -2.0, -5.0, -5.0])
    mean = (0.25 + 1.25 + 4.25) / 3
    deviation = math.sqrt(sum((g - mean) ** 2 for g in (0.25, 1.25, 4.25)) / 2)
    assert found[m.EVAL_KL_ERROR] == pytest.approx(deviation / math.sqrt(3))


def test_perplexities_are_the_references_at_temperature_one() -> None:
    reference = sharp_table(1)
    assert reference.temperature == TEMPERATURE != 1.0
    plain = dataclasses.replace(reference, temperature=1.0)
    task = Lengths()
    rows = scored([["x"], ["x"], ["x"]], task)
    found = comparison(reference, task).greedy(PROMPTS, rows)
    logps = plain.sequence_logps([(p.tokens, (5, STOP)) for p in PROMPTS])
    assert found[m.PERPLEXITY] == pytest.approx(math.exp(-sum(logps) / 6))
    assert found[m.PERPLEXITY_DILUTED] == pytest.approx(sum(math.exp(-logp / 4) for logp in logps) / 3)
    assert found[m.WIN_RATE_GREEDY] == 0.0


def test_an_evaluation_of_such_a_task_holds_all_of_it() -> None:
    from tba.evaluate import Evaluator

    reference, policy = sharp_table(2), sharp_table(4)
    own = policy.frozen_copy()
    evaluator = Evaluator(
        policy=own, engine=TableEngine(own), reference=reference, task=Lengths(), prompts=PROMPTS, max_new_tokens=2,
        seed=3, reference_engine=TableEngine(reference),
    )
    found = evaluator.evaluate(copy_out(policy.model), 4, prompts=3, samples=400, beta=0.5).metrics
    assert isinstance(Lengths(), Compares)
    assert found[m.EVAL_KL] == pytest.approx(exact_kl(policy, reference), rel=0.15)
    assert found[m.KL_REVERSE] == pytest.approx(exact_kl(reference, policy), rel=0.15)
    names = {m.WIN_RATE, m.WIN_RATE_GREEDY, m.PERPLEXITY, m.PERPLEXITY_DILUTED, m.DISTINCT_1, m.SELF_BLEU}
    assert names <= found.keys()
    m.to_json(found)
    during = evaluator.evaluate(copy_out(policy.model), 5, prompts=3, samples=1, beta=0.5, greedy=False).metrics
    assert m.WIN_RATE in during
    assert m.PERPLEXITY not in during
    assert Sampling(max_new_tokens=2, temperature=0.7).top_p == 1.0
