"""The columns of what is held: one row per trajectory, rows used again, no object of its own for any."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from tba.records import Prompt

COLUMNS = {
    "number": "q", "digest": "q", "reward": "d", "version": "i", "pool": "i", "segment": "i", "at": "i", "length": "i",
    "uses": "i", "slot": "i", "window": "i", "older": "i", "newer": "i", "pool_older": "i", "pool_newer": "i",
    "next_copy": "i", "copy": "i",
}
"""Columns by name, as array codes."""
MORE = 16
"""Columns grow by this part of what they hold."""
KINDS = {"q": np.int64, "d": np.float64, "i": np.int32}


class Rows:
    """Columns of equal length; a row whose `segment` is -1 is free."""

    __slots__ = (*COLUMNS, "_free", "_used")

    number: array[int]
    """Place of the trajectory in the order of insertion, over the whole run."""
    digest: array[int]
    """Of its prompt and its ids; 0 where nobody asks for it."""
    reward: array[float]
    version: array[int]
    pool: array[int]
    segment: array[int]
    at: array[int]
    """Place in its segment."""
    length: array[int]
    """Tokens."""
    uses: array[int]
    slot: array[int]
    """Place in its pool."""
    window: array[int]
    """Place among the recent of its pool, or -1."""
    older: array[int]
    newer: array[int]
    pool_older: array[int]
    pool_newer: array[int]
    next_copy: array[int]
    """Next row whose digest falls into the same bucket, or -1."""
    copy: array[int]
    """The n-th copy of its ids when it came; 0 where nobody asks for it."""

    def __init__(self) -> None:
        for name, code in COLUMNS.items():
            setattr(self, name, array(code))
        self._used = 0
        self._free = array("i")

    def __len__(self) -> int:
        return self._used

    def new(self, count: int) -> list[int]:
        """Rows to be filled: those that came free last first, then ones that never were in use."""
        free, first = self._free, self._used
        found = [free.pop() for _ in range(min(count, len(free)))]
        self._used += count - len(found)
        if self._used > len(self.number):
            more = max(self._used - len(self.number), len(self.number) // MORE, 64)
            for name, code in COLUMNS.items():
                getattr(self, name).extend(array(code, [-1]) * more)
        found.extend(range(first, self._used))
        return found

    def free(self, row: int) -> None:
        """Takes a row back."""
        self.segment[row] = -1
        self._free.append(row)

    def fill(self, columns: dict[str, np.ndarray]) -> None:
        """Replaces all rows by `columns`, of equal length; columns left out become -1."""
        count = len(columns["number"])
        for name, code in COLUMNS.items():
            values = columns.get(name, np.full(count, -1))
            setattr(self, name, array(code, np.ascontiguousarray(values, KINDS[code]).tobytes()))
        self._used = count
        self._free = array("i")

    def view(self, name: str) -> np.ndarray:
        """A column as an array that shares its memory; let go of it before a row is added."""
        return np.frombuffer(getattr(self, name), KINDS[COLUMNS[name]])[: self._used]

    def held(self) -> np.ndarray:
        """Rows in use, in order of insertion."""
        rows = np.flatnonzero(self.view("segment") >= 0)
        return rows[np.argsort(self.view("number")[rows], kind="stable")]

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(len(self.number) * array(code).itemsize for code in COLUMNS.values()) + 4 * len(self._free)


def places_by(keys: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each value among `keys`, ascending, with the places that hold it."""
    order = np.argsort(keys, kind="stable")
    found, starts = np.unique(keys[order], return_index=True)
    yield from zip(found.tolist(), np.split(order, starts[1:]), strict=False)


class Pool:
    """The rows of one prompt."""

    __slots__ = ("newest", "number", "oldest", "prompt", "rows", "trees", "window")

    def __init__(self, number: int, prompt: Prompt) -> None:
        """`number` is its place in the order in which prompts were first seen."""
        self.number, self.prompt = number, prompt
        self.rows = array("i")
        """In no order of meaning; the place of each is its slot."""
        self.window = array("i")
        """The recent ones among them."""
        self.oldest = self.newest = -1
        self.trees: tuple = ()
        """One per name in `Storage.trees`, over slots; made with the first row."""
