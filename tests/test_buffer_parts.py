"""The parts of the replay buffer by themselves: trees, ranks, copies, tallies, segments; each against a slow twin."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makers import a_completion, a_group, a_trajectory
from tba.buffer.copies import band_keys, digests_of, similarity
from tba.buffer.ledger import FEWEST, Tally, fairness, length_class, served
from tba.buffer.memory import ReplayBuffer
from tba.buffer.samplers import choose, draw_prompt, draw_uniform, draw_weighted
from tba.buffer.segments import Ragged, Segment, merged
from tba.buffer.trees import Ranks, Tree, find, log_add
from tba.records import Completion, Trajectory

LOGS = st.floats(-800, 800) | st.just(-math.inf)


# ---- trees -----------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 40), LOGS), max_size=60))
def test_a_tree_is_the_sum_of_what_was_put_last_whatever_came_before(puts):
    tree, kept = Tree(log_add, -math.inf), dict[int, float]()
    for place, value in puts:
        tree.put(place, value)
        kept[place] = value
    finite = [v for v in kept.values() if v != -math.inf]
    top = max(finite, default=0.0)
    expected = top + math.log(math.fsum(math.exp(v - top) for v in finite)) if finite else -math.inf
    assert tree.root == pytest.approx(expected, abs=1e-9)
    values = [kept.get(n, -math.inf) for n in range(max(kept, default=0) + 1)]
    again = Tree(log_add, -math.inf, values)
    assert again.root == tree.root  # to the bit, though the sizes differ
    if finite:
        for share in (0.0, 0.3, 0.77, 1 - 2**-53):
            assert find(again, share) == find(tree, share)
            assert kept[find(tree, share)] != -math.inf


def test_find_follows_the_shares():  # shares 1/8, 0, 4/8, 3/8
    tree = Tree(log_add, -math.inf, [0.0, -math.inf, math.log(4), math.log(3)])
    assert [find(tree, share) for share in (0.0, 0.124, 0.126, 0.624, 0.626, 0.999)] == [0, 0, 2, 2, 3, 3]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "hide", "show"]), st.integers(0, 70)), max_size=80))
def test_ranks_agree_with_a_sorted_list(operations):
    ranks, members, hidden = Ranks(), set[int](), set[int]()
    for what, number in operations:
        if what == "add" and number not in members:
            ranks.add(number)
            members.add(number)
        elif what == "discard" and number in members:
            ranks.discard(number)
            members.discard(number)
            hidden.discard(number)
        elif what == "hide" and number in members - hidden:
            ranks.hide(number)
            hidden.add(number)
        elif what == "show":
            ranks.show(number)
            hidden.discard(number)
    visible = sorted(members - hidden)
    assert [ranks.nth(rank) for rank in range(len(visible))] == visible
    assert (len(ranks), ranks.left) == (len(members), len(visible))
    assert all((n in ranks) == (n in members) for n in range(90))
    assert [Ranks(visible).nth(rank) for rank in range(len(visible))] == visible


# ---- samplers --------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.floats(-1e5, 1e5), min_size=3, max_size=40), st.integers(1, 3), st.integers(0, 99))
def test_weighted_draws_are_distinct_and_leave_the_trees_as_they_were(logits, size, seed):
    tree = Tree(log_add, -math.inf, logits)
    before = list(tree.node)
    places, chances = draw_weighted([tree], [0.0], size, np.random.default_rng(seed))
    assert len(set(places)) == size
    assert list(tree.node) == before
    top = max(logits)
    total = math.fsum(math.exp(v - top) for v in logits)
    assert chances == pytest.approx([math.exp(logits[p] - top) / total for p in places], abs=1e-9)


def test_uniform_draws_all_orders_equally_often():  # 3 x 2 orders of 2 out of 3; 20.52 at 0.001 for 5 degrees
    dice = np.random.default_rng(4)
    seen = dict[tuple[int, ...], int]()
    for _ in range(3000):
        places, chances = draw_uniform(3, 2, dice)
        assert chances == [1 / 3, 1 / 3]
        seen[tuple(places)] = seen.get(tuple(places), 0) + 1
    assert len(seen) == 6
    assert sum((n - 500) ** 2 / 500 for n in seen.values()) < 20.52


def test_choose_never_picks_a_share_of_zero():
    dice = np.random.default_rng(4)
    assert {choose({"a": 0.0, "b": 1e-300, "c": 0.0}, dice) for _ in range(50)} == {"b"}


def test_prompts_drawn_through_one_sampler_are_not_drawn_through_another():
    both, some, dice = Ranks([0, 1, 2]), Ranks([1]), np.random.default_rng(3)
    assert draw_prompt(some, [both, some], dice) == (1, 1.0)
    drawn = [draw_prompt(both, [both, some], dice) for _ in range(2)]
    assert sorted(drawn) == sorted([(drawn[0][0], 1 / 2), (drawn[1][0], 1.0)])
    assert {number for number, _ in drawn} == {0, 2}
    assert draw_prompt(some, [both, some], dice) == (1, 1.0)  # all of it were drawn: they may be drawn again


# ---- copies ----------------------------------------------------------------------------------------


def test_digests_tell_pools_and_ids_apart_and_nothing_else():
    ids = np.array([5, 6, 7, 5, 6, 7, 5, 6], np.int32)
    one = digests_of(3, ids, [3, 3, 2])
    assert one[0] == one[1] != one[2]
    assert digests_of(4, ids, [3, 3, 2])[0] != one[0]
    assert one[2] == digests_of(3, np.array([5, 6], np.int32), [2])[0]


def test_similarity_is_the_share_of_common_trigrams():
    # 10 ids have 8 trigrams; changing the last id changes one of them: 7 common of 9
    one = np.arange(10, dtype=np.int32)
    other = np.append(one[:-1], np.int32(77))
    assert similarity(one, other) == pytest.approx(7 / 9)
    assert similarity(one, one) == 1.0
    assert similarity(one, one[::-1].copy()) == 0.0
    short = np.array([3], np.int32)
    assert similarity(short, np.array([3, 4], np.int32)) == 0.0
    assert similarity(short, short.copy()) == 1.0


def test_near_completions_share_a_band_and_strangers_do_not():
    dice = random.Random(3)
    found = strangers = 0
    for _ in range(200):
        ids = [dice.randrange(50_000) for _ in range(60)]
        near = [*ids]
        near[30] = 7  # 3 of 58 trigrams differ: similarity 55/61 = 0.90
        keys = set(band_keys(0, np.array(ids, np.int32)))
        found += bool(keys & set(band_keys(0, np.array(near, np.int32))))
        assert not keys & set(band_keys(1, np.array(ids, np.int32)))
        dice.shuffle(ids)
        strangers += bool(keys & set(band_keys(0, np.array(ids, np.int32))))
    assert found >= 198  # 1 - (1 - 0.9^3)^8 = 0.99997
    assert strangers == 0


# ---- segments --------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(-9, 9), max_size=4), max_size=30), st.lists(st.integers(0, 29), max_size=9))
def test_ragged_lists_come_back_as_they_went_in(lists, places):
    ragged = Ragged("int32")
    ragged.extend(lists[:7])
    ragged.extend(lists[7:])
    places = np.array([p for p in places if p < len(lists)], np.int64)
    assert [ragged[at].tolist() for at in range(len(lists))] == lists
    assert [ragged.length(at) for at in range(len(lists))] == list(map(len, lists))
    values, lengths = ragged.take(places)
    assert values.tolist() == [v for p in places for v in lists[p]]
    assert lengths.tolist() == [len(lists[p]) for p in places]


def test_log_probs_keep_every_bit_whatever_they_are():
    ragged = Ragged("float32")
    ragged.extend([[-0.5], [-0.25, -1.5]])
    assert ragged.values.dtype == np.float32
    ragged.extend([[-0.1]])
    assert [ragged[at].tolist() for at in range(3)] == [[-0.5], [-0.25, -1.5], [-0.1]]
    assert ragged.values.dtype == np.float64


def full_trajectory(number: int) -> Trajectory:
    """Every field set to something of its own."""
    completion = Completion(
        tokens=(number, 7, 2), text=f"t{number} \ud800", logps=(-0.1, -0.2, -0.3 * number), version=3, finish="length",
        behaviour_logps=(-1.1, -1.2, -1.3), token_versions=(4, 3, 5),
    )
    return Trajectory(prompt_id="p", completion=completion, reward=0.1 * number, ref_logp=-1.1, ref_version=6,
                      reward_parts={"a": 0.25, "b": float(number)})


@pytest.mark.parametrize("plain_first", [True, False])
def test_a_segment_gives_back_every_field_also_after_merging(plain_first):
    whole = [full_trajectory(1), a_trajectory("p", (9, 2), 0.7), full_trajectory(3)]
    whole = [whole[1], whole[0], whole[2]] if plain_first else whole
    segment = Segment()
    for one in whole:
        ids = np.array(one.completion.tokens, np.int32)
        segment.extend([one], ids, keeps_logps=True, keeps_text=True)
    segment.rows[:] = type(segment.rows)("i", [5, 6, 7])
    for at, one in enumerate(whole):
        assert segment.trajectory(at, "p", one.completion.version, one.reward) == one
    assert segment.bytes_N().tolist() == [segment.bytes_of(at) for at in range(3)]
    assert segment.counted == sum(segment.bytes_N())
    segment.leave(1)
    left = merged([segment])
    assert left.rows.tolist() == [5, 7]
    assert (left.live, left.live_tokens) == (2, segment.live_tokens)
    for at, one in enumerate([whole[0], whole[2]]):
        assert left.trajectory(at, "p", one.completion.version, one.reward) == one


def test_without_log_probs_and_text_their_sum_stays():
    buffer = ReplayBuffer(keep_logps=False, keep_text=False)
    buffer.add(a_group("p", [((5, 6, 2), 0.3), ((7, 2), 0.4)]))
    held = [entry.trajectory.completion for _, entry in buffer.entries()]
    assert [c.text for c in held] == ["", ""]
    assert held[0].logps == pytest.approx((-0.5, -0.5, -0.5))  # -0.25 - 0.5 - 0.75 = -1.5, spread evenly
    assert held[0].logp == pytest.approx(a_completion((5, 6, 2)).logp)


# ---- tallies ---------------------------------------------------------------------------------------


def test_deciles_say_who_was_served_and_who_is_starved():
    prompts, lengths = Tally(), Tally()
    for prompt in range(20):  # prompt n has mean reward n / 10; the two hardest are never drawn
        prompts.add(prompt, delivered=100, accepted=80, reward=8.0 * prompt, consumed=100 if prompt > 1 else 0, age=50)
    for length, consumed in ((10, 900), (40, 900), (300, 0)):
        lengths.add(length_class(length), delivered=900 if length < 300 else 200, accepted=720, consumed=consumed)
    found = fairness(prompts, lengths)
    assert [part["prompts"] for part in found["prompts"]] == [2] * 10
    assert found["prompts"][0]["consumed_per_delivered"] == 0.0
    assert found["prompts"][1]["consumed_per_delivered"] == 1.0
    assert found["prompts"][1]["reward"] == pytest.approx((16 + 24) / 160)
    assert found["prompts"][1]["accepted_share"] == 0.8
    assert found["prompts"][1]["age"] == 0.5
    assert sum(part["delivered"] for part in found["lengths"]) == 2000
    assert found["lengths"][-1]["tokens_to"] >= 300 > found["lengths"][0]["tokens_to"] >= 10
    assert len(found["warnings"]) == 2
    assert "longest completions are starved: 0.00 consumed" in found["warnings"][0]
    assert "hardest prompts are starved" in found["warnings"][1]
    longest, hardest = served(prompts, lengths)
    assert (longest, hardest) == (0.0, 0.0)
    assert FEWEST <= 200


def test_nobody_is_starved_where_all_are_drawn_alike():
    buffer = ReplayBuffer(mix={"uniform": 1.0})
    for n in range(40):
        buffer.add(a_group(f"p{n}", [((n, *[3] * (4 * k), 2), 0.1 * n) for k in range(4)]))
    dice = np.random.default_rng(3)
    for _ in range(20):
        buffer.sample(40, 4, version=0, rng=dice)
    assert buffer.served() == pytest.approx((1.0, 1.0))
    assert buffer.fairness()["warnings"] == []
    assert math.isnan(ReplayBuffer().served()[0])


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 127, 128, 4096, 100_000])
def test_classes_of_length_are_an_eighth_of_an_octave(length):
    low, high = 2 ** (length_class(length) / 8), 2 ** ((length_class(length) + 1) / 8)
    assert low <= length * (1 + 1e-12)
    assert length < high * (1 + 1e-12)
