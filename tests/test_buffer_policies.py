"""What the replay buffer draws, evicts and refuses under each of its options: known answers and frequencies."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from makers import a_completion, a_group, a_prompt, a_trajectory, balances, settings_with
from tba.batch import collate
from tba.buffer.memory import ReplayBuffer
from tba.depot import make_buffer
from tba.objectives import trajectory_balance
from tba.reading import read_settings
from tba.records import Completion, Group, Trajectory, Unscored
from tba.settings import SettingsError

REWARDS = [0.0, 0.4, 0.9, 1.3]
TEMPERATURE = 0.6
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 9: 27.88}
"""Of chi-squared at 0.001, by degrees of freedom."""


def rng(seed: int = 3) -> np.random.Generator:
    return np.random.default_rng(seed)


def filled(rewards: dict[str, list[float]], **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(**options)
    for at, (name, values) in enumerate(rewards.items()):
        buffer.add(a_group(name, [((10 * at + n, 2), r) for n, r in enumerate(values)]))
    return buffer


def fits(observed: Counter, expected: dict[Any, float]) -> bool:
    total = sum(observed.values())
    assert set(observed) <= set(expected)
    assert sum(expected.values()) == pytest.approx(1)
    return sum((observed[k] - total * p) ** 2 / (total * p) for k, p in expected.items()) < CRITICAL[len(expected) - 1]


# ---- frequencies ------------------------------------------------------------------------------------


def first_weights(sampler: str) -> dict[float, float]:
    mean = sum(REWARDS) / 4  # 0.65
    weight = {
        "recent": dict.fromkeys(REWARDS, 1.0),
        "uniform": dict.fromkeys(REWARDS, 1.0),
        "reward": {r: math.exp(r / TEMPERATURE) for r in REWARDS},
        "advantage": {r: math.cosh((r - mean) / TEMPERATURE) for r in REWARDS},
        "novelty": {0.0: 1.0, 0.4: 1.0, 0.9: 1 / 2, 1.3: 1 / 3},  # the third and the fourth are copies of the second
    }[sampler]
    return {r: w / sum(weight.values()) for r, w in weight.items()}


@pytest.mark.parametrize("sampler", ["recent", "uniform", "reward", "advantage", "novelty"])
def test_every_sampler_draws_as_often_as_it_says_first_and_second(sampler):
    buffer = ReplayBuffer(mix={sampler: 1.0}, reward_temperature=TEMPERATURE, dedup="none")
    ids = [(5, 2), (6, 2), (6, 2), (6, 2)] if sampler == "novelty" else [(n, 2) for n in range(4)]
    buffer.add(a_group("p", list(zip(ids, REWARDS, strict=True))))
    draws = buffer.sample(6000, 2, version=0, rng=rng(12))
    expected = first_weights(sampler)
    assert fits(Counter(d.trajectories[0].reward for d in draws), expected)
    second = {b: sum(expected[a] * expected[b] / (1 - expected[a]) for a in REWARDS if a != b) for b in REWARDS}
    assert fits(Counter(d.trajectories[1].reward for d in draws), second)
    stated = {t.reward: p for d in draws for t, p in zip(d.trajectories, d.item_probabilities, strict=True)}
    assert stated == pytest.approx(expected, abs=1e-12)


def test_the_rest_is_drawn_in_proportion_also_after_one_that_has_nearly_all_the_mass():
    rewards = [9.0, 0.0, 0.5, 1.0]  # at temperature 1 the first has 0.9986 of the mass
    buffer = filled({"p": rewards}, mix={"reward": 1.0})
    draws = buffer.sample(4000, 3, version=0, rng=rng(5))
    after = Counter(d.trajectories[1].reward for d in draws if d.trajectories[0].reward == 9.0)
    total = sum(math.exp(r) for r in rewards[1:])
    assert after.total() > 3950
    assert fits(after, {r: math.exp(r) / total for r in rewards[1:]})


@pytest.mark.parametrize("sampler", ["uniform", "reward", "advantage"])
def test_a_pool_of_hundreds_that_lost_and_gained_is_drawn_as_stated(sampler):
    buffer = ReplayBuffer(mix={sampler: 1.0}, capacity_per_prompt=300, reward_temperature=TEMPERATURE)
    dice = rng(6)
    for number in range(90):
        buffer.add(a_group("p", [((number, k, 2), float(r)) for k, r in enumerate(dice.normal(size=7))]))
    rewards = [e.trajectory.reward for _, e in buffer.entries()]
    assert len(rewards) == 300
    mean = math.fsum(rewards) / 300
    weight = {"uniform": lambda r: 1.0, "reward": lambda r: math.exp(r / TEMPERATURE),
              "advantage": lambda r: math.cosh((r - mean) / TEMPERATURE)}[sampler]
    total = math.fsum(map(weight, rewards))
    tenth = np.quantile(rewards, np.linspace(0, 1, 11))
    expected = Counter[int]()
    for r in rewards:
        expected[int(np.clip(np.searchsorted(tenth, r, "right") - 1, 0, 9))] += weight(r) / total  # type: ignore[assignment]
    draws = buffer.sample(5000, 4, version=0, rng=dice)
    first = Counter(int(np.clip(np.searchsorted(tenth, d.trajectories[0].reward, "right") - 1, 0, 9)) for d in draws)
    assert fits(first, dict(expected))
    for draw in draws[:50]:
        assert draw.item_probabilities == pytest.approx([weight(t.reward) / total for t in draw.trajectories])


def test_a_mixture_of_all_draws_in_proportion_to_its_shares():
    mix = {"recent": 3.0, "reward": 1.5, "uniform": 0.5, "advantage": 2.0, "novelty": 1.0}
    buffer = filled({"p": [0.1, 0.2], "q": [0.1, 0.9]}, mix=mix)
    seen = Counter(d.sampler for d in buffer.sample(4000, 2, version=0, rng=rng(13)))
    assert fits(seen, {name: share / 8 for name, share in mix.items()})


def test_a_share_moves_in_a_line_and_stays():
    buffer = filled({"p": REWARDS}, mix={"recent": (0.9, 0.1, 10), "uniform": (0.1, 0.9, 10)}, recent_age=99)
    assert buffer.options.shares(0) == {"recent": 0.9, "uniform": 0.1}
    assert buffer.options.shares(5) == pytest.approx({"recent": 0.5, "uniform": 0.5})
    assert buffer.options.shares(10) == buffer.options.shares(70) == pytest.approx({"recent": 0.1, "uniform": 0.9})
    for version, share in ((0, 0.9), (5, 0.5), (12, 0.1)):
        seen = Counter(d.sampler for d in buffer.sample(1500, 2, version=version, rng=rng(version)))
        assert fits(seen, {"recent": share, "uniform": 1 - share})


def test_groups_that_wanted_recent_and_found_none_are_counted():
    buffer = filled({"p": [0.1, 0.2]}, mix={"recent": 0.6, "uniform": 0.4}, recent_age=2)
    buffer.sample(30, 2, version=2, rng=rng())
    assert buffer.unmet == {}
    draws = buffer.sample(2000, 2, version=3, rng=rng())
    assert fits(Counter(wanted=buffer.unmet["recent"], own=2000 - buffer.unmet["recent"]), {"wanted": 0.6, "own": 0.4})
    assert {d.sampler for d in draws} == {"uniform"}


def test_a_window_that_moves_back_holds_what_is_recent_again():
    buffer = ReplayBuffer(recent_age=1)
    for version in range(6):
        buffer.add(a_group("p", [((version, 2), 0.1), ((version, 3, 2), 0.2)], version=version))
    for version in (5, 6, 2, 5, 3):
        (draw,) = buffer.sample(1, 2, version=version, rng=rng(version))
        assert max(draw.ages) <= 1
        recent = {e.number for _, e in buffer.entries() if e.trajectory.completion.version >= version - 1}
        pool = buffer.storage.by_id["p"]
        assert {buffer.storage.rows.number[row] for row in pool.window} == recent


# ---- who leaves -------------------------------------------------------------------------------------


def left(buffer: ReplayBuffer) -> list[float]:
    return [e.trajectory.reward for _, e in buffer.entries()]


def test_the_lowest_reward_leaves_first_and_of_equals_the_oldest():
    buffer = ReplayBuffer(eviction="lowest_reward", capacity_per_prompt=3, capacity=5)
    buffer.add(a_group("p", [((n, 2), r) for n, r in enumerate([0.5, 0.1, 0.9, 0.1, 0.7])]))
    assert left(buffer) == [0.5, 0.9, 0.7]
    buffer.add(a_group("q", [((1, 2), 0.2), ((2, 2), 0.2), ((3, 2), 0.8)]))
    assert [(p.id, e.trajectory.completion.tokens) for p, e in buffer.entries()] == [
        ("p", (0, 2)), ("p", (2, 2)), ("p", (4, 2)), ("q", (2, 2)), ("q", (3, 2))
    ]
    assert buffer.ledger()["trajectories"]["evicted"] == {"prompt capacity": 2, "capacity": 1}


def test_the_most_used_leaves_first():
    buffer = ReplayBuffer(eviction="most_used", capacity_per_prompt=4, mix={"reward": 1.0}, reward_temperature=0.01)
    buffer.add(a_group("p", [((n, 2), r) for n, r in enumerate([0.1, 0.9, 0.5, 0.7])]))
    for _ in range(3):
        buffer.sample(1, 2, version=0, rng=rng())  # the softmax at 0.01 draws 0.9 and 0.7
    buffer.add(a_group("p", [((9, 2), 0.2)]))
    assert left(buffer) == [0.1, 0.5, 0.7, 0.2]
    buffer.add(a_group("p", [((8, 2), 0.3), ((7, 2), 0.4)]))
    assert left(buffer) == [0.5, 0.2, 0.3, 0.4]  # 0.7 was used; of the unused, 0.1 is the oldest


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 30), min_size=1, max_size=5), st.booleans()),
                min_size=3, max_size=25), st.sampled_from(["oldest", "lowest_reward", "most_used"]),
       st.sampled_from([{"capacity_tokens": 31}, {"capacity_bytes": 3001}, {}]))
def test_eviction_agrees_with_a_plain_list(operations, eviction, bound):
    buffer = ReplayBuffer(eviction=eviction, capacity=11, capacity_per_prompt=6, dedup="none", **bound,
                          mix={"uniform": 0.5, "advantage": 0.5})
    dice, twin = rng(8), list[dict[str, Any]]()
    worst = {"oldest": lambda x: x["n"], "lowest_reward": lambda x: (x["r"], x["n"]),
             "most_used": lambda x: (-x["u"], x["n"])}[eviction]
    for prompt, values, draws in operations:
        items = [((9, *[3] * (v % 4), 2), v / 7) for v in values]
        buffer.add(a_group(f"p{prompt}", items))
        first = buffer.storage.next_number - len(values)
        twin += [{"n": first + k, "p": f"p{prompt}", "r": r, "u": 0, "t": len(ids)}
                 for k, (ids, r) in enumerate(items)]
        while sum(x["p"] == f"p{prompt}" for x in twin) > 6:
            twin.remove(min((x for x in twin if x["p"] == f"p{prompt}"), key=worst))
        while len(twin) > 11 or sum(x["t"] for x in twin) > bound.get("capacity_tokens", 10**9) or (
            sum(161 + 8 * x["t"] for x in twin) > bound.get("capacity_bytes", 10**9)  # text is one byte
        ):
            twin.remove(min(twin, key=worst))
        if draws and len(buffer.storage.ready_for(2)):
            for draw in buffer.sample(2, 2, version=0, rng=dice):
                for number in draw.numbers:
                    next(x for x in twin if x["n"] == number)["u"] += 1
        assert [(p.id, e.trajectory.reward, e.uses) for p, e in buffer.entries()] == [
            (x["p"], x["r"], x["u"]) for x in twin
        ]
        assert buffer.storage.tokens == sum(x["t"] for x in twin)
        assert buffer.storage.bytes == sum(161 + 8 * x["t"] for x in twin)
        assert balances(buffer.ledger())


def test_of_near_copies_the_higher_reward_stays_and_of_equals_the_newer():
    ids = list(range(100, 140))
    near = [*ids[:20], 7, *ids[21:]]  # 3 of 38 trigrams differ: 35 common of 41 = 0.85
    far = [*range(200, 220), *ids[20:]]  # 18 common of 58 = 0.31
    buffer = ReplayBuffer(dedup="near", near_similarity=0.8)
    buffer.add(a_group("p", [(ids, 0.5), (ids, 0.5), (far, 0.1)]))
    assert len(buffer) == 3  # siblings of one delivery stay
    buffer.add(a_group("q", [(near, 0.5)]))
    assert len(buffer) == 4  # another prompt's
    buffer.add(a_group("p", [(near, 0.4)]))
    assert left(buffer) == [0.5, 0.5, 0.1, 0.5]
    buffer.add(a_group("p", [(near, 0.5)]))
    assert [(p.id, len(e.trajectory.completion.tokens), e.number) for p, e in buffer.entries()] == [
        ("p", 40, 2), ("q", 40, 3), ("p", 40, 5)
    ]
    assert buffer.ledger()["trajectories"]["evicted"] == {"near duplicate": 3}
    assert balances(buffer.ledger())


def test_near_copies_cost_no_more_as_the_buffer_grows():
    buffer = ReplayBuffer(dedup="near", capacity_per_prompt=10**6)
    dice = rng(2)
    compared = 0
    near = buffer._near
    assert near is not None
    for _ in range(100):
        buffer.add(a_group("p", [(dice.integers(0, 50_000, 30).tolist(), 0.1) for _ in range(5)]))
    for _ in range(20):
        compared += len(near.candidates(0, dice.integers(0, 50_000, 30).astype(np.int32)))
    assert compared <= 20  # of 500 strangers hardly any shares a band


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_rejected_and_counted_even_if_its_record_let_it_through(bad):  # case f07
    good, broken = a_trajectory("p", (5, 2), 0.3), a_trajectory("p", (6, 7, 2), 0.3)
    object.__setattr__(broken, "reward", bad)
    buffer = ReplayBuffer()
    buffer.add(Group(prompt=a_prompt("p"), trajectories=(good, broken)))
    assert left(buffer) == [0.3]
    assert buffer.ledger()["trajectories"]["rejected"] == {"non-finite": 1}
    assert buffer.ledger()["tokens"]["rejected"] == {"non-finite": 3}
    assert balances(buffer.ledger())


# ---- what the objective sees -------------------------------------------------------------------------


def of_batch(buffer: ReplayBuffer, size: int, logp: dict[tuple[int, ...], float], beta: float) -> Any:
    draws = buffer.sample(1, size, version=3, rng=rng())
    (micro,) = collate(draws, max_tokens=100).micro_batches
    now = torch.tensor([logp[t.completion.tokens] for t in draws[0].trajectories])
    found = trajectory_balance(now, micro.ref_logp_N, micro.reward_N, micro.group_N, beta=beta, scale="paper")
    return draws[0], found


def test_the_residual_is_of_the_policy_now_not_of_the_one_that_sampled():  # case f04
    def stored(ids: tuple[int, ...], logps: tuple[float, ...], reward: float) -> Trajectory:
        completion = Completion(tokens=ids, text="", logps=logps, version=3, finish="stop")
        return Trajectory(prompt_id="p", completion=completion, reward=reward, ref_logp=-3.5)

    buffer = ReplayBuffer()
    sampled = (stored((5, 2), (-1.0, -2.0), 1.0), stored((6, 2), (-1.0, -2.5), 0.0))
    buffer.add(Group(prompt=a_prompt("p"), trajectories=sampled, version=3))
    draw, found = of_batch(buffer, 2, {(5, 2): -4.0, (6, 2): -3.5}, beta=1.0)
    residual = dict(zip([t.reward for t in draw.trajectories], found.residual.tolist(), strict=True))
    # -4 + 3.5 - 1 = -1.5 and -3.5 + 3.5 - 0 = 0, both plus log Z; with the stored log-probs -0.5 instead of -1.5
    assert residual[1.0] - residual[0.0] == pytest.approx(-1.5)


def test_unscored_completions_are_not_in_the_mean():  # case f05
    lost = Unscored(completion=a_completion((8, 2)), reason="none")
    scored = tuple(a_trajectory("p", (n, 2), r) for n, r in ((4, 1.0), (5, 0.0), (6, 0.0)))
    buffer = ReplayBuffer(recent_age=9)
    buffer.add(Group(prompt=a_prompt("p"), trajectories=scored, unscored=(lost,)))
    draw, found = of_batch(buffer, 3, {(n, 2): -1.75 for n in (4, 5, 6)}, beta=1.0)
    assert len(draw.trajectories) == 3
    # log Z = 1/3; residuals -2/3, 1/3, 1/3; their mean square 6/27 = 0.2222 (0.1875 with the unscored one as 0)
    assert found.loss.item() == pytest.approx(0.222222, abs=1e-6)
    assert buffer.ledger()["trajectories"]["rejected"] == {"unscored: none": 1}


def test_how_it_was_sampled_stays_beside_the_policys_own_log_prob():  # case f08
    own = 2 - math.log(math.exp(2) + math.e + 1)  # -0.407606
    hot = 1 - math.log(math.exp(1) + math.exp(0.5) + 1)  # the same at temperature 2
    completion = Completion(tokens=(0,), text="", logps=(own,), version=0, finish="stop", behaviour_logps=(hot,))
    other = Completion(tokens=(1,), text="", logps=(own,), version=0, finish="stop", behaviour_logps=(hot,))
    buffer = ReplayBuffer()
    buffer.add(Group(prompt=a_prompt("p"), trajectories=tuple(
        Trajectory(prompt_id="p", completion=c, reward=0.5, ref_logp=-1.0) for c in (completion, other)
    )))
    (draw,) = buffer.sample(1, 2, version=0, rng=rng())
    assert {t.completion for t in draw.trajectories} == {completion, other}
    (micro,) = collate([draw], max_tokens=100).micro_batches
    assert micro.searcher_logp_N.tolist() == pytest.approx([-0.407606] * 2, abs=1e-6)


# ---- settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "expected"), [
    ("paper_gsm8k", ({"recent": 0.95, "uniform": 0.05}, 100_000, 100, 500, "oldest", "exact")),
    ("paper_tldr", ({"recent": 0.5, "reward": 0.5}, 100_000, 100, 10_000, "oldest", "exact")),
    ("redteam", ({"recent": 0.5, "reward": 0.5}, 100_000, 100_000, 0, "oldest", "exact")),
    ("redteam_150k", ({"recent": 0.5, "reward": 0.5}, 150_000, 150_000, 0, "oldest", "exact")),
    ("redteam_130k", ({"recent": 0.6, "reward": 0.4}, 130_000, 130_000, 0, "oldest", "exact")),
    ("redteam_best_1000", ({"recent": 0.5, "reward": 0.5}, 1000, 1000, 0, "lowest_reward", "near")),
])
def test_a_preset_is_the_papers_protocol(preset, expected):
    buffer = settings_with(buffer={"preset": preset, "mix": expected[0], "capacity": expected[1],
                                   "capacity_per_prompt": expected[2]}).buffer
    alone = type(buffer)(preset=preset)
    found = (alone.mix, alone.capacity, alone.capacity_per_prompt, alone.initial, alone.eviction, alone.dedup)
    assert found == expected
    assert make_buffer(settings_with(buffer={"preset": preset})).options.mix != {}


def test_what_is_given_wins_over_the_preset_and_an_unknown_one_is_refused():
    settings_ = read_settings("enumerable", ["buffer.preset=redteam", "buffer.capacity=5000"])
    assert settings_.buffer.capacity == 5000
    again = type(settings_).model_validate(settings_.resolved())
    assert again.buffer == settings_.buffer.model_copy(update={"recent_age": settings_.recent_age})
    with pytest.raises(SettingsError, match="'redteem' is unknown; did you mean redteam"):
        read_settings("enumerable", ["buffer.preset=redteem"])


@pytest.mark.parametrize(("overrides", "words"), [
    (["buffer.capacity_tokens=100"], ["buffer.capacity_tokens = 100", "128 trajectories", "tokens"]),
    (["buffer.capacity_bytes=9000"], ["buffer.capacity_bytes = 9000", "bytes"]),
    (["buffer.recent_age=14", "buffer.mix={recent: 1}"], ["buffer.recent_age = 14", "trainer.sync_every - 1 = 15"]),
    (["buffer.mix={recent: {from: 1.0, to: 0.0, steps: 9}}"], ["buffer.mix", "no positive share"]),
    (["buffer.eviction=newest"], ["buffer.eviction", "newest"]),
    (["buffer.near_similarity=1.5"], ["buffer.near_similarity", "1.5"]),
])
def test_settings_that_would_starve_the_trainer_are_refused(overrides, words):
    with pytest.raises(SettingsError) as caught:
        read_settings("enumerable", overrides)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("overrides", [
    ["buffer.mix={recent: {from: 1.0, to: 0.5, steps: 9}, novelty: 0.2}"],
    ["buffer.recent_age=15", "buffer.mix={recent: 1}"],
    ["buffer.recent_age=3", "buffer.mix={recent: 1, uniform: 0.1}"],
])
def test_settings_that_are_just_enough_pass(overrides):
    settings_ = read_settings("enumerable", overrides)
    assert make_buffer(settings_).options.mix == settings_.buffer.shares
