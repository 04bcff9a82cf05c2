"""How unlike the completions of a prompt are: in words, in wording, in answers."""

# Shape legend: P prompts, K completions of a prompt, N completions of all prompts, T token ids, G n-grams.

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

LONGEST_GRAM = 4
"""BLEU-4."""
ALMOST_NONE = 0.1
"""N-grams that count as found where none of two ids or more is."""
MOST_COMPLETIONS = 64
"""Completions of a prompt that BLEU compares with each other."""
MOST_IDS = 512
"""Ids of a completion that BLEU reads."""
MOST_CHARACTERS = 4096
"""Characters of a completion that are embedded."""
TOGETHER = 16
"""Prompts worked on at once, which bounds memory."""


def distinct_n(texts: Sequence[Sequence[Hashable]], n: int) -> float:
    """Share of distinct ones among all n-grams of the texts (words or ids); NaN if none is that long."""
    if n < 1:
        raise ValueError(f"distinct-{n} counts no n-grams; n must be 1 or more.")
    grams = [tuple(text[at : at + n]) for text in texts for at in range(len(text) - n + 1)]
    return len(set(grams)) / len(grams) if grams else math.nan


# ---- BLEU of each completion against its siblings -----------------------------------------------------


def self_bleu(ids_PK: Sequence[Sequence[Sequence[int]]], seed: int) -> float:
    """Mean over prompts of the mean BLEU-4 of each completion against its siblings (arXiv 1802.01886), on ids.

    BLEU is `BP exp(mean_n log p_n)` (Papineni et al. 2002), n = 1 to 4, less for a completion that is shorter: p_n is
    the share of the completion's n-grams that a sibling has, each counted as often as in the sibling that has most
    of it; BP = exp(1 - r/c) for a completion of c ids whose nearest sibling, the shorter of two as near, has r > c.
    Smoothing 1 of Chen and Cherry (2014): for n > 1 no match counts as 0.1; without a single id in common BLEU is 0.
    1 where all are the same, whatever their length; 0 where no two share an id.

    Bounded: of a prompt with more than `MOST_COMPLETIONS` completions a subset of that many is compared, drawn with
    `seed` whatever their order, and of each completion the first `MOST_IDS` ids. NaN without a prompt of two.
    """
    rng = random.Random(seed)
    found: list[float] = []
    several = [ids_K for ids_K in ids_PK if len(ids_K) > 1]
    for at in range(0, len(several), TOGETHER):
        chosen = [_bounded(ids_K, rng) for ids_K in several[at : at + TOGETHER]]
        bleu_N = iter(_bleus(chosen).tolist())
        found += [math.fsum(next(bleu_N) for _ in ids_K) / len(ids_K) for ids_K in chosen]
    return math.fsum(found) / len(found) if found else math.nan


def _bounded(ids_K: Sequence[Sequence[int]], rng: random.Random) -> list[Sequence[int]]:
    cut = [tuple(ids[:MOST_IDS]) for ids in ids_K]
    return [*cut] if len(cut) <= MOST_COMPLETIONS else [*rng.sample(sorted(cut), MOST_COMPLETIONS)]


def _bleus(ids_PK: Sequence[Sequence[Sequence[int]]]) -> npt.NDArray[np.float64]:
    """[N] BLEU of each completion, in order; no prompt has fewer than two, no completion is empty."""
    length_N = np.array([len(ids) for ids_K in ids_PK for ids in ids_K])
    prompt_N = np.repeat(np.arange(len(ids_PK)), [len(ids_K) for ids_K in ids_PK])
    log_N, orders_N, is_foreign_N = np.zeros(len(length_N)), np.zeros(len(length_N)), np.zeros(len(length_N), bool)
    for n, (gram_G, owner_G) in enumerate(_grams(ids_PK, length_N), 1):
        total_N = np.maximum(length_N - n + 1, 0)
        match_N = _matches(gram_G, owner_G, prompt_N)
        has = total_N > 0
        share_N = np.where(match_N > 0, match_N, ALMOST_NONE) / np.maximum(total_N, 1)
        log_N[has] += np.log(share_N[has])
        orders_N += has
        if n == 1:
            is_foreign_N = match_N == 0
    nearest_N = np.array([near for ids_K in ids_PK for near in _nearest([len(ids) for ids in ids_K])])
    brevity_N = np.where(nearest_N > length_N, 1 - nearest_N / length_N, 0.0)
    return np.where(is_foreign_N, 0.0, np.exp(brevity_N + log_N / orders_N))


def _grams(ids_PK: Sequence[Sequence[Sequence[int]]], length_N: Ids) -> Iterator[tuple[Ids, Ids]]:
    """For n = 1, 2, ...: a number for every n-gram, the same for the same one, and whose completion it is in."""
    _, ids_T = np.unique([id for ids_K in ids_PK for ids in ids_K for id in ids], return_inverse=True)
    owner_T = np.repeat(np.arange(len(length_N)), length_N)
    left_T = np.repeat(np.cumsum(length_N), length_N) - np.arange(len(ids_T))  # ids from here to the completion's end
    place_G, gram_G, size = np.arange(len(ids_T)), ids_T, int(ids_T.max()) + 1
    for n in range(1, LONGEST_GRAM + 1):
        if n > 1:
            goes_on = left_T[place_G] >= n
            place_G = place_G[goes_on]
            _, gram_G = np.unique(gram_G[goes_on] * size + ids_T[place_G + n - 1], return_inverse=True)
        yield gram_G, owner_T[place_G]


def _matches(gram_G: Ids, owner_G: Ids, prompt_N: Ids) -> Ids:
    """[N] n-grams of each completion that a sibling has, as often as the sibling that has most of them."""
    if not len(gram_G):
        return np.zeros(len(prompt_N), np.int64)
    size = int(gram_G.max()) + 1
    pair, count = np.unique(owner_G * size + gram_G, return_counts=True)
    owner, gram = pair // size, pair % size
    order = np.lexsort((-count, gram, prompt_N[owner]))
    owner, count, key = owner[order], count[order], prompt_N[owner[order]] * size + gram[order]
    is_first = np.append(True, key[1:] != key[:-1])
    best = count[is_first][np.cumsum(is_first) - 1]
    goes_on = np.append(~is_first[1:], False)
    second = np.where(goes_on, np.append(count[1:], 0), 0)  # of the first of a run: the most that another has
    shared = np.minimum(count, np.where(is_first, second, best))
    return np.bincount(owner, shared, len(prompt_N)).astype(np.int64)


def _nearest(length_K: Sequence[int]) -> Iterator[int]:
    """Of each length, the nearest of the others, the shorter of two as near."""
    rank = sorted(range(len(length_K)), key=length_K.__getitem__)
    found = [0] * len(rank)
    for below, here in pairwise(rank):
        found[here] = length_K[below]
    for here, above in pairwise(rank):
        if found[here] == 0 or length_K[above] - length_K[here] < length_K[here] - found[here]:
            found[here] = length_K[above]
    yield from found


# ---- distance of wording ------------------------------------------------------------------------------


def embedding_distance(
    texts_PK: Sequence[Sequence[str]], embed: Callable[[Sequence[str]], npt.NDArray[np.float32]]
) -> float:
    """Mean over prompts of 1 minus the mean cosine of all pairs of a prompt's completions.

    `embed` gives unit vectors (`tba.embeddings`); texts that have none, as empty ones, are taken as one and the same,
    and as at right angles to all others. Bounded: the first `MOST_CHARACTERS` characters are read. The mean cosine is
    (|sum v|^2 - sum |v|^2) / (K (K - 1)). NaN without a prompt of two.
    """
    found: list[float] = []
    several = [[text[:MOST_CHARACTERS] for text in texts_K] for texts_K in texts_PK if len(texts_K) > 1]
    for at in range(0, len(several), TOGETHER):
        part = several[at : at + TOGETHER]
        unlike = list(dict.fromkeys(text for texts_K in part for text in texts_K))
        vectors = dict(zip(unlike, _unit(embed(unlike).astype(np.float64)), strict=True))
        for texts_K in part:
            times = Counter(texts_K)
            total = np.sum([count * vectors[text] for text, count in times.items()], axis=0)
            own_K = {text: float(vectors[text] @ vectors[text]) for text in times}
            none = sum(count for text, count in times.items() if own_K[text] == 0.0)
            own = math.fsum(count * own_K[text] for text, count in times.items())
            pairs = len(texts_K) * (len(texts_K) - 1)
            found.append(1.0 - (float(total @ total) - own + none * (none - 1)) / pairs)
    return max(0.0, math.fsum(found) / len(found)) if found else math.nan  # rounding may leave -1e-16


def _unit(vectors_ND: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    length_N1 = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
    return vectors_ND / np.where(length_N1 > 0, length_N1, 1.0)


# ---- answers ------------------------------------------------------------------------------------------


def effective(answers_K: Sequence[Hashable], *, is_corrected: bool = True) -> float:
    """exp of the entropy of the answers: how many equally frequent ones are as uncertain.

    The entropy of observed shares, `-sum_a (n_a/K) log(n_a/K)`, is too low on average; Miller and Madow's correction
    adds (answers seen - 1) / 2K (Miller 1955). Corrected, it may exceed K; uncorrected, K different answers give K.
    Either is still too low where most answers have not been seen: compare runs at the same K.
    """
    count, times = len(answers_K), Counter(answers_K).values()
    entropy = -math.fsum(n / count * math.log(n / count) for n in times)
    return math.exp(entropy + (len(times) - 1) / (2 * count) * is_corrected)


def effective_answers(answers_PK: Sequence[Sequence[Hashable]]) -> float:
    """Mean over prompts of `effective`, corrected; NaN of none."""
    found = [effective(answers_K) for answers_K in answers_PK if answers_K]
    return math.fsum(found) / len(found) if found else math.nan
