"""The replay buffer: bounds, fates, draws and their probabilities, against a slow twin and known answers."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makers import a_group, a_prompt, a_trajectory, balances
from tba.buffer.entries import Draw, EmptyBufferError
from tba.buffer.memory import ReplayBuffer
from tba.records import Group

CAPACITY, PER_PROMPT, GROUP = 17, 5, 3


def rng(seed: int = 3) -> np.random.Generator:
    return np.random.default_rng(seed)


def tokens_of(buffer: ReplayBuffer) -> list[tuple[int, ...]]:
    return [entry.trajectory.completion.tokens for _, entry in buffer.entries()]


def filled(rewards: dict[str, list[float]], **options: Any) -> ReplayBuffer:
    """One delivery per prompt, each trajectory with ids of its own."""
    buffer = ReplayBuffer(**options)
    for at, (name, values) in enumerate(rewards.items()):
        buffer.add(a_group(name, [((10 * at + n, 2), r) for n, r in enumerate(values)]))
    return buffer


# ---- cases -----------------------------------------------------------------------------------------


def test_every_group_drawn_equals_an_inserted_one_in_all_fields():  # case f01
    buffer = ReplayBuffer(recent_age=9)
    given_ = {
        "g1": a_group("g1", [((1,), 0.0), ((2,), 1.0)], version=3),
        "g2": a_group("g2", [((3,), 1.0), ((4,), 0.0)], version=4),
    }
    for group in given_.values():
        buffer.add(group)
    seen = Counter()
    for draw in buffer.sample(40, 2, version=5, rng=rng()):
        whole = given_[draw.prompt.id]
        assert draw.prompt == whole.prompt
        assert sorted(draw.trajectories, key=repr) == sorted(whole.trajectories, key=repr)
        assert set(draw.ages) == {5 - whole.version}
        seen[draw.prompt.id] += 1
    assert seen == {"g1": 20, "g2": 20}


def test_ten_thousand_inserts_stay_within_the_pools(tmp_path: Path):  # case f02
    buffer = ReplayBuffer(capacity_per_prompt=4)
    for number in range(10_000):
        buffer.add(a_group(f"p{number % 10}", [((number, 2), 0.5)], version=number))
        assert len(buffer) <= 40
    assert len(buffer) == 40
    assert tokens_of(buffer) == [(n, 2) for n in range(9_960, 10_000)]
    assert len(buffer.storage.rows) <= 41
    assert len(buffer.storage.versions) <= 40 + 1024 + 40
    buffer.save(tmp_path)
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) < 40_000
    assert buffer.ledger()["trajectories"]["evicted"] == {"prompt capacity": 9_960}


@pytest.mark.parametrize(
    ("rewards", "temperature", "expected"),
    [([0.3] * 4, 1.0, [0.25] * 4), ([10000.0, 0.0], 1.0, [1.0, 0.0]),
     ([0.0, 0.7, 1.4], 0.7, [1 / (1 + math.e + math.e**2), math.e / (1 + math.e + math.e**2),
                             math.e**2 / (1 + math.e + math.e**2)])],
)
def test_reward_probabilities_are_the_softmax(rewards, temperature, expected):  # case f07
    buffer = filled({"p": rewards}, mix={"reward": 1.0}, reward_temperature=temperature)
    (draw,) = buffer.sample(1, len(rewards), version=0, rng=rng())
    found = {t.reward: p for t, p in zip(draw.trajectories, draw.item_probabilities, strict=True)}
    assert [found[r] for r in rewards] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("rewards", "temperature"), [([1e308, 0.5], 0.01), ([1e308, -1e308], 1.0)])
def test_rewards_at_the_edge_of_a_double_still_have_probabilities(rewards, temperature):  # case f07
    buffer = filled({"p": rewards}, mix={"reward": 1.0}, reward_temperature=temperature)
    (draw,) = buffer.sample(1, 2, version=0, rng=rng())
    assert [t.reward for t in draw.trajectories] == rewards
    assert draw.item_probabilities == (1.0, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_or_reference_that_is_not_finite_is_no_trajectory(bad):  # case f07
    with pytest.raises(ValueError, match="must be finite"):
        a_trajectory("p", (5, 2), bad)
    with pytest.raises(ValueError, match="must be finite"):
        type(a_trajectory())(prompt_id="p", completion=a_trajectory().completion, reward=0.5, ref_logp=bad)


def test_an_empty_draw_says_what_there_is_and_where_the_rest_went():
    buffer = filled({"p": [0.1, 0.2], "q": [0.3]}, max_age=4)
    buffer.add(a_group("r", [], unscored=["timeout", "raised"]))
    with pytest.raises(EmptyBufferError, match=r"no prompt has 3 .*: 2 prompts hold 3; delivered 5") as caught:
        buffer.sample(2, 3, version=1, rng=rng())
    assert "unscored: timeout" in str(caught.value)
    with pytest.raises(EmptyBufferError, match="'too old': 3"):
        buffer.sample(2, 2, version=5, rng=rng())


# ---- bounds and eviction ---------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 4, 5])
def test_the_oldest_by_insertion_goes_first_and_only_beyond_capacity(capacity):
    buffer = ReplayBuffer(capacity=capacity)
    for number in range(7):
        buffer.add(a_group(f"p{number % 3}", [((number, 2), 0.1 * number)], version=20 - number))
    assert tokens_of(buffer) == [(n, 2) for n in range(7 - capacity, 7)]
    assert buffer.ledger()["trajectories"]["evicted"] == {"capacity": 7 - capacity}


def test_the_pool_of_a_prompt_loses_its_own_oldest():
    buffer = ReplayBuffer(capacity_per_prompt=3)
    buffer.add(a_group("q", [((9, 2), 0.1)]))
    buffer.add(a_group("p", [((n, 2), 0.1) for n in range(5)]))
    assert tokens_of(buffer) == [(9, 2), (2, 2), (3, 2), (4, 2)]
    assert buffer.ledger()["trajectories"]["evicted"] == {"prompt capacity": 2}


def test_a_copy_replaces_earlier_deliveries_and_siblings_keep_their_multiplicity():
    buffer = ReplayBuffer()
    buffer.add(a_group("p", [((5, 2), 0.1), ((5, 2), 0.1), ((6, 2), 0.2)], version=1))
    assert len(buffer) == 3  # two siblings of one delivery are two draws of the policy
    buffer.add(a_group("q", [((5, 2), 0.9)], version=1))
    buffer.add(a_group("p", [((5, 2), 0.1)], version=4))
    assert [(p.id, e.trajectory.completion.tokens, e.trajectory.completion.version) for p, e in buffer.entries()] == [
        ("p", (6, 2), 1), ("q", (5, 2), 1), ("p", (5, 2), 4)
    ]
    assert buffer.ledger()["trajectories"]["evicted"] == {"duplicate": 2}


def test_without_dedup_copies_stay():
    buffer = ReplayBuffer(dedup="none")
    for _ in range(3):
        buffer.add(a_group("p", [((5, 2), 0.1)]))
    assert len(buffer) == 3


def test_a_trajectory_used_up_leaves_and_a_batch_may_come_back_short():
    buffer = filled({"p": [0.1, 0.2, 0.3]}, max_uses=2)
    draws = buffer.sample(5, 3, version=0, rng=rng())
    assert [draw.uses for draw in draws] == [(0, 0, 0), (1, 1, 1)]
    assert buffer.ledger()["trajectories"]["evicted"] == {"used up": 3}
    assert buffer.consumed == 6


def test_max_age_is_the_oldest_that_may_be_consumed():
    buffer = ReplayBuffer(max_age=3, recent_age=9)
    for version in (0, 1, 2):
        buffer.add(a_group("p", [((version, 2), 0.1), ((version, 3, 2), 0.1)], version=version))
    (draw,) = buffer.sample(1, 4, version=4, rng=rng())
    assert sorted(draw.ages) == [2, 2, 3, 3]
    assert buffer.ledger()["trajectories"]["evicted"] == {"came too old": 2}
    buffer.add(a_group("p", [((7, 2), 0.1), ((7, 3, 2), 0.1)], version=1))  # with those of version 1 that were offered
    buffer.sample(1, 2, version=5, rng=rng())
    assert buffer.ledger()["trajectories"]["evicted"] == {"came too old": 4, "too old": 2}


def test_recent_age_is_in_the_window_and_one_more_is_out():
    buffer = ReplayBuffer(recent_age=3)
    buffer.add(a_group("old", [((1, 2), 0.1), ((2, 2), 0.1)], version=2))
    buffer.add(a_group("new", [((3, 2), 0.1), ((4, 2), 0.1)], version=3))
    assert {d.prompt.id for d in buffer.sample(4, 2, version=5, rng=rng())} == {"old", "new"}
    assert {d.prompt.id for d in buffer.sample(4, 2, version=6, rng=rng())} == {"new"}
    with pytest.raises(EmptyBufferError):
        buffer.sample(4, 2, version=7, rng=rng())


def test_within_a_pool_recent_draws_only_the_recent():
    buffer = ReplayBuffer(recent_age=1)
    for version in (2, 5):
        buffer.add(a_group("p", [((version, n, 2), 0.1) for n in range(4)], version=version))
    for draw in buffer.sample(20, 3, version=6, rng=rng()):
        assert draw.ages == (1, 1, 1)
        assert draw.item_probabilities == (0.25, 0.25, 0.25)


def test_reasons_of_rejection_are_counted_in_trajectories_and_tokens():
    buffer = ReplayBuffer()
    buffer.add(a_group("p", [((5, 2), 0.1)], unscored=["timeout", "timeout", "none"]))
    buffer.reject(a_group("p", [((6, 7, 2), 0.1)], unscored=["none"]), "late")
    ledger = buffer.ledger()
    assert ledger["trajectories"] == {
        "delivered": 6, "in_buffer": 1, "evicted": {},
        "rejected": {"unscored: timeout": 2, "unscored: none": 1, "late": 2},
    }
    assert ledger["tokens"] == {
        "delivered": 17, "in_buffer": 2, "evicted": {},
        "rejected": {"unscored: timeout": 6, "unscored: none": 3, "late": 6},
    }
    assert buffer.inserted == 1


# ---- draws -----------------------------------------------------------------------------------------


def test_prompts_come_once_each_until_all_have_and_the_probability_says_so():
    buffer = filled({f"p{n}": [0.1, 0.2, 0.3] for n in range(5)} | {"small": [0.1]}, mix={"uniform": 1.0})
    draws = buffer.sample(12, 2, version=0, rng=rng())
    names = [draw.prompt.id for draw in draws]
    assert len(set(names[:5])) == len(set(names[5:10])) == 5
    assert "small" not in names
    chances = [draw.prompt_probability for draw in draws]
    assert chances == pytest.approx([1 / 5, 1 / 4, 1 / 3, 1 / 2, 1] * 2 + [1 / 5, 1 / 4])


def test_the_order_of_prompts_differs_between_batches():
    buffer = filled({f"p{n}": [0.1, 0.2] for n in range(9)})
    dice = rng()
    assert len({tuple(d.prompt.id for d in buffer.sample(9, 2, version=0, rng=dice)) for _ in range(6)}) == 6


def test_a_sampler_without_eligible_prompts_leaves_its_share_to_the_others():
    buffer = filled({"p": [0.1, 0.2]}, mix={"recent": 0.6, "uniform": 0.4}, recent_age=2)
    assert {d.sampler for d in buffer.sample(30, 2, version=2, rng=rng())} == {"recent", "uniform"}
    assert {d.sampler for d in buffer.sample(30, 2, version=3, rng=rng())} == {"uniform"}


def chi_squared(observed: Counter, expected: dict[Any, float]) -> float:
    total = sum(observed.values())
    assert set(observed) <= set(expected)
    return sum((observed[k] - total * p) ** 2 / (total * p) for k, p in expected.items())


# Critical values at 0.001: 16.27 for 3 degrees of freedom, 18.47 for 4, 13.82 for 2.
def test_uniform_draws_first_each_trajectory_equally_often():
    buffer = filled({"p": [0.0, 5.0, -3.0, 0.5]}, mix={"uniform": 1.0})
    first = Counter(d.trajectories[0].reward for d in buffer.sample(4000, 3, version=0, rng=rng(11)))
    assert chi_squared(first, {0.0: 0.25, 5.0: 0.25, -3.0: 0.25, 0.5: 0.25}) < 16.27


def test_reward_draws_match_their_stated_probabilities_first_and_second():
    rewards, temperature = [0.0, 0.4, 0.9, 1.3], 0.6
    buffer = filled({"p": rewards}, mix={"reward": 1.0}, reward_temperature=temperature)
    draws = buffer.sample(6000, 2, version=0, rng=rng(12))
    weight = {r: math.exp(r / temperature) for r in rewards}
    total = sum(weight.values())
    expected = {r: w / total for r, w in weight.items()}
    assert chi_squared(Counter(d.trajectories[0].reward for d in draws), expected) < 16.27
    second = {
        b: sum(expected[a] * weight[b] / (total - weight[a]) for a in rewards if a != b) for b in rewards
    }
    assert chi_squared(Counter(d.trajectories[1].reward for d in draws), second) < 16.27
    stated = {t.reward: p for d in draws for t, p in zip(d.trajectories, d.item_probabilities, strict=True)}
    assert stated == pytest.approx(expected)


def test_a_mixture_draws_in_proportion_to_its_shares():
    buffer = filled({"p": [0.1, 0.2], "q": [0.1, 0.9]}, mix={"recent": 3, "reward": 1.5, "uniform": 0.5})
    seen = Counter(d.sampler for d in buffer.sample(3000, 2, version=0, rng=rng(13)))
    assert chi_squared(seen, {"recent": 0.6, "reward": 0.3, "uniform": 0.1}) < 13.82


def test_prompts_are_drawn_equally_often_whatever_their_pools_hold():
    sizes = {"a": 2, "b": 3, "c": 9, "d": 4, "e": 2}
    buffer = filled({n: [0.1] * k for n, k in sizes.items()}, mix={"uniform": 1.0})
    dice = rng(14)
    seen = Counter(buffer.sample(1, 2, version=0, rng=dice)[0].prompt.id for _ in range(2500))
    assert chi_squared(seen, dict.fromkeys(sizes, 0.2)) < 18.47


@pytest.mark.parametrize("options", [{"capacity": 0}, {"capacity_per_prompt": 0}, {"mix": {"recent": 0.0}},
                                     {"mix": {"newest": 1.0}}, {"mix": {"recent": 2.0, "reward": -1.0}}])
def test_a_bound_or_mixture_without_meaning_is_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ReplayBuffer(**options)


# ---- random sequences ------------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 4), st.lists(st.integers(0, 9), max_size=7), st.integers(0, 2)),
        st.tuples(st.just("reject"), st.integers(0, 4), st.lists(st.integers(0, 9), max_size=3), st.just(1)),
        st.tuples(st.just("draw"), st.integers(1, 6), st.integers(2, GROUP), st.just(0)),
        st.tuples(st.just("age"), st.integers(1, 3), st.just([]), st.just(0)),
    ),
    min_size=5, max_size=40,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(OPERATIONS, st.sampled_from(["exact", "none"]), st.sampled_from([None, 2]), st.sampled_from([None, 4]))
def test_any_sequence_of_operations_keeps_every_promise(operations, dedup, max_uses, max_age):
    buffer = ReplayBuffer(
        capacity=CAPACITY, capacity_per_prompt=PER_PROMPT, recent_age=2, dedup=dedup, max_uses=max_uses,
        max_age=max_age, mix={"recent": 0.5, "reward": 0.2, "uniform": 0.3},
    )
    dice, version, latest = rng(7), 0, Counter()
    for what, first, second, lost in operations:
        if what == "age":
            version += first
        elif what == "draw":
            check_draws(buffer, first, second, version, dice, latest)
        else:
            items = [((10 + t, *[3] * (t % 3), 2), t / 7) for t in second]
            group = a_group(f"p{first}", items, version=version, unscored=["none"] * lost)
            expected, gone = held_by(buffer), Counter()
            evicted = Counter(buffer.ledger()["trajectories"]["evicted"])
            if what == "add":
                expected, gone = twin_add(expected, group, buffer.storage.next_number, dedup)
                buffer.add(group)
            else:
                buffer.reject(group, "late")
            assert held_by(buffer) == expected
            assert Counter(buffer.ledger()["trajectories"]["evicted"]) == evicted + gone
        held = Counter(p.id for p, _ in buffer.entries())
        assert len(buffer) <= CAPACITY
        assert max(held.values(), default=0) <= PER_PROMPT
        assert buffer.num_prompts == len(held)
        assert all(p.id == e.trajectory.prompt_id for p, e in buffer.entries())
        assert balances(buffer.ledger())


Held = list[tuple[int, str, tuple[int, ...]]]


def held_by(buffer: ReplayBuffer) -> Held:
    return [(e.number, p.id, e.trajectory.completion.tokens) for p, e in buffer.entries()]


def twin_add(held: Held, group: Group, first: int, dedup: str) -> tuple[Held, Counter]:
    """What a plain list with the same rules would hold afterwards, and what it dropped by reason."""
    name, ids = group.prompt.id, [t.completion.tokens for t in group.trajectories]
    kept = [x for x in held if dedup == "none" or not (x[1] == name and x[2] in ids)]
    gone = Counter({"duplicate": len(held) - len(kept)})
    kept += [(first + n, name, tokens) for n, tokens in enumerate(ids)]
    while sum(x[1] == name for x in kept) > PER_PROMPT:
        kept.remove(next(x for x in kept if x[1] == name))
        gone["prompt capacity"] += 1
    gone["capacity"] = max(0, len(kept) - CAPACITY)
    return kept[-CAPACITY:], gone


def check_draws(
    buffer: ReplayBuffer, groups: int, size: int, version: int, dice: np.random.Generator, latest: Counter
) -> None:
    consumed = buffer.consumed
    try:
        draws = buffer.sample(groups, size, version=version, rng=dice)
    except EmptyBufferError:
        return
    assert len(draws) == groups or buffer.options.max_uses is not None
    assert buffer.consumed == consumed + size * len(draws)
    for draw in draws:
        chosen = list(draw.numbers)
        assert len(set(chosen)) == size
        assert {t.prompt_id for t in draw.trajectories} == {draw.prompt.id}
        assert draw.ages == tuple(version - t.completion.version for t in draw.trajectories)
        assert draw.uses == tuple(latest[n] for n in chosen)
        latest.update(chosen)
        if draw.sampler == "recent":
            assert max(draw.ages) <= buffer.options.recent_age
        assert max(draw.ages) <= (buffer.options.max_age if buffer.options.max_age is not None else version)
        assert buffer.options.max_uses is None or max(draw.uses) < buffer.options.max_uses
        assert 0 < draw.prompt_probability <= 1
        assert all(0 < p <= 1 for p in draw.item_probabilities)


# ---- on disk ---------------------------------------------------------------------------------------


def worn(**options: Any) -> ReplayBuffer:
    """A buffer of twelve groups that has been added to, drawn from and evicted from."""
    buffer = ReplayBuffer(capacity=30, capacity_per_prompt=7, recent_age=3, max_uses=5, **options)
    dice = rng(5)
    for number in range(12):
        items = [((number, n, 2), 0.37 * n - 0.1 * number) for n in range(3)]
        buffer.add(a_group(f"p{(7 * number) % 5}", items, version=number // 2, unscored=["none"] * (number % 2)))
        buffer.sample(2, 2, version=number // 2, rng=dice)
    return buffer


def contents(buffer: ReplayBuffer) -> list[Any]:
    return [(p, e.number, e.uses, e.trajectory) for p, e in buffer.entries()]


def test_saved_and_loaded_equals_never_saved(tmp_path: Path):  # case g04
    mix = {"recent": 0.4, "reward": 0.4, "uniform": 0.2}
    buffer = worn(mix=mix)
    buffer.save(tmp_path)
    other = ReplayBuffer(capacity=30, capacity_per_prompt=7, recent_age=3, max_uses=5, mix=mix).load(tmp_path)
    assert contents(other) == contents(buffer)
    assert other.ledger() == buffer.ledger()
    assert (other.consumed, other.inserted, len(other)) == (buffer.consumed, buffer.inserted, len(buffer))
    one, two = rng(9), rng(9)
    for number in range(8):
        version = 6 + number // 3
        assert next_draws(buffer, version, one) == next_draws(other, version, two)
        group = a_group(f"p{number % 6}", [((number, n, 2), 0.2 * n) for n in range(3)], version=version)
        buffer.add(group)
        other.add(group)
    assert contents(other) == contents(buffer)
    assert other.ledger() == buffer.ledger()


def next_draws(buffer: ReplayBuffer, version: int, dice: np.random.Generator) -> list[Draw]:
    return buffer.sample(4, 2, version=version, rng=dice)


def test_loading_replaces_what_was_there(tmp_path: Path):
    buffer = worn()
    buffer.save(tmp_path)
    options = {"recent_age": 3, "mix": {"uniform": 1.0}}
    used = filled({"stray": [0.5] * 6, "p1": [0.1, 0.2]}, **options)
    used.sample(3, 2, version=0, rng=rng())
    assert contents(used.load(tmp_path)) == contents(buffer)
    fresh = ReplayBuffer(**options).load(tmp_path)
    assert used.sample(30, 2, version=6, rng=rng()) == fresh.sample(30, 2, version=6, rng=rng())
    assert used.num_prompts == fresh.num_prompts


def test_saving_does_not_change_the_buffer(tmp_path: Path):
    buffer = worn()
    before = copy.deepcopy(contents(buffer))
    buffer.save(tmp_path)
    assert contents(buffer) == before


def test_files_of_another_schema_are_refused(tmp_path: Path):
    worn().save(tmp_path)
    state = json.loads((tmp_path / "buffer.json").read_text())
    (tmp_path / "buffer.json").write_text(json.dumps({**state, "schema": state["schema"] + 1}))
    with pytest.raises(ValueError, match=f"schema {state['schema'] + 1}; this version reads schema {state['schema']}"):
        ReplayBuffer().load(tmp_path)


@pytest.mark.parametrize("text", ["\ud800 lone", "nul \x00 end", "\x1b[2J", "</td>", "\u202e \u2028 \U0001d518", ""])
def test_hostile_texts_survive_saving(tmp_path: Path, text):
    buffer = ReplayBuffer()
    name = f"id {text}"
    prompt = a_prompt(name, text=text, columns={"gold": text, "level": 3})
    buffer.add(Group(prompt=prompt, trajectories=(a_trajectory(name, text=text), a_trajectory(name, (6, 2)))))
    buffer.save(tmp_path)
    loaded = ReplayBuffer().load(tmp_path)
    shown = text.encode("utf-8", "replace").decode()
    ((prompt_again, entry), _) = loaded.entries()
    assert prompt_again.id == entry.trajectory.prompt_id == name
    assert prompt_again.columns == {"gold": text, "level": 3}
    assert entry.trajectory.completion.text == shown
    assert [d.prompt.id for d in loaded.sample(2, 2, version=0, rng=rng())] == [name, name]
