"""Diversity of a prompt's completions: by hand, against slow twins, and what must hold of any completions."""

from __future__ import annotations

import math
import random
import zlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba import diversity as room
from tba.diversity import distinct_n, effective, effective_answers, embedding_distance, self_bleu
from tba.embeddings import DIMENSIONS, Embedder
from tba.estimates import kinds, vote_of

EMBED = Embedder(None)
IDS = st.lists(st.integers(0, 3), min_size=1, max_size=7)
GROUPS = st.lists(st.lists(IDS, min_size=2, max_size=5), min_size=1, max_size=4)
TEXTS = st.lists(st.lists(st.text("ab ", max_size=6), min_size=2, max_size=5), min_size=1, max_size=4)
WORDS = st.lists(st.sampled_from("abcde"), min_size=1, max_size=9)


# ---- distinct n-grams ---------------------------------------------------------------------------


def test_distinct_n_grams_by_hand() -> None:
    texts = [["a", "b", "a", "b"], ["a", "b"], ["c"]]
    assert distinct_n(texts, 1) == 3 / 7
    assert distinct_n(texts, 2) == 2 / 4  # ab, ba, ab; ab
    assert distinct_n(texts, 4) == 1.0
    assert math.isnan(distinct_n(texts, 5))
    with pytest.raises(ValueError, match="distinct-0"):
        distinct_n(texts, 0)


# ---- BLEU ---------------------------------------------------------------------------------------


def slow_bleu(own: Sequence[int], others: Sequence[Sequence[int]]) -> float:
    """One completion against its siblings, as the docstring of `self_bleu` says."""
    logs = []
    for n in range(1, 5):
        count = Counter(tuple(own[at : at + n]) for at in range(len(own) - n + 1))
        if not count:
            break
        there = [Counter(tuple(ids[at : at + n]) for at in range(len(ids) - n + 1)) for ids in others]
        match = sum(min(times, max(other[gram] for other in there)) for gram, times in count.items())
        if match == 0 and n == 1:
            return 0.0
        logs.append(math.log((match or 0.1) / sum(count.values())))
    nearest = min((abs(len(ids) - len(own)), len(ids)) for ids in others)[1]
    return math.exp(min(0.0, 1 - nearest / len(own)) + sum(logs) / len(logs))


def slow_self_bleu(groups: Sequence[Sequence[Sequence[int]]]) -> float:
    each = [[slow_bleu(ids, [*group[:at], *group[at + 1 :]]) for at, ids in enumerate(group)] for group in groups]
    return sum(sum(values) / len(values) for values in each) / len(each)


def test_bleu_by_hand() -> None:
    # a = 5 6 7 8 9 against b = 5 6 7 4: ids 3/5, pairs 56 67 of four 2/4, triples 567 of three 1/3, fours 0 of two
    # 0.1/2; b is shorter: r = 4 < c = 5, no penalty.
    # b against a: ids 3/4, pairs 2/3, triples 1/2, fours 0.1/1; a is longer: exp(1 - 5/4).
    a, b = (5, 6, 7, 8, 9), (5, 6, 7, 4)
    of_a = (3 / 5 * 2 / 4 * 1 / 3 * 0.05) ** 0.25
    of_b = math.exp(-0.25) * (3 / 4 * 2 / 3 * 1 / 2 * 0.1) ** 0.25
    assert self_bleu([[a, b]], 0) == pytest.approx((of_a + of_b) / 2, abs=1e-12)
    # c = 7 7 against d = 7 and e = 7 7 7: 7 twice of two, as in e, and 77 once of one: 1; d is as near as e, and
    # shorter: no penalty. d: 1 of 1, no pairs; nearest is c: exp(1 - 2/1). e: ids 2 of 3, 77 1 of 2, 777 0.1 of 1.
    of_e = (2 / 3 * 1 / 2 * 0.1) ** (1 / 3)
    assert self_bleu([[(7, 7), (7,), (7, 7, 7)]], 0) == pytest.approx((1 + math.exp(-1) + of_e) / 3, abs=1e-12)
    # two prompts count the same, however many completions they have; one completion has no sibling
    assert self_bleu([[(7, 7), (7,), (7, 7, 7)], [(1, 2), (3, 4)], [(1, 2)]], 0) == pytest.approx(
        (1 + math.exp(-1) + of_e) / 6, abs=1e-12)
    assert math.isnan(self_bleu([[(1, 2)]], 0))


@settings(deadline=None, max_examples=200)
@given(GROUPS)
def test_bleu_of_all_prompts_at_once_against_a_loop(groups: list[list[list[int]]]) -> None:
    assert self_bleu(groups, 0) == pytest.approx(slow_self_bleu(groups), abs=1e-12)


def test_prompts_in_several_parts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    groups = [[rng.choices(range(4), k=rng.randint(1, 9)) for _ in range(rng.randint(2, 5))] for _ in range(11)]
    texts = [["".join(map(str, ids)) for ids in group] for group in groups]
    whole = self_bleu(groups, 0), embedding_distance(texts, EMBED)
    monkeypatch.setattr(room, "TOGETHER", 3)
    assert (self_bleu(groups, 0), embedding_distance(texts, EMBED)) == pytest.approx(whole, abs=1e-12)


def test_many_or_long_completions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_COMPLETIONS", 3)
    monkeypatch.setattr(room, "MOST_IDS", 2)
    group = [(n, 5, 10 * n, 7) for n in range(6)]
    found = self_bleu([group], 4)
    assert found == self_bleu([group[::-1]], 4)  # whatever their order
    cut = [ids[:2] for ids in group]
    subsets = [[cut[a], cut[b], cut[c]] for a in range(6) for b in range(a) for c in range(b)]
    assert any(found == pytest.approx(slow_self_bleu([subset])) for subset in subsets)
    spread = {self_bleu([[(1,), (1,), (1,), (2,), (3,), (4,)]], seed) for seed in range(20)}
    assert len(spread) > 1  # the seed draws


# ---- distance of wording ------------------------------------------------------------------------


def slow_hash(text: str) -> np.ndarray:
    vector, padded = np.zeros(DIMENSIONS), f" {text.lower()} ".encode("utf-8", "replace")
    for at in range(len(padded) - 2):
        vector[zlib.crc32(padded[at : at + 3]) % DIMENSIONS] += 1
    return vector / (np.linalg.norm(vector) or 1.0)


@settings(deadline=None)
@given(st.lists(st.text(max_size=12), max_size=5))
def test_hashing_each_gram_once_gives_the_same_vectors(texts: list[str]) -> None:
    expected = np.array([slow_hash(text) for text in texts]).reshape(len(texts), DIMENSIONS)
    assert EMBED(texts) == pytest.approx(expected, abs=1e-6)


def test_the_distance_by_hand() -> None:
    def embed(texts: Sequence[str]) -> np.ndarray:
        return np.array([{"x": (1, 0), "y": (0, 1), "d": (0.6, 0.8), "": (0, 0)}[text] for text in texts], np.float32)

    # x y: cosine 0; x d: 0.6; y d: 0.8; mean distance 1 - 1.4 / 3
    assert embedding_distance([["x", "y", "d"]], embed) == pytest.approx(1 - 1.4 / 3, abs=1e-7)
    # x x y: one pair of three alike
    assert embedding_distance([["x", "x", "y"], ["d", "d"]], embed) == pytest.approx((2 / 3 + 0) / 2, abs=1e-7)
    assert embedding_distance([["", "", "x"]], embed) == pytest.approx(2 / 3)  # the empty ones are one
    assert math.isnan(embedding_distance([["x"]], embed))


@settings(deadline=None)
@given(TEXTS)
def test_the_distance_against_a_loop_over_pairs(groups: list[list[str]]) -> None:
    each = []
    for group in groups:
        vectors = [slow_hash(text) for text in group]
        pairs = [(i, j) for i in range(len(group)) for j in range(i)]
        same = [1.0 if not (vectors[i].any() or vectors[j].any()) else float(vectors[i] @ vectors[j]) for i, j in pairs]
        each.append(1 - sum(same) / len(same))
    assert embedding_distance(groups, EMBED) == pytest.approx(sum(each) / len(each), abs=1e-6)


def test_long_texts_are_read_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_CHARACTERS", 3)
    assert embedding_distance([["abcdef", "abcxyz"]], EMBED) == 0.0


# ---- answers ------------------------------------------------------------------------------------


def test_effective_answers_by_hand() -> None:
    # 7 7 8 none: shares 1/2 1/4 1/4, entropy 1/2 log 2 + 1/2 log 4 = 1.5 log 2; three seen of four: + 2/8
    plain = 2**1.5
    assert effective(["7", "7", "8", None], is_corrected=False) == pytest.approx(plain, abs=1e-12)
    assert effective(["7", "7", "8", None]) == pytest.approx(plain * math.exp(0.25), abs=1e-12)
    # a prompt with one answer has 1
    assert effective_answers([["7", "7", "8", None], ["9"] * 4, []]) == pytest.approx((plain * math.exp(0.25) + 1) / 2)
    assert math.isnan(effective_answers([]))


@pytest.mark.parametrize("shares", [[0.9, 0.1], [0.7, 0.2, 0.1], [0.125] * 8])
@pytest.mark.parametrize("completions", [4, 8])
def test_the_correction_brings_it_nearer_to_the_truth(shares: list[float], completions: int) -> None:
    rng = random.Random(7)
    truth = math.exp(-sum(p * math.log(p) for p in shares))
    drawn = [rng.choices(range(len(shares)), shares, k=completions) for _ in range(4000)]
    plain, corrected = (sum(effective(d, is_corrected=c) for d in drawn) / 4000 for c in (False, True))
    assert plain < corrected < 1.02 * truth
    assert abs(corrected - truth) < 0.8 * abs(plain - truth)


def test_kinds_name_the_first_of_each_answer_and_vote_as_answers_do() -> None:
    halves = {"1/2", "0.5", "0.50"}

    def same(one: str, other: str) -> bool:
        return {one, other} <= halves

    answers = [None, "3", "1/2", "0.5", None, "3", "7", "0.50"]
    assert kinds(answers, same) == [None, 1, 2, 2, None, 1, 6, 2]
    assert vote_of([None, 1, 2, 2, None, 1, 6, 2], [False, False, True, True, False, False, False, True]) == 1.0
    assert vote_of(kinds(answers, same), [False, True, False, False, False, True, False, False]) == 0.0


# ---- what must hold -----------------------------------------------------------------------------


@settings(deadline=None)
@given(IDS, st.text(max_size=9), st.integers(2, 20))
def test_the_same_completions_are_not_diverse(ids: list[int], text: str, completions: int) -> None:
    assert self_bleu([[ids] * completions], 0) == pytest.approx(1.0, abs=1e-12)
    assert embedding_distance([[text] * completions], EMBED) == pytest.approx(0.0, abs=1e-12)
    assert effective_answers([[text] * completions]) == 1.0


@given(st.integers(2, 30))
def test_different_completions_are(completions: int) -> None:
    assert self_bleu([[(2 * n, 2 * n + 1) for n in range(completions)]], 0) == 0.0
    assert effective(range(completions), is_corrected=False) == pytest.approx(completions)


@settings(deadline=None)
@given(GROUPS, st.randoms(use_true_random=False))
def test_the_order_of_completions_and_of_prompts_changes_nothing(
    groups: list[list[list[int]]], rng: random.Random
) -> None:
    mixed = [rng.sample(group, len(group)) for group in rng.sample(groups, len(groups))]
    texts, mixed_texts = ([["".join(map(str, ids)) for ids in group] for group in of] for of in (groups, mixed))
    assert self_bleu(mixed, 0) == pytest.approx(self_bleu(groups, 0), abs=1e-12)
    assert embedding_distance(mixed_texts, EMBED) == pytest.approx(embedding_distance(texts, EMBED), abs=1e-9)
    assert effective_answers(mixed_texts) == pytest.approx(effective_answers(texts), abs=1e-12)


@given(WORDS)
def test_effective_answers_lie_between_one_and_those_seen(answers: list[str]) -> None:
    plain = effective(answers, is_corrected=False)
    assert 1.0 - 1e-12 <= plain <= len(set(answers)) + 1e-9
    assert effective(answers) >= plain
