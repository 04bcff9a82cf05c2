"""Answers of mathematics: right or wrong, by one function for training and evaluation."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tba.rewards.answers.extraction import final_answer
    from tba.rewards.answers.judge import STYLES, BadGold, bad_golds, correct, correct_all
    from tba.rewards.answers.paper import paper_number
    from tba.rewards.answers.pool import Pool, shared_pool

__all__ = [
    "STYLES", "BadGold", "Pool", "bad_golds", "correct", "correct_all", "final_answer", "paper_number", "shared_pool",
]  # fmt: skip
_ROOMS = {"Pool": "pool", "shared_pool": "pool", "paper_number": "paper", "final_answer": "extraction"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it exports {', '.join(__all__)}.")
    return getattr(import_module(f"tba.rewards.answers.{_ROOMS.get(name, 'judge')}"), name)
