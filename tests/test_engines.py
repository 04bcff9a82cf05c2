"""One contract for every engine, and the draw that they share."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from support import STOP, TEMPERATURE, llama_policy, make_prompt, slow_logps, table_policy
from tba.batch import make_rows
from tba.catalog import ENGINES, FOREIGN
from tba.engines.protocol import Engine, Pause, Sampling, draw_ids, uniforms
from tba.engines.table import TableEngine
from tba.engines.transformers import TransformersEngine
from tba.policy import Policy, copy_out
from tba.records import Completion, Prompt


def gpt2_policy(seed: int) -> Policy:
    """A model with absolute positions, to which a prompt's padding would matter."""
    config = GPT2Config(
        vocab_size=11, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=STOP
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.transformer.wte.weight.mul_(8.0)
        model.transformer.wpe.weight.mul_(30.0)
    return dataclasses.replace(llama_policy(seed), model=model)


KINDS: dict[str, tuple[Callable[[Policy], Engine], Callable[..., Policy]]] = {
    "table": (TableEngine, table_policy),
    "table of a llama": (TableEngine, llama_policy),
    "transformers": (TransformersEngine, llama_policy),
    "transformers of a gpt2": (TransformersEngine, gpt2_policy),
}
PROMPTS = [make_prompt("long", (1, 3, 4, 5, 3)), make_prompt("short", (1,)), make_prompt("middle", (1, 5, 4))]
SEEDS = [11, 2**64 - 1, 13]
PLAIN = Sampling(max_new_tokens=5, temperature=TEMPERATURE)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def make_policy(kind: str, seed: int = 1) -> Policy:
    return KINDS[kind][1](seed, positions=7) if kind == "table" else KINDS[kind][1](seed)


def make_engine(kind: str, seed: int = 1) -> Engine:
    return KINDS[kind][0](make_policy(kind, seed))


def generate(
    engine: Engine, prompts: Sequence[Prompt] = PROMPTS, *, num_samples: int = 6, sampling: Sampling = PLAIN,
    seeds: Sequence[int] = SEEDS, pause: Pause | None = None,
) -> list[list[Completion]]:
    return engine.generate(prompts, num_samples=num_samples, sampling=sampling, seeds=seeds, pause=pause)


def ids(completions: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[c.tokens for c in of_prompt] for of_prompt in completions]


def pairs(completions: list[list[Completion]]) -> list[tuple[Prompt, Completion]]:
    return [(p, c) for p, of_prompt in zip(PROMPTS, completions, strict=True) for c in of_prompt]


# ---- the contract -------------------------------------------------------------------------------


def test_every_engine_of_the_catalogue_is_tested() -> None:
    made = {f"{make.__module__}:{make.__name__}" for make, _ in KINDS.values()}  # type: ignore[attr-defined]
    foreign = {ENGINES[name] for name in FOREIGN}  # in test_vllm.py and test_vllm_server.py
    assert made | foreign == set(ENGINES.values())


def test_it_is_an_engine(kind: str) -> None:
    engine = make_engine(kind)
    assert isinstance(engine, Engine)
    assert engine.version == 0
    completions = generate(engine)
    assert [len(of_prompt) for of_prompt in completions] == [6, 6, 6]


def test_completions_are_a_function_of_the_seed(kind: str) -> None:
    first = generate(make_engine(kind))
    engine = make_engine(kind)
    assert generate(engine) == first
    assert generate(engine) == first  # nothing is remembered
    assert ids(generate(engine, seeds=[12, 2**64 - 2, 14])) != ids(first)
    assert len(set(ids(first)[0])) > 1


def test_log_probs_are_those_of_the_policy(kind: str) -> None:
    policy = make_policy(kind)
    completions = generate(make_engine(kind))
    both = pairs(completions)
    rows = make_rows([(p.tokens, c.tokens) for p, c in both])
    found = policy.token_logps(rows)
    for row, (prompt, completion) in enumerate(both):
        assert completion.logps == pytest.approx(found[row][rows.completion_NT[row]].tolist(), abs=1e-5)
        slow = torch.stack(slow_logps(policy, prompt.tokens, completion.tokens)).tolist()
        assert completion.logps == pytest.approx(slow, abs=1e-5)
        assert completion.behaviour_logps == ()
    assert len({len(c.tokens) for _, c in both}) > 2


def test_the_stop_token_ends_a_completion_and_belongs_to_it(kind: str) -> None:
    policy = make_policy(kind)
    finishes = set()
    for _, completion in pairs(generate(make_engine(kind), num_samples=12)):
        finishes.add(completion.finish)
        assert STOP not in completion.tokens[:-1]
        assert (completion.tokens[-1] == STOP) == (completion.finish == "stop")
        assert len(completion.tokens) == 5 or completion.finish == "stop"
        assert completion.text == policy.decode(completion.tokens)
        assert (completion.version, completion.token_versions) == (0, ())
    assert finishes == {"stop", "length"}


def test_any_of_several_stop_ids_ends_a_completion_b05(kind: str) -> None:
    policy = make_policy(kind)
    policy.model.generation_config = GenerationConfig(eos_token_id=[STOP, 5, 4])
    completions = [c for _, c in pairs(generate(KINDS[kind][0](policy), num_samples=12))]
    assert {c.tokens[-1] for c in completions if c.finish == "stop"} == {STOP, 5, 4}
    assert not any({STOP, 5, 4} & set(c.tokens[:-1]) for c in completions)


def test_a_completion_of_one_id(kind: str) -> None:
    sampling = Sampling(max_new_tokens=1, temperature=TEMPERATURE)
    completions = [c for _, c in pairs(generate(make_engine(kind), num_samples=12, sampling=sampling))]
    assert {len(c.tokens) for c in completions} == {1}
    assert {(c.finish == "stop") == (c.tokens == (STOP,)) for c in completions} == {True}


@pytest.mark.parametrize("order", [[2, 0, 1], [1], [0, 2], [1, 1]])
def test_a_prompts_completions_do_not_depend_on_its_neighbours(kind: str, order: list[int]) -> None:
    engine = make_engine(kind)
    together = ids(generate(engine))
    found = generate(engine, [PROMPTS[n] for n in order], seeds=[SEEDS[n] for n in order])
    assert ids(found) == [together[n] for n in order]


def test_load_makes_the_samples_those_of_a_fresh_engine(kind: str) -> None:
    engine, fresh = make_engine(kind, 1), make_engine(kind, 2)
    before = ids(generate(engine))
    engine.load(copy_out(make_policy(kind, 2).model), 17)
    assert engine.version == 17
    assert ids(generate(engine)) == ids(generate(fresh)) != before
    assert [c.logps for _, c in pairs(generate(engine))] == [c.logps for _, c in pairs(generate(fresh))]
    assert {c.version for _, c in pairs(generate(engine))} == {17}


def test_load_copies(kind: str) -> None:
    engine, tensors = make_engine(kind, 1), copy_out(make_policy(kind, 2).model)
    engine.load(tensors, 3)
    before = generate(engine)
    for tensor in tensors.values():
        tensor.fill(0.5)
    assert generate(engine) == before


def test_it_shows_the_weights_it_holds_as_copies(kind: str) -> None:
    engine, tensors = make_engine(kind, 1), copy_out(make_policy(kind, 2).model)
    engine.load(tensors, 3)
    held = engine.tensors()
    assert held.keys() == tensors.keys()
    assert all(np.array_equal(held[name], tensors[name]) for name in tensors)
    before = generate(engine)
    for tensor in held.values():
        tensor.fill(0.5)
    assert generate(engine) == before


def test_weights_that_do_not_fit_leave_it_as_it_was(kind: str) -> None:
    engine = make_engine(kind)
    before = generate(engine)
    with pytest.raises(ValueError, match="do not fit"):
        engine.load({"other": np.zeros(3, np.float32)}, 9)
    assert engine.version == 0
    assert generate(engine) == before


def test_temperature_zero_takes_the_most_likely_id(kind: str) -> None:
    policy = make_policy(kind)
    greedy = generate(make_engine(kind), num_samples=2, sampling=Sampling(max_new_tokens=5, temperature=0.0))
    for prompt, completion in pairs(greedy):
        expected: list[int] = []
        while len(expected) < 5 and expected[-1:] != [STOP]:
            read = torch.tensor([[*prompt.tokens, *expected]])
            expected.append(int(policy.model(input_ids=read).logits[0, -1].argmax()))
        assert completion.tokens == tuple(expected)
        assert completion.behaviour_logps == (0.0,) * len(expected)  # nothing else could be drawn
        slow = torch.stack(slow_logps(policy, prompt.tokens, completion.tokens)).tolist()
        assert completion.logps == pytest.approx(slow, abs=1e-5)


def slow_behaviour(policy: Policy, read: Sequence[int], token: int, sampling: Sampling) -> float:
    """Log-prob under the smallest set of ids that reaches `top_p`, renormalised."""
    logits = policy.model(input_ids=torch.tensor([read])).logits[0, -1].double() / sampling.temperature
    probability = logits.softmax(-1).tolist()
    kept: list[int] = []
    for id in sorted(range(len(probability)), key=lambda n: -probability[n]):
        if math.fsum(probability[n] for n in kept) < sampling.top_p:
            kept.append(id)
    return math.log(probability[token] / math.fsum(probability[n] for n in kept)) if token in kept else -math.inf


@pytest.mark.parametrize(("temperature", "top_p"), [(1.6, 1.0), (TEMPERATURE, 0.8), (1.3, 0.6)])
def test_another_sampling_distribution_has_its_own_log_probs(kind: str, temperature: float, top_p: float) -> None:
    policy, sampling = make_policy(kind), Sampling(max_new_tokens=4, temperature=temperature, top_p=top_p)
    differ = 0
    for prompt, completion in pairs(generate(make_engine(kind), sampling=sampling)):
        slow = torch.stack(slow_logps(policy, prompt.tokens, completion.tokens)).tolist()
        assert completion.logps == pytest.approx(slow, abs=1e-5)  # the policy's temperature, the full vocabulary
        for place, behaviour in enumerate(completion.behaviour_logps):
            read = [*prompt.tokens, *completion.tokens[:place]]
            expected = slow_behaviour(policy, read, completion.tokens[place], sampling)
            assert behaviour == pytest.approx(expected, abs=1e-4)
            differ += abs(behaviour - completion.logps[place]) > 1e-3
        assert len(completion.behaviour_logps) == len(completion.tokens)
    assert differ > 10


def test_frequencies_of_whole_completions_match_the_policy(kind: str) -> None:
    policy, size = make_policy(kind), 1500
    sampling = Sampling(max_new_tokens=2, temperature=TEMPERATURE)
    ((completions),) = generate(make_engine(kind), [PROMPTS[2]], num_samples=size, sampling=sampling, seeds=[5])
    vocabulary = range(len(policy.tokenizer))
    listed = [(STOP,), *[(a, b) for a, b in itertools.product(vocabulary, vocabulary) if a != STOP]]
    logps = policy.sequence_logps([(PROMPTS[2].tokens, c) for c in listed])
    assert math.fsum(map(math.exp, logps)) == pytest.approx(1.0, abs=1e-5)
    check_chi_square(Counter(c.tokens for c in completions), dict(zip(listed, map(math.exp, logps), strict=True)), size)


# ---- loads in the midst of a batch --------------------------------------------------------------


def loading(engine: Engine, kind: str, loads: dict[int, int], every: int) -> Pause:
    """Loads, at the stop after so many tokens, the policy of a seed as the version ten times the seed."""
    stops = itertools.count(every, every)

    def do() -> None:
        if seed := loads.get(next(stops)):
            engine.load(copy_out(make_policy(kind, seed).model), 10 * seed)

    return Pause(every=every, do=do)


@torch.no_grad()
def slow_straddling(
    policies: Sequence[tuple[int, Policy]], prompt: Prompt, uniform_T: torch.Tensor, sampling: Sampling
) -> list[tuple[int, float, int]]:
    """(id, log-prob, version) of each token of a completion, `policies` giving (version, policy) by place."""
    found: list[tuple[int, float, int]] = []
    for place, (version, policy) in enumerate(policies):
        read = torch.tensor([[*prompt.tokens, *(id for id, _, _ in found)]])
        logits_1V = policy.model(input_ids=read, attention_mask=torch.ones_like(read)).logits[:, -1]
        drawn = draw_ids(logits_1V, uniform_T[place : place + 1], sampling, policy.temperature)
        found.append((int(drawn.id_N), float(drawn.logp_N), version))
        if found[-1][0] == STOP:
            break
    return found


@pytest.mark.parametrize("sampling", [PLAIN, Sampling(max_new_tokens=5, temperature=1.3, top_p=0.8)])
@pytest.mark.parametrize("order", [[0, 1, 2], [1, 1, 0]])
def test_each_token_is_of_the_weights_loaded_last_given_all_before_it(
    kind: str, order: list[int], sampling: Sampling
) -> None:
    engine = make_engine(kind, 1)
    engine.load(copy_out(make_policy(kind, 1).model), 10)
    prompts, seeds = [PROMPTS[n] for n in order], [SEEDS[n] for n in order]
    pause = loading(engine, kind, {2: 2, 4: 3}, every=2)
    found = generate(engine, prompts, sampling=sampling, seeds=seeds, pause=pause)
    one, two, three = ((10 * seed, make_policy(kind, seed)) for seed in (1, 2, 3))
    policy_of = dict((one, two, three))
    lengths = Counter[int]()
    for prompt, seed, of_prompt in zip(prompts, seeds, found, strict=True):
        for completion, uniform_T in zip(of_prompt, uniforms([seed], 6, 5), strict=True):
            expected = slow_straddling([one, one, two, two, three], prompt, uniform_T, sampling)
            assert completion.tokens == tuple(id for id, _, _ in expected)
            assert completion.logps == pytest.approx([logp for _, logp, _ in expected], abs=1e-5)
            versions = tuple(version for _, _, version in expected)
            assert completion.version == 10
            assert completion.token_versions == (versions if len(versions) > 2 else ())
            for place, behaviour in enumerate(completion.behaviour_logps):
                read = [*prompt.tokens, *completion.tokens[:place]]
                slow = slow_behaviour(policy_of[versions[place]], read, completion.tokens[place], sampling)
                assert behaviour == pytest.approx(slow, abs=1e-4)
            assert len(completion.behaviour_logps) in (0, len(completion.tokens))
            lengths[len(completion.tokens)] += 1
    assert lengths[5] > 1  # straddles both loads
    assert lengths[1] + lengths[2] > 1  # ended before the first
    assert engine.version == 30


def test_log_probs_after_a_load_are_the_new_policys_of_the_same_ids(kind: str) -> None:
    engine = make_engine(kind, 1)
    old, new = make_policy(kind, 1), make_policy(kind, 2)
    completions = generate(engine, num_samples=9, pause=loading(engine, kind, {2: 2}, every=2))
    differ = 0
    for prompt, completion in pairs(completions):
        pair = [(prompt.tokens, completion.tokens)]
        (before,), (after,) = old.completion_logps(pair), new.completion_logps(pair)
        assert completion.logps == pytest.approx([*before[:2], *after[2:]], abs=1e-5)
        differ += any(abs(x - y) > 0.1 for x, y in zip(before[2:], after[2:], strict=True))
    assert differ > 3


def test_stops_without_a_load_change_nothing_to_the_bit(kind: str) -> None:
    engine, stops = make_engine(kind), Counter[int]()
    expected = generate(engine)
    assert max(len(c.tokens) for _, c in pairs(expected)) == 5
    for every in (1, 2, 3, 5):
        pause = Pause(every=every, do=lambda every=every: stops.update([every]))
        assert generate(engine, pause=pause) == expected
    assert stops == {1: 4, 2: 2, 3: 1}  # between tokens: not before the first, not after the last


def test_tokens_before_a_load_are_what_they_would_have_been_without(kind: str) -> None:
    engine = make_engine(kind)
    plain = generate(engine)
    loaded = generate(engine, pause=loading(engine, kind, {3: 2}, every=3))
    for (_, one), (_, other) in zip(pairs(plain), pairs(loaded), strict=True):
        assert one.tokens[:3] == other.tokens[:3]
        assert one.logps[:3] == other.logps[:3]
    assert ids(plain) != ids(loaded)


def test_other_weights_count_also_under_the_same_version(kind: str) -> None:
    engine, new = make_engine(kind, 1), make_policy(kind, 2)
    pause = Pause(every=4, do=lambda: engine.load(copy_out(new.model), 0))
    for prompt, completion in pairs(generate(engine, pause=pause)):
        assert (completion.version, completion.token_versions) == (0, ())
        (logps,) = new.completion_logps([(prompt.tokens, completion.tokens)])
        assert completion.logps[4:] == pytest.approx(logps[4:], abs=1e-5)


def test_after_a_load_equal_prompts_and_equal_prefixes_are_still_read_once() -> None:
    policy, shapes = llama_policy(1), list[tuple[int, ...]]()
    policy.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    engine = TransformersEngine(policy)
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[0]]
    pause = loading(engine, "transformers", {2: 2}, every=2)
    greedy = Sampling(max_new_tokens=4, temperature=0.0)
    completions = generate(engine, prompts, num_samples=6, sampling=greedy, pause=pause)
    assert {len(c.tokens) for of_prompt in completions for c in of_prompt} == {4}
    # three prompts of up to 5 ids, one id each; then two distinct prompts again, and what 3 prefixes go on with
    assert shapes == [(3, 5), (3, 1), (2, 5), (3, 2), (3, 1)]


# ---- the draw -----------------------------------------------------------------------------------


def check_chi_square(counts: Counter, probability: dict, size: int) -> None:
    """Pearson's statistic, cells below 5 expected draws merged, against mean + 4 standard deviations."""
    cells = [(counts[key], p * size) for key, p in probability.items() if p * size >= 5]
    rest = (size - sum(c for c, _ in cells), size - math.fsum(e for _, e in cells))
    cells += [rest] if rest[1] >= 5 else []
    statistic = math.fsum((count - expected) ** 2 / expected for count, expected in cells)
    free = len(cells) - 1
    assert free >= 3
    assert statistic < free + 4 * math.sqrt(2 * free)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 1.0), (1.4, 1.0), (1.4, 0.85)])
def test_frequencies_of_the_draw_match_its_distribution(temperature: float, top_p: float) -> None:
    logits, size = torch.tensor([0.3, -1.0, 2.0, 1.1, -math.inf, 0.9]), 20_000
    sampling = Sampling(max_new_tokens=1, temperature=temperature, top_p=top_p)
    uniform_N = uniforms([7], size, 1)[:, 0]
    drawn = draw_ids(logits.expand(size, -1), uniform_N, sampling, 0.7)
    probability = (logits.double() / temperature).softmax(-1)
    if top_p < 1:  # at temperature 1.4: 0.417, 0.219, 0.190 and 0.124 by size; three reach only 0.827
        probability[1] = 0.0
        probability /= probability.sum()
    expected = {n: p for n, p in enumerate(probability.tolist()) if p > 0}
    counts = Counter(drawn.id_N.tolist())
    assert set(counts) == set(expected)
    check_chi_square(counts, expected, size)
    if drawn.behaviour_logp_N is not None:
        assert drawn.behaviour_logp_N.tolist() == pytest.approx(
            [math.log(expected[n]) for n in drawn.id_N.tolist()], abs=1e-5
        )
    assert (drawn.behaviour_logp_N is None) == (temperature == 0.7 and top_p == 1)


def test_ids_of_probability_zero_are_never_drawn() -> None:
    never = -math.inf
    logits = torch.tensor([[never, 1.0, never, never, 0.5, never]])
    edges = [0.0, 5e-324, 0.5, 1 / (1 + math.exp(-0.5)), math.nextafter(1.0, 0.0)]
    uniform_N = torch.tensor([*edges, *np.linspace(0.0, 0.9999, 500)], dtype=torch.float64)
    drawn = draw_ids(logits.expand(len(uniform_N), -1), uniform_N, Sampling(max_new_tokens=1), 1.0)
    assert set(drawn.id_N.tolist()) == {1, 4}
    assert drawn.id_N[:2].tolist() == [1, 1]
    assert bool(drawn.logp_N.isfinite().all())


def test_one_id_with_all_the_probability_is_always_drawn() -> None:
    logits = torch.tensor([[-1e4, -1e4, 50.0, -1e4]]).expand(3, -1)
    uniform_N = torch.tensor([0.0, 0.5, math.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert draw_ids(logits, uniform_N, Sampling(max_new_tokens=1), 1.0).id_N.tolist() == [2, 2, 2]


def test_top_p_keeps_the_most_likely_id() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.5]]).expand(50, -1)
    sampling = Sampling(max_new_tokens=1, top_p=1e-6)
    drawn = draw_ids(logits, uniforms([1], 50, 1)[:, 0], sampling, 1.0)
    assert set(drawn.id_N.tolist()) == {1}
    assert drawn.behaviour_logp_N is not None
    assert drawn.behaviour_logp_N.tolist() == [0.0] * 50


def test_uniforms_of_a_row_depend_on_its_seed_and_place_alone() -> None:
    both = uniforms([4, 9], 3, 5)
    assert both.shape == (6, 5)
    assert torch.equal(both[3:], uniforms([9], 3, 5))
    assert torch.equal(both[3:5], uniforms([9], 2, 5))
    assert len(both.unique()) == 30
    assert bool(((both >= 0) & (both < 1)).all())
    assert not torch.equal(uniforms([9 + 2**40], 3, 5), both[3:])  # all 64 bits count
    assert uniforms([], 3, 5).shape == (0, 5)
