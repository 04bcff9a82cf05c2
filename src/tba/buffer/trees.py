"""Trees over places, kept in flat arrays: every change and every draw costs the logarithm of the size."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from math import exp, log1p

NOTHING = -math.inf
"""Log of no mass."""


def log_add(a: float, b: float) -> float:
    """Log(exp(a) + exp(b)), without overflow; minus infinity stands for nothing."""
    if a < b:
        a, b = b, a
    return a if b == NOTHING else a + log1p(exp(b - a))


class Tree:
    """A value per place, and what `combine` makes of all of them.

    A node is a function of the two below it and of nothing else, so equal values at equal places give equal
    nodes to the bit, whatever happened before.
    """

    __slots__ = ("_combine", "_empty", "_size", "node")

    def __init__(self, combine: Callable[[float, float], float], empty: float, values: Sequence[float] = ()) -> None:
        """`combine` of `empty` and x is x."""
        self._combine, self._empty = combine, empty
        self._size = 1 << max(0, len(values) - 1).bit_length()
        kind = "q" if isinstance(empty, int) else "d"
        self.node = array(kind, [empty]) * (2 * self._size)
        self.node[self._size : self._size + len(values)] = array(kind, values)
        for at in range(self._size - 1, 0, -1):
            self.node[at] = combine(self.node[2 * at], self.node[2 * at + 1])

    @property
    def root(self) -> float:
        """What `combine` makes of all values."""
        return self.node[1]

    @property
    def size(self) -> int:
        """Places before the tree must grow; leaves begin at this node."""
        return self._size

    def __getitem__(self, place: int) -> float:
        return self.node[self._size + place]

    def put(self, place: int, value: float) -> None:
        """Sets the value at a place, which may lie beyond the size."""
        while place >= self._size:
            self._grow()
        node, combine = self.node, self._combine
        at = self._size + place
        node[at] = value
        at >>= 1
        if combine is log_add:  # written out: this is most of the time that an addition takes
            while at:
                a, b = node[2 * at], node[2 * at + 1]
                if a < b:
                    a, b = b, a
                node[at] = a if b == NOTHING else a + log1p(exp(b - a))
                at >>= 1
            return
        while at:
            node[at] = combine(node[2 * at], node[2 * at + 1])
            at >>= 1

    def clear(self, place: int) -> None:
        """Empties a place."""
        self.put(place, self._empty)

    def _grow(self) -> None:
        """Doubles the places: what was there becomes the left half."""
        old, size = self.node, self._size
        self.node = array(old.typecode, [self._empty]) * (4 * size)
        width = 1
        while width <= size:
            self.node[2 * width : 3 * width] = old[width : 2 * width]
            width *= 2
        self._size = 2 * size
        self.node[1] = self.node[2]


def find(tree: Tree, share: float) -> int:
    """The place at `share` (0 to 1) of the mass of a tree of log-weights; not all of them may be minus infinity."""
    node, at = tree.node, 1
    while at < tree.size:
        at *= 2
        left, right = node[at], node[at + 1]
        if right == NOTHING:
            continue
        part = exp(left - log_add(left, right)) if left != NOTHING else 0.0
        if share < part:
            share /= part
        else:
            share = (share - part) / (1.0 - part) if part < 1.0 else 0.0
            at += 1
    return at - tree.size


class Ranks:
    """A set of numbers from 0 on, of which some may be hidden; gives the n-th smallest that is not.

    Draws from it depend on its members alone, never on the order in which they came.
    """

    __slots__ = ("_count", "_size", "_state", "hidden", "left")

    def __init__(self, members: Sequence[int] = ()) -> None:
        """`members` are its first numbers."""
        self._size = 1 << max(members, default=0).bit_length()
        self._state = bytearray(self._size)
        self.left, self.hidden = len(members), set[int]()
        for member in members:
            self._state[member] = 1
        self._rebuild()

    def __len__(self) -> int:
        return self.left + len(self.hidden)

    def __contains__(self, number: int) -> bool:
        return number < self._size and bool(self._state[number])

    def add(self, number: int) -> None:
        """Makes `number`, which is no member, one."""
        if number >= self._size:
            self._size = 1 << number.bit_length()
            self._state.extend(bytes(self._size - len(self._state)))
            self._rebuild()
        self._state[number] = 1
        self._move(number, 1)

    def discard(self, number: int) -> None:
        """Takes a member out, hidden or not."""
        self._state[number] = 0
        if number in self.hidden:
            self.hidden.remove(number)
        else:
            self._move(number, -1)

    def hide(self, number: int) -> None:
        """Keeps a visible member from being drawn until it is shown again."""
        self.hidden.add(number)
        self._move(number, -1)

    def show(self, number: int) -> None:
        """Ends `hide`; nothing happens to a number that is not hidden."""
        if number in self.hidden:
            self.hidden.remove(number)
            self._move(number, 1)

    def nth(self, rank: int) -> int:
        """The member with `rank` visible ones below it."""
        at, step = 0, self._size
        while step:
            if at + step <= self._size and self._count[at + step] <= rank:
                at += step
                rank -= self._count[at]
            step >>= 1
        return at

    def _move(self, number: int, change: int) -> None:
        self.left += change
        at = number + 1
        while at <= self._size:
            self._count[at] += change
            at += at & -at

    def _rebuild(self) -> None:
        self._count = array("q", [0, *(1 if s and n not in self.hidden else 0 for n, s in enumerate(self._state))])
        for at in range(1, self._size + 1):
            above = at + (at & -at)
            if above <= self._size:
                self._count[above] += self._count[at]
