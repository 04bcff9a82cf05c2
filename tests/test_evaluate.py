"""Evaluation: counts, common random numbers, and the distance to a target that is reached exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from support import STOP, make_prompt, table_policy
from tba import evaluate as room
from tba import metrics as m
from tba.diversity import effective, effective_answers, embedding_distance, self_bleu
from tba.embeddings import Embedder
from tba.engines.protocol import Sampling
from tba.engines.table import TableEngine
from tba.estimates import bootstrap, pass_at_k, wilson
from tba.evaluate import Evaluation, Evaluator
from tba.leases import completion_seed
from tba.policy import Policy, copy_out
from tba.records import Completion, Prompt
from tba.rewards.functions import Failure
from tba.settings import TaskSettings
from tba.tasks.enumerable import Enumerable, log_target
from tba.tasks.protocol import Task
from tba.tasks.redteam import Attack

BETA = 0.7
SEED = 12
PROMPTS = [make_prompt("a", (1, 3)), make_prompt("b", (1, 4)), make_prompt("c", (1, 3, 3))]


class Marks:
    """Full marks for an even first id; one prompt's completions that do not stop are unscored."""

    characters = ""

    def prompts(self, encode: Any) -> Sequence[Prompt]:
        return PROMPTS

    def held_out(self, encode: Any) -> Sequence[Prompt]:
        return PROMPTS

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Any]:
        return [
            None if prompt.id == "b" and c.finish == "length" else (1.0 if c.tokens[0] % 2 == 0 else 0.25)
            for c in completions
        ]

    def gold(self, prompt: Prompt) -> None:
        return None


def make_evaluator(policy: Policy, reference: Policy, task: Task, prompts: Sequence[Prompt] = PROMPTS) -> Evaluator:
    return Evaluator(
        policy=policy, engine=TableEngine(policy), reference=reference, task=task, prompts=prompts,
        max_new_tokens=2, seed=SEED,
    )  # fmt: skip


def evaluate(seed: int = 1, *, prompts: int = 3, samples: int = 5, **options: Any) -> Evaluation:
    """Weights of table `seed` on `Marks`; the evaluator was made with other ones."""
    evaluator = make_evaluator(table_policy(9), table_policy(2), Marks())
    weights = copy_out(table_policy(seed).model)
    return evaluator.evaluate(weights, 7, prompts=prompts, samples=samples, beta=BETA, **options)


def sampled(seed: int, samples: int, temperature: float) -> list[list[Completion]]:
    policy = table_policy(seed)
    seeds = [completion_seed(SEED, p.id, "evaluation") for p in PROMPTS]
    sampling = Sampling(max_new_tokens=2, temperature=temperature)
    return TableEngine(policy).generate(PROMPTS, num_samples=samples, sampling=sampling, seeds=seeds)


# ---- pass@k -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "right", "k", "chance"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (5, 2, 3, 0.9),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (10, 3, 4, 1 - 35 / 210),  # 1 - C(7,4)/C(10,4)
        (4, 0, 4, 0.0),
        (4, 3, 2, 1.0),  # only one wrong: two cannot both be
        (4, 4, 1, 1.0),
        (1, 1, 1, 1.0),
    ],
)
def test_pass_at_k_known_values(samples: int, right: int, k: int, chance: float) -> None:
    assert pass_at_k(samples, right, k) == pytest.approx(chance, abs=1e-12)


@pytest.mark.parametrize("samples", [3, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples: int) -> None:
    for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        subsets = list(itertools.combinations(range(samples), k))
        share = sum(any(n < right for n in subset) for subset in subsets) / len(subsets)
        assert pass_at_k(samples, right, k) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 2), (4, -1, 2)])
def test_pass_at_k_that_cannot_be_estimated_is_refused(samples: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} cannot be estimated from {right} right of {samples}"):
        pass_at_k(samples, right, k)


# ---- counts -------------------------------------------------------------------------------------


def test_every_number_against_a_count_by_hand() -> None:
    found = evaluate().metrics
    answers = sampled(1, 5, 0.7)
    reference = table_policy(2)
    rights = [sum(c.tokens[0] % 2 == 0 and not (p.id == "b" and c.finish == "length") for c in cs)
              for p, cs in zip(PROMPTS, answers, strict=True)]  # fmt: skip
    unscored = sum(c.finish == "length" for c in answers[1])
    flat = [(p, c) for p, cs in zip(PROMPTS, answers, strict=True) for c in cs]
    refs = [reference.sequence_logps([(p.tokens, c.tokens)])[0] for p, c in flat]
    greedy = sampled(1, 1, 0.0)
    assert 0 < unscored < 5
    assert 0 < sum(rights) < 15
    expected = {
        m.EVAL_STEP: 7, m.SAMPLES: 5, m.PROMPTS: 3, m.EVAL_UNSCORED: unscored,
        m.PASS_1: sum(rights) / 15, m.PASS_K: sum(r > 0 for r in rights) / 3,
        m.EVAL_REWARD: (sum(rights) + 0.25 * (15 - unscored - sum(rights))) / (15 - unscored),
        m.EVAL_KL: math.fsum(c.logp - r for (_, c), r in zip(flat, refs, strict=True)) / 15,
        m.EVAL_ENTROPY: -math.fsum(c.logp for _, c in flat) / 15,
        m.EVAL_LENGTH: sum(len(c.tokens) for _, c in flat) / 15,
        m.DISTINCT: sum(len({c.tokens for c in cs}) for cs in answers) / 15,
        m.DISTINCT_1: len({id for _, c in flat for id in c.tokens}) / sum(len(c.tokens) for _, c in flat),
        m.DISTINCT_2: len({c.tokens for _, c in flat if len(c.tokens) == 2}) / sum(len(c.tokens) == 2 for _, c in flat),
        m.SELF_BLEU: self_bleu([[c.tokens for c in cs] for cs in answers], SEED),
        m.EMBEDDING_DISTANCE: embedding_distance([[c.text for c in cs] for cs in answers], Embedder(None)),
        m.EFFECTIVE: math.fsum(effective([c.text for c in cs]) for cs in answers) / 3,
        m.PASS_1_GREEDY: sum(
            cs[0].tokens[0] % 2 == 0 and not (p.id == "b" and cs[0].finish == "length")
            for p, cs in zip(PROMPTS, greedy, strict=True)
        ) / 3,
    }  # fmt: skip
    values = {name: value for name, value in found.items() if isinstance(value, (int, float))}
    assert values == pytest.approx({**expected, m.EVAL_SEED: SEED}, abs=1e-5)
    shares = [right / 5 for right in rights]
    assert found[m.PASS_1_INTERVAL] == bootstrap(shares, SEED)
    assert found[m.GREEDY_INTERVAL] == wilson(round(3 * expected[m.PASS_1_GREEDY]), 3)
    assert found[m.PASS_EACH] == pytest.approx({
        "1": sum(rights) / 15, "2": math.fsum(pass_at_k(5, r, 2) for r in rights) / 3,
        "4": math.fsum(pass_at_k(5, r, 4) for r in rights) / 3, "5": expected[m.PASS_K],
    })  # fmt: skip
    assert found.keys() == {*values, m.PASS_1_INTERVAL, m.GREEDY_INTERVAL, m.PASS_EACH}  # no levels, no votes
    m.to_json(found)


def test_one_completion_says_nothing_of_several() -> None:
    one, two = evaluate(samples=1).metrics, evaluate(samples=2).metrics
    assert two.keys() - one.keys() == {
        m.PASS_K, m.PASS_EACH, m.DISTINCT, m.DISTINCT_1, m.DISTINCT_2, m.SELF_BLEU, m.EMBEDDING_DISTANCE, m.EFFECTIVE}
    assert one.keys() < two.keys()


def test_completions_are_shown_as_they_were() -> None:
    shown = evaluate().shown
    answers = sampled(1, 5, 0.7)
    assert [(s["version"], s["prompt_id"], s["prompt"]) for s in shown] == [(7, p.id, p.text) for p in PROMPTS]
    for line, completions in zip(shown, answers, strict=True):
        assert [(c["text"], c["finish"]) for c in line["completions"]] == [(c.text, c.finish) for c in completions]
    lost = [c["reward"] for c in shown[1]["completions"] if c["finish"] == "length"]
    assert set(lost) == {None}


def test_only_the_first_prompts_are_asked_and_greedy_may_be_left_out() -> None:
    found = evaluate(prompts=2, greedy=False)
    assert found.metrics[m.PROMPTS] == 2
    assert m.PASS_1_GREEDY not in found.metrics
    assert [s["prompt_id"] for s in found.shown] == ["a", "b"]


def test_weights_come_from_the_argument_and_numbers_do_not_depend_on_what_came_before() -> None:
    evaluator = make_evaluator(table_policy(9), table_policy(2), Marks())
    results = [
        evaluator.evaluate(copy_out(table_policy(seed).model), 7, prompts=3, samples=4, beta=BETA)
        for seed in (1, 5, 1)
    ]
    assert results[0] == results[2] != results[1]
    own = make_evaluator(table_policy(1), table_policy(2), Marks())
    assert own.evaluate(copy_out(table_policy(1).model), 7, prompts=3, samples=4, beta=BETA) == results[0]


def test_prompts_in_several_engine_calls_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = evaluate()
    monkeypatch.setattr(room, "BATCH_PROMPTS", 2)
    split = evaluate()
    assert split.metrics.keys() == whole.metrics.keys()
    for name, value in whole.metrics.items():
        assert split.metrics[name] == pytest.approx(value, abs=1e-5)
    assert [[c["text"] for c in s["completions"]] for s in split.shown] == [
        [c["text"] for c in s["completions"]] for s in whole.shown
    ]


def test_kl_is_zero_where_policy_equals_reference() -> None:
    assert evaluate(seed=2).metrics[m.EVAL_KL] == pytest.approx(0.0, abs=1e-6)


# ---- levels, votes, variants --------------------------------------------------------------------


class Levels(Marks):
    """The same marks; the answer is the first id, 6 and 2 are one, and a stop at once is none."""

    def answer_of(self, prompt: Prompt, completion: Completion) -> str | None:
        return None if completion.tokens[0] == STOP else str(completion.tokens[0])

    def same_answer(self, prompt: Prompt, one: str, other: str) -> bool:
        return {one, other} <= {"4", "0"}


LEVELS = [
    make_prompt("a", (1, 3), level="easy"), make_prompt("b", (1, 4), level=2), make_prompt("c", (1, 3, 3), level="easy")
]  # fmt: skip


def test_levels_and_votes_against_a_count_by_hand() -> None:
    evaluator = make_evaluator(table_policy(9), table_policy(2), Levels(), LEVELS)
    found = evaluator.evaluate(copy_out(table_policy(1).model), 7, prompts=3, samples=5, beta=BETA).metrics
    shares, votes, answers = [], [], []
    for prompt, completions in zip(LEVELS, sampled(1, 5, 0.7), strict=True):
        firsts = [c.tokens[0] for c in completions]
        rights = [c.tokens[0] % 2 == 0 and not (prompt.id == "b" and c.finish == "length") for c in completions]
        shares.append(sum(rights) / 5)
        groups: dict[int, list[bool]] = {}
        for first, right in zip(firsts, rights, strict=True):
            if first != STOP:
                groups.setdefault(0 if first == 4 else first, []).append(right)
        most = max(map(len, groups.values()))
        tied = [g[0] for g in groups.values() if len(g) == most]
        votes.append(sum(tied) / len(tied))
        answers.append([0 if first == 4 else None if first == STOP else first for first in firsts])
    assert found[m.EFFECTIVE] == pytest.approx(effective_answers(answers))
    assert found[m.MAJ_K] == pytest.approx(sum(votes) / 3)
    assert found[m.MAJ_INTERVAL] == bootstrap(votes, SEED)
    levels = found[m.BY_LEVEL]
    assert {level: (of["pass@1"], of["prompts"]) for level, of in levels.items()} == {
        "2": (pytest.approx(shares[1]), 1), "easy": (pytest.approx((shares[0] + shares[2]) / 2), 2),
    }  # fmt: skip
    assert levels["easy"]["interval"] == bootstrap([shares[0], shares[2]], SEED)
    m.to_json(found)


class Attacking(Marks):
    """The same marks; every completion is an attack, without its last character."""

    trained: ClassVar[list[str]] = ["judge"]
    unseen: ClassVar[list[str]] = []
    victims: ClassVar[list[str]] = ["victim"]
    modes: tuple[str, ...] = ()
    embedder = None
    similarity = 0.9

    def attack_of(self, completion: Completion) -> str:
        return completion.text[:-1]

    def attacks(self, texts: Sequence[str], judges: Sequence[str], victim: str = "victim") -> list[Attack | Failure]:
        return [Attack(text=text, answers=("",), chances=dict.fromkeys(judges, (0.25,))) for text in texts]


@pytest.mark.parametrize("samples", [1, 3])
def test_all_attacks_of_an_audit_are_completions_of_one_prompt(samples: int) -> None:
    evaluator = make_evaluator(table_policy(9), table_policy(2), Attacking())
    found = evaluator.evaluate(copy_out(table_policy(1).model), 7, prompts=3, samples=samples, beta=0.0).metrics
    said = [c for completions in sampled(1, samples, 0.7) for c in completions]
    attacks = [c.text[:-1] for c in said]
    assert found[m.DISTINCT] == len({c.tokens for c in said}) / len(said)
    assert found[m.SELF_BLEU] == pytest.approx(self_bleu([[c.tokens for c in said]], SEED))
    assert found[m.EFFECTIVE] == pytest.approx(effective(attacks))
    assert found[m.EMBEDDING_DISTANCE] == pytest.approx(embedding_distance([attacks], Embedder(None)))
    assert (m.PASS_K in found) == (samples > 1)


class Tenths(Marks):
    """Right where the prompt says so, whatever the completion."""

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Any]:
        return [float(bool(prompt.columns["right"]))] * len(completions)


def test_problems_beside_their_variants() -> None:
    def some(name: str, right: bool) -> Prompt:
        return make_prompt(name, (1, 3), right=right)

    originals = [some("a", True), some("b", True), some("c", False), some("d", True)]
    variants = [
        [some("a1", True), some("a2", True), some("a3", True)],
        [some("b1", True), some("b2", False), some("b3", False)],
        [some("c1", True), some("c2", False), some("c3", False)], [],
    ]  # fmt: skip
    evaluator = make_evaluator(table_policy(9), table_policy(2), Tenths())
    sides = {"held_out": (originals, variants), "training": (originals[3:], variants[3:])}
    found = evaluator.vary(copy_out(table_policy(1).model), 7, sides)
    # d has no variants. originals: 2 of 3; variants: 1, 1/3, 1/3; all right: a alone; gaps: 0, 2/3, -1/3
    gaps = [0.0, 1 - 1 / 3, 0 - 1 / 3]
    assert found == {
        "variants/prompts": 3, "variants/instances": 3, "variants/original": pytest.approx(2 / 3),
        "variants/fresh": pytest.approx(5 / 9), "variants/fresh_interval": bootstrap([1.0, 1 / 3, 1 / 3], SEED),
        "variants/all_right": pytest.approx(1 / 3), "variants/all_right_interval": wilson(1, 3),
        "variants/gap": pytest.approx(1 / 9), "variants/gap_interval": bootstrap(gaps, SEED),
        "memorised/prompts": 0,
    }  # fmt: skip
    m.to_json(found)


# ---- the exact target ---------------------------------------------------------------------------


def target_table(reference: Policy, task: Enumerable, prompts: Sequence[Prompt], beta: float) -> Policy:
    """A table whose logits are, context by context, the conditionals of pi_ref exp(r / beta)."""
    base, policy = len(reference.tokenizer) + 1, reference.trainable_copy()
    listed = task.completions(len(reference.tokenizer), STOP)
    with torch.no_grad():
        for prompt in prompts:
            refs = reference.sequence_logps([(prompt.tokens, ids) for ids in listed])
            target, _ = log_target(refs, [task.reward(prompt.id, ids) for ids in listed], beta)
            mass: dict[tuple[int, ...], list[float]] = {}
            for ids, logp in zip(listed, target, strict=True):
                for place in range(len(ids)):
                    row = mass.setdefault(ids[:place], [0.0] * len(reference.tokenizer))
                    row[ids[place]] += math.exp(logp)
            for prefix, row in mass.items():
                context = 0
                for id in (*prompt.tokens[1:], *prefix):
                    context = context * base + id + 1
                policy.model.logits[context] = policy.temperature * torch.tensor(row).log()
    return policy


@pytest.fixture(scope="module")
def exact() -> tuple[Policy, Enumerable, list[Prompt]]:
    settings = TaskSettings(name="enumerable", prompts=3, symbols=3, seed=4)
    task = Enumerable(settings, max_new_tokens=2, score_limit_s=1.0)
    reference = table_policy(2)
    return reference, task, list(task.held_out(reference.encode))


def distance(exact: tuple[Policy, Enumerable, list[Prompt]], weights: Policy, beta: float) -> tuple[float, float]:
    reference, task, prompts = exact
    evaluator = make_evaluator(table_policy(9), reference, task, prompts)
    found = evaluator.evaluate(copy_out(weights.model), 7, prompts=1, samples=2, beta=beta).metrics
    return found[m.TV], found[m.TARGET_KL]


def test_distance_is_zero_at_the_target(exact: tuple[Policy, Enumerable, list[Prompt]]) -> None:
    policy = target_table(*exact, BETA)
    assert distance(exact, policy, BETA) == pytest.approx((0.0, 0.0), abs=1e-5)
    tv, kl = distance(exact, policy, 2 * BETA)  # the target of another beta
    assert tv > 0.05
    assert kl > 0.01


def test_distance_of_the_reference_against_a_loop(exact: tuple[Policy, Enumerable, list[Prompt]]) -> None:
    reference, task, prompts = exact
    tvs, kls = [], []
    for prompt in prompts:  # all of them, however many were asked
        listed = task.completions(6, STOP)
        refs = [reference.sequence_logps([(prompt.tokens, ids)])[0] for ids in listed]
        raw = [math.exp(r + task.reward(prompt.id, ids) / BETA) for r, ids in zip(refs, listed, strict=True)]
        target = [x / math.fsum(raw) for x in raw]
        tvs.append(math.fsum(abs(math.exp(r) - t) for r, t in zip(refs, target, strict=True)) / 2)
        kls.append(math.fsum(math.exp(r) * (r - math.log(t)) for r, t in zip(refs, target, strict=True)))
    assert min(tvs) > 0.1
    expected = (math.fsum(tvs) / 3, math.fsum(kls) / 3)
    assert distance(exact, reference.frozen_copy(), BETA) == pytest.approx(expected, abs=1e-5)
