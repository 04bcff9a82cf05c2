"""Newer weights for a batch that is being sampled: asked for, never waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tba.weights import Tensors, Weights


class Announced(Protocol):
    """A publication without its tensors."""

    @property
    def version(self) -> int:
        """Optimizer steps the weights have had."""
        ...

    def weights(self, tensors: Tensors) -> Weights:
        """The publication with them."""
        ...


class Lookout:
    """Looks at the newest publication every few tokens. No look waits: it begins what a later one picks up.

    A question is under way all the time; once its answer is newer weights, their tensors are on the way, and are
    read when they are on this machine. So decoding goes on meanwhile, with the old weights.
    """

    def __init__(
        self, every: int, *, ask: Callable[[], Any], is_here: Callable[[Any], bool], read: Callable[[Any], Any]
    ) -> None:
        """A look each `every` new tokens.

        `ask` returns at once, with a handle of (newest publication or None, [handle of its tensors]). `is_here` says
        of a handle, at once, whether `read` would give what it stands for without waiting, and has it sent if not.
        """
        self.every = every
        self._ask, self._is_here, self._read = ask, is_here, read
        self._asked: Any = None
        self._coming: tuple[Announced, Any] | None = None
        """A newer publication, and the handle of its tensors."""

    def newer(self, version: int) -> Weights | None:
        """A publication newer than `version`, if one is here."""
        if self._coming is None:
            self._coming = self._answer()
        if self._coming is None or self._coming[0].version <= version:
            self._coming = None
            return None
        announced, tensors = self._coming
        if not self._is_here(tensors):
            return None
        self._coming = None
        return announced.weights(self._read(tensors))

    def _answer(self) -> tuple[Announced, Any] | None:
        """What the newest publication was when it was last asked for; the next question is under way afterwards."""
        if self._asked is None:
            self._asked = self._ask()
        if not self._is_here(self._asked):
            return None
        found: tuple[Announced | None, Sequence[Any]] = self._read(self._asked)
        self._asked = self._ask()
        return None if found[0] is None else (found[0], found[1][0])
