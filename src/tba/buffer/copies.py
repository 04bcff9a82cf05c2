"""Which trajectories of a prompt are copies of each other: by the same ids, or by nearly the same."""

from __future__ import annotations

import bisect
from array import array
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from tba.buffer.rows import Rows

NGRAM = 3
"""Ids in a row that count as one feature of a completion."""
BANDS, PER_BAND = 8, 3
"""Two completions are compared if all minima of one band agree: at a similarity s, with probability
1 - (1 - s^3)^8, which is 0.99 at 0.75 and 0.18 at 0.3."""
MOST_COMPARED = 8
"""Newest candidates of each band that a newcomer is compared with."""


def digests_of(pool: int, ids: np.ndarray, lengths: Sequence[int]) -> list[int]:
    """64-bit numbers that stand for completions of a pool, whose int32 ids lie one after another."""
    data, at = ids.tobytes(), 0
    start, found = blake2b(pool.to_bytes(4, "little"), digest_size=8), list[int]()
    for length in lengths:
        state = start.copy()
        state.update(data[at : at + 4 * length])
        found.append(int.from_bytes(state.digest(), "little", signed=True))
        at += 4 * length
    return found


class Copies:
    """Rows by digest, chained through a column of the rows: about eight bytes for each."""

    def __init__(self, rows: Rows) -> None:
        """`rows` are those of the storage, none of which may be in use."""
        self._rows = rows
        self._heads = array("i", [-1]) * 1024
        self._count = 0

    def of(self, digest: int) -> list[int]:
        """Rows with this digest, newest first."""
        rows, found = self._rows, []
        row = self._heads[digest & (len(self._heads) - 1)]
        while row >= 0:
            if rows.digest[row] == digest:
                found.append(row)
            row = rows.next_copy[row]
        return found

    def add(self, row: int) -> None:
        """Notes a row, whose digest is set."""
        if self._count >= len(self._heads):
            self.rebuild([*self._all()])
        bucket = self._rows.digest[row] & (len(self._heads) - 1)
        self._rows.next_copy[row] = self._heads[bucket]
        self._heads[bucket] = row
        self._count += 1

    def remove(self, row: int) -> None:
        """Forgets a row that is about to leave."""
        rows = self._rows
        bucket = rows.digest[row] & (len(self._heads) - 1)
        before, at = -1, self._heads[bucket]
        while at != row:
            before, at = at, rows.next_copy[at]
        if before < 0:
            self._heads[bucket] = rows.next_copy[row]
        else:
            rows.next_copy[before] = rows.next_copy[row]
        self._count -= 1

    def rebuild(self, held: Sequence[int]) -> None:
        """Chains `held`, in order of insertion, anew."""
        size = len(self._heads)
        while size <= len(held):
            size *= 2
        self._heads = array("i", [-1]) * size
        self._count = 0
        for row in held:
            self.add(row)

    def _all(self) -> list[int]:
        found = []
        for row in self._heads:
            while row >= 0:
                found.append(row)
                row = self._rows.next_copy[row]
        return sorted(found, key=self._rows.number.__getitem__)


class Counts:
    """How many copies of each digest are held."""

    def __init__(self) -> None:
        self._count = Counter[int]()

    def add(self, digest: int) -> int:
        """One more; returns how many there are now."""
        self._count[digest] += 1
        return self._count[digest]

    def remove(self, digest: int) -> None:
        """One less."""
        self._count[digest] -= 1
        if not self._count[digest]:
            del self._count[digest]


class NearCopies:
    """Rows by what MinHash keeps of their n-grams, so that a newcomer is compared with a bounded number."""

    def __init__(self, similarity: float) -> None:
        """`similarity` is the share of common n-grams (Jaccard) from which two completions are near copies."""
        self._similarity = similarity
        self._bands: dict[tuple[int, ...], list[int]] = {}

    def add(self, row: int, number: int, pool: int, ids: np.ndarray) -> None:
        """Notes a row; numbers ascend."""
        for key in band_keys(pool, ids):
            self._bands.setdefault(key, []).append(number << 32 | row)

    def remove(self, row: int, number: int, pool: int, ids: np.ndarray) -> None:
        """Forgets a row."""
        for key in band_keys(pool, ids):
            members = self._bands[key]
            del members[bisect.bisect_left(members, number << 32 | row)]
            if not members:
                del self._bands[key]

    def candidates(self, pool: int, ids: np.ndarray) -> list[int]:
        """Rows that may be near copies, oldest first, at most `BANDS * MOST_COMPARED`."""
        found: set[int] = set()
        for key in band_keys(pool, ids):
            found.update(self._bands.get(key, [])[-MOST_COMPARED:])
        return [member & 0xFFFFFFFF for member in sorted(found)]

    def near(self, ids: np.ndarray, others: np.ndarray) -> bool:
        """Whether two completions are near copies."""
        return similarity(ids, others) >= self._similarity


def similarity(ids: np.ndarray, others: np.ndarray) -> float:
    """Jaccard index of the sets of n-grams of two completions."""
    one, two = set(ngrams(ids).tolist()), set(ngrams(others).tolist())
    return len(one & two) / len(one | two)


def ngrams(ids: np.ndarray) -> np.ndarray:
    """Every n-gram of the ids as a 64-bit number; of fewer ids than that, all of them as one."""
    ids = np.append(ids, np.full(max(0, NGRAM - len(ids)), -1, np.int32))
    windows = np.lib.stride_tricks.sliding_window_view(ids, NGRAM).astype(np.uint64) + np.uint64(1)
    return _mixed(windows.T)


def band_keys(pool: int, ids: np.ndarray) -> list[tuple[int, ...]]:
    """The keys under which a completion is found: minima of its n-grams under several hashes, banded."""
    places = np.arange(1, BANDS * PER_BAND + 1, dtype=np.uint64)[:, None]
    odd = places * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
    hashed = ngrams(ids)[None, :] * odd
    hashed ^= hashed >> np.uint64(29)
    hashed *= np.uint64(0xBF58476D1CE4E5B9)
    minima = (hashed >> np.uint64(16)).min(1).reshape(BANDS, PER_BAND).tolist()
    return [(pool, band, *minimum) for band, minimum in enumerate(minima)]


def _mixed(parts: np.ndarray) -> np.ndarray:
    """[n, ...] of 64-bit numbers to [...], in an order that matters."""
    mixed = np.zeros(parts.shape[1:], np.uint64)
    for part in parts:
        mixed = (mixed ^ part) * np.uint64(0x9E3779B97F4A7C15)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed
