"""Killable processes that judge what only a computer algebra system can; a bool comes back."""

from __future__ import annotations

import os
import threading
from functools import cache

from tba.rewards.child import Child

START_LIMIT_S = 120.0
"""Seconds a process may take to load the algebra system; no answer's limit runs meanwhile."""
LIMIT_S = 3.0
"""Seconds of wall-clock time for one answer in the shared pool."""
SIZE = 2
"""Processes of the shared pool."""
ENTRY = "tba.rewards.answers.symbolic:serve"
MAX_MEMORY = 2 << 30
"""Bytes of address space of one process."""


class Pool:
    """Up to `size` processes, started when first needed; any thread may ask.

    One that outlasts the limit or dies is replaced; its answer is False.
    """

    def __init__(self, size: int = SIZE, *, limit_s: float = LIMIT_S, entry: str = ENTRY) -> None:
        """`entry` is `module:function` of a body as `tba.rewards.child` describes it, given `limit_s` as text."""
        self.size, self.limit_s = size, limit_s
        self.replaced = 0
        """Processes that were killed or died."""
        self._entry = entry
        self._free: list[Child | None] = [None] * size
        self._lent = 0
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def alive(self) -> list[int]:
        """Ids of the processes that are not busy."""
        with self._changed:
            return [child.pid for child in self._free if child is not None]

    def start(self) -> None:
        """Starts every process and waits until all are ready; asking does so too, one by one."""
        with self._changed:
            started = [child or Child(self._entry, str(self.limit_s)) for child in self._free]
            self._free = [*started]
            for child in started:
                self._await(child)

    def equal(self, gold: str, answer: str) -> bool:
        """Whether the algebra system shows them equal within the limit."""
        child = self._borrow()
        try:
            child = child or Child(self._entry, str(self.limit_s))
            self._await(child)
            return child.ask((gold, answer), self.limit_s) is True
        except (OSError, EOFError):  # no answer within the limit, or the process died
            if child is not None:
                child.close()
                child = Child(self._entry, str(self.limit_s))  # loads while the next answers are judged
            self.replaced += 1
            return False
        finally:
            self._give_back(child)

    def _await(self, child: Child) -> None:
        if not child.is_ready(START_LIMIT_S):
            child.close()
            raise RuntimeError(
                f"a process of the answer pool ({self._entry}) did not start within {START_LIMIT_S:g} s; "
                "is math-verify installed? `pip install math-verify` and try again."
            )

    def _borrow(self) -> Child | None:
        with self._changed:
            while self._lent == self.size:
                # Bounded: every loan ends within the limit or the time that a start may take.
                self._changed.wait()
            if self._is_closed:
                raise RuntimeError(f"this answer pool of {self.size} processes is closed; make another.")
            self._lent += 1
            self._free.sort(key=lambda child: child is not None)  # the ready ones last
            return self._free.pop()

    def _give_back(self, child: Child | None) -> None:
        with self._changed:
            self._lent -= 1
            if self._is_closed and child is not None:
                child.close()
                child = None
            self._free.append(child)
            self._changed.notify()

    def close(self) -> None:
        """Ends all processes; those that are asked something end when they are given back."""
        with self._changed:
            self._is_closed = True
            for child in self._free:
                if child is not None:
                    child.close()
            self._free = [None] * len(self._free)


def shared_pool() -> Pool:
    """The pool of this process, made at the first call; its processes end with it."""
    return _pool_of(os.getpid())


@cache
def _pool_of(pid: int) -> Pool:
    """A forked child must not share its parent's pipes, so each process id has its own."""
    return Pool()
