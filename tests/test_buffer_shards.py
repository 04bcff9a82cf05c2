"""A buffer in shards: drawn from as one buffer is, complete in every account, resumed to the bit."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makers import a_group, a_prompt, an_answer, balances, settings_with
from tba.buffer.entries import Draw, EmptyBufferError
from tba.buffer.export import ordered, rows_of
from tba.buffer.memory import ReplayBuffer
from tba.buffer.options import Options
from tba.buffer.samplers import Pick
from tba.buffer.shards import Call, Here, ShardedBuffer, shard_of
from tba.cli import main
from tba.depot import Depot, make_buffer
from tba.reading import read_settings
from tba.settings import SettingsError
from test_buffer import OPERATIONS, PER_PROMPT, check_draws

NAMES = [f"f{n}" for n in range(7)]
"""Of three shards the first has f1 and f5, the second f6, the third f0, f2, f3 and f4."""
TEMPERATURE = 0.6
DRAWS = 4000
CRITICAL = {1: 10.83, 3: 16.27, 4: 18.47, 6: 22.46, 8: 26.12, 16: 39.25, 19: 43.82, 41: 74.74}
"""Of chi-squared at 0.001, by degrees of freedom."""


def rng(seed: int = 3) -> np.random.Generator:
    return np.random.default_rng(seed)


def both(count: int = 3, **options: Any) -> tuple[ReplayBuffer, ShardedBuffer]:
    """An empty buffer of one piece, and one in shards."""
    return ReplayBuffer(**options), ShardedBuffer(Options().changed(**options), count)


def distance(observed: Counter, expected: Mapping[Any, float]) -> float:
    """Chi-squared over its value at 0.001: below 1 where the one may well come from the other."""
    total = observed.total()
    assert set(observed) <= set(expected)
    assert math.fsum(expected.values()) == pytest.approx(1)
    return sum((observed[k] - total * p) ** 2 / (total * p) for k, p in expected.items()) / CRITICAL[len(expected) - 1]


def difference(one: Counter, other: Counter) -> float:
    """The same for two samples of equal size: whether both come from one distribution."""
    keys = set(one) | set(other)
    return sum((one[k] - other[k]) ** 2 / (one[k] + other[k]) for k in keys) / CRITICAL[len(keys) - 1]


# ---- which shard -----------------------------------------------------------------------------------


def test_the_shard_of_a_prompt_is_the_same_in_every_process_and_version():
    assert [shard_of(name, 3) for name in NAMES] == [2, 0, 2, 2, 2, 0, 1]
    assert [shard_of(name, 1) for name in NAMES] == [0] * 7
    assert shard_of("\ud800 lone", 5) == shard_of("\ud800 lone", 5)
    seen = Counter(shard_of(f"prompt {n}", 5) for n in range(5000))
    assert distance(seen, dict.fromkeys(range(5), 1 / 5)) < 1


def test_bounds_over_all_prompts_are_shared_out_to_the_last_and_those_of_one_are_not():
    shares = Options(capacity=11, capacity_tokens=100, capacity_per_prompt=9, max_age=4).shared_out(3)
    assert [s.capacity for s in shares] == [4, 4, 3]
    assert [s.capacity_tokens for s in shares] == [34, 33, 33]
    assert {(s.capacity_bytes, s.capacity_per_prompt, s.max_age) for s in shares} == {(None, 9, 4)}


# ---- frequencies -----------------------------------------------------------------------------------


def fill(buffers: tuple[ReplayBuffer, ShardedBuffer]) -> None:
    """Pools of 2 to 4; those of f0, f1 and f5 are recent, the copies of f5 are for novelty to find."""
    for at, name in enumerate(NAMES):
        items = [((at, 3 if at == 5 and n else n, 2), 0.3 * n - 0.1 * at) for n in range(2 + at % 3)]
        for buffer in buffers:
            buffer.add(a_group(name, items, version=5 if at in (0, 1, 5) else 0))


def weights_of(buffer: ReplayBuffer, sampler: str) -> dict[tuple[str, int], float]:
    """Probability of each (prompt, number) to come first, by the formulas of docs/buffer.md."""
    pools: dict[str, list[Any]] = {}
    for prompt, entry in buffer.entries():
        if sampler != "recent" or entry.trajectory.completion.version == 5:
            pools.setdefault(prompt.id, []).append(entry)
    found = {}
    for name, held in pools.items():
        rewards, seen, weight = [e.trajectory.reward for e in held], Counter[Any](), []
        mean = sum(rewards) / len(rewards)
        for entry, reward in zip(held, rewards, strict=True):
            ids = entry.trajectory.completion.tokens
            seen[ids] += 1
            weight.append({
                "recent": 1.0, "uniform": 1.0, "reward": math.exp(reward / TEMPERATURE),
                "advantage": math.cosh((reward - mean) / TEMPERATURE), "novelty": 1 / seen[ids],
            }[sampler])
        for entry, w in zip(held, weight, strict=True):
            found[name, entry.number] = w / sum(weight) / len(pools)
    return found


def firsts(buffer: ReplayBuffer | ShardedBuffer, seed: int, times: int = DRAWS) -> list[Draw]:
    dice = rng(seed)
    return [buffer.sample(1, 2, version=5, rng=dice)[0] for _ in range(times)]


@pytest.mark.parametrize("sampler", ["recent", "uniform", "reward", "advantage", "novelty"])
def test_every_sampler_draws_as_stated_and_as_from_one_buffer(sampler):
    buffers = both(mix={sampler: 1.0}, reward_temperature=TEMPERATURE, recent_age=2, dedup="none")
    fill(buffers)
    expected = weights_of(buffers[0], sampler)
    seen = []
    for seed, buffer in enumerate(buffers):
        draws = firsts(buffer, seed)
        seen.append(Counter((d.prompt.id, d.numbers[0]) for d in draws))
        assert distance(seen[-1], expected) < 1
        for draw in draws[:60]:
            stated = draw.prompt_probability * np.array(draw.item_probabilities)
            assert stated.tolist() == pytest.approx([expected[draw.prompt.id, n] for n in draw.numbers], abs=1e-12)
    assert difference(*seen) < 1


def test_a_mixture_draws_as_stated_and_as_from_one_buffer():
    mix = {"recent": 0.5, "reward": 0.3, "advantage": 0.2}
    buffers = both(mix=mix, reward_temperature=TEMPERATURE, recent_age=2)
    fill(buffers)
    expected = {(s, name): share / (3 if s == "recent" else 7)
                for s, share in mix.items() for name in (("f0", "f1", "f5") if s == "recent" else NAMES)}
    seen = [Counter((d.sampler, d.prompt.id) for d in firsts(b, 7 + n)) for n, b in enumerate(buffers)]
    assert distance(seen[0], {**expected}) < 1
    assert distance(seen[1], {**expected}) < 1
    assert difference(*seen) < 1


def test_pairs_of_a_batch_come_as_from_one_buffer():  # 7 x 6 ordered pairs, equally likely
    buffers = both(mix={"uniform": 1.0})
    fill(buffers)
    expected = {(a, b): 1 / 42 for a in NAMES for b in NAMES if a != b}
    for seed, buffer in enumerate(buffers):
        dice, seen = rng(seed), Counter[Any]()
        for _ in range(DRAWS):
            one, two = buffer.sample(2, 2, version=5, rng=dice)
            assert (one.prompt_probability, two.prompt_probability) == (1 / 7, 1 / 6)
            seen[one.prompt.id, two.prompt.id] += 1
        assert distance(seen, expected) < 1


def test_what_two_shards_draw_for_one_batch_is_independent():  # 2 x 2 first trajectories, equally likely
    _, buffer = both(mix={"uniform": 1.0})
    for name in ("f0", "f1"):
        buffer.add(a_group(name, [((1, 2), 0.0), ((2, 2), 1.0)]))
    dice, seen = rng(8), Counter[Any]()
    for _ in range(1000):
        one, two = sorted(buffer.sample(2, 2, version=0, rng=dice), key=lambda draw: draw.prompt.id)
        seen[one.trajectories[0].reward, two.trajectories[0].reward] += 1
    assert distance(seen, dict.fromkeys([(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)], 1 / 4)) < 1


def test_the_frequencies_would_show_shards_that_are_drawn_from_equally_or_by_trajectories():
    _, sharded = both(mix={"uniform": 1.0})
    fill((ReplayBuffer(), sharded))
    even, dice = dict.fromkeys(NAMES, 1 / 7), rng(5)
    assert distance(Counter(d.prompt.id for d in firsts(sharded, 2)), even) < 1
    sizes = np.array([len(part) for part in sharded.parts])
    for shares in (np.full(3, 1 / 3), sizes / sizes.sum()):
        wrong = Counter[str]()
        for shard in dice.choice(3, DRAWS, p=shares):
            wrong[sharded.parts[shard].sample(1, 2, version=5, rng=dice)[0].prompt.id] += 1
        assert distance(wrong, even) > 2


def test_groups_used_up_on_the_way_leave_the_batch_as_they_would_leave_one_buffer():
    """f0 holds 4, f1 holds 2, each may be used once: both are drawn in either order, then f0 again, then nothing."""
    seen = []
    for seed in range(2):
        counted = Counter[Any]()
        dice = rng(seed)
        for _ in range(400):
            buffer = both(mix={"uniform": 0.6, "reward": 0.4}, max_uses=1)[seed]
            buffer.add(a_group("f0", [((n, 2), 0.1 * n) for n in range(4)]))
            buffer.add(a_group("f1", [((n, 2), 0.1 * n) for n in range(2)]))
            draws = buffer.sample(9, 2, version=0, rng=dice)
            assert [d.prompt_probability for d in draws] == [0.5, 1.0, 1.0]
            assert len(buffer) == 0
            assert buffer.ledger()["trajectories"]["evicted"] == {"used up": 6}
            counted["".join(d.prompt.id for d in draws)] += 1
        seen.append(counted)
        assert distance(counted, {"f0f1f0": 0.5, "f1f0f0": 0.5}) < 1


def test_a_sampler_whose_prompts_are_used_up_leaves_its_share_and_is_counted():
    for buffer in both(mix={"recent": 0.9, "uniform": 0.1}, max_uses=2, recent_age=1):
        buffer.add(a_group("f0", [((1, 2), 0.1), ((2, 2), 0.2)], version=5))
        for name in NAMES[1:]:
            buffer.add(a_group(name, [((n, 2), 0.1) for n in range(9)], version=0))
        draws = buffer.sample(40, 2, version=5, rng=rng(4))
        assert len(draws) == 40
        assert Counter(d.prompt.id for d in draws)["f0"] == 2
        assert sum(d.sampler == "recent" for d in draws) <= 2
        assert buffer.unmet["recent"] > 20
        assert set(buffer.unmet) == {"recent"}


# ---- messages --------------------------------------------------------------------------------------


class Counted(Here):
    """Shards that count what they are asked."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asked: list[Mapping[int, Call]] = []
        self.reported: list[int] = []

    def ask(self, calls: Mapping[int, Call]) -> dict[int, Any]:
        self.asked.append(calls)
        answers = super().ask(calls)
        reports = [a[-1] if isinstance(a, tuple) else a for a in answers.values()]
        self.reported.append(sum(len(report.prompts) for report in reports))
        return answers


def counted(**options: Any) -> tuple[ShardedBuffer, Counted]:
    made = Options().changed(**options)
    shards = Counted(made.shared_out(3))
    return ShardedBuffer(made, 3, shards), shards


def test_a_batch_takes_two_exchanges_that_tell_only_what_changed():
    buffer, shards = counted(mix={"recent": 0.5, "uniform": 0.5}, recent_age=1)
    for n in range(60):
        buffer.add(a_group(f"p{n}", [((n, k, 2), 0.1 * k) for k in range(3)], version=n // 30))
    assert len(buffer.sample(20, 2, version=1, rng=rng())) == 20
    buffer.served()
    assert (len(buffer), buffer.inserted, buffer.num_prompts) == (180, 180, 60)
    assert shards.reported == [60, 20]
    buffer.add(a_group("p3", [((9, 2), 0.1)], version=1))
    buffer.sample(20, 2, version=1, rng=rng())
    assert shards.reported[2:] == [1, 20]
    buffer.sample(20, 2, version=2, rng=rng())  # the 30 prompts of version 0 are recent no longer, p3 has one that is
    assert shards.reported[4:] == [30, 20]
    assert [list(calls) for calls in shards.asked[::2]] == [[0, 1, 2]] * 3


def test_groups_that_may_be_used_up_are_asked_for_whenever_all_prompts_have_been_drawn():
    buffer, shards = counted(mix={"uniform": 1.0}, max_uses=9)
    for name in NAMES:
        buffer.add(a_group(name, [((n, 2), 0.1) for n in range(3)]))
    buffer.sample(18, 2, version=0, rng=rng())
    picks = [[len(call[1]) for call in calls.values()] for calls in shards.asked[1:]]
    assert [sum(sizes) for sizes in picks] == [7, 7, 4]


# ---- random sequences ------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None, derandomize=True)
@given(OPERATIONS, st.sampled_from(["exact", "none", "near"]), st.sampled_from([None, 2]),
       st.sampled_from([None, 4]), st.integers(2, 4))
def test_any_sequence_of_operations_keeps_every_promise(operations, dedup, max_uses, max_age, count):
    options = {"capacity_per_prompt": PER_PROMPT, "recent_age": 2, "dedup": dedup, "max_uses": max_uses,
               "max_age": max_age, "mix": {"recent": 0.5, "reward": 0.2, "uniform": 0.3}}
    single, sharded = both(count, **options)
    dice, version, latest, has_drawn = rng(7), 0, Counter(), False
    for what, first, second, lost in operations:
        if what == "age":
            version += first
        elif what == "draw":
            check_draws(sharded, first, second, version, dice, latest)
            has_drawn = True
        else:
            items = [((10 + t, *[3] * (t % 3), 2), t / 7) for t in second]
            group = a_group(f"p{first}", items, version=version, unscored=["none"] * lost)
            for buffer in (single, sharded):
                buffer.add(group) if what == "add" else buffer.reject(group, "late")
        held = Counter(p.id for p, _ in sharded.entries())
        assert max(held.values(), default=0) <= PER_PROMPT
        assert sharded.num_prompts == len(held)
        assert len(sharded) == sum(held.values())
        assert all(p.id == e.trajectory.prompt_id for p, e in sharded.entries())
        assert balances(sharded.ledger())
        for shard, part in enumerate(sharded.parts):
            assert {shard_of(p.id, count) for p, _ in part.entries()} <= {shard}
        if not has_drawn:  # the same, also in number and order; draws differ, though not in distribution
            assert list(sharded.entries()) == list(single.entries())
            assert sharded.ledger() == single.ledger()
            assert json.dumps(sharded.served()[0]) == json.dumps(single.served()[0])
            one, other = (sorted(map(json.dumps, buffer.fairness()["prompts"])) for buffer in (single, sharded))
            assert one == other  # in one order but for ties


def test_eviction_by_a_total_bound_is_each_shards_own():
    single, sharded = both(capacity=12, mix={"uniform": 1.0})  # 4 in each shard
    for name in NAMES:
        for buffer in (single, sharded):
            buffer.add(a_group(name, [((1, 2), 0.1), ((2, 2), 0.2)]))
        sharded.sample(1, 2, version=9, rng=rng())  # so that what leaves later is known here, and not recent
    assert Counter(p.id for p, _ in single.entries()) == dict.fromkeys(NAMES[1:], 2)
    assert Counter(p.id for p, _ in sharded.entries()) == dict.fromkeys(("f1", "f3", "f4", "f5", "f6"), 2)
    assert sharded.ledger()["trajectories"]["evicted"] == {"capacity": 4}
    assert {d.prompt.id for d in sharded.sample(9, 2, version=9, rng=rng())} == {"f1", "f3", "f4", "f5", "f6"}


def test_an_empty_draw_says_what_there_is_and_where_the_rest_went():
    for buffer in both():
        buffer.add(a_group("p0", [((1, 2), 0.1)], unscored=["timeout", "none"]))
        buffer.reject(a_group("p4", [((1, 2), 0.1)]), "late")
        with pytest.raises(EmptyBufferError) as caught:
            buffer.sample(2, 2, version=0, rng=rng())
        said = ("1 prompts hold 1", "delivered 4", "'unscored: timeout': 1", "'late': 1")
        assert all(words in str(caught.value) for words in said), str(caught.value)


# ---- saving ----------------------------------------------------------------------------------------

WORN = {"capacity": 90, "capacity_per_prompt": 7, "recent_age": 3, "max_uses": 5,
        "mix": {"recent": 0.4, "reward": 0.4, "uniform": 0.2}}  # fmt: skip


def worn(buffer: ShardedBuffer, dice: np.random.Generator, first: int = 0, last: int = 12) -> list[list[Draw]]:
    found = []
    for number in range(first, last):
        items = [((number, n, 2), 0.37 * n - 0.1 * number) for n in range(3)]
        buffer.add(a_group(f"p{(7 * number) % 8}", items, version=number // 2, unscored=["none"] * (number % 2)))
        found.append(buffer.sample(2, 2, version=number // 2, rng=dice))
    return found


def test_saved_and_loaded_goes_on_as_if_never_saved(tmp_path: Path):
    _, buffer = both(**WORN)
    one, two = rng(5), rng(5)
    worn(buffer, one)
    two.bit_generator.state = one.bit_generator.state
    buffer.save(tmp_path)
    _, other = both(**WORN)
    worn(other, rng(1), 3, 5)  # what is in it goes
    for n in range(40):
        other.add(a_group(f"stray {n}", [((1, 2), 0.1), ((2, 2), 0.2)], version=9))
    other.sample(4, 2, version=9, rng=rng(1))
    assert other.load(tmp_path) is other
    for _ in range(2):
        assert list(other.entries()) == list(buffer.entries())
        assert other.ledger() == buffer.ledger()
        assert other.fairness() == buffer.fairness()
        assert (len(other), other.consumed, other.inserted, other.delivered_tokens, other.counted_bytes) == (
            len(buffer), buffer.consumed, buffer.inserted, buffer.delivered_tokens, buffer.counted_bytes)
        assert worn(buffer, one, 12, 24) == worn(other, two, 12, 24)


def test_a_save_cut_short_leaves_the_last_and_one_that_is_whole_leaves_nothing_else(tmp_path: Path):
    _, buffer = both(**WORN)
    worn(buffer, rng())
    buffer.save(tmp_path)
    before = list(buffer.entries())
    worn(buffer, rng(), 12, 15)
    (tmp_path / "shard-0-1").mkdir()
    buffer._shards.ask({0: ("save", str(tmp_path / "shard-0-1"))})  # and then the process is killed
    assert list(both(**WORN)[1].load(tmp_path).entries()) == before
    buffer.save(tmp_path)
    assert list(both(**WORN)[1].load(tmp_path).entries()) == list(buffer.entries())
    names = ["shard-0-1", "shard-1-1", "shard-2-1", "shards.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_save_links_what_the_last_one_wrote_also_after_its_folder_was_renamed(tmp_path: Path):
    _, buffer = both(mix={"uniform": 1.0})
    worn(buffer, rng())
    (tmp_path / "partial").mkdir()
    buffer.save(tmp_path / "partial")
    os.replace(tmp_path / "partial", tmp_path / "step_1")
    (tmp_path / "partial").mkdir()
    buffer.save(tmp_path / "partial")
    files = list((tmp_path / "partial").glob("shard-*/trajectories-*.parquet"))
    assert len(files) == 3
    assert {file.stat().st_nlink for file in files} == {2}


def test_another_number_of_shards_than_was_saved_is_refused(tmp_path: Path):
    single, sharded = both(3)
    sharded.save(tmp_path)
    with pytest.raises(ValueError, match=r"a buffer of 3 shards, buffer\.shards = 4; set buffer\.shards=3"):
        ShardedBuffer(Options(), 4).load(tmp_path)
    with pytest.raises(ValueError, match=r"no buffer\.json.*buffer\.shards must be what it was"):
        single.load(tmp_path)
    (tmp_path / "one").mkdir()
    single.save(tmp_path / "one")
    with pytest.raises(ValueError, match=r"no shards\.json.*buffer\.shards must be what it was"):
        sharded.load(tmp_path / "one")
    head = json.loads((tmp_path / "shards.json").read_text())
    (tmp_path / "shards.json").write_text(json.dumps({**head, "schema": 2}))
    with pytest.raises(ValueError, match="schema 2; this version reads schema 1"):
        sharded.load(tmp_path)


# ---- in a run --------------------------------------------------------------------------------------


def test_a_depot_with_shards_goes_on_as_if_never_stopped(tmp_path: Path):
    run = settings_with(
        seed=11, search={"num_samples": 3, "batch_prompts": 4}, buffer={"shards": 3, "capacity": 90},
        trainer={"steps": 12, "groups_per_step": 2, "group_size": 2, "sync_every": 3},
    )
    prompts = [a_prompt(name) for name in NAMES]
    one, two = (Depot(prompts, run, lead=None) for _ in range(2))
    assert isinstance(one.buffer, ShardedBuffer)

    def searched(depot: Depot, round_: int) -> Any:
        for lease in depot.take(round_):
            answer = an_answer(lease, tokens=[(9 + lease.number, *[3] * n, 2) for n in range(3)], version=3 * round_,
                               run_attempt=depot.attempt)
            assert depot.deliver(answer) == ""
        return [depot.draw(3 * round_ + n)[0] for n in range(3)]

    assert searched(one, 0) == searched(two, 0)
    one.save(tmp_path)
    one = Depot(prompts, run, lead=None)
    one.load(tmp_path)
    for round_ in (1, 2):
        assert searched(one, round_) == searched(two, round_)
    assert one.ledger() == two.ledger()


def test_one_shard_is_one_buffer():
    assert isinstance(make_buffer(read_settings("enumerable", ["buffer.shards=1"])), ReplayBuffer)


@pytest.mark.parametrize(("overrides", "words"), [
    (["buffer.shards=0"], ["buffer.shards"]),
    (["buffer.shards=2.5"], ["buffer.shards"]),
    (["buffer.shards=4", "buffer.capacity=511"], ["buffer.capacity = 511 / buffer.shards = 4", "batch needs (128)"]),
    (["buffer.shards=3", "buffer.capacity_tokens=1000"], ["buffer.capacity_tokens = 1000 / buffer.shards = 3"]),
])
def test_shards_that_hold_no_batch_are_refused(overrides, words):
    with pytest.raises(SettingsError) as caught:
        read_settings("enumerable", overrides)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_share_that_holds_just_one_batch_passes():
    assert read_settings("enumerable", ["buffer.shards=4", "buffer.capacity=512"]).buffer.shards == 4


@pytest.mark.usefixtures("one_thread")
def test_a_run_with_shards_can_be_looked_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, file = tmp_path / "run", tmp_path / "rows.jsonl"
    words = ["trainer.steps=32", "buffer.shards=3", "evaluation.every=0", "evaluation.samples=8"]
    assert main(["train", "enumerable", *words, "--run", str(run)]) == 0
    ledger = json.loads((run / "ledger.json").read_text())
    capsys.readouterr()
    assert main(["buffer", "stats", str(run)]) == 0
    assert str(ledger["trajectories"]["in_buffer"]) in capsys.readouterr().out
    assert main(["buffer", "export", str(run), str(file)]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == ledger["trajectories"]["in_buffer"]
    assert [row["number"] for row in rows] == sorted({row["number"] for row in rows})
    capsys.readouterr()
    assert main(["buffer", "show", str(run), "--most", "3", "--top", "reward"]) == 0
    assert capsys.readouterr().out


def test_the_highest_and_the_newest_are_those_of_one_buffer():
    buffers = both()
    fill(buffers)
    for options in ({}, {"top": "reward"}, {"top": "age"}, {"top": "used"}, {"prompt": "f5"}, {"prompt": "none"}):
        for most in (1, 5, 99):
            one, other = (ordered(buffer, most, **options) for buffer in buffers)  # type: ignore[arg-type]
            assert one == other
    assert list(rows_of(buffers[0])) == list(rows_of(buffers[1]))


def test_a_pick_says_what_it_is():
    _, sharded = both()
    fill((ReplayBuffer(), sharded))
    part = sharded.parts[0]
    part.advance(5)
    (draw,) = part.sample_from([Pick(sampler="uniform", prompt=1, probability=0.3)], 2, version=5, rng=rng())
    assert (draw.prompt.id, draw.sampler, draw.prompt_probability) == ("f5", "uniform", 0.3)
